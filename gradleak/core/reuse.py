"""Equal arguments give the same object: what was compiled for it is found again."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec('P')
T = TypeVar('T')


def reusable(most: int) -> Callable[[Callable[P, T]], Callable[P, T]]:
  """Decorates a factory: equal arguments of equal types, if they have a hash, give the same object.

  Args:
    most: objects that are kept, the ones used last: those with compiled programs take memory.

  Returns:
    A decorator. What it returns has a method `anew`: the same factory, with nothing kept.
  """

  def decorate(factory: Callable[P, T]) -> Callable[P, T]:
    kept = functools.lru_cache(most, typed=True)(factory)

    @functools.wraps(factory)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
      try:
        hash((args, tuple(kwargs.values())))
      except TypeError:
        return factory(*args, **kwargs)
      return kept(*args, **kwargs)  # type: ignore[arg-type]

    call.anew = functools.partial(decorate, factory)  # type: ignore[attr-defined]
    return call

  return decorate
