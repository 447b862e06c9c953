"""Flags made of settings objects: one flag per field, with its help text and its default."""

import dataclasses
import types
import typing
from typing import Any

from absl import flags

_KINDS = {str: 'string', int: 'integer', float: 'float'}


def define(settings: type, *, without: tuple[str, ...] = (), **defaults: Any) -> dict[str, flags.FlagHolder]:
  """Defines a flag for each field of a settings dataclass and returns their holders by name.

  Args:
    settings: the dataclass, its fields made by `gradleak.core.settings.setting`.
    without: fields without a flag.
    **defaults: replace some of its defaults.
  """
  holders = {}
  for field in dataclasses.fields(settings):
    if field.name in without:
      continue
    default = defaults.get(field.name, field.default)
    kind = getattr(flags, f'DEFINE_{_KINDS[_plain(field.type)]}')
    holders[field.name] = kind(field.name, default, field.metadata['help'])
  return holders


def made(settings: type, holders: dict[str, flags.FlagHolder], **changes: Any) -> Any:
  """Returns the settings object that the flags describe, some fields replaced."""
  return settings(**{**{name: holder.value for name, holder in holders.items()}, **changes})


def _plain(annotation: Any) -> type:
  """Returns the type of a field that may be None."""
  if isinstance(annotation, types.UnionType):
    return next(one for one in typing.get_args(annotation) if one is not type(None))
  return annotation
