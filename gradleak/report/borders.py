"""The pictures at the border of each verdict: what lies just above, and what just below."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from gradleak.audit.result import AuditResult, check_result
from gradleak.audit.verdict import LEVELS
from gradleak.core import errors
from gradleak.report import figures
from gradleak.report.formatting import number
from gradleak.summary.worst import pair

SIDE = 20  # pictures on each side of a border


class Border(NamedTuple):
  """A border between verdicts.

  Attributes:
    title: the test, in words.
    value: row -> what is compared.
    above, below: whether a row can stand on this side.
    nearest: value -> how far from the border it is.
    shown: value -> text.
  """

  title: str
  value: Callable[[dict], float]
  above: Callable[[dict], bool]
  below: Callable[[dict], bool]
  nearest: Callable[[float], float]
  shown: Callable[[float], str]


def borders(result: AuditResult, threshold: float) -> list[Border]:
  """Returns the three borders of an audit of single images, for the `threshold` of SSIM of its gallery."""
  check_result(result)
  if result.config['batch_size'] != 1:
    raise errors.UsageError(f'batch_size is {result.config["batch_size"]}: the borders are shown of single images')
  at = {level: lambda row, level=level: row['verdict'] == level for level in LEVELS}
  return [
    Border('exact: correlation of at least 0.98', lambda row: row['pearson'],
           lambda row: at['exact'](row) and row['pearson'] is not None,  # a flat image is exact by its error
           lambda row: row['verdict'] in ('recognisable', 're-identified'), lambda value: abs(value - 0.98),
           lambda value: number(value, 3)),
    Border(f'recognisable: rank 1 and an SSIM of at least {number(threshold, 2)}', lambda row: row['ssim'],
           at['recognisable'], at['re-identified'], lambda value: abs(value - threshold),
           lambda value: number(value, 2)),
    Border('re-identified: rank 1 of the original (shown: correlation above, rank below)',
           lambda row: row['pearson'] if row['rank'] == 1 else row['rank'], at['re-identified'],
           lambda row: row['verdict'] == 'above chance' and row['rank'] > 1, lambda value: value,
           lambda value: number(value, 2) if value < 1 else number(value, 0)),
  ]  # fmt: skip


def sides(rows: Sequence[dict], border: Border) -> tuple[list[dict], list[dict]]:
  """Returns the rows just above and just below a border, nearest first, each private image once on a side."""
  found = []
  for belongs in (border.above, border.below):
    here = sorted((row for row in rows if belongs(row)), key=lambda row: border.nearest(border.value(row)))
    once: dict[int, dict] = {}
    for row in here:
      once.setdefault(row['trial'], row)
    found.append(list(once.values())[:SIDE])
  return found[0], found[1]


def border_picture(result: AuditResult, threshold: float) -> bytes:
  """Returns a PNG: per border the reconstructions just above it and just below, each above its private image.

  Args:
    result: an `AuditResult` of single images.
    threshold: the SSIM from which on its gallery calls an image recognisable.
  """
  tall, gap, head = 0.5, 0.06, 0.3
  bands = [(border, *sides(result.rows, border)) for border in borders(result, threshold)]
  block = 2 * (2 * tall + 0.34) + head + 0.1
  with figures.canvas(1.0 + SIDE * (tall + gap), block * len(bands)) as (axes, png):
    for b, (border, above, below) in enumerate(bands):
      top = b * block
      axes.text(0.05, top + head / 2, border.title, va='center', weight='bold')
      for s, (name, rows) in enumerate((('above', above), ('below', below))):
        start = top + head + s * (2 * tall + 0.34)
        axes.text(0.05, start + tall / 2, name, va='center')
        axes.text(0.05, start + 1.5 * tall + 0.16, 'private', va='center', color=figures.SOFT)
        for c, row in enumerate(rows):
          left = 0.75 + c * (tall + gap)
          truth, found = (images[0] for images in pair(result, row))
          _draw(axes, found, left, start, tall)
          axes.text(left + tall / 2, start + tall + 0.08, border.shown(border.value(row)), ha='center', va='center',
                    fontsize=6.5)  # fmt: skip
          _draw(axes, truth, left, start + tall + 0.16, tall)
    return png()


def _draw(axes: Any, image: np.ndarray, left: float, top: float, side: float) -> None:
  pixels = np.clip(np.nan_to_num(image), 0, 1)
  pixels = pixels if pixels.shape[-1] == 3 else np.repeat(pixels.mean(axis=-1, keepdims=True), 3, axis=-1)
  extent = figures.extent(pixels, left, top, side)
  axes.imshow(pixels, interpolation='nearest', aspect='auto', extent=extent)
