"""Counts what a traced program computes, without compiling it: operations by kind, equations, and memory."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from gradleak.models.programs import walked

# Entries that count for each one that an operation makes: none where XLA moves no data, several of functions.
_COSTS = {
  **dict.fromkeys(
    ('broadcast_in_dim', 'convert_element_type', 'copy', 'copy_p', 'expand_dims', 'iota', 'pvary', 'random_unwrap',
     'random_wrap', 'reshape', 'sharding_constraint', 'squeeze', 'stop_gradient'), 0.0
  ),
  **dict.fromkeys(('cos', 'erf', 'exp', 'exp2', 'expm1', 'log', 'log1p', 'logistic', 'pow', 'sin', 'tanh'), 10.0),
  **dict.fromkeys(('erf_inv', 'random_bits', 'threefry2x32'), 30.0),
}  # fmt: skip
_FACTORISATIONS = ('cholesky', 'eigh', 'householder_product', 'lu', 'qr', 'svd', 'triangular_solve')
_SMALL = 64  # entries of an array whose values are followed: numbers of turns, no samples
_ADDED = ('products', 'entries', 'executed', 'equations', 'open_loops')


def _divided(a: Any, b: Any) -> Any:
  return np.trunc(a / b).astype(a.dtype) if np.issubdtype(a.dtype, np.integer) else a / b


# What is computed in advance, since a loop's number of turns may follow from it.
_FOLLOWED: dict[str, Callable[..., Any]] = {
  'add': np.add, 'sub': np.subtract, 'mul': np.multiply, 'div': _divided, 'rem': np.fmod, 'neg': np.negative,
  'min': np.minimum, 'max': np.maximum, 'lt': np.less, 'le': np.less_equal, 'gt': np.greater, 'ge': np.greater_equal,
  'eq': np.equal, 'ne': np.not_equal, 'clamp': lambda low, x, high: np.clip(x, low, high),
  'select_n': lambda which, *cases: np.choose(which.astype(np.int32), cases),
}  # fmt: skip
_SHAPED: dict[str, Callable[..., Any]] = {
  'convert_element_type': lambda x, new_dtype, **_: x.astype(new_dtype),
  'squeeze': lambda x, dimensions, **_: np.squeeze(x, tuple(dimensions)),
  'reshape': lambda x, new_sizes, **_: np.reshape(x, new_sizes),
  'slice': lambda x, start_indices, limit_indices, strides, **_: x[
    tuple(slice(*each) for each in zip(start_indices, limit_indices, strides or (1,) * x.ndim, strict=True))
  ],
}


@dataclasses.dataclass(frozen=True)
class Operations:
  """What a program computes.

  Attributes:
    products: floating-point operations of matrix products and convolutions.
    entries: entries that all operations make, those of functions such as exp counted several times.
    executed: operations that are started, of whatever size.
    equations: operations in the program's text, which XLA compiles.
    held: bytes of the values that are alive at a time, at most, if nothing is fused.
    open_loops: loops whose turns depend on values that are not known; each is counted as one turn.
  """

  products: float = 0.0
  entries: float = 0.0
  executed: float = 0.0
  equations: int = 0
  held: float = 0.0
  open_loops: int = 0

  def times(self, turns: float, together: float = 1) -> 'Operations':
    """Returns those of that many turns of a loop, of which some are started together, as lanes of a group are."""
    return dataclasses.replace(
      self,
      products=turns * self.products,
      entries=turns * self.entries,
      executed=turns * self.executed / together,
    )

  def called(self) -> 'Operations':
    """Returns those of a call of what was compiled before: no text."""
    return dataclasses.replace(self, equations=0, open_loops=0)

  def text(self) -> 'Operations':
    """Returns those of a program that is compiled and not called."""
    return dataclasses.replace(self, products=0.0, entries=0.0, executed=0.0)

  def __add__(self, other: 'Operations') -> 'Operations':
    added = {name: getattr(self, name) + getattr(other, name) for name in _ADDED}
    return Operations(**added, held=max(self.held, other.held))


def counted(program: ClosedJaxpr, given: Sequence[Any] | None = None) -> Operations:
  """Returns the `Operations` of a traced program.

  Args:
    program: such as `jax.make_jaxpr(f)(*shapes)`.
    given: values of its inputs, None for those of which only the shape is known. Loops turn as often as these say.
  """
  inputs = [None] * len(program.jaxpr.invars) if given is None else [_known(x) for x in given]
  return _through(program, inputs)[0]


def _known(value: Any) -> np.ndarray | None:
  """Returns a value that is followed through the program, or None."""
  small = isinstance(value, np.ndarray | np.generic | int | float) and np.size(value) <= _SMALL
  return np.asarray(value) if small else None


def _through(program: ClosedJaxpr | Jaxpr, given: Sequence[Any]) -> tuple[Operations, list[Any]]:
  """Returns (operations of a program whose inputs have these values, values of its outputs)."""
  closed = isinstance(program, ClosedJaxpr)
  jaxpr = program.jaxpr if closed else program
  constants = [_known(x) for x in program.consts] if closed else [None] * len(jaxpr.constvars)
  found: list[Operations] = []

  def operation(equation: Any, values: list[Any]) -> Sequence[Any]:
    one, made = _operation(equation, values)
    found.append(one)
    return made

  results = walked(jaxpr, constants, given, operation, _known)
  total = sum(found, Operations())
  return dataclasses.replace(total, held=_held(jaxpr, [one.held for one in found])), results


def _operation(equation: Any, values: list[Any]) -> tuple[Operations, Sequence[Any]]:
  """Returns (operations of an equation, values of what it makes)."""
  name, params, unknown = equation.primitive.name, equation.params, [None] * len(equation.outvars)
  if name == 'while':
    return _while(params, values), unknown
  if name == 'scan':
    fixed = params['num_consts']
    inside, _ = _through(params['jaxpr'], [*values[:fixed], *[None] * (len(values) - fixed)])
    return inside.times(params['length']), unknown
  if name == 'cond':
    return _cond(params['branches'], values), unknown
  program = next((params[key] for key in ('jaxpr', 'call_jaxpr', 'fun_jaxpr') if _is_program(params.get(key))), None)
  if program is None:
    return _single(name, equation), _values(name, equation, values)
  if name == 'shard_map':
    devices = math.prod(params['mesh'].shape.values())
    pairs = zip(values, program.invars, strict=True)
    inside, _ = _through(program, [_of_one(value, variable.aval.shape) for value, variable in pairs])
    return inside.times(devices), unknown
  return _through(program, values)


def _is_program(value: Any) -> bool:
  return isinstance(value, ClosedJaxpr | Jaxpr)


def _of_one(value: Any, shape: tuple[int, ...]) -> Any:
  """Returns the mean over devices of a value that they share: what one of them sees."""
  return value if value is None or value.shape == shape else np.mean(value.reshape(-1, *shape), axis=0)


def _cond(branches: Sequence[ClosedJaxpr], values: list[Any]) -> Operations:
  """Returns the operations of the branch that is taken; of the longest one where that is not known."""
  found = [_through(branch, values[1:])[0] for branch in branches]
  longest = max(found, key=lambda one: one.products + one.entries)
  taken = longest if values[0] is None else found[int(values[0])]
  return dataclasses.replace(taken, equations=sum(one.equations for one in found))


def _while(params: Mapping[str, Any], values: list[Any]) -> Operations:
  """Returns the operations of all turns of a loop; of one turn where their number is not known."""
  tested, fixed = params['cond_nconsts'], params['body_nconsts']
  of_test, of_body, carry = values[:tested], values[tested : tested + fixed], values[tested + fixed :]
  inside, _ = _through(params['body_jaxpr'], [*of_body, *[None] * len(carry)])
  turns = _turns(params['cond_jaxpr'].jaxpr, params['body_jaxpr'], of_test, of_body, carry)
  if turns is None:
    return dataclasses.replace(inside, open_loops=inside.open_loops + 1)
  return inside.times(turns)


def _turns(test: Jaxpr, program: ClosedJaxpr, of_test: list[Any], of_body: list[Any], carry: list[Any]) -> float | None:
  """Returns how often a loop turns while counter < bound, by a step that is known; None for other loops."""
  body, equations = program.jaxpr, test.eqns
  if len(equations) != 1 or equations[0].primitive.name != 'lt' or test.outvars[0] is not equations[0].outvars[0]:
    return None
  given, before = [*of_test, *carry], len(of_test)
  sides = equations[0].invars
  places = [None if isinstance(side, Literal) else test.invars.index(side) for side in sides]
  start, bound = (
    _known(side.val) if place is None else given[place] for side, place in zip(sides, places, strict=True)
  )
  counter, limit = places
  if start is None or bound is None or start.size != 1 or bound.size != 1 or counter is None or counter < before:
    return None
  own = counter - before
  if limit is not None and limit >= before:
    kept = len(of_body) + limit - before
    if body.outvars[limit - before] is not body.invars[kept]:
      return None  # the bound also moves
  _, after = _through(program, [*of_body, *(value if place == own else None for place, value in enumerate(carry))])
  if after[own] is None:
    return None
  step = float(after[own]) - float(start)
  if step <= 0:
    return None
  turns = max(0.0, (float(bound) - float(start)) / step)
  return turns if np.issubdtype(bound.dtype, np.floating) else math.ceil(turns)  # a mean over devices is a fraction


def _values(name: str, equation: Any, values: list[Any]) -> list[Any]:
  """Returns the values of what a simple operation makes, None where they are not followed."""
  small = all(_size(variable) <= _SMALL for variable in equation.outvars)
  if not small or not values or any(value is None for value in values):
    return [None] * len(equation.outvars)
  if name in _FOLLOWED:
    return [np.asarray(_FOLLOWED[name](*values))]
  return [np.asarray(_SHAPED[name](*values, **equation.params))] if name in _SHAPED else [None] * len(equation.outvars)


def _single(name: str, equation: Any) -> Operations:
  """Returns the operations of an equation without a program in it."""
  made = float(sum(map(_size, equation.outvars)))
  if name in _PRODUCTS:
    return Operations(_PRODUCTS[name](equation), made, 1, 1)
  if name in _FACTORISATIONS:  # of order rows · entries
    return Operations(2.0 * made * max(equation.invars[0].aval.shape[-2:]), made, 1, 1)
  if name.startswith(('reduce_', 'arg', 'cum')) or name == 'sort':
    read = float(sum(map(_size, equation.invars)))
    return Operations(0.0, read * (math.log2(max(2.0, read)) if name == 'sort' else 1.0), 1, 1)
  if name in _IN_PLACE:
    return Operations(0.0, float(_size(equation.invars[_IN_PLACE[name]])), 1, 1)
  cost = _COSTS.get(name, 1.0)
  return Operations(0.0, made * cost, float(cost > 0), 1)


_IN_PLACE = {'dynamic_update_slice': 1, 'scatter': 2, 'scatter-add': 2, 'scatter_add': 2}  # place of what is written


def _of_dots(equation: Any) -> float:
  (contracted, _), _ = equation.params['dimension_numbers']
  first = equation.invars[0].aval
  return 2.0 * _size(equation.outvars[0]) * math.prod(first.shape[axis] for axis in contracted)


def _of_convolutions(equation: Any) -> float:
  kernel, params = equation.invars[1].aval, equation.params
  features = kernel.shape[params['dimension_numbers'].rhs_spec[0]]
  return 2.0 * _size(equation.outvars[0]) * kernel.size / features / math.prod(params['lhs_dilation'])  # zeros between


def _of_maps(maps: int, kernel: int) -> Callable[[Any], float]:
  """Returns the count of a product of `models.convolution`, by the places of its maps and kernel (−1: the result)."""

  def count(equation: Any) -> float:
    arrays = [variable.aval for variable in (*equation.invars, *equation.outvars)]
    return 2.0 * arrays[maps].size * arrays[kernel].size / arrays[maps].shape[-1]

  return count


_PRODUCTS: dict[str, Callable[[Any], float]] = {
  'dot_general': _of_dots,
  'conv_general_dilated': _of_convolutions,
  'convolve': _of_maps(-1, 1),
  'convolve_images_gradient': _of_maps(0, 1),
  'convolve_kernel_gradient': _of_maps(1, -1),
}


def _size(variable: Any) -> int:
  return math.prod(getattr(variable.aval, 'shape', ()))


def _bytes(variable: Any) -> int:
  return _size(variable) * getattr(getattr(variable.aval, 'dtype', None), 'itemsize', 4)


def _held(jaxpr: Jaxpr, inside: Sequence[float]) -> float:
  """Returns the bytes alive at a time, at most: inputs, results that are still read, and those within an equation.

  Args:
    jaxpr: the program.
    inside: of each equation, the bytes alive in the program within it, its own inputs and results among them.
  """
  last = {variable: i for i, one in enumerate(jaxpr.eqns) for variable in _variables(one.invars)}
  kept = {*jaxpr.invars, *jaxpr.constvars, *_variables(jaxpr.outvars)}
  alive = most = float(sum(map(_bytes, {*jaxpr.invars, *jaxpr.constvars})))
  for i, (equation, within) in enumerate(zip(jaxpr.eqns, inside, strict=True)):
    read, made = set(_variables(equation.invars)), sum(map(_bytes, equation.outvars))
    most = max(most, alive + max(made, within - sum(map(_bytes, read))))
    over = {one for one in {*read, *equation.outvars} if last.get(one, i) == i} - kept
    alive += made - sum(map(_bytes, over))
  return most


def _variables(variables: Sequence[Any]) -> list[Any]:
  return [variable for variable in variables if not isinstance(variable, Literal)]
