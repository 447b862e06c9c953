"""The page, the pictures and the table of a captured update: what was measured, with no truth to judge it by."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from gradleak.core import errors, storage
from gradleak.report import figures, pictures, wording
from gradleak.report.formatting import aligned, listed, number, significant, wrap
from gradleak.report.page import environment
from gradleak.studies.captured import Captured, Inversion
from gradleak.summary import shown

NO_TRUTH = (
  'The private images are not known here, so nothing on this page says that a picture is one of them. What is measured '
  'is how closely the update that the pictures would cause matches the captured one, beside the same attack on noise.'
)


def write_captured(result: Captured, folder: Any) -> None:
  """Writes report.html and reconstructions.png, each whole or not at all.

  Args:
    result: a `Captured`.
    folder: a path, made if it does not exist.
  """
  _check(result)
  folder = storage.made_folder(folder)
  storage.write_atomically(folder / 'reconstructions.png', captured_grid(result))
  storage.write_atomically(folder / 'report.html', render_captured(result))


def render_captured(result: Captured) -> str:
  """Returns the page of a captured update, which loads nothing; the same result gives the same text."""
  _check(result)
  made = environment()
  made.globals['bounds'] = bounds
  size = result.config['num_samples']
  return made.get_template('captured.html.j2').render(
    config=result.config,
    shape=wording.shape(result.config),
    findings=[finding(one, result.config) for one in result.inversions],
    no_truth=NO_TRUTH,
    warnings=result.warnings,
    attackers=[_attacker(one, size) for one in result.inversions],
    side=128 if size <= 4 else 92,
    granted=_together(result.inversions),
    controls=result.config['controls'],
    versions=result.versions,
    citations=result.citations,
  )


def _check(result: Any) -> Captured:
  """Returns `result`; raises `UsageError` for anything but a `Captured`."""
  return errors.check_instance('the result', result, Captured, 'a Captured: what gradleak.attack returns')


def finding(one: Inversion, config: dict[str, Any]) -> str:
  """Returns what was measured of one attacker, a sentence that claims no more; names stand in backticks."""
  who = f'`{one.attack}`' + (f' that knows the defense (`{one.counter}`)' if one.counter else '')
  if one.diverged:
    return f'{who} diverged: it has no picture.'
  if not _found(one):
    return f'{who} found nothing.'
  if math.isnan(one.mismatch):
    beside = (
      '' if math.isnan(one.likeness) else f' What it makes of noise correlates with them by {number(one.likeness, 2)}.'
    )
    return f'{who} returns pictures whose labels are not known: no update can be simulated from them.{beside}'
  found = (
    f'The update that the pictures of {who} would cause differs from the captured one by {significant(one.mismatch)} '
    '(1 − cosine)'
  )
  if one.closer is None:
    return f'{found}; no control was run.'
  runs = len(one.control_mismatch)
  how = 'closer than all of' if one.closer == runs else f'closer than {one.closer} of'
  ends = bounds(one.control_mismatch)
  return f'{found}, {how} {runs} runs on noise, which ' + ('find nothing.' if ends == '–' else f'end at {ends}.')


def _found(one: Inversion) -> bool:
  """Returns whether there is a picture: closed forms return black ones where they find nothing."""
  return one.labels_mode != 'unused' or bool(np.any(one.images))


def bounds(values: np.ndarray) -> str:
  """Returns 'least – largest' of values, the value where both read alike, '–' where there is none."""
  known = np.asarray(values)[~np.isnan(values)]
  if not len(known):
    return '–'
  low, high = significant(float(known.min())), significant(float(known.max()))
  return low if low == high else f'{low} – {high}'


def captured_table(result: Captured) -> str:
  """Returns the figures of all attackers as a text for a terminal, the warnings below."""
  _check(result)
  head = ['attack', 'knows the defense', 'objective', 'distance', 'mismatch', 'on noise', 'closer than', 'like control']
  lines = [
    [
      one.attack,
      one.counter or 'no',
      significant(one.objective, 3),
      significant(one.distance, 3),
      'diverged' if one.diverged else significant(one.mismatch, 3),
      bounds(one.control_mismatch),
      '–' if one.closer is None else f'{one.closer} of {len(one.control_mismatch)}',
      number(one.likeness, 2),
    ]
    for one in result.inversions
  ]
  return '\n'.join([*aligned([head, *lines]), *(f'\nnote: {warning}' for warning in result.warnings)])


def captured_grid(result: Captured, columns: int = pictures.MAX_COLUMNS) -> bytes:
  """Returns a PNG: a row of pictures per attacker, and below it a control run of the same attack on noise."""
  errors.check_number('columns', columns, low=1, integer=True)
  size = min(_check(result).config['num_samples'], columns)
  rows: list[tuple[list[str], np.ndarray]] = []
  for one in result.inversions:
    if not _found(one):
      rows.append(([*wrap(one.attack, 34), 'found nothing'], one.images[:0]))
      continue
    caption = f'mismatch {significant(one.mismatch)}'
    rows.append(([*wrap(one.attack, 34), *([f'aware: {one.counter}'] if one.counter else []), caption], one.images))
    if len(one.control_images):
      rows.append((['the same on noise'], one.control_images[0]))
  height, width = result.config['image_shape'][:2]
  cell, margin = 0.95, 0.12  # inches, as are all lengths
  tall = max(cell * height / width, 0.6)
  start = 3 * margin + 0.075 * max(len(line) for label, _ in rows for line in label)
  across, down = max(start + (cell + margin) * size, 3.7), margin + (tall + margin) * len(rows)
  with figures.figure(across, down) as (figure, png):
    axes = figure.add_axes((0, 0, 1, 1))
    for r, (label, images) in enumerate(rows):
      top = margin + r * (tall + margin)
      for i, line in enumerate(label):
        axes.text(margin, top + tall / 2 + 0.17 * (i - (len(label) - 1) / 2), line, va='center', color=figures.INK)
      for c, image in enumerate(images[:size]):
        left = start + c * (cell + margin)
        extent = (left, left + cell, top + tall, top)
        pixels = shown.pixels_of(image)
        axes.imshow(pixels, cmap='gray', vmin=0, vmax=255, interpolation='nearest', aspect='auto', extent=extent)
    axes.set(xlim=(0, across), ylim=(down, 0))
    axes.set_axis_off()
    return png()


def _attacker(one: Inversion, size: int) -> dict[str, Any]:
  """Returns what the template shows of one attacker: its figures, its pictures and those of its controls."""
  shown = min(size, pictures.MAX_COLUMNS)
  further = [image for image in one.images[size:] if np.ptp(image) > 0][: pictures.MAX_COLUMNS]  # the others are empty
  runs = list(one.control_images)
  controls = [run[0] for run in runs] if size == 1 else [image for run in runs[:1] for image in run[:shown]]
  return {
    'one': one,
    'cells': _cells(one.images[:shown], one.labels, f'Reconstruction by {one.attack}'),
    'more': _cells(further, [], f'Further candidate of {one.attack}'),
    'controls': _cells(controls, [], f'What {one.attack} makes of noise'),
    'found': _found(one),
    'closer': '–' if one.closer is None else f'{one.closer} of {len(one.control_mismatch)}',
  }


def _cells(images: Any, labels: Any, what: str) -> list[dict[str, Any]]:
  """Returns the pictures as data URIs, with labels where there are any."""
  known = [int(label) for label in labels]
  return [
    {
      'uri': shown.data_uri(image),
      'alt': f'{what}, picture {i + 1}.',
      'label': known[i] if i < len(known) and known[i] >= 0 else None,
    }
    for i, image in enumerate(images)
  ]


def _together(inversions: Sequence[Inversion]) -> list[tuple[str, list[str]]]:
  """Returns [(attackers in words, what they are granted)], those with the same grants together."""
  together: dict[tuple[str, ...], list[str]] = {}
  for one in inversions:
    name = f'`{one.attack}`' + (f' (`{one.counter}`)' if one.counter else '')
    together.setdefault(tuple(one.granted), []).append(name)
  return [(listed(names), list(granted)) for granted, names in together.items()]
