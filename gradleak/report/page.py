"""The page of an audit: what it found, what that shows, and with what settings."""

import functools
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from gradleak.audit import load
from gradleak.audit.result import AuditResult, check_result
from gradleak.audit.verdict import unfinished
from gradleak.core import storage
from gradleak.modalities import Modality, Shown, of_config, of_rows
from gradleak.report import blocks, descent, findings, formatting, headline, html, marked, pictures, wording
from gradleak.report.formatting import (
  count,
  interval,
  number,
  percent,
  percent_range,
  scored,
  significant,
  together,
  unit,
)
from gradleak.report.html import code, mark, method, text
from gradleak.report.pictures import Picture
from gradleak.report.slide import slide
from gradleak.report.words import said, speaking, worded
from gradleak.summary import cases, shown
from gradleak.summary.worst import pair

_STRIP_WIDTH = 150  # of the drawing of the PSNR of every run, in its own units
_STAGGER = (0, -4, 4, -2, 2, -5, 5)
READING = blocks.Html('<a href="#reading">How to read this page</a>')


@speaking
def render(result: AuditResult, picture: bytes | None = None) -> str:
  """Returns the report as one HTML page that loads nothing; the same result gives the same text.

  Args:
    result: an `AuditResult`.
    picture: its `slide`, where that is made already.

  Raises:
    UsageError: for anything but an `AuditResult`, as all functions of `gradleak.report` that take one.
  """
  config = check_result(result).config
  kind = of_config(config)
  summaries, worst = cases.summarise(result.rows), cases.worst_case(result.rows)
  model, data = config.get('model'), config.get('dataset')
  lines = headline.lines(
    result.rows, worst, functools.partial(pair, result), published=wording.published(result.methods), kind=kind
  )
  size, exact = config.get('batch_size', 1), wording.intervals(config)
  many = {'shown': marked.MOST, 'number': len(worst)} if len(worst) > marked.MOST else None
  footer = (
    versions(result.versions, result.seconds) if result.versions else blocks.Text(formatting.duration(result.seconds))
  )
  made = blocks.Page(
    'audit',
    f'Gradient leakage: {model or "model"} on {data or "data"}',
    'Gradient leakage audit',
    f'{model or "A model"} on {data or "private data"}',
    [
      blocks.Text(headline.sentence(worst, config), 'meaning'),
      blocks.Picture(picture or slide(result), said('audit.slide'), kind.marked is not None),
      *([blocks.Text(said('audit.slide_first', **many), 'note')] if many else []),
      headline.verdict_table(lines),
      blocks.Text(text(said('audit.verdicts', size=size, exact=exact), READING, said('audit.others')), 'note'),
    ],
    [
      _shows(result, summaries, worst),
      *([_pictures(result)] if kind.marked is None else marked.sections(result, wording.published(result.methods))),
      _figures(result, summaries),
      _worst(worst, wording.published(result.methods), exact),
      _curves(result, worst),
      _granted(result, worst),
      _inspected(result),
      _settings(result),
      _reading(result, worst),
    ],
    [footer, *sources(wording.citations(result.methods))],
  )
  return html.page(made)


def pages_of(audits: Mapping[str, str], folder: pathlib.Path) -> dict[str, str]:
  """Returns text -> the page of an audit, a relative link; it is made where it is missing or older than the audit.

  Args:
    audits: text -> the audit's work directory, relative to the folder.
    folder: of the page with the links.
  """
  links = {}
  for name, place in audits.items():
    if (folder / place / 'result.json').exists() and not is_current(folder / place):
      write_audit(load(folder / place), folder / place)
    if (folder / place / 'report.html').exists():
      links[name] = f'{place}/report.html'
  return links


def is_current(folder: Any, name: str = 'report.html') -> bool:
  """Returns whether the work directory of an audit holds its page, no older than its result: a kill may part them."""
  page, result = (pathlib.Path(folder) / each for each in (name, 'result.json'))
  return page.exists() and page.stat().st_mtime >= result.stat().st_mtime


@speaking
def write_audit(result: AuditResult, folder: Any) -> None:
  """Writes report.html, slide.png, grid.png and summary.csv, each whole or not at all.

  Args:
    result: an `AuditResult`.
    folder: a path, made if it does not exist.
  """
  check_result(result)
  picture = slide(result)
  looked_at = of_config(result.config).marked is None
  drawn = {'slide.png': picture, 'grid.png': pictures.grid(result) if looked_at else None}
  written = {'summary.csv': cases.summary_csv(result.rows), 'report.html': render(result, picture)}
  write_files(folder, {**drawn, **written})


def write_files(folder: Any, files: Mapping[str, str | bytes | None]) -> None:
  """Writes files into a folder, which is made, each whole or not at all; None is not written."""
  folder = storage.made_folder(folder)
  for name, content in files.items():
    if content is not None:
      storage.write_atomically(folder / name, content)


def every_setting(config: Mapping[str, Any]) -> blocks.Details:
  """Returns a table of all settings, folded away."""
  rows = [
    blocks.Row([str(key), html.tagged('code', json.dumps(value, ensure_ascii=False))]) for key, value in config.items()
  ]
  return blocks.Details('Every setting', [blocks.Table(['setting', 'value'], [blocks.Body(rows)], label='', first='')])


def sources(citations: Sequence[str]) -> list[Any]:
  """Returns the sources of the methods, none for none."""
  return [blocks.Text('Sources of the methods:'), blocks.Bullets(citations)] if citations else []


def versions(known: Mapping[str, str], seconds: float) -> blocks.Text:
  """Returns the versions and the wall time of a run."""
  return blocks.Text(
    ' · '.join([*(f'{name} {version}' for name, version in known.items()), formatting.duration(seconds)])
  )


def _shows(result: AuditResult, summaries: Sequence[cases.Summary], worst: Sequence[dict]) -> blocks.Section:
  told = findings.sentences(summaries, worst, result.config, result.methods) + findings.stopped(result)
  cautions = findings.cautions(summaries, worst, result.controls, result.methods)
  cautions += findings.unsuited(summaries, result.config)
  return blocks.Section('shows', 'What this shows', [blocks.Text(' '.join(map(str, told))), blocks.Cautions(cautions)])


def _pictures(result: AuditResult) -> blocks.Section:
  """Returns the private images above what each attack makes of them."""
  truth, chosen = pictures.select(result)
  published = wording.published(result.methods)
  size, trials = result.config.get('batch_size', 1), len({row['trial'] for row in result.rows})
  of_batch = worded(f' of {size} images each') if size > 1 else ''
  name = 'audit.pictures_some' if len(truth) < trials * size else 'audit.pictures'
  columns = [blocks.Column(span=1)]
  for trial, of_trial in together((picture.trial, picture) for picture in truth).items():
    new = 'new' if len(of_trial) > 1 and len(columns) > 1 else ''
    columns.append(blocks.Column(f'trial {trial}', new, span=len(of_trial)))
  bodies = [blocks.Body([blocks.Row([worded('private images'), *_cells(truth)])])]
  for attack, of_attack in together((case[0], (case[1:], row)) for case, row in chosen.items()).items():
    rows: list[blocks.Row] = []
    for of_defense in together((case[0], (case[1:], row)) for case, row in of_attack).items():
      defense, shown_rows = of_defense
      paired = len(shown_rows) > 1
      for place, (adaptive, row) in enumerate(shown_rows):
        kind = ('first' if place == 0 else 'second') if paired else ''
        rows.append(
          blocks.Row(
            [
              _who(method(defense, published.get(defense)), adaptive[0] if adaptive else None, place == 0, paired),
              *_cells(row),
            ],
            kind,
          )
        )
    bodies.append(blocks.Body(rows, text('Attack ', code(attack))))
  side = 128 if len(truth) <= 4 else 92
  return blocks.Section(
    'pictures',
    'What the attacks reconstruct',
    [
      blocks.Text(said(name, trials=trials, of_batch=of_batch), 'note'),
      blocks.Table(columns, bodies, 'pictures', style=f'--side: {side}px'),
    ],
    'Pictures',
  )


def _who(defense: blocks.Html, adaptive: str | None, first: bool, paired: bool) -> blocks.Cell:
  """Returns the cell that names a defense, where it comes first, and who attacks it, where there are several."""
  if not first:
    return blocks.Cell(f'adaptive: {adaptive}')
  return blocks.Cell(defense, [f'adaptive: {adaptive}' if adaptive is not None else paired and 'non-adaptive'])


def _cells(row: Sequence[Picture]) -> list[blocks.Cell]:
  """Returns a row of pictures; between batches is a gap."""
  batched = any(picture.index for picture in row)
  return [_cell(picture, batched and c > 0 and picture.index == 0) for c, picture in enumerate(row)]


def _cell(picture: Picture, new: bool) -> blocks.Cell:
  which = f'trial {picture.trial}' + (worded(f', image {picture.index}') if picture.index else '')
  kind = 'new' if new else ''
  if picture.pixels is None:
    return blocks.Cell('–', kind=kind)
  uri = shown.data_uri(picture.pixels)
  if picture.row is None:
    return blocks.Cell(html.image(uri, f'Private {picture.kind.noun[0]} of {which}.'), kind=kind)
  row = picture.row
  verdict, step = row['verdict'], row.get('diverged_step')
  value = f'no {picture.kind.shown[0].title}' if picture.score is None else scored(picture.kind, picture.score)
  at = f' at step {step}' if verdict == 'diverged' and step is not None else ''
  early = unfinished(row)
  more = ', not converged' if early else ''
  knowing = f' known to the attacker ({row["adaptive"]})' if row.get('adaptive') else ''
  done = f'{verdict}{at}{more}, {value}'
  alt = f'Reconstruction of {which} by {row["attack"]}, defense {row["defense"]}{knowing}: {done}.'
  below = (value if picture.score is not None else f'NaN{at}') + ' +' * early
  caption = blocks.Html(f'<span class="caption">{below}{mark(verdict)}</span>')
  return blocks.Cell(text(html.image(uri, alt), caption), kind=f'{verdict.replace(" ", "-")} {kind}'.strip())


def _mean(summary: Mapping[str, Any], name: str, digits: int) -> blocks.Cell:
  return blocks.Cell(number(summary[name], digits), [interval(summary, name, digits)])


def _figures(result: AuditResult, summaries: Sequence[cases.Summary]) -> blocks.Section:
  """Returns the figures of all attackers, each with the PSNR of every run, and those of the controls."""
  config = result.config
  scale, published = of_rows(result.rows), wording.published(result.methods)
  score, bound, (first, *others) = scale.score, scale.controls[0], scale.shown
  finite = [row[score] for row in [*result.rows, *result.controls] if row[score] is not None]
  finite = [one for one in finite if math.isfinite(one)]
  axis = _axis(scale, finite)
  perceptual = any(summary.get('lpips') is not None for summary in summaries)
  restarted = config.get('restarts', 1) > 1
  columns: list[Any] = ['defense', ('verdict', 'left'), 'recovered', first.with_unit(', ')]
  columns += [('every run', 'left'), *(one.title for one in others)]
  columns += ['LPIPS'] * perceptual + [f'oracle\n{first.title}'] * restarted + ['inconclusive', 'diverged']
  runs, pools = cases.by_case(result.rows), cases.grouped(result.controls, 'attack', bound)

  def means(summary: cases.Summary, rows: Sequence[cases.Row], kind: str, oracle: str) -> list[Any]:
    drawn = _strip(scale, rows, summary, axis, kind)
    last = ([_mean(summary, 'lpips', 3)] if perceptual else []) + [oracle] * restarted
    mean, *more = (_mean(summary, one.column, one.digits) for one in scale.shown)
    return [mean, drawn, *more, *last]

  def attacker(summary: cases.Summary, place: int, paired: bool, usual: float | None) -> blocks.Row:
    size, own = config.get('batch_size', 1), _own(summary[bound], usual)
    fully = ''
    if size > 1 and summary['revealed'] is not None:
      decibels = f', at {scored(scale, summary[f"revealed_{score}"])}' if summary['revealed'] else ''
      fully = f'{number(summary["revealed"])} of {size} fully{decibels}'
    of_verdict = f'{summary[cases.named(summary["verdict"])]} of {summary["n"]}'
    unfinished = summary['unfinished'] and f'{summary["unfinished"]} not converged'
    cells = [
      _who(method(summary['defense'], published.get(summary['defense'])), summary['adaptive'], place == 0, paired),
      blocks.Cell(mark(summary['verdict']), [of_verdict, unfinished]),
      blocks.Cell(count(summary), [percent_range(summary), fully, own and f'above {own} {first.unit}'.strip()]),
      *means(summary, runs[cases.case(summary)], 'runs', number(summary[f'oracle_{score}'])),
      str(summary['inconclusive']),
      str(summary['diverged']),
    ]
    return blocks.Row(cells, 'more' * (place > 0))

  def control(
    rows: Sequence[cases.Row], group: Sequence[cases.Summary], usual: float | None
  ) -> tuple[bool, blocks.Row]:
    summary, alike = cases.summarise(rows)[0], _close(rows[0][bound], usual)
    many = f'{summary["n"]} {unit(summary["n"], 1, ("run", "runs"))}'
    of = [] if alike else [s['adaptive'] for s in group if _close(s[bound], summary[bound])]
    names = ', '.join(dict.fromkeys(filter(None, of)))
    own = _own(summary[bound], usual)
    marked = [{**row, 'verdict': 'control'} for row in rows]
    cells = [
      blocks.Cell('null-gradient control', [names and f'of adaptive: {names}']),
      '',
      blocks.Cell(many, [own and f'threshold {own} {first.unit}'.strip()]),
      *means(summary, marked, 'control runs', ''),
      '',
      '',
    ]
    return bool(names), blocks.Row(cells, 'control')

  bodies = []
  for (attack,), group in cases.grouped(summaries, 'attack').items():
    usual = group[0][bound]
    rows = []
    for of_defense in cases.grouped(group, 'defense').values():
      rows += [attacker(summary, place, len(of_defense) > 1, usual) for place, summary in enumerate(of_defense)]
    controls = [control(rows, group, usual) for (name, _), rows in pools.items() if name == attack]
    rows += [row for _, row in sorted(controls, key=lambda each: each[0])]
    title = text('Attack ', code(attack), '' if usual is None else f': control {number(usual)} {first.unit}'.rstrip())
    bodies.append(blocks.Body(rows, text(title, f'; threat model {group[0]["tier"]}' if group[0]['tier'] else '')))
  note = blocks.Text(said('audit.figures', low=axis[0], high=axis[1], unit=f' {first.unit}'.rstrip()), 'note')
  parts = [note, blocks.Table(columns, bodies), _more_figures(summaries, published)]
  return blocks.Section('figures', 'How much is recovered', parts, 'Figures')


def _axis(scale: Modality, finite: Sequence[float]) -> tuple[float, float]:
  """Returns the ends of the axis of the score of runs: its range, where that is known, else what the runs take."""
  low, high = scale.scored.bounds or (-math.inf, math.inf)
  if math.isfinite(low) and math.isfinite(high):
    return low, high
  return min([0.0, *finite]), max([10.0, *finite]) * 1.04


def _more_figures(summaries: Sequence[cases.Summary], published: Mapping[str, str]) -> blocks.Details:
  """Returns further figures of all attackers, folded away."""
  titles = [one.title for one in of_rows(summaries).further]
  columns: list[Any] = ['attack', ('defense', 'left'), *titles]
  columns += ['labels\nright', 'mean rank\nof the original', 'change of\nthe upload', 'entries\nsent']
  groups = cases.grouped(summaries, 'attack', 'defense').values()
  rows = [_more(summary, len(group) > 1, published) for group in groups for summary in group]
  table = blocks.Table(columns, [blocks.Body(rows)], 'figures', 'More figures')
  listed = ', '.join(title.replace('\n', ' ') for title in [*titles, 'labels', 'what was sent'])
  return blocks.Details(f'More figures: {listed}', [table])


def _more(summary: cases.Summary, paired: bool, published: Mapping[str, str]) -> blocks.Row:
  """Returns the further figures of an attacker."""
  share = summary['sent']
  sent = percent(share) if share is None or 0.99 < share < 1 else f'{significant(100 * share, 3)} %'
  who = _who(method(summary['defense'], published.get(summary['defense'])), summary['adaptive'], True, paired)
  return blocks.Row(
    [
      code(summary['attack']),
      who._replace(kind='spec'),
      *(_further(summary, one) for one in of_rows([summary]).further),
      *(percent(summary['label_correct'], 0), number(summary['rank']), significant(summary['change']), sent),
    ]
  )


def _further(summary: cases.Summary, figure: Shown) -> blocks.Cell:
  name = figure.column
  if not figure.significant:
    return _mean(summary, name, figure.digits)
  low, high = summary[f'{name}_low'], summary[f'{name}_high']
  return blocks.Cell(significant(summary[name]), [low is not None and f'{significant(low)} – {significant(high)}'])


def _close(a: float | None, b: float | None) -> bool:
  """Returns whether two thresholds are equal; None is none."""
  return a == b if a is None or b is None else math.isclose(a, b)


def _own(threshold: float | None, usual: float | None) -> str:
  """Returns a threshold that differs from that of the attack, in words; '' for one that does not."""
  return '' if number(threshold) == number(usual) else number(threshold)


def _strip(
  scale: Modality, rows: Sequence[cases.Row], summary: cases.Summary, axis: tuple[float, float], kind: str
) -> blocks.Html:
  """Returns the drawing of the score of every run that has one, at varying heights, before the control's threshold."""
  name, bound = scale.score, scale.controls[0]

  def x(score: float) -> float:  # with room for half a dot at the ends
    low, high = axis
    return round(5 + (min(max(score, low), high) - low) / (high - low) * (_STRIP_WIDTH - 10), 1)

  dots = [
    f'<circle class="{row["verdict"].replace(" ", "-")}" cx="{x(row[name])}" '
    f'cy="{10 + _STAGGER[i % len(_STAGGER)]}" r="2.9"/>'
    for i, row in enumerate(rows)
    if row[name] is not None
  ]
  prior = ''
  if summary[bound] is not None:
    at = x(summary[bound])
    prior = f'<rect class="prior" x="0" y="0" width="{at}" height="20"/>'
    prior += f'<line class="threshold" x1="{at}" x2="{at}" y1="0" y2="20"/>'
  axis_line = '<line class="axis" x1="5" x2="145" y1="10" y2="10"/>'
  label = f'{scale.shown[0].title} of {len(dots)} {kind}, mean {scored(scale, summary[name])}'
  return _svg('strip', _STRIP_WIDTH, label, f'{axis_line}{prior}{"".join(dots)}')


def _svg(kind: str, width: int, label: str, inside: str) -> blocks.Html:
  shape = f'viewBox="0 0 {width} 20" width="{width}" height="20"'
  return blocks.Html(f'<svg class="{kind}" {shape} role="img" aria-label="{label}">{inside}</svg>')


def _worst(worst: Sequence[dict], published: Mapping[str, str], exact: str) -> blocks.Section:
  """Returns what any attacker recovers under each defense; `exact` says of which kind the intervals are."""
  adaptive = _adaptive(worst)
  columns: list[Any] = ['defense'] + (['non-adaptive', 'adaptive', 'any'] if adaptive else [])
  columns += [] if adaptive else ['recovered']
  columns += [('0 to 100 %', 'left'), ('by', 'left by'), ('flags', 'left flags')]
  rows = []
  for entry in worst:
    counts = ['–' if entry[who] is None else f'{entry[who]} of {entry["n"]}' for who in ('non_adaptive', 'adaptive')]
    low, middle, high = (round(5 + 200 * entry[f'success{end}'], 1) for end in ('_low', '', '_high'))
    drawn = (
      f'<line class="axis" x1="5" x2="205" y1="10" y2="10"/><line class="bar" x1="{low}" x2="{high}" y1="10" y2="10"/>'
      f'<circle cx="{middle}" cy="10" r="4.5"/>'
    )
    bar = _svg('range', 210, f'{percent(entry["success"], 0)}, interval {percent_range(entry)}', drawn)
    by = text(*map(code, entry['by'])) or '–'
    counted = blocks.Cell(count(entry), [percent_range(entry)])
    flags = '; '.join(entry['flags']) or '–'
    named = method(entry['defense'], published.get(entry['defense']))
    rows.append(blocks.Row([named, *(counts if adaptive else []), counted, bar, by, flags]))
  return blocks.Section(
    'worst',
    'Worst case per defense',
    [
      blocks.Text(said('audit.worst', exact=exact), 'note'),
      blocks.Table(columns, [blocks.Body(rows)]),
      blocks.Text(said('audit.worst_adaptive' if adaptive else 'audit.worst_flags'), 'note'),
    ],
    'Worst case',
  )


def _adaptive(worst: Sequence[dict]) -> bool:
  return any(entry['adaptive'] is not None for entry in worst)


def _curves(result: AuditResult, worst: Sequence[dict]) -> blocks.Section:
  """Returns how the objectives fell."""
  panels = [
    f'<figure><figcaption>{code(attack)}</figcaption>{svg}</figure>' for attack, svg in descent.curves(result).items()
  ]
  note = blocks.Text(said('audit.curves', adaptive=said('audit.curves_adaptive') if _adaptive(worst) else ''), 'note')
  drawn = [note, blocks.Html(f'<div class="panels">\n{"".join(panels)}\n</div>')]
  parts = drawn if panels else [blocks.Text(said('audit.no_curves'))]
  return blocks.Section('curves', 'How the attacks converged', parts, 'Convergence')


def _granted(result: AuditResult, worst: Sequence[dict]) -> blocks.Section:
  """Returns what the attackers are granted; attackers and defenses of which the same is said stand together."""
  alike = together((tuple(map(worded, sentences)), attack) for attack, sentences in result.threat_models.items())
  models = ''.join(
    f'<div>{html.rendered([blocks.Heading(code(*attacks)), blocks.Bullets(sentences)])}</div>'
    for sentences, attacks in alike.items()
  )
  parts: list[Any] = [blocks.Html(f'<div class="granted">\n{models}\n</div>')]
  adaptive_attacks = together(
    (tuple(does.items()), defense) for defense, does in result.adaptive_attacks.items() if does
  )
  unmet = [defense for defense, does in result.adaptive_attacks.items() if not does and defense != 'none']
  if adaptive_attacks or (unmet and _adaptive(worst)):
    rounds = result.config.get('rounds', 1)
    terms = [
      (code(*defenses), [text(code(adaptive), f': {worded(does)}') for adaptive, does in sentences])
      for sentences, defenses in adaptive_attacks.items()
    ]
    parts += [
      blocks.Heading('Adaptive attackers'),
      blocks.Text(said('audit.adaptive_rounds' if rounds > 1 else 'audit.adaptive', rounds=rounds)),
    ]
    parts.append(blocks.Terms(terms))
    if unmet:
      bare = text('No adaptive attack was run against ', code(*unmet), said('audit.unmet'))
      parts.append(blocks.Text(bare))
  return blocks.Section('granted', 'What the attackers know', parts)


def _inspected(result: AuditResult) -> blocks.Section:
  """Returns what a client can see of the models that it is sent."""

  def told(found: Sequence[str] | str | None) -> Sequence[str]:
    if found is None or isinstance(found, str):  # a folder of version 0.2 has no reason
      return [said('audit.unread', reason=found or 'its folder does not say why')]
    return [*map(worded, found)] or [said('audit.unsuspicious')]

  alike = together((tuple(told(sentences)), attack) for attack, sentences in result.inspections.items())
  return blocks.Section(
    'inspected',
    'What the client could notice',
    [
      blocks.Text(said('audit.inspected', size=result.config.get('batch_size', 1)), 'note'),
      blocks.Terms([(code(*attacks), sentences) for sentences, attacks in alike.items()]),
    ],
  )


def _settings(result: AuditResult) -> blocks.Section:
  guarantees = findings.guarantees(result.methods)
  privacy = [blocks.Text('Differential privacy of the defenses:'), blocks.Bullets(guarantees)] if guarantees else []
  told = blocks.Text(' '.join(wording.settings(result.config)))
  return blocks.Section('settings', 'Settings', [told, *privacy, every_setting(result.config)])


def _reading(result: AuditResult, worst: Sequence[dict]) -> blocks.Section:
  """Returns what the words of the page mean."""
  config = result.config
  alarms = ''.join(f' {one}' for one in findings.alarms(result.controls, worst))
  kind = of_rows(result.rows)
  score, name = kind.shown[0].title, f'scores.{kind.name}'
  terms: list[tuple[str, list[str]]] = [
    (score, [said(name) if name in kind.words else kind.scored.meaning]),
    ('Null-gradient control', [said('audit.control', enough=findings.MIN_CONTROLS, alarms=alarms)]),
    *headline.verdict_terms(headline.gallery(result.rows, config), config),
    *([(f'Oracle {score}', [said('audit.oracle')])] if config.get('restarts', 1) > 1 else []),
    *([('Non-adaptive, adaptive', [said('audit.both')])] if _adaptive(worst) else []),
    ('Worst case', [said('audit.worst_case')]),
    ('Threat model A–H', [said('audit.tiers')]),
  ]
  return blocks.Section('reading', 'How to read this page', [blocks.Terms(terms)])
