"""One self-contained HTML page: what an audit found, what it means, and on what terms."""

import json
import math
import pathlib
import re

from gradleak import storage
from gradleak.report import descent, findings, formatting, pictures, tables, wording

_STRIP_WIDTH = 150  # of the drawing of PSNRs per trial, in its own units
_STAGGER = (0, -4, 4, -2, 2, -5, 5)


def render(result):
  """Returns the report as one HTML page that loads nothing from anywhere; the same result gives the same text.

  Args:
    result: an `AuditResult`.
  """
  import importlib.resources

  import jinja2

  environment = jinja2.Environment(
    autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
  )
  environment.filters.update(
    number=formatting.number,
    significant=formatting.significant,
    ticks=_ticks,
    breakable=_breakable,
    json=lambda value: json.dumps(value, ensure_ascii=False),
  )
  environment.globals.update(interval=formatting.interval, percent_range=formatting.percent_range)
  source = importlib.resources.files('gradleak.report').joinpath('page.html.j2').read_text('utf-8')
  return environment.from_string(source).render(_context(result))


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
    'shown': {
      attack: [(pair[1], _cells(row)) for pair, row in shown.items() if pair[0] == attack]
      for attack in dict.fromkeys(attack for attack, _ in shown)
    },
    'num_trials': len({row['trial'] for row in result.rows}),
    'attacks': _attacks(result, summaries),
    'worst': worst,
    'curves': descent.curves(result),
    'granted': _granted(result.threat_models),
    'settings': wording.settings(result.config),
    'citations': wording.citations(result.config),
    'min_controls': findings.MIN_CONTROLS,
    'versions': result.versions,
    'duration': _duration(result.seconds),
  }


def _attacks(result, summaries):
  """Returns the table of figures: per attack its summaries, its control, and a drawing of the PSNR of every run."""
  scored = [*result.rows, *result.controls]
  finite = [row['psnr'] for row in scored if row['psnr'] is not None and math.isfinite(row['psnr'])]
  low, high = min([0.0, *finite]), max([10.0, *finite]) * 1.04
  by_pair = tables.grouped(result.rows, 'attack', 'defense')
  controls = {summary['attack']: summary for summary in tables.summarise(result.controls)}
  control_rows = tables.grouped(result.controls, 'attack')
  attacks = {}
  for summary in summaries:
    attack = summary['attack']
    if attack not in attacks:
      threshold = summary['control_psnr']
      attacks[attack] = {
        'name': attack,
        'tier': summary['tier'],
        'threshold': threshold,
        'threshold_x': None if threshold is None else _position(threshold, low, high),
        'entries': [],
        'control': controls.get(attack),
        'control_dots': [(x, y, 'control') for x, y, _ in _dots(control_rows.get((attack,), []), low, high)],
      }
    attacks[attack]['entries'].append((summary, _dots(by_pair[attack, summary['defense']], low, high)))
  return {'list': list(attacks.values()), 'low': low, 'high': high, 'zero_x': _position(0.0, low, high)}


def _granted(threat_models):
  """Returns [(attacks, sentences)], attacks that were granted the same together."""
  together = {}
  for attack, sentences in threat_models.items():
    together.setdefault(tuple(sentences), []).append(attack)
  return [(attacks, sentences) for sentences, attacks in together.items()]


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
  return {
    **cell,
    'alt': f'Reconstruction of {which} by {row["attack"]}, defense {row["defense"]}: {found}.',
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
  return re.sub(r'([+,])(?=\S)', r'\1<wbr>', escaped)
