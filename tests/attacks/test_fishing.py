"""Class and feature fishing: what they isolate against one sample's own gradient, and what they cannot."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import gradleak
from gradleak import Client, Knowledge, Observation, errors, models, trees
from gradleak.attacks import fishing
from gradleak.models import torch_weights

pytestmark = pytest.mark.usefixtures('fast_compilation')


@functools.cache
def compiled(client):
  return jax.jit(functools.partial(client.local_update, None))


def masked(model, update, target, image_shape):
  """The update without the rows of the last layer that every sample has a share in."""
  kernel, bias = fishing.last_layer(model, image_shape, update)
  own = (np.arange(trees.get(update, bias).shape[0]) == target).astype(np.float32)
  kept = {path: np.asarray(trees.get(update, path)) * own for path in (kernel, bias)}
  return jax.tree_util.tree_map_with_path(lambda path, leaf: kept.get(trees.path_names(path), leaf), update)


def cosine(a, b):
  a, b = (np.concatenate([np.ravel(x).astype(np.float64) for x in jax.tree.leaves(tree)]) for tree in (a, b))
  return a @ b / max(np.linalg.norm(a) * np.linalg.norm(b), 1e-300)


@pytest.fixture(scope='module')
def fished(network, small_images):
  scenario = gradleak.scenario(network[0], *small_images, variables=network[1], num_classes=10)
  return fishing.server(None, scenario, 8, target=3)


def observed(scenario, images, labels):
  update = compiled(scenario.client)(scenario.variables, images, labels).update
  return Observation(
    scenario.variables, update, jnp.zeros((len(images), 10)), Knowledge(labels='unused'), images.shape, 10
  )


def test_class_fishing_leaves_one_samples_gradient(network, fished, small_images):
  images, labels = small_images  # one of each class from 0 to 7
  model, honest = network
  last, before = fished.variables['params']['Dense_0'], honest['params']['Dense_0']
  np.testing.assert_array_equal(last['kernel'], 0.5 * (np.arange(10) == 3) * np.ones((before['kernel'].shape[0], 1)))
  np.testing.assert_array_equal(last['bias'], np.where(np.arange(10) == 3, before['bias'], 1000))
  assert jax.tree.all(
    jax.tree.map(np.array_equal, *({**v['params'], 'Dense_0': 0} for v in (fished.variables, honest)))
  )
  update = compiled(fished.client)
  alone = update(fished.variables, images[3:4], labels[3:4]).update
  batch = jax.tree.map(lambda x: 8 * x, update(fished.variables, images, labels).update)
  for got, expected in zip(
    jax.tree.leaves(masked(model, batch, 3, (8, 8, 1))),
    jax.tree.leaves(masked(model, alone, 3, (8, 8, 1))),
    strict=True,
  ):
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6 * np.abs(expected).max())
  assert cosine(update(honest, images, labels).update, update(honest, images[3:4], labels[3:4]).update) < 0.9
  others = np.delete(np.arange(8), 3)
  nothing = update(fished.variables, images[others], labels[others]).update
  assert not any(np.any(x) for x in jax.tree.leaves({**nothing, 'Dense_0': 0}))


def test_the_isolated_sample_is_matched(fished, small_images):
  images, labels = small_images
  attack = fishing.class_fishing(fished.client, target=3, inner='csdlg_fast', steps=150, tv=1e-5)
  observation = observed(fished, images, labels)
  assert observation.update['Dense_0']['kernel'].shape[1] == 10 and attack.num_steps == 150
  # The truth's other samples play no part, and what others leave in the last layer is not compared.
  objective = jax.jit(functools.partial(attack.objective, observation))
  onehot = np.eye(10, dtype=np.float32)
  assert float(objective(images, onehot[labels])) < 1e-4
  assert float(objective(images[::-1], onehot[labels])) > 1e-3
  assert np.isnan(objective(images, onehot[np.full(8, 5)]))


@pytest.mark.slow
def test_the_isolated_sample_is_recovered(fished, small_images):
  images, labels = small_images
  attack = fishing.class_fishing(fished.client, target=3, inner='csdlg_fast', steps=150, tv=1e-5)
  observation = observed(fished, images, labels)

  @jax.jit
  @jax.vmap
  def run(key_data):
    state = attack.init(jax.random.wrap_key_data(key_data), observation)
    state, _ = jax.lax.scan(lambda state, _: attack.step(state, observation), state, length=attack.num_steps)
    return attack.reconstruct(state, observation)

  found = run(jax.random.key_data(jax.random.split(jax.random.key(0), 2)))
  assert found.images.shape == (2, 1, 8, 8, 1) and np.all(found.labels == 3)
  psnr = -10 * np.log10(np.mean((np.clip(found.images[:, 0], 0, 1) - images[3]) ** 2, axis=(1, 2, 3)))
  print('PSNR', psnr)
  assert psnr.min() > 25
  assert np.argmin([np.mean((found.images[0, 0] - image) ** 2) for image in images]) == 3


@pytest.fixture(scope='module')
def classifier():
  """A last layer alone, on given features: the search sees no more of a network."""
  layer = trees.Layer('linear', (('linear', 'kernel'), ('linear', 'bias')))
  return models.from_functions(
    lambda key, shape: {'linear': {'kernel': jnp.zeros((shape[0], 10)), 'bias': jnp.zeros(10)}},
    lambda params, x: x @ params['linear']['kernel'] + params['linear']['bias'].reshape(1, -1),
    'classifier',
    features=lambda params, x: x,
    layers=[layer],
  )


def features_of(rng, labels, clean):
  """Features of images as a network's last pooling gives them; where `clean`, the target 0 has one of its own."""
  x = np.abs(rng.normal(size=(len(labels), 12)))
  x[:, 5] = np.where(labels == 0, 3 + rng.uniform(size=len(labels)), x[:, 5] / 4 if clean else x[:, 5] * 2)
  return x.astype(np.float32)


@pytest.mark.parametrize('method, clean', [('published', True), ('published', False), ('difference', False)])
def test_feature_fishing_isolates_one_of_several(classifier, method, clean):
  rng = np.random.default_rng(1)
  labels = np.r_[np.zeros(3), rng.integers(1, 10, 29)].astype(np.int32)
  x = features_of(rng, labels, clean)
  update = compiled(Client(classifier, 10))
  asked = []

  def query(variables):
    asked.append(variables)
    return update(variables, x, labels).update

  found = fishing.feature_fishing(query, classifier, classifier.init(None, (12,)), (12,), 32, method=method)
  assert found.queries == len(asked) <= 64
  # A naive search among the features themselves.
  expected = min(x[:3, 5]) if method == 'published' else max(x[:, 5])
  sample = int(np.flatnonzero(x[:, 5] == expected)[0])
  if method == 'published' and not clean:
    assert not found.alone  # other classes reach as high
    return
  assert found.alone and abs(found.samples - 1) < 0.02 and found.queries < 20
  np.testing.assert_allclose(found.features, x[sample], atol=2e-3)
  one = update(found.variables, x[sample : sample + 1], np.zeros(1, np.int32)).update['linear']
  kernel, bias = (32 * np.asarray(found.update['linear'][name]) for name in ('kernel', 'bias'))
  np.testing.assert_allclose(kernel[:, 0], one['kernel'][:, 0], rtol=0.02, atol=1e-3)
  np.testing.assert_allclose(bias[0], one['bias'][0], rtol=0.02)


def test_a_discriminant_finds_the_class_where_no_feature_does(classifier):
  rng = np.random.default_rng(0)
  mixing = rng.normal(size=(12, 12)) + 3  # every feature is mostly what all have in common
  labels = np.r_[np.zeros(2), rng.integers(1, 10, 62)].astype(np.int32)
  x, public = ((features_of(rng, y, True) @ mixing).astype(np.float32) for y in (labels, rng.integers(0, 10, 500)))
  update = compiled(Client(classifier, 10))
  found = fishing.feature_fishing(
    lambda variables: update(variables, x, labels).update,
    classifier,
    classifier.init(None, (12,)),
    (12,),
    64,
    method='difference',
    public=public,
  )
  assert found.alone
  assert np.abs(x - found.features).sum(axis=1).argmin() < 2


@pytest.mark.parametrize('count', [0, 1])
def test_no_sample_of_the_class_or_one_needs_one_query(classifier, count):
  labels = np.r_[np.zeros(count), np.ones(8 - count)].astype(np.int32)
  x = features_of(np.random.default_rng(0), labels, True)
  update = compiled(Client(classifier, 10))
  variables = classifier.init(None, (12,))
  found = fishing.feature_fishing(lambda v: update(v, x, labels).update, classifier, variables, (12,), 8)
  assert found.queries == 1 and found.alone == (count == 1) and abs(found.samples - count) < 1e-3
  if count:
    np.testing.assert_allclose(found.features, x[0], rtol=1e-4)


class Normed(nn.Module):
  @nn.compact
  def __call__(self, x, train=False):
    x = nn.Dense(6)(x.reshape(x.shape[0], -1))
    x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.7)(x))
    x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(nn.Dense(5)(x))
    return nn.Dense(10)(nn.relu(x))


def test_running_statistics_become_those_of_public_images(small_images):
  images, labels = small_images
  model = models.from_flax(Normed())
  scenario = gradleak.scenario(model, images, labels, key=jax.random.key(0), public=(images, labels))
  honest = scenario.variables
  assert set(fishing.server(None, scenario, 8).variables) == set(honest)
  sent = fishing.server(None, scenario, 8, statistics='public').variables
  features = [np.asarray(jax.jit(model.features)(v, images)) for v in (honest, sent)]
  x = images.reshape(8, 64).astype(np.float64)
  for i, name in enumerate(('BatchNorm_0', 'BatchNorm_1')):
    dense, norm = (honest['params'][f'{kind}_{i}'] for kind in ('Dense', 'BatchNorm'))
    x = x @ np.asarray(dense['kernel'], np.float64) + np.asarray(dense['bias'])
    np.testing.assert_allclose(sent['batch_stats'][name]['mean'], x.mean(axis=0), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(sent['batch_stats'][name]['var'], x.var(axis=0), rtol=2e-3, atol=1e-4)
    x = (x - x.mean(axis=0)) / np.sqrt(x.var(axis=0) + 1e-5) * np.asarray(norm['scale']) + np.asarray(norm['bias'])
    x = np.maximum(x, 0)
  np.testing.assert_allclose(features[1], x, atol=1e-3)
  assert np.abs(features[0] - x).max() > 0.1


def test_what_cannot_be_fished_is_a_usage_error(network, small_images):
  scenario = gradleak.scenario(network[0], *small_images, variables=network[1], num_classes=10)
  for settings, message in (
    ({'target': 10}, 'target is 10, expected an integer in'),
    ({'statistics': 'batch'}, "unknown statistics 'batch'"),
    ({'statistics': 'public'}, 'public=\\(images, labels\\)'),
  ):
    with pytest.raises(errors.UsageError, match=message):
      fishing.server(None, scenario, 8, **settings)
  squared = gradleak.scenario(network[0], *small_images, variables=network[1], num_classes=10, loss='squared_error')
  with pytest.raises(errors.UsageError, match='needs the loss cross_entropy'):
    fishing.server(None, squared, 8)
  for settings, message in (
    ({'inner': 'dlg'}, "unknown inner attack 'dlg'"),
    ({'target': -1}, 'target is -1'),
    ({'statistics': ''}, 'unknown statistics'),
  ):
    with pytest.raises(errors.UsageError, match=message):
      fishing.class_fishing(None, **settings)
  with pytest.raises(errors.UsageError, match='steps is 0'):
    fishing.class_fishing(None, steps=0)
  bare = models.from_functions(network[0].init, network[0].apply)
  with pytest.raises(errors.UsageError, match="does not offer 'layers'"):
    fishing.server(None, scenario._replace(client=dataclasses.replace(scenario.client, model=bare)), 8)
  convolution = network[0]._replace(layers=lambda shape: network[0].layers(shape)[:-1])
  with pytest.raises(errors.UsageError, match='is no dense layer with a bias'):
    fishing.server(None, scenario._replace(client=dataclasses.replace(scenario.client, model=convolution)), 8)
  with pytest.raises(errors.UsageError, match='unknown method of feature fishing'):
    fishing.feature_fishing(None, network[0], network[1], (8, 8, 1), 8, method='bisection')


@pytest.mark.slow
@pytest.mark.parametrize('weights', ['trained', 'untrained'])
def test_one_of_128_on_a_residual_network(weights, published_resnet20):
  """Cosines between what is isolated and the sample's own gradient, with BatchNorm in either mode, and the queries."""
  path, images, labels = published_resnet20
  model = models.create('resnet20(pixels=imagenet)', 10, init='default')
  shape, public = (32, 32, 3), images[500:]
  if weights == 'trained':
    variables = torch_weights.load(path, model, shape)
  else:
    variables = jax.jit(model.init, static_argnums=1)(jax.random.key(0), shape)
  rng = np.random.default_rng(0)
  of_class, others = (np.flatnonzero(found) for found in (labels[:500] == 3, labels[:500] != 3))
  update = {mode: compiled(Client(model, 10, batch_norm=mode)) for mode in ('eval', 'train')}
  figures = {}
  chosen = np.r_[of_class[:1], rng.choice(others, 127, replace=False)]
  for name, sent in (
    ('class fishing', fishing.class_fished(model, variables, shape, 3)),
    ('unmodified', variables),
  ):
    own = masked(model, update['eval'](sent, images[chosen[:1]], labels[chosen[:1]]).update, 3, shape)
    for mode in ('eval', 'train'):
      batch = masked(model, update[mode](sent, images[chosen], labels[chosen]).update, 3, shape)
      figures[f'{name}, {mode}'] = cosine(batch, own)
  chosen = np.r_[of_class[:2], rng.choice(others, 126, replace=False)]
  for method in ('published', 'difference'):
    for data in (None, public):
      found = fishing.feature_fishing(
        lambda sent: update['eval'](sent, images[chosen], labels[chosen]).update,
        model,
        variables,
        shape,
        128,
        target=3,
        method=method,
        public=data,
      )
      features = np.asarray(jax.jit(model.features)(found.variables, images[chosen]))
      sample = chosen[np.abs(features - found.features).sum(axis=1).argmin()]
      own = update['eval'](found.variables, images[sample][None], np.full(1, 3, np.int32)).update
      found_cosine = cosine(masked(model, found.update, 3, shape), masked(model, own, 3, shape))
      name = f'feature fishing, {method}{"" if data is None else ", public images"}'
      figures[name] = (found_cosine, found.alone, int(labels[sample]), found.queries)
      assert not found.alone or found_cosine > 0.999
  for name, figure in figures.items():
    print(f'{weights}: {name}: {figure}')
  assert figures['class fishing, eval'] > 0.9999
  assert max(figures['unmodified, eval'], figures['unmodified, train']) < 0.6
  assert figures['class fishing, train'] < 0.9
  best = figures['feature fishing, difference, public images']
  assert best[1] and best[2] == 3 and best[3] < 20
