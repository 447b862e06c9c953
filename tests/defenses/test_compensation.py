"""GradDefense's compensation: the variance of what reaches the server, the projection, and what it is good for."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradleak import Client, defenses, models
from gradleak.core import errors, trees
from gradleak.defenses.compensation import compensate, noise_variance
from gradleak.defenses.graddefense import slice_gradients

KEY = jax.random.key(9)


def reference(flat, variance, q, rule='band', rows_in_covariance=True, layout='columns'):
  """Section V-B in float64; returns the compensated vector and how many directions were dropped."""
  n = flat.size
  columns = int(np.ceil(np.sqrt(n / q)))
  rows = int(np.ceil(n / columns))
  c = np.zeros(rows * columns)
  c[:n] = flat
  c = c.reshape(columns, rows).T if layout == 'columns' else c.reshape(rows, columns)
  values, vectors = np.linalg.eigh(c.T @ c / (rows if rows_in_covariance else columns))
  low, high = (variance * (1 + sign / np.sqrt(rows / columns)) ** 2 for sign in (-1, 1))
  keep = [vectors[:, i] for i in range(columns) if not (values[i] <= high and (rule == 'below' or values[i] >= low))]
  z = np.stack(keep, 1) if keep else np.zeros((columns, 0))
  c = c @ z @ z.T
  return (c.T if layout == 'columns' else c).ravel()[:n], columns - len(keep)


def low_rank(n, q=6, rank=2, scale=10.0, layout='columns'):
  """Returns a vector that is of low rank as a matrix of √(n/q) columns."""
  rng = np.random.default_rng(0)
  columns = int(np.ceil(np.sqrt(n / q)))
  rows = -(-n // columns)
  matrix = rng.normal(size=(rows, rank)) @ rng.normal(size=(rank, columns))
  return scale * (matrix.T if layout == 'columns' else matrix).ravel()[:n]


@pytest.mark.parametrize('layout', ['columns', 'rows'])
@pytest.mark.parametrize('rule', ['band', 'below'])
@pytest.mark.parametrize('q', [1, 6, 20])
def test_compensation_equals_the_papers_steps(rule, q, layout):
  rng = np.random.default_rng(1)
  flat = (low_rank(3001, q, layout=layout) + rng.normal(size=3001)).astype(np.float32)
  tree = {'b': jnp.asarray(flat[:1]).reshape(()), 'k': jnp.asarray(flat[1:]).reshape(300, 10)}
  for variance in (0.3, 1.0, 3.0):
    compensated = jax.jit(functools.partial(compensate, q=q, rule=rule, layout=layout))(tree, variance)
    expected, dropped = reference(flat.astype(np.float64), variance, q, rule, layout=layout)
    got = np.concatenate([np.asarray(leaf).ravel() for leaf in jax.tree.leaves(compensated)])
    np.testing.assert_allclose(got, expected, atol=1e-3 * np.abs(flat).max())
    if variance == 1:  # the update's two stay, and a few at the edges of the band
      assert np.ceil(np.sqrt(3001 / q)) - 5 <= dropped <= np.ceil(np.sqrt(3001 / q)) - 2


def test_noise_lies_in_the_band_of_one_over_v_and_not_in_that_of_one_over_w():
  noise = np.random.default_rng(2).normal(size=12_000)
  _, dropped = reference(noise, 1.0, 6)
  columns = int(np.ceil(np.sqrt(12_000 / 6)))
  assert dropped >= columns - 3
  assert reference(noise, 1.0, 6, rows_in_covariance=False)[1] == 0
  left = compensate({'w': jnp.asarray(noise, jnp.float32)}, 1.0)['w']
  assert np.linalg.norm(left) < 0.3 * np.linalg.norm(noise)
  for wrong in (0.1, 10.0):  # the band must be where the noise is
    np.testing.assert_allclose(compensate({'w': jnp.asarray(noise, jnp.float32)}, wrong)['w'], noise, atol=1e-3)


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize('rule', ['band', 'below'])
def test_variance_zero_is_the_identity_exactly(rule, dtype):
  rng = np.random.default_rng(3)
  for flat in (rng.normal(size=501), low_rank(500), np.zeros(77), np.ones(1), np.ones(2), np.asarray([1.0, 0, -0.0])):
    tree = {'w': jnp.asarray(flat, dtype)}
    compensated = compensate(tree, 0.0, rule=rule)
    assert compensated['w'].dtype == dtype
    np.testing.assert_array_equal(compensated['w'], tree['w'])
    assert np.isfinite(np.asarray(compensate(tree, 0.5, rule=rule)['w'], np.float32)).all()


def clients(init, num_clients):
  """Returns gradients of LeNet, each on four digits of a client of its own, at 28×28 pixels, and their layers."""
  from sklearn.datasets import load_digits

  digits = load_digits()
  images = np.pad(np.kron(digits.images / 16, np.ones((1, 3, 3))), ((0, 0), (2, 2), (2, 2)))[..., None]
  chosen = np.random.default_rng(0).permutation(len(images))[: 4 * num_clients].reshape(num_clients, 4)
  client = Client(models.create('lenet', 10, init=init), 10)
  variables = client.model.init(jax.random.key(0), (28, 28, 1))

  def gradient(sample):
    return client.local_update(None, variables, *sample).update

  batches = (jnp.asarray(images[chosen], jnp.float32), jnp.asarray(digits.target[chosen], jnp.int32))
  return jax.jit(lambda batches: jax.lax.map(gradient, batches, batch_size=20))(batches)


@pytest.mark.slow
@pytest.mark.parametrize('init', ['default', 'explicit'])
def test_compensation_restores_the_mean_update_where_noise_dominates(init):
  """Noise variance 0.01 on 30 % of the slices, Q = 6, ten clients and a hundred."""
  gradients = clients(init, 100)
  params = trees.take(gradients, 0)
  slicing = slice_gradients(params, np.ones(trees.layer_numbers(params)[1]), 10)
  perturbation = defenses.graddefense(slicing, stddev=0.1, ratio=0.3)
  server = defenses.compensation(stddev=0.1, ratio=0.3)

  @jax.jit
  def perturb(keys, gradients):
    return jax.vmap(lambda key, u: perturbation.update(u, perturbation.init(u), key=key)[0])(keys, gradients)

  # The number of clients is traced: one compilation.
  compensated = jax.jit(lambda u, m: server.update(u, server.init(u), num_clients=m)[0])
  perturbed = perturb(jax.random.split(KEY, 100), gradients)
  for m in (10, 100):
    clean, noisy = (jax.tree.map(lambda x, m=m: x[:m].mean(0), tree) for tree in (gradients, perturbed))

    def error(update, clean=clean):
      return float(trees.norm(trees.subtract(update, clean)) / trees.norm(clean))

    before, after = error(noisy), error(compensated(noisy, m))
    printed = error(compensate(noisy, m * 0.3 * 0.1**2))  # section V-A's σ̂², with Σε = 1
    if init == 'default':
      assert before > 0.3 and after <= 0.55 * before, (m, before, after)
      assert printed > 0.9 * before, (m, before, printed)
    else:
      assert before < 0.15 and after <= 1.05 * before, (m, before, after)


@pytest.mark.slow
@pytest.mark.parametrize('weights', [[0.1] * 10, [0.5, 0.2, 0.1, 0.1, 0.1]], ids=['equal', 'unequal'])
def test_variance_is_that_of_the_weighted_mean(weights):
  m, stddev, ratio, num_slices = len(weights), 0.3, 0.4, 10
  zeros = {'w': jnp.zeros(2000)}
  slicing = slice_gradients(zeros, [1.0], num_slices)
  perturbation = defenses.graddefense(slicing, stddev=stddev, ratio=ratio)

  @jax.jit
  @jax.vmap
  def mean(key):
    keys = jax.random.split(key, m)
    noise = jax.vmap(lambda key: perturbation.update(zeros, perturbation.init(zeros), key=key)[0]['w'])(keys)
    return jnp.sum(jnp.asarray(weights, jnp.float32)[:, None] * noise, axis=0)

  measured = float(jnp.mean(jnp.square(mean(jax.random.split(KEY, 400)))))
  expected = float(noise_variance(weights, stddev=stddev, ratio=ratio, num_slices=num_slices))
  assert expected == pytest.approx(0.4 * 0.3**2 * np.sum(np.square(weights)), rel=1e-5)
  assert 0.95 < measured / expected < 1.05
  assert m * 0.4 * sum(weights) * stddev**2 > 10 * measured  # as printed in section V-A


def test_it_needs_the_number_of_clients():
  server = defenses.compensation(stddev=0.1)
  with pytest.raises(errors.UsageError, match='num_clients='):
    server.update({'w': jnp.ones(4)}, server.init({'w': jnp.ones(4)}))
