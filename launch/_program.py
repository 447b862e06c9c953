"""Shared by the programs: flags under headings, messages, and errors on one line.

Exit status: 2 for a usage error, 1 for a failed device, a full disk or a folder that cannot be written, 130 for Ctrl-C,
143 for SIGTERM. This module imports neither JAX nor gradleak before a program runs.
"""

import contextlib
import errno
import functools
import logging
import os
import re
import signal
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from absl import app, flags
from absl import logging as absl_logging

_WIDTH = 100
_UNWRITABLE = (
  *(errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO),
  *(errno.EISDIR, errno.ENOTDIR, errno.EBUSY, errno.ENAMETOOLONG, errno.ELOOP),  # paths that are no files
)
# JAX's words for a compiled program that it cannot read or store, one for each program.
_NOT_KEPT = re.compile(r"Error (?:reading|writing) persistent compilation cache entry for '[^']*': (.*)")
_HELP, _FULL = {'--help', '-help', '-h', '-?', '--helpshort'}, {'--helpfull', '-helpfull'}


def run(main: Callable[[list[str]], Any]) -> None:
  """Runs `main(argv)` with absl's flags and exits with its status; errors that a user can cause show no traceback."""
  received: list[int] = []

  def stop(number: int, frame: Any) -> None:
    del frame
    received.append(number)
    logging.disable()  # JAX logs a traceback where a host callback is interrupted
    signal.signal(number, signal.SIG_DFL)  # a second one ends the process at once
    raise KeyboardInterrupt

  warnings.formatwarning = functools.partial(_on_one_line, told=set())
  for number in (signal.SIGINT, signal.SIGTERM):
    if signal.getsignal(number) is not signal.SIG_IGN:  # a shell lets its background jobs ignore SIGINT
      signal.signal(number, stop)

  def guarded(argv: list[str]) -> Any:
    try:
      return _guarded(main, argv, received)
    except SystemExit as end:
      if received:  # Python would wait, perhaps for minutes, for what a device and other threads still compute
        with contextlib.suppress(OSError):
          sys.stdout.flush()
        os._exit(end.code if isinstance(end.code, int) else 1)
      raise

  app.run(guarded, flags_parser=lambda argv: _parse(argv, main))


@contextlib.contextmanager
def group(heading: str) -> Iterator[None]:
  """Lists the flags that are defined in this context under a heading of `--help`.

  Args:
    heading: such as 'attacker'; headings appear in the order of their first flags.
  """
  before = set(flags.FLAGS)
  yield
  for name in set(flags.FLAGS) - before:
    vars(flags.FLAGS[name]).setdefault('heading', heading)


def command(name: str) -> list[str]:
  """Returns the command line of a program, in a process of its own."""
  return [sys.executable, '-m', 'gradleak.cli', name]


def say(text: str) -> None:
  """Writes a line to standard error at once, such as 'reading faces …'; nothing with --progress=none."""
  if 'progress' not in flags.FLAGS or flags.FLAGS['progress'].value != 'none':
    print(text, file=sys.stderr, flush=True)


def _on_one_line(
  message: Warning | str, category: type[Warning], *place: Any, told: set[str], line: str | None = None
) -> str:
  """Returns a warning as programs print it: no user has a use for the place in our code.

  Args:
    told: folders of compiled programs of which one could not be read or stored before: the next one is ''.
  """
  del place, line
  text = ' '.join(str(message).split())
  if 'compilation_cache' in flags.FLAGS and (reason := _NOT_KEPT.fullmatch(text)):
    folder = flags.FLAGS['compilation_cache'].value
    if folder in told:
      return ''
    told.add(folder)
    text = (
      f'some compiled programs in {folder} cannot be read or stored, and are compiled anew at each run ({reason[1]}): '
      'remove that folder, or name another one by --compilation_cache'
    )
  return f'{category.__name__.lower()}: {text}\n'


def _parse(argv: Sequence[str], main: Callable) -> list[str]:
  """Reads the flags and returns the program's name in a list; exits for `--help` and for arguments it cannot read."""
  asked = set(argv[1:])
  if asked & (_HELP | _FULL):
    print(_help(main, full=bool(asked & _FULL)))
    sys.exit(0)
  try:
    rest = flags.FLAGS(argv)
  except flags.Error as error:
    _refuse(error)
  if len(rest) > 1:
    _refuse(f'unexpected argument {rest[1]!r}, settings are written --flag=value')
  return rest


def _help(main: Callable, full: bool) -> str:
  """Returns the docstring of the program, and its flags by heading, in order of definition; absl's last, if `full`."""
  groups: dict[str, list[str]] = {}
  for name in flags.FLAGS:
    flag = flags.FLAGS[name]
    absl = flags.FLAGS.find_module_defining_flag(name, '').startswith('absl.')
    if flag.name == name:
      groups.setdefault('absl' if absl else getattr(flag, 'heading', 'flags'), []).append(_described(flag))
  others = groups.pop('absl', [])
  groups |= {'absl': others} if full else {}
  paragraphs = (main.__globals__['__doc__'] or '').strip().split('\n\n')
  document = [text if text.startswith(' ') else textwrap.fill(text, _WIDTH) for text in paragraphs]
  listed = ['\n'.join([f'{heading}:', *lines]) for heading, lines in groups.items()]
  return '\n\n'.join([*document, *listed, *([] if full else ["--helpfull also lists absl's own flags."])])


def _described(flag: flags.Flag) -> str:
  shown = str(flag.default).replace(';', '; ')  # spaces between the entries of a list do no harm
  default = '' if flag.default in (None, '') else f' (default:\N{NO-BREAK SPACE}{shown})'
  text = f'--{"[no]" if flag.boolean else ""}{flag.name}: {flag.help}{default}'
  wrapper = textwrap.TextWrapper(_WIDTH, '  ', 6 * ' ', break_long_words=False, break_on_hyphens=False)
  return wrapper.fill(text).replace('\N{NO-BREAK SPACE}', ' ')


def _guarded(main: Callable, argv: list[str], received: Sequence[int] = ()) -> Any:
  """Returns what `main(argv)` returns; `received` are the signals that ended it."""
  if not flags.FLAGS['verbosity'].present:
    absl_logging.set_verbosity(absl_logging.WARNING)  # Orbax would report a screenful per checkpoint
  try:
    return main(argv)
  except (Exception, KeyboardInterrupt) as error:
    if received or isinstance(error, KeyboardInterrupt):  # libraries turn an interruption into errors of their own
      _interrupted(received[0] if received else signal.SIGINT)
    _refuse_known(error)
    raise


def _interrupted(number: int) -> NoReturn:
  workdir, lead = _workdir(), '\r\x1b[K' if sys.stderr.isatty() else ''  # erases the ^C that a terminal shows
  how = f': give the same command again to go on from the last checkpoint in {workdir}' if workdir else ''
  print(f'{lead}interrupted{how}', file=sys.stderr)
  sys.exit(128 + number)


def _refuse_known(error: BaseException) -> None:
  """Ends the program if it is an error that a user can cause, or a device or a disk."""
  from gradleak.core import errors

  if isinstance(error, errors.UsageError):
    _refuse(error)
  if isinstance(error, errors.DeviceError):
    _refuse(error, status=1)
  where = getattr(error, 'filename', None) or _workdir() or 'the file system'
  if _failed(error, errno.ENOSPC, errno.EDQUOT):
    _refuse(f'no space left in {where}; no file is damaged: free some space and give the same command again', status=1)
  named = getattr(error, 'filename', None) is not None or not isinstance(error, OSError)
  if named and _failed(error, *_UNWRITABLE):
    reason = getattr(error, 'strerror', None) or error
    _refuse(f'cannot write {where} ({reason}): mend this and give the same command again', status=1)


def _workdir() -> str | None:
  return flags.FLAGS['workdir'].value if 'workdir' in flags.FLAGS else None


def _failed(error: BaseException, *numbers: int) -> bool:
  """Returns whether it is one of these errors of the operating system; Orbax raises other types with their messages."""
  return getattr(error, 'errno', None) in numbers or any(os.strerror(number) in str(error) for number in numbers)


def _refuse(error: object, status: int = 2) -> NoReturn:
  print(f'error: {" ".join(str(error).split())}', file=sys.stderr)
  sys.exit(status)
