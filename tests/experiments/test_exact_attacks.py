"""The measurements of exact attacks: what is disturbed, counted and said, and that a second call measures nothing."""

import dataclasses

import jax
import numpy as np
import pytest

import experiments
from experiments import claims, comparison, peeling, separation, spear, table
from experiments.study import SCALES
from gradleak import Client, models
from gradleak.attacks.peeling import Peeled
from gradleak.attacks.spear import Separated

NAMES = [one.name for module in (separation, peeling, spear) for one in module.EXPERIMENTS]


@pytest.fixture(scope='module')
def digits():
  from sklearn.datasets import load_digits

  data = load_digits()
  return (data.images[:6, :, :, None] / 16).astype(np.float32), data.target[:6]


def naive(params, images, truth):
  """The gradient of the mean cross-entropy, one sample after the other."""
  (first, bias), (last, end) = params
  sums = [[np.zeros_like(first), np.zeros_like(bias)], [np.zeros_like(last), np.zeros_like(end)]]
  for image, label in zip(np.float64(images.reshape(len(images), -1)), truth, strict=True):
    z = image @ first + bias
    logits = np.maximum(z, 0) @ last + end
    back = np.exp(logits) / np.exp(logits).sum() - np.eye(len(end))[label]
    below = (last @ back) * (z > 0)
    for total, (kernel, b) in zip(
      sums, ((np.outer(image, below), below), (np.outer(np.maximum(z, 0), back), back)), strict=True
    ):
      total[0] += kernel / len(images)
      total[1] += b / len(images)
  return sums


@pytest.mark.long
@pytest.mark.usefixtures('fast_compilation')
def test_a_gradient_is_disturbed_as_its_condition_says(digits):
  images, truth = digits
  params = peeling.weights(np.random.default_rng(0), 64, 20, 10)
  params[0] = params[0][0] / 4, params[0][1]
  expected = naive(params, images, truth)

  def sent(seed=1, **settings):
    condition = peeling.Condition(6, 'float64', 1e-4)._replace(**settings)
    return peeling.disturbed(condition, np.random.default_rng(seed), params, images, truth)

  for layer, reference in zip(sent(), expected, strict=True):
    for found, wanted in zip(layer, reference, strict=True):
      np.testing.assert_allclose(found, wanted, atol=1e-14)
  assert 1e-10 < np.abs(sent(dtype='float32')[0][0] - expected[0][0]).max() < 1e-6
  median = np.median(np.abs(expected[0][0])[expected[0][0] != 0])
  added = (sent(noise=0.5)[0][0] - expected[0][0]) / median
  assert 0.45 < added.std() < 0.55 and abs(added.mean()) < 0.05
  pruned = sent(pruned=0.8)[0][0]
  kept = pruned != 0
  assert 0.18 < kept.mean() < 0.21 and np.allclose(pruned[kept], expected[0][0][kept], atol=1e-14)
  halves = [naive(params, images[:3], truth[:3])]
  after = [tuple(x - 0.5 * d for x, d in zip(*pair, strict=True)) for pair in zip(params, halves[0], strict=True)]
  halves.append(naive(after, images[3:], truth[3:]))
  np.testing.assert_allclose(sent(rate=0.5)[0][0], (halves[0][0][0] + halves[1][0][0]) / 2, atol=1e-13)
  assert not jax.config.jax_enable_x64


def test_only_what_is_exact_and_labelled_counts(digits):
  images, truth = digits
  flat = np.float64(images.reshape(6, 64))
  found = np.stack([flat[0], flat[1], flat[2] + 0.01, flat[3], flat[0]])
  peeled = Peeled(found, np.array([0, 1, 2, 9, 0]), np.zeros(5), np.zeros((5, 1), bool), 0.0)
  assert peeling.judged(peeled, images, truth) == (2, 3, pytest.approx(40))  # one twice, one at 40 dB, one mislabelled
  none = peeled._replace(images=np.zeros((0, 64)), labels=np.zeros(0, int))
  assert peeling.judged(none, images, truth)[:2] == (0, 0)


def test_a_batch_is_peeled_to_its_images(digits):
  images, truth = digits[0][:2], digits[1][:2].astype(np.int32)
  client = Client(models.create('mlp(widths=64)', 10, init='default'), 10)
  variables = client.model.init(jax.random.key(0), (8, 8, 1))
  update = client.local_update(None, variables, images, truth).update
  found = separation.METHODS['peeling'](separation.Sent(client, variables, update, truth, (8, 8, 1)), None, 0)
  assert len(found) and min(np.abs(found[0] - image.ravel()).max() for image in images) < 1e-3


def test_differences_are_paired():
  assert separation.gained([5, 6, 8], [3, 4, 5]) == '+2.3 (+0.9 to +3.8)'
  assert separation.gained([5, 6, 7], [3, 4, 5]) == '+2.0'  # three that are equal show no spread
  assert separation.gained([1, 3], [2, 2]).startswith('+0.0 (−')
  assert separation.gained([3], [5]) == '−2.0'


def test_the_first_layer_is_of_three():
  rng = np.random.default_rng(0)
  inputs = rng.normal(size=(4, 8))
  gradient, shares, kernel, bias = spear.first_layer(rng, inputs, 12, 0.0)
  assert gradient.shape == kernel.shape == (8, 12) and shares.shape == bias.shape == (12,)
  inactive = inputs @ kernel + bias <= 0
  found = np.linalg.lstsq(inputs.T, gradient, rcond=None)[0]  # the shares: the gradient is inputs.T @ them
  np.testing.assert_allclose(inputs.T @ found, gradient, atol=1e-12)
  np.testing.assert_allclose(found.sum(axis=0), shares, atol=1e-12)
  assert np.abs(found[inactive]).max() < 1e-12 < np.abs(found[~inactive]).max()
  noisy = spear.first_layer(np.random.default_rng(0), inputs, 12, 0.1)
  assert np.linalg.matrix_rank(noisy[0]) > np.linalg.matrix_rank(gradient) == 4


@pytest.mark.usefixtures('fast_compilation')
@pytest.mark.parametrize(
  'name',
  ['spear_exact', *(pytest.param(name, marks=pytest.mark.slow) for name in ('peeling_cifar10', 'separation_mnist'))],
)
def test_a_run_measures_and_draws(name, tmp_path, monkeypatch):
  experiment = experiments.get(name)
  run_name = list(experiment.runs)[-1]
  run = dataclasses.replace(experiment.runs[run_name].scaled('smoke'), repeats=1)
  if name == 'spear_exact':
    monkeypatch.setattr(spear, 'spear', lambda layer, *_, **__: Separated(np.zeros((0, len(layer[0]))), 0.0, 3, 0))
  data, folder = run.load(None), str(tmp_path / 'run')
  rows = run.execute(data, 0, workdir=folder, progress='none')
  assert [row['defense'] for row in rows] == list(run.defenses)
  assert (tmp_path / 'run' / run.page).read_bytes().startswith(b'\x89PNG')
  assert (tmp_path / 'run' / 'images.png').exists() == (name != 'spear_exact')

  cells = [cell for cell in experiment.cells if cell.run == run_name]
  outcomes = [run.outcome(cell, rows) for cell in cells]
  found = table.sections(dataclasses.replace(experiment, cells=tuple(cells)), outcomes)
  assert all(len(line) == len(lines[0]) for lines in found.values() for line in lines)


@pytest.mark.parametrize(('error', 'word'), [(None, 'does not hold'), (1e-9, 'holds')])
def test_batches_that_are_never_separated_contradict_the_claim_that_they_are_exact(error, word):
  experiment = experiments.get('spear_exact')
  (run,) = experiment.runs.values()
  rows = [{'defense': label, 'size': 1, 'errors': [error] * 3, 'seconds': 1.0} for label in run.defenses]
  outcomes = [run.outcome(cell, rows) for cell in experiment.cells]
  exact = [one for one in claims.CLAIMS['spear_exact'] if one.other == '1e-6']
  assert {*claims.judged(experiment, outcomes, 'mini', exact).values()} == {word}
  cell, found = experiment.cells[0], outcomes[0]
  assert comparison.difference((cell, found), (cell, found._replace(mean=1.0))) > (0.9 if error is None else -1.1, -0.9)


def test_batches_are_smaller_at_the_smallest_scale_alone():
  for name in NAMES:
    for run in experiments.get(name).runs.values():
      assert [run.scaled(scale).held(100) for scale in SCALES] == [3, 100, 100]
