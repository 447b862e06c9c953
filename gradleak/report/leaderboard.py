"""The page of a leaderboard: per task one table of defenses, the least leak first, with the pictures that were seen."""

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from gradleak.audit.verdict import LEVELS, RECOVERED, VERDICTS
from gradleak.core import errors, storage
from gradleak.report import headline, page, pictures
from gradleak.report.autoleak import ENOUGH
from gradleak.report.formatting import percent_range, upwards
from gradleak.studies.autoleak import leaderboard
from gradleak.studies.autoleak.bounds import RELATION

# Of entries that do not say what their gallery holds.
EARLIER = (
  'These entries are of an earlier version. It took all classes for one kind, also faces and images of none, and its '
  'bar of SSIM depended on the number of attacked images: a new run may judge differently.'
)


def render_leaderboard(entries: Mapping[str, Mapping[str, Any]]) -> str:
  """Returns the leaderboard as one HTML page that loads nothing; its script sorts the tables, nothing else.

  Args:
    entries: name -> entry, from `gradleak.studies.autoleak.leaderboard.read`.

  Raises:
    UsageError: if there is none.
  """
  if not entries:
    raise errors.UsageError('the leaderboard has no entries: add some by launch/leaderboard.py --add=WORKDIR')
  tasks: dict[str, list[dict[str, Any]]] = {}
  for name, entry in entries.items():
    tasks.setdefault(json.dumps(entry['task'], sort_keys=True), []).append({'name': name, **entry})
  told = [_task(entries) for entries in tasks.values()]
  return (
    page.environment()
    .get_template('leaderboard.html.j2')
    .render(
      tasks=sorted(told, key=lambda one: (not one['works'], one['task']['dataset'], one['task']['model'], one['said'])),
      symbols=pictures.SYMBOLS,
      meanings=headline.MEANINGS,
      levels=LEVELS,
      enough=ENOUGH,
      relation=RELATION,
      defenses=len({entry['text'] for entry in entries.values()} - {'none'}),
    )
  )


def write_leaderboard(folder: Any, path: Any) -> None:
  """Writes the page of a folder of entries to a file, all of it or nothing; the file's folder is made."""
  text = render_leaderboard(leaderboard.read(folder))
  path = errors.check_path('the page', path)
  storage.made_folder(path.parent)
  storage.write_atomically(path, text)


def _task(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
  """Returns what the page shows of the entries of one task."""
  task = entries[0]['task']
  said = [
    f'split {task["split"]}' if task['split'] else '',
    f'weights drawn by init={task["init"]}' if task['init'] else '',
    f'{task["batch_size"]} private image{"s" if task["batch_size"] > 1 else ""} behind an upload',
    f'{task["rounds_before"]} round{"" if task["rounds_before"] == 1 else "s"} of training before',
    *(f'{name}={_plainly(value)}' for name, value in task['more'].items() if name != 'gallery'),
  ]
  ordered = sorted(entries, key=_order)
  sides = {side: [_worst(entry, side) for entry in ordered if entry[side]] for side in ('honest', 'malicious')}
  found = headline.gallery([{**task, 'candidates': entry['candidates']} for entry in entries], task['more'])
  return {
    'task': task,
    'said': ', '.join(filter(None, said)),
    'found': headline.sentence(sides['honest'], task),
    'works': any(one['defense'] == 'none' and one['recovered'] for one in sides['honest']),
    'changed': headline.recovering(sides['malicious']),
    'lines': [{**entry, 'place': place, **_shown(entry)} for place, entry in enumerate(ordered)],
    'malicious': any(entry['malicious'] for entry in entries),
    'gallery': {**found, 'said': found['said'] or EARLIER},
    'few': any(entry['trials'] < ENOUGH for entry in entries),
    'alarms': any('noise' in entry['honest'] for entry in entries),
    'lost': any('at_chance' in (entry['cost'] or {}) for entry in entries),
    'bounded': any(entry['bound'] is not None for entry in entries),
  }


def _worst(entry: Mapping[str, Any], side: str) -> dict[str, Any]:
  """Returns an entry as one of `cases.worst_case`, of the attackers of one kind of server."""
  found = entry[side]
  recovered = next(step['count'] for step in found['steps'] if step['level'] == RECOVERED[-1])
  return {'defense': entry['text'], 'verdict': found['verdict'], 'recovered': recovered, 'n': found['n']}


def _order(entry: Mapping[str, Any]) -> tuple:
  """Returns what entries are sorted by: the least leak first, among equals the smallest cost, unknown ones last.

  Counts are compared by the upper ends of their intervals, so that an entry of more trials, which meets rarer cases, is
  not the worse for it: images recovered, then those exact, identified, and with traces.
  """
  honest, cost = entry['honest'], entry['cost']
  high = {step['level']: step['high'] for step in honest['steps']}
  highs = [high[level] for level in ('recognisable', 'exact', 'identifying', 'traces')]
  points = float('inf') if cost is None else cost['points']
  return highs, -VERDICTS.index(honest['verdict']), points, entry['defense'], entry['name']


def _shown(entry: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the texts of an entry, and a number that its malicious server is sorted by."""
  bound, malicious = entry['bound'], entry['malicious']
  return {
    'bound_said': None if bound is None else f'{upwards(100 * bound)} %',
    'alarms': _alarms(entry['honest']),
    'malicious_alarms': _alarms(entry['malicious']),
    'ranges': {side: _range(entry[side]) for side in ('honest', 'malicious')},
    'malicious_order': malicious and malicious['count'] / malicious['n'] / 2 - VERDICTS.index(malicious['verdict']),
    'settings_said': ' '.join(
      f'--{name}={shlex.quote(_plainly(value))}' for name, value in (entry['settings'] or {}).items()
    ),
  }


def _range(found: Mapping[str, Any] | None) -> str:
  """Returns the interval of the count of the worst verdict; empty where that is no step."""
  steps = [step for step in found['steps'] if step['level'] == found['verdict']] if found else []
  return ''.join(percent_range({'success_low': step['low'], 'success_high': step['high']}) for step in steps)


def _alarms(found: Mapping[str, Any] | None) -> str:
  """Returns how often noise came to a step, in words; empty where the entry does not say."""
  noise = (found or {}).get('noise')
  if noise is None:
    return ''
  came = [f'{step["level"]} {step["count"]}' for step in noise['steps'] if step['count']]
  return f'false alarms, of {noise["n"]}: {", ".join(came) or "none"}'


def _plainly(value: Any) -> str:
  return value if isinstance(value, str) else json.dumps(value)
