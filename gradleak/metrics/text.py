"""Reconstructed texts against private ones: tokens, n-grams, whole sequences, and which text of a gallery is meant.

Tokens are numbers. Padding and masks stand for no text, and never count as right. ROUGE (Lin 2004) is taken over the
words of the decoded texts. They are in small letters and parted at all other signs, as in the package `rouge_score`
without stemming. That drops all letters but a to z; here those of all scripts are kept, with the marks on them.
"""

import collections
import hashlib
import unicodedata
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from gradleak.core import errors
from gradleak.metrics.identification import MOST, PERCENTILE, different
from gradleak.metrics.labels import checked, of_matched

_PAIRS = 4096  # of different texts, from which the percentile is taken
_MARGIN = 4.0  # of a cosine, in standard deviations
_TIE = 1e-3  # of the cost of a wrong token: shared tokens decide between equally wrong sequences


class Bags(NamedTuple):
  """Texts of the kind of the private ones, as bags of tokens.

  Attributes:
    threshold: the ROUGE-2 above which a reconstruction is recognised: that of different texts rarely exceeds it.
    places: what a text in it is known by -> its place among those of the gallery, P in all.
    columns: token -> its column, of those that occur in any text that the weights are taken from.
    weights: of the tokens, log of the inverse share of texts that have them, [columns].
    units: weighted counts of the gallery's texts, each of norm 1, [P, columns].
  """

  threshold: float
  places: dict[bytes, int]
  columns: dict[int, int]
  weights: np.ndarray
  units: np.ndarray

  def candidates(self, texts: Any) -> np.ndarray:
    """Returns how many others each original is to be found among, int [N], at most `MOST`."""
    among = np.asarray([_known_by(text) in self.places for text in np.asarray(texts)], int)
    return np.minimum(MOST, len(self.places) - among)


def token_counts(tokens: Any, special: Collection[int]) -> collections.Counter:
  """Returns how often each token occurs, without those that stand for no text and numbers below 0."""
  return collections.Counter(one for one in np.asarray(tokens).ravel().tolist() if one >= 0 and one not in special)


def words(text: str) -> list[str]:
  """Returns the words that ROUGE counts."""
  return ''.join(one if one.isalnum() or unicodedata.category(one)[0] == 'M' else ' ' for one in text.lower()).split()


def rouge(found: Sequence, truth: Sequence, n: int) -> float:
  """Returns ROUGE-N of two sequences, the F1 of shared n-grams as multisets (Lin 2004); 0 where either has none."""
  grams = [collections.Counter(zip(*(one[i:] for i in range(n)), strict=False)) for one in (found, truth)]
  shared = (grams[0] & grams[1]).total()
  return _f1(shared, grams[0].total(), grams[1].total())


def rouge_l(found: Sequence, truth: Sequence) -> float:
  """Returns ROUGE-L of two sequences, the F1 of their longest common subsequence; 0 where either is empty."""
  lengths = [0] * (len(truth) + 1)
  for one in found:
    before = 0
    for place, other in enumerate(truth, 1):
      kept = lengths[place]
      lengths[place] = before + 1 if one == other else max(kept, lengths[place - 1])
      before = kept
  return _f1(lengths[-1], len(found), len(truth))


def _f1(shared: int, found: int, truth: int) -> float:
  return 2 * shared / (found + truth) if shared else 0.0


def match(found: np.ndarray, truth: np.ndarray, special: Collection[int]) -> np.ndarray:
  """Pairs two batches one-to-one by least total share of wrong tokens (Hungarian method).

  Where sequences are equally wrong, those with more tokens in common are paired.

  Args:
    found: int [K, T]; truth: int [N, T].
    special: tokens that stand for no text.

  Returns:
    int64 [N]: `found[permutation[i]]` is matched to `truth[i]`; −1 if there are too few.
  """
  from scipy import optimize

  counted = ~np.isin(truth, list(special))
  right = (truth[:, np.newaxis] == found[np.newaxis]) & counted[:, np.newaxis]
  wrong = 1 - right.sum(axis=2) / np.maximum(counted.sum(axis=1), 1)[:, np.newaxis]
  bags = [[token_counts(one, special) for one in batch] for batch in (truth, found)]
  shared = np.asarray([[_f1((a & b).total(), a.total(), b.total()) for b in bags[1]] for a in bags[0]])
  permutation = np.full(len(truth), -1)
  rows, columns = optimize.linear_sum_assignment(wrong - _TIE * shared)
  permutation[rows] = columns
  return permutation


def exact(found: np.ndarray, truth: np.ndarray, special: Collection[int]) -> np.ndarray:
  """Returns which pairs of sequences have the same tokens at the same places, bool [N]; none without a token."""
  held = [~np.isin(one, list(special)) & (one >= 0) for one in (found, truth)]
  same = np.where(held[1], found == truth, ~held[0])
  return same.all(axis=-1) & held[1].any(axis=-1)


def gallery(candidates: Any, private: Any, special: Collection[int], decode: Callable[[Any], str]) -> Bags:
  """Returns the `Bags` that originals are to be found in; weights and threshold are of the candidates.

  Args:
    candidates: int [P, T], different texts, private ones among them or not.
    private: int [N, T]; they count for the weights where there are no two candidates.
    special: tokens that stand for no text.
    decode: tokens -> text.
  """
  candidates, private = np.asarray(candidates), np.asarray(private)
  texts = candidates if len(candidates) > 1 else np.concatenate([candidates, private])
  counts = [token_counts(text, special) for text in texts]
  columns = {token: place for place, token in enumerate(sorted({token for one in counts for token in one}))}
  having = collections.Counter(token for one in counts for token in one)
  weights = np.asarray([np.log((1 + len(texts)) / having[token]) for token in columns])
  made = Bags(calibrated(texts, decode), {}, columns, weights, np.zeros((0, len(columns))))
  places = {_known_by(text): place for place, text in enumerate(candidates)}
  return made._replace(places=places, units=_units(candidates, made, special))


def calibrated(texts: np.ndarray, decode: Callable[[Any], str]) -> float:
  """Returns the 99th percentile of the ROUGE-2 of two different texts; 1 of a text alone, which nothing exceeds."""
  if len(texts) < 2:
    return 1.0
  read = [words(decode(text)) for text in texts]
  pairs = zip(*different(len(texts), _PAIRS), strict=True)
  return float(np.percentile([rouge(read[a], read[b], 2) for a, b in pairs], PERCENTILE))


def standings(
  found: np.ndarray, truth: np.ndarray, among: Bags, special: Collection[int]
) -> tuple[np.ndarray, np.ndarray]:
  """Returns where each original stands among the candidates, by the cosine of weighted bags with its reconstruction.

  Args:
    found, truth: int [N, T], in pairs.
    among: the `Bags`; at most `MOST` texts of it are the candidates, never the original itself.
    special: tokens that stand for no text.

  Returns:
    The rank, int [N]: 1 for the most similar; a candidate that is as similar as the original is ahead of it. And the
    normal score of the rank, float [N]: N(0, 1) where nothing is known of the original, since it is then one of the
    candidates. Those as similar are put in an order that a digest of both texts draws. What the original is more
    similar than all candidates, times `_MARGIN`, is added.
  """
  from scipy import stats

  seen, own, candidates = _units(found, among, special), _units(truth, among, special), among.candidates(truth)
  itself = np.sum(seen * own, axis=1)
  others = seen @ among.units.T
  for row, (text, count) in enumerate(zip(truth, candidates, strict=True)):
    place = among.places.get(_known_by(text))
    others[row, slice(count, None) if place is None else place] = -np.inf
  apart = others - itself[:, np.newaxis]
  ahead, level = np.sum(apart > 1e-12, axis=1), np.sum(np.abs(apart) <= 1e-12, axis=1)
  drawn = [_share(one, other) for one, other in zip(found, truth, strict=True)]
  scores = stats.norm.isf((ahead + np.asarray(drawn) * (level + 1)) / (candidates + 1))
  margins = np.maximum(0.0, -apart.max(axis=1, initial=-1.0))
  return np.where(itself > 0, 1 + ahead + level, 1 + candidates), scores + _MARGIN * margins


def _share(found: np.ndarray, truth: np.ndarray) -> float:
  """Returns a number in (0, 1) that a digest of two texts draws."""
  digest = hashlib.sha256(_known_by(found) + _known_by(truth)).digest()
  return (int.from_bytes(digest[:6], 'big') + 0.5) / 2**48


def _units(texts: np.ndarray, among: Bags, special: Collection[int]) -> np.ndarray:
  """Returns the weighted counts of texts, each of norm 1, [N, columns]; zeros where no token has a column."""
  found = np.zeros((len(texts), len(among.columns)))
  for row, text in enumerate(texts):
    for token, count in token_counts(text, special).items():
      if token in among.columns:
        found[row, among.columns[token]] = count * among.weights[among.columns[token]]
  return found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-12)


def _known_by(text: np.ndarray) -> bytes:
  return np.ascontiguousarray(text, np.int64).tobytes()


def evaluate(
  found: Any,
  truth: Any,
  labels_hat: Any,
  labels: Any,
  *,
  special: Collection[int],
  decode: Callable[[Any], str],
  among: Bags | Mapping[int, Bags] | None = None,
) -> dict[str, Any]:
  """Returns the figures of one reconstructed batch, after matching it one-to-one with the private one (`match`).

  Args:
    found: int [K, T], in any order; numbers below 0 are no token.
    truth: int [N, T].
    labels_hat: int [K], −1 for unknown; [0] if the attack gives none.
    labels: int [N].
    special: tokens that stand for no text.
    decode: tokens -> text.
    among: the `Bags` that an original is to be found in, or one per label.

  Returns:
    A dict of Python values, means over the N sequences; one without a reconstruction has 0. 'rouge1', 'rouge2' and
    'rouge_l' are of words. 'standing' is tanh of where originals stand among the candidates (`standings`), NaN without
    any; then none is identified, either. 'token_accuracy' is the share of the batch's tokens that are right, and
    'type_accuracy' the same where each different token counts once, however frequent. 'revealed' counts the sequences
    that are right throughout. The others are as of `gradleak.metrics.evaluate`.

  Raises:
    UsageError: if shapes or types do not fit.
  """
  found, truth = (errors.host_array(name, one) for name, one in (('reconstructions', found), ('truth', truth)))
  kinds = [one.dtype.kind for one in (found, truth)]
  if found.ndim != 2 or found.shape[1:] != truth.shape[1:] or 'f' in kinds or not (truth.size and found.size):
    raise errors.UsageError(
      f'reconstructions are {found.dtype} of shape {found.shape}, the truth {truth.dtype} of shape {truth.shape}; '
      'expected tokens, integers [K, T] and [N, T]'
    )
  labels_hat, labels = checked(labels_hat, labels, len(found), len(truth))
  permutation = match(found, truth, special)
  matched = permutation >= 0
  paired = np.where(matched[:, np.newaxis], found[permutation], -1)
  bags = _of_each(among, labels)
  read = [(words(decode(one)), words(decode(other))) for one, other in zip(paired, truth, strict=True)]
  seen = {} if among is None else _identified(paired, truth, bags, special, read)
  right, types = _accuracies(paired, truth, special)
  return {
    'rouge1': _mean(rouge(*pair, 1) for pair in read),
    'rouge2': _mean(rouge(*pair, 2) for pair in read),
    'rouge_l': _mean(rouge_l(*pair) for pair in read),
    'token_accuracy': right,
    'type_accuracy': types,
    'standing': float('nan'),
    'revealed': int(exact(paired, truth, special).sum()),
    'flat': 0,
    **seen,
    **of_matched(labels_hat, labels, permutation),
    'permutation': permutation.tolist(),
  }


def _of_each(among: Bags | Mapping[int, Bags] | None, labels: np.ndarray) -> list[Bags | None]:
  """Returns the bags that each sequence is to be found in."""
  one = among is None or isinstance(among, Bags)
  return [among if one else among[int(label)] for label in labels]  # type: ignore[index, misc]


def _mean(values: Any) -> float:
  return float(np.mean(list(values), dtype=np.float64))


def _accuracies(found: np.ndarray, truth: np.ndarray, special: Collection[int]) -> tuple[float, float]:
  """Returns (share of the tokens that are right, mean over the different tokens of that share)."""
  counted = ~np.isin(truth, list(special))
  right, tokens = (found == truth)[counted], truth[counted]
  kinds = np.unique(tokens)
  return float(right.mean()), _mean(right[tokens == kind].mean() for kind in kinds)


def _identified(
  found: np.ndarray, truth: np.ndarray, bags: list, special: Collection[int], read: list[tuple[list, list]]
) -> dict[str, Any]:
  """Returns 'standing', 'rank', 'first', 'identified', 'recognised' and 'candidates' of pairs, see `evaluate`."""
  placed = [
    [float(each[0]) for each in standings(one[np.newaxis], other[np.newaxis], of, special)]
    for one, other, of in zip(found, truth, bags, strict=True)
  ]
  counts = [int(of.candidates(other[np.newaxis])[0]) for other, of in zip(truth, bags, strict=True)]
  alike = [rouge(*pair, 2) > of.threshold for pair, of in zip(read, bags, strict=True)]
  first = [rank == 1 for rank, _ in placed]
  named = [one and count > 0 for one, count in zip(first, counts, strict=True)]
  known = [np.tanh(standing) for (_, standing), count in zip(placed, counts, strict=True) if count]
  return {
    'standing': _mean(known) if known else float('nan'),
    'rank': int(min(rank for rank, _ in placed)),
    'first': np.flatnonzero(named).tolist(),
    'identified': sum(named),
    'recognised': sum(one and other for one, other in zip(first, alike, strict=True)),
    'candidates': min(counts),
  }
