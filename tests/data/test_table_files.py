"""Files of tables: what may be meant otherwise than it is read is refused, or said."""

import math
import pathlib
import re

import numpy as np
import pytest

import gradleak as gl
from gradleak.data import table_files, tables

AGES = np.random.default_rng(0).integers(18, 90, 60).tolist()
ILL = [i % 3 % 2 for i in range(60)]


def read(tmp_path, column, name='x', schema=None, labels=ILL, split='train', delimiter=','):
  quoted = [f'"{value}"' if delimiter in str(value) else str(value) for value in column]
  lines = [delimiter.join(map(str, line)) for line in zip(AGES, quoted, labels, strict=True)]
  (tmp_path / 'a.csv').write_text('\n'.join([delimiter.join(('age', name, 'ill')), *lines]))
  return table_files.read(str(tmp_path / 'a.csv'), split, schema)


@pytest.mark.parametrize(
  ('column', 'said'),
  [
    (['unknown' if i == 7 else 10 + i % 30 for i in range(60)], "30 different numbers and 'unknown': list it under"),
    (['90+' if age > 80 else age for age in AGES], r"different numbers and '90\+': list it under"),
    ([f'{i % 20},{i % 7}' for i in range(60)], "numbers that are written as '0,0': write them with a point"),
    ([f'{1 + i % 20},000' for i in range(60)], "numbers that are written as '1,000'"),
    ([f'{i % 30} %' for i in range(60)], "numbers that are written as '0 %'"),
    ([f'€ {i % 30}' for i in range(60)], "numbers that are written as '€ 0'"),
    (range(60), 'seems to number the rows'),
    ([1000 - 3 * i for i in range(60)], 'seems to number the rows'),
    ([10**17 + i * i % 59 for i in range(60)], 'more digits than are kept'),
    ([f'{i:03}' for i in range(60)], '60 different texts in 60 rows'),
    ([f'{i % 50}_{i % 7}' for i in range(60)], '60 different texts in 60 rows'),
    (['yes', 'No', 'Yes'] * 20, "'yes' and 'Yes': write them alike"),
    (['1', '1.0', '1.00'] * 20, "one value only, '1'"),
    ([1, 2, 'inf'] * 20, "row 2 has 'inf' in the column 'x', expected a finite number"),
    ([*AGES[1:], '1e400'], "row 59 has '1e400' in the column 'x', expected a finite number"),
  ],
)
def test_columns_that_are_not_understood_are_refused(tmp_path, column, said):
  with pytest.raises(gl.UsageError, match=said):
    read(tmp_path, column)


def test_a_kind_that_is_given_is_taken(tmp_path):
  for column, kind in ((range(60), 'continuous'), (['yes', 'No', 'Yes'] * 20, 'categorical')):
    (field,) = read(tmp_path, column, schema={'columns': {'age': 'ignore', 'x': kind}}).schema.fields
    assert field.kind == kind
  minutes = [f'{i % 60:02}' for i in range(60)]
  assert read(tmp_path, minutes, schema={'columns': {'x': 'continuous'}}).schema.fields[1].high == 59


def test_equal_numbers_are_one_level_and_codes_are_texts(tmp_path):
  field = read(tmp_path, ['1', '1.0', '2', '2.00', '3e0', '-0'] * 10).schema.fields[1]
  assert field.kind == 'ordinal' and field.levels == ('0', '1', '2', '3')
  codes = read(tmp_path, ['007', '7', '07'] * 20).schema.fields[1]
  assert codes.kind == 'categorical' and codes.levels == ('007', '07', '7')
  assert table_files.classes_of(np.asarray(['1', '1.0', '0', '-0.0']))[1] == ('0', '1')
  assert table_files.classes_of(np.asarray(['01', '1']))[1] == ('01', '1')
  found = tables.infer({'x': ['1.0', '2', '1']}, {'x': {'kind': 'ordinal', 'levels': ['1', '2.0']}})
  np.testing.assert_array_equal(found.encode({'x': ['1', '1.00']})[0], found.encode({'x': ['1', '1.00']})[1])


@pytest.mark.parametrize('kind', ['ordinal', 'categorical'])
def test_a_listed_level_is_no_gap(tmp_path, kind):
  """'none' and 'NA' were gaps wherever they stood, and the levels of these names never occurred."""
  known = {'columns': {'x': {'kind': kind, 'levels': ['none', 'NA', 'severe']}}}
  made = read(tmp_path, ['none', 'NA', 'severe', '?'] * 15, schema=known)
  field = made.schema.fields[1]
  assert field.levels == ('none', 'NA', 'severe') and field.gaps
  shown = made.schema.texts(made.schema.cells(made.schema.encode({'age': [20] * 4, 'x': ['none', 'NA', 'severe', '']})))
  assert [row[1] for row in shown] == ['none', 'NA', 'severe', 'missing']
  with pytest.raises(gl.UsageError, match="has 'None', which is none of its levels"):
    read(tmp_path, ['None', 'NA', 'severe'] * 20, schema=known)
  with pytest.raises(gl.UsageError, match="'NA' is a gap of the schema and a level of the column 'x'"):
    read(tmp_path, ['none', 'NA', 'severe'] * 20, schema={**known, 'gaps': ['NA']})


@pytest.mark.parametrize('gap', ['-', '.', '#N/A', '<NA>', 'NaT', 'n.a.', '?', ''])
def test_usual_spellings_of_gaps_are_gaps(tmp_path, gap):
  field = read(tmp_path, [gap if i % 9 == 0 else age for i, age in enumerate(AGES)]).schema.fields[1]
  assert field.gaps and field.kind == 'continuous'


def test_further_gaps_are_named_by_the_schema(tmp_path):
  column = [-999 if i % 9 == 0 else age for i, age in enumerate(AGES)]
  made = read(tmp_path, column)
  assert made.schema.fields[1].low == -999
  assert 'x: -999 is far from all other values: list it under "gaps" of the schema if it is none' in made.notes
  made = read(tmp_path, column, schema={'gaps': [-999]})
  assert made.schema.fields[1].low >= 18 and made.schema.fields[1].gaps
  assert not any('far from' in note for note in made.notes)
  assert not any('far from' in note for note in read(tmp_path, [*AGES[1:], 99]).notes)


def test_outliers_that_decide_the_scale_are_said(tmp_path):
  """Any two of the other values are as near as what counts as exact."""
  rows = [10_000_000 if i == 7 else 30 + age for i, age in enumerate(AGES)]
  (told,) = [note for note in read(tmp_path, rows, split='test').notes if 'Outliers decide' in note]
  assert told.startswith('x: half of the values lie within')
  assert not any('Outliers decide' in note for note in read(tmp_path, [30 + age for age in AGES]).notes)


def test_headings_and_separators(tmp_path):
  made = read(tmp_path, [i % 5 for i in range(60)], name='"income, in EUR, a year, before"', delimiter=';')
  assert [field.name for field in made.schema.fields] == ['age', 'income, in EUR, a year, before']
  assert read(tmp_path, AGES[::-1], delimiter='|').rows.shape == (42, 2)
  made = read(tmp_path, ['a\u2028b', 'c'] * 30)
  assert made.rows.shape == (42, 3)
  path = tmp_path / 'b.csv'
  path.write_text('\n'.join(f'{age},"x{age % 3},{ill}' for age, ill in zip(AGES, ILL, strict=True)))
  with pytest.raises(gl.UsageError, match='cannot read the table'):
    table_files.read(str(path), 'train', {'names': ['a', 'b', 'c']})
  path.write_text('\n'.join(f'{age},{age % 3},{ill}' for age, ill in zip(AGES, ILL, strict=True)))
  with pytest.raises(gl.UsageError, match='which are no headings: give "names"'):
    table_files.read(str(path), 'train')
  assert len(table_files.read(str(path), 'train', {'names': ['a', 'b', 'c']}).rows) == 42
  path.write_text('a,b,c\n' + path.read_text())
  with pytest.raises(gl.UsageError, match='begins with the "names" of the schema'):
    table_files.read(str(path), 'train', {'names': ['a', 'b', 'c']})


def test_of_two_signs_that_fit_all_lines_decide(tmp_path):
  prices = [f'{i % 7},{i % 5}' for i in range(60)]
  lines = [f'{price};{ill}' for price, ill in zip(prices, ILL, strict=True)]
  path = tmp_path / 'prices.csv'
  path.write_text('\n'.join(['price, EUR;ill', *lines]))
  with pytest.raises(gl.UsageError, match=r"prices\.csv may be separated by ',' or ';': put values with such"):
    table_files.read(str(path), 'train')
  path.write_text('\n'.join(['price, EUR;ill', *lines[:-1], f'3;{ILL[-1]}']))
  assert list(table_files.columns_of(str(path), {})) == ['price, EUR', 'ill']


def test_a_column_without_a_heading_has_a_name(tmp_path):
  """Pages showed rows whose first column has none as running texts."""
  path = tmp_path / 'a.csv'
  held = [100 + i * i % 61 for i in range(60)]
  lines = [f'{own},{age},{ill}' for own, age, ill in zip(held, AGES, ILL, strict=True)]
  path.write_text('\n'.join([',age,ill', *lines]))
  found = gl.data.load(f'table:{path}')
  pieces = gl.modalities.of_config(found.settings).marked(found.samples[0], None)
  assert [piece.of for piece in pieces] == ['unnamed', 'age']
  path.write_text('\n'.join(['ill,,age', '0,100,20']))
  again = gl.data.read_like(path, found)
  assert gl.modalities.of_config(found.settings).marked(again.samples[0], None)[0].text == '100'
  kept = gl.data.table({'': held, 'age': AGES}, ILL, given={'': 'ignore'})
  assert [column['name'] for column in kept.settings['schema']['columns']] == ['age']


def test_the_schema_of_the_guide_is_taken(tmp_path):
  """It gave a sentence for the headings."""
  guide = (pathlib.Path(__file__).parents[2] / 'docs/guides/tables.md').read_text('utf-8')
  (given,) = re.findall('```json\n(.*?)```', guide, re.DOTALL)
  lines = [f'{i},{age},{("I", "II", "III")[i % 3]},{ill}' for i, (age, ill) in enumerate(zip(AGES, ILL, strict=True))]
  (tmp_path / 'a.csv').write_text('\n'.join(['id,age,stage,ill', *lines]))
  made = table_files.read(str(tmp_path / 'a.csv'), 'train', given)
  assert [field.kind for field in made.schema.fields] == ['continuous', 'ordinal']
  assert made.schema.sensitive == ('stage', 'age') and made.label == 'ill'


def test_blank_lines_are_no_rows(tmp_path):
  """A last line of spaces had one value of three, and empty lines above the headings hid which sign separates."""
  path = tmp_path / 'a.csv'
  lines = [f'{age};{age % 3};{ill}' for age, ill in zip(AGES, ILL, strict=True)]
  path.write_text('\n'.join(['', ' ', 'age;x;ill', *lines, '  ', '']))
  assert {name: len(values) for name, values in table_files.columns_of(str(path), {}).items()} == dict.fromkeys(
    ('age', 'x', 'ill'), 60
  )
  path.write_text('\n'.join(['age;x;ill', *lines, ';;', '']))
  assert table_files.columns_of(str(path), {})['x'][-1] == ''  # a row of gaps, whose label is asked for


def test_labels_that_are_no_classes_are_refused(tmp_path):
  values = [f'{v:.1f}' for v in np.random.default_rng(0).normal(size=60)]
  with pytest.raises(gl.UsageError, match='different numbers that are not whole'):
    read(tmp_path, AGES[::-1], labels=values)
  with pytest.raises(gl.UsageError, match="row 0 has no label, 'none' stands for a gap: call a class otherwise"):
    read(tmp_path, AGES[::-1], labels=['none', 'mild', 'severe'] * 20)
  with pytest.raises(gl.UsageError, match=r'row 1 has no label$'):
    read(tmp_path, AGES[::-1], labels=['mild', ''] * 30)
  ill = np.zeros(60, int)
  ill[np.random.default_rng(0).permutation(60)[:3]] = 1  # rows of the split test
  with pytest.raises(gl.UsageError, match=r'the split train of .* has rows of one class alone'):
    read(tmp_path, AGES[::-1], labels=ill)


@pytest.mark.parametrize('unit', [1e-300, 1e200])
def test_the_scale_of_a_column_does_not_matter(unit):
  values = np.random.default_rng(0).normal(size=50)
  (one,), (other,) = (tables.infer({'x': values * scale}, {'x': 'continuous'}).fields for scale in (1.0, unit))
  assert math.isclose(other.std, one.std * unit, rel_tol=1e-9) and math.isclose(other.mean, one.mean * unit)


@pytest.mark.parametrize('seed', [1, 3, 5])
def test_a_zero_is_written_as_one(seed):
  """Rounding in float32 made 1.263e-08 of it, and −0 among whole numbers."""
  rng = np.random.default_rng(seed)
  gain = rng.integers(1, 100_000, 60) * (rng.random(60) < 0.2)
  held = {'gain': gain, 'loss': -gain, 'share': rng.integers(0, 5, 60) / 2, 'size': np.exp(rng.normal(0, 2, 60))}
  schema = tables.infer(held, dict.fromkeys(held, 'continuous'), range(40))
  written = dict(zip(held, zip(*schema.texts(schema.cells(schema.encode(held))), strict=True), strict=True))
  assert all(written[name] == tuple(map(str, held[name])) for name in ('gain', 'loss'))
  assert written['share'] == tuple(f'{value:.4g}' for value in held['share'])
  assert '0' in written['gain'] and '0' in written['share'] and '0' not in written['size']
  assert [schema.fields[0].written(value) for value in (-0.3, -np.inf, np.inf)] == ['0', '-inf', 'inf']


def test_numbers_of_the_embedded_table_are_written_as_in_its_source():
  """A zero was 3.441e-11."""
  for split in ('train', 'test'):
    made = table_files.breast_cancer(split)
    assert not any('e-' in cell for row in made.schema.texts(made.schema.cells(made.rows)) for cell in row)


def test_a_column_without_spread_in_train_has_that_of_all_rows():
  values = [5.0] * 9 + [1e6]
  (field,) = tables.infer({'x': [*values, 2.5]}, fitted=range(9)).fields
  assert field.std > 1e5  # it was 1


def test_cells_and_labels_that_are_no_values_are_refused():
  """Of two equal names the first column was dropped, and NaN in labels [N, 1] was a class."""
  values, labels = np.random.default_rng(0).normal(size=(20, 2)), np.arange(20) % 2
  with pytest.raises(gl.UsageError, match='the names are a, a: expected different names'):
    gl.data.table(values, labels, names=['a', 'a'])
  with pytest.raises(gl.UsageError, match=r'labels are of shape \(20, 1\), expected one for each row: .*\[:, 0\]'):
    gl.data.table(values, labels[:, np.newaxis] * np.nan)
  with pytest.raises(gl.UsageError, match=r'a cell of the table is \[1, 2\], expected a number'):
    gl.data.table(values, [[1, 2], [1]] * 10)
  with pytest.raises(gl.UsageError, match='a cell of the table is array'):
    gl.data.table({'a': values}, labels)
  with pytest.raises(gl.UsageError, match=r"b'\\xff', expected text in UTF-8"):
    gl.data.table({'a': [b'\xff', b'u'] * 10}, labels)
  found = gl.data.table({'a': np.array([b'u', 'ü'.encode()] * 10)}, labels)
  assert found.settings['schema']['columns'][0]['levels'] == ['u', 'ü']
  values[3, 1] = -np.inf
  with pytest.raises(gl.UsageError, match="row 3 has '-inf' in the column 'column 1', expected a finite number"):
    gl.data.table(values, labels)
  with pytest.raises(gl.UsageError, match="row 1 has 'inf' as its label"):
    gl.data.table(values[:, :1], np.where(labels, np.inf, 0))
  bins = gl.data.table({'a': [1, np.inf] * 10}, labels, given={'a': 'categorical'})  # the name of a bin
  assert bins.settings['schema']['columns'][0]['levels'] == ['1', 'inf']


def test_long_whole_numbers_keep_their_digits():
  numbers = [2**53 + 1, 2**53, 2**53 + 2] * 10
  found = gl.data.table({'a': numbers}, numbers, given={'a': 'categorical'})
  levels = ['9007199254740992', '9007199254740993', '9007199254740994']
  assert list(found.class_names) == found.settings['schema']['columns'][0]['levels'] == levels
  assert tables.spelt('+0009007199254740993') == levels[1] and tables.spelt('9007199254740990.0') == '9007199254740990'
  with pytest.raises(gl.UsageError, match='levels of more digits than are kept'):
    gl.data.table({'a': numbers}, numbers, given={'a': 'ordinal'})


def test_frames_with_equal_names_are_refused():
  pandas = pytest.importorskip('pandas')
  frame = pandas.DataFrame(np.random.default_rng(0).normal(size=(20, 2)), columns=['a', 'a'])
  with pytest.raises(gl.UsageError, match='expected different names'):
    gl.data.table(frame, [0, 1] * 10)
  gaps = pandas.DataFrame({'a': pandas.array([1, 2, None, 4, 5] * 4, dtype='Int64')})
  assert gl.data.table(gaps, [0, 1] * 10).samples.shape[1] == 2


def test_moments_of_a_column_are_the_same_bits_in_any_order():
  """Processors add up in different orders, and a column's moments are part of what a run is."""
  values = np.random.default_rng(0).lognormal(0.0, 3.0, 2000).tolist()
  found = {tables._moments(np.random.default_rng(seed).permutation(values).tolist()) for seed in range(8)}
  assert len(found) == 1
  np.testing.assert_allclose(found.pop(), (np.mean(values), np.std(values)), rtol=1e-12)
  assert tables._moments([]) == (0.0, 0.0) and tables._moments([2e300, 4e300]) == (3e300, 1e300)
