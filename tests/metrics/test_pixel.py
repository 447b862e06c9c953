"""Pixel metrics against closed forms, NumPy and scikit-image."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradleak import metrics
from gradleak.core import errors

SHAPE = (3, 9, 7, 2)
NAMES = sorted(metrics.REGISTRY)


def pair(seed=0, shape=SHAPE, low=0.0, high=1.0):
  rng = np.random.default_rng(seed)
  truth = rng.uniform(0, 1, shape).astype(np.float32)
  return rng.uniform(low, high, shape).astype(np.float32), truth


def constant(*values, side=12):
  return np.stack([np.full((side, side, 1), value, np.float32) for value in values])


def test_closed_forms():
  reconstructions, truth = constant(0.5, 0.6, 1.0), constant(0.4, 0.6, 0.0)
  np.testing.assert_allclose(metrics.mse(reconstructions, truth), [0.01, 0, 1], rtol=1e-5)
  np.testing.assert_allclose(metrics.psnr(reconstructions, truth), [20, metrics.MAX_PSNR, 0], atol=1e-4)


def test_unclipped_differs_beyond_the_box_only():
  reconstructions, truth = constant(3.0, -1.0, 0.5), constant(1.0, 0.5, 0.25)
  np.testing.assert_allclose(metrics.mse(reconstructions, truth), [0, 0.25, 0.0625], rtol=1e-5)
  np.testing.assert_allclose(metrics.mse_unclipped(reconstructions, truth), [4, 2.25, 0.0625], rtol=1e-5)
  np.testing.assert_allclose(
    metrics.psnr_unclipped(reconstructions, truth), [-6.0206, -3.5218, 12.0412], rtol=0, atol=1e-3
  )
  np.testing.assert_allclose(metrics.psnr(reconstructions, truth), [100, 6.0206, 12.0412], atol=1e-3)


def test_psnr_is_that_of_scikit_image():
  from skimage.metrics import peak_signal_noise_ratio

  reconstructions, truth = pair(1)
  expected = [peak_signal_noise_ratio(t, r, data_range=1) for r, t in zip(reconstructions, truth, strict=True)]
  np.testing.assert_allclose(metrics.psnr(reconstructions, truth), expected, rtol=1e-5)


def test_cap_is_reached_by_no_8_bit_image_but_the_exact_one():
  truth = np.full((1, 224, 224, 3), 0.5, np.float32)
  reconstructions = truth.copy()
  reconstructions[0, 0, 0, 0] += 1 / 255
  assert metrics.psnr(reconstructions, truth)[0] < metrics.MAX_PSNR
  assert metrics.psnr(truth, truth)[0] == metrics.MAX_PSNR == 100
  assert metrics.psnr_unclipped(truth, truth)[0] == metrics.MAX_PSNR


@pytest.mark.parametrize('low, high', [(0, 1), (-5, 3), (1e4, 2e4)])
def test_pearson_is_that_of_numpy(low, high):
  reconstructions, truth = pair(2, low=low, high=high)
  expected = [np.corrcoef(r.ravel(), t.ravel())[0, 1] for r, t in zip(reconstructions, truth, strict=True)]
  np.testing.assert_allclose(metrics.pearson(reconstructions, truth), expected, atol=2e-6)


@pytest.mark.parametrize(
  'scale, offset, sign', [(1, 0, 1), (7, -2, 1), (1e-3, 0.5, 1), (-3, 1, -1), (1e30, 0, 1), (1e-30, 0, 1)]
)
def test_pearson_ignores_scale_and_offset_but_not_sign(scale, offset, sign):
  truth = pair(3)[1]
  correlation = metrics.pearson(np.float32(scale) * truth + np.float32(offset), truth)
  np.testing.assert_allclose(correlation, sign, atol=1e-5)
  assert np.abs(correlation).max() <= 1


@pytest.mark.parametrize('value', [0.0, 0.1, 1 / 3, 1e20])
def test_pearson_of_a_constant_image_is_not_defined(value):
  # 0.1 and 1/3: their float32 mean differs from them, and the difference must not correlate.
  truth = pair(4)[1]
  flat = np.full(SHAPE, value, np.float32)
  for images in ((flat, truth), (truth, flat), (flat, flat)):
    assert np.isnan(metrics.pearson(*images)).all()


@pytest.mark.parametrize('name', NAMES)
@pytest.mark.parametrize('bad', [np.nan, np.inf, -np.inf])
def test_one_non_finite_pixel_is_nan_for_its_image_and_nothing_else(name, bad):
  reconstructions, truth = pair(5)
  clean = metrics.REGISTRY[name](reconstructions, truth)
  broken = reconstructions.copy()
  broken[1, 8, 0, 1] = bad
  broken_truth = truth.copy()
  broken_truth[1, 8, 0, 1] = bad
  for images in ((broken, truth), (reconstructions, broken_truth)):
    figures = metrics.REGISTRY[name](*images)
    assert np.isnan(figures[1])
    np.testing.assert_array_equal(np.delete(figures, 1), np.delete(clean, 1))


@pytest.mark.parametrize('name', NAMES)
def test_symmetric_in_its_arguments_and_blind_to_a_common_flip(name):
  reconstructions, truth = pair(6, shape=(2, 13, 12, 3))
  metric = jax.jit(metrics.REGISTRY[name])
  figures = metric(reconstructions, truth)
  same = [
    metric(truth, reconstructions),
    metric(reconstructions[:, ::-1, ::-1], truth[:, ::-1, ::-1]),
    metric(reconstructions.swapaxes(1, 2), truth.swapaxes(1, 2)),
    metric(reconstructions[::-1], truth[::-1])[::-1],
  ]
  np.testing.assert_allclose(same, np.broadcast_to(figures, (4, 2)), rtol=1e-4, atol=1e-6)
  assert np.abs(metric(reconstructions[:, ::-1], truth) - figures).min() > 1e-5  # a flip of one alone does count


@pytest.mark.parametrize('name', NAMES)
def test_more_noise_is_a_worse_score(name):
  truth = pair(7, shape=(1, 16, 16, 1))[1]
  noise = np.random.default_rng(8).normal(size=truth.shape).astype(np.float32)
  figures = [float(metrics.REGISTRY[name](truth + np.float32(s) * noise, truth)[0]) for s in (0, 0.01, 0.1, 0.5)]
  assert figures == sorted(figures, reverse='mse' not in name)
  assert len(set(figures)) == 4


@pytest.mark.parametrize('name', NAMES)
def test_jit_is_eager_and_vmap_is_a_loop(name):
  metric = metrics.REGISTRY[name]
  trials = [pair(seed, low=-0.5, high=1.5) for seed in range(3)]
  reconstructions, truth = (np.stack(part) for part in zip(*trials, strict=True))
  reconstructions[1, 2, 3, 3, 0] = np.nan
  loop = np.stack([metric(r, t) for r, t in trials])
  loop[1, 2] = np.nan
  np.testing.assert_allclose(jax.vmap(metric)(reconstructions, truth), loop, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(jax.jit(jax.vmap(metric))(reconstructions, truth), loop, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(jax.jit(metric)(*trials[0]), loop[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('name', NAMES)
@pytest.mark.parametrize('dtype', [jnp.bfloat16, np.float16, np.float64])
def test_values_are_float32_for_any_float(name, dtype):
  reconstructions, truth = (images.astype(dtype) for images in pair(9))
  figures = metrics.REGISTRY[name](reconstructions, truth)
  assert figures.dtype == jnp.float32
  assert figures.shape == (3,)
  expected = metrics.REGISTRY[name](reconstructions.astype(np.float32), truth.astype(np.float32))
  np.testing.assert_array_equal(figures, expected)


@pytest.mark.parametrize('name', NAMES)
@pytest.mark.parametrize(
  'shapes, expected',
  [
    (((1, 8, 8, 1), (2, 8, 8, 1)), r'\(1, 8, 8, 1\), expected that of the truth, \(2, 8, 8, 1\)'),  # would broadcast
    (((8, 8, 1), (8, 8, 1)), r'\[N, H, W, C\]'),
    (((0, 8, 8, 1), (0, 8, 8, 1)), 'at least one image'),
  ],
)
def test_shapes_that_do_not_fit_are_usage_errors_under_jit_too(name, shapes, expected):
  images = [np.zeros(shape, np.float32) for shape in shapes]
  for metric in (metrics.REGISTRY[name], jax.jit(metrics.REGISTRY[name])):
    with pytest.raises(errors.UsageError, match=expected):
      metric(*images)


@pytest.mark.parametrize('name', NAMES)
def test_bytes_are_a_usage_error(name):
  truth = pair()[1]
  with pytest.raises(errors.UsageError, match='reconstructions are uint8'):
    metrics.REGISTRY[name]((255 * truth).astype(np.uint8), truth)
