"""The null gradient: an upload that holds nothing of the data, to measure what an attack makes up by itself."""

import jax
import jax.numpy as jnp

from gradleak import trees
from gradleak.defenses.base import stateless


def null_gradient():
  """Replaces every tensor by Gaussian noise of the same norm.

  What an attack "recovers" from it comes from its prior and its start, not from the data: the control that every
  success rate is measured against.
  """

  def replace(key, updates):
    def noise(update, key):
      draw = jax.random.normal(key, update.shape, update.dtype)
      return draw * (trees.norm(update) / jnp.maximum(trees.norm(draw), jnp.finfo(jnp.float32).tiny)).astype(draw.dtype)

    return jax.tree.map(noise, updates, trees.fold_in_leaves(key, updates))

  return stateless('null_gradient', replace, random=True)
