"""How many of a batch's labels were found, in any order."""

import collections
import math
from typing import Any, NamedTuple

import numpy as np

from gradleak.core import errors


class LabelScores(NamedTuple):
  """Shares in [0, 1].

  Attributes:
    instances: of the true labels, those found as a multiset: Σ_c min(true count, found count) / batch size.
    classes: of the classes present, those found at least once (recall).
    precision: of the classes found, those present; NaN if none was found.
  """

  instances: float
  classes: float
  precision: float


def checked(labels_hat: Any, labels: Any, found: int, truth: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns the labels [K], or [0] if an attack gives none, and the true ones [N]; raises `UsageError` for others."""
  lists = {'labels_hat': errors.host_array('labels_hat', labels_hat), 'labels': errors.host_array('labels', labels)}
  given = lists['labels_hat'].shape != (0,)
  for (name, one), number in zip(lists.items(), (found if given else 0, truth), strict=True):
    fits = np.issubdtype(one.dtype, np.integer) or not number
    if one.shape != (number,) or not fits:
      raise errors.UsageError(f'{name} are {one.dtype} of shape {one.shape}, expected integers of shape {(number,)}')
  return lists['labels_hat'], lists['labels']


def of_matched(labels_hat: np.ndarray, labels: np.ndarray, permutation: np.ndarray) -> dict[str, float]:
  """Returns 'label_correct' and 'label_counts_correct' of a batch that is matched, see `metrics.evaluate`.

  Args:
    labels_hat: integers [K], −1 for unknown; [0] if the attack gives none, and then both are NaN.
    labels: integers [N].
    permutation: integers [N]: sample i is matched to reconstruction `permutation[i]`; −1 for none.
  """
  correct = counts = math.nan
  if labels_hat.shape != (0,):
    correct = float(np.mean(np.where(permutation >= 0, labels_hat[permutation], -1) == labels))
    counts = label_scores(labels_hat, labels).instances
  return {'label_correct': correct, 'label_counts_correct': counts}


def label_scores(found: Any, truth: Any) -> LabelScores:
  """Returns the `LabelScores` of labels found, in any order; runs on the host.

  Args:
    found: integers [K], −1 for unknown.
    truth: integers [N], N ≥ 1, none negative.

  Raises:
    UsageError: for anything else.
  """
  lists = {'found': errors.host_array('found', found), 'truth': errors.host_array('truth', truth)}
  for name, labels in lists.items():
    if labels.ndim != 1 or not (np.issubdtype(labels.dtype, np.integer) or not labels.size):
      raise errors.UsageError(f'{name} are {labels.dtype} of shape {labels.shape}, expected integers [N]')
  if not lists['truth'].size or lists['truth'].min() < 0:
    raise errors.UsageError('truth holds no labels or a negative one, expected at least one class index')
  counts, wanted = (collections.Counter(labels.tolist()) for labels in lists.values())
  classes = {label for label in counts if label >= 0}
  shared = len(classes & set(wanted))
  return LabelScores(
    (counts & wanted).total() / wanted.total(), shared / len(wanted), shared / len(classes) if classes else math.nan
  )
