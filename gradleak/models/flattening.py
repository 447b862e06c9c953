"""The order in which dense layers take their inputs, here and in PyTorch, read from the traced network.

PyTorch has an image as [N, C, H, W] and flattens channels first; here it is [N, H, W, C]. Each array of the network is
followed from the operation that computes it to the weights that it meets. Reshaping, transposing, concatenating and
operations on single entries move or keep entries; convolutions, pooling and products make a new array. A map with its
channels at a known axis has one order in PyTorch. What is neither such a map nor the same array in both is not settled.
"""

import bisect
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from gradleak.core import trees
from gradleak.core.trees import Tree
from gradleak.models import convolution, repeated
from gradleak.models.model import Model
from gradleak.models.programs import walked

# Act on entries alone, so that entry i of the result is made of entry i of each operand.
_ELEMENTWISE = frozenset(
  """
  abs add add_any and asin asinh acos acosh atan atan2 atanh cbrt ceil clamp convert_element_type copy copy_p cos cosh
  digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt integer_pow is_finite le lgamma log log1p logistic lt max
  min mul name ne neg nextafter not optimization_barrier or pow reduce_precision rem round rsqrt select_n sign sin sinh
  sqrt square stop_gradient sub tan tanh xor
  """.split()  # noqa: SIM905
)


class Order(NamedTuple):
  """How a parameter meets the values that it acts on.

  Attributes:
    axis: of a matrix, the one that is summed over; 0 of a vector.
    places: int [entries along `axis`], the place in PyTorch of each entry here; None where it is the same.
    problem: why the order in PyTorch is not settled, a clause; '' if it is.
    maps: (H, W, C) of the one array whose entries a matrix takes, all flattened; None for any other.
  """

  axis: int
  places: np.ndarray | None = None
  problem: str = ''
  maps: tuple[int, ...] | None = None


class Kernel(NamedTuple):
  """How the kernel of a convolution stands here.

  Attributes:
    axes: which of its axes PyTorch has in which place: that of the features, of the inputs, and those of the window.
    spread: whether the inputs are spread apart, as in a transposed convolution of some stride. PyTorch's kernel of that
      begins with the inputs, and its window is turned around.
  """

  axes: tuple[int, ...]
  spread: bool

  def ours(self, values: np.ndarray) -> np.ndarray:
    """Returns a kernel of PyTorch in the layout that it has here."""
    values = np.flip(np.swapaxes(values, 0, 1), tuple(range(2, values.ndim))) if self.spread else values
    return values.transpose(np.argsort(self.axes))


Summed: TypeAlias = dict[tuple[str, ...], tuple[int, ...] | None]  # path of a kernel -> axes, see `summed`


class _Source(NamedTuple):
  """An array that the network computes: its entries have the labels from `start` on.

  Attributes:
    start: the first label.
    shape: of the array, N = 1.
    channel: the axis of the channels of an image, which PyTorch has at 1; None of an array that both have alike.
    problem: why its order in PyTorch is not known; '' if it is.
  """

  start: int
  shape: tuple[int, ...]
  channel: int | None = None
  problem: str = ''


class _Parameter(NamedTuple):
  """An array among the variables, and which of its axes each axis of a value is; None for a new one."""

  path: tuple[str, ...]
  axes: tuple[int | None, ...]


def orders(model: Model, variables: Tree, sample_shape: Sequence[int]) -> dict[tuple[str, ...], Order]:
  """Returns the `Order` of each vector and matrix among a model's variables, by its path without the collection.

  Parameters that meet no value of the network by a product or entry by entry are left out.

  Args:
    model: the `Model`.
    variables: its variables, or their shapes.
    sample_shape: (H, W, C).
  """
  return _walks(model, variables, sample_shape, (1, 2))[0].found


def summed(model: Model, variables: Tree, sample_shape: Sequence[int]) -> Summed:
  """Returns the axes of each kernel that are summed over, by its path without the collection, where they are known.

  A kernel of several axes, as in the attention of Flax, is known by the product that it stands in; a matrix by its
  `Order`. An array that holds the kernels of several blocks or experts has None.

  Args:
    model, variables, sample_shape: as `orders` takes them.
  """
  wide = max((leaf.ndim for leaf in jax.tree.leaves(variables['params'])), default=0)
  matrices, *kernels = _walks(model, variables, sample_shape, (1, 2), *[tuple(range(3, wide + 1))] * (wide > 2))
  found: Summed = {path: (order.axis,) for path, order in matrices.found.items()}
  return functools.reduce(lambda known, walk: {**known, **walk.products}, kernels, found)


def layouts(
  model: Model, variables: Tree, sample_shape: Sequence[int]
) -> tuple[dict[tuple[str, ...], Order], dict[tuple[str, ...], Kernel]]:
  """Returns what `orders` does, and the `Kernel` of each convolution that takes its kernel as it is held, by its path.

  Args:
    model, variables, sample_shape: as `orders` takes them.
  """
  matrices, held = _walks(model, variables, sample_shape, (1, 2), (3, 4, 5))
  return matrices.found, held.kernels


def _walks(model: Model, variables: Tree, sample_shape: Sequence[int], *ranks: Sequence[int]) -> list['_Walk']:
  """Returns a walk through the network for each selection of parameters, those of so many axes."""
  image = model.samples(1, sample_shape, wide=False)
  shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), dict(variables))
  with repeated.apart(), convolution.plain():
    closed = jax.make_jaxpr(lambda variables, image: model.apply(variables, image, False, None)[0])(shapes, image)
  walks = []
  for chosen in ranks:
    walk = _Walk()
    given: list[Any] = [_parameter(path, leaf, chosen) for path, leaf in jax.tree.leaves_with_path(shapes)]
    given.append(walk.fresh(image.shape, 3 if len(sample_shape) == 3 else None))
    walk.run(closed.jaxpr, [None] * len(closed.jaxpr.constvars), given)
    walks.append(walk)
  return walks


def _parameter(path: tuple, leaf: Any, ranks: Sequence[int]) -> _Parameter | None:
  return _Parameter(trees.path_names(path)[1:], tuple(range(leaf.ndim))) if leaf.ndim in ranks else None


class _Walk:
  """Follows arrays through a program.

  A value is a `_Source`, an array of labels of entries of sources, a `_Parameter`, or None for all else.
  """

  def __init__(self) -> None:
    self.sources: list[_Source] = []
    self.found: dict[tuple[str, ...], Order] = {}
    self.products: Summed = {}  # axes of kernels that are summed over
    self.kernels: dict[tuple[str, ...], Kernel] = {}
    self._tied: dict[tuple[str, ...], set[tuple[str, ...]]] = {}

  def fresh(self, shape: Sequence[int], channel: int | None = None, problem: str = '') -> _Source:
    """Returns a new source; an image without pixels is an array that both have alike."""
    last = self.sources[-1] if self.sources else _Source(0, (0,))
    if channel is not None and math.prod(shape) == shape[channel]:
      channel = None
    self.sources.append(_Source(last.start + math.prod(last.shape), tuple(shape), channel, problem))
    return self.sources[-1]

  def run(self, jaxpr: Any, constants: Sequence[Any], given: Sequence[Any]) -> list[Any]:
    """Returns the values of a program's outputs, given those of its inputs."""
    return walked(jaxpr, constants, given, self._apply, lambda number: None)

  def _apply(self, equation: Any, values: list[Any]) -> list[Any]:
    name, options = equation.primitive.name, equation.params
    shapes = [tuple(variable.aval.shape) for variable in equation.outvars]
    inner = next((options[key] for key in ('jaxpr', 'call_jaxpr', 'fun_jaxpr') if key in options), None)
    if name == 'scan':
      return self._scan(equation, values)
    if name == 'cond':
      branches = [self._closed(branch, values[1:]) for branch in options['branches']]
      return branches[0]
    if inner is not None and name != 'while':
      return self._closed(inner, values)
    if all(value is None for value in values):
      return [None] * len(shapes)
    if name in _ELEMENTWISE and len(shapes) == 1:
      return [self._elementwise(values, shapes[0])]
    if name == 'dot_general':
      return [self._product(values, options['dimension_numbers'], shapes[0])]
    first = values[0]
    if isinstance(first, _Parameter):
      given = tuple(equation.invars[0].aval.shape)
      return [_moved(first, name, options, given, shape) for shape in shapes]
    if name in ('conv_general_dilated', 'convolve'):
      native = name == 'conv_general_dilated'
      channel = options['dimension_numbers'].out_spec[1] if native else 3
      if isinstance(values[1], _Parameter):  # a kernel that is held as a matrix
        self._meet(values[1], (None,))
        held = values[1].axes[options['dimension_numbers'].rhs_spec[0] if native else 0]
        if held is not None:
          self._put(values[1].path, Order(1 - held))
        axes = [values[1].axes[axis] for axis in options['dimension_numbers'].rhs_spec] if native else []
        known = tuple(axis for axis in axes if axis is not None)
        if native and len(known) == len(axes):
          self.kernels[values[1].path] = Kernel(known, max(options['lhs_dilation']) > 1)
      return [self.fresh(shapes[0], channel, self._reshaped(first))]
    if name == 'concatenate':
      return [self._joined(values, equation.invars, options['dimension'], shapes[0])]
    if first is None:
      array = next(filter(_is_array, values), None)
      return [None if array is None else self._new(array, shape) for shape in shapes]
    if name in _REDUCTIONS:
      return [self._reduced(first, options['axes'], shape) for shape in shapes]
    if name in _MOVES or (name in _PARTS and self._channel(first) is None):
      return (_MOVES | _PARTS)[name](_labels(first), options, shapes)
    return [self._new(first, shape) for shape in shapes]

  def _closed(self, jaxpr: Any, values: list[Any]) -> list[Any]:
    inner = getattr(jaxpr, 'jaxpr', jaxpr)
    return self.run(inner, [None] * len(inner.constvars), values)

  def _scan(self, equation: Any, values: list[Any]) -> list[Any]:
    """Follows one step of a loop: of what is stacked its first entry, and what it stacks is alike in both."""
    body = equation.params['jaxpr'].jaxpr
    kept, carried = _alike(equation.invars, body.invars), _alike(equation.outvars, body.outvars)
    made = self._closed(body, [*values[:kept], *map(_first, values[kept:])])
    return [*made[:carried], *(self.fresh(variable.aval.shape) for variable in equation.outvars[carried:])]

  def _elementwise(self, values: list[Any], shape: tuple[int, ...]) -> Any:
    arrays = [value for value in values if _is_array(value) and value.shape == shape]
    parameters = [value for value in values if isinstance(value, _Parameter) and len(value.axes) == len(shape)]
    if not arrays:
      parameters.sort(key=lambda one: one.axes.count(None))
      for one, other in itertools.pairwise(parameters):
        if one.axes == other.axes:
          self._tied.setdefault(one.path, set()).add(other.path)
      return parameters[0] if parameters else None
    main = self._main(arrays)
    for one in parameters:
      for place, axis in enumerate(one.axes):
        if axis is not None and shape[place] > 1:
          self._record(one.path, 0, main, place)
    return main

  def _main(self, arrays: list[Any]) -> Any:
    """Returns the entries that are made of one entry of each array: those of the one that the others follow."""
    if len(arrays) == 1:
      return arrays[0]
    whole = [one for one in arrays if isinstance(one, _Source) or one.size == len(np.unique(one))]
    if whole and all(self._alike(whole[0], other) for other in whole[1:]):
      return whole[0]
    return self._new(arrays[0], arrays[0].shape)

  def _alike(self, one: Any, other: Any) -> bool:
    """Returns whether entries at one place of two arrays also stand at one place in PyTorch."""
    if one is other:
      return True
    channels = self._channel(one), self._channel(other)
    if channels != (None, None):
      return channels[0] == channels[1]
    mine, theirs = self._source(one), self._source(other)
    if mine is None or theirs is None or mine.problem or theirs.problem or mine[1:] != theirs[1:]:
      return np.array_equal(_labels(one), _labels(other))
    return np.array_equal(_labels(one) - mine.start, _labels(other) - theirs.start)

  def _product(self, values: list[Any], numbers: tuple, shape: tuple[int, ...]) -> Any:
    contracted, batched = numbers
    for side, other in ((0, 1), (1, 0)):
      parameter = values[other]
      if isinstance(parameter, _Parameter):
        self._meet(parameter, tuple(parameter.axes[axis] for axis in contracted[other]), bool(batched[other]))
      if isinstance(parameter, _Parameter) and len(contracted[other]) == 1:
        axis = parameter.axes[contracted[other][0]]
        if axis is not None and _is_array(values[side]):
          self._record(parameter.path, axis, values[side], contracted[side][0])
        elif axis is not None:
          self._put(parameter.path, Order(axis))
    sides = [side for side in (0, 1) if _is_array(values[side])]
    if len(sides) != 1:
      return self.fresh(shape) if sides else None
    (side,) = sides
    axes, channel = len(values[side].shape), self._channel(values[side])
    free = [axis for axis in range(axes) if axis not in (*contracted[side], *batched[side])]
    others = len(shape) - len(batched[side]) - len(free)
    if channel in free:
      return self.fresh(shape, len(batched[side]) + side * others + free.index(channel))
    if channel in contracted[side] and axes > 3 and others == 1:  # at each pixel, as a convolution of one pixel
      return self.fresh(shape, len(batched[side]) + (1 - side) * len(free))
    return self.fresh(shape)

  def _meet(self, parameter: _Parameter, axes: tuple[int | None, ...], several: bool = False) -> None:
    """Keeps the axes of a kernel that are summed over; None where it is one of several in an array, as in a loop."""
    if several or 0 not in parameter.axes:
      self.products[parameter.path] = None
    elif None not in axes:
      self.products.setdefault(parameter.path, tuple(axis for axis in axes if axis is not None))

  def _reduced(self, array: Any, axes: Sequence[int], shape: tuple[int, ...]) -> _Source:
    channel = self._channel(array)
    if channel is not None:
      return self.fresh(shape, None if channel in axes else channel - sum(axis < channel for axis in axes))
    return self.fresh(shape, None, self._unsettled(array, [i for i in range(len(array.shape)) if i not in axes]))

  def _joined(self, values: list[Any], variables: Sequence[Any], axis: int, shape: tuple[int, ...]) -> Any:
    channels = {self._channel(value) if _is_array(value) else None for value in values}
    if channels != {None} and len(channels) == 1:
      return self.fresh(shape, channels.pop())
    parts = [
      _labels(value if _is_array(value) else self.fresh(variable.aval.shape))
      for value, variable in zip(values, variables, strict=True)
    ]
    return np.concatenate(parts, axis)

  def _new(self, array: Any, shape: tuple[int, ...]) -> _Source:
    """Returns an array that is made of another one in a way that is not followed."""
    channel = self._channel(array)
    if channel is not None and len(shape) == len(array.shape):
      return self.fresh(shape, channel)
    problem = 'an image is indexed' if channel is not None else self._unsettled(array, range(len(array.shape)))
    return self.fresh(shape, None, problem)

  def _unsettled(self, array: Any, axes: Sequence[int]) -> str:
    """Returns why the order along some axes is not settled in PyTorch; '' where it is the same."""
    found = [self._order(array, axis) for axis in axes]
    changed = any(places is not None for places, _ in found)
    return next((problem for _, problem in found if problem), 'a flattened image is computed with' * changed)

  def _reshaped(self, array: Any) -> str:
    """Returns why what is taken for an image has no known order in PyTorch; '' where it has."""
    if not _is_array(array) or self._channel(array) is not None:
      return ''
    source = self._source(array)
    if source is not None and not source.problem and source.channel is None:
      features = (_labels(array) - source.start) % source.shape[-1]
      if sum(_varies(features, axis) for axis in range(features.ndim)) <= 1:
        return ''
    return 'features are reshaped to an image'

  def _source(self, array: Any) -> _Source | None:
    """Returns the only source of an array's entries; None where there are several."""
    if isinstance(array, _Source):
      return array
    low, high = self._owner(array.min()), self._owner(array.max())
    return self.sources[low] if low == high else None

  def _owner(self, label: int) -> int:
    return bisect.bisect(self.sources, label, key=lambda source: source.start) - 1

  def _channel(self, array: Any) -> int | None:
    """Returns the axis of the channels of an array that is an image; None for any other."""
    source = self._source(array) if math.prod(array.shape) else None
    if source is None or source.channel is None or source.problem or len(array.shape) < 3:
      return None
    if array is source:
      return source.channel
    channels, pixels = _coordinates(array, source)
    axes = [axis for axis in range(array.ndim) if _varies(channels, axis)]
    return axes[0] if len(axes) == 1 and not _varies(pixels, axes[0]) else None

  def _record(self, path: tuple[str, ...], axis: int, array: Any, along: int) -> None:
    self._put(path, Order(axis, *self._order(array, along), self._maps(array, along)))

  def _maps(self, array: Any, axis: int) -> tuple[int, ...] | None:
    source = self._source(array)
    if source is None or array.shape[axis] != math.prod(source.shape):
      return None
    if source.channel is None:
      return 1, 1, array.shape[axis]
    sides = [side for i, side in enumerate(source.shape) if i not in (0, source.channel)]
    return (*sides, source.shape[source.channel]) if len(sides) == 2 else None

  def _put(self, path: tuple[str, ...], order: Order) -> None:
    """Keeps the order of a parameter, and of those that are tied to it."""
    old = self.found.get(path)
    if old is not None and not order.problem:
      same = old.axis == order.axis and np.array_equal(_plain(old.places), _plain(order.places))
      if not same or old.problem:
        order = Order(order.axis, None, old.problem or 'it meets its inputs in several orders')
    self.found[path] = order
    for other in self._tied.get(path, ()):
      if self.found.get(other) is not order:
        self._put(other, order)

  def _order(self, array: Any, axis: int) -> tuple[np.ndarray | None, str]:
    """Returns (places in PyTorch of the entries along an axis, None where they are the same; why it is not settled)."""
    if isinstance(array, _Source):  # one axis of an array as it was computed is of channels, of rows or of columns
      return None, array.problem
    labels = np.moveaxis(array, axis, -1).reshape(-1, array.shape[axis])[0]
    owners: Any = np.searchsorted([source.start for source in self.sources], labels, side='right') - 1
    edges = [0, *(np.flatnonzero(np.diff(owners)) + 1), len(labels)]
    mixed = len(np.unique(owners)) < len(edges) - 1
    places = np.arange(len(labels))
    for start, end in itertools.pairwise(edges):
      source, part = self.sources[owners[start]], labels[start:end]
      if source.problem:
        return None, source.problem
      if source.channel is None:
        continue
      channels, pixels = _coordinates(part, source)
      if not (_varies(channels, 0) and _varies(pixels, 0)):
        continue
      if mixed or not len(part) == len(np.unique(part)) == math.prod(source.shape):
        shown = '×'.join(map(str, source.shape[1:]))
        return None, f'it takes some of the pixels and channels of an image of {shown} at a time'
      places[start + np.lexsort((pixels, channels))] = np.arange(start, end)
    return (None if np.array_equal(places, np.arange(len(places))) else places), ''


def _is_array(value: Any) -> bool:
  return isinstance(value, _Source | np.ndarray)


def _labels(array: Any) -> np.ndarray:
  if isinstance(array, np.ndarray):
    return array
  return np.arange(array.start, array.start + math.prod(array.shape)).reshape(array.shape)


def _plain(places: np.ndarray | None) -> np.ndarray:
  return np.zeros(0) if places is None else places


def _coordinates(labels: np.ndarray, source: _Source) -> tuple[np.ndarray, np.ndarray]:
  """Returns (channel, number of the pixel) of entries of an image."""
  assert source.channel is not None
  after = math.prod(source.shape[source.channel + 1 :])
  offset, count = labels - source.start, source.shape[source.channel]
  return offset // after % count, offset // (after * count) * after + offset % after


def _varies(values: np.ndarray, axis: int) -> bool:
  return bool(np.any(np.take(values, [0], axis) != values))


def _alike(outside: Sequence[Any], inside: Sequence[Any]) -> int:
  """Returns how many variables of a loop have no axis of its steps; they come first."""
  return sum(len(a.aval.shape) == len(b.aval.shape) for a, b in zip(outside, inside, strict=True))


def _first(value: Any) -> Any:
  """Returns the first entry of what a loop goes through."""
  if isinstance(value, _Parameter):
    return _Parameter(value.path, value.axes[1:])
  return _labels(value)[0] if _is_array(value) else None


def _moved(
  one: _Parameter, name: str, options: dict[str, Any], given: tuple[int, ...], shape: tuple[int, ...]
) -> _Parameter | None:
  """Returns a parameter after an operation that only moves its axes; None after any other."""
  axes: list[int | None] = [None] * len(shape)
  if name == 'transpose':
    axes = [one.axes[axis] for axis in options['permutation']]
  elif name == 'broadcast_in_dim':
    for axis, place in zip(one.axes, options['broadcast_dimensions'], strict=True):
      axes[place] = axis
  elif name in ('reshape', 'squeeze', 'expand_dims'):
    left = [axis for axis in one.axes if axis is not None]
    wide = [place for place, length in enumerate(shape) if length > 1]
    if len(left) > 1 and given[:1] == shape[:1]:  # the other axes of a kernel are taken apart
      return _Parameter(one.path, (one.axes[0], *axes[1:]))
    if len(wide) != len(left) or len(left) > 1:
      return None
    for place, axis in zip(wide, left, strict=True):
      axes[place] = axis
  else:
    return None
  return _Parameter(one.path, tuple(axes))


def _broadcast(array: np.ndarray, options: dict[str, Any], shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
  wide = [1] * len(shapes[0])
  for length, place in zip(array.shape, options['broadcast_dimensions'], strict=True):
    wide[place] = length
  return [np.broadcast_to(array.reshape(wide), shapes[0])]


def _sliced(array: np.ndarray, options: dict[str, Any], shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
  del shapes
  strides = options['strides'] or (1,) * array.ndim
  return [
    array[tuple(map(slice, options['start_indices'], options['limit_indices'], strides))]  # type: ignore[arg-type]
  ]


_REDUCTIONS = ('reduce_sum', 'reduce_max', 'reduce_min', 'reduce_prod', 'reduce_and', 'reduce_or', 'argmax', 'argmin')
# Operations that move entries: (labels, options, shapes of the results) -> labels of each.
_MOVES: dict[str, Any] = {
  'reshape': lambda labels, options, shapes: [labels.reshape(shapes[0])],
  'squeeze': lambda labels, options, shapes: [labels.reshape(shapes[0])],
  'expand_dims': lambda labels, options, shapes: [labels.reshape(shapes[0])],
  'transpose': lambda labels, options, shapes: [labels.transpose(options['permutation'])],
  'broadcast_in_dim': _broadcast,
}
# Operations that take some of them, or turn them around: of an image they make a new one.
_PARTS: dict[str, Any] = {
  'slice': _sliced,
  'split': lambda labels, options, shapes: np.split(labels, np.cumsum(options['sizes'])[:-1], options['axis']),
  'rev': lambda labels, options, shapes: [np.flip(labels, options['dimensions'])],
}
