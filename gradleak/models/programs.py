"""Programs as JAX traces them, gone through operation by operation."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal


def inner(equation: Any) -> list[Any]:
  """Returns the programs that an operation runs, as it holds them: with their constants, or without."""
  held = equation.params.values()
  parts = [one for value in held for one in (value if isinstance(value, tuple | list) else (value,))]
  return [one for one in parts if isinstance(one, ClosedJaxpr | Jaxpr)]


def rounding(program: ClosedJaxpr | Jaxpr) -> float:
  """Returns the eps of the coarsest floats that a program computes, those inside included; 0.0 without any."""
  equations = getattr(program, 'jaxpr', program).eqns
  dtypes = {getattr(variable.aval, 'dtype', jnp.int32) for equation in equations for variable in equation.outvars}
  own = [float(jnp.finfo(dtype).eps) for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating)]
  return max([*own, *(rounding(one) for equation in equations for one in inner(equation))], default=0.0)


def walked(
  jaxpr: Any,
  constants: Sequence[Any],
  given: Sequence[Any],
  operation: Callable[[Any, list[Any]], Sequence[Any]],
  literal: Callable[[Any], Any],
) -> list[Any]:
  """Returns the values of a program's outputs.

  A value is what the caller makes of an array: the array itself, a place, a source.

  Args:
    jaxpr: the program.
    constants, given: the values of its constants and of its inputs.
    operation: (equation, values of its operands) -> the values of what it makes.
    literal: a number in the program -> its value.
  """
  known: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *given], strict=True))

  def value(variable: Any) -> Any:
    return literal(variable.val) if isinstance(variable, Literal) else known[variable]

  for equation in jaxpr.eqns:
    made = operation(equation, [value(variable) for variable in equation.invars])
    known |= dict(zip(equation.outvars, made, strict=True))
  return [value(variable) for variable in jaxpr.outvars]


def passed_on(program: Jaxpr) -> list[int | None]:
  """Returns which input each output of a program is, by its place; None for what is computed.

  It looks into functions that a network compiles, or differentiates, by themselves. What a loop returns is computed.
  """

  def operation(equation: Any, taken: list[Any]) -> Sequence[Any]:
    parts = [getattr(one, 'jaxpr', one) for one in inner(equation)]
    looped = equation.primitive.name in ('scan', 'while', 'cond')
    if looped or len(parts) != 1 or len(parts[0].invars) != len(taken):
      return [None] * len(equation.outvars)
    return walked(parts[0], [None] * len(parts[0].constvars), taken, operation, lambda number: None)

  places = range(len(program.invars))
  return walked(program, [None] * len(program.constvars), places, operation, lambda number: None)
