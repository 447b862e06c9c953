"""Counts the private samples revealed by an attack that returns more, fewer or mixed images (Fidel, section V-B)."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gradleak.core import errors

FULLY = 0.98  # the least Pearson correlation of what Fidel calls a fully revealed sample
LEVEL = 1 / 255  # of 8 bits: the root mean squared error, in units of the pixels' range, up to which an image is exact


class Revealed(NamedTuple):
  """Which of N private samples are revealed.

  Attributes:
    count: number of samples revealed, an int32 scalar.
    samples: bool [N], whether each is revealed.
    correlation: float32 [N], the largest over all reconstructions; NaN where none is defined.
    neuron: int32 [N], the first reconstruction with that correlation; of an image that is revealed by `within` alone,
      the nearest one.
  """

  count: jax.Array
  samples: jax.Array
  correlation: jax.Array
  neuron: jax.Array


def fully_revealed(
  reconstructions: jax.Array,
  truth: jax.Array,
  *,
  threshold: float = FULLY,
  signed: bool = True,
  within: float | None = None,
  blank: bool = True,
) -> Revealed:
  """Returns which private samples correlate with at least one reconstruction, to at least `threshold`.

  Scale and offset have no effect, as in `metrics.pearson`. Constant images, such as a dead neuron's zeros, and images
  with a non-finite pixel have no correlation. Where the variance of a sample vanishes, correlation says nothing of it,
  and `within` decides. Pure; works under `jit` and `vmap`; needs memory for a copy of both arguments and for M × N
  correlations.

  Args:
    reconstructions: float [M, ...], in any order, on any scale.
    truth: float [N, ...] of the same number of pixels each.
    threshold: in [0, 1].
    signed: False uses the absolute correlation, for attacks that cannot determine the sign (Fidel without the bias
      gradient).
    within: the root mean squared error up to which a sample is revealed, too, whatever its correlation: `LEVEL` for
      pixels in [0, 1]. None leaves it to the correlation, for data on other scales.
    blank: whether a reconstruction of zeros counts there. Closed forms return zeros for want of an answer.

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
  flat = [x.reshape(len(x), -1) for x in (reconstructions, truth)]
  rows, images = map(_centred_unit, flat)
  answers = flat[0].any(axis=1) | blank
  # One matrix product, without an array of pairs of images. A GPU's default, TF32, is too inaccurate at the threshold.
  correlations = jnp.clip(jnp.matmul(rows, images.T, precision=jax.lax.Precision.HIGHEST), -1.0, 1.0)
  correlations = correlations if signed else jnp.abs(correlations)
  varies = [x.any(axis=1) for x in (rows, images)]
  correlations = jnp.where(varies[0][:, None] & varies[1][None, :], correlations, -jnp.inf)
  best, neuron = correlations.max(axis=0), correlations.argmax(axis=0)
  samples = best >= jnp.asarray(threshold, best.dtype)
  if within is not None:
    errors.check_number('within', within, low=0, finite=True)
    error = _mean_squares(*flat)
    error = jnp.where(jnp.isnan(error) | ~answers[:, None], jnp.inf, error)
    near = error.min(axis=0) <= jnp.float32(within**2)
    samples, neuron = samples | near, jnp.where(near & ~samples, error.argmin(axis=0), neuron)
  correlation = jnp.where(jnp.isneginf(best), jnp.nan, best)
  return Revealed(jnp.sum(samples, dtype=jnp.int32), samples, correlation, neuron.astype(jnp.int32))


def _mean_squares(rows: jax.Array, images: jax.Array) -> jax.Array:
  """Returns float32 [M, N], the mean squared difference of each row and image; NaN where a pixel is not finite."""
  rows, images = rows.astype(jnp.float32), images.astype(jnp.float32)
  # Minus one half, pixels in [0, 1] lose fewer digits when |r − x|² is expanded.
  rows, images = rows - 0.5, images - 0.5
  products = jnp.matmul(rows, images.T, precision=jax.lax.Precision.HIGHEST)
  squares = jnp.sum(jnp.square(rows), axis=1)[:, None] + jnp.sum(jnp.square(images), axis=1)[None, :]
  return jnp.maximum(squares - 2 * products, 0.0) / rows.shape[1]


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
