import io
import json
from typing import NamedTuple

import numpy as np
import PIL.Image
import pytest

from gradleak import data
from gradleak.core import errors
from gradleak.data import table_files, tables, text, tfds, tfds_files
from launch import prepare_data


class Prepared(NamedTuple):
  root: object
  grey: np.ndarray  # mnist: 300 training images, then 7 test images
  colour: list  # shapes


def png(pixels):
  file = io.BytesIO()
  PIL.Image.fromarray(pixels).save(file, 'PNG')
  return file.getvalue()


def write(root, path, features, splits):
  """Writes a dataset as TFDS prepares it, but without TensorFlow; `splits` is {split: [{feature: bytes or int}]}."""
  from array_record.python import array_record_module
  from tensorflow_datasets.proto import tf_example_pb2

  folder = root / path
  folder.mkdir(parents=True)
  name, *config, version = path.split('/')
  features.save_config(folder)
  features.save_metadata(folder)
  for split, examples in splits.items():
    file = folder / f'{name}-{split}.array_record-00000-of-00001'
    writer = array_record_module.ArrayRecordWriter(str(file), 'group_size:1')
    for example in examples:
      record = tf_example_pb2.Example()
      for key, value in example.items():
        kind = record.features.feature[key]
        values = value if isinstance(value, list) else [value]
        of = {bytes: kind.bytes_list, float: kind.float_list}.get(type(values[0]), kind.int64_list)
        of.value.extend(values)
      writer.write(record.SerializeToString())
    writer.close()
  info = {'fileFormat': 'array_record', 'name': name, 'version': version, 'configName': ''.join(config)}
  template = '{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}'
  info['splits'] = [
    {'name': split, 'shardLengths': [str(len(examples))], 'numBytes': '1', 'filepathTemplate': template}
    for split, examples in splits.items()
  ]
  (folder / 'dataset_info.json').write_text(json.dumps(info))
  return folder


@pytest.fixture(scope='module')
def prepared(tmp_path_factory):
  """A data_dir with `mnist` (known to TFDS), `shapes/rgb` (unknown to it) and `captions` (no classes)."""
  from tensorflow_datasets import features as kinds

  root = tmp_path_factory.mktemp('tfds')
  rng = np.random.default_rng(0)
  grey = rng.integers(0, 256, (307, 28, 28), dtype=np.uint8)
  colour = [rng.integers(0, 256, (*size, 3), dtype=np.uint8) for size in ((6, 9), (8, 8))]
  image = kinds.Image(shape=(28, 28, 1))
  digits = [{'image': png(pixels), 'label': index % 10} for index, pixels in enumerate(grey)]
  write(
    root,
    'mnist/3.0.1',
    kinds.FeaturesDict({'image': image, 'label': kinds.ClassLabel(num_classes=10)}),
    {'train': digits[:300], 'test': digits[300:]},
  )
  write(
    root,
    'shapes/rgb/1.2.0',
    kinds.FeaturesDict({'photo': kinds.Image(shape=(None, None, 3)), 'kind': kinds.ClassLabel(names=['disc', 'box'])}),
    {'validation': [{'photo': png(pixels), 'kind': 1 - index} for index, pixels in enumerate(colour)]},
  )
  write(
    root,
    'captions/1.0.0',
    kinds.FeaturesDict({'image': image, 'caption': kinds.Text()}),
    {'test': [{'image': png(grey[0]), 'caption': b'noise'}]},
  )
  return Prepared(root, grey, colour)


@pytest.mark.parametrize('name', ['mnist', 'mnist:3.0.1'])
def test_prepared_dataset_is_read_exactly(prepared, name):
  dataset = data.load(name, 'train', data_dir=prepared.root)
  np.testing.assert_array_equal(np.rint(dataset.samples[..., 0] * 255), prepared.grey[:300])
  np.testing.assert_array_equal(dataset.targets, np.arange(300) % 10)
  assert dataset.samples.dtype == np.float32
  assert dataset.targets.dtype == np.int32
  assert dataset.class_names == tuple('0123456789')
  assert len(data.load(name, data_dir=prepared.root).samples) == 7


def test_splits_may_be_slices(prepared):
  dataset = data.load('mnist', 'train[10:20]+test', data_dir=prepared.root, limit=12)
  expected = np.concatenate([prepared.grey[10:20], prepared.grey[300:302]])
  np.testing.assert_array_equal(np.rint(dataset.samples[..., 0] * 255), expected)


def test_features_may_have_other_names(prepared):
  dataset = data.load('shapes/rgb', 'validation', data_dir=prepared.root, limit=1)
  np.testing.assert_array_equal(np.rint(dataset.samples[0] * 255), prepared.colour[0])
  assert dataset.targets.tolist() == [1]
  assert dataset.class_names == ('disc', 'box')


def test_a_folder_is_recognised(tmp_path, monkeypatch):
  (tmp_path / 'flat').mkdir()
  monkeypatch.chdir(tmp_path)
  with pytest.raises(errors.UsageError, match="unknown dataset 'flat'; did you mean 'folder:flat'"):
    data.load('flat', 'test')


def test_differing_sizes_need_image_size(prepared):
  with pytest.raises(errors.UsageError, match='image 0 has 6×9 pixels, image 1 8×8: pass image_size'):
    data.load('shapes/rgb', 'validation', data_dir=prepared.root)
  assert data.load('shapes/rgb', 'validation', data_dir=prepared.root, image_size=8).samples.shape == (2, 8, 8, 3)


@pytest.mark.parametrize(
  ('name', 'split', 'message'),
  [
    ('minst', 'test', r"unknown dataset 'minst'; did you mean 'mnist'\? \(valid: faces, digits, folder:PATH"),
    ('face', 'test', "unknown dataset 'face'; did you mean 'faces'"),
    ('breast_cacner', 'test', 'did you mean .breast_cancer.*tables: breast_cancer, diabetes, table:PATH; texts: notes'),
    ('no good name', 'test', "unknown dataset 'no good name' .*captions, mnist, shapes/rgb"),
    ('mnist:9.9.9', 'test', "TFDS cannot open the dataset 'mnist:9.9.9': .*only: 3.0.1"),
    ('mnist', 'tests', "unknown split of mnist 'tests'; did you mean 'test'. .valid: test, train"),
    ('mnist', 'train[:999]', "cannot read the split 'train.:999.' of mnist .*train, test.*300 examples"),
    ('captions', 'test', 'captions is not for image classification: .* its features are caption, image'),
    (
      'cifar10',
      'test',
      'cifar10 is not prepared in .* .there: captions, mnist, shapes/rgb.; prepare it: '
      'python launch/prepare_data.py --dataset=cifar10 --data_dir=/',
    ),
  ],
)
def test_what_cannot_be_read(prepared, name, split, message):
  with pytest.raises(errors.UsageError, match=message):
    data.load(name, split, data_dir=prepared.root)


def test_limit_beyond_the_data(prepared):
  with pytest.raises(errors.UsageError, match="8 images are asked for, but the split 'test' of mnist has 7"):
    data.load('mnist', data_dir=prepared.root, limit=8)


def test_missing_data_dir():
  with pytest.raises(errors.UsageError, match=r'mnist is not prepared in /no/such/place .there: no such folder'):
    data.load('mnist', data_dir='/no/such/place')


def test_other_file_formats_are_refused(tmp_path):
  folder = tmp_path / 'mnist' / '3.0.1'
  folder.mkdir(parents=True)
  (folder / 'dataset_info.json').write_text('{"fileFormat": "tfrecord", "name": "mnist", "version": "3.0.1"}')
  with pytest.raises(errors.UsageError, match=r'mnist in .* is not in the array_record format .*prepare it again'):
    data.load('mnist', data_dir=tmp_path)


@pytest.mark.parametrize('damage', ['missing', 'empty', 'truncated', 'overwritten'])
def test_damaged_files_are_usage_errors(tmp_path, damage):
  from tensorflow_datasets import features as kinds

  features = kinds.FeaturesDict({'image': kinds.Image(shape=(28, 28, 1)), 'label': kinds.ClassLabel(num_classes=10)})
  noise = np.random.default_rng(0).integers(0, 256, (50, 28, 28), dtype=np.uint8)
  folder = write(tmp_path, 'mnist/3.0.1', features, {'test': [{'image': png(pixels), 'label': 0} for pixels in noise]})
  (file,) = folder.glob('*.array_record*')
  content = file.read_bytes()
  file.unlink()
  if damage != 'missing':
    file.write_bytes(
      {
        'empty': b'',
        'truncated': content[: len(content) // 2],
        'overwritten': content[:9000] + bytes(20000) + content[29000:],
      }[damage]
    )
  with pytest.raises(errors.UsageError, match=r'^cannot read .*mnist'):
    data.load('mnist', data_dir=tmp_path)


def test_negative_labels_are_refused(tmp_path):
  from tensorflow_datasets import features as kinds

  features = kinds.FeaturesDict({'image': kinds.Image(shape=(2, 2, 1)), 'label': kinds.ClassLabel(num_classes=10)})
  write(tmp_path, 'secret/1.0.0', features, {'test': [{'image': png(np.zeros((2, 2), np.uint8)), 'label': -1}]})
  with pytest.raises(errors.UsageError, match="the dataset secret, split 'test': image 0 has the label -1"):
    data.load('secret', data_dir=tmp_path)


def test_mock_data():
  import tensorflow_datasets

  with tensorflow_datasets.testing.mock_data(num_examples=5):
    dataset = data.load('emnist/letters', 'train', limit=3)
  assert dataset.samples.shape == (3, 28, 28, 1)
  assert dataset.num_classes == 37


def test_prepared_lists_what_is_there(prepared, tmp_path):
  assert tfds.prepared(prepared.root) == ['captions', 'mnist', 'shapes/rgb']
  assert tfds.prepared(tmp_path / 'nowhere') == []


def test_real_cifar10(test_data):
  dataset = data.load('cifar10', 'train', data_dir=test_data / 'tfds', limit=5000)
  assert dataset.samples.shape == (5000, 32, 32, 3)
  # The published means of the whole training set.
  np.testing.assert_allclose(dataset.samples.mean((0, 1, 2)), [0.4914, 0.4822, 0.4465], atol=0.01)
  assert np.bincount(dataset.targets).min() > 400


def test_real_fashion_mnist(test_data):
  dataset = data.load('fashion_mnist', data_dir=test_data / 'tfds')
  assert dataset.samples.shape == (10000, 28, 28, 1)
  assert dataset.class_names[0] == 'T-shirt/top'
  np.testing.assert_array_equal(np.bincount(dataset.targets), [1000] * 10)
  assert abs(dataset.samples.mean() - 0.2868) < 1e-3


def tabular(root):
  """Writes a table, `people`, and texts, `reviews`, of which `alone` has one split."""
  from tensorflow_datasets import features as kinds

  people = kinds.FeaturesDict(
    {
      'age': kinds.Scalar(np.float32),
      'ill': kinds.ClassLabel(names=['no', 'yes']),
      'job': kinds.Tensor(shape=(), dtype=np.str_),
      'days': kinds.Tensor(shape=(2,), dtype=np.int64),
    }
  )
  ages = [20.5, 21.5, 22.5, float('nan'), *(24.5 + n for n in range(16))]
  jobs = [b'cook', b'nurse, night'] * 10
  rows = [{'age': ages[n], 'ill': n % 2, 'job': jobs[n], 'days': [n % 5, 7 - n % 3]} for n in range(20)]
  write(root, 'people/1.0.0', people, {'train': rows[:14], 'test': rows[14:]})
  reviews = kinds.FeaturesDict({'label': kinds.ClassLabel(names=['bad', 'good']), 'text': kinds.Text()})
  said = [{'label': n % 2, 'text': f'it, "{n}"; was\nso'.encode()} for n in range(12)]
  write(
    root, 'reviews/1.0.0', reviews, {'train': said[:8], 'test': said[8:], 'unsupervised': [{**said[0], 'label': -1}]}
  )
  write(root, 'alone/v1.plain/1.0.0', reviews, {'train': said})


def test_a_table_is_written_as_a_file_that_is_read(tmp_path, capsys):
  tabular(tmp_path)
  prepare_data.prepare('people', tmp_path)
  assert capsys.readouterr().out.splitlines()[-1] == f'read it by --dataset=table:{tmp_path}/people.csv'
  lines = (tmp_path / 'people.csv').read_text().splitlines()
  assert lines[0] == 'age,days 0,days 1,job,ill' and lines[4] == ',3,7,"nurse, night",yes' and len(lines) == 21
  dataset = data.load(f'table:{tmp_path}/people.csv', 'train')
  assert dataset.class_names == ('no', 'yes') and len(dataset.samples) == 14
  schema = tables.from_json(dataset.settings['schema'])
  assert [field.name for field in schema.fields] == ['age', 'days 0', 'days 1', 'job']


def test_texts_are_written_as_a_file_for_each_split(tmp_path, capsys):
  tabular(tmp_path)
  prepare_data.prepare('reviews', tmp_path)
  assert capsys.readouterr().out.splitlines()[-1] == f'read it by --dataset=text:{tmp_path}/reviews.text'
  assert sorted(file.name for file in (tmp_path / 'reviews.text').iterdir()) == ['test.csv', 'train.csv']
  held = text.read(f'text:{tmp_path}/reviews.text', 'test')
  assert held.class_names == ('bad', 'good') and held.labels.tolist() == [0, 1, 0, 1]
  assert held.read(1) == 'it, "9"; was\nso'
  prepare_data.prepare('alone/v1.plain', tmp_path)
  assert text.read(f'text:{tmp_path}/alone-v1.plain.csv', 'test').size == 2


def test_what_is_no_table_is_refused_and_images_need_no_file(prepared, tmp_path):
  from tensorflow_datasets import features as kinds

  assert tfds_files.write('mnist', prepared.root) is None and not list(prepared.root.glob('*.csv'))
  label, number = kinds.ClassLabel(num_classes=2), kinds.Scalar(np.float32)
  curve = kinds.Tensor(shape=(None, 2), dtype=np.float32)
  for name, features, words in (
    ('curves', {'y': curve, 'label': label}, "'y' of curves is Tensor of shape"),
    ('twice', {'x': number, 'a': label, 'b': label}, 'several classes and none of them is its label: a, b'),
    ('bare', {'x': number}, 'no label among its features x'),
  ):
    write(tmp_path, f'{name}/1.0.0', kinds.FeaturesDict(features), {'train': []})
    with pytest.raises(errors.UsageError, match=words):
      tfds_files.write(name, tmp_path)
  write(
    tmp_path, 'latin/1.0.0', kinds.FeaturesDict({'text': kinds.Text(), 'label': label}),
    {'train': [{'text': b'caf\xe9', 'label': 0}]},
  )  # fmt: skip
  with pytest.raises(errors.UsageError, match='a text is not UTF-8'):
    tfds_files.write('latin', tmp_path)


def test_names_of_what_comes_with_the_package_are_those_that_a_misspelt_name_may_mean():
  assert sorted(tfds._EMBEDDED) == sorted([*data.EMBEDDED, *table_files.EMBEDDED, 'notes'])
