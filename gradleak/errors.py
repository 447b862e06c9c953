"""What a user can cause and mend: one exception, with messages that say how."""

import difflib
import math


class UsageError(ValueError):
  """A value that cannot be used; the message names it, what was expected, and the nearest valid choice.

  Programs print it on one line and exit with status 2.
  """


def unknown(kind, name, valid):
  """Returns the error for a `name` that is no `kind`, listing the `valid` ones, the nearest first to try."""
  valid = sorted(valid)
  near = difflib.get_close_matches(str(name), valid, n=1)
  hint = f'; did you mean {near[0]!r}?' if near else ''
  return UsageError(f'unknown {kind} {name!r}{hint} (valid: {", ".join(valid)})')


def check_number(name, value, *, low=-math.inf, high=math.inf, integer=False):
  """Returns `value` if it is a number in [low, high], else raises `UsageError`. Traced values pass unchecked."""
  import jax  # at call time, so that usage errors cost no import of JAX

  if isinstance(value, jax.core.Tracer):
    return value
  expected = f'{"an integer" if integer else "a number"} in [{low:g}, {high:g}]'
  try:
    number = float(value)
  except (TypeError, ValueError):
    raise UsageError(f'{name} is {value!r}, expected {expected}') from None
  if math.isnan(number) or not low <= number <= high or (integer and not number.is_integer()):
    nearest = (
      ''
      if math.isnan(number) or low <= number <= high
      else f'; the nearest valid value is {low if number < low else high:g}'
    )
    raise UsageError(f'{name} is {value!r}, expected {expected}{nearest}')
  return value
