"""The two exceptions that a user sees, and checks of values that users give."""

import difflib
import math
from collections.abc import Iterable
from typing import Any


class UsageError(ValueError):
  """A value that cannot be used; the message names it, what was expected, and the nearest valid choice.

  Programs print it on one line and exit with status 2.
  """


class DeviceError(RuntimeError):
  """A device failed or has too little memory; the message says when, and how to continue.

  Programs print it on one line and exit with status 1.
  """


def unknown(kind: str, name: object, valid: Iterable[str]) -> UsageError:
  """Returns the error for a `name` that is not among the `valid` ones; it lists these and suggests the nearest.

  Args:
    kind: what is named, such as 'model'.
    name: as the user wrote it.
    valid: all valid names.
  """
  valid = sorted(valid)
  near = difflib.get_close_matches(str(name), valid, n=1)
  hint = f'; did you mean {near[0]!r}?' if near else ''
  return UsageError(f'unknown {kind} {name!r}{hint} (valid: {", ".join(valid)})')


def check_number(
  name: str,
  value: Any,
  *,
  low: float = -math.inf,
  high: float = math.inf,
  integer: bool = False,
  finite: bool = False,
) -> Any:
  """Returns `value` if it is a number in [low, high].

  Args:
    name: what messages call the value.
    value: a real number of Python, NumPy or JAX. Traced values are not checked.
    low, high: inclusive bounds.
    integer: whether its value must be integral.
    finite: whether infinity is refused; with `integer` it always is.

  Raises:
    UsageError: for anything else: NaN, booleans, complex numbers, strings and bytes, integers beyond float64.
  """
  import jax  # not at import time: programs report usage errors before they load JAX

  if isinstance(value, jax.core.Tracer):
    return value
  expected = 'an integer' if integer else 'a finite number' if finite else 'a number'
  if (low, high) != (-math.inf, math.inf):
    expected += f' in [{_bound(low)}, {_bound(high)}]'
  try:
    number = _as_float(value)
  except OverflowError:
    raise UsageError(f'{name} is {shown(value)}, too large for float64; expected {expected}') from None
  if not low <= number <= high:
    nearest = '' if math.isnan(number) else f'; the nearest valid value is {_bound(low if number < low else high)}'
    raise UsageError(f'{name} is {shown(value)}, expected {expected}{nearest}')
  if (integer and not number.is_integer()) or (finite and math.isinf(number)):
    raise UsageError(f'{name} is {shown(value)}, expected {expected}')
  return value


def check_key(name: str, key: Any) -> Any:
  """Returns `key` as a typed scalar PRNG key.

  Args:
    name: what messages call the key.
    key: a scalar of `jax.random.key`, or uint32 [2] of `jax.random.PRNGKey`. Both may be traced.

  Raises:
    UsageError: for anything else, such as an integer seed or a batch of keys.
  """
  import jax
  import numpy as np

  dtype, shape = getattr(key, 'dtype', None), getattr(key, 'shape', None)
  typed = dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)
  if typed and shape == ():
    return key
  if dtype == np.uint32 and shape == (2,):
    return jax.random.wrap_key_data(key, impl='threefry2x32')
  found = shown(key) if dtype is None else f'{"keys" if typed else dtype} of shape {shape}'
  raise UsageError(f'{name} is {found}, expected a single PRNG key, such as {name}=jax.random.key(0)')


def shown(value: Any) -> str:
  """Returns the `repr` of a value on one line of at most 60 characters."""
  try:
    text = ' '.join(repr(value).split())
  except ValueError:  # Python does not print integers of more than 4300 digits
    text = f'an integer of {value.bit_length()} bits'
  return text if len(text) <= 60 else f'{text[:40]}… ({len(text)} characters)'


def _as_float(value: Any) -> float:
  """Returns the value as a float, NaN for what is not a real number; raises OverflowError beyond float64."""
  kind = getattr(getattr(value, 'dtype', None), 'kind', None)
  if isinstance(value, bool | str | bytes | bytearray) or kind in ('b', 'c', 'S', 'U'):
    return math.nan
  try:
    return float(value)
  except (TypeError, ValueError):
    return math.nan


def _bound(number: float) -> str:
  return str(number) if isinstance(number, int) else f'{number:g}'
