"""Cost by the number of trials: time per step and trial, and memory, from few trials to many."""

import functools

import jax

from benchmarks import harness, memory, setting
from benchmarks.harness import Column, Variant
from gradleak.core import errors

READS = ('dataset', 'data_dir', 'model', 'attack', 'sizes', 'devices', 'group_size', 'steps', 'repeats')
COLUMNS = [
  Column('ms/step/trial', 'ms'), Column('core ms', 'core'), Column('peak MiB', 'peak', ',.0f', harness.first),
  Column('planned MiB', 'planned', ',.1f'), *harness.ratios('ms', 'core'),
]  # fmt: skip


def main(options: harness.Options) -> None:
  """Measures and prints a row per number of trials; fewer groups than devices leave some idle."""
  sizes, devices = options.listed_sizes('8,16,64,128,512'), jax.local_devices()
  errors.check_number('devices', options.devices, low=0, high=len(devices), integer=True)
  images = setting.load(options.dataset, options.data_dir, max(sizes))
  trials = setting.make(options.model, options.attack, options.steps, images, max(sizes))
  devices = devices[: options.devices or None]
  group = options.group_size or trials.usual_group
  measure = functools.partial(setting.measured, group_size=group, devices=devices)
  harness.report(
    f'{options.attack} on {options.model}, {options.dataset} at 32×32×3, {len(devices)} × {devices[0].device_kind}, '
    f'groups of {group}; jax {jax.__version__}, {trials.num_steps} steps',
    [Variant(str(size), *measure(trials.first(size), size)) for size in sizes],
    COLUMNS,
    options.repeats,
    f'Core ms: of all processor cores together. {memory.of_what()} Planned: by XLA for each device, all states and one '
    'pass.',
  )
