"""Every code block of the documents runs as it stands there, and every link leads somewhere."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

import gradleak as gl
from tests import programs
from tests.docs import blocks as documents
from tests.docs import outputs
from tests.docs.blocks import DOCUMENTS, ROOT, Block, blocks, check_command, check_names, commands, slow_from

ALL = {path: blocks(path) for path in DOCUMENTS}
PYTHON = {path: [block for block in found if block.language == 'python'] for path, found in ALL.items()}
SHELL = [block for found in ALL.values() for block in found if block.language == 'sh']
SHORT = [path for path, python in PYTHON.items() if slow_from(python)]
METHODS = (*gl.attacks.REGISTRY, *gl.servers.REGISTRY, *gl.defenses.REGISTRY)
LONG = [path for path, python in PYTHON.items() if slow_from(python) < len(python)]

TABLES = (ROOT / 'results' / 'tables' / 'mini').glob('*.json')
# Folders of pages that the build writes -> names of what it writes there.
MADE = {
  ROOT / 'docs' / 'results': {'index.md', *(f'{path.stem}.md' for path in TABLES)},
  ROOT / 'docs' / 'methods': {
    f'{name}.md' for name in (*METHODS, 'index', 'attacks', 'defenses', 'malicious_servers', 'models')
  },
  ROOT / 'docs' / 'api': {'index.md'},
}


def name(path):
  return str(path.relative_to(ROOT))


def run(path, python, folder, monkeypatch):
  """Runs blocks in order, in a folder of their own; what they print stands behind them."""
  monkeypatch.chdir(folder)
  stored = outputs.stored(path)
  for line, text in outputs.executed(python, {'__name__': 'document'}).items():
    compare(f'{name(path)}:{line}', text, stored.get(line, ''))


def compare(place, text, stored):
  """Compares what a block prints with what its document says."""
  again = f'python -m tests.docs.outputs {place.partition(":")[0]}'
  assert outputs.agree(text, stored), f'{place} prints something else, {again} writes it:\n{text}\n\nnot\n{stored}'


@pytest.mark.long
@pytest.mark.usefixtures('fast_compilation')
@pytest.mark.parametrize('path', SHORT, ids=name)
def test_python_runs(path, tmp_path, monkeypatch):
  run(path, PYTHON[path][: slow_from(PYTHON[path])], tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize('path', LONG, ids=name)
def test_long_python_runs(path, tmp_path, monkeypatch):
  run(path, PYTHON[path], tmp_path, monkeypatch)


@pytest.mark.parametrize('path', [path for path in DOCUMENTS if PYTHON[path]], ids=name)
def test_python_names_what_is_there(path):
  check_names(PYTHON[path])


@pytest.mark.parametrize('block', SHELL, ids=str)
def test_commands_have_valid_flags_and_objects(block):
  found = commands(block)
  assert found
  for words in found:
    check_command(words)


@pytest.fixture(scope='module')
def checkout(tmp_path_factory):
  """Returns a copy of the checkout, in which commands write what they write."""
  folder = tmp_path_factory.mktemp('checkout') / 'gradleak'
  left_out = shutil.ignore_patterns('.*', '__pycache__', '*.egg-info', '_build', 'api', 'site')
  shutil.copytree(ROOT, folder, ignore=lambda place, names: left_out(place, names) | _runs(place, names))
  return folder


def _runs(place, names):
  """Returns the results of earlier runs: a command would find its own finished there."""
  return set(names) - {'leaderboard', 'tables'} if pathlib.Path(place) == ROOT / 'results' else set()


@pytest.mark.slow
@pytest.mark.parametrize('block', [block for block in SHELL if block.runs], ids=str)
def test_commands_run(block, checkout):
  """Installing, `make` and data that have to be downloaded are left out."""
  own = [w for w in commands(block) if w[0] in ('python', 'gradleak') and not documents.needs_data(w)]
  own = [words for words in own if words[1:3] != ['-m', 'venv']]
  if not own:
    pytest.skip('it installs, makes or downloads')
  place = pathlib.Path(sys.executable).parent
  environment = {**os.environ, 'PYTHONPATH': str(checkout), 'PATH': f'{place}{os.pathsep}{os.environ["PATH"]}'}
  printed = ''
  for words in own:
    done = subprocess.run(words, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f'{block}: {" ".join(words)}\n{done.stderr[-3000:]}'
    printed += done.stdout
  if stored := outputs.stored(block.path).get(block.line):
    compare(str(block), outputs.trimmed(printed), stored)


@pytest.mark.parametrize('path', DOCUMENTS, ids=name)
def test_no_output_is_typed(path):
  """What looks like output stands behind a block that prints it, where a test compares."""
  assert path.read_text('utf-8').count(f'\n{outputs.OPEN}\n') == len(outputs.stored(path))


def test_outputs_agree_where_figures_differ_and_nowhere_else():
  table = 'attack  verdict  dB\ncsdlg  exact  31.5'
  assert outputs.agree(table, table.replace('31.5', '−2')) and outputs.agree(table, table.replace('exact', 'traces'))
  assert not outputs.agree(table, table.replace('attack', 'defense'))
  assert not outputs.agree(table, table + '\nmore and more and more and more') and not outputs.agree(table, '')


def test_outputs_are_written_behind_their_blocks(tmp_path):
  path, text = tmp_path / 'page.md', '# A\n\n```python\nprint(1)\n```\n\n```python\nx = 2\n```\n\nEnd.\n'
  path.write_text(text)
  for found in ('one', 'two\nlines'):
    outputs.write(path, {4: found})
    assert outputs.stored(path) == {4: found}
  assert path.read_text() == text.replace('```\n\n```python\nx', '```\n\n```text\ntwo\nlines\n```\n\n```python\nx')
  outputs.write(path, {})
  assert path.read_text() == text


def test_what_is_not_run_has_a_reason():
  """Prints what no test runs, with the reason that the document gives."""
  left = [block for found in ALL.values() for block in found if block.mark.startswith(('not run', 'needs'))]
  for block in left:
    print(f'{block}: {block.mark}')
  assert all(block.mark.split(': ', 1)[1].strip() for block in left)
  assert sum(block.mark.startswith('not run') for block in left) < sum(map(len, ALL.values())) / 5


def anchors(path):
  """Returns the anchors of a document's headings, as GitHub and MyST make them."""
  text = re.sub(r'^```.*?^```', '', path.read_text('utf-8'), flags=re.M | re.S)
  headings = re.findall(r'^#+ (.+)$', text, re.M)
  return {re.sub(r'[^\w\- ]', '', heading.lower()).replace(' ', '-') for heading in headings}


@pytest.mark.parametrize('path', DOCUMENTS, ids=name)
def test_relative_links_lead_somewhere(path):
  text = re.sub(r'^```.*?^```|`[^`\n]*`', '', path.read_text('utf-8'), flags=re.M | re.S)
  for target in re.findall(r'\]\(([^)\s]+)\)', text):
    file, _, anchor = target.partition('#')
    if '://' in target or file.startswith('/'):
      continue
    place = (path.parent / file).resolve() if file else path
    if place.parent in MADE:
      assert path != ROOT / 'README.md' and place.name in MADE[place.parent], f'{name(path)} links to {target}'
      continue
    assert place.exists() and ROOT in place.parents, f'{name(path)} links to {target}'
    assert not anchor or anchor in anchors(place), f'{name(path)} links to {target}: there is no such heading'


# ---- the checks themselves


def block(language, code, mark=''):
  return Block(ROOT / 'README.md', 1, language, mark, code)


@pytest.mark.parametrize(
  ('code', 'words'),
  [
    ('import gradleak as gl\ngl.attacks.csdgl()', "has no 'csdgl'"),
    ('from gradleak import nothing', 'has no nothing'),
    ('import gradleak as gl\ngl.defenses.prune(ratio=0.9)', "takes no 'ratio'"),
    ('import gradleak as gl\ngl.attacks.fidel(step=0.9)', "takes no 'step'"),
    ('print(undefined)', "no block defines 'undefined'"),
  ],
)
def test_wrong_python_is_found(code, words):
  with pytest.raises(AssertionError, match=re.escape(words)):
    check_names([block('python', code)])


@pytest.mark.parametrize(
  ('code', 'words'),
  [
    ('python launch/audit.py --step=3', 'step'),
    ("gradleak audit --attacks='csdgl'", 'csdgl'),
    ("gradleak audit --defenses='prune(ratio=1)'", 'ratio'),
    ('gradleak audit --local_epochs=2', 'local_epochs'),
    ('gradleak sweep --models=lenett', 'lenett'),
    ('gradleak audits', 'audits'),
    ('python launch/audits.py', 'audits'),
    ('gradleak reproduce --experiment=dcs2_99', 'dcs2_99'),
    ('make everything', 'everything'),
    ('make audit WORKDIRS=there', 'WORKDIRS'),
    ('pip install gradleak', 'checkout'),
    ("pip install -e '.[everything]'", 'everything'),
    ('rm -rf results', 'rm'),
  ],
)
def test_wrong_commands_are_found(code, words):
  with pytest.raises(Exception, match=words):
    check_command(commands(block('sh', code))[0])


def test_blocks_are_found_with_their_marks():
  text = '<!-- slow -->\n```python\na\n```\n\n```\nmake audit\n```\n```text\nb\n```\n```\nno command\n```\n'
  found = blocks(ROOT / 'README.md', text)
  assert [(each.line, each.language, each.mark) for each in found] == [(3, 'python', 'slow'), (7, 'sh', '')]
  with pytest.raises(ValueError, match="unknown mark 'slowly'"):
    blocks(ROOT / 'README.md', '<!-- slowly -->\n```python\na\n```\n')


def test_commands_are_words_without_comments():
  given = "A=1 make audit  # says so\npython launch/audit.py \\\n  --attacks='a;b' &\n"
  assert commands(block('sh', given)) == [['make', 'audit'], ['python', 'launch/audit.py', '--attacks=a;b']]


def test_the_root_is_that_of_the_programs():
  assert programs.ROOT == ROOT and (ROOT / 'README.md') in DOCUMENTS
