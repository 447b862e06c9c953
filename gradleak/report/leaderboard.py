"""The page of a leaderboard: per task one table of defenses, the least leak first, with the pictures that were seen."""

import base64
import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gradleak import metrics
from gradleak.audit.verdict import FAILED, LEVELS, RECOVERED, VERDICTS
from gradleak.core import errors, grammar, storage
from gradleak.modalities import Piece
from gradleak.report import blocks, deploy, headline, html, marked, privacy
from gradleak.report.autoleak import ENOUGH
from gradleak.report.formatting import listed, minus, number, percent, percent_range, together, upwards
from gradleak.report.html import code, image, link, mark, method, tagged, text
from gradleak.report.ranks import ranks
from gradleak.report.shares import shares_picture
from gradleak.report.words import about, said, worded
from gradleak.studies.autoleak import leaderboard
from gradleak.studies.autoleak.bounds import RELATION
from gradleak.studies.autoleak.entry import FAMILY, number_of
from gradleak.summary.cases import csv_text

EARLIER = said('leaderboard.earlier')  # of entries that do not say what their gallery holds


def render_leaderboard(entries: Mapping[str, Mapping[str, Any]], pages: str = '') -> str:
  """Returns the leaderboard as one HTML page that loads nothing; its script sorts and searches the tables.

  One version of AutoLeak is shown, the newest. Tasks of former ones are folded away below it.

  Args:
    entries: name -> entry, from `gradleak.studies.autoleak.leaderboard.read`.
    pages: where the pages of methods stand, such as 'methods/'; '' links to none.

  Raises:
    UsageError: if there is no entry.
  """
  if not entries:
    raise errors.UsageError('the leaderboard has no entries: add some by launch/leaderboard.py --add=WORKDIR')
  versions = together((number_of(of[0]), of) for of in _by_task(entries))
  newest = max(versions)
  shown, former = _tasks(versions[newest], pages), []
  for version in sorted(versions.keys() - {newest}, reverse=True):
    for section in _tasks(versions[version], pages):
      title = f'{FAMILY}-{version}: {section.title}'
      former.append(blocks.Details(title, section.blocks))
  sections = [section._replace(name=f'task-{place}') for place, section in enumerate(shown, 1)]
  if former:
    note = blocks.Text(said('leaderboard.former', version=f'{FAMILY}-{newest}'), 'note')
    sections.append(blocks.Section('former', 'Earlier versions', [note, *former]))
  defenses = len({entry['text'] for of in versions[newest] for entry in of} - {'none'})
  few = any(entry['trials'] < ENOUGH for of in versions[newest] for entry in of)
  sorts = blocks.Html(f'<span class="sorts" hidden>{said("leaderboard.sorts")}</span>')
  submit = [blocks.Bullets([said(f'leaderboard.submit_{step}') for step in ('run', 'add', 'check', 'send')])]
  sections.append(blocks.Section('submit', 'How to submit', submit))
  made = blocks.Page(
    'leaderboard',
    'Leaderboard of defenses',
    f'{FAMILY}-{newest}: a fixed ensemble of attacks, the same for every defense',
    'Leaderboard of defenses',
    [
      blocks.Text(said('leaderboard.heading', defenses=defenses, tasks=len(shown)), 'meaning'),
      blocks.Text(text(said('leaderboard.order'), sorts), 'note'),
      *([blocks.Text(said('leaderboard.few', enough=ENOUGH), 'note')] if few else []),
      _tools(entries, pages),
    ],
    sections,
    [blocks.Text(said('leaderboard.footer'))],
    'Tasks',
    html.resource('leaderboard.js'),
  )
  return html.page(made)


def _tasks(tasks: Sequence[Sequence[dict[str, Any]]], pages: str) -> list[blocks.Section]:
  """Returns a section per task, of the entries of `_by_task`."""
  made = []
  for of in tasks:
    with about(of[0]['task']['more']):
      made.append(_task(of, pages))
  return [section for *_, section in sorted(made, key=lambda one: one[:-1])]


def write_leaderboard(folder: Any, path: Any, pages: str = '') -> None:
  """Writes the page of a folder of entries to a file, all of it or nothing; `pages` is as above."""
  text = render_leaderboard(leaderboard.read(folder), pages)
  path = errors.check_path('the page', path)
  storage.made_folder(path.parent)
  storage.write_atomically(path, text)


def _tools(entries: Mapping[str, Mapping[str, Any]], pages: str) -> blocks.Html:
  """Returns the field that searches the tables, the entries as files within the page, and the way to all methods."""
  finds = '<input type="search" class="finds" placeholder="Search defenses and attacks" aria-label="Search" hidden>'
  rows = listing(entries)
  kinds = {'csv': ('text/csv', csv_text(rows)), 'json': ('application/json', json.dumps(rows))}
  files = []
  for kind, (of, made) in kinds.items():
    coded = base64.b64encode(made.encode()).decode()
    files.append(f'<a download="leaderboard.{kind}" href="data:{of};base64,{coded}">{kind.upper()}</a>')
  places = {'../index.html': 'Documentation', '../which_defense.html': 'Which defense?', 'index.html': 'All methods'}
  methods = ''.join(f' <a href="{pages}{place}">{name}</a>' for place, name in places.items()) if pages else ''
  return blocks.Html(f'<p class="tools">{finds} <span>All of it: {", ".join(files)}</span>{methods}</p>')


def listing(entries: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
  """Returns the entries as flat rows, without pictures: the counts by level and server, the cost, and the versions."""
  rows = []
  for entry in sorted((entry for of in _by_task(entries) for entry in of), key=lambda entry: entry['name']):
    task, cost = entry['task'], entry['cost'] or {}
    row = {'name': entry['name'], 'defense': entry['text'], 'published': entry['published']}
    row |= {part: task[part] for part in ('dataset', 'model', 'batch_size')}
    row |= {'cost_points': cost.get('points'), 'cost_source': cost.get('source')}
    row |= {'epsilon': privacy.brief(entry) or None}
    row |= dict(zip(('cost_low', 'cost_high'), cost.get('interval', (None, None)), strict=True))
    for side in leaderboard.SIDES:
      levels = {one['level']: one['count'] for one in entry[side]['levels']} if entry[side] else {}
      row[f'{side}_n'] = entry[side]['n'] if entry[side] else None
      row[f'{side}_failed'] = deploy.lost(entry[side]) if entry[side] else None
      row |= {f'{side}_{level.replace(" ", "_").replace("-", "_")}': levels.get(level) for level in LEVELS}
    named = entry.get('likelihood') or {}
    row |= {f'likelihood_{part}': named.get(part) for part in ('identified', 'n', 'candidates')}
    row |= dict(zip(('rank_best', 'rank_worst'), entry['rank'] or (None, None), strict=True))
    rows.append(row | {**entry['versions'], 'seed': entry['seed'], 'rows_sha256': entry['rows_sha256']})
  return rows


def _by_task(entries: Mapping[str, Mapping[str, Any]]) -> list[list[dict[str, Any]]]:
  """Returns the entries of each task and version together, each with its 'name' and its 'rank' among them.

  Where a defense has several of one seed, that of most uploads stands for the others.
  """
  tasks = together(
    ((number_of(entry), json.dumps(entry['task'], sort_keys=True)), {**entry, 'name': name})
    for name, entry in entries.items()
  )
  shown = map(deploy.largest, tasks.values())
  return [[{**entry, 'rank': rank} for entry, rank in zip(of, ranks(of), strict=True)] for of in shown]


def _task(entries: Sequence[dict[str, Any]], pages: str) -> tuple[bool, str, str, str, blocks.Section]:
  """Returns what tasks are ordered by, those with a leak of undefended images first, and the section of one."""
  task = entries[0]['task']
  described = [
    f'split {task["split"]}' if task['split'] else '',
    f'weights drawn by init={task["init"]}' if task['init'] else '',
    worded(f'{task["batch_size"]} private image{"s" if task["batch_size"] > 1 else ""} behind an upload'),
    f'{task["rounds_before"]} round{"" if task["rounds_before"] == 1 else "s"} of training before',
    *(f'{name}={_plainly(value)}' for name, value in task['more'].items() if not isinstance(value, dict)),
  ]
  known = ', '.join(filter(None, described))
  ordered = sorted(entries, key=_order)
  honest = _worst(deploy.judged(ordered, 'honest'), 'honest')
  malicious = _worst([one for one in ordered if one['malicious']], 'malicious')
  works = any(one['defense'] == 'none' and one['recovered'] for one in honest)
  changed = headline.recovering(malicious)
  found = headline.sentence(honest, task) + (said('leaderboard.changed', changed=changed) if changed else '')
  advice = [*deploy.advice(ordered)]
  held = {(entry.get('settings') or {}).get('public') for entry in entries} - {None}
  parts = [
    blocks.Text(found, 'meaning') if works else None,
    *([blocks.Text(worded(said('leaderboard.granted', n=held.pop())), 'note')] if len(held) == 1 else []),
    blocks.Heading(said('deploy.title')),
    blocks.Bullets(list(map(str, advice)), 'meaning'),
    _board(ordered, pages, works),
    *([blocks.Picture(drawn, said('leaderboard.shares'))] if (drawn := shares_picture(entries)) else []),
    blocks.Details('How to read it', _explained(ordered, known)),
    *_baselines(entries[0]),
  ]
  title = f'{task["model"]} on {task["dataset"]}'
  return not works, task['dataset'], task['model'], known, blocks.Section('', title, parts)


def _explained(entries: Sequence[dict[str, Any]], described: str) -> list[Any]:
  """Returns what the columns and the verdicts of a task mean."""
  task = entries[0]['task']
  gallery = headline.gallery([{**task, 'candidates': entry['candidates']} for entry in entries], task['more'])
  known = {
    'failed': any(deploy.failed(entry[side]) for entry in entries for side in leaderboard.SIDES if entry[side]),
    'rank': any(entry['rank'] for entry in entries),
    'few': any(entry['trials'] < ENOUGH for entry in entries),
    'rounded': (trainings := _trainings(entries)) > 1,
    'malicious': any(entry['malicious'] for entry in entries),
    'cost': True,
    'lost': any('at_chance' in (entry['cost'] or {}) for entry in entries),
    'bounded': any(entry['bound'] is not None for entry in entries),
    'epsilon': any(entry.get('mechanisms') for entry in entries),
    'alarms': any('noise' in entry['honest'] for entry in entries),
    'likelihood': any(entry.get('likelihood') for entry in entries),
    'alone': any('alone' in (entry.get('likelihood') or {}) for entry in entries),
    'flag': True,
  }
  facts = {
    'enough': ENOUGH,
    'trainings': trainings,
    'size': gallery['size'],
    'relation': RELATION,
    'hidden': privacy.RELATIONS[0],
    'delta': privacy.DELTA,
    'points': deploy.AFFORDABLE,
    'level': deploy.LEVEL,
  }
  below = said('leaderboard.levels', size=task['batch_size'])
  below += ''.join(said(f'leaderboard.{name}', **facts) for name, there in known.items() if there)
  meanings = [text(mark(verdict), f': {meaning}') for verdict, meaning in headline.meanings().items()]
  return [
    blocks.Text(f'The task: {described}. {gallery["made"] or EARLIER}', 'note'),
    blocks.Text(below, 'note'),
    blocks.Text(blocks.Html('; '.join(meanings) + '.'), 'note'),
    blocks.Terms([('Control', [said('leaderboard.control')]), *headline.verdict_terms(gallery, task)]),
  ]


def _trainings(entries: Sequence[Mapping[str, Any]]) -> int:
  """Returns how many different weights the entries of one seed are about."""
  weights = together((entry['seed'], entry['fingerprints']['weights']) for entry in entries)
  return max(len(set(of)) for of in weights.values())


def _board(ordered: Sequence[Mapping[str, Any]], pages: str, works: bool) -> blocks.Table:
  """Returns the table of a task: a line per entry, and below it what is known of its run.

  Where no attacker `works` without a defense, what the honest-but-curious ones do is left out.
  """
  malicious, named, bounded = (
    any(entry.get(part) is not None for entry in ordered) for part in ('malicious', 'likelihood', 'bound')
  )
  columns: list[tuple[str, str] | tuple[str, str, str]] = [('defense', '', 'text')]
  if works:
    read = any('pieces' in entry['example'] for entry in ordered)
    columns += [
      ('clearest seen', 'left summed') if read else ('private, seen', 'left'),
      ('recovered', 'first', 'number'),
    ]
  columns += [('accuracy\ncost, points', '', 'number')]
  if works:
    columns += [(mark(level), '', 'number') for level in LEVELS if level != RECOVERED[-1]]
  if named:
    among = {entry['likelihood']['candidates'] for entry in ordered if entry.get('likelihood')}
    columns.append((f'by likelihood,\namong {listed(f"{each:,}" for each in sorted(among))}', '', 'number'))
  columns += [('malicious server’s\nown attacks alone', 'left' + ' first' * (not works), 'number')] * malicious
  columns += [('found at most,\nby DP', '', 'number')] * bounded
  bodies = []
  for place, entry in enumerate(ordered):
    run = blocks.Cell(blocks.Html(f'<div>{_about(entry)}</div>'), span=len(columns))
    seen = _seen(entry, place) if works else ([], [])
    cells = [_method(entry, pages), *seen[0], _cost(entry), *seen[1], *([_named(entry)] if named else [])]
    cells += [_changed(entry)] * malicious + [_bound(entry)] * bounded
    kind = '' if _counted(entry) else 'costly'
    bodies.append(blocks.Body([blocks.Row(cells, kind), blocks.Row([run], 'about')]))
  return blocks.Table(columns, bodies, 'verdicts board')


def _counted(entry: Mapping[str, Any]) -> bool:
  """Returns whether a defense is no more expensive than what is deployed, as far as its cost is known."""
  return entry['cost'] is None or deploy.affordable(entry)


def _method(entry: Mapping[str, Any], pages: str) -> blocks.Cell:
  """Returns the name of a defense, which leads to its page; a chain has a link for each of its parts."""
  shown = method(entry['defense'], entry['published'])
  names = [one.name for one in grammar.parse_chain(entry['text'], 'defense') if one.name != 'none'] if pages else []
  epsilon = privacy.brief(entry)
  text_ = [entry['defense'] != entry['text'] and entry['text'], epsilon and f'{epsilon} per upload']
  if len(names) == 1:
    shown = link(shown, f'{pages}{names[0]}.html')
  elif names:
    text_.append(text('see ', *(link(f'{name} ', f'{pages}{name}.html') for name in names)))
  return blocks.Cell(shown, text_, value=entry['defense'])


def _seen(entry: Mapping[str, Any], place: int) -> tuple[list[blocks.Cell], list[blocks.Cell]]:
  """Returns the cells on honest-but-curious attackers: a picture and what is recovered, and the other levels."""
  honest, example = entry['honest'], entry['example']
  pictures = (
    marked.summary([Piece(**piece) for piece in example['pieces']])
    if 'pieces' in example
    else text(
      image(example['private'], worded(f'Private image of trial {example["trial"]} under {entry["defense"]}.')),
      ' ',
      image(example['seen'], f'What {example["by"]} sees of it: {honest["verdict"]}.'),
    )
  )
  levels = {one['level']: one for one in honest['levels']}
  best = levels.pop(RECOVERED[-1])
  share = percent(best['count'] / honest['n'], 0)
  count = f'{best["count"]} of {honest["n"]} ({_interval(best)})' + ', flagged' * bool(entry['flags'])
  others = [
    blocks.Cell(f'{one["count"]} of {honest["n"]}', [_interval(one)], value=one['high']) for one in levels.values()
  ]
  first, last = entry['rank'] or (0, 0)
  rank = first and f'rank {first}' + f'–{last}' * (first < last)
  small = [count, _failed(honest), rank]
  return [blocks.Cell(pictures), blocks.Cell(tagged('strong', share), small, value=place)], others


def _failed(seen: Mapping[str, Any]) -> str:
  """Returns on how many uploads attacks failed, in words, where a low count rests on these; '' elsewhere."""
  return f'{deploy.lost(seen)} failed' if deploy.failed(seen) else ''


def _changed(entry: Mapping[str, Any]) -> blocks.Cell:
  """Returns what only a malicious server sees."""
  changed = entry['malicious']
  if changed is None:
    return blocks.Cell('not run', value='')
  order = changed['count'] / changed['n'] / 2 - VERDICTS.index(changed['verdict'])
  count = f'{changed["count"]} of {changed["n"]}'
  failed = '' if changed['verdict'] in FAILED else _failed(changed)  # else the count is theirs
  return blocks.Cell(mark(changed['verdict']), list(filter(None, [count, _range(changed), failed])), value=order)


def _bound(entry: Mapping[str, Any]) -> blocks.Cell:
  """Returns the largest probability that differential privacy allows."""
  bound = entry['bound']
  return blocks.Cell('–', value='') if bound is None else blocks.Cell(f'{upwards(100 * bound)} %', value=bound)


def _named(entry: Mapping[str, Any]) -> blocks.Cell:
  """Returns how many originals are first in a list by the likelihood of the upload."""
  found = entry.get('likelihood')
  if found is None:
    return blocks.Cell('not run', value='')
  _, low, high = metrics.proportion_interval(found['identified'], found['n'])
  interval = percent_range({'success_low': low, 'success_high': high})
  alone = found.get('alone') and f'{found["alone"]} by it alone'
  return blocks.Cell(f'{found["identified"]} of {found["n"]}', [interval, alone], value=high)


def _baselines(entry: Mapping[str, Any]) -> list[blocks.Details]:
  """Returns what shows without any upload, which is the same for all defenses of a task."""
  lines = [
    f'{one["baseline"]}: exact {one["exact"]}, recognisable {one["recognisable"]}, re-identified {one["named"]} of '
    f'{one["trials"]}; mean score {number(one["score"])}'
    for one in entry.get('baselines', ())
  ]
  return [blocks.Details('Without any upload', [blocks.Bullets(lines)])] if lines else []


def _cost(entry: Mapping[str, Any]) -> blocks.Cell:
  """Returns what a defense costs, with its interval where there is one."""
  cost = entry['cost']
  if cost is None:
    return blocks.Cell('–' if entry['text'] == 'none' else 'unknown', value='')
  costly = 'leaderboard.costly' if deploy.too_costly(cost) else 'leaderboard.may_be_costly'
  small = [
    deploy.interval(cost),
    'at_chance' in cost and 'at chance',
    not _counted(entry) and said(costly),
  ]
  return blocks.Cell(minus(number(cost['points'])), small, value=cost['points'])


def _about(entry: Mapping[str, Any]) -> blocks.Html:
  """Returns who saw it, the versions, the flags, and how to repeat it."""
  honest, cost, config = entry['honest'], entry['cost'], entry['task']
  others = f' and {len(honest["by"]) - 1} more' if len(honest['by']) > 1 else ''
  known = entry['versions']
  made = [f'{known["autoleak"]}, gradleak {known["gradleak"]}, JAX {known["jax"]}']
  made += [] if entry['seed'] is None else [f'seed {entry["seed"]}']
  made += [noise] if (noise := _alarms(honest)) else []
  seen = text('Seen by ' if _range(honest) else 'Attacked by ', code(honest['by'][0]), others)
  first = text(seen, *(f'\nFlag: {flag}.' for flag in entry['flags']))
  alarms, repeated = _alarms(entry['malicious']), said('leaderboard.not_launched')
  if entry['settings'] is not None:
    weights = ' --weights=FILE' if 'weights' in config['more'] else ''
    check = f'python launch/leaderboard.py --check={entry["name"]} --workdir=FOLDER{weights}'
    flags = ' '.join(f'--{name}={shlex.quote(_plainly(value))}' for name, value in entry['settings'].items())
    names = (html.tagged('code', check), html.tagged('code', 'launch/autoleak.py'), code(flags))
    repeated = text(names[0], ', which runs ', names[1], ' with ', names[2])
  acts = f'It acts at: {", ".join(entry["places"])}. {" ".join(entry["citations"])}'.strip()
  told = [
    blocks.Text(f'{"; ".join(made)}.'),
    cost and blocks.Text(f'Cost: {cost["source"]}.'),
    alarms and blocks.Text(f'Malicious server: {alarms}.'),
    blocks.Text(repeated),
    blocks.Text(text('SHA-256 of its rows: ', code(entry['rows_sha256']))),
    entry['places'] and blocks.Text(acts),
    'mechanisms' in entry and (stated := privacy.guarantee(entry)) and blocks.Text(f'Differential privacy: {stated}.'),
    entry.get('stages') and blocks.Text(_stages(entry['stages'])),
  ]
  title = 'How to repeat it' + (', and what the cost is from' if cost is not None else '')
  return text(first, blocks.Html(html.rendered([blocks.Details(title, [one for one in told if one])])))


def _stages(stages: Sequence[Mapping[str, Any]]) -> str:
  """Returns what the stages of the run took, for all of its defenses, and why some did not attack this one."""
  told = '; '.join(
    f'{one["stage"]}: {number(one["seconds"])} s' + (f' (not here: {one["skipped"]})' if one['skipped'] else '')
    for one in stages
  )
  return f'Stages of the run, for all of its defenses: {told}.'


def _worst(entries: Iterable[Mapping[str, Any]], side: str) -> list[dict[str, Any]]:
  """Returns each defense as one of `cases.worst_case`, of the attackers of one kind of server; its seeds together."""
  made = []
  for name, seeds in together((entry['text'], entry[side]) for entry in entries).items():
    levels = [level['count'] for one in seeds for level in one['levels'] if level['level'] == RECOVERED[-1]]
    verdict = min((one['verdict'] for one in seeds), key=VERDICTS.index)
    made.append({'defense': name, 'verdict': verdict, 'recovered': sum(levels), 'n': sum(one['n'] for one in seeds)})
  return made


def _order(entry: Mapping[str, Any]) -> tuple:
  """Returns what entries are sorted by: the least leak first, among equals the smallest cost, unknown ones last.

  Entries without a rank come after those with one. Behind them come those on which attacks failed, which showed little
  for that reason, and none at last.

  Counts are compared in this order: images recovered, then those exact, re-identified, and above chance. They are
  compared by the upper ends of their intervals. So an entry of more trials, which meets rarer cases, is not ranked
  lower for them.
  """
  honest, cost = entry['honest'], entry['cost']
  high = {one['level']: one['high'] for one in honest['levels']}
  highs = [high[level] for level in ('recognisable', 'exact', 're-identified', 'above chance')]
  points = float('inf') if cost is None else cost['points']
  known = entry['text'] == 'none', entry['rank'] is None, deploy.failed(honest)
  return *known, highs, -VERDICTS.index(honest['verdict']), points, entry['defense'], entry['name']


def _range(found: Mapping[str, Any]) -> str:
  """Returns the interval of the count of the worst verdict; empty where that is no level."""
  return ''.join(_interval(one) for one in found['levels'] if one['level'] == found['verdict'])


def _interval(level: Mapping[str, Any]) -> str:
  return percent_range({'success_low': level['low'], 'success_high': level['high']})


def _alarms(found: Mapping[str, Any] | None) -> str:
  """Returns how often noise came to each level, with exact intervals, in words; empty where the entry does not say."""
  noise = (found or {}).get('noise')
  if noise is None:
    return ''

  def rate(count: int) -> str:
    _, low, high = metrics.proportion_interval(count, noise['n'])
    return f'({percent_range({"success_low": low, "success_high": high})})'

  came = [f'{one["level"]} {one["count"]} {rate(one["count"])}' for one in noise['levels'] if one['count']]
  return f'false alarms, of {noise["n"]}: {", ".join(came) or f"none {rate(0)}"}'


def _plainly(value: Any) -> str:
  return value if isinstance(value, str) else json.dumps(value)
