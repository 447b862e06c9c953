"""Reruns a table of a paper, of attacks or of trainings, and shows our numbers and the paper's.

    python launch/reproduce.py --list
    python launch/reproduce.py --experiment=graddefense_2a --data_dir=data
    python launch/reproduce.py --experiment=outpost_3_1 --scale=paper --data_dir=data --workdir=results/outpost_3_1
    python launch/reproduce.py --all --budget=2h --data_dir=data
    python launch/reproduce.py --all --scale=paper --dry_run
    python launch/reproduce.py --pages=results/pages

Each audit of the table has its own folder in the work directory, with its report. The trainings of each dataset have a
folder with their curves. The files table.md and table.csv stand in the work directory itself. A run that was stopped
continues from its last checkpoint when the same command is given again.

The folder `--results` holds the rows behind each table's figures, with settings, seed, versions, revision and time.
With `--all`, every table runs that is not stored there, within a `--budget` of time. Tables that were stored before,
with other settings, come first, by the time that they took. With `--cluster`, processes share the runs of one table, or
the tables of `--all`. Pages of what is stored are made by `--pages`.

With `--dry_run`, nothing is computed and no data are needed. Every program of the tables is traced and its operations
are counted, which takes minutes. The hours follow from rates that are measured here, or from `--rate`. Forecasts are
kept in the work directory, and `--all` runs the tables of fewer operations first.
"""

import gc
import math
import os
import time

from absl import flags

from launch import _cluster, _program
from launch._flags import Flags

_GIVEN = Flags()
with _program.group('one of'):
  _GIVEN.string('experiment', None, 'Name of the table; --list prints all.')
  _GIVEN.boolean('list', False, 'Print all experiments, with the time that stored ones took.')
  _GIVEN.boolean('all', False, 'Run every table that is not in --results.')
  _GIVEN.string('pages', None, 'Folder for pages of all tables that are in --results.')
with _program.group('what is reproduced'):
  _GIVEN.string('scale', 'mini', 'mini: for two cores; paper: as published; smoke: a quick check.')
  _GIVEN.string('budget', '2h', 'all: Time for all tables together, such as 90min or 2h.')
  _GIVEN.boolean('dry_run', False, 'Trace all programs, count their operations and print the hours, computing nothing.')
  _GIVEN.float('rate', None, 'dry_run: operations of a device per second; None measures those of this one.')
  _GIVEN.shared('data_dir', 'weights', weights=(None, 'PyTorch weights of a trained model, in place of training it.'))
  _GIVEN.string('lpips_backbone', 'alex', 'Network of LPIPS: alex, vgg or squeeze.')
  _GIVEN.string('lpips_weights', None, "torchvision's weights of that network; without them LPIPS is n/a.")
  _GIVEN.string('lpips_heads', None, "File of LPIPS's own weights for it (version 0.1).")
with _program.group('run'):
  _GIVEN.string(
    'results', 'results/tables', 'Folder of stored results; runs with given weights are not stored. Empty: none.'
  )
  workdir = 'Folder of a table, by default results/EXPERIMENT-SCALE.'
  _GIVEN.shared('workdir', 'seed', 'progress', 'compilation_cache', workdir=(None, workdir))
_cluster.define(_GIVEN)
_WEIGHTS = 'weights', 'lpips_weights', 'lpips_heads'


def main(argv: list[str]) -> None:
  """Runs what the flags name, and prints and writes its table."""
  _GIVEN.configure()

  import experiments
  from experiments import pages, study
  from gradleak.core import errors

  errors.check_choice('scale', _GIVEN.scale, study.SCALES)
  _check_flags()
  if not _GIVEN.results and (_GIVEN.all or _GIVEN.pages is not None):
    raise errors.UsageError('--all and --pages need a folder of stored results: --results=results/tables')
  if _GIVEN.list:
    print(_listing(experiments.REGISTRY))
  elif _GIVEN.pages is not None:
    print('\n'.join(pages.write(_GIVEN.pages, _GIVEN.results, experiments.REGISTRY, _GIVEN.scale)))
  elif _GIVEN.dry_run:
    named = None if _GIVEN.experiment is None else experiments.get(_GIVEN.experiment)
    _dry_run([*experiments.REGISTRY.values()] if named is None else [named])
  elif _GIVEN.all:
    _all(experiments.REGISTRY)
  elif _GIVEN.experiment is not None:
    _one(experiments.get(_GIVEN.experiment))
  else:
    raise errors.UsageError(f'--experiment=… is needed (valid: {", ".join(sorted(experiments.REGISTRY))}), or --all')


def _check_flags():
  """Raises `UsageError` for flags that would have no effect beside others."""
  from gradleak.core import errors

  of = [name for name in ('experiment', 'list', 'all', 'pages') if getattr(_GIVEN, name)]
  if len(of) > 1:
    raise errors.UsageError(f'give one of {" and ".join(f"--{name}" for name in of)}: each does something else')
  shares, shown = ('cluster', 'process', 'processes'), of in (['list'], ['pages'])
  wanted = {
    '--all': ('budget',) if of != ['all'] else (),
    '--dry_run': ('rate',) if not _GIVEN.dry_run else (),
    '--all or --experiment, without --dry_run': (*shares, 'seed') if _GIVEN.dry_run or shown else (),
    '--experiment, whose runs they share, or to --cluster': shares[1:] if of == ['all'] and not _GIVEN.cluster else (),
    '--experiment, whose run is then not stored': _WEIGHTS if of != ['experiment'] or _GIVEN.dry_run else (),
    '--lpips_weights': ('lpips_backbone',) if _GIVEN.lpips_weights is _GIVEN.lpips_heads is None else (),
    '--all or --experiment': ('dry_run', 'data_dir', 'workdir') if shown else (),
  }
  for what, names in wanted.items():
    for name in filter(_GIVEN.present, names):
      raise errors.UsageError(f'--{name} has no effect here: it belongs to {what}')


def _one(experiment):
  """Runs a table."""
  from experiments import experiment as machinery
  from experiments import results, table
  from gradleak.core import errors
  from gradleak.core.storage import write_atomically

  given = _GIVEN.weights, _GIVEN.lpips_weights, _GIVEN.lpips_heads
  if _GIVEN.weights is not None:
    experiment = machinery.with_weights(experiment, _GIVEN.weights)
  if given[1:] != (None, None):
    experiment = machinery.with_lpips(experiment, _GIVEN.lpips_backbone, *given[1:])
  runs = {name: run.scaled(_GIVEN.scale) for name, run in experiment.runs.items()}
  workdir = _GIVEN.workdir or os.path.join('results', f'{experiment.name}-{_GIVEN.scale}')
  flags.FLAGS.workdir = workdir  # so that an interruption names it
  if _cluster.shared(_GIVEN, 'reproduce', len(runs), workdir):
    return
  rank, processes = _cluster.rank(_GIVEN)
  errors.check_number('processes', processes, low=1, high=len(runs), integer=True)
  errors.check_number('process', rank, low=0, high=processes - 1, integer=True)
  runs = dict([*runs.items()][rank::processes])
  _program.say(f'reading the data of {experiment.name} …')
  data = {name: run.load(_GIVEN.data_dir) for name, run in runs.items()}  # an error for missing data comes first

  rows, clock = {}, results.Clock(workdir)
  for index, (name, run) in enumerate(runs.items()):
    print(f'{experiment.name}, {run.kind} {index + 1} of {len(runs)}: {name}', flush=True)
    folder = os.path.join(workdir, name)
    complete = clock.complete(name, run)
    with clock.timed(name, run):
      rows[name] = run.execute(data[name], _GIVEN.seed, workdir=folder, progress=_GIVEN.progress)
    if not complete:
      _program.say(f'{index + 1} of {len(runs)} in {machinery.duration(clock.seconds)}')

  if processes > 1:
    print(f'process {rank} of {processes} has done its runs; the command without it writes the table.')
    return
  outcomes = [runs[cell.run].outcome(cell, machinery.gains(cell, rows)) for cell in experiment.cells]
  shown = experiment, _GIVEN.scale, _GIVEN.seed, outcomes
  write_atomically(os.path.join(workdir, 'table.md'), table.markdown(*shown))
  write_atomically(os.path.join(workdir, 'table.csv'), table.table_csv(experiment, _GIVEN.scale, outcomes))
  if _GIVEN.results and given == (None, None, None):
    pictures = [os.path.join(workdir, name, run.pictured) for name, run in runs.items()]
    results.store(_GIVEN.results, experiment, _GIVEN.scale, _GIVEN.seed, rows, clock.seconds, pictures)
  print(f'\n{experiment.table}\n{experiment.metrics}\n')
  print(table.terminal(*shown))
  print('\n' + '\n'.join(table.settings(experiment, _GIVEN.scale, _GIVEN.seed)))
  print(f'\ntable: {os.path.join(workdir, "table.md")}')
  for name, run in runs.items():
    print(f'{run.shown}: {os.path.join(workdir, name, run.page)}')


def _dry_run(tables):
  """Prints what tables take; those whose programs do not fit together are an error in the end."""
  from experiments import forecast
  from gradleak.core import errors

  if _GIVEN.rate is not None:
    errors.check_number('rate', _GIVEN.rate, low=1, finite=True)
    rates = forecast.Rates(_GIVEN.rate, _GIVEN.rate)
  else:
    _program.say('measuring what this device does in a second …')
    rates = forecast.measured_rates()
  print(f'rates: {rates}', flush=True)
  found, folder = [], _forecasts()
  gc.set_threshold(200_000, 50, 50)  # traced programs stay: to go through them again and again takes long
  for index, one in enumerate(tables):
    known = forecast.read(folder, one, _GIVEN.scale)
    if known is None:
      _program.say(f'tracing {one.name}, table {index + 1} of {len(tables)} …')
      known = forecast.forecast(one, _GIVEN.scale)
      forecast.keep(folder, known)
    found.append(known)
  lacking = {one.name: forecast.missing(one, _GIVEN.scale, _GIVEN.data_dir) for one in tables}
  print('\n' + forecast.shown(found, rates, lacking))
  failed = [one.experiment for one in found if one.error]
  if failed:
    raise errors.UsageError(f'programs of these do not fit together, see above: {", ".join(failed)}')


def _forecasts():
  """Returns the folder of the forecasts of this scale."""
  return os.path.join(_folder(), f'forecast-{_GIVEN.scale}')


def _all(registry):
  """Runs the tables that are not stored, each in a process of its own, and says which did not fit or failed."""
  from experiments import results
  from gradleak.core import errors

  budget = _seconds(_GIVEN.budget)
  known = results.read(_GIVEN.results, _GIVEN.scale)
  waiting = [one.name for one in registry.values() if not results.done(known.get(one.name), one, _GIVEN.seed)]
  order = {name: (0, known[name].seconds) if name in known else (1, _forecast_of(registry[name])) for name in waiting}
  waiting.sort(key=order.__getitem__)
  print(f'{len(registry) - len(waiting)} of {len(registry)} tables are stored in {_GIVEN.results}', flush=True)
  ended = _on_cluster(waiting, budget) if _GIVEN.cluster is not None else _in_turn(waiting, known, budget)
  failed = [name for name in waiting if ended.get(name)]
  late = [name for name in waiting if ended.get(name) is None]
  print(f'\n{_summary(registry, ended)}')
  print(f'\n{len(waiting) - len(late) - len(failed)} tables were run; {len(registry) - len(late) - len(failed)} of '
        f'{len(registry)} are stored')  # fmt: skip
  if late:
    print(f'outside of the budget, give the same command again: {", ".join(late)}')
  if failed:
    raise errors.UsageError(f'these failed, see above: {", ".join(failed)}')


def _forecast_of(one):
  """Returns the operations of a table that a dry run has counted, by which tables are ordered; else infinity."""
  from experiments import forecast

  found = forecast.read(_forecasts(), one, _GIVEN.scale)
  return math.inf if found is None else found.operations.products + found.operations.entries


def _summary(registry, ended):
  """Returns a line for each table: whether it is stored, failed or left, and the hours that it took."""
  from experiments import results
  from gradleak.report.formatting import aligned

  known = results.read(_GIVEN.results, _GIVEN.scale)
  lines = [('table', 'hours', 'state')]
  for name, one in registry.items():
    there = results.done(known.get(name), one, _GIVEN.seed)
    state = 'failed' if ended.get(name) else 'run now' if name in ended and there else 'stored' if there else 'left'
    lines.append((name, f'{known[name].seconds / 3600:.2f}' if there else '–', state))
  return '\n'.join(aligned(lines))


def _in_turn(waiting, known, budget):
  """Runs tables here, one after the other; returns their exit statuses, without those that do not fit."""
  from experiments import results
  from experiments.experiment import duration

  started, ended = time.monotonic(), {}
  for index, name in enumerate(waiting):
    spent = time.monotonic() - started
    left = budget - spent
    if left <= 0 or (index and name in known and known[name].seconds > left):
      continue
    before = f', which {results.took(known[name])}' if name in known else ''
    print(f'\ntable {index + 1} of {len(waiting)}: {name}{before}; {duration(spent)} so far, {duration(left)} of the '
          'budget left', flush=True)  # fmt: skip
    ended[name] = _child(name, left)
  return ended


def _on_cluster(waiting, budget):
  """Runs tables on the cluster, in that order, as many at a time as have room; returns as `_in_turn`."""
  if not waiting:
    return {}
  with _cluster.each(_GIVEN, 'reproduce', {name: _flags_of(name) for name in waiting}, _folder(), budget) as ended:
    return dict(ended)


def _child(name, seconds):
  """Runs a table in a process of its own; returns its status, or None where the time was over."""
  import subprocess

  cores = [] if _GIVEN.cores is None else [f'--cores={_GIVEN.cores}']
  child = subprocess.Popen([*_program.command('reproduce'), *_flags_of(name), *cores])
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


def _flags_of(name):
  """Returns the flags by which a process runs one of all tables."""
  passed = ('scale', 'results', 'seed', 'progress', 'data_dir', 'compilation_cache')
  given = [f'--{flag}={getattr(_GIVEN, flag)}' for flag in passed if getattr(_GIVEN, flag) is not None]
  return [*given, f'--experiment={name}', f'--workdir={os.path.join(_folder(), f"{name}-{_GIVEN.scale}")}']


def _folder():
  """Returns the folder of all tables' work directories."""
  return _GIVEN.workdir or 'results'


def _seconds(text):
  """Returns the seconds of a text such as '90min' or '1h 30min'."""
  import re

  from gradleak.core import errors

  units = {'h': 3600, 'min': 60, 'm': 60, 's': 1}
  part = r'(\d+(?:\.\d+)?)\s*(h|min|m|s)\s*'
  if not re.fullmatch(f'({part})+', text.strip()):
    raise errors.UsageError(f'budget is {errors.shown(text)}, expected a time such as 90min or 2h')
  return sum(float(number) * units[unit] for number, unit in re.findall(part, text))


def _listing(registry):
  """Returns a line per table, with the time that it took where it is stored."""
  from experiments import results

  known = results.read(_GIVEN.results, _GIVEN.scale) if _GIVEN.results else {}
  lines = [f'{name:24} {results.took(known[name]) if name in known else "not stored":22} {one.table}'
           for name, one in registry.items()]  # fmt: skip
  return '\n'.join([f'{"experiment":24} {f"at scale {_GIVEN.scale}":22} table', *lines])


if __name__ == '__main__':
  _program.run(main)
