"""BatchNorm's statistics: sent with their layer, averaged over those who sent them, counted in both directions."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from gradleak import Client, defenses, models
from gradleak.core import trees
from gradleak.federated import simulation, training
from gradleak.models import masked

KEY = jax.random.key(3)
LAYERS = (
  trees.Layer('first', (('dense', 'kernel'), ('norm', 'scale'))),
  trees.Layer('second', (('last', 'kernel'),)),
)
STATISTICS = 4 * 8  # bytes: mean and variance of four features


def init(key, sample_shape):
  del sample_shape
  keys = jax.random.split(key)
  params = {
    'dense': {'kernel': 0.1 * jax.random.normal(keys[0], (64, 4))},
    'norm': {'scale': jnp.ones(4)},
    'last': {'kernel': jax.random.normal(keys[1], (4, 10))},
  }
  return {'params': params, 'batch_stats': {'norm': {'mean': jnp.zeros(4), 'var': jnp.ones(4)}}}


def apply(variables, images, train=False, key=None):
  """Statistics are those of the batch alone, so that a client's can be told."""
  del key
  params, hidden = variables['params'], images.reshape(len(images), -1) @ variables['params']['dense']['kernel']
  found = variables['batch_stats']['norm']
  if train:
    counts = masked.counted(hidden)
    found = {'mean': jnp.mean(hidden, 0, where=counts), 'var': jnp.var(hidden, 0, where=counts)}
  hidden = (hidden - found['mean'][None]) / jnp.sqrt(found['var'][None] + 1e-2) * params['norm']['scale'][None]
  return jax.nn.relu(hidden) @ params['last']['kernel'], {'norm': found}


MODEL = models.Model('normed', init, apply, layers=lambda sample_shape: LAYERS)


def masks(dense, scale, last):
  return {'dense': {'kernel': np.asarray(dense)}, 'norm': {'scale': np.asarray(scale)}, 'last': {'kernel': last}}


def test_statistics_go_with_their_layer():
  statistics = {'norm': {'mean': np.zeros(4), 'var': np.zeros(4)}, 'bare': {'mean': np.zeros(2)}}
  entries = np.zeros((3, 4), bool)
  entries[1, 2] = True
  sent = masks([True, False, False], entries, np.ones(3, bool))
  found = simulation.statistics_sent(sent, statistics, LAYERS)
  assert found['norm']['mean'].tolist() == found['norm']['var'].tolist() == [True, True, False]
  assert found['bare']['mean'].tolist() == [True] * 3  # a norm without parameters
  alone = simulation.statistics_sent(sent, statistics)  # without layers, a module is one
  assert alone['norm']['mean'].tolist() == [False, True, False]
  assert simulation.statistics_sent(sent, {}) == {}


@pytest.fixture(scope='module')
def federation(small_images):
  def make(upload=None):
    client = Client(MODEL, 10, share='delta', optimizer=optax.sgd(0.1))
    if upload is not None:
      client = defenses.bind(upload, defenses.Context(client, init(KEY, None), (8, 8, 1))).client(client)
    images, labels = (np.asarray(part) for part in small_images)
    parts = [np.arange(0, 2), np.arange(2, 4), np.arange(4, 8)]
    return simulation.Federation(client, images[:8], labels[:8], parts, 3)

  return make


@pytest.mark.long
def test_both_directions_count_them(federation):
  _, rows = training.train(KEY, federation(), init(KEY, None), 1)
  parameters = 4 * (64 * 4 + 4 + 4 * 10)
  assert rows[0]['bytes_up'] == rows[0]['bytes_down'] == 3 * (parameters + STATISTICS)
  assert rows[0]['bytes_statistics'] == 3 * STATISTICS


@pytest.mark.long
def test_who_drops_a_layer_drops_its_statistics(federation):
  fragments = federation(defenses.fragmentation_random(ratio=0.5))
  variables = init(KEY, None)
  state = simulation.start(fragments, variables)
  mixed = False
  for _ in range(4):
    before = state.variables
    state, done = simulation.run_round(fragments, state, KEY)
    some = done.bytes_statistics > 0
    assert (done.bytes_up == np.where(some, 4 * 64 * 4 + 4 * 4 + STATISTICS, 4 * 4 * 10) + 1).all()
    hidden = [
      fragments.samples[part].reshape(len(part), -1) @ before['params']['dense']['kernel']
      for part in fragments.partition
    ]
    weights = np.where(some, [2, 2, 4], 0)
    hidden = [np.asarray(h) for h in hidden]
    found = state.variables['batch_stats']['norm']['mean']
    expected = before['batch_stats']['norm']['mean']
    if some.any():
      expected = sum(w * np.mean(h, axis=0) for w, h in zip(weights, hidden, strict=True)) / weights.sum()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    mixed |= some.any() and not some.all()
  assert mixed


@pytest.mark.long
def test_a_layer_that_nobody_sends_keeps_its_statistics(federation):
  silent = federation(defenses.fragmentation_random(ratio=0.0))
  state = simulation.start(silent, init(KEY, None))
  after, done = simulation.run_round(silent, state, KEY)
  assert done.bytes_statistics.tolist() == [0, 0, 0]
  jax.tree.map(np.testing.assert_array_equal, after.variables, state.variables)


class Compiled(nn.Module):
  """A network with a part that is compiled by itself."""

  @nn.compact
  def __call__(self, x, train=False):
    norm = nn.jit(nn.BatchNorm)(use_running_average=not train, name='norm')
    return nn.Dense(10)(norm(nn.Dense(6)(x.reshape(x.shape[0], -1))))


@pytest.mark.long
def test_padding_stays_out_of_a_part_that_is_compiled_by_itself(small_images):
  """Such a part held the traced weights of the first batch, and failed in the next program."""
  samples, labels = (jnp.asarray(x[:5]) for x in small_images)
  client = Client(models.from_flax(Compiled()), 10, share='delta', batch_size=4)
  variables = client.model.init(jax.random.key(0), samples.shape[1:])
  padded = jax.jit(client.participate)(None, variables, samples, labels, jnp.asarray([1.0, 1, 1, 0, 0]))[0].update
  alone = jax.jit(client.participate)(None, variables, samples[:3], labels[:3])[0].update
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), padded, alone)
