"""One picture of an audit for a slide: a column for each defense, private images above what attackers see."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gradleak.audit.result import AuditResult, Case
from gradleak.core import errors
from gradleak.modalities import of_config
from gradleak.report import figures, marked, pictures
from gradleak.report.figures import SOFT
from gradleak.report.formatting import minus, number, wrap
from gradleak.summary import cases
from gradleak.summary.shown import pixels_of

WIDTH, HEIGHT = 12.8, 7.2  # inches
_TILES = 4  # images of a cell, two by two
_ROWS = ('private', 'server ignores\nthe defense', 'server knows\nthe defense')


def slide(result: AuditResult, costs: Mapping[str, float] | None = None) -> bytes:
  """Returns a PNG: the first private images, and what each defense leaves of them to the strongest attackers.

  Below the columns stands of how many trials images are recovered, by any attacker. The attack of a column is the one
  that recovers most under its defense.

  Args:
    result: an `AuditResult`.
    costs: the accuracy that defenses cost, in points, by their labels; without any, no line of costs is drawn.

  Raises:
    UsageError: for a cost of a defense that was not audited.
  """
  if of_config(result.config).marked is not None:
    return marked.slide(result, costs, (WIDTH, HEIGHT))
  worst = {entry['defense']: entry for entry in cases.worst_case(result.rows)}
  for label in costs or {}:
    errors.check_choice('defense with a cost', label, worst)
  truth, shown = pictures.select(result, _TILES)
  columns, summaries = list(worst)[: marked.MOST], cases.summarise(result.rows)
  left, top, gap, foot = 1.5, 0.95, 0.16, 1.25 if costs else 0.95
  side = min((WIDTH - left - gap * len(columns)) / len(columns), (HEIGHT - top - foot - 2 * gap) / len(_ROWS))
  left += (WIDTH - left - (side + gap) * len(columns)) / 2
  with figures.canvas(WIDTH, HEIGHT) as (axes, png):
    for r, name in enumerate(_ROWS):
      axes.text(left - 0.15, top + (r + 0.5) * (side + gap) - gap / 2, name, ha='right', va='center', fontsize=11)
    for c, defense in enumerate(columns):
      across = left + c * (side + gap)
      middle = across + side / 2
      for i, line in enumerate(reversed(wrap(defense, max(8, int(side / 0.098)))[:3])):
        axes.text(middle, top - 0.14 - 0.19 * i, line, ha='center', va='center', fontsize=10, weight='bold')
      for r, found in enumerate([truth, *_strongest(summaries, defense, shown)]):
        _draw_cell(axes, found, across, top + r * (side + gap), side)
      below, entry = top + len(_ROWS) * (side + gap), worst[defense]
      axes.text(middle, below + 0.12, f'{entry["recovered"]} of {entry["n"]}', ha='center', va='center', fontsize=14)
      if costs:
        cost = f'{minus(number(costs[defense]))} points' if defense in costs else '–'
        axes.text(middle, below + 0.42, cost, ha='center', va='center', fontsize=10, color=SOFT)
    for down, name in ((0.12, 'recovered'), *([(0.42, 'accuracy cost')] if costs else [])):
      axes.text(left - 0.15, top + len(_ROWS) * (side + gap) + down, name, ha='right', va='center', fontsize=11)
    return png()


def _strongest(
  summaries: Sequence[cases.Summary], defense: str, shown: Mapping[Case, Sequence[pictures.Picture]]
) -> list[Sequence[pictures.Picture] | None]:
  """Returns the pictures by the non-adaptive and by the adaptive attacker that recover most under a defense.

  None stands for an attacker that was not run.
  """
  summaries = [one for one in summaries if one['defense'] == defense]
  found: list[Sequence[pictures.Picture] | None] = []
  for adaptive in (False, True):
    known = [one for one in summaries if (one['adaptive'] is not None) is adaptive and cases.case(one) in shown]
    found.append(shown[cases.case(cases.strongest(known))] if known else None)
  return found


def _draw_cell(axes: Any, found: Sequence[pictures.Picture] | None, left: float, top: float, side: float) -> None:
  """Draws up to four images, two by two; a dash where there are none."""
  found = [one for one in found or () if one.pixels is not None]
  if not found:
    axes.text(left + side / 2, top + side / 2, '–', ha='center', va='center', fontsize=14, color=SOFT)
    return
  across = 1 if len(found) == 1 else 2
  each = (side - 0.04 * (across - 1)) / across
  for i, picture in enumerate(found[: across**2]):
    x, y = left + (i % across) * (each + 0.04), top + (i // across) * (each + 0.04)
    pixels = pixels_of(np.asarray(picture.pixels))
    extent = figures.extent(pixels, x, y, each)
    axes.imshow(pixels, cmap='gray', vmin=0, vmax=255, interpolation='nearest', extent=extent)
