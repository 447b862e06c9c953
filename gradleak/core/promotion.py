"""Runs third-party optimisers under JAX's standard promotion rules; this library's own code keeps the strict ones."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import optax


@contextlib.contextmanager
def standard() -> Iterator[None]:
  """Runs what is within under JAX's standard promotion rules."""
  with jax.numpy_dtype_promotion('standard'), jax.numpy_rank_promotion('allow'):
    yield


def relaxed(function: Callable[..., Any]) -> Callable[..., Any]:
  """Returns the function, run under JAX's standard promotion rules."""

  def call(*args: Any, **kwargs: Any) -> Any:
    with standard():
      return function(*args, **kwargs)

  return call


def promoting(transformation: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
  """Returns the optax `transformation` with its `init` and `update` run under JAX's standard promotion rules.

  Adam, AdamW, Yogi and optax's schedules mix Python floats and integer counts; under
  `jax_numpy_dtype_promotion='strict'` they raise.
  """
  transformation = optax.with_extra_args_support(transformation)
  return optax.GradientTransformationExtraArgs(relaxed(transformation.init), relaxed(transformation.update))
