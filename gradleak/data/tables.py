"""Tables: what their columns hold, and the rows of numbers that networks take.

A row is encoded as float32 [D]. A continuous or ordinal column is one number, standardised by the rows that a schema
was inferred from. A categorical or binary column is a one-hot block. Gaps are a further level of such a block, and for
numbers a further column of 0 and 1.
"""

import collections
import decimal
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np

from gradleak.core import errors

CONTINUOUS, ORDINAL, CATEGORICAL, BINARY = KINDS = ('continuous', 'ordinal', 'categorical', 'binary')
MISSING = 'missing'  # how a gap is called among the levels
UNNAMED = 'unnamed'  # the heading of a column that has none, as pandas writes one of row numbers
# Texts that stand for a gap, in lower case.
GAPS = frozenset(
  {'', '?', '.', '-', '--', 'na', 'n/a', 'n.a.', '#n/a', '#na', '<na>', 'nan', '-nan', 'nat', 'none', 'null', MISSING}
)
_SCALING = {'center': 0.0, 'scale': 1.0}  # as a column has them where the other is given
_KEYS = ('kind', 'levels', *_SCALING)  # of what is given of a column
_SMALLEST = 1e-30  # of a scale
_FEW = 12  # whole numbers with at most so many values are ordinal
_MANY = 100  # levels beyond which a text is taken for a name or a number of its own
FLAGGED = 0.5  # of the entry of a row that says that a number is missing
_KEPT = 2**53  # whole numbers beyond it lose digits
_LONG = re.compile(r'[+-]?\d{16,}')  # whole numbers that may be beyond it
_LARGEST = float(np.finfo(np.float32).max)
_ROUNDED = 1e-5  # deviations that rounding moves a number by, at most
_ZERO = 1e-6  # of the mean of a column, more than float32 makes of a zero
_BETWEEN = 0.01  # part of a step from which on a number is none of its multiples
_CODE = re.compile(r'[+-]?0\d')  # how a code of digits begins whose zeros count
# A number as people write it, and programs do not: 1,5 or 1.000,00 or 12 % or $ 5.
_WRITTEN = re.compile(r"[^\w\s]? ?\d[\d.,'\s]*[^\w\s]?")


class Field(NamedTuple):
  """A column of a table.

  Attributes:
    name: its heading.
    kind: one of `KINDS`.
    levels: the texts that it may hold, without gaps; of an ordinal column in their order. () of a continuous one.
    shares: how often each level occurs, and behind them gaps if there may be any; of numbers the share of gaps alone.
    mean, std: of its numbers; 0 and 1 where it has none.
    median: of its numbers.
    low, high: the range of its numbers.
    step: what its numbers are multiples of, 1 for whole ones; 0 for anything.
    gaps: whether values may be missing.
    scaling: (center, scale), where the network takes numbers as (number − center) / scale; None for `mean` and `std`.
  """

  name: str
  kind: str
  levels: tuple[str, ...] = ()
  shares: tuple[float, ...] = ()
  mean: float = 0.0
  std: float = 1.0
  median: float = 0.0
  low: float = 0.0
  high: float = 0.0
  step: float = 0.0
  gaps: bool = False
  scaling: tuple[float, float] | None = None

  @property
  def numeric(self) -> bool:
    """Whether it is encoded as a number."""
    return self.kind in (CONTINUOUS, ORDINAL)

  @property
  def width(self) -> int:
    """How many entries of an encoded row it takes."""
    return (1 if self.numeric else len(self.levels)) + self.gaps

  @property
  def values(self) -> np.ndarray:
    """The numbers of an ordinal column's levels: the levels themselves, or their places where one is no number."""
    numbers = [number_of(level) for level in self.levels]
    found = [float(place) if number is None else number for place, number in enumerate(numbers)]
    return np.arange(len(numbers), dtype=float) if None in numbers else np.asarray(found)

  def written(self, value: float) -> str:
    """Returns a number, or the place of a level, as people write it; NaN is a gap."""
    if math.isnan(value):
      return MISSING
    if self.kind == CONTINUOUS and self.step == 1:
      return f'{round(value, 0) + 0.0:.0f}'  # of -0.0 the sum makes 0.0
    if self.kind == CONTINUOUS:
      return f'{0 if abs(value) <= _ZERO * abs(self.mean) else value:.4g}'
    if self.kind == ORDINAL:
      return self.levels[int(np.argmin(np.abs(self.values - value)))]
    return [*self.levels, MISSING][int(value)]

  def in_words(self) -> str:
    """Returns what it holds, as 'age: continuous, 17 to 90, whole numbers'."""
    listed = ', '.join(self.levels[:6]) + (', …' if len(self.levels) > 6 else '')
    told = [
      f'{self.low:.4g} to {self.high:.4g}' if self.kind == CONTINUOUS else f'{len(self.levels)} levels ({listed})'
    ]
    told += ['whole numbers'] if self.kind == CONTINUOUS and self.step == 1 else []
    told += ['scaled as (number − {:g}) / {:g}'.format(*self.scaling)] if self.scaling else []
    return f'{self.name}: {self.kind}, {", ".join(told)}{", with gaps" if self.gaps else ""}'


class Schema(NamedTuple):
  """The columns of a table, in their order.

  Attributes:
    fields: the columns.
    sensitive: names of those that are worse to lose than others.
  """

  fields: tuple[Field, ...]
  sensitive: tuple[str, ...] = ()

  @property
  def width(self) -> int:
    """The length of an encoded row."""
    return sum(field.width for field in self.fields)

  @property
  def places(self) -> tuple[slice, ...]:
    """Where each column stands in an encoded row."""
    ends = np.cumsum([field.width for field in self.fields])
    return tuple(slice(int(end) - field.width, int(end)) for field, end in zip(self.fields, ends, strict=True))

  def to_json(self) -> dict[str, Any]:
    """Returns it as plain JSON values."""
    plain = [
      {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in one._asdict().items()
        if value is not None
      }
      for one in self.fields
    ]
    return {'columns': plain, 'sensitive': list(self.sensitive)}

  def encode(self, columns: Mapping[str, Sequence[Any]]) -> np.ndarray:
    """Returns rows, float32 [N, D].

    Args:
      columns: name -> values, numbers or texts; others than those of the schema are not read.

    Raises:
      UsageError: for a column that is missing, a level that is not in the schema, a text in place of a number, a number
        that float32 does not hold, and a gap where there are none; names the first row.
    """
    columns = named(columns)
    for field in self.fields:
      if field.name not in columns:
        raise errors.UsageError(f'the column {field.name!r} is missing: there are {", ".join(columns)}')
    check_lengths({field.name: columns[field.name] for field in self.fields})
    blocks = [_encoded(field, [text_of(value) for value in columns[field.name]]) for field in self.fields]
    return np.concatenate(blocks, axis=1).astype(np.float32)

  @property
  def usual(self) -> np.ndarray:
    """The encoded row of medians, gaps where most are, and commonest levels, float32 [D]: what needs no upload."""
    found = np.zeros(self.width, np.float32)
    for field, place in zip(self.fields, self.places, strict=True):
      if field.gaps and field.numeric and field.shares[-1] > FLAGGED:
        found[place.stop - 1] = 1
      elif field.numeric:
        middle = field.median
        if field.kind == ORDINAL:  # of an even number of rows it may stand between two levels
          middle = field.values[np.argmin(np.abs(field.values - middle))]
        found[place.start] = (middle - field.mean) / field.std
      else:
        found[place.start + int(np.argmax(field.shares))] = 1
    return found

  @property
  def moments(self) -> tuple[np.ndarray, np.ndarray]:
    """The mean and the deviation of each entry of a row, float32 [D]; 0 and 1 of numbers, which are standardised."""
    mean, std = np.zeros(self.width, np.float32), np.ones(self.width, np.float32)
    for field, place in zip(self.fields, self.places, strict=True):
      shares = np.asarray(field.shares, np.float32)
      of = slice(place.stop - len(shares), place.stop)
      mean[of], std[of] = shares, np.sqrt(shares * (1 - shares))
    return mean, std

  @property
  def scaling(self) -> tuple[np.ndarray, np.ndarray] | None:
    """What `models.standardised` takes to make of a row what the network takes, two float32 [D]; None for the row."""
    mean, std = np.zeros(self.width, np.float32), np.ones(self.width, np.float32)
    for field, place in zip(self.fields, self.places, strict=True):
      if field.scaling is not None:
        center, scale = field.scaling
        mean[place.start], std[place.start] = (center - field.mean) / field.std, scale / field.std
    return (mean, std) if any(field.scaling for field in self.fields) else None

  def cells(self, rows: Any) -> np.ndarray:
    """Returns the cells that encoded rows [N, D] stand for, float64 [N, F]; a search may have moved their entries.

    A number is standardised; it is moved to the nearest one that the column may have. A category is the place of its
    level, the largest entry of its block, and gaps stand behind all levels. A gap among numbers is infinite. What is
    not finite has no answer and is NaN.
    """
    rows = np.asarray(rows, np.float64)
    found = [_cell(field, rows[:, place]) for field, place in zip(self.fields, self.places, strict=True)]
    return np.stack(found, axis=1) if found else np.zeros((len(rows), 0))

  def covering(self, rows: Any) -> 'Schema':
    """Returns the schema whose numbers may be those of encoded rows [N, D]: itself, where they may be already.

    Rows that it was not inferred from may have larger or smaller numbers, and some between its whole ones.
    """
    rows = np.asarray(rows, np.float64)
    pairs = zip(self.fields, self.places, strict=True)
    fields = tuple(_reaching(field, rows[:, place]) for field, place in pairs)
    return self if fields == self.fields else self._replace(fields=fields)

  def certainty(self, rows: Any) -> np.ndarray:
    """Returns how sure each category of rows [N, D] is, float64 [N, F]; NaN for numbers, of which a row does not tell.

    It is 1 less the entropy of a block's entries, in units of the largest entropy. The entries are taken for shares, as
    Vero et al. (2023) do of pooled starts.
    """
    rows = np.asarray(rows, np.float64)
    found = np.full((len(rows), len(self.fields)), np.nan)
    for number, (field, place) in enumerate(zip(self.fields, self.places, strict=True)):
      block = np.clip(np.nan_to_num(rows[:, place]), 0, None)
      total = block.sum(axis=1, keepdims=True)
      if not field.numeric:
        shares = np.divide(block, total, out=np.full_like(block, 1 / field.width), where=total > 0)
        entropy = -np.sum(shares * np.log(np.maximum(shares, 1e-300)), axis=1)
        found[:, number] = 1 - entropy / math.log(field.width)
    return found

  def texts(self, cells: np.ndarray) -> list[list[str]]:
    """Returns cells [N, F] as people write them."""
    return [
      [
        '–' if np.isnan(cell) else field.written(_plain(field, cell))
        for field, cell in zip(self.fields, row, strict=True)
      ]
      for row in cells
    ]


def from_json(made: Mapping[str, Any]) -> Schema:
  """Returns the `Schema` of what `Schema.to_json` made; raises `UsageError` for anything else."""
  try:
    fields = []
    for one in made['columns']:
      plain: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in one.items()}
      fields.append(Field(**plain))
    return Schema(tuple(fields), tuple(made['sensitive']))
  except (KeyError, TypeError, AttributeError) as error:
    raise errors.UsageError(f'the schema of a table is not one that was written by gradleak: {error}') from error


def infer(
  columns: Mapping[str, Sequence[Any]],
  given: Mapping[str, Any] | None = None,
  fitted: Sequence[int] | None = None,
  sensitive: Sequence[str] = (),
) -> Schema:
  """Returns the `Schema` of columns.

  Texts with two levels are binary, others categorical. Whole numbers with at most 12 values are ordinal, other numbers
  continuous, and any column with two values is binary. Digits that begin with a zero, as 007, are a text. A kind that
  is given is taken as it is.

  Args:
    columns: name -> values, numbers or texts; None, NaN and what `GAPS` lists are gaps.
    given: name -> what is known better: a kind, 'ignore', or a dict with 'kind', and 'levels' in their order. A text
      that is listed as a level is no gap. Ordinal texts need levels, and continuous columns have none. 'center' and
      'scale' say how the network takes numbers, see `Field`; one without the other is beside 0 or 1.
    fitted: the rows whose means, deviations and shares are taken; levels and ranges are those of all. None for all.
    sensitive: names of columns that are worse to lose than others.

  Raises:
    UsageError: for a column without a value or with one value only, texts that are nearly all different, and for what
      is given of a column that is not there. Also for unknown keys of a column, and levels that are missing, empty,
      equal or of a continuous column, and for a scaling of what is no number. Also for infinity among numbers, and
      cells that are lists or no text in UTF-8.
      Also for what may be no category and no number, unless a kind is given: numbers among which are texts, or which
      are written with commas or units, numbers of rows, and spellings that differ in capital letters alone.
  """
  given = errors.check_instance('given', {} if given is None else given, Mapping, 'name -> what is known of a column')
  columns, given, sensitive = named(columns), named(given), tuple(map(str, sensitive))
  check_lengths(columns)
  for name in [*given, *sensitive]:
    errors.check_choice('column', name, list(columns))
  fields = []
  for name, values in columns.items():
    kind, levels, scaling = _known(name, given.get(name, {}))
    if kind == 'ignore':
      continue
    field = _inferred(name, [text_of(value) for value in values], kind, levels, fitted)
    if scaling and not field.numeric:
      raise errors.UsageError(f'the column {name!r} is {field.kind}, which has no numbers to scale: leave "scale" out')
    fields.append(field._replace(scaling=scaling))
  if not fields:
    raise errors.UsageError('the table has no column but its label')
  kept = {field.name for field in fields}
  return Schema(tuple(fields), tuple(name for name in sensitive if name in kept))


def named(columns: Mapping[Any, Any]) -> dict[str, Any]:
  """Returns columns by the texts of their names; raises `UsageError` for two of one name, as 0 and '0'."""
  found = {str(name) or UNNAMED: values for name, values in columns.items()}
  if len(found) < len(list(columns)):
    raise errors.UsageError(f'the columns are {", ".join(map(str, columns))}: expected different names')
  return found


def check_lengths(columns: Mapping[str, Any]) -> None:
  """Raises `UsageError` for columns of differing lengths; names the first one that differs."""
  lengths = {name: len(values) for name, values in columns.items()}
  first = next(iter(lengths), '')
  if wrong := [name for name, length in lengths.items() if length != lengths[first]]:
    raise errors.UsageError(
      f'the column {wrong[0]!r} has {lengths[wrong[0]]} values, and {first!r} has {lengths[first]}: expected as many'
    )


def _known(name: str, known: Any) -> tuple[str | None, tuple[str, ...], tuple[float, float] | None]:
  """Returns (kind or None, levels, (center, scale) or None) of what is given of a column."""
  known = {'kind': known} if isinstance(known, str) else known
  what = f'the column {name!r}'
  errors.check_instance(f'what is given of {what}', known, Mapping, "a kind, or a dict of 'kind' and 'levels'")
  for key in known:
    errors.check_choice(f'key of {what}', key, _KEYS)
  errors.check_choice(f'kind of {what}', known.get('kind', CONTINUOUS), [*KINDS, 'ignore'])
  levels = known.get('levels', ())
  if isinstance(levels, str | bytes | Mapping | Set) or not isinstance(levels, Iterable):
    raise errors.UsageError(f'the levels of {what} are {errors.shown(levels)}, expected a list')
  levels = tuple(map(text_of, levels))
  if '' in levels:
    raise errors.UsageError(f'{what} has a level without a text: leave it out, gaps are found in the values')
  center, scale = (known.get(key, usual) for key, usual in _SCALING.items())
  errors.check_number(f'the center of {what}', center, finite=True)
  errors.check_number(f'the scale of {what}', scale, low=_SMALLEST, finite=True)
  return known.get('kind'), levels, (float(center), float(scale)) if _SCALING.keys() & known.keys() else None


def _inferred(
  name: str, texts: list[str], given: str | None, levels: tuple[str, ...], fitted: Sequence[int] | None
) -> Field:
  if given not in (CATEGORICAL, BINARY):
    check_finite(texts, f'in the column {name!r}', given, levels)
  numeric = are_numbers(texts, given, levels)
  if numeric:
    texts, levels = [text if is_gap(text) else spelt(text) for text in texts], tuple(map(spelt, levels))
  held = [text for text in texts if not is_gap(text, levels)]
  distinct = list(dict.fromkeys(held))
  if not distinct:
    raise errors.UsageError(f'the column {name!r} has no value at all, only gaps: leave it out (kind "ignore")')
  if len(distinct) == 1:
    raise errors.UsageError(f'the column {name!r} has one value only, {distinct[0]!r}: leave it out (kind "ignore")')
  numbers = [number_of(text) for text in distinct]
  kind = given or _kind(held, distinct, numbers, numeric, name)
  gaps = len(held) < len(texts)
  of = texts if fitted is None else [texts[place] for place in fitted]
  if kind == CONTINUOUS:
    if not numeric:
      wrong = distinct[numbers.index(None)]
      raise errors.UsageError(f'the column {name!r} is to be continuous and has the value {wrong!r}')
    if levels:
      raise errors.UsageError(f'the column {name!r} is continuous, which has no levels: leave them out, or give a kind')
    return _numbers(Field(name, kind, gaps=gaps), [float(text) for text in held], of, None)
  levels = _levels(name, kind, levels, distinct, numeric)
  if kind == ORDINAL:
    field = Field(name, kind, levels, gaps=gaps)
    by_level = dict(zip(levels, field.values.tolist(), strict=True))
    if len(set(by_level.values())) < len(levels):
      raise errors.UsageError(f'the column {name!r} has levels of more digits than are kept: call it categorical')
    return _numbers(field, [by_level[text] for text in held], of, by_level)
  seen = collections.Counter(of)
  counts = np.asarray([seen[level] for level in levels] + [sum(is_gap(text, levels) for text in of)] * gaps, float)
  shares = (counts + 0.5) / (counts + 0.5).sum()  # none is 0, not even of a level that the fitted rows lack
  return Field(name, kind, levels, tuple(float(share) for share in shares), gaps=gaps)


def _levels(name: str, kind: str, given: tuple[str, ...], distinct: list[str], numeric: bool) -> tuple[str, ...]:
  """Returns the levels of a column, those that are given or all that occur; raises `UsageError` for wrong ones."""
  if kind == ORDINAL and not (given or numeric):
    raise errors.UsageError(f'the column {name!r} is to be ordinal and has texts: give its "levels" in their order')
  levels = given or ordered(distinct, numeric)
  if twice := [level for level, count in collections.Counter(levels).items() if count > 1]:
    raise errors.UsageError(f'the column {name!r} has the level {twice[0]!r} twice')
  if beyond := [level for level in distinct if level not in levels]:
    raise errors.UsageError(f'the column {name!r} has {beyond[0]!r}, which is none of its levels: {", ".join(levels)}')
  if kind == BINARY and len(levels) != 2:
    raise errors.UsageError(
      f'the column {name!r} is to be binary and has {len(levels)} levels: {", ".join(levels[:8])}'
    )
  return levels


def are_numbers(texts: Sequence[str], kind: str | None = None, levels: Sequence[str] = ()) -> bool:
  """Returns whether all texts but gaps are numbers. Codes such as 007 are none, unless the kind says otherwise."""
  held = [text for text in texts if not is_gap(text, levels)]
  if kind not in (CONTINUOUS, ORDINAL) and any(map(_CODE.match, held)):
    return False
  return all(number_of(text) is not None for text in held)


def check_finite(texts: Sequence[str], where: str, kind: str | None = None, levels: Sequence[str] = ()) -> None:
  """Raises `UsageError` for infinity, and numbers beyond float64, among what else are numbers; names the first row."""
  infinite = {text for text in dict.fromkeys(texts) if _infinite(text)} - set(levels)
  if infinite and are_numbers([text for text in texts if text not in infinite], kind, levels):
    row = next(row for row, text in enumerate(texts) if text in infinite)
    raise errors.UsageError(f'row {row} has {texts[row]!r} {where}, expected a finite number')


def classes(texts: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
  """Returns (the class of each text, all of them in their order); numbers are spelt alike, so that 1.0 is 1.

  Raises:
    UsageError: for gaps, and infinity among numbers; names the first row.
  """
  if (gap := next((row for row, text in enumerate(texts) if is_gap(text)), None)) is not None:
    stands = f', {texts[gap]!r} stands for a gap: call a class otherwise' if texts[gap] else ''
    raise errors.UsageError(f'row {gap} has no label{stands}')
  check_finite(texts, 'as its label')
  numeric = are_numbers(texts)
  found = [spelt(text) for text in texts] if numeric else list(texts)
  return found, ordered(set(found), numeric)


def ordered(texts: Iterable[str], numeric: bool) -> tuple[str, ...]:
  """Returns texts in their order, numbers by all of their digits."""
  return tuple(sorted(texts, key=decimal.Decimal) if numeric else sorted(texts))


def _kind(held: list[str], distinct: list[str], numbers: list[float | None], numeric: bool, name: str) -> str:
  """Returns the kind of a column; raises `UsageError` for one that its texts do not settle."""
  if not numeric:
    _check_texts(held, distinct, [number is not None for number in numbers], name)
    return BINARY if len(distinct) == 2 else CATEGORICAL
  found: list[float] = numbers  # type: ignore[assignment]
  whole = all(number == round(number) for number in found)
  if whole and max(map(abs, found)) >= _KEPT:
    raise errors.UsageError(
      f'the column {name!r} has whole numbers of more digits than are kept: leave it out (kind "ignore"), or say that '
      'it is categorical or continuous'
    )
  rows = whole and len(held) == len(found) > _FEW
  if rows and (found in (sorted(found), sorted(found, reverse=True)) or max(found) - min(found) == len(found) - 1):
    raise errors.UsageError(
      f'the column {name!r} seems to number the rows: leave it out (kind "ignore"), or say that it is continuous'
    )
  return BINARY if len(distinct) == 2 else ORDINAL if whole and len(distinct) <= _FEW else CONTINUOUS


def _check_texts(held: list[str], distinct: list[str], are_numbers: list[bool], name: str) -> None:
  """Raises `UsageError` for texts that may be no categories."""
  others = [text for text, number in zip(distinct, are_numbers, strict=True) if not number]
  if len(distinct) - len(others) > max(_FEW, len(others)) and others:
    raise errors.UsageError(
      f'the column {name!r} has {len(distinct) - len(others)} different numbers and {others[0]!r}: list it under '
      '"gaps" of the schema if it stands for none, or say that the column is categorical'
    )
  if len(distinct) > _FEW and others and all(map(_WRITTEN.fullmatch, others)):
    raise errors.UsageError(
      f'the column {name!r} has numbers that are written as {others[0]!r}: write them with a point and without other '
      'signs, or say that the column is categorical'
    )
  if len(distinct) > _MANY or len(distinct) > 0.9 * len(held) > 10:
    raise errors.UsageError(
      f'the column {name!r} has {len(distinct)} different texts in {len(held)} rows: leave it out (kind "ignore"), or '
      'say that it is categorical'
    )
  alike: dict[str, str] = {}
  for text in distinct:
    if (other := alike.setdefault(text.lower(), text)) != text:
      raise errors.UsageError(
        f'the column {name!r} has {other!r} and {text!r}: write them alike, or say that the column is categorical'
      )


def apart(field: Field, texts: Sequence[str]) -> str:
  """Returns the number that may stand for a gap, such as −999; '' for none.

  It is the least or the largest one, occurs several times, and is further from the next than all others are apart.
  """
  numbers = [number for text in texts if field.numeric and (number := number_of(text)) is not None]
  counts = collections.Counter(numbers)
  ordered = sorted(counts)
  for values in (ordered, ordered[::-1]):
    if len(values) > 3 and counts[values[0]] > 1 and abs(values[0] - values[1]) > abs(values[1] - values[-1]):
      return spelt(str(values[0]))
  return ''


def middle(texts: Sequence[str]) -> float:
  """Returns how far the middle half of a column's numbers reaches."""
  low, high = np.percentile([float(text) for text in texts if not is_gap(text)], [25, 75])
  return float(high - low)


def _numbers(field: Field, held: list[float], texts: list[str], by_level: Mapping[str, float] | None) -> Field:
  """Returns a numeric field with its mean, deviation, range, step and share of gaps."""
  fitted = [float(text) if by_level is None else by_level[text] for text in texts if not is_gap(text, field.levels)]
  # If these rows have one value alone, the deviation of all rows is taken.
  mean, std = next(((m, d) for m, d in map(_moments, (fitted, held)) if d > 0), (0.0, 1.0))
  step = 1.0 if by_level is None and all(value == round(value) for value in held) else 0.0
  share = (sum(is_gap(text, field.levels) for text in texts) + 0.5) / (len(texts) + 1)
  return field._replace(
    mean=mean,
    std=std,
    median=float(np.median(fitted or held)),
    low=min(held) if by_level is None else float(field.values.min()),
    high=max(held) if by_level is None else float(field.values.max()),
    step=step,
    shares=(float(share),) if field.gaps else (),
  )


def _moments(values: Sequence[float]) -> tuple[float, float]:
  """Returns the mean and the deviation; (0, 0) of nothing. Squares of large or small numbers do not leave the range.

  Sums are exact, so that all processors have the same bits.
  """
  if not values:
    return 0.0, 0.0
  unit = max(map(abs, values)) or 1.0
  scaled = [value / unit for value in values]
  mean = math.fsum(scaled) / len(scaled)
  squares = math.fsum((value - mean) * (value - mean) for value in scaled)
  return unit * mean, unit * math.sqrt(squares / len(scaled))


def _encoded(field: Field, texts: list[str]) -> np.ndarray:
  """Returns the entries of a column, [N, width]."""
  found = np.zeros((len(texts), field.width))
  places = {level: place for place, level in enumerate(field.levels)}
  values = field.values if field.kind == ORDINAL else None
  for row, text in enumerate(texts):
    if is_gap(text, field.levels):
      if not field.gaps:
        raise errors.UsageError(f'row {row} has no value in the column {field.name!r}, which has no gaps in the schema')
      found[row, -1] = 1
      continue
    if field.kind == CONTINUOUS:
      number = number_of(text)
      if number is None:
        raise errors.UsageError(f'row {row} has {text!r} in the column {field.name!r}, expected a number')
      found[row, 0] = (number - field.mean) / field.std
      continue
    text = text if text in places else level_of(spelt(text), field.levels)
    if text not in places:
      listed = ', '.join(field.levels[:8]) + (', …' if len(field.levels) > 8 else '')
      raise errors.UsageError(
        f'row {row} has {text!r} in the column {field.name!r}, which is none of the levels of the schema: {listed}'
      )
    if values is not None:
      found[row, 0] = (values[places[text]] - field.mean) / field.std
    else:
      found[row, places[text]] = 1
  if len(wrong := np.flatnonzero(np.abs(found[:, 0]) > _LARGEST)):
    raise errors.UsageError(
      f'row {wrong[0]} has {texts[wrong[0]]!r} in the column {field.name!r}, too far from its mean for float32'
    )
  return found


def _cell(field: Field, block: np.ndarray) -> np.ndarray:
  """Returns the cells of a column, [N], see `Schema.cells`."""
  known = np.isfinite(block).all(axis=1)
  block = np.where(known[:, np.newaxis], block, 0.0)
  if not field.numeric:
    return np.where(known, block.argmax(axis=1), np.nan)
  low, high = ((end - field.mean) / field.std for end in (field.low, field.high))
  found = np.clip(block[:, 0], low, high)
  if field.kind == ORDINAL:
    allowed = (field.values - field.mean) / field.std
    found = allowed[np.abs(found[:, np.newaxis] - allowed[np.newaxis]).argmin(axis=1)]
  elif field.step:
    found = (np.rint((found * field.std + field.mean) / field.step) * field.step - field.mean) / field.std
  if field.gaps:
    found = np.where(block[:, 1] > FLAGGED, np.inf, found)
  return np.where(known, found, np.nan)


def _reaching(field: Field, block: np.ndarray) -> Field:
  """Returns a column whose numbers may be those of a block [N, width]; others than continuous ones are as they are."""
  held = np.isfinite(block).all(axis=1) & (block[:, -1] <= FLAGGED if field.gaps else True)
  if field.kind != CONTINUOUS or not held.any():
    return field
  values = block[held, 0] * field.std + field.mean
  slack = _ROUNDED * field.std
  low, high, step = float(values.min()), float(values.max()), field.step
  if step and np.any(np.abs(values / step - np.rint(values / step)) * step > _BETWEEN * step + slack):
    step = 0.0
  return field._replace(
    low=low if low < field.low - slack else field.low, high=high if high > field.high + slack else field.high, step=step
  )


def _plain(field: Field, cell: float) -> float:
  """Returns a cell as `Field.written` takes it."""
  if not field.numeric:
    return cell
  return math.nan if math.isinf(cell) else cell * field.std + field.mean


def text_of(value: Any) -> str:
  """Returns a value as a text: whole numbers without a point, gaps as ''.

  Raises:
    UsageError: for bytes that are no UTF-8, and for lists and arrays.
  """
  if value is None:
    return ''
  if isinstance(value, bool | np.bool_):
    return str(bool(value)).lower()
  if isinstance(value, float | np.floating):
    if math.isnan(value):
      return ''
    whole = math.isinf(value) or float(value).is_integer()
    return _shortest(float(value if whole else str(value)))  # of a fraction the digits of its own type, as of float32
  if isinstance(value, list | tuple | dict) or getattr(value, 'ndim', False):
    raise errors.UsageError(f'a cell of the table is {errors.shown(value)}, expected a number or a text')
  try:
    return (value.decode() if isinstance(value, bytes) else str(value)).strip()
  except UnicodeDecodeError:
    raise errors.UsageError(f'a cell of the table is {errors.shown(value)}, expected text in UTF-8') from None


def _shortest(value: float) -> str:
  return str(int(value)) if abs(value) < _KEPT and value == round(value) else repr(value)


def spelt(text: str) -> str:
  """Returns a number as all equal ones are written, so that 1 and 1.0 are one level; another text as it is."""
  number = number_of(text)
  if number is None:
    return text
  return str(int(text)) if _LONG.fullmatch(text) else _shortest(number + 0.0)


def level_of(text: str, levels: Collection[str]) -> str:
  """Returns the level that a text is but for capital letters, as True is true; the text where not one alone is."""
  alike = [level for level in levels if level.lower() == text.lower()]
  return alike[0] if len(alike) == 1 else text


def is_gap(text: str, levels: Sequence[str] = ()) -> bool:
  """Returns whether a text stands for a missing value; one that is a level but for capital letters does not."""
  lower = text.lower()
  return lower in GAPS and not (lower and lower in map(str.lower, levels))


def _infinite(text: str) -> bool:
  try:
    return math.isinf(float(text.replace('_', ' ')))
  except ValueError:
    return False


def number_of(text: str) -> float | None:
  """Returns the finite number that a text is, None for none; 1_000 is none."""
  try:
    number = float(text.replace('_', ' '))
  except ValueError:
    return None
  return number if math.isfinite(number) else None
