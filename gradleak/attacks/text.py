"""Matching on texts: TAG, and LAMP with its discrete moves under a prior that is learned from public texts."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gradleak.attacks.base import Attack, Reconstruction, attack, padding_of
from gradleak.attacks.matching import Matching, MatchState, composed
from gradleak.attacks.matching.distances import both_norms
from gradleak.attacks.matching.optimizers import first_order
from gradleak.attacks.presets import Preset, preset
from gradleak.core import errors
from gradleak.core.settings import Choice, Count, NonNegative, Range
from gradleak.core.trees import Tree
from gradleak.federated import Client
from gradleak.modalities.text import of_scenario, table
from gradleak.priors import ngram
from gradleak.threat import Observation

TAG = (
  'Deng, Wang, Li, Wang, Shang, Liu, Rajasekaran, Ding: TAG: Gradient Attack on Transformer-based Language Models. '
  'Findings of EMNLP 2021.'
)
LAMP = (
  'Balunović, Dimitrov, Jovanović, Vechev: LAMP: Extracting Text from Gradients with Language Model Priors. NeurIPS '
  '2022.'
)
RELAXATIONS = ('softmax', 'embeddings')
SIZE = 1.0  # the weight of LAMP's term of the norms of embeddings, by default
_BURN_IN = 0.1  # share of the steps before the first move, as published
Moved = Annotated[str, Choice(RELAXATIONS)]


@preset(TAG)
def tag(
  *,
  steps: int = 2500,
  learning_rate: float = 0.1,
  alpha: float = 0.01,
  decay: str = 'constant',
  layer_weighting: str = 'uniform',
  relaxation: str = 'softmax',
) -> Preset:
  r"""TAG (Deng et al. 2021): the squared distance and α times the sum of magnitudes, by Adam; labels known.

  Published searches move the embeddings of tokens, and the token with the nearest embedding is settled on
  (`relaxation=embeddings`). By default probabilities of tokens are moved. The gradient of the table of embeddings is
  then compared as well, and losses that predict tokens have their targets. Steps, rate and α are those of the runs by
  LAMP's authors. The source lowers α from layer to layer; `layer_weighting` has weights of layers.

  Formula:
    \min_x \; \sum_l \lVert \nabla_l L(f_\theta(x), y) - g_l \rVert_2^2
    + \alpha \lVert \nabla_l L(f_\theta(x), y) - g_l \rVert_1

  Args:
    alpha: weight of the sum of magnitudes.
  """
  distance = functools.partial(both_norms, alpha=alpha)
  solver = first_order('adam', learning_rate, steps, decay=decay)
  return Preset(solver, steps, {'distance': distance, 'layer_weighting': layer_weighting, 'relaxation': relaxation})


class AlternatingState(NamedTuple):
  """State of a search that alternates.

  Attributes:
    search: of the continuous steps.
    key: `key_data` that the moves are drawn from.
    order: the best order of the tokens since the last move, int [N, T].
    gain: what it is better than the order as it is.
  """

  search: MatchState
  key: jax.Array
  order: jax.Array
  gain: jax.Array


@dataclasses.dataclass(frozen=True)
class Alternating(Matching):
  """Matching whose tokens are put in another order from time to time: the best of all that were tried meanwhile.

  Attributes:
    moves: orders that are tried after a step.
    every: steps from one change to the next.
    surprise: weight of −log P under the n-gram model, per token.
    size: weight of ((mean norm of an embedding) − (that of the table's rows))², where embeddings are moved.
    starts: random ones, of which the search begins with the best.
  """

  moves: int
  every: int
  surprise: float | jax.Array
  size: float | jax.Array
  starts: int

  def losses(self, observation: Observation, samples: jax.Array, *given: Any, **named: Any) -> tuple:
    """Returns (objective, distance) of one seed, with the term of the embeddings' size."""
    objective, apart = super().losses(observation, samples, *given, **named)
    if self.samples.relaxation != 'embeddings':
      return objective, apart
    rows = table(observation.variables, self.client.model)
    sizes = [jnp.mean(jnp.sqrt(jnp.sum(jnp.square(x), axis=-1) + 1e-12)) for x in (samples, rows)]
    return objective + self.size * jnp.square(sizes[0] - sizes[1]), apart

  def begin(self, key: jax.Array, observation: Observation) -> AlternatingState:
    """Returns the state before the first step: the best of the random starts."""
    keys = jax.random.split(key, self.starts + 1)
    keys, moves = keys[:-1], keys[-1]

    def judged(key: jax.Array) -> jax.Array:
      state = self.init(key, observation)
      return self.evaluate(state.dummy, state, self.compared(observation, state.thresholds))[0]

    objectives = jax.lax.map(judged, keys)
    best = keys[jnp.argmin(jnp.where(jnp.isnan(objectives), jnp.inf, objectives))]
    state = self.init(best, observation)
    order = self.same(state.dummy[self.samples.variables.name])
    return AlternatingState(state, jax.random.key_data(moves), order, jnp.float32(0))

  def alternate(self, state: AlternatingState, observation: Observation) -> tuple[AlternatingState, dict]:
    """Returns the state after a continuous step and, at every `every`-th, the best order; and what is reported."""
    before = state.search.count
    search, info = self.step(state.search, observation)
    keys = jax.random.split(jax.random.fold_in(jax.random.wrap_key_data(state.key), before), self.moves)
    name, seen = self.samples.variables.name, self.compared(observation, search.thresholds)
    made = search.dummy[name]
    tokens, model = self.settled(made, observation), observation.prepared
    assert model is not None
    orders = jnp.concatenate(
      [self.same(made)[None], jax.vmap(lambda key: order(key, tokens, padding_of(self.client)))(keys)]
    )

    def total(one: jax.Array) -> jax.Array:
      there = ordered(made, one)
      objective, _ = self.evaluate({**search.dummy, name: there}, search, seen)
      return objective + self.surprise * jnp.mean(ngram.surprise(model, self.settled(there, observation)))

    totals = jax.lax.map(total, orders)
    gains = jnp.where(jnp.isnan(totals), -jnp.inf, totals[0] - totals)
    best = jnp.argmax(gains)
    better = gains[best] > state.gain
    found, gain = (jnp.where(better, new, old) for new, old in ((orders[best], state.order), (gains[best], state.gain)))
    begun = (before >= int(_BURN_IN * self.steps)) & (search.diverged_step < 0) & ~info['finished']
    turn = begun & (before % self.every == self.every - 1)
    kept = jnp.where(turn & (gain > 0), ordered(made, found), made)
    search = search._replace(dummy={**search.dummy, name: kept})
    found, gain = jnp.where(turn, self.same(made), found), jnp.where(turn, jnp.zeros_like(gain), gain)
    return AlternatingState(search, state.key, found, gain), info

  def same(self, made: jax.Array) -> jax.Array:
    """Returns the order that changes nothing, int32 [N, T]."""
    return jnp.broadcast_to(jnp.arange(made.shape[1], dtype=jnp.int32)[jnp.newaxis], made.shape[:2])

  def settled(self, made: jax.Array, observation: Observation) -> jax.Array:
    """Returns the tokens that what is moved would be settled on."""
    return self.form.decide(self.form.apply(made), observation.variables)

  def end(self, state: AlternatingState, observation: Observation) -> Reconstruction:
    """Returns the best dummy samples."""
    return self.reconstruct(state.search, observation)


def ordered(made: jax.Array, order: jax.Array) -> jax.Array:
  """Returns what is moved of tokens, [N, T, …], in another order, int [N, T]."""
  return jnp.take_along_axis(made, order.reshape(*order.shape, *[1] * (made.ndim - 2)), axis=1)


def order(key: jax.Array, tokens: jax.Array, padding: int) -> jax.Array:
  """Returns an order of the tokens, int32 [N, T], in which those of one sequence stand elsewhere.

  Two tokens change places, or a token, a run of tokens or the beginning goes elsewhere, each as likely (Balunović et
  al. 2022, section 4.2). Padding stays behind.

  Args:
    key: PRNG key.
    tokens: int [N, T].
    padding: the token that fills short texts.
  """
  keys = jax.random.split(key, 5)
  number, length = tokens.shape
  row = jax.random.randint(keys[0], (), 0, number)
  held = jnp.sum(tokens[row] != padding)

  def place(key: jax.Array, most: jax.Array) -> jax.Array:
    return jnp.minimum((jax.random.uniform(key) * most.astype(jnp.float32)).astype(jnp.int32), jnp.maximum(most - 1, 0))

  i, j = place(keys[1], held), place(keys[2], held)
  kind = jax.random.randint(keys[3], (), 0, 4)
  start, stop = jnp.minimum(i, j), jnp.maximum(i, j) + 1
  start = jnp.where(kind == 3, 0, jnp.where(kind == 1, i, start))
  stop = jnp.where(kind == 1, i + 1, stop)
  to = jnp.where(kind == 3, held - (stop - start), place(keys[4], held - (stop - start) + 1))
  places = jnp.arange(length, dtype=jnp.int32)
  inside = (places >= start) & (places < stop)
  rest = places - jnp.where(places >= stop, stop - start, 0)
  sort = jnp.where(inside, to.astype(jnp.float32) - 0.75 + (places - start) / (2 * length), rest.astype(jnp.float32))
  run = jnp.argsort(jnp.where(places >= held, places.astype(jnp.float32) + length, sort)).astype(jnp.int32)
  swap = jnp.where(places == i, j, jnp.where(places == j, i, places))
  others = jnp.broadcast_to(places[jnp.newaxis], tokens.shape)
  return others.at[row].set(jnp.where(kind == 0, swap, run))


def _learned(key: jax.Array, scenario: Any, settings: Mapping[str, Any], batch_size: int) -> Tree:
  """Returns the n-gram model of the scenario's public texts."""
  del key, settings, batch_size
  return ngram.fitted(np.asarray(scenario.public[0]), of_scenario(scenario.settings).size)


@attack(citation=LAMP, reads=('weights', 'noise', 'clip'), prepare=_learned)
def lamp(
  client: Client,
  *,
  steps: Count = 2000,
  learning_rate: Annotated[float, Range(1e-12, finite=True)] = 0.1,
  relaxation: Moved = 'softmax',
  surprise: NonNegative = 0.2,
  size: NonNegative = SIZE,
  moves: Annotated[int, Range(1, 200)] = 3,
  every: Count = 75,
  starts: Annotated[int, Range(1, 10_000)] = 500,
  partial: Annotated[float | None, Range(0, 1)] = None,
) -> Attack:
  r"""LAMP (Balunović et al. 2022): continuous steps, and moves of tokens that a language model of public texts judges.

  The distance is 1 − the cosine, averaged over the tensors. After every 75th step the tokens of one text are put in
  another order, the best that was tried since. The source tries 200 there, and ours three after each step. Its
  language model is GPT-2; ours is a bigram model of the public texts, which is counted at once. Orders are judged by
  the objective and `surprise` times the mean of −log P of a token. The published search moves embeddings at a rate of
  0.01; by default ours moves probabilities of tokens, see `tag`.

  Formula:
    \min_x \; \frac{1}{L} \sum_l 1 - \cos(\nabla_l L(f_\theta(x), y), g_l)
    + \text{size} \cdot \left( \overline{\lVert x_t \rVert} - \overline{\lVert e_v \rVert} \right)^2

    x \leftarrow \arg\min_{x' \in \{x\} \cup \text{orders}(x)} \; d(x') - \text{surprise} \cdot \frac{1}{T} \log P(x')

  Args:
    steps: of Adam; the order changes after the first tenth.
    learning_rate: of its first step; it falls to zero along a cosine.
    relaxation: what is moved: probabilities by a 'softmax', or 'embeddings'.
    surprise: weight of the language model.
    size: weight of how far the mean norm of the embeddings is from that of the table, where embeddings are moved.
    moves: orders that are tried after a step.
    every: steps from one change of the order to the next.
    starts: random starts, of which the best is taken.
    partial: fraction of the largest entries of each tensor that are compared; None for all.

  Raises:
    UsageError: for a value out of range, and for a `size` where probabilities are moved; in an audit, without public
      texts.
  """
  if relaxation != 'embeddings':
    errors.check_idle(f'to relaxation={relaxation!r}', {'size': (size, SIZE)})
  solver = first_order('adam', learning_rate, steps, decay='cosine')
  given = {'distance': 'mean_cosine', 'relaxation': relaxation, 'partial': partial}
  made = composed(client, solver, steps, given)
  parts = {field.name: getattr(made, field.name) for field in dataclasses.fields(Matching)}
  search = Alternating(**parts, moves=moves, every=every, surprise=surprise, size=size, starts=starts)
  attack_of = search.attack('known')
  return attack_of._replace(init=search.begin, step=search.alternate, reconstruct=search.end, auxiliary_data=True)
