import jax
import jax.numpy as jnp
import pytest

from gradleak import Client, Knowledge, Observation


@pytest.fixture(scope='session')
def client(network):
  return Client(network[0], 10)


@pytest.fixture(scope='session')
def observe(network, client):
  """Returns what a server sees of some images: (samples, targets, the client, label mode) -> Observation."""

  compiled = {}

  def observation(images, labels, labels_mode='known', victim=client, **knowledge):
    variables = network[1] if victim.model is network[0] else victim.model.init(jax.random.key(0), (8, 8, 1))
    if victim not in compiled:  # eagerly, every operation would be compiled by itself
      compiled[victim] = jax.jit(victim.local_update)
    upload = compiled[victim](jax.random.key(9), variables, jnp.asarray(images), jnp.asarray(labels))
    onehot = jax.nn.one_hot(jnp.asarray(labels), 10)
    given = onehot if labels_mode == 'known' else jnp.zeros_like(onehot)
    granted = Knowledge(labels=labels_mode, share=victim.share, **knowledge)
    return Observation(variables, upload.update, given, granted, images.shape, 10)

  return observation
