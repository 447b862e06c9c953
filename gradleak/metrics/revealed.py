"""Counts the private samples revealed by an attack that returns more, fewer or mixed images (Fidel, section V-B)."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gradleak import errors

FULLY = 0.98  # the least Pearson correlation of what Fidel calls a fully revealed sample


class Revealed(NamedTuple):
  """Which of N private samples are revealed.

  Attributes:
    count: number of samples revealed, an int32 scalar.
    samples: bool [N], whether each is revealed.
    correlation: float32 [N], the largest over all reconstructions.
    neuron: int32 [N], the first reconstruction with that correlation.
  """

  count: jax.Array
  samples: jax.Array
  correlation: jax.Array
  neuron: jax.Array


def fully_revealed(
  reconstructions: jax.Array, truth: jax.Array, *, threshold: float = FULLY, signed: bool = True
) -> Revealed:
  """Returns which private samples correlate with at least one reconstruction, to at least `threshold`.

  Scale and offset have no effect, as in `metrics.pearson`. Constant images, such as a dead neuron's zeros, and images
  with a non-finite pixel have correlation 0. Pure; works under `jit` and `vmap`; needs memory for a copy of both
  arguments and for M × N correlations.

  Args:
    reconstructions: float [M, ...], in any order, on any scale.
    truth: float [N, ...] of the same number of pixels each.
    threshold: in [0, 1].
    signed: False uses the absolute correlation, for attacks that cannot determine the sign (Fidel without the bias
      gradient).

  Returns:
    A `Revealed`.

  Raises:
    UsageError: if shapes do not fit, or the threshold is out of range.
  """
  errors.check_number('threshold', threshold, low=0, high=1)
  errors.check_instance('signed', signed, bool, 'True or False')
  reconstructions = jnp.asarray(errors.as_array('reconstructions', reconstructions))
  truth = jnp.asarray(errors.as_array('truth', truth))
  shapes = reconstructions.shape, truth.shape
  if min(map(len, shapes)) < 2 or 0 in (*shapes[0], *shapes[1]) or math.prod(shapes[0][1:]) != math.prod(shapes[1][1:]):
    raise errors.UsageError(
      f'reconstructions have shape {shapes[0]}, the truth {shapes[1]}; expected [M, …] and [N, …] of as many pixels'
    )
  rows, images = (_centred_unit(x.reshape(len(x), -1)) for x in (reconstructions, truth))
  # One matrix product, without an array of pairs of images. A GPU's default, TF32, is too inaccurate at the threshold.
  correlations = jnp.clip(jnp.matmul(rows, images.T, precision=jax.lax.Precision.HIGHEST), -1.0, 1.0)
  correlations = correlations if signed else jnp.abs(correlations)
  best = correlations.max(axis=0)
  samples = best >= jnp.asarray(threshold, best.dtype)
  return Revealed(jnp.sum(samples, dtype=jnp.int32), samples, best, correlations.argmax(axis=0).astype(jnp.int32))


def _centred_unit(rows: jax.Array) -> jax.Array:
  """Returns float32 rows minus their mean, scaled to norm 1; zeros for a constant or a non-finite one."""
  finite = jnp.isfinite(rows).all(axis=1, keepdims=True)
  # Scaled down so that no difference overflows and no reciprocal underflows.
  rows = 0.0625 * jnp.where(finite, rows, jnp.zeros_like(rows)).astype(jnp.float32)
  low = rows.min(axis=1, keepdims=True)
  spread = rows.max(axis=1, keepdims=True) - low
  # Scaled to [0, 1] first: a constant image becomes exactly zero, and squares neither overflow nor underflow.
  rows = (rows - low) / jnp.where(spread == 0, 1.0, spread)
  rows = rows - rows.mean(axis=1, keepdims=True)
  norm = jnp.sqrt(jnp.sum(jnp.square(rows), axis=1, keepdims=True))
  return rows / jnp.where(norm == 0, 1.0, norm)
