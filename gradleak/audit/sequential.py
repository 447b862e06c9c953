"""Trials that stop: how many each defense gets, by intervals that hold at every number of trials at once.

A question is of one defense: does any attacker recover more than a share of its uploads, or fewer (`decide`)? Or which
share, to a half-width (`within`)? Trials run in the order of their numbers, `LOOK` at a time. After each look, the
defenses that have their answer get no more. The uploads without a defense are attacked as long as any others are: what
fails there shows nothing about a defense. Uploads on which all attacks diverged may be of either kind: no share is said
to be smaller than with them.

The first trials stand for all of them, so samples have to come in no order (`check_order`).
"""

import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from gradleak.audit.verdict import LEVELS, worst
from gradleak.core import anytime, errors

LOOK = 8  # trials between two looks
SORTED = 1e-3  # probability of an order, below which it is none of chance
UNDECIDED = 'undecided'
ANSWERS = ('above', 'below', 'within', UNDECIDED)


class Question(NamedTuple):
  """What is asked of each defense.

  Attributes:
    level: the verdict that counts, or a stronger one; of an upload the worst of all attackers.
    decide: the share of uploads that it is compared with, None for a question about its value.
    within: the half-width of the interval to reach, None for a comparison.
    error_rate: α, the probability that the answer on a defense is wrong, at most.
    most: trials.
  """

  level: str
  decide: float | None
  within: float | None
  error_rate: float
  most: int

  @classmethod
  def of(cls, config: Mapping[str, Any]) -> 'Question | None':
    """Returns what an audit with these settings asks; None where the number of trials is fixed."""
    decide, within = config.get('decide'), config.get('within')
    if decide is None and within is None:
      return None
    return cls(config['level'], decide, within, config['error_rate'], config['trials'])

  def answer(self, reached: int, n: int, diverged: int = 0) -> str | None:
    """Returns one of `ANSWERS` after n trials; None if more have to run. The counts are as of `Stop`."""
    low, high = self.interval(reached, n, diverged)
    answered = None
    if self.decide is not None:
      answered = 'above' if low > self.decide else 'below' if high < self.decide else None
    elif self.within is not None:
      answered = 'within' if (high - low) / 2 <= self.within else None
    return answered or (UNDECIDED if n >= self.most else None)

  def interval(self, reached: int, n: int, diverged: int) -> tuple[float, float]:
    """Returns the ends of the share, the upper one as if all that diverged had succeeded."""
    return _interval(reached, n, self.error_rate)[1], _interval(reached + diverged, n, self.error_rate)[2]


class Stop(NamedTuple):
  """How the trials of a defense stopped.

  Attributes:
    defense: its label.
    answer: one of `ANSWERS`.
    after: trials that it took.
    trials: trials that ran: more, where uploads without a defense went on beside others.
    reached: of these, how many come to the level of the question, or further.
    low, high: the interval of that share, with a confidence of 1 − α, see `Question.interval`.
    diverged: trials on which all attacks diverged.
  """

  defense: str
  answer: str
  after: int
  trials: int
  reached: int
  low: float
  high: float
  diverged: int = 0


def check_order(classes: np.ndarray) -> None:
  """Raises `UsageError` for samples that are sorted by class: then the first trials are of one class.

  They are where the samples of each class stand together, and a random order does so with less than `SORTED`.

  Args:
    classes: of the samples of all trials, int [N].
  """
  counts = np.unique(classes, return_counts=True)[1]
  blocks = 1 + np.count_nonzero(np.diff(classes))
  chance = math.lgamma(len(counts) + 1) + sum(math.lgamma(n + 1) for n in counts) - math.lgamma(len(classes) + 1)
  if 1 < blocks == len(counts) and chance < math.log(SORTED):
    raise errors.UsageError(
      'decide and within stop at the first trials, and the samples are sorted by class: shuffle them, as --shuffle '
      'does, or take a fixed number of trials'
    )


def stops(rows: Iterable[Mapping[str, Any]], config: Mapping[str, Any]) -> list[Stop]:
  """Returns how the trials of each defense stopped, of those that have; nothing where their number is fixed.

  Args:
    rows: of an audit, in any order; control runs are left out.
    config: its settings.
  """
  question = Question.of(config)
  return [] if question is None else [stop for stop in _looked(rows, question) if stop.answer]


def further(
  rows: Iterable[Mapping[str, Any]], question: Question, defenses: Iterable[str], undefended: Iterable[str]
) -> dict[str, frozenset[int]]:
  """Returns the trials that each defense needs, those that ran and, where the question is open, the next look.

  Args:
    rows: what ran so far; none before the first look.
    question: the `Question`.
    defenses: all labels.
    undefended: the labels that are no defense.
  """
  ran = {stop.defense: stop for stop in _looked(rows, question)}
  needed = dict.fromkeys(defenses, min(LOOK, question.most))
  for label, stop in ran.items():
    needed[label] = stop.trials if stop.answer else min(stop.trials + LOOK, question.most)
  most = max(needed.values())
  return {label: frozenset(range(most if label in undefended else n)) for label, n in needed.items()}


def _looked(rows: Iterable[Mapping[str, Any]], question: Question) -> list[Stop]:
  """Returns the state of each defense after its last look; the answer is the first one, '' for none yet."""
  enough = LEVELS[: LEVELS.index(question.level) + 1]
  by_trial: dict[str, dict[int, set[str]]] = {}
  for row in rows:
    if not row['control']:
      by_trial.setdefault(row['defense'], {}).setdefault(row['trial'], set()).add(row['verdict'])
  found = []
  for label, verdicts in by_trial.items():
    of_trials = [verdicts[t] for t in sorted(verdicts)]
    reached = [worst(one) in enough for one in of_trials]
    found.append(_state(label, reached, [one == {'diverged'} for one in of_trials], question))
  return found


def _state(label: str, reached: list[bool], diverged: list[bool], question: Question) -> Stop:
  n, answer, after = len(reached), None, 0
  while after < n and answer is None:
    after = min(after + LOOK, n)
    answer = question.answer(sum(reached[:after]), after, sum(diverged[:after]))
  low, high = question.interval(sum(reached), n, sum(diverged))
  return Stop(label, answer or '', after, n, sum(reached), low, high, sum(diverged))


@functools.lru_cache(4096)
def _interval(reached: int, n: int, error_rate: float) -> tuple[float, float, float]:
  return anytime.proportion_interval(reached, n, 1 - error_rate)
