"""DCS²: concealed samples, with gradients like those of the sensitive samples but different images.

Wu, Hayat, Zhou, Harandi: Concealing Sensitive Samples against Gradient Leakage in Federated Learning, AAAI 2024. For
each sensitive sample x_s a concealed one x̃ is optimised (eq. 9), and the client sends the gradient of both (eq. 10).
That gradient is projected where it would oppose the gradient of the plain batch (eq. 11 and 12).

The published code differs in several points. It works on normalised pixels, so its λ_x and Adam's steps are on another
scale. It matches the mean gradient of all sensitive samples at once, and stops where the mean ‖x̃ − x_s‖ exceeds 150 to
500. It always runs BatchNorm on running statistics. It divides eq. 10 by 3 where `0 < λ_g < 1`, and has `v ≥ 0.5` in
eq. 12.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradleak.core import errors, trees
from gradleak.core.promotion import promoting
from gradleak.core.settings import Choice, Count, Fraction, NonNegative, Range
from gradleak.core.trees import Tree
from gradleak.defenses import base
from gradleak.defenses.defense import defense
from gradleak.models.masked import fills, masked
from gradleak.models.model import per_example_loss

STARTS = ('noise', 'proxy')
MIXUP = 0.7  # weight of x_0 against x_s in the start point (table 5)
Samples = tuple[jax.Array, jax.Array]  # images, and labels as probabilities


class View(NamedTuple):
  """What eq. 9 compares of a sample.

  Attributes:
    image: x, float32 [H, W, C].
    logits: f_θ(x), float32 [classes].
    gradient: ∇_θ L(f_θ(x), y), a tree shaped like the parameters.
  """

  image: jax.Array
  logits: jax.Array
  gradient: Tree


class ConcealmentState(NamedTuple):
  """Figures of the last update's concealed samples, means over its sensitive samples; zeros before the first.

  Attributes:
    dissimilarity: ‖x̃ − x_s‖₂, a float32 scalar; pixels are in [0, 1].
    cosine: the cosine between the gradients of the concealed and the sensitive sample, a float32 scalar.
  """

  dissimilarity: jax.Array
  cosine: jax.Array


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=('dissimilarity', 'latent', 'tolerance', 'learning_rate'),
  meta_fields=('steps', 'start', 'mixup', 'box'),
)
@dataclasses.dataclass(frozen=True)
class Search:
  """How a concealed sample is searched; its fields are settings of `concealment`."""

  dissimilarity: float = 0.01
  latent: float = 0.01
  tolerance: float = 0.0
  learning_rate: float = 0.1
  steps: int = 1000
  start: str = 'noise'
  mixup: bool = False
  box: bool = False


def view(client: Any, variables: Mapping, image: jax.Array, label: jax.Array) -> View:
  """Returns the `View` of one sample alone; a BatchNorm on batch statistics takes them of this one sample.

  Args:
    client: the `Client` whose model, loss and BatchNorm mode are used.
    variables: the model's.
    image: float32 [H, W, C] in [0, 1].
    label: probabilities [classes].
  """

  def loss(params: Tree) -> Samples:
    given = {**variables, 'params': client.held(params, image.shape)}, jnp.expand_dims(image, 0)
    train = client.batch_norm == 'train'
    losses, _ = per_example_loss(client.network, client.loss, *given, jnp.expand_dims(label, 0), train)
    logits, _ = client.network.apply(*given, train, None)  # the compiler merges this with the same forward pass above
    return jnp.sum(losses), logits[0]

  gradient, logits = jax.grad(loss, has_aux=True)(variables['params'])
  return View(image, logits, gradient)


def objective(concealed: View, sensitive: View, *, dissimilarity: Any, latent: Any, tolerance: Any) -> jax.Array:
  """Returns eq. 9 for two `View`s: 1 − cos + exp(−λ_x‖x̃ − x_s‖) + λ_z·(relative distance of logits).

  The additive constant ε of eq. 9 is left out.

  Args:
    concealed, sensitive: the `View`s of x̃ and x_s.
    dissimilarity, latent: λ_x and λ_z.
    tolerance: makes the last term a hinge, as eq. 8's constraint has it: only the relative distance beyond it counts.

  Returns:
    A float32 scalar.
  """
  scale = trees.norm(sensitive.logits)
  distance = trees.norm(concealed.logits - sensitive.logits) / jnp.where(scale > 0, scale, jnp.ones_like(scale))
  return (
    1
    - trees.cosine(concealed.gradient, sensitive.gradient)
    + jnp.exp(-dissimilarity * trees.norm(concealed.image - sensitive.image))
    + latent * jnp.maximum(distance - tolerance, 0)
  )


def start_point(key: jax.Array, image: jax.Array, num_classes: int, public: Any, *, start: str, mixup: bool) -> Samples:
  """Returns (x_0, y_0), an image and label probabilities [classes], for a sensitive image (table 5).

  Args:
    key: drives the draws.
    image: the sensitive one, float32 [H, W, C].
    num_classes: number of classes.
    public: (images, integer targets) for `start='proxy'`, else None.
    start, mixup: as in `concealment`.
  """
  which, pixels = jax.random.split(key)
  if start == 'proxy':
    samples, targets = (jnp.asarray(part) for part in public)
    chosen = jax.random.randint(which, (), 0, samples.shape[0], jnp.int32)
    x, y = samples[chosen].astype(jnp.float32), targets[chosen]
  else:
    x, y = jax.random.normal(pixels, image.shape), jax.random.randint(which, (), 0, num_classes, jnp.int32)
  if mixup:
    x = MIXUP * x + (1 - MIXUP) * image
  return x, jax.nn.one_hot(y, num_classes, dtype=jnp.float32)


@functools.partial(jax.jit, static_argnames='client')  # else compiled at each call
@masked(None)
def concealed_samples(
  client: Any,
  variables: Mapping,
  key: jax.Array,
  samples: jax.Array,
  targets: jax.Array,
  public: tuple | None = None,
  search: Search = Search(),
) -> Samples:
  """Returns a concealed sample for each sensitive one: Adam on eq. 9, algorithm 1's line 3.

  Each sample is optimised separately, the i-th with `fold_in(key, i)`: its own gradient is matched, not the batch's.
  The loop can be differentiated.

  Args:
    client: the `Client` whose model, loss and BatchNorm mode are used; dropout is off.
    variables: the model's.
    key: drives the start points.
    samples: the sensitive ones, float32 [N, H, W, C] in [0, 1].
    targets: theirs, probabilities [N, classes].
    public: (samples, targets) for `start='proxy'`.
    search: the `Search`.

  Returns:
    (samples, targets as probabilities) in the shapes of the sensitive ones.
  """
  names, steps = ('dissimilarity', 'latent', 'tolerance'), search.steps
  weights = {name: jnp.asarray(getattr(search, name), jnp.float32) for name in names}
  adam = promoting(optax.scale_by_adam())
  # The schedule of Geiping et al., as in the published code, decays the rate thrice, as below.
  decay = 0.1 ** np.searchsorted([3 / 8, 5 / 8, 7 / 8], np.arange(steps) / steps, side='right')
  rates = jnp.asarray(search.learning_rate, jnp.float32) * jnp.asarray(decay, jnp.float32)

  def conceal(key: jax.Array, image: jax.Array, label: jax.Array) -> Samples:
    sensitive = view(client, variables, image, label)
    x, y = start_point(key, image, label.shape[-1], public, start=search.start, mixup=search.mixup)
    gradient = jax.grad(lambda x: objective(view(client, variables, x, y), sensitive, **weights))

    @jax.checkpoint  # a derivative of the loop then stores each step's image, not the network's activations
    def step(carry: tuple, rate: jax.Array) -> tuple[tuple, None]:
      x, moments = carry
      move, moments = adam.update(gradient(x), moments, x)
      x = x - rate * move
      return (jnp.clip(x, 0, 1) if search.box else x, moments), None

    (x, _), _ = jax.lax.scan(step, (x, adam.init(x)), rates)
    return x, y

  return jax.vmap(conceal)(_keys(key, samples.shape[0]), samples, targets)


@functools.partial(jax.jit, static_argnames=('client', 'filled'))
def mixed_gradient(
  client: Any,
  variables: Mapping,
  batch: Samples,
  concealed: Samples,
  weights: jax.Array,
  mixing: Any,
  filled: bool = False,
) -> Tree:
  """Returns g_c, a tree shaped like the parameters: the gradient of the batch with the concealed samples (eq. 10).

  It is ∇ Σ_i w_i ℓ_i / Σ_i w_i, or ∇ Σ_i w_i ℓ_i where the client's loss is a sum. The sensitive samples are the first
  ones of the batch. For these, ℓ_i is the mean of `L(x_i, y_i)` and `λ_g L(x̃_i, ỹ_i) + (1 − λ_g) L(x̃_i, y_i)`. For
  the others it is `L(x_i, y_i)`. So a batch without concealed samples keeps its gradient, and one with them its scale,
  which the sum of eq. 10 would double. There is one forward pass over {x_s} ∪ {x̃}: batch statistics are those of both.

  Args:
    client: as in `concealed_samples`.
    variables: the model's.
    batch: (samples, targets as probabilities), N samples.
    concealed: likewise, K ≤ N concealed samples.
    weights: float32 [N], 0 for padding.
    mixing: λ_g, a scalar.
    filled: whether weights may be 0; statistics of the batch then leave these samples out.
  """
  (samples, targets), (dummies, dummy_labels) = batch, concealed
  num_samples, count = samples.shape[0], dummies.shape[0]
  mixing = jnp.asarray(mixing, jnp.float32)

  def mean_loss(params: Tree) -> jax.Array:
    union, current = (
      jnp.concatenate([samples, dummies]),
      {**variables, 'params': client.held(params, samples.shape[1:])},
    )

    def losses_of(given: jax.Array) -> jax.Array:
      labels_of_all = jnp.concatenate([targets, given])
      train = client.batch_norm == 'train'
      with masked(jnp.concatenate([weights, weights[:count]]) if filled else None):
        losses, _ = per_example_loss(client.network, client.loss, current, union, labels_of_all, train)
      return losses

    # The compiler merges the two forward passes: the losses differ only in the labels of the dummies.
    under_own, under_true = losses_of(dummy_labels), losses_of(targets[:count])
    losses = under_own[:num_samples]
    mixture = mixing * under_own[num_samples:] + (1 - mixing) * under_true[num_samples:]
    losses = jnp.concatenate([(losses[:count] + mixture) / 2, losses[count:]])
    return client.loss.reduced(losses, targets, weights)

  return jax.grad(mean_loss)(variables['params'])


def project(mixed: Tree, original: Tree, margin: Any = 0.0) -> Tree:
  """Returns ĝ_c, the tree nearest to g_c = `mixed` with ⟨g, ĝ_c⟩ ≥ 0 for g = `original` (eq. 11).

  Where ⟨g, g_c⟩ < 0, `ĝ_c = g_c + v*·g` with `v* = max(margin, −⟨g_c, g⟩/‖g‖²)`. That is the solution of eq. 12 (with
  the square that its print lacks) over v ≥ margin. Elsewhere, ĝ_c is g_c. At margin 0, ⟨g, ĝ_c⟩ = 0.

  Args:
    mixed: g_c, a tree.
    original: g, a tree of the same shapes.
    margin: least v, ≥ 0; may be traced.
  """
  length = trees.norm(original)
  present = length > 0
  unit = jax.tree.map(lambda g: g / jnp.where(present, length, jnp.ones_like(length)), original)
  along = trees.inner_product(unit, mixed)  # of unit length: ‖g‖² could leave the range of float32
  least = jnp.asarray(margin, jnp.float32) * length
  push = jnp.where(along < 0, jnp.maximum(least, -along), 0.0)
  return jax.tree.map(lambda g_c, u: g_c + push * u, mixed, unit)


@defense(
  place='step',
  published='DCS²',
  citation='Wu, Hayat, Zhou, Harandi: Concealing Sensitive Samples against Gradient Leakage in Federated Learning. '
  'AAAI 2024.',
  random=True,
  arguments=lambda context, settings: (context.client, context.public),
  replaces=True,
  moves=True,
  gradients=lambda context, settings: settings['steps'],
  idle=lambda settings: settings['sensitive'] == 0,
  projects=lambda settings: settings['projection'] and settings['margin'] == 0,
)
def concealment(
  client: Any = None,
  public: tuple | None = None,
  *,
  dissimilarity: NonNegative = 0.01,
  latent: NonNegative = 0.01,
  mixing: Fraction = 0.7,
  learning_rate: NonNegative = 0.1,
  tolerance: NonNegative = 0.0,
  margin: NonNegative = 0.0,
  steps: Count = 1000,
  start: Annotated[str, Choice(STARTS)] = 'noise',
  mixup: bool = False,
  sensitive: Annotated[int | None, Range(0)] = None,
  box: bool = False,
  projection: bool = True,
) -> optax.GradientTransformationExtraArgs:
  r"""DCS² (Wu et al. 2024, algorithm 1): sends the gradient of the batch with concealed samples mixed in.

  It should come first in the step chain, because the gradient it receives is the paper's g. Its result is computed anew
  from batch and parameters, in float32 with dropout off. Its update needs `key=`, `batch=` and `params`. It also takes
  `weights=` (0 for padding, which then has no effect). A model with BatchNorm under running statistics needs
  `variables=`. Only `sensitive=0` is the identity.

  Formula:
    \tilde{x} = \arg\min_x \; 1 - \cos(\nabla_\theta L(x, \tilde{y}), \nabla_\theta L(x_s, y_s))
    + e^{-\lambda_x \lVert x - x_s \rVert} + \lambda_z \, z(x)

    z(x) = \max \left( 0, \frac{\lVert f(x) - f(x_s) \rVert}{\lVert f(x_s) \rVert} - \varepsilon \right)

    g_c = \nabla_\theta \tfrac{1}{2} (L(x_s, y_s) + \lambda_g L(\tilde{x}, \tilde{y})
    + (1 - \lambda_g) L(\tilde{x}, y_s))

    \hat{g}_c = g_c + \max(v, -\langle g_c, g \rangle / \lVert g \rVert^2) \, g
    \quad \text{where } \langle g, g_c \rangle < 0

  Args:
    client: the `Client` that it is made for: its model, loss and BatchNorm mode ('train': the gradient of one sample is
      under that sample's own statistics, eq. 10 under those of the batch and its concealed samples).
    public: (images [K, H, W, C], integer labels [K]) that start points are drawn from.
    dissimilarity: λ_x of eq. 9; 0.001 in the published code for TinyImageNet. It is an inverse length: 1/λ_x is the
      distance at which the repulsion from x_s fades. A larger λ_x keeps images nearer; at 0 there is no repulsion.
    latent: λ_z of eq. 9; 0.1 in the published code for CelebA. The latent representation is the logits.
    mixing: λ_g of eq. 10, the weight of the concealed sample's own label against the sensitive one's.
    learning_rate: Adam's, × 0.1 at 3/8, 5/8 and 7/8 of the steps.
    tolerance: ε of eq. 8: relative distances of logits below it are not penalised. 0 gives eq. 9 as printed.
    margin: least v ≥ 0 of eq. 12, where the gradient is projected at all.
    steps: Adam steps per update.
    start: x_0, 'noise' (N(0, 1) with a random class) or 'proxy' (a random public sample with its label).
    mixup: start from 0.7·x_0 + 0.3·x_s instead, with x_0's label (table 5).
    sensitive: number of sensitive samples, the first ones of every batch, at most as many as it holds; None means all.
      The published code takes the last ones.
    box: clip the concealed images to [0, 1] after each step. The paper does not clip them.
    projection: whether to apply eq. 11.

  Raises:
    UsageError: for `start='proxy'` without fitting public images, and for a margin without a projection or a tolerance
      with latent=0, which would have no effect.
  """
  if not projection:
    errors.check_idle('to concealment without projection', {'margin': (margin, 0)})
  if not isinstance(latent, jax.core.Tracer) and latent == 0:
    errors.check_idle('to concealment at latent=0', {'tolerance': (tolerance, 0)})
  search = Search(dissimilarity, latent, tolerance, learning_rate, steps, start, mixup, box)
  if client is not None and start == 'proxy':
    _check_public(public, client.num_classes)
  conceal = functools.partial(concealed_samples, client, public=public, search=search)

  def combine(variables: Mapping, batch: Samples, concealed: Samples, weights: jax.Array, original: Tree) -> Tree:
    mixed = mixed_gradient(client, variables, batch, concealed, weights, mixing, fills())
    return project(mixed, original, margin) if projection else mixed

  return _transformation(client, public if start == 'proxy' else None, conceal, combine, sensitive)


def _transformation(
  client: Any, proxies: tuple | None, conceal: Callable[..., Samples], combine: Callable[..., Tree], sensitive: Any
) -> optax.GradientTransformationExtraArgs:
  """Returns the transformation of `concealment`.

  Args:
    client: the `Client`.
    proxies: the public samples to start from, or None.
    conceal: (variables, key, samples, targets) -> concealed samples.
    combine: (variables, batch, concealed, weights, original gradient) -> the gradient to send, float32.
    sensitive: number of sensitive samples, or None for all.
  """
  count = None if sensitive is None else int(sensitive)

  def init(params: Tree) -> ConcealmentState:
    del params
    return ConcealmentState(jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32))

  def update(
    updates: Tree,
    state: ConcealmentState,
    params: Tree = None,
    *,
    key: Any = None,
    batch: Any = None,
    weights: Any = None,
    variables: Any = None,
    **extra: Any,
  ) -> tuple[Tree, ConcealmentState]:
    del extra
    base.require_argument('concealment', 'client', client).loss.require_classes('concealment')
    samples, targets = base.require_batch('concealment', batch, params)
    key = base.stream('concealment', key, updates)
    if count == 0:
      return updates, state
    base.require_own_gradients('concealment', 'mixes', client.loss)
    if count is not None and count > samples.shape[0]:
      raise errors.UsageError(f'concealment(sensitive) is {count}, and the batch holds {samples.shape[0]} samples')
    if proxies is not None and proxies[0].shape[1:] != samples.shape[1:]:
      raise errors.UsageError(
        f'concealment(start=proxy) has public samples of shape {proxies[0].shape[1:]}, the batch {samples.shape[1:]}'
      )
    weights = jnp.ones(samples.shape[:1], jnp.float32) if weights is None else jnp.asarray(weights, jnp.float32)
    params, original = jax.tree.map(lambda x: x.astype(jnp.float32), (params, updates))
    variables = {**(variables or {}), 'params': params}
    own = samples[:count], targets[:count]
    concealed = conceal(variables, key, *own)
    mixed = combine(variables, batch, concealed, weights, original)
    updates = jax.tree.map(lambda m, u: m.astype(u.dtype), mixed, updates)
    return updates, _summary(client, variables, own, concealed, weights[:count])

  return optax.GradientTransformationExtraArgs(init, update)


def _keys(key: jax.Array, count: int) -> jax.Array:
  return jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(count, dtype=jnp.int32))


def _check_public(public: tuple | None, num_classes: int) -> None:
  if public is None:
    raise errors.UsageError(
      "concealment(start=proxy) starts from public samples and none are given; start='noise' needs none"
    )
  samples, targets = public
  if len(samples) != len(targets) or not len(samples):
    raise errors.UsageError(
      f'concealment(start=proxy) got {len(samples)} public samples and {len(targets)} labels, expected one label each'
    )
  if not 0 <= np.min(targets) <= np.max(targets) < num_classes:
    raise errors.UsageError(
      f'concealment(start=proxy) got public labels in [{np.min(targets)}, {np.max(targets)}], '
      f'expected classes in [0, {num_classes - 1}]'
    )


@functools.partial(jax.jit, static_argnames='client')
@masked(None)
def _summary(
  client: Any, variables: Mapping, sensitive: Samples, concealed: Samples, weights: jax.Array
) -> ConcealmentState:
  """Returns the `ConcealmentState`, means weighted by `weights`."""
  both = jax.tree.map(lambda x, y: jnp.stack([x, y], axis=1), sensitive, concealed)

  def compare(samples: jax.Array, targets: jax.Array) -> Samples:
    views = jax.vmap(lambda image, label: view(client, variables, image, label))(samples, targets)
    own, other = trees.take(views, 0), trees.take(views, 1)
    return trees.norm(other.image - own.image), trees.cosine(other.gradient, own.gradient)

  distances, cosines = jax.vmap(compare)(*both)
  total = jnp.sum(weights)
  portions = weights / jnp.where(total > 0, total, jnp.ones_like(total))
  return ConcealmentState(jnp.sum(portions * distances), jnp.sum(portions * cosines))
