"""Intervals that hold at every number of trials at once: who stops when the figures suffice is not misled by them.

An interval for a fixed number of trials misses in one of twenty cases. Who looks after each trial, and stops when it
excludes a value, is wrong more often. A confidence sequence is an interval for each n, and with probability 1 − α all
of them cover. So does the one at which a run stopped.

Both functions have the arguments and results of those in `statistics`, whose intervals are for a fixed n.
"""

import math
from typing import Any

import numpy as np

from gradleak.core import statistics

PRIOR = 0.5  # of Beta(½, ½): it keeps the interval short where all trials, or none, succeed
_SPREAD = 1.0  # variance of the prior of (mean − candidate) / standard deviation


def proportion_interval(
  successes: int, n: int, confidence: float = 0.95, *, independent: int | None = None
) -> tuple[float, float, float]:
  """Returns (proportion, low, high): of a confidence sequence for the proportion of successes in `n` trials.

  It holds the p by which the mixture of likelihood ratios is below 1/α. That mixture over Beta(½, ½) is a martingale
  of mean 1 for the true p. So it ever reaches 1/α with a probability of at most α (Ville's inequality).

  Sources: Robbins (1970), Annals of Mathematical Statistics 41, for mixtures over a prior. The mixture is also the
  capital of a gambler who bets on each trial by the frequency so far. Intervals from such bets are those of
  Waudby-Smith and Ramdas (2024), Journal of the Royal Statistical Society B 86.

  Args:
    successes, n, confidence, independent: as of `statistics.proportion_interval`.

  Raises:
    UsageError: if a number is out of range.
  """
  share, low, high = statistics.proportion_interval(successes, n, confidence, independent=independent)
  if n == 0:
    return share, low, high
  from scipy import optimize

  trials, limit = float(n if independent is None else independent), -math.log1p(-confidence)

  def beyond(p: float) -> float:
    return log_evidence(share * trials, trials, p) - limit

  least = 1e-300  # of few trials, part of a success is no evidence against any proportion
  low = optimize.brentq(beyond, least, share, xtol=1e-12) if successes and beyond(least) > 0 else 0.0
  high = 1.0 if successes == n else 1 - optimize.brentq(lambda q: beyond(1 - q), 1e-300, 1 - share, xtol=1e-12)
  return share, float(low), float(high)


def log_evidence(successes: Any, n: Any, p: Any) -> Any:
  """Returns the logarithm of the evidence against a proportion: of the mixture of likelihood ratios.

  The probability that it ever reaches log(1/α) is at most α, if the proportion is p.

  Args:
    successes, n: numbers or arrays of them, `successes` in [0, n].
    p: the proportion, in (0, 1).
  """
  from scipy import special

  mixture = special.betaln(PRIOR + successes, PRIOR + n - successes) - special.betaln(PRIOR, PRIOR)
  return mixture - special.xlogy(successes, p) - special.xlog1py(n - successes, -p)


def mean_interval(values: Any, confidence: float = 0.95) -> tuple[float, float, float]:
  """Returns (mean, low, high): of a confidence sequence for the mean of normal values of unknown variance.

  The evidence against a candidate is the mixture of likelihood ratios of the t statistic. Its effect sizes are normal
  with mean 0 and variance 1. It is a martingale of mean 1 for the true mean. As Student's interval, it takes the values
  for normal.

  Source: Wang and Ramdas (2025), Sequential Analysis 44, on Gaussian mixtures of scale-invariant likelihood ratios; the
  idea is of Lai (1976), Annals of Statistics 4.

  Args:
    values, confidence: as of `statistics.mean_interval`.

  Returns:
    Floats; the bounds are infinite for four values or fewer at 95 %, else as those of `statistics.mean_interval`.

  Raises:
    UsageError: if `confidence` is not between 0 and 1.
  """
  mean, low, high = statistics.mean_interval(values, confidence)
  if not (math.isfinite(low) and math.isfinite(high)):
    return mean, low, high
  known = np.asarray(values, np.float64)
  known = known[~np.isnan(known)]
  n, growth = known.size, 1 + known.size * _SPREAD
  factor = (growth / (1 - confidence) ** 2) ** (1 / n)
  squared = (n - 1) * (factor - 1) / (1 - factor / growth) if factor < growth else math.inf
  spread = float(known.std(ddof=1)) / math.sqrt(n)
  half = math.inf if math.isinf(squared) else spread * math.sqrt(squared)
  return mean, mean - half, mean + half
