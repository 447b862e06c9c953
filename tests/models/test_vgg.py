"""VGG networks: torchvision's names and weights, the forward pass against NumPy, and second derivatives."""

import jax
import numpy as np
import pytest

from gradleak import models
from gradleak.core import errors
from gradleak.models import torch_weights, vgg
from gradleak.models.model import from_flax
from tests.models.second_order import check_second_order
from tests.models.shapes import shapes, torch_sizes
from tests.models.test_torch_weights import written

# torchvision's configurations: channels of convolutions, M for pooling.
CHANNELS = {
  'vgg11': '64 M 128 M 256 256 M 512 512 M 512 512 M',
  'vgg16': '64 64 M 128 128 M 256 256 256 M 512 512 512 M 512 512 512 M',
}


def features(name, norm, divisor=1, channels=3):
  """Returns the names and shapes of torchvision's `features`, of a width that is divided."""
  found, place = {}, 0
  for word in CHANNELS[name].split():
    if word == 'M':
      place += 1
      continue
    outputs = int(word) // divisor
    found |= {f'features.{place}.weight': (outputs, channels, 3, 3), f'features.{place}.bias': (outputs,)}
    if norm == 'batch':
      place += 1
      parts = ('weight', 'bias', 'running_mean', 'running_var')
      found |= {f'features.{place}.{part}': (outputs,) for part in parts}
      found[f'features.{place}.num_batches_tracked'] = ()
    place += 2
    channels = outputs
  return found


@pytest.mark.parametrize(
  ('name', 'norm', 'published', 'last'),
  [
    ('vgg11', 'none', 9_220_480, 18),
    ('vgg11', 'batch', 9_225_984, 26),
    ('vgg16', 'none', 14_714_688, 28),
    ('vgg16', 'batch', 14_723_136, 41),
  ],
)
def test_features_are_those_of_torchvision(name, norm, published, last):
  found = torch_sizes(shapes(f'{name}(norm={norm})', (32, 32, 3)))
  assert (found.pop('linear.weight'), found.pop('linear.bias')) == (512 * 10, 10)
  assert found == {
    place: int(np.prod(shape)) for place, shape in features(name, norm).items() if 'tracked' not in place
  }
  assert sum(size for place, size in found.items() if 'running' not in place) == published
  assert f'features.{last}.weight' in found
  assert f'features.{last + 1}.weight' not in found


def test_layers_in_forward_order_with_their_norms():
  plain, normed = (models.create(f'vgg11(width=2,norm={norm})', 10).layers((8, 8, 1)) for norm in ('none', 'batch'))
  assert [layer.name for layer in plain] == [f'features_{i}' for i in (0, 3, 6, 8, 11, 13, 16, 18)] + ['linear']
  places = (0, 4, 8, 11, 15, 18, 22, 25)
  assert [layer.name for layer in normed] == [f'features_{i}' for i in places] + ['linear']
  for layer, i in zip(normed, places, strict=False):
    conv, norm = f'features_{i}', f'features_{i + 1}'
    assert list(layer.paths) == [(conv, 'kernel'), (conv, 'bias'), (norm, 'bias'), (norm, 'scale')]


def reference(entries, images):
  """Returns the logits of images [N, H, W, C] in NumPy, in evaluation, from torchvision's names; float64."""
  x = images.transpose(0, 3, 1, 2).astype(np.float64)
  places = sorted({int(name.split('.')[1]) for name in entries if name.startswith('features.')})
  for place in places:
    weight, bias = (entries[f'features.{place}.{part}'].astype(np.float64) for part in ('weight', 'bias'))
    if weight.ndim == 4:
      padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
      windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
      x = np.einsum('nchwij,ocij->nohw', windows, weight) + bias[None, :, None, None]
      if place + 1 in places:
        continue
    else:
      mean, var = (entries[f'features.{place}.running_{part}'].astype(np.float64) for part in ('mean', 'var'))
      x = (x - mean[None, :, None, None]) / np.sqrt(var[None, :, None, None] + 1e-5)
      x = x * weight[None, :, None, None] + bias[None, :, None, None]
    x = np.maximum(x, 0)
    if place + 2 not in places and min(x.shape[2:]) > 1:
      height, width = x.shape[2] // 2, x.shape[3] // 2
      x = x[:, :, : 2 * height, : 2 * width].reshape(*x.shape[:2], height, 2, width, 2).max((3, 5))
  return x.mean((2, 3)) @ entries['linear.weight'].T + entries['linear.bias']


@pytest.mark.long
@pytest.mark.parametrize('norm', ['none', 'batch'])
def test_weights_of_torchvision_give_the_logits_of_numpy(norm, tmp_path):
  """Their three dense layers are not ours: the last layer is drawn."""
  rng, entries = np.random.default_rng(0), {}
  for name, shape in features('vgg11', norm, divisor=16).items():
    if name.endswith('var') or (name.endswith('weight') and len(shape) == 1):
      values = rng.uniform(0.5, 1.5, shape)
    else:
      values = rng.normal(size=shape) * np.sqrt(2 / (np.prod(shape[1:]) if len(shape) == 4 else 32))
    entries[name] = np.asarray(values, np.float32)
  theirs = {
    **entries,
    'classifier.0.weight': np.zeros((2, 3), np.float32),
    'classifier.6.bias': np.zeros(2, np.float32),
  }
  model = models.create(f'vgg11(width=4,norm={norm})', 10, init='default')
  path, sample_shape = written('zip', theirs, tmp_path), (34, 16, 3)
  with pytest.raises(
    errors.UsageError, match=r'missing: linear\.bias, linear\.weight; not in the model: classifier\.0'
  ):
    torch_weights.load(path, model, sample_shape)
  variables = torch_weights.load(path, model, sample_shape, head=jax.random.key(0))
  images = rng.uniform(0, 1, (2, *sample_shape)).astype(np.float32)
  last = {name: np.asarray(values, np.float64) for name, values in variables['params']['linear'].items()}
  expected = reference({**entries, 'linear.weight': last['kernel'].T, 'linear.bias': last['bias']}, images)
  assert np.ptp(expected, axis=0).max() > 0.01
  computed = jax.jit(lambda v: model.apply(v, images, False)[0])(variables)
  np.testing.assert_allclose(computed, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize('norm', [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_slope_of_gradient_matching(norm):
  check_second_order(from_flax(vgg.Vgg(5, 'default', 'patches', 2, norm, (1, 2)), 'small'), (4, 4, 1))
