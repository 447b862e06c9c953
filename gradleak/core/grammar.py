"""The language of the programs: `name(setting=value, …)`; `+` chains, `;` separates entries, `|` spans a grid.

    none; gaussian(stddev=0.01|0.1); prune(rate=0.9)+laplace(scale=0.001); ats(policy='rotate:40|invert')

A value is a number, true, false, none, a word, or a tuple of these in parentheses. A word that contains any of
`|,;()+=`, a quote or a space is quoted. Within quotes, a backslash escapes a quote and another backslash. Before any
other character a backslash stands for itself, as in 'C:\\images'.

`gradleak.registry` makes objects of what is read here; nothing in this file knows one.
"""

import collections
import contextlib
import itertools
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from gradleak.core import errors

_LONGEST, _DEEPEST, _MOST = 1000, 20, 10_000  # characters of an entry, nested parentheses, entries of one grid
_NAME = re.compile(r'[A-Za-z_][A-Za-z_0-9]*')
_CONTROL = re.compile(r'[\x00-\x08\x0e-\x1f\x7f]')
_QUOTED = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
_WORD_IN_QUOTES = re.compile(_QUOTED, re.DOTALL)
_TOKEN = re.compile(f'{_QUOTED}|.', re.DOTALL)  # what stands in quotes is one token
_BARE = re.compile(r"""[^|,;()+='"\s]+""")
_CONSTANTS = {'true': True, 'false': False, 'none': None, 'inf': math.inf, '-inf': -math.inf, 'nan': math.nan}


class Spec(NamedTuple):
  """A name with its settings, as written by a user; `str(spec)` is its canonical form.

  Attributes:
    name: the name.
    settings: (name, value) pairs in the order written.
  """

  name: str
  settings: tuple[tuple[str, Any], ...] = ()

  def __str__(self) -> str:
    return written(self.name, dict(self.settings))


def spec(text: str, kind: str) -> Spec:
  """Returns the `Spec` of one `name(setting=value, …)`; `kind` is what it is called in errors.

  Raises:
    UsageError: if the text is not of that form, is longer than 1,000 characters, or has numbers beyond 64 bits.
  """
  what = _check(text, kind)
  text = text.strip()
  name, bracket, _ = text.partition('(')
  inside = text[len(name) :]
  if not _NAME.fullmatch(name.strip()) or (bracket and not _is_bracketed(inside)):
    raise errors.UsageError(f'cannot read {what}, expected name or name(setting=value,…)')
  settings: dict[str, Any] = {}
  for item in _items(inside[1:-1]):
    key, equals, value = (part.strip() for part in item.partition('='))
    if not equals or not value or not _NAME.fullmatch(key):
      raise errors.UsageError(f'cannot read {errors.shown(item)} in {what}, expected setting=value')
    if key in settings:
      raise errors.UsageError(f'{what} sets {key!r} twice')
    try:
      settings[key] = _value(value)
    except ValueError as error:
      raise errors.UsageError(f'cannot read {errors.shown(item)} in {what}: {error}') from None
  return Spec(name.strip(), tuple(settings.items()))


def written(name: str, settings: Mapping[str, Any]) -> str:
  """Returns `name(setting=value,…)`; `spec` reads the same name and settings from it.

  Args:
    name: the name.
    settings: by name; words are quoted where they must be.
  """
  inside = ','.join(f'{key}={_written(value)}' for key, value in settings.items())
  return f'{name}({inside})' if inside else name


def parse_chain(text: str, kind: str) -> tuple[Spec, ...]:
  """Returns the `Spec`s of `a(…)+b(…)`; raises as `spec` does, and for an empty member."""
  what = _check(text, kind)
  parts = _split(text, '+', depth=0)
  if not all(part.strip() for part in parts):
    raise errors.UsageError(f'{what} is empty or has an empty member')
  return tuple(spec(part, kind) for part in parts)


def parse_list(text: str, kind: str) -> list[str]:
  """Returns the entries of a list separated by `;`, as stripped texts, grids written out (`expand`).

  Raises:
    UsageError: if the list or an entry is empty, an entry stands in it twice, commas separate the entries, or there are
      more than 10,000.
  """
  entries = [entry.strip() for entry in _split(_text(text, f'list of {kind}s'), ';')]
  if not all(entries):
    raise errors.UsageError(f'the list of {kind}s {errors.shown(text)} is empty or has an empty entry')
  entries = [each for entry in entries for each in expand(entry, kind)]
  if len(entries) > _MOST:
    raise errors.UsageError(f'the list of {kind}s has {len(entries)} entries, expected at most {_MOST}')
  for entry in entries:
    parts = _split(entry, ',', depth=0)
    if len(parts) > 1:
      meant = errors.shown(';'.join(parts))
      raise errors.UsageError(f"{errors.shown(entry)} has a comma between {kind}s, expected ';' as in {meant}")
  for entry, times in collections.Counter(entries).items():
    if times > 1:
      raise errors.UsageError(f'the {kind} {errors.shown(entry)} is listed twice')
  return entries


def expand(text: str, kind: str) -> list[str]:
  """Returns the texts that a grid stands for: `gaussian(stddev=0.01|0.1)` is two, and several grids multiply.

  A `|` in quotes is no grid.

  Raises:
    UsageError: for an empty value among the alternatives, or more than 10,000 texts.
  """
  what = _check(text, kind)
  found = list(_grids(text))
  grids = [[value.strip() for value in _split(text[start:end], '|', depth=0)] for start, end in found]
  if not all(value for values in grids for value in values):
    raise errors.UsageError(f'{what} has an empty value in a grid, expected as in (setting=1|2|3)')
  number = math.prod(map(len, grids))
  if number > _MOST:
    raise errors.UsageError(f'{what} spans a grid of {number} entries, expected at most {_MOST}')
  edges = [0, *itertools.chain.from_iterable(found), len(text)]
  between = [text[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True)]
  return [
    ''.join(itertools.chain.from_iterable(itertools.zip_longest(between, values, fillvalue='')))
    for values in itertools.product(*grids)
  ]


def _grids(text: str) -> Iterator[tuple[int, int]]:
  """Yields where values begin and end that are spelled as alternatives, from left to right; none is inside another."""
  marks, behind = list(_marks(text)), 0
  for mark, place, depth in marks:
    if mark != '=' or place < behind:
      continue
    ends = (at for sign, at, deep in marks if at > place and (deep < depth or (deep == depth and sign in ',;')))
    start, end = place + 1, next(ends, len(text))
    if len(_split(text[start:end], '|', depth=0)) > 1:
      behind = end
      yield start, end


def _check(text: str, kind: str) -> str:
  """Returns how errors call a text: 'the attack …'.

  Raises:
    UsageError: if it is too long or nests too deep, or if its quotes or parentheses do not match.
  """
  what = f'the {kind} {errors.shown(_text(text, kind))}'
  if len(text) > _LONGEST:
    raise errors.UsageError(f'{what} is too long, expected at most {_LONGEST} characters')
  if _CONTROL.search(text):
    raise errors.UsageError(f'{what} has a control character, expected printable text')
  marks = list(_marks(text))
  if any(mark in ("'", '"') for mark, _, _ in marks):
    raise errors.UsageError(f'a quote is not closed in {what}')
  depths = [0, *(depth for _, _, depth in marks)]
  if min(depths) < 0 or depths[-1]:
    raise errors.UsageError(f'unbalanced parentheses in {what}')
  if max(depths) > _DEEPEST:
    raise errors.UsageError(f'{what} nests {max(depths)} parentheses, expected at most {_DEEPEST}')
  return what


def _text(text: Any, kind: str) -> str:
  return errors.check_instance(f'the {kind}', text, str, 'a text')


def _marks(text: str) -> Iterator[tuple[str, int, int]]:
  """Yields (token, place, depth in parentheses, 0 at the last closing one) of each character, or text in quotes."""
  depth = 0
  for token in _TOKEN.finditer(text):
    depth += (token[0] == '(') - (token[0] == ')')
    yield token[0], token.start(), depth


def _split(text: str, separator: str, depth: int | None = None) -> list[str]:
  """Splits at separators outside quotes, at a depth in parentheses or at any."""
  places = [place for mark, place, at in _marks(text) if mark == separator and depth in (None, at)]
  return [text[start + 1 : end] for start, end in itertools.pairwise([-1, *places, len(text)])]


def _items(text: str) -> list[str]:
  """Returns what commas separate, stripped; one comma may stand behind the last item."""
  items = [item.strip() for item in _split(text, ',', depth=0)]
  return items if items[-1] else items[:-1]


def _is_bracketed(text: str) -> bool:
  """Returns whether the parenthesis that a text begins with is closed at its end."""
  closed = [place for mark, place, depth in _marks(text) if mark == ')' and depth == 0]
  return text.startswith('(') and closed == [len(text) - 1]


def _value(text: str) -> Any:
  """Returns the number, constant, word or tuple that a text spells; raises `ValueError` with what is wrong."""
  if text.lower() in _CONSTANTS:
    return _CONSTANTS[text.lower()]
  if _WORD_IN_QUOTES.fullmatch(text):
    return re.sub(r"""\\(['"\\])""", r'\1', text[1:-1])
  if _is_bracketed(text):
    items = _items(text[1:-1])
    if not all(items):
      raise ValueError('an entry is empty')
    return tuple(map(_value, items))
  number = _number(text)
  if number is None and ("'" in text or '"' in text):
    raise ValueError('quotes stand around a whole value')
  if '|' in text:
    raise ValueError(f'{errors.shown(text)} spells alternatives, expected one value')
  if (isinstance(number, int) and abs(number) >= 2**63) or number in (math.inf, -math.inf):
    raise ValueError('the number is too large')
  return text if number is None else number


def _number(text: str) -> int | float | None:
  if not text.isascii() or '_' in text:  # Python reads other scripts' digits, and 1_000
    return None
  for kind in (int, float):
    with contextlib.suppress(ValueError):
      return kind(text)
  return None


def _written(value: Any) -> str:
  if isinstance(value, tuple):
    return f'({",".join(map(_written, value))})'
  if not isinstance(value, str) or (
    _BARE.fullmatch(value) and value.lower() not in _CONSTANTS and _number(value) is None
  ):
    return str(value)
  escaped = re.sub(r"(['\\])", r'\\\1', value)
  return f"'{escaped}'"
