"""The readings of GradDefense's compensation: how the matrix is filled, what is remembered, and where it acts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradleak as gl
from gradleak import defenses
from gradleak.core import errors, trees
from gradleak.defenses.compensation import compensate, noise_variance
from gradleak.federated import simulation

KEY = jax.random.key(11)
N, COLUMNS, ROWS = 1176, 14, 84  # ⌈√(1176/6)⌉ columns


def rank_one(layout):
  """Returns a vector whose matrix in this layout has rank one, and in the other one does not."""
  rng = np.random.default_rng(0)
  matrix = np.outer(rng.normal(size=ROWS), rng.normal(size=COLUMNS)).astype(np.float32)
  return (matrix.T if layout == 'columns' else matrix).ravel()


@pytest.mark.parametrize('layout', ['columns', 'rows'])
def test_the_layout_decides_which_vectors_are_of_low_rank(layout):
  """Pieces of one vector, appended, are columns (section VI-D): what repeats from piece to piece is kept."""
  noise = 0.3 * np.random.default_rng(1).normal(size=N).astype(np.float32)
  signal = rank_one(layout)
  errors_ = {}
  for way in ('columns', 'rows'):
    found = compensate({'w': jnp.asarray(signal + noise)}, 0.3**2, layout=way)['w']
    errors_[way] = np.linalg.norm(np.asarray(found) - signal) / np.linalg.norm(signal)
  other = 'rows' if layout == 'columns' else 'columns'
  assert errors_[layout] < 0.5 * np.linalg.norm(noise) / np.linalg.norm(signal)
  assert errors_[other] > 2 * errors_[layout]


def test_columns_is_the_default_and_the_order_of_entries_is_kept():
  tree = {'a': jnp.arange(7.0), 'b': jnp.arange(20.0).reshape(4, 5), 'c': jnp.asarray(3.0)}  # 28 entries, padded
  jax.tree.map(np.testing.assert_array_equal, compensate(tree, 0.0), tree)
  given = rank_one('columns') + 0.3 * np.random.default_rng(2).normal(size=N).astype(np.float32)
  by_hand = compensate({'w': jnp.asarray(given.reshape(COLUMNS, ROWS).T.ravel())}, 0.09, layout='rows')['w']
  found = compensate({'w': jnp.asarray(given)}, 0.09)['w']
  np.testing.assert_allclose(found, np.asarray(by_hand).reshape(ROWS, COLUMNS).T.ravel(), atol=1e-5)
  assert defenses.compensation(stddev=1.0).stages[0].settings['layout'] == 'columns'


@pytest.mark.long
@pytest.mark.parametrize('layout', ['columns', 'rows'])
def test_zeros_of_frozen_layers_are_no_entries(layout):
  model = gl.models.mlp(10, widths=(60, 8))
  client = gl.Client(model, 10, frozen=('Dense_0',))
  variables = jax.jit(model.init, static_argnums=1)(jax.random.key(0), (8, 8, 1))
  defense = defenses.compensation(stddev=0.1, ratio=1.0, layout=layout)
  server = defenses.bind(defense, defenses.Context(client, variables, (8, 8, 1))).server()
  shared = client.shared_layers(variables['params'], (8, 8, 1))
  drawn = trees.draws(jax.random.normal, KEY, variables['params'])
  noise = trees.masked(jax.tree.map(lambda draw: 0.1 * draw, drawn), shared)
  sent, _ = jax.jit(functools.partial(server.update, num_clients=1))(noise, server.init(variables['params']))
  layers = [name for name in noise if name != 'Dense_0']
  expected = compensate({name: noise[name] for name in layers}, 0.01, layout=layout)
  for name in layers:
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), sent[name], expected[name])
  assert not np.any(sent['Dense_0']['kernel'])


def test_memory_loses_nothing():
  """What was let through and what is still remembered add up to all that came in, in every round (eq. 6)."""
  server = defenses.compensation(stddev=0.3, ratio=1.0, memory=True)
  first = {'w': jnp.asarray(rank_one('columns')), 'b': jnp.zeros(3, jnp.bfloat16)}
  state, came, went = server.init(first), np.zeros(N), np.zeros(N)
  step = jax.jit(functools.partial(server.update, num_clients=1))
  for number in range(6):
    noise = 0.3 * jax.random.normal(jax.random.fold_in(KEY, number), (N,))
    mean = {'w': 0.05 * first['w'] + noise, 'b': first['b']}
    kept, state = step(mean, state)
    came, went = came + np.asarray(mean['w']), went + np.asarray(kept['w'])
    np.testing.assert_allclose(went + np.asarray(state.dropped['w']), came, atol=1e-4)
    assert kept['b'].dtype == jnp.bfloat16
    if number == 0:
      assert np.linalg.norm(kept['w']) < 0.5 * np.linalg.norm(mean['w'])  # most of it lies in the band
  without = defenses.compensation(stddev=0.3, ratio=1.0)
  assert jax.tree.leaves(without.init(first)) == []


def test_weights_that_differ_add_more_noise_than_their_number_says():
  update = {'w': jnp.asarray(rank_one('columns')) + 0.2 * jax.random.normal(KEY, (N,))}
  server = defenses.compensation(stddev=0.5, ratio=0.2)
  weights = np.asarray([0.7, 0.1, 0.1, 0.1, 0.0], np.float32)
  found, _ = server.update(update, server.init(update), num_clients=4, weights=weights)
  expected = compensate(update, noise_variance(weights, stddev=0.5, ratio=0.2, num_slices=10))
  np.testing.assert_allclose(found['w'], expected['w'], atol=1e-6)
  equal, _ = server.update(update, server.init(update), num_clients=4)
  expected = compensate(update, noise_variance(np.full(4, 0.25), stddev=0.5, ratio=0.2, num_slices=10))
  np.testing.assert_allclose(equal['w'], expected['w'], atol=1e-6)
  assert np.abs(equal['w'] - found['w']).max() > 0.01


@pytest.mark.long
def test_the_state_goes_from_round_to_round(linear):
  """In a federation: with memory the second round differs from the same round without it, the first does not."""
  found = {}
  for memory in (False, True):
    client = gl.Client(linear.client.model, 10, share='delta', upload=defenses.gaussian(stddev=0.05))
    federation = simulation.Federation(
      client,
      linear.samples,
      linear.targets,
      [np.arange(4), np.arange(4, 8)],
      2,
      chain=defenses.compensation(stddev=0.05, ratio=1.0, memory=memory),
    )
    state = simulation.start(federation, linear.variables)
    found[memory] = []
    for _ in range(2):
      state, _ = simulation.run_round(federation, state, KEY)
      found[memory].append((state.variables['params'], state.chain))
  (first, _), (second, _) = found[False]
  (same, chain), (other, _) = found[True]
  jax.tree.map(np.testing.assert_array_equal, first, same)
  assert float(trees.norm(chain.dropped)) > 0
  assert float(trees.norm(trees.subtract(second, other))) > 1e-3


def test_readings_are_settings():
  with pytest.raises(errors.UsageError, match=r'compensation\(memory\) is 1, expected bool'):
    defenses.compensation(stddev=0.1, memory=1)
  text = 'graddefense(stddev=0.1)+compensation(stddev=0.1,layout=rows,memory=True)'
  chained = gl.parse(text)
  assert [stage.traits.place for stage in chained.stages] == ['upload', 'round']
  assert chained.stages[1].settings['memory'] is True and chained.stages[1].settings['layout'] == 'rows'
