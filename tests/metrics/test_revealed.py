"""The count of fully revealed samples against a naive one."""

import jax
import numpy as np
import pytest

from gradleak.core import errors
from gradleak.metrics import revealed

pytestmark = pytest.mark.usefixtures('fast_compilation')

fully_revealed = jax.jit(revealed.fully_revealed, static_argnames=('signed', 'blank'))


def naive(reconstructions, truth, signed=True):
  """Float64 correlations of all pairs, [M, N]."""
  table = np.zeros((len(reconstructions), len(truth)))
  for m, reconstruction in enumerate(reconstructions):
    for n, image in enumerate(truth):
      table[m, n] = np.corrcoef(np.ravel(reconstruction).astype(np.float64), np.ravel(image).astype(np.float64))[0, 1]
  return table if signed else np.abs(table)


@pytest.fixture(scope='module')
def mixtures():
  """Five images, and 150 noisy mixtures of them, some nearly pure, some inverted, on many scales."""
  rng = np.random.default_rng(0)
  truth = rng.uniform(size=(5, 4, 6, 3)).astype(np.float32)
  weights = rng.dirichlet(np.full(5, 0.1), 150) * rng.choice([-1, 1], (150, 1))
  mixed = np.tensordot(weights, truth, 1) + rng.normal(scale=0.02, size=(150, 4, 6, 3))
  return (mixed * 10 ** rng.uniform(-6, 6, (150, 1, 1, 1))).astype(np.float32), truth


@pytest.mark.long
@pytest.mark.parametrize('signed', [True, False])
def test_against_a_naive_count(mixtures, signed):
  table = naive(*mixtures, signed)
  found = fully_revealed(*mixtures, signed=signed)
  np.testing.assert_allclose(found.correlation, table.max(axis=0), atol=2e-6)
  np.testing.assert_array_equal(found.neuron, table.argmax(axis=0))
  np.testing.assert_array_equal(found.samples, table.max(axis=0) >= 0.98)
  assert int(found.count) == int((table.max(axis=0) >= 0.98).sum())
  middle = float(np.median(table.max(axis=0)))
  assert int(fully_revealed(*mixtures, signed=signed, threshold=middle - 1e-4).count) == 3


def test_each_sample_counts_once_and_flattened_ones_too(mixtures):
  _, truth = mixtures
  shown = np.concatenate([truth[[3]], truth[[1]] * 5 - 2, truth[[3]] + 1, -truth[[0]]]).reshape(4, -1)
  found = fully_revealed(shown, truth)
  assert int(found.count) == 2
  assert found.samples.tolist() == [False, True, False, True, False]
  assert found.neuron[1] == 1 and found.neuron[3] in (0, 2)
  found = fully_revealed(shown, truth, signed=False)
  assert found.samples.tolist() == [True, True, False, True, False] and found.neuron[0] == 3


@pytest.mark.parametrize('scale', [3e-36, 1e38])
def test_scales_at_the_end_of_float32(mixtures, scale):
  truth = mixtures[1]
  found = fully_revealed((2 * truth - 1) * np.float32(3.3 * scale), truth)
  np.testing.assert_allclose(found.correlation, 1, atol=1e-5)


@pytest.mark.parametrize('bad', [0.0, 0.3, np.nan, np.inf])
def test_constant_and_non_finite_images_reveal_nothing(mixtures, bad):
  reconstructions, truth = mixtures
  spoilt = reconstructions.copy()
  spoilt[:, 0, 0, 0] = bad
  if np.isfinite(bad):
    spoilt[:] = bad
  found = fully_revealed(spoilt, truth, threshold=1e-6)
  assert int(found.count) == 0 and np.isnan(found.correlation).all()
  whole = fully_revealed(np.concatenate([spoilt, reconstructions]), truth)
  np.testing.assert_allclose(whole.correlation, fully_revealed(reconstructions, truth).correlation)


def test_what_has_no_correlation_is_revealed_by_its_error():
  truth = np.stack([np.zeros((5, 5, 1)), np.full((5, 5, 1), 0.7), np.random.default_rng(0).uniform(size=(5, 5, 1))])
  truth = truth.astype(np.float32)
  noise = np.random.default_rng(1).normal(scale=1e-3, size=truth.shape).astype(np.float32)
  shown = np.concatenate([np.full_like(truth[:1], np.inf), truth[::-1] + noise])
  assert fully_revealed(shown, truth).samples.tolist() == [False, False, True]
  found = fully_revealed(shown, truth, within=revealed.LEVEL)
  assert found.samples.tolist() == [True, True, True] and found.neuron.tolist() == [3, 2, 1]
  assert np.isnan(found.correlation).tolist() == [True, True, False]
  left = fully_revealed(truth, truth, within=revealed.LEVEL, blank=False)
  assert left.samples.tolist() == [False, True, True]


@pytest.mark.slow
def test_under_vmap(mixtures):
  reconstructions, truth = mixtures
  rounds = np.stack([reconstructions, reconstructions[::-1]])
  counts = jax.jit(jax.vmap(lambda x: revealed.fully_revealed(x, truth).count))(rounds)
  assert counts.tolist() == [int(fully_revealed(reconstructions, truth).count)] * 2


def test_memory_does_not_grow_with_pairs_of_images():
  """1,000 neurons, 200 samples, 3,072 pixels: a few times the 12 MB of the arguments, not 2.5 GB."""
  shapes = [jax.ShapeDtypeStruct((n, 3072), np.float32) for n in (1000, 200)]
  compiled = jax.jit(revealed.fully_revealed).lower(*shapes).compile()
  assert compiled.memory_analysis().temp_size_in_bytes < 3 * 4 * (1000 + 200) * 3072


def test_usage_errors(mixtures):
  reconstructions, truth = mixtures
  with pytest.raises(errors.UsageError, match='as many pixels'):
    revealed.fully_revealed(reconstructions[:, :3], truth)
  with pytest.raises(errors.UsageError, match='as many pixels'):
    revealed.fully_revealed(reconstructions[:0], truth)
  with pytest.raises(errors.UsageError, match=r'threshold is 1\.1'):
    revealed.fully_revealed(reconstructions, truth, threshold=1.1)
