"""Texts run through audit, adaptive attackers, stored results and pages; clients of all kinds train on them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradleak as gl
from gradleak.audit import schema
from gradleak.core import trees
from gradleak.modalities import IMAGES, of_config, of_rows
from tests import programs, texts
from tests.circle import said_of_images

TAG = gl.attacks.tag(steps=120, decay='cosine')
DEFENSES = [None, gl.defenses.gaussian(stddev=10.0), gl.defenses.prune(rate=0.5)]


@pytest.fixture(scope='module')
def scenario():
  return texts.scenario()


@pytest.fixture(scope='module')
def result(scenario, tmp_path_factory):
  folder = tmp_path_factory.mktemp('notes')
  found = gl.audit(jax.random.key(1), scenario, DEFENSES, [TAG], 3, controls=8, workdir=folder, progress='none')
  return found, folder


@pytest.mark.long
def test_notes_are_read_and_noise_hides_them(result):
  found, _ = result
  by = {defense: [row for row in found.rows if row['defense'] == defense] for defense in found.config['defenses']}
  assert sum(row['success'] for row in by['none']) >= 2 and all(row['candidates'] == 160 for row in by['none'])
  noisy = next(rows for name, rows in by.items() if name.startswith('gaussian'))
  assert not any(row['success'] for row in noisy)
  assert {row['adaptive'] for row in by['prune(rate=0.5)']} == {None, 'masked'}
  assert found.truth.dtype == np.int32 and found.truth.shape == (3, 1, texts.LENGTH)
  assert all(one.dtype == np.int32 for one in found.reconstructions.values())


@pytest.mark.long
def test_rows_have_the_columns_of_texts(result):
  found, _ = result
  kind = of_config(found.config)
  names = {column.name for column in schema.columns(kind)}
  assert all(set(row) == names for row in [*found.rows, *found.controls])
  assert {'rouge1', 'control_rouge1', 'oracle_rouge2', 'control_standing'} <= names and 'psnr' not in names
  assert of_rows(found.rows).name == 'text' and of_rows([{'psnr': 1.0}]) is IMAGES
  assert all(row['flat'] == 0 and row['labels'] == 'unused' for row in found.rows)


@pytest.mark.long
def test_a_page_and_a_table_are_made_of_it(result, tmp_path):
  found, folder = result
  table = gl.report.terminal_table(found)
  assert 'ROUGE-1' in table and 'texts' in table and 'PSNR' not in table and 'pixel' not in table
  gl.report.write(found, tmp_path)
  page = (tmp_path / 'report.html').read_text('utf-8')
  assert 'The F1 of the words that a reconstruction and the private text have in common' in page
  assert 'class="piece right"' in page and 'token by token' in page and not said_of_images(page)
  again = gl.load(folder)
  assert again.config['modality'] == 'text' and of_config(again.config) is of_config(found.config)
  assert np.array_equal(again.truth, found.truth)


@pytest.mark.slow
def test_an_interrupted_audit_goes_on(scenario, result, tmp_path):
  """The same rows as at once, from the uploads and reconstructions that are kept as whole numbers."""
  found, _ = result
  for trials in (1, 3):
    part = gl.audit(jax.random.key(1), scenario, DEFENSES, [TAG], 3, controls=8, workdir=tmp_path, progress='none')
    assert [row['rouge1'] for row in part.rows] == [row['rouge1'] for row in found.rows], trials


CLASSES = 'cross_entropy'
NETWORKS = [
  *(('gpt', 'last', CLASSES), ('gpt', 'mean', CLASSES), ('bert', 'mean', CLASSES), ('bert', 'masked', 'masked_token')),
  *(('lstm', 'last', CLASSES), ('lstm', 'mean', CLASSES)),
]


@pytest.mark.long
@pytest.mark.parametrize('kind, head, loss', NETWORKS)
def test_clients_of_all_kinds_send_finite_updates(kind, head, loss):
  made = texts.scenario(loss, head, kind, number=4)
  samples, labels = jnp.asarray(made.samples), jnp.asarray(made.targets)
  sent = jax.jit(made.client.local_update)(jax.random.key(0), made.variables, samples, labels)
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(sent.update))
  assert any(np.asarray(leaf).any() for leaf in jax.tree.leaves(sent.update))


@pytest.mark.long
@pytest.mark.parametrize('loss', [CLASSES, 'next_token'])
def test_slices_of_each_step_have_the_risk_of_texts(loss):
  made = texts.scenario(loss, 'last' if loss == CLASSES else 'next', number=2)
  client = gl.defenses.bind(gl.defenses.graddefense_step(stddev=0.1), made.context).client(made.client)
  samples, labels = jnp.asarray(made.samples), jnp.asarray(made.targets)
  given = made.variables, samples, labels
  plain, sent = (jax.jit(one.local_update)(jax.random.key(0), *given).update for one in (made.client, client))
  touched = [np.ravel(np.abs(a - b) > 1e-4) for a, b in zip(*map(jax.tree.leaves, (plain, sent)), strict=True)]
  assert 0 < np.mean(np.concatenate(touched)) < 0.95
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(sent))


@pytest.mark.long
@pytest.mark.parametrize(
  'settings',
  [
    {'share': 'delta', 'local_epochs': 2, 'local_batch_size': 2},
    {'share': 'delta', 'local_epochs': 2, 'local_batch_size': 3, 'optimizer': 'adam'},
    {'precision': 'bfloat16'},
    {'cohort': 2},
    {'frozen': 'wte-wpe'},
  ],
)
def test_local_training_of_texts(settings):
  made = texts.scenario(number=4, **settings)
  samples, labels = jnp.asarray(made.samples), jnp.asarray(made.targets)
  sent = jax.jit(made.client.local_update)(None, made.variables, samples, labels)
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(sent.update))
  if 'frozen' in settings:
    assert not np.asarray(sent.update['wte']['embedding']).any() and np.asarray(sent.update['ln_f']['scale']).any()
  if settings == {'precision': 'bfloat16'}:
    exact = dataclasses.replace(made.client, precision='float32')
    plain = jax.jit(exact.local_update)(None, made.variables, samples, labels)
    for a, b in zip(jax.tree.leaves(sent.update), jax.tree.leaves(plain.update), strict=True):
      assert float(jnp.linalg.norm(a - b)) < 0.1 * float(jnp.linalg.norm(b)) + 1e-4


@pytest.mark.slow
def test_a_delta_of_texts_is_matched():
  made = texts.scenario(number=101, share='delta', local_epochs=2, learning_rate=0.01)
  method = gl.attacks.tag(steps=2)
  found = gl.audit(jax.random.key(1), made, [None], [method], 1, controls=1, progress='none')
  row = found.rows[0]
  assert row['objective_at_truth'] < 1e-6 < row['objective_start']


def test_defenses_of_pixels_and_attacks_on_them_are_refused(scenario):
  for defense in (gl.defenses.soteria(rate=0.5), gl.defenses.concealment(), gl.defenses.ats()):
    with pytest.raises(gl.UsageError, match='moves numbers such as pixels, and texts are whole ones'):
      gl.audit(jax.random.key(1), scenario, [defense], [TAG], 1, controls=1, progress='none')
  for attack, message in (
    (gl.attacks.csdlg(), 'tv is not defined on texts'),
    (gl.attacks.fidel(), 'text|dense'),
    (gl.attacks.april(), 'images'),
  ):
    with pytest.raises(gl.UsageError, match=message):
      gl.audit(jax.random.key(1), scenario, [None], [attack], 1, controls=1, progress='none')


def test_a_scenario_of_other_samples_is_refused():
  data = texts.notes(4)
  model, _ = texts.network()
  with pytest.raises(gl.UsageError, match='the samples: images have the shape'):
    gl.scenario(model, data.samples, data.targets, key=jax.random.key(0), loss='next_token')
  with pytest.raises(gl.UsageError, match='the gallery is float32'):
    texts.scenario(gallery=np.zeros((3, texts.LENGTH), np.float32))


@pytest.mark.long
def test_accuracy_of_tokens_is_counted_by_hand(scenario):
  from gradleak.federated import simulation

  found = simulation.judged(scenario.client, scenario.variables, scenario.samples, scenario.targets, 40)
  images = scenario.samples
  logits = np.asarray(scenario.client.model.apply(scenario.variables, jnp.asarray(images), False, None)[0], np.float64)
  counted = images[:, 1:] != 0
  assert np.array_equal(found.truth, images[:, 1:][counted])
  assert found.lengths == counted.sum(axis=1).tolist()
  assert np.array_equal(found.predicted, logits[:, :-1].argmax(-1)[counted])
  logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  own = np.take_along_axis(logs[:, :-1], images[:, 1:, np.newaxis], -1)[..., 0]
  assert found.loss == pytest.approx(-own[counted].mean(), rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize('make', [gl.models.gpt, gl.models.bert, gl.models.lstm])
@pytest.mark.parametrize('wrapped', [False, True])
def test_a_network_of_another_vocabulary_or_padding_is_refused(make, wrapped):
  notes = gl.data.load('notes', 'test', limit=4)
  modality, size = gl.modalities.of_config(notes.settings), notes.known['vocabulary']

  def made(vocabulary, padding):
    model = make(5, 'default', vocabulary=vocabulary, padding=padding, width=8, layers=1)
    model = gl.models.lora.lora(model) if wrapped else model
    return gl.scenario(model, notes.samples, notes.targets, key=jax.random.key(0), modality=modality)

  assert made(size, 0).client.model.vocabulary == size
  assert made(-(-size // 64) * 64, 0).client.model.vocabulary > size  # rounded up, as published ones are
  for vocabulary, padding, words in (
    (258, 0, f'embeds 258 tokens, and the tokeniser has {size}: it is of another'),
    (size + 9, 0, f'give it vocabulary={size}'),
    (size, 256, 'takes the token 256 for padding, and the texts are padded with 0: give it padding=0'),
  ):
    with pytest.raises(gl.UsageError, match=words):
      made(vocabulary, padding)


@pytest.mark.long
def test_a_network_may_lack_the_tokens_that_were_added():
  """Padding and masks, added behind those of a published model; texts that have them are refused."""
  tokens = gl.data.tokenisers.Tokeniser('words', ('a', 'b', 'c', '[pad]', '[mask]'), 3, 4)
  model = gl.models.gpt(2, 'default', vocabulary=3, padding=None, width=8, layers=1)
  given = {'key': jax.random.key(0), 'modality': gl.modalities.text.of_tokeniser(tokens)}
  gl.scenario(model, np.int32([[0, 1], [2, 1]]), [0, 1], **given)
  with pytest.raises(gl.UsageError, match=r'have the token 3, and .* embeds 3'):
    gl.scenario(model, np.int32([[0, 3], [2, 1]]), [0, 1], **given)


@pytest.mark.long
def test_weights_of_a_file_are_judged_by_the_tokens_that_they_predict(tmp_path):
  notes = gl.data.load('notes', 'test', limit=2)
  spec = 'gpt(width=8,layers=1,heads=1)'
  model = gl.models.create(spec, notes.known['vocabulary'], known={**notes.known, 'head': 'next'})
  params = model.init(jax.random.key(0), notes.samples.shape[1:])['params']
  entries = {'.'.join(trees.path_names(path)): leaf for path, leaf in jax.tree.leaves_with_path(params)}
  np.savez(tmp_path / 'mine.npz', **entries)
  flags = ('--dataset=notes', f'--model={spec}', f'--weights={tmp_path}/mine.npz', '--public=8', '--trials=1')
  done = programs.start('audit', *flags, '--defenses=instahide', f'--workdir={tmp_path}/new')
  assert done.status == 2 and 'instahide' in done.err  # it mixes images
  assert 'mine.npz: ' in done.err and '%, of 8 public texts' in done.err


def test_copies_of_texts_differ_from_them_where_they_can():
  copies, pad = gl.modalities.TEXT.copies, 256
  np.testing.assert_array_equal(copies['shortened'](np.int32([[65]])), [[65]])
  np.testing.assert_array_equal(
    copies['shortened'](np.int32([[65, 66, 0], [7, pad, pad]])), [[65, 66, pad], [7, pad, pad]]
  )
  np.testing.assert_array_equal(copies['one token'](np.int32([[5, 0, 7], [5, 6, 7]])), [[5, 1, 7], [5, 0, 7]])
  np.testing.assert_array_equal(copies['one token'](np.int32([[0]])), [[1]])
