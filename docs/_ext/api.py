"""A page for each public module, written by autodoc: what its `__all__` names, but for methods, which have pages."""

import pathlib
import re
import types
from collections.abc import Collection

import docstrings
import methods
from sphinx.application import Sphinx

import gradleak as gl
from gradleak import flower, priors

DOCS = pathlib.Path(__file__).parents[1]
# Headings of the index -> the packages below each; none is the package itself.
GROUPS = {
  'Begin here': (),
  'Attackers': ('attacks', 'servers', 'adaptive', 'priors'),
  'Defenses': ('defenses',),
  'What is audited': ('models', 'data', 'modalities', 'federated', 'flower'),
  'Results': ('metrics', 'report'),
}
_DEEPEST = 2  # dots in the name of a module that has a page


def names(module: types.ModuleType) -> list[str]:
  """Returns the public names of a module: its `__all__`, else the classes and functions that are written in it."""
  own = (name for name, value in vars(module).items() if getattr(value, '__module__', None) == module.__name__)
  return list(getattr(module, '__all__', None) or (name for name in own if not name.startswith('_')))


def modules() -> dict[str, types.ModuleType]:
  """Returns name -> module of all that have a page: the package, and the modules that it and they name."""
  found: dict[str, types.ModuleType] = {}

  def visit(module: types.ModuleType) -> None:
    found[module.__name__] = module
    for name in names(module):
      inner = getattr(module, name)
      if isinstance(inner, types.ModuleType) and inner.__name__ not in found and inner.__name__.count('.') <= _DEEPEST:
        visit(inner)

  visit(gl)
  visit(priors)
  visit(flower)
  return found


def pages() -> dict[str, str]:
  """Returns file name -> text: index.md, and a page per module."""
  parts = ['# API', '*For programmers.* Methods and models have [pages of their own](../methods/index.md).']
  known, left = modules(), {**modules()}
  for title, prefixes in GROUPS.items():
    inside = {name: left.pop(name) for name in known if name in left and _within(name, prefixes)}
    rows = [(f'[`{name}`]({name}.md)', _summary(module), len(names(module))) for name, module in inside.items()]
    contents = '\n'.join(inside)
    parts += [f'## {title}', methods._grid(('module', 'what it holds', 'names'), rows)]
    parts.append(f'```{{toctree}}\n:hidden:\n\n{contents}\n```')
  assert not left, f'modules without a group: {list(left)}'
  return {'index.md': '\n\n'.join(parts) + '\n'} | {f'{name}.md': page(module) for name, module in known.items()}


def _within(name: str, prefixes: Collection[str]) -> bool:
  return name == 'gradleak' if not prefixes else name.split('.')[1:2] != [] and name.split('.')[1] in prefixes


def _summary(module: types.ModuleType) -> str:
  return docstrings.markdown((module.__doc__ or '').splitlines()[0])


def page(module: types.ModuleType) -> str:
  """Returns the page of a module."""

  def elsewhere(name: str) -> bool:
    value = getattr(module, name)
    known = name in methods.links() or value is getattr(gl, name, None)
    return name == 'REGISTRY' or isinstance(value, types.ModuleType) or (known and module is not gl)

  shown = [name for name in names(module) if not elsewhere(name)]
  lines = [f'.. automodule:: {module.__name__}', f'   :members: {", ".join(shown)}' if shown else '']
  return f'# {module.__name__}\n\n```{{eval-rst}}\n' + '\n'.join(lines) + '\n```\n'


def _process(app: Sphinx, what: str, name: str, documented: object, options: object, lines: list[str]) -> None:
  del app, name, documented, options
  before = (
    [''] if what in ('attribute', 'property') else []
  )  # else napoleon takes what stands before a colon for a type
  lines[:] = before + docstrings.restructured(lines)


def _skip(app: Sphinx, what: str, name: str, documented: object, skip: bool, options: object) -> bool | None:
  """Leaves out the fields of tuples, which the Attributes of their class describe."""
  del app, what, name, skip, options
  return True if (getattr(documented, '__doc__', None) or '').startswith('Alias for field number') else None


def _signed(
  app: Sphinx, what: str, name: str, documented: object, options: object, signature: str | None, returned: str | None
) -> tuple[str | None, str | None]:
  """Replaces defaults that are functions, whose text is no Python."""
  del app, what, name, documented, options
  return signature and re.sub(r'<function .*?>>?', '...', signature), returned


def setup(app: Sphinx) -> dict[str, bool]:
  """Writes the pages when a build starts; docstrings are converted before napoleon reads them."""
  app.connect('builder-inited', lambda app: methods.write(DOCS / 'api', pages()))
  app.connect('autodoc-process-docstring', _process, priority=400)
  app.connect('autodoc-process-signature', _signed)
  app.connect('autodoc-skip-member', _skip)
  return {'parallel_read_safe': True, 'parallel_write_safe': True}
