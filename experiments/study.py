"""The source of a table's figures: what is run, what a scale changes, how parts are kept, which rows come out."""

import dataclasses
import functools
import itertools
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import jax
import numpy as np

import gradleak as gl
from experiments.comparison import Cell, Outcome
from experiments.panels import Panel, sheet
from experiments.rehearsal import Ledger
from gradleak.core import errors, statistics, trees
from gradleak.core.locks import alone
from gradleak.core.storage import Workdir, folder_name, write_atomically
from gradleak.engine.progress import reporter
from gradleak.federated.scenario import fingerprint
from gradleak.models import Model

SCALES = ('smoke', 'mini', 'paper')
# The rows of a part, and arrays by name that it keeps; a part is its label and the function that measures it.
Measurement = tuple[list[dict], dict[str, np.ndarray]]
Part = tuple[str, Callable[[], Measurement]]


@dataclasses.dataclass(frozen=True)
class Study:
  """The source of a table's figures. Its fields are the paper's settings.

  A subclass has the settings, `defenses` (label -> text) and `load`. Then it says what is run, as `parts` or in an
  `execute` of its own, and which figure a cell has (`outcome`). What is drawn is `picture` and `panels`.

  Attributes:
    mini: name -> value at scale 'mini', for two cores: of a field of this, or of one of its inner settings.
    inner: fields that are settings objects; their own fields are named as those of the study.
    untold: fields of which `changes` says nothing.
    apart: fields on which the rows of one method do not depend.
    kind, shown: what a run of it, and its `page`, are called.
    page: name of the file that a run leaves in its folder.
    remarks: heading of the last column of the table.
    intervals: a sentence on what stands behind ±.
  """

  mini: Mapping[str, Any] = dataclasses.field(default_factory=dict, kw_only=True)

  inner: ClassVar[tuple[str, ...]] = ()
  untold: ClassVar[tuple[str, ...]] = ('mini',)
  apart: ClassVar[tuple[str, ...]] = ('defenses', 'mini')
  kind: ClassVar[str] = 'measurements'
  shown: ClassVar[str] = 'picture'
  page: ClassVar[str]
  remarks: ClassVar[str]
  intervals: ClassVar[str]

  def replaced(self, **changes: Any) -> Self:
    """Returns this with some fields changed, its own or those of its inner settings."""
    for name in self.inner:
      held, given = getattr(self, name), dict(changes.pop(name, {}))
      own = {field.name for field in dataclasses.fields(held)} & set(changes)
      changes[name] = dataclasses.replace(held, **given, **{key: changes.pop(key) for key in own})
    return dataclasses.replace(self, **changes)

  def small(self) -> Mapping[str, Any]:
    """Returns what scale 'mini' replaces."""
    return self.mini

  def smallest(self) -> Mapping[str, Any]:
    """Returns what scale 'smoke' replaces, so that it runs in seconds on embedded data."""
    raise NotImplementedError

  def scaled(self, scale: str) -> Self:
    """Returns this at a scale: 'paper' as declared, 'mini' for two cores, 'smoke' to check that it runs.

    Raises:
      UsageError: for an unknown scale.
    """
    if scale not in SCALES:
      raise errors.unknown('scale', scale, SCALES)
    if scale == 'paper':
      return self
    return self.replaced(**(self.small() if scale == 'mini' else self.smallest()), mini={})

  def described(self) -> dict[str, Any]:
    """Returns name -> value of all settings; those of inner settings, then of mappings, have their own names, last."""
    told = {name: value for name, value in vars(self).items() if name not in self.untold}
    inner = [vars(told.pop(name)) for name in self.inner]
    mappings = [told.pop(name) for name in list(told) if isinstance(told[name], Mapping)]
    return {**told, **{name: value for part in (*inner, *mappings) for name, value in part.items()}}

  def changes(self, scale: str) -> list[str]:
    """Returns what a scale changes, each as 'name value instead of value'."""
    now, before = self.scaled(scale).described(), self.described()
    changed = {name: (value, before.get(name)) for name, value in now.items() if value != before.get(name)}
    told = {name: (value, 'the published' if old is None else old) for name, (value, old) in changed.items()}
    return [f'{name} {value} instead of {old}' for name, (value, old) in told.items()]

  def texts(self) -> dict[str, str]:
    """Returns the description of each label."""
    return {label: str(text) for label, text in self.defenses.items()}

  def execute(self, data: Any, seed: int, *, workdir: str, progress: str = 'auto') -> list[dict]:
    """Measures each part, or reads it from the folder, and draws them; returns the rows of all parts."""
    rows, kept = [], {}
    with alone(workdir):
      store = self.store(workdir, data, seed)
      for index, (label, measure) in enumerate(self.parts(data, seed, progress)):
        part = store.load_part(folder_name(index, label))
        if part is None:
          part = measure()
          store.save_part(folder_name(index, label), *part)
          say(progress, self.said(label, part[0]))
        rows += part[0]
        kept[label] = part[1]
    write_atomically(os.path.join(workdir, self.page), self.picture(rows))
    panels = self.panels(kept)
    if panels:
      across = min(16, max(12, *(len(panel.samples) for panel in panels)))
      write_atomically(os.path.join(workdir, 'images.png'), sheet(panels, across))
    return rows

  def load(self, data_dir: str | None) -> Any:
    """Returns what a run is given: its samples.

    Raises:
      UsageError: for data that are missing (says how to prepare them) or too few.
    """
    raise NotImplementedError

  def rehearse(self, data_dir: str | None, ledger: Ledger) -> None:
    """Runs every program once that a run would, within `rehearsal.rehearsed`; the ledger counts how often each runs.

    Args:
      data_dir: as `load` takes it.
      ledger: the `Ledger` of the rehearsal.
    """
    del ledger
    for _, measure in self.parts(self.load(data_dir), 0, 'none'):
      measure()

  def store(self, path: str, data: Any, seed: int) -> Workdir:
    """Returns the `Workdir` of a run."""
    config = {name: value for name, value in dataclasses.asdict(self).items() if name != 'mini'}
    return Workdir(path, {**config, 'seed': seed, 'data_fingerprint': fingerprint(data)}, {})

  def parts(self, data: Any, seed: int, progress: str) -> Iterator[Part]:
    """Yields (label, function that measures it) of each part."""
    raise NotImplementedError

  def said(self, label: str, rows: list[dict]) -> str:
    """Returns a line on what was measured."""
    raise NotImplementedError

  def picture(self, rows: list[dict]) -> bytes:
    """Returns the PNG `page`."""
    raise NotImplementedError

  def panels(self, kept: Mapping[str, Mapping[str, np.ndarray]]) -> list[Panel]:
    """Returns the `Panel`s of each part's kept arrays, `{label: {name: array}}`, with a panel for each array."""
    return [Panel(f'{label}: {name}', images) for label, arrays in kept.items() for name, images in arrays.items()]

  def outcome(self, cell: Cell, rows: list[dict]) -> Outcome:
    """Returns the `Outcome` of a cell among the rows of its run."""
    raise NotImplementedError

  def row_of(self, cell: Cell, rows: list[dict]) -> dict:
    """Returns the row that a cell is about."""
    return next(row for row in rows if row['defense'] == cell.defense)

  def stored(self, rows: list[dict], cells: Sequence[Cell]) -> list[dict]:
    """Returns what the outcomes of these cells are computed from: here all rows."""
    del cells
    return rows

  def follows(self, cell: Cell) -> bool:
    """Returns whether a figure follows from the declaration without any run: here none does."""
    del cell
    return False

  @property
  def pictured(self) -> str:
    """Name of the PNG that a run leaves in its folder."""
    return self.page


class Data(NamedTuple):
  """(Images, labels) of the test split, and those that the model is trained on, or None."""

  private: tuple
  trained: tuple | None


@dataclasses.dataclass(frozen=True)
class Repeated(Study):
  """A measurement under several `conditions`, repeated with other samples of a test split.

  Attributes:
    dataset: as in `gradleak.data.load`; private images are drawn from its test split.
    repeats: number of measurements of each figure.
    pool: number of private images to draw from.
    largest: maximum size of a batch; 0: as many samples as its label says.
  """

  dataset: str
  repeats: int
  pool: int
  largest: int = dataclasses.field(default=0, kw_only=True)

  intervals: ClassVar[str] = 'Ours: mean over repeats, each with other samples, ± half its 95 % interval.'

  @property
  def defenses(self) -> dict[str, str]:
    """Labels of what is measured."""
    return {label: label for label in self.conditions}

  def smallest(self) -> dict[str, Any]:
    """Returns what makes this one of 8×8 digits, in two repeats."""
    return {'dataset': 'digits', 'repeats': 2, 'pool': 64, 'largest': 3}

  def held(self, size: int) -> int:
    """Returns how many samples a batch of that size holds at this scale."""
    return min(size, self.largest or size)

  def load(self, data_dir: str | None) -> Data:
    """Returns the `Data`."""
    test = gl.data.load(self.dataset, 'test', data_dir=data_dir, limit=self.pool)
    return Data((test.samples, test.targets), None)

  def rehearse(self, data_dir: str | None, ledger: Ledger) -> None:
    """Runs every program of one repeat; the others are as many again."""
    with ledger.times(self.repeats):
      super(Repeated, dataclasses.replace(self, repeats=1)).rehearse(data_dir, ledger)

  def parts(self, data: Data, seed: int, progress: str) -> Iterator[Part]:
    """Yields (label, function that measures it) of each condition."""
    for label, condition in self.conditions.items():
      yield label, functools.partial(self._condition, label, condition, data.private, seed)


def mean_of(values: Any, remark: str) -> Outcome:
  """Returns the `Outcome` of repeated measurements: their mean and its 95 % interval, which few have."""
  ends = (value if math.isfinite(value) else None for value in statistics.mean_interval(values))
  return Outcome(*ends, len(values), None, 0, remark)  # type: ignore[misc]


def wide(neurons: int, sample_shape: tuple[int, ...], num_classes: int) -> Model:
  """Returns the `Model` of one hidden layer with ReLU; initial weights are PyTorch's, U(±1/√fan_in)."""
  sizes = (math.prod(sample_shape), neurons, num_classes)

  def init(key, _):
    params = {}
    for index, (fan_in, fan_out) in enumerate(itertools.pairwise(sizes)):
      bound = 1 / math.sqrt(fan_in)
      draw = functools.partial(jax.random.uniform, minval=-bound, maxval=bound)
      keys = jax.random.split(jax.random.fold_in(key, index))
      params[f'dense_{index}'] = {'kernel': draw(keys[0], (fan_in, fan_out)), 'bias': draw(keys[1], (fan_out,))}
    return params

  def apply(params, images):
    first, last = params['dense_0'], params['dense_1']
    hidden = jax.nn.relu(images.reshape(len(images), -1) @ first['kernel'] + first['bias'].reshape(1, -1))
    return hidden @ last['kernel'] + last['bias'].reshape(1, -1)

  layers = [trees.Layer(name, ((name, 'kernel'), (name, 'bias'))) for name in ('dense_0', 'dense_1')]
  return gl.models.from_functions(init, apply, f'dense({neurons})', layers=layers)


def say(progress: str, line: str) -> None:
  """Prints a line to standard error, unless `progress` is 'none'."""
  if reporter(progress) is not None:
    print(line, file=sys.stderr, flush=True)
