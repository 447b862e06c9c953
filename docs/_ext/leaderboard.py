"""The page of the leaderboard, and what its entries say of each task, made of results/leaderboard."""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import methods
from sphinx.application import Sphinx

from gradleak.core.storage import made_folder
from gradleak.report import deploy, write_leaderboard
from gradleak.report.formatting import listed, together
from gradleak.report.words import about
from gradleak.studies.autoleak import leaderboard
from gradleak.studies.autoleak.entry import number_of

DOCS = pathlib.Path(__file__).parents[1]
ENTRIES = DOCS.parent / 'results' / 'leaderboard'


def tasks(entries: Mapping[str, Mapping[str, Any]]) -> str:
  """Returns what to deploy on each task, in Markdown: a heading for each, and a line for each finding."""
  parts = []
  for of in sorted(_newest(entries), key=lambda of: (of[0]['task']['dataset'], of[0]['task']['model'])):
    parts.append(f'### {of[0]["task"]["model"]} on {of[0]["task"]["dataset"]}')
    with about(of[0]['task']['more']):
      parts.append('\n'.join(f'- {finding}' for finding in deploy.advice(of)))
  return '\n\n'.join(parts) + '\n'


def answers(entries: Mapping[str, Mapping[str, Any]]) -> str:
  """Returns the defense that shows least, by task and attacker, as a table in Markdown."""
  attackers = {
    'honest': 'a curious server',
    'malicious': 'a malicious server',
    'list': 'a server with a list of suspects',
  }
  lines = []
  for of in sorted(_newest(entries), key=lambda of: (of[0]['task']['dataset'], of[0]['task']['model'])):
    told = dict.fromkeys(attackers, '')
    for finding in deploy.advice(of):
      kind, _, side = finding.name.removeprefix('deploy.').partition('_')
      if kind in ('everyone', 'listed', 'hidden', 'undecided', 'shown', 'blind'):
        told[side or 'list'] = _answer(kind, finding.facts)
    lines.append((f'{of[0]["task"]["model"]} on {of[0]["task"]["dataset"]}', *told.values()))
  return methods._grid(('task', *attackers.values()), lines) + '\n'


def _answer(kind: str, facts: Mapping[str, Any]) -> str:
  """Returns the cell of a finding."""
  if kind == 'blind':
    return 'reconstructions fail even undefended'
  if kind == 'everyone':
    return f'none hides it: {facts["n"]} of {facts["n"]} named'
  if kind == 'listed':
    return f'**`{facts["best"]}`**, {facts["identified"]} of {facts["n"]} named'
  shown = f'`{facts["best"]}`, {facts["count"]} of {facts["n"]} shown'
  return {'hidden': f'**deploy** {shown}', 'undecided': f'{shown}; more uploads would decide'}.get(
    kind, f'none hides them; least: {shown}'
  )


def _newest(entries: Mapping[str, Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
  """Returns the entries of each task, of the newest version of AutoLeak that met the model on the dataset."""
  task = {name: (entry['task']['dataset'], entry['task']['model']) for name, entry in entries.items()}
  newest: dict[tuple[str, str], int] = {}
  for name, entry in entries.items():
    newest[task[name]] = max(number_of(entry), newest.get(task[name], 0))
  kept = [entry for name, entry in entries.items() if number_of(entry) == newest[task[name]]]
  return list(together((json.dumps(entry['task'], sort_keys=True), entry) for entry in kept).values())


def findings(entries: Mapping[str, Mapping[str, Any]]) -> list[str]:
  """Returns what the leaderboard found, in Markdown, a line for each: README.md holds them word for word."""
  of = {(entry['task']['dataset'], entry['text']): entry for task in _newest(entries) for entry in task}
  noisy, outpost = of['mnist', 'gaussian(stddev=0.2)'], of['mnist', 'outpost']
  faces = [text for (data, text), entry in of.items() if data == 'faces' and text != 'none' and _shown(entry) == 1]
  deep = [entry for (data, _), entry in of.items() if data == 'cifar10' and entry.get('likelihood')]
  named = [entry['likelihood'] for entry in deep if entry['defense'] != 'none']
  assert deep and all(one['identified'] == one['n'] for one in named)
  seen, undone = named[0], of['faces', faces[0]]['honest']['n']
  return [
    f'**{_share(outpost)} to {_share(noisy)} of {noisy["honest"]["n"]} digits stay recognisable** to a curious server '
    f'under OUTPOST and Gaussian noise, which cost at most {_at_most(noisy, outpost)} points of accuracy.',
    f'**{undone} of {undone} faces stay recognisable** to a server that knows the defense, under '
    f'{listed([f"`{text}`" for text in sorted(faces)])}.',
    f'**All {seen["n"]} originals are found without a picture**: on a trained ResNet-20 the likelihood of '
    f'an upload names each among {seen["candidates"]} others, under each of {len(named)} defenses.',
  ]


def _shown(entry: Mapping[str, Any]) -> float:
  """Returns the share of images that are recognisable to an honest-but-curious server."""
  return next(one['count'] for one in entry['honest']['levels'] if one['level'] == deploy.SHOWN) / entry['honest']['n']


def _share(entry: Mapping[str, Any]) -> str:
  return f'{100 * _shown(entry):.0f} %'


def _at_most(*entries: Mapping[str, Any]) -> str:
  return f'{max(entry["cost"]["points"] for entry in entries):.1f}'


def _write(app: Sphinx, exception: Exception | None) -> None:
  if exception is None and app.builder.format == 'html':
    write_leaderboard(ENTRIES, pathlib.Path(app.outdir, 'leaderboard.html'), 'methods/')


def _tasks() -> None:
  folder = made_folder(DOCS / '_deploy')
  entries = leaderboard.read(ENTRIES)
  (folder / 'tasks.md').write_text(tasks(entries), 'utf-8')
  (folder / 'answers.md').write_text(answers(entries), 'utf-8')
  (folder / 'findings.md').write_text('\n'.join(f'- {one}' for one in findings(entries)) + '\n', 'utf-8')


def setup(app: Sphinx) -> dict[str, bool]:
  """Writes the page when the others are written."""
  app.connect('builder-inited', lambda app: _tasks())
  app.connect('build-finished', _write)
  return {'parallel_read_safe': True, 'parallel_write_safe': True}
