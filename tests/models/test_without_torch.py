"""What holds without PyTorch: gradleak is imported, `from_torch` says what is missing, and nothing else asks for it."""

import ast
import pathlib
import sys

import numpy as np
import pytest

import gradleak as gl
from gradleak.models.state_dict import Entry, Layout

LIBRARY = pathlib.Path(gl.__file__).parent


def test_without_pytorch_a_sentence_says_what_to_install(monkeypatch):
  monkeypatch.setitem(sys.modules, 'torch', None)
  with pytest.raises(gl.UsageError, match='pip install torch'):
    gl.models.from_torch(object(), np.zeros((2, 3, 4, 4), np.float32))


@pytest.mark.long
def test_pytorch_is_imported_only_where_a_module_is_given():
  importing = {}
  for path in LIBRARY.rglob('*.py'):
    tree = ast.parse(path.read_text('utf-8'))
    for node in ast.walk(tree):
      names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
      names += [node.module or ''] if isinstance(node, ast.ImportFrom) else []
      if any(name.partition('.')[0] == 'torch' for name in names):
        importing.setdefault(path.relative_to(LIBRARY).as_posix(), []).append(node in tree.body)
  assert importing == {'flower.py': [False], 'models/torch.py': [False], 'models/torch_check.py': [False]}


def test_a_layout_turns_dense_weights_and_the_order_of_a_flattened_map():
  dense = Entry('fc.weight', ('params', 'fc', 'weight'), (5, 24), 'float32', True, (2, 3, 4))
  kernel = Entry('conv.weight', ('params', 'conv', 'weight'), (2, 3, 1, 1), 'float32')
  layout = Layout((kernel, dense), (3, 4, 2), (('head.weight', 'fc.weight'),))
  arrays = {'conv.weight': np.arange(6.0).reshape(2, 3, 1, 1), 'fc.weight': np.arange(120.0).reshape(5, 24)}
  found = layout.variables(arrays)
  wanted = [[arrays['fc.weight'].reshape(5, 2, 3, 4)[unit, channel, row, column] for unit in range(5)]
            for row in range(3) for column in range(4) for channel in range(2)]  # fmt: skip
  np.testing.assert_array_equal(found['params']['fc']['weight'], wanted)
  assert found['params']['fc']['weight'].shape == (24, 5)
  assert found['params']['conv']['weight'].shape == (2, 3, 1, 1)
  back = layout.to_theirs(found)
  assert list(back) == ['conv.weight', 'fc.weight', 'head.weight']
  for name, values in arrays.items():
    np.testing.assert_array_equal(back[name], values)
  np.testing.assert_array_equal(back['head.weight'], arrays['fc.weight'])
  between = layout._replace(names=('conv.weight', 'head.weight', 'fc.weight'))
  assert list(between.to_theirs(found)) == list(between.named()) == list(between.names)
  wrong = {'fc.weight': np.zeros((24, 5)), 'other': np.zeros(3)}
  for name, values in layout.to_ours(wrong).items():
    assert values is wrong[name]
  assert layout.to_theirs({'batch_stats': {}}) == {}
