"""Compares a network that was written anew with the original: logits, outputs of layers, gradients."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from flax import linen as nn

from gradleak.core import errors, trees
from gradleak.core.settings import NonNegative, ranged
from gradleak.core.trees import Tree
from gradleak.models import repeated
from gradleak.models.model import (
  Model,
  check_finite,
  check_logits,
  check_model,
  check_sample_shape,
  check_variables,
  per_example_loss,
)


class Difference(NamedTuple):
  """How far one array is from the original's.

  Attributes:
    kind: 'output' of a layer, 'logits', or 'gradient' of a parameter.
    name: of the layer or of the parameter, its path joined by '/'; 'logits' for those.
    relative: ‖ours − original‖₂ / ‖original‖₂; ‖ours‖₂ where the original is zero.
  """

  kind: str
  name: str
  relative: float


class Agreement(NamedTuple):
  """How a network compares with the original; `str(agreement)` is a table and one sentence.

  Attributes:
    differences: a `Difference` per array: outputs in forward order, the logits, gradients in forward order.
    tolerance: the largest relative difference that counts as equal.
  """

  differences: tuple[Difference, ...]
  tolerance: float

  @property
  def departing(self) -> tuple[Difference, ...]:
    """The differences above the tolerance, and those that are not finite."""
    return tuple(each for each in self.differences if not each.relative <= self.tolerance)

  @property
  def agrees(self) -> bool:
    """Whether all that was compared is equal up to the tolerance."""
    return not self.departing

  @property
  def first(self) -> Difference | None:
    """The first departure: forward through the outputs and the logits, then backward through the gradients."""
    forward = [each for each in self.departing if each.kind != 'gradient']
    return next(iter([*forward, *reversed(self.departing)]), None)

  def __str__(self) -> str:
    width = max(len(each.name) for each in self.differences)
    lines = [f'{each.kind:8}  {each.name:{width}}  {each.relative:.1e}' for each in self.differences]
    if self.first is None:
      return '\n'.join([*lines, f'The networks agree: no relative difference is above {self.tolerance:g}.'])
    kind, name, relative = self.first
    where = 'the logits' if kind == 'logits' else f'the {kind} of {name}'
    return '\n'.join([*lines, f'The networks depart first in {where}: relative difference {relative:.1e}.'])


@ranged
def agreement(
  model: Model,
  variables: Mapping,
  images: Any,
  logits: Any,
  *,
  outputs: Mapping[str, Any] | None = None,
  outputs_of: Callable[[Tree, jax.Array], Mapping[str, jax.Array]] | None = None,
  names: Mapping[str, str] | None = None,
  gradient: tuple[Tree, Any] | None = None,
  train: bool = False,
  tolerance: NonNegative = 1e-4,
) -> Agreement:
  """Returns how a network compares with the original that it was written after, on the same weights and images.

  Args:
    model: the `Model`.
    variables: its variables, with the weights of the original; see `gradleak.read_weights`.
    images: float32 [N, H, W, C] in [0, 1], what both networks were given.
    logits: of the original, [N, classes].
    outputs: optional, {layer: its output in the original}, with N first; those with four axes in PyTorch's order [N, C,
      H, W]. They tell which layer departs.
    outputs_of: (params, images) -> {layer: output}, of a model that is no Linen module; [N, H, W, C] where images.
      Submodules of a Linen module are read without it.
    names: {layer in `outputs`: layer of the model}, such as {'conv1': 'Conv_0'}, where they differ; see `read_update`.
    gradient: optional, (that of the original's mean cross-entropy, shaped like the parameters, see
      `gradleak.read_update`; the labels of that loss, int [N]).
    train: whether BatchNorm uses the batch's statistics, as the original did.
    tolerance: the largest relative difference that counts as equal.

  Raises:
    UsageError: for arrays that do not fit the model, and for layers that it does not have.
  """
  images = _images(images)
  check_variables(check_model(model), variables, images.shape[1:])
  check_finite(f'the weights of {model.name!r}', variables)
  errors.check_instance('train', train, bool, 'True or False')
  found_logits, found_outputs = _forward(model, variables, images, train, outputs_of)
  wanted = errors.host_array('the logits', logits)
  if wanted.shape != found_logits.shape:
    raise errors.UsageError(f'the logits have shape {wanted.shape}, and those of the model {found_logits.shape}')
  rows = []
  if outputs is not None:
    rows += _of_outputs(model, outputs, found_outputs, names or {})
  elif names or outputs_of is not None:
    raise errors.UsageError('names and outputs_of are for outputs of layers: give outputs=…')
  rows.append(Difference('logits', 'logits', _relative(found_logits, wanted)))
  if gradient is not None:
    if not isinstance(gradient, tuple | list) or len(gradient) != 2:
      raise errors.UsageError(f'gradient is {errors.shown(gradient)}, expected (gradient, labels)')
    rows += _of_gradients(model, variables, images, *gradient, found_logits.shape[1], train)
  return Agreement(tuple(rows), float(tolerance))


def _images(images: Any) -> np.ndarray:
  """Returns the images as float32 [N, H, W, C]."""
  images = errors.host_array('images', images)
  if images.ndim != 4 or not len(images):
    raise errors.UsageError(f'images have shape {images.shape}, expected [N, H, W, C]: PyTorch has [N, C, H, W]')
  check_sample_shape(images.shape[1:])
  return images.astype(np.float32)


def _forward(
  model: Model, variables: Mapping, images: np.ndarray, train: bool, outputs_of: Callable | None
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
  """Returns (logits, {layer: its output}), outputs in the order in which they are computed."""
  order: list[str] = []

  @jax.jit
  def run(variables: Mapping, images: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    seen = {}

    def watch(next_function: Callable, args: tuple, kwargs: dict, context: Any) -> Any:
      output = next_function(*args, **kwargs)
      if context.method_name == '__call__' and context.module.path and hasattr(output, 'shape'):
        seen['/'.join(context.module.path)] = output
      return output

    with repeated.apart(), nn.intercept_methods(watch):
      logits, _ = model.apply(variables, images, train, None)
    if outputs_of is not None:
      seen = dict(outputs_of(variables['params'], images))
    order.extend(seen)
    return logits, seen

  logits, seen = run(variables, images)
  if getattr(logits, 'ndim', 0) != 2 or len(logits) != len(images):
    check_logits(model, logits, (len(images), -1))
  return np.asarray(logits), {name: np.asarray(seen[name]) for name in order}


def _of_outputs(
  model: Model, outputs: Mapping[str, Any], found: Mapping[str, np.ndarray], names: Mapping[str, str]
) -> list[Difference]:
  errors.check_instance('outputs', outputs, Mapping, 'a mapping of layers to their outputs')
  if not found:
    raise errors.UsageError(
      f'the model {model.name!r} is no Linen module: give outputs_of=, a function (params, images) -> {{layer: output}}'
    )
  wanted = {}
  for name, values in outputs.items():
    ours = names.get(name, str(name).replace('.', '/'))
    errors.check_choice('layer', ours, list(found))
    values = errors.host_array(f'the output of {name}', values)
    values = values.transpose(0, 2, 3, 1) if values.ndim == 4 else values
    shape = found[ours].shape
    if values.shape != shape:
      raise errors.UsageError(
        f'the output of {name} has shape {values.shape}, channels last, and that of the layer {ours} {shape}'
      )
    wanted[ours] = values
  return [Difference('output', name, _relative(found[name], wanted[name])) for name in found if name in wanted]


def _of_gradients(
  model: Model, variables: Mapping, images: np.ndarray, gradient: Tree, labels: Any, num_classes: int, train: bool
) -> list[Difference]:
  labels = errors.host_array('labels', labels)
  one_each = labels.shape == (len(images),) and labels.dtype.kind in 'iu'
  if not one_each or labels.min() < 0 or labels.max() >= num_classes:
    raise errors.UsageError(
      f'labels are {labels.dtype} of shape {labels.shape}, expected integers in [0, {num_classes - 1}], one per image'
    )

  def loss(params: Tree) -> jax.Array:
    given = {**variables, 'params': params}
    one_hot = jax.nn.one_hot(labels, num_classes)
    return per_example_loss(model, optax.softmax_cross_entropy, given, images, one_hot, train)[0].mean()

  ours = _named(jax.jit(jax.grad(loss))(variables['params']))
  theirs = _named(gradient)
  for name in [*(name for name in ours if name not in theirs), *(name for name in theirs if name not in ours)]:
    raise errors.UsageError(f'the gradient does not fit the model {model.name!r}: only one of them has {name}')
  for name, values in ours.items():
    if theirs[name].shape != values.shape:
      raise errors.UsageError(f'the gradient of {name} has shape {theirs[name].shape}, expected {values.shape}')
  layers = () if model.layers is None else model.layers(images.shape[1:])
  forward = ['/'.join(path) for layer in layers for path in layer.paths]
  order = [*(name for name in forward if name in ours), *(name for name in ours if name not in forward)]
  return [Difference('gradient', name, _relative(ours[name], theirs[name])) for name in order]


def _named(tree: Tree) -> dict[str, np.ndarray]:
  leaves = {'/'.join(trees.path_names(path)): leaf for path, leaf in jax.tree.leaves_with_path(tree)}
  return {name: errors.host_array(f'the gradient of {name}', leaf) for name, leaf in leaves.items()}


def _relative(found: np.ndarray, wanted: np.ndarray) -> float:
  found, wanted = found.astype(np.float64), wanted.astype(np.float64)
  size = float(np.linalg.norm(wanted))
  apart = float(np.linalg.norm(found - wanted))
  return apart / size if size > 0 or math.isnan(size) else apart
