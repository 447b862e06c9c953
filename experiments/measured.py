"""Shared by experiments that are neither audits nor trainings: they measure parts, store them, and draw them."""

import dataclasses
import functools
import itertools
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple, Self

import jax
import numpy as np

import gradleak as gl
from experiments.experiment import Cell, Scaled
from experiments.panels import Panel, sheet
from gradleak.core import trees
from gradleak.core.locks import alone
from gradleak.core.storage import Workdir, folder_name, write_atomically
from gradleak.engine.progress import reporter
from gradleak.federated.scenario import fingerprint
from gradleak.models import Model

# The rows of a part, and arrays by name that it keeps; a part is its label and the function that measures it.
Measurement = tuple[list[dict], dict[str, np.ndarray]]
Part = tuple[str, Callable[[], Measurement]]


class Data(NamedTuple):
  """(Images, labels) of the test split, and those that the model is trained on, or None."""

  private: tuple
  trained: tuple | None


@dataclasses.dataclass(frozen=True)
class Measured(Scaled):
  """A measurement in parts.

  Subclasses have `defenses`, the labels of what is measured; `parts`, `said`, `picture` and `panels` for `execute`;
  `page`, the name of the picture; and `remarks` and `intervals` for the table.

  Attributes:
    mini: field -> value at scale 'mini'.
  """

  mini: Mapping[str, Any] = dataclasses.field(default_factory=dict, kw_only=True)

  kind: ClassVar[str] = 'measurements'

  def at_mini(self) -> Self:
    """Returns this with what two cores need in place of the published settings."""
    return dataclasses.replace(self, mini={}, **self.mini)

  def changes(self, scale: str) -> list[str]:
    """Returns what a scale changes, each as 'name value instead of value'."""
    now, old = _settings(self.scaled(scale)), _settings(self)
    return [f'{name} {now[name]} instead of {old[name]}' for name in old if now[name] != old[name]]

  def texts(self) -> dict[str, str]:
    """Returns the description of each label."""
    return {label: label for label in self.defenses}

  def store(self, path: str, data: Any, seed: int) -> Workdir:
    """Returns the `Workdir` of a run."""
    config = {name: value for name, value in dataclasses.asdict(self).items() if name != 'mini'}
    return Workdir(path, {**config, 'seed': seed, 'data_fingerprint': fingerprint(data)}, {})

  def execute(self, data: Any, seed: int, *, workdir: str, progress: str = 'auto') -> list[dict]:
    """Measures each part, or reads it from the folder, and draws them; returns a row per label."""
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
      across = min(16, max(12, *(len(panel.images) for panel in panels)))
      write_atomically(os.path.join(workdir, 'images.png'), sheet(panels, across))
    return rows

  def panels(self, kept: dict[str, dict]) -> list[Panel]:
    """Returns the `Panel`s of what each part keeps, {label: {name: array}}; none by default."""
    del kept
    return []

  def row_of(self, cell: Cell, rows: list[dict]) -> dict:
    """Returns the row that a cell is about."""
    return next(row for row in rows if row['defense'] == cell.defense)


@dataclasses.dataclass(frozen=True)
class Repeated(Measured):
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

  shown: ClassVar[str] = 'picture'
  intervals: ClassVar[str] = 'Ours: mean over repeats, each with other samples, ± half its 95 % interval.'

  @property
  def defenses(self) -> tuple[str, ...]:
    """Labels of what is measured."""
    return tuple(self.conditions)

  def at_smoke(self) -> Self:
    """Returns this on 8×8 digits, twice."""
    return dataclasses.replace(self, dataset='digits', repeats=2, pool=64, largest=3, mini={})

  def held(self, size: int) -> int:
    """Returns how many samples a batch of that size holds at this scale."""
    return min(size, self.largest or size)

  def load(self, data_dir: str | None) -> Data:
    """Returns the `Data`.

    Raises:
      UsageError: for data that are missing (says how to prepare them) or too few.
    """
    test = gl.data.load(self.dataset, 'test', data_dir=data_dir, limit=self.pool)
    return Data((test.images, test.labels), None)

  def parts(self, data: Data, seed: int, progress: str) -> Iterator[Part]:
    """Yields (label, function that measures it) of each condition."""
    for label, condition in self.conditions.items():
      yield label, functools.partial(self._condition, label, condition, data.private, seed)


def wide(neurons: int, image_shape: tuple[int, ...], num_classes: int) -> Model:
  """Returns the `Model` of one hidden layer with ReLU; initial weights are PyTorch's, U(±1/√fan_in)."""
  sizes = (math.prod(image_shape), neurons, num_classes)

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


def _settings(run):
  """Returns name -> value of all fields but `mini`; those of a mapping have their own names, last."""
  settings = {name: value for name, value in vars(run).items() if not isinstance(value, Mapping)}
  for name, value in vars(run).items():
    if isinstance(value, Mapping) and name != 'mini':
      settings |= value
  return settings
