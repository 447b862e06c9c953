"""One self-contained HTML page: what an audit found, what it means, and on what terms."""

import json
import math
import pathlib
import re

from gradleak import storage
from gradleak.report import descent, findings, formatting, pictures, tables, wording
from gradleak.verdict import CONTROL

_STRIP_WIDTH = 150  # of the drawing of PSNRs per trial, in its own units
_STAGGER = (0, -4, 4, -2, 2, -5, 5)


def render(result):
  """Returns the report as one HTML page that loads nothing from anywhere; the same result gives the same text.

  Args:
    result: an `AuditResult`.
  """
  return environment().get_template('page.html.j2').render(_context(result))


def environment():
  """Returns the Jinja environment of our pages: their templates, the style that they share, and how numbers look."""
  import importlib.resources

  import jinja2

  folder = importlib.resources.files('gradleak.report')
  made = jinja2.Environment(
    loader=jinja2.FunctionLoader(lambda name: folder.joinpath(name).read_text('utf-8')),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
  )
  made.filters.update(
    number=formatting.number,
    significant=formatting.significant,
    ticks=_ticks,
    breakable=_breakable,
    json=lambda value: json.dumps(value, ensure_ascii=False),
  )
  made.globals.update(interval=formatting.interval, percent_range=formatting.percent_range)
  return made


def write(result, folder):
  """Writes report.html, grid.png and summary.csv into `folder`, each whole or not at all.

  Args:
    result: an `AuditResult`.
    folder: a path, made if it does not exist.
  """
  folder = pathlib.Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  storage.write_atomically(folder / 'grid.png', pictures.grid(result))
  storage.write_atomically(folder / 'summary.csv', tables.summary_csv(result.rows))
  storage.write_atomically(folder / 'report.html', render(result))


def _context(result):
  """Returns all that the template shows."""
  summaries, worst = tables.summarise(result.rows), tables.worst_case(result.rows)
  truth, shown = pictures.select(result)
  return {
    'config': result.config,
    'shape': wording.shape(result.config),
    'findings': findings.sentences(summaries, worst, result.config),
    'cautions': findings.cautions(summaries, worst, result.controls),
    'symbols': pictures.SYMBOLS,
    'columns': _columns(truth),
    'truth': _cells(truth),
    'side': 128 if len(truth) <= 4 else 92,
    'shown': _shown(shown),
    'num_trials': len({row['trial'] for row in result.rows}),
    'attacks': _attacks(result, summaries),
    'worst': worst,
    'both_kinds': any(entry['aware'] is not None for entry in worst),
    'curves': descent.curves(result),
    'granted': _together(result.threat_models),
    'inspections': _together(result.inspections),
    'knowing': _knowing(result.counters),
    'helpless': _helpless(result),
    'rounds': result.config.get('rounds', 1),
    'settings': wording.settings(result.config),
    'privacy': findings.guarantees(result.config),
    'citations': wording.citations(result.config),
    'min_controls': findings.MIN_CONTROLS,
    'versions': result.versions,
    'duration': _duration(result.seconds),
  }


def _shown(pictures_of):
  """Returns {attack: [(defense, [(counter-measure or None, cells), …]), …]} of `pictures.select`."""
  shown = {}
  for (attack, defense, *counter), row in pictures_of.items():
    rows = shown.setdefault(attack, {}).setdefault(defense, [])
    rows.append((counter[0] if counter else None, _cells(row)))
  return {attack: list(defenses.items()) for attack, defenses in shown.items()}


def _attacks(result, summaries):
  """Returns the table of figures: per attack its summaries, its control, and a drawing of the PSNR of every run.

  A counter-measure that changes the attack has control runs and a threshold of its own: `beyond` says it where it is
  not that of the attack.
  """
  scored = [*result.rows, *result.controls]
  finite = [row['psnr'] for row in scored if row['psnr'] is not None and math.isfinite(row['psnr'])]
  low, high = min([0.0, *finite]), max([10.0, *finite]) * 1.04
  runs = tables.by_attacker(result.rows)
  pools = tables.grouped(result.controls, 'attack', 'control_psnr')

  def entry(summary, rows, usual):
    threshold = summary['control_psnr']
    beyond = '' if formatting.number(threshold) == formatting.number(usual) else formatting.number(threshold)
    x = None if threshold is None else _position(threshold, low, high)
    return {**summary, 'dots': _dots(rows, low, high), 'threshold_x': x, 'beyond': beyond}

  attacks = []
  for (attack,), group in tables.grouped(summaries, 'attack').items():
    usual = group[0]['control_psnr']
    controls = [
      entry(tables.summarise(rows)[0], [{**row, 'verdict': 'control'} for row in rows], usual)
      for (name, _), rows in pools.items()
      if name == attack
    ]
    for control in controls:
      of = [s['counter'] for s in group if _close(s['control_psnr'], control['control_psnr'])]
      control['of'] = [] if _close(control['control_psnr'], usual) else list(dict.fromkeys(filter(None, of)))
    attacks.append(
      {
        'name': attack,
        'tier': group[0]['tier'],
        'threshold': usual,
        'defenses': [
          [entry(summary, runs[tables.attacker(summary)], usual) for summary in of_defense]
          for of_defense in tables.grouped(group, 'defense').values()
        ],
        'controls': sorted(controls, key=lambda control: bool(control['of'])),
      }
    )
  return {'list': attacks, 'low': low, 'high': high}


def _close(a, b):
  """Returns whether two thresholds, None for none, are the same one."""
  return a == b if a is None or b is None else math.isclose(a, b)


def _together(told):
  """Returns [(attacks, sentences)], attacks of which the same is told together; None for no sentences at all."""
  together = {}
  for attack, sentences in told.items():
    together.setdefault(None if sentences is None else tuple(sentences), []).append(attack)
  return [(attacks, sentences) for sentences, attacks in together.items()]


def _knowing(counters):
  """Returns [(defenses, {counter-measure: what it does})], defenses that are met alike together."""
  together = {}
  for defense, sentences in counters.items():
    if sentences:
      together.setdefault(tuple(sentences.items()), []).append(defense)
  return [(defenses, dict(sentences)) for sentences, defenses in together.items()]


def _helpless(result):
  """Returns the defenses to which no counter-measure is known, though attackers who know defenses were run."""
  return [defense for defense, found in result.counters.items() if not found and defense not in ('none', CONTROL)]


def _dots(rows, low, high):
  """Returns (x, y, class) of every run that has a PSNR, staggered in height so that equal ones are told apart."""
  return [
    (_position(row['psnr'], low, high), 10 + _STAGGER[i % len(_STAGGER)], row['verdict'].replace(' ', '-'))
    for i, row in enumerate(rows)
    if row['psnr'] is not None
  ]


def _position(psnr, low, high):
  """Returns where `psnr` lies in the drawing, ends left free for half a dot."""
  share = (min(max(psnr, low), high) - low) / (high - low)
  return round(5 + share * (_STRIP_WIDTH - 10), 1)


def _columns(truth):
  """Returns (heading, number of pictures) per trial."""
  counts = {}
  for picture in truth:
    counts[picture.trial] = counts.get(picture.trial, 0) + 1
  return [(f'trial {trial}', count) for trial, count in counts.items()]


def _cells(row):
  """Returns what the template shows of a row of pictures; `new` marks where the next batch begins."""
  batched = any(picture.index for picture in row)
  return [{**_cell(picture), 'new': batched and c > 0 and picture.index == 0} for c, picture in enumerate(row)]


def _cell(picture):
  """Returns what the template shows of one picture."""
  which = f'trial {picture.trial}' + (f', image {picture.index}' if picture.index else '')
  cell = {'uri': pictures.data_uri(picture.pixels)}
  if picture.row is None:
    return {**cell, 'alt': f'Private image of {which}.'}
  row = picture.row
  value = 'no figure' if picture.psnr is None else f'{formatting.number(picture.psnr)} dB'
  step = row.get('diverged_step')
  at = f' at step {step}' if row['verdict'] == 'diverged' and step is not None else ''
  unfinished = row['verdict'] == 'recovered' and not row['solved']
  more = ', descent not finished' if unfinished else ''
  found = f'{row["verdict"]}{at}{more}, {value}'
  knowing = f' known to the attacker ({row["counter"]})' if row.get('counter') else ''
  return {
    **cell,
    'alt': f'Reconstruction of {which} by {row["attack"]}, defense {row["defense"]}{knowing}: {found}.',
    'verdict': row['verdict'],
    'psnr': value if picture.psnr is not None else f'NaN{at}',
    'unfinished': unfinished,
  }


def _duration(seconds):
  """Returns a wall time in words."""
  if seconds < 120:
    return f'{seconds:.1f} seconds'
  minutes = seconds / 60
  return f'{minutes:.0f} minutes' if minutes < 120 else f'{minutes / 60:.1f} hours'


def _ticks(text):
  """Returns `text` escaped, with what stands in backticks set as code."""
  import markupsafe

  return markupsafe.Markup(re.sub(r'`([^`]*)`', r'<code>\1</code>', _break(str(markupsafe.escape(text)))))


def _breakable(text):
  """Returns `text` escaped, with places where a long specification may be broken."""
  import markupsafe

  return markupsafe.Markup(_break(str(markupsafe.escape(text))))


def _break(escaped):
  return re.sub(r'([+,]|\w{15,}\()(?=\S)', r'\1<wbr>', escaped)
