"""What a search optimises: pixels or what a generator makes them of, decoys, and labels that are not known."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gradleak.attacks import labels as label_rules
from gradleak.attacks.base import unsent
from gradleak.core import errors
from gradleak.core.trees import Tree
from gradleak.federated import Client
from gradleak.federated.targets import CLASSES
from gradleak.modalities import PLAIN, Relaxation
from gradleak.priors import GENERATORS, Generator, as_generator
from gradleak.threat import Observation

# Beside a generator's weights, at CI-Net's rate of 1e-3, labels and decoys move as beside pixels, at csdlg's of 0.1.
_PACE = 100.0

# Noise on equal starts of several samples: those with one label would stay equal in every step.
_APART = 1e-2


def class_average(targets: jax.Array, class_means: jax.Array | None) -> jax.Array:
  """Returns the mean auxiliary sample of each sample's class (Wu et al. 2024, table 4); labels are probabilities.

  Raises:
    UsageError: for labels that are not [N, classes], or without auxiliary data.
  """
  if targets.ndim != 2:
    raise errors.UsageError("the start 'class_average' is for samples of one class each, not for labels of positions")
  if class_means is None:
    raise errors.UsageError(
      "the start 'class_average' needs auxiliary data of each class: give gradleak.scenario public=(samples, targets)"
    )
  total = jnp.maximum(jnp.sum(targets, axis=1, keepdims=True), 1e-12)
  return jnp.einsum('nc,c...->n...', targets / total, class_means)


def start_images(
  start: Any,
  key: jax.Array,
  shape: tuple[int, ...],
  targets: jax.Array | None = None,
  class_means: jax.Array | None = None,
  apart: bool = False,
) -> jax.Array:
  """Returns the first dummy samples.

  'normal' is `N(0, 1)`, 'uniform' is `U(0, 1)`, 'constant' is 0.5, and 'class_average' is the mean sample of each
  sample's class. Starts that equal another one, and copies of one that are to be `apart`, have `N(0, 0.01²)` added.
  """
  drawn = {'normal': jax.random.normal, 'uniform': jax.random.uniform}
  made = {
    'constant': lambda: jnp.full(shape, 0.5),
    'class_average': lambda: class_average(targets, class_means),
  }
  if isinstance(start, str):
    errors.check_choice('start', start, [*drawn, *made])
    if start in drawn:
      return drawn[start](key, shape)
    start = made[start]()
  start = jnp.asarray(start, jnp.float32)
  if start.shape not in (shape, shape[1:]):
    raise errors.UsageError(f'the start has shape {start.shape}, expected {shape} or {shape[1:]}')
  start = jnp.broadcast_to(start.reshape((-1, *shape[1:])), shape)
  rows = start.reshape(len(start), -1)
  equal = jax.lax.map(lambda row: jnp.sum(jnp.all(rows == row[None], axis=1)) > 1, rows) | apart
  noise = jnp.float32(_APART) * jax.random.normal(key, shape)
  return jnp.where(equal.reshape(-1, *[1] * (len(shape) - 1)), start + noise, start)


def starting_labels(client: Client, observation: Observation) -> jax.Array:
  """Returns the labels that are given, or inferred where the attacker has to: probabilities [N, classes].

  Where the update shows nothing of them, all classes are as likely.

  Raises:
    UsageError: if the client sends nothing of the layer that labels are inferred from, or for a loss that the rule does
      not apply to.
  """
  knowledge, given = observation.knowledge, observation.targets
  if knowledge.labels != 'inferred':
    return given
  label_rules.check(knowledge.label_inference, client)
  shape = observation.batch_shape[1:]
  kept = unsent(client, observation)
  layers = client.model.layers(shape) if kept and client.model.layers else ()
  if layers and not kept.isdisjoint(layers[-1].paths):
    raise errors.UsageError(
      f'labels are inferred from the gradient of the last layer, and {layers[-1].name} is not shared: no gradient of '
      "it is sent. Choose labels='optimised' or labels='known'"
    )
  found = label_rules.infer(knowledge.label_inference, client.model, observation, drawn=client.modality.drawn)
  return jnp.where(found[:, None] < 0, 1 / given.shape[1], jax.nn.one_hot(found, given.shape[1]))


class Variables(NamedTuple):
  """What is optimised of the samples, and how they are made of it.

  Attributes:
    name: its key among the dummy samples.
    pace: how many times faster labels and decoys move beside it.
    init: (key, shape of the samples, labels [copies · N, classes], `Observation`, whether samples of one seed are to be
      apart from those of others) -> (what is optimised, what stays as it is).
    apply: (what is optimised, what stays as it is, shape, what was learned) -> samples, as of a `Generator`.
    project: (what is optimised after a step, `Modality.settle`) -> the nearest that is allowed.
    count: shape of what is moved in place of the samples -> how many numbers are optimised.
  """

  name: str
  pace: float
  init: Callable[..., tuple[Tree, Tree | None]]
  apply: Callable[..., jax.Array]
  project: Callable[[Tree, Callable], Tree]
  count: Callable[[tuple[int, ...]], int] = math.prod


def _pixels(start: Any, box: bool) -> Variables:
  """Returns the identity: samples from a start, in their range if boxed."""

  def init(key, shape, targets, observation, apart):
    return start_images(start, key, shape, targets, observation.class_means, apart), None

  def project(images, settle):
    return settle(images) if box else images

  return Variables('images', 1.0, init, lambda images, kept, shape, learned: images, project)


def _generated(generator: Generator) -> Variables:
  """Returns what a generator is made of; it starts as it is made, and stays in its range by itself."""

  def init(key, shape, targets, observation, apart):
    return generator.init(key, shape, observation.prepared)

  def count(shape):
    known = jax.random.key(0), generator.learned(shape)
    made, _ = jax.eval_shape(lambda key, learned: generator.init(key, shape, learned), *known)
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(made))

  return Variables('weights', _PACE, init, generator.apply, lambda weights, settle: weights, count)


@dataclasses.dataclass(frozen=True)
class Samples:
  """The parametrisation of the dummy samples, a dict.

  Its key 'images' holds [seeds, copies · N, …], without the first axis for one seed. While labels are optimised,
  'logits' holds [N, classes]. Decoys have 'decoys' and 'decoy_logits'. A generator has 'weights' in
  place of 'images', leaves [seeds, …].

  Attributes:
    start: 'normal', 'uniform', 'constant', 'class_average' or an array of samples.
    box: project the samples into [0, 1] after each step.
    decoys: dummy samples beside each of the N, with labels of their own, in the same batch and thrown away: for a
      client that conceals (`defenses.concealment`), whose eq. 10 is the mean loss over both, by linearity in the label.
    seeds: starts that are optimised together; the one with the smallest distance is kept.
    generator: makes the samples in place of their pixels, see `gradleak.priors`; labels and decoys move 100-fold.
    relaxation: what is moved of samples that are whole numbers, see `Modality.relaxations`; '' for the usual one.
  """

  start: Any = 'normal'
  box: bool = False
  decoys: int = 0
  seeds: int = 1
  generator: Generator | str | None = None
  relaxation: str = ''

  def __post_init__(self) -> None:
    errors.check_number('decoys', self.decoys, low=0, high=8, integer=True)
    errors.check_number('seeds', self.seeds, low=1, high=64, integer=True)
    if self.seeds > 1 and self.decoys:
      raise errors.UsageError(f'decoys={self.decoys} are samples of one start: leave seeds at 1')
    made = as_generator(self.generator, GENERATORS) is not None
    if made and not (isinstance(self.start, str) and self.start == 'normal'):
      raise errors.UsageError(
        f'start={errors.shown(self.start)} is of pixels, and a generator makes them: leave start at normal'
      )

  @functools.cached_property
  def variables(self) -> Variables:
    """What is optimised of the samples: pixels are the identity."""
    generator = as_generator(self.generator, GENERATORS)
    return _pixels(self.start, self.box) if generator is None else _generated(generator)

  @property
  def auxiliary(self) -> bool:
    """Whether the start needs auxiliary data."""
    return isinstance(self.start, str) and self.start == 'class_average'

  def each(self, function: Callable, *given: Any) -> Any:
    """Returns the function of each seed's part, leaves [seeds, …]; of one seed without this axis."""
    return function(*given) if self.seeds == 1 else jax.vmap(function)(*given)

  def check(self, client: Client) -> Relaxation:
    """Returns what is moved of a client's samples; raises `UsageError` for settings that only pixels have."""
    kind = client.modality
    form = kind.relaxation(self.relaxation, client.model)
    usual = {
      'decoys': not self.decoys,
      'generator': self.generator is None,
      'start': isinstance(self.start, str) and self.start == 'normal',
    }
    for name, left_out in usual.items():
      if form is not PLAIN and not left_out:
        raise errors.UsageError(f'{name} is not defined on {kind.noun[1]}: leave it out')
    return form

  def initial(
    self, key: jax.Array, observation: Observation, targets: jax.Array, copies: int, form: Relaxation = PLAIN
  ) -> tuple[Tree, Tree | None]:
    """Returns the first dummy samples of each seed and epoch, or what makes them, and what stays as it is of that.

    Args:
      key: PRNG key.
      observation: the `Observation`.
      targets: probabilities [N, classes].
      copies: dummy samples of each private one.
      form: what is moved of a sample.
    """
    every = jnp.tile(targets, (copies, *[1] * (targets.ndim - 1)))
    shape = form.shape(self.shape(observation, copies), observation.variables)
    keys = key if self.seeds == 1 else jax.random.split(key, self.seeds)
    made, kept = self.each(lambda key: self.variables.init(key, shape, every, observation, self.seeds > 1), keys)
    if form is not PLAIN:
      scale = form.scale(observation.variables)
      made = jax.tree.map(lambda leaf: leaf * jnp.asarray(scale, leaf.dtype), made)
    return made, kept

  def hidden(self, key: jax.Array, label_key: jax.Array, observation: Observation, copies: int) -> dict[str, jax.Array]:
    """Returns the first logits of labels that are optimised, and the first decoys; streams apart from the images'."""
    count, *outputs = observation.targets.shape
    found = {}
    if observation.knowledge.labels == 'optimised':
      found['logits'] = jax.random.normal(label_key, (count, *outputs))
    if self.decoys:
      keys = [jax.random.fold_in(key, 2), jax.random.fold_in(key, 3)]
      number, *image = self.shape(observation, copies)
      found['decoys'] = jax.random.normal(keys[0], (self.decoys * number, *image))
      found['decoy_logits'] = jax.random.normal(keys[1], (self.decoys * count, *outputs))
    return found

  def paced(self, dummy: dict, towards: int = 1) -> dict:
    """Returns the dummy samples at the pace of `Variables`; with −1, as they are optimised."""
    pace = self.variables.pace**towards
    return {name: leaf if name == self.variables.name else pace * leaf for name, leaf in dummy.items()}

  def of(
    self, dummy: dict, kept: Tree | None, observation: Observation, copies: int, form: Relaxation = PLAIN
  ) -> jax.Array:
    """Returns the dummy samples, [seeds, copies · N, …], without the first axis for one seed.

    Where something else is moved, these are what the model takes.
    """
    shape, learned = self.shape(observation, copies), observation.prepared
    apply = self.variables.apply
    return self.each(lambda made, kept: form.apply(apply(made, kept, shape, learned)), dummy[self.variables.name], kept)

  def shape(self, observation: Observation, copies: int) -> tuple[int, ...]:
    """Returns the shape of the dummy samples of one seed, [copies · N, …]."""
    count, *image = observation.batch_shape
    return (copies * count, *image)


def classes_of(client: Client, targets: jax.Array) -> jax.Array:
  """Returns the classes of labels in the shape of the outputs, int32 [N]; [0] where targets are no class each.

  Where all classes are as likely, a label is −1: unknown.
  """
  if client.loss.targets is not CLASSES or targets.ndim != 2:
    return jnp.zeros(0, jnp.int32)
  alike = (targets[:, 0] > 0) & jnp.all(targets == targets[:, :1], axis=-1) & (targets.shape[1] > 1)
  return jnp.where(alike, -1, jnp.argmax(targets, axis=-1)).astype(jnp.int32)


def labels_of(dummy: dict, given: jax.Array, relax: Callable[[jax.Array], jax.Array]) -> jax.Array:
  """Returns the labels of dummy samples at their pace: those given, unless optimised.

  Args:
    dummy: the samples.
    given: labels, floats in the shape of the outputs.
    relax: what makes labels of free variables, see `federated.targets.Targets`.
  """
  return relax(dummy['logits']) if 'logits' in dummy else given
