"""Rows and texts in a file of a user's own, encoded as those of a dataset."""

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from gradleak.core import errors
from gradleak.data import table_files, tables, text, tokenisers

SUFFIXES = ('.csv', '.tsv', '.txt')


def rows(path: pathlib.Path, name: str, schema: tables.Schema, label: str | None) -> tuple[np.ndarray, list[str]]:
  """Returns (rows float32 [N, D], the class of each) of a CSV file with headings; its order of columns is free.

  Args:
    path: of the file.
    name: of the dataset, for messages.
    schema: of the dataset's columns.
    label: the column of the class; by default the one that the schema lacks, of several the last one of the file.

  Raises:
    UsageError: for a file that cannot be read, a column that is missing, no column of the class, and as
      `Schema.encode` does.
  """
  header, lines = table_files.lines(str(path), least=1)
  known = {field.name for field in schema.fields}
  others = [one for one in header if one not in known]
  if label is None and (not others or (len(others) > 1 and header[-1] in known)):
    raise errors.UsageError(
      f'{path} has {", ".join(others) or "no column"} beside the columns of {name}: name the one of the class as label'
    )
  chosen = label or (header[-1] if header[-1] in others else others[0])
  columns = {one: [line[place] for line in lines] for place, one in enumerate(header)}
  errors.check_choice(f'column for the label of {path}', chosen, columns)
  return schema.encode(columns), columns[chosen]


def texts(path: pathlib.Path, tokeniser: Any, length: int) -> tuple[np.ndarray, list[str], tuple[str, ...]]:
  """Returns (tokens int32 [N, length], the class of each or '', notes) of a file as `text.read` takes it.

  Raises:
    UsageError: for a file that cannot be read, and one without a text.
  """
  pairs = text.pairs(path)
  if not pairs:
    raise errors.UsageError(f'{path} has no text')
  made = tokenisers.restored(tokeniser)
  held = [one for _, one in pairs]
  ids = made.batch(held, length)
  return ids, [label for label, _ in pairs], text.remarks(made, held, ids, length)


def places(path: pathlib.Path, found: Sequence[str], name: str, class_names: Sequence[str]) -> np.ndarray:
  """Returns the number of each class in those of a dataset, int32 [N].

  Raises:
    UsageError: for a class that the dataset does not have; names the first row.
  """
  of, numeric = {one: place for place, one in enumerate(class_names)}, tables.are_numbers(class_names)
  spelt = [tables.spelt(one) if numeric and tables.number_of(one) is not None else tables.text_of(one) for one in found]
  numbers = [of.get(one, -1) for one in spelt]
  if -1 in numbers:
    row = numbers.index(-1)
    raise errors.UsageError(
      f'row {row} of {path} has the class {found[row]!r}, and those of {name} are {errors.some(class_names)}'
    )
  return np.asarray(numbers, np.int32)
