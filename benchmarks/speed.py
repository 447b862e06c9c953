"""Speed of one attack: all trials together, one at a time, with other formulations, and by PyTorch, in one run."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from benchmarks import breaching, harness, memory, pytorch, setting
from benchmarks.harness import Column, Variant
from gradleak import registry
from gradleak.core import errors
from gradleak.models import convolution

READS = ('dataset', 'data_dir', 'model', 'attack', 'trials', 'compared', 'variants', 'group_size', 'steps', 'repeats')


def main(options: harness.Options) -> None:
  """Measures and prints a table of the variants that the options name; ratios are to the first one.

  Raises:
    UsageError: for an unknown variant, model or attack.
  """
  names = [errors.check_choice('variant', name.strip(), harness.VARIANTS) for name in options.variants.split(',')]
  images = setting.load(options.dataset, options.data_dir, options.trials)
  make = functools.partial(setting.make, options.model, options.attack, options.steps, images)
  ours, published = make(options.trials), registry.attack(options.attack).settings['steps']
  compared, group = min(options.compared, options.trials), options.group_size or make(1).usual_group
  columns = [
    Column('ms/step/trial', 'ms'), Column('core ms', 'core'),
    Column('trials/hour', 'ms', lambda ms: f'{3.6e6 / (ms * published):,.1f}'),
    Column('compile s', 'compile', '.1f', harness.first), Column('peak MiB', 'peak', ',.0f', harness.first),
    Column('planned MiB', 'planned', '.1f'), Column('PSNR dB', 'psnr', '.2f', harness.first),
    *harness.ratios('ms', 'core'),
  ]  # fmt: skip
  harness.report(
    f'{options.attack} on {options.model}, {options.dataset} at 32×32×3, {harness.hardware()}; {versions()}, '
    f'{ours.num_steps} steps',
    _variants(make, ours, compared, names, group),
    columns,
    options.repeats,
    f'Core ms: of all processor cores together. Trials/hour: of {published:,} steps each. {memory.of_what()} '
    f'Planned: by XLA for each device, all states and one pass. PSNR: median over the first {compared} trials, after '
    'equal steps. PyTorch runs on the number of threads with which it is quicker.',
  )


def versions() -> str:
  """Returns the versions of the packages that are measured."""
  found = [f'jax {jax.__version__}']
  try:
    found.append(f'torch {pytorch.torch().__version__}')
    breaching.package()
    found.append(f'breaching {breaching.version()}')
  except pytorch.Unavailable:
    pass
  return ', '.join(found)


def _variants(make, ours, compared, names, group) -> Iterator[Variant]:
  """Yields the variants of these names; `make` is (trials, formulation=…) -> Setting, `ours` the batched one."""
  devices, fast = jax.local_devices(), 'hybrid'

  def batched(name, of):
    given = setting.measured(of, of.trials, group_size=group, devices=devices, compared=compared)
    return Variant(f'{of.trials} trials in groups of {group}, {name}', *given)

  if 'batched' in names:
    yield batched(fast, ours)
  few = ours.first(compared)
  if 'single' in names:
    alone = setting.measured(few, 1, group_size=1, devices=devices[:1], compared=compared)
    yield Variant(f'one trial at a time, {fast}', *alone)
  if 'formulations' in names:
    for other in convolution.FORMULATIONS:
      if other != fast:
        yield batched(other, make(min(ours.trials, max(compared, group * len(devices))), formulation=other))
  for name, module in (('pytorch', pytorch), ('breaching', breaching)):
    if name in names:
      yield Variant(f'{name}, one trial at a time', OneAtATime(few, module.attack))


class OneAtATime:
  """A comparison that runs PyTorch, trial by trial; its network is made at the first call."""

  def __init__(self, trials: setting.Setting, attack: Callable) -> None:
    self.trials, self.attack, self.network, self.threads = trials, attack, None, None

  def __call__(self) -> dict[str, float]:
    """Returns the figures of all trials.

    Raises:
      Unavailable: where a package is missing, or has no such model or attack.
    """
    return setting.figures(self.trials, self.run())

  def run(self) -> setting.Run:
    """Returns the `setting.Run` of all trials, from the same starts as ours."""
    trials, device = self.trials, pytorch.device()
    settings = pytorch.settings(trials.method, trials.num_steps)
    if self.network is None:
      self.network, self.each = network_of(trials), trials_of(trials)
      short = settings._replace(steps=max(2, min(20, trials.num_steps)))

      def once():
        self.attack(self.network, self.each[0], short, device)

      once()  # warm-up
      self.threads = pytorch.quickest_threads(once) if device == 'cpu' else None
    if self.threads:
      pytorch.torch().set_num_threads(self.threads)
    done = [self.attack(self.network, trial, settings, device) for trial in self.each]
    seconds = np.sum([(one.seconds, one.core_seconds) for one in done], axis=0)
    return setting.Run(*(1e3 * seconds / trials.num_steps / trials.trials), 0.0, np.stack([one.image for one in done]))


def network_of(trials: setting.Setting) -> Any:
  """Returns the PyTorch network of a `Setting`."""
  scenario = trials.scenario
  return pytorch.prepare(
    trials.spec,
    scenario.client.model,
    scenario.variables,
    scenario.samples.shape[1:],
    scenario.client.num_classes,
  )


def trials_of(trials: setting.Setting) -> list[pytorch.Trial]:
  """Returns the `pytorch.Trial`s of a `Setting`, from the same starts as ours."""
  chosen = np.asarray(trials.lanes['image'])
  labels = np.asarray(trials.scenario.targets)[chosen]
  return [pytorch.Trial(*trial) for trial in zip(trials.truth(), labels, setting.starts(trials), strict=True)]
