"""The Pythons of this machine that the package supports; as a program it prints the path of the newest one."""

import pathlib
import re
import shutil
import subprocess

ROOT = pathlib.Path(__file__).parent.parent
SUPPORTED = re.findall(r"Python :: (3\.\d+)'", (ROOT / 'setup.py').read_text('utf-8'))


def find(version):
  """Returns the path of a Python of this version, such as '3.12'; None where there is none."""
  installed = sorted((pathlib.Path.home() / '.pyenv' / 'versions').glob(f'{version}.*/bin/python'))
  for found in [*filter(None, [shutil.which(f'python{version}')]), *map(str, installed)]:
    asked = subprocess.run([found, '-c', 'import sys; print(*sys.version_info[:2], sep=".")'], capture_output=True)
    if asked.stdout.decode().strip() == version:
      return found
  return None


if __name__ == '__main__':
  print(next(filter(None, map(find, reversed(SUPPORTED)))))
