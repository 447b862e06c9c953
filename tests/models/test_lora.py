import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import gradleak as gl
from gradleak import Client, attacks, models
from gradleak.core import trees
from gradleak.models import layers
from gradleak.models.lora import lora
from gradleak.models.normalisation import normalised
from gradleak.models.state_dict import Entry, Layout
from gradleak.studies.captured import derived_sample_shape
from gradleak.threat import Knowledge, Observation


@pytest.fixture(scope='module')
def adapted():
  base = models.create('lenet', 5, init='default')
  model = models.create('lenet+lora(rank=2)', 5, init='default')
  return base, model, jax.jit(model.init, static_argnums=1)(jax.random.key(0), (8, 8, 1))


def test_adapters_start_as_the_base_and_are_all_there_is_to_train(adapted):
  base, model, variables = adapted
  images = jax.random.uniform(jax.random.key(1), (3, 8, 8, 1))
  np.testing.assert_allclose(
    jax.jit(model.apply)(variables, images)[0], jax.jit(base.apply)({'params': variables['base']}, images)[0], atol=1e-6
  )
  kernel = variables['base']['Dense_0']['kernel']
  shapes = {name: leaf.shape for name, leaf in variables['params']['Dense_0']['kernel'].items()}
  assert shapes == {'a': (kernel.shape[0], 2), 'b': (2, 5)}
  assert not any('bias' in str(path) for path, _ in jax.tree_util.tree_leaves_with_path(variables['params']))
  names = [path for layer in model.layers((8, 8, 1)) for path in layer.paths]
  assert len(names) == len(jax.tree.leaves(variables['params'])) and ('Dense_0', 'kernel', 'a') in names


@pytest.mark.long
def test_the_gradient_is_that_of_the_weights_through_the_adapters(adapted):
  base, model, variables = adapted
  moved = jax.tree.map(lambda x: x + 0.1, variables['params'])
  images, labels = jax.random.uniform(jax.random.key(1), (2, 8, 8, 1)), jnp.asarray([0, 3])
  update = jax.jit(Client(model, 5).local_update)(None, {**variables, 'params': moved}, images, labels).update
  adapter = moved['Dense_0']['kernel']
  merged = jax.tree.map(lambda x: x, variables['base'])

  def merge(tree, adapters):
    if 'a' in adapters:
      change = 4.0 * (adapters['a'] @ adapters['b'])
      return tree + (change if change.shape == tree.shape else change.T)  # kernels of convolutions are [features, …]
    return {name: merge(leaf, adapters[name]) if name in adapters else leaf for name, leaf in tree.items()}

  full = jax.jit(Client(base, 5).local_update)(None, {'params': merge(merged, moved)}, images, labels).update
  whole = full['Dense_0']['kernel']
  np.testing.assert_allclose(update['Dense_0']['kernel']['b'], 4.0 * adapter['a'].T @ whole, rtol=1e-3, atol=1e-5)
  np.testing.assert_allclose(update['Dense_0']['kernel']['a'], 4.0 * whole @ adapter['b'].T, rtol=1e-3, atol=1e-5)


@pytest.mark.long
def test_it_is_attacked_like_any_model(adapted):
  _, model, variables = adapted
  client, image = Client(model, 5), jax.random.uniform(jax.random.key(1), (1, 8, 8, 1))
  label = jax.nn.one_hot(jnp.asarray([2]), 5)
  seen = Observation(
    variables, jax.jit(client.local_update)(None, variables, image, label).update, label, Knowledge(), image.shape, 5
  )
  attack = attacks.csdlg(steps=2)(client)
  _, info = jax.jit(attack.step)(jax.jit(attack.init)(jax.random.key(2), seen), seen)
  assert np.isfinite(float(info['objective'])) and float(jax.jit(attack.objective)(seen, image, label)) < 1e-4


@pytest.mark.parametrize('name', ['network', 'lora', 'only', 'normalised'])
def test_wrappers_keep_how_variables_stand_in_pytorch(name, tmp_path):
  """A network with PyTorch's names, without PyTorch: a flattened map of 3 channels and 2×2 pixels, then two layers."""
  rng = np.random.default_rng(0)

  def init(key, shape):
    keys = jax.random.split(key)
    weights = jax.random.normal(keys[0], (12, 6)), jax.random.normal(keys[1], (6, 3))
    return {f'fc{i}': {'weight': w, 'bias': jnp.zeros(w.shape[1])} for i, w in enumerate(weights)}

  def apply(params, images):
    x = images.reshape(images.shape[0], -1)
    first, last = params['fc0'], params['fc1']
    hidden = jnp.tanh(x @ first['weight'] + first['bias'].reshape(1, -1))
    return hidden @ last['weight'] + last['bias'].reshape(1, -1)

  def entry(module, part, shape, image=()):
    return Entry(f'{module}.{part}', ('params', module, part), shape, 'float32', len(shape) == 2, image)

  entries = (
    entry('fc0', 'weight', (6, 12), (3, 2, 2)), entry('fc0', 'bias', (6,)),
    entry('fc1', 'weight', (3, 6)), entry('fc1', 'bias', (3,)),
  )  # fmt: skip
  base = models.from_functions(init, apply)._replace(layout=Layout(entries, (2, 2, 3)))
  model = {
    'network': lambda: base,
    'lora': lambda: lora(base, rank=2),
    'only': lambda: lora(base, rank=2, only='fc0'),
    'normalised': lambda: normalised(base, pixels='cifar10'),
  }[name]()
  variables = model.init(jax.random.key(0), (2, 2, 3))
  update = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), variables['params'])
  theirs = model.layout.to_theirs({**variables, 'params': update})
  sent = {one.name: theirs[one.name] for one in model.layout.entries if one.path[0] == 'params'}
  if name == 'lora':
    a, b = update['fc0']['weight']['a'], update['fc0']['weight']['b']
    np.testing.assert_array_equal(sent['fc0.lora_B.weight'], b.T)
    turned = np.moveaxis(a.T.reshape(2, 2, 2, 3), -1, 1).reshape(2, 12)  # channels last → first
    np.testing.assert_array_equal(sent['fc0.lora_A.weight'], turned)
  if name == 'only':
    assert set(sent) == {'fc0.lora_A.weight', 'fc0.lora_B.weight'}
  np.savez(tmp_path / 'update.npz', **{f'base_model.model.{key}': x for key, x in sent.items()})
  np.savez(tmp_path / 'whole.npz', **theirs)
  np.savez(tmp_path / 'listed.npz', *sent.values())
  own = [update] if name in ('lora', 'only') else []  # else names are PyTorch's, and so is the layout
  for given in (tmp_path / 'update.npz', tmp_path / 'whole.npz', tmp_path / 'listed.npz', sent, *own):
    read = gl.read_update(given, model, variables)
    jax.tree.map(np.testing.assert_array_equal, read, update)
  assert derived_sample_shape(model, variables) == (2, 2, 3)


class Convolution(nn.Module):
  """One convolution of 3×3 pixels and its mean, in Flax."""

  @nn.compact
  def __call__(self, images):
    return nn.Conv(5, (3, 3))(images).mean((1, 2))


class Own(nn.Module):
  """The same with a kernel [features, 3·3·channels]."""

  formulation: str

  @nn.compact
  def __call__(self, images):
    return layers.Conv(5, 3, 'default', padding=1, formulation=self.formulation, name='Conv_0')(images).mean((1, 2))


def turned(params, images):
  """A dense layer with a kernel [out, in]."""
  return images.reshape(images.shape[0], -1) @ params['kernel'].T


CONVOLUTIONS = {
  'flax': lambda: models.from_flax(Convolution()),
  'patches': lambda: models.from_flax(Own('patches')),
  'native': lambda: models.from_flax(Own('native')),
  'hybrid': lambda: models.from_flax(Own('hybrid')),
  'turned': lambda: models.from_functions(
    lambda key, shape: {'Conv_0': {'kernel': jax.random.normal(key, (5, 9 * 16))}},
    lambda params, images: turned(params['Conv_0'], images[:, :3, :3]),
  ),
}


@pytest.mark.parametrize('name', CONVOLUTIONS)
def test_the_rows_of_a_kernel_are_its_inputs_in_any_layout(name):
  base = CONVOLUTIONS[name]()
  model, shape = lora(base, rank=2), (12, 12, 16)
  variables = model.init(jax.random.key(0), shape)
  adapter, kernel = variables['params']['Conv_0']['kernel'], variables['base']['Conv_0']['kernel']
  assert (adapter['a'].shape, adapter['b'].shape) == ((144, 2), (2, 5)) and not adapter['b'].any()
  changed = {**adapter, 'b': jax.random.normal(jax.random.key(1), (2, 5))}
  change = 4 * changed['a'] @ changed['b']
  held = variables['base']['Conv_0']
  whole = {**held, 'kernel': kernel + (change.reshape(kernel.shape) if kernel.ndim == 4 else change.T)}
  images = jax.random.uniform(jax.random.key(2), (2, *shape))
  given = {**variables, 'params': {'Conv_0': {'kernel': changed}}}
  wanted = base.apply({'params': {'Conv_0': whole}}, images)[0]
  np.testing.assert_allclose(jax.jit(model.apply)(given, images)[0], wanted, rtol=1e-4, atol=1e-4)


def blocks(params, images):
  """A dense layer whose kernel is written into a larger array first."""
  kernel = jnp.zeros((5, 4), jnp.float32).at[:4, :3].set(params['kernel'])
  return images.reshape(len(images), -1) @ kernel[:4, :3]


def test_networks_that_a_trace_follows_only_in_part_are_adapted():
  """An initialisation by NumPy cannot be traced, and what is set into zeros is no longer followed."""

  def init(key, shape):
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
    return {'kernel': jnp.asarray(rng.normal(size=(shape[0] * shape[1], 3)), jnp.float32)}

  model = lora(models.from_functions(init, blocks), rank=2)
  variables = model.init(jax.random.key(0), (2, 2, 1))
  images = jax.random.uniform(jax.random.key(1), (2, 2, 2, 1))
  np.testing.assert_allclose(jax.jit(model.apply)(variables, images)[0], blocks(variables['base'], images), rtol=1e-6)


def test_biases_of_several_axes_and_added_positions_are_no_weight_matrices():
  class Attended(nn.Module):
    @nn.compact
    def __call__(self, x):
      x = x.reshape(len(x), -1, 4) + self.param('pos_embed', nn.initializers.normal(), (1, 4, 4))
      x = nn.DenseGeneral((2, 3), name='heads')(x)
      return nn.Dense(3)(x.reshape(len(x), -1))

  base = models.from_flax(Attended())
  adapters = jax.eval_shape(lambda: lora(base).init(jax.random.key(0), (4, 4, 1)))['params']
  assert {path for path, _ in ((trees.path_names(p)[:-1], x) for p, x in jax.tree.leaves_with_path(adapters))} == {
    ('heads', 'kernel'),
    ('Dense_0', 'kernel'),
  }


class Attention(nn.Module):
  """That of Flax: a kernel [in, heads, size] of each of queries, keys and values, and one [heads, size, out] behind."""

  tokens: bool = False

  @nn.compact
  def __call__(self, x):
    x = nn.Embed(11, 8)(x) if self.tokens else x.reshape(len(x), -1, 8)
    x = nn.MultiHeadDotProductAttention(num_heads=2, qkv_features=6, name='attention')(x, x)
    x = jnp.einsum('ntd,dhk->nthk', x, self.param('own', nn.initializers.normal(), (8, 3, 2)))
    return nn.Dense(3)(x.sum(1).reshape(len(x), -1))


class Attending(nnx.Module):
  """The same in NNX."""

  def __init__(self, rngs):
    given = {'num_heads': 2, 'in_features': 8, 'qkv_features': 6, 'decode': False}
    self.attention = nnx.MultiHeadAttention(**given, rngs=rngs)
    self.own = nnx.Param(0.01 * jax.random.normal(rngs.params(), (8, 3, 2)))
    self.head = nnx.Linear(6, 3, rngs=rngs)

  def __call__(self, x):
    x = self.attention(x.reshape(len(x), -1, 8))
    x = jnp.einsum('ntd,dhk->nthk', x, self.own[...])
    return self.head(x.sum(1).reshape(len(x), -1))


ATTENTIONS = {
  'linen': lambda: (models.from_flax(Attention()), (4, 4, 2)),
  'nnx': lambda: (models.from_nnx(Attending(nnx.Rngs(0))), (4, 4, 2)),
  'tokens': lambda: (models.from_flax(Attention(tokens=True), axes=1, dtype='int32'), (5,)),
}


@pytest.mark.long
@pytest.mark.parametrize('name', ATTENTIONS)
def test_the_sides_of_attention_are_inputs_and_outputs_however_many_axes_they_have(name):
  base, shape = ATTENTIONS[name]()
  model = lora(base, rank=2)
  variables = model.init(jax.random.key(0), shape)
  sides = {
    trees.path_names(path): (leaf['a'].shape[0], leaf['b'].shape[1])
    for path, leaf in jax.tree.leaves_with_path(variables['params'], is_leaf=lambda one: 'a' in one)
  }
  kernels = {path[-2]: found for path, found in sides.items() if path[0] == 'attention'}
  assert kernels == {**dict.fromkeys(('query', 'key', 'value'), (8, 6)), 'out': (6, 8)}
  assert sides[('own',)] == (8, 6)
  if name == 'tokens':
    assert sides[('Embed_0', 'embedding')] == (11, 8)
  moved = jax.tree.map(lambda leaf: leaf + 0.1, variables['params'])
  samples = jnp.ones((2, *shape), jnp.int32 if name == 'tokens' else jnp.float32)

  def merged(path, kernel):
    adapter = trees.get(moved, trees.path_names(path)) if kernel.ndim > 1 and 'bias' not in str(path) else None
    return kernel if adapter is None else kernel + 4 * (adapter['a'] @ adapter['b']).reshape(kernel.shape)

  whole = jax.tree.map_with_path(merged, variables['base'])
  wanted = base.apply({'params': whole}, samples)[0]
  np.testing.assert_allclose(model.apply({**variables, 'params': moved}, samples)[0], wanted, rtol=1e-4, atol=1e-4)


def test_the_kernels_of_several_blocks_in_one_array_are_refused():
  class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
      return nn.tanh(nn.Dense(8)(x)), None

  class Blocks(nn.Module):
    @nn.compact
    def __call__(self, x):
      blocks = nn.scan(Block, variable_axes={'params': 0}, split_rngs={'params': True}, length=3)
      return nn.Dense(3)(blocks(name='blocks')(x.reshape(len(x), -1), None)[0])

  base = models.from_flax(Blocks())
  with pytest.raises(gl.UsageError, match=r'blocks/Dense_0/kernel of the model .* holds the kernels of several blocks'):
    jax.eval_shape(lambda: lora(base).init(jax.random.key(0), (2, 2, 2)))


@pytest.mark.long
@pytest.mark.parametrize('spec', ['convnet(width=16)', 'resnet20(width=16)', 'vgg11(width=16)'])
def test_every_convolution_of_the_library_has_its_features_as_columns(spec):
  base, model, shape = models.create(spec, 3), models.create(f'{spec}+lora(rank=2)', 3), (32, 32, 3)
  found = set()

  def watch(call, args, kwargs, context):
    found.update([(*context.module.path, 'kernel')] if isinstance(context.module, layers.Conv) else [])
    return call(*args, **kwargs)

  with nn.intercept_methods(watch):
    jax.eval_shape(lambda: base.init(jax.random.key(0), shape))
  made = jax.eval_shape(lambda: model.init(jax.random.key(0), shape))
  assert len(found) > 3
  for path in found:
    adapter = trees.get(made['params'], path)
    assert (adapter['b'].shape[1], adapter['a'].shape[0]) == trees.get(made['base'], path).shape
