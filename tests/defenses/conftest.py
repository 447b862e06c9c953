import jax
import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
  """ConvNet compiles slowly: `pytest -m slow` runs its cases."""
  for item in items:
    if 'defenses/' in item.nodeid and 'convnet' in item.nodeid:
      item.add_marker(pytest.mark.slow)


@pytest.fixture
def no_key_is_used_twice():
  with jax.debug_key_reuse(True):
    yield
