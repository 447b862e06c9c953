"""Tables and a picture of a sweep: what is recovered against the strength of each defense."""

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from gradleak.audit.labelled import Labelled, named_defenses
from gradleak.core import grammar
from gradleak.core.methods import identity
from gradleak.defenses.defense import Defense
from gradleak.modalities import of_rows
from gradleak.report import figures
from gradleak.report.figures import SOFT
from gradleak.report.formatting import together
from gradleak.summary.cases import Row, Summary, check_rows, csv_text, grouped, paired, summarise

COLUMNS, MAX_ROWS = 4, 12
_SETTING = ('model', 'init')  # columns in which the seeds of one model are equal
_TICKS = 6  # for which there is room on an axis

_COLOURS = ('#0f6674', '#b03a10', '#735a00', '#5a3d8a', '#2d6a2f', '#8a1d52')


class Line(NamedTuple):
  """Defenses that differ in one number.

  Attributes:
    label: the text of the defense with … in place of the number.
    points: (number, label of the defense), in ascending order.
  """

  label: str
  points: list[tuple[float, str]]


def lines(defenses: Iterable[Labelled]) -> list[Line]:
  """Returns the `Line`s among defenses that are equal but for numbers; that with most values varies along a line.

  A defense that equals no other is on no line, nor is an infinite number, such as that of no clip.
  """
  found = []
  for group in together((_shape(one.method), one) for one in defenses).values():
    numbers = [_numbers(one.method) for one in group]
    distinct = {place: len({each[place] for each in numbers}) for place in numbers[0]}
    along = max(distinct, key=distinct.__getitem__, default=None)
    if along is None or distinct[along] == 1:
      continue
    points_of = together(
      (tuple(each[place] for place in each if place != along), (one, each[along]))
      for one, each in zip(group, numbers, strict=True)
    )
    for points in points_of.values():
      label = _text(points[0][0].method, along)
      found.append(Line(label, sorted((number, one.label) for one, number in points)))
  return found


def _numbers(defense: Defense) -> dict[tuple[int, str], float]:
  """Returns (index of the stage, setting) -> value of the settings that are finite numbers, defaults included."""
  return {
    (index, name): float(value)
    for index, stage in enumerate(defense.stages)
    for name, value in stage.settings.items()
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
  }


def _shape(defense: Defense) -> Hashable:
  """Returns what defenses have in common that differ only in numbers."""
  numbers = _numbers(defense)
  return tuple(
    (
      stage.factory,
      stage.name,
      tuple(map(identity, stage.arguments)),
      tuple((name, (index, name) in numbers or identity(value)) for name, value in stage.settings.items()),
    )
    for index, stage in enumerate(defense.stages)
  )


def _text(defense: Defense, along: tuple[int, str]) -> str:
  """Returns the text of a defense with … in place of a number."""
  texts = []
  for index, stage in enumerate(defense.stages):
    given = {**stage.given, along[1]: _Varies()} if index == along[0] else stage.given
    texts.append(grammar.written(stage.name, given))
  return '+'.join(texts)


class _Varies:
  """A number that varies."""

  def __repr__(self) -> str:
    return '…'


def sweep_summaries(rows: Iterable[Row]) -> dict[str, list[Summary]]:
  """Returns the summaries (`cases.summarise`) of each model as `{model: list of summaries}`, its seeds together.

  Audits are seeds of one model where the initialisation is the same, and each has noted a seed of its own. Other audits
  of one model stand alone, by their names: they may differ in how far it was trained.
  """
  audits = grouped(check_rows(rows, 'audit', 'trial'), 'audit')
  alike = together((tuple(group[0].get(key) for key in _SETTING), group) for group in audits.values())
  found: dict[str, list[Row]] = {}
  for setting, groups in alike.items():
    seeds = {group[0].get('seed') for group in groups}
    if len(groups) > 1 and (len(seeds) < len(groups) or None in seeds):
      found |= {str(group[0]['audit']): group for group in groups}
    else:
      only = sum(setting[0] == other[0] for other in alike) == 1
      found[', '.join(str(value) for value in setting[: 1 if only else None] if value is not None)] = [
        row for group in groups for row in group
      ]
  return {title: summarise(group) for title, group in found.items()}


def sweep_csv(rows: Iterable[Row]) -> str:
  """Returns the summaries of all models as CSV text; None is an empty cell."""
  flat = [{'model': model, **summary} for model, group in sweep_summaries(rows).items() for summary in group]
  return csv_text(flat, ('model', 'attack', 'defense'))


def strengths(rows: Iterable[Row], defenses: Any) -> bytes | None:
  """Returns a PNG: the mean score against the strength of each defense that was run with several finite ones, or None.

  The rows are those of a sweep over these defenses, as `gradleak.audit` takes them: strengths are their settings. The
  score is that of the modality, for images the PSNR in dB.

  One row per model, one panel per defense, one colour per attack. Solid lines are non-adaptive attackers, dashed ones
  the strongest adaptive attacker at each strength, dotted ones uploads without a defense. Bands: 95 % intervals of the
  mean.
  """
  rows_of_panels = []
  rows, named = check_rows(rows), named_defenses(defenses)
  score = of_rows(rows).shown[0]
  for model, summaries in sweep_summaries(rows).items():
    pairs = paired(summaries)
    shown = {defense for _, defense in pairs}
    panels = [(model, line, pairs) for line in lines(one for one in named if one.label in shown)]
    rows_of_panels += [panels[i : i + COLUMNS] for i in range(0, len(panels), COLUMNS)]
  if not rows_of_panels:
    return None
  number, rows_of_panels = len(rows_of_panels), rows_of_panels[:MAX_ROWS]
  across, down = max(map(len, rows_of_panels)), len(rows_of_panels)
  with figures.figure(3.6 * across, 2.9 * down, layout='constrained') as (figure, png):
    grid, drawn = figure.subplots(down, across, squeeze=False, sharey=True), {}
    for row, panels in zip(grid, rows_of_panels, strict=True):
      for axes, panel in zip(row, panels, strict=False):
        drawn |= _draw(axes, score.column, *panel)
      for axes in row[len(panels) :]:
        axes.set_axis_off()
    for axes in grid[:, 0]:
      axes.set_ylabel(score.with_unit(' in '))
    if number > down:
      figure.suptitle(f'The first {down} of {number} rows', fontsize=10)
    longest = 0.6 + 0.085 * max(map(len, drawn), default=0)  # of an entry, in inches
    columns = min(3, len(drawn), max(1, int(3.6 * across / longest)))
    figure.set_size_inches(3.6 * across, 2.9 * down + 0.3 + 0.2 * -(-len(drawn) // max(1, columns)))
    figures.legend(figure, drawn, loc='outside lower center', ncols=max(1, columns))
    return png()


def _draw(
  axes: Any, score: str, model: str, line: Line, pairs: Mapping[tuple[str, str], Sequence[Summary]]
) -> dict[str, Any]:
  """Draws the attacks on one defense of a model over its strength; returns label -> line."""
  drawn = {}
  attacks = list(dict.fromkeys(attack for attack, _ in pairs))
  for attack, colour in zip(attacks, _COLOURS * len(attacks), strict=False):
    for adaptive, style, known in ((False, '-', 'non-adaptive'), (True, '--', 'adaptive')):
      points = [
        (strength, summary)
        for strength, defense in line.points
        for summary in pairs.get((attack, defense), [])
        if (summary['adaptive'] is not None) == adaptive and summary[score] is not None
      ]
      if not points:
        continue
      x, y = [strength for strength, _ in points], [summary[score] for _, summary in points]
      (drawn[f'{attack}, {known}'],) = axes.plot(x, y, style, color=colour, marker='o', markersize=3)
      bounded = [(at, s[f'{score}_low'], s[f'{score}_high']) for at, s in points if s[f'{score}_low'] is not None]
      if bounded:
        axes.fill_between(*zip(*bounded, strict=True), color=colour, alpha=0.12, linewidth=0)
    for summary in pairs.get((attack, 'none'), [])[:1]:
      if summary[score] is not None:
        drawn[f'{attack}, no defense'] = axes.axhline(summary[score], color=colour, linestyle=':', linewidth=1)
  positive = [strength for strength, _ in line.points if strength > 0]
  if len(positive) > 1 and max(positive) / min(positive) >= 20:  # a log axis that includes zero
    axes.set_xscale('symlog', linthresh=min(positive), linscale=0.5)
    axes.set_xticks([strength for strength, _ in line.points][-_TICKS:])
  axes.set_title(model, fontsize=8.5, color=SOFT)
  axes.set_xlabel(line.label)
  return drawn
