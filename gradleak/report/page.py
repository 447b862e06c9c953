"""One self-contained HTML page of an audit: what it found, what that shows, and with what settings."""

import functools
import json
import math
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from gradleak.audit import load
from gradleak.audit.result import AuditResult, Case, check_result
from gradleak.audit.verdict import unfinished
from gradleak.core import storage
from gradleak.report import descent, findings, formatting, headline, pictures, wording
from gradleak.report.pictures import Picture
from gradleak.summary import cases, shown
from gradleak.summary.worst import pair

_STRIP_WIDTH = 150  # of the drawing of the PSNR of every run, in its own units
_STAGGER = (0, -4, 4, -2, 2, -5, 5)


def render(result: AuditResult) -> str:
  """Returns the report as one HTML page that loads nothing; the same result gives the same text.

  Raises:
    UsageError: for anything but an `AuditResult`, as all functions of `gradleak.report` that take one.
  """
  check_result(result)
  return environment().get_template('page.html.j2').render(_context(result))


def environment() -> Any:
  """Returns the Jinja environment of the pages: templates, filters for numbers and names."""
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


def pages_of(audits: Mapping[str, str], folder: pathlib.Path) -> dict[str, str]:
  """Returns text -> the page of an audit, a relative link; a page that is not there is made, where the audit is.

  Args:
    audits: text -> the audit's work directory, relative to the folder.
    folder: of the page with the links.
  """
  links = {}
  for text, place in audits.items():
    page = folder / place / 'report.html'
    if not page.exists() and (folder / place / 'config.json').exists():
      write_audit(load(folder / place), folder / place)
    if page.exists():
      links[text] = f'{place}/report.html'
  return links


def write_audit(result: AuditResult, folder: Any) -> None:
  """Writes report.html, grid.png and summary.csv, each whole or not at all.

  Args:
    result: an `AuditResult`.
    folder: a path, made if it does not exist.
  """
  check_result(result)
  folder = storage.made_folder(folder)
  storage.write_atomically(folder / 'grid.png', pictures.grid(result))
  storage.write_atomically(folder / 'summary.csv', cases.summary_csv(result.rows))
  storage.write_atomically(folder / 'report.html', render(result))


def _context(result: AuditResult) -> dict[str, Any]:
  """Returns the variables of the template."""
  summaries, worst = cases.summarise(result.rows), cases.worst_case(result.rows)
  truth, shown = pictures.select(result)
  return {
    'config': result.config,
    'shape': wording.shape(result.config),
    'headline': headline.sentence(worst, result.config),
    'lines': headline.lines(result.rows, worst, functools.partial(pair, result)),
    'meanings': headline.MEANINGS,
    'gallery': headline.gallery(result.rows, result.config),
    'findings': findings.sentences(summaries, worst, result.config, result.methods),
    'cautions': [
      *findings.cautions(summaries, worst, result.controls, result.methods),
      *findings.unsuited(summaries, result.config),
    ],
    'symbols': pictures.SYMBOLS,
    'columns': _columns(truth),
    'truth': _cells(truth),
    'side': 128 if len(truth) <= 4 else 92,
    'shown': _shown(shown),
    'num_trials': len({row['trial'] for row in result.rows}),
    'attacks': _attacks(result, summaries),
    'perceptual': any(summary['lpips'] is not None for summary in summaries),
    'worst': worst,
    'aware_run': any(entry['aware'] is not None for entry in worst),
    'curves': descent.curves(result),
    'granted': _together(result.threat_models),
    'inspections': _together(result.inspections),
    'counters': _counters(result.counters),
    'uncountered': [label for label, found in result.counters.items() if not found and label != 'none'],
    'rounds': result.config.get('rounds', 1),
    'settings': wording.settings(result.config),
    'privacy': findings.guarantees(result.methods),
    'citations': wording.citations(result.methods),
    'min_controls': findings.MIN_CONTROLS,
    'alarms': findings.alarms(result.controls, worst),
    'versions': result.versions,
    'duration': duration(result.seconds),
  }


def _shown(pictures_of: Mapping[Case, Sequence[Picture]]) -> dict[str, list]:
  """Returns {attack: [(defense, [(counter-measure or None, cells), …]), …]} of `pictures.select`."""
  shown: dict[str, dict[str, list]] = {}
  for (attack, defense, *counter), row in pictures_of.items():
    rows = shown.setdefault(attack, {}).setdefault(defense, [])
    rows.append((counter[0] if counter else None, _cells(row)))
  return {attack: list(defenses.items()) for attack, defenses in shown.items()}


def _attacks(result: AuditResult, summaries: Sequence[cases.Summary]) -> dict[str, Any]:
  """Returns the table of figures: per attack its summaries and its controls, each with the PSNR of every run.

  A counter-measure that changes the attack has control runs and a threshold of its own; `own_threshold` is that in
  words, where it differs from the attack's.
  """
  scored = [*result.rows, *result.controls]
  finite = [row['psnr'] for row in scored if row['psnr'] is not None and math.isfinite(row['psnr'])]
  low, high = min([0.0, *finite]), max([10.0, *finite]) * 1.04
  runs = cases.by_case(result.rows)
  pools = cases.grouped(result.controls, 'attack', 'control_psnr')

  def entry(summary: cases.Summary, rows: Sequence[cases.Row], usual: float | None) -> dict[str, Any]:
    threshold = summary['control_psnr']
    own = '' if formatting.number(threshold) == formatting.number(usual) else formatting.number(threshold)
    x = None if threshold is None else _position(threshold, low, high)
    return {**summary, 'dots': _dots(rows, low, high), 'threshold_x': x, 'own_threshold': own}

  attacks = []
  for (attack,), group in cases.grouped(summaries, 'attack').items():
    usual = group[0]['control_psnr']
    controls = [
      entry(cases.summarise(rows)[0], [{**row, 'verdict': 'control'} for row in rows], usual)
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
          [entry(summary, runs[cases.case(summary)], usual) for summary in of_defense]
          for of_defense in cases.grouped(group, 'defense').values()
        ],
        'controls': sorted(controls, key=lambda control: bool(control['of'])),
      }
    )
  return {'list': attacks, 'low': low, 'high': high}


def _close(a: float | None, b: float | None) -> bool:
  """Returns whether two thresholds are equal; None is none."""
  return a == b if a is None or b is None else math.isclose(a, b)


def _together(told: Mapping[str, list[str] | None]) -> list[tuple[list[str], tuple[str, ...] | None]]:
  """Returns [(attacks, sentences)], attacks with the same sentences together."""
  together: dict[tuple[str, ...] | None, list[str]] = {}
  for attack, sentences in told.items():
    together.setdefault(None if sentences is None else tuple(sentences), []).append(attack)
  return [(attacks, sentences) for sentences, attacks in together.items()]


def _counters(counters: Mapping[str, Mapping[str, str]]) -> list[tuple[list[str], dict[str, str]]]:
  """Returns [(defenses, {counter-measure: what it does})], defenses with the same counter-measures together."""
  together: dict[tuple, list[str]] = {}
  for defense, sentences in counters.items():
    if sentences:
      together.setdefault(tuple(sentences.items()), []).append(defense)
  return [(defenses, dict(sentences)) for sentences, defenses in together.items()]


def _dots(rows: Sequence[cases.Row], low: float, high: float) -> list[tuple[float, int, str]]:
  """Returns (x, y, class) of every run that has a PSNR, at varying heights so that equal values stay visible."""
  return [
    (_position(row['psnr'], low, high), 10 + _STAGGER[i % len(_STAGGER)], row['verdict'].replace(' ', '-'))
    for i, row in enumerate(rows)
    if row['psnr'] is not None
  ]


def _position(psnr: float, low: float, high: float) -> float:
  """Returns the place of a PSNR in the drawing, with room for half a dot at the ends."""
  fraction = (min(max(psnr, low), high) - low) / (high - low)
  return round(5 + fraction * (_STRIP_WIDTH - 10), 1)


def _columns(truth: Sequence[Picture]) -> list[tuple[str, int]]:
  """Returns (heading, number of pictures) per trial."""
  counts: dict[int, int] = {}
  for picture in truth:
    counts[picture.trial] = counts.get(picture.trial, 0) + 1
  return [(f'trial {trial}', count) for trial, count in counts.items()]


def _cells(row: Sequence[Picture]) -> list[dict[str, Any]]:
  """Returns what the template shows of a row of pictures; `new` marks the first picture of the next batch."""
  batched = any(picture.index for picture in row)
  return [{**_cell(picture), 'new': batched and c > 0 and picture.index == 0} for c, picture in enumerate(row)]


def _cell(picture: Picture) -> dict[str, Any]:
  """Returns what the template shows of one picture."""
  which = f'trial {picture.trial}' + (f', image {picture.index}' if picture.index else '')
  cell = {'uri': shown.data_uri(picture.pixels)}
  if picture.row is None:
    return {**cell, 'alt': f'Private image of {which}.'}
  row = picture.row
  value = 'no PSNR' if picture.psnr is None else f'{formatting.number(picture.psnr)} dB'
  step = row.get('diverged_step')
  at = f' at step {step}' if row['verdict'] == 'diverged' and step is not None else ''
  early = unfinished(row)
  more = ', not converged' if early else ''
  found = f'{row["verdict"]}{at}{more}, {value}'
  knowing = f' known to the attacker ({row["counter"]})' if row.get('counter') else ''
  return {
    **cell,
    'alt': f'Reconstruction of {which} by {row["attack"]}, defense {row["defense"]}{knowing}: {found}.',
    'verdict': row['verdict'],
    'psnr': value if picture.psnr is not None else f'NaN{at}',
    'unfinished': early,
  }


def duration(seconds: float) -> str:
  """Returns a wall time in words."""
  if seconds < 120:
    return f'{seconds:.1f} seconds'
  minutes = seconds / 60
  return f'{minutes:.0f} minutes' if minutes < 120 else f'{minutes / 60:.1f} hours'


def _ticks(text: str) -> Any:
  """Returns `text` escaped, with the parts in backticks as code."""
  import markupsafe

  return markupsafe.Markup(re.sub(r'`([^`]*)`', r'<code>\1</code>', _break(str(markupsafe.escape(text)))))


def _breakable(text: str) -> Any:
  """Returns `text` escaped, with places where a long label may be broken."""
  import markupsafe

  return markupsafe.Markup(_break(str(markupsafe.escape(text))))


def _break(escaped: str) -> str:
  # A word is looked at from its beginning alone: from each of its letters on, a long one would take quadratic time.
  return re.sub(r'([+,|/]|(?<!\w)\w{8,}\()(?=\S)', r'\1<wbr>', escaped)
