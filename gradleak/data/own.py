"""Rows and texts in a file of a user's own, encoded as those of a dataset."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gradleak.core import errors
from gradleak.data import table_files, tables, text, tokenisers


def rows(
  path: pathlib.Path, name: str, schema: tables.Schema, known: Mapping[str, Any], label: str | None = None
) -> tuple[np.ndarray, list[str]]:
  """Returns (rows float32 [N, D], the class of each) of a CSV file; its order of columns is free.

  Args:
    path: of the file.
    name: of the dataset, for messages.
    schema: of the dataset's columns.
    known: the file's 'label', 'names' and 'gaps', see `table_files.read`.
    label: the heading of the dataset's labels. Where the file lacks it, the label is by default the column that the
      schema lacks, of several the last one of the file.

  Raises:
    UsageError: for a file that cannot be read, a column that is missing, no column of the class, and as
      `Schema.encode` does.
  """
  columns = table_files.columns_of(str(path), known, least=1)
  known = {'label': label, **known} if label in columns else known
  own = {field.name for field in schema.fields}
  others, last = [one for one in columns if one not in own], list(columns)[-1]
  if 'label' not in known and (not others or (len(others) > 1 and last in own)):
    raise errors.UsageError(
      f'{path} has {", ".join(others) or "no column"} beside the columns of {name}: name the one of the class as label'
    )
  chosen = known['label'] if 'label' in known else others[-1]
  errors.check_choice(f'column for the label of {path}', chosen, columns)
  return schema.encode(columns), columns[chosen]


def texts(path: pathlib.Path, tokeniser: Any, length: int) -> tuple[np.ndarray, list[str], tuple[str, ...]]:
  """Returns (tokens int32 [N, length], the class of each or '', notes) of a file as `text.read` takes it.

  Raises:
    UsageError: for a file that cannot be read, one without a text, and a vocabulary that this process does not hold.
  """
  pairs = text.pairs(path)
  if not pairs:
    raise errors.UsageError(f'{path} has no text')
  made = tokenisers.restored(tokeniser)
  if made.digest != tokeniser['digest']:
    raise errors.UsageError(
      f'the vocabulary of {made.size} tokens is not in this process, and results keep its digest alone: load the data '
      'set here'
    )
  held = [one for _, one in pairs]
  ids = made.batch(held, length)
  return ids, [label for label, _ in pairs], text.remarks(made, held, ids, length)


def places(path: pathlib.Path, found: Sequence[str], name: str, class_names: Sequence[str]) -> np.ndarray:
  """Returns the number of each class in those of a dataset, int32 [N].

  Raises:
    UsageError: for a class that the dataset does not have; names the first row.
  """
  numeric = tables.are_numbers(class_names)
  of = {tables.spelt(one) if numeric else one: place for place, one in enumerate(class_names)}
  spelt = [tables.spelt(one) if numeric and tables.number_of(one) is not None else tables.text_of(one) for one in found]
  numbers = [of.get(one if one in of else tables.level_of(one, of), -1) for one in spelt]
  if -1 in numbers:
    row = numbers.index(-1)
    raise errors.UsageError(
      f'row {row} of {path} has the class {found[row]!r}, and those of {name} are {errors.some(class_names)}'
    )
  return np.asarray(numbers, np.int32)
