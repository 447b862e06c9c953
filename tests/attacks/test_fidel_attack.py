"""Fidel as an attack: one image per neuron, without the bias gradient, and combined under noise and gaps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradleak as gl
from gradleak import Knowledge, Observation, UsageError, metrics
from gradleak.adaptive import adaptive_attacks

pytestmark = pytest.mark.usefixtures('fast_compilation')
MODEL = gl.models.create('mlp(widths=64)', 10)


@pytest.fixture(scope='module')
def sent(small_images):
  """(update, images) of eight digits, and of the first alone."""
  variables = MODEL.init(jax.random.key(4), (8, 8, 1))
  client = gl.Client(MODEL, 10)
  return {
    n: (client.local_update(None, variables, *(part[:n] for part in small_images)).update, small_images[0][:n])
    for n in (1, 8)
  }


@functools.cache
def attack(**settings):
  return gl.attacks.fidel(**settings)(gl.Client(MODEL, 10))


def read(update, images, **settings):
  made = attack(**settings)
  observation = Observation({}, update, jnp.zeros((len(images), 10)), Knowledge(), images.shape, 10)
  return np.asarray(made.reconstruct(made.init(jax.random.key(0), observation), observation).samples)


def revealed(found, images, signed=True):
  return metrics.evaluate(found, images, np.zeros(0, int), np.zeros(len(images), int), signed=signed)['revealed']


def noisy(update, stddev):
  rng = np.random.default_rng(0)
  return jax.tree.map(lambda x: x + np.float32(stddev) * rng.normal(size=x.shape).astype(np.float32), update)


@pytest.mark.slow
def test_every_neuron_is_returned_and_shows_more_than_the_surest(sent):
  update, images = sent[8]
  every, surest = read(update, images), read(update, images, candidates=1)
  assert every.shape == (64, 8, 8, 1) and surest.shape == (8, 8, 8, 1)
  np.testing.assert_array_equal(every[:8], surest)
  assert revealed(every, images) > revealed(surest, images)


@pytest.mark.long
def test_without_the_bias_gradient_the_sign_is_that_of_an_image(sent):
  """Scale is lost; the sign of a single image is positive. Images are counted by the absolute correlation."""
  update, images = sent[1]
  found = read(update, images, bias=False)
  assert found[0].min() >= -1e-6 and found[0].max() == pytest.approx(1)
  assert revealed(found[:1], images) == 1
  assert found.min() >= -1e-6  # of every neuron, and not of the surest alone
  assert attack().signed and not attack(bias=False).signed
  assert revealed(-found[:1], images) == 0 and revealed(-found[:1], images, signed=False) == 1


@pytest.mark.slow
def test_the_audit_counts_as_the_attack_says(small_images):
  negative = gl.attacks.wrap(
    lambda client: gl.attacks.closed_form(lambda seen: (-jnp.asarray(small_images[0][:2]), None)), 'negative'
  )
  unsigned = gl.attacks.wrap(lambda client: negative(client)._replace(signed=False), 'unsigned')
  scenario = gl.scenario(MODEL, *(part[:2] for part in small_images), key=jax.random.key(0))
  found = gl.audit(
    jax.random.key(1), scenario, [None], [negative, unsigned], 1, batch_size=2, controls=1, progress='none'
  )
  assert [row['revealed'] for row in found.rows] == [0, 2]


@pytest.mark.long
def test_a_single_sample_is_combined_from_all_neurons(sent):
  update, images = sent[1]
  (exact,) = read(update, images, combine=True)
  np.testing.assert_allclose(exact, images[0], atol=1e-5)
  disturbed = noisy(update, 1e-3)
  best = max(float(metrics.psnr(one[None], images)[0]) for one in read(disturbed, images))
  (together,) = read(disturbed, images, combine=True)
  assert float(metrics.psnr(together[None], images)[0]) > best


def test_of_a_batch_neurons_that_hold_the_same_image_are_combined(sent):
  update, images = sent[8]
  found = read(update, images, combine=True)
  assert found.shape == (64, 8, 8, 1) and np.isfinite(found).all()
  few = noisy(update, 1e-4)
  assert revealed(read(few, images, combine=True), images) >= revealed(read(few, images), images)


def test_what_was_dropped_is_left_out_of_the_combination(sent):
  """Each pixel comes from the neurons that sent it: half of the entries are missing, and none of the pixels."""
  update, images = sent[1]
  rng = np.random.default_rng(1)
  kernel = np.asarray(update['Dense_0']['kernel'])
  gaps = {**update, 'Dense_0': {**update['Dense_0'], 'kernel': np.where(rng.random(kernel.shape) < 0.5, kernel, 0)}}
  (together,) = read(gaps, images, combine=True)
  np.testing.assert_allclose(together, images[0], atol=1e-5)
  assert max(float(metrics.psnr(one[None], images)[0]) for one in read(gaps, images)) < 30


def test_neurons_that_are_known_up_to_scale_are_not_combined(digits):
  with pytest.raises(UsageError, match='combine weighs neurons by the bias gradient'):
    gl.attacks.fidel(bias=False, combine=True)(None)
  images, labels = (each[:4] for each in digits)
  scenario = gl.scenario(gl.models.create('mlp(widths=16)', 10), images, labels, key=jax.random.key(0))
  defense = gl.defenses.bind(gl.defenses.prune(rate=0.5), scenario.context)
  offered = {
    bias: [one.name for one in adaptive_attacks(defense, scenario.context, 1, gl.attacks.fidel(bias=bias))]
    for bias in (True, False)
  }
  assert offered == {True: ['combined'], False: []}
