"""A modality of one's own runs through audit, adaptive attackers, sweep and report, from one file of its own."""

import dataclasses

import jax
import numpy as np
import pytest

import gradleak as gl
from gradleak.adaptive import adaptive_attacks
from gradleak.audit import schema
from gradleak.modalities import IMAGES, REGISTRY, TABLE, TEXT, Column, Modality, modality, of_config, of_rows
from gradleak.studies.sensitivity import assumptions
from gradleak.studies.sweep import sweep
from tests import circle

RECOVERS = gl.attacks.dga(start='uniform', steps=100)


@pytest.fixture(scope='module')
def scenario():
  samples, classes = circle.points(101)
  return gl.scenario(circle.network(), samples, classes, key=jax.random.key(0), modality=circle.CIRCLE, dataset='ring')


@pytest.fixture(scope='module')
def result(scenario, tmp_path_factory):
  found = gl.audit(
    jax.random.key(1),
    scenario,
    [None, gl.defenses.gaussian(stddev=0.02), gl.defenses.prune(rate=0.5)],
    [RECOVERS],
    4,
    controls=8,
    workdir=tmp_path_factory.mktemp('ring'),
    progress='none',
  )
  return found


@pytest.mark.long
def test_points_are_recovered_without_a_defense(result):
  bare = [row for row in result.rows if row['defense'] == 'none']
  assert sum(row['success'] for row in bare) >= 3 and all(row['candidates'] == 100 for row in bare)
  assert result.config['modality'] == 'circle'
  assert result.truth.shape == (4, 1, 2)


@pytest.mark.long
def test_adaptive_attackers_meet_the_defenses(result):
  adaptive_attacks = {row['adaptive'] for row in result.rows if row['defense'].startswith('prune')}
  assert 'masked' in ' '.join(filter(None, adaptive_attacks))


@pytest.mark.long
def test_rows_have_the_columns_of_their_modality(result):
  names = {column.name for column in schema.columns(circle.CIRCLE)}
  assert all(set(row) == names for row in [*result.rows, *result.controls])
  assert {'nearness', 'control_nearness', 'oracle_nearness', 'trained_nearness', 'control_direction'} <= names
  assert not {'psnr', 'ssim', 'control_psnr'} & names
  assert of_rows(result.rows) is circle.CIRCLE and of_rows([{'psnr': 1.0}]) is IMAGES
  with pytest.raises(gl.UsageError, match='its modality is not known'):
    of_rows([{'loss': 1.0}])


@pytest.mark.long
def test_control_runs_show_nothing(result):
  assert np.mean([row['nearness'] for row in result.controls]) < np.mean(
    [row['nearness'] for row in result.rows if row['defense'] == 'none']
  )


def test_what_is_no_sample_is_refused(scenario):
  samples, classes = circle.points(8)
  with pytest.raises(gl.UsageError, match=r'point 3 is .* not on the circle'):
    wrong = samples.copy()
    wrong[3] = 0.5
    gl.scenario(circle.network(), wrong, classes, key=jax.random.key(0), modality=circle.CIRCLE)
  with pytest.raises(gl.UsageError, match=r'images .*expected \[N, H, W, C\]'):
    gl.scenario(circle.network(), samples, classes, key=jax.random.key(0))
  with pytest.raises(gl.UsageError, match=r'points are float32 of shape \(8, 2, 1\), expected floats \[N, 2\]'):
    scenario.client.local_update(None, scenario.variables, samples[..., np.newaxis], classes)


def test_two_modalities_have_two_names_and_two_scores():
  again = {**{name: getattr(circle.CIRCLE, name) for name in Modality.__dataclass_fields__}}
  with pytest.raises(gl.UsageError, match='has the name or the score'):
    modality(Modality(**again))
  renamed = tuple(column._replace(name=f'{column.name}_too') for column in circle.CIRCLE.columns)
  other = dataclasses.replace(
    circle.CIRCLE,
    name='other',
    columns=(*renamed, Column('psnr', float, 'dB', 'A column with the name of the score of images.')),
    score='nearness_too',
    correlation='direction_too',
    likeness='nearness_too',
    oracle=(),
    shown=(circle.CIRCLE.shown[0]._replace(column='nearness_too'),),
  )
  with pytest.raises(gl.UsageError, match='has the name or the score'):
    modality(other)
  with pytest.raises(gl.UsageError, match='for its score and its correlation'):
    Modality(**{**again, 'correlation': 'nearness'})
  assert REGISTRY == {'images': IMAGES, 'table': TABLE, 'text': TEXT, 'circle': circle.CIRCLE}


@pytest.mark.long
def test_a_page_a_table_and_pictures_are_made_of_it(result, tmp_path):
  table = gl.report.terminal_table(result)
  assert 'nearness digits' in table and 'PSNR' not in table and 'points' in table
  gl.report.write(result, tmp_path)
  page = (tmp_path / 'report.html').read_text('utf-8')
  assert 'nearness' in page and 'Private point of trial 0.' in page
  assert not circle.said_of_images(page)
  assert (tmp_path / 'grid.png').stat().st_size > 1000


@pytest.mark.long
def test_the_folder_is_read_again(result, scenario, tmp_path):
  gl.audit(jax.random.key(1), scenario, [None], [RECOVERS], 1, controls=2, workdir=tmp_path, progress='none')
  found = gl.load(tmp_path)
  assert found.rows[0]['nearness'] > 0 and found.config['modality'] == 'circle'


@pytest.mark.slow
def test_a_sweep_over_strengths_runs(scenario, tmp_path):
  defenses = {f'noise {level}': gl.defenses.gaussian(stddev=level) for level in (0.01, 1.0)}
  audits = {'ring': (jax.random.key(2), scenario)}
  rows = sweep(audits, defenses, [RECOVERS], 2, controls=2, workdir=tmp_path, progress='none', say=str)
  assert {row['defense'] for row in rows} == set(defenses) and all('nearness' in row for row in rows)
  assert gl.report.strengths(rows, defenses).startswith(b'\x89PNG')


@pytest.mark.long
def test_results_side_by_side_have_the_score_of_their_samples(result):
  found = gl.compare({'here': result})
  assert 'here: nearness digits, recovered (95 %)' in str(found) and 'PSNR' not in str(found)
  assert found.rows[0]['here nearness'] > 1 and 'here nearness_low' in found.rows[0]
  of_images = dataclasses.replace(result, config={**result.config, 'modality': 'images'})
  with pytest.raises(gl.UsageError, match=r'of different samples \(1 circle, 2 images\)'):
    gl.compare([result, of_images])


@pytest.mark.slow
def test_which_assumption_protects_points(tmp_path):
  samples, classes = circle.points(24)
  scenario = gl.scenario(
    circle.network(), samples[:4], classes[:4], key=jax.random.key(0), modality=circle.CIRCLE, dataset='ring',
    public=(samples[4:], classes[4:]),
  )  # fmt: skip
  given = {'trials': 2, 'batch_size': 2, 'controls': 2, 'training_rounds': 1, 'training_clients': 2}
  settings = gl.SensitivitySettings(batch_size=2)
  listed = assumptions(gl.ClientSettings(), RECOVERS, settings, modality=circle.CIRCLE)
  (one,) = (one for one in listed if one.name == 'batch')
  assert 'initialisation' not in [each.name for each in listed], 'attacks on points were not published with it'
  found = gl.sensitivity(
    jax.random.key(1), scenario, attack=RECOVERS, chosen=[one], workdir=tmp_path, progress='none', **given
  )
  assert found.modality is circle.CIRCLE and found.rows[0]['nearness'] > 1 and 'psnr' not in found.rows[0]
  assert one.laboratory == 'An upload is of one point.' and one.production == 'It is of 2 points.'
  gl.report.write(found, tmp_path)
  assert not circle.said_of_images((tmp_path / 'sensitivity.html').read_text('utf-8'))
  told = gl.report.sensitivity_table(found)
  assert 'nearness digits' in told and 'give points away' in told
  assert (
    (tmp_path / 'sensitivity.csv').read_text('utf-8').startswith('setting,dropped,n,recovered,nearness,nearness_low')
  )


def test_terms_of_pixels_are_refused_and_not_computed(scenario):
  with pytest.raises(gl.UsageError, match='tv is not defined on points: leave it out'):
    gl.attacks.csdlg(tv=1e-4)(scenario.client)
  with pytest.raises(gl.UsageError, match='group is not defined on points'):
    gl.attacks.csdlg(tv=0.0, seeds=2, group=0.0)(scenario.client)
  assert gl.attacks.csdlg(tv=0.0)(scenario.client).num_steps


def test_who_knows_a_defense_weights_no_smoothness_of_points(scenario):
  bound = gl.defenses.bind(gl.defenses.outpost(), scenario.context)
  found = adaptive_attacks(bound, scenario.context, 1, RECOVERS, 1)
  assert any(one.simulates is not None for one in found)
  assert not any('prior' in dict(one.settings) or 'smoothness' in one.words for one in found)


@pytest.mark.long
def test_settings_name_a_modality_that_is_known(result):
  assert of_config(result.config) is circle.CIRCLE and of_config({}) is IMAGES
  with pytest.raises(gl.UsageError, match='unknown modality'):
    of_config({'modality': 'sounds'})


@pytest.mark.long
def test_what_is_said_follows_the_rows(result):
  """The same settings, with every row turned into a run that shows nothing."""
  hidden = {'success': False, 'verdict': 'inconclusive', 'recognised': 0, 'revealed': 0, 'identified': 0}
  other = dataclasses.replace(result, rows=[{**row, **hidden} for row in result.rows])
  said, turned = (gl.report.terminal_table(one) for one in (result, other))
  assert 'the attacks recover' in said and 'the attacks recover' not in turned
