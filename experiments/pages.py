"""Pages of the stored results: for each paper its tables, ours beside the paper's, each with a verdict.

Everything on them is computed from the stored rows (`results`) and from the declarations; nothing is typed.
"""

import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence

from experiments import comparison, results
from experiments.experiment import Experiment, Outcome, duration, minutes
from experiments.table import VERDICT, markdown
from gradleak.storage import made_folder, write_atomically

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
  found: dict[str, list[Outcome] | None] = {}
  for name, experiment in registry.items():
    usable = name in stored and results.current(stored[name], experiment)
    found[name] = results.outcomes(stored[name], experiment) if usable else None
  texts = {'index.md': _index(registry, found, stored, scale)}
  for page, names in _grouped(registry).items():
    parts = [f'# {_title(page, [registry[name] for name in names])}', _counted(_sum(registry, found, names))]
    parts += [_table(registry[name], found[name], stored.get(name), scale, pictures) for name in names]
    texts[f'{page}.md'] = '\n\n'.join(parts) + '\n'
  return texts


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


def _title(page: str, experiments: Sequence[Experiment]) -> str:
  """Returns the paper of a page."""
  return experiments[0].paper if page in PAPERS else 'Beside the five papers'


def _sum(registry: Mapping[str, Experiment], found: Mapping, names: Iterable[str]) -> dict[str, int]:
  each = [results.counts(registry[name], found[name]) for name in names]
  return {verdict: sum(one[verdict] for one in each) for verdict in results.COUNTED}


def _counted(counts: Mapping[str, int]) -> str:
  """Returns the sentence that says how many of the printed figures have which verdict."""
  listed = ', '.join(f'{verdict} {number}' for verdict, number in counts.items())
  return f'{sum(counts.values())} printed figures, by verdict: {listed}.'


def _index(registry: Mapping[str, Experiment], found: Mapping, stored: Mapping[str, results.Stored], scale: str) -> str:
  run = sum(one is not None for one in found.values())
  parts = [
    '# Results',
    f'{run} of {len(registry)} declared tables are stored at scale {scale}.',
    _counted(_sum(registry, found, registry)),
    f'Not shown: figures of tables that were not run at this scale, and those where ours has no value. {VERDICT}',
    f'`python launch/reproduce.py --all --scale={scale} --budget=2h --data_dir=data` runs what is missing, the '
    'cheapest first; `python launch/reproduce.py --pages=docs/results` makes these pages of what is stored.',
  ]
  for page, names in _grouped(registry).items():
    lines = [f'| table | {" | ".join(results.COUNTED)} | run |', '| --- |' + ' ---: |' * (len(results.COUNTED) + 1)]
    for name in names:
      experiment, outcomes = registry[name], found[name]
      numbers = results.counts(experiment, outcomes).values()
      ran = _state(experiment, outcomes, stored.get(name), scale)
      link = f'[{experiment.table}]({page}.md#{name})'
      lines.append(f'| {link} | {" | ".join(str(number or "") for number in numbers)} | {ran} |')
    parts += [f'## [{_title(page, [registry[name] for name in names])}]({page}.md)', '\n'.join(lines)]
  return '\n\n'.join(parts) + '\n'


def _state(experiment: Experiment, outcomes: Sequence | None, stored: results.Stored | None, scale: str) -> str:
  """Returns how long a table took, or why there is none."""
  if outcomes is not None and stored is not None:
    return duration(stored.seconds / 60)
  if stored is not None:
    return 'its settings have changed since'
  datasets = sorted({run.scaled(scale).dataset for run in experiment.runs.values()})
  return f'not yet: about {duration(minutes(experiment, scale))}, with {", ".join(datasets)}'


def _unexplained(experiment: Experiment, found: Sequence[Outcome], notes: Sequence[comparison.Note]) -> list[str]:
  """Returns 'column, metric' of the figures that differ from the paper's and that no note is about."""
  return list(
    dict.fromkeys(
      f'{cell.column}, {comparison.HEADINGS[cell.metric][0]}'
      for cell, outcome in zip(experiment.cells, found, strict=True)
      if comparison.verdict(cell, outcome) == 'differs' and not any(comparison.explained(note, cell) for note in notes)
    )
  )


def _table(
  experiment: Experiment, found: Sequence[Outcome] | None, stored: results.Stored | None, scale: str, pictures: str
) -> str:
  """Returns the part of a page that is about one table; its anchor is the table's name."""
  again = f'`python launch/reproduce.py --experiment={experiment.name} --scale={scale} --data_dir=data`'
  anchor = f'({experiment.name})=\n'
  if found is None or stored is None:
    state = _state(experiment, found, stored, scale)
    return '\n\n'.join(
      [f'{anchor}## {experiment.table}', experiment.shows, f'Not shown at scale {scale}: {state}. {again}']
    )
  parts = [anchor + markdown(experiment, scale, stored.seed, found, level=2).rstrip()]
  notes = comparison.fitting(experiment.notes, scale, stored.seed, False)
  unknown = _unexplained(experiment, found, [note for note in notes if comparison.holds(note, experiment.cells, found)])
  if unknown:
    parts.append(f'{UNKNOWN}: {"; ".join(unknown)}.')
  parts += [f'![{experiment.table}: picture {n + 1}]({pictures}/{name})' for n, name in enumerate(stored.pictures)]
  made = ', '.join(f'{name} {version}' for name, version in stored.versions.items())
  revision = f', revision {stored.revision[:12]}' + stored.revision[40:] if stored.revision else ''
  parts.append(f'Run in {duration(stored.seconds / 60)} with {made}{revision}. Again: {again}')
  return '\n\n'.join(parts)
