"""Soteria: the layer that it prunes is left out (Wang et al. 2022, table I, column D)."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from gradleak import defenses
from gradleak.adaptive.base import AdaptiveAttack, Case, View, adaptive_to
from gradleak.core import trees
from gradleak.core.trees import Layer, Tree
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
  muted = _layer(path, params, context.layers or ())

  def views(upload: Upload) -> list[View]:
    update = case.known.observed(upload)

    def keep(where: tuple, u: np.ndarray) -> np.ndarray:
      return np.full(u.shape, trees.path_names(where) not in muted, np.float16)

    return [case.known.view(upload, jax.tree_util.tree_map_with_path(keep, update), update)]

  words = 'It leaves out the layer that the defense prunes.'
  return [AdaptiveAttack('muted', words, views, frozenset({'weights'}), rounds=case.known.rounds)]


def _layer(kernel: tuple[str, ...], params: Tree, layers: Sequence[Layer]) -> set[tuple[str, ...]]:
  """Returns the paths of a kernel's layer, or else of its module; its own alone where that holds more than a layer."""
  shapes = {trees.path_names(path): np.shape(leaf) for path, leaf in jax.tree.leaves_with_path(params)}
  for layer in layers:
    if kernel in layer.paths and len(layer.paths) < len(shapes):
      return set(layer.paths)
  beside = {path for path in shapes if path[:-1] == kernel[:-1]}
  others = any(len(shapes[path]) > 1 for path in beside - {kernel})
  return {kernel} if others or len(beside) == len(shapes) else beside
