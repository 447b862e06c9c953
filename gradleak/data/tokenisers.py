"""Texts to numbers and back: bytes, words, and files of the library `tokenizers`.

Every tokeniser has a token for padding and one for what is masked. Both stand for no text.
"""

import collections
import dataclasses
import functools
import hashlib
import json
import pathlib
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from gradleak.core import errors

MOST_STORED = 5000  # pieces that results keep; of larger vocabularies they keep the digest
KINDS = ('bytes', 'words', 'file')
_SPECIAL = ('[pad]', '[mask]', '[unknown]')
_NAMED = r'[\[<][|｜_▁]*{}(ding)?[|｜_▁]*[\]>]'  # [PAD], <pad>, <|pad|>, <|padding|>
_LARGEST = 1 << 26  # bytes of a file


@dataclasses.dataclass(frozen=True)
class Tokeniser:
  """A vocabulary, and how texts become its numbers; equal where kind and pieces are equal.

  Attributes:
    kind: 'bytes', 'words' or 'file'.
    pieces: the text of each token, by its number; those of padding and masks are names in brackets. Results that keep
      no pieces give numbers.
    pad, mask: numbers of the tokens for padding and for what is masked.
    unknown: number of the token for a piece that is not in the vocabulary; None where there is none.
    source: JSON of a tokeniser of the library `tokenizers`; '' for the others.
  """

  kind: str
  pieces: tuple[str, ...]
  pad: int
  mask: int
  unknown: int | None = None
  source: str = dataclasses.field(default='', repr=False)

  def __repr__(self) -> str:
    return f'{self.kind} ({self.size} tokens)'

  @property
  def size(self) -> int:
    """How many tokens there are, those for padding and masks among them."""
    return len(self.pieces)

  @functools.cached_property
  def special(self) -> frozenset[int]:
    """Numbers of the tokens that stand for no text: of padding and masks."""
    return frozenset({self.pad, self.mask})

  @property
  def added(self) -> tuple[str, ...]:
    """Names of those of them that the file of the library `tokenizers` lacks."""
    names = [self.pieces[number] for number in (self.pad, self.mask)]
    return tuple(name for name in names if self.source and self._loaded.token_to_id(name) is None)

  @functools.cached_property
  def digest(self) -> str:
    """16 hexadecimal digits that tell it from others."""
    text = json.dumps([self.kind, self.pieces, self.pad, self.mask, self.unknown, self.source])
    return hashlib.sha256(text.encode()).hexdigest()[:16]

  def encode(self, text: str) -> list[int]:
    """Returns the tokens of a text, without padding; [] for a text without any."""
    if self.kind == 'bytes':
      return list(text.encode())
    if self.kind == 'words':
      return [self._places.get(word, self.unknown or 0) for word in words_of(text)]
    return [int(one) for one in self._loaded.encode(text, add_special_tokens=False).ids]

  def decode(self, tokens: Iterable[int]) -> str:
    """Returns the text of tokens; those of padding and masks, and numbers of none, stand for nothing."""
    known = [int(one) for one in tokens if 0 <= int(one) < self.size and int(one) not in self.special]
    if self.kind == 'bytes':
      return bytes(known).decode('utf-8', 'replace')
    if self.kind == 'words' or not self.source:
      return ' '.join(self.pieces[one] for one in known)
    return self._loaded.decode(known, skip_special_tokens=False)

  def shown(self, token: int) -> str:
    """Returns one token as people read it."""
    if not 0 <= token < self.size:
      return '?'
    piece, letters = self.pieces[token], _letters()
    if self.kind == 'bytes' and token < 256:
      piece = chr(token) if token < 128 else f'\\x{token:02x}'
    elif self._bytewise and letters.keys() >= set(piece):
      piece = bytes(letters[one] for one in piece).decode('utf-8', 'backslashreplace')
    return ''.join(one if one.isprintable() else one.encode('unicode_escape').decode() for one in piece)

  def batch(self, texts: Sequence[str], length: int) -> np.ndarray:
    """Returns the tokens of texts, int32 [N, length], cut or padded behind.

    Raises:
      UsageError: for a text without tokens.
    """
    errors.check_number('length', length, low=1, high=65_536, integer=True)
    found = np.full((len(texts), length), self.pad, np.int32)
    for row, text in enumerate(texts):
      tokens = self.encode(text)[:length]
      if not tokens:
        raise errors.UsageError(f'text {row} is {errors.shown(text)}, which has no token')
      found[row, : len(tokens)] = tokens
    return found

  def described(self) -> dict[str, Any]:
    """Returns what results keep of it, plain JSON; `restored` makes it of that."""
    pieces = list(self.pieces) if self.kind == 'words' and self.size <= MOST_STORED else None
    return {'kind': self.kind, 'size': self.size, 'digest': self.digest} | {
      name: value
      for name, value in (('pad', self.pad), ('mask', self.mask), ('unknown', self.unknown), ('pieces', pieces))
      if value is not None
    }

  @functools.cached_property
  def _places(self) -> dict[str, int]:
    return {piece: place for place, piece in enumerate(self.pieces)}

  @functools.cached_property
  def _bytewise(self) -> bool:
    """Whether its pieces are written in `_letters`."""
    return re.search(r'"type":\s*"ByteLevel"', self.source) is not None

  @functools.cached_property
  def _loaded(self) -> Any:
    return _library().Tokenizer.from_str(self.source)


_KNOWN: dict[str, Tokeniser] = {}  # by digest: of files, which results do not keep


def known(made: Tokeniser) -> Tokeniser:
  """Returns a tokeniser, which `restored` finds from now on in this process."""
  return _KNOWN.setdefault(made.digest, made)


def restored(described: Mapping[str, Any]) -> Tokeniser:
  """Returns the tokeniser of `Tokeniser.described`; where its pieces are not kept, tokens are shown as numbers."""
  if described['digest'] in _KNOWN:
    return _KNOWN[described['digest']]
  if described['kind'] == 'bytes':
    return in_bytes()
  pieces = described.get('pieces') or [f'#{number}' for number in range(described['size'])]
  return Tokeniser(
    described['kind'], tuple(pieces), described['pad'], described['mask'], described.get('unknown'), source=''
  )


@functools.cache
def _letters() -> dict[str, int]:
  """Returns the sign of each byte in a BPE of bytes (Radford et al. 2019): its own, or one behind all others."""
  own = [*range(33, 127), *range(161, 173), *range(174, 256)]
  others = [value for value in range(256) if value not in own]
  return {chr(value): value for value in own} | {chr(256 + place): value for place, value in enumerate(others)}


@functools.cache
def in_bytes() -> Tokeniser:
  """Returns the tokeniser of UTF-8's bytes: 256, one for padding and one for masks."""
  return known(Tokeniser('bytes', (*(chr(value) for value in range(256)), *_SPECIAL[:2]), 256, 257))


def words_of(text: str) -> list[str]:
  """Returns the words of a text in small letters, and its punctuation marks; accents and vowel signs are of words."""
  lower = text.lower()
  signs = ''.join(one for one in sorted(set(lower)) if unicodedata.category(one)[0] == 'M')
  return re.findall(rf'\w[\w{signs}]*|[^\w\s]', lower)


def in_words(texts: Iterable[str], most: int = 20_000) -> Tokeniser:
  """Returns the tokeniser of the most frequent words of texts, and one for all other words.

  Args:
    texts: whose words are counted.
    most: of the vocabulary; of equally frequent words the first in the alphabet are kept.
  """
  errors.check_number('most words', most, low=1, high=10**6, integer=True)
  counts = collections.Counter(word for text in texts for word in words_of(text))
  if not counts:
    raise errors.UsageError('the texts have no words to make a vocabulary of')
  chosen = sorted(counts, key=lambda word: (-counts[word], word))[:most]
  return known(Tokeniser('words', (*_SPECIAL, *sorted(chosen)), 0, 1, 2))


def from_file(path: str | pathlib.Path) -> Tokeniser:
  """Returns the tokeniser of a file tokenizer.json, as the library `tokenizers` and Hugging Face's models have it.

  Padding is what the file says of it, or a token such as [PAD], <pad> or <|pad|>; masks likewise. Where the file has
  none, one is added behind its own tokens.

  Raises:
    UsageError: for a file that is not there, is none, or has several tokens for padding; and without the library.
  """
  found = errors.check_path('the tokeniser', path, home=True)
  if not found.is_file():
    raise errors.UsageError(f'no file {str(path)!r}: a tokeniser is bytes, words or a file tokenizer.json')
  if found.stat().st_size > _LARGEST:
    raise errors.UsageError(f'{found} has more than {_LARGEST >> 20} MiB: it is no tokeniser')
  return from_json(found.read_text('utf-8', 'replace'), str(found))


def trained(texts: Iterable[str], size: int = 2000) -> Tokeniser:
  """Returns a byte-level BPE of `size` tokens, trained on texts (Sennrich et al. 2016); it needs `tokenizers`."""
  errors.check_number('size of the vocabulary', size, low=300, high=10**6, integer=True)
  library = _library()
  made = library.Tokenizer(library.models.BPE())
  made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
  made.decoder = library.decoders.ByteLevel()
  alphabet = library.pre_tokenizers.ByteLevel.alphabet()
  trainer = library.trainers.BpeTrainer(
    vocab_size=size, special_tokens=list(_SPECIAL[:2]), initial_alphabet=alphabet, show_progress=False
  )
  made.train_from_iterator(texts, trainer)
  return from_json(made.to_str(), 'what was trained')


def from_json(source: str, where: str) -> Tokeniser:
  """Returns the tokeniser of the JSON of `tokenizers`; `where` is how messages call it."""
  try:
    loaded = _library().Tokenizer.from_str(source)
  except errors.UsageError:
    raise
  except Exception as error:  # the library raises plain ones
    raise errors.UsageError(f'{where} is no tokeniser of the library tokenizers: {error}') from error
  said = loaded.padding or {}
  if loaded.padding or loaded.truncation:  # `Tokeniser.batch` pads and cuts, and `data.text` says how many texts it cut
    loaded.no_padding()
    loaded.no_truncation()
    source = loaded.to_str()
  places = loaded.get_vocab(with_added_tokens=True)
  pieces = ['' for _ in range(max(places.values(), default=-1) + 1)]
  for piece, place in places.items():
    pieces[place] = piece
  model = json.loads(source)['model']
  unknown = places.get(model.get('unk_token'), model.get('unk_id'))
  unknown = special('unk', places, where) if unknown is None else unknown
  padding = said.get('pad_id') if places.get(said.get('pad_token'), -1) == said.get('pad_id') else None
  found = (special('pad', places, where) if padding is None else padding, special('mask', places, where))
  pairs = list(zip(_SPECIAL[:2], found, strict=True))
  pieces += [name for name, number in pairs if number is None]
  pad, mask = (pieces.index(name) if number is None else number for name, number in pairs)
  return known(Tokeniser('file', tuple(pieces), pad, mask, unknown, source))


def special(kind: str, places: Mapping[str, int], where: str) -> int | None:
  """Returns the number of the token for 'pad', 'mask' or 'unk' by its usual spellings, None for none.

  Raises:
    UsageError: for several of them; `where` is how the message calls the tokeniser.
  """
  found = [piece for piece in places if re.fullmatch(_NAMED.format(kind), piece, re.IGNORECASE)]
  if len(found) > 1:
    raise errors.UsageError(f'{where} has the tokens {errors.some(found)}, expected one of them')
  return places[found[0]] if found else None


def _library() -> Any:
  try:
    import tokenizers
  except ImportError as error:
    raise errors.UsageError(
      'files of tokenisers need the library tokenizers: pip install tokenizers, or take bytes or words'
    ) from error
  return tokenizers
