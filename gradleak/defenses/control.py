"""The null gradient: noise with the norms of an update, the control of every attack."""

import jax
import jax.numpy as jnp
import optax

from gradleak import trees
from gradleak.defenses.base import stateless
from gradleak.defenses.defense import defense
from gradleak.trees import Tree


@defense(place='upload', random=True, post_processing=True)
def null_gradient() -> optax.GradientTransformationExtraArgs:
  """Replaces every tensor by Gaussian noise of the same norm.

  An attack's result on it depends on the attack's prior and start, not on the data: it is the control that defines
  success.

  Raises (from its update):
    UsageError: without `key=`.
  """

  def replace(key: jax.Array, updates: Tree) -> Tree:
    def noise(update: jax.Array, key: jax.Array) -> jax.Array:
      draw = jax.random.normal(key, update.shape, update.dtype)
      return draw * (trees.norm(update) / jnp.maximum(trees.norm(draw), jnp.finfo(jnp.float32).tiny)).astype(draw.dtype)

    return jax.tree.map(noise, updates, trees.fold_in_leaves(key, updates))

  return stateless('null_gradient', replace, random=True)
