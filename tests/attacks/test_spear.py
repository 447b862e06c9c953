"""SPEAR against JAX's own gradients of random inputs: exact, or it says that it is not."""

import itertools

import jax
import numpy as np
import pytest

from gradleak.attacks import rays
from gradleak.attacks.spear import spear
from gradleak.core import errors
from tests.attackers import gradient_of_mean


def victim(batch, seed=0, dtype=np.float64, neurons=200, size=60, dead=0):
  """Returns (inputs, (kernel gradient, bias gradient, kernel, bias)) of the first of three layers."""
  return two_layers(batch, seed, dtype, neurons, size, dead)[:2]


def two_layers(batch, seed=0, dtype=np.float64, neurons=200, size=60, dead=0):
  """Returns the same, the kernel's gradient of the second layer, and which neurons each sample activates."""
  rng = np.random.default_rng(seed)
  layers = drawn([size, neurons, 40, 10], rng, dtype)
  layers[0][1][:dead] = -100
  inputs, labels = rng.normal(size=(batch, size)).astype(dtype), rng.integers(10, size=batch)
  with jax.enable_x64(dtype == np.float64):
    gradient = jax.device_get(gradient_of_mean(layers, inputs, labels))
  assert gradient[0][0].dtype == dtype
  return inputs, (*gradient[0], *layers[0]), gradient[1][0], inputs @ layers[0][0] + layers[0][1] > 0


def drawn(sizes, rng, dtype):
  """Returns [(kernel, bias)] of dense layers, as PyTorch draws them."""
  return [
    tuple((rng.uniform(-1, 1, shape) / np.sqrt(i)).astype(dtype) for shape in ((i, o), (o,)))
    for i, o in itertools.pairwise(sizes)
  ]


def furthest(found, inputs):
  """The largest error of any input in its nearest reconstruction."""
  return max(np.abs(found.inputs - row).max(axis=1).min() for row in inputs)


@pytest.mark.parametrize('dtype, error', [(np.float64, 1e-9), (np.float32, 1e-3)])
def test_a_batch_comes_apart(dtype, error):
  inputs, layer = victim(6, dtype=dtype)
  found = spear(layer, np.random.default_rng(0))
  assert found.rank == 6 and found.inputs.shape == inputs.shape and found.directions >= 6
  assert furthest(found, inputs) < error
  assert found.agreement == 1 if dtype == np.float64 else found.agreement > 0.99


@pytest.mark.parametrize('batch, dead, sparsity', [(4, 100, 0.5), (1, 0, 0.3)])
def test_neurons_that_no_sample_activates_count_as_zeros(batch, dead, sparsity):
  inputs, layer = victim(batch, dead=dead)
  found = spear(layer, np.random.default_rng(0), submatrices=10_000, sparsity=sparsity)
  assert len(found.inputs) == batch and furthest(found, inputs) < 1e-9


@pytest.mark.parametrize('what', ['nothing', 'noise', 'too many'])
def test_what_cannot_be_separated_is_not(what):
  inputs, (gradient, shares, kernel, bias) = victim(4 if what != 'too many' else 64)
  if what == 'nothing':
    gradient, shares = np.zeros_like(gradient), np.zeros_like(shares)
  if what == 'noise':
    gradient = gradient + np.random.default_rng(1).normal(scale=1e-3 * np.abs(gradient).max(), size=gradient.shape)
  found = spear((gradient, shares, kernel, bias), np.random.default_rng(0), submatrices=10_000)
  assert found.inputs.shape == (0, inputs.shape[1]) and found.agreement == 0 and found.directions == 0
  assert found.rank == {'nothing': 0, 'noise': 60, 'too many': 60}[what]


def test_a_gradient_of_more_samples_than_there_are_is_not_searched():
  inputs, layer = victim(4)
  assert not len(spear(layer, np.random.default_rng(0), batch_size=3).inputs)
  assert furthest(spear(layer, np.random.default_rng(0), batch_size=4), inputs) < 1e-9


def test_a_known_batch_size_stands_a_little_noise():
  inputs, (gradient, *rest) = victim(4)
  noise = np.random.default_rng(1).normal(scale=1e-7 * np.median(np.abs(gradient)), size=gradient.shape)
  found = spear((gradient + noise, *rest), np.random.default_rng(0), rank=4, tolerance=1e-4)
  assert found.rank == 4 and 0 < furthest(found, inputs) < 1e-3
  assert not len(spear((gradient + noise, *rest), np.random.default_rng(0)).inputs)  # its own rank is full


def test_weights_that_are_not_the_victims_do_not_agree():
  _, (gradient, shares, kernel, bias) = victim(4)
  found = spear((gradient, shares, np.roll(kernel, 1, axis=1), bias), np.random.default_rng(0), submatrices=10_000)
  assert found.agreement < 0.9


def test_the_rank_is_that_of_the_layer_at_most():
  _, layer = victim(2)
  with pytest.raises(errors.UsageError, match='rank is 61'):
    spear(layer, np.random.default_rng(0), rank=61)


@pytest.mark.long
@pytest.mark.parametrize('dtype, error', [(np.float64, 1e-9), (np.float32, 1e-2)])
def test_the_next_layer_tells_a_batch_apart(dtype, error):
  inputs, layer, following, _ = two_layers(12, dtype=dtype)
  found = spear(layer, np.random.default_rng(0), following=following, submatrices=1)
  assert furthest(found, inputs) < error and found.agreement > 0.99
  assert not len(spear(layer, np.random.default_rng(0), submatrices=1).inputs)  # nothing else tells it


def test_extreme_rays_are_the_inactive_neurons_of_samples():
  _, (gradient, *_), following, active = two_layers(4, neurons=100)
  zeros = rays.inactive(rays.basis(following), np.random.default_rng(0), 60)
  assert {tuple(one) for one in ~active} <= {tuple(one) for one in zeros}
  left = np.linalg.svd(gradient.T, full_matrices=False)[0][:, :4]
  found = left @ rays.directions(left, ~active).T
  assert np.abs(found[~active.T]).max() < 1e-9 < 1e-3 < np.abs(found[active.T]).mean()


@pytest.mark.parametrize('what', ['full rank', 'not finite', 'nothing'])
def test_a_gradient_that_tells_nothing_has_no_basis(what):
  gradient = {'full rank': np.eye(5), 'not finite': np.full((5, 3), np.nan), 'nothing': np.zeros((5, 3))}[what]
  assert rays.basis(gradient).shape == (5, 0)
  assert rays.inactive(rays.basis(gradient), np.random.default_rng(0), 3).shape == (0, 5)


def test_another_layers_gradient_does_not_mislead():
  inputs, layer = victim(4)
  following = np.random.default_rng(0).normal(size=(200, 4)) @ np.random.default_rng(1).normal(size=(4, 40))
  found = spear(layer, np.random.default_rng(0), following=following, programs=25)
  assert furthest(found, inputs) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize('batch, least', [(8, 20), (16, 15)])
def test_rows_of_a_table_are_exact(batch, least):
  from sklearn import datasets

  table = datasets.load_breast_cancer()
  rows = (table.data - table.data.mean(axis=0)) / table.data.std(axis=0)
  exact = 0
  for seed in range(20):
    chosen = np.random.default_rng(seed).choice(len(rows), batch, replace=False)
    inputs, labels = rows[chosen].astype(np.float32), table.target[chosen]
    layers = drawn([30, 100, 100, 2], np.random.default_rng(seed), np.float32)
    gradient = jax.device_get(gradient_of_mean(layers, inputs, labels))
    found = spear((*gradient[0], *layers[0]), np.random.default_rng(seed), following=gradient[1][0])
    exact += len(found.inputs) == batch and bool(furthest(found, inputs) < 0.01)
  print(f'batches of {batch}: {exact} of 20 have all rows within 0.01 deviations')
  assert exact >= least


@pytest.mark.slow
@pytest.mark.parametrize('seed', range(3))
@pytest.mark.parametrize('batch', [10, 12, 14])
def test_batches_of_the_published_size(batch, seed):
  inputs, layer = victim(batch, seed, neurons=400, size=200)
  found = spear(layer, np.random.default_rng(seed))
  assert furthest(found, inputs) < 1e-6 and found.agreement == 1
