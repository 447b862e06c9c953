"""Prepares a dataset of TensorFlow Datasets, once, so that the other programs read it without TensorFlow.

    python launch/prepare_data.py --dataset=mnist --data_dir=data
    python launch/prepare_data.py --dataset=mnist --data_dir=data --manual_dir=archives   # downloads nothing

Needs TensorFlow: pip install tensorflow-cpu. Writes array_record files, about as large as the archives. Tables and
texts, such as titanic and imdb_reviews, are written as CSV, too; the last line says by which --dataset they are read.
"""

import contextlib
import importlib.util
import pathlib
import tempfile

from absl import flags

from gradleak import data
from gradleak.core import errors
from gradleak.data import tfds, tfds_files
from launch import _program

with _program.group('what is prepared'):
  _DATASET = flags.DEFINE_string('dataset', None, 'TFDS name: mnist, cifar10, emnist/letters, …', required=True)
  _DATA_DIR = flags.DEFINE_string('data_dir', tfds.DEFAULT_DATA_DIR, 'Folder that is to hold the prepared dataset.')
  _MANUAL_DIR = flags.DEFINE_string(
    'manual_dir', None, 'Folder with the original archives, under their original names; nothing is downloaded then.'
  )


def main(_):
  """Prepares the dataset that the flags name, or says that it is there."""
  prepare(_DATASET.value, _DATA_DIR.value, _MANUAL_DIR.value)


def prepare(name, data_dir, manual_dir=None):
  """Writes the TFDS dataset `name` to `data_dir`, from `manual_dir`'s archives or by download; prints what it did.

  Raises:
    UsageError: for an unknown dataset, missing TensorFlow, an archive that is missing or not the original one
      (by TFDS's checksum), a failed download, or a folder that cannot be written.
  """
  if not data.is_tfds(name):
    print(f'{name} needs no preparation')
    return
  with tfds.quiet():
    builder = tfds.builder(name, data_dir)
    is_prepared = builder.is_prepared()
  if is_prepared:
    print(f'{name} is prepared already: {builder.data_dir}')
    _told(name, data_dir)
    return
  if importlib.util.find_spec('tensorflow') is None:
    raise errors.UsageError('preparing a dataset needs TensorFlow: pip install tensorflow-cpu')
  if manual_dir is not None:
    _take_from(builder, _folder(manual_dir))
  try:
    with tfds.quiet():
      _download_and_prepare(builder, manual_dir)
  except errors.UsageError:
    raise
  except Exception as error:  # downloads, archives and disks fail in as many types as there are datasets
    raise errors.UsageError(f'cannot prepare {name}: {tfds.one_line(error)}') from error
  finally:
    for folder in (pathlib.Path(builder.data_dir).parent, pathlib.Path(builder.data_dir_root) / 'downloads'):
      with contextlib.suppress(OSError):  # not empty
        folder.rmdir()
  print(f'prepared {name}: {builder.data_dir}')
  _told(name, data_dir)


def _told(name, data_dir):
  """Writes the file of a table or of texts, and says how it is read."""
  read_as = tfds_files.write(name, data_dir)
  if read_as is not None:
    print(f'read it by --dataset={read_as}')


def _download_and_prepare(builder, manual_dir):
  import tensorflow_datasets

  root = pathlib.Path(builder.data_dir_root)
  root.mkdir(parents=True, exist_ok=True)
  # TFDS reuses what it extracted before from a manual archive of the same name. MNIST's and Fashion-MNIST's archives
  # share their names: one dataset would silently become the other. So each run extracts into a folder of its own.
  with tempfile.TemporaryDirectory(dir=root, prefix='.extracted-') as extracted:
    config = tensorflow_datasets.download.DownloadConfig(
      manual_dir=manual_dir, extract_dir=extracted, try_download_gcs=False
    )
    builder.download_and_prepare(download_config=config)


def _take_from(builder, folder):
  """Makes `builder` fail at once for an archive that `folder` lacks; TFDS would try to download it, for minutes.

  TFDS itself finds archives in `manual_dir`, by the file names that it records for its URLs, and checks their sums.
  """
  make = builder._make_download_manager

  def refuse(resource):
    recorded = builder.url_infos.get(resource.url)
    name = recorded.filename if recorded and recorded.filename else resource.url.rsplit('/', 1)[-1]
    raise errors.UsageError(f'no archive {name} in {folder}; its origin is {resource.url}')

  def make_offline(**kwargs):
    manager = make(**kwargs)
    manager._download = refuse
    return manager

  builder._make_download_manager = make_offline


def _folder(path):
  folder = pathlib.Path(path).expanduser()
  if not folder.is_dir():
    raise errors.UsageError(f'manual_dir is {path!r}, expected a folder with the original archives')
  return folder


if __name__ == '__main__':
  _program.run(main)
