"""Sentences that have to be read twice, in docstrings, comments and Markdown.

Usage: `python tests/prose.py PATH…` prints each of them with its file and line.
"""

import ast
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
CODE = ('gradleak', 'experiments', 'launch', 'benchmarks', 'examples')
PAGES = ('README.md', 'BUILD.md', 'docs')
GENERATED = ('docs/results', 'docs/_build', 'docs/_deploy', 'docs/api', 'docs/methods')

MOST_WORDS = 25
MOST_FIGURES = 4
UNCLEAR = (
  'at hand',
  'bear no',
  'bears no',
  'beside which',
  'besides which',
  'mend',
  'mended',
  'mends',
  "of one's own",
  'told',
  'what is of',
  'whatever',
  'whoever',
)

SECTIONS = re.compile(r'(Args|Attributes|Formula|Raises|References?|Returns|Source|Yields)( \([^)]*\))?:')
HEADED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
COMMENT = re.compile(r'(?:^|\s)#:?\s(?P<text>.*)$')
SKIPPED = re.compile(r'(?ms)^\s*(`{3,}|~{3,}).*?^\s*\1|^\s*:(::+|[\w-]+:)[^\n]*')
ITEM = re.compile(r'\n(?=\s*(?:[-*]|\d+\.)\s)')
ENDS = re.compile(r'(?<=[.!?])[)”"*_]*\s+(?=[A-ZÀ-Þ“"(`*\[])')


def faults(sentence: str) -> list[str]:
  """Returns the reasons for which a sentence is hard to read; code and the targets of links do not count."""
  text = re.sub(r'\[([^\]]*)\](\([^)]*\)|\{[^}]*\})', r'\1', sentence)
  text = re.sub(r'(`+).+?\1', 'code', text).strip()
  words = len(re.findall(r"[^\W\d_][\w'’-]*", text))
  figures = len(re.findall(r'(?<![\w.])\d[\d.,]*', text))
  checks = {
    f'{words} words': words > MOST_WORDS,
    f'{figures} figures': figures > MOST_FIGURES,
    'two colons': text.count(':') > 1,
    'begins with "Of"': text.startswith('Of '),
    'ends in "too" or "alone"': re.search(r'(, too|\balone)\W*$', text),
  }
  checks |= {f'"{phrase}"': re.search(rf'\b{phrase}\b', text, re.IGNORECASE) for phrase in UNCLEAR}
  return [reason for reason, found in checks.items() if found]


def sentences(paragraph: str) -> list[str]:
  """Returns the sentences of a paragraph, and of each item where it is a list."""
  items = (re.sub(r'^\s*([-*]|\d+\.)\s', '', item) for item in ITEM.split(paragraph))
  return [sentence for item in items for sentence in ENDS.split(' '.join(item.split()))]


def paragraphs(text: str, line: int = 1):
  """Yields pairs (line, paragraph) of a text that begins at `line`."""
  for part in re.split(r'(\n\s*\n)', text):
    if part.strip():
      yield line, part
    line += part.count('\n')


def of_python(source: str):
  """Yields pairs (line, paragraph) of the docstrings and comments of a Python file."""
  literals: set[int] = set()
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, (ast.Constant, ast.JoinedStr)) and node.end_lineno != node.lineno:
      literals.update(range(node.lineno, node.end_lineno + 1))
    if isinstance(node, HEADED) and (docstring := ast.get_docstring(node)):
      for line, part in paragraphs(docstring, node.body[0].lineno):
        if not SECTIONS.match(part) and not part.startswith(('  ', '>>>')):  # what is indented is code or a section
          yield line, part
  block: list[str] = []
  for line, code in enumerate([*source.splitlines(), ''], 1):
    comment = None if line in literals or '#' not in code else COMMENT.search(code)
    if comment and code.lstrip().startswith('#'):
      block.append(comment['text'])
      continue
    if block:
      yield line - len(block), '\n'.join(block)
      block = []
    if comment:
      yield line, comment['text']


def of_markdown(source: str):
  """Yields pairs (line, paragraph) of a page without its code, tables, headings, pictures and directives."""
  prose = re.sub(SKIPPED, lambda found: '\n' * found[0].count('\n'), source)
  for line, part in paragraphs(prose):
    if not re.match(r'\s*(\||#|<|\(|:::|!\[)', part):
      yield line, part


def files(*roots: str) -> list[pathlib.Path]:
  """Returns the Python files and pages under the roots, without generated ones."""
  found = [
    path for root in roots for path in ([ROOT / root] if (ROOT / root).is_file() else (ROOT / root).rglob('*.*'))
  ]
  skipped = tuple(str(ROOT / folder) + '/' for folder in GENERATED)
  return sorted(path for path in found if path.suffix in ('.py', '.md') and not str(path).startswith(skipped))


def offenders(path: pathlib.Path) -> list[str]:
  """Returns a line for each sentence of a file that has to be read twice: its place, what is wrong, its beginning."""
  source = path.read_text('utf-8')
  passages = of_python(source) if path.suffix == '.py' else of_markdown(source)
  place = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
  return [
    f'{place}:{line}: {", ".join(wrong)}: {sentence[:160]}'
    for line, passage in passages
    for sentence in sentences(passage)
    if (wrong := faults(sentence))
  ]


if __name__ == '__main__':
  print(*(line for path in files(*(sys.argv[1:] or (*CODE, *PAGES))) for line in offenders(path)), sep='\n')
