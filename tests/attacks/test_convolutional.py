"""Attacks that need convolutions before a dense layer: Fidel's decoder, and matching of what stands before it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import gradleak as gl
from gradleak import Knowledge, Observation, UsageError
from gradleak.attacks.matching import prefix
from gradleak.core import trees
from gradleak.federated import optimizers, response

pytestmark = pytest.mark.usefixtures('fast_compilation')


def made(model, images, labels, **given):
  return gl.scenario(gl.models.create(model, 10), images, labels, key=jax.random.key(0), dataset='digits', **given)


@pytest.fixture(scope='module')
def convolutional(digits):
  images, labels = digits
  return made('cnn(widths=16)', images[:4], labels[:4], public=(images[8:200], labels[8:200]))


@pytest.fixture(scope='module', params=['non-adaptive', pytest.param('both', marks=pytest.mark.slow)])
def found(convolutional, request):
  settings = {'batch_size': 2, 'controls': 4, 'progress': 'none', 'knowledge': request.param}
  attack = gl.attacks.fidel_decoder(steps=100)
  return gl.audit(jax.random.key(1), convolutional, [None, gl.defenses.gaussian(stddev=100.0)], [attack], 2, **settings)


@pytest.mark.slow
def test_the_decoder_shows_images_of_a_batch_and_noise_hides_them(found):
  bare = [row for row in found.rows if row['defense'] == 'none']
  noisy = [row for row in found.rows if row['defense'] != 'none']
  assert min(row['pearson'] for row in bare) > 0.8 > 0.4 > max(row['pearson'] for row in noisy)
  assert {row['tier'] for row in found.rows} == {'D'} and {row['verdict'] for row in bare} <= {'exact', 'recognisable'}


@pytest.mark.long
def test_it_learns_once_and_from_public_data_alone(convolutional):
  attack = gl.attacks.fidel_decoder(steps=2)
  key = jax.random.key(3)
  learned = attack.prepare(key, convolutional, attack.settings, 1)
  images, labels = convolutional.public
  others = convolutional._replace(samples=1 - convolutional.samples)
  assert all(
    map(np.array_equal, jax.tree.leaves(learned), jax.tree.leaves(attack.prepare(key, others, attack.settings, 1)))
  )
  changed = attack.prepare(key, convolutional._replace(public=(images[::-1] ** 2, labels)), attack.settings, 1)
  assert not all(map(np.array_equal, jax.tree.leaves(learned), jax.tree.leaves(changed)))


@pytest.mark.long
@pytest.mark.parametrize(
  ('attack', 'model', 'message'),
  [
    (gl.attacks.fidel_decoder(), 'mlp', 'no convolution stands before the first dense layer'),
    (gl.attacks.fidel_decoder(), 'cnn', 'learns from public data'),
    (gl.attacks.prefix(), 'mlp', 'no layer stands before the first dense one'),
    (gl.attacks.fidel(), 'cnn', 'not the 64 values of a sample'),
  ],
)
def test_what_cannot_be_attacked_is_refused_before_anything_runs(digits, attack, model, message):
  images, labels = digits
  public = (images[8:16], labels[8:16]) if model == 'mlp' else None
  with pytest.raises(UsageError, match=message):
    gl.audit(jax.random.key(0), made(model, images[:2], labels[:2], public=public), [None], [attack], 1)


class Pointwise(nn.Module):
  """A dense layer at each pixel behind a convolution, as in ConvNeXt."""

  @nn.compact
  def __call__(self, x):
    x = nn.relu(nn.Dense(8)(nn.relu(nn.Conv(4, (3, 3))(x))))
    return nn.Dense(10)(x.mean((1, 2)))


@pytest.mark.long
@pytest.mark.parametrize('distance', ['prefix', 'dense_input', None])
def test_a_dense_layer_at_each_pixel_gives_no_input_away(digits, distance):
  images, labels = digits
  public = images[8:16], labels[8:16]
  scenario = gl.scenario(gl.models.from_flax(Pointwise()), images[:2], labels[:2], key=jax.random.key(0), public=public)
  attack = gl.attacks.csdlg(distance=distance, steps=1) if distance else gl.attacks.fidel_decoder()
  with pytest.raises(UsageError, match=r'Dense_0 of the model .* at several places of a sample'):
    gl.audit(jax.random.key(0), scenario, [None], [attack], 1, progress='none')


class Turned(nn.Module):
  """A convolution, and its maps in some order before they are flattened."""

  axes: tuple

  @nn.compact
  def __call__(self, x):
    x = nn.relu(nn.Conv(4, (3, 3), strides=2)(x)).transpose(0, *self.axes)
    return nn.Dense(10)(nn.relu(nn.Dense(32)(x.reshape(len(x), -1))))


@pytest.mark.long
def test_the_decoder_is_given_maps_whatever_their_order(digits, monkeypatch):
  """The same weights in three orders: rows, columns and channels, channels first, and columns first."""
  made, shapes = gl.attacks.decoder.REGISTRY['windows']((8, 8, 1), steps=1), []
  spy = made._replace(fit=lambda key, features, images: shapes.append(np.asarray(features)) or jnp.zeros(()))
  monkeypatch.setitem(gl.attacks.decoder.REGISTRY, 'windows', lambda shape, **settings: spy)
  for axes in ((1, 2, 3), (3, 1, 2), (2, 1, 3)):
    images, labels = (each[:4] for each in digits)
    model = gl.models.from_flax(Turned(axes))
    scenario = gl.scenario(model, images, labels, key=jax.random.key(0), public=(digits[0][8:12], digits[1][8:12]))
    attack = gl.attacks.fidel_decoder(steps=1)
    attack.prepare(jax.random.key(3), scenario, attack.settings, 1)
  assert shapes[0].shape == (4, 4, 4, 4)
  for other in shapes[1:]:
    np.testing.assert_allclose(other, shapes[0], atol=1e-5)


def test_settings_have_a_range():
  with pytest.raises(UsageError):
    gl.attacks.prefix(steps=0)(None)


def sent(scenario, number=1, key=0):
  images, labels = scenario.samples[:number], scenario.targets[:number]
  update = jax.jit(scenario.client.local_update)(jax.random.key(key), scenario.variables, images, labels).update
  probabilities = jnp.zeros((number, 10))
  return Observation(scenario.variables, update, probabilities, Knowledge(labels='unused'), images.shape, 10)


PRECODE = pytest.param('lenet(width=4)+precode(size=8)', marks=pytest.mark.slow)


@pytest.mark.long
@pytest.mark.parametrize('model', ['cnn(widths=16)', PRECODE])
def test_the_truth_alone_explains_what_stands_before_the_dense_layer(digits, model):
  """Whatever label, dropout or noise of a bottleneck stands behind it."""
  scenario = made(model, *(each[:4] for each in digits))
  layers = scenario.client.model.layers((8, 8, 1))
  for key in range(2):
    observation = sent(scenario, key=key)
    distance = jax.jit(functools.partial(prefix.distance, scenario.client, layers))
    apart = [float(distance(observation, scenario.samples[i : i + 1])) for i in range(2)]
    assert apart[0] < 1e-8 and apart[1] > 1e-3
    scaled = Observation(**{**vars(observation), 'update': jax.tree.map(lambda x: -0.1 * x, observation.update)})
    assert float(distance(scaled, scenario.samples[:1])) < 1e-8


@pytest.mark.long
@pytest.mark.parametrize('which', ['frozen', 'private'])
def test_layers_that_are_not_sent_are_not_compared(digits, which):
  scenario = made('cnn(widths=16-16)', *(each[:4] for each in digits))
  layers = scenario.client.model.layers((8, 8, 1))

  def apart(layer):
    own = scenario._replace(client=dataclasses.replace(scenario.client, **{which: (layer.name,)}))
    return float(jax.jit(functools.partial(prefix.distance, own.client, layers))(sent(own), scenario.samples[:1]))

  assert apart(layers[0]) < 1e-8
  with pytest.raises(UsageError, match=f'{layers[1].name}, is frozen or private'):
    apart(layers[1])
  own = scenario._replace(client=dataclasses.replace(scenario.client, **{which: (layers[1].name,)}))
  with pytest.raises(UsageError, match=f'{layers[1].name}, is frozen or private'):
    gl.audit(jax.random.key(0), own, [None], [gl.attacks.csdlg(distance='dense_input', steps=2)], 1)


def test_one_sample_is_matched(digits):
  scenario = made('cnn(widths=16)', *(each[:4] for each in digits))
  with pytest.raises(UsageError, match='for a single sample, not for 2'):
    prefix.distance(scenario.client, scenario.client.model.layers((8, 8, 1)), sent(scenario, 2), scenario.samples[:2])


OF_ONE_GRADIENT = [{}, {'momentum': 0.9}, {'max_norm': 0.1}, {'proximal': 1.0}]
OTHERS = [
  {'local_epochs': 2}, {'optimizer': 'adam'}, {'optimizer': 'rmsprop'}, {'weight_decay': 0.1}, {'accumulate': 2},
]  # fmt: skip


COMPILED = [pytest.param(local, marks=[pytest.mark.long] * bool(local)) for local in OF_ONE_GRADIENT]


@pytest.mark.long
@pytest.mark.parametrize('local', [*COMPILED, *OTHERS], ids=str)
def test_a_delta_is_matched_where_it_is_a_multiple_of_one_gradient(digits, local):
  """The truth does not explain any other: its distance is 1.1 under Adam, and 0.08 under weight decay."""
  scenario = made('cnn(widths=16)', *(each[:1] for each in digits))
  client = gl.ClientSettings(share='delta', **local).client(scenario.client.model, 10)
  distance = functools.partial(prefix.distance, client, client.model.layers((8, 8, 1)))
  if local in OTHERS:
    with pytest.raises(UsageError, match='for a multiple of one gradient'):
      jax.eval_shape(distance, sent(scenario), scenario.samples)
  else:
    observation = sent(scenario._replace(client=client))
    assert float(jax.jit(distance)(observation, scenario.samples)) < 1e-8


@pytest.mark.long
def test_rates_of_single_tensors_are_no_multiple_of_one_gradient(digits):
  scenario = made('cnn(widths=16)', *(each[:1] for each in digits))
  params = scenario.variables['params']
  kinds = jax.tree.map(lambda leaf: 'fast' if leaf.ndim == 1 else 'slow', params)
  rates = optax.partition({'fast': optax.sgd(1.0), 'slow': optax.sgd(0.1)}, kinds)
  corrected = optax.chain(optimizers.corrected(jax.tree.map(jnp.ones_like, params), params), optax.sgd(0.1))
  assert set(np.round(response.first_rates(rates, params), 6)) == {-1.0, -0.1}
  assert response.first_rates(corrected, params) is None
  for optimizer in (rates, corrected):
    client = dataclasses.replace(scenario.client, share='delta', optimizer=optimizer)
    with pytest.raises(UsageError, match='for a multiple of one gradient'):
      prefix.distance(client, client.model.layers((8, 8, 1)), sent(scenario), scenario.samples)


@pytest.mark.slow
def test_precode_is_read_exactly(digits):
  scenario = made('lenet(width=4)+precode(size=8)', *(each[:4] for each in digits))
  found = gl.audit(jax.random.key(1), scenario, [None], [gl.attacks.prefix()], 4, controls=4, progress='none')
  assert min(row['psnr'] for row in found.rows) > 60 and {row['labels'] for row in found.rows} == {'unused'}
  assert max(row['psnr'] for row in found.controls) < 15


@pytest.mark.long
def test_no_labels_are_claimed(digits):
  scenario = made('cnn(widths=16)', *(each[:4] for each in digits))
  (row,) = gl.audit(
    jax.random.key(1), scenario, [None], [gl.attacks.prefix(steps=1)], 1, controls=1, progress='none'
  ).rows
  assert row['labels'] == 'unused' and row['label_correct'] is None


@pytest.mark.long
def test_nothing_is_nothing(digits):
  scenario = made('cnn(widths=16)', *(each[:4] for each in digits))
  observation = sent(scenario)
  dead = Observation(**{**vars(observation), 'update': jax.tree.map(jnp.zeros_like, observation.update)})
  apart = prefix.distance(scenario.client, scenario.client.model.layers((8, 8, 1)), dead, scenario.samples[:1])
  assert np.isfinite(apart) and trees.norm(dead.update) == 0
