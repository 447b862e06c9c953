"""Vision transformers: sizes, layers, timm's weights, the forward pass against NumPy, and recovery."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

import gradleak as gl
from gradleak import models
from gradleak.core import errors
from gradleak.models import torch_weights
from tests.models.recovery import recover
from tests.models.second_order import check_second_order
from tests.models.shapes import common_sizes, count, shapes, torch_sizes
from tests.models.test_torch_weights import written

TINY = 'vit_tiny(depth=2,width=8,heads=2)'


def timm(width, depth, patch, tokens, channels, classes):
  """Returns the names and shapes of a state_dict of timm's VisionTransformer."""
  found = {
    'cls_token': (1, 1, width),
    'pos_embed': (1, tokens + 1, width),
    'patch_embed.proj.weight': (width, channels, patch, patch),
    'patch_embed.proj.bias': (width,),
  }
  dense = {'attn.qkv': (3 * width, width), 'attn.proj': (width, width), 'mlp.fc1': (4 * width, width)}
  for i in range(depth):
    for name, shape in {**dense, 'mlp.fc2': (width, 4 * width)}.items():
      found |= {f'blocks.{i}.{name}.weight': shape, f'blocks.{i}.{name}.bias': shape[:1]}
    found |= {f'blocks.{i}.norm{j}.{part}': (width,) for j in (1, 2) for part in ('weight', 'bias')}
  found |= {'norm.weight': (width,), 'norm.bias': (width,)}
  return {**found, 'head.weight': (classes, width), 'head.bias': (classes,)}


def drawn(names, seed=0):
  """Returns values of these shapes: norms about one, dense layers of unit gain."""
  rng = np.random.default_rng(seed)

  def one(name, shape):
    if 'norm' in name and name.endswith('weight'):
      return rng.uniform(0.5, 1.5, shape).astype(np.float32)
    fan_in = np.prod(shape[1:]) if name.endswith('weight') else 4
    return (rng.normal(size=shape) / np.sqrt(fan_in)).astype(np.float32)

  return {name: one(name, shape) for name, shape in names.items()}


@pytest.mark.long
@pytest.mark.parametrize(('spec', 'width', 'published'), [('vit_tiny', 192, 5_717_416), ('vit_small', 384, 22_050_664)])
def test_published_sizes(spec, width, published):
  variables = shapes(f'{spec}(patch=16)', (224, 224, 3), 1000)
  theirs = timm(width, 12, 16, 196, 3, 1000)
  assert len(theirs) == 152
  assert count(variables) == published
  assert torch_sizes(variables) == common_sizes(theirs)


def test_layers_are_in_forward_order():
  layers = models.create(TINY, 10).layers((8, 8, 1))
  block = [f'attn/{part}' for part in ('q', 'k', 'v', 'proj')] + ['mlp/fc1', 'mlp/fc2']
  expected = ['patch_embed/proj', 'tokens', *(f'blocks_{i}/{part}' for i in (0, 1) for part in block), 'linear']
  assert [layer.name for layer in layers] == expected


# A reference in NumPy, in float64, from the names of timm's code.


def dense(x, entries, name):
  return x @ entries[f'{name}.weight'].T + entries[f'{name}.bias']


def layer_norm(x, entries, name):
  x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
  return x * entries[f'{name}.weight'] + entries[f'{name}.bias']


def transformer(entries, images, depth, heads):
  """Returns (logits, the class token behind the last norm) of images [N, H, W, C], one at a time."""
  entries = {name: values.astype(np.float64) for name, values in entries.items()}
  kernel = entries['patch_embed.proj.weight']
  size = kernel.shape[-1]
  logits, features = [], []
  for image in images.astype(np.float64):
    tokens = [entries['cls_token'][0, 0]]
    for i in range(0, image.shape[0], size):
      for j in range(0, image.shape[1], size):
        part = np.einsum('ocij,ijc->o', kernel, image[i : i + size, j : j + size])
        tokens.append(part + entries['patch_embed.proj.bias'])
    x = np.stack(tokens) + entries['pos_embed'][0]
    for block in range(depth):
      place = f'blocks.{block}'
      joint = dense(layer_norm(x, entries, f'{place}.norm1'), entries, f'{place}.attn.qkv')
      each = joint.reshape(len(x), 3, heads, -1)
      mixed = []
      for head in range(heads):
        query, key, value = each[:, :, head].transpose(1, 0, 2)
        scores = np.exp(query @ key.T / np.sqrt(query.shape[1]))
        mixed.append(scores / scores.sum(1, keepdims=True) @ value)
      x = x + dense(np.concatenate(mixed, axis=1), entries, f'{place}.attn.proj')
      y = dense(layer_norm(x, entries, f'{place}.norm2'), entries, f'{place}.mlp.fc1')
      y = y * 0.5 * (1 + scipy.special.erf(y / np.sqrt(2)))
      x = x + dense(y, entries, f'{place}.mlp.fc2')
    features.append(layer_norm(x, entries, 'norm')[0])
    logits.append(dense(features[-1], entries, 'head'))
  return np.stack(logits), np.stack(features)


@pytest.fixture(scope='module')
def entries():
  """Returns a state_dict of a transformer of two blocks for colour images of 8×12."""
  return drawn(timm(8, 2, 4, 6, 3, 10))


@pytest.mark.long
def test_weights_of_timm_give_the_logits_of_numpy(entries, tmp_path):
  model = models.create(TINY, 10)
  variables = torch_weights.load(written('safetensors', entries, tmp_path), model, (8, 12, 3))
  models.check_variables(model, variables, (8, 12, 3))
  images = np.random.default_rng(1).uniform(0, 1, (3, 8, 12, 3)).astype(np.float32)
  computed = jax.jit(lambda v: (model.apply(v, images, False)[0], model.features(v, images)))(variables)
  expected = transformer(entries, images, 2, 2)
  assert np.ptp(expected[0], axis=0).max() > 0.1
  for ours, theirs in zip(computed, expected, strict=True):
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_pixels_of_timm_are_about_zero(entries, tmp_path):
  model = models.create(TINY[:-1] + ',pixels=half)', 10)
  variables = torch_weights.load(written('zip', entries, tmp_path), model, (8, 12, 3))
  images = np.random.default_rng(1).uniform(0, 1, (1, 8, 12, 3)).astype(np.float32)
  expected, _ = transformer(entries, 2 * images - 1, 2, 2)
  np.testing.assert_allclose(jax.jit(model.apply)(variables, images)[0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_weights_that_do_not_fit_are_named(entries, tmp_path):
  def message(arrays, spec=TINY, sample_shape=(8, 12, 3)):
    with pytest.raises(errors.UsageError) as caught:
      torch_weights.load(written('npz', arrays, tmp_path), models.create(spec, 10), sample_shape)
    return str(caught.value)

  fewer = {name: values for name, values in entries.items() if name != 'blocks.1.attn.qkv.bias'}
  listed = ', '.join(f'blocks.1.attn.{part}.bias' for part in 'kqv')
  assert message(fewer).endswith(f'missing: {listed}')
  assert message({**entries, 'fc_norm.weight': np.ones(8)}).endswith('not in the model: fc_norm.weight')
  odd = {**entries, 'blocks.0.attn.qkv.bias': np.ones(23)}
  assert 'not in the model: blocks.0.attn.qkv.bias' in message(odd)
  assert 'pos_embed (7, 8) where the model has (5, 8)' in message(entries, sample_shape=(8, 8, 3))
  assert 'patch_embed.proj.weight (8, 48) where the model has (16, 8)' in message(entries, sample_shape=(8, 12, 1))
  assert 'patch_embed.proj.weight (8, 48) where the model has (12, 8)' in message(
    entries, TINY[:-1] + ',patch=2)', (4, 6, 3)
  )


@pytest.mark.slow
def test_the_head_of_another_number_of_classes_is_drawn(entries, tmp_path):
  model, path = models.create(TINY, 4, init='default'), written('npz', entries, tmp_path)
  variables = torch_weights.load(path, model, (8, 12, 3), head=jax.random.key(0))
  drawn = jax.jit(model.init, static_argnums=1)(jax.random.key(0), (8, 12, 3))['params']['linear']
  jax.tree.map(np.testing.assert_array_equal, variables['params']['linear'], drawn)
  assert drawn['kernel'].shape == (8, 4) and np.ptp(drawn['kernel']) > 0.1
  np.testing.assert_array_equal(variables['params']['norm']['scale'], entries['norm.weight'])
  with pytest.raises(errors.UsageError, match=r'linear\.weight \(10, 8\) where the model has \(8, 4\)'):
    torch_weights.load(path, model, (8, 12, 3))


def test_a_captured_update_of_timm_is_read(entries, tmp_path):
  model, path = models.create(TINY, 10), written('npz', entries, tmp_path)
  variables = torch_weights.load(path, model, (8, 12, 3))
  read = gl.read_update(path, model, variables, sample_shape=(8, 12, 3))
  jax.tree.map(np.testing.assert_array_equal, read, variables['params'])


@pytest.mark.long
def test_large_scores_do_not_overflow():
  model = models.create('vit_tiny(depth=1,width=8,heads=2)', 10)
  images = np.random.default_rng(1).uniform(0, 1, (2, 8, 8, 1)).astype(np.float32)

  @jax.jit
  def run(key):
    variables = model.init(key, (8, 8, 1))

    def loss(params):
      params = jax.tree.map(lambda x: 1e6 * x, params)
      return jnp.sum(model.apply({'params': params}, images)[0])

    return jax.value_and_grad(loss)(variables['params'])

  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(run(jax.random.key(0))))


@pytest.mark.slow
def test_the_slope_of_gradient_matching():
  check_second_order(models.create('vit_tiny(depth=1,width=8,heads=2)', 5, init='default'), (8, 8, 1))


@pytest.mark.parametrize('sample_shape', [(9, 8, 1), (8, 25, 3)])
def test_images_that_the_patches_do_not_cover(sample_shape):
  expected = f'patch=4 needs images whose sides are multiples of 4, got {sample_shape[0]}×{sample_shape[1]}'
  with pytest.raises(errors.UsageError, match=expected):
    shapes(TINY, sample_shape)


@pytest.mark.slow
def test_a_face_is_reconstructed_beyond_its_control():
  model = models.create('vit_tiny(depth=2,patch=4)', 2, init='default')
  reached, controls, correlation = recover(model, gl.attacks.csdlg_fast(steps=200, tv=1e-5, learning_rate=0.1))
  assert reached > max(controls) + 6 and correlation > 0.5
