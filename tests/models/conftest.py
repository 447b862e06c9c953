import jax
import pytest


@pytest.fixture(scope='module', autouse=True)
def quick_compilation():
  """Compiles without XLA's optimisations: these tests compile much and compute little, and become a third faster."""
  jax.config.update('jax_disable_most_optimizations', True)
  yield
  jax.config.update('jax_disable_most_optimizations', False)
