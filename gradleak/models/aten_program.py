"""A program of PyTorch's operations (ATen) as data: it holds no object of PyTorch, and is run in JAX."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np

from gradleak.core import errors
from gradleak.models import aten, aten_layers
from gradleak.models.aten import Run

assert aten_layers  # it adds its operations
# Operations that move or change entries alone: what is behind them is a flattened map like what is before them.
_ENTRYWISE = frozenset(
  """
  relu sigmoid tanh gelu silu elu leaky_relu hardtanh relu6 hardswish hardsigmoid softplus clamp clamp_min neg abs exp
  native_dropout dropout operator.getitem clone alias contiguous detach _to_copy
  """.split()  # noqa: SIM905
)
_OF_ARGUMENTS = (TypeError, ValueError, IndexError, AttributeError)  # what JAX and Python raise for shapes and types
_VIEWS = ('view', '_unsafe_view', 'reshape', 'view_copy')
_OF_SHAPES = frozenset(
  """
  sym_size zeros_like ones_like full_like empty_like rand_like randn_like new_zeros new_ones new_full new_empty
  """.split()  # noqa: SIM905
)
_WITHOUT_GRADIENT = _OF_SHAPES.union(
  """
  detach argmax argmin gt ge lt le eq ne logical_not logical_and logical_or logical_xor isnan isinf isfinite
  """.split()  # noqa: SIM905
)


class Ref(NamedTuple):
  """The value of a place in a program."""

  place: int


class PerSample(NamedTuple):
  """A whole number that depends on the number N of samples: slope · N + offset."""

  slope: int
  offset: int


class Step(NamedTuple):
  """One operation.

  Attributes:
    name: of the operation, with its overload, such as 'add.Tensor'.
    arguments, options: numbers, texts, `Ref`s and tuples of these.
    place: of the value that it makes.
    where: the path of the module that it stands in.
    mark: 'dense' for a product with a weight that is held as [in, out]; 'channels last' for a flattened map whose rows
      keep their channels last; '' otherwise.
  """

  name: str
  arguments: tuple
  options: dict[str, Any]
  place: int
  where: str
  mark: str = ''

  @property
  def base(self) -> str:
    """The name without its overload."""
    return self.name if self.name.startswith('operator.') else self.name.partition('.')[0]

  @property
  def function(self) -> Callable[..., Any] | None:
    """What computes it, None where nothing does."""
    return aten.OPERATIONS.get(self.name, aten.OPERATIONS.get(self.base))

  @property
  def uses(self) -> list[int]:
    """The places of the values that it takes."""
    return list(_places((self.arguments, tuple(self.options.values()))))


def _places(value: Any) -> Any:
  if isinstance(value, Ref):
    yield value.place
  elif isinstance(value, tuple):
    for one in value:
      yield from _places(one)


class Program(NamedTuple):
  """A network in one mode.

  Attributes:
    steps: its operations, in their order, without those that nothing depends on.
    inputs: {place: name of the variable in the `state_dict`}.
    constants: {place: array}.
    image: the place of its input.
    shapes: {place: shape}, of the example; of arrays alone.
    output: the place of its logits.
    changed: {name of a variable: place of its new value}.
  """

  steps: tuple[Step, ...]
  inputs: dict[int, str]
  constants: dict[int, Any]
  image: int
  shapes: dict[int, tuple[int, ...]]
  output: int
  changed: dict[str, int]

  def of_any_batch(self, other: 'Program', sizes: tuple[int, int]) -> 'Program | None':
    """Returns the program for any number of samples, of which this one and the other are those for two numbers.

    Numbers that differ between them are linear in the number of samples. None where anything else differs.
    """

    def merged(one: Any, two: Any) -> Any:
      if isinstance(one, tuple) and isinstance(two, tuple) and type(one) is type(two) and len(one) == len(two):
        parts = [merged(*pair) for pair in zip(one, two, strict=True)]
        return Ref(*parts) if isinstance(one, Ref) else tuple(parts)
      if type(one) is int and type(two) is int and one != two and (two - one) % (sizes[1] - sizes[0]) == 0:
        slope = (two - one) // (sizes[1] - sizes[0])
        return PerSample(slope, one - slope * sizes[0])
      if type(one) is not type(two) or one != two:
        raise _Differs
      return one

    try:
      if len(self.steps) != len(other.steps) or self[1:2] + self[5:] != other[1:2] + other[5:]:
        raise _Differs
      steps = []
      for one, two in zip(self.steps, other.steps, strict=True):
        if (one.name, one.place, list(one.options)) != (two.name, two.place, list(two.options)):
          raise _Differs
        options = {name: merged(value, two.options[name]) for name, value in one.options.items()}
        steps.append(one._replace(arguments=merged(one.arguments, two.arguments), options=options))
      same = all(np.array_equal(value, other.constants.get(place)) for place, value in self.constants.items())
      return self._replace(steps=tuple(steps)) if same else None
    except _Differs:
      return None

  def run(
    self,
    run: Run,
    variables: Mapping[str, jax.Array],
    image: Any,
    watch: Callable[[Step, Any], None] | None = None,
    given: Mapping[int, Any] = MappingProxyType({}),
  ) -> dict[int, Any]:
    """Returns the value of each place.

    Args:
      run: how it is run.
      variables: arrays by name, in our layout.
      image: its input, an array, a `Last` or `Tokens`.
      watch: called with each step and its value.
      given: values of places, which no step makes then.

    Raises:
      UsageError: where an operation is asked for what it does not do.
    """
    values: dict[int, Any] = {place: variables[name] for place, name in self.inputs.items()}
    values |= {place: run.constant(constant) for place, constant in self.constants.items()}
    values |= {self.image: image, **given}
    for number, step in enumerate(self.steps):
      if step.place in given:
        continue
      run.where, run.number, run.mark = step.where or 'the network itself', number, step.mark
      function = step.function
      assert function is not None
      try:
        arguments = _filled(step.arguments, values, image.shape[0])
        options = {name: _filled(one, values, image.shape[0]) for name, one in step.options.items()}
        if any(isinstance(values[place], aten.Tokens) for place in step.uses):
          made = aten.on_tokens(run, step.base, function, arguments, options)
        else:
          made = function(run, *arguments, **options)
      except aten.Unsupported as error:
        raise unsupported([step], str(error)) from error
      except errors.UsageError:
        raise
      except _OF_ARGUMENTS as error:
        raise unsupported([step], f'these arguments ({errors.shown(str(error))})') from error
      values[step.place] = made
      if watch is not None:
        watch(step, made)
    return values

  @property
  def draws(self) -> bool:
    """Whether it has dropout."""
    return any(
      step.base in ('native_dropout', 'dropout', 'bernoulli')
      or (step.base == 'scaled_dot_product_attention' and len(step.arguments) > 4 and step.arguments[4])
      or (step.name.endswith('.input') and step.arguments[5] and step.arguments[6])
      for step in self.steps
    )

  def missing(self) -> list[Step]:
    """Returns the operations that nothing computes, each once."""
    found = {step.name: step for step in reversed(self.steps) if step.function is None or self._is_noise(step)}
    return list(reversed(found.values()))

  def _is_noise(self, step: Step) -> bool:
    """Returns whether a draw is for anything but a dropout of whole channels, which divides by its probability."""
    if step.base != 'bernoulli':
      return False
    users = [other for other in self.steps if step.place in other.uses]
    return step.name != 'bernoulli.p' or any(
      other.base != 'div' or other.arguments[1] != step.arguments[1] for other in users
    )

  def dense(self) -> dict[str, tuple[int, ...]]:
    """Returns {name: (C, …) of a flattened map that it takes} of the weights that only meet values in dense layers.

    A map is flattened in one order for all layers behind it, so that all of them take it, or none.
    """
    apart: set[int] = set()  # views that keep PyTorch's order
    while True:
      found: dict[str, tuple[int, ...] | None] = {}
      for step in self.steps:
        for index, one in enumerate(step.arguments):
          for name in (self.inputs[place] for place in _places((one,)) if place in self.inputs):
            alone = step.base == 'linear' and index == 1
            image = self._flattened(step, apart) if alone else None
            found[name] = image if found.get(name, image) == image else None
      more = {
        view.place
        for step in self.steps
        if step.base == 'linear' and not found.get(self._weight(step))
        for view in [self._view_behind(step.arguments[0].place)]
        if view is not None
      }
      if more <= apart:
        return {name: image for name, image in found.items() if image is not None}
      apart |= more

  def kernels(self) -> dict[str, tuple[int, ...]]:
    """Returns {name: the axes that are summed over} of the kernels of convolutions and recurrent layers."""
    found = {}
    for step in self.steps:
      recurrent = step.name.endswith('.input')
      for place in _places(step.arguments[2] if recurrent else step.arguments[1:2]):
        if place in self.inputs and (recurrent or step.base == 'convolution'):
          sides = len(self.shapes[place])
          found[self.inputs[place]] = (0,) if not recurrent and step.arguments[6] else tuple(range(1, sides))
    return found

  def _flattened(self, step: Step, apart: set[int]) -> tuple[int, ...]:
    """Returns the shape (C, …) of the map that a dense layer takes flattened, () where it takes none."""
    view = self._view_behind(step.arguments[0].place)
    if view is None or view.place in apart or not self._ends_in_dense(view.place):
      return ()
    return tuple(self.shapes[view.arguments[0].place][1:])

  def _view_behind(self, place: int) -> Step | None:
    """Returns the step that flattens a map [N, C, …], of which a value is made entry by entry."""
    makers = {step.place: step for step in self.steps}
    while (step := makers.get(place)) is not None:
      source = step.arguments[0]
      if step.base in _VIEWS:
        before, after = self.shapes.get(source.place, ()), self.shapes.get(place, ())
        flat = len(before) > 2 and len(after) == 2 and before[0] == after[0] and after[1] == math.prod(before[1:])
        return step if flat else None
      if step.base not in _ENTRYWISE or not isinstance(source, Ref):
        return None
      place = source.place
    return None

  def _ends_in_dense(self, place: int) -> bool:
    """Returns whether a value is used by dense layers alone, directly or entry by entry."""
    for step in self.steps:
      if place in step.uses:
        if step.base == 'linear' and step.uses.count(place) == 1 and step.arguments[0] == Ref(place):
          continue
        if step.base not in _ENTRYWISE or not self._ends_in_dense(step.place):
          return False
    return place != self.output and place not in self.changed.values()

  def marked(self, dense: Mapping[str, tuple[int, ...]]) -> 'Program':
    """Returns the program for weights of dense layers that are held as `dense` says."""
    last = {
      view.place
      for step in self.steps
      if step.base == 'linear' and self._weight(step) in dense and dense[self._weight(step)]
      for view in [self._view_behind(step.arguments[0].place)]
      if view is not None
    }

    def mark(step: Step) -> str:
      if step.base == 'linear' and self._weight(step) in dense:
        return 'dense'
      return 'channels last' if step.place in last else ''

    return self._replace(steps=tuple(step._replace(mark=mark(step)) for step in self.steps))

  def _weight(self, step: Step) -> str:
    """Returns the name of the weight of a dense layer, '' of one that is computed."""
    weight = step.arguments[1]
    return self.inputs.get(weight.place, '') if isinstance(weight, Ref) else ''

  def last_dense(self) -> Step | None:
    """Returns the last dense layer with a weight of its own."""
    return next((step for step in reversed(self.steps) if step.base == 'linear' and self._weight(step)), None)

  def ids(self) -> set[int]:
    """Returns the places of the input and of what is it in another order of axes."""
    found = {self.image}
    for step in self.steps:
      if step.base in aten.MOVES and step.uses[:1] and step.uses[0] in found:
        found.add(step.place)
    return found

  def looked_up(self) -> list[Step]:
    """Returns the steps that look the input up in a table."""
    ids = self.ids()
    return [step for step in self.steps if step.base == 'embedding' and step.arguments[1].place in ids]

  def vocabulary(self) -> int | None:
    """Returns how many rows a table has in which the input is looked up; None for no table, the least of several."""
    return min((self.shapes[step.arguments[0].place][0] for step in self.looked_up()), default=None)

  def behind(self, source: int, cuts: Collection[int] = ()) -> set[int]:
    """Returns the places of which the value depends on that of one, not by its shape alone; none through `cuts`."""
    found = {source}
    for step in self.steps:
      if step.base not in _OF_SHAPES and step.place not in cuts and not found.isdisjoint(step.uses):
        found.add(step.place)
    return found

  def between(self, cuts: Collection[int], wanted: int) -> 'Program':
    """Returns the program of the steps that one place depends on, where the values of places `cuts` are given."""
    return self._replace(steps=pruned([step for step in self.steps if step.place not in cuts], [wanted]))

  def order(self) -> list[str]:
    """Returns the names of the variables in the order in which they are used."""
    names = [self.inputs[place] for step in self.steps for place in step.uses if place in self.inputs]
    return list(dict.fromkeys(names))

  def trained(self) -> set[str]:
    """Returns the names of the variables that the gradient of the output reaches."""
    kept = pruned([step for step in self.steps if step.base not in _WITHOUT_GRADIENT], [self.output])
    places = {self.output, *(place for step in kept for place in step.uses)}
    return {name for place, name in self.inputs.items() if place in places}


class _Differs(Exception):
  """Two programs differ in more than numbers."""


def _filled(value: Any, values: Mapping[int, Any], count: int) -> Any:
  """Returns an argument with the values of its places, and for a number of samples."""
  if isinstance(value, Ref):
    return values[value.place]
  if isinstance(value, PerSample):
    return value.slope * count + value.offset
  if isinstance(value, tuple):
    return tuple(_filled(one, values, count) for one in value)
  return value


def pruned(steps: Sequence[Step], wanted: Sequence[int]) -> tuple[Step, ...]:
  """Returns the steps that any of the wanted places depends on."""
  needed, kept = set(wanted), []
  for step in reversed(steps):
    if step.place in needed:
      needed |= set(step.uses)
      kept.append(step)
  return tuple(reversed(kept))


def unsupported(steps: Sequence[Step], what: str = '') -> errors.UsageError:
  """Returns the one error about operations that are not understood: it names them and where they stand."""
  listed = ', '.join(f'aten.{step.name} in {step.where or "the network itself"}' for step in steps)
  reason = f'{what} in {listed}' if what else listed
  return errors.UsageError(
    f'from_torch does not understand {reason}. Replace it by other operations of PyTorch, or write the network in JAX '
    'and compare both by gradleak.models.agreement'
  )
