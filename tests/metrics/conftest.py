import jax
import pytest


@pytest.fixture(scope='module', autouse=True)
def quick_compilation():
  """These tests compile much and compute little: XLA's optimisations would take half of their time."""
  jax.config.update('jax_disable_most_optimizations', True)
  yield
  jax.config.update('jax_disable_most_optimizations', False)
