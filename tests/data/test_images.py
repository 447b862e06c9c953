import jax
import numpy as np
import PIL.Image
import pytest
import skimage.transform

import gradleak as gl
from gradleak.core import errors
from gradleak.data import images
from gradleak.report import findings


def rng():
  return np.random.default_rng(0)


@pytest.mark.parametrize(('dtype', 'largest'), [(np.uint8, 255), (np.uint16, 65535), (bool, 1), (np.float64, 1.0)])
def test_stored_types_span_zero_to_one(dtype, largest):
  image = np.array([0, largest], dtype).reshape(1, 2, 1)
  converted = images.convert(image, 'it')
  assert converted.dtype == np.float32
  assert converted.ravel().tolist() == [0, 1]


def test_other_types_are_refused():
  with pytest.raises(errors.UsageError, match=r'^it has int64 pixels, expected uint8'):
    images.convert(np.zeros((2, 2, 1), np.int64), 'it')


def test_grey_is_what_pil_calls_luminance():
  image = rng().integers(0, 256, (9, 7, 3), dtype=np.uint8)
  expected = np.asarray(PIL.Image.fromarray(image).convert('L'))
  grey = images.convert(image, 'it', channels=1)
  assert grey.shape == (9, 7, 1)
  np.testing.assert_allclose(grey[..., 0] * 255, expected, atol=1.01)  # PIL rounds to whole numbers


def test_white_and_black_stay_in_range_in_grey():
  image = np.repeat(np.array([0, 255], np.uint8), 3).reshape(1, 2, 3)
  assert images.convert(image, 'it', channels=1).ravel().tolist() == [0, 1]


def test_rgb_repeats_grey():
  image = rng().random((4, 4, 1))
  converted = images.convert(image, 'it', channels=3)
  np.testing.assert_array_equal(converted, np.concatenate([image.astype(np.float32)] * 3, -1))


def test_only_grey_and_rgb_convert():
  with pytest.raises(errors.UsageError, match='it has 13 channels'):
    images.convert(np.zeros((4, 4, 13), np.uint8), 'it', channels=3)


@pytest.mark.parametrize('size', [8, 16, 48])
def test_resizing_agrees_with_scikit_image(size):
  smooth = skimage.transform.resize(rng().random((6, 6, 3)), (32, 32), order=3)
  expected = skimage.transform.resize(smooth, (size, size), order=1, anti_aliasing=size < 32)
  resized = images.convert(smooth, 'it', image_size=size)
  assert resized.shape == (size, size, 3)
  assert np.abs(resized - expected).max() < 0.05


def test_shrinking_does_not_alias():
  stripes = np.zeros((64, 64, 1), np.uint8)
  stripes[:, ::2] = 255
  shrunk = images.convert(stripes, 'it', image_size=16)
  np.testing.assert_allclose(shrunk[:, 1:-1], 0.5, atol=0.01)  # sampling without a filter gives 0 or 1


def test_resizing_keeps_the_range():
  image = rng().integers(0, 2, (31, 31, 3), dtype=np.uint8) * np.uint8(255)
  for size in (7, 32, 100):
    resized = images.convert(image, 'it', image_size=size)
    assert resized.min() >= 0
    assert resized.max() <= 1


def test_the_same_size_changes_nothing():
  image = rng().random((5, 5, 1)).astype(np.float32)
  np.testing.assert_array_equal(images.convert(image, 'it', image_size=5), image)


@pytest.mark.parametrize('axis', [0, 1])
def test_oblong_images_are_cropped_to_their_central_square(axis):
  square = rng().random((6, 6, 1))
  padding = [(0, 0)] * 3
  padding[axis] = (2, 2)
  np.testing.assert_array_equal(images.convert(np.pad(square, padding), 'it', image_size=6), square.astype(np.float32))


@pytest.mark.parametrize(
  ('low', 'high', 'said'),
  [(0, 0.062, True), (0, 0.25, True), (0.7, 0.9, True), (0, 0.3, False), (0, 1, False), (0.5, 0.5, False)],
)
def test_a_small_part_of_the_range_is_recorded_and_said(low, high, said, small_images):
  """In the scenario, whoever made the images, and where results are read."""
  pixels = (low + (high - low) * small_images[0]).astype(np.float32)
  built = gl.scenario(gl.models.mlp(10, widths=4), pixels, small_images[1], key=jax.random.key(0))
  assert ('pixel_range' in built.settings) == said
  sentences = findings.pixels(built.settings)
  assert len(sentences) == said
  if said:
    assert sentences[0].startswith(f'The images use [{low:.3g}, {high:.3g}] of [0, 1] alone: noise hides them')
