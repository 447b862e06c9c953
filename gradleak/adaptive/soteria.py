"""Soteria: the layer that it prunes is left out (Wang et al. 2022, table I, column D)."""

import jax
import jax.numpy as jnp
import numpy as np

from gradleak import defenses
from gradleak.adaptive.base import AdaptiveAttack, Case, View, adaptive_to
from gradleak.core import trees
from gradleak.defenses.soteria import defended_kernel
from gradleak.federated.client import Upload


@adaptive_to(defenses.soteria)
def adaptive_attacks(case: Case) -> list[AdaptiveAttack]:
  """Returns the adaptive attack that leaves out the pruned layer; none for a model without features."""
  context = case.known.context
  client, params = context.client, context.variables['params']
  if client.model.features is None or 'weights' not in case.known.reads:
    return []
  image = jnp.zeros((1, *context.sample_shape), jnp.float32)
  num_features = jax.eval_shape(client.model.features, context.variables, image).shape[1]
  path = defended_kernel(client.model, params, num_features, client.num_classes, context.sample_shape)
  layer = path[:-1] or path  # with its bias

  def views(upload: Upload) -> list[View]:
    update = case.known.observed(upload)

    def keep(where: tuple, u: np.ndarray) -> np.ndarray:
      return np.full(u.shape, trees.path_names(where)[: len(layer)] != layer, np.float16)

    return [case.known.view(upload, jax.tree_util.tree_map_with_path(keep, update), update)]

  words = 'It leaves out the layer that the defense prunes.'
  return [AdaptiveAttack('muted', words, views, frozenset({'weights'}), rounds=case.known.rounds)]
