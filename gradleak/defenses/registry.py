"""Defenses by name, and the chains that a user writes down."""

from collections.abc import Callable
from typing import NamedTuple

import optax

from gradleak import errors, specs
from gradleak.defenses import base, clipping, compression, control, noise

REGISTRY = {
  'gaussian': noise.gaussian,
  'laplace': noise.laplace,
  'prune': compression.prune,
  'clip': clipping.clip,
  'null_gradient': control.null_gradient,
}


class Defense(NamedTuple):
  """A chain of defenses as written by a user, apart from its numbers, which are traced.

  Attributes:
    name: the canonical text.
    structure: what decides the compilation; hashable.
    numbers: the numeric settings, a tuple of floats.
    build: numbers -> (step chain, upload chain), optax transformations.
  """

  name: str
  structure: tuple
  numbers: tuple[float, ...]
  build: Callable


def parse(text):
  """Returns the `Defense` that `text` describes: 'none', 'prune(rate=0.9)', 'clip(norm=1)+gaussian(stddev=0.1)'.

  All defenses here stand in the upload chain: they act once, on what is about to be sent.

  Raises:
    UsageError: for an unknown name or setting, or a value out of range.
  """
  chain = specs.parse_chain(text, 'defense')
  if any(spec.name == 'none' for spec in chain):
    if len(chain) > 1 or chain[0].settings:
      raise errors.UsageError(f"'none' stands alone, got {text!r}")
    return Defense('none', (), (), lambda numbers: (optax.identity(), optax.identity()))
  templates = [specs.template(spec, REGISTRY, 'defense') for spec in chain]

  def build(numbers):
    numbers = iter(numbers)
    members = [template.build([next(numbers) for _ in template.numbers]) for template in templates]
    return optax.identity(), base.chain(*members)

  defense = Defense(
    '+'.join(map(str, chain)),
    tuple(template.structure for template in templates),
    tuple(number for template in templates for number in template.numbers),
    build,
  )
  defense.build(defense.numbers)  # range errors now, not while tracing
  return defense


def custom(name, transformation):
  """Returns the `Defense` of a user's own optax transformation on what is about to be sent.

  Raises:
    UsageError: if it is none.
  """
  if not isinstance(transformation, optax.GradientTransformation):
    raise errors.UsageError(
      f'the defense {name!r} is {transformation!r}, expected a text or an optax transformation, such as optax.clip(1.0)'
    )
  return Defense(name, (name, id(transformation)), (), lambda numbers: (optax.identity(), transformation))
