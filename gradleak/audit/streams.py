"""Randomness of an audit: named streams of one key, made here, and used by uploads, lanes and learning only."""

import zlib
from typing import NamedTuple

import jax
import numpy as np


class Streams(NamedTuple):
  """The streams of one key: each has a name, and a place in it for every number.

  Attributes:
    key: of the audit.
  """

  key: jax.Array

  def named(self, name: str) -> jax.Array:
    """Returns the key of a stream."""
    return jax.random.fold_in(self.key, numbered(name))


def numbered(name: str) -> np.uint32:
  """Returns the number that is folded into the key for a stream."""
  return np.uint32(zlib.crc32(name.encode()))


@jax.jit  # one program, in place of several
def folded(keys: jax.Array, *numbers: jax.Array) -> jax.Array:
  """Returns keys [N], or one for all, with the N numbers of each array folded in, one array after the other."""
  for each in numbers:
    keys = jax.vmap(jax.random.fold_in, (0 if keys.ndim else None, 0))(keys, each)
  return keys
