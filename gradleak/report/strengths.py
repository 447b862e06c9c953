"""A sweep for people: one table of all models, and a picture of what comes back at each strength of a defense."""

import csv
import io
import re
from typing import NamedTuple

from gradleak.report import figures
from gradleak.report.figures import SOFT
from gradleak.report.tables import grouped, paired, summarise

COLUMNS, MAX_ROWS = 4, 12

_NUMBER = re.compile(r'(?<==)[-+]?[0-9.]+(?:e[-+]?[0-9]+)?(?=[,)])')
_COLOURS = ('#0f6674', '#b03a10', '#735a00', '#5a3d8a', '#2d6a2f', '#8a1d52')


class Line(NamedTuple):
  """Texts that differ in one number.

  Attributes:
    label: the text with … in that number's place.
    points: (number, text), in ascending order.
  """

  label: str
  points: list


def lines(texts):
  """Returns the `Line`s among texts: of those alike but for their numbers, the most varied number runs along the line.

  A text that is alone is on no line.
  """
  shapes = {}
  for text in texts:
    shapes.setdefault(_NUMBER.sub('…', text), []).append((_NUMBER.findall(text), text))
  found = []
  for shape, members in shapes.items():
    distinct = [len(set(map(float, column))) for column in zip(*(numbers for numbers, _ in members), strict=True)]
    if max(distinct, default=1) == 1:
      continue
    along = distinct.index(max(distinct))
    of_line = {}
    for numbers, text in members:
      rest = [*numbers[:along], '…', *numbers[along + 1 :]]
      parts = shape.split('…')
      label = ''.join(part + value for part, value in zip(parts, [*rest, ''], strict=True))
      of_line.setdefault(label, []).append((float(numbers[along]), text))
    found += [Line(label, sorted(points)) for label, points in of_line.items()]
  return found


def sweep_summaries(rows):
  """Returns the summaries (`tables.summarise`) of each model, its seeds together: {model: list of summaries}."""
  return {' '.join(map(str, model)): summarise(group) for model, group in grouped(_by_upload(rows), 'model').items()}


def _by_upload(rows):
  """Returns the rows with trials that are told apart by the audit, too: trial 3 of two seeds are two uploads."""
  return [{**row, 'trial': (row['audit'], row['trial'])} for row in rows]


def sweep_csv(rows):
  """Returns the summaries of all models as CSV text; a missing value is an empty cell."""
  text = io.StringIO()
  flat = [{'model': model, **summary} for model, group in sweep_summaries(rows).items() for summary in group]
  writer = csv.DictWriter(text, fieldnames=list(flat[0]))
  writer.writeheader()
  writer.writerows(flat)
  return text.getvalue()


def strengths(rows):
  """Returns a PNG: PSNR (dB) against the strength of each defense of which several strengths were run, or None.

  One row per model, one panel per defense, one colour per attack; attackers who know the defense, the strongest
  counter-measure at each strength, dashed; bands are 95 % intervals of the mean; dotted, the undefended uploads.
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


def _draw(axes, model, line, pairs):
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
  if len(positive) > 1 and max(positive) / min(positive) >= 20:  # decades, with a place for zero
    axes.set_xscale('symlog', linthresh=min(positive), linscale=0.5)
  axes.set_title(model, fontsize=8.5, color=SOFT)
  axes.set_xlabel(line.label)
  axes.spines[['top', 'right']].set_visible(False)
