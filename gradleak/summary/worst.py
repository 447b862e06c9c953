"""The worst attacker of each defense: one line each, the rates of every level, and how often noise comes there."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from gradleak.audit.result import AuditResult
from gradleak.audit.verdict import CONTROL, LEVELS, MIN_CANDIDATES, false_alarms
from gradleak.modalities import Modality, of_rows
from gradleak.summary import cases
from gradleak.summary.shown import data_uri

LIKELIHOOD = 'likelihood'  # the attacker who re-identifies without a picture


def lines(
  rows: Sequence[dict],
  worst: Sequence[dict],
  picture: Callable[[dict], tuple[np.ndarray, np.ndarray]],
  named: Mapping[str, Collection[int]] | None = None,
  kind: Modality | None = None,
  **more: Mapping[str, Any],
) -> list[dict[str, Any]]:
  """Returns what the first screen shows of each defense, in the order of `worst`.

  Args:
    rows: of an audit.
    worst: from `cases.worst_case`.
    picture: row -> (private images, reconstructions) of it, [B, H, W, C].
    named: defense -> the trials that are re-identified without a picture: by `LIKELIHOOD`.
    kind: the modality, where its samples need more than the columns of rows tell.
    **more: name -> {defense: what else stands in its line}.

  Returns:
    Dicts: 'defense', 'verdict', 'count' of 'n' trials of that verdict or a stronger one with the 95 % interval
    (exact, or see `cases.intervals`) 'success_low' to 'success_high', 'by' (the attackers that reach it, see
    `cases.attackers`), 'example' (the row with the highest SSIM among these), 'truth' and 'found' (its pictures, data
    URIs; of a batch the pair with the highest PSNR), 'pieces' (of samples that people read, what was found; else []),
    and `more`.
  """
  of = cases.grouped(rows, 'defense')
  return [
    {
      **_line(
        entry, of[entry['defense'],], picture, set((named or {}).get(entry['defense'], ())), kind or of_rows(rows)
      ),
      **{name: told.get(entry['defense']) for name, told in more.items()},
    }
    for entry in worst
  ]


def _line(entry: dict, rows: list[dict], picture: Callable, named: Collection[int], kind: Modality) -> dict[str, Any]:
  verdict, n = entry['verdict'], entry['n']
  at = [row for row in rows if row['verdict'] == verdict]
  by = cases.attackers(at)
  if named and verdict == LEVELS[2]:
    by = [LIKELIHOOD, *by] if len(named) >= len({row['trial'] for row in at}) else [*by, LIKELIHOOD]
    at = at or [row for row in rows if row['trial'] in named]
  count = entry['reached'][verdict] if verdict in LEVELS else len({row['trial'] for row in at})
  _, low, high = cases.intervals(rows).proportion_interval(count, n)
  example = max(at, key=_likeness)
  pair_of = _nearest(kind, *picture(example))
  truth, found = map(kind.picture, pair_of)
  return {
    'defense': entry['defense'],
    'verdict': verdict,
    'count': count,
    'n': n,
    'success_low': low,
    'success_high': high,
    'by': by,
    'truth': data_uri(truth),
    'found': data_uri(found),
    'pieces': [] if kind.marked is None else list(kind.marked(pair_of[1], pair_of[0])),
    'example': example,
  }


def candidates(rows: Sequence[dict]) -> dict[str, Any]:
  """Returns 'size', the least number of candidates, 'chance', in per cent, and whether they are 'enough'.

  The chance is that of one attacker of an upload to find at least one image. For each of its images, the chance is one
  in the candidates.

  Args:
    rows: of an audit.
  """
  count = min((row['candidates'] for row in rows), default=0)
  images = rows[0].get('batch_size', 1) if rows else 1
  return {'size': count, 'chance': 100 * (1 - (count / (count + 1)) ** images), 'enough': count >= MIN_CANDIDATES}


def pair(result: AuditResult, row: dict) -> tuple[np.ndarray, np.ndarray]:
  """Returns the private images and the reconstructions of a row of an audit, [B, H, W, C]."""
  case = cases.case(row)
  trials = [other['trial'] for other in result.rows if cases.case(other) == case]
  return result.truth[row['trial']], result.reconstructions[case][trials.index(row['trial'])]


def levels(rows: Sequence[dict], named: Mapping[str, Collection[int]] | None = None) -> list[dict[str, Any]]:
  """Returns, per defense, its worst-case attack success rate at each level.

  Args:
    rows: of AutoLeak, by honest-but-curious servers or by malicious ones.
    named: defense -> the trials that are re-identified without a picture.

  Returns:
    Dicts: 'defense', 'n' trials, 'failed' of them (see `cases.worst_case`), and 'levels': one dict per level, from
    'exact' to 'above chance', with 'level', 'count' and the 95 % interval of the fraction, 'success_low' to
    'success_high' (exact, or see `cases.intervals`).
  """
  found, rule = [], cases.intervals(rows)
  for entry in cases.worst_case(rows, named or {}):
    rates = []
    for level in LEVELS:
      _, low, high = rule.proportion_interval(entry['reached'][level], entry['n'])
      rates.append({'level': level, 'count': entry['reached'][level], 'success_low': low, 'success_high': high})
    found.append({**{part: entry[part] for part in ('defense', 'n', 'failed')}, 'levels': rates})
  return found


def alarms(controls: Sequence[dict], named: Collection[int] = ()) -> list[dict[str, Any]]:
  """Returns how often noise comes to each level: the `levels` of the control runs, one dict, or none without any.

  Each control run is judged as if it were an upload, by the others (`audit.verdict.false_alarms`). As of an upload, the
  worst counts of all attackers that met the same noise, adaptive attacks, restarts and rankings included.

  Args:
    controls: control runs of AutoLeak, by honest-but-curious servers or by malicious ones.
    named: the control runs that are re-identified without a picture.
  """
  return levels(false_alarms(list(controls)), {CONTROL: named})


def _nearest(kind: Modality, truth: np.ndarray, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Returns the pair of a batch with the highest score."""
  scores = np.asarray(kind.nearness(np.asarray(images, np.float32), np.asarray(truth, np.float32)))
  best = int(np.argmax(np.where(np.isnan(scores), -np.inf, scores)))
  return truth[best], images[best]


def _likeness(row: dict) -> float:
  found = row[of_rows([row]).likeness]
  return -np.inf if found is None else found
