"""What defenses hide against what they cost: one table, and one picture with the frontier."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from gradleak.core import errors
from gradleak.defenses.differential_privacy import Epsilon
from gradleak.federated import chance, training
from gradleak.modalities import IMAGES, REGISTRY, Modality, of_config, of_rows
from gradleak.report import chance as at_chance
from gradleak.report import figures
from gradleak.report.figures import SOFT
from gradleak.report.formatting import aligned, measures, minus, number, of_attacker, percent, upwards
from gradleak.report.privacy import NO_PROTECTION
from gradleak.report.words import said
from gradleak.studies.frontier import Trained
from gradleak.summary import cases
from gradleak.summary.cases import csv_text, worst_case_of

_EPSILON = ('epsilon', *(f'epsilon_{field.name}' for field in dataclasses.fields(Epsilon)[1:]))
_COSTS = (
  'recovered', 'n', 'by', 'accuracy', 'majority_share', 'at_chance', 'cost', 'cost_low', 'cost_high', 'loss',
  'rounds', 'bytes_up', 'bytes_down', 'seconds', 'seconds_defense', *_EPSILON,
)  # fmt: skip
_DRAWN = 'defense', 'accuracy', 'recovered'
_COLOUR = '#0f6674'
Entry = dict[str, Any]  # with `columns` as keys
_LEAST_SPAN = 1.2  # of the axis of accuracy, in points
_WIDTH, _LEFT, _RIGHT, _TALL, _BELOW, _ABOVE, _LINE = 7.2, 0.62, 0.15, 3.4, 0.5, 0.3, 0.17  # inches
_LONGEST = 34  # characters: longer names get a number in the picture
PERFECT = 100.0  # dB: where a reconstruction without error is drawn
_AROUND = (  # places of a name beside its point: right, left, above, below, and the corners
  (6, 0, 'left', 'center'), (-6, 0, 'right', 'center'), (0, 6, 'center', 'bottom'), (0, -6, 'center', 'top'),
  (4, 4, 'left', 'bottom'), (4, -4, 'left', 'top'), (-4, 4, 'right', 'bottom'), (-4, -4, 'right', 'top'),
)  # fmt: skip


def columns(kind: Modality = IMAGES) -> tuple[str, ...]:
  """Returns the keys of an entry where samples are of a modality."""
  return ('defense', *(one.column for one in measures(kind)), *_COSTS)


def entries(
  trained: Mapping[str, Trained], rows: Iterable[cases.Row] = (), config: Mapping[str, Any] | None = None
) -> list[Entry]:
  """Returns one dict per defense, with `columns` as keys; None for what is not known.

  Args:
    trained: defense -> `Trained`. 'accuracy' and 'loss' are of the last round that measured them. 'seconds' is None of
      a single round, which includes compilation. 'majority_share' is that of the commonest class among the test
      samples. 'at_chance' says why the model is at chance, '' where it is not or that is not known
      (`federated.chance.at_chance`). 'cost' is what the accuracy is below that of 'none', in percentage points, with
      its 95 % interval by the test samples, see `federated.training.gained`; None where 'none' is at chance. 'epsilon'
      is that of all rounds, infinite if no ε is bounded, and None if none is counted; 'epsilon_relation' and others are
      the fields of `differential_privacy.Epsilon`.
    rows: of an audit of the same defenses, or none; for what `worst_case_of` returns.
    config: the settings of the training: of which samples it is, and 'num_classes' for trainings of earlier versions,
      whose rows do not hold the fraction of the commonest class.
  """
  rows, given = cases.check_rows(rows), errors.check_json('config', {} if config is None else config)
  worst, kind = worst_case_of(rows), of_rows(rows) if rows else of_config(given)
  num_classes = given.get('num_classes')
  for one in errors.check_instance('trained', trained, Mapping, '{defense: Trained}').values():
    errors.check_instance('a training', one, Trained, 'a gradleak.studies.frontier.Trained')
  if num_classes is not None:
    errors.check_number('num_classes', num_classes, low=1, integer=True)
  base = trained.get('none')
  return [
    _entry(defense, one, _seen(worst.get(defense, {}), kind), None if defense == 'none' else base, given)
    for defense, one in trained.items()
  ]


def _seen(worst: Mapping[str, Any], kind: Modality) -> dict[str, Any]:
  """Returns what the strongest attacker sees, None for what is not known."""
  names = (*(one.column for one in measures(kind)), 'recovered', 'n', 'by')
  return {name: worst.get(name) for name in names}


def last_measured(trained: Trained) -> Mapping[str, Any]:
  """Returns the last row of a training that holds an accuracy; an empty one for none."""
  return next((row for row in reversed(trained.rows) if 'accuracy' in row), {})


def gained(one: Trained, other: Trained, noun: str) -> training.Gained | None:
  """Returns what the accuracy of a training is above that of another, see `federated.training.gained`."""
  last, before = last_measured(one), last_measured(other)
  return training.gained(last, one.wrong, before, other.wrong, lengths=other.lengths, noun=noun)


def _entry(defense: str, trained: Trained, worst: Mapping[str, Any], base: Trained | None, config: Mapping) -> Entry:
  known = config.get('num_classes'), chance.counted(config)
  rounds, measured = trained.rows, last_measured(trained)
  lost = None
  if base is not None and not chance.at_chance(last_measured(base), *known):
    lost = gained(base, trained, known[1])
  cost, low, high = (None,) * 3 if lost is None else (100 * x for x in (lost.share, lost.low, lost.high))
  answered = sum(row['clients'] for row in rounds)
  spent = trained.epsilon
  terms = {} if spent is None else spent.terms
  return {
    'defense': defense,
    **worst,
    'accuracy': measured.get('accuracy'),
    'majority_share': measured.get('majority_share'),
    'at_chance': chance.at_chance(measured, *known),
    'cost': cost,
    'cost_low': low,
    'cost_high': high,
    'loss': measured.get('loss'),
    'rounds': len(rounds),
    'bytes_up': sum(row['bytes_up'] for row in rounds) / answered if answered else None,
    'bytes_down': sum(row['bytes_down'] for row in rounds) / answered if answered else None,
    'seconds': trained.seconds if len(rounds) > 1 and math.isfinite(trained.seconds) else None,
    'seconds_defense': trained.seconds_defense,
    'epsilon': None if spent is None else spent.value,
    **{f'epsilon_{field.name}': terms.get(field.name) for field in dataclasses.fields(Epsilon)[1:]},
  }


def frontier_csv(found: Iterable[Entry]) -> str:
  """Returns `entries` as CSV text; bytes are per upload, seconds per round; an empty cell is not known."""
  found = _check(found)
  names = columns(of_rows(found))
  return csv_text(({name: one[name] for name in names} for one in found), names)


def frontier_table(found: Iterable[Entry], config: Mapping[str, Any] | None = None) -> str:
  """Returns `entries` as an aligned table; KiB up are per upload, 'defense adds' is time of a round.

  The accuracy cost is in percentage points beside 'none', with its 95 % interval. Lines below name the models at
  chance, say what each ε is relative to, and of which clients uploads were attacked.

  Args:
    found: `entries`.
    config: the settings of the training, for why a model may be at chance.
  """
  found = _check(found)
  base, shown = undefended(found), of_rows(found).shown[0]
  seen = shown.with_unit(), 'recovered', 'by'
  head = ('defense', 'accuracy', 'accuracy cost', 'KiB up', 's/round', 'defense adds', 'ε', *seen)
  lines = [
    (
      one['defense'],
      percent(one['accuracy']) + (', chance' if one['at_chance'] else ''),
      beside(one, base) or '–',
      kib(one['bytes_up']),
      number(one['seconds'], 2),
      milliseconds(one['seconds_defense'], ' ms'),
      epsilon(one['epsilon']) + (f' ({one["epsilon_relation"]})' if one['epsilon_relation'] else ''),
      number(score(one), shown.digits),
      '–' if one['n'] is None else f'{one["recovered"]} of {one["n"]}',
      one['by'] or '–',
    )
    for one in found
  ]
  given = errors.check_json('config', {} if config is None else config)
  below = [str(one).replace('`', '') for one in at_chance.findings(found, given)]
  below += dict.fromkeys(f'ε: {_spent(one).said}.' for one in found if one['epsilon'] is not None)
  below += [said('training.attacked')] if any(one['n'] for one in found) else []
  return '\n'.join([*aligned([head, *lines]), *below])


def undefended(found: Iterable[Entry]) -> Entry | None:
  """Returns the entry of training without a defense."""
  return next((one for one in found if one['defense'] == 'none'), None)


def cost(one: Entry, base: Entry | None) -> float | None:
  """Returns the accuracy cost of a defense in percentage points, below zero for a gain.

  It is that of the counts, as its interval is, and of the rounded figures where there are none. None where an accuracy
  is not known, or the undefended model is at chance.
  """
  if base is None or base is one or base['at_chance'] or None in (one['accuracy'], base['accuracy']):
    return None
  if one.get('cost') is not None:
    return one['cost']
  return round(round(100 * base['accuracy'], 1) - round(100 * one['accuracy'], 1), 1)


def beside(one: Entry, base: Entry | None) -> str:
  """Returns the accuracy cost of a defense, with its interval where it is known; '' for none."""
  lost = cost(one, base)
  return '' if lost is None else minus(number(lost)) + (f' ({between(one)})' if between(one) else '')


def between(one: Entry) -> str:
  """Returns the interval of the accuracy cost of a defense; '' where it is not known."""
  return '' if one['cost'] is None else minus(f'{number(one["cost_low"])} to {number(one["cost_high"])}')


def kib(size: float | None) -> str:
  """Returns bytes as KiB, '–' for None."""
  return '–' if size is None else f'{size / 1024:,.1f}'


def milliseconds(seconds: float | None, unit: str = '') -> str:
  """Returns seconds as milliseconds, '–' for None."""
  return '–' if seconds is None else f'{1000 * seconds:,.{0 if seconds >= 0.1 else 1}f}{unit}'


def epsilon(value: float | None) -> str:
  """Returns an upper bound on ε as text, rounded up; '∞' without a bound, '–' where none was counted.

  Beyond `NO_PROTECTION` it is that figure.
  """
  if value is None or math.isinf(value):
    return number(value)
  if value > NO_PROTECTION:
    return f'> {NO_PROTECTION}'
  return upwards(value)


def _spent(one: Entry) -> Epsilon:
  """Returns an entry's ε with what it is relative to."""
  return Epsilon(*(one[name] for name in _EPSILON))


def protects(one: Entry) -> str:
  """Returns the neighbouring relation of an entry's ε, whom it protects and in what, in words; '' without any."""
  if one['epsilon'] is None:
    return ''
  return f'{one["epsilon_relation"]}, per {one["epsilon_unit"]}, {one["epsilon_published"]}'


def best(found: Iterable[Entry]) -> list[Entry]:
  """Returns the Pareto-optimal `entries` (low score, high accuracy), by descending accuracy; none at chance."""
  measured = [one for one in _measured(found) if not one.get('at_chance')]

  def dominated(one: Entry) -> bool:
    return any(
      score(other) <= score(one)
      and other['accuracy'] >= one['accuracy']
      and (score(other), other['accuracy']) != (score(one), one['accuracy'])
      for other in measured
    )

  return sorted((one for one in measured if not dominated(one)), key=lambda one: (-one['accuracy'], score(one)))


def frontier(found: Iterable[Entry]) -> bytes | None:
  """Returns a PNG: accuracy against the score of the strongest attacker, a point per defense; None without any.

  Up and left is better. Under filled points images are recovered, under hollow ones none; crosses are models at chance.
  A line joins the Pareto-optimal points. A name stands beside its point where there is room, else a number.
  """
  measured = _measured(found)
  if not measured:
    return None
  with figures.figure(_WIDTH, _TALL + _BELOW + _ABOVE) as (figure, png):
    axes = figure.add_axes((0, 0, 1, 1))
    _place(figure, axes, _BELOW)
    line = best(found)
    if line:
      axes.plot(*zip(*map(_point, line), strict=True), color=SOFT, linewidth=1, alpha=0.5, zorder=1)
    for one in measured:
      face = _COLOUR if one['recovered'] else 'white'
      if one.get('at_chance'):
        axes.scatter(*_point(one), s=30, marker='x', color=SOFT, linewidths=1.3, zorder=2)
      else:
        axes.scatter(*_point(one), s=30, facecolors=face, edgecolors=_COLOUR, linewidths=1.3, zorder=2)
    axes.margins(0.1, 0.14)
    low, high = axes.get_ylim()
    if high - low < _LEAST_SPAN:  # less is chance, and its ticks have many digits
      axes.set_ylim(*((low + high) / 2 + side * _LEAST_SPAN / 2 for side in (-1, 1)))
    kind = of_rows(measured)
    axes.set_xlabel(of_attacker(kind))
    axes.set_ylabel('test accuracy, in %')
    lined = ' · line: best trade-offs' if len({_point(one) for one in line}) > 1 else ''
    lost = ' · ×: a model at chance' if any(one.get('at_chance') for one in measured) else ''
    axes.set_title(f'filled: {kind.noun[1]} recovered · hollow: none{lost}{lined}', fontsize=8, color=SOFT)
    numbered = _name(figure, axes, measured)
    below = _BELOW + _LINE * (len(numbered) + 0.5 * bool(numbered))
    figure.set_size_inches(_WIDTH, _TALL + below + _ABOVE)
    _place(figure, axes, below)
    for i, text in enumerate(reversed(numbered)):
      figure.text(_LEFT / _WIDTH, (0.08 + _LINE * i) / figure.get_figheight(), text, va='bottom')
    return png()


def _check(found: Any, names: Iterable[str] = ('defense', *_COSTS)) -> list[Entry]:
  """Returns entries as a list; raises `UsageError` for anything but dicts with these keys and a score."""
  found = list(errors.check_instance('found', found, Iterable, 'what gradleak.report.entries returns'))
  for one in found:
    known = isinstance(one, dict) and any(kind.score in one for kind in REGISTRY.values())
    if not known or not set(one) >= set(names):
      raise errors.UsageError(f'an entry is {errors.shown(one)}, expected one that gradleak.report.entries returns')
  return found


def _measured(found: Iterable[Entry]) -> list[Entry]:
  return [one for one in _check(found, _DRAWN) if score(one) is not None and one['accuracy'] is not None]


def score(one: Mapping[str, Any]) -> Any:
  """Returns the score of the strongest attacker, that of the entry's modality; None where it is not known."""
  return one[of_rows([one]).score]


def _point(one: Entry) -> tuple[float, float]:
  return min(score(one), PERFECT), 100 * one['accuracy']


def _place(figure: Any, axes: Any, below: float) -> None:
  """Gives the axes the same inches for anything `below` them, so that names keep their room."""
  height = figure.get_figheight()
  axes.set_position((_LEFT / _WIDTH, below / height, (_WIDTH - _LEFT - _RIGHT) / _WIDTH, _TALL / height))


def _name(figure: Any, axes: Any, measured: Sequence[Entry]) -> list[str]:
  """Writes names beside the points where there is room, else numbers; returns the legend of the numbers."""
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from matplotlib.transforms import Bbox

  renderer = FigureCanvasAgg(figure).get_renderer()
  axes.autoscale_view()
  spots = axes.transData.transform([_point(one) for one in measured])
  taken = [Bbox.from_bounds(x - 7, y - 7, 14, 14) for x, y in spots]
  corners = axes.transData.transform([_point(one) for one in best(measured)])
  line = [Bbox.from_bounds(x, y, 1, 1) for a, b in itertools.pairwise(corners) for x, y in np.linspace(a, b, 200)]
  room, numbered = axes.get_window_extent(renderer), []
  for i, one in enumerate(measured):
    mark = str(len(numbered) + 1)
    texts = [one['defense'], mark] if len(one['defense']) <= _LONGEST else [mark]
    tried = [_beside(axes, one, text, *place) for text in texts for place in _AROUND]
    boxes = [text.get_window_extent(renderer) for text in tried]
    others = [*taken[:i], *taken[i + 1 :]]
    inside = [box.x0 >= room.x0 and box.x1 <= room.x1 and box.y0 >= room.y0 for box in boxes]
    free = [j for j, box in enumerate(boxes) if inside[j] and not box.count_overlaps(others)]
    # Prefer a name that crosses the line to a number.
    free.sort(key=lambda j: (tried[j].get_text() == mark, boxes[j].count_overlaps(line) > 0))
    chosen = free[0] if free else len(tried) - len(_AROUND)
    for j, text in enumerate(tried):
      if j != chosen:
        text.remove()
    taken.append(boxes[chosen])
    if tried[chosen].get_text() == mark:
      numbered.append(f'{mark}  {one["defense"]}')
  return numbered


def _beside(axes: Any, one: Entry, text: str, x: float, y: float, across: str, up: str) -> Any:
  from matplotlib.patheffects import withStroke

  style = {'fontsize': 8, 'ha': across, 'va': up, 'textcoords': 'offset points'}
  return axes.annotate(
    text, _point(one), xytext=(x, y), path_effects=[withStroke(linewidth=2, foreground='white')], **style
  )
