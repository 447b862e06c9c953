"""The untrained generator by itself; what attacks make of it: tests/attacks/test_generators.py."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradleak import UsageError, priors
from gradleak.priors.untrained import BatchStatistics, network

KEY = jax.random.key(3)
pytestmark = pytest.mark.usefixtures('fast_compilation')
initial = jax.jit(priors.untrained.init, static_argnums=1)
images_of = jax.jit(priors.untrained.apply, static_argnums=2)


def size(made):
  shapes = jax.eval_shape(made.init, KEY, jnp.zeros((1, 128)))
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


@pytest.mark.long
@pytest.mark.parametrize(
  'shape',
  [
    (3, 28, 20, 3),
    (1, 64, 1, 1),
    (2, 3, 3, 1),
    *(pytest.param(shape, marks=pytest.mark.slow) for shape in ((2, 8, 8, 1), (1, 25, 25, 1))),
  ],
)
def test_images_of_any_size_within_the_range_of_pixels(shape):
  weights, latents = initial(KEY, shape)
  images = images_of(weights, latents, shape)
  assert images.shape == shape and images.dtype == jnp.float32 and latents.shape == (shape[0], 128)
  assert 0 < float(images.min()) < float(images.max()) < 1
  if shape[0] > 1:  # each has a latent of its own
    assert float(jnp.abs(images[0] - images[1]).max()) > 1e-3


@pytest.mark.long
def test_the_middle_of_the_next_larger_sides_is_kept():
  weights, latents = initial(KEY, (1, 28, 20, 1))
  made = network((1, 28, 20, 1))
  assert (made.grid, made.doublings) == ((4, 3), 3)
  whole = jax.jit(made.apply)({'params': weights}, latents)
  assert whole.shape == (1, 32, 24, 1)
  np.testing.assert_allclose(images_of(weights, latents, (1, 28, 20, 1)), whole[:, 2:30, 2:22], atol=1e-6)


@pytest.mark.parametrize('shape', [(16, 32, 32, 3), (64, 32, 32, 3), (1, 32, 32, 1), (2, 128, 128, 3)])
def test_the_width_is_the_least_power_of_two_with_more_parameters_than_four_per_pixel(shape):
  made, pixels = network(shape), math.prod(shape[:3])
  assert made.width >= 32 and made.width & (made.width - 1) == 0
  assert size(made) > 4 * pixels
  assert made.width == 32 or size(made.clone(width=made.width // 2)) <= 4 * pixels


def test_the_published_batch_has_the_published_width():
  assert network((16, 32, 32, 3)).width == 32
  assert network((64, 32, 32, 3)).width > 32


def test_channels_are_normalised_over_the_batch_by_hand():
  x = np.random.default_rng(0).normal(3, 7, (2, 3, 4, 5)).astype(np.float32)
  weights = {'params': {'scale': jnp.arange(1.0, 6.0), 'bias': jnp.arange(5.0)}}
  mean, deviation = x.mean(axis=(0, 1, 2)), x.std(axis=(0, 1, 2))
  expected = (x - mean) / np.sqrt(deviation**2 + 1e-5) * np.arange(1, 6) + np.arange(5)
  np.testing.assert_allclose(jax.jit(BatchStatistics().apply)(weights, x), expected, rtol=1e-4, atol=1e-4)


def test_a_network_of_one_dense_layer_and_one_convolution_by_hand():
  shape = (1, 4, 4, 1)
  weights, latents = initial(KEY, shape)
  dense, conv = weights['Dense_0'], weights['Conv_0']
  assert set(weights) == {'Dense_0', 'Conv_0'}
  x = (np.asarray(latents) @ np.asarray(dense['kernel']) + np.asarray(dense['bias'])).reshape(4, 4, -1)
  padded = np.pad(x, ((1, 1), (1, 1), (0, 0)))
  kernel = np.asarray(conv['kernel']).reshape(3, 3, -1)  # (column, row, channel)
  logits = np.array(
    [[np.sum(padded[i : i + 3, j : j + 3].transpose(1, 0, 2) * kernel) for j in range(4)] for i in range(4)]
  )
  images = 1 / (1 + np.exp(-logits - np.asarray(conv['bias'])))
  np.testing.assert_allclose(images_of(weights, latents, shape)[0, :, :, 0], images, rtol=1e-4)


@pytest.mark.long
def test_every_weight_counts():
  shape = (2, 8, 8, 1)
  weights, latents = initial(KEY, shape)
  aim = jax.random.uniform(KEY, shape)
  slope = jax.jit(jax.grad(lambda w: jnp.mean(jnp.square(priors.untrained.apply(w, latents, shape) - aim))))(weights)
  assert all(float(jnp.abs(leaf).max()) > 1e-6 for leaf in jax.tree.leaves(slope))


def test_unknown_generators_are_named():
  assert priors.as_generator(None, priors.GENERATORS) is None
  assert priors.as_generator(priors.untrained, {}) is priors.as_generator('untrained', priors.GENERATORS)
  with pytest.raises(UsageError, match=r"generator 'untrained_'.*did you mean 'untrained'"):
    priors.as_generator('untrained_', priors.GENERATORS)
