"""How the span attack puts sequences together where the gradient of the second layer has fewer columns than tokens.

An input of that layer depends on what a token attends to. The inputs of the right sequences explain all of the
gradient. Those of others leave the more of it the fewer are right. Tokens of a position are exchanged between
sequences, alone or with all that follows, as long as less is left.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from gradleak.attacks import span_encoder
from gradleak.attacks.span_decoder import Block, Prefix, Projected, projected
from gradleak.attacks.span_sparse import Signal, columns_of, signal_of
from gradleak.attacks.subspace import Span
from gradleak.engine import parts

STARTS = 8  # that are tried until one ends where all is explained
SWEEPS = 10  # over the positions, from one start

Sequence = tuple[int, ...]


def assembled(
  block: Block, first: Span, span: Span, candidates: list[np.ndarray], most: int, rng: np.random.Generator
) -> list[Prefix]:
  """Returns the sequences of tokens whose inputs of the second layer explain its gradient; none where they do not.

  Args:
    block: the first block.
    first: span of its inputs.
    span: of the inputs of the second layer.
    candidates: tokens of each position.
    most: sequences in the batch.
    rng: draws the starts.
  """
  length = next((place for place, own in enumerate(candidates) if not len(own)), len(candidates))
  if not length:
    return []
  counts = [len(own) for own in candidates[:length]]
  places = np.repeat(np.arange(length), counts)
  tokens = np.concatenate(candidates[:length])
  search = _Search(block, signal_of(first), signal_of(span), projected(block, tokens, places), places)
  choices = most * float(np.sum(np.log(counts)))
  for _ in range(STARTS):
    drawn = [rng.permuted(np.resize(np.flatnonzero(places == place), most)) for place in range(length)]
    found = search.improved([tuple(int(own[i]) for own in drawn) for i in range(most)])
    if search.second.explained(search.columns(found), choices):
      found = found if block.about.padding is None else search.shortened(found)
      sure = [own for own in found if search.needed(own, found)]
      return [Prefix(tuple(int(tokens[i]) for i in own), own, tuple(search.inputs(own))) for own in sure]
  return []


class _Search:
  """A search over sequences, each a tuple of places among the vectors of candidates."""

  def __init__(self, block: Block, first: Signal, second: Signal, rows: Projected, places: np.ndarray):
    self.block, self.first, self.second, self.rows, self.places = block, first, second, rows, places
    self.known: dict[Sequence, np.ndarray] = {}
    self.volumes: dict[frozenset[int], float] = {}

  def inputs(self, sequence: Sequence) -> np.ndarray:
    """Returns the inputs of the second layer [T, d]."""
    if sequence not in self.known:
      self.known[sequence] = span_encoder.several(self.block, self.rows, np.asarray(sequence)[np.newaxis])[0]
    return self.known[sequence]

  def name(self, sequence: Sequence, place: int) -> Any:
    """Returns what the input at a position depends on."""
    return sequence[: place + 1] if self.block.about.causal else (sequence, place)

  def columns(self, sequences: list[Sequence], without: Any = None) -> np.ndarray:
    """Returns orthonormal columns for the inputs of the second layer, each once, without that of one name."""
    rows = {self.name(own, t): x for own in sequences for t, x in enumerate(self.inputs(own))}
    return columns_of(
      np.asarray([x for name, x in rows.items() if name != without]).reshape(-1, len(self.second.basis))
    )

  def needed(self, sequence: Sequence, sequences: list[Sequence]) -> bool:
    """Returns whether each input of one of the sequences explains what all others do not."""
    left = (self.second.beyond(self.columns(sequences, self.name(sequence, t)))[0] for t in range(len(sequence)))
    return all(rest.shape[1] for rest in left)

  def cost(self, sequences: list[Sequence]) -> float:
    """Returns the logarithm of what is left of both layers."""
    used = frozenset(itertools.chain(*sequences))
    if used not in self.volumes:
      self.volumes[used] = self.first.beyond(columns_of(self.rows.inputs[sorted(used)]))[1]
    return self.volumes[used] + self.second.beyond(self.columns(sequences))[1]

  def improved(self, sequences: list[Sequence]) -> list[Sequence]:
    """Returns the sequences after exchanges, as long as less is left."""
    length, least = len(sequences[0]), self.cost(sequences)
    for _ in range(SWEEPS):
      before = least
      for place in range(length):
        for exchange in _exchanges(len(sequences), np.flatnonzero(self.places == place).tolist()):
          changed = exchange(sequences, place)
          cost = self.cost(changed) if changed != sequences else least
          if cost < least - 1e-6 * abs(least):
            least, sequences = cost, changed
        parts.tell(place + 1, length, 'positions')
      if least >= before - 1e-3 or not self.second.beyond(self.columns(sequences))[0].shape[1]:
        break
    return sequences

  def shortened(self, sequences: list[Sequence]) -> list[Sequence]:
    """Returns the sequences without the last tokens that explain nothing: those of sequences that ended before."""
    for i, own in enumerate(sequences):
      others = sequences[:i] + sequences[i + 1 :]
      while len(own) > 1 and not any(other[: len(own)] == own for other in others):
        if self.second.beyond(self.columns([*others, own[:-1]]))[0].shape[1]:
          break
        own = own[:-1]
      sequences = [*sequences[:i], own, *sequences[i + 1 :]]
    return sequences


def _exchanges(count: int, own: list[int]) -> Iterator[Callable[[list[Sequence], int], list[Sequence]]]:
  """Yields exchanges at a position: of a token, also with all that follow, and for another one where some are free."""
  for i, j in itertools.combinations(range(count), 2):
    for many in (None, 1):
      yield functools.partial(_swapped, i=i, j=j, many=many)
  for i, other in itertools.product(range(count), own if 1 < len(own) != count else ()):
    yield functools.partial(_replaced, i=i, other=other)


def _swapped(sequences: list[Sequence], place: int, i: int, j: int, many: int | None) -> list[Sequence]:
  found, end = list(sequences), None if many is None else place + many
  a, b = sequences[i], sequences[j]
  tail = () if end is None else a[end:], () if end is None else b[end:]
  found[i], found[j] = a[:place] + b[place:end] + tail[0], b[:place] + a[place:end] + tail[1]
  return found


def _replaced(sequences: list[Sequence], place: int, i: int, other: int) -> list[Sequence]:
  found = list(sequences)
  found[i] = (*found[i][:place], other, *found[i][place + 1 :])
  return found
