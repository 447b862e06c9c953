"""A wheel brings one name, everything that it needs, and the command; so does a source distribution."""

import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile

import pytest

from gradleak import cli
from tests import wheels
from tests.programs import ROOT
from tests.wheels import run


def test_the_command_lists_every_program(capsys, monkeypatch):
  programs = {path.stem for path in (ROOT / 'launch').glob('*.py') if not path.stem.startswith('_')}
  assert set(cli.PROGRAMS) == programs
  monkeypatch.setattr(sys, 'argv', ['gradleak'])
  cli.main()
  shown = capsys.readouterr().out
  assert all(f'  {name} ' in shown for name in programs)


def test_an_unknown_program_is_one_line(capsys, monkeypatch):
  monkeypatch.setattr(sys, 'argv', ['gradleak', 'audi'])
  with pytest.raises(SystemExit, match='2'):
    cli.main()
  assert capsys.readouterr().err.startswith("gradleak: unknown program 'audi' (valid: audit, ")


@pytest.mark.skipif(shutil.which('make') is None, reason='make is not installed')
@pytest.mark.parametrize('python', ['nothing', '/no/such/python3', '/'])
def test_make_says_that_there_is_no_such_python(tmp_path, python):
  command = ['make', '--no-print-directory', 'audit', f'PYTHON={python}', f'VENV={tmp_path}/new']
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
  assert done.returncode == 2
  assert done.stdout == f'there is no Python {python} that runs: make PYTHON=python3.12 …\n'
  assert not list(tmp_path.iterdir())


@pytest.fixture(scope='module')
def built(tmp_path_factory):
  """Returns the folder of a wheel that was built from a source distribution, and of that."""
  folder = tmp_path_factory.mktemp('built')
  wheels.build(folder)
  return folder


@pytest.mark.slow
def test_the_wheel_has_one_name_and_all_that_lies_in_the_checkout(built):
  (wheel,) = built.glob('*.whl')
  names = zipfile.ZipFile(wheel).namelist()
  assert {name.split('/')[0].split('-')[0] for name in names} == {'gradleak'}
  source = {
    str(path.relative_to(ROOT))
    for path in (ROOT / 'gradleak').rglob('*')
    if path.suffix in ('.py', '.css', '.js', '.toml', '.typed')
  }
  assert source <= set(names)
  for outside, inside in cli.INSIDE.items():
    modules = {path.name for path in (ROOT / outside).glob('*.py')}
    assert modules <= {name.split('/')[-1] for name in names if name.startswith(inside.replace('.', '/'))}
  with tarfile.open(next(built.glob('*.tar.gz'))) as archive:
    inside = {'/'.join(name.split('/')[1:]) for name in archive.getnames()}
  top = {'README.md', 'BUILD.md', 'CHANGELOG.md', 'LICENSE', 'Makefile', 'pyproject.toml', 'setup.py'}
  below = {
    'docs/slide.png',
    'tests/test_audit.py',
    'launch/audit.py',
    'examples/audit_your_model.py',
    'experiments/dcs2.py',
  }
  assert top | below | source <= inside


@pytest.mark.slow
def test_the_command_runs_where_only_the_wheel_is_installed(built, tmp_path):
  """An environment of its own; the packages that gradleak needs are lent to it, not gradleak."""
  run(sys.executable, '-m', 'venv', tmp_path / 'venv')
  place = tmp_path / 'venv' / 'bin'
  run(place / 'python', '-m', 'pip', 'install', '-q', '--no-deps', next(built.glob('*.whl')))
  lent = {**os.environ, 'PYTHONPATH': sysconfig.get_path('purelib')}
  given = {'cwd': tmp_path, 'env': lent}
  where = pathlib.Path(run(place / 'python', '-c', 'import gradleak; print(gradleak.__file__)', **given).strip())
  assert (tmp_path / 'venv') in where.parents
  assert run(place / 'gradleak', '--version', **given).startswith('gradleak 0.')
  assert '--defenses' in run(place / 'gradleak', 'audit', '--help', **given)
  assert 'dcs2_1' in run(place / 'gradleak', 'reproduce', '--list', **given)
  small = ['--dataset=digits', '--model=mlp(widths=16)', '--trials=2', '--steps=5', '--controls=2', '--defenses=none']
  done = run(place / 'gradleak', 'audit', *small, '--compilation_cache=', '--workdir=out', '--progress=none', **given)
  assert 'report: out/report.html' in done and (tmp_path / 'out' / 'report.html').exists()


@pytest.mark.slow
def test_a_script_beside_a_checkout_imports_the_package(built, tmp_path):
  """The checkout's folder has the name of the package and stands first on the path of the script."""
  checkout, python = tmp_path / 'gradleak', tmp_path / 'venv' / 'bin' / 'python'
  (built / 'checkout').rename(checkout)
  run(sys.executable, '-m', 'venv', tmp_path / 'venv')
  run(python, '-m', 'pip', 'install', '-q', '--no-deps', '--editable', checkout)
  script = tmp_path / 'mine.py'
  script.write_text("import importlib.util\nprint(importlib.util.find_spec('gradleak').origin)\n")
  alone = {name: value for name, value in os.environ.items() if name != 'PYTHONPATH'}
  assert run(python, script, env=alone).strip() == str(checkout / 'gradleak' / '__init__.py')
