"""Building blocks: layers, pooling, initialisations, activations."""

import math

import jax
import jax.numpy as jnp
from flax import linen as nn

from gradleak import errors
from gradleak.models import convolution

ACTIVATIONS = {
  'sigmoid': jax.nn.sigmoid,
  'relu': jax.nn.relu,
  'tanh': jnp.tanh,
  'leaky_relu': jax.nn.leaky_relu,
  'gelu': jax.nn.gelu,
  'identity': lambda x: x,
}


def activation(name):
  """Returns the activation called `name`. Raises `UsageError` for an unknown one."""
  if name not in ACTIVATIONS:
    raise errors.unknown('activation', name, ACTIVATIONS)
  return ACTIVATIONS[name]


def _uniform(bound):
  def initialise(key, shape, dtype=jnp.float32):
    return jax.random.uniform(key, shape, dtype, minval=-bound, maxval=bound)

  return initialise


def _explicit(fan_in):
  del fan_in  # DLG's weights are U(−0.5, 0.5) whatever the layer's size
  return _uniform(0.5)


def _default(fan_in):
  return _uniform(1 / math.sqrt(fan_in))


INITS = {'explicit': _explicit, 'default': _default}


def initialiser(name):
  """Returns fan_in -> initialiser of weights and biases.

  `explicit` is U(−0.5, 0.5) on both, as in DLG's published code (Zhu et al. 2019); `default` is U(±1/√fan_in) on both,
  as PyTorch's layers start.
  """
  if name not in INITS:
    raise errors.unknown('init', name, INITS)
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
  formulation: str = 'patches'
  bias: bool = True

  @nn.compact
  def __call__(self, images):
    fan_in = self.size * self.size * images.shape[-1]
    initialise = initialiser(self.initial)(fan_in)
    kernel = self.param('kernel', initialise, (self.features, fan_in))
    convolve = convolution.FORMULATIONS[self.formulation]
    outputs = convolve(images, kernel, self.size, self.stride, self.padding)
    if self.bias:
      outputs += self.param('bias', initialise, (self.features,)).reshape(1, 1, 1, -1)
    return outputs


class Dense(nn.Module):
  """A dense layer with kernel [in, out], as Flax's, under this project's initialisations."""

  features: int
  initial: str

  @nn.compact
  def __call__(self, inputs):
    initialise = initialiser(self.initial)(inputs.shape[-1])
    kernel = self.param('kernel', initialise, (inputs.shape[-1], self.features))
    bias = self.param('bias', initialise, (self.features,))
    return inputs @ kernel + bias.reshape(1, -1)


def max_pool(images, size):
  """Non-overlapping max pooling; a remainder at the right and lower border is dropped.

  The winner of each window is marked first, and takes the whole gradient. That of `max` compares the pixels with
  the maximum once more; where XLA has computed them anew with other rounding, none wins, and the gradient is 0/0.
  """
  batch, height, width, channels = images.shape
  height, width = height // size, width // size
  images = images[:, : height * size, : width * size]
  windows = images.reshape(batch, height, size, width, size, channels).transpose(0, 1, 3, 5, 2, 4)
  windows = windows.reshape(batch, height, width, channels, size * size)
  winner = jax.nn.one_hot(jnp.argmax(windows, axis=-1), size * size, dtype=images.dtype)
  return jnp.sum(windows * winner, axis=-1)


def flatten(images):
  """Returns [N, H·W·C]. PyTorch flattens C·H·W: dense weights are a permutation of theirs."""
  return images.reshape(images.shape[0], -1)
