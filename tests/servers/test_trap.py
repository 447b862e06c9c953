"""Trap weights against their definitions in NumPy, and what neurons that one image activates give away."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from scipy import stats

import gradleak
from gradleak import Knowledge, Observation, models
from gradleak.core import errors
from gradleak.modalities import of_config
from gradleak.servers.trap import SIGNED, passage, recover, soliton, trap, trap_weights

pytestmark = pytest.mark.usefixtures('fast_compilation')


class Dense(nn.Module):
  """One hidden layer of 150 neurons."""

  activation: str = 'relu'

  @nn.compact
  def __call__(self, images):
    x = nn.Dense(150)(images.reshape(images.shape[0], -1))
    return nn.Dense(10)(models.layers.activation(self.activation)(x))


class Convolutional(nn.Module):
  """Two convolutions of Flax, pooled or not, in front of a hidden layer."""

  padding: str
  pool: bool
  features: int = 8
  norm: bool = False
  stride: int = 1

  @nn.compact
  def __call__(self, images):
    x = nn.relu(nn.Conv(2, (3, 3), padding=self.padding)(images))
    x = nn.relu(nn.Conv(self.features, (3, 3), self.stride, padding=self.padding)(x))
    if self.norm:
      x = nn.LayerNorm()(x)
    if self.pool:
      x = nn.max_pool(x, (2, 2), (2, 2))
    return nn.Dense(10)(nn.relu(nn.Dense(20)(x.reshape(x.shape[0], -1))))


@pytest.fixture(scope='module')
def faces():
  from skimage.data import lfw_subset

  return np.asarray(lfw_subset()[:8, :12, :12, None], np.float32)


def scenario(module, images, labels=None, **settings):
  model = module if isinstance(module, models.Model) else models.from_flax(module)
  labels = np.arange(len(images), dtype=np.int32) % 10 if labels is None else labels
  variables = jax.jit(model.init, static_argnums=1)(jax.random.key(0), images.shape[1:])
  return gradleak.scenario(model, images, labels, variables=variables, **settings)


def observe(sent, count):
  upload = jax.jit(sent.client.local_update)(None, sent.variables, sent.samples[:count], sent.targets[:count])
  shape = (count, *sent.samples.shape[1:])
  return Observation(sent.variables, upload.update, jnp.zeros((count, 10)), Knowledge(), shape, 10)


@pytest.mark.long
@pytest.mark.parametrize('variant', ['qbi', pytest.param('independent', marks=pytest.mark.slow)])
def test_who_activates_a_neuron_alone_comes_back(digits, prepared, variant):
  honest = scenario(Dense(), digits[0][:8], digits[1][:8], public=(digits[0][100:], digits[1][100:]))
  method = trap(variant=variant, **({'scale': 0.97} if variant in SIGNED else {}))
  sent = prepared(method, honest, 8, seed=1)
  observation = observe(sent, 8)
  layer = sent.variables['params']['Dense_0']
  active = sent.samples.reshape(8, 64) @ np.asarray(layer['kernel'], np.float64) + np.asarray(layer['bias']) > 0
  alone = active[:, active.sum(axis=0) == 1].sum(axis=1)
  found = np.asarray(jax.jit(method(sent.client).reconstruct)(jnp.float32(0), observation).samples)
  distance = np.sqrt(((found[:, None] - sent.samples[None]) ** 2).mean(axis=(2, 3, 4)))
  assert np.sum(alone >= 2) >= 3
  assert np.all(distance.min(axis=0)[alone >= 2] < 1e-3)
  # The surest are the batch's images, each once.
  sure = int(np.sum(alone >= 2))
  assert np.all(distance[:sure].min(axis=1) < 1e-3)
  assert len(set(distance[:sure].argmin(axis=1).tolist())) == sure


@pytest.mark.long
@pytest.mark.parametrize('held', [True, False])
def test_rows_that_activate_a_neuron_alone_come_back(prepared, held):
  data = gradleak.data.load('breast_cancer', 'test', limit=108)
  public = (data.samples[8:], data.targets[8:]) if held else None
  of_rows = {'key': jax.random.key(0), 'public': public, 'modality': of_config(data.settings)}
  model = models.mlp(2, 'default', widths=(200, 8))
  honest = gradleak.scenario(model, data.samples[:8], data.targets[:8], **of_rows)
  method = trap(variant='qbi')
  sent = prepared(method, honest, 8, seed=1)
  layer = sent.variables['params']['Dense_0']
  active = sent.samples @ np.asarray(layer['kernel'], np.float64) + np.asarray(layer['bias']) > 0
  alone = active[:, active.sum(axis=0) == 1].sum(axis=1)
  found = np.asarray(jax.jit(method(sent.client).reconstruct)(jnp.float32(0), observe(sent, 8)).samples)
  near = np.abs(found[:, None] - sent.samples).max(axis=2) < 0.01
  assert np.sum(alone >= 2) >= 4
  assert np.all(near.any(axis=0)[alone >= 2])


def test_agreement_then_what_is_known_then_contrast_decide():
  rng = np.random.default_rng(0)
  images = rng.uniform(size=(4, 30))
  # Neurons: a, a, a+b (in the box), b, c+d, dead, 2a−b (out of the box).
  members = [(0, 1.0, 0, 0.0), (0, 1.0, 0, 0.0), (0, 0.6, 1, 0.4), (1, 1.0, 0, 0.0), (2, 0.5, 3, 0.5), (0, 0, 0, 0)]
  members.append((0, 2.0, 1, -1.0))
  quotients = np.stack([w * images[i] + v * images[j] for i, w, j, v in members])
  shares = np.array([0.1, -2.0, 5.0, 0.3, 0.2, 0.0, 1.0])
  update = (shares[:, None] * quotients).T.astype(np.float32), shares.astype(np.float32)
  kernel = np.zeros((30, 7))
  for neuron, own in enumerate([[0], [0], [0, 1], [1], [2, 3], [0], [0, 1]]):
    targets = np.where(np.isin(np.arange(4), own), 1.0, -1.0)
    kernel[:, neuron] = np.linalg.lstsq(images, targets, rcond=None)[0]
  sent = kernel.astype(np.float32), np.zeros(7, np.float32)
  inputs, support = jax.jit(recover, static_argnums=2)(update, sent, 5)
  np.testing.assert_array_equal(support, [2, 1, 1, 1, 0])
  expected = [images[0], images[1], quotients[4], quotients[2], np.zeros(30)]
  np.testing.assert_allclose(inputs, expected, atol=1e-5)


@pytest.mark.long
def test_many_updates_at_once_and_nothing_at_all():
  rng = np.random.default_rng(1)
  updates = rng.uniform(size=(3, 6, 9)).astype(np.float32), rng.normal(size=(3, 9)).astype(np.float32)
  updates = tuple(x * np.float32([1, 0, np.nan]).reshape(3, *[1] * (x.ndim - 1)) for x in updates)
  sent = rng.normal(size=(6, 9)).astype(np.float32), np.zeros(9, np.float32)
  read = functools.partial(recover, sent=sent, count=4)
  inputs, support = jax.jit(jax.vmap(lambda update: read(update)))(updates)
  one = jax.jit(read)(tuple(x[0] for x in updates))
  np.testing.assert_allclose(inputs[0], one[0], rtol=1e-5)
  np.testing.assert_array_equal(support[0], one[1])
  assert not np.any(inputs[1:]) and not np.any(support[1:])


def weights(variant, *, neurons=400, batch_size=8, auxiliary=None, inputs=None, **settings):
  used = np.ones(60, bool) if inputs is None else inputs
  kernel, bias = trap_weights(
    jax.random.key(2), used, neurons, batch_size, variant=variant, auxiliary=auxiliary, **settings
  )
  assert kernel.dtype == bias.dtype == np.float32
  return kernel.astype(np.float64), bias


def test_mirrored_weights_are_balanced_and_independent_ones_are_not():
  kernel, bias = weights('mirrored', scale=0.9, stddev=2.0)
  for column in kernel.T:
    np.testing.assert_allclose(np.sort(column[column > 0]), np.sort(-0.9 * column[column < 0]), rtol=1e-5)
  free, silent = weights('independent', scale=0.9, stddev=2.0)
  drawn = np.where(free > 0, free / 0.9, free).ravel()
  assert stats.kstest(drawn, stats.norm(scale=2).cdf).pvalue > 1e-3
  for wrong in (2 / 3, 3 / 2):
    assert stats.kstest(drawn, stats.norm(scale=2 * wrong).cdf).pvalue < 1e-6
  assert len(set((free > 0).sum(axis=0).tolist())) > 5  # mirrored ones have as many of either sign
  assert not np.any(bias) and not np.any(silent)


def test_every_other_neuron_is_mirrored():
  kernel, bias = weights('both', scale=0.9, neurons=41)
  matched = []
  for column in kernel.T:
    positive, negative = np.sort(column[column > 0]), np.sort(-0.9 * column[column < 0])
    matched.append(len(positive) == len(negative) and np.allclose(positive, negative, rtol=1e-5))
  np.testing.assert_array_equal(matched, np.arange(41) % 2 == 0)
  np.testing.assert_array_equal(kernel[:, 1::2], weights('independent', scale=0.9, neurons=41)[0][:, 1::2])
  assert not np.any(bias)


@pytest.mark.slow
def test_both_signs_in_one_attack_reveal_nearly_what_the_better_sign_does(prepared):
  images, labels = gradleak.data.load('faces', limit=48)[2:4]
  honest = scenario(models.create('mlp', 10), images, labels)
  revealed = {}
  for variant in ('mirrored', 'independent', 'both'):
    method, counts = trap(variant=variant), []
    read = jax.jit(method(honest.client).reconstruct)
    for batch in range(6):
      sent = prepared(method, honest._replace(samples=images[8 * batch :], targets=labels[8 * batch :]), 8, seed=batch)
      found = np.asarray(read(jnp.float32(0), observe(sent, 8)).samples).reshape(8, -1)
      found = found[found.std(axis=1) > 0]
      alike = np.corrcoef(np.concatenate([sent.samples[:8].reshape(8, -1), found]))[:8, 8:]
      counts.append(np.sum(alike.max(axis=1) >= 0.98))
    revealed[variant] = np.mean(counts)
  print(revealed)
  alone = revealed['mirrored'], revealed['independent']
  assert revealed['both'] >= min(alone) and revealed['both'] >= max(alone) - 1


def test_biases_stand_at_quantiles():
  rng = np.random.default_rng(0)
  auxiliary = rng.uniform(size=(8, 60))
  # As many auxiliary images as the batch: exactly one of them, or d of them, activates each neuron.
  kernel, bias = weights('qbi', auxiliary=auxiliary)
  np.testing.assert_array_equal(np.sum(auxiliary @ kernel + bias > 0, axis=0), 1)
  kernel, bias = weights('soliton_data', auxiliary=auxiliary, neurons=4000)
  degrees = np.sum(auxiliary @ kernel + bias > 0, axis=0)
  # The quantile of all eight is the least of them: rounding decides whether it activates the neuron.
  observed, expected = np.bincount(np.minimum(degrees, 7), minlength=8)[1:], 4000 * soliton(8)
  expected = np.append(expected[:6], expected[6:].sum())
  assert stats.chisquare(observed, expected).pvalue > 1e-3
  assert stats.chisquare(observed, np.full(7, 4000 / 7)).pvalue < 1e-6
  for variant in ('qbi', 'soliton_free'):
    kernel, bias = weights(variant, batch_size=1000, inputs=np.arange(60) < 50)
    assert not np.any(kernel[50:])
    tail = stats.norm.sf((-bias - kernel.sum(axis=0) / 2) / np.sqrt(np.sum(kernel**2, axis=0) / 12))
    degrees = 1000 * tail
    np.testing.assert_allclose(degrees, np.round(degrees), atol=0.05)
    assert np.all(np.round(degrees) == 1) == (variant == 'qbi')


def test_the_soliton_is_lubys():
  count, c, delta = 100, 0.05, 0.4
  spread = c * np.log(count / delta) * np.sqrt(count)
  pivot = round(count / spread)
  mass = []
  for d in range(1, count + 1):
    ideal = 1 / count if d == 1 else 1 / (d * (d - 1))
    robust = spread / (d * count) if d < pivot else spread * np.log(spread / delta) / count if d == pivot else 0
    mass.append(ideal + robust)
  np.testing.assert_allclose(soliton(count), np.array(mass) / sum(mass))
  for small in range(1, 6):
    assert np.isclose(soliton(small).sum(), 1) and soliton(small).min() >= 0


@pytest.mark.slow
@pytest.mark.parametrize(('padding', 'exact'), [('SAME', 0), ('VALID', 2)])
def test_identity_kernels_pass_the_image_on(faces, prepared, padding, exact):
  honest = scenario(Convolutional(padding, pool=False), faces)
  sent = prepared(trap(), honest, 8)  # it compares the passage with what the model does
  way = passage(sent.client.model.layers((12, 12, 1)), sent.variables['params'], (12, 12, 1))
  back = np.asarray(jax.jit(way.decode)(way.encode(faces)))
  inside = slice(exact, 12 - exact)
  np.testing.assert_array_equal(back[:, inside, inside], faces[:, inside, inside])
  np.testing.assert_array_equal(back[:, :exact], np.repeat(back[:, exact : exact + 1], exact, axis=1))


@pytest.mark.long
@pytest.mark.parametrize(
  'network',
  [
    Convolutional('VALID', pool=True),
    *(pytest.param(network, marks=pytest.mark.slow) for network in (Convolutional('SAME', pool=True), 'cnn')),
  ],
)
def test_max_pooling_leaves_bounds(faces, prepared, network):
  network = models.create('cnn', 10) if network == 'cnn' else network
  sent = prepared(trap(), scenario(network, faces), 8)
  way = passage(sent.client.model.layers((12, 12, 1)), sent.variables['params'], (12, 12, 1))
  back = np.asarray(jax.jit(way.decode)(way.encode(faces)))
  middle = slice(3, 9)
  expected = np.zeros_like(faces)
  for y in range(3, 9):
    for x in range(3, 9):
      blocks = [faces[:, i : i + 2, j : j + 2].reshape(len(faces), -1) for i in (y - 1, y) for j in (x - 1, x)]
      high = np.min([block.max(axis=1) for block in blocks], axis=0)
      low = np.max([block.min(axis=1) for block in blocks], axis=0)
      expected[:, y, x, 0] = (high + low) / 2
  np.testing.assert_allclose(back[:, middle, middle], expected[:, middle, middle], atol=1e-6)
  assert np.mean((back - faces)[:, middle, middle] ** 2) < 0.003


@pytest.mark.slow
@pytest.mark.parametrize('network', ['cnn', Convolutional('SAME', pool=False)])
def test_an_image_alone_passes_the_convolutions(faces, prepared, network):
  honest = scenario(models.create(network, 10) if network == 'cnn' else network, faces)
  sent = prepared(trap(), honest, 1, seed=3)
  found = jax.jit(trap()(sent.client).reconstruct)(jnp.float32(0), observe(sent, 1)).samples
  np.testing.assert_allclose(found[0], faces[0], atol=1e-3 if network != 'cnn' else 0.2)


@pytest.mark.long
@pytest.mark.parametrize(
  ('network', 'message'),
  [
    ('lenet(activation=relu)', 'the first dense layer is the classifier'),
    pytest.param('mlp(activation=sigmoid)', 'ReLU', marks=pytest.mark.slow),
    (Convolutional('SAME', pool=False, norm=True), 'no norm'),
    pytest.param(Convolutional('SAME', pool=False, stride=2), 'a stride', marks=pytest.mark.slow),
    (Convolutional('SAME', pool=True, features=7), 'need 8 channels'),
  ],
)
def test_models_that_cannot_be_trapped_say_why(faces, prepared, network, message):
  network = models.create(network, 10) if isinstance(network, str) else network
  with pytest.raises(errors.UsageError, match=message):
    prepared(trap(), scenario(network, faces), 8)


@pytest.mark.parametrize('which', ['frozen', 'private'])
def test_layers_that_are_not_sent_cannot_be_trapped(faces, prepared, which):
  with pytest.raises(errors.UsageError, match=r'trap sets Dense_0/.* frozen or private'):
    prepared(trap(), scenario(models.create('mlp(widths=16)', 10), faces, **{which: 'Dense_0'}), 8)


@pytest.mark.slow
def test_a_normalised_image_is_no_image(faces, prepared):
  model = models.from_flax(Dense(), mean=(0.5,), std=(0.2,))
  with pytest.raises(errors.UsageError, match='normalisation'):
    prepared(trap(), scenario(model, faces), 8)


@pytest.mark.long
def test_auxiliary_images_are_asked_for(faces, prepared):
  with pytest.raises(errors.UsageError, match='public'):
    prepared(trap(variant='soliton_data'), scenario(Dense(), faces), 8)


@pytest.mark.long
def test_weights_in_half_precision_pass_images_up_to_rounding(faces, prepared):
  made = scenario(models.create('mlp(widths=16)', 10), faces)
  half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), made.variables)
  with jax.numpy_dtype_promotion('standard'):  # of pixels and weights
    assert prepared(trap(), made._replace(variables=half), 8)


@pytest.mark.long
@pytest.mark.parametrize('pool', [False, True])
def test_images_beyond_those_that_were_found_are_black(faces, pool):
  """Behind a pooling, an input of zeros decodes to grey, which would be an answer."""
  honest = scenario(Convolutional('SAME', pool), faces[:2])
  nothing = jax.tree.map(jnp.zeros_like, honest.variables['params'])
  seen = Observation(honest.variables, nothing, jnp.zeros((2, 10)), Knowledge(), (2, *faces.shape[1:]), 10)
  found = trap()(honest.client).reconstruct(jnp.float32(0), seen)
  assert found.samples.shape == (2, 12, 12, 1) and not np.any(found.samples)
