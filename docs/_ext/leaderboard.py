"""The page of the leaderboard, and what its entries say of each task, made of results/leaderboard."""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from sphinx.application import Sphinx

from gradleak.core.storage import made_folder
from gradleak.report import deploy, write_leaderboard
from gradleak.report.formatting import together
from gradleak.studies.autoleak import leaderboard

DOCS = pathlib.Path(__file__).parents[1]
ENTRIES = DOCS.parent / 'results' / 'leaderboard'


def tasks(entries: Mapping[str, Mapping[str, Any]]) -> str:
  """Returns what to deploy on each task, in Markdown: a heading for each, and a line for each finding."""
  grouped = together((json.dumps(entry['task'], sort_keys=True), entry) for entry in entries.values())
  parts = []
  for of in sorted(grouped.values(), key=lambda of: (of[0]['task']['dataset'], of[0]['task']['model'])):
    parts.append(f'### {of[0]["task"]["model"]} on {of[0]["task"]["dataset"]}')
    parts.append('\n'.join(f'- {finding}' for finding in deploy.advice(of)))
  return '\n\n'.join(parts) + '\n'


def _write(app: Sphinx, exception: Exception | None) -> None:
  if exception is None and app.builder.format == 'html':
    write_leaderboard(ENTRIES, pathlib.Path(app.outdir, 'leaderboard.html'))


def _tasks() -> None:
  folder = made_folder(DOCS / '_deploy')
  (folder / 'tasks.md').write_text(tasks(leaderboard.read(ENTRIES)), 'utf-8')


def setup(app: Sphinx) -> dict[str, bool]:
  """Writes the page when the others are written."""
  app.connect('builder-inited', lambda app: _tasks())
  app.connect('build-finished', _write)
  return {'parallel_read_safe': True, 'parallel_write_safe': True}
