"""Gradient matching: dummy samples are optimised until the simulated client's update equals the observed one.

DLG (Zhu et al. 2019), iDLG (Zhao et al. 2020) and csDLG (Geiping et al. 2020) are this one algorithm with different
distances, priors, optimizers and starts; see `gradleak.attacks.presets`. Deltas of several local steps are matched the
same way, since the client simulation is the client's own code.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gradleak.attacks import ghost, image_priors, prefix_matching
from gradleak.attacks import labels as label_rules
from gradleak.attacks.base import Attack, Reconstruction
from gradleak.attacks.distances import LAYER_WEIGHTS, as_distance, clipped, compared, layer_weights, weighed
from gradleak.attacks.optimizers import ComparesValues
from gradleak.attacks.simulated import Simulation, joined, reverse
from gradleak.attacks.subsets import Subsets
from gradleak.core import errors, trees
from gradleak.core.trees import Tree
from gradleak.federated import Client
from gradleak.federated.losses import cross_entropy
from gradleak.models import model as models
from gradleak.priors import GENERATORS, Generator, as_generator
from gradleak.threat import Observation

# How the distance is computed: from the whole gradient, from products of its factors, or as is faster.
FORMS = ('auto', 'whole', 'ghost')
_LARGE = 2**20  # entries: a gradient that leaves a core's cache


def class_average(labels: jax.Array, class_means: jax.Array | None) -> jax.Array:
  """Returns the mean auxiliary image of each sample's class (Wu et al. 2024, table 4); labels are probabilities.

  Raises:
    UsageError: without auxiliary data.
  """
  if class_means is None:
    raise errors.UsageError(
      "the start 'class_average' needs auxiliary data: give public=(images, labels) to gradleak.scenario"
    )
  total = jnp.maximum(jnp.sum(labels, axis=1, keepdims=True), 1e-12)
  return jnp.einsum('nc,chwk->nhwk', labels / total, class_means)


# How far along its gradient the objective is looked at for its sharpness.
_NEAR = 1e-2

# Beside a generator's weights, at CI-Net's rate of 1e-3, labels and decoys move as beside pixels, at csdlg's of 0.1.
_PACE = 100.0

# Noise on a constant start of several images: equal ones with one label would stay equal in every step.
_APART = 1e-2


def start_images(
  start: Any,
  key: jax.Array,
  shape: tuple[int, ...],
  labels: jax.Array | None = None,
  class_means: jax.Array | None = None,
  apart: bool = False,
) -> jax.Array:
  """Returns the first dummy images.

  'normal' is N(0, 1), 'uniform' U(0, 1), 'constant' 0.5 (for several images, or those of one that are to be `apart`,
  plus N(0, 0.01²)), 'class_average' the mean image of each sample's class; or they are the array given.
  """
  deviation = jnp.float32(_APART if apart or shape[0] > 1 else 0.0)
  starts = {
    'normal': lambda: jax.random.normal(key, shape),
    'uniform': lambda: jax.random.uniform(key, shape),
    'constant': lambda: 0.5 + deviation * jax.random.normal(key, shape),
    'class_average': lambda: class_average(labels, class_means),
  }
  if isinstance(start, str):
    errors.check_choice('start', start, starts)
    return starts[start]()
  start = jnp.asarray(start, jnp.float32)
  if start.shape not in (shape, shape[1:]):
    raise errors.UsageError(f'the start image has shape {start.shape}, expected {shape} or {shape[1:]}')
  return jnp.broadcast_to(start.reshape((-1, *shape[1:])), shape)


def starting_labels(client: Client, observation: Observation) -> jax.Array:
  """Returns the labels that are given, or inferred where the attacker has to: probabilities [N, classes].

  Raises:
    UsageError: if the client sends nothing of the layer that labels are inferred from.
  """
  knowledge, given = observation.knowledge, observation.labels
  if knowledge.labels != 'inferred':
    return given
  layers = client.model.layers(observation.image_shape[1:]) if client.frozen and client.model.layers else ()
  if layers and layers[-1].name in client.frozen:
    raise errors.UsageError(
      f'labels are inferred from the gradient of the last layer, and {layers[-1].name} is frozen: no gradient of it is '
      "sent. Choose labels='optimised' or labels='known'"
    )
  return jax.nn.one_hot(label_rules.infer(knowledge.label_inference, client.model, observation), given.shape[1])


class MatchState(NamedTuple):
  """State of a matching attack.

  Attributes:
    count: steps done.
    dummy: {'images': [seeds, copies · N, H, W, C], without the first axis for one seed}; while labels are optimised,
      {'logits': [N, classes]}; with decoys, the same of them under 'decoys' and 'decoy_logits'; 'place', a scalar, of
      the surrogate model (`simulated.point`). With a generator, 'weights' in place of 'images': what is optimised of
      it, leaves [seeds, …].
    labels: the labels that are not optimised, probabilities [N, classes].
    optimizer: its state.
    best: (dummy, objective, distance) of the lowest objective so far.
    objective_start: the objective of the start.
    diverged_step: first step that was not finite, −1 before.
    thresholds: the least magnitude that is compared of each tensor, a tree of scalars; None for all entries.
    latents: what stays as it is of a generator, leaves [seeds, …]; None without one.
  """

  count: jax.Array
  dummy: dict
  labels: jax.Array
  optimizer: Any
  best: tuple
  objective_start: jax.Array
  diverged_step: jax.Array
  thresholds: Tree | None
  latents: Tree | None = None


class Priors(NamedTuple):
  """The weights of what is held for likely of images (`image_priors`); those that are None are not computed.

  Attributes:
    tv, l2, prior: as `gradient_matching` takes them.
    batch_norm, group, order: of `batch_statistics`, `disagreement` and `disorder`.
  """

  tv: float | jax.Array
  l2: float | jax.Array
  prior: float | jax.Array
  batch_norm: float | None
  group: float | None
  order: float | None


class Denoising(NamedTuple):
  """Regularisation by a denoiser D that was learned (Romano, Elad, Milanfar 2017), its noise annealed.

  Attributes:
    make: (weights, noisy images, standard deviations [N]) -> images.
    weight: of the root mean square of x − D(x + σε), whose slope is taken without D's own.
    first, last: σ at the first and at the last step; it falls geometrically.
    steps: their number.
  """

  make: Callable[..., jax.Array]
  weight: float | jax.Array
  first: float
  last: float
  steps: int

  def level(self, count: jax.Array) -> jax.Array:
    """Returns σ after `count` steps."""
    return self.first * (self.last / self.first) ** (count.astype(jnp.float32) / max(1, self.steps - 1))

  def term(self, learned: Tree, images: jax.Array, count: jax.Array) -> jax.Array:
    """Returns the regularisation of images [N, H, W, C] at a step; ε is drawn anew in each, the same for all trials."""
    level = self.level(count)
    noise = jax.random.normal(jax.random.fold_in(jax.random.key(0), count), images.shape)
    levels = jnp.broadcast_to(level, images.shape[:1])
    clean = jax.lax.stop_gradient(self.make(learned, images + level * noise, levels))
    return self.weight * trees.safe_sqrt(jnp.mean(jnp.square(images - clean)))


@dataclasses.dataclass(frozen=True)
class Matching:
  """Gradient matching of one client; the pure functions of an `Attack` are its methods.

  Attributes:
    client, distance, layer_weighting, box, start, decoys, tolerance, form, seeds, partial, sharpness: as
      `gradient_matching` takes them.
    generator: what makes the images; None where their pixels are optimised.
    denoising: the `Denoising`, or None.
    subsets: the `Subsets`, or None.
    optimizer: of the dummy samples, with support for extra arguments.
    simulation: what the update is taken for.
    priors: their weights.
  """

  client: Client
  optimizer: optax.GradientTransformationExtraArgs
  simulation: Simulation
  priors: Priors
  distance: str | Callable[[Tree, Tree], jax.Array]
  layer_weighting: str
  box: bool
  start: Any
  decoys: int
  tolerance: float | jax.Array
  form: str
  seeds: int
  partial: float | None
  sharpness: float | None
  generator: Generator | None = None
  denoising: Denoising | None = None
  subsets: Subsets | None = None

  def __post_init__(self) -> None:
    as_distance(self.distance)  # raises for an unknown name
    errors.check_choice('layer weighting', self.layer_weighting, LAYER_WEIGHTS)
    errors.check_choice('form', self.form, FORMS)
    numbers = {**self.priors._asdict(), 'tolerance': self.tolerance}
    for name, number in {**numbers, 'partial': self.partial, 'sharpness': self.sharpness}.items():
      if number is not None:
        errors.check_number(name, number, low=0, high=1 if name == 'partial' else math.inf, finite=True)
    errors.check_number('decoys', self.decoys, low=0, high=8, integer=True)
    errors.check_number('seeds', self.seeds, low=1, high=64, integer=True)
    if self.seeds > 1 and self.decoys:
      raise errors.UsageError(f'decoys={self.decoys} are samples of one start: leave seeds at 1')
    if self.generator is not None and not (isinstance(self.start, str) and self.start == 'normal'):
      raise errors.UsageError(
        f'start={errors.shown(self.start)} is of pixels, and a generator makes them: leave start at normal'
      )
    if self.subsets is not None and self.distance in ('prefix', 'dense_input'):
      raise errors.UsageError(f'distance={self.distance!r} is of one sample, which has no subsets: leave out subset')
    if self.client is not None:
      self.simulation.check(self.client)
      gradient = self.client.share == 'gradient' or self.simulation.takes_gradient()
      if self.subsets is not None and not (gradient and self.client.loss is cross_entropy):
        raise errors.UsageError(
          'subset is of a mean gradient of cross-entropy: not for the steps of local training, nor for other losses'
        )

  def losses(
    self,
    observation: Observation,
    images: jax.Array,
    labels: jax.Array,
    decoys: jax.Array | None = None,
    place: jax.Array | None = None,
  ) -> tuple[jax.Array, jax.Array]:
    """Returns (objective, distance) at images and labels (probabilities); the priors are on the images alone.

    Args:
      observation: the `Observation`.
      images: [copies · N, H, W, C], N for each epoch that has dummy samples of its own.
      labels: [N, classes], and behind them those of the decoys.
      decoys: further images that the client is simulated on, or None.
      place: of the surrogate model, or None.
    """
    copies = self.simulation.copies(self.client)
    labels = jnp.tile(labels, (copies, 1))
    observed = weighed(observation.update, observation)
    if self.distance == 'prefix':
      layers = models.require(self.client.model, 'layers')(observation.image_shape[1:])
      apart = prefix_matching.distance(self.client, layers, observation, images)
    else:
      everything = images if decoys is None else jnp.concatenate([images, decoys])
      apart = self.apart(observation, observed, everything, labels, place)
    priors = self.priors
    weight = priors.tv + priors.prior * as_distance(self.distance).unit(observed)
    objective = apart + weight * image_priors.total_variation(images) + priors.l2 * jnp.mean(jnp.square(images))
    if priors.batch_norm is not None:
      statistics = image_priors.batch_statistics(self.client.model.apply, observation.variables, images)
      objective += priors.batch_norm * statistics
    if priors.order is not None and copies > 1:
      objective += priors.order * image_priors.disorder(images.reshape(copies, -1, *images.shape[1:]))
    return objective, apart

  def apart(
    self,
    observation: Observation,
    observed: Tree,
    images: jax.Array,
    labels: jax.Array,
    place: jax.Array | None = None,
  ) -> jax.Array:
    """Returns the distance between what the client would send of these samples and what was observed, weighed."""
    image_shape, simulation = observation.image_shape[1:], self.simulation
    weights = layer_weights(self.client.model, observation.update, image_shape, self.layer_weighting)
    variables = simulation.model(observation, place)
    if self.by_products(observation, images, labels):
      towards = reverse(observed) if simulation.takes_gradient() else observed
      return ghost.cosine(ghost.products(self.client.gradient, towards, variables, images, labels, weights=weights))
    update = simulation.update(self.client, variables, images, labels)
    options = {}
    if self.distance == 'dense_input':
      options['layers'] = models.require(self.client.model, 'layers')(image_shape)
    between = as_distance(self.distance).between
    assert between is not None  # `losses` computes that of 'prefix'
    return between(weighed(clipped(update, observation), observation), observed, weights, **options)

  def by_products(self, observation: Observation, images: jax.Array, labels: jax.Array) -> bool:
    """Returns whether the distance is computed without the whole gradient, see `ghost`; shapes alone decide.

    Raises:
      UsageError: if form='ghost' is asked for and cannot be had.
    """
    directions = self.distance == 'cosine'  # to which a known clip makes no difference
    gradient = self.client.sends_gradient or self.simulation.takes_gradient()
    fits = directions and observation.weights is None and gradient
    if self.form == 'ghost' and not fits:
      raise errors.UsageError(
        "form='ghost' is for the cosine of plain gradients: not for other distances, weights of entries, deltas of "
        'local training and simulated defenses'
      )
    if self.form != 'auto' or not fits:
      return self.form == 'ghost'
    if isinstance(self.optimizer, ComparesValues):
      return False  # products leave no digits below 1e-7
    if sum(leaf.size for leaf in jax.tree.leaves(observation.variables['params'])) < _LARGE:
      return False  # without tracing the gradient
    return ghost.saved(self.client.gradient, observation.variables, images, labels) >= _LARGE

  def evaluate(self, dummy: dict, state: MatchState, observation: Observation) -> tuple[jax.Array, jax.Array]:
    """Returns (objective, distance) at dummy samples."""
    dummy, images, labels = self.samples(dummy, state, observation)
    if self.seeds == 1:
      objective, apart = self.losses(observation, images, labels, dummy.get('decoys'), dummy.get('place'))
      return objective + self.denoised(images, state.count, observation), apart
    objectives, apart = jax.vmap(lambda seed: self.losses(observation, seed, labels, None, dummy.get('place')))(images)
    agreement = 0.0 if self.priors.group is None else self.priors.group * image_priors.disagreement(images)
    implausible = self.denoised(images.reshape(-1, *images.shape[2:]), state.count, observation)
    return jnp.mean(objectives) + agreement + implausible, jnp.mean(apart)

  def searched(
    self, dummy: dict, state: MatchState, observation: Observation
  ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Returns (what the optimizer lowers: the objective and the term of a random subset; `evaluate`).

    What is kept and reported is judged without that term, whose subset changes.
    """
    objective, apart = self.evaluate(dummy, state, observation)
    if self.subsets is None:
      return objective, (objective, apart)
    dummy, images, labels = self.samples(dummy, state, observation)
    observed = weighed(observation.update, observation)

    def distance(weights: jax.Array) -> jax.Array:
      chosen = labels * weights.astype(labels.dtype).reshape(-1, 1)  # cross-entropy is linear in the label

      def of(seed: jax.Array) -> jax.Array:
        everything = jnp.concatenate([seed, dummy['decoys']]) if self.decoys else seed
        return self.apart(observation, observed, everything, chosen, dummy.get('place'))

      return of(images) if self.seeds == 1 else jnp.mean(jax.vmap(of)(images))

    return objective + self.subsets.term(distance, apart, state.count, labels.shape[0]), (objective, apart)

  def samples(self, dummy: dict, state: MatchState, observation: Observation) -> tuple[dict, jax.Array, jax.Array]:
    """Returns (the dummy samples at their pace, their images, the labels, those of decoys behind them)."""
    dummy = self.paced(dummy)
    labels = jax.nn.softmax(dummy['logits']) if 'logits' in dummy else state.labels
    images = self.images(dummy, state.latents, observation)
    if self.decoys:
      labels = jnp.concatenate([labels, jax.nn.softmax(dummy['decoy_logits'])])
    return dummy, images, labels

  def denoised(self, images: jax.Array, count: jax.Array, observation: Observation) -> jax.Array | float:
    """Returns the regularisation of images [N, H, W, C] by the denoiser at a step; 0 without one."""
    return 0.0 if self.denoising is None else self.denoising.term(observation.prepared, images, count)

  def paced(self, dummy: dict, pace: float = _PACE) -> dict:
    """Returns the dummy samples, those beside a generator's weights times `pace`."""
    if self.generator is None:
      return dummy
    return {name: leaf if name == 'weights' else pace * leaf for name, leaf in dummy.items()}

  def images(self, dummy: dict, latents: Tree | None, observation: Observation) -> jax.Array:
    """Returns the images of dummy samples, [seeds, copies · N, H, W, C], without the first axis for one seed."""
    if self.generator is None:
      return dummy['images']
    shape, learned, apply = self.shape(observation), observation.prepared, self.generator.apply
    if self.seeds == 1:
      return apply(dummy['weights'], latents, shape, learned)
    return jax.vmap(lambda weights, latents: apply(weights, latents, shape, learned))(dummy['weights'], latents)

  def shape(self, observation: Observation) -> tuple[int, ...]:
    """Returns the shape of the dummy images of one seed, [copies · N, H, W, C]."""
    count, *image = observation.image_shape
    return (self.simulation.copies(self.client) * count, *image)

  def init(self, key: jax.Array, observation: Observation) -> MatchState:
    """Returns the state before the first step."""
    image_key, label_key = jax.random.split(key)
    knowledge, given = observation.knowledge, starting_labels(self.client, observation)
    of_class = jnp.ones_like(given) if knowledge.labels == 'optimised' else given
    dummy, latents = self.start_samples(image_key, observation, of_class)
    if self.simulation.match == 'surrogate':
      dummy['place'] = jnp.zeros((), jnp.float32)
    if knowledge.labels == 'optimised':
      dummy['logits'] = jax.random.normal(label_key, given.shape)
    if self.decoys:
      keys = [jax.random.fold_in(key, 2), jax.random.fold_in(key, 3)]  # the other streams do not depend on decoys
      count, *image = self.shape(observation)
      dummy['decoys'] = jax.random.normal(keys[0], (self.decoys * count, *image))
      dummy['decoy_logits'] = jax.random.normal(keys[1], (self.decoys * given.shape[0], given.shape[1]))
    dummy = self.paced(dummy, 1 / _PACE)
    infinite = jnp.asarray(jnp.inf, jnp.float32)
    return MatchState(
      jnp.zeros((), jnp.int32),
      dummy,
      given,
      self.optimizer.init(dummy),
      (dummy, infinite, infinite),
      infinite,
      jnp.full((), -1, jnp.int32),
      self.thresholds(observation),
      latents,
    )

  def thresholds(self, observation: Observation) -> Tree | None:
    """Returns the magnitude of each tensor of the update above which the share `partial` of its entries lies."""
    if self.partial is None:
      return None
    share = self.partial
    return jax.tree.map(lambda x: jnp.quantile(jnp.abs(x), jnp.asarray(1 - share, x.dtype)), observation.update)

  def start_samples(self, key: jax.Array, observation: Observation, labels: jax.Array) -> tuple[dict, Tree | None]:
    """Returns (the first dummy images of each seed and epoch, or what makes them; the latents of a generator)."""
    shape, copies = self.shape(observation), self.simulation.copies(self.client)

    def start(key: jax.Array, apart: bool) -> tuple[dict, Tree | None]:
      if self.generator is not None:
        weights, latents = self.generator.init(key, shape, observation.prepared)
        return {'weights': weights}, latents
      every = jnp.tile(labels, (copies, 1))
      return {'images': start_images(self.start, key, shape, every, observation.class_means, apart)}, None

    if self.seeds == 1:
      return start(key, False)
    return jax.vmap(lambda key: start(key, True))(jax.random.split(key, self.seeds))

  def arrived(self, best: tuple, observation: Observation) -> jax.Array:
    """Returns whether the best distance is as low as the noise, or the tolerance, allows."""
    observed = weighed(observation.update, observation)
    floor = as_distance(self.distance).floor(observation.noise, trees.squared_norm(observed))
    near = self.tolerance * as_distance(self.distance).unit(observed)
    return ((observation.noise > 0) & (best[2] <= floor)) | ((self.tolerance > 0) & (best[2] <= near))

  def better(self, state: MatchState, objective: jax.Array, apart: jax.Array, observation: Observation) -> tuple:
    """Returns `best`, with the point of `state` considered; what has finished stays as it is."""
    improved = (objective < state.best[1]) & ~self.arrived(state.best, observation) & (state.diverged_step < 0)
    return jax.tree.map(functools.partial(jnp.where, improved), (state.dummy, objective, apart), state.best)

  def step(self, state: MatchState, observation: Observation) -> tuple[MatchState, dict[str, jax.Array]]:
    """Returns the state after one evaluation and update, and what is reported."""
    observation = compared(observation, state.thresholds)
    value_and_grad = jax.value_and_grad(self.searched, has_aux=True)
    (value, (objective, apart)), gradient = value_and_grad(state.dummy, state, observation)
    if self.sharpness is not None:
      gradient = self.flatter(gradient, state, observation)
    told = {} if self.subsets is None else {'changed': self.subsets.changed(state.count)}
    updates, optimizer_state = self.optimizer.update(gradient, state.optimizer, state.dummy, value=value, **told)
    dummy = optax.apply_updates(state.dummy, updates)
    if self.box and self.generator is None:
      dummy['images'] = jnp.clip(dummy['images'], 0.0, 1.0)  # concealed samples may leave the range of pixels
    first = state.count == 0
    # A line search may try a point that is not finite and come back; the start and the point it goes to must be finite.
    made = dummy['images' if self.generator is None else 'weights']
    known = functools.reduce(jnp.logical_and, [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(made)])
    finite = known & (jnp.isfinite(objective) | ~first)
    done = (state.diverged_step >= 0) | self.arrived(state.best, observation)  # its group may still be at work
    diverged = jnp.where(done | finite, state.diverged_step, state.count)
    state = MatchState(
      state.count + 1,
      dummy,
      state.labels,
      optimizer_state,
      self.better(state, objective, apart, observation),
      jnp.where(first, objective, state.objective_start),
      diverged,
      state.thresholds,
      state.latents,
    )
    ended = self.arrived(state.best, observation)
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
    observation = compared(observation, state.thresholds)
    dummy, objective, apart = self.better(state, *self.evaluate(state.dummy, state, observation), observation)
    dummy = self.paced(dummy)
    chosen = dummy.get('logits', state.labels)
    diverged = state.diverged_step >= 0
    lost = jnp.where(diverged, jnp.nan, 0.0)  # a diverged trial has no reconstruction
    images = self.chosen(dummy, state, observation)
    return Reconstruction(
      joined(images, self.simulation.copies(self.client)) + lost,
      jnp.argmax(chosen, axis=-1).astype(jnp.int32),
      objective + lost,
      jnp.where(diverged, jnp.inf, apart),
      state.objective_start,
      state.diverged_step,
    )

  def chosen(self, dummy: dict, state: MatchState, observation: Observation) -> jax.Array:
    """Returns the images of the seed with the smallest distance."""
    images = self.images(dummy, state.latents, observation)
    if self.seeds == 1:
      return images
    labels = jax.nn.softmax(dummy['logits']) if 'logits' in dummy else state.labels
    apart = jax.vmap(lambda seed: self.losses(observation, seed, labels, None, dummy.get('place'))[1])(images)
    return images[jnp.argmin(apart)]

  def objective(self, observation: Observation, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the objective at the private samples; NaN with decoys, as the client's own are not part of the truth.

    NaN, too, with a surrogate model: its best place is not known.
    """
    if self.decoys or self.simulation.match == 'surrogate':
      return jnp.full((), jnp.nan, jnp.float32)
    observation, copies = compared(observation, self.thresholds(observation)), self.simulation.copies(self.client)
    objective = self.losses(observation, jnp.tile(images, (copies, 1, 1, 1)), labels)[0]
    last = jnp.int32(0 if self.denoising is None else self.denoising.steps - 1)
    return objective + self.denoised(images, last, observation)


def gradient_matching(
  client: Client,
  optimizer: optax.GradientTransformation,
  num_steps: int,
  *,
  distance: str | Callable[[Tree, Tree], jax.Array] = 'squared_euclidean',
  layer_weighting: str = 'uniform',
  tv: float | jax.Array = 0.0,
  l2: float | jax.Array = 0.0,
  box: bool = False,
  start: Any = 'normal',
  decoys: int = 0,
  prior: float | jax.Array = 0.0,
  tolerance: float | jax.Array = 0.0,
  labels: str = 'known',
  form: str = 'auto',
  match: str = 'client',
  epochs: int = 0,
  batch_size: int = 0,
  rate: float | jax.Array = 1.0,
  orders: str = 'known',
  seeds: int = 1,
  batch_norm: float | None = None,
  group: float | None = None,
  order: float | None = None,
  partial: float | None = None,
  sharpness: float | None = None,
  generator: Generator | str | None = None,
  denoising: Denoising | None = None,
  subset: int | None = None,
  subset_weight: float | jax.Array = 1e-3,
  subset_growth: int = 0,
) -> Attack:
  """Returns the attack that minimises distance(simulated update, observed update) + tv·TV(x) + l2·mean(x²).

  What the attacker knows of a defense reaches it as data in the observation: the simulated update is clipped to the
  norm that is known, entries are compared by their weights, and where the noise is known the search ends at the
  distance that the truth would have (Morozov's discrepancy principle): a lower one fits the noise.

  Args:
    client: the `Client` that is simulated, with the defenses that the attacker knows, so usually `undefended()`.
    optimizer, num_steps: an optax optimizer of the dummy samples, which is given `value=`; number of evaluations.
    distance: 'squared_euclidean', 'cosine', or a function as `distances.as_distance` takes it; of one sample
      'dense_input' (the input of the first dense layer) or 'prefix' (that, and the layers before it).
    layer_weighting: 'uniform', 'linear' or 'early', see `layer_weights`.
    tv, l2: weights of the priors, which may be traced.
    box: project the images into [0, 1] after each step.
    start: 'normal', 'uniform', 'constant', 'class_average' or an array of images.
    decoys: dummy samples beside each of the N, with labels of their own, in the same batch and thrown away: for a
      client that conceals (`defenses.concealment`), whose eq. 10 is the mean loss over both, by linearity in the label.
    prior: as `tv`, in units of the distance between the observed update and none (1, or its squared norm).
    tolerance: the search also ends at this distance, in the same units; at 0 it uses all its steps.
    labels: the mode that the attack was published with; the observation's knowledge decides.
    form: 'whole' computes the simulated gradient, 'ghost' its products with itself and the observed one alone
      (`attacks.ghost`), for the cosine distance: equal up to rounding, which leaves no digits below 1e-7. 'auto' takes
      the second where it spares a million entries, unless the optimizer compares values, as L-BFGS does.
    match, epochs, batch_size, rate, orders: what the delta of local training is taken for, see `Simulation`.
    seeds: starts that are optimised together; the one with the smallest distance is kept.
    batch_norm, group, order: weights of priors on BatchNorm's statistics, the agreement of the seeds and epochs that
      hold the same samples (see `image_priors`); None for none.
    partial, sharpness: share of the largest entries of each tensor that are compared; weight of `Matching.flatter`.
    generator: makes the images in place of their pixels, see `gradleak.priors`; labels and decoys move 100-fold.
    denoising: regularisation by a learned denoiser; None for none.
    subset, subset_weight, subset_growth: random subsets of the batch, see `Subsets`; subset=None for none.

  Raises:
    UsageError: for an unknown word, or a value out of range.
  """
  errors.check_number('steps', num_steps, low=1, integer=True)
  matching = Matching(
    client, optax.with_extra_args_support(optimizer), Simulation(match, epochs, batch_size, rate, orders),
    Priors(tv, l2, prior, batch_norm, group, order), distance, layer_weighting, box, start, decoys, tolerance, form,
    seeds, partial, sharpness, as_generator(generator, GENERATORS), denoising,
    Subsets(subset, subset_weight, subset_growth).checked(),
  )  # fmt: skip
  return Attack(
    *(matching.init, matching.step, matching.reconstruct, matching.objective), num_steps, labels,
    isinstance(start, str) and start == 'class_average',
    assumes='' if client is None else matching.simulation.in_words(client),
  )  # fmt: skip
