"""A user's own folder of images: PATH/split/label/*.png, .jpg or .jpeg."""

import collections
import pathlib
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from gradleak.core import errors
from gradleak.data import images

if TYPE_CHECKING:
  import PIL.Image

_MOST_PIXELS = 50_000_000  # of one image; a small file can hold far more
_SUFFIXES = ('.png', '.jpg', '.jpeg')
_NO_CLASSES = ('__MACOSX', '@eaDir', '$RECYCLE.BIN', 'System Volume Information', 'lost+found')  # what systems add
_NO_IMAGES = ('thumbs.db', 'desktop.ini')


def read(path: str, split: str) -> images.Source:
  """Returns the `Source` of the images in `path`/`split`/label/.

  The classes are the sorted names of the label folders of all splits, the same for each split. Images are ordered by
  (file name, label), not by label, so the first N are usually of several classes.

  Files are rotated by their EXIF tag, and palettes, CMYK and other colour spaces become RGB. Transparent pixels are put
  on white, and 16-bit grey keeps its depth. Files and folders whose name begins with a dot are ignored, and so is what
  systems add, such as `__MACOSX`. Notes say which other files are left out, and which classes have no image.

  Args:
    path: the folder of the splits; `~` is the home folder.
    split: the name of a folder in it.

  Raises:
    UsageError: for a path that does not exist, an unknown split (lists the valid ones), a split without images, and,
      when it is decoded, a file that is not a readable image.
  """
  if not path or not (root := errors.check_path('the path of folder:PATH', path, home=True)).is_dir():
    raise errors.UsageError(f'no folder {path!r}; folder:PATH expects images at PATH/split/label/*.png, .jpg or .jpeg')
  splits = {folder.name: folder for folder in _folders(root)}
  if split not in splits:
    raise errors.unknown(f'split of folder:{path}', split, splits or ['(it has none: expected PATH/split/label/*.png)'])
  labels: dict[str, bool] = {}  # whether there is an image in any split
  for folder in splits.values():
    for label in _folders(folder):
      labels[label.name] = labels.get(label.name, False) or any(map(_is_image, label.iterdir()))
  class_names = sorted(errors.check_text(f'the name of a label in {path}', label) for label in labels)
  files = sorted(
    ((file.name, label.name, file) for label in _folders(splits[split]) for file in label.iterdir() if _is_image(file)),
  )
  if not files:
    raise errors.UsageError(f'no images in {splits[split]}, expected {splits[split]}/label/*.png, .jpg or .jpeg')
  label_of = {name: index for index, name in enumerate(class_names)}

  def examples(count: int) -> Iterator[tuple[np.ndarray, int, str]]:
    for _, label, file in files[:count]:
      yield _decode(file), label_of[label], str(file)

  notes = tuple(_notes(splits[split], [name for name in class_names if not labels[name]]))
  return images.Source(tuple(class_names), len(files), examples, notes=notes)


def _notes(split: pathlib.Path, empty: list[str]) -> Iterator[str]:
  """Yields sentences on what is left out of a split, and on classes without an image in any split."""
  if empty:
    yield (
      f'{len(empty)} of the label folders hold no image in any split, and count as classes: {errors.some(empty)}. '
      'Remove those that are none.'
    )
  inside = [file for label in _folders(split) for file in label.iterdir() if not file.name.startswith('.')]
  others = [file for file in inside if file.is_file() and not _is_image(file) and file.name.lower() not in _NO_IMAGES]
  if others:
    kinds = collections.Counter(file.suffix.lower() or 'no suffix' for file in others)
    listed = errors.some([f'{count} with {kind}' for kind, count in kinds.most_common()])
    yield f'{len(others)} files in {split} are left out, {", ".join(_SUFFIXES)} are read: {listed}.'
  deep = [folder for folder in inside if folder.is_dir() and any(map(_is_image, folder.rglob('*')))]
  if deep:
    below = [str(folder.relative_to(split)) for folder in deep]
    yield f'Images in folders below those of the labels are left out: {errors.some(below)}.'
  loose = [file.name for file in split.iterdir() if _is_image(file)]
  if loose:
    yield f'{len(loose)} images in {split} stand in no label folder and are left out: {errors.some(sorted(loose))}.'


def _folders(path: pathlib.Path) -> list[pathlib.Path]:
  found = [entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith('.')]
  return [entry for entry in found if entry.name not in _NO_CLASSES]


def _is_image(file: pathlib.Path) -> bool:
  return file.suffix.lower() in _SUFFIXES and not file.name.startswith('.') and file.is_file()


def _decode(file: pathlib.Path) -> np.ndarray:
  """Returns the pixels of an image file, [H, W, 1 or 3], uint8 or uint16."""
  import PIL.Image
  import PIL.ImageOps

  try:
    with warnings.catch_warnings():
      warnings.simplefilter('ignore')  # PIL warns of unusual but readable files
      with PIL.Image.open(file) as image:
        if image.width * image.height > _MOST_PIXELS:
          raise errors.UsageError(f'it has {image.width}×{image.height} pixels, expected at most {_MOST_PIXELS:,}')
        image = PIL.ImageOps.exif_transpose(image)
        pixels = np.asarray(image if image.mode.startswith('I') else _flatten(image))
  except Exception as error:  # PIL does not document which exceptions its decoders raise
    raise errors.UsageError(f'cannot read the image {file}: {error or type(error).__name__}') from error
  if pixels.dtype != np.uint8:  # 16-bit grey, in the file's byte order or widened to 32 bits
    pixels = np.clip(pixels, 0, 65535).astype(np.uint16)
  return pixels.reshape(*pixels.shape[:2], -1)


def _flatten(image: 'PIL.Image.Image') -> 'PIL.Image.Image':
  """Returns a PIL image as grey (L) or RGB, with transparent pixels on white."""
  import PIL.Image

  mode = 'L' if image.mode in ('1', 'L', 'LA', 'La') else 'RGB'
  if image.has_transparency_data:
    white = PIL.Image.new('RGBA', image.size, 'white')
    image = PIL.Image.alpha_composite(white, image.convert('RGBA'))
  return image.convert(mode)
