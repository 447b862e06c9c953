"""An auditor who owns the private samples: what the attacks found, judged as an audit judges it."""

from collections.abc import Callable, Sequence
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
from gradleak.engine.groups import Layout
from gradleak.federated import Upload
from gradleak.modalities import IMAGES, Modality
from gradleak.studies.captured import sources

Truth = tuple[np.ndarray, np.ndarray, Any]  # samples, targets, and the gallery or None


# Names of the first two arrays in a file of the truth; those of `numpy.savez` without names come last.
_SAMPLES, _TARGETS = ('samples', 'images', 'x', 'arr_0'), ('targets', 'labels', 'y', 'arr_1')


def read_truth(path: Any, sample_shape: Sequence[int], modality: Modality = IMAGES) -> Truth:
  """Returns (samples, targets, gallery) of an `.npz` file that holds them so, or as 'images' and 'labels'.

  The gallery is None where the file has none.

  Images are floats in [0, 1], or integers in [0, 255]; with channels last, or first as in PyTorch. Rows of a table are
  encoded by its schema, and texts are tokens. Targets are as the client's loss takes them, and `attack` checks them.

  Args:
    path: of the file.
    sample_shape: of one sample, such as (H, W, C).
    modality: what a sample is.

  Raises:
    UsageError: for a file that cannot be read, and for other arrays.
  """
  arrays = sources.read(path, 'truth')
  found = []
  for what, names in (('samples', _SAMPLES), ('targets', _TARGETS)):
    named = [name for name in names if name in arrays]
    if len(named) != 1:
      raise errors.UsageError(
        f'the truth in {str(path)!r} holds {", ".join(arrays)}, expected one array of {what}, called '
        f'{" or ".join(names[:2])}'
      )
    found.append(arrays[named[0]])
  (samples, targets), held = found, arrays.get('gallery')
  gallery = None if held is None else modality.stored(held, tuple(sample_shape))
  samples = modality.stored(samples, tuple(sample_shape))
  truth = samples, targets, gallery
  return checked(truth, sample_shape, len(samples), lambda *_: None, kind=modality)  # type: ignore[return-value]


def checked(
  truth: Any,
  sample_shape: Sequence[int],
  number: int,
  check: Callable[[Any, int], Any],
  labels: Any = None,
  kind: Modality = IMAGES,
) -> Truth | None:
  """Returns (samples [N, …], targets [N, …], gallery or None) of the private samples; None for none.

  The gallery is checked with the scenario.

  Args:
    truth: as `attack` takes it.
    sample_shape: of one sample.
    number: N.
    check: (targets, N), raises `UsageError` for targets that the client's loss does not take.
    labels: those that the attacker is given, which `check` has passed, or None.
    kind: what a sample is.

  Raises:
    UsageError: for anything but a pair of arrays of N samples in range and their labels.
  """
  if truth is None:
    return None
  if not isinstance(truth, tuple | list) or len(truth) not in (2, 3):
    raise errors.UsageError(f'truth is {errors.shown(truth)}, expected (samples, targets), or with a gallery')
  gallery = truth[2] if len(truth) == 3 else None
  shape = tuple(sample_shape)
  samples, targets = data.pair('the truth', tuple(truth[:2]), None, shape, kind.check, check, kind.noun)
  if len(samples) != number:
    raise errors.UsageError(f'the truth has {len(samples)} samples, and num_samples is {number}: give all of them')
  if labels is not None and _in_order(labels) != _in_order(targets):
    given, own = (errors.shown(np.asarray(one).tolist()) for one in (labels, targets))
    raise errors.UsageError(f'the labels given are {given}, and those of the truth {own}')
  return kind.cast(samples), targets, gallery


def _in_order(targets: Any) -> list:
  """Returns targets in an order that tells nothing of the samples, each as a list of numbers."""
  return sorted(np.asarray(targets, np.float32).reshape(len(targets), -1).tolist())


def number_of(truth: Any) -> int:
  """Returns how many samples a truth has that is not checked yet; 1 where it has no length."""
  try:
    return len(truth[0]) or 1
  except (TypeError, IndexError, KeyError):
    return 1


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
  controls = np.arange(group.settings.controls)
  sent = Uploads(np.zeros(1, int), controls, [upload] * 2, [unknown] * 2, [None] * 2, [None], {})
  at_truth = driver.evaluate(*lanes.judged_at_truth(group, made), Layout(size))
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
