"""A captured update of a network for rows of a table, or for texts: attacked and judged like one of images."""

import dataclasses
import json
import re

import jax
import numpy as np
import pytest

import gradleak as gl
from gradleak import report
from gradleak.attacks.matching.distances import cosine
from gradleak.core import trees
from gradleak.data import tables
from gradleak.modalities import TEXT, of_config
from gradleak.models import token_weights
from gradleak.report import marked, words
from gradleak.report.captured import finding
from gradleak.studies import captured
from gradleak.studies.captured.defaults import Known, chosen
from gradleak.studies.captured.hints import _longer
from tests import programs, texts
from tests.circle import CIRCLE

pytestmark = pytest.mark.usefixtures('fast_compilation')


class Case:
  """A network with its variables, and updates of a client on the first samples of a dataset."""

  def __init__(self, private, model, outputs, **client):
    self.private, self.model, self.fields = private, model, client
    self.kind, self.shape = of_config(private.settings), private.samples.shape[1:]
    self.variables = model.init(jax.random.key(0), self.shape)
    self.client = dataclasses.replace(gl.ClientSettings(**client).client(model, outputs), modality=self.kind)
    self.send = jax.jit(self.client.local_update)

  def update(self, samples, targets):
    return jax.tree.map(np.asarray, self.send(None, self.variables, samples, targets).update)

  def of(self, number):
    """Returns the update of the first samples."""
    return self.update(self.private.samples[:number], self.private.targets[:number])

  def truth(self, number):
    return self.private.samples[:number], self.private.targets[:number]

  def attack(self, update, **options):
    given = {'controls': 2, 'progress': 'none', 'modality': self.kind, **self.fields, **options}
    return gl.attack(jax.random.key(1), self.model, self.variables, update, **given)


@pytest.fixture(scope='module')
def rows():
  private = gl.data.load('diabetes', 'test', limit=4)
  return Case(private, gl.models.mlp(2, 'default', widths=64), 2)


@pytest.fixture(scope='module')
def notes():
  private = texts.notes(3)
  return Case(private, *texts.network(width=32), loss='next_token')


def shown(case, sample):
  return [piece.text for piece in case.kind.marked(sample, None)]


@pytest.mark.long
def test_a_row_without_a_truth_is_read_in_words(rows, tmp_path):
  found = rows.attack(rows.of(1), attacks=[gl.attacks.fidel()], workdir=tmp_path / 'run')
  (one,) = found.inversions
  assert one.found and not one.inconclusive and one.mismatch < 1e-9 and one.closer == 2 and found.truth is None
  assert shown(rows, one.samples[0]) == shown(rows, rows.private.samples[0])
  usual = rows.kind.usual[np.newaxis]
  neutral = rows.update(np.asarray(usual, np.float32), rows.private.targets[:1])
  assert one.grey == pytest.approx(float(cosine(neutral, rows.of(1))), rel=1e-4)
  table = report.captured_table(found)
  assert 'fidel, row 1: age: 48, sex: other' in table and 'usual' in table.splitlines()[0] and 'and 4 more' in table
  page = report.render_captured(found)
  assert 'total cholesterol' in page and 'picture' not in re.sub(r'<[^>]*>', '', page.split('<main')[-1]).lower()
  assert 'The mismatch of medians and commonest categories' in page and 'share of equal cells' in page
  assert report.captured_grid(found)[:4] == b'\x89PNG'
  again = rows.attack(rows.of(1), attacks=[gl.attacks.fidel()], workdir=tmp_path / 'run')
  np.testing.assert_array_equal(again.inversions[0].samples, one.samples)
  assert again.inversions[0].found


@pytest.mark.long
def test_rows_of_an_auditor_who_owns_them_are_judged_and_marked(rows):
  found = rows.attack(rows.of(2), attacks=[gl.attacks.peeling()], truth=rows.truth(2))
  (row,) = found.rows
  assert row['verdict'] == 'exact' and row['cells'] == 1 and row['rows_right'] == 1
  page = report.render_captured(found)
  assert page.count('>private<') == 2 and 'piece right' in page and 'piece wrong' not in page
  turned = dataclasses.replace(found, truth=found.truth[::-1])  # what is shown stands in the order of the truth
  assert 'piece wrong' not in report.render_captured(turned)
  other = dataclasses.replace(found, truth=rows.private.samples[2:4])
  assert 'piece wrong' in report.render_captured(other)


def test_shares_of_a_relaxed_row_tell_how_sure_a_category_is(rows):
  relaxed = rows.private.samples[:1].copy()
  relaxed[0, 1:3] = 0.6, 0.4
  sure = {piece.of: piece.sure for piece in rows.kind.marked(relaxed[0], None)}
  entropy = -(0.6 * np.log2(0.6) + 0.4 * np.log2(0.4))
  assert sure['sex'] == pytest.approx(1 - entropy, abs=1e-6) and sure['age'] is None
  assert '(sure to 3 %)' in marked.line(rows.kind.marked(relaxed[0], None))
  assert 'sure to' not in marked.line(rows.kind.marked(rows.private.samples[0], None))


@pytest.mark.long
def test_a_text_without_a_truth_is_read_in_words(notes):
  found = notes.attack(notes.of(1), attacks=[gl.attacks.span()])
  (one,) = found.inversions
  np.testing.assert_array_equal(one.samples[0], notes.private.samples[0])
  assert one.found and one.mismatch < 1e-9 and one.closer == 2 and np.isnan(one.control_mismatch).all()
  assert one.grey > 0.1 and one.likeness == 0
  said = ' '.join(shown(notes, notes.private.samples[0]))
  assert f'span, text 1: {said}' in report.captured_table(found)
  page = report.render_captured(found)
  assert all(f'>{token}<' in page for token in said.split()[:3]) and 'texts of a single token' in page
  assert report.captured_grid(found)[:4] == b'\x89PNG'


@pytest.mark.slow
def test_texts_beside_those_of_an_auditor_and_nothing_found(notes):
  found = notes.attack(notes.of(1), attacks=[gl.attacks.span()], truth=notes.truth(1))
  assert [row['verdict'] for row in found.rows] == ['exact']
  page = report.render_captured(found)
  assert '>private<' in page and 'piece right' in page and 'piece wrong' not in page
  narrow = Case(notes.private, *texts.network(), loss='next_token')
  nothing = narrow.attack(narrow.of(3), attacks=[gl.attacks.span()], num_samples=3)  # 30 tokens, a width of 16
  (one,) = nothing.inversions
  assert not one.found and one.empty.all() and np.isnan(one.mismatch) and not one.inconclusive
  with words.about(nothing.config):
    assert str(finding(one)) == '`span` found nothing.'
  assert 'Nothing found.' in report.render_captured(nothing) and 'text 1' not in report.captured_table(nothing)


@pytest.mark.slow
def test_a_search_for_texts_is_compared_with_what_they_would_cause(notes):
  (one,) = notes.attack(notes.of(1), attacks=[gl.attacks.tag(steps=3)]).inversions
  simulated = notes.update(np.maximum(one.samples, 0), notes.private.targets[:1])
  assert one.mismatch == pytest.approx(float(cosine(simulated, notes.of(1))), rel=1e-4)
  assert one.labels_mode == 'unused' and one.found and len(one.control_mismatch) == 2


@pytest.mark.long
@pytest.mark.parametrize(
  ('samples', 'made', 'signs', 'names'),
  [
    ('diabetes', lambda: gl.models.mlp(2, widths=16), False, ['fidel', 'peeling', 'spear', 'tableak']),
    ('diabetes', lambda: gl.models.logistic(2), False, ['fidel', 'linear', 'tableak']),
    ('diabetes', lambda: gl.models.mlp(2, widths=16), True, ['fidel', 'peeling', 'spear', 'tableak']),
    ('notes', lambda: texts.network()[0], False, ['span', 'tag']),
    ('notes', lambda: texts.network(kind='lstm')[0], True, ['tag']),
  ],
)
def test_each_modality_has_attacks_where_none_is_named(samples, made, signs, names):
  private = texts.notes(3) if samples == 'notes' else gl.data.load(samples, 'test', limit=1)
  kind, model, shape = of_config(private.settings), made(), private.samples.shape[1:]
  client = gl.ClientSettings(loss='next_token' if samples == 'notes' else 'cross_entropy')
  variables = model.init(jax.random.key(0), shape)
  scenario = captured._stand_in(model, variables, shape, None, 1, client, None, kind)
  given = captured.CapturedSettings()
  found = chosen(Known(scenario, 1, signs), lambda one: captured._reads(one, jax.random.key(0), scenario, given))
  assert [method.name for method in found] == names
  assert (found[-1].settings['match'] == 'sign') == signs


@pytest.mark.long
def test_what_cannot_be_attacked_says_why(rows, notes):
  with pytest.raises(gl.UsageError, match=r'takes samples of 1 axes, and images have 3: give modality='):
    notes.attack(notes.of(1), modality=gl.modalities.IMAGES)
  with pytest.raises(gl.UsageError, match=r'modality is .*, expected a gradleak\.modalities\.Modality'):
    rows.attack(rows.of(1), modality='table')
  with pytest.raises(gl.UsageError, match=r'row 0 has .* in the column'):
    rows.attack(rows.of(1), truth=(np.full((1, 11), 0.3, np.float32), np.zeros(1, np.int32)))
  with pytest.raises(gl.UsageError, match=r'several do|none of the usual ones does.*sample_shape=\(T,\)'):
    lstm = Case(notes.private, *texts.network(kind='lstm'), loss='next_token')
    lstm.attack(lstm.of(1))
  with pytest.raises(gl.UsageError, match=r'the attack span reads the first block of a transformer'):
    rows.attack(rows.of(1), attacks=[gl.attacks.span()])
  with pytest.raises(gl.UsageError, match='no attacks on points run where none is named'):
    model = gl.models.mlp(2, widths=4)
    points = np.asarray([[0.9, 0.5]], np.float32)
    scenario = gl.scenario(model, points, np.zeros(1, np.int32), key=jax.random.key(0), modality=CIRCLE)
    chosen(Known(scenario, 1, False), lambda one: True)


def test_rows_in_a_file_of_the_truth(rows, tmp_path):
  samples, targets = rows.truth(2)
  np.savez(tmp_path / 'truth.npz', samples=samples, targets=targets)
  found = captured.read_truth(tmp_path / 'truth.npz', rows.shape, rows.kind)
  np.testing.assert_array_equal(found[0], samples)
  np.savez(tmp_path / 'bytes.npz', samples=np.ones((1, 11), np.uint8), targets=targets[:1])  # no bytes of an image
  with pytest.raises(gl.UsageError, match=r'rows are uint8 of shape \(1, 11\)'):
    captured.read_truth(tmp_path / 'bytes.npz', rows.shape, rows.kind)


@pytest.mark.long
@pytest.mark.parametrize('kind', ['gpt', 'bert'])
def test_an_update_under_the_names_of_hugging_face(kind, tmp_path):
  case = Case(texts.notes(3), *texts.network('mean', kind), loss='cross_entropy')
  update = case.of(1)
  named = {trees.path_names(path): np.asarray(x) for path, x in jax.tree.leaves_with_path(update)}
  theirs = {}
  for path, values in named.items():
    name = token_weights.published_name(path)
    turned = path[-1] == 'kernel' and not (kind == 'gpt' and name.startswith('h.'))  # GPT-2 has [in, out] in blocks
    theirs[f'{"transformer" if kind == "gpt" else "bert"}.{name}'] = values.T if turned else values
  np.savez(tmp_path / 'update.npz', **theirs)
  read = gl.read_update(tmp_path / 'update.npz', case.model, case.variables)
  jax.tree.map(np.testing.assert_array_equal, read, update)
  np.savez(tmp_path / 'ours.npz', **{'/'.join(path): values for path, values in named.items()})
  jax.tree.map(np.testing.assert_array_equal, gl.read_update(tmp_path / 'ours.npz', case.model, case.variables), update)


@pytest.mark.long
@pytest.mark.parametrize('name', ['diabetes', 'notes'])
def test_the_program_takes_the_columns_or_the_tokens_of_a_dataset(name, rows, notes, tmp_path):
  case = rows if name == 'diabetes' else notes
  for what, tree in (('weights', case.variables['params']), ('update', case.of(1))):
    np.savez(tmp_path / what, **{'/'.join(trees.path_names(p)): x for p, x in jax.tree.leaves_with_path(tree)})
  files = [f'--{what}={tmp_path}/{what}.npz' for what in ('weights', 'update')]
  own = {
    'diabetes': ['--model=mlp(widths=64)', '--attacks=fidel'],
    'notes': ['--model=gpt(width=32,layers=1,heads=2)', '--length=10', '--attacks=span'],
  }[name]
  common = [f'--dataset={name}', '--controls=1', '--compilation_cache=', f'--workdir={tmp_path}/found']
  done = programs.start('attack', *files, *own, *common)
  assert done.status == 0, done.err
  expected = (
    'fidel, row 1: age: 48' if name == 'diabetes' else f'span, text 1: {" ".join(shown(case, case.truth(1)[0][0]))}'
  )
  assert expected in done.out
  refused = programs.start('attack', *files, *own, *common, '--sample_shape=11')
  assert refused.status == 2 and '--sample_shape is that of the samples of --dataset' in refused.err


@pytest.mark.long
def test_numbers_that_the_client_scales_in_its_own_way(tmp_path):
  """A client takes (age − 40) / 100, and sizes as they are; it is attacked in Python, and by the program on files."""
  rng = np.random.default_rng(0)
  columns = {'age': rng.integers(20, 80, 60), 'size': rng.normal(5, 2, 60), 'sex': rng.choice(['f', 'm'], 60)}
  given = {'age': {'center': 40, 'scale': 100}, 'size': {'scale': 1}}
  labels = rng.choice(['no', 'yes'], 60)
  private = gl.data.table(columns, labels, given=given)
  mine, target = {name: values[:1] for name, values in columns.items()}, np.asarray([labels[0] == 'yes'], np.int32)
  row = np.asarray([[(mine['age'][0] - 40) / 100, mine['size'][0], *np.eye(2)[int(mine['sex'][0] == 'm')]]], np.float32)
  plain = gl.models.mlp(2, 'default', widths=16)
  variables = plain.init(jax.random.key(0), (4,))

  def loss(params):
    logits, _ = plain.apply({'params': params}, row, True, None)
    return -jax.nn.log_softmax(logits)[0, target[0]]

  update = jax.tree.map(np.asarray, jax.grad(loss)(variables['params']))
  truth = tables.from_json(private.settings['schema']).encode(mine), target
  shared = {'modality': of_config(private.settings), 'attacks': [gl.attacks.fidel()], 'controls': 1, 'progress': 'none'}
  network = gl.models.standardised(plain, *private.scaling)
  found = gl.attack(jax.random.key(1), network, variables, update, truth=truth, **shared)
  assert found.rows[0]['verdict'] == 'exact' and found.inversions[0].at_truth < 1e-6
  with pytest.raises(gl.UsageError, match=r"numbers are taken, and 'mlp.*' does not do that: give .*standardised"):
    gl.attack(jax.random.key(1), plain, variables, update, **shared)

  for what, tree in (('weights', variables['params']), ('update', update)):
    np.savez(tmp_path / what, **{'/'.join(trees.path_names(p)): x for p, x in jax.tree.leaves_with_path(tree)})
  lines = [f'{age},{size:.5f},{sex},{ill}' for age, size, sex, ill in zip(*columns.values(), labels, strict=True)]
  (tmp_path / 'known.csv').write_text('\n'.join(['age,size,sex,ill', *lines]))
  (tmp_path / 'schema.json').write_text(json.dumps({'columns': given}))
  files = [f'--{what}={tmp_path}/{what}.npz' for what in ('weights', 'update')]
  of = [f'--dataset=table:{tmp_path}/known.csv', '--model=mlp(widths=16)', f'--workdir={tmp_path}/found']
  options = ['--attacks=fidel', '--controls=1', '--compilation_cache=']
  done = programs.start('attack', *files, *of, *options, f'--schema={tmp_path}/schema.json')
  assert done.status == 0 and f'fidel, row 1: age: {mine["age"][0]}' in done.out, done.err
  assert 'scaled as (number − 40) / 100' in done.err


def changed(case, **fields):
  """Returns the modality of a table whose columns are changed: name -> fields of a `Field`, None for its last place."""
  schema = tables.from_json(case.private.settings['schema'])
  made = [field._replace(**(fields.get(field.name) or {})) for field in schema.fields]
  last = [name for name, new in fields.items() if new is None]
  made.sort(key=lambda field: field.name in last)
  return of_config({'modality': 'table', 'schema': schema._replace(fields=tuple(made)).to_json()})


@pytest.mark.long
@pytest.mark.parametrize(
  ('fields', 'said'),
  [
    ({}, ''),
    ({'sex': None}, r'row.* by which peeling explains the update do not fit .*: (.*, )?sex has .* where 0 or 1 stands'),
    ({'LDL': None}, r'blood sugar has 97\.8 where whole numbers are known'),
    ({'age': {'mean': 500.0}}, r'age has 499 where 19 to 79 are known'),
    ({'age': {'kind': 'ordinal', 'levels': ('30', '50', '70'), 'median': 40.0}}, r'age has 48 between its levels'),
  ],
)
def test_rows_that_do_not_fit_the_columns_are_told(rows, fields, said):
  found = rows.attack(rows.of(1), attacks=[gl.attacks.peeling()], modality=changed(rows, **fields))
  assert found.inversions[0].mismatch < 1e-9
  told = [one for one in found.warnings if 'do not fit their description' in one]
  assert len(told) == bool(said) and all(re.search(said, one) for one in told)
  assert all(one in report.captured_table(found) for one in told)


@pytest.mark.long
def test_pixels_beyond_their_range_are_told():
  data = gl.data.load('digits', limit=1)
  model = gl.models.mlp(10, widths=64)
  variables = model.init(jax.random.key(0), (8, 8, 1))

  def warned(images):
    client = gl.ClientSettings().client(model, 10)
    update = client.local_update(None, variables, images, data.targets).update
    options = {'attacks': [gl.attacks.fidel()], 'sample_shape': (8, 8, 1), 'controls': 1, 'progress': 'none'}
    return gl.attack(jax.random.key(1), model, variables, update, **options).warnings

  (told,) = warned((data.samples - 0.3) / 0.3)
  assert 'pixels from -1 to 2.3 where 0 to 1 are known' in told
  assert not any('fit their description' in one for one in warned(data.samples))


@pytest.mark.slow
def test_a_truth_that_does_not_explain_the_update_is_told(rows, notes):
  def warned(case, update, truth, **options):
    attack = gl.attacks.span() if case is notes else gl.attacks.peeling()
    found = case.attack(update, attacks=[attack], controls=1, truth=truth, **options)
    return found.inversions[0].at_truth, [one for one in found.warnings if 'The truth would cause another' in one]

  for case in (rows, notes):
    samples, targets = case.truth(3)
    apart, told = warned(case, case.of(3), (samples[::-1], targets[::-1]))  # their order is not known
    assert apart < 1e-6 and not told
    for wrong in (case.truth(2), (samples[[0, 1, 1]], targets)):
      apart, told = warned(case, case.of(3), wrong)
      assert apart > 1e-3 and f'its mismatch is {apart:.2g}' in told[0]
    noisy = jax.tree.map(lambda x: x + np.float32(0.1) * np.sign(x), case.of(3))
    assert warned(case, noisy, case.truth(3))[1] and not warned(case, noisy, case.truth(3), defense='clip(norm=1)')[1]
  samples, targets = rows.truth(1)
  assert warned(rows, rows.of(1), (samples, 1 - targets))[1]
  other = Case(rows.private, rows.model, 2)
  other.variables = rows.model.init(jax.random.key(9), rows.shape)
  assert warned(other, rows.of(1), rows.truth(1))[1] and not warned(other, other.of(1), rows.truth(1))[1]


@pytest.mark.long
def test_a_private_number_beyond_the_known_ones_is_no_other_one(rows):
  """The columns know ages up to 79; a private one of 95 is found as 95, and 79 in its place is wrong."""
  kind, samples = rows.kind, rows.private.samples[:1].copy()
  (field,) = [one for one in tables.from_json(rows.private.settings['schema']).fields if one.name == 'age']
  samples[0, 0] = (95 - field.mean) / field.std
  update = rows.update(samples, rows.private.targets[:1])
  found = rows.attack(update, attacks=[gl.attacks.fidel()], truth=(samples, rows.private.targets[:1]))
  assert found.rows[0]['verdict'] == 'exact' and found.rows[0]['cells_exact'] == 1
  page = report.render_captured(found)
  assert page.count('>95<') == 2 and '>79<' not in page
  clipped = samples.copy()
  clipped[0, 0] = (79 - field.mean) / field.std
  labels = np.zeros(1, np.int32)
  assert kind.evaluate(clipped, samples, labels, labels)['cells'] == 0.9
  assert kind.nearness(clipped, samples) == [0.9] and kind.marked(clipped[0], samples[0])[0] == (
    '79',
    False,
    'age',
    None,
  )
  between = samples.copy()
  between[0, 0] = (47.5 - field.mean) / field.std
  assert kind.evaluate(between, between, labels, labels)['cells_exact'] == 1
  whole = between.copy()
  whole[0, 0] = (48 - field.mean) / field.std
  assert kind.evaluate(whole, between, labels, labels)['cells_exact'] == 0.9


def test_an_ordinal_number_between_levels_is_no_row():
  private = gl.data.table({'stage': np.arange(40) % 4, 'size': np.linspace(0, 1, 40)}, np.arange(40) % 2)
  kind = of_config(private.settings)
  kind.check(private.samples)
  wrong = private.samples.copy()
  wrong[2, 0] += 0.2
  with pytest.raises(gl.UsageError, match=r"row 2 has .* in the column 'stage', expected the number of one of its lev"):
    kind.check(wrong)


@pytest.mark.slow
def test_texts_that_a_batch_holds_twice_are_found_twice(notes):
  for place in range(3):
    twice = np.stack([notes.private.samples[place]] * 2)
    targets = np.repeat(notes.private.targets[place], 2)
    found = notes.attack(notes.update(twice, targets), attacks=[gl.attacks.span()], truth=(twice, targets), controls=1)
    assert found.rows[0]['verdict'] == 'exact' and found.rows[0]['token_accuracy'] == 1
    assert found.inversions[0].mismatch < 1e-9


@pytest.mark.slow
def test_texts_that_are_longer_than_said_are_told(notes):
  found = notes.attack(notes.of(1), attacks=[gl.attacks.span()], sample_shape=(6,), controls=1)
  told = [one for one in found.warnings if 'moves the embedding of position 9' in one]
  assert len(told) == 1 and 'sample_shape=(10,) has room for all' in told[0]
  found = notes.attack(notes.of(1), attacks=[gl.attacks.span()], controls=1)
  assert not any('position' in one for one in found.warnings)


@pytest.mark.long
@pytest.mark.parametrize('kind', ['gpt', 'bert'])
@pytest.mark.parametrize('length', [6, 9, 10])
def test_the_last_position_that_an_update_moves_is_told(kind, length):
  model = gl.models.create(f'{kind}(vocabulary=258,width=8,layers=1,heads=1,length=10)', 3, init='default')
  variables, client = model.init(jax.random.key(0), (6,)), gl.Client(model, 3, modality=TEXT)
  ids, labels = np.random.default_rng(0).integers(0, 256, (2, length)), np.asarray([0, 1])
  update = client.local_update(None, variables, ids.astype(np.int32), labels).update
  told = [*_longer(update, variables, client, (6,))]
  assert [re.findall(r'position (\d+)', one) for one in told] == ([] if length == 6 else [[str(length)]])
  assert not [*_longer(update, variables, client, (length,))]


@pytest.mark.long
def test_samples_of_another_size_or_tokeniser_are_refused(rows, notes):
  with pytest.raises(gl.UsageError, match=r'the variables do not fit the model .* \(12,\)'):
    rows.attack(rows.of(1), sample_shape=(12,))
  own = gl.data.load('notes', 'test', limit=2, tokeniser='bytes', length=10)
  with pytest.raises(gl.UsageError, match='embeds 411 tokens, and the tokeniser has 258: it is of another'):
    notes.attack(notes.of(1), modality=of_config(own.settings))
  small = gl.models.gpt(5, vocabulary=60, padding=0, length=10, width=16, layers=1, heads=2, head='mean')
  with pytest.raises(gl.UsageError, match='embeds 60 tokens, and the tokeniser has 258: it is of another'):
    gl.scenario(small, own.samples, own.targets, key=jax.random.key(0), modality=of_config(own.settings))
