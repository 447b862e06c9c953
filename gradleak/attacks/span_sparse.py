"""The span attack where a gradient has fewer columns than the batch has tokens, as that of LoRA's adapters.

The columns are combinations of all inputs of the layer, which they do not span. An input is γ(e + p − mean)/σ + β, and
all but e is known. Beyond the positions the gradient is a combination of few embeddings, of all of the vocabulary.
Sparse recovery with several measurements finds them. It is rank-aware order recursive matching pursuit (Davies and
Eldar, Rank Awareness in Joint Sparse Recovery, IEEE Transactions on Information Theory 2012).

All inputs of a token share e, and all of a position share p. The coefficients of a token therefore are the sum of those
of its pairs (token, position), and so are those of a position. That tells where a token stands which occurs once.
"""

import math
from typing import NamedTuple

import numpy as np

from gradleak.attacks import subspace
from gradleak.attacks.span_decoder import Block
from gradleak.attacks.subspace import Span
from gradleak.engine import parts

INEXACT = 2.0**-21  # what float32 leaves of an input of a layer, in units of its norm
NOISY = 0.3  # share of noise in a direction beyond which it is left out
CLEAR = 1.5  # times the norm of its noise that a direction of the residual has to exceed
INSIDE = 0.9999  # of the square of a token's vector in the signal space: it is in it
SURPLUS = 3  # tokens that are tried for each that may be right
VARIABLES = 2500  # shares that are solved for at a time


class Signal(NamedTuple):
  """The directions of a gradient above its noise.

  Attributes:
    basis: orthonormal, [d, k].
    noise: norm of the noise in each, in units of the signal, [k]. What float32 leaves of the inputs is part of it: in
      weak directions that of the strong ones.
  """

  basis: np.ndarray
  noise: np.ndarray

  def beyond(self, given: np.ndarray) -> tuple[np.ndarray, float]:
    """Returns what orthonormal columns [d, any] leave: directions above the noise, and the logarithm of the volume."""
    left, values, right = np.linalg.svd(subspace.beyond(self.basis, given), full_matrices=False)
    floor = CLEAR * np.sqrt(np.square(right) @ np.square(self.noise))
    return left[:, values > floor], float(np.sum(np.log(np.maximum(values, floor))))

  def explained(self, given: np.ndarray, choices: float) -> bool:
    """Returns whether orthonormal columns leave only noise, and would hardly do so by chance.

    The part of a random direction in f = d − columns coordinates is shorter than ε with a probability of about
    (ε·√(e·d / f))^f.

    Args:
      given: the columns, [d, any].
      choices: logarithm of the number of sets that they could have been chosen from.
    """
    free = len(self.basis) - given.shape[1]
    radius = CLEAR * self.noise * math.sqrt(len(self.basis) / max(free, 1))
    evidence = -free * float(np.sum(np.log(radius) + 0.5))
    return evidence > choices and not self.beyond(given)[0].shape[1]


def signal_of(span: Span) -> Signal:
  """Returns the `Signal` of gradients that have fewer columns than the layer has features."""
  size = np.linalg.norm(span.basis.T @ span.side, axis=1)[: span.outputs]
  noise = (math.sqrt(len(span.basis)) + INEXACT * size.max()) / np.maximum(size, 1e-300)
  kept = noise < NOISY
  return Signal(span.basis[:, : span.outputs][:, kept], noise[kept])


def crowded(span: Span, inputs: int) -> bool:
  """Returns whether gradients have no more columns than there may be inputs, which then need not be spanned."""
  return span.change is None and span.outputs <= inputs and span.outputs < len(span.basis)


def columns_of(rows: np.ndarray, given: np.ndarray | None = None) -> np.ndarray:
  """Returns orthonormal columns for what rows [K, d] add to those that are given, [d, any]."""
  x = np.asarray(rows, np.float64).T
  x = x / np.linalg.norm(x, axis=0)
  left, triangle = np.linalg.qr(x if given is None else subspace.beyond(x, given))
  return left[:, np.abs(np.diag(triangle)) > 1e-6]


def recovered(block: Block, span: Span, allowed: np.ndarray, most: int) -> list[np.ndarray]:
  """Returns the tokens of each position whose inputs of the first block explain the gradient together; none else.

  Args:
    block: the first block.
    span: of its inputs.
    allowed: tokens that may occur, integers [K].
    most: sequences in the batch.
  """
  signal, length = signal_of(span), len(block.positions)
  tokens = _pursued(block, signal, allowed, most * length)
  if not len(tokens):
    return [tokens] * length
  pairs = _placed(block, signal, tokens)
  return [tokens[pairs[:, place]] for place in range(length)]


def _pursued(block: Block, signal: Signal, allowed: np.ndarray, most: int) -> np.ndarray:
  """Returns the tokens whose embeddings explain the signal beyond the positions; none where they leave some of it."""
  known = np.concatenate([block.centred(block.positions) * block.scale, block.shift[np.newaxis]]).astype(np.float64)
  left, values, _ = np.linalg.svd(known.T, full_matrices=False)
  basis = left[:, values > 1e-8 * values[0]]
  table = (block.centred(block.table[allowed]) * block.scale).astype(np.float32)
  squares = np.sum(table * table, axis=1)
  free = squares - np.sum(np.square(table @ basis.astype(np.float32)), axis=1)
  taken: list[int] = []
  room = min(SURPLUS * most, len(basis) - basis.shape[1] - signal.basis.shape[1] - 1)
  while len(taken) < room:
    rest, _ = signal.beyond(basis)
    if not rest.shape[1]:
      break
    share = np.sum(np.square(table @ rest.astype(np.float32)), axis=1) / np.maximum(free, 1e-3 * squares)
    share[taken] = -1
    best = np.argsort(-share)[: max(int(np.sum(share > INSIDE)), 1)][: max(rest.shape[1] // 2, 1)]
    new = columns_of(table[best], basis)
    free -= np.sum(np.square(table @ new.astype(np.float32)), axis=1)
    basis = np.concatenate([basis, new], axis=1)
    taken += [int(i) for i in best]
    parts.tell(min(len(taken), most), most, 'tokens')
  enough = signal.explained(basis, len(taken) * math.log(len(allowed)))
  return allowed[taken if enough else []]


def _placed(block: Block, signal: Signal, tokens: np.ndarray) -> np.ndarray:
  """Returns which token stands at which position, bool [K, T]."""
  length = len(block.positions)
  atoms = np.concatenate([block.centred(block.table[tokens]), block.centred(block.positions)]) * block.scale
  atoms = np.concatenate([atoms, block.shift[np.newaxis]]).astype(np.float64)
  found, _, _, values = np.linalg.lstsq(atoms.T, signal.basis / signal.noise, rcond=1e-10)
  rows, columns = found[: len(tokens)], found[len(tokens) : len(tokens) + length]
  error = CLEAR * math.sqrt(len(signal.noise)) / float(values[values > 1e-10 * values[0]].min())
  placed = np.zeros((len(tokens), length), bool)
  left, places = (np.flatnonzero(np.linalg.norm(x, axis=1) > error) for x in (rows, columns))
  while len(left) and len(places):
    own, sums = rows[left], columns[places]
    whole = _whole(own, sums)
    settled = np.linalg.norm(whole.T.astype(np.float64) @ own - sums, axis=1) < error
    if not settled.any():
      break
    placed[np.ix_(left, places[settled])] = whole[:, settled]
    left, places = left[~whole[:, settled].any(axis=1)], places[~settled]
  placed[np.ix_(left, places)] = True  # tokens that stand at several positions: at any of those that are left
  return placed


def _whole(rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
  """Returns which rows [K, k] add up to which columns [T, k], bool [K, T], where each row belongs to one of them.

  The shares of rows are those of least squares that are not negative; the shares of one row add up to 1.
  """
  from scipy import optimize

  (count, _), length = rows.shape, len(columns)
  if count * length > VARIABLES:
    return np.zeros((count, length), bool)
  once = np.linalg.norm(rows, axis=1).mean() * np.tile(np.eye(count), length)
  sums = np.concatenate([np.kron(np.eye(length), rows.T), once])
  target = np.concatenate([columns.ravel(), once.max() * np.ones(count)])
  shares, _ = optimize.nnls(sums, target, maxiter=30 * count * length)
  return shares.reshape(length, count).T > 0.5
