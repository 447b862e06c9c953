"""One self-contained HTML page of a sensitivity: which assumption protects, as a waterfall, a table and a sentence."""

import csv
import io
import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gradleak import metrics
from gradleak.core import errors, storage
from gradleak.report import figures, page, wording
from gradleak.report.figures import SOFT
from gradleak.report.formatting import aligned, listed, number
from gradleak.studies.sensitivity import (
  CLEAR,
  LABORATORY,
  MARGIN,
  PRODUCTION,
  Effect,
  Judgement,
  Sensitivity,
  judged,
  untrained,
)
from gradleak.summary import shown

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


def steps(found: Sensitivity) -> list[dict[str, Any]]:
  """Returns one dict per setting, with 'setting', 'dropped' (names), 'n', 'recovered', 'psnr', 'psnr_low', 'psnr_high'.

  'psnr' is the mean in dB of the images that all settings share, with its 95 % interval, None where it cannot be
  computed; 'control_psnr' the threshold of the control; 'by' the counter-measure of the strongest attacker.
  """
  _check(found)
  return [_step(found, name) for name in found.steps]


def _step(found: Sensitivity, name: str) -> dict[str, Any]:
  rows = found.of(name)
  known = [row['psnr'] for row in rows if row['psnr'] is not None]
  mean, low, high = metrics.mean_interval(known)
  bounded = len(known) >= 3
  return {
    'setting': name,
    'dropped': list(found.steps[name]),
    'n': len(rows),
    'recovered': sum(row['recovered'] for row in rows),
    'psnr': mean if known else None,
    'psnr_low': max(low, 0.0) if bounded else None,
    'psnr_high': high if bounded else None,
    'control_psnr': rows[0]['control_psnr'],
    'by': rows[0]['by'],
    'not_solved': sum(row['verdict'] == 'not solved' for row in rows),
    'diverged': sum(row['verdict'] == 'diverged' for row in rows),
  }


def sensitivity_csv(found: Sensitivity) -> str:
  """Returns `steps` as CSV text; assumptions that are dropped are separated by semicolons."""
  text = io.StringIO()
  lines = [{**step, 'dropped': ';'.join(step['dropped'])} for step in steps(found)]
  writer = csv.DictWriter(text, fieldnames=list(lines[0]))
  writer.writeheader()
  writer.writerows(lines)
  return text.getvalue()


def sensitivity_table(found: Sensitivity) -> str:
  """Returns the waterfall and the judgements as aligned tables, with the sentences of `sensitivity_findings`."""
  named = {step['setting']: step for step in steps(found)}
  waterfall = [('dropped one after the other', 'PSNR dB', 'control', 'recovered')]
  for label, name in _waterfall(found):
    step = named[name]
    waterfall.append((label, _plus_minus(step), number(step['control_psnr']), _of(step['recovered'], step['n'])))
  lines = [('assumption', 'dropped alone', 'restored alone', 'verdict')]
  for one in judged(found):
    lines.append((one.assumption.name, _change(one.alone), _change(one.restored), _words(found)[one.verdict]))
  closing = [line for text in sensitivity_findings(found) for line in textwrap.wrap(text.replace('`', ''), 110)]
  return '\n'.join([*aligned(waterfall), '', *aligned(lines), '', *closing])


def sensitivity_findings(found: Sensitivity) -> list[str]:
  """Returns what the rows say, in sentences: what is recovered, what protects, and what does not."""
  named = {step['setting']: step for step in steps(found)}
  start, end = named[LABORATORY], named[PRODUCTION]
  opening = (
    f'In the laboratory setting {_of(start["recovered"], start["n"])} uploads give images away '
    f'({number(start["psnr"])} dB on average), in production {_of(end["recovered"], end["n"])} '
    f'({number(end["psnr"])} dB).'
  )
  if not start['recovered']:
    return [
      opening,
      'The attack fails in its own laboratory setting, so nothing is shown about any assumption: give it more steps, '
      'or another attack.',
    ]
  by_verdict: dict[str, list[Judgement]] = {}
  for one in judged(found):
    if not one.assumption.skipped:
      by_verdict.setdefault(one.verdict, []).append(one)
  return [opening, *_protection(by_verdict, end), *_rest(by_verdict)]


def _protection(by_verdict: Mapping[str, Sequence[Judgement]], end: Mapping[str, Any]) -> list[str]:
  """Returns the sentences on what protects in production, and what does not."""
  protecting, not_ = (_names(by_verdict.get(verdict, ())) for verdict in ('protects', 'does not protect'))
  sentences = []
  if end['recovered']:
    sentences.append(
      f'You are not protected: {_of(end["recovered"], end["n"])} uploads of production give images away.'
    )
  unsolved = end['not_solved'] + end['diverged']
  by = 'The leak is lowered by' if end['recovered'] else 'You are protected by'
  if unsolved and not end['recovered']:
    by = (
      f'Against this attack, which ended unsolved in {_of(unsolved, end["n"])} runs of production, you are protected by'
    )
  but = f', not by {listed(not_)}' if not_ else ''
  if protecting:
    told = [
      f'{_of(one.restored.recovered[0], one.restored.n)} with {one.assumption.name}'
      for one in by_verdict['protects']
      if one.restored
    ]
    return [*sentences, f'{by} {listed(protecting)}{but} (recovered if back in the laboratory: {", ".join(told)}).']
  if others := _names(by_verdict.get('others hold', ())):
    several = f'each of {listed(others)}' if len(others) > 1 else others[0]
    return [
      *sentences,
      f'No single assumption is seen to hold the protection alone: with any one of them back in the laboratory, '
      f'production is not seen to leak more. Dropped alone from the laboratory, {several} lowers the leak'
      + (f'; {listed(not_)} {_verb(not_, "does not", "do not")}.' if not_ else '.'),
    ]
  if not_:
    return [*sentences, f'You are not protected by {listed(not_)}; nothing is seen to protect.']
  return [*sentences, 'No assumption is seen to protect, and none is seen not to.']


def _rest(by_verdict: Mapping[str, Sequence[Judgement]]) -> list[str]:
  """Returns the sentences on what others hold as well, beside what protects, and on what is not shown."""
  sentences = []
  others = _names(by_verdict.get('others hold', ()))
  if others and by_verdict.get('protects'):
    sentences.append(
      f'Dropped alone from the laboratory, {listed(others)} {_verb(others, "lowers", "each lower")} the leak, too; '
      'restored alone, production is not seen to leak more, as other assumptions hold.'
    )
  if unclear := _names(by_verdict.get('not shown', ())):
    sentences.append(f'Not shown, as the runs do not decide: {listed(unclear)}.')
  return sentences


def _words(found: Sensitivity) -> dict[str, str]:
  """Returns the verdicts as this result calls them."""
  leaks = any(row['recovered'] for row in found.of(PRODUCTION))
  return {verdict: words[leaks] for verdict, words in WORDS.items()}


def _verb(subjects: Sequence[str], one: str, several: str) -> str:
  return one if len(subjects) == 1 else several


def _names(judgements: Sequence[Judgement]) -> list[str]:
  return [one.assumption.name for one in judgements]


def cautions(found: Sensitivity) -> list[str]:
  """Returns reasons for care, from the rows."""
  named = {step['setting']: step for step in steps(found)}
  sentences = []
  unsolved = sum(named[name]['not_solved'] for name in found.waterfall)
  total = sum(named[name]['n'] for name in found.waterfall)
  if unsolved:
    sentences.append(
      f'In {unsolved} of the {total} runs of the waterfall the attack ended before it had done as well as the truth '
      'would: more steps or another attack may recover more. What is not recovered is no guarantee.'
    )
  if found.config['trials'] < 8:
    sentences.append(f'There are {found.config["trials"]} trials: intervals are wide.')
  for origin in untrained(found):
    measured = found.accuracy[origin]
    sentences.append(
      f'The training hardly trained: initialised {_origin(origin)}, the model classifies '
      f'{_percent(measured["trained"])} of the held-out public images, and guessing the most frequent class '
      f'{_percent(measured["guessing"])}. Take more `training_rounds`.'
    )
  return sentences


def waterfall(found: Sensitivity) -> bytes:
  """Returns a PNG: a bar per setting of the waterfall, mean PSNR with its interval, the control's level, an example.

  The first picture is the private image, below each bar is what the strongest attacker makes of it.
  """
  named = {step['setting']: step for step in steps(found)}
  entries = [(label, named[name], found.examples[name]) for label, name in _waterfall(found)]
  image, below, above, right = 0.78, 1.5, 0.42, 0.12
  across, down = _LEFT + right + _BAR * (len(entries) + 1), _TALL + below + above
  with figures.figure(across, down) as (figure, png):
    width = _BAR * (len(entries) + 1)
    axes = figure.add_axes((_LEFT / across, below / down, width / across, _TALL / down))
    highest = max(12.0, *(step['psnr_high'] or step['psnr'] or 0.0 for _, step, _ in entries)) * 1.16
    for place, (_, step, _) in enumerate(entries, 1):
      _draw_bar(axes, place, step, highest)
    axes.set(xlim=(-0.5, len(entries) + 0.5), ylim=(0, highest), xticks=[])
    axes.set_ylabel('PSNR, in dB')
    axes.spines[['top', 'right']].set_visible(False)
    axes.set_title(
      'n of n: images recovered · whisker: 95 % interval · dashes: what noise gives', fontsize=8, color=SOFT
    )
    labels = ['the private\nimage', *('\n'.join(textwrap.wrap(label, 16)) for label, _, _ in entries)]
    for place, (label, pixels) in enumerate(zip(labels, [found.truth, *(one[2] for one in entries)], strict=True)):
      middle = (_LEFT + _BAR * (place + 0.5)) / across
      _draw_example(figure, middle, (below - image - 0.08) / down, image / across, image / down, pixels)
      figure.text(middle, (below - image - 0.16) / down, label, ha='center', va='top', fontsize=7.8)
    return png()


def _draw_bar(axes: Any, place: int, step: Mapping[str, Any], highest: float) -> None:
  """Draws the bar of one setting, in the colour of what was recovered."""
  value, colour = step['psnr'] or 0.0, _RECOVERED if step['recovered'] else _PROTECTED
  axes.bar(place, value, width=0.6, color=colour, alpha=0.82, linewidth=0)
  top = value
  if step['psnr_low'] is not None:
    top = step['psnr_high']
    axes.plot([place, place], [step['psnr_low'], top], color=figures.INK, linewidth=1.1)
  level = step['control_psnr'] if math.isfinite(step['control_psnr'] or math.nan) else 0.0
  if level:
    axes.plot([place - 0.42, place + 0.42], [level, level], color=figures.INK, linewidth=1.1, dashes=(2, 1.4))
  top = max(top, level)
  axes.text(place, top + 0.02 * highest, _of(step['recovered'], step['n']), ha='center', va='bottom', fontsize=8)


def _draw_example(figure: Any, middle: float, low: float, wide: float, tall: float, pixels: np.ndarray) -> None:
  axes = figure.add_axes((middle - wide / 2, low, wide, tall))
  axes.imshow(shown.pixels_of(pixels), cmap='gray', vmin=0, vmax=255, interpolation='nearest')
  axes.set(xticks=[], yticks=[])
  for spine in axes.spines.values():
    spine.set(color='#9a9fa6', linewidth=0.6)


def render_sensitivity(found: Sensitivity, links: Mapping[str, str] | None = None) -> str:
  """Returns the page of a sensitivity as HTML that loads nothing; the same result gives the same text.

  Args:
    found: a `Sensitivity`.
    links: {name of a setting: relative link to the page of its audit}, or None.
  """
  _check(found)
  links = links or {}
  png = waterfall(found)
  return page.environment().get_template('sensitivity.html.j2').render(
    config=found.config,
    findings=sensitivity_findings(found),
    cautions=cautions(found),
    picture=shown.embedded(png),
    width=round(figures.width(png) * 1.12 * 96 / figures.DPI),
    alternative=_alternative(found),
    waterfall=_lines(found, links),
    judgements=[_judgement(links, one) for one in judged(found)],
    accuracy=_accuracy(found),
    linked_any=bool(links),
    margin=MARGIN,
    clear=CLEAR,
    words=_words(found),
    duration=page.duration(found.seconds),
    citations=wording.citations(found.methods),
  )  # fmt: skip


def write_sensitivity(found: Sensitivity, folder: Any) -> None:
  """Writes sensitivity.html, .png, .csv and rows.jsonl, each whole or not at all, see `render_sensitivity`."""
  _check(found)
  folder = storage.made_folder(folder)
  storage.write_atomically(folder / 'sensitivity.png', waterfall(found))
  storage.write_atomically(folder / 'sensitivity.csv', sensitivity_csv(found))
  storage.write_atomically(folder / 'rows.jsonl', storage.json_lines(found.rows))
  links = page.pages_of(found.audits, folder)
  storage.write_atomically(folder / 'sensitivity.html', render_sensitivity(found, links))


def _check(found: Any) -> Sensitivity:
  return errors.check_instance('the result', found, Sensitivity, 'what gradleak.sensitivity returns')


def _waterfall(found: Sensitivity) -> list[tuple[str, str]]:
  """Returns (label, name of the setting) of each step down."""
  used = [one.name for one in found.assumptions if not one.skipped]
  last = len(used) - 1
  labels = [LABORATORY, *(_WITHOUT + name + (' = production' if i == last else '') for i, name in enumerate(used))]
  return list(zip(labels, found.waterfall, strict=True))


def _lines(found: Sensitivity, links: Mapping[str, str]) -> list[dict[str, Any]]:
  """Returns the cells of the waterfall's table."""
  named = {step['setting']: step for step in steps(found)}
  used = [one for one in found.assumptions if not one.skipped]
  meaning = ['All assumptions of published attacks hold.', *(one.production for one in used)]
  return [
    {
      **named[name],
      'label': label,
      'meaning': told,
      'example': shown.data_uri(found.examples[name]),
      'link': links.get(name),
    }
    for (label, name), told in zip(_waterfall(found), meaning, strict=True)
  ]


def _judgement(links: Mapping[str, str], one: Judgement) -> dict[str, Any]:
  """Returns the cells of one assumption's line."""
  return {
    'name': one.assumption.name,
    'laboratory': one.assumption.laboratory,
    'production': one.assumption.production,
    'skipped': one.assumption.skipped,
    'needs': list(one.assumption.needs),
    'verdict': one.verdict,
    'cells': [_cell(links, effect, at) for effect, at in ((one.alone, 1), (one.restored, 0))],
  }


def _cell(links: Mapping[str, str], effect: Effect | None, at: int) -> dict[str, Any] | None:
  """Returns what the table says of an effect; `at` is the side whose setting is not shown elsewhere."""
  if effect is None:
    return None
  first, last = (effect.recovered[0], effect.recovered[1]) if at else (effect.recovered[1], effect.recovered[0])
  sign = -1 if at else 1
  return {
    'from': _of(first, effect.n),
    'to': _of(last, effect.n),
    'psnr': _signed(sign * effect.psnr),
    'interval': _interval(effect, sign),
    'link': links.get(effect.production if at else effect.laboratory),
    'shown': effect.shown,
  }


def _change(effect: Effect | None) -> str:
  """Returns an effect for the terminal: recovered in the laboratory against production, and the difference in PSNR."""
  if effect is None:
    return '–'
  bounds = _interval(effect, 1)
  return f'{effect.recovered[0]} against {effect.recovered[1]}, {_signed(effect.psnr)} dB' + (bounds and f' ({bounds})')


def _interval(effect: Effect, sign: int) -> str:
  """Returns 'low to high' of the difference of the PSNR; empty where there is none."""
  if not math.isfinite(effect.low):
    return ''
  low, high = sorted((sign * effect.low, sign * effect.high))
  return f'{_signed(low)} to {_signed(high)}'


def _signed(value: float) -> str:
  return '–' if math.isnan(value) else f'{round(value, 1) + 0.0:+.1f}'.replace('-', '−')


def _of(recovered: int, n: int) -> str:
  return f'{recovered} of {n}'


def _plus_minus(step: Mapping[str, Any]) -> str:
  if step['psnr_low'] is None:
    return number(step['psnr'])
  return f'{number(step["psnr"])} ± {number(step["psnr_high"] - step["psnr"])}'


def _accuracy(found: Sensitivity) -> list[str]:
  """Returns a sentence per training: what the model classifies before and after."""
  return [
    f'Initialised {_origin(origin)}, the model classifies {_percent(one["untrained"])} of the held-out public images '
    f'before and {_percent(one["trained"])} after {found.config["training_rounds"]} rounds; guessing the most frequent '
    f'class, {_percent(one["guessing"])}.'
    for origin, one in found.accuracy.items()
  ]


def _origin(origin: str) -> str:
  return 'as its own' if origin == 'own' else f'from {origin}'


def _percent(fraction: float) -> str:
  return f'{100 * fraction:.0f} %'


def _alternative(found: Sensitivity) -> str:
  """Returns the picture in words."""
  named = {step['setting']: step for step in steps(found)}
  bars = [
    f'{label.replace(_WITHOUT, "without ")}: {number(named[name]["psnr"])} dB, '
    f'{_of(named[name]["recovered"], named[name]["n"])} recovered'
    for label, name in _waterfall(found)
  ]
  return f'Mean PSNR of the reconstructions as assumptions are dropped one after the other. {"; ".join(bars)}.'
