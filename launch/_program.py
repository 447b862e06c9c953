"""What the programs share: flags are read, `main` runs, and what a user can mend ends on one line.

Exit status 2 is a usage error, 1 a device that failed or a disk that is full, 130 an interruption.
"""

import errno
import os
import sys

import jax
from absl import app, flags, logging

from gradleak import errors


def run(main):
  """Runs `main(argv)` with absl's flags and exits with its status; errors that a user can mend show no traceback."""
  app.run(lambda argv: _guarded(main, argv), flags_parser=_parse)


def define_cache():
  """Defines --compilation_cache and returns its holder, for `configure`."""
  return flags.DEFINE_string(
    'compilation_cache',
    os.path.join(os.path.expanduser('~'), '.cache', 'gradleak'),
    "JAX's persistent compilation cache; empty for none.",
  )


def configure(cache, x64=None):
  """Configures JAX; before anything is computed.

  Args:
    cache, x64: the flags' holders.
  """
  if x64 is not None:
    jax.config.update('jax_enable_x64', x64.value)
  if cache.value:
    jax.config.update('jax_compilation_cache_dir', cache.value)
  jax.config.update('jax_num_cpu_devices', os.cpu_count() or 1)  # one XLA device per core: lanes are sharded over them


def _parse(argv):
  try:
    return flags.FLAGS(argv)
  except flags.Error as error:
    _refuse(error)


def _guarded(main, argv):
  if not flags.FLAGS['verbosity'].present:
    logging.set_verbosity(logging.WARNING)  # checkpoints would report a screenful per chunk
  try:
    if len(argv) > 1:
      raise errors.UsageError(f'unexpected argument {argv[1]!r}, settings are written --flag=value')
    return main(argv)
  except errors.UsageError as error:
    _refuse(error)
  except errors.DeviceError as error:
    _refuse(error, status=1)
  except KeyboardInterrupt:
    print('interrupted', file=sys.stderr)
    sys.exit(130)
  except Exception as error:
    if not _disk_full(error):
      raise
    where = flags.FLAGS['workdir'].value if 'workdir' in flags.FLAGS else 'the file system'
    _refuse(f'no space left in {where}; what was written is whole: free some and give the same command again', status=1)


def _disk_full(error):
  # Orbax raises other types than OSError, with the system's words.
  full = (errno.ENOSPC, errno.EDQUOT)
  return (isinstance(error, OSError) and error.errno in full) or 'No space left on device' in str(error)


def _refuse(error, status=2):
  print(f'error: {" ".join(str(error).split())}', file=sys.stderr)
  sys.exit(status)
