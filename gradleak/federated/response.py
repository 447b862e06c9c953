"""What a local optimizer makes of the gradients that it is given: the scale of a delta, and of the noise in it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradleak.strictness import lenient
from gradleak.trees import Tree

# Sizes of the gradients that optimizers are asked about: about that of an entry of a gradient, and one that is clipped.
_USUAL, _LARGE = 1e-3, 1e3


def _deltas(optimizer: optax.GradientTransformation, params: Tree, gradients: jax.Array) -> Tree:
  """Returns the delta after steps whose gradients have these values [T] in every entry, one entry per tensor."""
  optimizer = lenient(optimizer)
  start = jax.tree.map(lambda p: jnp.zeros((1,) * jnp.ndim(p), p.dtype), params)

  def step(carry: tuple, gradient: jax.Array) -> tuple[tuple, None]:
    params, state = carry
    updates, state = optimizer.update(jax.tree.map(lambda p: jnp.full_like(p, gradient), params), state, params)
    return (optax.apply_updates(params, updates), state), None

  carry = jax.tree.map(lambda x: jnp.asarray(x, x.dtype), (start, optimizer.init(start)))
  return jax.lax.scan(step, carry, gradients)[0][0]


def slopes(optimizer: optax.GradientTransformation, steps: int, params: Tree) -> Tree:
  """Returns the delta of each tensor over the gradient, where that is the same in all steps: −ηT under plain SGD.

  Args:
    optimizer: of the client.
    steps: T.
    params: the model's; their shapes alone matter.
  """
  delta = _deltas(optimizer, params, jnp.full(steps, _USUAL, jnp.float32))
  return jax.tree.map(lambda d: d / jnp.asarray(_USUAL, d.dtype), delta)


def noise_gains(optimizer: optax.GradientTransformation, steps: int, params: Tree) -> Tree | None:
  """Returns the variance of a delta's entries over that of noise drawn anew in each gradient: Tη² under plain SGD.

  Args:
    optimizer, steps, params: as `slopes` takes them.

  Returns:
    A tree of one number per tensor, NumPy arrays; None for an optimizer that is not linear in the gradients, as Adam
    and those that clip.
  """
  responses = jax.jit(jax.vmap(functools.partial(_deltas, optimizer, params)))
  each = np.eye(steps, dtype=np.float32)
  small, large, both = (
    jax.device_get(responses(one)) for one in (_USUAL * each, _LARGE * each, _USUAL * (each + np.float32(1)))
  )
  together = jax.device_get(responses(np.full((1, steps), _USUAL, np.float32)))

  def close(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(np.allclose(a, b, rtol=1e-3, atol=1e-3 * float(np.max(np.abs(a), initial=0.0))))

  linear = jax.tree.map(
    lambda one, more, b, t: close(more, one * np.float32(_LARGE / _USUAL)) and close(b, one + t),
    small,
    large,
    both,
    together,
  )
  if not all(jax.tree.leaves(linear)):
    return None
  return jax.tree.map(lambda s: np.sum(np.square(np.float64(s) / _USUAL), axis=0), small)
