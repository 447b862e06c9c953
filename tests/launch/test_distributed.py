"""Two processes share the images of each upload, by `jax.distributed`."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from tests import programs

PROGRAM = """
import sys
from gradleak.engine import ahead
from launch import audit
ahead.cores = lambda: 1
audit._program.run(audit.main)
"""
FLAGS = (
  '--dataset=digits', '--model=lenet', '--trials=2', '--batch_size=4', '--controls=3', '--group_size=2',
  '--attacks=csdlg(gradient=plain)', '--defenses=none;prune(rate=0.5)', '--knowledge=non-adaptive', '--progress=lines',
)  # fmt: skip


def start(workdir, cache, *flags):
  return subprocess.Popen(
    [sys.executable, '-c', PROGRAM, *FLAGS, f'--workdir={workdir}', f'--compilation_cache={cache}', *flags],
    cwd=programs.ROOT, env=programs.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
  )  # fmt: skip


def start_two(workdir, cache, *flags):
  with socket.socket() as free:
    free.bind(('localhost', 0))
    address = f'localhost:{free.getsockname()[1]}'
  return [
    start(workdir, cache, f'--distributed={address}', f'--process={i}', '--processes=2', *flags) for i in range(2)
  ]


def finish(processes):
  ended = [process.communicate(timeout=300) for process in processes]
  assert [process.returncode for process in processes] == [0] * len(processes), ended
  return [out for out, _ in ended]


def rows(workdir):
  return [json.loads(line) for line in (workdir / 'rows.jsonl').read_text().splitlines()]


@pytest.mark.slow
def test_two_processes_attack_what_one_attacks_and_go_on_after_a_kill(tmp_path, compilation_cache):
  finish([start(tmp_path / 'one', compilation_cache, '--steps=3')])
  first, second = finish(start_two(tmp_path / 'two', compilation_cache, '--steps=3'))
  assert 'report: ' in first and 'report: ' not in second
  alone, together = rows(tmp_path / 'one'), rows(tmp_path / 'two')
  assert len(alone) == len(together) == 4
  for a, b in zip(alone, together, strict=True):
    assert a['defense'] == b['defense'] and a['trial'] == b['trial']
    np.testing.assert_allclose(b['psnr'], a['psnr'], atol=0.05)  # sums are taken in another order
    np.testing.assert_allclose(b['objective'], a['objective'], rtol=1e-3)

  # When one dies, both end; both are started again, and find what the first had written.
  pair = start_two(tmp_path / 'killed', compilation_cache, '--steps=200')
  while not any(int(path.name[-8:]) for path in (tmp_path / 'killed').glob('checkpoints/csdlg-*-00000???')):
    assert pair[0].poll() is None, pair[0].stderr.read()
    time.sleep(0.05)
  for process in pair:
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
  finish(start_two(tmp_path / 'killed', compilation_cache, '--steps=200'))
  assert len(rows(tmp_path / 'killed')) == 4
  timing = (tmp_path / 'killed' / 'timing.jsonl').read_text().splitlines()
  assert len(timing) == 1
