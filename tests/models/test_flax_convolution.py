"""A user's `nn.Conv` of Flax in our fast form: the same values and gradients, and the speed of our own networks."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import gradleak as gl
from gradleak.models import convolution

GEOMETRIES = {
  'same': {'kernel_size': (3, 3)},
  'strided': {'kernel_size': (3, 3), 'strides': 2},
  'valid': {'kernel_size': (5, 5), 'padding': 'VALID', 'use_bias': False},
  'padded': {'kernel_size': (3, 3), 'padding': 1, 'strides': (2, 2)},
  'uneven': {'kernel_size': (2, 3), 'strides': (1, 2), 'padding': ((0, 1), (2, 1))},
  'dilated': {'kernel_size': (3, 3), 'kernel_dilation': 2},
  'depthwise': {'kernel_size': (3, 3), 'feature_group_count': 16, 'features': 32},
  'circular': {'kernel_size': (3, 3), 'padding': 'CIRCULAR'},
  'spread': {'kernel_size': (3, 3), 'input_dilation': 2, 'padding': 1},
  'cropped': {'kernel_size': (3, 3), 'padding': ((-1, -1), (-1, -1))},
}


class Net(nn.Module):
  options: dict

  @nn.compact
  def __call__(self, x):
    return jnp.tanh(nn.Conv(**{'features': 6, **self.options})(x)).reshape(len(x), -1)


def matching(apply, params, x):
  """Returns, lane by lane, the derivative by x of the squared norm of the gradient by the parameters."""

  def square(x):
    gradient = jax.grad(lambda params: jnp.sum(jnp.sin(apply(params, x))))(params)
    return sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(gradient))

  return jax.vmap(jax.grad(square))(x)


@pytest.mark.long
@pytest.mark.parametrize('name', GEOMETRIES)
def test_a_convolution_of_flax_has_the_same_values_at_every_order(name):
  module = Net(GEOMETRIES[name])
  model = gl.models.from_flax(module)
  x = jnp.asarray(np.random.default_rng(0).random((2, 1, 11, 10, 16), np.float32))
  variables = model.init(jax.random.key(0), (11, 10, 16))

  def ours(params, x):
    return model.apply({'params': params}, x, True, None)[0]

  def theirs(params, x):
    return module.apply({'params': params}, x)

  np.testing.assert_allclose(ours(variables['params'], x[0]), theirs(variables['params'], x[0]), atol=2e-6)
  found, wanted = (jax.jit(matching, static_argnums=0)(apply, variables['params'], x) for apply in (ours, theirs))
  np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=2e-5 * float(jnp.max(jnp.abs(wanted))))
  native = 'conv_general_dilated' in str(jax.make_jaxpr(ours)(variables['params'], x[0]))
  assert native == (name == 'spread')
  assert 'conv_general_dilated' in str(jax.make_jaxpr(theirs)(variables['params'], x[0]))  # the module is as it was


def test_a_convolution_with_a_function_of_its_own_keeps_it():
  taken = []

  def own(*arguments, **options):
    taken.append(arguments)
    return jax.lax.conv_general_dilated(*arguments, **options)

  model = gl.models.from_flax(Net({'kernel_size': (3, 3), 'conv_general_dilated': own}))
  variables = model.init(jax.random.key(0), (4, 4, 1))
  taken.clear()
  model.apply(variables, jnp.zeros((1, 4, 4, 1)))
  assert taken


def test_a_convolution_of_nnx_is_in_our_form_and_the_module_unchanged():
  class Two(nnx.Module):
    def __init__(self, rngs):
      self.conv, self.fc = nnx.Conv(16, 4, (3, 3), rngs=rngs), nnx.Linear(400, 3, rngs=rngs)

    def __call__(self, x):
      return self.fc(self.conv(x).reshape(len(x), -1))

  module = Two(nnx.Rngs(0))
  model = gl.models.from_nnx(module)
  x = jnp.asarray(np.random.default_rng(0).random((2, 10, 10, 16), np.float32))
  variables = model.init(jax.random.key(0), (10, 10, 16))
  np.testing.assert_allclose(model.apply(variables, x)[0], module(x), atol=2e-6)
  assert 'convolve[' in str(jax.make_jaxpr(lambda x: model.apply(variables, x)[0])(x))
  assert module.conv.conv_general_dilated is jax.lax.conv_general_dilated


@pytest.mark.parametrize(('groups', 'shape'), [(1, (7,)), (2, (7,)), (2, (4, 5, 3))])
def test_convolutions_over_any_number_of_sides_equal_xlas(groups, shape):
  rng = np.random.default_rng(0)
  sides = len(shape)
  images = jnp.asarray(rng.random((2, *shape, 4), np.float32))
  kernel = jnp.asarray(rng.random((6, 4 // groups, *(3, 2, 2)[:sides]), np.float32))
  given = (2, 1, 1)[:sides], [(1, 2), (0, 1), (0, 0)][:sides], (1, 2, 1)[:sides]
  order = (0, sides + 1, *range(1, sides + 1))
  numbers = jax.lax.ConvDimensionNumbers(order, tuple(range(sides + 2)), order)
  wanted = jax.lax.conv_general_dilated(images, kernel, *given[:2], None, given[2], numbers, feature_group_count=groups)
  np.testing.assert_allclose(convolution.general(images, kernel, *given, groups), wanted, rtol=1e-5)


@pytest.mark.slow
def test_it_is_many_times_faster_per_lane():
  class Deep(nn.Module):
    @nn.compact
    def __call__(self, x):
      for features in (32, 64):
        x = nn.max_pool(nn.relu(nn.Conv(features, (3, 3))(x)), (2, 2), (2, 2))
      return nn.Dense(10)(x.reshape(len(x), -1))

  model = gl.models.from_flax(Deep())
  variables = model.init(jax.random.key(0), (32, 32, 3))
  x = jnp.asarray(np.random.default_rng(0).random((4, 1, 32, 32, 3), np.float32))
  steps = [
    jax.jit(lambda x, apply=apply: matching(apply, variables['params'], x))
    for apply in (lambda p, x: model.apply({'params': p}, x)[0], lambda p, x: Deep().apply({'params': p}, x))
  ]
  seconds = [[], []]
  for _ in range(4):  # the first compiles
    for step, taken in zip(steps, seconds, strict=True):
      start = time.perf_counter()
      jax.block_until_ready(step(x))
      taken.append(time.perf_counter() - start)
  ours, theirs = (min(taken[1:]) * 1e3 / 4 for taken in seconds)
  print(f'ms per step and lane: {ours:.2f} through from_flax, {theirs:.1f} by XLA: {theirs / ours:.0f} times')
  assert theirs > 5 * ours
