"""SPEAR: a batch's inputs, exactly, from low rank and ReLU's zeros (Dimitrov et al. 2024, arXiv 2403.03945).

For a dense layer `Z = XW + b` in front of a ReLU, `∂L/∂W = Xᵀ ∂L/∂Z` has the rank of the batch, B. So it factors as
`(∂L/∂W)ᵀ = L R` with L [neurons, B]. A unique Q [B, B] satisfies `∂L/∂Z = (LQ)ᵀ` and `X = Q⁻¹R`, and ReLU makes about
half of each column Lq zero. A few rows of L in which one column is zero throughout determine that q. Written from a
description of the paper. It runs on the host, in NumPy float64. It fails where the same neurons are active for all
samples, as for images in [0, 1] at random weights. The same images less their mean are separated.

Random submatrices find a direction with probability 2^(1−B), so that they end at about ten samples. A second dense
layer takes the search further, see `gradleak.attacks.rays`.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np

from gradleak.attacks import base, rays
from gradleak.attacks.dense import check_relu, in_pixels
from gradleak.attacks.fidel import image_layer
from gradleak.core import errors, trees
from gradleak.core.settings import Count, Fraction, Range, ranged
from gradleak.federated import Client
from gradleak.models.model import require
from gradleak.threat import Observation

_ROUND = 10_000  # submatrices that are solved at a time
_PROGRAMS = 25  # linear programs that are solved at a time
_IDLE = 60  # such times without a new ray, after which no more are solved
_CERTAIN = 0.997  # the agreement at which the search ends; a wrong direction costs 0.9 % of a batch of 16, or more
_INDEPENDENT = 1e-6  # the least singular value of unit vectors that count as linearly independent
_ROUNDING = 10  # times the precision, relative to the largest singular value: what is lost to rounding
_SINGULAR = -690  # the logarithm of the smallest determinant that is not singular
_TINY = np.finfo(np.float64).tiny


class Separated(NamedTuple):
  """What was found.

  Attributes:
    inputs: float64 [B, in] in no order; [0, in] unless B directions were found.
    agreement: the fraction of (sample, neuron) pairs for which the gradient is zero if and only if the neuron is
      inactive
      on the reconstruction: 1 up to rounding, if all inputs are right.
    rank: B, the numerical rank of the gradient.
    directions: number of distinct sparse directions found.
  """

  inputs: np.ndarray
  agreement: float
  rank: int
  directions: int


class Dense(NamedTuple):
  """A dense layer as it was sent.

  Attributes:
    kernel_gradient: [in, neurons], of one step at known weights.
    bias_gradient: [neurons].
    kernel, bias: the weights, [in, neurons] and [neurons].
  """

  kernel_gradient: Any
  bias_gradient: Any
  kernel: Any
  bias: Any


@ranged
def spear(
  layer: Dense,
  rng: np.random.Generator,
  *,
  following: Any = None,
  programs: Count = 4000,
  submatrices: Count = 300_000,
  sparsity: Fraction = 0.3,
  tolerance: Annotated[float | None, Range(0, 1)] = None,
  rank: Annotated[int | None, Range(1)] = None,
  batch_size: Annotated[int | None, Range(1)] = None,
) -> Separated:
  """Returns the `Separated` inputs of a dense layer with ReLU; none of a gradient that is not finite.

  Args:
    layer: the layer, a `Dense` or its four arrays.
    rng: draws the objectives and the submatrices.
    following: the kernel's gradient of the next dense layer, [neurons, out], or None.
    programs: linear programs that are solved at most, of the next layer.
    submatrices: how many are tried at most; about 2^(B−1)·log B are needed.
    sparsity: the least fraction of zeros in a direction.
    tolerance: magnitudes up to this count as zero, relative to 1; by default the root of the gradient's
      precision, or what rounding leaves of its least singular value.
    rank: B, if it is known; under noise the gradient itself has full rank.
    batch_size: nothing is searched in a gradient of higher rank than this, which a defense has changed.

  Raises:
    UsageError: for a rank above the smaller side of the gradient.
  """
  precision = np.finfo(np.asarray(layer[0]).dtype).eps
  if rank is not None:
    errors.check_number('rank', rank, low=1, high=min(np.shape(layer[0])), integer=True)
  gradient, shares, kernel, bias = (np.asarray(x, np.float64) for x in layer)
  if not (np.isfinite(gradient).all() and np.isfinite(shares).all()):
    return Separated(np.zeros((0, len(gradient))), 0.0, 0, 0)

  left, values, right = np.linalg.svd(gradient.T, full_matrices=False)
  if rank is None or not values[0]:
    rank = rays.rank(values, gradient.shape, precision)
  if not rank or rank == min(gradient.shape) or rank > (batch_size or rank):
    return Separated(np.zeros((0, len(gradient))), 0.0, rank, 0)
  if tolerance is None:  # the vectors of the smallest values are rounded most
    tolerance = max(precision**0.5, _ROUNDING * precision * values[0] / values[rank - 1])
  left, right = left[:, :rank], values[:rank, np.newaxis] * right[:rank]

  size = np.linalg.norm(left, axis=1)
  alive = size > tolerance * size.max()
  rows = left[alive] / size[alive, np.newaxis]
  dead = len(left) - len(rows)  # neurons that no sample activates are zero in every direction
  projected = right @ kernel  # Z − b = Q⁻¹ of it
  directions, agreement, mixing = np.zeros((0, rank)), 0.0, None
  for drawn in _drawn(rows, alive, following, rng, programs, submatrices):
    drawn = np.concatenate([directions, drawn])
    zeros = np.sum(np.abs(rows @ drawn.T) <= tolerance, axis=0)
    sparse = (zeros + dead > sparsity * len(left)) & (zeros >= 2 * (rank - 1))  # any direction has rank − 1
    directions = _distinct(drawn[sparse], zeros[sparse], tolerance)[: 3 * rank]
    if len(_independent(directions)) == rank:
      agreement, mixing = _agreeing(directions, left, projected, shares, bias, tolerance)
      if agreement >= _CERTAIN:
        break
  inputs = np.zeros((0, len(gradient))) if mixing is None else np.linalg.solve(mixing, right)
  return Separated(inputs, float(agreement), rank, len(directions))


def _drawn(
  rows: np.ndarray, alive: np.ndarray, following: Any, rng: np.random.Generator, programs: int, submatrices: int
) -> Iterator[np.ndarray]:
  """Yields directions to try, [any number, rank]: those of the next layer's rays, and then of random submatrices."""
  if following is not None:
    basis = rays.basis(following)[alive]
    seen: set[bytes] = set()
    idle = 0
    for _ in range(-(-programs // _PROGRAMS) if basis.size else 0):
      new = [zero for zero in rays.inactive(basis, rng, _PROGRAMS) if zero.tobytes() not in seen]
      seen |= {zero.tobytes() for zero in new}
      idle = 0 if new else idle + 1
      if idle == _IDLE:
        break
      if new:  # else the same directions would be judged once more
        yield rays.directions(rows, [zero for zero in new if zero.sum() >= max(rows.shape[1] - 1, 1)])
  for _ in range(-(-submatrices // _ROUND)):
    yield _null_vectors(rows, rng)


def _agreeing(
  directions: np.ndarray,
  left: np.ndarray,
  projected: np.ndarray,
  shares: np.ndarray,
  bias: np.ndarray,
  tolerance: float,
) -> tuple[float, np.ndarray | None]:
  """Returns (agreement, Q) of a set of directions that no exchange of one for another improves.

  The sparsest directions need not be the true ones: the difference of two similar samples is also sparse.
  """
  rank = left.shape[1]

  def score(indices: list[int]) -> tuple[Any, np.ndarray | None]:
    columns = directions[list(indices)].T
    mixing = columns * np.linalg.lstsq(left @ columns, shares, rcond=None)[0]  # the bias gradient gives the scale
    if np.linalg.matrix_rank(mixing / np.maximum(np.linalg.norm(mixing, axis=0), _TINY), tol=_INDEPENDENT) < rank:
      return 0.0, None
    backward = np.abs(left @ mixing)
    active = np.linalg.solve(mixing, projected) + bias > 0
    return np.mean(active == (backward > tolerance * backward.max(axis=0)).T), mixing

  chosen = _independent(directions)
  best, improved = score(chosen), True
  while improved and best[0] < _CERTAIN:
    improved = False
    for place in range(rank):
      for other in set(range(len(directions))) - set(chosen):
        swapped = [*chosen[:place], other, *chosen[place + 1 :]]
        if (found := score(swapped))[0] > best[0]:
          best, chosen, improved = found, swapped, True
  return best


def _null_vectors(rows: np.ndarray, rng: np.random.Generator) -> np.ndarray:
  """Returns unit vectors q [at most _ROUND, rank], each orthogonal to rank − 1 of the rows, drawn at random."""
  rank = rows.shape[1]
  matrices = rng.normal(size=(_ROUND, rank, rank))  # the last row stays random: q is not orthogonal to it
  matrices[:, :-1] = rows[rng.integers(len(rows), size=(_ROUND, rank - 1))]
  matrices = matrices[np.linalg.slogdet(matrices)[1] > _SINGULAR]  # it is singular if a row was drawn twice
  unit = np.zeros((len(matrices), rank, 1))
  unit[:, -1] = 1
  vectors = np.linalg.solve(matrices, unit)[:, :, 0]
  return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def _distinct(directions: np.ndarray, zeros: np.ndarray, tolerance: float) -> np.ndarray:
  """Returns the directions that differ by more than the sign, the sparsest first."""
  kept = []
  for i in np.argsort(-zeros, kind='stable'):
    if not kept or np.abs(directions[kept] @ directions[i]).max() < 1 - 100 * tolerance:
      kept.append(int(i))
  return directions[kept]


def _independent(directions: np.ndarray) -> list[int]:
  """Returns the indices of the first directions that are linearly independent."""
  kept = []
  for i in range(len(directions)):
    if np.linalg.matrix_rank(directions[[*kept, i]], tol=_INDEPENDENT) > len(kept):
      kept.append(i)
  return kept


@base.attack(
  citation='Dimitrov, Baader, Müller, Vechev: SPEAR: Exact Gradient Inversion of Batches in Federated Learning. '
  'NeurIPS 2024.',
  name='spear',
)
def spear_attack(client: Client, *, submatrices: Count = 300_000, programs: Count = 4000) -> base.Attack:
  r"""SPEAR as an attack on networks whose first layer is dense and followed by ReLU: `spear`, on the host.

  A dense layer behind that ReLU tells which neurons each sample activates, see `gradleak.attacks.rays`. That takes it
  from batches of about ten samples to some twenty. It returns no labels.

  Formula:
    (\partial L / \partial W)^\top = \mathcal{L} R, \quad X = Q^{-1} R, \quad
    \partial L / \partial Z = (\mathcal{L} Q)^\top \text{ sparse by ReLU}

  Args:
    client: the `Client` that is attacked; it must share a gradient.
    submatrices, programs: as `spear` takes them.

  Raises:
    UsageError: when run, for another network, or a client that shares its delta, or nothing of the first layer.
  """

  def paths(observation: Observation) -> tuple[tuple[str, ...], tuple[str, ...]]:
    base.require_gradient('spear', observation)
    found = image_layer(client.model, observation)
    base.require_sent('spear', client, observation, found)
    check_relu('spear', client.model, observation.batch_shape[1:], *found)
    return found

  def read(observation: Observation, key: np.ndarray) -> tuple[np.ndarray, None]:
    rng = np.random.default_rng(key.ravel())
    observation = in_pixels(client.model, observation)
    own = paths(observation)
    both = (observation.update, observation.variables['params'])
    layer = Dense(*(trees.get(tree, path) for tree in both for path in own))
    following = _following(require(client.model, 'layers')(observation.batch_shape[1:]), own[0], observation)
    size = observation.batch_shape[0]
    given = {'submatrices': submatrices, 'programs': programs, 'batch_size': size}
    return spear(layer, rng, following=following, **given).inputs[:size], None

  return base.host_form(paths, read)


def _following(layers: Sequence[trees.Layer], path: tuple[str, ...], observation: Observation) -> Any:
  """Returns the kernel's gradient of the layer after the one at a path, if it is dense and takes its outputs."""
  place = [layer.paths[0] for layer in layers].index(path)
  after = [trees.get(observation.update, layer.paths[0]) for layer in layers[place + 1 : place + 2]]
  neurons = trees.get(observation.update, path).shape[1]
  return next((found for found in after if found.ndim == 2 and found.shape[0] == neurons), None)
