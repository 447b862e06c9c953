"""What a client was sent and what it returned, as files that `gradleak.read_update` reads."""

import dataclasses
import io
import json
import pathlib
import re
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from gradleak.core import errors
from gradleak.core.storage import made_folder, write_atomically

_FILES = ('sent', 'returned')


@dataclasses.dataclass(frozen=True)
class Exchange:
  """One training of one client.

  Attributes:
    sent: the arrays that it was sent, by name.
    returned: the arrays that left it.
    facts: what went with them, plain JSON: the round, the node, the configuration, the metrics.
  """

  sent: dict[str, np.ndarray]
  returned: dict[str, np.ndarray]
  facts: dict[str, Any]


def write(folder: Any, exchange: Exchange) -> pathlib.Path:
  """Writes an exchange into a folder of its own, and returns that: `sent.npz`, `returned.npz` and `facts.json`.

  The name of the folder is made of the round and the node. An exchange of the same name takes its place.

  Raises:
    UsageError: for arrays of objects, or an array of the name 'file', which NumPy cannot write.
    OSError: where the folder cannot be written.
  """
  words = [f'{what}_{exchange.facts[what]}' for what in ('round', 'node') if exchange.facts.get(what) not in (None, '')]
  one = made_folder(pathlib.Path(made_folder(folder)) / _name('-'.join(words) or 'exchange'))
  for name in _FILES:
    write_atomically(one / f'{name}.npz', _packed(getattr(exchange, name)))
  write_atomically(one / 'facts.json', json.dumps(exchange.facts, indent=2, default=str) + '\n')
  return one


def _name(words: str) -> str:
  """Returns a name for a folder; words that differ have names that differ, also where characters are replaced."""
  name = re.sub(r'[^\w.-]', '_', words)
  return name if name == words else f'{name}-{zlib.crc32(words.encode()):08x}'


def _packed(arrays: Mapping[str, np.ndarray]) -> bytes:
  for name, array in arrays.items():
    if array.dtype == object or name == 'file':
      raise errors.UsageError(f'the array {name!r} is of {array.dtype}, and NumPy does not write it under this name')
  buffer = io.BytesIO()
  np.savez(buffer, **arrays)  # type: ignore[arg-type]
  return buffer.getvalue()


def read(folder: Any) -> list[Exchange]:
  """Returns the exchanges that were recorded into a folder, by round and node; round 2 comes before round 10.

  Raises:
    UsageError: where there is none, or a file is missing or damaged.
  """
  folder = errors.check_path('folder', folder)
  found = sorted((path.parent for path in folder.glob('*/facts.json')), key=_place)
  if not found:
    raise errors.UsageError(f'nothing was recorded in {folder}: no folder in it has a facts.json')
  return [_read(one) for one in found]


def _place(folder: pathlib.Path) -> list[str | int]:
  """Returns the name of a folder, its numbers as such."""
  return [int(part) if i % 2 else part for i, part in enumerate(re.split(r'(\d+)', folder.name))]


def _read(folder: pathlib.Path) -> Exchange:
  try:
    facts = json.loads((folder / 'facts.json').read_text('utf-8'))
    sent, returned = (dict(np.load(folder / f'{name}.npz', allow_pickle=False)) for name in _FILES)
  except (OSError, ValueError, EOFError) as error:
    raise errors.UsageError(f'the exchange in {folder} cannot be read: {error}') from error
  return Exchange(sent, returned, facts)
