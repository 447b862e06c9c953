"""How far two updates are from each other, and which of their entries count.

A distance is a pure function (simulated, observed, weights of the tensors) -> a float32 scalar.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gradleak.attacks.dense import first_dense_layer
from gradleak.core import errors, trees
from gradleak.core.trees import Tree
from gradleak.models import model as models
from gradleak.threat import Observation


def squared_euclidean(simulated: Tree, observed: Tree, weights: Tree = None) -> jax.Array:
  """Returns Σ_l w_l ‖a_l − b_l‖² over the tensors (Zhu et al. 2019, eq. 4)."""
  difference = trees.subtract(simulated, observed)
  return trees.inner_product(difference, _weighted(difference, weights))


def cosine(simulated: Tree, observed: Tree, weights: Tree = None) -> jax.Array:
  """Returns 1 − ⟨a, b⟩ / (‖a‖‖b‖) over all tensors together (Geiping et al. 2020, eq. 4); 1 where either is zero."""
  return trees.cosine_distance(*_both_weighted(simulated, observed, weights))


def dense_input(simulated: Tree, observed: Tree, weights: Tree = None, *, layers: Sequence[trees.Layer]) -> jax.Array:
  """Returns 1 − the cosine between the inputs of the first dense layer, which both updates of one sample give away.

  ∂W = x·∂bᵀ, whatever happens behind the layer: randomness there, as PRECODE's, is no protection of what stands in
  front (Balunović et al. 2022).
  """
  del weights
  kernel, bias = first_dense_layer(layers, observed)

  def read(update):
    return trees.get(update, kernel) @ trees.get(update, bias)

  return trees.cosine_distance(read(simulated), read(observed))


class Distance(NamedTuple):
  """A distance between two updates, and what is known of it.

  Attributes:
    between: (simulated update, observed one, weights of the tensors or None) -> a float32 scalar; None for 'prefix',
      which is no function of two updates, see `matching.prefix`.
    unit: observed update -> its distance from an update of zeros.
    floor: (expected squared norm of the noise in an update, squared norm of that update) -> the distance that the truth
      would have.
  """

  between: Callable[..., jax.Array] | None
  unit: Callable[[Tree], jax.Array]
  floor: Callable[[jax.Array, jax.Array], jax.Array]


def _one(observed: Tree) -> jax.Array:
  return jnp.float32(1)


def _angle(noise: jax.Array, total: jax.Array) -> jax.Array:
  """Returns 1 − √(1 − n), n the share of the noise, in the form that keeps the digits of a small n."""
  share = jnp.minimum(1.0, noise / jnp.maximum(total, 1e-30))
  return share / (1 + trees.safe_sqrt(1 - share))


def _none(noise: jax.Array, total: jax.Array) -> jax.Array:
  return jnp.float32(0)


DISTANCES = {
  'squared_euclidean': Distance(squared_euclidean, trees.squared_norm, lambda noise, total: noise),
  'cosine': Distance(cosine, _one, _angle),
  'dense_input': Distance(dense_input, _one, _none),
  'prefix': Distance(None, lambda observed: jnp.float32(2), _none),
}


def as_distance(distance: str | Callable[[Tree, Tree], jax.Array]) -> Distance:
  """Returns the `Distance` of this name, or that of a user's own function.

  Args:
    distance: one of `DISTANCES`, or (simulated update, observed one) -> a scalar, in JAX. Weights of layers and entries
      are applied to both before. No search stops at a noise floor, which is not known of it.

  Raises:
    UsageError: for an unknown name.
  """
  if callable(distance):
    own = distance
    return Distance(
      lambda simulated, observed, weights=None: own(*_both_weighted(simulated, observed, weights)),
      lambda observed: own(jax.tree.map(jnp.zeros_like, observed), observed),
      lambda noise, total: jnp.float32(-jnp.inf),
    )
  errors.check_choice('distance', distance, DISTANCES)
  return DISTANCES[distance]


def _weighted(tree, weights):
  return tree if weights is None else jax.tree.map(lambda x, w: x * w, tree, weights)


def _both_weighted(simulated, observed, weights):
  """Returns both times the roots of the weights, so that their inner product is weighted."""
  root = None if weights is None else jax.tree.map(jnp.sqrt, weights)
  return _weighted(simulated, root), _weighted(observed, root)


# Position of a layer in (0, 1], first to last -> its weight in the distance.
LAYER_WEIGHTS: dict[str, Any] = {
  'uniform': None,
  'linear': lambda position: position,
  'early': lambda position: 2.0 ** (-8.0 * position),
}


def layer_weights(model: models.Model, params: Tree, image_shape: tuple[int, ...], mode: str) -> Tree:
  """Returns a tree of scalars that weights each tensor in the distance, or None for 'uniform'.

  'linear' weights the l-th of L layers by l/L, 'early' by 2^(−8·l/L). Needs a model that offers `layers`.
  """
  errors.check_choice('layer weighting', mode, LAYER_WEIGHTS)
  if LAYER_WEIGHTS[mode] is None:
    return None
  layers = models.require(model, 'layers')(image_shape)
  position = {path: (i + 1) / len(layers) for i, layer in enumerate(layers) for path in layer.paths}
  return jax.tree_util.tree_map_with_path(
    lambda path, _: jnp.float32(LAYER_WEIGHTS[mode](position[trees.path_names(path)])), params
  )


def clipped(update: Tree, observation: Observation) -> Tree:
  """Returns the update, scaled to the norm that the attacker knows the observed one was clipped to."""
  return trees.clip(update, observation.clip)


def weighed(update: Tree, observation: Observation) -> Tree:
  """Returns the update, each entry times the root of its weight: the squared distance of two is then weighted."""
  if observation.weights is None:
    return update
  return jax.tree.map(
    lambda u, w: jnp.where(w > 0, u * jnp.sqrt(w.astype(u.dtype)), jnp.zeros_like(u)), update, observation.weights
  )
