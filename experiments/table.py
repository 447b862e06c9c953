"""A table as people read it: our figures beside the paper's, in Markdown, on the terminal and as CSV."""

import csv
import io
from collections.abc import Sequence

from experiments.comparison import HEADINGS, Outcome, ours_text, paper_text, remarks, verdict
from experiments.experiment import Experiment
from gradleak.report.formatting import aligned

VERDICT = (
  'Verdicts are computed: “agrees” where our 95 % interval and the paper’s figure, with its ±, meet (to its rounding, '
  'or 5 % where neither has an interval); “same order of magnitude” within 10 dB of PSNR or a factor of ten; '
  '“undecided” where our interval is wider than that; else “differs”.'
)
UNCOMPARED = 'No verdicts: this scale has other data and another network than the paper.'


def sections(
  experiment: Experiment, outcomes: Sequence[Outcome], *, judged: bool = False
) -> dict[str, list[list[str]]]:
  """Returns the table as {column: [heading line, line, …]}, each line a list of texts.

  Args:
    experiment: the `Experiment`.
    outcomes: one `Outcome` per cell, in their order.
    judged: whether a verdict stands beside each figure that the paper prints, too.
  """
  found = {(cell.column, cell.row, cell.metric): pair for cell, *pair in zip(experiment.cells, outcomes, strict=True)}
  cells = {(cell.column, cell.row, cell.metric): cell for cell in experiment.cells}
  tables = {}
  for column in dict.fromkeys(cell.column for cell in experiment.cells):
    inside = [cell for cell in experiment.cells if cell.column == column]
    metrics = list(dict.fromkeys(cell.metric for cell in inside))
    compared = {cell.metric for cell in inside if judged and cell.paper is not None}
    beside = ['paper'] if prints(experiment) else []
    heads = [[HEADINGS[metric][0], *beside, *(['verdict'] if metric in compared else [])] for metric in metrics]
    lines = [['', *(text for head in heads for text in head), experiment.runs[inside[0].run].remarks]]
    for row in dict.fromkeys(cell.row for cell in inside):
      line, shown = [row], None
      for metric, head in zip(metrics, heads, strict=True):
        cell = cells.get((column, row, metric))
        one = cell and found[column, row, metric][0]
        shown = shown or one
        texts = [''] * 3 if cell is None else [ours_text(metric, one), paper_text(cell), verdict(cell, one)]
        line += texts[: len(head)]
      lines.append([*line, shown.remark])
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


def markdown(experiment: Experiment, scale: str, seed: int, outcomes: Sequence[Outcome], level: int = 1) -> str:
  """Returns table.md: our figures and the paper's, what was changed, and where they differ.

  Args:
    experiment, scale, seed: what was run.
    outcomes: one `Outcome` per cell, in their order.
    level: of the first heading.
  """
  hashes = '#' * level
  paper = f'{experiment.paper}\n\n' if level == 1 else ''  # else the page names it
  parts = [f'{hashes} {experiment.table}', paper + experiment.shows, experiment.metrics]
  parts += dict.fromkeys(run.intervals for run in experiment.runs.values())
  below = notes(experiment, scale, seed, outcomes)
  for column, lines in sections(experiment, outcomes, judged=compares(scale)).items():
    text = ['| ' + ' | '.join(line) + ' |' for line in lines]
    text.insert(1, '|' + ' --- |' * len(lines[0]))
    parts += [f'{hashes}# {column}\n\n' + '\n'.join(text), *below.get(column, [])]
  parts += below.get('', [])
  parts.append(f'{hashes}# Settings\n\n' + '\n'.join(f'- {text}' for text in settings(experiment, scale, seed)))
  return '\n\n'.join(parts) + '\n'


def settings(experiment: Experiment, scale: str, seed: int) -> list[str]:
  """Returns sentences on how this was run: the choices, the scale, and what it changed in each run."""
  by_change = {}
  for name, run in experiment.runs.items():
    by_change.setdefault('; '.join(run.changes(scale)) or 'nothing is scaled down', []).append(name)
  judged = [VERDICT if compares(scale) else UNCOMPARED] if prints(experiment) else []
  lines = [f'Scale {scale}, seed {seed}.', *judged, *experiment.choices]
  return lines + [f'{", ".join(names)}: {change}.' for change, names in by_change.items()]


def terminal(experiment: Experiment, scale: str, seed: int, outcomes: Sequence[Outcome]) -> str:
  """Returns the table for the terminal, aligned, each column with its notes."""
  parts, below = [], notes(experiment, scale, seed, outcomes)
  for column, lines in sections(experiment, outcomes, judged=compares(scale)).items():
    parts += ['\n'.join([column, *aligned(lines)]), *below.get(column, [])]
  return '\n\n'.join([*parts, *below.get('', [])])


def table_csv(experiment: Experiment, scale: str, outcomes: Sequence[Outcome]) -> str:
  """Returns table.csv, one line per cell; a missing value is empty, several of the paper's are joined by ';'."""
  text = io.StringIO()
  names = ('mean', 'low', 'high', 'n', 'recovered', 'diverged', 'remark')
  writer = csv.writer(text)
  head = ('experiment', 'scale', 'column', 'row', 'metric', 'run', 'defense', 'counter')
  writer.writerow([*head, *names, 'paper', 'paper_spread', 'verdict'])
  for cell, found in zip(experiment.cells, outcomes, strict=True):
    defense = experiment.runs[cell.run].scaled(scale).texts()[cell.defense]
    paper = ';'.join(map(str, cell.paper)) if isinstance(cell.paper, tuple) else cell.paper
    writer.writerow(
      [experiment.name, scale, cell.column, cell.row, cell.metric, cell.run, defense, cell.counter]
      + [getattr(found, name) for name in names]
      + [paper, cell.spread, verdict(cell, found) if compares(scale) else '']
    )
  return text.getvalue()
