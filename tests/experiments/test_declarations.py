"""Every declared experiment fits the library: names, settings, and the arithmetic between the papers' own numbers."""

import math

import numpy as np
import pytest

import experiments
import gradleak as gl
from experiments import experiment as machinery
from gradleak import defenses, errors, specs

NAMES = sorted(experiments.REGISTRY)


def numbers(cell):
  return () if cell.paper is None else cell.paper if isinstance(cell.paper, tuple) else (cell.paper,)


def test_all_papers_are_there():
  assert {name.partition('_')[0] for name in NAMES} == {'dcs2', 'ffl', 'graddefense', 'outpost'}
  assert all(experiment.name == name for name, experiment in experiments.REGISTRY.items())


def test_an_unknown_name_is_told_the_valid_ones():
  with pytest.raises(errors.UsageError, match=r"'graddefense_2'; did you mean 'graddefense_2[ab]'\? .*valid: dcs2_1"):
    experiments.get('graddefense_2')


@pytest.mark.parametrize('name', NAMES)
def test_cells_stand_on_runs_and_each_once(name):
  experiment = experiments.get(name)
  places = [(cell.column, cell.row, cell.metric) for cell in experiment.cells]
  assert len(set(places)) == len(places)
  for cell in experiment.cells:
    assert cell.metric in machinery.HEADINGS
    assert cell.defense in experiment.runs[cell.run].defenses
    assert cell.counter is None or experiment.runs[cell.run].knowledge != 'unaware'
  assert {cell.run for cell in experiment.cells} == set(experiment.runs)
  used = {(cell.run, cell.defense) for cell in experiment.cells}
  unused = {(name, label) for name, run in experiment.runs.items() for label in run.defenses} - used
  assert all(label == 'none' for _, label in unused)  # an undefended run belongs to each audit that judges others


@pytest.mark.parametrize('name', NAMES)
@pytest.mark.parametrize('scale', machinery.SCALES)
def test_every_text_is_understood(name, scale):
  for run in experiments.get(name).runs.values():
    run = machinery.scaled(run, scale)
    texts = [defenses.parse(text).name for text in machinery.defense_texts(run).values()]
    assert len(set(texts)) == len(texts)
    gl.attacks.parse(machinery.attack_text(run))
    gl.models.create(run.model, 10, init=run.init)
    if run.training:
      defenses.parse(run.training.defense)
    roots = [dict(spec.settings).get('root', 0) for text in texts for spec in specs.parse_chain(text, 'defense')]
    assert max(roots) <= run.public


@pytest.mark.parametrize('name', NAMES)
def test_the_numbers_are_possible(name):
  experiment = experiments.get(name)
  for cell in experiment.cells:
    for value in (*numbers(cell), *(() if cell.spread is None else (cell.spread,))):
      assert isinstance(value, float | int) and math.isfinite(value)
      if cell.metric in ('ssim', 'lpips'):
        assert 0 <= value <= 1
      elif 'mse' in cell.metric:
        assert value > 0
      else:
        assert -5 < value < 60
  assert any(map(numbers, experiment.cells)) or 'pictures alone' in experiment.shows


def test_ffl_prints_psnr_and_mse_of_the_same_pictures():
  cells = {(cell.row, cell.metric): cell.paper for cell in experiments.get('ffl_5').cells if cell.column == 'ConvNet'}
  rows = {row for row, _ in cells if cells[row, 'psnr_unclipped'] and 'matched' not in row}
  assert len(rows) == 15
  for row in rows:
    mse, psnr = np.array(cells[row, 'mse_unclipped']), np.array(cells[row, 'psnr_unclipped'])
    # Four decimals of an MSE of 0.0019 leave 0.1 dB.
    np.testing.assert_allclose(-10 * np.log10(mse), psnr, atol=0.12, err_msg=row)


@pytest.mark.parametrize(('name', 'count'), [('graddefense_2a', 36), ('graddefense_2b', 36), ('outpost_3_1', 36)])
def test_no_number_is_forgotten(name, count):
  assert sum(len(numbers(cell)) for cell in experiments.get(name).cells) == count


def test_noise_has_the_variance_that_the_papers_state():
  def setting(name, run, label):
    return dict(specs.parse(experiments.get(name).runs[run].defenses[label], 'defense').settings)

  for name in ('graddefense_2a', 'graddefense_2b'):
    assert setting(name, 'cifar10', 'DP-G')['stddev'] ** 2 == pytest.approx(0.01)
    assert 2 * setting(name, 'cifar10', 'DP-L')['scale'] ** 2 == pytest.approx(0.01, rel=1e-5)
    assert setting(name, 'cifar10', 'Ours')['stddev'] ** 2 == pytest.approx(0.01)
  for name, steps in (('outpost_3_1', 1), ('outpost_3_2', 2), ('outpost_3_3', 1), ('outpost_3_4', 1)):
    run = experiments.get(name).runs['dlg']
    assert 2 * setting(name, 'dlg', 'DP')['scale'] ** 2 == pytest.approx(0.1 * run.learning_rate**2 * steps, rel=1e-5)
    assert run.batch_size // run.local_batch_size == steps


@pytest.mark.parametrize('name', NAMES)
def test_a_scale_says_what_it_changes(name):
  experiment = experiments.get(name)
  for run in experiment.runs.values():
    assert machinery.changes(run, 'paper') == []
    for scale in ('mini', 'smoke'):
      now, said = machinery.scaled(run, scale), machinery.changes(run, scale)
      assert all(' instead of ' in text for text in said)
      assert (f'trials {now.trials} instead of {run.trials}' in said) == (now.trials != run.trials)
      attack, published = (specs.parse(machinery.attack_text(r), 'attack') for r in (now, run))
      assert any(text.startswith(f'{attack.name} steps ') for text in said) == (attack != published)
  assert machinery.minutes(experiment, 'smoke') < machinery.minutes(experiment, 'mini')
  assert machinery.minutes(experiment, 'mini') < machinery.minutes(experiment, 'paper')
