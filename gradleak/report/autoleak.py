"""What AutoLeak found: a page whose first screen says which defense failed, and how sure that is; and a table."""

from collections.abc import Sequence
from typing import Any

from gradleak.audit.verdict import LEVELS
from gradleak.report import blocks, findings, headline, html, wording
from gradleak.report.formatting import aligned, count_range, number, upwards
from gradleak.report.html import code, mark, method, text
from gradleak.report.page import READING, versions, write_files
from gradleak.report.words import said
from gradleak.studies.autoleak import AutoLeak
from gradleak.studies.autoleak.bounds import RELATION
from gradleak.studies.autoleak.ensemble import CONTROLS, WITNESSES
from gradleak.summary import cases, worst

ENOUGH = 400  # images of a published rate
NOISE = 'noise (false alarms)'  # the line of the control runs


def render_autoleak(found: AutoLeak) -> str:
  """Returns the report as one HTML page that loads nothing."""
  config, size = found.config, found.config['batch_size']
  entries = cases.worst_case(_rows(found, True))
  bounds = {label: f'{upwards(100 * bound)} %' for label, bound in found.bounds.items()}
  lines = headline.lines(
    _rows(found, True),
    entries,
    lambda row: worst.pair(found.audits[row['stage']], row),
    flags={label: [flag.partition(':')[0] for flag in flags] for label, flags in found.flags.items()},
    bound=bounds,
    published=_published(found),
  )
  known = next(iter(found.audits.values())).versions
  few = said('autoleak.few', trials=config['trials']) if config['trials'] < ENOUGH else ''
  made = blocks.Page(
    'autoleak',
    f'{config["version"]}: {config["model"]} on {config["dataset"]}',
    f'{config["version"]}: a fixed ensemble of attacks',
    f'{config["model"]} on {config["dataset"]}',
    [
      blocks.Text(headline.sentence(entries, config), 'meaning'),
      headline.verdict_table(lines, flagged=True, bounded=bool(bounds)),
      blocks.Text(text(said('autoleak.verdicts', size=size, few=few), READING, said('autoleak.others')), 'note'),
    ],
    [*_levels(found, entries), _attacks(found), _stages(found), _flags(found), _reading(found)],
    [versions({name: known[name.lower()] for name in ('gradleak', 'JAX', 'Python')}, found.seconds)],
  )
  return html.page(made)


def autoleak_table(found: AutoLeak) -> str:
  """Returns the worst-case rates for the terminal, aligned, and the flags below them."""
  parts = []
  for title, honest in (('honest-but-curious server', True), ('malicious server', False)):
    levels = worst.levels(_rows(found, honest))
    named = [(line['defense'], line) for line in levels] + [(NOISE, line) for line in alarms(found, honest)]
    lines = [(name, *(count_range({**line, **one}, 'count') for one in line['levels'])) for name, line in named]
    if levels:
      parts.append('\n'.join(aligned([(title, *LEVELS), *lines])))
  told = [f'{label}: {flag}.' for label, flags in found.flags.items() for flag in flags]
  told += filter(None, [_noise(found, cases.worst_case(_rows(found, True))), wording.gallery(found.config)])
  return '\n\n'.join([*parts, *(['\n'.join(told)] if told else [])]) + '\n'


def write_autoleak(found: AutoLeak, folder: Any) -> None:
  """Writes report.html, whole or not at all; `folder` is made if it does not exist."""
  write_files(folder, {'report.html': render_autoleak(found)})


def alarms(found: AutoLeak, honest: bool) -> list[dict[str, Any]]:
  """Returns `worst.alarms` of one kind of server."""
  return worst.alarms([row for row in found.controls if row['honest'] == honest])


def _published(found: AutoLeak) -> dict[str, str]:
  return wording.published({'defenses': found.defenses})


def _rows(found: AutoLeak, honest: bool) -> list[dict[str, Any]]:
  return [row for row in found.rows if row['honest'] == honest]


def _noise(found: AutoLeak, entries: Sequence[dict]) -> str:
  return ' '.join(map(str, findings.alarms([row for row in found.controls if row['honest']], entries)))


def _levels(found: AutoLeak, entries: Sequence[dict]) -> list[blocks.Section]:
  """Returns the worst case per level, by honest-but-curious servers and by malicious ones."""
  honest, malicious = (worst.levels(_rows(found, kind)) for kind in (True, False))
  noise = alarms(found, True)
  beside = said('autoleak.noise', alarms=_noise(found, entries)) if noise else ''
  note = blocks.Text(said('autoleak.levels', size=found.config['batch_size'], noise=beside), 'note')
  made = [
    blocks.Section(
      'levels', 'Worst case per level', [note, headline.levels_table(honest, noise, NOISE, _published(found))]
    )
  ]
  if malicious:
    table = headline.levels_table(malicious, alarms(found, False), NOISE, _published(found))
    made.append(
      blocks.Section('malicious', 'Malicious servers', [blocks.Text(said('autoleak.malicious'), 'note'), table])
    )
  return made


def _attacks(found: AutoLeak) -> blocks.Section:
  """Returns the figures of every attacker, by defense, in the order of the stages."""
  columns = [
    'defense',
    ('stage', 'left'),
    ('attack', 'left by'),
    ('worst verdict', 'left'),
  ]
  columns += ('in', 'PSNR, dB', 'control', 'mean rank')
  rows: dict[str, list[blocks.Row]] = {}
  for (stage,), of_stage in cases.grouped(found.rows, 'stage').items():
    for one in cases.summarise(of_stage):
      of_defense = rows.setdefault(one['defense'], [])
      attack = blocks.Cell(code(one['attack']), [one['adaptive'] and f'adaptive: {one["adaptive"]}'])
      count = f'{one[cases.named(one["verdict"])]} of {one["n"]}'
      figures = [number(one[name]) for name in ('psnr', 'control_psnr', 'rank')]
      named = '' if of_defense else method(one['defense'], _published(found).get(one['defense']))
      of_defense.append(blocks.Row([named, stage, attack, mark(one['verdict']), count, *figures]))
  staged = '' if found.config['staged'] else said('autoleak.not_staged')
  note = blocks.Text(said('autoleak.attacks', witnesses=WITNESSES, staged=staged), 'note')
  return blocks.Section(
    'attacks', 'Every attack', [note, blocks.Table(columns, [blocks.Body(group) for group in rows.values()])]
  )


def _stages(found: AutoLeak) -> blocks.Section:
  columns = ['stage', ('attacks', 'left by'), 'uploads attacked', 'seconds']
  rows = []
  for stage in found.stages:
    left_out = [f'left out: {attack}: {why}' for attack, why in stage['left_out'].items()]
    attacks = blocks.Cell(code(*stage['attacks']), left_out)
    targets = f'{stage["targets"]} of {stage["all_targets"]}'
    rows.append(blocks.Row([stage['stage'], attacks, targets, number(stage['seconds'])]))
  note = blocks.Text(said('autoleak.stages', witnesses=WITNESSES, controls=CONTROLS), 'note')
  return blocks.Section('stages', 'What was run', [blocks.Table(columns, [blocks.Body(rows)]), note])


def _flags(found: AutoLeak) -> blocks.Section:
  terms = [(code(defense), [f'{flag}.' for flag in flags] or ['None.']) for defense, flags in found.flags.items()]
  return blocks.Section('flags', 'Flags', [blocks.Text(said('autoleak.flags'), 'note'), blocks.Terms(terms)])


def _reading(found: AutoLeak) -> blocks.Section:
  gallery = headline.gallery(found.rows, found.config)
  terms = [('Null-gradient control', [said('autoleak.control')]), *headline.verdict_terms(gallery, found.config)]
  if found.bounds:
    bounded = said('autoleak.bounded', batch=found.config['batch_size'], relation=RELATION, size=gallery['size'])
    terms.append(('Found at most, by DP', [bounded]))
  return blocks.Section('reading', 'How to read this page', [blocks.Terms(terms)])
