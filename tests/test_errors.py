"""Usage errors: one line that names the value, what was expected and the nearest valid choice."""

import math

import jax
import numpy as np
import pytest

from gradleak.core import errors


def test_unknown_lists_the_valid_names_and_suggests_the_nearest():
  error = errors.unknown('model', 'lenett', {'mlp': 0, 'lenet': 1, 'cnn': 2})
  assert str(error) == "unknown model 'lenett'; did you mean 'lenet'? (valid: cnn, lenet, mlp)"
  assert 'did you mean' not in str(errors.unknown('model', 'zzz', ['mlp']))
  assert isinstance(error, ValueError)


def test_of_many_names_four_are_said():
  assert errors.some(list('abcd')) == 'a, b, c, d' and errors.some(list('abcdef')) == 'a, b, c, d and 2 more'


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
    (np.True_, 'rate is np.True_, expected a number in [0, 1]'),
    ('0.5', "rate is '0.5', expected a number in [0, 1]"),
    (b'1', "rate is b'1', expected a number in [0, 1]"),
    (0.5 + 0j, 'rate is (0.5+0j), expected a number in [0, 1]'),
    (np.complex64(0.5), 'rate is np.complex64(0.5+0j), expected a number in [0, 1]'),
    pytest.param(
      10**399,
      f'rate is 1{39 * "0"}… (400 characters), too large for float64; expected a number in [0, 1]',
      id='400 digits',
    ),
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


def test_integers_beyond_float64_are_refused_without_bounds():
  for options in ({}, {'integer': True}, {'finite': True}):
    with pytest.raises(
      errors.UsageError, match=r'^seed is 10*… \(400 characters\), too large for float64; expected an? '
    ):
      errors.check_number('seed', 10**399, **options)
  with pytest.raises(errors.UsageError, match=r'^seed is an integer of 20001 bits, too large'):
    errors.check_number('seed', -(2**20000))  # Python does not print it


def test_keys_are_returned_typed():
  key = jax.random.key(3)
  assert errors.check_key('key', key) is key
  for old in (jax.random.PRNGKey(3), np.asarray(jax.random.PRNGKey(3))):
    typed = errors.check_key('key', old)
    assert typed.shape == () and typed.dtype == key.dtype
    np.testing.assert_array_equal(jax.random.bits(typed, (4,)), jax.random.bits(key, (4,)))
  traced = jax.jit(lambda *keys: [jax.random.bits(errors.check_key('key', each)) for each in keys])
  new, old = traced(key, jax.random.PRNGKey(3))
  assert new == old == jax.random.bits(key)


@pytest.mark.parametrize(
  ('value', 'words'),
  [
    (0, 'seed is 0, '),
    ('zero', "seed is 'zero', "),
    (None, 'seed is None, '),
    (jax.random.key, 'seed is <function key'),
    (jax.random.split(jax.random.key(0), 3), 'seed is keys of shape (3,), '),
    (jax.random.split(jax.random.PRNGKey(0), 3), 'seed is uint32 of shape (3, 2), '),
    (np.zeros(2, np.int32), 'seed is int32 of shape (2,), '),
    (np.uint32(1), 'seed is uint32 of shape (), '),
  ],
)
def test_other_values_than_keys_are_named(value, words):
  with pytest.raises(errors.UsageError) as caught:
    errors.check_key('seed', value)
  assert str(caught.value).startswith(words)
  assert str(caught.value).endswith('expected a single PRNG key, such as seed=jax.random.key(0)')


def test_traced_values_pass_unchecked():
  checked = jax.jit(lambda x: errors.check_number('rate', x, low=0, high=1))
  assert checked(7.0) == 7


def test_errors_of_traced_code_are_raised_without_the_frames_of_jax():
  def traced(x):
    raise errors.UsageError('six samples cannot be divided')

  with pytest.raises(errors.UsageError, match='six samples') as found, errors.raised_here():
    jax.eval_shape(traced, 1.0)
  assert not getattr(found.value, '__notes__', []) and found.value.__cause__ is None
  assert not any('jax' in str(entry.path) for entry in found.traceback)
