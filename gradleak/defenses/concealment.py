"""DCS²: concealed samples, whose gradients are those of the sensitive samples and whose looks are not.

Wu, Hayat, Zhou, Harandi: Concealing Sensitive Samples against Gradient Leakage in Federated Learning, AAAI 2024. Each
sensitive sample x_s gets a concealed one x̃ (eq. 9); what is sent is the gradient of both (eq. 10), turned where it
would oppose the gradient of the batch alone (eq. 11 and 12).
"""

import functools
import zlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradleak import errors, trees
from gradleak.defenses import base
from gradleak.models.model import per_example_loss
from gradleak.strictness import lenient

STARTS = ('noise', 'proxy')
MIXUP = 0.7  # the start's share of x_0 against x_s (table 5)


class View(NamedTuple):
  """What eq. 9 compares of a sample.

  Attributes:
    image: x, float32 [H, W, C].
    logits: f_θ(x), float32 [classes].
    gradient: ∇_θ L(f_θ(x), y), a tree shaped like the parameters.
  """

  image: jax.Array
  logits: jax.Array
  gradient: dict


class ConcealmentState(NamedTuple):
  """What the last update's concealed samples came to, means over its sensitive samples; zeros before.

  Attributes:
    dissimilarity: ‖x̃ − x_s‖₂, a float32 scalar; pixels are in [0, 1].
    cosine: the cosine between the gradients of the concealed and the sensitive sample, a float32 scalar.
  """

  dissimilarity: jax.Array
  cosine: jax.Array


def view(client, variables, image, label):
  """Returns the `View` of one sample, alone: under batch statistics, a BatchNorm sees the sample's own."""

  def loss(params):
    given = {**variables, 'params': params}, jnp.expand_dims(image, 0)
    train = client.batch_norm == 'train'
    losses, _ = per_example_loss(client.model, client.loss, *given, jnp.expand_dims(label, 0), train)
    logits, _ = client.model.apply(*given, train, None)  # the compiler sees that this is the same pass
    return jnp.sum(losses), logits[0]

  gradient, logits = jax.grad(loss, has_aux=True)(variables['params'])
  return View(image, logits, gradient)


def objective(concealed, sensitive, *, dissimilarity, latent, tolerance):
  """Returns eq. 9 for two `View`s, a float32 scalar: 1 − cos + exp(−λ_x‖x̃ − x_s‖) + λ_z·(relative distance of logits).

  Its ε is an additive constant and left out. `tolerance` makes the last term a hinge, as eq. 8's constraint has it: the
  relative distance counts from there on.
  """
  scale = trees.norm(sensitive.logits)
  distance = trees.norm(concealed.logits - sensitive.logits) / jnp.where(scale > 0, scale, jnp.ones_like(scale))
  return (
    1
    - trees.cosine(concealed.gradient, sensitive.gradient)
    + jnp.exp(-dissimilarity * trees.norm(concealed.image - sensitive.image))
    + latent * jnp.maximum(distance - tolerance, 0)
  )


def start_point(key, image, num_classes, public, *, start, mixup):
  """Returns (x_0, y_0), an image and label probabilities [classes], for the sensitive `image` (table 5)."""
  which, pixels = jax.random.split(key)
  if start == 'proxy':
    images, labels = (jnp.asarray(part) for part in public)
    chosen = jax.random.randint(which, (), 0, images.shape[0], jnp.int32)
    x, y = images[chosen].astype(jnp.float32), labels[chosen]
  else:
    x, y = jax.random.normal(pixels, image.shape), jax.random.randint(which, (), 0, num_classes, jnp.int32)
  if mixup:
    x = MIXUP * x + (1 - MIXUP) * image
  return x, jax.nn.one_hot(y, num_classes, dtype=jnp.float32)


# Compiled: outside of jit, the loop would compile anew at each call.
@functools.partial(jax.jit, static_argnames=('client', 'steps', 'start', 'mixup', 'box'))
def concealed_samples(
  client,
  variables,
  key,
  images,
  labels,
  public=None,
  *,
  dissimilarity=0.01,
  latent=0.01,
  tolerance=0.0,
  learning_rate=0.1,
  steps=1000,
  start='noise',
  mixup=False,
  box=False,
):
  """Returns a concealed sample for each sensitive one: Adam on eq. 9, algorithm 1's line 3.

  Every sample is by itself, the i-th with `fold_in(key, i)`: its gradient is matched, not the batch's. The loop can be
  differentiated.

  Args:
    client: the `Client` whose model, loss and BatchNorm mode are used; dropout is off.
    variables: the model's.
    key: draws the start points.
    images: the sensitive ones, float32 [N, H, W, C] in [0, 1].
    labels: theirs, probabilities [N, classes].
    public: (images, labels) for `start='proxy'`.
    dissimilarity, latent, tolerance, learning_rate, steps, start, mixup, box: as in `concealment`.

  Returns:
    (images, labels as probabilities) in the shapes of the sensitive ones.
  """
  weights = {'dissimilarity': dissimilarity, 'latent': latent, 'tolerance': tolerance}
  weights = {name: jnp.asarray(weight, jnp.float32) for name, weight in weights.items()}
  adam = lenient(optax.scale_by_adam())
  # Geiping et al.'s schedule, as in the published code: × 0.1 at 3/8, 5/8 and 7/8 of the steps.
  decay = 0.1 ** np.searchsorted([3 / 8, 5 / 8, 7 / 8], np.arange(steps) / steps, side='right')
  rates = jnp.asarray(learning_rate, jnp.float32) * jnp.asarray(decay, jnp.float32)

  def conceal(key, image, label):
    sensitive = view(client, variables, image, label)
    x, y = start_point(key, image, label.shape[-1], public, start=start, mixup=mixup)
    gradient = jax.grad(lambda x: objective(view(client, variables, x, y), sensitive, **weights))

    @jax.checkpoint  # who differentiates through the loop keeps the images of its steps, not the networks
    def step(carry, rate):
      x, moments = carry
      move, moments = adam.update(gradient(x), moments, x)
      x = x - rate * move
      return (jnp.clip(x, 0, 1) if box else x, moments), None

    (x, _), _ = jax.lax.scan(step, (x, adam.init(x)), rates)
    return x, y

  return jax.vmap(conceal)(_keys(key, images.shape[0]), images, labels)


@functools.partial(jax.jit, static_argnames='client')
def mixed_gradient(client, variables, batch, concealed, weights, mixing):
  """Returns g_c, a tree shaped like the parameters: the gradient of the batch with the concealed samples (eq. 10).

  It is ∇ Σ_i w_i ℓ_i / Σ_i w_i. For the sensitive samples, the first ones of the batch, ℓ_i is the mean of L(x_i, y_i)
  and λ_g L(x̃_i, ỹ_i) + (1 − λ_g) L(x̃_i, y_i); for the others it is L(x_i, y_i). So a batch without concealed samples
  keeps its gradient, and one with them its scale, where the sum of eq. 10 would double it. All stand in one forward
  pass, {x_s} ∪ {x̃}: batch statistics are those of both.

  Args:
    client: as in `concealed_samples`.
    variables: the model's.
    batch: (images, labels as probabilities), N samples.
    concealed: the same of the K ≤ N concealed samples.
    weights: float32 [N], 0 for padding.
    mixing: λ_g, a scalar.
  """
  (images, labels), (dummies, dummy_labels) = batch, concealed
  num_samples, count = images.shape[0], dummies.shape[0]
  mixing = jnp.asarray(mixing, jnp.float32)

  def mean_loss(params):
    union = jnp.concatenate([images, dummies])

    def losses_of(given):
      labels_of_all = jnp.concatenate([labels, given])
      train = client.batch_norm == 'train'
      return per_example_loss(client.model, client.loss, {**variables, 'params': params}, union, labels_of_all, train)[
        0
      ]

    # One pass over the union, as the compiler sees: the losses differ in the labels of the dummies alone.
    under_own, under_true = losses_of(dummy_labels), losses_of(labels[:count])
    losses = under_own[:num_samples]
    mixture = mixing * under_own[num_samples:] + (1 - mixing) * under_true[num_samples:]
    losses = jnp.concatenate([(losses[:count] + mixture) / 2, losses[count:]])
    return jnp.sum(weights * losses) / jnp.sum(weights)

  return jax.grad(mean_loss)(variables['params'])


def project(mixed, original, margin=0.0):
  """Returns ĝ_c, the tree nearest to g_c = `mixed` with ⟨g, ĝ_c⟩ ≥ 0 for g = `original` (eq. 11).

  Where ⟨g, g_c⟩ < 0, ĝ_c = g_c + v*·g with v* = max(margin, −⟨g_c, g⟩/‖g‖²), the solution of eq. 12 (with the square
  that its print lacks) over v ≥ margin; elsewhere, g_c as it is. At margin 0, ⟨g, ĝ_c⟩ = 0.
  """
  length = trees.norm(original)
  present = length > 0
  unit = jax.tree.map(lambda g: g / jnp.where(present, length, jnp.ones_like(length)), original)
  along = trees.inner_product(unit, mixed)  # of unit length: ‖g‖² would leave float32's range first
  least = jnp.asarray(margin, jnp.float32) * length
  push = jnp.where(along < 0, jnp.maximum(least, -along), 0.0)
  return jax.tree.map(lambda g_c, u: g_c + push * u, mixed, unit)


def concealment(
  client=None,
  public=None,
  *,
  dissimilarity: float = 0.01,
  latent: float = 0.01,
  mixing: float = 0.7,
  learning_rate: float = 0.1,
  tolerance: float = 0.0,
  margin: float = 0.0,
  steps: int = 1000,
  start: str = 'noise',
  mixup: bool = False,
  sensitive: int | None = None,
  box: bool = False,
  projection: bool = True,
):
  """DCS² (Wu et al. 2024, algorithm 1): sends the gradient of the batch with concealed samples mixed in.

  It belongs at the head of the step chain. The gradient that it is handed counts as the paper's g, whatever a member
  before did to it; what it returns is computed anew from batch and parameters, and members after act on that. It takes
  `key=`, `batch=` and `params`, `weights=` (0 for padding, which then has no part in the result) and `variables=`,
  which a model with BatchNorm needs under running statistics. Everything is computed in float32 with dropout off. No
  strength of it is the identity but `sensitive=0`.

  The published code differs: it works on normalised pixels (so its λ_x and Adam's steps mean other lengths), matches
  the mean gradient of all sensitive samples at once, stops where the mean ‖x̃ − x_s‖ exceeds 150 to 500, always runs
  BatchNorm on running statistics, divides eq. 10 by 3 where 0 < λ_g < 1, and has v ≥ 0.5 in eq. 12.

  Args:
    client: the `Client` that it is made for: its model, loss and BatchNorm mode ('train': the gradient of one sample is
      under that sample's own statistics, eq. 10 under those of the batch and its concealed samples).
    public: (images [K, H, W, C], integer labels [K]) that start points are drawn from.
    dissimilarity: λ_x ≥ 0 of eq. 9; the published code has 0.001 for TinyImageNet. No strength: 1/λ_x is the distance
      at which the pull fades, so a larger one keeps images nearer, and 0 pulls not at all.
    latent: λ_z ≥ 0 of eq. 9; the published code has 0.1 for CelebA. The latent representation is the logits.
    mixing: λ_g in [0, 1] of eq. 10, the weight of the concealed sample's own label against the sensitive one's.
    learning_rate: Adam's, × 0.1 at 3/8, 5/8 and 7/8 of the steps.
    tolerance: ε ≥ 0 of eq. 8: relative distances of logits below it are free. 0 is eq. 9 as it is run, where ε is an
      additive constant.
    margin: least v ≥ 0 of eq. 12, where the gradient is turned at all.
    steps: of Adam, per update.
    start: x_0, 'noise' (N(0, 1) with a random class) or 'proxy' (a random public sample with its label).
    mixup: start from 0.7·x_0 + 0.3·x_s instead, with x_0's label (table 5).
    sensitive: number of sensitive samples, the first ones of every batch (all, if it holds fewer); none means all. The
      published code takes the last ones.
    box: keep the concealed images in [0, 1], clipped after each step. The paper's leave it, and so do their looks.
    projection: turn the gradient by eq. 11.

  Raises:
    UsageError: for a setting out of range, or a start that public images are missing for.
  """
  for name, value, high in (
    ('dissimilarity', dissimilarity, np.inf),
    ('latent', latent, np.inf),
    ('mixing', mixing, 1),
    ('learning_rate', learning_rate, np.inf),
    ('tolerance', tolerance, np.inf),
    ('margin', margin, np.inf),
  ):
    errors.check_number(f'concealment({name})', value, low=0, high=high, finite=True)
  steps = int(errors.check_number('concealment(steps)', steps, low=1, integer=True))
  if sensitive is not None:
    sensitive = int(errors.check_number('concealment(sensitive)', sensitive, low=0, integer=True))
  if start not in STARTS:
    raise errors.unknown('concealment(start)', start, STARTS)
  if client is not None and start == 'proxy':
    _check_public(public, client.num_classes)

  def init(params):
    del params
    return ConcealmentState(jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32))

  def update(updates, state, params=None, *, key=None, batch=None, weights=None, variables=None, **extra):
    del extra
    images, labels = base.require_batch('concealment', batch, params)
    key = jax.random.fold_in(base.require_key('concealment', key), zlib.crc32(b'concealment'))
    if sensitive == 0:
      return updates, state
    if start == 'proxy' and public[0].shape[1:] != images.shape[1:]:
      raise errors.UsageError(
        f'concealment(start=proxy) has public images of shape {public[0].shape[1:]}, the batch {images.shape[1:]}'
      )
    weights = jnp.ones(images.shape[:1], jnp.float32) if weights is None else jnp.asarray(weights, jnp.float32)
    params, original = jax.tree.map(lambda x: x.astype(jnp.float32), (params, updates))
    variables = {**(variables or {}), 'params': params}
    own = images[:sensitive], labels[:sensitive]
    concealed = concealed_samples(
      client,
      variables,
      key,
      *own,
      public,
      dissimilarity=dissimilarity,
      latent=latent,
      tolerance=tolerance,
      learning_rate=learning_rate,
      steps=steps,
      start=start,
      mixup=mixup,
      box=box,
    )
    mixed = mixed_gradient(client, variables, batch, concealed, weights, mixing)
    if projection:
      mixed = project(mixed, original, margin)
    updates = jax.tree.map(lambda m, u: m.astype(u.dtype), mixed, updates)
    return updates, _summary(client, variables, own, concealed, weights[:sensitive])

  return optax.GradientTransformationExtraArgs(init, update)


def _keys(key, count):
  return jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(count, dtype=jnp.int32))


def _check_public(public, num_classes):
  if public is None:
    raise errors.UsageError(
      "concealment(start=proxy) starts from public samples and none are given; start='noise' needs none"
    )
  images, labels = public
  if len(images) != len(labels) or not len(images):
    raise errors.UsageError(
      f'concealment(start=proxy) got {len(images)} public images and {len(labels)} labels, expected one label each'
    )
  if not 0 <= np.min(labels) <= np.max(labels) < num_classes:
    raise errors.UsageError(
      f'concealment(start=proxy) got public labels in [{np.min(labels)}, {np.max(labels)}], '
      f'expected classes in [0, {num_classes - 1}]'
    )


@functools.partial(jax.jit, static_argnames='client')
def _summary(client, variables, sensitive, concealed, weights):
  """Returns the `ConcealmentState` of the samples with a weight."""

  both = jax.tree.map(lambda x, y: jnp.stack([x, y], axis=1), sensitive, concealed)

  def compare(images, labels):
    views = jax.vmap(lambda image, label: view(client, variables, image, label))(images, labels)
    own, other = trees.take(views, 0), trees.take(views, 1)
    return trees.norm(other.image - own.image), trees.cosine(other.gradient, own.gradient)

  distances, cosines = jax.vmap(compare)(*both)
  total = jnp.sum(weights)
  share = weights / jnp.where(total > 0, total, jnp.ones_like(total))
  return ConcealmentState(jnp.sum(share * distances), jnp.sum(share * cosines))
