"""Flags on data: none is taken without an effect, and each reaches what reads the samples."""

import pathlib
import shutil
import types
from unittest import mock

import numpy as np
import PIL.Image
import pytest
from absl import flags as absl_flags

import gradleak as gl
from gradleak import data
from launch import _flags
from tests import programs


@pytest.fixture
def images(tmp_path):
  """A folder of eight coloured images per split, half of them of another side."""
  for split in ('train', 'test'):
    for number in range(8):
      folder = tmp_path / 'images' / split / 'ab'[number // 2 % 2]
      folder.mkdir(parents=True, exist_ok=True)
      side = 8 + number % 2
      pixels = np.random.default_rng(number).integers(0, 255, (side, side, 3), dtype=np.uint8)
      PIL.Image.fromarray(pixels).save(folder / f'{number}.png')
  return f'folder:{tmp_path}/images'


@pytest.mark.parametrize(
  'program', ['audit', 'autoleak', 'borders', 'epsilon', 'identify', 'sensitivity', 'sweep', 'train', 'train_prior']
)
def test_a_folder_of_prepared_data_is_refused_beside_other_data(program, tmp_path):
  for dataset in ('digits', 'breast_cancer', 'notes', 'folder:here', 'table:here.csv', 'text:here.txt'):
    done = programs.start(program, f'--dataset={dataset}', f'--data_dir={tmp_path}', '--progress=none')
    assert done.status == 2
    assert done.err == (
      f'error: --data_dir is the folder of prepared TFDS datasets, and {dataset!r} is read elsewhere: leave it out\n'
    )


def test_the_benchmark_refuses_it(tmp_path):
  done = programs.start('benchmark', f'--data_dir={tmp_path}')
  assert done.status == 2 and '--data_dir is the folder of prepared TFDS datasets' in done.err


def test_what_tfds_has_is_read_from_the_folder():
  assert all(map(data.is_tfds, ('mnist', 'emnist/letters', 'cifar10:3.0.2')))


@pytest.mark.parametrize('program', ['borders', 'train_prior'])
def test_programs_for_images_take_all_flags_of_reading_them(program):
  assert {*_flags.IMAGE_OPTIONS} <= {*programs._load(program)[0]._GIVEN.defined()}


def test_a_captured_update_of_images_takes_the_flags_that_make_them_alike(images, tmp_path):
  flags = f'--dataset={images}', f'--update={tmp_path}/no.npz', f'--weights={tmp_path}/no.npz', '--progress=none'
  done = programs.start('attack', *flags)
  assert done.status == 2 and 'pass image_size (--image_size) to make them alike' in done.err
  done = programs.start('attack', *flags, '--image_size=8')
  assert done.status == 2 and f"cannot read the weights in '{tmp_path}/no.npz'" in done.err
  done = programs.start('attack', *flags[1:], '--image_size=8', '--sample_shape=8,8,3')
  assert done.status == 2 and '--image_size is for --dataset, which is missing' in done.err


@pytest.mark.parametrize('program', ['borders', 'train_prior'])
def test_programs_for_images_refuse_others(program):
  done = programs.start(program, '--dataset=breast_cancer', '--progress=none')
  assert done.status == 2 and 'this program is for images, and breast_cancer holds others' in done.err


def test_a_prior_is_trained_on_the_images_that_the_flags_ask_for(images, monkeypatch):
  asked = mock.Mock(side_effect=gl.UsageError('it trains'))
  monkeypatch.setattr('gradleak.priors.training.train', asked)
  done = programs.start('train_prior', f'--dataset={images}', '--image_size=6', '--channels=1', '--progress=none')
  assert done.status == 2 and 'it trains' in done.err
  assert asked.call_args.args[2].shape == (8, 6, 6, 1)


def test_borders_are_drawn_of_the_images_that_the_flags_ask_for(images, monkeypatch):
  asked = mock.Mock(side_effect=gl.UsageError('it attacks'))
  monkeypatch.setattr(gl, 'audit', asked)
  flags = '--trials=2', '--image_size=8', '--channels=1', '--progress=none'
  done = programs.start('borders', f'--dataset={images}', *flags)
  assert done.status == 2 and 'it attacks' in done.err
  assert asked.call_args.args[1].samples.shape == (2, 8, 8, 1)


def test_fewer_public_samples_than_by_default_are_all_taken(images):
  module, flags = programs._load('autoleak')
  with mock.patch.object(absl_flags, 'FLAGS', flags):
    flags(['autoleak', f'--dataset={images}', '--trials=2', '--image_size=8', '--progress=none'])
    _, public = module._audited.load(module._GIVEN)
    repeated = module._command(mock.Mock(public=public, settings={}))
    flags(['autoleak', '--public=9'])
    with pytest.raises(gl.UsageError, match='9 images are asked for'):
      module._audited.load(module._GIVEN)
    flags.unparse_flags()
  assert len(public[0]) == repeated['public'] == 8


def test_public_samples_that_are_not_there_are_not_left_out_in_silence(images, capsys):
  shutil.rmtree(pathlib.Path(images.removeprefix('folder:')) / 'train')
  module, flags = programs._load('autoleak')
  with mock.patch.object(absl_flags, 'FLAGS', flags):
    flags(['autoleak', f'--dataset={images}', '--trials=2', '--image_size=8'])
    _, public = module._audited.load(module._GIVEN)
    flags.unparse_flags()
  assert public is None and 'note: there are no public samples: unknown split' in capsys.readouterr().err


def test_a_sensitivity_needs_no_public_samples_unless_they_are_asked_for(images, monkeypatch):
  shutil.rmtree(pathlib.Path(images.removeprefix('folder:')) / 'train')
  asked = mock.Mock(side_effect=gl.UsageError('it attacks'))
  monkeypatch.setattr(gl, 'sensitivity', asked)
  flags = f'--dataset={images}', '--image_size=8', '--model=mlp(widths=2)'
  done = programs.start('sensitivity', *flags)
  assert done.status == 2 and 'it attacks' in done.err and 'note: there are no public samples: unknown' in done.err
  assert asked.call_args.args[1].public is None
  done = programs.start('sensitivity', *flags, '--public=2')
  assert done.status == 2 and 'unknown split' in done.err and 'it attacks' not in done.err


def test_a_training_keeps_half_of_few_samples_private(images, monkeypatch):
  asked = mock.Mock(side_effect=gl.UsageError('it trains'))
  monkeypatch.setattr(gl, 'frontier', asked)
  flags = f'--dataset={images}', '--image_size=8', '--model=mlp(widths=2)', '--clients=2', '--per_round=2'
  done = programs.start('train', *flags)
  assert done.status == 2 and 'it trains' in done.err
  assert [len(asked.call_args.args[1].samples), len(asked.call_args.args[1].public[0])] == [4, 4]
  done = programs.start('train', *flags, '--public=8')
  assert done.status == 2 and 'public is 8' in done.err and 'nearest valid value is 7' in done.err


def test_more_public_samples_than_there_are_train_no_model_in_silence(images):
  done = programs.start('sensitivity', f'--dataset={images}', '--image_size=8', '--public=9', '--progress=none')
  assert done.status == 2
  assert '9 public samples are asked for' in done.err and 'has 8' in done.err


@pytest.mark.parametrize(
  ('given', 'described'),
  [
    (
      {'init': 'default', 'torch_model': 'mine:Net'},
      {'init': 'mine:Net'},
    ),  # of gradleak sensitivity, without --weights
    ({'init': 'default', 'torch_model': None}, {'init': 'default'}),
    ({'init': 'explicit', 'weights': ''}, {'init': 'explicit'}),
    ({'init': 'explicit', 'weights': 'folder/w.npz'}, {'weights': 'w.npz'}),
  ],
)
def test_it_is_described_where_weights_are_from(given, described):
  class Given(types.SimpleNamespace):
    def __contains__(self, name):
      return hasattr(self, name)

  assert _flags.Flags.weights_described(Given(**given)) == described
