"""Files of values that are separated by a sign: which sign it is, and rows that are as long as the first one."""

import csv
import io
import itertools
from typing import Any

from gradleak.core import errors


def rows(text: str, what: str, signs: str = ',;\t|') -> list[list[str]]:
  """Returns the rows of a text, without lines that are empty or blank, and their values without spaces around them.

  The sign is the one that divides the first two lines into the same number of values, the largest one. If there are
  several, it is the one that does so with all lines. If there is none, it is the one that divides the first line into
  most values.

  Args:
    text: content of a file.
    what: how messages call it.
    signs: that may separate values.

  Raises:
    UsageError: for quotation marks that do not end where a value ends, and where several signs fit equally.
  """

  def read(sign: str, most: int | None = None, **how: Any) -> list[list[str]]:
    lines = csv.reader(io.StringIO(text, newline=''), delimiter=sign, **how)
    found = ([cell.strip() for cell in line] for line in lines)
    return list(itertools.islice((line for line in found if line not in ([], [''])), most))

  def fitting(sign: str, most: int | None = 2) -> tuple[bool, int]:
    lengths = [len(line) for line in read(sign, most)] or [0]
    return len(set(lengths)) == 1 < lengths[0], lengths[0]

  try:
    found = {sign: fitting(sign) for sign in signs}
    best = [sign for sign in signs if found[sign] == max(found.values())]
    if len(best) > 1 and found[best[0]][0]:
      best = [sign for sign in best if fitting(sign, None)[0]] or best
      if len(best) > 1:
        listed = ' or '.join(map(repr, best))
        raise errors.UsageError(f'{what} may be separated by {listed}: put values with such a sign in quotation marks')
    return read(best[0], strict=True)
  except csv.Error as error:
    raise errors.UsageError(f'cannot read {what}: {error}') from error


def check_lengths(lines: list[list[str]], length: int, what: str, first: int = 0) -> None:
  """Raises `UsageError` for a row that has more or fewer values than `length`; rows are counted from `first` on."""
  for number, line in enumerate(lines, first):
    if len(line) != length:
      raise errors.UsageError(f'row {number} of {what} has {len(line)} values, expected {length}')
