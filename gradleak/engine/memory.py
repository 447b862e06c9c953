"""Memory of the devices: how much is free, and which errors mean that it ran out."""

from typing import Any

import jax


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


def ran_out(error: Exception) -> bool:
  """Returns whether a JaxRuntimeError means that memory ran out."""
  return 'RESOURCE_EXHAUSTED' in str(error) or 'out of memory' in str(error).lower()
