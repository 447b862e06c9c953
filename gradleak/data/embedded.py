"""Small real datasets that come with scikit-image and scikit-learn; no download is needed."""

from collections.abc import Iterator

import numpy as np

from gradleak.core import errors
from gradleak.data import images

_DIGITS_TEST_SIZE = 500


def faces(split: str) -> images.Source:
  """Returns the `Source` of scikit-image's subset of Labeled Faces in the Wild: grey crops, 25×25, face or not.

  `test` holds 50 faces followed by 50 non-faces, `train` the other 50 faces followed by the other 50 non-faces. The two
  classes are different kinds of images.

  Source: scikit-image's `lfw_subset`, made from Huang et al., "Labeled Faces in the Wild", 2007.

  Raises:
    UsageError: for an unknown split.
  """
  import skimage.data

  pixels = skimage.data.lfw_subset()  # 100 faces, then 100 non-faces
  start = {'test': 0, 'train': 50}[_check_split(split, 'faces')]
  index = np.r_[start : start + 50, 100 + start : 150 + start]
  return _source(pixels[index], (index < 100).astype(np.int32), ('non-face', 'face'), by_class=True)


def digits(split: str) -> images.Source:
  """Returns the `Source` of scikit-learn's handwritten digits: grey, 8×8, ten classes.

  `test` holds the last 500 of the 1,797 images, `train` the 1,297 before them.

  Source: scikit-learn's `load_digits`, from the UCI "Optical Recognition of Handwritten Digits" data.

  Raises:
    UsageError: for an unknown split.
  """
  import sklearn.datasets

  data = sklearn.datasets.load_digits()
  part = {'test': slice(-_DIGITS_TEST_SIZE, None), 'train': slice(-_DIGITS_TEST_SIZE)}[_check_split(split, 'digits')]
  return _source(data.images[part] / 16, data.target[part], tuple(map(str, data.target_names)))


def _check_split(split: str, name: str) -> str:
  errors.check_choice(f'split of {name}', split, ('test', 'train'))
  return split


def _source(
  pixels: np.ndarray, labels: np.ndarray, class_names: tuple[str, ...], by_class: bool = False
) -> images.Source:
  def examples(count: int) -> Iterator[tuple[np.ndarray, int, str]]:
    for index in range(count):
      yield pixels[index][..., np.newaxis], int(labels[index]), f'image {index}'

  return images.Source(class_names, len(pixels), examples, by_class)
