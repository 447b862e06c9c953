"""The form of a leaderboard's entry: its fields, its name, and what is checked of one that someone else wrote."""

import base64
import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from gradleak.audit.verdict import LEVELS, VERDICTS
from gradleak.core import errors, grammar, statistics
from gradleak.federated import ClientSettings
from gradleak.modalities import of_config
from gradleak.studies.autoleak.ensemble import VERSION

FORMAT = 2  # of the files
FAMILY, _, _NEWEST = VERSION.rpartition('-')
# Words of format 1 -> those of today, where they are levels, verdicts or names of fields.
_FORMER = {'identifying': 're-identified', 'traces': 'above chance', 'not solved': 'inconclusive', 'steps': 'levels'}
FINGERPRINTS = ('data', 'weights', 'public', 'gallery')
# What a run is repeated with: flags of launch/autoleak.py, without folders and files of a machine.
SETTINGS = (
  *(
    'dataset',
    'split',
    'image_size',
    'channels',
    'largest_pixel',
    'label',
    'schema',
    'tokeniser',
    'length',
    'trials',
    'public',
    'rounds_before',
    'init',
    'model',
    'torch_model',
    'torch_mean',
    'torch_std',
  ),
  *(field.name for field in dataclasses.fields(ClientSettings)),
  *('batch_size', 'defenses', 'x64', 'seed', 'staged', 'malicious'),
)
_WORDS = {
  dict: 'an object', list: 'a list', str: 'a text', int: 'an integer', float: 'a number', bool: 'true or false',
}  # fmt: skip
_PICTURE = re.compile(r'data:image/png;base64,[A-Za-z0-9+/]+={0,2}')
_MOST = 2**53  # of a number: what is larger is no count and no figure
_LONGEST = 2000  # characters of a text
_LONGEST_PICTURE = 10**6
_DEEPEST = 6  # objects and lists within each other, of what has no form of its own, as the schema of a table
_CLOSE = 1e-9  # of an interval that is written to one that is computed


class _Maybe(NamedTuple):
  """A form, or null."""

  form: Any


class _Optional(NamedTuple):
  """A form of a field that may be absent."""

  form: Any


class _Within(NamedTuple):
  """Numbers of a type in an interval; without one they are what float64 holds exactly."""

  form: type
  low: float = -_MOST
  high: float = _MOST


class _Each(NamedTuple):
  """A form of each value of an object."""

  form: Any


_COUNT = _Within(int, 0)
_POINTS = _Within(float, -100, 100)
_GALLERY = {
  'by_class': bool,
  **dict.fromkeys(('images', 'left_out'), _Each(_COUNT)),
  **dict.fromkeys(('flat', 'public'), _COUNT),
  'shared': _Optional(_COUNT),
}
_SIDE = {
  'verdict': str,
  'count': _COUNT,
  'n': _COUNT,
  'by': [str],
  'failed': _Optional(_COUNT),  # uploads of no level on which an attack failed; in entries from 0.3.0 on
  'levels': [{'level': str, 'count': _COUNT, 'low': _Within(float, 0, 1), 'high': _Within(float, 0, 1)}],
  'noise': _Optional({'n': _COUNT, 'levels': [{'level': str, 'count': _COUNT}]}),  # false alarms: of control runs
}
# Field -> its form: a type, an object with exactly these fields, or a list of one form.
FORM = {
  'format': int,
  'defense': str,
  'text': str,
  'published': str,
  'places': [str],
  'citations': [str],
  'task': {
    'model': str,
    'dataset': str,
    'split': _Maybe(str),
    'init': _Maybe(str),
    'batch_size': _Within(int, 1),
    'rounds_before': _COUNT,
    'more': dict,
  },
  'seed': _Maybe(_COUNT),
  'trials': _Within(int, 1),
  'candidates': _COUNT,
  'versions': dict.fromkeys(('autoleak', 'gradleak', 'jax', 'device'), str),
  'honest': _SIDE,
  'malicious': _Maybe(_SIDE),
  'flags': [str],
  'bound': _Maybe(_Within(float, 0, 1)),
  # Gaussian mechanisms of its uploads, and why noise has no ε; in entries from 0.3.0 on.
  'mechanisms': _Optional([{'noise': _Within(float, 0), 'unit': str, 'releases': _Within(int, 1)}]),
  'missing_bound': _Optional(_Maybe(str)),
  'cost': _Maybe({'points': _POINTS, 'source': str, 'interval': _Optional([_POINTS]), 'at_chance': _Optional(str)}),
  # Originals at rank 1 of a list by the likelihood of the upload (`studies.identification`): in AutoLeak-1 a run of its
  # own.
  # From AutoLeak-2 on it is part of the ensemble; null where no ranking could be run. It then has false matches among
  # control runs, and how many originals no picture re-identifies.
  'likelihood': _Optional(
    _Maybe(
      {
        'identified': _COUNT,
        'n': _Within(int, 1),
        'candidates': _Within(int, 1),
        'rounds': _Within(int, 1),
        'model': str,
        **{name: _Optional(_COUNT) for name in ('alone', 'false', 'controls')},
      }
    )
  ),
  'baselines': _Optional(
    [
      {
        'baseline': str,
        **dict.fromkeys(('score', 'likeness'), _Within(float)),
        **dict.fromkeys(('exact', 'recognisable', 'named', 'trials'), _COUNT),
      }
    ]
  ),
  'stages': _Optional([{'stage': str, 'seconds': _Within(float, 0), 'skipped': str}]),
  # 'start' is that of the weights of a file, where they are trained before (`costs.start_of`).
  'fingerprints': {**dict.fromkeys(FINGERPRINTS, _Maybe(str)), 'start': _Optional(str)},
  'rows_sha256': str,
  # Pictures; and of samples that people read, the parts of what was seen.
  'example': {
    'private': str,
    'seen': str,
    'by': str,
    'trial': _COUNT,
    'pieces': _Optional([{'text': str, 'right': _Maybe(bool), 'of': str}]),
  },
  'settings': _Maybe(dict),
}


def name(entry: Mapping[str, Any]) -> str:
  """Returns the name of an entry, of its file without '.json'; it follows from defense, task, trials and seed."""
  identity = json.dumps([entry[part] for part in ('text', 'task', 'trials', 'seed')], sort_keys=True)
  slug = re.sub(r'[^a-z0-9]+', '-', entry['defense'].lower()).strip('-')[:60]
  return f'{slug}-{hashlib.sha256(identity.encode()).hexdigest()[:8]}'


def rounded(value: Any) -> Any:
  """Returns plain values with floats of 12 digits: the last ones of a column's deviation may be a processor's."""
  if isinstance(value, dict):
    return {part: rounded(one) for part, one in value.items()}
  if isinstance(value, list | tuple):
    return [rounded(one) for one in value]
  return float(f'{value:.12g}') if isinstance(value, float) else value


def checked(entry: Any, where: str) -> dict[str, Any]:
  """Returns an entry, in the words of today.

  Args:
    entry: what should be one, read from JSON.
    where: it is from, such as a file.

  Raises:
    UsageError: if it is none, which says where and why.
  """
  if not isinstance(entry, dict):
    raise errors.UsageError(f'{where} holds no entry of a leaderboard')
  if entry.get('format') == 1:
    entry = (
      {'published': ''}
      | entry
      | {side: _renewed(entry.get(side)) for side in ('honest', 'malicious')}
      | {'format': FORMAT}
    )
  if entry.get('format') != FORMAT:
    raise errors.UsageError(
      f'{where} has the format {errors.shown(entry.get("format"))}, and this version of gradleak reads 1 and {FORMAT}'
    )
  if wrong := _misfit(entry, FORM) or _contradiction(entry):
    raise errors.UsageError(f'{where} is no entry of a leaderboard: {wrong}')
  return entry | {'task': rounded(entry['task'])}


def _renewed(value: Any, name: str = '', deep: int = _DEEPEST + 1) -> Any:
  """Returns what an entry of format 1 holds of a kind of server as one of today would: `name` is that of its field."""
  if isinstance(value, dict) and deep:
    return {_FORMER.get(part, part): _renewed(one, part, deep - 1) for part, one in value.items()}
  if isinstance(value, list) and deep:
    return [_renewed(one, name, deep - 1) for one in value]
  return _FORMER.get(value, value) if name in ('level', 'verdict') and isinstance(value, str) else value


def _misfit(value: Any, form: Any, path: str = 'the file') -> str:
  """Returns the first place where a value is not of a form, in words; '' if it is."""
  if isinstance(form, _Maybe):
    return '' if value is None else _misfit(value, form.form, path)
  if isinstance(form, _Optional):
    return _misfit(value, form.form, path)
  if form in (int, float):
    return _misfit(value, _Within(form), path)
  if isinstance(form, _Within):
    fits = isinstance(value, int if form.form is int else int | float) and not isinstance(value, bool)
    if fits and form.low <= value <= form.high:
      return ''
    within = f' in [{form.low}, {form.high}]' if (form.low, form.high) != (-_MOST, _MOST) else ''
    return f'{path} is {errors.shown(value)}, expected {_WORDS[form.form]}{within}'
  if isinstance(form, _Each):
    return _misfit(value, dict, path) or next(
      filter(None, (_misfit(one, form.form, path) for one in value.values())), ''
    )
  kind: Any = form if isinstance(form, type) else type(form)
  if not isinstance(value, kind):
    return f'{path} is {errors.shown(value)}, expected {_WORDS[kind]}'
  if kind is str:
    return _unreadable(value, path)
  if form is dict:
    return _unplain(value, path, _DEEPEST)
  if isinstance(form, list):
    return next(filter(None, (_misfit(one, form[0], f'an item of {path}') for one in value)), '')
  if isinstance(form, dict):
    needed = {part for part, of in form.items() if not isinstance(of, _Optional)}
    for word, fields in (('lacks', needed - value.keys()), ('has the unknown', value.keys() - form.keys())):
      if fields:
        return f'{path} {word} field{"s" if len(fields) > 1 else ""} {", ".join(sorted(map(repr, fields)))}'
    return next(filter(None, (_misfit(value[part], form[part], part) for part in form if part in value)), '')
  return ''


def _unreadable(text: str, path: str) -> str:
  """Returns why a text cannot stand on a page, in words; '' if it can."""
  most = _LONGEST_PICTURE if text.startswith('data:') else _LONGEST
  if len(text) <= most and (not text or text.replace('\xa0', ' ').isprintable()):  # lone surrogates are not printable
    return ''
  return f'{path} is {errors.shown(text)}, expected printable text of at most {most} characters'


def _unplain(value: Any, path: str, deep: int) -> str:
  """Returns the first place where a value is no number, text, truth value or null in lists and objects, in words."""
  if value is None or isinstance(value, bool):
    return ''
  if isinstance(value, str):
    return _unreadable(value, path)
  if isinstance(value, int | float):
    return _misfit(value, float, path)
  if not deep or not isinstance(value, list | dict):
    return f'{path} is {errors.shown(value)}, expected plain values'
  named = value.items() if isinstance(value, dict) else ((f'an item of {path}', one) for one in value)
  said = (_unreadable(name, f'a name in {path}') or _unplain(one, name, deep - 1) for name, one in named)
  return next(filter(None, said), '')


def _contradiction(entry: dict[str, Any]) -> str:
  """Returns what of an entry of the right form cannot be, in words; '' for nothing."""
  version = entry['versions']['autoleak']
  if not re.fullmatch(rf'{FAMILY}-[1-9]\d{{0,3}}', version) or int(version.rpartition('-')[2]) > int(_NEWEST):
    return f'its version is {errors.shown(version)}, and this version of gradleak knows those up to {VERSION}'
  for side in ('honest', 'malicious'):
    if entry[side] is not None and (wrong := _miscounted(entry[side], entry['trials'])):
      return f'{side}: {wrong}'
  if not entry['defense'] or not entry['text']:
    return 'its defense has no name'
  if wrong := _unshowable(entry):
    return wrong
  if not re.fullmatch('[0-9a-f]{64}', entry['rows_sha256']):
    return f'rows_sha256 is {errors.shown(entry["rows_sha256"])}, expected 64 hexadecimal digits'
  for picture in ('private', 'seen'):
    if not _is_picture(entry['example'][picture]):
      return f'the picture {picture} is {errors.shown(entry["example"][picture])}, expected a PNG data URI'
  if entry['example']['trial'] >= entry['trials']:
    return f'its example is of trial {entry["example"]["trial"]}, and there are {entry["trials"]}'
  cost = entry['cost'] or {}
  if 'interval' in cost and not _around(cost['interval'], cost['points']):
    return f'the interval of the cost is {errors.shown(cost["interval"])}, expected [low, high] around {cost["points"]}'
  if (named := entry.get('likelihood')) and named['identified'] > named['n']:
    return f'{named["identified"]} of {named["n"]} are identified by likelihood'
  if number_of(entry) > 1 and (wrong := _lacking(entry)):
    return wrong
  settings = entry['settings'] or {}
  for setting, value in settings.items():
    if setting not in SETTINGS or not isinstance(value, str | int | float):
      return f'the setting {errors.shown(setting)} is {errors.shown(value)}, expected a flag of launch/autoleak.py'
  if settings and settings.get('defenses') != entry['text']:
    return f'its settings repeat {errors.shown(settings.get("defenses"))}, and its defense is {entry["text"]}'
  return ''


def _unshowable(entry: dict[str, Any]) -> str:
  """Returns what of an entry no page can show, in words; '' for nothing."""
  try:
    of_config(entry['task']['more'])
    grammar.parse_chain(entry['text'], 'defense')
  except errors.UsageError as error:
    return str(error)
  gallery = entry['task']['more'].get('gallery')
  if gallery is not None and (wrong := _misfit(gallery, _GALLERY, 'the gallery')):
    return wrong
  return 'its bound is 0, and any guess may be right' if entry['bound'] == 0 else ''


def number_of(entry: Mapping[str, Any]) -> int:
  """Returns the number of the version of AutoLeak that an entry is of."""
  return int(entry['versions']['autoleak'].rpartition('-')[2])


def _lacking(entry: dict[str, Any]) -> str:
  """Returns what an entry from AutoLeak-2 on lacks, or what of its rankings cannot be, in words; '' for nothing."""
  for part in ('likelihood', 'baselines', 'stages'):
    if part not in entry:
      return f'an entry of {entry["versions"]["autoleak"]} has the field {part}'
  for side in ('honest', 'malicious'):
    if entry[side] is not None and not entry[side].get('noise', {}).get('n'):
      return f'{side} has no line of noise: false alarms are counted in each entry of {entry["versions"]["autoleak"]}'
  named = entry['likelihood']
  if named is None:
    return ''
  levels = {one['level']: one['count'] for one in entry['honest']['levels']}
  if missing := {'alone', 'false', 'controls'} - named.keys():
    return f'likelihood lacks {sorted(missing)[0]}'
  if named['n'] != entry['trials'] or named['identified'] > levels['re-identified']:
    return (
      f'{named["identified"]} of {named["n"]} are identified by likelihood, and {levels["re-identified"]} of '
      f'{entry["trials"]} re-identified'
    )
  if named['alone'] > named['identified'] or named['false'] > named['controls']:
    return f'likelihood has {errors.shown(named)}'
  return ''


def _is_picture(text: str) -> bool:
  if not _PICTURE.fullmatch(text):
    return False
  try:
    return base64.b64decode(text.partition(',')[2], validate=True).startswith(b'\x89PNG\r\n\x1a\n')
  except ValueError:
    return False


def _around(interval: list[float], points: float) -> bool:
  return len(interval) == 2 and interval[0] - _CLOSE <= points <= interval[1] + _CLOSE


def _unordered(counted: list[dict[str, Any]], n: int, among: str) -> str:
  """Returns what of the counts of levels among `n` cannot be, in words; '' for nothing."""
  levels, counts = [one['level'] for one in counted], [one['count'] for one in counted]
  if tuple(levels) != LEVELS:
    return f'its levels are {errors.shown(levels)}, expected {", ".join(LEVELS)}'
  if counts != sorted(counts) or not 0 <= counts[0] <= counts[-1] <= n:
    return f'counts of {counts} among {among}, expected counts that rise from level to level'
  return ''


def _miscounted(side: dict[str, Any], trials: int) -> str:
  """Returns what of the counts by one kind of server cannot be, in words; '' for nothing."""
  levels, n = side['levels'], side['n']
  counts = [level['count'] for level in levels]
  if wrong := _unordered(levels, n, f'{n} of {trials} trials'):
    return wrong
  if n != trials or n < 1 or side.get('failed', 0) > n - counts[-1]:
    return f'counts of {counts} among {n} of {trials} trials'
  if not side['by']:
    return 'it names no attacker'
  if 'noise' in side and (wrong := _unordered(side['noise']['levels'], side['noise']['n'], 'the runs on noise')):
    return wrong
  for level in levels:
    _, low, high = statistics.proportion_interval(level['count'], n)
    if not math.isclose(low, level['low'], abs_tol=_CLOSE) or not math.isclose(high, level['high'], abs_tol=_CLOSE):
      return f'the interval of {level["level"]} is {level["low"]} to {level["high"]}, expected {low} to {high}'
  worst = next((level for level in levels if level['count']), None)
  verdict, count = side['verdict'], side['count']
  if worst is None and verdict in VERDICTS[len(LEVELS) :] and 0 < count <= n:
    return ''
  if worst is None or (verdict, count) != (worst['level'], worst['count']):
    return f'the worst verdict is {errors.shown(verdict)} in {count}, which does not follow from its levels'
  return ''
