"""What the programs share: flags are read, `main` runs, and a usage error ends on one line with exit status 2."""

import sys

from absl import app, flags, logging

from gradleak import errors


def run(main):
  """Runs `main(argv)` with absl's flags and exits with its status; usage errors exit with 2, without a traceback."""
  app.run(lambda argv: _guarded(main, argv), flags_parser=_parse)


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
  except KeyboardInterrupt:
    print('interrupted', file=sys.stderr)
    sys.exit(130)


def _refuse(error):
  print(f'error: {" ".join(str(error).split())}', file=sys.stderr)
  sys.exit(2)
