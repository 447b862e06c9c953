"""From what the first dense layer is given to the image: Fidel's generative decoders (Enthoven & Al-Ars 2021).

Where convolutions stand in front of the first dense layer, `fidel.partial_reconstructions` are their feature maps. The
server knows the convolutions: it computes the features of auxiliary images (figure 7, A), trains a decoder to recreate
the images from them (B), and decodes what the victim's neurons say (C).
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from gradleak import errors, specs, trees
from gradleak.attacks import closed_form
from gradleak.models import layers
from gradleak.models.model import require
from gradleak.strictness import lenient


def dense_inputs(model, variables, images):
  """Returns what the first dense layer is given, [N, in]: Fidel on each image alone (figure 7, A).

  Pure, and it needs nothing of the model but its layers. In place of the loss the sum of the logits is differentiated,
  whose gradient no confident answer makes vanish. Dropout is off; BatchNorm takes running statistics.

  Args:
    model: a `Model`.
    variables: its variables.
    images: [N, H, W, C].

  Raises:
    UsageError: if the model does not tell its layers, or has no dense layer with a bias.
  """
  found = require(model, 'layers')(images.shape[1:])

  def input_of(image):
    def total(params):
      logits, _ = model.apply({**variables, 'params': params}, image.reshape(1, *image.shape), False, None)
      return jnp.sum(logits)

    gradient = jax.grad(total)(variables['params'])
    kernel, bias = (trees.get(gradient, path) for path in closed_form.first_dense_layer(found, gradient))
    return closed_form.first_dense_input(kernel, bias)

  return jax.lax.map(input_of, images)


def feature_maps(inputs, channels):
  """Returns inputs of a dense layer, [M, in], as the square maps that were flattened, [M, side, side, channels].

  Raises:
    UsageError: if they are not square maps of so many channels.
  """
  side = math.isqrt(inputs.shape[-1] // channels)
  if side * side * channels != inputs.shape[-1]:
    raise errors.UsageError(f'{inputs.shape[-1]} features are no square maps of {channels} channels')
  return inputs.reshape(-1, side, side, channels)


class Decoder(NamedTuple):
  """A way back from feature maps to images.

  Attributes:
    fit: (key, features [N, h, w, c], images [N, H, W, C]) -> weights, any pytree; a host function.
    decode: (weights, features [M, h, w, c]) -> images [M, H, W, C]; pure.
  """

  fit: Callable
  decode: Callable


class TableIII(nn.Module):
  """Table III, for MNIST: up-sampling and 5×5 convolutions twice, then a dense layer of as many units as pixels.

  Padding is not stated; without any, 13×13 features become 26, 22, 44 and 20.
  """

  image_shape: tuple[int, int, int]

  @nn.compact
  def __call__(self, features, train=False):
    """Returns images [N, H, W, C] of features [N, h, w, c]."""
    x = nn.relu(nn.Conv(20, (5, 5), padding='VALID')(_upsampled(features)))
    x = nn.relu(nn.Conv(10, (5, 5), strides=(2, 2), padding='VALID')(_upsampled(x)))
    x = nn.sigmoid(nn.Dense(math.prod(self.image_shape))(layers.flatten(x)))
    return x.reshape(-1, *self.image_shape)


class TableIV(nn.Module):
  """Table IV, for CIFAR-10: transposed convolutions from h×h features to images of 2h + 2 pixels a side.

  The printed “Conv 2D 3,3 X 32 valid” would end at 28×28: it is transposed here.
  """

  image_shape: tuple[int, int, int]

  @nn.compact
  def __call__(self, features, train=False):
    """Returns images [N, H, W, C] of features [N, h, w, c]."""
    x = nn.relu(nn.ConvTranspose(128, (5, 5))(features))
    x = nn.relu(nn.ConvTranspose(64, (5, 5), strides=(2, 2))(x))
    x = nn.BatchNorm(use_running_average=not train)(x)
    x = nn.relu(nn.ConvTranspose(64, (5, 5))(x))
    x = jnp.tanh(nn.ConvTranspose(32, (3, 3), padding='VALID')(x))
    return nn.sigmoid(nn.Conv(self.image_shape[-1], (3, 3))(x))


def table_iii(image_shape, *, steps: int = 4000, batch_size: int = 32):
  """Returns the `Decoder` of table III, for features of 4×4 or more; settings as of `table_iv`."""
  return _network('table_iii', TableIII(tuple(image_shape)), lambda side: side >= 4, 'at least 4×4', steps, batch_size)


def table_iv(image_shape, *, steps: int = 4000, batch_size: int = 32):
  """Returns the `Decoder` of table IV, trained on the mean squared error.

  The optimizer is Adam at 0.001. Adadelta at 0.001, which the tables print, moves the weights too little to learn
  anything in the 10 minutes that the paper trained for.

  Args:
    image_shape: (H, W, C), of 2h + 2 pixels a side for features of h×h.
    steps: of training.
    batch_size: auxiliary images of each; not stated in the paper.
  """
  height, width, _ = image_shape
  fits, side = height == width and height % 2 == 0, (height - 2) // 2
  module = TableIV(tuple(image_shape))
  return _network('table_iv', module, lambda given: fits and given == side, f'{side}×{side}', steps, batch_size)


def _network(name, module, fits, expected, steps, batch_size):
  """Returns the `Decoder` that a Flax module is once it is trained."""
  errors.check_number(f'{name}(steps)', steps, low=1, integer=True)
  errors.check_number(f'{name}(batch_size)', batch_size, low=1, integer=True)

  def fit(key, features, images):
    side = features.shape[1]
    if features.shape[2] != side or not fits(side):
      shape = '×'.join(map(str, features.shape[1:3]))
      raise errors.UsageError(f'{name} decodes features of {expected} for images of {module.image_shape}, got {shape}')
    return trained(key, features, images)

  @jax.jit
  def trained(key, features, images):
    variables = module.init(jax.random.fold_in(key, 0), features[:1])

    def loss(params, statistics, key):
      chosen = jax.random.randint(key, (batch_size,), 0, len(images))
      given = {'params': params, 'batch_stats': statistics}
      found, changed = module.apply(given, features[chosen], train=True, mutable=['batch_stats'])
      return jnp.mean(jnp.square(found - images[chosen])), changed.get('batch_stats', {})

    start = variables['params'], variables.get('batch_stats', {})
    params, statistics = _minimised(jax.random.fold_in(key, 1), loss, *start, steps, optax.adam(1e-3))
    return {'params': params, 'batch_stats': statistics}

  return Decoder(fit, module.apply)


class Windows(NamedTuple):
  """The weights of `windows`: k features around each place, n pixels times channels of its window.

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


def windows(image_shape, *, context: int = 1, hidden: int = 256, steps: int = 3000):
  """Returns a `Decoder` of our own, which is as local as the features are.

  A feature of convolutions and poolings sees a window of the image, the same for all places. Its pixels are regressed
  on the features within `context` places: by least squares in closed form, whose error a hidden layer of ReLUs then
  learns. Where windows overlap, they are averaged by how well each of them knows the pixel. As all places share the
  weights, a few hundred auxiliary images are many samples. The linear part is affine, so that of a mixture of features,
  whose shares add up to one, it makes the same mixture of images.

  Args:
    image_shape: (H, W, C).
    context: how many features on each side are taken beside a window's own.
    hidden: ReLUs of the hidden layer; 0 leaves the linear part alone.
    steps: of the hidden layer's training, Adam from 0.001 down along a cosine, on all windows of four images each.
  """
  errors.check_number('windows(context)', context, low=0, integer=True)
  errors.check_number('windows(hidden)', hidden, low=0, integer=True)
  errors.check_number('windows(steps)', steps, low=1, integer=True)
  channels = image_shape[-1]

  def fit(key, features, images):
    moments = summed(products, features, images)
    split = (2 * context + 1) ** 2 * features.shape[-1]
    mean, moments = moments[-1, :-1] / moments[-1, -1], moments[:-1, :-1] / moments[-1, -1]
    moments = moments - np.outer(mean, mean)
    inside, across = moments[:split, :split], moments[:split, split:]
    # Features are collinear where there are more of them than pixels that they see.
    kernel = np.linalg.solve(inside + 1e-6 * np.trace(inside) / split * np.eye(split), across)
    offset = mean[split:] - mean[:split] @ kernel
    layer = np.zeros((split, hidden)), np.zeros(hidden), np.zeros((hidden, len(offset)))
    weights = Windows(*(jnp.asarray(x, jnp.float32) for x in (kernel, offset, *layer, np.ones_like(offset))))
    if hidden:
      spread = np.sqrt(np.maximum(np.diag(inside), 1e-6 * np.trace(inside) / split))
      weights = trained(key, weights, *(jnp.asarray(x, jnp.float32) for x in (mean[:split], spread)), features, images)
    error = summed(functools.partial(errors_of, weights), features, images)
    precision = 1 / (error / error.mean() + 1e-6)
    return weights._replace(precision=jnp.asarray(precision / precision.mean(), jnp.float32))

  def summed(function, features, images, chunk=100):
    """Returns the sum over all images of what `function` says of some of them, in float64."""
    parts = (slice(start, start + chunk) for start in range(0, len(images), chunk))
    return sum(np.asarray(function(features[part], images[part]), np.float64) for part in parts)

  @jax.jit
  def products(features, images):
    """Returns AᵀA of the rows (features around a window, its pixels, 1)."""
    around, pixels = _around(features, context), seen(features, images)
    table = jnp.concatenate([around, pixels, jnp.ones_like(pixels[..., :1])], axis=-1)
    table = table.reshape(-1, table.shape[-1])
    return jnp.matmul(table.T, table, precision=jax.lax.Precision.HIGHEST)

  @jax.jit
  def errors_of(weights, features, images):
    return jnp.sum(jnp.square(predicted(weights, convolved(features)) - seen(features, images)), axis=(0, 1, 2))

  def seen(features, images):
    """Returns the windows that the features see, [N, h, w, n]."""
    places = _places(image_shape, features.shape)
    pixels = jnp.stack([images[:, rows, columns] for rows, columns in places], axis=3)
    return pixels.reshape(*pixels.shape[:3], -1)

  @jax.jit
  def trained(key, weights, mean, spread, features, images):
    """Returns the weights with a hidden layer that has learnt the linear part's error."""
    inner = jax.random.normal(jax.random.fold_in(key, 0), weights.inner.shape) * math.sqrt(2 / len(mean))
    start = inner, weights.threshold, weights.outer

    def layer(params):
      """Returns the weights whose hidden layer takes features of mean 0 and variance 1, as Adam needs them."""
      inner, threshold, outer = params
      inner = inner / spread.reshape(-1, 1)
      return weights._replace(inner=inner, threshold=threshold - mean @ inner, outer=outer)

    def loss(params, state, key):
      chosen = jax.random.randint(key, (4,), 0, len(images))
      # On CPU the gradient of a matrix product is faster than that of a convolution.
      found = predicted(layer(params), functools.partial(jnp.matmul, _around(features[chosen], context)))
      return jnp.mean(jnp.square(found - seen(features[chosen], images[chosen]))), state

    optimizer = optax.adam(optax.cosine_decay_schedule(1e-3, steps))
    return layer(_minimised(jax.random.fold_in(key, 1), loss, start, (), steps, optimizer)[0])

  def predicted(weights, multiplied):
    """Returns each place's window, [N, h, w, n]; `multiplied` takes [k, m] to [N, h, w, m]."""
    found = multiplied(weights.kernel) + weights.offset.reshape(1, 1, 1, -1)
    if hidden:
      inside = jax.nn.relu(multiplied(weights.inner) + weights.threshold.reshape(1, 1, 1, -1))
      found = found + jnp.matmul(inside, weights.outer, precision=jax.lax.Precision.HIGHEST)
    return found

  def convolved(features):
    """Returns a kernel [k, m] -> its products with the features around each place, [N, h, w, m]."""
    side, padded = 2 * context + 1, _padded(features, context)
    settings = {'dimension_numbers': ('NHWC', 'HWIO', 'NHWC'), 'precision': jax.lax.Precision.HIGHEST}
    return lambda kernel: jax.lax.conv_general_dilated(
      padded, kernel.reshape(side, side, features.shape[-1], -1), (1, 1), 'VALID', **settings
    )

  def decode(weights, features):
    places = _places(image_shape, features.shape)
    precision = weights.precision.reshape(1, 1, 1, len(places), channels)

    def overlapped(values):
      """Returns the sum of windows [N, h, w, places, C] at their places in the image, weighted."""
      values, zero = values * precision, jnp.zeros((), values.dtype)
      # Padding is a third of a scatter's time on CPU.
      return sum(
        jax.lax.pad(values[..., i, :], zero, ((0, 0, 0), *(_spread(s, n) for s, n in sides), (0, 0, 0)))
        for i, sides in enumerate(zip(place, image_shape[:2], strict=True) for place in places)
      )

    found = predicted(weights, convolved(features))
    found = found.reshape(*found.shape[:3], len(places), channels)
    total = overlapped(jnp.ones_like(found[:1]))
    return overlapped(found) / jnp.where(total == 0, 1.0, total)

  return Decoder(fit, decode)


def _minimised(key, loss, params, state, steps, optimizer):
  """Returns (params, state) after so many steps on `loss`, (params, state, key) -> (loss, state)."""
  optimizer = lenient(optimizer)

  def one_step(carry, index):
    params, state, moments = carry
    gradient, state = jax.grad(loss, has_aux=True)(params, state, jax.random.fold_in(key, index))
    updates, moments = optimizer.update(gradient, moments, params)
    return (optax.apply_updates(params, updates), state, moments), None

  start = jax.tree.map(lambda x: jnp.asarray(x, x.dtype), (params, state, optimizer.init(params)))
  (params, state, _), _ = jax.lax.scan(one_step, start, jnp.arange(steps, dtype=jnp.int32))
  return params, state


def _upsampled(x):
  return jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)


def _around(features, context):
  """Returns for each place the features within `context` places of it, [N, h, w, (2·context + 1)²·c]."""
  height, width = features.shape[1:3]
  padded = _padded(features, context)
  offsets = range(2 * context + 1)
  return jnp.concatenate([padded[:, i : i + height, j : j + width] for i in offsets for j in offsets], axis=-1)


def _spread(places, pixels):
  """Returns (pixels before, pixels behind, pixels between) of a slice's places, as `jax.lax.pad` takes them."""
  taken = range(pixels)[places]
  return taken[0], pixels - 1 - taken[-1], taken.step - 1


def _padded(features, context):
  return jnp.pad(features, ((0, 0), (context, context), (context, context), (0, 0)), mode='edge')


def _places(image_shape, feature_shape):
  """Returns for each pixel of a window the (rows, columns) at which it stands in the image, as slices."""
  sides = []
  for pixels, places in zip(image_shape[:2], feature_shape[1:3], strict=True):
    stride = max(1, pixels // places)
    last = stride * (places - 1)
    if pixels <= last:
      raise errors.UsageError(f'{places} features see no windows of {pixels} pixels')
    sides.append([slice(i, i + last + 1, stride) for i in range(pixels - last)])
  return [(rows, columns) for rows in sides[0] for columns in sides[1]]


REGISTRY = {'table_iii': table_iii, 'table_iv': table_iv, 'windows': windows}


def parse(text, image_shape):
  """Returns the `Decoder` that `text` describes, as `windows(context=1)`, for images of a shape.

  Raises:
    UsageError: for an unknown name or setting.
  """
  factory, static, numeric = specs.resolve(specs.parse(text, 'decoder'), REGISTRY, 'decoder')
  return factory(image_shape, **static, **numeric)
