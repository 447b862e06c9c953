"""Measures speed: against one trial at a time, other formulations, PyTorch and `breaching`, all in one run.

    python launch/benchmark.py
    python launch/benchmark.py --dataset=cifar10 --data_dir=data --model='convnet(width=8)' --trials=8
    python launch/benchmark.py --measure=scaling --sizes=8,64,512
    python launch/benchmark.py --measure=roofline --trials=2 --steps=20
    python launch/benchmark.py --measure=gpu --output=gpu.md
    python launch/benchmark.py --measure=schedule --dataset=cifar10 --data_dir=data --trials=32
    python launch/benchmark.py --measure=training --dataset=mnist --data_dir=data
    python launch/benchmark.py --measure=local_steps --model=resnet20
    python launch/benchmark.py --measure=generative --trials=32 --steps=10
    python launch/benchmark.py --measure=compilation --trials=32 --steps=100

Machines are noisy: variants are measured in turn, several times, and ratios are reported.
"""

import os
import re

from absl import flags

from launch import _program

with _program.group('what is measured'):
  _MEASURE = flags.DEFINE_string(
    'measure',
    'speed',
    'speed: variants and other packages; scaling: from few trials to many; roofline: against what the machine can do; '
    'gpu: models × trials against PyTorch, as Markdown; schedule: PSNR against time, --faster against --attack; '
    'training: a round of federated training, clients batched or in a loop; '
    'local_steps: memory and time of matching through many local steps; generative: evaluations of candidates by ggl; '
    "compilation: an attack with and without our options of XLA's, on CPU.",
  )
  _DATASET = flags.DEFINE_string('dataset', 'faces', 'As in launch/audit.py; resized to 32×32 RGB, but for training.')
  _DATA_DIR = flags.DEFINE_string('data_dir', None, 'Folder with prepared TFDS datasets.')
  _MODEL = flags.DEFINE_string('model', 'lenet', 'As in launch/audit.py.')
  _MODELS = flags.DEFINE_string(
    'models', None, "List separated by ';' for roofline, gpu, schedule and training; by default, their own."
  )
  _ATTACK = flags.DEFINE_string('attack', 'csdlg', 'One attack, as in launch/audit.py.')
  _FASTER = flags.DEFINE_string('faster', 'csdlg_fast', 'schedule: the attack that is to be faster than --attack.')
with _program.group('how much'):
  _TRIALS = flags.DEFINE_integer('trials', 64, 'speed, roofline, schedule: trials of the batched run.')
  _COMPARED = flags.DEFINE_integer('compared', 8, 'speed, gpu: the first trials, which other packages attack too.')
  _VARIANTS = flags.DEFINE_string(
    'variants', 'batched,single,formulations,pytorch,breaching', 'speed: some of these; ratios are against the first.'
  )
  _SIZES = flags.DEFINE_string(
    'sizes', None, 'scaling, gpu: numbers of trials; by default 8 to 512, and 1 to 1024. local_steps: numbers of them.'
  )
  _DEVICES = flags.DEFINE_integer('devices', 0, 'scaling: how many devices; 0 for all.')
  _GROUP_SIZE = flags.DEFINE_integer(
    'group_size', None, 'speed, scaling, roofline: trials per micro-group; by default, as audits.'
  )
  _GROUP_SIZES = flags.DEFINE_string('group_sizes', '64,256,1024', 'gpu: trials per micro-group to try.')
  _STEPS = flags.DEFINE_integer('steps', 200, 'Steps of each run, the same for every variant; schedule: as published.')
  _REPEATS = flags.DEFINE_integer('repeats', 3, 'How often each variant is measured.')
with _program.group('run'):
  _OUTPUT = flags.DEFINE_string('output', None, 'gpu, schedule: the file; results/gpu.md or results/schedules.png.')


def main(argv: list[str]) -> None:
  """Prints the table that the flags ask for."""
  del argv
  import jax

  from gradleak.core import errors, grammar
  from gradleak.engine import ahead

  measures = {'speed': _speed, 'scaling': _scaling, 'roofline': _roofline, 'gpu': _gpu, 'schedule': _schedule}
  measures |= {
    'training': _training,
    'local_steps': _local_steps,
    'generative': _generative,
    'compilation': _compilation,
  }
  if _MEASURE.value not in measures:
    raise errors.unknown('measure', _MEASURE.value, measures)
  counts = {'trials': (_TRIALS, 1), 'compared': (_COMPARED, 1), 'steps': (_STEPS, 2), 'repeats': (_REPEATS, 1)}
  counts |= {'devices': (_DEVICES, 0), 'group_size': (_GROUP_SIZE, 1)}
  for name, (flag, low) in counts.items():
    if flag.value is not None:
      errors.check_number(name, flag.value, low=low, high=10**6, integer=True)
  if _MEASURE.value == 'gpu':
    os.environ.setdefault('XLA_PYTHON_CLIENT_PREALLOCATE', 'false')  # PyTorch needs its share of the same device
  jax.config.update('jax_num_cpu_devices', ahead.cores())
  models = grammar.parse_list(_MODELS.value, 'model') if _MODELS.value else None
  _program.say(f'measuring {_MEASURE.value} …')
  measures[_MEASURE.value](models)


def _common():
  return {
    'attack': _ATTACK.value,
    'dataset': _DATASET.value,
    'data_dir': _DATA_DIR.value,
    'steps': _STEPS.value,
    'repeats': _REPEATS.value,
  }


def _integers(name, text):
  """Returns the integers of a list, ascending."""
  from gradleak.core import errors

  numbers = [int(part) if re.fullmatch(r'\s*[0-9]{1,20}\s*', part) else part for part in text.split(',')]
  return sorted({int(errors.check_number(name, n, low=1, high=10**6, integer=True)) for n in numbers})


def _speed(models):
  from benchmarks import speed
  from gradleak.core import errors

  del models
  variants = [name.strip() for name in _VARIANTS.value.split(',')]
  for name in variants:
    if name not in speed.VARIANTS:
      raise errors.unknown('variant', name, speed.VARIANTS)
  speed.main(
    **_common(),
    model=_MODEL.value,
    trials=_TRIALS.value,
    compared=_COMPARED.value,
    variants=variants,
    group_size=_GROUP_SIZE.value,
  )


def _scaling(models):
  from benchmarks import scaling

  del models
  sizes = _integers('sizes', _SIZES.value or '8,16,64,128,512')
  scaling.main(**_common(), model=_MODEL.value, sizes=sizes, devices=_DEVICES.value, group_size=_GROUP_SIZE.value)


def _roofline(models):
  from benchmarks import roofline

  roofline.main(
    **_common(),
    models=models or ['lenet', 'convnet', 'resnet18'],
    trials=_TRIALS.value,
    group_size=_GROUP_SIZE.value,
  )


def _gpu(models):
  from benchmarks import gpu

  gpu.main(
    **_common(),
    models=models or ['lenet', 'convnet', 'resnet18'],
    sizes=_integers('sizes', _SIZES.value or '1,16,128,1024'),
    group_sizes=_integers('group_sizes', _GROUP_SIZES.value),
    compared=_COMPARED.value,
    output=_OUTPUT.value or 'results/gpu.md',
  )


def _training(models):
  from benchmarks import training

  training.main(models=models or ['lenet'], dataset=_DATASET.value, data_dir=_DATA_DIR.value, repeats=_REPEATS.value)


def _generative(models):
  from benchmarks import generative

  for model in models or [_MODEL.value]:
    generative.main(
      model=model,
      dataset=_DATASET.value,
      data_dir=_DATA_DIR.value,
      trials=_TRIALS.value,
      population=50,
      steps=_STEPS.value,
      repeats=_REPEATS.value,
    )


def _compilation(models):
  from benchmarks import compilation

  for model in models or [_MODEL.value]:
    compilation.main(**_common(), model=model, trials=_TRIALS.value)


def _local_steps(models):
  from benchmarks import local_steps

  for model in models or [_MODEL.value]:
    local_steps.main(
      model=model,
      dataset=_DATASET.value,
      data_dir=_DATA_DIR.value,
      sizes=_integers('sizes', _SIZES.value or '4,16,64,256'),
      repeats=_REPEATS.value,
    )


def _schedule(models):
  from benchmarks import schedule

  schedule.main(
    panels=[schedule.Panel(model) for model in models] if models else schedule.PANELS,
    published=_ATTACK.value,
    faster=_FASTER.value,
    dataset=_DATASET.value,
    data_dir=_DATA_DIR.value,
    trials=_TRIALS.value,
    output=_OUTPUT.value or 'results/schedules.png',
  )


if __name__ == '__main__':
  _program.run(main)
