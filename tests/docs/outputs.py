"""What the blocks of the documents print: it stands behind each block, in a fence of ```text, and is never typed.

`python -m tests.docs.outputs PATH…` runs documents, slow blocks included, and writes what they print; without a path
all of them. Beside Python blocks these are the commands of `SHOWN`. A test runs the quick blocks and compares.
"""

import contextlib
import difflib
import io
import os
import pathlib
import re
import subprocess
import sys
import tempfile

from tests.docs.blocks import DOCUMENTS, ROOT, blocks, commands

SHOWN = ('python examples/', 'gradleak audit')  # how commands begin whose output is kept
ALIKE = 0.7  # share of the words that another version or processor leaves as they are
OPEN, CLOSE = '```text', '```'
_NUMBER = re.compile(r'[-+−]?\d[\d.,]*(?:e[-+]?\d+)?')


def kept(path, text=None) -> list:
  """Returns the blocks of a document whose output is kept, in their order."""
  return [block for block in blocks(path, text) if block.language == 'python' or _shown(block)]


def _shown(block) -> bool:
  return all(' '.join(words).startswith(SHOWN) for words in commands(block))


def place(lines, block) -> tuple[int, int]:
  """Returns where the output of a block stands among the lines of its document; an empty range where there is none."""
  start = block.line + block.code.count('\n')  # the line behind the fence that ends it
  if lines[start : start + 2] != ['', OPEN]:
    return start, start
  return start, lines.index(CLOSE, start) + 1


def stored(path) -> dict[int, str]:
  """Returns line of a block -> its output in the document, without those that have none."""
  lines = path.read_text('utf-8').split('\n')
  places = {block.line: place(lines, block) for block in kept(path)}
  return {line: '\n'.join(lines[start + 2 : end - 1]) for line, (start, end) in places.items() if start < end}


def executed(python, namespace) -> dict[int, str]:
  """Runs blocks in order in one namespace; returns line of a block -> what it printed, if anything."""
  printed = {}
  for block in python:
    if block.runs:
      out = io.StringIO()
      code = '\n' * (block.line - 1) + block.code  # so that a traceback names the line of the document
      with contextlib.redirect_stdout(out):
        exec(compile(code, str(block.path), 'exec'), namespace)
      if text := trimmed(out.getvalue()):
        printed[block.line] = text
  return printed


def called(block, folder) -> str:
  """Runs the commands of a block in a folder; returns what they print."""
  texts = []
  environment = {**os.environ, 'PYTHONPATH': os.pathsep.join([str(ROOT), os.environ.get('PYTHONPATH', '')])}
  for words in commands(block):
    words = ['python', f'launch/{words[1]}.py', *words[2:]] if words[0] == 'gradleak' else words
    words = [sys.executable, ROOT / words[1], *words[2:]]
    done = subprocess.run(words, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    texts.append(done.stdout)
  return trimmed(''.join(texts))


def trimmed(text: str) -> str:
  """Returns what was printed, without spaces at the ends of lines."""
  return '\n'.join(line.rstrip() for line in text.strip('\n').splitlines())


def agree(one: str, other: str) -> bool:
  """Returns whether two outputs say the same but for their figures, which versions and processors change."""
  lines, others = (_NUMBER.sub('#', text).splitlines() for text in (one, other))
  words, known = ([word for line in part for word in line.split()] for part in (lines, others))
  return lines[:1] and words[:1] == known[:1] and difflib.SequenceMatcher(None, words, known).ratio() >= ALIKE


def main(paths) -> None:
  """Runs documents and writes what they print."""
  for path in paths:
    every = kept(path)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
      found = {block.line: called(block, folder) for block in every if block.language == 'sh' and block.runs}
      found |= executed([block for block in every if block.language == 'python'], {'__name__': 'document'})
    write(path, found)
    print(f'{path.relative_to(ROOT)}: {len(found)} outputs', flush=True)


def write(path, found) -> None:
  """Writes outputs behind the blocks of a document; what does not run here keeps its own."""
  lines = path.read_text('utf-8').split('\n')
  for block in reversed(kept(path)):
    start, end = place(lines, block)
    if text := found.get(block.line):
      lines[start:end] = ['', OPEN, *text.split('\n'), CLOSE]
    elif block.runs:
      lines[start:end] = []
  path.write_text('\n'.join(lines), 'utf-8')


if __name__ == '__main__':
  os.environ.setdefault('JAX_PLATFORMS', 'cpu')
  main([pathlib.Path(path).resolve() for path in sys.argv[1:]] or DOCUMENTS)
