"""The machinery of the tables: scales, data, the short training, and what stands beside the paper's numbers."""

import contextlib
import csv
import dataclasses
import io
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import experiments
import gradleak as gl
from experiments import comparison, table
from experiments import experiment as machinery
from experiments.comparison import BEST, Note
from experiments.experiment import Cell, Experiment, Outcome, Run, Training
from gradleak.core import errors
from gradleak.engine import progress

RUN = Run(
  'cifar10', 'convnet(width=64)', 'csdlg(tv=1e-4)', {'none': 'none', 'GC': 'prune(rate=0.8)'}, trials=100,
  changed={'prune': {'rate': lambda rate: rate / 2}},
  mini={'model': 'convnet(width=8)', 'trials': 4, 'batch_norm': 'eval', 'changed': {'csdlg': {'steps': 200}}},
)  # fmt: skip
CELLS = (
  Cell('CIFAR-10', 'none', 'psnr', 'run', 'none', 20.41, 3.15),
  Cell('CIFAR-10', 'none', 'lpips', 'run', 'none', 0.5),
  Cell('CIFAR-10', 'GC', 'psnr', 'run', 'GC', (24.2, 20.12)),
  Cell('other', 'GC', 'mse_unclipped', 'run', 'GC'),
)
EXPERIMENT = Experiment(
  'toy_1', 'A, B: C. 2024.', 'Table 1: toys', 'It shows.', {'run': RUN}, CELLS, 'Defined so.', ('A choice.',),
  (Note('toy_1', 'They disagree.', 'other', seed=3), Note('toy_1', 'All in all.', seed=3)),
)  # fmt: skip


def row(defense, psnr, success=False, **others):
  return {'defense': defense, 'psnr': psnr, 'success': success, 'diverged': psnr is None, **others}


def test_scales():
  mini, smoke = RUN.scaled('mini'), RUN.scaled('smoke')
  assert RUN.scaled('paper') is RUN
  assert (mini.trials, mini.model, mini.attack_text()) == (4, 'convnet(width=8)', 'csdlg(tv=0.0001,steps=200)')
  assert mini.client == dataclasses.replace(RUN.client, batch_norm='eval') and mini.settings == RUN.settings
  assert (smoke.dataset, smoke.trials, smoke.attack_text()) == ('digits', 2, 'csdlg(tv=0.0001,steps=3)')
  assert smoke.settings == dataclasses.replace(RUN.settings, controls=2) and smoke.client == RUN.client
  assert RUN.changes('mini') == [
    'model convnet(width=8) instead of convnet(width=64)', 'trials 4 instead of 100',
    'batch_norm eval instead of train', 'csdlg steps 200 instead of the published', 'prune rate 0.8 instead of 0.4',
  ]  # fmt: skip


def test_settings_take_the_place_of_those_in_the_text():
  run = dataclasses.replace(
    RUN,
    defenses={'both': 'prune(rate=0.8)+gaussian(stddev=0.1)'},
    changed={'gaussian': {'stddev': 2.0}, 'prune': {'other': lambda value: value}},
  )
  assert run.texts() == {'both': 'prune(rate=0.8)+gaussian(stddev=2.0)'}


def test_a_gain_is_of_the_same_trial():
  cell = Cell('CIFAR-10', 'none', 'psnr_gain', 'new', 'none', minus='old')
  rows = {
    'new': [row('none', value, adaptive=None, trial=trial) for trial, value in ((1, 12.0), (0, 20.0), (2, None))],
    'old': [row('none', value, adaptive=None, trial=trial) for trial, value in enumerate((15.0, 10.0, 1.0))],
  }
  found = machinery.gains(cell, rows)
  assert [each['psnr_gain'] for each in found] == [2.0, 5.0, None]
  assert RUN.outcome(cell, found).mean == 3.5
  assert machinery.gains(cell._replace(minus=None), rows) is rows['new']


def test_a_trial_without_a_control_has_no_figure_over_it():
  cell = Cell('faces', 'none', 'over_control', 'new', 'none')
  rows = [{**row('none', 20.0, trial=trial), 'control_psnr': control} for trial, control in enumerate((8.0, None))]
  assert [each['over_control'] for each in machinery.gains(cell, {'new': rows})] == [12.0, None]


@pytest.mark.long
def test_the_accuracy_of_given_weights_is_on_images_that_are_not_attacked(monkeypatch):
  run = dataclasses.replace(RUN.scaled('smoke'), training=Training(1, 2, 3, tested=50), weights='folder/net.pt')
  untrained = dataclasses.replace(run, training=None, weights='')
  made = untrained.scenario(untrained.load(None), 0)
  monkeypatch.setattr(machinery.torch_weights, 'load', lambda path, model, shape: made.variables)
  data = run.load(None)
  assert len(data.private.samples) == 2 and data.others[0].shape == (50, 8, 8, 1)
  found = run.scenario(data, 0)
  assert found.settings['weights_fingerprint'] == made.settings['weights_fingerprint']
  logits, _ = found.client.model.apply(found.variables, data.others[0])
  said = found.settings['training']
  assert said['accuracy_reached'] == pytest.approx(100 * np.mean(np.argmax(logits, 1) == data.others[1]))
  assert machinery.called({**said, 'accuracy_reached': 85.0, 'accuracy': 80.0}, 10) == (
    'trained network, 85.0 % accurate with net.pt'
  )


@pytest.mark.parametrize(
  ('count', 'expected', 'least', 'most'),
  [
    (1, 'undecided', -math.inf, math.inf),
    (2, 'undecided', -math.inf, math.inf),
    (3, 'agrees', 14.95, 15.05),  # the ends of both intervals: three equal differences show no spread
    (6, 'agrees', 15, 15),
  ],
)
def test_fewer_than_three_trials_decide_nothing(count, expected, least, most):
  cells = [Cell('', label, 'psnr', 'run', label, 20.0) for label in ('none', 'GC')]
  rows = [
    row(defense, mean + trial / 100, trial=trial)
    for defense, mean in zip(RUN.texts().values(), (20.0, 5.0), strict=True)
    for trial in range(count)
  ]
  found = [RUN.outcome(cell, rows) for cell in cells]
  assert (found[0].low is None) == (count < 3) and comparison.verdict(cells[0], found[0]) == expected
  assert comparison.difference(*zip(cells, found, strict=True)) == pytest.approx((least, most), abs=1e-3)
  if count == 3:  # of which two have the same uploads
    later = found[1]._replace(values={trial + 1: value for trial, value in found[1].values.items()})
    low, high = comparison.difference((cells[0], found[0]), (cells[1], later))
    assert low < 14.96 and high > 15.04  # the ends of both intervals


@pytest.mark.long
@pytest.mark.parametrize(('defense', 'moved'), [('fragmentation(ratio=0.4)', True), ('prune(rate=0.9)', False)])
def test_a_defense_that_compares_with_the_model_before_has_one_beside_given_weights(monkeypatch, defense, moved):
  run = dataclasses.replace(
    RUN.scaled('smoke'), training=Training(tested=50), weights='net.pt', defenses={'of': defense}
  )
  untrained = dataclasses.replace(run, training=None, weights='')
  made = untrained.scenario(untrained.load(None), 0)
  monkeypatch.setattr(machinery.torch_weights, 'load', lambda path, model, shape: made.variables)
  found = run.scenario(run.load(None), 0)
  assert (found.settings['weights_fingerprint'] != made.settings['weights_fingerprint']) == moved
  assert (found.settings.get('previous_fingerprint') == made.settings['weights_fingerprint']) == moved
  with pytest.raises(errors.UsageError, match='no images are left') if moved else contextlib.nullcontext():
    dataclasses.replace(run, training=Training()).scenario(run.load(None)._replace(others=None), 0)


def test_given_weights_keep_the_network_at_scale_mini():
  run = RUN.replaced(training=Training(tested=50), mini={**RUN.mini, 'training': Training(2)})
  mini, given = (each.scaled('mini') for each in (run, dataclasses.replace(run, weights='folder/net.pt')))
  assert (mini.model, mini.training) == ('convnet(width=8)', Training(2))
  assert (given.model, given.training, given.trials) == (RUN.model, run.training, mini.trials)
  assert dataclasses.replace(RUN, weights='folder/net.pt').scaled('mini').model == mini.model


@pytest.mark.parametrize('bias', [0.1, 0.4, 1.0])
def test_a_root_set_leans_towards_one_class(bias):
  labels = np.random.default_rng(0).integers(0, 10, 800)
  chosen = machinery.biased(labels, 50, bias)
  counts = np.bincount(labels[chosen], minlength=10)
  assert len(set(chosen)) == counts.sum() == 50 and counts[0] == round(50 * bias)
  assert np.ptp(counts[1:]) <= 1
  with pytest.raises(errors.UsageError, match='800 images hold too few of a class'):
    machinery.biased(labels, 700, bias)


def test_private_and_other_images_are_different_ones():
  run = dataclasses.replace(RUN.scaled('smoke'), public=10, bias=0.5, training=Training(1, 2, 3))
  data = run.load(None)
  images = np.concatenate([data.private.samples, data.public[0], data.others[0]])
  assert images.shape == (2 + 10 + 6, 8, 8, 1) and len(np.unique(images, axis=0)) == 18
  assert (data.public[1] == 0).sum() == 5


def test_all_images_of_a_run_are_resized():
  run = dataclasses.replace(RUN.scaled('smoke'), public=10, training=Training(1, 2, 3), image_size=5)
  data = run.load(None)
  read = (data.private.samples, data.public[0], data.others[0], data.gallery.samples)
  assert {images.shape[1:] for images in read} == {(5, 5, 1)}


def test_a_size_is_told_where_a_scale_sets_one():
  run = dataclasses.replace(RUN, mini={'image_size': 12})
  assert run.changes('mini') == ['image_size 12 instead of the published'] and not RUN.image_size
  assert not any('image_size' in text for text in RUN.changes('mini'))


def test_no_others_are_read_where_none_are_needed():
  data = RUN.scaled('smoke').load(None)
  assert data.public is None and data.others is None


@pytest.mark.long
@pytest.mark.parametrize(
  ('share', 'defense'), [('gradient', 'none'), ('delta', 'none'), ('gradient', 'topk(ratio=0.3)')]
)
def test_training_is_federated_averaging(linear, small_images, share, defense):
  """Against NumPy: softmax regression, three rounds; a dropped entry does not count in the mean."""
  images, labels = small_images
  client = dataclasses.replace(linear.client, share=share)
  scenario = linear._replace(client=client)
  training = Training(rounds=3, clients=2, samples=4, rate=0.5, defense=defense)
  found, before, reached = machinery.train(jax.random.key(1), scenario, images, labels, training)
  assert reached == {'rounds_done': 3}

  x, y = images.reshape(8, 64).astype(float), np.eye(10)[labels]
  params = jax.tree.map(lambda p: np.asarray(p, float), linear.variables['params'])
  history = []
  for _ in range(3):
    total, count = jax.tree.map(np.zeros_like, params), jax.tree.map(np.zeros_like, params)
    for part in (slice(0, 4), slice(4, 8)):
      logits = x[part] @ params['kernel'] + params['bias']
      error = np.exp(logits - logits.max(1, keepdims=True))
      error = (error / error.sum(1, keepdims=True) - y[part]) / 4
      for name, gradient in {'kernel': x[part].T @ error, 'bias': error.sum(0)}.items():
        kept = np.ones(gradient.size, bool)
        if defense != 'none':
          kept[:] = False
          kept[np.argsort(-np.abs(gradient).ravel(), kind='stable')[: math.ceil(0.3 * gradient.size)]] = True
        kept = kept.reshape(gradient.shape)
        total[name] += np.where(kept, gradient if share == 'gradient' else -0.1 * gradient, 0)
        count[name] += kept
    direction = -0.5 if share == 'gradient' else 1.0
    params = {name: params[name] + direction * total[name] / np.maximum(count[name], 1) for name in params}
    history.append(params)
  for expected, trained in ((history[2], found), (history[1], before)):
    for name, value in expected.items():
      np.testing.assert_allclose(trained['params'][name], value, atol=2e-6)


@pytest.mark.slow
def test_the_model_before_is_the_scenarios_previous_one():
  run = dataclasses.replace(RUN.scaled('smoke'), training=Training(2, 2, 4))
  data = run.load(None)
  made = run.scenario(data, 0)
  once = dataclasses.replace(run, training=Training(1, 2, 4)).scenario(data, 0)
  untrained = dataclasses.replace(run, training=None).scenario(data, 0)
  for name, (a, b) in {
    'previous': (made.previous, once.variables),
    'start': (once.previous, untrained.variables),
  }.items():
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
      np.testing.assert_array_equal(x, y, err_msg=name)
  moved = jax.tree.map(lambda a, b: bool(jnp.any(a != b)), made.variables['params'], made.previous['params'])
  assert all(jax.tree.leaves(moved)) and untrained.previous is None
  assert made.settings['training']['rounds'] == 2


def test_an_outcome_is_the_mean_over_its_rows():
  texts = RUN.texts()
  values = [10.0, 14.0, 12.0]
  rows = [row('none', value, value > 11, trial=trial, control_psnr=8.5) for trial, value in enumerate(values)]
  rows += [row('none', None, trial=3), row(texts['GC'], 3.0, trial=0), row('none', 99.0, trial=0, adaptive='masked')]
  found = RUN.outcome(CELLS[0], rows)
  half = stats.t.ppf(0.975, 2) * np.std(values, ddof=1) / math.sqrt(3)
  assert found[:3] == pytest.approx((12, 12 - half, 12 + half))
  assert found[3:8] == (4, 2, 1, '2 of 4, 1 diverged', 8.5)
  assert (found.failed, found.values) == (False, {0: 10.0, 1: 14.0, 2: 12.0})
  lost = Outcome(3.0, None, None, 1, 0, 0, '0 of 1', failed=True, values={0: 3.0})
  assert RUN.outcome(CELLS[2], rows) == lost
  assert RUN.outcome(CELLS[0]._replace(adaptive='masked'), rows).mean == 99
  with pytest.raises(errors.UsageError, match="no row of the run run is about 'none', adaptive attack muted"):
    RUN.outcome(CELLS[0]._replace(adaptive='muted'), rows)


def test_the_best_attacker_who_knows_a_defense_is_chosen_for_each_upload():
  given = [
    (0, None, 99, 'exact'), (0, 'a', 20, 'above chance'), (0, 'b', 12, 'recognisable'), (1, 'a', 7, 'above chance'),
    (1, 'b', 9, 'above chance'), (2, 'b', None, 'diverged'), (2, 'a', 5, 'nothing seen'),
  ]  # fmt: skip
  rows = [row('none', psnr, verdict == 'recognisable', adaptive=adaptive, trial=trial, verdict=verdict)
          for trial, adaptive, psnr, verdict in given]  # fmt: skip
  cell = CELLS[0]._replace(adaptive=BEST)
  assert [found['psnr'] for found in RUN.rows_of(cell, rows)] == [12, 9, 5]
  assert RUN.outcome(cell, rows).remark == '1 of 3; by b (2), a (1)'
  stored = RUN.stored(rows, [cell])
  assert RUN.outcome(cell, stored) == RUN.outcome(cell, rows) and len(stored) == 3
  with pytest.raises(errors.UsageError, match="no row of the run run is about 'none', adaptive attack best"):
    RUN.outcome(cell, [found for found in rows if found['adaptive'] is None])


OUTCOMES = (
  Outcome(19.5, 18.25, 20.75, 4, 3, 0, '3 of 4'),
  Outcome(None, None, None, 4, 3, 0, '3 of 4'),
  Outcome(8.0, None, None, 1, 0, 0, '0 of 1'),
  Outcome(None, None, None, 4, 0, 4, '0 of 4, 4 diverged'),
)


def test_the_table_sets_ours_beside_the_papers():
  assert table.sections(EXPERIMENT, OUTCOMES) == {
    'CIFAR-10': [
      ['', 'PSNR dB', 'paper', 'LPIPS', 'paper', 'recovered'],
      ['none', '19.50 ± 1.25', '20.41 ± 3.15', 'n/a', '0.500', '3 of 4'],
      ['GC', '8.00', '24.20 and 20.12', '', '', '0 of 1'],
    ],
    'other': [['', 'MSE (unclipped)', 'paper', 'recovered'], ['GC', 'diverged', '–', '0 of 4, 4 diverged']],
  }


def test_markdown_says_how_it_was_run():
  text = table.markdown(EXPERIMENT, 'mini', 3, OUTCOMES)
  for said in (
    '# Table 1: toys\n', 'A, B: C. 2024.', '| none | 19.50 ± 1.25 | 20.41 ± 3.15 *agrees* | 3 of 4 |',
    'Not measured here: LPIPS.',
    '## other', 'They disagree.\n', 'All in all.', '- Scale mini, seed 3.', '- A choice.',
    '- run: model convnet(width=8) instead of convnet(width=64); trials 4 instead of 100',
  ):  # fmt: skip
    assert said in text
  tables = [line for line in text.splitlines() if line.startswith('|')]
  assert [line.count('|') for line in tables] == [5, 5, 5, 5, 4, 4, 4]
  claim, _, *shown = table.terminal(EXPERIMENT, 'mini', 3, OUTCOMES).splitlines()
  assert claim == EXPERIMENT.shows
  assert shown[0] == 'CIFAR-10' and len({len(line.partition('paper')[0]) for line in shown[1:2]}) == 1
  assert ' '.join(shown[3].split()) == 'none 19.50 ± 1.25 20.41 ± 3.15 agrees n/a 0.500 3 of 4'


def test_csv_reads_back():
  lines = list(csv.DictReader(io.StringIO(table.table_csv(EXPERIMENT, 'mini', OUTCOMES))))
  assert [line['row'] for line in lines] == ['none', 'none', 'GC', 'GC']
  first, _, third, last = lines
  assert (float(first['mean']), float(first['low']), float(first['paper'])) == (19.5, 18.25, 20.41)
  assert (first['scale'], first['run'], first['defense'], first['adaptive']) == ('mini', 'run', 'none', '')
  assert third['paper'] == '24.2;20.12' and third['low'] == '' and third['defense'] == 'prune(rate=0.8)'
  assert (last['mean'], last['paper'], last['diverged']) == ('', '', '4')


class Wider(Run):
  """A run whose rows have a column more."""

  more = 'more.json'

  def of_trials(self, data, seed):
    del data, seed
    return lambda defense: lambda trial: {'length': len(defense.stages), 'number': trial}


def test_columns_of_defenses_that_are_added_to_a_folder_are_computed(monkeypatch, tmp_path):
  monkeypatch.setattr(Wider, 'write', lambda *_: None)

  def execute(**defenses):
    rows = [{'defense': text, 'trial': 0} for text in defenses.values()]
    result = types.SimpleNamespace(rows=rows, resumed=False)
    monkeypatch.setattr(Wider, 'audit', lambda *_, **__: result)
    return Wider('digits', 'mlp', 'csdlg', defenses, trials=1).execute(None, 0, workdir=str(tmp_path))

  assert [row['length'] for row in execute(bare='none')] == [0]
  assert [row['length'] for row in execute(bare='none', noise='topk(ratio=0.1)')] == [0, 1]


def test_columns_that_take_long_say_how_far_they_are(monkeypatch, capsys):
  monkeypatch.setattr(progress, 'WAIT', 0.0)
  run = Wider('digits', 'mlp', 'csdlg', {'bare': 'none', 'noise': 'topk(ratio=0.1)'}, trials=3)
  assert [row['number'] for row in run.columns(None, 0, 'lines')['none']] == [0, 1, 2]
  first, second, *rest = capsys.readouterr().err.splitlines()
  assert first == 'computing more.json: 1 of 3 uploads under none'
  assert second.startswith('computing more.json: 2 of 3 uploads under none, ') and len(rest) == 2


def test_uploads_that_no_memory_holds_are_computed_in_parts():
  """A thousand uploads of ResNet-18 under sixteen defenses are 0.7 TB."""
  resnet18 = {'params': {'kernel': np.broadcast_to(np.float32(0), (11_173_962,))}}
  large = experiments.get('ffl_6').runs['resnet']
  parts = large.shards(resnet18)
  whole = 11_173_962 * 4 * (len(large.defenses) + 1) * large.trials
  assert machinery.ROOM / 2 < machinery.COPIES * whole / parts <= machinery.ROOM and parts > 100
  assert large.scaled('mini').shards({'params': {'kernel': np.zeros(176_000, np.float32)}}) == 1
  assert dataclasses.replace(large, trials=5).shards({'params': {'kernel': resnet18['params']['kernel'][:1]}}) == 1
  assert dataclasses.replace(large, trials=3).replaced(rounds=10_000).shards(resnet18) == 3  # no more than trials


@pytest.mark.parametrize('given', [{}, {'knowledge': 'both', 'adaptive_attacks': ('muted',), 'share': 'delta'}])
def test_the_audit_is_given_the_run(monkeypatch, given):
  run = RUN.scaled('smoke').replaced(**given)
  monkeypatch.setattr(gl, 'audit', lambda *positional, **named: (positional, named))
  (_, scenario, defenses, attacks, trials), named = run.audit(run.load(None), 0, workdir='there')
  assert (scenario.settings['dataset'], scenario.settings['share']) == ('digits', given.get('share', 'gradient'))
  assert (defenses, attacks) == ([gl.parse('none'), gl.parse('prune(rate=0.8)')], [gl.parse('csdlg(tv=1e-4,steps=3)')])
  assert trials == 2 and (named['workdir'], named['shards']) == ('there', 1)
  audited = {name: value for name, value in given.items() if name != 'share'}
  assert named['settings'] == dataclasses.replace(machinery.NON_ADAPTIVE, controls=2, **audited)
