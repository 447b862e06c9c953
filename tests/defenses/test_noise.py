"""Additive noise: its law at the stated scale, and the independence of its draws."""

import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.stats

from gradleak import defenses

LAWS = {'gaussian': ('stddev', scipy.stats.norm), 'laplace': ('scale', scipy.stats.laplace)}
KEY = jax.random.key(3)


def noise(name, scale, updates, key=KEY):
  transformation = defenses.REGISTRY[name](**{LAWS[name][0]: scale})
  noisy, _ = jax.jit(lambda u: transformation.update(u, transformation.init(u), u, key=key))(updates)
  return jax.tree.map(lambda a, b: np.asarray(a - b, np.float64), noisy, updates)


@pytest.mark.parametrize('scale', [1.0, 1e-3])
@pytest.mark.parametrize('name', LAWS)
def test_noise_has_its_law_at_the_stated_scale_and_no_other(name, scale):
  drawn = noise(name, scale, {'w': jnp.zeros(20_000)})['w']
  law = LAWS[name][1]
  assert scipy.stats.kstest(drawn, law(0, scale).cdf).pvalue > 0.01
  for wrong in (2 / 3, 3 / 2):
    assert scipy.stats.kstest(drawn, law(0, wrong * scale).cdf).pvalue < 1e-6
  for _, other in LAWS.values():
    same_variance = other(0, drawn.std() / other(0, 1).std())
    assert (scipy.stats.kstest(drawn, same_variance.cdf).pvalue < 1e-6) == (other is not law)


@pytest.mark.parametrize('name', LAWS)
def test_noise_is_added_whatever_the_update(name):
  updates = {'w': jnp.linspace(-2, 2, 2000)}
  drawn = noise(name, 0.1, updates)['w']
  np.testing.assert_allclose(drawn, noise(name, 0.1, {'w': jnp.zeros(2000)})['w'], atol=1e-6)
  assert abs(np.corrcoef(drawn, updates['w'])[0, 1]) < 0.1


@pytest.mark.parametrize('name', LAWS)
def test_equal_tensors_get_independent_noise(name):
  drawn = noise(name, 1.0, {layer: jnp.zeros((50, 40)) for layer in 'abc'})
  correlations = np.corrcoef([drawn[layer].ravel() for layer in 'abc'])[np.triu_indices(3, 1)]
  assert np.abs(correlations).max() < 0.1
  # Neighbours in one tensor too.
  rows = drawn['a']
  assert abs(np.corrcoef(rows[:, :-1].ravel(), rows[:, 1:].ravel())[0, 1]) < 0.1


@pytest.mark.parametrize('name', LAWS)
def test_a_batch_of_clients_with_one_shared_state_draws_apart(name):
  transformation = defenses.REGISTRY[name](**{LAWS[name][0]: 1.0})
  state = transformation.init({'w': jnp.zeros(500)})
  draw = jax.vmap(lambda key: transformation.update({'w': jnp.zeros(500)}, state, key=key)[0]['w'])
  drawn = np.asarray(jax.jit(draw)(jax.random.split(KEY, 8)))
  assert np.abs(np.corrcoef(drawn)[np.triu_indices(8, 1)]).max() < 0.25


@pytest.mark.parametrize('dtype', [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize('name', LAWS)
def test_half_precision_has_the_noise_of_float32_rounded_once(name, dtype):
  """Drawn in half precision, noise has a few hundred values, at wrong probabilities."""
  updates = {'w': jnp.linspace(-2, 2, 5000).astype(dtype)}
  transformation = defenses.REGISTRY[name](**{LAWS[name][0]: 1.0})

  def noisy(given):
    return transformation.update(given, transformation.init(given), given, key=KEY)[0]['w']

  exact = noisy(jax.tree.map(lambda u: u.astype(jnp.float32), updates))
  np.testing.assert_array_equal(noisy(updates), exact.astype(dtype))


RANDOM = {
  'gaussian': {'stddev': 1.0}, 'laplace': {'scale': 1.0}, 'client_dp': {'norm': 1.0, 'noise': 1.0}, 'null_gradient': {},
  'svt_privacy': {'fraction': 1.0, 'replace': False}, 'outpost': {'fisher': 1.0, 'noise': 1e6},
  'secagg_rounding': {'levels': 10.0},
}  # fmt: skip


@pytest.mark.parametrize('name', RANDOM)
def test_groups_of_parameters_draw_apart(name):
  """Optax hands each group of a partition the same key, and a tree with the other groups masked."""
  params = {group: {'w': jnp.linspace(0, 1, 200).reshape(20, 10)} for group in 'ab'}
  made = {group: defenses.REGISTRY[name](**RANDOM[name]) for group in 'ab'}
  parted = optax.partition(made, {group: {'w': group} for group in 'ab'})
  zero = jax.tree.map(jnp.zeros_like, params)
  sent, _ = parted.update(zero, parted.init(params), params, key=KEY)
  assert np.abs(np.corrcoef(*(np.ravel(sent[group]['w']) for group in 'ab'))[0, 1]) < 0.9


def test_a_whole_tree_draws_as_it_always_did():
  """Stored results depend on these numbers."""
  drawn = noise('gaussian', 1.0, {'a': jnp.zeros(2), 'b': jnp.zeros(2)})
  key = jax.random.fold_in(KEY, zlib.crc32(b'gaussian'))
  for place, name in enumerate('ab'):
    np.testing.assert_array_equal(drawn[name], jax.random.normal(jax.random.fold_in(key, place), (2,)))
