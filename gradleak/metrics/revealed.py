"""How many private samples an attack that returns more, fewer or mixed images has revealed (Fidel, section V-B)."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gradleak import errors

FULLY = 0.98  # Pearson correlation from which Fidel calls a sample fully revealed


class Revealed(NamedTuple):
  """What is known of each of N private samples.

  Attributes:
    count: number of samples revealed, an int32 scalar.
    samples: bool [N], which.
    correlation: float32 [N], the best that any reconstruction reaches.
    neuron: int32 [N], the reconstruction that reaches it, the first of equals.
  """

  count: jax.Array
  samples: jax.Array
  correlation: jax.Array
  neuron: jax.Array


def fully_revealed(reconstructions, truth, *, threshold: float = FULLY, signed: bool = True):
  """Counts the private samples with which some reconstruction correlates: each once, however many show it.

  Scale and offset do not count, as in `metrics.pearson`. A constant image, a dead neuron's zeros among them, correlates
  with nothing, nor does one with a pixel that is not finite. Pure; works under `jit` and `vmap`; takes the memory of a
  second copy of both arguments and of M × N correlations.

  Args:
    reconstructions: float [M, ...], in any order, on any scale.
    truth: float [N, ...] of the same number of pixels each.
    threshold: in [0, 1].
    signed: False takes the absolute value, for reconstructions whose sign cannot be known (Fidel without the bias
      gradient).

  Returns:
    A `Revealed`.

  Raises:
    UsageError: if shapes do not fit, or the threshold is out of range.
  """
  errors.check_number('threshold', threshold, low=0, high=1)
  reconstructions, truth = (jnp.asarray(images) for images in (reconstructions, truth))
  shapes = reconstructions.shape, truth.shape
  if min(map(len, shapes)) < 2 or 0 in (*shapes[0], *shapes[1]) or math.prod(shapes[0][1:]) != math.prod(shapes[1][1:]):
    raise errors.UsageError(
      f'reconstructions have shape {shapes[0]}, the truth {shapes[1]}; expected [M, …] and [N, …] of as many pixels'
    )
  rows, images = (_centred_unit(x.reshape(len(x), -1)) for x in (reconstructions, truth))
  # One product: no pair of images is held, and TF32, a GPU's default, would err near the threshold.
  correlations = jnp.clip(jnp.matmul(rows, images.T, precision=jax.lax.Precision.HIGHEST), -1.0, 1.0)
  correlations = correlations if signed else jnp.abs(correlations)
  best = correlations.max(axis=0)
  samples = best >= jnp.asarray(threshold, best.dtype)
  return Revealed(jnp.sum(samples, dtype=jnp.int32), samples, best, correlations.argmax(axis=0).astype(jnp.int32))


def _centred_unit(rows):
  """Returns float32 rows less their mean, at Euclidean norm 1; zeros for a constant or a non-finite one."""
  finite = jnp.isfinite(rows).all(axis=1, keepdims=True)
  # Made smaller, so that no difference overflows, nor its reciprocal underflows.
  rows = 0.0625 * jnp.where(finite, rows, jnp.zeros_like(rows)).astype(jnp.float32)
  low = rows.min(axis=1, keepdims=True)
  spread = rows.max(axis=1, keepdims=True) - low
  # Brought to [0, 1] first: a constant image becomes exactly zero, and squares neither overflow nor underflow.
  rows = (rows - low) / jnp.where(spread == 0, 1.0, spread)
  rows = rows - rows.mean(axis=1, keepdims=True)
  norm = jnp.sqrt(jnp.sum(jnp.square(rows), axis=1, keepdims=True))
  return rows / jnp.where(norm == 0, 1.0, norm)
