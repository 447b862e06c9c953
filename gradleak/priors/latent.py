"""Images from the latents of a trained generator: what is optimised in place of their pixels."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from gradleak.core import errors
from gradleak.core.trees import Tree
from gradleak.priors.base import Generator


def of_latents(make: Callable[[Tree, jax.Array], jax.Array], size: int) -> Generator:
  """Returns the `Generator` whose latents are optimised; its weights are what was learned.

  Args:
    make: (weights, latents [N, size]) -> images [N, H, W, C].
    size: numbers of a latent, N(0, 1) at the start.
  """

  def init(key: jax.Array, shape: tuple[int, ...], learned: Tree) -> tuple[Tree, Tree]:
    del learned
    return {'latents': jax.random.normal(key, (shape[0], size), jnp.float32)}, ()

  def apply(optimised: Tree, kept: Tree, shape: tuple[int, ...], learned: Tree) -> jax.Array:
    del kept
    return make(learned, optimised['latents']).reshape(shape)

  return Generator(init, apply)


def tuned(make: Callable[[Tree, jax.Array], jax.Array], size: int) -> Generator:
  """Returns the `Generator` whose latents are optimised, and how far its weights go from what was learned.

  Arguments as of `of_latents`; for gradient inversion with an adapted generator, GIAS (Jeon et al. 2021).
  """
  plain = of_latents(make, size)

  def init(key: jax.Array, shape: tuple[int, ...], learned: Tree) -> tuple[Tree, Tree]:
    latents, kept = plain.init(key, shape, learned)
    return {**latents, 'change': jax.tree.map(jnp.zeros_like, learned)}, kept

  def apply(optimised: Tree, kept: Tree, shape: tuple[int, ...], learned: Tree) -> jax.Array:
    return plain.apply(optimised, kept, shape, jax.tree.map(jnp.add, learned, optimised['change']))

  return Generator(init, apply)


def layered(make: Callable[..., jax.Array], size: int) -> Generator:
  """Returns the `Generator` whose latents are optimised, and how far the features of each layer go from what it gives.

  The weights are 'latents' and 'features_00', 'features_01', …, from the latents to the image. For generative gradient
  inversion with feature domain optimization, GIFD (Fang et al. 2023).

  Args:
    make: (weights, latents [N, size], a `Change` of each layer's features) -> images [N, H, W, C].
    size: as of `of_latents`.
  """
  plain = of_latents(make, size)

  def init(key: jax.Array, shape: tuple[int, ...], learned: Tree) -> tuple[Tree, Tree]:
    latents, kept = plain.init(key, shape, learned)
    shapes: dict[str, tuple[int, ...]] = {}

    def see(layer: int, features: jax.Array) -> jax.Array:
      shapes[f'features_{layer:02}'] = features.shape
      return features

    jax.eval_shape(lambda weights, drawn: make(weights, drawn, see), learned, latents['latents'])
    if not shapes:
      raise errors.UsageError('the generator has no layers between its latents and its images, expected one or more')
    return {**latents, **{name: jnp.zeros(of, jnp.float32) for name, of in shapes.items()}}, kept

  def apply(optimised: Tree, kept: Tree, shape: tuple[int, ...], learned: Tree) -> jax.Array:
    del kept

    def change(layer: int, features: jax.Array) -> jax.Array:
      return features + optimised[f'features_{layer:02}']

    return make(learned, optimised['latents'], change).reshape(shape)

  return Generator(init, apply)
