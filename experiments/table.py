"""A table as people read it: our figures beside the paper's, in Markdown, on the terminal and as CSV."""

import csv
import io
import math
import re
from collections.abc import Iterable, Sequence

from experiments import claims, judgement
from experiments.comparison import HEADINGS, Outcome, ours_text, paper_text, remarks
from experiments.experiment import Experiment
from gradleak.report.formatting import aligned, number

VERDICT = (
  'Verdicts are computed from the rows. “Agrees”: our 95 % interval and the paper’s meet, to its rounding, or to 5 % '
  'where neither has one. The paper’s ± is a standard deviation SD, its interval the mean ± 1.96 SD/√n. Where n is '
  'not known, its figure stands without an interval. “Both fail”: neither shows anything of the image. “Same order of '
  'magnitude”: within 10 dB of PSNR or a factor of ten; of seconds, nothing closer is said. “Undecided”: our interval '
  'is wider than that; or of fewer than three trials; or an accuracy is within some 10 points, of as few seeds or of '
  'seeds that leave as much open. “No conclusion”: the undefended attack of the column fails here, or its model is at '
  'chance. Else “differs”.'
)
UNCOUNTED = (
  'Two kinds do not count. “By construction”: the figure follows from the declaration. “Repeated”: the same run and '
  'the same figure of the paper stand in an earlier table.'
)
MOST_COLUMNS = 8  # of a table in Markdown
MOST_LINES = 40  # of the tables of a page that are not folded away
MOST_TIMES = 1000  # so many times the trials are said to be no way
UNCOMPARED = 'No verdicts: this scale has other data and another network than the paper.'


def sections(
  experiment: Experiment, outcomes: Sequence[Outcome], statuses: Sequence[str] = ()
) -> dict[str, list[list[str]]]:
  """Returns the table as {column: [heading line, line, …]}, each line a list of texts.

  Args:
    experiment: the `Experiment`.
    outcomes: one `Outcome` per cell, in their order.
    statuses: of each cell, see `judgement`: one stands beside each figure that the paper prints. Empty: none does.
  """
  places = [(cell.column, cell.row, cell.metric) for cell in experiment.cells]
  found = dict(zip(places, outcomes, strict=True))
  shown = ['' if status == judgement.NOT_SHOWN else status for status in statuses]
  said = dict(zip(places, shown, strict=True)) if statuses else {}
  cells = dict(zip(places, experiment.cells, strict=True))
  tables = {}
  for column in dict.fromkeys(cell.column for cell in experiment.cells):
    inside = [cell for cell in experiment.cells if cell.column == column]
    metrics = list(dict.fromkeys(cell.metric for cell in inside))
    compared = {cell.metric for cell in inside if statuses and cell.paper is not None}
    beside = ['paper'] if prints(experiment) else []
    heads = [[HEADINGS[metric][0], *beside, *(['verdict'] if metric in compared else [])] for metric in metrics]
    lines = [['', *(text for head in heads for text in head), experiment.runs[inside[0].run].remarks]]
    for row in dict.fromkeys(cell.row for cell in inside):
      line, first = [row], None
      for metric, head in zip(metrics, heads, strict=True):
        cell = cells.get((column, row, metric))
        place = column, row, metric
        one = cell and found[place]
        first = first or one
        texts = [''] * 3 if cell is None else [ours_text(metric, one), paper_text(cell), said.get(place, '')]
        line += texts[: len(head)]
      lines.append([*line, first.remark])
    # An empty column is left out.
    tables[column] = lines if any(line[-1] for line in lines[1:]) else [line[:-1] for line in lines]
  return tables


def prints(experiment: Experiment) -> bool:
  """Returns whether the paper prints any figure of the table."""
  return any(cell.paper is not None for cell in experiment.cells)


def compares(scale: str) -> bool:
  """Returns whether figures at a scale can be set against the paper's: 'smoke' has other data and another network."""
  return scale != 'smoke'


def notes(experiment: Experiment, scale: str, seed: int, outcomes: Sequence[Outcome]) -> dict[str, list[str]]:
  """Returns column, or '' for all, -> the notes that stand below it."""
  weights = any(getattr(run, 'weights', '') for run in experiment.runs.values())
  return remarks(experiment.notes, experiment.cells, outcomes, scale, seed, weights)


def judged(experiment: Experiment, scale: str, outcomes: Sequence[Outcome]) -> list[str]:
  """Returns the status of each cell, as far as its table tells; none where the scale does not compare."""
  return judgement.statuses(experiment, outcomes, scale) if compares(scale) else []


def markdown(
  experiment: Experiment,
  scale: str,
  seed: int,
  outcomes: Sequence[Outcome],
  known: judgement.Judged | None = None,
  pictures: Sequence[str] = (),
  more: Sequence[str] = (),
) -> str:
  """Returns a table as a page: what the paper claims and what we found, a picture, the figures, and folded the rest.

  Args:
    experiment, scale, seed: what was run.
    outcomes: one `Outcome` per cell, in their order.
    known: the table beside all others, which tells what is repeated; None judges it alone.
    pictures: paths of pictures; the first stands above the figures.
    more: paragraphs below the figures' notes.
  """
  alone = judgement.Judged(experiment, outcomes, judged(experiment, scale, outcomes), scale)
  statuses = (known or alone).statuses
  parts = [f'# {experiment.table}', *said(experiment, scale, outcomes)]
  parts.append(ordered((known or alone).order) if compares(scale) else '')
  shown = [f'![{experiment.table}: picture {n}]({path})' for n, path in enumerate(pictures, 1)]
  parts += [*shown[:1], '## Figures', experiment.metrics]
  parts += dict.fromkeys(run.intervals for run in experiment.runs.values())
  below = notes(experiment, scale, seed, outcomes)
  columns = _grids(experiment, outcomes, statuses)
  long = sum(grids[0].count('\n') for grids in columns.values()) > MOST_LINES
  for index, (column, grids) in enumerate(columns.items()):
    found = [*grids, *below.get(column, [])]
    parts += [folded(column, found)] if long and index else [f'### {column}', *found]
  parts += [*below.get('', []), *more]
  parts.append(folded('All pictures, in full', shown) if shown else '')
  parts.append(folded('Settings', ['\n'.join(f'- {text}' for text in settings(experiment, scale, seed))]))
  parts.append(folded('Source', [experiment.paper]))
  return '\n\n'.join(part for part in parts if part) + '\n'


def folded(title: str, parts: Iterable[str]) -> str:
  """Returns Markdown that is folded away below its title."""
  return '\n\n'.join([f'<details><summary>{title}</summary>', *parts, '</details>'])


def _grids(experiment: Experiment, outcomes: Sequence[Outcome], statuses: Sequence[str]) -> dict[str, list[str]]:
  """Returns column -> its tables, each of at most `MOST_COLUMNS`; what has no figure of ours is only named below."""
  grids = {}
  remarks = {run.remarks for run in experiment.runs.values()}
  for column, (head, *lines) in sections(experiment, outcomes, statuses).items():
    last = [len(head) - 1] if head[-1] in remarks else []
    groups: list[list[int]] = []  # the places of a metric's texts: ours, the paper's, the verdict
    for place, text in enumerate(head[1 : len(head) - len(last)], 1):
      if text not in ('paper', 'verdict'):
        groups.append([place])
      elif any(line[place] not in ('', '–') for line in lines):
        groups[-1].append(place)
    missing = [group for group in groups if all(line[group[0]] in ('', 'n/a') for line in lines)]
    groups = [group for group in groups if group not in missing]
    most = (MOST_COLUMNS - 1 - len(last)) // (2 if any(len(group) > 1 for group in groups) else 1)
    found = []
    for start in range(0, len(groups), most):
      part = groups[start : start + most]
      cells = [[line[0], *_merged(line, part), *(line[place] for place in last)] for line in (head, *lines)]
      found.append(grid(cells[0], cells[1:], len(cells[0])))
    if missing:
      found.append(f'Not measured here: {", ".join(head[group[0]] for group in missing)}.')
    grids[column] = found
  return grids


def _merged(line: Sequence[str], groups: Iterable[Sequence[int]]) -> list[str]:
  """Returns the texts of a line; the paper's figure and its verdict share a cell."""
  texts = []
  for ours, *rest in groups:
    texts.append(line[ours])
    if rest:
      paper, status = line[rest[0]], ''.join(line[place] for place in rest[1:])
      texts.append(paper if status in ('', 'verdict') else f'{paper} *{status}*')
  return texts


def grid(head: Sequence[str], lines: Iterable[Sequence[str]], texts: int = 1) -> str:
  """Returns a table in Markdown; columns but the first `texts` are aligned to the right."""
  rule = ['---'] * texts + ['---:'] * (len(head) - texts)
  return '\n'.join('| ' + ' | '.join(line) + ' |' for line in (head, rule, *lines))


def said(experiment: Experiment, scale: str, outcomes: Sequence[Outcome]) -> list[str]:
  """Returns the paper's claim beside what is found here; a scale with other data tells nothing of it."""
  found = claims.pair(experiment, outcomes if compares(scale) else None, scale)
  shown = [re.sub(r'^([^.]+)', r'**\1**', what) if who == 'Here' else what for who, what in found.items()]
  return [grid(list(found), [shown], 2)] if found else [experiment.shows]


def ordered(found: judgement.Order) -> str:
  """Returns the sentences on the order of a table's methods; '' where it has no two that are compared."""

  def counted(pairs: dict[str, int]) -> str:
    return ', '.join(f'{number} {kind}' for kind, number in pairs.items())

  parts = [f'Pairs of methods, by order: {counted(found.pairs)}.'] if any(found.pairs.values()) else []
  if found.unsettled:
    parts.append(f'Not so under another reading of the paper: {found.unsettled} of the opposite ones.')
  if found.unordered:
    parts.append(f'Left out, as the paper’s figures have no order either: {found.unordered}.')
  if found.taus:
    plural = 's' * (len(found.taus) != 1)
    parts.append(f'Kendall’s τ-b is {number(found.tau(), 2)}, the median of {len(found.taus)} column{plural}.')
  if any(found.undefended.values()):
    parts.append(f'Pairs of a method and no defense: {counted(found.undefended)}.')
  times = found.times() or 1.0
  if times > MOST_TIMES:
    parts.append(f'Not even {MOST_TIMES:,} times the trials would bring half of the pairs of methods beyond noise.')
  elif times > 1:
    parts.append(
      f'At most {math.ceil(times)} times the trials would bring half of the pairs of methods beyond noise, if their '
      'differences stay as they are.'
    )
  return ' '.join(parts)


def settings(experiment: Experiment, scale: str, seed: int) -> list[str]:
  """Returns sentences on how this was run: the choices, the scale, and what it changed in each run."""
  by_change = {}
  for name, run in experiment.runs.items():
    by_change.setdefault('; '.join(run.changes(scale)) or 'nothing is scaled down', []).append(name)
  about = [VERDICT if compares(scale) else UNCOMPARED] if prints(experiment) else []
  lines = [f'Scale {scale}, seed {seed}.', *about, *experiment.choices]
  return lines + [f'{", ".join(names)}: {change}.' for change, names in by_change.items()]


def terminal(experiment: Experiment, scale: str, seed: int, outcomes: Sequence[Outcome]) -> str:
  """Returns the table for the terminal, aligned, each column with its notes."""
  parts = claims.paragraphs(experiment, outcomes if compares(scale) else None, scale)
  below = notes(experiment, scale, seed, outcomes)
  for column, lines in sections(experiment, outcomes, judged(experiment, scale, outcomes)).items():
    parts += ['\n'.join([column, *aligned(lines)]), *below.get(column, [])]
  return '\n\n'.join([*parts, *below.get('', [])])


def table_csv(experiment: Experiment, scale: str, outcomes: Sequence[Outcome]) -> str:
  """Returns table.csv, one line per cell; a missing value is empty, several of the paper's are joined by ';'."""
  text = io.StringIO()
  names = ('mean', 'low', 'high', 'n', 'recovered', 'diverged', 'remark')
  writer = csv.writer(text)
  head = ('experiment', 'scale', 'column', 'row', 'metric', 'run', 'defense', 'adaptive')
  writer.writerow([*head, *names, 'paper', 'paper_spread', 'verdict'])
  statuses = judged(experiment, scale, outcomes) or [''] * len(outcomes)
  for cell, found, status in zip(experiment.cells, outcomes, statuses, strict=True):
    defense = experiment.runs[cell.run].scaled(scale).texts()[cell.defense]
    paper = ';'.join(map(str, cell.paper)) if isinstance(cell.paper, tuple) else cell.paper
    writer.writerow(
      [experiment.name, scale, cell.column, cell.row, cell.metric, cell.run, defense, cell.adaptive]
      + [getattr(found, name) for name in names]
      + [paper, cell.spread, status]
    )
  return text.getvalue()
