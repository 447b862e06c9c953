"""Clipping of a whole update's norm."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradleak import defenses


def clip(updates, norm):
  transformation = defenses.clip(norm=norm)
  return transformation.update(updates, transformation.init(updates))[0]


def flat(tree):
  return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)])


@pytest.fixture
def updates():
  rng = np.random.default_rng(0)
  return {'a': jnp.asarray(rng.normal(size=(20, 30)), jnp.float32), 'b': jnp.asarray(rng.normal(size=7), jnp.float32)}


@pytest.mark.parametrize('norm', [1e-6, 0.1, 1.0, 10.0])
def test_the_norm_is_the_bound_and_the_direction_stays(updates, norm):
  clipped, before = flat(clip(updates, norm)), flat(updates)
  np.testing.assert_allclose(np.linalg.norm(clipped), norm, rtol=1e-6)
  np.testing.assert_allclose(clipped, before * norm / np.linalg.norm(before), rtol=1e-5)


@pytest.mark.parametrize('factor', [1.001, 2.0, 1e30, np.inf])
def test_below_the_bound_nothing_changes(updates, factor):
  bound = float(np.linalg.norm(flat(updates)) * factor)
  jax.tree.map(np.testing.assert_array_equal, clip(updates, bound), updates)
  zero = jax.tree.map(jnp.zeros_like, updates)
  jax.tree.map(np.testing.assert_array_equal, clip(zero, bound), zero)


def test_the_norm_is_global_not_per_tensor():
  clipped = clip({'a': jnp.asarray([3.0]), 'b': jnp.asarray([4.0, 0.0])}, 1.0)
  np.testing.assert_allclose(clipped['a'], [0.6], rtol=1e-6)
  np.testing.assert_allclose(clipped['b'], [0.8, 0.0], rtol=1e-6)
  # Each tensor alone is within a bound of 4.5, both together are not.
  assert np.linalg.norm(flat(clip({'a': jnp.asarray([3.0]), 'b': jnp.asarray([4.0, 0.0])}, 4.5))) < 4.6


@pytest.mark.parametrize('norm', [0.5, 10.0, np.inf])
def test_an_attacker_differentiates_through_any_norm(norm):
  updates = {'w': jnp.asarray([3.0, -4.0])}
  transformation = defenses.clip(norm=norm)
  gradient = jax.grad(lambda u: jnp.sum(transformation.update(u, transformation.init(u))[0]['w']))(updates)
  expected = [1.0, 1.0] if norm > 5 else norm / 5 * np.array([1 + 3 / 25, 1 - 4 / 25])
  np.testing.assert_allclose(gradient['w'], expected, rtol=1e-5)
