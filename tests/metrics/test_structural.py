"""SSIM against scikit-image, and against its definition where scikit-image has no window."""

import jax
import numpy as np
import pytest
from scipy import ndimage

from gradleak import metrics
from gradleak.metrics import structural

ssim = jax.jit(metrics.ssim)  # op by op, each of the many shapes would compile thirty times


def smooth_pair(shape, noise, seed=0):
  """A batch of waves, and the same with noise beyond [0, 1]."""
  rng = np.random.default_rng(seed)
  y, x = np.linspace(0, 1, shape[1]).reshape(-1, 1, 1), np.linspace(0, 1, shape[2]).reshape(1, -1, 1)
  frequency, slant = rng.uniform(1, 9, (shape[0], 1, 1, shape[3])), rng.uniform(-1, 1, (shape[0], 1, 1, shape[3]))
  truth = 0.5 + 0.5 * np.sin(frequency * (y + slant * x))
  return (truth + rng.normal(0, noise, shape)).astype(np.float32), truth.astype(np.float32)


def ssim_of_scikit_image(reconstructions, truth):
  from skimage.metrics import structural_similarity

  settings = {'gaussian_weights': True, 'sigma': 1.5, 'use_sample_covariance': False, 'data_range': 1}
  pairs = zip(np.clip(reconstructions, 0, 1).astype(np.float64), truth.astype(np.float64), strict=True)
  return [structural_similarity(t, r, channel_axis=-1, **settings) for r, t in pairs]


def ssim_by_definition(reconstruction, truth, size):
  """Window by window, in float64, for one image in [0, 1]."""
  offsets = np.arange(size) - (size - 1) / 2
  window = np.exp(-(offsets[:, None] ** 2 + offsets[None, :] ** 2) / (2 * 1.5**2))
  window /= window.sum()
  values = []
  for channel in range(truth.shape[2]):
    for i in range(truth.shape[0] - size + 1):
      for j in range(truth.shape[1] - size + 1):
        x = reconstruction[i : i + size, j : j + size, channel].astype(np.float64)
        y = truth[i : i + size, j : j + size, channel].astype(np.float64)
        mx, my = (window * x).sum(), (window * y).sum()
        vx, vy = (window * (x - mx) ** 2).sum(), (window * (y - my) ** 2).sum()
        vxy = (window * (x - mx) * (y - my)).sum()
        values.append((2 * mx * my + 1e-4) * (2 * vxy + 9e-4) / ((mx**2 + my**2 + 1e-4) * (vx + vy + 9e-4)))
  return np.mean(values)


@pytest.mark.parametrize(
  'shape', [(2, 25, 25, 1), (2, 32, 32, 3), (2, 28, 28, 1), (1, 11, 11, 1), (1, 12, 19, 2), (1, 64, 48, 3)]
)
@pytest.mark.parametrize('noise', [0.01, 0.2])
def test_equals_scikit_image(shape, noise):
  reconstructions, truth = smooth_pair(shape, noise)
  expected = ssim_of_scikit_image(reconstructions, truth)
  np.testing.assert_allclose(ssim(reconstructions, truth), expected, rtol=0, atol=1e-4)
  assert np.max(expected) < 0.9995  # not a comparison of ones


def test_equals_scikit_image_on_flat_images_where_rounding_counts():
  rng = np.random.default_rng(1)
  truth = (0.99 + 0.004 * rng.uniform(size=(4, 32, 32, 3))).astype(np.float32)
  reconstructions = (0.99 + 0.004 * rng.uniform(size=truth.shape)).astype(np.float32)
  expected = ssim_of_scikit_image(reconstructions, truth)
  np.testing.assert_allclose(ssim(reconstructions, truth), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
  'shape, size', [((8, 8, 1), 7), ((10, 25, 2), 9), ((6, 9, 1), 5), ((2, 7, 1), 1), ((14, 12, 1), 11)]
)
def test_small_images_take_the_largest_odd_window_that_fits(shape, size):
  reconstructions, truth = smooth_pair((2, *shape), 0.1)
  assert structural.window_size(*shape[:2]) == size
  expected = [ssim_by_definition(r, t, size) for r, t in zip(np.clip(reconstructions, 0, 1), truth, strict=True)]
  np.testing.assert_allclose(ssim(reconstructions, truth), expected, rtol=0, atol=1e-5)


def test_closed_form_of_two_constants():
  black, white = np.zeros((1, 16, 16, 1), np.float32), np.ones((1, 16, 16, 1), np.float32)
  np.testing.assert_allclose(ssim(white, black), [1e-4 / (1 + 1e-4)], rtol=1e-3)
  np.testing.assert_allclose(ssim(white, white), [1], atol=1e-6)


def test_exact_is_one_and_clipping_comes_first():
  truth = (smooth_pair((2, 16, 16, 3), 0)[1] > 0.5).astype(np.float32)
  np.testing.assert_allclose(ssim(truth, truth), [1, 1], atol=1e-6)
  np.testing.assert_allclose(ssim(3 * truth - 1, truth), [1, 1], atol=1e-6)


def test_a_negative_scores_below_zero():
  truth = smooth_pair((1, 16, 16, 1), 0)[1]
  assert ssim(1 - truth, truth)[0] < 0


def ms_ssim_by_definition(reconstruction, truth, scales):
  """Wang, Simoncelli and Bovik's product for one channel of images in [0, 1], in float64."""
  exponents = np.array([0.0448, 0.2856, 0.3001, 0.2363, 0.1333][:scales])
  window = np.exp(-(np.arange(-5, 6) ** 2) / (2 * 1.5**2))
  window /= window.sum()

  def smooth(image):
    for axis in (0, 1):
      image = ndimage.correlate1d(image, window, axis)
    return image[5:-5, 5:-5]

  def halved(image):
    rows, columns = (np.arange(0, side, 2) for side in image.shape)
    following = [np.minimum(places + 1, side - 1) for places, side in zip((rows, columns), image.shape, strict=True)]
    return sum(image[np.ix_(r, c)] for r in (rows, following[0]) for c in (columns, following[1])) / 4

  x, y = reconstruction.astype(np.float64), truth.astype(np.float64)
  value = 1.0
  for scale, exponent in enumerate(exponents / exponents.sum()):
    mx, my = smooth(x), smooth(y)
    vx, vy, vxy = smooth(x * x) - mx**2, smooth(y * y) - my**2, smooth(x * y) - mx * my
    term = (2 * vxy + 9e-4) / (vx + vy + 9e-4)
    if scale == scales - 1:
      term = term * (2 * mx * my + 1e-4) / (mx**2 + my**2 + 1e-4)
    value *= max(term.mean(), 0) ** exponent
    x, y = halved(x), halved(y)
  return value


@pytest.mark.parametrize(
  'shape, scales', [((2, 176, 176, 1), 5), ((1, 161, 187, 2), 5), ((1, 160, 90, 1), 4), ((2, 32, 32, 3), 2)]
)
def test_multiscale_equals_its_definition(shape, scales):
  reconstructions, truth = smooth_pair(shape, 0.2)
  pairs = list(zip(np.clip(reconstructions, 0, 1), truth, strict=True))
  expected = [
    np.mean([ms_ssim_by_definition(r[:, :, c], t[:, :, c], scales) for c in range(shape[3])]) for r, t in pairs
  ]
  np.testing.assert_allclose(jax.jit(metrics.ms_ssim)(reconstructions, truth), expected, rtol=0, atol=1e-4)
  assert np.min(expected) > 0.1 and np.max(expected) < 0.9995


def test_as_many_scales_as_fit():
  sides = {8: 1, 11: 1, 20: 1, 21: 2, 28: 2, 32: 2, 40: 2, 41: 3, 80: 3, 81: 4, 160: 4, 161: 5, 1000: 5}
  assert {side: structural.num_scales(side, side + 3) for side in sides} == sides


def test_an_inverted_image_has_no_multiscale_similarity():
  _, truth = smooth_pair((1, 16, 16, 1), 0)
  assert metrics.ms_ssim(1 - truth, truth)[0] == 0
  assert metrics.ms_ssim(truth, truth)[0] == pytest.approx(1, abs=1e-6)
