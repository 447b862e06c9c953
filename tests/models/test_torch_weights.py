"""PyTorch's weight files: every format written by hand, what is refused, and published weights if available."""

import io
import json
import pickle
import struct
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradleak as gl
from gradleak import models
from gradleak.core import errors, trees
from gradleak.models import resnet, torch_weights
from gradleak.models.model import from_flax


def small(norm='batch', num_classes=3):
  """Returns a residual network of two blocks, the second with a projection."""
  return from_flax(resnet.ResNet(num_classes, 'default', 'patches', 2, norm, (1, 1), True), 'small')


@pytest.fixture(scope='module')
def entries():
  """Returns the entries of a file for `small` on grey images, each value different from all others."""
  widths = {'': (1, 2), 'layer1.0.': (2, 2), 'layer2.0.': (2, 4)}
  found = {}

  def norm(name, channels):
    parts = ('weight', 'bias', 'running_mean', 'running_var')
    found.update({f'{name}.{part}': (channels,) for part in parts} | {f'{name}.num_batches_tracked': ()})

  for place, (inputs, outputs) in widths.items():
    found[f'{place}conv1.weight'] = (outputs, inputs, 3, 3)
    norm(f'{place}bn1', outputs)
    if place:
      found[f'{place}conv2.weight'] = (outputs, outputs, 3, 3)
      norm(f'{place}bn2', outputs)
  found['layer2.0.shortcut.0.weight'] = (4, 2, 1, 1)
  norm('layer2.0.shortcut.1', 4)
  found |= {'linear.weight': (3, 4), 'linear.bias': (3,)}
  start, values = 1, {}
  for name, shape in found.items():
    size = int(np.prod(shape))
    dtype = np.int64 if name.endswith('tracked') else np.float32
    values[name] = np.arange(start, start + size, dtype=dtype).reshape(shape)
    start += size
  return values


# A pickle written by hand, as PyTorch writes one: opcodes of protocol 2 (https://docs.python.org/3/library/pickletools.html).


def word(text):
  return b'X' + struct.pack('<I', len(text.encode())) + text.encode()


def number(value):
  return b'J' + struct.pack('<i', value)


def group(*parts):
  return b'(' + b''.join(parts) + b't'


def called(module, name, *arguments):
  return f'c{module}\n{name}\n'.encode() + group(*arguments) + b'R'


def dictionary(items):
  return b'}(' + b''.join(word(name) + value for name, value in items.items()) + b'u'


def view(storage, count, key, offset, shape, stride, legacy=False, function='_rebuild_tensor_v2', more=()):
  """Returns the pickle of a tensor that views `count` values of the storage called `key`; `more` are last arguments."""
  extra = [b'N'] if legacy else []
  kind = f'c{"torch.storage" if storage == "UntypedStorage" else "torch"}\n{storage}\n'.encode()
  entry = group(word('storage'), kind, word(key), word('cpu'), number(count), *extra) + b'Q'
  sizes = [group(*map(number, sizes)) for sizes in (shape, stride)]
  hooks = called('collections', 'OrderedDict')
  return called('torch._utils', function, entry, number(offset), *sizes, b'\x89', hooks, *more)


def tensors(arrays, legacy=False):
  """Returns (the pickles of contiguous tensors by name, the bytes of their storages by key)."""
  kinds = {'float32': 'FloatStorage', 'int64': 'LongStorage'}
  pickles, storages = {}, {}
  for key, (name, array) in enumerate(arrays.items()):
    stride = [step // array.itemsize for step in array.strides]
    pickles[name] = view(kinds[str(array.dtype)], array.size, str(key), 0, array.shape, stride, legacy)
    storages[str(key)] = array.tobytes()
  return pickles, storages


def zipped(content, storages):
  """Returns a file of `torch.save` as it is since PyTorch 1.6."""
  file = io.BytesIO()
  with zipfile.ZipFile(file, 'w') as archive:
    archive.writestr('archive/data.pkl', b'\x80\x02' + content + b'.')
    archive.writestr('archive/byteorder', 'little')
    for key, data in storages.items():
      archive.writestr(f'archive/data/{key}', data)
    archive.writestr('archive/version', '3\n')
  return file.getvalue()


def legacy(content, storages, counts):
  """Returns a file of `torch.save` as it was before."""
  machine = {'protocol_version': 1001, 'little_endian': True, 'type_sizes': {'short': 2, 'int': 4, 'long': 4}}
  head = b''.join(pickle.dumps(each, protocol=2) for each in (0x1950A86A20F9469CFC6C, 1001, machine))
  keys = sorted(storages, reverse=True)
  data = b''.join(struct.pack('<q', counts[key]) + storages[key] for key in keys)
  return head + b'\x80\x02' + content + b'.' + pickle.dumps(keys, protocol=2) + data


def safetensors(arrays):
  header, data = {'__metadata__': {'format': 'pt'}}, b''
  kinds = {'float32': 'F32', 'int64': 'I64', 'float16': 'F16', 'bfloat16': 'BF16'}
  for name, array in arrays.items():
    offsets = [len(data), len(data) + array.nbytes]
    header[name] = {'dtype': kinds[str(array.dtype)], 'shape': array.shape, 'data_offsets': offsets}
    data += array.tobytes()
  header = json.dumps(header).encode()
  return struct.pack('<Q', len(header)) + header + data


def written(kind, arrays, tmp_path):
  """Writes `arrays` as a file of that kind and returns its path."""
  path = tmp_path / 'weights.bin'
  if kind == 'npz':
    with open(path, 'wb') as file:
      np.savez(file, **arrays)
  elif kind == 'safetensors':
    path.write_bytes(safetensors(arrays))
  elif kind == 'legacy':
    pickles, storages = tensors(arrays, legacy=True)
    counts = {str(key): array.size for key, array in enumerate(arrays.values())}
    path.write_bytes(legacy(dictionary(pickles), storages, counts))
  else:
    pickles, storages = tensors(arrays)
    path.write_bytes(zipped(dictionary(pickles), storages))
  return path


@pytest.mark.parametrize('kind', ['npz', 'safetensors', 'legacy', 'zip'])
def test_every_format_holds_the_same_arrays(kind, entries, tmp_path):
  found = torch_weights.read(written(kind, entries, tmp_path))
  assert list(found) == list(entries)
  for name, array in entries.items():
    assert found[name].dtype == array.dtype
    np.testing.assert_array_equal(found[name], array, err_msg=name)


def test_a_tensor_may_be_a_transposed_part_of_a_shared_storage(tmp_path):
  values = np.arange(10, dtype=np.float32)
  content = dictionary(
    {
      'part': view('FloatStorage', 10, '0', 2, (3, 2), (1, 3)),
      'all': called('torch._utils', '_rebuild_parameter', view('FloatStorage', 10, '0', 0, (10,), (1,)), b'\x88', b'N'),
      'empty': view('FloatStorage', 10, '0', 10, (0, 2), (2, 1)),
      'half': view('HalfStorage', 1, '1', 0, (), ()),
      'brain': view('BFloat16Storage', 1, '2', 0, (1,), (1,)),
    }
  )
  storages = {'0': values.tobytes(), '1': np.float16(0.5).tobytes(), '2': jnp.bfloat16(-3).tobytes()}
  path = tmp_path / 'weights.pt'
  path.write_bytes(zipped(content, storages))
  found = torch_weights.read(path)
  np.testing.assert_array_equal(found['part'], values[2:8].reshape(2, 3).T)
  np.testing.assert_array_equal(found['all'], values)
  assert found['empty'].shape == (0, 2)
  assert found['half'] == 0.5 and found['half'].shape == ()
  assert found['brain'].tolist() == [-3]


@pytest.mark.parametrize('name', ['float8_e4m3fn', 'float8_e5m2'])
def test_short_floats_in_a_storage_of_bytes(name, tmp_path):
  values = jnp.asarray([0.25, -2, 1.5, 8], getattr(jnp, name))
  kind = {'function': '_rebuild_tensor_v3', 'more': [f'ctorch\n{name}\n'.encode()]}
  path, storages = tmp_path / 'weights.pt', {'0': np.asarray(values).tobytes()}
  path.write_bytes(zipped(dictionary({'w': view('UntypedStorage', 4, '0', 1, (3,), (1,), **kind)}), storages))
  found = torch_weights.read(path)['w']
  assert found.dtype == values.dtype and found.tolist() == [-2, 1.5, 8]
  path.write_bytes(zipped(dictionary({'w': view('HalfStorage', 2, '0', 0, (2,), (1,), **kind)}), storages))
  with pytest.raises(errors.UsageError, match=rf'has the type .*{name}.* in a storage of another one'):
    torch_weights.read(path)


def test_a_file_with_more_than_is_read_is_not_called_damaged(tmp_path, monkeypatch):
  path = written('safetensors', {'w': np.zeros(100, np.float32)}, tmp_path)
  monkeypatch.setattr(torch_weights, '_MOST_BYTES', 300)
  with pytest.raises(errors.UsageError, match='its arrays take more than 300 bytes'):
    torch_weights.read(path)


def test_a_checkpoint_may_hold_its_weights_beside_plain_values(tmp_path):
  pickles, storages = tensors({'w': np.float32([1, 2])})
  path = tmp_path / 'checkpoint.pt'
  path.write_bytes(zipped(dictionary({'epoch': number(3), 'state_dict': dictionary(pickles)}), storages))
  np.testing.assert_array_equal(torch_weights.read(path)['w'], [1, 2])
  path.write_bytes(zipped(dictionary({**pickles, 'frozen': b'N'}), storages))  # the `grad` of no gradient
  assert list(torch_weights.read(path)) == ['w']
  both = {'model': dictionary(pickles), 'average': dictionary(pickles)}
  path.write_bytes(zipped(dictionary(both), storages))
  with pytest.raises(errors.UsageError, match='2 sets of tensors: model, average'):
    torch_weights.read(path)


@pytest.mark.parametrize(
  ('content', 'words'),
  [
    (None, 'No such file'),
    (b'', 'no file of torch.save, no .safetensors and no .npz'),
    (b'\x89PNG and so on', 'no file of torch.save'),
    (zipped(b'}', {}), '0 sets of tensors'),
    (zipped(b'}', {})[:-30], 'BadZipFile'),
    (
      zipped(dictionary({'w': view('FloatStorage', 1, '0', 0, (1,), (1,)), 'epoch': number(3)}), {'0': bytes(4)}),
      'beside tensors it holds epoch, which is none: save the tensors alone',
    ),
    (
      zipped(
        dictionary({'w': view('FloatStorage', 1, '0', 0, (1,), (1,), more=[dictionary({'neg': b'\x88'})])}),
        {'0': bytes(4)},
      ),
      r"has {'neg': True}, as a view by conj\(\) has",
    ),
    (zipped(dictionary({'w': view('FloatStorage', 9, '0', 0, (9,), (1,))}), {'0': bytes(8)}), 'ValueError'),
    (zipped(b'}(X', {}), 'UnpicklingError|EOFError'),
    (zipped(dictionary({'w': view('FloatStorage', 10, '0', 0, (11,), (1,))}), {'0': bytes(40)}), 'beyond its storage'),
    (zipped(called('os', 'mkdir', word('a')), {}), 'object os.mkdir, and only tensors are read: save the state_dict'),
    (zipped(b'cmine\nNet\n)\x81', {}), r'NEWOBJ None, and only tensors are read: save the state_dict\(\)'),
    (zipped(called('builtins', 'getattr', word('a'), word('b')), {}), 'builtins.getattr'),
    (struct.pack('<Q', 9) + b'{"w": 1}}', 'JSONDecodeError'),
  ],
)
def test_a_file_that_cannot_be_read_is_named(content, words, tmp_path):
  path = tmp_path / 'other.bin'
  if content is not None:
    path.write_bytes(content)
  with pytest.raises(errors.UsageError, match=f"cannot read the weights in .*other.bin'.*({words})"):
    torch_weights.read(path)


@pytest.mark.parametrize(
  'rename',
  [
    lambda name: name,
    lambda name: name.replace('linear', 'fc').replace('shortcut', 'downsample'),
    lambda name: f'module.{name}',
  ],
  ids=['as published for CIFAR', 'as in torchvision', 'as under DataParallel'],
)
def test_every_entry_is_put_at_its_path(rename, entries, tmp_path):
  named = {rename(name): values for name, values in entries.items()}
  model = small()
  variables = torch_weights.load(written('npz', named, tmp_path), model, (8, 8, 1))
  expected = jax.eval_shape(lambda key: model.init(key, (8, 8, 1)), jax.random.key(0))
  assert jax.tree.structure(variables) == jax.tree.structure(expected)
  assert jax.tree.map(lambda a: (a.shape, a.dtype), variables) == jax.tree.map(lambda a: (a.shape, a.dtype), expected)
  params, stats = variables['params'], variables['batch_stats']
  for place, theirs in ((('conv1',), 'conv1'), (('layer2_0', 'shortcut_conv'), 'layer2.0.shortcut.0')):
    ours, theirs = params, entries[f'{theirs}.weight']
    for key in place:
      ours = ours[key]
    ours = np.asarray(ours['kernel']).reshape(len(theirs), *theirs.shape[2:], theirs.shape[1])
    for out, inside, row, column in np.ndindex(theirs.shape):
      assert ours[out, column, row, inside] == theirs[out, inside, row, column]
  np.testing.assert_array_equal(params['linear']['kernel'], entries['linear.weight'].T)
  np.testing.assert_array_equal(params['linear']['bias'], entries['linear.bias'])
  np.testing.assert_array_equal(params['layer2_0']['shortcut_norm']['scale'], entries['layer2.0.shortcut.1.weight'])
  np.testing.assert_array_equal(params['layer1_0']['norm2']['bias'], entries['layer1.0.bn2.bias'])
  np.testing.assert_array_equal(stats['layer2_0']['norm1']['mean'], entries['layer2.0.bn1.running_mean'])
  np.testing.assert_array_equal(stats['norm1']['var'], entries['bn1.running_var'])


def test_group_norm_takes_the_same_names_without_statistics(entries, tmp_path):
  without = {name: values for name, values in entries.items() if 'running' not in name and 'tracked' not in name}
  variables = torch_weights.load(written('npz', without, tmp_path), small('group'), (8, 8, 1))
  np.testing.assert_array_equal(variables['params']['norm1']['scale'], entries['bn1.weight'])


def test_weights_that_do_not_fit_are_named(entries, tmp_path):
  def message(arrays, model, sample_shape=(8, 8, 1)):
    with pytest.raises(errors.UsageError) as caught:
      torch_weights.load(written('npz', arrays, tmp_path), model, sample_shape)
    return str(caught.value)

  fewer = {name: values for name, values in entries.items() if name != 'layer1.0.conv2.weight'}
  assert message(fewer, small()).endswith("weights.bin' do not fit 'small': missing: layer1.0.conv2.weight")
  more = {**entries, 'conv9.weight': np.zeros((1, 1, 3, 3), np.float32)}
  assert message(more, small()).endswith('not in the model: conv9.weight')
  assert message(entries, small(), (8, 8, 3)).endswith(
    'of another shape: conv1.weight (2, 1, 3, 3) where the model has (2, 27)'
  )
  classes = message(entries, small(num_classes=5))
  assert 'linear.weight (3, 4) where the model has (4, 5)' in classes and 'linear.bias (3,)' in classes
  assert 'not in the model: bn1.running_mean, ' in message(entries, small('group'))
  other = message({'body.0.weight': np.zeros(2, np.float32)}, small())
  assert other.endswith(f'and {32 - 4} more; not in the model: body.0.weight')
  assert "VGGs and transformers, and the model is 'lenet'" in message(entries, models.create('lenet', 3))


@pytest.mark.slow
def test_published_weights_classify_as_published(published_resnet20):
  """The ResNet-20 of Idelbayev's repository, 91.5 % on the first 1,000 test images of CIFAR-10."""
  path, images, labels = published_resnet20
  model = models.create('resnet20(pixels=imagenet)', 10)
  variables = torch_weights.load(path, model, (32, 32, 3))
  apply = jax.jit(model.apply, static_argnums=2)
  evaluated, trained = (
    np.concatenate([np.argmax(apply(variables, images[i : i + 100], train)[0], 1) for i in range(0, 1000, 100)])
    for train in (False, True)
  )
  accuracy = np.mean(evaluated == labels)
  print(f'{accuracy:.1%} with running statistics, {np.mean(trained == labels):.1%} with those of batches of 100')
  assert abs(accuracy - 0.915) <= 0.002
  assert 0.85 < np.mean(trained == labels) < accuracy


def test_bfloat16_in_an_npz_is_read_and_other_types_are_named(tmp_path):
  """NumPy writes bfloat16 as two bytes without a type."""
  values = jnp.asarray([[1.5, -2.0], [0.25, 3.0]], jnp.bfloat16)
  np.savez(tmp_path / 'weights.npz', w=np.asarray(values))
  found = torch_weights.read(tmp_path / 'weights.npz')['w']
  assert found.dtype == jnp.bfloat16
  np.testing.assert_array_equal(found.astype(np.float32), np.asarray(values, np.float32))
  for other, shown in ((np.array(['a']), '<U1'), (np.zeros(2, complex), 'complex128'), (np.zeros(2, 'V1'), r'\|V1')):
    np.savez(tmp_path / 'weights.npz', w=other)
    with pytest.raises(errors.UsageError, match=f'the array w is {shown}, expected numbers'):
      torch_weights.read(tmp_path / 'weights.npz')
  header = b'{"w":{"dtype":"F4","shape":[2],"data_offsets":[0,2]}}'
  (tmp_path / 'x.safetensors').write_bytes(len(header).to_bytes(8, 'little') + header + b'ab')
  with pytest.raises(errors.UsageError, match="unknown type of an array 'F4'"):
    torch_weights.read(tmp_path / 'x.safetensors')


@pytest.mark.parametrize('value', [np.nan, np.inf, 1e39])
def test_weights_that_are_not_finite_are_refused_by_name(value, tmp_path, small_images):
  model = gl.models.mlp(10, widths=4)
  variables = jax.tree.map(np.array, dict(model.init(jax.random.key(0), (8, 8, 1))))
  entries = {'.'.join(trees.path_names(path)): x for path, x in jax.tree.leaves_with_path(variables['params'])}
  kernel = entries['Dense_0.kernel'].astype(np.float64)
  kernel[1, 2] = value
  np.savez(tmp_path / 'weights.npz', **{**entries, 'Dense_0.kernel': kernel})
  words = r'are not finite: 1 of 256 values of params\.Dense_0\.kernel'
  with pytest.raises(errors.UsageError, match=f'the weights in .* {words}'):
    gl.read_weights(tmp_path / 'weights.npz', model, (8, 8, 1))
  with np.errstate(over='ignore'):
    variables['params']['Dense_0']['kernel'] = kernel.astype(np.float32)
  built = gl.scenario(model, *small_images, key=jax.random.key(0))
  for use in (
    lambda: gl.scenario(model, *small_images, variables=variables),
    lambda: built.trained(variables),
    lambda: built.trained(built.variables, variables),
    lambda: gl.models.agreement(model, variables, small_images[0], np.zeros((8, 10))),
    lambda: gl.inspect(model, variables, (8, 8, 1)),
    lambda: gl.attack(jax.random.key(0), model, variables, built.variables['params'], sample_shape=(8, 8, 1)),
  ):
    with pytest.raises(errors.UsageError, match=words):
      use()


def test_published_weights_that_are_not_finite_are_refused_by_name(entries, tmp_path):
  kernel = entries['conv1.weight'].copy()
  kernel[0, 0, 0, 0] = np.nan
  path = written('npz', {**entries, 'conv1.weight': kernel}, tmp_path)
  with pytest.raises(errors.UsageError, match=r'are not finite: 1 of 18 values of params\.conv1\.kernel'):
    torch_weights.load(path, small(), (8, 8, 1))
