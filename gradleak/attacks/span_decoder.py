"""How the span attack finds the tokens of each position, and puts the sequences of a decoder together."""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from gradleak.attacks import subspace
from gradleak.attacks.subspace import Span
from gradleak.engine import parts
from gradleak.models.model import FirstBlock

CHUNK = 8192  # tokens that are tested at a time
NULLS = 64  # tokens drawn at random, by which the residuals of wrong sequences are known
BEAM = 4  # beginnings that are kept for each sequence of the batch
TINY = 1e-300
WRONG = 1000  # tokens of the vocabulary by which the residuals of wrong ones are known
PENALTY = 3.0  # on a token of a sequence, in units of what one explains of noise
ENDED = 10.0  # a sequence may have ended where the residual of all that could follow is so much larger
ALIKE = 150.0  # the largest ratio of residuals of right vectors that is expected
EXCHANGES = 4000  # of sequences that are tried, beyond which only similar ones are
ROUNDING = 1e-8  # of the residual of a random vector; no more is left of vectors in the span where there is no noise
FALSE = 1.0  # expected number of wrong vectors that a check lets pass in all its tests


class Block(NamedTuple):
  """The first block of the model that the client received, on the host.

  Attributes:
    about: of the model.
    variables: its variables.
    table: embeddings of tokens [V, d].
    positions: embeddings of positions [T, d].
    scale, shift, epsilon: of the LayerNorm; epsilon is None where there is none.
  """

  about: FirstBlock
  variables: Any
  table: np.ndarray
  positions: np.ndarray
  scale: np.ndarray
  shift: np.ndarray
  epsilon: float | None

  def plain(self, tokens: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Returns e + p of tokens at positions, both integers [K]: [K, d]."""
    return self.table[tokens] + self.positions[places]

  def normalised(self, plain: np.ndarray) -> np.ndarray:
    """Returns the LayerNorm of vectors [..., d] in float64."""
    x = self.centred(plain.astype(np.float64))
    if self.epsilon is None:
      return x
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.epsilon) * self.scale + self.shift

  def centred(self, x: np.ndarray) -> np.ndarray:
    """Returns vectors [..., d] less their means, as the LayerNorm has them; as they are where there is none."""
    return x if self.epsilon is None else x - x.mean(axis=-1, keepdims=True)


def block_of(about: FirstBlock, variables: Any, length: int) -> Block:
  """Returns the first block of a model with these variables, for sequences of so many tokens."""
  table, positions, scale, shift, epsilon = about.parts(variables)
  table, positions, scale, shift = (np.asarray(x) for x in (table, positions[:length], scale, shift))
  return Block(about, variables, table, positions, scale, shift, None if epsilon is None else float(epsilon))


def screened(block: Block, span: Span, allowed: np.ndarray, most: int) -> list[np.ndarray]:
  """Returns the tokens of each position whose input of the first block is in the span: the first check.

  The embeddings of a small vocabulary may be in it themselves. Then residuals of wrong tokens are no larger than those
  of right ones, and all that are rounding are kept.

  Args:
    block: the first block.
    span: of its inputs.
    allowed: tokens that may occur, integers [K].
    most: sequences in the batch.

  Returns:
    For each position tokens, those with the smallest residual first.
  """
  every = residuals(block, span, allowed)
  level = math.log(FALSE / every.size)
  found, rounding = [], _rounding(span)
  few = len(allowed) < WRONG  # of which many may be right
  wrong = residuals(block, span, np.linspace(0, len(block.table) - 1, WRONG).astype(int)) if few else every
  for place, row in enumerate(every):
    known = subspace.chance(wrong[place])
    # float32 decides roughly, float64 finally
    near = np.flatnonzero((known.log_p(row) < level + math.log(10)) | (row < 1e3 * rounding))
    exact = span.residual(block.normalised(block.plain(allowed[near], np.full(len(near), place))))
    kept = (known.log_p(exact) < level) | (exact < rounding)
    order = np.argsort(exact[kept], kind='stable')
    found.append(allowed[near[kept][order]][: _distinct(np.maximum(exact[kept][order], rounding), most)])
  return found


def _rounding(span: Span) -> float:
  """Returns the residual that is rounding; 0 where the inputs span all directions, and residuals tell nothing."""
  return ROUNDING * float(np.mean(span.weights)) if np.sum(span.weights) > 0.5 else 0.0


def residuals(block: Block, span: Span, allowed: np.ndarray) -> np.ndarray:
  """Returns the residuals of tokens at all positions, float32 [T, K].

  The input is γ(e + p − mean)/σ + β. Its coordinates are those of e and of p, up to the scalar σ: the tokens are taken
  into the basis once for all positions.
  """
  length, features = block.positions.shape
  basis, weights = span.directions.astype(np.float32), span.weights.astype(np.float32)
  p = block.centred(block.positions).astype(np.float32)
  moved = (p * block.scale.astype(np.float32)) @ basis
  shift = block.shift.astype(np.float32) @ basis
  found = np.empty((length, len(allowed)), np.float32)
  for first in range(0, len(allowed), CHUNK):
    e = block.table[allowed[first : first + CHUNK]].astype(np.float32)
    e = block.centred(e)
    variance = np.ones((length, len(e)), np.float32)
    if block.epsilon is not None:
      variance = _squares(e, p, np.ones(features, np.float32)) / features + np.float32(block.epsilon)
    coordinates = (e * block.scale.astype(np.float32)) @ basis
    value, norm = (
      _squares(coordinates, moved, one) / variance
      + 2 * (coordinates @ (shift * one) + (moved @ (shift * one))[:, np.newaxis]) / np.sqrt(variance)
      + np.sum(shift * shift * one)
      for one in (weights, np.ones_like(weights))
    )
    found[:, first : first + CHUNK] = np.maximum(value, 0) / np.maximum(norm, 1e-30)
    parts.tell(min(first + CHUNK, len(allowed)), len(allowed), 'tokens')
  return found


def _squares(e: np.ndarray, p: np.ndarray, weights: np.ndarray) -> np.ndarray:
  """Returns the weighted squared norms of all sums of e [K, d] and p [T, d]: [T, K]."""
  return np.sum(p * p * weights, axis=1)[:, np.newaxis] + 2 * (p * weights) @ e.T + np.sum(e * e * weights, axis=1)


def _distinct(residuals: np.ndarray, most: int) -> int:
  """Returns how many of ascending residuals may be of right vectors, where at most so many are.

  Right ones resemble each other, and noise lets wrong ones resemble them. Without noise they are orders apart.
  """
  if len(residuals) <= most:
    return len(residuals)
  return int(np.sum(residuals <= ALIKE * max(float(residuals[most - 1]), TINY)))


class Projected(NamedTuple):
  """Vectors of the first block for pairs (position, token): `plain`, queries, keys and values, each [K, d]."""

  plain: np.ndarray
  inputs: np.ndarray
  query: np.ndarray
  key: np.ndarray
  value: np.ndarray


def projected(block: Block, tokens: np.ndarray, places: np.ndarray) -> Projected:
  """Returns the vectors of tokens at positions, integers [K]."""
  plain = block.plain(tokens, places)
  inputs = block.normalised(plain).astype(np.float32)
  made = _tokens(block.about)(block.variables, inputs[np.newaxis])
  return Projected(plain, inputs, *(np.asarray(x[0]) for x in made))


@functools.lru_cache(maxsize=16)
def _tokens(about: FirstBlock) -> Callable:
  return jax.jit(about.tokens)


@functools.lru_cache(maxsize=16)
def _mixed(about: FirstBlock) -> Callable:
  return jax.jit(about.mixed)


def mixed(block: Block, rows: Projected, attended: np.ndarray) -> np.ndarray:
  """Returns the input of the MLP for vectors [K, d] and what they attend to; K is filled up to a power of two."""
  added = rows.inputs if block.about.normalised_sum else rows.plain
  count = len(added)
  size = 1 << max(count - 1, 0).bit_length()
  given = [np.pad(x, ((0, size - count), (0, 0)))[np.newaxis].astype(np.float32) for x in (added, attended)]
  return np.asarray(_mixed(block.about)(block.variables, *given)[0])[:count]


class Prefix(NamedTuple):
  """The beginning of a sequence.

  Attributes:
    tokens: its ids.
    rows: places of its positions among the vectors that are kept.
    inputs: of the MLP at its positions, each [d].
    regret: the largest log-ratio of a residual to the smallest of the tokens that could have stood there.
    residual: of its last position.
  """

  tokens: tuple[int, ...] = ()
  rows: tuple[int, ...] = ()
  inputs: tuple[np.ndarray, ...] = ()
  regret: float = 0.0
  residual: float = 0.0

  def grown(self, token: int, row: int, inputs: np.ndarray, regret: float, residual: float) -> 'Prefix':
    """Returns it with one more token."""
    grown = (*self.tokens, token), (*self.rows, row), (*self.inputs, inputs)
    return Prefix(*grown, max(self.regret, regret), max(residual, TINY))


def likeliest(candidates: list[np.ndarray]) -> list[Prefix]:
  """Returns the one sequence of a batch of one, of the likeliest tokens: where there is no second check."""
  tokens: list[int] = []
  for own in candidates:
    if not len(own):
      break
    tokens.append(int(own[0]))
  return [Prefix(tuple(tokens))] if tokens else []


def decoded(
  block: Block, span: Span, candidates: list[np.ndarray], most: int, rng: np.random.Generator
) -> list[Prefix]:
  """Returns the sequences of a decoder that are put together position by position: the second check.

  The input of the MLP at a position depends on all tokens before. A token continues a beginning if this input lies in
  the span. Tokens drawn at random tell how large the residuals of wrong continuations are.

  Args:
    block: the first block.
    span: of the inputs of its MLP.
    candidates: tokens of each position.
    most: sequences in the batch.
    rng: draws tokens.
  """
  tokens = [np.concatenate([own, rng.integers(0, len(block.table), NULLS)]) for own in candidates]
  places = [np.full(len(own), place) for place, own in enumerate(tokens)]
  starts = np.cumsum([0, *map(len, tokens)])
  rows = projected(block, np.concatenate(tokens), np.concatenate(places))
  tests = sum(len(own) for own in candidates) * most
  level, rounding = math.log(FALSE / max(tests, 1)), _rounding(span)
  growing, ended, width = [Prefix()], [], BEAM * most
  for place, own in enumerate(candidates):
    if not len(own):
      ended, growing = ended + [one for one in growing if one.tokens], []
      break
    new = np.arange(starts[place], starts[place + 1])
    residual, inputs = _continued(block, span, rows, growing, new)
    known = subspace.chance(residual[:, len(own) :].ravel())
    passed = (known.log_p(residual[:, : len(own)]) < level) | (residual[:, : len(own)] < rounding)
    grown = []
    for i, one in enumerate(growing):
      least = max(residual[i, : len(own)].min(), TINY)
      rise = math.log(least / one.residual) if one.tokens else 0.0
      if one.tokens and (not passed[i].any() or rise > math.log(ENDED)):
        ended.append(one)
      for j in np.flatnonzero(passed[i]):
        regret = max(math.log(max(residual[i, j], TINY) / least), rise - math.log(ALIKE))
        grown.append(one.grown(int(own[j]), int(new[j]), inputs[i, j], regret, residual[i, j]))
    growing = sorted(grown, key=lambda one: one.regret)[:width]
    growing = growing[: _distinct(np.exp([one.regret for one in growing]), most)]
    parts.tell(place + 1, len(candidates), 'positions')
    if not growing:
      break
  return chosen(span, growing + ended, most)


def chosen(span: Span, found: list[Prefix], most: int) -> list[Prefix]:
  """Returns at most so many of the sequences that were found: those that explain the gradient together.

  A wrong sequence that resembles a right one passes the test of the span. The set of sequences with the least squares
  is the likeliest. Sequences are exchanged as long as that helps, in pairs where the squares are not noise yet. A
  sequence that explains no more than chance beyond the others is left out.
  """
  if not found:
    return []
  rows = [np.stack(one.inputs) for one in found]
  empty = np.zeros((len(span.basis), 0))

  def spanned(taken: Iterable[int]) -> np.ndarray:
    given = empty
    for i in taken:
      given = np.concatenate([given, span.added(rows[i], given)], axis=1)
    return given

  taken = list(np.argsort([one.regret for one in found], kind='stable')[:most])
  for size in (1, 2):
    if size == 1 or span.left(spanned(taken)) > 1 + math.sqrt(2 / span.outputs / len(span.basis)):
      taken = _exchanged(span, found, rows, taken, size, spanned)
  taken = _shortened(span, found, rows, taken, spanned)
  gains = [span.needed(span.gain(rows[i], spanned(j for j in taken if j != i)), len(rows[i])) for i in taken]
  order = np.argsort(-np.asarray(gains), kind='stable')
  return [found[taken[i]] for i in order if gains[i] > subspace.DEVIATIONS]


def _shortened(
  span: Span, found: list[Prefix], rows: list[np.ndarray], taken: list[int], spanned: Callable[[Iterable[int]], Any]
) -> list[int]:
  """Returns the places of sequences; one whose last tokens explain no more than chance gives way to its beginning.

  Where a batch holds a sequence more than once, its longer forms with a wrong token meet no others.
  """
  kept = list(taken)
  for place, i in enumerate(taken):
    beginnings = [j for j, one in enumerate(found) if one.tokens == found[i].tokens[: len(one.tokens)] and j != i]
    for j in sorted((j for j in beginnings if len(rows[j]) < len(rows[i])), key=lambda j: len(rows[j])):
      given = spanned([*kept[:place], *kept[place + 1 :], j])
      more = rows[i][len(rows[j]) :]
      if span.needed(span.gain(more, given), len(more)) <= subspace.DEVIATIONS:
        kept[place] = j
        break
  return list(dict.fromkeys(kept))


def _exchanged(
  span: Span,
  found: list[Prefix],
  rows: list[np.ndarray],
  taken: list[int],
  size: int,
  spanned: Callable[[Iterable[int]], np.ndarray],
) -> list[int]:
  """Returns the places of sequences after exchanges of `size` at a time; of many, only similar ones are exchanged."""

  free = [j for j in range(len(found)) if j not in taken]
  many = math.comb(len(taken), size) * (len(free) + 1) ** size > EXCHANGES

  def options(i: int) -> list[int]:
    own = found[i].tokens
    same = [sum(a == b for a, b in zip(own, one.tokens, strict=False)) for one in found]
    return [j for j, count in enumerate(same) if j == i or (j not in taken and (not many or 2 * count >= len(own)))]

  def worth(places: Sequence[int], given: np.ndarray) -> float:
    """Returns what sequences explain beyond others, less what as many tokens explain of noise."""
    own = np.concatenate([rows[i] for i in places])
    return span.gain(own, given) - PENALTY * len(own) * span.outputs

  changed = True
  while changed:
    changed = False
    for out in itertools.combinations(range(len(taken)), size):
      old = [taken[i] for i in out]
      given = spanned(j for j in taken if j not in old)
      own = worth(old, given)
      sets = [new for new in itertools.product(*map(options, old)) if len(set(new)) == size]
      best = max(sets, key=lambda new: worth(new, given))
      if worth(best, given) > own + 1e-9 * abs(own):
        for i, j in zip(out, best, strict=True):
          taken[i] = j
        changed = True
  return taken


def _continued(
  block: Block, span: Span, rows: Projected, growing: list[Prefix], new: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the residuals [P, C] of P beginnings continued by the vectors at C places, and the MLP's inputs."""
  before = np.asarray([one.rows for one in growing], np.int64).reshape(len(growing), -1)
  pairs, heads = (len(growing), len(new)), block.about.heads

  def split(x: np.ndarray) -> np.ndarray:
    return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads)

  query, key, value = (split(x[new]) for x in (rows.query, rows.key, rows.value))
  size = math.sqrt(query.shape[-1])
  own = np.broadcast_to(np.einsum('chd,chd->ch', query, key)[..., np.newaxis] / size, (*pairs, heads, 1))
  scores = np.einsum('chd,pthd->pcht', query, split(rows.key[before]), optimize=True) / size
  scores = np.concatenate([scores, own], axis=-1)
  shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
  shares /= shares.sum(axis=-1, keepdims=True)
  attended = np.einsum('pcht,pthd->pchd', shares[..., :-1], split(rows.value[before]), optimize=True)
  attended = (attended + shares[..., -1:] * value).reshape(-1, rows.value.shape[1])
  repeated = Projected(*(np.broadcast_to(x[new], (*pairs, x.shape[1])).reshape(-1, x.shape[1]) for x in rows))
  found = mixed(block, repeated, attended)
  return span.residual(found).reshape(pairs), found.reshape(*pairs, -1)
