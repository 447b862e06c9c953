"""Statistics of trials: confidence intervals of means and proportions, thresholds from control runs."""

import math
import numbers
import statistics
from typing import Any

import numpy as np

from gradleak.core import errors

# With two runs, Student's interval is 12.7 standard errors wide on each side, which says nothing.
MIN_RUNS = 3
EQUAL_RUNS = 6  # the range of six is a 95 % interval of the median; fewer that are equal show no spread
_MOST_DECIMALS = 4  # of a share in per cent
_NORMAL = statistics.NormalDist().inv_cdf(0.975)
_EQUAL = 1e-9  # range of differences that are equal but for rounding


def percent(fraction: float | None, digits: int = 1) -> str:
  """Returns a fraction in per cent, '–' for None; with more decimals where one between would be 0 % or 100 %."""
  if fraction is None:
    return '–'
  text = f'{100 * fraction:.{digits}f}'
  if not 0 < fraction < 1 or 0 < float(text) < 100:
    return f'{text} %'
  if digits < _MOST_DECIMALS:
    return percent(fraction, digits + 1)
  least = 10.0**-digits
  return f'< {least:.{digits}f} %' if fraction < 0.5 else f'> {100 - least:.{digits}f} %'


def mean_interval(values: Any, confidence: float = 0.95) -> tuple[float, float, float]:
  """Returns Student's t interval for the mean of independent trials.

  Args:
    values: numbers, any shape. NaNs (diverged trials) are ignored: report their number beside the mean.
    confidence: between 0 and 1, both excluded.

  Returns:
    (mean, low, high), floats. The bounds are NaN for a single value; all are NaN for none. With an infinite value, the
    mean is infinite (NaN for infinities of both signs) and the bounds are NaN.

  Raises:
    UsageError: if `confidence` is not between 0 and 1.
  """
  from scipy import stats

  _check_confidence(confidence)
  values = _without_nan(values)
  if not values.size:
    return math.nan, math.nan, math.nan
  with np.errstate(invalid='ignore'):
    mean = float(values.mean())
  if values.size == 1 or not math.isfinite(mean):
    return mean, math.nan, math.nan
  half = float(stats.t.ppf((1 + confidence) / 2, values.size - 1) * values.std(ddof=1) / math.sqrt(values.size))
  return mean, mean - half, mean + half


def difference_of_means(differences: Any, confidence: float = 0.95) -> tuple[float, float, float]:
  """Returns `mean_interval` of paired differences; the bounds are NaN for fewer than `EQUAL_RUNS` that are equal."""
  mean, low, high = mean_interval(differences, confidence)
  known = _without_nan(differences)
  if math.isfinite(low) and known.size < EQUAL_RUNS and np.ptp(known) <= _EQUAL:
    return mean, math.nan, math.nan
  return mean, low, high


def proportion_interval(
  successes: int, n: int, confidence: float = 0.95, *, independent: int | None = None
) -> tuple[float, float, float]:
  """Returns the exact (Clopper–Pearson) interval for the proportion of successes in `n` trials.

  Args:
    successes: integer in [0, n].
    n: integer ≥ 0.
    confidence: between 0 and 1, both excluded; the interval covers the true proportion at least this often.
    independent: how many of the trials are independent, by default all. The others repeat these (an image under another
      seed), and may tell nothing new: the interval is that of the same proportion among so many trials.

  Returns:
    (proportion, low, high), floats in [0, 1]; (nan, 0, 1) for n = 0.

  Raises:
    UsageError: if a number is out of range.
  """
  from scipy import stats

  _check_confidence(confidence)
  n = int(errors.check_number('n', n, low=0, integer=True))
  successes = int(errors.check_number('successes', successes, low=0, high=n, integer=True))
  if n == 0:
    return math.nan, 0.0, 1.0
  sure = n if independent is None else int(errors.check_number('independent', independent, low=1, high=n, integer=True))
  hits, tail = successes / n * sure, (1 - confidence) / 2
  low = float(stats.beta.ppf(tail, hits, sure - hits + 1)) if successes else 0.0
  high = float(stats.beta.isf(tail, hits + 1, sure - hits)) if successes < n else 1.0
  return successes / n, low, high


def differ(successes: int, n: int, others: int, m: int, level: float = 0.05) -> bool:
  """Returns whether `successes` of n and `others` of m are too far apart for equal rates, by Fisher's exact test."""
  from scipy.stats import fisher_exact

  return bool(fisher_exact([[successes, n - successes], [others, m - others]])[1] < level)


def independent_trials(values: Any, sizes: Any) -> float:
  """Returns how many independent trials tell as much of a mean as trials in groups, such as the tokens of texts.

  The trials of a group may be alike. With their number N and that of the groups G, N / deff · (t_{N−1} / t_{G−1})²
  are independent, at most N (Korn and Graubard 1998). The t are quantiles of Student's distributions at 0.975.

  The design effect deff (Kish 1965) is the variance of the mean by whole groups over that by single trials. The first
  is linearised, as the sizes of groups differ. Where all values are equal, deff is N / G.

  Args:
    values: of the trials, group by group, float [N].
    sizes: the number of trials of each group, int [G], with the sum N.
  """
  from scipy import stats

  values, sizes = np.asarray(values, np.float64), np.asarray(sizes)
  n, groups, rest = len(values), int(np.count_nonzero(sizes)), values - values.mean()
  if groups < 2:
    return 1.0
  single = float(np.sum(rest**2))
  sums = np.bincount(np.repeat(np.arange(len(sizes)), sizes), weights=rest)
  effect = groups / (groups - 1) * float(np.sum(sums**2)) / single if single else n / groups
  return float(min(n, n / effect * (stats.t.ppf(0.975, n - 1) / stats.t.ppf(0.975, groups - 1)) ** 2))


def wilson_interval(successes: float, n: float) -> tuple[float, float, float]:
  """Returns (share, low, high): Wilson's 95 % interval of `successes` among `n` > 0 trials.

  Neither has to be a whole number, see `independent_trials`.
  """
  share, square = successes / n, _NORMAL**2
  centre = share + square / (2 * n)
  half = _NORMAL * math.sqrt(share * (1 - share) / n + square / (4 * n**2))
  low, high = ((centre + side) / (1 + square / n) for side in (-half, half))
  return share, max(0.0, low) if successes else 0.0, min(1.0, high) if successes < n else 1.0


def difference_interval(successes: float, n: float, others: float, m: float) -> tuple[float, float, float]:
  """Returns (difference of two shares, low, high), by Newcombe's hybrid of their Wilson intervals (1998, method 10).

  Args:
    successes, n: of the share from which the other is subtracted.
    others, m: of the other one; the two are independent.
  """
  p, low_p, high_p = wilson_interval(successes, n)
  q, low_q, high_q = wilson_interval(others, m)
  return p - q, p - q - math.hypot(p - low_p, high_q - q), p - q + math.hypot(high_p - p, q - low_q)


def paired_interval(gained: float, lost: float, n: float) -> tuple[float, float, float]:
  """Returns (difference of two fractions of the same trials, low, high), by Agresti and Min's adjusted Wald (2005).

  It is narrower than `difference_interval` where most trials end alike on both sides. Half a trial is added to each of
  the four cells.

  Args:
    gained: trials that succeed on the first side alone.
    lost: on the other side alone, the fraction of which is subtracted.
    n: trials, > 0.
  """
  first, second, total = gained + 0.5, lost + 0.5, n + 2
  centre = (first - second) / total
  half = _NORMAL * math.sqrt(first + second - total * centre**2) / total
  return (gained - lost) / n, max(-1.0, centre - half), min(1.0, centre + half)


def percentile_threshold(values: Any, q: float = 95) -> float:
  """Returns the threshold that a successful trial exceeds: the `q`-th percentile of control runs.

  Args:
    values: the controls' values of a metric, larger is better; any shape. NaNs (diverged runs) are ignored.
    q: in [0, 100]; percentiles between two runs are interpolated linearly, or the higher one if either is infinite.

  Returns:
    A float; NaN, which nothing exceeds, if all control runs diverged.

  Raises:
    UsageError: if `q` is not in [0, 100].
  """
  errors.check_number('q', q, low=0, high=100)
  values = _without_nan(values)
  if not values.size:
    return math.nan
  with np.errstate(invalid='ignore'):
    threshold = np.percentile(values, q)
  # Interpolation between −inf and a number is −inf, a threshold that any trial would exceed.
  return float(threshold if np.isfinite(threshold) else np.percentile(values, q, method='higher'))


def _without_nan(values: Any) -> np.ndarray:
  values = errors.host_array('values', values).astype(np.float64).ravel()
  return values[~np.isnan(values)]


def _check_confidence(confidence: Any) -> None:
  if not (isinstance(confidence, numbers.Real) and 0 < confidence < 1):  # type: ignore[operator]
    raise errors.UsageError(f'confidence is {confidence!r}, expected a number between 0 and 1, such as 0.95')
