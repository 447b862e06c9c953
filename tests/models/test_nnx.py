"""A Flax NNX module against the Linen module of the same parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from gradleak import models
from gradleak.core import errors, trees

SHAPE = (4, 4, 1)


class Nnx(nnx.Module):
  def __init__(self, rngs):
    self.body = nnx.Sequential(
      nnx.Linear(16, 6, rngs=rngs), nnx.BatchNorm(6, momentum=0.9, rngs=rngs), nnx.tanh, nnx.Dropout(0.5, rngs=rngs)
    )
    self.head = nnx.Linear(6, 3, rngs=rngs)
    self.scale = nnx.Param(jnp.asarray(2.0))

  def hidden(self, images):
    return self.body(images.reshape(images.shape[0], -1))

  def __call__(self, images):
    return self.scale[...] * self.head(self.hidden(images))


class Linen(nn.Module):
  """The same function; its parameters have other names."""

  @nn.compact
  def __call__(self, images, train):
    x = nn.Dense(6, name='first')(images.reshape(images.shape[0], -1))
    x = nn.BatchNorm(use_running_average=not train, momentum=0.9, name='norm')(x)
    x = nn.Dropout(0.5, deterministic=False)(nn.tanh(x))
    return self.param('scale', nn.initializers.ones, ()) * nn.Dense(3, name='last')(x)


def renamed(params):
  """Returns what NNX calls `params` under Linen's names."""
  first, norm = (params['body']['layers'][i] for i in ('0', '1'))
  return {'first': first, 'norm': norm, 'last': params['head'], 'scale': params['scale']}


@pytest.fixture(scope='module')
def twins():
  """Returns both models, the variables of each with the same random values, and images."""
  layers = [trees.Layer('first', (('body', 'layers', '0', 'kernel'), ('body', 'layers', '0', 'bias')))]
  ours = models.from_nnx(Nnx(nnx.Rngs(0)), features=lambda module, images: module.hidden(images), layers=layers)
  rng = np.random.default_rng(0)
  variables = jax.tree.map(
    lambda leaf: jnp.asarray(rng.uniform(0.1, 1, leaf.shape), leaf.dtype), ours.init(jax.random.key(0), SHAPE)
  )
  statistics = variables['batch_stats']['body']['layers']['1']
  theirs = {'params': renamed(variables['params']), 'batch_stats': {'norm': statistics}}
  images = rng.uniform(0, 1, (5, *SHAPE)).astype(np.float32)
  return ours, models.from_flax(Linen()), variables, theirs, images


def test_its_variables_are_dicts_of_strings_with_the_modules_values():
  module = Nnx(nnx.Rngs(1))
  model = models.from_nnx(module)
  variables = model.init(jax.random.key(5), SHAPE)
  assert model.name == 'nnx' and set(variables) == {'params', 'batch_stats'}
  assert set(variables['params']) == {'body', 'head', 'scale'}
  assert set(variables['params']['body']['layers']) == {'0', '1'}
  np.testing.assert_array_equal(variables['params']['head']['kernel'], module.head.kernel[...])
  models.check_variables(model, variables, SHAPE)
  models.check_apply(model, variables, SHAPE)
  plain = models.from_nnx(nnx.Linear(1, 2, rngs=nnx.Rngs(0)), 'plain')
  assert plain.name == 'plain' and set(plain.init(jax.random.key(0), SHAPE)) == {'params'}


@pytest.mark.parametrize('train', [False, True])
def test_logits_statistics_and_gradients_are_those_of_linen(twins, train):
  ours, linen, variables, theirs, images = twins

  def run(model, variables):
    def loss(params):
      logits, statistics = model.apply({**variables, 'params': params}, images, train, None)
      return jnp.sum(jnp.square(logits)), (logits, statistics)

    gradient, (logits, statistics) = jax.jit(jax.grad(loss, has_aux=True))(variables['params'])
    return logits, statistics, gradient

  logits, statistics, gradient = run(ours, variables)
  expected = run(linen, theirs)
  found = logits, {'norm': statistics['body']['layers']['1']}, renamed(gradient)
  assert jax.tree.structure(statistics) == jax.tree.structure(variables['batch_stats'])
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), found, expected)
  assert trees.norm(gradient) > 1
  moved = trees.norm(trees.subtract(statistics, variables['batch_stats']))
  assert (moved > 0.01) == train


def test_dropout_is_on_only_with_a_key_and_follows_it(twins):
  ours, _, variables, _, images = twins
  apply = jax.jit(ours.apply, static_argnums=2)
  without = apply(variables, images, False, None)[0]
  first, again, other = (apply(variables, images, False, jax.random.key(seed))[0] for seed in (1, 1, 2))
  np.testing.assert_array_equal(first, again)
  assert np.abs(first - without).max() > 0.1 and np.abs(first - other).max() > 0.1
  np.testing.assert_array_equal(apply(variables, images, False, None)[0], without)  # no state is left behind


class Attending(nnx.Module):
  """Attention that is told by an argument of the call whether it drops."""

  def __init__(self, rngs):
    self.attention = nnx.MultiHeadAttention(2, 4, 4, dropout_rate=0.5, decode=False, rngs=rngs)

  def __call__(self, images, train):
    tokens = self.attention(images.reshape(-1, 4, 4), deterministic=not train)
    return tokens.mean(axis=1)


@pytest.mark.long
def test_attention_drops_only_with_a_key():
  model = models.from_nnx(Attending(nnx.Rngs(0)))
  variables, images = model.init(jax.random.key(0), SHAPE), np.random.default_rng(0).uniform(size=(2, *SHAPE))
  evaluated, trained, first, other = (
    model.apply(variables, images.astype(np.float32), train, key)[0]
    for train, key in ((False, None), (True, None), (True, jax.random.key(1)), (True, jax.random.key(2)))
  )
  np.testing.assert_array_equal(trained, evaluated)
  assert np.abs(first - trained).max() > 1e-3 and np.abs(first - other).max() > 1e-3


def test_features_and_layers_are_those_given(twins):
  ours, _, variables, _, images = twins
  head, scale = variables['params']['head'], variables['params']['scale']
  features = ours.features(variables, images)
  expected = scale * (features @ head['kernel'] + head['bias'].reshape(1, -1))
  np.testing.assert_allclose(ours.apply(variables, images)[0], expected, rtol=1e-4)
  (layer,) = ours.layers(SHAPE)
  assert trees.get(variables['params'], layer.paths[0]).shape == (16, 6)
  assert models.from_nnx(Nnx(nnx.Rngs(0))).layers is None


class Trained(nnx.Module):
  """Takes `train`, and changes a variable of its own at every call."""

  def __init__(self, rngs):
    self.dense, self.calls = nnx.Linear(16, 3, rngs=rngs), nnx.Variable(jnp.asarray(0.0))

  def __call__(self, images, train):
    self.calls[...] += 1
    return self.dense(images.reshape(images.shape[0], -1)) * (2.0 if train else self.calls[...])


def test_train_is_passed_and_the_users_module_is_unchanged():
  module = Trained(nnx.Rngs(0))
  model, images = models.from_nnx(module), np.ones((1, *SHAPE), np.float32)
  variables = model.init(jax.random.key(0), SHAPE)
  once, twice, training = (model.apply(variables, images, train)[0] for train in (False, False, True))
  np.testing.assert_array_equal(once, twice)
  np.testing.assert_allclose(training, 2 * once, rtol=1e-6)
  assert module.calls[...] == 0


class Reading(nnx.Module):
  def __init__(self, rngs):
    self.table, self.head = nnx.Embed(11, 4, rngs=rngs), nnx.Linear(4, 3, rngs=rngs)

  def __call__(self, tokens):
    return self.head(self.table(tokens).mean(1))


def test_rows_and_tokens_are_taken_as_by_the_other_adapters():
  texts = models.from_nnx(Reading(nnx.Rngs(0)), axes=1, dtype='int32')
  assert (texts.takes_ids, texts.axes) == (True, 1)
  rows = models.from_nnx(nnx.Linear(5, 3, rngs=nnx.Rngs(0)), axes=1)
  for model in (texts, rows):
    variables = model.init(jax.random.key(0), (5,))
    models.check_variables(model, variables, (5,))
    models.check_apply(model, variables, (5,))
  with pytest.raises(errors.UsageError, match='1 side'):
    models.check_variables(rows, variables, (1, 5))
  with pytest.raises(errors.UsageError, match='dtype of samples'):
    models.from_nnx(Reading(nnx.Rngs(0)), dtype='int64')
  assert models.from_nnx(Reading(nnx.Rngs(0)), axes=None).axes is None


def test_other_objects_than_nnx_modules_are_named():
  for wrong, words in ((Linen(), 'got Linen()'), (Nnx, 'Nnx'), (None, 'got None')):
    with pytest.raises(errors.UsageError, match=r'from_nnx takes an instance of a flax\.nnx\.Module, got ') as caught:
      models.from_nnx(wrong)
    assert words in ' '.join(str(caught.value).split())
