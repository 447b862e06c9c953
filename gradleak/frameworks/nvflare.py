"""A filter for NVIDIA FLARE that records what is sent and what leaves a client."""

from typing import Any

import numpy as np

from gradleak.core import errors
from gradleak.frameworks.exchange import Exchange, write

try:
  from nvflare.apis.filter import Filter as _Filter
except ImportError:  # without nvflare, its methods can be called all the same
  _Filter = object

_DATA = 'task_data'
_WEIGHTS = ('WEIGHTS', 'WEIGHT_DIFF')
_NONE = ('METRICS', 'ANALYTIC', 'STATISTICS', 'PSI')  # kinds of NVIDIA FLARE that hold no weights
_SENT: dict[tuple, dict[str, np.ndarray]] = {}  # (folder, site, round) -> weights: each chain has a filter of its own


class Recorder(_Filter):  # type: ignore[misc]
  """A filter of NVIDIA FLARE; add it last to the filters of the task data, and to those of the task results, of a site.

  It changes nothing. What it meets as a result is what leaves, if no filter follows it. In a job's configuration the
  path is `gradleak.frameworks.nvflare.Recorder`, with the argument `folder`.

  Args:
    folder: where exchanges are written, see `exchange.write`.
  """

  def __init__(self, folder: str) -> None:
    super().__init__()
    self.folder = str(errors.check_path('folder', folder))

  def process(self, shareable: Any, fl_ctx: Any) -> Any:
    """Records the weights of a task, and with them what answers the task; returns the shareable as it is.

    Raises:
      UsageError: for a result whose task no filter of this folder saw, for differences of other tensors than the task
        has, for data of another kind, and where weights are encrypted or quantised.
    """
    part = shareable.get('DXO')
    if not isinstance(part, dict) or part.get('kind') in _NONE:
      return shareable
    if part.get('kind') not in _WEIGHTS:
      raise errors.UsageError(
        f'the data is of the kind {errors.shown(part.get("kind"))}, in which weights are not found: the recorder reads '
        f'{" and ".join(_WEIGHTS)}'
      )
    meta = part.get('meta') or {}
    number = meta.get('current_round', shareable.get_header('current_round', 0))
    key = self.folder, fl_ctx.get_identity_name(), number
    if meta.get('processed_algorithm') or meta.get('quantized_flag'):
      raise errors.UsageError(
        'weights are quantised or encrypted: put the recorder in front of the filter that does it'
      )
    arrays = {str(name): np.array(value) for name, value in part['data'].items()}
    if getattr(self, '__chain_type', None) == _DATA:
      _SENT[key] = arrays
      return shareable
    if key not in _SENT:
      raise errors.UsageError(
        f'no recorder saw the task of round {number}: add one with the same folder to the filters of the task data'
      )
    sent = _SENT.pop(key)
    if part['kind'] == 'WEIGHT_DIFF':
      arrays = _added(sent, arrays)
    plain = {str(name): value for name, value in meta.items() if isinstance(value, bool | int | float | str)}
    write(self.folder, Exchange(sent, arrays, {**plain, 'round': number, 'node': key[1]}))
    return shareable


def _added(sent: dict[str, np.ndarray], moved: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Returns weights of which the differences to what was sent are given, in a precision that keeps these."""
  if odd := [name for name, value in moved.items() if name not in sent or sent[name].shape != value.shape]:
    raise errors.UsageError(
      f'the result holds differences that fit no weights of the task: {errors.some(odd)}, and the task has '
      f'{errors.some(list(sent))}'
    )
  return {
    name: sent[name] + (value if value.dtype.kind in 'iub' else value.astype(np.float64))
    for name, value in moved.items()
  }
