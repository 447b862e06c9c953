"""An auditor who owns the private samples: what the attacks found, judged as an audit judges it."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from gradleak import data
from gradleak.audit import lanes, scores
from gradleak.audit.group import Group
from gradleak.audit.uploads import Uploads
from gradleak.audit.verdict import require_undefended_recovery
from gradleak.core import errors
from gradleak.core.trees import Tree
from gradleak.engine import driver
from gradleak.federated import Upload
from gradleak.modalities import IMAGES

Truth = tuple[np.ndarray, np.ndarray]


def checked(truth: Any, image_shape: Sequence[int], number: int) -> Truth | None:
  """Returns (samples [N, H, W, C], targets [N]) of the private samples; None for none.

  Raises:
    UsageError: for anything but a pair of arrays of N samples in range and their labels.
  """
  if truth is None:
    return None
  if not isinstance(truth, tuple | list) or len(truth) != 2:
    raise errors.UsageError(f'truth is {errors.shown(truth)}, expected (samples, targets)')
  samples, targets = data.pair('the truth', tuple(truth), None, tuple(image_shape), IMAGES.check)
  if len(samples) != number:
    raise errors.UsageError(f'the truth has {len(samples)} samples, and num_samples is {number}: give all of them')
  return np.asarray(samples, np.float32), np.asarray(targets, np.int32)


def scored(group: Group, update: Tree, made: lanes.Table, found: Any, size: int) -> scores.Part:
  """Returns the rows of one structure, not yet judged, and their arrays, see `audit.scores.scored`.

  Args:
    group: whose scenario has the private samples.
    update: what the client sent.
    made: the lanes that were run.
    found: their `Reconstruction`.
    size: lanes that share one pass.
  """
  alone = jax.tree.map(lambda x: np.asarray(x)[np.newaxis, np.newaxis], update)
  mask = jax.tree.map(lambda x: np.full((1, 1), bool(np.any(x))), update)
  upload = Upload(alone, mask, np.full((1, 1), group.settings.batch_size, np.int32))  # type: ignore[arg-type]
  unknown = np.full(1, np.nan)  # the undefended upload, which a change is measured from, is not there
  sent = Uploads(np.zeros(1, int), np.arange(group.settings.controls), [upload] * 2, [unknown] * 2, [None] * 2, [None])
  at_truth = driver.evaluate(*lanes.judged_at_truth(group, made), group_size=size)
  last = np.asarray([made.num_steps])
  curves = np.asarray(found.objective)[:, np.newaxis]
  return scores.scored(group, sent, lanes.Found(made, found, np.asarray(at_truth), last, curves))


def judged(part: scores.Part, undefended: set[str]) -> tuple[list[dict], list[dict]]:
  """Returns (rows, control rows) of one structure, judged by its control runs.

  Args:
    part: what `scored` returns.
    undefended: the labels of entries that are no defense: where nothing is seen there, no defense is the reason.
  """
  rows = scores.judged([part])
  own = [row for row in rows if not row['control']]
  return require_undefended_recovery(own, undefended), [row for row in rows if row['control']]
