"""TabLeak: matching of relaxed rows of a table, and the median over several starts (Vero et al., ICML 2023)."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax

from gradleak.attacks.base import Attack
from gradleak.attacks.matching.optimizers import first_order
from gradleak.attacks.matching.search import Matching, MatchState, composed
from gradleak.attacks.presets import Preset, preset
from gradleak.core import errors
from gradleak.core.settings import Choice, Range
from gradleak.core.trees import Tree
from gradleak.federated import Client
from gradleak.priors import Generator
from gradleak.threat import Observation

CITATION = 'Vero, Balunović, Dimitrov, Vechev: TabLeak: Tabular Data Leakage in Federated Learning. ICML 2023.'
RELAXED = 'cells'  # the relaxation of a modality that this attack searches in
POOLINGS = ('median', 'mean', 'best')


@dataclasses.dataclass(frozen=True)
class Pooled(Matching):
  """A search from several starts, whose rows are matched to those of the best one and pooled.

  Attributes:
    pooling: one of `POOLINGS`.
  """

  pooling: str = 'median'

  def chosen(self, dummy: dict, state: MatchState, observation: Observation) -> jax.Array:
    """Returns the pooled rows [N, D], relaxed: entries of a block are the starts' shares of each level."""
    best = super().chosen(dummy, state, observation)
    if self.samples.seeds == 1 or self.pooling == 'best':
      return best
    return pooled(self.samples.of(dummy, state.latents, observation, self.copies), best, self.pooling)


def pooled(rows: jax.Array, best: jax.Array, pooling: str) -> jax.Array:
  """Returns the median or mean [N, D] of starts [S, N, D], matched to the best one; it stands for one that diverged."""
  matched = jax.vmap(lambda one: jnp.where(jnp.isfinite(one).all(), one[order(best, one)], best))(rows)
  return jnp.median(matched, axis=0) if pooling == 'median' else jnp.mean(matched, axis=0)


def order(rows: jax.Array, others: jax.Array) -> jax.Array:
  """Returns which of other rows [N, D] is matched to each row [N, D], int32 [N], at the least total cost.

  Two rows cost the sum of their entries' distances, each 1 at most (Hungarian method).
  """
  apart = jnp.minimum(jnp.abs(rows[:, jnp.newaxis] - others[jnp.newaxis]), 1.0).sum(axis=-1)
  apart = jnp.where(jnp.isfinite(apart), apart, jnp.float32(rows.shape[-1]))
  places, matched = optax.assignment.hungarian_algorithm(apart)
  return jnp.zeros(len(rows), jnp.int32).at[places].set(matched.astype(jnp.int32))


def _relaxed(client: Client) -> Generator:
  """Returns what makes relaxed rows of free variables; raises `UsageError` for samples without categories."""
  kind = client.modality
  if RELAXED not in kind.relaxations:
    raise errors.UsageError(
      f'tableak relaxes the cells of a table, and this client trains on {kind.noun[1]}: take csdlg'
    )
  relaxation = kind.relaxation(RELAXED, client.model)

  def init(key: jax.Array, shape: tuple[int, ...], learned: Tree = None) -> tuple[Tree, Tree]:
    del learned
    return jax.random.uniform(key, shape, jnp.float32, -1.0, 1.0), None

  def apply(free: Tree, kept: Tree, shape: tuple[int, ...], learned: Tree = None) -> jax.Array:
    del kept, shape, learned
    return relaxation.apply(free)

  return Generator(init, apply)


def _pooled(client: Client, made: tuple[Preset, str], further: Mapping[str, Any]) -> Attack:
  """Returns the attack of a preset and of its pooling."""
  base, pooling = made
  settings = {**base.settings, **further, **({} if client is None else {'generator': _relaxed(client)})}
  matching = composed(client, base.solver, base.steps, settings)
  own = {field.name: getattr(matching, field.name) for field in dataclasses.fields(matching)}
  return Pooled(**own, pooling=pooling).attack(base.labels)


@preset(CITATION, without=('generator', 'start', 'box', 'group', 'decoys'), make=_pooled)
def tableak(
  *,
  steps: int = 1500,
  learning_rate: float = 0.06,
  seeds: Annotated[int, Range(1, 64)] = 30,
  pooling: Annotated[str, Choice(POOLINGS)] = 'median',
  distance: str = 'cosine',
  gradient: str = 'sign',
  optimizer: str = 'adam',
  decay: str = 'constant',
) -> Any:
  r"""TabLeak (Vero et al. 2023) on tables: a softmax for categories, a sigmoid for numbers, several starts pooled.

  The defaults are those of the published code: cosine distance, Adam on the sign at a constant rate of 0.06, 30 starts
  from U(−1, 1), labels known. The rows of all starts are matched to those of the start with the least distance,
  and the median of each entry is taken. What is returned are relaxed rows: where the starts agree, a block is nearly
  one-hot, and its entropy tells how sure a category is.

  Formula:
    \min_u \; 1 - \cos(\nabla_\theta L(f_\theta(x(u)), y), g), \quad
    x_{\text{category}} = \text{softmax}(u), \quad x_{\text{number}} = l + (h - l) \, \sigma(u)

    \hat{x} = \text{median}_s \; P_s x(u_s)

  Args:
    steps: number of steps of each start.
    learning_rate: of the first step.
    seeds: starts that are pooled, all together in one trial.
    pooling: 'median' as published, 'mean', or 'best' for the start with the least distance.
    distance, gradient, optimizer, decay: as `csdlg` takes them.

  Raises:
    UsageError: for a client whose samples are no rows of a table, and for a pooling of one start.
  """
  if seeds == 1:
    errors.check_idle('with one start', {'pooling': (pooling, 'median')})
  solver = first_order(optimizer, learning_rate, steps, gradient=gradient, decay=decay)
  return Preset(solver, steps, {'distance': distance, 'seeds': seeds}), pooling
