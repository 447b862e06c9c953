"""Docstrings in Google's style, taken apart and written as Markdown or as reStructuredText."""

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

_HEADING = re.compile(r'(Args|Attributes|Formula|Raises|Returns)(?: \(.+\))?:')
_CODE = re.compile(r'(`+[^`]+`+)')
_CONVERTED = re.compile(r'^(Formula|Returns):\n((?:[ ]+.*\n|\n(?=[ ]))+)', re.MULTILINE)
_ENTRY = re.compile(r'(\*{0,2}\w+(?:, \*{0,2}\w+)*): (.*)', re.DOTALL)


def sections(documented: Any) -> dict[str, str]:
  """Returns heading -> text of an object's docstring, without indentation; what has no heading is under ''."""
  found: dict[str, list[str]] = {'': []}
  name = ''
  for line in (inspect.getdoc(documented) or '').split('\n'):
    heading = _HEADING.fullmatch(line)
    if heading:
      name = heading[1]
    elif line and not line.startswith(' '):
      name = ''
    if not heading:
      found.setdefault(name, []).append(line)
  return {name: inspect.cleandoc('\n' + '\n'.join(lines)) for name, lines in found.items()}


def entries(text: str) -> dict[str, str]:
  """Returns name -> meaning of a section such as Args.

  Where an entry has as many clauses as names, each name gets its own clause; else every name gets the whole.
  """
  found = {}
  for item in items(text):
    entry = _ENTRY.fullmatch(item)
    if entry:
      names, clauses = entry[1].split(', '), entry[2].split('; ')
      parts = clauses if len(clauses) == len(names) else [entry[2]] * len(names)
      found.update({name.lstrip('*'): f'{part.rstrip(".")}.' for name, part in zip(names, parts, strict=True)})
  return found


def items(text: str) -> list[str]:
  """Returns the items of a text, each of which begins at the left and goes on in indented lines, as one line each."""
  return [' '.join(item.split()) for item in re.split(r'\n(?=\S)', text) if item.strip()]


def formulas(documented: Any) -> list[str]:
  """Returns the formulas of an object's docstring, LaTeX."""
  text = sections(documented).get('Formula', '')
  return [part.strip() for part in re.split(r'\n\s*\n', text) if part.strip()]


def markdown(text: str, pages: Mapping[str, str] | None = None) -> str:
  """Returns a text with the signs escaped that Markdown would read as markup, apart from code.

  Args:
    text: of a docstring.
    pages: name -> page that the name, as code, is linked to.
  """

  def written(part: str) -> str:
    if not part.startswith('`'):
      return re.sub(r'([\\*_$<>\[\]{}|~^])', r'\\\1', part)
    code = part.replace('|', r'\|')
    name = re.sub(r'^gradleak\.(attacks|defenses|models|servers)\.', '', part[1:-1])
    return f'[{code}]({pages[name]})' if pages and name in pages else code

  return ''.join(map(written, _CODE.split(text)))


def paragraphs(text: str, pages: Mapping[str, str] | None = None) -> list[str]:
  """Returns the paragraphs of a description as Markdown; an indented one is a list of its items."""
  found = []
  for part in re.split(r'\n\s*\n', text):
    if part.startswith(' '):
      found.append('\n'.join(f'- {markdown(item, pages)}' for item in items(inspect.cleandoc('\n' + part))))
    elif part.strip():
      found.append(markdown(' '.join(part.split()), pages))
  return found


def meaning(name: str, *documented: Callable) -> str:
  """Returns what a setting means, by the first of the docstrings that says so; '' where none does.

  A reference such as "see `other`" is followed where `other` is an object whose docstring has an entry of that name.
  """
  for one in documented:
    found = sections(one)
    text = entries(found.get('Args') or found.get('Attributes', '')).get(name, '')
    other = re.search(r'(?:see|as|as of|as for|for) `(?:[\w.]+\.)?(\w+)`', text)
    target = other and getattr(inspect.unwrap(one), '__globals__', {}).get(other[1])
    deeper = meaning(name, target) if callable(target) and target is not one else ''
    if deeper or text:
      return deeper or text
  return ''


def restructured(lines: list[str]) -> list[str]:
  """Returns the lines of a docstring as reStructuredText that napoleon reads: code, formulas and results converted."""
  parts = _CONVERTED.split('\n'.join(lines) + '\n')
  written = []
  for plain, name, text in zip(parts[::3], [*parts[1::3], ''], [*parts[2::3], ''], strict=True):
    written.append(_escaped(re.sub(r'^Raises \(.+\):$', 'Raises:', plain, flags=re.MULTILINE)))
    if name == 'Returns':
      written.append(f':returns: {" ".join(_escaped(text).split())}\n')
    blocks = re.split(r'\n\s*\n', inspect.cleandoc('\n' + text)) if name == 'Formula' else ()
    written += ['.. math::\n\n' + '\n'.join(f'   {line}' for line in block.split('\n')) + '\n' for block in blocks]
  return '\n'.join(written).split('\n')


def _escaped(text: str) -> str:
  """Returns a text with code as literals, apart from letters behind them."""
  parts = _CODE.split(text)
  apart = [
    '\\ ' if part.startswith('`') and re.match(r'\w', after) else ''
    for part, after in zip(parts, [*parts[1:], ''], strict=True)
  ]
  return ''.join(_plain(part) + space for part, space in zip(parts, apart, strict=True))


def _plain(part: str) -> str:
  """Returns code as literal, and other text with the signs escaped that reStructuredText would read as markup."""
  if part.startswith('`'):
    return f'``{part.strip("`")}``'
  return re.sub(r'[\\*|]|_(?!\w)', r'\\\g<0>', part)
