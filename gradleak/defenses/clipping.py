"""Norm clipping of a whole update."""

from gradleak import errors, trees
from gradleak.defenses.base import stateless


def clip(*, norm: float):
  """Scales the update by min(1, norm / ‖update‖₂), over all tensors together. `norm` > 0; infinity is the identity.

  It hides a scale and no direction: an attacker on the cosine distance does not notice.
  """
  errors.check_number('clip(norm)', norm, low=1e-12)

  return stateless('clip', lambda updates: trees.clip(updates, norm))
