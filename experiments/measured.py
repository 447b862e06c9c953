"""What experiments that are neither audits nor trainings share: they measure parts, keep them, and draw them."""

import dataclasses
import functools
import itertools
import math
import os
import sys
from collections.abc import Mapping
from typing import NamedTuple

import jax

import gradleak as gl
from experiments.experiment import Scaled
from experiments.panels import sheet
from gradleak import trees
from gradleak.progress import reporter
from gradleak.scenario import fingerprint
from gradleak.storage import Workdir, folder_name, write_atomically


@dataclasses.dataclass(frozen=True)
class Measured(Scaled):
  """What is measured part by part.

  It has `defenses`, the labels of what is measured; `parts`, `said`, `picture` and `panels` for `execute`; `page`, the
  name of its picture; and `remarks` and `intervals` for the table.

  Attributes:
    mini: field -> value at scale 'mini'.
  """

  mini: Mapping = dataclasses.field(default_factory=dict, kw_only=True)

  kind = 'measurements'

  def at_mini(self):
    """Returns this with what two cores need in place of the published settings."""
    return dataclasses.replace(self, mini={}, **self.mini)

  def changes(self, scale):
    """Returns what a scale changes, each as 'name value instead of value'."""
    now, old = _settings(self.scaled(scale)), _settings(self)
    return [f'{name} {now[name]} instead of {old[name]}' for name in old if now[name] != old[name]]

  def texts(self):
    """Returns what stands behind each label, in words."""
    return {label: label for label in self.defenses}

  def store(self, path, data, seed):
    """Returns the `Workdir` of a run."""
    config = {name: value for name, value in dataclasses.asdict(self).items() if name != 'mini'}
    return Workdir(path, {**config, 'seed': seed, 'data_fingerprint': fingerprint(data)}, {})

  def execute(self, data, seed, *, workdir, progress='auto'):
    """Measures each part, or reads it back, and draws them; returns a row per label."""
    store = self.store(workdir, data, seed)
    rows, kept = [], {}
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

  def panels(self, kept):
    """Returns the `Panel`s of what each part keeps, {label: {name: array}}; none."""
    del kept
    return []

  def row_of(self, cell, rows):
    """Returns the row that a cell is about."""
    return next(row for row in rows if row['defense'] == cell.defense)


@dataclasses.dataclass(frozen=True)
class Repeated(Measured):
  """What is measured under `conditions`, again and again with other samples of a test split.

  Attributes:
    dataset: as in `gradleak.data.load`; private images are drawn from its test split.
    repeats: how often each figure is measured.
    pool: how many private images are there to draw from.
    largest: a batch holds no more; 0 holds as many as its label says.
  """

  dataset: str
  repeats: int
  pool: int
  largest: int = dataclasses.field(default=0, kw_only=True)

  shown = 'picture'
  intervals = 'Ours: mean over repeats, each with other samples, ± half its 95 % interval.'

  @property
  def defenses(self):
    """Labels of what is measured."""
    return tuple(self.conditions)

  def at_smoke(self):
    """Returns this on 8×8 digits, twice."""
    return dataclasses.replace(self, dataset='digits', repeats=2, pool=64, largest=3, mini={})

  def held(self, size):
    """Returns how many samples a batch of that size holds at this scale."""
    return min(size, self.largest or size)

  def load(self, data_dir):
    """Returns the `Data`.

    Raises:
      UsageError: for data that are missing (says how to prepare them) or too few.
    """
    test = gl.data.load(self.dataset, 'test', data_dir=data_dir, limit=self.pool)
    return Data((test.images, test.labels), None)

  def parts(self, data, seed, progress):
    """Yields (label, function that measures it) of each condition."""
    for label, condition in self.conditions.items():
      yield label, functools.partial(self._condition, label, condition, data.private, seed)


class Data(NamedTuple):
  """Images, labels; of the test split, and those that the model is trained on, or None."""

  private: tuple
  trained: tuple | None


def wide(neurons, image_shape, num_classes):
  """Returns the `Model` of one hidden layer with ReLU; starts as PyTorch's do, at U(±1/√fan_in)."""
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


def say(progress, line):
  """Prints a line to standard error, unless `progress` is 'none'."""
  if reporter(progress) is not None:
    print(line, file=sys.stderr, flush=True)


def _settings(run):
  """Returns name -> value of all fields but `mini`; what a mapping holds stands under its own names, last."""
  settings = {name: value for name, value in vars(run).items() if not isinstance(value, Mapping)}
  for name, value in vars(run).items():
    if isinstance(value, Mapping) and name != 'mini':
      settings |= value
  return settings
