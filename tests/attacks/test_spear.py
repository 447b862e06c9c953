"""SPEAR against JAX's own gradients of random inputs: exact, or it says that it is not."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradleak.attacks.spear import spear
from gradleak.core import errors


def victim(batch, seed=0, dtype=np.float64, neurons=200, size=60, dead=0):
  """Returns (inputs, (kernel gradient, bias gradient, kernel, bias)) of the first of three layers."""
  rng = np.random.default_rng(seed)
  sizes = [size, neurons, 40, 10]
  layers = [
    tuple((rng.uniform(-1, 1, shape) / np.sqrt(i)).astype(dtype) for shape in ((i, o), (o,)))
    for i, o in itertools.pairwise(sizes)
  ]
  layers[0][1][:dead] = -100
  inputs, labels = rng.normal(size=(batch, size)).astype(dtype), rng.integers(10, size=batch)
  with jax.enable_x64(dtype == np.float64):
    gradient = jax.device_get(gradient_of_mean(layers, inputs, labels))
  assert gradient[0][0].dtype == dtype
  return inputs, (*gradient[0], *layers[0])


@jax.jit
@jax.grad
def gradient_of_mean(layers, inputs, labels):
  for kernel, bias in layers[:-1]:
    inputs = jax.nn.relu(inputs @ kernel + bias.reshape(1, -1))
  logits = inputs @ layers[-1][0] + layers[-1][1].reshape(1, -1)
  return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels.reshape(-1, 1), axis=1))


def furthest(found, inputs):
  """The largest error of any input in its nearest reconstruction."""
  return max(np.abs(found.inputs - row).max(axis=1).min() for row in inputs)


@pytest.mark.parametrize('dtype, error', [(np.float64, 1e-9), (np.float32, 1e-3)])
def test_a_batch_comes_apart(dtype, error):
  inputs, layer = victim(6, dtype=dtype)
  found = spear(*layer, np.random.default_rng(0))
  assert found.rank == 6 and found.inputs.shape == inputs.shape and found.directions >= 6
  assert furthest(found, inputs) < error
  assert found.agreement == 1 if dtype == np.float64 else found.agreement > 0.99


@pytest.mark.parametrize('batch, dead, sparsity', [(4, 100, 0.5), (1, 0, 0.3)])
def test_neurons_that_no_sample_activates_count_as_zeros(batch, dead, sparsity):
  inputs, layer = victim(batch, dead=dead)
  found = spear(*layer, np.random.default_rng(0), submatrices=10_000, sparsity=sparsity)
  assert len(found.inputs) == batch and furthest(found, inputs) < 1e-9


@pytest.mark.parametrize('what', ['nothing', 'noise', 'too many'])
def test_what_cannot_be_separated_is_not(what):
  inputs, (gradient, shares, kernel, bias) = victim(4 if what != 'too many' else 64)
  if what == 'nothing':
    gradient, shares = np.zeros_like(gradient), np.zeros_like(shares)
  if what == 'noise':
    gradient = gradient + np.random.default_rng(1).normal(scale=1e-3 * np.abs(gradient).max(), size=gradient.shape)
  found = spear(gradient, shares, kernel, bias, np.random.default_rng(0), submatrices=10_000)
  assert found.inputs.shape == (0, inputs.shape[1]) and found.agreement == 0 and found.directions == 0
  assert found.rank == {'nothing': 0, 'noise': 60, 'too many': 60}[what]


def test_a_known_batch_size_stands_a_little_noise():
  inputs, (gradient, *rest) = victim(4)
  noise = np.random.default_rng(1).normal(scale=1e-7 * np.median(np.abs(gradient)), size=gradient.shape)
  found = spear(gradient + noise, *rest, np.random.default_rng(0), rank=4, tolerance=1e-4)
  assert found.rank == 4 and 0 < furthest(found, inputs) < 1e-3
  assert not len(spear(gradient + noise, *rest, np.random.default_rng(0)).inputs)  # its own rank is full


def test_weights_that_are_not_the_victims_do_not_agree():
  _, (gradient, shares, kernel, bias) = victim(4)
  found = spear(gradient, shares, np.roll(kernel, 1, axis=1), bias, np.random.default_rng(0), submatrices=10_000)
  assert found.agreement < 0.9


def test_the_rank_is_that_of_the_layer_at_most():
  _, layer = victim(2)
  with pytest.raises(errors.UsageError, match='rank is 61'):
    spear(*layer, np.random.default_rng(0), rank=61)


@pytest.mark.slow
@pytest.mark.parametrize('seed', range(3))
@pytest.mark.parametrize('batch', [10, 12, 14])
def test_batches_of_the_published_size(batch, seed):
  inputs, layer = victim(batch, seed, neurons=400, size=200)
  found = spear(*layer, np.random.default_rng(seed))
  assert furthest(found, inputs) < 1e-6 and found.agreement == 1
