"""Partial reconstructions against loops, on gradients and deltas of real networks."""

import contextlib
import functools
import math
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradleak as gl
from gradleak import Client, Knowledge, Observation, models
from gradleak.attacks import decoded
from gradleak.attacks.dense import entry, first_dense_input, first_dense_layer, in_pixels
from gradleak.attacks.fidel import (
  combined,
  fidel,
  from_update,
  image_layer,
  partial_reconstructions,
  surest_first,
  up_to_scale,
)
from gradleak.core import errors, trees
from gradleak.data import tables
from gradleak.metrics import revealed
from gradleak.modalities import IMAGES, table

pytestmark = pytest.mark.usefixtures('fast_compilation')


@pytest.fixture(scope='module')
def dense():
  model = models.create('mlp', 10, init='default')
  return model, jax.jit(model.init, static_argnums=1)(jax.random.key(4), (8, 8, 1))


fully_revealed = jax.jit(revealed.fully_revealed, static_argnames='signed')


@functools.cache
def compiled(client):
  return jax.jit(functools.partial(client.local_update, None))


def send(network, images, labels, **settings):
  return compiled(Client(network[0], 10, **settings))(network[1], images, labels).update


def parts(network, update, **settings):
  return from_update(network[0].layers((8, 8, 1)), update, **settings)


@pytest.mark.parametrize('share', ['gradient', pytest.param('delta', marks=pytest.mark.slow)])
def test_one_sample_is_every_living_neurons_input(dense, small_images, share):
  images, labels = small_images
  update = send(dense, images[:1], labels[:1], share=share)
  found = parts(dense, update)
  kernel, bias = dense[1]['params']['Dense_0']['kernel'], dense[1]['params']['Dense_0']['bias']
  active = np.asarray(images[0].reshape(64) @ np.asarray(kernel, np.float64) + bias > 0)
  assert 0 < active.sum() < 128
  assert not np.any(np.asarray(found.alive) & ~active)
  assert np.asarray(found.alive).sum() >= 0.9 * active.sum()  # layers behind it can take a neuron's gradient, too
  assert not np.any(np.asarray(found.inputs)[~np.asarray(found.alive)])
  # A delta is rounded to the parameters' last digit: 0.1 % of a small share.
  shares = np.abs(update['Dense_0']['bias'])
  strong = np.asarray(found.alive) & (shares > shares.max() / 10)
  expected = np.broadcast_to(images[0].reshape(1, 64), (strong.sum(), 64))
  np.testing.assert_allclose(np.asarray(found.inputs)[strong], expected, atol=1e-5 if share == 'gradient' else 5e-3)


@pytest.mark.long
def test_a_batch_gives_mixtures_weighted_by_the_shares(dense, small_images):
  images, labels = small_images
  found = parts(dense, send(dense, images, labels))
  rows, shares = np.zeros((128, 64)), np.zeros(128)
  for image, label in zip(images, labels, strict=True):  # one by one: a neuron's gradient is the sum of theirs
    one = send(dense, image[None], label[None])['Dense_0']['bias']
    for j in range(128):
      rows[j] += np.float64(one[j]) * image.reshape(64)
      shares[j] += np.float64(one[j])
  clear = np.abs(shares) > 1e-3 * np.abs(shares).max()
  np.testing.assert_allclose(np.asarray(found.inputs)[clear], rows[clear] / shares[clear, None], rtol=1e-3, atol=2e-3)


def test_several_batches_and_epochs_still_reveal_and_only_what_is_there(dense, small_images):
  images, labels = small_images
  update = send(dense, images, labels, share='delta', epochs=3, batch_size=4, optimizer=optax.sgd(0.01))
  found = parts(dense, update)
  assert int(fully_revealed(found.inputs, images).count) >= 1
  assert int(fully_revealed(found.inputs, images[:, ::-1]).count) == 0


def test_without_the_bias_gradient_scale_and_sign_are_lost_and_nothing_else(dense, small_images):
  images, labels = small_images
  update = send(dense, images, labels)
  known, scaled = parts(dense, update), parts(dense, update, bias=False)
  np.testing.assert_array_equal(known.alive, scaled.alive)
  rows = np.asarray(scaled.inputs)[np.asarray(scaled.alive)]
  np.testing.assert_allclose(np.abs(rows).max(axis=1), 1, rtol=1e-6)
  assert rows.min() < -0.99
  np.testing.assert_allclose(
    fully_revealed(scaled.inputs, images, signed=False).correlation,
    np.maximum(*(fully_revealed(x * known.inputs, images).correlation for x in (1, -1))),
    atol=1e-5,
  )


@pytest.mark.slow
def test_of_a_convolutional_network_it_reveals_the_features(small_images):
  images, labels = small_images
  model = models.create('lenet', 10)
  network = model, jax.jit(model.init, static_argnums=1)(jax.random.key(0), (8, 8, 1))
  found = parts(network, send(network, images[:1], labels[:1]))
  features = jax.jit(model.features)(network[1], images[:1])
  np.testing.assert_allclose(found.inputs, np.broadcast_to(features, found.inputs.shape), atol=1e-5)


def test_all_neurons_together_withstand_noise_and_omission(dense, small_images):
  images, labels = small_images
  gradient = send(dense, images[:1], labels[:1])['Dense_0']
  kernel, bias = (np.asarray(gradient[name]) for name in ('kernel', 'bias'))
  together = jax.jit(combined)
  rng = np.random.default_rng(0)
  sent = rng.uniform(size=kernel.shape) < 0.3
  sent[5] = False
  noisy = kernel + rng.normal(scale=0.05 * np.abs(kernel).max(), size=kernel.shape).astype(np.float32)
  for observed, mask in ((kernel, None), (noisy, None), (np.where(sent, noisy, 0).astype(np.float32), sent)):
    expected = np.zeros(64)
    for i in range(64):
      used = [j for j in range(128) if mask is None or mask[i, j]]
      if used:
        products = sum(float(observed[i, j]) * float(bias[j]) for j in used)
        expected[i] = products / sum(float(bias[j]) ** 2 for j in used)
    found = np.asarray(together(observed, bias, mask))
    np.testing.assert_allclose(found, expected, atol=1e-4)
    one = first_dense_input(observed, bias)
    truth = np.delete(images[0].reshape(64), 5)
    if observed is kernel:
      np.testing.assert_allclose(found, images[0].reshape(64), atol=1e-5)
    else:
      assert np.mean((np.delete(found, 5) - truth) ** 2) < 0.5 * np.mean((np.delete(one, 5) - truth) ** 2)


@pytest.mark.parametrize('scale', [0.0, 1e-42, 1e-30, 1e30])
def test_finite_in_finite_out(scale):
  rng = np.random.default_rng(1)
  kernel, bias = (rng.normal(size=shape).astype(np.float32) for shape in ((6, 5), (5,)))
  bias[2] = 0
  bias[3] = 1e-38
  quotients, scaled, together = all_readings((kernel * np.float32(scale))[None], (bias * np.float32(scale))[None])
  for found in (quotients, scaled):
    assert np.isfinite(found.inputs).all() and not np.any(np.asarray(found.inputs)[~np.asarray(found.alive)])
  assert np.isfinite(together).all() and not quotients.alive[0, 2]


@jax.jit
@jax.vmap
def all_readings(kernel, bias):
  return partial_reconstructions(kernel, bias), up_to_scale(kernel), combined(kernel, bias)


def test_what_is_surest_lies_in_the_range_of_its_modality():
  rows = table(tables.infer({name: [0.0, 1.0, 2.0, 9.0] for name in 'abc'}))
  inputs, shares = np.float32([[-3, 0, 1], [1.5, -0.8, 0], [0.2, 0.5, 0.1]]), np.float32([3, -2, 1])
  for kind, order in ((IMAGES, [2, 1, 0]), (rows, [1, 2, 0])):
    np.testing.assert_array_equal(surest_first(inputs, shares, np.ones(3, bool), kind), order)


def test_a_model_without_a_dense_layer_is_a_usage_error():
  update = {'conv': {'kernel': np.zeros((12, 25)), 'bias': np.zeros(12)}}
  with pytest.raises(errors.UsageError, match='no dense layer'):
    from_update([trees.Layer('conv', (('conv', 'kernel'), ('conv', 'bias')))], update)


class Net(nn.Module):
  """A dense network on images."""

  before: Callable = lambda net, x: x
  activation: Callable = nn.sigmoid

  @nn.compact
  def __call__(self, x):
    return nn.Dense(4)(self.activation(nn.Dense(6)(self.before(self, x).reshape(len(x), -1))))


def inside(net, x):
  mean, std = (np.float32(values).reshape(1, 1, 1, 3) for values in ([0.5, 0.4, 0.3], [0.2, 0.3, 0.1]))
  return (x - mean) / std


NORMALISED = {
  'ours': lambda: models.create('mlp(widths=6)+normalised(pixels=cifar10)', 4, init='default'),
  'flax': lambda: models.from_flax(Net(), mean=[0.5, 0.4, 0.3], std=[0.2, 0.3, 0.1]),
  'held by the network': lambda: models.from_flax(Net(inside)),
  'in part declared': lambda: models.from_flax(Net(lambda net, x: 2 * x - 1), mean=[0.1] * 3, std=[0.5] * 3),
}


def plain_network(name):
  return models.create('mlp(widths=6)', 4, init='default') if name == 'ours' else models.from_flax(Net())


@pytest.mark.long
@pytest.mark.parametrize('name', NORMALISED)
def test_the_gradient_of_normalised_pixels_is_made_that_of_the_pixels(name):
  model = NORMALISED[name]()
  client, images, labels = Client(model, 4), jax.random.uniform(jax.random.key(0), (3, 4, 5, 3)), jax.numpy.arange(3)
  variables = model.init(jax.random.key(1), (4, 5, 3))
  variables = {**variables, 'params': jax.tree.map(lambda x: x + 0.1, variables['params'])}  # with biases
  update = jax.jit(client.local_update)(None, variables, images, labels).update
  seen = Observation(variables, update, jax.nn.one_hot(labels, 4), Knowledge(), images.shape, 4)
  changed, plain = in_pixels(model, seen), Client(plain_network(name), 4)
  assert plain.model.normalisation is None
  logits, _ = plain.model.apply(changed.variables, images, False, None)
  np.testing.assert_allclose(logits, model.apply(variables, images, False, None)[0], rtol=1e-4, atol=1e-5)
  theirs = jax.jit(plain.local_update)(None, changed.variables, images, labels).update
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-5), changed.update, theirs)
  assert in_pixels(plain.model, changed) is changed


@pytest.mark.long
@pytest.mark.parametrize(
  'before',
  [
    lambda net, x: x * x,
    lambda net, x: x * net.param('scale', nn.initializers.normal(1.0), (1, 1, 1, 3)),
    lambda net, x: x.transpose(0, 2, 1, 3),
  ],
  ids=['squares', 'a parameter', 'another order'],
)
def test_what_is_no_normalisation_is_taken_for_none(before):
  model = models.from_flax(Net(before))
  paths = first_dense_layer(model.layers((4, 4, 3)), model.init(jax.random.key(0), (4, 4, 3))['params'])
  assert entry(model, (4, 4, 3), *paths).normalised is None


@pytest.mark.long
@pytest.mark.parametrize(
  ('before', 'refused'),
  [
    (lambda net, x: nn.BatchNorm(use_running_average=True)(x), True),
    (lambda net, x: x * net.param('scale', nn.initializers.normal(1.0), (1, 1, 1, 3)), True),
    (lambda net, x: x + net.param('shift', nn.initializers.zeros, (1, 1, 1, 3)), True),
    (lambda net, x: x * x, False),
    (inside, False),
  ],
  ids=['a norm', 'a scale', 'a shift', 'squares', 'a normalisation'],
)
def test_what_parameters_or_statistics_make_of_a_sample_is_no_sample(before, refused):
  model = models.from_flax(Net(before, nn.relu))
  variables = model.init(jax.random.key(0), (4, 4, 3))
  seen = Observation(variables, variables['params'], None, Knowledge(), (1, 4, 4, 3), 4)
  with pytest.raises(errors.UsageError, match='by parameters or statistics') if refused else contextlib.nullcontext():
    image_layer(model, seen)


@pytest.mark.long
def test_a_normalisation_is_recognised_in_half_precision():
  half = {'dtype': 'bfloat16', 'param_dtype': 'bfloat16'}

  class Half(nn.Module):
    @nn.compact
    def __call__(self, x):
      x = nn.Dense(64, **half)((2 * x - 1).reshape(len(x), -1))
      return nn.Dense(4, **half)(nn.relu(x)).astype(np.float32)

  found = entry(models.from_flax(Half()), (4, 4, 1), ('Dense_0', 'kernel'), ('Dense_0', 'bias'))
  np.testing.assert_allclose(found.normalised[0], 0.5, atol=0.03)


@pytest.mark.long
@pytest.mark.parametrize('widths', ['2', '2-2'])
def test_a_network_that_is_silent_on_a_probe_is_asked_again(widths):
  model = models.create(f'mlp(widths={widths})', 10, init='default')
  assert entry(model, (4, 6, 4), ('Dense_0', 'kernel'), ('Dense_0', 'bias')) == (True, None, True)


@pytest.mark.long
@pytest.mark.parametrize(
  'seen',
  [
    lambda x: x - x.mean(axis=(1, 2, 3), keepdims=True),
    lambda x: x - jnp.roll(x, 1, axis=1),
    nn.LayerNorm(use_scale=False, use_bias=False, reduction_axes=(1, 2, 3)).bind({}),
  ],
)
def test_a_network_that_sees_no_even_grey_compares_values_with_each_other(seen):
  class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
      return nn.Dense(4)(nn.relu(nn.Dense(32)(seen(x).reshape(len(x), -1))))

  model = models.from_flax(Net())
  assert not entry(model, (6, 6, 1), ('Dense_0', 'kernel'), ('Dense_0', 'bias')).in_order


@pytest.mark.long
@pytest.mark.parametrize('declared', [True, False])
def test_each_value_is_compared_with_its_own_scale(declared):
  """A rare level of a table is divided by a hundredth of what others are."""
  std = np.float32([0.3, 0.3, 0.001])
  within = Net(activation=nn.relu) if declared else Net(lambda net, x: x / std.reshape(1, 1, 1, 3), nn.relu)
  model = models.from_flax(within, **({'mean': [0.0] * 3, 'std': std} if declared else {}))
  paths = first_dense_layer(model.layers((4, 4, 3)), model.init(jax.random.key(0), (4, 4, 3))['params'])
  found = entry(model, (4, 4, 3), *paths)
  assert found.in_order
  np.testing.assert_allclose(found.normalised[1], np.tile(std, 16), rtol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize('before', [inside, lambda net, x: 2 * x - 1])
def test_a_network_that_normalises_inside_shows_its_pixels(before):
  images = jax.random.uniform(jax.random.key(0), (1, 4, 4, 3))
  scenario = gl.scenario(models.from_flax(Net(before)), images, np.zeros(1, int), key=jax.random.key(1))
  found = gl.audit(jax.random.key(2), scenario, [None], [gl.attacks.fidel()], 1, controls=2, progress='none')
  assert found.rows[0]['psnr'] > 60 and found.rows[0]['verdict'] == 'exact'


def test_a_layer_behind_convolutions_does_not_take_pixels():
  model = models.create('lenet+normalised(pixels=mnist)', 4)
  variables = model.init(jax.random.key(0), (8, 8, 1))
  given = model, Observation(variables, variables['params'], None, Knowledge(), (1, 8, 8, 1), 4)
  assert in_pixels(*given) is given[1]


class Normed(nn.Module):
  """A dense layer, with a norm behind it."""

  norm: nn.Module
  bias: bool = True

  @nn.compact
  def __call__(self, x):
    x = self.norm(nn.Dense(16, use_bias=self.bias)(x.reshape(len(x), -1)))
    x = nn.Dense(16)(nn.relu(x))
    return nn.Dense(4)(nn.relu(x))


NORMS = {
  'resnet_mlp': lambda: models.create('resnet_mlp(width=16,depth=1)', 4, init='default'),
  'layer': lambda: models.from_flax(Normed(nn.LayerNorm())),
  'scale alone': lambda: models.from_flax(Normed(nn.RMSNorm())),
  'batch': lambda: models.from_flax(Normed(nn.BatchNorm(use_running_average=True)), mean=[0.5], std=[0.2]),
}


def seen_by(model, batch_norm='train'):
  """Returns (the client, its observation, the image) of one image of as many pixels as the network has features."""
  client, image = Client(model, 4, batch_norm=batch_norm), jax.random.uniform(jax.random.key(0), (1, 4, 4, 1))
  variables = jax.jit(model.init, static_argnums=1)(jax.random.key(1), (4, 4, 1))
  update = jax.jit(client.local_update)(None, variables, image, jax.numpy.asarray([1])).update
  return client, Observation(variables, update, np.zeros((1, 4)), Knowledge(labels='unused'), image.shape, 4), image


@pytest.mark.long
@pytest.mark.parametrize('name', NORMS)
def test_a_norm_behind_the_first_dense_layer_does_not_hide_it(name):
  """The layer that follows takes as many features as the image has pixels: nothing but the rows would tell."""
  client, seen, image = seen_by(NORMS[name](), 'eval' if name in ('resnet_mlp', 'batch') else 'train')
  made = fidel()(client)
  found = jax.jit(made.reconstruct)(made.init(jax.random.key(0), seen), seen).samples
  np.testing.assert_allclose(found[0], image[0], atol=1e-5)


@pytest.mark.long
def test_a_matrix_of_the_whole_network_that_is_used_last_hides_nothing():
  class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
      x = nn.relu(nn.Dense(16)(x.reshape(len(x), -1)))
      return x @ self.param('out', nn.initializers.normal(), (16, 4))

  client, seen, image = seen_by(models.from_flax(Net()))
  found = fidel()(client).reconstruct(jax.random.key_data(jax.random.key(0)), seen).samples
  np.testing.assert_allclose(found[0], image[0], atol=1e-5)


@pytest.mark.long
def test_a_layer_without_a_bias_is_not_passed_over_in_silence():
  client, seen, _ = seen_by(models.from_flax(Normed(nn.RMSNorm(), bias=False)))
  layers = client.model.layers((4, 4, 1))
  assert first_dense_layer(layers, seen.update) == (('Dense_1', 'kernel'), ('Dense_1', 'bias'))
  with pytest.raises(errors.UsageError, match="'Dense_0' before the first dense layer with a bias"):
    fidel()(client).reconstruct(jax.random.key_data(jax.random.key(0)), seen)


@pytest.mark.parametrize(
  ('shape', 'bias', 'maps'),
  [
    ((8, 8, 1), True, (4, 4, 8)),
    ((8, 8, 1), False, (4, 4, 8)),
    ((8, 18, 1), True, (4, 9, 8)),
    ((8, 8, 1), True, (1, 1, 8)),
  ],
)
def test_maps_are_those_of_the_last_convolution_before_a_dense_layer_with_a_norm(shape, bias, maps):
  class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
      x = nn.relu(nn.Conv(8, (3, 3), strides=2, use_bias=bias)(nn.relu(nn.Conv(2, (3, 3))(x))))
      x = x.mean(axis=(1, 2)) if maps[0] == 1 else x
      x = nn.LayerNorm()(nn.Dense(64)(x.reshape(len(x), -1)))
      return nn.Dense(4)(nn.relu(x))

  model = models.from_flax(Net())
  inputs = np.arange(2 * math.prod(maps), dtype=np.float32).reshape(2, -1)
  found = decoded._maps(model, model.init(jax.random.key(0), shape), shape, inputs)
  np.testing.assert_array_equal(found, inputs.reshape(2, *maps))
