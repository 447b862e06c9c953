"""The pictures of an audit: truth and reconstructions in a grid, and single images as data URIs."""

import base64
import io
from typing import NamedTuple

import numpy as np

from gradleak import metrics
from gradleak.report import tables
from gradleak.report.formatting import number, wrap

SYMBOLS = {'recovered': '●', 'protected': '○', 'not solved': '?', 'diverged': '×'}
MAX_COLUMNS = 8

_INK = '#1d2126'
_SOFT = '#5c6168'
_COLOURS = {'recovered': '#b03a10', 'protected': '#0f6674', 'not solved': '#735a00', 'diverged': _SOFT}


class Picture(NamedTuple):
  """One image of the grid.

  Attributes:
    trial: the trial that it belongs to, as its row names it.
    index: its place in the trial's batch.
    pixels: [H, W, C], pixels in [0, 1]; may hold NaN.
    psnr: dB against the truth, None for the truth itself and where there is none.
    row: the row of its trial, attack and defense; None for the truth.
  """

  trial: int
  index: int
  pixels: np.ndarray
  psnr: float | None
  row: dict | None


def select(result, columns=MAX_COLUMNS):
  """Returns the pictures to show: the truth's, and {(attack, defense): pictures}, in the same order of columns.

  The first trials are shown, never the best; of a batch the first images.
  """
  rows = tables.grouped(result.rows, 'attack', 'defense')
  trials = list(dict.fromkeys(row['trial'] for row in result.rows))
  truth = np.asarray(result.truth)
  images = min(truth.shape[1], columns)
  places = [(t, b) for t in range(min(len(trials), max(1, columns // images))) for b in range(images)]
  shown = {}
  for pair, group in rows.items():
    by_trial = {row['trial']: row for row in group}
    pixels = np.asarray(result.reconstructions[pair])
    chosen = np.stack([pixels[place] for place in places]).astype(np.float32)
    decibels = np.asarray(metrics.psnr(chosen, np.stack([truth[place] for place in places]).astype(np.float32)))
    shown[pair] = [
      Picture(trials[t], b, pixels[t, b], None if np.isnan(figure) else float(figure), by_trial[trials[t]])
      for (t, b), figure in zip(places, decibels, strict=True)
    ]
  return [Picture(trials[t], b, truth[t, b], None, None) for t, b in places], shown


def grid(result):
  """Returns a PNG: the truth above one row per attack and defense, at most 8 columns, the PSNR in dB under each."""
  from matplotlib import rc_context
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from matplotlib.figure import Figure

  truth, shown = select(result)
  labels = [(wrap(attack, 34), wrap(defense, 30)) for attack, defense in [('private images', 'truth'), *shown]]
  longest = max(len(line) for label in labels for part in label for line in part)
  height, width = truth[0].pixels.shape[:2]
  cell, caption, margin, head, foot = 0.95, 0.22, 0.1, 0.28, 0.5  # all lengths in inches
  start, tall = 3 * margin + 0.075 * longest, cell * height / width
  across = max(start + (cell + margin) * len(truth), 3.7)
  down = head + (tall + caption + margin) * len(labels) - caption + foot
  with rc_context({'font.family': ['DejaVu Sans'], 'font.size': 8.5, 'text.color': _INK, 'text.parse_math': False}):
    figure = Figure(figsize=(across, down), dpi=160, facecolor='white')
    axes = figure.add_axes((0, 0, 1, 1))
    for r, (pictures, label) in enumerate(zip([truth, *shown.values()], labels, strict=True)):
      top = head + r * (tall + caption + margin) - (caption if r else 0)
      _draw_label(axes, label, margin, top + tall / 2)
      for c, picture in enumerate(pictures):
        _draw_picture(axes, picture, start + c * (cell + margin), top, cell, tall)
    legend = '    '.join(f'{symbol} {verdict}' for verdict, symbol in SYMBOLS.items())
    axes.text(margin, down - 0.28, legend, va='center', color=_SOFT)
    axes.text(margin, down - 0.11, 'PSNR in dB', va='center', color=_SOFT)
    axes.set(xlim=(0, across), ylim=(down, 0))
    axes.set_axis_off()
    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer, metadata={'Software': None})
  return buffer.getvalue()


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


def _draw_label(axes, label, x, y):
  """Writes the lines of an attack, and below them those of a defense in bold, centred on height `y`."""
  attack, defense = label
  lines = [*((line, {'color': _SOFT}) for line in attack), *((line, {'weight': 'bold'}) for line in defense)]
  for i, (line, style) in enumerate(lines):
    axes.text(x, y + 0.17 * (i - (len(lines) - 1) / 2), line, va='center', **style)


def _draw_picture(axes, picture, left, top, width, height):
  """Draws a picture in a frame of its verdict's colour, the PSNR below; above the truth its trial."""
  from matplotlib.patches import Rectangle

  extent = (left, left + width, top + height, top)
  pixels = _bytes(picture.pixels)
  axes.imshow(pixels, cmap='gray', vmin=0, vmax=255, interpolation='nearest', aspect='auto', extent=extent)
  middle = left + width / 2
  if picture.row is None:
    frame = {'edgecolor': '#9a9fa6', 'linewidth': 0.6}
    axes.text(middle, top - 0.08, f'trial {picture.trial}' if picture.index == 0 else '', ha='center', color=_SOFT)
  else:
    frame = {'edgecolor': _COLOURS[picture.row['verdict']], 'linewidth': 1.8}
    value = 'NaN' if picture.psnr is None else number(picture.psnr)
    text = f'{SYMBOLS[picture.row["verdict"]]} {value}'
    axes.text(middle, top + height + 0.14, text, ha='center', va='center', color=frame['edgecolor'])
  axes.add_patch(Rectangle((left, top), width, height, facecolor='none', **frame))
