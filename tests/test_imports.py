"""Imports point one way, by file and by folder: those inside functions and for typing included."""

import ast
import graphlib
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parent.parent
# What stands lower may import what stands higher. BUILD.md says what each holds.
FOLDERS = (
  'core', 'engine', 'data', 'models', 'metrics', 'modalities', 'priors', 'defenses', 'federated', 'threat', 'attacks',
  'adaptive', 'servers', 'audit', 'summary', 'studies', 'frameworks', 'report', 'registry', 'flower', '', 'cli',
)  # fmt: skip


def modules(folder):
  """Returns {dotted name: path} of the modules of the package."""
  found = {}
  for path in sorted(folder.rglob('*.py')):
    parts = path.relative_to(folder.parent).with_suffix('').parts
    found['.'.join(parts[:-1] if parts[-1] == '__init__' else parts)] = path
  return found


def imported(path, known):
  """Returns the modules among `known` that a file imports, anywhere in it."""
  found = set()
  for node in ast.walk(ast.parse(path.read_text('utf-8'))):
    if isinstance(node, ast.Import):
      found |= {alias.name for alias in node.names} & known
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f'{path} imports relative to itself'
      names = {f'{node.module}.{alias.name}' for alias in node.names}
      found |= (names | ({node.module} if names - known else set())) & known
  return found


def graph(folder):
  known = modules(folder)
  return {name: imported(path, set(known)) - {name} for name, path in known.items()}


def room(name):
  return name.partition('.')[2].partition('.')[0]


def backwards(found):
  """Returns the imports that point from a higher folder to a lower one."""
  return [
    (name, other)
    for name, others in found.items()
    for other in others
    if FOLDERS.index(room(other)) > FOLDERS.index(room(name))
  ]


def test_no_file_imports_itself_through_others():
  found = graph(ROOT / 'gradleak')
  assert len(found) > 150
  list(graphlib.TopologicalSorter(found).static_order())  # raises `CycleError`, which names the circle


def test_folders_import_one_way():
  found = graph(ROOT / 'gradleak')
  assert {room(name) for name in found} == set(FOLDERS)
  assert backwards(found) == []


def test_circles_and_wrong_directions_are_seen_in_functions_and_for_typing(tmp_path):
  package = tmp_path / 'gradleak'
  for name, text in {
    'core/trees.py': 'def read():\n  from gradleak.models import small\n  return small\n',
    'models/small.py': (
      'from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n  from gradleak.core.trees import read as reader\n'
    ),
  }.items():
    (package / name).parent.mkdir(parents=True, exist_ok=True)
    (package / name).write_text(text)
  found = graph(package)
  with pytest.raises(graphlib.CycleError) as error:
    list(graphlib.TopologicalSorter(found).static_order())
  assert {'gradleak.core.trees', 'gradleak.models.small'} <= set(error.value.args[1])
  assert backwards(found) == [('gradleak.core.trees', 'gradleak.models.small')]


def test_the_table_of_folders_follows_that_order():
  text = (ROOT / 'BUILD.md').read_text('utf-8')
  places = [text.index(f'| `gradleak/{name}/`') for name in FOLDERS[: FOLDERS.index('registry')]]
  assert places == sorted(places)
