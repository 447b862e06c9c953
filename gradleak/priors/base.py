"""What a generator of images is: pure functions of what an attack optimises in place of pixels."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from gradleak.core import errors
from gradleak.core.trees import Tree


class Generator(NamedTuple):
  """A function from variables to images, and where these variables start.

  Attributes:
    init: (key, shape of the images [N, H, W, C], what was learned) -> (what is optimised, what stays as it is); either
      may be weights or latents, trees of arrays.
    apply: (what is optimised, what stays as it is, shape, what was learned) -> images [N, H, W, C] in [0, 1]. What was
      learned from other images before is `Observation.prepared`; None without.
    learned: shape of the images -> arrays or shapes like what was learned, where `init` reads them.
  """

  init: Callable[[jax.Array, tuple[int, ...], Tree], tuple[Tree, Tree]]
  apply: Callable[[Tree, Tree, tuple[int, ...], Tree], jax.Array]
  learned: Callable[[tuple[int, ...]], Tree] = lambda shape: None


# (number of a layer, its features [N, …]) -> what stands in their place.
Change = Callable[[int, jax.Array], jax.Array]


def unchanged(layer: int, features: jax.Array) -> jax.Array:
  """Returns the features: the `Change` that is none."""
  del layer
  return features


def as_generator(given: Any, known: Mapping[str, Generator]) -> Generator | None:
  """Returns the `Generator` that is given, or named; None for None: the pixels themselves are optimised.

  Args:
    given: a `Generator`, a name, or None.
    known: generators by name.

  Raises:
    UsageError: for anything else.
  """
  if given is None or isinstance(given, Generator):
    return given
  errors.check_choice('generator', given, known)
  return known[given]
