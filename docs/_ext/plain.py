"""What the site adds to documents that are plain Markdown, so that they can be read without it.

Some documents of the checkout stand outside of docs; links to these lead to the pages that include them.
"""

import re

from sphinx.application import Sphinx

PAGES = {'BUILD.md': '/development.md', 'CHANGELOG.md': '/changes.md'}
_LINK = re.compile(rf'\]\((?:\.\./)+({"|".join(map(re.escape, PAGES))})')


def _read(app: Sphinx, name: str, source: list[str]) -> None:
  del app, name
  source[0] = _LINK.sub(lambda found: f']({PAGES[found[1]]}', source[0])


def setup(app: Sphinx) -> dict[str, bool]:
  """Adds to each document when it is read."""
  app.connect('source-read', _read)
  return {'parallel_read_safe': True, 'parallel_write_safe': True}
