"""Pixel metrics: mean squared error, PSNR and Pearson correlation, one value per image.

Images at the same index are a pair; `assignment.match` orders an unordered batch. In every metric here and in
`structural`, a pair with a NaN or infinite pixel in either image has the value NaN. The trial has diverged, and a value
after clipping infinity to 1 would be misleading. Other pairs are not affected.
"""

from typing import Any

import jax
import jax.numpy as jnp

from gradleak.core import errors

# In dB. The PSNR of an exact image, and so the mean of its batch, would be infinite without the limit of 100 dB. That
# limit is an error of 1e-5 per pixel, far below the resolution of 8-bit images. An error of one level everywhere is 48
# dB.
MAX_PSNR = 100.0


def mse(reconstructions: jax.Array, truth: jax.Array) -> jax.Array:
  """Returns the mean squared error of both images clipped to [0, 1].

  Args:
    reconstructions: float [N, H, W, C], pixels may exceed [0, 1].
    truth: the same shape, pixels in [0, 1].

  Returns:
    float32 [N], in [0, 1]; NaN for a pair with a non-finite pixel.

  Raises:
    UsageError: if the shapes differ, are not [N, H, W, C], or the images are not floating point.
  """
  return _mean_square(*clipped_pair(reconstructions, truth))


def psnr(reconstructions: jax.Array, truth: jax.Array) -> jax.Array:
  """Returns the peak signal-to-noise ratio in dB, −10·log₁₀(`mse`): peak 1, images clipped to [0, 1], ≤ `MAX_PSNR`.

  Arguments, NaNs and errors are those of `mse`; returns float32 [N].
  """
  return _decibels(mse(reconstructions, truth))


def mse_unclipped(reconstructions: jax.Array, truth: jax.Array) -> jax.Array:
  """Returns the mean squared error without clipping, as FFL and OUTPOST report it; inf beyond float32.

  Arguments, NaNs and errors are those of `mse`; returns float32 [N].
  """
  return _mean_square(*float_pair(reconstructions, truth))


def psnr_unclipped(reconstructions: jax.Array, truth: jax.Array) -> jax.Array:
  """Returns the PSNR in dB without clipping (FFL, OUTPOST): negative for an error above 1, at most `MAX_PSNR`.

  Arguments, NaNs and errors are those of `mse`; returns float32 [N].
  """
  return _decibels(mse_unclipped(reconstructions, truth))


def pearson(reconstructions: jax.Array, truth: jax.Array) -> jax.Array:
  """Returns the Pearson correlation over all pixels and channels, without clipping; scale and offset have no effect.

  It is signed: an inverted image has a negative value. Use the absolute value where an attack cannot determine the
  sign, as Fidel without the bias gradient. Fidel counts a sample as fully revealed from 0.98. The correlation with a
  constant image, whose variance is 0, is not defined: NaN.

  Arguments, other NaNs and errors are those of `mse`; returns float32 [N] in [−1, 1].
  """
  units = [_centred_unit(images) for images in float_pair(reconstructions, truth)]
  return jnp.clip(jnp.sum(units[0] * units[1], axis=(1, 2, 3)), -1.0, 1.0)


def float_pair(reconstructions: Any, truth: Any) -> list[jax.Array]:
  """Returns both as float32, images with a non-finite pixel entirely NaN; raises as `mse` does."""
  given = {'reconstructions': reconstructions, 'truth': truth}
  pair = [jnp.asarray(errors.as_array(name, images)) for name, images in given.items()]
  check_shapes(pair[0].shape, pair[1].shape)
  for name, images in zip(('reconstructions', 'truth'), pair, strict=True):
    if not jnp.issubdtype(images.dtype, jnp.floating):
      raise errors.UsageError(f'{name} are {images.dtype}, expected float32 with pixels in [0, 1]')
  return [_nan_if_not_finite(images.astype(jnp.float32)) for images in pair]


def clipped_pair(reconstructions: Any, truth: Any) -> list[jax.Array]:
  """Returns `float_pair` clipped to [0, 1]; NaNs remain."""
  return [jnp.clip(images, 0.0, 1.0) for images in float_pair(reconstructions, truth)]


def check_shapes(reconstructions: tuple[int, ...], truth: tuple[int, ...]) -> None:
  """Raises `UsageError` unless the two shapes are equal and [N, H, W, C] with no side of length zero."""
  if len(truth) != 4 or 0 in truth:
    raise errors.UsageError(f'the truth has shape {truth}, expected [N, H, W, C] with at least one image')
  if reconstructions != truth:
    raise errors.UsageError(f'reconstructions have shape {reconstructions}, expected that of the truth, {truth}')


def _nan_if_not_finite(images: jax.Array) -> jax.Array:
  finite = jnp.isfinite(images).all(axis=(1, 2, 3), keepdims=True)
  return jnp.where(finite, images, jnp.nan)


def _mean_square(reconstructions: jax.Array, truth: jax.Array) -> jax.Array:
  return jnp.mean(jnp.square(reconstructions - truth), axis=(1, 2, 3))


def _decibels(mean_square: jax.Array) -> jax.Array:
  return jnp.minimum(-10.0 * jnp.log10(mean_square), MAX_PSNR)


def _centred_unit(images: jax.Array) -> jax.Array:
  """Returns each image minus its mean, scaled to norm 1; NaNs for a constant image, which has no such scale."""
  low = images.min(axis=(1, 2, 3), keepdims=True)
  spread = images.max(axis=(1, 2, 3), keepdims=True) - low
  # Scaling to [0, 1] first makes a constant image exactly zero, and squares neither overflow nor underflow. Minus its
  # rounded mean only, a constant image would be a small constant, which has norm 1 after scaling.
  images = (images - low) / jnp.where(spread == 0, 1.0, spread)
  images = images - images.mean(axis=(1, 2, 3), keepdims=True)
  norm = jnp.sqrt(jnp.sum(jnp.square(images), axis=(1, 2, 3), keepdims=True))
  return images / jnp.where(norm == 0, jnp.nan, norm)
