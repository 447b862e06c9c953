"""The pictures of an audit: private images and reconstructions in a grid, and single images as data URIs."""

import textwrap
from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np

from gradleak.audit.result import AuditResult, Case, check_result
from gradleak.modalities import IMAGES, Modality, of_config
from gradleak.report import figures
from gradleak.report.figures import SOFT
from gradleak.report.formatting import number, wrap
from gradleak.summary import cases
from gradleak.summary.shown import pixels_of

# Verdict -> its mark, and its colour on white.
SYMBOLS = {
  'exact': '●', 'recognisable': '◕', 're-identified': '◑', 'above chance': '◔', 'inconclusive': '?', 'diverged': '×',
  'nothing seen': '○',
}  # fmt: skip
MAX_COLUMNS = 8

_COLOURS = {
  'exact': '#a3210a', 'recognisable': '#b9480f', 're-identified': '#8a3f8f', 'above chance': '#6b5b95',
  'inconclusive': '#735a00', 'diverged': SOFT, 'nothing seen': '#0f6674',
}  # fmt: skip


class Picture(NamedTuple):
  """One image of the grid.

  Attributes:
    trial: the trial that it belongs to, as in its row.
    index: its place in the batch of the trial.
    pixels: [H, W, C] in [0, 1]; may hold NaN. None where the trial was not attacked under its case.
    score: of its pair; None for a private image, and where it is NaN.
    kind: its modality.
    row: the row of its trial and case; None for a private image, and where there are no pixels.
  """

  trial: int
  index: int  # type: ignore[assignment]
  pixels: np.ndarray | None
  score: float | None
  row: dict | None
  kind: Modality = IMAGES


def select(result: AuditResult, columns: int = MAX_COLUMNS) -> tuple[list[Picture], dict[Case, list[Picture]]]:
  """Returns the pictures to show, which are the private images, and `{case: reconstructions}` in the same order.

  The strongest adaptive attacker is shown after the non-adaptive one. Shown are the first trials, not the best, and the
  first images of a batch. Trials that more cases have come before others.
  """
  rows = cases.by_case(check_result(result).rows)
  pairs = cases.paired(cases.summarise(result.rows)).values()
  truth, kind = np.asarray(result.truth), of_config(result.config)
  images = min(truth.shape[1], columns)
  trials = cases.trials(result.rows)[: max(1, columns // images)]
  places = [(t, b) for t in trials for b in range(images)]
  shown = {}
  for case in (cases.case(summary) for pair in pairs for summary in pair):
    by_trial = {row['trial']: (row, made) for row, made in zip(rows[case], result.reconstructions[case], strict=True)}
    shown[case] = [
      _picture((t, b), *by_trial[t], truth[t, b], kind) if t in by_trial else Picture(t, b, None, None, None, kind)
      for t, b in places
    ]
  return [Picture(t, b, kind.picture(truth[t, b]), None, None, kind) for t, b in places], shown


def _picture(place: tuple[int, int], row: dict, made: np.ndarray, truth: np.ndarray, kind: Modality) -> Picture:
  """Returns the picture of one reconstruction of a trial."""
  found = np.asarray(made[place[1]])
  score = float(kind.nearness(*(np.asarray(one, np.float32)[np.newaxis] for one in (found, truth)))[0])
  return Picture(*place, kind.picture(found), None if np.isnan(score) else score, row, kind)


def grid(result: AuditResult) -> bytes:
  """Returns a PNG: the private images above one row per attack and defense, at most 8 columns, each with its score.

  The row of the strongest adaptive attacker follows that of the non-adaptive one; a bar joins the two.
  """
  truth, shown = select(result)
  labels = [[(f'private {truth[0].kind.noun[1]}', {})], *(_label(*case, shown=shown) for case in shown)]  # type: ignore[misc, arg-type]
  second = [False, *(len(case) == 3 and case[:2] in shown for case in shown)]
  longest = max(len(line) for label in labels for line, _ in label)
  height, width = np.shape(truth[0].pixels)[:2]
  cell, caption, margin, head, line = 0.95, 0.22, 0.1, 0.28, 0.17  # inches, as are all lengths
  start, tall = 4 * margin + 0.075 * longest, cell * height / width
  apart = 2 * margin * any(second)  # between pairs
  tops = [head]
  for is_second in second[1:]:
    above = caption if len(tops) > 1 else 0
    tops.append(tops[-1] + tall + above + margin + (0 if is_second else apart))
  across = max(start + (cell + margin) * len(truth), 3.7)
  named = '    '.join(f'{symbol} {verdict}'.replace(' ', '\N{NO-BREAK SPACE}') for verdict, symbol in SYMBOLS.items())
  score = truth[0].kind.shown[0]
  unit = score.with_unit(' in ')
  foot = [*textwrap.wrap(named, int((across - 2 * margin) / 0.06)), unit]
  down = tops[-1] + tall + caption + 2.5 * margin + line * len(foot)
  with figures.canvas(across, down) as (axes, png):
    for r, (pictures, label, top) in enumerate(zip([truth, *shown.values()], labels, tops, strict=True)):
      for i, (text, style) in enumerate(label):
        axes.text(2 * margin, top + tall / 2 + line * (i - (len(label) - 1) / 2), text, va='center', **style)
      if second[r]:
        axes.plot([margin, margin], [tops[r - 1], top + tall], color=SOFT, linewidth=2, solid_capstyle='butt')
      for c, picture in enumerate(pictures):
        _draw_picture(axes, picture, start + c * (cell + margin), top, cell, tall)
    for below, text in enumerate(reversed(foot)):
      axes.text(margin, down - 0.11 - line * below, text, va='center', color=SOFT)
    return png()


def _label(attack: str, defense: str, adaptive: str = '', shown: Collection[Case] = ()) -> list[tuple[str, dict]]:
  """Returns the lines that name a row, each with its style; the second row of a pair names the adaptive attack only."""
  named = [(line, {'color': SOFT}) for line in wrap(attack, 34)]
  named += [(line, {'weight': 'bold'}) for line in wrap(defense, 30)]
  if not adaptive:
    paired = any(case[:2] == (attack, defense) and len(case) == 3 for case in shown)
    return [*named, ('non-adaptive', {})] if paired else named
  known = [(line, {}) for line in wrap(f'adaptive: {adaptive}', 30)]
  return known if (attack, defense) in shown else [*named, *known]


def _draw_picture(axes: Any, picture: Picture, left: float, top: float, width: float, height: float) -> None:
  """Draws a picture in the colour of its verdict, with its score below; the trial stands above a private image."""
  from matplotlib.patches import Rectangle

  if picture.pixels is None:
    return
  extent = (left, left + width, top + height, top)
  pixels = pixels_of(picture.pixels)
  axes.imshow(pixels, cmap='gray', vmin=0, vmax=255, interpolation='nearest', aspect='auto', extent=extent)
  middle = left + width / 2
  if picture.row is None:
    frame: dict[str, Any] = {'edgecolor': '#9a9fa6', 'linewidth': 0.6}
    axes.text(middle, top - 0.08, f'trial {picture.trial}' if picture.index == 0 else '', ha='center', color=SOFT)
  else:
    frame = {'edgecolor': _COLOURS[picture.row['verdict']], 'linewidth': 1.8}
    value = 'NaN' if picture.score is None else number(picture.score)
    text = f'{SYMBOLS[picture.row["verdict"]]} {value}'
    axes.text(middle, top + height + 0.14, text, ha='center', va='center', color=frame['edgecolor'])
  axes.add_patch(Rectangle((left, top), width, height, facecolor='none', **frame))
