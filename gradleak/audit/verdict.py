"""What the figures of one run amount to, in four levels, or why they amount to nothing."""

import collections
import json
import math
from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np

from gradleak.core import statistics
from gradleak.modalities import Modality, of_rows

CONTROL = 'null_gradient'
# The verdicts on a reconstruction, the strongest first; then those on a run that shows nothing.
LEVELS = ('exact', 'recognisable', 're-identified', 'above chance')
NOTHING = 'nothing seen'
INCONCLUSIVE = 'inconclusive'
FAILED = (INCONCLUSIVE, 'diverged')  # as an optimisation, which says nothing for a defense
VERDICTS = (*LEVELS, *FAILED, NOTHING)  # the worst first
RECOVERED = LEVELS[:2]  # there is a picture
MIN_CANDIDATES = 99  # with fewer, more than one original in a hundred is found by chance
CHANCE = 741  # runs on noise, one of which is beyond three standard deviations


class Threshold(NamedTuple):
  """What a run has to exceed, from its control pool.

  Attributes:
    score, revealed, recognised, identified: the 95th percentile of these columns.
    correlation: three standard deviations above the mean, of Fisher's z; more for a small pool (Student's bound).
    certain: the same bound of the score, for samples that have no correlation.
  """

  score: float
  revealed: float
  recognised: float
  identified: float
  correlation: float
  certain: float


_COUNTS = ('revealed', 'recognised', 'identified')  # columns of which a percentile counts, beside the score


def threshold(controls: list[dict]) -> Threshold:
  """Returns the `Threshold` of the control runs of one attack; NaN, which nothing exceeds, without any."""
  kind = of_rows(controls)
  correlations, scores = (
    [row[name] for row in controls if math.isfinite(row[name])] for name in (kind.correlation, kind.score)
  )
  return Threshold(
    score=statistics.percentile_threshold([row[kind.score] for row in controls]),
    **{name: statistics.percentile_threshold([row[name] for row in controls]) for name in _COUNTS},
    correlation=float(np.tanh(_exceeded(np.arctanh(np.clip(correlations, -0.999999, 0.999999))))),
    certain=_exceeded(scores),
  )


def exact_alone(controls: list[dict]) -> Threshold:
  """Returns the `Threshold` of runs whose controls are of other samples: beyond it are only exact reconstructions."""
  never = Threshold(*[math.nan] * len(Threshold._fields))
  return never._replace(revealed=threshold(controls).revealed) if controls else never


def _exceeded(values: Any) -> float:
  """Returns the bound of one more run like these that chance exceeds in 1 of `CHANCE` cases; NaN for fewer than two."""
  from scipy import stats

  n, values = len(values), np.sort(values)  # the same bits in any order
  if n < 2:
    return math.nan
  return float(values.mean() + stats.t.ppf(stats.norm.cdf(3), n - 1) * values.std(ddof=1) * math.sqrt(1 + 1 / n))


def judge(row: dict, beyond: Threshold) -> dict:
  """Returns a row's `success`, `solved` and `verdict`, and what its score and correlation had to exceed.

  The four levels are these. For a batch, each asks for more images than the 95th percentile of the control shows, which
  is none as a rule.

  - exact: an image and its reconstruction have a correlation of at least 0.98, or a root mean squared error of at most
    one level of 8 bits.
  - recognisable: an image has rank 1 among the candidates, and an SSIM of at least the gallery's threshold. Among fewer
    than `MIN_CANDIDATES` others the rank says little, or is certain: the run has to be above chance as well.
  - re-identified: an image has rank 1 among at least `MIN_CANDIDATES` others, and the correlation is beyond the
    control. Where fewer than two control runs have one, rank 1 of at least `CHANCE` for each image of the batch is as
    rare as that.
  - above chance: PSNR and correlation are beyond the control.

  The correlation of flat images means nothing. Where all images of a batch are flat, and the attack searches, the PSNR
  has to exceed the bound that otherwise holds for the correlation. A closed form's missing answers also look flat.
  The first two show a picture: the trial is a success. Closed forms give some images of a batch exactly and nothing of
  the rest, so one image decides.

  A run is solved when the attacker's objective is as low as at the truth. Showing nothing is then the merit of the
  defense; otherwise it is 'inconclusive'. A success is also solved when 99.9 % of the descent from the start to the
  truth is done. Less means that the leak is at least this.
  """
  kind, among_many = of_rows([row]), row['candidates'] >= MIN_CANDIDATES
  if is_flat(row):
    correlated = row['steps'] > 0 and row[kind.score] > beyond.certain
  else:
    correlated = row[kind.correlation] > beyond.correlation
  above = row[kind.score] > beyond.score and correlated
  rare = math.isnan(beyond.correlation) and row['candidates'] + 1 >= CHANCE * row.get('batch_size', 1)
  reached = (
    row['revealed'] > beyond.revealed,
    row['recognised'] > beyond.recognised and (among_many or above),
    row['identified'] > beyond.identified and ((among_many and correlated) or rare),
    above,
  )
  level = next((name for name, holds in zip(LEVELS, reached, strict=True) if holds and not row['diverged']), None)
  success = level in RECOVERED
  gap = row['objective'] - row['objective_at_truth']
  tolerance = (
    1e-3 * (row['objective_start'] - row['objective_at_truth']) if success else 1e-6 * abs(row['objective_at_truth'])
  )
  solved = bool(gap <= tolerance)
  verdict = 'diverged' if row['diverged'] else level or (NOTHING if solved else INCONCLUSIVE)
  control = dict(zip(kind.controls, (beyond.score, beyond.correlation), strict=True))
  return {**control, 'success': success, 'solved': solved, 'verdict': verdict}


def is_flat(row: dict) -> bool:
  """Returns whether all images of a batch are flat, see docs/ROWS.md."""
  return row.get('flat') == row.get('batch_size', 1)  # rows of earlier versions do not say


def false_alarms(controls: list[dict]) -> list[dict]:
  """Returns control runs with the verdict that each would get as an upload, judged by the other control runs.

  They show nothing of an image, so that a level which one of them comes to is a false alarm. A control run that several
  stages of an ensemble share counts once.

  Args:
    controls: control runs of any attacks, rows; those of one pool have the same thresholds.
  """
  shared = {json.dumps({k: v for k, v in row.items() if k != 'stage'}, default=str): row for row in controls}
  controls = list(shared.values())
  pools: dict[tuple, list[dict]] = {}
  kind = of_rows(controls)
  for row in controls:
    pools.setdefault(_pool(kind, row), []).append(row)
  found = []
  for pool in pools.values():
    numbers = [{name: math.nan if value is None else value for name, value in row.items()} for row in pool]
    usual, least = threshold(numbers), _least(kind, numbers)
    for row, given in zip(pool, numbers, strict=True):
      beyond = usual  # which tells nothing else of a run that no threshold of the others is below
      if not all(given[name] <= bound for name, bound in least.items()):
        beyond = threshold([other for other in numbers if other['trial'] != row['trial']])
      judged = judge(given, beyond)
      found.append({**row, 'verdict': judged['verdict'], 'success': judged['success']})
  return found


def _least(kind: Modality, pool: list[dict]) -> dict[str, float]:
  """Returns the least threshold of each score that any run of a pool meets: that without the largest ones."""
  most = max(collections.Counter(row['trial'] for row in pool).values())  # of one number, which are left out together
  known = {name: sorted(row[name] for row in pool if not math.isnan(row[name])) for name in (kind.score, *_COUNTS)}
  return {name: statistics.percentile_threshold(values[:-most]) for name, values in known.items()}


def of_attackers(controls: list[dict], rows: list[dict]) -> list[dict]:
  """Returns the control runs of the attackers that some rows are of: those whose thresholds the rows are judged by."""
  kind = of_rows(rows)
  pools = {_pool(kind, row) for row in rows}
  return [row for row in controls if _pool(kind, row) in pools]


def _pool(kind: Modality, row: dict) -> tuple:
  """Returns what control runs with the same thresholds have in common."""
  return row['attack'], *(row[name] for name in kind.controls)


class Alarms(NamedTuple):
  """How often noise comes to a level, counted as the verdict on a defense is: the worst of all attackers of an upload.

  Attributes:
    reached: level -> the uploads of noise that any attacker brings there or further.
    n: uploads of noise.
    attackers: that each of them met: an attack, or an adaptive attack that changes the attack.
  """

  reached: dict[str, int]
  n: int
  attackers: int


def united(controls: list[dict], named: Collection[int] = ()) -> Alarms:
  """Returns the `Alarms` of control runs, which are combined number by number: all attackers meet the same noise.

  Args:
    controls: control runs of several attackers, rows; see `false_alarms`.
    named: the numbers of those that are re-identified without a picture.
  """
  by_number: dict[int, list[str]] = {}
  for row in false_alarms(controls):
    by_number.setdefault(row['trial'], []).append(row['verdict'])
  found = [worst({*verdicts, *LEVELS[2:3] * (number in named)}) for number, verdicts in by_number.items()]
  reached = {level: sum(each in LEVELS[: i + 1] for each in found) for i, level in enumerate(LEVELS)}
  return Alarms(reached, len(found), max(map(len, by_number.values()), default=0))


def require_undefended_recovery(rows: list[dict], undefended: set[str]) -> list[dict]:
  """Returns one attack's rows; 'nothing seen' becomes 'inconclusive' on trials that it also fails without a defense.

  A trial that was not attacked without a defense (see `only` of `gradleak.audit`) counts as failed where no other one
  succeeded without.

  Args:
    rows: of one attack.
    undefended: the labels of the entries that are no defense.
  """
  bare = [row for row in rows if row['defense'] in undefended]
  failing = {row['trial'] for row in bare if not row['success']}
  if bare and not any(row['success'] for row in bare):
    failing |= {row['trial'] for row in rows}

  def credited(row: dict) -> dict:
    undeserved = row['verdict'] == NOTHING and row['trial'] in failing and not row['control']
    return {**row, 'verdict': INCONCLUSIVE} if undeserved else row

  return [credited(row) for row in rows]


def unfinished(row: dict) -> bool:
  """Returns whether a run shows something of the images before its attack had converged: more steps may show more."""
  return row['verdict'] in LEVELS and not row['solved']


def worst(verdicts: set[str]) -> str:
  """Returns the worst of some verdicts: the strongest level; else one that shows nothing about the defense."""
  return next(verdict for verdict in VERDICTS if verdict in verdicts)
