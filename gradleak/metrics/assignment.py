"""Matches reconstructions to private images: attacks return a batch in any order."""

from typing import Any

import numpy as np

from gradleak.core import errors

# Above 1, the largest mean squared error of two images in [0, 1].
_NON_FINITE_COST = 2.0
_EXACT = 1e-4  # 40 dB


def match(reconstructions: Any, truth: Any) -> np.ndarray:
  """Pairs the two batches one-to-one by least total mean squared error, on images clipped to [0, 1] (Hungarian method).

  If two images could share a reconstruction, one success would be counted twice. The number of nearly exact pairs
  (40 dB) is maximised first, because closed forms return placeholders beside the images they recover. The least total
  error could pair a recovered image with another one that resembles no placeholder. NumPy on the host, not for use
  under `jit`.

  Args:
    reconstructions: float [K, ...], pixels may exceed [0, 1]. One with a NaN or infinite pixel has the same cost, above
      all others, with every image.
    truth: [N, ...] of the same pixels, in [0, 1].

  Returns:
    int64 [N]: `reconstructions[permutation[i]]` is matched to `truth[i]`; −1 if there are too few reconstructions.

  Raises:
    UsageError: if the shapes do not fit or hold no image.
  """
  from scipy import optimize

  reconstructions = errors.host_array('reconstructions', reconstructions)
  truth = errors.host_array('truth', truth)
  shapes = reconstructions.shape, truth.shape
  if shapes[0][1:] != shapes[1][1:] or truth.ndim < 2 or 0 in (*shapes[0], *shapes[1]):
    raise errors.UsageError(
      f'reconstructions have shape {shapes[0]}, the truth {shapes[1]}; expected [K, …] and [N, …] of the same pixels'
    )
  permutation = np.full(len(truth), -1)
  error = _mean_squared_errors(truth, reconstructions)
  bonus = _NON_FINITE_COST * min(error.shape)  # more than all other pairs can cost
  images, matched = optimize.linear_sum_assignment(np.where(error <= _EXACT, error - bonus, error))
  permutation[images] = matched
  return permutation


def _mean_squared_errors(truth: np.ndarray, reconstructions: np.ndarray) -> np.ndarray:
  """Returns float64 [N, K], the error between truth i and reconstruction j."""
  (x, x_finite), (y, y_finite) = _clipped_rows(truth), _clipped_rows(reconstructions)
  # |x − y|² expanded: accurate enough in float64, and needs no memory for N·K differences of images.
  squares = np.sum(x**2, axis=1)[:, np.newaxis] + np.sum(y**2, axis=1)[np.newaxis, :]
  error = (squares - 2 * x @ y.T) / x.shape[1]
  return np.where(x_finite[:, np.newaxis] & y_finite[np.newaxis, :], error, _NON_FINITE_COST)


def _clipped_rows(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Returns the images as float64 [N, pixels] in [0, 1], and which of them [N] have finite pixels only."""
  rows = images.reshape(len(images), -1).astype(np.float64)
  return np.clip(np.nan_to_num(rows), 0, 1), np.isfinite(rows).all(axis=1)
