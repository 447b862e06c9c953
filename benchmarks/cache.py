"""An audit in a process of its own: without compiled programs on disk, and with them, those that are kept varied.

By itself JAX keeps a program that took a second to compile. An audit has many that take less.
"""

import concurrent.futures
import functools
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable

import jax

import gradleak as gl
from benchmarks import harness
from benchmarks.harness import Column, Variant
from gradleak import registry

READS = ('dataset', 'data_dir', 'model', 'attack', 'trials', 'steps', 'repeats')
JAX_KEEPS = 1.0  # seconds of a compilation from which JAX keeps its program
DEFENSES = ('none', 'prune(rate=0.9)', 'gaussian(stddev=0.05)')
COLUMNS = [
  Column('CPU s', 'cpu', '.1f'), Column('ratio', 'cpu', ratio=True), Column('wall s', 'wall', '.1f'),
  Column('ratio', 'wall', ratio=True), Column('files', 'files', '.0f'), Column('MB', 'size', '.1f'),
]  # fmt: skip


def main(options: harness.Options) -> None:
  """Measures and prints a row per way to keep programs; each process imports, compiles or reads, and audits."""
  with tempfile.TemporaryDirectory() as folder:
    ours, theirs = os.path.join(folder, 'ours'), os.path.join(folder, 'theirs')
    kept = {'kept by JAX itself, found again': (theirs, JAX_KEEPS), 'all kept, found again': (ours, None)}
    for place, least in kept.values():
      _in_process(options, place, least)
    runs: dict[str, Callable[[], dict[str, float]]] = {
      'nothing kept': functools.partial(_in_process, options, '', None),
      **{name: functools.partial(_in_process, options, *given) for name, given in kept.items()},
    }
    harness.report(
      f'{options.attack} on {options.model}, {options.trials} trials of {options.dataset}, {options.steps} steps, '
      f'{len(DEFENSES)} defenses',
      [Variant(*run) for run in runs.items()],
      COLUMNS,
      options.repeats,
    )


def _in_process(options: harness.Options, folder: str, least: float | None) -> dict[str, float]:
  """Returns what an audit takes in a new process, the import included."""
  started = time.monotonic()
  with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context('spawn')) as pool:
    cpu = pool.submit(audited, options, folder, least).result()
  places = list(os.scandir(folder)) if folder else []
  size = sum(place.stat().st_size for place in places) / 1e6
  return {'cpu': cpu, 'wall': time.monotonic() - started, 'files': len(places), 'size': size}


def audited(options: harness.Options, folder: str, least: float | None) -> float:
  """Audits, and returns the CPU seconds of this process.

  Args:
    options: of the measure.
    folder: of compiled programs; '' for none.
    least: seconds of a compilation from which its program is kept; None for `gl.configure`'s.
  """
  gl.configure(cache=folder)
  if least is not None:
    jax.config.update('jax_persistent_cache_min_compile_time_secs', least)
  data = gl.data.load(options.dataset, data_dir=options.data_dir, limit=options.trials)
  model = gl.models.create(options.model, data.num_classes, init='explicit')
  scenario = gl.scenario(model, data.samples, data.targets, key=jax.random.key(0), dataset=options.dataset)
  method = registry.attack(options.attack)
  method = method if 'steps' in method.given else method.changed(steps=options.steps)
  defenses = [registry.defense(text) for text in DEFENSES]
  gl.audit(jax.random.key(1), scenario, defenses, [method], options.trials, controls=4, progress='none')
  return time.process_time()
