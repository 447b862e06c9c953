"""A network with the same outputs, whose ReLUs and max pools have soft derivatives.

The derivative of a ReLU is a step, and that of a max pool goes to one entry of each window. So the gradient of a
network jumps where a map changes a sign, or a window its largest entry. A search for samples that match a gradient
stops at such jumps. With soft derivatives it passes them:

  * that of relu(z) is sigmoid(z / (τ·s)), where s is the root mean square of z;
  * a max pool passes softmax(z / (τ·s)) of each window.

A variance that is kept from falling below zero by rounding, max(0, E x² − (E x)²), is no ReLU. Norms of Flax have one.

Values stay exact. At a τ near zero the derivatives are those of the network. It is read from a trace, so it does not
matter which library a network is written in.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from gradleak.core.trees import Tree
from gradleak.models import layers
from gradleak.models.model import Model
from gradleak.models.programs import walked

_SHARPEST = 1e-6  # of the scale of a map: what is smaller is rounding
_CHECKPOINTS = ('checkpoint', 'remat', 'remat2')
_MOVES = ('broadcast_in_dim', 'reshape', 'squeeze', 'expand_dims', 'convert_element_type')


def soft_slopes(model: Model, softness: float | jax.Array) -> Model:
  """Returns a model with the outputs of another, and soft derivatives.

  Max pools are seen where they are those of `gradleak.models`, of a PyTorch module or of Flax. A network without ReLU
  and max pool stays as it is. So does what is inside a loop or a branch, or has a derivative of its own.

  Args:
    model: the `Model`.
    softness: τ, relative to the root mean square of each map; may be traced.
  """

  def soft(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(variables: Tree, images: jax.Array, train: bool = False, key: jax.Array | None = None) -> Any:
      given, of_given = jax.tree.flatten((variables, images, key))

      def flat(*leaves: Any) -> Any:
        own, shown, drawn = of_given.unflatten(leaves)
        return function(own, shown, train, drawn)

      closed, shapes = jax.make_jaxpr(flat, return_shape=True)(*given)
      made = _Soft(softness).run(closed.jaxpr, closed.consts, given)
      return jax.tree.structure(shapes).unflatten(made)

    return run

  penalised = None if model.penalised is None else soft(model.penalised)
  return model._replace(apply=soft(model.apply), penalised=penalised)


def has_max_pools(model: Model, variables: Tree, sample_shape: Sequence[int]) -> bool:
  """Returns whether `soft_slopes` sees a max pool in a network; sample_shape is that of one sample."""
  images = model.samples(1, sample_shape, wide=False)
  shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), variables)
  leaves, of_leaves = jax.tree.flatten((shapes, images))

  def flat(*leaves: Any) -> Any:
    return model.apply(*of_leaves.unflatten(leaves), True, None)[0]

  closed, found = jax.make_jaxpr(flat)(*leaves), _Soft(1.0)
  jax.eval_shape(lambda *given: found.run(closed.jaxpr, closed.consts, given), *leaves)
  return bool(found.pools)


class _Soft:
  """Runs a traced program, its ReLUs and max pools with soft derivatives.

  Attributes:
    softness: τ.
    pools: how many max pools were seen.
  """

  def __init__(self, softness: float | jax.Array) -> None:
    self.softness = softness
    self.pools = 0
    self._makers: dict[Any, Any] = {}

  def run(self, jaxpr: Any, constants: Sequence[Any], given: Sequence[Any]) -> list[Any]:
    """Returns what a program makes of its inputs."""
    self._makers |= {variable: equation for equation in jaxpr.eqns for variable in equation.outvars}
    return walked(jaxpr, constants, given, self.operation, lambda number: number)

  def _maker(self, variable: Any) -> Any:
    """Returns the operation that computes a variable, of what is moved before that; None for an input or a number."""
    made = None if isinstance(variable, Literal) else self._makers.get(variable)
    return self._maker(made.invars[0]) if made is not None and made.primitive.name in _MOVES else made

  def _is_mean(self, variable: Any) -> bool:
    made = self._maker(variable)
    if made is None or made.primitive.name not in ('div', 'mul'):
      return False
    summed = [self._maker(one) for one in made.invars]
    return any(one is not None and one.primitive.name == 'reduce_sum' for one in summed)

  def _is_variance(self, variable: Any) -> bool:
    """Returns whether a variable is E x² − (E x)²."""
    made = self._maker(variable)
    if made is None or made.primitive.name != 'sub':
      return False
    square, squared = self._maker(made.invars[1]), ('square', 'integer_pow', 'mul')
    same = square is not None and square.primitive.name in squared and len({id(one) for one in square.invars}) == 1
    return same and self._is_mean(square.invars[0]) and self._is_mean(made.invars[0])

  def operation(self, equation: Any, taken: list[Any]) -> Sequence[Any]:
    """Returns what an operation makes of its operands."""
    name, options = equation.primitive.name, equation.params
    place = _rectified(equation)
    if place is not None and not self._is_variance(equation.invars[place]):
      return [relu(taken[place], self.scaled(taken[place]))]
    if name == 'reduce_window_max' and set(options['base_dilation']) == {1} and _has_slope(equation):
      self.pools += 1
      return [largest(pool_windows(taken[0], options), self.scaled(taken[0]))]
    inner = options.get('jaxpr') if name in ('jit', 'pjit') else None
    if inner is not None and options['name'] == layers.largest.__name__:
      self.pools += 1
      return [largest(taken[0], self.scaled(taken[0]))]
    if inner is not None:
      return self.run(inner.jaxpr, inner.consts, taken)
    if name in _CHECKPOINTS:
      again = jax.checkpoint(
        lambda *taken: self.run(options['jaxpr'], (), taken),
        prevent_cse=options['prevent_cse'],
        policy=options['policy'],
      )
      return again(*taken)
    given = equation.primitive.get_bind_params(options)
    functions, given = given if isinstance(given, tuple) else ((), given)  # as older versions of JAX return them
    made = equation.primitive.bind(*functions, *taken, **given)
    return made if equation.primitive.multiple_results else [made]

  def scaled(self, x: jax.Array) -> jax.Array:
    """Returns the softness in units of a map."""
    known = x > jnp.finfo(x.dtype).min  # the padding of a max pool does not count
    square = jax.lax.stop_gradient(jnp.mean(jnp.square(x), where=known))
    size = jnp.sqrt(jnp.where(square > 0, square, jnp.ones_like(square)))
    return jnp.maximum(jnp.asarray(self.softness, x.dtype), _SHARPEST) * size


def pool_windows(x: jax.Array, options: dict[str, Any]) -> jax.Array:
  """Returns the windows of XLA's own max pool along a new last axis.

  Args:
    x: what is pooled.
    options: of the operation `reduce_window_max`.
  """
  least = jnp.asarray(jnp.finfo(x.dtype).min, x.dtype)
  x = jax.lax.pad(x, least, [(low, high, 0) for low, high in options['padding']])
  sizes, strides, apart = (options[f'window_{name}'] for name in ('dimensions', 'strides', 'dilation'))
  counts = [(side - (n - 1) * d - 1) // s + 1 for side, n, s, d in zip(x.shape, sizes, strides, apart, strict=True)]
  found = []
  for place in np.ndindex(*sizes):
    starts = [i * d for i, d in zip(place, apart, strict=True)]
    ends = [start + (count - 1) * s + 1 for start, count, s in zip(starts, counts, strides, strict=True)]
    found.append(jax.lax.slice(x, starts, ends, strides))
  return jnp.stack(found, axis=-1)


def _has_slope(equation: Any) -> bool:
  """Returns whether what an operation makes are floats: places and other whole numbers have no derivative."""
  return jnp.issubdtype(equation.outvars[0].aval.dtype, jnp.floating)


def _rectified(equation: Any) -> int | None:
  """Returns which operand of an operation goes through a ReLU; None for any other operation."""
  inner = equation.params.get('call_jaxpr') or equation.params.get('jaxpr')
  if equation.primitive.name in ('jit', 'pjit', 'custom_jvp_call') and inner is not None:
    program = inner.jaxpr
    if len(program.eqns) != 1 or len(program.invars) != 1 or program.outvars != program.eqns[0].outvars:
      return None
    return None if _rectified(program.eqns[0]) is None else 0
  if equation.primitive.name != 'max' or not _has_slope(equation):
    return None
  zeros = [isinstance(one, Literal) and not np.any(one.val) for one in equation.invars]
  return zeros.index(False) if sum(zeros) == 1 else None


@jax.custom_jvp
def relu(z: jax.Array, width: jax.Array) -> jax.Array:
  """Returns relu(z), whose derivative is sigmoid(z / width)."""
  del width
  return jnp.maximum(z, 0)


@relu.defjvp
def _relu_jvp(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
  z, width = primals
  return relu(z, width), jax.nn.sigmoid(z / width) * tangents[0]


@jax.custom_jvp
def largest(windows: jax.Array, width: jax.Array) -> jax.Array:
  """Returns the largest entry along the last axis, whose derivative is softmax(windows / width)."""
  del width
  return jnp.max(windows, axis=-1)


@largest.defjvp
def _largest_jvp(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
  windows, width = primals
  return largest(windows, width), jnp.sum(jax.nn.softmax(windows / width, axis=-1) * tangents[0], axis=-1)
