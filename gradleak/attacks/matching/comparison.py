"""What a search compares: the distance, the entries of the update that count in it, and where it is low enough."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from gradleak.attacks.matching.distances import LAYER_WEIGHTS, Distance, as_distance, weighed
from gradleak.core import errors, trees
from gradleak.core.trees import Tree
from gradleak.threat import Observation

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
    partial: share of the largest entries of each tensor that are compared; None for all.
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

  def arrived(self, apart: jax.Array, observation: Observation) -> jax.Array:
    """Returns whether a distance is as low as the noise, or the tolerance, allows."""
    observed = weighed(observation.update, observation)
    floor = self.measure.floor(observation.noise, trees.squared_norm(observed))
    near = self.tolerance * self.measure.unit(observed)
    return ((observation.noise > 0) & (apart <= floor)) | ((self.tolerance > 0) & (apart <= near))

  def thresholds(self, observation: Observation) -> Tree | None:
    """Returns the magnitude of each tensor of the update above which the share `partial` of its entries lies."""
    if self.partial is None:
      return None
    share = self.partial
    return jax.tree.map(lambda x: jnp.quantile(jnp.abs(x), jnp.asarray(1 - share, x.dtype)), observation.update)

  def compared(self, observation: Observation, thresholds: Tree | None) -> Observation:
    """Returns the observation in which entries of the update below the thresholds have the weight 0."""
    if thresholds is None:
      return observation
    large = jax.tree.map(lambda x, least: (jnp.abs(x) >= least).astype(jnp.float32), observation.update, thresholds)
    weights = large if observation.weights is None else jax.tree.map(jnp.multiply, large, observation.weights)
    return dataclasses.replace(observation, weights=weights)
