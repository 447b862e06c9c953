"""Tables and texts of TensorFlow Datasets, written as the files that `table:PATH` and `text:PATH` read."""

import csv
import io
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from gradleak.core import errors
from gradleak.core.storage import write_atomically
from gradleak.data import tfds
from gradleak.data.text import FILE

_WIDEST = 256  # entries of a feature that become columns


def write(name: str, data_dir: str | pathlib.Path | None = None) -> str | None:
  """Writes a prepared TFDS dataset as CSV, and returns the name by which `load` reads it.

  A dataset with one text as its input becomes `text:PATH`: a file, or a folder with a file for each split. Another one
  of numbers, classes and texts becomes `table:PATH`: one file with the rows of all splits, whose last column is the
  label. Splits without labels (−1) are left out.

  Args:
    name, data_dir: as `tfds.read` takes them.

  Returns:
    The name, such as 'text:data/imdb_reviews'; None for a dataset of images, which needs no such file.

  Raises:
    UsageError: for a dataset of other features, texts that are not UTF-8, and as `tfds.read` does.
  """
  from tensorflow_datasets import features as kinds

  with tfds.quiet():
    found = tfds.builder(name, data_dir)
    features = dict(sorted(found.info.features.items()))  # files keep no order of them
  if any(isinstance(feature, kinds.Image) for feature in features.values()):
    return None
  label = _label(found, features, name)
  words = _words(found, features, label)
  folder, stem = pathlib.Path(tfds.root(data_dir)), name.partition(':')[0].replace('/', '-')
  file = folder / f'{stem}.csv'
  if words is None:
    columns = [column for key in features if key != label for column in _columns(key, features[key], name)]
    if label is None or not columns:
      raise errors.UsageError(f'the dataset {name} has no label among its features {", ".join(features)}')
    headings = [*(heading for heading, _, _ in columns), label]
    _write(file, headings, (row for split in found.info.splits for row in _rows(found, name, split, columns, label)))
    return f'table:{file}'
  parts = {split: list(_rows(found, name, split, [(words, words, None)], label)) for split in found.info.splits}
  parts = {split: rows for split, rows in parts.items() if rows}
  for split, rows in parts.items():
    if len(parts) > 1:
      file = folder / f'{stem}.{FILE}' / f'{split}.csv'
      file.parent.mkdir(exist_ok=True)
    _write(file, ['text', *([] if label is None else ['label'])], rows)
  return f'{FILE}:{file if len(parts) == 1 else file.parent}'


def _label(found: Any, features: Mapping[str, Any], name: str) -> str | None:
  """Returns the feature that is the label: that of supervised learning, or the only class; None for none."""
  from tensorflow_datasets import features as kinds

  pair = found.info.supervised_keys
  if isinstance(pair, tuple) and len(pair) == 2 and pair[1] in features:
    return pair[1]
  classes = [key for key, feature in features.items() if isinstance(feature, kinds.ClassLabel)]
  if len(classes) > 1:
    raise errors.UsageError(
      f'the dataset {name} has several classes and none of them is its label: {", ".join(classes)}'
    )
  return classes[0] if classes else None


def _words(found: Any, features: Mapping[str, Any], label: str | None) -> str | None:
  """Returns the feature with the text of a dataset of texts, None for a table."""
  from tensorflow_datasets import features as kinds

  pair = found.info.supervised_keys
  if isinstance(pair, tuple) and isinstance(pair[0], str) and isinstance(features.get(pair[0]), kinds.Text):
    return pair[0]
  texts = [key for key, feature in features.items() if isinstance(feature, kinds.Text) and key != label]
  return texts[0] if pair is None and len(texts) == 1 else None


def _columns(key: str, feature: Any, name: str) -> list[tuple[str, str, int | None]]:
  """Returns (heading, feature, place in it) of each column that a feature becomes."""
  shape = getattr(feature, 'shape', None)
  if shape == ():
    return [(key, key, None)]
  if isinstance(shape, tuple) and len(shape) == 1 and shape[0] and shape[0] <= _WIDEST:
    return [(f'{key} {place}', key, place) for place in range(shape[0])]
  raise errors.UsageError(
    f'the feature {key!r} of {name} is {type(feature).__name__} of shape {shape}, expected a number, a class or a text'
  )


def _rows(
  found: Any, name: str, split: str, columns: Sequence[tuple[str, str, int | None]], label: str | None
) -> Iterator[list[str]]:
  """Yields the values of a split's records, the label last; a split of unknown labels has none."""
  features = found.info.features
  for record in tfds.records(found, name, split):
    values = [_text(features[key], record[key] if place is None else record[key][place]) for _, key, place in columns]
    if label is None:
      yield values
    elif target := _text(features[label], record[label]):
      yield [*values, target]


def _text(feature: Any, value: Any) -> str:
  """Returns a value as a cell; a class has its name, and a gap is empty."""
  if hasattr(feature, 'int2str'):
    return feature.int2str(int(value)) if value >= 0 else ''
  if isinstance(value, bytes):
    try:
      return value.decode()
    except UnicodeDecodeError as error:
      raise errors.UsageError(f'a text is not UTF-8: {error.reason} at byte {error.start}') from error
  return '' if isinstance(value, float | np.floating) and np.isnan(value) else str(value)


def _write(file: pathlib.Path, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
  content = io.StringIO()
  writer = csv.writer(content, lineterminator='\n')
  writer.writerow(headings)
  writer.writerows(rows)
  write_atomically(file, content.getvalue())
