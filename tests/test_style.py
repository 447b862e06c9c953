"""What every file of the library keeps to: annotated public functions, and none too long to read at once."""

import ast
import pathlib

import pytest

LIBRARY = pathlib.Path(__file__).parents[1] / 'gradleak'
LONGEST = 80
FILES = sorted(LIBRARY.rglob('*.py'))
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def public(body):
  """Yields the public functions of a module, and the public methods of its public classes."""
  for node in body:
    if isinstance(node, FUNCTIONS) and not node.name.startswith('_'):
      yield node
    if isinstance(node, ast.ClassDef) and not node.name.startswith('_'):
      yield from public(node.body)


def missing(function):
  """Returns the parameters of a function without an annotation, and 'return' where it has none."""
  arguments = function.args
  every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
  bare = [one.arg for one in every if one is not None and one.annotation is None and one.arg not in ('self', 'cls')]
  return bare + ([] if function.returns is not None else ['return'])


@pytest.mark.parametrize('path', FILES, ids=lambda path: str(path.relative_to(LIBRARY)))
def test_public_functions_are_annotated(path):
  found = {f'{node.name} (line {node.lineno})': missing(node) for node in public(ast.parse(path.read_text()).body)}
  assert not {name: lacks for name, lacks in found.items() if lacks}


@pytest.mark.parametrize('path', FILES, ids=lambda path: str(path.relative_to(LIBRARY)))
def test_no_function_is_longer_than_a_page(path):
  functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, FUNCTIONS)]
  lengths = {node.name: node.end_lineno - node.lineno + 1 for node in functions}
  assert not {name: length for name, length in lengths.items() if length > LONGEST}
