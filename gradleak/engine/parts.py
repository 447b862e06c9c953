"""Computing in parts: what takes long tells how far it is."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import TypeVar

import jax
import jax.numpy as jnp

NUMBER = 20  # of parts
_TOLD: contextvars.ContextVar[Callable[[int, int, str], None] | None] = contextvars.ContextVar('told', default=None)

Carry = TypeVar('Carry')


@contextlib.contextmanager
def told(on_part: Callable[[int, int, str], None]) -> Iterator[None]:
  """Within this block, long computations call `on_part` with (number done, total number, unit)."""
  token = _TOLD.set(on_part)
  try:
    yield
  finally:
    _TOLD.reset(token)


def tell(done: int, total: int, unit: str = 'steps') -> None:
  """Reports the progress of a computation to the function given to `told`, if any."""
  on_part = _TOLD.get()
  if on_part is not None:
    on_part(done, total, unit)


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
  for part in range(1, NUMBER + 1):
    first, done = done, steps * part // NUMBER
    if done > first:
      carry = jax.block_until_ready(advance(carry, jnp.int32(first), jnp.int32(done)))
      tell(done, steps, unit)
  return carry
