"""Which images of a batch count in BatchNorm's statistics: not those that only fill it.

A context and not an argument of `Model.apply`, since networks hand no weights on to their layers.
"""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

# The weights of a batch's images [N], 0 for those that only fill it.
_masked: contextvars.ContextVar[jax.Array | None] = contextvars.ContextVar('masked', default=None)
# A network may compile parts of itself by `jax.jit`: those that hold the weights of one block are of no other one.
_block = jax.make_user_context(None)


@contextlib.contextmanager
def masked(weights: jax.Array | None) -> Iterator[None]:
  """In this block, BatchNorm of Flax Linen and of PyTorch leaves out images of weight 0; with None, all count.

  A function that is compiled by itself in the block is traced anew in each. It would keep the weights of the first.
  """
  traced = isinstance(weights, jax.core.Tracer)
  token = _masked.set(weights)
  try:
    with _block(object() if traced else None if weights is None else np.asarray(weights).tobytes()):
      yield
  finally:
    _masked.reset(token)


def fills() -> bool:
  """Returns whether images may only fill their batch in this block."""
  return _masked.get() is not None


def counted(images: jax.Array) -> jax.Array | None:
  """Returns which images of a batch [N, …] count in its statistics, [N, 1, …]; None where all do.

  It is for a layer that is about to take the statistics of these images.
  """
  weights = _masked.get()
  if weights is None or images.shape[:1] != weights.shape:
    return None
  counts = (weights > 0) | jnp.all(weights == 0)  # of none, the mean would be 0/0
  return counts.reshape(-1, *[1] * (images.ndim - 1))


def options(module: nn.Module, method: str, args: tuple, given: dict[str, Any]) -> dict[str, Any]:
  """Returns the keyword arguments of a call of a module: those given and, for a BatchNorm, its `mask`."""
  if method != '__call__' or not isinstance(module, nn.BatchNorm) or given.get('mask') is not None:
    return given
  mask = counted(args[0] if args else given['x'])
  return given if mask is None else {**given, 'mask': mask}
