"""Images as people look at them: in [0, 1], as bytes, and as data URIs."""

import base64
import io

import numpy as np

from gradleak.core import errors


def data_uri(image: np.ndarray, largest: int = 192) -> str:
  """Returns an image as a PNG data URI.

  Args:
    image: [H, W, C], clipped to [0, 1], or scaled where most of it lies far outside, see `displayed`; NaN pixels become
      a checkerboard.
    largest: images with a longer side are scaled down to it, which keeps pages of photographs small.
  """
  from PIL import Image

  picture = Image.fromarray(pixels_of(image))
  picture.thumbnail((largest, largest))
  buffer = io.BytesIO()
  picture.save(buffer, format='PNG', optimize=True)
  return embedded(buffer.getvalue())


def displayed(image: np.ndarray) -> np.ndarray:
  """Returns an image as a viewer who knows the range of images would look at it: [H, W, C] in [0, 1], NaN unchanged.

  It is clipped. Where more than half of its values are beyond [-0.5, 1.5], clipping would leave hardly anything of a
  scaled copy. Such an image is scaled first, so that its 1st percentile becomes 0 and its 99th becomes 1.
  """
  finite = image[np.isfinite(image)]
  if finite.size and np.mean((finite < -0.5) | (finite > 1.5)) > 0.5:
    low, high = np.percentile(finite, (1, 99))
    image = (image - low) / max(high - low, 1e-12)
  return np.clip(image, 0, 1)


def pixels_of(image: np.ndarray) -> np.ndarray:
  """Returns uint8 [H, W] or [H, W, 3]; pixels that are not finite as a checkerboard; other channels averaged."""
  image = errors.host_array('image', image).astype(np.float64)
  if image.ndim != 3 or not image.size:
    raise errors.UsageError(f'the image has the shape {image.shape}, expected [H, W, C]')
  image = image if image.shape[-1] == 3 else np.mean(image, axis=-1, keepdims=True)
  rows, columns = np.indices(image.shape[:2])
  board = np.where((rows + columns) % 2 == 0, 0.78, 0.9)[..., np.newaxis]
  pixels = np.where(np.isfinite(image).all(axis=-1, keepdims=True), displayed(image), board)
  pixels = np.round(255 * pixels).astype(np.uint8)
  return pixels[..., 0] if pixels.shape[-1] == 1 else pixels


def embedded(png: bytes) -> str:
  """Returns a PNG as a data URI."""
  return f'data:image/png;base64,{base64.b64encode(png).decode()}'
