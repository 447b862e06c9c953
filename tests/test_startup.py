"""How JAX is configured by programs and scripts."""

import jax
import pytest

import gradleak as gl
from gradleak.engine import ahead

LEAST = 'jax_persistent_cache_min_compile_time_secs'
PRECISION = 'jax_default_matmul_precision'


@pytest.fixture
def configuration():
  names = ('jax_compilation_cache_dir', 'jax_enable_x64', LEAST, PRECISION)
  before = {name: jax.config.values[name] for name in names}
  yield lambda: [jax.config.values[name] for name in names[:2]]
  for name, value in before.items():
    jax.config.update(name, value)


def test_it_sets_the_cache_and_leaves_what_is_not_asked_for(configuration, monkeypatch, tmp_path):
  monkeypatch.setattr(ahead, 'cores', lambda: len(jax.devices()))
  monkeypatch.setenv('HOME', str(tmp_path))
  folder, x64 = configuration()
  gl.configure(cache='')
  assert configuration() == [folder, x64]
  gl.configure()
  assert configuration() == [f'{tmp_path}/.cache/gradleak', x64]
  gl.configure(cache=None, x64=True)
  assert configuration() == [f'{tmp_path}/.cache/gradleak', True]


@pytest.mark.parametrize(('before', 'after', 'folder'), [(1.0, 0.0, 'kept'), (1.0, 1.0, ''), (3.0, 3.0, 'kept')])
def test_small_programs_are_kept_unless_a_user_says_otherwise(
  configuration, monkeypatch, tmp_path, before, after, folder
):
  monkeypatch.setattr(ahead, 'cores', lambda: len(jax.devices()))
  jax.config.update(LEAST, before)
  gl.configure(cache=folder and str(tmp_path / folder))
  assert jax.config.values[LEAST] == after


@pytest.mark.parametrize(('before', 'after'), [(None, 'highest'), ('tensorfloat32', 'tensorfloat32')])
def test_products_have_the_digits_of_float32_unless_a_user_says_otherwise(configuration, monkeypatch, before, after):
  monkeypatch.setattr(ahead, 'cores', lambda: len(jax.devices()))
  jax.config.update(PRECISION, before)
  gl.configure(cache='')
  assert jax.config.values[PRECISION] == after


def test_it_cannot_come_after_the_first_computation(monkeypatch):
  monkeypatch.setattr(ahead, 'cores', lambda: len(jax.devices()) + 1)
  with pytest.raises(gl.UsageError, match=r'call gl.configure\(\) first'):
    gl.configure()
