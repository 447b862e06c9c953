"""Starts programs in this process (fast) or in one of their own (as a user does)."""

import contextlib
import csv
import functools
import importlib.util
import io
import os
import pathlib
import subprocess
import sys
import time
from typing import NamedTuple
from unittest import mock

import jax
from absl import flags

import launch
from gradleak.engine import ahead
from launch import _program

ROOT = pathlib.Path(launch.__file__).parent.parent
DEFINITIONS = ('DEFINE_string', 'DEFINE_integer', 'DEFINE_float', 'DEFINE_boolean')


class Done(NamedTuple):
  """How a program ended, and what it printed."""

  status: int
  out: str
  err: str


def ends(pid, seconds=20):
  """Returns whether a process that reads the end of its input ends within some seconds; a zombie has ended."""
  until, status = time.monotonic() + seconds, pathlib.Path(f'/proc/{pid}/status')
  while time.monotonic() < until:
    try:
      if 'State:\tZ' in status.read_text():
        return True
    except OSError:
      return True
    time.sleep(0.05)
  return False


def start(name, *arguments):
  """Runs a program in this process."""
  module, own = _load(name)
  out, err, status = io.StringIO(), io.StringIO(), 0
  with (
    mock.patch.object(flags, 'FLAGS', own),
    mock.patch.object(ahead, 'cores', jax.device_count),  # XLA's devices cannot be changed any more
    contextlib.redirect_stdout(out),
    contextlib.redirect_stderr(err),
  ):
    try:
      status = _program._guarded(module.main, _program._parse([name, *arguments], module.main)) or 0
    except SystemExit as end:
      status = end.code
  return Done(status, out.getvalue(), err.getvalue())


def reproduce(experiment, workdir, progress='none'):
  """Returns how a run of an experiment at scale smoke ended, which went well, and the lines of its table.csv."""
  flags = '--scale=smoke', '--compilation_cache=', f'--progress={progress}', f'--experiment={experiment.name}'
  flags = *flags, f'--results={workdir.parent}/stored'
  done = start('reproduce', *flags, f'--workdir={workdir}')
  assert done.status == 0, done.err
  names = {path.name for path in workdir.iterdir() if not path.name.startswith('trained-')}  # networks that runs share
  assert names == {'table.md', 'table.csv', 'seconds.json', *experiment.runs}
  return done, list(csv.DictReader((workdir / 'table.csv').read_text('utf-8').splitlines()))


def _load(name):
  """Returns a program's module, imported afresh, and its flags: in one process, all programs' flags would clash."""
  own = flags.FlagValues()
  definitions = {define: functools.partial(getattr(flags, define), flag_values=own) for define in DEFINITIONS}
  specification = importlib.util.spec_from_file_location(f'{name}_program', ROOT / 'launch' / f'{name}.py')
  module = importlib.util.module_from_spec(specification)
  with mock.patch.multiple(flags, FLAGS=own, **definitions):
    specification.loader.exec_module(module)
  own['verbosity'] = flags.FLAGS['verbosity']
  own.register_flag_by_module('absl.logging', own['verbosity'])
  if 'compilation_cache' in own:
    own.set_default('compilation_cache', '')  # that of all tests, in place of the user's own
  return module, own


def spawn(name, *arguments):
  """Runs a program in a process of its own."""
  command = [sys.executable, str(ROOT / 'launch' / f'{name}.py'), *arguments]
  done = subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True, check=False)
  return Done(done.returncode, done.stdout, done.stderr)


def environment():
  """Returns the environment of a process that compiles as `fast_compilation` does, with the tests' cache."""
  fast = {
    'JAX_DISABLE_MOST_OPTIMIZATIONS': '1',
    'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
    'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': '-1',
    'JAX_COMPILATION_CACHE_DIR': os.environ['GRADLEAK_TEST_CACHE'],
  }
  return {**os.environ, **fast, 'PYTHONPATH': str(ROOT)}
