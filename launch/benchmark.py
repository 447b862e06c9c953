"""Measures the speed of an attack: batched, one trial at a time, and on the other convolution formulation, in one run.

    python launch/benchmark.py
    python launch/benchmark.py --dataset=cifar10 --data_dir=data --model='convnet(width=8)' --trials=8

Machines are noisy: all variants are measured in turn, several times over, and what counts is the ratio of medians.
"""

import os
import time

import jax
import numpy as np
from absl import flags

from launch import _program

_DATASET = flags.DEFINE_string('dataset', 'faces', 'As in launch/audit.py; resized to 32×32 RGB.')
_DATA_DIR = flags.DEFINE_string('data_dir', None, 'Folder with prepared TFDS datasets.')
_MODEL = flags.DEFINE_string('model', 'lenet', 'As in launch/audit.py.')
_ATTACK = flags.DEFINE_string('attack', 'csdlg', 'One attack, as in launch/audit.py.')
_TRIALS = flags.DEFINE_integer('trials', 32, 'Trials of the batched run.')
_STEPS = flags.DEFINE_integer('steps', 200, 'Steps measured per run; the slow formulation takes a tenth of them.')
_REPEATS = flags.DEFINE_integer('repeats', 3, 'How often each variant is measured.')


def main(argv):
  """Prints milliseconds per step and trial of each variant, and the ratios."""
  del argv
  jax.config.update('jax_num_cpu_devices', os.cpu_count() or 1)

  import gradleak as gl
  from gradleak import attacks, errors
  from gradleak.attacks import driver

  for name, flag, low in (('trials', _TRIALS, 1), ('steps', _STEPS, 2), ('repeats', _REPEATS, 1)):
    errors.check_number(name, flag.value, low=low, integer=True)
  fast = gl.models.layers.default_formulation()
  slow = 'native' if fast == 'patches' else 'patches'
  dataset = gl.data.load(
    _DATASET.value, 'test', data_dir=_DATA_DIR.value, limit=_TRIALS.value, image_size=32, channels=3
  )
  device = jax.devices()[0]
  print(f'{_ATTACK.value} on {_MODEL.value}, {_DATASET.value} at 32×32×3, {jax.device_count()} × {device.device_kind}')
  print(f'jax {jax.__version__}; medians of {_REPEATS.value} runs, compilation apart\n')

  def setup(formulation):
    model = gl.models.create(_MODEL.value, dataset.num_classes, conv=formulation)
    return gl.scenario(model, dataset.images, dataset.labels, key=jax.random.key(0), num_classes=dataset.num_classes)

  def variant(formulation, trials, at_once, steps):
    """Returns a function that runs the trials, `at_once` per call, for (ms per step and trial, compile seconds)."""
    scenario = setup(formulation)
    build, shared, lanes = lanes_of(gl, attacks.parse(_ATTACK.value, steps), scenario, trials)
    group = driver.default_group_size(scenario.variables, 1) if at_once > 1 else 1
    devices = jax.local_devices() if at_once > 1 else jax.local_devices()[:1]

    def measure():
      seconds, compile_seconds = 0.0, 0.0
      for first in range(0, trials, at_once):
        some = jax.tree.map(lambda x, first=first: x[first : first + at_once], lanes)
        marks, started = [], time.perf_counter()
        driver.run(
          build, shared, some, num_steps=steps, group_size=group, chunk_steps=max(1, steps // 5), devices=devices,
          on_chunk=lambda progress, marks=marks: marks.append(time.perf_counter())
        )  # fmt: skip
        # The first chunk holds the compilation.
        seconds += (marks[-1] - marks[1]) / (len(marks) - 2) * (len(marks) - 1)
        compile_seconds = marks[1] - started
      return 1e3 * seconds / steps / trials, compile_seconds

    return measure

  few = max(1, min(4, _TRIALS.value))
  variants = {
    f'{_TRIALS.value} trials batched, {fast}': variant(fast, _TRIALS.value, _TRIALS.value, _STEPS.value),
    f'one trial at a time, {fast}': variant(fast, few, 1, _STEPS.value),
    f'{_TRIALS.value} trials batched, {slow}': variant(slow, _TRIALS.value, _TRIALS.value, max(10, _STEPS.value // 10)),
  }
  measured = {name: [] for name in variants}
  for _ in range(_REPEATS.value):
    for name, measure in variants.items():
      measured[name].append(measure())
  medians = {name: np.median([figures[0] for figures in values]) for name, values in measured.items()}
  best = next(iter(medians.values()))
  print(f'{"variant":36} {"ms/step/trial":>14} {"trials/hour":>12} {"compile s":>10} {"ratio":>7}')
  for name, milliseconds in medians.items():
    compile_seconds = np.median([figures[1] for figures in measured[name]])
    print(
      f'{name:36} {milliseconds:14.3f} {3.6e6 / (milliseconds * 2000):12,.0f} {compile_seconds:10.1f} '
      f'{milliseconds / best:6.2f}×'
    )
  print('\ntrials/hour: of 2,000 steps each. ratio: time per step and trial, against the first line.')


def lanes_of(gl, template, scenario, trials):
  """Returns (build, shared, lanes) of `trials` undefended single-image uploads, labels known."""
  images, labels = jax.numpy.asarray(scenario.images), jax.nn.one_hot(scenario.labels, scenario.client.num_classes)
  client, knowledge = scenario.client, gl.Knowledge()
  uploads = jax.jit(jax.vmap(lambda x, y: client.local_update(None, scenario.variables, x[None], y[None])))(
    images[:trials], labels[:trials]
  )

  def build(shared, lane):
    variables, uploads = shared
    upload = gl.trees.take(uploads, lane['trial'])
    observation = gl.Observation(
      variables, upload.update, lane['label'][None], knowledge, (1, *images.shape[1:]), labels.shape[1]
    )
    return template.build(lane['numbers'], client), lane['key'], observation

  lanes = {
    'trial': jax.numpy.arange(trials),
    'label': labels[:trials],
    'key': jax.random.split(jax.random.key(1), trials),
    'numbers': tuple(jax.numpy.full((trials,), number) for number in template.numbers),
  }
  return build, (scenario.variables, uploads), lanes


if __name__ == '__main__':
  _program.run(main)
