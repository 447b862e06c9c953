"""The page of the leaderboard, and what its entries say of each task, made of results/leaderboard."""

import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import methods
from sphinx.application import Sphinx

from gradleak.core.storage import made_folder
from gradleak.report import deploy, write_leaderboard
from gradleak.report.formatting import at_least, at_most, listed, percent_range, together
from gradleak.report.shares import shares_picture
from gradleak.report.words import Finding, about, said
from gradleak.studies.autoleak import ensemble, leaderboard
from gradleak.studies.autoleak.entry import number_of

DOCS = pathlib.Path(__file__).parents[1]
ENTRIES = DOCS.parent / 'results' / 'leaderboard'


ATTACKERS = {
  'honest': 'a curious server',
  'malicious': 'a malicious server, by the worse of both',
  'list': 'a server with a list of suspects',
}
# Findings of `deploy.advice` that the table holds.
_ANSWERS = 'everyone', 'listed', 'hidden', 'flagged', 'undecided', 'shown', 'blind', 'unpriced', 'inconclusive'


def tasks(entries: Mapping[str, Mapping[str, Any]], folder: pathlib.Path) -> str:
  """Returns in Markdown what else is known of each task, below a figure of leak and cost, written to a folder."""
  parts = []
  for place, of in enumerate(_newest(entries)):
    parts.append(f'### {_title(of)}')
    drawn = shares_picture(of)
    if drawn is not None:
      (folder / f'shares-{place}.png').write_bytes(drawn)
      picture = f'![{said("leaderboard.shares")}](_deploy/shares-{place}.png)'
      parts.append(f':::{{div}} scrolled\n{picture}\n:::')
    with about(of[0]['task']['more']):
      parts.append('\n'.join(f'- {one}' for one in deploy.advice(of) if _kind(one)[0] not in _ANSWERS))
  return '\n\n'.join(filter(None, parts)) + '\n'


def answers(entries: Mapping[str, Mapping[str, Any]]) -> str:
  """Returns the defense that shows least, by task and attacker: sentences, and a table in Markdown."""
  lines, found = [], dict[str, list[tuple[str, Finding]]]()
  for of in _newest(entries):
    told = dict.fromkeys(ATTACKERS, '')
    for finding in deploy.advice(of):
      kind, side = _kind(finding)
      if kind == 'inconclusive':
        unknown = listed(f'`{one}`' for one in finding.facts['names'])
        told[side] = '; '.join(filter(None, [told[side], f'not known of {unknown}, whose attacks did not converge']))
      elif kind in _ANSWERS:
        told[side] = _answer(kind, finding.facts)
        found.setdefault(side, []).append((_short(of), finding))
    nobody = f'no defense is known to cost at most {deploy.AFFORDABLE:g} points'
    lines.append((_title(of), *(one or nobody for one in told.values())))
  return f'{_led(found)} {_uploads(_newest(entries))}\n\n{methods._grid(("task", *ATTACKERS.values()), lines)}\n'


def _kind(finding: Finding) -> tuple[str, str]:
  """Returns (what a finding says, of which of `ATTACKERS`)."""
  kind, _, side = finding.name.removeprefix('deploy.').partition('_')
  return kind, side or 'list'


def _led(found: Mapping[str, Sequence[tuple[str, Finding]]]) -> str:
  """Returns the answer for a curious server, and for one with a list of suspects, over all tasks."""
  seen = [(title, finding) for title, finding in found['honest'] if 'best' in finding.facts]
  best = together((finding.facts['best'], title) for title, finding in seen if not finding.facts['alike'])
  named = listed([f'`{one}` ({", ".join(titles)})' for one, titles in best.items()] or ['none'])
  alike = [title for title, finding in seen if finding.facts['alike']]
  told = f'**Against a curious server these show least: {named}.** '
  if alike:
    told += f'Noise could put another defense first on {len(alike)} of {len(seen)} tasks: {listed(alike)}. '
  hidden = [title for title, finding in seen if _kind(finding)[0] == 'hidden']
  told += f'That at most {100 * deploy.HIDDEN:.0f} % of the samples are shown, with a confidence of 95 % and no flag, '
  told += f'holds on {len(hidden) or "none"} of the {len(seen)} tasks where a defense is known to cost at most '
  told += f'{deploy.AFFORDABLE:g} points and undefended samples are recovered'
  told += f': {listed(hidden)}. ' if hidden else '. '
  if {_kind(finding)[0] for _, finding in found.get('list', ())} == {'everyone'}:
    told += 'None of those counted hides whose sample an upload is from. '
  return told + 'Who needs a guarantee needs [differential privacy](concepts/epsilon.md).'


def _uploads(tasks: Sequence[Sequence[Mapping[str, Any]]]) -> str:
  """Returns what a client of the tasks sends."""
  sent = dict.fromkeys((entry['task']['more']['share'], entry['task']['batch_size']) for of in tasks for entry in of)
  kinds = [f'the {share} of {size} sample{"s" if size > 1 else ""}' for share, size in sent]
  return f'Every upload here is {listed(kinds, "or")}: audit your own batch and local steps.'


def _others(facts: Mapping[str, Any]) -> str:
  """Returns how many other defenses are within noise of the best one; '' for none."""
  return f'; {str(facts["others"]).strip(" .")}' if facts['others'] else ''


def _answer(kind: str, facts: Mapping[str, Any]) -> str:
  """Returns the cell of a finding."""
  if kind == 'blind':
    return f'reconstructions fail even undefended (0 of {facts["n"]})'
  if kind in ('everyone', 'listed'):
    named = f'{facts["identified"]} of {facts["n"]} named among {facts["candidates"]} others'
    best = f'**`{facts["best"]}`**, {named}; costs {facts["cost"]}{_others(facts)}'
    return f'none counted hides it: {named}' if kind == 'everyone' else best
  if kind == 'unpriced':
    names = facts['names']
    least = listed(f'`{one}`' for one in names) if len(names) < 5 else f'{len(names)} defenses'
    shown = f'{least}: {facts["count"]} of {facts["n"]} shown ({percent_range(facts["range"])}), cost unknown'
    shown += _others(facts)
    return f'{shown}; flagged: {listed(facts["doubt"].facts["flags"])}' if facts['doubt'] else shown
  shown = f'`{facts["best"]}`: {facts["count"]} of {facts["n"]} shown ({percent_range(facts["range"])}), '
  shown += f'costs {facts["cost"]}{_others(facts)}'
  return {
    'hidden': f'**deploy** {shown}',
    'flagged': f'{shown}; flagged: {facts.get("flags")}',
    'undecided': f'{shown}; more uploads would decide',
  }.get(kind, f'none counted hides them; least {shown}')


def _title(of: Sequence[Mapping[str, Any]]) -> str:
  """Returns what people call a task; how its model takes pixels is said on the leaderboard."""
  title = f'{of[0]["task"]["model"].partition("+")[0]} on {of[0]["task"]["dataset"]}'
  version = f'AutoLeak-{number_of(of[0])}'
  return title if version == ensemble.VERSION else f'{title} ({version}, {of[0]["honest"]["n"]} uploads)'


def _short(of: Sequence[Mapping[str, Any]]) -> str:
  return f'{of[0]["task"]["model"].partition("+")[0].partition("(")[0]} on {of[0]["task"]["dataset"]}'


def _newest(entries: Mapping[str, Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
  """Returns the entries of each task, by dataset, of the newest AutoLeak that met the model on it."""
  task = {name: _of_model(entry) for name, entry in entries.items()}
  newest: dict[tuple[str, str], int] = {}
  for name, entry in entries.items():
    newest[task[name]] = max(number_of(entry), newest.get(task[name], 0))
  kept = [entry for name, entry in entries.items() if number_of(entry) == newest[task[name]]]
  grouped = together((json.dumps(entry['task'], sort_keys=True), entry) for entry in kept)
  return sorted(
    map(deploy.largest, grouped.values()),
    key=lambda of: (-number_of(of[0]), of[0]['task']['dataset'], of[0]['task']['model']),
  )


def findings(entries: Mapping[str, Mapping[str, Any]]) -> list[str]:
  """Returns what the leaderboard found, in Markdown, a line for each: README.md holds them word for word."""
  newest = [entry for task in _newest(entries) for entry in task]
  of = {(_of_model(one), one['text']): one for one in sorted(newest, key=lambda one: one['trials'])}
  digits, people, colour = [(data, 'lenet') for data in ('mnist', 'faces', 'cifar10')]
  faces = [text for (task, text), entry in of.items() if task == people and text != 'none' and _shown(entry) == 1]
  named = _ranked(entry for entry in entries.values() if entry['task']['model'].startswith('resnet20'))
  seen, undone = max(named.values(), key=lambda one: one['n']), of[people, faces[0]]['honest']['n']
  every = [one for one in named.values() if one['identified'] == one['n'] == seen['n']]
  fewer = [f'{one["identified"]} of {one["n"]} under `{text}`' for text, one in named.items() if one not in every]
  assert len(every) > len(fewer)
  return [
    _of_digits([entry for (task, _), entry in of.items() if task == digits]),
    f'**{undone} of {undone} faces stay recognisable** to a server that knows the defense, under '
    f'{listed(_strengths(sorted(faces)))}.',
    f'**All {seen["n"]} originals are found without a picture**: on a trained ResNet-20 the likelihood of '
    f'an upload names each among {seen["candidates"]} others, under each of {len(every)} defenses.'
    + (f' It finds {listed(fewer)}.' if fewer else ''),
    _in_colour([entry for (task, _), entry in of.items() if task == colour]),
  ]


def _of_model(entry: Mapping[str, Any]) -> tuple[str, str]:
  return entry['task']['dataset'], entry['task']['model']


def _of_digits(entries: Sequence[Mapping[str, Any]]) -> str:
  """Returns how many digits are recognisable under each of the affordable defenses, at least."""
  cheap = [entry for entry in entries if entry['defense'] != 'none' and deploy.affordable(entry)]
  (number,) = {entry['honest']['n'] for entry in cheap}
  least = min(cheap, key=_shown)
  return (
    f'**At least {at_least(100 * _shown(least), 0)} % of {number} digits stay recognisable** under each of the '
    f'{len(cheap)} defenses known to cost at most {deploy.AFFORDABLE:g} points of accuracy. The server is curious and '
    f'holds public digits. `{least["text"]}` shows least; it costs at most {at_most(max(least["cost"]["interval"]))}.'
  )


def _in_colour(entries: Sequence[Mapping[str, Any]]) -> str:
  """Returns which defenses hide all colour images or none, what hiding costs at least, and where attacks failed."""
  defended = sorted((entry for entry in entries if entry['defense'] != 'none'), key=lambda one: one['text'])
  (number,) = {entry['honest']['n'] for entry in defended}
  grouped = together((_shown(entry), entry) for entry in defended)
  lost = [entry for entry in grouped[0.0] if deploy.failed(entry['honest'])]
  hiding = [entry for entry in grouped[0.0] if entry not in lost]
  none, every, unknown = (
    listed(_strengths([one['text'] for one in of]) or ['none']) for of in (grouped[1.0], hiding, lost)
  )
  told = f'**All of {number} colour images stay recognisable** to a curious server (CIFAR-10, LeNet), under {none}.'
  if hiding:
    least = at_least(min(min(entry['cost']['interval']) for entry in hiding))
    told += f' Under {every} none does; these cost at least {least} points of accuracy.'
  return f'{told} Under {unknown} the attacks did not converge, which says nothing for these.' if lost else told


def _ranked(entries: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
  """Returns defense -> how many originals the likelihood ranks first, of the entry with the most uploads."""
  most: dict[str, Mapping[str, Any]] = {}
  for entry in entries:
    seen = entry.get('likelihood')
    if seen and entry['defense'] != 'none' and seen['n'] > most.get(entry['text'], {'n': 0})['n']:
      most[entry['text']] = seen
  return most


def _strengths(texts: Sequence[str]) -> list[str]:
  """Returns defenses in Markdown, those of one name together."""
  grouped = together((text.partition('(')[0], text) for text in texts)
  return [f'`{of[0]}`' if len(of) == 1 else f'`{name}` at {len(of)} strengths' for name, of in grouped.items()]


def _shown(entry: Mapping[str, Any]) -> float:
  """Returns the share of images that are recognisable to an honest-but-curious server."""
  return next(one['count'] for one in entry['honest']['levels'] if one['level'] == deploy.SHOWN) / entry['honest']['n']


def _write(app: Sphinx, exception: Exception | None) -> None:
  if exception is None and app.builder.format == 'html':
    write_leaderboard(ENTRIES, pathlib.Path(app.outdir, 'leaderboard.html'), 'methods/')


def _tasks() -> None:
  folder = made_folder(DOCS / '_deploy')
  entries = leaderboard.read(ENTRIES)
  (folder / 'tasks.md').write_text(tasks(entries, folder), 'utf-8')
  (folder / 'answers.md').write_text(answers(entries), 'utf-8')
  (folder / 'findings.md').write_text('\n'.join(f'- {one}' for one in findings(entries)) + '\n', 'utf-8')


def setup(app: Sphinx) -> dict[str, bool]:
  """Writes the page when the others are written."""
  app.connect('builder-inited', lambda app: _tasks())
  app.connect('build-finished', _write)
  return {'parallel_read_safe': True, 'parallel_write_safe': True}
