"""Matching against brute force over all permutations."""

import itertools

import numpy as np
import pytest

from gradleak import metrics
from gradleak.core import errors


def batch(seed, n=4, shape=(3, 3, 2), low=0.0, high=1.0):
  return np.random.default_rng(seed).uniform(low, high, (n, *shape)).astype(np.float32)


def total_error(reconstructions, truth, permutation):
  return sum(np.mean((np.clip(reconstructions[j], 0, 1) - truth[i]) ** 2) for i, j in enumerate(permutation))


@pytest.mark.parametrize('seed', range(8))
def test_least_total_error_of_all_permutations(seed):
  truth, reconstructions = batch(seed), batch(100 + seed, low=-1, high=2)
  best = min(itertools.permutations(range(4)), key=lambda p: total_error(reconstructions, truth, p))
  assert metrics.match(reconstructions, truth).tolist() == list(best)


def test_undoes_a_shuffle_of_a_large_noisy_batch():
  truth = batch(1, n=50, shape=(8, 8, 1))
  order = np.random.default_rng(2).permutation(50)
  permutation = metrics.match(truth[order] + np.float32(0.01), truth)
  np.testing.assert_array_equal(order[permutation], np.arange(50))
  np.testing.assert_array_equal(np.sort(permutation), np.arange(50))
  assert permutation.dtype == np.int64


def levels(*values):
  return np.stack([np.full((2, 2, 1), value, np.float32) for value in values])


def test_one_to_one_is_neither_with_replacement_nor_greedy():
  # Errors (rows: truth 0.5, 0.7; columns: reconstruction 0.6, 0.0): 0.01 0.25 / 0.01 0.49. With replacement both take
  # reconstruction 0.
  truth, reconstructions = levels(0.5, 0.7), levels(0.6, 0.0)
  with_replacement = [int(np.argmin([np.mean((r - t) ** 2) for r in reconstructions])) for t in truth]
  assert with_replacement == [0, 0]
  assert metrics.match(reconstructions, truth).tolist() == [1, 0]
  # Greedy takes the cheapest pair first, (0.5, 0.55), and pays 0.64 + 0.0025; crossing over costs 0.3025 + 0.0625.
  truth, reconstructions = levels(0.5, 0.8), levels(0.55, 0.0)
  error = np.array([[np.mean((r - t) ** 2) for r in reconstructions] for t in truth])
  assert np.unravel_index(error.argmin(), error.shape) == (0, 0)
  assert metrics.match(reconstructions, truth).tolist() == [1, 0]


def test_clips_first():
  # The first reconstruction is the first image, exactly; but the second one's 50, as it is, would outweigh that.
  truth = np.array([[1, 0], [0, 1]], np.float32)
  reconstructions = np.array([[1, 0], [50, 1]], np.float32)
  unclipped = [[np.mean((r - t) ** 2) for r in reconstructions] for t in truth]
  assert unclipped[0][1] + unclipped[1][0] < unclipped[0][0] + unclipped[1][1]
  assert metrics.match(reconstructions, truth).tolist() == [0, 1]


@pytest.mark.parametrize('bad', [np.nan, np.inf, -np.inf])
def test_a_non_finite_reconstruction_is_matched_last(bad):
  truth, reconstructions = levels(0.1, 0.5, 0.9), levels(0.9, 0.5, 0.1)
  reconstructions[1, 0, 1, 0] = bad
  assert metrics.match(reconstructions, truth).tolist() == [2, 1, 0]
  reconstructions[:] = bad
  assert sorted(metrics.match(reconstructions, truth).tolist()) == [0, 1, 2]


def test_infinities_count_as_failed_not_as_white():
  # Clipped, +inf would be the perfect white image.
  assert metrics.match(levels(np.inf, 0.9), levels(1.0, 0.0)).tolist() == [1, 0]


def test_one_image():
  assert metrics.match(levels(0.3), levels(0.8)).tolist() == [0]
  assert metrics.match(levels(np.nan), levels(0.8)).tolist() == [0]


def test_fewer_or_more_reconstructions_than_images():
  truth = batch(3, n=5)
  few = metrics.match(truth[[4, 1]], truth)
  assert few.tolist() == [-1, 1, -1, -1, 0]
  many = np.concatenate([batch(4, n=6), truth[::-1]])
  assert metrics.match(many, truth).tolist() == [10, 9, 8, 7, 6]


def test_an_exact_pair_is_kept():
  truth, reconstructions = levels(0.9, 1.0, 0.2), levels(0.85, 0.9, 0.5)
  crossed, straight = (total_error(reconstructions, truth, order) for order in ([0, 1, 2], [1, 0, 2]))
  assert crossed < straight
  assert metrics.match(reconstructions, truth).tolist() == [1, 0, 2]
  assert metrics.match(reconstructions + np.float32(0.02), truth).tolist() == [0, 1, 2]  # no pair is exact


@pytest.mark.parametrize('shapes', [((0, 4), (3, 4)), ((2, 4), (2, 5)), ((0, 4), (0, 4)), ((3,), (3,))])
def test_shapes_that_do_not_fit_are_usage_errors(shapes):
  with pytest.raises(errors.UsageError, match='have shape'):
    metrics.match(*(np.zeros(shape, np.float32) for shape in shapes))
