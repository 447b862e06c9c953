"""Central differential privacy as Flower's strategy wrappers run it: the server clips uploads, and adds noise."""

from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gradleak.core import errors, trees
from gradleak.core.settings import Choice, Count, Fraction, NonNegative, Positive
from gradleak.core.trees import Tree
from gradleak.defenses.base import stream
from gradleak.defenses.defense import defense


class ServerDPState(NamedTuple):
  """What the server keeps between rounds.

  Attributes:
    norm: the norm that uploads are clipped to in the next round.
  """

  norm: jax.Array


@defense(
  place='round',
  citation='McMahan, Ramage, Talwar, Zhang: Learning Differentially Private Recurrent Language Models. ICLR 2018; '
  'Andrew, Thakkar, McMahan, Ramaswamy: Differentially Private Learning with Adaptive Clipping. NeurIPS 2021; as the '
  'wrappers DifferentialPrivacyServerSide(Fixed|Adaptive)Clipping of Flower 1.42.',
  published='DifferentialPrivacyServerSideClipping',
  random=True,
  clips_each='upload',
  replaces=True,
  remark=lambda context, settings: 'no ε against the server: it sees every upload before it clips and adds noise',
)
def server_dp(
  *,
  norm: Positive = 0.1,
  noise: NonNegative,
  clients: Count,
  rate: NonNegative = 0.0,
  quantile: Fraction = 0.5,
  counts: Annotated[str, Choice(('clipped', 'unclipped'))] = 'clipped',
) -> optax.GradientTransformationExtraArgs:
  r"""Clips each upload at the server, and adds noise to the weighted mean; the norm may adapt to the uploads.

  Who sees nothing but the next global model meets noise. A curious server does not: all uploads reach it as they are.
  Flower's `fixedclipping_mod` and `adaptiveclipping_mod` clip at the client. The server then sees
  `clip(norm=…)+server_dp(norm=…,noise=…,clients=…)`. The second of them also tells it whether an update was clipped.

  The noise is calibrated to a mean of equal weights. Under weights by number of samples, one client moves the mean by
  more than that. The ε that an accountant states for the noise multiplier is then too small.

  Adaptive clipping draws its noise for the norm of the next round. With noise, that of the count has the standard
  deviation clients / 20, and takes part of the noise multiplier. Flower counts the clipped uploads; the paper counts
  those that are not (`counts='unclipped'`). Flower's norm therefore falls where most uploads are clipped, and leaves
  the quantile. An upload whose norm is no finite number becomes zeros, and counts as clipped.

  Formula:
    \bar{\Delta}' = \sum_k w_k \Delta_k \min(1, C / \lVert \Delta_k \rVert_2) + n, \quad
    n \sim \mathcal{N}(0, (z C' / K)^2 I)

    C' = C e^{-\eta (b - \gamma)}, \quad b = \tfrac{1}{K} \left( \sum_k b_k + \mathcal{N}(0, (K / 20)^2) \right)

  Args:
    norm: C of the first round. Flower's adaptive clipping starts at 0.1; a fixed norm has no default there.
    noise: z, the noise multiplier.
    clients: K, which divides the noise: how many clients are sampled in a round.
    rate: η, the rate at which the norm adapts, 0.2 in the paper; 0 leaves it fixed.
    quantile: γ.
    counts: the uploads whose share is b.

  Raises:
    UsageError: where the norm adapts and the noise is at least clients / 10: the count takes all of it. From its
      update, without `key=`, or without `uploads=` [K, …] and their `weights=`.
  """
  if not any(isinstance(x, jax.core.Tracer) for x in (noise, rate)) and rate > 0 and noise >= clients / 10:
    raise errors.UsageError(
      f'server_dp(noise) is {noise!r} with clients={clients}, expected less than clients / 10 where the norm adapts: '
      'the count of clipped uploads takes all of it'
    )

  def init(params: Tree) -> ServerDPState:
    del params
    return ServerDPState(jnp.asarray(norm, jnp.float32))

  def update(
    updates: Tree,
    state: ServerDPState,
    params: Tree = None,
    *,
    key: jax.Array | None = None,
    uploads: Tree = None,
    weights: jax.Array | None = None,
    **extra: Any,
  ) -> tuple[Tree, ServerDPState]:
    del params, extra
    if uploads is None or weights is None:
      raise errors.UsageError(
        'the defense server_dp clips each upload: call update(…, uploads=…, weights=…), in a federation without '
        'server_noise'
      )
    first, second = jax.random.split(stream('server_dp', key, updates))
    mean, norms = _clipped(uploads, weights, state.norm)
    share = _share(first, ~(norms <= state.norm) == (counts == 'clipped'), weights > 0, noise, clients)
    adapts = jnp.asarray(rate, jnp.float32) > 0
    step = jnp.asarray(rate, jnp.float32) * (share - jnp.asarray(quantile, jnp.float32))
    adapted = jnp.where(adapts, state.norm * jnp.exp(-step), state.norm)
    multiplier = jnp.where(adapts, _remaining(noise, clients / 20), jnp.asarray(noise, jnp.float32))
    scale = jnp.where(multiplier > 0, multiplier * adapted / clients, 0.0)
    draws = trees.draws(jax.random.normal, second, updates)
    noisy = jax.tree.map(lambda m, z, u: (m + scale.astype(z.dtype) * z).astype(u.dtype), mean, draws, updates)
    return noisy, ServerDPState(adapted)

  return optax.GradientTransformationExtraArgs(init, update)


def _clipped(uploads: Tree, weights: jax.Array, norm: jax.Array) -> tuple[Tree, jax.Array]:
  """Returns (the weighted mean of the uploads [K, …], each clipped to the norm; their norms before, [K])."""

  def rows(values: jax.Array, stacked: jax.Array) -> jax.Array:
    return values.reshape(-1, *(1,) * (stacked.ndim - 1))

  uploads = jax.tree.map(lambda u: jnp.where(rows(weights > 0, u), u, jnp.zeros_like(u)), uploads)  # 0·NaN is NaN
  clipped = jax.vmap(lambda upload: trees.clip(upload, norm))(uploads)

  def mean(stacked: jax.Array) -> jax.Array:
    stacked = trees.widened(stacked)
    return jnp.tensordot(weights.astype(stacked.dtype), stacked, 1)

  return jax.tree.map(mean, clipped), jax.vmap(trees.norm)(uploads)


def _share(key: jax.Array, counted: jax.Array, answered: jax.Array, noise: float, clients: int) -> jax.Array:
  """Returns the share of those counted among the clients that answered, noisy where the updates are."""
  stddev = jnp.where(jnp.asarray(noise, jnp.float32) > 0, clients / 20, 0.0)
  present = jnp.maximum(jnp.sum(answered, dtype=jnp.float32), 1.0)
  return (jnp.sum(counted & answered, dtype=jnp.float32) + stddev * jax.random.normal(key)) / present


def _remaining(noise: float, counting: float) -> jax.Array:
  """Returns the noise multiplier of the updates, where the count of `counting` noise takes a part (Andrew et al.)."""
  noise = jnp.maximum(jnp.asarray(noise, jnp.float32), jnp.finfo(jnp.float32).tiny)
  left = noise**-2 - (2 * counting) ** -2
  return jnp.where(noise > 1e-30, left**-0.5, 0.0)
