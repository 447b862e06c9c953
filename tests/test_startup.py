"""How JAX is configured by programs and scripts."""

import jax
import pytest

import gradleak as gl
from gradleak.engine import ahead


@pytest.fixture
def configuration():
  names = ('jax_compilation_cache_dir', 'jax_enable_x64')
  before = {name: jax.config.values[name] for name in names}
  yield lambda: [jax.config.values[name] for name in names]
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


def test_it_cannot_come_after_the_first_computation(monkeypatch):
  monkeypatch.setattr(ahead, 'cores', lambda: len(jax.devices()) + 1)
  with pytest.raises(gl.UsageError, match=r'call gl.configure\(\) first'):
    gl.configure()
