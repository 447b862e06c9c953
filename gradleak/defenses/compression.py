"""Sparsification: what is small is not sent as it was."""

import jax
import jax.numpy as jnp

from gradleak import errors
from gradleak.defenses.base import stateless


@jax.jit  # a loop outside of jit compiles anew at each call
def largest(x, rate):
  """Returns the mask of the entries of `x` that remain when the ⌊rate·n⌋ smallest by magnitude are dropped.

  `rate` may be traced. The threshold is found by bisection on the bits of |x|, whose order is that of the floats:
  exact, and many times faster than a sort under `vmap`. Ties at the threshold all remain; rate 1 drops everything.
  """
  bits = jax.lax.bitcast_convert_type(jnp.abs(x).astype(jnp.float32), jnp.int32)
  # In float32, 0.53·100 is 52.999996: the nudge, relative for large n, restores the count that was meant.
  share = jnp.asarray(rate, jnp.float32) * x.size
  kept = x.size - jnp.floor(share + jnp.maximum(1e-4, 1e-7 * share)).astype(jnp.int32)

  def refine(i, threshold):
    candidate = threshold | (jnp.int32(1) << (jnp.int32(30) - i))
    return jnp.where(jnp.sum(bits >= candidate, dtype=jnp.int32) >= kept, candidate, threshold)

  threshold = jax.lax.fori_loop(jnp.int32(0), jnp.int32(31), refine, jnp.int32(0))
  return (bits >= threshold) & (kept > 0)


def prune(*, rate: float):
  """Gradient compression (Zhu et al. 2019, section 5.2): zeroes the smallest entries of each tensor.

  `rate` in [0, 1] is the share of entries that become zero.
  """
  errors.check_number('prune(rate)', rate, low=0, high=1)

  def compress(updates):
    return jax.tree.map(lambda u: jnp.where(largest(u, rate), u, jnp.zeros_like(u)), updates)

  return stateless('prune', compress)
