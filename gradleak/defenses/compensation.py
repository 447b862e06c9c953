"""GradDefense's global update compensation (Wang, Guo, Xie, Qi: INFOCOM 2022, section V), run by the server."""

import functools
import math

import jax
import jax.numpy as jnp
import optax

from gradleak import errors
from gradleak.defenses.graddefense import num_perturbed

RULES = ('band', 'below')


def noise_variance(weights, *, stddev, ratio, num_slices):
  """Returns σ̂² = (d/s)·σ²·Σ_i ε_i², the variance of an entry's noise in the weighted mean of the clients' updates.

  Client i perturbs an entry with probability d/s, so its noise there has variance (d/s)·σ²; clients draw apart, so the
  variances of ε_i times their noises add up. For m equal clients that is (d/s)·σ²/m. Section V-A prints
  m·(d/s)·Σ_i ε_i·σ², which is the variance of their *sum*, since Σ_i ε_i = 1: m² times too large for the mean, with
  which all noise falls below λ_min and is kept as data.

  Args:
    weights: the aggregation weights ε_i, float [m], summing to 1.
    stddev: σ of the clients' noise (times the clipping bound B, where samples are clipped).
    ratio: their perturbation ratio γ.
    num_slices: their number of slices s.
  """
  return _client_variance(stddev, ratio, num_slices) * jnp.sum(jnp.square(jnp.asarray(weights, jnp.float32)))


def _client_variance(stddev, ratio, num_slices):
  share = num_perturbed(ratio, num_slices).astype(jnp.float32) / num_slices
  return share * jnp.square(jnp.asarray(stddev, jnp.float32))


def compensate(update, variance, *, q=6, rule='band'):
  """Returns the update without the directions that look like noise (section V-B).

  The update of n entries, flattened and padded with zeros, becomes a matrix C [v, w] with w = ⌈√(n/q)⌉ columns. If C
  were noise of variance σ̂², the eigenvalues of CᵀC/v would lie in the band λ± = σ̂²(1 ± 1/√Q)² of Marchenko and Pastur,
  Q = v/w. C is projected onto the eigenvectors of all other eigenvalues. (The paper defines the covariance with 1/w;
  its own eq. 5, and the band, want 1/v.)

  Args:
    update: any tree of floats.
    variance: σ̂² ≥ 0 of the noise in each entry; may be traced. Zero is the identity, exactly.
    q: the ratio Q aimed at; 6 in the paper.
    rule: 'band' drops the eigenvectors with λ− ≤ λ ≤ λ+; 'below' drops all with λ ≤ λ+, the "simple threshold" that
      the paper's text speaks of, too.

  Raises:
    UsageError: for a negative variance, a q below 1, or an unknown rule.
  """
  errors.check_number('compensate(variance)', variance, low=0, finite=True)
  errors.check_number('compensate(q)', q, low=1, finite=True)
  if rule not in RULES:
    raise errors.unknown('compensation rule', rule, RULES)
  leaves, treedef = jax.tree.flatten(update)
  flat = jnp.concatenate([jnp.asarray(leaf, jnp.float32).ravel() for leaf in leaves])
  columns = math.ceil(math.sqrt(flat.size / q))
  rows = -(-flat.size // columns)
  matrix = jnp.pad(flat, (0, rows * columns - flat.size)).reshape(rows, columns)

  product = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
  values, vectors = jnp.linalg.eigh(product(matrix.T, matrix) / rows)
  variance, spread = jnp.asarray(variance, jnp.float32), math.sqrt(columns / rows)
  noise = (values <= variance * (1 + spread) ** 2) & (variance > 0)
  if rule == 'band':
    noise &= values >= variance * (1 - spread) ** 2
  # Subtracting what is dropped, rather than adding what is kept, leaves C alone where nothing is dropped.
  dropped = vectors * noise.astype(jnp.float32)[None]
  flat = (matrix - product(product(matrix, dropped), vectors.T)).ravel()

  compensated, start = [], 0
  for leaf in leaves:
    compensated.append(flat[start : start + leaf.size].reshape(leaf.shape).astype(leaf.dtype))
    start += leaf.size
  return treedef.unflatten(compensated)


def compensation(*, stddev: float, ratio: float = 0.3, num_slices: int = 10, q: int = 6, rule: str = 'band'):
  """Global update compensation, for the server's chain on the mean update of equally weighted clients.

  It does good where noise dominates and the mean update is nearly of low rank as a matrix, so that its few large
  directions stand out of the band: early training of small networks, with σ as large as the paper's. It does next to
  nothing where the update dominates the noise, since then hardly any eigenvalue lies in the band; in between it may
  take weak directions of the update for noise. The clients' privacy it leaves as it is: a curious server can run the
  same on a single upload (section V-C).

  Args:
    stddev, ratio, num_slices: the clients' settings of `graddefense`.
    q, rule: see `compensate`.

  Raises:
    UsageError: for a setting out of range; from its update, if no `num_clients=` is given.
  """
  errors.check_number('compensation(stddev)', stddev, low=0, finite=True)
  errors.check_number('compensation(ratio)', ratio, low=0, high=1)
  errors.check_number('compensation(num_slices)', num_slices, low=1, integer=True)
  errors.check_number('compensation(q)', q, low=1, integer=True)
  if rule not in RULES:
    raise errors.unknown('compensation(rule)', rule, RULES)

  def update(updates, state, params=None, *, num_clients=None, **extra):
    del params, extra
    if num_clients is None:
      raise errors.UsageError(
        'compensation needs to know of how many clients this is the mean: call '
        'update(updates, state, params, num_clients=…)'
      )
    errors.check_number('compensation(num_clients)', num_clients, low=1)
    variance = _client_variance(stddev, ratio, num_slices) / jnp.asarray(num_clients, jnp.float32)
    return compensate(updates, variance, q=q, rule=rule), state

  return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
