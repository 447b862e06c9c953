"""Tables that fit: on a narrow screen each line of a table stands as a block, each cell behind its heading."""

import re
from typing import Any

from bs4 import BeautifulSoup
from sphinx.application import Sphinx

LONG = 16  # characters of a name that may be broken
FEW, MANY = 2, 4  # columns that fit beside each other anywhere, and those that need small print
_TABLE = re.compile(r'<table\b.*?</table>', re.S)


def labelled(table: str) -> str:
  """Returns an HTML table whose cells know their headings; one of few columns keeps its form."""
  soup = BeautifulSoup(table, 'html.parser')
  heads = [head.get_text(' ', strip=True) for head in soup.select('thead tr:last-child > *')]
  for code in soup.select('code'):
    if len(code.get_text()) > LONG:
      code['class'] = [*code.get('class', []), 'long']
  if len(heads) <= FEW:
    return str(soup)
  soup.table['class'] = [*soup.table.get('class', []), 'stacked', *(['wide'] if len(heads) >= MANY else [])]
  for row in soup.select('tbody tr'):
    for cell, head in zip(row.find_all(['td', 'th'], recursive=False), heads, strict=False):
      cell['data-label'] = head
      if not cell.get_text(strip=True) and not cell.img:
        cell['class'] = [*cell.get('class', []), 'empty']
  return str(soup)


def _process(app: Sphinx, page: str, template: str, context: dict[str, Any], tree: Any) -> None:
  del app, template, tree
  if 'body' in context:
    context['body'] = _TABLE.sub(lambda found: labelled(found[0]), context['body'])
    if page.startswith(('results/', 'methods/')):
      context['body'] = f'<div class="made {page.partition("/")[0]}">{context["body"]}</div>'


def setup(app: Sphinx) -> dict[str, bool]:
  """Processes each page before it is written."""
  app.connect('html-page-context', _process)
  return {'parallel_read_safe': True, 'parallel_write_safe': True}
