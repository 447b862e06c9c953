"""LPIPS against NumPy and against its own package, FMSE by hand, and the weight files of LPIPS."""

import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradleak import metrics
from gradleak.core import errors
from gradleak.metrics import perceptual

# torchvision's `features` one after the other: (outputs, size, stride, padding) of a convolution, 'relu', ('pool',
# size, whether a window may reach over the edge), ('fire', squeezed, expanded); '*' after what LPIPS compares.
SEQUENCES = {
  'alex': [
    (64, 11, 4, 2), 'relu*', ('pool', 3, False), (192, 5, 1, 2), 'relu*', ('pool', 3, False), (384, 3, 1, 1), 'relu*',
    (256, 3, 1, 1), 'relu*', (256, 3, 1, 1), 'relu*',
  ],
  'vgg': [
    (64, 3, 1, 1), 'relu', (64, 3, 1, 1), 'relu*', ('pool', 2, False),
    (128, 3, 1, 1), 'relu', (128, 3, 1, 1), 'relu*', ('pool', 2, False),
    (256, 3, 1, 1), 'relu', (256, 3, 1, 1), 'relu', (256, 3, 1, 1), 'relu*', ('pool', 2, False),
    (512, 3, 1, 1), 'relu', (512, 3, 1, 1), 'relu', (512, 3, 1, 1), 'relu*', ('pool', 2, False),
    (512, 3, 1, 1), 'relu', (512, 3, 1, 1), 'relu', (512, 3, 1, 1), 'relu*',
  ],
  'squeeze': [
    (64, 3, 2, 0), 'relu*', ('pool', 3, True), ('fire', 16, 64), ('fire', 16, 64, '*'), ('pool', 3, True),
    ('fire', 32, 128), ('fire', 32, 128, '*'), ('pool', 3, True), ('fire', 48, 192, '*'), ('fire', 48, 192, '*'),
    ('fire', 64, 256, '*'), ('fire', 64, 256, '*'),
  ],
}  # fmt: skip
CHANNELS = {
  'alex': (64, 192, 384, 256, 256),
  'vgg': (64, 128, 256, 512, 512),
  'squeeze': (64, 128, 256, 384, 384, 512, 512),
}
SMALLEST = {'alex': 31, 'vgg': 16, 'squeeze': 17}
NAMES = list(SEQUENCES)


@functools.cache
def random_tensors(name):
  """Returns the tensors of a backbone by torchvision's names."""
  rng, inputs, found = np.random.default_rng(len(name)), 3, {}

  def convolution(place, inputs, outputs, size):
    scale = np.float32(np.sqrt(2 / (inputs * size**2)))
    found[f'features.{place}.weight'] = scale * rng.standard_normal((outputs, inputs, size, size), np.float32)
    found[f'features.{place}.bias'] = np.float32(0.1) * rng.standard_normal(outputs, np.float32)

  for place, layer in enumerate(SEQUENCES[name]):
    if layer[0] == 'fire':
      convolution(f'{place}.squeeze', inputs, layer[1], 1)
      convolution(f'{place}.expand1x1', layer[1], layer[2], 1)
      convolution(f'{place}.expand3x3', layer[1], layer[2], 3)
      inputs = 2 * layer[2]
    elif isinstance(layer[0], int):
      convolution(place, inputs, *layer[:2])
      inputs = layer[0]
  return found


def random_heads(name):
  """Returns LPIPS's own tensors, in the layout of its files."""
  rng = np.random.default_rng(9)
  return {
    f'lin{i}.model.1.weight': rng.uniform(0, 1, (1, channels, 1, 1)).astype(np.float32)
    for i, channels in enumerate(CHANNELS[name])
  }


@pytest.fixture(scope='module')
def files(tmp_path_factory):
  """Returns {backbone: (path of its weights, path of its heads)}."""
  folder = tmp_path_factory.mktemp('weights')
  found = {}
  for name in NAMES:
    found[name] = folder / f'{name}.npz', folder / f'{name}_heads.npz'
    np.savez(found[name][0], **random_tensors(name), **{'classifier.1.weight': np.zeros((2, 2), np.float32)})
    np.savez(found[name][1], **random_heads(name))
  return found


@pytest.fixture(scope='module')
def weights(files):
  """Returns {backbone: LpipsWeights}."""
  return {
    name: metrics.read_lpips(name, backbone_weights=backbone, heads=heads) for name, (backbone, heads) in files.items()
  }


def pair(side, channels=3, seed=0, n=2):
  rng = np.random.default_rng(seed)
  truth = rng.uniform(0, 1, (n, side, side, channels)).astype(np.float32)
  return (truth + 0.3 * rng.normal(size=truth.shape)).astype(np.float32), truth


def convolved(images, weight, bias, stride, padding):
  """A convolution of float64 [C, H, W], kernel position by kernel position."""
  images = np.pad(images, ((0, 0), (padding, padding), (padding, padding)))
  size = weight.shape[2]
  height, width = ((side - size) // stride + 1 for side in images.shape[1:])
  found = np.zeros((len(weight), height, width)) + bias[:, None, None]
  for i in range(size):
    for j in range(size):
      part = images[:, i : i + stride * height : stride, j : j + stride * width : stride][:, :height, :width]
      found += np.tensordot(weight[:, :, i, j].astype(np.float64), part, 1)
  return found


def pooled(images, size, ceil):
  """Window by window; a window that starts inside may reach over the edge."""
  starts = [
    [start for start in range(0, side, 2) if start + size <= side or (ceil and start + size <= side + 1)]
    for side in images.shape[1:]
  ]
  return np.stack(
    [np.stack([images[:, i : i + size, j : j + size].max((1, 2)) for j in starts[1]], 1) for i in starts[0]], 1
  )


def compared(name, tensors, image):
  """Yields what LPIPS compares of one image [H, W, 3], each [C, H', W']."""
  found = 2 * image.astype(np.float64) - 1
  found = (found - [-0.030, -0.088, -0.188]) / [0.458, 0.448, 0.450]
  found = found.transpose(2, 0, 1)
  for place, layer in enumerate(SEQUENCES[name]):
    at = f'features.{place}'

    def tensor(what, at=at):
      return tensors[f'{at}{what}.weight'], tensors[f'{at}{what}.bias']

    if layer[0] == 'pool':
      found = pooled(found, *layer[1:])
    elif layer[0] == 'fire':
      squeezed = np.maximum(convolved(found, *tensor('.squeeze'), 1, 0), 0)
      parts = (convolved(squeezed, *tensor(f'.expand{size}x{size}'), 1, size // 2) for size in (1, 3))
      found = np.maximum(np.concatenate(list(parts)), 0)
    elif isinstance(layer, str):
      found = np.maximum(found, 0)
    else:
      found = convolved(found, *tensor(''), *layer[2:])
    if layer[-1] == '*':
      yield found


def lpips_of_numpy(name, reconstruction, truth):
  """LPIPS of two images in [0, 1], float64."""
  tensors, heads, distance = random_tensors(name), random_heads(name), 0
  features = zip(compared(name, tensors, reconstruction), compared(name, tensors, truth), strict=True)
  for (x, y), head in zip(features, heads.values(), strict=True):
    x, y = (each / (np.sqrt((each**2).sum(0)) + 1e-10) for each in (x, y))
    distance += np.mean(np.tensordot(head.reshape(-1).astype(np.float64), (x - y) ** 2, 1))
  return distance


@pytest.mark.long
@pytest.mark.parametrize(
  'name, side',
  [
    *(('alex', 31), ('vgg', 18), ('squeeze', 26)),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in [('alex', 39), ('squeeze', 17)]),
  ],
)
def test_lpips_equals_numpy(name, side, weights):
  reconstructions, truth = pair(side)
  expected = [lpips_of_numpy(name, np.clip(r, 0, 1), t) for r, t in zip(reconstructions, truth, strict=True)]
  np.testing.assert_allclose(jax.jit(metrics.lpips)(reconstructions, truth, weights[name]), expected, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore::UserWarning')  # torchvision's, of arguments that lpips passes
@pytest.mark.parametrize('name', NAMES)
def test_lpips_equals_its_package(name, files):
  """On a random backbone that both are given, with the heads that come with the package."""
  torch, lpips = pytest.importorskip('torch'), pytest.importorskip('lpips')
  package, own = lpips.LPIPS(net=name, pnet_rand=True, verbose=False), random_tensors(name)
  names = {key: re.sub(r'^net\.slice\d+\.', 'features.', key) for key in package.state_dict()}
  given = {key: torch.from_numpy(own[theirs]) for key, theirs in names.items() if theirs in own}
  assert len({names[key] for key in given}) == len(own)
  package.load_state_dict(given, strict=False)
  heads = pathlib.Path(lpips.__file__).parent / 'weights' / 'v0.1' / f'{name}.pth'
  weights = metrics.read_lpips(name, backbone_weights=files[name][0], heads=heads)
  images = [np.clip(each, 0, 1) for each in pair(64)]
  with torch.no_grad():
    expected = package(*(torch.from_numpy(each.transpose(0, 3, 1, 2)) for each in images), normalize=True)
  np.testing.assert_allclose(metrics.lpips(*images, weights), expected.numpy().reshape(-1), rtol=1e-5)


@pytest.mark.long
def test_lpips_of_equal_images_is_zero_and_grows_with_noise(weights):
  lpips = jax.jit(metrics.lpips)
  _, truth = pair(32, n=1)
  noise = np.random.default_rng(3).normal(size=truth.shape).astype(np.float32)
  values = [float(lpips(truth + np.float32(s) * noise, truth, weights['squeeze'])[0]) for s in (0, 0.01, 0.1, 0.5)]
  assert values[0] == 0 and values == sorted(set(values))
  outside = np.where(truth > 0.5, 3, -1).astype(np.float32)
  assert float(lpips(outside, np.clip(outside, 0, 1), weights['squeeze'])[0]) == 0


@pytest.mark.long
def test_lpips_is_pure_and_repeats_grey(weights):
  lpips, given = jax.jit(metrics.lpips), weights['squeeze']
  reconstructions, truth = pair(20, channels=1, n=3)
  expected = np.asarray(lpips(*(np.repeat(each, 3, axis=3) for each in (reconstructions, truth)), given))
  np.testing.assert_allclose(lpips(reconstructions, truth, given), expected, rtol=1e-5)
  batched = jax.jit(jax.vmap(metrics.lpips, (0, 0, None)))(reconstructions[:, None], truth[:, None], given)
  np.testing.assert_allclose(batched[:, 0], expected, rtol=1e-4)
  np.testing.assert_allclose(lpips(truth, reconstructions, given), expected, rtol=1e-5)
  reconstructions[1, 3, 4, 0] = np.nan
  values = np.asarray(lpips(reconstructions, truth, given))
  assert np.isnan(values[1])
  np.testing.assert_allclose(values[[0, 2]], expected[[0, 2]], rtol=1e-5)


@pytest.mark.long
def test_lpips_has_a_gradient_also_where_features_are_zero(weights):
  given = jax.tree.map(jnp.zeros_like, weights['squeeze'])
  reconstructions, truth = pair(17, n=1)
  slope = jax.jit(jax.grad(lambda images: metrics.lpips(images, truth, given).sum()))(reconstructions)
  assert np.isfinite(slope).all()


@pytest.mark.parametrize('name', NAMES)
def test_images_that_are_too_small_or_have_other_channels_are_refused(name, weights):
  side = SMALLEST[name]
  message = f'have {side - 1}×40 pixels, too few for LPIPS with the backbone {name!r}.*17 for .squeeze'
  with pytest.raises(errors.UsageError, match=message):
    metrics.lpips(*(np.zeros((1, side - 1, 40, 3), np.float32),) * 2, weights[name])
  with pytest.raises(errors.UsageError, match='2 channels, and LPIPS compares images of 1 or 3'):
    metrics.lpips(*(np.zeros((1, 40, 40, 2), np.float32),) * 2, weights[name])
  with pytest.raises(errors.UsageError, match=r'weights is None, expected what gradleak\.metrics.read_lpips returns'):
    metrics.lpips(*pair(40), None)


def test_files_of_another_backbone_are_refused_by_the_tensors_that_are_missing(files):
  backbone, heads = files['alex']
  for given, expected in (
    (('vgg', backbone, heads), "not those of torchvision's VGG-16: missing: features.2.weight"),
    (
      ('alex', files['vgg'][0], heads),
      r'features.3.weight.*features.0.weight \(64, 3, 3, 3\), expected \(64, 3, 11',
    ),
    (('alex', backbone, files['vgg'][1]), r'LPIPS with AlexNet: of another shape: lin1 \(128,\), expected \(192,\)'),
    (('squeeze', files['squeeze'][0], heads), 'SqueezeNet 1.1: missing: lin5, lin6'),
    (('resnet', backbone, heads), "unknown LPIPS backbone 'resnet'.*alex, squeeze, vgg"),
    (('alex', None, heads), 'backbone_weights is None, expected a path'),
    (('alex', backbone, 3), 'heads is 3, expected a path'),
    (('alex', heads.with_name('none.npz'), heads), 'none.npz.*No such file'),
  ):
    with pytest.raises(errors.UsageError, match=expected):
      metrics.read_lpips(given[0], backbone_weights=given[1], heads=given[2])


def test_hostile_weights_are_refused(files, tmp_path):
  backbone, heads = files['squeeze']
  for name, change, expected in (
    ('nan', lambda array: np.where(array > 1, np.nan, array), 'not finite: lin0'),
    ('large', lambda array: array.astype(np.float64) * 1e300, 'not finite: lin0'),
    ('integer', lambda array: array.astype(np.int32), r'no floats: lin0 \(int32\)'),
    ('transposed', lambda array: array.reshape(-1, 1, 1, 1), r'of another shape: lin0 \(64, 1, 1, 1\)'),
  ):
    bad = {key: change(np.asarray(array) * 2) for key, array in random_heads('squeeze').items()}
    np.savez(tmp_path / f'{name}.npz', **bad)
    with pytest.raises(errors.UsageError, match=f'{name}.npz.*{expected}'):
      metrics.read_lpips('squeeze', backbone_weights=backbone, heads=tmp_path / f'{name}.npz')
  (tmp_path / 'pickle').write_bytes(b'\x80\x02cposix\nsystem\nX\x04\x00\x00\x00true\x85R.')
  np.savez(tmp_path / 'objects.npz', lin0=np.array([{}], object))
  for name in ('pickle', 'objects.npz'):
    with pytest.raises(errors.UsageError, match='cannot read the weights'):
      metrics.read_lpips('squeeze', backbone_weights=tmp_path / name, heads=heads)


def test_heads_without_the_names_of_modules_are_the_same(files, weights, tmp_path):
  bare = {key.split('.')[0]: array.reshape(-1) for key, array in random_heads('squeeze').items()}
  np.savez(tmp_path / 'bare.npz', **bare)
  found = metrics.read_lpips('squeeze', backbone_weights=files['squeeze'][0], heads=tmp_path / 'bare.npz')
  assert found.digest() == weights['squeeze'].digest() != weights['alex'].digest()


def test_the_smallest_sides_are_those_at_which_every_stage_has_an_output(weights):
  for name, smallest in SMALLEST.items():
    network = perceptual._BACKBONES[name]

    def last(images, network=network, name=name):
      for layer in (layer for stage in network.stages for layer in stage):
        images = layer(weights[name].tensors, images)
      return images

    sides = [
      jax.eval_shape(last, jax.ShapeDtypeStruct((1, side, side, 3), jnp.float32)).shape[1]
      for side in (smallest, smallest - 1)
    ]
    assert sides == [1, 0]


def test_fmse_is_the_error_of_the_features():
  reconstructions, truth = pair(5, n=3)
  matrix = np.random.default_rng(1).normal(size=(75, 4)).astype(np.float32)

  def features(images):
    return images.reshape(-1, 75) @ matrix

  expected = np.mean(((reconstructions - truth).reshape(3, 75).astype(np.float64) @ matrix) ** 2, axis=1)
  found = jax.jit(lambda *images: metrics.fmse(*images, features))
  np.testing.assert_allclose(found(reconstructions, truth), expected, rtol=1e-4)
  assert not found(truth, truth).any()
  reconstructions[1, 2, 2, 0] = np.nan
  values = metrics.fmse(reconstructions, truth, lambda images: jnp.nan_to_num(features(images)))
  np.testing.assert_array_equal(np.isnan(values), [False, True, False])
