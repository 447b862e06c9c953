"""Reads image-classification datasets of TensorFlow Datasets from array_record files, without TensorFlow."""

import contextlib
import difflib
import logging
import pathlib
import re
import textwrap
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np

from gradleak.core import errors
from gradleak.data import images

DEFAULT_DATA_DIR = '~/tensorflow_datasets'
FILE_FORMAT = 'array_record'
_EMBEDDED = ('faces', 'digits', 'breast_cancer', 'diabetes', 'notes')  # which a misspelt name may mean

_ASKED = re.compile(r'^Failed to construct dataset .*?}": ')


def read(name: str, split: str, data_dir: str | pathlib.Path | None = None) -> images.Source:
  """Returns the `Source` of a prepared TFDS dataset, in its stored order.

  Args:
    name: in TFDS's notation: `mnist`, `emnist/letters`, `mnist:3.0.1`.
    split: in TFDS's notation: `test`, `train[:1000]`, `train+test`.
    data_dir: the folder of prepared datasets (None: `~/tensorflow_datasets`).

  Raises:
    UsageError: for an unknown dataset, configuration, version or split, a dataset that is not prepared in `data_dir`
      (says how to prepare it, and what is there), damaged files, and a dataset without images and class labels.
  """
  with quiet():
    found = builder(name, data_dir)
    image_key, label_key, class_names = _keys(found, name)
    held = _open(found, name, split)

  def examples(count: int) -> Iterator[tuple[np.ndarray, int, str]]:
    for index, record in enumerate(_each(held, found, name, count)):
      yield record[image_key], int(record[label_key]), f'image {index}'

  return images.Source(class_names, len(held), examples)


def records(found: Any, name: str, split: str) -> Iterator[dict[str, Any]]:
  """Yields the records of a split of a prepared dataset, feature -> value.

  Args:
    found: its `builder`.
    name, split: as for `read`.

  Raises:
    UsageError: as `read` does, but for the features.
  """
  with quiet():
    held = _open(found, name, split)
  yield from _each(held, found, name, len(held))


def _each(held: Any, found: Any, name: str, count: int) -> Iterator[dict[str, Any]]:
  for index in range(count):
    try:
      with quiet():
        record = held[index]
    except Exception as error:  # array_record raises several types for damaged files
      raise errors.UsageError(f'cannot read {name} in {found.data_dir}: {one_line(error)}') from error
    yield record


def builder(name: str, data_dir: str | pathlib.Path | None = None) -> Any:
  """Returns the TFDS builder of a dataset by name, prepared or not.

  Args:
    name, data_dir: as for `read`.

  Raises:
    UsageError: for a name, configuration or version unknown to TFDS and not in `data_dir`, and for a dataset in
      `data_dir` in another file format than array_record.
  """
  import tensorflow_datasets

  folder = root(data_dir)
  try:
    return tensorflow_datasets.builder(name, data_dir=folder, file_format=FILE_FORMAT)
  except tensorflow_datasets.core.DatasetNotFoundError as error:
    raise _unknown_dataset(name, data_dir) from error
  except Exception as error:  # TFDS raises several types, with the reason in the text
    if 'File format is already set' in str(error):
      raise errors.UsageError(
        f'{name} in {folder} is not in the {FILE_FORMAT} format that is read here; delete it and prepare it again: '
        f'{_preparation(name, data_dir)}'
      ) from error
    if 'Parsing builder name' in str(error):
      raise _unknown_dataset(name, data_dir) from error
    raise errors.UsageError(f'TFDS cannot open the dataset {name!r}: {one_line(error)}') from error


def prepared(data_dir: str | pathlib.Path | None = None) -> list[str]:
  """Returns the sorted names (name or name/configuration) of the datasets prepared in `data_dir`."""
  folder = pathlib.Path(root(data_dir))
  infos = [*folder.glob('*/*/dataset_info.json'), *folder.glob('*/*/*/dataset_info.json')]
  return sorted({info.parent.parent.relative_to(folder).as_posix() for info in infos})


def root(data_dir: str | pathlib.Path | None) -> str:
  """Returns the folder of prepared datasets."""
  return str(errors.check_path('data_dir', DEFAULT_DATA_DIR if data_dir is None else data_dir, home=True))


def one_line(error: Exception) -> str:
  """Returns the message of TFDS's `error` in one line of at most 300 characters, without the repeated request."""
  text = ' '.join(str(error).split()) or type(error).__name__
  return textwrap.shorten(_ASKED.sub('', text), 300, placeholder=' …')


@contextlib.contextmanager
def quiet() -> Iterator[None]:
  """Suppresses TFDS's log messages and warnings (install OpenCV, a folder without metadata)."""
  logger = logging.getLogger('absl')
  level = logger.level
  logger.setLevel(logging.ERROR)
  try:
    with warnings.catch_warnings():
      warnings.simplefilter('ignore')
      yield
  finally:
    logger.setLevel(level)


def _open(found: Any, name: str, split: str) -> Any:
  """Returns the random-access records of a split."""
  try:
    return found.as_data_source(split=split)
  except Exception as error:  # not checked before opening: TFDS's mock data need no files
    if not found.is_prepared():
      data_dir = found.data_dir_root
      raise errors.UsageError(
        f'the dataset {name} is not prepared in {data_dir} (there: {_contents(data_dir)}); prepare it: '
        f'{_preparation(name, data_dir)}'
      ) from error
    if 'Unknown split' in str(error):
      raise errors.unknown(f'split of {name}', split, found.info.splits) from error
    raise errors.UsageError(
      f'cannot read the split {split!r} of {name} in {found.data_dir} (splits there: {", ".join(found.info.splits)}): '
      f'{one_line(error)}'
    ) from error


def _keys(found: Any, name: str) -> tuple[str, str, tuple[str, ...]]:
  """Returns the names of the image feature and of the label feature, and the classes' names."""
  from tensorflow_datasets import features as kinds

  features = found.info.features
  pair = found.info.supervised_keys
  keys = pair if isinstance(pair, tuple) and len(pair) == 2 else features.keys()
  keys = [key for key in keys if isinstance(key, str)]
  image_keys = [key for key in keys if isinstance(features[key], kinds.Image)]
  label_keys = [key for key in keys if isinstance(features[key], kinds.ClassLabel)]
  if len(image_keys) != 1 or len(label_keys) != 1:
    raise errors.UsageError(
      f'the dataset {name} is not for image classification: expected one image and one class label, its features are '
      f'{", ".join(sorted(features.keys()))}; tables and texts are read from files that launch/prepare_data.py writes'
    )
  return image_keys[0], label_keys[0], tuple(features[label_keys[0]].names)


def _unknown_dataset(name: str, data_dir: str | pathlib.Path | None) -> errors.UsageError:
  import tensorflow_datasets

  known = tensorflow_datasets.list_builders(with_community_datasets=False)
  near = difflib.get_close_matches(str(name), [*_EMBEDDED, *prepared(data_dir), *known], n=1)
  near = [f'folder:{name}'] if name and pathlib.Path(str(name)).is_dir() else near
  hint = f'; did you mean {near[0]!r}?' if near else ''
  return errors.UsageError(
    f'unknown dataset {name!r}{hint} (valid: faces, digits, folder:PATH, or an image-classification dataset of TFDS; '
    f'tables: breast_cancer, diabetes, table:PATH; texts: notes, text:PATH; in {root(data_dir)}: {_contents(data_dir)})'
  )


def _contents(data_dir: str | pathlib.Path | None) -> str:
  if not pathlib.Path(root(data_dir)).is_dir():
    return 'no such folder'
  return ', '.join(prepared(data_dir)) or 'nothing'


def _preparation(name: str, data_dir: str | pathlib.Path | None) -> str:
  return f'python launch/prepare_data.py --dataset={name} --data_dir={root(data_dir)}'
