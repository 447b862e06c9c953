"""One process at a time in a work directory, or the processes that share its work."""

import contextlib
import os
import pathlib
import platform
import time
from collections.abc import Iterator
from typing import Any

from gradleak.core import errors

try:
  import fcntl
except ImportError:  # Windows has none
  fcntl = None  # type: ignore[assignment]

_NAME = '.lock'
HELD = 'is in use by'  # in the message on a folder that another process has
_WAIT = 0.5  # seconds between two attempts


@contextlib.contextmanager
def alone(path: Any, process: tuple[int, int] = (0, 1), wait: bool = False) -> Iterator[None]:
  """Holds a work directory for this process, and makes it if it does not exist.

  The lock is one of the operating system (`flock`), on a file in the folder that names process and machine. It ends
  with its process, also by a kill, and a file that is left over holds nobody up. Network file systems pass the
  lock on to other machines where they are mounted so (NFS since Linux 2.6.12). On a file system without locks, on
  Windows, and in a folder that cannot be written, nothing is held.

  Args:
    path: of the folder; None for none.
    process: (rank, number) of this process among several that share the folder: each rank is held by itself, and the
      folder by all of them. They agree in their number, or two ranks of them would be the same share.
    wait: whether to wait for the end of another process, in place of an error.

  Raises:
    FolderError: if another process, or another call in this one, has the folder; says which.
  """
  rank, number = process
  with contextlib.ExitStack() as held:
    if path is not None:
      folder = errors.check_path('the work directory', path)
      held.enter_context(_held(folder, _NAME, number == 1, wait))
      if number > 1:
        held.enter_context(_held(folder, f'{_NAME}-{rank}of{number}', True, wait))
        _check_number(folder, number)
    yield


def _check_number(folder: pathlib.Path, number: int) -> None:
  """Raises `FolderError` where a process has a rank among another number of them."""
  if fcntl is None:
    return
  for path in folder.glob(f'{_NAME}-*of*'):
    of_others = path.name.rpartition('of')[2]
    if of_others == str(number):
      continue
    with contextlib.suppress(OSError), path.open('rb') as file:  # it is gone, or no file is locked there
      try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # free again when the file is closed
      except BlockingIOError:
        raise errors.FolderError(
          f'the work directory {folder} {HELD} {_holder(file.fileno())}, one of {of_others} processes, and this is one '
          f'of {number}: wait for the end of all, or start as many'
        ) from None


def _holder(file: int) -> str:
  return os.pread(file, 200, 0).decode('utf-8', 'replace') or 'another process'


@contextlib.contextmanager
def _held(folder: pathlib.Path, name: str, exclusive: bool, wait: bool) -> Iterator[None]:
  file = None if fcntl is None else _opened(folder, name, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH, wait)
  try:
    yield
  finally:
    if file is not None:
      with contextlib.suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the last one of those that share it removes it
        if os.path.samestat(os.fstat(file), os.stat(folder / name)):  # and not that of a folder made since
          os.unlink(folder / name)
      os.close(file)


def _opened(folder: pathlib.Path, name: str, kind: int, wait: bool) -> int | None:
  """Returns the descriptor of a locked file, None where none can be had; raises as `alone` does."""
  while True:
    try:
      folder.mkdir(parents=True, exist_ok=True)
      file = os.open(folder / name, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:
      return None  # the writer reports the error
    try:
      fcntl.flock(file, kind | fcntl.LOCK_NB)
      if os.path.samestat(os.fstat(file), os.stat(folder / name)):
        os.ftruncate(file, 0)
        os.pwrite(file, f'process {os.getpid()} on {platform.node()}'.encode(), 0)
        return file
    except BlockingIOError:
      holder = _holder(file)
      os.close(file)
      if wait:
        time.sleep(_WAIT)
        continue
      raise errors.FolderError(
        f'the work directory {folder} {HELD} {holder}: wait for its end, or choose another'
      ) from None
    except FileNotFoundError:
      pass  # the one before removed it in between: a new one is needed
    except OSError:
      os.close(file)
      return None  # the file system knows no locks
    os.close(file)
