"""A table as people read it: our figures beside the paper's, in Markdown, on the terminal and as CSV."""

import csv
import io
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
  'is wider than that; or of a single trial; or an accuracy is of fewer than three seeds and within 5 points. “No '
  'conclusion”: the undefended attack of the column fails here, or its model is at chance. Else “differs”.'
)
UNCOUNTED = (
  'Two kinds do not count. “By construction”: the figure follows from the declaration. “Repeated”: the same run and '
  'the same figure of the paper stand in an earlier table.'
)
EXPLAINED = 'What the verdicts mean is on the page [Results](index.md).'
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
  level: int = 1,
  known: judgement.Judged | None = None,
) -> str:
  """Returns table.md: our figures and the paper's, what was changed, and where they differ.

  Args:
    experiment, scale, seed: what was run.
    outcomes: one `Outcome` per cell, in their order.
    level: of the first heading.
    known: the table beside all others, which tells what is repeated; None judges it alone.
  """
  hashes = '#' * level
  alone = judgement.Judged(experiment, outcomes, judged(experiment, scale, outcomes), scale)
  statuses = (known or alone).statuses
  parts = [f'{hashes} {experiment.table}', *([experiment.paper] if level == 1 else [])]  # else the page names it
  parts += said(experiment, scale, outcomes)
  order = ordered((known or alone).order) if compares(scale) else ''
  parts += [order] if order else []
  parts.append(experiment.metrics)
  parts += dict.fromkeys(run.intervals for run in experiment.runs.values())
  below = notes(experiment, scale, seed, outcomes)
  for column, lines in sections(experiment, outcomes, statuses).items():
    parts += [f'{hashes}# {column}\n\n{grid(lines[0], lines[1:], len(lines[0]))}', *below.get(column, [])]
  parts += below.get('', [])
  listed = settings(experiment, scale, seed, EXPLAINED if known else VERDICT)
  parts.append(f'{hashes}# Settings\n\n' + '\n'.join(f'- {text}' for text in listed))
  return '\n\n'.join(parts) + '\n'


def grid(head: Sequence[str], lines: Iterable[Sequence[str]], texts: int = 1) -> str:
  """Returns a table in Markdown; columns but the first `texts` are aligned to the right."""
  rule = ['---'] * texts + ['---:'] * (len(head) - texts)
  return '\n'.join('| ' + ' | '.join(line) + ' |' for line in (head, rule, *lines))


def said(experiment: Experiment, scale: str, outcomes: Sequence[Outcome]) -> list[str]:
  """Returns the paper's claim, and whether it holds here; a scale with other data tells nothing of it."""
  return claims.paragraphs(experiment, outcomes if compares(scale) else None, scale)


def ordered(found: judgement.Order) -> str:
  """Returns the sentences on the order of a table's methods; '' where it has no two that are compared."""

  def counted(pairs: dict[str, int]) -> str:
    return ', '.join(f'{number} {kind}' for kind, number in pairs.items())

  parts = [f'Pairs of methods, by order: {counted(found.pairs)}.'] if any(found.pairs.values()) else []
  if found.taus:
    parts.append(f'Kendall’s τ-b is {number(found.tau(), 2)}, the median of {len(found.taus)} columns.')
  if any(found.undefended.values()):
    parts.append(f'Pairs of a method and no defense: {counted(found.undefended)}.')
  return ' '.join(parts)


def settings(experiment: Experiment, scale: str, seed: int, verdicts: str = VERDICT) -> list[str]:
  """Returns sentences on how this was run: the choices, the scale, and what it changed in each run."""
  by_change = {}
  for name, run in experiment.runs.items():
    by_change.setdefault('; '.join(run.changes(scale)) or 'nothing is scaled down', []).append(name)
  about = [verdicts if compares(scale) else UNCOMPARED] if prints(experiment) else []
  lines = [f'Scale {scale}, seed {seed}.', *about, *experiment.choices]
  return lines + [f'{", ".join(names)}: {change}.' for change, names in by_change.items()]


def terminal(experiment: Experiment, scale: str, seed: int, outcomes: Sequence[Outcome]) -> str:
  """Returns the table for the terminal, aligned, each column with its notes."""
  parts, below = said(experiment, scale, outcomes), notes(experiment, scale, seed, outcomes)
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
