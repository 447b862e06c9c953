"""The code blocks of the documents: found, and checked without running them.

A block is marked by an HTML comment on the line before it:

    <!-- slow -->             it is run by `pytest -m slow` alone, and so are the blocks behind it in its document
    <!-- needs: torch -->     it is run where this module can be imported
    <!-- not run: REASON -->  it is never run
"""

import ast
import builtins
import contextlib
import dataclasses
import importlib
import importlib.util
import inspect
import pathlib
import re
import shlex
from typing import NamedTuple
from unittest import mock

from absl import flags

import experiments
import gradleak as gl
from gradleak import cli, registry
from gradleak.core import grammar, settings
from tests import programs

ROOT = programs.ROOT
GENERATED = {'methods', 'results', '_build', '_deploy', 'api'}
DOCUMENTS = [
  ROOT / 'README.md',
  ROOT / 'BUILD.md',
  *sorted(path for path in (ROOT / 'docs').rglob('*.md') if not GENERATED & set(path.relative_to(ROOT / 'docs').parts)),
]
SHELLS, COMMANDS = ('sh', 'bash'), ('make', 'python', 'python3', 'gradleak', 'pip', 'pytest', 'source', 'sbatch')
_FENCE = re.compile(
  r'(?:^<!-- (?P<mark>[^\n]*?) -->\n)?^(?P<ticks>`{3,})(?P<info>[^\n`]*)\n(?P<code>.*?)^(?P=ticks) *$', re.M | re.S
)
_MARK = re.compile(r'slow|needs: (\w+)|not run: \S.*')
_SETTINGS = (gl.AuditSettings, gl.CapturedSettings, gl.FrontierSettings, gl.SensitivitySettings)


class Block(NamedTuple):
  """A fenced code block: of which document, at which line, in which language, how it is marked, and its code."""

  path: pathlib.Path
  line: int
  language: str
  mark: str
  code: str

  def __str__(self):
    return f'{self.path.relative_to(ROOT)}:{self.line}'

  @property
  def needs(self):
    """The module that it cannot run without; empty for none."""
    return self.mark.removeprefix('needs: ') if self.mark.startswith('needs: ') else ''

  @property
  def runs(self):
    """Whether it can be run here."""
    return not self.mark.startswith('not run: ') and (
      not self.needs or importlib.util.find_spec(self.needs) is not None
    )


def blocks(path, text=None):
  """Returns the Python and shell blocks of a document; raises ValueError for a mark of another form."""
  text = path.read_text('utf-8') if text is None else text
  found = []
  for fence in _FENCE.finditer(text):
    language, code = (fence['info'].split() or [''])[0], fence['code']
    if not language and code.split(maxsplit=1)[:1] and code.split(maxsplit=1)[0] in COMMANDS:
      language = 'sh'
    line = text[: fence.start('code')].count('\n') + 1
    if language not in ('python', *SHELLS):
      continue
    mark = fence['mark'] or ''
    if mark and not _MARK.fullmatch(mark):
      raise ValueError(f'{path.name}:{line}: unknown mark {mark!r}')
    found.append(Block(path, line, 'python' if language == 'python' else 'sh', mark, code))
  return found


def slow_from(python):
  """Returns the place of the first slow block among Python blocks of one document; their number without any."""
  return next((i for i, block in enumerate(python) if block.mark == 'slow'), len(python))


# ---- Python that is not run


def check_names(python):
  """Checks the Python blocks of one document without running them: syntax, names, our attributes and keywords.

  Raises:
    AssertionError: for a name that no block defines, and for what gradleak does not have.
  """
  trees = [(block, ast.parse(block.code, str(block))) for block in python]
  nodes = [(block, node) for block, tree in trees for node in ast.walk(tree)]
  known = set(dir(builtins))
  for _, node in nodes:
    known |= set(_defined(node))
  for block, node in nodes:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
      assert node.id in known, f'{block}: no block defines {node.id!r}'
  ours = dict(_imported(nodes))
  for block, node in nodes:
    if isinstance(node, ast.Attribute):
      _resolved(block, node, ours)
    if isinstance(node, ast.Call):
      _check_keywords(block, node, ours)


def _defined(node):
  if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
    yield node.id
  if isinstance(node, ast.FunctionDef | ast.ClassDef):
    yield node.name
  if isinstance(node, ast.arg):
    yield node.arg
  if isinstance(node, ast.Import | ast.ImportFrom):
    for name in node.names:
      yield name.asname or name.name.split('.')[0]


def _imported(nodes):
  """Yields (name, object) of what is imported from modules that are there; raises for what they do not have."""
  for block, node in nodes:
    if isinstance(node, ast.Import):
      for name in node.names:
        with contextlib.suppress(ModuleNotFoundError):
          module = importlib.import_module(name.name)
          yield (name.asname, module) if name.asname else (name.name.split('.')[0], _top(name.name))
    if isinstance(node, ast.ImportFrom) and importlib.util.find_spec(node.module.split('.')[0]):
      module = importlib.import_module(node.module)
      for name in node.names:
        with contextlib.suppress(ImportError):
          importlib.import_module(f'{node.module}.{name.name}')
        assert hasattr(module, name.name), f'{block}: {node.module} has no {name.name}'
        yield name.asname or name.name, getattr(module, name.name)


def _top(name):
  return importlib.import_module(name.split('.')[0])


def _resolved(block, node, ours):
  """Returns the object that a name or a chain of attributes of modules stands for, None where it is not known."""
  if isinstance(node, ast.Name):
    return ours.get(node.id)
  if not isinstance(node, ast.Attribute):
    return None
  owner = _resolved(block, node.value, ours)
  if not inspect.ismodule(owner):
    return None
  assert hasattr(owner, node.attr), f'{block}: {owner.__name__} has no {node.attr!r}'
  return getattr(owner, node.attr)


def _check_keywords(block, call, ours):
  """Checks that a function of gradleak takes the keywords of a call."""
  function = _resolved(block, call.func, ours)
  if not callable(function) or not getattr(function, '__module__', '').startswith('gradleak'):
    return
  parameters = inspect.signature(function).parameters
  taken = set(parameters)
  if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
    inner = inspect.unwrap(function)
    names = getattr(function, 'setting_names', None)
    if names is None and inner is function:
      return  # what it passes on is not told by its signature
    taken |= set(names or inspect.signature(inner).parameters)
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in inspect.signature(inner).parameters.values()):
      return
  for keyword in call.keywords:
    assert keyword.arg is None or keyword.arg in taken, f'{block}: {function.__name__} takes no {keyword.arg!r}'


# ---- shell


def commands(block):
  """Returns the commands of a shell block, each a list of words, without comments and assignments before them."""
  found = []
  for line in block.code.replace('\\\n', ' ').splitlines():
    words = shlex.split(line.removesuffix('&'), comments=True)
    while words and re.fullmatch(r'[A-Z_]+=.*', words[0]):
      words = words[1:]
    if words:
      found.append(words)
  return found


def check_command(words):
  """Checks a command of a document without running it.

  Raises:
    AssertionError: for what the checkout does not have, and for a command of a kind that is not checked here.
  """
  name, rest = words[0], words[1:]
  if name in ('python', 'python3') and rest[:2] == ['-m', 'venv']:
    return
  if name in ('python', 'python3') and rest[0].startswith(('launch/', 'examples/')):
    assert (ROOT / rest[0]).is_file(), f'there is no {rest[0]}'
    if rest[0].startswith('launch/'):
      check_program(pathlib.Path(rest[0]).stem, rest[1:])
  elif name == 'gradleak':
    if rest and not rest[0].startswith('-'):
      assert rest[0] in cli.PROGRAMS, f'gradleak has no program {rest[0]!r}'
      check_program(rest[0], rest[1:])
  elif name == 'sbatch':
    script = next(i for i, word in enumerate(rest) if not word.startswith('-'))
    assert f'launch/{pathlib.Path(rest[script]).stem}.py' in (ROOT / rest[script]).read_text('utf-8')
    check_program(pathlib.Path(rest[script]).stem, rest[script + 1 :])
  else:
    check_other(name, rest)


def check_other(name, rest):
  """Checks a command that is no program of ours."""
  if name == 'make':
    text = (ROOT / 'Makefile').read_text('utf-8')
    targets, variables = set(re.findall(r'^([\w-]+):', text, re.M)), set(re.findall(r'^(\w+) \??= ', text, re.M))
    for word in rest:
      target, assigned, _ = word.partition('=')
      assert target in (variables if assigned else targets), f'the Makefile has no {target!r}'
  elif name == 'pip':
    extras = set(re.findall(r"^    '(\w+)': [\[A-Z]", (ROOT / 'setup.py').read_text('utf-8'), re.M))
    place = re.fullmatch(r'\.(?:\[([\w,]+)\])?', rest[-1])
    assert rest[:2] == ['install', '-e'] and place, 'pip installs a checkout: pip install -e .'
    assert set(filter(None, (place[1] or '').split(','))) <= extras, f'setup.py has no extra {place[1]}'
  elif name == 'pytest':
    assert all((ROOT / word).exists() for word in rest if word.startswith('tests'))
  else:
    assert [name, *rest] == ['source', '.venv/bin/activate'], f'nothing here checks the command {name}'


def check_program(name, arguments):
  """Parses a program's flags, and makes the objects that they name, without running it."""
  if '--help' in arguments:
    return
  module, own = programs._load(name)
  with mock.patch.object(flags, 'FLAGS', own):
    assert own([name, *arguments])[1:] == [], 'settings are written --flag=value'
    given = {flag: own[flag].value for flag in own if own[flag].present}
    for flag, make in MAKERS.items():
      if isinstance(given.get(flag), str) and given[flag]:
        make(given[flag])
    for kind in _SETTINGS:
      settings.check(kind(**{field: own[field].value for field in _flags_of(kind, own) if own[field].present}))
    if 'share' in own:  # a client's flags
      module._GIVEN.client().client(gl.models.mlp(10), 10)


def _flags_of(kind, own):
  """Returns the fields of a settings class that are flags of a program; others of the same name have another help."""
  fields = {field.name: field.metadata['help'] for field in dataclasses.fields(kind)}
  return [name for name, text in fields.items() if name in own and own[name].help == text]


def _models(text):
  for name in grammar.parse_list(text, 'model'):
    gl.models.create(name, 10)


MAKERS = {
  'attacks': registry.attacks,
  'attack': registry.attack,
  'defenses': registry.defenses,
  'defense': registry.defense,
  'model': lambda text: gl.models.create(text, 10),
  'models': _models,
  'experiment': experiments.get,
}


def needs_data(words):
  """Returns whether a command reads or downloads data that do not come with the package."""
  return any('prepare_data' in word or word.startswith('--data_dir') for word in words)
