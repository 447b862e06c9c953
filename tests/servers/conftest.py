import jax
import pytest

from gradleak import models


@pytest.fixture(scope='session')
def network():
  """A LeNet for 8×8 digits and its weights."""
  model = models.create('lenet', 10)
  return model, model.init(jax.random.key(0), (8, 8, 1))


@pytest.fixture(scope='session')
def prepared():
  """Returns the scenario of the model that the server of an attack sends: (attack, scenario, N, seed) -> `Scenario`."""

  def prepare(method, scenario, batch_size, seed=0):
    return method.server.build(method.server.numbers).prepare(jax.random.key(seed), scenario, batch_size)

  return prepare
