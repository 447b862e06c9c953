"""A method: a named factory with its settings, before it is given the client or the model that it works on.

Attacks, defenses and malicious servers are functions. Their positional parameters are what they work on; their
keyword-only parameters are their settings. `Method` fixes the settings and leaves the rest open. So one object can be
compared, printed, stored, and built many times with other numbers.
"""

import contextlib
import dataclasses
import functools
import inspect
import types
import zlib
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import jax

from gradleak.core import errors, grammar

M = TypeVar('M', bound='Method')


@dataclasses.dataclass(frozen=True, eq=False)
class Method:
  """A factory with its settings. Methods are equal where factory, settings and arguments are.

  Attributes:
    factory: (*arguments, **settings) -> what is made. Keyword-only parameters annotated `float` are its numbers: they
      may be traced. All other settings decide the compilation.
    given: the settings as they were given, {name: value} in their order; the others have their defaults.
    arguments: positional arguments that were given already; of an attack none.
    kind: what it is called in errors, such as 'attack'.
  """

  factory: Callable
  given: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  arguments: tuple = ()
  kind: str = 'method'

  def __post_init__(self) -> None:
    check_settings(self.factory, self.given, self.kind)

  @property
  def name(self) -> str:
    """The name of the factory."""
    return name_of(self.factory)

  @property
  def settings(self) -> dict[str, Any]:
    """All settings by name, defaults included."""
    return {**defaults(self.factory), **self.given}

  @property
  def numbers(self) -> tuple[float, ...]:
    """The values of the numeric settings, in the order of the factory's signature."""
    return tuple(_number(self.settings[name]) for name in _numeric(self.factory))

  @property
  def structure(self) -> Hashable:
    """What decides the compilation: the factory, the settings that are no numbers, and the arguments."""
    numeric = _numeric(self.factory)
    static = tuple((name, identity(value)) for name, value in self.settings.items() if name not in numeric)
    return self.factory, static, tuple(map(identity, self.arguments))

  def build(self, numbers: tuple, *arguments: Any) -> Any:
    """Returns what the factory makes with these numbers, which may be traced, of these positional arguments."""
    settings = {**self.settings, **dict(zip(_numeric(self.factory), numbers, strict=True))}
    return self.factory(*(arguments or self.arguments), **settings)

  def changed(self: M, **settings: Any) -> M:
    """Returns the same method with some settings changed."""
    return dataclasses.replace(self, given={**self.given, **settings})

  def __str__(self) -> str:
    return grammar.written(self.name, self.given)

  __repr__ = __str__

  def __eq__(self, other: object) -> bool:
    return type(other) is type(self) and (self.structure, self.numbers) == (other.structure, other.numbers)

  def __hash__(self) -> int:
    return hash((self.structure, self.numbers))


def from_spec(given: grammar.Spec, registry: Mapping[str, Callable], kind: str) -> Method:
  """Returns the registered factory with the settings of a `Spec`, such as a model or a partition.

  Args:
    given: the `Spec`.
    registry: factories by name; their keyword-only parameters are the settings.
    kind: what they make, for errors.

  Raises:
    UsageError: for an unknown name (lists the valid ones), an unknown setting, or a value of the wrong type.
  """
  errors.check_choice(kind, given.name, registry)
  return Method(registry[given.name], dict(given.settings), kind=kind)


@functools.cache
def _settings(factory: Any) -> dict[str, inspect.Parameter]:
  try:
    parameters = inspect.signature(factory).parameters.items()
  except (TypeError, ValueError):
    raise errors.UsageError(f'{errors.shown(factory)} is no function with settings') from None
  return {name: parameter for name, parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}


@functools.cache
def _numeric(factory: Callable) -> tuple[str, ...]:
  return tuple(name for name, parameter in _settings(factory).items() if parameter.annotation is float)


def name_of(factory: Callable) -> str:
  """Returns the name of a function; of another callable, such as a `functools.partial`, that of its type."""
  return getattr(factory, '__name__', type(factory).__name__)


def setting_names(factory: Callable) -> list[str]:
  """Returns the names of a factory's settings, its keyword-only parameters."""
  if not callable(factory):
    raise errors.UsageError(f'{errors.shown(factory)} is no function with settings')
  return list(_settings(factory))


def defaults(factory: Callable) -> dict[str, Any]:
  """Returns the default of each setting that has one."""
  return {name: p.default for name, p in _settings(factory).items() if p.default is not p.empty}


def check_settings(factory: Callable, settings: Mapping[str, Any], kind: str) -> None:
  """Raises `UsageError` for a setting that the factory does not have, lacks, or that is of the wrong type.

  Args:
    factory: its keyword-only parameters are the settings. A setting annotated `float` takes any number.
    settings: by name.
    kind: what the factory makes, for the message.
  """
  known, name = _settings(factory), name_of(factory)
  for key, value in settings.items():
    if key not in known:
      raise errors.unknown(f'setting of the {kind} {name}:', key, known or ['(it has none)'])
    expected = known[key].annotation
    if expected is float:
      errors.check_number(f'{name}({key})', value)
    elif isinstance(expected, type) and (
      not isinstance(value, expected) or (expected is int and isinstance(value, bool))
    ):
      raise errors.UsageError(f'{name}({key}) is {value!r}, expected {expected.__name__}')
  for key, parameter in known.items():
    if parameter.default is parameter.empty and key not in settings:
      raise errors.UsageError(f'the {kind} {name} needs the setting {key} by name, as in {name}({key}=…)')


def identity(value: Any) -> Hashable:
  """Returns what a value is compared by: itself, or where it cannot be hashed (an array), which object it is."""
  try:
    hash(value)
  except TypeError:
    return 'object', id(value)
  return value


def _number(value: Any) -> Any:
  """Returns the value as a float; a traced one as it is."""
  return value if isinstance(value, jax.core.Tracer) else float(value)


def code_of_ones_own(function: Any) -> str:
  """Returns a digest of the functions outside of this package that a function consists of; '' if there is none.

  It covers the body, functions inside it and in its closure, and those of the same module that it names: what an edit
  changes. Other modules, and arrays in a closure, are not covered.
  """
  parts: list[str] = []
  seen: set[int] = set()

  def read(code: types.CodeType) -> None:
    plain = [
      sorted(map(repr, x)) if isinstance(x, frozenset) else x  # whose order differs from process to process
      for x in code.co_consts
      if not isinstance(x, types.CodeType)
    ]
    parts.append(f'{code.co_code.hex()}{code.co_names}{plain}')
    for inner in code.co_consts:
      if isinstance(inner, types.CodeType):
        read(inner)

  def visit(value: Any) -> None:
    if isinstance(value, functools.partial):
      for inner in (value.func, *value.args, *value.keywords.values()):
        visit(inner)
      return
    value = inspect.unwrap(value) if callable(value) else value
    if not isinstance(value, types.FunctionType) or id(value) in seen:
      return
    seen.add(id(value))
    if value.__module__.partition('.')[0] != __name__.partition('.')[0]:
      read(value.__code__)
      named = [value.__globals__.get(name) for name in _names(value.__code__)]
      for one in named:
        if getattr(one, '__module__', None) == value.__module__:
          visit(one)
    for cell in value.__closure__ or ():
      with contextlib.suppress(ValueError):  # empty
        visit(cell.cell_contents)

  visit(function)
  return f'{zlib.crc32("".join(parts).encode()):08x}' if parts else ''


def _names(code: types.CodeType) -> set[str]:
  """Returns the names that a function and those inside it look up."""
  inner = [_names(one) for one in code.co_consts if isinstance(one, types.CodeType)]
  return set(code.co_names).union(*inner)
