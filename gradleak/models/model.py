"""The model that attacks and defenses use: a NamedTuple of pure functions, and how to make one of a user's network."""

import contextlib
import dataclasses
import functools
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import flax
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.extend.core import jaxpr_as_fun
from jax.interpreters import partial_eval

from gradleak.core import errors, methods, trees
from gradleak.core.reuse import reusable
from gradleak.core.trees import Layer, Tree, path_names
from gradleak.models import convolution, masked, modes, programs, repeated
from gradleak.models.state_dict import Layout

ImageShape = tuple[int, ...]
DTYPES = ('float32', 'int32')  # of samples

_EQUINOX = (
  'for an Equinox module, params, static = eqx.partition(module, eqx.is_inexact_array): let init return params and '
  'apply return jax.vmap(eqx.combine(params, static))(images)'
)


class Model(NamedTuple):
  """A network as pure functions. Images are float32 [N, H, W, C] in [0, 1]; normalisation belongs to the model.

  Attributes:
    name: how results call it.
    init: (key, sample_shape) -> variables, a dict with 'params' and, with BatchNorm, 'batch_stats'. sample_shape is
      (H, W, C).
    apply: (variables, images, train, key) -> (logits [N, classes], new batch_stats). With `train`, BatchNorm uses the
      batch's statistics; dropout is active only if a `key` is given.
    features: (variables, samples) -> the input of the last dense layer [N, features], or None if unknown.
    layers: sample_shape -> the layers in forward order, a tuple of `Layer`, or None if unknown.
    penalised: like `apply`, with a third output: what the model itself adds to the loss of each example [N]. None if it
      adds nothing.
    citations: its sources.
    normalisation: what it does to its pixels before all else, a `Normalisation`; None if nothing of that is known.
    axes: how many axes one sample has, 3 for images; None for a network that flattens any.
    dtype: of its samples: 'float32', or 'int32' for token ids.
    first_block: what it does up to the dense layers of its first block, for a transformer of tokens.
    layout: how its variables stand in a `state_dict` of PyTorch, for a network that comes from there.
    vocabulary: how many tokens it embeds, for a network of tokens; None where that is not known.
    padding: the id of padding, which counts for nothing; None for none, or where that is not known.
    stands_for: name, `apply` and `penalised` of a built-in network; () for any other.
  """

  name: str
  init: Callable[[jax.Array, ImageShape], Tree]
  apply: Callable[..., tuple[jax.Array, Tree]]
  features: Callable[[Tree, jax.Array], jax.Array] | None = None
  layers: Callable[[ImageShape], tuple[Layer, ...]] | None = None
  penalised: Callable[..., tuple[jax.Array, Tree, jax.Array]] | None = None
  citations: tuple[str, ...] = ()
  normalisation: 'Normalisation | None' = None
  axes: int | None = 3
  layout: Layout | None = None
  dtype: str = 'float32'
  first_block: 'FirstBlock | None' = None
  vocabulary: int | None = None
  padding: int | None = None
  stands_for: tuple = ()

  @property
  def named(self) -> bool:
    """Whether its name says what it computes of its weights, as that of a built-in network does."""
    return self.stands_for == (self.name, self.apply, self.penalised)

  def built_in(self, where: bool = True) -> 'Model':
    """Returns the same as a network whose name says what it computes; as it is unless that is so."""
    return self._replace(stands_for=(self.name, self.apply, self.penalised)) if where else self

  @property
  def takes_ids(self) -> bool:
    """Whether its samples are integers, such as token ids."""
    return jnp.issubdtype(self.dtype, jnp.integer)

  def samples(self, count: int, shape: Sequence[int], wide: bool = True) -> jax.ShapeDtypeStruct:
    """Returns shape and dtype of a batch of its samples; of floats, float64 where that is enabled and `wide`."""
    floats = jnp.result_type(float) if wide else jnp.dtype('float32')
    return jax.ShapeDtypeStruct((count, *shape), jnp.dtype(self.dtype) if self.takes_ids else floats)


class Normalisation(NamedTuple):
  """(x − mean) / std, a number of each for every channel."""

  mean: tuple[float, ...]
  std: tuple[float, ...]


class FirstBlock(NamedTuple):
  """The first block of a transformer of tokens, as functions of its variables.

  Its queries, keys and values take e + p, embeddings of the token and of its position, or the LayerNorm of that.

  Attributes:
    causal: whether a position attends to those up to itself alone.
    padding: the id of padding, which no position attends to; None for none.
    heads: of the attention.
    table: path of the table of embeddings in the parameters.
    projections: paths of the kernels [d, …] of queries, keys and values, in this order.
    second: paths of kernels [d, …] that take the same input after attention: that of the block's first dense layer.
    next_projections: paths of the kernels of queries, keys and values of the next block; () where there is none.
    parts: variables -> (table [V, d], embeddings of positions [length, d], scale [d], shift [d] and epsilon of the
      LayerNorm); epsilon is None where there is none.
    tokens: (variables, inputs [N, T, d]) -> queries, keys and values, each [N, T, d].
    mixed: (variables, what attention is added to, attended values, both [N, T, d]) -> the input of `second`.
    following: likewise -> the input of `next_projections`.
    normalised_sum: whether attention is added to the input of queries, and not to e + p.
    adapters: whether the paths of `projections` are those of LoRA's adapters, {'a': [d, r], 'b': [r, …]}.
  """

  causal: bool
  padding: int | None
  heads: int
  table: tuple[str, ...]
  projections: tuple[tuple[str, ...], ...]
  second: tuple[tuple[str, ...], ...]
  next_projections: tuple[tuple[str, ...], ...]
  parts: Callable[[Tree], tuple]
  tokens: Callable[[Tree, jax.Array], tuple[jax.Array, ...]]
  mixed: Callable[[Tree, jax.Array, jax.Array], jax.Array]
  following: Callable[[Tree, jax.Array, jax.Array], jax.Array]
  normalised_sum: bool
  adapters: bool = False


def wrapped(
  model: Model,
  name: str,
  init: Callable[[jax.Array, ImageShape], Tree],
  given: Callable[[Tree, jax.Array], tuple[Tree, jax.Array]],
  **changes: Any,
) -> Model:
  """Returns a model whose pass, penalty and features are those of `model` on other variables and samples.

  Args:
    model: the model that is passed.
    name, init: of the result.
    given: (variables of the result, samples) -> (variables of `model`, samples that it is given).
    **changes: other fields of `Model` that the result has; what is not named is as in `model`.
  """

  def apply(
    variables: Tree, samples: jax.Array, train: bool = False, key: jax.Array | None = None
  ) -> tuple[jax.Array, Tree]:
    return model.apply(*given(variables, samples), train, key)

  def penalised(
    variables: Tree, samples: jax.Array, train: bool = False, key: jax.Array | None = None
  ) -> tuple[jax.Array, Tree, jax.Array]:
    return model.penalised(*given(variables, samples), train, key)  # type: ignore[misc]

  def features(variables: Tree, samples: jax.Array) -> jax.Array:
    return model.features(*given(variables, samples))  # type: ignore[misc]

  return model._replace(
    name=name,
    init=init,
    apply=apply,
    features=None if model.features is None else features,
    penalised=None if model.penalised is None else penalised,
    **changes,
  )


def check_unnormalised(model: Model, what: str, axes: int) -> None:
  """Raises `UsageError` for a model that normalises its samples itself, or whose samples have other axes.

  Args:
    model: the model that is wrapped.
    what: how messages call the wrapper.
    axes: of one sample, 3 for images and 1 for rows.
  """
  if check_model(model).normalisation is not None:
    raise errors.UsageError(f'{what} takes a network that does not normalise its samples, and {model.name!r} does')
  if model.takes_ids or model.axes not in (None, axes):
    raise errors.UsageError(
      f'{what} takes a network of {"images" if axes == 3 else "rows"}, and {model.name!r} takes '
      f'{"tokens" if model.takes_ids else f"samples of {model.axes} axes"}'
    )


def _check_floats(name: str, params: Tree, advice: str = '') -> None:
  """Raises `UsageError` where the init of a model of this name returns parameters that are no floats."""
  for path, leaf in [((), None)] if params is None else jax.tree.leaves_with_path(params):
    if not isinstance(leaf, float) and not jnp.issubdtype(getattr(leaf, 'dtype', object), jnp.floating):
      raise errors.UsageError(
        f'init of the model {name!r} returns {_what(leaf)} as params{jax.tree_util.keystr(path)}, expected a pytree of '
        f'floats{advice}'
      )


def check_layers(name: str, layers: Sequence[Layer] | None, params: Tree) -> None:
  """Raises `UsageError` where the layers that a user gives for a model of this name have paths of no parameter."""
  known = [path_names(path) for path, _ in jax.tree.leaves_with_path(params)]
  for layer in layers or ():
    errors.check_instance('a layer', layer, Layer, 'a gradleak.core.trees.Layer')
    for path in layer.paths:
      if path not in known:
        raise errors.UsageError(
          f'the layer {layer.name!r} of the model {name!r} has the path {path}, expected paths of its parameters: '
          f'{textwrap.shorten(", ".join(map(str, known)), 200, placeholder=" …")}'
        )


def check_parameters(model: Model, variables: Tree) -> None:
  """Raises `UsageError` for variables without parameters: a client would send nothing."""
  if not jax.tree.leaves(variables['params']):
    raise errors.UsageError(f'the model {model.name!r} has no parameters: a client of it would send nothing')


def per_example_loss(
  model: Model,
  loss: Callable[[jax.Array, jax.Array], jax.Array],
  variables: Tree,
  samples: jax.Array,
  targets: jax.Array,
  train: bool = False,
  key: jax.Array | None = None,
) -> tuple[jax.Array, Tree]:
  """Returns (loss of each example [N], including what the model adds to it, new batch_stats).

  Args:
    model: a `Model`.
    loss: (logits, label probabilities) -> loss per example.
    variables, images, train, key: arguments of `Model.apply`.
    targets: probabilities [N, classes].

  Raises:
    UsageError: if the model returns anything but logits in the shape of the labels, or the loss anything but [N].
  """
  if model.penalised is None:
    logits, batch_stats = model.apply(variables, samples, train, key)
    return _losses(loss, check_logits(model, logits, targets.shape), targets), batch_stats
  logits, batch_stats, penalty = model.penalised(variables, samples, train, key)
  return _losses(loss, check_logits(model, logits, targets.shape), targets) + penalty, batch_stats


def _losses(loss: Callable[[jax.Array, jax.Array], jax.Array], logits: jax.Array, targets: jax.Array) -> jax.Array:
  """Returns the losses; raises `UsageError` where the function returns anything but one for each example."""
  found = loss(logits, targets)
  if getattr(found, 'shape', None) != targets.shape[:1] or not jnp.issubdtype(found.dtype, jnp.floating):
    raise errors.UsageError(f'the loss returns {_what(found)}, expected floats of shape {targets.shape[:1]}')
  return found


def outputs_shape(model: Model, variables: Mapping, sample_shape: tuple[int, ...]) -> tuple[int, ...]:
  """Returns the shape of what a model returns for one sample, (…, outputs)."""
  image = model.samples(1, sample_shape, wide=False)
  return jax.eval_shape(lambda v, x: model.apply(v, x, False, None)[0], variables, image).shape[1:]


def check_logits(model: Model, logits: Any, shape: tuple[int, ...]) -> jax.Array:
  """Returns what a model returned as logits; raises `UsageError` for anything but floats of this shape."""
  if len(shape) > 2 and shape[1] == 1 and getattr(logits, 'shape', None) == (shape[0], *shape[2:]):
    raise errors.UsageError(
      f'labels of shape {shape[:-1]} are of one position of each sample, and the model {model.name!r} returns outputs '
      f'of shape {logits.shape}, which have none: give labels[:, 0]'
    )
  if getattr(logits, 'shape', None) != shape or not jnp.issubdtype(logits.dtype, jnp.floating):
    raise errors.UsageError(
      f'the model {model.name!r} returns {_what(logits)}, expected logits alone: floats of shape {shape}'
    )
  return logits


def require(model: Model, what: str) -> Callable[..., Any]:
  """Returns the model's function `what` ('features' or 'layers'); raises `UsageError` if the model lacks it."""
  function = getattr(model, what)
  if function is None:
    raise errors.UsageError(
      f'the model {model.name!r} does not offer {what!r}, which this method needs: '
      f'give {what}=… to gradleak.models.from_functions or from_nnx'
    )
  return function


def check_model(model: Any) -> Model:
  """Returns `model`; raises `UsageError` for anything but a `Model`."""
  return errors.check_instance(
    'the model', model, Model, 'a gradleak Model: wrap a network by gradleak.models.from_flax or from_functions'
  )


def check_sample_shape(sample_shape: Any, axes: int | None = 3) -> ImageShape:
  """Returns the shape of one sample, (H, W, C) of an image, as integers; raises `UsageError` for another one."""
  if not isinstance(sample_shape, tuple | list) or not sample_shape or axes not in (None, len(sample_shape)):
    sides = 'at least one side' if axes is None else f'{axes} side{"s" * (axes != 1)}'
    expected = '(height, width, channels)' if axes == 3 else sides
    raise errors.UsageError(f'sample_shape is {errors.shown(sample_shape)}, expected {expected}')
  return tuple(
    int(errors.check_number('sample_shape', side, low=1, high=65_536, integer=True)) for side in sample_shape
  )


def check_variables(model: Model, variables: Any, sample_shape: Sequence[int]) -> None:
  """Checks that `variables` have the names and shapes that `model.init` gives, and floats where it gives floats.

  Args:
    model: a `Model`.
    variables: what is checked.
    sample_shape: (H, W, C).

  Raises:
    UsageError: if they differ; names the first difference.
  """
  sample_shape = check_sample_shape(sample_shape, check_model(model).axes)
  expected = _shapes(model, sample_shape)
  _check_floats(model.name, expected['params'])
  if isinstance(variables, Mapping) and 'params' in variables:
    difference = _difference(variables, expected)
    if difference:
      raise errors.UsageError(
        f'the variables do not fit the model {model.name!r} for samples of shape {sample_shape}: {difference}'
      )
  elif not _difference(variables, expected['params']):
    wanted = ', '.join(f'{name!r}: …' for name in sorted(expected, key=lambda name: name != 'params'))
    raise errors.UsageError(f'the variables are the parameters of {model.name!r} alone: pass {{{wanted}}}')
  else:
    found = f'have the keys {sorted(variables)}' if isinstance(variables, Mapping) else f'are {_what(variables)}'
    raise errors.UsageError(
      f"the variables {found}, expected a dict with 'params', as the init of {model.name!r} returns"
    )


def check_finite(what: str, variables: Tree) -> None:
  """Raises `UsageError` for values that are not finite; names the first array that has one.

  Buffers of PyTorch that are not trained may hold infinities, as masks of attention do.

  Args:
    what: how messages call the variables, in the plural.
    variables: a tree of arrays on the host or on a device; traced ones are refused, too.
  """
  errors.refuse_traced('the scenario', variables)
  for path, leaf in jax.tree.leaves_with_path(variables):
    values, names = np.asarray(leaf), trees.path_names(path)
    wrong = np.isnan if names[:1] == ('buffers',) else lambda values: ~np.isfinite(values)
    bad = int(wrong(values).sum()) if jnp.issubdtype(values.dtype, jnp.floating) else 0
    if bad:
      name = '.'.join(names)
      raise errors.UsageError(
        f'{what} are not finite: {bad} of {values.size} values of {name}. No update of theirs is finite either: the '
        'training may have diverged, or the file be damaged'
      )


@functools.lru_cache(maxsize=256)
def _shapes(model: Model, sample_shape: ImageShape) -> Tree:
  """Returns the shapes of the model's variables."""
  return jax.eval_shape(lambda key: model.init(key, sample_shape), jax.random.key(0))


@functools.lru_cache(maxsize=256)
def has_init(model: Model, sample_shape: ImageShape) -> bool:
  """Returns whether the model can be initialised for images of this shape."""
  try:
    _shapes(model, sample_shape)
  except Exception:  # a user's function may raise anything
    return False
  return True


def _difference(found: Tree, expected: Tree) -> str:
  """Returns the first difference of `found` from a tree of shapes, '' if there is none."""
  leaves, shapes = (
    {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)} for tree in (found, expected)
  )
  for path, wanted in shapes.items():
    if path not in leaves:
      return f'variables{path} is missing, expected shape {wanted.shape}'
    leaf = leaves[path] if hasattr(leaves[path], 'dtype') else errors.as_array(f'variables{path}', leaves[path])
    if leaf.shape != wanted.shape:
      return f'variables{path} has shape {leaf.shape}, expected {wanted.shape}'
    if jnp.issubdtype(wanted.dtype, jnp.floating) and not jnp.issubdtype(leaf.dtype, jnp.floating):
      return f'variables{path} is {leaf.dtype}, expected {wanted.dtype}'
  return next((f"variables{path} is not one of the model's" for path in leaves if path not in shapes), '')


def check_apply(model: Model, variables: Tree, sample_shape: Sequence[int]) -> None:
  """Checks, by tracing two images, that `model.apply` returns logits [N, classes]; of each pixel, [N, H, W, classes].

  Args:
    model: a `Model`.
    variables: its variables, see `check_variables`.
    sample_shape: (H, W, C).

  Raises:
    UsageError: if it returns anything else, or fails.
  """
  sample_shape = check_sample_shape(sample_shape, check_model(model).axes)
  samples = model.samples(2, sample_shape)

  def trace(variables: Tree, samples: jax.Array) -> None:
    result = model.apply(variables, samples, False, None)
    expected = f'[N, classes] floats for {samples.shape[0]} samples'
    if not (isinstance(result, tuple) and len(result) == 2):
      raise errors.UsageError(
        f'the model {model.name!r} returns {_what(result)}, expected (logits, batch_stats) with logits {expected}'
      )
    logits = result[0]
    if not (
      getattr(logits, 'ndim', 0) in ((2, 3) if model.takes_ids else (2, samples.ndim))
      and len(logits) == len(samples)
      and (logits.ndim < 4 or (logits.shape[1:-1] == samples.shape[1:-1] and logits.shape[-1] > 1))
      and logits.shape[-1]
      and jnp.issubdtype(logits.dtype, jnp.floating)
    ):
      raise errors.UsageError(f'the model {model.name!r} returns {_what(logits)}, expected logits alone: {expected}')

  try:
    jax.eval_shape(trace, variables, samples)
  except errors.UsageError:
    raise
  except Exception as error:  # a user's network may raise anything
    raise errors.UsageError(
      f'the model {model.name!r} fails on a batch of shape {samples.shape} ({_reason(error)}); a function of one '
      'sample must be mapped over the batch by jax.vmap'
    ) from error


def check_mode(model: Model, variables: Mapping, sample_shape: Sequence[int], batch_norm: str) -> None:
  """Checks, by tracing, that a network with BatchNorm can be run in this mode, and in the other one.

  Args:
    model: a `Model`.
    variables: its variables; only their shapes are read, and nothing is checked without 'batch_stats'.
    sample_shape: (H, W, C).
    batch_norm: 'train' or 'eval', the mode of the client.

  Raises:
    UsageError: if both modes compute the same, or if training leaves all running statistics as they are. A network that
      always uses its running statistics passes for 'eval'.
  """
  if not variables.get('batch_stats'):
    return
  leaves, structure = jax.tree.flatten(dict(variables))
  shapes = tuple((tuple(leaf.shape), np.dtype(leaf.dtype)) for leaf in leaves)
  same, updated = _modes(model, structure, shapes, check_sample_shape(sample_shape, model.axes))
  how = (
    f'let its call take an argument that says whether it trains ({", ".join(modes.NAMES)}), and hand it to BatchNorm'
  )
  if batch_norm == 'train' and not updated:
    raise errors.UsageError(
      f"batch_norm is 'train', and BatchNorm of the model {model.name!r} uses its running statistics in training, too: "
      f"{how}; or set batch_norm='eval'"
    )
  if same and updated:
    raise errors.UsageError(
      f'BatchNorm of the model {model.name!r} uses the statistics of the batch in training and in evaluation: {how}'
    )


@functools.lru_cache(maxsize=256)
def _modes(model: Model, structure: Any, shapes: tuple, sample_shape: ImageShape) -> tuple[bool, bool]:
  """Returns (whether training and evaluation compute the same, whether training changes any of the batch_stats)."""
  variables = jax.tree.unflatten(structure, [jax.ShapeDtypeStruct(*one) for one in shapes])
  samples = model.samples(2, sample_shape)

  def traced(train: bool) -> Any:
    return jax.make_jaxpr(lambda variables, samples: model.apply(variables, samples, train, None))(variables, samples)

  train, evaluation = traced(True).jaxpr, traced(False).jaxpr
  texts = {methods.program_text(one) for one in (train, evaluation)}
  return len(texts) == 1, None in programs.passed_on(train)[1:]


def initial(model: Model, key: jax.Array, sample_shape: ImageShape) -> Tree:
  """Returns the initial variables; raises `UsageError` where a user's network fails to make them."""
  try:
    return model.init(key, sample_shape)
  except errors.UsageError:
    raise
  except Exception as error:  # a user's network may raise anything
    raise errors.UsageError(
      f'the model {model.name!r} cannot be initialised for samples of shape {sample_shape}: {_reason(error)}'
    ) from error


def _reason(error: Exception) -> str:
  return textwrap.shorten(f'{type(error).__name__}: {error}', 200, placeholder=' …')


def _what(value: Any) -> str:
  """Returns a description of a value that may be traced."""
  if hasattr(value, 'dtype'):
    return f'{value.dtype} of shape {value.shape}'
  return f'a {type(value).__name__} of {len(value)}' if isinstance(value, tuple | list) else errors.shown(value)


def from_flax(
  module: nn.Module,
  name: str | None = None,
  *,
  mean: Sequence[float] | None = None,
  std: Sequence[float] | None = None,
  axes: int | None = 3,
  dtype: str = 'float32',
) -> Model:
  """Returns the `Model` of a Flax Linen module.

  Args:
    module: a Linen module called as `module(samples)`. An argument of the call, or else a flag of the constructor,
      that is named `train`, `training`, `is_training`, `deterministic` or `use_running_average` follows `train` of
      `Model.apply`, the last two as its opposite.
    name: how results call it; the class name by default.
    mean, std: optional normalisation of the images in [0, 1] by channel, sequences of C floats; of rows, by entry.
    axes: how many axes one sample has, 3 for images; None for any.
    dtype: of the samples: 'float32', or 'int32' for token ids.

  Each `nn.Conv` is computed in the formulation that is fast where trials have gradients of their own (`convolution`),
  with the same values. Layers are found by calling the module once on shapes only. Every submodule that owns a
  parameter of two or more dimensions starts a layer. Those with vectors only (norms) belong to the layer before.

  Raises:
    UsageError: if it is not an instance of a Linen module, if its call requires another argument, or if only one of
      `mean` and `std` is given, or other numbers than one for each channel.
  """
  _check_linen(module)
  errors.check_choice('dtype of samples', dtype, DTYPES)
  known = _normalisation(mean, std, dtype)
  name = errors.check_text('name', type(module).__name__.lower() if name is None else name)
  in_mode = _linen_modes(module)
  call, normalise = _linen_caller(in_mode, name, known)

  def init(key: jax.Array, sample_shape: ImageShape) -> Tree:
    key, sample_shape = errors.check_key('key', key), check_sample_shape(sample_shape, axes)
    samples = jnp.zeros((1, *sample_shape), dtype)
    made, options = in_mode(False)
    return _alone(lambda key: dict(made.init(key, normalise(samples), **options)), key)

  def apply(
    variables: Tree, samples: jax.Array, train: bool = False, key: jax.Array | None = None
  ) -> tuple[jax.Array, Tree]:
    logits, changed = call(variables, samples, train, key)
    return logits, changed.get('batch_stats', variables.get('batch_stats', {}))

  @reusable(8)
  def layers(sample_shape: ImageShape) -> tuple[Layer, ...]:
    found = {}

    def watch(called: nn.Module, args: tuple) -> None:
      own = {key: value.ndim for key, value in called.variables.get('params', {}).items() if hasattr(value, 'ndim')}
      if own:
        found.setdefault(called.path, own)

    def trace(key: jax.Array) -> Any:
      return call(init(key, sample_shape), jnp.zeros((1, *sample_shape), dtype), False, None, watch)

    with repeated.apart():
      jax.eval_shape(trace, jax.random.key(0))
    return _grouped(found)

  def features(variables: Tree, samples: jax.Array) -> jax.Array:
    inputs = []

    def watch(called: nn.Module, args: tuple) -> None:
      kernel = called.variables.get('params', {}).get('kernel')
      if args and getattr(kernel, 'ndim', 0) == 2 and args[0].ndim == 2:
        inputs.append(args[0])

    call(variables, samples, False, None, watch)
    if not inputs:
      raise errors.UsageError(f'the model {name!r} has no dense layer to take features from')
    return inputs[-1]

  return Model(name, init, apply, features, layers, normalisation=known, axes=axes, dtype=dtype)


def _normalisation(mean: Any, std: Any, dtype: str) -> Normalisation | None:
  """Returns what is given, None for nothing; raises `UsageError` for other than one mean and deviation a channel."""
  if (mean is None) != (std is None):
    raise errors.UsageError('from_flax takes mean and std together: give both or neither')
  if mean is None:
    return None
  means, deviations = (errors.host_array(what, values) for what, values in (('mean', mean), ('std', std)))
  fits = means.ndim == 1 and means.size and means.shape == deviations.shape and dtype == 'float32'
  if not fits or not np.isfinite([means, deviations]).all() or not (deviations > 0).all():
    raise errors.UsageError(
      f'mean and std are {errors.shown(mean)} and {errors.shown(std)}, expected a mean and a positive deviation for '
      'each channel of an image, or each entry of a row'
    )
  return Normalisation(*(tuple(map(float, one)) for one in (means, deviations)))


def _linen_modes(module: nn.Module) -> Callable[[bool], tuple[nn.Module, dict[str, bool]]]:
  """Returns a function: train -> (the module with its flags set, the arguments of its call)."""
  taken = modes.arguments(module.__call__, 1, f'the call of {type(module).__name__}')
  fields = [field.name for field in dataclasses.fields(module) if field.init and field.name in modes.NAMES]
  flags = [name for name in fields if name not in taken and isinstance(getattr(module, name), bool | None)]

  def in_mode(train: bool) -> tuple[nn.Module, dict[str, bool]]:
    made = module.clone(**modes.values(flags, train)) if flags else module
    return made, modes.values(taken, train)

  return in_mode


def _alone(function: Callable[[jax.Array], Tree], key: jax.Array) -> Tree:
  """Returns function(key), to the bit, without the operations that its value does not depend on.

  Flax computes what a network returns while it makes the weights: each operation would be a program of its own.
  """
  jaxpr, shapes = jax.make_jaxpr(function, return_shape=True)(key)
  leaves, structure = jax.tree.flatten(shapes)
  needed, _ = partial_eval.dce_jaxpr(jaxpr.jaxpr, [True] * len(leaves), instantiate=True)
  return structure.unflatten(jaxpr_as_fun(jaxpr.replace(jaxpr=needed))(key))


def _linen_caller(
  in_mode: Callable[[bool], tuple[nn.Module, dict[str, bool]]],
  name: str,
  known: Normalisation | None,
) -> tuple[Callable[..., tuple[jax.Array, Tree]], Callable[[jax.Array], jax.Array]]:
  """Returns two functions: one that applies the module, and the normalisation of images.

  The first takes (variables, images, train, key, watch) and returns (logits, changed variables). Dropout is skipped if
  `key` is None, also inside attention. `watch(module, args)`, if given, is called before each submodule.
  """

  def normalise(samples: jax.Array) -> jax.Array:
    if known is None:
      return samples
    count, channels = len(known.mean), samples.shape[-1]
    if channels not in (1, count):  # a grey image becomes one of equal channels
      raise errors.UsageError(f'mean and std of {name!r} have {count} numbers, and samples have {channels} channels')
    shape = (*[1] * (samples.ndim - 1), -1)
    centre, scale = (jnp.asarray(values, samples.dtype).reshape(shape) for values in known)
    return (samples - centre) / scale

  def call(
    variables: Tree,
    samples: jax.Array,
    train: bool,
    key: jax.Array | None,
    watch: Callable[[nn.Module, tuple], None] | None = None,
  ) -> tuple[jax.Array, Tree]:
    def intercept(next_function: Callable, args: tuple, kwargs: dict, context: Any) -> Any:
      if key is None and isinstance(context.module, nn.Dropout):
        return args[0] if args else kwargs['inputs']
      if watch is not None and context.method_name == '__call__':
        watch(context.module, args)
      with _fast_convolution(context.module), _without_dropout(context.module, key is None):
        return next_function(*args, **masked.options(context.module, context.method_name, args, kwargs))

    module, options = in_mode(train)
    key = None if key is None else errors.check_key('key', key)
    rngs = {} if key is None else {'dropout': key}
    given = normalise(samples)
    try:
      with nn.intercept_methods(intercept):
        return module.apply(variables, given, rngs=rngs, mutable=['batch_stats'], **options)
    except flax.errors.InvalidRngError as error:
      raise errors.UsageError(
        f"{name!r} draws random numbers that nothing gives it a key for: let it draw those of 'dropout' alone, where "
        f'self.has_rng("dropout") is true ({_reason(error)})'
      ) from error

  return call, normalise


@contextlib.contextmanager
def _without_dropout(module: nn.Module, off: bool) -> Iterator[None]:
  """Lets attention of Flax, which has dropout of its own, drop nothing."""
  rate = getattr(module, 'dropout_rate', 0.0)
  if not off or not rate or not isinstance(module, nn.MultiHeadDotProductAttention):
    yield
    return
  object.__setattr__(module, 'dropout_rate', 0.0)  # modules are frozen
  try:
    yield
  finally:
    object.__setattr__(module, 'dropout_rate', rate)


@contextlib.contextmanager
def _fast_convolution(module: nn.Module) -> Iterator[None]:
  """Lets a `Conv` of Flax convolve as the networks of the library do, unless it has a function of its own for that."""
  name = 'conv_general_dilated'
  if (
    not isinstance(module, nn.Conv) or getattr(module, name) is not None or module.conv_general_dilated_cls is not None
  ):
    yield
    return
  object.__setattr__(module, name, convolution.fast)  # modules are frozen
  try:
    yield
  finally:
    object.__setattr__(module, name, None)


def _check_linen(module: Any) -> None:
  """Raises `UsageError` for anything but an instance of a Linen module; says what to call instead."""
  if isinstance(module, nn.Module):
    return
  from flax import nnx

  kind = module if isinstance(module, type) else type(module)
  if issubclass(kind, nnx.Module):
    raise errors.UsageError(f'{kind.__name__} is a Flax NNX module: call gradleak.models.from_nnx({kind.__name__}(…))')
  if issubclass(kind, nn.Module):
    raise errors.UsageError(f'from_flax takes an instance of a Linen module: call from_flax({kind.__name__}(…))')
  raise errors.UsageError(
    f'from_flax takes an instance of a Linen module, got {errors.shown(module)}; wrap functions by '
    'gradleak.models.from_functions'
  )


def _grouped(found: Mapping[tuple[str, ...], Mapping[str, int]]) -> tuple[Layer, ...]:
  """Returns the layers of modules in forward order, given as `{path: {parameter: its number of dimensions}}`."""
  grouped: list[list[Any]] = []
  for path, own in found.items():
    names = sorted(own, key=lambda parameter: (-own[parameter], parameter))
    paths = tuple((*path, parameter) for parameter in names)
    if max(own.values()) > 1 or not grouped:
      grouped.append(['/'.join(path) or 'root', paths])
    else:
      grouped[-1][1] += paths
  return tuple(Layer(*layer) for layer in grouped)


def from_functions(
  init: Callable[[jax.Array, ImageShape], Tree],
  apply: Callable[[Tree, jax.Array], jax.Array],
  name: str = 'custom',
  *,
  features: Callable[[Tree, jax.Array], jax.Array] | None = None,
  layers: Sequence[Layer] | None = None,
  axes: int = 3,
  dtype: str = 'float32',
) -> Model:
  """Returns the `Model` of plain functions (plain JAX, Haiku, or an Equinox module partitioned into arrays and rest).

  Args:
    init: (key, sample_shape) -> params, any pytree of arrays.
    apply: (params, samples) -> logits [N, classes]. It may take one of the arguments that `from_flax` passes, such as
      `train`.
    name: how results call it.
    features: optional, (params, samples) -> the input of the last dense layer.
    layers: optional sequence of `gradleak.core.trees.Layer` in forward order.
    axes: how many axes one sample has, 3 for images.
    dtype: of the samples: 'float32', or 'int32' for token ids.

  Raises:
    UsageError: for anything but two functions of these arguments; when `init` is called, for leaves that are not
      floats, and layers with paths of no parameter.
  """
  for role, function in (('init', init), ('apply', apply)):
    if not _is_function(function):
      raise errors.UsageError(
        f'from_functions takes two functions, init(key, sample_shape) and apply(params, images), and {role} is '
        f'{errors.shown(function)}; wrap Flax modules by from_flax or from_nnx; {_EQUINOX}'
      )

  errors.check_choice('dtype of samples', dtype, DTYPES)
  modes.arguments(init, 2, 'init of from_functions')
  taken = modes.arguments(apply, 2, 'apply of from_functions')

  def init_variables(key: jax.Array, sample_shape: ImageShape) -> Tree:
    params = init(errors.check_key('key', key), check_sample_shape(sample_shape, axes))
    _check_floats(name, params, f'; {_EQUINOX}')
    check_layers(name, layers, params)
    return {'params': trees.arrays(params)}

  def apply_variables(
    variables: Tree, samples: jax.Array, train: bool = False, key: jax.Array | None = None
  ) -> tuple[jax.Array, Tree]:
    del key
    return apply(variables['params'], samples, **modes.values(taken, train)), {}

  features_of = None if features is None else lambda variables, samples: features(variables['params'], samples)
  layers_of = None if layers is None else lambda sample_shape: tuple(layers)
  return Model(name, init_variables, apply_variables, features_of, layers_of, axes=axes, dtype=dtype)


def _is_function(value: Any) -> bool:
  """Returns whether it is callable and not a module; modules of Equinox and NNX are pytrees of arrays."""
  if isinstance(value, functools.partial):  # jax.tree_util.Partial may hold arrays
    return True
  arrays = any(isinstance(leaf, jax.Array | np.ndarray) for leaf in jax.tree.leaves(value))
  return callable(value) and not isinstance(value, nn.Module) and not arrays
