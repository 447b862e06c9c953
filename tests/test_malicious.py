"""Closed forms and malicious servers in an audit: the same rows, judged alike, under every defense."""

import jax
import numpy as np
import pytest

import gradleak as gl
from gradleak.core import errors
from gradleak.report import page, terminal
from gradleak.summary import cases
from tests.objects import objects

pytestmark = pytest.mark.usefixtures('fast_compilation')
DEFENSES = ['none', 'gaussian(stddev=100)']
ATTACKS = ['imprint(bins=32)', 'fidel', 'peeling']  # an honest server's behind another's


@pytest.fixture(scope='module')
def scenario():
  data = gl.data.load('digits', 'test', limit=12)
  model = gl.models.create('mlp(widths=64)', data.num_classes)
  return gl.scenario(model, data.samples, data.targets, key=jax.random.key(0), dataset='digits')


def audit(scenario, attacks, trials, defenses=('none',), **settings):
  settings = {'progress': 'none', 'knowledge': 'non-adaptive', **settings}
  return gl.audit(jax.random.key(1), scenario, objects(defenses), objects(attacks), trials, **settings)


@pytest.fixture(scope='module')
def result(scenario, tmp_path_factory):
  folder = tmp_path_factory.mktemp('audit') / 'run'
  made, again = (audit(scenario, ATTACKS, 3, DEFENSES, batch_size=4, controls=4, workdir=folder) for _ in range(2))
  assert again.resumed and again.rows == made.rows
  return made


def rows(result, attack, defense):
  return [row for row in result.rows if (row['attack'], row['defense']) == (attack, defense)]


@pytest.mark.long
def test_rows_stand_in_the_order_of_the_attacks(result):
  assert list(dict.fromkeys(row['attack'] for row in result.rows)) == ATTACKS
  assert [row['trial'] for row in rows(result, 'fidel', 'none')] == [0, 1, 2]
  assert len(result.controls) == len(ATTACKS) * 4 and result.truth.shape == (3, 4, 8, 8, 1)


@pytest.mark.long
@pytest.mark.parametrize('attack', ['imprint(bins=32)', 'fidel'])
def test_closed_forms_reveal_images_and_noise_hides_them(result, attack):
  bare, noisy = rows(result, attack, 'none'), rows(result, attack, 'gaussian(stddev=100)')
  assert sum(row['revealed'] for row in bare) >= 4
  assert all(row['label_correct'] is None for row in bare)
  assert all(row['verdict'] == 'exact' for row in bare if row['revealed'])
  assert all(row['revealed'] == 0 and row['verdict'] in ('nothing seen', 'inconclusive') for row in noisy)
  assert all(row['change'] > 1 for row in noisy)
  exact = max(
    gl.metrics.psnr(result.reconstructions[attack, 'none'][t][[i]], result.truth[t][[i]])[0]
    for t in range(3)
    for i in range(4)
    if np.isfinite(result.reconstructions[attack, 'none'][t][i]).all()
  )
  assert exact > 50


@pytest.mark.long
def test_peeling_certifies_images_and_labels(result):
  found = rows(result, 'peeling', 'none')
  assert sum(row['revealed'] for row in found) >= 10 and max(row['label_correct'] for row in found) == 1
  for row in found:
    assert row['label_counts_correct'] == row['revealed'] / 4


def test_attacks_on_gradients_refuse_deltas(scenario):
  delta = gl.scenario(
    scenario.client.model, scenario.samples, scenario.targets, variables=scenario.variables, share='delta'
  )
  with pytest.raises(errors.UsageError, match='the attack peeling reads the gradient of one step'):
    audit(delta, ['peeling'], 1)


@pytest.mark.slow
def test_one_sample_is_fished_from_a_batch(scenario):
  chosen = np.concatenate([np.flatnonzero(scenario.targets != 1)[:4], np.flatnonzero(scenario.targets == 1)[:1]])
  fished = scenario._replace(samples=scenario.samples[chosen], targets=scenario.targets[chosen])
  attack = 'class_fishing(target=1,inner=csdlg_fast,steps=300)'
  result = audit(fished, [attack], 1, batch_size=5, controls=2)
  (row,) = result.rows
  assert row['psnr'] > 20 and row['verdict'] == 'exact' and row['tier'] == 'F'
  assert np.isnan(result.reconstructions[attack, 'none'][0][:4]).all()
  assert any('last layer' in text for text in result.inspections[attack])


@pytest.mark.slow
@pytest.mark.parametrize('variant', ['independent', 'mirrored', 'soliton_free'])
def test_trap_weights_isolate_samples(scenario, variant):
  result = audit(scenario, [f'trap(variant={variant})'], 3, batch_size=4, controls=8)
  assert {row['tier'] for row in result.rows} == {'F'} and sum(row['revealed'] for row in result.rows) >= 1


@pytest.mark.slow
def test_spear_stands_in_the_same_rows(scenario):
  attack = 'spear'
  made = audit(scenario, [attack], 3, DEFENSES, batch_size=4, controls=4)
  bare, noisy = rows(made, attack, 'none'), rows(made, attack, 'gaussian(stddev=100)')
  assert sum(row['revealed'] for row in bare) > 0 == sum(row['revealed'] for row in noisy)


@pytest.mark.long
def test_a_malicious_server_is_said_to_be_one(result):
  assert {row['attack']: row['tier'] for row in result.rows}['imprint(bins=32)'] in 'FG'
  assert 'The server is malicious: it sends a modified model.' in result.threat_models['imprint(bins=32)']
  assert any('honest but curious' in sentence for sentence in result.threat_models['fidel'])
  assert {row['labels'] for row in rows(result, 'fidel', 'none')} == {'unused'}


@pytest.mark.long
def test_the_report_counts_images_shown_fully(result):
  text = page.render(result)
  assert 'of 4 fully' in text and 'correlates with the private one by at least 0.98' in text
  summary = next(s for s in cases.summarise(result.rows) if (s['attack'], s['defense']) == ('fidel', 'none'))
  assert summary['revealed'] == pytest.approx(np.mean([row['revealed'] for row in rows(result, 'fidel', 'none')]))
  assert 'fully, of 4' in terminal.terminal_table(result)


@pytest.mark.slow
def test_processes_share_the_trials_of_every_server(scenario, tmp_path):
  settings = {'batch_size': 2, 'controls': 2}
  attacks = ['imprint(bins=16)', 'fidel']
  whole = audit(scenario, attacks, 2, **settings)
  for rank in (0, 1):
    shared = audit(scenario, attacks, 2, workdir=tmp_path / 'w', process=(rank, 2), **settings)
  assert [row['psnr'] for row in shared.rows] == [row['psnr'] for row in whole.rows]


@pytest.mark.slow
def test_a_network_that_does_not_begin_dense_is_named(scenario):
  model = gl.models.create('cnn', 10)
  convolutional = gl.scenario(model, scenario.samples, scenario.targets, key=jax.random.key(0))
  with pytest.raises(errors.UsageError, match='not the 64 values of a sample'):
    audit(convolutional, ['fidel'], 1)


@pytest.mark.long
def test_the_client_could_have_seen_it(result):
  assert result.inspections['fidel'] == result.inspections['peeling'] == []
  assert any('weights of another unit' in text for text in result.inspections['imprint(bins=32)'])
  shown = page.render(result).replace('<wbr>', '').replace('\N{NO-BREAK SPACE}', ' ')
  assert result.inspections['imprint(bins=32)'][0] in shown
