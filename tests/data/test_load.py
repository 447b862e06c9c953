import subprocess
import sys

import numpy as np
import pytest
import skimage.data
import sklearn.datasets

from gradleak import data
from gradleak.core import errors


def test_faces_are_the_first_and_the_other_halves():
  pixels = skimage.data.lfw_subset()
  test, train = data.load('faces'), data.load('faces', 'train')
  for dataset, start in ((test, 0), (train, 50)):
    assert dataset.samples.shape == (100, 25, 25, 1)
    assert dataset.samples.dtype == np.float32
    assert dataset.targets.dtype == np.int32
    np.testing.assert_array_equal(dataset.targets, [1] * 50 + [0] * 50)
    np.testing.assert_allclose(dataset.samples[:50, ..., 0], pixels[start : start + 50], atol=1e-6)
    np.testing.assert_allclose(dataset.samples[50:, ..., 0], pixels[100 + start : 150 + start], atol=1e-6)
  assert (test.name, test.split) == ('faces', 'test')
  assert test.class_names == ('non-face', 'face')
  assert test.num_classes == 2


def test_the_gallery_of_faces_is_all_of_them_and_each_class_a_kind_of_its_own():
  for split in ('test', 'train'):
    found = data.gallery('faces', split)
    assert found.by_class and found.samples.shape == (200, 25, 25, 1) and found.targets.sum() == 100
    assert {image.tobytes() for image in found.samples} == {
      image.tobytes() for each in ('test', 'train') for image in data.load('faces', each).samples
    }
  assert found.named(1) == 'face'
  digits = data.gallery('digits')
  assert not digits.by_class and len(digits.samples) == 1001 and len(np.unique(digits.targets)) == 10
  assert data.gallery('digits', most=7, by_class=True).by_class
  np.testing.assert_array_equal(data.gallery('digits', most=7).samples, data.load('digits', limit=7).samples)


def test_digits_splits_are_disjoint_and_complete():
  original = sklearn.datasets.load_digits()
  train, test = data.load('digits', 'train'), data.load('digits')
  assert len(test.samples) == 500
  np.testing.assert_array_equal(np.concatenate([train.samples, test.samples])[..., 0] * 16, original.images)
  np.testing.assert_array_equal(np.concatenate([train.targets, test.targets]), original.target)
  assert test.class_names == tuple('0123456789')


def test_limit_size_and_channels():
  whole = data.load('digits')
  few = data.load('digits', limit=3)
  np.testing.assert_array_equal(few.samples, whole.samples[:3])
  np.testing.assert_array_equal(few.targets, whole.targets[:3])
  assert data.load('digits', limit=3, image_size=16, channels=3).samples.shape == (3, 16, 16, 3)
  assert data.load('digits', limit=500).samples.shape == whole.samples.shape


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    ({'limit': 101}, "101 images are asked for, but the split 'test' of faces has 100"),
    ({'channels': 2}, r'channels is 2, expected 1 \(grey\), 3 \(RGB\)'),
    ({'split': 'tests'}, "unknown split of faces 'tests'; did you mean 'test'. .valid: test, train"),
    ({'name': 'digits', 'split': 'val'}, "unknown split of digits 'val' .valid: test, train"),
    ({'name': '/data/cats'}, "no dataset is named '/data/cats'; for a folder of images write folder:/data/cats"),
  ],
)
def test_requests_that_cannot_be_met(arguments, message):
  with pytest.raises(errors.UsageError, match=message):
    data.load(**{'name': 'faces', **arguments})


def with_pixel(value):
  images = np.full((3, 2, 2, 1), 0.5, np.float32)
  images[1, 0, 1, 0] = value
  return images


@pytest.mark.parametrize(
  ('name', 'kind', 'options'),
  [
    ('digits', 'images', {'tokeniser': 'bytes', 'length': 5}),
    (
      'breast_cancer',
      'rows',
      {'image_size': 8, 'channels': 1, 'largest_pixel': 7.0, 'tokeniser': 'bytes', 'length': 5},
    ),
    ('notes', 'texts', {'image_size': 8, 'channels': 1, 'largest_pixel': 7.0}),
  ],
)
def test_options_of_other_samples_are_refused(name, kind, options):
  for option, value in options.items():
    of = 'texts' if option in ('tokeniser', 'length') else 'images'
    with pytest.raises(errors.UsageError, match=f'{option} is of {of}, and {name} has {kind}: leave it out'):
      data.load(name, limit=2, **{option: value})


@pytest.mark.parametrize(
  ('images', 'labels', 'message'),
  [
    (with_pixel(np.nan), [0, 1, 2], 'image 1 has a pixel of nan, expected finite'),
    (with_pixel(np.inf), [0, 1, 2], 'image 1 has a pixel of inf'),
    (with_pixel(1.001), [0, 1, 2], 'image 1 has a pixel of 1.001'),
    (with_pixel(-0.5), [0, 1, 2], 'image 1 has a pixel of -0.5'),
    ((with_pixel(0.5) * 255).astype(np.uint8), [0, 1, 2], 'images are uint8, .*divide by 255'),
    (np.zeros((3, 2, 2, 1), np.int32), [0, 1, 2], 'images are int32, expected floats in .0, 1.$'),
    (np.zeros((3, 2, 2)), [0, 1, 2], r'images have the shape \(3, 2, 2\), expected .N, H, W, C.'),
    (np.zeros((0, 2, 2, 1)), np.zeros(0, int), r'images have the shape \(0, 2, 2, 1\)'),
    (with_pixel(0), [0, 1], r'labels are int64 of shape \(2,\), expected one integer for each of 3 images'),
    (with_pixel(0), [0.0, 1.0, 2.0], 'labels are float64'),
    (with_pixel(0), np.eye(3, dtype=int), r'labels are int64 of shape \(3, 3\)'),
    (with_pixel(0), [0, 1, 3], r'image 2 has the label 3, expected in \[0, 2\]'),
    (with_pixel(0), [0, -1, 2], r'image 1 has the label -1, expected in \[0, 2\]$'),
    (with_pixel(0), [0, 1, -100], r'image 2 has the label -100, expected in \[0, 2\]: .*ignore_index'),
  ],
)
def test_validate_refuses(images, labels, message):
  with pytest.raises(errors.UsageError, match=message):
    data.validate(images, np.asarray(labels), num_classes=3)


def test_validate_accepts():
  data.validate(with_pixel(0), np.array([0, 1, 2]), num_classes=3)
  data.validate(with_pixel(1), np.array([0, 9, 2], np.uint8))  # any class, where their number is not known
  with pytest.raises(errors.UsageError, match='image 0 has the label -1, expected at least 0'):
    data.validate(with_pixel(1), np.array([-1, 9, 2]))


def test_bad_pixels_in_a_dataset_are_named_with_it(monkeypatch):
  def broken(split):
    source = data.embedded.digits(split)
    return source._replace(
      examples=lambda count: ((image * np.nan, label, where) for image, label, where in source.examples(count))
    )

  monkeypatch.setitem(data.EMBEDDED, 'broken', broken)
  with pytest.raises(errors.UsageError, match="the dataset broken, split 'test': image 0 has a pixel of nan"):
    data.load('broken')


@pytest.mark.long
def test_importing_the_package_imports_nothing_heavy():
  heavy = [
    'tensorflow_datasets',
    'skimage',
    'sklearn',
    'PIL',
    'tensorflow',
    'matplotlib',
    'scipy.stats',
    'scipy.optimize',
  ]
  code = f'import sys, gradleak; print([name for name in {heavy} if name in sys.modules])'
  assert subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True).stdout.strip() == '[]'
