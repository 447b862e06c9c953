"""The page, the pictures and the table of a captured update: what was measured, judged where the truth is known."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from gradleak.core import errors
from gradleak.modalities import Modality, Piece, of_config, of_rows
from gradleak.report import blocks, figures, html, marked, pictures
from gradleak.report.findings import few_candidates
from gradleak.report.formatting import aligned, listed, number, scored, significant, together, wrap
from gradleak.report.html import code, image, text
from gradleak.report.page import every_setting, sources, write_files
from gradleak.report.words import Finding, found, said, speaking, worded
from gradleak.studies.captured import Captured, Inversion
from gradleak.summary import shown


def write_captured(result: Captured, folder: Any) -> None:
  """Writes report.html and reconstructions.png, each whole or not at all.

  Args:
    result: a `Captured`.
    folder: a path, made if it does not exist.
  """
  write_files(folder, {'reconstructions.png': captured_grid(result), 'report.html': render_captured(result)})


@speaking
def render_captured(result: Captured) -> str:
  """Returns the page of a captured update, which loads nothing; the same result gives the same text."""
  config = _check(result).config
  model = config.get('model', 'a model')
  findings = [verdict(row) for row in result.rows] + [finding(one) for one in result.inversions]
  versions = ' · '.join(f'{name} {version}' for name, version in result.versions.items())
  made = blocks.Page(
    'captured',
    f'A captured update of {model}',
    'A captured update',
    f'What a {"gradient" if config["share"] == "gradient" else "weight difference"} of {model} gives away',
    [
      blocks.Text(str(findings[0]), 'meaning') if len(findings) == 1 else blocks.Bullets(findings, 'meaning'),
      blocks.Cautions(
        [*([] if result.rows else [said('captured.no_truth')]), *few_candidates(result.rows), *result.warnings]
      ),
    ],
    [
      _pictures(result),
      _figures(result),
      *([_verdicts(result)] if result.rows else []),
      _granted(result),
      blocks.Section('settings', 'Settings', [every_setting(config)]),
      blocks.Section('reading', 'How to read this page', [
        blocks.Terms([(name, [meaning]) for name, meaning in terms().items()])
      ]),
    ],
    [blocks.Text(versions), *sources(result.citations)],
  )  # fmt: skip
  return html.page(made)


def terms() -> dict[str, str]:
  """Returns what the columns of the table and of the page mean."""
  return {
    'Mismatch': said('captured.mismatch'),
    'On noise (control), closer than': said('captured.on_noise'),
    said('captured.neutral_head').capitalize(): said('captured.neutral_term', neutral=said('captured.neutral')),
    'Objective, distance': said('captured.objective'),
    'Like the control, controls alike': said('captured.likeness', likeness=said('captured.alike')),
  }


def _check(result: Any) -> Captured:
  """Returns `result`; raises `UsageError` for anything but a `Captured`."""
  return errors.check_instance('the result', result, Captured, 'a Captured: what gradleak.attack returns')


def finding(one: Inversion) -> Finding:
  """Returns what was measured of one attacker, which claims no more."""
  who = f'`{one.attack}`' + (f' that knows the defense (`{one.adaptive}`)' if one.adaptive else '')
  if one.diverged:
    return found('captured.diverged', who=who)
  if not one.found:
    return found('captured.nothing', who=who)
  if math.isnan(one.mismatch):
    noise = '' if math.isnan(one.likeness) else said('captured.noise', likeness=one.likeness)
    return found('captured.no_labels', who=who, noise=noise)
  if one.inconclusive == 'unmoved':
    return found('captured.unmoved', who=who, start=one.objective_start, end=one.objective)
  if one.inconclusive:
    return found('captured.grey', who=who, mismatch=one.mismatch, grey=one.grey, neutral=said('captured.neutral'))
  if one.closer is None:
    return found('captured.differs', who=who, mismatch=one.mismatch, beside=said('captured.uncontrolled'))
  runs, ends = len(one.control_mismatch), bounds(one.control_mismatch)
  how = 'closer than all of' if one.closer == runs > 1 else f'closer than {one.closer} of'
  verb = 's' * (runs == 1)
  some = ' where they find anything' * bool(np.isnan(one.control_mismatch).any())
  ends = f'find{verb} nothing' if ends == '–' else f'end{verb} at {ends}{some}'
  beside = said('captured.closer', how=how, runs=runs, ends=ends)
  return found('captured.differs', who=who, mismatch=one.mismatch, beside=beside)


def verdict(row: dict) -> Finding:
  """Returns what a row of an auditor who owns the samples says."""
  who = f'`{row["attack"]}`' + (f' that knows the defense (`{row["adaptive"]}`)' if row['adaptive'] else '')
  kind = of_rows([row])
  return found('captured.judged', who=who, verdict=row['verdict'], score=scored(kind, row[kind.score]))


def bounds(values: np.ndarray) -> str:
  """Returns 'least – largest' of values, the value where both read alike, '–' where there is none."""
  known = np.asarray(values)[~np.isnan(values)]
  if not len(known):
    return '–'
  low, high = significant(float(known.min())), significant(float(known.max()))
  return low if low == high else f'{low} – {high}'


def _closer(one: Inversion) -> str:
  return '–' if one.closer is None else f'{one.closer} of {len(one.control_mismatch)}'


@speaking
def captured_table(result: Captured) -> str:
  """Returns the figures of all attackers as a text for a terminal, then what they read, and the warnings."""
  _check(result)
  told = any(one.adaptive for one in result.inversions)
  neutral = said('captured.neutral_head')
  head = ['attack', *(['knows the defense'] if told else []), 'objective', 'distance', 'mismatch', 'on noise', neutral]
  head += ['closer than', 'like control', *(['verdict', 'score'] if result.rows else [])]
  judged = {(row['attack'], row['adaptive']): row for row in result.rows}
  lines = []
  for one in result.inversions:
    row = judged.get((one.attack, one.adaptive))
    lines.append(
      [
        one.attack,
        *([one.adaptive or 'no'] if told else []),
        significant(one.objective, 3),
        significant(one.distance, 3),
        'diverged' if one.diverged else significant(one.mismatch, 3),
        bounds(one.control_mismatch),
        significant(one.grey, 3),
        'inconclusive' if one.inconclusive else _closer(one),
        number(one.likeness, 2),
        *([row['verdict'], scored(of_rows([row]), row[of_rows([row]).score])] if row else []),
      ]
    )
  notes = [
    *result.warnings,
    *map(str, few_candidates(result.rows)),
    *(str(finding(one)) for one in result.inversions if one.inconclusive),
  ]
  return '\n'.join([*aligned([head, *lines]), *_lines(result), *(f'\nnote: {note}' for note in notes)])


def _lines(result: Captured) -> list[str]:
  """Returns the first samples of each attacker that can be read, as lines for a terminal; none of images."""
  lines = []
  for one in result.inversions:
    read = [(number, pieces) for number, pieces, _ in _read(result, one)[: marked.SHOWN] if pieces]
    who = one.attack + (f' ({one.adaptive})' if one.adaptive else '')
    lines += [''] * bool(read) + [f'{who}, {worded("image")} {i + 1}: {marked.line(of)}' for i, of in read]
  return lines


def _read(result: Captured, one: Inversion) -> list[tuple[int, list[Piece], list[Piece]]]:
  """Returns (its place, its pieces, those of the private sample) of each sample; () where it is none, or not known.

  Where the truth is known, they are in its order, and marked by it.
  """
  kind, size = of_config(result.config), result.config['num_samples']
  if kind.marked is None:
    return []
  if result.truth is None:
    kept = [i for i in range(min(size, len(one.samples))) if not one.empty[i]]
    return [(i, list(kind.marked(one.samples[i], None)), []) for i in kept]
  labels = np.zeros(size, np.int32)
  order = kind.evaluate(one.samples, result.truth, np.zeros(0, np.int32), labels)['permutation']
  return [
    (i, list(kind.marked(one.samples[place], truth)) if place >= 0 and not one.empty[place] else [],
     [piece._replace(right=None) for piece in kind.marked(truth, truth)])
    for i, (place, truth) in enumerate(zip(order, result.truth, strict=True))
  ]  # fmt: skip


@speaking
def captured_grid(result: Captured, columns: int = pictures.MAX_COLUMNS) -> bytes:
  """Returns a PNG: a row of pictures per attacker, and below it a control run of the same attack on noise."""
  errors.check_number('columns', columns, low=1, integer=True)
  size, kind = min(_check(result).config['num_samples'], columns), of_config(result.config)
  rows: list[tuple[list[str], np.ndarray]] = []
  for one in result.inversions:
    if not one.found:
      rows.append(([*wrap(one.attack, 34), 'found nothing'], one.samples[:0]))
      continue
    caption = f'mismatch {significant(one.mismatch)}'
    rows.append(
      ([*wrap(one.attack, 34), *([f'adaptive: {one.adaptive}'] if one.adaptive else []), caption], one.samples)
    )
    if len(one.control_samples):
      rows.append((['the same on noise'], one.control_samples[0]))
  height, width = kind.picture(result.inversions[0].samples[0]).shape[:2]
  cell, margin = 0.95, 0.12  # inches, as are all lengths
  tall = max(cell * height / width, 0.6)
  start = 3 * margin + 0.075 * max(len(line) for label, _ in rows for line in label)
  across, down = max(start + (cell + margin) * size, 3.7), margin + (tall + margin) * len(rows)
  with figures.canvas(across, down) as (axes, png):
    for r, (label, samples) in enumerate(rows):
      top = margin + r * (tall + margin)
      for i, line in enumerate(label):
        axes.text(margin, top + tall / 2 + 0.17 * (i - (len(label) - 1) / 2), line, va='center', color=figures.INK)
      for c, image in enumerate(samples[:size]):
        left = start + c * (cell + margin)
        extent = (left, left + cell, top + tall, top)
        pixels = shown.pixels_of(kind.picture(image))
        axes.imshow(pixels, cmap='gray', vmin=0, vmax=255, interpolation='nearest', aspect='auto', extent=extent)
    return png()


def _pictures(result: Captured) -> blocks.Section:
  """Returns what each attacker made of the update, as people look at it or read it, and what it makes of noise."""
  size, kind = result.config['num_samples'], of_config(result.config)
  if kind.marked is not None:
    return _texts(result, kind)
  bodies = [blocks.Body(_rows(one, size)) for one in result.inversions]
  if result.truth is not None:
    columns = min(size, pictures.MAX_COLUMNS)
    cells = _cells(result.truth[:columns], [], 'Private sample')
    bodies.insert(0, blocks.Body([blocks.Row(['the private samples', *cells])]))
  note = said('captured.pictures' if result.config['controls'] else 'captured.no_control')
  table = blocks.Table([blocks.Column()], bodies, 'pictures', style=f'--side: {128 if size <= 4 else 92}px')
  return blocks.Section('pictures', 'What the attacks make of it', [blocks.Text(note, 'note'), table], 'Pictures')


def _texts(result: Captured, kind: Modality) -> blocks.Section:
  """Returns the samples of each attacker as people read them, those of one run on noise below."""
  assert kind.marked is not None
  parts: list[Any] = [
    blocks.Text(said('captured.pictures' if result.config['controls'] else 'captured.no_control'), 'note')
  ]
  for one in result.inversions:
    title = blocks.Heading(f'`{one.attack}`' + (f' (`{one.adaptive}`)' if one.adaptive else ''))
    read = _read(result, one)[: pictures.MAX_COLUMNS]
    if not one.found or not read:
      parts += [title, blocks.Text('Nothing found.')]
      continue
    noun = worded('Image')
    told = [(f'{noun} {i + 1}', pieces, private) for i, pieces, private in read]
    controls = [sample for run in one.control_samples[:1] for sample in run[:1] if not kind.empty(run[:1]).all()]
    told += [('on noise', list(kind.marked(sample, None)), []) for sample in controls]
    parts += [title, _columns(told) if any(piece.of for _, of, _ in told for piece in of) else _running(told)]
  return blocks.Section('pictures', 'What the attacks make of it', parts, worded('Images'))


def _columns(told: Sequence[tuple[str, list[Piece], list[Piece]]]) -> blocks.Table:
  """Returns a table with a line for each part of a sample and a column for each sample, beside the private one."""
  heads: list[Any] = ['column']
  columns: list[list[Piece]] = []
  for name, pieces, private in told:
    heads += [*([('private', 'left private')] if private else []), blocks.Column(name, 'left seen')]
    columns += [private] * bool(private) + [pieces]
  names = [piece.of for piece in next(filter(None, columns))]
  rows = []
  for i, name in enumerate(names):
    cells = [blocks.Cell(marked.cell(of[i]), [marked.sure(of[i])]) if of else blocks.Cell('–') for of in columns]
    rows.append(blocks.Row([name, *cells]))
  return blocks.Table(heads, [blocks.Body(rows)], 'marked')


def _running(told: Sequence[tuple[str, list[Piece], list[Piece]]]) -> blocks.Table:
  """Returns a table with a line for each text, below the private one."""
  rows = []
  for name, pieces, private in told:
    if private:
      rows.append(blocks.Row(['private', blocks.Cell(marked.inline(private, len(private)))]))
    seen = marked.inline(pieces, len(pieces)) if pieces else 'nothing found'
    rows.append(blocks.Row([name, blocks.Cell(seen)], 'control' if name == 'on noise' else ''))
  return blocks.Table(['', ('seen', 'left running')], [blocks.Body(rows)], 'marked')


def _rows(one: Inversion, size: int) -> list[blocks.Row]:
  """Returns the rows of pictures of one attacker."""
  if not one.found:
    return [blocks.Row([_who(one), 'nothing found'])]
  columns = min(size, pictures.MAX_COLUMNS)
  rows = [blocks.Row([_who(one), *_cells(one.samples[:columns], one.labels, f'Reconstruction by {one.attack}')])]
  further = [pixels for pixels in one.samples[size:] if np.ptp(pixels) > 0]  # the others are empty
  if further:
    cells = _cells(further[: pictures.MAX_COLUMNS], [], f'Further candidate of {one.attack}')
    rows.append(blocks.Row(['further candidates', *cells], 'further'))
  runs = list(one.control_samples)
  controls = [run[0] for run in runs] if size == 1 else [pixels for run in runs[:1] for pixels in run[:columns]]
  if controls:
    how_many = f'{len(controls)} runs' if size == 1 and len(controls) > 1 else 'one run'
    cells = _cells(controls, [], f'What {one.attack} makes of noise')
    rows.append(blocks.Row([f'on noise, {how_many}', *cells], 'control'))
  return rows


def _who(one: Inversion) -> blocks.Cell:
  return blocks.Cell(code(one.attack), [one.adaptive and f'adaptive: {one.adaptive}'])


def _cells(samples: Any, labels: Any, what: str) -> list[blocks.Cell]:
  """Returns pictures, with labels where there are any."""
  known = [int(label) for label in labels]
  cells = []
  for i, pixels in enumerate(samples):
    caption = html.Html(f'<span class="caption">class {known[i]}</span>') if i < len(known) and known[i] >= 0 else ''
    cells.append(blocks.Cell(text(image(shown.data_uri(pixels), f'{what}, picture {i + 1}.'), caption)))
  return cells


def _figures(result: Captured) -> blocks.Section:
  words = (
    'attack',
    'mismatch',
    'closer than',
    'objective',
    'distance',
    'like the\ncontrol',
    'controls\nalike',
    'steps',
  )
  rows, neutral = [], said('captured.neutral_head')
  for one in result.inversions:
    searched = [blocks.Cell('–'), blocks.Cell('–')]
    if one.steps:
      noise = [f'on noise {bounds(values)}' for values in (one.control_objective, one.control_distance)]
      searched = [
        blocks.Cell(significant(one.objective, 3), [f'from {significant(one.objective_start)}', noise[0]]),
        blocks.Cell(significant(one.distance, 3), [noise[1]]),
      ]
    mismatch = 'diverged' if one.diverged else significant(one.mismatch)
    cells = [
      _who(one),
      blocks.Cell(mismatch, [f'on noise {bounds(one.control_mismatch)}', f'{neutral} {significant(one.grey)}']),
      blocks.Cell('inconclusive' if one.inconclusive else _closer(one)),
      *searched,
    ]
    likeness = [number(value, 2) for value in (one.likeness, one.control_likeness)]
    rows.append(blocks.Row([*cells, *likeness, str(one.steps or 'closed form')]))
  return blocks.Section('figures', 'How well it matches', [blocks.Table(words, [blocks.Body(rows)])], 'Figures')


def _verdicts(result: Captured) -> blocks.Section:
  """Returns the verdict on each attacker, and the metrics of its pictures."""
  kind = of_rows(result.rows)
  words = ['attack', 'verdict', *(one.with_unit('\n') for one in kind.shown)]
  rows = []
  for row in result.rows:
    who = blocks.Cell(code(row['attack']), [row['adaptive'] and f'adaptive: {row["adaptive"]}'])
    figured = (
      significant(row[one.column]) if one.significant else number(row[one.column], one.digits) for one in kind.shown
    )
    rows.append(blocks.Row([who, row['verdict'], *figured]))
  note = blocks.Text(said('captured.verdicts', controls=result.config['controls']), 'note')
  return blocks.Section('verdicts', 'Judged by the private samples', [note, blocks.Table(words, [blocks.Body(rows)])])


def _granted(result: Captured) -> blocks.Section:
  """Returns what the attackers are granted, those with the same grants together, and what is assumed."""
  names = [(one, f'`{one.attack}`' + (f' (`{one.adaptive}`)' if one.adaptive else '')) for one in result.inversions]
  parts: list[Any] = []
  for granted, of in together((tuple(one.granted), name) for one, name in names).items():
    parts += [blocks.Heading(listed(of)), blocks.Bullets(granted)]
  config = result.config
  defense = text(', its defense ', code(config['defense'])) if config['defense'] != 'none' else ''
  labels = ', the labels' if isinstance(config['labels'], Sequence) and not isinstance(config['labels'], str) else ''
  parts.append(blocks.Text(text(said('captured.assumed'), defense, labels, said('captured.wrong'))))
  parts += [blocks.Text(text(code(one.adaptive or ''), f': {one.does}')) for one in result.inversions if one.does]
  return blocks.Section('granted', 'What the attackers know', parts)
