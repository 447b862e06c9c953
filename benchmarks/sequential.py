"""Audits whose trials stop when the question is decided, beside the same audits of all trials: answers and cost."""

import time
from typing import NamedTuple

import jax

import gradleak as gl
from benchmarks import harness
from gradleak import registry
from gradleak.core import statistics
from gradleak.report.formatting import aligned

READS = ('trials', 'steps')
SHARE = 0.5
DEFENSES = 'none;gaussian(stddev=0.03);prune(rate=0.97);soteria(rate=0.6)'


class Task(NamedTuple):
  """One audit: the data, the network, the attacks, and the images behind an upload."""

  dataset: str
  model: str
  attacks: str
  batch_size: int = 1


class Cost(NamedTuple):
  """What an audit took: attacks that ran, those on noise included, and seconds."""

  runs: float
  cpu: float
  wall: float


TASKS = (
  Task('digits', 'mlp(widths=32)', 'fidel'),
  Task('digits', 'mlp(widths=32)', 'fidel', 4),
  Task('digits', 'mlp(widths=32)', 'csdlg_fast(tv=1e-6)'),
  Task('digits', 'lenet', 'csdlg_fast(tv=1e-6)'),
  Task('faces', 'lenet', 'csdlg_fast(tv=1e-6)'),
)


def main(options: harness.Options) -> None:
  """Prints a line per audit and defense with its answers, and below each audit what both took, compilation included."""
  same, defenses, total = 0, 0, [Cost(0, 0, 0), Cost(0, 0, 0)]
  for task in TASKS:
    (stopped, some), (full, all_) = (_audited(task, options, more) for more in ({'decide': SHARE}, {}))
    lines = [(' '.join(map(str, task)), 'answer', 'trials', f'of all {options.trials}', 'answer')]
    for stop in stopped.stops:
      reached = _recovered(full, stop.defense)
      answer = _answer(reached, options.trials)
      same, defenses = same + (answer == stop.answer), defenses + 1
      lines.append((f'  {stop.defense}', stop.answer, f'{stop.after}', f'{reached}', answer))
    total = [_sum(total[0], some), _sum(total[1], all_)]
    print('\n'.join([*aligned(lines), _said(some, all_), '']), flush=True)
  print(f'{same} of {defenses} answers are those of all trials, by exact 95 % intervals; {_said(*total)}')


def _audited(task: Task, options: harness.Options, more: dict) -> tuple[gl.AuditResult, Cost]:
  """Returns the result of an audit that compiles its own programs, and what it took."""
  jax.clear_caches()
  key, scenario, given = _scenario(task, options)
  cpu, started = time.process_time(), time.monotonic()
  settings = {'batch_size': task.batch_size, 'steps': options.steps, 'knowledge': 'non-adaptive', 'progress': 'none'}
  result = gl.audit(key, scenario, *given, options.trials, **settings, **more)
  runs = len(result.rows) + len(result.controls)
  return result, Cost(runs, time.process_time() - cpu, time.monotonic() - started)


def _sum(one: Cost, other: Cost) -> Cost:
  return Cost(*(a + b for a, b in zip(one, other, strict=True)))


def _said(some: Cost, all_: Cost) -> str:
  units = 'runs, those on noise included', 'CPU seconds', 'seconds'
  return '; '.join(f'{a:.0f} of {b:.0f} {unit} ({a / b:.2f})' for unit, a, b in zip(units, some, all_, strict=True))


def _scenario(task: Task, options: harness.Options) -> tuple[jax.Array, gl.Scenario, tuple]:
  data = drawn(task, options.trials)
  model = gl.models.create(task.model, data.num_classes, init='explicit')
  scenario = gl.scenario(model, data.samples, data.targets, key=jax.random.key(0), dataset=task.dataset)
  return jax.random.key(1), scenario, (registry.defenses(DEFENSES), registry.attacks(task.attacks))


def drawn(task: Task, trials: int) -> gl.data.Dataset:
  """Returns the samples of an audit, in no order: the embedded faces stand before what is none."""
  return gl.data.shuffled(gl.data.load(task.dataset), trials * task.batch_size)


def _recovered(result: gl.AuditResult, defense: str) -> int:
  """Returns the number of trials that any attacker recovers."""
  return len({row['trial'] for row in result.rows if row['defense'] == defense and row['success']})


def _answer(reached: int, n: int) -> str:
  _, low, high = statistics.proportion_interval(reached, n)
  return 'above' if low > SHARE else 'below' if high < SHARE else 'undecided'
