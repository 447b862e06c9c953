"""Blind source separation: images out of the mixtures that a dense layer's neurons hold.

Fidel (Enthoven & Al-Ars 2021) reads a sample where a neuron holds it alone, and proposes to separate the others. Each
row of a dense layer's gradient is a mixture of the batch's N inputs,

  ∂L/∂W_j = Σ_i s_ij x_i  and  ∂L/∂b_j = Σ_i s_ij,

so that the rows, each with its bias gradient appended, are S [X, 1]: N unknown sources whose last entry is 1. A method
that finds a source up to a factor can therefore tell the factor, and with it scale and sign, without the truth.

Blind methods assume something of the sources. FastICA assumes that they are independent, and NMF that they are not
negative. The Cocktail Party Attack (Kariyappa et al., ICML 2023) assumes that they are smooth. For these a delta of one
plain SGD step is as good as a gradient. Ours, `alternating`, assumes nothing of images: it computes the fraction of
each image from the known network.
"""

import math
import warnings
from collections.abc import Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradleak.attacks.dense import entry, first_dense_layer
from gradleak.attacks.fidel import from_update
from gradleak.attacks.labels import last_layer, of_counts
from gradleak.core import errors, trees
from gradleak.core.promotion import promoting
from gradleak.core.settings import Count, Fraction, Range, ranged
from gradleak.core.trees import Tree
from gradleak.federated import Client
from gradleak.models.model import per_example_loss, require

_GAUSSIAN = 0.37456  # the mean of log cosh of a standard normal variable
_Weight = Annotated[float, Range(0)]
_SLACK = 1e-3  # how far a mixture may leave the range of pixels by rounding


@ranged
def fast_ica(
  kernel_update: Any, bias_update: Any, batch_size: Count, *, iterations: Count = 400, seed: int = 0
) -> np.ndarray:
  """Returns the sources that FastICA (scikit-learn, log cosh) finds, float64 [K, in], K ≤ N; on the host.

  Args:
    kernel_update: [in, neurons], a gradient or a delta. Pixels are the observations, neurons the channels.
    bias_update: [neurons].
    batch_size: N. K is the rank of the rows at their precision, if that is less.
    iterations: the most; the separation is then used whether or not it has converged.
    seed: of the start.
  """
  from sklearn.decomposition import FastICA

  rows, count = _scaled_rows(kernel_update, bias_update, batch_size)
  if count < 2:
    return _scaled(rows[:count])
  ica = FastICA(count, whiten='unit-variance', whiten_solver='svd', max_iter=iterations, random_state=seed)
  with warnings.catch_warnings():
    warnings.simplefilter('ignore')  # that it has not converged
    ica.fit(rows[:, :-1].T)
  return _scaled(ica.components_ @ rows)


@ranged
def nmf(
  kernel_update: Any, bias_update: Any, batch_size: Count, *, iterations: Count = 400, seed: int = 0
) -> np.ndarray:
  """Returns the sources of a non-negative matrix factorisation (scikit-learn), float64 [K, in], K ≤ N; on the host.

  It uses the neurons whose quotient ∂W_j/∂b_j lies in the range of pixels, since mixtures with weights of both signs
  may be negative. Arguments as of `fast_ica`.
  """
  from sklearn.decomposition import NMF

  rows, count = _scaled_rows(kernel_update, bias_update, batch_size)
  with np.errstate(all='ignore'):
    quotients = rows / rows[:, -1:]
    inside = (quotients >= -_SLACK).all(axis=1) & (quotients <= 1 + _SLACK).all(axis=1)
  mixtures = np.maximum(quotients[inside], 0)
  count = min(count, len(mixtures))
  if count < 2:
    return _scaled(mixtures[:count])
  factors = NMF(count, init='nndsvda', max_iter=iterations, random_state=seed)
  with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    factors.fit(mixtures)
  return _scaled(factors.components_)


@ranged
def cocktail_party(
  kernel_update: jax.Array,
  bias_update: jax.Array,
  sample_shape: tuple[int, int, int, int],
  *,
  steps: Count = 25_000,
  learning_rate: _Weight = 1e-3,
  tv: _Weight = 3.1,
  decorrelation: _Weight = 1.47,
  temperature: _Weight = 12.4,
  negentropy: _Weight = 0.0,
) -> jax.Array:
  """Returns the sources that the Cocktail Party Attack finds (Kariyappa et al. 2023, section 4), [N, in]. Pure JAX.

  The rows are centred and whitened; Adam finds a square unmixing matrix with rows of length 1. The total variation
  separates the sources. The published code adds E[log cosh s]² as negentropy, which does not measure the distance from
  a normal variable's 0.37. Here it is (E[log cosh s] − 0.37)² (Hyvärinen & Oja 2000, eq. 25), and off by default. The
  published code chooses signs by the truth and scales by each image's range; here both follow from the bias gradient.

  Args:
    kernel_update: [in, neurons], a gradient or a delta.
    bias_update: [neurons].
    sample_shape: (N, H, W, C); in = H·W·C, N at most the number of neurons.
    steps, learning_rate: of Adam.
    tv: the weight of the mean absolute difference of neighbouring pixels.
    decorrelation: the weight of exp(temperature · |cos|) − 1, averaged over pairs of rows of the unmixing matrix. The
      published weight was found for 128 samples; for a few it is too large, and 0.1 works.
    temperature: in the same term.
    negentropy: the weight of the negentropy, which is maximised.

  Raises:
    UsageError: for more samples than neurons.
  """
  count = _enough('cocktail_party', sample_shape[0], kernel_update.T)
  rows = jnp.concatenate([kernel_update.T, bias_update.reshape(-1, 1)], axis=1)
  rows = rows / _safe(jnp.abs(rows).max())
  centred = rows[:, :-1] - rows[:, :-1].mean(axis=1, keepdims=True)
  left, values, right = jnp.linalg.svd(centred, full_matrices=False)
  precision = jnp.finfo(rows.dtype).eps * max(rows.shape)
  values = _safe(jnp.maximum(values[:count], values[0] * precision))
  pixels = jnp.asarray(rows.shape[1] - 1, rows.dtype)
  whitened = jnp.sqrt(pixels) * right[:count]
  whitening = jnp.sqrt(pixels) * left[:, :count].T / values.reshape(-1, 1)
  observed = whitening @ rows  # not centred, and with the bias gradient
  off_diagonal = 1 - jnp.eye(count, dtype=rows.dtype)
  pairs = jnp.asarray(max(count * (count - 1), 1), rows.dtype)

  def loss(unmixing: jax.Array) -> jax.Array:
    unit = unmixing / jnp.linalg.norm(unmixing, axis=1, keepdims=True)
    images = (unit @ observed[:, :-1]).reshape(sample_shape)
    down, across = trees.magnitude(jnp.diff(images, axis=1)), trees.magnitude(jnp.diff(images, axis=2))
    alike = jnp.sum(off_diagonal * jnp.expm1(temperature * trees.magnitude(unit @ unit.T))) / pairs
    sources = unit @ whitened
    log_cosh = jnp.mean(jnp.logaddexp(sources, -sources), axis=1) - jnp.asarray(np.log(2), rows.dtype)
    gaussianity = jnp.mean((log_cosh - _GAUSSIAN) ** 2)
    return tv * (jnp.mean(down) + jnp.mean(across)) + decorrelation * alike - negentropy * gaussianity

  optimizer = promoting(optax.adam(learning_rate))

  def one_step(_: jax.Array, carry: tuple) -> tuple:
    unmixing, state = carry
    updates, state = optimizer.update(jax.grad(loss)(unmixing), state, unmixing)
    return optax.apply_updates(unmixing, updates), state

  start = jnp.eye(count, dtype=rows.dtype)
  unmixing, _ = jax.lax.fori_loop(jnp.int32(0), jnp.int32(steps), one_step, (start, optimizer.init(start)))
  sources = unmixing @ observed
  return sources[:, :-1] / _safe(sources[:, -1:])


@ranged
def alternating(
  key: jax.Array,
  client: Client,
  variables: Tree,
  update: Tree,
  targets: jax.Array,
  sample_shape: tuple[int, int, int, int],
  *,
  steps: Count = 120,
  damping: Fraction = 0.5,
  ridge: _Weight = 1e-2,
) -> jax.Array:
  """Returns the sources that agree with the shares which the network gives them, [N, in]; ours. Pure JAX.

  The weights are known. The shares of images follow from one backward pass each. The images follow from their shares by
  least squares over the neurons, ∂L/∂W = Sᵀ X. Starting from noise, both are computed in turn, with steps that become
  smaller. In an untrained network a rough image has nearly the true shares, which depend mostly on the neurons that it
  activates. In a trained network shares span orders of magnitude, and the start is too far from the solution.

  Args:
    key: of the noise.
    client: the `Client`; its model begins with a dense layer, its loss is the batch's mean.
    variables: the model's, at which the gradient was taken.
    update: the gradient, a tree shaped like the parameters.
    targets: of the samples in any order, probabilities [N, classes]; it fails if half of them are wrong, see
      `counted_labels`.
    sample_shape: (N, H, W, C), N at most the number of neurons.
    steps: how many turns.
    damping: how far the first turn goes towards the solution; the last goes a tenth of that.
    ridge: of the least squares, relative to the shares' norms; it slows samples with small shares.

  Raises:
    UsageError: for more samples than neurons, a first dense layer that sees no image, or a model that changes its
      pixels.
  """
  layers = _layers('alternating', client, sample_shape[1:], update)
  found = first_dense_layer(layers, update)
  rows = trees.get(update, found[0]).T
  count = _enough('alternating', sample_shape[0], rows)

  def shares(image: jax.Array, label: jax.Array) -> jax.Array:
    def of_params(params: Tree) -> jax.Array:
      given = {**variables, 'params': params}, image.reshape(1, *sample_shape[1:]), label.reshape(1, -1)
      return jnp.sum(per_example_loss(client.model, client.loss, *given)[0])

    return trees.get(jax.grad(of_params)(variables['params']), found[1]) / jnp.asarray(count, rows.dtype)

  def one_turn(turn: jax.Array, images: jax.Array) -> jax.Array:
    held = jax.vmap(shares)(images, targets).T
    size = jnp.linalg.norm(held, axis=0)
    size = jnp.maximum(size, jnp.maximum(1e-6 * size.max(), jnp.finfo(rows.dtype).tiny))
    unit = held / size.reshape(1, -1)
    normal = unit.T @ unit + ridge * jnp.eye(count, dtype=rows.dtype)
    towards = jax.scipy.linalg.solve(normal, unit.T @ (rows - held @ images), assume_a='pos') / size.reshape(-1, 1)
    rate = damping * jnp.asarray(0.1, rows.dtype) ** (turn.astype(rows.dtype) / max(steps - 1, 1))
    return jnp.clip(images + rate * towards, 0, 1)

  start = jax.random.uniform(key, (count, rows.shape[1]), rows.dtype)
  return jax.lax.fori_loop(jnp.int32(0), jnp.int32(steps), one_turn, start)


def counted_labels(client: Client, variables: Tree, update: Tree, sample_shape: tuple[int, int, int, int]) -> jax.Array:
  """Returns the labels of a batch, sorted, int32 [N]; pure JAX.

  The last bias's gradient is mean_i(p_ic − y_ic), so that the batch has N·(mean_i p_ic − ∂b_c) samples of class c. The
  mean prediction is estimated on Fidel's quotients in the range of pixels, which are mixtures of the batch's images.
  Where the network predicts some classes more often than others, this is more accurate than the rules of
  `attacks.targets`, which use no images.

  Args:
    client: the `Client`, of mean cross-entropy; its model begins with a dense layer.
    variables: the model's, at which the gradient was taken.
    update: the gradient.
    sample_shape: (N, H, W, C).

  Raises:
    UsageError: for a model that changes its pixels, whose first dense layer sees no image, or whose last layer has no
      bias.
  """
  count, *shape = sample_shape
  quotients, alive = from_update(_layers('counted_labels', client, shape, update), update)
  inside = alive & (quotients >= -_SLACK).all(axis=1) & (quotients <= 1 + _SLACK).all(axis=1)
  inside = jnp.where(inside.any(), inside, jnp.ones_like(inside))
  logits, _ = client.model.apply(variables, jnp.clip(quotients, 0, 1).reshape(-1, *shape), False, None)
  weights = inside.astype(logits.dtype).reshape(-1, 1)
  predicted = jnp.sum(weights * jax.nn.softmax(logits), axis=0) / jnp.sum(weights)
  _, bias = last_layer(client.model, update, tuple(shape), client.num_classes)
  if bias is None:
    raise errors.UsageError(
      f'counted labels are read from the bias of the last layer, and {client.model.name!r} has none'
    )
  return of_counts(predicted - bias, count)


def _layers(method: str, client: Client, shape: Sequence[int], update: Tree) -> Sequence[trees.Layer]:
  """Returns the layers of a network whose first one takes pixels in [0, 1], in their order."""
  layers = require(client.model, 'layers')(tuple(shape))
  found = first_dense_layer(layers, update)
  size = len(trees.get(update, found[0]))
  if size != math.prod(shape):
    raise errors.UsageError(f'the first dense layer takes {size} features, not a sample of {tuple(shape)}')
  seen = entry(client.model, tuple(shape), *found)
  if seen.normalised is not None or not seen.in_order:
    raise errors.UsageError(
      f'{method} takes a model whose first layer sees pixels in [0, 1]; {client.model.name} changes them'
    )
  return layers


def _scaled_rows(kernel_update: Any, bias_update: Any, batch_size: int) -> tuple[np.ndarray, int]:
  """Returns the rows of neurons that have a gradient, with their bias gradients, scaled, float64; and the rank or N."""
  precision = np.finfo(np.asarray(kernel_update).dtype).eps
  rows = np.concatenate([np.asarray(kernel_update, np.float64).T, np.asarray(bias_update, np.float64)[:, None]], axis=1)
  rows = rows[np.isfinite(rows).all(axis=1) & rows.any(axis=1)]
  values = np.linalg.svd(rows, compute_uv=False) if len(rows) else np.zeros(1)
  rank = int(np.sum(values > precision * max(rows.shape) * values.max()))
  return rows / max(values.max(), np.finfo(np.float64).tiny), min(batch_size, rank)


def _safe(x: jax.Array) -> jax.Array:
  return jnp.where(x == 0, jnp.ones_like(x), x)


def _scaled(sources: np.ndarray) -> np.ndarray:
  """Returns sources [K, in + 1] as images [K, in], divided by their last entry unless that is 0."""
  last = sources[:, -1:]
  return sources[:, :-1] / np.where(last == 0, 1, last)


def _enough(method: str, count: int, rows: jax.Array) -> int:
  """Returns the number of samples; raises `UsageError` if rows [neurons, in] cannot separate so many."""
  if count > min(rows.shape):
    raise errors.UsageError(f'{method} separates at most {min(rows.shape)} samples here, got {count}')
  return count
