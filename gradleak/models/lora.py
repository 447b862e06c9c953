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
from gradleak.models import flattening
from gradleak.models.flattening import Summed
from gradleak.models.model import FirstBlock, ImageShape, Model, wrapped
from gradleak.models.state_dict import Entry, Layout

CITATION = (
  'Hu, Shen, Wallis, Allen-Zhu, Li, Wang, Wang, Chen: LoRA: Low-Rank Adaptation of Large Language Models. ICLR 2022.'
)
BASE = 'base'  # the collection of the weights that stay as they are
_ADDED = ('cls_token', 'class_token', 'pos_embed', 'pos_embedding')  # names of parameters that are added to inputs


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
  BatchNorm stay in theirs, and are. The rows of W are the inputs of a layer. Those of a convolution are all entries of
  its window, and its features are the columns, as in PEFT. What is added to inputs (`pos_embed`) is no weight matrix.

  Formula:
    W' = W + \frac{\text{alpha}}{\text{rank}} A B, \quad A_{ij} \sim \mathcal{N}(0, 1 / \text{rows}), \quad B = 0

  Args:
    model: any `Model`.
    rank: columns of A; at most the smaller side of a matrix is used.
    alpha: scale of the adapters.
    only: names of modules whose matrices alone are adapted, such as 'q-v', or 'query-value'; all by default.

  Raises:
    UsageError: at `init`, for a model without a matrix or a module of these names, and for several kernels in an array.
  """
  scale = alpha / rank
  chosen = tuple(name for name in only.split('-') if name)
  adapted, inputs = functools.partial(_is_adapted, chosen), _inputs(model)

  def init(key: jax.Array, sample_shape: ImageShape) -> Tree:
    given = model.init(jax.random.fold_in(key, 0), sample_shape)
    adapters, summed = {}, inputs(tuple(sample_shape), given)
    leaves, _ = jax.tree_util.tree_flatten_with_path(given['params'])
    known = {name for path, _ in leaves for name in trees.path_names(path)[:-1]}
    for name in chosen:
      if name not in known:
        raise errors.unknown('module to adapt', name, known)
    for i, (path, leaf) in enumerate(leaves):
      place = trees.path_names(path)
      if adapted(place, leaf):
        _put(adapters, place, _drawn(jax.random.fold_in(key, i + 1), leaf, _single(model, summed, place), rank))
    if not adapters:
      raise errors.UsageError(f'the model {model.name!r} has no matrix of weights to adapt')
    return {**given, 'params': adapters, BASE: given['params']}

  def merged(variables: Mapping, sample_shape: ImageShape = ()) -> Tree:
    """Returns the variables of `model`; the shape of a sample is needed for all but tokens."""
    kept = {name: value for name, value in variables.items() if name != BASE}
    summed = inputs(sample_shape, {**kept, 'params': variables[BASE]})

    def add(path: tuple, leaf: jax.Array) -> jax.Array:
      name = trees.path_names(path)
      if not adapted(name, leaf):
        return leaf
      adapter = trees.get(variables['params'], name)
      change = jnp.asarray(scale, leaf.dtype) * (adapter['a'] @ adapter['b'])
      return leaf + _unfolded(change, leaf.shape, summed.get(name))

    return {**kept, 'params': jax.tree_util.tree_map_with_path(add, variables[BASE])}

  def layers(sample_shape: ImageShape) -> tuple[Layer, ...]:
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), sample_shape))['params']
    found = []
    for layer in model.layers(sample_shape):  # type: ignore[misc]
      matrices = [path for path in layer.paths if adapted(path, trees.get(shapes, path))]
      if matrices:
        found.append(Layer(layer.name, tuple((*path, part) for path in matrices for part in 'ab')))
    return tuple(found)

  return wrapped(
    model,
    f'{model.name}+lora(rank={rank},alpha={alpha:g}{f",only={only}" if only else ""})',
    init,
    lambda variables, images: (merged(variables, images.shape[1:]), images),
    layers=None if model.layers is None else layers,
    layout=None if model.layout is None else _adapted_layout(model.layout, rank, chosen),
    citations=(*model.citations, CITATION),
    first_block=None if model.first_block is None else _adapted_block(model.first_block, merged, chosen),
  ).built_in(model.named)


def _is_adapted(chosen: tuple[str, ...], path: tuple[str, ...], leaf: Any) -> bool:
  """Returns whether a parameter at `path` is a weight matrix of a chosen module; of any where none is chosen."""
  added = path[-1].endswith('bias') or path[-1] in _ADDED
  return len(leaf.shape) >= 2 and not added and (not chosen or any(name in chosen for name in path[:-1]))


def _inputs(model: Model) -> Callable[[ImageShape, Tree], Summed]:
  """Returns (shape of a sample, variables) -> the axes of each matrix that are summed over, where they are known.

  All axes but the last are those of inputs in a convolution of Flax. PyTorch's layout names others. Kernels of all
  other networks are followed through a trace. Matrices of networks of tokens are not: their tables are no kernels.
  """
  if model.layout is not None:
    named: Summed = {entry.path[1:]: entry.inputs for entry in model.layout.entries if entry.inputs}
    return lambda sample_shape, variables: named

  known: dict[ImageShape, Summed] = {}

  def traced(sample_shape: ImageShape, variables: Tree) -> Summed:
    if sample_shape not in known:
      ranks = {trees.path_names(path): leaf.ndim for path, leaf in jax.tree.leaves_with_path(variables['params'])}
      least = 3 if model.takes_ids else 2
      followed = bool(sample_shape) and max(ranks.values(), default=0) >= least
      axes = flattening.summed(model, variables, sample_shape) if followed else {}
      known[sample_shape] = {path: one for path, one in axes.items() if ranks.get(path, 0) >= least}
    return known[sample_shape]

  return traced


def _single(model: Model, summed: Summed, path: tuple[str, ...]) -> tuple[int, ...] | None:
  """Returns the axes of a kernel that are summed over; raises `UsageError` for several kernels in one array."""
  if path in summed and summed[path] is None:
    raise errors.UsageError(
      f'{"/".join(path)} of the model {model.name!r} holds the kernels of several blocks or experts, each of which has '
      'adapters of its own: give each a module'
    )
  return summed.get(path)


def _sides(shape: tuple[int, ...], inputs: tuple[int, ...] | None, rank: int) -> tuple[int, int, int]:
  """Returns the rows and columns of a kernel, and those of A and B that both have."""
  inputs = tuple(range(len(shape) - 1)) if inputs is None else inputs
  rows = math.prod(shape[axis] for axis in inputs)
  columns = math.prod(shape) // rows
  return rows, columns, min(rank, rows, columns)


def _drawn(key: jax.Array, kernel: jax.Array, inputs: tuple[int, ...] | None, rank: int) -> dict[str, jax.Array]:
  """Returns the first adapter of a kernel."""
  rows, columns, size = _sides(kernel.shape, inputs, rank)
  a = jax.random.normal(key, (rows, size), kernel.dtype) / math.sqrt(rows)
  return {'a': a, 'b': jnp.zeros((size, columns), kernel.dtype)}


def _unfolded(matrix: jax.Array, shape: tuple[int, ...], inputs: tuple[int, ...] | None) -> jax.Array:
  """Returns a matrix [inputs, outputs] in the shape of its kernel."""
  if inputs is None:
    return matrix.reshape(shape)
  order = (*inputs, *(axis for axis in range(len(shape)) if axis not in inputs))
  return matrix.reshape([shape[axis] for axis in order]).transpose(np.argsort(order))


def _adapted_layout(layout: Layout, rank: int, chosen: tuple[str, ...]) -> Layout:
  """Returns the layout with the adapters under their names in PEFT, before the weights that stay as they are.

  A of a dense layer 'fc' is 'fc.lora_A.weight' [r, in], and B is 'fc.lora_B.weight' [out, r]. Those of a convolution
  are [r, in, …] and [out, r, 1, …]. Other matrices have no such adapters there; theirs stand as they are here.
  """
  adapters, others = [], []
  for entry in layout.entries:
    kind, *path = entry.path
    if kind != 'params':
      others.append(entry)
      continue
    others.append(entry._replace(path=(BASE, *path)))
    if not _is_adapted(chosen, tuple(path), np.empty(entry.our_shape, np.int8)):
      continue
    rows, columns, size = _sides(entry.our_shape, entry.inputs or None, rank)
    module, sides = entry.name.removesuffix('.weight'), entry.shape[2:]
    convolution = bool(sides) and entry.inputs == tuple(range(1, len(entry.shape)))
    shapes: dict[str, tuple[int, ...]] = {'a': (rows, size), 'b': (size, columns)}
    if convolution:
      shapes = {'a': (size, *entry.shape[1:]), 'b': (columns, size, *[1] * len(sides))}
    elif entry.dense:
      shapes = {'a': (size, rows), 'b': (columns, size)}
    for part, shape in shapes.items():
      image = entry.image if part == 'a' else ()
      name, place = f'{module}.lora_{part.upper()}.weight', ('params', *path, part)
      adapters.append(Entry(name, place, shape, entry.dtype, entry.dense or convolution, image))
  names = (*(entry.name for entry in adapters), *layout.named())
  return layout._replace(entries=(*adapters, *others), names=names)


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
