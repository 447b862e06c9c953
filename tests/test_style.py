"""What every file of the library keeps to: annotated public functions, and none too long to read at once."""

import ast
import functools
import pathlib

import pytest

LIBRARY = pathlib.Path(__file__).parents[1] / 'gradleak'
LONGEST, MOST = 80, 10
FILES = sorted(LIBRARY.rglob('*.py'))
PROGRAMS = sorted(path for folder in ('experiments', 'launch') for path in (LIBRARY.parent / folder).rglob('*.py'))
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@functools.cache
def parsed(path):
  """Returns the syntax tree of a file; nobody changes it."""
  return ast.parse(path.read_text())


@functools.cache
def functions(path):
  """Returns the functions of a file, those inside others, too."""
  return [node for node in ast.walk(parsed(path)) if isinstance(node, FUNCTIONS)]


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
  found = {f'{node.name} (line {node.lineno})': missing(node) for node in public(parsed(path).body)}
  assert not {name: lacks for name, lacks in found.items() if lacks}


@pytest.mark.parametrize('path', FILES, ids=lambda path: str(path.relative_to(LIBRARY)))
def test_no_function_is_longer_than_a_page(path):
  lengths = {node.name: node.end_lineno - node.lineno + 1 for node in functions(path)}
  assert not {name: length for name, length in lengths.items() if length > LONGEST}


def names(node):
  """Returns the names and the attributes that stand in a piece of code."""
  found = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
  return found | {one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute)}


@pytest.fixture(scope='module')
def keepers():
  """Returns the decorators that freeze settings: what they wrap becomes a `Method`, or has `methods.checked` ones."""
  classes = [node for path in FILES for node in ast.walk(parsed(path)) if isinstance(node, ast.ClassDef)]
  methods = {'Method'} | {one.name for one in classes if any('Method' in names(base) for base in one.bases)}
  return {
    one.name for path in FILES for one in functions(path) if methods & names(one) or {'wraps', 'checked'} <= names(one)
  }


def parameters(function, keepers):
  """Returns the parameters of a function; of a factory whose settings are frozen the positional ones."""
  made = [one.func if isinstance(one, ast.Call) else one for one in function.decorator_list]
  frozen = any((one.attr if isinstance(one, ast.Attribute) else one.id) in keepers for one in made)
  every = [*function.args.posonlyargs, *function.args.args, *([] if frozen else function.args.kwonlyargs)]
  return [one.arg for one in every if one.arg not in ('self', 'cls')]


@pytest.mark.parametrize('path', [*FILES, *PROGRAMS], ids=lambda path: str(path.relative_to(LIBRARY.parent)))
def test_no_call_has_more_parameters_than_fingers(path, keepers):
  counts = {f'{node.name} (line {node.lineno})': len(parameters(node, keepers)) for node in functions(path)}
  assert not {name: count for name, count in counts.items() if count > MOST}


def test_only_decorators_of_methods_freeze_settings(keepers):
  assert {'attack', 'defense', 'builtin'} <= keepers
  plain, kept = (ast.parse(f'{line}def f(a, *, b, c): ...').body[0] for line in ('@ranged\n', '@base.attack(x=1)\n'))
  assert parameters(plain, keepers) == ['a', 'b', 'c'] and parameters(kept, keepers) == ['a']
