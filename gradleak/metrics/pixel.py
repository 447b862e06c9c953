"""Pixel by pixel: mean squared error, PSNR and Pearson correlation, one figure per image.

Two images are a pair by their place in the batch; `assignment.match` finds the pairs of an unordered batch first. In
every metric here and in `structural`, a pair of which either image has a NaN or infinite pixel scores NaN: such a trial
has diverged, and clipping an infinity to 1 would give it a figure that looks earned. Its neighbours are untouched.
"""

import jax.numpy as jnp

from gradleak import errors

# In dB. An exact image would score infinity and drag the mean of its whole batch along; 100 dB is an error of 1e-5 per
# pixel, far below the step of 8-bit images (48 dB for an error of one level everywhere).
MAX_PSNR = 100.0


def mse(reconstructions, truth):
  """Mean squared error of both images clipped to [0, 1].

  Args:
    reconstructions: float [N, H, W, C], pixels in [0, 1] or beyond.
    truth: the same shape, pixels in [0, 1].

  Returns:
    float32 [N], in [0, 1]; NaN for a pair with a non-finite pixel.

  Raises:
    UsageError: if the shapes differ, are not [N, H, W, C], or the images are not floating point.
  """
  return _mean_square(*clipped_pair(reconstructions, truth))


def psnr(reconstructions, truth):
  """Peak signal-to-noise ratio in dB, −10·log₁₀(`mse`): peak 1, both images clipped to [0, 1], at most `MAX_PSNR`.

  Arguments, NaNs and errors are those of `mse`; returns float32 [N].
  """
  return _decibels(mse(reconstructions, truth))


def mse_unclipped(reconstructions, truth):
  """Mean squared error of the images as they are, to stand beside FFL's and OUTPOST's figures; inf beyond float32.

  Arguments, NaNs and errors are those of `mse`; returns float32 [N].
  """
  return _mean_square(*float_pair(reconstructions, truth))


def psnr_unclipped(reconstructions, truth):
  """PSNR in dB of the images as they are (FFL, OUTPOST): negative for an error above 1, at most `MAX_PSNR`.

  Arguments, NaNs and errors are those of `mse`; returns float32 [N].
  """
  return _decibels(mse_unclipped(reconstructions, truth))


def pearson(reconstructions, truth):
  """Pearson correlation over all pixels and channels of an image, on images as they are: scale and offset do not count.

  Signed: a negative scores below 0 (where the sign cannot be known, as in Fidel without the bias gradient, take the
  absolute value). Fidel counts a sample as fully revealed from 0.98. A constant image, whose correlation is undefined,
  scores 0.

  Arguments, NaNs and errors are those of `mse`; returns float32 [N] in [−1, 1].
  """
  units = [_centred_unit(images) for images in float_pair(reconstructions, truth)]
  return jnp.clip(jnp.sum(units[0] * units[1], axis=(1, 2, 3)), -1.0, 1.0)


def float_pair(reconstructions, truth):
  """Returns both as float32, with every image that has a non-finite pixel NaN throughout; raises as `mse` does."""
  pair = [jnp.asarray(reconstructions), jnp.asarray(truth)]
  check_shapes(pair[0].shape, pair[1].shape)
  for name, images in zip(('reconstructions', 'truth'), pair, strict=True):
    if not jnp.issubdtype(images.dtype, jnp.floating):
      raise errors.UsageError(f'{name} are {images.dtype}, expected float32 with pixels in [0, 1]')
  return [_nan_if_not_finite(images.astype(jnp.float32)) for images in pair]


def clipped_pair(reconstructions, truth):
  """Returns `float_pair`, clipped to [0, 1]; NaNs stay."""
  return [jnp.clip(images, 0.0, 1.0) for images in float_pair(reconstructions, truth)]


def check_shapes(reconstructions, truth):
  """Raises `UsageError` unless the two shapes are equal and [N, H, W, C] with no side of length zero."""
  if len(truth) != 4 or 0 in truth:
    raise errors.UsageError(f'the truth has shape {truth}, expected [N, H, W, C] with at least one image')
  if reconstructions != truth:
    raise errors.UsageError(f'reconstructions have shape {reconstructions}, expected that of the truth, {truth}')


def _nan_if_not_finite(images):
  finite = jnp.isfinite(images).all(axis=(1, 2, 3), keepdims=True)
  return jnp.where(finite, images, jnp.nan)


def _mean_square(reconstructions, truth):
  return jnp.mean(jnp.square(reconstructions - truth), axis=(1, 2, 3))


def _decibels(mean_square):
  return jnp.minimum(-10.0 * jnp.log10(mean_square), MAX_PSNR)


def _centred_unit(images):
  """Returns each image less its mean, at Euclidean norm 1; zeros for a constant image, NaNs for a NaN one."""
  low = images.min(axis=(1, 2, 3), keepdims=True)
  spread = images.max(axis=(1, 2, 3), keepdims=True) - low
  # Brought to [0, 1] first: a constant image becomes exactly zero (its mean would differ from it by a rounding error,
  # and correlate), and squares neither overflow nor underflow.
  images = (images - low) / jnp.where(spread == 0, 1.0, spread)
  images = images - images.mean(axis=(1, 2, 3), keepdims=True)
  norm = jnp.sqrt(jnp.sum(jnp.square(images), axis=(1, 2, 3), keepdims=True))
  return images / jnp.where(norm == 0, 1.0, norm)
