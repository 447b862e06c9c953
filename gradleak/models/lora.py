"""Low-rank adapters: clients train and share only these (Hu et al., LoRA, ICLR 2022)."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np

from gradleak.core import errors, trees
from gradleak.core.reuse import reusable
from gradleak.core.settings import Range, ranged
from gradleak.core.trees import Layer, Tree
from gradleak.models.model import FirstBlock, ImageShape, Model, wrapped
from gradleak.models.state_dict import Entry, Layout

CITATION = (
  'Hu, Shen, Wallis, Allen-Zhu, Li, Wang, Wang, Chen: LoRA: Low-Rank Adaptation of Large Language Models. ICLR 2022.'
)
_BASE = 'base'  # the collection of the weights that stay as they are


@ranged
@reusable(128)
def lora(
  model: Model,
  *,
  rank: Annotated[int, Range(1, 4096)] = 4,
  alpha: Annotated[float, Range(1e-6, finite=True)] = 8.0,
  only: str = '',
) -> Model:
  r"""Returns `model` with W + (alpha / rank)·A·B in place of each weight matrix W, of which A and B are the parameters.

  A is drawn from N(0, 1/rows) and B is zero, so that the network starts as `model`. Everything else, biases and norms
  too, stands in the collection 'base' of the variables and is neither trained nor shared. The running statistics of
  BatchNorm stay in theirs, and are. A kernel with more than two axes is the matrix with the last axis as columns.

  Formula:
    W' = W + \frac{\text{alpha}}{\text{rank}} A B, \quad A_{ij} \sim \mathcal{N}(0, 1 / \text{rows}), \quad B = 0

  Args:
    model: any `Model`.
    rank: columns of A; at most the smaller side of a matrix is used.
    alpha: scale of the adapters.
    only: names of modules whose matrices alone are adapted, such as 'q-v', or 'query-value'; all by default.

  Raises:
    UsageError: at `init`, for a model without a matrix, or without a module of these names.
  """
  scale = alpha / rank
  chosen = tuple(name for name in only.split('-') if name)
  adapted = functools.partial(_is_adapted, chosen)

  def init(key: jax.Array, sample_shape: ImageShape) -> Tree:
    given = model.init(jax.random.fold_in(key, 0), sample_shape)
    adapters: dict = {}
    leaves, _ = jax.tree_util.tree_flatten_with_path(given['params'])
    known = {name for path, _ in leaves for name in trees.path_names(path)[:-1]}
    for name in chosen:
      if name not in known:
        raise errors.unknown('module to adapt', name, known)
    for i, (path, leaf) in enumerate(leaves):
      if adapted(trees.path_names(path), leaf):
        rows, columns = math.prod(leaf.shape[:-1]), leaf.shape[-1]
        size = min(rank, rows, columns)
        a = jax.random.normal(jax.random.fold_in(key, i + 1), (rows, size), leaf.dtype) / math.sqrt(rows)
        _put(adapters, trees.path_names(path), {'a': a, 'b': jnp.zeros((size, columns), leaf.dtype)})
    if not adapters:
      raise errors.UsageError(f'the model {model.name!r} has no matrix of weights to adapt')
    return {**given, 'params': adapters, _BASE: given['params']}

  def merged(variables: Mapping) -> Tree:
    """Returns the variables of `model`."""

    def add(path: tuple, leaf: jax.Array) -> jax.Array:
      if not adapted(trees.path_names(path), leaf):
        return leaf
      adapter = trees.get(variables['params'], trees.path_names(path))
      return leaf + (jnp.asarray(scale, leaf.dtype) * (adapter['a'] @ adapter['b'])).reshape(leaf.shape)

    kept = {name: value for name, value in variables.items() if name != _BASE}
    return {**kept, 'params': jax.tree_util.tree_map_with_path(add, variables[_BASE])}

  def layers(sample_shape: ImageShape) -> tuple[Layer, ...]:
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), sample_shape))['params']
    found = []
    for layer in model.layers(sample_shape):  # type: ignore[misc]
      matrices = [path for path in layer.paths if adapted(path, trees.get(shapes, path))]
      if matrices:
        found.append(Layer(layer.name, tuple((*path, part) for path in matrices for part in 'ab')))
    return tuple(found)

  made = wrapped(
    model,
    f'{model.name}+lora(rank={rank},alpha={alpha:g}{f",only={only}" if only else ""})',
    init,
    lambda variables, images: (merged(variables), images),
    layers=None if model.layers is None else layers,
    layout=None if model.layout is None else _adapted_layout(model.layout, rank, chosen),
    citations=(*model.citations, CITATION),
  )
  block = None if model.first_block is None else _adapted_block(model.first_block, merged, chosen)
  return made._replace(first_block=block).built_in(model.named)


def _is_adapted(chosen: tuple[str, ...], path: tuple[str, ...], leaf: Any) -> bool:
  """Returns whether a parameter at `path` is a matrix of a chosen module; of any where none is chosen."""
  return len(leaf.shape) >= 2 and (not chosen or any(name in chosen for name in path[:-1]))


def _adapted_layout(layout: Layout, rank: int, chosen: tuple[str, ...]) -> Layout:
  """Returns the layout with the adapters under their names in PEFT, before the weights that stay as they are.

  A of a dense layer 'fc' is 'fc.lora_A.weight' [r, in], and B is 'fc.lora_B.weight' [out, r]. Other matrices have no
  such adapters there; theirs stand as they are here.
  """
  adapters, others = [], []
  for entry in layout.entries:
    kind, *path = entry.path
    if kind != 'params':
      others.append(entry)
      continue
    others.append(entry._replace(path=(_BASE, *path)))
    if not _is_adapted(chosen, tuple(path), np.empty(entry.our_shape, np.int8)):
      continue
    rows, columns = math.prod(entry.our_shape[:-1]), entry.our_shape[-1]
    size, module = min(rank, rows, columns), entry.name.removesuffix('.weight')
    for part, shape in (('a', (rows, size)), ('b', (size, columns))):
      place, theirs = ('params', *path, part), shape[::-1] if entry.dense else shape
      image = entry.image if part == 'a' else ()
      name = f'{module}.lora_{part.upper()}.weight'
      adapters.append(Entry(name, place, theirs, entry.dtype, entry.dense, image))
  return layout._replace(entries=(*adapters, *others))


def _adapted_block(block: FirstBlock, merged: Callable[[Mapping], Tree], chosen: tuple[str, ...]) -> FirstBlock:
  """Returns the first block of the adapted model: the paths of its adapters, and its functions on merged variables."""

  def has(path: tuple[str, ...]) -> bool:
    return not chosen or any(name in chosen for name in path[:-1])

  second = tuple(path for path in block.second if has(path))
  function = block.mixed if second else block.following
  return block._replace(
    projections=tuple(path for path in block.projections if has(path)),
    second=second or tuple(path for path in block.next_projections if has(path)),
    parts=lambda variables: block.parts(merged(variables)),
    tokens=lambda variables, x: block.tokens(merged(variables), x),
    mixed=lambda variables, plain, attended: function(merged(variables), plain, attended),
    adapters=True,
  )


def _put(tree: dict, path: tuple[str, ...], value: Tree) -> None:
  for key in path[:-1]:
    tree = tree.setdefault(key, {})
  tree[path[-1]] = value
