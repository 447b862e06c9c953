"""The interface of all image sources, and the conversion of their images to float32 pixels in [0, 1]."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from gradleak.core import errors

# The largest value of each stored type; floating images are assumed to be in [0, 1] already.
_LARGEST = {'bool': 1, 'uint8': 255, 'uint16': 65535}

_SMALL = 0.25  # part of [0, 1] that is worth a word; 14 bits in a file of 16 end just below
_LUMA = np.array([0.299, 0.587, 0.114])  # ITU-R BT.601, as in PIL and torchvision


class Source(NamedTuple):
  """One split of a dataset, not decoded yet.

  Attributes:
    class_names: a name for each label.
    size: the number of images.
    examples: `examples(n)` yields the first n images as (image [H, W, C] as stored, label, name in messages), and
      decodes only these.
    by_class: whether its classes are different kinds of images, such as faces and what is no face.
    notes: sentences on what a user may not expect of it.
  """

  class_names: tuple[str, ...]
  size: int
  examples: Callable[[int], Iterator[tuple[np.ndarray, int, str]]]
  by_class: bool = False
  notes: tuple[str, ...] = ()


def convert(
  image: np.ndarray,
  where: str,
  image_size: int | None = None,
  channels: int | None = None,
  largest_pixel: float | None = None,
) -> np.ndarray:
  """Returns `image` as float32 pixels in [0, 1], resized and in grey or RGB if requested.

  Args:
    image: [H, W, C]; unsigned integers span their type's range, floats are in [0, 1] already.
    where: the image's name in messages.
    image_size: the side in pixels of the square to return (None: unchanged). An image that is not square is cropped to
      its central square first.
    channels: 1 (grey: BT.601 luma), 3 (RGB: grey is repeated) or None (unchanged).
    largest_pixel: the stored value that becomes 1; None for the largest of an unsigned type, and 1 for floats.

  Returns:
    [image_size, image_size, channels] float32.

  Raises:
    UsageError: for pixels of another type, for one above `largest_pixel`, and for a conversion of other channels than
      grey or RGB.
  """
  known = _LARGEST.get(image.dtype.name)
  if known is None and not np.issubdtype(image.dtype, np.floating):
    raise errors.UsageError(f'{where} has {image.dtype.name} pixels, expected uint8, uint16 or floats in [0, 1]')
  if largest_pixel is not None and image.size and image.max() > largest_pixel:
    raise errors.UsageError(f'{where} has a pixel of {image.max():g}, above largest_pixel={largest_pixel:g}')
  image = image.astype(np.float32) / np.float32(known or 1 if largest_pixel is None else largest_pixel)
  if channels is not None and channels != image.shape[-1]:
    image = _to_channels(image, channels, where)
  if image_size is not None and image.shape[:2] != (image_size, image_size):
    image = _to_square(image, image_size)
  return image


def span(images: np.ndarray) -> tuple[float, float] | None:
  """Returns (least, largest) pixel of images that use a quarter of [0, 1] or less; None for others.

  Noise and clipping of a given strength may hide such images, but not the same ones at their full range. In a file of
  16 bits, 12 bits of grey end at 0.062, and 14 bits at a quarter. Constant images have no range.
  """
  low, high = float(images.min()), float(images.max())
  return (low, high) if 0 < high - low <= _SMALL else None


def span_in_words(low: float, high: float) -> str:
  """Returns the sentence on images of such a `span`."""
  return (
    f'The images use [{low:.3g}, {high:.3g}] of [0, 1] alone: noise hides them that would not hide them at '
    'their own range. largest_pixel gives the value in the files that is to be 1, such as 4095 for 12 bits.'
  )


def _to_channels(image: np.ndarray, channels: int, where: str) -> np.ndarray:
  if image.shape[-1] not in (1, 3):
    raise errors.UsageError(f'{where} has {image.shape[-1]} channels; only 1 (grey) and 3 (RGB) convert to {channels}')
  if channels == 3:
    return np.repeat(image, 3, axis=-1)
  # In float64 the weights sum to 1, so white stays white.
  return (image.astype(np.float64) @ _LUMA).astype(np.float32)[..., np.newaxis]


def _to_square(image: np.ndarray, size: int) -> np.ndarray:
  import PIL.Image

  side = min(image.shape[:2])
  top, left = ((length - side) // 2 for length in image.shape[:2])
  image = image[top : top + side, left : left + side]
  bilinear = PIL.Image.Resampling.BILINEAR  # when reducing, PIL averages over each new pixel's area: no aliasing
  planes = [
    np.asarray(PIL.Image.fromarray(np.ascontiguousarray(plane)).resize((size, size), bilinear))
    for plane in np.moveaxis(image, -1, 0)
  ]
  # Rounding may exceed the range by one unit in the last place.
  return np.clip(np.stack(planes, axis=-1), image.min(), image.max())
