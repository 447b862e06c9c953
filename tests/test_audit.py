"""The library call: what is attacked, what is measured, and what is made of it."""

import html
import math
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradleak as gl
from gradleak import report
from gradleak.audit import granted, plan, run, schema
from gradleak.audit.run import _parts
from gradleak.audit.scores import kept_distance
from gradleak.audit.uploads import Send, uploads
from gradleak.audit.verdict import Threshold, exact_alone, judge, require_undefended_recovery, threshold
from tests.attackers import divide
from tests.objects import objects

pytestmark = pytest.mark.usefixtures('fast_compilation')

KEY = jax.random.key(7)
RECOVERY = 'csdlg(tv=0,steps=200)'  # enough for a linear model


def audit(scenario, defenses=('none',), attacks=(RECOVERY,), trials=4, **settings):
  settings = {'controls': 8, 'group_size': 4, 'progress': 'none', 'knowledge': 'non-adaptive', **settings}
  return gl.audit(KEY, scenario, objects(defenses), objects(attacks), trials, **settings)


def closed_form(reconstruct):
  """Returns a user's attack without steps: `reconstruct(key, observation)` gives (images, distance)."""

  def factory(client):
    del client

    def finish(key, observation):
      images, distance = reconstruct(key, observation)
      zero, labels = jnp.zeros((), jnp.float32), jnp.zeros(observation.batch_shape[:1], jnp.int32)
      return gl.attacks.Reconstruction(images, labels, zero, distance, zero, jnp.full((), -1, jnp.int32))

    return gl.attacks.Attack(
      init=lambda key, observation: jax.random.key_data(key),
      step=lambda state, observation: (state, {'objective': jnp.zeros((), jnp.float32)}),
      reconstruct=lambda state, observation: finish(jax.random.wrap_key_data(state), observation),
      objective=lambda observation, images, labels: jnp.zeros((), jnp.float32),
      num_steps=0,
      labels='known',
    )

  return factory


def draw(key, observation):
  """An attack that guesses: a constant image drawn from its key, which it holds for the better the darker it is."""
  value = jax.random.uniform(key)
  return jnp.full(observation.batch_shape, value), value


def by(rows, **chosen):
  return [row for row in rows if all(row[key] == value for key, value in chosen.items())]


def without(row, *keys):
  return {key: value for key, value in row.items() if key not in keys}


# ---- what a trial is


@pytest.fixture(scope='module')
def result(linear):
  """Four trials: undefended, pruned, by a defense that breaks the upload of digit 3, and on noise alone."""

  def break_threes(updates, params):
    del params
    broken = updates['bias'][3] < 0  # with cross-entropy, at the true class only
    return jax.tree.map(lambda u: jnp.where(broken, jnp.nan, u), updates)

  texts = {text: text for text in ('none', 'prune(rate=0.5)', 'null_gradient')}
  return audit(linear, {**texts, 'break_threes': gl.defenses.wrap(optax.stateless(break_threes), 'upload')})


def test_rows_come_by_attack_then_defense_then_trial(result, linear):
  assert [(row['defense'], row['trial']) for row in result.rows] == [
    (defense, trial) for defense in ('none', 'prune(rate=0.5)', 'null_gradient', 'break_threes') for trial in range(4)
  ]
  assert [(row['defense'], row['trial']) for row in result.controls] == [('null_gradient', i) for i in range(8)]
  assert {row['attack'] for row in result.rows + result.controls} == {RECOVERY}
  np.testing.assert_array_equal(result.truth, linear.samples[:4, np.newaxis])


def test_an_undefended_linear_layer_leaks_everything(result):
  for row in by(result.rows, defense='none'):
    assert row['psnr'] > 40 and row['label_correct'] == 1
    assert row['success'] and row['verdict'] == 'exact'
    assert row['psnr'] == row['oracle_psnr']  # one restart
    assert row['control_psnr'] < 15
  for row in result.controls:
    assert row['psnr'] < 15


def test_figures_are_those_of_the_images(result):
  for (attack, defense), images in result.reconstructions.items():
    for row, image, truth in zip(by(result.rows, attack=attack, defense=defense), images, result.truth, strict=True):
      if not row['diverged']:
        error = np.mean((np.clip(image, 0, 1) - truth) ** 2, dtype=np.float64)
        np.testing.assert_allclose([row['mse'], row['psnr']], [error, -10 * np.log10(error)], rtol=1e-4)


def test_a_trial_that_is_not_finite_is_diverged_and_its_neighbours_are_untouched(result):
  broken, plain = by(result.rows, defense='break_threes'), by(result.rows, defense='none')
  assert [row['diverged'] for row in broken] == [False, False, False, True]
  assert (broken[3]['verdict'], broken[3]['diverged_step'], broken[3]['success']) == ('diverged', 0, False)
  assert broken[3]['psnr'] is None and broken[3]['mse'] is None
  assert [without(row, 'defense') for row in broken[:3]] == [without(row, 'defense') for row in plain[:3]]
  images = result.reconstructions[RECOVERY, 'break_threes']
  assert np.isnan(images[3]).all()
  np.testing.assert_array_equal(images[:3], result.reconstructions[RECOVERY, 'none'][:3])


@pytest.mark.long
def test_a_report_of_a_diverged_trial_names_it(result, tmp_path):
  assert '1 NaN' in report.terminal_table(result)
  report.write(result, tmp_path)
  assert 'diverged at step 0' in (tmp_path / 'report.html').read_text('utf-8')


@pytest.mark.long
def test_defenses_changed_what_is_sent(linear):
  defenses = ['none', 'prune(rate=0)', 'clip(norm=inf)', 'prune(rate=0.9)', 'clip(norm=0.01)', 'gaussian(stddev=0.1)']
  found = audit(linear, defenses, {'guess': closed_form(draw)})
  change = {defense: [row['change'] for row in by(found.rows, defense=defense)] for defense in defenses}
  assert change['none'] == change['prune(rate=0)'] == change['clip(norm=inf)'] == [0.0] * 4
  assert all(0 < value < 1 for value in change['prune(rate=0.9)'])
  assert all(0.9 < value < 1 for value in change['clip(norm=0.01)'])
  assert all(value > 0 for value in change['gaussian(stddev=0.1)'])
  assert len(set(change['gaussian(stddev=0.1)'])) == 4  # each client draws its own noise
  flags = {entry['defense']: entry['flags'] for entry in report.worst_case(found.rows)}
  assert 'defense changed nothing' in flags['prune(rate=0)']
  assert 'defense changed nothing' not in flags['prune(rate=0.9)'] + flags['none']


@pytest.mark.slow
def test_another_model_of_the_same_spec_compiles_nothing(caplog):
  data = gl.data.load('digits', 'test', limit=2)

  def run(seed):
    model = gl.models.create('mlp(widths=3)', 10)
    scenario = gl.scenario(model, data.samples, data.targets, key=jax.random.key(seed), dataset='digits')
    with jax.log_compiles():
      audit(scenario, ('none', 'prune(rate=0.5)'), ('csdlg(steps=2)',), trials=2, controls=2)
    compiled = sum('Compiling' in record.message for record in caplog.records)
    caplog.clear()
    return compiled

  jax.clear_caches()  # else programs of other tests are found
  assert run(0) > 10 and run(1) == 0


@pytest.mark.slow
def test_scaling_by_half_changes_an_upload_by_half(linear):
  found = audit(linear, {'half': gl.defenses.wrap(optax.scale(0.5), 'upload')}, {'guess': closed_form(draw)})
  np.testing.assert_allclose([row['change'] for row in found.rows], 0.5, rtol=1e-6)
  assert found.config['defenses'] == ['half']


@pytest.mark.long
def test_each_strength_of_a_defense_has_its_own_arguments(linear):
  @gl.defenses.defense(place='upload', arguments=lambda context, settings: (np.float32(settings['strength']),))
  def scaled(factor=1.0, *, strength: float):
    return optax.scale(factor)

  strengths = {str(strength): scaled(strength=strength) for strength in (0.5, 0.25)}
  found = audit(linear, strengths, {'guess': closed_form(draw)}, trials=1)
  np.testing.assert_allclose([row['change'] for row in found.rows], [0.5, 0.75], rtol=1e-6)


def test_strengths_that_are_made_for_the_same_share_a_program(linear):
  context = linear._replace(public=(linear.samples, linear.targets)).context
  several = (gl.defenses.graddefense(stddev=stddev, estimate='exact') for stddev in (0.1, 0.2))
  one, other = (Send.of(gl.defenses.bind(defense, context), linear.client) for defense in several)
  assert one == other and hash(one) == hash(other)


@pytest.mark.slow
def test_rows_do_not_depend_on_the_defenses_beside_them(result, linear):
  alone = audit(linear, ['none'])
  assert alone.rows == by(result.rows, defense='none')
  assert alone.controls == result.controls


@pytest.mark.slow
def test_rows_do_not_depend_on_the_trials_beside_them(result, linear):
  few = audit(linear, ['prune(rate=0.5)'], trials=3, controls=2)
  judged = ('control_psnr', 'control_pearson', 'success', 'solved', 'verdict')  # the control pool is another
  expected = by(result.rows, defense='prune(rate=0.5)')[:3]
  assert [without(row, *judged) for row in few.rows] == [without(row, *judged) for row in expected]


@pytest.mark.long
def test_starts_are_paired_across_defenses_and_differ_across_trials(linear):
  found = audit(linear, ['none', 'prune(rate=0.5)'], {'guess': closed_form(draw)}, trials=8)
  start = {defense: found.reconstructions['guess', defense][:, 0, 0, 0, 0] for defense in ('none', 'prune(rate=0.5)')}
  np.testing.assert_array_equal(start['none'], start['prune(rate=0.5)'])
  controls = [row['distance'] for row in found.controls]
  assert len({*start['none'].tolist(), *controls}) == 16


@pytest.mark.long
def test_restarts_are_chosen_by_the_distance_and_the_oracle_stands_beside(linear):
  one = audit(linear, attacks={'guess': closed_form(draw)}, trials=8)
  four = audit(linear, attacks={'guess': closed_form(draw)}, trials=8, restarts=4)
  images = four.reconstructions['guess', 'none'][:, 0, 0, 0, 0]
  np.testing.assert_array_equal(images, np.float32([row['distance'] for row in four.rows]))
  assert all(more['distance'] <= less['distance'] for more, less in zip(four.rows, one.rows, strict=True))
  assert sum(more['distance'] < less['distance'] for more, less in zip(four.rows, one.rows, strict=True)) > 2
  assert all(row['oracle_psnr'] >= row['psnr'] for row in four.rows)
  assert any(row['oracle_psnr'] > row['psnr'] for row in four.rows)  # the darkest is not always the closest


@pytest.mark.long
@pytest.mark.parametrize(('labels', 'granted'), [('known', 1), ('inferred', 0), ('optimised', 0), ('wainakh', 0)])
def test_an_attacker_sees_no_labels_that_it_is_not_granted(linear, labels, granted):
  def reveal(key, observation):
    assert observation.targets.shape == (2, 10)
    return jnp.broadcast_to(jnp.max(observation.targets, axis=1)[:, None, None, None], (2, 8, 8, 1)), jnp.float32(0)

  found = audit(linear, attacks={'reveal': closed_form(reveal)}, labels=labels, batch_size=2, trials=2)
  assert (found.reconstructions['reveal', 'none'] == granted).all()
  assert {row['labels'] for row in found.rows} == {labels if labels in ('known', 'optimised') else 'inferred'}
  granted_words = 'It is given the true labels' in ' '.join(found.threat_models['reveal'])
  assert granted_words == bool(granted)


@pytest.mark.slow
def test_labels_of_a_batch_are_inferred_from_what_is_sent(linear):
  """Eight digits of eight classes: two per batch, and the bias gradient is negative at these two alone."""
  found = audit(linear, attacks=['csdlg(tv=0,steps=2)'], labels='inferred', batch_size=2)
  assert all(row['label_counts_correct'] == 1 and row['labels'] == 'inferred' for row in found.rows)
  assert not all(row['label_counts_correct'] == 1 for row in found.controls)  # noise says nothing of labels


# ---- a user's own attack, defense and network


@pytest.mark.long
def test_an_attack_of_ones_own_in_closed_form(linear, tmp_path, capsys):
  """Each column of a dense layer's weight gradient is the input times the bias gradient."""

  attacks = {'own/closed form': divide}
  found = audit(linear, attacks=attacks, workdir=tmp_path / 'new', progress='lines')
  assert all(row['psnr'] > 90 and row['success'] and row['steps'] == 0 for row in found.rows)
  assert all(row['attack'] == 'own/closed form' for row in found.rows)
  assert 'own/closed form: 12 runs' in capsys.readouterr().err
  report.write(found, tmp_path / 'new')
  again = audit(linear, attacks=attacks, workdir=tmp_path / 'new')
  assert again.resumed and again.rows == found.rows

  with pytest.raises(gl.UsageError, match=r'attack_texts was .* now .*version 2'):  # its stored rows are of none
    newer = gl.attacks.wrap(divide, 'own/closed form', version='2')
    audit(linear, attacks=[newer], workdir=tmp_path / 'new')


@pytest.fixture(scope='module')
def stopped():
  """LeNet on digits after 20 steps: by a matching attack and a defense of the user's own."""
  dataset = gl.data.load('digits', limit=2)
  model = gl.models.create('lenet', dataset.num_classes)
  scenario = gl.scenario(model, dataset.samples, dataset.targets, key=jax.random.key(0))

  def own(client):
    return gl.attacks.gradient_matching(client, optax.sgd(0.1), 20, distance='cosine')

  half = gl.defenses.wrap(optax.scale(0.5), 'upload', label='half')
  return audit(scenario, [None, half], [own], trials=2, controls=2)


@pytest.mark.slow
def test_an_attack_of_ones_own_by_matching(stopped):
  assert [(row['attack'], row['defense'], row['trial']) for row in stopped.rows] == [
    ('own', defense, trial) for defense in ('none', 'half') for trial in range(2)
  ]
  for row in stopped.rows:
    assert row['objective'] < row['objective_start'] and row['steps'] == 20
    np.testing.assert_allclose(row['objective_at_truth'], 0, atol=1e-5)  # the cosine does not notice a scale
  assert stopped.curves['own', 'half'][1].shape == (2, len(stopped.curves['own', 'half'][0]))


@pytest.mark.slow
def test_stopped_early_is_not_solved_and_nobody_calls_it_protected(stopped, tmp_path):
  assert {row['verdict'] for row in stopped.rows} == {'inconclusive'}
  assert not any(row['solved'] for row in stopped.rows)
  report.write(stopped, tmp_path)
  page = re.sub(r'<style.*?</style>|<svg.*?</svg>', '', (tmp_path / 'report.html').read_text('utf-8'), flags=re.DOTALL)
  cells = [html.unescape(re.sub('<.*?>', '', cell)).strip() for cell in re.findall(r'<td.*?</td>', page, re.DOTALL)]
  assert any('inconclusive' in cell for cell in cells) and not any('nothing seen' in cell for cell in cells)
  text = ' '.join(html.unescape(re.sub('<.*?>', ' ', page)).split())
  for claim in ('is protected', 'are protected', 'is safe', 'are safe', 'no longer singles out', 'withst'):
    assert claim not in text
  table = report.terminal_table(stopped)
  assert 'inconclusive' in table and 'nothing seen' not in table
  assert 'this setting proves nothing about any defense' in ' '.join(table.split())


@pytest.mark.slow
def test_all_trials_diverged(linear, tmp_path):
  """A finite strength whose draws overflow: nothing is recovered, and the report still comes."""
  found = audit(linear, ['gaussian(stddev=1e38)'])
  assert {row['verdict'] for row in found.rows} == {'diverged'}
  report.write(found, tmp_path)
  assert '4 NaN' in report.terminal_table(found)


# ---- success and verdict

ROW = {
  'psnr': 30.0, 'pearson': 0.9, 'objective': 0.001, 'objective_at_truth': 1e-7, 'objective_start': 1.0,
  'diverged': False, 'revealed': 0, 'recognised': 1, 'identified': 1, 'candidates': 1000,
}  # fmt: skip
CONTROL = Threshold(score=10.0, revealed=0.0, recognised=0.0, identified=0.0, correlation=0.3, certain=20.0)
FLAT = {'recognised': 0, 'identified': 0, 'pearson': math.nan, 'flat': 1, 'batch_size': 1, 'steps': 300}
UNSEEN = {'recognised': 0, 'identified': 0, 'pearson': 0.1}
BATCH = {**UNSEEN, 'identified': 1, 'flat': 0, 'batch_size': 8}


@pytest.mark.parametrize(
  ('changes', 'control', 'success', 'solved', 'verdict'),
  [
    ({}, {}, True, True, 'recognisable'),
    ({'revealed': 1}, {}, True, True, 'exact'),
    ({'revealed': 1, 'recognised': 0, 'psnr': 5.0, 'pearson': 0.1}, {}, True, True, 'exact'),  # one of a batch
    ({'revealed': 2}, {'revealed': 2.0, 'recognised': 1.0}, False, False, 're-identified'),  # the control shows as many
    ({'revealed': 3}, {'revealed': 2.0}, True, True, 'exact'),
    ({'objective': 0.0011}, {}, True, False, 'recognisable'),  # less than 99.9 % of the descent
    ({'objective': 0.0}, {}, True, True, 'recognisable'),  # beyond the truth
    ({'recognised': 0}, {}, False, False, 're-identified'),
    ({'recognised': 0, 'psnr': 5.0}, {}, False, False, 're-identified'),
    ({'recognised': 0}, {'identified': 1.0}, False, False, 'above chance'),
    ({'candidates': 98}, {}, True, True, 'recognisable'),
    ({'candidates': 0, 'psnr': 10.0}, {}, False, False, 'inconclusive'),  # rank 1 is certain: the control decides
    ({'candidates': 98, 'pearson': 0.3}, {}, False, False, 'inconclusive'),
    ({'candidates': 99, 'pearson': 0.3}, {}, True, True, 'recognisable'),
    ({'recognised': 0, 'candidates': 98}, {}, False, False, 'above chance'),  # chance would do it in one of 99 cases
    ({'recognised': 0, 'candidates': 99}, {}, False, False, 're-identified'),
    ({'recognised': 0, 'pearson': 0.3}, {}, False, False, 'inconclusive'),  # beyond the control means beyond
    # No control run has a picture: the rank itself is then rarer than a correlation beyond the control.
    ({**UNSEEN, 'identified': 1}, {'correlation': math.nan}, False, False, 're-identified'),
    ({**UNSEEN, 'identified': 1, 'candidates': 740}, {'correlation': math.nan}, False, False, 're-identified'),
    ({**UNSEEN, 'identified': 1, 'candidates': 739}, {'correlation': math.nan}, False, False, 'inconclusive'),
    # One of eight is first by chance eight times as often.
    ({**BATCH, 'candidates': 8 * 741 - 1}, {'correlation': math.nan}, False, False, 're-identified'),
    ({**BATCH, 'candidates': 8 * 741 - 2}, {'correlation': math.nan}, False, False, 'inconclusive'),
    ({**UNSEEN, 'identified': 1}, {'correlation': math.nan, 'identified': 1.0}, False, False, 'inconclusive'),
    ({'recognised': 0, 'identified': 0}, {}, False, False, 'above chance'),
    ({'recognised': 0, 'identified': 0}, {'score': 30.0}, False, False, 'inconclusive'),
    ({'recognised': 0, 'identified': 0}, {'score': 29.9}, False, False, 'above chance'),
    ({'recognised': 0, 'identified': 0, 'pearson': -0.9}, {}, False, False, 'inconclusive'),
    ({**UNSEEN}, {}, False, False, 'inconclusive'),
    ({**UNSEEN, 'objective': 1e-7}, {}, False, True, 'nothing seen'),  # as good an objective as the truth's
    ({**UNSEEN, 'objective': 9e-8}, {}, False, True, 'nothing seen'),
    ({**UNSEEN, 'objective': 1.1e-7}, {}, False, False, 'inconclusive'),  # near is not there, without a recovery
    ({**UNSEEN, 'objective': 0.5, 'objective_at_truth': 0.9}, {}, False, True, 'nothing seen'),
    ({**UNSEEN, 'objective': 0.0, 'objective_at_truth': 0.0}, {}, False, True, 'nothing seen'),
    ({'psnr': math.nan, 'pearson': math.nan, 'objective': math.nan, 'diverged': True}, {}, False, False, 'diverged'),
    ({'psnr': math.nan, 'revealed': 9, 'diverged': True}, {}, False, False, 'diverged'),
    (
      {**UNSEEN, 'psnr': math.nan, 'objective': math.inf, 'objective_at_truth': math.inf},
      {},
      False,
      False,
      'inconclusive',
    ),
    ({}, dict.fromkeys(CONTROL._fields, math.nan), False, False, 'inconclusive'),  # no control run ended with a figure
    ({'objective_at_truth': math.nan}, {}, True, False, 'recognisable'),
    # Of a flat image there is no correlation: the PSNR has to be beyond the stricter bound.
    ({**FLAT, 'revealed': 1}, {}, True, True, 'exact'),
    ({**FLAT}, {}, False, False, 'above chance'),
    ({**FLAT, 'psnr': 19.0}, {}, False, False, 'inconclusive'),
    ({**FLAT, 'steps': 0}, {}, False, False, 'inconclusive'),  # of a closed form it may be the want of an answer
    ({**FLAT, 'flat': 0}, {}, False, False, 'inconclusive'),  # a constant reconstruction of an image that varies
    ({**FLAT, 'flat': 1, 'batch_size': 2}, {}, False, False, 'inconclusive'),
  ],
)
def test_judge(changes, control, success, solved, verdict):
  found = judge({**ROW, **changes}, CONTROL._replace(**control))
  assert (found['success'], found['verdict']) == (success, verdict)
  assert found['solved'] == solved or verdict in ('re-identified', 'above chance')
  assert found['control_psnr'] is CONTROL._replace(**control).score


@pytest.mark.slow
def test_blank_images_are_recovered_and_counted():
  """Of four slices that hold one value each, and four images: the attack finds all, and all of them are exact."""
  digits = gl.data.load('digits', limit=60)
  images = digits.samples.copy()
  images[:4] = np.asarray([0.0, 0.2, 0.55, 0.9], np.float32).reshape(4, 1, 1, 1)
  model = gl.models.create('mlp(widths=32)', 10)
  scenario = gl.scenario(model, images, digits.targets, key=jax.random.key(0), dataset='slices')
  assert scenario.settings['gallery']['flat'] == 4 and len(scenario.gallery.samples) == 56
  found = audit(scenario, attacks=['csdlg_fast(tv=0,steps=300)', 'fidel'], trials=8)
  searched, closed = (by(found.rows, attack=attack) for attack in found.threat_models)
  assert [row['flat'] for row in searched] == [1] * 4 + [0] * 4
  assert [row['pearson'] is None for row in searched] == [True] * 4 + [False] * 4
  assert all(row['verdict'] == 'exact' and row['solved'] for row in searched[:3] + searched[4:])
  # A closed form returns zeros for what it does not find, too: that an image is black cannot be told from them.
  assert [row['verdict'] for row in closed] == ['inconclusive'] + ['exact'] * 7


@pytest.mark.long
@pytest.mark.parametrize('controls', [4, 8])
def test_a_flat_image_without_a_control_of_its_kind_may_be_exact(controls):
  digits = gl.data.load('digits', limit=60)
  images = digits.samples.copy()
  images[5] = 0.7  # the sixth trial: a control run stands for it from the sixth on
  scenario = gl.scenario(gl.models.create('mlp(widths=32)', 10), images, digits.targets, key=jax.random.key(0))
  found = audit(scenario, attacks=['fidel'], controls=controls, trials=6)
  assert [row['flat'] for row in found.rows] == [0] * 5 + [1]
  assert {row['verdict'] for row in found.rows} == {'exact'}
  assert all(math.isnan(value) for value in exact_alone([]))


@pytest.mark.long
def test_only_samples_that_nobody_else_has_are_identified():
  """One image of the batch stands in the gallery twice; an attack finds the other one alone."""
  digits = gl.data.load('digits', limit=240)
  held = np.r_[np.arange(240), 0]
  images = jnp.asarray(digits.samples[:2])

  def second(client):
    del client
    return gl.attacks.closed_form(lambda _: (jnp.stack([jnp.full_like(images[1], 0.3), images[1] / 2]), None))

  scenario = gl.scenario(
    gl.models.create('mlp(widths=8)', 10), digits.samples[:2], digits.targets[:2], key=jax.random.key(0),
    gallery=gl.data.Candidates(digits.samples[held], digits.targets[held]),
  )  # fmt: skip
  assert scenario.shared.tolist() == [1, 0]
  (row,) = audit(scenario, attacks=[gl.attacks.wrap(second, 'second')], controls=2, trials=1, batch_size=2).rows
  assert (row['rank'], row['identified']) == (1, 1)


@pytest.mark.long
def test_faces_are_found_among_faces_however_many_are_attacked():
  gallery = gl.data.gallery('faces')
  model = gl.models.create('mlp(widths=8)', 2)
  thresholds, public = set(), gl.data.load('faces', 'train', limit=100)
  for number in (8, 16, 32):
    faces = gl.data.load('faces', limit=number)
    scenario = gl.scenario(
      model, faces.samples, faces.targets, key=jax.random.key(0), gallery=gallery,
      public=(public.samples, public.targets),
    )  # fmt: skip
    assert scenario.settings['gallery'] == {
      'by_class': True, 'images': {'face': 100}, 'left_out': {'non-face': 100}, 'flat': 0, 'public': 50,
    }  # fmt: skip
    (among,) = plan(KEY, scenario, [None], objects(['fidel']), number, gl.AuditSettings()).groups[0].gallery.values()
    assert set(among.candidates(faces.samples)) == {99}
    thresholds.add(among.threshold)
  assert len(thresholds) == 1 and thresholds.pop() == pytest.approx(0.566, abs=2e-3)


@pytest.mark.slow
def test_each_image_is_found_among_those_of_its_kind():
  faces = gl.data.load('faces')
  both = np.r_[:2, 60:62]
  scenario = gl.scenario(
    gl.models.create('mlp(widths=8)', 2), faces.samples[both], faces.targets[both], key=jax.random.key(0),
    gallery=gl.data.gallery('faces'),
  )  # fmt: skip
  assert scenario.settings['gallery']['images'] == {'non-face': 97, 'face': 100}
  assert scenario.settings['gallery']['flat'] == 3
  (group,) = plan(KEY, scenario, [None], objects(['fidel']), 4, gl.AuditSettings()).groups
  found = [group.gallery[int(label)].candidates(scenario.samples[[i]])[0] for i, label in enumerate(scenario.targets)]
  assert found == [99, 99, 96, 96]
  (row,) = audit(scenario, attacks=['fidel'], controls=2, trials=1, batch_size=4).rows
  assert row['candidates'] == 96


@pytest.mark.parametrize(
  ('gallery', 'message'),
  [
    (np.zeros((3, 4, 4, 1), np.float32), r'the gallery is float32 of shape \(3, 4, 4, 1\), expected floats'),
    (gl.data.Candidates(np.zeros((3, 8, 8, 1), np.float32), np.zeros(2, int)), 'labels of the gallery are int64'),
    (gl.data.Candidates(np.zeros((3, 8, 8, 1), np.float32), np.full(3, 10)), 'has the label 10, expected in'),
    (np.full((3, 8, 8, 1), 2.0, np.float32), 'the gallery: image 0 has a pixel of 2, expected'),
  ],
)
def test_galleries_that_do_not_fit(linear, gallery, message):
  with pytest.raises(gl.UsageError, match=message):
    gl.scenario(linear.client.model, linear.samples, linear.targets, key=KEY, gallery=gallery)


def test_the_threshold_of_a_pool():
  counts = {'revealed': 0, 'recognised': 0}
  pool = [{'psnr': 6.0 + i / 10, 'pearson': math.tanh(i / 10 - 0.5), 'identified': i == 4, **counts} for i in range(11)]
  found = threshold(pool)
  assert (found.score, found.revealed, found.identified) == (pytest.approx(6.95), 0, pytest.approx(0.5))
  z = np.arange(11) / 10 - 0.5
  student = 4.024  # exceeded in one of 741 cases, ten degrees of freedom
  assert found.correlation == pytest.approx(math.tanh(student * z.std(ddof=1) * math.sqrt(12 / 11)), rel=0.05)
  assert all(math.isnan(value) for value in threshold([]))
  assert math.isnan(threshold([{**pool[0], 'pearson': math.nan}]).correlation) and math.isnan(
    threshold(pool[:1]).correlation
  )


def test_a_defense_is_not_credited_where_the_attack_fails_undefended():
  rows = [
    {'defense': defense, 'trial': trial, 'verdict': verdict, 'success': verdict == 'exact', 'control': False}
    for trial, verdicts in enumerate(
      (
        ('exact', 'nothing seen'),
        ('inconclusive', 'nothing seen'),
        ('inconclusive', 'exact'),
        ('above chance', 'above chance'),
      )
    )
    for defense, verdict in zip(('none', 'clip(norm=1)'), verdicts, strict=True)
  ]
  found = [row['verdict'] for row in require_undefended_recovery(rows, {'none'}) if row['defense'] != 'none']
  assert found == ['nothing seen', 'inconclusive', 'exact', 'above chance']
  only = [row for row in rows if row['defense'] != 'none' or row['trial'] in (1, 3)]  # where it fails without
  found = [row['verdict'] for row in require_undefended_recovery(only, {'none'}) if row['defense'] != 'none']
  assert found == ['inconclusive', 'inconclusive', 'exact', 'above chance']
  alone = [row for row in rows if row['defense'] != 'none']
  assert require_undefended_recovery(alone, {'none'}) == alone


def test_noise_alone_is_no_success(result):
  """The null gradient as a defense draws other noise than the control does."""
  rows = by(result.rows, defense='null_gradient')
  assert not any(row['success'] for row in rows)
  assert all(row['change'] > 0.5 for row in rows)
  assert len({row['psnr'] for row in [*rows, *result.controls]}) == 12


# ---- a work directory


@pytest.mark.long
def test_a_result_names_all_versions_and_devices_of_its_parts(linear, tmp_path, monkeypatch):
  own = run.versions()
  settings = {'attacks': {'guess': closed_form(draw)}, 'workdir': tmp_path / 'new'}
  with monkeypatch.context() as patch:
    patch.setattr(run, 'versions', lambda: {**own, 'gradleak': '0.1.0', 'device': '1 × old GPU'})
    assert audit(linear, **settings).versions['gradleak'] == '0.1.0'
  assert audit(linear, **settings).versions['gradleak'] == '0.1.0'  # nothing is of this version
  grown = audit(linear, ('none', 'prune(rate=0.5)'), **settings)
  expected = own | {part: f'{old}, {own[part]}' for part, old in (('gradleak', '0.1.0'), ('device', '1 × old GPU'))}
  assert grown.versions == gl.load(tmp_path / 'new').versions == expected
  assert f'0.1.0, {own["gradleak"]}' in report.render(grown)
  newer = {**own, 'gradleak': '9'}
  assert run.joined([grown.versions, newer])['gradleak'] == f'0.1.0, {own["gradleak"]}, 9'


@pytest.mark.long
def test_fresh_and_found_results_are_the_same(linear, tmp_path):
  settings = {'attacks': {'guess': closed_form(draw)}, 'workdir': tmp_path / 'new'}
  fresh, found = (audit(linear, **settings) for _ in range(2))
  assert (fresh.resumed, found.resumed) == (False, True)
  assert (fresh.rows, fresh.controls, fresh.config) == (found.rows, found.controls, found.config)
  for pair, images in fresh.reconstructions.items():
    np.testing.assert_array_equal(images, found.reconstructions[pair])
    for a, b in zip(fresh.curves[pair], found.curves[pair], strict=True):
      np.testing.assert_array_equal(a, b)


@pytest.mark.long
def test_the_text_behind_a_name_belongs_to_the_settings(linear, tmp_path):
  settings = {'attacks': {'guess': closed_form(draw)}, 'workdir': tmp_path / 'new'}
  found = audit(linear, {'mild': 'prune(rate=0.5)'}, **settings)
  assert {row['defense'] for row in found.rows} == {'mild'}
  with pytest.raises(gl.UsageError, match=r'prune\(rate=0.5\).* now .*prune\(rate=0.6\)'):
    audit(linear, {'mild': 'prune(rate=0.6)'}, **settings)


@pytest.mark.parametrize(
  ('settings', 'message'),
  [
    ({'trials': 9}, '9 trials of 1 images need 9, the data has 8; the most trials are 8'),
    ({'trials': 3, 'batch_size': 3}, '3 trials of 3 images need 9, the data has 8; the most trials are 2'),
    ({'trials': 1, 'batch_size': 9}, '1 trials of 9 images need 9, the data has 8; the largest batch_size is 8'),
    ({'defenses': []}, 'no defense is given'),
    ({'attacks': {}}, 'no attack is given'),
    ({'defenses': ['none', 'none']}, "the defense 'none' is listed twice"),
    ({'defenses': ['soteria(rate=0.5)'], 'knowledge': 'both'}, "the model 'linear' does not offer 'features'"),
    ({'defenses': {'none': gl.defenses.clip(norm=1)}}, "'none' is the label of no defense"),
    ({'defenses': {'none': gl.defenses.clip(norm=1), 'bare': None}}, "'none' is the label of no defense"),
    ({'attacks': [lambda client: None]}, "the attack '<lambda>' returns None, expected a gradleak.attacks.Attack"),
    ({'momentum': 0.9}, "unknown setting of gradleak.audit: 'momentum'"),
    ({'knowledge': 'all'}, "unknown knowledge 'all'"),
    ({'steps': 0}, 'steps is 0, expected an integer'),
  ],
)
def test_what_cannot_be_run_says_so_before_anything_is_written(linear, tmp_path, settings, message):
  with pytest.raises(gl.UsageError, match=message):
    audit(linear, workdir=tmp_path / 'new', **settings)
  assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_two_objects_may_bear_the_same_label(linear):
  halves = [gl.defenses.wrap(optax.scale(factor), 'upload', label='mine') for factor in (0.5, 0.25)]
  found = audit(linear, halves, {'guess': closed_form(draw)}, trials=1)
  assert found.config['defenses'] == ['mine', 'mine #2']
  np.testing.assert_allclose([row['change'] for row in found.rows], [0.5, 0.75], rtol=1e-6)


@pytest.mark.long
def test_what_is_claimed_follows_from_the_object_and_not_from_its_label(linear):
  """ε and citations of a label that belongs to another defense are not printed; those of the object are."""
  named = {
    'dpsgd(norm=1,noise=2)': gl.defenses.wrap(optax.identity(), 'upload'),
    'dp': gl.defenses.client_dp(norm=1, noise=2),
  }
  found = audit(linear, named, {'guess': closed_form(draw)}, trials=1)
  said = report.findings.guarantees(found.methods)
  said = [str(line) for line in said]
  assert [line.split(':')[0] for line in said] == ['`dp`'] and 'ε ≤ ' in said[0]
  assert report.wording.citations(found.methods) == gl.defenses.client_dp(norm=1, noise=2).citations
  assert not any('Abadi' in citation for citation in report.wording.citations(found.methods))


def test_rows_keep_to_the_schema(result):
  for row in result.rows + result.controls:
    schema.check(row)
  row = result.rows[0]
  for broken, word in (
    ({**row, 'new': 1}, 'new'),
    ({**row, 'psnr': 'high'}, 'psnr'),
    ({**row, 'attack': None}, 'attack'),
  ):
    with pytest.raises(gl.UsageError, match=word):
      schema.check(broken)


def test_a_part_keeps_its_name_where_methods_are_added(linear):
  """Attackers who simulate a defense have a structure of their own for each."""

  def names(*defenses):
    made = plan(KEY, linear, defenses, objects([RECOVERY]), 2, gl.AuditSettings(controls=2))
    return {name: str(variants[0].change[1]) for name, _, variants in _parts(made, 0, 1)}

  first, second = (
    gl.defenses.wrap(optax.scale(factor), 'upload', label=label) for factor, label in ((2, 'a'), (3, 'b'))
  )
  alone, before = names(first), names(second, first)
  assert len(alone) == 3 and alone.items() <= before.items() and len(before) == 5


@pytest.mark.slow
def test_a_folder_that_grows_before_it_is_finished_starts_its_attack_anew(linear, tmp_path):
  def stop(attack, progress, objective):
    if progress.step >= 2:
      raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    audit(linear, ['none'], ['csdlg(steps=4)'], 1, progress=stop, workdir=tmp_path / 'new')
  assert list((tmp_path / 'new' / 'checkpoints').iterdir())
  grown = audit(linear, ['none', 'prune(rate=0.5)'], ['csdlg(steps=4)'], 1, workdir=tmp_path / 'new')
  assert [row['defense'] for row in grown.rows] == ['none', 'prune(rate=0.5)'] and len(grown.controls) == 8


@pytest.mark.long
def test_shares_with_nothing_to_attack_still_bring_their_control_runs(linear):
  some = {'only': {'prune(rate=0.5)': [0]}, 'controls': 3}
  found = [
    audit(linear, ['none', 'prune(rate=0.5)'], {'guess': closed_form(draw)}, shards=n, **some) for n in (1, 2, 4)
  ]
  assert len(found[0].rows) == 1 and len(found[0].controls) == 3
  for other in found[1:]:
    assert (other.rows, other.controls) == (found[0].rows, found[0].controls)


def test_a_start_that_diverged_is_not_kept():
  distances, steps = np.asarray([np.nan, 0.0, 0.3, 0.2]), np.asarray([-1, 5, -1, -1])
  assert kept_distance(distances, steps).tolist() == [np.inf, np.inf, 0.3, 0.2]


@pytest.mark.long
def test_what_has_arrived_does_not_diverge_while_its_group_goes_on(linear):
  """The rate overflows after the tolerance is reached."""

  def far_too_fast(client):
    optimizer = optax.chain(optax.scale(1e3), optax.sgd(lambda count: jnp.where(count < 4, 1e-3, 1e38)))
    return gl.attacks.gradient_matching(client, optimizer, 8, distance='cosine', tolerance=0.999, labels='known')

  attack = far_too_fast(linear.client)
  images, labels = linear.samples[:1], jax.nn.one_hot(linear.targets[:1], 10)
  update = linear.client.local_update(None, linear.variables, images, labels).update
  observation = gl.Observation(linear.variables, update, labels, gl.Knowledge(labels='known'), images.shape, 10)
  state, step = jax.jit(attack.init)(jax.random.key(0), observation), jax.jit(attack.step)
  for _ in range(8):
    state, info = step(state, observation)
  assert info['finished'] and state.diverged_step == -1
  assert np.isfinite(jax.jit(attack.reconstruct)(state, observation).samples).all()


@pytest.mark.long
def test_methods_are_added_to_a_finished_work_directory(linear, tmp_path):
  """What is there is not run again, and the rows are those of one run of all."""
  whole = audit(linear, ['none', 'prune(rate=0.5)'], {'guess': closed_form(draw), 'again': closed_form(draw)})
  folder = tmp_path / 'new'
  audit(linear, ['none'], {'guess': closed_form(draw)}, workdir=folder)
  before = {path.name: path.stat().st_mtime_ns for path in (folder / 'parts').iterdir()}
  audit(linear, ['none', 'prune(rate=0.5)'], {'guess': closed_form(draw)}, workdir=folder)
  both = {'guess': closed_form(draw), 'again': closed_form(draw)}
  grown = audit(linear, ['none', 'prune(rate=0.5)'], both, workdir=folder)
  assert {path.name: path.stat().st_mtime_ns for path in (folder / 'parts').iterdir()}.items() >= before.items()
  assert (grown.rows, grown.controls) == (whole.rows, whole.controls)
  with pytest.raises(gl.UsageError, match='belongs to other settings: defenses was'):
    audit(linear, ['none'], both, workdir=folder)


@pytest.mark.long
def test_trials_are_added_to_a_finished_work_directory(linear, tmp_path):
  """As AutoLeak does, which attacks some trials alone, where a defense is added to it."""
  attack, defense = {'guess': closed_form(draw)}, 'prune(rate=0.5)'
  whole = audit(linear, ['none', defense], attack, only={'none': [0, 2], defense: [1]})
  audit(linear, ['none'], attack, only={'none': [0]}, workdir=tmp_path / 'new')
  grown = audit(linear, ['none', defense], attack, only={'none': [0, 2], defense: [1]}, workdir=tmp_path / 'new')
  assert len(list((tmp_path / 'new' / 'parts').iterdir())) == 2
  assert (grown.rows, grown.controls) == (whole.rows, whole.controls)


def test_steps_are_those_of_searches(linear):
  """The steps of a training before, of what is a closed form then, have nothing to do with them."""
  attacks = [gl.attacks.csdlg(), gl.attacks.lti(), gl.attacks.bayes(), gl.attacks.lti(steps=9)]
  given = linear._replace(public=(1 - linear.samples, linear.targets))
  (group,) = plan(KEY, given, [None], attacks, 1, gl.AuditSettings(controls=2, steps=70)).groups
  assert [attack.settings['steps'] for _, attack in group.attacks] == [70, 2000, 70, 9]


@pytest.mark.long
def test_uploads_of_trials_that_nobody_attacks_are_not_made(linear, monkeypatch):
  made, attack, defense = [], {'guess': closed_form(draw)}, 'prune(rate=0.5)'

  def recorded(group, trials, *rest):
    made.append(trials.tolist())
    return uploads(group, trials, *rest)

  whole = {(row['defense'], row['trial']): row for row in audit(linear, ['none', defense], attack).rows}
  monkeypatch.setattr(sys.modules['gradleak.audit.run'], 'uploads', recorded)
  some = audit(linear, ['none', defense], attack, only={'none': [2], defense: [1]})
  assert made == [[1, 2]]  # all were
  assert len(some.rows) == 2 and all(row == whole[row['defense'], row['trial']] for row in some.rows)


@pytest.mark.parametrize(('defenses', 'known'), [([None], 'none'), ([None, gl.defenses.clip(norm=1)], 'either')])
def test_a_client_without_a_defense_is_said_to_have_none(linear, defenses, known):
  attack = gl.attacks.csdlg(steps=1)
  (group,) = plan(KEY, linear, defenses, [attack], 1, gl.AuditSettings(controls=2)).groups
  assert granted.knowledge(group, attack).defense == known


@pytest.mark.long
def test_rounds_are_of_the_samples_of_their_trial(linear):
  """A mean of uploads of other samples would show a mixture."""
  attack = gl.attacks.wrap(divide, 'divide', reads=('weights',))
  found = audit(linear, ['gaussian(stddev=1e-6)'], [attack], 3, knowledge='adaptive', rounds=2)
  rows = [row for row in found.rows if row['adaptive'] is not None and 'averaged' in row['adaptive']]
  assert len(rows) >= 3 and {row['verdict'] for row in rows} == {'exact'}


def test_a_defense_that_cannot_be_run_says_so_before_anything_is_compiled(linear):
  def update(updates, state, params=None):
    raise gl.UsageError('it cannot be run')

  own = gl.defenses.wrap(optax.GradientTransformation(lambda params: (), update), 'upload', label='broken')
  with pytest.raises(gl.UsageError, match='it cannot be run'):
    plan(KEY, linear, [own], [gl.attacks.csdlg(steps=1)], 2, gl.AuditSettings())
