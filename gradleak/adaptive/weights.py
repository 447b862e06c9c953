"""What each entry of an upload is worth to an attacker who knows the noise: weights for the matching distance.

For noise of variance v_i on entry i, the likelihood weighs the squared difference by 1/v_i. Where a defense puts noise
on some entries only, the attacker does not know which; it weighs by the expected noise given what it sees. Noise of one
variance on all entries needs no weights: the cosine distance is then that of the likelihood.
"""

import math
from collections.abc import Sequence

import jax
import numpy as np
import scipy.special

from gradleak.core.trees import Tree

# Weights are relative to entries without noise, whose model error counts as this fraction of the noise's variance.
EXACT = 1e-3
# Entries are counted within these multiples of the noise's standard deviation.
_NEAR, _AROUND = 0.05, 0.5
_SMOOTH = 0.15  # fraction of the entries around zero that are near zero; a larger one means no noise, and noise has 0.1


def by_group(update: Tree, groups: Tree, variance: float | Tree, share: float) -> Tree:
  """Returns the weights of an update of which some groups of entries bear Gaussian noise, float64, at most 1.

  Noise of standard deviation σ smooths the density of the entries over ±σ/2: a tenth of those within σ/2 of zero are
  within σ/20. Gradients without noise have more, as their density has a peak at zero. The odds of both, by Bayes' rule
  for binomial counts with a uniform prior on the peak, give the probability that a group bears noise.

  Args:
    update: what is compared.
    groups: number of the group that each entry belongs to, integers shaped like the update.
    variance: of the noise, a float or a tree.
    share: of the groups that bear noise.
  """
  leaves, treedef = jax.tree.flatten(update)
  numbers = [np.asarray(n) for n in jax.tree.leaves(groups)]
  variances = _leaves(variance, leaves)
  deviations = [math.sqrt(max(v, 1e-300)) for v in variances]
  scaled = [np.abs(np.asarray(u, np.float64)) / sigma for u, sigma in zip(leaves, deviations, strict=True)]
  total = 1 + max(int(n.max()) for n in numbers)
  near, around = (_counts(scaled, numbers, bound, total) for bound in (_NEAR, _AROUND))
  rate = _NEAR / _AROUND
  noisy = near * math.log(rate) + (around - near) * math.log(1 - rate)
  tail = 1 - scipy.special.betainc(near + 1, around - near + 1, _SMOOTH)
  exact = scipy.special.betaln(near + 1, around - near + 1) + np.log(np.maximum(tail, 1e-300)) - math.log(1 - _SMOOTH)
  odds = np.clip(noisy - exact + math.log(share / (1 - share)), -500, 500)
  probability = 1 / (1 + np.exp(-odds))
  return treedef.unflatten([EXACT / (probability[n] + EXACT) for n in numbers])


def by_magnitude(update: Tree, variance: float | Tree) -> Tree:
  """Returns the weights of an update whose entries other than zero are noise, or noise and a gradient; at most 1.

  Half of the entries are taken to hold a gradient, of the variance that the noise leaves unexplained. An entry is
  weighed by the probability that it does, divided by the variance of its noise.

  Args:
    update: what is compared; zeros are not.
    variance: of the noise, a float or a tree of floats or arrays.
  """
  leaves, treedef = jax.tree.flatten(update)
  found = []
  variances = [variance] * len(leaves) if isinstance(variance, float) else jax.tree.leaves(variance)
  for u, v in zip(leaves, variances, strict=True):
    u, v = np.asarray(u, np.float64), np.broadcast_to(np.maximum(v, 1e-30), np.shape(u))
    kept = u != 0
    usual = np.mean(v[kept]) if kept.any() else 1e-30
    spread = np.mean(np.square(u[kept])) if kept.any() else usual
    signal = max(2 * (spread - usual), 1e-6 * usual)
    log_odds = 0.5 * np.square(u) * (1 / v - 1 / (v + signal)) - 0.5 * np.log((v + signal) / v)
    found.append(kept / (1 + np.exp(-np.clip(log_odds, -500, 500))) / v)
  largest = max((float(w.max()) for w in found if w.size), default=0.0) or 1.0
  return treedef.unflatten([w / largest for w in found])


def _leaves(variance: float | Tree, leaves: Sequence) -> list[float]:
  """Returns the variance of each tensor."""
  if isinstance(variance, float):
    return [variance] * len(leaves)
  return [float(np.mean(v)) for v in jax.tree.leaves(variance)]


def _counts(scaled: list, numbers: list, bound: float, total: int) -> np.ndarray:
  """Returns how many entries of each group are below a bound, float [groups]."""
  pairs = zip(scaled, numbers, strict=True)
  return sum(np.bincount(n.ravel(), (x < bound).ravel(), total) for x, n in pairs)
