"""The two exceptions that a user sees, and checks of values that users give."""

import contextlib
import difflib
import inspect
import math
import operator
import os
import pathlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

_LONGEST = 1000  # characters of a text that a user gives, and of a message


class UsageError(ValueError):
  """A value that cannot be used; the message names it, what was expected, and the nearest valid choice.

  Programs print it on one line and exit with status 2. The message is one line of printable text, of at most 1,000
  characters, for any text that it quotes.
  """

  def __init__(self, message: object) -> None:
    text = ' '.join(str(message).split()).encode('utf-8', 'backslashreplace').decode()
    super().__init__(text if len(text) <= _LONGEST else f'{text[: _LONGEST // 2]} … {text[3 - _LONGEST // 2 :]}')


class FolderError(UsageError):
  """A folder or a file that is in use, damaged or of another run: no method is to blame."""


class SizeError(UsageError):
  """More samples are asked for than a split has."""


class DeviceError(RuntimeError):
  """A device failed or has too little memory; the message says when, and how to continue.

  Programs print it on one line and exit with status 1.
  """


@contextlib.contextmanager
def raised_here() -> Iterator[None]:
  """Raises a `UsageError` of the block anew, without the frames of JAX and its note on them, where one was traced."""
  try:
    yield
  except UsageError as error:
    raise UsageError(error) from None


def unknown(kind: str, name: object, valid: Iterable[str]) -> UsageError:
  """Returns the error for a `name` that is not among the `valid` ones; it lists these and suggests the nearest.

  Args:
    kind: what is named, such as 'model'.
    name: as the user wrote it.
    valid: all valid names.
  """
  valid = sorted(valid)
  near = difflib.get_close_matches(str(name), valid, n=1) if isinstance(name, str) else ()
  hint = f'; did you mean {near[0]!r}?' if near else ''
  return UsageError(f'unknown {kind} {shown(name)}{hint} (valid: {", ".join(valid)})')


def check_image_batch(what: str, shape: Sequence[Any]) -> None:
  """Raises `UsageError`, which names `what` is for images only, for samples of another shape than [N, H, W, C]."""
  if len(shape) != 4:
    raise UsageError(f'{what} is for images [N, H, W, C], and these samples are [{", ".join(map(str, shape))}]')


def check_choice(kind: str, value: Any, valid: Collection[str]) -> Any:
  """Returns `value`; raises the error of `unknown` for anything but one of the `valid` texts."""
  if not isinstance(value, str) or value not in valid:
    raise unknown(kind, value, valid)
  return value


def check_number(
  name: str,
  value: Any,
  *,
  low: float = -math.inf,
  high: float = math.inf,
  integer: bool = False,
  finite: bool = False,
) -> Any:
  """Returns `value` if it is a number in [low, high].

  Args:
    name: what messages call the value.
    value: a real number of Python, NumPy or JAX. Traced numbers are not checked; traced integers are refused, because
      integers decide shapes and loops.
    low, high: inclusive bounds.
    integer: whether it must be an integer; a float with an integral value is none.
    finite: whether infinity is refused; with `integer` it always is.

  Raises:
    UsageError: for anything else: NaN, booleans, complex numbers, strings and bytes, integers beyond float64.
  """
  import jax  # not at import time: programs report usage errors before they load JAX

  if isinstance(value, jax.core.Tracer) and not integer:
    return value
  refuse_traced(name, value)
  expected = 'an integer' if integer else 'a finite number' if finite else 'a number'
  if (low, high) != (-math.inf, math.inf):
    expected += f' in [{_bound(low)}, {_bound(high)}]'
  try:
    number = _as_float(value)
  except OverflowError:
    raise UsageError(f'{name} is {shown(value)}, too large for float64; expected {expected}') from None
  if not low <= number <= high:
    nearest = '' if math.isnan(number) else f'; the nearest valid value is {_bound(low if number < low else high)}'
    raise UsageError(f'{name} is {shown(value)}, expected {expected}{nearest}')
  if (integer and not _is_integer(value)) or (finite and math.isinf(number)):
    raise UsageError(f'{name} is {shown(value)}, expected {expected}')
  return value


def check_idle(where: str, given: Mapping[str, tuple[Any, Any]]) -> None:
  """Raises `UsageError` for the first setting that is known not to be at its default, where it changes nothing.

  Args:
    where: to what it makes no difference, such as "to distance='prefix'" or 'without subset'.
    given: (value, default) by name; traced values are not known, and pass.
  """
  import jax

  for name, (value, default) in given.items():
    if not isinstance(value, jax.core.Tracer) and value != default:
      raise UsageError(f'{name} makes no difference {where}: leave it out')


def check_limit(limit: int | None, size: int, noun: str, split: str, name: str) -> None:
  """Raises `SizeError` where more samples, called by their noun, are asked for than the split of a dataset has."""
  if limit is not None and limit > size:
    raise SizeError(f'{limit} {noun} are asked for, but the split {split!r} of {name} has {size}')


def check_key(name: str, key: Any, *, traced: bool = True) -> Any:
  """Returns `key` as a typed scalar PRNG key.

  Args:
    name: what messages call the key.
    key: a scalar of `jax.random.key`, or uint32 [2] of `jax.random.PRNGKey`.
    traced: whether it may be traced; not where the host draws from it.

  Raises:
    UsageError: for anything else, such as an integer seed or a batch of keys.
  """
  import jax
  import numpy as np

  if not traced:
    refuse_traced(name, key)
  dtype, shape = getattr(key, 'dtype', None), getattr(key, 'shape', None)
  typed = dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)
  if typed and shape == ():
    return key
  if dtype == np.uint32 and shape == (2,):
    return jax.random.wrap_key_data(key, impl='threefry2x32')
  found = shown(key) if dtype is None else f'{"keys" if typed else dtype} of shape {shape}'
  raise UsageError(f'{name} is {found}, expected a single PRNG key, such as {name}=jax.random.key(0)')


def refuse_traced(name: str, value: Any) -> None:
  """Raises `UsageError` for a value, or a tree, that `jax.jit`, `jax.vmap` or `jax.grad` traces."""
  import jax

  if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(value)):
    raise UsageError(f'{name} is traced: this runs on the host, so call it outside of jax.jit, jax.vmap and jax.grad')


def as_array(name: str, value: Any) -> Any:
  """Returns a value as an array of real numbers; NumPy's and JAX's arrays, also traced ones, as they are.

  Args:
    name: what messages call it.
    value: an array, a number, or nested lists of numbers.

  Raises:
    UsageError: for anything else: text, None, objects, complex numbers, lists of unequal lengths.
  """
  import jax
  import numpy as np

  try:
    array = value if isinstance(value, jax.Array) else np.asarray(value)
  except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # the last of PyTorch, for what has a gradient
    raise UsageError(f'{name} is {shown(value)}, expected an array of numbers ({error})') from None
  if not isinstance(array.dtype, np.dtype) or array.dtype.kind in 'OSUcMm':
    found = shown(value) if array.ndim == 0 else f'{array.dtype} of shape {array.shape}'
    raise UsageError(f'{name} is {found}, expected an array of numbers')
  return array


def host_array(name: str, value: Any) -> Any:
  """Returns a value as a NumPy array; raises as `as_array` does, and for a traced value."""
  import numpy as np

  refuse_traced(name, value)
  return np.asarray(as_array(name, value))


def check_instance(name: str, value: Any, kind: type | tuple[type, ...], expected: str) -> Any:
  """Returns `value`.

  Args:
    name: what messages call it.
    value: what is checked.
    kind: its type, or several.
    expected: what was expected, in words.

  Raises:
    UsageError: if it is of another type.
  """
  if not isinstance(value, kind):
    raise UsageError(f'{name} is {shown(value)}, expected {expected}')
  return value


def check_function(name: str, value: Any, arguments: int, expected: str = 'a function') -> Any:
  """Returns `value`.

  Args:
    name: what messages call it.
    value: what is checked.
    arguments: how many it must take.
    expected: what was expected, in words.

  Raises:
    UsageError: for a class, and for anything that cannot be called with so many arguments.
  """
  fits = callable(value) and not isinstance(value, type)
  if fits:
    try:
      inspect.signature(value).bind(*range(arguments))
    except TypeError:
      fits = False
    except ValueError:  # functions written in C may have no signature
      pass
  if not fits:
    called = f'called with {arguments} argument{"s" * (arguments > 1)}'
    raise UsageError(f'{name} is {shown(value)}, expected {expected}, {called}')
  return value


def check_text(name: str, value: Any) -> str:
  """Returns `value`, a text for people: a name or a label.

  Raises:
    UsageError: for anything but a text, an empty or very long one, control characters, and what UTF-8 cannot hold.
  """
  check_instance(name, value, str, 'a text')
  if not value or len(value) > _LONGEST or not value.replace('\xa0', ' ').isprintable():
    raise UsageError(f'{name} is {shown(value)}, expected printable text in UTF-8 of 1 to {_LONGEST} characters')
  return value


def check_path(name: str, path: Any, *, home: bool = False) -> pathlib.Path:
  """Returns a path.

  Args:
    name: what messages call it.
    path: a text or a path.
    home: whether `~` stands for the home folder.

  Raises:
    UsageError: for anything but a path, an empty one, a user without a home, and names that no file can have.
  """
  check_instance(name, path, (str, os.PathLike), 'a path')
  text = os.fspath(path)
  if not isinstance(text, str) or not text or '\0' in text:
    raise UsageError(f'{name} is {shown(path)}, expected a path')
  try:
    text.encode('utf-8')
    found = pathlib.Path(text).expanduser() if home else pathlib.Path(text)
    found.exists()  # raises for names that are too long
  except UnicodeEncodeError:
    raise UsageError(f'{name} is {shown(path)}, expected a path in UTF-8') from None
  except (OSError, RuntimeError) as error:
    raise UsageError(f'{name} is {shown(path)}: {getattr(error, "strerror", None) or error}') from None
  return found


def check_json(name: str, value: Any) -> dict[str, Any]:
  """Returns `value`, a mapping, as a dictionary of what JSON can hold; NumPy's scalars count as plain values.

  Raises:
    UsageError: for anything else: functions, sets, arrays, keys that are no texts, text that is not UTF-8, and
      structures that contain themselves.
  """
  import json

  value = dict(check_instance(name, value, Mapping, 'a dictionary of plain JSON values'))

  def scalar(one: Any) -> Any:
    if getattr(one, 'ndim', None) == 0 and hasattr(one, 'item'):
      return one.item()
    raise TypeError(f'it holds {shown(one)}')

  def keys(one: Any) -> None:
    for key in one if isinstance(one, dict) else ():
      if not isinstance(key, str):
        raise TypeError(f'{shown(key)} is no name of an entry')
    for inner in one.values() if isinstance(one, dict) else one if isinstance(one, list | tuple) else ():
      keys(inner)

  try:
    json.dumps(value, default=scalar, ensure_ascii=False).encode('utf-8')
    keys(value)
  except (TypeError, ValueError, RecursionError) as error:
    raise UsageError(f'{name} is {shown(value)}, expected plain JSON values ({error})') from None
  return value


def shown(value: Any) -> str:
  """Returns the `repr` of a value on one line of at most 60 characters."""
  try:
    text = ' '.join(repr(value).split())
  except Exception:  # Python does not print integers of more than 4300 digits, and a repr of a user's own may fail
    is_integer = isinstance(value, int)
    text = f'an integer of {value.bit_length()} bits' if is_integer else f'an object of type {type(value).__name__}'
  return text if len(text) <= 60 else f'{text[:40]}… ({len(text)} characters)'


def some(names: Sequence[str]) -> str:
  """Returns the first four of several names, and how many more there are."""
  return ', '.join(names[:4]) + (f' and {len(names) - 4} more' if len(names) > 4 else '')


def _as_float(value: Any) -> float:
  """Returns the value as a float, NaN for what is not a real number; raises OverflowError beyond float64."""
  kind = getattr(getattr(value, 'dtype', None), 'kind', None)
  if isinstance(value, bool | str | bytes | bytearray) or kind in ('b', 'c', 'S', 'U'):
    return math.nan
  try:
    return float(value)
  except (TypeError, ValueError):
    return math.nan


def _is_integer(value: Any) -> bool:
  try:
    operator.index(value)
  except TypeError:
    return False
  return True


def _bound(number: float) -> str:
  return str(number) if isinstance(number, int) else f'{number:g}'
