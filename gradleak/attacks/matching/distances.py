"""How far two updates are from each other, which of their entries count, and where a search is near enough.

A distance is a pure function (simulated, observed, weights of the tensors) -> a float32 scalar.
"""

import dataclasses
from collections.abc import Callable, Collection, Sequence
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


def both_norms(simulated: Tree, observed: Tree, weights: Tree = None, *, alpha: float | jax.Array) -> jax.Array:
  """Returns Σ_l w_l ‖a_l − b_l‖² + α √w_l ‖a_l − b_l‖₁ over the tensors (Deng et al. 2021, eq. 4).

  The weights are those of a square: an entry that does not count has none in the sum of magnitudes either.
  """
  difference, _ = _both_weighted(trees.subtract(simulated, observed), observed, weights)
  magnitudes = [jnp.sum(trees.magnitude(x), dtype=jnp.float32) for x in jax.tree.leaves(difference)]
  return trees.squared_norm(difference) + alpha * sum(magnitudes, jnp.float32(0))


def mean_cosine(simulated: Tree, observed: Tree, weights: Tree = None) -> jax.Array:
  """Returns the mean over the tensors of 1 − ⟨a, b⟩ / (‖a‖‖b‖), without those that are zero in the observed update.

  It is the distance of LAMP (Balunović et al. 2022, section 4.1): small tensors count as much as large ones. Weights
  are those of the mean, since no factor of a tensor changes its own cosine.
  """
  pairs = [jax.tree.leaves(one) for one in _both_weighted(simulated, observed, weights)]
  apart = jnp.stack([trees.cosine_distance(a, b) for a, b in zip(*pairs, strict=True)])
  counted = jnp.stack([jnp.any(b != 0) for b in pairs[1]]).astype(apart.dtype)
  if weights is not None:
    counted = counted * jnp.stack([jnp.mean(w, dtype=apart.dtype) for w in jax.tree.leaves(weights)])
  total = jnp.sum(counted)
  return jnp.sum(apart * counted) / jnp.where(total > 0, total, jnp.ones_like(total))


def cosine(simulated: Tree, observed: Tree, weights: Tree = None) -> jax.Array:
  """Returns 1 − ⟨a, b⟩ / (‖a‖‖b‖) over all tensors together (Geiping et al. 2020, eq. 4); 1 where either is zero."""
  return trees.cosine_distance(*_both_weighted(simulated, observed, weights))


def dense_input(simulated: Tree, observed: Tree, weights: Tree = None, *, layers: Sequence[trees.Layer]) -> jax.Array:
  """Returns 1 − the cosine between the inputs of the first dense layer, which both updates of one sample give away.

  `∂W = x·∂bᵀ` holds for any network behind the layer. So randomness there, as PRECODE's, does not protect the layers in
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
    single: whether it is of one sample.
    layers: whether `between` takes the model's layers.
    direction: whether it is the angle of plain gradients, which `ghost` computes of products.
    scaled: whether the sizes of the updates make a difference.
    ignores: settings of a search that make no difference to it, and are refused beside it.
  """

  between: Callable[..., jax.Array] | None
  unit: Callable[[Tree], jax.Array]
  floor: Callable[[jax.Array, jax.Array], jax.Array]
  single: bool = False
  layers: bool = False
  direction: bool = False
  scaled: bool = True
  ignores: tuple[str, ...] = ()


def _one(observed: Tree) -> jax.Array:
  return jnp.float32(1)


def _angle(noise: jax.Array, total: jax.Array) -> jax.Array:
  """Returns 1 − √(1 − n), n the fraction of the noise, in the form that keeps the digits of a small n."""
  share = jnp.minimum(1.0, noise / jnp.maximum(total, 1e-30))
  return share / (1 + trees.safe_sqrt(1 - share))


def _none(noise: jax.Array, total: jax.Array) -> jax.Array:
  return jnp.float32(0)


def tells(unknowns: int, entries: int) -> bool:
  """Returns whether the level of noise says when a search should end (Morozov's discrepancy principle).

  A search that moves d numbers fits at most d / n of the noise in n entries. Where d is less than n, later steps fit
  samples more than noise, and the level is reached too early. On 625 pixels and LeNet, a search that went on found 26
  dB in place of 21.

  Args:
    unknowns: d.
    entries: n.
  """
  return unknowns >= entries


# What an attacker assumes of local training, see `simulation.Simulation`.
TRAINING = ('epochs', 'batch_size', 'rate', 'orders')

DISTANCES = {
  'squared_euclidean': Distance(squared_euclidean, trees.squared_norm, lambda noise, total: noise),
  'cosine': Distance(cosine, _one, _angle, direction=True, scaled=False),
  'mean_cosine': Distance(mean_cosine, _one, _none, scaled=False),
  'dense_input': Distance(
    dense_input, _one, _none, single=True, layers=True, scaled=False, ignores=('layer_weighting',)
  ),
  'prefix': Distance(
    None,
    lambda observed: jnp.float32(2),
    _none,
    single=True,
    scaled=False,
    ignores=('layer_weighting', 'partial', 'form', 'decoys', 'match', *TRAINING),
  ),
}


def as_distance(distance: str | Callable[[Tree, Tree], jax.Array]) -> Distance:
  """Returns the `Distance` of this name, or that of a user's own function.

  Args:
    distance: one of `DISTANCES`, or (simulated update, observed one) -> a scalar, in JAX. Weights of layers and entries
      are applied to both before. No search stops at a noise floor, which is not known of it. Its unit is 1 where it has
      no finite value at an update of zeros, as an angle has none.

  Raises:
    UsageError: for an unknown name.
  """
  if callable(distance):
    own = distance

    def unit(observed: Tree) -> jax.Array:
      apart = own(jax.tree.map(jnp.zeros_like, observed), observed)
      return jnp.where(jnp.isfinite(apart), apart, jnp.ones_like(apart))

    return Distance(
      lambda simulated, observed, weights=None: own(*_both_weighted(simulated, observed, weights)),
      unit,
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


def layer_weights(model: models.Model, params: Tree, sample_shape: tuple[int, ...], mode: str) -> Tree:
  """Returns a tree of scalars that weights each tensor in the distance, or None for 'uniform'.

  'linear' weights the l-th of L layers by l/L, 'early' by 2^(−8·l/L). Needs a model that offers `layers`.
  """
  errors.check_choice('layer weighting', mode, LAYER_WEIGHTS)
  if LAYER_WEIGHTS[mode] is None:
    return None
  layers = models.require(model, 'layers')(sample_shape)
  position = {path: (i + 1) / len(layers) for i, layer in enumerate(layers) for path in layer.paths}
  return jax.tree_util.tree_map_with_path(
    lambda path, _: jnp.float32(LAYER_WEIGHTS[mode](position[trees.path_names(path)])), params
  )


def clipped(update: Tree, observation: Observation) -> Tree:
  """Returns the update, scaled to the norm that the attacker knows the observed one was clipped to."""
  return trees.shortened(update, observation.clip)


def weighed(update: Tree, observation: Observation) -> Tree:
  """Returns the update, each entry times the root of its weight: the squared distance of two is then weighted."""
  if observation.weights is None:
    return update
  return jax.tree.map(
    lambda u, w: jnp.where(w > 0, u * jnp.sqrt(w.astype(u.dtype)), jnp.zeros_like(u)), update, observation.weights
  )


def noise_left(observation: Observation, weights: Tree, kept: Collection[tuple[str, ...]] = ()) -> jax.Array:
  """Returns the expected squared norm of the noise under other weights, where each entry that is sent bears as much.

  Args:
    observation: the `Observation`.
    weights: of entries or tensors.
    kept: paths of the parameters of which nothing is sent: they have no noise.
  """

  def total(weights: Tree) -> jax.Array:
    sums = jax.tree.map(
      lambda u, w: jnp.sum(jnp.broadcast_to(w, u.shape), dtype=jnp.float32), observation.update, weights
    )
    return jnp.sum(jnp.stack(trees.leaves_but(sums, kept)))

  before = observation.weights
  if before is None:
    before = jax.tree.map(lambda u: jnp.ones((), jnp.float32), observation.update)
  return observation.noise * total(weights) / jnp.maximum(total(before), 1e-30)


def reweighed(observation: Observation, factors: Tree, kept: Collection[tuple[str, ...]] = ()) -> Observation:
  """Returns the observation with its weights times others, and what these leave of the noise; see `noise_left`."""
  weights = factors if observation.weights is None else jax.tree.map(jnp.multiply, factors, observation.weights)
  return dataclasses.replace(observation, weights=weights, noise=noise_left(observation, weights, kept))


# How the distance is computed: from the whole gradient, from products of its factors, or as is faster.
FORMS = ('auto', 'whole', 'ghost')


@dataclasses.dataclass(frozen=True)
class Comparison:
  """The distance of a search, and when it ends.

  Attributes:
    distance: 'squared_euclidean', 'cosine', or a function as `distances.as_distance` takes it; of one sample
      'dense_input' (the input of the first dense layer) or 'prefix' (that, and the layers before it).
    layer_weighting: 'uniform', 'linear' or 'early', see `layer_weights`.
    tolerance: the search also ends at this distance, in units of the distance between the observed update and none (1,
      or its squared norm); at 0 it uses all its steps.
    form: 'whole' computes the simulated gradient, 'ghost' its products with itself and the observed one alone
      (`matching.ghost`), for the cosine distance: equal up to rounding, which leaves no digits below 1e-7. 'auto' takes
      the second where it spares a million entries, unless the optimizer compares values, as L-BFGS does.
    partial: fraction of the largest entries of each tensor that are compared; None for all.
  """

  distance: str | Callable[[Tree, Tree], jax.Array] = 'squared_euclidean'
  layer_weighting: str = 'uniform'
  tolerance: float | jax.Array = 0.0
  form: str = 'auto'
  partial: float | None = None

  def __post_init__(self) -> None:
    as_distance(self.distance)  # raises for an unknown name
    errors.check_choice('layer weighting', self.layer_weighting, LAYER_WEIGHTS)
    errors.check_choice('form', self.form, FORMS)
    errors.check_number('tolerance', self.tolerance, low=0, finite=True)
    if self.partial is not None:
      errors.check_number('partial', self.partial, low=0, high=1, finite=True)

  @property
  def measure(self) -> Distance:
    """The `Distance`."""
    return as_distance(self.distance)

  def unit(self, observation: Observation) -> jax.Array:
    """Returns the distance between the observed update and none."""
    return self.measure.unit(weighed(observation.update, observation))

  def arrived(
    self,
    apart: jax.Array,
    observation: Observation,
    weights: Tree = None,
    kept: Collection[tuple[str, ...]] = (),
  ) -> jax.Array:
    """Returns whether a distance is as low as the noise, or the tolerance, allows.

    Args:
      apart: the distance.
      observation: the `Observation`.
      weights: of the tensors, or None.
      kept: see `noise_left`.
    """
    seen = observation if weights is None else reweighed(observation, weights, kept)
    observed = weighed(seen.update, seen)
    floor = self.measure.floor(seen.noise, trees.squared_norm(observed))
    near = self.tolerance * self.measure.unit(observed)
    return ((observation.noise > 0) & (apart <= floor)) | ((self.tolerance > 0) & (apart <= near))

  def without(
    self, observation: Observation, path: tuple[str, ...], kept: Collection[tuple[str, ...]] = ()
  ) -> Observation:
    """Returns the observation in which what is at a path, or below it, has the weight 0; of no path it is the same."""
    if not path:
      return observation

    def weight(where: tuple, leaf: jax.Array) -> jax.Array:
      return jnp.full(leaf.shape, 0.0 if trees.path_names(where)[: len(path)] == path else 1.0, jnp.float32)

    return reweighed(observation, jax.tree_util.tree_map_with_path(weight, observation.update), kept)

  def thresholds(self, observation: Observation) -> Tree | None:
    """Returns the magnitude of each tensor of the update above which the share `partial` of its entries lies."""
    if self.partial is None:
      return None
    share = self.partial
    return jax.tree.map(lambda x: jnp.quantile(jnp.abs(x), jnp.asarray(1 - share, x.dtype)), observation.update)

  def compared(
    self, observation: Observation, thresholds: Tree | None, kept: Collection[tuple[str, ...]] = ()
  ) -> Observation:
    """Returns the observation in which entries of the update below the thresholds have the weight 0."""
    if thresholds is None:
      return observation
    large = jax.tree.map(lambda x, least: (jnp.abs(x) >= least).astype(jnp.float32), observation.update, thresholds)
    return reweighed(observation, large, kept)
