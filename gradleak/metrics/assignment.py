"""Which reconstruction belongs to which private image, when an attack returns a batch in no particular order."""

import numpy as np

from gradleak import errors

# Above 1, the most that two images in [0, 1] can differ by.
_NON_FINITE_COST = 2.0
_EXACT = 1e-4  # 40 dB


def match(reconstructions, truth):
  """Pairs the two batches one-to-one by least total mean squared error, on images clipped to [0, 1] (Hungarian method).

  One-to-one, because letting two images share their best reconstruction counts a single success several times. As many
  pairs as possible are all but exact (40 dB) first: closed forms leave fillers beside what they recover, and for the
  least total alone a recovered image would go to another that no filler resembles. A host function: NumPy in, NumPy
  out, for use outside `jit`.

  Args:
    reconstructions: float [K, ...], pixels in [0, 1] or beyond. One with a NaN or infinite pixel costs more than any
      other, whichever image it falls to, and so goes to the one that the others can best spare.
    truth: [N, ...] of the same pixels, in [0, 1].

  Returns:
    int64 [N]: `reconstructions[permutation[i]]` is matched to `truth[i]`, and −1 says that none is left for it: an
    attack may return fewer images than there are, or more.

  Raises:
    UsageError: if the shapes do not fit or hold no image.
  """
  from scipy import optimize

  reconstructions, truth = np.asarray(reconstructions), np.asarray(truth)
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


def _mean_squared_errors(truth, reconstructions):
  """Returns float64 [N, K], the error between truth i and reconstruction j."""
  (x, x_finite), (y, y_finite) = _clipped_rows(truth), _clipped_rows(reconstructions)
  # |x − y|² multiplied out: exact enough in float64, and the N·K differences of images need not fit in memory.
  squares = np.sum(x**2, axis=1)[:, np.newaxis] + np.sum(y**2, axis=1)[np.newaxis, :]
  error = (squares - 2 * x @ y.T) / x.shape[1]
  return np.where(x_finite[:, np.newaxis] & y_finite[np.newaxis, :], error, _NON_FINITE_COST)


def _clipped_rows(images):
  """Returns the images as float64 [N, pixels] in [0, 1], and which of them [N] are finite throughout."""
  rows = images.reshape(len(images), -1).astype(np.float64)
  return np.clip(np.nan_to_num(rows), 0, 1), np.isfinite(rows).all(axis=1)
