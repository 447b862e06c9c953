"""What rows say about assumptions: the effect of each, on its own and in production, and a judgement."""

import math
from typing import Any, NamedTuple

import numpy as np

from gradleak import metrics
from gradleak.core import statistics
from gradleak.federated import chance
from gradleak.modalities import Modality, of_config
from gradleak.studies.sensitivity.assumptions import TRAINING, Assumption, named, without


class Effect(NamedTuple):
  """What one assumption does to the leak, paired over the trials of two settings that differ in it.

  Attributes:
    laboratory, production: the names of the two settings.
    score, low, high: mean difference of the score, laboratory − production, and its 95 % interval, of images in dB; a
      score beyond `Modality.clear` counts as that. NaN where too few trials are finite.
    recovered: the numbers of samples recovered, (laboratory, production).
    recovered_low, recovered_high: 95 % interval of the difference of the fractions recovered, of the trials that
      diverged in neither setting: what diverges recovers nothing, and shows no protection.
    n: trials.
    least: the least difference of the score that is one, `Modality.effect`.
  """

  laboratory: str
  production: str
  score: float
  low: float
  high: float
  recovered: tuple[int, int]
  recovered_low: float
  recovered_high: float
  n: int
  least: float

  @property
  def shown(self) -> bool:
    """Whether the leak is larger in the laboratory: more is recovered, or what is recovered is clearer by `least`."""
    return self.recovered_low > 0 or (self.low > 0 and self.score >= self.least and self.recovered[0] > 0)

  @property
  def excluded(self) -> bool:
    """Whether the intervals exclude that the leak is larger by `least`, or by half of the samples."""
    return self.high < self.least and self.recovered_high < 0.5


class Judgement(NamedTuple):
  """What the rows say about one assumption.

  Attributes:
    assumption: the `Assumption`.
    verdict: 'protects': restored to the laboratory, it raises the leak of production. 'others hold': dropped from the
      laboratory it lowers the leak, but production leaks no more with it restored. 'does not protect': neither, and
      the intervals exclude a large effect. 'not shown': skipped, the attack recovers nothing before it is dropped,
      the intervals decide nothing, or the training did not train.
    alone: the `Effect` of dropping it alone from the laboratory (with what it needs); None where it was skipped.
    restored: the `Effect` of restoring it alone in production (with what needs it); None where it was skipped.
  """

  assumption: Assumption
  verdict: str
  alone: Effect | None
  restored: Effect | None


class Sensitivity(NamedTuple):
  """What an attack recovers from the laboratory to production.

  Attributes:
    config: the settings, plain JSON.
    assumptions: in the order in which they are dropped, the skipped ones among them.
    steps: {name of a setting: names of the assumptions that are dropped in it}, the laboratory first.
    rows: one dict per setting and trial, plain JSON: 'setting', 'trial', the score of the sample that all settings
      share (of images 'psnr', in dB; None where it diverged), 'recovered' (of the upload, as in the audit), 'by' (the
      adaptive attack of the strongest attacker, None for the non-adaptive one), the control's, as 'control_psnr', and
      of the upload 'verdict' and its score, as 'upload_psnr'.
    examples: {name of a setting: what is reconstructed of the first trial's sample, of an image [H, W, C]}.
    truth: that sample.
    accuracy: {initialisation, 'U(−0.5, 0.5)' or 'own': {'trained', 'untrained', 'guessing', 'tested'}}: fractions of
      the public samples held out that are classified correctly, and their number; guessing is the most frequent class.
      For tokens also 'independent', see `federated.chance.facts`.
      Empty without training, and for a loss of which there is no accuracy.
    audits: {name of a setting: the folder of its audit, relative to the work directory}.
    methods: what is known of attack, defense and model, see `AuditResult.methods`.
    seconds: wall time of all audits and trainings.
  """

  config: dict[str, Any]
  assumptions: list[Assumption]
  steps: dict[str, tuple[str, ...]]
  rows: list[dict[str, Any]]
  examples: dict[str, np.ndarray]
  truth: np.ndarray
  accuracy: dict[str, dict[str, float]]
  audits: dict[str, str]
  methods: dict[str, Any]
  seconds: float

  @property
  def modality(self) -> Modality:
    """What the samples are."""
    return of_config(self.config)

  @property
  def waterfall(self) -> list[str]:
    """The names of the settings from the laboratory down to production, one more assumption dropped in each."""
    names = [one.name for one in self.assumptions if not one.skipped]
    return [named(names[:count], names) for count in range(len(names) + 1)]

  def of(self, name: str) -> list[dict[str, Any]]:
    """Returns the rows of a setting, in the order of the trials."""
    return [row for row in self.rows if row['setting'] == name]


def judged(found: Sensitivity) -> list[Judgement]:
  """Returns a `Judgement` per assumption, computed from the rows."""
  used = [one for one in found.assumptions if not one.skipped]
  names = [one.name for one in used]
  result = []
  for one in found.assumptions:
    if one.skipped:
      result.append(Judgement(one, 'not shown', None, None))
      continue
    alone = effect(found, named(one.needs, names), named((*one.needs, one.name), names))
    restored = effect(found, named(without(one, used), names), named(names, names))
    verdict = _verdict(alone, restored)
    if one.name == TRAINING and verdict == 'does not protect' and not trains(found):
      verdict = 'not shown'
    result.append(Judgement(one, verdict, alone, restored))
  return result


def untrained(found: Sensitivity) -> list[str]:
  """Returns the initialisations from which the trained model is `chance.at_chance`, names of `Sensitivity.accuracy`."""

  def guesses(one: dict[str, float]) -> bool:
    row = {**one, 'accuracy': one['trained'], 'majority_share': one['guessing']}
    return one['trained'] <= one['guessing'] or bool(chance.at_chance(row))

  return [origin for origin, one in found.accuracy.items() if guesses(one)]


def trains(found: Sensitivity) -> bool:
  """Returns whether the training is known to have trained: by its accuracy, from each initialisation."""
  return bool(found.accuracy) and not untrained(found)


def _verdict(alone: Effect, restored: Effect) -> str:
  if restored.shown:
    return 'protects'
  if alone.shown:
    return 'others hold'
  return 'does not protect' if restored.excluded and alone.excluded and alone.recovered[0] else 'not shown'


def effect(found: Sensitivity, laboratory: str, production: str) -> Effect:
  """Returns the `Effect` between two settings, named as in `Sensitivity.steps`."""
  rows, kind = (found.of(laboratory), found.of(production)), found.modality
  values = [[row[kind.score] for row in side] for side in rows]
  scores = [np.array([math.nan if one is None else min(one, kind.clear) for one in side]) for side in values]
  recovered = [np.array([row['recovered'] for row in side], float) for side in rows]
  differences = scores[0] - scores[1]
  whole = np.isfinite(differences)
  mean, low, high = statistics.difference_of_means(differences)
  recovered_low, recovered_high = _paired(*(side[whole] for side in recovered))
  if whole.sum() < statistics.MIN_RUNS:
    low = high = recovered_low = recovered_high = math.nan
  return Effect(
    laboratory,
    production,
    mean,
    low,
    high,
    (int(recovered[0].sum()), int(recovered[1].sum())),
    recovered_low,
    recovered_high,
    len(differences),
    kind.effect,
  )


def _paired(laboratory: np.ndarray, production: np.ndarray) -> tuple[float, float]:
  """Returns a 95 % interval of the difference of two fractions of the same trials, 0 or 1 each, from exact ones.

  It is the interval of the trials recovered in the laboratory only, less those recovered in production only. The exact
  intervals of both hold at 97.5 % each. The result is wide for few trials, also where all of them agree.
  """
  n = len(laboratory)
  only = [int((one > other).sum()) for one, other in ((laboratory, production), (production, laboratory))]
  (_, low, high), (_, others_low, others_high) = (metrics.proportion_interval(count, n, 0.975) for count in only)
  return low - others_high, high - others_low
