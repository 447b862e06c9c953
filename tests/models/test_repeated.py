"""Many equal blocks are one loop: same values, same names."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradleak as gl
from gradleak.models import repeated
from gradleak.models.resnet import ResNet

pytestmark = pytest.mark.usefixtures('fast_compilation')


@pytest.fixture(scope='module')
def network():
  """Returns a residual network with three equal blocks, its variables and images."""
  model = gl.models.from_flax(ResNet(3, 'default', 'patches', 2, 'batch', (4,), True))
  variables = model.init(jax.random.key(0), (6, 6, 3))
  # Not those that each block would start from.
  variables['batch_stats'] = jax.tree.map(lambda x: x + jnp.linspace(0.1, 0.9, x.size), variables['batch_stats'])
  return model, variables, jax.random.uniform(jax.random.key(1), (4, 6, 6, 3))


def everything(network):
  """Returns logits, running statistics, gradient of the parameters and of the images through it."""
  model, variables, images = network

  def loss(params, images):
    logits, changed = model.apply({**variables, 'params': params}, images, True)
    return jnp.sum(jnp.square(logits)), (logits, changed)

  def found(images):
    gradient, aux = jax.grad(loss, has_aux=True)(variables['params'], images)
    return sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(gradient)), (gradient, aux)

  return jax.jit(jax.grad(found, has_aux=True))(images)


@pytest.mark.slow
def test_a_loop_has_the_values_of_separate_blocks(network, monkeypatch):
  apart = everything(network)
  monkeypatch.setattr(repeated, 'MANY', 3)
  looped = everything(network)
  assert jax.tree.structure(apart) == jax.tree.structure(looped)
  for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(apart), jax.tree.leaves(looped), strict=True):
    scale = float(jnp.max(jnp.abs(a)))
    np.testing.assert_allclose(b, a, atol=1e-4 * scale + 1e-9, err_msg=jax.tree_util.keystr(path))


def test_the_loop_is_one_and_the_layers_keep_their_names(network, monkeypatch):
  model, variables, images = network
  names = model.layers((6, 6, 3))

  def loops():
    return str(jax.make_jaxpr(lambda x: model.apply(variables, x, True))(images)).count('scan[')

  assert loops() == 0
  monkeypatch.setattr(repeated, 'MANY', 3)
  assert loops() == 1
  assert model.layers((6, 6, 3)) == names
  drawn = model.init(jax.random.key(0), (6, 6, 3))
  assert jax.tree.structure(drawn) == jax.tree.structure(variables)
  _, changed = model.apply(variables, images, False)
  assert all(map(np.array_equal, jax.tree.leaves(changed), jax.tree.leaves(variables['batch_stats'])))
