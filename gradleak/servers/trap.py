"""Trap weights: the first dense layer of the model is set so that few images, ideally one, activate each neuron.

Boenisch et al. ("When the Curious Abandon Honesty", EuroS&P 2023) change no architecture. A neuron whose positive
weights are a little smaller than its negative ones is silent for most images. If one image activates it, the quotient
of its gradients is that image (`attacks.fidel`). Later methods set the bias of the neuron instead, at a quantile of its
pre-activation over images. In QBI (Nowak et al. 2024), one of B images activates the neuron. With soliton biases
(Shariati & Alambardar Meybodi), the number of images follows the distribution of a fountain code.

Convolutions in front of that layer are set to pass the image on where they can. Some have identity kernels. In front of
a max pooling of 2×2 they pass the maxima and minima of all 2×2 blocks, which bound the pixels from both sides.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gradleak.attacks.base import Attack, attack, closed_form
from gradleak.attacks.dense import check_relu, first_dense_input, first_dense_layer, tolerance
from gradleak.attacks.fidel import beyond_range, partial_reconstructions
from gradleak.core import errors, trees
from gradleak.core.settings import Choice, Fraction
from gradleak.core.trees import Layer, Tree
from gradleak.federated import Client
from gradleak.federated.scenario import Scenario
from gradleak.modalities import IMAGES, Modality
from gradleak.models.model import require
from gradleak.servers.base import Server, check_sent, one_round, replaced, server
from gradleak.threat import Observation

SIGNED = ('mirrored', 'independent', 'both')  # whose positive weights are scaled
VARIANTS = (*SIGNED, 'soliton_free', 'soliton_data', 'qbi')
SCALE = 0.99  # by default

_SOLITON = 0.05, 0.4  # c and δ of the published experiments
# A quotient that leaves its modality's box by more than _SLACK is a mixture. Two within _EQUAL, root mean square, are
# one image.
_SLACK, _EQUAL = 0.01, 0.01
_ROUNDING = 1e-3  # relative to the mean |z|: below it, rounding decides whether a neuron is active
_EXACT = jax.lax.Precision.HIGHEST


class Passage(NamedTuple):
  """How an image reaches the first dense layer.

  Attributes:
    parameters: of the convolutions in front of it, by path.
    encode: images [N, H, W, C] -> the input of the layer [N, in], in NumPy.
    decode: inputs [N, in] -> images [N, H, W, C].
  """

  parameters: dict[tuple[str, ...], np.ndarray]
  encode: Callable[[np.ndarray], np.ndarray]
  decode: Callable[[jax.Array], jax.Array]


def passage(layers: Sequence[Layer], params: Tree, sample_shape: tuple[int, ...]) -> Passage:
  """Returns the `Passage` through the layers in front of the first dense one. It depends on shapes only.

  Among the models of this project, `mlp` passes images exactly and `cnn` up to its pooling. The others have no dense
  layer but the classifier.

  Args:
    layers: of the model, in forward order.
    params: of the model.
    sample_shape: (H, W, C).

  Raises:
    UsageError: for a model without a hidden dense layer, or with a layer in front of it that images do not pass.
  """
  kernel, _ = first_dense_layer(layers, params)
  position = next(i for i, layer in enumerate(layers) if kernel in layer.paths)
  if position == len(layers) - 1:
    raise errors.UsageError(
      'trap weights need a hidden dense layer, and the first dense layer is the classifier: take a model such as mlp'
    )
  size = trees.get(params, kernel).shape[0]
  if position == 0:
    return _dense_passage(size, sample_shape)
  return _convolutional_passage(layers[:position], params, size, sample_shape)


def _dense_passage(size, sample_shape):
  if size != math.prod(sample_shape):
    raise errors.UsageError(
      f'trap weights read samples of {math.prod(sample_shape)} numbers, and the first dense layer takes {size} inputs'
    )
  return Passage({}, lambda x: x.reshape(x.shape[0], -1), lambda inputs: inputs.reshape(-1, *sample_shape))


def _convolutional_passage(layers, params, size, sample_shape):
  errors.check_image_batch('a trap behind convolutions', (1, *sample_shape))
  height, width, channels = sample_shape
  shapes = []
  for layer in layers:
    leaves = [trees.get(params, path).shape for path in layer.paths]
    if len(leaves) != 2 or len(leaves[0]) not in (2, 4) or len(leaves[1]) != 1:
      raise errors.UsageError(f'images pass convolutions with a bias and no norm, and {layer.name!r} is something else')
    shapes.append(leaves[0])
  inputs = [channels, *((shape[0] if len(shape) == 2 else shape[3]) for shape in shapes)]
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
      return _fitted(features.reshape(-1, *shape, inputs[-1])[..., :channels], border, sample_shape)

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
    # A pixel is at most the least maximum, and at least the greatest minimum, of the four blocks that contain it.
    pixels = (-_widest(-high) + _widest(low)) / 2
    return _fitted(pixels, border + first - padding, sample_shape)

  return Passage(parameters, encode, decode)


def _side(shape, channels):
  """Returns the side of a square kernel, [features, side·side·C] or [side, side, C, features]."""
  side = math.isqrt(shape[1] // channels) if len(shape) == 2 else shape[0]
  if (shape != (shape[0], side * side * channels)) if len(shape) == 2 else (shape[:3] != (side, side, channels)):
    raise errors.UsageError(f'images pass square convolutions of {channels} channels, got a kernel of shape {shape}')
  return side


def _kernel(shape, channels, taps):
  """Returns the kernel of a convolution: zero, except for the taps (feature, row, column, channel, weight)."""
  kernel = np.zeros(shape, np.float32)
  side = _side(shape, channels)
  for feature, row, column, channel, weight in taps:
    if len(shape) == 2:
      kernel[feature, (column * side + row) * channels + channel] = weight
    else:
      kernel[row, column, channel, feature] = weight
  return kernel


def _interleaved(phases):
  """Returns [N, 2h, 2w, C], one entry per block of four pixels at each position, of the four phases [N, h, w, 4C]."""
  n, h, w, channels = phases.shape
  phases = phases.reshape(n, h, w, 2, 2, channels // 4).transpose(0, 1, 3, 2, 4, 5)
  return phases.reshape(n, 2 * h, 2 * w, channels // 4)


def _widest(blocks):
  """Returns the largest entry of the blocks that contain each pixel, [N, h + 1, w + 1, C]."""
  least = jnp.asarray(-jnp.inf, blocks.dtype)
  return jax.lax.reduce_window(blocks, least, jax.lax.max, (1, 2, 2, 1), (1, 1, 1, 1), ((0, 0), (1, 1), (1, 1), (0, 0)))


def _fitted(pixels, offset, sample_shape):
  """Returns an image with the pixels at (offset, offset); their edges are repeated up to its border."""
  pixels = pixels[:, max(-offset, 0) :, max(-offset, 0) :][:, : sample_shape[0], : sample_shape[1]]
  before = max(offset, 0)
  after = [max(n - before - m, 0) for n, m in zip(sample_shape[:2], pixels.shape[1:3], strict=True)]
  pixels = jnp.pad(pixels, ((0, 0), (before, after[0]), (before, after[1]), (0, 0)), mode='edge')
  return pixels[:, : sample_shape[0], : sample_shape[1]]


def soliton(count: int) -> np.ndarray:
  """Returns the robust soliton distribution of the degrees 1, …, count, float64 [count] (Luby 2002; c .05, δ .4)."""
  c, delta = _SOLITON
  degrees = np.arange(1, count + 1)
  ideal = np.where(degrees == 1, 1 / count, 1 / np.maximum(degrees * (degrees - 1), 1))
  spread = c * np.log(count / delta) * np.sqrt(count)
  pivot = int(np.clip(round(count / spread), 1, count))
  robust = np.where(degrees < pivot, spread / (count * degrees), 0.0)
  robust[pivot - 1] = max(spread * np.log(spread / delta) / count, 0)
  return (ideal + robust) / np.sum(ideal + robust)


def trap_weights(
  key: jax.Array,
  inputs: np.ndarray,
  neurons: int,
  batch_size: int,
  *,
  variant: str,
  scale: float = SCALE,
  stddev: float = 0.5,
  auxiliary: np.ndarray | None = None,
  kind: Modality = IMAGES,
) -> tuple[np.ndarray, np.ndarray]:
  """Returns (kernel float32 [inputs, neurons], bias float32 [neurons]) of the first dense layer.

  Args:
    key: draws the weights.
    inputs: bool [in], which inputs of the layer hold pixels in [0, 1]; the others are 0.
    neurons: number of neurons.
    batch_size: B.
    variant: 'mirrored': the positive weights of a neuron are its negative ones times −`scale`. 'independent': every
      weight is drawn from N(0, σ²), and positive ones are multiplied by `scale`. 'both': every other neuron is
      mirrored, the rest independent. The others draw weights from N(0, σ²)
      and set the bias at the quantile 1 − d/B of the pre-activation: 'qbi' with d = 1, the soliton variants with d
      drawn from `soliton`. 'qbi' and 'soliton_data' take the quantile over auxiliary images. 'soliton_free', and 'qbi'
      without such images, take that of a sum of independent pixels, uniform in [0, 1]:
      −b = Σw/2 + √(Σw²/12)·Φ⁻¹(1 − d/B). Entries without a range, such as those of standardised rows, have mean 0 and
      deviation 1.
    scale: s.
    stddev: σ.
    auxiliary: inputs of the layer for auxiliary images, [P, in].
    kind: the modality.

  Raises:
    UsageError: for 'soliton_data' without auxiliary images.
  """
  if variant == 'soliton_data' and auxiliary is None:
    raise errors.UsageError(
      'trap(variant=soliton_data) needs auxiliary samples: give public=(samples, targets) to gradleak.scenario, or '
      "take 'soliton_free'"
    )
  rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
  pixels = np.flatnonzero(inputs)
  weights = rng.normal(0, stddev, (neurons, pixels.size))
  bias = np.zeros(neurons)
  if variant in SIGNED:
    mirrored = {'mirrored': slice(None), 'independent': slice(0), 'both': slice(None, None, 2)}[variant]
    negative = -np.abs(weights[mirrored, : -(-pixels.size // 2)])
    halves = np.concatenate([negative, -scale * negative[:, : pixels.size // 2]], axis=1)
    weights = np.where(weights > 0, scale * weights, weights)
    weights[mirrored] = rng.permuted(halves, axis=1)
  else:
    degrees = np.ones(neurons) if variant == 'qbi' else 1 + rng.choice(batch_size, neurons, p=soliton(batch_size))
    # The share 1 − B/B = 0 has no finite quantile: at most B − ½ samples are taken.
    shares = 1 - np.minimum(degrees, batch_size - 0.5) / batch_size
    if auxiliary is None or variant == 'soliton_free':
      quantile = np.array([statistics.NormalDist().inv_cdf(share) for share in shares])
      mean, variance = (0, 1) if math.isinf(kind.box[1]) else (1 / 2, 1 / 12)
      bias = -mean * weights.sum(axis=1) - np.sqrt(variance * np.sum(weights**2, axis=1)) * quantile
    else:
      z = np.asarray(auxiliary, np.float64)[:, pixels] @ weights.T
      # 'hazen': halfway between the d-th and the next of B images.
      bias = -np.array([np.quantile(column, share, method='hazen') for column, share in zip(z.T, shares, strict=True)])
  kernel = np.zeros((len(inputs), neurons), np.float32)
  kernel[pixels] = weights.T
  return kernel, bias.astype(np.float32)


@server
def trap_server(*, variant: Annotated[str, Choice(VARIANTS)] = 'both', scale: Fraction = SCALE) -> Server:
  """The server that sets the first dense layer to trap weights, and the convolutions in front to pass the image on.

  Which signs are stronger depends on data and scale; docs/measurements.md has figures.

  'soliton_data' and 'qbi' take quantiles over the public images of the scenario. The key draws the weights. They have
  the standard deviation of those that they replace, so that the scale of the layer's output changes little; 0.5 is
  published.

  Args:
    variant, scale: see `trap_weights`.

  Raises (in `prepare`):
    UsageError: for a model whose convolutions cannot pass the image on to a
      hidden dense layer, one whose neurons are never silent, layers that are not sent, or 'soliton_data' without public
      images. When made: for a scale of a variant that has none.
  """
  _check_scale(variant, scale)

  def prepare(key: jax.Array, scenario: Scenario, batch_size: int) -> Scenario:
    model, params = scenario.client.model, scenario.variables['params']
    sample_shape = tuple(scenario.samples.shape[1:])
    layers = require(model, 'layers')(sample_shape)
    kernel, bias = first_dense_layer(layers, params)
    way = passage(layers, params, sample_shape)
    check_sent('trap', scenario, (*way.parameters, kernel, bias))
    variables = {**scenario.variables, 'params': replaced(params, way.parameters)}
    _check_passage(model, variables, (kernel, bias), way, sample_shape)
    honest = trees.get(params, kernel)
    weights, biases = trap_weights(
      key,
      way.encode(np.full((1, *sample_shape), 0.5, np.float32))[0] != 0,
      honest.shape[1],
      batch_size,
      variant=variant,
      scale=scale,
      stddev=float(np.std(honest)) or 0.5,
      auxiliary=None if scenario.public is None else way.encode(scenario.public[0]),
      kind=scenario.client.modality,
    )
    params = replaced(variables['params'], {kernel: weights, bias: biases})
    return scenario._replace(variables={**variables, 'params': params})

  return one_round(prepare)


def _check_scale(variant: str, scale: float | jax.Array) -> None:
  if variant not in SIGNED:
    errors.check_idle(f'to variant={variant!r}', {'scale': (scale, SCALE)})


def _check_passage(model, variables, paths, way, sample_shape):
  """Raises `UsageError` unless the input of the layer is that of the passage, and its neurons can be silent."""
  probe = jax.random.uniform(jax.random.key(0), (1, *sample_shape))

  @jax.jit
  def gradients(variables, probe):
    shape = trees.get(variables['params'], paths[0]).shape
    params = replaced(variables['params'], {paths[0]: jnp.zeros(shape), paths[1]: jnp.ones(shape[1])})

    def loss(params):
      logits, _ = model.apply({**variables, 'params': params}, probe, False, None)
      return jnp.sum(logits * jnp.arange(1, logits.shape[1] + 1, dtype=logits.dtype).reshape(1, -1))

    gradient = jax.grad(loss)(params)
    return tuple(trees.get(gradient, path) for path in paths)

  given = variables, probe
  if not np.allclose(
    first_dense_input(*gradients(*given)), way.encode(np.asarray(probe))[0], atol=tolerance(gradients, *given)
  ):
    raise errors.UsageError(
      f'the model {model.name!r} does not pass its samples on to the first dense layer: something in front of it, such '
      'as a stride, a sigmoid or a normalisation of the pixels, changes them; take a model such as mlp'
    )
  check_relu('trap', model, sample_shape, *paths)


def recover(
  update: tuple[jax.Array, jax.Array], sent: tuple[jax.Array, jax.Array], count: int, kind: Modality = IMAGES
) -> tuple[jax.Array, jax.Array]:
  """Returns inputs of the first dense layer, the surest first: (inputs [K, in], how many neurons agree on each [K]).

  A quotient of a neuron with entries outside the box of its modality is a mixture. Mixtures inside are found by
  agreement: neurons that hold the same image alone agree on it, while neurons that mix several have different
  quotients. An image that was found also activates other neurons, by the weights that were sent; these hold mixtures
  and come last. Among neurons that agree with no other, rows in the range of their table come first. Then come those
  with more contrast, since mixing lowers the contrast. Among neurons that agree, the one with the largest bias gradient
  is used.

  Args:
    update: of the layer, (kernel [in, neurons], bias [neurons]); a gradient or a delta.
    sent: the weights of the layer as sent, likewise.
    count: K, at most the number of neurons. If fewer inputs are found, the rest are zeros with an agreement of 0.
    kind: the modality.
  """
  inputs, alive = partial_reconstructions(*update)
  low, high = (jnp.asarray(end, inputs.dtype) for end in (kind.box[0] - _SLACK, kind.box[1] + _SLACK))
  valid = alive & (inputs.min(axis=1) >= low) & (inputs.max(axis=1) <= high)
  inputs = jnp.where(valid.reshape(-1, 1), inputs, jnp.zeros_like(inputs))
  agree = _equal(inputs) & valid.reshape(-1, 1) & valid.reshape(1, -1)
  support = jnp.sum(agree, axis=1, dtype=jnp.int32)
  beyond = beyond_range(inputs, kind)
  order = jnp.lexsort(
    (-inputs.std(axis=1), jnp.where(beyond <= jnp.asarray(_SLACK, beyond.dtype), 0, beyond), -support)
  )

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
  largest = jnp.argmax(jnp.where(agree, jnp.abs(update[1]).reshape(1, -1), 0), axis=1)
  support = jnp.where(last < 2, support, 0)[chosen]
  return jnp.where(support.reshape(-1, 1) > 0, inputs[largest[chosen]], jnp.zeros_like(inputs[:1])), support


def _equal(rows):
  """Returns bool [M, M], which of the rows [M, D] are equal up to `_EQUAL`; a row equals itself."""
  centred = rows - jnp.asarray(0.5, rows.dtype)
  squares = jnp.sum(centred**2, axis=1)
  products = jnp.matmul(centred, centred.T, precision=_EXACT)  # no array [M, M, D]
  distances = (squares.reshape(-1, 1) + squares.reshape(1, -1) - 2 * products) / rows.shape[1]
  return (distances <= _EQUAL**2) | jnp.eye(len(rows), dtype=bool)


@attack(
  citation='Boenisch, Dziedzic, Schuster, Shamsabadi, Shumailov, Papernot: When the Curious Abandon Honesty. '
  'EuroS&P 2023.',
  server=trap_server,
)
def trap(client: Client, *, variant: Annotated[str, Choice(VARIANTS)] = 'both', scale: Fraction = SCALE) -> Attack:
  r"""Trap weights (Boenisch et al. 2023 and later): reads the images that have a neuron of the trap layer to
  themselves.

  Closed-form. It returns as many images as the batch has samples, but at most one per neuron, the surest first. Images
  beyond those that were found are black. It returns no labels.

  Formula:
    w_{ji} = n_{ji} \cdot s^{[n_{ji} > 0]}, \; n_{ji} \sim \mathcal{N}(0, \sigma^2) \text{ (independent)}

    w_j^+ = -s \, w_j^- \text{ (mirrored)}, \quad \hat{x}_j = \Delta W_j / \Delta b_j

  Args:
    client: whose model the images pass.
    variant, scale: see `trap_server`.

  Raises:
    UsageError: for a scale of a variant that has none; when run, see `passage`.
  """
  _check_scale(variant, scale)

  def read(observation: Observation) -> tuple[jax.Array, None]:
    sample_shape = observation.batch_shape[1:]
    layers = require(client.model, 'layers')(sample_shape)
    paths = first_dense_layer(layers, observation.update)
    update, sent = (
      tuple(trees.get(t, p) for p in paths) for t in (observation.update, observation.variables['params'])
    )
    inputs, support = recover(update, sent, min(observation.batch_shape[0], update[1].shape[0]), client.modality)
    samples = passage(layers, observation.update, sample_shape).decode(inputs)
    found = support.reshape(-1, *[1] * (samples.ndim - 1)) > 0
    return jnp.where(found, samples, jnp.zeros_like(samples)), None  # behind a pooling, zeros decode to grey

  return closed_form(read, auxiliary_data=variant in ('soliton_data', 'qbi'))
