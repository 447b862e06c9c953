"""Sparsification: what is small is not sent as it was."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from gradleak import errors, trees
from gradleak.defenses.base import stateless


@jax.jit  # a loop outside of jit compiles anew at each call
def largest(x, rate):
  """Returns the mask of the entries of `x` that remain when the ⌊rate·n⌋ smallest by magnitude are dropped.

  `rate` may be traced. The threshold is found by bisection on the bits of |x|, whose order is that of the floats:
  exact, and many times faster than a sort under `vmap`. Ties at the threshold all remain; rate 1 drops everything.
  """
  # In float32, 0.53·100 is 52.999996: the nudge, relative for large n, restores the count that was meant.
  share = jnp.asarray(rate, jnp.float32) * x.size
  kept = x.size - jnp.floor(share + jnp.maximum(1e-4, 1e-7 * share)).astype(jnp.int32)
  bits = _magnitude_bits(x)
  return (bits >= _threshold(bits, kept)) & (kept > 0)


def _magnitude_bits(x):
  return jax.lax.bitcast_convert_type(jnp.abs(x).astype(jnp.float32), jnp.int32)


def _threshold(bits, kept):
  """Returns the `kept`-th largest of the non-negative int32 `bits`."""

  def refine(i, threshold):
    candidate = threshold | (jnp.int32(1) << (jnp.int32(30) - i))
    return jnp.where(jnp.sum(bits >= candidate, dtype=jnp.int32) >= kept, candidate, threshold)

  return jax.lax.fori_loop(jnp.int32(0), jnp.int32(31), refine, jnp.int32(0))


def portion(ratio, size):
  """Returns ⌈ratio·size⌉, an int32 scalar: at least 1 unless `ratio`, which may be traced, is 0."""
  ratio = jnp.asarray(ratio, jnp.float32)
  share = ratio * size
  # In float32, 0.6·25 is 15.000001: the nudge restores the count that was meant, as in `largest`.
  count = jnp.ceil(share - jnp.maximum(1e-4, 2e-7 * share)).astype(jnp.int32)
  count = jnp.where(ratio < 1, count, jnp.int32(size))  # of many millions, the nudge would drop some
  return jnp.maximum(count, (ratio > 0).astype(jnp.int32))


@jax.jit
def largest_portion(x, ratio):
  """Returns the mask of exactly the ⌈ratio·n⌉ largest entries of `x` by magnitude; of equal ones the first.

  Unlike `largest`, it counts zeros as entries like any others: what a mask sends is what is paid for.
  """
  bits, kept = _magnitude_bits(x), portion(ratio, x.size)
  threshold = _threshold(bits, kept)
  above, ties = bits > threshold, bits == threshold
  order = jnp.cumsum(ties.ravel(), dtype=jnp.int32).reshape(x.shape)
  return above | (ties & (order <= kept - jnp.sum(above, dtype=jnp.int32)))


def prune(*, rate: float):
  """Gradient compression (Zhu et al. 2019, section 5.2): zeroes the smallest entries of each tensor.

  `rate` in [0, 1] is the share of entries that become zero.
  """
  errors.check_number('prune(rate)', rate, low=0, high=1)

  def compress(updates):
    return jax.tree.map(lambda u: jnp.where(largest(u, rate), u, jnp.zeros_like(u)), updates)

  return stateless('prune', compress)


class SentState(NamedTuple):
  """The state of a defense that keeps nothing but what the client is told.

  Attributes:
    sent: a tree of the boolean masks of what was sent last.
  """

  sent: object


def topk(*, ratio: float):
  """Sends the ⌈ratio·n⌉ largest entries of each tensor of n and nothing else: gradient sparsification.

  `ratio` in [0, 1] is the share of entries that are sent. Unlike after `prune`, noise cannot fill the rest.
  """
  errors.check_number('topk(ratio)', ratio, low=0, high=1)

  def update(updates, state, params=None, **extra):
    del state, params, extra
    sent = jax.tree.map(lambda u: largest_portion(u, ratio), updates)
    return trees.withhold(updates, sent), SentState(sent)

  return optax.GradientTransformationExtraArgs(lambda params: SentState(_all_entries(params)), update)


class DGCState(NamedTuple):
  """What a client keeps between participations.

  Attributes:
    velocity: u, the momentum of each entry since it was last sent.
    residual: v, what each entry has gathered since it was last sent.
    sent: a tree of the boolean masks of what was sent last.
  """

  velocity: object
  residual: object
  sent: object


def dgc(*, ratio: float, momentum: float = 0.9, clip: float = math.inf):
  """Deep Gradient Compression (Lin et al. 2018, section 3, algorithm 4), without its warm-up.

  Each tensor gathers what it does not send, with momentum: u ← m·u + g, v ← v + u. The ⌈ratio·n⌉ largest entries of |v|
  are sent, and cleared in u and v.

  Args:
    ratio: the share of entries that are sent, in [0, 1].
    momentum: m, in [0, 1].
    clip: the norm that g is clipped to beforehand, over all tensors together; infinity leaves it.
  """
  errors.check_number('dgc(ratio)', ratio, low=0, high=1)
  errors.check_number('dgc(momentum)', momentum, low=0, high=1)
  errors.check_number('dgc(clip)', clip, low=1e-12)

  def init(params):
    return DGCState(trees.zeros_like(params), trees.zeros_like(params), _all_entries(params))

  def update(updates, state, params=None, **extra):
    del params, extra
    gradient = trees.clip(updates, clip)
    velocity = jax.tree.map(lambda u, g: jnp.asarray(momentum, u.dtype) * u + g, state.velocity, gradient)
    residual = jax.tree.map(jnp.add, state.residual, velocity)
    sent = jax.tree.map(lambda v: largest_portion(v, ratio), residual)
    kept = jax.tree.map(jnp.logical_not, sent)
    return trees.withhold(residual, sent), DGCState(
      trees.withhold(velocity, kept), trees.withhold(residual, kept), sent
    )

  return optax.GradientTransformationExtraArgs(init, update)


def _all_entries(tree):
  return jax.tree.map(lambda x: jnp.ones(x.shape, bool), tree)
