"""Building blocks: layers, pooling, initialisations, activations."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from gradleak.core import errors
from gradleak.models import convolution

_FAR = -1e9  # a score that softmax turns into 0; finite, so that a row of them has a gradient

Initialiser = Callable[..., jax.Array]  # (key, shape, dtype=float32) -> values

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
  'sigmoid': jax.nn.sigmoid,
  'relu': jax.nn.relu,
  'tanh': jnp.tanh,
  'leaky_relu': jax.nn.leaky_relu,
  'gelu': jax.nn.gelu,
  'identity': lambda x: x,
}


def activation(name: str) -> Callable[[jax.Array], jax.Array]:
  """Returns the activation called `name`. Raises `UsageError` for an unknown one."""
  errors.check_choice('activation', name, ACTIVATIONS)
  return ACTIVATIONS[name]


def _uniform(bound: float) -> Initialiser:
  def initialise(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    return jax.random.uniform(key, shape, dtype, minval=-bound, maxval=bound)

  return initialise


def _explicit(fan_in: int) -> Initialiser:
  del fan_in  # DLG draws from U(−0.5, 0.5) in layers of any size
  return _uniform(0.5)


def _default(fan_in: int) -> Initialiser:
  return _uniform(1 / math.sqrt(fan_in))


INITS: dict[str, Callable[[int], Initialiser]] = {'explicit': _explicit, 'default': _default}


def initialiser(name: str) -> Callable[[int], Initialiser]:
  """Returns fan_in -> initialiser of weights and biases.

  Args:
    name: 'explicit' draws both from U(−0.5, 0.5), as DLG's published code (Zhu et al. 2019); 'default' from
      U(±1/√fan_in), as PyTorch's layers.

  Raises:
    UsageError: for an unknown name.
  """
  errors.check_choice('init', name, INITS)
  return INITS[name]


class Conv(nn.Module):
  """A square 2-D convolution whose kernel is a matrix [features, size·size·C], ordered (column, row, channel).

  All `convolution.FORMULATIONS` compute the same function of the same parameters.
  """

  features: int
  size: int
  initial: str
  stride: int = 1
  padding: int = 0
  formulation: str = 'hybrid'
  bias: bool = True

  @nn.compact
  def __call__(self, images: jax.Array) -> jax.Array:
    fan_in = self.size * self.size * images.shape[-1]
    initialise = initialiser(self.initial)(fan_in)
    kernel = self.param('kernel', initialise, (self.features, fan_in))
    convolve = convolution.FORMULATIONS[self.formulation]
    outputs = convolve(images, kernel, self.size, self.stride, self.padding)
    if self.bias:
      outputs += self.param('bias', initialise, (self.features,)).reshape(1, 1, 1, -1)
    return outputs


class Dense(nn.Module):
  """A dense layer with kernel [in, out] on the last axis, like Flax's, with an initialisation of `INITS`."""

  features: int
  initial: str

  @nn.compact
  def __call__(self, inputs: jax.Array) -> jax.Array:
    initialise = initialiser(self.initial)(inputs.shape[-1])
    kernel = self.param('kernel', initialise, (inputs.shape[-1], self.features))
    bias = self.param('bias', initialise, (self.features,))
    return inputs @ kernel + bias.reshape(*[1] * (inputs.ndim - 1), -1)


@jax.jit
def largest(windows: jax.Array) -> jax.Array:
  """Returns the maximum along the last axis, whose first place gets the whole gradient.

  The gradient of `jnp.max` would compare the entries with the maximum again. If XLA recomputes them with different
  rounding, none equals it, and the gradient is 0/0. It is compiled by its name, by which `soft_slopes` knows it.
  """
  winner = jax.nn.one_hot(jnp.argmax(windows, axis=-1), windows.shape[-1], dtype=windows.dtype)
  return jnp.sum(windows * winner, axis=-1)


def max_pool(images: jax.Array, size: int) -> jax.Array:
  """Returns non-overlapping max pooling [N, H // size, W // size, C]; remaining rows and columns are dropped.

  The first maximum of each window gets the whole gradient.
  """
  batch, height, width, channels = images.shape
  height, width = height // size, width // size
  images = images[:, : height * size, : width * size]
  windows = images.reshape(batch, height, size, width, size, channels).transpose(0, 1, 3, 5, 2, 4)
  windows = windows.reshape(batch, height, width, channels, size * size)
  return largest(windows)


def overlapping_max_pool(images: jax.Array, size: int, stride: int, padding: int) -> jax.Array:
  """Returns max pooling [N, H', W', C] with H' = (H + 2·padding − size) // stride + 1, as PyTorch's.

  Padded pixels are never the maximum. As in `max_pool`, the first one of each window, row by row, gets the gradient.
  """
  lowest = jnp.finfo(images.dtype).min
  margin = (padding, padding)
  images = jnp.pad(images, ((0, 0), margin, margin, (0, 0)), constant_values=lowest)
  height, width = ((side - size) // stride * stride + 1 for side in images.shape[1:3])
  windows = jnp.stack(
    [images[:, i : i + height : stride, j : j + width : stride] for i in range(size) for j in range(size)], axis=-1
  )
  return largest(windows)


def flatten(images: jax.Array) -> jax.Array:
  """Returns [N, H·W·C]. PyTorch flattens C·H·W, so dense weights are a permutation of PyTorch's."""
  return images.reshape(images.shape[0], -1)


def attention(
  query: jax.Array, key: jax.Array, value: jax.Array, heads: int, seen: jax.Array | None = None
) -> jax.Array:
  """Returns softmax(q·kᵀ/√d)·v for each of `heads` parts of the last axis, each of size d.

  The softmax is of at least float32.

  Args:
    query, key, value: [N, T, heads·d].
    heads: number of parts.
    seen: which keys a query takes, bool [N or 1, T of queries or 1, T of keys]; None for all.
  """
  query, key, value = (x.reshape(*x.shape[:2], heads, -1) for x in (query, key, value))
  scores = jnp.einsum('nqhd,nkhd->nhqk', query * query.shape[-1] ** -0.5, key)
  wide = scores.dtype if jnp.finfo(scores.dtype).bits >= 32 else jnp.float32
  scores = scores.astype(wide)
  if seen is not None:
    scores = jnp.where(seen[:, jnp.newaxis], scores, jnp.asarray(_FAR, wide))
  mixed = jnp.einsum('nhqk,nkhd->nqhd', jax.nn.softmax(scores, axis=-1).astype(value.dtype), value)
  return mixed.reshape(*mixed.shape[:2], -1)
