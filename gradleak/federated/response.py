"""What a local optimizer makes of the gradients that it is given: the scale of a delta, and of the noise in it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradleak.core import trees
from gradleak.core.promotion import promoting
from gradleak.core.trees import Tree

# Sizes of the gradients that optimizers are asked about: about that of an entry of a gradient, and one that is clipped.
_USUAL, _LARGE = 1e-3, 1e3


def slopes(optimizer: optax.GradientTransformation, steps: int, params: Tree) -> Tree:
  """Returns the delta of each tensor over the gradient, where that is the same in all steps: −ηT under plain SGD.

  Args:
    optimizer: of the client.
    steps: T.
    params: the model's, or anything shaped like them; their shapes alone matter, and they may be traced.

  Returns:
    A tree of one number per tensor, NumPy arrays.
  """
  (delta,) = _deltas(optimizer, *_kinds(params), ((_USUAL,) * steps,))
  return jax.tree.map(lambda d: d / d.dtype.type(_USUAL), delta)


def first_rates(optimizer: optax.GradientTransformation, params: Tree) -> tuple[float, ...] | None:
  """Returns the first step of each tensor over its gradient, in the order of leaves: −η under plain SGD.

  Args:
    optimizer: of the client.
    params: the model's, or anything shaped like them; their shapes alone matter, and they may be traced.

  Returns:
    A number per tensor; None where a step is not along the gradient, as of Adam, of weight decay and of SCAFFOLD.
  """
  with jax.ensure_compile_time_eval():
    held = jax.tree.map(lambda p: jnp.ones(p.shape, jnp.float32), params)
    gradient = jax.tree.map(lambda g: _USUAL * g, trees.draws(jax.random.normal, jax.random.key(0), held))
    optimizer = promoting(optimizer)
    step, _ = optimizer.update(gradient, optimizer.init(held), held)
    both = jax.device_get((jax.tree.leaves(step), jax.tree.leaves(gradient)))
  rates = []
  for taken, slope in zip(*both, strict=True):
    rates.append(float(np.vdot(taken, slope) / np.vdot(slope, slope)))
    if not np.allclose(taken, rates[-1] * slope, rtol=0, atol=1e-3 * abs(rates[-1]) * np.abs(slope).max()):
      return None
  return tuple(rates)


def noise_gains(
  optimizer: optax.GradientTransformation, steps: int, params: Tree, noisy: Any = slice(None)
) -> Tree | None:
  """Returns the variance of a delta's entries over that of noise drawn anew in each gradient: Tη² under plain SGD.

  Args:
    optimizer, steps, params: as `slopes` takes them.
    noisy: which of the gradients bear noise, bool [T]; all by default.

  Returns:
    As `slopes`; None for an optimizer that is not linear in the gradients, as Adam and those that clip.
  """
  each, kinds = np.eye(steps), _kinds(params)
  asked = (_USUAL * each, _LARGE * each, _USUAL * (each + 1), np.full((1, steps), _USUAL))
  one, large, both, all_steps = (
    jax.tree.map(lambda *deltas: np.stack(deltas), *_deltas(optimizer, *kinds, tuple(map(tuple, rows.tolist()))))
    for rows in asked
  )

  def linear(one: np.ndarray, large: np.ndarray, both: np.ndarray, all_steps: np.ndarray) -> bool:
    return _close(large, one * np.float32(_LARGE / _USUAL)) and _close(both, one + all_steps)

  if not all(jax.tree.leaves(jax.tree.map(linear, one, large, both, all_steps))):
    return None
  return jax.tree.map(lambda d: np.sum(np.square(np.float64(d) / _USUAL)[noisy], axis=0), one)


def _close(a: np.ndarray, b: np.ndarray) -> bool:
  return bool(np.allclose(a, b, rtol=1e-3, atol=1e-3 * float(np.max(np.abs(a), initial=0.0))))


def _kinds(params: Tree) -> tuple[Any, tuple]:
  """Returns what matters of parameters: their structure, and (rank, dtype) of each tensor."""
  leaves, structure = jax.tree.flatten(params)
  return structure, tuple((jnp.ndim(leaf), jnp.result_type(leaf)) for leaf in leaves)


@functools.lru_cache(maxsize=64)
def _deltas(optimizer: optax.GradientTransformation, structure: Any, kinds: tuple, asked: tuple) -> tuple[Tree, ...]:
  """Returns the delta after each of several trainings, of which an entry per tensor is kept: NumPy arrays.

  Args:
    optimizer: of the client.
    structure, kinds: from `_kinds`.
    asked: the gradients of all steps of each training, the same in every entry.
  """
  optimizer = promoting(optimizer)

  def trained(gradients: jax.Array) -> Tree:
    start = jax.tree.unflatten(structure, [jnp.zeros((1,) * rank, dtype) for rank, dtype in kinds])

    def step(carry: tuple, gradient: jax.Array) -> tuple[tuple, None]:
      params, state = carry
      updates, state = optimizer.update(jax.tree.map(lambda p: jnp.full_like(p, gradient), params), state, params)
      return (optax.apply_updates(params, updates), state), None

    carry = jax.tree.map(lambda x: jnp.asarray(x, x.dtype), (start, optimizer.init(start)))
    return jax.lax.scan(step, carry, gradients)[0][0]

  with jax.ensure_compile_time_eval():  # an attack asks while it is traced, once, and not in each of its steps
    found = jax.device_get(jax.jit(jax.vmap(trained))(jnp.asarray(asked, jnp.float32)))
  return tuple(jax.tree.map(lambda x, at=at: x[at], found) for at in range(len(asked)))
