"""The page of a sensitivity: which assumption protects, as a waterfall, a table and a sentence."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gradleak import metrics
from gradleak.core import errors, storage
from gradleak.report import blocks, figures, html, marked, page, wording
from gradleak.report.figures import SOFT
from gradleak.report.formatting import (
  aligned,
  count,
  duration,
  interval,
  listed,
  number,
  percent,
  plus_minus,
  scored,
  signed,
  together,
)
from gradleak.report.html import code, image, link, text
from gradleak.report.words import Finding, said, speaking, worded
from gradleak.report.words import found as finding
from gradleak.studies.sensitivity import LABORATORY, PRODUCTION, Effect, Judgement, Sensitivity, judged, untrained
from gradleak.summary import shown
from gradleak.summary.cases import csv_text

_WITHOUT = '−\u00a0'  # before an assumption that is dropped
_RECOVERED, _PROTECTED = '#b03a10', '#0f6674'
_BAR, _TALL, _LEFT = 0.98, 2.5, 0.62  # inches
# Verdicts where production keeps the images, and where it gives some away.
WORDS = {
  'protects': ('protects', 'lowers the leak'),
  'others hold': ('others hold as well', 'others hold as well'),
  'does not protect': ('does not protect', 'does not lower it'),
  'not shown': ('not shown', 'not shown'),
}


def steps(found: Sensitivity) -> dict[str, dict[str, Any]]:
  """Returns {setting: dict}, with 'setting', 'dropped' (names), 'n' and 'recovered'.

  The mean score is of the samples that all settings share, with its 95 % interval. For images it is 'psnr' in dB,
  'psnr_low' and 'psnr_high', and the threshold of the control is 'control_psnr'; None where there is none. The adaptive
  attack of the strongest attacker is 'by'.
  """
  _check(found)
  return {name: _step(found, name) for name in found.steps}


def _step(found: Sensitivity, name: str) -> dict[str, Any]:
  rows, kind = found.of(name), found.modality
  score = kind.scored
  known = [row[score.name] for row in rows if row[score.name] is not None]
  mean, low, high = metrics.mean_interval(known)
  bounded, (least, most) = len(known) >= 3 and low < high, score.bounds or (-math.inf, math.inf)
  return {
    'setting': name,
    'dropped': list(found.steps[name]),
    'n': len(rows),
    'recovered': sum(row['recovered'] for row in rows),
    score.name: mean if known else None,
    f'{score.name}_low': max(low, least) if bounded else None,
    f'{score.name}_high': min(high, most) if bounded else None,
    kind.controls[0]: rows[0][kind.controls[0]],
    'by': rows[0]['by'],
    'inconclusive': sum(row['verdict'] == 'inconclusive' for row in rows),
    'diverged': sum(row['verdict'] == 'diverged' for row in rows),
  }


def sensitivity_csv(found: Sensitivity) -> str:
  """Returns `steps` as CSV text; assumptions that are dropped are separated by semicolons."""
  return csv_text({**step, 'dropped': ';'.join(step['dropped'])} for step in steps(found).values())


@speaking
def sensitivity_table(found: Sensitivity) -> str:
  """Returns the waterfall and the judgements as aligned tables, with the sentences of `sensitivity_findings`."""
  named, kind = steps(found), found.modality
  shown = kind.shown[0]
  waterfall = [('dropped one after the other', shown.with_unit(), 'control', 'recovered')]
  for label, name in _waterfall(found):
    step = named[name]
    control = number(step[kind.controls[0]], shown.digits)
    waterfall.append((label, plus_minus(step, shown.column, shown.digits), control, count(step)))
  lines: list[tuple[str, ...]] = [('assumption', 'dropped alone', 'restored alone', 'verdict')]
  for one in judged(found):
    changes = (_change(found, effect) for effect in (one.alone, one.restored))
    lines.append((one.assumption.name, *changes, _words(found)[one.verdict]))
  closing = [line for told in sensitivity_findings(found) for line in textwrap.wrap(told.replace('`', ''), 110)]
  return '\n'.join([*aligned(waterfall), '', *aligned(lines), '', *closing])


@speaking
def sensitivity_findings(found: Sensitivity) -> list[str]:
  """Returns what the rows say, in sentences: what is recovered, what protects, and what does not."""
  return [str(one) for one in findings(found)]


def findings(found: Sensitivity) -> list[Finding]:
  """Returns what the rows say: what is recovered, what protects, and what does not."""
  named = steps(found)
  start, end = named[LABORATORY], named[PRODUCTION]
  seen = [scored(found.modality, step[found.modality.score]) for step in (start, end)]
  opening = finding('sensitivity.opening', start=start, end=end, started=seen[0], ended=seen[1])
  if not start['recovered']:
    return [opening, finding('sensitivity.fails')]
  by_verdict = together((one.verdict, one) for one in judged(found) if not one.assumption.skipped)
  return [opening, *_protection(by_verdict, end), *_rest(by_verdict)]


def _protection(by_verdict: Mapping[str, Sequence[Judgement]], end: Mapping[str, Any]) -> list[Finding]:
  """Returns what protects in production, and what does not."""
  protecting, others, not_ = (_names(by_verdict, name) for name in ('protects', 'others hold', 'does not protect'))
  leaks = [finding('sensitivity.leaks', **end)] if end['recovered'] else []
  if protecting:
    unsolved = end['inconclusive'] + end['diverged']
    by = 'lowered' if end['recovered'] else 'unsolved' if unsolved else 'hidden'
    facts = {
      'names': protecting,
      'by': said(f'sensitivity.{by}', unsolved=unsolved, n=end['n']),
      'but': f', not by {listed(not_)}' if not_ else '',
      'restored': [
        said('sensitivity.restored', recovered=one.restored.recovered[0], n=one.restored.n, name=one.assumption.name)
        for one in by_verdict['protects']
        if one.restored
      ],
    }
    return [*leaks, finding('sensitivity.protected', **facts)]
  if others:
    but = said('sensitivity.others_not', names=not_, n=len(not_)) if not_ else ''
    each = f'each of {listed(others)}' if len(others) > 1 else others[0]
    return [*leaks, finding('sensitivity.others_hold', each=each, but=but)]
  return [*leaks, finding('sensitivity.none_protects', names=not_) if not_ else finding('sensitivity.unclear')]


def _rest(by_verdict: Mapping[str, Sequence[Judgement]]) -> list[Finding]:
  """Returns what others hold as well, beside what protects, and what is not shown."""
  others, unclear = (_names(by_verdict, name) for name in ('others hold', 'not shown'))
  made = []
  if others and by_verdict.get('protects'):
    made.append(finding('sensitivity.others_too', names=others, n=len(others)))
  return made + ([finding('sensitivity.not_shown', names=unclear)] if unclear else [])


def _words(found: Sensitivity) -> dict[str, str]:
  """Returns the verdicts as this result calls them."""
  leaks = any(row['recovered'] for row in found.of(PRODUCTION))
  return {verdict: words[leaks] for verdict, words in WORDS.items()}


def _names(by_verdict: Mapping[str, Sequence[Judgement]], verdict: str) -> list[str]:
  return [one.assumption.name for one in by_verdict.get(verdict, ())]


def cautions(found: Sensitivity) -> list[Finding]:
  """Returns reasons for care, from the rows."""
  named = steps(found)
  counts = [[named[name][key] for name in found.waterfall] for key in ('inconclusive', 'diverged', 'n')]
  unsolved, diverged, total = map(sum, counts)
  few = found.config['trials'] < 8
  return [
    *([finding('sensitivity.ended', unsolved=unsolved, total=total)] if unsolved else []),
    *([finding('sensitivity.diverged', diverged=diverged, total=total)] if diverged else []),
    *([finding('sensitivity.few', trials=found.config['trials'])] if few else []),
    *(finding('sensitivity.untrained', **_accuracy(found, origin)) for origin in untrained(found)),
  ]


@speaking
def waterfall(found: Sensitivity) -> bytes:
  """Returns a PNG: a bar per setting of the waterfall, the mean score with its interval, and the control's level.

  The first picture is the private image, and below each bar is what the strongest attacker makes of it. Rows and texts
  are not drawn.
  """
  named, kind = steps(found), found.modality
  entries = [(label, named[name], found.examples[name]) for label, name in _waterfall(found)]
  looked_at = kind.marked is None
  image, below, above, right = 0.78, 1.5 if looked_at else 0.72, 0.42, 0.12
  places = len(entries) + looked_at
  width = _BAR * places
  across, down = _LEFT + right + width, _TALL + below + above
  with figures.figure(across, down) as (figure, png):
    axes = figure.add_axes((_LEFT / across, below / down, width / across, _TALL / down))
    highest = _highest(found, [step for _, step, _ in entries])
    for place, (_, step, _) in enumerate(entries, looked_at):
      _draw_bar(axes, place, kind.score, step, highest)
    axes.set(xlim=(-0.5, places - 0.5), ylim=(0, highest), xticks=[])
    axes.set_ylabel(kind.shown[0].with_unit(', in '))
    title = worded('n of n: images recovered · whisker: 95 % interval · dashes: what noise gives')
    axes.set_title(title, fontsize=8, color=SOFT)
    labels = ['\n'.join(textwrap.wrap(label, 16)) for label, _, _ in entries]
    if looked_at:
      labels = [worded('the private\nimage'), *labels]
      for place, sample in enumerate([found.truth, *(one[2] for one in entries)]):
        middle = (_LEFT + _BAR * (place + 0.5)) / across
        pixels = kind.picture(sample)
        _draw_example(figure, middle, (below - image - 0.08) / down, image / across, image / down, pixels)
    top = below - 0.16 - image * looked_at
    for place, label in enumerate(labels):
      figure.text((_LEFT + _BAR * (place + 0.5)) / across, top / down, label, ha='center', va='top', fontsize=7.8)
    return png()


def _highest(found: Sensitivity, entries: Sequence[Mapping[str, Any]]) -> float:
  """Returns the upper end of the axis of the score, with room for the counts above the bars."""
  name, bounds = found.modality.score, found.modality.scored.bounds
  ends = [value for step in entries for value in (step[f'{name}_high'], step[name]) if value is not None]
  most = bounds[1] if bounds else math.inf
  return 1.16 * max(12.0 if math.isinf(most) else most, *ends, 0.0)


def _draw_bar(axes: Any, place: int, score: str, step: Mapping[str, Any], highest: float) -> None:
  """Draws the bar of one setting, in the colour of what was recovered."""
  value, colour = step[score] or 0.0, _RECOVERED if step['recovered'] else _PROTECTED
  axes.bar(place, value, width=0.6, color=colour, alpha=0.82, linewidth=0)
  top, (low, high) = value, (step[f'{score}_low'], step[f'{score}_high'])
  if low is not None:
    top = high
    axes.plot([place, place], [low, high], color=figures.INK, linewidth=1.1)
  control = step[f'control_{score}']
  level = control if math.isfinite(control or math.nan) else 0.0
  if level:
    axes.plot([place - 0.42, place + 0.42], [level, level], color=figures.INK, linewidth=1.1, dashes=(2, 1.4))
  top = max(top, level)
  axes.text(place, top + 0.02 * highest, count(step), ha='center', va='bottom', fontsize=8)


def _draw_example(figure: Any, middle: float, low: float, wide: float, tall: float, pixels: np.ndarray) -> None:
  axes = figure.add_axes((middle - wide / 2, low, wide, tall))
  axes.imshow(shown.pixels_of(pixels), cmap='gray', vmin=0, vmax=255, interpolation='nearest')
  axes.set(xticks=[], yticks=[])
  for spine in axes.spines.values():
    spine.set(color='#9a9fa6', linewidth=0.6, visible=True)


@speaking
def render_sensitivity(found: Sensitivity, links: Mapping[str, str] | None = None) -> str:
  """Returns the page of a sensitivity as HTML that loads nothing; the same result gives the same text.

  Args:
    found: a `Sensitivity`.
    links: {name of a setting: relative link to the page of its audit}, or None.
  """
  config, links = _check(found).config, links or {}
  accuracy = ' '.join(said('sensitivity.accuracy', **_accuracy(found, origin)) for origin in found.accuracy)
  facts = {'trials': config['trials'], 'accuracy': accuracy, 'duration': duration(found.seconds)}
  told = text('The attack is ', code(config['attack']), said('sensitivity.settings', **facts))
  made = blocks.Page(
    'sensitivity',
    f'Which assumption protects: {config["model"]} on {config["dataset"]}',
    'Which assumption protects: from the laboratory of published attacks to production',
    f'{config["model"]} on {config["dataset"]}',
    [blocks.Text(' '.join(sensitivity_findings(found)), 'meaning')],
    [
      blocks.Picture(waterfall(found), _alternative(found)),
      blocks.Cautions(cautions(found)),
      _each(found, links),
      _one_after_the_other(found, links),
      blocks.Section('settings', 'Settings', [blocks.Text(told), page.every_setting(config)]),
      _reading(found),
    ],
    page.sources(wording.citations(found.methods)),
    '',
  )
  return html.page(made)


def write_sensitivity(found: Sensitivity, folder: Any) -> None:
  """Writes sensitivity.html, .png, .csv and rows.jsonl, each whole or not at all, see `render_sensitivity`."""
  _check(found)
  links = page.pages_of(found.audits, storage.made_folder(folder))
  files: dict[str, str | bytes] = {'sensitivity.png': waterfall(found), 'sensitivity.csv': sensitivity_csv(found)}
  files |= {'rows.jsonl': storage.json_lines(found.rows), 'sensitivity.html': render_sensitivity(found, links)}
  page.write_files(folder, files)


def _check(found: Any) -> Sensitivity:
  return errors.check_instance('the result', found, Sensitivity, 'what gradleak.sensitivity returns')


def _waterfall(found: Sensitivity) -> list[tuple[str, str]]:
  """Returns (label, name of the setting) of each step down."""
  used = [one.name for one in found.assumptions if not one.skipped]
  last = len(used) - 1
  labels = [LABORATORY, *(_WITHOUT + name + (' = production' if i == last else '') for i, name in enumerate(used))]
  return list(zip(labels, found.waterfall, strict=True))


def _one_after_the_other(found: Sensitivity, links: Mapping[str, str]) -> blocks.Section:
  """Returns the waterfall as a table."""
  kind = found.modality
  score, bound = kind.shown[0], kind.controls[0]
  columns = ['setting', ('what changes', 'told'), 'recovered', score.with_unit(', ')]
  columns += [', '.join(filter(None, ('control', score.unit))), (worded('first image'), 'left picture')]
  used = [one for one in found.assumptions if not one.skipped]
  meaning = [said('sensitivity.laboratory'), *(one.production for one in used)]
  named, rows = steps(found), []
  for (label, name), told in zip(_waterfall(found), meaning, strict=True):
    step = named[name]
    recovered = blocks.Cell(count(step), [step['by']], 'spent' if step['recovered'] else 'kept')
    mean = blocks.Cell(number(step[score.column], score.digits), [interval(step, score.column, score.digits)])
    control = number(step[bound], score.digits)
    rows.append(
      blocks.Row([link(label, links.get(name)), told, recovered, mean, control, _example(found, name, label)])
    )
  return blocks.Section(
    'waterfall', 'Dropped one after the other', [blocks.Table(columns, [blocks.Body(rows)], first='')]
  )


def _example(found: Sensitivity, name: str, label: str) -> Any:
  """Returns what is reconstructed of the first sample: a picture, or how many of its pieces are right."""
  kind, sample = found.modality, found.examples[name]
  if kind.marked is not None:
    return blocks.Cell(marked.summary(kind.marked(sample, found.truth)))
  return image(shown.data_uri(kind.picture(sample)), f'Reconstruction of the first image: {label}.')


def _each(found: Sensitivity, links: Mapping[str, str]) -> blocks.Section:
  """Returns the judgement of each assumption."""
  columns = ['assumption', ('laboratory\nproduction', 'told')]
  title = found.modality.shown[0].with_unit(', ')
  columns += ('dropped alone:\nrecovered', title, 'restored alone:\nrecovered', title)
  columns.append(('verdict', 'left'))
  kinds, words, rows = {'protects': 'protects', 'does not protect': 'spent'}, _words(found), []
  for one in judged(found):
    needs = one.assumption.needs and not one.assumption.skipped and f'with {", ".join(one.assumption.needs)}'
    cells = [one.assumption.name, blocks.Cell(one.assumption.laboratory, [one.assumption.production])]
    if one.assumption.skipped:
      cells.append(blocks.Cell(f'skipped: {one.assumption.skipped}', kind='told', span=4))
    else:
      cells += [*_cells(found, links, one.alone, 1), *_cells(found, links, one.restored, 0)]
    rows.append(blocks.Row([*cells, blocks.Cell(words[one.verdict], [needs], kinds.get(one.verdict, 'open'))]))
  note = blocks.Text(said('sensitivity.alone', links=said('sensitivity.links') if links else ''), 'note')
  return blocks.Section(
    'assumptions', 'Each assumption by itself', [note, blocks.Table(columns, [blocks.Body(rows)], first='')]
  )


def _cells(found: Sensitivity, links: Mapping[str, str], effect: Effect | None, at: int) -> list[blocks.Cell]:
  """Returns what the table says of an effect; `at` is the side whose setting is not shown elsewhere."""
  if effect is None:
    return []
  first, last = effect.recovered if at else effect.recovered[::-1]
  sign, digits = -1 if at else 1, found.modality.shown[0].digits
  moved = f'{first} of {effect.n} → {last} of {effect.n}'
  to = links.get(effect.production if at else effect.laboratory)
  return [
    blocks.Cell(link(moved, to)),
    blocks.Cell(signed(sign * effect.score, digits), [_interval(effect, sign, digits)]),
  ]


def _change(found: Sensitivity, effect: Effect | None) -> str:
  """Returns an effect for the terminal: recovered in the laboratory against production, and the difference in score."""
  if effect is None:
    return '–'
  score = found.modality.shown[0]
  bounds = _interval(effect, 1, score.digits)
  moved = f'{signed(effect.score, score.digits)} {score.unit}'.rstrip()
  return f'{effect.recovered[0]} against {effect.recovered[1]}, {moved}' + (bounds and f' ({bounds})')


def _interval(effect: Effect, sign: int, digits: int) -> str:
  """Returns 'low to high' of the difference of the score; empty where there is none."""
  if not math.isfinite(effect.low):
    return ''
  low, high = sorted((sign * effect.low, sign * effect.high))
  return f'{signed(low, digits)} to {signed(high, digits)}'


def _accuracy(found: Sensitivity, origin: str) -> dict[str, Any]:
  """Returns what a model classifies before and after a training, as texts."""
  known = {name: percent(found.accuracy[origin][name], 0) for name in ('trained', 'untrained', 'guessing')}
  where = 'as its own' if origin == 'own' else f'from {origin}'
  return {**known, 'origin': where, 'rounds': found.config['training_rounds']}


def _alternative(found: Sensitivity) -> str:
  """Returns the picture in words."""
  named = steps(found)
  bars = [
    said(
      'sensitivity.bar',
      label=label.replace(_WITHOUT, 'without '),
      seen=scored(found.modality, named[name][found.modality.score]),
      step=named[name],
    )
    for label, name in _waterfall(found)
  ]
  return said('sensitivity.alternative', bars=bars)


def _reading(found: Sensitivity) -> blocks.Section:
  kind = found.modality
  terms = {
    'Recovered': 'recovered',
    kind.shown[0].title: 'score',
    'Protects, lowers the leak': 'protects',
    'Others hold as well': 'others',
    'Does not protect, does not lower it': 'not',
    'Not shown': 'not_shown',
    'Limits': 'limits',
  }
  facts = {'margin': scored(kind, kind.effect), 'clear': scored(kind, kind.clear)}
  told = [(term, [said(f'sensitivity.term_{name}', **facts)]) for term, name in terms.items()]
  return blocks.Section('reading', 'How to read this page', [blocks.Terms(told)])
