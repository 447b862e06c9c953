"""Tables from files, embedded ones, and columns in memory: a schema, splits, and classes."""

import functools
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from gradleak.core import errors
from gradleak.data import separated, tables

_TEST = 0.3  # of the rows of one file are the split 'test'
_SPLITS = ('test', 'train')
_CLASSES = 100
_CLOSE = 0.01  # deviations, within which a value counts as exact
_FEW = 12  # fractions of which more are a number to predict, and no class
_KEYS = {'label': str, 'columns': dict, 'sensitive': list, 'names': list, 'gaps': list}  # of a file with a schema


class Table(NamedTuple):
  """A split of a table.

  Attributes:
    rows: float32 [N, D], encoded by the schema.
    labels: int32 [N].
    class_names: a name for each label.
    schema: its columns.
    notes: what was inferred, in sentences.
    label: the heading of the labels, or '' where there is none.
  """

  rows: np.ndarray
  labels: np.ndarray
  class_names: tuple[str, ...]
  schema: tables.Schema
  notes: tuple[str, ...] = ()
  label: str = ''


def breast_cancer(split: str) -> Table:
  """Returns scikit-learn's breast cancer (569 rows, 30 continuous columns: nuclei in images of a biopsy; 2 classes).

  Source: Wolberg, Street, Mangasarian, "Breast Cancer Wisconsin (Diagnostic)", UCI 1995.

  Raises:
    UsageError: for an unknown split.
  """
  import sklearn.datasets

  found = sklearn.datasets.load_breast_cancer()
  columns = dict(zip(map(str, found.feature_names), found.data.T, strict=True))
  classes = np.asarray([str(found.target_names[one]) for one in found.target])
  return parted(columns, classes, split, 'breast_cancer')


def diabetes(split: str) -> Table:
  """Returns scikit-learn's diabetes: 442 rows, nine numbers and the sex; the class is whether it progresses fast.

  The published target is a number, the progression after a year. Here it is one of two classes, below its median of
  140.5 or above. Age, sex, body mass and blood pressure are marked as sensitive.

  Source: Efron, Hastie, Johnstone, Tibshirani, "Least Angle Regression", Annals of Statistics 2004.

  Raises:
    UsageError: for an unknown split.
  """
  import sklearn.datasets

  found = sklearn.datasets.load_diabetes(scaled=False)
  names = ('age', 'sex', 'body mass index', 'blood pressure', 'total cholesterol', 'LDL', 'HDL', 'cholesterol / HDL',
           'log triglycerides', 'blood sugar')  # fmt: skip
  columns: dict[str, Any] = dict(zip(names, found.data.T, strict=True))
  columns['sex'] = np.where(found.data[:, 1] == 1, 'one', 'other')  # the source does not say which is which
  classes = np.where(found.target > np.median(found.target), 'fast', 'slow')
  return parted(columns, classes, split, 'diabetes', sensitive=names[:4])


EMBEDDED = {'breast_cancer': breast_cancer, 'diabetes': diabetes}


def read(path: str, split: str, schema: str | Mapping | None = None) -> Table:
  """Returns a split of a CSV file with a line of headings.

  'train' are seven tenths of the rows, in an order that is drawn once, and 'test' the others. Means, deviations and
  shares are those of 'train'.

  Args:
    path: of the file; values are separated by commas, semicolons, tabs or bars.
    split: 'test' or 'train'.
    schema: any of 'label' (the column of the class; by default the last one), 'columns' ({name: kind, 'ignore' or
      {'kind', 'levels'}}), 'sensitive' (a list of columns), 'names' (headings, where the file has no line of them), and
      'gaps' (texts that stand for a missing value, beside `tables.GAPS`); or a JSON file of this, or its text.

  Raises:
    UsageError: for a file that cannot be read, headings that are numbers, rows of differing lengths, an unknown label
      column, and as `infer` and `parted` do.
  """
  file, known = errors.check_path('the table', path, home=True), known_of(schema)
  stamp = (file.stat().st_mtime_ns, file.stat().st_size) if file.exists() else None
  return _read(path, split, json.dumps(known), stamp)


@functools.lru_cache(4)
def _read(path: str, split: str, known_: str, stamp: tuple | None) -> Table:
  """Returns what `read` does. Programs ask for the same file several times; `stamp` tells whether it changed."""
  del stamp
  known = json.loads(known_)
  columns = columns_of(path, known)
  chosen = known.get('label', list(columns)[-1])
  errors.check_choice(f'column for the label of {path}', chosen, columns)
  classes = np.asarray(columns.pop(chosen))
  made = parted(columns, classes, split, path, known.get('columns'), known.get('sensitive', ()))
  gaps = set(map(str, known.get('gaps', ())))
  for field in made.schema.fields:
    if both := gaps.intersection(field.levels):
      raise errors.UsageError(f'{both.pop()!r} is a gap of the schema and a level of the column {field.name!r}')
  told = f'the label is {chosen!r}' + ('' if 'label' in known else ', the last column: --label names another')
  notes = (told, *(field.in_words() for field in made.schema.fields), *made.notes)
  return made._replace(notes=notes, label=chosen)


def columns_of(path: str, known: Mapping[str, Any], least: int = 2) -> dict[str, list[str]]:
  """Returns name -> texts of the columns of a CSV file, '' for a gap; `known` is what `known_of` returns of a schema.

  Raises:
    UsageError: as `read` does, and for fewer rows than `least`.
  """
  header, lines = _lines(path, known.get('names'), least)
  gaps = set(map(str, known.get('gaps', ())))
  return {name: ['' if line[i] in gaps else line[i] for line in lines] for i, name in enumerate(header)}


def parted(
  columns: Mapping[str, Any],
  classes: np.ndarray,
  split: str,
  name: str,
  given: Mapping[str, Any] | None = None,
  sensitive: Sequence[str] = (),
) -> Table:
  """Returns a split of columns: 'test' or 'train', drawn once for all.

  Args:
    columns: name -> values [N].
    classes: the class of each row, texts [N].
    split: 'test' or 'train'.
    name: what messages call the table.
    given, sensitive: as `tables.infer` takes them.

  Raises:
    UsageError: for an unknown split, a class that is missing, one class alone in 'train', and as `tables.infer` does.
  """
  errors.check_choice(f'split of {name}', split, _SPLITS)
  columns = tables.named(columns)
  tables.check_lengths(columns)
  order = np.random.default_rng(0).permutation(len(classes))
  held = max(1, round(_TEST * len(classes)))
  chosen = {'test': order[:held], 'train': order[held:]}
  if not len(chosen['train']):
    raise errors.UsageError(f'the table {name} has {len(classes)} row: two or more are needed')
  schema = tables.infer(columns, given, [int(place) for place in chosen['train']], sensitive)
  labels, names = classes_of(classes)
  if len(set(labels[chosen['train']].tolist())) < 2:
    raise errors.UsageError(f'the split train of {name} has rows of one class alone: there is nothing to learn')
  of = chosen[split]
  part = {key: [values[place] for place in of] for key, values in columns.items()}
  rows, kept = schema.encode(part), labels[of]
  for array in (rows, kept):
    array.setflags(write=False)  # they may be shared
  return Table(rows, kept, names, schema, tuple(_remarks(columns, schema)))


def _remarks(columns: Mapping[str, Any], schema: tables.Schema) -> Iterator[str]:
  """Yields what may be meant otherwise than it is read."""
  for field in schema.fields:
    texts = [tables.text_of(value) for value in columns[field.name]]
    if field.step == 1 and len(set(texts)) == len(texts):
      yield f'{field.name}: all values differ: leave it out (kind "ignore") if it names the rows'
    if alone := tables.apart(field, texts):
      yield f'{field.name}: {alone} is far from all other values: list it under "gaps" of the schema if it is none'
    elif field.kind == tables.CONTINUOUS and (span := tables.middle(texts)) < _CLOSE * field.std:
      yield (
        f'{field.name}: half of the values lie within {span:.3g} of each other, and their deviation is '
        f'{field.std:.3g}: any guess among them counts as right. Outliers decide the scale'
      )


def classes_of(classes: np.ndarray) -> tuple[np.ndarray, tuple[str, ...]]:
  """Returns (labels, int32 [N]; the name of each), of texts or numbers in their order.

  Raises:
    UsageError: for a row without a class, infinity, fewer than two classes, or more than 100; for more than 12 numbers
      that are not whole.
  """
  texts, names = tables.classes([tables.text_of(one) for one in classes])
  distinct, numeric = set(names), tables.are_numbers(names)
  if not 2 <= len(distinct) <= _CLASSES:
    raise errors.UsageError(
      f'the column of the label has {len(distinct)} different values, expected 2 to {_CLASSES} classes'
    )
  if numeric and len(distinct) > _FEW and any('.' in text for text in distinct):
    raise errors.UsageError(
      f'the column of the label has {len(distinct)} different numbers that are not whole: name the column of a class, '
      'or divide the numbers into classes'
    )
  places = {name: place for place, name in enumerate(names)}
  return np.asarray([places[text] for text in texts], np.int32), names


def _lines(path: str, names: Sequence[str] | None, least: int) -> tuple[list[str], list[list[str]]]:
  """Returns the headings and the rows of a CSV file."""
  file = errors.check_path('the table', path, home=True)
  try:
    text = pathlib.Path(file).read_text('utf-8-sig')
  except (OSError, UnicodeDecodeError) as error:
    raise errors.UsageError(f'cannot read the table {path}: {error}') from error
  lines = separated.rows(text, f'the table {path}')
  if not lines:
    raise errors.UsageError(f'the table {path} is empty')
  header = [str(one) or tables.UNNAMED for one in names or lines.pop(0)]
  if len(set(header)) < len(header) or len(header) < 2:
    raise errors.UsageError(
      f'the table {path} has the headings {", ".join(header)}: expected two or more, all different'
    )
  if names and lines[0] == header:
    raise errors.UsageError(f'the table {path} begins with the "names" of the schema: leave them out')
  if not names and sum(tables.number_of(one) is not None for one in header) >= len(header) / 2:
    raise errors.UsageError(
      f'the first line of the table {path} is {", ".join(header)}, which are no headings: give "names" in a schema'
    )
  separated.check_lengths(lines, len(header), f'the table {path}')
  if len(lines) < least:
    raise errors.UsageError(f'the table {path} has {len(lines)} rows: {least} or more are needed')
  return header, lines


def known_of(schema: str | Mapping | None) -> dict[str, Any]:
  """Returns what a schema says of columns, see `read`; raises `UsageError` for other keys or types."""
  found, name = schema, 'the schema'
  if schema is None:
    return {}
  if isinstance(schema, str) and not schema.lstrip().startswith('{'):
    name, file = f'the schema {schema}', errors.check_path('the schema', schema, home=True)
    try:
      found = pathlib.Path(file).read_text('utf-8')
    except (OSError, ValueError) as error:
      raise errors.UsageError(f'cannot read {name}: {error}') from error
  if isinstance(found, str):
    try:
      found = json.loads(found)
    except ValueError as error:
      raise errors.UsageError(f'cannot read {name}: {error}') from error
  found = dict(errors.check_json(name, errors.check_instance(name, found, Mapping, f'any of {", ".join(_KEYS)}')))
  for key, value in found.items():
    errors.check_choice(f'key of {name}', key, _KEYS)
    errors.check_instance(f'{key} of {name}', value, _KEYS[key], f'a {_KEYS[key].__name__}')
  return found
