"""Soft derivatives of ReLUs and max pools: exact values, the formulas, and any library's networks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import gradleak as gl
from gradleak.models import layers
from gradleak.models.soft_slopes import has_max_pools, largest, soft_slopes
from gradleak.models.soft_slopes import relu as soft_relu

KEY = jax.random.key(0)


def model(function, kernel):
  """Returns a network of one parameter, and its variables."""
  made = gl.models.from_functions(
    lambda key, shape: {'kernel': kernel}, lambda params, x: function(x, params['kernel'])
  )
  return made, {'params': {'kernel': kernel}}


def slope(made, variables, images, softness):
  """Returns the derivative of the sum of all outputs at the parameter."""
  soft = soft_slopes(made, softness)
  found = jax.jit(jax.grad(lambda given: jnp.sum(soft.apply(given, images, False, None)[0])))(variables)
  return found['params']['kernel']


class Net(nn.Module):
  """Max pools of Flax that overlap, with padding."""

  @nn.compact
  def __call__(self, x):
    x = nn.max_pool(nn.relu(nn.Conv(4, (3, 3))(x)), (3, 3), (2, 2), 'SAME')
    x = nn.max_pool(nn.relu(nn.Conv(5, (3, 3))(x)), (2, 2), (2, 2))
    return nn.Dense(3)(nn.gelu(nn.Dense(6)(x.reshape(len(x), -1))))


@pytest.mark.parametrize('relu', [jax.nn.relu, lambda z: jnp.maximum(z, 0), lambda z: jnp.maximum(0.0, z)])
def test_the_slope_of_relu_is_a_sigmoid(relu):
  images = jax.random.normal(KEY, (2, 3))
  kernel = jax.random.normal(jax.random.key(1), (1, 3))
  made, variables = model(lambda x, kernel: relu(x * kernel), kernel)
  z = images * kernel
  by_hand = jnp.sum(images * jax.nn.sigmoid(z / (0.7 * jnp.sqrt(jnp.mean(z**2)))), axis=0, keepdims=True)
  np.testing.assert_allclose(slope(made, variables, images, 0.7), by_hand, rtol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize('kind', ['relu', 'largest'])
def test_a_slope_is_soft_where_derivatives_are_nested(kind):
  """As gradient matching nests them: of the derivative by a weight, that by the input."""
  width, x = jnp.float32(0.7), jnp.asarray([-0.4, 0.0, 0.5])

  def soft(z):
    return soft_relu(z, width) if kind == 'relu' else largest(jnp.stack([z, 0 * z]), width)

  nested = jax.grad(lambda x: jax.grad(lambda w: w * soft(w * x))(jnp.float32(1)))
  sigmoid = jax.nn.sigmoid(x / width)
  np.testing.assert_allclose(jax.vmap(nested)(x), 2 * sigmoid + x * sigmoid * (1 - sigmoid) / width, rtol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize('inside', [True, False])
def test_what_is_computed_again_in_the_backward_pass_is_soft_as_well(inside):
  """A ReLU in a part under `jax.checkpoint` kept its step."""
  kernel, images = jax.random.normal(jax.random.key(1), (6, 3)), jax.random.normal(KEY, (2, 6))

  def part(z, kernel):
    return jnp.maximum(z @ kernel, 0) ** 2

  again = jax.jit(jax.checkpoint(part)) if inside else jax.checkpoint(jax.jit(part))
  plain, remade = (slope(*model(function, kernel), images, 0.5) for function in (part, again))
  np.testing.assert_allclose(plain, remade, rtol=1e-6)
  assert np.abs(plain - slope(*model(part, kernel), images, 1e-5)).max() > 0.1


def test_other_maxima_and_functions_stay_as_they_are():
  """A maximum with one, a sine, and a function that takes one value twice."""
  kernel, images = jnp.asarray([[0.5, 2.0, -1.0]]), jax.random.normal(KEY, (4, 3))
  made, variables = model(lambda x, kernel: jnp.maximum(x * kernel, 1.0) + jnp.sin(kernel) * kernel * kernel, kernel)
  exact = jax.grad(lambda given: jnp.sum(made.apply(given, images, False, None)[0]))(variables)['params']['kernel']
  np.testing.assert_allclose(slope(made, variables, images, 2.0), exact, rtol=1e-6)
  assert not has_max_pools(made, variables, (3,))


def test_maxima_of_whole_numbers_stay_as_they_are():
  """Places that are held at zero ended in 'not inexact'."""

  def places(x):
    here = jnp.maximum(jnp.arange(3) - 1, 0)
    return here + nn.max_pool(jnp.zeros((1, 3, 3, 1), jnp.int32), (3, 3))[0, 0, 0]

  kernel, images = jnp.asarray([[0.5, 2.0, -1.0]]), jax.random.normal(KEY, (4, 3))
  made, variables = model(lambda x, kernel: jax.nn.relu(x * kernel)[:, places(x)], kernel)
  soft = soft_slopes(made, 0.5).apply(variables, images)[0]
  np.testing.assert_array_equal(soft, np.maximum(images * kernel, 0)[:, [0, 0, 1]])
  assert not has_max_pools(made, variables, (3,))


def pooled(kind, x):
  if kind == 'house':
    return layers.max_pool(x, 2)
  if kind == 'padded':
    return layers.overlapping_max_pool(x, 2, 2, 1)[:, 1:, 1:]
  return (
    nn.max_pool(x, (2, 2), (2, 2)) if kind == 'flax' else nn.max_pool(x, (2, 2), (2, 2), ((2, 0), (2, 0)))[:, 1:, 1:]
  )


@pytest.mark.parametrize('kind', ['house', 'flax', 'padded', 'flax_padded'])
def test_the_slope_of_a_max_pool_is_a_softmax(kind):
  size = 5 if kind == 'padded' else 4
  images, kernel = jax.random.normal(KEY, (1, size, size, 2)), jax.random.normal(jax.random.key(1), (1, size, size, 2))
  made, variables = model(lambda x, kernel: pooled(kind, x * kernel), kernel)
  z = images * kernel
  start = size - 4
  windows = np.asarray(z)[0, start:, start:].reshape(2, 2, 2, 2, 2).transpose(0, 2, 4, 1, 3).reshape(2, 2, 2, 4)
  shares = jax.nn.softmax(windows / (0.3 * np.sqrt(np.mean(z**2))), axis=-1)
  expected = np.asarray(shares).reshape(2, 2, 2, 2, 2).transpose(0, 3, 1, 4, 2).reshape(4, 4, 2)
  found = slope(made, variables, images, 0.3) / images
  np.testing.assert_allclose(found[0, start:, start:], expected, rtol=1e-4)
  assert has_max_pools(made, variables, images.shape[1:])


@pytest.mark.long
@pytest.mark.parametrize('train', [False, True])
def test_values_are_exact_and_a_small_softness_has_the_derivatives_of_the_network(train):
  made = gl.models.from_flax(Net())
  variables, images = made.init(KEY, (8, 8, 3)), jax.random.uniform(KEY, (2, 8, 8, 3))

  def both(one):
    def total(given):
      outputs = one.apply(given, images, train, None)[0]
      return jnp.sum(outputs**2), outputs

    return jax.jit(jax.grad(total, has_aux=True))(variables)

  models = made, soft_slopes(made, 0), soft_slopes(made, 1)
  (hard, outputs), (sharp, same), (soft, also) = map(both, models)
  np.testing.assert_allclose(same, outputs, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(also, outputs, rtol=1e-5, atol=1e-6)
  first = [tree['params']['Conv_0']['kernel'] for tree in (hard, sharp, soft)]
  np.testing.assert_allclose(first[1], first[0], rtol=1e-3, atol=1e-5)
  assert np.linalg.norm(first[2] - first[0]) > 0.1 * np.linalg.norm(first[0])
  assert has_max_pools(made, variables, (8, 8, 3))


class Normed(nn.Module):
  """A norm and a hyperbolic tangent: there is no ReLU."""

  norm: type
  settings: tuple = ()

  @nn.compact
  def __call__(self, x, train=False):
    given = {'use_running_average': not train} if self.norm is nn.BatchNorm else {}
    x = self.norm(**given, **dict(self.settings))(nn.Dense(6)(x))
    return nn.Dense(3)(jnp.tanh(x).mean((1, 2)))


@pytest.mark.parametrize(
  ('norm', 'settings'),
  [(nn.BatchNorm, ()), (nn.LayerNorm, ()), (nn.RMSNorm, ()), (nn.GroupNorm, (('num_groups', 2),))],
)
def test_the_variance_of_a_norm_is_no_relu(norm, settings):
  made = gl.models.from_flax(Normed(norm, settings))
  variables, images = made.init(KEY, (3, 3, 2)), jax.random.uniform(KEY, (4, 3, 3, 2))

  def slopes(model):
    total = lambda given, images: jnp.sum(model.apply(given, images, True, None)[0] ** 2)  # noqa: E731
    return jax.jit(jax.grad(total, argnums=(0, 1)))(variables, images)

  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7), slopes(made), slopes(soft_slopes(made, 1.0))
  )


def test_maps_of_zeros_have_finite_derivatives():
  kernel = jnp.zeros((1, 4, 4, 1))
  made, variables = model(lambda x, kernel: layers.max_pool(jax.nn.relu(x * kernel), 2), kernel)
  assert np.isfinite(slope(made, variables, jnp.ones((1, 4, 4, 1)), 1.0)).all()


def test_what_the_model_adds_to_the_loss_is_soft_as_well():
  images, kernel = jax.random.normal(KEY, (2, 3)), jnp.asarray([[1.0, -1.0, 0.5]])
  made, variables = model(lambda x, kernel: x * kernel, kernel)

  def penalised(variables, images, train=False, key=None):
    return images, {}, jnp.sum(jax.nn.relu(images * variables['params']['kernel']), axis=1)

  soft = soft_slopes(made._replace(penalised=penalised), 0.5)
  found = jax.jit(jax.grad(lambda given: jnp.sum(soft.penalised(given, images, False, None)[2])))(variables)
  z = images * kernel
  by_hand = jnp.sum(images * jax.nn.sigmoid(z / (0.5 * jnp.sqrt(jnp.mean(z**2)))), axis=0, keepdims=True)
  np.testing.assert_allclose(found['params']['kernel'], by_hand, rtol=1e-5)
