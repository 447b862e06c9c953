"""The imprint module against its bins counted in NumPy, and what it leaves of the model behind it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from scipy import stats

import gradleak
from gradleak import Client, Knowledge, Observation, defenses, models
from gradleak.core import errors, trees
from gradleak.modalities import TABLE, of_config
from gradleak.models import precode
from gradleak.servers.imprint import (
  bin_edges,
  imprint,
  insert,
  measurement_vector,
  module_parameters,
  recover,
)

pytestmark = pytest.mark.usefixtures('fast_compilation')


@pytest.fixture(scope='module')
def honest(digits):
  """Twelve digits, as many more times over that are public, and one dense layer."""
  model = models.from_functions(
    lambda key, _: {'kernel': 0.3 * jax.random.normal(key, (64, 10)), 'bias': jnp.zeros(10)},
    lambda params, images: images.reshape(-1, 64) @ params['kernel'] + params['bias'].reshape(1, -1),
    layers=[trees.Layer('dense', (('kernel',), ('bias',)))],
  )

  def scenario(count=12, **settings):
    images, labels = digits
    # Darker by a little, so that no edge meets a digit's brightness, a multiple of 1/1024.
    public = (0.9873 * images[200:], labels[200:])
    return gradleak.scenario(
      model, images[:count], labels[:count], key=jax.random.key(0), **{'public': public, **settings}
    )

  return scenario


def observe(sent, share='gradient'):
  upload = jax.jit(sent.client.local_update)(jax.random.key(1), sent.variables, sent.samples, sent.targets)
  zeros = jnp.zeros((len(sent.targets), 10))
  return Observation(sent.variables, upload.update, zeros, Knowledge(share=share), sent.samples.shape, 10)


def reconstruct(attack, observation):
  return jax.jit(attack.reconstruct)(attack.init(jax.random.key(0), observation), observation)


def edges_by_hand(public, bins, quantiles):
  measured = public.reshape(len(public), -1).mean(axis=1, dtype=np.float64)
  law = {'normal': stats.norm(measured.mean(), measured.std())}
  law['laplace'] = stats.laplace(measured.mean(), measured.std() / np.sqrt(2))
  inner = [
    np.quantile(measured, k / bins) if quantiles == 'empirical' else law[quantiles].ppf(k / bins)
    for k in range(1, bins)
  ]
  return np.array([measured.mean() - 10 * measured.std(), *inner, measured.mean() + 10 * measured.std()])


@pytest.mark.long
@pytest.mark.parametrize(
  ('quantiles', 'sparse'),
  [('normal', False), *(pytest.param(law, True, marks=pytest.mark.slow) for law in ('empirical', 'laplace'))],
)
def test_what_is_alone_in_its_bin_comes_back_exactly(honest, prepared, quantiles, sparse):
  scenario = honest()
  method = imprint(bins=11, quantiles=quantiles, sparse=sparse)
  sent = prepared(method, scenario, 12)
  found = np.asarray(reconstruct(method(sent.client), observe(sent)).samples)
  brightness = scenario.samples.reshape(12, -1).mean(axis=1, dtype=np.float64)
  bins = np.searchsorted(edges_by_hand(scenario.public[0], 11, quantiles), brightness)
  alone = np.array([np.sum(bins == b) == 1 for b in bins])
  assert 4 <= alone.sum() < 12
  errors_of = np.abs(found[:, None] - scenario.samples[None]).max(axis=(2, 3, 4))
  assert np.all(errors_of.min(axis=0)[alone] < 1e-4)
  # Occupied bins give images or mixtures, the others nothing.
  assert np.sum(found.any(axis=(1, 2, 3))) == len(set(bins.tolist()))


def test_as_published_the_network_is_given_the_module_alone(honest, prepared):
  scenario, found = honest(), []
  for residual in (True, False):
    method = imprint(bins=11, residual=residual)
    sent = prepared(method, scenario, 12)
    found.append(np.asarray(reconstruct(method(sent.client), observe(sent)).samples))
  module = sent.variables['params']['imprint']
  rows = scenario.samples.reshape(12, -1)
  fired = np.maximum(rows @ np.asarray(module['measure']['kernel']) + np.asarray(module['measure']['bias']), 0)
  given = (fired @ np.asarray(module['return']['kernel'])).reshape(scenario.samples.shape)
  behind = {'params': sent.variables['params']['model']}
  logits = sent.client.model.apply(sent.variables, scenario.samples, False, None)[0]
  np.testing.assert_allclose(logits, scenario.client.model.apply(behind, given, False, None)[0], rtol=1e-3, atol=1e-5)
  errors_of = [np.abs(each[:, None] - scenario.samples[None]).max(axis=(2, 3, 4)).min(axis=0) for each in found]
  exact = [each < 1e-4 for each in errors_of]
  assert exact[0].sum() >= 4
  np.testing.assert_array_equal(*exact)


@pytest.mark.long
def test_several_steps_need_the_sparse_variant(honest, prepared):
  revealed = []
  for sparse in (True, False):
    method = imprint(bins=64, quantiles='empirical', sparse=sparse)
    scenario = honest(share='delta', local_batch_size=4, local_epochs=2, learning_rate=0.1)
    sent = prepared(method, scenario, 12)
    found = np.asarray(reconstruct(method(sent.client), observe(sent, 'delta')).samples)
    mse = ((found[:, None] - scenario.samples[None]) ** 2).mean(axis=(2, 3, 4))
    revealed.append(int(np.sum(mse.min(axis=0) < 1e-4)))
  assert revealed[0] >= 8
  assert revealed[1] <= revealed[0] - 3


def test_what_measures_as_its_bin_and_keeps_to_the_box_comes_first():
  edges = np.array([0.0, 0.25, 0.5, 0.75, 1.0])
  module = module_parameters(np.full(4, 0.25, np.float32), edges)['measure']
  rows = np.array([[0.1, 0.2, 0.1, 0.0], [1.4, 0.0, 0.0, 0.1], [0.9] * 4, [0.7, 0.8, 0.9, 0.8]], np.float32)
  shares = np.array([0.5, 3.0, 9.0, -2.0], np.float32)  # in bin 2, brightness 0.9 is an impostor
  single = shares[:, None] * rows
  sums, totals = np.cumsum(single[::-1], axis=0)[::-1], np.cumsum(shares[::-1])[::-1]
  for scale in (1.0, 1e-20, -0.1):
    update = {'kernel': np.float32(scale) * sums.T, 'bias': np.float32(scale) * totals}
    images, found, alive = jax.jit(recover)(update, module)
    np.testing.assert_allclose(images, rows[[3, 0, 1, 2]], atol=1e-5)
    np.testing.assert_allclose(found, np.float32(scale) * shares[[3, 0, 1, 2]], rtol=1e-5)
    assert np.all(alive)


def test_many_updates_at_once_and_nothing_at_all():
  module = module_parameters(np.full(5, 0.2, np.float32), bin_edges(4, 'normal'))['measure']
  rng = np.random.default_rng(0)
  one = {'kernel': rng.normal(size=(5, 4)).astype(np.float32), 'bias': rng.normal(size=4).astype(np.float32)}
  updates = jax.tree.map(lambda u: jnp.stack([u, 0 * u, jnp.full_like(u, jnp.nan)]), one)
  attack = imprint(bins=4)(Client(models.mlp(10), 10))

  def read(update):
    variables = {'params': {'imprint': {'measure': module}}}
    observation = Observation(variables, {'imprint': {'measure': update}}, None, Knowledge(), (3, 1, 5, 1), 10)
    return attack.reconstruct(jnp.float32(0), observation)

  found = jax.jit(jax.vmap(read))(updates)
  np.testing.assert_allclose(found.samples[0], jax.jit(read)(one).samples, rtol=1e-4)
  assert found.samples.shape == (3, 3, 1, 5, 1)
  assert np.isfinite(found.samples).all() and np.any(found.samples[0]) and not np.any(found.samples[1:])
  assert found.labels.shape == (3, 0)


@pytest.mark.parametrize(
  ('quantiles', 'law'), [('normal', stats.norm(0.47, 0.13)), ('laplace', stats.laplace(0.47, 0.13 / np.sqrt(2)))]
)
def test_without_auxiliary_images_the_bins_are_those_of_natural_ones(quantiles, law):
  edges = bin_edges(50, quantiles)
  np.testing.assert_allclose(law.cdf(edges), np.arange(51) / 50, atol=1e-6)


@pytest.mark.long
def test_standardised_rows_without_public_ones_have_bins_of_their_own(prepared):
  np.testing.assert_allclose(stats.norm(0, 1).cdf(bin_edges(50, 'normal', kind=TABLE)), np.arange(51) / 50, atol=1e-6)
  data = gradleak.data.load('breast_cancer', 'test', limit=8)
  of_rows = {'key': jax.random.key(0), 'modality': of_config(data.settings)}
  honest = gradleak.scenario(models.mlp(2, 'default', widths=(8,)), data.samples, data.targets, **of_rows)
  sent = prepared(imprint(bins=256), honest, 8)
  module = sent.variables['params']['imprint']['measure']
  bins = np.sum(sent.samples @ np.asarray(module['kernel']) + np.asarray(module['bias']) > 0, axis=1)
  alone = [np.sum(bins == bin) == 1 for bin in bins]
  found = np.asarray(reconstruct(imprint(bins=256)(sent.client), observe(sent)).samples)
  near = np.abs(found[:, None] - sent.samples).max(axis=2) < 0.01
  assert np.sum(alone) >= 6
  np.testing.assert_array_equal(near.any(axis=0), alone)


def test_edges_rise_even_where_all_auxiliary_images_are_alike():
  for measured in (np.full(30, 0.5), np.repeat([0.2, 0.4], 15)):
    for quantiles in ('normal', 'laplace', 'empirical'):
      assert np.all(np.diff(bin_edges(40, quantiles, measured=measured)) > 0)


def test_a_random_measurement_spreads_images_of_equal_brightness(honest):
  scenario = honest()
  flat = scenario.samples / scenario.samples.mean(axis=(1, 2, 3), keepdims=True) * 0.2
  scenario = scenario._replace(samples=np.clip(flat, 0, 1))
  revealed = []
  for measurement in ('mean', 'random'):
    w = np.asarray(measurement_vector(jax.random.key(3), 64, measurement), np.float64)
    measured = scenario.samples.reshape(12, -1) @ w
    revealed.append(measured.std() / np.abs(measured).mean())
  assert revealed[1] > 5 * revealed[0]
  assert abs(w.sum()) < 1e-5 and abs(w @ w - 1) < 1e-5


class Normed(nn.Module):
  """A dense layer, BatchNorm, and the classifier."""

  @nn.compact
  def __call__(self, images, train=False):
    x = nn.Dense(6)(images.reshape(images.shape[0], -1))
    return nn.Dense(10)(nn.relu(nn.BatchNorm(use_running_average=not train)(x)))


@pytest.mark.parametrize('wrapped', [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_model_behind_keeps_what_it_offers(digits, wrapped):
  images = jnp.asarray(digits[0][:3])
  model = models.from_flax(Normed())
  model = precode.precode(model, size=4) if wrapped else model
  variables = jax.jit(model.init, static_argnums=1)(jax.random.key(0), (8, 8, 1))
  module = module_parameters(jnp.full(64, 1 / 64), bin_edges(6, 'normal'))
  silent = {**module, 'return': jax.tree.map(jnp.zeros_like, module['return'])}
  inserted = insert(model, silent)
  behind = {**variables, 'params': {'imprint': silent, 'model': variables['params']}}
  jax.tree.map(
    np.testing.assert_array_equal,
    jax.jit(inserted.init, static_argnums=1)(jax.random.key(0), (8, 8, 1)),
    behind,
  )

  @jax.jit
  def calls(*both):
    key = jax.random.key(1)
    return [
      (
        model.apply(variables, images, True, key),
        model.penalised(variables, images, True, key) if wrapped else (),
        model.features(variables, images),
      )
      for model, variables in zip((inserted, model), both, strict=True)
    ]

  jax.tree.map(np.testing.assert_array_equal, *calls(behind, variables))
  paths = [path for layer in inserted.layers((8, 8, 1)) for path in layer.paths]
  leaves = {trees.path_names(path) for path, _ in jax.tree_util.tree_leaves_with_path(behind['params'])}
  assert set(paths) == leaves and len(paths) == len(leaves)
  assert paths[0] == ('imprint', 'measure', 'kernel') and paths[-2] == ('model', 'Dense_1', 'kernel')
  plain = insert(models.Model('plain', None, None), silent)
  assert (plain.features, plain.layers, plain.penalised) == (None, None, None)


@pytest.mark.slow
@pytest.mark.parametrize(
  'defense',
  [
    defenses.outpost(),
    defenses.fragmentation_random(ratio=0.5),
    defenses.soteria(rate=0.5),
    defenses.clip_samples(norm=1.0),
  ],
  ids=str,
)
def test_defenses_find_their_layers(digits, prepared, defense):
  scenario = gradleak.scenario(models.create('lenet', 10), digits[0][:2], digits[1][:2], key=jax.random.key(0))
  sent = prepared(imprint(bins=3), scenario, 2)
  client = defenses.bind(defense, defenses.Context(sent.client, sent.variables, (8, 8, 1))).client(sent.client)
  upload = jax.eval_shape(client.local_update, jax.random.key(0), sent.variables, sent.samples, sent.targets)
  assert jax.tree.structure(upload.update) == jax.tree.structure(sent.variables['params'])


def test_what_is_frozen_is_frozen_behind_the_module(prepared):
  model = gradleak.models.mlp(10, widths=4)
  images = jax.random.uniform(jax.random.key(0), (12, 4, 4, 1))
  for name in ('Dense_0', '/Dense_0'):
    scenario = gradleak.scenario(model, images, jnp.arange(12) % 10, key=jax.random.key(1), frozen=name)
    sent = prepared(imprint(bins=4), scenario, 1)
    trained = sent.client.trained_layers(sent.variables['params'], images.shape[1:])
    assert [bool(x) for x in jax.tree.leaves(trained['model'])] == [False, False, True, True]
    assert all(jax.tree.leaves(trained['imprint']))


def test_a_frozen_layer_is_found_behind_the_module_by_its_name(prepared):
  """Layers of a network of functions are called as its author likes, and hold parameters of several modules."""

  def init(key, shape):
    size = shape[0] * shape[1]
    return {'in': {'w': jax.random.normal(key, (size, 4))}, 'out': {'w': jnp.ones((4, 3)), 'b': jnp.zeros(3)}}

  def apply(params, images):
    return images.reshape(len(images), -1) @ params['in']['w'] @ params['out']['w'] + params['out']['b'][None]

  named = [trees.Layer('first', (('in', 'w'), ('out', 'b'))), trees.Layer('second', (('out', 'w'),))]
  model = gradleak.models.from_functions(init, apply, layers=named)
  images = jax.random.uniform(jax.random.key(0), (6, 4, 4, 1))
  scenario = gradleak.scenario(model, images, jnp.arange(6) % 3, key=jax.random.key(1), frozen='first')
  sent = prepared(imprint(bins=4), scenario, 1)
  trained = sent.client.trained_layers(sent.variables['params'], images.shape[1:])['model']
  assert not trained['in']['w'] and not trained['out']['b'] and trained['out']['w']


def test_a_model_of_tokens_is_refused_by_its_name(honest, prepared):
  scenario = honest()
  tokens = scenario.client.model._replace(name='words', dtype='int32')
  of_tokens = scenario._replace(client=dataclasses.replace(scenario.client, model=tokens))
  with pytest.raises(errors.UsageError, match="the model 'words' takes tokens: take decepticons"):
    prepared(imprint(), of_tokens, 12)


def test_what_is_missing_is_named(honest, prepared):
  with pytest.raises(errors.UsageError, match='public'):
    prepared(imprint(quantiles='empirical'), honest(public=None), 12)
  scenario = honest()
  update = scenario.variables['params']
  observation = Observation(scenario.variables, update, jnp.zeros((12, 10)), Knowledge(), scenario.samples.shape, 10)
  with pytest.raises(errors.UsageError, match='module'):
    imprint()(Client(scenario.client.model, 10)).reconstruct(jnp.float32(0), observation)
