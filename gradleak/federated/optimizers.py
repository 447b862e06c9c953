"""Optimizers of local training, as PyTorch defines them, and what federated algorithms add to the gradient.

Attackers differentiate through them: the derivative of a root of zero is zero.
"""

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeAlias

import jax
import jax.numpy as jnp
import optax

from gradleak.core import errors, trees
from gradleak.core.settings import NonNegative, Positive, Range, ranged
from gradleak.core.trees import Tree

_BELOW = 1e-6  # added to a norm by PyTorch before it divides by it

Rate: TypeAlias = float | optax.Schedule


def sgd(rate: Rate, momentum: float = 0.0) -> optax.GradientTransformation:
  """Returns SGD, with PyTorch's momentum without dampening."""
  return optax.sgd(rate, momentum or None)


def nesterov(rate: Rate, momentum: float) -> optax.GradientTransformation:
  """Returns SGD with PyTorch's Nesterov momentum m: b ← m·b + g, and a step of g + m·b."""
  return optax.sgd(rate, momentum, nesterov=True)


def adam(rate: Rate) -> optax.GradientTransformation:
  """Returns Adam with β = 0.9 and 0.999, ε = 1e-8; PyTorch adds its weight decay to the gradient."""
  return optax.chain(_scaled_by_adam(), optax.scale_by_learning_rate(rate))


def adamw(rate: Rate, weight_decay: float = 0.0) -> optax.GradientTransformation:
  """Returns AdamW, whose weight decay is beside Adam's step (Loshchilov and Hutter 2019, algorithm 2)."""
  decay = optax.add_decayed_weights(weight_decay)
  return optax.chain(_scaled_by_adam(), decay, optax.scale_by_learning_rate(rate))


def _scaled_by_adam() -> optax.GradientTransformation:
  """Returns m̂ / (√v̂ + ε), as `optax.scale_by_adam` but for the root."""
  first, second, outside = 0.9, 0.999, 1e-8

  def init(params: Tree) -> optax.ScaleByAdamState:
    zeros = jax.tree.map(jnp.zeros_like, params)
    return optax.ScaleByAdamState(jnp.zeros((), jnp.int32), zeros, zeros)

  def update(updates: Tree, state: Any, params: Tree | None = None) -> tuple[Tree, optax.ScaleByAdamState]:
    del params
    count = state.count + 1
    means = jax.tree.map(lambda m, g: first * m + (1 - first) * g, state.mu, updates)
    squares = jax.tree.map(lambda v, g: second * v + (1 - second) * jnp.square(g), state.nu, updates)
    steps = count.astype(jnp.float32)

    def scaled(m: jax.Array, v: jax.Array) -> jax.Array:
      unbiased, size = (-jnp.expm1(steps * math.log(beta)) for beta in (first, second))  # 1 − β^t, without rounding β
      return m / unbiased.astype(m.dtype) / (trees.safe_sqrt(v / size.astype(v.dtype)) + outside)

    return jax.tree.map(scaled, means, squares), optax.ScaleByAdamState(count, means, squares)

  return optax.GradientTransformation(init, update)


def rmsprop(rate: Rate, momentum: float = 0.0) -> optax.GradientTransformation:
  """Returns PyTorch's RMSprop with α = 0.99: g / (√v + ε) with ε = 1e-8 outside of the root, then momentum."""
  decay, outside = 0.99, 1e-8

  def update(updates: Tree, squares: Tree, params: Tree | None = None) -> tuple[Tree, Tree]:
    del params
    squares = jax.tree.map(lambda v, g: decay * v + (1 - decay) * jnp.square(g), squares, updates)
    return jax.tree.map(lambda g, v: g / (trees.safe_sqrt(v) + outside), updates, squares), squares

  scaled = optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update)
  parts = [scaled, optax.trace(momentum)] if momentum else [scaled]
  return optax.chain(*parts, optax.scale_by_learning_rate(rate))


OPTIMIZERS: Mapping[str, Callable[..., optax.GradientTransformation]] = {
  'sgd': sgd,
  'nesterov': nesterov,
  'adam': adam,
  'adamw': adamw,
  'rmsprop': rmsprop,
}


@ranged
def clipped(norm: Positive) -> optax.GradientTransformation:
  """Returns PyTorch's `clip_grad_norm_`: g · min(1, C / (‖g‖₂ + 1e-6)), of all parameters together.

  Args:
    norm: C.
  """

  def update(updates: Tree, params: Tree | None) -> Tree:
    del params
    length = trees.norm(updates)  # its derivative at 0 is finite
    factor = jnp.minimum(1.0, jnp.float32(norm) / (length + _BELOW))
    return jax.tree.map(lambda g: g * factor.astype(g.dtype), updates)

  return optax.stateless(update)


@ranged
def proximal(weight: NonNegative) -> optax.GradientTransformation:
  """Returns FedProx's term: the gradient of μ / 2 · ‖θ − θ_0‖² is added (Li et al. 2020, eq. 2).

  Args:
    weight: μ; θ_0 are the weights that the client received.
  """

  def update(updates: Tree, start: Tree, params: Tree | None = None) -> tuple[Tree, Tree]:
    if params is None:
      raise errors.UsageError('the proximal term needs the parameters: call update(updates, state, params)')
    return jax.tree.map(lambda g, p, s: g + weight * (p - s), updates, params, start), start

  return optax.GradientTransformation(lambda params: params, update)


def corrected(server: Tree, client: Tree) -> optax.GradientTransformation:
  """Returns SCAFFOLD's correction of the gradient, g − c_i + c (Karimireddy et al. 2020, eq. 3).

  A server knows both: it sends c, and keeps count of c_i from the changes that the client sends. Put it before the
  local optimizer, `optax.chain(corrected(c, c_i), optax.sgd(rate))`, as the `optimizer` of a `Client`.

  Args:
    server: the server's control variate c, a tree shaped like the parameters.
    client: the client's, c_i.

  Raises:
    UsageError: if the two differ in structure or shapes.
  """
  shapes = [jax.tree.map(jnp.shape, tree) for tree in (server, client)]
  if shapes[0] != shapes[1]:
    raise errors.UsageError('the control variates of server and client differ in structure or shapes')
  difference = jax.tree.map(lambda c, own: jnp.asarray(c) - jnp.asarray(own), server, client)

  def init(params: Tree) -> Tree:  # asked about single entries (`response`), a constant changes nothing
    same = jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, difference)
    return difference if same else jax.tree.map(jnp.zeros_like, params)

  def update(updates: Tree, state: Tree, params: Tree | None = None) -> tuple[Tree, Tree]:
    del params
    return jax.tree.map(jnp.add, updates, state), state

  return optax.GradientTransformation(init, update)


@ranged
def accumulated(optimizer: optax.GradientTransformation, batches: Annotated[int, Range(1)]) -> Any:
  """Returns an optimizer that steps on the mean gradient of so many batches; gradients that are left are dropped."""
  return optimizer if batches == 1 else optax.MultiSteps(optimizer, batches).gradient_transformation()
