"""Parts of pages that are made of the code and of stored results: tiers, BibTeX, the gallery and the explorer."""

import html
import json
import pathlib
import shutil
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

import facts
import methods
import yaml
from explorer_rows import STORED
from sphinx.application import Sphinx

from experiments import judgement, pages
from experiments.experiment import duration
from gradleak.core.storage import made_folder
from gradleak.report import captured
from gradleak.threat.knowledge import TIERS

DOCS = pathlib.Path(__file__).parents[1]
MADE = DOCS / '_deploy'
_KINDS = {'conference-paper': ('inproceedings', 'booktitle'), 'article': ('article', 'journal')}


def tiers() -> str:
  """Returns the tiers of attackers as a table in Markdown."""
  return methods._grid(('tier', 'attacker', 'what it has'), ((one, *text.split(': ')) for one, text in TIERS.items()))


def bibtex(citation: Mapping[str, Any]) -> str:
  """Returns what CITATION.cff names as BibTeX, in a block of code."""
  authors = ' and '.join(f'{{{one["name"]}}}' for one in citation['authors'])
  year = str(citation['date-released'])[:4]
  software = {'author': authors, 'title': f'{{{citation["title"]}}}', 'version': citation['version'], 'year': year}
  entries = [_entry('software', citation['title'], software | {'note': citation['abstract']})]
  for paper in citation['references']:
    kind, where = _KINDS[paper['type']]
    place = paper.get('collection-title') or paper.get('journal')
    names = ' and '.join(f'{one["family-names"]}, {one["given-names"]}' for one in paper['authors'])
    fields = {'author': names, 'title': f'{{{paper["title"]}}}', where: place, 'year': paper['year']}
    name = f'{paper["authors"][0]["family-names"].lower().replace("-", "")}{paper["year"]}'
    entries.append(_entry(kind if place else 'misc', name, fields))
  return '```bibtex\n' + '\n\n'.join(entries) + '\n```\n'


def _entry(kind: str, name: str, fields: Mapping[str, Any]) -> str:
  lines = [f'  {field} = {{{value}}},' for field, value in fields.items() if value]
  return '\n'.join([f'@{kind}{{{name},', *lines, '}'])


def gallery() -> str:
  """Returns a card per stored table that has pictures of reconstructions, by paper, in Markdown."""
  by_paper: dict[str, list[str]] = {}
  for stored, judged in facts._stored():
    seen = any(judgement.pictured(cell.metric) for cell in judged.experiment.cells)
    if stored.pictures and seen and stored.scale == facts.SHOWN:
      name, title = judged.experiment.name, judged.experiment.table
      shutil.copy(facts.TABLES / stored.scale / stored.pictures[0], made_folder(MADE / 'gallery'))
      card = f':::{{grid-item-card}} {title}\n:link: results/{name}\n:link-type: doc\n\n'
      by_paper.setdefault(pages.paper_of(name), []).append(
        f'{card}![{title}](_deploy/gallery/{stored.pictures[0]})\n:::'
      )
  parts = []
  for paper, cards in by_paper.items():
    parts += [
      f'## {paper}',
      '::::{grid} 1 2 3 3\n:gutter: 2\n:class-container: gallery\n\n' + '\n\n'.join(cards) + '\n::::',
    ]
  return '\n\n'.join(parts) + '\n'


def times() -> str:
  """Returns how long the stored tables took, by paper, as a table in Markdown."""
  by_paper: dict[str, list[float]] = {}
  devices = set()
  for stored, judged in facts._stored():
    if stored.scale == facts.SHOWN:
      by_paper.setdefault(pages.paper_of(judged.experiment.name), []).append(stored.seconds)
      devices.add(stored.versions.get('device', 'an unknown device'))
  rows = [
    (paper, len(found), duration(statistics.median(found)), duration(max(found)), duration(sum(found)))
    for paper, found in by_paper.items()
  ]
  return methods._grid((f'on {", ".join(sorted(devices))}', 'tables', 'median', 'longest', 'all'), rows)


def explorer(rows: Iterable[Mapping[str, Any]]) -> str:
  """Returns the explorer: fields to choose by, pictures for each choice, and the script that changes them."""
  found = list(rows)
  choices = {
    part: ''.join(f'<option>{html.escape(one)}</option>' for one in dict.fromkeys(row[part] for row in found))
    for part in ('attack', 'defense')
  }
  fields = ''.join(
    f'<label>{part} <select name="{part}">{options}</select></label>' for part, options in choices.items()
  )
  data = json.dumps(found).replace('</', '<\\/')
  script = (DOCS / '_static' / 'explorer.js').read_text('utf-8')
  return (
    f'<form class="explorer">{fields}<label>strength <input type="range" name="strength" min="0" step="1"> '
    '<output></output></label></form><div class="explored" aria-live="polite"><noscript>The explorer '
    'needs JavaScript; the <a href="gallery.html">gallery</a> does not.</noscript></div>'
    f'<script type="application/json" id="explored">{data}</script><script>{script}</script>\n'
  )


def _write(app: Sphinx) -> None:
  del app
  made_folder(MADE)
  texts = {
    'tiers.md': tiers(),
    'cite.md': bibtex(yaml.safe_load((DOCS.parent / 'CITATION.cff').read_text('utf-8'))),
    'gallery.md': gallery(),
    'times.md': times(),
    'captured.md': methods._grid(('column', 'what it is'), captured.terms().items()),
    'explorer.html': explorer(json.loads(STORED.read_text('utf-8'))['rows']),
  }
  for name, text in texts.items():
    (MADE / name).write_text(text, 'utf-8')


def setup(app: Sphinx) -> dict[str, bool]:
  """Writes the parts when a build starts."""
  app.connect('builder-inited', _write)
  return {'parallel_read_safe': True, 'parallel_write_safe': True}
