"""The wheel is installed with its dependencies and run: on each supported Python, and with the lowest versions allowed.

Slow, and needs a network: `pytest -m slow tests/test_versions.py`. Interpreters that are not on this machine are
skipped by name.
"""

import email
import sys
import zipfile

import pytest

from tests import interpreters, wheels
from tests.wheels import run

AUDIT = (
  '--dataset=digits', '--model=mlp(widths=16)', '--trials=2', '--steps=5', '--controls=2', '--progress=none',
  '--defenses=none;prune(rate=0.9);outpost', '--compilation_cache=', '--workdir=out',
)  # fmt: skip

pytestmark = pytest.mark.slow


def interpreter(version):
  """Returns a Python of this version; skips the test where there is none."""
  return interpreters.find(version) or pytest.skip(f'there is no Python {version} on this machine')


@pytest.fixture(scope='module')
def wheel(tmp_path_factory):
  return wheels.build(tmp_path_factory.mktemp('wheel'))


def audited(place, folder):
  """Returns what a small audit printed."""
  printed = run(place / 'bin' / 'gradleak', 'audit', *AUDIT, cwd=folder)
  assert 'report: out/report.html' in printed and (folder / 'out' / 'report.html').exists()
  listed = run(place / 'bin' / 'python', '-c', 'import jax, sys; print(sys.version.split()[0], jax.__version__)')
  print(f'ran with Python and JAX {listed.strip()}')


@pytest.mark.parametrize('version', interpreters.SUPPORTED)
def test_the_newest_dependencies(version, wheel, tmp_path):
  run(interpreter(version), '-m', 'venv', tmp_path / 'venv')
  run(tmp_path / 'venv' / 'bin' / 'python', '-m', 'pip', 'install', '-q', wheel)
  audited(tmp_path / 'venv', tmp_path)


def test_the_lowest_dependencies(wheel, tmp_path):
  place, tool = tmp_path / 'venv', tmp_path / 'tool'
  run(interpreter(interpreters.SUPPORTED[0]), '-m', 'venv', place)
  run(sys.executable, '-m', 'venv', tool)
  run(tool / 'bin' / 'python', '-m', 'pip', 'install', '-q', 'uv')
  uv = tool / 'bin' / 'uv'
  with zipfile.ZipFile(wheel) as archive:
    name = next(name for name in archive.namelist() if name.endswith('METADATA'))
    needed = email.message_from_bytes(archive.read(name)).get_all('Requires-Dist')
  (tmp_path / 'lowest.txt').write_text('\n'.join(one for one in needed if 'extra ==' not in one))
  given = '--python', place / 'bin' / 'python', '--system-certs'
  run(uv, 'pip', 'install', '-q', *given, '--resolution', 'lowest-direct', '-r', tmp_path / 'lowest.txt')
  run(uv, 'pip', 'install', '-q', *given, '--no-deps', wheel)
  audited(place, tmp_path)
