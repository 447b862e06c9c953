"""Usage errors: one line that names the value, what was expected and the nearest valid choice."""

import math

import jax
import numpy as np
import pytest

from gradleak import errors


def test_unknown_lists_the_valid_names_and_suggests_the_nearest():
  error = errors.unknown('model', 'lenett', {'mlp': 0, 'lenet': 1, 'cnn': 2})
  assert str(error) == "unknown model 'lenett'; did you mean 'lenet'? (valid: cnn, lenet, mlp)"
  assert 'did you mean' not in str(errors.unknown('model', 'zzz', ['mlp']))
  assert isinstance(error, ValueError)


@pytest.mark.parametrize('value', [0, 1, 0.5, np.float32(0.5), np.int64(1)])
def test_numbers_in_range_pass_unchanged(value):
  assert errors.check_number('rate', value, low=0, high=1) is value


@pytest.mark.parametrize(
  ('value', 'words'),
  [
    (-0.1, 'rate is -0.1, expected a number in [0, 1]; the nearest valid value is 0'),
    (1.1, 'rate is 1.1, expected a number in [0, 1]; the nearest valid value is 1'),
    (math.inf, 'rate is inf, expected a number in [0, 1]; the nearest valid value is 1'),
    (math.nan, 'rate is nan, expected a number in [0, 1]'),
    ('high', "rate is 'high', expected a number in [0, 1]"),
    (None, 'rate is None, expected a number in [0, 1]'),
    ([0.5, 0.6], 'rate is [0.5, 0.6], expected a number in [0, 1]'),
    (True, 'rate is True, expected a number in [0, 1]'),
  ],
)
def test_other_values_raise_one_line(value, words):
  with pytest.raises(errors.UsageError) as caught:
    errors.check_number('rate', value, low=0, high=1)
  assert str(caught.value) == words


@pytest.mark.parametrize('value', [1.5, math.inf, math.nan, 'two', 0, True])
def test_integers(value):
  assert errors.check_number('epochs', 3, low=1, integer=True) == 3
  with pytest.raises(errors.UsageError, match=r'^epochs is .*expected an integer in \[1, inf\]'):
    errors.check_number('epochs', value, low=1, integer=True)


def test_finite_numbers():
  assert errors.check_number('stddev', math.inf, low=0) == math.inf
  assert errors.check_number('stddev', 1e300, low=0, finite=True) == 1e300
  with pytest.raises(errors.UsageError, match=r'stddev is inf, expected a finite number in \[0, inf\]$'):
    errors.check_number('stddev', math.inf, low=0, finite=True)


def test_traced_values_pass_unchecked():
  checked = jax.jit(lambda x: errors.check_number('rate', x, low=0, high=1))
  assert checked(7.0) == 7
