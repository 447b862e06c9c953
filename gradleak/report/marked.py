"""Samples that people read: cells of a table or tokens of a text, private ones beside what attackers make of them.

What is right is marked. A modality has a `marked` function for it, see `modalities.base.Piece`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from gradleak.audit.result import AuditResult, Case
from gradleak.core import errors
from gradleak.modalities import Modality, Piece, of_config
from gradleak.report import blocks, figures
from gradleak.report.figures import SOFT
from gradleak.report.formatting import minus, number, percent, wrap
from gradleak.report.html import method, tagged, text
from gradleak.report.words import said, worded
from gradleak.summary import cases

SHOWN = 3  # private samples on the page
PARTS = 16  # of one sample in a picture
MOST = 8  # defenses in one picture
RIGHT = '#a3210a'
_FEW = 6  # parts of a sample in one line
_OPEN = 1


class Seen(NamedTuple):
  """What the strongest attacker of a defense sees.

  Attributes:
    defense: its label.
    case: of that attacker: attack, defense, and the adaptive attack, if it is adaptive.
    trials: that were attacked under the defense.
    pieces: [trials][samples of a batch] -> pieces, each with whether it is right.
  """

  defense: str
  case: Case
  trials: list[int]
  pieces: list[list[list[Piece]]]

  def of(self, trial: int) -> list[list[Piece]] | None:
    """Returns the pieces of a trial; None where it was not attacked under the defense."""
    return self.pieces[self.trials.index(trial)] if trial in self.trials else None


def seen(result: AuditResult) -> list[Seen]:
  """Returns what the strongest attacker of each defense sees, in the order of the audit."""
  kind, rows = of_config(result.config), cases.by_case(result.rows)
  assert kind.marked is not None
  truth, found = np.asarray(result.truth), []
  for (defense,), group in cases.grouped(cases.summarise(result.rows), 'defense').items():
    case = cases.case(cases.strongest(group))
    trials = [row['trial'] for row in rows[case]]
    pieces = [
      [list(kind.marked(*pair)) for pair in zip(made, truth[t], strict=True)]
      for t, made in zip(trials, np.asarray(result.reconstructions[case]), strict=True)
    ]
    found.append(Seen(defense, case, trials, pieces))
  return found


def private(result: AuditResult) -> list[list[list[Piece]]]:
  """Returns the pieces of the private samples, [trials][samples of a batch]."""
  kind = of_config(result.config)
  assert kind.marked is not None
  return [[list(kind.marked(one, None)) for one in batch] for batch in np.asarray(result.truth)]


def guessed(result: AuditResult) -> list[list[list[Piece]]]:
  """Returns the pieces of the answer without an upload, marked by the samples of each attacked trial, or none."""
  kind = of_config(result.config)
  if kind.usual is None or kind.marked is None:
    return []
  attacked = np.asarray(result.truth)[cases.trials(result.rows)]
  return [[list(kind.marked(np.asarray(kind.usual), one)) for one in batch] for batch in attacked]


def shares(pieces: Sequence[Sequence[Sequence[Piece]]]) -> dict[str, tuple[int, int]]:
  """Returns what parts belong to -> (how many are right, of how many)."""
  counted: dict[str, tuple[int, int]] = {}
  for batch in pieces:
    for sample in batch:
      for piece in sample:
        right, of = counted.get(piece.of, (0, 0))
        counted[piece.of] = right + bool(piece.right), of + 1
  return counted


def at_least(pieces: Sequence[Sequence[Sequence[Piece]]], names: Sequence[str]) -> list[int]:
  """Returns of how many samples at least 1, 2, … of the named parts are right."""
  counts = [sum(bool(p.right) for p in one if p.of in names) for batch in pieces for one in batch]
  return [sum(count >= least for count in counts) for least in range(1, len(names) + 1)]


def inline(pieces: Sequence[Piece], most: int = _FEW) -> blocks.Html:
  """Returns the first pieces in one line, what is right marked."""
  shown = [text(f'{piece.of}: ' if piece.of else '', cell(piece)) for piece in pieces[:most]]
  more = len(pieces) - most
  joined = blocks.Html((', ' if any(piece.of for piece in pieces) else ' ').join(shown))
  return text(joined, f' and {more} more' if more > 0 else '')


def summary(found: Sequence[Piece]) -> blocks.Html:
  """Returns how many pieces are right, and the first that are."""
  right = [piece for piece in found if piece.right]
  line = f'{len(right)} of {len(found)} right'
  if not right or not right[0].of:
    return text(line)
  return blocks.Html(f'{tagged("b", line)}<small>{inline(right, 3)}</small>')


def cell(piece: Piece) -> blocks.Html:
  """Returns a piece, coloured by whether it is right."""
  if piece.right is None:
    return tagged('span', piece.text)
  return tagged('span', piece.text, f'piece {"right" if piece.right else "wrong"}')


def sure(piece: Piece) -> str:
  """Returns how sure the attacker is, where it is not quite sure."""
  return '' if piece.sure is None or piece.sure > 0.995 else f'sure to {100 * piece.sure:.0f} %'


def line(pieces: Sequence[Piece], most: int = _FEW) -> str:
  """Returns the first pieces of one sample as a text for a terminal; a text is shown whole."""
  parted = any(piece.of for piece in pieces)
  shown = pieces[:most] if parted else pieces
  said = [f'{one.of}: {one.text}{f" ({sure(one)})" * bool(sure(one))}' if parted else one.text for one in shown]
  more = f' and {len(pieces) - len(shown)} more' * (len(pieces) > len(shown))
  return (', ' if parted else ' ').join(said) + more


def sections(result: AuditResult, published: Mapping[str, str]) -> list[blocks.Section]:
  """Returns the sections on single samples, on the parts that leak, and on how much of a sample is known."""
  found, truth = seen(result), private(result)
  parted = any(piece.of for piece in truth[0][0])
  made = [_samples(result, found, truth, published)]
  return [*made, *_parts(result, found, published)] if parted else made


def _samples(
  result: AuditResult, found: Sequence[Seen], truth: Sequence[Any], published: Mapping[str, str]
) -> blocks.Section:
  """Returns the first private samples beside what the strongest attacker of each defense sees of them."""
  places = [(t, b) for t in cases.trials(result.rows) for b in range(len(truth[0]))][:SHOWN]
  tables = []
  for t, b in places:
    one = [(column, seen_[b]) for column in found if (seen_ := column.of(t)) is not None]
    table = _across(truth[t][b], one, published) if truth[t][b][0].of else _along(truth[t][b], one, published)
    tables.append((f'trial {t}' + (f', {worded("image")} {b}' if len(truth[0]) > 1 else ''), table))
  parts: list[Any] = [blocks.Text(said('marked.samples'), 'note')]
  for place, (title, table) in enumerate(tables):
    title = title[0].upper() + title[1:]
    parts += [blocks.Heading(title), table] if place < _OPEN else [blocks.Details(title, [table])]
  return blocks.Section('pictures', 'What the attacks reconstruct', parts, 'Reconstructions')


def _across(
  truth: Sequence[Piece], columns: Sequence[tuple[Seen, Sequence[Piece]]], published: Mapping[str, str]
) -> blocks.Table:
  """Returns a table with a line for each part, the parts that most defenses leak first."""

  def first(i: int) -> tuple[float, float, int]:
    known = [piece.sure for piece in (of[i] for _, of in columns) if piece.sure is not None]
    return -sum(bool(of[i].right) for _, of in columns), -float(np.mean(known)) if known else 0.0, i

  order = sorted(range(len(truth)), key=first)
  heads: list[Any] = ['column', ('private', 'left private')]
  heads += [blocks.Column(str(published.get(one.defense) or one.defense), 'left seen') for one, _ in columns]
  rows = []
  for i in order:
    cells = [blocks.Cell(cell(of[i]), [sure(of[i])], 'right' if of[i].right else 'wrong') for _, of in columns]
    rows.append(blocks.Row([truth[i].of, blocks.Cell(cell(truth[i])), *cells]))
  counts = [f'{sum(bool(p.right) for p in of)} of {len(of)}' for _, of in columns]
  by = [blocks.Cell(count, [one.case[0], *([f'adaptive: {one.case[2]}'] if len(one.case) > 2 else [])], 'sum')
        for count, (one, _) in zip(counts, columns, strict=True)]  # fmt: skip
  rows.append(blocks.Row(['right', '', *by], 'sum'))
  return blocks.Table(heads, [blocks.Body(rows)], 'marked')


def _along(
  truth: Sequence[Piece], columns: Sequence[tuple[Seen, Sequence[Piece]]], published: Mapping[str, str]
) -> blocks.Table:
  """Returns a table with a line for each defense: parts that follow each other."""
  rows = [blocks.Row(['private', blocks.Cell(inline(truth, len(truth)))])]
  for one, of in columns:
    known = f'adaptive: {one.case[2]}' if len(one.case) > 2 else ''
    named = blocks.Cell(method(one.defense, published.get(one.defense)), [one.case[0], known])
    count = f'{sum(bool(p.right) for p in of)} of {len(of)} right'
    rows.append(blocks.Row([named, blocks.Cell(inline(of, len(of)), [count])]))
  return blocks.Table(['defense', ('seen', 'left running')], [blocks.Body(rows)], 'marked')


def _parts(result: AuditResult, found: Sequence[Seen], published: Mapping[str, str]) -> list[blocks.Section]:
  """Returns how often each part leaks, and how many parts of a sample are known together."""
  kind, guess = of_config(result.config), guessed(result)
  counted = [shares(one.pieces) for one in found]
  names = list(counted[0])
  order = sorted(names, key=lambda name: (-sum(count[name][0] / max(1, count[name][1]) for count in counted), name))
  heads: list[Any] = ['column', *([('without an\nupload', 'left')] if guess else [])]
  heads += [blocks.Column(str(published.get(one.defense) or one.defense), 'left seen') for one in found]
  usual = shares(guess)
  rows = [
    blocks.Row(
      [
        text(name, ' ', tagged('small', 'sensitive')) if name in kind.sensitive else name,
        *([_bar(*usual[name], faint=True)] if guess else []),
        *(_bar(*count[name]) for count in counted),
      ]
    )
    for name in order
  ]
  columns = blocks.Section(
    'parts', 'What leaks', [blocks.Text(said('marked.parts'), 'note'), blocks.Table(heads, [blocks.Body(rows)], 'bars')]
  )
  return [columns, _together(kind, found, guess, names, published)]


def _together(
  kind: Modality, found: Sequence[Seen], guess: Any, names: list[str], published: Mapping[str, str]
) -> blocks.Section:
  """Returns the share of samples of which at least so many parts are right."""
  chosen = [name for name in names if name in kind.sensitive] or names
  levels = sorted({1, 2, 3, (len(chosen) + 1) // 2, len(chosen)} & set(range(1, len(chosen) + 1)))
  heads = ['defense', *(f'all {least}' if least == len(chosen) else f'{least} or more' for least in levels)]
  lines: list[tuple[Any, Any]] = [(method(one.defense, published.get(one.defense)), one.pieces) for one in found]
  lines += [('without an upload', guess)] if guess else []
  rows = []
  for name, pieces in lines:
    counts, total = at_least(pieces, chosen), sum(map(len, pieces))
    named = blocks.Cell(name, [f'of {total} {kind.noun[total != 1]}'])
    rows.append(blocks.Row([named, *(_bar(counts[least - 1], total) for least in levels)]))
  of = said('marked.sensitive', names=chosen) if kind.sensitive else said('marked.all', n=len(chosen))
  note = blocks.Text(said('marked.together', of=of), 'note')
  return blocks.Section(
    'together', 'How much of one record', [note, blocks.Table(heads, [blocks.Body(rows)], 'bars')], 'Together'
  )


def _bar(right: int, of: int, faint: bool = False) -> blocks.Cell:
  """Returns a bar of a share, and the share in per cent."""
  share = right / max(1, of)
  kind = 'bar faint' if faint else 'bar'
  drawn = f'<span class="{kind}"><i style="width:{100 * share:.0f}%"></i></span><b>{percent(share, 0)}</b>'
  return blocks.Cell(blocks.Html(drawn), kind='left', value=round(100 * share, 3))


def slide(result: AuditResult, costs: Mapping[str, float] | None, size: tuple[float, float]) -> bytes:
  """Returns a PNG: the first private sample, and what the strongest attacker of each defense sees of it.

  Args:
    result: an `AuditResult`.
    costs: as `report.slide.slide` takes it.
    size: width and height in inches.
  """
  worst = {entry['defense']: entry for entry in cases.worst_case(result.rows)}
  for label in costs or {}:
    errors.check_choice('defense with a cost', label, worst)
  found, trial = seen(result)[:MOST], cases.trials(result.rows)[0]
  truth = private(result)[trial][0]
  own = [one.of(trial) or [[Piece('–')] * len(truth)] for one in found]
  if not truth[0].of:
    return _running([(one.defense, of[0]) for one, of in zip(found, own, strict=True)], truth, worst, size)
  order = range(min(len(truth), PARTS))
  width, height = size
  left, top, foot = 2.6, 0.95, 0.75
  across, down = (width - left - 0.2) / (len(found) + 1), (height - top - foot) / max(len(order), 1)
  with figures.canvas(width, height) as (axes, png):
    for c, name in enumerate(['private', *(one.defense for one in found)]):
      for i, line in enumerate(reversed(wrap(name, max(8, int(across / 0.088)))[:4])):
        axes.text(
          left + (c + 0.5) * across, top - 0.2 - 0.18 * i, line, ha='center', va='center', fontsize=9, weight='bold'
        )
    if len(truth) > len(order):
      said = f'first {len(order)} of {len(truth)} columns'
      axes.text(left - 0.1, top - 0.2, said, ha='right', va='center', fontsize=9, color=SOFT)
    for r, i in enumerate(order):
      middle = top + (r + 0.5) * down
      axes.text(left - 0.1, middle, _short(truth[i].of, 28), ha='right', va='center', fontsize=10)
      axes.text(
        left + 0.5 * across, middle, _short(truth[i].text, int(across / 0.085)), ha='center', va='center', fontsize=10
      )
      for c, of in enumerate(own):
        piece = of[0][i]
        style: dict[str, Any] = {'color': RIGHT, 'weight': 'bold'} if piece.right else {'color': '#9a9fa6'}
        shown = ('✓ ' if piece.right else '') + _short(piece.text, int(across / 0.095))
        axes.text(left + (c + 1.5) * across, middle, shown, ha='center', va='center', fontsize=10, **style)
    _foot(axes, found, worst, costs, (left, across, height))
    return png()


def _foot(
  axes: Any,
  found: Sequence[Seen],
  worst: Mapping[str, Mapping[str, Any]],
  costs: Mapping[str, float] | None,
  place: tuple[float, float, float],
) -> None:
  """Writes below each column of how many trials something is recovered, and what the defense costs."""
  left, across, height = place
  axes.plot([0.3, left + across * (len(found) + 1)], [height - 0.66] * 2, color='#dcdad3', linewidth=0.8)
  axes.text(left - 0.1, height - 0.45, 'recovered', ha='right', va='center', fontsize=11)
  for c, one in enumerate(found):
    entry, middle = worst[one.defense], left + (c + 1.5) * across
    axes.text(middle, height - 0.45, f'{entry["recovered"]} of {entry["n"]}', ha='center', va='center', fontsize=13)
    if costs:
      cost = f'{minus(number(costs[one.defense]))} points' if one.defense in costs else '–'
      axes.text(middle, height - 0.18, cost, ha='center', va='center', fontsize=10, color=SOFT)
  if costs:
    axes.text(left - 0.1, height - 0.18, 'accuracy cost', ha='right', va='center', fontsize=11)


def _running(
  found: Sequence[tuple[str, Sequence[Piece]]],
  truth: Sequence[Piece],
  worst: Mapping[str, Mapping[str, Any]],
  size: tuple[float, float],
) -> bytes:
  """Returns a PNG with a line of running text for each defense, (its label, pieces), below the private one."""
  width, height = size
  lines = [('private', '', truth), *((label, f'recovered {worst[label]["recovered"]} of {worst[label]["n"]}', of)
                                     for label, of in found)]  # fmt: skip
  left, down = 0.4, (height - 0.5) / len(lines)
  with figures.canvas(width, height) as (axes, png):
    for r, (name, count, pieces) in enumerate(lines):
      top = 0.35 + r * down
      axes.text(left, top, name, va='center', fontsize=10.5, weight='bold')
      axes.text(left + 0.3 + 0.105 * len(name), top, count, va='center', fontsize=10.5, color=SOFT)
      _flow(axes, pieces, left, top + 0.22, width - left, down - 0.22)
    return png()


def _flow(axes: Any, pieces: Sequence[Piece], left: float, top: float, end: float, down: float) -> None:
  """Writes pieces one after the other, in as many lines as fit, and an ellipsis for those that do not."""
  x, y, each = left, top, 0.101
  for piece in pieces:
    wide = each * (len(piece.text) + 1)
    if x + wide > end:
      if y + 0.2 > top + down - 0.15:
        axes.text(x, y, '…', va='center', fontsize=11)
        return
      x, y = left, y + 0.2
    style: dict[str, Any] = (
      {} if piece.right is None else {'color': RIGHT, 'weight': 'bold'} if piece.right else {'color': '#9a9fa6'}
    )
    axes.text(x, y, piece.text, va='center', fontsize=11, family='DejaVu Sans Mono', **style)
    x += wide


def _short(text: str, most: int) -> str:
  return text if len(text) <= most else text[: max(1, most - 1)] + '…'
