"""Numbers and names as people read them."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gradleak.core.statistics import percent as percent
from gradleak.modalities import Modality
from gradleak.modalities.base import Shown


def number(value: float | None, digits: int = 1) -> str:
  """Returns `value` with `digits` decimals; '–' for a missing one, '∞' or '−∞' for an infinite one."""
  if value is None or math.isnan(value):
    return '–'
  return _infinite(value) or f'{round(value, digits) + 0.0:.{digits}f}'  # no “-0.0”


def _infinite(value: float) -> str:
  """Returns an infinite value as text; '' for a finite one."""
  return '' if math.isfinite(value) else '∞' if value > 0 else '−∞'


def scored(kind: Modality, value: float | None) -> str:
  """Returns a score of a modality with its unit."""
  return f'{number(value, kind.shown[0].digits)} {kind.shown[0].unit}'.rstrip()


def measures(kind: Modality) -> list[Shown]:
  """Returns the score of a modality and the likeness by which its examples are chosen, as tables show them."""
  shown = {one.column: one for one in (*kind.further, *kind.shown)}
  return [shown[name] for name in dict.fromkeys((kind.score, kind.likeness))]


def of_attacker(kind: Modality) -> str:
  """Returns the label of an axis with the score of the strongest attacker."""
  title, unit = kind.shown[0].title, kind.shown[0].unit
  return f'{title} of the strongest attacker' + (f', in {unit}' if unit else '')


def significant(value: float | None, digits: int = 2) -> str:
  """Returns `value` with `digits` significant digits, as number × power of ten where it is small or large."""
  if value is None or math.isnan(value) or math.isinf(value):
    return number(value)
  text = f'{value:.{digits}g}'
  if 1 <= abs(float(text)) < 1000:  # 99.6 is 100, and no 1e+02
    text = f'{float(text):g}'
  mantissa, _, exponent = text.partition('e')
  power = str(int(exponent)).translate(str.maketrans('-0123456789', '⁻⁰¹²³⁴⁵⁶⁷⁸⁹')) if exponent else ''
  return f'{mantissa} × 10{power}' if exponent else text


def plus_minus(summary: Mapping[str, Any], name: str, digits: int = 1) -> str:
  """Returns 'mean ± distance to the farther end of its 95 % interval', the mean alone where there is no interval."""
  mean, low, high = (summary[key] for key in (name, f'{name}_low', f'{name}_high'))
  half = '' if low is None else f' ± {number(max(high - mean, mean - low), digits)}'
  return f'{number(mean, digits)}{half}'


def interval(summary: Mapping[str, Any], name: str, digits: int = 1) -> str:
  """Returns 'low – high' of the 95 % interval of the mean; empty where there is none."""
  low, high = summary[f'{name}_low'], summary[f'{name}_high']
  return '' if low is None else f'{number(low, digits)} – {number(high, digits)}'


def percent_range(summary: Mapping[str, Any], to: str = '–') -> str:
  """Returns the exact interval of the fraction recovered, in whole per cent, rounded outwards."""
  low, high = (100 * summary[f'success_{end}'] for end in ('low', 'high'))
  return f'{at_least(low, 0)}{to}{at_most(high, 0)} %'


def at_most(bound: float, digits: int = 1) -> str:
  """Returns an upper bound with `digits` decimals, rounded up."""
  return f'{math.ceil(round(bound * 10**digits, 6)) / 10**digits:.{digits}f}'  # 100 × 0.07 is 7.000000000000001


def at_least(bound: float, digits: int = 1) -> str:
  """Returns a lower bound with `digits` decimals, rounded down."""
  return f'{math.floor(round(bound * 10**digits, 6)) / 10**digits:.{digits}f}'


def listed(parts: Iterable[Any], last: str = 'and') -> str:
  """Returns 'a, b and c', with another word for 'and' if `last` says so."""
  parts = [str(part) for part in parts]
  return parts[0] if len(parts) == 1 else f'{", ".join(parts[:-1])} {last} {parts[-1]}'


def together(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, list[Any]]:
  """Returns {key: what is paired with it}, both in order of appearance."""
  groups: dict[Any, list[Any]] = {}
  for key, one in pairs:
    groups.setdefault(key, []).append(one)
  return groups


def percent_given(fraction: float) -> str:
  """Returns what a user gave as a fraction in per cent, with all of its digits."""
  text = f'{100 * fraction:.10g}'
  return f'{text}{".0" if text.isdecimal() else ""} %'


def minus(text: str) -> str:
  """Returns a text with minus signs in place of hyphens."""
  return text.replace('-', '−')


def signed(value: float | None, digits: int = 1) -> str:
  """Returns a number with its sign and so many decimals; '–' for a missing one."""
  return '–' if value is None or math.isnan(value) else minus(f'{round(value, digits) + 0.0:+.{digits}f}')


def duration(seconds: float) -> str:
  """Returns a wall time in words."""
  if seconds < 120:
    return f'{seconds:.1f} seconds'
  minutes = seconds / 60
  return f'{minutes:.0f} minutes' if minutes < 120 else f'{minutes / 60:.1f} hours'


def count(entry: Mapping[str, Any], key: str = 'recovered') -> str:
  """Returns 'k of n'."""
  return f'{entry[key]} of {entry["n"]}'


def unit(n: int, size: int, noun: tuple[str, str] = ('image', 'images')) -> str:
  """Returns what `n` uploads of `size` samples are called; `noun` is singular and plural of these."""
  if size == 1:
    return noun[n != 1]
  return f'{"batch" if n == 1 else "batches"} of {size} {noun[1]}'


def defenses(entries: Iterable[Mapping[str, Any]]) -> list[str]:
  """Returns the defenses of entries or rows, each once."""
  return list(dict.fromkeys(entry['defense'] for entry in entries))


def count_range(summary: Mapping[str, Any], key: str = 'recovered') -> str:
  """Returns 'k of n' with the exact interval of that fraction."""
  return f'{count(summary, key)} ({percent_range(summary)})'


def aligned(lines: Sequence[Sequence[str]], width: float = math.inf) -> list[str]:
  """Returns the lines of a table, each a sequence of cells, as aligned texts; a rule follows the first.

  Short lines are filled up. Where the table is wider than `width`, its first cells are wrapped.
  """
  lines = [[*line, *[''] * (len(lines[0]) - len(line))] for line in lines]
  widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
  widths[0] = int(min(widths[0], width - sum(widths[1:]) - 2 * (len(widths) - 1)))
  texts = []
  for first, *rest in lines:
    indent = len(first) - len(first.lstrip()) if math.isfinite(width) else 0
    start, *more = [' ' * indent + part for part in wrap(first[indent:], widths[0] - indent)]
    cells = [f'{cell:<{size}}' for cell, size in zip([start, *rest], widths, strict=True)]
    texts += ['  '.join(cells).rstrip(), *more]
  return [texts[0], '-' * (sum(widths) + 2 * (len(widths) - 1)), *texts[1:]]


def wrap(text: str, width: int) -> list[str]:
  """Returns `text` as lines of at most `width` characters, broken after `+` or `,`, else after `(`, else anywhere."""
  lines = ['']
  for token in re.findall(r'[^+,]+[+,]?|[+,]', text):
    if len(lines[-1]) + len(token.rstrip()) > width and lines[-1].strip():
      lines.append('')
    while len(token.rstrip()) > width:
      cut = token.rfind('(', 0, width) + 1 or width
      lines[-1:] = [token[:cut], '']
      token = token[cut:]
    lines[-1] += token
  return [line.rstrip() for line in lines if line] or ['']


def exceeding(measured: float, stated: float | None, digits: int = 2) -> tuple[str, str]:
  """Returns a lower bound, rounded down, and a figure, with as many decimals as show that the bound exceeds it."""
  low = math.floor(round(measured * 10**digits, 6)) / 10**digits
  exceeds = stated is not None and measured > stated
  if exceeds and low <= round(stated, digits) and digits < 6:  # type: ignore[arg-type]
    return exceeding(measured, stated, digits + 1)
  return number(low, digits), number(stated, digits)


def upwards(value: float) -> str:
  """Returns an upper bound, rounded up to two significant digits, or to an integer from 10 on; '0' for zero."""
  if value == 0:
    return '0'
  digits = max(0, 1 - math.floor(math.log10(value)))
  least = math.ceil(round(value * 10**digits, 9)) / 10**digits  # 100 × 0.07 is 7.000000000000001
  return f'{least:.{max(0, 1 - math.floor(math.log10(least)))}f}'
