"""The order in which dense layers take their inputs: networks in PyTorch's layout, and the same ones here."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import gradleak as gl
from gradleak.core import trees
from gradleak.models import flattening

SHAPE = (8, 6, 3)


def maps(x):
  """Returns a convolution's maps after max and after average pooling."""
  x = nn.relu(nn.Conv(4, (3, 3), name='conv')(x))
  n, h, w, c = x.shape
  return nn.max_pool(x, (2, 2), (2, 2)), x.reshape(n, h // 2, 2, w // 2, 2, c).mean((2, 4))


def flat(x):
  return x.reshape(x.shape[0], -1)


# What stands between the convolution and the last layer, here and in PyTorch. There it is given maps [N, C, H, W] and
# the file's weights.
HERE = {
  'flattened': lambda a, b: flat(a),
  'pooled_twice': lambda a, b: flat(jnp.concatenate([a, b], -1)),
  'flattened_and_joined': lambda a, b: jnp.concatenate([flat(a), flat(b)], -1),
  'features_beside_maps': lambda a, b: jnp.concatenate([flat(a), b.mean((1, 2))], -1),
  'global_pooling': lambda a, b: jnp.concatenate([a.max((1, 2)), b.mean((1, 2))], -1),
  'channels_first_here': lambda a, b: flat(a.transpose(0, 3, 1, 2)),
  'one_pixel': lambda a, b: flat(nn.max_pool(a, (4, 3))),
  'cropped': lambda a, b: flat(a[:, 1:, :2]),
  'gated': lambda a, b: flat(a * nn.sigmoid(nn.Dense(4, name='gate')(b.mean((1, 2))))[:, None, None, :]),
  'normed': lambda a, b: nn.LayerNorm(name='norm', epsilon=1e-5)(flat(a)),
  'residual': lambda a, b: flat(a + nn.Conv(4, (1, 1), name='skip')(b)),
  'two_layers': lambda a, b: nn.relu(nn.Dense(5, name='hidden')(flat(a))),
}


def linear(x, weights, name):
  return x @ weights[f'{name}.weight'].T + weights[f'{name}.bias'].reshape(1, -1)


def convolved(x, weights, name):
  x = jax.lax.conv_general_dilated(x, weights[f'{name}.weight'], (1, 1), 'SAME')
  return x + weights[f'{name}.bias'].reshape(1, -1, 1, 1)


def pooled(x, reduce):
  n, c, h, w = x.shape
  return reduce(x.reshape(n, c, h // 2, 2, w // 2, 2), axis=(3, 5))


def normed(x, weights):
  x = (x - x.mean(1, keepdims=True)) / jnp.sqrt(x.var(1, keepdims=True) + 1e-5)
  return x * weights['norm.weight'].reshape(1, -1) + weights['norm.bias'].reshape(1, -1)


THERE = {
  'flattened': lambda a, b, w: flat(a),
  'pooled_twice': lambda a, b, w: flat(jnp.concatenate([a, b], 1)),
  'flattened_and_joined': lambda a, b, w: jnp.concatenate([flat(a), flat(b)], 1),
  'features_beside_maps': lambda a, b, w: jnp.concatenate([flat(a), b.mean((2, 3))], 1),
  'global_pooling': lambda a, b, w: jnp.concatenate([a.max((2, 3)), b.mean((2, 3))], 1),
  'channels_first_here': lambda a, b, w: flat(a),
  'one_pixel': lambda a, b, w: a.max((2, 3)),
  'cropped': lambda a, b, w: flat(a[:, :, 1:, :2]),
  'gated': lambda a, b, w: flat(a * nn.sigmoid(linear(b.mean((2, 3)), w, 'gate'))[:, :, None, None]),
  'normed': lambda a, b, w: normed(flat(a), w),
  'residual': lambda a, b, w: flat(a + convolved(b, w, 'skip')),
  'two_layers': lambda a, b, w: nn.relu(linear(flat(a), w, 'hidden')),
}


class Network(nn.Module):
  between: str

  @nn.compact
  def __call__(self, images):
    return nn.Dense(10, name='last')(HERE[self.between](*maps(images)))


def there(between, weights, images):
  """Returns the logits of the network in PyTorch's layout, images [N, H, W, C]."""
  x = nn.relu(convolved(images.transpose(0, 3, 1, 2), weights, 'conv'))
  return linear(THERE[between](pooled(x, jnp.max), pooled(x, jnp.mean), weights), weights, 'last')


def torch_weights(shapes):
  """Returns random weights under PyTorch's names and in its layout, for a tree of parameters."""
  rng, weights = np.random.default_rng(0), {}
  for path, leaf in jax.tree.leaves_with_path(shapes['params']):
    module, name = trees.path_names(path)
    shape = {4: lambda s: (s[3], s[2], s[0], s[1]), 2: lambda s: s[::-1], 1: tuple}[leaf.ndim](leaf.shape)
    name = {'kernel': 'weight', 'scale': 'weight'}.get(name, name)
    weights[f'{module}.{name}'] = rng.normal(size=shape).astype(np.float32)
  return weights


@pytest.mark.long
@pytest.mark.parametrize('between', HERE)
def test_logits_and_gradient_are_those_of_the_network_in_pytorchs_layout(between, tmp_path):
  model = gl.models.from_flax(Network(between))
  weights = torch_weights(jax.eval_shape(lambda key: model.init(key, SHAPE), jax.random.key(0)))
  images = jnp.asarray(np.random.default_rng(1).uniform(size=(2, *SHAPE)), jnp.float32)
  np.savez(tmp_path / 'weights.npz', **weights)
  variables = gl.read_weights(tmp_path / 'weights.npz', model, SHAPE)
  logits = there(between, weights, images)
  np.testing.assert_allclose(model.apply(variables, images)[0], logits, rtol=1e-4, atol=1e-4)

  def loss(logits):
    return jnp.mean(jax.nn.logsumexp(logits, axis=1) - logits[:, 3])

  theirs = jax.grad(lambda weights: loss(there(between, weights, images)))(weights)
  np.savez(tmp_path / 'gradient.npz', **theirs)
  update = gl.read_update(tmp_path / 'gradient.npz', model, variables, sample_shape=SHAPE)
  params = variables['params']
  ours = jax.grad(lambda params: loss(model.apply({'params': params}, images)[0]))(params)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5), update, ours)


def unsettled(x, how):
  n = x.shape[0]
  if how == 'rows':
    return nn.RNN(nn.LSTMCell(5))(x.reshape(n, x.shape[1], -1))[:, -1]
  if how == 'sorted':
    return jnp.sort(flat(x))
  if how == 'two_orders':
    return flat(x) + flat(x.transpose(0, 3, 1, 2))
  if how == 'decoder':
    x = nn.Dense(36)(flat(x)).reshape(n, 3, 3, 4)
    return nn.Conv(2, (3, 3))(x).mean((1, 2))
  return flat(x)[:, :30]


@pytest.mark.parametrize(
  ('how', 'reason'),
  [
    ('rows', 'it takes some of the pixels and channels of an image of 4×3×4 at a time'),
    ('sorted', 'a flattened image is computed with'),
    ('two_orders', 'a flattened image is computed with'),
    ('decoder', 'features are reshaped to an image'),
    ('part', 'it takes some of the pixels and channels of an image of 4×3×4 at a time'),
  ],
)
def test_what_is_not_settled_is_refused_unless_the_order_is_given(how, reason, tmp_path):
  class Unsettled(nn.Module):
    @nn.compact
    def __call__(self, images):
      return nn.Dense(10, name='last')(unsettled(maps(images)[0], how))

  model = gl.models.from_flax(Unsettled())
  variables = model.init(jax.random.key(0), SHAPE)
  np.savez(tmp_path / 'weights.npz', **named(variables))
  with pytest.raises(gl.UsageError, match=r'the order of .* in PyTorch is not settled') as error:
    gl.read_weights(tmp_path / 'weights.npz', model, SHAPE)
  assert f"'unsettled': {reason}. flattened='channels_last' takes it in the order of the model" in str(error.value)
  read = gl.read_weights(tmp_path / 'weights.npz', model, SHAPE, flattened='channels_last')
  jax.tree.map(np.testing.assert_array_equal, read, dict(variables))


def named(variables):
  """Returns the parameters under PyTorch's names, transposed, in the order that they have here."""
  entries = {}
  for path, leaf in jax.tree.leaves_with_path(variables['params']):
    *modules, name = trees.path_names(path)
    leaf = np.asarray(leaf)
    turned = leaf.transpose(3, 2, 0, 1) if leaf.ndim == 4 else leaf.T
    entries['.'.join([*modules, {'kernel': 'weight'}.get(name, name)])] = turned
  return entries


def test_matrices_that_are_stored_as_in_pytorch_are_not_turned(tmp_path):
  """A product with the transposed matrix sums over its second axis, whatever the name and though it is square."""

  def apply(params, images):
    x = flat(images)
    for name in ('first', 'last'):
      x = x @ params[name]['kernel'].T
    return x

  rng = np.random.default_rng(0)
  params = {name: {'kernel': rng.normal(size=(12, 12)).astype(np.float32)} for name in ('first', 'last')}
  model = gl.models.from_functions(lambda key, shape: params, apply)
  stored = {'first.weight': params['first']['kernel'], 'last.weight': params['last']['kernel']}
  np.savez(tmp_path / 'weights.npz', **stored)
  read = gl.read_weights(tmp_path / 'weights.npz', model, (2, 3, 2))
  np.testing.assert_array_equal(read['params']['last']['kernel'], stored['last.weight'])
  places = np.arange(12).reshape(2, 2, 3).transpose(1, 2, 0).reshape(-1)  # of (row, column, channel) in PyTorch
  np.testing.assert_array_equal(read['params']['first']['kernel'], stored['first.weight'][:, places])


def test_weights_that_are_used_twice_have_one_order():
  def apply(params, images):
    x = flat(images)
    return (x + flat(images.transpose(0, 3, 1, 2)) @ params['w']) @ params['w'], x @ params['u']

  model = gl.models.Model('own', None, lambda variables, images, *_: apply(variables['params'], images))
  found = flattening.orders(model, {'params': {'w': jnp.zeros((12, 12)), 'u': jnp.zeros((12, 3))}}, (2, 2, 3))
  assert found['w',].problem and found['u',].places is not None


class Window(nn.Module):
  """One convolution, and the sum of what is positive in its maps."""

  layer: nn.Module

  @nn.compact
  def __call__(self, x, train=False):
    return nn.relu(self.layer.copy(name='conv')(x)).sum(tuple(range(1, x.ndim - 1)))


def windows(x, stride, size):
  """Returns (place of each window along the axes of a map [N, …, C], its part of the map)."""
  for place in itertools.product(*(range(0, side - size + 1, stride) for side in x.shape[1:-1])):
    yield place, (slice(None), *(slice(start, start + size) for start in place))


def spread(x, weight):
  """Returns PyTorch's transposed convolution of stride 2 of maps [N, …, C]; its kernel is [in, out, …]."""
  size = weight.shape[-1]
  out = np.zeros((len(x), *(2 * (side - 1) + size for side in x.shape[1:-1]), weight.shape[1]))
  for place, window in windows(out, 2, size):
    value = x[(slice(None), *(start // 2 for start in place))]
    out[window] += np.moveaxis(np.tensordot(value, weight, 1), 1, -1)
  return out


def convolved_naively(x, weight):
  """Returns PyTorch's convolution of maps [N, …, C]; its kernel is [out, in, …]."""
  size, axes = weight.shape[-1], range(1, x.ndim - 1)
  out = np.zeros((len(x), *(side - size + 1 for side in x.shape[1:-1]), len(weight)))
  for place, window in windows(x, 1, size):
    out[(slice(None), *place)] = np.tensordot(x[window], weight, ([x.ndim - 1, *axes], [1, *range(2, x.ndim)]))
  return out


@pytest.mark.parametrize(
  ('layer', 'shape', 'naive'),
  [
    (nn.ConvTranspose(4, (3, 3), (2, 2), padding='VALID', use_bias=False), (4, 5, 4), spread),
    (nn.ConvTranspose(4, (4,), (2,), padding='VALID', use_bias=False), (5, 4), spread),
    (nn.Conv(4, (4,), padding='VALID', use_bias=False), (6, 2), convolved_naively),
    (nn.Conv(2, (2, 2, 2), padding='VALID', use_bias=False), (3, 4, 2, 2), convolved_naively),
  ],
  ids=['transposed', 'transposed sequence', 'sequence', 'volume'],
)
def test_a_kernel_stands_as_the_network_uses_it(layer, shape, naive):
  """Kernels of some shapes fit either way: PyTorch's transposed ones, and those of a sequence, were read turned."""
  network, rng = Window(layer), np.random.default_rng(0)
  model = gl.models.from_functions(
    lambda key, sample: network.init(key, jnp.zeros((1, *sample)))['params'],
    lambda params, x: network.apply({'params': params}, x),
    axes=len(shape),
  )
  variables, x = model.init(jax.random.key(0), shape), rng.normal(size=(2, *shape)).astype(np.float32)
  *window, inputs, outputs = variables['params']['conv']['kernel'].shape
  channels = (inputs, outputs) if naive is spread else (outputs, inputs)
  weight = rng.normal(size=(*channels, *window)).astype(np.float32)
  read = gl.read_update({'conv.weight': weight}, model, variables, sample_shape=shape)
  wanted = np.maximum(naive(x, weight), 0)
  wanted = wanted.sum(tuple(range(1, wanted.ndim - 1)))
  np.testing.assert_allclose(network.apply({'params': read}, x), wanted, rtol=1e-4, atol=1e-4)
