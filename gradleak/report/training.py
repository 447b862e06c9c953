"""One self-contained HTML page of a federated training: what its defenses hide, and what they cost."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gradleak.core import errors, storage
from gradleak.report import figures, page, training_findings, wording
from gradleak.report.figures import SOFT
from gradleak.report.formatting import listed
from gradleak.report.frontier import (
  PERFECT,
  Entry,
  beside,
  entries,
  epsilon,
  frontier,
  frontier_csv,
  kib,
  milliseconds,
  percent,
  protects,
  undefended,
  worst_case_of,
)
from gradleak.report.partition import partition_picture
from gradleak.report.training_findings import Worst, measured, per_cent
from gradleak.studies.frontier import Frontier, Trained
from gradleak.summary import cases, shown


def write_training(
  folder: Any,
  trained: Mapping[str, Trained],
  *,
  config: Mapping[str, Any],
  audit_rows: Sequence[cases.Row] = (),
  leakage: Sequence[Mapping[str, Any]] = (),
  partition: bytes | None = None,
  audits: Mapping[str, str] | None = None,
  methods: Mapping[str, Any] | None = None,
) -> None:
  """Writes training.html, frontier.csv, and where there is something to draw frontier.png, curves.png, leakage.png.

  Args:
    folder: a path, made if it does not exist.
    trained: defense -> `gradleak.studies.frontier.Trained`, 'none' for training without any.
    config: the settings, named as the flags of launch/train.py; missing ones are left out of the page.
    audit_rows: of an audit of uploads under the same defenses, or none.
    leakage: the leakage along the training, or none: dicts of 'defense', 'round' (0 before the first) and what
      `frontier.worst_case_of` returns for the uploads at that round.
    partition: PNG of `partition.partition_picture`, or None.
    audits: text -> the relative link to the page of an audit.
    methods: facts about the methods, see `AuditResult.methods`.
  """
  errors.check_json('config', config)
  found = entries(trained, audit_rows, config.get('num_classes'))
  folder = storage.made_folder(folder)
  pictures = {'frontier': frontier(found), 'curves': curves(trained), 'leakage': along(trained, leakage)}
  for name, png in pictures.items():
    if png is not None:
      storage.write_atomically(folder / f'{name}.png', png)
  storage.write_atomically(folder / 'frontier.csv', frontier_csv(found))
  worst = {entry['defense']: entry for entry in cases.worst_case(audit_rows)}
  size = next((row.get('batch_size') or 1 for row in audit_rows), 1)
  stopped = [defense for defense, one in trained.items() if one.stopped]
  opening = training_findings.opening(found, worst, config=config, stopped=stopped, leakage=leakage, size=size)
  source = (
    page.environment()
    .get_template('training.html.j2')
    .render(
      config=config,
      findings=opening,
      cautions=training_findings.cautions(found, worst, config=config, trained=trained),
      pictures={name: _shown(png) for name, png in {**pictures, 'partition': partition}.items() if png is not None},
      lines=_lines(found, worst),
      small=_small_print(found, worst),
      attacked=bool(worst),
      audits=audits or {},
      settings=training_findings.settings(config),
      citations=wording.citations(methods or {}),
    )
  )
  storage.write_atomically(folder / 'training.html', source)


def write_frontier(found: Frontier, folder: Any) -> None:
  """Writes the page and pictures of a `Frontier` into a folder, see `write_training`."""
  leaks = [
    {'defense': leak.defense, 'round': leak.round, **worst_case_of(leak.rows)[leak.defense]} for leak in found.leakage
  ]
  names = found.config.get('class_names') or [str(label) for label in range(found.config['num_classes'])]
  write_training(
    folder,
    found.trained,
    config=found.config,
    audit_rows=found.rows,
    leakage=leaks,
    partition=partition_picture(found.partition, found.labels, names),
    audits=page.pages_of(found.audits, storage.made_folder(folder)),
    methods=found.methods,
  )


def curves(trained: Mapping[str, Trained]) -> bytes | None:
  """Returns a PNG: test accuracy against rounds, a line per defense; None where none was measured."""
  if not any(measured(one) for one in trained.values()):
    return None
  with figures.figure(7.2, 3.5 + _legend_height(trained), layout='constrained') as (figure, png):
    axes = figure.subplots()
    _draw_accuracy(axes, trained)
    figure.legend(loc='outside lower left', frameon=False, ncols=_across(trained), handlelength=3)
    return png()


def along(trained: Mapping[str, Trained], leakage: Iterable[Mapping[str, Any]]) -> bytes | None:
  """Returns a PNG: PSNR of the strongest attacker (dB) beside accuracy, against rounds; None without leakage.

  Filled points are uploads from which images are recovered.
  """
  known = [entry for entry in leakage if entry['psnr'] is not None]
  if not known:
    return None
  with figures.figure(8.2, 3.3 + _legend_height(trained), layout='constrained') as (figure, png):
    left, right = figure.subplots(1, 2, sharex=True)
    for defense in trained:
      of_defense = sorted((entry for entry in known if entry['defense'] == defense), key=lambda entry: entry['round'])
      colour, dashes = figures.line_style(defense, trained)
      x, y = [entry['round'] for entry in of_defense], [min(entry['psnr'], PERFECT) for entry in of_defense]
      left.plot(x, y, color=colour, linestyle=dashes, linewidth=1.3, zorder=1, label=defense)
      faces = [colour if entry['recovered'] else 'white' for entry in of_defense]
      left.scatter(x, y, s=26, facecolors=faces, edgecolors=colour, linewidths=1.2, zorder=2)
    _finish(left, 'PSNR of the strongest attacker, in dB')
    left.set_title('filled: images recovered · hollow: none', fontsize=8, color=SOFT)
    _draw_accuracy(right, trained)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc='outside lower left', frameon=False, ncols=_across(trained), handlelength=3)
    return png()


def _lines(found: Sequence[Entry], worst: Worst) -> list[dict[str, Any]]:
  """Returns the cells of the table, a dict per defense."""
  base = undefended(found)

  def line(one: Entry) -> dict[str, Any]:
    before = None if base is None or base is one else base['bytes_up']
    sent = one['bytes_up']
    return {
      **one,
      'accuracy': percent(one['accuracy']),
      'beside': beside(one, base),
      'up': kib(sent),
      'fraction_up': per_cent(sent / before) if before and sent is not None else '',
      'down': kib(one['bytes_down']),
      'milliseconds': milliseconds(one['seconds_defense']),
      'epsilon': epsilon(one['epsilon']),
      'protects': protects(one),
      'worst': worst.get(one['defense']),
    }

  return [line(one) for one in found]


def _small_print(found: Sequence[Entry], worst: Worst) -> str:
  """Returns what stands in small print in the table, in words; empty for nothing."""
  base = undefended(found)
  lost = 'points of accuracy, with their 95 % interval by the test samples, relative to training without a defense'
  sent = 'the fraction of the bytes that are sent without a defense'
  interval = 'the exact 95 % interval of the fraction recovered'
  several = base is not None and len(found) > 1
  known = ((lost, several and base and not base['at_chance']), (sent, several), (interval, worst))
  return listed([words for words, there in known if there] or [''])


def _draw_accuracy(axes: Any, trained: Mapping[str, Trained]) -> None:
  """Draws test accuracy against rounds, a line per defense."""
  for defense, one in trained.items():
    known = measured(one)
    colour, dashes = figures.line_style(defense, trained)
    if known:
      marker = 'o' if len(known) == 1 else None
      axes.plot(*zip(*known, strict=True), color=colour, linestyle=dashes, linewidth=1.4, marker=marker, label=defense)
      if one.stopped:
        axes.plot(*known[-1], marker='x', color=colour, markersize=6)
  if any(one.stopped for one in trained.values()):
    axes.set_title('×: the ε budget was spent', fontsize=8, color=SOFT)
  _finish(axes, 'test accuracy, in %')


def _finish(axes: Any, label: str) -> None:
  from matplotlib.ticker import MaxNLocator

  axes.set_xlabel('round')
  axes.set_ylabel(label)
  axes.xaxis.set_major_locator(MaxNLocator(integer=True))
  axes.grid(color='#0a0b0c', alpha=0.1, linewidth=0.6)
  axes.set_axisbelow(True)
  axes.spines[['top', 'right']].set_visible(False)


def _across(trained: Mapping[str, Trained]) -> int:
  """Returns the number of columns of a legend."""
  longest = max(map(len, trained))
  return 3 if longest <= 28 else 2 if longest <= 46 else 1


def _legend_height(trained: Mapping[str, Trained]) -> float:
  return 0.18 * -(-len(trained) // _across(trained))


def _shown(png: bytes) -> dict[str, Any]:
  """Returns a PNG as a data URI, and its width on the page in CSS pixels."""
  return {'uri': shown.embedded(png), 'width': round(figures.width(png) * 1.12 * 96 / figures.DPI)}
