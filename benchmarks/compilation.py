"""What compiling an attack takes, and how fast it then steps, under several options of the compiler on CPU."""

import functools
import time
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks import harness, setting
from benchmarks.harness import Column, Variant
from gradleak.engine import driver, groups
from gradleak.engine.groups import Layout

READS = ('dataset', 'data_dir', 'model', 'models', 'attack', 'trials', 'steps', 'repeats')
OPTIONS = {
  "XLA's defaults": {},
  'gradleak': groups.OPTIONS['cpu'],
  'the least': {'xla_backend_optimization_level': 0, 'xla_llvm_disable_expensive_passes': True},
}
COLUMNS = [
  Column('CPU s to compile', 'compile', '.2f'), Column('ratio', 'compile', ratio=True),
  Column('ms/step/trial', 'ms'), *harness.ratios('ms'),
]  # fmt: skip


def main(options: harness.Options) -> None:
  """Measures and prints a row per set of options; compilation in CPU seconds, as several programs compile at once."""
  data = setting.load(options.dataset, options.data_dir, options.trials)
  for model in options.listed_models():
    title = f'{options.attack} on {model}, {options.dataset} at 32×32×3, {options.trials} trials, {options.steps} steps'
    runs = {name: functools.partial(_run, options, model, data, given) for name, given in OPTIONS.items()}
    harness.report(title, [Variant(*run) for run in runs.items()], COLUMNS, options.repeats)


@contextmanager
def compiler_options(given: dict) -> Iterator[None]:
  """Compiles what runs over lanes with these options of XLA inside the block."""
  usual = groups.OPTIONS
  groups.OPTIONS = {**usual, 'cpu': given}
  try:
    yield
  finally:
    groups.OPTIONS = usual


def _run(options: harness.Options, model: str, data: setting.Dataset, given: dict) -> dict[str, float]:
  """Returns the figures of one attack on all trials that is compiled, and run again."""
  with compiler_options(given):
    # A new one: what was compiled before is not its own.
    ours = setting.make(model, options.attack, options.steps, data, options.trials)
    (compiled, _), (used, seconds) = _attack(ours), _attack(ours)
  return {'compile': compiled - used, 'ms': 1e3 * seconds / (options.steps * options.trials)}


def _attack(ours: setting.Setting) -> tuple[float, float]:
  """Returns the CPU seconds and the seconds of one attack on all trials, compilation included where it is the first."""
  used, started = time.process_time(), time.monotonic()
  group_size = driver.default_group_size(ours.scenario.variables, 1)
  driver.run(ours.build, ours.shared, ours.lanes, Layout(group_size), num_steps=ours.num_steps)
  return time.process_time() - used, time.monotonic() - started
