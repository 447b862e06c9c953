"""PyTorch's operations (ATen) in JAX: how they are found by name, and those on entries, shapes and axes.

A value is an array in PyTorch's order of axes, a `Last`, a number, or a tuple of values. Derivatives at kinks and ties
are PyTorch's.
"""

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradleak.core import trees

_END = 2**62  # of a slice: anything larger means up to the end


class Last:
  """A map [N, C, …] that is held with its channels last, as images are here: no transposition around a convolution.

  Attributes:
    values: [N, …, C].
  """

  def __init__(self, values: jax.Array) -> None:
    self.values = values

  @property
  def shape(self) -> tuple[int, ...]:
    """The shape in PyTorch's order of axes."""
    count, *sides, channels = self.values.shape
    return (count, channels, *sides)

  @property
  def ndim(self) -> int:
    return self.values.ndim

  @property
  def dtype(self) -> Any:
    return self.values.dtype


class Tokens:
  """Ids of tokens whose probabilities a search moves: a table gives a mixture of its rows for each.

  Attributes:
    ids: the likeliest ones, integers; comparisons and masks see these.
    places: which of the mixtures each is, integers of the same shape.
    mixtures: probabilities [N·T, V].
  """

  def __init__(self, ids: jax.Array, places: jax.Array, mixtures: jax.Array) -> None:
    self.ids, self.places, self.mixtures = ids, places, mixtures

  @classmethod
  def of(cls, probabilities: jax.Array) -> 'Tokens':
    """Returns those of probabilities [N, …, V]."""
    ids = jnp.argmax(probabilities, axis=-1).astype(jnp.int32)
    return cls(ids, jnp.arange(ids.size).reshape(ids.shape), probabilities.reshape(-1, probabilities.shape[-1]))

  @property
  def shape(self) -> tuple[int, ...]:
    """The shape of the ids."""
    return self.ids.shape


class Run:
  """How a program is run.

  Attributes:
    dtype: of all floats.
    train: whether BatchNorm uses the statistics of the batch where the program says so.
    key: of dropout, or None for none.
    counted: (array [N, …]) -> which of its samples count in the statistics of a batch, [N, 1, …] booleans, or None.
    where: the operation that is run, for messages.
    number: of that operation.
    mark: how it takes its values, see `aten_program.Step`.
  """

  def __init__(self, dtype: Any, train: bool, key: jax.Array | None, counted: Callable[[Any], Any]) -> None:
    self.dtype, self.train, self.key, self.counted = jnp.dtype(dtype), train, key, counted
    self.where, self.number, self.mark = '', 0, ''

  def cast(self, dtype: str) -> Any:
    """Returns the dtype here of one of PyTorch's; raises `Unsupported` for other than floats, integers and booleans."""
    if dtype in ('float32', 'float64'):
      return self.dtype
    if dtype == 'bool':
      return jnp.dtype(bool)
    if dtype in ('int64', 'int32', 'int16', 'int8', 'uint8'):
      return jnp.dtype(np.int32)
    raise Unsupported(f'numbers of type {dtype}')

  def constant(self, values: Any) -> jax.Array:
    """Returns an array of the program in the types of this run."""
    return jnp.asarray(values, self.cast(str(np.asarray(values).dtype)))

  def drawn(self, shape: Sequence[int], probability: float) -> jax.Array | None:
    """Returns whether each entry is kept, with this probability; None without a key."""
    if self.key is None:
      return None
    return jax.random.bernoulli(jax.random.fold_in(self.key, self.number), probability, tuple(shape))


# Operations that move ids of tokens, and those that look at them without a derivative.
MOVES = frozenset(
  """
  view _unsafe_view reshape view_copy permute permute_copy transpose transpose_copy t unsqueeze unsqueeze_copy squeeze
  squeeze_copy flip roll repeat expand expand_copy slice slice_copy select select_copy index_select clone alias
  contiguous detach detach_copy lift_fresh_copy _to_copy to
  """.split()  # noqa: SIM905
)
READS = frozenset(
  """
  eq ne gt ge lt le argmax argmin zeros_like ones_like empty_like full_like new_zeros new_ones new_empty new_full
  sym_size sym_numel
  """.split()  # noqa: SIM905
)


class Unsupported(Exception):
  """What an operation is asked for and does not do; the text is a noun with its attributes."""


Operation = Callable[..., Any]
OPERATIONS: dict[str, Operation] = {}  # name, with the overload or without it -> (run, *arguments, **options) -> value


def operation(*names: str) -> Callable[[Operation], Operation]:
  """Adds a function to `OPERATIONS`; values that are a `Last` are given to it in PyTorch's order."""

  def add(function: Operation) -> Operation:
    @functools.wraps(function)
    def run(run: Run, *arguments: Any, **options: Any) -> Any:
      return function(run, *map(plain, arguments), **{name: plain(value) for name, value in options.items()})

    OPERATIONS.update(dict.fromkeys(names, run))
    return function

  return add


def on_tokens(run: Run, base: str, function: Operation, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
  """Returns what an operation, by its name without overload, makes of `Tokens` among its arguments.

  Raises:
    Unsupported: for one that computes with ids, of which the probabilities say nothing.
  """
  if base == 'embedding':
    return function(run, *arguments, **options)
  first, *others = arguments
  if base in READS:
    return function(run, *(one.ids if isinstance(one, Tokens) else one for one in arguments), **options)
  if base in MOVES and isinstance(first, Tokens):
    ids = function(run, first.ids, *others, **options)
    if ids.dtype == bool:
      return ids
    if jnp.issubdtype(ids.dtype, jnp.integer):
      return Tokens(ids, function(run, first.places, *others, **options), first.mixtures)
  raise Unsupported('ids of tokens whose probabilities are moved')


def of_arrays(*names: str) -> Callable[[Callable[..., jax.Array]], Operation]:
  """Adds a function that takes no `Run`, as `operation` does."""
  return lambda function: operation(*names)(lambda run, *arguments: function(*arguments))


def on_maps(*names: str) -> Callable[[Operation], Operation]:
  """Adds a function to `OPERATIONS` that takes a `Last` as it is."""

  def add(function: Operation) -> Operation:
    OPERATIONS.update(dict.fromkeys(names, function))
    return function

  return add


def plain(value: Any) -> Any:
  """Returns a value, or those of a list, in PyTorch's order of axes."""
  if isinstance(value, Last):
    return jnp.moveaxis(value.values, -1, 1)
  if isinstance(value, tuple | list):
    return type(value)(map(plain, value))
  return value


def last(value: Any) -> jax.Array:
  """Returns a map [N, C, …] with its channels last."""
  return value.values if isinstance(value, Last) else jnp.moveaxis(value, 1, -1)


def is_array(value: Any) -> bool:
  """Returns whether it is an array, and not a number of the program's text."""
  return isinstance(value, Last | jax.Array | np.ndarray)


def axis(dim: int, ndim: int) -> int:
  """Returns a number of an axis from 0 on."""
  return dim + ndim if dim < 0 else dim


def axes(dims: Any, ndim: int) -> tuple[int, ...]:
  """Returns numbers of axes from 0 on; all of them for None or an empty list."""
  if dims is None or (isinstance(dims, tuple | list) and not dims):
    return tuple(range(ndim))
  return tuple(axis(dim, ndim) for dim in ([dims] if isinstance(dims, int) else dims))


def aligned(run: Run, *operands: Any, floats: bool = False) -> tuple[list[jax.Array], bool]:
  """Returns operands as arrays of one type and one rank, and whether these are maps with their channels last.

  Args:
    run: the `Run`.
    *operands: arrays and numbers.
    floats: whether they are turned into floats in any case.
  """
  dtype = common(run, operands, floats)
  rank = max(getattr(one, 'ndim', 0) for one in operands)
  maps = any(isinstance(one, Last) and one.ndim == rank for one in operands)
  found = []
  for one in operands:
    if maps and isinstance(one, Last) and one.ndim == rank:
      found.append(one.values.astype(dtype))
      continue
    array = jnp.asarray(plain(one)).astype(dtype)
    array = array.reshape((1,) * (rank - array.ndim) + array.shape)
    found.append(jnp.moveaxis(array, 1, -1) if maps else array)
  return found, maps


def common(run: Run, operands: Sequence[Any], floats: bool = False) -> Any:
  """Returns the dtype of a result of operands: a boolean, an integer or a float, whichever comes last among them."""
  given = [one.dtype for one in operands if is_array(one)]
  inexact = [dtype for dtype in given if jnp.issubdtype(dtype, jnp.floating)]
  if inexact:
    return functools.reduce(jnp.promote_types, inexact)
  if floats or any(isinstance(one, float) for one in operands):
    return run.dtype
  whole = any(dtype != np.dtype(bool) for dtype in given) or any(type(one) is int for one in operands)
  return jnp.dtype(np.int32) if whole else jnp.dtype(bool)


def entrywise(*names: str, floats: bool = False, number: int = 2) -> Callable[[Callable[..., jax.Array]], Any]:
  """Adds a function of entries: its first `number` arguments are aligned, and all others are numbers.

  Args:
    *names: of the operation.
    floats: whether integers are turned into floats first, as by a division.
    number: how many operands it has.
  """

  def add(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    @functools.wraps(function)
    def run(run: Run, *arguments: Any, **options: Any) -> Any:
      operands, maps = aligned(run, *arguments[:number], floats=floats)
      found = function(*operands, *arguments[number:], **options)
      return Last(found) if maps else found

    OPERATIONS.update(dict.fromkeys(names, run))
    return function

  return add


for _name, _function in {
  'exp': jnp.exp, 'exp2': jnp.exp2, 'expm1': jnp.expm1, 'log': jnp.log, 'log2': jnp.log2, 'log10': jnp.log10,
  'log1p': jnp.log1p, 'sqrt': jnp.sqrt, 'rsqrt': jax.lax.rsqrt, 'sin': jnp.sin, 'cos': jnp.cos, 'tan': jnp.tan,
  'asin': jnp.arcsin, 'acos': jnp.arccos, 'atan': jnp.arctan, 'sinh': jnp.sinh, 'cosh': jnp.cosh, 'tanh': jnp.tanh,
  'asinh': jnp.arcsinh, 'acosh': jnp.arccosh, 'atanh': jnp.arctanh, 'sigmoid': jax.nn.sigmoid, 'erf': jax.lax.erf,
  'erfc': jax.lax.erfc,
  'erfinv': jax.lax.erf_inv, 'lgamma': jax.lax.lgamma, 'digamma': jax.lax.digamma, 'reciprocal': lambda x: 1 / x,
  'silu': jax.nn.silu, 'log_sigmoid': jax.nn.log_sigmoid,
  'mish': lambda x: x * jnp.tanh(jax.nn.softplus(x)),
  'isnan': jnp.isnan, 'isinf': jnp.isinf,
}.items():  # fmt: skip
  entrywise(_name, floats=True, number=1)(_function)  # type: ignore[arg-type]

for _name, _function in {
  'relu': jax.nn.relu, 'neg': jnp.negative, 'abs': trees.magnitude, 'sign': jnp.sign, 'floor': jnp.floor,
  'ceil': jnp.ceil, 'round': jnp.round, 'trunc': jnp.trunc, 'square': jnp.square, 'logical_not': jnp.logical_not,
  'bitwise_not': jnp.bitwise_not, 'clone': lambda x, **options: x, 'alias': lambda x: x,
  'contiguous': lambda x, **options: x, 'lift_fresh_copy': lambda x: x, 'detach': jax.lax.stop_gradient,
  'detach_copy': jax.lax.stop_gradient,
}.items():  # fmt: skip
  entrywise(_name, number=1)(_function)

for _name, _function in {
  'eq': jnp.equal, 'ne': jnp.not_equal, 'gt': jnp.greater, 'ge': jnp.greater_equal, 'lt': jnp.less,
  'le': jnp.less_equal, 'maximum': jnp.maximum, 'minimum': jnp.minimum, 'mul': jnp.multiply,
  'logical_and': jnp.logical_and, 'logical_or': jnp.logical_or, 'logical_xor': jnp.logical_xor,
  'bitwise_and': jnp.bitwise_and, 'bitwise_or': jnp.bitwise_or, 'bitwise_xor': jnp.bitwise_xor,
  'fmod': jnp.fmod, 'remainder': jnp.remainder,
}.items():  # fmt: skip
  entrywise(_name)(_function)  # type: ignore[arg-type]

entrywise('fmax')(lambda a, b: jnp.where((a >= b) | jnp.isnan(b), a, b))  # of equal ones, the first has the derivative
entrywise('fmin')(lambda a, b: jnp.where((a <= b) | jnp.isnan(b), a, b))
entrywise('atan2', floats=True)(jnp.arctan2)
entrywise('hypot', floats=True)(lambda a, b: trees.safe_sqrt(jnp.square(a) + jnp.square(b)))
entrywise('add')(lambda a, b, alpha=1: a + (b if alpha == 1 else b * jnp.asarray(alpha, b.dtype)))


@entrywise('sub')
def _sub(a: jax.Array, b: jax.Array, alpha: float = 1) -> jax.Array:
  return a - (b if alpha == 1 else b * jnp.asarray(alpha, b.dtype))


entrywise('rsub')(lambda a, b, alpha=1: _sub(b, a, alpha))


@on_maps('div')
def _div(run: Run, a: Any, b: Any, rounding_mode: str | None = None) -> Any:
  (a, b), maps = aligned(run, a, b, floats=rounding_mode is None)
  found = {None: lambda: a / b, 'floor': lambda: jnp.floor_divide(a, b), 'trunc': lambda: jnp.trunc(a / b)}
  value = found[rounding_mode]().astype(a.dtype)
  return Last(value) if maps else value


@on_maps('pow')
def _pow(run: Run, a: Any, b: Any) -> Any:
  if not is_array(b) and float(b).is_integer() and 0 <= b <= 8:  # exact, with derivatives at zero
    (a,), maps = aligned(run, a)
    a = a.astype(common(run, [a, float(b) if isinstance(b, float) else int(b)]))
    found = jax.lax.integer_pow(a, int(b))
  elif not is_array(b) and b == 0.5:
    (a,), maps = aligned(run, a, floats=True)
    found = jnp.sqrt(a)
  else:
    (a, b), maps = aligned(run, a, b)
    found = jnp.power(a, b)
  return Last(found) if maps else found


@on_maps('where')
def _where(run: Run, condition: Any, a: Any, b: Any) -> Any:
  dtype = common(run, [a, b])
  (chosen, a, b), maps = aligned(run, condition, a, b)
  found = jnp.where(chosen.astype(bool), a.astype(dtype), b.astype(dtype))
  return Last(found) if maps else found


@on_maps('masked_fill')
def _masked_fill(run: Run, x: Any, mask: Any, value: Any) -> Any:
  filled = jnp.asarray(plain(value)).astype(x.dtype)
  return _where(run, mask, filled, x)


entrywise('addcmul', number=3)(lambda x, a, b, value=1: x + jnp.asarray(value, x.dtype) * a * b)


@on_maps('clamp', 'hardtanh', 'clamp_min', 'clamp_max')
def _clamp(run: Run, x: Any, low: Any = None, high: Any = None, *, strict: bool = False) -> Any:
  """Clamps; the derivative is 1 on the bounds, and with `strict` 0."""
  inside = jnp.greater if strict else jnp.greater_equal
  (x, *bounds), maps = aligned(run, x, *(one for one in (low, high) if one is not None))
  if low is not None:
    least = bounds[0]
    if high is not None and is_array(low):  # at equal bounds, PyTorch gives neither the derivative of what is below
      least = jnp.where(bounds[1] == least, jax.lax.stop_gradient(least), least)
    x = jnp.where(inside(x, least), x, least)
  if high is not None:
    x = jnp.where(inside(bounds[-1], x), x, bounds[-1])
  return Last(x) if maps else x


OPERATIONS['hardtanh'] = lambda run, x, low=-1.0, high=1.0: _clamp(run, x, low, high, strict=True)
OPERATIONS['relu6'] = lambda run, x: _clamp(run, x, 0.0, 6.0, strict=True)
OPERATIONS['clamp_max'] = lambda run, x, high: _clamp(run, x, None, high)


entrywise('leaky_relu', number=1)(lambda x, slope=0.01: jnp.where(x > 0, x, x * jnp.asarray(slope, x.dtype)))


@on_maps('_prelu_kernel', 'prelu')
def _prelu(run: Run, x: Any, weight: Any) -> Any:
  if weight.ndim == 1 and x.ndim > 1:
    weight = weight.reshape(1, -1, *[1] * (x.ndim - 2))
  (x, weight), maps = aligned(run, x, weight)
  found = jnp.where(x > 0, x, weight * x)
  return Last(found) if maps else found


@entrywise('elu', number=1)
def _elu(x: jax.Array, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> jax.Array:
  alpha, scale, input_scale = (jnp.asarray(one, x.dtype) for one in (alpha, scale, input_scale))
  negative = jnp.where(x > 0, jnp.zeros_like(x), x)
  return jnp.where(x > 0, scale * x, scale * alpha * jnp.expm1(input_scale * negative))


entrywise('gelu', number=1)(lambda x, approximate='none': jax.nn.gelu(x, approximate=approximate == 'tanh'))


@entrywise('softplus', number=1)
def _softplus(x: jax.Array, beta: float = 1.0, threshold: float = 20.0) -> jax.Array:
  beta, threshold = jnp.asarray(beta, x.dtype), jnp.asarray(threshold, x.dtype)
  linear = beta * x > threshold
  return jnp.where(linear, x, jax.nn.softplus(jnp.where(linear, jnp.zeros_like(x), beta * x)) / beta)


def _sixths(x: jax.Array) -> jax.Array:
  """Returns (x + 3) / 6, clipped to the unit interval, whose derivative is 0 on its bounds."""
  inner = (x > -3) & (x < 3)
  return jnp.where(inner, (x + 3) / 6, (x >= 3).astype(x.dtype))


entrywise('hardsigmoid', number=1)(_sixths)
entrywise('hardswish', number=1)(lambda x: x * _sixths(x))


@on_maps('glu')
def _glu(run: Run, x: Any, dim: int = -1) -> Any:
  first, second = jnp.split(plain(x), 2, axis(dim, x.ndim))
  return first * jax.nn.sigmoid(second)


@on_maps('_to_copy', 'to', 'type_as')
def _to_copy(run: Run, x: Any, *others: Any, dtype: str | None = None, **options: Any) -> Any:
  del others, options
  if dtype is None:
    return x
  wanted = bool if dtype == 'bool' else run.cast(dtype)
  return Last(x.values.astype(wanted)) if isinstance(x, Last) else jnp.asarray(x).astype(wanted)


# Axes ----------------------------------------------------------------------------------------------------------------


def _reduced(run: Run, x: Any, dims: Any, keepdim: bool, function: Callable[..., jax.Array]) -> Any:
  """Returns a reduction; one over sides of a map alone keeps its channels last."""
  over = axes(dims, x.ndim)
  if isinstance(x, Last):
    places = tuple({0: 0, 1: x.ndim - 1}.get(one, one - 1) for one in over)
    found = function(x.values, places, keepdims=True)
    if keepdim:
      return Last(found)
    return jnp.squeeze(plain(Last(found)), over)
  return function(x, over, keepdims=keepdim)


@on_maps('mean')
def _mean(run: Run, x: Any, dims: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
  return _reduced(run, _to_copy(run, x, dtype=dtype), dims, keepdim, jnp.mean)


@on_maps('sum')
def _sum(run: Run, x: Any, dims: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
  x = _to_copy(run, x, dtype=dtype)
  x = _to_copy(run, x, dtype='int64') if x.dtype == bool else x
  return _reduced(run, x, dims, keepdim, jnp.sum)


def _reduction(function: Callable[..., jax.Array], dtype: str | None = None) -> Operation:
  def run(run: Run, x: Any, dims: Any = None, keepdim: bool = False) -> Any:
    return _reduced(run, _to_copy(run, x, dtype=dtype), dims, keepdim, function)

  return run


OPERATIONS['amax'] = OPERATIONS['max.default'] = _reduction(jnp.max)
OPERATIONS['amin'] = OPERATIONS['min.default'] = _reduction(jnp.min)
OPERATIONS['any'] = _reduction(jnp.any, 'bool')
OPERATIONS['all'] = _reduction(jnp.all, 'bool')


def _variance(x: jax.Array, over: tuple[int, ...], keepdims: bool, correction: float | None) -> jax.Array:
  count = math.prod(x.shape[one] for one in over) - (1 if correction is None else correction)
  square = jnp.sum(jnp.square(x - jnp.mean(x, over, keepdims=True)), over, keepdims=keepdims)
  return square / jnp.asarray(count, x.dtype)


@on_maps('var')
def _var(run: Run, x: Any, dims: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Any:
  return _reduced(run, x, dims, keepdim, functools.partial(_variance, correction=correction))


@on_maps('std')
def _std(run: Run, x: Any, dims: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Any:
  found = _var(run, x, dims, correction=correction, keepdim=keepdim)
  return Last(trees.safe_sqrt(found.values)) if isinstance(found, Last) else trees.safe_sqrt(found)


@on_maps('var_mean')
def _var_mean(run: Run, x: Any, dims: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Any:
  return _var(run, x, dims, correction=correction, keepdim=keepdim), _mean(run, x, dims, keepdim)


@operation('linalg_vector_norm')
def _vector_norm(
  run: Run, x: Any, order: float = 2, dims: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
  over = axes(dims, x.ndim)
  if order == 2:
    return trees.safe_sqrt(jnp.sum(jnp.square(x), over, keepdims=keepdim))
  if order == 1:
    return jnp.sum(trees.magnitude(x), over, keepdims=keepdim)
  if math.isinf(order):
    return (jnp.max if order > 0 else jnp.min)(trees.magnitude(x), over, keepdims=keepdim)
  if order <= 0:
    raise Unsupported(f'a norm of order {order:g}')

  def power(value: jax.Array, exponent: float) -> jax.Array:  # 0 at 0, with the derivative 0
    nothing = value <= 0
    return jnp.where(nothing, jnp.zeros_like(value), jnp.where(nothing, jnp.ones_like(value), value) ** exponent)

  return power(jnp.sum(power(trees.magnitude(x), order), over, keepdims=keepdim), 1 / order)


@operation('cumsum')
def _cumsum(run: Run, x: Any, dim: int, *, dtype: Any = None) -> Any:
  x = _to_copy(run, x, dtype='int64') if x.dtype == bool else x
  return jnp.cumsum(x, axis(dim, x.ndim))


of_arrays('cumprod')(lambda x, dim: jnp.cumprod(x, axis(dim, x.ndim)))
of_arrays('logcumsumexp')(lambda x, dim: jax.lax.cumlogsumexp(x, axis(dim, x.ndim)))
operation('logsumexp')(lambda run, x, dims, keepdim=False: jax.nn.logsumexp(x, axes(dims, x.ndim), keepdims=keepdim))


@operation('prod')
def _prod(run: Run, x: Any, dims: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
  return jnp.prod(x, axes(dims, x.ndim), keepdims=keepdim)


def _extremum(kind: str, find: Callable[..., jax.Array]) -> None:
  """Adds the place of an extremum, and the extremum along an axis, which alone has a derivative, with its place."""

  @operation(f'arg{kind}')
  def place(run: Run, x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    return find(x, dim, keepdims=keepdim).astype(np.int32)

  @operation(f'{kind}.dim')
  def value_and_place(run: Run, x: Any, dim: int, keepdim: bool = False) -> Any:
    at = place(run, x, dim, keepdim=True)
    value = jnp.take_along_axis(x, at, dim)
    return (value, at) if keepdim else (jnp.squeeze(value, dim), jnp.squeeze(at, dim))


_extremum('max', jnp.argmax)
_extremum('min', jnp.argmin)


@operation('sort')
def _sort(run: Run, x: Any, dim: int = -1, descending: bool = False, *, stable: bool | None = None) -> Any:
  del stable  # any order of equal ones is one of those that PyTorch may give
  order = jnp.argsort(x, dim, descending=descending).astype(np.int32)
  return jnp.take_along_axis(x, order, dim), order


@operation('topk')
def _topk(run: Run, x: Any, count: int, dim: int = -1, largest: bool = True, ordered: bool = True) -> Any:
  place = (slice(None),) * axis(dim, x.ndim) + (slice(count),)
  return tuple(one[place] for one in _sort(run, x, dim, largest))


@operation('kthvalue')
def _kth(run: Run, x: Any, number: int, dim: int = -1, keepdim: bool = False) -> Any:
  found = (one.take(np.asarray([number - 1]), axis(dim, x.ndim)) for one in _sort(run, x, dim))
  return tuple(one if keepdim else jnp.squeeze(one, dim) for one in found)


@operation('median.dim')
def _median(run: Run, x: Any, dim: int, keepdim: bool = False) -> Any:
  return _kth(run, x, (x.shape[axis(dim, x.ndim)] + 1) // 2, dim, keepdim)  # of two in the middle, the lower


of_arrays('_softmax', 'softmax')(lambda x, dim, *others: jax.nn.softmax(x, dim))
of_arrays('_log_softmax', 'log_softmax')(lambda x, dim, *others: jax.nn.log_softmax(x, dim))


# Shapes --------------------------------------------------------------------------------------------------------------


@on_maps('view', '_unsafe_view', 'reshape', 'view_copy')
def _view(run: Run, x: Any, shape: Sequence[int]) -> Any:
  if tuple(shape) == tuple(x.shape):
    return x
  if run.mark == 'channels last':
    return last(x).reshape(x.shape[0], -1)
  return plain(x).reshape(tuple(shape))


of_arrays('permute', 'permute_copy')(lambda x, dims: jnp.transpose(x, axes(dims, x.ndim)))
of_arrays('transpose', 'transpose_copy')(jnp.swapaxes)
of_arrays('t')(jnp.transpose)
of_arrays('unsqueeze', 'unsqueeze_copy')(jnp.expand_dims)
of_arrays('flip')(lambda x, dims: jnp.flip(x, axes(dims, x.ndim)))
of_arrays('repeat')(jnp.tile)
of_arrays('diagonal', 'diagonal_copy')(lambda x, offset=0, one=0, two=1: jnp.diagonal(x, offset, one, two))
of_arrays('tril')(jnp.tril)
of_arrays('triu')(jnp.triu)


@operation('expand', 'expand_copy')
def _expand(run: Run, x: Any, shape: Sequence[int], *, implicit: bool = False) -> Any:
  whole = (1,) * (len(shape) - x.ndim) + x.shape
  shape = [old if new == -1 else new for old, new in zip(whole, shape, strict=True)]
  return jnp.broadcast_to(x.reshape(whole), shape)


@operation('squeeze', 'squeeze_copy')
def _squeeze(run: Run, x: Any, dims: Any = None) -> Any:
  return jnp.squeeze(x, tuple(one for one in axes(dims, x.ndim) if x.shape[one] == 1))


def _bound(place: int, length: int) -> int:
  """Returns the place of one end of a slice, from 0 on and within the axis."""
  return min(max(place + length if place < 0 else place, 0), length)


def _span(x: Any, dim: int, start: int | None, end: int | None, step: int) -> tuple[slice, ...]:
  dim = axis(dim, x.ndim)
  length = x.shape[dim]
  start, end = 0 if start is None else start, length if end is None or end > _END else end
  return (slice(None),) * dim + (slice(_bound(start, length), _bound(end, length), step),)


operation('slice', 'slice_copy')(lambda run, x, dim=0, start=None, end=None, step=1: x[_span(x, dim, start, end, step)])


@operation('slice_scatter')
def _slice_scatter(run: Run, x: Any, new: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
  return x.at[_span(x, dim, start, end, step)].set(new.astype(x.dtype))


@operation('select', 'select_copy')
def _select(run: Run, x: Any, dim: int, index: int) -> Any:
  return jax.lax.index_in_dim(x, axis(index, x.shape[axis(dim, x.ndim)]), axis(dim, x.ndim), keepdims=False)


@operation('select_scatter')
def _select_scatter(run: Run, x: Any, new: Any, dim: int, index: int) -> Any:
  dim = axis(dim, x.ndim)
  return x.at[(slice(None),) * dim + (axis(index, x.shape[dim]),)].set(new.astype(x.dtype))


@on_maps('cat')
def _cat(run: Run, arrays: Sequence[Any], dim: int = 0) -> Any:
  arrays = [one for one in arrays if one.shape != (0,)]
  dtype, dim = common(run, arrays), axis(dim, arrays[0].ndim)
  if any(isinstance(one, Last) for one in arrays):
    place = {0: 0, 1: arrays[0].ndim - 1}.get(dim, dim - 1)
    return Last(jnp.concatenate([last(one).astype(dtype) for one in arrays], place))
  return jnp.concatenate([one.astype(dtype) for one in arrays], dim)


@operation('stack')
def _stack(run: Run, arrays: Sequence[Any], dim: int = 0) -> Any:
  dtype = common(run, arrays)
  return jnp.stack([one.astype(dtype) for one in arrays], dim)


@operation('split', 'split_copy')
def _split(run: Run, x: Any, size: Any, dim: int = 0) -> Any:
  dim = axis(dim, x.ndim)
  edges = range(size, x.shape[dim], size) if isinstance(size, int) else np.cumsum(size)[:-1].tolist()
  return tuple(jnp.split(x, list(edges), dim))


OPERATIONS['split_with_sizes'] = OPERATIONS['split_with_sizes_copy'] = OPERATIONS['split']


operation('chunk')(lambda run, x, number, dim=0: _split(run, x, -(-x.shape[axis(dim, x.ndim)] // number), dim))


@operation('unbind', 'unbind_copy')
def _unbind(run: Run, x: Any, dim: int = 0) -> Any:
  return tuple(_select(run, x, dim, index) for index in range(x.shape[axis(dim, x.ndim)]))


@operation('copy')
def _copy(run: Run, x: Any, new: Any, *others: Any) -> Any:
  return jnp.broadcast_to(new.reshape((1,) * (x.ndim - new.ndim) + new.shape), x.shape).astype(x.dtype)


@operation('roll')
def _roll(run: Run, x: Any, shifts: Sequence[int], dims: Sequence[int] = ()) -> Any:
  return jnp.roll(x, tuple(shifts), tuple(dims)) if dims else jnp.roll(x, shifts[0])


def _padded(x: Any, pads: Sequence[int], **mode: Any) -> Any:
  """Returns an array padded as PyTorch lists it: (before, after) of the last axis first; negative ones crop."""
  pairs = [(pads[i], pads[i + 1]) for i in range(0, len(pads), 2)]
  pairs = [(0, 0)] * (x.ndim - len(pairs)) + pairs[::-1]
  values = plain(x)
  values = values[tuple(slice(max(-low, 0), values.shape[i] - max(-high, 0)) for i, (low, high) in enumerate(pairs))]
  found = jnp.pad(values, [(max(low, 0), max(high, 0)) for low, high in pairs], **mode)
  return Last(last(found)) if isinstance(x, Last) else found


on_maps('constant_pad_nd')(lambda run, x, pads, value=0: _padded(x, pads, constant_values=jnp.asarray(value, x.dtype)))


@on_maps('reflection_pad1d', 'reflection_pad2d', 'reflection_pad3d')
def _reflection_pad(run: Run, x: Any, pads: Sequence[int]) -> Any:
  return _padded(x, pads, mode='reflect')


@on_maps('replication_pad1d', 'replication_pad2d', 'replication_pad3d')
def _replication_pad(run: Run, x: Any, pads: Sequence[int]) -> Any:
  return _padded(x, pads, mode='edge')


@on_maps('pixel_shuffle')
def _pixel_shuffle(run: Run, x: Any, factor: int) -> Any:
  count, channels, height, width = x.shape
  parts = plain(x).reshape(count, channels // factor**2, factor, factor, height, width)
  return parts.transpose(0, 1, 4, 2, 5, 3).reshape(count, channels // factor**2, height * factor, width * factor)


# Places --------------------------------------------------------------------------------------------------------------


def _places(index: Any, length: int) -> Any:
  return jnp.where(index < 0, index + length, index)


operation('index', '_unsafe_index')(lambda run, x, indices: x[_all_places(x, indices)])


def _all_places(x: Any, indices: Sequence[Any]) -> tuple:
  if any(one is not None and one.dtype == bool for one in indices):
    raise Unsupported('indexing by booleans, whose result has no fixed shape')
  given = [one for one in indices if one is not None]
  rank = max(one.ndim for one in given)
  return tuple(
    slice(None) if one is None else _places(one.reshape((1,) * (rank - one.ndim) + one.shape), x.shape[place])
    for place, one in enumerate(indices)
  )


@operation('index_put', '_unsafe_index_put')
def _index_put(run: Run, x: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Any:
  values = values.astype(x.dtype)
  if len(indices) == 1 and indices[0].dtype == bool and values.size == 1 and not accumulate:  # x[x < 0] = 0
    chosen = indices[0].reshape(indices[0].shape + (1,) * (x.ndim - indices[0].ndim))
    return jnp.where(chosen, values.reshape(()), x)
  at = x.at[_all_places(x, indices)]
  return at.add(values) if accumulate else at.set(values)


operation('index_select')(lambda run, x, dim, index: jnp.take(x, index.reshape(-1), axis(dim, x.ndim)))


@operation('gather')
def _gather(run: Run, x: Any, dim: int, index: Any, *, sparse_grad: bool = False) -> Any:
  dim = axis(dim, x.ndim)
  x = x[tuple(slice(None) if i == dim else slice(side) for i, side in enumerate(index.shape))]
  return jnp.take_along_axis(x, index, dim)


def _scattered(x: Any, dim: int, index: Any) -> tuple[Any, tuple[slice, ...]]:
  """Returns `x.at` the places of an index along an axis, and which entries of a source go there."""
  places = list(jnp.indices(index.shape, index.dtype, sparse=True))
  places[axis(dim, x.ndim)] = index
  return x.at[tuple(places)], tuple(map(slice, index.shape))


@operation('scatter')
def _scatter(run: Run, x: Any, dim: int, index: Any, source: Any) -> Any:
  at, part = _scattered(x, dim, index)
  return at.set(source[part].astype(x.dtype) if is_array(source) and source.ndim else source)


@operation('scatter_add')
def _scatter_add(run: Run, x: Any, dim: int, index: Any, source: Any) -> Any:
  at, part = _scattered(x, dim, index)
  return at.add(source[part].astype(x.dtype))


# New arrays ----------------------------------------------------------------------------------------------------------


def _kind(run: Run, dtype: str | None, values: Sequence[Any] = ()) -> Any:
  return run.cast(dtype) if dtype else (run.dtype if not values else common(run, values))


@on_maps('full')
def _full(run: Run, shape: Sequence[int], value: Any, *, dtype: str | None = None, **options: Any) -> Any:
  return jnp.full(tuple(shape), value, _kind(run, dtype, [value]))


def _filled(value: int) -> Operation:
  def run(run: Run, *arguments: Any, dtype: str | None = None, **options: Any) -> Any:
    shape = next(one for one in arguments if isinstance(one, tuple | list))
    return jnp.full(tuple(shape), value, _kind(run, dtype))

  return run


on_maps('zeros', 'new_zeros', 'empty', 'empty_permuted', 'new_empty')(_filled(0))
on_maps('ones', 'new_ones')(_filled(1))


@on_maps('new_full')
def _new_full(run: Run, x: Any, shape: Sequence[int], value: Any, *, dtype: str | None = None, **options: Any) -> Any:
  return jnp.full(tuple(shape), value, run.cast(dtype) if dtype else x.dtype)


@on_maps('full_like')
def _full_like(run: Run, x: Any, value: Any, **options: Any) -> Any:
  return _new_full(run, x, x.shape, value, **options)


OPERATIONS['zeros_like'] = OPERATIONS['empty_like'] = lambda run, x, **options: _full_like(run, x, 0, **options)
OPERATIONS['ones_like'] = lambda run, x, **options: _full_like(run, x, 1, **options)


on_maps('scalar_tensor')(lambda run, value, *, dtype=None, **options: jnp.asarray(value, _kind(run, dtype, [value])))


@on_maps('arange')
def _arange(run: Run, *bounds: Any, dtype: str | None = None, **options: Any) -> Any:
  return jnp.arange(*bounds).astype(_kind(run, dtype, list(bounds)))


@on_maps('linspace')
def _linspace(run: Run, start: float, end: float, steps: int, *, dtype: str | None = None, **options: Any) -> Any:
  return jnp.linspace(start, end, steps, dtype=_kind(run, dtype))


# Products ------------------------------------------------------------------------------------------------------------


of_arrays('mm', 'bmm', 'matmul', 'mv', 'dot')(jnp.matmul)


@operation('addmm', 'baddbmm')
def _addmm(run: Run, bias: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> Any:
  product = jnp.matmul(a, b)
  (bias, product), _ = aligned(run, bias, product)
  beta, alpha = jnp.asarray(beta, product.dtype), jnp.asarray(alpha, product.dtype)
  return beta * bias + alpha * product


@on_maps('operator.getitem')
def _getitem(run: Run, value: Any, index: int) -> Any:
  if value[index] is None:
    raise Unsupported(f'output {index}')
  return value[index]


@operation('_cdist_forward')
def _cdist(run: Run, a: Any, b: Any, order: float, mode: Any) -> Any:
  return _vector_norm(run, a[..., :, None, :] - b[..., None, :, :], order, [-1])


@operation('_trilinear')
def _trilinear(run: Run, a: Any, b: Any, c: Any, *expanded: Any) -> Any:
  """Multiplies three arrays, expanded at the axes that are listed for each, and sums over the axes listed next."""
  *own, summed = expanded[:4]
  product = math.prod((jnp.expand_dims(one, tuple(at)) for one, at in zip((a, b, c), own, strict=True)), start=1.0)
  return jnp.sum(product, tuple(summed))


# Numbers of the program ----------------------------------------------------------------------------------------------

OPERATIONS['log_sigmoid_forward'] = lambda run, x: (OPERATIONS['log_sigmoid'](run, x), None)
OPERATIONS['sym_size'] = lambda run, x, dim: x.shape[dim]
OPERATIONS['sym_numel'] = lambda run, x: math.prod(x.shape)
for _name in ('add', 'sub', 'mul', 'floordiv', 'mod', 'neg', 'truediv', 'pow', 'eq', 'ne', 'lt', 'le', 'gt', 'ge'):
  OPERATIONS[f'operator.{_name}'] = functools.partial(lambda name, run, *of: getattr(operator, name)(*of), _name)
OPERATIONS['sym_max'] = lambda run, a, b: max(a, b)
OPERATIONS['sym_min'] = lambda run, a, b: min(a, b)
