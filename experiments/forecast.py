"""How long tables take: the operations of all of their programs, counted in a rehearsal, at rates measured here."""

import dataclasses
import functools
import json
import math
import pathlib
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from scipy import optimize

import gradleak as gl
from experiments.experiment import Experiment, Run
from experiments.rehearsal import Ledger, rehearsed
from experiments.results import declared
from gradleak import AuditSettings
from gradleak.audit import lanes
from gradleak.audit.lanes import Found, Table
from gradleak.audit.plan import Plan, plan
from gradleak.audit.uploads import uploads
from gradleak.audit.views import views
from gradleak.core import errors
from gradleak.core.storage import made_folder, read_json, write_atomically
from gradleak.engine import driver
from gradleak.models.operations import Operations
from gradleak.report.formatting import aligned

# What is timed: network, trials, steps. Some are bound by many small operations, others by matrix products.
TIMED = (('mlp', 32, 400), ('lenet', 32, 100), ('convnet(width=32)', 6, 6))
# Raised where a rehearsal counts in another way: forecasts that are kept were counted in the former one.
COUNTING = 2


class Rates(NamedTuple):
  """What a device does in a second.

  Attributes:
    products: floating-point operations of matrix products.
    entries: entries that other operations make.
    executed: operations of any size that it starts.
    equations: operations of a program's text that it compiles.
  """

  products: float
  entries: float = math.inf
  executed: float = math.inf
  equations: float = math.inf

  def seconds(self, operations: Operations) -> float:
    """Returns how long operations take."""
    return sum(getattr(operations, name) / rate for name, rate in self._asdict().items())

  def __str__(self) -> str:
    return (
      f'{self.products / 1e9:.3g} GFLOP/s of products, {self.entries / 1e9:.3g} billion other entries/s, '
      f'{self.executed:.3g} operations started/s, {self.equations:.3g} compiled/s'
    )


class Forecast(NamedTuple):
  """What a table takes at a scale.

  Attributes:
    experiment: its name.
    runs: number of its runs.
    lanes: number of attacks' starts and of clients' rounds.
    operations: the `Operations` of all its programs.
    kept: bytes of the uploads and views that the host holds at a time.
    error: why the rehearsal failed; '' if it did not.
    settings: the declared settings of its runs, plain JSON.
  """

  experiment: str
  runs: int
  lanes: int
  operations: Operations
  kept: float
  error: str
  settings: dict[str, Any]


def forecast(experiment: Experiment, scale: str) -> Forecast:
  """Returns the `Forecast` of a table: its programs traced, none compiled, see `rehearsal`."""
  error, ledger = '', Ledger()
  with rehearsed(ledger), warnings.catch_warnings():
    warnings.simplefilter('ignore')  # what runs on the host is handed noise
    for name, run in experiment.runs.items():
      try:
        run.scaled(scale).rehearse(None, ledger)
      except Exception as failure:  # all that a run may fail with
        error = error or f'{name}: {type(failure).__name__}: {failure} ({_place(failure)})'
  runs = len(experiment.runs)
  return Forecast(experiment.name, runs, ledger.lanes, ledger.total, ledger.kept, error, _settings(experiment, scale))


def _settings(experiment: Experiment, scale: str) -> dict[str, Any]:
  return {name: declared(run.scaled(scale)) for name, run in experiment.runs.items()}


def keep(folder: Any, found: Forecast) -> None:
  """Writes a forecast into a folder, for `read`."""
  told = {**found._asdict(), 'operations': dataclasses.asdict(found.operations), 'counting': COUNTING}
  write_atomically(made_folder(folder) / f'{found.experiment}.json', json.dumps(told) + '\n')


def read(folder: Any, experiment: Experiment, scale: str) -> Forecast | None:
  """Returns the forecast of a table that a folder holds; None where it is missing, of other settings or a former one.

  Raises:
    UsageError: if the file is damaged.
  """
  try:
    known = read_json(pathlib.Path(folder) / f'{experiment.name}.json', 'remove it to count the table anew', dict)
    if known.pop('counting', 1) != COUNTING:
      return None
    found = Forecast(**{**known, 'operations': Operations(**known['operations'])})
  except (OSError, TypeError, KeyError):
    return None
  return found if found.settings == _settings(experiment, scale) and not found.error else None


COLUMNS = ('table', 'runs', 'lanes', 'TFLOP', 'G entries', 'hours', 'MiB per lane', 'GiB of uploads', 'lacks')


def shown(forecasts: Sequence[Forecast], rates: Rates, lacking: Mapping[str, Sequence[str]]) -> str:
  """Returns a table of forecasts, the shortest first, and a line of all.

  Args:
    forecasts: of some tables.
    rates: of the device.
    lacking: name of a table -> datasets that are not at hand.
  """
  ordered = sorted(forecasts, key=lambda one: rates.seconds(one.operations))
  lines = [COLUMNS, *(_line(one, rates, lacking.get(one.experiment, ())) for one in ordered)]
  whole = sum((one.operations for one in forecasts), Operations())
  runs, lanes_ = (sum(getattr(one, name) for one in forecasts) for name in ('runs', 'lanes'))
  total = Forecast(f'all {len(forecasts)}', runs, lanes_, whole, 0.0, '', {})
  lines.append((*_line(total, rates, ())[:6], '', '', ''))
  return '\n'.join(aligned(lines))


def _line(one: Forecast, rates: Rates, lacks: Sequence[str]) -> tuple[str, ...]:
  """Returns the cells of a table, as `COLUMNS` heads them."""
  operations = one.operations
  figures = (
    operations.products / 1e12, operations.entries / 1e9, rates.seconds(operations) / 3600, operations.held / 2**20,
    one.kept / 2**30,
  )  # fmt: skip
  last = f'FAILED: {one.error}' if one.error else ', '.join(lacks) or '–'
  return (one.experiment, str(one.runs), f'{one.lanes:,}', *map(_figure, figures), last)


def _figure(value: float) -> str:
  """Returns a number of three significant figures, with separators."""
  return f'{value:,.0f}' if value >= 100 else f'{value:.3g}'


def missing(experiment: Experiment, scale: str, data_dir: str | None) -> tuple[str, ...]:
  """Returns the datasets of a table that cannot be read."""
  runs = [run.scaled(scale) for run in experiment.runs.values()]
  names = {name: None for run in runs for name in (run.dataset, getattr(run, 'starts', '')) if name}
  return tuple(name for name in names if not _readable(name, data_dir))


def _place(failure: Exception) -> str:
  """Returns the last line of our own code behind an error."""
  own = [frame for frame in traceback.extract_tb(failure.__traceback__) if 'site-packages' not in frame.filename]
  return f'{own[-1].filename.rpartition("/")[2]}:{own[-1].lineno}'


@functools.cache
def _readable(name: str, data_dir: str | None) -> bool:
  try:
    gl.data.load(name, 'test', data_dir=data_dir, limit=1)
  except errors.UsageError:
    return False
  return True


def measured_rates() -> Rates:
  """Returns the `Rates` of this device: the attacks of `TIMED` are counted, compiled and timed."""
  counts, seconds, compiled = [], [], []
  for model, trials, steps in TIMED:
    found, first, again = _timed(model, trials, steps)
    counts.append((found.products, found.entries, found.executed))
    seconds.append(again)
    compiled.append(found.equations / max(first - again, 1e-3))
  costs, _ = optimize.nnls(np.asarray(counts) / np.asarray(seconds)[:, None], np.ones(len(seconds)))
  return Rates(*(1 / cost if cost else math.inf for cost in costs), float(np.median(compiled)))


def _timed(model: str, trials: int, steps: int) -> tuple[Operations, float, float]:
  """Returns the operations of an attack on some faces, its seconds with compilation, and without."""
  given = AuditSettings(controls=1, knowledge='non-adaptive')
  run = Run('faces', model, f'csdlg(steps={steps})', {'none': 'none'}, trials=trials, settings=given)
  scenario = run.scenario(run.load(None), 0)
  made = plan(jax.random.key(0), scenario, [None], [run.method()], trials, given)
  work, _ = matching(made)
  first, *others = (seconds(work) for _ in range(3))
  return operations(work), first, min(others)


def matching(made: Plan) -> tuple[Callable[[], Found], Table]:
  """Returns (what runs all lanes of the first structure of an audit, its `lanes.Table`)."""
  group = made.groups[0]
  size = driver.default_group_size(group.scenario.variables, group.settings.batch_size)
  sent = uploads(group, np.arange(group.num_trials), np.arange(group.settings.controls), size)
  table = lanes.table(group, views(group, sent), lanes.structures(group)[0])
  return lambda: lanes.run(group, table, size), table


def operations(work: Callable[[], Any]) -> Operations:
  """Returns the `Operations` of a call, in a rehearsal of it."""
  with rehearsed(ledger := Ledger()):
    work()
  return ledger.total


def seconds(work: Callable[[], Any]) -> float:
  """Returns the seconds of a call, results included."""
  started = time.monotonic()
  jax.block_until_ready(jax.tree.leaves(work()))
  return time.monotonic() - started
