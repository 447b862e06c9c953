"""Structural similarity (SSIM), one value per image."""

import jax
import jax.numpy as jnp
import numpy as np

from gradleak.metrics import pixel

WINDOW = 11  # pixels on a side
SIGMA = 1.5  # pixels
C1 = 0.01**2  # (K₁·L)² and (K₂·L)² for a data range of L = 1
C2 = 0.03**2


def ssim(reconstructions: jax.Array, truth: jax.Array) -> jax.Array:
  """Returns the mean SSIM (Wang et al. 2004) of both images clipped to [0, 1], over all channels and window positions.

  The window is a Gaussian of σ = 1.5 on 11×11 pixels, at all positions inside the image; K₁ = 0.01, K₂ = 0.03, data
  range 1, population covariance. This equals scikit-image's `structural_similarity(gaussian_weights=True, sigma=1.5,
  use_sample_covariance=False, data_range=1, channel_axis=-1)`. For an image with a side of fewer than 11 pixels, which
  that function refuses, the window is the largest odd one that fits (7×7 on 8×8 digits), with the same σ.

  Args:
    reconstructions: float [N, H, W, C], pixels may exceed [0, 1].
    truth: the same shape, pixels in [0, 1].

  Returns:
    float32 [N], at most 1; NaN for a pair with a non-finite pixel.

  Raises:
    UsageError: if the shapes differ, are not [N, H, W, C], or the images are not floating point.
  """
  x, y = pixel.clipped_pair(reconstructions, truth)
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
  structure = (2 * covariance + C2) / (variances + C2)
  return jnp.mean(luminance * structure, axis=(1, 2, 3))


def window_size(height: int, width: int) -> int:
  """Returns the side in pixels of the window that `ssim` uses: 11, or the largest odd one that fits."""
  side = min(WINDOW, height, width)
  return side if side % 2 else side - 1


def _window_matrix(side: int, size: int) -> jax.Array:
  """Returns float32 [side − size + 1, side]: row i weights the pixels i … i + size − 1 by a Gaussian of sum 1."""
  offsets = np.arange(size) - size // 2
  weights = np.exp(-0.5 * (offsets / SIGMA) ** 2)
  matrix = np.zeros((side - size + 1, side), np.float32)
  for row in range(len(matrix)):
    matrix[row, row : row + size] = weights / weights.sum()
  return jnp.asarray(matrix)
