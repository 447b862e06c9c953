"""Targets: what a loss compares the outputs of a network with, as floats in the shape of the outputs.

An attacker can so optimise them together with the samples.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradleak import data
from gradleak.core import errors

_SUM = 1e-3  # by which a sum of probabilities may differ from 1


@dataclasses.dataclass(frozen=True)
class Targets:
  """One kind of targets.

  Attributes:
    name: what texts call it.
    expected: (number of samples, number of outputs) -> what may be given, for messages.
    given: (targets as an array, number of samples, number of outputs) -> whether they are of this kind.
    check: (concrete targets, number of outputs, what a sample is called) -> None; raises `UsageError` for values out of
      range.
    encode: (targets, number of outputs, dtype) -> floats in the shape of the outputs.
    relax: free variables in the shape of the outputs -> targets that a search may take.
    draw: (key, shape of the outputs) -> random targets, as they may be given.
    decide: outputs or targets [N, outputs] -> a whole number for each sample, which is equal where all that is decided
      is, int [N]; None where nothing is.
  """

  name: str
  expected: Callable[[int, int], str]
  given: Callable[[Any, int, int], bool]
  check: Callable[[Any, int, str], None]
  encode: Callable[[jax.Array, int, Any], jax.Array]
  relax: Callable[[jax.Array], jax.Array]
  draw: Callable[[jax.Array, tuple[int, ...]], jax.Array]
  decide: Callable[[jax.Array], jax.Array] | None = None

  def __repr__(self) -> str:
    return self.name

  def kept(self, targets: np.ndarray, floating: Any = np.float32) -> np.ndarray:
    """Returns targets as they are kept: classes as int32, others as floats with the axis of the outputs."""
    targets = np.asarray(targets)
    if self in (CLASSES, SAMPLES):
      return targets.astype(np.int32 if _integral(targets) else floating)
    return targets.astype(floating).reshape(len(targets), *(targets.shape[1:] or (1,)))

  def checked(self, targets: Any, count: int, outputs: int, noun: str = 'sample') -> Any:
    """Returns targets as an array; the values of traced ones are not read.

    Args:
      targets: of the samples.
      count: number of samples.
      outputs: size of the last axis of what the network returns: its number of classes, flags or values.
      noun: what one sample is called.

    Raises:
      UsageError: for targets of another kind, or out of range.
    """
    targets = errors.as_array('targets', targets)
    if not self.given(targets, count, outputs):
      raise errors.UsageError(
        f'labels are {targets.dtype} of shape {targets.shape}, expected {self.expected(count, outputs)}'
        + (data.column(targets.shape, count) if outputs > 1 else '')
      )
    if not isinstance(targets, jax.core.Tracer):
      self.check(targets, outputs, noun)
    return targets

  def check_shape(self, targets: Any, outputs: tuple[int, ...]) -> None:
    """Raises `UsageError` for targets of another shape than the outputs.

    Args:
      targets: as `checked` returns them, [N, …].
      outputs: shape of what the model returns for one sample.
    """
    count = len(targets)
    if jax.eval_shape(lambda x: self.encode(x, outputs[-1], float), targets).shape != (count, *outputs):
      raise errors.UsageError(
        f'targets are {targets.dtype} of shape {targets.shape}, and the model returns outputs of shape '
        f'{(count, *outputs)}: expected {self._like(count, outputs)}{data.column(targets.shape, count)}'
      )

  def _like(self, count: int, outputs: tuple[int, ...]) -> str:
    """Returns what may be given for outputs of this shape of one sample, for messages."""
    if len(outputs) == 1 or self.name != 'classes':
      return self.expected(count, outputs[-1])
    return (
      f'a class for each position, integers {(count, *outputs[:-1])} or floats {(count, *outputs)}; for one class of '
      f'each sample, a model returns outputs of shape {(count, outputs[-1])}'
    )


def _floating(targets: Any) -> bool:
  return bool(jnp.issubdtype(targets.dtype, jnp.floating))


def _integral(targets: Any) -> bool:
  return bool(jnp.issubdtype(targets.dtype, jnp.integer))


def _like_outputs(targets: Any, count: int, outputs: int) -> bool:
  """Returns whether targets have the shape of the outputs; of one output, its axis may be missing."""
  shape = targets.shape
  return (len(shape) > 1 and shape[0] == count and shape[-1] == outputs) or (outputs == 1 and shape == (count,))


def _with_axis(targets: jax.Array, outputs: int, dtype: Any) -> jax.Array:
  targets = jnp.asarray(targets, dtype)
  return targets[:, jnp.newaxis] if targets.ndim == 1 and outputs == 1 else targets


def _classes(targets: Any, count: int, outputs: int) -> bool:
  if _floating(targets):
    return targets.ndim > 1 and targets.shape[0] == count and targets.shape[-1] == outputs
  return _integral(targets) and targets.ndim > 0 and targets.shape[0] == count and outputs > 1


def _check_classes(targets: Any, outputs: int, noun: str) -> None:
  if _integral(targets):
    data.check_classes(targets, outputs, noun)
    return
  values = np.asarray(targets, np.float64)
  wrong = np.argwhere(~((values >= 0) & np.isfinite(values)))
  if len(wrong):
    *place, output = map(int, wrong[0])
    raise errors.UsageError(
      f'{_place(noun, place)} has the probability {values[tuple(wrong[0])]:g} of class {output}, expected numbers ≥ 0 '
      'that sum to 1'
    )
  sums = values.sum(axis=-1)
  apart = np.argwhere(np.abs(sums - 1) > _SUM * max(1, float(jnp.finfo(targets.dtype).eps) / 1e-4))
  if len(apart):
    place = [int(one) for one in apart[0]]
    raise errors.UsageError(
      f'the probabilities of {_place(noun, place)} sum to {sums[tuple(place)]:.6g}, expected 1: of several classes at '
      "once, each with a probability of its own, the loss is 'binary_cross_entropy'"
    )


def _place(noun: str, place: Sequence[int]) -> str:
  """Returns what a sample is called, with the position in it where it has several."""
  number, *position = place
  return f'{noun} {number}' + (f' at {tuple(position)}' if position else '')


def _encoded_classes(targets: jax.Array, outputs: int, dtype: Any) -> jax.Array:
  if _floating(targets):
    return targets
  if isinstance(targets, np.ndarray):  # nothing is compiled for each number of samples
    return jax.device_put((targets[..., np.newaxis] == np.arange(outputs)).astype(dtype))
  return jax.nn.one_hot(targets, outputs, dtype=dtype)


def _expected_classes(count: int, outputs: int) -> str:
  floats = f'floats of shape {(count, outputs)}'
  if outputs == 1:
    return f'probabilities, {floats}: of one class, all integers are 0'
  return f'{count} integers, or probabilities: {floats}'


CLASSES = Targets(
  'classes',
  _expected_classes,
  _classes,
  _check_classes,
  _encoded_classes,
  jax.nn.softmax,
  lambda key, shape: jax.random.randint(key, shape[:-1], 0, shape[-1]),
  functools.partial(jnp.argmax, axis=-1),
)


_MOST_FLAGS = 30  # of which a combination is one number


def _combination(flags: jax.Array) -> jax.Array:
  """Returns the number of the combination of flags that are above 0, int32 [N]."""
  if flags.shape[-1] > _MOST_FLAGS:
    raise errors.UsageError(f'accuracy is counted for at most {_MOST_FLAGS} flags, and there are {flags.shape[-1]}')
  places = jnp.asarray([[2**place for place in range(flags.shape[-1])]], jnp.int32)
  return jnp.sum(jnp.where(flags > 0, places, 0), axis=-1)


def _check_flags(targets: Any, outputs: int, noun: str) -> None:
  del outputs
  values = np.asarray(targets)
  wrong = np.argwhere(~((values >= 0) & (values <= 1)))  # true for NaN as well
  if len(wrong):
    raise errors.UsageError(
      f'{noun} {wrong[0][0]} has the label {values[tuple(wrong[0])]}, expected 0, 1 or a probability'
    )


FLAGS = Targets(
  'flags',
  lambda count, outputs: f'0 and 1 for each output, of shape {(count, outputs)}',
  _like_outputs,
  _check_flags,
  _with_axis,
  jax.nn.sigmoid,
  lambda key, shape: jax.random.bernoulli(key, shape=shape).astype(jnp.float32),
  _combination,
)


def _check_values(targets: Any, outputs: int, noun: str) -> None:
  values = np.asarray(targets)
  wrong = np.argwhere(~np.isfinite(values))
  if len(wrong):
    of = f', output {wrong[0][-1]},' if outputs > 1 else ''
    raise errors.UsageError(
      f'the target of {noun} {wrong[0][0]}{of} is {values[tuple(wrong[0])]}, expected finite numbers'
    )


VALUES = Targets(
  'values',
  lambda count, outputs: f'floats for each output, of shape {(count, outputs)}',
  lambda targets, count, outputs: _floating(targets) and _like_outputs(targets, count, outputs),
  _check_values,
  _with_axis,
  lambda free: free,
  lambda key, shape: jax.random.normal(key, shape),
)


def _of_samples(targets: Any, count: int, outputs: int) -> bool:
  if _integral(targets):
    return targets.shape == (count,)
  whole = targets.ndim > 2 and _like_outputs(targets, count, outputs)
  return _floating(targets) and (targets.shape == (count, 1) or whole)


def _check_known(targets: Any, outputs: int, noun: str) -> None:
  del outputs
  if _integral(targets):
    data.check_classes(targets, noun=noun)


# Targets that the samples give: what is given in their place says of what kind a sample is, and counts for no loss.
SAMPLES = Targets(
  'samples',
  lambda count, outputs: f'{count} integers, the kind of each sample: its targets are its own tokens',
  _of_samples,
  _check_known,
  lambda targets, outputs, dtype: targets if _floating(targets) else jnp.zeros((*targets.shape, 1), dtype),
  jax.nn.softmax,
  lambda key, shape: jnp.zeros(shape[:1], jnp.int32),
  functools.partial(jnp.argmax, axis=-1),
)

KINDS = {one.name: one for one in (CLASSES, FLAGS, VALUES)}
