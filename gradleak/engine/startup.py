"""How JAX runs in this process; the programs of `launch/` begin with it, and so may a script of your own."""

import math
import os
from typing import Annotated

import jax

from gradleak.core import errors
from gradleak.core.settings import Range, ranged
from gradleak.engine import ahead, compiler

# Seconds of a compilation from which JAX keeps its program. An audit has many small ones, which add up.
_LEAST_SECONDS, _JAX_KEEPS = 'jax_persistent_cache_min_compile_time_secs', 1.0
_LEAST = 2  # CPU devices: programs of a single one have other bits, see `engine.groups.place`


@ranged
def configure(
  *, cache: str | None = '~/.cache/gradleak', x64: bool | None = None, cores: Annotated[int | None, Range(1)] = None
) -> None:
  """Lets JAX use every core and find again what it has compiled; to be called before anything is computed.

  Without it JAX has one CPU device, even with many cores. An attack then runs one group of lanes at a time instead of
  one per core. Where there is a GPU or TPU, its devices are used. All products then have the digits of float32, unless
  `jax_default_matmul_precision` is set; without this call, those of attacks and uploads do.

  Args:
    cache: folder of JAX's persistent compilation cache, in which every program is kept; `None` or '' for none.
    x64: whether 64-bit numbers are allowed, for closed forms; `None` leaves JAX's own setting.
    cores: how many cores JAX uses, where others use the rest; `None` for all. There are at least two devices: figures
      are then the same bits for any number of cores.

  Raises:
    UsageError: if JAX has already been used in this process, with another number of devices.
  """
  devices = max(_LEAST, min(cores or math.inf, ahead.cores()))  # lanes are sharded over devices
  try:
    jax.config.update('jax_num_cpu_devices', devices)
  except RuntimeError:
    raise errors.UsageError(
      'JAX has already been used here: call gl.configure() first, before arrays, keys or models are made'
    ) from None
  jax.config.update('jax_default_matmul_precision', compiler.precision())
  if x64 is not None:
    jax.config.update('jax_enable_x64', x64)
  if cache:
    jax.config.update('jax_compilation_cache_dir', os.path.expanduser(cache))
    if jax.config.values[_LEAST_SECONDS] == _JAX_KEEPS:  # another value is a user's own
      jax.config.update(_LEAST_SECONDS, 0.0)
