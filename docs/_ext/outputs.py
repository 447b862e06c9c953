"""What the blocks of a page print, behind each of them; a test stores and checks it (tests/docs/outputs.py)."""

import pathlib
import sys

from sphinx.application import Sphinx

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.docs import outputs  # noqa: E402


def shown(text: str, path: pathlib.Path, stored: dict[str, str]) -> str:
  """Returns a document with the output of each block that has one."""
  lines = text.split('\n')
  for block in reversed(outputs.kept(path, text)):
    if printed := stored.get(outputs.key(block)):
      last = block.line + block.code.count('\n')  # of the fence that ends it, counted from 1
      lines[last:last] = ['', '```{code-block} text', ':class: printed', '', *printed.split('\n'), '```']
  return '\n'.join(lines)


def _read(app: Sphinx, name: str, source: list[str]) -> None:
  path = pathlib.Path(app.srcdir, f'{name}.md')
  found = outputs.read().get(f'docs/{name}.md')
  if found and path.is_file():
    source[0] = shown(source[0], path, found)


def setup(app: Sphinx) -> dict[str, bool]:
  """Adds to each document when it is read."""
  app.connect('source-read', _read)
  return {'parallel_read_safe': True, 'parallel_write_safe': True}
