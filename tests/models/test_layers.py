"""Building blocks: pooling, initialisations, activations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from gradleak import models
from gradleak.core import errors
from gradleak.models import layers


@pytest.mark.parametrize(('size', 'shape'), [(2, (2, 4, 6, 3)), (3, (1, 11, 10, 2)), (2, (1, 3, 2, 1))])
def test_max_pool_takes_whole_windows(size, shape):
  images = np.random.default_rng(0).normal(size=shape).astype(np.float32)
  pooled = layers.max_pool(jnp.asarray(images), size)
  assert pooled.shape == (shape[0], shape[1] // size, shape[2] // size, shape[3])
  for n, y, x, c in np.ndindex(pooled.shape):
    assert pooled[n, y, x, c] == images[n, y * size : (y + 1) * size, x * size : (x + 1) * size, c].max()


@pytest.mark.parametrize('shape', [(2, 7, 6, 3), (1, 1, 4, 2), (1, 8, 8, 1)])
def test_overlapping_max_pool_ignores_the_padding(shape):
  images = np.random.default_rng(0).normal(-5, 1, shape).astype(np.float32)  # below the zeros of a usual padding
  pooled = np.asarray(jax.jit(lambda x: layers.overlapping_max_pool(x, 3, 2, 1))(images))
  assert pooled.shape == (shape[0], (shape[1] + 1) // 2, (shape[2] + 1) // 2, shape[3])
  for n, y, x, c in np.ndindex(pooled.shape):
    rows, columns = slice(max(2 * y - 1, 0), 2 * y + 2), slice(max(2 * x - 1, 0), 2 * x + 2)
    assert pooled[n, y, x, c] == images[n, rows, columns, c].max()


@pytest.mark.slow
def test_overlapping_max_pool_has_finite_derivatives_of_second_order_at_ties():
  """The first maximum of each window gets the gradient; an image of one colour is all ties."""
  images = jnp.full((1, 4, 4, 1), 0.5).at[0, 3, 3, 0].set(2.0)

  def squares(images):
    return jnp.sum(layers.overlapping_max_pool(images, 3, 2, 1) ** 2)

  gradient = jax.grad(squares)
  # Windows begin at pixels 0 and 1 of each axis; the last one holds the pixel of 2.
  expected = np.zeros((4, 4))
  expected[0, 0] = expected[0, 1] = expected[1, 0] = 2 * 0.5
  expected[3, 3] = 2 * 2.0
  np.testing.assert_array_equal(gradient(images)[0, :, :, 0], expected)
  second = jax.jit(jax.grad(lambda images: jnp.sum(gradient(images) ** 2)))(images)
  np.testing.assert_array_equal(second[0, :, :, 0], 4 * expected)  # of 4·max² by the winners, 8·max


@pytest.fixture(scope='module')
def initial_weights():
  """Returns init -> (layer, part) -> (values, fan-in): a convolution and a dense layer of 64 features."""
  modules = {'conv': (layers.Conv, (64, 5), (1, 5, 5, 2), 50), 'dense': (layers.Dense, (64,), (1, 40), 40)}

  def draw(init):
    found = {}
    for name, (module, arguments, shape, fan_in) in modules.items():
      params = module(*arguments, init).init(jax.random.key(0), jnp.zeros(shape))['params']
      found |= {(name, part): (np.asarray(values).ravel(), fan_in) for part, values in params.items()}
    return found

  return {init: draw(init) for init in layers.INITS}


def test_explicit_weights_and_biases_are_uniform_in_half(initial_weights):
  assert len(initial_weights['explicit']) == 4
  for place, (values, _) in initial_weights['explicit'].items():
    assert 0.4 < np.abs(values).max() <= 0.5, place
    assert scipy.stats.kstest(values, scipy.stats.uniform(-0.5, 1.0).cdf).pvalue > 0.01, place
  values, _ = initial_weights['explicit']['conv', 'kernel']
  for half in (0.75, 1 / 3):
    assert scipy.stats.kstest(values, scipy.stats.uniform(-half, 2 * half).cdf).pvalue < 1e-6


def test_default_weights_and_biases_are_uniform_in_one_by_root_fan_in(initial_weights):
  for place, (values, fan_in) in initial_weights['default'].items():
    bound = 1 / np.sqrt(fan_in)
    assert 0.8 * bound < np.abs(values).max() <= bound * (1 + 1e-6), place
    assert scipy.stats.kstest(values, scipy.stats.uniform(-bound, 2 * bound).cdf).pvalue > 0.01, place


def test_activations_at_known_points():
  x = jnp.asarray([-2.0, 0.0, 2.0])
  expected = {
    'sigmoid': [0.119203, 0.5, 0.880797],
    'relu': [0, 0, 2],
    'tanh': [-0.964028, 0, 0.964028],
    'leaky_relu': [-0.02, 0, 2],
    'gelu': [-0.0455, 0, 1.9545],
    'identity': [-2, 0, 2],
  }
  assert set(expected) == set(layers.ACTIVATIONS)
  for name, values in expected.items():
    np.testing.assert_allclose(layers.activation(name)(x), values, atol=2e-3, err_msg=name)


def test_unknown_names_list_the_valid_ones():
  with pytest.raises(errors.UsageError, match=r"unknown activation 'rellu'; did you mean 'relu'.*gelu, identity"):
    layers.activation('rellu')
  with pytest.raises(errors.UsageError, match=r"unknown init 'glorot'.*default, explicit"):
    layers.initialiser('glorot')


@pytest.mark.long
def test_the_gradient_of_max_pool_is_finite_where_its_input_is_computed_twice():
  """XLA without optimisations recomputed a normalised convolution with other rounding, which gave 0/0."""
  model = models.create('convnet(width=2)', 10, init='default')
  variables = jax.jit(model.init, static_argnums=1)(jax.random.key(0), (16, 16, 1))
  images = jax.random.uniform(jax.random.key(1), (3, 16, 16, 1))

  def loss(params):
    return jnp.sum(jnp.square(model.apply({**variables, 'params': params}, images, True, None)[0]))

  before = jax.config.values['jax_disable_most_optimizations']
  jax.config.update('jax_disable_most_optimizations', True)
  try:
    gradient = jax.jit(jax.grad(loss))(variables['params'])
  finally:
    jax.config.update('jax_disable_most_optimizations', before)
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))
