"""Reruns a table of a paper, of attacks or of trainings, and shows our numbers and the paper's.

    python launch/reproduce.py --list
    python launch/reproduce.py --experiment=graddefense_2a --data_dir=data
    python launch/reproduce.py --experiment=outpost_3_1 --scale=paper --data_dir=data --workdir=results/outpost_3_1

Each audit of the table has a folder of its own in the work directory, with its report, and so have the trainings of
each dataset, with their curves; table.md and table.csv are in the work directory itself. A run that was stopped
continues from its last checkpoint when the same command is given again.
"""

import os

from absl import flags

from launch import _program

with _program.group('what is reproduced'):
  _EXPERIMENT = flags.DEFINE_string('experiment', None, 'Name of the table; --list prints all.')
  _LIST = flags.DEFINE_boolean('list', False, 'Print all experiments with a rough estimate of their cost.')
  _SCALE = flags.DEFINE_string('scale', 'mini', 'mini: for two cores; paper: as published; smoke: a quick check.')
  _DATA_DIR = flags.DEFINE_string('data_dir', None, 'Folder with prepared TFDS datasets (launch/prepare_data.py).')
  _WEIGHTS = flags.DEFINE_string('weights', None, 'PyTorch weights of a trained model, in place of training it.')
  _LPIPS_BACKBONE = flags.DEFINE_string('lpips_backbone', 'alex', 'Network of LPIPS: alex, vgg or squeeze.')
  _LPIPS_WEIGHTS = flags.DEFINE_string(
    'lpips_weights', None, "File of torchvision's weights of that network; without it LPIPS is n/a."
  )
  _LPIPS_HEADS = flags.DEFINE_string('lpips_heads', None, "File of LPIPS's own weights for it (version 0.1).")
with _program.group('run'):
  _WORKDIR = flags.DEFINE_string('workdir', None, 'Folder for results; by default results/EXPERIMENT-SCALE.')
  _SEED = flags.DEFINE_integer('seed', 0, 'Seed of weights, training, noise and starts.')
  _PROGRESS = flags.DEFINE_string('progress', 'auto', 'auto, bar, lines or none.')
  _CACHE = _program.define_cache()


def main(argv: list[str]) -> None:
  """Runs the experiment that the flags name, and prints and writes its table."""
  del argv
  _program.configure(_CACHE)

  import experiments
  from experiments import experiment as machinery
  from gradleak import errors
  from gradleak.progress import reporter
  from gradleak.storage import write_atomically

  if _LIST.value:
    print(_listing(experiments.REGISTRY.values(), machinery))
    return
  if _EXPERIMENT.value is None:
    raise errors.UsageError(f'--experiment=… is needed (valid: {", ".join(sorted(experiments.REGISTRY))})')
  experiment = experiments.get(_EXPERIMENT.value)
  errors.check_number('seed', _SEED.value, low=0, high=2**32 - 1, integer=True)
  if _WEIGHTS.value is not None:
    experiment = machinery.with_weights(experiment, _WEIGHTS.value)
  lpips = _LPIPS_WEIGHTS.value, _LPIPS_HEADS.value
  if lpips != (None, None):
    experiment = machinery.with_lpips(experiment, _LPIPS_BACKBONE.value, *lpips)
  runs = {name: run.scaled(_SCALE.value) for name, run in experiment.runs.items()}
  reporter(_PROGRESS.value)  # an unknown mode is an error before the data are read
  workdir = _WORKDIR.value or os.path.join('results', f'{experiment.name}-{_SCALE.value}')
  flags.FLAGS.workdir = workdir  # so that an interruption names it
  _program.say(f'reading the data of {experiment.name} …')
  data = {name: run.load(_DATA_DIR.value) for name, run in runs.items()}  # an error for missing data comes first

  rows = {}
  for index, (name, run) in enumerate(runs.items()):
    print(f'{experiment.name}, {run.kind} {index + 1} of {len(runs)}: {name}', flush=True)
    folder = os.path.join(workdir, name)
    rows[name] = run.execute(data[name], _SEED.value, workdir=folder, progress=_PROGRESS.value)

  outcomes = [runs[cell.run].outcome(cell, machinery.gains(cell, rows)) for cell in experiment.cells]
  table = machinery.markdown(experiment, _SCALE.value, _SEED.value, outcomes)
  write_atomically(os.path.join(workdir, 'table.md'), table)
  write_atomically(os.path.join(workdir, 'table.csv'), machinery.table_csv(experiment, _SCALE.value, outcomes))
  print(f'\n{experiment.table}\n{experiment.metrics}\n')
  print(machinery.terminal(experiment, _SCALE.value, _SEED.value, outcomes))
  print('\n' + '\n'.join(machinery.settings(experiment, _SCALE.value, _SEED.value)))
  print(f'\ntable: {os.path.join(workdir, "table.md")}')
  for name, run in runs.items():
    print(f'{run.shown}: {os.path.join(workdir, name, run.page)}')


def _listing(experiments, machinery):
  lines = [f'{"experiment":24} {"mini":>8} {"paper":>8}  table']
  for experiment in experiments:
    costs = [machinery.duration(machinery.minutes(experiment, scale)) for scale in ('mini', 'paper')]
    lines.append(f'{experiment.name:24} {costs[0]:>8} {costs[1]:>8}  {experiment.table}')
  return '\n'.join([*lines, '', 'mini, paper: rough estimates of the time on two idle cores.'])


if __name__ == '__main__':
  _program.run(main)
