"""OUTPOST's figure 5: what is drawn, isolated and said."""

import dataclasses

import jax
import numpy as np
import pytest

import experiments
import gradleak as gl
from experiments import experiment as machinery
from experiments import fishing
from gradleak import errors
from tests import programs

FIGURE = experiments.get('outpost_figure_5')
RUN = FIGURE.runs['fishing']


def test_every_picture_of_the_paper_is_there():
  rows = {(one.strategy, one.row) for one in RUN.conditions.values()}
  for strategy in ('class fishing', 'feature fishing'):
    for row in ('untrained, eval', 'untrained, train', 'trained, eval', 'trained, train'):
      assert (strategy, row) in rows
    assert {(strategy, f'trained, eval, {name}') for name in ('unmodified', 'GC', 'DP', 'OUTPOST')} <= rows
  assert len(FIGURE.cells) == 4 * len(RUN.conditions) == 4 * len(rows)
  assert (RUN.batch, RUN.target, RUN.steps, RUN.dataset) == (128, 1, 24_000, 'cifar10')


def test_a_batch_holds_as_many_of_the_class_as_the_strategy_is_for():
  labels = np.arange(40) % 10
  for strategy, (count, *_) in fishing.STRATEGIES.items():
    chosen = fishing.drawn(np.random.default_rng(0), labels, 1, fishing.Condition(strategy), 12)
    assert len(set(chosen.tolist())) == 12
    assert (labels[chosen] == 1).tolist() == [True] * count + [False] * (12 - count)


@pytest.mark.usefixtures('fast_compilation')
def test_a_changed_layer_isolates_and_an_unchanged_one_does_not(small_images):
  images, labels = small_images
  model = gl.models.create('mlp', 10, init='default')
  honest = jax.jit(model.init, static_argnums=1)(jax.random.key(0), (8, 8, 1))
  order = np.r_[1, 0, np.arange(2, 8)]  # the sample of class 1 in front
  batch = images[order], labels[order]

  def cosine(**settings):
    condition = fishing.Condition('class fishing', **settings)
    found = fishing.caught(condition, model, honest, batch, 1, None, jax.random.key(0))
    return found, fishing.isolation(model, found, images[1:2], 1)

  found, alone = cosine()
  assert found.alone and found.queries == 1 and alone > 0.9999
  assert fishing.isolation(model, found, images[2:3], 1) < 0.99  # another image is not what was isolated
  found, mixed = cosine(modified=False)
  assert not found.alone and mixed < 0.9
  assert 0.5 < cosine(defense='GC')[1] < alone


def test_weights_take_the_place_of_training():
  run = machinery.with_weights(FIGURE, 'folder/net.pt').runs['fishing']
  assert run.weights == 'folder/net.pt'
  said = run.changes('mini')
  assert 'the trained model is net.pt, not trained here' in said and not any(s.startswith('training') for s in said)
  assert any(s.startswith('training') for s in RUN.changes('mini'))
  with pytest.raises(errors.UsageError, match='fidel_13 attacks no model whose weights'):
    machinery.with_weights(experiments.get('fidel_13'), 'net.pt')
  with pytest.raises(errors.UsageError, match='fishing needs two private images of class 1'):
    dataclasses.replace(RUN.at_smoke(), pool=3).load(None)


@pytest.mark.slow
def test_the_figure_is_drawn_and_read_back(tmp_path):
  workdir = tmp_path / 'new'
  (first, lines), (again, _) = (programs.reproduce(FIGURE, workdir, progress='lines') for _ in range(2))
  assert again.out == first.out and 'cosines' in first.err and not again.err
  assert [(line['row'], line['metric']) for line in lines] == [(cell.row, cell.metric) for cell in FIGURE.cells]
  assert all(float(line['mean']) >= 0.999 for line in lines if line['metric'] == 'cosine' and line['row'][-4:] == 'eval'
             and line['column'] == 'class fishing')  # fmt: skip
  for name in (RUN.page, 'images.png'):
    assert (workdir / 'fishing' / name).read_bytes().startswith(b'\x89PNG')
  refused = programs.start('reproduce', '--experiment=fidel_5', '--weights=net.pt')
  assert refused.status == 2 and 'fidel_5 attacks no model whose weights could be given' in refused.err


def test_a_short_training_lowers_the_loss(small_images):
  images, labels = small_images
  model = gl.models.create('mlp', 10, init='default')
  before = jax.jit(model.init, static_argnums=1)(jax.random.key(0), (8, 8, 1))
  after = fishing.fitted(model, before, images, labels, 60, 0)

  def right(variables):
    return np.mean(np.argmax(model.apply(variables, images, False, None)[0], axis=1) == labels)

  assert right(after) > 0.9 > 0.5 > right(before)
