"""PSNR over time of a schedule and of the published one, up to the final PSNR of the published one."""

import functools
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

import gradleak as gl
from benchmarks import harness, setting
from gradleak import metrics, registry
from gradleak.core import errors
from gradleak.core.storage import write_atomically
from gradleak.engine import driver
from gradleak.engine.groups import Layout
from gradleak.report import figures
from gradleak.report.figures import SOFT

READS = ('dataset', 'data_dir', 'models', 'attack', 'faster', 'trials', 'output')
CHUNKS = 100
TUNED = 8  # schedules are tuned on the first images, which are not attacked here

_COLOURS = ('#b03a10', '#0f6674')


class Panel(NamedTuple):
  """A model and the images that are attacked.

  Attributes:
    model: as `models.create` takes it.
    size: pixels along each side of the images.
    init: of the model's weights.
    batch_norm: 'train' or 'eval'.
  """

  model: str
  size: int = 32
  init: str = 'explicit'
  batch_norm: str = 'train'

  def __str__(self) -> str:
    return f'{self.model}, {self.size}×{self.size}, init {self.init}, BatchNorm {self.batch_norm}'


PANELS = (Panel('lenet'), Panel('convnet(width=8)', 12, 'default', 'eval'))


class Curve(NamedTuple):
  """The progress of one attack at n points in time; the first is the start.

  Attributes:
    attack: its label.
    steps: steps done, [n].
    seconds: since the start, per trial, without compilation and reading of results, [n].
    core_seconds: the same, of all processor cores together, [n].
    psnr: in dB, [n, trials], of each trial's lowest objective so far.
  """

  attack: str
  steps: np.ndarray
  seconds: np.ndarray
  core_seconds: np.ndarray
  psnr: np.ndarray

  @property
  def median(self) -> np.ndarray:
    """The median PSNR over the trials, [n]."""
    return np.median(self.psnr, axis=1)

  def reaches(self, psnr: float) -> int | None:
    """Returns the index of the first point after the start whose median is at least `psnr`; None if there is none."""
    found = np.flatnonzero(self.median[1:] >= psnr)
    return int(found[0]) + 1 if len(found) else None


def main(options: harness.Options) -> None:
  """Runs both attacks on each panel, prints a table, and draws PSNR over time to a PNG.

  Each attack runs its own number of steps, on the images after the first `TUNED`.

  Raises:
    UsageError: for an unknown model or attack, too few images, or an output that cannot be written.
  """
  panels = [Panel(model) for model in options.listed_models()] if options.models else PANELS
  output, dataset, trials = options.output or 'results/schedules.png', options.dataset, options.trials
  for text in (options.attack, options.faster):
    registry.attack(text)  # an unknown attack is an error before anything is measured
  for panel in panels:
    gl.models.create(panel.model, 10, init=panel.init)
  harness.writable(output)
  drawn = []
  for panel in panels:
    limit = {'limit': TUNED + trials, 'image_size': panel.size, 'channels': 3}
    images = gl.data.load(dataset, 'test', data_dir=options.data_dir, **limit)
    if len(images.samples) < TUNED + trials:
      raise errors.UsageError(f'{dataset} has {len(images.samples)} images, {TUNED + trials} are needed')
    about = f'{dataset}, {trials} images, {harness.hardware()}'
    print(f'{panel}; {about}; load average {harness.load_average()}', flush=True)
    attacked = images._replace(samples=images.samples[TUNED:], targets=images.targets[TUNED:])
    given = {'init': panel.init, 'batch_norm': panel.batch_norm}
    curves = [
      follow(setting.make(panel.model, attack, None, attacked, trials, **given))
      for attack in (options.attack, options.faster)
    ]
    print(table(*curves), flush=True)
    drawn.append((panel, curves))
    write_atomically(pathlib.Path(output), draw(drawn, about))
  print(f'\ns, core s: per trial, by the clock and of all cores together. load average {harness.load_average()}')


def follow(attacked: setting.Setting) -> Curve:
  """Returns the `Curve` of the attack of a `setting.Setting`."""
  name, num_steps = str(attacked.method), attacked.num_steps
  points, paused = [], np.zeros(2)

  def clock():
    return np.array([time.perf_counter(), time.process_time()])

  def mark(progress):
    nonlocal paused
    now = clock()
    states = progress.states
    images = states.best[0]['images'] if progress.step else states.dummy['images']
    points.append((progress.step, now - paused, metrics.psnr(images[:, 0], attacked.truth())))
    print(f'{name}: step {progress.step:,} of {num_steps:,}', file=sys.stderr, flush=True)
    paused += clock() - now  # reading the images is not part of the attack

  run = functools.partial(driver.run, attacked.build, attacked.shared, attacked.lanes, Layout(attacked.usual_group))
  run(num_steps=1)  # compiles
  run(num_steps=num_steps, chunk_steps=-(-num_steps // CHUNKS), on_chunk=mark)
  steps, times, psnr = (np.asarray(column) for column in zip(*points, strict=True))
  seconds, core_seconds = (times - times[0]).T / attacked.trials
  return Curve(name, steps, seconds, core_seconds, psnr)


def table(published: Curve, faster: Curve) -> str:
  """Returns the table of two `Curve`s, and when the second reaches the final median PSNR of the first."""
  width = max(len(curve.attack) for curve in (published, faster)) + 18

  def row(name, curve, i):
    quartiles = np.percentile(curve.psnr[i], (25, 50, 75))
    figures = f'{curve.steps[i]:7,} {curve.seconds[i]:8.3f} {curve.core_seconds[i]:8.3f}'
    return f'{name:{width}} {figures} {quartiles[0]:11.1f} {quartiles[1]:7.1f} {quartiles[2]:7.1f}'

  lines = [f'{"":{width}} {"steps":>7} {"s":>8} {"core s":>8} {"PSNR: 25 %":>11} {"median":>7} {"75 %":>7}']
  for curve in (published, faster):
    lines += [row(f'{curve.attack}, start', curve, 0), row(curve.attack, curve, -1)]
  target = published.median[-1]
  reached = faster.reaches(target)
  if reached is None:
    return '\n'.join([*lines, f'{faster.attack} does not reach {target:.1f} dB'])
  lines.append(row(f'{faster.attack} reaches {target:.1f} dB', faster, reached))
  steps, seconds, core_seconds = (
    getattr(published, name)[-1] / getattr(faster, name)[reached] for name in ('steps', 'seconds', 'core_seconds')
  )
  return '\n'.join([*lines, f'{"times less":{width}} {steps:6.1f}× {seconds:7.1f}× {core_seconds:7.1f}×'])


def draw(panels: Sequence[tuple[Panel, list[Curve]]], title: str) -> bytes:
  """Returns a PNG: median PSNR (dB) over seconds per trial, quartiles as bands; panels are (`Panel`, curves)."""
  with figures.figure(4.6 * len(panels), 3.6, layout='constrained') as (figure, png):
    figure.suptitle(title, fontsize=8.5)
    for axes, (panel, curves) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
      for curve, colour in zip(curves, _COLOURS, strict=True):
        # The start, at 0 seconds, cannot be shown on a logarithmic axis.
        low, median, high = np.percentile(curve.psnr[1:], (25, 50, 75), axis=1)
        axes.plot(curve.seconds[1:], median, color=colour, label=curve.attack)
        axes.fill_between(curve.seconds[1:], low, high, color=colour, alpha=0.15, linewidth=0)
      axes.axhline(curves[0].median[-1], color=_COLOURS[0], linestyle=':', linewidth=1)
      axes.set_xscale('log')
      axes.set_title(str(panel), fontsize=8.5, color=SOFT)
      axes.set_xlabel('seconds per trial')
      axes.spines[['top', 'right']].set_visible(False)
      axes.legend(frameon=False)
    figure.axes[0].set_ylabel('PSNR in dB')
    return png()
