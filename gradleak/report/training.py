"""The page of a federated training: what its defenses hide, and what they cost."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gradleak.core import errors, storage
from gradleak.modalities import of_config, of_rows
from gradleak.modalities.base import Shown
from gradleak.report import blocks, figures, html, page, training_findings, wording
from gradleak.report.figures import SOFT
from gradleak.report.formatting import measures, number, of_attacker, percent, percent_range, significant
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
  protects,
  score,
  undefended,
)
from gradleak.report.html import code, link, method
from gradleak.report.partition import partition_picture
from gradleak.report.training_findings import Worst, measured, per_cent
from gradleak.report.words import about, said
from gradleak.studies.frontier import Frontier, Trained
from gradleak.summary import cases


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
      `cases.worst_case_of` returns for the uploads at that round.
    partition: PNG of `partition.partition_picture`, or None.
    audits: text -> the relative link to the page of an audit.
    methods: facts about the methods, see `AuditResult.methods`.
  """
  errors.check_json('config', config)
  with about(config):
    found = entries(trained, audit_rows, config)
    folder = storage.made_folder(folder)
    drawn = {'frontier': frontier(found), 'curves': curves(trained), 'leakage': along(trained, leakage)}
    worst = {entry['defense']: entry for entry in cases.worst_case(audit_rows)}
    size = next((row.get('batch_size') or 1 for row in audit_rows), 1)
    stopped = [defense for defense, one in trained.items() if one.stopped]
    given = {'config': config, 'trained': trained}
    opening = training_findings.opening(found, worst, **given, stopped=stopped, leakage=leakage, size=size)
    cautions = training_findings.cautions(found, worst, **given)
    model, data = config.get('model'), config.get('dataset')
    pictures = _pictures({**drawn, 'partition': partition}, found, config)
    settings = training_findings.settings(config)
    made = blocks.Page(
      'training',
      f'Federated training: {model or "model"} on {data or "data"}',
      'Federated training: what a defense hides, and what it costs',
      f'{model or "A model"} on {data or "private data"}',
      [blocks.Text(' '.join(map(str, opening)), 'meaning'), blocks.Cautions(cautions)],
      [
        *pictures[:1],
        _figures(found, worst, audits or {}, wording.published(methods or {})),
        *pictures[1:],
        blocks.Section(
          'settings', 'Settings', [*([blocks.Text(' '.join(settings))] if settings else []), page.every_setting(config)]
        ),
        _reading(config, bool(worst)),
      ],
      page.sources(wording.citations(methods or {})),
    )
    files = {f'{name}.png': png for name, png in drawn.items()}
    page.write_files(folder, {**files, 'frontier.csv': frontier_csv(found), 'training.html': html.page(made)})


def write_frontier(found: Frontier, folder: Any) -> None:
  """Writes the page and pictures of a `Frontier` into a folder, see `write_training`."""
  leaks = [
    {'defense': leak.defense, 'round': leak.round, **cases.worst_case_of(leak.rows)[leak.defense]}
    for leak in found.leakage
  ]
  most = max(found.config['num_classes'], int(found.labels.max()) + 1)
  names = found.config.get('class_names') or [str(label) for label in range(most)]
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
    drawn = _draw_accuracy(figure.subplots(), trained)
    figures.legend(figure, drawn, loc='outside lower left', ncols=_across(trained), handlelength=3)
    return png()


def along(trained: Mapping[str, Trained], leakage: Iterable[Mapping[str, Any]]) -> bytes | None:
  """Returns a PNG: the score of the strongest attacker beside accuracy, against rounds; None without leakage.

  Filled points are uploads from which images are recovered.
  """
  known = [entry for entry in leakage if score(entry) is not None]
  if not known:
    return None
  with figures.figure(8.2, 3.3 + _legend_height(trained), layout='constrained') as (figure, png):
    (left, right), drawn = figure.subplots(1, 2, sharex=True), {}
    for defense in trained:
      of_defense = sorted((entry for entry in known if entry['defense'] == defense), key=lambda entry: entry['round'])
      colour, dashes = figures.line_style(defense, trained)
      x, y = [entry['round'] for entry in of_defense], [min(score(entry), PERFECT) for entry in of_defense]
      (drawn[defense],) = left.plot(x, y, color=colour, linestyle=dashes, linewidth=1.3, zorder=1)
      faces = [colour if entry['recovered'] else 'white' for entry in of_defense]
      left.scatter(x, y, s=26, facecolors=faces, edgecolors=colour, linewidths=1.2, zorder=2)
    kind = of_rows(known)
    _finish(left, of_attacker(kind))
    left.set_title(f'filled: {kind.noun[1]} recovered · hollow: none', fontsize=8, color=SOFT)
    _draw_accuracy(right, trained)
    figures.legend(figure, drawn, loc='outside lower left', ncols=_across(trained), handlelength=3)
    return png()


def _pictures(drawn: Mapping[str, bytes | None], found: Sequence[Entry], config: Mapping[str, Any]) -> list[Any]:
  """Returns the sections of the pictures, the frontier first; None for what was not drawn."""
  titles = {
    'frontier': ('What each defense hides, against accuracy', 'Frontier'),
    'curves': ('Accuracy along the training', 'Accuracy'),
    'leakage': ('Leakage along the training', 'Leakage along training'),
    'partition': ('Samples per client and class', 'Partition'),
  }
  partition = f': partition {config["partition"]}' if config.get('partition') else ''
  facts = {'defenses': ', '.join(one['defense'] for one in found), 'partition': partition}
  sections: list[blocks.Section | None] = []
  for name, (title, short) in titles.items():
    png = drawn[name]
    notes = [blocks.Text(said(f'training.{name}'), 'note')] if name in ('frontier', 'leakage') else []
    parts = None if png is None else [*notes, blocks.Picture(png, said(f'training.{name}_alt', **facts))]
    sections.append(None if parts is None else blocks.Section(name, title, parts, short))
  return sections


def _figures(
  found: Sequence[Entry], worst: Worst, audits: Mapping[str, str], published: Mapping[str, str]
) -> blocks.Section:
  """Returns the table of what each defense costs and hides, with links to the audits."""
  columns = ['defense', ('test\naccuracy', 'accuracy'), 'test\nloss', 'rounds', 'KiB up', 'KiB\ndown']
  columns += ['seconds\na round', 'defense\nadds, ms', ('ε', 'epsilon')]
  if worst:
    columns += ['recovered', *map(_titled, measures(of_rows(found))), ('strongest attacker', 'left by')]
  base = undefended(found)
  rows = []
  for one in found:
    before = None if base is None or base is one else base['bytes_up']
    sent, paid = one['bytes_up'], beside(one, base)
    cells = [
      method(one['defense'], published.get(one['defense'])),
      blocks.Cell(percent(one['accuracy']), [paid and f'cost {paid}', one['at_chance'] and 'at chance']),
      number(one['loss'], 3),
      str(one['rounds']),
      blocks.Cell(kib(sent), [before and sent is not None and per_cent(sent / before)]),
      *(kib(one['bytes_down']), significant(one['seconds'], 2), milliseconds(one['seconds_defense'])),
      blocks.Cell(epsilon(one['epsilon']), [protects(one)]),
    ]
    rows.append(blocks.Row([*cells, *(_attacked(one, worst) if worst else [])]))
  known = _small_print(found, worst)
  small = said('training.small', known=known) if known else ''
  attacked = said('training.attacked') + ' ' if worst else ''
  links = [link(text, to) for text, to in audits.items()]
  parts = [
    blocks.Text(said('training.figures', attacked=attacked, small=small), 'note'),
    blocks.Table(columns, [blocks.Body(rows)], 'costs'),
    *([blocks.Text('The attacks in detail:'), blocks.Bullets(links)] if links else []),
  ]
  return blocks.Section('figures', 'What each defense costs', parts, 'Figures')


def _titled(shown: Shown) -> str:
  """Returns the head of a column."""
  return shown.with_unit(',\n') if shown.unit else shown.title.replace(' ', '\n', 1)


def _attacked(one: Entry, worst: Worst) -> list[blocks.Cell]:
  """Returns what was recovered under a defense."""
  entry, shown = worst.get(one['defense']), measures(of_rows([one]))
  if entry is None:
    return [*(blocks.Cell('–') for _ in ('recovered', *shown)), blocks.Cell('not attacked')]
  interval = blocks.Html(f'<span class="plain">{percent_range(entry)}</span>')
  count = blocks.Cell(f'{entry["recovered"]} of {entry["n"]}', [interval], 'spent' if entry['recovered'] else 'kept')
  return [count, *(blocks.Cell(number(one[each.column], each.digits)) for each in shown), blocks.Cell(code(one['by']))]


def _small_print(found: Sequence[Entry], worst: Worst) -> list[str]:
  """Returns what stands in small print in the table, in words."""
  base = undefended(found)
  several = base is not None and len(found) > 1
  known = {'cost': several and base and not base['at_chance'], 'bytes': several, 'interval': worst}
  return [said(f'training.small_{name}') for name, there in known.items() if there]


def _reading(config: Mapping[str, Any], attacked: bool) -> blocks.Section:
  """Returns what the words of the page mean."""
  terms = {'Test accuracy, test loss': 'accuracy', 'KiB up, KiB down': 'bytes'}
  terms |= {'Seconds a round, defense adds': 'seconds', 'ε': 'epsilon'}
  if attacked:
    measured_by = ', '.join(one.title for one in measures(of_config(config)))
    terms |= {'Recovered': 'recovered', f'Strongest attacker, {measured_by}': 'strongest', 'The frontier': 'frontier'}
  delta = f', at δ = {config["delta"]}' if config.get('delta') else ''
  loss = config.get('loss') or 'cross_entropy'
  loss = 'cross-entropy' if loss == 'cross_entropy' else said('training.client_loss', loss=loss)
  told = [(term, [said(f'training.term_{name}', delta=delta, loss=loss)]) for term, name in terms.items()]
  return blocks.Section('reading', 'How to read this page', [blocks.Terms(told)])


def _draw_accuracy(axes: Any, trained: Mapping[str, Trained]) -> dict[str, Any]:
  """Draws test accuracy against rounds; returns the line of each defense."""
  drawn = {}
  for defense, one in trained.items():
    known = measured(one)
    colour, dashes = figures.line_style(defense, trained)
    if known:
      marker = 'o' if len(known) == 1 else None
      (drawn[defense],) = axes.plot(
        *zip(*known, strict=True), color=colour, linestyle=dashes, linewidth=1.4, marker=marker
      )
      if one.stopped:
        axes.plot(*known[-1], marker='x', color=colour, markersize=6)
  if any(one.stopped for one in trained.values()):
    axes.set_title('×: the ε budget was spent', fontsize=8, color=SOFT)
  _finish(axes, 'test accuracy, in %')
  return drawn


def _finish(axes: Any, label: str) -> None:
  from matplotlib.ticker import MaxNLocator

  axes.set_xlabel('round')
  axes.set_ylabel(label)
  axes.xaxis.set_major_locator(MaxNLocator(integer=True))
  axes.grid(color='#0a0b0c', alpha=0.1, linewidth=0.6)
  axes.set_axisbelow(True)


def _across(trained: Mapping[str, Trained]) -> int:
  """Returns the number of columns of a legend."""
  longest = max(map(len, trained))
  return 3 if longest <= 28 else 2 if longest <= 46 else 1


def _legend_height(trained: Mapping[str, Trained]) -> float:
  return 0.18 * -(-len(trained) // _across(trained))
