"""The small language of the programs: `name(setting=value, …)`; `+` chains, `;` separates entries, `|` spans a grid.

    none; gaussian(stddev=0.01|0.1); prune(rate=0.9)+laplace(scale=0.001)

A factory's keyword arguments are its settings. One annotated `float` is numeric: it is traced, so that a sweep over ten
values compiles once. All others (integers, words, switches) are structure.
"""

import ast
import inspect
import itertools
import re
from collections.abc import Callable
from typing import NamedTuple

from gradleak import errors

_NAME = re.compile(r'[A-Za-z_][A-Za-z_0-9]*')
_GRID = re.compile(r'(?<==)([^,;()=]*\|[^,;()=]*)')


class Spec(NamedTuple):
  """A name with its settings, as written by a user; `str(spec)` is its canonical form."""

  name: str
  settings: tuple[tuple[str, object], ...] = ()

  def __str__(self):
    inside = ','.join(f'{key}={value}' for key, value in self.settings)
    return f'{self.name}({inside})' if inside else self.name


def parse(text, kind):
  """Returns the `Spec` of one `name(setting=value, …)`; `kind` names it in errors.

  Raises:
    UsageError: if the text is not of that form.
  """
  text = text.strip()
  name, bracket, rest = text.partition('(')
  name = name.strip()
  if not _NAME.fullmatch(name) or (bracket and not rest.endswith(')')) or (not bracket and ')' in name):
    raise errors.UsageError(f'cannot read the {kind} {text!r}, expected name or name(setting=value,…)')
  settings = {}
  for item in filter(None, (item.strip() for item in _split(rest[:-1] if bracket else '', ',', text, kind))):
    key, equals, value = (part.strip() for part in item.partition('='))
    if not equals or not value or not _NAME.fullmatch(key):
      raise errors.UsageError(f'cannot read {item!r} in the {kind} {text!r}, expected setting=value')
    if key in settings:
      raise errors.UsageError(f'the {kind} {text!r} sets {key!r} twice')
    settings[key] = _value(value)
  return Spec(name, tuple(settings.items()))


def parse_chain(text, kind):
  """Returns the tuple of `Spec`s of `a(…)+b(…)`."""
  parts = _split(text, '+', text, kind)
  if not all(part.strip() for part in parts):
    raise errors.UsageError(f'the {kind} {text!r} is empty or has an empty member')
  return tuple(parse(part, kind) for part in parts)


def parse_list(text, kind):
  """Returns the entries of a list separated by `;`, as stripped strings, grids written out (`expand`).

  Raises:
    UsageError: if the list is empty, an entry is empty, or one stands in it twice.
  """
  entries = [entry.strip() for entry in text.split(';')]
  if not all(entries):
    raise errors.UsageError(f'the list of {kind}s {text!r} is empty or has an empty entry')
  entries = [each for entry in entries for each in expand(entry, kind)]
  for entry in entries:
    if entries.count(entry) > 1:
      raise errors.UsageError(f'the {kind} {entry!r} is listed twice')
  return entries


def expand(text, kind):
  """Returns the texts that a grid stands for: `gaussian(stddev=0.01|0.1)` is two, and several grids multiply.

  Raises:
    UsageError: for an empty value among the alternatives.
  """
  pieces = _GRID.split(text)
  grids = [[value.strip() for value in piece.split('|')] for piece in pieces[1::2]]
  if not all(value for values in grids for value in values):
    raise errors.UsageError(f'the {kind} {text!r} has an empty value in a grid, expected as in (setting=1|2|3)')
  texts = []
  for values in itertools.product(*grids):
    members = [*itertools.chain.from_iterable(zip(pieces[::2], values, strict=False)), pieces[-1]]
    texts.append(''.join(members))
  return texts


def resolve(spec, registry, kind):
  """Returns (factory, static settings, numeric settings) of `spec`, defaults not filled in.

  Raises:
    UsageError: for an unknown name (lists the valid ones), an unknown setting, or a value of the wrong type.
  """
  if spec.name not in registry:
    raise errors.unknown(kind, spec.name, registry)
  factory = registry[spec.name]
  parameters = {
    key: parameter
    for key, parameter in inspect.signature(factory).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
  }
  static, numeric = {}, {}
  for key, value in spec.settings:
    if key not in parameters:
      raise errors.unknown(f'setting of the {kind} {spec.name}:', key, parameters or ['(it has none)'])
    expected = parameters[key].annotation
    if expected is float:
      numeric[key] = float(errors.check_number(f'{spec.name}({key})', value))
    else:
      if (isinstance(expected, type) and not isinstance(value, expected)) or (
        expected is int and isinstance(value, bool)
      ):
        raise errors.UsageError(f'{spec.name}({key}) is {value!r}, expected {expected.__name__}')
      static[key] = value
  for key, parameter in parameters.items():
    if parameter.default is parameter.empty and key not in static and key not in numeric:
      raise errors.UsageError(f'the {kind} {spec.name} needs the setting {key}, as in {spec.name}({key}=…)')
  return factory, static, numeric


class Template(NamedTuple):
  """A factory with its structure fixed and its numbers open.

  Attributes:
    structure: the name and all settings that decide the compilation; hashable.
    numbers: the values of the numeric settings, defaults included, in the order of the factory's signature.
    build: (numbers, *arguments, **extra keyword arguments) -> what the factory returns.
    settings: all settings by name, defaults included.
  """

  structure: tuple
  numbers: tuple[float, ...]
  build: Callable
  settings: dict


def template(spec, registry, kind):
  """Returns the `Template` of `spec`; raises as `resolve` does."""
  factory, static, numeric = resolve(spec, registry, kind)
  parameters = {
    key: parameter
    for key, parameter in inspect.signature(factory).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
  }
  numeric = {
    key: float(numeric.get(key, parameter.default))
    for key, parameter in parameters.items()
    if parameter.annotation is float
  }

  def build(numbers, *args, **extra):
    return factory(*args, **static, **dict(zip(numeric, numbers, strict=True)), **extra)

  defaults = {key: parameter.default for key, parameter in parameters.items()}
  structure = (spec.name, tuple(sorted(static.items())))
  return Template(structure, tuple(numeric.values()), build, {**defaults, **static, **numeric})


def _split(text, separator, whole, kind):
  """Splits at separators outside parentheses."""
  parts, depth = [''], 0
  for character in text:
    depth += (character == '(') - (character == ')')
    if depth < 0:
      break
    if character == separator and depth == 0:
      parts.append('')
    else:
      parts[-1] += character
  if depth != 0:
    raise errors.UsageError(f'unbalanced parentheses in the {kind} {whole!r}')
  return parts


def _value(text):
  """Returns the number, switch or word that `text` spells (`1e-4+x` never gets here: `+` is split first)."""
  words = {'true': True, 'false': False, 'none': None}
  if text.lower() in words:
    return words[text.lower()]
  try:
    value = ast.literal_eval(text)
  except (ValueError, SyntaxError):
    value = float(text) if text.lower() in ('inf', '-inf', 'nan') else text
  return value
