import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradleak import Client, attacks, models, trees
from gradleak.attacks import driver

STEPS = 24


@pytest.fixture(scope='module')
def table(observe, small_images):
  """(build, shared, lanes) of csDLG on eight digits and a network that compiles fast; a lane's number is its rate."""
  images, labels = small_images
  model = models.from_functions(
    lambda key, _: {'w': jax.random.normal(key, (64, 10)), 'b': jnp.zeros(10)},
    lambda p, x: jnp.tanh(x.reshape(-1, 64)) @ p['w'] + p['b'].reshape(1, -1),
  )
  client = Client(model, 10)
  observations = [observe(images[i : i + 1], labels[i : i + 1], victim=client) for i in range(8)]
  template = attacks.parse('csdlg(tv=1e-6)', STEPS)
  shared = jax.tree.map(lambda *xs: jnp.stack(xs), *observations)
  traces = []

  def build(shared, lane):
    traces.append(None)
    return template.build(lane['numbers'], client), lane['key'], trees.take(shared, lane['sample'])

  lanes = {
    'sample': jnp.arange(8), 'key': jax.random.split(jax.random.key(3), 8),
    'numbers': tuple(jnp.full(8, number, jnp.float32) for number in template.numbers),
  }  # fmt: skip
  return build, shared, lanes, traces


def run(table, lanes=None, **options):
  build, shared, every, _ = table
  options = {'num_steps': STEPS, 'group_size': 4, **options}
  return driver.run(build, shared, every if lanes is None else lanes, **options)


@pytest.fixture(scope='module')
def reference(table):
  return run(table)


def choose(lanes, index):
  return jax.tree.map(lambda x: x[jnp.asarray(index)], lanes)


def same(a, b):
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    np.testing.assert_array_equal(x, y)


def test_it_descends(reference):
  assert (reference.objective < 0.2 * reference.objective_start).all()
  assert reference.images.shape == (8, 1, 8, 8, 1)


@pytest.mark.parametrize('index', [[6], [5, 2, 7], [7, 6, 5, 4, 3, 2, 1, 0, 0, 1, 2]])
def test_a_lane_is_the_same_bits_whatever_runs_beside_it(table, reference, index):
  found = run(table, choose(table[2], index))
  same(found, jax.tree.map(lambda x: x[np.asarray(index)], reference))


def test_one_device_gives_the_bits_of_two(table, reference):
  assert len(jax.local_devices()) == 2
  same(run(table, devices=jax.local_devices()[:1]), reference)


@pytest.mark.parametrize('chunk', [1, 7, 24, 100])
def test_chunks_do_not_change_bits(table, reference, chunk):
  same(run(table, chunk_steps=chunk), reference)


def test_resumed_is_uninterrupted(table, reference):
  seen = []
  run(table, chunk_steps=8, on_chunk=seen.append)
  assert [progress.step for progress in seen] == [0, 8, 16, 24]
  leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(seen[1].states)]
  after = []
  same(run(table, chunk_steps=8, resume=(8, leaves), on_chunk=after.append), reference)
  assert [progress.step for progress in after] == [16, 24]
  same(after[-1].objective, seen[-1].objective)


def test_a_lane_that_is_not_finite_leaves_its_neighbours_alone(table, reference):
  lanes = dict(table[2])
  lanes['numbers'] = (lanes['numbers'][0].at[2].set(jnp.nan), *lanes['numbers'][1:])
  found = run(table, lanes)
  others = np.asarray([0, 1, 3, 4, 5, 6, 7])
  same(jax.tree.map(lambda x: x[others], found), jax.tree.map(lambda x: x[others], reference))
  assert found.diverged_step.tolist() == [-1, -1, 0, -1, -1, -1, -1, -1]
  assert np.isnan(found.images[2]).all() and np.isinf(found.distance[2])


def test_all_diverged_stops_early(table):
  lanes = dict(table[2])
  lanes['numbers'] = (lanes['numbers'][0] * jnp.nan, *lanes['numbers'][1:])
  seen = []
  found = run(table, lanes, chunk_steps=4, on_chunk=seen.append)
  assert seen[-1].step == 4 and (found.diverged_step >= 0).all()


def test_numbers_are_traced(table):
  """Eight learning rates in one table: each program is traced as often as for one."""
  table[3].clear()
  run(table)
  once = len(table[3])
  table[3].clear()
  lanes = {**table[2], 'numbers': (jnp.linspace(0.01, 0.2, 8, dtype=jnp.float32), *table[2]['numbers'][1:])}
  found = run(table, lanes)
  assert len(table[3]) == once
  assert len(set(found.objective.tolist())) == 8


def test_sharding_does_not_sum_gradients_over_devices(table, reference):
  """With shard_map's default checks, gradients with respect to the shared weights are summed over devices."""
  build, shared, lanes, _ = table
  attack, key, observation = build(shared, trees.take(lanes, 3))
  _, info = jax.jit(lambda key: attack.step(attack.init(key, observation), observation))(key)
  np.testing.assert_allclose(reference.objective_start[3], info['objective'], rtol=1e-4)


def test_group_sizes_agree_at_the_first_step(table, reference):
  found = run(table, group_size=3)
  np.testing.assert_allclose(found.objective_start, reference.objective_start, rtol=1e-4)
