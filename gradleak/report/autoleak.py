"""What AutoLeak found: a page whose first screen says which defense failed, and how sure that is; and a table."""

from collections.abc import Sequence
from typing import Any, Literal

from gradleak.audit.verdict import LEVELS
from gradleak.core import statistics
from gradleak.modalities import of_config, of_rows
from gradleak.report import blocks, findings, headline, html, wording
from gradleak.report.formatting import aligned, count_range, number, percent_range, upwards
from gradleak.report.html import code, mark, method, text
from gradleak.report.page import READING, versions, write_files
from gradleak.report.words import said, speaking
from gradleak.studies.autoleak import AutoLeak, rankings
from gradleak.studies.autoleak.bounds import RELATION
from gradleak.studies.autoleak.ensemble import CONTROLS, WITNESSES
from gradleak.summary import cases, worst

ENOUGH = 400  # images of a published rate
NOISE = 'noise (false alarms)'  # the line of the control runs


@speaking
def render_autoleak(found: AutoLeak) -> str:
  """Returns the report as one HTML page that loads nothing."""
  config, size = found.config, found.config['batch_size']
  entries = cases.worst_case(_rows(found, True), found.named())
  bounds = {label: f'{upwards(100 * bound)} %' for label, bound in found.bounds.items()}
  lines = headline.lines(
    _rows(found, True),
    entries,
    lambda row: worst.pair(found.audits[row['stage']], row),
    found.named(),
    of_config(config),
    flags={label: [flag.partition(':')[0] for flag in flags] for label, flags in found.flags.items()},
    bound=bounds,
    published=_published(found),
  )
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
    [
      *_levels(found, entries),
      *_rankings(found),
      *_baselines(found),
      *(_attacks(found), _stages(found), _flags(found), _reading(found)),
    ],
    [versions({name: found.versions[name.lower()] for name in ('gradleak', 'JAX', 'Python')}, found.seconds)],
  )
  return html.page(made)


@speaking
def autoleak_table(found: AutoLeak) -> str:
  """Returns the worst-case rates for the terminal, aligned, and the flags below them."""
  parts = []
  for title, honest in (('honest-but-curious server', True), ('malicious server', False)):
    levels = worst.levels(_rows(found, honest), found.named(honest))
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
  """Returns `worst.alarms` of one kind of server, of the defense whose rankings raise most."""
  named = _named(found) if honest else set()
  return worst.alarms([row for row in found.controls if row['honest'] == honest], named)


def _named(found: AutoLeak) -> set[int]:
  """Returns the control runs that the rankings of one defense re-identify, of the one whose rankings name most."""
  return max((rankings.alarms(found.ranked, defense) for defense in found.config['defenses']), key=len)


def _published(found: AutoLeak) -> dict[str, str]:
  return wording.published({'defenses': found.defenses})


def _rows(found: AutoLeak, honest: bool) -> list[dict[str, Any]]:
  return [row for row in found.rows if row['honest'] == honest]


def _noise(found: AutoLeak, entries: Sequence[dict]) -> str:
  controls = [row for row in found.controls if row['honest']]
  return ' '.join(map(str, findings.alarms(controls, entries, _named(found))))


def _levels(found: AutoLeak, entries: Sequence[dict]) -> list[blocks.Section]:
  """Returns the worst case per level, by honest-but-curious servers and by malicious ones."""
  honest, malicious = (worst.levels(_rows(found, kind), found.named(kind)) for kind in (True, False))
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


def _rankings(found: AutoLeak) -> list[blocks.Section]:
  """Returns which of the two re-identifies: the likelihood of a list's candidates, or a picture."""
  if not found.ranked:
    return []
  lines = []
  for one in found.ranked:
    pictures = _seen(found, one['defense'])
    counts = [
      *(len(one['named']), len(pictures), len(set(one['named']) - pictures), len(pictures - set(one['named']))),
    ]
    cells = [blocks.Cell(f'{count} of {one["trials"]}', [_interval(count, one['trials'])]) for count in counts]
    false = blocks.Cell(f'{len(one["alarms"])} of {one["controls"]}', [_interval(len(one['alarms']), one['controls'])])
    facts = f'{one["candidates"]:,}', str(one['rounds'])
    lines.append(blocks.Row([method(one['defense'], _published(found).get(one['defense'])), *facts, *cells, false]))
  kind = of_config(found.config)
  seen = 'pictures' if kind.marked is None else kind.noun[1]
  columns = ['defense', 'candidates\nbeside', 'uploads', 'by likelihood', f'by {seen}']
  columns += ['by likelihood\nalone', f'by {seen}\nalone', 'noise']
  note = blocks.Text(said('autoleak.rankings'), 'note')
  return [blocks.Section('rankings', 'Re-identified by which', [note, blocks.Table(columns, [blocks.Body(lines)])])]


def _seen(found: AutoLeak, defense: str) -> set[int]:
  """Returns the trials that pictures re-identify."""
  enough = LEVELS[: LEVELS.index(rankings.NAMED) + 1]
  return {row['trial'] for row in _rows(found, True) if row['defense'] == defense and row['verdict'] in enough}


def _interval(count: int, n: int) -> str:
  if not n:
    return ''
  _, low, high = statistics.proportion_interval(count, n)
  return percent_range({'success_low': low, 'success_high': high})


def _baselines(found: AutoLeak) -> list[blocks.Section]:
  """Returns what shows without any upload."""
  if not found.baselines:
    return []
  kind = of_rows(found.rows)
  titles = {one.column: one.title for one in kind.shown}
  names: dict[str, Literal['likeness', 'score']] = {kind.score: 'score'}
  names.setdefault(kind.likeness, 'likeness')  # a column that is both stands once
  columns = ['answer', *(titles.get(name, name) for name in names)]
  columns += [mark(level) for level in LEVELS[:3]]
  rows = [
    blocks.Row(
      [
        one['baseline'],
        *(number(one[part], kind.shown[0].digits) for part in names.values()),
        *(
          blocks.Cell(f'{one[name]} of {one["trials"]}', [_interval(one[name], one['trials'])])
          for name in ('exact', 'recognisable', 'named')
        ),
      ]
    )
    for one in found.baselines
  ]
  note = blocks.Text(said('autoleak.baselines'), 'note')
  return [blocks.Section('baselines', 'Without any upload', [note, blocks.Table(columns, [blocks.Body(rows)])])]


def _attacks(found: AutoLeak) -> blocks.Section:
  """Returns the figures of every attacker, by defense, in the order of the stages."""
  columns = [
    'defense',
    ('stage', 'left'),
    ('attack', 'left by'),
    ('worst verdict', 'left'),
  ]
  kind = of_rows(found.rows)
  columns += ('in', kind.shown[0].with_unit(', '), 'control', 'mean rank')
  rows: dict[str, list[blocks.Row]] = {}
  for (stage,), of_stage in cases.grouped(found.rows, 'stage').items():
    for one in cases.summarise(of_stage):
      of_defense = rows.setdefault(one['defense'], [])
      attack = blocks.Cell(code(one['attack']), [one['adaptive'] and f'adaptive: {one["adaptive"]}'])
      count = f'{one[cases.named(one["verdict"])]} of {one["n"]}'
      digits = kind.shown[0].digits
      figures = [*(number(one[name], digits) for name in (kind.score, kind.controls[0])), number(one['rank'])]
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
    left_out += [f'not under {defense}: {why}' for defense, why in stage['skipped'].items()]
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
