"""Memory: of this process, of a GPU, and what XLA plans for a run."""

import resource
import sys
from collections.abc import Sequence
from typing import Any

import jax

from gradleak.engine import driver
from gradleak.engine.groups import Layout

MIB = 2**20


def reset_peak() -> None:
  """Starts a new peak of the process, where the system supports it (Linux)."""
  try:
    with open('/proc/self/clear_refs', 'w', encoding='ascii') as file:
      file.write('5')
  except OSError:
    pass


def peak() -> float:
  """Returns the peak in MiB: of the GPU since the program began, or of the process since `reset_peak`.

  The process holds all frameworks that were imported. Where the peak cannot be reset, it is that since its start.
  """
  stats = jax.local_devices()[0].memory_stats()
  if stats and 'peak_bytes_in_use' in stats:
    return stats['peak_bytes_in_use'] / MIB
  try:
    with open('/proc/self/status', encoding='ascii') as file:
      return next(int(line.split()[1]) for line in file if line.startswith('VmHWM')) / 1024
  except (OSError, StopIteration):
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used / (MIB if sys.platform == 'darwin' else 1024)


def of_what() -> str:
  """Returns the sentence on what `peak` is of."""
  if 'peak_bytes_in_use' in (jax.local_devices()[0].memory_stats() or {}):
    return 'Peak: of JAX on the GPU since the program began, also of what ran before.'
  return 'Peak: of the process while the variant ran.'


def planned(setting: Any, group_size: int, devices: Sequence[Any]) -> float:
  """Returns the MiB per device that XLA plans for all states and one group's pass; it compiles nothing anew."""
  return driver.needed(setting.build, setting.shared, setting.lanes, Layout(group_size, devices)) / MIB
