"""A method: a named factory with its settings, before it is given the client or the model that it works on.

Attacks, defenses and malicious servers are functions. Their positional parameters are what they work on; their
keyword-only parameters are their settings. `Method` fixes the settings and leaves the rest open. So one object can be
compared, printed, stored, and built many times with other numbers.
"""

import dataclasses
import functools
import hashlib
import inspect
import re
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from gradleak.core import errors, grammar
from gradleak.core.settings import fitting, limits

M = TypeVar('M', bound='Method')


@dataclasses.dataclass(frozen=True, eq=False)
class Method:
  """A factory with its settings. Methods are equal where factory, settings and arguments are.

  Attributes:
    factory: (*arguments, **settings) -> what is made. Keyword-only parameters annotated `float`, also with a
      `settings.Range`, are its numbers: they may be traced. All other settings decide the compilation.
    given: the settings as they were given, {name: value} in their order; the others have their defaults.
    arguments: positional arguments that were given already; of an attack none.
    kind: what it is called in errors, such as 'attack'.
  """

  factory: Callable
  given: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  arguments: tuple = ()
  kind: str = 'method'

  def __post_init__(self) -> None:
    object.__setattr__(self, 'given', checked(self.factory, self.given, self.kind))

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
  def static(self) -> dict[str, Any]:
    """The settings that are no numbers, by name."""
    return {name: value for name, value in self.settings.items() if name not in _numeric(self.factory)}

  @property
  def structure(self) -> Hashable:
    """What decides the compilation: the factory, the settings that are no numbers, and the arguments."""
    static = tuple((name, identity(value)) for name, value in self.static.items())
    return self.factory, static, tuple(map(identity, self.arguments))

  def build(self, numbers: tuple, *arguments: Any) -> Any:
    """Returns what the factory makes with these numbers, which may be traced, of these positional arguments."""
    given = checked(self.factory, dict(zip(_numeric(self.factory), numbers, strict=True)), self.kind, partial=True)
    return self.factory(*(arguments or self.arguments), **{**self.settings, **given})

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
  return tuple(name for name, one in _settings(factory).items() if limits(one.annotation)[0] == (float,))


def signature(factory: Callable) -> inspect.Signature:
  """Returns the signature of a factory without its positional parameters."""
  return inspect.signature(factory).replace(parameters=list(_settings(factory).values()))


def name_of(factory: Callable) -> str:
  """Returns the name of a function; of another callable, such as a `functools.partial`, that of its type."""
  return getattr(factory, '__name__', type(factory).__name__)


def accepted(function: Callable, **given: Any) -> dict[str, Any]:
  """Returns those of the given arguments that are not None and that a function has a parameter for."""
  given = {name: value for name, value in given.items() if value is not None}
  return {name: given[name] for name in given if name in inspect.signature(function).parameters}


def setting_names(factory: Callable) -> list[str]:
  """Returns the names of a factory's settings, its keyword-only parameters."""
  if not callable(factory):
    raise errors.UsageError(f'{errors.shown(factory)} is no function with settings')
  return list(_settings(factory))


def defaults(factory: Callable) -> dict[str, Any]:
  """Returns the default of each setting that has one."""
  return {name: p.default for name, p in _settings(factory).items() if p.default is not p.empty}


def checked(factory: Callable, given: Mapping[str, Any], kind: str, *, partial: bool = False) -> dict[str, Any]:
  """Returns settings that fit a factory, by name, integers as Python's.

  Args:
    factory: its keyword-only parameters are the settings; their annotations say what fits (`settings.fitting`).
    given: by name.
    kind: what the factory makes, for the message.
    partial: whether settings without a default may be left out.

  Raises:
    UsageError: for a setting that the factory does not have, lacks, or that does not fit.
  """
  known, name = _settings(factory), name_of(factory)
  found = {}
  for key, value in given.items():
    if key not in known:
      raise errors.unknown(f'setting of the {kind} {name}:', key, known or ['(it has none)'])
    found[key] = fitting(f'{name}({key})', value, known[key].annotation)
  for key, parameter in known.items():
    if parameter.default is parameter.empty and key not in given and not partial:
      raise errors.UsageError(f'the {kind} {name} needs the setting {key} by name, as in {name}({key}=…)')
  return found


def identity(value: Any) -> Hashable:
  """Returns what a value is compared by: itself, or where it cannot be hashed (an array), which object it is."""
  try:
    hash(value)
  except TypeError:
    return 'object', id(value)
  return value


def contents(tree: Any) -> Hashable:
  """Returns what a tree is compared by: arrays by what they hold, and other leaves by `identity`."""
  leaves, structure = jax.tree.flatten(tree)
  return structure, tuple(map(_content, leaves))


def program_text(program: Any) -> str:
  """Returns a traced program as text, without the addresses of functions in this process."""
  return re.sub('0x[0-9a-f]+', '', str(program))


def _content(leaf: Any) -> Hashable:
  if not isinstance(leaf, jax.Array | np.ndarray) or leaf.dtype == object:
    return identity(leaf)
  array = np.asarray(jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)
  return str(leaf.dtype), array.shape, hashlib.sha256(np.ascontiguousarray(array).tobytes()).digest()


def _number(value: Any) -> Any:
  """Returns the value as a float; a traced one as it is."""
  return value if isinstance(value, jax.core.Tracer) else float(value)
