"""Learning in parts: what an attack learns before its first step tells how far it is."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import TypeVar

import jax
import jax.numpy as jnp

_PARTS = 20  # of one learning
_TOLD: contextvars.ContextVar[Callable[[int, int, str], None] | None] = contextvars.ContextVar('told', default=None)

Carry = TypeVar('Carry')


@contextlib.contextmanager
def told(on_steps: Callable[[int, int, str], None]) -> Iterator[None]:
  """Within this block `on_steps` is called with (steps done, steps in all, what they are) by whatever learns."""
  token = _TOLD.set(on_steps)
  try:
    yield
  finally:
    _TOLD.reset(token)


def tell(done: int, steps: int, unit: str = 'steps') -> None:
  """Says how far a learning is, to whoever is `told`."""
  on_steps = _TOLD.get()
  if on_steps is not None:
    on_steps(done, steps, unit)


def in_parts(
  advance: Callable[[Carry, jax.Array, jax.Array], Carry], carry: Carry, steps: int, unit: str = 'steps'
) -> Carry:
  """Returns what `steps` steps make of a carry; who is `told` hears of each twentieth.

  Args:
    advance: (carry, first, last) -> the carry after the steps first, …, last - 1; compiled, once for all parts.
    carry: before the first step.
    steps: in all.
    unit: what they are.
  """
  done = 0
  for part in range(1, _PARTS + 1):
    first, done = done, steps * part // _PARTS
    if done > first:
      carry = jax.block_until_ready(advance(carry, jnp.int32(first), jnp.int32(done)))
      tell(done, steps, unit)
  return carry
