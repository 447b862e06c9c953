"""Additive noise on each entry of an update: DP-G and DP-L of the papers, without clipping and without accounting."""

import jax
import jax.numpy as jnp

from gradleak import errors, trees
from gradleak.defenses.base import stateless


def _additive(name, sample, scale):
  def perturb(key, updates):
    keys = trees.fold_in_leaves(key, updates)
    return jax.tree.map(lambda u, k: u + jnp.asarray(scale, u.dtype) * sample(k, u.shape, u.dtype), updates, keys)

  return stateless(name, perturb, random=True)


def gaussian(*, stddev: float):
  """Adds N(0, stddev²) to every entry. `stddev` ≥ 0 is a standard deviation (papers mix it with the variance)."""
  errors.check_number('gaussian(stddev)', stddev, low=0, finite=True)
  return _additive('gaussian', jax.random.normal, stddev)


def laplace(*, scale: float):
  """Adds Laplace(0, scale) to every entry. `scale` ≥ 0 is the density's b; the variance is 2·scale²."""
  errors.check_number('laplace(scale)', scale, low=0, finite=True)
  return _additive('laplace', jax.random.laplace, scale)
