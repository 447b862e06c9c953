"""Which originals a ranking of candidates re-identifies, in the terms of AutoLeak's levels, and how often of noise."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

from gradleak.audit.verdict import LEVELS, MIN_CANDIDATES
from gradleak.studies.identification import Identification

NAMED = LEVELS[2]  # what a ranking can come to: 're-identified'


class Ranked(TypedDict):
  """What one ranking found under one defense.

  Attributes:
    stage: its name.
    defense: the label.
    model: what was assumed of the upload, one of `likelihood.MODELS`.
    rounds: uploads of the same samples.
    candidates: others beside the original, the least of all.
    named: the trials that are re-identified.
    trials: how many there were.
    alarms: the control runs that are, too: false matches.
    controls: how many there were.
  """

  stage: str
  defense: str
  model: str
  rounds: int
  candidates: int
  named: list[int]
  trials: int
  alarms: list[int]
  controls: int


def ranked(stage: str, found: Identification, batch_size: int) -> list[Ranked]:
  """Returns a `Ranked` per defense, by the decisive statistic.

  Where the upload says nothing, all candidates are exchangeable, and each original is first with a probability of one
  in the length of its list. A trial is re-identified if more of its originals are first than that allows in 95 of 100
  cases. A single original has to be first. Its list has to have at least `MIN_CANDIDATES` others.
  """
  decisive, made = found.decisive(), []
  rows, noise = ([row for row in of if row['statistic'] == decisive] for of in (found.rows, found.noise))
  for defense in dict.fromkeys(row['defense'] for row in rows):
    of = [row for row in rows if row['defense'] == defense]
    null = [row for row in noise if row['defense'] == defense]
    made.append(
      Ranked(
        stage=stage,
        defense=defense,
        model=of[0]['model'],
        rounds=of[0]['rounds'],
        candidates=min(row['candidates'] for row in of),
        named=_first(of, batch_size),
        trials=len({row['trial'] for row in of}),
        alarms=_first(null, batch_size),
        controls=len({row['trial'] for row in null}),
      )
    )
  return made


def _first(rows: Iterable[Mapping[str, Any]], batch_size: int) -> list[int]:
  """Returns the trials of which more originals are first than chance allows, by the shortest list of each trial."""
  counts: dict[int, int] = {}
  least: dict[int, int] = {}
  for row in rows:
    trial = row['trial']
    counts[trial] = counts.get(trial, 0) + row['identified']
    least[trial] = min(least.get(trial, row['candidates']), row['candidates'])
  allowed = {others: _allowed(batch_size, others) for others in set(least.values())}
  return sorted(
    trial for trial, count in counts.items() if least[trial] >= MIN_CANDIDATES and count > allowed[least[trial]]
  )


def _allowed(batch_size: int, others: int) -> float:
  """Returns how many originals of a batch are first by chance in 95 of 100 cases, at most."""
  from scipy import stats

  return float(stats.binom.ppf(0.95, batch_size, 1 / (others + 1)))


def chance(batch_size: int, others: int) -> float:
  """Returns how often a trial of so many originals is re-identified where the upload says nothing."""
  from scipy import stats

  return float(stats.binom.sf(_allowed(batch_size, others), batch_size, 1 / (others + 1)))


def alarms(found: Sequence[Ranked], defense: str) -> set[int]:
  """Returns the control runs that any ranking under a defense re-identifies."""
  return {number for one in found if one['defense'] == defense for number in one['alarms']}
