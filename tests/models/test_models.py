"""The registry's models, and a user's own networks as models."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from gradleak import models
from gradleak.core import errors, trees
from gradleak.models.model import require
from tests.models.shapes import count, drawn, shapes, shapes_of

SPECS = {
  'mlp': (5, 5, 1),
  'cnn': (6, 6, 1),
  'lenet': (8, 8, 1),
  'lenet4': (8, 8, 1),
  'convnet(width=2)': (12, 12, 1),
  'vgg11(width=2)': (8, 8, 1),
}
# Their logits are compared with NumPy in test_resnet.py, test_vgg.py and test_vit.py.
PUBLISHED = {
  'convnet9(width=2)': (9, 9, 1),
  'resnet20(width=2)': (8, 8, 1),
  'resnet18(width=2)': (8, 8, 1),
  'resnet18(width=2,norm=group)': (8, 8, 1),
  'resnet50(width=2,stem=imagenet)': (8, 8, 1),
  'vgg11(width=2,norm=batch)': (8, 8, 1),
  'vit_tiny(depth=2,width=8,heads=2)': (8, 8, 1),
}


@pytest.fixture(scope='module')
def convnet():
  """Returns the ConvNet of width 2, its variables, two images, and its compiled `apply`."""
  model = models.create('convnet(width=2)', 10)
  images = np.random.default_rng(1).uniform(0, 1, (2, 12, 12, 1)).astype(np.float32)
  return drawn(model, (12, 12, 1)), images, jax.jit(model.apply, static_argnums=2)


def test_every_registered_model_is_tested():
  others = {'vgg16', 'vit_small', *(f'resnet{layers}' for layers in (34, 56, 101, 152))}  # of the same families
  others |= {'logistic', 'resnet_mlp', 'ft_transformer'}  # in tests/test_tables.py
  others |= {'gpt', 'bert', 'lstm'}  # in test_transformers.py
  assert {spec.partition('(')[0] for spec in (*SPECS, *PUBLISHED)} | others == set(models.REGISTRY)


@pytest.mark.parametrize(
  ('spec', 'sample_shape', 'parameters'),
  [
    # 12 filters of 5·5·3, two times 12 of 5·5·12, and 768 or 588 features to ten logits
    ('lenet', (32, 32, 3), (75 + 1) * 12 + 2 * (300 + 1) * 12 + (768 + 1) * 10),
    ('lenet', (32, 32, 3), 15_826),
    ('lenet', (28, 28, 1), (25 + 1) * 12 + 2 * (300 + 1) * 12 + (588 + 1) * 10),
    ('lenet', (25, 25, 1), (25 + 1) * 12 + 2 * (300 + 1) * 12 + (7 * 7 * 12 + 1) * 10),
    ('lenet4', (32, 32, 3), 15_826 + (300 + 1) * 12),
    # Fidel's tables I and II
    ('mlp', (28, 28, 1), 785 * 128 + 129 * 128 + 129 * 64 + 65 * 10),
    ('mlp', (32, 32, 3), 3073 * 128 + 129 * 128 + 129 * 64 + 65 * 10),
    ('cnn', (28, 28, 1), 10 * 32 + (13 * 13 * 32 + 1) * 128 + 129 * 64 + 65 * 10),
    ('cnn', (32, 32, 3), 28 * 32 + (15 * 15 * 32 + 1) * 128 + 129 * 64 + 65 * 10),
    # conv and dense 2,901,770; a scale and a shift for each of 1,600 channels
    (
      'convnet',
      (32, 32, 3),
      28 * 64 + 577 * 128 + 1153 * 128 + 1153 * 256 + 4 * 2305 * 256 + (36 * 64 + 1) * 10 + 2 * 1600,
    ),
    ('convnet(width=2)', (25, 25, 1), 10 * 2 + 19 * 4 + 37 * 4 + 37 * 8 + 4 * 73 * 8 + (4 * 8 + 1) * 10 + 2 * 50),
    ('mlp(widths=16)', (5, 5, 1), 26 * 16 + 17 * 10),
    ('mlp(widths=9-8-7-6)', (5, 5, 1), 26 * 9 + 10 * 8 + 9 * 7 + 8 * 6 + 7 * 10),
    ('cnn(width=3)', (6, 6, 1), 10 * 3 + (2 * 2 * 3 + 1) * 128 + 129 * 64 + 65 * 10),
    ('cnn(width=3,widths=5)', (6, 6, 1), 10 * 3 + (2 * 2 * 3 + 1) * 5 + 6 * 10),
    ('lenet(width=24)', (8, 8, 1), 26 * 24 + 2 * 601 * 24 + (2 * 2 * 24 + 1) * 10),
    ('lenet4(width=1)', (8, 8, 1), 26 + 3 * 26 + 5 * 10),
  ],
)
def test_parameter_counts_by_hand(spec, sample_shape, parameters):
  assert count(shapes(spec, sample_shape)) == parameters


def test_batch_statistics_are_a_mean_and_a_variance_per_channel():
  assert count(shapes('convnet', (32, 32, 3)), 'batch_stats') == 2 * 1600
  assert count(shapes('lenet', (32, 32, 3)), 'batch_stats') == 0


@pytest.mark.long
@pytest.mark.parametrize('spec', SPECS)
def test_formulations_give_logits_that_are_features_times_the_last_dense_layer(spec):
  model, *others = (models.create(spec, 10, conv=name) for name in ('patches', 'native', 'hybrid'))
  assert model.name == spec
  variables = drawn(model, SPECS[spec])
  images = np.random.default_rng(1).uniform(0, 1, (2, *SPECS[spec])).astype(np.float32)

  def run(variables):
    logits = [m.apply(variables, images, False)[0] for m in (model, *others)]
    return *logits, model.features(variables, images)

  patches, native, hybrid, features = jax.jit(run)(variables)
  last = trees.get(variables['params'], model.layers(SPECS[spec])[-1].paths[0][:-1])
  assert patches.shape == (2, 10) and patches.dtype == jnp.float32
  for other in (native, hybrid):
    np.testing.assert_allclose(patches, other, rtol=1e-4, atol=1e-4)
  np.testing.assert_allclose(patches, features @ last['kernel'] + last['bias'].reshape(1, -1), rtol=1e-4, atol=1e-4)
  assert np.ptp(np.asarray(patches), axis=0).max() > 0  # the two images differ


def test_layers_are_in_forward_order_with_their_norms():
  convnet = models.create('convnet(width=2)', 10).layers((12, 12, 1))
  assert [layer.name for layer in convnet] == [f'Conv_{i}' for i in range(8)] + ['Dense_0']
  for i, layer in enumerate(convnet[:-1]):
    expected = [(f'Conv_{i}', 'kernel'), (f'Conv_{i}', 'bias'), (f'BatchNorm_{i}', 'bias'), (f'BatchNorm_{i}', 'scale')]
    assert list(layer.paths) == expected
  lenet = models.create('lenet', 10).layers((8, 8, 1))
  assert [layer.name for layer in lenet] == ['Conv_0', 'Conv_1', 'Conv_2', 'Dense_0']


def test_dropout_is_on_only_with_a_key():
  images = np.random.default_rng(0).uniform(0, 1, (2, 5, 5, 1)).astype(np.float32)
  plain, dropping = models.create('mlp', 10), models.create('mlp(dropout=0.5)', 10)
  variables = drawn(dropping, (5, 5, 1))
  apply = jax.jit(dropping.apply, static_argnums=2)
  expected, _ = plain.apply(variables, images, True)
  for train in (False, True):
    np.testing.assert_allclose(apply(variables, images, train)[0], expected, rtol=1e-5)
  first, again, other = (apply(variables, images, True, jax.random.key(seed))[0] for seed in (1, 1, 2))
  np.testing.assert_array_equal(first, again)
  assert np.abs(first - expected).max() > 0.1
  assert np.abs(first - other).max() > 0.1
  np.testing.assert_allclose(plain.apply(variables, images, True, jax.random.key(1))[0], expected, rtol=1e-5)


@pytest.mark.long
def test_batch_norm_trains_on_the_batch_and_evaluates_on_running_statistics(convnet):
  variables, images, apply = convnet
  train, updated = apply(variables, images, True)
  evaluated, kept = apply(variables, images, False)
  assert np.abs(train - evaluated).max() > 0.1
  jax.tree.map(np.testing.assert_array_equal, kept, variables['batch_stats'])
  moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), updated, variables['batch_stats'])
  assert min(jax.tree.leaves(moved)) > 0
  # An image's logits depend on its neighbours in training only.
  neighbour = np.stack([images[0], 1 - images[1]])
  assert np.abs(apply(variables, neighbour, True)[0][0] - train[0]).max() > 0.01
  np.testing.assert_allclose(apply(variables, neighbour, False)[0][0], evaluated[0], rtol=1e-5)
  # Evaluation uses the statistics stored in training.
  later = apply({**variables, 'batch_stats': updated}, images, False)[0]
  assert np.abs(later - evaluated).max() > 0.01


@pytest.mark.long
@pytest.mark.parametrize(
  ('spec', 'sample_shape'),
  [
    *itertools.product(SPECS, [(25, 25, 1), (28, 28, 1)]),
    *((spec, PUBLISHED[spec] if spec.startswith('vit') else (9, 14, 3)) for spec in [*SPECS, *PUBLISHED]),
  ],
)
def test_any_size_and_layers_name_every_parameter_once_the_weight_first(spec, sample_shape):
  model = models.create(spec, 7)

  def run(key, images):
    variables = model.init(key, sample_shape)
    return model.apply(variables, images, True)[0], model.features(variables, images), variables['params']

  logits, features, params = jax.eval_shape(run, jax.random.key(0), jnp.zeros((3, *sample_shape), jnp.float32))
  layers = model.layers(sample_shape)
  assert logits.shape == (3, 7) and logits.dtype == jnp.float32
  assert features.shape == (3, trees.get(params, layers[-1].paths[0]).shape[0])
  paths = [path for layer in layers for path in layer.paths]
  assert sorted(paths) == sorted(trees.path_names(path) for path, _ in jax.tree.leaves_with_path(params))
  assert len({layer.name for layer in layers}) == len(layers)
  for layer in layers:
    weight, *others = (trees.get(params, path) for path in layer.paths)
    assert weight.ndim == 2 and all(other.ndim == 1 for other in others)


@pytest.mark.parametrize(
  ('spec', 'sample_shape'), [('cnn', (3, 8, 1)), ('convnet(width=2)', (32, 8, 3)), ('convnet9(width=2)', (8, 32, 1))]
)
def test_images_too_small_for_the_pooling(spec, sample_shape):
  with pytest.raises(errors.UsageError, match=f'{sample_shape[0]}×{sample_shape[1]}'):
    shapes(spec, sample_shape)


@pytest.mark.parametrize(
  ('spec', 'options', 'words'),
  [
    (
      'lenett',
      {},
      ["unknown model 'lenett'", "did you mean 'lenet'", 'lenet, lenet4, logistic, lstm, mlp, resnet101'],
    ),
    ('lenet(size=3)', {}, ["'size'", 'lenet', 'activation, width']),
    *((f'mlp(widths={widths})', {}, ['mlp(widths)', widths, '128-64']) for widths in ('64-', '0', '-3', '8x8', 'True')),
    ('cnn(widths=64-0)', {}, ['cnn(widths)', '64-0', '[1, 65536]']),
    ('lenet', {'init': 'explicitt'}, ["unknown init 'explicitt'", "'explicit'", 'default']),
    ('lenet', {'conv': 'im2col'}, ["'im2col'", 'native, patches']),
    ('resnet18(width=3,norm=group)', {}, ['resnet18(width)', '3', 'even']),
    ('resnet56(stem=imagenet)', {}, ["'stem'", 'resnet56', 'norm, pixels, width']),
    ('vit_small(heads=5)', {}, ['vit_small(heads) is 5', 'divisor of the width 384']),
    ('lenet+precode(width=3)', {}, ["'width'", 'precode', 'size']),
    ('lenet+precod', {}, ["unknown wrapper of a model 'precod'", "did you mean 'precode'"]),
    ('lenet+mlp', {}, ["unknown wrapper of a model 'mlp'", 'precode']),
    ('precode(size=4)', {}, ["'precode' wraps a model", 'lenet+precode(size=4)']),
    ('lenet+', {}, ['empty']),
    ('lenet', {'num_classes': 0}, ['num_classes', '0']),
    ('lenet', {'num_classes': 2.5}, ['num_classes', '2.5', 'integer']),
  ],
)
def test_bad_settings_are_named_with_the_valid_ones(spec, options, words):
  with pytest.raises(errors.UsageError) as caught:
    models.create(spec, **{'num_classes': 10, **options})
  assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
  ('factory', 'settings', 'spec'),
  [
    (models.mlp, {}, 'mlp'),
    (models.mlp, {'widths': '9-8-7-6'}, 'mlp(widths=9-8-7-6)'),
    (models.mlp, {'widths': [9, 8]}, 'mlp(widths=(9,8))'),
    (models.mlp, {'activation': 'tanh', 'widths': 5}, 'mlp(activation=tanh,widths=5)'),
    (models.cnn, {'width': 3, 'widths': '6-5', 'dropout': 0.5}, 'cnn(width=3,widths=6-5,dropout=0.5)'),
    (models.lenet, {'width': 24}, 'lenet(width=24)'),
    (models.lenet4, {'width': 2, 'activation': 'relu'}, 'lenet4(width=2,activation=relu)'),
    (models.convnet, {'width': 2}, 'convnet(width=2)'),
    (models.convnet9, {'width': 3}, 'convnet9(width=3)'),
    (models.resnet20, {'width': 2, 'norm': 'group'}, 'resnet20(width=2,norm=group)'),
    (models.resnet18, {'width': 2, 'pixels': 'imagenet'}, 'resnet18(width=2,pixels=imagenet)'),
    (models.resnet50, {'width': 2, 'stem': 'imagenet'}, 'resnet50(width=2,stem=imagenet)'),
    (models.vgg16, {'width': 2, 'norm': 'batch'}, 'vgg16(width=2,norm=batch)'),
    (models.vit_tiny, {'patch': 6, 'depth': 1}, 'vit_tiny(patch=6,depth=1)'),
  ],
)
def test_factories_equal_create(factory, settings, spec):
  made, created = factory(10, **settings), models.create(spec, 10)
  assert made.name == created.name == spec
  assert made == created or shapes_of(made, (12, 12, 3)) == shapes_of(created, (12, 12, 3))


@pytest.mark.parametrize('widths', [(), [], '', (64.0,), (3, 0), (True, 2), -3, None, 65_537, 2**63])
def test_bad_widths_from_python(widths):
  with pytest.raises(errors.UsageError, match=r"^cnn\(widths\) is .*, expected integers in \[1, 65536\] joined by '-'"):
    models.cnn(10, widths=widths)


@pytest.mark.parametrize(
  'spec',
  ['mlp(widths=4)', 'lenet', 'resnet20(width=4)', 'vit_tiny(depth=1,width=12)', 'lenet+normalised(pixels=mnist)+lora'],
)
def test_equal_specs_are_one_model(spec):
  one, other = models.create(spec, 10), models.create(spec, 10)
  assert one == other and hash(one) == hash(other)
  assert models.create(spec, 3) != one != models.create(spec, 10, init='default')


def test_every_registered_model_is_exported():
  assert all(getattr(models, name) is factory for name, factory in models.REGISTRY.items())


@pytest.mark.long
def test_arguments_of_a_factory_reach_the_model():
  images = np.random.default_rng(0).uniform(0, 1, (1, 8, 8, 1)).astype(np.float32)
  default, explicit = (
    jax.jit(models.lenet(num_classes=3, init=init).init, static_argnums=1)(jax.random.key(0), (8, 8, 1))
    for init in ('default', 'explicit')
  )
  assert jnp.abs(default['params']['Conv_0']['kernel']).max() <= 0.2 < 0.4  # 1/√25
  assert jnp.abs(explicit['params']['Conv_0']['kernel']).max() > 0.4
  texts = [jax.jit(models.lenet(3, conv=conv).apply).lower(default, images).as_text() for conv in ('native', 'patches')]
  assert ['stablehlo.convolution' in text for text in texts] == [True, False]
  with pytest.raises(errors.UsageError, match="unknown convolution formulation 'im2col'"):
    models.lenet(3, conv='im2col')


@pytest.mark.long
@pytest.mark.parametrize(
  ('spec', 'sample_shape', 'total', 'squares'),
  [
    ('mlp', (5, 5, 1), -103.52318, 2407.00101),
    ('cnn', (6, 6, 1), -42.80351, 2122.49804),
    ('lenet', (8, 8, 1), -9.31844, 680.37366),
    ('lenet4', (8, 8, 1), 6.32049, 987.32128),
  ],
)
def test_initial_values_are_those_of_release_0_1(spec, sample_shape, total, squares):
  """Sums of the parameters and of their squares, recorded before sizes became settings."""
  init = jax.jit(models.create(spec, 10).init, static_argnums=1)
  leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(init(jax.random.key(7), sample_shape)['params'])]
  np.testing.assert_allclose(sum(leaf.sum() for leaf in leaves), total, atol=1e-4)
  np.testing.assert_allclose(sum(np.square(leaf).sum() for leaf in leaves), squares, atol=1e-4)


def test_the_first_hidden_layer_has_the_activation_and_the_others_relu():
  model, images = models.mlp(2, widths=(4, 3), activation='tanh'), np.ones((1, 2, 1, 1), np.float32)
  params = drawn(model, (2, 1, 1))['params']
  dense = [{name: np.asarray(value) for name, value in params[f'Dense_{i}'].items()} for i in range(3)]
  x = np.tanh(images.reshape(1, 2) @ dense[0]['kernel'] + dense[0]['bias'])
  x = np.maximum(x @ dense[1]['kernel'] + dense[1]['bias'], 0)
  expected = x @ dense[2]['kernel'] + dense[2]['bias']
  np.testing.assert_allclose(model.apply({'params': params}, images)[0], expected, rtol=1e-4, atol=1e-5)


class Stem(nn.Module):
  @nn.compact
  def __call__(self, x):
    x = nn.Conv(3, (3, 3), name='zeta')(x)
    return nn.relu(nn.LayerNorm(name='norm')(x))


class Own(nn.Module):
  """A user's network: nested, with names in reverse order, dropout and BatchNorm."""

  rate: float = 0.5

  @nn.compact
  def __call__(self, images, train):
    x = Stem(name='stem')(images)
    x = nn.Dropout(self.rate, deterministic=not train)(x)
    x = nn.Dense(6, name='middle')(x.reshape(x.shape[0], -1))
    x = nn.BatchNorm(use_running_average=not train, name='after')(x)
    x = self.param('temperature', nn.initializers.ones, ()) * x
    return nn.Dense(4, name='alpha')(nn.tanh(x))


class Plain(nn.Module):
  """Takes no `train`; its dropout is always on and is called by keyword."""

  @nn.compact
  def __call__(self, images):
    x = nn.Dense(5)(images.reshape(images.shape[0], -1))
    x = nn.Dropout(0.5, deterministic=False)(inputs=x)
    return nn.Dense(3)(x)


@pytest.fixture(scope='module')
def own(small_images):
  model = models.from_flax(Own())
  return model, drawn(model, (8, 8, 1)), small_images[0][:4]


def test_from_flax_is_the_users_function(own):
  model, variables, images = own
  key = jax.random.key(3)
  assert model.name == 'own'
  assert set(variables) == {'params', 'batch_stats'}

  @jax.jit
  def run(variables):
    module = Own()
    trained = module.apply(variables, images, True, rngs={'dropout': key}, mutable=['batch_stats'])
    return (
      (model.apply(variables, images, False, None), (module.apply(variables, images, False), variables['batch_stats'])),
      (model.apply(variables, images, True, key), (trained[0], trained[1]['batch_stats'])),
    )

  for ours, expected in run(variables):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), ours, expected)


@pytest.mark.long
def test_weights_are_those_of_flax_without_what_the_network_returns():
  model, images, key = models.from_flax(Own()), np.zeros((1, 8, 8, 1), np.float32), jax.random.key(3)
  found, expected = model.init(key, (8, 8, 1)), Own().init(key, images, False)
  assert jax.tree.structure(found) == jax.tree.structure(dict(expected))
  jax.tree.map(np.testing.assert_array_equal, found, dict(expected))
  assert 'conv_general_dilated' in str(jax.make_jaxpr(lambda key: Own().init(key, images, False))(key))
  assert not {'conv_general_dilated', 'dot_general'} & set(operations(lambda key: model.init(key, (8, 8, 1)), key))


def operations(function, *arguments):
  """Returns the names of the operations of a function, without those within others."""
  return [eqn.primitive.name for eqn in jax.make_jaxpr(function)(*arguments).jaxpr.eqns]


def test_from_flax_finds_nested_layers_in_forward_order(own):
  model, variables, _ = own
  layers = model.layers((8, 8, 1))
  assert [layer.name for layer in layers if 'temperature' not in str(layer)] == ['stem/zeta', 'middle', 'alpha']
  assert dict(layers)['stem/zeta'] == (
    ('stem', 'zeta', 'kernel'),
    ('stem', 'zeta', 'bias'),
    ('stem', 'norm', 'bias'),
    ('stem', 'norm', 'scale'),
  )
  assert dict(layers)['middle'][2:] == (('after', 'bias'), ('after', 'scale'))
  paths = {path for layer in layers for path in layer.paths}
  assert paths == {tuple(key.key for key in path) for path, _ in jax.tree.leaves_with_path(variables['params'])}


def test_from_flax_features_are_the_last_dense_layers_inputs(own):
  model, variables, images = own
  features, (expected, _) = jax.jit(lambda v: (model.features(v, images), model.apply(v, images, False)))(variables)
  last = variables['params']['alpha']
  np.testing.assert_allclose(features @ last['kernel'] + last['bias'].reshape(1, -1), expected, rtol=1e-5)


def test_from_flax_without_a_train_argument(small_images):
  images = small_images[0][:2]
  model = models.from_flax(Plain(), 'habit')
  variables = drawn(model, (8, 8, 1))
  assert model.name == 'habit' and set(variables) == {'params'}
  first, second = variables['params']['Dense_0'], variables['params']['Dense_1']
  hidden = images.reshape(2, 64) @ np.asarray(first['kernel']) + np.asarray(first['bias'])
  expected = hidden @ np.asarray(second['kernel']) + np.asarray(second['bias'])
  for train in (True, False):
    logits, stats = model.apply(variables, images, train, None)
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)
    assert stats == {}
  assert np.abs(model.apply(variables, images, False, jax.random.key(0))[0] - expected).max() > 0.01
  assert [layer.name for layer in model.layers((8, 8, 1))] == ['Dense_0', 'Dense_1']


def test_the_model_normalises_images(small_images):
  images = np.repeat(small_images[0][:2], 3, axis=-1)
  mean, std = (0.5, 0.4, 0.3), (0.2, 0.1, 0.25)
  model = models.from_flax(Plain(), mean=mean, std=std)
  variables = drawn(model, (8, 8, 3))
  normalised = ((images - np.asarray(mean)) / np.asarray(std)).astype(np.float32)
  expected, _ = models.from_flax(Plain()).apply(variables, normalised, False)
  np.testing.assert_allclose(model.apply(variables, images, False)[0], expected, rtol=1e-4, atol=1e-4)
  assert model.features(variables, images).shape == (2, 5)


def test_the_model_normalises_rows_by_entry():
  mean, std = np.float32([0.5, -1, 2]), np.float32([0.2, 1, 4])
  plain, model = (models.from_flax(Plain(), axes=1, **given) for given in ({}, {'mean': mean, 'std': std}))
  rows = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
  variables = drawn(model, (3,))
  expected, _ = plain.apply(variables, (rows - mean) / std, False)
  np.testing.assert_allclose(model.apply(variables, rows, False)[0], expected, rtol=1e-4, atol=1e-4)
  assert model.normalisation == (tuple(mean.tolist()), tuple(map(float, std)))


def test_a_normalisation_of_other_channels_is_refused():
  for mean, std, dtype in (
    ((0.5,), (0.2, 0.2), 'float32'),
    ((0.5, np.nan), (0.2, 0.2), 'float32'),
    ((0.5,), (0,), 'float32'),
    (0.5, 0.2, 'float32'),
    ((0.5,), (0.2,), 'int32'),
  ):
    with pytest.raises(errors.UsageError, match='expected a mean and a positive deviation for each channel'):
      models.from_flax(Plain(), mean=mean, std=std, dtype=dtype)
  with pytest.raises(errors.UsageError, match="mean and std of 'plain' have 1 numbers, and samples have 3 channels"):
    models.from_flax(Plain(), mean=(0.5,), std=(0.2,)).init(jax.random.key(0), (4, 4, 3))


class Attending(nn.Module):
  """Attention among rows of pixels, with dropout of its own; and what a network may draw itself."""

  noise: bool = False

  @nn.compact
  def __call__(self, x, train=False):
    x = nn.Dense(4)(x[..., 0])
    x = x + nn.MultiHeadDotProductAttention(num_heads=2, dropout_rate=0.5, deterministic=not train)(x, x)
    x = x + nn.MultiHeadDotProductAttention(num_heads=2, dropout_rate=0.5)(x, deterministic=not train)
    x = x + jax.random.normal(self.make_rng('dropout'), x.shape) if self.noise else x
    return nn.Dense(3)(x.mean(1))


@pytest.mark.long
def test_dropout_inside_attention_follows_the_key():
  model, images = models.from_flax(Attending()), jax.random.uniform(jax.random.key(1), (2, 6, 6, 1))
  variables = drawn(model, (6, 6, 1))
  logits = [model.apply(variables, images, train, None)[0] for train in (False, True)]
  np.testing.assert_array_equal(*logits)
  np.testing.assert_allclose(logits[0], Attending().apply(variables, images), rtol=1e-5)
  assert np.abs(model.apply(variables, images, True, jax.random.key(0))[0] - logits[0]).max() > 1e-3
  noisy = models.from_flax(Attending(noise=True))
  with pytest.raises(errors.UsageError, match=r"'attending' draws random numbers .* self.has_rng\(.dropout.\)"):
    noisy.apply(drawn(noisy, (6, 6, 1)), images, True, None)


class ConvOnly(nn.Module):
  @nn.compact
  def __call__(self, images):
    return nn.Conv(4, (3, 3))(images).mean((1, 2))


def test_a_network_without_a_dense_layer_has_no_features():
  model = models.from_flax(ConvOnly())
  variables = drawn(model, (4, 4, 1))
  with pytest.raises(errors.UsageError, match=r"'convonly' has no dense layer"):
    model.features(variables, jnp.zeros((1, 4, 4, 1)))


def test_from_functions(small_images):
  images = small_images[0][:2]
  kernel = lambda key, shape: {'w': jax.random.normal(key, (int(np.prod(shape)), 3))}  # noqa: E731
  flat = lambda params, images: images.reshape(images.shape[0], -1)  # noqa: E731
  layer = trees.Layer('only', (('w',),))
  model = models.from_functions(
    kernel, lambda params, images: flat(params, images) @ params['w'], 'linear', features=flat, layers=[layer]
  )
  variables = model.init(jax.random.key(0), (8, 8, 1))
  assert model.name == 'linear' and set(variables) == {'params'} and variables['params']['w'].shape == (64, 3)
  expected = images.reshape(2, 64) @ np.asarray(variables['params']['w'])
  for extra in ((), (True,), (False, jax.random.key(0))):
    logits, stats = model.apply(variables, images, *extra)
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)
    assert stats == {}
  np.testing.assert_array_equal(require(model, 'features')(variables, images), images.reshape(2, 64))
  assert require(model, 'layers')((8, 8, 1)) == (layer,)


def test_missing_features_and_layers_are_named():
  model = models.from_functions(lambda key, shape: {}, lambda params, images: images, 'bare')
  for what in ('features', 'layers'):
    with pytest.raises(errors.UsageError, match=f"'bare' does not offer '{what}'.*{what}=.*from_functions"):
      require(model, what)
