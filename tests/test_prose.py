"""Every sentence of code and documents can be read once: `tests/prose.py` has the rule."""

import pytest

from tests import prose

# Files that are still to be rewritten.
# Sentences, each with what is wrong with it; nothing for those that are clear.
TABLE = [
  (' '.join(['word'] * 26) + '.', ['26 words']),
  (' '.join(['word'] * 25) + ' `and code`.', ['26 words']),
  (' '.join(['word'] * 25) + '.', []),
  ('It took 1, 2, 3.5 and 40 s on 8 cores.', ['5 figures']),
  ('The cosines are 0.2, 0.5, 0.7 and 0.9 in [table 12](docs/34.md) for `csdlg(steps=400)`.', ['5 figures']),
  ('The cosines are 0.2, 0.5, 0.7 and 0.9 in [this table](docs/34.md) for `csdlg(steps=400)` on CIFAR10.', []),
  ('An attack: it has steps: 400.', ['two colons']),
  ('It has one argument: `steps: int`.', []),
  ('Of eight images one is shown.', ['begins with "Of"']),
  ('Often one of eight images is shown.', []),
  ('Soteria hides it, too.', ['ends in "too" or "alone"']),
  ('(The loss compares directions alone.)', ['ends in "too" or "alone"']),
  ('Alone among them, Soteria prunes features of the last layer, and OUTPOST, too, adds noise.', []),
  ('The message says what users can mend.', ['"mend"']),
  ('The amendment of an attacker is its own.', []),
]
PYTHON = '''
"""A module.

    indented(code) # is: no: prose

Of a module.
"""
x = {'#': 1}  # Of a comment.


def double(y):
  """Of a function: it doubles.

  Args:
    y: of any shape: of any size.
  """
  text = """
  # Of a text.
  """
  # A comment over
  # two lines, too.
  return y, text
'''
MARKDOWN = """
# Of a heading

Of a paragraph, see
[it](page.md).

- An item.
- Of an item.

| of | a table | 1 | 2 | 3 | 4 | 5 |
|---|---|---|---|---|---|---|

```
Of a code block.
```
"""


@pytest.mark.parametrize(('sentence', 'expected'), TABLE)
def test_faults_of_a_sentence(sentence, expected):
  assert prose.faults(sentence) == expected


@pytest.mark.parametrize(
  ('name', 'text', 'lines'), [('a.py', PYTHON, [6, 8, 12, 20]), ('a.md', MARKDOWN, [4, 7])], ids=['python', 'markdown']
)
def test_offenders_of_a_file(tmp_path, name, text, lines):
  (tmp_path / name).write_text(text)
  assert sorted(int(line.split(':')[1]) for line in prose.offenders(tmp_path / name)) == lines


def test_no_sentence_has_to_be_read_twice():
  found = [line for path in prose.files(*prose.CODE, *prose.PAGES) for line in prose.offenders(path)]
  assert not found
