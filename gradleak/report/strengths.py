"""Tables and a picture of a sweep: PSNR against the strength of each defense."""

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from gradleak.report import figures
from gradleak.report.figures import SOFT
from gradleak.report.tables import Row, Summary, check_rows, grouped, paired, summarise

COLUMNS, MAX_ROWS = 4, 12

_NUMBER = re.compile(r'(?<==)[-+]?[0-9.]+(?:e[-+]?[0-9]+)?(?=[,)])')
_COLOURS = ('#0f6674', '#b03a10', '#735a00', '#5a3d8a', '#2d6a2f', '#8a1d52')


class Line(NamedTuple):
  """Labels that differ in one number.

  Attributes:
    label: the label with … in place of the number.
    points: (number, label), in ascending order.
  """

  label: str
  points: list[tuple[float, str]]


def lines(texts: Iterable[str]) -> list[Line]:
  """Returns the `Line`s among labels that are equal but for numbers; the number with most values varies along a line.

  A label that equals no other is on no line.
  """
  shapes: dict[str, list[tuple[list[str], str]]] = {}
  for text in texts:
    shapes.setdefault(_NUMBER.sub('…', text), []).append((_NUMBER.findall(text), text))
  found = []
  for shape, alike in shapes.items():
    distinct = [len(set(map(float, column))) for column in zip(*(numbers for numbers, _ in alike), strict=True)]
    if max(distinct, default=1) == 1:
      continue
    along = distinct.index(max(distinct))
    of_line: dict[str, list[tuple[float, str]]] = {}
    for numbers, text in alike:
      rest = [*numbers[:along], '…', *numbers[along + 1 :]]
      parts = shape.split('…')
      label = ''.join(part + value for part, value in zip(parts, [*rest, ''], strict=True))
      of_line.setdefault(label, []).append((float(numbers[along]), text))
    found += [Line(label, sorted(points)) for label, points in of_line.items()]
  return found


def sweep_summaries(rows: Iterable[Row]) -> dict[str, list[Summary]]:
  """Returns the summaries (`tables.summarise`) of each model, its seeds together: {model: list of summaries}."""
  return {' '.join(map(str, model)): summarise(group) for model, group in grouped(_by_upload(rows), 'model').items()}


def _by_upload(rows: Iterable[Row]) -> list[Row]:
  """Returns the rows with trials numbered (audit, trial): trial 3 of two seeds are two uploads."""
  return [{**row, 'trial': (row['audit'], row['trial'])} for row in check_rows(rows, 'audit', 'trial')]


def sweep_csv(rows: Iterable[Row]) -> str:
  """Returns the summaries of all models as CSV text; None is an empty cell."""
  text = io.StringIO()
  flat = [{'model': model, **summary} for model, group in sweep_summaries(rows).items() for summary in group]
  writer = csv.DictWriter(text, fieldnames=list(flat[0]) if flat else ['model', 'attack', 'defense'])
  writer.writeheader()
  writer.writerows(flat)
  return text.getvalue()


def strengths(rows: Iterable[Row]) -> bytes | None:
  """Returns a PNG: PSNR (dB) against the strength of each defense that was run with several strengths, else None.

  One row per model, one panel per defense, one colour per attack. Solid lines are unaware attackers, dashed ones the
  strongest aware attacker at each strength, dotted ones uploads without a defense. Bands: 95 % intervals of the mean.
  """
  rows_of_panels = []
  for model, summaries in sweep_summaries(rows).items():
    pairs = paired(summaries)
    panels = [(model, line, pairs) for line in lines(dict.fromkeys(defense for _, defense in pairs))]
    rows_of_panels += [panels[i : i + COLUMNS] for i in range(0, len(panels), COLUMNS)]
  rows_of_panels = rows_of_panels[:MAX_ROWS]
  if not rows_of_panels:
    return None
  across, down = max(map(len, rows_of_panels)), len(rows_of_panels)
  with figures.figure(3.6 * across, 2.9 * down + 0.5, layout='constrained') as (figure, png):
    grid = figure.subplots(down, across, squeeze=False, sharey=True)
    for row, panels in zip(grid, rows_of_panels, strict=True):
      for axes, panel in zip(row, panels, strict=False):
        _draw(axes, *panel)
      for axes in row[len(panels) :]:
        axes.set_axis_off()
    for axes in grid[:, 0]:
      axes.set_ylabel('PSNR in dB')
    handles, labels = grid.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc='outside lower center', ncols=min(3, len(labels)), frameon=False)
    return png()


def _draw(axes: Any, model: str, line: Line, pairs: Mapping[tuple[str, str], Sequence[Summary]]) -> None:
  """Draws the attacks on one defense of a model over its strength."""
  attacks = list(dict.fromkeys(attack for attack, _ in pairs))
  for attack, colour in zip(attacks, _COLOURS * len(attacks), strict=False):
    for counter, style, known in ((False, '-', 'unaware'), (True, '--', 'aware')):
      points = [
        (strength, summary)
        for strength, defense in line.points
        for summary in pairs.get((attack, defense), [])
        if (summary['counter'] is not None) == counter and summary['psnr'] is not None
      ]
      if not points:
        continue
      x, y = [strength for strength, _ in points], [summary['psnr'] for _, summary in points]
      axes.plot(x, y, style, color=colour, marker='o', markersize=3, label=f'{attack}, {known}')
      bounded = [(at, s['psnr_low'], s['psnr_high']) for at, s in points if s['psnr_low'] is not None]
      if bounded:
        axes.fill_between(*zip(*bounded, strict=True), color=colour, alpha=0.12, linewidth=0)
    for summary in pairs.get((attack, 'none'), [])[:1]:
      if summary['psnr'] is not None:
        axes.axhline(summary['psnr'], color=colour, linestyle=':', linewidth=1, label=f'{attack}, no defense')
  positive = [strength for strength, _ in line.points if strength > 0]
  if len(positive) > 1 and max(positive) / min(positive) >= 20:  # a log axis that includes zero
    axes.set_xscale('symlog', linthresh=min(positive), linscale=0.5)
  axes.set_title(model, fontsize=8.5, color=SOFT)
  axes.set_xlabel(line.label)
  axes.spines[['top', 'right']].set_visible(False)
