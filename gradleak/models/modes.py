"""How the mode of training reaches a network: by an argument of its call, or by a flag of its constructor."""

import inspect
from collections.abc import Callable, Iterable

from gradleak.core import errors

TRAINING = ('train', 'training', 'is_training')
EVALUATION = ('deterministic', 'use_running_average')
NAMES = (*TRAINING, *EVALUATION)


def arguments(function: Callable, given: int, what: str) -> tuple[str, ...]:
  """Returns those of `NAMES` that a function takes.

  Args:
    function: a network's call.
    given: how many arguments it is given by their places, such as the images.
    what: how messages call it.

  Raises:
    UsageError: if it requires any other argument.
  """
  try:
    parameters = list(inspect.signature(function).parameters.values())
  except ValueError:  # functions written in C may have no signature
    return ()
  variable = [one for one in parameters if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
  named = [one for one in parameters if one not in variable][given:]
  taken = tuple(one.name for one in named if one.name in NAMES and one.kind is not one.POSITIONAL_ONLY)
  for one in named:
    if one.default is one.empty and one.name not in taken:
      raise errors.UsageError(
        f'{what} requires the argument {one.name!r}, which is not understood: give it a default, or if it is the mode '
        f"of training call it 'train' (understood: {', '.join(NAMES)})"
      )
  return taken


def values(names: Iterable[str], train: bool) -> dict[str, bool]:
  """Returns the value of each of `NAMES` for a network that trains, or that does not."""
  return {name: train if name in TRAINING else not train for name in names}
