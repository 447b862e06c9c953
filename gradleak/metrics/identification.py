"""Is a reconstruction matched to its original among real candidates, and is it a picture of it?

The candidates are the original and the images of a gallery: real ones of the same kind, none of them private. They are
compared by the Mahalanobis cosine, as in face recognition with eigenfaces (Beveridge, Bolme, Draper, Teixeira: The CSU
Face Identification Evaluation System, Machine Vision and Applications 2005): the cosine after whitening, so that what
all images of the kind share, such as the layout of a face, does not decide. Of an attacker without information the
original has rank 1 in one of G + 1 cases, whatever its prior, where originals and gallery are drawn alike: the chance
level. The bar of SSIM, from which on a reconstruction counts as a picture of its original, is calibrated on the gallery
alone, without human judgement (`calibrated`).
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from gradleak import errors
from gradleak.engine import compiler
from gradleak.metrics import structural

MOST = 1000  # candidates beside the original
LARGEST = 64  # pixels on a side that are compared
RIDGE = 0.1  # of the mean variance of a principal component
THUMBNAIL = 0.4  # of the side
PERCENTILE = 99  # of the SSIM of two different images
_THUMBNAILS, _PAIRS, _CHUNK = 256, 1024, 32  # images and pairs that calibrate a bar, and pairs compared at once


class Gallery(NamedTuple):
  """Real images of the kind of the private ones, and what is compared with them.

  Attributes:
    size: G, the number of images.
    bar: the least SSIM of a picture.
    mean: of all images that whitening is fitted to, gallery and private ones alike, [D].
    fitted: these, less their mean, [M, D]; those of the gallery are the first.
    inverse: (r + Z·Zᵀ)⁻¹ of these, [M, M], for a ridge r.
    norms: of the gallery's images after whitening, [G].
  """

  size: int
  bar: float
  mean: np.ndarray
  fitted: np.ndarray
  inverse: np.ndarray
  norms: np.ndarray

  def whitened(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns what inner products with `rows` [N, D] after whitening are taken from, [N, D], and the norms, [N].

    By Woodbury's identity, up to a factor that all share.
    """
    made = rows - (rows @ self.fitted.T) @ self.inverse @ self.fitted
    return made, np.sqrt(np.maximum(np.sum(made * rows, axis=1), 1e-24))

  @property
  def chance(self) -> float:
    """The probability of rank 1 without information."""
    return 1 / (self.size + 1)


def gallery(images: Any, private: Any) -> Gallery:
  """Returns the `Gallery` of the first `MOST` images that are not private ones.

  Whitening is fitted to the private images, too: fitted to the others alone, it would tell them apart.

  Args:
    images: float [M, H, W, C] in [0, 1]; M may be 0.
    private: float [N, H, W, C]; they calibrate the bar where there are fewer than two others.

  Raises:
    UsageError: for images of another shape.
  """
  private = errors.host_array('private', private).astype(np.float32)
  images = errors.host_array('gallery', images).astype(np.float32)
  if images.shape[1:] != private.shape[1:]:
    raise errors.UsageError(f'the gallery has the shape {images.shape}, expected [G, {str(private.shape[1:])[1:-1]}]')
  hidden = {image.tobytes() for image in private}
  kept = images[np.asarray([i for i, image in enumerate(images) if image.tobytes() not in hidden][:MOST], int)]
  rows = _units(np.concatenate([kept, private]))
  mean = rows.mean(axis=0)
  rows = rows - mean
  products = rows @ rows.T
  ridge = RIDGE * max(float(np.trace(products)) / min(rows.shape), 1e-12)
  inverse = np.linalg.inv(products + ridge * np.eye(len(rows)))
  made = Gallery(len(kept), calibrated(kept if len(kept) > 1 else private), mean, rows, inverse, np.zeros(0))
  return made._replace(norms=made.whitened(rows[: len(kept)])[1])


def calibrated(images: Any) -> float:
  """Returns the SSIM from which on a reconstruction counts as a picture of its original.

  It is the larger of two: the median SSIM of an image and of its thumbnail of 0.4 of the side, enlarged again; and
  the 99th percentile of the SSIM of two different images. So a picture shows at least as much as a small thumbnail,
  and is nearer to its original than nearly all other images of the kind are.

  Args:
    images: float [N, H, W, C] in [0, 1]; of one image there is no second one, and the thumbnail alone counts.
  """
  images = np.asarray(images, np.float32)
  number = len(images)
  shown = images[np.arange(_THUMBNAILS) % min(number, _THUMBNAILS)]
  bar = float(np.median(_ssim(thumbnails(shown), shown)))
  if number < 2:
    return bar
  pairs = _CHUNK * max(2, min(_PAIRS, _PAIRS * LARGEST**2 // math.prod(images.shape[1:3])) // _CHUNK)
  first = np.arange(pairs) % number
  second = (first + np.random.default_rng(0).integers(1, number, pairs)) % number  # neighbours may be of one class
  return max(bar, float(np.percentile(_ssim(images[second], images[first]), PERCENTILE)))


def thumbnails(images: np.ndarray) -> np.ndarray:
  """Returns images [N, H, W, C] reduced to 0.4 of their side, and enlarged again."""
  small = tuple(max(2, round(side * THUMBNAIL)) for side in images.shape[1:3])
  return _resized(_resized(images, small), images.shape[1:3])


def ranks(reconstructions: Any, truth: Any, among: Gallery) -> np.ndarray:
  """Returns the rank of each original among the candidates, by the Mahalanobis cosine with its reconstruction.

  Args:
    reconstructions, truth: float [N, H, W, C], in pairs.
    among: the `Gallery`, G images.

  Returns:
    int [N], 1 for the most similar candidate, at most G + 1; a candidate that is as similar as the original is ahead
    of it, and so are all of them where a pixel is not finite, or all are equal.
  """
  units, others = _units(reconstructions), among.fitted[: among.size]
  found, originals = units - among.mean, _units(truth) - among.mean
  if not among.size:
    return np.ones(len(found), int)
  whitened, _ = among.whitened(found)
  own = np.sum(whitened * originals, axis=1) / among.whitened(originals)[1]
  ahead = np.sum(whitened @ others.T / among.norms >= own[:, np.newaxis], axis=1)
  return np.where(units.any(axis=1), 1 + ahead, 1 + among.size)


def _units(images: Any) -> np.ndarray:
  """Returns images, reduced to `LARGEST` pixels, minus their mean, of norm 1, [N, D]; zeros for one not finite."""
  images = np.asarray(images, np.float32)
  sides = tuple(min(side, LARGEST) for side in images.shape[1:3])
  images = images if sides == images.shape[1:3] else _resized(images, sides)
  rows = images.reshape(len(images), -1).astype(np.float64)
  rows = np.where(np.isfinite(rows).all(axis=1, keepdims=True), rows, 0.0)
  rows = rows - rows.mean(axis=1, keepdims=True)
  norms = np.linalg.norm(rows, axis=1, keepdims=True)
  return np.divide(rows, norms, out=np.zeros_like(rows), where=norms > 1e-12)


def _resized(images: np.ndarray, sides: tuple[int, ...]) -> np.ndarray:
  """Returns images [N, H, W, C] with other sides in pixels, anti-aliased."""
  return np.asarray(jax.image.resize(images, (len(images), *sides, images.shape[-1]), 'linear'))


def _ssim(images: np.ndarray, others: np.ndarray) -> np.ndarray:
  """Returns the SSIM of pairs, float32 [N]; N is a multiple of the chunk: one compilation per shape."""
  chunks = (slice(start, start + _CHUNK) for start in range(0, len(images), _CHUNK))
  return np.concatenate([np.asarray(_compiled()(images[chunk], others[chunk])) for chunk in chunks])


@functools.cache
def _compiled() -> Callable:
  return jax.jit(structural.ssim, compiler_options=compiler.known(xla_backend_optimization_level=0))
