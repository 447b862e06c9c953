"""Learning to Invert: a network learns from public images what upload an image causes, and reads it backwards.

Wu, Chen, Guo and Weinberger (UAI 2023). The attacker simulates the client on public images, its defense included where
it is known, and trains a network from uploads to images. Nothing in it is special to one defense: it is an adaptive
attacker of every defense there is, a user's own included.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gradleak.attacks import base
from gradleak.attacks.matching.simulation import Simulation
from gradleak.core import errors, trees
from gradleak.core.promotion import promoting
from gradleak.core.trees import Tree
from gradleak.engine.parts import in_parts, tell
from gradleak.federated import Client
from gradleak.federated.client import COSTLY
from gradleak.threat import Observation

_MEASURED = 256  # uploads from which the scales are taken
_TOGETHER = 32  # uploads that are computed in one pass


class Inverse(NamedTuple):
  """What was learned: from an upload of D entries to N images.

  Attributes:
    scales: of each tensor of the update, the root mean squared deviation of its entries from their means; a tree of
      scalars.
    signs: of a projection, int8 [D]: ±1; [0] where nothing is projected.
    mean: of the features, [F].
    layers: (kernel, bias) of each layer.
  """

  scales: Tree
  signs: jax.Array
  mean: jax.Array
  layers: list[tuple[jax.Array, jax.Array]]

  def images(self, update: Tree) -> jax.Array:
    """Returns the images that caused an update, [N · pixels] in (0, 1)."""
    return network(self.layers, self.read(update) - self.mean)

  def read(self, update: Tree) -> jax.Array:
    """Returns the features of an update, [F]."""
    return features(update, self.scales, self.signs, self.mean.shape[0])


def features(update: Tree, scales: Tree, signs: jax.Array, width: int) -> jax.Array:
  """Returns the entries of an update, each tensor divided by its scale; projected where there are more than `width`.

  The projection is a sketch: entry i is added to the feature i mod `width` with a random sign. It preserves inner
  products on average, up to the factor that keeps the features' variance; it needs one pass over the update, and no
  matrix.

  Args:
    update, scales: trees of the same structure.
    signs: int8 [D], or [0] for no projection.
    width: number of features.
  """
  entries = jnp.concatenate([x.reshape(-1) / s for x, s in zip(*map(jax.tree.leaves, (update, scales)), strict=True)])
  if not signs.size:
    return entries
  signed = jnp.pad(entries * signs.astype(entries.dtype), (0, -entries.size % width))
  return jnp.sum(signed.reshape(-1, width), axis=0) * math.sqrt(width / entries.size)


def network(layers: list[tuple[jax.Array, jax.Array]], x: jax.Array) -> jax.Array:
  """Returns the output in (0, 1) of dense layers with ReLUs between them, for one input."""
  *hidden, (last, offset) = layers
  for kernel, bias in hidden:
    x = jax.nn.relu(x @ kernel + bias)
  return jax.nn.sigmoid(x @ last + offset)


def unordered_error(found: jax.Array, images: jax.Array) -> jax.Array:
  """Returns the mean squared error of N images in the order in which it is least (Hungarian method, in JAX).

  Args:
    found, images: [N, pixels].
  """
  costs = jnp.mean(jnp.square(found[:, None] - images[None]), axis=-1)
  if len(images) == 1:
    return costs[0, 0]
  rows, columns = optax.assignment.hungarian_algorithm(jax.lax.stop_gradient(costs))
  return jnp.mean(costs[rows, columns])


@dataclasses.dataclass(frozen=True)
class Training:
  """How an `Inverse` is trained: the settings of `lti`, and the number of samples behind one upload."""

  hidden: int
  steps: int
  batch_size: int
  reuse: int | None
  projection: int
  learning_rate: float
  mirrored: bool
  number: int
  extra_gradients: int

  @property
  def once(self) -> bool:
    """Whether all uploads are drawn before the first step: those of a client whose defenses compute many gradients."""
    return self.reuse is None and self.extra_gradients >= COSTLY

  @property
  def fresh(self) -> int:
    """How many uploads are drawn anew at each step, in place of the oldest of the pool."""
    return 0 if self.once else max(1, self.batch_size // (self.reuse or 1))

  @property
  def pool(self) -> int:
    """How many uploads each step chooses from: as many as are drawn in `reuse` squared steps."""
    if self.once:
      return max(self.batch_size, COSTLY * self.steps * self.batch_size // (1 + self.extra_gradients))
    return self.fresh * (self.reuse or 1) ** 2

  @property
  def drawn(self) -> int:
    """How many uploads are drawn at a time before the first step."""
    return min(_TOGETHER, self.pool) if self.once else self.fresh

  @property
  def draws(self) -> int:
    """How many such draws fill the pool."""
    return -(-self.pool // self.drawn)

  @property
  def measured(self) -> int:
    """From how many uploads the scales are taken."""
    return _TOGETHER if self.once else _MEASURED

  def optimizer(self) -> optax.GradientTransformation:
    """Returns Adam, whose rate falls to a tenth after three quarters of the steps."""
    return promoting(optax.adam(optax.piecewise_constant_schedule(self.learning_rate, {3 * self.steps // 4: 0.1})))

  def samples(
    self, key: jax.Array, public: tuple[jax.Array, jax.Array], count: int
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns what `count` uploads are of: keys [count], images [count, number, H, W, C] and labels [count, number]."""
    chosen, noise = jax.random.split(key)
    drawn, flipped = jax.random.split(chosen)
    images, targets = public
    chosen = jax.random.randint(drawn, (count, self.number), 0, len(images))
    images, targets = images[chosen], targets[chosen]
    if self.mirrored:
      flip = jax.random.bernoulli(flipped, 0.5, (count, self.number, 1, 1, 1))
      images = jnp.where(flip, images[..., ::-1, :], images)
    return jax.random.split(noise, count), images, targets

  def renewed(self, pool: tuple, place: jax.Array, drawn: tuple) -> tuple:
    """Returns the pool of uploads with those that were drawn in place of others, from the place on."""
    return jax.tree.map(lambda x, new: jax.lax.dynamic_update_slice_in_dim(x, new, place, 0), pool, drawn)

  def start(self, key: jax.Array, inputs: int, image: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
    """Returns the layers before training: they show this image for any upload."""
    sizes = inputs, self.hidden, self.hidden, self.number * image.size
    layers = []
    for i, (fan_in, fan_out) in enumerate(itertools.pairwise(sizes)):
      scale = (0.1 if i == len(sizes) - 2 else math.sqrt(2)) / math.sqrt(fan_in)
      kernel = jax.random.normal(jax.random.fold_in(key, i), (fan_in, fan_out), jnp.float32) * scale
      layers.append((kernel, jnp.zeros(fan_out, jnp.float32)))
    inside = jnp.clip(image.reshape(-1), 0.01, 0.99)
    layers[-1] = layers[-1][0], jnp.tile(jnp.log(inside / (1 - inside)), self.number)
    return layers


def trained(
  training: Training, client: Client, key: jax.Array, variables: Tree, public: tuple[jax.Array, jax.Array]
) -> Inverse:
  """Returns the `Inverse` of a client, trained on what it would upload of public samples.

  Args:
    training: how.
    client: the `Client`; each of its uploads draws its dropout and its defense anew.
    key: PRNG key.
    variables: those that the client was sent.
    public: (samples, targets).
  """
  given = training, client, _Given([jax.random.fold_in(key, i) for i in range(5)], variables, public)
  state = jax.block_until_ready(_started(*given))
  tell(training.measured, training.measured, 'measured uploads')
  state = in_parts(functools.partial(_filled, *given), state, training.draws, 'draws of uploads')
  return in_parts(functools.partial(_advanced, *given), state, training.steps).inverse


class _Given(NamedTuple):
  """Keys (of the scales, the signs, the layers, the steps and the first uploads), variables, and public samples."""

  keys: list[jax.Array]
  variables: Tree
  public: tuple[jax.Array, jax.Array]


class _State(NamedTuple):
  """The training between two steps: the `Inverse` so far, the optimizer's state, and the uploads to choose from."""

  inverse: Inverse
  moments: Tree
  pool: tuple[jax.Array, jax.Array]


def _simulated(
  client: Client, variables: Tree, read: Callable[[Tree], Any], keys: jax.Array, images: jax.Array, targets: jax.Array
) -> tuple[Any, jax.Array]:
  """Returns what `read` makes of the updates that samples cause, and the images [count, number, pixels]."""

  def one(given: tuple) -> Any:
    return read(client.local_update(given[0], variables, *given[1:]).update)

  found = jax.lax.map(one, (keys, images, targets), batch_size=min(_TOGETHER, len(keys)))
  return found, images.reshape(*images.shape[:2], -1)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _started(training: Training, client: Client, given: _Given) -> _State:
  """Returns the state before the first step."""
  keys, variables, public = given

  def updates(key: jax.Array) -> Tree:
    samples = training.samples(key, public, _TOGETHER)
    return _simulated(client, variables, lambda update: update, *samples)[0]

  mean, scales = _moments(updates, keys[0], variables['params'], training.measured)
  entries = sum(x.size for x in jax.tree.leaves(mean))
  width = min(entries, training.projection)
  signs = jax.random.rademacher(keys[1], (entries if entries > width else 0,), jnp.int8)
  image = jnp.mean(public[0], axis=0)
  inverse = Inverse(scales, signs, features(mean, scales, signs, width), training.start(keys[2], width, image))
  pool = jnp.zeros((training.pool, width)), jnp.zeros((training.pool, training.number, image.size))
  return _State(inverse, training.optimizer().init(inverse.layers), pool)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _filled(
  training: Training, client: Client, given: _Given, state: _State, first: jax.Array, last: jax.Array
) -> _State:
  """Returns the state with the draws first, …, last - 1 of the uploads from which the first step chooses."""
  (*_, key), variables, public = given
  keys, size = jax.random.split(key, training.draws), training.drawn
  whole = training.samples(key, public, training.pool) if training.once else None

  def samples(number: jax.Array) -> tuple:
    if whole is None:
      return training.samples(keys[number], public, size)
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, number * size, size), whole)

  def renewed(number: jax.Array, pool: tuple) -> tuple:
    drawn = _simulated(client, variables, state.inverse.read, *samples(number))
    return training.renewed(pool, number * size, drawn)

  return state._replace(pool=jax.lax.fori_loop(first, last, renewed, state.pool))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _advanced(
  training: Training, client: Client, given: _Given, state: _State, first: jax.Array, last: jax.Array
) -> _State:
  """Returns the state after the steps first, …, last - 1."""
  keys, variables, public = given
  steps, optimizer, inverse = jax.random.split(keys[3], training.steps), training.optimizer(), state.inverse

  def loss(layers: list, seen: jax.Array, images: jax.Array) -> jax.Array:
    found = jax.vmap(lambda x: network(layers, x - inverse.mean))(seen).reshape(images.shape)
    return jnp.mean(jax.vmap(unordered_error)(found, images))

  def step(number: jax.Array, carry: tuple) -> tuple:
    layers, moments, pool = carry
    if not training.once:
      samples = training.samples(jax.random.fold_in(steps[number], 0), public, training.fresh)
      drawn = _simulated(client, variables, inverse.read, *samples)
      pool = training.renewed(pool, number * training.fresh % training.pool, drawn)
    chosen = jax.random.permutation(jax.random.fold_in(steps[number], 1), training.pool)[: training.batch_size]
    batch = jax.tree.map(lambda x: x[chosen], pool)
    updates, moments = optimizer.update(jax.grad(loss)(layers, *batch), moments)
    return optax.apply_updates(layers, updates), moments, pool

  layers, moments, pool = jax.lax.fori_loop(first, last, step, (inverse.layers, state.moments, state.pool))
  return _State(inverse._replace(layers=layers), moments, pool)


def _moments(updates: Callable[[jax.Array], Tree], key: jax.Array, params: Tree, count: int) -> tuple[Tree, Tree]:
  """Returns the mean of `count` updates, and `Inverse.scales`; 1 for a tensor that never changes.

  Groups of updates are merged as Chan, Golub and LeVeque 1979 do: a mean may be large beside the deviation.
  """

  def add(total: tuple[Tree, Tree], step: tuple[jax.Array, jax.Array]) -> tuple[tuple[Tree, Tree], None]:
    seen, key = step
    found, share = updates(key), _TOGETHER / (seen + _TOGETHER)
    here = jax.tree.map(lambda u: u[0] + jnp.mean(u - u[:1], axis=0), found)  # exact where nothing changes
    apart = jax.tree.map(jnp.subtract, here, total[0])
    spread = jax.tree.map(
      lambda s, u, h, a: s + jnp.sum(jnp.square(u - h[jnp.newaxis]), axis=0) + seen * share * jnp.square(a),
      total[1], found, here, apart,
    )  # fmt: skip
    return (jax.tree.map(lambda m, a: m + share * a, total[0], apart), spread), None

  groups = count // _TOGETHER
  seen = _TOGETHER * jnp.arange(groups, dtype=jnp.float32)
  zeros = trees.zeros_like(params)
  (mean, spread), _ = jax.lax.scan(add, (zeros, zeros), (seen, jax.random.split(key, groups)))

  def scale(spread: jax.Array) -> jax.Array:
    variance = jnp.mean(spread) / count
    return jnp.where(variance > 0, jnp.sqrt(variance), 1.0)

  return mean, jax.tree.map(scale, spread)


def _learned(key: jax.Array, scenario: Any, settings: Mapping[str, Any], batch_size: int) -> Inverse:
  """Returns the `Inverse` of the scenario's client, trained on its public images."""
  training = Training(**settings, number=batch_size, extra_gradients=scenario.client.extra_gradients)
  return trained(training, scenario.client, key, scenario.variables, tuple(map(jnp.asarray, scenario.public)))


@base.attack(
  citation='Wu, Chen, Guo, Weinberger: Learning to Invert: Simple Adaptive Attacks for Gradient Inversion in Federated '
  'Learning. UAI 2023.',
  prepare=_learned,
  adaptive=True,
)
def lti(
  client: Client,
  *,
  hidden: int = 512,
  steps: int = 2000,
  batch_size: int = 128,
  reuse: int | None = None,
  projection: int = 16384,
  learning_rate: float | int = 1e-3,
  mirrored: bool = False,
) -> base.Attack:
  r"""Learning to Invert: a dense network of three layers, from the upload to the images, is trained on public images.

  Before it sees an upload, it is trained by Adam, whose rate falls to a tenth after three quarters of the steps. Each
  step simulates the client on new draws of public images, and of the defense where that is known; dropped entries are
  zeros. Each tensor of the update is divided by its spread over such uploads (ours: the paper does not scale). Images
  of a batch are compared in the order that fits best. The published settings are `hidden=3000` (`10000` for batches of
  four), `batch_size=256`, `learning_rate=1e-4` and `steps=39000`, which is 200 epochs of 50,000 public images. The
  attack itself is one pass through the network, and returns no labels.

  Formula:
    \min_\varphi \; \mathbb{E}_x \min_\pi \lVert h_\varphi(u(x)) - \pi(x) \rVert^2, \quad \hat{x} = h_\varphi(g)

    u(x) \text{ the upload that } x \text{ causes}, \; \pi \text{ an order of the batch}

  Args:
    client: the `Client` that is attacked.
    hidden: units of each of the two hidden layers.
    steps: of the training.
    batch_size: simulated uploads per step.
    reuse: in how many steps each of them is used on average: 1 draws all anew at each step, as published; more for
      clients or defenses that take long, at the price of fitting the noise that was drawn. None is 1, but for a defense
      that computes ten or more gradients of each sample: as many uploads as take ten times the gradients of an
      undefended client are then drawn once, before the first step.
    projection: entries of an update beyond which it is projected at random to as many, see `features`.
    learning_rate: of Adam.
    mirrored: whether half of the public images are mirrored, for pictures without a left and a right.

  Raises:
    UsageError: for a setting out of range; when run, for a scenario without public images.
  """
  if client is not None:
    errors.check_image_batch('the attack lti', ('N', *client.modality.axis_names))
  for name, value in (('hidden', hidden), ('steps', steps), ('batch_size', batch_size), ('reuse', reuse)):
    if value is not None or name != 'reuse':
      errors.check_number(f'lti({name})', value, low=1, integer=True)
  errors.check_number('lti(projection)', projection, low=1, integer=True)
  errors.check_number('lti(learning_rate)', learning_rate, low=1e-12, finite=True)

  def read(observation: Observation) -> tuple[jax.Array, None]:
    inverse: Any = observation.prepared
    return inverse.images(observation.update), None

  assumes = '' if client is None else Simulation().in_words(client)
  return base.closed_form(read, auxiliary_data=True)._replace(assumes=assumes)
