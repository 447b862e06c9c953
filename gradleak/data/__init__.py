"""Sources of private samples: embedded data, folders of images, tables, texts, TensorFlow Datasets.

>>> faces = load('faces', limit=8)
>>> faces.images.shape, faces.class_names
((8, 25, 25, 1), ('non-face', 'face'))
"""

import pathlib
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np

from gradleak.core import errors
from gradleak.core.settings import Count, Range, ranged
from gradleak.data import embedded, folder, images, own, table_files, tables, text, tfds
from gradleak.data.tables import Field, Schema

__all__ = [
  'EMBEDDED',
  'Candidates',
  'Dataset',
  'Field',
  'Schema',
  'check_classes',
  'check_images',
  'check_labels',
  'gallery',
  'images',
  'is_table',
  'is_tfds',
  'load',
  'pair',
  'read_like',
  'shuffled',
  'table',
  'tables',
  'text',
  'tfds',
  'two',
  'validate',
]

EMBEDDED: dict[str, Callable[[str], images.Source]] = {'faces': embedded.faces, 'digits': embedded.digits}
_WORDS = 'words'  # the tokeniser of texts by default
_IGNORED = -100  # ignore_index of PyTorch's losses, where it is not set


class Dataset(NamedTuple):
  """Samples of one split, in a fixed order.

  Attributes:
    name: as given to `load`.
    split: as given to `load`.
    samples: float32 [N, H, W, C], pixels in [0, 1]; of a table its rows, float32 [N, D], see `Schema`; of texts their
      tokens, int32 [N, length].
    targets: the class of each, int32 [N], in [0, num_classes).
    class_names: a name for each class, also for classes without a sample in this split.
    notes: sentences on what a user may not expect of these images: files that were left out, a small range.
    settings: what tells what a sample is, plain JSON, see `gradleak.modalities.of_config`; {} for images.
  """

  name: str
  split: str
  samples: np.ndarray
  targets: np.ndarray
  class_names: tuple[str, ...]
  notes: tuple[str, ...] = ()
  settings: Mapping[str, Any] = types.MappingProxyType({})

  @property
  def num_classes(self) -> int:
    """The number of classes of the dataset."""
    return len(self.class_names)

  @property
  def known(self) -> dict[str, Any]:
    """Settings of networks that these samples tell: of texts their vocabulary, its padding and their length."""
    of = self.settings.get('tokeniser')
    return {} if of is None else {'vocabulary': of['size'], 'padding': of['pad'], 'length': self.samples.shape[1]}

  @property
  def columns(self) -> tuple[int, ...]:
    """How many entries of a row each column of a table takes; () for other samples."""
    known = self.settings.get('schema')
    return () if known is None else tuple(field.width for field in tables.from_json(known).fields)

  @property
  def scaling(self) -> tuple[np.ndarray, np.ndarray] | None:
    """Mean and deviation [D] of `models.standardised`, where a table's network takes numbers otherwise; else None."""
    known = self.settings.get('schema')
    return None if known is None else tables.from_json(known).scaling


@ranged
def load(
  name: str,
  split: str = 'test',
  *,
  data_dir: str | pathlib.Path | None = None,
  limit: Annotated[int | None, Range(1)] = None,
  image_size: Annotated[int | None, Range(1, 4096)] = None,
  channels: int | None = None,
  largest_pixel: Annotated[float | None, Range(1e-6, finite=True)] = None,
  schema: str | Mapping | None = None,
  tokeniser: str = _WORDS,
  length: Annotated[int | None, Range(1, 65_536)] = None,
) -> Dataset:
  """Returns a split of a dataset as a `Dataset`.

  Args:
    name: `faces`, `digits`, `folder:PATH` (images at PATH/split/label/), `breast_cancer`, `diabetes`, `table:PATH` (a
      CSV file with headings), `notes` (synthetic patient notes), `text:PATH` (a file .txt, .tsv or .csv, or a folder
      with one for each split), or a TFDS image-classification dataset such as `mnist`, `emnist/letters` or
      `cifar10:3.0.2`, prepared by `launch/prepare_data.py`.
    split: `test`, `train`, or another split of the dataset; TFDS datasets also take slices (`train[:10%]`).
    data_dir: the folder of TFDS datasets (None: `~/tensorflow_datasets`); not used for others.
    limit: the number of images to return, the first ones; only these are decoded (None: all).
    image_size: the side in pixels to resize to, with anti-aliasing, after cropping images to their central square
      (None: unchanged).
    channels: 1 for grey (BT.601 luma), 3 for RGB (grey is repeated), None for unchanged.
    largest_pixel: the stored value that becomes 1, such as 4095 for 12 bits in files of 16 bits (None: the largest of
      the stored type).
    schema: of `table:PATH`: what is known of its columns, such as {'label': 'ill'}, or a JSON file of it, see
      `table_files.read`.
    tokeniser: of texts: `words`, `bytes`, `bpe:SIZE` (trained on the split train), or a file tokenizer.json.
    length: tokens of a text that are kept (None: 24 words, 128 bytes, 32 tokens of a file). Shorter texts are padded.

  Raises:
    UsageError: for an unknown dataset or split, an option of samples of another kind, a limit beyond the data,
      unreadable files, images of differing sizes or channels if none are given, and pixels or labels out of range; see
      also the submodules.
  """
  for what, word in (('name', name), ('split', split)):
    errors.check_instance(f'the {what} of the dataset', word, str, 'a text')
  if channels is not None and (not isinstance(channels, int) or isinstance(channels, bool) or channels not in (1, 3)):
    shown = errors.shown(channels)
    raise errors.UsageError(f'channels is {shown}, expected 1 (grey), 3 (RGB) or none (as the images are)')
  _check_options(
    name,
    images={'image_size': image_size, 'channels': channels, 'largest_pixel': largest_pixel},
    texts={'tokeniser': None if tokeniser == _WORDS else tokeniser, 'length': length},
  )
  if is_table(name):
    return _first(name, split, _table(name, split, schema), limit)
  if schema is not None:
    raise errors.UsageError(f'a label and a schema are of a table in a file, as table:PATH, and {name} is none')
  if text.knows(name):
    return _texts(name, split, limit, tokeniser, length)
  try:
    source = _open(name, split, data_dir)
    if not source.size:
      raise errors.UsageError(f'the split {split!r} of {name} has no images')
    errors.check_limit(limit, source.size, 'images', split, name)
    pixels, labels = _read(source, source.size if limit is None else limit, image_size, channels, largest_pixel)
  except OSError as error:
    raise errors.UsageError(f'cannot read the dataset {name}: {error}') from error
  try:
    validate(pixels, labels, len(source.class_names))
  except errors.UsageError as error:
    raise errors.UsageError(f'the dataset {name}, split {split!r}: {error}') from error
  small = images.span(pixels)
  notes = (*source.notes, *([] if small is None else [images.span_in_words(*small)]))
  return Dataset(name, split, pixels, labels, source.class_names, notes)


def shuffled(dataset: Dataset, count: int, noun: str = 'samples') -> Dataset:
  """Returns `count` samples of a dataset in a random order, the same at each call.

  Args:
    dataset: as `load` returns it.
    count: of samples, at most all.
    noun: what messages call them.

  Raises:
    SizeError: for more samples than there are.
  """
  errors.check_limit(count, len(dataset.samples), noun, dataset.split, dataset.name)
  drawn = np.random.default_rng(0).permutation(len(dataset.samples))[:count]
  return dataset._replace(samples=dataset.samples[drawn], targets=dataset.targets[drawn])


def _check_options(name: str, **options: Mapping[str, Any]) -> None:
  """Raises `UsageError` for an option of other samples than those of a dataset; kind -> option -> value, or None."""
  kind = 'rows' if is_table(name) else 'texts' if text.knows(name) else 'images'
  for of, given in options.items():
    for option, value in given.items():
      if value is not None and of != kind:
        raise errors.UsageError(f'{option} is of {of}, and {name} has {kind}: leave it out')


def is_table(name: str) -> bool:
  """Returns whether a dataset's rows are those of a table."""
  return name in table_files.EMBEDDED or name.startswith('table:')


def is_tfds(name: str) -> bool:
  """Returns whether a dataset is one of TensorFlow Datasets, which are read from `data_dir`."""
  return not (name in EMBEDDED or name.startswith('folder:') or is_table(name) or text.knows(name))


def table(
  columns: Any,
  labels: Any,
  *,
  names: Sequence[str] | None = None,
  split: str = 'test',
  name: str = 'custom',
  given: Mapping[str, Any] | None = None,
  sensitive: Sequence[str] = (),
) -> Dataset:
  """Returns a split of a table in memory: seven tenths of its rows are 'train', drawn once, and the others 'test'.

  Args:
    columns: a pandas frame, a dict of columns, or an array [N, F] of numbers or texts. None, NaN and '' are gaps.
    labels: the class of each row, texts or numbers [N]; or the name of a column, which is then not one of the rows'.
    names: headings of an array's columns; by default 'column 0' and so on.
    split: 'test' or 'train'.
    name: how results call it.
    given: name of a column -> what is known better than what is inferred, see `tables.infer`.
    sensitive: names of columns that are worse to lose than others.

  Raises:
    UsageError: for columns of differing lengths or equal names, labels [N, 1], and as `tables.infer` does.
  """
  found, label = _columns(columns, names), ''
  if isinstance(labels, str):
    errors.check_choice('column for the label', labels, found)
    label, labels = labels, found.pop(labels)
  classes = np.asarray(labels, object)  # long whole numbers keep their digits beside a gap
  if classes.ndim != 1:
    advice = column(classes.shape, classes.size)
    raise errors.UsageError(f'labels are of shape {classes.shape}, expected one for each row{advice}')
  lengths = {key: len(values) for key, values in found.items()}
  if wrong := [key for key, length in lengths.items() if length != len(classes)]:
    raise errors.UsageError(
      f'the column {wrong[0]!r} has {lengths[wrong[0]]} values, expected {len(classes)}, as labels'
    )
  made = table_files.parted(found, classes, split, name, given, sensitive)
  return _first(name, split, made._replace(label=label), None)


def read_like(path: Any, dataset: Dataset, schema: str | Mapping | None = None) -> Dataset:
  """Returns the rows or texts in a file, encoded as those of a dataset.

  Args:
    path: of a file .csv with headings, for a table; of a file .csv, .tsv or .txt as `text:PATH` has it, for texts.
    dataset: a split of `load` or `table`, whose columns or tokens, and classes, these samples have.
    schema: as given to `load`; its label, names and gaps count. By default the label has the heading of the
      dataset's, or is the column that the dataset lacks.

  Raises:
    UsageError: for a dataset of images, a file that cannot be read, a column that is missing, and a value, level or
      class that the dataset does not have. For texts whose tokeniser is a file, or more than 5,000 words, that this
      process has not loaded.
  """
  file, settings = errors.check_path('the path', path, home=True), dataset.settings
  notes: tuple[str, ...] = ()
  if 'schema' in settings:
    columns, known = tables.from_json(settings['schema']), table_files.known_of(schema)
    samples, classes = own.rows(file, dataset.name, columns, known, settings.get('label'))
  elif 'tokeniser' in settings:
    samples, classes, notes = own.texts(file, settings['tokeniser'], dataset.samples.shape[1])
  else:
    raise errors.UsageError(f'{file} is of rows or texts, and {dataset.name} has images')
  targets = own.places(file, classes, dataset.name, dataset.class_names)
  return Dataset(str(path), 'all', samples, targets, dataset.class_names, notes, settings)


def _columns(columns: Any, names: Sequence[str] | None) -> dict[str, Any]:
  """Returns name -> values of a frame, a dict or an array."""
  if isinstance(columns, Mapping) or hasattr(columns, 'columns'):
    if names is not None:
      raise errors.UsageError('names are of an array, and these columns have names of their own: leave them out')
    return {key: list(values) for key, values in tables.named(columns).items()}
  values = np.asarray(columns)
  if values.ndim != 2 or not values.size:
    raise errors.UsageError(f'the table has the shape {values.shape}, expected [N, columns], a frame or a dict')
  headings = [f'column {place}' for place in range(values.shape[1])] if names is None else list(map(str, names))
  if len(headings) != values.shape[1]:
    raise errors.UsageError(f'there are {len(headings)} names for {values.shape[1]} columns')
  if len(set(headings)) < len(headings):
    raise errors.UsageError(f'the names are {", ".join(headings)}: expected different names')
  return dict(zip(headings, values.T, strict=True))


def _table(name: str, split: str, schema: str | Mapping | None = None) -> table_files.Table:
  """Returns a split of a table by name."""
  if name not in table_files.EMBEDDED:
    return table_files.read(name.partition(':')[2], split, schema)
  if schema is not None:
    raise errors.UsageError(f'{name} has a label and a schema of its own: leave out label and schema')
  return table_files.EMBEDDED[name](split)


def _first(name: str, split: str, made: table_files.Table, limit: int | None) -> Dataset:
  """Returns the first rows of a table as a `Dataset`."""
  errors.check_limit(limit, len(made.rows), 'rows', split, name)
  settings = {'modality': 'table', 'schema': made.schema.to_json(), **({'label': made.label} if made.label else {})}
  return Dataset(name, split, made.rows[:limit], made.labels[:limit], made.class_names, made.notes, settings)


class Candidates(NamedTuple):
  """Images among which private ones are to be found; the private ones may be among them.

  Attributes:
    samples: float32 [G, H, W, C] in [0, 1].
    targets: the class of each, int32 [G].
    by_class: whether each class is a kind of its own: then the candidates of an image are those of its class.
    class_names: a name for each label.
  """

  samples: np.ndarray
  targets: np.ndarray
  by_class: bool = False
  class_names: tuple[str, ...] = ()

  def named(self, label: int) -> str:
    """Returns the name of a class, its number where it has none."""
    return self.class_names[label] if label < len(self.class_names) else str(label)


@ranged
def gallery(
  name: str, split: str = 'test', *, most: Count = 1001, by_class: bool | None = None, **options: Any
) -> Candidates:
  """Returns the candidates for `gradleak.scenario(gallery=…)`: the first images of a split, private ones among them.

  They are the same whichever of them are attacked. Those of the embedded data go on with the other split: of each face
  there are 99 other faces, which is all that there are.

  Args:
    name, split: as `load` takes them.
    most: the number of images to return, or as many as there are. Of more than 1,001 of one kind the others are unused.
    by_class: whether each class is a kind of its own; None for what is known of the data: of `faces` it is.
    **options: of `load`: data_dir, image_size, channels, largest_pixel, schema.

  Raises:
    UsageError: as `load` does.
  """
  if by_class is not None:
    errors.check_instance('by_class', by_class, bool, 'True or False')
  if text.knows(name):
    found = load(name, split, limit=min(most, text.read(name, split).size), **options)
    return Candidates(found.samples, found.targets, bool(by_class), found.class_names)
  splits = [split, *({'test', 'train'} - {split})] if name in EMBEDDED or is_table(name) else [split]
  parts: list[Dataset] = []
  for one in splits:
    missing = most - sum(len(part.samples) for part in parts)
    if missing:
      size = _size(name, one, **options)
      parts.append(load(name, one, limit=max(1, min(size, missing)), **options))
  known = _by_class(name, split, options.get('data_dir')) if by_class is None else by_class
  images, labels = (np.concatenate([getattr(part, each) for part in parts]) for each in ('samples', 'targets'))
  return Candidates(images, labels, known, parts[0].class_names)


def _size(name: str, split: str, data_dir: Any = None, schema: Any = None, **options: Any) -> int:
  """Returns the number of samples of a split."""
  del options
  return len(_table(name, split, schema).rows) if is_table(name) else _open(name, split, data_dir).size


def _by_class(name: str, split: str, data_dir: Any) -> bool:
  return not is_table(name) and _open(name, split, data_dir).by_class


def validate(images: Any, labels: Any, num_classes: int | None = None) -> None:
  """Checks a user's images and labels.

  Args:
    images: floating [N, H, W, C], N ≥ 1, pixels finite and in [0, 1].
    labels: integer [N], in [0, num_classes).
    num_classes: the number of classes (None: labels need only be ≥ 0).

  Raises:
    UsageError: for anything else; names the value and the first image that has it.
  """
  check_images(images)
  check_labels(labels, len(np.asarray(images)), num_classes, ('image', 'images'))


def check_images(images: Any) -> None:
  """Checks images: floating [N, H, W, C], N ≥ 1, pixels finite and in [0, 1]; raises `UsageError` for others."""
  images = errors.host_array('images', images)
  if images.ndim != 4 or not images.size:
    raise errors.UsageError(f'images have the shape {images.shape}, expected [N, H, W, C], none of them 0')
  if not np.issubdtype(images.dtype, np.floating):
    advice = '; divide by 255 and convert to float32' if images.dtype == np.uint8 else ''
    raise errors.UsageError(f'images are {images.dtype.name}, expected floats in [0, 1]{advice}')
  wrong: np.ndarray = np.argwhere(~((images >= 0) & (images <= 1)))  # true for NaN too
  if len(wrong):
    value = images[tuple(wrong[0])]
    raise errors.UsageError(f'image {wrong[0][0]} has a pixel of {value:g}, expected finite values in [0, 1]')


def check_labels(
  labels: Any, count: int, num_classes: int | None = None, noun: tuple[str, str] = ('sample', 'samples')
) -> None:
  """Checks labels: integers [count], in [0, num_classes).

  Args:
    labels: of the samples.
    count: number of samples.
    num_classes: the number of classes (None: labels need only be ≥ 0).
    noun: what one sample is called, singular and plural.

  Raises:
    UsageError: for anything else; names the first sample that has another label.
  """
  labels = errors.host_array('labels', labels)
  if labels.shape != (count,) or not np.issubdtype(labels.dtype, np.integer):
    raise errors.UsageError(
      f'labels are {labels.dtype.name} of shape {labels.shape}, expected one integer for each of {count} {noun[1]}'
      f'{column(labels.shape, count)}'
    )
  check_classes(labels, num_classes, noun[0])


def column(shape: Sequence[int], count: int) -> str:
  """Returns, for messages, what to do about labels [N, 1] where N are expected; '' for another shape."""
  return ': the axis of length 1 is one too many, give labels[:, 0]' if tuple(shape) == (count, 1) else ''


@ranged
def check_classes(
  labels: Any, num_classes: Annotated[int | None, Range(1, 2**31)] = None, noun: str = 'sample'
) -> None:
  """Checks integer labels [N, …]; raises `UsageError` for one out of [0, num_classes).

  Args:
    labels: of the samples.
    num_classes: the number of classes (None: labels need only be ≥ 0).
    noun: what one sample is called.
  """
  labels, highest = errors.host_array('labels', labels), np.inf if num_classes is None else num_classes - 1
  wrong: np.ndarray = np.argwhere((labels < 0) | (labels > highest))
  if len(wrong):
    expected = 'at least 0' if num_classes is None else f'in [0, {highest}]'
    where = '' if labels.ndim == 1 else f' at {tuple(map(int, wrong[0][1:]))}'
    label = labels[tuple(wrong[0])]
    hint = ": PyTorch's loss leaves it out (ignore_index), so leave out the sample" if label == _IGNORED else ''
    raise errors.UsageError(f'{noun} {wrong[0][0]} has the label {label}{where}, expected {expected}{hint}')


def two(name: str, given: Any) -> tuple[Any, Any]:
  """Returns `given`; raises `UsageError`, with its name, for anything but a pair (samples, targets)."""
  if not isinstance(given, tuple | list) or len(given) != 2:
    raise errors.UsageError(f'{name} is {errors.shown(given)}, expected (samples, targets)')
  return given[0], given[1]


def pair(
  name: str,
  given: Any,
  num_classes: int | None = None,
  sample_shape: tuple[int, ...] | None = None,
  check: Callable[[Any], None] | None = None,
  check_targets: Callable[[Any, int], Any] | None = None,
  noun: tuple[str, str] = ('image', 'images'),
) -> tuple[np.ndarray, np.ndarray]:
  """Returns a user's (samples, targets) as NumPy arrays.

  Args:
    name: what messages call them, such as 'public'.
    given: a pair that `validate` accepts.
    num_classes: as `validate` takes it.
    sample_shape: (H, W, C) that the images must have, or None.
    check: of samples that are no images; by default `check_images`.
    check_targets: (labels, number of samples), of targets that are no classes; by default `check_labels`.
    noun: what one sample is called, singular and plural.

  Raises:
    UsageError: for anything else.
  """
  images, labels = two(name, given)
  try:
    (check or check_images)(images)
    if check_targets is not None:
      check_targets(labels, len(images))
    else:
      check_labels(labels, len(images), num_classes, noun)
  except errors.UsageError as error:
    raise errors.UsageError(f'{name}: {error}') from error
  images, labels = np.asarray(images), np.asarray(labels)
  if sample_shape is not None and images.shape[1:] != tuple(sample_shape):
    raise errors.UsageError(f'{name}: {noun[1]} are {images.shape[1:]}, expected {tuple(sample_shape)}')
  return images, labels


def _texts(name: str, split: str, limit: int | None, tokeniser: str, length: int | None) -> Dataset:
  """Returns a split of texts; arguments as of `load`."""
  errors.check_instance('tokeniser', tokeniser, str, 'a text')
  ids, found, made, told = text.tokens(name, split, limit, tokeniser, length)
  settings = {'modality': text.MODALITY, 'tokeniser': made.described()}
  return Dataset(name, split, ids, found.labels[: len(ids)], found.class_names, (*found.notes, *told), settings)


def _open(name: str, split: str, data_dir: str | pathlib.Path | None) -> images.Source:
  """Returns the `images.Source` of a dataset by name."""
  if name in EMBEDDED:
    return EMBEDDED[name](split)
  kind, _, path = str(name).partition(':')
  if kind == 'folder':
    return folder.read(path, split)
  if kind.startswith(('/', '.', '~')):
    raise errors.UsageError(f'no dataset is named {name!r}; for a folder of images write folder:{name}')
  return tfds.read(str(name), split, data_dir)


def _read(
  source: images.Source, count: int, image_size: int | None, channels: int | None, largest_pixel: float | None
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the first `count` images of a source, [N, H, W, C] float32, and their labels, [N] int32."""
  pixels: Any = None
  first: Any = None
  labels = np.empty(count, np.int32)
  for index, (image, label, where) in enumerate(source.examples(count)):
    image = images.convert(image, where, image_size, channels, largest_pixel)
    if pixels is None:
      pixels, first = np.empty((count, *image.shape), np.float32), where
    _check_alike(image.shape, where, pixels.shape[1:], first)
    pixels[index], labels[index] = image, label
  return pixels, labels


def _check_alike(shape: tuple[int, ...], where: str, expected: tuple[int, ...], first: str) -> None:
  for key, mine, others in (('image_size', shape[:2], expected[:2]), ('channels', shape[2:], expected[2:])):
    if mine != others:
      own, theirs = ('×'.join(map(str, lengths)) for lengths in (mine, others))
      unit = 'pixels' if key == 'image_size' else 'channels'
      raise errors.UsageError(f'{first} has {theirs} {unit}, {where} {own}: pass {key} (--{key}) to make them alike')
