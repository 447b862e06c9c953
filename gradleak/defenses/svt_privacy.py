"""NVIDIA FLARE's filter SVTPrivacy: the sparse vector technique on the entries of an update."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradleak.core import trees
from gradleak.core.settings import Fraction, NonNegative, Positive
from gradleak.core.trees import Tree
from gradleak.defenses.base import shared_leaves, stateless
from gradleak.defenses.clipping import clamp
from gradleak.defenses.compression import magnitude_at, portion
from gradleak.defenses.defense import Context, Noise, Settings, defense

_ACCEPTED = 0.5  # of the entries, where the noise of the queries hides their values, as it does by default


def _scale(settings: Settings) -> float:
  return 2 * settings['gamma'] / settings['noise_var']


def _released(settings: Settings) -> float:
  """Returns the expected fraction of entries that are sent: of draws with replacement, some meet the same entry."""
  fraction = settings['fraction']
  if not settings['replace']:
    return fraction
  accepted = max(fraction, _ACCEPTED)
  return accepted * -math.expm1(-fraction / accepted)


def _accounted(context: Context, settings: Settings) -> str:
  size = trees.entries(context.variables['params'], context.unshared)
  count = int(portion(settings['fraction'], size))
  spent = settings['epsilon'] + count * settings['noise_var']
  return (
    f'no ε here: its own accounting sums to ε = {spent:,.4g} per upload, of which {settings["epsilon"]:g} is for the '
    f'selection, and {settings["noise_var"]:g} for each of {count:,} entries that are sent'
  )


@defense(
  place='upload',
  citation='Li et al.: Privacy-preserving Federated Brain Tumour Segmentation. MLMI 2019; as SVTPrivacy of NVIDIA '
  'FLARE 2.9.',
  published='SVTPrivacy',
  random=True,
  arguments=lambda context, settings: (context.unshared,),
  sparsifies='zeros',
  noise=Noise(lambda settings, context, count: 2 * _scale(settings) ** 2, _released, distribution='laplace'),
  limits=lambda settings: settings['gamma'],
  simulated=lambda settings: clamp(limit=settings['gamma']),
  post_processing=True,
  remark=_accounted,
)
def svt_privacy(
  unshared: Any = None,
  *,
  fraction: Fraction = 0.1,
  epsilon: Positive = 0.1,
  noise_var: Positive = 0.1,
  gamma: Positive = 1e-5,
  tau: NonNegative = 1e-6,
  replace: bool = True,
) -> optax.GradientTransformationExtraArgs:
  r"""Sends a few entries that pass a noisy threshold, truncated to ±gamma and with Laplace noise; the rest are zero.

  An entry passes where its truncated magnitude plus Laplace noise reaches the noisy threshold. Those that fail are
  asked again until n have passed, and n of all that passed are drawn. By default the noise of a query is more than 20·n
  times gamma. About half of all entries then pass at once, and the choice hardly depends on the update. The noise of
  what is sent, 2·gamma / noise_var, is 20 times gamma. A larger `noise_var` is *less* noise.

  Users found three faults. Until 2022, entries that passed and were not drawn left without noise (issue 343 of NVIDIA
  FLARE). Until 2026 the noise was inside the truncation (issue 462), so that an entry was nearly always ±gamma. The ε
  in its settings is that of the selection; each of the n values costs noise_var beside it (pull request 4470). The
  sparse vector technique also stops at the n-th entry that passes (Lyu, Su, Li: VLDB 2017, algorithm 1). This filter
  does not.

  The passes are not run one by one. The pass at which an entry passes has a geometric distribution, from which it is
  drawn. The result has the same distribution. Entries that can never pass are never sent.

  Formula:
    g'_i = m_i \left( \min(\max(g_i, -\gamma), \gamma) + \mathrm{Lap}(2 \gamma / v) \right), \quad
    m_i = [\, i \text{ is drawn among those with } \min(|g_i|, \gamma) + \nu_i \ge \tau + \rho \,]

    \rho \sim \mathrm{Lap}(\gamma / \varepsilon_1), \quad \nu_i \sim \mathrm{Lap}(2 n \gamma / \varepsilon_2), \quad
    \varepsilon_1 : \varepsilon_2 = 1 : (2n)^{2/3}, \quad \varepsilon_1 + \varepsilon_2 = \varepsilon

  Args:
    unshared: the paths of parameters that are not shared, whose zeros are no entries; None for none.
    fraction: n over the number of entries of the network.
    epsilon: ε of the selection.
    noise_var: v, the ε of each value that is sent, and no variance.
    gamma: γ, the largest magnitude of an entry.
    tau: τ, the threshold before its noise.
    replace: whether the n are drawn with replacement; then fewer than n entries are sent. A tensor without axes passes
      as it is.

  Raises (from its update):
    UsageError: without `key=`.
  """

  def release(key: jax.Array, updates: Tree) -> Tree:
    leaves, whole = shared_leaves(updates, unshared)
    if not leaves:
      return updates
    flat = jnp.concatenate([jnp.ravel(leaf).astype(jnp.float32) for leaf in leaves])
    query, draw, value = jax.random.split(key, 3)
    limit = jnp.asarray(gamma, jnp.float32)
    cut = jnp.clip(flat, -limit, limit)
    count = portion(fraction, flat.size)
    passed = _passed(query, jax.lax.stop_gradient(jnp.abs(cut)), count, limit, epsilon, tau)
    chosen = (_with if replace else _without)(draw, passed, count)
    noise = 2 * limit / jnp.asarray(noise_var, jnp.float32) * trees.draws(jax.random.laplace, value, flat)
    sent = jnp.split(jnp.where(chosen, cut + noise, 0.0), np.cumsum([leaf.size for leaf in leaves])[:-1])
    new = [u if not u.ndim else s.reshape(u.shape).astype(u.dtype) for u, s in zip(leaves, sent, strict=True)]
    return whole(new)

  return stateless('svt_privacy', release, random=True)


def _passed(
  key: jax.Array, magnitudes: jax.Array, count: jax.Array, gamma: jax.Array, epsilon: float, tau: float
) -> jax.Array:
  """Returns which entries have passed after the first pass at which `count` have, booleans like `magnitudes`."""
  first, second = jax.random.split(key)
  whole = count.astype(jnp.float32)
  budget, ratio = jnp.asarray(epsilon, jnp.float32), (2 * whole) ** (2 / 3)
  rho = gamma * (1 + ratio) / budget
  nu = jnp.maximum(gamma * 2 * whole * (1 + ratio) / (budget * ratio), jnp.finfo(jnp.float32).tiny)
  missing = (jnp.asarray(tau, jnp.float32) + rho * jax.random.laplace(first) - magnitudes) / nu
  tail = 0.5 * jnp.exp(-jnp.abs(missing))
  passing = jnp.where(missing >= 0, tail, 1 - tail)  # the probability at each pass
  waiting = jnp.maximum(jax.random.exponential(second, magnitudes.shape), jnp.finfo(jnp.float32).tiny)
  speed = -jnp.log1p(-passing) / waiting  # an entry passes at pass ⌈1 / speed⌉, at the first where it is certain to
  slowest = magnitude_at(speed, jnp.maximum(count, 1))
  return (speed > 0) & (jnp.ceil(1 / speed) <= jnp.maximum(jnp.ceil(1 / slowest), 1))


def _without(key: jax.Array, passed: jax.Array, count: jax.Array) -> jax.Array:
  """Returns which of the entries that passed are drawn, `count` of them."""
  order = jnp.where(passed, jax.random.uniform(key, passed.shape, minval=0.5), 0.0)
  return passed & (order >= magnitude_at(order, jnp.maximum(count, 1))) & (count > 0)


def _with(key: jax.Array, passed: jax.Array, count: jax.Array) -> jax.Array:
  """Returns which of the entries that passed are drawn at least once in `count` draws."""
  rank = jnp.cumsum(passed, dtype=jnp.int32) - 1
  drawn = jax.random.randint(key, passed.shape, 0, jnp.maximum(rank[-1] + 1, 1))
  hit = jnp.zeros(passed.shape, bool).at[drawn].max(jnp.arange(passed.size) < count)
  return passed & hit[jnp.maximum(rank, 0)]
