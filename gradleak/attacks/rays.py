"""Which neurons each sample of a batch activates, from the gradient of the layer that follows a ReLU.

For `H = ReLU(Z)` in front of a dense layer, `∂L/∂W₂ = Hᵀ ∂L/∂Z₂`. So the rows of H lie in its column space, which has
the basis L [neurons, B]. They are not negative, and a row is zero at about half of the neurons. Among all `Lp ≥ 0` such
a row is an extreme ray, at which far more than the needed B − 1 constraints are tight. A linear program with a random
objective ends at an extreme ray, and often at one of H. No paper that we know has this. Two kinds of objectives take
turns: random weights of all neurons, and few neurons that are to be active while random others are not.
"""

from collections.abc import Sequence

import numpy as np

_ZERO = 1e-3  # activations up to this, relative to the mean one of the ray, count as zero
_SLACK = 1e-7  # of the constraints, relative to the mean activation that is held: the rounding of a float32 gradient
_HELD = 5  # neurons that are to be active
_SHARE = 0.15  # of the neurons, that are not
_TRUSTED = 0.9  # of the neurons that are zero at a ray
_TIGHT = 1.5  # times the constraints that are tight at any extreme ray


def basis(gradient: np.ndarray) -> np.ndarray:
  """Returns L, float64 [neurons, rank], an orthonormal basis of the column space of a kernel's gradient [neurons, out].

  It has no column where the gradient has full rank or is not finite: nothing is known then.
  """
  precision = np.finfo(np.asarray(gradient).dtype).eps
  gradient = np.asarray(gradient, np.float64)
  if not np.isfinite(gradient).all():
    return np.zeros((len(gradient), 0))
  left, values, _ = np.linalg.svd(gradient, full_matrices=False)
  found = rank(values, gradient.shape, precision)
  return left[:, : found if found < min(gradient.shape) else 0]


def rank(values: np.ndarray, shape: tuple[int, ...], precision: float) -> int:
  """Returns how many singular values of a matrix are more than the rounding of its entries."""
  return int(np.sum(values > values[0] * precision * max(shape)))


def inactive(basis: np.ndarray, rng: np.random.Generator, programs: int) -> np.ndarray:
  """Returns which neurons are zero at the extreme rays found, bool [rays, neurons], each once.

  Args:
    basis: as of `basis`.
    rng: draws the objectives.
    programs: number of linear programs.
  """
  from scipy import optimize

  neurons, size = basis.shape
  found = {}
  for turn in range(programs if size else 0):
    cost, active = _objective(rng, neurons, turn % 2 == 0)
    solved = optimize.linprog(
      cost @ basis, -basis, np.full(neurons, _SLACK * active.mean()), [active @ basis], [active.mean()], (None, None)
    )
    if solved.x is None:
      continue
    values = basis @ solved.x
    zero = values <= _ZERO * np.mean(np.abs(values))
    if np.sum(zero) >= _TIGHT * (size - 1):
      found[zero.tobytes()] = zero
  return np.array(list(found.values())).reshape(-1, neurons)


def _objective(rng: np.random.Generator, neurons: int, everywhere: bool) -> tuple[np.ndarray, np.ndarray]:
  """Returns what is minimised, and the neurons whose mean activation is held: weights [neurons] of both."""
  if everywhere:
    return rng.normal(size=neurons), np.ones(neurons)
  active = np.zeros(neurons)
  active[rng.choice(neurons, min(_HELD, neurons), replace=False)] = 1
  return (rng.random(neurons) < _SHARE) + 1e-3, active


def directions(rows: np.ndarray, zeros: Sequence[np.ndarray]) -> np.ndarray:
  """Returns the unit vectors q [rays, rank] for which `rows @ q` is nearest to zero at the neurons of each ray.

  A neuron whose activation is tiny may count as zero by mistake. So the tenth that is furthest from zero is left out.

  Args:
    rows: of the layer before, [neurons, rank].
    zeros: of each ray, bool [neurons].
  """

  def nearest(chosen: np.ndarray) -> np.ndarray:
    return np.linalg.svd(chosen)[2][-1]

  found = []
  for zero in zeros:
    apart = np.abs(rows[zero] @ nearest(rows[zero]))
    found.append(nearest(rows[zero][apart <= np.quantile(apart, _TRUSTED)]))
  return np.array(found).reshape(-1, rows.shape[1])
