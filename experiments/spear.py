"""SPEAR on a dense network: how exactly it finds the inputs of small batches, without and with noise."""

import dataclasses
import itertools
import math
import time
from typing import Any, ClassVar

import numpy as np

from experiments.experiment import Cell, Experiment, Outcome
from experiments.panels import plain
from experiments.study import Measurement, Repeated
from gradleak.attacks.peeling import implied_gradients
from gradleak.attacks.spear import spear
from gradleak.report import figures

PAPER = 'Dimitrov, Baader, Müller, Vechev: SPEAR: Exact Gradient Inversion of Batches. NeurIPS 2024.'


@dataclasses.dataclass(frozen=True)
class Spears(Repeated):
  """How exactly SPEAR separates batches at a dense layer in front of two others.

  Attributes:
    sizes: of the batches.
    neurons: of the layer.
    features: number of its inputs if they are standard normal; the others are images of `dataset` less their mean.
    noises: standard deviations of Gaussian noise, relative to the median of the gradient, on the smallest batch.
  """

  sizes: tuple[int, ...] = (10, 12, 14)
  neurons: int = 400
  features: int = 200
  noises: tuple[float, ...] = (1e-7, 1e-5, 1e-3)

  page: ClassVar[str] = 'errors.png'
  remarks: ClassVar[str] = 'batches exact to 1e-6; seconds of one'

  @property
  def conditions(self) -> dict[str, tuple[str, int, str, float]]:
    """Label -> (inputs, size, dtype, noise), in the order in which they are measured."""
    found = [('normal', size, 'float64', 0.0) for size in self.sizes]
    found += [('images', size, 'float64', 0.0) for size in self.sizes]
    found.append(('normal', self.sizes[0], 'float32', 0.0))
    found += [('normal', self.sizes[0], 'float64', noise) for noise in self.noises]
    return {spear_label(*condition): condition for condition in found}

  def smallest(self) -> dict[str, Any]:
    """Returns what makes this one of small batches and few neurons."""
    return {**super().smallest(), 'neurons': 40, 'features': 20}

  def said(self, label: str, rows: list[dict]) -> str:
    """Returns a line on what was measured."""
    return f'{label}: largest errors {", ".join(f"{x:.1g}" for x in rows[0]["errors"])}'

  def _condition(self, label: str, condition: tuple, private: tuple, seed: int) -> Measurement:
    """Returns ([its row], nothing to show)."""
    kind, size, dtype, noise = condition
    size, found = self.held(size), []
    for repeat in range(self.repeats):
      rng = np.random.default_rng((seed, repeat, size))
      if kind == 'images':
        images = private[0].reshape(len(private[0]), -1).astype(np.float64)
        inputs = (images - images.mean(axis=0))[rng.choice(len(images), size, replace=False)]
      else:
        inputs = rng.normal(size=(size, self.features))
      layer = first_layer(rng, inputs.astype(dtype), self.neurons, noise)
      start = time.monotonic()
      tolerance = math.sqrt(noise) if noise else None
      separated = spear(layer, rng, rank=size if noise else None, tolerance=tolerance)
      distances = [np.abs(separated.inputs - row).max(axis=1, initial=0).min(initial=np.inf) for row in inputs]
      found.append((float(np.max(distances)), separated.agreement, separated.rank, time.monotonic() - start))
    worst, agreement, rank, seconds = zip(*found, strict=True)
    row = {'defense': label, 'size': size, 'errors': worst, 'agreement': agreement, 'rank': rank}
    return [{**row, 'seconds': float(np.median(seconds))}], {}

  def outcome(self, cell: Cell, rows: list[dict]) -> Outcome:
    """Returns the `Outcome` of a cell among the rows of its run: the largest error of any input of any batch."""
    row = self.row_of(cell, rows)
    errors = _errors(row)
    worst = max(errors)
    exact = sum(error < 1e-6 for error in errors)
    remark = f'{exact} of {len(errors)}; {row["seconds"]:.1f} s'
    return Outcome(worst, None, None, len(errors), None, 0, remark)

  def picture(self, rows: list[dict]) -> bytes:
    """Returns a PNG: the largest error of each batch; batches that were not separated are at the right."""
    with figures.figure(6.2, 0.26 * len(rows) + 0.9, layout='constrained') as (figure, png):
      axes = figure.subplots()
      for place, row in enumerate(rows):
        values = [min(max(error, 1e-16), 30.0) for error in _errors(row)]
        axes.plot(values, [place] * len(values), 'o', color='#2f86c9', markersize=4, alpha=0.6, markeredgewidth=0)
      axes.axvline(1e-6, color=figures.SOFT, linewidth=0.8)
      axes.set_yticks(range(len(rows)), labels=[row['defense'] for row in rows])
      axes.set(xscale='log', xlim=(3e-17, 100), ylim=(len(rows) - 0.5, -0.5))
      axes.set_xticks([1e-15, 1e-12, 1e-9, 1e-6, 1e-3, 1.0], labels=['1e-15', '1e-12', '1e-9', '1e-6', '1e-3', '1'])
      axes.set_xlabel('largest error of a batch; rightmost: not separated')
      plain(axes, 'x')
      return png()


def _errors(row: dict) -> list[float]:
  """Returns the largest error of each batch of a row; infinite ones are stored as null."""
  return [math.inf if error is None else error for error in row['errors']]


def spear_label(kind: str, size: int, dtype: str, noise: float) -> str:
  """Returns the label of a condition of `Spears`."""
  inputs = {'normal': 'normal inputs', 'images': 'images less their mean'}[kind]
  return f'{size} {inputs}, {dtype}' + (f', noise {noise:g}' if noise else '')


def first_layer(rng: np.random.Generator, inputs: np.ndarray, neurons: int, noise: float) -> tuple[Any, ...]:
  """Returns (kernel gradient, bias gradient, kernel, bias) of the first of three layers, U(±1/√fan_in), mean loss."""
  dtype, sizes = inputs.dtype, (inputs.shape[1], neurons, 40, 10)
  layers = [
    tuple((rng.uniform(-1, 1, shape) / math.sqrt(i)).astype(dtype) for shape in ((i, o), (o,)))
    for i, o in itertools.pairwise(sizes)
  ]
  truth = rng.integers(10, size=len(inputs))
  z = inputs @ layers[0][0] + layers[0][1]
  shares = implied_gradients(layers[1:], z, truth)[0] / dtype.type(len(inputs))
  gradient = inputs.T @ shares, shares.sum(axis=0)
  entries = np.abs(gradient[0])
  stddev = noise * np.median(entries[entries > 0])
  gradient = [(x + rng.normal(0, stddev, x.shape)).astype(dtype) if noise else x for x in gradient]
  return *gradient, *layers[0]


def _spear_exact():
  run = Spears('cifar10', 20, 1000, mini={'repeats': 5})
  cells = tuple(
    Cell(f'{kind}, {dtype}' if not noise else f'{kind}, {dtype}, noise', label, 'largest_error', 'dense', label)
    for label, (kind, _, dtype, noise) in run.conditions.items()
  )
  return Experiment(
    'spear_exact',
    PAPER,
    'SPEAR: exact inputs of small batches',
    'Low rank and ReLU’s zeros reveal a batch exactly, and little noise prevents it. Nothing of this is printed.',
    {'dense': run},
    cells,
    'The largest error of any entry of any input, in the best match of each; “–”: a batch was not separated.',
    (
      'Under noise the attacker is given the rank, which the singular values do not show, and its tolerance for zero '
      'is the square root of the noise.',
      'A layer of 400 neurons in front of 40 and 10, U(±1/√fan_in); normal inputs have 200 features.',
    ),
  )


EXPERIMENTS = (_spear_exact(),)
