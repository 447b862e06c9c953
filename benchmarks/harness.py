"""What all measures share: their options, and variants that are measured in turn, with ratios to the first.

Machines are noisy: no variant is measured apart from the others, each is several times, and ratios are what counts.
"""

import dataclasses
import math
import os
import re
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks import memory
from benchmarks.pytorch import Unavailable
from gradleak.core import errors, grammar, statistics
from gradleak.core.settings import setting

MEASURES = (
  'speed', 'scaling', 'roofline', 'gpu', 'schedule', 'training', 'local_steps', 'generative', 'compilation',
  'sequential', 'profile', 'cache', 'tableak', 'tag',
)  # fmt: skip
VARIANTS = ('batched', 'single', 'formulations', 'pytorch', 'breaching')
_COUNT: dict[str, Any] = {'low': 1, 'high': 10**6, 'integer': True}


@dataclasses.dataclass(frozen=True)
class Options:
  """What is measured; each is a flag of launch/benchmark.py, and a measure names those that it `READS`."""

  dataset: str = setting('faces', 'As in launch/audit.py; resized to 32×32 RGB, but for training.')
  data_dir: str | None = setting(None, 'Folder with prepared TFDS datasets.')
  model: str = setting('lenet', 'As in launch/audit.py.')
  measure: str = setting(
    'speed',
    'speed: variants and other packages; scaling: from few trials to many; roofline: against what the machine can do; '
    'gpu: models × trials against PyTorch, as Markdown; schedule: PSNR against time, --faster against --attack; '
    'training: a round of federated training, clients batched or in a loop; '
    'local_steps: memory and time of matching through many local steps; generative: evaluations of candidates by ggl; '
    "compilation: an attack with and without our options of XLA's, on CPU; "
    'sequential: audits whose trials stop, beside all --trials; profile: where the time of attacks and trainings goes, '
    "and the machine's rate; cache: an audit that finds its compiled programs on disk; "
    "tableak: batches of rows, beside the code of TabLeak's authors; tag: texts, beside breaching.",
    choices=MEASURES,
  )
  models: str | None = setting(None, "List separated by ';' in place of --model, or of those of the measure itself.")
  attack: str = setting('csdlg', 'One attack, as in launch/audit.py.')
  faster: str = setting('csdlg_fast', 'schedule: the attack that is to be faster than --attack.')
  trials: int = setting(64, 'Trials of the batched run; tableak, tag: batches.', **_COUNT)
  compared: int = setting(8, 'speed, gpu, tableak, tag: the first trials, which other packages attack too.', **_COUNT)
  variants: str = setting(','.join(VARIANTS), 'speed: some of these; ratios are against the first.')
  sizes: str | None = setting(
    None,
    'scaling, gpu: numbers of trials; by default 8 to 512, and 1 to 1024. local_steps: numbers of them, 4 to 256.',
  )
  devices: int = setting(0, 'scaling: how many devices; 0 for all.', low=0, high=10**6, integer=True)
  group_size: int | None = setting(
    None, 'speed, scaling, roofline: trials per micro-group; by default, as audits.', **_COUNT
  )
  group_sizes: str = setting('512', 'gpu: trials per micro-group to try.')
  steps: int = setting(
    200, 'Steps of each run, the same for every variant; schedule: as published.', low=2, high=10**6, integer=True
  )
  clone: str | None = setting(None, "tableak: folder with the authors' code, https://github.com/eth-sri/tableak.")
  batch: int = setting(16, 'tableak, tag: samples of a batch.', **_COUNT)
  starts: int = setting(30, 'tableak: starts that are pooled.', low=1, high=64, integer=True)
  repeats: int = setting(3, 'How often each variant is measured.', **_COUNT)
  output: str | None = setting(None, 'gpu, schedule: the file; results/gpu.md or results/schedules.png.')

  def listed_models(self, *usual: str) -> list[str]:
    """Returns the models of the flag, or these."""
    return grammar.parse_list(self.models, 'model') if self.models else list(usual or (self.model,))

  def listed_sizes(self, usual: str) -> list[int]:
    """Returns the sizes of the flag, or those of a text, ascending."""
    return integers('sizes', self.sizes or usual)


def integers(name: str, text: str) -> list[int]:
  """Returns the integers of a list, ascending.

  Raises:
    UsageError: for what is none.
  """
  numbers = [int(part) if re.fullmatch(r'\s*[0-9]{1,20}\s*', part) else part for part in text.split(',')]
  return sorted({int(errors.check_number(name, n, low=1, high=10**6, integer=True)) for n in numbers})


class Variant(NamedTuple):
  """One side of a comparison.

  Attributes:
    name: in the table.
    run: measures once, and returns figure -> value; raises `Unavailable` where it cannot.
    once: returns figures that one measurement is enough for, given those of the first run.
    compiled: whether its first run compiles, so that it needs one before those that count.
  """

  name: str
  run: Callable[[], Mapping[str, Any]]
  once: Callable[[Mapping[str, float]], Mapping[str, float]] = lambda figures: {}
  compiled: bool = True


class Column(NamedTuple):
  """A column of the table: a figure, as `show` writes what `of` takes of its runs; a ratio is to the first variant."""

  head: str
  figure: str
  show: str | Callable[[float], str] = ',.3f'
  of: Callable[[Sequence[float]], float] = np.median
  ratio: bool = False


Found = dict[str, dict[str, list[Any]] | str]


def first(values: Sequence[float]) -> float:
  """Returns the figure of the first run."""
  return values[0]


def ratios(figure: str, core: str = '') -> list[Column]:
  """Returns the columns of ratios: of medians, of minima, and of the medians of core time where it is measured."""
  columns = [Column('ratio', figure, ratio=True), Column('minima', figure, of=min, ratio=True)]
  return [*columns, *([Column('core', core, ratio=True)] if core else [])]


def right(name: str, figure: str) -> list[Column]:
  """Returns the columns of batches that two packages attack; `name` is what of them is right."""
  times = [Column('s per batch', 'seconds', ',.2f'), Column('core s', 'core', ',.2f')]
  mean = Column(f'{name} right', figure, '.3f', lambda runs: statistics.mean_interval(runs[0])[0])
  margin = Column('±', figure, lambda half: '–' if np.isnan(half) else f'{half:.3f}', _margin)
  return [*times, mean, margin, *ratios('seconds', 'core')]


def _margin(runs: Sequence[Any]) -> float:
  """Returns half of the 95 % interval over the batches of the first run, NaN for a single one."""
  mean, low, _ = statistics.mean_interval(runs[0])
  return mean - low


def right_note(name: str, compared: int) -> str:
  """Returns what stands below them."""
  return (
    f'{name} right: mean over the first {compared} batches, after equal steps, and half of its 95 % interval. '
    'Core s: of all processor cores together. PyTorch runs on the number of threads with which it is quicker.'
  )


def paired(found: Found, figure: str) -> str:
  """Returns by how much the first variant is right more often than the second, on the same batches.

  The text is empty where one of them was not measured.
  """
  sides = [None if isinstance(known, str) else known.get(figure) for known in list(found.values())[:2]]
  if len(sides) < 2 or None in sides:
    return ''
  less = np.subtract(*(side[0] for side in sides))
  mean, low, high = statistics.difference_of_means(less)
  judged = 'a difference' if low > 0 or high < 0 else 'undecided'
  interval = '' if math.isnan(low) else f' ({low:+.3f} to {high:+.3f})'
  return f'The first less the second, on {len(less)} batches: {mean:+.3f}{interval}, {judged}.'


def batch_figures(
  found: Sequence[Any], times: tuple[float, float], figure: str, right_of: Callable[[Any, int], float], compared: int
) -> dict[str, Any]:
  """Returns the figures of reconstructed batches.

  Args:
    found: one of each private batch, from the first on.
    times: wall and core seconds of them all.
    figure: what the fractions that are right are called, one of each batch.
    right_of: (a reconstruction, place of its batch) -> that fraction.
    compared: of how many, the first, they are.
  """
  fractions = [right_of(one, place) for place, one in enumerate(found[:compared])]
  seconds, core = (total / len(found) for total in times)
  return {'seconds': seconds, 'core': core, figure: fractions}


def measured(variants: Iterable[Variant], repeats: int, label: str = '', warm: bool = False) -> Found:
  """Returns name -> {figure: its runs}, with the 'peak' of memory, or name -> why it was not measured at all.

  Args:
    variants: they take turns.
    repeats: number of runs of each.
    label: what is printed before their names.
    warm: whether those that compile run once before.
  """
  listed = list(variants)
  found: Found = {variant.name: {} for variant in listed}
  failed: set[str] = set()
  for repeat in range(0 if warm else 1, repeats + 1):
    for variant in listed:
      figures = found[variant.name]
      if variant.name in failed or isinstance(figures, str) or not (repeat or variant.compiled):
        continue
      turn = f'run {repeat} of {repeats}' if repeat else 'compiling'
      print(f'{turn}: {label}{variant.name}', file=sys.stderr, flush=True)
      memory.reset_peak()
      try:
        given = {**variant.run(), 'peak': memory.peak()}
      except (Unavailable, errors.DeviceError) as error:
        failed.add(variant.name)  # what it measured before stays
        found[variant.name] = figures or f'n/a: {error}'
        continue
      if repeat == 1:
        given |= variant.once(given)
      for name, value in given.items() if repeat else ():
        figures.setdefault(name, []).append(value)
  return found


def value(found: Found, name: str, column: Column) -> float | None:
  """Returns the figure of a column for a variant, None where it has none."""
  figures = found[name]
  runs = [] if isinstance(figures, str) else figures.get(column.figure, [])
  if not runs or not column.ratio:
    return column.of(runs) if runs else None
  known = (other for other in found.values() if not isinstance(other, str))
  reference = next(other[column.figure] for other in known if column.figure in other)
  return column.of(runs) / column.of(reference)


def cells(found: Found, name: str, columns: Sequence[Column]) -> list[str]:
  """Returns the texts of a row."""

  def text(column: Column) -> str:
    number = value(found, name, column)
    if number is None:
      return '–'
    if column.ratio:
      return f'{number:.2f}×'
    return column.show(number) if callable(column.show) else f'{number:{column.show}}'

  return [text(column) for column in columns]


def table(found: Found, columns: Sequence[Column], head: str = 'variant') -> str:
  """Returns the rows as text; one that was not measured says why."""
  rows = {name: cells(found, name, columns) for name, known in found.items() if not isinstance(known, str)}
  heads = [column.head for column in columns]
  widths = [max(map(len, column)) for column in zip(heads, *rows.values(), strict=True)]
  side = max(map(len, (head, *found)))

  def line(name: str, texts: Sequence[str]) -> str:
    return '  '.join([f'{name:{side}}', *(f'{text:>{width}}' for text, width in zip(texts, widths, strict=True))])

  return '\n'.join([line(head, heads), *(line(n, rows[n]) if n in rows else f'{n:{side}}  {found[n]}' for n in found)])


def report(
  title: str, variants: Iterable[Variant], columns: Sequence[Column], repeats: int, notes: str = '', **given: Any
) -> Found:
  """Prints what was measured of the variants under a title; `given` are arguments of `measured`."""
  print(f'{title}; {repeats} runs in turn; load average {load_average()}', flush=True)
  found = measured(variants, repeats, **given)
  print(table(found, columns))
  below = f'{notes} Ratios to the first line with figures: of medians, of minima. Load average {load_average()}.'
  print('\n' + textwrap.fill(below.lstrip(), 118))
  return found


def seconds(run: Callable[[], Any]) -> float:
  """Returns the seconds of a call, results included."""
  started = time.perf_counter()
  jax.block_until_ready(run())
  return time.perf_counter() - started


def timed(run: Callable[[], Any], figure: str = 'seconds', scale: float = 1.0) -> Callable[[], dict[str, float]]:
  """Returns a `Variant.run` of the seconds of a call, times `scale`."""
  return lambda: {figure: scale * seconds(run)}


def hardware() -> str:
  """Returns number and kind of the devices, such as '2 × cpu'."""
  return f'{jax.device_count()} × {jax.devices()[0].device_kind}'


def load_average() -> str:
  """Returns the machine's load average of the last minute; above the number of cores, other processes are running."""
  return f'{os.getloadavg()[0]:.1f}' if hasattr(os, 'getloadavg') else 'unknown'


def writable(path: str) -> None:
  """Makes the folder of a file, and the file where there is none.

  Raises:
    UsageError: if nothing can be written there.
  """
  try:
    os.makedirs(os.path.dirname(path) or '.', exist_ok=True)
    with open(path, 'a', encoding='utf-8'):
      pass
  except OSError as error:
    raise errors.UsageError(f'cannot write {path}: {error.strerror}') from error
