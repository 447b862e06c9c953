"""Pages of the stored results: for each paper its tables, ours beside the paper's, each with a verdict.

Everything on them is computed from the stored rows (`results`) and from the declarations; nothing is typed.
"""

import collections
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence

from experiments import claims, comparison, judgement, results
from experiments.experiment import Experiment, Outcome, duration
from experiments.judgement import Judged
from experiments.table import UNCOUNTED, VERDICT, grid, markdown, ordered
from gradleak.core.storage import made_folder, write_atomically
from gradleak.report.formatting import number

# Page -> what begins the names of its tables; the rest stands on the page BESIDE.
PAPERS = ('ffl', 'fidel', 'graddefense', 'outpost', 'dcs2')
BESIDE = 'beside'
UNKNOWN = 'Cause of the differences unknown'


def write(folder: str, stored: str, registry: Mapping[str, Experiment], scale: str) -> list[str]:
  """Writes the pages into a folder; returns their paths.

  Args:
    folder: for the pages.
    stored: folder of stored results, see `results.store`.
    registry: name -> `Experiment`.
    scale: of the results.
  """
  folder = made_folder(folder)
  pictures = os.path.relpath(os.path.join(stored, scale), folder)
  texts = pages(results.read(stored, scale), registry, scale, pictures.replace(os.sep, '/'))
  for name, text in texts.items():
    write_atomically(pathlib.Path(folder, name), text)
  return [os.path.join(folder, name) for name in texts]


def pages(
  stored: Mapping[str, results.Stored], registry: Mapping[str, Experiment], scale: str, pictures: str
) -> dict[str, str]:
  """Returns file name -> text: index.md, and a page per paper.

  Args:
    stored: name of a table -> its results at this scale.
    registry: name -> `Experiment`.
    scale: of the results.
    pictures: path from the pages to the folder of the stored pictures.
  """
  judged = judge(stored, registry, scale)
  texts = {'index.md': _index(judged, stored, scale)}
  for page, names in _grouped(registry).items():
    tables = [judged[name] for name in names]
    parts = [f'# {_title(page, tables)}', _counted(_sum(tables)), _order(tables), _claims(tables)]
    parts += [_table(judged[name], stored.get(name), scale, pictures) for name in names]
    texts[f'{page}.md'] = '\n\n'.join(part for part in parts if part) + '\n'
  return texts


def judge(stored: Mapping[str, results.Stored], registry: Mapping[str, Experiment], scale: str) -> dict[str, Judged]:
  """Returns name -> `Judged` of all tables; those that were stored with other settings count as not run."""
  found: dict[str, tuple[Experiment, list[Outcome] | None]] = {}
  for name, experiment in registry.items():
    usable = name in stored and results.current(stored[name], experiment)
    found[name] = experiment, results.outcomes(stored[name], experiment) if usable else None
  return judgement.judge(found, scale)


def page_of(name: str) -> str:
  """Returns the page that a table stands on."""
  paper = name.partition('_')[0]
  return paper if paper in PAPERS else BESIDE


def _grouped(registry: Iterable[str]) -> dict[str, list[str]]:
  """Returns page -> names of its tables, those of the five papers first."""
  grouped: dict[str, list[str]] = {page: [] for page in (*PAPERS, BESIDE)}
  for name in registry:
    grouped[page_of(name)].append(name)
  return {page: names for page, names in grouped.items() if names}


def _title(page: str, tables: Sequence[Judged]) -> str:
  """Returns the paper of a page."""
  return tables[0].experiment.paper if page in PAPERS else 'Beside the five papers'


def _sum(tables: Iterable[Judged]) -> dict[str, int]:
  each = [table.counts() for table in tables]
  return {status: sum(one[status] for one in each) for status in judgement.COUNTED}


def _counted(counts: Mapping[str, int]) -> str:
  """Returns how many of the printed figures have which status."""
  if not any(counts.values()):
    return 'No figure of these tables is printed.'
  lines = [(status, str(count)) for status, count in counts.items()]
  return f'{sum(counts.values())} printed figures:\n\n{grid(("verdict", "figures"), lines)}'


def _order(tables: Iterable[Judged]) -> str:
  """Returns the sentences on the order of the methods of several tables."""
  return ordered(judgement.total(table.order for table in tables))


def _held(table: Judged) -> str:
  """Returns whether the claim of a table holds; '' where it makes none, or was not run."""
  claim = claims.CLAIMS.get(table.experiment.name)
  if not claim or table.outcomes is None:
    return ''
  return claims.whole(claims.judged(table.experiment, table.outcomes, table.scale, claim).values())


def _claims(tables: Iterable[Judged]) -> str:
  """Returns the sentence that says how many claims hold; '' where no table makes one."""
  counts = collections.Counter(map(_held, tables))
  holding, failing, open_ = (counts[word] for word in claims.SAID)
  if not holding + failing + open_:
    return ''
  return f'Claims of tables that were run: {holding} hold, {failing} do not hold, {open_} are undecided.'


def _agreeing(judged: Mapping[str, Judged]) -> str:
  """Returns the figures that agree, each beside the paper's."""
  lines = [
    (
      f'[{table.experiment.table}]({page_of(name)}.md#{name})',
      f'{cell.column}: {cell.row}',
      comparison.HEADINGS[cell.metric][0],
      comparison.ours_text(cell.metric, found),
      comparison.paper_text(cell),
    )
    for name, table in judged.items()
    if table.outcomes is not None
    for cell, found, status in zip(table.experiment.cells, table.outcomes, table.statuses, strict=True)
    if status == comparison.VERDICTS[0]
  ]
  return grid(('table', 'of', 'figure', 'ours', 'paper'), lines, 3) if lines else ''


def _papers(judged: Mapping[str, Judged]) -> str:
  """Returns a line per paper: the order of its methods, and its claims."""
  lines = []
  for page, names in _grouped(judged).items():
    tables = [judged[name] for name in names]
    found = judgement.total(table.order for table in tables)
    held = collections.Counter(map(_held, tables))
    tau = found.tau()
    lines.append(
      (
        f'[{_title(page, tables).partition(":")[0]}]({page}.md)',
        *(str(found.pairs[kind]) for kind in judgement.ORDERS),
        '' if tau is None else number(tau, 2),
        *(str(held[word]) for word in claims.SAID),
      )
    )
  head = ('paper', *judgement.ORDERS, 'median τ-b', *(f'claim {word}' for word in claims.SAID))
  return grid(head, lines)


def _index(judged: Mapping[str, Judged], stored: Mapping[str, results.Stored], scale: str) -> str:
  run = sum(table.outcomes is not None for table in judged.values())
  counts, found = _sum(judged.values()), judgement.total(table.order for table in judged.values())
  counting = sum(counts[status] for status in comparison.VERDICTS)
  carried = ', '.join(f'{count} {kind}' for kind, count in found.carried.items())
  parts = [
    '# Results',
    f'{counts[comparison.VERDICTS[0]]} of {counting} figures that count agree with the paper’s. They are listed '
    'first, then the order of the methods, which is what a reader wants of a table.',
    _agreeing(judged),
    '## Order of the methods, and claims',
    ordered(found),
    f'{sum(found.carried.values())} pairs carry an order: the undefended attack of their column works, and one of the '
    f'two shows something. They are {carried}.',
    'A pair is within noise where the 95 % interval of its difference, trial by trial, covers 0; a figure without an '
    'interval is taken to 5 %. The undefended line stands apart.',
    _claims(judged.values()),
    _papers(judged),
    '## All figures',
    f'{run} of {len(judged)} declared tables are stored at scale {scale}.',
    _counted(counts),
    f'{VERDICT} {UNCOUNTED} Not shown: figures of tables that were not run at this scale, and those where ours has no '
    'value.',
    f'`python launch/reproduce.py --all --scale={scale} --budget=2h --data_dir=data` runs what is missing; '
    '`python launch/reproduce.py --pages=docs/results` makes these pages of what is stored.',
  ]
  for page, names in _grouped(judged).items():
    head = ('table', 'claim', *comparison.VERDICTS, 'not counted', 'not shown', 'run')
    lines = []
    for name in names:
      table = judged[name]
      numbers = table.counts()
      shown = [numbers[status] for status in comparison.VERDICTS]
      shown += [sum(numbers[status] for status in judgement.UNCOUNTED), numbers[judgement.NOT_SHOWN]]
      link = f'[{table.experiment.table}]({page}.md#{name})'
      lines.append((link, _held(table), *(str(one or '') for one in shown), _state(table, stored.get(name), scale)))
    parts += [f'## [{_title(page, [judged[name] for name in names])}]({page}.md)', grid(head, lines, 2)]
  return '\n\n'.join(part for part in parts if part) + '\n'


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


def _table(table: Judged, stored: results.Stored | None, scale: str, pictures: str) -> str:
  """Returns the part of a page that is about one table; its anchor is the table's name."""
  experiment, found = table.experiment, table.outcomes
  again = f'`python launch/reproduce.py --experiment={experiment.name} --scale={scale} --data_dir=data`'
  anchor = f'({experiment.name})=\n'
  if found is None or stored is None:
    state = f'Not shown at scale {scale}: {_state(table, stored, scale)}. {again}'
    return '\n\n'.join([f'{anchor}## {experiment.table}', *claims.paragraphs(experiment, None, scale), state])
  parts = [anchor + markdown(experiment, scale, stored.seed, found, level=2, known=table).rstrip()]
  notes = comparison.fitting(experiment.notes, scale, stored.seed, False)
  unknown = _unexplained(table, [note for note in notes if comparison.holds(note, experiment.cells, found)])
  if unknown:
    parts.append(f'{UNKNOWN}: {"; ".join(unknown)}.')
  parts += [f'![{experiment.table}: picture {n + 1}]({pictures}/{name})' for n, name in enumerate(stored.pictures)]
  made = ', '.join(f'{name} {version}' for name, version in stored.versions.items())
  revision = f', revision {stored.revision[:12]}' + stored.revision[40:] if stored.revision else ''
  parts.append(f'Run in {duration(stored.seconds)} with {made}{revision}. Again: {again}')
  return '\n\n'.join(parts)
