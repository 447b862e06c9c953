"""Peeling on a dense network: how many images it certifies, and which disturbances of the gradient prevent it."""

import dataclasses
import functools
import math
import time
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.experiment import Cell, Experiment, Outcome
from experiments.panels import Panel, plain
from experiments.study import Measurement, Repeated, mean_of, wide
from gradleak.attacks.peeling import Peeled, peel
from gradleak.core import statistics
from gradleak.defenses.compression import prune
from gradleak.federated import Client
from gradleak.report import figures

PAPER = 'Shariati, Alambardar Meybodi: LT-peeling, passive. 2026, as it was described to us; we claim no parity.'
PRINTED = {64: 0.994, 128: 0.666}  # passive, CIFAR-10, float64: shares recovered


@dataclasses.dataclass(frozen=True)
class Peelings(Repeated):
  """How many images peeling certifies, of dense networks with weights N(0, 0.5²) and Xavier in the last layer.

  Attributes:
    neurons: of the one hidden layer.
    sizes: of the batches in double and in single precision.
    strained: size of the batches whose gradient is disturbed.
    noises: standard deviations of Gaussian noise on all gradients, relative to the median of the first layer's entries.
    tolerances: of the certificate, under noise; without noise the first one.
    pruned: fractions of each tensor that are set to zero.
    rate: learning rate of two local steps, on half of the batch each.
  """

  neurons: int = 1000
  sizes: tuple[int, ...] = (64, 128)
  strained: int = 32
  noises: tuple[float, ...] = (1e-7, 1e-6, 1e-5, 1e-4, 1e-3)
  tolerances: tuple[float, ...] = (1e-4, 1e-2)
  pruned: tuple[float, ...] = (0.1, 0.5, 0.9)
  rate: float = 1e-3

  page: ClassVar[str] = 'certified.png'
  remarks: ClassVar[str] = 'each; wrong ones; the worst image'

  @property
  def conditions(self) -> dict[str, 'Condition']:
    """Label -> `Condition`, in the order in which they are measured."""
    tolerance = self.tolerances[0]
    found = [Condition(size, dtype, tolerance) for size in self.sizes for dtype in ('float64', 'float32')]
    found.append(Condition(self.strained, 'float64', tolerance))
    found += [
      Condition(self.strained, 'float64', tolerance, noise=n) for tolerance in self.tolerances for n in self.noises
    ]  # fmt: skip
    found += [Condition(self.strained, 'float64', tolerance, pruned=share) for share in self.pruned]
    found.append(Condition(self.strained, 'float64', tolerance, rate=self.rate))
    return {str(condition): condition for condition in found}

  def smallest(self) -> dict[str, Any]:
    """Returns what makes this one of 8×8 digits, with small batches and few neurons."""
    return {**super().smallest(), 'neurons': 64}

  def said(self, label: str, rows: list[dict]) -> str:
    """Returns a line on what was measured."""
    return f'{label}: {rows[0]["certified"]}, wrong {rows[0]["wrong"]}'

  def _condition(self, label: str, condition: 'Condition', private: tuple, seed: int) -> Measurement:
    """Returns ([its row], images of the first repeat)."""
    declared, condition = condition, condition._replace(size=self.held(condition.size))
    found = []
    for repeat in range(self.repeats):
      rng = np.random.default_rng((seed, repeat))
      params = weights(rng, math.prod(private[0].shape[1:]), self.neurons, 10)
      order = rng.permutation(len(private[0]))[: condition.size]
      images, truth = (x[order] for x in private)
      gradient = disturbed(condition, rng, params, images, truth)
      start = time.monotonic()
      peeled = peel(params, gradient, condition.size, tolerance=condition.tolerance)
      found.append((*judged(peeled, images, truth), peeled.unexplained, time.monotonic() - start))
      if not repeat:
        nearest, _ = matched(peeled.images, images)
        shown = images[nearest], peeled.images.reshape(-1, *images.shape[1:])
    exact, wrong, worst, unexplained, seconds = zip(*found, strict=True)
    row = {
      'defense': label,
      **declared._asdict(),
      'held': condition.size,
      'certified': exact,
      'wrong': wrong,
      'worst': worst,
      'unexplained': unexplained,
      'seconds': float(np.median(seconds)),
    }
    kept = dict(zip(('private', 'certified'), shown, strict=True))
    return [row], {name: np.clip(x[:16], 0, 1).astype(np.float32) for name, x in kept.items()}

  def outcome(self, cell: Cell, rows: list[dict]) -> Outcome:
    """Returns the `Outcome` of a cell among the rows of its run."""
    row = self.row_of(cell, rows)
    least = min((x for x in row['worst'] if x is not None and math.isfinite(x)), default=None)
    worst = '' if least is None else f'; {least:.0f} dB'
    remark = f'{", ".join(map(str, row["certified"]))}; {sum(row["wrong"])} wrong{worst}'
    return mean_of(row['certified'], remark)

  def picture(self, rows: list[dict]) -> bytes:
    """Returns a PNG: images certified against noise, a line per tolerance, and of each other condition."""
    calm = next(row for row in rows if row['size'] == self.strained and not (row['noise'] or row['pruned']))
    others = [row for row in rows if not row['noise']]
    with figures.figure(8.4, 2.9, layout='constrained') as (figure, png):
      axes, bars = figure.subplots(1, 2, width_ratios=(1.2, 1))
      for tolerance, colour in zip(self.tolerances, ('#2f86c9', '#d55e00'), strict=False):
        points = [row for row in rows if row['noise'] and row['tolerance'] == tolerance]
        mean, low, high = np.transpose([statistics.mean_interval(row['certified']) for row in points])
        axes.plot(self.noises, mean, marker='o', markersize=3, color=colour, label=f'tolerance {tolerance:g}')
        axes.fill_between(self.noises, low, high, color=colour, alpha=0.15, linewidth=0)
      axes.axhline(np.mean(calm['certified']), color=figures.SOFT, linewidth=0.8, label='no noise')
      axes.set(xscale='log', xlabel='noise, in medians of the gradient')
      axes.set_xticks(self.noises, labels=[f'{noise:g}' for noise in self.noises])
      axes.set_ylim(-0.03 * calm['held'], 1.05 * calm['held'])
      axes.set_ylabel(f'images certified, of {calm["held"]}')
      axes.legend(frameon=False, loc='lower left')
      shares = [100 * np.asarray(row['certified']) / row['held'] for row in others]
      for place, values in enumerate(shares):
        bars.plot(values, [place] * len(values), 'o', color='#2f86c9', markersize=4, alpha=0.6, markeredgewidth=0)
      bars.set_yticks(range(len(others)), labels=[row['defense'] for row in others])
      bars.set(xlabel='images certified, %, a dot per repeat', xlim=(-4, 104), ylim=(len(others) - 0.5, -0.5))
      for one in (axes, bars):
        plain(one)
      return png()

  def panels(self, kept: dict[str, dict]) -> list[Panel]:
    """Returns the grids of the first conditions: true images above the certified ones."""
    first = {label: kept[label] for label in list(self.conditions)[: 2 * len(self.sizes)]}
    return [panel for panel in super().panels(first) if len(panel.samples)]


class Condition(NamedTuple):
  """How a batch's gradient is disturbed.

  Attributes:
    size: of the batch.
    dtype: of the client's arithmetic.
    tolerance: of the certificate.
    noise: standard deviation of Gaussian noise, relative to the median of the first layer's nonzero entries.
    pruned: fraction of each tensor that is set to zero.
    rate: learning rate of two local steps on half of the batch each, whose delta is sent; 0 sends the gradient.
  """

  size: int
  dtype: str
  tolerance: float
  noise: float = 0.0
  pruned: float = 0.0
  rate: float = 0.0

  def __str__(self) -> str:
    text = f'{self.size} images, {self.dtype}'
    if self.noise:
      text += f', noise {self.noise:g}, tolerance {self.tolerance:g}'
    if self.pruned:
      text += f', {100 * self.pruned:g} % pruned'
    return text + (', two local steps' if self.rate else '')


def weights(rng: np.random.Generator, size: int, neurons: int, classes: int) -> list[tuple]:
  """Returns the [(kernel, bias), (kernel, bias)] of the published experiment, float64."""
  last = math.sqrt(2 / (neurons + classes))
  return [
    (rng.normal(0, 0.5, (size, neurons)), np.zeros(neurons)),
    (rng.normal(0, last, (neurons, classes)), np.zeros(classes)),
  ]


def disturbed(
  condition: Condition, rng: np.random.Generator, params: list[tuple], images: np.ndarray, truth: np.ndarray
) -> list[tuple]:
  """Returns the gradient, as `peeling.peel` takes it, that the server sees under a `Condition`."""
  names = ('dense_0', 'dense_1')
  with jax.enable_x64(condition.dtype == 'float64'):
    tree = {n: dict(zip(('kernel', 'bias'), layer, strict=True)) for n, layer in zip(names, params, strict=True)}
    tree = jax.tree.map(lambda x: jnp.asarray(x, condition.dtype), tree)
    send = _compiled_client(len(params[0][1]), images.shape[1:], len(params[1][1]), condition._replace(noise=0.0))
    sent = send({'params': tree}, jnp.asarray(images, condition.dtype), jnp.asarray(truth, jnp.int32)).update
    update = jax.device_get(sent)
  scale = -1 / (condition.rate * -(-condition.size // (condition.size // 2))) if condition.rate else 1.0
  entries = np.abs(update['dense_0']['kernel'])
  stddev = condition.noise * np.median(entries[entries > 0]) if condition.noise else 0.0
  return [tuple(scale * x + rng.normal(0, stddev, x.shape) for x in (update[n]['kernel'], update[n]['bias']))
          for n in names]  # fmt: skip


@functools.cache
def _compiled_client(neurons: int, shape: tuple[int, ...], classes: int, condition: Condition) -> Callable:
  """Returns the compiled local update of a client that prunes, or takes two steps, as a `Condition` says."""
  sharing = {'upload': prune(rate=condition.pruned)} if condition.pruned else {}
  if condition.rate:
    sharing |= {'share': 'delta', 'batch_size': condition.size // 2, 'optimizer': optax.sgd(condition.rate)}
  return jax.jit(functools.partial(Client(wide(neurons, shape, classes), classes, **sharing).local_update, None))


def matched(found: np.ndarray, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Returns (index of the nearest true image, PSNR in dB, at most 300) of each image that was found."""
  if not len(found):
    return np.zeros(0, int), np.zeros(0)
  images = images.reshape(len(images), -1).astype(np.float64)
  distances = np.stack([np.mean((images - row) ** 2, axis=1) for row in found])
  return distances.argmin(axis=1), -10 * np.log10(np.maximum(distances.min(axis=1), 1e-30))


def judged(peeled: Peeled, images: np.ndarray, truth: np.ndarray) -> tuple[int, int, float]:
  """Returns (number of images above 60 dB with their labels, number of other certified ones, the least PSNR or NaN)."""
  nearest, psnr = matched(peeled.images, images)
  right = (psnr > 60) & (peeled.labels == np.asarray(truth)[nearest])
  exact = len(set(nearest[right].tolist()))
  return exact, len(nearest) - exact, float(psnr.min()) if len(psnr) else math.nan


def _peeling_cifar10():
  run = Peelings('cifar10', 20, 1000, mini={'repeats': 5})
  cells = tuple(
    Cell(f'batches of {c.size}', label, 'certified', 'dense', label,
         PRINTED[c.size] * c.size if c.size in PRINTED and c.dtype == 'float64' else None)
    for label, c in run.conditions.items()
  )  # fmt: skip
  return Experiment(
    'peeling_cifar10',
    PAPER,
    'Passive peeling, 1,000 ReLU neurons, CIFAR-10',
    'The gradient certifies its images exactly, labels included; a small disturbance of the gradient prevents it.',
    {'dense': run},
    cells,
    'Counted are certified images above 60 dB with the right label, each once; all other certified ones are “wrong”.',
    (
      'Weights N(0, 0.5²), in the last layer Xavier’s, and zero biases; new ones and other images in each repeat.',
      'The certificate’s tolerance is 1e-4 unless stated otherwise.',
      'Noise is added to all tensors, relative to the median of the first layer’s nonzero entries.',
      'Two local steps: half of the batch each, rate 1e-3; the server divides the delta by the rate.',
    ),
  )


EXPERIMENTS = (_peeling_cifar10(),)
