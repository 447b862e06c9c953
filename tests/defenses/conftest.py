import jax
import pytest


@pytest.fixture(scope='module', autouse=True)
def quick_compilation():
  """These tests compile much and compute little: XLA's optimisations would take a third of their time."""
  jax.config.update('jax_disable_most_optimizations', True)
  yield
  jax.config.update('jax_disable_most_optimizations', False)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
  """ConvNet compiles slowly: `pytest -m slow` runs its cases."""
  for item in items:
    if 'defenses/' in item.nodeid and 'convnet' in item.nodeid:
      item.add_marker(pytest.mark.slow)
