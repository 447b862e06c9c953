import jax
import pytest


@pytest.fixture(scope='session')
def prepared():
  """Returns the scenario of the model that the server of an attack sends: (attack, scenario, N, seed) -> `Scenario`."""

  def prepare(method, scenario, batch_size, seed=0):
    return method.server.build(method.server.numbers).prepare(jax.random.key(seed), scenario, batch_size)

  return prepare
