import gzip
import importlib.util
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from gradleak import data
from gradleak.core import errors
from launch import prepare_data
from tests import programs

ROOT = pathlib.Path(prepare_data.__file__).parent.parent
HAS_TENSORFLOW = importlib.util.find_spec('tensorflow') is not None
ARCHIVES = ['train-images-idx3-ubyte.gz', 'train-labels-idx1-ubyte.gz', 't10k-images-idx3-ubyte.gz']


def run(*arguments, program=('-m', 'launch.prepare_data')):
  environment = {**os.environ, 'PYTHONPATH': str(ROOT)}
  return subprocess.run(
    [sys.executable, *program, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
  )


def pretend_tensorflow(monkeypatch, installed):
  """Makes the program believe that TensorFlow is installed or missing."""
  find_spec = importlib.util.find_spec
  pretence = find_spec('json') if installed else None
  monkeypatch.setattr(
    importlib.util, 'find_spec', lambda name, *rest: pretence if name == 'tensorflow' else find_spec(name, *rest)
  )


def write_info(data_dir, name, version):
  folder = data_dir / name / version
  folder.mkdir(parents=True)
  (folder / 'features.json').write_text('{}')
  (folder / 'dataset_info.json').write_text(
    f'{{"fileFormat": "array_record", "name": "{name}", "version": "{version}"}}'
  )
  return folder


@pytest.mark.long
@pytest.mark.parametrize(
  'program',
  [pytest.param(('-m', 'launch.prepare_data'), marks=pytest.mark.slow), ('launch/prepare_data.py',)],
  ids=['-m', 'path'],
)
def test_what_is_there_is_left_alone(tmp_path, program):
  folder = write_info(tmp_path, 'mnist', '3.0.1')
  done = run('--dataset=mnist', f'--data_dir={tmp_path}', program=program)
  assert (done.returncode, done.stderr) == (0, '')
  assert done.stdout == f'mnist is prepared already: {folder}\n'


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    (['--dataset=minst'], "unknown dataset 'minst'; did you mean 'mnist'"),
    (['--datset=mnist'], "Unknown command line flag 'datset'"),
    ([], 'flag --dataset'),
    (['--dataset=mnist', 'cifar10'], "unexpected argument 'cifar10'"),
  ],
)
def test_usage_errors_end_on_one_line_with_status_two(tmp_path, arguments, message):
  done = programs.start('prepare_data', *arguments, f'--data_dir={tmp_path}/new')
  assert done.status == 2
  assert done.err.startswith('error: ')
  assert message in done.err
  assert done.err.count('\n') == 1
  assert not list(tmp_path.iterdir())


@pytest.mark.skipif(
  HAS_TENSORFLOW, reason='TensorFlow is installed; test_missing_tensorflow checks the same in process'
)
def test_missing_tensorflow_ends_with_status_two(tmp_path):
  done = programs.start('prepare_data', '--dataset=mnist', f'--data_dir={tmp_path}')
  assert done.status == 2
  assert done.err == 'error: preparing a dataset needs TensorFlow: pip install tensorflow-cpu\n'


def test_missing_tensorflow(tmp_path, monkeypatch):
  pretend_tensorflow(monkeypatch, installed=False)
  with pytest.raises(errors.UsageError, match=r'needs TensorFlow: pip install tensorflow-cpu'):
    prepare_data.prepare('mnist', tmp_path)
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('name', ['faces', 'folder:/anywhere'])
def test_other_sources_need_no_preparation(tmp_path, capsys, name):
  prepare_data.prepare(name, tmp_path)
  assert capsys.readouterr().out == f'{name} needs no preparation\n'


def test_missing_manual_dir(tmp_path, monkeypatch):
  pretend_tensorflow(monkeypatch, installed=True)
  with pytest.raises(errors.UsageError, match="manual_dir is '/no/such/place', expected a folder"):
    prepare_data.prepare('mnist', tmp_path, '/no/such/place')


def test_missing_archive_is_named_and_nothing_is_left(tmp_path, monkeypatch):
  pretend_tensorflow(monkeypatch, installed=True)
  archives, data_dir = tmp_path / 'archives', tmp_path / 'data'
  archives.mkdir()
  with pytest.raises(errors.UsageError, match=f'no archive .*-ubyte.gz in {archives}; its origin is https?://'):
    prepare_data.prepare('mnist', data_dir, archives)
  assert not list(data_dir.iterdir())


def test_archives_of_another_dataset_are_refused(tmp_path, monkeypatch):
  # Fashion-MNIST's archives have MNIST's names: only the checksum tells them apart.
  pretend_tensorflow(monkeypatch, installed=True)
  archives, data_dir = tmp_path / 'archives', tmp_path / 'data'
  archives.mkdir()
  for name in [*ARCHIVES, 't10k-labels-idx1-ubyte.gz']:
    (archives / name).write_bytes(gzip.compress(b'other data'))
  with pytest.raises(errors.UsageError, match=r'cannot prepare fashion_mnist: .* has wrong checksum'):
    prepare_data.prepare('fashion_mnist', data_dir, archives)
  assert not list(data_dir.iterdir())


def test_data_dir_that_cannot_be_made(tmp_path, monkeypatch):
  pretend_tensorflow(monkeypatch, installed=True)
  (tmp_path / 'file').write_text('')
  with pytest.raises(errors.UsageError, match=r'cannot prepare mnist: .*file'):
    prepare_data.prepare('mnist', tmp_path / 'file' / 'data')


@pytest.mark.slow
def test_prepared_mnist_is_what_the_archives_hold(tmp_path):
  real = os.environ.get('GRADLEAK_TEST_DATA')
  if not real:
    pytest.skip('needs real data: set GRADLEAK_TEST_DATA to a folder that holds raw/mnist/')
  if not HAS_TENSORFLOW:
    pytest.skip('needs TensorFlow: pip install tensorflow-cpu')
  archives = pathlib.Path(real) / 'raw' / 'mnist'
  # What an earlier preparation of another dataset with archives of the same names would have left behind.
  for name in ARCHIVES:
    stale = tmp_path / 'downloads' / 'extracted' / f'GZIP.{name}'
    stale.parent.mkdir(parents=True, exist_ok=True)
    stale.write_bytes(b'another dataset')
  done = run('--dataset=mnist', f'--data_dir={tmp_path}', f'--manual_dir={archives}')
  assert done.returncode == 0, done.stderr
  for split, prefix in (('train', 'train'), ('test', 't10k')):
    dataset = data.load('mnist', split, data_dir=tmp_path)
    images = np.frombuffer(
      gzip.decompress((archives / f'{prefix}-images-idx3-ubyte.gz').read_bytes()), np.uint8, -1, 16
    )
    labels = np.frombuffer(gzip.decompress((archives / f'{prefix}-labels-idx1-ubyte.gz').read_bytes()), np.uint8, -1, 8)
    pixels = np.rint(dataset.samples * 255).astype(np.uint8)
    # TFDS shuffles, so the examples are compared as a multiset.
    found = sorted(image.tobytes() + bytes([label]) for image, label in zip(pixels, dataset.targets, strict=True))
    assert found == sorted(
      image.tobytes() + bytes([label]) for image, label in zip(images.reshape(-1, 784), labels, strict=True)
    )
