r"""Keeps a leaderboard of defenses: a folder with one file for each, of what AutoLeak saw and how to run it again.

    python launch/leaderboard.py --add=results/autoleak
    python launch/leaderboard.py --page=results/leaderboard.html
    python launch/leaderboard.py --costs=results/train
    python launch/leaderboard.py --check=outpost-0a1b2c3d --workdir=results/check

The first takes the defenses of a finished launch/autoleak.py; nothing is run. The third gives the files of a task the
accuracy that their defenses cost in a finished launch/train.py. The last runs a file's defense again with its settings,
by launch/autoleak.py, and says what differs. Its status is 1 where counts, settings or data differ.
"""

import os
import subprocess
import sys

from absl import flags

from launch import _program

with _program.group('one of'):
  _ADD = flags.DEFINE_string('add', None, 'Work directory of a finished launch/autoleak.py, whose defenses are added.')
  _CHECK = flags.DEFINE_string('check', None, "Name of a file, without '.json', that is run again in --workdir.")
  _PAGE = flags.DEFINE_string('page', None, 'File for the page with all of the folder.')
with _program.group('where, and how'):
  _FOLDER = flags.DEFINE_string('folder', 'results/leaderboard', 'Folder of the leaderboard.')
  _COSTS = flags.DEFINE_string(
    'costs',
    None,
    'Accuracy that the defenses cost: work directory of a finished launch/train.py on the same task. With add also a '
    'JSON file {"DEFENSE": [POINTS, "SOURCE"]}, in percentage points, or [POINTS, "SOURCE", [LOW, HIGH]]. What is not '
    'in it stays as it is.',
  )
  _REPLACE = flags.DEFINE_boolean('replace', False, 'add: Whether files that differ are overwritten.')
  _WORKDIR = flags.DEFINE_string('workdir', None, 'check: Folder of the new run.')
  _WEIGHTS = flags.DEFINE_string('weights', None, "check: File with the model's weights, where the task says so.")
  _DATA_DIR = flags.DEFINE_string('data_dir', None, 'check: Folder with prepared TFDS datasets.')
  _PROGRESS = flags.DEFINE_string('progress', 'auto', 'check: auto, bar, lines or none.')
  _CACHE = _program.define_cache()


def main(argv):
  """Adds, checks or draws, as the flags say."""
  del argv
  from gradleak.core import errors

  actions = {'add': _ADD, 'check': _CHECK, 'page': _PAGE}
  given = [name for name, holder in actions.items() if holder.value]
  if not given and _COSTS.value:
    _price()
    return
  if len(given) != 1:
    raise errors.UsageError('give one of --add=WORKDIR, --costs=WORKDIR, --check=NAME --workdir=FOLDER and --page=FILE')
  {'add': _add, 'check': _check, 'page': _page}[given[0]]()


def _add():
  from gradleak.core import errors
  from gradleak.studies.autoleak import leaderboard

  workdir = errors.check_path('add', _ADD.value)
  found = leaderboard.load(workdir)
  settings = _read(workdir / 'command.json', 'give its command of launch/autoleak.py again, which writes it')
  costs = _costs(found) if _COSTS.value else {}
  for entry in leaderboard.entries(found, settings, costs):
    path = os.path.join(_FOLDER.value, f'{leaderboard.name(entry)}.json')
    if entry['defense'] == 'none' and os.path.exists(path) and not _REPLACE.value:
      continue  # every run of a task has one
    print(leaderboard.add(_FOLDER.value, entry, replace=_REPLACE.value))


def _costs(found):
  """Returns defense -> (percentage points, source) of --costs; from trainings, only for the defenses in `found`."""
  if not os.path.isdir(_COSTS.value):
    return _read(_COSTS.value, 'expected a JSON file for --costs')
  known = _of_training(found.config)
  return {label: known[label] for label in found.config['defenses'] if label in known}


def _of_training(task):
  """Returns what the trainings of --costs say; says where they have no digests to be compared with."""
  from gradleak.studies.autoleak import costs

  found = costs.of_training(_COSTS.value, task)
  if not costs.verified(_COSTS.value):
    _program.say(
      f'the trainings in {_COSTS.value} are of an earlier version, without digests, and are taken as they are'
    )
  return found


def _price():
  """Writes what the defenses cost in the trainings of --costs into the files of the same task."""
  from gradleak.core import errors
  from gradleak.studies.autoleak import costs, leaderboard

  task = costs.task_of(_COSTS.value)

  def trained(entry):
    given = {**entry['task'], **entry['task']['more']}
    return all(given.get(part) == value for part, value in task.items())

  same = list(filter(trained, leaderboard.read(_FOLDER.value).values()))
  if not same:
    raise errors.UsageError(f'no file of {_FOLDER.value} is of the task that was trained in {_COSTS.value}')
  found = _of_training(task)
  for entry in same:
    if entry['defense'] in found:
      priced = leaderboard.priced(entry, found[entry['defense']])
      print(leaderboard.add(_FOLDER.value, priced, replace=True))


def _read(path, otherwise):
  """Returns the object in a JSON file."""
  from gradleak.core import errors
  from gradleak.core.storage import read_json

  try:
    return read_json(path, otherwise, dict)
  except (FileNotFoundError, NotADirectoryError):
    raise errors.UsageError(f'there is no {path}: {otherwise}') from None


def _check():
  from gradleak.core import errors
  from gradleak.studies.autoleak import leaderboard

  known = leaderboard.read(_FOLDER.value)
  entry = known[errors.check_choice('name of the leaderboard', _CHECK.value, list(known))]
  workdir = errors.check_path('workdir', _WORKDIR.value or '')
  if (workdir / 'autoleak.json').exists():
    raise errors.UsageError(f'{workdir} holds a finished run: choose a new folder for --workdir')
  if entry['settings'] is None:
    raise errors.UsageError(f'{_CHECK.value} was not made by launch/autoleak.py: its settings are not known')
  if (expected := entry['task']['more'].get('weights')) and not _WEIGHTS.value:
    raise errors.UsageError(f'{_CHECK.value} is of a model with the weights of {expected}: give --weights=FILE')
  where = {'workdir': workdir, **{flag.name: flag.value for flag in (_WEIGHTS, _DATA_DIR, _PROGRESS, _CACHE)}}
  given = [f'--{name}={value}' for name, value in {**entry['settings'], **where}.items() if value is not None]
  done = subprocess.run([*_program.command('autoleak'), *given], check=False)
  if done.returncode:
    sys.exit(done.returncode)  # it has said why
  differing = leaderboard.compare(entry, leaderboard.load(workdir))
  print('\n'.join([f'{_CHECK.value}:', *differing]) if differing else f'{_CHECK.value}: the same counts, the same bits')
  if any(not said.startswith(leaderboard.ROUNDED) for said in differing):
    sys.exit(1)
  if differing:
    print('The counts are the same.')


def _page():
  from gradleak.report import write_leaderboard

  write_leaderboard(_FOLDER.value, _PAGE.value)
  print(f'page: {_PAGE.value}')


if __name__ == '__main__':
  _program.run(main)
