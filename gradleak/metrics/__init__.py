"""How close a reconstruction is to the private images: metrics, matching, and the statistics of many trials.

The metrics of `REGISTRY` are pure JAX functions of (reconstructions, truth), both float [N, H, W, C] with pixels in
[0, 1]. They return float32 [N] and work under `jit` and `vmap`. So do `lpips`, which also takes the weights of its
network, and `fmse`, which takes a network. The other functions, except `fully_revealed`, run on the host.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from gradleak.core import errors
from gradleak.core.statistics import mean_interval, percentile_threshold, proportion_interval
from gradleak.metrics.assignment import match
from gradleak.metrics.identification import Gallery, distinct, gallery, ranks
from gradleak.metrics.labels import LabelScores, checked, label_scores, of_matched
from gradleak.metrics.perceptual import LpipsWeights, fmse, lpips, read_lpips
from gradleak.metrics.pixel import MAX_PSNR, mse, mse_unclipped, pearson, psnr, psnr_unclipped
from gradleak.metrics.revealed import FULLY, LEVEL, fully_revealed
from gradleak.metrics.structural import ms_ssim, ssim

__all__ = [
  'LEVEL',
  'MAX_PSNR',
  'REGISTRY',
  'Gallery',
  'LabelScores',
  'LpipsWeights',
  'distinct',
  'evaluate',
  'fmse',
  'fully_revealed',
  'gallery',
  'label_scores',
  'lpips',
  'match',
  'mean_interval',
  'ms_ssim',
  'mse',
  'mse_unclipped',
  'pearson',
  'percentile_threshold',
  'proportion_interval',
  'psnr',
  'psnr_unclipped',
  'ranks',
  'read_lpips',
  'ssim',
]

REGISTRY: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
  'mse': mse,
  'psnr': psnr,
  'ssim': ssim,
  'ms_ssim': ms_ssim,
  'pearson': pearson,
  'mse_unclipped': mse_unclipped,
  'psnr_unclipped': psnr_unclipped,
}


def evaluate(
  reconstructions: Any,
  truth: Any,
  labels_hat: Any,
  labels: Any,
  *,
  signed: bool = True,
  blank: bool = True,
  among: Gallery | Mapping[int, Gallery] | None = None,
) -> dict[str, Any]:
  """Returns the metrics of one reconstructed batch, after matching it one-to-one with the private one (`match`).

  Runs on the host and compiles once per shape.

  Args:
    reconstructions: float [K, H, W, C], in any order, pixels may exceed [0, 1]; K may differ from N.
    truth: float [N, H, W, C], pixels in [0, 1].
    labels_hat: int [K], the attack's labels of its reconstructions, −1 for unknown; [0] if the attack gives no labels.
    labels: int [N], the labels of `truth`.
    signed: whether an image must have the right sign to count as revealed, see `fully_revealed`.
    blank: whether a reconstruction of zeros is an answer, see `fully_revealed`.
    among: the `Gallery` that an original is to be found in, or one per label.

  Returns:
    A dict of Python values. Each metric of `REGISTRY`: its mean over the min(K, N) pairs, NaN if any of them diverged;
    'pearson' over the pairs that have a correlation, NaN if none has. 'revealed': the number of the N images that any
    reconstruction reveals fully, by correlation or up to a root mean squared error of one level of 8 bits
    (`fully_revealed`); 'revealed_psnr': the mean PSNR of the fully revealed pairs, NaN if there are none. 'flat': the
    number of the N images whose pixels deviate from their mean by no more than that: correlation says nothing of them.
    'label_correct': the fraction of the N images whose matched reconstruction has their label. 'label_counts_correct':
    the share of true labels recovered as a multiset; at least 'label_correct', since an attack may know the labels of a
    batch but not their order. Both are NaN if the attack gives no labels. 'permutation': list of N integers, the
    reconstruction matched to each image, or −1. With a gallery: 'rank', the best `ranks` of a pair; 'first', the places
    of the images that are at rank 1 among any others, in `truth`; 'identified', how many these are; 'recognised', how
    many at rank 1 have an SSIM of at least the gallery's threshold; 'candidates', the least number of others that an
    image of a pair is to be found among.

  Raises:
    UsageError: if shapes or types do not fit, or the truth is not within [0, 1].
  """
  reconstructions = errors.host_array('reconstructions', reconstructions)
  truth = errors.host_array('truth', truth)
  if truth.ndim != 4:
    raise errors.UsageError(f'the truth has shape {truth.shape}, expected [N, H, W, C]')
  permutation = match(reconstructions, truth)
  if not (truth.min() >= -1e-6 and truth.max() <= 1 + 1e-6):
    raise errors.UsageError(f'the truth has pixels in [{truth.min():g}, {truth.max():g}], expected [0, 1]')
  labels_hat, labels = checked(labels_hat, labels, len(reconstructions), len(truth))

  matched = permutation >= 0
  pairs = reconstructions[permutation[matched]], truth[matched]
  values = jax.device_get(_all_metrics(*pairs))
  shown = blank | pairs[0].any(axis=(1, 2, 3))
  correlations = values['pearson'] if signed else np.abs(values['pearson'])
  fully = (correlations >= FULLY) | (values['mse_unclipped'] <= LEVEL**2) & shown
  seen = {} if among is None else _identified(*pairs, labels[matched], values['ssim'], np.flatnonzero(matched), among)
  return {
    **{name: float(np.mean(each, dtype=np.float64)) for name, each in values.items()},
    'pearson': _mean_correlation(values['pearson'], values['mse']),
    'revealed': int(_revealed(reconstructions, truth, signed, blank)),
    'revealed_psnr': float(np.mean(values['psnr'][fully], dtype=np.float64)) if fully.any() else math.nan,
    'flat': int(np.sum(np.std(truth, axis=(1, 2, 3), dtype=np.float64) <= LEVEL)),
    **seen,
    **of_matched(labels_hat, labels, permutation),
    'permutation': permutation.tolist(),
  }


def _mean_correlation(correlations: np.ndarray, errors_of_pairs: np.ndarray) -> float:
  """Returns the mean of the correlations that are defined; NaN for none, and where a pair has a non-finite pixel."""
  known = correlations[~np.isnan(correlations)]
  return float(np.mean(known, dtype=np.float64)) if known.size and np.isfinite(errors_of_pairs).all() else math.nan


def _identified(
  images: np.ndarray,
  truth: np.ndarray,
  labels: np.ndarray,
  similarity: np.ndarray,
  places: np.ndarray,
  among: Gallery | Mapping[int, Gallery],
) -> dict[str, Any]:
  """Returns 'rank', 'first', 'identified', 'recognised' and 'candidates' of pairs, see `evaluate`."""
  found, least, candidates = np.empty(len(images), int), np.empty(len(images)), np.empty(len(images), int)
  for label in np.unique(labels):
    of, kind = labels == label, among if isinstance(among, Gallery) else among[int(label)]
    found[of], least[of], candidates[of] = (
      ranks(images[of], truth[of], kind),
      kind.threshold,
      kind.candidates(truth[of]),
    )
  first = found == 1
  named = first & (candidates > 0)
  return {
    'rank': int(found.min()),
    'first': places[named].tolist(),
    'identified': int(named.sum()),
    'recognised': int((first & (similarity >= least)).sum()),
    'candidates': int(candidates.min()),
  }


@functools.partial(jax.jit, static_argnums=(2, 3))
def _revealed(reconstructions: jax.Array, truth: jax.Array, signed: bool, blank: bool) -> jax.Array:
  return fully_revealed(reconstructions, truth, signed=signed, within=LEVEL, blank=blank).count


@jax.jit
def _all_metrics(reconstructions: jax.Array, truth: jax.Array) -> dict[str, jax.Array]:
  return {name: metric(reconstructions, truth) for name, metric in REGISTRY.items()}
