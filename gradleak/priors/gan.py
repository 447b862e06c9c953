"""A generator trained on public images: WGAN-GP (Gulrajani et al., Improved Training of Wasserstein GANs, NIPS 2017).

GGL's authors train theirs so, with five critic steps for each of the generator's and a gradient penalty of 10. They
take Adam at 1e-4 with moments 0.5 and 0.999.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from gradleak.core.promotion import promoting
from gradleak.core.trees import Tree
from gradleak.models import layers
from gradleak.priors.base import Change, unchanged

LATENT = 64  # numbers that an image is made of
PENALTY = 10.0
CRITIC_STEPS = 5
_GRID = 4  # pixels on the longer side before the first doubling, at most
_SLOPE = 0.2  # of the leaky ReLU


def _conv(features: int, size: int = 3, stride: int = 1) -> layers.Conv:
  padding = size // 2 if stride == 1 else 1
  return layers.Conv(features, size, 'default', stride, padding)


class Generator(nn.Module):
  """A dense layer to a small grid, blocks that double its sides and halve its channels, and a sigmoid.

  Attributes:
    image_shape: (H, W, C).
    width: channels of the last block.
  """

  image_shape: tuple[int, int, int]
  width: int

  @nn.compact
  def __call__(self, latents: jax.Array, change: Change = unchanged) -> jax.Array:
    """Returns images [N, H, W, C] in [0, 1] of latents [N, 64].

    Args:
      latents: float32.
      change: of the features in front of each convolution, [N, h, w, channels] with a root mean square of 1 per pixel.
    """
    height, width, channels = self.image_shape
    doublings = max(0, math.ceil(math.log2(max(height, width) / _GRID)))
    rows, columns = (math.ceil(side / 2**doublings) for side in (height, width))
    features = self.width * 2 ** max(0, doublings - 1)
    x = layers.Dense(rows * columns * features, 'default')(latents).reshape(-1, rows, columns, features)
    for block in range(doublings):
      x = jax.nn.leaky_relu(change(block, _standardised(x)), _SLOPE)
      x = jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)
      x = _conv(self.width * 2 ** max(0, doublings - 1 - block))(x)
    x = _conv(channels)(jax.nn.leaky_relu(change(doublings, _standardised(x)), _SLOPE))
    top, left = ((have - wanted) // 2 for have, wanted in zip(x.shape[1:3], (height, width), strict=True))
    return jax.nn.sigmoid(x[:, top : top + height, left : left + width])


def _standardised(x: jax.Array) -> jax.Array:
  """Returns x, each pixel's channels divided by their root mean square (Karras et al. 2018), image by image."""
  return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-8)


class Critic(nn.Module):
  """Convolutions that halve the sides and double the channels, and a dense layer to one number; no norm.

  Attributes:
    width: channels of the first block.
  """

  width: int

  @nn.compact
  def __call__(self, images: jax.Array) -> jax.Array:
    """Returns a number for each of the images [N, H, W, C]."""
    x, features = images, self.width
    while max(x.shape[1:3]) > _GRID:
      if 1 in x.shape[1:3]:  # half of two pixels: a side of one stays one
        x = jnp.pad(x, ((0, 0), *((0, max(0, 2 - side)) for side in x.shape[1:3]), (0, 0)), mode='edge')
      x = jax.nn.leaky_relu(_conv(features, 4, 2)(x), _SLOPE)
      features *= 2
    return layers.Dense(1, 'default')(layers.flatten(x))[:, 0]


class State(NamedTuple):
  """The state of the training.

  Attributes:
    generator, critic: their weights.
    optimizers: the states of theirs.
    average: of the generator's weights over its last steps, with which images are made.
  """

  generator: Tree
  critic: Tree
  optimizers: tuple[Any, Any]
  average: Tree


class Training(NamedTuple):
  """A pure training step and its start, for images of one shape.

  Attributes:
    module, critic: the generator and the critic.
    optimizer: of both.
    batch_size: images per step.
  """

  module: Generator
  critic: Critic
  optimizer: optax.GradientTransformation
  batch_size: int

  def init(self, key: jax.Array) -> State:
    """Returns the state before the first step."""
    keys = jax.random.split(key)
    generator = self.module.init(keys[0], jnp.zeros((1, LATENT)))['params']
    critic = self.critic.init(keys[1], jnp.zeros((1, *self.module.image_shape)))['params']
    start = promoting(self.optimizer).init
    return State(generator, critic, (start(generator), start(critic)), generator)

  def step(self, state: State, key: jax.Array, images: jax.Array) -> tuple[State, dict[str, jax.Array]]:
    """Returns the state after five steps of the critic and one of the generator, and the two losses.

    Args:
      state: the `State`.
      key: of this step.
      images: float32 [N, H, W, C], all images that are learned from.
    """
    update = promoting(self.optimizer).update
    critic, critic_state = state.critic, state.optimizers[1]

    def critic_step(carry: tuple, key: jax.Array) -> tuple[tuple, jax.Array]:
      critic, moments = carry
      loss, gradient = jax.value_and_grad(self.critic_loss)(critic, state.generator, key, images)
      updates, moments = update(gradient, moments, critic)
      return (optax.apply_updates(critic, updates), moments), loss

    keys = jax.random.split(key, CRITIC_STEPS + 1)
    (critic, critic_state), losses = jax.lax.scan(critic_step, (critic, critic_state), keys[1:])

    def generator_loss(weights: Tree) -> jax.Array:
      return -jnp.mean(self.critic.apply({'params': critic}, self._made(weights, keys[0])))

    loss, gradient = jax.value_and_grad(generator_loss)(state.generator)
    updates, moments = update(gradient, state.optimizers[0], state.generator)
    generator = optax.apply_updates(state.generator, updates)
    average = optax.incremental_update(generator, state.average, jnp.float32(0.005))
    return State(generator, critic, (moments, critic_state), average), {'critic': losses[-1], 'generator': loss}

  def critic_loss(self, critic: Tree, generator: Tree, key: jax.Array, images: jax.Array) -> jax.Array:
    """Returns the critic's mean on generated images less that on real ones, plus the gradient penalty (eq. 3)."""
    keys = jax.random.split(key, 3)
    real = images[jax.random.randint(keys[0], (self.batch_size,), 0, len(images))]
    made = self._made(generator, keys[1])
    between = real + jax.random.uniform(keys[2], (self.batch_size, 1, 1, 1)) * (made - real)

    def judged(images: jax.Array) -> jax.Array:
      return self.critic.apply({'params': critic}, images)

    slopes = jax.grad(lambda images: jnp.sum(judged(images)))(between)
    norms = jnp.sqrt(jnp.sum(jnp.square(slopes), axis=(1, 2, 3)) + 1e-12)
    return jnp.mean(judged(made)) - jnp.mean(judged(real)) + PENALTY * jnp.mean(jnp.square(norms - 1))

  def _made(self, weights: Tree, key: jax.Array) -> jax.Array:
    return self.module.apply({'params': weights}, jax.random.normal(key, (self.batch_size, LATENT)))


def training(
  image_shape: tuple[int, int, int], *, width: int = 32, batch_size: int = 64, learning_rate: float = 1e-4
) -> Training:
  """Returns the `Training` of a generator of images of a shape (H, W, C)."""
  optimizer = optax.adam(learning_rate, b1=0.5, b2=0.999)
  return Training(Generator(tuple(image_shape), width), Critic(width), optimizer, batch_size)
