"""Equal blocks of a deep network one after another, compiled once."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

# Fewer blocks are not looped over: products of their gradients are then seen by `attacks.matching.ghost`.
MANY = 7

_apart = contextvars.ContextVar('apart', default=False)


@contextlib.contextmanager
def apart() -> Iterator[None]:
  """Makes `chain` apply each block by itself, so that its submodules have their own names."""
  token = _apart.set(True)
  try:
    yield
  finally:
    _apart.reset(token)


def chain(
  parent: nn.Module, make: Callable[..., nn.Module], names: Sequence[str], x: jax.Array, *arguments: Any
) -> jax.Array:
  """Returns x after the blocks `names` of `parent`, modules with the same shapes of parameters and of input and output.

  Many blocks are a `lax.scan` over their stacked parameters: a program of one block, at any depth.

  Args:
    parent: the module whose compact method calls this; parameters and running statistics are where they are without it.
    make: makes a block, given `name=` or `parent=`.
    names: of the blocks, in their order.
    x: the first one's input.
    *arguments: further ones of each block.
  """
  if len(names) < MANY or parent.is_initializing() or _apart.get():
    for name in names:
      x = make(name=name)(x, *arguments)
    return x
  block = make(parent=None)
  collections = [kind for kind in parent.variables if names[0] in parent.variables[kind]]
  variables = {kind: _stacked([parent.variables[kind][name] for name in names]) for kind in collections}

  def step(x: jax.Array, variables: dict) -> tuple[jax.Array, dict]:
    x, changed = block.apply(variables, x, *arguments, mutable=['batch_stats'])
    return x, dict(changed)

  x, changed = jax.lax.scan(step, x, variables)
  if parent.is_mutable_collection('batch_stats'):
    for kind, stacked in changed.items():
      for index, name in enumerate(names):
        parent.put_variable(kind, name, jax.tree.map(lambda leaf, index=index: leaf[index], stacked))
  return x


def _stacked(trees: Sequence[dict]) -> dict:
  return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)
