"""Intervals against tables, definitions and simulation."""

import math

import numpy as np
import pytest
from scipy import stats

from gradleak import metrics
from gradleak.core import errors, statistics


def test_mean_interval_by_the_table():
  # 1, 2, 3: mean 2, standard error 1/√3; t(0.975, 2) = 4.3027, t(0.95, 2) = 2.9200.
  np.testing.assert_allclose(metrics.mean_interval([1, 2, 3]), [2, 2 - 4.3027 / 3**0.5, 2 + 4.3027 / 3**0.5], rtol=1e-4)
  np.testing.assert_allclose(metrics.mean_interval([1, 2, 3], 0.9)[2], 2 + 2.92 / 3**0.5, rtol=1e-4)


def test_equal_differences_of_fewer_than_six_pairs_have_no_interval():
  equal = np.asarray([0.9, 0.8, 0.7]) - np.asarray([0.8, 0.7, 0.6])  # but for rounding
  assert 0 < np.ptp(equal) < 1e-12
  mean, low, high = statistics.difference_of_means(equal)
  assert mean == pytest.approx(0.1) and np.isnan([low, high]).all()
  assert statistics.difference_of_means([0.5] * 6) == (0.5, 0.5, 0.5)
  assert statistics.difference_of_means([0.5, np.nan, 0.7]) == statistics.mean_interval([0.5, 0.7])
  assert np.isnan(statistics.difference_of_means([])).all()


def test_mean_interval_ignores_nans():
  assert metrics.mean_interval([1, np.nan, 2, 3, np.nan]) == metrics.mean_interval([1, 2, 3])


def test_mean_interval_without_spread_or_without_values():
  assert metrics.mean_interval([0.5] * 4) == (0.5, 0.5, 0.5)
  for values in ([7.0], [7.0, np.nan]):
    mean, low, high = metrics.mean_interval(values)
    assert mean == 7
    assert math.isnan(low) and math.isnan(high)
  assert all(math.isnan(value) for value in metrics.mean_interval([]))
  assert all(math.isnan(value) for value in metrics.mean_interval([np.nan]))


def test_mean_interval_of_an_infinite_value():
  mean, low, high = metrics.mean_interval([1.0, -np.inf])
  assert mean == -math.inf
  assert math.isnan(low) and math.isnan(high)
  assert math.isnan(metrics.mean_interval([np.inf, -np.inf])[0])


def test_mean_interval_covers_as_often_as_it_says():
  draws = np.random.default_rng(0).normal(3, 2, (1500, 5))
  covered = [low <= 3 <= high for _, low, high in map(metrics.mean_interval, draws)]
  # Four standard deviations of the proportion; the normal quantile in place of Student's would cover 0.88.
  assert abs(np.mean(covered) - 0.95) < 4 * (0.95 * 0.05 / 1500) ** 0.5


@pytest.mark.parametrize('successes, n', [(3, 10), (1, 64), (63, 64), (20, 40)])
def test_proportion_interval_solves_the_binomial_tails(successes, n):
  share, low, high = metrics.proportion_interval(successes, n)
  assert share == successes / n
  np.testing.assert_allclose(stats.binom.sf(successes - 1, n, low), 0.025, rtol=1e-6)
  np.testing.assert_allclose(stats.binom.cdf(successes, n, high), 0.025, rtol=1e-6)


def test_proportion_interval_at_the_ends():
  # Closed form of Clopper–Pearson: 1 − (α/2)^(1/n).
  bound = 1 - 0.025 ** (1 / 20)
  np.testing.assert_allclose(metrics.proportion_interval(0, 20), [0, 0, bound], atol=1e-9)
  np.testing.assert_allclose(metrics.proportion_interval(20, 20), [1, 1 - bound, 1], atol=1e-9)
  np.testing.assert_allclose(metrics.proportion_interval(0, 20, 0.9)[2], 1 - 0.05 ** (1 / 20), atol=1e-9)
  share, low, high = metrics.proportion_interval(0, 0)
  assert math.isnan(share)
  assert (low, high) == (0, 1)


@pytest.mark.parametrize('successes, n', [(3, 2), (-1, 2), (1.5, 2), (0, -1), ('a', 2)])
def test_proportion_interval_rejects_impossible_counts(successes, n):
  with pytest.raises(errors.UsageError, match='expected an integer'):
    metrics.proportion_interval(successes, n)


@pytest.mark.parametrize('successes, n', [(0, 20), (3, 10), (5, 10), (20, 20)])
def test_trials_that_repeat_others_do_not_narrow_the_interval(successes, n):
  once = metrics.proportion_interval(successes, n)
  repeated = metrics.proportion_interval(3 * successes, 3 * n, independent=n)
  np.testing.assert_allclose(repeated, once, rtol=1e-12)
  with pytest.raises(errors.UsageError, match='independent'):
    metrics.proportion_interval(successes, n, independent=n + 1)


@pytest.mark.parametrize('confidence', [0, 1, 95, -0.1, np.nan, '0.95'])
def test_confidence_lies_between_zero_and_one(confidence):
  with pytest.raises(errors.UsageError, match='confidence is'):
    metrics.mean_interval([1, 2], confidence)
  with pytest.raises(errors.UsageError, match='confidence is'):
    metrics.proportion_interval(1, 2, confidence)


def test_percentile_threshold():
  pool = np.random.default_rng(1).permutation(101).astype(float)
  assert metrics.percentile_threshold(pool) == 95
  assert metrics.percentile_threshold(pool, q=50) == 50
  assert metrics.percentile_threshold([0.0, 1.0], q=95) == pytest.approx(0.95)
  assert metrics.percentile_threshold([*pool, np.nan, np.nan]) == 95


@pytest.mark.parametrize(('successes', 'n'), [(0, 20), (7, 20), (20, 20), (9123, 10_000)])
def test_wilson_interval_is_scipys(successes, n):
  reference = stats.binomtest(successes, n).proportion_ci(0.95, method='wilson')
  expected = successes / n, reference.low, reference.high
  assert statistics.wilson_interval(successes, n) == pytest.approx(expected, abs=1e-7)


def test_trials_in_groups_by_hand():
  sizes = [5, 3, 0, 4]
  # 12 alike in three groups: their design effect is 4, and t of two degrees of freedom is above that of 11.
  assert statistics.independent_trials(np.ones(12), sizes) == pytest.approx(3 * (2.2010 / 4.3027) ** 2, rel=1e-4)
  # Sums about the mean of 1/3 are −5/3, −1 and 8/3: 3/2 · 98/9 by groups, and 8/3 by single trials.
  whole = np.repeat([0, 0, 1], [5, 3, 4])
  assert statistics.independent_trials(whole, sizes) == pytest.approx(12 / 6.125 * (2.2010 / 4.3027) ** 2, rel=1e-4)
  assert statistics.independent_trials([0.0, 1.0, 1.0], [3]) == 1


def test_trials_in_groups_of_one_are_independent():
  drawn = np.random.default_rng(0).integers(0, 2, 500)
  assert statistics.independent_trials(drawn, np.ones(500, int)) == pytest.approx(500, rel=2e-3)


@pytest.mark.parametrize('groups', [12, 80])
def test_intervals_of_trials_in_groups_cover_the_mean(groups):
  rng, expected = np.random.default_rng(0), 0.6
  covered, alone = 0, 0
  for _ in range(400):
    sizes = rng.integers(1, 60, groups)
    values = rng.random(sizes.sum()) < np.repeat(rng.beta(3, 2, groups), sizes)  # each text has a rate of its own
    share, n = values.mean(), statistics.independent_trials(values, sizes)
    _, low, high = statistics.wilson_interval(share * n, n)
    covered += low <= expected <= high
    _, low, high = statistics.wilson_interval(int(values.sum()), len(values))
    alone += low <= expected <= high
  assert covered > 0.925 * 400 and alone < 0.7 * 400


def test_difference_interval_is_newcombes():
  """Newcombe 1998, table II (a), method 10."""
  assert statistics.difference_interval(56, 70, 48, 80) == pytest.approx((0.2, 0.0524, 0.3339), abs=5e-5)


@pytest.mark.parametrize(('gained', 'lost'), [(0.02, 0.02), (0.1, 0.03), (0.0, 0.05), (0.3, 0.25)])
def test_the_interval_of_pairs_covers_the_difference(gained, lost):
  """Agresti and Min 2005, section 3: coverage is near 95 % or above; here exact, over all outcomes of 60 trials."""
  n = 60
  outcomes = [(i, j) for i in range(n + 1) for j in range(n + 1 - i)]
  chances = stats.multinomial.pmf([(i, j, n - i - j) for i, j in outcomes], n, (gained, lost, 1 - gained - lost))
  covered = 0.0
  for (i, j), chance in zip(outcomes, chances, strict=True):
    if chance > 1e-9:
      share, low, high = statistics.paired_interval(i, j, n)
      assert low <= share == (i - j) / n <= high
      covered += chance * (low <= gained - lost <= high)
  assert covered > 0.935


def test_the_interval_of_pairs_by_hand():
  """Of 1,600 voters 150 changed their mind one way and 86 the other (Agresti 2002, table 10.1): 0.04 ± 0.0187."""
  assert statistics.paired_interval(150, 86, 1600) == pytest.approx((0.04, 0.0212, 0.0587), abs=2e-4)
  assert statistics.paired_interval(86, 150, 1600) == pytest.approx((-0.04, -0.0587, -0.0212), abs=2e-4)
  assert statistics.paired_interval(3, 0, 3) == pytest.approx((1.0, 0.0187, 1.0), abs=1e-3)


def test_a_threshold_without_controls_is_exceeded_by_nothing():
  for pool in ([], [np.nan, np.nan]):
    threshold = metrics.percentile_threshold(pool)
    assert math.isnan(threshold)
    assert not np.any(np.array([-np.inf, 0.0, 100.0, np.inf]) > threshold)


def test_percentile_threshold_with_infinite_controls():
  assert metrics.percentile_threshold([-np.inf, *range(100)]) == 94
  assert metrics.percentile_threshold([-np.inf] * 50) == -np.inf
  assert metrics.percentile_threshold([-np.inf, 2.0]) == 2
  assert metrics.percentile_threshold([0.0, np.inf]) == np.inf


@pytest.mark.parametrize('q', [-1, 101, np.nan])
def test_percentile_must_be_in_range(q):
  with pytest.raises(errors.UsageError, match='q is'):
    metrics.percentile_threshold([1.0], q)


def test_returns_plain_floats():
  results = (*metrics.mean_interval([1, 2]), *metrics.proportion_interval(1, 2), metrics.percentile_threshold([1, 2]))
  assert {type(value) for value in results} == {float}
