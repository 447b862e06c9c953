"""Which assumption protects: what is run, what the rows say, and what is refused."""

import dataclasses
import importlib

import jax
import numpy as np
import pytest

import gradleak as gl
from gradleak.studies.sensitivity import (
  LABORATORY,
  PRODUCTION,
  Assumption,
  Sensitivity,
  Setting,
  assumptions,
  effect,
  judged,
  redrawn,
)
from gradleak.studies.sensitivity.assumptions import steps_of
from gradleak.studies.sensitivity.judgement import _paired
from tests.attackers import divide

pytestmark = pytest.mark.usefixtures('fast_compilation')


def linear(outputs=10):
  return gl.models.from_functions(
    lambda key, _: {'kernel': 0.3 * jax.random.normal(key, (64, outputs)), 'bias': jax.numpy.zeros(outputs)},
    lambda params, images: images.reshape(-1, 64) @ params['kernel'] + params['bias'].reshape(1, -1),
    'linear',
  )


def assumption(name, **others):
  return Assumption(name, f'laboratory of {name}', f'production of {name}', lambda one: one, **others)


def standard(*names):
  """Returns some of the standard assumptions, for `divide` and `linear`; training and batch by default."""
  given = gl.SensitivitySettings(batch_size=2)
  every = assumptions(gl.ClientSettings(), gl.attacks.wrap(divide), given, public=())
  return [one for one in every if one.name in (names or ('training', 'labels', 'batch'))]


def test_no_more_batches_are_accumulated_than_an_upload_has():
  set_up = importlib.import_module('gradleak.studies.sensitivity')._setting
  local, four = gl.ClientSettings(share='delta', local_batch_size=2, accumulate=2), gl.AuditSettings(batch_size=4)
  used = [
    dataclasses.replace(assumption('local training'), change=lambda one: one._replace(client=local)),
    dataclasses.replace(assumption('batch'), change=lambda one: one._replace(audit=four)),
  ]
  start = Setting(gl.ClientSettings(), gl.AuditSettings(), None, None)
  names = [one.name for one in used]
  assert [set_up(start, used, dropped).client.accumulate for dropped in ([], names[:1], names)] == [1, 1, 2]


def made(names, psnr, skipped=()):
  """Returns a `Sensitivity` whose rows have the PSNR that `psnr(dropped)` returns, recovered above 10 dB."""
  listed = [assumption(name) for name in names] + [assumption(name, skipped='no meaning here') for name in skipped]
  steps = steps_of([one for one in listed if not one.skipped])
  rows = [
    {
      'setting': name,
      'trial': trial,
      'psnr': value,
      'recovered': value is not None and value > 10,
      'by': None,
      'control_psnr': 6.0,
      'verdict': 'exact' if value is not None and value > 10 else 'inconclusive',
      'upload_psnr': value,
    }
    for name, dropped in steps.items()
    for trial, value in enumerate(psnr(dropped))
  ]
  image = np.full((8, 8, 1), 0.5, np.float32)
  config = {'model': 'net', 'dataset': 'data', 'trials': len(psnr(())), 'attack': 'divide', 'training_rounds': 3}
  audits = {name: name for name in steps}
  return Sensitivity(config, listed, steps, rows, {name: image for name in steps}, image, {}, audits, {}, 1.0)


def verdicts(found):
  return {one.assumption.name: one.verdict for one in judged(found)}


NOISE = np.random.default_rng(0).normal(0, 0.3, 8)


def test_what_alone_stops_the_attack_protects():
  found = made(['batch', 'labels'], lambda dropped: list((5 if 'batch' in dropped else 25) + NOISE))
  assert verdicts(found) == {'batch': 'protects', 'labels': 'does not protect'}
  restored = judged(found)[0].restored
  assert restored.recovered == (8, 0) and restored.score == pytest.approx(20)


def test_where_two_stop_it_neither_is_needed():
  found = made(['batch', 'labels'], lambda dropped: list((5 if dropped else 25) + NOISE))
  assert set(verdicts(found).values()) == {'others hold'}


def test_what_is_noisy_or_skipped_is_not_shown():
  wild = [5, 25, 6, 24, 7, 23, 5, 26]
  found = made(['batch', 'labels'], lambda dropped: wild[::-1] if 'labels' in dropped else wild, skipped=['BatchNorm'])
  assert verdicts(found) == {'batch': 'does not protect', 'labels': 'not shown', 'BatchNorm': 'not shown'}
  few = made(['batch'], lambda dropped: [25.0, 25.0])
  assert verdicts(few) == {'batch': 'not shown'}


def test_equal_differences_of_a_few_trials_show_no_spread():
  found = {n: made(['batch'], lambda dropped, n=n: [25.0 - 5 * bool(dropped)] * n) for n in (5, 6)}
  assert verdicts(found[5]) == {'batch': 'not shown'} and verdicts(found[6]) == {'batch': 'protects'}
  few, enough = (effect(one, LABORATORY, PRODUCTION) for one in found.values())
  assert np.isnan([few.low, few.high]).all() and (enough.low, enough.high) == (5, 5)
  assert few.recovered_high == pytest.approx(-few.recovered_low)
  assert '25.0 ±' not in gl.report.sensitivity_table(found[5])


def test_nothing_is_shown_where_the_attack_fails_in_its_laboratory():
  found = made(['batch', 'labels'], lambda dropped: list(5 + NOISE))
  assert effect(found, LABORATORY, PRODUCTION).excluded
  assert set(verdicts(found).values()) == {'not shown'}
  assert 'does not protect' not in gl.report.sensitivity_table(found)


def test_what_leaks_by_an_assumption_alone_is_shown_where_the_laboratory_hides_it():
  found = made(['batch', 'labels'], lambda dropped: list((25 if tuple(dropped) == ('batch',) else 5) + NOISE))
  assert verdicts(found) == {'batch': 'not shown', 'labels': 'protects'}


def test_what_is_dropped_where_nothing_is_left_to_recover_is_not_shown():
  """The second assumption needs the first to be dropped, which stops the attack already."""
  found = made(['batch', 'labels'], lambda dropped: list((5 if 'batch' in dropped else 25) + NOISE))
  needy = [found.assumptions[0], dataclasses.replace(found.assumptions[1], needs=('batch',))]
  assert verdicts(found._replace(assumptions=needy)) == {'batch': 'protects', 'labels': 'not shown'}


def test_a_clearer_picture_of_what_is_clear_is_no_larger_leak():
  found = made(['batch'], lambda dropped: list((31 if dropped else 60) + NOISE))
  assert verdicts(found) == {'batch': 'does not protect'}
  assert effect(found, LABORATORY, PRODUCTION).score == 0


def test_a_picture_that_is_hardly_clearer_is_no_larger_leak():
  found = made(['batch'], lambda dropped: list((18 if dropped else 20) + NOISE / 10))
  assert verdicts(found) == {'batch': 'does not protect'} and effect(found, LABORATORY, PRODUCTION).low > 1.9


def test_a_higher_psnr_of_what_nobody_recovers_is_no_protection():
  found = made(['batch', 'labels'], lambda dropped: list((25, 9, 9, 5)[len(dropped) + ('labels' in dropped)] + NOISE))
  assert verdicts(found)['labels'] == 'others hold'
  assert judged(found)[1].restored.low > 3  # more than 3 dB, of images that are not recovered


def test_a_training_that_did_not_train_does_not_count():
  found = made(['training'], lambda dropped: list(25 + NOISE))
  poor, good = ({'own': {'trained': value, 'untrained': 0.3, 'guessing': 0.5, 'tested': 100}} for value in (0.4, 0.9))
  noise = {'own': {'trained': 0.2, 'untrained': 0.1, 'guessing': 0.16, 'tested': 25}}  # 5 of 25 where 4 is guessing
  assert verdicts(found._replace(accuracy=noise)) == {'training': 'not shown'}
  assert verdicts(found._replace(accuracy=poor)) == {'training': 'not shown'}
  assert verdicts(found._replace(accuracy=good)) == {'training': 'does not protect'}
  assert verdicts(found) == {'training': 'not shown'}, 'nothing says that it trained'


def test_diverged_trials_have_no_psnr_and_are_not_recovered():
  found = made(['batch'], lambda dropped: [None if dropped else 25.0] * 8)
  one = effect(found, LABORATORY, PRODUCTION)
  assert np.isnan(one.score) and one.recovered == (8, 0)
  assert verdicts(found) == {'batch': 'not shown'}


def test_what_diverges_in_production_is_no_protection():
  found = made(['batch'], lambda dropped: [25.0] * 3 + [None if dropped else 25.0] * 9)
  one = effect(found, LABORATORY, PRODUCTION)
  assert one.recovered == (12, 3) and one.recovered_low < 0 < one.recovered_high
  assert verdicts(found) == {'batch': 'not shown'}


def test_the_settings_that_are_run():
  used = [assumption('a'), assumption('b'), assumption('c', needs=('b',))]
  steps = steps_of(used)
  waterfall = {LABORATORY: (), 'a': ('a',), 'a + b': ('a', 'b'), PRODUCTION: ('a', 'b', 'c')}
  assert steps == {**waterfall, 'b': ('b',), 'b + c': ('b', 'c')}  # restoring b restores c, which needs it


def test_dlg_draws_all_parameters_and_leaves_statistics():
  variables = {'params': {'a': np.zeros((40, 50), np.float32)}, 'batch_stats': {'mean': np.ones(3, np.float32)}}
  drawn = redrawn(jax.random.key(0), variables)
  values = np.asarray(drawn['params']['a'])
  assert -0.5 <= values.min() < -0.49 and 0.49 < values.max() <= 0.5
  assert drawn['batch_stats'] is variables['batch_stats']


def test_assumptions_are_skipped_for_a_reason():
  given = gl.SensitivitySettings(batch_size=1)
  listed = {one.name: one for one in assumptions(gl.ClientSettings(), gl.attacks.wrap(divide), given)}
  assert all(one.skipped for name, one in listed.items() if name != 'initialisation') and len(listed) == 10
  client = gl.ClientSettings(share='delta', local_epochs=3, local_batch_size=2, cohort=2, precision='bfloat16')
  noise = gl.parse('gaussian(stddev=1)')
  several = assumptions(
    client, gl.attacks.csdlg(), gl.SensitivitySettings(), defense=noise, public=(), batch_norm=True
  )  # fmt: skip
  assert not [one.name for one in several if one.skipped]
  adapted = assumptions(client, gl.attacks.csdlg(), given, adapters=True)
  assert 'no rule reads labels from adapters' in [one.skipped for one in adapted if one.name == 'labels']
  assert '6 steps in all' in several[4].production and 'precision=bfloat16' in several[7].production


@pytest.mark.parametrize(('size', 'steps'), [(5, 4), (4, 4), (2, 2), (1, 2)])
def test_a_dropped_batch_is_no_step(size, steps):
  client = gl.ClientSettings(share='delta', local_epochs=2, local_batch_size=2, last_batch='dropped', cohort=3)
  listed = assumptions(client, gl.attacks.csdlg(), gl.SensitivitySettings(batch_size=size))
  (local,) = [one for one in listed if one.name == 'local training']
  assert f'2 epochs, {steps} steps in all' in local.production


@pytest.fixture(scope='module')
def production():
  digits = gl.data.load('digits', 'train', limit=60)
  public = digits.samples[:16], digits.targets[:16]
  own = digits.samples[30:36], digits.targets[30:36]
  return gl.scenario(linear(), *own, key=jax.random.key(2), public=public)


@pytest.fixture(scope='module')
def call(production, tmp_path_factory):
  """Returns a function that makes the same small sensitivity, anew or from its folder."""
  folder = tmp_path_factory.mktemp('sensitivity') / 'new'

  def make(**changes):
    settings = {'trials': 3, 'batch_size': 2, 'controls': 2, 'training_rounds': 1, 'training_clients': 2}
    settings |= {'attack': gl.attacks.wrap(divide, 'divide')}
    settings |= {'progress': 'none', 'workdir': folder, 'chosen': standard(), **changes}
    return gl.sensitivity(jax.random.key(0), settings.pop('scenario', production), **settings)

  return make, folder


@pytest.fixture(scope='module')
def found(call):
  return call[0]()


@pytest.mark.long
def test_each_setting_is_attacked_on_the_same_images(found):
  assert list(found.steps) == [LABORATORY, 'training', PRODUCTION, 'batch']
  assert all([row['trial'] for row in found.of(name)] == [0, 1, 2] for name in found.steps)
  single = [row['psnr'] for row in found.of(LABORATORY)]
  assert min(single) > 60 and max(row['psnr'] for row in found.of('batch')) < 40  # of two images the sum comes back
  measured = dict(found.accuracy['U(−0.5, 0.5)'])
  assert len(found.accuracy) == 1 and measured.pop('tested') == 4
  assert all(0 <= value <= 1 for value in measured.values())
  assert verdicts(found)['labels'] == 'not shown'


@pytest.mark.long
def test_the_page_and_a_second_call(found, call):
  make, folder = call
  gl.report.write(found, folder)
  assert (folder / 'sensitivity.png').read_bytes().startswith(b'\x89PNG')
  assert (folder / 'sensitivity.csv').read_text('utf-8').count('\n') == 1 + len(found.steps)
  again = make()
  assert again.rows == found.rows and again.accuracy == found.accuracy


def test_rows_are_attacked_by_default(production, tmp_path, monkeypatch):
  """Their default has no total variation, which is none of theirs; images have it."""
  monkeypatch.setattr(importlib.import_module('gradleak.studies.sensitivity'), '_run', lambda *given: given[-1])
  rows = gl.data.load('breast_cancer', limit=12)
  kind = gl.modalities.of_config(rows.settings)
  made = gl.scenario(gl.models.logistic(2), rows.samples, rows.targets, key=jax.random.key(0), modality=kind)
  for scenario, tv in ((made, 0.0), (production, 1e-6)):
    start = gl.sensitivity(jax.random.key(0), scenario, trials=2, batch_size=2, training_clients=2, workdir=tmp_path)
    assert start.attack == gl.attacks.csdlg_fast(tv=tv)


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'trails': 3}, "unknown setting of gradleak.sensitivity: 'trails'; did you mean 'trials'"),
    ({'trials': 4}, '4 trials of 2 images need 8, there are 6'),
    ({'training_clients': 9}, 'public holds 16 images, and 9 clients that train on them need 36'),
    ({'attack': 'csdlg'}, "the attack 'csdlg' is a text"),
    ({'chosen': [assumption('a', needs=('b',))]}, "unknown assumption that 'a' needs: 'b'"),
    ({'chosen': [assumption('a'), assumption('a')]}, "the assumption 'a' is listed twice"),
    ({'chosen': [assumption('a', skipped='it has no meaning')]}, 'no assumption is left'),
  ],
)
def test_bad_settings_are_refused_before_anything_is_written(call, tmp_path, changes, message):
  with pytest.raises(gl.UsageError, match=message):
    call[0](workdir=tmp_path / 'new', **changes)
  assert not list(tmp_path.iterdir())


def test_the_folder_of_an_audit_is_refused(call, tmp_path):
  (tmp_path / 'config.json').write_text('{}')
  with pytest.raises(gl.UsageError, match='holds a run of another kind'):
    call[0](workdir=tmp_path)
  assert len(list(tmp_path.iterdir())) == 1


def test_what_is_no_scenario_is_refused(call, production):
  for scenario, message in (
    (production._replace(local=None), 'gradleak.sensitivity needs a scenario whose client is described by'),
    (None, 'scenario is None, expected a gradleak.Scenario'),
  ):
    with pytest.raises(gl.UsageError, match=message):
      call[0](scenario=scenario)


@pytest.mark.long
def test_a_setting_of_one_sample_has_not_the_order_of_several(call, production, tmp_path):
  local, attack = gl.ClientSettings(share='delta', local_batch_size=1, order='1,0'), gl.attacks.csdlg(steps=1)

  def made(client, folder):
    scenario = gl.scenario(
      linear(), production.samples, production.targets, key=jax.random.key(2), client=client, public=production.public
    )
    listed = assumptions(client, attack, gl.SensitivitySettings(batch_size=2))
    chosen = [one for one in listed if one.name in ('batch', 'local training')]
    return call[0](scenario=scenario, workdir=folder, attack=attack, chosen=chosen)

  assert list(made(local, tmp_path / 'new').steps) == [LABORATORY, 'batch', PRODUCTION, 'local training']
  with pytest.raises(gl.UsageError, match='the order is of 3 samples, and the client has 2'):
    made(dataclasses.replace(local, order='2,0,1'), tmp_path / 'other')
  assert not (tmp_path / 'other').exists()


@pytest.mark.slow
def test_the_training_is_by_the_loss_of_the_client(call, tmp_path):
  digits = gl.data.load('digits', 'train', limit=30)
  values = (digits.targets / 9).astype(np.float32)
  public = digits.samples[:16], values[:16]
  scenario = gl.scenario(
    linear(1), digits.samples[20:26], values[20:26], key=jax.random.key(2), public=public,
    loss=gl.losses.mean_squared_error(),
  )  # fmt: skip
  found = call[0](scenario=scenario, workdir=tmp_path, chosen=standard('training'))
  assert found.accuracy == {} and verdicts(found) == {'training': 'not shown'}


@pytest.mark.slow
def test_an_assumption_of_ones_own(call, tmp_path):
  knowing = Assumption(
    'whole uploads',
    'All is sent.',
    'Nine tenths are dropped.',
    lambda one: one._replace(defense=gl.defenses.prune(rate=0.9)),
  )
  found = call[0](workdir=tmp_path / 'new', chosen=[knowing])
  assert list(found.steps) == [LABORATORY, PRODUCTION]
  assert found.methods['defenses'].keys() == {'none', 'prune(rate=0.9)'}


@pytest.mark.long
def test_a_setting_whose_trials_all_diverge_has_rows_without_a_score(call, tmp_path):
  diverging = dataclasses.replace(gl.ClientSettings(), share='delta', local_epochs=2, learning_rate=1e38)
  local = Assumption('steps', 'One step.', 'Two steps.', lambda one: one._replace(client=diverging))
  found = call[0](workdir=tmp_path / 'new', chosen=[local])
  rows = found.of(PRODUCTION)
  assert [row['psnr'] for row in rows] == [None] * 3
  assert {row['verdict'] for row in rows} == {'diverged'}
  assert all(row['psnr'] is not None for row in found.of(LABORATORY))


def test_the_interval_of_what_is_recovered_is_wide_where_few_trials_agree():
  """Three of three on both sides exclude nothing, and it covers the truth of paired trials as often as it says."""
  low, high = _paired(np.ones(3), np.ones(3))
  assert low < -0.5 and high > 0.5
  rng, covered = np.random.default_rng(0), 0
  for _ in range(400):
    uniform = rng.uniform(size=8)
    low, high = _paired((uniform < 0.8).astype(float), (uniform < 0.3).astype(float))
    covered += low <= 0.5 <= high
  assert covered >= 380
