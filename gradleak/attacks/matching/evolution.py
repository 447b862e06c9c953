"""Gradient matching without derivatives: CMA-ES on the latents of a trained generator.

GGL searches the latent space of a generator, since a defense may leave no useful slope. Source: Li, Zhang, Liu, Liu,
Auditing Privacy Defenses in Federated Learning via Generative Gradient Leakage, CVPR 2022. All trials are lanes of one
program, and on accelerators all candidates of a generation, too: its authors evaluate one after the other.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gradleak.attacks.base import Attack, Reconstruction
from gradleak.attacks.matching.samples import classes_of, starting_labels
from gradleak.attacks.matching.search import Matching
from gradleak.core import errors
from gradleak.core.promotion import relaxed, standard
from gradleak.core.trees import Tree
from gradleak.threat import Observation


class EvolutionState(NamedTuple):
  """State of the search.

  Attributes:
    count: generations done.
    key: `key_data` of the search.
    search: the state of evosax.
    targets: probabilities [N, classes].
    kept: what stays as it is of the generator.
    best: (what makes the samples, objective, distance) of the lowest objective so far.
    objective_start: the lowest objective of the first generation.
  """

  count: jax.Array
  key: jax.Array
  search: Any
  targets: jax.Array
  kept: Tree
  best: tuple
  objective_start: jax.Array


@dataclasses.dataclass(frozen=True)
class Evolution:
  """CMA-ES (Hansen and Ostermeier 2001) of `population` candidates per generation; a step is a generation.

  Attributes:
    matching: what is minimised, with its generator.
    population: candidates per generation.
    kl: weight of how far the entries of the latents are from N(0, 1), see `divergence`, in units of the distance
      between the observed update and none.
  """

  matching: Matching
  population: int
  kl: float | jax.Array

  def _algorithm(self, solution: Tree) -> Any:
    from evosax.algorithms import CMA_ES

    return CMA_ES(population_size=self.population, solution=solution)

  def of(self, made: Tree, kept: Tree, observation: Observation) -> jax.Array:
    """Returns the samples of one candidate."""
    samples = self.matching.samples
    return samples.of({samples.variables.name: made}, kept, observation, self.matching.copies)

  def evaluate(self, made: Tree, state: EvolutionState, observation: Observation) -> tuple[jax.Array, jax.Array]:
    """Returns (objective, distance) of one candidate."""
    samples = self.of(made, state.kept, observation)
    objective, apart = self.matching.losses(observation, samples, state.targets, count=state.count)
    return objective + self.kl * self.matching.comparison.unit(observation) * divergence(made), apart

  def init(self, key: jax.Array, observation: Observation) -> EvolutionState:
    """Returns the state before the first generation, whose mean is the latents' own, 0."""
    if observation.knowledge.labels == 'optimised':
      raise errors.UsageError('CMA-ES searches latents, not labels: leave the labels known or inferred')
    keys = jax.random.split(key, 3)
    made, kept = self.matching.samples.initial(keys[0], observation, observation.targets, self.matching.copies)
    mean = jax.tree.map(jnp.zeros_like, made)
    targets = starting_labels(self.matching.client, observation)
    with standard():
      algorithm = self._algorithm(mean)
      search = algorithm.init(keys[2], mean, algorithm.default_params)
    search = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.result_type(leaf)), search)
    infinite = jnp.asarray(jnp.inf, jnp.float32)
    best = mean, infinite, infinite
    return EvolutionState(jnp.zeros((), jnp.int32), jax.random.key_data(keys[1]), search, targets, kept, best, infinite)

  def step(self, state: EvolutionState, observation: Observation) -> tuple[EvolutionState, dict[str, jax.Array]]:
    """Returns the state after one generation, and the lowest objective so far."""
    keys = jax.random.split(jax.random.fold_in(jax.random.wrap_key_data(state.key), state.count))
    algorithm = self._algorithm(state.best[0])
    ask, tell = (_alone(relaxed(getattr(algorithm, name))) for name in ('ask', 'tell'))
    with standard():
      params = algorithm.default_params
    candidates, search = ask(keys[0], state.search, params)
    # On CPU one candidate of each lane after the other: the working set of a group of lanes stays in a core's cache.
    together = 1 if jax.default_backend() == 'cpu' else self.population
    objectives, distances = jax.lax.map(
      lambda made: self.evaluate(made, state, observation), candidates, batch_size=together
    )
    finite = jnp.isfinite(objectives)
    objectives = jnp.where(finite, objectives, jnp.float32(3e38))  # what is not finite is the worst
    search, _ = tell(keys[1], candidates, objectives, search, params)
    search = jax.tree.map(lambda new, old: jnp.asarray(new, old.dtype), search, state.search)
    place = jnp.argmin(objectives)
    found = jax.tree.map(lambda leaf: leaf[place], candidates), objectives[place], distances[place]
    improved = (found[1] < state.best[1]) & finite[place]
    best = jax.tree.map(lambda new, old: jnp.where(improved, new, old), found, state.best)
    first = jnp.where(finite[place], found[1], jnp.nan)
    start = jnp.where(state.count == 0, first, state.objective_start)
    state = EvolutionState(state.count + 1, state.key, search, state.targets, state.kept, best, start)
    return state, {'objective': best[1], 'finished': jnp.zeros((), bool)}  # the next generation may be finite

  def reconstruct(self, state: EvolutionState, observation: Observation) -> Reconstruction:
    """Returns the samples of the best candidate; the trial has diverged if no objective was finite."""
    made, objective, apart = state.best
    diverged = (state.count > 0) & ~jnp.isfinite(objective)
    lost = jnp.where(diverged, jnp.nan, 0.0)
    samples = self.of(made, state.kept, observation) + lost
    targets = classes_of(self.matching.client, state.targets)
    step = jnp.where(diverged, 0, -1).astype(jnp.int32)
    return Reconstruction(samples, targets, objective + lost, apart, state.objective_start, step)

  def objective(self, observation: Observation, samples: jax.Array, targets: jax.Array) -> jax.Array:
    """Returns the objective at the private samples without the latents' part: their latents are not known."""
    return self.matching.losses(observation, samples, targets, count=self.matching.steps - 1)[0]


def _alone(function: Callable) -> Callable:
  """Returns a function that takes lane after lane on CPU.

  There a batched eigendecomposition waits for the threads of a pool in which the devices' programs themselves wait:
  with two devices it may never end.
  """
  return jax.custom_batching.sequential_vmap(function) if jax.default_backend() == 'cpu' else function


def divergence(latents: Tree) -> jax.Array:
  """Returns the KL divergence of N(0, 1) from the normal distribution with the entries' mean and variance.

  GGL's regularisation: ½(μ² + σ² − log σ² − 1), a scalar.
  """
  entries = jnp.concatenate([leaf.reshape(-1) for leaf in jax.tree.leaves(latents)])
  mean, variance = jnp.mean(entries), jnp.var(entries)
  return 0.5 * (jnp.square(mean) + variance - jnp.log(variance + 1e-12) - 1)


def evolution(matching: Matching, *, population: int, kl: float | jax.Array, labels: str) -> Attack:
  """Returns the `Attack` of CMA-ES.

  Args:
    matching: what is minimised; it has a generator, one seed and no decoys. Its steps are generations.
    population: candidates per generation, at least 4.
    kl: weight of `divergence`.
    labels: the mode that the attack was published with.

  Raises:
    UsageError: for a number out of range; when run, where labels are to be optimised.
  """
  errors.check_number('population', population, low=4, high=10_000, integer=True)
  errors.check_number('kl', kl, low=0, finite=True)
  made = Evolution(matching, population, kl)
  assumes = '' if matching.client is None else matching.simulation.in_words(matching.client)
  return Attack(made.init, made.step, made.reconstruct, made.objective, matching.steps, labels, assumes=assumes)
