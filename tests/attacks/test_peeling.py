"""Peeling against JAX's own gradients of digits in dense networks: what it certifies is there, exactly."""

import functools
import importlib
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradleak as gl
from gradleak import Client, models
from gradleak.attacks.peeling import _sensitivity, dense_layers, implied_gradients, peel
from gradleak.core import errors, trees
from tests.attackers import gradient_of_mean, mean_loss

peeling = importlib.import_module('gradleak.attacks.peeling')  # attacks.peeling is the attack


@pytest.fixture(scope='module')
def digits():
  from sklearn.datasets import load_digits

  data = load_digits()
  order = np.random.default_rng(0).permutation(len(data.target))
  return data.data[order] / 16, data.target[order]


def dense(seed, *sizes, bias=0.0):
  """Weights as those of the published experiment: N(0, 0.5²), zero biases, Xavier behind."""
  rng = np.random.default_rng(seed)
  stds = [0.5, *(math.sqrt(2 / (i + o)) for i, o in itertools.pairwise(sizes[1:]))]
  shapes = itertools.pairwise(sizes)
  layers = [(rng.normal(0, std, shape), np.zeros(shape[1])) for std, shape in zip(stds, shapes, strict=True)]
  layers[0][1][:] = bias
  return layers


def gradient(layers, images, labels, dtype=np.float64):
  """The victim's gradient, computed in `dtype` throughout, and that dtype's weights and images."""
  with jax.enable_x64(dtype == np.float64):
    layers = [tuple(x.astype(dtype) for x in layer) for layer in layers]
    update = jax.device_get(gradient_of_mean(layers, images.astype(dtype), labels))
  assert update[0][0].dtype == dtype
  return [tuple(x.copy() for x in layer) for layer in update]


def check_certified(found, images, labels, decibels=60):
  """Every certified sample is one of the batch, none is there twice."""
  errors_of = np.mean((found.images[:, None] - images[None]) ** 2, axis=2)
  nearest = errors_of.argmin(axis=1)
  assert len(set(nearest.tolist())) == len(nearest)
  np.testing.assert_array_equal(found.labels, labels[nearest])
  assert np.all(errors_of.min(axis=1) < 10 ** (-decibels / 10))
  return nearest


@pytest.mark.parametrize('dtype, decibels', [(np.float64, 200), (np.float32, 90)])
@pytest.mark.parametrize('sizes', [(64, 256, 10), (64, 256, 32, 10)], ids=['two layers', 'three layers'])
def test_a_batch_comes_apart_completely(digits, sizes, dtype, decibels):
  images, labels = digits[0][:32], digits[1][:32]
  layers = dense(0, *sizes)
  found = peel(layers, gradient(layers, images, labels, dtype), 32)
  assert sorted(check_certified(found, images, labels, decibels)) == list(range(32))
  assert found.unexplained < 1e-5 and np.all(found.mismatch <= 1e-4)
  assert np.all(found.neurons.any(axis=1)) and not np.any(found.neurons[0] & found.neurons[1])


def test_implied_gradients_are_those_of_every_label(digits):
  layers = dense(1, 64, 20, 12, 10)
  z = digits[0][0] @ layers[0][0]
  first, second = implied_gradients(layers[1:], np.tile(z, (10, 1)), np.arange(10))
  (middle, bias), last = layers[1:]

  def of_first(z, label):
    return mean_loss([(middle, bias), last], jax.nn.relu(z).reshape(1, -1), label.reshape(1))

  def of_second(z, label):
    return mean_loss([last], jax.nn.relu(z).reshape(1, -1), label.reshape(1))

  with jax.enable_x64(True):
    every = jnp.arange(10)
    expected = jax.jit(jax.vmap(jax.grad(of_first), (None, 0)))(z, every)
    np.testing.assert_allclose(first, expected, atol=1e-12)
    expected = jax.jit(jax.vmap(jax.grad(of_second), (None, 0)))(np.maximum(z, 0) @ middle + bias, every)
    np.testing.assert_allclose(second, expected, atol=1e-12)


def test_what_the_network_is_sure_of_may_be_as_far_off_as_anything_else(digits, monkeypatch):
  """An error of the image counts alike, however much larger it makes that of an exponentially small share."""
  layers = dense(2, 64, 256, 10)
  layers[1][0][:] *= 8  # logits as those of larger images
  images = digits[0][:20]
  logits = np.maximum(images @ layers[0][0], 0) @ layers[1][0]
  sure = [np.diff(np.sort(logits, axis=1)[:, -2:])[:, 0].argmax()]
  right, wrong = logits[sure].argmax(axis=1), logits[sure].argmin(axis=1)

  def probability_of_others(scale):
    others = np.delete(np.exp(scale * (logits[sure] - logits[sure].max())), right)
    return others.sum() / (1 + others.sum())

  z = images[sure] @ layers[0][0]
  slope = np.log(probability_of_others(1 + 1e-4) / probability_of_others(1 - 1e-4)) / -2e-4
  np.testing.assert_allclose(_sensitivity(layers[1:], z, right), slope, rtol=1e-4)
  assert slope > 5 and _sensitivity(layers[1:], z, wrong) == 1

  def certified(label):
    (kernel, bias), last = gradient(layers, images[sure], label)
    return len(peel(layers, [(kernel * (1 + 3e-5), bias), last], 1).labels)

  assert certified(right) == certified(wrong) == 1
  monkeypatch.setattr(peeling, '_sensitivity', lambda rest, z, labels: np.ones(len(z)))
  assert (certified(right), certified(wrong)) == (0, 1)


@pytest.mark.usefixtures('fast_compilation')
def test_a_model_and_a_client_of_this_package(digits):
  """Default weights in float32, biases and four layers; a batch as small as its 128 neurons allow."""
  images, labels = digits[0][:6], digits[1][:6]
  model = models.create('mlp(widths=128-64)', 10, init='default')
  variables = jax.jit(model.init, static_argnums=1)(jax.random.key(0), (8, 8, 1))
  send = jax.jit(functools.partial(Client(model, 10).local_update, None))
  upload = send(variables, images.reshape(6, 8, 8, 1).astype(np.float32), labels.astype(np.int32))
  layers = model.layers((8, 8, 1))
  found = peel(*(dense_layers(layers, tree) for tree in (variables['params'], upload.update)), 6)
  assert len(check_certified(found, images, labels)) >= 3


@pytest.mark.long
def test_a_network_that_normalises_its_pixels(digits):
  images, labels = digits[0][:6].reshape(6, 8, 8, 1).astype(np.float32), digits[1][:6].astype(np.int32)
  model = models.create('mlp(widths=128-64)+normalised(pixels=mnist)', 10, init='default')
  variables = jax.jit(model.init, static_argnums=1)(jax.random.key(0), (8, 8, 1))
  update = jax.jit(Client(model, 10).local_update)(None, variables, images, labels).update
  settings = {'sample_shape': (8, 8, 1), 'num_samples': 6, 'controls': 1, 'progress': 'none'}
  found = gl.attack(jax.random.key(1), model, variables, update, attacks=[gl.attacks.peeling()], **settings)
  (one,) = found.inversions
  shown = [max(float(gl.metrics.psnr(other[None], image[None])[0]) for other in one.samples) for image in images]
  assert sum(value > 40 for value in shown) >= 3  # its pixels, not what the network makes of them


@pytest.fixture(scope='module')
def victim(digits):
  """(layers, gradient in float64, samples, targets) of a batch of eight."""
  images, labels = digits[0][:8], digits[1][:8]
  layers = dense(2, 64, 256, 10)
  return layers, gradient(layers, images, labels), images, labels


@pytest.mark.parametrize('factor', [8.0, 1e-3, 1e12])  # a sum in place of the mean, and other units
def test_the_scale_of_a_gradient_is_read_from_it(victim, factor):
  layers, observed, *_ = victim
  scaled = [tuple(factor * x for x in layer) for layer in observed]
  assert not len(peel(layers, scaled, 8).labels)
  np.testing.assert_allclose(peeling.scale(layers, scaled, 8), factor, rtol=1e-9)
  noise = [tuple(np.random.default_rng(0).normal(size=x.shape) for x in layer) for layer in observed]
  assert peeling.scale(layers, noise, 8, box=peeling.NORMALISED) == 1


@pytest.mark.slow
@pytest.mark.usefixtures('fast_compilation')
def test_a_clipped_gradient_is_peeled_by_one_who_does_not_know_the_clip(digits):
  images, labels = digits[0][:4].reshape(4, 8, 8, 1).astype(np.float32), digits[1][:4].astype(np.int32)
  model = models.create('mlp(widths=128-64)', 10, init='default')
  scenario = gl.scenario(model, images, labels, key=jax.random.key(0))
  result = gl.audit(
    jax.random.key(1),
    scenario,
    [gl.defenses.clip(norm=0.01)],
    [gl.attacks.peeling()],
    num_trials=2,
    controls=2,
    knowledge='non-adaptive',
    progress='none',
  )
  assert [row['psnr'] > 60 for row in result.rows] == [True, True]


def test_mixtures_are_not_certified(digits):
  images, labels = digits[0][:8], digits[1][:8]
  layers = dense(3, 64, 256, 10, bias=50.0)  # every neuron active on every image
  found = peel(layers, gradient(layers, images, labels), 8, tolerance=1e-2)
  assert found.images.shape == (0, 64) and found.labels.shape == (0,) and found.neurons.shape == (0, 256)
  assert found.unexplained == 1


def test_the_certificate_is_the_implied_gradient(victim):
  layers, update, _, _ = victim
  assert len(peel(layers, update, 8).labels) == 8
  assert not len(peel(layers, update, 9).labels)  # shares of another mean
  other = [layers[0], (np.roll(layers[1][0], 1, axis=1), layers[1][1])]
  assert not len(peel(other, update, 8).labels)  # other weights
  rows = [update[0], (update[1][0] * 1.01, update[1][1])]
  assert not len(peel(layers, rows, 8).labels)  # the second layer's rows speak, too
  assert not len(peel(layers, update, 8, box=(0.0, 0.4)).labels)  # no image is as dark


def test_an_image_that_is_there_twice_is_left_and_others_are_not(digits):
  images, labels = digits[0][[0, 1, 2, 3, 4, 5, 6, 6]], digits[1][[0, 1, 2, 3, 4, 5, 6, 6]]
  layers = dense(2, 64, 256, 10)
  found = peel(layers, gradient(layers, images, labels), 8)
  nearest = check_certified(found, images, labels)
  assert 6 not in nearest and 7 not in nearest and len(nearest) >= 3


@pytest.mark.parametrize('level, least', [(1e-9, 8), (1e-6, 3), (1e-2, 0)])
def test_noise_silences_it_and_never_has_it_lie(victim, level, least):
  layers, update, images, labels = victim
  rng = np.random.default_rng(0)
  scale = level * np.median(np.abs(update[0][0][update[0][0] != 0]))
  noisy = [tuple(x + rng.normal(0, scale, x.shape) for x in layer) for layer in update]
  found = peel(layers, noisy, 8)
  assert len(check_certified(found, images, labels)) >= least
  if not least:
    assert not len(found.labels)


def test_pruning_and_a_second_local_step_silence_it(victim):
  layers, update, images, labels = victim
  threshold = np.quantile(np.abs(np.concatenate([x.ravel() for layer in update for x in layer])), 0.9)
  pruned = [tuple(np.where(np.abs(x) < threshold, 0, x) for x in layer) for layer in update]
  assert not len(peel(layers, pruned, 8).labels)
  stepped = [tuple(x - 0.1 * d for x, d in zip(*pair, strict=True)) for pair in zip(layers, update, strict=True)]
  second = gradient(stepped, images, labels)
  both = [tuple((a + b) / 2 for a, b in zip(*pair, strict=True)) for pair in zip(update, second, strict=True)]
  check_certified(peel(layers, both, 8), images, labels)
  assert len(peel(layers, both, 8).labels) < 8


@pytest.mark.parametrize('bad', [0.0, np.nan])
def test_a_gradient_that_says_nothing(victim, bad):
  layers, update, _, _ = victim
  found = peel(layers, [tuple(np.full_like(x, bad) for x in layer) for layer in update], 8)
  assert not len(found.labels)


def test_a_neuron_that_is_not_finite_spoils_no_other(victim):
  layers, update, images, labels = victim
  (kernel, bias), (rows, last) = update
  spoilt = np.arange(256) == np.abs(bias).argmax()
  update = [(np.where(spoilt, np.inf, kernel), np.where(spoilt, np.nan, bias)), (rows, last)]
  assert len(check_certified(peel(layers, update, 8), images, labels)) == 8


def test_usage_errors():
  params = {'conv': {'kernel': np.zeros((12, 25)), 'bias': np.zeros(12)}, 'last': {'kernel': np.zeros((9, 2))}}
  params['last']['bias'] = np.zeros(2)
  conv, last = (trees.Layer(name, ((name, 'kernel'), (name, 'bias'))) for name in params)
  with pytest.raises(errors.UsageError, match="'conv' is none"):
    dense_layers([conv, last], params)
  with pytest.raises(errors.UsageError, match="'last' is none"):
    dense_layers([last._replace(paths=last.paths[:1])], params)
  with pytest.raises(errors.UsageError, match='1 layer'):
    dense_layers([last], params)


@pytest.mark.slow
@pytest.mark.parametrize('dtype, sizes', [(np.float64, (64, 96)), (np.float32, (64,))])
@pytest.mark.parametrize('seed', range(5))
def test_a_thousand_neurons_take_large_batches_apart(digits, seed, dtype, sizes):
  layers = dense(seed, 64, 1000, 10)
  for size in sizes:
    images, labels = digits[0][seed * 128 :][:size], digits[1][seed * 128 :][:size]
    found = peel(layers, gradient(layers, images, labels, dtype), size)
    assert len(check_certified(found, images, labels)) == size


@pytest.mark.slow
def test_taking_certified_images_again_finds_others(digits, monkeypatch):
  """Of batches that float32 hardly takes apart; of a single one rounding decides, which differs among processors."""

  def certified():
    found = 0
    for seed in range(4, 10):
      layers, at = dense(seed, 64, 1000, 10), 512 + 96 * (seed - 4)
      images, labels = digits[0][at : at + 96], digits[1][at : at + 96]
      found += len(check_certified(peel(layers, gradient(layers, images, labels, np.float32), 96), images, labels))
    return found

  again = certified()
  monkeypatch.setattr(
    peeling, '_take_again', lambda layers, observed, images, labels, mismatch, size: (images, mismatch)
  )
  once = certified()
  assert again > once, (again, once)
