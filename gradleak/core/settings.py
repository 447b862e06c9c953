"""Settings written once: their ranges stand in annotations, and in the fields of frozen dataclasses.

A method's factory annotates its settings, as in `rate: Annotated[float, Range(0, 1)]`. The fields of a dataclass carry
help texts. A main call takes them as keyword arguments, a program makes flags of them, an experiment replaces some of
them, and `config.json` stores them.
"""

import dataclasses
import functools
import inspect
import math
import operator
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any, ParamSpec, TypeVar

from gradleak.core import errors

P = ParamSpec('P')
S = TypeVar('S')
T = TypeVar('T')


@dataclasses.dataclass(frozen=True)
class Range:
  """The numbers that a setting may be.

  Attributes:
    low, high: inclusive bounds.
    finite: whether infinity is refused.
  """

  low: float = -math.inf
  high: float = math.inf
  finite: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Choice:
  """The texts that a setting may be; a mapping, such as a registry, stands for its names."""

  names: Collection[str]


Count = Annotated[int, Range(1)]
Fraction = Annotated[float, Range(0, 1)]
NonNegative = Annotated[float, Range(0, finite=True)]
Positive = Annotated[float, Range(1e-12)]  # infinity included: a bound that binds nothing


def limits(annotation: Any) -> tuple[tuple[Any, ...], Range | Choice | None]:
  """Returns the types that an annotation allows, and its `Range` or `Choice`, None where it has none."""
  found = None
  if typing.get_origin(annotation) is Annotated:
    annotation, *rest = typing.get_args(annotation)
    found = next((one for one in rest if isinstance(one, Range | Choice)), None)
  return typing.get_args(annotation) if not isinstance(annotation, type) else (annotation,), found


def fitting(name: str, value: Any, annotation: Any) -> Any:
  """Returns a value that fits an annotation, an integer as Python's.

  Args:
    name: what messages call the value.
    value: what is checked. None passes where the annotation allows it.
    annotation: `int`, `float` or another type, or `Annotated` with a `Range` or a `Choice`. A `float` is any real
      number, also a traced one, which is not checked. Other unions and generic types allow everything.

  Raises:
    UsageError: for a value of another type, out of its range or not among its choices.
  """
  kinds, limit = limits(annotation)
  if isinstance(limit, Choice):
    return value if value is None and type(None) in kinds else errors.check_choice(name, value, limit.names)
  if limit is not None or kinds in ((int,), (float,)):
    if value is None and type(None) in kinds:
      return None
    integer, within = float not in kinds, limit or Range()
    errors.check_number(name, value, low=within.low, high=within.high, integer=integer, finite=within.finite)
    return operator.index(value) if integer else value
  if isinstance(annotation, type) and annotation is not Any:  # which is a class since Python 3.11
    errors.check_instance(name, value, annotation, annotation.__name__)
  return value


def ranged(function: Callable[P, T]) -> Callable[P, T]:
  """Decorates a function: at each call, its arguments are checked against a `Range` or a `Choice` of theirs.

  Raises (when it is called):
    UsageError: names the function, the argument and its value.
  """
  signature = inspect.signature(function)
  limited = {name: one.annotation for name, one in signature.parameters.items() if limits(one.annotation)[1]}

  @functools.wraps(function)
  def call(*args: P.args, **kwargs: P.kwargs) -> T:
    bound = signature.bind(*args, **kwargs)
    for name, annotation in limited.items():
      if name in bound.arguments:
        bound.arguments[name] = fitting(f'{function.__name__}({name})', bound.arguments[name], annotation)
    return function(*bound.args, **bound.kwargs)

  return call


def check_fields(made: Any) -> None:
  """Checks the fields of a frozen dataclass against a `Range` or a `Choice` of theirs; integers become Python's.

  Raises:
    UsageError: names the field and its value.
  """
  for field in dataclasses.fields(made):
    if limits(field.type)[1]:
      object.__setattr__(made, field.name, fitting(field.name, getattr(made, field.name), field.type))


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


def paired(what: str, changes: Mapping[str, Any], **given: tuple[type, Any]) -> list[Any]:
  """Returns the settings objects of a main call, each with the changes that are its fields.

  Args:
    what: the main call, for the message.
    changes: name of a field -> value.
    **given: by the name of the argument, (dataclass, the object that was given or None for its defaults).

  Raises:
    UsageError: for a name that none of them has, and for an object of another type.
  """
  names = {name: [field.name for field in dataclasses.fields(kind)] for name, (kind, _) in given.items()}
  for name in changes:
    errors.check_choice(f'setting of {what}:', name, [one for each in names.values() for one in each])
  return [
    dataclasses.replace(
      kind() if one is None else errors.check_instance(name, one, kind, kind.__name__),
      **{field: value for field, value in changes.items() if field in names[name]},
    )
    for name, (kind, one) in given.items()
  ]
