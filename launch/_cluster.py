"""The work of a program shared among processes: by hand (--process, --processes), or by a scheduler (--cluster)."""

import contextlib
import os
import pathlib
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from absl import flags

from launch import _program
from launch._flags import Flags

if TYPE_CHECKING:
  from gradleak.engine.cluster import Command, Engine

UNFINISHED = 75  # exit status of a process whose next share waits for those of others: EX_TEMPFAIL of sysexits.h
_SCHEDULER = ('cluster', 'gpus', 'retries', 'slurm')
_ROUNDS = 100  # of a staged run at most


def define(given: Flags, *, process: str = 'Rank of this process, where several share the work.') -> None:
  """Defines the flags, under their own heading."""
  with _program.group('several processes'):
    given.shared(*_SCHEDULER, 'cores')
    given.integer('process', None, process)
    given.integer('processes', None, 'How many share the work; with --cluster by default as many as have room.')


def rank(given: Flags, default: tuple[int, int] = (0, 1)) -> tuple[int, int]:
  """Returns (rank, number of processes) of the flags.

  Raises:
    UsageError: for one of them without the other.
  """
  from gradleak.core import errors

  if (given.process is None) != (given.processes is None):
    raise errors.UsageError('--process and --processes belong together: give both, or neither')
  return default if given.process is None else (given.process, given.processes)


def execution(given: Flags, **fields: Any) -> Any:
  """Returns the `gradleak.Execution` of the flags --process and --processes, --group_size and --shards.

  Args:
    given: the flags of the program.
    **fields: replace some.

  Raises:
    UsageError: as `rank` does.
  """
  import gradleak as gl

  known = {name: getattr(given, name) for name in ('group_size', 'shards') if name in given}
  return gl.Execution(**{**known, **fields, **({} if 'process' in fields else {'process': rank(given)})})


def shared(given: Flags, program: str, most: int, workdir: str | None, *, stages: bool = False) -> bool:
  """Runs a program's shares where --cluster says, and then the program itself, which finds what they wrote.

  This process computes nothing, and so takes no memory of a GPU. Shares are processes as users start them by hand.

  Args:
    given: the flags of the program.
    program: its name.
    most: into how many shares its work can be cut.
    workdir: its work directory.
    stages: whether a share may end with `UNFINISHED`: then all are started again.

  Returns:
    False without --cluster; the program then runs here.

  Raises:
    UsageError: for flags that do not fit, and where a share fails.
  """
  if given.cluster is None:
    _refuse_alone(given)
    return False
  with _engine(given, workdir) as (engine, mark):
    number = min(given.processes or engine.places or 1, max(1, most))
    _program.say(
      f'{number} {"process shares" if number == 1 else "processes share"} the work, {engine.cores} cores each'
    )
    flags_ = [*_passed(given), f'--cores={engine.cores}']
    shares = [
      _command(given, f'share {i + 1} of {number}', mark, program, *flags_, f'--process={i}', f'--processes={number}')
      for i in range(number)
    ]
    for _ in range(_ROUNDS if number > 1 else 0):
      if 0 in _statuses(engine, shares) or not stages:
        break
    whole = _command(given, 'all shares', mark, program, *flags_, '--process=0', '--processes=1')
    for _, ended in engine.run([whole]):
      _check(whole.name, ended)
      print(ended.out, end='')
  return True


def _statuses(engine: 'Engine', commands: Sequence['Command']) -> list[int]:
  """Returns the exit statuses of commands, 0 or `UNFINISHED`; raises `UsageError` as soon as one has another."""
  found = []
  for number, ended in engine.run(commands):
    _check(commands[number].name, ended)
    found.append(ended.status)
    _program.say(f'{len(found)} of {len(commands)} shares have ended')
  return found


@contextlib.contextmanager
def each(
  given: Flags, program: str, commands: Mapping[str, Sequence[str]], workdir: str, seconds: float
) -> Iterator[Any]:
  """Holds an iterator over (name, exit status) of whole runs of a program, on the cluster, as they end.

  Args:
    given: the flags of the program.
    program: its name.
    commands: name -> the flags of a run.
    workdir: a folder that all of them see.
    seconds: after which runs are stopped.
  """
  with _engine(given, workdir) as (engine, mark):
    made = [
      _command(given, name, mark, program, *flags_, f'--cores={engine.cores}') for name, flags_ in commands.items()
    ]

    def ended() -> Iterator[tuple[str, int]]:
      for number, one in engine.run(made, seconds):
        if one.status:
          _program.say(f'{made[number].name}: {one.error}')
        yield made[number].name, one.status

    yield ended()


def _passed(given: Flags) -> list[str]:
  """Returns the flags of this program that were given, for another process, without those of a scheduler."""
  left_out = {*_SCHEDULER, 'cores', 'process', 'processes', 'progress' if given.progress != 'none' else ''}
  return [flags.FLAGS[name].serialize() for name in given.defined() if given.present(name) and name not in left_out]


@contextlib.contextmanager
def _engine(given: Flags, workdir: str | None) -> Iterator[tuple['Engine', tuple[str, str]]]:
  """Holds the `Engine` of the flags, and a mark in the work directory by which machines know that they see it."""
  from gradleak.core import errors
  from gradleak.core.storage import made_folder, write_atomically
  from gradleak.engine import cluster

  if given.process is not None:
    raise errors.UsageError('--process is for a process that is started by hand, and --cluster starts all of them')
  if given.cluster == 'slurm' and given.processes is None:
    raise errors.UsageError('--cluster=slurm needs --processes: how many tasks the array job has')
  if not workdir:
    raise errors.UsageError('--cluster needs a --workdir that all processes see')
  logs = f'{os.path.normpath(workdir)}-slurm'
  numbers = {name: getattr(given, name) for name in ('processes', 'cores', 'gpus', 'retries')}
  with cluster.connected(given.cluster, **numbers, options=given.slurm, logs=logs) as engine:
    folder = pathlib.Path(workdir)
    new = not folder.exists()
    mark = made_folder(folder).absolute() / f'.lock-cluster-{secrets.token_hex(8)}', secrets.token_hex(8)
    write_atomically(*mark)
    try:
      yield engine, (str(mark[0]), mark[1])
    finally:
      mark[0].unlink(missing_ok=True)
      with contextlib.suppress(OSError):
        if new:
          folder.rmdir()  # nothing half-written stays where no share has begun


def _command(given: Flags, name: str, mark: tuple[str, str], program: str, *flags_: str) -> 'Command':
  from gradleak.engine import cluster

  return cluster.command(name, (program, *flags_), mark, given.retries, given.gpus)


def _check(name: str, ended: Any) -> None:
  from gradleak.core import errors

  if ended.status not in (0, UNFINISHED):
    kind = errors.UsageError if ended.status == 2 else errors.DeviceError
    raise kind(f'{name}: {ended.error.removeprefix("error: ") or f"it ended with status {ended.status}"}')


def _refuse_alone(given: Flags) -> None:
  """Raises `UsageError` for flags of a scheduler without one."""
  from gradleak.core import errors

  for name in _SCHEDULER:
    if given.present(name):
      raise errors.UsageError(f'--{name} is for --cluster, which is missing')
  rank(given)
