"""Whether a trained classifier is at chance: no better than one that predicts the same class for every sample."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from gradleak.core import statistics
from gradleak.federated.losses import LOSSES


def counted(config: Mapping[str, Any]) -> str:
  """Returns what an accuracy of a training with these settings counts: 'samples', or 'tokens' that are predicted."""
  loss = LOSSES.get(str(config.get('loss')).partition('(')[0])
  return 'tokens' if loss is not None and loss().own else 'samples'


def facts(labels: np.ndarray, predicted: np.ndarray, lengths: list[int] | None = None) -> dict[str, Any]:
  """Returns what chance is judged by, plain JSON: columns of a measured round.

  Args:
    labels: of the test samples, or the tokens in these, int [N].
    predicted: the class that the model predicts for each of them, int [N].
    lengths: see `simulation.Decisions`.

  Returns:
    'tested' (N), 'majority_share' (of the commonest class among the samples, in [0, 1]) and 'predicted_classes' (the
    number of classes that are predicted for any sample). For tokens also 'independent': how many independent ones tell
    as much of the accuracy (`statistics.independent_trials`), as those of a text are right or wrong together.
  """
  together = {} if lengths is None else {'independent': statistics.independent_trials(labels == predicted, lengths)}
  return {
    'tested': len(labels),
    **together,
    'majority_share': majority_share(labels),
    'predicted_classes': len(np.unique(predicted)),
  }


def majority_share(labels: np.ndarray) -> float:
  """Returns the fraction of the commonest class among `labels`, int [N]."""
  return float(np.unique(labels, return_counts=True)[1].max() / len(labels))


def correct(row: Mapping[str, Any]) -> tuple[float, float]:
  """Returns (those classified correctly, all) of a measured round, as numbers of independent samples or tokens."""
  n = row.get('independent', row['tested'])
  return round(row['accuracy'] * row['tested']) / row['tested'] * n, n


def at_chance(row: Mapping[str, Any], num_classes: int | None = None, noun: str = 'samples') -> str:
  """Returns why a model is at chance, in words; '' where it is not, or where the row does not say.

  A model is at chance that predicts one class for all test samples. So is one whose accuracy is not significantly above
  the fraction of the commonest class, by the lower end of its 95 % interval (`statistics.wilson_interval`).

  Args:
    row: a measured round of `training.train`.
    num_classes: 1 / num_classes stands in for the fraction of the commonest class, which is no less, in rows without
      it.
    noun: what its accuracy counts, see `counted`.
  """
  if row.get('predicted_classes') == 1:
    return f'it predicts one class for all {row["tested"]:,} test {noun}'
  share = row.get('majority_share', 1 / num_classes if num_classes else None)
  if share is None or row.get('accuracy') is None or not row.get('tested'):
    return ''
  accuracy, low, high = statistics.wilson_interval(*correct(row))
  if low > share:
    return ''
  what = 'the commonest class' if 'majority_share' in row else f'one of {num_classes} classes'
  return (
    f'its accuracy of {statistics.percent(accuracy)} (95 % interval {100 * low:.1f} to {100 * high:.1f} %) is not '
    f'above the {statistics.percent(share)} of always predicting {what}'
  )
