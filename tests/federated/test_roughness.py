"""How far noise on the private images turns an update, against gradients one by one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradleak as gl
from gradleak.core import trees
from gradleak.federated import roughness


def test_it_is_the_median_distance_of_uploads_with_the_same_draws(linear):
  client, variables, images, labels = linear.client, linear.variables, linear.samples[:6], linear.targets[:6]
  found = roughness(jax.random.key(3), client, variables, images, labels, stddevs=(0.0, 0.1, 1.0), batch_size=2)
  by_hand = []
  for key, x, y in zip(jax.random.split(jax.random.key(3), 3), np.split(images, 3), np.split(labels, 3), strict=True):
    noise_key, client_key = jax.random.split(key)
    noisy = jnp.asarray(x) + 0.1 * jax.random.normal(noise_key, x.shape)
    one, other = (client.local_update(client_key, variables, jnp.asarray(z), jnp.asarray(y)).update for z in (x, noisy))
    by_hand.append(1 - float(trees.cosine(one, other)))
  assert found[0.1] == pytest.approx(np.median(by_hand), rel=1e-3)
  assert found[0.0] == 0 < 1e-6 < found[0.1] < found[1.0]


def test_a_small_noise_turns_by_its_square(linear):
  """One minus a float32 cosine comes in steps of 6e-8."""
  given = jax.random.key(3), linear.client, linear.variables, linear.samples[:1], linear.targets[:1]
  found = roughness(*given, stddevs=(1e-4, 1e-3))
  assert found[1e-3] / found[1e-4] == pytest.approx(100, rel=0.05)


def test_bad_input(linear):
  given = jax.random.key(0), linear.client, linear.variables, linear.samples[:2], linear.targets[:2]
  with pytest.raises(gl.UsageError, match='batch_size is 3'):
    roughness(*given, batch_size=3)
  with pytest.raises(gl.UsageError, match='stddevs is -1'):
    roughness(*given, stddevs=(-1,))
