"""A run that was stopped, at whatever moment, ends with the same bits as one that was not."""

import json
import os
import signal
import subprocess
import sys
import time
import types

import jax
import numpy as np
import pytest

import gradleak as gl
from gradleak.audit import lanes, run
from gradleak.core import storage
from gradleak.engine import driver, memory
from tests import programs
from tests.objects import objects

pytestmark = pytest.mark.usefixtures('fast_compilation')

STEPS = 6  # in as many chunks
ATTACK = f'csdlg(tv=0,steps={STEPS})'
FILES = ('rows.jsonl', 'controls.jsonl')


class Stop(BaseException):
  """What stops a run from outside, as KeyboardInterrupt or a kill."""


def audit(linear, workdir, **settings):
  settings = {'attacks': [ATTACK], 'group_size': 3, 'progress': 'none', **settings}
  attacks = objects(settings.pop('attacks'))
  return gl.audit(
    jax.random.key(7), linear, objects(['none', 'prune(rate=0.5)']), attacks, 2, controls=3, knowledge='non-adaptive',
    workdir=workdir, **settings,
  )  # fmt: skip


@pytest.fixture(autouse=True)
def save_each_chunk(monkeypatch):
  """Makes every checkpoint due, however long it takes."""
  save = storage.Workdir.save_checkpoint

  def due(self, *arguments):
    save(self, *arguments, due=True)

  monkeypatch.setattr(storage.Workdir, 'save_checkpoint', due)


@pytest.fixture(scope='module')
def uninterrupted(linear, fast_compilation, tmp_path_factory):
  workdir = tmp_path_factory.mktemp('uninterrupted') / 'new'
  return workdir, audit(linear, workdir)


def same(workdir, result, uninterrupted):
  expected_workdir, expected = uninterrupted
  assert result.rows == expected.rows and result.controls == expected.controls
  for name in FILES:
    assert (workdir / name).read_bytes() == (expected_workdir / name).read_bytes()
  for pair, (steps, objective) in expected.curves.items():
    np.testing.assert_array_equal(result.curves[pair][0], steps)
    np.testing.assert_array_equal(result.curves[pair][1], objective)
  same_arrays(workdir, expected_workdir)
  assert not (workdir / 'checkpoints').exists()
  assert not list(workdir.rglob('*.tmp'))


def same_arrays(workdir, expected_workdir):
  with (
    np.load(workdir / 'reconstructions.npz') as found,
    np.load(expected_workdir / 'reconstructions.npz') as expected,
  ):
    assert set(found) == set(expected)
    for key in expected:
      np.testing.assert_array_equal(found[key], expected[key])


class Watch:
  """A progress callback that notes the steps, and stops the run at one of them."""

  def __init__(self, stop=None):
    self.stop, self.seen = stop, []

  def __call__(self, attack, progress, objective):
    if progress.step == self.stop:
      raise Stop
    self.seen.append(progress.step)


def interrupt(linear, workdir, step):
  with pytest.raises(Stop):
    audit(linear, workdir, progress=Watch(step))
  assert not (workdir / 'rows.jsonl').exists()


@pytest.mark.long
@pytest.mark.parametrize('step', [0, 3, pytest.param(STEPS, marks=pytest.mark.slow)])
def test_stopped_at_a_chunk(linear, uninterrupted, tmp_path, step):
  interrupt(linear, tmp_path / 'new', step)
  watch = Watch()
  result = audit(linear, tmp_path / 'new', progress=watch)
  assert watch.seen == list(range(step, STEPS + 1))  # the chunk that was lost, and what was left
  same(tmp_path / 'new', result, uninterrupted)


@pytest.mark.long
def test_stopped_twice(linear, uninterrupted, tmp_path):
  for step in (2, 4):
    interrupt(linear, tmp_path / 'new', step)
  same(tmp_path / 'new', audit(linear, tmp_path / 'new'), uninterrupted)


@pytest.mark.slow
def test_resumed_on_fewer_devices(linear, uninterrupted, tmp_path, monkeypatch):
  """Fewer devices pad the lanes otherwise."""
  interrupt(linear, tmp_path / 'new', 3)
  monkeypatch.setattr(jax, 'local_devices', lambda: jax.devices()[:1])
  watch = Watch()
  same(tmp_path / 'new', audit(linear, tmp_path / 'new', progress=watch), uninterrupted)
  assert watch.seen[0] == 3


@pytest.mark.long
def test_resumed_with_another_group_size_keeps_the_first(linear, uninterrupted, tmp_path):
  interrupt(linear, tmp_path / 'new', 3)
  store = json.loads((tmp_path / 'new' / 'speed.json').read_text())
  assert store == {'group_size': 3, 'shards': 1}
  same(tmp_path / 'new', audit(linear, tmp_path / 'new', group_size=2), uninterrupted)


@pytest.mark.slow
def test_an_attack_that_is_complete_is_not_run_again(linear, uninterrupted, tmp_path):
  attacks = [ATTACK, f'csdlg(tv=0,steps={STEPS},gradient=plain)']
  seen = []

  def watch(attack, progress, objective):
    seen.append((attack, progress.step))
    if len(seen) == STEPS + 4:
      raise Stop

  with pytest.raises(Stop):
    audit(linear, tmp_path / 'new', attacks=attacks, progress=watch)
  assert len(list((tmp_path / 'new' / 'parts').glob('csdlg-*.npz'))) == 1
  stopped_at = seen[-1]
  assert stopped_at[0] == attacks[1]
  result = audit(linear, tmp_path / 'new', attacks=attacks, progress=watch)
  assert seen[STEPS + 4] == stopped_at
  assert not result.resumed
  assert [row for row in result.rows if row['attack'] == attacks[0]] == uninterrupted[1].rows


@pytest.mark.slow
def test_processes_share_the_work(linear, uninterrupted, tmp_path):
  """The second one dies on its way and is started again alone; the first has left long before."""
  workdir = tmp_path / 'new'
  assert audit(linear, workdir, process=(0, 2)) is None
  assert not (workdir / 'rows.jsonl').exists()
  with pytest.raises(Stop):
    audit(linear, workdir, process=(1, 2), progress=Watch(3))
  watch = Watch()
  result = audit(linear, workdir, process=(1, 2), progress=watch)
  assert watch.seen[0] == 3
  same(workdir, result, uninterrupted)
  again = audit(linear, workdir)  # cut into two, whoever runs it
  assert again.resumed and again.rows == result.rows


@pytest.mark.slow
def test_one_process_may_do_the_shares_of_several(linear, uninterrupted, tmp_path):
  same(tmp_path / 'new', audit(linear, tmp_path / 'new', shards=2), uninterrupted)


@pytest.mark.long
def test_what_does_not_fit_the_memory_runs_in_parts_that_are_stored(linear, uninterrupted, tmp_path, monkeypatch):
  monkeypatch.setattr(run, 'pieces', lambda table, group_size: 3)
  seen, steps = [], [*range(STEPS + 1)]

  def watch(attack, progress, objective):
    seen.append(progress.step)
    if len(seen) == STEPS + 4:
      raise Stop

  with pytest.raises(Stop):
    audit(linear, tmp_path / 'new', progress=watch)
  assert seen == [*steps, 0, 1, 2]  # of the first of three parts, and of the second
  assert len(list((tmp_path / 'new' / 'parts').glob('csdlg-*.npz'))) == 1
  same(tmp_path / 'new', audit(linear, tmp_path / 'new', progress=watch), uninterrupted)
  assert seen[STEPS + 4 :] == [*steps[2:], *steps]
  assert audit(linear, tmp_path / 'new').resumed


@pytest.mark.long
def test_parts_follow_from_the_states_that_fit_the_memory(linear, monkeypatch):
  """All lanes hold theirs at once, in groups of whatever size: 2,176 searches by L-BFGS took 21 GB."""
  found = []

  def pieces(build, shared, arrays, layout):
    def state(lane):
      attack, key, observation = build(shared, lane)
      return attack.init(key, observation)

    one = jax.tree.leaves(jax.eval_shape(state, jax.tree.map(lambda x: x[0], arrays)))
    size, count = sum(leaf.size * leaf.dtype.itemsize for leaf in one), len(arrays['view'])
    each = -(-count // min(count, jax.local_device_count()))  # lanes of a device
    for free, parts in [(None, 1), (6 * each * size, 1), (5.01 * size, each), (2.51 * size, 2 * each)]:
      monkeypatch.setattr(memory, 'free', lambda device, free=free: free)
      found.append(driver.pieces(build, shared, arrays, layout) == parts)
    return 1

  monkeypatch.setattr(lanes, 'driver', types.SimpleNamespace(**{**vars(driver), 'pieces': pieces}))
  audit(linear, None, group_size=1)
  assert found == 4 * [True]


@pytest.mark.parametrize(
  ('settings', 'message'),
  [
    ({'process': (2, 2)}, r'rank of the process is 2, expected an integer in \[0, 1\]'),
    ({'process': (0, 2), 'shards': 1}, r'shards is 1, expected an integer in \[2, '),
    ({'process': (0, 3)}, r'number of processes is 3, expected an integer in \[1, 2\]'),
    ({'process': (0, 2), 'workdir': None}, '2 processes need a work directory'),
  ],
)
def test_shares_that_cannot_be(linear, tmp_path, settings, message):
  with pytest.raises(gl.UsageError, match=message):
    audit(linear, **{'workdir': tmp_path / 'new', **settings})


# What the program is, but that every checkpoint is due.
PROGRAM = """
import runpy, sys
from gradleak.core import storage
save = storage.Workdir.save_checkpoint
def due(self, *arguments):
  save(self, *arguments, due=True)
storage.Workdir.save_checkpoint = due
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name='__main__')
"""


@pytest.mark.slow
def test_kill_9(tmp_path):
  flags = [
    '--dataset=digits', '--model=mlp', '--trials=2', '--steps=500', '--controls=2', '--defenses=none;prune(rate=0.9)',
    '--progress=lines', '--compilation_cache=',
  ]  # fmt: skip
  killed, whole = tmp_path / 'killed', tmp_path / 'whole'
  assert programs.start('audit', *flags, f'--workdir={whole}').status == 0

  process = subprocess.Popen(
    [sys.executable, '-c', PROGRAM, 'launch/audit.py', *flags, f'--workdir={killed}'],
    cwd=programs.ROOT, env=programs.environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
  )  # fmt: skip
  finished = f'checkpoints/csdlg-*-00000???/{storage.CHECKPOINT_SEAL}'
  while not any(int(path.parent.name[-8:]) >= 100 for path in killed.glob(finished)):
    assert process.poll() is None, process.stderr.read()
    time.sleep(0.01)
  os.kill(process.pid, signal.SIGKILL)
  process.communicate()
  assert process.returncode == -signal.SIGKILL
  assert not (killed / 'rows.jsonl').exists()

  done = programs.spawn('audit', *flags, f'--workdir={killed}')
  assert done.status == 0, done.err
  lines = done.err.splitlines()
  (resumed,) = (line for line in lines if 'from step ' in line)
  assert int(resumed.rpartition('from step ')[2]) > 100
  lines = [line for line in lines if '%' in line]
  assert len(lines) > 1 and all(int(line.split(':')[1].split('%')[0]) > 20 for line in lines)
  assert 'report: ' in done.out and (killed / 'report.html').exists()
  for name in FILES:
    assert (killed / name).read_bytes() == (whole / name).read_bytes()
  same_arrays(killed, whole)
  assert not (killed / 'checkpoints').exists() and not list(killed.rglob('*tmp*'))
