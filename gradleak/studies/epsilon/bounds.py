"""Lower bounds on ε from what was observed: numbers in, numbers out.

Many uploads distinguish two data sets (`distinguished`), or one upload many examples (`one_run`). Every bound
holds with a stated confidence, for any mechanism; `gaussian=True` names the one assumption that there is.
"""

import math
from typing import Annotated, Any, NamedTuple

import numpy as np

from gradleak.core import errors
from gradleak.core.settings import Count, NonNegative, Range, ranged

Probability = Annotated[float, Range(0, 1)]
Confidence = Annotated[float, Range(1e-9, 1 - 1e-9)]
_CANDIDATES = 50  # thresholds that are tried from each end of the scores
FEWEST = 4  # scores
_LARGEST = 1e4  # ε beyond which none is looked for


class Measured(NamedTuple):
  """A lower bound on ε, and what it is computed from.

  Attributes:
    epsilon: the bound, ≥ 0.
    trials: uploads of each data set behind the rates, or canaries.
    threshold: of the score, from which on the first data set is guessed; None of one run.
    tpr, fpr: the fraction of its uploads above the threshold, and of the other's; None of one run.
    tpr_low, fpr_high: their one-sided Clopper–Pearson bounds, which hold together with the confidence.
    guesses, correct: of one run, how many canaries were guessed and how many correctly; else None.
  """

  epsilon: float
  trials: int
  threshold: float | None = None
  tpr: float | None = None
  fpr: float | None = None
  tpr_low: float | None = None
  fpr_high: float | None = None
  guesses: int | None = None
  correct: int | None = None


@ranged
def gaussian_delta(mu: NonNegative, epsilon: NonNegative) -> float:
  """Returns the least δ for which a μ-Gaussian-DP mechanism is (ε, δ)-DP.

  Source: Balle, Wang, Improving the Gaussian Mechanism for Differential Privacy, ICML 2018, theorem 8; μ is the
  sensitivity over the noise's standard deviation.
  """
  from scipy.special import log_ndtr, ndtr

  if not mu:
    return 0.0
  return float(ndtr(mu / 2 - epsilon / mu) - np.exp(epsilon + log_ndtr(-mu / 2 - epsilon / mu)))


@ranged
def gaussian_epsilon(mu: NonNegative, delta: Probability) -> float:
  """Returns the least ε ≥ 0 for which a μ-Gaussian-DP mechanism is (ε, δ)-DP; the inverse of `gaussian_delta`."""
  from scipy.optimize import brentq

  if gaussian_delta(mu, 0.0) <= delta:
    return 0.0
  if gaussian_delta(mu, _LARGEST) > delta:
    return math.inf
  return float(brentq(lambda epsilon: gaussian_delta(mu, epsilon) - delta, 0.0, _LARGEST, xtol=1e-9))


def clopper_pearson(successes: Any, n: int, tail: float) -> tuple[np.ndarray, np.ndarray]:
  """Returns (low, high), each wrong with probability at most `tail`: exact bounds of proportions of `n` ≥ 1 trials.

  Args:
    successes: integers in [0, n], any shape.
    n: trials.
    tail: probability that the true proportion is below `low`, and likewise above `high`.
  """
  from scipy.special import betaincinv

  k = np.asarray(successes, np.float64)
  low = np.where(k > 0, betaincinv(np.maximum(k, 1), n - k + 1, tail), 0.0)
  high = np.where(k < n, betaincinv(k + 1, np.maximum(n - k, 1), 1 - tail), 1.0)
  return low, high


@ranged
def distinguished(
  inside: Any, outside: Any, *, delta: Probability, confidence: Confidence = 0.95, gaussian: bool = False
) -> Measured:
  """Returns the lower bound on ε by the scores of uploads of two neighbouring data sets.

  The threshold is chosen on the first half of the scores; the second half gives the rates. An (ε, δ)-DP mechanism has
  TPR ≤ e^ε·FPR + δ, and 1 − FPR ≤ e^ε·(1 − TPR) + δ. Both rates are bounded by Clopper and Pearson, each at half of the
  error, and the two directions use the same two bounds.

  Source: Jagielski, Ullman, Oprea, Auditing Differentially Private Machine Learning, NeurIPS 2020; Nasr et al.,
  Adversary Instantiation, S&P 2021. For `gaussian`: Nasr et al., Tight Auditing of Differentially Private Machine
  Learning, USENIX Security 2023.

  Args:
    inside: scores of uploads of the first data set, floats [n], n ≥ 4; larger for it than for the other.
    outside: of the second one, floats [m], m ≥ 4.
    delta: δ.
    confidence: of the bound.
    gaussian: assume that the mechanism is μ-Gaussian DP, which is a claim on all pairs (ε, δ) at once. Then
      μ ≥ Φ⁻¹(TPR) − Φ⁻¹(FPR), and ε is that of μ at δ. It is tighter, and refutes nothing but that claim.

  Raises:
    UsageError: for fewer scores, or those that are not finite.
  """
  first, second = (_scores(f'the scores {name}', one) for name, one in (('inside', inside), ('outside', outside)))
  halves = [(one[: len(one) // 2], one[len(one) // 2 :]) for one in (first, second)]
  chosen, kept = zip(*halves, strict=True)
  candidates = _thresholds(np.concatenate(chosen))
  careful = 1 - (1 - confidence) / len(candidates)  # all at once: else a few lucky uploads in a tail would choose it
  threshold = float(candidates[np.argmax(_bounds(chosen[0], chosen[1], candidates, delta, careful, gaussian)[0])])
  found = _bounds(kept[0], kept[1], np.asarray([threshold]), delta, confidence, gaussian)
  bound, low, high = (float(one[0]) for one in found)
  tpr, fpr = (float((one >= threshold).mean()) for one in kept)
  return Measured(max(0.0, bound), min(map(len, kept)), threshold, tpr, fpr, low, high)


def _scores(name: str, scores: Any) -> np.ndarray:
  found = errors.host_array(name, scores).astype(np.float64)
  if found.ndim != 1 or len(found) < FEWEST or not np.isfinite(found).all():
    raise errors.UsageError(f'{name} are of shape {found.shape}, expected [n] finite floats, n ≥ {FEWEST}')
  return found


def _thresholds(scores: np.ndarray) -> np.ndarray:
  """Returns candidates between scores: few in the middle, and all at both ends, where rates are small."""
  ordered = np.sort(scores)
  ranks = np.unique(np.geomspace(1, len(ordered) // 2, _CANDIDATES).astype(int))
  places = np.unique(np.concatenate([ranks, len(ordered) - ranks]))
  return (ordered[places - 1] + ordered[places]) / 2


def _bounds(
  inside: np.ndarray, outside: np.ndarray, thresholds: np.ndarray, delta: float, confidence: float, gaussian: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns (bounds on ε, on the TPR from below, on the FPR from above) at each threshold."""
  from scipy.special import ndtri

  tail = (1 - confidence) / 2
  above = [len(one) - np.searchsorted(np.sort(one), thresholds, side='left') for one in (inside, outside)]
  low, high = clopper_pearson(above[0], len(inside), tail)[0], clopper_pearson(above[1], len(outside), tail)[1]
  if gaussian:
    with np.errstate(invalid='ignore'):
      mu = np.nan_to_num(ndtri(low) - ndtri(high), nan=0.0, posinf=0.0, neginf=0.0)
    # ε grows with μ: to choose a threshold, μ is enough.
    return (mu if len(mu) > 1 else np.asarray([gaussian_epsilon(max(0.0, float(mu[0])), delta)])), low, high
  with np.errstate(divide='ignore', invalid='ignore'):
    ways = [np.log(np.maximum(hit - delta, 0.0) / miss) for hit, miss in ((low, high), (1 - high, 1 - low))]
  return np.max(np.nan_to_num(ways, nan=-np.inf), axis=0), low, high


@ranged
def one_run_p_value(
  canaries: Count, guesses: Annotated[int, Range(0)], correct: Annotated[int, Range(0)], epsilon: NonNegative,
  delta: Probability,
) -> float:  # fmt: skip
  """Returns a bound on the probability of so many correct guesses, if one run on coin flips is (ε, δ)-DP.

  Each of the canaries is in, or its neighbour is, by a fair coin; so many of them are guessed, the others are not. For
  δ = 0 the number of correct guesses is stochastically at most binomial, with the probability e^ε/(1 + e^ε).

  Source: Steinke, Nasr, Jagielski, Privacy Auditing with One (1) Training Run, NeurIPS 2023, the theorem for
  (ε, δ)-DP.

  Args:
    canaries: m, the number of coins.
    guesses: r ≤ m, fixed before the run.
    correct: v ≤ r.
    epsilon, delta: what is claimed.
  """
  from scipy.special import expit
  from scipy.stats import binom

  errors.check_number('guesses', guesses, low=0, high=canaries, integer=True)
  errors.check_number('correct', correct, low=0, high=guesses, integer=True)
  chance = float(expit(epsilon))
  beta = float(binom.sf(correct - 1, guesses, chance))
  if not delta or not correct:
    return beta
  steps = np.arange(1, correct + 1)
  alpha = float(np.max((binom.sf(correct - steps - 1, guesses, chance) - beta) / steps))
  return min(1.0, beta + 2 * canaries * delta * alpha)


@ranged
def one_run_epsilon(
  canaries: Count, guesses: Annotated[int, Range(0)], correct: Annotated[int, Range(0)], delta: Probability,
  confidence: Confidence = 0.95,
) -> float:  # fmt: skip
  """Returns the largest ε that so many correct guesses refute with a confidence; 0 if they refute none.

  Args:
    canaries, guesses, correct, delta: as `one_run_p_value` takes them.
    confidence: one minus the largest p-value that refutes.
  """
  from scipy.optimize import brentq

  def refuted(epsilon: float) -> float:
    return 1 - confidence - one_run_p_value(canaries, guesses, correct, epsilon, delta)

  if refuted(0.0) <= 0:
    return 0.0
  beyond = 1.0
  while refuted(beyond) > 0:
    beyond *= 2
  return float(brentq(refuted, 0.0, beyond, xtol=1e-6))


@ranged
def one_run(scores: Any, coins: Any, *, delta: Probability, confidence: Confidence = 0.95) -> Measured:
  """Returns the lower bound on ε by the canaries of one run; those of the largest scores are guessed.

  All are guessed, half of them, a quarter and so on, down to eight. The error is divided evenly among these numbers.

  Args:
    scores: floats [m], positive where a canary seems to be in; the others seem to have their neighbour in.
    coins: booleans [m], whether it is in.
    delta, confidence: as in `distinguished`.
  """
  found, coins = _scores('the scores', scores), errors.host_array('coins', coins).astype(bool)
  if coins.shape != found.shape:
    raise errors.UsageError(f'the coins are of shape {coins.shape}, expected one for each of {len(found)} scores')
  order = np.argsort(-np.abs(found), kind='stable')
  right = np.cumsum((found > 0)[order] == coins[order])
  numbers = [len(found) >> shift for shift in range(len(found).bit_length()) if len(found) >> shift >= 8] or [
    len(found)
  ]
  each = 1 - (1 - confidence) / len(numbers)
  tried = [(one_run_epsilon(len(found), n, int(right[n - 1]), delta, each), n, int(right[n - 1])) for n in numbers]
  epsilon, guesses, correct = max(tried)
  return Measured(epsilon, len(found), guesses=guesses, correct=correct)
