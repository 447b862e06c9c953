"""What a machine can do to a run: one line, status 1, nothing lost but the current chunk."""

import errno
import os
import random
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from gradleak.core import storage
from gradleak.engine import groups
from tests import programs
from tests.test_resume import PROGRAM

pytestmark = pytest.mark.usefixtures('fast_compilation')

SMOKE = (
  '--dataset=digits', '--model=mlp', '--trials=2', '--steps=10', '--controls=2', '--knowledge=non-adaptive',
  '--compilation_cache=', '--defenses=none', '--progress=lines',
)  # fmt: skip


@pytest.fixture(scope='module')
def whole(fast_compilation, tmp_path_factory):
  workdir = tmp_path_factory.mktemp('whole') / 'new'
  done = programs.start('audit', *SMOKE, f'--workdir={workdir}')
  assert done.status == 0, done.err
  return workdir


def fails(workdir, *words):
  """Runs the program, which ends on one line of these words; returns the lines of progress before it."""
  done = programs.start('audit', *SMOKE, f'--workdir={workdir}')
  *progress, last = done.err.splitlines()
  assert done.status == 1 and last.startswith('error: '), done.err
  for word in words:
    assert word in last
  assert not (workdir / 'rows.jsonl').exists() and not list(workdir.rglob('*.tmp'))
  return progress


def goes_on(workdir, whole):
  """Runs the same command again and returns the lines of progress; the rows are those of an uninterrupted run."""
  done = programs.start('audit', *SMOKE, f'--workdir={workdir}')
  assert done.status == 0, done.err
  assert (workdir / 'rows.jsonl').read_bytes() == (whole / 'rows.jsonl').read_bytes()
  return done.err.splitlines()


@pytest.mark.slow
def test_a_full_disk(whole, tmp_path, monkeypatch):
  def full(descriptor):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  with monkeypatch.context() as patch:
    save = storage.Workdir.save_part

    def save_on_a_full_disk(self, *arguments):
      patch.setattr(storage.os, 'fsync', full)
      save(self, *arguments)

    patch.setattr(storage.Workdir, 'save_part', save_on_a_full_disk)
    fails(tmp_path / 'new', 'no space left', str(tmp_path / 'new'), 'same command again')
  assert not list((tmp_path / 'new' / 'parts').iterdir())
  goes_on(tmp_path / 'new', whole)


@pytest.mark.slow
def test_a_device_that_fails(whole, tmp_path, monkeypatch):
  """Its last good states are saved at once, whenever the last checkpoint was."""
  with monkeypatch.context() as patch:
    call, calls = groups.Placement.call, []

    def lost(self, function, *arguments, extra=()):
      if extra:  # a chunk
        calls.append(None)
        if len(calls) == 4:
          raise jax.errors.JaxRuntimeError('INTERNAL: the device is gone')
      return call(self, function, *arguments, extra=extra)

    patch.setattr(groups.Placement, 'call', lost)
    fails(tmp_path / 'new', 'the device failed at step 3 of 10', 'the device is gone', 'same command again')
  said = goes_on(tmp_path / 'new', whole)
  assert any(line.endswith('from step 4') for line in said)  # as of the chunk after the third step


@pytest.mark.slow
@pytest.mark.parametrize('seed', range(3))
def test_killed_at_random_moments(tmp_path, compilation_cache, seed):
  """Five kills, wherever they come: before the first checkpoint, while one is written, between parts and tables."""
  flags = (*SMOKE[:3], '--steps=400', *SMOKE[4:6], *SMOKE[7:], '--attacks=csdlg(tv=1e-6);gs')
  flags += (f'--compilation_cache={compilation_cache}',)
  assert programs.spawn('audit', *flags, f'--workdir={tmp_path}/whole').status == 0
  draw, killed = random.Random(seed), tmp_path / 'killed'
  for _ in range(5):
    process = subprocess.Popen(
      [sys.executable, '-c', PROGRAM, 'launch/audit.py', *flags, f'--workdir={killed}'],
      cwd=programs.ROOT, env=programs.environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    while not killed.exists() and process.poll() is None:
      time.sleep(0.01)
    time.sleep(draw.uniform(0.0, 8.0))
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
  done = programs.spawn('audit', *flags, f'--workdir={killed}')
  assert done.status == 0, done.err
  for name in ('rows.jsonl', 'controls.jsonl'):
    assert (killed / name).read_bytes() == (tmp_path / 'whole' / name).read_bytes()
  with (
    np.load(killed / 'reconstructions.npz') as found,
    np.load(tmp_path / 'whole' / 'reconstructions.npz') as expected,
  ):
    for key in expected:
      np.testing.assert_array_equal(found[key], expected[key])
  assert not list(killed.rglob('*tmp*'))
