"""The stages of a convolutional network, between maps that everything behind them is computed from, read from a trace.

A stage ends where a ReLU makes a map, and nothing else that was computed from the image is used any more. That is so
after the sum of a residual block, and after each ReLU of a network without shortcuts. What a stage computes is a part
of the traced program, so it does not matter which library the network is written in.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gradleak.core import errors, trees
from gradleak.core.trees import Tree
from gradleak.models import convolution, repeated
from gradleak.models.model import Model
from gradleak.models.programs import walked

Path = tuple[str, ...]
_PRODUCTS = ('dot_general', 'conv_general_dilated', 'convolve')


class _Operation(NamedTuple):
  """One operation of a program without inner programs.

  Attributes:
    primitive, options: what it does.
    taken: places of values, or constants.
    made: places of values.
    relu: whether it is the maximum of a map and zero.
  """

  primitive: Any
  options: dict[str, Any]
  taken: tuple[Any, ...]
  made: tuple[int, ...]
  relu: bool

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
  """

  operations: tuple[_Operation, ...]
  source: int
  target: int
  shape: tuple[int, ...]
  paths: tuple[Path, ...]
  kernel: Path | None
  product: int | None

  @property
  def first(self) -> Path:
    """The path of the first convolution's weight, where there is one."""
    assert self.kernel is not None
    return self.kernel


class Stages(NamedTuple):
  """A network as stages.

  Attributes:
    stages: from the image to the last map; a ReLU follows each.
    head: from the last map to the input of the first dense layer, [1, features]; it has no parameters.
    dense: paths of the dense layer's (kernel [features, units], bias [units]).
    places: of every parameter's value in the program.
    constants: values by their places.
  """

  stages: tuple[Stage, ...]
  head: Stage
  dense: tuple[Path, Path]
  places: dict[Path, int]
  constants: dict[int, Any]

  def apply(
    self, stage: Stage, params: dict[Path, Any], x: jax.Array, until: int | None = None, relu: Any = jax.nn.relu
  ) -> jax.Array:
    """Returns what a stage makes of a map, or the value at another place of it.

    Args:
      stage: one of these.
      params: values by path; those of the stage suffice.
      x: the map, of the stage's shape.
      until: the place; the stage's target by default.
    """
    values = {**self.constants, **{self.places[path]: value for path, value in params.items()}, stage.source: x}
    target = stage.target if until is None else until
    for operation in stage.operations:
      if target in values:
        break
      _run(operation, values, relu)
    return values[target]

  def behind(self, stage: Stage, params: dict[Path, Any], x: jax.Array, product: jax.Array) -> jax.Array:
    """Returns what a stage makes of a map `x` where its first convolution gives `product`."""
    values = {**self.constants, **{self.places[path]: value for path, value in params.items()}, stage.source: x}
    for operation in stage.operations:
      _run(operation, values)
      if stage.product in operation.made:
        values[stage.product] = product
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
  found = _split(flat, places, given[-1], logits, (1, *sample_shape))
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
    if equation.primitive.name in ('scan', 'while', 'cond'):
      raise self.refuse(f'it has a {equation.primitive.name}')
    if inner is not None:
      return self.run(getattr(inner, 'jaxpr', inner), getattr(inner, 'consts', ()), taken)
    made = [self.place() for _ in equation.outvars]
    constants = [one for one in taken if not isinstance(one, int)]
    relu = equation.primitive.name == 'max' and len(constants) == 1 and not np.any(constants[0])
    relu = relu and len(equation.outvars[0].aval.shape) == 4
    self.operations.append(_Operation(equation.primitive, equation.params, tuple(taken), tuple(made), relu))
    self.shapes |= {place: tuple(v.aval.shape) for place, v in zip(made, equation.outvars, strict=True)}
    return made


def _run(operation: _Operation, values: dict[int, Any], relu: Any = jax.nn.relu) -> None:
  """Adds what an operation makes to the values."""
  taken = [values[one] if isinstance(one, int) else one for one in operation.taken]
  if operation.relu:
    values[operation.made[0]] = relu(values[operation.uses[0]])
    return
  made = operation.primitive.bind(*taken, **operation.options)
  values |= dict(zip(operation.made, made if operation.primitive.multiple_results else [made], strict=True))


def _split(flat: _Flat, places: dict[Path, int], image: int, logits: int, shape: tuple[int, ...]) -> Stages:
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
  flat.shapes[image] = shape
  found, start, source, alive = [], 0, image, {image}
  for index, operation in enumerate(kept):
    alive |= of_image & set(operation.made)
    alive = {place for place in alive if last_use.get(place, -1) > index}
    (made, *_) = operation.made
    if alive == {made} and operation.relu and len(flat.shapes[made]) == 4:
      (target,) = operation.uses
      found.append(_stage(kept[start:index], source, target, flat.shapes[source], by_place, of_image))
      start, source = index + 1, made
  if not found:
    raise flat.refuse('no ReLU makes a map that alone is used behind it')
  head, dense = _head(flat, kept[start:], source, by_place, of_image)
  return Stages(tuple(found), head, dense, places, flat.constants)


def _stage(
  operations: Sequence[_Operation],
  source: int,
  target: int,
  shape: tuple[int, ...],
  by_place: dict[int, Path],
  of_image: set[int],
) -> Stage:
  """Returns the `Stage` that these operations are."""
  kernel, product = None, None
  moved = {source}  # the map, moved only
  for operation in operations:
    uses = operation.uses
    own = [by_place[one] for one in uses if one in by_place]
    if operation.primitive.name in _PRODUCTS and len(own) == 1 and moved & set(uses) and kernel is None:
      kernel, product = own[0], operation.made[0]
    elif operation.primitive.name in ('pad', 'slice', 'concatenate', 'convert_element_type', 'copy'):
      images = [one for one in uses if one in of_image or one == source]
      moved |= set(operation.made) if images and set(images) <= moved else set()
  used = [by_place[one] for operation in operations for one in operation.uses if one in by_place]
  return Stage(tuple(operations), source, target, shape, tuple(dict.fromkeys(used)), kernel, product)


def _head(
  flat: _Flat, operations: Sequence[_Operation], source: int, by_place: dict[int, Path], of_image: set[int]
) -> tuple[Stage, tuple[Path, Path]]:
  """Returns the stage up to the first dense layer, and the paths of its kernel and bias."""
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
        head = Stage(tuple(operations[:index]), source, inputs[0], flat.shapes[source], (), None, None)
        return head, (own[0], biases[0])
      if len(biases) == 1 and later.primitive.name in ('reshape', 'broadcast_in_dim', 'convert_element_type'):
        grown[later.made[0]] = biases[0]
    break
  raise flat.refuse('behind its last map, no dense layer with a bias comes first')
