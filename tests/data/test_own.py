"""Rows and texts of a user's own file, encoded as those of a dataset."""

import numpy as np
import pytest

import gradleak as gl
from gradleak.data import tokenisers

ROWS = [
  'age,town,ill',
  *(f'{20 + 0.37 * (i % 31):.2f},{"north" if i % 3 else "south"},{i % 2}' for i in range(40)),
]


def written(path, lines):
  path.write_text('\n'.join(lines) + '\n')
  return path


@pytest.fixture
def table(tmp_path):
  return gl.data.load(f'table:{written(tmp_path / "known.csv", ROWS)}', 'train')


def test_rows_in_another_order_are_encoded_by_the_schema(table, tmp_path):
  whole = gl.data.load(table.name, 'test')
  schema = gl.data.tables.from_json(table.settings['schema'])
  cells = schema.texts(schema.cells(whole.samples))
  lines = [
    'ill;town;age',
    *(f'{table.class_names[t]};{town};{age}' for t, (age, town) in zip(whole.targets, cells, strict=True)),
  ]
  found = gl.data.read_like(written(tmp_path / 'own.csv', lines), table)
  np.testing.assert_array_equal(found.samples, whole.samples)
  np.testing.assert_array_equal(found.targets, whole.targets)
  assert found.settings == table.settings and found.class_names == table.class_names


def test_one_row_is_enough_and_a_class_may_be_spelt_as_a_number(table, tmp_path):
  found = gl.data.read_like(written(tmp_path / 'own.csv', ['town,age,ill', 'north,30,1.0']), table)
  assert found.samples.shape == (1, table.samples.shape[1]) and found.targets.tolist() == [1]


@pytest.mark.parametrize(
  ('lines', 'label', 'words'),
  [
    (['age,ill', '30,1'], None, "the column 'town' is missing"),
    (['age,town', '30,north'], None, 'no column beside the columns of .* name the one of the class'),
    (['sick,of,age,town', '1,x,30,north'], None, 'sick, of beside the columns'),
    (['age,town,ill', '30,north,2'], None, "row 0 of .* has the class '2', and those of .* are 0, 1"),
    (['age,town,ill', '30,west,1'], None, 'west'),
    (['age,town,ill', '30,north,1'], 'sick', "column for the label of .* 'sick'"),
    (['age,town,ill'], None, '0 rows: 1 or more'),
    (['age,town,ill', '30,north,1', '1e300,north,1'], None, "row 1 has '1e300' in the column 'age', too far from"),
  ],
)
def test_what_does_not_fit_the_table_is_refused(table, tmp_path, lines, label, words):
  with pytest.raises(gl.UsageError, match=words):
    gl.data.read_like(written(tmp_path / 'own.csv', lines), table, None if label is None else {'label': label})


def test_of_several_other_columns_the_class_is_named_or_the_last(table, tmp_path):
  path = written(tmp_path / 'own.csv', ['number,ill,age,town', '7,1,30,north'])
  assert gl.data.read_like(path, table, {'label': 'ill'}).targets.tolist() == [1]
  path = written(tmp_path / 'own.csv', ['number,age,town,sick', '7,30,north,1'])
  assert gl.data.read_like(path, table).targets.tolist() == [1]


def test_the_class_stands_under_the_heading_that_it_has_in_the_dataset(table, tmp_path):
  path = written(tmp_path / 'own.csv', ['ill,age,town,smoker', '0,30,north,1'])
  columns = {'age': [20 + 0.37 * i for i in range(20)], 'town': ['north', 'south'] * 10, 'ill': [0, 0, 1, 1] * 5}
  for known in (table, gl.data.table(columns, 'ill')):
    assert gl.data.read_like(path, known).targets.tolist() == [0]
    assert gl.data.read_like(path, known, {'label': 'smoker'}).targets.tolist() == [1]


def test_booleans_are_spelt_as_pandas_writes_them(tmp_path):
  columns = {
    'age': [20 + 0.37 * i for i in range(20)],
    'smoker': [True, False] * 10,
    'ill': [True, True, False] * 6 + [False] * 2,
  }
  known = gl.data.table(columns, 'ill')
  found, same = (
    gl.data.read_like(written(tmp_path / 'own.csv', ['age,smoker,ill', line]), known)
    for line in ('21,True,False', '21,true,false')
  )
  np.testing.assert_array_equal(found.samples, same.samples)
  assert found.targets.tolist() == same.targets.tolist() == [0]


def test_gaps_and_headings_are_those_of_the_schema(tmp_path):
  """A text that stands for a missing value is none of the column's numbers, in the user's own rows as in the known."""
  schema = {'gaps': ['-9'], 'names': ['age', 'town', 'ill']}
  lines = [*ROWS[1:], *(f'-9,north,{i % 2}' for i in range(8))]
  known = gl.data.load(f'table:{written(tmp_path / "known.csv", lines)}', 'train', schema=schema)
  found, gap = (
    gl.data.read_like(written(tmp_path / 'own.csv', [f'{age},south,1']), known, schema) for age in ('-9', '')
  )
  np.testing.assert_array_equal(found.samples, gap.samples)
  assert found.targets.tolist() == [1]


def test_texts_are_tokens_of_the_dataset(tmp_path):
  notes = gl.data.load('notes', 'test', limit=3)
  held = [gl.data.text.read('notes', 'test').read(index) for index in range(3)]
  lines = ['label\ttext', *(f'{notes.class_names[t]}\t{one}' for t, one in zip(notes.targets, held, strict=True))]
  found = gl.data.read_like(written(tmp_path / 'own.tsv', lines), notes)
  np.testing.assert_array_equal(found.samples, notes.samples)
  np.testing.assert_array_equal(found.targets, notes.targets)
  assert found.notes == ()
  cut = gl.data.read_like(written(tmp_path / 'own.tsv', [lines[0], lines[1] + ' and on ' * 30]), notes)
  assert 'are cut' in cut.notes[0] and 'not in the vocabulary' in cut.notes[1]
  with pytest.raises(gl.UsageError, match=r"row 0 of .* has the class ''"):
    gl.data.read_like(written(tmp_path / 'own.txt', held), notes)


@pytest.mark.parametrize('words', [4000, 9000])
def test_texts_are_not_encoded_by_a_vocabulary_of_another_process(words, tmp_path, monkeypatch):
  path = written(tmp_path / 'a.txt', [' '.join(f'w{word}' for word in range(i, words, 30)) for i in range(30)])
  known = gl.data.load(f'text:{path}', 'train', length=8)
  own = written(tmp_path / 'own.txt', ['w1 w2 w3'])
  expected = gl.data.read_like(own, known).samples
  monkeypatch.setattr(tokenisers, '_KNOWN', {})  # as a process that was handed the data set
  if words < tokenisers.MOST_STORED:
    np.testing.assert_array_equal(gl.data.read_like(own, known).samples, expected)
  else:
    with pytest.raises(gl.UsageError, match=r'not in this process, .*: load the data set here'):
      gl.data.read_like(own, known)


@pytest.mark.parametrize('labels', [('1.0', '2.0', '4.5'), ('+1', '-1')])
def test_the_file_of_a_dataset_has_its_classes(tmp_path, labels):
  path = written(tmp_path / 'a.csv', ['text,label', *(f'word{i} here,{labels[i % len(labels)]}' for i in range(30))])
  known = gl.data.load(f'text:{path}', 'train', length=8)
  found = gl.data.read_like(path, known)
  assert found.targets[[0, 1, 2, 3, 5]].tolist() == known.targets[:5].tolist()


def test_images_are_no_rows(tmp_path):
  with pytest.raises(gl.UsageError, match='digits has images'):
    gl.data.read_like(tmp_path / 'own.csv', gl.data.load('digits', limit=1))
