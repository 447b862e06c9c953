"""How likely a sequence of tokens is, by how often its pairs occur in public ones: a bigram model, smoothed."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gradleak.core import errors

_MOST = 1 << 22  # pairs that have a place of their own; of larger vocabularies pairs share places
_MIXER = 2654435761  # Knuth's multiplicative hash
STRENGTH = 2.0  # of the single tokens against the pairs, in occurrences


class Ngrams(NamedTuple):
  """Logarithms of probabilities; a tree of arrays.

  Attributes:
    single: of each token, [V].
    first: of each token at the first place, [V].
    pairs: of a pair, given its first token, by `_place`, [P]; less what a pair that was not seen has.
    unseen: of each first token, what a single token's is multiplied by in a pair that was not seen, [V].
  """

  single: jax.Array
  first: jax.Array
  pairs: jax.Array
  unseen: jax.Array


def _place(a: jax.Array, b: jax.Array, size: int, places: int) -> jax.Array:
  """Returns the place of pairs of tokens; of their own where the vocabulary is small."""
  if size * size <= places:
    return a * size + b
  mixed = a.astype(jnp.uint32) * jnp.uint32(_MIXER) + b.astype(jnp.uint32) * jnp.uint32(40503)
  return (mixed % jnp.uint32(places)).astype(jnp.int32)


def fitted(tokens: np.ndarray, size: int) -> Ngrams:
  """Returns the model of sequences of tokens, int [N, T] with padding as one of them.

  P(b | a) = (n(a, b) + κ P(b)) / (n(a) + κ), κ = `STRENGTH`; every token has occurred once more than it has.

  Args:
    tokens: public sequences.
    size: V, of the vocabulary.

  Raises:
    UsageError: for none.
  """
  tokens = np.asarray(tokens)
  if tokens.ndim != 2 or not tokens.size:
    raise errors.UsageError(f'an n-gram model is of sequences [N, T], and these have the shape {tokens.shape}')
  places = min(size * size, _MOST)
  counts = np.bincount(tokens.ravel(), minlength=size) + 1.0
  single = counts / counts.sum()
  firsts = np.bincount(tokens[:, 0], minlength=size) + STRENGTH * single
  a, b = tokens[:, :-1].ravel(), tokens[:, 1:].ravel()
  where = np.asarray(_place(jnp.asarray(a, jnp.int32), jnp.asarray(b, jnp.int32), size, places))
  before = np.bincount(a, minlength=size).astype(np.float64)
  seen, first, times = np.unique(where, return_index=True, return_counts=True)
  pairs = np.zeros(places)
  # What a pair that was seen has beyond one that was not: log(1 + n(a, b) / (κ P(b))).
  pairs[seen] = np.log1p(times / (STRENGTH * single[b[first]]))
  unseen = np.log(STRENGTH / (before + STRENGTH))
  return Ngrams(*(jnp.asarray(x, jnp.float32) for x in (np.log(single), np.log(firsts / firsts.sum()), pairs, unseen)))


def surprise(model: Ngrams, tokens: jax.Array) -> jax.Array:
  """Returns the mean of −log P over the places of each sequence, float32 [N]; tokens: int [N, T], −1 is taken for 0."""
  tokens = jnp.maximum(tokens, 0)
  a, b = tokens[:, :-1], tokens[:, 1:]
  size = model.single.shape[0]
  pairs = model.unseen[a] + model.single[b] + model.pairs[_place(a, b, size, model.pairs.shape[0])]
  return -(model.first[tokens[:, 0]] + jnp.sum(pairs, axis=1)) / tokens.shape[1]
