"""Trap weights: the model's own first dense layer set so that few images, ideally one, activate each neuron.

Boenisch et al. ("When the Curious Abandon Honesty", EuroS&P 2023) change no architecture: a neuron whose positive
weights are a little smaller than its negative ones is silent for most images, and the quotient of its gradients is the
image that woke it (`fidel`). What came after sets the neuron's bias instead, at a quantile of its pre-activation over
images: QBI (Nowak et al. 2024) so that one of B fires, soliton biases (Shariati & Alambardar Meybodi) so that the
numbers that fire follow the distribution that a fountain code is decoded with.

Convolutions in front of that layer are made to hand the image on, where they can: by identity kernels, or, where max
pooling of 2×2 follows, as the maxima and minima of all blocks of 2×2, between which the pixels are enclosed.
"""

import math
import statistics
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gradleak import errors, trees
from gradleak.attacks import base, closed_form, fidel
from gradleak.models.model import require

VARIANTS = ('mirrored', 'independent', 'soliton_free', 'soliton_data', 'qbi')

_SOLITON = 0.05, 0.4  # c and δ of the published experiments
# Quotients this far beyond the pixels' range are mixtures; those within this distance, root mean square, one image.
_SLACK, _EQUAL = 0.01, 0.01
_ROUNDING = 1e-3  # of the mean |z|: nearer to 0, whether a neuron fires is open
_EXACT = jax.lax.Precision.HIGHEST


class Passage(NamedTuple):
  """How an image reaches the first dense layer.

  Attributes:
    parameters: of the convolutions that hand it on, by path.
    encode: images [N, H, W, C] -> the layer's input [N, in], in NumPy.
    decode: inputs [N, in] -> images [N, H, W, C].
  """

  parameters: dict
  encode: Callable
  decode: Callable


def passage(layers, params, image_shape):
  """Returns the `Passage` through the layers in front of the first dense one; it reads shapes alone.

  Of this project's models that is possible for `mlp`, exactly, and for `cnn`, within its pooling. The others have no
  dense layer but the classifier.

  Args:
    layers: the model's, a sequence of `Layer` in forward order.
    params: its parameters.
    image_shape: (H, W, C).

  Raises:
    UsageError: for a model without a hidden dense layer, or with something in front of it that images do not pass.
  """
  kernel, _ = closed_form.first_dense_layer(layers, params)
  position = next(i for i, layer in enumerate(layers) if kernel in layer.paths)
  if position == len(layers) - 1:
    raise errors.UsageError(
      'trap weights need a hidden dense layer that falls silent, and the first dense layer is the classifier'
    )
  size = trees.get(params, kernel).shape[0]
  if position == 0:
    return _dense_passage(size, image_shape)
  return _convolutional_passage(layers[:position], params, size, image_shape)


def _dense_passage(size, image_shape):
  if size != math.prod(image_shape):
    raise errors.UsageError(
      f'trap weights read images of {math.prod(image_shape)} pixels, and the first dense layer takes {size} inputs'
    )
  return Passage({}, lambda x: x.reshape(x.shape[0], -1), lambda inputs: inputs.reshape(-1, *image_shape))


def _convolutional_passage(layers, params, size, image_shape):
  height, width, channels = image_shape
  shapes = []
  for layer in layers:
    leaves = [trees.get(params, path).shape for path in layer.paths]
    if len(leaves) != 2 or len(leaves[0]) not in (2, 4) or len(leaves[1]) != 1:
      raise errors.UsageError(f'images pass convolutions with a bias and no norm, and {layer.name!r} is something else')
    shapes.append(leaves[0])
  inputs = [channels, *(_features(shape) for shape in shapes)]
  sides = [_side(shape, before) for shape, before in zip(shapes, inputs[:-1], strict=True)]
  shrinks = sum(side - 1 for side in sides)
  for same, pooled in ((True, False), (False, False), (True, True), (False, True)):
    shape = [(n - (0 if same else shrinks)) // (2 if pooled else 1) for n in (height, width)]
    if math.prod(shape) * inputs[-1] == size:
      break
  else:
    raise errors.UsageError(
      f'images of {height}×{width} pass convolutions of stride 1 with at most one max pooling of 2 behind the last: '
      f'the first dense layer takes {size} inputs of {inputs[-1]} channels'
    )
  needed = [channels] * (len(layers) - 1) + [8 * channels if pooled else channels]
  for layer, has, needs in zip(layers, inputs[1:], needed, strict=True):
    if has < needs:
      raise errors.UsageError(f'images need {needs} channels to pass {layer.name!r}, which has {has}')

  straight = [[(c, side // 2, side // 2, c, 1.0) for c in range(channels)] for side in sides]
  biases = [np.zeros(count, np.float32) for count in inputs[1:]]
  first = max(sides[-1] // 2 - 1, 0)
  if pooled:
    if sides[-1] < 2:
      raise errors.UsageError(f'a max pooling behind the 1×1 convolution {layers[-1].name!r} hides pixels')
    blocks = [(a, b, c) for a in (0, 1) for b in (0, 1) for c in range(channels)]
    straight[-1] = [(i, first + a, first + b, c, 1.0) for i, (a, b, c) in enumerate(blocks)]
    straight[-1] += [(i + len(blocks), first + a, first + b, c, -1.0) for i, (a, b, c) in enumerate(blocks)]
    biases[-1][len(blocks) : 2 * len(blocks)] = 1  # 1 − x passes a ReLU
  parameters = {}
  for layer, own, before, taps, bias in zip(layers, shapes, inputs[:-1], straight, biases, strict=True):
    parameters.update(zip(layer.paths, (_kernel(own, before, taps), bias), strict=True))

  border = 0 if same else sum(side // 2 for side in sides[: len(sides) - pooled])
  if not pooled:

    def encode(x):
      x = x[:, border : border + shape[0], border : border + shape[1]]
      return np.pad(x, [(0, 0)] * 3 + [(0, inputs[-1] - channels)]).reshape(x.shape[0], -1)

    def decode(features):
      return _fitted(features.reshape(-1, *shape, inputs[-1])[..., :channels], border, image_shape)

    return Passage(parameters, encode, decode)

  padding = sides[-1] // 2 if same else 0

  def encode(x):
    x = x[:, border : height - border, border : width - border]
    x = np.pad(x, ((0, 0), (padding, padding), (padding, padding), (0, 0)))
    starts = [(first + a, first + b) for a in (0, 1) for b in (0, 1)]
    phases = np.concatenate([x[:, r : r + 2 * shape[0], c : c + 2 * shape[1]] for r, c in starts], axis=-1)
    phases = np.concatenate([phases, 1 - phases], axis=-1)
    pooled = phases.reshape(-1, shape[0], 2, shape[1], 2, phases.shape[-1]).max(axis=(2, 4))
    return np.pad(pooled, [(0, 0)] * 3 + [(0, inputs[-1] - pooled.shape[-1])]).reshape(x.shape[0], -1)

  def decode(features):
    features = features.reshape(-1, *shape, inputs[-1])
    high, low = (features[..., i * 4 * channels : (i + 1) * 4 * channels] for i in (0, 1))
    high, low = _interleaved(high), 1 - _interleaved(low)
    # A pixel is at most the least maximum, and at least the greatest minimum, of the four blocks that it stands in.
    pixels = (-_widest(-high) + _widest(low)) / 2
    return _fitted(pixels, border + first - padding, image_shape)

  return Passage(parameters, encode, decode)


def _features(shape):
  return shape[0] if len(shape) == 2 else shape[3]


def _side(shape, channels):
  """Returns the side of a square kernel, [features, side·side·C] or [side, side, C, features]."""
  side = math.isqrt(shape[1] // channels) if len(shape) == 2 else shape[0]
  if (shape != (shape[0], side * side * channels)) if len(shape) == 2 else (shape[:3] != (side, side, channels)):
    raise errors.UsageError(f'images pass square convolutions of {channels} channels, got a kernel of shape {shape}')
  return side


def _kernel(shape, channels, taps):
  """Returns a convolution's kernel, zero but for (feature, row, column, channel, weight) of the taps."""
  kernel = np.zeros(shape, np.float32)
  side = _side(shape, channels)
  for feature, row, column, channel, weight in taps:
    if len(shape) == 2:
      kernel[feature, (column * side + row) * channels + channel] = weight
    else:
      kernel[row, column, channel, feature] = weight
  return kernel


def _interleaved(phases):
  """Returns [N, 2h, 2w, C], one entry per 2×2 block at any position, of the four phases [N, h, w, 4C]."""
  n, h, w, channels = phases.shape
  phases = phases.reshape(n, h, w, 2, 2, channels // 4).transpose(0, 1, 3, 2, 4, 5)
  return phases.reshape(n, 2 * h, 2 * w, channels // 4)


def _widest(blocks):
  """Returns the largest entry of the blocks that each pixel stands in, [N, h + 1, w + 1, C]."""
  least = jnp.asarray(-jnp.inf, blocks.dtype)
  return jax.lax.reduce_window(blocks, least, jax.lax.max, (1, 2, 2, 1), (1, 1, 1, 1), ((0, 0), (1, 1), (1, 1), (0, 0)))


def _fitted(pixels, offset, image_shape):
  """Returns pixels that stand at (offset, offset) of an image, with its edges repeated where they do not reach."""
  pixels = pixels[:, max(-offset, 0) :, max(-offset, 0) :][:, : image_shape[0], : image_shape[1]]
  before = max(offset, 0)
  after = [max(n - before - m, 0) for n, m in zip(image_shape[:2], pixels.shape[1:3], strict=True)]
  pixels = jnp.pad(pixels, ((0, 0), (before, after[0]), (before, after[1]), (0, 0)), mode='edge')
  return pixels[:, : image_shape[0], : image_shape[1]]


def soliton(count):
  """Returns the robust soliton distribution of the degrees 1, …, count, float64 [count] (Luby 2002; c .05, δ .4)."""
  c, delta = _SOLITON
  degrees = np.arange(1, count + 1)
  ideal = np.where(degrees == 1, 1 / count, 1 / np.maximum(degrees * (degrees - 1), 1))
  spread = c * np.log(count / delta) * np.sqrt(count)
  pivot = int(np.clip(round(count / spread), 1, count))
  robust = np.where(degrees < pivot, spread / (count * degrees), 0.0)
  robust[pivot - 1] = max(spread * np.log(spread / delta) / count, 0)
  return (ideal + robust) / np.sum(ideal + robust)


def trap_weights(key, inputs, neurons, batch_size, *, variant, scale=0.99, stddev=0.5, auxiliary=None):
  """Returns (kernel float32 [inputs, neurons], bias float32 [neurons]) of the first dense layer.

  Args:
    key: draws the weights.
    inputs: bool [in], which of the layer's inputs hold pixels in [0, 1]; the others are 0.
    neurons: their number.
    batch_size: B.
    variant: 'mirrored': the positive weights of a neuron are `scale` times the negatives of its negative ones;
      'independent': every weight N(0, σ²), `scale` times that where positive. The others have weights N(0, σ²) and a
      bias at a quantile 1 − d/B of the pre-activation: 'qbi' with d = 1, the soliton ones with d from `soliton`. The
      quantile is that of auxiliary images, for 'soliton_free' and, where there are none, for 'qbi' that of a sum of
      independent pixels, uniform in [0, 1]: −b = Σw/2 + √(Σw²/12)·Φ⁻¹(1 − d/B).
    scale: s.
    stddev: σ.
    auxiliary: the layer's inputs for auxiliary images, [P, in].

  Raises:
    UsageError: for 'soliton_data' without auxiliary images.
  """
  if variant == 'soliton_data' and auxiliary is None:
    raise errors.UsageError(
      'trap(variant=soliton_data) needs auxiliary images: give public=(images, labels) to gradleak.scenario, or take '
      "'soliton_free'"
    )
  rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
  pixels = np.flatnonzero(inputs)
  weights = rng.normal(0, stddev, (neurons, pixels.size))
  bias = np.zeros(neurons)
  if variant == 'mirrored':
    negative = -np.abs(weights[:, : -(-pixels.size // 2)])
    mirrored = np.concatenate([negative, -scale * negative[:, : pixels.size // 2]], axis=1)
    weights = rng.permuted(mirrored, axis=1)
  elif variant == 'independent':
    weights = np.where(weights > 0, scale * weights, weights)
  else:
    degrees = np.ones(neurons) if variant == 'qbi' else 1 + rng.choice(batch_size, neurons, p=soliton(batch_size))
    # All of a batch at once is no quantile: half a sample is left out.
    shares = 1 - np.minimum(degrees, batch_size - 0.5) / batch_size
    if auxiliary is None or variant == 'soliton_free':
      quantile = np.array([statistics.NormalDist().inv_cdf(share) for share in shares])
      bias = -weights.sum(axis=1) / 2 - np.sqrt(np.sum(weights**2, axis=1) / 12) * quantile
    else:
      z = np.asarray(auxiliary, np.float64)[:, pixels] @ weights.T
      # Halfway between two neighbours, as between the d-th and the next of B images.
      bias = -np.array([np.quantile(column, share, method='hazen') for column, share in zip(z.T, shares, strict=True)])
  kernel = np.zeros((len(inputs), neurons), np.float32)
  kernel[pixels] = weights.T
  return kernel, bias.astype(np.float32)


def _check(variant, scale):
  if variant not in VARIANTS:
    raise errors.unknown('variant of trap weights', variant, VARIANTS)
  errors.check_number('trap(scale)', scale, low=0, high=1)


def server(key, scenario, batch_size, *, variant: str = 'independent', scale: float = 0.99):
  """Returns the `Scenario` whose first dense layer is a trap, and whose convolutions hand the image on to it.

  Args:
    key: draws the weights.
    scenario: the honest one; 'soliton_data' and 'qbi' take quantiles over its public images.
    batch_size: B, the number of samples behind the update.
    variant, scale: see `trap_weights`. The weights have the standard deviation of those that they replace, so that
      what is behind them is fed as before; published is 0.5.

  Raises:
    UsageError: for settings out of range, a model that hands no image on to a hidden dense layer, one whose neurons do
      not fall silent, or 'soliton_data' without public images.
  """
  _check(variant, scale)
  model, params = scenario.client.model, scenario.variables['params']
  image_shape = tuple(scenario.images.shape[1:])
  layers = require(model, 'layers')(image_shape)
  kernel, bias = closed_form.first_dense_layer(layers, params)
  way = passage(layers, params, image_shape)
  variables = {**scenario.variables, 'params': _replaced(params, way.parameters)}
  _check_passage(model, variables, (kernel, bias), way, image_shape)
  auxiliary = None if scenario.public is None else way.encode(scenario.public[0])
  used = way.encode(np.full((1, *image_shape), 0.5, np.float32))[0] != 0
  honest = trees.get(params, kernel)
  weights, biases = trap_weights(
    key,
    used,
    honest.shape[1],
    batch_size,
    variant=variant,
    scale=scale,
    stddev=float(np.std(honest)) or 0.5,
    auxiliary=auxiliary,
  )
  return scenario._replace(
    variables={**variables, 'params': _replaced(variables['params'], {kernel: weights, bias: biases})},
  )


def _replaced(params, values):
  """Returns the parameters with those at some paths replaced."""

  def replace(path, leaf):
    name = trees.path_names(path)
    return jnp.asarray(values[name], leaf.dtype) if name in values else leaf

  return jax.tree_util.tree_map_with_path(replace, params)


def _check_passage(model, variables, paths, way, image_shape):
  """Raises `UsageError` unless the layer's input is what the passage says, and its neurons can fall silent."""
  probe = jax.random.uniform(jax.random.key(0), (1, *image_shape))

  @jax.jit
  def gradients(variables, probe, bias):
    shape = trees.get(variables['params'], paths[0]).shape
    params = _replaced(variables['params'], {paths[0]: jnp.zeros(shape), paths[1]: jnp.full(shape[1], bias)})

    def loss(params):
      logits, _ = model.apply({**variables, 'params': params}, probe, False, None)
      return jnp.sum(logits * jnp.arange(1, logits.shape[1] + 1, dtype=logits.dtype).reshape(1, -1))

    gradient = jax.grad(loss)(params)
    return tuple(trees.get(gradient, path) for path in paths)

  found = closed_form.first_dense_input(*gradients(variables, probe, jnp.float32(1)))
  if not np.allclose(found, way.encode(np.asarray(probe))[0], atol=1e-3):
    raise errors.UsageError(
      f'the model {model.name!r} does not hand its images on to the first dense layer: something in front of it, such '
      'as a stride, a sigmoid or a normalisation of the pixels, changes them'
    )
  if np.any(gradients(variables, probe, jnp.float32(-1))[1]):
    raise errors.UsageError(
      f'the first dense layer of the model {model.name!r} has a gradient below 0, too: trap weights need ReLU'
    )


def recover(update, sent, count):
  """Returns the first dense layer's inputs, the surest first: (inputs [K, in], how many neurons agree on each [K]).

  A neuron's quotient with entries beyond [0, 1] is a mixture. Mixtures within are told apart by agreement: neurons that
  hold the same image alone agree on it, while each mixes several in shares of its own. What is found then tells, by the
  weights that were sent, which other neurons it activates: those hold mixtures, and come last. Of neurons that stand
  alone, the one with more contrast is the surer, since mixing greys. Where several agree, the largest share speaks.

  Args:
    update: of the layer, (kernel [in, neurons], bias [neurons]); a gradient or a delta.
    sent: the layer's weights as sent, likewise.
    count: K, at most the number of neurons; zeros, on which none agree, where there are fewer.
  """
  inputs, alive = fidel.partial_reconstructions(*update)
  slack = jnp.asarray(_SLACK, inputs.dtype)
  valid = alive & (inputs.min(axis=1) >= -slack) & (inputs.max(axis=1) <= 1 + slack)
  inputs = jnp.where(valid.reshape(-1, 1), inputs, jnp.zeros_like(inputs))
  agree = _equal(inputs) & valid.reshape(-1, 1) & valid.reshape(1, -1)
  support = jnp.sum(agree, axis=1, dtype=jnp.int32)
  order = jnp.lexsort((-inputs.std(axis=1), -support))

  z = jnp.matmul(inputs, sent[0], precision=_EXACT) + sent[1].reshape(1, -1)
  activates = z > jnp.asarray(_ROUNDING, z.dtype) * jnp.abs(z).mean()

  def keep(i, state):
    kept, seen, mixed = state
    neuron = order[i]
    new = valid[neuron] & ~seen[neuron] & ~mixed[neuron]
    seen, mixed = (now | (new & then[neuron]) for now, then in ((seen, agree), (mixed, activates)))
    return kept.at[neuron].set(new), seen, mixed

  nothing = jnp.zeros_like(valid)
  kept, seen, _ = jax.lax.fori_loop(0, len(valid), keep, (nothing, nothing, nothing))
  last = jnp.where(kept, 0, jnp.where(valid & ~seen, 1, 2))
  chosen = order[jnp.argsort(last[order], stable=True)][:count]
  loudest = jnp.argmax(jnp.where(agree, jnp.abs(update[1]).reshape(1, -1), 0), axis=1)
  support = jnp.where(last < 2, support, 0)[chosen]
  return jnp.where(support.reshape(-1, 1) > 0, inputs[loudest[chosen]], jnp.zeros_like(inputs[:1])), support


def _equal(rows):
  """Returns bool [M, M], which of the rows [M, D] are equal, up to `_EQUAL`; a row equals itself."""
  centred = rows - jnp.asarray(0.5, rows.dtype)
  squares = jnp.sum(centred**2, axis=1)
  products = jnp.matmul(centred, centred.T, precision=_EXACT)  # no pair of rows is held
  distances = (squares.reshape(-1, 1) + squares.reshape(1, -1) - 2 * products) / rows.shape[1]
  return (distances <= _EQUAL**2) | jnp.eye(len(rows), dtype=bool)


def trap(client, *, variant: str = 'independent', scale: float = 0.99):
  """Trap weights (Boenisch et al. 2023, and after): reads the images that neurons of `server`'s layer hold alone.

  Closed-form. It returns as many images as the batch has samples, or as there are neurons if those are fewer, the
  surest first; what an input of zeros stands for where there is nothing left. It does not tell their labels (−1).

  Args:
    client: whose model the images pass.
    variant, scale: as `server` takes them.

  Raises:
    UsageError: for settings out of range; when run, see `passage`.
  """
  _check(variant, scale)

  def read(observation):
    image_shape = observation.image_shape[1:]
    layers = require(client.model, 'layers')(image_shape)
    paths = closed_form.first_dense_layer(layers, observation.update)
    update, sent = (
      tuple(trees.get(t, p) for p in paths) for t in (observation.update, observation.variables['params'])
    )
    inputs, _ = recover(update, sent, min(observation.image_shape[0], update[1].shape[0]))
    return passage(layers, observation.update, image_shape).decode(inputs), None

  return base.closed_form(read, auxiliary_data=variant in ('soliton_data', 'qbi'))
