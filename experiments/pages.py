"""Pages of the stored results: an index by paper, and a page per table, ours beside the paper's, each with a verdict.

Everything on them is computed from the stored rows (`results`) and from the declarations; nothing is typed.
"""

import collections
import math
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence

from experiments import claims, comparison, judgement, results
from experiments.experiment import Experiment, Outcome, duration
from experiments.judgement import Judged
from experiments.table import MOST_TIMES, UNCOUNTED, VERDICT, folded, grid, markdown, ordered
from gradleak.core.storage import made_folder, write_atomically

# What begins the names of the tables of a paper -> what the paper is called; all other tables stand together.
PAPERS = {'ffl': 'FFL', 'fidel': 'Fidel', 'graddefense': 'GradDefense', 'outpost': 'OUTPOST', 'dcs2': 'DCS²'}
BESIDE = 'Beside the five papers'
UNKNOWN = 'Cause of the differences unknown'
NEAR = 10  # times the trials that a table has, at most: what its pages suggest to run


def write(folder: str, stored: str, registry: Mapping[str, Experiment], scale: str) -> list[str]:
  """Writes the pages into a folder; returns their paths.

  Args:
    folder: for the pages.
    stored: folder of stored results, see `results.store`.
    registry: name -> `Experiment`.
    scale: of the results.

  Raises:
    UsageError: as `results.read` and `made_folder` do.
  """
  known, folder = results.read(stored, scale), made_folder(folder)
  pictures = os.path.relpath(os.path.join(stored, scale), folder)
  texts = pages(known, registry, scale, pictures.replace(os.sep, '/'))
  for name, text in texts.items():
    write_atomically(pathlib.Path(folder, name), text)
  return [os.path.join(folder, name) for name in texts]


def pages(
  stored: Mapping[str, results.Stored], registry: Mapping[str, Experiment], scale: str, pictures: str
) -> dict[str, str]:
  """Returns file name -> text: index.md, and a page per table that is stored as it is declared.

  Args:
    stored: name of a table -> its results at this scale.
    registry: name -> `Experiment`.
    scale: of the results.
    pictures: path from the pages to the folder of the stored pictures.
  """
  judged = judge(stored, registry, scale)
  texts = {f'{name}.md': _page(table, stored[name], pictures) for name, table in judged.items() if table.outcomes}
  return {'index.md': _index(judged, stored, scale), **texts}


def judge(stored: Mapping[str, results.Stored], registry: Mapping[str, Experiment], scale: str) -> dict[str, Judged]:
  """Returns name -> `Judged` of all tables; those that were stored with other settings count as not run."""
  found: dict[str, tuple[Experiment, list[Outcome] | None]] = {}
  for name, experiment in registry.items():
    usable = name in stored and results.current(stored[name], experiment)
    found[name] = experiment, results.outcomes(stored[name], experiment) if usable else None
  return judgement.judge(found, scale)


def paper_of(name: str) -> str:
  """Returns what the paper of a table is called."""
  return PAPERS.get(name.partition('_')[0], BESIDE)


def _grouped(registry: Iterable[str]) -> dict[str, list[str]]:
  """Returns paper -> names of its tables, those of the five papers first."""
  grouped: dict[str, list[str]] = {paper: [] for paper in (*PAPERS.values(), BESIDE)}
  for name in registry:
    grouped[paper_of(name)].append(name)
  return {paper: names for paper, names in grouped.items() if names}


def _sum(tables: Iterable[Judged]) -> dict[str, int]:
  each = [table.counts() for table in tables]
  return {status: sum(one[status] for one in each) for status in judgement.COUNTED}


def _counted(counts: Mapping[str, int]) -> str:
  """Returns how many of the printed figures have which status."""
  if not any(counts.values()):
    return 'No figure of these tables is printed.'
  lines = [(status, str(count)) for status, count in counts.items()]
  return f'{sum(counts.values())} printed figures:\n\n{grid(("verdict", "figures"), lines)}'


def _held(table: Judged) -> str:
  """Returns whether the claim of a table holds; '' where it makes none, or was not run."""
  claim = claims.CLAIMS.get(table.experiment.name)
  if not claim or table.outcomes is None:
    return ''
  return claims.whole(claims.judged(table.experiment, table.outcomes, table.scale, claim).values())


def _claims(tables: Iterable[Judged]) -> str:
  """Returns the sentence that says how many claims hold; '' where no table makes one."""
  counts = collections.Counter(map(_held, tables))
  known = {word: counts[word] for word in claims.SAID}
  return f'Claims of tables that were run: {claims.numbered(known)}.' if any(known.values()) else ''


def _agreeing(judged: Mapping[str, Judged]) -> str:
  """Returns the figures that agree, each beside the paper's."""
  lines = [
    (
      _link(table),
      f'{cell.column}: {cell.row}',
      comparison.HEADINGS[cell.metric][0],
      comparison.ours_text(cell.metric, found),
      comparison.paper_text(cell),
    )
    for table in judged.values()
    if table.outcomes is not None
    for cell, found, status in zip(table.experiment.cells, table.outcomes, table.statuses, strict=True)
    if status == comparison.VERDICTS[0]
  ]
  return grid(('table', 'of', 'figure', 'ours', 'paper'), lines, 3) if lines else ''


def _link(table: Judged) -> str:
  """Returns the title of a table, as a link where it has a page."""
  experiment = table.experiment
  return experiment.table if table.outcomes is None else f'[{experiment.table}]({experiment.name}.md)'


def _papers(judged: Mapping[str, Judged]) -> str:
  """Returns a line per paper: the order of its methods, and its claims."""
  lines = []
  for paper, names in _grouped(judged).items():
    tables = [judged[name] for name in names]
    found = judgement.total(table.order for table in tables)
    held = collections.Counter(map(_held, tables))
    lines.append((paper, *map(str, found.pairs.values()), *(str(held[word]) for word in claims.SAID)))
  return grid(('paper', *judgement.ORDERS, *(f'claim {word}' for word in claims.SAID)), lines)


def _needed(judged: Mapping[str, Judged], stored: Mapping[str, results.Stored]) -> str:
  """Returns the sentences on how many trials bring half of the pairs of each table beyond noise; '' without a pair."""
  times = {name: found for name, table in judged.items() if (found := table.order.times()) is not None}
  beyond = [name for name, found in times.items() if found <= 1]
  near = [name for name, found in times.items() if 1 < found <= NEAR]
  if not times:
    return ''
  seconds = sum(times[name] * stored[name].seconds for name in near)
  return (
    f'Half of the pairs or more are beyond noise in {len(beyond)} of {len(times)} tables with methods to compare. At '
    f'most {NEAR} times the trials would do for {len(near)} more, in about {duration(seconds)}, if their differences '
    f'stay as they are. {len(times) - len(beyond) - len(near)} would take more, or no number of trials would do.'
  )


def _index(judged: Mapping[str, Judged], stored: Mapping[str, results.Stored], scale: str) -> str:
  run = sum(table.outcomes is not None for table in judged.values())
  counts, found = _sum(judged.values()), judgement.total(table.order for table in judged.values())
  counting = sum(counts[status] for status in comparison.VERDICTS)
  carried = ', '.join(f'{count} {kind}' for kind, count in found.carried.items())
  parts = [
    '# Results',
    'Tables of five papers, and our own beside them, run again and compared with what is printed. For readers of these '
    'papers, and for reviewers.',
    _claims(judged.values()),
    ordered(found),
    f'{counts[comparison.VERDICTS[0]]} of {counting} figures that count agree with the paper’s.',
    _papers(judged),
  ]
  for paper, names in _grouped(judged).items():
    lines = [_line(judged[name], stored.get(name), scale) for name in names]
    parts += [f'## {paper}', judged[names[0]].experiment.paper if paper != BESIDE else '']
    parts.append(grid(('table', 'claim', 'here', 'pairs as in the paper : opposite', 'figures that agree'), lines, 3))
  parts += [
    '## How it is compared',
    f'{run} of {len(judged)} declared tables are stored at scale {scale}.',
    f'{sum(found.carried.values())} pairs carry an order: the undefended attack of their column works, and one of the '
    f'two shows something. They are {carried}.',
    _needed(judged, stored),
    'A pair has an order, and is beyond noise, where the 95 % interval of its difference, trial by trial, leaves out '
    '0. The difference is smaller than in the paper where its interval covers 0 and leaves out what is printed. A '
    'figure without an interval is taken to 5 %. The undefended line stands apart. Pairs of which the paper prints '
    'equal figures, or intervals that meet, are left out.',
    _counted(counts),
    f'{VERDICT} {UNCOUNTED} Not shown: figures of tables that were not run at this scale, and those where ours has no '
    'value.',
    f'`python launch/reproduce.py --all --scale={scale} --budget=2h --data_dir=data` runs what is missing; '
    '`python launch/reproduce.py --pages=results/pages` makes these pages of what is stored.',
    folded('The figures that agree', [_agreeing(judged)]),
  ]
  return '\n\n'.join(part for part in parts if part) + '\n'


def _line(table: Judged, stored: results.Stored | None, scale: str) -> tuple[str, ...]:
  """Returns the line of a table in the index."""
  claim = table.experiment.shows.partition('. ')[0].removesuffix('.')
  if table.outcomes is None:
    return table.experiment.table, claim, _state(table, stored, scale), '', ''
  numbers, pairs = table.counts(), table.order.pairs
  counting = sum(numbers[status] for status in comparison.VERDICTS)
  order = ' : '.join(str(pairs[kind]) for kind in judgement.ORDERS[:2]) if any(pairs.values()) else ''
  agree = f'{numbers[comparison.VERDICTS[0]]} of {counting}' if counting else ''
  return _link(table), claim, _here(table), order, agree


def _here(table: Judged) -> str:
  """Returns whether the claim of a table that was run holds; of an undecided one, whether every attack fails."""
  held, name = _held(table), table.experiment.name
  if not held or table.outcomes is None:
    return 'no claim'
  lacks = claims.lacking(table.experiment, table.outcomes, table.scale, claims.CLAIMS[name])
  return f'**{held}**' + (', as no undefended run works' if held == claims.SAID[2] and all(lacks.values()) else '')


def _state(table: Judged, stored: results.Stored | None, scale: str) -> str:
  """Returns how long a table took, or why there is none."""
  experiment = table.experiment
  if table.outcomes is not None and stored is not None:
    return duration(stored.seconds)
  if stored is not None:
    return 'its settings have changed since'
  datasets = sorted({run.scaled(scale).dataset for run in experiment.runs.values()})
  return f'not yet, on {", ".join(datasets)}'


def _unexplained(table: Judged, notes: Sequence[comparison.Note]) -> list[str]:
  """Returns 'column, metric' of the figures that differ from the paper's and that no note is about."""
  return list(
    dict.fromkeys(
      f'{cell.column}, {comparison.HEADINGS[cell.metric][0]}'
      for cell, status in zip(table.experiment.cells, table.statuses, strict=True)
      if status == 'differs' and not any(comparison.explained(note, cell) for note in notes)
    )
  )


def _page(table: Judged, stored: results.Stored, pictures: str) -> str:
  """Returns the page of one table."""
  experiment, found, more = table.experiment, table.outcomes, []
  notes = comparison.fitting(experiment.notes, table.scale, stored.seed, False)
  unknown = _unexplained(table, [note for note in notes if comparison.holds(note, experiment.cells, found)])
  if unknown:
    more.append(f'{UNKNOWN}: {"; ".join(unknown)}.')
  made = ', '.join(f'{name} {version}' for name, version in stored.versions.items())
  revision = f', revision {stored.revision[:12]}' + stored.revision[40:] if stored.revision else ''
  again = f'`python launch/reproduce.py --experiment={experiment.name} --scale={table.scale} --data_dir=data`'
  times = table.order.times() or 1.0
  longer = ''
  if 1 < times <= MOST_TIMES:
    longer = f' With {math.ceil(times)} times the trials it would take about {duration(times * stored.seconds)}.'
  more += [
    f'Again: {again}, which took {duration(stored.seconds)}.{longer}',
    folded('Versions', [f'{made}{revision}.']),
  ]
  paths = [f'{pictures}/{name}' for name in stored.pictures]
  return markdown(experiment, table.scale, stored.seed, found, table, paths, more)
