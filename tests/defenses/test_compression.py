"""Pruning against a sort in NumPy."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradleak import defenses
from gradleak.defenses.compression import largest


def reference(x, rate):
  """Returns the mask of what stays when the ⌊rate·n⌋ smallest magnitudes go, ties at the threshold all staying."""
  magnitudes = np.abs(np.asarray(x, np.float64)).ravel()
  dropped = int(Fraction(str(rate)) * magnitudes.size)
  if dropped == magnitudes.size:
    return np.zeros(np.shape(x), bool)
  return (magnitudes >= np.sort(magnitudes)[dropped]).reshape(np.shape(x))


def prune(updates, rate):
  transformation = defenses.prune(rate=rate)
  return transformation.update(updates, transformation.init(updates))[0]


@pytest.mark.parametrize('size', [1, 7, 25, 100, 3600, 10_000])
@pytest.mark.parametrize('rate', [0, 0.1, 0.29, 0.39, 0.5, 0.53, 0.6, 0.7, 0.9, 0.99, 0.999, 1])
def test_prune_keeps_the_largest(size, rate):
  x = np.random.default_rng(size).normal(size=size).astype(np.float32)
  pruned = np.asarray(prune({'w': jnp.asarray(x)}, rate)['w'])
  assert np.count_nonzero(pruned == 0) == int(Fraction(str(rate)) * size)
  np.testing.assert_array_equal(pruned, np.where(reference(x, rate), x, 0))


def test_counts_where_float32_falls_short_of_the_product():
  for size, rate, dropped in ((100, 0.53, 53), (5000, 0.53, 2650), (10_000, 0.39, 3900), (23_040, 0.65, 14_976)):
    assert np.float32(rate) * np.float32(size) < dropped
    x = jnp.arange(1, size + 1, dtype=jnp.float32)
    assert np.count_nonzero(~np.asarray(largest(x, rate))) == dropped, (size, rate)


@pytest.mark.parametrize('rate', [0, 0.2, 0.4, 0.5, 0.6, 0.8, 1])
@pytest.mark.parametrize(
  'values',
  [
    [3, -3, 3, -3, 3],
    [1, -2, 2, 2, -5],
    [0, 0, 0, 1, -1],
    [0.0, -0.0, 1e-40, -1e-42, 1e-38],
    [-0.0, -0.0, -0.0, -0.0, -0.0],
    [1e30, -1e-30, 3e38, 1e-45, -7],
  ],
  ids=['ties', 'tie at the threshold', 'zeros', 'denormals', 'negative zeros', 'extremes'],
)
def test_ties_zeros_and_denormals(values, rate):
  x = np.asarray(values, np.float32)
  mask = np.asarray(largest(jnp.asarray(x), rate))
  np.testing.assert_array_equal(mask, reference(x, rate))
  pruned = np.asarray(prune({'w': jnp.asarray(x)}, rate)['w'])
  np.testing.assert_array_equal(pruned.view(np.int32), np.where(mask, x, np.float32(0)).view(np.int32))


def test_neighbouring_floats_are_told_apart():
  x = np.arange(1_000_000_000, 1_000_000_010, dtype=np.int32).view(np.float32)[::-1].copy()
  for dropped in range(10):
    np.testing.assert_array_equal(largest(jnp.asarray(x), dropped / 10), np.arange(10) < 10 - dropped)


def test_traced_rates_equal_concrete_ones_in_one_trace():
  rng = np.random.default_rng(0)
  updates = {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in (('a', (20, 5)), ('b', 25))}
  traces = []

  @jax.jit
  def traced(rate):
    traces.append(rate)
    return prune(updates, rate)

  rates = [0.0, 0.1, 0.29, 0.3, 0.6, 0.7, 0.9, 0.99, 1.0]
  together = jax.vmap(traced)(jnp.asarray(rates, jnp.float32))
  for i, rate in enumerate(rates):
    expected = prune(updates, rate)
    jax.tree.map(np.testing.assert_array_equal, traced(rate), expected)
    jax.tree.map(lambda x, y, i=i: np.testing.assert_array_equal(x[i], y), together, expected)
  assert len(traces) == 2  # with lanes and without


def test_every_tensor_is_pruned_by_itself():
  updates = {'large': jnp.arange(100.0, 104.0), 'small': jnp.arange(1.0, 5.0)}
  pruned = prune(updates, 0.5)
  np.testing.assert_array_equal(pruned['large'], [0, 0, 102, 103])
  np.testing.assert_array_equal(pruned['small'], [0, 0, 3, 4])
