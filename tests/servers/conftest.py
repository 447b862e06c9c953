import jax
import numpy as np
import pytest


@pytest.fixture(scope='session')
def prepared():
  """Returns the scenario of the model that the server of an attack sends: (attack, scenario, N, seed) -> `Scenario`."""

  def prepare(method, scenario, batch_size, seed=0):
    return method.server.build(method.server.numbers).prepare(jax.random.key(seed), scenario, batch_size)

  return prepare


@pytest.fixture(scope='session')
def digits():
  """All 1,797 digits, float32 [N, 8, 8, 1] in [0, 1], and their labels."""
  from sklearn.datasets import load_digits

  data = load_digits()
  return (data.images[..., None] / 16).astype(np.float32), data.target.astype(np.int32)
