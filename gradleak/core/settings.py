"""Settings written once: frozen dataclasses whose fields carry their help text and their range.

A main call takes them as keyword arguments, a program makes flags of them, an experiment replaces some of them, and
`config.json` stores them.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

from gradleak.core import errors

S = TypeVar('S')


def setting(default: Any, help: str, *, group: str = '', **range_: Any) -> Any:
  """Returns the dataclass field of one setting.

  Args:
    default: its default; None where it may be left out.
    help: one sentence, for programs and documents.
    group: the heading that programs list it under.
    **range_: `choices` (a sequence of words), or `low`, `high`, `integer`, `finite` of `errors.check_number`.
  """
  return dataclasses.field(default=default, metadata={'help': help, 'group': group, 'range': range_})


def check(settings: Any) -> None:
  """Checks every field of a settings object against its range; None passes where it is the default.

  Raises:
    UsageError: for a value out of range.
  """
  for field in dataclasses.fields(settings):
    value, limits = getattr(settings, field.name), dict(field.metadata['range'])
    choices: Sequence[str] | None = limits.pop('choices', None)
    if value is None and field.default is None:
      continue
    if choices is not None:
      errors.check_choice(field.name, value, choices)
    elif limits:
      errors.check_number(field.name, value, **limits)


def replaced(settings: S, what: str, /, **changes: Any) -> S:
  """Returns a settings object with some fields replaced.

  Args:
    settings: the object.
    what: what takes these settings, for the message.
    **changes: by name.

  Raises:
    UsageError: for a field that it does not have.
  """
  if not dataclasses.is_dataclass(settings) or isinstance(settings, type):
    raise errors.UsageError(f'settings of {what} are {errors.shown(settings)}, expected a settings object')
  names = [field.name for field in dataclasses.fields(settings)]
  for name in changes:
    errors.check_choice(f'setting of {what}:', name, names)
  return dataclasses.replace(settings, **changes)  # type: ignore[type-var]
