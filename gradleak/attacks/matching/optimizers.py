"""Optimizers of gradient matching: any of optax behind a sign and a decay, and an L-BFGS made for `vmap`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from gradleak.core import errors
from gradleak.core.promotion import promoting
from gradleak.core.trees import Tree

FIRST_ORDER: dict[str, Callable[[], optax.GradientTransformation]] = {
  'adam': optax.scale_by_adam,
  'adam99': lambda: optax.scale_by_adam(b2=0.99, eps=1e-12),  # gradients of a cosine distance may be below 1e-8
  'adabelief': optax.scale_by_belief,
  'amsgrad': optax.scale_by_amsgrad,
  'momentum': lambda: optax.trace(0.9),
  'sgd': optax.identity,
  'yogi': optax.scale_by_yogi,
}

# How the gradient is changed before the optimizer. The soft sign saturates beyond each tensor's mean magnitude.
GRADIENTS: dict[str, Callable[[jax.Array], jax.Array]] = {
  'plain': lambda g: g,
  'sign': jnp.sign,
  'soft_sign': lambda g: g / (jnp.abs(g) + jnp.mean(jnp.abs(g)) + jnp.asarray(1e-30, g.dtype)),
}

# Fraction of the steps done -> multiplier of the learning rate.
DECAYS: dict[str, Callable[[jax.Array], jax.Array]] = {
  'constant': jnp.ones_like,
  'step': lambda t: jnp.float32(0.1) ** sum(jnp.where(t >= edge, 1.0, 0.0) for edge in (3 / 8, 5 / 8, 7 / 8)),
  'cosine': lambda t: jnp.float32(0.5) * (1 + jnp.cos(jnp.pi * t)),
  'warm': lambda t: jnp.minimum(1.0, 20 * t) * 0.5 * (1 - jnp.cos(jnp.pi * jnp.clip((1 - t) / 0.75, 0.0, 1.0))),
}


def first_order(
  name: str, learning_rate: float | jax.Array, num_steps: int, *, gradient: str = 'plain', decay: str = 'constant'
) -> optax.GradientTransformation:
  """Returns an optax optimizer behind a gradient modification and a decay.

  Args:
    name: a name of `FIRST_ORDER`.
    learning_rate: a float, may be traced.
    num_steps: the steps that the decay is stretched over.
    gradient: 'plain', 'sign' (Geiping et al. 2020) or 'soft_sign'.
    decay: 'constant', 'step' (× 0.1 at 3/8, 5/8 and 7/8, Geiping et al. 2020), 'cosine', or 'warm': linear over the
      first twentieth, then constant, then a cosine over the last three quarters.

  Raises:
    UsageError: for an unknown name, or a learning rate that is not positive.
  """
  for kind, value, valid in (
    ('optimizer', name, FIRST_ORDER),
    ('gradient', gradient, GRADIENTS),
    ('decay', decay, DECAYS),
  ):
    errors.check_choice(kind, value, valid)
  errors.check_number('learning_rate', learning_rate, low=1e-12, finite=True)

  def modify(updates: Tree, state: optax.OptState, params: Tree = None) -> tuple[Tree, optax.OptState]:
    del params
    return jax.tree.map(GRADIENTS[gradient], updates), state

  def scale(updates: Tree, count: jax.Array, params: Tree = None) -> tuple[Tree, jax.Array]:
    del params
    rate = -jnp.asarray(learning_rate, jnp.float32) * DECAYS[decay](count.astype(jnp.float32) / num_steps)
    return jax.tree.map(lambda u: u * rate.astype(u.dtype), updates), count + 1

  return optax.chain(
    optax.GradientTransformation(lambda params: optax.EmptyState(), modify),
    promoting(FIRST_ORDER[name]()),
    optax.GradientTransformation(lambda params: jnp.zeros((), jnp.int32), scale),
  )


def within(radius: float | jax.Array) -> optax.GradientTransformation:
  """Returns the projection of the next point onto an l1-ball around zero, for each image; it stands last in a chain.

  Args:
    radius: of the ball, per entry of an image's variables: the mean of their magnitudes that is allowed; may be traced.
      The first axis of each leaf counts the images.
  """

  def update(updates: Tree, state: optax.OptState, params: Tree = None) -> tuple[Tree, optax.OptState]:
    def move(update: jax.Array, here: jax.Array) -> jax.Array:
      rows = (here + update).reshape(len(here), -1)
      return into_l1_ball(rows, jnp.float32(radius) * rows.shape[1]).reshape(here.shape) - here

    return jax.tree.map(move, updates, params), state

  return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def into_l1_ball(rows: jax.Array, radius: jax.Array) -> jax.Array:
  """Returns the nearest points of an l1-ball around zero to rows [N, n], by Michelot's iteration (1986) on a threshold.

  It needs no sorting, and ends after a few of its 32 passes; what rounding leaves outside is scaled back.
  """
  sizes = jnp.abs(rows)

  def tighten(_: jax.Array, threshold: jax.Array) -> jax.Array:
    above = sizes > threshold
    count = jnp.maximum(jnp.sum(above, axis=1, keepdims=True), 1).astype(rows.dtype)
    return jnp.maximum((jnp.sum(jnp.where(above, sizes, 0.0), axis=1, keepdims=True) - radius) / count, threshold)

  threshold = jax.lax.fori_loop(0, 32, tighten, jnp.zeros((len(rows), 1), rows.dtype))
  kept = jnp.sign(rows) * jnp.maximum(sizes - threshold, 0.0)
  total = jnp.sum(jnp.abs(kept), axis=1, keepdims=True)
  return kept * jnp.minimum(1.0, radius / jnp.where(total > 0, total, 1.0))


class Pairs(NamedTuple):
  """The memory of `lbfgs`; m is the history, n the number of variables.

  Attributes:
    moves, changes: the differences s of points and y of gradients, rings [m, n]; empty rows are zero.
    cross, gram: sᵀy and yᵀy of all pairs, [m, m].
    stored: number of pairs stored so far.
  """

  moves: jax.Array
  changes: jax.Array
  cross: jax.Array
  gram: jax.Array
  stored: jax.Array


class LbfgsState(NamedTuple):
  """State of `lbfgs`; n is the number of variables.

  Attributes:
    count: evaluations so far.
    point, value, gradient: the last accepted point [n].
    direction, step: the search direction [n] and the step tried along it.
    longest: the first step tried along it.
    pairs: `Pairs`.
  """

  count: jax.Array
  point: jax.Array
  value: jax.Array
  gradient: jax.Array
  direction: jax.Array
  step: jax.Array
  longest: jax.Array
  pairs: Pairs


class ComparesValues(optax.GradientTransformationExtraArgs):
  """An optimizer that compares values of the objective, and so needs all their digits."""


def lbfgs(*, history: int = 100, armijo: float = 1e-4) -> ComparesValues:
  """L-BFGS that evaluates once per update, so that the lanes of a `vmap` do not wait for one another.

  A line search with a loop of its own runs a whole batch at the pace of its slowest member. Here each update is one
  step of a state machine. It looks at the value and gradient of the point that was tried (`value=` and the gradients).
  If the value is low enough, it accepts the point, stores the pair and tries a unit step along the new direction.
  Otherwise it tries a shorter step along the old one, by quadratic interpolation. The inverse Hessian is applied in the
  compact form of Byrd, Nocedal and Schnabel (1994), theorem 2.2. That takes two matrix products and two triangular
  solves in place of a loop over the history.

  Args:
    history: number of pairs kept; 100 in DLG's published code.
    armijo: required fraction of the decrease that the slope promises.

  Returns:
    An optax transformation; `params + updates` is the next point to evaluate, not always the best so far. Its `update`
    takes `value=` and, where the objective is not the same throughout, `changed=`, whether it is another one than at
    the evaluation before: that point is accepted, and no pair is made of the two.

  Raises:
    UsageError: for a history outside [1, 10000].
  """
  errors.check_number('lbfgs(history)', history, low=1, high=10_000, integer=True)

  def init(params: Tree) -> LbfgsState:
    x, _ = ravel_pytree(params)
    zeros, rows = jnp.zeros_like(x), jnp.zeros((history, x.size), x.dtype)
    square = jnp.zeros((history, history), x.dtype)
    count = jnp.zeros((), jnp.int32)
    pairs = Pairs(rows, rows, square, square, count)
    one = jnp.ones((), x.dtype)
    return LbfgsState(count, x, jnp.asarray(jnp.inf, x.dtype), zeros, zeros, one, one, pairs)

  def update(
    updates: Tree, state: LbfgsState, params: Tree, *, value: jax.Array, changed: Any = None, **extra: Any
  ) -> tuple[Tree, LbfgsState]:
    del extra
    x, unravel = ravel_pytree(params)
    gradient, _ = ravel_pytree(updates)
    first = state.count == 0
    slope = jnp.vdot(state.gradient, state.direction)
    finite = jnp.isfinite(value) & jnp.all(jnp.isfinite(gradient))
    slack = 1e-6 * jnp.abs(state.value)  # float32 cannot tell a smaller change of the value
    anew = first if changed is None else first | (changed & finite)  # no values to compare with
    accepted = anew | (finite & (value <= state.value + armijo * state.step * slope + slack))

    # Accepted: a new direction from the new pair.
    fresh = jnp.where(anew, 0.0, 1.0).astype(x.dtype)
    memory = _stored(state.pairs, (x - state.point) * fresh, (gradient - state.gradient) * fresh)
    direction = _newton(gradient, memory)
    downhill = jnp.vdot(direction, gradient) < 0
    direction = jnp.where(downhill, direction, -gradient)
    unit = jnp.where((memory.stored == 0) | ~downhill, _cautious(gradient), 1.0)

    # Rejected: back to the minimum of the parabola through value and slope, within [0.1, 0.5] of the step.
    curvature = value - state.value - state.step * slope
    back = jnp.where(finite, -slope * state.step / (2 * jnp.where(curvature > 0, curvature, 1.0)), 0.1)
    back = state.step * jnp.clip(back, 0.1, 0.5)
    # The step has become too short: the direction is useless. Forget the pairs and descend along the gradient. Compared
    # with the first step, which is 1e-8 along a gradient of 1e8.
    lost = ~accepted & (state.step < 1e-7 * state.longest)

    def choose(new: jax.Array, old: jax.Array) -> jax.Array:
      return jnp.where(accepted, new, old)

    point, chosen_gradient = choose(x, state.point), choose(gradient, state.gradient)
    chosen_direction = jnp.where(lost, -state.gradient, choose(direction, state.direction))
    step = jnp.where(lost, _cautious(state.gradient), choose(unit, back))
    longest = jnp.where(lost, step, choose(unit, state.longest))
    pairs = jax.tree.map(lambda new, old: jnp.where(lost, jnp.zeros_like(old), choose(new, old)), memory, state.pairs)
    value = choose(value, state.value)
    state = LbfgsState(state.count + 1, point, value, chosen_gradient, chosen_direction, step, longest, pairs)
    return unravel(point + step * chosen_direction - x), state

  return ComparesValues(init, update)


def _cautious(gradient: jax.Array) -> jax.Array:
  """Returns a step along the gradient that moves the variables by 1 at most, in total."""
  return jnp.minimum(1.0, 1.0 / jnp.maximum(jnp.sum(jnp.abs(gradient)), 1e-30))


def _stored(pairs: Pairs, s: jax.Array, y: jax.Array) -> Pairs:
  """Returns the memory with one more pair, if its curvature is positive."""
  sy = jnp.vdot(s, y)
  good = sy > 1e-10 * jnp.vdot(y, y)
  row = pairs.stored % len(pairs.moves)

  def put(ring: jax.Array, value: jax.Array) -> jax.Array:
    return ring.at[row].set(jnp.where(good, value, ring[row]))

  moves, changes = put(pairs.moves, s), put(pairs.changes, y)
  cross, gram = put(pairs.cross, changes @ s), put(pairs.gram, changes @ y)
  cross = cross.at[:, row].set(jnp.where(good, moves @ y, cross[:, row]))
  gram = gram.at[:, row].set(jnp.where(good, changes @ y, gram[:, row]))
  return Pairs(moves, changes, cross, gram, pairs.stored + good.astype(jnp.int32))


def _newton(gradient: jax.Array, pairs: Pairs) -> jax.Array:
  """Returns −H·gradient, H the inverse Hessian that the pairs tell."""
  history = len(pairs.moves)
  numbers = jnp.arange(history, dtype=jnp.int32)
  order = (pairs.stored + numbers) % history  # oldest first
  cross, gram = pairs.cross[order][:, order], pairs.gram[order][:, order]
  diagonal = jnp.diagonal(cross)
  upper = jnp.triu(cross) + jnp.diag(jnp.where(diagonal > 0, 0.0, 1.0).astype(cross.dtype))
  last = history - 1
  scale = jnp.where(pairs.stored > 0, cross[last, last] / jnp.where(pairs.stored > 0, gram[last, last], 1.0), 1.0)
  p, q = (pairs.moves @ gradient)[order], (pairs.changes @ gradient)[order]
  solve = jax.scipy.linalg.solve_triangular
  w = solve(upper, p)
  u = solve(upper, diagonal * w + scale * (gram @ w) - scale * q, trans=1)
  unsorted = jnp.zeros_like(order).at[order].set(numbers)
  return -(scale * gradient + u[unsorted] @ pairs.moves - scale * (w[unsorted] @ pairs.changes))
