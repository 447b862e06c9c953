"""The pictures of an audit: truth and reconstructions in a grid, and single images as data URIs."""

import base64
import io
from typing import NamedTuple

import numpy as np

from gradleak import metrics
from gradleak.report import figures, tables
from gradleak.report.figures import SOFT
from gradleak.report.formatting import number, wrap

SYMBOLS = {'recovered': '●', 'protected': '○', 'not solved': '?', 'diverged': '×'}
MAX_COLUMNS = 8

_COLOURS = {'recovered': '#b03a10', 'protected': '#0f6674', 'not solved': '#735a00', 'diverged': SOFT}


class Picture(NamedTuple):
  """One image of the grid.

  Attributes:
    trial: the trial that it belongs to, as its row names it.
    index: its place in the trial's batch.
    pixels: [H, W, C], pixels in [0, 1]; may hold NaN.
    psnr: dB against the truth, None for the truth itself and where there is none.
    row: the row of its trial, attack, defense and counter-measure; None for the truth.
  """

  trial: int
  index: int
  pixels: np.ndarray
  psnr: float | None
  row: dict | None


def select(result, columns=MAX_COLUMNS):
  """Returns the pictures to show: the truth's, and {`tables.attacker`: pictures}, in the same order of columns.

  Of the attackers who know a defense the strongest is shown, after the one who does not. The first trials are shown,
  never the best; of a batch the first images.
  """
  rows = tables.by_attacker(result.rows)
  pairs = tables.paired(tables.summarise(result.rows)).values()
  trials = list(dict.fromkeys(row['trial'] for row in result.rows))
  truth = np.asarray(result.truth)
  images = min(truth.shape[1], columns)
  places = [(t, b) for t in range(min(len(trials), max(1, columns // images))) for b in range(images)]
  shown = {}
  for attacker in (tables.attacker(summary) for pair in pairs for summary in pair):
    by_trial = {row['trial']: row for row in rows[attacker]}
    pixels = np.asarray(result.reconstructions[attacker])
    chosen = np.stack([pixels[place] for place in places]).astype(np.float32)
    decibels = np.asarray(metrics.psnr(chosen, np.stack([truth[place] for place in places]).astype(np.float32)))
    shown[attacker] = [
      Picture(trials[t], b, pixels[t, b], None if np.isnan(figure) else float(figure), by_trial[trials[t]])
      for (t, b), figure in zip(places, decibels, strict=True)
    ]
  return [Picture(trials[t], b, truth[t, b], None, None) for t, b in places], shown


def grid(result):
  """Returns a PNG: the truth above one row per attack and defense, at most 8 columns, the PSNR in dB under each.

  Where attackers who know a defense were run, the row of the strongest follows, joined to the other one by a bar.
  """
  truth, shown = select(result)
  labels = [_label('private images', 'truth'), *(_label(*attacker, shown=shown) for attacker in shown)]
  second = [False, *(len(attacker) == 3 and attacker[:2] in shown for attacker in shown)]
  longest = max(len(line) for label in labels for line, _ in label)
  height, width = truth[0].pixels.shape[:2]
  cell, caption, margin, head, foot = 0.95, 0.22, 0.1, 0.28, 0.5  # all lengths in inches
  start, tall = 4 * margin + 0.075 * longest, cell * height / width
  apart = 2 * margin * any(second)  # between pairs, so that one is told from the next
  tops = [head]
  for is_second in second[1:]:
    above = caption if len(tops) > 1 else 0
    tops.append(tops[-1] + tall + above + margin + (0 if is_second else apart))
  across = max(start + (cell + margin) * len(truth), 3.7)
  down = tops[-1] + tall + caption + margin + foot
  with figures.figure(across, down) as (figure, png):
    axes = figure.add_axes((0, 0, 1, 1))
    for r, (pictures, label, top) in enumerate(zip([truth, *shown.values()], labels, tops, strict=True)):
      _draw_label(axes, label, 2 * margin, top + tall / 2)
      if second[r]:
        axes.plot([margin, margin], [tops[r - 1], top + tall], color=SOFT, linewidth=2, solid_capstyle='butt')
      for c, picture in enumerate(pictures):
        _draw_picture(axes, picture, start + c * (cell + margin), top, cell, tall)
    legend = '    '.join(f'{symbol} {verdict}' for verdict, symbol in SYMBOLS.items())
    axes.text(margin, down - 0.28, legend, va='center', color=SOFT)
    axes.text(margin, down - 0.11, 'PSNR in dB', va='center', color=SOFT)
    axes.set(xlim=(0, across), ylim=(down, 0))
    axes.set_axis_off()
    return png()


def data_uri(image, largest=192):
  """Returns `image` as a PNG data URI.

  Args:
    image: [H, W, C] with pixels in [0, 1], clipped; NaN pixels are shown as a checkerboard.
    largest: images with a longer side are reduced to it, so that a page of photographs stays small.
  """
  from PIL import Image

  picture = Image.fromarray(_bytes(image))
  picture.thumbnail((largest, largest))
  buffer = io.BytesIO()
  picture.save(buffer, format='PNG', optimize=True)
  return f'data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}'


def _bytes(image):
  """Returns [H, W] or [H, W, 3] bytes; pixels that are not finite as a checkerboard, unusual channels averaged."""
  image = np.asarray(image, np.float64)
  image = image if image.shape[-1] == 3 else np.mean(image, axis=-1, keepdims=True)
  rows, columns = np.indices(image.shape[:2])
  board = np.where((rows + columns) % 2 == 0, 0.78, 0.9)[..., np.newaxis]
  pixels = np.where(np.isfinite(image).all(axis=-1, keepdims=True), np.clip(image, 0, 1), board)
  pixels = np.round(255 * pixels).astype(np.uint8)
  return pixels[..., 0] if pixels.shape[-1] == 1 else pixels


def _label(attack, defense, counter=None, shown=()):
  """Returns the lines that name a row, each with its style; the second row of a pair does not repeat the first."""
  named = [(line, {'color': SOFT}) for line in wrap(attack, 34)]
  named += [(line, {'weight': 'bold'}) for line in wrap(defense, 30)]
  if counter is None:
    paired = any(attacker[:2] == (attack, defense) and len(attacker) == 3 for attacker in shown)
    return [*named, ('unaware', {})] if paired else named
  knowing = [(line, {}) for line in wrap(f'aware: {counter}', 30)]
  return knowing if (attack, defense) in shown else [*named, *knowing]


def _draw_label(axes, label, x, y):
  """Writes the lines of a label, centred on height `y`."""
  for i, (line, style) in enumerate(label):
    axes.text(x, y + 0.17 * (i - (len(label) - 1) / 2), line, va='center', **style)


def _draw_picture(axes, picture, left, top, width, height):
  """Draws a picture in a frame of its verdict's colour, the PSNR below; above the truth its trial."""
  from matplotlib.patches import Rectangle

  extent = (left, left + width, top + height, top)
  pixels = _bytes(picture.pixels)
  axes.imshow(pixels, cmap='gray', vmin=0, vmax=255, interpolation='nearest', aspect='auto', extent=extent)
  middle = left + width / 2
  if picture.row is None:
    frame = {'edgecolor': '#9a9fa6', 'linewidth': 0.6}
    axes.text(middle, top - 0.08, f'trial {picture.trial}' if picture.index == 0 else '', ha='center', color=SOFT)
  else:
    frame = {'edgecolor': _COLOURS[picture.row['verdict']], 'linewidth': 1.8}
    value = 'NaN' if picture.psnr is None else number(picture.psnr)
    text = f'{SYMBOLS[picture.row["verdict"]]} {value}'
    axes.text(middle, top + height + 0.14, text, ha='center', va='center', color=frame['edgecolor'])
  axes.add_patch(Rectangle((left, top), width, height, facecolor='none', **frame))
