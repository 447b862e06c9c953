"""An untrained convolutional network as a prior: what it finds first are images, not noise.

CI-Net optimises the weights of a generator that makes the images of a batch. Each image has a latent of its own, which
stays as it was drawn. Source: Zhang et al., Generative Gradient Inversion via Over-Parameterized Networks in Federated
Learning, ICCV 2023. The generator has seen no image before; its prior is in the architecture (Ulyanov et al., Deep
Image Prior, CVPR 2018).
"""

import functools
import math

import jax
import jax.numpy as jnp
from flax import linen as nn

from gradleak.core import errors
from gradleak.core.trees import Tree
from gradleak.models import layers
from gradleak.priors.base import Generator

LATENT = 128  # numbers of which an image is made
_GRID = 4  # pixels on the longer side before the first doubling, at most
_NARROWEST = 32  # channels
_SLOPE = 0.1  # of the leaky ReLU


class BatchStatistics(nn.Module):
  """BatchNorm in train mode, without running averages: each channel by its mean and variance over [N, H, W]."""

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns x [N, H, W, C], normalised, times a scale and plus a bias for each channel."""
    scale = self.param('scale', nn.initializers.ones, x.shape[-1:])
    bias = self.param('bias', nn.initializers.zeros, x.shape[-1:])
    centred = x - jnp.mean(x, axis=(0, 1, 2), keepdims=True)
    variance = jnp.mean(jnp.square(centred), axis=(0, 1, 2), keepdims=True)
    return centred * jax.lax.rsqrt(variance + 1e-5) * scale.reshape(1, 1, 1, -1) + bias.reshape(1, 1, 1, -1)


class Network(nn.Module):
  """A dense layer to a small grid, blocks that double its sides, a convolution and a sigmoid.

  Attributes:
    channels: of the images.
    width: channels of all layers before.
    grid: (rows, columns) before the first doubling.
    doublings: number of blocks.
  """

  channels: int
  width: int
  grid: tuple[int, int]
  doublings: int

  @nn.compact
  def __call__(self, latents: jax.Array) -> jax.Array:
    """Returns images in [0, 1] of latents [N, 128]."""
    convolve = functools.partial(layers.Conv, size=3, initial='default', padding=1)
    rows, columns = self.grid
    x = layers.Dense(rows * columns * self.width, 'default')(latents).reshape(-1, rows, columns, self.width)
    for _ in range(self.doublings):
      x = jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)
      for _ in range(2):
        x = jax.nn.leaky_relu(BatchStatistics()(convolve(self.width, bias=False)(x)), _SLOPE)
    return jax.nn.sigmoid(convolve(self.channels)(x))


@functools.cache
def network(shape: tuple[int, ...]) -> Network:
  """Returns the narrowest `Network` for images of this shape with more than 4·N·H·W parameters, as published.

  Its width is a power of two, 32 at least, the published one for 16 images of 32×32 pixels.

  Args:
    shape: (N, H, W, C).
  """
  errors.check_image_batch('this generator', shape)
  count, height, width, channels = shape
  doublings = max(0, math.ceil(math.log2(max(height, width) / _GRID)))
  grid = (math.ceil(height / 2**doublings), math.ceil(width / 2**doublings))
  made = Network(channels, _NARROWEST, grid, doublings)
  while _size(made) <= 4 * count * height * width:
    made = made.clone(width=2 * made.width)
  return made


def _size(made: Network) -> int:
  """Returns the number of parameters."""
  shapes = jax.eval_shape(made.init, jax.random.key(0), jax.ShapeDtypeStruct((1, LATENT), jnp.float32))
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


def _init(key: jax.Array, shape: tuple[int, ...], learned: Tree = None) -> tuple[Tree, Tree]:
  del learned
  keys = jax.random.split(key)
  latents = jax.random.normal(keys[0], (shape[0], LATENT), jnp.float32)
  return network(tuple(shape)).init(keys[1], latents)['params'], latents


def _apply(weights: Tree, latents: Tree, shape: tuple[int, ...], learned: Tree = None) -> jax.Array:
  del learned
  images = network(tuple(shape)).apply({'params': weights}, latents)
  top, left = ((have - wanted) // 2 for have, wanted in zip(images.shape[1:3], shape[1:3], strict=True))
  return images[:, top : top + shape[1], left : left + shape[2]]


# CI-Net's generator. What is optimised are its weights; a latent of N(0, 1) for each image stays. For sides that are no
# multiple of the grid, the next larger ones are generated, and the middle is kept. It lacks the spectral norm of the
# published network, which the BatchNorm behind each convolution undoes up to the step size. A sigmoid stands in place
# of tanh, for pixels in [0, 1]. Weights start from U(±1/√fan_in).
untrained = Generator(_init, _apply)
