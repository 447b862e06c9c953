"""Additive noise on each entry of an update: DP-G and DP-L of the papers, without clipping and without accounting."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from gradleak.core import trees
from gradleak.core.settings import NonNegative
from gradleak.core.trees import Tree
from gradleak.defenses.base import stateless
from gradleak.defenses.defense import Mechanism, Noise, Settings, defense


def _additive(name: str, sample: Callable[..., jax.Array], scale: float) -> optax.GradientTransformationExtraArgs:
  def perturb(key: jax.Array, updates: Tree) -> Tree:
    def noisy(u: jax.Array, z: jax.Array) -> jax.Array:
      return (u.astype(z.dtype) + jnp.asarray(scale, z.dtype) * z).astype(u.dtype)

    return jax.tree.map(noisy, updates, trees.draws(sample, key, updates))

  return stateless(name, perturb, random=True)


def _mechanism(settings: Settings, clipped_to: float | None, position: int) -> Mechanism | None:
  """Gaussian noise is a mechanism where the stage before it clips the upload."""
  del position
  return None if clipped_to is None else Mechanism(settings['stddev'] / clipped_to, 'client')


@defense(
  place='upload',
  random=True,
  noise=Noise(lambda settings, context, count: settings['stddev'] ** 2),
  mechanism=_mechanism,
  post_processing=True,
  idle=lambda settings: settings['stddev'] == 0,
)
def gaussian(*, stddev: NonNegative) -> optax.GradientTransformationExtraArgs:
  r"""Adds N(0, stddev²) to every entry.

  Formula:
    g' = g + n, \quad n_i \sim \mathcal{N}(0, \sigma^2), \quad \sigma = \text{stddev}

  Args:
    stddev: the standard deviation. Some papers give the variance instead.

  Raises:
    UsageError: from its update, without `key=`.
  """
  return _additive('gaussian', jax.random.normal, stddev)


@defense(
  place='upload',
  random=True,
  noise=Noise(lambda settings, context, count: 2 * settings['scale'] ** 2, distribution='laplace'),
  post_processing=True,
  idle=lambda settings: settings['scale'] == 0,
)
def laplace(*, scale: NonNegative) -> optax.GradientTransformationExtraArgs:
  r"""Adds Laplace(0, scale) to every entry.

  Formula:
    g' = g + n, \quad p(n_i) = \tfrac{1}{2b} e^{-|n_i| / b}, \quad b = \text{scale}

  Args:
    scale: b of the density exp(−|x|/b) / 2b; the variance is 2·scale².

  Raises:
    UsageError: from its update, without `key=`.
  """
  return _additive('laplace', jax.random.laplace, scale)
