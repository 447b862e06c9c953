"""Structural similarity (SSIM) on one scale and on several (MS-SSIM), one value per image."""

import jax
import jax.numpy as jnp
import numpy as np

from gradleak.metrics import pixel

WINDOW = 11  # pixels on a side
SIGMA = 1.5  # pixels
C1 = 0.01**2  # (K₁·L)² and (K₂·L)² for a data range of L = 1
C2 = 0.03**2
# Exponents of the scales, from the finest (Wang, Simoncelli, Bovik 2003, section 3.2).
EXPONENTS = (0.0448, 0.2856, 0.3001, 0.2363, 0.1333)


def ssim(reconstructions: jax.Array, truth: jax.Array) -> jax.Array:
  """Returns the mean SSIM (Wang et al. 2004) of both images clipped to [0, 1], over all channels and window positions.

  The window is a Gaussian of σ = 1.5 on `11×11` pixels, at all positions inside the image. The constants are `K₁ =
  0.01` and `K₂ = 0.03`, with data range 1 and population covariance. This equals scikit-image's
  `structural_similarity(gaussian_weights=True, sigma=1.5, use_sample_covariance=False, data_range=1, channel_axis=-1)`.
  That function refuses an image with a side of fewer than 11 pixels. Here the window is then the largest odd one that
  fits, with the same σ: `7×7` on `8×8` digits.

  Args:
    reconstructions: float [N, H, W, C], pixels may exceed [0, 1].
    truth: the same shape, pixels in [0, 1].

  Returns:
    float32 [N], at most 1; NaN for a pair with a non-finite pixel.

  Raises:
    UsageError: if the shapes differ, are not [N, H, W, C], or the images are not floating point.
  """
  luminance, structure = _similarities(*pixel.clipped_pair(reconstructions, truth))
  return jnp.mean(luminance * structure, axis=(1, 2, 3))


def ms_ssim(reconstructions: jax.Array, truth: jax.Array) -> jax.Array:
  """Returns the multi-scale SSIM of both images clipped to [0, 1], mean over channels.

  It is the product, over the scales, of the mean contrast-and-structure term raised to the scale's exponent. On the
  coarsest scale, luminance is also a factor. Source: Wang, Simoncelli, Bovik, Multiscale structural similarity for
  image quality assessment, Asilomar 2003, eq. 7. The next scale is the mean of 2×2 pixels; an odd side is continued by
  its last row or column. Window and constants are those of `ssim`. A mean below 0, which has no real power, counts as
  0.

  There are five scales from 161 pixels on. Smaller images have as many as leave sides of at least 11 pixels, with
  exponents scaled to sum 1. Images of 21 to 40 pixels, as in MNIST and CIFAR-10, have two scales. There are three
  scales from 41 pixels on, and four from 81. With fewer than 21 pixels, one is left: `ssim` per channel, not below 0.
  Figures on different numbers of scales do not compare.

  Arguments, NaNs and errors are those of `ssim`; returns float32 [N], in [0, 1].
  """
  x, y = pixel.clipped_pair(reconstructions, truth)
  scales = num_scales(*x.shape[1:3])
  product = jnp.ones((), x.dtype)
  for scale, exponent in enumerate(EXPONENTS[:scales]):
    if scale:
      x, y = _halved(x), _halved(y)
    luminance, structure = _similarities(x, y)
    mean = jnp.mean(luminance * structure if scale == scales - 1 else structure, axis=(1, 2))
    product = product * jnp.maximum(mean, 0.0) ** (exponent / sum(EXPONENTS[:scales]))
  return jnp.mean(product, axis=1)


def num_scales(height: int, width: int) -> int:
  """Returns on how many scales `ms_ssim` compares images of these sides, 1 to 5."""
  scales, side = 1, -(-min(height, width) // 2)
  while side >= WINDOW and scales < len(EXPONENTS):
    scales, side = scales + 1, -(-side // 2)
  return scales


def window_size(height: int, width: int) -> int:
  """Returns the side in pixels of the window that `ssim` uses: 11, or the largest odd one that fits."""
  side = min(WINDOW, height, width)
  return side if side % 2 else side - 1


def _similarities(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns the luminance term and the contrast-and-structure term at all positions of the window, [N, H', W', C]."""
  height, width = x.shape[1:3]
  size = window_size(height, width)
  # Variances are differences of moments; for pixels minus 0.5, moments and rounding errors are a quarter as large.
  x, y = x - 0.5, y - 0.5
  mean_x, mean_y, xx, yy, xy = jnp.einsum(
    'ih,mnhwc,jw->mnijc',
    _window_matrix(height, size),
    jnp.stack([x, y, x * x, y * y, x * y]),
    _window_matrix(width, size),
    precision=jax.lax.Precision.HIGHEST,  # a GPU's default, TF32, has rounding errors comparable to C2
  )
  variances = xx - mean_x**2 + yy - mean_y**2
  covariance = xy - mean_x * mean_y
  mean_x, mean_y = mean_x + 0.5, mean_y + 0.5
  luminance = (2 * mean_x * mean_y + C1) / (mean_x**2 + mean_y**2 + C1)
  return luminance, (2 * covariance + C2) / (variances + C2)


def _halved(images: jax.Array) -> jax.Array:
  """Returns the means of 2×2 pixels, [N, ⌈H/2⌉, ⌈W/2⌉, C]; an odd side is continued by its last row or column."""
  n, height, width, channels = images.shape
  images = jnp.pad(images, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode='edge')
  return images.reshape(n, -(-height // 2), 2, -(-width // 2), 2, channels).mean(axis=(2, 4))


def _window_matrix(side: int, size: int) -> jax.Array:
  """Returns float32 [side − size + 1, side]: row i weights the pixels i … i + size − 1 by a Gaussian of sum 1."""
  offsets = np.arange(size) - size // 2
  weights = np.exp(-0.5 * (offsets / SIGMA) ** 2)
  matrix = np.zeros((side - size + 1, side), np.float32)
  for row in range(len(matrix)):
    matrix[row, row : row + size] = weights / weights.sum()
  return jnp.asarray(matrix)
