"""Residual networks and FFL's ConvNet: sizes, layers, norms, and the forward pass against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradleak import models
from gradleak.core import trees
from gradleak.models import resnet, torch_weights
from gradleak.models.builtin import PIXELS
from gradleak.models.model import from_flax
from tests.models.second_order import check_second_order
from tests.models.shapes import common_sizes, count, drawn, shapes, shapes_of, torch_sizes
from tests.models.test_torch_weights import written


def small(norm='batch', project=False, blocks=(1, 1), conv='patches', **options):
  """Returns a residual network of two stages, whose tests compile in a second."""
  return from_flax(resnet.ResNet(5, 'default', conv, 4, norm, blocks, project), 'small', **options)


@pytest.mark.parametrize(
  ('spec', 'convolutions', 'normed', 'dense'),
  [
    # Published: 0.27 M (He et al., table 6), 11.17 M, and FFL's 3.49 M.
    (
      'resnet20',
      9 * (3 * 16 + 6 * 16**2 + 16 * 32 + 5 * 32**2 + 32 * 64 + 5 * 64**2),
      7 * 16 + 6 * 32 + 6 * 64,
      65 * 10,
    ),
    (
      'resnet18',
      9 * (3 * 64 + 4 * 64**2 + 64 * 128 + 3 * 128**2 + 128 * 256 + 3 * 256**2 + 256 * 512 + 3 * 512**2)
      + (64 * 128 + 128 * 256 + 256 * 512),
      5 * 64 + 5 * (128 + 256 + 512),
      513 * 10,
    ),
    (
      'convnet9',
      9 * (3 * 64 + 64 * 128 + 128**2 + 128 * 256 + 5 * 256**2),
      64 + 2 * 128 + 6 * 256,
      (9 * 256 + 1) * 10,
    ),
  ],
)
def test_parameter_counts_by_hand_and_as_published(spec, convolutions, normed, dense):
  published = {'resnet20': 269_722, 'resnet18': 11_173_962, 'convnet9': 3_493_706}
  variables = shapes(spec, (32, 32, 3))
  assert count(variables) == convolutions + 2 * normed + dense == published[spec]
  assert count(variables, 'batch_stats') == 2 * normed


@pytest.mark.long
@pytest.mark.parametrize(
  ('spec', 'published'),
  [
    ('resnet56', 853_018),  # 0.85 M (He et al., table 6)
    ('resnet34', 21_282_122),
    pytest.param('resnet50', 23_520_842, marks=pytest.mark.slow),
    pytest.param('resnet152', 58_156_618, marks=pytest.mark.slow),
  ],
)
def test_deep_networks_have_as_many_parameters_as_published(spec, published):
  assert count(shapes(spec, (32, 32, 3))) == published


BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}


def torchvision(layers, width=64, channels=3, classes=1000, blocks=None):
  """Returns the names and shapes of a state_dict of torchvision's residual networks."""
  found, deep = {}, layers >= 50

  def convolution(place, number, inputs, outputs, size):
    places = ('downsample.0', 'downsample.1') if number is None else (f'conv{number}', f'bn{number}')
    found[f'{place}{places[0]}.weight'] = (outputs, inputs, size, size)
    for part in ('weight', 'bias', 'running_mean', 'running_var'):
      found[f'{place}{places[1]}.{part}'] = (outputs,)
    found[f'{place}{places[1]}.num_batches_tracked'] = ()

  convolution('', 1, channels, width, 7)
  inputs = width
  for stage, number in enumerate(blocks or BLOCKS[layers]):
    inside = width * 2**stage
    outputs = inside * (4 if deep else 1)
    for block in range(number):
      place = f'layer{stage + 1}.{block}.'
      sizes = [(inputs, inside, 1), (inside, inside, 3), (inside, outputs, 1)] if deep else None
      for i, each in enumerate(sizes or [(inputs, inside, 3), (inside, inside, 3)], start=1):
        convolution(place, i, *each)
      if block == 0 and (stage > 0 or deep):
        convolution(place, None, inputs, outputs, 1)
      inputs = outputs
  return {**found, 'fc.weight': (classes, inputs), 'fc.bias': (classes,)}


@pytest.mark.slow
@pytest.mark.parametrize(
  ('layers', 'entries', 'published'),
  [
    (18, 122, 11_689_512),
    (34, 218, 21_797_672),
    (50, 320, 25_557_032),
    (101, 626, 44_549_160),
    (152, 932, 60_192_808),
  ],
)
def test_names_are_those_of_torchvision(layers, entries, published):
  theirs = torchvision(layers)
  variables = shapes(f'resnet{layers}(stem=imagenet)', (224, 224, 3), 1000)
  assert len(theirs) == entries
  assert torch_sizes(variables) == common_sizes(theirs)
  assert count(variables) == published


@pytest.mark.long
def test_group_norm_has_the_same_parameters_and_no_batch_statistics():
  batch, group = shapes('resnet18(width=2)', (8, 8, 1)), shapes('resnet18(width=2,norm=group)', (8, 8, 1))
  assert set(group) == {'params'}
  assert jax.tree.structure(group['params']) == jax.tree.structure(batch['params'])
  assert count(group) == count(batch)


def in_order(stages, blocks, project, deep=False):
  """Yields the layers' names and what their norms are called."""
  yield 'conv1', 'norm1'
  for stage in range(1, stages + 1):
    for block in range(blocks if isinstance(blocks, int) else blocks[stage - 1]):
      place = f'layer{stage}_{block}'
      yield f'{place}/conv1', f'{place}/norm1'
      yield f'{place}/conv2', f'{place}/norm2'
      if deep:
        yield f'{place}/conv3', f'{place}/norm3'
      if block == 0 and project and (stage > 1 or deep):
        yield f'{place}/shortcut_conv', f'{place}/shortcut_norm'


@pytest.mark.long
@pytest.mark.parametrize(
  ('spec', 'convolutions', 'dense'),
  [
    ('resnet20(width=2)', [*in_order(3, 3, False)], 'linear'),
    ('resnet18(width=2)', [*in_order(4, 2, True)], 'linear'),
    ('resnet18(width=2,norm=group)', [*in_order(4, 2, True)], 'linear'),
    ('resnet50(width=2,stem=imagenet)', [*in_order(4, (3, 4, 6, 3), True, deep=True)], 'linear'),
    ('convnet9(width=2)', [(f'Conv_{i}', f'BatchNorm_{i}') for i in range(9)], 'Dense_0'),
  ],
)
def test_layers_are_in_forward_order_each_weight_with_its_norm(spec, convolutions, dense):
  layers = [
    (layer.name, ['/'.join(path) for path in layer.paths]) for layer in models.create(spec, 10).layers((9, 9, 1))
  ]
  expected = [(conv, [f'{conv}/kernel', f'{norm}/bias', f'{norm}/scale']) for conv, norm in convolutions]
  assert layers == [*expected, (dense, [f'{dense}/kernel', f'{dense}/bias'])]


@pytest.mark.long
@pytest.mark.parametrize(('stem', 'sides'), [('cifar', (32, 32, 16, 8, 4)), ('imagenet', (16, 8, 4, 2, 1))])
def test_stages_halve_the_image(stem, sides):
  """The stem keeps the resolution, in contrast to that for ImageNet."""
  spec = f'resnet18(width=2,stem={stem})'
  model, seen = models.create(spec, 10), {}

  def watch(next_function, args, kwargs, context):
    outputs = next_function(*args, **kwargs)
    if context.method_name == '__call__' and len(context.module.path) == 1:
      seen[context.module.path[0]] = outputs.shape[1:]
    return outputs

  variables = shapes(spec, (32, 32, 3))
  with resnet.nn.intercept_methods(watch):
    jax.eval_shape(lambda v: model.apply(v, jnp.zeros((1, 32, 32, 3)), True), variables)
  places = ('conv1', *(f'layer{i}_1' for i in (1, 2, 3, 4)))
  assert [seen[place] for place in places] == [(s, s, w) for s, w in zip(sides, (2, 2, 4, 8, 16), strict=True)]


# A reference in NumPy, in float64 and PyTorch's order [N, C, H, W], written from the paper.


def convolve(x, kernel, stride):
  """Convolution by its definition; kernel [out, in, row, column], padding that keeps the size at stride 1."""
  outputs, _, size, _ = kernel.shape
  margin = (size - 1) // 2
  x = np.pad(x, ((0, 0), (0, 0), (margin, margin), (margin, margin)))
  height, width = ((side - size) // stride + 1 for side in x.shape[2:])
  result = np.empty((len(x), outputs, height, width))
  for i in range(height):
    for j in range(width):
      window = x[:, :, i * stride : i * stride + size, j * stride : j * stride + size]
      result[:, :, i, j] = np.einsum('ncij,fcij->nf', window, kernel)
  return result


def over_channels(values):
  return values[None, :, None, None]


def normalise(x, entries, name, norm, train):
  if norm == 'group':
    halves = x.reshape(len(x), 2, -1)
    mean, var = halves.mean(2, keepdims=True), halves.var(2, keepdims=True)
    x = ((halves - mean) / np.sqrt(var + 1e-5)).reshape(x.shape)
  else:
    mean, var = entries.get(f'{name}.running_mean'), entries.get(f'{name}.running_var')
    if train:
      mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3))
    x = (x - over_channels(mean)) / np.sqrt(over_channels(var) + 1e-5)
  return over_channels(entries[f'{name}.weight']) * x + over_channels(entries[f'{name}.bias'])


def residual_network(entries, images, blocks, norm, train):
  """Returns (logits, features) of images [N, H, W, C].

  A shortcut projects where `entries` hold a projection, a block has as many convolutions as they hold, and a first one
  of 7×7 is ImageNet's stem.
  """
  imagenet = entries['conv1.weight'].shape[-1] == 7
  x = convolve(images.transpose(0, 3, 1, 2).astype(np.float64), entries['conv1.weight'], 2 if imagenet else 1)
  x = np.maximum(normalise(x, entries, 'bn1', norm, train), 0)
  if imagenet:
    x = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))  # of what is not negative
    x = np.lib.stride_tricks.sliding_window_view(x, (3, 3), axis=(2, 3))[:, :, ::2, ::2].max((4, 5))
  for stage, number in enumerate(blocks, start=1):
    for block in range(number):
      name, stride = f'layer{stage}.{block}', 2 if stage > 1 and block == 0 else 1
      last = 3 if f'{name}.conv3.weight' in entries else 2
      y = x
      for i in range(1, last + 1):
        y = convolve(y, entries[f'{name}.conv{i}.weight'], stride if i == last - 1 else 1)
        y = normalise(y, entries, f'{name}.bn{i}', norm, train)
        y = np.maximum(y, 0) if i < last else y
      if f'{name}.shortcut.0.weight' in entries:
        x = convolve(x, entries[f'{name}.shortcut.0.weight'], stride)
        x = normalise(x, entries, f'{name}.shortcut.1', norm, train)
      elif stride > 1:
        shortcut = np.zeros_like(y)
        first = (y.shape[1] - x.shape[1]) // 2
        shortcut[:, first : first + x.shape[1]] = x[:, :, ::2, ::2]
        x = shortcut
      x = np.maximum(x + y, 0)
  features = x.mean((2, 3))
  return features @ entries['linear.weight'].T + entries['linear.bias'], features


def torch_entries(variables, channels):
  """Returns the variables under the names and in the layout of published code, float64."""
  entries = {}
  for path, values in jax.tree.leaves_with_path(variables):
    *modules, leaf = trees.path_names(path)[1:]
    values = np.asarray(values, np.float64)
    *place, last = modules
    place = [part.replace('_', '.') for part in place]
    last = {'shortcut_conv': 'shortcut.0', 'shortcut_norm': 'shortcut.1'}.get(last, last.replace('norm', 'bn'))
    inputs = channels if modules == ['conv1'] else None
    if leaf == 'kernel' and last == 'linear':
      values = values.T
    elif leaf == 'kernel':
      size = 1 if last == 'shortcut.0' else 3
      inputs = inputs or values.shape[1] // size**2
      ours = values.reshape(len(values), size, size, inputs)
      values = np.empty((len(values), inputs, size, size))
      for column, row, channel in np.ndindex(ours.shape[1:]):
        values[:, channel, row, column] = ours[:, column, row, channel]
    renamed = {'kernel': 'weight', 'scale': 'weight', 'mean': 'running_mean', 'var': 'running_var'}.get(leaf, leaf)
    entries['.'.join([*place, last, renamed])] = values
  return entries


def check_forward_pass(model, variables, entries, blocks, norm, sample_shape):
  images = np.random.default_rng(1).uniform(0, 1, (3, *sample_shape)).astype(np.float32)
  images *= np.float32([1, 0.5, 0.1]).reshape(3, 1, 1, 1)  # pixels are averaged: only contrast tells images apart
  evaluated, trained, features = jax.jit(
    lambda v: (model.apply(v, images, False)[0], model.apply(v, images, True)[0], model.features(v, images))
  )(variables)
  expected, pooled = residual_network(entries, images, blocks, norm, train=False)
  after, _ = residual_network(entries, images, blocks, norm, train=True)
  for ours, theirs in ((evaluated, expected), (trained, after), (features, pooled)):
    assert np.ptp(theirs, axis=0).max() > 0.1
    np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-4 * np.abs(theirs).max())


def check_drawn(model, blocks, norm, sample_shape):
  variables = drawn(model, sample_shape)
  check_forward_pass(model, variables, torch_entries(variables, sample_shape[-1]), blocks, norm, sample_shape)


@pytest.mark.long
@pytest.mark.parametrize(('norm', 'project'), [('batch', False), ('group', True)])
def test_two_blocks_against_numpy(norm, project):
  check_drawn(small(norm, project), (1, 1), norm, (7, 6, 3))


@pytest.mark.long
def test_bottlenecks_with_the_weights_of_torchvision_against_numpy(tmp_path):
  model = from_flax(resnet.ResNet(5, 'default', 'patches', 2, 'batch', (2, 1), True, True, 'imagenet'), 'small')
  rng, entries = np.random.default_rng(0), {}
  for name, shape in torchvision(50, 2, 3, 5, blocks=(2, 1)).items():
    scale = name.endswith(('running_var', 'bn1.weight', 'bn2.weight', 'bn3.weight', 'downsample.1.weight'))
    values = rng.uniform(0.5, 1.5, shape) if scale else rng.normal(size=shape) / np.sqrt(np.prod(shape[1:]) or 1)
    entries[name] = np.asarray(values, np.float32)
  variables = torch_weights.load(written('npz', entries, tmp_path), model, (19, 16, 3))
  common = {name: values.astype(np.float64) for name, values in torch_weights.common_names(entries).items()}
  check_forward_pass(model, variables, common, (2, 1), 'batch', (19, 16, 3))


@pytest.mark.slow
@pytest.mark.parametrize('conv', ['patches', 'native'])
@pytest.mark.parametrize(
  ('spec', 'blocks', 'norm'),
  [
    ('resnet20(width=4)', (3, 3, 3), 'batch'),
    ('resnet18(width=4)', (2, 2, 2, 2), 'batch'),
    ('resnet20(width=4,norm=group)', (3, 3, 3), 'group'),
  ],
)
def test_whole_networks_against_numpy(spec, blocks, norm, conv):
  check_drawn(models.create(spec, 10, conv=conv), blocks, norm, (16, 16, 3))


def test_an_odd_number_of_lacking_channels_is_padded_on_both_sides():
  x = np.arange(1, 2 * 5 * 4 * 1 + 1, dtype=np.float32).reshape(2, 5, 4, 1)
  padded = resnet.pad_shortcut(jnp.asarray(x), 4, 2)
  assert padded.shape == (2, 3, 2, 4)
  np.testing.assert_array_equal(padded[..., 1:2], x[:, ::2, ::2])
  assert not padded[..., [0, 2, 3]].any()


def test_batch_norm_keeps_a_tenth_of_each_batch():
  model = small(blocks=(1,))
  variables, images = drawn(model, (8, 8, 1)), np.random.default_rng(1).uniform(0, 1, (4, 8, 8, 1)).astype(np.float32)
  apply = jax.jit(model.apply, static_argnums=2)
  train, updated = apply(variables, images, True)
  evaluated, kept = apply(variables, images, False)
  assert np.abs(train - evaluated).max() > 0.1
  jax.tree.map(np.testing.assert_array_equal, kept, variables['batch_stats'])
  stem = convolve(images.transpose(0, 3, 1, 2), torch_entries(variables, 1)['conv1.weight'], 1)
  for statistic, batch in (('mean', stem.mean((0, 2, 3))), ('var', stem.var((0, 2, 3)))):
    expected = 0.9 * variables['batch_stats']['norm1'][statistic] + 0.1 * batch
    np.testing.assert_allclose(updated['norm1'][statistic], expected, rtol=1e-4, atol=1e-5)
  moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), updated, variables['batch_stats'])
  assert min(jax.tree.leaves(moved)) > 0
  assert np.abs(apply({**variables, 'batch_stats': updated}, images, False)[0] - evaluated).max() > 1e-3


def test_group_norm_is_one_function_of_each_image_alone():
  model = small('group', blocks=(1,))
  variables, images = drawn(model, (8, 8, 1)), np.random.default_rng(1).uniform(0, 1, (2, 8, 8, 1)).astype(np.float32)
  apply = jax.jit(model.apply, static_argnums=2)
  train, stats = apply(variables, images, True)
  np.testing.assert_allclose(apply(variables, images, False)[0], train, rtol=1e-6)
  assert stats == {}
  neighbour = np.stack([images[0], 1 - images[1]])
  np.testing.assert_allclose(apply(variables, neighbour, True)[0][0], train[0], rtol=1e-5)


@pytest.mark.long
def test_the_slope_of_gradient_matching_through_two_blocks():
  check_second_order(small(blocks=(1,)), (6, 6, 1))


@pytest.mark.slow
@pytest.mark.parametrize('norm', ['batch', 'group'])
def test_the_slope_of_gradient_matching_through_bottlenecks_and_the_pooling_of_the_stem(norm):
  module = resnet.ResNet(5, 'default', 'patches', 2, norm, (1,), True, True, 'imagenet')
  check_second_order(from_flax(module, 'small'), (8, 8, 1))


@pytest.mark.slow
@pytest.mark.parametrize('spec', ['resnet20(width=2)', 'resnet18(width=2,norm=group)', 'convnet9(width=2)'])
def test_the_slope_of_gradient_matching_on_whole_networks(spec):
  check_second_order(models.create(spec, 5, init='default'), (12, 12, 1))


def test_pixels_are_standardised_by_the_statistics_of_imagenet():
  assert PIXELS['imagenet'] == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
  grey = models.create('resnet20(width=2,pixels=imagenet)', 10)
  assert shapes_of(grey, (8, 8, 1))['params']['conv1']['kernel'].shape == (2, 27)  # grey as three equal channels
