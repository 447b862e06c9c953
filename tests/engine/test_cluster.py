"""Commands on other machines: what keeps a machine from taking part, what is started again, and what ends with it."""

import os
import platform
import signal
import subprocess
import sys
import time
import types

import pytest

from gradleak.core import errors, locks
from gradleak.engine import cluster
from tests import programs


@pytest.fixture
def made(tmp_path, monkeypatch):
  """Returns a function that makes a command whose process runs a script in place of gradleak."""
  (tmp_path / 'mark').write_text('seen')

  def make(script='', **changes):
    monkeypatch.setattr(cluster, '_BEGIN', script)
    command = cluster.command('one', ['first', 'second'], (str(tmp_path / 'mark'), 'seen'), 2)
    return command._replace(place=str(tmp_path), **changes)

  return make


def test_a_process_says_its_progress_and_its_end(made, capsys, tmp_path):
  script = (
    'import os, sys; print(sys.argv[1:], os.getcwd()); print("half", file=sys.stderr); '
    'print("error: wrong", file=sys.stderr); sys.exit(2)'
  )
  ended = cluster.executed(made(script))
  assert ended == (2, f"['first', 'second'] {tmp_path}\n", 'error: wrong')
  assert capsys.readouterr().err == f'starts on {platform.node()}\nhalf\nerror: wrong\n'


@pytest.mark.long
def test_it_is_the_command_line_of_gradleak(made):
  begin = cluster._BEGIN
  ended = cluster.executed(made(begin)._replace(arguments=('--version',), place=str(programs.ROOT)))
  assert ended.status == 0 and ended.out.startswith('gradleak 0.')


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'mark': ('/nowhere/mark', 'seen')}, 'does not see the folder /nowhere: it must lie on a file system that all'),
    ({'mark': (__file__, 'seen')}, 'does not see the folder'),
    ({'place': '/nowhere'}, 'does not see the folder /nowhere'),
    ({'versions': {**cluster._installed(), 'jax': '0'}}, ', and 0 is wanted: install the same versions'),
  ],
)  # fmt: skip
def test_a_machine_that_cannot_take_part_says_why(made, changes, message, capsys):
  command = made('raise SystemExit(3)')
  ended = cluster.executed(command._replace(**changes))
  assert ended.status == 2 and ended.error.startswith(f'error: {platform.node()} ') and message in ended.error
  assert capsys.readouterr().err == ''


def test_what_is_killed_is_started_again_a_few_times(made, tmp_path, capsys):
  script = (
    'import os, pathlib, signal; tries = pathlib.Path("tries"); '
    'tries.write_text(tries.read_text() + "x" if tries.exists() else "x"); '
    'len(tries.read_text()) < {} and os.kill(os.getpid(), signal.SIGKILL)'
  )
  assert cluster.executed(made(script.format(3))).status == 0
  assert (tmp_path / 'tries').read_text() == 'xxx'
  assert capsys.readouterr().err.count('was killed (-9), and goes on from its last checkpoint') == 2
  (tmp_path / 'tries').unlink()
  assert cluster.executed(made(script.format(9))).status == -signal.SIGKILL
  assert (tmp_path / 'tries').read_text() == 'xxx'


def test_it_waits_for_the_lock_of_a_machine_that_was_lost(made, tmp_path, monkeypatch):
  monkeypatch.setattr(cluster, 'PATIENCE', (0, 0))
  script = (
    'import pathlib, sys\n'
    'tries = pathlib.Path("tries"); tries.write_text(tries.read_text() + "x" if tries.exists() else "x")\n'
    f'if len(tries.read_text()) < {{}}: print("error: the folder {locks.HELD} 1", file=sys.stderr); sys.exit(2)'
  )
  assert cluster.executed(made(script.format(3))).status == 0
  (tmp_path / 'tries').unlink()
  ended = cluster.executed(made(script.format(9)))
  assert ended.status == 2 and (tmp_path / 'tries').read_text() == 'xxx'


def test_what_a_scheduler_sets_is_taken_back(made, monkeypatch):
  monkeypatch.delenv('OMP_NUM_THREADS', raising=False)
  command = made('import os; print(os.environ.get("OMP_NUM_THREADS"))')
  monkeypatch.setenv('OMP_NUM_THREADS', '1')  # as Ray does in its workers
  assert cluster.executed(command).out == 'None\n'
  assert cluster.executed(made('import os; print(os.environ["OMP_NUM_THREADS"])')).out == '1\n'


@pytest.mark.long
def test_a_process_ends_with_the_one_that_started_it(tmp_path):
  """The worker is killed at once, without a chance to end what it started."""
  child = cluster._BEGIN.partition('runpy.run_module')[0] + (
    'import pathlib, time; pathlib.Path("pid").write_text(str(os.getpid())); time.sleep(60)'
  )
  parent = (
    'import pathlib; from gradleak.engine import cluster\n'
    f'cluster._BEGIN = {child!r}\n'
    f'pathlib.Path("mark").write_text("seen")\n'
    'cluster.executed(cluster.command("one", [], ("mark", "seen"), 0))'
  )
  environment = {**os.environ, 'PYTHONPATH': str(programs.ROOT)}
  with subprocess.Popen([sys.executable, '-c', parent], cwd=tmp_path, env=environment) as worker:
    while not ((tmp_path / 'pid').exists() and (tmp_path / 'pid').read_text()):
      assert worker.poll() is None
      time.sleep(0.05)
    pid = int((tmp_path / 'pid').read_text())
    worker.kill()
  assert programs.ends(pid), 'it goes on without its parent'


# ---- where it runs


@pytest.mark.parametrize(
  ('where', 'options', 'message'),
  [
    ('cloud', '', "the cluster is 'cloud', expected local, ray, ray://host:port or slurm"),
    ('ray://', '', 'expected local'),
    ('local', 'time=5', "the options 'time=5' are for sbatch, and local is not Slurm"),
    ('local', '', "the cluster local needs ray, which is not installed: pip install -e '.[cluster]'"),
    ('slurm', '', 'the cluster slurm needs submitit'),
    ('slurm', 'time=5,cpus_per_task=8', 'cpus_per_task is given among the options of sbatch: it is what --cores says'),
    ('slurm', 'gpus-per-node=2', 'gpus_per_node is given among the options of sbatch: it is what --gpus says'),
    ('slurm', 'nodes=2', 'nodes is given among the options of sbatch: the array job has its own'),
    ('slurm', 'time=8:00:00', "time, in minutes, among the options of sbatch is '8:00:00', expected an integer"),
    ('slurm', 'time=10,partition=gpu,time=20', 'which give time twice'),
    ('slurm', 'mem-per-cpu=2G,mem_per_cpu=3G', 'which give mem_per_cpu twice'),
  ],
)
def test_a_place_that_is_not_there_is_one_sentence(where, options, message, monkeypatch):
  monkeypatch.setitem(sys.modules, 'ray', None)
  monkeypatch.setitem(sys.modules, 'submitit', None)
  with pytest.raises(errors.UsageError) as caught, cluster.connected(where, options=options):
    pass
  assert message in str(caught.value)


@pytest.mark.parametrize('text', ['time', 'time=5,--mem=3', 'Time=5'])
def test_options_of_sbatch_are_names_with_values(text):
  with pytest.raises(errors.UsageError, match='options of sbatch are'):
    cluster._options(text)
  assert cluster._options('name=²') == {'name': '²'}  # a digit of which Python makes no number
  assert cluster._options('time=90, partition=gpu,mem-per-cpu=2G') == {
    'time': 90, 'partition': 'gpu', 'mem_per_cpu': '2G'
  }  # fmt: skip


def ray(machines, where='ray', processes=None, cores=None, gpus=None):
  return cluster._Ray(None, where, machines, processes, cores, gpus, 0)


@pytest.mark.parametrize(
  ('machines', 'given', 'cores', 'places'),
  [
    ([{'CPU': 2.0}], {'where': 'local'}, 2, 1),
    ([{'CPU': 2.0}], {'where': 'local', 'processes': 2}, 1, 2),
    ([{'CPU': 2.0}], {'where': 'local', 'processes': 5}, 1, 2),
    ([{'CPU': 64.0}], {'where': 'local'}, 8, 8),
    ([{'CPU': 16.0, 'GPU': 4.0}], {'where': 'local'}, 4, 4),
    ([{'CPU': 16.0, 'GPU': 4.0}], {'where': 'local', 'gpus': 2}, 8, 2),
    ([{'CPU': 16.0, 'GPU': 4.0}], {'where': 'local', 'gpus': 0}, 8, 2),
    ([{'CPU': 16.0, 'GPU': 1.0}], {'where': 'local', 'gpus': 0.25}, 4, 4),
    ([{'CPU': 40.0, 'GPU': 1.0}, {'CPU': 16.0}], {'gpus': 0.1}, 4, 10),  # 1 // 0.1 is 9
    ([{'memory': 1.0}, {'CPU': 32.0, 'GPU': 8.0}, {'CPU': 16.0, 'GPU': 2.0}], {}, 4, 10),
    ([{'memory': 1.0}, {'CPU': 32.0, 'GPU': 8.0}, {'CPU': 8.0}], {}, 4, 8),
    ([{'CPU': 32.0}, {'CPU': 16.0}], {'cores': 16}, 16, 3),
    ([{'memory': 1.0}], {}, cluster.CORES, None),  # a cluster that grows when it is asked
  ],
)
def test_processes_share_the_cores_and_gpus_of_machines(machines, given, cores, places):
  made = ray(machines, **given)
  assert (made.cores, made.places) == (cores, places)


@pytest.mark.parametrize(('gpus', 'part'), [(0.25, '0.23'), (0.1, '0.09'), (1, ''), (2, ''), (None, '')])
def test_a_process_with_a_part_of_a_gpu_takes_that_part_of_its_memory(made, gpus, part, monkeypatch, tmp_path):
  script = 'import os; print(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", ""))'
  command = made(script)._replace(memory=cluster.command('', [], ('', ''), 0, gpus).memory)
  assert cluster.executed(command).out == f'{part}\n'
  monkeypatch.setenv('XLA_PYTHON_CLIENT_MEM_FRACTION', '0.5')  # a user's own
  assert cluster.executed(command).out == '0.5\n'


@pytest.mark.parametrize(('where', 'gpus'), [('slurm', 0.5), ('local', 1.5), ('ray', 2.25)])
def test_parts_of_gpus_that_no_scheduler_has_are_refused(where, gpus):
  message = f'gpus is {gpus}, expected a whole number of GPUs'
  with pytest.raises(errors.UsageError, match=message), cluster.connected(where, gpus=gpus):
    pass


def test_a_machine_that_is_too_small_is_refused():
  with pytest.raises(errors.UsageError, match='too little for 4 cores'):
    ray([{'CPU': 2.0}], where='local', cores=4)


class FakeRay:
  """As much of Ray as the engine calls; each task is 'run' when it is waited for, the last one first."""

  class exceptions:
    RayError = type('RayError', (Exception,), {})
    RayTaskError = type('RayTaskError', (RayError,), {})

  def __init__(self, hangs=()):
    self.asked, self.cancelled, self.hangs = [], [], hangs

  def remote(self, function):
    def start(options, command):
      self.asked.append(options)
      return types.SimpleNamespace(call=lambda: function(command), name=command.name, __hash__=None)

    return types.SimpleNamespace(
      options=lambda **options: types.SimpleNamespace(remote=lambda command: _Hashed(start(options, command)))
    )

  def wait(self, references, timeout):
    ready = [one for one in references if one.inner.name not in self.hangs]
    return ready[-1:], references

  def get(self, reference):
    return reference.inner.call()

  def cancel(self, reference, force):
    self.cancelled.append((reference.inner.name, force))


class _Hashed:
  def __init__(self, inner):
    self.inner = inner


@pytest.fixture
def commands(monkeypatch):
  def executed(command):
    if command.name == 'lost':
      raise FakeRay.exceptions.RayError('the node died\nat once')
    return 0, command.name, ''

  monkeypatch.setattr(cluster, 'executed', executed)
  return [cluster.command(name, [], ('', ''), 0) for name in ('one', 'two', 'lost', 'slow')]


def test_tasks_of_ray_end_in_any_order_and_what_is_late_is_stopped(commands):
  fake = FakeRay(hangs=('slow',))
  engine = cluster._Ray(fake, 'ray', [{'CPU': 8.0, 'GPU': 1.0}], None, 2, None, 5)
  found = dict(engine.run(commands, seconds=0.0))
  assert list(found) == [2, 1, 0]
  assert found[0] == cluster.Ended(0, 'one', '') and found[1].out == 'two'
  assert found[2] == (1, '', 'error: its machine was lost 6 times: the node died')
  assert fake.cancelled == [('slow', True)]
  for name, asked in zip(('one', 'two', 'lost', 'slow'), fake.asked, strict=True):
    assert asked == {
      'name': name, 'num_cpus': 2, 'num_gpus': 1, 'max_retries': 5, 'scheduling_strategy': 'SPREAD'
    }  # fmt: skip


def test_a_task_that_fails_says_why_and_no_machine_is_blamed(commands, monkeypatch):
  def executed(command):
    error = FakeRay.exceptions.RayTaskError('ray::share 1 of 2()\nTraceback')
    error.cause = OSError(28, 'No space left on device')
    raise error

  monkeypatch.setattr(cluster, 'executed', executed)
  engine = cluster._Ray(FakeRay(), 'ray', [{'CPU': 8.0}], None, None, None, 5)
  ((_, ended),) = engine.run(commands[:1])
  assert ended == (1, '', 'error: the command could not be run: OSError: [Errno 28] No space left on device')


def test_an_error_that_says_nothing_is_called_by_its_type(commands, monkeypatch):
  def executed(command):
    raise FakeRay.exceptions.RayError

  monkeypatch.setattr(cluster, 'executed', executed)
  engine = cluster._Ray(FakeRay(), 'ray', [{'CPU': 8.0}], None, None, None, 0)
  assert [ended.error for _, ended in engine.run(commands[:1])] == ['error: its machine was lost 1 times: RayError']


def test_who_stops_listening_stops_what_runs(commands):
  fake = FakeRay()
  engine = cluster._Ray(fake, 'ray', [{'CPU': 8.0}], None, None, None, 0)
  running = engine.run(commands)
  assert next(running)[0] == 3
  running.close()
  assert sorted(fake.cancelled) == [('lost', True), ('one', True), ('two', True)]
