r"""Keeps a leaderboard of defenses: a folder with one file for each, of what AutoLeak saw and how to run it again.

    python launch/leaderboard.py --add=results/autoleak
    python launch/leaderboard.py --page=results/leaderboard.html
    python launch/leaderboard.py --costs=results/train
    python launch/leaderboard.py --identified=results/identify
    python launch/leaderboard.py --check=outpost-0a1b2c3d --workdir=results/check

The first takes the defenses of a finished launch/autoleak.py; nothing is run. The third gives the files of a task the
accuracy that their defenses cost in a finished launch/train.py. The fourth gives them the originals that a finished
launch/identify.py ranks first. The last runs a file's defense again with its settings,
by launch/autoleak.py, and says what differs. Its status is 1 where counts, settings or data differ.
"""

import os
import subprocess
import sys

from launch import _program
from launch._flags import Flags

PASSED = ('weights', 'data_dir', 'progress', 'compilation_cache')  # to the run that checks a file
_GIVEN = Flags()
with _program.group('one of'):
  _GIVEN.string('add', None, 'Work directory of a finished launch/autoleak.py, whose defenses are added.')
  _GIVEN.string('check', None, "Name of a file, without '.json', that is run again in --workdir.")
  _GIVEN.string('page', None, 'File for the page with all of the folder.')
with _program.group('where, and how'):
  _GIVEN.string('folder', 'results/leaderboard', 'Folder of the leaderboard.')
  _GIVEN.string(
    'costs',
    None,
    'Accuracy that the defenses cost: work directory of a finished launch/train.py on the same task. With add also a '
    'JSON file {"DEFENSE": [POINTS, "SOURCE"]}, in percentage points, or [POINTS, "SOURCE", [LOW, HIGH]]. What is not '
    'in it stays as it is.',
  )
  _GIVEN.string('identified', None, 'Work directory of a finished launch/identify.py on the same task.')
  _GIVEN.boolean('replace', False, 'add: Whether files that differ are overwritten.')
  _GIVEN.string('workdir', None, 'check: Folder of the new run.')
  _GIVEN.shared(*PASSED, weights=(None, "check: File with the model's weights, where the task says so."))


def main(_):
  """Adds, checks or draws, as the flags say."""
  from gradleak.core import errors

  does = {'add': _add, 'check': _check, 'page': _page, 'costs': _price, 'identified': _identify}
  given = [name for name in does if getattr(_GIVEN, name)]
  if len(given) != 1 and given != ['add', 'costs']:
    raise errors.UsageError(
      'give one of --add=WORKDIR, --costs=WORKDIR, --identified=WORKDIR, --check=NAME --workdir=FOLDER and --page=FILE'
    )
  for name, flags in {'add': ('replace',), 'check': ('workdir', 'weights', 'data_dir')}.items():
    if name not in given:
      _GIVEN.refuse_beside(f'--{name}, which is missing', *flags)
  does[given[0]]()


def _add():
  from gradleak.core import errors
  from gradleak.studies.autoleak import leaderboard

  workdir = errors.check_path('add', _GIVEN.add)
  found = leaderboard.load(workdir)
  settings = _read(workdir / 'command.json', 'give its command of launch/autoleak.py again, which writes it')
  costs = _costs(found) if _GIVEN.costs else {}

  def known(entry):  # every run of a task has one without a defense
    return entry['defense'] == 'none' and os.path.exists(os.path.join(_GIVEN.folder, f'{leaderboard.name(entry)}.json'))

  made = leaderboard.entries(found, settings, costs)
  _write([entry for entry in made if _GIVEN.replace or not known(entry)], _GIVEN.replace)


def _write(entries, replace=True):
  """Writes entries into the folder, and prints their paths."""
  from gradleak.studies.autoleak import leaderboard

  for path in leaderboard.add_all(_GIVEN.folder, entries, replace):
    print(path)


def _costs(found):
  """Returns defense -> its cost by --costs; from trainings, only for the defenses in `found`, by their texts."""
  if not os.path.isdir(_GIVEN.costs):
    return _read(_GIVEN.costs, 'expected a JSON file for --costs')
  known, texts = _of_training(found.config), {label: of['text'] for label, of in found.defenses.items()}
  return {label: known[text] for label, text in texts.items() if text in known}


def _of_training(task):
  """Returns text of a defense -> its cost in the trainings of --costs; says where these have no digests."""
  from gradleak.studies.autoleak import costs

  found = costs.of_training(_GIVEN.costs, task)
  if not costs.verified(_GIVEN.costs):
    _program.say(
      f'the trainings in {_GIVEN.costs} are of an earlier version, without digests, and are taken as they are'
    )
  return {cost.text or label: cost for label, cost in found.items()}


def _price():
  """Writes what the defenses cost in the trainings of --costs into the files of the same task."""
  from gradleak.core import errors
  from gradleak.studies.autoleak import costs, leaderboard

  task = costs.task_of(_GIVEN.costs)

  entries = leaderboard.read(_GIVEN.folder).values()
  same = [entry for entry in entries if costs.alike(task, costs.task_of_entry(entry))]
  if not same:
    raise errors.UsageError(f'no file of {_GIVEN.folder} is of the task that was trained in {_GIVEN.costs}')
  found = _of_training(task)
  _write([leaderboard.priced(entry, found[entry['text']]) for entry in same if entry['text'] in found])


def _identify():
  """Writes how many originals --identified ranks first into the files of the same task."""
  from gradleak.core import errors
  from gradleak.studies import identification
  from gradleak.studies.autoleak import leaderboard

  found = identification.load(_GIVEN.identified)
  entries = [leaderboard.identified(entry, found) for entry in leaderboard.read(_GIVEN.folder).values()]
  entries = [entry for entry in entries if entry is not None]
  if not entries:
    raise errors.UsageError(f'no file of {_GIVEN.folder} is of the task and a defense of {_GIVEN.identified}')
  _write(entries)


def _read(path, otherwise):
  """Returns the object in a JSON file."""
  from gradleak.core import errors
  from gradleak.core.storage import read_json

  try:
    return read_json(path, otherwise, dict)
  except FileNotFoundError:
    raise errors.UsageError(f'there is no {path}: {otherwise}') from None


def _check():
  from gradleak.core import errors
  from gradleak.studies.autoleak import VERSION, leaderboard

  known = leaderboard.read(_GIVEN.folder)
  entry = known[errors.check_choice('name of the leaderboard', _GIVEN.check, list(known))]
  workdir = errors.check_path('workdir', _GIVEN.workdir or '')
  if (workdir / 'autoleak.json').exists():
    raise errors.UsageError(f'{workdir} holds a finished run: choose a new folder for --workdir')
  if entry['versions']['autoleak'] != VERSION:
    raise errors.UsageError(
      f'{_GIVEN.check} is of {entry["versions"]["autoleak"]}, and this version runs {VERSION}: gradleak '
      f'{entry["versions"]["gradleak"]} can check it'
    )
  if entry['settings'] is None:
    raise errors.UsageError(f'{_GIVEN.check} was not made by launch/autoleak.py: its settings are not known')
  if (expected := entry['task']['more'].get('weights')) and not _GIVEN.weights:
    raise errors.UsageError(f'{_GIVEN.check} is of a model with the weights of {expected}: give --weights=FILE')
  where = {'workdir': workdir, **{name: getattr(_GIVEN, name) for name in PASSED}}
  given = [f'--{name}={value}' for name, value in {**entry['settings'], **where}.items() if value is not None]
  done = subprocess.run([*_program.command('autoleak'), *given], check=False)
  if done.returncode:
    sys.exit(done.returncode)  # it has said why
  differing = leaderboard.compare(entry, leaderboard.load(workdir))
  print('\n'.join([f'{_GIVEN.check}:', *differing]) if differing else f'{_GIVEN.check}: the same counts, the same bits')
  if any(not said.startswith(leaderboard.ROUNDED) for said in differing):
    sys.exit(1)
  if differing:
    print('The counts are the same.')


def _page():
  from gradleak.report import write_leaderboard

  write_leaderboard(_GIVEN.folder, _GIVEN.page)
  print(f'page: {_GIVEN.page}')


if __name__ == '__main__':
  _program.run(main)
