"""PyTorch's weight files as variables of our residual networks, without PyTorch and without running what they hold.

A file of `torch.save` is a pickle, and a pickle may call anything. The unpickler here knows dictionaries and tensors,
and refuses the rest.
"""

import collections
import json
import math
import pickle
import re
import zipfile
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gradleak import errors, trees

_STORAGES = {
  'DoubleStorage': np.float64,
  'FloatStorage': np.float32,
  'HalfStorage': np.float16,
  'BFloat16Storage': jnp.bfloat16,
  'LongStorage': np.int64,
  'IntStorage': np.int32,
  'ShortStorage': np.int16,
  'CharStorage': np.int8,
  'ByteStorage': np.uint8,
  'BoolStorage': np.bool_,
}
_SAFETENSORS = {
  'F64': np.float64,
  'F32': np.float32,
  'F16': np.float16,
  'BF16': jnp.bfloat16,
  'I64': np.int64,
  'I32': np.int32,
  'I16': np.int16,
  'I8': np.int8,
  'U8': np.uint8,
  'BOOL': np.bool_,
}
_LEGACY = pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2)  # how files of PyTorch before 1.6 begin


def load(path, model, image_shape):
  """Returns the variables of `model`, a `resnet18` or `resnet20` of any width, with the weights in a file.

  The file's names are those that the published networks share: `conv1`, `bn1`, `layer1.0.conv1`, …,
  `layer2.0.shortcut.0` or `layer2.0.downsample.0`, `linear` or `fc`; a common prefix `module.` and
  `num_batches_tracked` are left out. Convolutions [out, in, row, column] become [out, column·row·in], and dense weights
  are transposed.

  Args:
    path: a file as `read` takes it.
    model: a `Model` made by `gradleak.models.create`. Its normalisation is the caller's to choose: weights work only
      with that of their training.
    image_shape: (H, W, C).

  Raises:
    UsageError: for what `read` refuses, for another model, and for entries that are missing, left over or of another
      shape; all of them are named.
  """
  shapes = jax.eval_shape(lambda key: model.init(key, image_shape), jax.random.key(0))
  if 'layer1_0' not in shapes['params']:
    raise errors.UsageError(f'weights of PyTorch go into resnet18 and resnet20, and the model is {model.name!r}')
  entries = _common_names(read(path))
  places = {_torch_name(trees.path_names(place)[1:]): leaf for place, leaf in jax.tree.leaves_with_path(shapes)}
  ours = {name: _our_layout(values) for name, values in entries.items()}
  faults = {
    'missing': [name for name in places if name not in entries],
    'without a place in the model': [name for name in entries if name not in places],
    'of another shape': [
      f'{name} {entries[name].shape} where the model has {leaf.shape}'
      for name, leaf in places.items()
      if name in entries and ours[name].shape != leaf.shape
    ],
  }
  if any(faults.values()):
    listed = '; '.join(f'{kind}: {_some(names)}' for kind, names in faults.items() if names)
    raise errors.UsageError(f'the weights in {str(path)!r} do not fit {model.name!r}: {listed}')
  return jax.tree.unflatten(
    jax.tree.structure(shapes), [jnp.asarray(ours[name], leaf.dtype) for name, leaf in places.items()]
  )


def read(path):
  """Returns the arrays in a weight file by name, in PyTorch's layout.

  Args:
    path: a file of `torch.save` (either format) that holds a `state_dict`, alone or as the one entry of its kind in a
      dictionary; a `.safetensors` file; or an `.npz`. The content decides, not the suffix.

  Raises:
    UsageError: for a file that cannot be read, is none of these, or holds anything but tensors and plain values.
  """
  try:
    with open(path, 'rb') as file:
      head = file.read(16)
      file.seek(0)
      if head.startswith(b'PK'):
        content = _read_zip(file)
      elif head.startswith(_LEGACY):
        content = _read_legacy(file)
      elif head[8:9] == b'{':
        content = _read_safetensors(file)
      else:
        raise errors.UsageError('it is no file of torch.save, no .safetensors and no .npz')
    return _state_dict(content)
  except Exception as error:  # a damaged pickle raises whatever its bytes happen to spell
    reason = str(error) if isinstance(error, errors.UsageError) else f'{type(error).__name__}: {error}'
    raise errors.UsageError(f'cannot read the weights in {str(path)!r}: {reason}') from error


class _Storage:
  """The flat values that tensors are views of; they stand behind the pickle that names them."""

  def __init__(self, dtype, count):
    self.dtype, self.count, self.values = np.dtype(dtype), count, None

  def fill(self, data):
    self.values = np.frombuffer(data, self.dtype, self.count)


class _Tensor(NamedTuple):
  storage: _Storage
  offset: int
  shape: tuple
  stride: tuple

  def array(self):
    values, offset = self.storage.values, self.offset
    last = offset + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
    if min((offset, *self.stride)) < 0 or (math.prod(self.shape) and last >= values.size):
      raise errors.UsageError('a tensor reaches beyond its storage')
    steps = [step * values.itemsize for step in self.stride]
    return np.lib.stride_tricks.as_strided(values[offset:], self.shape, steps).copy()


def _rebuild_tensor(storage, offset, shape, stride, *rest):
  del rest  # whether it asks for a gradient, and hooks
  return _Tensor(storage, offset, shape, stride)


_KNOWN = {
  ('collections', 'OrderedDict'): collections.OrderedDict,
  ('torch._utils', '_rebuild_tensor'): _rebuild_tensor,
  ('torch._utils', '_rebuild_tensor_v2'): _rebuild_tensor,
  ('torch._utils', '_rebuild_parameter'): lambda tensor, *rest: tensor,
  **{('torch', name): dtype for name, dtype in _STORAGES.items()},
}


class _Unpickler(pickle.Unpickler):
  """Builds dictionaries and tensors, and collects the storages to fill, by key."""

  def __init__(self, file):
    super().__init__(file, encoding='latin1')
    self.storages = {}

  def find_class(self, module, name):
    if (module, name) not in _KNOWN:
      raise errors.UsageError(
        f'it holds an object {module}.{name}, and only tensors are read: save the state_dict() of the network'
      )
    return _KNOWN[module, name]

  def persistent_load(self, entry):
    _, dtype, key, _, count, *_ = entry
    return self.storages.setdefault(key, _Storage(dtype, count))


def _read_zip(file):
  with zipfile.ZipFile(file) as archive:
    pickles = [name for name in archive.namelist() if name.endswith('/data.pkl')]
    if not pickles:
      file.seek(0)
      return dict(np.load(file, allow_pickle=False))
    unpickler = _Unpickler(archive.open(pickles[0]))
    content = unpickler.load()
    folder = pickles[0].removesuffix('data.pkl') + 'data/'
    for key, storage in unpickler.storages.items():
      storage.fill(archive.read(folder + key))
  return content


def _read_legacy(file):
  for _ in range(3):  # the magic number, the version, the machine
    _Unpickler(file).load()
  unpickler = _Unpickler(file)
  content = unpickler.load()
  for key in _Unpickler(file).load():
    storage = unpickler.storages[key]
    file.seek(8, 1)  # the count once more
    storage.fill(file.read(storage.count * storage.dtype.itemsize))
  return content


def _read_safetensors(file):
  header = json.loads(file.read(int.from_bytes(file.read(8), 'little')))
  header.pop('__metadata__', None)
  data = file.read()

  def array(dtype, shape, data_offsets):
    return np.frombuffer(data[slice(*data_offsets)], _SAFETENSORS[dtype]).reshape(shape)

  return {name: array(**entry) for name, entry in header.items()}


def _state_dict(content):
  """Returns the arrays of `content`, or of the one dictionary in it that holds nothing but arrays."""

  def is_one(value):
    return isinstance(value, dict) and value and all(isinstance(each, (_Tensor, np.ndarray)) for each in value.values())

  if not is_one(content):
    found = {name: value for name, value in content.items() if is_one(value)} if isinstance(content, dict) else {}
    if len(found) != 1:
      names = f': {", ".join(map(str, found))}' if found else ''
      raise errors.UsageError(f'it holds {len(found)} sets of tensors{names}; save the state_dict() of the network')
    (content,) = found.values()
  return {name: value.array() if isinstance(value, _Tensor) else value for name, value in content.items()}


def _common_names(entries):
  """Returns the entries under the names that `_torch_name` gives."""
  prefix = 'module.' if all(name.startswith('module.') for name in entries) else ''
  names = {name: name.removeprefix(prefix).replace('.downsample.', '.shortcut.') for name in entries}
  return {
    re.sub(r'^fc\.', 'linear.', names[name]): values
    for name, values in entries.items()
    if not name.endswith('.num_batches_tracked')
  }


def _some(names):
  more = f' and {len(names) - 4} more' if len(names) > 4 else ''
  return ', '.join(names[:4]) + more


def _torch_name(path):
  """Returns what published code calls the variable at `path` of a residual network."""
  *modules, leaf = path
  name = re.sub(r'^layer(\d)_(\d)', r'layer\1.\2', '.'.join(modules))
  name = (
    re.sub(r'norm(\d)$', r'bn\1', name).replace('shortcut_conv', 'shortcut.0').replace('shortcut_norm', 'shortcut.1')
  )
  leaves = {'kernel': 'weight', 'scale': 'weight', 'bias': 'bias', 'mean': 'running_mean', 'var': 'running_var'}
  return f'{name}.{leaves[leaf]}'


def _our_layout(values):
  """Returns [out, in, row, column] as [out, column·row·in], [out, in] as [in, out], and the rest as it is."""
  return values.transpose(0, 3, 2, 1).reshape(len(values), -1) if values.ndim == 4 else values.T
