"""Is a reconstruction matched to its original among real candidates, and is it a picture of it?

The candidates are the original and the images of a gallery: real ones of the same kind. A gallery may also hold the
private images. Then the candidates of each image are all others, and gallery and threshold do not depend on which
images are attacked. They are compared by the Mahalanobis cosine, which is the cosine after whitening, as in face
recognition with eigenfaces. So features that all images of the kind share, such as the layout of a face, do not decide.
Source: Beveridge, Bolme, Draper, Teixeira, The CSU Face Identification Evaluation System, Machine Vision and
Applications 2005. The chance level assumes that originals and gallery are drawn alike. Then the original has rank 1 in
one of G + 1 cases for an attacker without information, under any prior. A reconstruction counts as a picture of its
original from the threshold of SSIM on. The threshold is calibrated on the gallery only, without human judgement
(`calibrated`).
"""

import functools
import hashlib
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np

from gradleak.core import errors
from gradleak.engine import compiler
from gradleak.metrics import structural
from gradleak.metrics.revealed import LEVEL

MOST = 1000  # candidates beside the original
LARGEST = 64  # pixels on a side that are compared
RIDGE = 0.1  # of the mean variance of a principal component
THUMBNAIL = 0.4  # of the side
ENOUGH, LEAST = 100, 0.56  # images that calibrate a threshold, and the least one of fewer: that of 1,001 of MNIST
PERCENTILE = 99  # of what two different samples have in common, such as their SSIM
_THUMBNAILS, _PAIRS, _CHUNK = 256, 1024, 32  # images and pairs that calibrate a threshold, and pairs compared at once


class Gallery(NamedTuple):
  """Real images of the kind of the private ones, and what is compared with them.

  Attributes:
    threshold: the least SSIM of a picture.
    places: what an image in it is known by -> its place among those of the gallery, P in all.
    mean: of all images that whitening is fitted to, gallery and private ones alike, [D].
    fitted: these, less their mean, [M, D]; those of the gallery are the first.
    inverse: (r + Z·Zᵀ)⁻¹ of these, [M, M], for a ridge r.
    norms: of the gallery's images after whitening, [P].
  """

  threshold: float
  places: dict[bytes, int]
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

  def candidates(self, images: Any) -> np.ndarray:
    """Returns how many others each original is to be found among, int [N], at most `MOST`; images: [N, H, W, C]."""
    among = np.asarray([_known_by(image) in self.places for image in np.asarray(images, np.float32)], int)
    return np.minimum(MOST, len(self.places) - among)


def distinct(images: np.ndarray) -> list[int]:
  """Returns the places of the first `MOST` + 1 different images [N, H, W, C] that are not flat.

  Some images deviate from their mean by at most one level of 8 bits. Their correlation means nothing, and any two of
  them are alike.
  """
  return firsts(_known_by(image) if image.std(dtype=np.float64) > LEVEL else None for image in images)


def firsts(known: Iterable[bytes | None]) -> list[int]:
  """Returns the places of the first `MOST` + 1 samples that differ, by what each is known by; None is left out."""
  first: dict[bytes, int] = {}
  for place, one in enumerate(known):
    if len(first) > MOST:
      break
    if one is not None:
      first.setdefault(one, place)
  return list(first.values())


def different(number: int, pairs: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns the places of both members of pairs of different samples, int [pairs]; a second one is drawn."""
  first = np.arange(pairs) % number
  return first, (first + np.random.default_rng(0).integers(1, number, pairs)) % number  # neighbours may be alike


def gallery(images: Any, private: Any) -> Gallery:
  """Returns the `Gallery` of the first `MOST` + 1 of the images, see `distinct`: `MOST` beside each private one.

  Whitening is fitted to the private images, too: fitted to the others alone, it would tell them apart. Fewer than
  `ENOUGH` images say little of their kind, and the thumbnail of an image of noise shows next to nothing. The threshold
  of so few is therefore at least `LEAST`.

  Args:
    images: float [M, H, W, C] in [0, 1], private ones among them or not; M may be 0.
    private: float [N, H, W, C]; they calibrate the threshold where there are fewer than two images.

  Raises:
    UsageError: for images of another shape.
  """
  private = errors.host_array('private', private).astype(np.float32)
  images = errors.host_array('gallery', images).astype(np.float32)
  if images.shape[1:] != private.shape[1:]:
    raise errors.UsageError(f'the gallery has the shape {images.shape}, expected [G, {str(private.shape[1:])[1:-1]}]')
  kept = images[np.asarray(distinct(images), int)]
  places = {_known_by(image): place for place, image in enumerate(kept)}
  others = [image for image in private if _known_by(image) not in places]
  rows = _units(np.concatenate([kept, np.asarray(others, np.float32).reshape(-1, *private.shape[1:])]))
  mean = rows.mean(axis=0)
  rows = rows - mean
  products = rows @ rows.T
  ridge = RIDGE * max(float(np.trace(products)) / min(rows.shape), 1e-12)
  inverse = np.linalg.inv(products + ridge * np.eye(len(rows)))
  threshold = max(calibrated(kept if len(kept) > 1 else private), LEAST if len(kept) < ENOUGH else 0.0)
  made = Gallery(threshold, places, mean, rows, inverse, np.zeros(0))
  return made._replace(norms=made.whitened(rows[: len(kept)])[1])


def calibrated(images: Any) -> float:
  """Returns the SSIM from which on a reconstruction counts as a picture of its original.

  It is the larger of two values. One is the median SSIM of an image and its thumbnail of 0.4 of the side, enlarged
  again. The other is the 99th percentile of the SSIM of two different images. So a picture shows at least as much as a
  small thumbnail. It is also nearer to its original than nearly all other images of the kind are.

  Args:
    images: float [N, H, W, C] in [0, 1]; of one image there is no second one, and the thumbnail alone counts.
  """
  images = np.asarray(images, np.float32)
  number = len(images)
  shown = images[np.arange(_THUMBNAILS) % min(number, _THUMBNAILS)]
  threshold = float(np.median(_ssim(thumbnails(shown), shown)))
  if number < 2:
    return threshold
  pairs = _CHUNK * max(2, min(_PAIRS, _PAIRS * LARGEST**2 // math.prod(images.shape[1:3])) // _CHUNK)
  first, second = different(number, pairs)
  return max(threshold, float(np.percentile(_ssim(images[second], images[first]), PERCENTILE)))


def thumbnails(images: np.ndarray) -> np.ndarray:
  """Returns images [N, H, W, C] reduced to 0.4 of their side, and enlarged again."""
  small = tuple(max(2, round(side * THUMBNAIL)) for side in images.shape[1:3])
  return _resized(_resized(images, small), images.shape[1:3])


def ranks(reconstructions: Any, truth: Any, among: Gallery) -> np.ndarray:
  """Returns the rank of each original among the candidates, by the Mahalanobis cosine with its reconstruction.

  Args:
    reconstructions, truth: float [N, H, W, C], in pairs.
    among: the `Gallery`; G images of it are the candidates of an original (`Gallery.candidates`), never itself.

  Returns:
    int [N], 1 for the most similar candidate, at most G + 1; a candidate that is as similar as the original is ahead
    of it, and so are all of them where a pixel is not finite, or all pixels of the one or the other are equal.
  """
  others, candidates = among.fitted[: len(among.places)], among.candidates(truth)
  seen, given = _units(reconstructions), _units(truth)
  found, originals = seen - among.mean, given - among.mean
  whitened, _ = among.whitened(found)
  own = np.sum(whitened * originals, axis=1) / among.whitened(originals)[1]
  ahead = whitened @ others.T / among.norms >= own[:, np.newaxis]
  for row, (image, count) in enumerate(zip(np.asarray(truth, np.float32), candidates, strict=True)):
    place = among.places.get(_known_by(image))
    ahead[row, slice(count, None) if place is None else place] = False
  return np.where(seen.any(axis=1) & given.any(axis=1), 1 + ahead.sum(axis=1), 1 + candidates)


def _known_by(image: np.ndarray) -> bytes:
  """Returns what tells a float32 image from all that differ in a pixel."""
  return hashlib.sha256(np.ascontiguousarray(image).tobytes()).digest()


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
