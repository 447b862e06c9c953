r"""Attacks a grid of models, seeds, defenses and attacks, alone or shared among processes and hosts.

    python launch/sweep.py --dataset=digits --models='mlp;lenet' --seeds=2 --trials=8 --steps=300 \
      --defenses='none;gaussian(stddev=0|1e-3|1e-2|1e-1);prune(rate=0.5|0.9)' --workdir=results/sweep

`|` spans a grid of a setting's values. Everything numeric is traced, so each network and attack compiles once. With
--cluster, processes share the trials, started by Ray or by Slurm. Those that are started by hand have their ranks from
--process and --processes, or from Slurm's environment (launch/slurm/sweep.sbatch). They share nothing but the work
directory. One that dies can be started again without the others.
"""

import os
import re
import sys

from gradleak import registry
from gradleak.core import errors, grammar
from gradleak.core.storage import write_atomically
from gradleak.modalities import of_rows
from gradleak.report import strengths, sweep_csv, sweep_summaries, write
from gradleak.report.formatting import aligned, number, percent_range, plus_minus
from gradleak.report.page import is_current
from gradleak.studies.sweep import sweep
from gradleak.summary.cases import paired
from launch import _audited, _cluster, _program

_GIVEN = _audited.define(
  defenses='none;gaussian(stddev=1e-3|1e-2|1e-1);prune(rate=0.5|0.9|0.99)',
  trials=16,
  workdir='results/sweep',
)
with _program.group('what is audited'):
  _GIVEN.string('models', 'lenet', "List separated by ';'; 'convnet(width=8|16)' spans a grid.")
  _GIVEN.string('seeds', '1', "How many seeds, from 0 on; or a list such as '3;5;8'.")
with _program.group('run'):
  _GIVEN.integer('shards', None, 'Into how many parts the trials are cut; by default one per process.')
_cluster.define(_GIVEN, process='Rank of this process; by default as Slurm says in its environment, or 0.')

# Environment variables of the rank, of the first rank, and of the number of processes: array jobs, then tasks of a job.
_CLUSTERS = (
  ('SLURM_ARRAY_TASK_ID', 'SLURM_ARRAY_TASK_MIN', 'SLURM_ARRAY_TASK_COUNT'),
  ('SLURM_PROCID', None, 'SLURM_NTASKS'),
)


def main(_):
  """Runs the sweep, or this process's share of it, and prints its table."""
  _GIVEN.configure()
  if _cluster.shared(_GIVEN, 'sweep', _GIVEN.shards or _GIVEN.trials, _GIVEN.workdir):
    return
  registry.attacks(_GIVEN.attacks), registry.defenses(_GIVEN.defenses)  # an error comes before data are read
  seeds, process = _seeds(), _process()
  dataset, public = _audited.load(_GIVEN)
  defenses = registry.defenses(_GIVEN.defenses)
  audits = {}
  for model in _models(dataset, seeds[0]):
    for seed in seeds:
      own = _GIVEN.torch_model and not _GIVEN.weights
      drawn = _GIVEN.torch_variables(model, dataset.samples.shape[1:], seed) if own else None
      key, scenario = _audited.scenario(_GIVEN, model, seed, dataset, public, drawn)
      audits[f'{model.name}-seed{seed}'] = key, _audited.trained(seed, scenario)
  attacks = _audited.attacks(_GIVEN, audits.values())

  def on_result(folder, result):
    if not (result.resumed and is_current(folder)):
      write(result, folder)

  workdir = _GIVEN.workdir
  rows = sweep(
    audits,
    defenses,
    attacks,
    _GIVEN.trials,
    workdir=workdir,
    execution=_cluster.execution(_GIVEN, process=process),
    progress=_GIVEN.progress,
    say=lambda text: print(text, file=sys.stderr, flush=True),
    on_result=on_result,
    settings=_audited.settings(_GIVEN),
  )
  if rows is None:
    print(f'process {process[0]} of {process[1]} has done its share; the last one writes the tables.')
    return
  write_atomically(os.path.join(workdir, 'sweep.csv'), sweep_csv(rows))
  picture = strengths(rows, defenses)
  if picture is not None:
    write_atomically(os.path.join(workdir, 'sweep.png'), picture)
  print(_table(rows))
  print(f'\ntable: {os.path.join(workdir, "sweep.csv")}')
  if picture is not None:
    print(f'picture: {os.path.join(workdir, "sweep.png")}')
  for name in audits:
    print(f'report: {os.path.join(workdir, name, "report.html")}')


def _models(dataset, seed):
  """Yields the models that the flags describe; one of PyTorch is exported once for all seeds."""
  for name in [''] if _GIVEN.torch_model else grammar.parse_list(_GIVEN.models, 'model'):
    yield _GIVEN.network(_GIVEN.outputs(dataset), dataset.samples.shape[1:], seed, name)


def _seeds():
  """Returns the seeds that the flag describes."""
  texts = [text.strip() for text in _GIVEN.seeds.split(';')]
  if not all(re.fullmatch(r'-?[0-9]{1,20}', text) for text in texts):
    shown = errors.shown(_GIVEN.seeds)
    raise errors.UsageError(f"seeds is {shown}, expected a number of seeds or a list such as '3;5;8'")
  seeds = [int(text) for text in texts]
  if len(seeds) == 1 and ';' not in _GIVEN.seeds:
    errors.check_number('number of seeds', seeds[0], low=1, high=10_000, integer=True)
    return list(range(seeds[0]))
  for seed in seeds:
    errors.check_number('seed', seed, low=0, high=2**32 - 1, integer=True)
    if seeds.count(seed) > 1:
      raise errors.UsageError(f'the seed {seed} is listed twice')
  return seeds


def _process():
  """Returns (rank, number of processes), from the flags or the cluster's environment."""
  for rank, first, count in _CLUSTERS:
    if rank in os.environ and count in os.environ:
      told = int(os.environ[rank]) - int(os.environ.get(first, 0) if first else 0), int(os.environ[count])
      return _cluster.rank(_GIVEN, told)
  return _cluster.rank(_GIVEN)


def _table(rows):
  """Returns the summaries of all models as an aligned table."""
  score, *others = of_rows(rows).shown
  head = ('model / attack / defense', 'attacker', *(one.with_unit() for one in (score, *others)), 'recovered (95 %)')
  blank, lines = ('',) * (len(head) - 1), []
  for model, summaries in sweep_summaries(rows).items():
    lines.append((model, *blank))
    last = None
    for (attack, defense), pair in paired(summaries).items():
      if attack != last:
        lines.append((f'  {attack}', *blank))
        last = attack
      for summary in pair:
        share = f'{summary["recovered"]} of {summary["n"]} ({percent_range(summary)})'
        known = summary['adaptive'] or 'non-adaptive'
        more = (number(summary[one.column], one.digits) for one in others)
        lines.append((f'    {defense}', known, plus_minus(summary, score.column, score.digits), *more, share))
  return '\n'.join(aligned([head, *lines]))


if __name__ == '__main__':
  _program.run(main)
