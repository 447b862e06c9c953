"""Memory: how much of it is free, which errors mean that it ran out, and when compiled programs must be freed."""

import contextlib
import ctypes
import os
import pathlib
from typing import Any

import jax

_PROCESS, _MOST_MAPS = pathlib.Path('/proc/self'), pathlib.Path('/proc/sys/vm/max_map_count')


def free(device: Any) -> int | None:
  """Returns the free bytes of `device`, None if unknown; CPU devices share the machine's memory evenly."""
  if device.platform == 'cpu':
    try:
      with open('/proc/meminfo', encoding='ascii') as file:
        available = next(line for line in file if line.startswith('MemAvailable:'))
    except (OSError, StopIteration):
      return None
    return 1024 * int(available.split()[1]) // jax.local_device_count()
  stats = device.memory_stats() or {}
  return stats['bytes_limit'] - stats['bytes_in_use'] if 'bytes_limit' in stats else None


def release_programs() -> bool:
  """Frees the compiled programs of this process if it takes more than half of its memory maps, or of the memory.

  A program on a CPU takes maps for each of its kernels, those of an audit of ResNet-20 several thousand. LLVM aborts a
  process that reaches the limit, 65,530 by default. What is freed is compiled again, or found on disk, when called.

  Returns:
    Whether they were freed.
  """
  try:
    maps = (_PROCESS / 'maps').read_bytes().count(b'\n')
    most = int(_MOST_MAPS.read_text('ascii'))
    pages = int((_PROCESS / 'statm').read_text('ascii').split()[1])
  except OSError:  # no Linux
    return False
  if 2 * maps <= most and 2 * pages <= os.sysconf('SC_PHYS_PAGES'):
    return False
  jax.clear_caches()
  with contextlib.suppress(AttributeError):  # a C library without it; the GNU one keeps what is freed
    ctypes.CDLL(None).malloc_trim(0)
  return True


def ran_out(error: Exception) -> bool:
  """Returns whether a JaxRuntimeError means that memory ran out."""
  return 'RESOURCE_EXHAUSTED' in str(error) or 'out of memory' in str(error).lower()
