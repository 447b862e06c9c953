"""A real Ray of two workers on this machine: the rows of one process, also where a worker is killed."""

import os
import pathlib
import random
import re
import signal
import subprocess
import sys

import pytest

from tests import programs

ray = pytest.importorskip('ray', reason="needs Ray: pip install -e '.[cluster]'")
pytestmark = pytest.mark.slow
FLAGS = (
  '--dataset=digits', '--model=mlp', '--trials=4', '--steps=2000', '--controls=8', '--group_size=4',
  '--rounds_before=0', '--attacks=csdlg(tv=1e-6)', '--defenses=none;prune(rate=0.5|0.9)', '--knowledge=non-adaptive',
)  # fmt: skip
FILES = ('rows.jsonl', 'controls.jsonl')


def start(workdir, cache, *flags):
  """Starts an audit as a user does; XLA optimises, for that is where bits differ."""
  command = [sys.executable, '-m', 'gradleak.cli', 'audit', *FLAGS, f'--workdir={workdir}', *flags]
  environment = {name: value for name, value in os.environ.items() if name != 'XLA_FLAGS'}
  environment['PYTHONPATH'] = str(programs.ROOT)
  return subprocess.Popen(
    [*command, f'--compilation_cache={cache}'], cwd=programs.ROOT, env=environment,
    stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
  )  # fmt: skip


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
  """The folder of an audit in one process, and that of its cache."""
  folder = tmp_path_factory.mktemp('whole')
  process = start(folder / 'new', folder / 'cache', '--progress=none')
  _, err = process.communicate(timeout=900)
  assert process.returncode == 0, err
  return folder / 'new', folder / 'cache'


def same(workdir, whole):
  for name in FILES:
    assert (workdir / name).read_bytes() == (whole / name).read_bytes(), name


def children(pid):
  """Returns the processes that a process has started and that have not ended."""
  try:
    return [int(child) for child in pathlib.Path(f'/proc/{pid}/task/{pid}/children').read_text().split()]
  except OSError:
    return []


@pytest.mark.parametrize('what', ['worker', 'process'])
def test_what_is_killed_at_random_changes_no_bit(what, whole, tmp_path):
  """Ray replaces its worker, and the worker the process of a share."""
  share, tenth = random.randrange(1, 3), random.randrange(1, 9)
  process = start(tmp_path / 'new', whole[1], '--cluster=local', '--processes=2')
  told = []
  for line in process.stderr:
    told.append(line)
    found = re.match(rf'\(share {share} of 2 pid=(\d+)\) .* {tenth}0 %', line)
    if found:
      worker = int(found.group(1))
      os.kill(worker if what == 'worker' else children(worker)[0], signal.SIGKILL)
      break
  out, err = process.communicate(timeout=900)
  told = ''.join(told) + err
  assert process.returncode == 0, told
  assert f'report: {tmp_path}/new/report.html' in out and '(share' not in out
  starts = len(re.findall(rf'\(share {share} of 2 .*starts on ', told))
  killed = len(re.findall(rf'\(share {share} of 2 .*was killed \(-9\)', told))
  assert (starts, killed) == ((2, 0) if what == 'worker' else (1, 1)), (share, tenth, told)
  assert '2 processes share the work' in told and '2 of 2 shares have ended' in told
  same(tmp_path / 'new', whole[0])


def test_an_interruption_ends_all_shares(whole, tmp_path):
  process = start(tmp_path / 'new', whole[1], '--cluster=local', '--processes=2')
  for line in process.stderr:
    found = re.search(r'pid=(\d+)\) .* 10 %', line)
    if found:
      shares = children(int(found.group(1)))
      process.send_signal(signal.SIGTERM)
      break
  _, err = process.communicate(timeout=300)
  assert process.returncode == 128 + signal.SIGTERM and 'give the same command again' in err, err
  assert shares and all(map(programs.ends, shares))
  assert not list(tmp_path.glob('new/.lock-cluster*'))


def test_a_cluster_that_is_not_there_is_one_sentence(tmp_path):
  process = start(tmp_path / 'new', tmp_path / 'cache', '--cluster=ray')
  _, err = process.communicate(timeout=300)
  assert process.returncode == 2 and err.splitlines()[-1].startswith('error: no cluster of Ray answers as ray (')
  assert not (tmp_path / 'new').exists()
