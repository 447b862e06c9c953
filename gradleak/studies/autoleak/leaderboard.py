"""A leaderboard of defenses: one JSON file per defense, with what AutoLeak saw of it and the settings to run it again.

A folder of entries is a leaderboard; `gradleak.report.leaderboard` makes a page of it.
"""

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from gradleak.audit import load as load_audit
from gradleak.audit.verdict import LEVELS, of_attackers
from gradleak.core import errors
from gradleak.core.storage import (
  damaged,
  description,
  json_lines,
  made_folder,
  plain,
  read_json,
  sealed,
  write_atomically,
)
from gradleak.modalities import Piece, of_config
from gradleak.studies.autoleak import RESULT, TOLD, AutoLeak, folder_of, gathered, rankings
from gradleak.studies.autoleak.costs import Cost, alike, start_of, task_of_entry
from gradleak.studies.autoleak.entry import FINGERPRINTS, FORM, FORMAT, checked, name, number_of, rounded
from gradleak.studies.identification import EXACT, Identification, IdentificationSettings
from gradleak.summary import cases, worst

BITS = 'the rows are not the same bits'
TRAINED = 'the weights, which are trained before, are not the same bits'
ROUNDED = (BITS, TRAINED)  # how sentences begin that versions and processors explain
_WORDS = 300  # characters of a reason
_NAMED = {
  'data': 'private samples',
  'weights': 'weights',
  'public': 'public samples',
  'gallery': 'galleries',
  'start': 'weights in a file',
}
SIDES = {'honest': 'honest-but-curious server', 'malicious': 'malicious server'}
_TASK = ('model', 'dataset', 'split', 'init', 'batch_size', 'rounds_before')
# Entries of an AutoLeak's config that belong to the run, not to the task.
_OF_THE_RUN = {'seed', 'trials', 'key', 'version', 'staged', 'defenses', 'labels', 'knowledge'}


def load(workdir: Any) -> AutoLeak:
  """Returns the `AutoLeak` of a finished run from its work directory.

  Raises:
    UsageError: if the folder holds none of this version, or a damaged file.
  """
  folder = errors.check_path('workdir', workdir)
  path = folder / RESULT
  if not path.is_file():
    raise errors.UsageError(f'{folder} holds no finished AutoLeak: run launch/autoleak.py with this workdir')
  again = 'run launch/autoleak.py with this workdir again, which computes what is missing, or restore it'
  try:
    told = sealed(path, again)
    files = told.pop('files')
    ranks = {one['stage'] for one in told['ranked']}
    run = [one for one in told['stages'] if one['attacks'] and one['targets'] and one['stage'] not in ranks]
    audits = {stage['stage']: load_audit(folder / folder_of(stage['stage'])) for stage in run}
    rows, controls, facts = gathered(audits, {stage['stage']: stage['honest'] for stage in run})
    for name, each in (('rows.jsonl', rows), ('controls.jsonl', controls)):
      if description(json_lines(plain(each))) != files[name]:
        raise damaged(folder / name, 'the stages hold others', again)
    known = {name: told[name] for name in TOLD}
    return AutoLeak(rows=rows, controls=controls, audits=audits, defenses=facts, **known)
  except errors.UsageError:
    raise
  except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
    raise damaged(path, error, again) from error


def entries(
  found: AutoLeak, settings: Mapping[str, Any] | None = None, costs: Mapping[str, Cost | tuple] | None = None
) -> list[dict[str, Any]]:
  """Returns the entries of a run, one per defense, plain JSON; `gradleak.studies.autoleak.entry.FORM` has the fields.

  Args:
    found: what `gradleak.autoleak` returns.
    settings: flags of launch/autoleak.py that repeat the run, see `entry.SETTINGS`; None for a run
      that this program cannot repeat.
    costs: defense -> its `Cost`, or (accuracy that it costs, in percentage points, where this figure is from), and its
      interval (low, high) as a third element where there is one; others are unknown.

  Raises:
    UsageError: for anything else, and for costs of a defense that was not run, or of another one with its label.
  """
  errors.check_instance('found', found, AutoLeak, 'what gradleak.autoleak returns')
  labels, costs = found.config['defenses'], dict(costs or {})
  for label in costs:
    errors.check_choice('defense with a cost', label, labels)
  honest, malicious = (_seen(found, kind) for kind in (True, False))
  common = _common(found)
  made = []
  for label in labels:
    facts, rows = found.defenses[label], [row for row in found.rows if row['defense'] == label]
    entry = {
      **common,
      'defense': label,
      **{fact: facts[fact] for fact in ('text', 'published', 'places', 'citations', 'mechanisms', 'missing_bound')},
      'candidates': min(row['candidates'] for row in rows),
      'honest': honest[label]['counts'],
      'likelihood': _likelihood(found, label),
      'baselines': [dict(one) for one in found.baselines],
      'stages': _stages(found, label),
      'malicious': malicious[label]['counts'] if malicious else None,
      'flags': found.flags[label],
      'bound': found.bounds.get(label),
      'cost': _cost(label, costs[label], facts['text']) if label in costs else None,
      'rows_sha256': digest(rows),
      'example': honest[label]['example'],
      'settings': None if settings is None else {**settings, 'defenses': facts['text']},
    }
    made.append(checked(errors.check_json('the entry', plain(entry)), f'the entry of {label}'))
  return made


def _common(found: AutoLeak) -> dict[str, Any]:
  """Returns what all entries of a run have in common."""
  config, versions = found.config, found.versions
  start = start_of(config) if config.get('rounds_before') else None
  return {
    'format': FORMAT,
    'task': _task(config),
    'seed': config.get('seed'),
    'trials': config['trials'],
    'versions': {'autoleak': config['version'], **{part: versions[part] for part in ('gradleak', 'jax', 'device')}},
    'fingerprints': {part: config.get(f'{part}_fingerprint') for part in FINGERPRINTS}
    | ({} if start is None else {'start': start}),
  }


def _task(config: Mapping[str, Any], settings: Collection[str] = ()) -> dict[str, Any]:
  """Returns the task of a run: what is attacked, without the seed and without `settings` of the run."""
  known = {*_TASK, *_OF_THE_RUN, *settings}
  more = {part: value for part, value in config.items() if part not in known and not part.endswith('_fingerprint')}
  task = {part: config.get(part) for part in _TASK} | {'rounds_before': config.get('rounds_before', 0), 'more': more}
  return rounded(task)


def _seen(found: AutoLeak, honest: bool) -> dict[str, dict[str, Any]]:
  """Returns {defense: its 'counts' and its 'example'} by one kind of server."""
  rows = [row for row in found.rows if row['honest'] == honest]
  if not rows:
    return {}
  named = found.named(honest)
  lines = worst.lines(
    rows,
    cases.worst_case(rows, named),
    lambda row: worst.pair(found.audits[row['stage']], row),
    named,
    of_config(found.config),
  )
  return {
    line['defense']: {
      'counts': {
        **{part: line[part] for part in ('verdict', 'count', 'n', 'by')},
        'failed': level['failed'],
        'levels': [
          {'level': one['level'], 'count': one['count'], 'low': one['success_low'], 'high': one['success_high']}
          for one in level['levels']
        ],
        **_noise(found, honest, line['defense']),
      },
      'example': {
        'private': line['truth'],
        'seen': line['found'],
        'by': ' · '.join(filter(None, [line['example']['attack'], line['example']['adaptive']])),
        'trial': line['example']['trial'],
        **({'pieces': [_piece(one) for one in line['pieces']]} if line['pieces'] else {}),
      },
    }
    for line, level in zip(lines, worst.levels(rows, named), strict=True)
  }


def _piece(one: Piece) -> dict[str, Any]:
  return {'text': one.text, 'right': one.right, 'of': one.of}


def _noise(found: AutoLeak, honest: bool, defense: str) -> dict[str, Any]:
  """Returns the false alarms of all attackers of a defense together, {'noise': …}; {} without control runs.

  Attackers that other defenses of the run met do not count: an entry does not depend on them.
  """
  rows = [row for row in found.rows if row['honest'] == honest and row['defense'] == defense]
  controls = of_attackers([row for row in found.controls if row['honest'] == honest], rows)
  named = rankings.alarms(found.ranked, defense) if honest else ()
  told = [
    {'n': line['n'], 'levels': [{part: one[part] for part in ('level', 'count')} for one in line['levels']]}
    for line in worst.alarms(controls, named)
  ]
  return {'noise': told[0]} if told else {}


def _likelihood(found: AutoLeak, defense: str) -> dict[str, Any] | None:
  """Returns how many originals of a defense the rankings re-identify, some of them alone; None without a ranking.

  The figures beside them are those of the ranking of most uploads.
  """
  of = [one for one in found.ranked if one['defense'] == defense]
  if not of:
    return None
  named = found.named()[defense]
  seen = {
    row['trial']
    for row in found.rows
    if row['honest'] and row['defense'] == defense and row['verdict'] in LEVELS[: LEVELS.index(rankings.NAMED) + 1]
  }
  last, false = max(of, key=lambda one: one['rounds']), rankings.alarms(found.ranked, defense)
  told = {name: last[name] for name in ('candidates', 'rounds', 'model')}
  counts = {'identified': len(named), 'n': last['trials'], 'alone': len(named - seen)}
  return {**counts, **told, 'false': len(false), 'controls': last['controls']}


def _stages(found: AutoLeak, defense: str) -> list[dict[str, Any]]:
  """Returns the stages of a run, each with its seconds for all defenses, and why it did not attack this one."""
  made = []
  for stage in found.stages:
    why = stage['skipped'].get(defense, '') or '; '.join(stage['left_out'].values()) * (not stage['attacks'])
    made.append({'stage': stage['stage'], 'seconds': round(stage['seconds'], 1), 'skipped': why[:_WORDS]})
  return made


def priced(entry: Mapping[str, Any], cost: Cost) -> dict[str, Any]:
  """Returns an entry with another cost; arguments and errors are those of `entries`, for its defense."""
  given = checked(errors.check_json('entry', entry), 'the entry')
  return checked({**given, 'cost': _cost(given['defense'], cost, given['text'])}, f'the entry of {given["defense"]}')


def identified(entry: Mapping[str, Any], found: Identification) -> dict[str, Any] | None:
  """Returns an entry with how many originals a run of `gradleak.identify` ranks first; None for one of another task.

  The run is of the same task, seed, public data and defense; it may have more trials. Entries of earlier versions do
  not say what their gallery holds, which is then not compared. Those from AutoLeak-2 on have rankings of their own.
  """
  given, config = checked(errors.check_json('entry', entry), 'the entry'), found.config
  if number_of(given) > 1:
    return None  # its own ensemble has ranked the candidates
  task = _task(config, (*(field.name for field in dataclasses.fields(IdentificationSettings)), 'listed'))
  if 'gallery' not in given['task']['more']:
    task['more'].pop('gallery', None)
  label = next((label for label, text in config['defenses'].items() if text == given['text']), None)
  wanted = label, EXACT, found.decisive()
  one = next((one for one in found.counts() if (one['defense'], one['copies'], one['statistic']) == wanted), None)
  same = (config.get('seed'), config.get('public_fingerprint')) == (given['seed'], given['fingerprints']['public'])
  if one is None or task != given['task'] or not same:
    return None
  told = {name: one[name] for name in ('identified', 'n', 'candidates', 'rounds', 'model')}
  return checked({**given, 'likelihood': told}, f'the entry of {given["defense"]}')


def _cost(label: str, given: Any, text: str) -> dict[str, Any]:
  at_chance = ''
  if isinstance(given, Cost):
    if given.text not in ('', text):
      raise errors.UsageError(
        f'the cost of {label} is that of a training under {given.text}, and the entry is of {text}: costs are of one '
        'defense'
      )
    at_chance, given = given.at_chance, given[: 3 if given.interval else 2]
  if not isinstance(given, tuple | list) or len(given) not in (2, 3):
    raise errors.UsageError(
      f'the cost of {label} is {errors.shown(given)}, expected (percentage points, where the figure is from) and, '
      'optionally, (low, high)'
    )
  points, source, *interval = given
  points = float(errors.check_number(f'the cost of {label}', points, low=-100, high=100))
  found = {'points': points, 'source': errors.check_text(f'the source of the cost of {label}', source)}
  for one in interval:
    found['interval'] = list(
      errors.check_instance(f'the interval of the cost of {label}', one, (tuple, list), '(low, high)')
    )
  return found | ({'at_chance': at_chance} if at_chance else {})


def digest(rows: Sequence[dict]) -> str:
  """Returns the SHA-256 of rows, in an order that does not depend on theirs, hexadecimal; times are no columns."""
  lines = sorted(json.dumps(plain(row), sort_keys=True) for row in rows)
  return hashlib.sha256('\n'.join(lines).encode()).hexdigest()


def add(folder: Any, entry: Mapping[str, Any], replace: bool = False) -> pathlib.Path:
  """Writes an entry into a folder and returns its path; see `add_all`."""
  return add_all(folder, [entry], replace)[0]


def add_all(folder: Any, entries: Sequence[Mapping[str, Any]], replace: bool = False) -> list[pathlib.Path]:
  """Writes entries into a folder, each as a whole, and returns their paths.

  Args:
    folder: of the leaderboard; made if it does not exist.
    entries: such as `entries` makes. All may be of other weights than those of their task that they replace.
      One without an accuracy cost takes that of the entries of its defense, model and data, however many uploads
      these have: costs are of trainings, not of runs.
    replace: whether one of the same name that differs is overwritten. One that differs in seconds alone stays.

  Raises:
    UsageError: if there is one that differs, and it is not to be replaced; and where entries of one task would be of
      different weights, samples or galleries. Then none is written.
  """
  made = [checked(errors.check_json('entry', entry), 'the entry') for entry in entries]
  held = {path: _read(path) for path in made_folder(folder).glob('*.json')}
  named = {pathlib.Path(folder) / f'{name(entry)}.json': _with_known_cost(entry, held) for entry in made}
  _check_fingerprints({path.stem: entry for path, entry in {**held, **named}.items()})
  for path, entry in named.items():
    then, now = _timeless(held.get(path, entry)), _timeless(entry)
    differing = [part for part in FORM if then.get(part) != now.get(part)]
    if differing and not replace:
      raise errors.UsageError(f'{path} holds an entry that differs in {", ".join(differing)}: replace it, or keep it')
  for path, entry in named.items():
    if path not in held or _timeless(held[path]) != _timeless(entry):
      write_atomically(path, json.dumps(entry, indent=1, ensure_ascii=False) + '\n')
  return list(named)


def _with_known_cost(entry: Mapping[str, Any], held: Mapping[pathlib.Path, Mapping[str, Any]]) -> Mapping[str, Any]:
  """Returns an entry with its cost, that of its file, or that which all of its defense, model and data agree on."""
  task, same = task_of_entry(entry), [path for path, one in held.items() if one['text'] == entry['text']]
  known = {path.stem: held[path]['cost'] for path in same if alike(task, task_of_entry(held[path]))}
  first, *others = list(filter(None, known.values())) or [None]
  agreed = first if all(other == first for other in others) else None
  return {**entry, 'cost': entry['cost'] or known.get(name(entry)) or agreed}


def _timeless(entry: Mapping[str, Any]) -> dict[str, Any]:
  """Returns an entry without seconds, which grow where a run goes on with more defenses."""
  return {**entry, 'stages': [{**stage, 'seconds': 0} for stage in entry.get('stages', ())]}


def read(folder: Any) -> dict[str, dict[str, Any]]:
  """Returns {name: entry} of a folder, checked.

  Raises:
    UsageError: for no folder, and for a file that is damaged, lacks a field, has an unknown one or is of an unknown
      version; it names the file.
  """
  folder = errors.check_path('the folder', folder)
  if not folder.is_dir():
    raise errors.UsageError(f'the folder of the leaderboard is {errors.shown(str(folder))}, which is none')
  found = {path.stem: _read(path) for path in sorted(folder.glob('*.json'))}
  _check_fingerprints(found)
  return found


def _check_fingerprints(entries: Mapping[str, Mapping[str, Any]]) -> None:
  """Raises `UsageError` if entries of one task, seed and version, from AutoLeak-2 on, have different fingerprints.

  Those of other numbers of trials have the same weights; their private samples differ, and with them the gallery. Where
  weights are trained before, their last bits depend on the type of the processor, see `compare`. The public samples of
  this training are then the same. So are the weights of a file that it begins with, for all seeds.
  """
  first: dict[str, tuple[str, Any]] = {}
  for file, entry in entries.items():
    if number_of(entry) < 2:
      continue
    trained = bool(entry['task']['rounds_before'])
    for part in (one for one in entry['fingerprints'] if one != 'weights' or not trained):
      about = [part, entry['task'], entry['versions']['autoleak']]
      about += [] if part == 'start' else [entry['seed']]
      about += [] if part in ('start', 'public' if trained else 'weights') else [entry['trials']]
      other, known = first.setdefault(json.dumps(about, sort_keys=True), (file, entry['fingerprints'][part]))
      if known != entry['fingerprints'][part]:
        raise errors.UsageError(
          f'{file} and {other} are of one task, and of different {_NAMED[part]}: run one of them again where the other '
          'was run, or remove it'
        )


def _read(path: pathlib.Path) -> dict[str, Any]:
  entry = read_json(path, 'restore it, or remove it', dict)
  entry = checked(entry, str(path))
  if path.stem != name(entry):
    raise errors.UsageError(f'{path} holds the entry {name(entry)}: the file needs this name')
  return entry


def compare(entry: Mapping[str, Any], found: AutoLeak) -> list[str]:
  """Returns what differs between an entry and another run of its defense, in sentences; nothing where none differs.

  Settings and data come first, then the counts of each level and of the likelihood. A sentence begins with one of
  `ROUNDED` where previously trained weights, or rows, are not the same bits. Equal bits are promised for the same
  versions on processors of one type, on as many devices.

  Raises:
    UsageError: if the other run is not of the entry's defense.
  """
  then = checked(errors.check_json('entry', entry), 'the entry')
  errors.check_choice('defense of the run', then['defense'], found.config['defenses'])
  now = next(one for one in entries(found) if one['defense'] == then['defense'])
  said = _changes(*({**one['task'], **{p: one[p] for p in ('text', 'seed', 'trials')}} for one in (then, now)))
  fingerprints = [dict(one['fingerprints']) for one in (then, now)]
  for one, other in (fingerprints, fingerprints[::-1]):
    one.pop('start', None) if 'start' not in other else None  # entries of earlier versions do not say it
  trained = all(one['task']['rounds_before'] for one in (then, now)) and not said
  if trained and len({one.pop('weights') for one in fingerprints}) > 1:
    said.append(TRAINED)
  said += [f'fingerprint of {change}' for change in _changes(*fingerprints)]
  said += _changes(*({'version': one['versions']['autoleak']} for one in (then, now)))
  for side, words in SIDES.items():
    said += [f'{words}, {change}' for change in _changes(_counts(then[side]), _counts(now[side]))]
  if number_of(then) > 1:  # before, rankings were runs of their own
    said += [f'likelihood, {change}' for change in _changes(_ranked(then), _ranked(now))]
  if then['rows_sha256'] != now['rows_sha256']:
    said.append('; '.join([BITS, *_changes(then['versions'], now['versions'])]))
  return said


def _counts(side: Mapping[str, Any] | None) -> dict[str, str]:
  if side is None:
    return dict.fromkeys(LEVELS, 'not run')
  return {one['level']: f'{one["count"]} of {side["n"]}' for one in side['levels']}


def _ranked(entry: Mapping[str, Any]) -> dict[str, str]:
  seen = entry['likelihood']
  counts = {'originals first': ('identified', 'n'), 'false matches': ('false', 'controls')}
  return {name: f'{seen[k]} of {seen[n]}' if seen else 'not run' for name, (k, n) in counts.items()}


def _changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
  return [f'{part} was {then[part]}, now {now[part]}' for part in then if then[part] != now[part]]
