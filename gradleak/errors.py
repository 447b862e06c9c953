"""What a user can cause and mend, and what a device may do: two exceptions, with messages that say how to go on."""

import difflib
import math


class UsageError(ValueError):
  """A value that cannot be used; the message names it, what was expected, and the nearest valid choice.

  Programs print it on one line and exit with status 2.
  """


class DeviceError(RuntimeError):
  """A device failed or has too little memory; the message says when, and how to go on.

  Programs print it on one line and exit with status 1.
  """


def unknown(kind, name, valid):
  """Returns the error for a `name` that is no `kind`, listing the `valid` ones, the nearest first to try."""
  valid = sorted(valid)
  near = difflib.get_close_matches(str(name), valid, n=1)
  hint = f'; did you mean {near[0]!r}?' if near else ''
  return UsageError(f'unknown {kind} {name!r}{hint} (valid: {", ".join(valid)})')


def check_number(name, value, *, low=-math.inf, high=math.inf, integer=False, finite=False):
  """Returns `value` if it is a number in [low, high], else raises `UsageError`.

  NaN and booleans are no numbers here; infinity is one, unless it must be `finite` or `integer`. Traced values pass
  unchecked.
  """
  import jax  # at call time, so that usage errors cost no import of JAX

  if isinstance(value, jax.core.Tracer):
    return value
  expected = 'an integer' if integer else 'a finite number' if finite else 'a number'
  if (low, high) != (-math.inf, math.inf):
    expected += f' in [{_bound(low)}, {_bound(high)}]'
  try:
    number = math.nan if isinstance(value, bool) else float(value)
  except (TypeError, ValueError):
    number = math.nan
  if not low <= number <= high:
    nearest = '' if math.isnan(number) else f'; the nearest valid value is {_bound(low if number < low else high)}'
    raise UsageError(f'{name} is {value!r}, expected {expected}{nearest}')
  if (integer and not number.is_integer()) or (finite and math.isinf(number)):
    raise UsageError(f'{name} is {value!r}, expected {expected}')
  return value


def _bound(number):
  return str(number) if isinstance(number, int) else f'{number:g}'
