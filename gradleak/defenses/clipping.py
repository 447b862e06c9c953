"""Norm clipping of a whole update."""

import jax
import jax.numpy as jnp

from gradleak import errors, trees
from gradleak.defenses.base import stateless


def clip(*, norm: float):
  """Scales the update by min(1, norm / ‖update‖₂), over all tensors together. `norm` > 0; infinity is the identity.

  It hides a scale and no direction: an attacker on the cosine distance does not notice.
  """
  errors.check_number('clip(norm)', norm, low=1e-12)

  def scale(updates):
    bound, length = jnp.asarray(norm, jnp.float32), trees.norm(updates)
    exceeds = length > bound  # also the attacker's gradient at an infinite norm is finite
    factor = jnp.where(exceeds, bound, 1.0) / jnp.where(exceeds, length, 1.0)
    return jax.tree.map(lambda u: u * factor.astype(u.dtype), updates)

  return stateless('clip', scale)
