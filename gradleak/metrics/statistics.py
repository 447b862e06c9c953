"""From figures of trials to statements about them: intervals of means and shares, thresholds from a control pool."""

import math
import numbers

import numpy as np

from gradleak import errors


def mean_interval(values, confidence=0.95):
  """Student's t interval for the mean of independent trials.

  Args:
    values: numbers, any shape. NaNs (diverged trials) are left out: report their number beside the mean.
    confidence: between 0 and 1, both excluded.

  Returns:
    (mean, low, high), floats. Of a single value, (mean, nan, nan); of none, three NaNs; an infinite value leaves an
    infinite mean, or NaN where infinities cancel, and no interval.

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


def proportion_interval(successes, n, confidence=0.95):
  """Exact (Clopper–Pearson) interval for the share of successes in `n` independent trials.

  Args:
    successes: integer in [0, n].
    n: integer ≥ 0.
    confidence: between 0 and 1, both excluded; the interval covers the true share at least that often.

  Returns:
    (share, low, high), floats in [0, 1]; (nan, 0, 1) where n = 0.

  Raises:
    UsageError: if a number is out of range.
  """
  from scipy import stats

  _check_confidence(confidence)
  n = int(errors.check_number('n', n, low=0, integer=True))
  successes = int(errors.check_number('successes', successes, low=0, high=n, integer=True))
  if n == 0:
    return math.nan, 0.0, 1.0
  interval = stats.binomtest(successes, n).proportion_ci(confidence, method='exact')
  return successes / n, float(interval.low), float(interval.high)


def percentile_threshold(values, q=95):
  """The bar that a trial must exceed to count as a success: the `q`-th percentile of a pool of control runs.

  Args:
    values: the controls' figures, of a metric of which more is better; any shape. NaNs (diverged runs) are left out.
    q: in [0, 100]; between two runs the percentile is interpolated linearly, or is the higher where one is infinite.

  Returns:
    A float; NaN, which nothing exceeds, if no control run ended with a figure.

  Raises:
    UsageError: if `q` is not in [0, 100].
  """
  errors.check_number('q', q, low=0, high=100)
  values = _without_nan(values)
  if not values.size:
    return math.nan
  with np.errstate(invalid='ignore'):
    threshold = np.percentile(values, q)
  # Between −inf and a number every interpolation is −inf, a bar that any trial would clear.
  return float(threshold if np.isfinite(threshold) else np.percentile(values, q, method='higher'))


def _without_nan(values):
  values = np.asarray(values, np.float64).ravel()
  return values[~np.isnan(values)]


def _check_confidence(confidence):
  if not (isinstance(confidence, numbers.Real) and 0 < confidence < 1):
    raise errors.UsageError(f'confidence is {confidence!r}, expected a number between 0 and 1, such as 0.95')
