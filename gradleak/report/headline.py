"""The first screen of a page: one sentence, and a line per defense with the verdict of its worst attacker."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gradleak.audit.verdict import LEVELS, MIN_CANDIDATES, NOTHING, RECOVERED, VERDICTS
from gradleak.modalities import Modality
from gradleak.report import blocks, marked, wording
from gradleak.report.formatting import percent_range
from gradleak.report.html import code, image, mark, method, text
from gradleak.report.words import said, texts, worded
from gradleak.summary import worst


def meanings() -> dict[str, str]:
  """Returns what each verdict says of a sample, in plain words."""
  return {verdict: said(f'meaning.{verdict}') for verdict in texts()['meaning'] if verdict != 'unjudged'}


def sentence(entries: Sequence[dict], config: Mapping[str, Any]) -> str:
  """Returns one sentence on an audit.

  Args:
    entries: from `cases.worst_case`.
    config: the audit's settings; only `batch_size` is read.
  """
  undefended = next((entry for entry in entries if entry['defense'] == 'none'), None)
  defended = [entry for entry in entries if entry['defense'] != 'none']
  if undefended is None:
    start = said('headline.none')
  elif undefended['verdict'] not in RECOVERED:
    start = said('headline.fails', **undefended)
  else:  # of a batch, one image decides
    start = said('headline.batches' if config.get('batch_size', 1) > 1 else 'headline.images', **undefended)
  if not defended:
    return f'{start}.'
  counts: dict[str, list[str]] = {}
  for entry in sorted(defended, key=lambda entry: VERDICTS.index(entry['verdict'])):
    verdict = 'inconclusive' if entry['verdict'] == 'diverged' else entry['verdict']
    counts.setdefault(verdict, []).append(entry['defense'])
  done = [said(f'done.{verdict}', n=len(names)) for verdict, names in counts.items()]
  if len(defended) == 1:
    return said('headline.one', start=start, done=done[0])
  numbered = [f'{len(names)} {words}' for names, words in zip(counts.values(), done, strict=True)]
  return said('headline.several', start=start, defenses=len(defended), done=numbered)


def recovering(entries: Sequence[dict]) -> str:
  """Returns a clause: under how many defenses images are recovered; empty for none.

  Args:
    entries: of `cases.worst_case`.
  """
  defended = [entry for entry in entries if entry['defense'] != 'none']
  leaking = sum(entry['verdict'] in RECOVERED for entry in defended)
  if len(defended) == 1:
    return said('headline.recovered' if leaking else 'headline.not')
  return said('headline.some', leaking=leaking, defenses=len(defended)) if defended else ''


def lines(
  rows: Sequence[dict],
  found: Sequence[dict],
  picture: Callable,
  named: Any = None,
  kind: Modality | None = None,
  **more: Mapping[str, Any],
) -> list[dict]:
  """Returns the lines of `worst.lines`, whose arguments these are, each with the 'meaning' of its verdict."""
  enough = worst.candidates(rows)['enough']
  return [
    {**line, 'meaning': _meaning(line['verdict'], enough)}
    for line in worst.lines(rows, found, picture, named, kind, **more)
  ]


def gallery(rows: Sequence[dict], config: Mapping[str, Any]) -> dict[str, Any]:
  """Returns what `worst.candidates` does, and what the gallery is made of, 'made'."""
  return {**worst.candidates(rows), 'made': wording.gallery(config)}


def verdict_table(told: Sequence[Mapping[str, Any]], flagged: bool = False, bounded: bool = False) -> blocks.Table:
  """Returns the table of `lines`, with the flags of each defense and the bound by DP, if asked for."""
  columns = ['defense', ('worst attacker sees', 'left verdict'), 'in']
  read = any(line['pieces'] for line in told)
  columns += [('clearest seen', 'left summed') if read else ('private,\nclearest seen', 'left'), ('by', 'left by')]
  columns += [('flags', 'left flags')] * flagged + ['found at\nmost, by DP'] * bounded
  rows = []
  for line in told:
    example, others = line['example'], len(line['by']) - 1
    pictures = (
      marked.summary(line['pieces'])
      if line['pieces']
      else text(
        image(line['truth'], worded(f'Private image of trial {example["trial"]}.')),
        ' ',
        image(line['found'], f'Its reconstruction by {example["attack"]}.'),
      )
    )
    uploads = ' uploads' * (example.get('batch_size', 1) > 1)
    cells = [
      method(line['defense'], line.get('published')),
      blocks.Cell(mark(line['verdict']), [line['meaning']]),
      blocks.Cell(f'{line["count"]} of {line["n"]}{uploads}', [percent_range(line)]),
      pictures,
      blocks.Cell(code(line['by'][0]), [others and f'and {others} more attacker{"s" * (others > 1)}']),
      *(['; '.join(line['flags']) or '–'] if flagged else []),
      *([line['bound'] or '–'] if bounded else []),
    ]
    rows.append(blocks.Row(cells))
  return blocks.Table(columns, [blocks.Body(rows)], 'verdicts', 'Verdicts')


def levels_table(
  levels: Sequence[Mapping[str, Any]], alarms: Sequence[Mapping[str, Any]], noise: str, published: Mapping[str, str]
) -> blocks.Table:
  """Returns the table of `worst.levels`, and below it `worst.alarms` in a line called `noise`."""
  named = [(method(line['defense'], published.get(line['defense'])), line) for line in levels] + [
    (blocks.Html(noise), line) for line in alarms
  ]
  rows = [
    blocks.Row([name, *(blocks.Cell(f'{one["count"]} of {line["n"]}', [percent_range(one)]) for one in line['levels'])])
    for name, line in named
  ]
  return blocks.Table(['defense', *(mark(level) for level in LEVELS)], [blocks.Body(rows)])


def verdict_terms(gallery: Mapping[str, Any], config: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
  """Returns what each verdict means; `gallery` is that of `gallery`."""
  many = said('verdicts.batches') if config.get('batch_size', 1) > 1 else ''
  made = f' {gallery["made"]}' if gallery['made'] else ''
  exact = wording.intervals(config, 'exact (Clopper–Pearson)')
  few, unjudged = ('', '') if gallery['enough'] else ('verdicts.few', 'verdicts.unjudged')

  def term(verdict: str, name: str = '') -> tuple[str, list[str]]:
    return mark(verdict), [said(name or f'verdicts.{verdict}', **{**gallery, 'made': made})]

  return [
    *(term('exact'), term('recognisable', few), term('re-identified', unjudged), term('above chance')),
    ('Recovered', [said('verdicts.recovered', batches=many, exact=exact)]),
    *(term(NOTHING), term('inconclusive'), term('diverged')),
  ]


def _meaning(verdict: str, enough: bool) -> str:
  if verdict == 'above chance' and not enough:
    return said('meaning.unjudged', needed=MIN_CANDIDATES)
  return said(f'meaning.{verdict}')
