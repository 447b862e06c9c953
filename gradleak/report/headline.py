"""The first screen of a page: one sentence, and a line per defense with the verdict of its worst attacker."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from gradleak import metrics
from gradleak.audit.result import AuditResult
from gradleak.audit.verdict import LEVELS, MIN_CANDIDATES, NOTHING, RECOVERED, VERDICTS
from gradleak.metrics import statistics
from gradleak.report import pictures, tables, wording
from gradleak.report.formatting import listed

# Verdict -> what it says of an image, in plain words.
MEANINGS = {
  'exact': 'the image itself',
  'recognisable': 'a picture in which the original can be recognised',
  'identifying': 'no picture, but enough to find the original among others',
  'traces': 'more than nothing, but neither a picture nor an identity',
  'not solved': 'the attack failed as an optimisation: this shows no protection',
  'diverged': 'the attack ended in numbers that are not finite: this shows no protection',
  NOTHING: 'no more than an attacker sees who is given noise',
}
# Verdict -> what so many defenses do.
_DONE = {
  'exact': ('gives images away exactly', 'give images away exactly'),
  'recognisable': ('leaves recognisable pictures', 'leave recognisable pictures'),
  'identifying': ('gives away which image it was', 'give away which image it was'),
  'traces': ('leaves traces', 'leave traces'),
  'not solved': ('is undecided, as attacks on it failed', 'are undecided, as attacks on them failed'),
  'diverged': ('is undecided, as attacks on it failed', 'are undecided, as attacks on them failed'),
  NOTHING: ('hides what these attackers look for', 'hide what these attackers look for'),
}


def sentence(worst: Sequence[dict], config: Mapping[str, Any]) -> str:
  """Returns one sentence on an audit.

  Args:
    worst: from `tables.worst_case`.
    config: the audit's settings; only `batch_size` is read.
  """
  undefended = next((entry for entry in worst if entry['defense'] == 'none'), None)
  defended = [entry for entry in worst if entry['defense'] != 'none']
  if undefended is None:
    start = 'No undefended upload was attacked'
  elif undefended['verdict'] not in RECOVERED:
    start = f'Even without a defense no image is recovered ({undefended["verdict"]}): nothing here speaks for a defense'
  else:
    seen = undefended['recovered']
    batches = config.get('batch_size', 1) > 1  # of which one image decides
    counted = f'{seen} of {undefended["n"]} {"uploads" if batches else "image" if seen == 1 else "images"}'
    start = f'Without a defense, {"images of " if batches else ""}{counted} can be recovered'
  if not defended:
    return f'{start}.'
  groups: dict[tuple[str, str], int] = {}
  for entry in sorted(defended, key=lambda entry: VERDICTS.index(entry['verdict'])):
    words = _DONE[entry['verdict']]
    groups[words] = groups.get(words, 0) + 1
  if len(defended) == 1:
    return f'{start}; the defense {_DONE[defended[0]["verdict"]][0]}.'
  told = [f'{count} {words[count > 1]}' for words, count in groups.items()]
  return f'{start}; of {len(defended)} defenses, {listed(told)}.'


def recovering(worst: Sequence[dict]) -> str:
  """Returns a clause: under how many defenses images are recovered; empty for none.

  Args:
    worst: entries of `tables.worst_case`.
  """
  defended = [entry for entry in worst if entry['defense'] != 'none']
  if not defended:
    return ''
  leaking = sum(entry['verdict'] in RECOVERED for entry in defended)
  if len(defended) == 1:
    return f'images are {"" if leaking else "not "}recovered under the one defense'
  return f'images are recovered under {leaking} of {len(defended)} defenses'


def lines(
  rows: Sequence[dict],
  worst: Sequence[dict],
  picture: Callable[[dict], tuple[np.ndarray, np.ndarray]],
  **more: Mapping[str, Any],
) -> list[dict[str, Any]]:
  """Returns what the first screen shows of each defense, in the order of `worst`.

  Args:
    rows: of an audit.
    worst: from `tables.worst_case`.
    picture: row -> (private images, reconstructions) of it, [B, H, W, C].
    **more: name -> {defense: what else stands in its line}.

  Returns:
    Dicts: 'defense', 'verdict', 'meaning', 'count' of 'n' trials of that verdict or a stronger one with the exact 95 %
    interval 'success_low' to 'success_high', 'by' (the attackers that reach it, see `tables.attackers`), 'example' (the
    row with the highest SSIM among these), 'truth' and 'found' (its pictures, data URIs; of a batch the pair with the
    highest PSNR), and `more`.
  """
  of = tables.grouped(rows, 'defense')
  return [
    {
      **_line(entry, of[entry['defense'],], picture),
      **{name: told.get(entry['defense']) for name, told in more.items()},
    }
    for entry in worst
  ]


def _line(entry: dict, rows: list[dict], picture: Callable) -> dict[str, Any]:
  verdict, n = entry['verdict'], entry['n']
  at = [row for row in rows if row['verdict'] == verdict]
  count = entry['reached'][verdict] if verdict in LEVELS else len({row['trial'] for row in at})
  _, low, high = statistics.proportion_interval(count, n)
  example = max(at, key=_score)
  truth, found = _nearest(*picture(example))
  return {
    'defense': entry['defense'],
    'verdict': verdict,
    'meaning': _meaning(verdict, gallery(rows, {})),
    'count': count,
    'n': n,
    'success_low': low,
    'success_high': high,
    'by': tables.attackers(at),
    'truth': pictures.data_uri(truth),
    'found': pictures.data_uri(found),
    'example': example,
  }


def _meaning(verdict: str, among: Mapping[str, Any]) -> str:
  if verdict == 'traces' and not among['enough']:
    return f'more than nothing, but no picture; identity was not judged: {MIN_CANDIDATES} candidates are needed'
  return MEANINGS[verdict]


def gallery(rows: Sequence[dict], config: Mapping[str, Any]) -> dict[str, Any]:
  """Returns 'size', the least number of candidates, 'chance', in per cent, 'enough', and what it is made of, 'said'.

  The chance is that of one attacker of an upload, of which one image is found at least: of each of its images one in
  the candidates.

  Args:
    rows: of an audit.
    config: its settings.
  """
  count = min((row['candidates'] for row in rows), default=0)
  images = rows[0].get('batch_size', 1) if rows else 1
  return {
    'size': count,
    'chance': 100 * (1 - (count / (count + 1)) ** images),
    'enough': count >= MIN_CANDIDATES,
    'said': wording.gallery(config),
  }


def pair(result: AuditResult, row: dict) -> tuple[np.ndarray, np.ndarray]:
  """Returns the private images and the reconstructions of a row of an audit, [B, H, W, C]."""
  case = tables.case(row)
  trials = [other['trial'] for other in result.rows if tables.case(other) == case]
  return result.truth[row['trial']], result.reconstructions[case][trials.index(row['trial'])]


def _nearest(truth: np.ndarray, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Returns the pair of a batch with the highest PSNR."""
  psnr = np.asarray(metrics.psnr(np.asarray(images, np.float32), np.asarray(truth, np.float32)))
  best = int(np.argmax(np.where(np.isnan(psnr), -np.inf, psnr)))
  return truth[best], images[best]


def _score(row: dict) -> float:
  return -np.inf if row['ssim'] is None else row['ssim']
