"""Cost by the number of trials: time per step and trial, and memory, from few trials to many."""

import sys
from collections.abc import Sequence

import jax
import numpy as np

from benchmarks import memory, setting
from gradleak.engine import driver


def main(
  *,
  model: str,
  attack: str,
  dataset: str,
  data_dir: str | None,
  sizes: Sequence[int],
  steps: int,
  repeats: int,
  devices: int,
  group_size: int | None = None,
) -> None:
  """Measures and prints a row per number of trials, with the ratio to the first.

  Args:
    model, attack, dataset, data_dir: as launch/audit.py takes them.
    sizes: numbers of trials.
    steps: of the attack.
    repeats: number of measurements, in turn.
    devices: number of devices; 0 for all. Fewer groups than devices leave some idle, so linear cost shows on one.
    group_size: trials per micro-group; None: as in audits.
  """
  images = setting.load(dataset, data_dir, max(sizes))
  trials = setting.make(model, attack, steps, images, max(sizes))
  chosen = jax.local_devices()[: devices or None]
  group = group_size or driver.default_group_size(trials.scenario.variables, 1)
  print(f'{attack} on {model}, {dataset} at 32×32×3, {len(chosen)} × {chosen[0].device_kind}, groups of {group}')
  print(f'jax {jax.__version__}; {repeats} runs of {trials.num_steps} steps; load average {setting.load_average()}\n')
  found, peaks = {size: [] for size in sizes}, {}
  for repeat in range(repeats):
    for size in sizes:
      print(f'run {repeat + 1} of {repeats}: {size} trials', file=sys.stderr, flush=True)
      memory.reset_peak()
      done = setting.run(trials.first(size), size, group, chosen)
      found[size].append((done.milliseconds, done.core_milliseconds))
      peaks[size] = memory.peak()
  heads = ('trials', 6), ('ms/step/trial', 13), ('core ms', 8), ('peak MiB', 8), ('planned MiB', 11)
  print(' '.join(f'{head:>{width}}' for head, width in (*heads, ('ratio', 7), ('minima', 7), ('core', 7))))
  (median, core), least = np.median(found[sizes[0]], axis=0), min(found[sizes[0]])[0]
  for size, runs in found.items():
    wall, cores = np.median(runs, axis=0)
    planned = memory.planned(trials.first(size), group, chosen)
    print(
      f'{size:6} {wall:13.3f} {cores:8.3f} {peaks[size]:8,.0f} {planned:11,.1f} {wall / median:6.2f}× '
      f'{min(runs)[0] / least:6.2f}× {cores / core:6.2f}×'
    )
  print(
    '\ncore ms: of all processor cores together. peak: of the process. planned: by XLA for each device, all states and'
  )
  print(f'one pass. Ratios to the first line: of medians, of minima, of core ms. load average {setting.load_average()}')
