"""Clipping of a whole update's norm."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradleak import defenses
from gradleak.defenses.differential_privacy import aggregate_client_dp


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


NOT_FINITE = {'a': jnp.asarray([jnp.nan, 1.0]), 'b': jnp.full(3, 100.0)}


@pytest.mark.parametrize('entry', [np.nan, np.inf, 3e19])
@pytest.mark.parametrize(
  'made',
  [
    lambda: defenses.clip(norm=1.0),
    lambda: defenses.client_dp(norm=1.0, noise=0.0),
    lambda: defenses.local_dp(norm=1.0, sensitivity=0.0, epsilon=1.0, delta=1e-5),
    lambda: defenses.dgc(ratio=1.0, clip=1.0),
  ],
)
def test_an_update_without_a_finite_norm_is_zeros(made, entry):
  """One NaN, which a server can cause by its weights, must not let the other entries pass as they are."""
  updates, transformation = NOT_FINITE | {'a': jnp.asarray([entry, 1.0])}, made()
  sent, _ = transformation.update(updates, transformation.init(updates), updates, key=jax.random.key(0))
  assert not flat(sent).any()


def test_an_infinite_bound_passes_what_is_not_finite():
  jax.tree.map(np.testing.assert_array_equal, clip(NOT_FINITE, np.inf), NOT_FINITE)


@pytest.mark.long
@pytest.mark.parametrize('counts', ['clipped', 'unclipped'])
def test_the_server_takes_an_upload_without_a_finite_norm_for_zeros_that_were_clipped(counts):
  good = {'a': jnp.asarray([0.1, 0.2]), 'b': jnp.full(3, 0.1)}
  uploads, weights = jax.tree.map(lambda *x: jnp.stack(x), NOT_FINITE, good), jnp.full(2, 0.5)
  given = {'key': jax.random.key(0), 'uploads': uploads, 'weights': weights}

  def update(**settings):
    server = defenses.server_dp(norm=1.0, clients=2, counts=counts, **settings)
    return server.update(good, server.init(good), good, **given)

  np.testing.assert_allclose(flat(update(noise=0.0)[0]), flat(good) / 2, rtol=1e-6)
  finite = jax.tree.map(lambda x, y: jnp.stack([jnp.full_like(x, 9.0), y]), NOT_FINITE, good)
  adapted = update(noise=0.01, rate=0.2)[1].norm
  given['uploads'] = finite
  assert adapted == update(noise=0.01, rate=0.2)[1].norm


def test_the_mean_at_the_server_counts_an_update_without_a_finite_norm_as_zeros():
  key, small = jax.random.key(0), {'a': jnp.full((3, 2), 0.1), 'b': jnp.full((3, 3), 0.1)}
  broken = small | {'a': small['a'].at[0, 0].set(jnp.nan)}
  zeroed = jax.tree.map(lambda x: x.at[0].set(0.0), small)
  for a, b in zip(*(aggregate_client_dp(key, given, 0.5) for given in (broken, zeroed)), strict=True):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize('scale', np.linspace(0.1, 3, 7))
def test_half_precision_is_clipped_to_the_bound(scale):
  updates = {'w': (scale * jax.random.normal(jax.random.key(0), (100_000,))).astype(jnp.bfloat16)}
  assert np.linalg.norm(flat(jax.tree.map(jnp.float32, clip(updates, 1.0)))) == pytest.approx(1, rel=1e-3)
