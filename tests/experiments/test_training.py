"""The training of a network that is attacked: it ends at an accuracy, and says what it reached."""

import dataclasses

import jax
import numpy as np
import pytest

import experiments
from experiments import experiment as machinery
from experiments import utility
from experiments.experiment import Cell, Run, Training
from experiments.study import SCALES

RUN = Run('digits', 'mlp', 'csdlg', {'none': 'none'}, trials=2)


@pytest.fixture(scope='module')
def made():
  """Returns rounds and accuracy at which a training ends that wants 40 %, and the data of it."""
  run = dataclasses.replace(RUN, training=Training(60, 2, 50, rate=0.5, share=0.5, accuracy=40.0, tested=50))
  data = run.load(None)
  return run, data, run.scenario(data, 0).settings['training']


@pytest.mark.usefixtures('fast_compilation')
def test_it_ends_at_the_accuracy_on_held_out_samples(made):
  run, data, reached = made
  assert len(data.others[0]) == run.training.held == 150
  assert len(np.unique(np.concatenate([data.others[0], data.private.samples]), axis=0)) == 152
  assert reached['accuracy_reached'] >= 40 and reached['rounds_done'] % run.training.evaluated == 0
  assert reached['rounds_done'] < 60 and reached['share'] == 0.5


@pytest.mark.parametrize(
  ('found', 'words'),
  [
    (85.0, 'trained network, 85.0 % accurate after 40 rounds'),
    (61.2, 'network 61.2 % accurate after 40 rounds'),
    (10.3, 'untrained network, 10.3 % accurate after 40 rounds'),
    (12.6, 'untrained network, 12.6 % accurate after 40 rounds'),  # within the noise of 500 samples
    (12.8, 'network 12.8 % accurate after 40 rounds'),
  ],
)
def test_a_network_is_called_what_it_is(found, words):
  training = dataclasses.asdict(Training(accuracy=80.0, tested=500)) | {'rounds_done': 40, 'accuracy_reached': found}
  assert machinery.called(training, 10) == words


def test_a_network_is_untrained_that_knows_no_more_than_the_commonest_class():
  training = {'accuracy_reached': 4.5, 'tested': 200, 'accuracy': 70, 'rounds_done': 100}
  assert machinery.called(training, 100).startswith('network 4.5 %')  # of classes that are alike
  targets = np.concatenate([np.zeros(6, int), np.arange(194) % 99 + 1])  # 3 % are of class 0
  assert machinery.called(training, 100, targets).startswith('untrained network, 4.5 %')
  assert machinery.called({**training, 'accuracy_reached': 9.0}, 100, targets).startswith('network 9.0 %')


def test_nothing_is_said_of_what_was_not_measured():
  assert machinery.called(None, 10) == '' == machinery.called({'rounds_done': 3, 'tested': 0}, 10)
  rows = [{'defense': 'none', 'trial': 0, 'psnr': 9.0, 'success': False, 'diverged': False, 'adaptive': None}]
  cell = Cell('', '', 'psnr', 'run', 'none')
  assert RUN.outcome(cell, rows).remark == '0 of 1'
  assert RUN.outcome(cell, [{**rows[0], 'network': 'network 61.2 % accurate'}]).remark == (
    '0 of 1; network 61.2 % accurate'
  )
  networks = (
    machinery.called({'accuracy_reached': accuracy, 'tested': 500, 'accuracy': 80, 'rounds_done': 3}, 10)
    for accuracy in (12.0, 61.2, 81.0)
  )
  found = [RUN.outcome(cell, [{**rows[0], 'network': network}]).untrained for network in networks]
  assert found == [True, False, False] and not RUN.outcome(cell, rows).untrained


@pytest.mark.parametrize('name', ['ffl_1', 'ffl_5', 'ffl_6'])
@pytest.mark.parametrize('scale', SCALES)
def test_attacked_networks_state_their_accuracy(name, scale):
  for run in experiments.get(name).runs.values():
    training = run.scaled(scale).training
    assert training.tested and training.accuracy == 80
    if scale == 'paper':
      assert (training.clients, training.share, training.rounds) == (100, 0.1, 2000)
  assert not any('trained' in cell.column for cell in experiments.get(name).cells)


def test_the_servers_momentum_moves_the_model_as_far_as_momentum_that_is_kept():
  """Against a loop: constant gradients of three steps a round, momentum 0.9, until the speed is steady."""
  steps, speed, velocity = 3, 0.0, 0.0
  for _ in range(400):
    moved, momentum = 0.0, 0.0
    for _ in range(steps):  # as a client whose momentum starts anew
      momentum = 0.9 * momentum + 1.0
      moved += momentum
    speed = utility.carried(0.9, steps) * speed + moved
    velocity = 0.9 * velocity + 1.0
  assert speed == pytest.approx(steps * velocity)


def test_the_servers_rate_decays_and_drops():
  optimizer = utility.server(0.9, 2, 0.0)
  state, found = optimizer.init({'w': np.float32(0)}), []
  for _ in range(4):
    update, state = optimizer.update({'w': np.float32(-1)}, state)
    found.append(float(update['w']))
  np.testing.assert_allclose(found, [1, 0.9, 0.1, 0.09], rtol=1e-6)


@pytest.mark.long
@pytest.mark.usefixtures('fast_compilation')
def test_runs_that_attack_the_same_network_train_it_once(tmp_path, monkeypatch):
  trained = []

  def counted(*arguments):
    trained.append(arguments)
    return real(*arguments)

  real = machinery.train
  monkeypatch.setattr(machinery, 'train', counted)
  apart = {'share': 'delta', 'local_batch_size': 2, 'learning_rate': 0.05}
  run = dataclasses.replace(RUN, training=Training(1, 1, 4, tested=10, client=apart))
  data = run.load(None)
  first, again = (run.scenario(data, 0, str(tmp_path)) for _ in range(2))
  assert len(trained) == 1 and trained[0][1].client.share == 'delta' and first.client.share == 'gradient'
  for name in ('variables', 'previous'):
    pairs = zip(jax.tree.leaves(getattr(first, name)), jax.tree.leaves(getattr(again, name)), strict=True)
    assert all(np.array_equal(a, b) for a, b in pairs)
  assert first.settings == again.settings and first.settings['training']['rounds_done'] == 1
  run.replaced(batch_size=2, trials=1).scenario(data, 0, str(tmp_path))  # is attacked otherwise
  assert len(trained) == 1
  run.scenario(data, 1, str(tmp_path))
  assert len(trained) == 2
