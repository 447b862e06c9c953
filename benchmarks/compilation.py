"""What compiling an attack takes, and how fast it then steps, under several options of the compiler on CPU."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from benchmarks import setting
from gradleak.engine import driver, groups

OPTIONS = {
  "XLA's defaults": {},
  'gradleak': groups.CPU_OPTIONS,
  'the least': {'xla_backend_optimization_level': 0, 'xla_llvm_disable_expensive_passes': True},
}


def main(*, model: str, attack: str, dataset: str, data_dir: str | None, trials: int, steps: int, repeats: int) -> None:
  """Measures and prints a row per set of options; compilation in CPU seconds, as several programs compile at once.

  Args:
    model, attack, dataset, data_dir: as launch/audit.py takes them; images of 32×32 in colour.
    trials: uploads that are attacked at once.
    steps: of each run.
    repeats: number of measurements of each, in turn.
  """
  data = setting.load(dataset, data_dir, trials)
  compiling: dict[str, list[float]] = {name: [] for name in OPTIONS}
  stepping: dict[str, list[float]] = {name: [] for name in OPTIONS}
  for repeat in range(repeats):
    for name, options in OPTIONS.items():
      print(f'run {repeat + 1} of {repeats}: {name}', file=sys.stderr, flush=True)
      with compiler_options(options):
        ours = setting.make(model, attack, steps, data, trials)  # a new one: what was compiled before is not its own
        first, again = _run(ours), _run(ours)
      compiling[name].append(first[0] - again[0])
      stepping[name].append(1e3 * again[1] / (steps * trials))
  print(f'{model}, {attack}, {dataset} at 32×32×3, {trials} trials, {steps} steps; load {setting.load_average()}')
  print(f'{"options":16}{"CPU s to compile":>18}{"ratio":>8}{"ms per step and trial":>24}{"ratio":>8}')
  medians = [(float(np.median(compiling[name])), float(np.median(stepping[name]))) for name in OPTIONS]
  for name, (compiled, stepped) in zip(OPTIONS, medians, strict=True):
    print(
      f'{name:16}{compiled:18.2f}{compiled / medians[0][0]:8.2f}{stepped:24.3f}{stepped / medians[0][1]:8.2f}',
      flush=True,
    )


@contextmanager
def compiler_options(options: dict) -> Iterator[None]:
  """Compiles what runs over lanes with these options of XLA inside the block."""
  usual = groups.CPU_OPTIONS
  groups.CPU_OPTIONS = options
  try:
    yield
  finally:
    groups.CPU_OPTIONS = usual


def _run(ours: setting.Setting) -> tuple[float, float]:
  """Returns the CPU seconds and the seconds of one attack on all trials, compilation included where it is the first."""
  used, started = time.process_time(), time.monotonic()
  group_size = driver.default_group_size(ours.scenario.variables, 1)
  driver.run(ours.build, ours.shared, ours.lanes, num_steps=ours.num_steps, group_size=group_size)
  return time.process_time() - used, time.monotonic() - started
