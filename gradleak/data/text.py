"""Sources of texts: the synthetic notes, and a user's own files of lines or of columns."""

import collections
import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from gradleak.core import errors
from gradleak.core.statistics import percent
from gradleak.data import notes, separated, tables, tokenisers
from gradleak.data.tokenisers import Tokeniser

FILE = 'text'  # text:PATH
MODALITY = 'text'  # as results call what these samples are
_COLUMNS = ('text', 'sentence', 'note', 'review', 'content')  # headings of what is read, in this order
_LABELS = ('label', 'class', 'category')
SUFFIXES = ('.txt', '.tsv', '.csv')
_LARGEST = 1 << 30  # bytes of a file
_TEST = 5  # of a file alone every fifth text is in the split test
# How many tokens of a text are kept, if nobody says it.
_LENGTHS = {'bytes': 128, 'words': 24, 'file': 32}


class Texts(NamedTuple):
  """One split.

  Attributes:
    class_names: a name for each label.
    labels: of the texts, int32 [N].
    size: N.
    read: number -> the text.
    notes: sentences on what a user may not expect of it.
  """

  class_names: tuple[str, ...]
  labels: np.ndarray
  size: int
  read: Callable[[int], str]
  notes: tuple[str, ...] = ()

  def first(self, count: int) -> list[str]:
    """Returns the first texts."""
    return [self.read(index) for index in range(count)]


def knows(name: str) -> bool:
  """Returns whether a dataset of this name is of texts."""
  return name == 'notes' or name.partition(':')[0] == FILE


def read(name: str, split: str) -> Texts:
  """Returns a split of `notes` or of `text:PATH`.

  PATH is a file, or a folder with a file for each split, such as train.tsv. Every fifth text of a single file is in
  the split test, and all others are in train. Files .txt have a text in each line. Files .tsv and .csv have columns
  with the headings 'text' or 'sentence', and 'label'. Without headings they are a label and a text. Values of a .csv
  may also be separated by semicolons, tabs or bars. Classes are the labels of all files that have some.

  Raises:
    UsageError: for a split that is not there, two files of one split, a split without labels beside others that have
      some, and a file that cannot be read so.
  """
  if name == 'notes':
    errors.check_choice('split of notes', split, notes.SPLITS)
    size = notes.SPLITS[split]
    labels = np.arange(size, dtype=np.int32) % len(notes.CLASS_NAMES)
    return Texts(notes.CLASS_NAMES, labels, size, lambda index: notes.note(split, index)[0])
  held, known = _held(name, split)
  labels_of = sorted(known - {''}) or ['']
  found, class_names = tables.classes(labels_of) if labels_of[0] else (labels_of, ('',))
  places = {label: class_names.index(name) for label, name in zip(labels_of, found, strict=True)}
  if held[0][0] not in places:
    raise errors.UsageError(f'the split {split!r} of {name} has no labels, and other files there have: give it some')
  labels = np.asarray([places[label] for label, _ in held], np.int32)
  return Texts(class_names, labels, len(held), lambda index: held[index][1])


def _held(name: str, split: str) -> tuple[tuple[tuple[str, str], ...], set[str]]:
  """Returns ((label, text) of each text of a split of `text:PATH`, labels of all its files), '' for no label."""
  path = errors.check_path(f'the path of {FILE}:PATH', name.partition(':')[2], home=True)
  if path.is_dir():
    found = [file for file in sorted(path.iterdir()) if file.suffix.lower() in SUFFIXES]
    files = {file.stem: file for file in found}
    if twice := [file.name for file in found if file != files[file.stem]]:
      raise errors.UsageError(f'{name} has {twice[0]} and {files[pathlib.Path(twice[0]).stem].name}: keep one of them')
    errors.check_choice(f'split of {name}', split, files or ['(it has none: expected train.txt, .tsv or .csv)'])
    held, known = pairs(files[split]), {label for file in found for label, _ in pairs(file)}
  elif path.is_file():
    errors.check_choice(f'split of {name}', split, ('test', 'train'))
    whole = pairs(path)
    known = {label for label, _ in whole}
    held = tuple(one for place, one in enumerate(whole) if (place % _TEST == _TEST - 1) == (split == 'test'))
  else:
    raise errors.UsageError(f'no file {str(path)!r}; {FILE}:PATH is a file .txt, .tsv or .csv, or a folder of them')
  if not held:
    raise errors.UsageError(f'the split {split!r} of {name} has no text')
  return held, known


def pairs(path: pathlib.Path) -> tuple[tuple[str, str], ...]:
  """Returns (label, text) of each text in a file; the label is '' where there are none.

  Raises:
    UsageError: for a file that cannot be read, or has another form, see `read`.
  """
  if path.suffix.lower() not in SUFFIXES:
    raise errors.UsageError(f'{path} has the suffix {path.suffix!r}, expected one of {", ".join(SUFFIXES)}')
  try:
    return _read(path, _stamp(path))
  except OSError as error:
    raise errors.UsageError(f'cannot read the texts in {path}: {error.strerror}') from error


def _stamp(path: pathlib.Path) -> tuple[int, int]:
  """Returns what tells whether a file changed."""
  return path.stat().st_mtime_ns, path.stat().st_size


@functools.lru_cache(maxsize=8)
def _read(path: pathlib.Path, stamp: tuple[int, int]) -> tuple[tuple[str, str], ...]:
  """Returns what `pairs` does."""
  if stamp[1] > _LARGEST:
    raise errors.UsageError(f'{path} has more than {_LARGEST >> 30} GiB: give a part of it')
  try:
    content = path.read_text('utf-8-sig')
  except UnicodeDecodeError as error:
    raise errors.UsageError(f'{path} is no text in UTF-8: {error.reason} at byte {error.start}') from error
  lines = [line for line in content.split('\n') if line.strip()]
  kind = path.suffix.lower()
  if kind == '.txt':
    return tuple(('', line.strip()) for line in lines)
  rows = [line.split('\t') for line in lines] if kind == '.tsv' else separated.rows(content, str(path))
  rows = [[cell.strip() for cell in row] for row in rows if any(cell.strip() for cell in row)]
  return _labelled(rows, str(path)) if rows else ()


def _labelled(rows: list[list[str]], name: str) -> tuple[tuple[str, str], ...]:
  """Returns (label, text) of the rows of a file with columns; texts that are empty are left out."""
  heading = [cell.lower() for cell in rows[0]]
  text, label = (next((heading.index(one) for one in of if one in heading), None) for of in (_COLUMNS, _LABELS))
  separated.check_lengths(rows, len(heading), name, first=1)
  if text is not None:
    if twice := [heading[one] for one in (text, label) if one is not None and heading.count(heading[one]) > 1]:
      raise errors.UsageError(f'{name} has several columns {twice[0]!r}: keep that name for one of them')
    if label is None and len(heading) > 1:
      others = ', '.join(one for one in rows[0] if one.lower() != heading[text])
      raise errors.UsageError(
        f'{name} has no column {" or ".join(_LABELS)} beside its texts: give one of {others} such a name, or keep the '
        f'column {heading[text]} alone'
      )
    rows = rows[1:]
  elif len(heading) > 2:
    raise errors.UsageError(
      f'{name} has {len(heading)} columns and none is called {" or ".join(_COLUMNS)}: name the one of the texts so'
    )
  elif len(heading) == 1:
    raise errors.UsageError(
      f'{name} begins with {errors.shown(rows[0][0])}, which may be a heading or a text: put {_COLUMNS[0]} above it, '
      'or name the file .txt, where each line is a text'
    )
  else:
    label, text = 0, 1
    _check_first(rows, name)
  rows = [row for row in rows if row[text]]
  if label is not None and (gaps := [row[label] for row in rows if tables.is_gap(row[label])]):
    raise errors.UsageError(
      f'{name} has texts without a label, {gaps[0]!r} in place of one: give each one (a class of that name another '
      'name), or leave out the column'
    )
  if label is not None:
    tables.check_finite([row[label] for row in rows], f'as its label in {name}')
  return tuple(('' if label is None else row[label], row[text]) for row in rows)


def _check_first(rows: list[list[str]], name: str) -> None:
  """Raises `UsageError` for rows without headings whose first column seems to hold no labels, or a heading."""
  counts = collections.Counter(row[0] for row in rows)
  advice = f'give headings: {_LABELS[0]} and {_COLUMNS[0]}'
  if len(counts) > max(2, len(rows) // 2):
    raise errors.UsageError(f'{name} has {len(counts)} different labels in {len(rows)} rows of two columns: {advice}')
  if len(rows) > 4 and counts[rows[0][0]] == 1:
    raise errors.UsageError(f'{name} begins with {", ".join(rows[0])}, a label that no other row has: {advice}')


def tokeniser(name: str, given: str) -> Tokeniser:
  """Returns the tokeniser of a dataset, see `_tokeniser`."""
  path = pathlib.Path(name.partition(':')[2]).expanduser()
  made_of = [path, *sorted(path.iterdir())] if path.is_dir() else [path]
  files = [file for file in (*made_of, pathlib.Path(given)) if name != 'notes' and file.is_file()]
  return _tokeniser(name, given, tuple(map(_stamp, files)))


@functools.lru_cache(maxsize=8)
def _tokeniser(name: str, given: str, stamps: tuple) -> Tokeniser:
  """Returns the tokeniser of a dataset.

  Args:
    name: of the dataset.
    given: 'bytes'; 'words', of the split train; 'bpe' or 'bpe:2000', trained on it; or a file tokenizer.json.
    stamps: of the files that it is made of.

  Raises:
    UsageError: for anything else.
  """
  del stamps
  kind, _, rest = given.partition(':')
  if given == 'bytes':
    return tokenisers.in_bytes()
  if given == 'words' and name == 'notes':
    return tokenisers.in_words(notes.vocabulary())
  if given == 'words' or kind == 'bpe':
    if name == 'notes':
      whole = read(name, 'train')
      texts = whole.first(whole.size)
    else:
      texts = [text for _, text in _held(name, 'train')[0]]
    if given == 'words':
      return tokenisers.in_words(texts)
    if rest and not rest.isdecimal():
      raise errors.UsageError(f'the tokeniser is {given!r}, expected a size behind bpe, as in bpe:2000')
    return tokenisers.trained(texts, int(rest or 2000))
  return tokenisers.from_file(given)


def tokens(
  name: str, split: str, limit: int | None, given: str, length: int | None
) -> tuple[np.ndarray, Texts, Tokeniser, tuple[str, ...]]:
  """Returns (tokens int32 [N, length] of the first texts of a split, the split, the tokeniser, further notes).

  Args:
    name, split: as `read` takes them.
    limit: N; None for all.
    given: the tokeniser, see `tokeniser`.
    length: tokens of a text that are kept; None for 24 words, 128 bytes or 32 tokens of a file.

  Raises:
    UsageError: for a limit beyond the data, a text without tokens, and what `read` and `tokeniser` raise for.
  """
  found = read(name, split)
  errors.check_limit(limit, found.size, 'texts', split, name)
  made = tokeniser(name, given)
  count, length = found.size if limit is None else limit, length or _LENGTHS[made.kind]
  texts = found.first(count)
  ids = made.batch(texts, length)
  return ids, found, made, remarks(made, texts, ids, length)


def remarks(made: Tokeniser, texts: Sequence[str], ids: np.ndarray, length: int) -> tuple[str, ...]:
  """Returns sentences on texts that are cut, and on tokens that a vocabulary or a file does not have."""
  told, count = [], len(texts)
  cut = sum(len(made.encode(text)) > length for text in texts)
  if cut:
    told.append(f'{cut} of {count} texts have more than {length} tokens and are cut: length says how many are kept.')
  if made.added:
    told.append(f'The tokeniser lacks {" and ".join(made.added)}: added behind its own, they make {made.size} tokens.')
  counts = collections.Counter(ids.ravel().tolist())
  if made.unknown is not None and counts[made.unknown]:
    share = counts[made.unknown] / (ids != made.pad).sum()
    told.append(f'{percent(share)} of the tokens are not in the vocabulary: they are the same token, [unknown].')
  return tuple(told)
