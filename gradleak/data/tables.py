"""Tables: what their columns hold, and the rows of numbers that networks take.

A row is encoded as float32 [D]. A continuous or ordinal column is one number, standardised by the rows that a schema
was inferred from. A categorical or binary column is a one-hot block. Gaps are a further level of such a block, and for
numbers a further column of 0 and 1.
"""

import collections
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from gradleak.core import errors

CONTINUOUS, ORDINAL, CATEGORICAL, BINARY = KINDS = ('continuous', 'ordinal', 'categorical', 'binary')
MISSING = 'missing'  # how a gap is called among the levels
GAPS = frozenset({'', '?', 'na', 'n/a', 'nan', 'none', 'null', MISSING})  # texts that stand for one, in lower case
_FEW = 12  # whole numbers with at most so many values are ordinal
_MANY = 100  # levels beyond which a text is taken for a name or a number of its own
_ON = 0.5


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
    if self.kind == CONTINUOUS:
      return f'{value:.0f}' if self.step == 1 else f'{value:.4g}'
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
      {name: list(value) if isinstance(value, tuple) else value for name, value in field._asdict().items()}
      for field in self.fields
    ]
    return {'columns': plain, 'sensitive': list(self.sensitive)}

  def encode(self, columns: Mapping[str, Sequence[Any]]) -> np.ndarray:
    """Returns rows, float32 [N, D].

    Args:
      columns: name -> values, numbers or texts; others than those of the schema are not read.

    Raises:
      UsageError: for a column that is missing, a level that is not in the schema, a text in place of a number, and a
        gap where there are none; names the first row.
    """
    for field in self.fields:
      if field.name not in columns:
        raise errors.UsageError(f'the column {field.name!r} is missing: there are {", ".join(map(str, columns))}')
    blocks = [_encoded(field, [text_of(value) for value in columns[field.name]]) for field in self.fields]
    return np.concatenate(blocks, axis=1).astype(np.float32)

  @property
  def usual(self) -> np.ndarray:
    """The encoded row of medians and of the commonest levels, float32 [D]: an answer without any upload."""
    found = np.zeros(self.width, np.float32)
    for field, place in zip(self.fields, self.places, strict=True):
      if field.numeric:
        found[place.start] = (field.median - field.mean) / field.std
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

  def cells(self, rows: Any) -> np.ndarray:
    """Returns the cells that encoded rows [N, D] stand for, float64 [N, F]; a search may have moved their entries.

    A number is standardised; it is moved to the nearest one that the column may have. A category is the place of its
    level, the largest entry of its block, and gaps stand behind all levels. A gap among numbers is infinite. What is
    not finite has no answer and is NaN.
    """
    rows = np.asarray(rows, np.float64)
    found = [_cell(field, rows[:, place]) for field, place in zip(self.fields, self.places, strict=True)]
    return np.stack(found, axis=1) if found else np.zeros((len(rows), 0))

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
  continuous, and any column with two values is binary.

  Args:
    columns: name -> values, numbers or texts; None, NaN, '' and '?' are gaps.
    given: name -> what is known better: a kind, 'ignore', or a dict with 'kind', and 'levels' in their order.
    fitted: the rows whose means, deviations and shares are taken; levels and ranges are those of all. None for all.
    sensitive: names of columns that are worse to lose than others.

  Raises:
    UsageError: for a column without a value or with one value only, texts that are nearly all different, and for what
      is given of a column that is not there.
  """
  given = {} if given is None else given
  for name in [*given, *sensitive]:
    errors.check_choice('column', name, list(columns))
  fields = []
  for name, values in columns.items():
    known = given.get(name, {})
    known = {'kind': known} if isinstance(known, str) else dict(known)
    errors.check_choice(f'kind of the column {name!r}', known.get('kind', CONTINUOUS), [*KINDS, 'ignore'])
    if known.get('kind') != 'ignore':
      fields.append(_inferred(str(name), [text_of(value) for value in values], known, fitted))
  if not fields:
    raise errors.UsageError('the table has no column but its label')
  kept = {field.name for field in fields}
  return Schema(tuple(fields), tuple(name for name in sensitive if name in kept))


def _inferred(name: str, texts: list[str], known: Mapping[str, Any], fitted: Sequence[int] | None) -> Field:
  held = [text for text in texts if not is_gap(text)]
  distinct = list(dict.fromkeys(held))
  if not distinct:
    raise errors.UsageError(f'the column {name!r} has no value at all, only gaps: leave it out (kind "ignore")')
  if len(distinct) == 1:
    raise errors.UsageError(f'the column {name!r} has one value only, {distinct[0]!r}: leave it out (kind "ignore")')
  numbers = [number_of(text) for text in distinct]
  numeric = all(number is not None for number in numbers)
  kind = known.get('kind') or _kind(numbers if numeric else None, len(distinct), len(held), name)
  gaps = len(held) < len(texts)
  of = texts if fitted is None else [texts[place] for place in fitted]
  if kind == CONTINUOUS:
    if not numeric:
      wrong = distinct[numbers.index(None)]
      raise errors.UsageError(f'the column {name!r} is to be continuous and has the value {wrong!r}')
    return _numbers(Field(name, kind, gaps=gaps), [float(text) for text in held], of, None)
  levels = tuple(str(level) for level in known.get('levels', ())) or _levels(distinct, numeric)
  if beyond := [level for level in distinct if level not in levels]:
    raise errors.UsageError(f'the column {name!r} has {beyond[0]!r}, which is none of its levels: {", ".join(levels)}')
  if kind == BINARY and len(levels) != 2:
    raise errors.UsageError(
      f'the column {name!r} is to be binary and has {len(levels)} levels: {", ".join(levels[:8])}'
    )
  if kind == ORDINAL:
    field = Field(name, kind, levels, gaps=gaps)
    by_level = dict(zip(levels, field.values.tolist(), strict=True))
    return _numbers(field, [by_level[text] for text in held], of, by_level)
  seen = collections.Counter(of)
  counts = np.asarray([seen[level] for level in levels] + [sum(map(is_gap, of))] * gaps, float)
  shares = (counts + 0.5) / (counts + 0.5).sum()  # none is 0, not even of a level that the fitted rows lack
  return Field(name, kind, levels, tuple(float(share) for share in shares), gaps=gaps)


def _kind(numbers: list[float | None] | None, distinct: int, held: int, name: str) -> str:
  if distinct == 2:
    return BINARY
  if numbers is not None:
    whole = all(number == round(number) for number in numbers)  # type: ignore[arg-type]
    return ORDINAL if whole and distinct <= _FEW else CONTINUOUS
  if distinct > _MANY or distinct > 0.9 * held > 10:
    raise errors.UsageError(
      f'the column {name!r} has {distinct} different texts in {held} rows: leave it out (kind "ignore"), or say that '
      'it is categorical'
    )
  return CATEGORICAL


def _levels(distinct: list[str], numeric: bool) -> tuple[str, ...]:
  return tuple(sorted(distinct, key=float) if numeric else sorted(distinct))


def _numbers(field: Field, held: list[float], texts: list[str], by_level: Mapping[str, float] | None) -> Field:
  """Returns a numeric field with its mean, deviation, range, step and share of gaps."""
  fitted = [float(text) if by_level is None else by_level[text] for text in texts if not is_gap(text)]
  mean, std = (float(np.mean(fitted)), float(np.std(fitted))) if fitted else (0.0, 0.0)
  step = 1.0 if by_level is None and all(value == round(value) for value in held) else 0.0
  share = (sum(map(is_gap, texts)) + 0.5) / (len(texts) + 1)
  return field._replace(
    mean=mean,
    std=std if std > 0 else 1.0,
    median=float(np.median(fitted)) if fitted else 0.0,
    low=min(held) if by_level is None else float(field.values.min()),
    high=max(held) if by_level is None else float(field.values.max()),
    step=step,
    shares=(float(share),) if field.gaps else (),
  )


def _encoded(field: Field, texts: list[str]) -> np.ndarray:
  """Returns the entries of a column, [N, width]."""
  found = np.zeros((len(texts), field.width))
  places = {level: place for place, level in enumerate(field.levels)}
  values = field.values if field.kind == ORDINAL else None
  for row, text in enumerate(texts):
    if is_gap(text):
      if not field.gaps:
        raise errors.UsageError(f'row {row} has no value in the column {field.name!r}, which has no gaps in the schema')
      found[row, -1] = 1
    elif field.kind == CONTINUOUS:
      number = number_of(text)
      if number is None:
        raise errors.UsageError(f'row {row} has {text!r} in the column {field.name!r}, expected a number')
      found[row, 0] = (number - field.mean) / field.std
    elif text not in places:
      listed = ', '.join(field.levels[:8]) + (', …' if len(field.levels) > 8 else '')
      raise errors.UsageError(
        f'row {row} has {text!r} in the column {field.name!r}, which is none of the levels of the schema: {listed}'
      )
    elif values is not None:
      found[row, 0] = (values[places[text]] - field.mean) / field.std
    else:
      found[row, places[text]] = 1
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
    found = np.where(block[:, 1] > _ON, np.inf, found)
  return np.where(known, found, np.nan)


def _plain(field: Field, cell: float) -> float:
  """Returns a cell as `Field.written` takes it."""
  if not field.numeric:
    return cell
  return math.nan if math.isinf(cell) else cell * field.std + field.mean


def text_of(value: Any) -> str:
  """Returns a value as a text: whole numbers without a point, gaps as ''."""
  if value is None:
    return ''
  if isinstance(value, bool | np.bool_):
    return str(bool(value)).lower()
  if isinstance(value, float | np.floating):
    return '' if math.isnan(value) else _shortest(float(value))
  return str(value).strip()


def _shortest(value: float) -> str:
  return str(int(value)) if value == round(value) and abs(value) < 1e15 else repr(value)


@functools.lru_cache(4096)
def is_gap(text: str) -> bool:
  """Returns whether a text stands for a missing value."""
  return text.lower() in GAPS


def number_of(text: str) -> float | None:
  """Returns the finite number that a text is, None for none."""
  try:
    number = float(text)
  except ValueError:
    return None
  return number if math.isfinite(number) else None
