"""Tables: their columns, how rows are judged, and that audits, closed forms and TabLeak run on them."""

import contextlib
import dataclasses
import json
import math
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradleak as gl
from gradleak.attacks.matching.samples import starting_labels
from gradleak.data import tables
from gradleak.modalities import TABLE, of_config, of_rows, table
from gradleak.modalities import tables as judged
from gradleak.report import figures, marked
from gradleak.summary.shown import embedded
from tests import programs
from tests.circle import said_of_images
from tests.report.parsing import Page

pytestmark = pytest.mark.usefixtures('fast_compilation')

COLUMNS = {
  'age': [30, 41, 52, 63, 28, 39, 44, 57, 35, 61, 48, 26, 33],
  'income': [1.5, 2.25, '?', 4.0, 1.0, 3.5, 2.0, 5.5, 1.75, 2.5, 3.25, 0.5, 2.75],
  'stage': ['I', 'II', 'III', 'I', 'II', 'III', 'I', 'II', 'I', 'I', 'II', 'I', 'III'],
  'job': [
    'nurse', 'clerk', '', 'clerk', 'nurse', 'smith', 'clerk', 'nurse', 'smith', 'clerk', 'nurse', 'clerk', 'clerk',
  ],
  'smoker': ['yes', 'no', 'no', 'yes', 'no', 'no', 'yes', 'no', 'no', 'yes', 'no', 'no', 'yes'],
  'children': [0, 1, 2, 3, 0, 1, 2, 0, 0, 1, 2, 3, 1],
}  # fmt: skip
KNOWN = {'stage': {'kind': 'ordinal', 'levels': ['I', 'II', 'III']}}


@pytest.fixture(scope='module')
def schema():
  return tables.infer(COLUMNS, KNOWN, sensitive=['income'])


@pytest.fixture(scope='module')
def mixed():
  """A mixed table of 300 rows, of which the class can be told."""
  rng = np.random.default_rng(0)
  kind = rng.integers(0, 4, 300)
  columns = {
    'kind': np.asarray(['a', 'b', 'c', 'd'])[kind],
    'flag': np.where(rng.random(300) < 0.4, 'on', 'off'),
    **{f'x{i}': rng.normal(kind * 0.2, 1.0) for i in range(6)},
  }
  return {split: gl.data.table(columns, kind % 2, split=split, name='mixed') for split in ('test', 'train')}


@pytest.fixture(scope='module')
def scenario(mixed):
  test, train = mixed['test'], mixed['train']
  model = gl.models.mlp(2, 'default', widths='100-100')
  public, kind = (train.samples[:40], train.targets[:40]), of_config(test.settings)
  return gl.scenario(
    model, test.samples, test.targets, key=jax.random.key(0), modality=kind, public=public, dataset='mixed',
    gallery=gl.data.Candidates(train.samples, train.targets),
  )  # fmt: skip


def audit(scenario, attacks, trials=2, defenses=(None,), **settings):
  settings = {'controls': 4, 'progress': 'none', **settings}
  return gl.audit(jax.random.key(1), scenario, list(defenses), attacks, trials, **settings)


def test_kinds_of_columns_are_inferred(schema):
  found = {field.name: field for field in schema.fields}
  assert {name: field.kind for name, field in found.items()} == {
    'age': 'continuous', 'income': 'continuous', 'stage': 'ordinal', 'job': 'categorical', 'smoker': 'binary',
    'children': 'ordinal',
  }  # fmt: skip
  assert found['job'].levels == ('clerk', 'nurse', 'smith') and found['job'].gaps and found['job'].width == 4
  assert found['income'].gaps and found['income'].width == 2 and found['income'].step == 0
  assert found['age'].step == 1 and found['age'].mean == pytest.approx(np.mean(COLUMNS['age']))
  assert found['stage'].values.tolist() == [0, 1, 2] and found['children'].values.tolist() == [0, 1, 2, 3]
  assert schema.width == 1 + 2 + 1 + 4 + 2 + 1 and sum(found['job'].shares) == pytest.approx(1)
  assert tables.from_json(json.loads(json.dumps(schema.to_json()))) == schema


def test_rows_are_encoded_and_read_again(schema):
  rows = schema.encode(COLUMNS)
  assert rows.dtype == np.float32 and rows.shape == (13, schema.width)
  table(schema).check(rows)
  texts = schema.texts(schema.cells(rows))
  assert texts[2] == ['52', 'missing', 'III', 'missing', 'no', '2']
  assert texts[1] == ['41', '2.25', 'II', 'clerk', 'no', '1']
  ages = (np.asarray(COLUMNS['age']) - np.mean(COLUMNS['age'])) / np.std(COLUMNS['age'])
  np.testing.assert_allclose(rows[:, 0], ages, rtol=1e-5)
  assert schema.texts(schema.cells(schema.usual[np.newaxis]))[0] == ['41', '2.375', 'II', 'clerk', 'no', '1']


def test_cells_are_moved_to_what_a_column_may_have(schema):
  row = schema.encode(COLUMNS)[:1].astype(float)
  row[0, 0] += 0.2 / 11.8  # years
  row[0, 3] += 0.3
  row[0, 4:8] = [0.2, 0.9, 0.4, 0.1]
  assert schema.texts(schema.cells(row))[0][:4] == ['30', '1.5', 'I', 'nurse']
  row[0, 0], row[0, 2] = 100, 0.7
  assert schema.texts(schema.cells(row))[0][:2] == ['63', 'missing']
  row[0, 5] = np.nan
  assert schema.texts(schema.cells(row))[0][3] == '–'


def test_how_a_network_scales_its_numbers(schema):
  assert schema.scaling is None and from_file(schema) == schema and 'scaling' not in schema.to_json()['columns'][0]
  given = {**KNOWN, 'age': {'scale': 10}, 'stage': {**KNOWN['stage'], 'center': 1}}
  own = tables.infer(COLUMNS, given)
  assert from_file(own) == own
  np.testing.assert_array_equal(own.encode(COLUMNS), schema.encode(COLUMNS))  # as all rows are
  mean, std = own.scaling
  taken = (own.encode(COLUMNS) - mean[None]) / std[None]
  np.testing.assert_allclose(taken[:, 0], np.asarray(COLUMNS['age']) / 10, rtol=1e-6)
  np.testing.assert_allclose(taken[:3, 3], [-1, 0, 1], atol=1e-6)  # the places of I, II and III less 1
  np.testing.assert_array_equal(np.delete(taken, [0, 3], 1), np.delete(own.encode(COLUMNS), [0, 3], 1))
  model = gl.models.mlp(2, widths=4)
  assert 'by which center and scale' in judged.misfit(own, model) and not judged.misfit(schema, model)
  assert not judged.misfit(own, gl.models.standardised(model, mean, std))
  assert judged.misfit(own, gl.models.standardised(model, mean, 2 * std))


def from_file(schema):
  return tables.from_json(json.loads(json.dumps(schema.to_json())))


@pytest.mark.parametrize(
  ('columns', 'given', 'said'),
  [
    ({'a': ['', '?', 'NA']}, {}, "the column 'a' has no value at all"),
    ({'a': [1, 1, 1]}, {}, "the column 'a' has one value only, '1'"),
    ({'a': [f'name {i}' for i in range(30)]}, {}, '30 different texts in 30 rows'),
    ({'a': ['x', 'y', 'z']}, {'a': 'continuous'}, "is to be continuous and has the value 'x'"),
    ({'a': ['x', 'y', 'z']}, {'a': 'binary'}, 'is to be binary and has 3 levels'),
    ({'a': ['x', 'y']}, {'a': {'kind': 'ordinal', 'levels': ['x', 'w']}}, "has 'y', which is none of its levels: x, w"),
    ({'a': [1, 2, 3]}, {'b': 'ordinal'}, "unknown column 'b'"),
    ({'a': [1, 2, 3]}, {'a': 'ordnal'}, "did you mean 'ordinal'"),
    ({'a': [1, 2, 3]}, {'a': 'ignore'}, 'no column but its label'),
    ({'a': ['x', 'y']}, {'a': {'kind': 'ordinal', 'levles': ['x', 'y']}}, "'levles'; did you mean 'levels'"),
    ({'a': ['x', 'y']}, {'a': {'kind': 'ordinal', 'order': ['x', 'y']}}, "unknown key of the column 'a' 'order'"),
    ({'a': ['x', 'y']}, {'a': 'ordinal'}, 'is to be ordinal and has texts: give its "levels"'),
    ({'a': [1, 2, 3]}, {'a': {'kind': 'continuous', 'levels': [1, 2, 3]}}, 'is continuous, which has no levels'),
    ({'a': [0.5 * i for i in range(30)]}, {'a': {'levels': [1, 2, 3]}}, 'is continuous, which has no levels'),
    ({'a': ['x', 'y']}, {'a': {'kind': 'binary', 'levels': ['x', 'y', 'x']}}, "has the level 'x' twice"),
    ({'a': [1, 2]}, {'a': {'kind': 'ordinal', 'levels': ['1', '2', '1.0']}}, "has the level '1' twice"),
    ({'a': ['x', 'y']}, {'a': {'levels': ['x', 'y', None]}}, "'a' has a level without a text"),
    ({'a': ['x', 'y']}, {'a': {'levels': 'xy'}}, "levels of the column 'a' are 'xy', expected a list"),
    ({'a': ['x', 'y']}, {'a': {'levels': {'x', 'y'}}}, "the levels of the column 'a' are .* expected a list"),
    ({'a': ['x', 'y']}, {'a': ['ordinal']}, r"what is given of the column 'a' is \['ordinal'\], expected a kind"),
    ({'a': ['x', 'y']}, {'a': None}, "what is given of the column 'a' is None, expected a kind"),
    ({'a': ['x', 'y']}, {'a': {'scale': 2}}, "the column 'a' is binary, which has no numbers to scale"),
    ({'a': [1, 2, 3]}, {'a': {'scale': 0}}, "the scale of the column 'a' is 0, expected a finite number"),
    ({'a': [1, 2, 3]}, {'a': {'center': 'b'}}, "the center of the column 'a' is 'b', expected a finite number"),
    ({'a': ['x', 'y']}, ['a'], r"given is \['a'\], expected name -> what is known"),
  ],
)
def test_columns_that_cannot_be_are_refused(columns, given, said):
  with pytest.raises(gl.UsageError, match=said):
    tables.infer(columns, given)


@pytest.mark.parametrize(
  ('changed', 'said'),
  [
    ({'job': ['pilot']}, "row 0 has 'pilot' in the column 'job', which is none of the levels of the schema: clerk"),
    ({'age': ['old']}, "row 0 has 'old' in the column 'age', expected a number"),
    ({'age': [None]}, "row 0 has no value in the column 'age', which has no gaps"),
    ({'stage': ['IV']}, 'none of the levels of the schema: I, II, III'),
  ],
)
def test_values_beyond_a_schema_are_refused(schema, changed, said):
  one = {name: values[:1] for name, values in COLUMNS.items()}
  with pytest.raises(gl.UsageError, match=said):
    schema.encode({**one, **changed})
  with pytest.raises(gl.UsageError, match="the column 'age' is missing"):
    schema.encode({'job': ['clerk']})


def test_a_file_is_read_with_what_is_known_of_it(tmp_path):
  lines = [
    'id;age;job;ill',
    *(f'{i};{20 + i % 37};{"nurse" if i % 3 else "clerk"};{"yes" if i % 2 else "no"}' for i in range(40)),
  ]
  (tmp_path / 'a.csv').write_text('\n'.join(lines))
  (tmp_path / 'a.json').write_text(json.dumps({'columns': {'id': 'ignore'}, 'sensitive': ['age']}))
  name, known = f'table:{tmp_path / "a.csv"}', str(tmp_path / 'a.json')
  test, train = (gl.data.load(name, split, schema=known) for split in ('test', 'train'))
  assert (len(test.samples), len(train.samples)) == (12, 28) and test.class_names == ('no', 'yes')
  assert test.settings == train.settings and test.settings['schema']['sensitive'] == ['age']
  assert test.notes[0] == "the label is 'ill', the last column: --label names another" and len(test.notes) == 3
  other = gl.data.load(name, 'test', schema={**json.loads((tmp_path / 'a.json').read_text()), 'label': 'job'}, limit=3)
  assert other.class_names == ('clerk', 'nurse') and other.samples.shape == (3, 3) and test.columns == (1, 2)
  assert len(gl.data.gallery(name, schema=known).samples) == 40
  with pytest.raises(gl.UsageError, match=r"unknown column for the label of .* 'il'; did you mean 'ill'"):
    gl.data.load(name, 'test', schema='{"label": "il"}')
  with pytest.raises(gl.UsageError, match='image_size is of images'):
    gl.data.load(name, 'test', image_size=3)
  with pytest.raises(gl.UsageError, match='a schema are of a table in a file'):
    gl.data.load('faces', schema=known)
  (tmp_path / 'b.csv').write_text('a,b\n1,2\n3\n')
  with pytest.raises(gl.UsageError, match=r'row 1 of the table .* has 1 values, expected 2'):
    gl.data.load(f'table:{tmp_path / "b.csv"}')
  (tmp_path / 'c.json').write_text('{"colums": {}}')
  with pytest.raises(gl.UsageError, match="did you mean 'columns'"):
    gl.data.load(name, schema=str(tmp_path / 'c.json'))


def test_a_label_of_the_command_line_goes_before_that_of_the_schema(tmp_path):
  (tmp_path / 'a.json').write_text('{"label": "ill", "sensitive": ["age"]}')
  module, flags = programs._load('audit')
  flags(['audit', '--label=job', f'--schema={tmp_path / "a.json"}'])
  assert json.loads(module._GIVEN.options()['schema']) == {'label': 'job', 'sensitive': ['age']}
  module, flags = programs._load('audit')
  flags(['audit', f'--schema={tmp_path / "a.json"}'])
  assert module._GIVEN.options()['schema'] == str(tmp_path / 'a.json') and 'label' not in module._GIVEN.options()


def test_frames_and_arrays_are_taken():
  pandas = pytest.importorskip('pandas')
  frame = pandas.DataFrame({**COLUMNS, 'ill': ['no', 'yes', *['no'] * 11]})
  found = gl.data.table(frame, 'ill', split='train', given=KNOWN)
  assert found.samples.shape == (9, 11) and found.num_classes == 2
  values = np.random.default_rng(0).normal(size=(10, 3))
  assert gl.data.table(values, [0, 1] * 5, names=['a', 'b', 'c']).samples.shape == (3, 3)
  with pytest.raises(gl.UsageError, match='2 names for 3 columns'):
    gl.data.table(values, [0, 1] * 5, names=['a', 'b'])
  with pytest.raises(gl.UsageError, match='has 10 values, expected 9'):
    gl.data.table(values, [0] * 9)
  with pytest.raises(gl.UsageError, match='has 1 different values, expected 2 to 100'):
    gl.data.table(values, [0] * 10)


@pytest.mark.parametrize(('name', 'width', 'rows'), [('breast_cancer', 30, 569), ('diabetes', 11, 442)])
def test_embedded_tables(name, width, rows):
  test, train = (gl.data.load(name, split) for split in ('test', 'train'))
  assert (
    len(test.samples) + len(train.samples) == rows
    and test.samples.shape[1] == width
    and test.settings == train.settings
  )
  assert not {one.tobytes() for one in test.samples} & {one.tobytes() for one in train.samples}
  numeric = [i for i, field in enumerate(tables.from_json(test.settings['schema']).fields) if field.numeric]
  np.testing.assert_allclose(train.samples[:, numeric[:1]].mean(), 0, atol=1e-5)
  np.testing.assert_allclose(train.samples[:, 0].std(), 1, atol=1e-5)
  with pytest.raises(gl.UsageError, match='unknown split'):
    gl.data.load(name, 'tset')


def reference(schema, found, truth, within):
  """Returns the share of right cells of a pair by hand, from the texts and numbers of the columns."""
  right = []
  for field, place in zip(schema.fields, schema.places, strict=True):
    a, b = found[place], truth[place]
    if field.kind in ('categorical', 'binary'):
      right.append(np.argmax(a) == np.argmax(b))
    elif field.gaps and (a[1] > 0.5 or b[1] > 0.5):
      right.append((a[1] > 0.5) == (b[1] > 0.5))
    else:
      value = np.clip(a[0] * field.std + field.mean, field.low, field.high)
      if field.kind == 'ordinal':
        value = min(field.values, key=lambda level: abs(level - value))
      value = round(value) if field.step == 1 else value
      right.append(abs(value - (b[0] * field.std + field.mean)) <= within * field.std + 1e-6)
  return np.mean(right)


def test_figures_are_those_of_a_reference(schema):
  rows, rng = schema.encode(COLUMNS), np.random.default_rng(0)
  truth = rows[:6]
  found = truth + rng.normal(scale=0.2, size=truth.shape).astype(np.float32)
  kind = table(schema)
  figures = kind.evaluate(found[::-1], truth, np.zeros(0, int), np.zeros(6, int), among=kind.gallery(rows, truth))
  assert figures['permutation'] == [5, 4, 3, 2, 1, 0]
  for name, within in (('cells', 0.319), ('cells_exact', 0.01)):
    assert figures[name] == pytest.approx(
      np.mean([reference(schema, *pair, within) for pair in zip(found, truth, strict=True)])
    )
  np.testing.assert_allclose(kind.nearness(found, truth).mean(), figures['cells'])
  assert figures['candidates'] == 12 and 0.3 < figures['trace'] <= 1 and math.isnan(figures['label_correct'])
  assert figures['cells'] == pytest.approx((3 * figures['numbers'] * 4 / 3 + figures['categories'] * 2) / 6)


def test_exact_rows_are_found_in_any_order_and_placeholders_are_no_answer(schema):
  rows, kind = schema.encode(COLUMNS), table(schema)
  among = kind.gallery(rows, rows[:4])
  given = {'labels_hat': np.asarray([1, 0, 0]), 'labels': np.asarray([0, 0, 1, 1]), 'among': among}
  figures = kind.evaluate(rows[[2, 0, 1]], rows[:4], **given)
  assert figures['revealed'] == 3 and figures['permutation'] == [1, 2, 0, -1] and figures['identified'] == 3
  assert figures['label_correct'] == 0.75 and figures['revealed_cells'] == 1
  empty = np.concatenate([rows[:1], np.zeros_like(rows[:1])])
  answered, blank = (
    kind.evaluate(empty, rows[:2], np.zeros(0, int), given['labels'][:2], blank=b) for b in (False, True)
  )
  assert answered['cells'] == 0.5 and blank['cells'] > 0.5 and answered['revealed'] == 1
  lost = kind.evaluate(rows[:2] * np.nan, rows[:2], np.zeros(0, int), given['labels'][:2], among=among)
  assert math.isnan(lost['cells']) and not lost['revealed'] and lost['rank'] == 13 and not lost['identified']
  assert kind.evaluate(-rows[:2], rows[:2], np.zeros(0, int), given['labels'][:2])['revealed'] == 0


def test_an_empty_answer_is_no_exact_row_of_either_sign():
  schema = tables.infer({f'c{i}': ['no', 'yes'] * 3 for i in range(6)})
  row, nothing = schema.encode({f'c{i}': ['no'] for i in range(6)}), np.zeros((3, schema.width))
  given = row, np.zeros(0, int), np.zeros(1, int)
  kind = table(schema)
  assert [kind.evaluate(nothing, *given, signed=s, blank=False)['revealed'] for s in (True, False)] == [0, 0]
  assert kind.evaluate(-row, *given, signed=False, blank=False)['revealed'] == 1


def test_a_fraction_among_whole_numbers_makes_no_row_its_own_rival():
  columns = {f'c{i}': np.random.default_rng(i).integers(0, 1000, 40).tolist() for i in range(3)}
  schema = tables.infer(columns, dict.fromkeys(columns, 'continuous'))
  columns['c0'][-1] += 0.5
  rows, kind = schema.encode(columns), table(schema)
  among, none = kind.gallery(rows, rows), (np.zeros(0, int), np.zeros(1, int))
  found = [kind.evaluate(row[None], row[None], *none, among=among) for row in rows]
  assert {(one['rank'], one['candidates'], one['identified']) for one in found} == {(1, 39, 1)}
  alone = kind.evaluate(rows[:1], rows[:1], *none, among=kind.gallery(rows[:1], rows[:1]))
  assert (alone['candidates'], alone['identified'], alone['first'], alone['recognised']) == (0, 0, [], 1)


def test_what_is_usual_may_be_a_gap_and_is_of_all_rows_where_the_fitted_have_none():
  schema = tables.infer({'dose': [1.5, 2.5, 3.7, *[None] * 97], 'x': [*range(50)] * 2})
  assert schema.texts(schema.cells(schema.usual[np.newaxis]))[0][0] == 'missing'
  np.testing.assert_array_equal(schema.usual[:2], [0, 1])
  assert tables.infer({'a': [1000.5, 2000.5, 3000.7, None]}, fitted=[3]).fields[0].median == 2000.5


def test_columns_have_one_length_and_texts_for_names():
  schema = tables.infer({0: [1.5, 2.5, 3.7], 1: [1, 2, 3.5]}, {0: 'continuous'}, sensitive=[1])
  assert schema.sensitive == ('1',) and schema.encode({0: [2.5], 1: [2]}).shape == (1, 2)
  with pytest.raises(gl.UsageError, match="the column '1' has 1 values, and '0' has 2: expected as many"):
    schema.encode({0: [1.5, 2.5], 1: [1]})
  with pytest.raises(gl.UsageError, match="the column 'b' has 3 values, and 'a' has 2"):
    tables.infer({'a': [1, 2], 'b': [1, 2, 3]})
  with pytest.raises(gl.UsageError, match='the columns are 0, 0: expected different names'):
    tables.infer({0: [1, 2], '0': [1, 2]})


def test_float32_has_its_own_digits():
  values = np.float32([0.1, 0.2, 16777216, 123456792])
  assert [tables.text_of(value) for value in values] == ['0.1', '0.2', '16777216', '123456792']
  assert tables.text_of(np.float64(0.1)) == '0.1' and tables.text_of(np.float32('nan')) == ''


def test_candidates_that_are_as_near_as_the_original_are_ahead_of_it():
  values = {'x': [0.5, 1.5, 2.5, 0.5, 1.5, 2.5], 'y': ['a', 'b', 'a', 'b', 'a', 'b']}
  schema = tables.infer(values, {'x': 'continuous'})
  rows, kind = schema.encode(values), table(schema)
  between = (rows[:1] + rows[4:5]) / 2  # half a value from both, whose category is the same
  figures = kind.evaluate(between, rows[:1], np.zeros(0, int), np.zeros(1, int), among=kind.gallery(rows, rows[:1]))
  assert figures['rank'] == 2 and not figures['identified'] and figures['candidates'] == 5


@pytest.mark.long
def test_noise_is_re_identified_by_chance_alone(mixed):
  kind, rows = of_config(mixed['train'].settings), mixed['train'].samples
  among = kind.gallery(rows, rows[:1])
  rng = np.random.default_rng(1)
  guesses = rows[rng.permutation(len(rows))]
  labels = np.zeros(1, int)
  ranks = [
    kind.evaluate(g[None], t[None], np.zeros(0, int), labels, among=among)['rank']
    for g, t in zip(guesses, rows, strict=True)
  ]
  count = len(among.cells)
  assert np.mean(np.asarray(ranks) == 1) < 0.03 and 0.35 < np.mean(ranks) / count < 0.65
  traces = [
    kind.evaluate(g[None], t[None], np.zeros(0, int), labels)['trace'] for g, t in zip(guesses, rows, strict=True)
  ]
  assert abs(np.mean(traces)) < 0.1


def test_the_threshold_is_the_99th_percentile_of_different_rows(mixed):
  kind, rows = of_config(mixed['train'].settings), mixed['train'].samples
  schema = tables.from_json(mixed['train'].settings['schema'])
  cells = schema.cells(rows)
  shared = [
    judged._right(schema, cells[i : i + 1], cells[j : j + 1], 0.319).mean() for i in range(60) for j in range(i)
  ]
  assert kind.gallery(rows, rows[:1]).threshold == pytest.approx(np.percentile(shared, 99), abs=0.13)
  assert kind.gallery(rows[:1], rows[:1]).threshold == 1
  assert kind.distinct(np.concatenate([rows[:5], rows[:5]])) == [0, 1, 2, 3, 4]


def test_what_is_no_row_is_refused(schema):
  rows, kind = schema.encode(COLUMNS), table(schema)
  for place, value, said in ((0, np.nan, "row 3 has nan in the column 'age'"), (5, 0.5, "'job', expected a single 1")):
    wrong = rows.copy()
    wrong[3, place] = value
    with pytest.raises(gl.UsageError, match=said):
      kind.check(wrong)
  with pytest.raises(gl.UsageError, match='rows have 10 entries, and those of the schema 11'):
    kind.check(rows[:, :-1])


def test_settings_remake_the_modality(schema, scenario):
  kind = table(schema)
  assert table(tables.from_json(schema.to_json())) is kind
  assert of_config({'modality': 'table', 'schema': schema.to_json()}) is kind
  assert of_config(scenario.settings) is scenario.client.modality and of_rows([{'cells': 1.0}]) is TABLE
  with pytest.raises(gl.UsageError, match='no schema'):
    of_config({'modality': 'table'})
  with pytest.raises(gl.UsageError, match='not one that was written'):
    of_config({'modality': 'table', 'schema': {'columns': [{'nme': 1}]}})


def test_marked_cells_say_what_is_right(schema):
  rows, kind = schema.encode(COLUMNS), table(schema)
  pieces = kind.marked(rows[1], rows[0])
  assert [(piece.of, piece.text, piece.right) for piece in pieces[:4]] == [
    ('age', '41', False), ('income', '2.25', False), ('stage', 'II', False), ('job', 'clerk', False)
  ]  # fmt: skip
  assert all(piece.right for piece in kind.marked(rows[0], rows[0])) and kind.marked(rows[0], None)[0].right is None
  assert kind.sensitive == {'income'} and kind.picture(rows[0]).shape == (2, 3, 1)


@pytest.mark.long
def test_closed_forms_read_rows_behind_a_standardisation(mixed):
  test = mixed['test']
  schema = tables.from_json(test.settings['schema'])
  mean, std = schema.moments
  np.testing.assert_allclose(mixed['train'].samples.mean(axis=0), mean, atol=0.02)
  np.testing.assert_allclose(mixed['train'].samples.std(axis=0), std, atol=0.02)
  inner = gl.models.mlp(2, 'default', widths='100-100')
  model = gl.models.standardised(inner, mean, std)
  variables = inner.init(jax.random.key(0), (12,))
  expected = inner.apply(variables, (test.samples[:3] - mean[None]) / std[None], False, None)[0]
  np.testing.assert_allclose(model.apply(variables, test.samples[:3], False, None)[0], expected, rtol=1e-6)
  scenario = gl.scenario(model, test.samples, test.targets, variables=variables, modality=of_config(test.settings))
  assert [row['revealed'] for row in audit(scenario, [gl.attacks.peeling()], batch_size=4).rows] == [4, 4]
  with pytest.raises(gl.UsageError, match='expected as many positive deviations'):
    gl.models.standardised(inner, mean, std[1:])


@pytest.fixture(scope='module')
def peeled(scenario, tmp_path_factory):
  """Returns an audit of peeling with and without noise, and its work directory."""
  folder = tmp_path_factory.mktemp('tables') / 'peeled'
  defenses = [None, gl.defenses.gaussian(stddev=0.5)]
  return audit(scenario, [gl.attacks.peeling()], defenses=defenses, batch_size=4, workdir=folder), folder


@pytest.mark.long
def test_a_notebook_shows_rows_as_values(peeled):
  """A grid of pictures would show each row as a strip of grey."""
  (picture,) = Page(peeled[0]._repr_html_()).attributes('img')
  assert picture['src'] == embedded(gl.report.slide(peeled[0]))
  assert 'private row' in picture['alt'] and 'image' not in picture['alt']


@pytest.mark.long
@pytest.mark.parametrize(('most', 'said'), [(4, ['first 4 of 8 columns']), (8, [])])
def test_a_slide_says_that_it_shows_some_of_the_columns(peeled, most, said, monkeypatch):
  drawn = []
  axes = types.SimpleNamespace(text=lambda x, y, text, **_: drawn.append(text), plot=lambda *_, **__: None)
  monkeypatch.setattr(marked, 'PARTS', most)
  monkeypatch.setattr(figures, 'canvas', lambda *_: contextlib.nullcontext((axes, bytes)))
  gl.report.slide(peeled[0])
  assert [text for text in drawn if 'columns' in text] == said


def test_predictions_on_noise_are_on_rows_of_the_table(scenario):
  """Pixels of noise are no rows: with them, the rule geng told 0.52 of the labels of a trained network, not 0.91."""
  client, zeros = scenario.client, jax.tree.map(jnp.zeros_like, scenario.variables['params'])
  seen = gl.Observation(
    scenario.variables, zeros, jnp.zeros((8, 2)), gl.Knowledge(labels='inferred', label_inference='geng'),
    (8, *scenario.samples.shape[1:]), 2,
  )  # fmt: skip
  rows = client.modality.drawn(jax.random.key(0), (gl.attacks.labels.NOISE, *scenario.samples.shape[1:]))
  expected = jax.nn.softmax(client.model.apply(scenario.variables, rows, False, None)[0]).mean(axis=0)
  found = gl.attacks.labels.predicted_on_noise(client.model, seen, client.modality.drawn)
  np.testing.assert_allclose(found, expected, rtol=1e-5)
  given = []

  def infer(*arguments, **settings):
    given.append(settings['drawn'])
    return jnp.zeros(8, jnp.int32)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(gl.attacks.labels, 'infer', infer)
    starting_labels(client, seen)
  assert given == [client.modality.drawn]


@pytest.mark.long
@pytest.mark.parametrize('scale', [1.0, 0.25], ids=['a gradient', 'a clipped one'])
def test_peeling_reads_a_row_far_from_the_mean(scenario, scale):
  """A column with a long tail has values of more than ten deviations: capital gains of Adult have 13."""
  client, place = scenario.client, scenario.samples.shape[1] - 1
  rows = np.asarray(scenario.samples[:1], np.float32).copy()
  rows[0, place] = 13.0
  update = client.local_update(None, scenario.variables, rows, scenario.targets[:1]).update
  seen = gl.Observation(
    scenario.variables, jax.tree.map(lambda x: np.float32(scale) * np.asarray(x), update), jnp.zeros((1, 2)),
    gl.Knowledge(labels='unused'), rows.shape, 2,
  )  # fmt: skip
  attack = gl.attacks.peeling()(client)
  found = attack.reconstruct(attack.init(jax.random.key(0), seen), seen)
  np.testing.assert_allclose(found.samples, rows, atol=1e-3)
  assert found.labels.tolist() == scenario.targets[:1].tolist()


@pytest.mark.long
def test_closed_forms_read_batches_exactly(scenario, peeled):
  spear = audit(scenario, [gl.attacks.spear()], batch_size=4)
  for rows in (spear.rows, [row for row in peeled[0].rows if row['defense'] == 'none']):
    assert [row['revealed'] for row in rows] == [4, 4]
    assert all(row['cells'] == 1 and row['verdict'] == 'exact' for row in rows)
  assert spear.config['modality'] == 'table' and spear.truth.shape == (2, 4, 12)


@pytest.mark.slow
@pytest.mark.parametrize(
  ('attack', 'low', 'high'),
  [
    (gl.attacks.tableak(steps=150, seeds=4), 0.9, 1),
    (gl.attacks.csdlg_fast(tv=0.0, steps=150, start='normal'), 0.5, 0.8),
  ],
  ids=str,
)
def test_tableak_beats_matching_without_relaxation(scenario, mixed, attack, low, high):
  found = audit(scenario, [attack], batch_size=4)
  (rows,), schema = found.reconstructions.values(), tables.from_json(mixed['test'].settings['schema'])
  categories = [place for field, place in zip(schema.fields, schema.places, strict=True) if not field.numeric]
  assert all(rows[..., place].min() >= 0 and rows[..., place].max() <= 1 for place in categories)
  assert low < np.mean([row['cells'] for row in found.rows]) <= high
  assert np.mean([row['cells'] for row in found.controls]) < 0.5


@pytest.mark.parametrize(('rows', 'classes'), [(1, 2), (3, 4), (6, 10)])
def test_softmax_regression_is_solved_for_fewer_rows_than_classes(rows, classes):
  from gradleak.attacks.linear import solve

  rng = np.random.default_rng(rows)
  x, labels = rng.normal(size=(rows, 12)), rng.integers(0, classes, rows)
  kernel, bias = rng.uniform(-0.3, 0.3, (12, classes)), rng.uniform(-0.3, 0.3, classes)
  odds = np.exp(x @ kernel + bias)
  residuals = odds / odds.sum(axis=1, keepdims=True) - np.eye(classes)[labels]
  gradients = (x.T @ residuals / rows).astype(np.float32), (residuals.mean(axis=0)).astype(np.float32)
  found = solve(gradients, (kernel, bias), np.eye(classes)[labels], np.random.default_rng(0))
  apart = np.abs(found.rows[np.newaxis] - x[:, np.newaxis]).max(axis=2)
  assert found.residual < 1e-4 and apart.min(axis=1).max() < 0.02 and len(set(apart.argmin(axis=1))) == rows
  noise = rng.normal(size=gradients[0].shape) * 0.02
  assert (
    not len(solve((gradients[0] + noise, gradients[1]), (kernel, bias), np.eye(classes)[labels], rng, starts=2).rows)
    or rows == 1
  )
  with pytest.raises(gl.UsageError, match='only where they are at most'):
    solve(gradients, (kernel, bias), np.eye(classes)[np.zeros(classes, int)], rng)


def regression(seed, rows, classes, width, features=30):
  """Returns (rows, the gradient of softmax regression in float32, its layer, one-hot labels)."""
  rng = np.random.default_rng(seed)
  x = rng.normal(size=(rows, features)).astype(np.float32)
  kernel, bias = (rng.uniform(-width, width, shape).astype(np.float32) for shape in ((features, classes), classes))
  targets = np.eye(classes, dtype=np.float32)[rng.integers(classes, size=rows)]
  logits = x @ kernel + bias
  odds = np.exp(logits - logits.max(axis=1, keepdims=True))
  residuals = (odds / odds.sum(axis=1, keepdims=True) - targets).astype(np.float32)
  return x, (x.T @ residuals / np.float32(rows), residuals.mean(axis=0)), (kernel, bias), targets


@pytest.mark.long
@pytest.mark.parametrize(
  ('seed', 'rows', 'classes', 'width', 'unknown'),
  [
    (3, 3, 4, 3.0, 0),  # nothing is lost where all rows have a part in the gradient
    (2, 3, 4, 3.0, 1),  # the network is sure of one row: rounding errors are larger than its gradient
    (59, 3, 4, 3.0, 1),
    (20, 3, 4, 3.0, 3),  # here its part cannot be told from that of two rows of its class
    (0, 4, 8, 2.0, 0),  # a start ends at another solution, whose small error is no rounding
  ],
)
def test_rows_that_have_next_to_no_part_in_a_gradient_are_not_certified(seed, rows, classes, width, unknown):
  from gradleak.attacks.linear import MOVED, solve

  x, gradients, layer, targets = regression(seed, rows, classes, width)
  found = solve(gradients, layer, targets, np.random.default_rng(seed))
  assert len(found.rows) == rows and found.certain.sum() == rows - unknown
  for row in found.rows[found.certain]:
    apart = np.linalg.norm(x - row[np.newaxis], axis=1) / np.linalg.norm(x, axis=1)
    assert apart.min() <= MOVED
  lost = [row for row in found.rows[~found.certain] if np.abs(x - row[np.newaxis]).max(axis=1).min() < 1e-3]
  assert not lost


@pytest.mark.slow
def test_the_attack_on_regression_returns_certified_rows_alone():
  x, gradients, layer, targets = regression(2, 3, 4, 3.0)
  data = gl.data.table(np.concatenate([x, -x]), np.arange(6) % 4, split='train')
  update, params = ({'Dense_0': dict(zip(('kernel', 'bias'), pair, strict=True))} for pair in (gradients, layer))
  found = gl.attack(
    jax.random.key(0), gl.models.logistic(4), {'params': params},
    update, attacks=[gl.attacks.linear()], modality=of_config(data.settings), labels=targets.argmax(axis=1),
    num_samples=3, controls=1, progress='none',
  )  # fmt: skip
  (one,) = found.inversions
  rows = one.samples[~one.empty]
  apart = np.abs(rows[:, np.newaxis] - x[np.newaxis]).max(axis=2)
  assert len(rows) == 2 and apart.min(axis=1).max() < 0.01 and set(apart.argmin(axis=1)) == {0, 1}
  assert one.labels[~one.empty].tolist() == targets.argmax(axis=1)[apart.argmin(axis=1)].tolist()


@pytest.mark.long
@pytest.mark.parametrize('attack', ['linear', 'fidel'])
def test_closed_forms_read_the_rows_that_a_network_standardises_itself(attack):
  values = np.random.default_rng(0).normal(50, 20, size=(60, 5))
  data = gl.data.table(values, np.arange(60) % 5, split='train')
  model = gl.models.standardised(gl.models.logistic(5, 'default'), np.full(5, 0.7), np.full(5, 1.6))
  given = {'key': jax.random.key(0), 'modality': of_config(data.settings)}
  scenario = gl.scenario(model, data.samples, data.targets, **given)
  number = 1 if attack == 'fidel' else 3
  (row,) = audit(scenario, [getattr(gl.attacks, attack)()], 1, batch_size=number, controls=1).rows
  assert row['revealed'] == number and row['cells'] == 1


@pytest.mark.long
def test_an_upload_of_regression_that_is_not_finite_has_diverged():
  data = gl.data.table(np.random.default_rng(0).normal(size=(60, 5)), np.arange(60) % 5, split='train')
  given = {'key': jax.random.key(0), 'modality': of_config(data.settings)}
  scenario = gl.scenario(gl.models.logistic(5, 'default'), data.samples, data.targets, **given)
  nothing = optax.stateless(lambda updates, params: jax.tree.map(lambda u: u * jnp.nan, updates))
  spoilt = gl.defenses.wrap(nothing, place='upload', label='nan')
  rows = audit(scenario, [gl.attacks.linear()], 1, [None, spoilt], batch_size=3, knowledge='non-adaptive').rows
  assert [(row['defense'], row['diverged']) for row in rows] == [('none', False), ('nan', True)]
  assert rows[0]['oracle_cells'] > 0 and all(rows[1][name] is None for name in ('cells', 'trace', 'oracle_cells'))


@pytest.mark.long
def test_regression_is_solved_with_labels_that_it_infers():
  data = gl.data.table(np.random.default_rng(0).normal(size=(60, 5)), np.arange(60) % 5, split='train')
  given = {'key': jax.random.key(0), 'modality': of_config(data.settings)}
  scenario = gl.scenario(gl.models.logistic(5, 'default'), data.samples, data.targets, **given)
  hidden = gl.defenses.wrap(optax.set_to_zero(), place='upload', label='zeros')
  given = {'batch_size': 3, 'knowledge': 'non-adaptive', 'labels': 'inferred'}
  found = audit(scenario, [gl.attacks.linear()], 1, [None, hidden], **given).rows
  assert [(row['revealed'], row['label_correct']) for row in found] == [(3, 1), (0, 0)]
  with pytest.raises(gl.UsageError, match="'rlu' needs auxiliary samples"):
    audit(scenario, [gl.attacks.linear()], 1, batch_size=3, labels='rlu')


def test_rows_start_from_the_mean_row_of_their_class():
  values, classes = np.random.default_rng(0).normal(size=(60, 5)), np.arange(60) % 3
  private, public = (gl.data.table(values, classes, split=split) for split in ('test', 'train'))
  given = {'key': jax.random.key(0), 'modality': of_config(private.settings)}
  public = (public.samples, public.targets)
  scenario = gl.scenario(gl.models.logistic(3), private.samples, private.targets, public=public, **given)
  means = np.stack([public[0][public[1] == c].mean(axis=0) for c in range(3)])
  attack = gl.attacks.csdlg(tv=0.0, steps=1, start='class_average')(scenario.client)
  targets = np.eye(3, dtype=np.float32)[[2, 0]]
  seen = gl.Observation(
    scenario.variables, scenario.variables['params'], jnp.asarray(targets), gl.Knowledge(), (2, 5), 3,
    class_means=jnp.asarray(means),
  )  # fmt: skip
  np.testing.assert_allclose(attack.init(jax.random.key(0), seen).dummy['images'], means[[2, 0]], rtol=1e-5)


@pytest.mark.long
def test_regression_of_fewer_features_than_rows_is_refused():
  data = gl.data.table(np.random.default_rng(0).normal(size=(60, 2)), np.arange(60) % 5, split='train')
  given = {'key': jax.random.key(0), 'modality': of_config(data.settings)}
  scenario = gl.scenario(gl.models.logistic(5, 'default'), data.samples, data.targets, **given)
  with pytest.raises(gl.UsageError, match='on 2 features gives 3 rows'):
    audit(scenario, [gl.attacks.linear()], batch_size=3)


@pytest.mark.slow
def test_the_attack_on_regression_reads_batches(mixed):
  values = np.random.default_rng(0).normal(size=(60, 5))
  data = gl.data.table(values, np.arange(60) % 5, split='train')
  given = {'key': jax.random.key(0), 'modality': of_config(data.settings)}
  scenario = gl.scenario(gl.models.logistic(5, 'default'), data.samples, data.targets, **given)
  rows = audit(scenario, [gl.attacks.linear()], batch_size=3).rows
  assert [row['revealed'] for row in rows] == [3, 3] and all(row['label_correct'] == 1 for row in rows)
  with pytest.raises(gl.UsageError, match='at most 4: take fidel'):
    audit(scenario, [gl.attacks.linear()], batch_size=5)
  test = mixed['test']
  other = gl.scenario(gl.models.mlp(2), test.samples, test.targets, key=given['key'], modality=of_config(test.settings))
  with pytest.raises(gl.UsageError, match='reads one dense layer, and mlp has 4 layers'):
    audit(other, [gl.attacks.linear()])


def test_pooling_matches_rows_first():
  from gradleak.attacks.tableak import order

  rows = np.random.default_rng(0).normal(size=(7, 5)).astype(np.float32)
  places = np.random.default_rng(1).permutation(7)
  assert order(rows, rows[places] + np.float32(0.01)).tolist() == np.argsort(places).tolist()


@pytest.mark.long
@pytest.mark.parametrize(('pooling', 'expected'), [('median', 0.0), ('mean', 0.1)])
def test_a_start_that_diverged_leaves_the_pooled_rows_finite(pooling, expected):
  from gradleak.attacks.tableak import pooled

  best = np.eye(3, 5, dtype=np.float32)
  starts = np.stack([best, best, np.full_like(best, np.nan), best[::-1] + np.float32(0.4)])
  np.testing.assert_allclose(pooled(starts, best, pooling), best + expected, atol=1e-6)


def test_what_is_of_images_alone_is_refused(scenario):
  for attack in (gl.attacks.cinet(), gl.attacks.ggl(), gl.attacks.lti(), gl.attacks.april()):
    with pytest.raises(gl.UsageError, match=r'for images \[N, H, W, C\], and these samples are \['):
      audit(scenario, [attack])
  with pytest.raises(gl.UsageError, match='tv is not defined on rows'):
    audit(scenario, [gl.attacks.csdlg()])
  with pytest.raises(gl.UsageError, match='the defense ats is for images'):
    audit(scenario, [gl.attacks.fidel()], defenses=[gl.defenses.ats()])
  faces = gl.data.load('faces', limit=4)
  with pytest.raises(gl.UsageError, match='tableak relaxes the cells of a table, and this client trains on images'):
    other = gl.scenario(gl.models.mlp(2), faces.samples, faces.targets, key=jax.random.key(0))
    audit(other, [gl.attacks.tableak()])


@pytest.mark.long
@pytest.mark.parametrize(
  'spec',
  [
    'logistic',
    *(
      pytest.param(spec, marks=pytest.mark.slow)
      for spec in ('resnet_mlp(width=8,norm=identity)', 'ft_transformer(width=8,heads=2,depth=1)')
    ),
  ],
)
def test_models_of_tables_train_and_leak(mixed, spec):
  test = mixed['test']
  model = gl.models.create(spec, 2, init='default', columns=test.columns)
  kind = of_config(test.settings)
  scenario = gl.scenario(model, test.samples, test.targets, key=jax.random.key(0), modality=kind)
  row = audit(scenario, [gl.attacks.dga(steps=120)], trials=1).rows[0]
  assert row['cells'] > 0.7 and not row['diverged']


def test_a_token_is_a_column():
  model = gl.models.ft_transformer(2, 'default', columns=(1, 3), width=8, heads=2, depth=1)
  variables = model.init(jax.random.key(0), (4,))
  assert variables['params']['tokenizer']['kernel'].shape == (4, 8)
  assert variables['params']['tokenizer']['bias'].shape == (3, 8)
  with pytest.raises(gl.UsageError, match='has 2 columns of 4 entries, and rows have 5'):
    model.init(jax.random.key(0), (5,))
  with pytest.raises(gl.UsageError, match='expected a divisor of the width 9'):
    gl.models.ft_transformer(2, width=9, heads=2)


def test_the_page_shows_cells_bars_and_records(peeled, tmp_path):
  found, _ = peeled
  gl.report.write(found, tmp_path)
  page = (tmp_path / 'report.html').read_text('utf-8')
  assert 'class="piece right"' in page and 'without an upload' in page and 'How much of one record' in page
  assert 'All cells of a private row are exact' in page and not said_of_images(page)
  assert 'class="scroll plot read"' in page  # a narrow screen keeps the letters of the first picture
  assert (tmp_path / 'slide.png').stat().st_size > 1000 and not (tmp_path / 'grid.png').exists()
  told = gl.report.terminal_table(found)
  assert 'cells right' in told and 'PSNR' not in told and 'Images' not in told and 'control 0.00' in told


def test_the_page_of_chosen_trials_shows_and_counts_each_by_its_number(peeled):
  """As of an audit with `only`, or with trials that stop: defenses have other trials, and other numbers of them."""
  from gradleak.report import marked

  whole, (bare, noisy) = peeled[0], peeled[0].config['defenses']
  chosen = {bare: [1], noisy: [0, 1]}
  found = dataclasses.replace(
    whole,
    rows=[row for row in whole.rows if row['trial'] in chosen[row['defense']]],
    reconstructions={case: made[chosen[case[1]]] for case, made in whole.reconstructions.items()},
    curves={case: (steps, of[chosen[case[1]]]) for case, (steps, of) in whole.curves.items()},
  )
  first, second = marked.seen(found)
  assert first.of(0) is None and all(piece.right for sample in first.of(1) for piece in sample)
  assert second.pieces == marked.seen(whole)[1].pieces
  alone = dataclasses.replace(found, rows=[row for row in found.rows if row['defense'] == bare])
  assert len(marked.guessed(alone)) == 1
  page = gl.report.render(found)
  together = page[page.index('id="together"') :]
  assert 'of 4 rows' in together and 'of 8 rows' in together
  assert all(float(share) <= 100 for share in re.findall(r'<b>(\d+) %</b>', page))
  assert page.index('Trial 1, row 0') < page.index('Trial 1, row 2') and 'Trial 0, row 0' not in page


def test_counts_of_records_by_hand():
  from gradleak.modalities import Piece
  from gradleak.report.marked import at_least, shares

  batch = [[Piece('x', True, 'a'), Piece('y', False, 'b')], [Piece('x', True, 'a'), Piece('y', True, 'b')]]
  assert shares([batch]) == {'a': (2, 2), 'b': (1, 2)}
  assert at_least([batch], ['a', 'b']) == [2, 1] and at_least([batch], ['b']) == [1]


def test_pieces_stand_as_they_are():
  """Quotation marks of backticks were gone or code, where a piece was right or wrong."""
  from gradleak.modalities import Piece
  from gradleak.report import marked

  for text, shown in (('``', '``'), ('a `b` 5 %', 'a `b` 5 %'), ('<i>', '&lt;i&gt;')):
    assert marked.cell(Piece(text, True, '')) == f'<span class="piece right">{shown}</span>'
    assert marked.cell(Piece(text, False, '')) == f'<span class="piece wrong">{shown}</span>'
    private, seen = [Piece(text, None, 'x')], marked.Seen('none', ('fidel', 'none'), [0], [])
    table = marked._across(private, [(seen, [Piece(text, True, 'x')])], {})
    assert [cell.text for cell in table.bodies[0].rows[0].cells[1:]] == [
      f'<span>{shown}</span>',
      f'<span class="piece right">{shown}</span>',
    ]


def test_spaces_are_seen_among_bytes():
  """A browser showed one space for three, and where words end could not be seen."""
  from gradleak.modalities import Piece
  from gradleak.report import blocks, html, marked

  row = blocks.Row(['private', blocks.Cell(marked.inline([Piece(sign) for sign in 'a b'], 3))])
  body = blocks.Table(['defense', ('seen', 'left running')], [blocks.Body([row])], 'marked')
  source = html.page(blocks.Page('x', 'x', 'x', 'x', [body], [], []))
  assert '<td class="left running"><span>a</span> <span> </span> <span>b</span></td>' in source
  (rule,) = re.findall(r'\.marked td\.running {([^}]*)}', source)
  assert 'white-space: pre-wrap' in rule


def test_sentences_follow_the_samples():
  from gradleak.report.words import about, said, worded

  config = {'modality': 'table', 'schema': tables.infer({'a': [1, 2, 3]}).to_json()}
  assert worded('An image and two images') == 'An image and two images'
  with about(config):
    assert worded('An image and two images') == 'A row and two rows'
    assert 'whole row' in said('meaning.exact')
  assert said('meaning.exact') == 'the image itself'


def test_a_folder_is_read_again(scenario, peeled):
  found = gl.load(peeled[1])
  assert found.rows == peeled[0].rows
  assert found.config['modality'] == 'table' and of_config(found.config) is scenario.client.modality


@pytest.mark.slow
def test_a_frontier_trains_on_rows(mixed, tmp_path):
  train, test = ((mixed[split].samples, mixed[split].targets) for split in ('train', 'test'))
  model, kind = gl.models.mlp(2, 'default', widths=16), of_config(mixed['train'].settings)
  defenses = [None, gl.defenses.gaussian(stddev=1.0)]
  local = {'share': 'delta', 'local_batch_size': 10, 'learning_rate': 0.5}
  scenario = gl.scenario(model, *train, key=jax.random.key(1), modality=kind, **local)
  found = gl.frontier(
    jax.random.key(0), scenario, test, defenses, [gl.attacks.fidel()], clients=5, per_round=5,
    rounds=2, trials=2, attack_every=1, controls=4, workdir=tmp_path, progress='none',
  )  # fmt: skip
  gl.report.write(found, tmp_path)
  entries = gl.report.entries(found.trained, found.rows)
  assert entries[0]['cells'] == 1.0 and entries[0]['recovered'] == 2 and entries[1]['cells'] < 0.9
  assert gl.report.frontier_csv(entries).startswith('defense,cells,recovered')
  assert 'cells right' in gl.report.frontier_table(entries, found.config)
  page = (tmp_path / 'training.html').read_text('utf-8')
  assert 'recover 2 of 2 rows' in page and 'the score of the strongest attacker (cells right) goes' in page
  assert not said_of_images(page)
  assert (tmp_path / 'frontier.png').exists() and (tmp_path / 'leakage.png').exists()


@pytest.mark.slow
def test_a_row_that_others_have_re_identifies_nobody(tmp_path):
  """Half of the private rows occur twice in the list: their content is found, and not whose it is."""
  rng = np.random.default_rng(0)
  columns = {name: rng.normal(size=200) for name in 'abcde'}
  made = gl.data.table(columns, rng.integers(0, 2, 200), split='train')
  rows, labels = made.samples[:8], made.targets[:8]
  gallery = (np.concatenate([made.samples, rows[:4]]), np.concatenate([made.targets, labels[:4]]))
  model = gl.models.create('mlp(widths=16)', 2)
  scenario = gl.scenario(
    model, rows, labels, key=jax.random.key(0), modality=gl.modalities.of_config(made.settings), gallery=gallery
  )
  assert scenario.shared.tolist() == [1, 1, 1, 1, 0, 0, 0, 0] and scenario.settings['gallery']['shared'] == 4
  found = gl.audit(jax.random.key(0), scenario, [None], [gl.attacks.fidel()], 8, controls=2, progress='none').rows
  assert all(row['rank'] == 1 and row['verdict'] == 'exact' for row in found)
  assert [row['identified'] for row in found] == [0, 0, 0, 0, 1, 1, 1, 1]
  named = gl.identify(jax.random.key(0), scenario, {'noise': gl.defenses.gaussian(stddev=1e-4)}, 8, progress='none')
  assert named.identified('noise', 'likelihood') == (4, 8)
  posteriors = [row['posterior'] for row in named.rows if row['statistic'] == 'likelihood']
  np.testing.assert_allclose(posteriors, [0.5] * 4 + [1.0] * 4, atol=1e-6)
  assert 'Others have the same sample as 4 of the private ones' in gl.report.wording.gallery(scenario.settings)
  told = gl.report.identification_table(named)
  assert 'A row is never its own candidate' in ' '.join(told.split()) and 'image' not in told
  assert not said_of_images(gl.report.render_identification(named))
  other = scenario._replace(shared=None)
  assert gl.identify(jax.random.key(0), other, [None], 8, progress='none').identified('none', 'likelihood') == (8, 8)
  label = gl.scenario(
    model, rows, labels, key=jax.random.key(0), modality=scenario.client.modality, gallery=(gallery[0], 1 - gallery[1])
  )
  assert not label.shared.any()  # those have other labels


@pytest.mark.slow
def test_the_program_sweeps_rows_with_their_own_defaults(tmp_path, compilation_cache):
  flags = ('--dataset=breast_cancer', '--trials=2', '--controls=2', '--public=0', '--knowledge=non-adaptive')
  noise = '--defenses=none;gaussian(stddev=0.001|1)'
  done = programs.start('sweep', *flags, noise, '--attacks=fidel', '--progress=none', f'--workdir={tmp_path}/new')
  assert done.status == 0, done.err
  assert 'cells right  cells exact' in done.out and 'mlp(widths=100-100)' in done.out and 'PSNR' not in done.out
  assert (tmp_path / 'new' / 'sweep.png').read_bytes().startswith(b'\x89PNG')
  assert jax.config.values['jax_compilation_cache_dir'] == compilation_cache  # programs here keep to that of the tests


def test_a_gap_is_no_odd_value_of_a_column_with_levels():
  stages = [None if i % 10 == 0 else i % 4 + 1 for i in range(60)]
  data = gl.data.table({'age': np.linspace(30, 70, 60).tolist(), 'stage': stages}, [0, 1] * 30)
  kind, rows = gl.modalities.of_config(data.settings), np.asarray(data.samples)
  gap = rows[rows[:, -1] > 0.5]
  assert len(gap) and kind.odd(rows) == '' and kind.odd(gap) == ''
  between = np.where(rows[:, -1] > 0.5, 0, 0.37)
  assert 'stage has' in kind.odd(rows + between[:, np.newaxis] * np.float32([0, 1, 0]))
