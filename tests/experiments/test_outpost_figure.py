"""OUTPOST's figure 5: what is drawn, isolated and stated."""

import dataclasses
import types

import jax
import numpy as np
import pytest

import experiments
import gradleak as gl
from experiments import experiment as machinery
from experiments import fishing
from gradleak.core import errors
from tests import programs

FIGURE = experiments.get('outpost_figure_5')
TRAINED = FIGURE.runs['class_fishing_trained_eval']
RUN = TRAINED.scaled('smoke')


def test_every_picture_of_the_paper_is_there():
  rows = {(cell.column, cell.row) for cell in FIGURE.cells}
  for strategy in ('class fishing', 'feature fishing'):
    for row in ('untrained, eval', 'untrained, train', 'trained, eval', 'trained, train'):
      assert (strategy, row) in rows
    assert {(strategy, f'trained, eval, {name}') for name in ('unmodified', 'GC', 'DP', 'OUTPOST')} <= rows
  assert len(FIGURE.cells) == 5 * len(rows) == 125
  for cell in FIGURE.cells:
    run = FIGURE.runs[cell.run]
    assert run.method().settings['target'] == 1 and run.method().settings['steps'] == 24_000
    assert (run.settings.batch_size, run.dataset, run.count) == (128, 'cifar10', 1 if 'class' in cell.column else 2)
    assert bool(run.trained) == cell.row.startswith('trained') == (run.method().settings['tv'] == 0.05)
    assert f', {run.client.batch_norm}' in cell.row and run.modified == ('unmodified' not in cell.row)
    assert (run.method().server is None) == ('unmodified' in cell.row)
    assert run.method().settings.get('method') == (
      None if run.count == 1 else 'difference' if 'ours' in cell.column else 'published'
    )


@pytest.mark.parametrize('count', [1, 2])
def test_a_batch_holds_as_many_of_the_class_as_are_asked_for(count):
  labels = np.arange(40) % 10
  chosen = fishing.drawn(np.random.default_rng(0), labels, 1, count, 12)
  assert len(set(chosen.tolist())) == 12
  assert (labels[chosen] == 1).tolist() == [True] * count + [False] * (12 - count)


@pytest.mark.slow
def test_each_trial_has_a_batch_of_its_own():
  data = RUN.load(None)
  made = RUN.scenario(data, 0)
  batches = made.targets.reshape(2, 6)
  assert (batches[:, 0] == 1).all() and (batches[:, 1:] != 1).all()
  first, second = made.samples.reshape(2, 6, 8, 8, 1)
  assert not any(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
  assert not np.array_equal(RUN.scenario(data, 1).samples, made.samples)
  untrained = dataclasses.replace(RUN, trained=0).scenario(data._replace(others=None), 0)
  moved = jax.tree.map(lambda a, b: bool((a != b).any()), made.variables, untrained.variables)
  assert all(jax.tree.leaves(moved)) and made.public[0].shape == (40, 8, 8, 1)


@pytest.mark.long
@pytest.mark.usefixtures('fast_compilation')
def test_a_changed_layer_isolates_and_an_unchanged_one_does_not(small_images):
  images, labels = small_images
  order = np.r_[1, 0, np.arange(2, 8)]  # the sample of class 1 in front
  model = gl.models.create('mlp', 10, init='default')
  scenario = gl.scenario(model, images[order], labels[order], key=jax.random.key(0))
  attack = gl.servers.class_fishing(target=1)

  def cosine(attack=attack, defense=None):
    found = fishing.caught(attack, scenario, defense, jax.random.key(0))
    return found, fishing.isolation(scenario.client, found, images[1:2], 1)

  found, alone = cosine()
  assert found.alone and found.queries == 1 and alone > 0.9999
  assert fishing.isolation(scenario.client, found, images[2:3], 1) < 0.99  # another image is not what was isolated
  found, mixed = cosine(dataclasses.replace(attack, server=None))
  assert not found.alone and mixed < 0.9
  assert 0.5 < cosine(defense=gl.defenses.prune(rate=0.8))[1] < alone


@pytest.mark.usefixtures('fast_compilation')
def test_every_query_draws_noise_of_its_own(small_images, monkeypatch):
  images, _ = small_images
  model, keys, sender = gl.models.create('mlp', 10, init='default'), [], fishing.sender

  def recorded(*given):
    def send(key, *rest):
      keys.append(tuple(jax.random.key_data(key).tolist()))
      return sender(*given)(key, *rest)

    return send

  monkeypatch.setattr(fishing, 'sender', recorded)
  scenario = gl.scenario(model, images, [1, 1, 0, 2, 3, 4, 5, 6], key=jax.random.key(0))
  found = fishing.caught(gl.servers.feature_fishing(target=1), scenario, None, jax.random.key(0))
  assert len(set(keys)) == len(keys) == found.queries > 1


def test_weights_take_the_place_of_training():
  run = machinery.with_weights(FIGURE, 'folder/net.pt').runs['class_fishing_trained_eval']
  assert run.weights == 'folder/net.pt'
  said = run.changes('mini')
  assert 'the trained model is net.pt, not trained here' in said and not any(s.startswith('train') for s in said)
  assert {'trained 10000 instead of 50000', 'training_steps 500 instead of 8000'} <= set(TRAINED.changes('mini'))
  untrained = machinery.with_weights(FIGURE, 'net.pt').runs['class_fishing_untrained_eval']
  assert not any('net.pt' in s for s in untrained.changes('mini'))
  with pytest.raises(errors.UsageError, match='fidel_13 attacks no model whose weights'):
    machinery.with_weights(experiments.get('fidel_13'), 'net.pt')
  with pytest.raises(errors.UsageError, match='fishing needs two private images of class 1'):
    dataclasses.replace(RUN, pool=3).load(None)


@pytest.mark.slow
@pytest.mark.usefixtures('fast_compilation')
def test_the_rows_say_what_was_isolated(tmp_path, monkeypatch):
  run = dataclasses.replace(RUN, defenses={'none': 'none', 'DP': 'laplace(scale=0.223607)'})
  data, attack = run.load(None), str(run.method())
  scenario = run.scenario(data, 0)
  truth = scenario.samples.reshape(2, 6, 8, 8, 1)
  found = np.full_like(truth, np.nan)
  found[:, 3] = 0.5  # the one reconstruction is matched to image 3
  rows = [
    {'attack': attack, 'defense': text, 'trial': trial, 'psnr': None if trial else 6.0, 'success': False}
    for text in run.texts().values()
    for trial in range(2)
  ]
  result = types.SimpleNamespace(
    rows=rows, truth=truth, resumed=False, reconstructions={(attack, text): found for text in run.texts().values()}
  )
  drawn = []
  monkeypatch.setattr(gl, 'audit', lambda *positional, **named: result)
  monkeypatch.setattr(machinery.report, 'write', lambda *given: None)
  monkeypatch.setattr(fishing, 'sheet', lambda panels: drawn.extend(panels) or b'picture')
  told = run.execute(data, 0, workdir=str(tmp_path), progress='none')
  for row, before in zip(told, rows, strict=True):
    assert before.items() <= row.items()
    assert row['queries'] == 1 and row['alone'] == (row['cosine'] > 0.999) == (row['defense'] == 'none')
  second = scenario._replace(samples=scenario.samples[6:], targets=scenario.targets[6:])
  key = jax.random.fold_in(jax.random.key(0), 1)
  caught = fishing.caught(run.method(), second, gl.defenses.laplace(scale=0.223607), key)
  assert told[-1]['cosine'] == fishing.isolation(scenario.client, caught, second.samples[:1], 1)

  (panel,) = drawn
  assert (tmp_path / 'isolated.png').read_bytes() == b'picture'
  assert panel.captions == ['private', 'none\n6.0 dB', 'DP\n6.0 dB']
  np.testing.assert_array_equal(panel.samples, [truth[0, 0], found[0, 3], found[0, 3]])
  monkeypatch.setattr(fishing, 'caught', None)  # what was isolated is read back
  assert run.execute(data, 0, workdir=str(tmp_path), progress='none') == told


@pytest.mark.slow
@pytest.mark.usefixtures('fast_compilation')
def test_the_figure_is_drawn_and_read_back(tmp_path):
  workdir = tmp_path / 'new'
  (first, lines), (again, _) = (programs.reproduce(FIGURE, workdir, progress='lines') for _ in range(2))
  assert again.out == first.out and 'class_fishing' in first.err
  assert again.err == f'reading the data of {FIGURE.name} …\n'
  assert [(line['row'], line['metric']) for line in lines] == [(cell.row, cell.metric) for cell in FIGURE.cells]
  assert all(float(line['mean']) >= 0.999 for line in lines if line['metric'] == 'cosine' and line['row'][-4:] == 'eval'
             and line['column'] == 'class fishing')  # fmt: skip
  refused = programs.start('reproduce', '--experiment=fidel_5', '--weights=net.pt')
  assert refused.status == 2 and 'fidel_5 attacks no model whose weights could be given' in refused.err


def test_a_short_training_lowers_the_loss(small_images):
  images, labels = small_images
  model = gl.models.create('mlp', 10, init='default')
  before = jax.jit(model.init, static_argnums=1)(jax.random.key(0), (8, 8, 1))
  after = fishing.fitted(model, before, images, labels, 0, 60)

  def right(variables):
    return np.mean(np.argmax(model.apply(variables, images, False, None)[0], axis=1) == labels)

  assert right(after) > 0.9 > 0.5 > right(before)
