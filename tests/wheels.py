"""Builds a source distribution and a wheel of the checkout, as a release does."""

import shutil
import subprocess
import sys

from tests.programs import ROOT


def run(*command, **options):
  """Returns what a command printed; it must end well."""
  done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=1500, **options)
  assert done.returncode == 0, done.stdout + done.stderr
  return done.stdout


def build(folder):
  """Builds both in a folder, the wheel from the source distribution; returns the path of the wheel."""
  kept = shutil.ignore_patterns('.*', '__pycache__', '*.egg-info', 'results', '_build')
  shutil.copytree(ROOT, folder / 'checkout', ignore=kept)
  run(sys.executable, 'setup.py', '-q', 'sdist', '-d', folder, cwd=folder / 'checkout')
  (archive,) = folder.glob('*.tar.gz')
  run(sys.executable, '-m', 'pip', 'wheel', '-q', '--no-deps', '-w', folder, archive)
  (found,) = folder.glob('*.whl')
  return found
