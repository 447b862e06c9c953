"""Differential privacy of clients (Geyer et al. 2017) and of examples (Abadi et al. 2016), and its ε.

A noise multiplier is the noise's standard deviation over the clipping norm. An ε means nothing without its neighbouring
relation: `Epsilon` holds both, with whom it protects, what is published, and how contributions are sampled.
"""

import contextlib
import dataclasses
import functools
import logging
import math
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax

from gradleak.core import errors, trees
from gradleak.core.settings import Choice, Count, NonNegative, Positive, Range, ranged
from gradleak.core.trees import Tree
from gradleak.defenses import base
from gradleak.defenses.clipping import clip
from gradleak.defenses.defense import SENSITIVITIES, Mechanism, Noise, Settings, defense
from gradleak.defenses.noise import gaussian
from gradleak.models import mixing
from gradleak.models.model import per_example_loss

ACCOUNTANTS = ('rdp', 'pld')
Accountant = Annotated[str, Choice(ACCOUNTANTS)]
Delta = Annotated[float, Range(1e-300, 1 - 1e-12)]
Rate = Annotated[float, Range(1e-12, 1)]  # of sampling
Budget = Annotated[float, Range(1e-12, finite=True)]  # an ε
SAMPLINGS = {
  'none': 'no sampling',
  'Poisson': 'Poisson sampling at {:g}',
  'fixed size': 'sampling of a fixed number at {:g}, accounted as Poisson',
}


@dataclasses.dataclass(frozen=True)
class Epsilon:
  """An ε of (ε, δ)-differential privacy, and all that it is relative to.

  Attributes:
    value: ε ≥ 0, infinity without a bound.
    relation: which data sets are neighbours, a key of `SENSITIVITIES`: one contribution is replaced by another, by
      zeros, or is added or removed. A server that knows who sends can learn more than whether somebody did: what a
      client holds, one image or another, is hidden in the relation 'replace one'.
    unit: whose contribution differs, 'client' or 'example'.
    published: what an attacker sees: 'one upload', 'all uploads' of a training, or 'all global models' of it.
    sampling: a key of `SAMPLINGS`: 'none' (the attacker knows who takes part), 'Poisson' (each independently of all
      others, and in secret), or 'fixed size' (so many of all, in secret), for which the ε of 'Poisson' is customary.
    sampling_rate: the probability of taking part in a release, in (0, 1]; 1 without sampling.
    delta: δ.
    accountant: 'rdp' or 'pld', see `epsilon`.
  """

  value: float
  relation: str
  unit: str
  published: str
  sampling: str = 'none'
  sampling_rate: float = 1.0
  delta: float = 1e-5
  accountant: str = 'rdp'

  @property
  def terms(self) -> dict[str, Any]:
    """All of it but the value, plain JSON."""
    return {name: value for name, value in dataclasses.asdict(self).items() if name != 'value'}

  def __str__(self) -> str:
    return f'ε = {self.value:.4g} ({self.said})'

  @property
  def said(self) -> str:
    """All of it but the value, in words."""
    sampled = SAMPLINGS[self.sampling].format(self.sampling_rate)
    return (
      f'{self.relation}, per {self.unit}, {self.published}, {sampled}, δ = {self.delta:g}, {self.accountant.upper()}'
    )


def _scale(settings: Settings) -> float:
  """Returns the standard deviation of the noise, noise·norm; 0 without noise, even where the norm is infinite."""
  return settings['norm'] * settings['noise'] if settings['noise'] else 0.0


def _per_client(settings: Settings, clipped_to: float | None, position: int) -> Mechanism | None:
  del clipped_to, position
  return Mechanism(settings['noise'], 'client') if settings['noise'] else None


def _per_example(settings: Settings, clipped_to: float | None, position: int) -> Mechanism | None:
  """Only as the first stage does it return the mean of the examples' clipped gradients."""
  del clipped_to
  return Mechanism(settings['noise'], 'example') if settings['noise'] and position == 0 else None


@defense(
  place='upload',
  citation='Geyer, Klein, Nabi: Differentially Private Federated Learning: A Client Level Perspective. 2017.',
  random=True,
  noise=Noise(lambda settings, context, count: _scale(settings) ** 2),
  clips=lambda settings: settings['norm'],
  mechanism=_per_client,
  post_processing=True,
  idle=lambda settings: settings['noise'] == 0 and math.isinf(settings['norm']),
)
def client_dp(*, norm: Positive, noise: NonNegative) -> optax.GradientTransformationExtraArgs:
  r"""Geyer's mechanism at the client, as FFL attacks it: clip the update, then add noise to it.

  The update is scaled by min(1, norm / ‖update‖₂), and every entry gets N(0, (noise·norm)²): Geyer et al. 2017,
  algorithm 1, for a single client. The server sees nothing else, so the guarantee holds against the server too. An
  update whose norm is no finite number counts as zeros, as in `clip`: weights that a server sends can cause it.

  Formula:
    \Delta' = \Delta \cdot \min(1, S / \lVert \Delta \rVert_2) + n, \quad n \sim \mathcal{N}(0, (z S)^2 I),
    \quad S = \text{norm}, \; z = \text{noise}

  Args:
    norm: the bound on the norm over all tensors together; infinity, without noise, is the identity.
    noise: the noise multiplier z.

  Raises:
    UsageError: for noise without a finite norm; from its update, without `key=`.
  """
  _check_scale('client_dp', norm, noise)
  return clip_and_perturb('client_dp', norm, _stddev(norm, noise))


def clip_and_perturb(name: str, norm: Any, stddev: Any) -> optax.GradientTransformationExtraArgs:
  """Returns `clip(norm)+gaussian(stddev)` under a name of its own; half precision is rounded once."""
  mechanism = base.sequence(clip(norm=norm), gaussian(stddev=stddev))

  def perturb(key: jax.Array, updates: Tree) -> Tree:
    wide = jax.tree.map(trees.widened, updates)
    noisy, _ = mechanism.update(wide, mechanism.init(wide), key=key)
    return jax.tree.map(lambda n, u: n.astype(u.dtype), noisy, updates)

  return base.stateless(name, perturb, random=True)


@ranged
def aggregate_client_dp(
  key: jax.Array,
  updates: Tree,
  noise: Annotated[float | jax.Array, Range(0, finite=True)],
  present: jax.Array | None = None,
) -> tuple[Tree, jax.Array]:
  """Geyer's mechanism at the server, as published: returns (the round's mean update, the median norm S).

  Each client's update is clipped to S, the median of the clients' norms. The sum of the updates gets `N(0, (noise·S)²)`
  in every entry and is divided by K (Geyer et al. 2017, algorithm 1). It protects the next global model. A curious
  server still sees every raw upload. S also depends on the data; neither Geyer's accounting nor `epsilon` counts that.

  Args:
    key: drives the noise.
    updates: the updates of a round's K clients, stacked: every leaf [K, …].
    noise: the noise multiplier; it may be traced.
    present: which of the clients answered, boolean [K]; None means all. The others are left out of the median, the sum
      and K, whatever their rows contain. If nobody answered, the mean and S are zero. An update whose norm is no finite
      number counts as zeros.
  """
  drawn = jax.tree.leaves(updates)[0].shape[0]
  present = jnp.ones(drawn, bool) if present is None else jnp.asarray(present, bool)
  count = jnp.sum(present, dtype=jnp.int32)
  updates = jax.tree.map(lambda u: jnp.where(_rows(present, u), u, jnp.zeros_like(u)), updates)
  norms = jax.vmap(trees.norm)(updates)
  finite = jnp.isfinite(norms)
  updates = jax.tree.map(lambda u: jnp.where(_rows(finite, u), u, jnp.zeros_like(u)), updates)
  norms = jnp.where(finite, norms, 0.0)
  median = jnp.where(count > 0, jnp.nanmedian(jnp.where(present, norms, jnp.nan)), 0.0)
  factors = jnp.minimum(jnp.float32(1), median / jnp.maximum(norms, jnp.finfo(jnp.float32).tiny))
  stddev = jnp.asarray(noise, jnp.float32) * median

  def mean(update: jax.Array, draw: jax.Array) -> jax.Array:
    clipped = update.astype(jnp.float32) * _rows(factors, update)
    noisy = jnp.sum(clipped, 0) + stddev * draw
    # XLA multiplies by the reciprocal of a constant: with all present, divide by the constant for the same last bit.
    answered = noisy / jnp.maximum(count, 1).astype(jnp.float32)
    return jnp.where(count == drawn, noisy / drawn, answered).astype(update.dtype)

  key = jax.random.fold_in(errors.check_key('key', key), zlib.crc32(b'aggregate_client_dp'))
  shapes = jax.tree.map(lambda u: jax.ShapeDtypeStruct(u.shape[1:], jnp.float32), updates)
  return jax.tree.map(mean, updates, trees.draws(jax.random.normal, key, shapes)), median


def _rows(values: jax.Array, stacked: jax.Array) -> jax.Array:
  """Returns `values` [K] in a shape that broadcasts against `stacked` [K, …]."""
  return values.reshape(-1, *(1,) * (stacked.ndim - 1))


@defense(
  place='step',
  arguments=lambda context, settings: (context.client,),
  clips_each='sample',
  bounds=lambda settings: settings['norm'],
  replaces=True,
  idle=lambda settings: math.isinf(settings['norm']),
)
def clip_samples(client: Any = None, *, norm: Positive) -> optax.GradientTransformationExtraArgs:
  r"""Clips the gradient of every data sample, g / max(1, ‖g‖₂ / norm), and takes the mean (GradDefense, section V-C).

  It computes the samples' gradients itself, from `batch=` and the parameters; with a key, dropout is active, with masks
  of its own. It ignores the gradient that it receives, so it must be the first stage of a step chain. A sample of
  weight 0 is padding; the mean is over the sum of `weights=`. The loss of a text is the mean over its own tokens. Where
  the client's loss is a sum over the batch, the clipped gradients are summed. Without `variables=`, the model must have
  no batch statistics.

  Formula:
    g' = \frac{1}{N} \sum_{i=1}^{N} \frac{g_i}{\max(1, \lVert g_i \rVert_2 / B)}, \quad B = \text{norm}

  Args:
    client: the `Client` whose model, loss and BatchNorm mode are used.
    norm: the bound B on the norm of each sample's gradient; infinity is the identity. Gradients that are not finite
      count as zero.

  Raises (from its update):
    UsageError: if the client, `batch=`, the parameters or `variables=` are missing, BatchNorm mixes the samples, or the
      loss divides them by the weights of all their classes.
  """
  return _per_sample('clip_samples', client, norm)


@defense(
  place='step',
  citation='Abadi et al.: Deep Learning with Differential Privacy. CCS 2016.',
  random=True,
  arguments=lambda context, settings: (context.client,),
  noise=Noise(lambda settings, context, count: (_scale(settings) / (1 if context.client.loss.summed else count)) ** 2),
  clips_each='sample',
  bounds=lambda settings: settings['norm'],
  mechanism=_per_example,
  replaces=True,
  idle=lambda settings: settings['noise'] == 0 and math.isinf(settings['norm']),
)
def dpsgd(client: Any = None, *, norm: Positive, noise: NonNegative) -> optax.GradientTransformationExtraArgs:
  r"""DP-SGD (Abadi et al. 2016, algorithm 1): per-sample clipping, then noise on the sum.

  The sum of the gradients, clipped as in `clip_samples`, gets `N(0, (noise·norm)²)` in every entry. It is then divided
  by the number of samples, the sum of `weights=`; not where the client's loss is a sum. It must be the first stage of a
  step chain.

  Formula:
    g' = \frac{1}{N} \left( \sum_{i=1}^{N} \frac{g_i}{\max(1, \lVert g_i \rVert_2 / C)} + n \right), \quad
    n \sim \mathcal{N}(0, (\sigma C)^2 I), \quad C = \text{norm}, \; \sigma = \text{noise}

  Args:
    client: the `Client` whose model, loss and BatchNorm mode are used.
    norm: the bound C on each sample's norm; infinity, without noise, is the identity.
    noise: the noise multiplier σ.

  Raises (from its update):
    UsageError: as `clip_samples`, and where `key=` is missing.
  """
  _check_scale('dpsgd', norm, noise)

  def perturb(key: jax.Array, total: Tree) -> Tree:
    from jax_privacy import noise_addition

    # The privatizer's state is a key, which lanes of a vmap would share: a new one is made for each update.
    privatizer = noise_addition.gaussian_privatizer(stddev=_stddev(norm, noise), prng_key=key)
    return privatizer.update(total, privatizer.init(total))[0]

  return _per_sample('dpsgd', client, norm, perturb)


@ranged
def of_upload(
  mechanism: Mechanism,
  relation: Annotated[str, Choice(('replace one', 'replace by zeros'))],
  *,
  uploads: Count = 1,
  delta: Delta = 1e-5,
  accountant: Accountant = 'rdp',
) -> Epsilon:
  """Returns the `Epsilon` of uploads through a mechanism, against a receiver who knows the sender.

  Args:
    mechanism: the `Mechanism`, see `guarantees.mechanisms`.
    relation: 'replace one' or 'replace by zeros': that an upload is sent cannot be hidden from its receiver.
    uploads: how many of the same contribution are sent.
    delta, accountant: as in `epsilon`.
  """
  steps = mechanism.releases * int(uploads)
  value = epsilon(mechanism.noise, relation, steps=steps, delta=delta, accountant=accountant)
  published = 'one upload' if uploads == 1 else 'all uploads'
  return Epsilon(value, relation, mechanism.unit, published, delta=delta, accountant=accountant)


@ranged
def epsilon(
  noise: NonNegative,
  relation: Annotated[str, Choice(SENSITIVITIES)],
  *,
  steps: Count,
  sampling_rate: Rate = 1.0,
  delta: Delta = 1e-5,
  accountant: Accountant = 'rdp',
) -> float:
  """Returns the ε of `steps` releases of the Gaussian mechanism in a neighbouring relation; infinity without noise.

  Args:
    noise: the noise multiplier, the noise's standard deviation over the L2 norm that bounds a contribution.
    relation: a key of `defense.SENSITIVITIES`: 'replace one' doubles the sensitivity.
    steps: number of releases.
    sampling_rate: the probability that a contribution takes part in a release, independently of all others
      and in secret (Poisson sampling). It is usually applied to rounds of a fixed number of clients as well. Below 1 it
      is for the other two relations, which are the same to it: one contribution is there or is not.
    delta: δ.
    accountant: 'rdp' (Rényi differential privacy, Mironov et al. 2019) or 'pld' (privacy loss distributions: tighter).
      A loss distribution of little noise needs too much memory: where noise / max(1, sampling_rate·√steps) < 0.3, 'pld'
      returns the ε of 'rdp', which is valid too.

  Raises:
    UsageError: for sampling with 'replace one'.
  """
  if sampling_rate < 1 and relation == 'replace one':
    raise errors.UsageError(
      f"sampling_rate is {sampling_rate} in the relation 'replace one', expected 1: what Poisson sampling amplifies is "
      "known for 'add or remove one' and 'replace by zeros'"
    )
  noise /= SENSITIVITIES[relation]
  if noise < 1e-100:  # 1/noise² is about to leave the range of floats
    return math.inf
  return _composed(float(noise), int(steps), float(sampling_rate), float(delta), accountant)


@functools.cache
def _composed(noise: float, steps: int, sampling_rate: float, delta: float, accountant: str) -> float:
  """Returns `epsilon` of releases whose sensitivity is one; pages and trainings ask for the same values repeatedly."""
  import dp_accounting
  from dp_accounting import pld, rdp

  event = dp_accounting.GaussianDpEvent(noise)
  if sampling_rate < 1:
    event = dp_accounting.PoissonSampledDpEvent(sampling_rate, event)
  concentrated = noise / max(1.0, sampling_rate * math.sqrt(steps)) >= 0.3
  ledger = pld.PLDAccountant() if accountant == 'pld' and concentrated else rdp.RdpAccountant()
  with _without_series_warnings():
    return float(ledger.compose(event, steps).get_epsilon(delta))


@contextlib.contextmanager
def _without_series_warnings() -> Iterator[None]:
  """Drops dp_accounting's warnings of orders whose series does not converge: ε is the least over the other orders."""
  from absl import logging as absl_logging

  def other(record: logging.LogRecord) -> bool:
    return '_compute_log_a_frac' not in record.getMessage()

  logger = absl_logging.get_absl_logger()
  logger.addFilter(other)
  try:
    yield
  finally:
    logger.removeFilter(other)


@ranged
def rounds_within(
  budget: Budget, delta: Delta, *, noise: NonNegative, sampling_rate: Rate = 1.0, accountant: Accountant = 'rdp'
) -> int:
  """Returns the largest number of rounds whose ε stays within `budget`: where Geyer's training stops (algorithm 1).

  The relation is that of Geyer et al. 2017, 'add or remove one' client.
  That the clipping bound, a median, depends on the data is not counted (see `aggregate_client_dp`).

  Args:
    budget: the ε that must not be exceeded.
    delta, noise, sampling_rate, accountant: as in `epsilon`.
  """

  def exceeded(steps: int) -> bool:
    spent = epsilon(
      noise, 'add or remove one', steps=steps, sampling_rate=sampling_rate, delta=delta, accountant=accountant
    )
    return spent > budget

  beyond = 1
  while not exceeded(beyond):
    beyond *= 2
  within = beyond // 2
  while beyond - within > 1:
    middle = (within + beyond) // 2
    within, beyond = (within, middle) if exceeded(middle) else (middle, beyond)
  return within


def _check_scale(name: str, norm: float, noise: float) -> None:
  """Raises `UsageError` for noise with an infinite norm."""
  if not any(isinstance(x, jax.core.Tracer) for x in (norm, noise)) and math.isinf(norm) and noise > 0:
    raise errors.UsageError(
      f'{name}(norm) is {norm!r} with noise={noise!r}, expected a finite number: the noise is noise·norm'
    )


def _stddev(norm: Any, noise: Any) -> jax.Array:
  """Returns noise·norm, a float32 scalar; 0 without noise, even where the norm is infinite."""
  noise = jnp.asarray(noise, jnp.float32)
  return noise * jnp.where(noise > 0, jnp.asarray(norm, jnp.float32), jnp.float32(0))


def _per_sample(
  name: str, client: Any, norm: float, perturb: Callable[[jax.Array, Tree], Tree] | None = None
) -> optax.GradientTransformationExtraArgs:
  """Returns the transformation that replaces the update by the mean of clipped per-sample gradients.

  Args:
    name: the defense, for messages and its stream of randomness.
    client: the `Client` whose model, loss and BatchNorm mode are used.
    norm: the bound on each sample's norm.
    perturb: (key, sum of clipped gradients) -> the same with noise, or None for a defense without randomness.
  """
  limit = jnp.minimum(jnp.asarray(norm, jnp.float32), 1e12)  # finite: ∞·0 has no derivative

  def update(
    updates: Tree,
    state: optax.OptState,
    params: Tree = None,
    *,
    key: jax.Array | None = None,
    batch: tuple | None = None,
    weights: jax.Array | None = None,
    variables: Mapping | None = None,
    **extra: Any,
  ) -> tuple[Tree, optax.OptState]:
    del extra
    base.require_argument(name, 'client', client)
    if perturb is not None:
      base.require_key(name, key)
    samples, targets = base.require_batch(name, batch, params)
    base.require_own_gradients(name, 'clips', client.loss)
    weights = jnp.ones(samples.shape[:1], jnp.float32) if weights is None else weights
    key = None if key is None else base.stream(name, key, updates)
    dropout, noise = (None, None) if key is None else (jax.random.fold_in(key, 0), jax.random.fold_in(key, 1))
    loss = _weighted_loss(name, client, {**(variables or {}), 'params': params})
    with _promoting():
      total = _clipped_sum(loss, limit)(params, samples, targets, weights, dropout)
      if mixing.mixes(client, {**(variables or {}), 'params': params}, samples, targets, len(samples), 1):
        raise errors.UsageError(
          f'the defense {name} clips the gradient of each sample, and in the model {client.model.name!r} no sample has '
          'one of its own: it depends on the other samples of the batch'
        )
      if perturb is not None and noise is not None:
        total = perturb(noise, total)
    count = jnp.float32(1) if client.loss.summed else jnp.sum(weights)
    clipped = jax.tree.map(lambda t, u: (t / count).astype(u.dtype), total, updates)
    return jax.tree.map(lambda u, c: jnp.where(jnp.isinf(jnp.asarray(norm)), u, c), updates, clipped), state

  return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def _weighted_loss(name: str, client: Any, variables: Mapping) -> Callable[..., jax.Array]:
  """Returns (params, samples, targets, weights, dropout key) -> the weighted sum of the samples' losses."""

  def loss(
    params: Tree, samples: jax.Array, targets: jax.Array, weights: jax.Array, dropout: jax.Array | None
  ) -> jax.Array:
    params = client.held(params, samples.shape[1:])  # what is not trained has no gradient that is clipped
    train, current = client.batch_norm == 'train', {**variables, 'params': params}
    losses, batch_stats = per_example_loss(client.network, client.loss, current, samples, targets, train, dropout)
    if batch_stats:
      _check_batch_stats(name, client, variables)
    return jnp.sum(weights * losses)

  return loss


def _clipped_sum(loss: Callable[..., jax.Array], limit: jax.Array) -> Callable[..., Tree]:
  """Returns (params, samples, targets, weights, dropout key) -> the sum of the samples' clipped gradients, float32."""
  from jax_privacy import clipping

  summed = clipping.clipped_grad(
    loss,
    l2_clip_norm=limit,
    batch_argnums=(1, 2, 3),
    prng_argnum=4,
    dtype=jnp.float32,
    # A norm of zero has no derivative, and attacks differentiate it: a negligible constant keeps it positive.
    pre_clipping_transform=lambda gradient: (gradient, jnp.float32(1e-12)),
  )
  return lambda *args: summed(*args)[0]


def _check_batch_stats(name: str, client: Any, variables: Mapping) -> None:
  """Raises `UsageError` where BatchNorm mixes the samples, or its running statistics are missing."""
  if client.batch_norm == 'train':
    raise errors.UsageError(
      f'the defense {name} clips the gradient of each sample, and with BatchNorm in train mode no sample has one of '
      "its own: all depend on the batch's statistics. Choose batch_norm='eval' or a model without BatchNorm"
    )
  if not variables.get('batch_stats'):
    raise errors.UsageError(
      f'the defense {name} needs the batch statistics of this model: call '
      "update(updates, state, params, batch=(samples, targets), variables={'params': …, 'batch_stats': …})"
    )


@contextlib.contextmanager
def _promoting() -> Iterator[None]:
  """Relaxes JAX's rules for jax_privacy 2.0: it mixes ranks and dtypes and calls the deprecated `optax.global_norm`."""
  with jax.numpy_rank_promotion('allow'), jax.numpy_dtype_promotion('standard'), warnings.catch_warnings():
    warnings.simplefilter('ignore', DeprecationWarning)
    yield
