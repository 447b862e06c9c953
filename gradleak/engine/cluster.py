"""Commands of gradleak on other machines, each a process of its own, by Ray or by Slurm.

A command is a share of a run. Shares have nothing in common but a work directory, which all machines must see. Ray and
submitit are imported where they are used; they come with the extra `cluster`.
"""

import contextlib
import os
import pathlib
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module, metadata
from typing import Annotated, Any, NamedTuple, Protocol

from gradleak.core import errors
from gradleak.core.locks import HELD
from gradleak.core.settings import Range, ranged

CORES = 8  # of a process where nothing else is known
STORE = 80 * 2**20  # bytes of shared memory of a local Ray, little more than the least that it takes
POLL = 2.0  # seconds between two looks at the jobs of Slurm
PATIENCE = (1, 2, 5, 10, 30, 60, 60)  # seconds to wait until the lock of a machine that was lost is free
# What the array job has of its own: each command is one task, and its files are read.
_OF_ARRAY = (
  *('array', 'error', 'nodes', 'ntasks', 'ntasks_per_node', 'open_mode', 'output', 'signal'),
  *('additional_parameters', 'setup', 'srun_args', 'stderr_to_stdout', 'teardown', 'use_srun'),  # of submitit
)
# Ray colours lines that may go to a file, leaves out lines that look alike, and reports on its use. It also kills its
# workers where other programs fill the memory of a machine.
_OFF = 'RAY_COLOR_PREFIX', 'RAY_DEDUP_LOGS', 'RAY_USAGE_STATS_ENABLED', 'RAY_memory_monitor_refresh_ms'
# The process ends with the one that started it: that holds the other end of its input, also where it is killed.
_BEGIN = (
  'import os, runpy, sys, threading; '
  'threading.Thread(target=lambda: (os.read(0, 1), os._exit(1)), daemon=True).start(); '
  "runpy.run_module('gradleak.cli', run_name='__main__', alter_sys=True)"
)


class Command(NamedTuple):
  """One process.

  Attributes:
    name: of its lines of progress.
    arguments: a program of `gradleak`, and its flags.
    place: the folder in which it runs.
    mark: (path, content) of a file in the work directory; a machine that does not see it takes no part.
    versions: name of a package -> the version that the machine must have.
    variables: environment variables that it must not have, where a scheduler sets them.
    again: how often it is started again where it is killed.
    memory: the part of a GPU's memory that it may take; '' leaves it to JAX.
  """

  name: str
  arguments: tuple[str, ...]
  place: str
  mark: tuple[str, str]
  versions: Mapping[str, str | None]
  variables: tuple[str, ...]
  again: int
  memory: str = ''


class Ended(NamedTuple):
  """How a process ended: its exit status, its standard output, and the last line of its standard error."""

  status: int
  out: str
  error: str


class Engine(Protocol):
  """What runs commands elsewhere.

  Attributes:
    cores: of each process.
    places: how many run at a time, None where that is not known.
  """

  cores: int
  places: int | None

  def run(self, commands: Sequence[Command], seconds: float | None = None) -> Iterator[tuple[int, Ended]]:
    """Yields (number of a command, how it ended) as they end, and prints what they say.

    A process that was lost with its machine is started again on another one.

    Args:
      commands: all of them are started, as many at a time as there are places.
      seconds: after which those that have not ended are stopped, and not yielded.
    """


def command(
  name: str, arguments: Sequence[str], mark: tuple[str, str], again: int, gpus: float | None = None
) -> Command:
  """Returns the `Command` that runs as this process would: in its folder, and with its versions."""
  memory = f'{0.9 * gpus:.2g}' if gpus and gpus < 1 else ''  # a tenth is kept for what is not JAX's
  variables = tuple(name for name in ('OMP_NUM_THREADS',) if name not in os.environ)  # Ray sets it; sums depend on it
  return Command(name, tuple(arguments), os.getcwd(), mark, _installed(), variables, again, memory)


@ranged
@contextlib.contextmanager
def connected(
  where: str,
  *,
  processes: Annotated[int | None, Range(1)] = None,
  cores: Annotated[int | None, Range(1)] = None,
  gpus: Annotated[float | None, Range(0, finite=True)] = None,
  retries: Annotated[int, Range(0)] = 8,
  options: str = '',
  logs: Any = 'slurm',
) -> Iterator[Engine]:
  """Holds an `Engine`; what has not ended with this context is stopped.

  Args:
    where: 'local' (a Ray of this machine's own), 'ray' (the cluster that this machine belongs to), 'ray://host:port',
      or 'slurm'.
    processes: how many are to run, if that is known; on one machine they share its cores.
    cores: of each process; None takes 8, or what there is for each.
    gpus: of each process, or the part of one, such as 0.25; None takes one where the cluster has any.
    retries: how often a process that was lost, or ran out of time, is started again.
    options: of sbatch, such as 'partition=gpu,time=480'.
    logs: a folder that all machines of Slurm see, for its files.

  Raises:
    UsageError: for a place that cannot be reached, or a library that is not installed.
  """
  if gpus is not None and gpus % 1 and (gpus > 1 or where == 'slurm'):
    part = '' if where == 'slurm' else ', or a part of one'
    raise errors.UsageError(f'gpus is {gpus:g}, expected a whole number of GPUs{part}')
  if where == 'slurm':
    made: contextlib.AbstractContextManager[Engine] = _slurm(cores or CORES, int(gpus or 0), retries, options, logs)
  elif where in ('local', 'ray') or re.fullmatch(r'ray://\S+', where):
    if options:
      raise errors.UsageError(f'the options {options!r} are for sbatch, and {where} is not Slurm')
    made = _ray(where, processes, cores, gpus, retries)
  else:
    raise errors.UsageError(f'the cluster is {errors.shown(where)}, expected local, ray, ray://host:port or slurm')
  with made as engine:
    yield engine


def executed(command: Command) -> Ended:
  """Runs a command to its end on this machine, and prints its lines of progress.

  This function and what it calls need Python alone: Ray sends them as they are, and its workers import no JAX.
  """
  missing = _missing(command)
  if missing:
    return Ended(2, '', f'error: {platform.node()} {missing}')
  _tell(f'starts on {platform.node()}')
  waits, lost = list(PATIENCE), command.again
  while True:
    ended = _process(command)
    if ended.status == 2 and HELD in ended.error and waits:
      time.sleep(waits.pop(0))
    elif (ended.status < 0 or ended.status > 128) and lost:  # by a signal
      lost -= 1
      _tell(f'was killed ({ended.status}), and goes on from its last checkpoint')
    else:
      return ended


def _process(command: Command) -> Ended:
  environment = {name: value for name, value in os.environ.items() if name not in command.variables}
  if command.memory:
    environment.setdefault('XLA_PYTHON_CLIENT_MEM_FRACTION', command.memory)
  begin, last = [sys.executable, '-c', _BEGIN, *command.arguments], ''
  given: dict[str, Any] = {'cwd': command.place, 'env': environment, 'encoding': 'utf-8', 'errors': 'replace'}
  with (
    tempfile.TemporaryFile('w+', encoding='utf-8') as out,
    subprocess.Popen(begin, stdin=subprocess.PIPE, stdout=out, stderr=subprocess.PIPE, **given) as child,
  ):
    try:
      for line in child.stderr or ():
        last = line.rstrip() or last
        _tell(last)
      status = child.wait()
    finally:
      child.kill()
    out.seek(0)
    return Ended(status, out.read(), last)


def _tell(line: str) -> None:
  print(line, file=sys.stderr, flush=True)


def _missing(command: Command) -> str:
  """Returns what keeps this machine from running a command; '' if nothing does."""
  path, content = command.mark
  try:
    seen = pathlib.Path(path).read_text('utf-8') == content
  except OSError:
    seen = False
  folder = os.path.dirname(path) if not seen else command.place
  if not seen or not os.path.isdir(folder):
    return f'does not see the folder {folder}: it must lie on a file system that all machines share, at the same path'
  for name, here in _installed().items():
    if here != command.versions[name]:
      return f'has {name} {here}, and {command.versions[name]} is wanted: install the same versions on all machines'
  return ''


def _installed() -> dict[str, str | None]:
  """Returns the versions on which figures depend."""
  found: dict[str, str | None] = {'Python': '.'.join(platform.python_version_tuple()[:2])}
  for name in ('gradleak', 'jax', 'jaxlib'):
    try:
      found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
      found[name] = None
  return found


def _lines(error: Exception) -> list[str]:
  """Returns the lines of what an error says; its type where it says nothing."""
  return str(error).splitlines() or [type(error).__name__]


def _library(name: str, where: str) -> Any:
  try:
    return import_module(name)
  except ImportError as error:
    raise errors.UsageError(
      f"the cluster {where} needs {name}, which is not installed: pip install -e '.[cluster]' in a checkout of gradleak"
    ) from error


# ---- Ray


@contextlib.contextmanager
def _ray(where: str, processes: int | None, cores: int | None, gpus: float | None, retries: int) -> Iterator['_Ray']:
  for name in _OFF:
    os.environ.setdefault(name, '0')
  ray, handler = _library('ray', where), signal.getsignal(signal.SIGTERM)
  own: dict[str, Any] = {'include_dashboard': False, 'object_store_memory': STORE} if where == 'local' else {}
  try:
    ray.init({'ray': 'auto'}.get(where, where), logging_level='error', log_to_driver=True, **own)
  except (ConnectionError, RuntimeError, ValueError, OSError) as error:
    advice = 'start one, or set RAY_AUTH_MODE=token where it asks for a token'
    raise errors.UsageError(f'no cluster of Ray answers as {where} ({error}): {advice}') from error
  try:
    if signal.getsignal(signal.SIGTERM) is not handler:
      signal.signal(signal.SIGTERM, handler)  # Ray's own would end this process with another status
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield _Ray(ray, where, [one['Resources'] for one in ray.nodes() if one['Alive']], processes, cores, gpus, retries)
  finally:
    ray.shutdown()


class _Ray:
  """The `Engine` of a cluster of Ray; each command is a task."""

  def __init__(
    self,
    ray: Any,
    where: str,
    machines: Sequence[Mapping[str, float]],
    processes: int | None,
    cores: int | None,
    gpus: float | None,
    retries: int,
  ) -> None:
    self._ray, self._retries = ray, retries
    self._gpus = int(any(one.get('GPU', 0) >= 1 for one in machines)) if gpus is None else gpus
    able = [(int(one.get('CPU', 0)), int(one.get('GPU', 0))) for one in machines]
    able = [(held, cards) for held, cards in able if held >= (cores or 1) and cards >= self._gpus]
    if not able and where == 'local':
      raise errors.UsageError(f'this machine has {machines[0]}, too little for {cores or 1} cores, {self._gpus} GPUs')
    beside = processes if where == 'local' else None
    on_cards = [int(cards / self._gpus + 1e-6) if self._gpus else 0 for _, cards in able]
    numbers = [number or beside or -(-held // CORES) for number, (held, _) in zip(on_cards, able, strict=True)]
    each = [max(1, held // number) for (held, _), number in zip(able, numbers, strict=True)]
    self.cores = cores or min(each, default=CORES)
    places = [min(held // self.cores, number or held) for number, (held, _) in zip(on_cards, able, strict=True)]
    self.places = sum(places) or None

  def run(self, commands: Sequence[Command], seconds: float | None = None) -> Iterator[tuple[int, Ended]]:
    task = self._ray.remote(executed)
    needs: dict[str, Any] = {'num_cpus': self.cores, 'num_gpus': self._gpus, 'max_retries': self._retries}
    started = time.monotonic()
    waiting = {
      task.options(name=one.name, scheduling_strategy='SPREAD', **needs).remote(one): number
      for number, one in enumerate(commands)
    }
    try:
      while waiting:
        left = None if seconds is None else max(0.0, started + seconds - time.monotonic())
        done, _ = self._ray.wait(list(waiting), timeout=left)
        if not done:
          break
        number = waiting.pop(done[0])
        yield number, self._ended(done[0])
    finally:
      for one in waiting:
        self._ray.cancel(one, force=True)

  def _ended(self, reference: Any) -> Ended:
    try:
      return Ended(*self._ray.get(reference))
    except self._ray.exceptions.RayTaskError as error:  # no machine is to blame, and none is tried again
      return Ended(1, '', f'error: the command could not be run: {type(error.cause).__name__}: {error.cause}')
    except self._ray.exceptions.RayError as error:
      return Ended(1, '', f'error: its machine was lost {self._retries + 1} times: {_lines(error)[0]}')


# ---- Slurm


@contextlib.contextmanager
def _slurm(cores: int, gpus: int, retries: int, options: str, logs: Any) -> Iterator['_Slurm']:
  given = {'job_name': 'gradleak', 'time': 480, **_options(options)}
  for name, flag, value in (('cpus_per_task', 'cores', cores), ('gpus_per_node', 'gpus', gpus)):
    if name in given:
      raise errors.UsageError(f'{name} is given among the options of sbatch: it is what --{flag} says')
    given |= {name: value} if value else {}
  for name in _OF_ARRAY:
    if name in given:
      raise errors.UsageError(f'{name} is given among the options of sbatch: the array job has its own')
  errors.check_number('time, in minutes, among the options of sbatch', given['time'], low=1, integer=True)
  submitit = _library('submitit', 'slurm')
  import_module('cloudpickle').register_pickle_by_value(sys.modules[__name__])
  try:
    executor = submitit.SlurmExecutor(folder=logs, max_num_timeout=retries)
    known = set(executor._valid_parameters())
    more = {name: given.pop(name) for name in set(given) - known}
    executor.update_parameters(**given, additional_parameters=more)
  except RuntimeError as error:
    raise errors.UsageError(f'no Slurm is found on this machine: {error}') from error
  yield _Slurm(submitit, executor, cores)


def _options(text: str) -> dict[str, Any]:
  """Returns the options of sbatch in 'partition=gpu,time=480', by their names in Python."""
  found: dict[str, Any] = {}
  for part in filter(None, text.split(',')):
    name, sign, value = part.strip().partition('=')
    if not sign or not re.fullmatch(r'[a-z][a-z_-]*', name):
      raise errors.UsageError(f"the options of sbatch are {text!r}, expected such as 'partition=gpu,time=480'")
    if name.replace('-', '_') in found:
      raise errors.UsageError(f'the options of sbatch are {text!r}, which give {name} twice')
    found[name.replace('-', '_')] = int(value) if value.isdecimal() else value
  return found


class _Slurm:
  """The `Engine` of Slurm; the commands are an array job. Slurm requeues what was preempted or ran out of time."""

  places: int | None = None

  def __init__(self, submitit: Any, executor: Any, cores: int) -> None:
    self._submitit, self._executor, self.cores = submitit, executor, cores

  def run(self, commands: Sequence[Command], seconds: float | None = None) -> Iterator[tuple[int, Ended]]:
    started = time.monotonic()
    try:
      jobs = self._executor.map_array(_Task(), commands)
    except RuntimeError as error:  # of submitit: what sbatch says
      raise errors.UsageError(f'Slurm takes no job with the options of --slurm: {_lines(error)[-1]}') from error
    waiting, shown = dict(enumerate(jobs)), [0] * len(jobs)
    try:
      while waiting and (seconds is None or time.monotonic() - started < seconds):
        time.sleep(POLL)
        for number in list(waiting):
          job, done = waiting[number], waiting[number].done()
          shown[number] = _show(f'({commands[number].name}, job {job.job_id}) ', job.paths.stderr, shown[number])
          if done:
            del waiting[number]
            yield number, self._ended(job)
    finally:
      for job in waiting.values():
        job.cancel()

  def _ended(self, job: Any) -> Ended:
    try:
      return Ended(*job.result())
    except self._submitit.core.utils.UncompletedJobError as error:
      return Ended(1, '', f'error: job {job.job_id} of Slurm ended without a result: {_lines(error)[-1]}')


class _Task:
  """What a job of Slurm calls; it is submitted again with the same command, where it is preempted or out of time."""

  def __call__(self, command: Command) -> Ended:
    return executed(command)

  def checkpoint(self, command: Command) -> Any:
    """Returns what submitit submits."""
    return import_module('submitit').helpers.DelayedSubmission(self, command)


def _show(head: str, path: pathlib.Path, since: int) -> int:
  """Prints what a file has more than `since` bytes, whole lines alone, and returns how many it has."""
  if not path.exists():
    return since
  new = path.read_bytes()[since:]
  new = new[: new.rfind(b'\n') + 1]
  for line in new.decode('utf-8', 'replace').splitlines():
    _tell(head + line)
  return since + len(new)
