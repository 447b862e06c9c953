"""Memory: how much of it is free, which errors mean that it ran out, and when compiled programs must be freed."""

import contextlib
import ctypes
import mmap
import pathlib
from typing import Any, NamedTuple

import jax

_ROOT = pathlib.Path('/')
# Control groups of Linux, by version: their folder, the limit, what is used, and what of it are files to drop.
_VERSIONS = {
  '': ('sys/fs/cgroup', 'memory.max', 'memory.current', 'inactive_file'),
  'memory': ('sys/fs/cgroup/memory', 'memory.limit_in_bytes', 'memory.usage_in_bytes', 'total_inactive_file'),
}


class Memory(NamedTuple):
  """What this process may use: all bytes, and the free ones."""

  all: int
  free: int


def host() -> Memory | None:
  """Returns the memory of the machine, or of the container or job around this process; None if it is unknown."""
  try:
    lines = [line.split() for line in (_ROOT / 'proc/meminfo').read_text('ascii').splitlines()]
    told = {line[0]: 1024 * int(line[1]) for line in lines}
    found = [Memory(told['MemTotal:'], told['MemAvailable:'])]
  except (OSError, KeyError):  # no Linux
    return None
  with contextlib.suppress(OSError):
    for line in (_ROOT / 'proc/self/cgroup').read_text().splitlines():
      _, controllers, path = line.split(':', 2)
      if controllers in _VERSIONS:
        found += _limited(*_VERSIONS[controllers], path)
  return Memory(*map(min, zip(*found, strict=True)))


def _limited(root: str, most: str, used: str, files: str, path: str) -> list[Memory]:
  """Returns the memory of each control group that has a limit, from that at `path` outwards.

  A container may see the path of its group on the machine, and mount the group as the root.
  """
  found, group = [], pathlib.Path(path)
  for folder in (_ROOT / root / str(one).lstrip('/') for one in (group, *group.parents)):
    with contextlib.suppress(OSError, ValueError):  # no such group, and 'max' for no limit
      limit, now = int((folder / most).read_text()), int((folder / used).read_text())
      told = dict(line.split() for line in (folder / 'memory.stat').read_text().splitlines())
      found.append(Memory(limit, max(0, limit - now + int(told.get(files, 0)))))
  return found


def free(device: Any) -> int | None:
  """Returns the free bytes of `device`, None if unknown; of a CPU device its `share`."""
  if device.platform == 'cpu':
    return share()
  stats = device.memory_stats() or {}
  return stats['bytes_limit'] - stats['bytes_in_use'] if 'bytes_limit' in stats else None


def share() -> int | None:
  """Returns the free bytes on the host for each of its devices, None if unknown."""
  found = host()
  return None if found is None else found.free // jax.local_device_count()


def release_programs() -> bool:
  """Frees the compiled programs of this process if it takes more than half of its memory maps, or of the memory.

  A program on a CPU takes maps for each of its kernels, those of an audit of ResNet-20 several thousand. LLVM aborts a
  process that reaches the limit, 65,530 by default. What is freed is compiled again, or found on disk, when called.

  Returns:
    Whether they were freed.
  """
  found = host()
  try:
    maps = (_ROOT / 'proc/self/maps').read_bytes().count(b'\n')
    most = int((_ROOT / 'proc/sys/vm/max_map_count').read_text('ascii'))
    pages = int((_ROOT / 'proc/self/statm').read_text('ascii').split()[1])
  except OSError:  # no Linux
    return False
  if 2 * maps <= most and (found is None or 2 * pages * mmap.PAGESIZE <= found.all):
    return False
  jax.clear_caches()
  with contextlib.suppress(AttributeError):  # a C library without it; the GNU one keeps what is freed
    ctypes.CDLL(None).malloc_trim(0)
  return True


def ran_out(error: Exception) -> bool:
  """Returns whether a JaxRuntimeError means that memory ran out."""
  return 'RESOURCE_EXHAUSTED' in str(error) or 'out of memory' in str(error).lower()
