"""Norm clipping of a whole update."""

import math

import optax

from gradleak.core import trees
from gradleak.core.settings import Positive
from gradleak.defenses.base import stateless
from gradleak.defenses.defense import defense


@defense(
  place='upload',
  clips=lambda settings: settings['norm'],
  post_processing=True,
  idle=lambda settings: math.isinf(settings['norm']),
)
def clip(*, norm: Positive) -> optax.GradientTransformationExtraArgs:
  r"""Scales the update by min(1, norm / ‖update‖₂), over all tensors together.

  It changes the scale and not the direction, so it has no effect on attacks that minimise the cosine distance.

  Formula:
    g' = g \cdot \min(1, \text{norm} / \lVert g \rVert_2)

  Args:
    norm: the largest L2 norm of the result; infinity is the identity.
  """
  return stateless('clip', lambda updates: trees.clip(updates, norm))
