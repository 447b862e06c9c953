"""From the input of the first dense layer to the image: Fidel's generative decoders (Enthoven & Al-Ars 2021).

If there are convolutions in front of the first dense layer, `fidel.partial_reconstructions` are their feature maps. The
server knows the convolutions. It computes the features of auxiliary images (figure 7, A), and trains a decoder to
recreate the images from them (B). Then it decodes the features that the victim's neurons give away (C).
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from gradleak.attacks.dense import first_dense_input, first_dense_layer
from gradleak.core import errors, trees
from gradleak.core.promotion import promoting
from gradleak.core.settings import Count, Range, ranged
from gradleak.core.trees import Tree
from gradleak.engine.parts import in_parts
from gradleak.models import Model, convolution, layers
from gradleak.models.model import require

# (parameters, state, key, *data) -> (loss, new state), as `_minimised` takes it.
Loss = Callable[..., tuple[jax.Array, Tree]]


def dense_inputs(model: Model, variables: Mapping, images: jax.Array) -> jax.Array:
  """Returns the inputs of the first dense layer, [N, in]: Fidel on each image alone (figure 7, A).

  Pure; of the model it needs the layers only. It differentiates the sum of the logits instead of the loss, whose
  gradient vanishes for images that are classified with confidence. Dropout is off; BatchNorm uses running statistics.

  Args:
    model: a `Model`.
    variables: its variables.
    images: [N, H, W, C].

  Raises:
    UsageError: if the model does not list its layers, or has no dense layer with a bias.
  """
  found = require(model, 'layers')(images.shape[1:])

  def input_of(image: jax.Array) -> jax.Array:
    def total(params: Tree) -> jax.Array:
      logits, _ = model.apply({**variables, 'params': params}, image.reshape(1, *image.shape), False, None)
      return jnp.sum(logits)

    gradient = jax.grad(total)(variables['params'])
    kernel, bias = (trees.get(gradient, path) for path in first_dense_layer(found, gradient))
    return first_dense_input(kernel, bias)

  return jax.lax.map(input_of, images)


class Decoder(NamedTuple):
  """A function from feature maps to images, and how it is trained.

  Attributes:
    fit: (key, features [N, h, w, c], images [N, H, W, C]) -> weights, any pytree; runs on the host.
    decode: (weights, features [M, h, w, c]) -> images [M, H, W, C]; pure.
  """

  fit: Callable[[jax.Array, jax.Array, jax.Array], Tree]
  decode: Callable[[Tree, jax.Array], jax.Array]


class _Conv(nn.Module):
  """Flax's `Conv` without padding, in the formulation whose gradients are fast."""

  features: int
  size: int
  stride: int = 1

  @nn.compact
  def __call__(self, images: jax.Array) -> jax.Array:
    """Returns [N, H', W', features] of images [N, H, W, C]."""
    shape = self.size, self.size, images.shape[-1], self.features
    kernel = self.param('kernel', nn.initializers.lecun_normal(), shape)
    bias = self.param('bias', nn.initializers.zeros, (self.features,))
    matrix = kernel.transpose(3, 1, 0, 2).reshape(self.features, -1)
    return convolution.hybrid(images, matrix, self.size, self.stride, 0) + bias.reshape(1, 1, 1, -1)


def _transposed(images: jax.Array, size: int, stride: int = 1, grown: bool = False) -> jax.Array:
  """Returns images [N, H, W, C] whose convolution by `size` is transposed: spread by the stride, and padded.

  The output has H · stride pixels a side; `grown`, it keeps all that a pixel reaches, H + size − 1 at a stride of 1.
  """
  pads = [size - 1] * 2 if grown else [(size + stride - 1) // 2, (size + stride - 2) // 2]
  side = (*pads, stride - 1)
  return jax.lax.pad(images, jnp.zeros((), images.dtype), ((0, 0, 0), side, side, (0, 0, 0)))


class TableIII(nn.Module):
  """Table III, for MNIST: up-sampling and 5×5 convolutions twice, then a dense layer of as many units as pixels.

  The paper does not state the padding. Without padding, features of 13 pixels a side become images of 20.
  """

  sample_shape: tuple[int, int, int]

  @nn.compact
  def __call__(self, features: jax.Array, train: bool = False) -> jax.Array:
    """Returns images [N, H, W, C] of features [N, h, w, c]."""
    x = nn.relu(_Conv(20, 5)(_upsampled(features)))
    x = nn.relu(_Conv(10, 5, stride=2)(_upsampled(x)))
    x = nn.sigmoid(nn.Dense(math.prod(self.sample_shape))(layers.flatten(x)))
    return x.reshape(-1, *self.sample_shape)


class TableIV(nn.Module):
  """Table IV, for CIFAR-10: transposed convolutions from h×h features to images of 2h + 2 pixels a side.

  The printed `Conv 2D 3,3 X 32 valid` would give images of 28 pixels a side; it is transposed here.
  """

  sample_shape: tuple[int, int, int]

  @nn.compact
  def __call__(self, features: jax.Array, train: bool = False) -> jax.Array:
    """Returns images [N, H, W, C] of features [N, h, w, c]."""
    x = nn.relu(_Conv(128, 5)(_transposed(features, 5)))
    x = nn.relu(_Conv(64, 5)(_transposed(x, 5, stride=2)))
    x = nn.BatchNorm(use_running_average=not train)(x)
    x = nn.relu(_Conv(64, 5)(_transposed(x, 5)))
    x = jnp.tanh(_Conv(32, 3)(_transposed(x, 3, grown=True)))
    return nn.sigmoid(nn.Conv(self.sample_shape[-1], (3, 3))(x))


@ranged
def table_iii(sample_shape: tuple[int, int, int], *, steps: Count = 4000, batch_size: Count = 32) -> Decoder:
  """Returns the `Decoder` of table III, for features of 4×4 or more; arguments as of `table_iv`."""
  return _network('table_iii', TableIII(tuple(sample_shape)), lambda side: side >= 4, 'at least 4×4', steps, batch_size)


@ranged
def table_iv(sample_shape: tuple[int, int, int], *, steps: Count = 4000, batch_size: Count = 32) -> Decoder:
  """Returns the `Decoder` of table IV, trained on the mean squared error.

  The optimizer is Adam at 0.001. Adadelta at 0.001, which the tables print, moves the weights too little to learn
  anything in the 10 minutes that the paper trained for.

  Args:
    sample_shape: (H, W, C), of 2h + 2 pixels a side for features of h×h.
    steps: steps of training.
    batch_size: auxiliary images per step; not stated in the paper.

  Raises (from its `fit`):
    UsageError: for features that do not fit the images.
  """
  height, width, _ = sample_shape
  fits, side = height == width and height % 2 == 0, (height - 2) // 2
  module = TableIV(tuple(sample_shape))
  return _network('table_iv', module, lambda given: fits and given == side, f'{side}×{side}', steps, batch_size)


def _network(
  name: str, module: nn.Module, fits: Callable[[int], bool], expected: str, steps: int, batch_size: int
) -> Decoder:
  """Returns the `Decoder` that trains a Flax module."""

  def fit(key: jax.Array, features: jax.Array, images: jax.Array) -> Tree:
    side = features.shape[1]
    if features.shape[2] != side or not fits(side):
      shape = '×'.join(map(str, features.shape[1:3]))
      raise errors.UsageError(f'{name} decodes features of {expected} for images of {module.sample_shape}, got {shape}')
    return trained(key, features, images)

  def loss(
    params: Tree, statistics: Tree, key: jax.Array, features: jax.Array, images: jax.Array
  ) -> tuple[jax.Array, Tree]:
    chosen = jax.random.randint(key, (batch_size,), 0, len(images))
    given = {'params': params, 'batch_stats': statistics}
    found, changed = module.apply(given, features[chosen], train=True, mutable=['batch_stats'])
    return jnp.mean(jnp.square(found - images[chosen])), changed.get('batch_stats', {})

  def trained(key: jax.Array, features: jax.Array, images: jax.Array) -> Tree:
    variables = jax.jit(module.init)(jax.random.fold_in(key, 0), features[:1])
    start = variables['params'], variables.get('batch_stats', {})
    data = features, images
    params, statistics = _minimised(jax.random.fold_in(key, 1), loss, *start, data, steps, optax.adam(1e-3))
    return {'params': params, 'batch_stats': statistics}

  return Decoder(fit, module.apply)


class Windows(NamedTuple):
  """The weights of `windows`; k features around each place, n = pixels times channels of its window.

  Attributes:
    kernel: [k, n], of the linear part.
    offset: [n].
    inner, threshold, outer: [k, hidden], [hidden] and [hidden, n], of the hidden layer.
    precision: [n], one over the mean squared error of each pixel on the auxiliary images.
  """

  kernel: jax.Array
  offset: jax.Array
  inner: jax.Array
  threshold: jax.Array
  outer: jax.Array
  precision: jax.Array


@ranged
def windows(
  sample_shape: tuple[int, int, int],
  *,
  context: Annotated[int, Range(0)] = 1,
  hidden: Annotated[int, Range(0)] = 256,
  steps: Count = 3000,
) -> Decoder:
  """Returns a `Decoder` of our own, which is as local as the features are.

  A feature of convolutions and poolings sees a window of the image, the same for all places. The pixels of the window
  are regressed on the features within `context` places. The regression is by least squares in closed form; a hidden
  layer of ReLUs then learns its error. Where windows overlap, they are averaged, each weighted by its precision at the
  pixel. All places share the weights, so that a few hundred auxiliary images are many samples. The linear part is
  affine: a mixture of features whose shares add up to one is decoded to the same mixture of images.

  Args:
    sample_shape: (H, W, C).
    context: how many features on each side are used beside a window's own.
    hidden: ReLUs of the hidden layer; 0 for the linear part alone.
    steps: of the hidden layer's training by Adam, on all windows of four images each. The learning rate decays from
      0.001 along a cosine.

  Raises (when run):
    UsageError: for images that are too small for the features.
  """
  height, width, channels = sample_shape

  def fit(key: jax.Array, features: jax.Array, images: jax.Array) -> Windows:
    weights, mean, spread = _least_squares(features, images, context, hidden)
    if hidden:
      weights = _trained(key, weights, mean, spread, features, images, context=context, steps=steps)
    error = _summed(functools.partial(_squared_errors, weights, context=context), features, images)
    precision = 1 / (error / error.mean() + 1e-6)
    return weights._replace(precision=jnp.asarray(precision / precision.mean(), jnp.float32))

  def decode(weights: Windows, features: jax.Array) -> jax.Array:
    places = _places((height, width), features.shape)
    precision = weights.precision.reshape(1, 1, 1, len(places), channels)

    def overlapped(values: jax.Array) -> jax.Array:
      """Returns the sum of windows [N, h, w, places, C] at their places in the image, weighted."""
      values, zero = values * precision, jnp.zeros((), values.dtype)
      # Padding takes a third of the time of a scatter on CPU.
      return sum(
        jax.lax.pad(values[..., i, :], zero, ((0, 0, 0), *(_spread(s, n) for s, n in sides), (0, 0, 0)))
        for i, sides in enumerate(zip(place, (height, width), strict=True) for place in places)
      )

    found = _predicted(weights, _convolved(features, context))
    found = found.reshape(*found.shape[:3], len(places), channels)
    total = overlapped(jnp.ones_like(found[:1]))
    return overlapped(found) / jnp.where(total == 0, 1.0, total)

  return Decoder(fit, decode)


def _least_squares(
  features: jax.Array, images: jax.Array, context: int, hidden: int
) -> tuple[Windows, np.ndarray, np.ndarray]:
  """Returns `Windows` of the linear part alone, and the features' means and standard deviations [k]."""
  moments = _summed(functools.partial(_products, context=context), features, images)
  split = (2 * context + 1) ** 2 * features.shape[-1]
  mean, moments = moments[-1, :-1] / moments[-1, -1], moments[:-1, :-1] / moments[-1, -1]
  moments = moments - np.outer(mean, mean)
  inside, across = moments[:split, :split], moments[:split, split:]
  least = 1e-6 * np.trace(inside) / split
  # Features are collinear where there are more of them than pixels that they see.
  kernel = np.linalg.solve(inside + least * np.eye(split), across)
  offset = mean[split:] - mean[:split] @ kernel
  layer = np.zeros((split, hidden)), np.zeros(hidden), np.zeros((hidden, len(offset)))
  weights = Windows(*(jnp.asarray(x, jnp.float32) for x in (kernel, offset, *layer, np.ones_like(offset))))
  return weights, mean[:split], np.sqrt(np.maximum(np.diag(inside), least))


def _trained(
  key: jax.Array,
  weights: Windows,
  mean: np.ndarray,
  spread: np.ndarray,
  features: jax.Array,
  images: jax.Array,
  *,
  context: int,
  steps: int,
) -> Windows:
  """Returns the weights with a hidden layer that has learnt the linear part's error."""
  scales = jnp.asarray(mean, jnp.float32), jnp.asarray(spread, jnp.float32)
  inner = jax.random.normal(jax.random.fold_in(key, 0), weights.inner.shape) * math.sqrt(2 / len(mean))
  start = inner, weights.threshold, weights.outer

  def layer(params: tuple, weights: Windows, mean: jax.Array, spread: jax.Array) -> Windows:
    """Returns the weights whose hidden layer takes features of mean 0 and variance 1, as Adam needs them."""
    inner, threshold, outer = params
    inner = inner / spread.reshape(-1, 1)
    return weights._replace(inner=inner, threshold=threshold - mean @ inner, outer=outer)

  def loss(
    params: tuple, state: Tree, key: jax.Array, features: jax.Array, images: jax.Array, *given: Any
  ) -> tuple[jax.Array, Tree]:
    chosen = jax.random.randint(key, (4,), 0, len(images))
    # On CPU the gradient of a matrix product is faster than that of a convolution.
    found = _predicted(layer(params, *given), functools.partial(jnp.matmul, _around(features[chosen], context)))
    return jnp.mean(jnp.square(found - _seen(features[chosen], images[chosen]))), state

  optimizer = optax.adam(optax.cosine_decay_schedule(1e-3, steps))
  data = features, images, weights, *scales
  params, _ = _minimised(jax.random.fold_in(key, 1), loss, start, (), data, steps, optimizer)
  return layer(params, weights, *scales)


def _summed(
  function: Callable[[jax.Array, jax.Array], jax.Array], features: jax.Array, images: jax.Array, chunk: int = 100
) -> np.ndarray:
  """Returns the sum of `function` over chunks of the images, in float64."""
  parts = (slice(start, start + chunk) for start in range(0, len(images), chunk))
  return sum(np.asarray(function(features[part], images[part]), np.float64) for part in parts)


@functools.partial(jax.jit, static_argnames='context')
def _products(features: jax.Array, images: jax.Array, *, context: int) -> jax.Array:
  """Returns AᵀA of the rows (features around a window, its pixels, 1)."""
  around, pixels = _around(features, context), _seen(features, images)
  table = jnp.concatenate([around, pixels, jnp.ones_like(pixels[..., :1])], axis=-1)
  table = table.reshape(-1, table.shape[-1])
  return jnp.matmul(table.T, table, precision=jax.lax.Precision.HIGHEST)


@functools.partial(jax.jit, static_argnames='context')
def _squared_errors(weights: Windows, features: jax.Array, images: jax.Array, *, context: int) -> jax.Array:
  """Returns the squared error of each pixel of a window, summed over all windows, [n]."""
  found = _predicted(weights, _convolved(features, context))
  return jnp.sum(jnp.square(found - _seen(features, images)), axis=(0, 1, 2))


def _seen(features: jax.Array, images: jax.Array) -> jax.Array:
  """Returns the windows that the features see, [N, h, w, n]."""
  places = _places(images.shape[1:3], features.shape)
  pixels = jnp.stack([images[:, rows, columns] for rows, columns in places], axis=3)
  return pixels.reshape(*pixels.shape[:3], -1)


def _predicted(weights: Windows, multiplied: Callable[[jax.Array], jax.Array]) -> jax.Array:
  """Returns the window of each place, [N, h, w, n]; `multiplied` maps a kernel [k, m] to [N, h, w, m]."""
  found = multiplied(weights.kernel) + weights.offset.reshape(1, 1, 1, -1)
  if weights.threshold.size:
    inside = jax.nn.relu(multiplied(weights.inner) + weights.threshold.reshape(1, 1, 1, -1))
    found = found + jnp.matmul(inside, weights.outer, precision=jax.lax.Precision.HIGHEST)
  return found


def _convolved(features: jax.Array, context: int) -> Callable[[jax.Array], jax.Array]:
  """Returns a function: kernel [k, m] -> its products with the features around each place, [N, h, w, m]."""
  side, padded = 2 * context + 1, _padded(features, context)
  settings: dict[str, Any] = {
    'dimension_numbers': ('NHWC', 'HWIO', 'NHWC'),
    'precision': jax.lax.Precision.HIGHEST,
  }
  return lambda kernel: jax.lax.conv_general_dilated(
    padded, kernel.reshape(side, side, features.shape[-1], -1), (1, 1), 'VALID', **settings
  )


def _minimised(
  key: jax.Array,
  loss: Loss,
  params: Tree,
  state: Tree,
  data: tuple,
  steps: int,
  optimizer: optax.GradientTransformation,
) -> tuple[Tree, Tree]:
  """Returns (params, state) after `steps` steps on a loss of `data`."""
  optimizer = promoting(optimizer)

  @jax.jit
  def advance(key: jax.Array, data: tuple, carry: tuple, first: jax.Array, last: jax.Array) -> tuple:
    def one_step(index: jax.Array, carry: tuple) -> tuple:
      params, state, moments = carry
      gradient, state = jax.grad(loss, has_aux=True)(params, state, jax.random.fold_in(key, index), *data)
      updates, moments = optimizer.update(gradient, moments, params)
      return optax.apply_updates(params, updates), state, moments

    return jax.lax.fori_loop(first, last, one_step, carry)

  start = jax.tree.map(lambda x: jnp.asarray(x, x.dtype), (params, state, optimizer.init(params)))
  params, state, _ = in_parts(functools.partial(advance, key, data), start, steps)
  return params, state


def _upsampled(x: jax.Array) -> jax.Array:
  """Returns [N, 2h, 2w, C], each entry of [N, h, w, C] repeated."""
  return jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)


def _around(features: jax.Array, context: int) -> jax.Array:
  """Returns for each place the features within `context` places of it, [N, h, w, (2·context + 1)²·c]."""
  height, width = features.shape[1:3]
  padded = _padded(features, context)
  offsets = range(2 * context + 1)
  return jnp.concatenate([padded[:, i : i + height, j : j + width] for i in offsets for j in offsets], axis=-1)


def _spread(places: slice, pixels: int) -> tuple[int, int, int]:
  """Returns (pixels before, pixels behind, pixels between) of a slice's places, as `jax.lax.pad` takes them."""
  taken = range(pixels)[places]
  return taken[0], pixels - 1 - taken[-1], taken.step - 1


def _padded(features: jax.Array, context: int) -> jax.Array:
  return jnp.pad(features, ((0, 0), (context, context), (context, context), (0, 0)), mode='edge')


def _places(sides_of_image: tuple[int, int], feature_shape: tuple[int, ...]) -> list[tuple[slice, slice]]:
  """Returns for each pixel of a window its (rows, columns) in the image, as slices over all windows."""
  sides = []
  for pixels, places in zip(sides_of_image, feature_shape[1:3], strict=True):
    stride = max(1, pixels // places)
    last = stride * (places - 1)
    if pixels <= last:
      raise errors.UsageError(f'{places} features see no windows of {pixels} pixels')
    sides.append([slice(i, i + last + 1, stride) for i in range(pixels - last)])
  return [(rows, columns) for rows in sides[0] for columns in sides[1]]


REGISTRY: dict[str, Callable[..., Decoder]] = {'table_iii': table_iii, 'table_iv': table_iv, 'windows': windows}
