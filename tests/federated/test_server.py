"""The server's mean over those who sent, against loops in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradleak.federated import Upload, layer_average

K = 4


@pytest.fixture
def uploads():
  """Four uploads: a tensor with one mask per client, one with a mask per entry, a scalar, and one nobody sends."""
  rng = np.random.default_rng(0)
  shapes = {'layer': (3, 2), 'entries': (5, 4), 'scalar': (), 'dropped': (3,)}
  sent = {
    'layer': np.array([True, False, True, False]),
    'entries': rng.random((K, 5, 4)) < 0.4,
    'scalar': np.array([False, False, True, False]),
    'dropped': np.zeros(K, bool),
  }
  sent['entries'][:, 0, 0] = False

  def masked(name):
    values = rng.normal(size=(K, *shapes[name])).astype(np.float32)
    mask = sent[name]
    return np.where(mask.reshape(mask.shape + (1,) * (values.ndim - mask.ndim)), values, np.float32(0))

  return Upload({name: masked(name) for name in shapes}, sent, np.array([1, 2, 3, 10], np.int32))


def reference(uploads, weights):
  means = {}
  for name, update in uploads.update.items():
    means[name] = np.zeros(update.shape[1:])
    for index in np.ndindex(update.shape[1:]):
      total = entry = 0.0
      for client in range(K):
        mask = uploads.mask[name][client]
        if mask if np.ndim(mask) == 0 else mask[index]:
          total += float(weights[client])
          entry += float(weights[client]) * float(update[client][index])
      means[name][index] = entry / total if total else 0.0
  return means


@pytest.mark.parametrize('weights', [None, 'num_samples', (0.5, 0.0, 2.0, 1.0), (0.0, 1.0, 0.0, 1.0)])
def test_each_entry_is_averaged_over_those_who_sent_it(uploads, weights):
  given = uploads.num_samples if weights == 'num_samples' else weights
  mean = jax.jit(layer_average)(uploads, given)
  expected = reference(uploads, np.ones(K) if given is None else given)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), mean, expected)
  np.testing.assert_array_equal(mean['dropped'], 0)
  assert mean['entries'][0, 0] == 0 and np.count_nonzero(mean['entries']) > 5


def test_what_no_client_sent_is_not_read(uploads):
  """Entries that a mask leaves out, and clients of weight 0, may hold anything."""
  mask, update = uploads.mask, dict(uploads.update)
  update['dropped'] = np.full_like(update['dropped'], np.nan)
  update['entries'][2] = np.inf
  mean = layer_average(Upload(update, mask, uploads.num_samples), jnp.array([1.0, 1, 0, 1]))
  np.testing.assert_array_equal(mean['dropped'], 0)
  assert np.isfinite(mean['entries']).all()


def test_dtypes_stay(uploads):
  update = jax.tree.map(lambda u: jnp.asarray(u, jnp.bfloat16), uploads.update)
  mean = layer_average(Upload(update, uploads.mask, uploads.num_samples))
  assert {leaf.dtype for leaf in jax.tree.leaves(mean)} == {jnp.dtype(jnp.bfloat16)}
