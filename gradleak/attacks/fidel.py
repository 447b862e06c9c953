"""Fidel: reads the private samples from the neurons of the first dense layer (Enthoven & Al-Ars 2021, section II).

For s = xW + b and any loss, `∂ℓ/∂W_j = x·∂ℓ/∂s_j` and `∂ℓ/∂b_j = ∂ℓ/∂s_j`, so that their quotient is the layer's input.
In a dense network that input is the image, in others the features of the convolutions. For a batch the quotient is a
mixture of inputs, weighted by the samples' shares in the neuron. It is a single input where all other shares are
negligible. A scale of the update cancels, so that the delta of one plain SGD step gives the same quotients as the
gradient. The delta of several batches and epochs gives mixtures over all of them.
"""

import math
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp

from gradleak.attacks import base
from gradleak.attacks.dense import entry, first_dense_layer, in_pixels
from gradleak.core import errors, trees
from gradleak.core.settings import Range
from gradleak.core.trees import Layer, Tree
from gradleak.federated import Client
from gradleak.modalities import Modality
from gradleak.models.model import Model, require
from gradleak.threat import Observation

# Reconstructions that correlate by this much are the same image; by the second, with noise on both.
_SAME, _ALIKE = 0.99, 0.95
Path = tuple[str, ...]


class PartialReconstructions(NamedTuple):
  """One reconstruction per neuron.

  Attributes:
    inputs: [neurons, in]; zeros for neurons without a gradient.
    alive: bool [neurons], whether there is one: a dead ReLU, or one that dropout removed, has none.
  """

  inputs: jax.Array
  alive: jax.Array


def partial_reconstructions(kernel_update: jax.Array, bias_update: jax.Array) -> PartialReconstructions:
  """Returns the `PartialReconstructions` ΔW_j / Δb_j of a dense layer.

  Args:
    kernel_update: [in, neurons], a gradient or a delta.
    bias_update: [neurons]. A neuron is alive where it is not zero and the quotient stays finite.
  """
  rows = kernel_update.T
  known = bias_update != 0
  inputs = rows / jnp.where(known, bias_update, jnp.ones_like(bias_update)).reshape(-1, 1)
  alive = known & jnp.isfinite(inputs).all(axis=1)
  return PartialReconstructions(_where_alive(alive, inputs), alive)


def up_to_scale(kernel_update: jax.Array) -> PartialReconstructions:
  """Returns the `PartialReconstructions` of a layer whose bias gradient is unknown: ΔW_j, its largest entry at ±1.

  Scale and sign are lost; compare images with them by the absolute value of the correlation.

  Args:
    kernel_update: [in, neurons], a gradient or a delta.
  """
  rows = kernel_update.T
  size = jnp.abs(rows).max(axis=1)
  alive = (size > 0) & jnp.isfinite(size)
  inputs = rows / jnp.where(alive, size, jnp.ones_like(size)).reshape(-1, 1)
  return PartialReconstructions(_where_alive(alive, inputs), alive)


def from_update(layers: Sequence[Layer], update: Tree, *, bias: bool = True) -> PartialReconstructions:
  """Returns the `PartialReconstructions` of a model's first dense layer.

  Args:
    layers: the model's, in forward order.
    update: a gradient or a delta, a tree shaped like its parameters.
    bias: whether the bias gradient is used.

  Raises:
    UsageError: if the model has no dense layer with a bias.
  """
  kernel, shares = (trees.get(update, path) for path in first_dense_layer(layers, update))
  return partial_reconstructions(kernel, shares) if bias else up_to_scale(kernel)


def combined(kernel_update: jax.Array, bias_update: jax.Array, sent: jax.Array | None = None) -> jax.Array:
  """Returns the input [in] of a single sample, from all neurons together (section II-B).

  The least-squares solution of ΔW_j = x·Δb_j, pixel by pixel over the neurons that sent it. It is less sensitive to
  noise than one neuron, and works where an upload drops some entries.

  Args:
    kernel_update: [in, neurons], a gradient or a delta.
    bias_update: [neurons].
    sent: bool [in, neurons], which entries of `kernel_update` were sent; None for all. Pixels that no neuron sent are
      zero.
  """
  sent = jnp.ones(kernel_update.shape, bool) if sent is None else sent
  return combined_groups(kernel_update, bias_update, sent, jnp.ones((1, len(bias_update)), bool))[0]


def combined_groups(kernel_update: jax.Array, bias_update: jax.Array, sent: jax.Array, groups: jax.Array) -> jax.Array:
  """Returns the input of each of G groups of neurons, [G, in], as `combined` finds it.

  Args:
    kernel_update, bias_update, sent: as `combined` takes them.
    groups: bool [G, neurons], the neurons of each group.
  """
  size = jnp.abs(bias_update).max()
  shares = bias_update / jnp.where(size > 0, size, jnp.ones_like(size))  # so that squares do not overflow or underflow
  shares = jnp.where(sent, shares.reshape(1, -1), jnp.zeros_like(kernel_update))
  members = groups.T.astype(kernel_update.dtype)
  exact = jax.lax.Precision.HIGHEST
  squares = jnp.matmul(shares**2, members, precision=exact).T
  products = jnp.matmul(kernel_update * shares, members, precision=exact).T
  known = squares > 0
  return jnp.where(known, products / jnp.where(known, squares * size, jnp.ones_like(squares)), jnp.zeros_like(products))


def _where_alive(alive: jax.Array, inputs: jax.Array) -> jax.Array:
  return jnp.where(alive.reshape(-1, 1), inputs, jnp.zeros_like(inputs))


CITATION = 'Enthoven, Al-Ars: Fidel: Reconstructing Private Training Samples from Weight Updates. 2021.'


@base.attack(citation=CITATION)
def fidel(
  client: Client, *, bias: bool = True, combine: bool = False, candidates: Annotated[int, Range(0)] = 0
) -> base.Attack:
  r"""Fidel (Enthoven & Al-Ars 2021) on a network whose first dense layer takes the image: one image per neuron.

  Images in [0, 1], or rows in the range of their table, come first, among them those with the largest bias gradient.
  Those that repeat an earlier one come last. Closed-form; it returns no labels.

  Formula:
    \hat{x}_j = \Delta W_j / \Delta b_j \text{ for each neuron } j, \quad \text{combined: } \hat{x} =
    \frac{\sum_j \Delta b_j \, \Delta W_j}{\sum_j \Delta b_j^2}

  Args:
    client: the `Client` whose model is attacked.
    bias: whether the bias gradient is used; without it, images are known up to scale. Their sign is that of their mean.
    combine: whether neurons that hold the same image are combined by least squares over the entries that are not zero
      (`combined`): for a noisy update, or one that drops entries. A single sample is in all neurons alike; of a
      batch, those belong together whose reconstructions correlate by 0.95. It needs the bias gradient.
    candidates: images returned per private one; 0 for one per neuron, as published. A mixture of rows often lies in the
      range of their table, where one of images leaves [0, 1]. With 1, mixtures then take the places of rows.

  Raises:
    UsageError: for neurons that are combined without the bias gradient; when run, for a model whose first dense layer
      does not take the image, or a client that does not share this layer.
  """
  if combine and not bias:
    raise errors.UsageError('combine weighs neurons by the bias gradient: it is not for bias=False')

  def read(observation: Observation) -> tuple[jax.Array, None]:
    kernel, shares = found = image_layer(client.model, observation)
    base.require_sent('fidel', client, observation, found if bias else found[:1])
    seen = in_pixels(client.model, observation) if bias else observation
    sent, number = trees.get(observation.update, kernel) != 0, observation.batch_shape[0]
    inputs, order = _read(
      trees.get(seen.update, kernel), trees.get(seen.update, shares), sent, bias, combine, number, client.modality
    )
    return inputs[order[: candidates * number or None]], None

  return base.closed_form(read)._replace(signed=bias)


def _read(
  kernel: jax.Array, shares: jax.Array, sent: jax.Array, bias: bool, combine: bool, number: int, kind: Modality
) -> tuple[jax.Array, jax.Array]:
  """Returns (reconstructions [neurons, in], or [1, in] of a single sample combined; their order, the surest first).

  Args:
    kernel, shares: the update of the layer's kernel [in, neurons] and bias [neurons].
    sent: bool [in, neurons], the entries of the kernel that are not dropped.
    bias, combine: as `fidel` takes them.
    number: private samples behind the update.
    kind: the modality.
  """
  inputs, alive = partial_reconstructions(kernel, shares) if bias else up_to_scale(kernel)
  if not bias:
    shares = jnp.abs(kernel).max(axis=0)
    inputs = inputs * jnp.where(inputs.mean(axis=1, keepdims=True) < 0, -1.0, 1.0).astype(inputs.dtype)
  if combine:
    if number == 1:
      return combined(kernel, shares, sent).reshape(1, -1), jnp.zeros(1, jnp.int32)
    alike = (_correlations(inputs) >= _ALIKE) & alive.reshape(1, -1) & alive.reshape(-1, 1)
    inputs = combined_groups(kernel, shares, sent, alike)
  return inputs, surest_first(inputs, shares, alive, kind)


def image_layer(model: Model, observation: Observation) -> tuple[Path, Path]:
  """Returns the paths of the (kernel, bias) of the first dense layer.

  Raises:
    UsageError: if there is none, or its input is not the image, value by value in its order, or a norm changes that.
  """
  layers = require(model, 'layers')(observation.batch_shape[1:])
  found = first_dense_layer(layers, observation.update)
  size, pixels = trees.get(observation.update, found[0]).shape[0], math.prod(observation.batch_shape[1:])
  if size != pixels:
    raise errors.UsageError(
      f'the first dense layer takes {size} features, not the {pixels} values of a sample: this attack reads samples of '
      'networks that begin with a dense layer, such as mlp'
    )
  within = found[0][:-1]
  before = (layer for layer in layers if trees.get(observation.update, layer.paths[0]).ndim > 1)  # behind any norm
  # Matrices of a module that holds the dense layer stand first, wherever it uses them.
  first = next(layer for layer in before if found[0] in layer.paths or not _holds(layer.paths[0][:-1], within))
  if found[0] not in first.paths:
    raise errors.UsageError(
      f'the layer {first.name!r} before the first dense layer with a bias is no such layer: this attack reads samples '
      'of networks that begin with one, such as mlp'
    )
  seen = entry(model, observation.batch_shape[1:], *found)
  if not seen.in_order:
    raise errors.UsageError(
      f'the model {model.name!r} does not pass its samples on to the first dense layer value by value, in the order of '
      'rows, columns and channels: what this attack reads would be taken for other pixels; flatten samples as they are'
    )
  if not seen.fixed:
    raise errors.UsageError(
      f'the model {model.name!r} changes its samples by parameters or statistics, such as those of a BatchNorm, before '
      'the first dense layer: what this attack reads is no pixel, nor a fixed function of one'
    )
  return found


def _holds(outer: tuple[str, ...], inner: tuple[str, ...]) -> bool:
  """Returns whether one module stands inside of another one, by their paths."""
  return len(outer) < len(inner) and inner[: len(outer)] == outer


def surest_first(inputs: jax.Array, shares: jax.Array, alive: jax.Array, kind: Modality) -> jax.Array:
  """Returns the order of the partial reconstructions, int32 [neurons]; those that repeat an earlier one come last.

  Args:
    inputs: [neurons, in].
    shares: [neurons], the bias gradient; rounding matters least where it is large.
    alive: bool [neurons].
    kind: the modality.
  """
  beyond = beyond_range(inputs, kind)
  order = jnp.lexsort((-jnp.abs(shares), jnp.where(beyond <= 1e-3, 0, beyond), ~alive))
  earlier = jnp.tril(jnp.ones((len(order), len(order)), bool), -1)
  repeats = jnp.any(earlier & (_correlations(inputs[order]) >= _SAME), axis=1)
  return order[jnp.argsort(repeats | ~alive[order], stable=True)]


def _correlations(rows: jax.Array) -> jax.Array:
  """Returns the correlation of each two rows of [K, in], [K, K]; 0 for a constant one."""
  centred = rows - rows.mean(axis=1, keepdims=True)
  norm = jnp.linalg.norm(centred, axis=1, keepdims=True)
  unit = centred / jnp.where(norm > 0, norm, jnp.ones_like(norm))
  return unit @ unit.T


def beyond_range(inputs: jax.Array, kind: Modality) -> jax.Array:
  """Returns by how much each of [K, in] leaves the range of a modality's samples at most, [K]; 0 within."""
  return jnp.max(jnp.abs(inputs - kind.settle(inputs)), axis=1)
