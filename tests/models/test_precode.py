"""PRECODE's bottleneck, its term of the loss, and the features that its gradient reveals."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import gradleak
from gradleak import Client, models
from gradleak.attacks.dense import first_dense_input
from gradleak.core import errors, trees
from gradleak.defenses.concealment import mixed_gradient, view
from gradleak.models import precode

SHAPES = {'lenet': (8, 8, 1), 'mlp': (5, 5, 1), 'cnn(dropout=0.5)': (6, 6, 1), 'convnet(width=2)': (12, 12, 1)}


@pytest.fixture(autouse=True)
def no_key_is_used_twice():
  with jax.debug_key_reuse(True):
    yield


@pytest.fixture(scope='module')
def lenet(small_images):
  """Returns a LeNet with a code of 16, its variables, three digits and their labels."""
  model = models.create('lenet+precode(size=16,beta=0.01)', 10)
  variables = jax.jit(model.init, static_argnums=1)(jax.random.key(0), (8, 8, 1))
  return model, variables, jnp.asarray(small_images[0][:3]), jnp.asarray(small_images[1][:3])


def without(variables):
  return {**variables, 'params': {key: value for key, value in variables['params'].items() if key != 'precode'}}


def reference(variables, images, noise):
  """Returns (decoded features, KL in bits) in float64, from the features of the LeNet without its bottleneck."""
  inputs = np.asarray(models.create('lenet', 10).features(without(variables), images), np.float64)
  encoder, decoder = (
    {k: np.asarray(v, np.float64) for k, v in variables['params']['precode'][part].items()}
    for part in ('encoder', 'decoder')
  )
  decoded, bits = [], []
  for x, epsilon in zip(inputs, np.asarray(noise, np.float64), strict=True):
    statistics = x @ encoder['kernel'] + encoder['bias']
    size = statistics.size // 2
    mean, std = statistics[:size], np.log1p(np.exp(statistics[size:]))
    decoded.append((mean + std * epsilon) @ decoder['kernel'] + decoder['bias'])
    bits.append(sum(0.5 * (m * m + s * s - 1) - np.log(s) for m, s in zip(mean, std, strict=True)) / np.log(2))
  return np.stack(decoded), np.asarray(bits)


@pytest.mark.slow
def test_without_a_key_the_code_is_its_mean(lenet):
  model, variables, images, _ = lenet
  decoded, bits = reference(variables, images, np.zeros((3, 16)))
  head = variables['params']['Dense_0']
  logits, stats, penalty = jax.jit(model.penalised, static_argnums=2)(variables, images, True)
  np.testing.assert_allclose(model.features(variables, images), decoded, rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(logits, decoded @ np.asarray(head['kernel']) + np.asarray(head['bias']), rtol=1e-4)
  np.testing.assert_allclose(penalty, 0.01 * bits, rtol=1e-4)
  assert stats == {} and bits.min() > 0.1
  np.testing.assert_array_equal(model.apply(variables, images)[0], model.apply(variables, images, True, None)[0])


@pytest.mark.slow
def test_with_a_key_the_code_has_its_mean_and_standard_deviation(lenet):
  """Decoding is affine, so the logits over many draws have the mean and covariance of the decoded N(μ, σ²)."""
  model, variables, images, _ = lenet
  keys = jax.random.split(jax.random.key(1), 4000)
  logits = np.asarray(jax.jit(jax.vmap(lambda key: model.apply(variables, images[:1], True, key)[0][0]))(keys))
  inputs = models.create('lenet', 10).features(without(variables), images[:1])
  _, std = precode.encode(variables['params']['precode'], inputs)
  through = np.asarray(variables['params']['precode']['decoder']['kernel'] @ variables['params']['Dense_0']['kernel'])
  spread = np.sqrt((np.asarray(std[0])[:, None] ** 2 * through**2).sum(0))
  means = (logits.mean(0) - np.asarray(model.apply(variables, images[:1])[0][0])) / spread * np.sqrt(4000)
  assert np.abs(means).max() < 4.5
  ratio = logits.std(0) / spread  # its standard error is 1/√8000
  assert np.abs(ratio - 1).max() < 0.05


def test_draws_follow_the_key_and_the_penalty_does_not(lenet):
  model, variables, images, _ = lenet
  run = jax.jit(lambda seed: model.penalised(variables, images, True, jax.random.key(seed)))
  first, again, other = run(1), run(1), run(2)
  np.testing.assert_array_equal(first[0], again[0])
  assert np.abs(first[0] - other[0]).max() > 0.01
  np.testing.assert_array_equal(first[2], other[2])
  logits, stats = jax.jit(lambda seed: model.apply(variables, images, True, jax.random.key(seed)))(1)
  np.testing.assert_array_equal(logits, first[0])
  assert stats == first[1]


def test_kl_against_a_monte_carlo_estimate():
  rng = np.random.default_rng(0)
  mean, std = rng.normal(size=(2, 5)), rng.uniform(0.3, 2, (2, 5))
  z = mean + std * rng.normal(size=(200_000, 2, 5))
  log_ratio = -np.log(std) - 0.5 * ((z - mean) / std) ** 2 + 0.5 * z**2
  bits = log_ratio.sum(-1) / np.log(2)
  error = bits.std(0) / np.sqrt(len(bits))
  kl_bits = jax.jit(precode.kl_bits)
  difference = np.asarray(kl_bits(jnp.float32(mean), jnp.float32(std))) - bits.mean(0)
  assert (np.abs(difference) < 5 * error).all() and (5 * error < 0.1).all()
  np.testing.assert_allclose(kl_bits(jnp.zeros((1, 4)), jnp.ones((1, 4))), [0], atol=1e-6)


def test_kl_stays_finite_where_the_standard_deviation_underflows():
  def bits(inputs):
    params = {'encoder': {'kernel': jnp.ones((1, 2)), 'bias': jnp.zeros(2)}}
    return precode.kl_bits(*precode.encode(params, inputs.reshape(1, 1))).sum()

  slope = jax.jit(jax.value_and_grad(bits))
  for value in (-1e4, -100.0, -50.0, 0.0, 50.0, 1e4):
    assert np.isfinite(slope(jnp.float32(value))).all(), value


def gradient(model, variables, images, labels, key=None):
  return jax.jit(Client(model, 10).local_update)(key, variables, images, labels).update


@pytest.mark.slow
def test_the_clients_gradient_includes_beta_times_the_kl(lenet):
  _, variables, images, labels = lenet
  key = jax.random.key(5)

  def at(beta):
    return gradient(models.create(f'lenet+precode(size=16,beta={beta})', 10), variables, images, labels, key)

  def mean_bits(params):
    inputs = models.create('lenet', 10).features(without({'params': params}), images)
    return precode.kl_bits(*precode.encode(params['precode'], inputs)).mean()

  none, some = at(0.0), at(0.1)
  kl = jax.jit(jax.grad(mean_bits))(variables['params'])
  assert trees.norm(kl) > 0.1
  difference = trees.subtract(some, none)
  jax.tree.map(lambda d, k: np.testing.assert_allclose(d, 0.1 * k, rtol=1e-3, atol=1e-5), difference, kl)
  # The KL has no gradient after the code.
  for leaf in jax.tree.leaves((kl['precode']['decoder'], kl['Dense_0'])):
    np.testing.assert_array_equal(leaf, 0)


@pytest.mark.slow
def test_concealed_samples_are_trained_on_with_the_penalty(lenet):
  """Samples concealed by themselves give their own gradient, including the penalty's."""
  model, variables, images, labels = lenet
  client = Client(model, 10)
  batch = images, jax.nn.one_hot(labels, 10)
  plain = jax.jit(client.local_update)(None, variables, images, labels).update

  def mixed(variables):
    return mixed_gradient(client, variables, batch, trees.take(batch, slice(2)), jnp.ones(3), 0.7)

  for mine, its in zip(jax.tree.leaves(jax.jit(mixed)(variables)), jax.tree.leaves(plain), strict=True):
    np.testing.assert_allclose(mine, its, rtol=1e-4, atol=1e-6)
  alone = jax.jit(client.local_update)(None, variables, images[:1], labels[:1]).update
  of_view = jax.jit(lambda *given: view(client, *given).gradient)(variables, images[0], batch[1][0])
  for mine, its in zip(jax.tree.leaves(of_view), jax.tree.leaves(alone), strict=True):
    np.testing.assert_allclose(mine, its, rtol=1e-4, atol=1e-6)


@pytest.mark.long
def test_per_example_penalties_are_averaged_over_the_examples_alone(lenet):
  """Local SGD pads its last batch; the padding's KL must not count."""
  model, variables, images, labels = lenet
  padded = Client(model, 10, share='delta', batch_size=2)
  whole = jax.jit(padded.local_update)(None, variables, images, labels).update
  step = jax.tree.map(lambda g: -0.1 * g, gradient(model, variables, images[:2], labels[:2]))
  middle = {'params': optax.apply_updates(variables['params'], step)}
  last = jax.tree.map(lambda g: -0.1 * g, gradient(model, middle, images[2:], labels[2:]))
  jax.tree.map(lambda w, a, b: np.testing.assert_allclose(w, a + b, rtol=1e-3, atol=2e-6), whole, step, last)


@pytest.mark.slow
def test_the_encoders_gradient_reveals_the_features(lenet):
  """The draw does not protect what comes before the bottleneck."""
  model, variables, images, labels = lenet
  truth = np.asarray(models.create('lenet', 10).features(without(variables), images))
  alone = jax.jit(lambda seed, x, y: Client(model, 10).local_update(jax.random.key(seed), variables, x, y).update)
  for seed, i in ((1, 0), (2, 0), (1, 1)):
    encoder = alone(seed, images[i : i + 1], labels[i : i + 1])['precode']['encoder']
    np.testing.assert_allclose(first_dense_input(encoder['kernel'], encoder['bias']), truth[i], rtol=1e-4)
  # For two samples it is a mixture, and for a zero gradient zero.
  both = alone(1, images[:2], labels[:2])['precode']['encoder']
  mixture = np.asarray(first_dense_input(both['kernel'], both['bias']))
  assert np.abs(mixture - truth[:2]).max(1).min() > 1e-3
  np.testing.assert_array_equal(first_dense_input(jnp.ones((3, 2)), jnp.zeros(2)), np.zeros(3))


@pytest.mark.long
@pytest.mark.parametrize('base', SHAPES)
def test_every_model_takes_a_bottleneck(base):
  model, shape = models.create(f'{base}+precode(size=4)', 10), SHAPES[base]
  variables = jax.eval_shape(lambda key: model.init(key, shape), jax.random.key(0))
  features = trees.get(variables['params'], model.layers(shape)[-1].paths[0]).shape[0]
  shapes = jax.tree.map(lambda leaf: leaf.shape, variables['params']['precode'])
  assert shapes == {
    'encoder': {'kernel': (features, 8), 'bias': (8,)},
    'decoder': {'kernel': (4, features), 'bias': (features,)},
  }
  names = [layer.name for layer in model.layers(shape)]
  assert names[-3:-1] == ['precode/encoder', 'precode/decoder'] and len(set(names)) == len(names)
  paths = sorted(path for layer in model.layers(shape) for path in layer.paths)
  assert paths == sorted(tuple(k.key for k in path) for path, _ in jax.tree.leaves_with_path(variables['params']))

  def run(variables, images, key):
    return *model.apply(variables, images, True, key), model.features(variables, images)

  images = jnp.zeros((2, *shape), jnp.float32)
  logits, stats, decoded = jax.eval_shape(run, variables, images, jax.random.key(0))
  assert logits.shape == (2, 10) and decoded.shape == (2, features)
  assert jax.tree.structure(stats) == jax.tree.structure(variables.get('batch_stats', {}))


class Own(nn.Module):
  """A user's network: nested, its classifier called by keyword and with the name of the bottleneck's encoder."""

  @nn.compact
  def __call__(self, images, train):
    x = nn.Dense(6, name='zeta')(images.reshape(images.shape[0], -1))
    x = nn.BatchNorm(use_running_average=not train)(nn.tanh(x))
    return nn.Dense(4, name='encoder')(inputs=x)


@pytest.mark.long
def test_a_users_own_network(small_images):
  model = precode.precode(models.from_flax(Own()), size=3)
  variables = jax.jit(model.init, static_argnums=1)(jax.random.key(0), (8, 8, 1))
  images = small_images[0][:2]
  (logits, _), features = jax.jit(lambda v: (model.apply(v, images, False, None), model.features(v, images)))(variables)
  head = variables['params']['encoder']
  np.testing.assert_allclose(logits, features @ head['kernel'] + head['bias'].reshape(1, -1), rtol=1e-4, atol=1e-6)
  assert model.name == 'own+precode' and head['kernel'].shape == (6, 4)


def test_models_that_cannot_take_one():
  class Convolution(nn.Module):
    @nn.compact
    def __call__(self, images):
      return nn.Conv(4, (3, 3))(images).mean((1, 2))

  def plain(params, images):
    return images.reshape(images.shape[0], -1) @ params['w']

  layer = trees.Layer('w', (('w',),))
  for model, words in (
    (models.from_flax(Convolution()), "'convolution' does not end in one"),
    (models.from_functions(lambda key, shape: {'w': jnp.ones((16, 2))}, plain), "'layers'"),
    (models.create('lenet+precode', 10), 'has a bottleneck already'),
  ):
    with pytest.raises(errors.UsageError, match=words):
      jax.eval_shape(lambda key, m=model: precode.precode(m).init(key, (4, 4, 1)), jax.random.key(0))
  wrapped = precode.precode(
    models.from_functions(lambda key, shape: {'w': jnp.ones((16, 2))}, plain, 'bare', layers=[layer])
  )
  with pytest.raises(errors.UsageError, match="calls its last dense layer once; 'bare'"):
    jax.eval_shape(lambda key: wrapped.apply(wrapped.init(key, (4, 4, 1)), jnp.zeros((1, 4, 4, 1))), jax.random.key(0))


@pytest.mark.slow
def test_a_scenario_with_a_bottleneck(small_images):
  model = models.create('lenet+precode(size=16)', 10)
  scenario = gradleak.scenario(model, *small_images, key=jax.random.key(0))
  assert scenario.settings['model'] == 'lenet+precode(size=16)'
  upload = jax.jit(scenario.client.local_update)(
    jax.random.key(1), scenario.variables, scenario.samples[:2], scenario.targets[:2]
  )
  assert jax.tree.structure(upload.update) == jax.tree.structure(scenario.variables['params'])
  assert all(np.isfinite(leaf).all() and np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(upload.update))
