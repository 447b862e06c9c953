"""Separation of known mixtures: sources come back on their own scale and sign; of networks, more than Fidel reads."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradleak import Client, models
from gradleak.attacks import separation
from gradleak.attacks.fidel import from_update
from gradleak.attacks.labels import bias_corrected, last_layer
from gradleak.core import errors
from gradleak.metrics import revealed

pytestmark = pytest.mark.usefixtures('fast_compilation')


def mixtures(sources, neurons, seed=0, positive=False):
  """The gradients [in, neurons] and [neurons] of a layer in which every neuron holds every source [N, in]."""
  shares = np.random.default_rng(seed).normal(size=(neurons, len(sources)))
  shares = np.abs(shares) if positive else shares
  return (sources.T @ shares.T).astype(np.float32), shares.sum(axis=1).astype(np.float32)


def furthest(found, sources):
  """The largest root mean squared error of any source in its nearest reconstruction."""
  return max(np.sqrt(np.mean((np.asarray(found, np.float64) - row) ** 2, axis=1)).min() for row in sources)


def test_independent_sources_come_back_on_their_own_scale():
  sources = np.random.default_rng(1).laplace(0.3, 0.1, (4, 2000))
  layer = mixtures(sources, 12)
  found = separation.fast_ica(*layer, 4)
  assert found.shape == (4, 2000) and furthest(found, sources) < 0.03
  # A delta has another scale and sign, and says the same.
  np.testing.assert_allclose(
    np.sort(separation.fast_ica(-0.1 * layer[0], -0.1 * layer[1], 4).mean(axis=1)),
    np.sort(found.mean(axis=1)),
    rtol=0.02,
  )
  assert furthest(separation.fast_ica(*layer, 12), sources) < 0.03  # the rank says that there are four
  whitened = np.linalg.svd(layer[0], full_matrices=False)[0].T[:4] * np.sqrt(2000)
  assert furthest(whitened, sources) > 0.1  # whitening alone does not separate


def test_sources_that_are_not_negative_come_back_where_pixels_tell_them_apart():
  rng = np.random.default_rng(2)
  sources = rng.uniform(0, 1, (3, 400)) * (rng.uniform(size=(3, 400)) < 0.4)
  gradient, shares = mixtures(sources, 30, positive=True)
  assert furthest(separation.nmf(gradient, shares, 3, iterations=2000), sources) < 0.05
  flipped = np.concatenate([gradient, -gradient + 0.2], axis=1), np.concatenate([shares, -shares])
  assert furthest(separation.nmf(*flipped, 3, iterations=2000), sources) < 0.05  # what is no mixture is left out


@pytest.fixture(scope='module')
def cocktail():
  def separate(kernel, bias, **settings):
    settings = {'steps': 250, 'learning_rate': 2e-2, 'decorrelation': 0.1, **settings}
    return separation.cocktail_party(kernel, bias, (3, 24, 24, 1), **settings)

  return separate


@pytest.fixture(scope='module')
def separate_two(cocktail):
  return jax.jit(jax.vmap(cocktail))


@pytest.mark.long
def test_smooth_sources_come_apart_by_total_variation(cocktail, separate_two):
  across, down = np.meshgrid(np.linspace(0, 1, 24), np.linspace(0, 1, 24))
  noise = np.random.default_rng(5).uniform(size=(24, 24))
  sources = np.stack([0.5 + 0.4 * np.sin(6 * down), across * (1 - 0.5 * across), noise]).reshape(3, 576)
  layer = mixtures(sources, 10)
  for found in separate_two(*(np.stack([x, -0.1 * x]) for x in layer)):
    assert furthest(found, sources) < 0.05  # without the truth, on the right scale and with the right sign
  assert furthest(jax.jit(functools.partial(cocktail, tv=0.0))(*layer), sources) > 0.1


@pytest.mark.long
def test_its_negentropy_separates_what_is_sparser_than_noise_and_what_is_not(cocktail):
  """The published E[log cosh s]² has the wrong sign for the sparse ones."""
  separate = jax.jit(functools.partial(cocktail, tv=0.0, negentropy=1000.0))
  rng = np.random.default_rng(3)
  for sources in (rng.laplace(0.4, 0.1, (3, 576)), rng.uniform(0, 1, (3, 576))):
    found = separate(*mixtures(sources, 10))
    assert float(revealed.fully_revealed(found, sources).correlation.min()) > 0.99


@pytest.fixture(scope='module')
def victim(small_images):
  """(`Client`, variables, gradient, samples, targets) of a batch of sixteen digits; the weights are new."""
  from sklearn.datasets import load_digits

  data = load_digits()
  images, labels = (data.images[:16, :, :, None] / 16).astype(np.float32), data.target[:16].astype(np.int32)
  client = Client(models.create('mlp', 10, init='default'), 10)
  variables = jax.jit(client.model.init, static_argnums=1)(jax.random.key(0), (8, 8, 1))
  update = jax.jit(functools.partial(client.local_update, None))(variables, images, labels).update
  return client, variables, update, images, labels


@pytest.fixture(scope='module')
def alternate(victim):
  client, variables, *_ = victim

  def separate(key, update, labels):
    return separation.alternating(key, client, variables, update, labels, (16, 8, 8, 1), steps=80)

  return jax.jit(jax.vmap(separate, (0, None, None)))


@pytest.mark.slow
def test_alternating_reveals_what_no_neuron_holds_alone(victim, alternate):
  client, _, update, images, labels = victim
  alone = from_update(client.model.layers((8, 8, 1)), update)
  held = np.asarray(revealed.fully_revealed(alone.inputs, images).correlation)
  found = alternate(jax.random.split(jax.random.key(1), 2), update, jax.nn.one_hot(np.sort(labels), 10))
  for start in found:
    together = np.maximum(held, revealed.fully_revealed(start, images).correlation)
    assert np.sum(together >= 0.9) >= np.sum(held >= 0.9) + 3
    assert np.sum(together >= 0.98) >= np.sum(held >= 0.98)
    assert float(start.min()) >= 0 and float(start.max()) <= 1
  other = alternate(jax.random.split(jax.random.key(1), 2), update, jax.nn.one_hot(np.zeros(16, int), 10))
  assert np.sum(revealed.fully_revealed(other[0], images).correlation >= 0.9) < 3  # labels matter


@pytest.mark.slow
def test_labels_are_counted_where_the_network_is_biased(victim):
  client, variables, *_, images, labels = victim
  params = dict(variables['params'])
  last = max(params)
  params[last] = {**params[last], 'bias': jnp.linspace(-1, 1, 10)}  # it predicts the last classes
  biased = {**variables, 'params': params}
  update = jax.jit(functools.partial(client.local_update, None))(biased, images, labels).update
  told = jax.jit(lambda u: separation.counted_labels(client, biased, u, images.shape))(update)
  np.testing.assert_array_equal(told, np.sort(labels))
  published = bias_corrected(*last_layer(client.model, update, (8, 8, 1), 10), 16)
  assert np.any(np.sort(published) != np.sort(labels))
  nothing = separation.counted_labels(client, biased, jax.tree.map(jnp.zeros_like, update), images.shape)
  assert nothing.shape == (16,) and 0 <= int(nothing.min()) <= int(nothing.max()) < 10


@pytest.mark.long
def test_its_turns_are_those_of_a_loop_in_float64(victim):
  client, variables, _, images, labels = victim
  images, labels = images[:3], np.asarray(jax.nn.one_hot(labels[:3], 10))
  send = jax.jit(functools.partial(client.local_update, None))
  rows = np.asarray(send(variables, images, labels).update['Dense_0']['kernel'], np.float64).T
  guess = np.asarray(jax.random.uniform(jax.random.key(2), (3, 64)), np.float64)
  for turn in range(3):
    shares = np.zeros((128, 3))
    for i in range(3):  # one sample's gradient is its share
      one = send(variables, guess[i].reshape(1, 8, 8, 1).astype(np.float32), labels[i : i + 1]).update
      shares[:, i] = np.asarray(one['Dense_0']['bias'], np.float64) / 3
    size = np.sqrt(np.sum(shares**2, axis=0))
    left = rows - shares @ guess
    towards = np.linalg.inv((shares / size).T @ (shares / size) + 0.05 * np.eye(3)) @ (shares / size).T @ left
    guess = np.minimum(np.maximum(guess + 0.4 * 0.1 ** (turn / 2) * towards / size[:, None], 0), 1)
  found = jax.jit(
    lambda update: separation.alternating(
      jax.random.key(2), client, variables, update, labels, (3, 8, 8, 1), steps=3, damping=0.4, ridge=0.05
    )
  )(send(variables, images, labels).update)
  np.testing.assert_allclose(found, guess, atol=2e-3)


@pytest.mark.long
@pytest.mark.parametrize('scale', [0.0, 1e-30, 1e30])
def test_finite_in_finite_out(separate_two, alternate, victim, scale):
  rng = np.random.default_rng(4)
  kernel, bias = (np.float32(scale) * rng.normal(size=shape).astype(np.float32) for shape in ((576, 10), (10,)))
  assert np.isfinite(separate_two(*(np.stack([x, x]) for x in (kernel, bias)))).all()
  for method in (separation.fast_ica, separation.nmf):
    assert np.isfinite(method(kernel, bias, 3, iterations=20)).all()
  update = jax.tree.map(lambda u: jnp.float32(scale) * u, victim[2])
  labels = jax.nn.one_hot(victim[4], 10)
  assert np.isfinite(alternate(jax.random.split(jax.random.key(1), 2), update, labels)).all()


@pytest.mark.long
def test_usage_errors(victim):
  client, variables, update, *_ = victim
  kernel, bias = np.ones((16, 3), np.float32), np.ones(3, np.float32)
  with pytest.raises(errors.UsageError, match='at most 3 samples here, got 4'):
    separation.cocktail_party(kernel, bias, (4, 4, 4, 1))
  sent = jax.random.key(0), client, variables, update, jnp.ones((2, 10)) / 10
  with pytest.raises(errors.UsageError, match='at most 64 samples here, got 65'):
    separation.alternating(*sent, (65, 8, 8, 1))
  with pytest.raises(errors.UsageError, match=r'takes 64 features, not a sample of \(9, 9, 1\)'):
    separation.alternating(*sent, (2, 9, 9, 1))
  mlp = models.create('mlp', 10)
  held = mlp._replace(apply=lambda variables, x, *given: mlp.apply(variables, 2 * x - 1, *given))
  turned = mlp._replace(apply=lambda variables, x, *given: mlp.apply(variables, x[:, ::-1], *given))
  for model in (models.create('mlp+normalised(pixels=mnist)', 10), held, turned):
    sent = sent[0], Client(model, 10), *sent[2:]
    for method, given in ((separation.alternating, sent), (separation.counted_labels, sent[1:4])):
      with pytest.raises(errors.UsageError, match=r'sees pixels in \[0, 1\]'):
        method(*given, (2, 8, 8, 1))
