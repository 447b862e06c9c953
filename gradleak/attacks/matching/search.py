"""Gradient matching: dummy samples are optimised until the simulated client's update equals the observed one.

DLG (Zhu et al. 2019), iDLG (Zhao et al. 2020) and csDLG (Geiping et al. 2020) are this one algorithm. They differ in
distances, priors, optimizers and starts; see `gradleak.attacks.presets`. Deltas of several local steps are matched the
same way, since the client simulation is the client's own code.
"""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax

from gradleak.attacks.base import Attack, Reconstruction, unsent
from gradleak.attacks.matching import ghost, prefix
from gradleak.attacks.matching.distances import TRAINING, Comparison, clipped, layer_weights, tells, weighed
from gradleak.attacks.matching.optimizers import ComparesValues
from gradleak.attacks.matching.samples import Samples, classes_of, labels_of, starting_labels
from gradleak.attacks.matching.simulation import FALL, Simulation, joined, reverse, shared_gradient
from gradleak.attacks.matching.subsets import Subsets
from gradleak.attacks.matching.terms import TERMS, Given, Term, addends, check_modality, in_use, summed
from gradleak.core import errors, trees
from gradleak.core.trees import Tree
from gradleak.federated import Client
from gradleak.federated.losses import cross_entropy
from gradleak.modalities import Relaxation
from gradleak.models import model as models
from gradleak.threat import Observation

P = TypeVar('P')
_LARGE = 2**20  # entries: a gradient that leaves a core's cache

# How far along its gradient the objective is looked at for its sharpness.
_NEAR = 1e-2


class MatchState(NamedTuple):
  """State of a matching attack.

  Attributes:
    count: steps done.
    dummy: the dummy samples, see `Samples`; and 'place', a scalar, of the surrogate model (`simulation.point`).
    targets: the labels that are not optimised, probabilities [N, classes].
    optimizer: its state.
    best: (dummy, objective, distance) of the lowest objective so far.
    objective_start: the objective of the start; infinity until it is known.
    diverged_step: first step that was not finite, −1 before.
    thresholds: the least magnitude that is compared of each tensor, a tree of scalars; None for all entries.
    latents: what stays as it is of a generator, leaves [seeds, …]; None without one.
  """

  count: jax.Array
  dummy: dict
  targets: jax.Array
  optimizer: Any
  best: tuple
  objective_start: jax.Array
  diverged_step: jax.Array
  thresholds: Tree | None
  latents: Tree | None = None


@dataclasses.dataclass(frozen=True)
class Matching:
  """Gradient matching of one client; the pure functions of an `Attack` are its methods.

  Attributes:
    client: the `Client` that is simulated.
    optimizer: the solver: of the dummy samples, with support for extra arguments.
    steps: their number.
    simulation: what the update is taken for.
    samples: the parametrisation.
    comparison: the distance.
    terms: names and terms, what is added to it.
    subsets: the `Subsets`, or None.
    sharpness: weight of the gradient's norm, see `flatter`; None for none.
  """

  client: Client
  optimizer: optax.GradientTransformationExtraArgs
  steps: int
  simulation: Simulation
  samples: Samples
  comparison: Comparison
  terms: tuple[tuple[str, Term], ...]
  subsets: Subsets | None
  sharpness: float | None

  def __post_init__(self) -> None:
    errors.check_number('steps', self.steps, low=1, integer=True)
    if self.sharpness is not None:
      errors.check_number('sharpness', self.sharpness, low=0, finite=True)
    if self.subsets is not None and self.comparison.measure.single:
      raise errors.UsageError(
        f'distance={self.comparison.distance!r} is of one sample, which has no subsets: leave out subset'
      )
    self.check_used()
    if self.client is not None:
      check_modality(self.terms, self.client.modality)
      self.samples.check(self.client)
      self.simulation.check(self.client)
      gradient = self.simulation.linear(self.client.share == 'gradient')
      if self.subsets is not None and not (gradient and self.client.loss == cross_entropy()):
        raise errors.UsageError(
          'subset is of a mean gradient of cross-entropy: not for the steps of local training, nor for other losses'
        )

  def check_used(self) -> None:
    """Raises `UsageError` for a setting that makes no difference beside the others."""
    measure, named = self.comparison.measure, f'distance={self.comparison.distance!r}'
    parts = {**vars(self.samples), **vars(self.comparison), **vars(self.simulation)}
    known = settings()
    given = {name: (value, known[name].default) for name, value in parts.items() if name in known}
    errors.check_idle(f'to {named}', {name: given[name] for name in measure.ignores})
    if self.simulation.takes_gradient() and not measure.scaled:
      assumed = {name: given[name] for name in TRAINING if name != 'orders'}
      errors.check_idle(f'to match={self.simulation.match!r} beside {named}, which compares directions', assumed)
    missing = {'seeds': self.samples.seeds == 1, 'orders': self.simulation.orders == 'known'}
    for name, term in self.terms:
      if missing.get(term.beside) and in_use(name, term):
        raise errors.UsageError(f'{name} makes no difference without {term.beside}: leave it out')

  @functools.cached_property
  def form(self) -> Relaxation:
    """What is moved of a sample."""
    return self.samples.check(self.client)

  @property
  def copies(self) -> int:
    """How many dummy samples there are of each private one."""
    return self.simulation.copies(self.client)

  def added(
    self, total: jax.Array, observation: Observation, samples: jax.Array, count: jax.Array | int, together: bool = False
  ) -> jax.Array:
    """Returns the total with the terms of a seed's samples, or of those of all seeds together, after `count` steps."""
    kind = self.client.modality
    several = {'': True, 'seeds': together and len(samples) > 1, 'orders': self.copies > 1}
    terms = {
      name: one
      for name, one in self.terms
      if one.suits(name, kind) and one.together == together and several[one.beside]
    }
    kept = self.kept(observation)
    given = Given(self.client.model.apply, observation, self.copies, count, self.steps, kept)
    return sum(addends(terms, samples, given, self.comparison.unit(observation)), total)

  def losses(
    self,
    observation: Observation,
    samples: jax.Array,
    targets: jax.Array,
    count: jax.Array | int = 0,
    decoys: jax.Array | None = None,
    place: jax.Array | None = None,
  ) -> tuple[jax.Array, jax.Array]:
    """Returns (objective, distance) of one seed, at samples and targets (probabilities); terms do not see the labels.

    Args:
      observation: the `Observation`.
      samples: [copies · N, …], N for each epoch that has dummy samples of its own.
      targets: [N, classes], and behind them those of the decoys.
      count: steps done, which decide the derivatives of the network, see `Simulation.softly`.
      decoys: further samples that the client is simulated on, or None.
      place: of the surrogate model, or None.
    """
    client = self.simulation.softly(self.client, count, self.steps)
    if self.comparison.measure.between is None:
      layers = models.require(self.client.model, 'layers')(observation.batch_shape[1:])
      apart = prefix.distance(client, layers, observation, samples)
    else:
      apart = self.apart(client, observation, samples, targets, place, decoys)
    return self.added(apart, observation, samples, count), apart

  def apart(
    self,
    client: Client,
    observation: Observation,
    samples: jax.Array,
    targets: jax.Array,
    place: jax.Array | None = None,
    decoys: jax.Array | None = None,
  ) -> jax.Array:
    """Returns the distance between what the client would send of these samples and what was observed, weighed.

    The arguments are those of `losses`.
    """
    sample_shape, simulation = observation.batch_shape[1:], self.simulation
    if decoys is None:
      targets = jnp.tile(targets, (self.copies, *[1] * (targets.ndim - 1)))
    else:
      simulation, client, samples, targets = simulation.beside(client, samples, decoys, targets)
    observed = weighed(observation.update, observation)
    weights = layer_weights(client.model, observation.update, sample_shape, self.comparison.layer_weighting)
    variables = simulation.model(observation, place)
    if self.by_products(observation, samples, targets):
      towards = reverse(observed) if simulation.takes_gradient() else observed
      gradient = functools.partial(shared_gradient, client)
      return ghost.cosine(ghost.products(gradient, towards, variables, samples, targets, weights=weights))
    update = simulation.update(client, variables, samples, targets)
    measure, options = self.comparison.measure, {}
    if measure.layers:
      options['layers'] = models.require(client.model, 'layers')(sample_shape)
      prefix.sent_dense_layer(client, options['layers'], observation)
    assert measure.between is not None  # `losses` computes that of 'prefix'
    return measure.between(weighed(clipped(update, observation), observation), observed, weights, **options)

  def by_products(self, observation: Observation, samples: jax.Array, targets: jax.Array) -> bool:
    """Returns whether the distance is computed without the whole gradient, see `ghost`; shapes alone decide.

    Raises:
      UsageError: if form='ghost' is asked for and cannot be had.
    """
    directions = self.comparison.measure.direction  # to which a known clip makes no difference
    gradient = self.simulation.linear(self.client.sends_gradient)
    alike = self.simulation.scales_alike(self.client, observation.batch_shape[0], observation.update)
    fits = directions and observation.weights is None and gradient and alike
    if self.comparison.form == 'ghost' and not fits:
      raise errors.UsageError(
        "form='ghost' is for the cosine of plain gradients: not for other distances, weights of entries, deltas of "
        'local training, rates of single tensors and simulated defenses'
      )
    if self.comparison.form != 'auto' or not fits:
      return self.comparison.form == 'ghost'
    if isinstance(self.optimizer, ComparesValues):
      return False  # products leave no digits below 1e-7
    if sum(leaf.size for leaf in jax.tree.leaves(observation.variables['params'])) < _LARGE:
      return False  # without tracing the gradient
    whole = functools.partial(shared_gradient, self.client)
    return ghost.saved(whole, observation.variables, samples, targets) >= _LARGE

  def evaluate(self, dummy: dict, state: MatchState, observation: Observation) -> tuple[jax.Array, jax.Array]:
    """Returns (objective, distance) at dummy samples."""
    dummy, samples, targets = self.shown(dummy, state, observation)

    def of(seed: jax.Array) -> tuple[jax.Array, jax.Array]:
      return self.losses(observation, seed, targets, state.count, dummy.get('decoys'), dummy.get('place'))

    objective, apart = self.samples.each(of, samples)
    if self.samples.seeds == 1:
      return self.added(objective, observation, samples[None], state.count, together=True), apart
    return self.added(jnp.mean(objective), observation, samples, state.count, together=True), jnp.mean(apart)

  def searched(
    self, dummy: dict, state: MatchState, observation: Observation
  ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Returns (what the optimizer lowers: the objective and the term of a random subset; `evaluate`).

    What is kept and reported is judged without that term, whose subset changes.
    """
    objective, apart = self.evaluate(dummy, state, observation)
    if self.subsets is None:
      return objective, (objective, apart)
    dummy, samples, targets = self.shown(dummy, state, observation)
    client = self.simulation.softly(self.client, state.count, self.steps)

    def distance(weights: jax.Array) -> jax.Array:
      shape = -1, *[1] * (targets.ndim - 1)
      chosen = targets * weights.astype(targets.dtype).reshape(shape)  # cross-entropy is linear in the label

      def of(seed: jax.Array) -> jax.Array:
        return self.apart(client, observation, seed, chosen, dummy.get('place'), dummy.get('decoys'))

      found = self.samples.each(of, samples)
      return jnp.mean(found) if found.ndim else found

    return objective + self.subsets.term(distance, apart, state.count, targets.shape[0]), (objective, apart)

  def shown(self, dummy: dict, state: MatchState, observation: Observation) -> tuple[dict, jax.Array, jax.Array]:
    """Returns (what is moved at its pace, the dummy samples, their targets, those of decoys behind them)."""
    dummy = self.samples.paced(dummy)
    targets = labels_of(dummy, state.targets, self.client.loss.targets.relax)
    samples = self.samples.of(dummy, state.latents, observation, self.copies, self.form)
    if 'decoy_logits' in dummy:
      targets = jnp.concatenate([targets, self.client.loss.targets.relax(dummy['decoy_logits'])])
    return dummy, samples, targets

  def attack(self, targets: str) -> Attack:
    """Returns the `Attack`; `labels` is the mode that it was published with."""
    return Attack(
      *(self.init, self.step, self.reconstruct, self.objective), self.steps, targets,
      self.samples.auxiliary or any(one.needs == 'class_means' for _, one in self.terms),
      assumes='' if self.client is None else self.simulation.in_words(self.client), noise=self.uses_noise,
    )  # fmt: skip

  def uses_noise(self, shape: tuple[int, ...], variables: Tree) -> bool:
    """Returns whether a known level of noise makes a difference: to a term, or to when a search of this batch ends.

    Args:
      shape: of the batch.
      variables: of the model.
    """
    if any(one.needs == 'gaussian' for _, one in self.terms):
      return True
    moved = self.form.shape((self.copies * shape[0], *shape[1:]), variables)
    unknowns = self.samples.variables.count(moved) + self.samples.decoys * math.prod(moved)
    ends = float(self.comparison.measure.floor(jnp.float32(1), jnp.float32(2))) > 0
    kept = self.client.kept_paths(variables['params'], shape[1:])
    return ends and tells(unknowns, trees.entries(variables['params'], kept))

  def init(self, key: jax.Array, observation: Observation) -> MatchState:
    """Returns the state before the first step."""
    if self.comparison.measure.single and observation.knowledge.labels == 'optimised':
      raise errors.UsageError(
        f'distance={self.comparison.distance!r} tells no labels, so that they cannot be optimised: give or infer them'
      )
    image_key, label_key = jax.random.split(key)
    given = starting_labels(self.client, observation)
    of_class = jnp.ones_like(given) if observation.knowledge.labels == 'optimised' else given
    made, latents = self.samples.initial(image_key, observation, of_class, self.copies, self.form)
    dummy = {
      self.samples.variables.name: made,
      **self.samples.hidden(key, label_key, observation, self.copies),
      **({'place': jnp.zeros((), jnp.float32)} if self.simulation.match == 'surrogate' else {}),
    }
    dummy = self.samples.paced(dummy, -1)
    infinite = jnp.asarray(jnp.inf, jnp.float32)
    state = MatchState(
      jnp.zeros((), jnp.int32), dummy, given, self.optimizer.init(dummy), (dummy, infinite, infinite), infinite,
      jnp.full((), -1, jnp.int32), self.comparison.thresholds(observation), latents,
    )  # fmt: skip
    if self.simulation.softness is None:
      return state
    return state._replace(objective_start=self.at_once(state, observation))

  def at_once(self, state: MatchState, observation: Observation) -> jax.Array:
    """Returns the objective at the point of a state, as it would be behind the last step."""
    return self.evaluate(state.dummy, self.at_end(state), self.compared(observation, state.thresholds))[0]

  def compared(self, observation: Observation, thresholds: Tree | None) -> Observation:
    """Returns the observation with weights of the entries that are compared, see `Comparison`."""
    kept = self.kept(observation)
    return self.comparison.compared(self.comparison.without(observation, self.form.silent, kept), thresholds, kept)

  def kept(self, observation: Observation) -> frozenset[tuple[str, ...]]:
    """Returns the paths of the parameters of which nothing is sent."""
    return unsent(self.client, observation)

  def better(self, state: MatchState, objective: jax.Array, apart: jax.Array, observation: Observation) -> tuple:
    """Returns `best`, with the point of `state` considered; what has finished stays as it is.

    Objectives of different softness are not compared: until it has fallen, the last point is the best.
    """
    lower = (objective < state.best[1]) | (self.soft(state.count) & jnp.isfinite(objective))
    improved = lower & ~self.arrived(state, observation) & (state.diverged_step < 0)
    return jax.tree.map(functools.partial(jnp.where, improved), (state.dummy, objective, apart), state.best)

  def soft(self, count: jax.Array) -> jax.Array | bool:
    """Returns whether the softness of the derivatives still falls after so many steps."""
    return self.simulation.softness is not None and count < int(FALL * self.steps)

  def arrived(self, state: MatchState, observation: Observation) -> jax.Array:
    """Returns whether the search has come to the distance at which it ends."""
    mode, shape = self.comparison.layer_weighting, observation.batch_shape[1:]
    weights = layer_weights(self.client.model, observation.update, shape, mode)
    ended = self.comparison.arrived(state.best[2], observation, weights, self.kept(observation))
    return ended if self.simulation.softness is None else ended & ~self.soft(state.count)

  def step(self, state: MatchState, observation: Observation) -> tuple[MatchState, dict[str, jax.Array]]:
    """Returns the state after one evaluation and update, and what is reported."""
    observation = self.compared(observation, state.thresholds)
    value_and_grad = jax.value_and_grad(self.searched, has_aux=True)
    (value, (objective, apart)), gradient = value_and_grad(state.dummy, state, observation)
    if self.sharpness is not None:
      gradient = self.flatter(gradient, state, observation)
    told = {} if self.subsets is None else {'changed': self.subsets.changed(state.count)}
    updates, optimizer_state = self.optimizer.update(gradient, state.optimizer, state.dummy, value=value, **told)
    dummy, variables = optax.apply_updates(state.dummy, updates), self.samples.variables
    made = variables.project(dummy[variables.name], self.client.modality.settle)
    dummy[variables.name] = made  # decoys may leave the range of pixels
    first = state.count == 0
    # A line search may try a point that is not finite and come back; the start and the point it goes to must be finite.
    known = functools.reduce(jnp.logical_and, [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(made)])
    finite = known & (jnp.isfinite(objective) | ~first)
    arrived = self.arrived(state, observation)
    done = (state.diverged_step >= 0) | arrived  # its group may still be at work
    diverged = jnp.where(done | finite, state.diverged_step, state.count)
    state = state._replace(
      count=state.count + 1,
      dummy=dummy,
      optimizer=optimizer_state,
      best=self.better(state, objective, apart, observation),
      objective_start=jnp.where(first & jnp.isinf(state.objective_start), objective, state.objective_start),
      diverged_step=diverged,
    )
    ended = self.arrived(state, observation)
    reported = jnp.where(jnp.isfinite(objective) & ~ended, objective, state.best[1])
    info = {'objective': jnp.where(diverged >= 0, jnp.nan, reported), 'finished': ended | (diverged >= 0)}
    return state, info

  def flatter(self, gradient: dict, state: MatchState, observation: Observation) -> dict:
    """Returns the gradient of objective + sharpness · ‖∇objective‖, by a finite difference along the gradient.

    Gradient regularisation, as FedLeak (Fan et al. 2025) names it; how it is approximated there was not read.
    """
    length = trees.norm(gradient)
    step = _NEAR / jnp.where(length > 0, length, jnp.ones_like(length))
    ahead = jax.tree.map(lambda x, g: x + step.astype(x.dtype) * g, state.dummy, gradient)
    there, _ = jax.grad(self.searched, has_aux=True)(ahead, state, observation)
    return jax.tree.map(lambda g, t: g + self.sharpness * (t - g) / _NEAR, gradient, there)

  def reconstruct(self, state: MatchState, observation: Observation) -> Reconstruction:
    """Returns the best dummy samples."""
    observation = self.compared(observation, state.thresholds)
    best, objective, apart = self.better(state, *self.evaluate(state.dummy, state, observation), observation)
    if self.simulation.softness is not None:  # that of an earlier step is of softer derivatives
      objective = self.evaluate(best, self.at_end(state), observation)[0]
    dummy = self.samples.paced(best)
    diverged = state.diverged_step >= 0
    lost = jnp.where(diverged, jnp.nan, 0.0)  # a diverged trial has no reconstruction
    samples = self.chosen(dummy, state, observation)
    unused = observation.knowledge.labels == 'unused'
    return Reconstruction(
      self.form.decide(joined(samples, self.copies) + lost, observation.variables),
      jnp.zeros(0, jnp.int32) if unused else classes_of(self.client, dummy.get('logits', state.targets)),
      objective + lost,
      jnp.where(diverged, jnp.inf, apart),
      state.objective_start,
      state.diverged_step,
    )

  def at_end(self, state: MatchState) -> MatchState:
    """Returns the state, under soft derivatives behind the last step, where they are those of the network."""
    if self.simulation.softness is None:
      return state
    return state._replace(count=jnp.full_like(state.count, self.steps))

  def chosen(self, dummy: dict, state: MatchState, observation: Observation) -> jax.Array:
    """Returns the samples of the seed with the smallest distance."""
    samples = self.samples.of(dummy, state.latents, observation, self.copies, self.form)
    if self.samples.seeds == 1:
      return samples
    targets = labels_of(dummy, state.targets, self.client.loss.targets.relax)
    place = dummy.get('place')
    apart = jax.vmap(lambda seed: self.losses(observation, seed, targets, self.steps, None, place)[1])(samples)
    return samples[jnp.argmin(apart)]

  def objective(self, observation: Observation, samples: jax.Array, targets: jax.Array) -> jax.Array:
    """Returns the objective at the private samples; NaN with decoys, as the client's own are not part of the truth.

    NaN, too, with a surrogate model: its best place is not known.
    """
    if self.samples.decoys or self.simulation.match == 'surrogate':
      return jnp.full((), jnp.nan, jnp.float32)
    observation = self.compared(observation, self.comparison.thresholds(observation))
    samples = self.form.relaxed(samples, observation.variables)
    last = jnp.int32(self.steps - (self.simulation.softness is None))  # behind it, soft derivatives are the network's
    tiled = jnp.tile(samples, (self.copies, *[1] * (samples.ndim - 1)))
    objective, _ = self.losses(observation, tiled, targets, last)
    return self.added(objective, observation, samples[None], last, together=True)


# What holds the settings of a search, beside its terms.
PARTS = (Samples, Comparison, Simulation, Subsets)


def settings() -> dict[str, inspect.Parameter]:
  """Returns the settings of `gradient_matching` by name, in their order: of samples, terms, and all else."""
  samples, *others = [{one.name: (one.default, one.type) for one in dataclasses.fields(part)} for part in PARTS]
  terms = {name: (term.weight, _type(term)) for name, term in TERMS.items()}
  found = {**samples, **terms, **others[0], 'sharpness': (None, float | None), **others[1], **others[2]}
  keyword = inspect.Parameter.KEYWORD_ONLY
  return {name: inspect.Parameter(name, keyword, default=d, annotation=t) for name, (d, t) in found.items()}


def _type(term: Any) -> Any:
  weight = term.of if isinstance(term.of, type) else float
  return weight if term.weight is not None else weight | None


def composed(
  client: Client, optimizer: optax.GradientTransformation, num_steps: int, given: Mapping[str, Any]
) -> Matching:
  """Returns the `Matching` that settings compose, see `gradient_matching`; others have their defaults.

  Raises:
    UsageError: for an unknown setting or word, a value out of range, or a setting that has no effect.
  """
  known = settings()
  for name in given:
    errors.check_choice('setting of gradient_matching', name, known)
  changed = [name for name, value in given.items() if _changed(value, known[name].default)]
  subsets = _part(Subsets, given)
  return Matching(
    client, optax.with_extra_args_support(optimizer), num_steps, _part(Simulation, given), _part(Samples, given),
    _part(Comparison, given), summed(given, changed), None if subsets.subset is None else subsets,
    given.get('sharpness'),
  )  # fmt: skip


def _part(kind: Callable[..., P], given: Mapping[str, Any]) -> P:
  """Returns a member of `PARTS` with those of the settings that are its own."""
  names = [one.name for one in dataclasses.fields(kind)]  # type: ignore[arg-type]
  return kind(**{name: given[name] for name in names if name in given})


def _changed(value: Any, default: Any) -> bool:
  """Returns whether a value is known to differ from a default; of a traced one it is not known."""
  return not isinstance(value, jax.core.Tracer) and not (type(value) is type(default) and value == default)


def gradient_matching(client: Client, optimizer: optax.GradientTransformation, num_steps: int, **given: Any) -> Attack:
  """Returns the attack that minimises the sum of distance(simulated update, observed update) and terms of the samples.

  The attacker's knowledge of a defense is data in the observation. The simulated update is clipped to the known norm,
  and entries are compared by their weights. Where the noise is known, the search ends at the distance of the truth
  (Morozov's discrepancy principle), since a lower one fits the noise.

  Args:
    client: the `Client` that is simulated, with the defenses that the attacker knows, so usually `undefended()`.
    optimizer: an optax optimizer of the dummy samples, which is given `value=`.
    num_steps: number of evaluations.
    labels: the mode that the attack was published with; the observation's knowledge decides.
    sharpness: weight of the gradient's norm, see `Matching.flatter`; None for none.
    **given: further settings: the fields of `Samples`, `Comparison`, `Simulation` and `Subsets`, and the weight of each
      of `terms.TERMS`.

  Raises:
    UsageError: for an unknown setting or word, a value out of range, or a setting that has no effect.
  """
  targets = given.pop('labels', 'known')
  return composed(client, optimizer, num_steps, given).attack(targets)


gradient_matching.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
  [one for one in inspect.signature(gradient_matching).parameters.values() if one.kind is not one.VAR_KEYWORD]
  + [inspect.Parameter('labels', inspect.Parameter.KEYWORD_ONLY, default='known', annotation=str)]
  + list(settings().values())
)
