"""What the blocks of the documents print: stored in docs/outputs.json, shown by the site behind each block.

These are the Python blocks, and the commands of `SHOWN`.

`python -m tests.docs.outputs PATH…` runs documents, slow blocks included, and stores what they print; without a path
all of them. A test runs the quick blocks and compares.
"""

import contextlib
import difflib
import hashlib
import io
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

from gradleak.core.storage import write_atomically
from tests.docs.blocks import DOCUMENTS, ROOT, blocks, commands

STORED = ROOT / 'docs' / 'outputs.json'
SHOWN = ('python examples/', 'gradleak audit')  # how commands begin whose output is kept
ALIKE = 0.7  # share of the words that another version or processor leaves as they are
_NUMBER = re.compile(r'[-+−]?\d[\d.,]*(?:e[-+]?\d+)?')


def key(block) -> str:
  """Returns what an output is stored under: it is another one once the code changes."""
  return hashlib.sha256(block.code.encode()).hexdigest()[:12]


def kept(path, text=None) -> list:
  """Returns the blocks of a document whose output is kept, in their order."""
  return [block for block in blocks(path, text) if block.language == 'python' or _shown(block)]


def _shown(block) -> bool:
  return all(' '.join(words).startswith(SHOWN) for words in commands(block))


def printed_by(block, folder) -> str:
  """Runs the commands of a block in a folder; returns what they print."""
  texts = []
  environment = {**os.environ, 'PYTHONPATH': os.pathsep.join([str(ROOT), os.environ.get('PYTHONPATH', '')])}
  for words in commands(block):
    words = [sys.executable, ROOT / 'launch' / f'{words[1]}.py', *words[2:]] if words[0] == 'gradleak' else words
    words = [
      sys.executable if word == 'python' else ROOT / word if str(word).endswith('.py') else word for word in words
    ]
    texts.append(
      subprocess.run(words, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    )
  return trimmed(''.join(texts))


def trimmed(text: str) -> str:
  """Returns what was printed, without spaces at the ends of lines."""
  return '\n'.join(line.rstrip() for line in text.rstrip().splitlines())


def executed(python, namespace) -> dict[str, str]:
  """Runs blocks in order in one namespace; returns key -> what each printed, if anything."""
  printed = {}
  for block in python:
    if block.runs:
      out = io.StringIO()
      code = '\n' * (block.line - 1) + block.code  # so that a traceback names the line of the document
      with contextlib.redirect_stdout(out):
        exec(compile(code, str(block.path), 'exec'), namespace)
      if text := trimmed(out.getvalue()):
        printed[key(block)] = text
  return printed


def read() -> dict[str, dict[str, str]]:
  """Returns document -> key -> output."""
  return json.loads(STORED.read_text('utf-8')) if STORED.is_file() else {}


def name(path) -> str:
  """Returns a document as it is stored."""
  return path.relative_to(ROOT).as_posix()


def agree(one: str, other: str) -> bool:
  """Returns whether two outputs say the same but for their figures, which versions and processors change."""
  lines, others = (_NUMBER.sub('#', text).splitlines() for text in (one, other))
  words, known = ([word for line in part for word in line.split()] for part in (lines, others))
  return lines[0].split() == others[0].split() and difflib.SequenceMatcher(None, words, known).ratio() >= ALIKE


def main(paths) -> None:
  """Runs documents and stores what they print."""
  for path in paths:
    stored = read()
    every = kept(path)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
      found = {key(block): printed_by(block, folder) for block in every if block.language == 'sh' and block.runs}
      found |= executed([block for block in every if block.language == 'python'], {'__name__': 'document'})
    known = {one: stored.get(name(path), {}).get(one) for one in map(key, every) if one not in found}
    stored[name(path)] = found | {one: text for one, text in known.items() if text}  # of blocks that do not run here
    stored = {one: texts for one, texts in sorted(stored.items()) if texts}
    write_atomically(STORED, json.dumps(stored, indent=1, ensure_ascii=False) + '\n')
    print(f'{name(path)}: {len(found)} outputs', flush=True)


if __name__ == '__main__':
  os.environ.setdefault('JAX_PLATFORMS', 'cpu')
  main([pathlib.Path(path).resolve() for path in sys.argv[1:]] or DOCUMENTS)
