"""Sparsification: entries of small magnitude become zero, or are not sent."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gradleak.core import trees
from gradleak.core.settings import Fraction, Positive
from gradleak.core.trees import Tree
from gradleak.defenses.base import stateless
from gradleak.defenses.defense import defense


@jax.jit  # a loop outside of jit is compiled at each call
def largest(x: jax.Array, rate: float | jax.Array) -> jax.Array:
  """Returns the mask of the entries of `x` that remain when the ⌊rate·n⌋ smallest by magnitude are dropped.

  The threshold is found by bisection on the bits of |x|, which are ordered like the floats. This is exact, and many
  times faster than a sort under `vmap`.

  Args:
    x: floats, n in all.
    rate: the fraction to drop, in [0, 1]; may be traced. 1 drops everything.

  Returns:
    Booleans shaped like `x`; entries equal to the threshold all remain.
  """
  # In float32, 0.53·100 is 52.999996: the correction, relative for large n, restores the exact count.
  product = jnp.asarray(rate, jnp.float32) * x.size
  kept = x.size - jnp.floor(product + jnp.maximum(1e-4, 1e-7 * product)).astype(jnp.int32)
  bits = _magnitude_bits(x)
  return (bits >= _threshold(bits, kept)) & (kept > 0)


def _magnitude_bits(x: jax.Array) -> jax.Array:
  return jax.lax.bitcast_convert_type(jnp.abs(x).astype(jnp.float32), jnp.int32)


def _threshold(bits: jax.Array, kept: jax.Array) -> jax.Array:
  """Returns the `kept`-th largest of the non-negative int32 `bits`."""

  def refine(i: jax.Array, threshold: jax.Array) -> jax.Array:
    candidate = threshold | (jnp.int32(1) << (jnp.int32(30) - i))
    return jnp.where(jnp.sum(bits >= candidate, dtype=jnp.int32) >= kept, candidate, threshold)

  return jax.lax.fori_loop(jnp.int32(0), jnp.int32(31), refine, jnp.int32(0))


@jax.jit
def magnitude_at(x: jax.Array, kept: jax.Array) -> jax.Array:
  """Returns the `kept`-th largest magnitude of the entries of `x`, a float32 scalar; `kept` ≥ 1 may be traced."""
  return jax.lax.bitcast_convert_type(_threshold(_magnitude_bits(x), kept), jnp.float32)


def portion(ratio: float | jax.Array, size: int) -> jax.Array:
  """Returns ⌈ratio·size⌉, an int32 scalar: at least 1 unless `ratio`, which may be traced, is 0."""
  ratio = jnp.asarray(ratio, jnp.float32)
  product = ratio * size
  # In float32, 0.6·25 is 15.000001: the correction restores the exact count, as in `largest`.
  count = jnp.ceil(product - jnp.maximum(1e-4, 2e-7 * product)).astype(jnp.int32)
  count = jnp.where(ratio < 1, count, jnp.int32(size))  # with many millions, the correction would drop some
  return jnp.maximum(count, (ratio > 0).astype(jnp.int32))


@jax.jit
def largest_portion(x: jax.Array, ratio: float | jax.Array) -> jax.Array:
  """Returns the mask of exactly the ⌈ratio·n⌉ largest entries of `x` by magnitude; of equal ones the first.

  Unlike with `largest`, zeros count as entries: the number of entries that are sent is exact.

  Args:
    x: floats, n in all.
    ratio: the fraction to keep, in [0, 1]; may be traced.

  Returns:
    Booleans shaped like `x`.
  """
  bits, kept = _magnitude_bits(x), portion(ratio, x.size)
  threshold = _threshold(bits, kept)
  above, ties = bits > threshold, bits == threshold
  order = jnp.cumsum(ties.ravel(), dtype=jnp.int32).reshape(x.shape)
  return above | (ties & (order <= kept - jnp.sum(above, dtype=jnp.int32)))


@defense(
  place='upload',
  citation='Zhu, Liu, Han: Deep Leakage from Gradients. NeurIPS 2019.',
  sparsifies='zeros',
  by_magnitude=True,
  post_processing=True,
  idle=lambda settings: settings['rate'] == 0,
)
def prune(*, rate: Fraction) -> optax.GradientTransformationExtraArgs:
  r"""Gradient compression (Zhu et al. 2019, section 5.2): sets the smallest entries of each tensor to zero.

  Formula:
    g'_i = g_i \cdot [\, |g_i| \ge \tau \,], \quad \tau = \text{the } (n - \lfloor \text{rate} \cdot n \rfloor)
    \text{-th largest } |g_j| \text{ of a tensor of } n

  Args:
    rate: the fraction of entries that become zero.
  """

  def compress(updates: Tree) -> Tree:
    return jax.tree.map(lambda u: jnp.where(largest(u, rate), u, jnp.zeros_like(u)), updates)

  return stateless('prune', compress)


class MaskState(NamedTuple):
  """The state of a defense that only reports which entries were sent; the client reads `mask`.

  Attributes:
    mask: boolean masks of the last update, shaped like the parameters, or one scalar per tensor.
  """

  mask: Tree


@defense(
  place='upload',
  sparsifies='mask',
  by_magnitude=True,
  post_processing=True,
  selects=True,
  idle=lambda settings: settings['ratio'] == 1,
)
def topk(*, ratio: Fraction) -> optax.GradientTransformationExtraArgs:
  r"""Sends only the ⌈ratio·n⌉ largest entries of each tensor of n: gradient sparsification.

  Unlike with `prune`, noise that is added later does not reach the entries that are not sent.

  Formula:
    g'_i = g_i \cdot m_i, \quad m = \text{the } \lceil \text{ratio} \cdot n \rceil \text{ largest } |g_j|
    \text{ of a tensor of } n

  Args:
    ratio: the fraction of entries that are sent.
  """

  def update(updates: Tree, state: MaskState, params: Tree = None, **extra: Any) -> tuple[Tree, MaskState]:
    del state, params, extra
    mask = jax.tree.map(lambda u: largest_portion(u, ratio), updates)
    return trees.masked(updates, mask), MaskState(mask)

  return optax.GradientTransformationExtraArgs(lambda params: MaskState(_all_entries(params)), update)


class DGCState(NamedTuple):
  """What a client keeps between participations; trees shaped like the parameters.

  Attributes:
    velocity: u, the momentum of each entry since it was last sent.
    residual: v, the sum of each entry's velocities since it was last sent.
    mask: boolean masks of the last update.
  """

  velocity: Tree
  residual: Tree
  mask: Tree


@defense(
  place='upload',
  citation='Lin, Han, Mao, Wang, Dally: Deep Gradient Compression. ICLR 2018.',
  sparsifies='mask',
  accumulates=True,
  by_magnitude=True,
  shortens=lambda settings: settings['clip'],
  selects=True,
  idle=lambda settings: settings['ratio'] == 1 and math.isinf(settings['clip']),
)
def dgc(
  *, ratio: Fraction, momentum: Fraction = 0.9, clip: Positive = math.inf
) -> optax.GradientTransformationExtraArgs:
  r"""Deep Gradient Compression (Lin et al. 2018, section 3, algorithm 4), without its warm-up.

  Each tensor accumulates what it does not send, with momentum: u ← m·u + g, v ← v + u. The ⌈ratio·n⌉ largest entries of
  |v| are sent, and cleared in u and v.

  Formula:
    u \leftarrow m u + g, \quad v \leftarrow v + u, \quad g' = v \odot s, \quad
    u \leftarrow u \odot (1 - s), \quad v \leftarrow v \odot (1 - s)

  Args:
    ratio: the fraction of entries that are sent.
    momentum: m.
    clip: the L2 norm that g is clipped to beforehand, as by `clip`; infinity does not clip.
  """

  def init(params: Tree) -> DGCState:
    return DGCState(trees.zeros_like(params), trees.zeros_like(params), _all_entries(params))

  def update(updates: Tree, state: DGCState, params: Tree = None, **extra: Any) -> tuple[Tree, DGCState]:
    del params, extra
    gradient = trees.clip(updates, clip)
    velocity = jax.tree.map(lambda u, g: jnp.asarray(momentum, u.dtype) * u + g, state.velocity, gradient)
    residual = jax.tree.map(jnp.add, state.residual, velocity)
    mask = jax.tree.map(lambda v: largest_portion(v, ratio), residual)
    kept = jax.tree.map(jnp.logical_not, mask)
    return trees.masked(residual, mask), DGCState(trees.masked(velocity, kept), trees.masked(residual, kept), mask)

  return optax.GradientTransformationExtraArgs(init, update)


def _all_entries(tree: Tree) -> Tree:
  return jax.tree.map(lambda x: jnp.ones(x.shape, bool), tree)
