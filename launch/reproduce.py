"""Reruns a table of a paper, of attacks or of trainings, and shows our numbers and the paper's.

    python launch/reproduce.py --list
    python launch/reproduce.py --experiment=graddefense_2a --data_dir=data
    python launch/reproduce.py --experiment=outpost_3_1 --scale=paper --data_dir=data --workdir=results/outpost_3_1
    python launch/reproduce.py --all --budget=2h --data_dir=data
    python launch/reproduce.py --pages=docs/results

Each audit of the table has its own folder in the work directory, with its report. The trainings of each dataset have a
folder with their curves. The files table.md and table.csv stand in the work directory itself. A run that was stopped
continues from its last checkpoint when the same command is given again.

The rows behind a table's figures are stored in --results, with settings, seed, versions and revision. The flag --all
runs every table that is not stored there, the cheapest first, as many as fit into --budget. The flag --pages makes
pages of the stored rows.
"""

import os
import time

from absl import flags

from launch import _program

with _program.group('one of'):
  _EXPERIMENT = flags.DEFINE_string('experiment', None, 'Name of the table; --list prints all.')
  _LIST = flags.DEFINE_boolean('list', False, 'Print all experiments with a rough estimate of their cost.')
  _ALL = flags.DEFINE_boolean('all', False, 'Run every table that is not in --results, the cheapest first.')
  _PAGES = flags.DEFINE_string('pages', None, 'Folder for pages of all tables that are in --results.')
with _program.group('what is reproduced'):
  _SCALE = flags.DEFINE_string('scale', 'mini', 'mini: for two cores; paper: as published; smoke: a quick check.')
  _BUDGET = flags.DEFINE_string('budget', '2h', 'all: Time for all tables together, such as 90min or 2h.')
  _DATA_DIR = flags.DEFINE_string('data_dir', None, 'Folder with prepared TFDS datasets (launch/prepare_data.py).')
  _WEIGHTS = flags.DEFINE_string('weights', None, 'PyTorch weights of a trained model, in place of training it.')
  _LPIPS_BACKBONE = flags.DEFINE_string('lpips_backbone', 'alex', 'Network of LPIPS: alex, vgg or squeeze.')
  _LPIPS_WEIGHTS = flags.DEFINE_string(
    'lpips_weights', None, "File of torchvision's weights of that network; without it LPIPS is n/a."
  )
  _LPIPS_HEADS = flags.DEFINE_string('lpips_heads', None, "File of LPIPS's own weights for it (version 0.1).")
with _program.group('run'):
  _WORKDIR = flags.DEFINE_string('workdir', None, 'Folder of a table, by default results/EXPERIMENT-SCALE.')
  _RESULTS = flags.DEFINE_string(
    'results', 'results/tables', 'Folder of stored results; runs with given weights are not stored. Empty: none.'
  )
  _SEED = flags.DEFINE_integer('seed', 0, 'Seed of weights, training, noise and starts.')
  _PROGRESS = flags.DEFINE_string('progress', 'auto', 'auto, bar, lines or none.')
  _CACHE = _program.define_cache()

_LEAST = 60.0  # seconds that a table takes: imports, data, compilation, pictures


def main(argv: list[str]) -> None:
  """Runs what the flags name, and prints and writes its table."""
  del argv
  _program.configure(_CACHE)

  import experiments
  from experiments import experiment as machinery
  from experiments import pages
  from gradleak.core import errors
  from gradleak.engine.progress import reporter

  errors.check_number('seed', _SEED.value, low=0, high=2**32 - 1, integer=True)
  errors.check_choice('scale', _SCALE.value, machinery.SCALES)
  reporter(_PROGRESS.value)  # an unknown mode is an error before the data are read
  if not _RESULTS.value and (_ALL.value or _PAGES.value is not None):
    raise errors.UsageError('--all and --pages need a folder of stored results: --results=results/tables')
  if _LIST.value:
    print(_listing(experiments.REGISTRY.values(), machinery))
  elif _PAGES.value is not None:
    print('\n'.join(pages.write(_PAGES.value, _RESULTS.value, experiments.REGISTRY, _SCALE.value)))
  elif _ALL.value:
    _all(experiments.REGISTRY)
  elif _EXPERIMENT.value is not None:
    _one(experiments.get(_EXPERIMENT.value))
  else:
    raise errors.UsageError(f'--experiment=… is needed (valid: {", ".join(sorted(experiments.REGISTRY))}), or --all')


def _one(experiment):
  """Runs a table."""
  from experiments import experiment as machinery
  from experiments import results, table
  from gradleak.core.storage import write_atomically

  given = _WEIGHTS.value, _LPIPS_WEIGHTS.value, _LPIPS_HEADS.value
  if _WEIGHTS.value is not None:
    experiment = machinery.with_weights(experiment, _WEIGHTS.value)
  if given[1:] != (None, None):
    experiment = machinery.with_lpips(experiment, _LPIPS_BACKBONE.value, *given[1:])
  runs = {name: run.scaled(_SCALE.value) for name, run in experiment.runs.items()}
  workdir = _WORKDIR.value or os.path.join('results', f'{experiment.name}-{_SCALE.value}')
  flags.FLAGS.workdir = workdir  # so that an interruption names it
  _program.say(f'reading the data of {experiment.name} …')
  data = {name: run.load(_DATA_DIR.value) for name, run in runs.items()}  # an error for missing data comes first

  rows, clock = {}, results.Clock(workdir)
  for index, (name, run) in enumerate(runs.items()):
    print(f'{experiment.name}, {run.kind} {index + 1} of {len(runs)}: {name}', flush=True)
    folder = os.path.join(workdir, name)
    with clock.timed(name):
      rows[name] = run.execute(data[name], _SEED.value, workdir=folder, progress=_PROGRESS.value)

  outcomes = [runs[cell.run].outcome(cell, machinery.gains(cell, rows)) for cell in experiment.cells]
  shown = experiment, _SCALE.value, _SEED.value, outcomes
  write_atomically(os.path.join(workdir, 'table.md'), table.markdown(*shown))
  write_atomically(os.path.join(workdir, 'table.csv'), table.table_csv(experiment, _SCALE.value, outcomes))
  if _RESULTS.value and given == (None, None, None):
    pictures = [os.path.join(workdir, name, run.pictured) for name, run in runs.items()]
    results.store(_RESULTS.value, experiment, _SCALE.value, _SEED.value, rows, clock.seconds, pictures)
  print(f'\n{experiment.table}\n{experiment.metrics}\n')
  print(table.terminal(*shown))
  print('\n' + '\n'.join(table.settings(experiment, _SCALE.value, _SEED.value)))
  print(f'\ntable: {os.path.join(workdir, "table.md")}')
  for name, run in runs.items():
    print(f'{run.shown}: {os.path.join(workdir, name, run.page)}')


def _all(registry):
  """Runs the tables that are not stored, each in a process of its own, and says which did not fit or failed."""
  from experiments import experiment as machinery
  from experiments import results
  from gradleak.core import errors

  budget, started = _seconds(_BUDGET.value), time.monotonic()
  known = results.read(_RESULTS.value, _SCALE.value)
  waiting = [one for one in registry.values() if not results.done(known.get(one.name), one, _SEED.value)]
  waiting.sort(key=lambda one: machinery.minutes(one, _SCALE.value))
  print(f'{len(registry) - len(waiting)} of {len(registry)} tables are stored in {_RESULTS.value}', flush=True)
  spent, foreseen, failed, late = 0.0, 0.0, [], []
  for index, experiment in enumerate(waiting):
    left = budget - (time.monotonic() - started)
    estimate = max(60 * machinery.minutes(experiment, _SCALE.value), _LEAST)
    expected = estimate * (spent / foreseen if foreseen else 1)  # as this machine has kept to the estimates so far
    if left <= 0 or (expected > left and foreseen):
      late.append(experiment.name)
      continue
    print(f'\ntable {index + 1} of {len(waiting)}: {experiment.name}, about {machinery.duration(expected / 60)}; '
          f'{machinery.duration(left / 60)} of the budget left', flush=True)  # fmt: skip
    begun = time.monotonic()
    status = _child(experiment.name, left)
    spent, foreseen = spent + time.monotonic() - begun, foreseen + estimate
    if status is None:
      late.append(experiment.name)
    elif status:
      failed.append(experiment.name)
  print(f'\n{len(waiting) - len(late) - len(failed)} tables were run; {len(registry) - len(late) - len(failed)} of '
        f'{len(registry)} are stored')  # fmt: skip
  if late:
    print(f'outside of the budget, give the same command again: {", ".join(late)}')
  if failed:
    raise errors.UsageError(f'these failed, see above: {", ".join(failed)}')


def _child(name, seconds):
  """Runs a table in a process of its own; returns its status, or None where the time was over."""
  import subprocess

  flags_of = {'scale': _SCALE, 'results': _RESULTS, 'seed': _SEED, 'progress': _PROGRESS, 'data_dir': _DATA_DIR}
  given = [f'--{flag}={holder.value}' for flag, holder in flags_of.items() if holder.value is not None]
  workdir = os.path.join(_WORKDIR.value or 'results', f'{name}-{_SCALE.value}')
  given += [f'--experiment={name}', f'--workdir={workdir}', f'--{_CACHE.name}={_CACHE.value}']
  child = subprocess.Popen([*_program.command('reproduce'), *given])
  try:
    return child.wait(seconds)
  except subprocess.TimeoutExpired:
    return None
  finally:
    if child.poll() is None:
      child.terminate()  # it continues from its last checkpoint another time
      try:
        child.wait(60)
      except subprocess.TimeoutExpired:
        child.kill()


def _seconds(text):
  """Returns the seconds of a text such as '90min' or '1h 30min'."""
  import re

  from gradleak.core import errors

  units = {'h': 3600, 'min': 60, 'm': 60, 's': 1}
  part = r'(\d+(?:\.\d+)?)\s*(h|min|m|s)\s*'
  if not re.fullmatch(f'({part})+', text.strip()):
    raise errors.UsageError(f'budget is {errors.shown(text)}, expected a time such as 90min or 2h')
  return sum(float(number) * units[unit] for number, unit in re.findall(part, text))


def _listing(experiments, machinery):
  lines = [f'{"experiment":24} {"mini":>8} {"paper":>8}  table']
  for experiment in experiments:
    costs = [machinery.duration(machinery.minutes(experiment, scale)) for scale in ('mini', 'paper')]
    lines.append(f'{experiment.name:24} {costs[0]:>8} {costs[1]:>8}  {experiment.table}')
  return '\n'.join([*lines, '', 'mini, paper: rough estimates of the time on two idle cores.'])


if __name__ == '__main__':
  _program.run(main)
