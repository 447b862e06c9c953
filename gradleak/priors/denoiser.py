"""A network that removes Gaussian noise of a known level, trained on public images.

The removed noise points towards likelier images. The score of the noisy images' distribution is `(D(x, σ) − x) / σ²`
(Vincent 2011, A Connection between Score Matching and Denoising Autoencoders).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from gradleak.core.promotion import promoting
from gradleak.core.trees import Tree
from gradleak.models import layers

LEVELS = (0.02, 0.6)  # least and largest standard deviation of the noise


class Denoiser(nn.Module):
  """Convolutions at two resolutions on the image and its noise level; the result is subtracted from the image.

  Attributes:
    image_shape: (H, W, C).
    width: channels at full resolution.
  """

  image_shape: tuple[int, int, int]
  width: int

  @nn.compact
  def __call__(self, noisy: jax.Array, level: jax.Array) -> jax.Array:
    """Returns images [N, H, W, C] of noisy ones and the standard deviation of their noise, [N]."""

    def conv(features: int, x: jax.Array) -> jax.Array:
      return layers.Conv(features, 3, 'default', 1, 1)(x)

    height, wide = noisy.shape[1:3]
    told = jnp.broadcast_to(jnp.log(level).reshape(-1, 1, 1, 1), (*noisy.shape[:3], 1))
    full = jax.nn.gelu(conv(self.width, jnp.concatenate([noisy, told], axis=-1)))
    x = jax.nn.gelu(conv(self.width, full))
    even = jnp.pad(x, ((0, 0), (0, height % 2), (0, wide % 2), (0, 0)), mode='edge')
    low = jnp.mean(even.reshape(len(x), (height + 1) // 2, 2, (wide + 1) // 2, 2, self.width), axis=(2, 4))
    for _ in range(3):
      low = low + jax.nn.gelu(conv(self.width, low))
    high = jnp.repeat(jnp.repeat(low, 2, axis=1), 2, axis=2)[:, :height, :wide]
    x = jax.nn.gelu(conv(self.width, jnp.concatenate([full, high], axis=-1)))
    return noisy - level.reshape(-1, 1, 1, 1) * conv(noisy.shape[-1], x)


class State(NamedTuple):
  """The state of the training: weights, the optimizer's state, and the weights' average over the last steps."""

  weights: Tree
  moments: Any
  average: Tree


class Training(NamedTuple):
  """A pure training step and its start, for images of one shape.

  Attributes:
    module: the `Denoiser`.
    optimizer: of its weights.
    batch_size: images per step.
  """

  module: Denoiser
  optimizer: optax.GradientTransformation
  batch_size: int

  def init(self, key: jax.Array) -> State:
    """Returns the state before the first step."""
    weights = self.module.init(key, jnp.zeros((1, *self.module.image_shape)), jnp.ones(1))['params']
    return State(weights, promoting(self.optimizer).init(weights), weights)

  def step(self, state: State, key: jax.Array, images: jax.Array) -> tuple[State, dict[str, jax.Array]]:
    """Returns the state after one step on `batch_size` of the images [N, H, W, C], and the loss."""
    loss, gradient = jax.value_and_grad(self.loss)(state.weights, key, images)
    updates, moments = promoting(self.optimizer).update(gradient, state.moments, state.weights)
    weights = optax.apply_updates(state.weights, updates)
    average = optax.incremental_update(weights, state.average, jnp.float32(0.01))
    return State(weights, moments, average), {'denoiser': loss}

  def loss(self, weights: Tree, key: jax.Array, images: jax.Array) -> jax.Array:
    """Returns the mean squared error in units of the noise's variance; levels are drawn evenly in their logarithm."""
    keys = jax.random.split(key, 3)
    clean = images[jax.random.randint(keys[0], (self.batch_size,), 0, len(images))]
    low, high = (jnp.log(jnp.float32(level)) for level in LEVELS)
    level = jnp.exp(jax.random.uniform(keys[1], (self.batch_size,), minval=low, maxval=high))
    spread = level.reshape(-1, 1, 1, 1)
    noisy = clean + spread * jax.random.normal(keys[2], clean.shape)
    found = self.module.apply({'params': weights}, noisy, level)
    return jnp.mean(jnp.square((found - clean) / spread))


def training(
  image_shape: tuple[int, int, int], *, width: int = 32, batch_size: int = 64, learning_rate: float = 1e-3
) -> Training:
  """Returns the `Training` of a denoiser of images of a shape (H, W, C)."""
  return Training(Denoiser(tuple(image_shape), width), optax.adam(learning_rate), batch_size)
