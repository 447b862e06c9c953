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
  """ConvNet compiles slowly: by default it stands only in the comparisons marked `reference`, in the case they name."""
  for item in items:
    if 'defenses/' in item.nodeid and 'convnet' in item.nodeid:
      marker = item.get_closest_marker('reference')
      if marker is None or not all(case in item.nodeid for case in marker.args):
        item.add_marker(pytest.mark.slow)
