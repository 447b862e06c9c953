"""Fidel's figures: what is measured against loops, what is kept, and that all of them run."""

import dataclasses

import jax
import numpy as np
import pytest
from scipy import stats

import experiments
from experiments import fidel, table
from experiments.experiment import Cell, Experiment

pytestmark = pytest.mark.usefixtures('fast_compilation')
RUN = dataclasses.replace(
  fidel.Revelations('mnist', 'mlp', 3).scaled('smoke'),
  activations=('relu',),
  dropouts=(0.5,),
  sizes=(6,),
  measurements=3,
)
LABEL = 'relu, dropout 0.5'


@pytest.fixture(scope='module')
def data():
  return RUN.load(None)


def test_private_auxiliary_and_trained_images_are_different_ones(data):
  images = np.concatenate([part[0] for part in (data.private, data.auxiliary, data.trained)])
  assert [len(part[0]) for part in (data.private, data.auxiliary, data.trained)] == [250, 250, 200]
  assert len(np.unique(images, axis=0)) == len(images) == 700


@pytest.mark.slow
@pytest.mark.parametrize('pace', [1, 2])
def test_the_victim_is_trained_by_plain_sgd_before(data, pace):
  """Against NumPy: the output layer's bias, whose gradient is the mean of softmax − label, after one step from zero."""
  run = dataclasses.replace(RUN, steps=pace, pace=pace, trained=50)
  one = data._replace(trained=(data.trained[0][:1], data.trained[1][:1]))  # all fifty samples of the batch are this
  text = 'mlp(activation=relu,dropout=0.0)'
  start = fidel.prepare(dataclasses.replace(run, steps=0), text, one, jax.random.key(0)).variables['params']
  found = fidel.prepare(run, text, one, jax.random.key(0)).variables['params']
  x = np.asarray(one.trained[0], float).reshape(1, -1)
  for index in range(4):
    layer = {name: np.asarray(value, float) for name, value in start[f'Dense_{index}'].items()}
    x = x @ layer['kernel'] + layer['bias']
    x = np.maximum(x, 0) if index < 3 else x
  error = np.exp(x[0]) / np.exp(x[0]).sum() - np.eye(10)[int(one.trained[1][0])]
  np.testing.assert_allclose(
    np.asarray(found['Dense_3']['bias']) - np.asarray(start['Dense_3']['bias']), -0.01 * pace * error, atol=1e-7
  )


@pytest.mark.long
def test_a_measurement_counts_what_a_loop_counts(data):
  victim = fidel.prepare(RUN, 'mlp(activation=relu,dropout=0.5)', data, jax.random.key(0))
  key, size = jax.random.key(5), 6
  counts, alive = fidel.counted(victim, lambda inputs: inputs, data.private, key, size, 3)
  send = jax.jit(victim.client.local_update)
  for one, count, living in zip(jax.random.split(jax.random.fold_in(key, size), 3), counts, alive, strict=True):
    chosen = np.asarray(jax.random.choice(jax.random.fold_in(one, 0), 250, (size,), replace=False))
    images, labels = (np.asarray(x)[chosen] for x in data.private)
    update = send(jax.random.fold_in(one, 1), victim.variables, images, labels).update['Dense_0']
    kernel, bias = (np.asarray(update[name], float) for name in ('kernel', 'bias'))
    seen, neurons = set(), [j for j in range(128) if bias[j] != 0]
    for j in neurons:
      for n, image in enumerate(images):
        if np.corrcoef(kernel[:, j] / bias[j], image.ravel())[0, 1] >= 0.98:
          seen.add(n)
    assert (int(count), int(living)) == (len(seen), len(neurons))


@pytest.mark.long
def test_a_run_measures_and_draws(data, tmp_path, capsys):
  (row,) = RUN.execute(data, 0, workdir=str(tmp_path / 'run'), progress='lines')
  assert (row['curve'], row['samples'], len(row['revealed'])) == (LABEL, 6, 3) and 0 < row['alive'] <= 128
  assert capsys.readouterr().err == f'{LABEL}, {np.mean(row["revealed"]):.1f} of 6\n'
  assert (tmp_path / 'run' / 'revealed.png').read_bytes().startswith(b'\x89PNG')


def test_the_table_sets_ours_beside_the_papers():
  rows = [{'defense': fidel.point(LABEL, 6), 'samples': 6, 'revealed': [3, 4, 5]}]
  cell = Cell('6 samples', LABEL, 'revealed', 'run', fidel.point(LABEL, 6), 4)
  found = RUN.outcome(cell, rows)
  half = stats.t.ppf(0.975, 2) / np.sqrt(3)
  assert found[:4] == pytest.approx((4, 4 - half, 4 + half, 3)) and found.remark == '67 %'
  (lines,) = table.sections(Experiment('toy', '', '', '', {'run': RUN}, (cell,), ''), [found]).values()
  assert lines == [['', 'samples fully revealed', 'paper', 'of the samples'], [LABEL, '4.0 ± 2.5', '4.0', '67 %']]


@pytest.mark.parametrize(
  ('name', 'place', 'printed', 'rows'),
  [('fidel_13', '30 samples', 20, [LABEL, f'{LABEL}, tenfold rate']), ('fidel_14', '20 samples', 13, [LABEL])],
)
def test_the_abstracts_averages_stand_at_their_points(name, place, printed, rows):
  cells = [cell for cell in experiments.get(name).cells if cell.paper is not None]
  assert [(cell.column, cell.row, cell.paper) for cell in cells] == [(place, row, printed) for row in rows]
