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
      UsageError: for a result whose task no filter of this folder saw, and where weights are encrypted or quantised.
    """
    part = shareable.get('DXO')
    if not isinstance(part, dict) or part.get('kind') not in ('WEIGHTS', 'WEIGHT_DIFF'):
      return shareable
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
      arrays = {name: sent[name] + value if name in sent else value for name, value in arrays.items()}
    plain = {str(name): value for name, value in meta.items() if isinstance(value, bool | int | float | str)}
    write(self.folder, Exchange(sent, arrays, {**plain, 'round': number, 'node': key[1]}))
    return shareable
