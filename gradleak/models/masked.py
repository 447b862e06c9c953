"""Which images of a batch count in BatchNorm's statistics: not those that only fill it.

A context and not an argument of `Model.apply`, since networks hand no weights on to their layers.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn


class _Masked:
  """The weights of a batch's images [N], 0 for those that only fill it, and which calls of BatchNorm took them."""

  def __init__(self, weights: jax.Array):
    self.weights = weights
    self.taken: list[bool] = []


_masked: contextvars.ContextVar[_Masked | None] = contextvars.ContextVar('masked', default=None)


@contextlib.contextmanager
def masked(weights: jax.Array | None) -> Iterator[_Masked | None]:
  """In this block, BatchNorm of Flax Linen and of PyTorch leaves out images of weight 0; with None, all count."""
  found = None if weights is None else _Masked(weights)
  token = _masked.set(found)
  try:
    yield found
  finally:
    _masked.reset(token)


def counted(images: jax.Array) -> jax.Array | None:
  """Returns which images of a batch [N, …] count in its statistics, [N, 1, …]; None where all do.

  It is for a layer that is about to take the statistics of these images.
  """
  found = _masked.get()
  if found is None:
    return None
  fits = images.shape[:1] == found.weights.shape
  found.taken.append(fits)
  if not fits:
    return None
  counts = (found.weights > 0) | jnp.all(found.weights == 0)  # of none, the mean would be 0/0
  return counts.reshape(-1, *[1] * (images.ndim - 1))


def options(module: nn.Module, method: str, args: tuple, given: dict[str, Any]) -> dict[str, Any]:
  """Returns the keyword arguments of a call of a module: those given and, for a BatchNorm, its `mask`."""
  found = _masked.get()
  if found is None or method != '__call__' or not isinstance(module, nn.BatchNorm):
    return given
  if given.get('mask') is not None:
    found.taken.append(False)
    return given
  mask = counted(args[0] if args else given['x'])
  return given if mask is None else {**given, 'mask': mask}


def takes_mask(apply: Callable, variables: Any, images: jax.Array) -> bool:
  """Returns whether all of a network's BatchNorms leave out images of weight 0; it is traced on shapes only.

  Args:
    apply: (variables, images, train, key) -> anything.
    variables, images: its arguments.
  """

  def trace(variables: Any, images: jax.Array) -> list[bool]:
    with masked(jnp.ones(images.shape[:1])) as found:
      apply(variables, images, True, None)
    assert found is not None
    taken.extend(found.taken)
    return []

  taken: list[bool] = []
  jax.eval_shape(trace, variables, images)
  return bool(taken) and all(taken)
