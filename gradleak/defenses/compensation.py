"""GradDefense's global update compensation (Wang, Guo, Xie, Qi: INFOCOM 2022, section V), run by the server."""

import functools
import math
from collections.abc import Collection, Sequence
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gradleak.core import errors
from gradleak.core.settings import Choice, Count, Fraction, NonNegative, Range, ranged
from gradleak.core.trees import Tree
from gradleak.defenses.base import shared_leaves
from gradleak.defenses.defense import defense
from gradleak.defenses.graddefense import CITATION, num_perturbed

Rule = Annotated[str, Choice(('band', 'below'))]
Layout = Annotated[str, Choice(('columns', 'rows'))]


def noise_variance(weights: Sequence[float] | jax.Array, *, stddev: float, ratio: float, num_slices: int) -> jax.Array:
  """Returns σ̂² = (d/s)·σ²·Σ_i ε_i², the variance of an entry's noise in the weighted mean of the clients' updates.

  Client i perturbs an entry with probability d/s, so its noise there has variance (d/s)·σ². Clients draw independently,
  so the variances of ε_i times their noises add up. For m equal clients that is (d/s)·σ²/m. Section V-A prints
  m·(d/s)·Σ_i ε_i·σ², which is the variance of their *sum*, since Σ_i ε_i = 1. For the mean it is m² times too large:
  all noise then falls below λ_min and is kept as data.

  Args:
    weights: the aggregation weights ε_i, float [m], summing to 1.
    stddev: σ of the clients' noise (times the clipping bound B, where samples are clipped).
    ratio: their perturbation ratio γ.
    num_slices: their number of slices s.

  Returns:
    A float32 scalar.
  """
  return _client_variance(stddev, ratio, num_slices) * jnp.sum(jnp.square(jnp.asarray(weights, jnp.float32)))


def _client_variance(stddev: float, ratio: float, num_slices: int) -> jax.Array:
  perturbed = num_perturbed(ratio, num_slices).astype(jnp.float32) / num_slices
  return perturbed * jnp.square(jnp.asarray(stddev, jnp.float32))


@ranged
def compensate(
  update: Tree,
  variance: Annotated[float | jax.Array, Range(0, finite=True)],
  *,
  q: Annotated[float, Range(1, finite=True)] = 6,
  rule: Rule = 'band',
  layout: Layout = 'columns',
  unshared: Collection | None = None,
) -> Tree:
  """Returns the update without the directions that cannot be distinguished from noise (section V-B).

  The update of n entries, flattened and padded with zeros, becomes a matrix C [v, w] with w = ⌈√(n/q)⌉ columns. Suppose
  that C is noise of variance σ̂², and Q = v/w. Then the eigenvalues of CᵀC/v lie in the band `λ± = σ̂²(1 ± 1/√Q)²` of
  Marchenko and Pastur. C is projected onto the eigenvectors of all other eigenvalues. (The paper defines the covariance
  with 1/w; its eq. 5 and the band require 1/v.)

  Args:
    update: any tree of floats.
    variance: σ̂² of the noise in each entry; may be traced. Zero is the identity, exactly.
    q: the desired ratio Q; 6 in the paper.
    rule: 'band' drops the eigenvectors with λ− ≤ λ ≤ λ+; 'below' drops all with λ ≤ λ+, the "simple threshold" that
      the paper's text also mentions.
    layout: 'columns' as in section VI-D: the vector is cut into w pieces of equal length, which are the columns.
      'rows': the matrix is filled row by row, as in the published code.
    unshared: the paths of parameters that are not shared, whose zeros are no entries; None for none.
  """
  leaves, whole = shared_leaves(update, unshared)
  flat = jnp.concatenate([jnp.asarray(leaf, jnp.float32).ravel() for leaf in leaves])
  columns = math.ceil(math.sqrt(flat.size / q))
  rows = -(-flat.size // columns)
  padded = jnp.pad(flat, (0, rows * columns - flat.size))
  matrix = padded.reshape(columns, rows).T if layout == 'columns' else padded.reshape(rows, columns)

  product = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
  values, vectors = jnp.linalg.eigh(product(matrix.T, matrix) / rows)
  variance, spread = jnp.asarray(variance, jnp.float32), math.sqrt(columns / rows)
  noise = (values <= variance * (1 + spread) ** 2) & (variance > 0)
  if rule == 'band':
    noise &= values >= variance * (1 - spread) ** 2
  # Subtracting what is dropped, rather than adding what is kept, leaves C exactly as it is where nothing is dropped.
  dropped = vectors * noise.astype(jnp.float32)[None]
  matrix = matrix - product(product(matrix, dropped), vectors.T)
  flat = (matrix.T if layout == 'columns' else matrix).ravel()

  compensated, start = [], 0
  for leaf in leaves:
    compensated.append(flat[start : start + leaf.size].reshape(leaf.shape).astype(leaf.dtype))
    start += leaf.size
  return whole(compensated)


class CompensationState(NamedTuple):
  """What the server keeps from round to round.

  Attributes:
    dropped: all that compensation has dropped and not yet added back, a tree of float32 shaped like the parameters.
  """

  dropped: Tree


@defense(
  place='round',
  citation=CITATION,
  arguments=lambda context, settings: (context.unshared,),
  post_processing=True,
  idle=lambda settings: settings['stddev'] == 0,
)
def compensation(
  unshared: Any = None,
  *,
  stddev: NonNegative,
  ratio: Fraction = 0.3,
  num_slices: Count = 10,
  q: Count = 6,
  rule: Rule = 'band',
  layout: Layout = 'columns',
  memory: bool = False,
) -> optax.GradientTransformationExtraArgs:
  r"""Global update compensation, for the server's chain on the mean update: see `compensate`.

  A direction of the update is seen, and kept, where it exceeds about σ̂·(v·w)^¼ (in the norm of its part of C). All
  others are dropped with the noise.

  It cost accuracy wherever it was tried (figures in docs/measurements.md); memory made up for that by letting the noise
  through later. There are two reasons. The mean update soon has hardly a direction above the noise. Also, a client's
  noise covers whole slices, so that with 10 clients its variance differs between columns. Then 3 to 8 directions above
  the band are pure noise.

  It does not reduce the clients' privacy: a curious server can apply it to a single upload in any case (section V-C).

  Formula:
    C' = C \sum_{\lambda_i \notin [\lambda_-, \lambda_+]} v_i v_i^\top, \quad \lambda_\pm = \hat\sigma^2
    (1 \pm 1 / \sqrt{Q})^2, \quad \hat\sigma^2 = \tfrac{d}{s} \sigma^2 \sum_k \varepsilon_k^2

  Args:
    unshared: see `compensate`.
    stddev, ratio, num_slices: the clients' settings of `graddefense`.
    q, rule, layout: see `compensate`.
    memory: whether what was dropped is added to the mean of the next round (error feedback). The procedure of section
      V-B has no memory; eq. 6 of the convergence analysis has it, as ϑ_{t−1} − ϑ_t. The band stays that of one round's
      noise.

  Raises (from its update):
    UsageError: if neither `num_clients=` nor `weights=` is given.
  """
  noise: dict[str, Any] = {'stddev': stddev, 'ratio': ratio, 'num_slices': num_slices}
  given: dict[str, Any] = {'q': q, 'rule': rule, 'layout': layout, 'unshared': unshared}

  def init(params: Tree) -> optax.OptState:
    if not memory:
      return optax.EmptyState()
    return CompensationState(jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params))

  def update(
    updates: Tree,
    state: Any,
    params: Tree = None,
    *,
    num_clients: Any = None,
    weights: Any = None,
    **extra: Any,
  ) -> tuple[Tree, optax.OptState]:
    del params, extra
    if weights is not None:
      variance = noise_variance(weights, **noise)
    elif num_clients is not None:
      errors.check_number('compensation(num_clients)', num_clients, low=1)
      variance = _client_variance(**noise) / jnp.asarray(num_clients, jnp.float32)
    else:
      raise errors.UsageError(
        'compensation needs the number of clients in the mean: call update(updates, state, params, num_clients=…)'
      )
    if not memory:
      return compensate(updates, variance, **given), state
    whole = jax.tree.map(lambda u, d: u.astype(jnp.float32) + d, updates, state.dropped)
    kept = compensate(whole, variance, **given)
    dropped = jax.tree.map(jnp.subtract, whole, kept)
    return jax.tree.map(lambda k, u: k.astype(u.dtype), kept, updates), CompensationState(dropped)

  return optax.GradientTransformationExtraArgs(init, update)
