"""All formulations against the definition and each other, at every order of differentiation and under `vmap`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import gradleak as gl
from gradleak.models import convolution

# size, stride, padding and images: layers of LeNet, ConvNet and ResNet, and sizes with remainders.
SHAPES = [
  (5, 2, 2, (2, 8, 8, 1)),
  (5, 2, 2, (1, 7, 10, 3)),
  (5, 1, 2, (1, 2, 2, 2)),
  (3, 1, 1, (2, 6, 5, 16)),
  (3, 1, 0, (2, 6, 5, 16)),
  (3, 2, 1, (1, 8, 9, 16)),
  (3, 3, 0, (1, 8, 7, 16)),
  (1, 2, 0, (1, 4, 5, 16)),
]


def arrays(size, shape, lead=(), features=3):
  rng = np.random.default_rng(0)
  kernel = rng.uniform(-0.5, 0.5, (*lead, features, size * size * shape[-1]))
  return rng.uniform(0, 1, (*lead, *shape)), kernel


def definition(images, kernel, size, stride, padding):
  images = np.pad(images, ((0, 0), (padding, padding), (padding, padding), (0, 0)))
  height, width = ((side - size) // stride + 1 for side in images.shape[1:3])
  weights = kernel.reshape(len(kernel), size, size, images.shape[-1])
  outputs = np.empty((len(images), height, width, len(kernel)))
  for y in range(height):
    for x in range(width):
      window = images[:, y * stride : y * stride + size, x * stride : x * stride + size]
      outputs[:, y, x] = np.einsum('nrck,fcrk->nf', window, weights)
  return outputs


def all_orders(convolve, images, kernel):
  """Returns the outputs, both gradients, and both gradients of the squared norms of both gradients."""

  def gradients(images, kernel):
    return jax.grad(lambda *both: jnp.sum(jnp.sin(convolve(*both))), argnums=(0, 1))(images, kernel)

  def squared_norm(which, images, kernel):
    return jnp.sum(jnp.square(gradients(images, kernel)[which]))

  second = [jax.grad(functools.partial(squared_norm, which), argnums=(0, 1))(images, kernel) for which in (0, 1)]
  return convolve(images, kernel), *gradients(images, kernel), *second[0], *second[1]


@pytest.mark.long
@pytest.mark.parametrize(('size', 'stride', 'padding', 'shape'), SHAPES)
@pytest.mark.parametrize(
  'lanes', [*(pytest.param(some, marks=pytest.mark.slow) for some in ('none', 'images')), 'both']
)
def test_formulations_agree_with_the_definition_and_in_every_order(
  size, stride, padding, shape, lanes, fast_compilation, monkeypatch
):
  """In float64, where rounding cannot hide a wrong index."""
  monkeypatch.setattr(convolution, '_SMALL', 0)  # images of these sizes are not left to matrix products alone
  geometry = {'size': size, 'stride': stride, 'padding': padding}
  images, kernel = arrays(size, shape, lead=() if lanes == 'none' else (2,))
  kernel = kernel[0] if lanes == 'images' else kernel

  axes_of = {'none': None, 'images': (0, None), 'both': (0, 0)}

  def run(images, kernel):
    found = {}
    for name, formulation in convolution.FORMULATIONS.items():
      orders = functools.partial(all_orders, functools.partial(formulation, **geometry))
      axes = axes_of[lanes]
      found[name] = (jax.vmap(orders, axes) if axes else orders)(images, kernel)
    return found

  with jax.enable_x64(True):
    found = jax.tree.map(np.asarray, jax.jit(run)(images, kernel))
  first = [(x[0] if axis == 0 else x) for x, axis in zip((images, kernel), axes_of[lanes] or (None, None), strict=True)]
  outputs = found['hybrid'][0] if lanes == 'none' else found['hybrid'][0][0]
  np.testing.assert_allclose(outputs, definition(*first, **geometry), rtol=1e-11, atol=1e-11)
  for name, results in found.items():
    for result, reference in zip(results, found['native'], strict=True):
      assert result.dtype == np.float64 and np.abs(reference).max() > 0
      np.testing.assert_allclose(result, reference, rtol=1e-9, atol=1e-10 * np.abs(reference).max(), err_msg=name)


def test_hybrid_groups_no_convolution_by_lane():
  """Matrix products replace grouped convolutions; a shared kernel is convolved natively."""
  images, kernel = (x.astype(np.float32) for x in arrays(3, (1, 9, 9, 16), lead=(4,)))

  def text(formulation, axes, *both):
    orders = functools.partial(all_orders, functools.partial(formulation, size=3, stride=1, padding=1))
    return jax.jit(jax.vmap(orders, axes)).lower(*both).as_text()

  assert 'stablehlo.convolution' not in text(convolution.hybrid, (0, 0), images, kernel)
  assert 'stablehlo.convolution' not in text(convolution.hybrid, (0, None), images[:, :, :8, :8], kernel[0])
  shared = text(convolution.hybrid, (0, None), images, kernel[0])
  assert 'stablehlo.convolution' in shared and 'feature_group_count = 4' not in shared
  assert 'batch_group_count = 4' not in shared
  assert '_group_count = 4' in text(convolution.native, (0, 0), images, kernel)


class Net(nn.Module):
  @nn.compact
  def __call__(self, x):
    return nn.Conv(4, (3, 3))(jnp.tanh(nn.Conv(16, (3, 3))(x))).reshape(len(x), -1)


@pytest.mark.slow
@pytest.mark.parametrize('platform', ['cpu', 'gpu', 'tpu'])
@pytest.mark.parametrize(
  'make', [lambda: gl.models.lenet(10), lambda: gl.models.convnet(10, width=16), lambda: gl.models.from_flax(Net())]
)
def test_networks_group_no_convolution_by_lane_on_any_device(make, platform, monkeypatch):
  """On an H200, LeNet takes 17 to 90 times as long by grouped convolutions."""
  monkeypatch.setattr(jax, 'default_backend', lambda: platform)
  model, shape = make(), (16, 16, 3)
  variables = jax.eval_shape(lambda key: model.init(key, shape), jax.random.key(0))

  def squared(variables, x):  # of the gradient by the weights, which each lane has to itself
    def loss(params):
      return jnp.sum(model.apply({**variables, 'params': params}, x, False, None)[0] ** 2)

    return sum(jnp.sum(g**2) for g in jax.tree.leaves(jax.grad(loss)(variables['params'])))

  images = jax.ShapeDtypeStruct((3, 1, *shape), np.float32)
  text = jax.jit(jax.vmap(jax.grad(squared, 1), (None, 0))).lower(variables, images).as_text()
  assert '_group_count = 3' not in text and 'dot_general' in text
