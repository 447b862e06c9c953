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
    python launch/benchmark.py --measure=sequential --trials=64
    python launch/benchmark.py --measure=profile --trials=16 --steps=40
    python launch/benchmark.py --measure=cache --trials=4 --steps=50
    python launch/benchmark.py --measure=tableak --clone=tableak --trials=8 --compared=1 --steps=1500
    python launch/benchmark.py --measure=tag --trials=8 --compared=2 --batch=1 --steps=500

Machines are noisy: variants are measured in turn, several times, and ratios are reported.
"""

import dataclasses
import importlib
import os
from collections.abc import Sequence

import jax

from benchmarks import harness
from gradleak import data
from gradleak.core import errors, settings
from gradleak.engine import ahead
from launch import _program
from launch._flags import Flags, check_data_dir

_GIVEN = Flags()
with _program.group('what is measured, and how much'):
  _GIVEN.settings(harness.Options)


def _check_read(measure: str, reads: Sequence[str]) -> None:
  """Raises `UsageError` for a flag that the user gave and the measure does not read."""
  names = [field.name for field in dataclasses.fields(harness.Options)]
  given = [name for name in names if name != 'measure' and _GIVEN.present(name)]
  if unread := [name for name in given if name not in reads]:
    known = ', '.join(f'--{name}' for name in reads)
    raise errors.UsageError(f'--{unread[0]} has no effect here: --measure={measure} reads {known}')
  if {'model', 'models'} <= set(given):
    raise errors.UsageError('give --model or --models, not both: the second takes the place of the first')


def main(argv: list[str]) -> None:
  """Prints the table that the flags ask for."""
  options = _GIVEN.made(harness.Options)
  settings.check(options)
  measure = importlib.import_module(f'benchmarks.{options.measure}')
  _check_read(options.measure, measure.READS)
  check_data_dir(options.dataset, options.data_dir)
  if data.is_table(options.dataset) or data.text.knows(options.dataset):
    raise errors.UsageError(f'this program measures attacks on images, and {options.dataset} holds others')
  if options.measure == 'gpu':
    os.environ.setdefault('XLA_PYTHON_CLIENT_PREALLOCATE', 'false')  # PyTorch needs its share of the same device
  jax.config.update('jax_num_cpu_devices', ahead.cores())
  _program.say(f'measuring {options.measure} …')
  measure.main(options)


if __name__ == '__main__':
  _program.run(main)
