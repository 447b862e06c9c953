"""The null gradient: norms, and nothing else, of the update that it replaces."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from gradleak import defenses


@pytest.fixture(scope='module')
def replaced():
  rng = np.random.default_rng(0)
  updates = {
    'a': jnp.asarray(1e-3 * rng.exponential(size=(50, 40)), jnp.float32),
    'b': jnp.asarray(5 * rng.exponential(size=(50, 40)), jnp.float32),
    'dead': jnp.zeros(30),
    'scalar': jnp.asarray(-2.5),
  }
  transformation = defenses.null_gradient()
  return updates, transformation.update(updates, transformation.init(updates), key=jax.random.key(0))[0]


def test_every_tensor_keeps_its_norm(replaced):
  for name, update in replaced[0].items():
    np.testing.assert_allclose(np.linalg.norm(replaced[1][name]), np.linalg.norm(update), rtol=1e-5, err_msg=name)


def test_nothing_of_the_update_is_left(replaced):
  updates, control = ([np.asarray(tree[name]).ravel() for name in 'ab'] for tree in replaced)
  correlations = np.corrcoef(updates + control)
  assert np.abs(correlations[np.triu_indices(4, 1)]).max() < 0.1
  # The update's signs were all positive.
  assert abs(np.mean(control[0] > 0) - 0.5) < 0.06


def test_it_is_gaussian(replaced):
  for name in 'ab':
    drawn = np.asarray(replaced[1][name], np.float64).ravel()
    rms = np.linalg.norm(replaced[0][name]) / np.sqrt(drawn.size)
    assert scipy.stats.kstest(drawn, scipy.stats.norm(0, rms).cdf).pvalue > 0.01
    for wrong in (2 / 3, 3 / 2):
      assert scipy.stats.kstest(drawn, scipy.stats.norm(0, wrong * rms).cdf).pvalue < 1e-6


def test_of_an_update_of_zeros_it_is_noise_all_the_same():
  """Its norm would be zero, and a defense that adds noise would be judged against no noise at all."""
  updates = {'a': jnp.zeros((5, 4)), 'b': jnp.zeros(3)}
  transformation = defenses.null_gradient()
  control, _ = transformation.update(updates, transformation.init(updates), key=jax.random.key(0))
  for noise in control.values():
    np.testing.assert_allclose(np.linalg.norm(noise), 1, rtol=1e-5)
