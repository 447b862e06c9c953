"""Two processes on one work directory: the second is told, unless they share the work."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading

import jax
import pytest

import gradleak as gl
from gradleak.core import errors, locks
from tests import programs

HOLDS = """
import contextlib, sys
from gradleak.core import locks
with contextlib.ExitStack() as held:
  for line in sys.stdin:
    held.close()
    if line.strip():
      folder, rank, number = line.strip().split('|')
      held.enter_context(locks.alone(folder, (int(rank), int(number))))
    print('done', flush=True)
"""


@pytest.fixture(scope='module')
def other():
  """A process of its own that holds the folder of the last line that it was sent: folder|rank|number."""
  options = {'stdin': subprocess.PIPE, 'stdout': subprocess.PIPE, 'text': True}
  with subprocess.Popen([sys.executable, '-c', HOLDS], cwd=programs.ROOT, **options) as process:
    yield process
    process.kill()


@pytest.fixture
def held(other, tmp_path):
  """(rank, number) -> the process that holds the folder 'new', as a share of the work or alone."""

  def tell(line):
    print(line, file=other.stdin, flush=True)
    assert other.stdout.readline() == 'done\n'

  def start(rank=0, number=1):
    tell(f'{tmp_path / "new"}|{rank}|{number}')
    return other

  yield start
  if other.poll() is None:
    tell('')


def test_processes_that_share_the_work_share_the_folder(held, tmp_path):
  held(0, 2)
  with locks.alone(tmp_path / 'new', (1, 2)):
    pass
  assert (tmp_path / 'new' / '.lock').exists()  # the other one holds it still
  for process in ((0, 1), (0, 2)):  # one that does not know of it; and its own share, started twice
    with pytest.raises(errors.UsageError, match='is in use by'), locks.alone(tmp_path / 'new', process):
      pass


def test_shares_of_other_numbers_of_processes_are_not_run_together(held, tmp_path):
  """Share 2 of 4 is run by rank 0 of 2 as well."""
  other = held(0, 2)
  message = f'is in use by process {other.pid} on .*, one of 2 processes, and this is one of 4'
  with pytest.raises(errors.FolderError, match=message), locks.alone(tmp_path / 'new', (2, 4)):
    pass
  assert [path.name for path in (tmp_path / 'new').glob('.lock-*')] == ['.lock-0of2']
  (tmp_path / 'new' / '.lock-1of3').write_text('process 1 on nowhere')  # left by a kill
  with locks.alone(tmp_path / 'new', (1, 2)):
    pass


def test_a_call_within_a_call_is_told_and_a_failed_one_lets_go(tmp_path):
  told = pytest.raises(errors.UsageError, match=f'process {os.getpid()}')
  with locks.alone(tmp_path / 'new'), told, locks.alone(tmp_path / 'new'):
    pass
  with pytest.raises(KeyboardInterrupt), locks.alone(tmp_path / 'new'):
    raise KeyboardInterrupt
  with locks.alone(tmp_path / 'new'), locks.alone(None):
    pass


def test_a_folder_that_was_removed_and_made_anew_keeps_its_lock(tmp_path):
  with contextlib.ExitStack() as later:
    with locks.alone(tmp_path / 'run'):
      shutil.rmtree(tmp_path / 'run')
      later.enter_context(locks.alone(tmp_path / 'run'))
    with pytest.raises(errors.FolderError, match='is in use by'), locks.alone(tmp_path / 'run'):
      pass


def test_one_that_waits_has_the_folder_after_the_other(tmp_path):
  order = []

  def later():
    with locks.alone(tmp_path / 'new', wait=True):
      order.append('waited')

  waiting = threading.Thread(target=later)
  with locks.alone(tmp_path / 'new'):
    waiting.start()
    waiting.join(0.2)
    order.append('first')
  waiting.join(60)
  assert order == ['first', 'waited']


def test_where_nothing_can_be_locked_nothing_is(tmp_path, monkeypatch):
  with locks.alone('/proc/gradleak'):
    pass

  def unknown(file, kind):
    raise OSError(95, 'Operation not supported')

  monkeypatch.setattr(locks.fcntl, 'flock', unknown)
  with locks.alone(tmp_path / 'new'), locks.alone(tmp_path / 'new'):
    pass


@pytest.mark.parametrize('program', ['audit', 'train_prior', 'train', 'identify', 'epsilon'])
def test_programs_say_who_has_their_folder(held, tmp_path, program):
  first = held()
  flags = {
    'audit': '--model=mlp(widths=2) --public=0 --trials=1 --steps=1 --controls=1 '
    '--knowledge=non-adaptive --defenses=none',
    'identify': '--model=mlp(widths=2) --public=0 --trials=1 --candidates=2',
    'epsilon': '--model=mlp(widths=2) --limit=4 --uploads=8',
    'train_prior': '--steps=20 --limit=4 --width=1 --batch_size=2',
    'train': '--model=mlp(widths=2) --limit=40 --public=0 --clients=2 --per_round=2 --rounds=1',
  }[program]
  common = '--dataset=digits', '--progress=none', '--compilation_cache=', f'--workdir={tmp_path}/new'
  if program == 'train':  # each defense has its own folder
    (tmp_path / 'new').rename(tmp_path / '00-none')
    (tmp_path / 'all').mkdir()
    (tmp_path / '00-none').rename(tmp_path / 'all' / '00-none')
    common = *common[:3], f'--workdir={tmp_path}/all'
  done = programs.start(program, *common, *flags.split())
  assert done.status == 2 and f'is in use by process {first.pid} on ' in done.err
  assert done.err.count('\n') == 1


def test_a_captured_update_is_attacked_by_one_at_a_time(held, tmp_path):
  held()
  model = gl.models.mlp(10, widths=2)
  variables = model.init(jax.random.key(0), (8, 8, 1))
  options = {'sample_shape': (8, 8, 1), 'labels': [0], 'progress': 'none', 'workdir': tmp_path / 'new'}
  with pytest.raises(errors.UsageError, match='is in use by process'):
    gl.attack(jax.random.key(0), model, variables, variables['params'], attacks=[gl.attacks.csdlg(steps=1)], **options)


@pytest.mark.long
def test_a_second_process_is_told_of_the_first_and_a_kill_frees_the_folder(held, tmp_path):
  first = held()
  told = rf'new is in use by process {first.pid} on \S+: wait for its end'
  with pytest.raises(errors.UsageError, match=told), locks.alone(tmp_path / 'new'):
    pass
  with pytest.raises(errors.UsageError, match='is in use by process'), locks.alone(tmp_path / 'new', (0, 2)):
    pass
  os.kill(first.pid, signal.SIGKILL)
  first.wait()
  assert (tmp_path / 'new' / '.lock').exists()  # and it holds nobody up
  with locks.alone(tmp_path / 'new'):
    assert str(os.getpid()) in (tmp_path / 'new' / '.lock').read_text()
  assert not list((tmp_path / 'new').iterdir())
