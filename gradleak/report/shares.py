"""A figure of a leaderboard's task: what a defense costs the model, beside what each attacker sees of the samples."""

from collections.abc import Mapping, Sequence
from typing import Any

from gradleak import metrics
from gradleak.report import deploy, figures
from gradleak.report.figures import SOFT
from gradleak.report.formatting import minus, wrap

ATTACKERS = (
  ('recognisable, reconstructed', '#1f1f1f', 'o'),
  ('re-identified, reconstructed', '#0f6674', 's'),
  ('re-identified, by likelihood', '#b03a10', 'D'),
  ('re-identified, by a malicious server', '#7a8b99', '^'),
)
_WIDTH, _LEFT, _COST, _LINE = 8.2, 2.0, 1.7, 0.46  # inches


def shares(entry: Mapping[str, Any]) -> list[tuple[int, int] | None]:
  """Returns (samples, of so many) that each of `ATTACKERS` sees under a defense; None where it was not run.

  Args:
    entry: of a leaderboard, see `gradleak.studies.autoleak.entry.FORM`.
  """
  named, counts = entry.get('likelihood'), _counts(entry['honest'])
  alone = (named or {}).get('alone', 0)
  n = entry['honest']['n']
  return [
    (counts['recognisable'], n),
    (counts['re-identified'] - alone, n),
    named and (named['identified'], named['n']),
    entry['malicious'] and (_counts(entry['malicious'])['re-identified'], entry['malicious']['n']),
  ]


def failed(entry: Mapping[str, Any]) -> list[bool]:
  """Returns of each of `ATTACKERS` whether a low share of it says nothing, as attacks failed (`deploy.failed`)."""
  honest, malicious = deploy.failed(entry['honest']), entry['malicious']
  return [honest, honest, False, malicious is not None and deploy.failed(malicious)]


def shares_picture(entries: Sequence[Mapping[str, Any]]) -> bytes | None:
  """Returns a PNG: per defense the accuracy that it costs, and the share that each attacker sees, with 95 % intervals.

  Hollow points are of attacks that `failed`.

  Args:
    entries: of one task; those without a known cost come last. None of them has one: there is no picture.
  """
  if not any(entry['cost'] for entry in entries):
    return None
  ordered = sorted(entries, key=_order)
  tall = _LINE * len(ordered) + 1.1
  with figures.figure(_WIDTH, tall) as (figure, png):
    bottom, height = 0.5 / tall, 1 - 1.1 / tall
    cost = figure.add_axes((_LEFT / _WIDTH, bottom, _COST / _WIDTH, height))
    start = _LEFT + _COST + 0.2
    seen = figure.add_axes((start / _WIDTH, bottom, (_WIDTH - start - 0.2) / _WIDTH, height))
    for row, entry in enumerate(ordered):
      _draw_cost(cost, row, entry)
      _draw_shares(seen, row, entry)
    for axes in (cost, seen):
      axes.set_ylim(len(ordered) - 0.5, -0.5)
      axes.grid(axis='x', color='#0a0b0c', alpha=0.1, linewidth=0.6)
    cost.axvline(0, color=SOFT, linestyle=':', linewidth=1)
    cost.set_yticks(range(len(ordered)), ['\n'.join(wrap(one['defense'], 28)) for one in ordered], fontsize=8)
    cost.set_xlabel('accuracy lost, in points')
    seen.set_yticks([])
    seen.set(xlim=(-3, 103), xlabel='samples seen, in %')
    handles = [
      seen.plot([], [], marker, color=colour, markersize=4, label=name)[0] for name, colour, marker in ATTACKERS
    ]
    if any(map(any, map(failed, entries))):
      handles += seen.plot([], [], 'o', color=SOFT, fillstyle='none', markersize=4, label='hollow: attacks failed')
    figure.legend(handles=handles, loc='upper right', ncols=2, fontsize=8, frameon=False)
    return png()


def _counts(side: Mapping[str, Any]) -> dict[str, int]:
  return {one['level']: one['count'] for one in side['levels']}


def _order(entry: Mapping[str, Any]) -> tuple:
  """Returns what entries are sorted by: none first, then the cheapest defense, those of unknown cost last."""
  cost = entry['cost']
  return entry['text'] != 'none', cost is None, cost['points'] if cost else 0, entry['defense']


def _draw_cost(axes: Any, row: int, entry: Mapping[str, Any]) -> None:
  """Draws the cost of a defense with its interval, or says that it is unknown."""
  cost = entry['cost'] or ({'points': 0.0} if entry['text'] == 'none' else None)
  if cost is None:
    axes.text(0, row, ' unknown', va='center', fontsize=7, color=SOFT)
    return
  if 'interval' in cost:
    axes.plot(cost['interval'], [row, row], color='#1f1f1f', linewidth=1.2)
  axes.plot(cost['points'], row, 'o', color='#1f1f1f', markersize=4)
  axes.annotate(
    minus(f'{cost["points"]:.1f}'), (cost['points'], row), (0, 4), textcoords='offset points', ha='center', fontsize=7
  )


def _draw_shares(axes: Any, row: int, entry: Mapping[str, Any]) -> None:
  """Draws the share that each attacker sees, with its interval."""
  of = zip(ATTACKERS, shares(entry), failed(entry), strict=True)
  for place, ((_, colour, marker), seen, hollow) in enumerate(of):
    if seen is None:
      continue
    at = row + (place - (len(ATTACKERS) - 1) / 2) * 0.2
    value, low, high = (100 * x for x in metrics.proportion_interval(*seen))
    axes.plot([low, high], [at, at], color=colour, linewidth=1)
    axes.plot(value, at, marker, color=colour, markersize=3.5, markerfacecolor='white' if hollow else colour)
