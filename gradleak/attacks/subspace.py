"""Whether a vector is an input of a dense layer, by the span of the layer's gradient under noise.

The gradient of a kernel is G = XᵀΔ, with the layer's inputs in the rows of X. Fewer inputs than features span a
subspace, and an input lies in it (Petrov et al. 2024, DAGER). Noise, rounding and the arithmetic of the client fill the
other directions. Their level is read from there, so that no tolerance has to be set.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import scipy.linalg
import scipy.special

_ROUNDING = (
  (16, 2.0**-8),
  (13, 2.0**-11),
)  # low bits of a float32 that bfloat16 and float16 lack -> half of an ulp of 1
_FLOAT32 = 2.0**-24
_TINY = 1e-300
JUMP = 50.0  # of successive singular values, from the signal to rounding
DEVIATIONS = 5.0  # beyond which squares are no noise


class Span(NamedTuple):
  """What is known of the inputs of a layer.

  Attributes:
    basis: orthonormal directions in columns, [d, d].
    weights: λ/(s² + λ) of each: 0 where the signal is far above the noise, 1 where there is only noise, [d].
    side: the gradients in units of their noise, in as few columns as directions, [d, d].
    outputs: how many columns they had.
    change: [D, d], for layers whose input is this times the vectors that are tested; None where it is these.
  """

  basis: np.ndarray
  weights: np.ndarray
  side: np.ndarray
  outputs: int
  change: np.ndarray | None = None

  def _inputs(self, x: np.ndarray) -> np.ndarray:
    x = np.asarray(x, np.float64)
    return x if self.change is None else x @ self.change

  @property
  def directions(self) -> np.ndarray:
    """The basis as vectors whose products with what is tested are its coordinates, [D, d]."""
    return self.basis if self.change is None else self.change @ self.basis

  @property
  def rank(self) -> float:
    """The number of directions with a signal, each counted by its share of it."""
    return float(np.sum(1 - self.weights))

  def residual(self, x: np.ndarray) -> np.ndarray:
    """Returns λ·xᵀ(GGᵀ + λI)⁻¹x / ‖x‖² of vectors [..., d], in [0, 1]; about 0 for inputs of the layer."""
    x = self._inputs(x)
    return np.square(x @ self.basis) @ self.weights / np.maximum(np.sum(x * x, axis=-1), _TINY)

  def gain(self, x: np.ndarray, given: np.ndarray) -> float:
    """Returns how much of the gradients inputs explain, in squares in units of the noise.

    Args:
      x: inputs [K, d].
      given: orthonormal columns, what is explained already, [d, any].
    """
    return float(np.sum(np.square(self.added(x, given).T @ self.side)))

  def added(self, x: np.ndarray, given: np.ndarray) -> np.ndarray:
    """Returns orthonormal columns for what inputs [K, d] add to the span of `given`."""
    x = self._inputs(x).T
    x = x / np.maximum(np.linalg.norm(x, axis=0), _TINY)
    left, values, _ = np.linalg.svd(beyond(x, given), full_matrices=False)
    return left[:, values > 1e-6]

  def left(self, given: np.ndarray) -> float:
    """Returns what orthonormal columns leave of the gradients, in units of the noise that has to be left: 1 for all."""
    free = (len(self.basis) - given.shape[1]) * self.outputs
    return float((np.sum(np.square(self.side)) - np.sum(np.square(given.T @ self.side))) / max(free, 1))

  def needed(self, gain: float, count: int) -> float:
    """Returns by how many deviations a gain exceeds that of so many inputs that have no part in the gradient.

    Inputs that are computed in float32 miss a little of what they explain, and others pick it up.
    """
    free = count * self.outputs
    return (gain - free - 2.0**-46 * float(np.sum(np.square(self.side)))) / math.sqrt(2 * free)


def beyond(x: np.ndarray, given: np.ndarray) -> np.ndarray:
  """Returns what orthonormal columns leave of others, [d, any] each."""
  for _ in range(2):  # once more, for what rounding leaves
    x = x - given @ (given.T @ x)
  return x


def rounding(gradient: np.ndarray) -> float:
  """Returns the variance of the rounding of a gradient's entries, by the precision that all of them have."""
  bits = np.ascontiguousarray(gradient, np.float32).view(np.uint32)
  half = next((half for low, half in _ROUNDING if not np.any(bits & ((1 << low) - 1))), _FLOAT32)
  return float(np.mean(np.square(gradient, dtype=np.float64))) * half**2 / 6  # of numbers with any mantissa


def span_of(gradients: Sequence[Any], inputs: int, noise: float = 0.0) -> Span | None:
  """Returns the `Span` of the inputs of layers that take the same ones; None where all gradients are zero.

  Each gradient is divided by the deviation of its noise, so that they can be put side by side. This is the largest of
  what is given, its rounding, and what it holds beyond the first `inputs` directions.

  Args:
    gradients: of kernels, each [d, outputs].
    inputs: the most inputs that there can be.
    noise: known variance of the noise in each entry.
  """
  whitened = []
  for gradient in gradients:
    found = np.asarray(gradient, np.float64)
    if not np.any(found):
      continue
    level = max(noise, rounding(gradient), _floor(found, inputs))
    whitened.append(found / math.sqrt(level))
  if not whitened:
    return None
  side = np.concatenate(whitened, axis=1)
  features, outputs = side.shape
  if outputs > features:  # the same singular vectors, of a smaller matrix
    side = _triangle(side.T).T
  basis, values, _ = np.linalg.svd(side, full_matrices=True)
  signal = np.zeros(features)
  signal[: len(values)] = np.square(values) / outputs
  return Span(basis, 1 / (1 + np.maximum(signal - 1, 0)), side, outputs)


def beside(spans: Sequence[Span], changes: Sequence[np.ndarray]) -> Span:
  """Returns the `Span` of layers that take different linear functions of the same vectors.

  Args:
    spans: of each layer's inputs [d].
    changes: what makes these of the vectors, [D, d].
  """
  basis, side = (scipy.linalg.block_diag(*(getattr(one, name) for one in spans)) for name in ('basis', 'side'))
  weights = np.concatenate([one.weights for one in spans])
  return Span(basis, weights, side, max(one.outputs for one in spans), np.concatenate(changes, axis=1))


def _floor(gradient: np.ndarray, inputs: int) -> float:
  """Returns the variance of the noise by the singular values beyond the first `inputs`; 0 where there are none.

  Rounding is not white. Where fewer inputs end in a jump, as they do without noise, it is the largest of what follows.
  """
  features, outputs = gradient.shape
  if min(features, outputs) <= inputs:
    return 0.0
  small = gradient if features <= outputs else gradient.T
  squared = np.linalg.svd(_triangle(small.T), compute_uv=False) ** 2
  mean = float(squared[inputs:].sum() / ((features - inputs) * (outputs - inputs)))
  jumps = np.flatnonzero(squared[:inputs] > JUMP**2 * squared[1 : inputs + 1])
  early = len(jumps) and jumps[-1] + 1 < inputs
  return max(mean, float(squared[jumps[-1] + 1]) / outputs) if early else mean


def _triangle(matrix: np.ndarray) -> np.ndarray:
  """Returns R of the decomposition QR."""
  found: Any = np.linalg.qr(matrix, mode='r')
  return found


class Chance(NamedTuple):
  """How small residuals of wrong vectors are: a beta distribution about their median, robust to a few right ones."""

  a: float
  b: float

  def log_p(self, residual: np.ndarray) -> np.ndarray:
    """Returns the logarithm of the probability that a wrong vector has a residual as small as this."""
    residual = np.clip(np.asarray(residual, np.float64), _TINY, 1.0)
    found = scipy.special.betainc(self.a, self.b, residual)
    # The leading term of the series, where the function underflows.
    leading = self.a * np.log(residual) - math.log(self.a) - scipy.special.betaln(self.a, self.b)
    return np.where(found > 1e-280, np.log(np.maximum(found, _TINY)), np.minimum(leading, math.log(1e-280)))


def chance(residuals: np.ndarray) -> Chance:
  """Returns how residuals of wrong vectors are distributed.

  Args:
    residuals: of vectors of which most are wrong, [K].
  """
  low, middle, high = np.clip(np.quantile(residuals, (0.25, 0.5, 0.75)), 1e-12, 1 - 1e-12)
  spread = max((high - low) / 1.349, 1e-9)
  total = max(middle * (1 - middle) / spread**2 - 1, 2.0)
  return Chance(middle * total, (1 - middle) * total)
