"""The stages of a convolutional network, between maps that everything behind them is computed from, read from a trace.

A stage ends where a ReLU makes a map, and nothing else that was computed from the image is used any more. That is so
after the sum of a residual block, and after each ReLU of a network without shortcuts. A max pool directly behind the
ReLU is a part of the stage. The two commute, so here it stands before the ReLU. Then no entry of a map is without
effect. What a stage computes is a part of the traced program, so it does not matter which library the
network is written in.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gradleak.core import errors, trees
from gradleak.core.trees import Tree
from gradleak.models import convolution, layers, repeated, soft_slopes
from gradleak.models.model import Model
from gradleak.models.programs import walked

Path = tuple[str, ...]
_PRODUCTS = ('dot_general', 'conv_general_dilated', 'convolve')
_MOVES = ('pad', 'slice', 'concatenate', 'convert_element_type', 'copy')
_SHAPES = ('reshape', 'transpose', 'squeeze', 'broadcast_in_dim', 'stack')


class _Operation(NamedTuple):
  """One operation of a program without inner programs.

  Attributes:
    primitive, options: what it does.
    taken: places of values, or constants.
    made: places of values.
    kind: 'relu' for the maximum of a map and zero, 'largest' for the maximum of windows along their last axis, 'pool'
      for XLA's max pool; '' for all else.
  """

  primitive: Any
  options: dict[str, Any]
  taken: tuple[Any, ...]
  made: tuple[int, ...]
  kind: str

  @property
  def uses(self) -> tuple[int, ...]:
    """The places of what it takes."""
    return tuple(one for one in self.taken if isinstance(one, int))


class Stage(NamedTuple):
  """What a network computes of one map: a part of its program.

  Attributes:
    operations: the part, without the ReLU behind it.
    source, target: places of its map and of what it makes.
    shape: of its map, (1, H, W, C).
    paths: of its parameters, in the order in which they are used.
    kernel: the path of the weight that its map meets in a convolution, before anything else acts on the map; None
      where there is none.
    product: the place of what that convolution makes.
    produced: the shape of that, (1, H', W', channels).
    shift: the path of what is added to each channel last, but for a shortcut and a max pool; None where there is none.
  """

  operations: tuple[_Operation, ...]
  source: int
  target: int
  shape: tuple[int, ...]
  paths: tuple[Path, ...]
  kernel: Path | None
  product: int | None
  produced: tuple[int, ...]
  shift: Path | None

  @property
  def first(self) -> Path:
    """The path of the first convolution's weight, where there is one."""
    assert self.kernel is not None
    return self.kernel

  @property
  def shortcut(self) -> bool:
    """Whether its map is used more than once, as where a shortcut passes it."""
    return sum(self.source in operation.uses for operation in self.operations) > 1


class Stages(NamedTuple):
  """A network as stages.

  Attributes:
    stages: from the image to the last map; a ReLU follows each.
    head: from the last map to the input of the first dense layer, [1, features]; it has no parameters.
    dense: paths of the dense layer's (kernel [features, units], bias [units]).
    last: whether no parameter is used behind that layer, as where it makes the logits.
    places: of every parameter's value in the program.
    shapes: of every parameter.
    constants: values by their places.
  """

  stages: tuple[Stage, ...]
  head: Stage
  dense: tuple[Path, Path]
  last: bool
  places: dict[Path, int]
  shapes: dict[Path, tuple[int, ...]]
  constants: dict[int, Any]

  def apply(
    self, stage: Stage, params: dict[Path, Any], x: jax.Array, until: int | None = None, width: Any = None
  ) -> jax.Array:
    """Returns what a stage makes of a map, or the value at another place of it.

    Args:
      stage: one of these.
      params: values by path; those of the stage suffice.
      x: the map, of the stage's shape.
      until: the place; the stage's target by default.
      width: of the soft derivatives of ReLUs and max pools, see `soft_slopes`; None for their own.
    """
    values = {**self.constants, **{self.places[path]: value for path, value in params.items()}, stage.source: x}
    target = stage.target if until is None else until
    for operation in stage.operations:
      if target in values:
        break
      _run(operation, values, width)
    return values[target]

  def behind(self, stage: Stage, params: dict[Path, Any], x: jax.Array, offset: jax.Array) -> jax.Array:
    """Returns what a stage makes of a map `x` where an offset is added to what its first convolution gives."""
    values = {**self.constants, **{self.places[path]: value for path, value in params.items()}, stage.source: x}
    for operation in stage.operations:
      _run(operation, values)
      if stage.product in operation.made:
        values[operation.made[0]] += offset
    return values[stage.target]


def stages(model: Model, variables: Tree, sample_shape: Sequence[int], train: bool = True) -> Stages:
  """Returns the `Stages` of a network, traced on one image.

  Args:
    model: the `Model`.
    variables: its variables, or their shapes.
    sample_shape: (H, W, C).
    train: whether BatchNorm uses the statistics of the batch.

  Raises:
    UsageError: for a network without such stages, or without a dense layer with a bias behind them.
  """
  image = jax.ShapeDtypeStruct((1, *sample_shape), jnp.float32)
  shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), dict(variables))
  with repeated.apart(), convolution.plain():
    closed = jax.make_jaxpr(lambda variables, image: model.apply(variables, image, train, None)[0])(shapes, image)
  flat = _Flat(model.name)
  leaves = [trees.path_names(path) for path, _ in jax.tree.leaves_with_path(shapes)]
  given = [flat.place() for _ in closed.jaxpr.invars]
  (logits,) = flat.run(closed.jaxpr, closed.consts, given)
  places = {path[1:]: place for path, place in zip(leaves, given, strict=False) if path[0] == 'params'}
  others = set(given[:-1]) - set(places.values())
  flat.shapes |= {place: tuple(v.aval.shape) for place, v in zip(given, closed.jaxpr.invars, strict=True)}
  found = _split(flat, places, given[-1], logits)
  if others & {one for part in (*found.stages, found.head) for operation in part.operations for one in operation.uses}:
    raise flat.refuse('it uses variables that are no parameters, such as running statistics')
  return found


class _Flat:
  """A program without inner programs, as a list of `_Operation`s whose values have places."""

  def __init__(self, name: str) -> None:
    self.name = name
    self.operations: list[_Operation] = []
    self.constants: dict[int, Any] = {}
    self.shapes: dict[int, tuple[int, ...]] = {}
    self._count = 0

  def place(self) -> int:
    self._count += 1
    return self._count

  def refuse(self, why: str) -> errors.UsageError:
    """Returns the error that says why this network is not understood."""
    return errors.UsageError(f'the model {self.name!r} does not come apart into stages of maps: {why}')

  def run(self, jaxpr: Any, constants: Sequence[Any], given: Sequence[Any]) -> list[Any]:
    """Adds the operations of a program; returns the places of its outputs."""
    places = [self.place() for _ in constants]
    self.constants |= dict(zip(places, constants, strict=True))
    return walked(jaxpr, places, given, self._add, np.asarray)

  def _add(self, equation: Any, taken: list[Any]) -> list[Any]:
    """Adds an operation, or those of the program in it; returns the places of what it makes."""
    inner = next((equation.params[key] for key in ('jaxpr', 'call_jaxpr') if key in equation.params), None)
    kind = _kind(equation, taken)
    if equation.primitive.name in ('scan', 'while', 'cond'):
      raise self.refuse(f'it has a {equation.primitive.name}')
    if inner is not None and not kind:
      return self.run(getattr(inner, 'jaxpr', inner), getattr(inner, 'consts', ()), taken)
    made = [self.place() for _ in equation.outvars]
    self.operations.append(_Operation(equation.primitive, equation.params, tuple(taken), tuple(made), kind))
    self.shapes |= {place: tuple(v.aval.shape) for place, v in zip(made, equation.outvars, strict=True)}
    return made


def _kind(equation: Any, taken: Sequence[Any]) -> str:
  """Returns `_Operation.kind`."""
  constants = [one for one in taken if not isinstance(one, int)]
  name, options = equation.primitive.name, equation.params
  if name == 'max' and len(constants) == 1 and not np.any(constants[0]) and len(equation.outvars[0].aval.shape) == 4:
    return 'relu'
  if name == 'reduce_window_max' and set(options['base_dilation']) == {1}:
    return 'pool'
  return 'largest' if name in ('jit', 'pjit') and options['name'] == layers.largest.__name__ else ''


def _run(operation: _Operation, values: dict[int, Any], width: Any = None) -> None:
  """Adds what an operation makes to the values."""
  taken = [values[one] if isinstance(one, int) else one for one in operation.taken]
  if not operation.kind:
    made = operation.primitive.bind(*taken, **operation.options)
    values |= dict(zip(operation.made, made if operation.primitive.multiple_results else [made], strict=True))
    return
  x = values[operation.uses[0]]
  if operation.kind == 'relu':
    made = jax.nn.relu(x) if width is None else soft_slopes.relu(x, width)
  else:
    windows = soft_slopes.pool_windows(x, operation.options) if operation.kind == 'pool' else x
    made = layers.largest(windows) if width is None else soft_slopes.largest(windows, width)
  values[operation.made[0]] = made


def _split(flat: _Flat, places: dict[Path, int], image: int, logits: int) -> Stages:
  """Returns the `Stages` of a program from its image to its logits."""
  needed, kept = {logits}, []
  for operation in reversed(flat.operations):  # without the running statistics
    if needed & set(operation.made):
      needed |= set(operation.uses)
      kept.append(operation)
  kept.reverse()
  of_image, last_use = {image}, {}
  for index, operation in enumerate(kept):
    last_use |= dict.fromkeys(operation.uses, index)
    if of_image & set(operation.uses):
      of_image |= set(operation.made)
  by_place = {place: path for path, place in places.items()}
  ends: list[tuple[list[_Operation], int, int]] = []  # (operations, source, target)
  start, source, alive = 0, image, {image}
  for index, operation in enumerate(kept):
    alive |= of_image & set(operation.made)
    alive = {place for place in alive if last_use.get(place, -1) > index}
    (made, *_) = operation.made
    if alive != {made} or len(flat.shapes[made]) != 4:
      continue
    part = kept[start:index]
    if operation.kind == 'relu':
      (target,) = operation.uses
      ends.append((part, source, target))
    elif operation.kind and ends and operation.uses[0] in _moved(part, {source}, of_image, _MOVES + _SHAPES):
      before, first, target = ends.pop()
      pooled = [one._replace(taken=_instead(one.taken, source, target)) for one in [*part, operation]]
      ends.append(([*before, *pooled], first, made))
    else:
      continue
    start, source = index + 1, made
  if not ends:
    raise flat.refuse('no ReLU makes a map that alone is used behind it')
  head, dense, is_last = _head(flat, kept[start:], source, by_place, of_image)
  found = tuple(_stage(part, first, target, flat.shapes, by_place, of_image) for part, first, target in ends)
  shapes = {path: flat.shapes[place] for path, place in places.items()}
  return Stages(found, head, dense, is_last, places, shapes, flat.constants)


def _instead(taken: Sequence[Any], place: int, other: int) -> tuple[Any, ...]:
  """Returns operands with another place instead of one."""
  return tuple(other if isinstance(one, int) and one == place else one for one in taken)


def _moved(
  operations: Sequence[_Operation], places: set[int], of_image: set[int], names: Sequence[str] = _MOVES
) -> set[int]:
  """Returns the places whose values are those at `places`, moved only by operations of these names."""
  found = set(places)
  for operation in operations:
    images = {one for one in operation.uses if one in of_image or one in places}
    if operation.primitive.name in names and images and images <= found:
      found |= set(operation.made)
  return found


def _carried(operations: Sequence[_Operation], by_place: dict[int, Path]) -> dict[int, Path]:
  """Returns the parameters by the places that hold one, as it is or in another shape, order or precision."""
  own = dict(by_place)
  for operation in operations:
    given = [own[one] for one in operation.uses if one in own]
    if len(given) == len(operation.uses) == 1 and operation.primitive.name in (*_SHAPES, 'convert_element_type'):
      own[operation.made[0]] = given[0]
  return own


def _shift(operations: Sequence[_Operation], target: int, by_place: dict[int, Path], of_image: set[int]) -> Path | None:
  """Returns the path of the parameter that is added last to each channel of what these operations make."""
  own = _carried(operations, by_place)
  by_made = {place: operation for operation in operations for place in operation.made}
  asked = [target]
  while asked:
    place = asked.pop()
    if place not in by_made:
      continue
    operation = by_made[place]
    images = [one for one in operation.uses if one in of_image]
    added = [own[one] for one in operation.uses if one in own]
    if operation.primitive.name == 'add' and len(images) == len(added) == 1:
      return added[0]
    if operation.primitive.name == 'add' or operation.kind or operation.primitive.name in _MOVES + _SHAPES:
      asked += images
  return None


def _stage(
  operations: Sequence[_Operation],
  source: int,
  target: int,
  shapes: dict[int, tuple[int, ...]],
  by_place: dict[int, Path],
  of_image: set[int],
) -> Stage:
  """Returns the `Stage` that these operations are."""
  kernel, product, carried = None, None, _carried(operations, by_place)
  for index, operation in enumerate(operations):
    own = [carried[one] for one in operation.uses if one in carried]
    moved = _moved(operations[:index], {source}, of_image)
    if operation.primitive.name in _PRODUCTS and len(own) == 1 and moved & set(operation.uses):
      kernel, product = own[0], operation.made[0]
      break
  used = [by_place[one] for operation in operations for one in operation.uses if one in by_place]
  shift = _shift(operations, target, by_place, of_image)
  paths, produced = tuple(dict.fromkeys(used)), () if product is None else shapes[product]
  return Stage(tuple(operations), source, target, shapes[source], paths, kernel, product, produced, shift)


def _head(
  flat: _Flat, operations: Sequence[_Operation], source: int, by_place: dict[int, Path], of_image: set[int]
) -> tuple[Stage, tuple[Path, Path], bool]:
  """Returns the stage up to the first dense layer, the paths of its kernel and bias, and whether it is the last."""
  for index, operation in enumerate(operations):
    own = [by_place[one] for one in operation.uses if one in by_place]
    if not own:
      continue
    inputs = [one for one in operation.uses if one in of_image]
    if operation.primitive.name != 'dot_general' or len(inputs) != 1 or len(flat.shapes[inputs[0]]) != 2:
      break
    made = operation.made[0]
    grown = dict(by_place)
    for later in operations[index + 1 :]:
      uses = later.uses
      biases = [grown[one] for one in uses if one in grown]
      if made in uses and later.primitive.name in ('add', 'add_any') and len(biases) == 1:
        head = Stage(tuple(operations[:index]), source, inputs[0], flat.shapes[source], (), None, None, (), None)
        used = {by_place[one] for operation in operations[index:] for one in operation.uses if one in by_place}
        return head, (own[0], biases[0]), used == {own[0], biases[0]}
      if len(biases) == 1 and later.primitive.name in ('reshape', 'broadcast_in_dim', 'convert_element_type'):
        grown[later.made[0]] = biases[0]
    break
  raise flat.refuse('behind its last map, no dense layer with a bias comes first')
