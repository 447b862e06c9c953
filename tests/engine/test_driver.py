import ctypes
import dataclasses
import math
import mmap
import os
import socket
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradleak import Client, Knowledge, Observation, models
from gradleak.attacks import matching
from gradleak.attacks.matching.optimizers import first_order
from gradleak.core import errors, trees
from gradleak.engine import ahead, driver, groups, memory, parts
from gradleak.engine.groups import Layout
from tests import programs

STEPS = 24
TRACED = []


@dataclasses.dataclass(frozen=True)
class Build:
  """csDLG on one digit; each lane has its rate and tolerance."""

  client: Client
  shift: float = 0.0

  def __call__(self, shared, lane):
    TRACED.append(self)
    variables, updates, labels = shared
    update, label = trees.take(updates, lane['sample']), labels[lane['sample']][None]
    observation = Observation(variables, update, label, Knowledge(), (1, 8, 8, 1), 10)
    optimizer = first_order('adam', lane['rate'], STEPS, gradient='sign', decay='step')
    settings = {'distance': 'cosine', 'tv': 1e-6, 'box': True, 'start': 'uniform', 'tolerance': lane['tolerance']}
    return matching.gradient_matching(self.client, optimizer, STEPS, **settings), lane['key'], observation


def make_table(images, labels):
  """Returns (build, shared, lanes) of eight digits and a network that compiles fast."""
  model = models.from_functions(
    lambda key, _: {'w': jax.random.normal(key, (64, 10)), 'b': jnp.zeros(10)},
    lambda p, x: jnp.tanh(x.reshape(-1, 64)) @ p['w'] + p['b'].reshape(1, -1),
  )
  client = Client(model, 10)
  variables, onehot = model.init(jax.random.key(0), (8, 8, 1)), jax.nn.one_hot(jnp.asarray(labels), 10)
  send = jax.jit(jax.vmap(lambda x, y: client.local_update(None, variables, x[None], y[None]).update))
  lanes = {
    'sample': jnp.arange(8), 'key': jax.random.split(jax.random.key(3), 8), 'rate': jnp.full(8, 0.1),
    'tolerance': jnp.zeros(8),
  }  # fmt: skip
  return Build(client), (variables, send(jnp.asarray(images), onehot), onehot), lanes


@pytest.fixture(scope='module')
def table(small_images):
  return make_table(*small_images)


def run(table, lanes=None, **options):
  build, shared, every = table
  layout = Layout(options.pop('group_size', 4), options.pop('devices', None), options.pop('split', 0))
  return driver.run(build, shared, every if lanes is None else lanes, layout, **{'num_steps': STEPS, **options})


@pytest.fixture(scope='module')
def reference(table):
  return run(table)


@jax.jit
def taken(lanes, index):
  return jax.tree.map(lambda x: x[index], lanes)


def choose(lanes, index):
  return taken(lanes, jnp.asarray(index))


def change(lanes, **settings):
  """Returns the lanes with some numbers changed: name={lane: value}."""
  return {**lanes, **{name: lanes[name].at[jnp.asarray([*at])].set(jnp.asarray([*at.values()]))
                      for name, at in settings.items()}}  # fmt: skip


def same(a, b):
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    np.testing.assert_array_equal(x, y)


# ---- bits


def test_it_descends(reference):
  assert (reference.objective < 0.3 * reference.objective_start).all()
  assert reference.samples.shape == (8, 1, 8, 8, 1)


@pytest.mark.parametrize('index', [[6], [5, 2, 7], [7, 6, 5, 4, 3, 2, 1, 0, 0, 1, 2], [*range(8)] * 2])
def test_a_lane_is_the_same_bits_whatever_runs_beside_it(table, reference, index):
  found = run(table, choose(table[2], index))
  same(found, jax.tree.map(lambda x: x[np.asarray(index)], reference))


@pytest.mark.slow
def test_sixty_four_lanes_in_any_order_are_the_same_bits(table, reference):
  index = np.random.default_rng(0).permutation(64) % 8
  same(run(table, choose(table[2], index)), jax.tree.map(lambda x: x[index], reference))


@pytest.mark.long
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


def test_a_checkpoint_of_another_attack_is_refused(table):
  seen = []
  run(table, chunk_steps=8, on_chunk=seen.append)
  with pytest.raises(errors.UsageError, match='a checkpoint does not fit'):
    run(table, resume=(8, jax.tree.leaves(seen[1].states)[1:]))


def test_numbers_are_traced(table):
  """Eight learning rates in one table cause no new trace."""
  run(table)
  TRACED.clear()
  found = run(table, {**table[2], 'rate': jnp.linspace(0.01, 0.2, 8, dtype=jnp.float32)})
  assert not TRACED
  assert len(set(found.objective.tolist())) == 8


@pytest.mark.long
def test_equal_builds_compile_once(table):
  build, shared, lanes = table
  run(table)
  TRACED.clear()
  again, other = dataclasses.replace(build), dataclasses.replace(build, shift=1.0)
  assert again is not build and again == build != other
  halved = jax.tree.map(lambda x: x / 2, shared)
  found = run((again, halved, lanes))
  assert not TRACED
  run((other, halved, lanes))
  assert TRACED and {trace.shift for trace in TRACED} == {1.0}
  same(found, run((other, halved, lanes)))


def test_an_evaluation_in_parts_is_the_same_bits_of_one_program():
  traced, heard = [], []

  def function(shared, lane):
    traced.append(1)
    return jnp.sin(shared * lane['x'])

  lanes = {'x': jnp.arange(51.0)}
  whole = driver.evaluate(function, jnp.float32(3), lanes, Layout(2))
  assert traced == [1]  # by one program of a given shape
  with parts.told(lambda *how: heard.append(how)):
    found = driver.evaluate(function, jnp.float32(3), lanes, Layout(2), unit='uploads')
  np.testing.assert_array_equal(found, whole)
  assert traced == [1] and heard[-1] == (51, 51, 'uploads') and 2 < len(heard) <= 20
  assert heard == sorted(heard)


def test_unhashable_functions_are_compiled_again(table):
  _, shared, lanes = table

  @dataclasses.dataclass(frozen=True)
  class Scaled:
    by: object

    def __call__(self, shared, lane):
      return self.by * lane['rate']

  for by in (1.0, 2.0):
    found = driver.evaluate(Scaled(np.float32([by])), shared, lanes, Layout(2))
    np.testing.assert_allclose(found[:, 0], 0.1 * by, rtol=1e-6)


def test_sharding_does_not_sum_gradients_over_devices(table, reference):
  """With shard_map's default checks, gradients with respect to the shared weights are summed over devices."""
  build, shared, lanes = table
  attack, key, observation = build(shared, trees.take(lanes, 3))
  _, info = jax.jit(lambda key: attack.step(attack.init(key, observation), observation))(key)
  np.testing.assert_allclose(reference.objective_start[3], info['objective'], rtol=1e-4)


@pytest.mark.slow
def test_group_sizes_agree_at_the_first_step(table, reference):
  found = run(table, group_size=2)
  np.testing.assert_allclose(found.objective_start, reference.objective_start, rtol=1e-4)


# ---- lanes that finish


def test_a_lane_that_is_not_finite_does_not_affect_others(table, reference):
  found = run(table, change(table[2], rate={2: jnp.nan}))
  others = np.asarray([0, 1, 3, 4, 5, 6, 7])
  same(jax.tree.map(lambda x: x[others], found), jax.tree.map(lambda x: x[others], reference))
  assert found.diverged_step.tolist() == [-1, -1, 0, -1, -1, -1, -1, -1]
  assert np.isnan(found.samples[2]).all() and np.isinf(found.distance[2])


def test_all_diverged_stops_early(table):
  seen = []
  found = run(table, {**table[2], 'rate': jnp.full(8, jnp.nan)}, chunk_steps=4, on_chunk=seen.append)
  assert [progress.step for progress in seen] == [0, 4] and [progress.active for progress in seen] == [8, 0]
  assert seen[-1].done and (found.diverged_step >= 0).all()


def test_uploads_that_are_not_finite_diverge(table):
  build, (variables, updates, labels), lanes = table
  broken = jax.tree.map(lambda x: x.at[2].set(jnp.nan), updates)
  found = run((build, (variables, broken, labels), choose(lanes, [2])), num_steps=8)
  assert found.diverged_step.tolist() == [0] and np.isnan(found.samples).all()


@pytest.fixture(scope='module')
def finishing(table):
  """Sixteen lanes of which ten reach 0.3 early, two diverge, and four take all steps."""
  lanes = choose(table[2], np.arange(16) % 8)
  early = [0, 1, 2, 5, 6, 7, 9, 11, 12, 14]
  return change(lanes, tolerance=dict.fromkeys(early, 0.3), rate=dict.fromkeys([3, 10], jnp.nan)), early


@pytest.fixture(scope='module')
def all_kept(table, finishing):
  """Progress and reconstructions of the same lanes, none of them removed."""
  seen = []
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(groups.Placement, 'needs_fewer_groups', lambda self, num_lanes: False)
    found = run(table, finishing[0], chunk_steps=2, on_chunk=seen.append)
  return seen, found


@pytest.mark.long
@pytest.mark.parametrize(('devices', 'lanes'), [(1, 8), (2, 16)])
def test_removing_finished_lanes_changes_no_bits(table, finishing, all_kept, devices, lanes, monkeypatch):
  moved, seen, with_lanes = [], [], groups.Placement.with_lanes
  monkeypatch.setattr(
    groups.Placement, 'with_lanes', lambda self, lanes: moved.append(len(lanes)) or with_lanes(self, lanes)
  )
  found = run(
    table, choose(finishing[0], np.arange(lanes)), chunk_steps=2, on_chunk=seen.append,
    devices=jax.local_devices()[:devices],
  )  # fmt: skip
  same(found, jax.tree.map(lambda x: x[:lanes], all_kept[1]))
  assert len(moved) == 2 and 0 < moved[0] <= lanes // 2 and moved[1] == lanes  # at the end, all are reconstructed
  early = [lane for lane in finishing[1] if lane < lanes]
  assert seen[0].active == lanes and seen[-1].active == np.isfinite(seen[-1].objective).sum() - len(early)
  for progress, other in zip(seen, all_kept[0], strict=True):
    same(progress.objective, other.objective[:lanes])
  assert (found.distance[early] <= 0.3).all()
  np.testing.assert_array_equal(seen[-1].objective[early], found.objective[early])  # the last values of removed lanes


@pytest.mark.long
@pytest.mark.parametrize('at', [4, 16])
def test_resumed_after_lanes_were_removed(table, finishing, all_kept, at):
  seen = []
  run(table, finishing[0], chunk_steps=2, on_chunk=seen.append)
  progress = seen[at // 2]
  assert progress.step == at and progress.active < 16
  after = []
  found = run(
    table, finishing[0], chunk_steps=2, on_chunk=after.append, resume=(at, jax.tree.leaves(progress.states))
  )  # fmt: skip
  same(found, all_kept[1])
  same([p.objective for p in after], [p.objective for p in seen[at // 2 + 1 :]])
  half = jax.tree.map(lambda x: x[:8], (finishing[0], progress.states, all_kept[1]))
  leaves, device = jax.tree.leaves(half[1]), jax.local_devices()[:1]
  same(run(table, half[0], chunk_steps=2, resume=(at, leaves), devices=device), half[2])


def test_all_finished_stops_early(table, reference):
  seen = []
  found = run(table, {**table[2], 'tolerance': jnp.full(8, 0.5)}, chunk_steps=2, on_chunk=seen.append)
  assert seen[-1].step < STEPS and seen[-1].done
  assert (found.distance <= 0.5).all() and (found.distance > reference.distance).all()


# ---- memory and devices


def fail(monkeypatch, when, words):
  """Makes the compiled chunk fail at the calls for which when(number of the call, group size) is true."""
  call, calls = driver._Table._call, []

  def faulty(self, function, *states, **options):
    if function is self.attack.chunk:
      calls.append(self.group_size)
      if when(len(calls), self.group_size):
        raise jax.errors.JaxRuntimeError(words)
    return call(self, function, *states, **options)

  monkeypatch.setattr(driver._Table, '_call', faulty)
  return calls


def laid(root, files):
  for name, text in files.items():
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


@pytest.mark.parametrize(
  ('most', 'pages', 'freed'), [(3, 0.0, True), (4, 0.5, False), (4, 0.51, True), (None, 0.6, False), (4, None, False)]
)
def test_programs_are_freed_before_a_process_takes_all_maps_or_memory(tmp_path, monkeypatch, most, pages, freed):
  kilobytes = 1000 * mmap.PAGESIZE // 1024
  machine = {'proc/self/maps': 'one\ntwo\n', 'proc/meminfo': f'MemTotal: {kilobytes} kB\nMemAvailable: 1 kB\n'}
  if most is not None:
    machine['proc/sys/vm/max_map_count'] = f'{most}\n'
  if pages is not None:
    machine['proc/self/statm'] = f'9 {int(1000 * pages)} 9 9 0 9 0\n'
  laid(tmp_path, machine)
  monkeypatch.setattr(memory, '_ROOT', tmp_path)
  done = []
  monkeypatch.setattr(jax, 'clear_caches', lambda: done.append('freed'))
  monkeypatch.setattr(ctypes, 'CDLL', lambda name: types.SimpleNamespace(malloc_trim=done.append))
  assert memory.release_programs() == freed and done == ['freed', 0] * freed
  monkeypatch.setattr(ctypes, 'CDLL', lambda name: types.SimpleNamespace())  # another C library
  assert memory.release_programs() == freed


EXHAUSTED = 'RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes.\nmore'


@pytest.mark.slow
def test_without_memory_the_groups_are_halved(table, monkeypatch):
  calls = fail(monkeypatch, lambda number, size: number >= 2 and size > 2, EXHAUSTED)
  seen = []
  found = run(table, chunk_steps=8, on_chunk=seen.append)
  assert calls == [4, 4, 2, 2]
  assert [progress.step for progress in seen] == [0, 8, 16, 24]
  assert [progress.group_size for progress in seen] == [4, 4, 2, 2]
  assert [progress.notice for progress in seen] == ['', '', 'out of memory, continuing with groups of 2', '']
  monkeypatch.undo()
  leaves = jax.tree.leaves(seen[1].states)
  same(found, run(table, chunk_steps=8, group_size=2, resume=(8, leaves)))


def test_without_memory_for_one_lane_the_error_says_what_to_do(table, monkeypatch):
  calls = fail(monkeypatch, lambda number, size: True, EXHAUSTED)
  saved = []
  with pytest.raises(errors.DeviceError, match=r'out of memory at step 0 of 24, .* fewer samples') as raised:
    run(table, on_failure=saved.append)
  assert calls == [4, 2, 1] and '\n' not in str(raised.value)
  assert saved[0].step == 0 and saved[0].states.count.shape == (8,)


def test_a_device_that_fails_is_reported_and_its_last_states_are_kept(table, reference, monkeypatch):
  fail(monkeypatch, lambda number, size: number == 2, 'INTERNAL: the device fell off')
  saved = []
  with pytest.raises(errors.DeviceError, match=r'failed at step 8 of 24 \(INTERNAL: the device fell off\).*again'):
    run(table, chunk_steps=8, on_failure=saved.append)
  monkeypatch.undo()
  same(run(table, resume=(saved[0].step, jax.tree.leaves(saved[0].states))), reference)


def test_a_device_whose_states_are_lost_is_reported(table, monkeypatch):
  fail(monkeypatch, lambda number, size: number == 2, 'INTERNAL: the device fell off')
  get = jax.device_get

  def lost(tree):
    if isinstance(tree, matching.MatchState):
      raise jax.errors.JaxRuntimeError('INTERNAL: gone')
    return get(tree)

  monkeypatch.setattr(jax, 'device_get', lost)
  saved = []
  with pytest.raises(errors.DeviceError, match='step 8 of 24'):
    run(table, chunk_steps=8, on_failure=saved.append)
  assert saved == []


def test_evaluation_without_memory_halves_the_groups(table, monkeypatch):
  call, sizes = groups.Placement.call, []

  def faulty(self, *arguments, **options):
    sizes.append(self.table.shape[1])
    if sizes[-1] > 2:
      raise jax.errors.JaxRuntimeError(EXHAUSTED)
    return call(self, *arguments, **options)

  monkeypatch.setattr(groups.Placement, 'call', faulty)
  found = driver.evaluate(lambda shared, lane: lane['sample'], table[1], table[2], Layout(8))
  assert found.tolist() == [*range(8)] and sizes == [8, 4, 2]


@pytest.fixture
def two_cores(monkeypatch):
  monkeypatch.setattr(ahead, 'cores', lambda: 2)


def test_cores_are_those_that_the_process_may_use(monkeypatch):
  monkeypatch.setattr(os, 'sched_getaffinity', lambda process: {0, 3, 7}, raising=False)
  assert ahead.cores() == 3
  monkeypatch.delattr(os, 'sched_getaffinity')
  monkeypatch.setattr(os, 'cpu_count', lambda: 5)
  assert ahead.cores() == 5


@pytest.mark.long
@pytest.mark.usefixtures('two_cores')
def test_what_was_compiled_ahead_is_not_traced_again_and_gives_the_same_bits(table, reference):
  build = dataclasses.replace(table[0], shift=3.0)  # one that no test has compiled
  compiler = ahead.Ahead()
  try:
    compiler.start('a', lambda: driver.lowered(build, *table[1:], Layout(4), STEPS))
    compiler.start('a', lambda: pytest.fail('started before'))
    compiler.wait('a')
    assert TRACED.count(build)
    TRACED.clear()
    same(run((build, *table[1:])), reference)
    assert not TRACED
  finally:
    compiler.close()


@pytest.mark.usefixtures('two_cores')
def test_what_cannot_be_compiled_ahead_says_so_when_it_is_called():
  def broken(shared, lane):
    raise errors.UsageError('broken')

  lanes = {'sample': jnp.arange(8)}
  compiler = ahead.Ahead()
  try:
    compiler.start('a', lambda: [driver.lowered_evaluation(broken, None, lanes, Layout(4))])
    compiler.wait('a')
    compiler.wait('never started')
  finally:
    compiler.close()
  ahead.together(lambda: [driver.lowered_evaluation(broken, None, lanes, Layout(4))])
  with pytest.raises(errors.UsageError, match='broken'):
    driver.evaluate(broken, None, lanes, Layout(4))


def test_evaluations_are_compiled_together_and_not_again(monkeypatch):
  traced = []

  def doubled(shared, lane):
    traced.append(1)
    return 2.0 * lane['x']

  def squared(shared, lane):
    traced.append(1)
    return lane['x'] ** 2

  monkeypatch.setattr(ahead, 'cores', lambda: 2)
  lanes = {'x': jnp.arange(8.0)}
  ahead.together(lambda: (driver.lowered_evaluation(one, None, lanes, Layout(4)) for one in (doubled, squared)))
  traced.clear()
  assert [driver.evaluate(one, None, lanes, Layout(4))[3] for one in (doubled, squared)] == [6.0, 9.0]
  assert not traced
  monkeypatch.setattr(ahead, 'cores', lambda: 1)
  ahead.together(lambda: pytest.fail('one core compiles one after the other'))


@pytest.mark.long
def test_the_group_size_is_fitted_to_the_memory(table, monkeypatch):
  def fitted(free):
    monkeypatch.setattr(memory, 'free', lambda device: free)
    return driver.fitting(*table, Layout(4)).group_size

  needed = {size: driver.needed(*table, Layout(size)) for size in (2, 4)}
  states = sum(x[:4].nbytes for x in jax.tree.leaves(states_of(table)))  # of one of two devices
  assert 2 * states < needed[2] < needed[4]
  assert fitted(None) == fitted(2 * needed[4]) == 4
  assert fitted(needed[4]) == 2  # a fifth is kept free
  assert fitted(needed[2]) == 1
  assert len(list(driver.lowered(*table, Layout(2), 1))) == 3
  TRACED.clear()
  run(table, group_size=2)
  assert driver.fitting(table[0], *jax.eval_shape(lambda *x: x, *table[1:]), Layout(4)).group_size == 1
  assert not TRACED  # `run` reuses what was compiled; shapes suffice


def states_of(table):
  seen = []
  run(table, num_steps=1, on_chunk=seen.append)
  return seen[0].states


def test_the_free_memory_is_known():
  assert 2**20 < memory.free(jax.local_devices()[0]) < 2**50


def grouped(folder, limit, used, names=('memory.max', 'memory.current', 'inactive_file')):
  most, current, files = names
  return {
    f'{folder}/{most}': f'{limit}\n',
    f'{folder}/{current}': f'{used}\n',
    f'{folder}/memory.stat': f'anon 5\n{files} 1000\n',
  }


V1 = 'memory.limit_in_bytes', 'memory.usage_in_bytes', 'total_inactive_file'


@pytest.mark.parametrize(
  ('path', 'groups', 'found'),
  [
    ('0::/', {}, (4096000, 2048000)),
    ('0::/', grouped('sys/fs/cgroup', 'max', 7000), (4096000, 2048000)),
    ('0::/', grouped('sys/fs/cgroup', 64000, 15000), (64000, 50000)),  # of a container
    ('0::/pod/one', grouped('sys/fs/cgroup', 64000, 64500), (64000, 500)),  # whose group is mounted as the root
    (
      '0::/job/step',
      grouped('sys/fs/cgroup/job', 32000, 3000) | grouped('sys/fs/cgroup/job/step', 64000, 1000),
      (32000, 30000),
    ),
    ('4:memory:/job\n0::/', grouped('sys/fs/cgroup/memory/job', 64000, 15000, V1), (64000, 50000)),
    ('4:memory:/', grouped('sys/fs/cgroup/memory', 2**63 - 4096, 15000, V1), (4096000, 2048000)),
    (None, grouped('sys/fs/cgroup', 64000, 15000), (4096000, 2048000)),
  ],
)
def test_the_memory_is_that_of_the_container_or_job(tmp_path, monkeypatch, path, groups, found):
  """The machine of a container has more than the container may take, which is stopped where it takes more."""
  laid(tmp_path, {'proc/meminfo': 'MemTotal:  4000 kB\nMemFree: 1 kB\nMemAvailable: 2000 kB\n', **groups})
  if path is not None:
    laid(tmp_path, {'proc/self/cgroup': f'{path}\n'})
  monkeypatch.setattr(memory, '_ROOT', tmp_path)
  assert memory.host() == found
  assert memory.free(jax.local_devices()[0]) == found[1] // jax.local_device_count()


def test_the_memory_is_unknown_elsewhere(tmp_path, monkeypatch):
  monkeypatch.setattr(memory, '_ROOT', tmp_path)
  assert memory.host() is None and memory.free(jax.local_devices()[0]) is None


@pytest.mark.long
@pytest.mark.parametrize(('platform', 'parts'), [('cpu', 4), ('gpu', 2)])
def test_states_are_held_on_the_device_and_on_its_host(table, monkeypatch, platform, parts):
  states = sum(x.nbytes for x in jax.tree.leaves(states_of(table))) // 2  # of one of two devices
  device = types.SimpleNamespace(platform=platform)
  free = math.ceil(2 * states / (2 * 0.8)) + 1
  made = driver._states(*table, Layout(1))
  monkeypatch.setattr(driver, '_states', lambda *given: made)
  monkeypatch.setattr(jax, 'local_devices', lambda: [device])
  monkeypatch.setattr(memory, 'free', lambda device: free)
  monkeypatch.setattr(memory, 'share', lambda: 2 * free)
  assert driver.pieces(*table, Layout(1)) == parts
  monkeypatch.setattr(memory, 'share', lambda: free // 2)
  assert driver.pieces(*table, Layout(1)) == 4


# ---- more devices

EIGHT = """
import sys
import jax, numpy as np
jax.config.update('jax_num_cpu_devices', 8)
jax.config.update('jax_numpy_dtype_promotion', 'strict')
from tests.engine import test_driver as t
with np.load(sys.argv[1]) as given:
  table = t.make_table(given['images'], given['labels'])
  index, tolerance, rate = given['index'], given['tolerance'], given['rate']
lanes = {**t.choose(table[2], index), 'tolerance': tolerance, 'rate': rate}
seen = []
found = t.run(table, lanes, chunk_steps=2, on_chunk=seen.append)
assert len(jax.local_devices()) == 8 and seen[-1].active < seen[0].active
np.savez(sys.argv[2], **found._asdict())
"""


@pytest.mark.slow
def test_eight_devices_give_the_bits_of_two(table, finishing, all_kept, small_images, tmp_path):
  lanes, found = finishing[0], all_kept[1]
  order = np.random.default_rng(1).permutation(np.arange(48) % 16)
  np.savez(
    tmp_path / 'given.npz', images=small_images[0], labels=small_images[1], index=order % 8,
    tolerance=np.asarray(lanes['tolerance'])[order], rate=np.asarray(lanes['rate'])[order],
  )  # fmt: skip
  environment = {**programs.environment(), 'JAX_DISABLE_MOST_OPTIMIZATIONS': '0'}
  subprocess.run(
    [sys.executable, '-c', EIGHT, tmp_path / 'given.npz', tmp_path / 'found.npz'], env=environment, cwd=programs.ROOT,
    check=True,
  )  # fmt: skip
  with np.load(tmp_path / 'found.npz') as eight:
    for name, expected in found._asdict().items():
      np.testing.assert_array_equal(eight[name], expected[order], err_msg=name)


TOGETHER = """
import sys
import jax, numpy as np
address, processes, rank = sys.argv[1], 2, int(sys.argv[2])
jax.config.update('jax_num_cpu_devices', 1)
jax.config.update('jax_cpu_collectives_implementation', 'gloo')
jax.config.update('jax_numpy_dtype_promotion', 'strict')
jax.distributed.initialize(address, processes, rank)
from tests.engine import test_driver as t
with np.load(sys.argv[3]) as given:
  batch = t.make_batch(given['images'], given['labels'])
seen = []
found = t.run(batch, num_steps=6, chunk_steps=3, group_size=1, split=8, devices=jax.devices(), on_chunk=seen.append)
again = t.run(
  batch, num_steps=6, chunk_steps=3, group_size=1, split=8, devices=jax.devices(),
  resume=(3, jax.tree.leaves(seen[1].states)),
)
t.same(found, again)
np.savez(sys.argv[4], **found._asdict(), flops=t.flops(batch, jax.devices(), 8))
"""


@dataclasses.dataclass(frozen=True)
class Batch(Build):
  """The same on one update of eight digits."""

  def __call__(self, shared, lane):
    variables, update, labels = shared
    observation = Observation(variables, update, labels, Knowledge(), (8, 8, 8, 1), 10)
    optimizer = first_order('adam', lane['rate'], STEPS)
    return matching.gradient_matching(self.client, optimizer, STEPS, distance='cosine'), lane['key'], observation


def make_batch(images, labels):
  (build, (variables, _, onehot), lanes) = make_table(images, labels)
  update = jax.jit(build.client.local_update)(None, variables, jnp.asarray(images[:8]), onehot[:8]).update
  return Batch(build.client), (variables, update, onehot[:8]), choose(lanes, [0, 1, 2])


def flops(batch, devices, split):
  """Returns the arithmetic operations of one device in one evaluation."""
  table = driver._Table(*batch, Layout(1, devices, split))
  table.states = table._call(table.attack.init)
  finish, arguments = table.placement.bind(table.attack.finish, table.shared, table.padded, table.states)
  return finish.lower(*arguments).compile().cost_analysis()['flops']


@pytest.mark.slow
def test_two_processes_share_the_images_of_a_batch(small_images, tmp_path):
  np.savez(tmp_path / 'given.npz', images=small_images[0], labels=small_images[1])
  with socket.socket() as free:
    free.bind(('localhost', 0))
    address = f'localhost:{free.getsockname()[1]}'
  command = [sys.executable, '-c', TOGETHER, address]
  started = [
    subprocess.Popen(
      [*command, str(rank), tmp_path / 'given.npz', tmp_path / f'{rank}.npz'],
      env=programs.environment(), cwd=programs.ROOT,
    )
    for rank in range(2)
  ]  # fmt: skip
  try:
    assert [process.wait(300) for process in started] == [0, 0]
  finally:
    for process in started:
      process.kill()
  batch = make_batch(*small_images)
  alone = run(batch, num_steps=6, group_size=1)._asdict()
  with np.load(tmp_path / '0.npz') as first, np.load(tmp_path / '1.npz') as second:
    assert 0.4 < first['flops'] / flops(batch, jax.local_devices()[:1], 0) < 0.7
    for name, expected in alone.items():
      np.testing.assert_array_equal(first[name], second[name])
      np.testing.assert_allclose(first[name], expected, rtol=1e-3, atol=1e-3, err_msg=name)


def test_images_that_cannot_be_shared_evenly(table):
  with pytest.raises(errors.UsageError, match='3 samples cannot be shared evenly by 2 devices'):
    run(table, split=3)
