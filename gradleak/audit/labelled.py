"""Methods with what results call them."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from gradleak.core import errors
from gradleak.defenses.defense import as_defense


class Labelled(NamedTuple):
  """A method with what results call it; a label is for people and decides nothing."""

  label: str
  method: Any


def text(one: Labelled) -> str:
  """Returns what a label stands for: another version of a user's own method is another method.

  So is an attack whose `file` has another content.
  """
  told = {'version': one.method.version, 'content': getattr(one.method, 'content', '')}
  return ', '.join([str(one.method), *(f'{name} {value}' for name, value in told.items() if value)])


def listed(entries: Any) -> list | Mapping:
  """Returns what a user gives as a list of methods: a mapping as it is, and a single method, or None, as a list."""
  if isinstance(entries, Mapping):
    return entries
  named = hasattr(entries, '_fields')  # a named tuple, such as a transformation or a model
  single = named or isinstance(entries, str | bytes) or not isinstance(entries, Iterable)
  return [entries] if single else list(entries)


def labelled(kind: str, entries: Any, convert: Callable[[Any], Any]) -> list[Labelled]:
  """Returns the methods of a list, or of a dict {label: method}, with distinct labels.

  Raises:
    UsageError: if there is none, or one is listed twice.
  """
  entries = listed(entries)
  pairs = list(entries.items()) if isinstance(entries, Mapping) else [(None, entry) for entry in entries]
  if not pairs:
    raise errors.UsageError(f'no {kind} is given')
  found: list[Labelled] = []
  for label, entry in pairs:
    method = convert(entry)
    label = str(method) if label is None else errors.check_text(f'the label of the {kind}', str(label))
    if any(other.method == method and other.label == label for other in found):
      raise errors.UsageError(f'the {kind} {label!r} is listed twice')
    others = [other.label for other in found]
    alike = sum(other == label or other.startswith(f'{label} #') for other in others)
    found.append(Labelled(f'{label} #{alike + 1}' if label in others else label, method))
  return found


def named_defenses(entries: Any) -> list[Labelled]:
  """Returns the defenses of a list or dict with distinct labels; what is no defense is labelled 'none', nothing else.

  Raises:
    UsageError: if there is none, one is listed twice, or a defense is labelled 'none'.
  """
  found = labelled('defense', entries, as_defense)
  found = [one if one.method.stages else one._replace(label='none') for one in found]
  named_none = [one for one in found if one.label == 'none']
  if len(named_none) > 1 or any(one.method.stages for one in named_none):
    raise errors.UsageError("'none' is the label of no defense, and stands once: another entry bears it, too")
  return found
