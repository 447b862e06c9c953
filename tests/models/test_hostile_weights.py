"""Files that only look like weights: nothing in them is run, and a small file takes little memory."""

import io
import json
import pickle
import resource
import struct
import zipfile

import numpy as np
import pytest

from gradleak.core import errors
from gradleak.models import torch_weights
from tests.models.test_torch_weights import called, dictionary, group, legacy, number, view, word, zipped

DATA = {'0': bytes(40)}  # ten values of float32


def tensor(count=10, offset=0, shape=(10,), stride=(1,)):
  return dictionary({'w': view('FloatStorage', count, '0', offset, shape, stride)})


def changed(module, name, state):
  """Returns a pickle that sets attributes of what it names."""
  return f'c{module}\n{name}\n'.encode() + state + b'b'


def archive(entries, compression=zipfile.ZIP_DEFLATED):
  file = io.BytesIO()
  with zipfile.ZipFile(file, 'w', compression) as made:
    for name, content in entries.items():
      made.writestr(name, content)
  return file.getvalue()


def forged_size(content, size):
  """Returns a zip archive whose directory says that its first entry has another size."""
  place = content.index(b'PK\x01\x02') + 24
  return content[:place] + struct.pack('<I', size) + content[place + 4 :]


def header(entries, data=b''):
  text = json.dumps(entries).encode()
  return struct.pack('<Q', len(text)) + text + data


SHARED = view('FloatStorage', 10, '0', 0, (10,), (1,))
FILES = {
  'a call of the system': zipped(called('posix', 'system', word('true')), {}),
  'a call of the system as it was written before': legacy(called('posix', 'system', word('true')), {}, {}),
  'a call through a dotted name': zipped(called('torch._utils', '_rebuild_tensor.__globals__', word('a')), {}),
  'a call by instance': zipped(b'(cos\nsystem\n' + word('true') + b'o', {}),
  'an extension code': zipped(b'\x82\x01', {}),
  'an object made by NEWOBJ': zipped(b'ccollections\nOrderedDict\n)\x81', {}),
  'another function': zipped(called('numpy', 'load', word('/etc/passwd')), {}),
  'a place in the memo far away': zipped(b'}r' + struct.pack('<I', 2**31 - 1), {}),
  'a text longer than the file': zipped(b'X' + struct.pack('<I', 2**32 - 1) + b'a', {}),
  'bytes of eight bytes of length': zipped(b'\x96' + struct.pack('<Q', 2**40), {}),
  'a deep list': zipped(b']' * 5000 + b'a' * 4999, {}),
  'an integer of a million digits': zipped(b'\x8b' + struct.pack('<i', 2**30), {}),
  'a function that is changed': zipped(
    changed('torch._utils', '_rebuild_tensor', group(b'N', b'}' + word('function') + b'Ns')), {}
  ),
  'a storage that is changed': zipped(
    group(word('storage'), b'ctorch\nFloatStorage\n', word('0'), word('cpu'), number(1)) + b'Q}b', DATA
  ),
  'a storage of objects': zipped(
    group(word('storage'), b'ccollections\nOrderedDict\n', word('0'), word('cpu'), number(1)) + b'Q', DATA
  ),
  'a negative count': zipped(tensor(count=-1), DATA),
  'a count beyond the data': zipped(tensor(count=11), DATA),
  'an enormous count': zipped(tensor(count=2**31 - 1), DATA),
  'a negative offset': zipped(tensor(offset=-1), DATA),
  'an offset beyond': zipped(tensor(offset=1), DATA),
  'a negative size': zipped(tensor(shape=(-1,)), DATA),
  'two negative sizes': zipped(tensor(shape=(-2, -2), stride=(1, 1)), DATA),
  'a negative stride': zipped(tensor(stride=(-1,)), DATA),
  'a stride beyond': zipped(tensor(stride=(2,)), DATA),
  'more values than its storage has': zipped(tensor(shape=(20,), stride=(0,)), DATA),
  'a stride of zero': zipped(tensor(shape=(2**30, 2**30), stride=(0, 0)), DATA),
  'fewer strides than sizes': zipped(tensor(shape=(2, 5), stride=(1,)), DATA),
  'many dimensions': zipped(tensor(shape=(1,) * 60, stride=(1,) * 60), DATA),
  'a size that is a text': zipped(
    called('torch._utils', '_rebuild_tensor_v2', word('a'), number(0), group(word('b')), group(number(1))), DATA
  ),
  'no storage': zipped(called('torch._utils', '_rebuild_tensor', number(1), number(0), b')', b')'), DATA),
  'a storage that is missing': zipped(tensor(), {}),
  'names that are numbers': zipped(b'}(' + number(3) + SHARED + b'u', DATA),
  'many views of one storage': None,  # made below: it takes a moment
  'a zip bomb': forged_size(archive({'archive/data.pkl': b'\x80\x02}.'}), 2**31),
  'a zip bomb of arrays': None,
  'a broken npy': archive({'w.npy': b'\x93NUMPY\x01\x00\xff\xff{'}),
  'an npy of objects': None,
  'an npy of an enormous shape': None,
  'a legacy count beyond the file': legacy(tensor(count=2**31 - 1), DATA, {'0': 2**31 - 1}),
  'a header longer than the file': struct.pack('<Q', 2**62) + b'{"w": 1}',
  'a deep header': struct.pack('<Q', 200_000) + b'{"a":' * 40_000,
  'arrays larger than the file': header(
    {str(i): {'dtype': 'F32', 'shape': [10], 'data_offsets': [0, 40]} for i in range(50)}, bytes(40)
  ),
  'a negative offset in a header': header({'w': {'dtype': 'F32', 'shape': [1], 'data_offsets': [-8, -4]}}, bytes(8)),
  'an unknown type': header({'w': {'dtype': 'O', 'shape': [1], 'data_offsets': [0, 8]}}, bytes(8)),
  'an unknown field': header({'w': {'dtype': 'F32', 'shape': [1], 'data_offsets': [0, 4], 'run': 'x'}}, bytes(4)),
}


def npy(array=None, shape=None):
  file = io.BytesIO()
  if shape is None:
    np.save(file, array)
  else:
    np.lib.format.write_array_header_1_0(file, {'descr': '<f4', 'fortran_order': False, 'shape': shape})
  return archive({'w.npy': file.getvalue()})


MADE = {
  'many views of one storage': lambda: zipped(
    b'}(' + b''.join(word(str(i)) + view('FloatStorage', 2**20, '0', 0, (2**20,), (1,)) for i in range(300)) + b'u',
    {'0': bytes(2**22)},
  ),
  'a zip bomb of arrays': lambda: forged_size(npy(np.zeros(100, np.float32)), 2**31),
  'an npy of objects': lambda: npy(np.array([{}], object)),
  'an npy of an enormous shape': lambda: npy(shape=(2**30, 2**20)),
}


@pytest.mark.parametrize('name', FILES)
def test_a_hostile_file_is_refused_in_one_line_and_little_memory(tmp_path, name):
  path = tmp_path / 'weights.pt'
  path.write_bytes(FILES[name] or MADE[name]())
  before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  with pytest.raises(errors.UsageError) as caught:
    torch_weights.read(path)
  assert str(caught.value).startswith(f"cannot read the weights in '{path}': ")
  assert len(str(caught.value)) <= 1000 and '\n' not in str(caught.value)
  assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024  # KiB


def test_a_pickle_that_runs_something_leaves_no_trace(tmp_path):
  class Runs:
    def __reduce__(self):
      return (exec, (f"open({str(tmp_path / 'trace')!r}, 'w')",))

  for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
    (tmp_path / 'weights.pt').write_bytes(archive({'archive/data.pkl': pickle.dumps({'w': Runs()}, protocol)}))
    with pytest.raises(errors.UsageError, match=r'builtin.*exec|opcode'):
      torch_weights.read(tmp_path / 'weights.pt')
  assert not (tmp_path / 'trace').exists()
