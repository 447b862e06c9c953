"""Every declared experiment fits the library: names, settings, and the arithmetic between the papers' own numbers."""

import dataclasses
import itertools
import math

import jax
import numpy as np
import pytest

import experiments
import gradleak as gl
from experiments import comparison, utility
from experiments.ffl import normalised_scores
from experiments.study import SCALES
from gradleak import registry
from gradleak.core import errors, grammar
from gradleak.data import partition
from tests import programs

NAMES = sorted(experiments.REGISTRY)
TRAININGS = [name for name in NAMES if any(run.kind == 'trainings' for run in experiments.get(name).runs.values())]
AUDITS = [name for name in NAMES if all(run.kind == 'audit' for run in experiments.get(name).runs.values())]


def numbers(cell):
  return () if cell.paper is None else cell.paper if isinstance(cell.paper, tuple) else (cell.paper,)


def test_all_papers_are_there():
  assert {name.partition('_')[0] for name in NAMES} == {
    'assumptions', 'dcs2', 'defenses', 'ffl', 'fidel', 'graddefense', 'labels', 'lti', 'outpost', 'peeling', 'priors',
    'separation', 'spear',
  }  # fmt: skip
  assert all(experiment.name == name for name, experiment in experiments.REGISTRY.items())


def test_an_unknown_name_is_told_the_valid_ones():
  with pytest.raises(errors.UsageError, match=r"did you mean 'graddefense_2[ab]'\? .*valid: assumptions_"):
    experiments.get('graddefense_2')


@pytest.mark.parametrize('name', NAMES)
def test_cells_stand_on_runs_and_each_once(name):
  experiment = experiments.get(name)
  places = [(cell.column, cell.row, cell.metric) for cell in experiment.cells]
  assert len(set(places)) == len(places)
  for cell in experiment.cells:
    assert cell.metric in comparison.HEADINGS
    assert cell.defense in experiment.runs[cell.run].defenses
    assert (cell.metric in utility.METRICS) == (name in TRAININGS)
    assert cell.adaptive is None or experiment.runs[cell.run].settings.knowledge != 'non-adaptive'
  assert {cell.run for cell in experiment.cells} == set(experiment.runs)
  used = {(cell.run, cell.defense) for cell in experiment.cells}
  unused = {(name, label) for name, run in experiment.runs.items() for label in run.defenses} - used
  assert all(label == 'none' for _, label in unused)  # an undefended run belongs to each audit that judges others


@pytest.mark.parametrize('name', AUDITS)
@pytest.mark.parametrize('scale', SCALES)
def test_every_text_is_understood(name, scale):
  for run in experiments.get(name).runs.values():
    run = run.scaled(scale)
    made = [registry.defense(text) for text in run.texts().values()]
    assert len(set(made)) == len(made) and list(map(str, made)) == list(run.texts().values())
    assert str(run.method()) == run.attack_text()
    gl.models.create(run.model, 10, init=run.init)
    if run.training:
      registry.defense(run.training.defense)
    assert all((stage.settings.get('root') or 0) <= run.public for one in made for stage in one.stages)


@pytest.mark.parametrize('name', NAMES)
def test_the_numbers_are_possible(name):
  experiment = experiments.get(name)
  for cell in experiment.cells:
    for value in (*numbers(cell), *(() if cell.spread is None else (cell.spread,))):
      assert isinstance(value, float | int) and math.isfinite(value)
      if cell.metric in ('ssim', 'lpips'):
        assert 0 <= value <= 1
      elif 'mse' in cell.metric or cell.metric.endswith(('seconds', 'parameters')):
        assert value > 0
      elif name in TRAININGS:
        assert 0 < value <= 100
      elif cell.metric in ('revealed', 'revealed_90', 'certified'):
        assert 0 <= value <= 200
      else:
        assert -5 < value < 60
  unprinted = any(words in experiment.shows for words in ('pictures alone', 'Nothing of this is printed'))
  assert any(map(numbers, experiment.cells)) or unprinted


def test_ffl_prints_psnr_and_mse_of_the_same_pictures():
  cells = {(cell.row, cell.metric): cell.paper for cell in experiments.get('ffl_6').cells}
  rows = {row for row, metric in cells if metric == 'psnr_normalised' and cells[row, metric]}
  assert len(rows) == 16
  for row in rows:
    mse, psnr = np.array(cells[row, 'mse_normalised']), np.array(cells[row, 'psnr_normalised'])
    # Four decimals of an MSE of 0.0019 leave 0.1 dB.
    np.testing.assert_allclose(-10 * np.log10(mse), psnr, atol=0.12, err_msg=row)


def test_normalised_pixels_have_variance_one():
  """An MSE of 2.7 is that of boxed images that show nothing, in units of normalised pixels."""
  scores = normalised_scores({'mse_unclipped': 0.25, 'psnr_unclipped': -10 * math.log10(0.25)}, 0.1)
  assert scores['mse_normalised'] == pytest.approx(2.5)
  assert scores['psnr_normalised'] == pytest.approx(-10 * math.log10(2.5))
  diverged = normalised_scores({'mse_unclipped': None, 'psnr_unclipped': None}, 0.1)
  assert diverged == {'mse_normalised': None, 'psnr_normalised': None}


def test_the_lines_of_noise_on_the_imprint_module_have_the_weights_that_they_name():
  experiment = experiments.get('dcs2_2_imprint')
  named = {cell.row.rpartition(' ')[2]: cell.run for cell in experiment.cells if 'weights' in cell.row}
  assert set(named) == {'10,000', '100,000'}
  named['1,000'] = 'cifar10'  # of the authors' scripts: the paper's figure stands at no other
  assert {cell.run for cell in experiment.cells if cell.paper is not None} == {'cifar10'}
  for weights, run in named.items():
    settings = dict(grammar.spec(experiment.runs[run].attack, 'attack').settings)
    assert 1 / (settings['bins'] * settings['gain']) == pytest.approx(float(weights.replace(',', '')))


@pytest.mark.parametrize(
  ('name', 'count'),
  [
    ('graddefense_2a', 36), ('graddefense_2b', 36), ('graddefense_3e_accuracy', 12), ('outpost_3_1', 36),
    ('outpost_4_resnet18', 32), ('outpost_4_resnet152', 32), ('outpost_5', 8), ('outpost_5_tiny', 8),
    ('dcs2_2_celeba_accuracy', 12), ('ffl_6', 64),
  ],
)  # fmt: skip
def test_no_number_is_forgotten(name, count):
  assert sum(len(numbers(cell)) for cell in experiments.get(name).cells) == count


def test_noise_has_the_variance_that_the_papers_state():
  def setting(name, run, label):
    return dict(grammar.spec(experiments.get(name).runs[run].defenses[label], 'defense').settings)

  for name in ('graddefense_2a', 'graddefense_2b'):
    assert setting(name, 'cifar10', 'DP-G')['stddev'] ** 2 == pytest.approx(0.01)
    assert 2 * setting(name, 'cifar10', 'DP-L')['scale'] ** 2 == pytest.approx(0.01, rel=1e-5)
    assert setting(name, 'cifar10', 'Ours')['stddev'] ** 2 == pytest.approx(0.01)
  for name, steps in (('outpost_3_1', 1), ('outpost_3_2', 2), ('outpost_3_3', 1), ('outpost_3_4', 1)):
    run = experiments.get(name).runs['dlg']
    variance = 0.1 * run.client.learning_rate**2 * steps
    assert 2 * setting(name, 'dlg', 'DP')['scale'] ** 2 == pytest.approx(variance, rel=1e-5)
    assert run.settings.batch_size // run.client.local_batch_size == steps


@pytest.mark.parametrize('name', TRAININGS)
@pytest.mark.parametrize('scale', SCALES)
def test_every_training_is_understood(name, scale):
  for run in experiments.get(name).runs.values():
    run = run.scaled(scale)
    assert len(set(run.texts().values())) == len(run.defenses) and utility.UNDEFENDED in run.defenses.values()
    for method in run.defenses.values():
      named = [stage.name for stage in registry.defense(method.clients).stages]
      assert method.q is None or 'graddefense' in named
    gl.models.create(run.model, 10, init=run.init)
    assert set(run.extrapolated) <= set(run.defenses)
    classes = utility.CLASSES.get(run.dataset, 10)
    labels = np.arange(run.samples) % classes
    parts = partition.parse(run.protocol.partition, jax.random.key(0), labels, run.protocol.clients)
    assert len(parts) == run.protocol.clients >= run.protocol.per_round


@pytest.mark.parametrize(('name', 'count'), [('ffl_4_cifar10_convnet', 15), ('graddefense_2a_accuracy', 18)])
def test_no_accuracy_is_forgotten(name, count):
  table = experiments.get(name)
  ours = {'Ours, uncompensated', *itertools.chain(*table.readings.values())}  # lines that no paper prints
  cells = [cell for cell in table.cells if cell.metric == 'accuracy' and cell.row not in ours]
  assert len(cells) == count and all(cell.paper is not None for cell in cells)


@pytest.mark.parametrize('name', [name for name, table in experiments.REGISTRY.items() if table.readings])
def test_a_reading_is_a_line_without_printed_figures(name):
  table = experiments.get(name)
  printed = {cell.row for cell in table.cells if cell.paper is not None}
  others = {cell.row for cell in table.cells} - printed
  assert table.readings.keys() <= printed and set(itertools.chain(*table.readings.values())) <= others


def test_presets_have_the_programs_names():
  fields = {field.name for field in dataclasses.fields(utility.Protocol)}
  assert fields <= set(programs._load('train')[1])
  assert {'ffl', 'graddefense', 'outpost'} <= set(utility.PROTOCOLS)


@pytest.mark.parametrize(
  ('protocol', 'table', 'classes'),
  [
    ('ffl', 'ffl_4_cifar10_convnet', 10),
    ('ffl', 'ffl_4_cifar100_resnet', 100),
    ('ffl', 'ffl_4_emnist_convnet', 26),
    ('outpost', 'outpost_figure_3_cifar10', 10),
    ('outpost_emnist', 'outpost_figure_3_emnist', 47),
  ],
)
def test_a_preset_is_the_protocol_of_the_table_on_its_data(protocol, table, classes):
  run = experiments.get(table).runs['training']
  assert utility.CLASSES.get(run.dataset, 10) == classes
  assert utility.protocol_on(protocol, classes) == run.protocol
