"""Reads PyTorch's weight files as variables of our networks, without PyTorch and without running their code.

A file of `torch.save` is a pickle, and loading a pickle can call any function. The unpickler here accepts dictionaries
and tensors only. What a file claims (lengths, shapes, strides, places in memory) is checked before it is used: a small
file takes little memory.
"""

import collections
import io
import json
import math
import pathlib
import pickle
import pickletools
import re
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gradleak.core import errors, trees
from gradleak.core.trees import Tree
from gradleak.models import token_weights
from gradleak.models.model import Model, check_finite, check_model, check_sample_shape

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
# Types that PyTorch keeps in storages of bytes.
_SHORT = {name: np.dtype(getattr(jnp, name)).type for name in ('float8_e4m3fn', 'float8_e5m2')}
_SAFETENSORS = {
  'F64': np.float64,
  'F32': np.float32,
  'F16': np.float16,
  'BF16': jnp.bfloat16,
  'F8_E4M3': jnp.float8_e4m3fn,
  'F8_E5M2': jnp.float8_e5m2,
  'I64': np.int64,
  'I32': np.int32,
  'I16': np.int16,
  'I8': np.int8,
  'U8': np.uint8,
  'BOOL': np.bool_,
}
PREFIXES = (
  'params.',
  'module.',
  '_module.',
  '_orig_mod.',
  'model.',
  'base_model.',
)  # of Flax, DataParallel, Opacus, compile, wrappers, PEFT
# What torch.save writes, and pickles of plain values.
_OPCODES = """
  PROTO STOP MARK GLOBAL REDUCE BUILD BINPERSID BINPUT LONG_BINPUT BINGET LONG_BINGET EMPTY_DICT SETITEM SETITEMS
  EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1
  BINFLOAT BINUNICODE SHORT_BINUNICODE BINBYTES SHORT_BINBYTES BINSTRING SHORT_BINSTRING FRAME MEMOIZE STACK_GLOBAL
""".split()  # noqa: SIM905
_MOST_BYTES = 2**30  # of all arrays together, and of what a zip archive holds
_LEGACY = pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2)  # how files of PyTorch before 1.6 begin


def load(path: str | pathlib.Path, model: Model, sample_shape: Sequence[int], *, head: jax.Array | None = None) -> Tree:
  """Returns the variables of `model`, a residual network, VGG or transformer, with the weights in a file.

  The entries are named as in published code. Residual networks: `conv1`, `bn1`, `layer1.0.conv1`, …,
  `layer2.0.shortcut.0` or torchvision's `layer2.0.downsample.0`. VGG: torchvision's `features.0`, …. Vision
  transformers: timm's `patch_embed.proj`, `cls_token`, `pos_embed`, `blocks.0.attn.qkv`, …. The last layer is `linear`,
  `fc`, `classifier` or `head`. Networks of tokens have Hugging Face's names: `wte`, `h.0.attn.c_attn`, …,
  and `embeddings.word_embeddings`, `encoder.layer.0.attention.self.query`, …. Their prefixes, and heads that the model
  does not have, are ignored. Common `PREFIXES` and entries `num_batches_tracked` are ignored.
  Convolutions [out, in, row, column] become [out, column·row·in], that of the patches [row·column·in, out], and dense
  weights are transposed.

  Args:
    path: a file in a format of `read`.
    model: a `Model` made by `gradleak.models.create`, with the settings that the weights were trained with: `pixels`,
      and `stem` or `patch`.
    sample_shape: (H, W, C), or (T,) of tokens.
    head: a key, with which the last layer is drawn as `model.init` does; that of the file is ignored. For another
      number of classes, and for torchvision's VGGs, which end in three dense layers.

  Raises:
    UsageError: for what `read` refuses, for another model, for values that are not finite, and for entries that are
      missing, superfluous or of another shape; lists them.
  """
  check_model(model)
  sample_shape = check_sample_shape(sample_shape, model.axes)
  shapes = jax.eval_shape(lambda key: model.init(key, sample_shape), jax.random.key(0))
  if model.first_block is not None and model.layout is None and 'base' not in shapes:
    return _load_tokens(path, model, sample_shape, shapes, head)
  if not has_published_names(shapes['params']):
    raise errors.UsageError(
      f'PyTorch weights are for residual networks, VGGs and transformers, and the model is {model.name!r}'
    )
  entries = common_names(read(path))
  if head is not None:
    last = jax.jit(lambda key: model.init(key, sample_shape)['params']['linear'])(errors.check_key('head', head))
    entries = {name: values for name, values in entries.items() if not name.startswith(('linear.', 'classifier.'))}
    entries |= {'linear.weight': np.asarray(last['kernel']).T, 'linear.bias': np.asarray(last['bias'])}
  places = {trees.path_names(place)[1:]: leaf for place, leaf in jax.tree.leaves_with_path(shapes)}
  names = {torch_name(place): place for place in places}
  ours = {name: our_layout(place, entries[name], sample_shape[2]) for name, place in names.items() if name in entries}
  return _fitted(path, model, shapes, names, ours, entries)


def _fitted(
  path: Any, model: Model, shapes: Tree, names: Mapping[str, tuple], ours: Mapping[str, np.ndarray], entries: Mapping
) -> Tree:
  """Returns the variables, from `ours`: published name -> values in our layout.

  Raises `UsageError` for entries of the file that are missing, superfluous or of another shape.
  """
  places = {trees.path_names(place)[1:]: leaf for place, leaf in jax.tree.leaves_with_path(shapes)}
  faults = {
    'missing': [name for name in names if name not in entries],
    'not in the model': [name for name in entries if name not in names],
    'of another shape': [
      f'{name} {entries[name].shape} where the model has {places[names[name]].shape}'
      for name, values in ours.items()
      if values.shape != places[names[name]].shape
    ],
  }
  if any(faults.values()):
    listed = '; '.join(f'{kind}: {_some(names)}' for kind, names in faults.items() if names)
    raise errors.UsageError(f'the weights in {str(path)!r} do not fit {model.name!r}: {listed}')
  leaves = [jnp.asarray(ours[name], places[place].dtype) for name, place in names.items()]
  variables = jax.tree.unflatten(jax.tree.structure(shapes), leaves)
  check_finite(f'the weights in {str(path)!r}', variables)
  return variables


def _load_tokens(path: Any, model: Model, shape: tuple[int, ...], shapes: Tree, head: jax.Array | None) -> Tree:
  """Returns the variables of a network of tokens, as `load` does."""
  names = {
    token_weights.published_name(place): place
    for place in (trees.path_names(place)[1:] for place, _ in jax.tree.leaves_with_path(shapes))
  }
  found = token_weights.read_entries(without_prefixes(read(path)), list(names))
  if head is not None:
    drawn = jax.jit(lambda key: model.init(key, shape)['params'])(errors.check_key('head', head))
    heads = {name for name in names if token_weights.is_head(name)}
    found |= {name: np.asarray(trees.get(drawn, names[name])) for name in heads}
  return _fitted(path, model, shapes, names, found, found)


def read(path: str | pathlib.Path) -> dict[str, np.ndarray]:
  """Returns the arrays in a weight file by name, in PyTorch's layout.

  Args:
    path: a file of `torch.save` (either format) with a `state_dict`, alone or as the only one in a dictionary, or with
      a list of tensors, which are called 'arr_0', 'arr_1', …; a `.safetensors` file; or an `.npz`. The format is
      recognised by the content, not by the suffix.

  Raises:
    UsageError: for a file that cannot be read, has another format, or holds anything but tensors and plain values.
  """
  errors.check_path('the path of the weights', path)
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
  except Exception as error:  # a damaged pickle can raise anything
    reason = str(error) if isinstance(error, errors.UsageError) else f'{type(error).__name__}: {error}'
    raise errors.UsageError(f'cannot read the weights in {str(path)!r}: {reason}') from error


class _Storage:
  """The flat values that tensors are views of; files hold them after the pickle that refers to them."""

  def __init__(self, dtype: Any, count: int) -> None:
    if dtype not in _STORAGES.values() or not _is_count(count):
      raise errors.UsageError(f'it has a storage of {errors.shown(count)} values of {errors.shown(dtype)}')
    self.dtype, self.count = np.dtype(dtype), count
    self.values: Any = None

  def __setstate__(self, state: Any) -> None:
    raise errors.UsageError('it changes a storage')

  def fill(self, data: bytes) -> None:
    self.values = np.frombuffer(data, self.dtype, self.count)


class _Tensor(NamedTuple):
  storage: _Storage
  offset: int
  shape: tuple[int, ...]
  stride: tuple[int, ...]
  dtype: Any = None  # None for that of the storage

  def array(self) -> np.ndarray:
    values, offset = self.storage.values, self.offset
    if math.prod(self.shape) > values.size:
      raise errors.UsageError('a tensor reaches beyond its storage: it has more values')
    last = offset + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
    if min((offset, *self.stride)) < 0 or (math.prod(self.shape) != 0 and last >= values.size):
      raise errors.UsageError('a tensor reaches beyond its storage')
    steps = [step * values.itemsize for step in self.stride]
    found = np.lib.stride_tricks.as_strided(values[offset:], self.shape, steps).copy()
    return found if self.dtype is None else found.view(self.dtype)


def _rebuild_tensor(
  storage: _Storage, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], *rest: Any
) -> _Tensor:
  if any(rest[2:]):  # behind requires_grad and hooks
    raise errors.UsageError(f'a tensor has {errors.shown(rest[2])}, as a view by conj() has: save its resolve_neg()')
  sizes = (offset, *shape, *stride)
  if (
    not isinstance(storage, _Storage) or len(shape) != len(stride) or len(shape) > 32 or not all(map(_is_count, sizes))
  ):
    raise errors.UsageError('a tensor reaches beyond its storage, or has no valid shape')
  return _Tensor(storage, offset, shape, stride)


def _rebuild_short(storage: _Storage, offset: int, shape: tuple, stride: tuple, *rest: Any) -> _Tensor:
  requires_grad, hooks, dtype, *more = rest
  if not isinstance(storage, _Storage) or storage.dtype != np.uint8 or dtype not in _SHORT.values():
    raise errors.UsageError(f'a tensor has the type {errors.shown(dtype)} in a storage of another one')
  return _rebuild_tensor(storage, offset, shape, stride, requires_grad, hooks, *more)._replace(dtype=dtype)


def _is_count(value: Any) -> bool:
  return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**48


class _Function:
  """A function that a pickle may call and cannot change."""

  def __init__(self, function: Callable) -> None:
    self.function = function

  def __call__(self, *arguments: Any) -> Any:
    return self.function(*arguments)

  def __setstate__(self, state: Any) -> None:
    raise errors.UsageError('it changes a function')


_KNOWN = {
  ('collections', 'OrderedDict'): collections.OrderedDict,
  ('torch._utils', '_rebuild_tensor'): _Function(_rebuild_tensor),
  ('torch._utils', '_rebuild_tensor_v2'): _Function(_rebuild_tensor),
  ('torch._utils', '_rebuild_tensor_v3'): _Function(_rebuild_short),
  ('torch.storage', 'UntypedStorage'): np.uint8,
  ('torch._utils', '_rebuild_parameter'): _Function(lambda tensor, *rest: tensor),
  **{('torch', name): dtype for name, dtype in {**_STORAGES, **_SHORT}.items()},
}


class _Unpickler(pickle.Unpickler):
  """Builds dictionaries and tensors, and collects the storages to fill, by key."""

  def __init__(self, file: BinaryIO) -> None:
    _check_opcodes(file)
    super().__init__(file, encoding='latin1')
    self.storages = {}

  def find_class(self, module: str, name: str) -> Any:
    if name == '_rebuild_qtensor':
      raise errors.UsageError('it holds quantised tensors: save their dequantize()')
    if (module, name) not in _KNOWN:
      raise errors.UsageError(
        f'it holds an object {module}.{name}, and only tensors are read: save the state_dict() of the network'
      )
    return _KNOWN[module, name]

  def persistent_load(self, entry: tuple) -> _Storage:
    _, dtype, key, _, count, *_ = entry
    return self.storages.setdefault(key, _Storage(dtype, count))


def _check_opcodes(file: BinaryIO) -> None:
  """Reads a pickle up to its end without loading it, and goes back; raises `UsageError` for other than `_OPCODES`.

  A place in the memo is memory that the unpickler takes: it is at most as large as the number of opcodes.
  """
  start = file.tell()
  try:
    for number, (opcode, argument, _) in enumerate(pickletools.genops(file)):
      if opcode.name not in _OPCODES or ('PUT' in opcode.name and int(argument or 0) > number):
        raise errors.UsageError(
          f'its pickle has the opcode {opcode.name} {errors.shown(argument)}, and only tensors are read: save the '
          'state_dict() of the network'
        )
  except ValueError as error:
    raise error if isinstance(error, errors.UsageError) else pickle.UnpicklingError(str(error)) from error
  file.seek(start)


def _read_zip(file: BinaryIO) -> Any:
  with zipfile.ZipFile(file) as archive:
    if sum(entry.file_size for entry in archive.infolist()) > _MOST_BYTES:
      raise errors.UsageError(f'it unpacks to more than {_MOST_BYTES:,} bytes')
    pickles = [name for name in archive.namelist() if name.endswith('/data.pkl')]
    if not pickles:
      file.seek(0)
      return dict(np.load(file, allow_pickle=False))
    unpickler = _Unpickler(io.BytesIO(archive.read(pickles[0])))
    content = unpickler.load()
    folder = pickles[0].removesuffix('data.pkl') + 'data/'
    for key, storage in unpickler.storages.items():
      storage.fill(archive.read(folder + key))
  return content


def _read_legacy(file: BinaryIO) -> Any:
  for _ in range(3):  # magic number, version, platform
    _Unpickler(file).load()
  unpickler = _Unpickler(file)
  content = unpickler.load()
  for key in _Unpickler(file).load():
    storage = unpickler.storages[key]
    file.seek(8, 1)  # skip the count, which the pickle holds too
    storage.fill(_exactly(file, storage.count * storage.dtype.itemsize))
  return content


def _read_safetensors(file: BinaryIO) -> dict[str, np.ndarray]:
  header = json.loads(_exactly(file, int.from_bytes(file.read(8), 'little')))
  header.pop('__metadata__', None)
  here = file.tell()
  if file.seek(0, 2) - here > _MOST_BYTES:
    raise errors.UsageError(f'its arrays take more than {_MOST_BYTES:,} bytes')
  file.seek(here)
  data = file.read()
  places = [entry['data_offsets'] for entry in header.values()]
  if not all(0 <= start <= end <= len(data) for start, end in places):
    raise errors.UsageError('an array reaches beyond the file')
  if sum(end - start for start, end in places) > len(data):
    raise errors.UsageError('its arrays are larger than the file')

  def array(dtype: str, shape: list[int], data_offsets: list[int]) -> np.ndarray:
    errors.check_choice('type of an array', dtype, _SAFETENSORS)
    return np.frombuffer(data[slice(*data_offsets)], _SAFETENSORS[dtype]).reshape(shape)

  return {name: array(**entry) for name, entry in header.items()}


def _exactly(file: BinaryIO, count: int) -> bytes:
  """Returns as many bytes; raises `UsageError`, without taking the memory, if the file has fewer."""
  here = file.tell()
  if count > file.seek(0, 2) - here:
    raise errors.UsageError(f'it ends before {count:,} bytes that it announces')
  file.seek(here)
  return file.read(count)


def _state_dict(content: Any) -> dict[str, np.ndarray]:
  """Returns the arrays of `content`, or of the only dictionary in it that holds nothing but arrays."""

  def is_one(value: Any) -> bool:
    return (
      isinstance(value, dict)
      and bool(value)
      and all(isinstance(name, str) and isinstance(each, (_Tensor, np.ndarray)) for name, each in value.items())
    )

  if isinstance(content, dict):
    content = {name: value for name, value in content.items() if value is not None}  # `grad` of no gradient
  if isinstance(content, list | tuple) and content:
    content = {f'arr_{i}': each for i, each in enumerate(content)}
  if not is_one(content):
    entries = content if isinstance(content, dict) else {}
    found = {name: value for name, value in entries.items() if is_one(value)}
    others = [str(name) for name, value in entries.items() if not isinstance(value, _Tensor | np.ndarray)]
    if not found and 0 < len(others) < len(entries):
      raise errors.UsageError(f'beside tensors it holds {errors.some(others)}, which is none: save the tensors alone')
    if len(found) != 1:
      names = f': {", ".join(map(str, found))}' if found else ''
      raise errors.UsageError(f'it holds {len(found)} sets of tensors{names}; save the state_dict() of the network')
    (content,) = found.values()
  tensors = [value for value in content.values() if isinstance(value, _Tensor)]
  if sum(math.prod(tensor.shape) * tensor.storage.dtype.itemsize for tensor in tensors) > _MOST_BYTES:
    raise errors.UsageError(f'its tensors take more than {_MOST_BYTES:,} bytes')
  return {
    name: _numbers(name, value.array() if isinstance(value, _Tensor) else value) for name, value in content.items()
  }


def _numbers(name: str, values: np.ndarray) -> np.ndarray:
  """Returns an array of real numbers; raises `UsageError` for any other.

  NumPy has no name for bfloat16 and writes it as two bytes without a type, which no other type of ours is.
  """
  if values.dtype == np.dtype('V2'):
    return values.view(jnp.bfloat16)
  if values.dtype.kind not in 'fiub' and not jnp.issubdtype(values.dtype, jnp.floating):
    raise errors.UsageError(f'the array {name} is {values.dtype}, expected numbers')
  return values


def has_published_names(params: Tree) -> bool:
  """Returns whether these are parameters of our residual networks, VGGs or vision transformers."""
  if not isinstance(params, Mapping):
    return False
  patches = params.get('patch_embed')  # a network of PyTorch may have this name, and its own names within
  ours = isinstance(patches, Mapping) and 'kernel' in patches.get('proj', {})
  return ours or not {'layer1_0', 'features_0'}.isdisjoint(params)


def unique(pairs: Iterable[tuple[str, Any]], how: str = '') -> dict[str, Any]:
  """Returns a dictionary of (name, tensor) pairs.

  Args:
    pairs: of the tensors.
    how: how they came by their names, for the error.

  Raises:
    UsageError: for two tensors of one name, which of them is meant is not known.
  """
  found: dict[str, Any] = {}
  for name, values in pairs:
    if name in found:
      raise errors.UsageError(f'two tensors have the name {name}{how}: nothing tells which of them is meant')
    found[name] = values
  return found


def without_prefixes(entries: Mapping[str, Any], known: Collection[str] = ()) -> dict[str, Any]:
  """Returns the entries without `PREFIXES` that all have, until one is known by its name or its module.

  Args:
    entries: by names joined by dots; those of 'batch_stats' may stand beside those of a prefix.
    known: names of tensors, and of modules, that are taken as they are.

  Raises:
    UsageError: for two tensors that have one name without their prefixes.
  """
  found = dict(entries)
  while not any(name in known or name.rpartition('.')[0] in known for name in found):
    for prefix in PREFIXES:
      if found and all(name.startswith((prefix, 'batch_stats.')) for name in found):
        shorter = re.compile(rf'^({re.escape(prefix)}|batch_stats\.)')
        found = unique(((shorter.sub('', name), each) for name, each in found.items()), ' without its prefix')
        break
    else:
      break
  return found


def common_names(entries: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Returns the entries of a file, one for each of our tensors, under the names of `torch_name`, in PyTorch's layout.

  Weights of the patches [out, in, row, column] become [out, in·row·column]. `attn.qkv` is split into its three parts,
  and class token and positions lose their axes of size one.

  Raises:
    UsageError: for two tensors of one of these names.
  """
  return unique(_commonly_named(without_prefixes(entries)), ' in published code')


def _commonly_named(entries: Mapping[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
  for name, values in entries.items():
    name = name.replace('.downsample.', '.shortcut.')
    name = re.sub(r'^(fc|head|classifier)\.(weight|bias)$', r'linear.\2', name)
    if name.endswith('.num_batches_tracked'):
      continue
    if '.attn.qkv.' in name and len(values) % 3 == 0:
      parts = np.split(values, 3)
      yield from ((name.replace('.qkv.', f'.{part}.'), each) for part, each in zip('qkv', parts, strict=True))
    elif name == 'patch_embed.proj.weight':
      yield name, values.reshape(len(values), -1)
    elif name == 'cls_token' and values.shape[:-1] == (1, 1):
      yield name, values[0, 0]
    elif name == 'pos_embed' and values.ndim == 3 and len(values) == 1:
      yield name, values[0]
    else:
      yield name, values


def _some(names: list[str]) -> str:
  more = f' and {len(names) - 4} more' if len(names) > 4 else ''
  return ', '.join(names[:4]) + more


def torch_name(path: Sequence[str]) -> str:
  """Returns the name in published code of the variable at `path` of a network."""
  *modules, leaf = path
  if modules == ['tokens']:
    return leaf
  name = re.sub(r'^(layer\d|features|blocks)_(\d+)', r'\1.\2', '.'.join(modules))
  name = name.replace('shortcut_conv', 'shortcut.0').replace('shortcut_norm', 'shortcut.1')
  if not name.startswith('blocks.'):
    name = re.sub(r'norm(\d)$', r'bn\1', name)
  leaves = {'kernel': 'weight', 'scale': 'weight', 'bias': 'bias', 'mean': 'running_mean', 'var': 'running_var'}
  return f'{name}.{leaves.get(leaf, leaf)}'


def our_layout(path: Sequence[str], values: np.ndarray, channels: int) -> np.ndarray:
  """Returns the values of `common_names` in the layout of our variable at `path`, of a model of so many channels."""
  if path[-1] != 'kernel':
    return values
  if path[0] == 'patch_embed' and values.shape[-1] % channels == 0:
    return values.reshape(len(values), channels, -1).transpose(2, 1, 0).reshape(-1, len(values))
  return values.transpose(0, 3, 2, 1).reshape(len(values), -1) if values.ndim == 4 else values.T
