"""NVIDIA FLARE's filter PercentilePrivacy, which its examples call a privacy-preserving policy."""

from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax

from gradleak.core.settings import Count, Positive, Range
from gradleak.core.trees import Tree
from gradleak.defenses.base import shared_leaves, stateless
from gradleak.defenses.clipping import clamp, clamped
from gradleak.defenses.compression import magnitude_at
from gradleak.defenses.defense import Settings, defense


def _limit(settings: Settings) -> float:
  return settings['gamma'] * settings['steps']


@defense(
  place='upload',
  citation='Shokri, Shmatikov: Privacy-Preserving Deep Learning. CCS 2015; as PercentilePrivacy of NVIDIA FLARE 2.9.',
  published='PercentilePrivacy',
  arguments=lambda context, settings: (context.unshared,),
  sparsifies='zeros',
  by_magnitude=True,
  limits=_limit,
  simulated=lambda settings: clamp(limit=_limit(settings)),
  post_processing=True,
  remark=lambda context, settings: 'no ε of its own: it adds no noise, its output is a function of the update',
)
def percentile_privacy(
  unshared: Any = None,
  *,
  percentile: Annotated[float, Range(0, 100)] = 10.0,
  gamma: Positive = 0.01,
  steps: Count = 1,
) -> optax.GradientTransformationExtraArgs:
  r"""Zeroes the entries below a percentile of all magnitudes, and truncates the others to ±gamma per local step.

  It adds no noise, so it guarantees nothing: what is left is the update, with its largest entries cut. With its
  defaults, 90 % of the entries leave the client, and those that a single step changed by less than 0.01 leave exactly.
  The filter's own help says that entries below gamma become zero; its code truncates those above.

  The percentile is one for the whole network, and its threshold lies between order statistics as NumPy's does. A tensor
  without axes passes as it is. The published filter also takes whole weights by default (`data_kinds`), and then
  truncates the weights themselves to ±gamma; here it is applied to updates.

  Formula:
    g'_i = \min(\max(g_i, -s\gamma), s\gamma) \cdot [\, |g_i| \ge \tau \,], \quad
    \tau = \text{the percentile of all } |g_j|, \quad s = \text{steps}

  Args:
    unshared: the paths of parameters that are not shared, whose zeros do not count; None for none.
    percentile: of all magnitudes, the one below which entries become zero.
    gamma: γ, the largest magnitude per local step; infinity truncates nothing.
    steps: s, the local steps that the client reports (NUM_STEPS_CURRENT_ROUND, 1 where it reports none).
  """

  def share(updates: Tree) -> Tree:
    leaves, whole = shared_leaves(updates, unshared)
    if not leaves:
      return updates
    flat = jnp.concatenate([jnp.ravel(u).astype(jnp.float32) for u in leaves])
    # NumPy interpolates at (n − 1)·q: ⌈(n − 1)·q⌉ entries are below, in float32 with the correction of `largest`.
    product = jnp.asarray(percentile, jnp.float32) / 100 * (flat.size - 1)
    dropped = jnp.ceil(product - jnp.maximum(1e-4, 2e-7 * product)).astype(jnp.int32)
    threshold = magnitude_at(flat, flat.size - dropped)

    def one(update: jax.Array, cut: jax.Array) -> jax.Array:
      kept = jnp.abs(update.astype(jnp.float32)) >= threshold
      return jnp.where(kept, cut, jnp.zeros_like(cut)) if update.ndim else update

    return whole([*map(one, leaves, clamped(leaves, jnp.asarray(gamma, jnp.float32) * steps))])

  return stateless('percentile_privacy', share)
