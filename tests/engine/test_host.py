"""Attacks that run on the host: lane by lane between compiled programs, and a watch for runs that stand still."""

import io
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradleak as gl
from gradleak import Knowledge, Observation
from gradleak.attacks.base import host_form
from gradleak.core import storage
from gradleak.engine import driver, progress

pytestmark = pytest.mark.usefixtures('fast_compilation')

LANES = {'index': jnp.arange(4), 'key': jax.random.split(jax.random.key(0), 4)}


def build(calls):
  """Returns (shared, lane) -> an attack that finds an image of its lane's number and of its key."""

  def made(shared, lane):
    def read(observation, key):
      calls.append(int(observation.update))
      assert type(observation.update) is np.ndarray and key.dtype == np.uint32
      return np.stack([np.full(4, observation.update), key[-1] % np.uint32(97) * np.ones(4)]), np.array([1, 2])

    update = shared['scale'] * lane['index'].astype(jnp.float32)
    return (
      host_form(lambda _: None, read),
      lane['key'],
      Observation({}, update, jnp.zeros((3, 2)), Knowledge(), (3, 2, 2, 1), 2),
    )

  return made


def run(calls, **options):
  return driver.run_on_host(build(calls), {'scale': jnp.float32(2)}, LANES, group_size=3, **options)


def test_lanes_run_one_after_another_and_missing_images_are_black():
  calls, seen = [], []
  found = run(calls, on_chunk=seen.append)
  assert calls == [0, 2, 4, 6] and found.samples.shape == (4, 3, 2, 2, 1) and found.labels.tolist() == [[1, 2, -1]] * 4
  np.testing.assert_array_equal(found.samples[:, 0, 0, 0, 0], [0, 2, 4, 6])
  assert len(set(found.samples[:, 1, 0, 0, 0].tolist())) > 1 and not found.samples[:, 2].any()
  assert found.samples.dtype == np.float32 and found.diverged_step.tolist() == [-1] * 4
  assert [(p.step, p.active, p.done, p.unit, p.group_size) for p in seen] == [
    (i, 4 - i, i == 4, 'run', 3) for i in range(5)
  ]


def test_it_goes_on_where_it_was_interrupted():
  seen = []
  whole = run([], on_chunk=seen.append)
  for at in range(5):
    calls = []
    leaves = jax.tree.leaves(seen[at].states)
    again = run(calls, resume=(at, leaves))
    assert calls == [0, 2, 4, 6][min(at, 3) :] and type(again) is type(whole)
    assert all(map(np.array_equal, jax.tree.leaves(again), jax.tree.leaves(whole)))


@pytest.mark.parametrize('labelled', [True, False])
@pytest.mark.parametrize('value', [np.nan, np.inf])
def test_an_update_that_is_not_finite_is_not_read(value, labelled):
  def attacked(update):
    made = host_form(
      lambda _: None, lambda seen, key: (np.ones((1, 4)), np.ones(1) if labelled else None), labelled=labelled
    )
    return made.reconstruct(
      np.zeros(2, np.uint32), Observation({}, update, jnp.zeros((3, 2)), Knowledge(), (3, 2, 2, 1), 2)
    )

  whole, spoilt = attacked({'a': np.ones(3)}), attacked({'a': np.float32([1, value, 1]), 'b': np.ones(2)})
  assert int(whole.diverged_step) == -1 and int(spoilt.diverged_step) == 0 and not spoilt.samples.any()
  assert spoilt.labels.tolist() == [-1] * 3 * labelled
  assert [x.shape for x in whole] == [x.shape for x in spoilt]


@pytest.mark.long
def test_an_audit_stores_what_the_host_has_found(tmp_path, monkeypatch):
  """Killed after its second run, it starts with the third."""
  save = storage.Workdir.save_checkpoint
  monkeypatch.setattr(storage.Workdir, 'save_checkpoint', lambda *args, due=False: save(*args, due=args[2] == 2))
  calls = []

  def attack(client):
    del client
    return host_form(lambda _: None, lambda seen, key: (calls.append(1), (np.zeros((1, 64)), None))[1])

  data = gl.data.load('digits', 'test', limit=4)
  scenario = gl.scenario(gl.models.create('mlp(widths=8)', 10), data.samples, data.targets, key=jax.random.key(0))
  named = {'host': gl.attacks.wrap(attack, 'host', reads=())}

  def audit(progress):
    return gl.audit(
      jax.random.key(1), scenario, [None], named, 4, controls=2, workdir=tmp_path / 'w', progress=progress
    )

  def killed(attack, state, objective):
    del attack, objective
    if state.step == 3:  # what was reported before is stored
      raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    audit(killed)
  assert len(calls) == 3
  assert len(audit('none').rows) == 4 and len(calls) == 3 + 4  # of six, two are not run again


@pytest.fixture(scope='module')
def photographs():
  rng = np.random.default_rng(0)
  rough = rng.random((8, 4, 4, 3))
  return np.repeat(np.repeat(rough, 8, axis=1), 8, axis=2).astype(np.float32), np.arange(8, dtype=np.int32)


CLOSED = [gl.attacks.fidel(), gl.servers.imprint(bins=16), gl.servers.trap()]
HOST = [gl.attacks.peeling(), gl.attacks.spear(submatrices=10_000, programs=25)]


@pytest.mark.slow
@pytest.mark.parametrize('attack', [*HOST, *CLOSED], ids=str)
def test_every_closed_form_comes_to_an_end_at_the_size_of_cifar(photographs, attack):
  """On two devices, eight images behind an upload; a callback of a compiled program once waited for its own device."""
  assert jax.device_count() == 2
  scenario = gl.scenario(gl.models.create('mlp(widths=64)', 10), *photographs, key=jax.random.key(0))
  result = []
  settings = {'batch_size': 4, 'controls': 2, 'knowledge': 'non-adaptive', 'progress': 'none'}
  worker = threading.Thread(
    target=lambda: result.append(gl.audit(jax.random.key(1), scenario, [None], [attack], 2, **settings)), daemon=True
  )
  worker.start()
  worker.join(120)
  assert not worker.is_alive() and len(result[0].rows) == 2


def test_a_run_that_stands_still_says_where(monkeypatch):
  monkeypatch.setattr(progress, 'SILENT', 0.05 / 60)
  stream = io.StringIO()
  lines = progress.reporter('lines', stream)
  lines.note('compiling …')
  for _ in range(200):
    time.sleep(0.01)
    if stream.getvalue().count('no progress') >= 2:
      break
  lines('spear', driver.Progress(1, 4, np.zeros(4), 3, 1, '', list, 'run'), np.zeros(4))
  for _ in range(200):
    time.sleep(0.01)
    if 'spear, run 1 of 4' in stream.getvalue():
      break
  lines.end()
  said = stream.getvalue()
  assert said.count('minutes; the last was: compiling …') >= 2 and 'the last was: spear, run 1 of 4' in said
  time.sleep(0.15)
  assert stream.getvalue() == said


@pytest.mark.parametrize('runs, said', [(1, 'dlg: 1 run of 4 steps'), (2, 'dlg: 2 runs of 4 steps')])
def test_one_run_is_no_runs(runs, said):
  stream = io.StringIO()
  lines = progress.reporter('lines', stream)
  lines('dlg', driver.Progress(0, 4, np.zeros(runs), 0, 1, '', list, 'step'), np.zeros(runs))
  lines.end()
  assert stream.getvalue().splitlines()[0] == said


def test_what_is_computed_in_parts_says_how_far_it_is(monkeypatch):
  seconds, stream = iter([0, 0, 4, 8, 14, 20, 26, 37]), io.StringIO()
  monkeypatch.setattr(progress.time, 'monotonic', lambda: next(seconds))
  said = progress.computing(progress.reporter('lines', stream), 'lti')
  for done in range(1, 6):
    said(20 * done, 100, 'steps')
  assert stream.getvalue() == 'lti: 80 of 100 steps, 5 s left\n'
  said(1, 2, 'draws')  # timed on its own
  assert stream.getvalue().count('\n') == 1
  said(32, 32, 'measured uploads')  # a first part that took long
  assert stream.getvalue().endswith('lti: 32 of 32 measured uploads\n')


def test_what_starts_again_in_smaller_parts_is_timed_anew(monkeypatch):
  seconds, stream = iter([0, 0, 20, 50, 70]), io.StringIO()
  monkeypatch.setattr(progress.time, 'monotonic', lambda: next(seconds))
  said = progress.computing(progress.reporter('lines', stream), 'x')
  for done in (16, 16, 8, 24):  # twice out of memory
    said(done, 40, 'runs')
  lines = ['x: 16 of 40 runs', 'x: 8 of 40 runs', 'x: 24 of 40 runs, 20 s left']
  assert stream.getvalue().splitlines() == lines
