"""A search at several weights of total variation at once, of which the smoothest that still matches is kept.

How much smoothness helps differs by network and image, and no weight is neutral. The distance alone does not tell it: a
search without a prior fits the update by noise. So a rung is kept if its distance is near the least of all, and of
these the one with the largest weight. No truth is used. Each rung starts smoother than it ends: a search that begins
with coarse shapes stays out of the minima that noise makes.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from gradleak.attacks.base import Attack, Reconstruction
from gradleak.attacks.matching.search import Matching, MatchState
from gradleak.core import errors
from gradleak.threat import Observation

FALL = 0.7
_ROUNDING = 2.0**-24  # of a cosine, a number near 1


def weights(lowest: float | jax.Array, highest: float | jax.Array, rungs: int) -> jax.Array:
  """Returns the weights of the rungs, float32 [rungs], each by the same factor above the one before."""
  ends = jnp.log(jnp.stack([jnp.asarray(lowest, jnp.float32), jnp.asarray(highest, jnp.float32)]))
  return jnp.exp(ends[0] + (ends[1] - ends[0]) * jnp.linspace(0.0, 1.0, rungs, dtype=jnp.float32))


def smoothest(distances: jax.Array, slack: float | jax.Array, unit: float | jax.Array = 1.0) -> jax.Array:
  """Returns the index of the last rung whose distance is at most `slack` times the least; 0 if none is finite.

  Distances that are 0 up to rounding are alike: rounding decides their signs.

  Args:
    distances: of the rungs, [rungs], from the least weight to the largest; infinity for one that diverged.
    slack: 1 or more.
    unit: distance between the observed update and none.
  """
  known = jnp.where(jnp.isnan(distances), jnp.inf, distances)
  most = jnp.maximum(slack * jnp.min(known), _ROUNDING * unit)
  matches = (known <= most) & jnp.isfinite(known)
  return jnp.max(jnp.where(matches, jnp.arange(len(distances)), 0))


@dataclasses.dataclass(frozen=True)
class Ladder:
  """Searches that differ in a weight; the pure functions of an `Attack` are its methods.

  Attributes:
    rung: weight of total variation -> the `Matching`.
    lowest, highest: weights of the first rung and of the last; may be traced.
    rungs: their number.
    slack: how many times the least distance a rung may have, to be kept; may be traced.
    descent: how many times its weight a rung starts with; it falls geometrically over the first `FALL` of the steps.
  """

  rung: Callable[[float | jax.Array], Matching]
  lowest: float | jax.Array
  highest: float | jax.Array
  rungs: int
  slack: float | jax.Array
  descent: float | jax.Array = 1.0

  def __post_init__(self) -> None:
    errors.check_number('rungs', self.rungs, low=2, high=16, integer=True)
    errors.check_number('slack', self.slack, low=1, finite=True)
    errors.check_number('descent', self.descent, low=1, finite=True)
    for name, weight in (('lowest', self.lowest), ('highest', self.highest)):
      errors.check_number(name, weight, low=1e-12, finite=True)
    if all(isinstance(weight, float | int) for weight in (self.lowest, self.highest)) and self.lowest >= self.highest:
      raise errors.UsageError(
        f'lowest is {self.lowest:g} and highest {self.highest:g}, expected a lower and a higher one'
      )

  @property
  def weights(self) -> jax.Array:
    """The weight of each rung."""
    return weights(self.lowest, self.highest, self.rungs)

  def init(self, key: jax.Array, observation: Observation) -> MatchState:
    """Returns the states before the first step, all from one start; leaves [rungs, …].

    The objective of the start is that of the first rung, without its descent, as `objective` has it.
    """
    states = jax.vmap(lambda weight: self.rung(weight).init(key, observation))(self.weights)
    start = self.rung(self.lowest).at_once(jax.tree.map(lambda x: x[0], states), observation)
    return states._replace(objective_start=jnp.full_like(states.objective_start, start))

  def step(self, states: MatchState, observation: Observation) -> tuple[MatchState, dict[str, jax.Array]]:
    """Returns the states after one step of each rung, and what is reported: of the rung that would be kept."""

    def step(weight: jax.Array, state: MatchState) -> tuple[MatchState, dict[str, jax.Array]]:
      one = self.rung(weight)
      left = jnp.maximum(0.0, 1 - state.count.astype(jnp.float32) / (FALL * one.steps))
      return self.rung(weight * self.descent**left).step(state, observation)

    states, info = jax.vmap(step)(self.weights, states)
    kept = self.kept(states, observation)
    return states, {'objective': info['objective'][kept], 'finished': jnp.all(info['finished'])}

  def kept(self, states: MatchState, observation: Observation) -> jax.Array:
    """Returns the index of the rung that is kept."""
    unit = self.rung(self.lowest).comparison.unit(observation)
    return smoothest(jnp.where(states.diverged_step >= 0, jnp.inf, states.best[2]), self.slack, unit)

  def reconstruct(self, states: MatchState, observation: Observation) -> Reconstruction:
    """Returns what the kept rung found. Its objective is that of the first rung, as `objective` has it."""
    found = jax.vmap(lambda weight, state: self.rung(weight).reconstruct(state, observation))(self.weights, states)
    first = self.rung(self.lowest)
    chosen = smoothest(found.distance, self.slack, first.comparison.unit(observation))
    kept, state = jax.tree.map(lambda x: x[chosen], (found, states))
    seen = first.compared(observation, state.thresholds)
    best = first.better(state, *self.rung(self.weights[chosen]).evaluate(state.dummy, state, seen), seen)
    objective = first.evaluate(best[0], first.at_end(state), seen)[0]
    return kept._replace(
      objective=jnp.where(kept.diverged_step >= 0, jnp.nan, objective), objective_start=found.objective_start[0]
    )

  def objective(self, observation: Observation, samples: jax.Array, targets: jax.Array) -> jax.Array:
    """Returns the objective of the first rung at the private samples."""
    return self.rung(self.lowest).objective(observation, samples, targets)

  def attack(self, targets: str) -> Attack:
    """Returns the `Attack`; `labels` is the mode that it was published with."""
    return (
      self.rung(self.lowest)
      .attack(targets)
      ._replace(init=self.init, step=self.step, reconstruct=self.reconstruct, objective=self.objective)
    )
