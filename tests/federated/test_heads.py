"""A loss and a network that do not fit each other are refused before anything is computed."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import gradleak as gl
from gradleak.federated import heads
from gradleak.federated.losses import cross_entropy

SHAPE = (8, 8, 1)


class Headed(nn.Module):
  """One dense layer with an activation behind it, by name."""

  head: str
  classes: int = 10
  scale: float = 1.0

  @nn.compact
  def __call__(self, images):
    x = nn.Dense(self.classes, kernel_init=nn.initializers.normal(self.scale))(images.reshape(images.shape[0], -1))
    return {**HEADS, 'two': lambda z: jnp.concatenate([jnp.zeros_like(z), z], axis=1)}[self.head](x)


HEADS = {
  'logits': lambda x: x,
  'log_softmax': nn.log_softmax,
  'tanh': jnp.tanh,
  'softplus': nn.softplus,
  'relu': nn.relu,
  'softmax': nn.softmax,
  'softmax_by_hand': lambda x: jnp.exp(x) / jnp.exp(x).sum(axis=1, keepdims=True),
  'sigmoid': nn.sigmoid,
  'sigmoid_by_tanh': lambda x: 0.5 * (1 + jnp.tanh(x / 2)),
}


def scenario(module, images, labels, **options):
  return gl.scenario(gl.models.from_flax(module), images, labels, key=jax.random.key(0), **options)


@pytest.mark.parametrize('head', HEADS)
@pytest.mark.parametrize('classes', [2, 10])
def test_probabilities_are_not_taken_for_logits(head, classes, small_images):
  images, labels = small_images[0], small_images[1] % classes
  if 'soft' in head and head not in ('softplus', 'log_softmax'):
    words = r"the model 'headed' returns probabilities, which are at least 0 and sum to 1 .* loss takes logits: return"
  elif 'sigmoid' in head:
    words = r'returns values in \[0, 1\] for weights of any size, as behind a sigmoid, and the loss takes logits'
  else:
    assert scenario(Headed(head, classes), images, labels).client.num_classes == classes
    return
  for loss in ('cross_entropy', 'squared_error'):
    with pytest.raises(gl.UsageError, match=words):
      scenario(Headed(head, classes), images, labels, loss=loss)


@pytest.mark.long
def test_a_loss_on_probabilities_takes_them(small_images):
  def likelihood(probabilities, labels):
    return -jnp.log((labels * probabilities).sum(axis=1))

  module = Headed('softmax')
  client = gl.Client(gl.models.from_flax(module), 10, likelihood)
  built = gl.scenario(client.model, *small_images, key=jax.random.key(0), client=client)
  logits = gl.Client(gl.models.from_flax(Headed('logits')), 10, cross_entropy())
  found, expected = (one.local_update(None, built.variables, *small_images).update for one in (client, logits))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), found, expected)
  with pytest.raises(gl.UsageError, match='returns probabilities'):
    known = gl.Client(client.model, 10, optax.softmax_cross_entropy)
    gl.scenario(client.model, *small_images, key=jax.random.key(0), client=known)


def test_a_network_without_such_a_head_is_not_run(small_images, monkeypatch):
  monkeypatch.setattr(heads, '_drawn', None)
  for model in (gl.models.mlp(10), gl.models.lenet(10), gl.models.vit_tiny(10, depth=1)):
    heads.check_head(model, jax.eval_shape(lambda key, m=model: m.init(key, SHAPE), jax.random.key(0)), SHAPE)


@pytest.mark.parametrize('labels', [0, 1])
@pytest.mark.parametrize('options', [{}, {'loss': 'squared_error'}])
def test_one_logit_is_refused_with_the_two_that_mean_the_same(labels, options, small_images):
  images = small_images[0]
  labels = np.full(len(images), labels, np.int32)
  with pytest.raises(gl.UsageError, match=r'has one logit, and a softmax of one logit is 1: every gradient would be 0'):
    scenario(Headed('logits', 1), images, labels, **options)
  with pytest.raises(gl.UsageError, match='has one logit'):
    gl.ClientSettings().client(gl.models.mlp(1), 1)


def test_the_two_logits_of_the_message_have_the_binary_loss(small_images):
  """And a client with a loss of its own on one logit is told the probabilities, for integers cannot."""
  images, labels = small_images[0], small_images[1] % 2
  one = gl.Client(
    gl.models.from_flax(Headed('logits', 1, 0.1)),
    1,
    lambda z, y: optax.sigmoid_binary_cross_entropy(z, y).sum(axis=1),
  )
  two = gl.Client(gl.models.from_flax(Headed('two', 1, 0.1)), 2)
  variables = one.model.init(jax.random.key(0), SHAPE)
  found = jax.jit(two.local_update)(None, variables, images, labels).update
  expected = jax.jit(one.local_update)(None, variables, images, labels.reshape(-1, 1).astype(np.float32)).update
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), found, expected)
  assert np.abs(np.asarray(jax.tree.leaves(found)[0])).max() > 1e-3
  with pytest.raises(gl.UsageError, match=r'of one class, all integers are 0'):
    one.local_update(None, variables, images, np.zeros(len(images), np.int32))
