"""Speed of one attack: all trials together, one at a time, with other formulations, and by PyTorch, in one run.

Machines are noisy: the variants are measured in turn, several times, and ratios are reported.
"""

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks import breaching, memory, pytorch, setting
from gradleak.engine import driver
from gradleak.models import convolution

VARIANTS = ('batched', 'single', 'formulations', 'pytorch', 'breaching')


class Variant(NamedTuple):
  """One way to run the attack.

  Attributes:
    name: its name in the table.
    measure: () -> `setting.Run`; raises `pytorch.Unavailable` where it cannot.
    planned: () -> MiB that XLA plans per device, or None.
  """

  name: str
  measure: Callable
  planned: Callable = lambda: None


class Row(NamedTuple):
  """The figures of a variant; `why` is set if it could not be measured.

  Attributes:
    name: of the variant.
    milliseconds: per step and trial, one figure per repeat.
    core_milliseconds: the same, of all processor cores together.
    compile_seconds: of the first run.
    peak: of the process or the GPU, MiB.
    planned: MiB that XLA plans per device, or None.
    psnr: median over the compared trials, dB.
    why: what is missing, or ''.
  """

  name: str
  milliseconds: list[float]
  core_milliseconds: list[float]
  compile_seconds: float = 0.0
  peak: float = 0.0
  planned: float | None = None
  psnr: float = 0.0
  why: str = ''


def main(
  *,
  model: str,
  attack: str,
  dataset: str,
  data_dir: str | None,
  trials: int,
  steps: int,
  repeats: int,
  compared: int,
  variants: Sequence[str],
  group_size: int | None = None,
) -> None:
  """Measures and prints a table of the variants; ratios are to the first one.

  Args:
    model, attack: as launch/audit.py takes them.
    dataset, data_dir: the images.
    trials: of the batched run.
    steps: of the attack, the same for every variant.
    repeats: number of measurements of each variant.
    compared: number of trials that every variant attacks, from the same starts; variants that run one trial at a time
      attack no others.
    variants: names of `VARIANTS`.
    group_size: trials per micro-group; None: as in audits.
  """
  images = setting.load(dataset, data_dir, trials)
  make = functools.partial(setting.make, model, attack, steps, images)
  ours = make(trials)
  device, published = jax.devices()[0], setting.published_steps(attack)
  print(f'{attack} on {model}, {dataset} at 32×32×3, {jax.device_count()} × {device.device_kind}')
  print(f'{versions()}; {repeats} runs of {ours.num_steps} steps; load average {setting.load_average()}\n', flush=True)
  group = group_size or driver.default_group_size(ours.scenario.variables, 1)
  listed = list(_variants(make, ours, min(compared, trials), variants, group))
  rows = measure(listed, repeats, ours)
  print(table(rows, published))
  print(f'\ncore ms: of all processor cores together. trials/hour: of {published:,} steps each. peak: of the process')
  print('while the variant ran. planned: by XLA for each device, all states and one pass. Ratios to the first line: of')
  print(
    f'medians, of minima, of core ms. PSNR: median over the first {min(compared, trials)} trials, after equal steps.'
  )
  print(f'load average {setting.load_average()}')


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


def _variants(make, ours, compared, names, group):
  """Yields the variants of these names; `make` is (trials, formulation=…) -> Setting, `ours` the batched one."""
  devices, fast = jax.local_devices(), convolution.default_formulation()

  def batched(name, of):
    run = functools.partial(setting.run, of, of.trials, group, devices, compared)
    planned = functools.partial(memory.planned, of, group, devices)
    return Variant(f'{of.trials} trials in groups of {group}, {name}', run, planned)

  if 'batched' in names:
    yield batched(fast, ours)
  few = ours.first(compared)
  if 'single' in names:
    run = functools.partial(setting.run, few, 1, 1, devices[:1], compared)
    yield Variant(f'one trial at a time, {fast}', run, functools.partial(memory.planned, few.first(1), 1, devices[:1]))
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

  def __call__(self) -> setting.Run:
    """Returns the `setting.Run` of all trials.

    Raises:
      Unavailable: where a package is missing, or has no such model or attack.
    """
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
    scenario.images.shape[1:],
    scenario.client.num_classes,
  )


def trials_of(trials: setting.Setting) -> list[pytorch.Trial]:
  """Returns the `pytorch.Trial`s of a `Setting`, from the same starts as ours."""
  chosen = np.asarray(trials.lanes['image'])
  labels = np.asarray(trials.scenario.labels)[chosen]
  return [pytorch.Trial(*trial) for trial in zip(trials.truth(), labels, setting.starts(trials), strict=True)]


def measure(variants: Sequence[Variant], repeats: int, ours: setting.Setting) -> list[Row]:
  """Returns the `Row`s of the variants, measured in turn; progress is printed to standard error."""
  rows = {variant.name: Row(variant.name, [], []) for variant in variants}
  for repeat in range(repeats):
    for variant in variants:
      row = rows[variant.name]
      if row.why:
        continue
      print(f'run {repeat + 1} of {repeats}: {variant.name}', file=sys.stderr, flush=True)
      memory.reset_peak()
      try:
        done = variant.measure()
      except pytorch.Unavailable as error:
        rows[variant.name] = row._replace(why=str(error))
        continue
      row.milliseconds.append(done.milliseconds)
      row.core_milliseconds.append(done.core_milliseconds)
      if repeat == 0:
        threads = getattr(variant.measure, 'threads', None)
        name = variant.name + (f', {threads} thread{"s" * (threads > 1)}' if threads else '')
        row = row._replace(name=name, compile_seconds=done.compile_seconds, psnr=ours.psnr(done.images))
        rows[variant.name] = row._replace(peak=memory.peak(), planned=variant.planned())
  return list(rows.values())


def table(rows: Iterable[Row], published: int) -> str:
  """Returns the rows as text, with ratios to the first; `published` steps make a trial."""
  lines = [
    f'{"variant":41} {"ms/step/trial":>13} {"core ms":>8} {"trials/hour":>11} {"compile s":>9} {"peak MiB":>8} '
    f'{"planned MiB":>11} {"PSNR dB":>7} {"ratio":>7} {"minima":>7} {"core":>7}'
  ]
  first = next((row for row in rows if row.milliseconds), None)
  for row in rows:
    if row.why:
      lines.append(f'{row.name:41} n/a: {row.why}')
      continue
    median, core = np.median(row.milliseconds), np.median(row.core_milliseconds)
    ratios = (
      median / np.median(first.milliseconds),
      min(row.milliseconds) / min(first.milliseconds),
      core / np.median(first.core_milliseconds),
    )
    planned = '–' if row.planned is None else f'{row.planned:.1f}'
    lines.append(
      f'{row.name:41} {median:13.3f} {core:8.3f} {3.6e6 / (median * published):11,.1f} {row.compile_seconds:9.1f} '
      f'{row.peak:8,.0f} {planned:>11} {row.psnr:7.2f} ' + ' '.join(f'{ratio:6.2f}×' for ratio in ratios)
    )
  return '\n'.join(lines)
