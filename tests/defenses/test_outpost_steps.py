"""Which local steps OUTPOST protects: the paper's running count, and the product that the authors' code takes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.stats

from gradleak import Client, defenses
from gradleak.defenses.outpost import OutpostState, outpost, step_probability

EPOCHS, BATCHES = 5, 36  # EMNIST in the paper: 1,128 samples in batches of 32


def expected_steps(decay, variant, positions=True):
  """Returns how many of the 180 steps are expected to be protected."""
  count = np.arange(1, EPOCHS * BATCHES + 1)
  epoch, batch = (count - 1) // BATCHES + 1, (count - 1) % BATCHES + 1
  one = functools.partial(step_probability, decay=decay, variant=variant)
  if not positions:
    return float(jnp.sum(jax.vmap(one)(count)))
  return float(jnp.sum(jax.vmap(lambda c, e, b: one(c, position=(e, b)))(count, epoch, batch)))


def test_of_180_steps_so_many_are_protected():
  """Against the sums written out; a running count in the code's place would protect 24.8."""
  running = np.arange(1, 181)
  assert expected_steps(0.1, 'paper') == pytest.approx(1 + np.sum(1 / (1 + 0.1 * running[1:])), rel=1e-5)
  assert expected_steps(0.1, 'paper') == pytest.approx(29.07, abs=0.01)
  product = np.arange(1, EPOCHS + 1)[:, None] * np.arange(1, BATCHES + 1)
  assert expected_steps(0.125, 'code') == pytest.approx(np.sum(1 / (1 + 0.125 * product)), rel=1e-5)
  assert expected_steps(0.125, 'code') == pytest.approx(38.79, abs=0.01)
  assert expected_steps(0.125, 'code', positions=False) == pytest.approx(24.79, abs=0.01)
  assert expected_steps(0.1, 'paper') == expected_steps(0.1, 'paper', positions=False)


def test_the_code_protects_by_the_position():
  """The fifth batch of the fourth epoch has i = 20, whatever the count."""
  updates = params = {'w': jnp.arange(1.0, 11.0)}
  defense = outpost(decay=0.125, variant='code')

  @jax.jit
  @jax.vmap
  def changed(key):
    out, _ = defense.update(updates, OutpostState(jnp.int32(3)), params, key=key, position=(jnp.int32(4), jnp.int32(5)))
    return jnp.any(out['w'] != updates['w'])

  found = int(np.sum(changed(jax.random.split(jax.random.key(0), 4000))))
  assert scipy.stats.binomtest(found, 4000, 1 / (1 + 0.125 * 20)).pvalue > 0.001
  assert scipy.stats.binomtest(found, 4000, 1 / (1 + 0.125 * 4)).pvalue < 1e-4


@pytest.mark.parametrize('share', ['delta', 'gradient'])
def test_a_client_gives_the_position(linear, small_images, share):
  """Five samples in batches of two, three epochs: the sum of 10·epoch + batch² tells all of them."""
  images, labels = (jnp.asarray(part[:5]) for part in small_images)

  def update(updates, state, params=None, *, position, **extra):
    del params, extra
    epoch, batch = (jnp.asarray(number, jnp.int32) for number in position)
    return jax.tree.map(lambda u: jnp.full_like(u, (10 * epoch + batch**2).astype(u.dtype)), updates), state

  seen = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
  several = {'epochs': 3, 'batch_size': 2} if share == 'delta' else {}
  client = Client(linear.client.model, 10, share=share, step=seen, optimizer=optax.sgd(1.0), **several)
  found = jax.jit(client.local_update)(jax.random.key(0), linear.variables, images, labels).update['bias']
  steps = [10 * epoch + batch**2 for epoch in (1, 2, 3) for batch in (1, 2, 3)]
  np.testing.assert_allclose(found, -sum(steps) if share == 'delta' else 11, rtol=1e-5)


@pytest.mark.long
def test_the_code_takes_the_sample_variance():
  weights = np.asarray([0.1, 0.2, 0.4, 0.5], np.float32)
  params = {'w': jnp.asarray(weights), 'one': jnp.ones(1)}
  updates = jax.tree.map(jnp.ones_like, params)

  def noise(key, variant):
    defense = outpost(noise=0.5, fisher=1.0, decay=0.0, prune=0.0, variant=variant)
    return defense.update(updates, defense.init(params), params, key=key)[0]

  keys = jax.random.split(jax.random.key(1), 4000)
  for variant, ddof in (('paper', 0), ('code', 1)):
    out = jax.jit(jax.vmap(functools.partial(noise, variant=variant)))(keys)
    assert np.std(out['w']) == pytest.approx(0.5 * np.var(weights, ddof=ddof), rel=0.03)
    np.testing.assert_array_equal(out['one'], 1)  # a tensor of one entry has no variance
    context = defenses.Context(_NoLayers(), {'params': params}, (8, 8, 1))
    settings = {'noise': 0.5, 'variant': variant}
    variance = outpost.traits.noise.variance(settings, context, 4)
    assert variance['w'] == pytest.approx((0.5 * np.var(weights, ddof=ddof)) ** 2, rel=1e-5) and variance['one'] == 0


class _NoLayers:
  """A client whose model does not offer its layers, and which trains all of it."""

  frozen = ()

  class model:
    layers = None
