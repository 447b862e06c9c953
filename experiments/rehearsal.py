"""Runs a table without its computations: every program is traced and counted, and gives noise. Data are noise as well.

The code of a study runs as it is, with two stand-ins. Functions that `jax.jit` returns are traced with the arguments of
their call, and not compiled. `gradleak.data.load` returns noise of the dataset's shape, and reads no files. What does
not fit together therefore fails as it would in a run, and what a run computes is counted program by program.
"""

import collections
import contextlib
import functools
import importlib
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gradleak import data
from gradleak.core import errors
from gradleak.data import Candidates, Dataset
from gradleak.engine import ahead, driver
from gradleak.models.operations import Operations, counted

PACKAGES = ('gradleak', 'experiments')  # whose compiled functions are replaced
MOST = 8  # numbers of turns in an argument, one for each device
NOISE = 1_000  # the first images of a stand-in; the others are black, and take no memory


class Shape(NamedTuple):
  """What is known of a dataset: the side of an image, channels, classes, and the images of its splits."""

  side: int
  channels: int
  classes: int
  train: int
  test: int


SHAPES = {
  'mnist': Shape(28, 1, 10, 60_000, 10_000),
  'fashion_mnist': Shape(28, 1, 10, 60_000, 10_000),
  'emnist/balanced': Shape(28, 1, 47, 112_800, 18_800),
  'emnist/letters': Shape(28, 1, 37, 88_800, 14_800),
  'cifar10': Shape(32, 3, 10, 50_000, 10_000),
  'cifar100': Shape(32, 3, 100, 50_000, 10_000),
  'folder:data/tiny-imagenet': Shape(64, 3, 200, 100_000, 10_000),
  'folder:data/faces32': Shape(32, 3, 2, 3_000, 1_000),
}


class Ledger:
  """What the programs of a rehearsal compute.

  Attributes:
    total: the `Operations` of all calls.
    programs: name of a program -> the `Operations` of its calls, in the order of the first ones.
    lanes: number of attacks' starts and of clients' rounds.
    kept: bytes of uploads and views that the host holds at a time.
  """

  def __init__(self) -> None:
    self.total, self.lanes, self.kept = Operations(), 0, 0.0
    self.programs: dict[str, Operations] = collections.defaultdict(Operations)
    self._turns = 1.0, 1.0
    self._texts: set[int] = set()
    self._known: dict[tuple, tuple[Any, Operations]] = {}  # with the program, whose id is used

  @contextlib.contextmanager
  def times(self, turns: float, together: float = 1) -> Iterator[None]:
    """Counts each call in this context so many times, of which some share a pass."""
    before, self._turns = self._turns, (self._turns[0] * turns, self._turns[1] * together)
    try:
      yield
    finally:
      self._turns = before

  def add(self, name: str, program: Any, given: list[Any]) -> None:
    """Counts a call of a program with these values, None where they are not known; its text counts once."""
    key = id(program), tuple(None if x is None else np.asarray(x).tobytes() for x in given)
    if key not in self._known:
      self._known[key] = program, counted(program, given)
      if id(program) not in self._texts:
        self._texts.add(id(program))
        self._record(name, self._known[key][1].text())
    self._record(name, self._known[key][1].called().times(*self._turns))

  def group_size(self, variables: Any, samples: int) -> int:
    """Returns how many lanes share a pass in a run; in a rehearsal, each has its own."""
    return _group_size(variables, samples)

  def _record(self, name: str, found: Operations) -> None:
    self.programs[name] += found
    self.total += found


class _StandIn:
  """A function that `jax.jit` returned: in a rehearsal its calls are counted, and give noise."""

  def __init__(self, compiled: Any) -> None:
    self._compiled = compiled
    functools.update_wrapper(self, compiled)

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    leaves = jax.tree.leaves((args, kwargs))
    if _current is None or any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
      return self._compiled(*args, **kwargs)
    traced = self._compiled.trace(*args, **kwargs)
    given = [_value(x) for x in leaves if isinstance(x, np.ndarray | np.generic | jax.Array | int | float)]
    inputs = len(traced.jaxpr.jaxpr.invars)  # fewer where some arguments are static
    _current.add(traced.fun_name, traced.jaxpr, given if len(given) == inputs else [None] * inputs)
    return jax.tree.map(_made, traced.out_info)

  def __getattr__(self, name: str) -> Any:
    return getattr(self._compiled, name)

  def __get__(self, instance: Any, owner: Any = None) -> Any:
    return self if instance is None else functools.partial(self, instance)


_current: Ledger | None = None
_Cached = type(functools.lru_cache(lambda: None))
_NOISE = np.random.default_rng(0).random(2**20, np.float32)


_APART: dict[int, tuple[Any, Any]] = {}  # id of a function -> it, and what takes its place


def _apart(value: Any, kind: type) -> Any:
  """Returns what takes the place of a compiled function, or of one that keeps results; None of others."""
  if id(value) not in _APART:
    if isinstance(value, kind):
      made = _StandIn(value)
    elif isinstance(value, _Cached):
      made = functools.lru_cache(**value.cache_parameters())(value.__wrapped__)
    elif callable(getattr(value, 'anew', None)) and hasattr(value, '__wrapped__'):
      made = value.anew()
    else:
      return None
    _APART[id(value)] = value, made
  return _APART[id(value)][1]


def _value(x: Any) -> Any:
  """Returns the value of an argument where it is one number, such as that of the steps of a loop."""
  if isinstance(x, jax.Array):
    single = x.size <= MOST and not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(x) if single else None
  return x if np.size(x) <= MOST else None


def _made(shape: Any) -> jax.Array:
  if jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
    known = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape.shape, shape.dtype))
    return jax.random.wrap_key_data(np.zeros(known.shape, known.dtype))
  entries = math.prod(shape.shape)
  if jnp.issubdtype(shape.dtype, jnp.floating) and entries <= len(_NOISE):  # what is all zero may be refused
    return jnp.asarray(_NOISE[:entries].reshape(shape.shape), shape.dtype)
  return jnp.asarray(np.zeros(shape.shape, shape.dtype))  # memory that is not written takes none


@contextlib.contextmanager
def rehearsed(ledger: Ledger) -> Iterator[None]:
  """Replaces what computes and what reads in this context, and fills the `Ledger`.

  What functions keep for equal arguments is apart from what they keep outside of rehearsals.
  """
  global _current
  usual = jax.jit
  kind = type(usual(lambda: None))

  def jit(function: Any = None, **options: Any) -> Any:
    if function is None:
      return functools.partial(jit, **options)
    return _StandIn(usual(function, **options))

  planning = importlib.import_module('gradleak.audit.plan')  # what it would trace in advance is traced anyway
  replaced: list[tuple[Any, str, Any]] = [
    (jax, 'jit', jit),
    (data, 'load', load),
    (data, 'gallery', gallery),
    (ahead, 'cores', lambda: 1),
    (driver, 'default_group_size', lambda variables, samples: 1),
    (planning, '_trace', lambda group, attack: None),
  ]
  for name, module in list(sys.modules.items()):
    if name.partition('.')[0] in PACKAGES:
      found = ((key, _apart(value, kind)) for key, value in vars(module).items())
      replaced += [(module, key, value) for key, value in found if value is not None]
  kept = [(place, key, getattr(place, key)) for place, key, _ in replaced]
  for place, key, value in replaced:
    setattr(place, key, value)
  _current = ledger
  try:
    yield
  finally:
    _current = None
    for place, key, value in kept:
      setattr(place, key, value)


def load(
  name: str,
  split: str = 'test',
  *,
  data_dir: str | None = None,
  limit: int | None = None,
  image_size: int | None = None,
  channels: int | None = None,
  **others: Any,
) -> Dataset:
  """Returns noise in the shape of a dataset, labels in turn; arguments are those of `gradleak.data.load`.

  Raises:
    UsageError: for a dataset whose shape is not known, or fewer images than are asked for.
  """
  if name in data.EMBEDDED:
    return _load(name, split, limit=limit, image_size=image_size, channels=channels, **others)
  del data_dir
  known = SHAPES.get(errors.check_choice('dataset', name, SHAPES))
  assert known is not None
  held = getattr(known, split)
  if limit is not None and limit > held:
    raise errors.UsageError(f'{name} has {held} images in {split}, and {limit} are needed')
  count, side = limit or held, image_size or known.side
  samples = np.zeros((count, side, side, channels or known.channels), np.float32)
  samples[:NOISE] = np.random.default_rng(len(split)).random(samples[:NOISE].shape, np.float32)
  names = tuple(map(str, range(known.classes)))
  return Dataset(name, split, samples, np.arange(count, dtype=np.int32) % known.classes, names)


def gallery(name: str, split: str = 'test', **options: Any) -> Candidates:
  """Returns noise in place of `gradleak.data.gallery`."""
  if name in data.EMBEDDED:
    return _gallery(name, split, **options)
  found = load(name, split, limit=101, **options)
  return Candidates(found.samples, found.targets, False, found.class_names)


_load: Callable[..., Dataset] = data.load
_group_size: Callable[..., int] = driver.default_group_size
_gallery: Callable[..., Candidates] = data.gallery
