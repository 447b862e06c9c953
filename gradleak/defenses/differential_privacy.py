"""Differential privacy: of whole clients (Geyer et al. 2017), of single examples (Abadi et al. 2016), and its ε.

Noise multipliers are the noise's standard deviation over the clipping norm. Every ε here is for the add/remove relation
(one contribution against none in its place, the divisor being public); against any other contribution in its place the
sensitivity is twice the norm, and a multiplier z counts as z/2.
"""

import contextlib
import math
import warnings
import zlib

import jax
import jax.numpy as jnp
import optax

from gradleak import errors, trees
from gradleak.defenses import base
from gradleak.defenses.clipping import clip
from gradleak.defenses.noise import gaussian
from gradleak.models.model import per_example_loss

ACCOUNTANTS = ('rdp', 'pld')


def client_dp(*, norm: float, noise: float):
  """Geyer's mechanism placed at the client, as FFL attacks it: clip the update, then add noise to it.

  Every entry of the update, scaled by min(1, norm / ‖update‖₂), gets N(0, (noise·norm)²): Geyer et al. 2017, algorithm
  1, of a single client. The server sees nothing else, so that the guarantee needs no trust in it.

  Args:
    norm: the bound on the norm over all tensors together, > 0; infinity, without noise, is the identity.
    noise: the noise multiplier z ≥ 0.
  """
  _check('client_dp', norm, noise)
  mechanism = base.chain(clip(norm=norm), gaussian(stddev=_stddev(norm, noise)))

  def perturb(key, updates):
    return mechanism.update(updates, mechanism.init(updates), key=key)[0]

  return base.stateless('client_dp', perturb, random=True)


def aggregate_client_dp(key, updates, noise, present=None):
  """Geyer's mechanism at its honest placement, the server: returns (the round's mean update, the median norm S).

  Each client's update is clipped to S, the median of the clients' norms; their sum gets N(0, (noise·S)²) in every entry
  and is divided by K (Geyer et al. 2017, algorithm 1). It protects the next global model. A curious server still sees
  every raw upload, and S itself depends on the data, for which Geyer's accounting, and `epsilon`, charge nothing.

  Args:
    key: drives the noise.
    updates: the updates of a round's K clients, stacked: every leaf [K, …].
    noise: the noise multiplier ≥ 0; it may be traced.
    present: which of the clients answered, boolean [K]; all without it. Absent ones count neither in the median nor in
      the sum and K, whatever their rows hold. Where nobody answered, the mean and S are zero.

  Raises:
    UsageError: if `noise` is negative or not finite.
  """
  errors.check_number('aggregate_client_dp(noise)', noise, low=0, finite=True)
  drawn = jax.tree.leaves(updates)[0].shape[0]
  present = jnp.ones(drawn, bool) if present is None else jnp.asarray(present, bool)
  count = jnp.sum(present, dtype=jnp.int32)
  updates = jax.tree.map(lambda u: jnp.where(_rows(present, u), u, jnp.zeros_like(u)), updates)
  norms = jax.vmap(trees.norm)(updates)
  median = jnp.where(count > 0, jnp.nanmedian(jnp.where(present, norms, jnp.nan)), 0.0)
  factors = jnp.minimum(jnp.float32(1), median / jnp.maximum(norms, jnp.finfo(jnp.float32).tiny))
  stddev = jnp.asarray(noise, jnp.float32) * median

  def mean(update, key):
    clipped = update.astype(jnp.float32) * _rows(factors, update)
    noisy = jnp.sum(clipped, 0) + stddev * jax.random.normal(key, update.shape[1:])
    # XLA multiplies by the reciprocal of a constant: where all are present, the last bit is that of the constant.
    answered = noisy / jnp.maximum(count, 1).astype(jnp.float32)
    return jnp.where(count == drawn, noisy / drawn, answered).astype(update.dtype)

  key = jax.random.fold_in(key, zlib.crc32(b'aggregate_client_dp'))
  return jax.tree.map(mean, updates, trees.fold_in_leaves(key, updates)), median


def _rows(values, stacked):
  """Returns `values` [K] in a shape that broadcasts against `stacked` [K, …]."""
  return values.reshape(-1, *(1,) * (stacked.ndim - 1))


def clip_samples(client=None, *, norm: float):
  """Clips the gradient of every data sample, g / max(1, ‖g‖₂ / norm), and takes the mean (GradDefense, section V-C).

  It computes the samples' gradients itself, from `batch=` and the parameters, with dropout masks of its own where it is
  given a key. Nothing of the incoming gradient survives: it has to stand first in a step chain. A sample of weight 0 is
  padding; the mean is over the sum of `weights=`. Without `variables=`, the model must have no batch statistics.

  Args:
    client: the `Client` whose model, loss and BatchNorm mode are meant.
    norm: the bound B > 0 on each sample's norm; infinity is the identity. What it bounds is the gradient as computed:
      NaN and infinity count as zero.

  Raises (from its update):
    UsageError: where `batch=`, the parameters or `variables=` are missing, or BatchNorm mixes the samples.
  """
  errors.check_number('clip_samples(norm)', norm, low=1e-12)
  return _per_sample('clip_samples', client, norm)


def dpsgd(client=None, *, norm: float, noise: float):
  """DP-SGD (Abadi et al. 2016, algorithm 1): per-sample clipping, then noise on the sum.

  The sum of the gradients, clipped as in `clip_samples`, gets N(0, (noise·norm)²) in every entry and is divided by the
  number of samples, the sum of `weights=`. It has to stand first in a step chain, too.

  Args:
    client: the `Client` whose model, loss and BatchNorm mode are meant.
    norm: the bound C > 0 on each sample's norm; infinity, without noise, is the identity.
    noise: the noise multiplier σ ≥ 0.

  Raises (from its update):
    UsageError: as `clip_samples`, and where `key=` is missing.
  """
  _check('dpsgd', norm, noise)

  def perturb(key, total):
    from jax_privacy import noise_addition

    # The privatizer's own state is a key, the same for all lanes of a vmap: it is made anew for each update.
    privatizer = noise_addition.gaussian_privatizer(stddev=_stddev(norm, noise), prng_key=key)
    return privatizer.update(total, privatizer.init(total))[0]

  return _per_sample('dpsgd', client, norm, perturb)


def epsilon(noise, *, steps, sampling_rate=1.0, delta=1e-5, accountant='rdp'):
  """Returns the ε, a float, of `steps` releases of the Gaussian mechanism; infinity where there is none.

  Args:
    noise: the noise multiplier ≥ 0: the noise's standard deviation over the L2 sensitivity.
    steps: number of releases, ≥ 1.
    sampling_rate: the probability, in (0, 1], that a contribution takes part in a release, independently of all others
      and unseen (Poisson sampling). Rounds of a fixed number of clients are usually accounted for like this, too.
    delta: δ in (0, 1).
    accountant: 'rdp' (Rényi differential privacy, Mironov et al. 2019) or 'pld' (privacy loss distributions: tighter).
      The grid of a loss distribution outgrows the memory as the noise vanishes: where
      noise / max(1, sampling_rate·√steps) < 0.3, 'pld' gives what 'rdp' gives, which holds as well.

  Raises:
    UsageError: for a value out of range or an unknown accountant.
  """
  errors.check_number('noise', noise, low=0, finite=True)
  errors.check_number('steps', steps, low=1, integer=True)
  errors.check_number('sampling_rate', sampling_rate, low=1e-12, high=1)
  errors.check_number('delta', delta, low=1e-300, high=1 - 1e-12)
  if accountant not in ACCOUNTANTS:
    raise errors.unknown('accountant', accountant, ACCOUNTANTS)
  if noise < 1e-100:  # 1/noise² is about to leave the range of floats
    return math.inf
  import dp_accounting
  from dp_accounting import pld, rdp

  event = dp_accounting.GaussianDpEvent(float(noise))
  if sampling_rate < 1:
    event = dp_accounting.PoissonSampledDpEvent(float(sampling_rate), event)
  concentrated = noise / max(1.0, sampling_rate * math.sqrt(steps)) >= 0.3
  ledger = pld.PLDAccountant() if accountant == 'pld' and concentrated else rdp.RdpAccountant()
  with _left_out_in_silence():
    return float(ledger.compose(event, int(steps)).get_epsilon(float(delta)))


@contextlib.contextmanager
def _left_out_in_silence():
  """Drops dp_accounting's warnings of orders whose series does not converge: ε is the least over the others."""
  from absl import logging

  def other(record):
    return '_compute_log_a_frac' not in record.getMessage()

  logger = logging.get_absl_logger()
  logger.addFilter(other)
  try:
    yield
  finally:
    logger.removeFilter(other)


def rounds_within(budget, delta, *, noise, sampling_rate=1.0, accountant='rdp'):
  """Returns the largest number of rounds whose ε stays within `budget`: where Geyer's training stops (algorithm 1).

  What the choice of the median as the bound reveals is not in it (see `aggregate_client_dp`).

  Args:
    budget: the ε > 0 that must not be exceeded.
    delta, noise, sampling_rate, accountant: as in `epsilon`.
  """
  errors.check_number('the budget of epsilon', budget, low=1e-12, finite=True)

  def exceeded(steps):
    spent = epsilon(noise, steps=steps, sampling_rate=sampling_rate, delta=delta, accountant=accountant)
    return spent > budget

  beyond = 1
  while not exceeded(beyond):
    beyond *= 2
  within = beyond // 2
  while beyond - within > 1:
    middle = (within + beyond) // 2
    within, beyond = (within, middle) if exceeded(middle) else (middle, beyond)
  return within


def _check(name, norm, noise):
  """Raises the `UsageError` of a bound or a multiplier out of range, and of noise without a bound to measure it by."""
  errors.check_number(f'{name}(norm)', norm, low=1e-12)
  errors.check_number(f'{name}(noise)', noise, low=0, finite=True)
  if not any(isinstance(x, jax.core.Tracer) for x in (norm, noise)) and math.isinf(norm) and noise > 0:
    raise errors.UsageError(
      f'{name}(norm) is {norm!r} with noise={noise!r}, expected a finite number: noise is measured by the norm'
    )


def _stddev(norm, noise):
  """Returns noise·norm, a float32 scalar; 0 without noise, even where the norm is infinite."""
  noise = jnp.asarray(noise, jnp.float32)
  return noise * jnp.where(noise > 0, jnp.asarray(norm, jnp.float32), jnp.float32(0))


def _per_sample(name, client, norm, perturb=None):
  """Returns the transformation to the mean of clipped per-sample gradients, their sum being put through `perturb`.

  Args:
    name: the defense's.
    client: the `Client` whose model, loss and BatchNorm mode are meant.
    norm: the bound on each sample's norm.
    perturb: (key, sum of clipped gradients) -> the same with noise, or None for a defense without randomness.
  """
  limit = jnp.minimum(jnp.asarray(norm, jnp.float32), 1e12)  # finite: ∞·0 has no derivative

  def update(updates, state, params=None, *, key=None, batch=None, weights=None, variables=None, **extra):
    del extra
    if perturb is not None:
      base.require_key(name, key)
    images, labels = base.require_batch(name, batch, params)
    weights = jnp.ones(images.shape[:1], jnp.float32) if weights is None else weights
    variables = {**(variables or {}), 'params': params}
    key = None if key is None else jax.random.fold_in(key, zlib.crc32(name.encode()))
    dropout, noise = (None, None) if key is None else (jax.random.fold_in(key, 0), jax.random.fold_in(key, 1))

    def loss(params, images, labels, weights, dropout):
      losses, batch_stats = per_example_loss(
        client.model,
        client.loss,
        {**variables, 'params': params},
        images,
        labels,
        client.batch_norm == 'train',
        dropout,
      )
      if batch_stats:
        _check_batch_stats(name, client, variables)
      return jnp.sum(weights * losses)

    with _lenient():
      total = _clipped_sum(loss, limit)(params, images, labels, weights, dropout)
      if perturb is not None:
        total = perturb(noise, total)
    mean = jax.tree.map(lambda t, u: (t / jnp.sum(weights)).astype(u.dtype), total, updates)
    return jax.tree.map(lambda u, m: jnp.where(jnp.isinf(jnp.asarray(norm)), u, m), updates, mean), state

  return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def _clipped_sum(loss, limit):
  """Returns (params, images, labels, weights, dropout key) -> the sum of the samples' clipped gradients, float32."""
  from jax_privacy import clipping

  summed = clipping.clipped_grad(
    loss,
    l2_clip_norm=limit,
    batch_argnums=(1, 2, 3),
    prng_argnum=4,
    dtype=jnp.float32,
    # A norm of zero has no derivative, and attackers differentiate: a constant too small to matter keeps it positive.
    pre_clipping_transform=lambda gradient: (gradient, jnp.float32(1e-12)),
  )
  return lambda *args: summed(*args)[0]


def _check_batch_stats(name, client, variables):
  if client.batch_norm == 'train':
    raise errors.UsageError(
      f'the defense {name} clips the gradient of each sample, and with BatchNorm in train mode no sample has one of '
      "its own: all share the batch's statistics. Choose batch_norm='eval' or a model without BatchNorm"
    )
  if not variables.get('batch_stats'):
    raise errors.UsageError(
      f'the defense {name} needs the batch statistics of this model: call '
      "update(updates, state, params, batch=(images, labels), variables={'params': …, 'batch_stats': …})"
    )


@contextlib.contextmanager
def _lenient():
  """Lets jax_privacy 2.0 run: it mixes ranks and dtypes and calls `optax.global_norm`, which is deprecated."""
  with jax.numpy_rank_promotion('allow'), jax.numpy_dtype_promotion('standard'), warnings.catch_warnings():
    warnings.simplefilter('ignore', DeprecationWarning)
    yield
