"""How the span attack puts sequences together where a token attends to others that are not known yet, as in encoders.

What a token takes from attention is a mean of values of one token at each position. The scores of a known token are
known. The input of the MLP at its position is then a smooth function of the shares π of the candidates. It lies in the
span of the layer's inputs at the true choice. There are more equations, the directions outside of the span, than
unknowns: Gauss-Newton steps solve them, without a search over choices.

Where a head reads one token of the only block, the MLP has a gradient at that position and no other. It is the first
of an encoder, or the last of a decoder, which attends to all tokens before.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradleak.attacks import subspace
from gradleak.attacks.span_decoder import ALIKE, FALSE, NULLS, Block, Prefix, Projected, chosen, mixed, projected
from gradleak.attacks.subspace import Span
from gradleak.engine import parts
from gradleak.models.model import FirstBlock

POOL = 4  # candidates of a position that are kept for each sequence of the batch
STEPS = 6  # of Gauss-Newton; the function is nearly linear


def encoded(
  block: Block, span: Span, candidates: list[np.ndarray], most: int, rng: np.random.Generator, once: bool = False
) -> list[Prefix]:
  """Returns the sequences of an encoder, from one candidate after the other.

  Args:
    block: the first block.
    span: of the inputs of its MLP.
    candidates: tokens of each position, the likeliest first.
    most: sequences in the batch.
    rng: draws tokens.
    once: whether the MLP has a gradient at one position of each sequence alone; a decoder's then ends there.
  """
  own = [one[: POOL * most] for one in candidates]
  places = np.concatenate([np.full(len(one), place) for place, one in enumerate(own)])
  if not len(places):
    return []
  pool = np.concatenate(own)
  rows = projected(block, pool, places)
  known = _chance(block, span, rows, places, rng)
  level = math.log(FALSE / len(pool))
  found: dict[tuple[int, ...], Prefix] = {}
  tried: set[tuple[int, ...]] = set()
  for place in range(len(own)):
    seeds = np.flatnonzero(places == place)
    seen = places[places <= place] if block.about.causal else places
    read = slice(place, place + 1) if once else slice(None)
    for shares in _solved(block, span, rows, seen, seeds) if len(seeds) else ():
      rounded = tuple(_rounded(shares, seen))
      if len(rounded) <= (place if once else 0) or rounded in tried:
        continue
      tried.add(rounded)
      picked = _polished(block, span, rows, seen, list(rounded), read)
      tried.add(tuple(picked))
      sequence = tuple(int(pool[i]) for i in picked)
      inputs = full(block, rows, picked)[read]
      residual = span.residual(inputs)
      if known.log_p(residual).max() < level:
        found[sequence] = Prefix(sequence, tuple(picked), tuple(inputs), math.log(max(residual.max(), 1e-300)))
    parts.tell(place + 1, len(own), 'positions')
    best = chosen(span, list(found.values()), most) if len(found) >= most else []
    if len(best) == most and span.left(span.added(np.concatenate([one.inputs for one in best]), _nothing(span))) < 1.5:
      return best
  return chosen(span, list(found.values()), most)


def before_gap(block: Block, first: Span, tokens: np.ndarray, place: int) -> np.ndarray:
  """Returns the tokens of a position before the first jump of their residuals.

  Where two sequences share one, fewer are right. A wrong one is nearly a sum of right ones, at this and at other
  positions, and would leave the shares open.
  """
  residual = first.residual(block.normalised(block.plain(tokens, np.full(len(tokens), place))))
  jumps = np.flatnonzero(residual[1:] > ALIKE * np.maximum(residual[:-1], 1e-12))
  return tokens[: jumps[0] + 1] if len(jumps) else tokens


def _nothing(span: Span) -> np.ndarray:
  return np.zeros((len(span.basis), 0))


def full(block: Block, rows: Projected, picked: list[int]) -> np.ndarray:
  """Returns the MLP's inputs [T, d] of a sequence, given by the places of its vectors."""
  return several(block, rows, np.asarray(picked)[np.newaxis])[0]


def _polished(
  block: Block, span: Span, rows: Projected, places: np.ndarray, picked: list[int], read: slice
) -> list[int]:
  """Returns the choice after exchanges of one token at a time, as long as the residuals of positions `read` fall.

  Where a token stands at two positions, others are sums of right ones there, and their shares are left open.
  """

  def cost(choices: np.ndarray) -> np.ndarray:
    residual = span.residual(several(block, rows, choices)[:, read])
    return np.log(np.maximum(residual, 1e-14)).sum(axis=1)

  best = np.asarray(picked)
  least, changed = float(cost(best[np.newaxis])[0]), True
  while changed:
    tried = np.asarray([[*best[:t], j, *best[t + 1 :]] for t in range(len(best)) for j in np.flatnonzero(places == t)])
    costs = cost(tried)
    changed = bool(costs.min() < least - 1e-3)
    if changed:
      least, best = float(costs.min()), tried[int(np.argmin(costs))]
  return [int(i) for i in best]


def several(block: Block, rows: Projected, choices: np.ndarray) -> np.ndarray:
  """Returns the MLP's inputs [C, T, d] of sequences, given by the places of their vectors [C, T]."""
  heads, count = block.about.heads, choices.shape[1]
  found = []
  for first in range(0, len(choices), 64):
    own = choices[first : first + 64]
    query, key, value = (x[own].reshape(*own.shape, heads, -1) for x in (rows.query, rows.key, rows.value))
    scores = np.einsum('cqhd,ckhd->chqk', query, key, optimize=True) / math.sqrt(query.shape[-1])
    if block.about.causal:
      scores = np.where(np.tri(count, dtype=bool), scores, -np.inf)
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    shares /= shares.sum(axis=-1, keepdims=True)
    attended = np.einsum('chqk,ckhd->cqhd', shares, value, optimize=True).reshape(len(own) * count, -1)
    found.append(mixed(block, Projected(*(x[own].reshape(len(own) * count, -1) for x in rows)), attended))
  return np.concatenate(found).reshape(*choices.shape, -1)


def _chance(block: Block, span: Span, rows: Projected, places: np.ndarray, rng: np.random.Generator) -> subspace.Chance:
  """Returns the residuals of random tokens that attend to random candidates."""
  tokens = rng.integers(0, len(block.table), NULLS)
  drawn = projected(block, tokens, rng.choice(places, NULLS))
  mean = np.stack([rows.value[rng.permutation(len(places))[: places.max() + 1]].mean(axis=0) for _ in range(NULLS)])
  return subspace.chance(span.residual(mixed(block, drawn, mean)))


@functools.lru_cache(maxsize=16)
def _linearised(about: FirstBlock) -> Callable:
  """Returns a function to weighted coordinates of the MLP's inputs [S, d] and their Jacobians in the shares [S, d, K].

  Its arguments are variables, side [d, d], added [S, d], scores [S, H, K], values [K, H, d/H] and shares [S, K].
  """

  def one(
    variables: Any, side: jax.Array, added: jax.Array, scores: jax.Array, values: jax.Array, share: jax.Array
  ) -> Any:
    weights = scores * share[jnp.newaxis]
    total = jnp.sum(weights, axis=1, keepdims=True)
    attended = jnp.einsum('hk,khd->hd', weights / total, values).reshape(1, 1, -1)
    return about.mixed(variables, added.reshape(1, 1, -1), attended)[0, 0] @ side

  def both(variables: Any, side: Any, added: Any, scores: Any, values: Any, share: Any) -> Any:
    return one(variables, side, added, scores, values, share), jax.jacfwd(one, argnums=5)(
      variables, side, added, scores, values, share
    )

  return jax.jit(jax.vmap(both, in_axes=(None, None, 0, 0, None, 0)))


def _solved(block: Block, span: Span, rows: Projected, places: np.ndarray, seeds: np.ndarray) -> list[np.ndarray]:
  """Returns shares of the candidates at `places` [K] for each seed, with and without a sum of one at each position.

  These are the first K of `rows`.
  """
  heads, count = block.about.heads, len(places)
  side = (span.directions * np.sqrt(span.weights)).astype(np.float32)
  added = (rows.inputs if block.about.normalised_sum else rows.plain)[seeds].astype(np.float32)
  query, key = (x.reshape(len(x), heads, -1) for x in (rows.query[seeds], rows.key[:count]))
  scores = np.einsum('shd,khd->shk', query, key) / math.sqrt(query.shape[-1])
  scores = np.exp(scores - scores.max(axis=-1, keepdims=True)).astype(np.float32)
  values = rows.value[:count].reshape(count, heads, -1)
  sums = (places == np.arange(places.max() + 1)[:, np.newaxis]).astype(np.float64)
  start = 1 / np.maximum(sums.sum(axis=1), 1)
  found = []
  for bound in (False, True):
    share = np.tile(start[places], (len(seeds), 1))
    for row, seed in enumerate(seeds):
      share[row, places == places[seed]] = 0
      share[row, seed] = 1
    for _ in range(STEPS if places.any() else 0):  # the first token of a decoder sees only itself
      given = _linearised(block.about)(block.variables, side, added, scores, values, share.astype(np.float32))
      value, slope = (np.asarray(x, np.float64) for x in given)
      for row, seed in enumerate(seeds):
        free = places != places[seed]
        left, right = slope[row][:, free], -value[row]
        if bound:
          weight = np.abs(left).max()
          left = np.concatenate([left, weight * sums[:, free]])
          right = np.concatenate([right, weight * (1 - sums @ share[row])])
        share[row, free] += np.linalg.lstsq(left, right, rcond=1e-6)[0]
    found += list(share)
  return found


def _rounded(shares: np.ndarray, places: np.ndarray) -> list[int]:
  """Returns the candidate with the largest share of each position, up to the first one where none has half."""
  picked = []
  for place in range(places.max() + 1):
    own = np.flatnonzero(places == place)
    if not len(own) or shares[own].max() < 0.5:
      break
    picked.append(int(own[np.argmax(shares[own])]))
  return picked
