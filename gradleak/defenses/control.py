"""The null gradient: noise with the norms of an update, the control of every attack."""

import jax
import jax.numpy as jnp
import optax

from gradleak.core import trees
from gradleak.core.trees import Tree
from gradleak.defenses.base import stateless
from gradleak.defenses.defense import defense


@defense(place='upload', random=True, post_processing=True)
def null_gradient() -> optax.GradientTransformationExtraArgs:
  r"""Replaces every tensor by Gaussian noise of the same norm; of norm 1, where the whole update is zero.

  An attack's result on it depends on the attack's prior and start, not on the data: it is the control that defines
  success.

  Formula:
    g'_t = \lVert g_t \rVert_2 \, n_t / \lVert n_t \rVert_2, \quad n_t \sim \mathcal{N}(0, I) \text{ for each tensor } t

  Raises (from its update):
    UsageError: without `key=`.
  """

  def replace(key: jax.Array, updates: Tree) -> Tree:
    empty = trees.norm(updates) == 0  # noise of no norm would be no control of a defense that adds some

    def noise(update: jax.Array, draw: jax.Array) -> jax.Array:
      norm = jnp.where(empty, 1.0, trees.norm(update))
      scale = norm / jnp.maximum(trees.norm(draw), jnp.finfo(jnp.float32).tiny)
      return (draw * scale.astype(draw.dtype)).astype(update.dtype)

    return jax.tree.map(noise, updates, trees.draws(jax.random.normal, key, updates))

  return stateless('null_gradient', replace, random=True)
