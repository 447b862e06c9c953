"""A Gaussian prior of images: the mean and the principal components of public ones."""

import jax
import jax.numpy as jnp
import numpy as np

from gradleak.core import errors
from gradleak.core.trees import Tree
from gradleak.priors.base import Generator


def fitted(images: np.ndarray, components: int) -> dict[str, jax.Array]:
  """Returns 'mean' [D] and 'basis' [K, D] of images [M, …] with D values each: x = mean + z·basis, z ~ N(0, I).

  Rows of the basis are principal components, times the standard deviation along them. K is `components`, or fewer where
  there are fewer images or values.

  Raises:
    UsageError: for fewer than two images, or images that are all equal.
  """
  if len(images) < 2:
    raise errors.UsageError(f'a Gaussian prior takes two public images or more, got {len(images)}')
  rows = np.asarray(images, np.float64).reshape(len(images), -1)
  mean = rows.mean(axis=0)
  _, singular, directions = np.linalg.svd(rows - mean, full_matrices=False)
  deviations = singular / np.sqrt(len(rows) - 1)
  kept = min(components, int(np.sum(deviations > 1e-6 * deviations[0])))
  if not deviations[0] > 0:
    raise errors.UsageError('a Gaussian prior takes public images that differ, and these are all equal')
  return {
    'mean': jnp.asarray(mean, jnp.float32),
    'basis': jnp.asarray(deviations[:kept, np.newaxis] * directions[:kept], jnp.float32),
  }


def squared_length(images: jax.Array, learned: Tree) -> jax.Array:
  """Returns Σ ‖z‖² of images [N, …]: minus twice their log-density, up to a constant; of their part in the basis."""
  basis = learned['basis']
  rows = images.reshape(len(images), -1) - learned['mean'][None]
  return jnp.sum(jnp.square(rows @ (basis / jnp.sum(jnp.square(basis), axis=1, keepdims=True)).T))


def _init(key: jax.Array, shape: tuple[int, ...], learned: Tree) -> tuple[Tree, Tree]:
  return {'latents': 0.1 * jax.random.normal(key, (shape[0], learned['basis'].shape[0]), jnp.float32)}, ()


def _apply(optimised: Tree, kept: Tree, shape: tuple[int, ...], learned: Tree) -> jax.Array:
  del kept
  return (learned['mean'][None] + optimised['latents'] @ learned['basis']).reshape(shape)


LINEAR = Generator(_init, _apply)  # its latents are z
