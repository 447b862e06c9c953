"""Sources of texts: the synthetic notes, and a user's own files of lines or of columns."""

import collections
import csv
import functools
import io
import pathlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from gradleak.core import errors
from gradleak.data import notes, tokenisers
from gradleak.data.tokenisers import Tokeniser

FILE = 'text'  # text:PATH
MODALITY = 'text'  # as results call what these samples are
_COLUMNS = ('text', 'sentence', 'note', 'review', 'content')  # headings of what is read, in this order
_LABELS = ('label', 'class', 'category')
_SUFFIXES = ('.txt', '.tsv', '.csv')
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
  with the headings 'text' or 'sentence', and 'label'. Without headings they are a label and a text.

  Raises:
    UsageError: for a split that is not there, and a file that cannot be read so.
  """
  if name == 'notes':
    errors.check_choice('split of notes', split, notes.SPLITS)
    size = notes.SPLITS[split]
    labels = np.arange(size, dtype=np.int32) % len(notes.CLASS_NAMES)
    return Texts(notes.CLASS_NAMES, labels, size, lambda index: notes.note(split, index)[0])
  path = errors.check_path(f'the path of {FILE}:PATH', name.partition(':')[2], home=True)
  if path.is_dir():
    files = {file.stem: file for file in sorted(path.iterdir()) if file.suffix in _SUFFIXES}
    errors.check_choice(f'split of {name}', split, files or ['(it has none: expected train.txt, .tsv or .csv)'])
    pairs, known = _pairs(files[split]), {label for file in files.values() for label, _ in _pairs(file)}
  elif path.is_file():
    errors.check_choice(f'split of {name}', split, ('test', 'train'))
    pairs = _pairs(path)
    known = {label for label, _ in pairs}
    pairs = tuple(one for place, one in enumerate(pairs) if (place % _TEST == _TEST - 1) == (split == 'test'))
  else:
    raise errors.UsageError(f'no file {str(path)!r}; {FILE}:PATH is a file .txt, .tsv or .csv, or a folder of them')
  if not pairs:
    raise errors.UsageError(f'the split {split!r} of {name} has no text')
  class_names = tuple(sorted(known))
  places = {label: place for place, label in enumerate(class_names)}
  labels = np.asarray([places[label] for label, _ in pairs], np.int32)
  return Texts(class_names, labels, len(pairs), lambda index: pairs[index][1])


@functools.lru_cache(maxsize=8)
def _pairs(path: pathlib.Path) -> tuple[tuple[str, str], ...]:
  """Returns (label, text) of each text in a file; the label is '' where there are none."""
  if path.stat().st_size > _LARGEST:
    raise errors.UsageError(f'{path} has more than {_LARGEST >> 30} GiB: give a part of it')
  try:
    content = path.read_text('utf-8')
  except UnicodeDecodeError as error:
    raise errors.UsageError(f'{path} is no text in UTF-8: {error.reason} at byte {error.start}') from error
  if path.suffix == '.txt':
    return tuple(('', line.strip()) for line in content.splitlines() if line.strip())
  return tuple(_columns(path, content))


def _columns(path: pathlib.Path, content: str) -> Iterator[tuple[str, str]]:
  """Yields (label, text) of the rows of a file with columns."""
  if path.suffix == '.tsv':
    rows = [line.split('\t') for line in content.splitlines() if line.strip()]
  else:
    rows = [row for row in csv.reader(io.StringIO(content)) if any(cell.strip() for cell in row)]
  if not rows:
    return
  heading = [cell.strip().lower() for cell in rows[0]]
  text = next((heading.index(name) for name in _COLUMNS if name in heading), None)
  label = next((heading.index(name) for name in _LABELS if name in heading), None)
  start = 0 if text is None else 1
  if text is None:
    if len(rows[0]) > 2:
      raise errors.UsageError(
        f'{path} has {len(rows[0])} columns and none is called {" or ".join(_COLUMNS)}: name the one of the texts so'
      )
    text, label = (len(rows[0]) - 1, None if len(rows[0]) == 1 else 0)
  for number, row in enumerate(rows[start:], start + 1):
    if len(row) <= max(text, label or 0):
      raise errors.UsageError(f'row {number} of {path} has {len(row)} columns, and {len(rows[0])} are expected')
    if row[text].strip():
      yield ('' if label is None else row[label].strip()), row[text].strip()


@functools.lru_cache(maxsize=8)
def tokeniser(name: str, given: str) -> Tokeniser:
  """Returns the tokeniser of a dataset.

  Args:
    name: of the dataset.
    given: 'bytes'; 'words', of the split train; 'bpe' or 'bpe:2000', trained on it; or a file tokenizer.json.

  Raises:
    UsageError: for anything else.
  """
  kind, _, rest = given.partition(':')
  if given == 'bytes':
    return tokenisers.in_bytes()
  if given == 'words' and name == 'notes':
    return tokenisers.in_words(notes.vocabulary())
  if given == 'words' or kind == 'bpe':
    others = read(name, 'train')
    texts = others.first(others.size)
    if given == 'words':
      return tokenisers.in_words(texts)
    if rest and not rest.isdigit():
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
  if limit is not None and limit > found.size:
    raise errors.UsageError(f'{limit} texts are asked for, but the split {split!r} of {name} has {found.size}')
  made = tokeniser(name, given)
  count, length = found.size if limit is None else limit, length or _LENGTHS[made.kind]
  texts = found.first(count)
  ids, told = made.batch(texts, length), []
  cut = sum(len(made.encode(text)) > length for text in texts)
  if cut:
    told.append(f'{cut} of {count} texts have more than {length} tokens and are cut: length says how many are kept.')
  counts = collections.Counter(ids.ravel().tolist())
  if made.unknown is not None and counts[made.unknown]:
    share = counts[made.unknown] / (ids != made.pad).sum()
    told.append(f'{share:.1%} of the tokens are not in the vocabulary: they are the same token, [unknown].')
  return ids, found, made, tuple(told)
