"""Optimizers of gradient matching: any of optax behind a sign and a decay, and an L-BFGS made for `vmap`."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from gradleak import errors
from gradleak.strictness import lenient

FIRST_ORDER = {
  'adam': optax.scale_by_adam,
  'adam99': lambda: optax.scale_by_adam(b2=0.99, eps=1e-12),  # gradients of a cosine distance may be below 1e-8
  'adabelief': optax.scale_by_belief,
  'amsgrad': optax.scale_by_amsgrad,
  'momentum': lambda: optax.trace(0.9),
  'sgd': optax.identity,
  'yogi': optax.scale_by_yogi,
}

# What the optimizer sees of the gradient. The soft sign saturates beyond each tensor's mean magnitude.
GRADIENTS = {
  'plain': lambda g: g,
  'sign': jnp.sign,
  'soft_sign': lambda g: g / (jnp.abs(g) + jnp.mean(jnp.abs(g)) + jnp.asarray(1e-30, g.dtype)),
}

# Fraction of the steps done -> multiplier of the learning rate.
DECAYS = {
  'constant': jnp.ones_like,
  'step': lambda t: jnp.float32(0.1) ** sum(jnp.where(t >= edge, 1.0, 0.0) for edge in (3 / 8, 5 / 8, 7 / 8)),
  'cosine': lambda t: jnp.float32(0.5) * (1 + jnp.cos(jnp.pi * t)),
}


def first_order(name, learning_rate, num_steps, *, gradient='plain', decay='constant'):
  """Returns an optax optimizer behind a gradient modification and a decay.

  Args:
    name: a name of `FIRST_ORDER`.
    learning_rate: a float, may be traced.
    num_steps: the steps that the decay is stretched over.
    gradient: 'plain', 'sign' (Geiping et al. 2020) or 'soft_sign'.
    decay: 'constant', 'step' (× 0.1 at 3/8, 5/8 and 7/8, Geiping et al. 2020) or 'cosine'.
  """
  for kind, value, valid in (
    ('optimizer', name, FIRST_ORDER),
    ('gradient', gradient, GRADIENTS),
    ('decay', decay, DECAYS),
  ):
    if value not in valid:
      raise errors.unknown(kind, value, valid)
  errors.check_number('learning_rate', learning_rate, low=1e-12, finite=True)

  def modify(updates, state, params=None):
    del params
    return jax.tree.map(GRADIENTS[gradient], updates), state

  def scale(updates, count, params=None):
    del params
    rate = -jnp.asarray(learning_rate, jnp.float32) * DECAYS[decay](count.astype(jnp.float32) / num_steps)
    return jax.tree.map(lambda u: u * rate.astype(u.dtype), updates), count + 1

  return optax.chain(
    optax.GradientTransformation(lambda params: optax.EmptyState(), modify),
    lenient(FIRST_ORDER[name]()),
    optax.GradientTransformation(lambda params: jnp.zeros((), jnp.int32), scale),
  )


class LbfgsState(NamedTuple):
  """State of `lbfgs`; m is the history, n the number of variables.

  Attributes:
    count: evaluations so far.
    point, value, gradient: the last accepted point [n].
    direction, step: the search direction [n] and the step tried along it.
    moves, changes: pairs s and y, rings [m, n]; zero rows are empty.
    cross, gram: sᵀy and yᵀy of all pairs, [m, m].
    stored: number of pairs stored so far.
  """

  count: jax.Array
  point: jax.Array
  value: jax.Array
  gradient: jax.Array
  direction: jax.Array
  step: jax.Array
  moves: jax.Array
  changes: jax.Array
  cross: jax.Array
  gram: jax.Array
  stored: jax.Array


def lbfgs(*, history=100, armijo=1e-4):
  """L-BFGS that evaluates once per update, whatever its neighbours under `vmap` do.

  A line search with its own loop runs a whole batch at the pace of its slowest member. Here each update is one state of
  a machine: it looks at the value and gradient of the point that was tried (`value=` and the gradients), and either
  accepts it, stores the pair and tries a unit step along the new direction, or goes back along the old one by quadratic
  interpolation. The inverse Hessian is applied in the compact form of Byrd, Nocedal and Schnabel (1994), theorem 2.2:
  two matrix products and two triangular solves in place of a loop over the history.

  Args:
    history: number of pairs kept; 100 in DLG's published code.
    armijo: required share of the decrease that the slope promises.

  Returns:
    An optax transformation; `params + updates` is the next point to evaluate, not always the best so far.
  """
  errors.check_number('lbfgs(history)', history, low=1, high=10_000, integer=True)

  def init(params):
    x, _ = ravel_pytree(params)
    zeros, pairs = jnp.zeros_like(x), jnp.zeros((history, x.size), x.dtype)
    square = jnp.zeros((history, history), x.dtype)
    count = jnp.zeros((), jnp.int32)
    return LbfgsState(
      count, x, jnp.asarray(jnp.inf, x.dtype), zeros, zeros, jnp.ones((), x.dtype), pairs, pairs, square, square, count
    )

  def remember(state, s, y):
    """Stores a pair of positive curvature; returns the new rings, products and count."""
    sy = jnp.vdot(s, y)
    good = sy > 1e-10 * jnp.vdot(y, y)
    row = state.stored % history

    def put(ring, value):
      return ring.at[row].set(jnp.where(good, value, ring[row]))

    moves, changes = put(state.moves, s), put(state.changes, y)
    cross, gram = put(state.cross, changes @ s), put(state.gram, changes @ y)
    cross = cross.at[:, row].set(jnp.where(good, moves @ y, cross[:, row]))
    gram = gram.at[:, row].set(jnp.where(good, changes @ y, gram[:, row]))
    return moves, changes, cross, gram, state.stored + good.astype(jnp.int32)

  def newton(gradient, moves, changes, cross, gram, stored):
    """Returns −H·gradient."""
    order = (stored + jnp.arange(history, dtype=jnp.int32)) % history  # oldest first
    cross, gram = cross[order][:, order], gram[order][:, order]
    diagonal = jnp.diagonal(cross)
    upper = jnp.triu(cross) + jnp.diag(jnp.where(diagonal > 0, 0.0, 1.0).astype(cross.dtype))
    last = history - 1
    scale = jnp.where(stored > 0, cross[last, last] / jnp.where(stored > 0, gram[last, last], 1.0), 1.0)
    p, q = (moves @ gradient)[order], (changes @ gradient)[order]
    solve = jax.scipy.linalg.solve_triangular
    w = solve(upper, p)
    u = solve(upper, diagonal * w + scale * (gram @ w) - scale * q, trans=1)
    unsorted = jnp.zeros_like(order).at[order].set(jnp.arange(history, dtype=jnp.int32))
    return -(scale * gradient + u[unsorted] @ moves - scale * (w[unsorted] @ changes))

  def update(updates, state, params, *, value, **extra):
    del extra
    x, unravel = ravel_pytree(params)
    gradient, _ = ravel_pytree(updates)
    first = state.count == 0
    slope = jnp.vdot(state.gradient, state.direction)
    finite = jnp.isfinite(value) & jnp.all(jnp.isfinite(gradient))
    slack = 1e-6 * jnp.abs(state.value)  # float32 cannot tell a smaller change of the value
    accepted = first | (finite & (value <= state.value + armijo * state.step * slope + slack))

    # Accepted: a new direction from the new pair.
    fresh = jnp.where(first, 0.0, 1.0).astype(x.dtype)
    memory = remember(state, (x - state.point) * fresh, (gradient - state.gradient) * fresh)
    direction = newton(gradient, *memory)
    downhill = jnp.vdot(direction, gradient) < 0
    direction = jnp.where(downhill, direction, -gradient)
    cautious = jnp.minimum(1.0, 1.0 / jnp.maximum(jnp.sum(jnp.abs(gradient)), 1e-30))
    unit = jnp.where((memory[-1] == 0) | ~downhill, cautious, 1.0)

    # Rejected: back to the minimum of the parabola through value and slope, within [0.1, 0.5] of the step.
    curvature = value - state.value - state.step * slope
    back = jnp.where(finite, -slope * state.step / (2 * jnp.where(curvature > 0, curvature, 1.0)), 0.1)
    back = state.step * jnp.clip(back, 0.1, 0.5)
    # A step of nothing along a useless direction: forget the history and descend along the gradient.
    lost = ~accepted & (state.step < 1e-7)

    def choose(new, old):
      return jnp.where(accepted, new, old)

    point, chosen_gradient = choose(x, state.point), choose(gradient, state.gradient)
    chosen_direction = jnp.where(lost, -state.gradient, choose(direction, state.direction))
    restart = jnp.minimum(1.0, 1.0 / jnp.maximum(jnp.sum(jnp.abs(state.gradient)), 1e-30))
    step = jnp.where(lost, restart, choose(unit, back))
    moves, changes, cross, gram, stored = (
      jnp.where(lost, jnp.zeros_like(old), choose(new, old))
      for new, old in zip(memory, (state.moves, state.changes, state.cross, state.gram, state.stored), strict=True)
    )
    state = LbfgsState(
      state.count + 1,
      point,
      choose(value, state.value),
      chosen_gradient,
      chosen_direction,
      step,
      moves,
      changes,
      cross,
      gram,
      stored,
    )
    return unravel(point + step * chosen_direction - x), state

  return optax.GradientTransformationExtraArgs(init, update)
