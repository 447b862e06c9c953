"""Decoders of feature maps against loops, their printed shapes, and what they learn from a few digits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from gradleak import models
from gradleak.attacks import decoder
from gradleak.core import errors, grammar, methods

pytestmark = pytest.mark.usefixtures('fast_compilation')
SHAPE = (8, 8, 1)


@pytest.fixture(scope='module')
def digits(digits):
  return digits[0][:120]


@pytest.fixture(scope='module')
def victim():
  model = models.create('cnn', 10, init='default')
  return model, jax.jit(model.init, static_argnums=1)(jax.random.key(4), SHAPE)


@pytest.fixture(scope='module')
def features(victim, digits):
  inputs = jax.jit(functools.partial(decoder.dense_inputs, victim[0]))(victim[1], digits)
  return np.asarray(inputs).reshape(-1, 3, 3, 32)


def test_features_are_those_of_convolution_and_pooling(victim, digits, features):
  convolution = victim[1]['params']['Conv_0']
  kernel, bias = (np.asarray(convolution[name], float) for name in ('kernel', 'bias'))
  for n in (0, 7):
    for i in range(3):
      for j in range(3):
        values = []
        for row in (2 * i, 2 * i + 1):
          for column in (2 * j, 2 * j + 1):
            window = digits[n, row : row + 3, column : column + 3, 0].astype(float)
            values.append(kernel @ window.T.ravel() + bias)  # kernels are ordered column first
        np.testing.assert_allclose(features[n, i, j], np.max(values, axis=0), atol=1e-5)


def test_features_are_read_where_the_loss_has_no_gradient_left(victim, digits, features):
  model, variables = victim
  sure = jax.tree.map(lambda x: x, variables)
  sure['params']['Dense_2'] = {**sure['params']['Dense_2'], 'bias': np.eye(10, dtype=np.float32)[3] * 1e4}
  inputs = decoder.dense_inputs(model, sure, digits[:2])
  np.testing.assert_allclose(inputs, features[:2].reshape(2, -1), atol=1e-5)


def naive_windows(features, images, others, context):
  """Least squares by NumPy’s solver, window by window; where they overlap, averaged by one over the squared error."""
  size, count = images.shape[1], features.shape[1]
  stride = size // count
  length = size - stride * (count - 1)

  def around(maps, i, j):
    places = range(-context, context + 1)
    held = [maps[min(max(i + a, 0), count - 1), min(max(j + b, 0), count - 1)] for a in places for b in places]
    return np.concatenate([*held, [1.0]])

  rows, targets = [], []
  for maps, image in zip(features.astype(float), images.astype(float), strict=True):
    for i in range(count):
      for j in range(count):
        rows.append(around(maps, i, j))
        targets.append(image[stride * i : stride * i + length, stride * j : stride * j + length].ravel())
  rows, targets = np.array(rows), np.array(targets)
  weights = np.linalg.lstsq(rows, targets, rcond=1e-9)[0]
  trust = 1 / (np.mean((rows @ weights - targets) ** 2, axis=0) + 1e-9)
  found = []
  for maps in others.astype(float):
    total, count_of = np.zeros(images.shape[1:]), np.zeros(images.shape[1:])
    for i in range(count):
      for j in range(count):
        place = slice(stride * i, stride * i + length), slice(stride * j, stride * j + length)
        shape = total[place].shape
        total[place] += (trust * (around(maps, i, j) @ weights)).reshape(shape)
        count_of[place] += trust.reshape(shape)
    found.append(total / count_of)
  return np.array(found)


def fitted(factory, features, images, **settings):
  made = factory(images.shape[1:], **settings)
  weights = made.fit(jax.random.key(0), features, images)
  return functools.partial(jax.jit(made.decode), weights)


@pytest.mark.long
def test_windows_are_least_squares(digits):
  """On features that see a pixel more than once each, and not all of them: 13×13 pixels, windows of 5, stride 4."""
  rng = np.random.default_rng(0)
  images = np.pad(digits, ((0, 0), (2, 3), (1, 4), (0, 0))) + rng.uniform(size=(120, 13, 13, 1)).astype(np.float32)
  kernel = rng.normal(size=(25, 6))
  windows = [[images[:, 4 * i : 4 * i + 5, 4 * j : 4 * j + 5].reshape(120, -1) for j in range(3)] for i in range(3)]
  features = np.maximum(np.stack([np.stack(row, 1) for row in windows], 1) @ kernel, 0).astype(np.float32)
  decode = fitted(decoder.windows, features[:100], images[:100], hidden=0)
  expected = naive_windows(features[:100], images[:100], features[100:], context=1)
  np.testing.assert_allclose(decode(features[100:]), expected, atol=2e-3)


def test_windows_take_unseen_digits_back(digits, features):
  decode = fitted(decoder.windows, features[:100], digits[:100], hidden=0)
  found = np.asarray(decode(features[100:]))
  assert np.mean((found - digits[100:]) ** 2) < 0.25 * np.mean((digits[:100].mean(0) - digits[100:]) ** 2)
  mixture = 0.75 * features[100] + 0.5 * features[101] - 0.25 * features[102]
  mixed = 0.75 * found[0] + 0.5 * found[1] - 0.25 * found[2]
  np.testing.assert_allclose(decode(mixture[None])[0], mixed, atol=1e-3)


def test_the_networks_are_those_of_the_tables():
  def shapes(module, features):
    params = jax.eval_shape(module.init, jax.random.key(0), np.zeros((1, *features), np.float32))['params']
    return [params[name]['kernel'].shape for name in params if 'kernel' in params[name]]

  expected = [(5, 5, 32, 20), (5, 5, 20, 10), (20 * 20 * 10, 784)]
  assert sorted(shapes(decoder.TableIII((28, 28, 1)), (13, 13, 32))) == sorted(expected)
  table_iv = decoder.TableIV((32, 32, 3))
  expected = [(5, 5, 32, 128), (5, 5, 128, 64), (5, 5, 64, 64), (3, 3, 64, 32), (3, 3, 32, 3)]
  assert sorted(shapes(table_iv, (15, 15, 32))) == sorted(expected)
  images, _ = jax.eval_shape(table_iv.init_with_output, jax.random.key(0), np.zeros((2, 15, 15, 32), np.float32))
  assert images.shape == (2, 32, 32, 3)


@pytest.mark.long
def test_their_convolutions_are_those_of_flax():
  """Table IV, and the strided convolution of table III, of Flax's own layers: the same of the same weights."""

  class Published(nn.Module):
    @nn.compact
    def __call__(self, x):
      x = nn.relu(nn.ConvTranspose(128, (5, 5), name='_Conv_0')(x))
      x = nn.relu(nn.ConvTranspose(64, (5, 5), strides=(2, 2), name='_Conv_1')(x))
      x = nn.BatchNorm(use_running_average=True)(x)
      x = nn.relu(nn.ConvTranspose(64, (5, 5), name='_Conv_2')(x))
      x = jnp.tanh(nn.ConvTranspose(32, (3, 3), padding='VALID', name='_Conv_3')(x))
      return nn.sigmoid(nn.Conv(3, (3, 3))(x))

  strided = nn.Conv(10, (5, 5), strides=(2, 2), padding='VALID')
  for published, ours in ((Published(), decoder.TableIV((14, 14, 3))), (strided, decoder._Conv(10, 5, stride=2))):
    features = jax.random.normal(jax.random.key(0), (2, 6, 6, 8))
    variables = jax.jit(published.init)(jax.random.key(1), features)
    expected, found = (jax.jit(module.apply)(variables, features) for module in (published, ours))
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.long
def test_a_hidden_layer_knows_more_than_the_linear_part(digits):
  """Pixels are the features' absolute values: nothing that is linear in them."""
  features = (digits[:, ::2, ::2] - digits[:, 1::2, 1::2])[..., [0, 0]] + np.float32([0, 0.1])
  images = np.kron(np.abs(features[..., :1]), np.ones((1, 2, 2, 1), np.float32))
  squares = []
  for hidden in (0, 16):
    decode = fitted(decoder.windows, features[:100], images[:100], context=0, hidden=hidden, steps=400)
    squares.append(np.mean((np.asarray(decode(features[100:])) - images[100:]) ** 2))
  assert squares[1] < 0.5 * squares[0]


@pytest.mark.slow
@pytest.mark.parametrize(('factory', 'steps', 'share'), [(decoder.table_iii, 600, 0.4), (decoder.table_iv, 100, 0.6)])
def test_the_networks_learn(digits, victim, factory, steps, share):
  images = np.kron(digits, np.ones((1, 2, 2, 1), np.float32))[:, :12, :12]
  variables = jax.jit(victim[0].init, static_argnums=1)(jax.random.key(1), images.shape[1:])
  inputs = jax.jit(functools.partial(decoder.dense_inputs, victim[0]))(variables, images)
  features = inputs.reshape(-1, 5, 5, 32)
  decode = fitted(factory, features[:100], images[:100], steps=steps)
  found = np.asarray(decode(features[100:]))
  assert found.min() >= 0 and found.max() <= 1
  assert np.mean((found - images[100:]) ** 2) < share * np.mean((images[:100].mean(0) - images[100:]) ** 2)
  one = np.asarray(decode(features[100:101]))
  np.testing.assert_allclose(one[0], found[0], atol=1e-5)  # running statistics: alone or among others


def parsed(text):
  """Returns the `Method` of a decoder, as experiments make it of a text."""
  return methods.from_spec(grammar.spec(text, 'decoder'), decoder.REGISTRY, 'decoder')


@pytest.mark.parametrize(
  ('call', 'message'),
  [
    (lambda f, x: parsed('window'), "unknown decoder 'window'; did you mean 'windows'"),
    (lambda f, x: parsed('windows(hiden=1)'), "unknown setting of the decoder windows: 'hiden'; did you mean 'hidden'"),
    (lambda f, x: parsed('windows(context=-1)'), r'windows\(context\) is -1'),
    (lambda f, x: fitted(decoder.table_iii, f, x), 'table_iii decodes features of at least 4×4 .* got 3×3'),
    (lambda f, x: fitted(decoder.table_iv, f, x[:, :6]), 'table_iv decodes features of 2×2 .* got 3×3'),
    (lambda f, x: fitted(decoder.windows, f, x[:, :2]), '3 features see no windows of 2 pixels'),
  ],
)
def test_what_does_not_fit_is_a_usage_error(call, message, digits, features):
  with pytest.raises(errors.UsageError, match=message):
    call(features, digits)
