"""Class and feature fishing: what they isolate against one sample's own gradient, and what they cannot."""

import dataclasses
import functools
import itertools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import gradleak
from gradleak import Client, Knowledge, Observation, models
from gradleak.core import errors, trees
from gradleak.models import torch_weights
from gradleak.servers import Observed, fishing, fishing_search
from gradleak.servers.fishing import class_fishing, feature_fishing
from gradleak.servers.fishing_search import class_fished, fish, last_layer
from tests.attackers import run

pytestmark = pytest.mark.usefixtures('fast_compilation')


@functools.cache
def compiled(client):
  return jax.jit(functools.partial(client.local_update, None))


def masked(model, update, target, sample_shape):
  """The update without the rows of the last layer that every sample has a share in."""
  kernel, bias = last_layer(model, sample_shape, update)
  own = (np.arange(trees.get(update, bias).shape[0]) == target).astype(np.float32)
  kept = {path: np.asarray(trees.get(update, path)) * own for path in (kernel, bias)}
  return jax.tree_util.tree_map_with_path(lambda path, leaf: kept.get(trees.path_names(path), leaf), update)


def cosine(a, b):
  a, b = (np.concatenate([np.ravel(x).astype(np.float64) for x in jax.tree.leaves(tree)]) for tree in (a, b))
  return a @ b / max(np.linalg.norm(a) * np.linalg.norm(b), 1e-300)


@pytest.fixture(scope='module')
def fished(network, small_images, prepared):
  scenario = gradleak.scenario(network[0], *small_images, variables=network[1])
  return prepared(class_fishing(target=3), scenario, 8)


def observation_of(variables, update, images, **evidence):
  labels, knowledge = jnp.zeros((len(images), 10)), Knowledge(labels='unused')
  return Observation(variables, update, labels, knowledge, images.shape, 10, **evidence)


def observed(scenario, images, labels):
  update = compiled(scenario.client)(scenario.variables, images, labels).update
  return observation_of(scenario.variables, update, images)


def assert_equal(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.long
def test_class_fishing_leaves_one_samples_gradient(network, fished, small_images):
  images, labels = small_images  # one of each class from 0 to 7
  model, honest = network
  last, before = fished.variables['params']['Dense_0'], honest['params']['Dense_0']
  np.testing.assert_array_equal(last['kernel'], 0.5 * (np.arange(10) == 3) * np.ones((before['kernel'].shape[0], 1)))
  np.testing.assert_array_equal(last['bias'], np.where(np.arange(10) == 3, before['bias'], 1e20).astype(np.float32))
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


@pytest.mark.long
def test_the_isolated_sample_is_matched(fished, small_images):
  images, labels = small_images
  attack = class_fishing(target=3, inner='csdlg_fast', steps=150, tv=1e-5)(fished.client)
  observation = observed(fished, images, labels)
  assert observation.update['Dense_0']['kernel'].shape[1] == 10 and attack.num_steps == 150
  # The truth's other samples play no part, and what others leave in the last layer is not compared.
  objective = jax.jit(functools.partial(attack.objective, observation))
  onehot = np.eye(10, dtype=np.float32)
  assert float(objective(images, onehot[labels])) < 1e-4
  assert float(objective(images[::-1], onehot[labels])) > 1e-3
  for others in (np.full(8, 5), np.r_[labels[:7], 3]):  # none of the class, and two: neither is the truth
    assert np.isnan(objective(images, onehot[others]))


@pytest.mark.long
def test_evidence_of_the_batch_becomes_that_of_one_sample(network, fished, small_images):
  images, labels = small_images
  observation = observed(fished, images, labels)
  known = jax.tree.map(lambda x: jnp.full(x.shape, 0.5, jnp.float32), observation.update)
  with_evidence = dataclasses.replace(observation, weights=known, noise=jnp.float32(3), clip=jnp.float32(1))
  seen = fishing.isolated(network[0], with_evidence, 3, 2.0)
  assert_equal(seen.update, jax.tree.map(lambda x: 8 * x, observation.update))
  entries = sum(leaf.size for leaf in jax.tree.leaves(observation.update))
  counted = jax.tree.map(lambda w, x: np.broadcast_to(w, x.shape), seen.weights, observation.update)
  share = sum(np.count_nonzero(leaf) for leaf in jax.tree.leaves(counted)) / entries  # other classes' rows have none
  np.testing.assert_allclose(float(seen.noise), 3 * 8**2 * 2 * share, rtol=1e-6)
  assert share < 0.99 and seen.clip == np.inf
  assert seen.batch_shape == (1, 8, 8, 1) and seen.knowledge.labels == 'known' and np.argmax(seen.targets) == 3
  for factor, weights in ((1.0, fishing.isolated(network[0], observation, 3).weights), (0.5, seen.weights)):
    counted = jax.tree.map(lambda w, x: np.broadcast_to(w, x.shape), weights, observation.update)
    expected = masked(network[0], jax.tree.map(lambda x, f=factor: f * np.ones(x.shape), counted), 3, (8, 8, 1))
    assert_equal(counted, expected)
    assert {leaf.dtype for leaf in jax.tree.leaves(weights)} == {np.dtype(np.float32)}
  delta = dataclasses.replace(observation, knowledge=Knowledge(labels='unused', share='delta'))
  with pytest.raises(errors.UsageError, match="share='delta'"):
    fishing.isolated(network[0], delta, 3)


def recovered(attack, observation, starts):
  """Returns the `Reconstruction` from each of several starts."""
  return jax.vmap(lambda key: run(attack, key, observation)[0])(jax.random.split(jax.random.key(0), starts))


@pytest.mark.slow
def test_the_isolated_sample_is_recovered(fished, small_images):
  images, labels = small_images
  attack = class_fishing(target=3, inner='csdlg_fast', steps=150, tv=1e-5)(fished.client)
  observation = observed(fished, images, labels)
  found = recovered(attack, observation, 2)
  assert found.samples.shape == (2, 1, 8, 8, 1) and np.all(found.labels == 3)
  psnr = -10 * np.log10(np.mean((np.clip(found.samples[:, 0], 0, 1) - images[3]) ** 2, axis=(1, 2, 3)))
  print('PSNR', psnr)
  assert psnr.min() > 25
  assert np.argmin([np.mean((found.samples[0, 0] - image) ** 2) for image in images]) == 3


@pytest.fixture(scope='module')
def classifier():
  """A last layer alone, on given features: the search sees no more of a network."""
  layer = trees.Layer('linear', (('linear', 'kernel'), ('linear', 'bias')))
  return models.from_functions(
    lambda key, shape: {'linear': {'kernel': jnp.zeros((shape[0], 10)), 'bias': jnp.zeros(10)}},
    lambda params, x: flat(x) @ params['linear']['kernel'] + params['linear']['bias'].reshape(1, -1),
    'classifier',
    features=lambda params, x: flat(x),
    layers=[layer],
  )


def flat(x):
  return x.reshape(x.shape[0], 12)


def answers(classifier):
  """Returns (variables, features [N, 12], labels) -> update: features are images of one column."""
  update = compiled(Client(classifier, 10))
  return lambda variables, x, labels: update(variables, x.reshape(-1, 12, 1, 1), labels)


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
  update = answers(classifier)
  asked = []

  def query(variables):
    asked.append(variables)
    return update(variables, x, labels).update

  found = fish(query, classifier, classifier.init(jax.random.key(0), (12, 1, 1)), (12, 1, 1), 32, method=method)
  assert found.queries == len(asked) <= 64
  # A naive search among the features themselves.
  expected = min(x[:3, 5]) if method == 'published' else max(x[:, 5])
  sample = int(np.flatnonzero(x[:, 5] == expected)[0])
  if method == 'published' and not clean:
    assert not found.alone  # other classes reach as high
    return
  assert found.alone and abs(found.samples - 1) < 0.02 and found.queries < 20
  if method == 'published':  # every threshold is the mean of the samples of the class below the one before
    thresholds, below = [np.mean(x[:3, 5])], np.array([])
    while not np.array_equal(below, [expected]):
      below = x[:3, 5][x[:3, 5] < thresholds[-1] + 1e-4]
      thresholds.append(below.mean())
    sent = [-float(variables['params']['linear']['bias'][0]) / 300 for variables in asked[1:]]
    np.testing.assert_allclose(sent[: len(thresholds)], thresholds, atol=1e-3)
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
  update = answers(classifier)
  found = fish(
    lambda variables: update(variables, x, labels).update,
    classifier,
    classifier.init(jax.random.key(0), (12, 1, 1)),
    (12, 1, 1),
    64,
    method='difference',
    public=public.reshape(-1, 12, 1, 1),
  )
  assert found.alone
  assert np.abs(x - found.features).sum(axis=1).argmin() < 2


@pytest.mark.parametrize('count', [0, 1])
def test_no_sample_of_the_class_or_one_needs_one_query(classifier, count):
  labels = np.r_[np.zeros(count), np.ones(8 - count)].astype(np.int32)
  x = features_of(np.random.default_rng(0), labels, True)
  update = answers(classifier)
  variables = classifier.init(jax.random.key(0), (12, 1, 1))
  found = fish(lambda v: update(v, x, labels).update, classifier, variables, (12, 1, 1), 8)
  assert found.queries == 1 and found.alone == (count == 1) and abs(found.samples - count) < 1e-3
  if count:
    np.testing.assert_allclose(found.features, x[0], rtol=1e-4)


class Dense(nn.Module):
  """A hidden layer of features, and the last one."""

  @nn.compact
  def __call__(self, images):
    return nn.Dense(10)(nn.relu(nn.Dense(24)(images.reshape(images.shape[0], -1))))


@pytest.fixture(scope='module')
def pair():
  """Eight digits, two of them threes, and a server's public ones."""
  from sklearn.datasets import load_digits

  data = load_digits()
  images, labels = (data.images[..., None] / 16).astype(np.float32), data.target.astype(np.int32)
  chosen = np.r_[np.flatnonzero(labels[:300] == 3)[2:4], np.flatnonzero(labels[:300] != 3)[:6]]
  public = images[300:], labels[300:]
  return gradleak.scenario(
    models.from_flax(Dense()), images[chosen], labels[chosen], key=jax.random.key(10), public=public
  )


def served(pair, **settings):
  """Returns (attack, server, its scenario, answer of the client to the variables of a state)."""
  method = feature_fishing(target=3, **settings)
  server = method.server.build(method.server.numbers)
  sent = server.prepare(jax.random.key(0), pair, 8)
  update = compiled(sent.client)

  def answer(state):
    return jax.tree.map(np.asarray, update(server.send(state), sent.samples, sent.targets).update)

  return method, server, sent, answer


def states(server, sent, answer):
  """Yields the state before each round and at the end."""
  state = server.init(sent, len(sent.samples))
  yield state
  for _ in range(server.rounds):
    if not server.finished(state):
      state = server.receive(state, answer(state))
      yield state
  assert server.finished(state)


@pytest.mark.parametrize('method', ['published', 'difference'])
def test_the_server_asks_and_finds_what_the_loop_does(pair, method):
  _, server, sent, answer = served(pair, method=method)
  passed = list(states(server, sent, answer))
  asked, state = [server.send(before) for before in passed[:-1]], passed[-1]
  for before, after in itertools.pairwise(passed):
    # Pure: a state is not changed by what follows, and one read back from its bytes goes the same way.
    for again in (before, pickle.loads(pickle.dumps(before))):
      assert_equal(server.receive(again, answer(again)), after)
  loop, update = [], compiled(sent.client)

  def query(variables):
    loop.append(variables)
    return update(variables, sent.samples, sent.targets).update

  public = pair.public[0] if method == 'difference' else None
  found = fish(query, pair.client.model, pair.variables, (8, 8, 1), 8, target=3, method=method, public=public)
  assert_equal(asked, loop)
  assert_equal(state.fished, found)
  assert found.alone and 3 <= found.queries == len(asked) < server.rounds == 64
  seen = server.observed(state)
  assert_equal((seen.variables, seen.update), (found.variables, found.update))
  assert_equal(asked[0], class_fished(pair.client.model, pair.variables, (8, 8, 1), 3))
  features = np.asarray(jax.jit(pair.client.model.features)(pair.variables, sent.samples))
  assert np.abs(features - found.features).sum(axis=1).argmin() < 2  # one of the class


@pytest.mark.long
def test_statistics_of_public_texts_are_those_of_their_tokens():
  model = models.bert(4, 'default', width=8, layers=1, heads=1, length=6, head='mean')
  variables, texts = model.init(jax.random.key(0), (6,)), np.random.default_rng(0).integers(97, 122, (12, 6), np.int32)
  mean, covariance = fishing_search._feature_statistics(model, variables, texts)
  np.testing.assert_allclose(mean, np.mean(model.features(variables, texts), axis=0), rtol=1e-4, atol=1e-6)
  assert covariance.shape == (8, 8)


@pytest.mark.parametrize('method', ['published', 'difference'])
def test_rounds_end_early_or_by_their_number(pair, method):
  _, server, sent, answer = served(pair, method=method, max_queries=3)
  passed = list(states(server, sent, answer))
  assert server.rounds == 3 and 3 <= len(passed) <= 4 and passed[-1].fished.queries == len(passed) - 1
  for before, after in itertools.pairwise(passed[:-1]):
    # Of a search that is cut short, the last round as it is.
    assert not server.finished(after)
    assert_equal(server.observed(after), Observed(server.send(before), answer(before)))
  one = pair._replace(samples=pair.samples[1:], targets=pair.targets[1:])
  _, server, sent, answer = served(one, method=method)
  *_, first, state = states(server, sent, answer)
  assert not server.finished(first) and state.fished.alone and state.fished.queries == 1


def test_updates_that_are_no_longer_needed_are_dropped(pair):
  _, server, sent, answer = served(pair, method='difference', multiplier=1.0)
  for state in states(server, sent, answer):
    assert sum(one.update is not None for one in state.answers) <= 2
  assert state.fished.queries > 5 and state.answers == ()


@pytest.mark.long
@pytest.mark.parametrize('method', ['published', 'difference'])
def test_the_truth_is_the_sample_that_was_isolated(pair, method):
  attack, server, sent, answer = served(pair, method=method, inner='csdlg_fast', steps=10, tv=1e-6)
  first, *_, state = states(server, sent, answer)
  made, onehot = attack(sent.client), np.eye(10, dtype=np.float32)
  objective = jax.jit(made.objective)

  def at(seen, images, labels):
    return float(objective(observation_of(seen.variables, seen.update, images), images, onehot[labels]))

  seen, images, labels = server.observed(state), sent.samples, sent.targets
  assert made.auxiliary_data == (method == 'difference')
  assert at(seen, images, labels) < 1e-4
  assert at(seen, images[::-1], labels[::-1]) < 1e-4  # whatever its position
  assert at(seen, np.zeros_like(images), labels) > 1e-2
  # 'difference' may have isolated a sample of another class, 'published' has not.
  other = at(seen, images, np.full(8, 5))
  assert other < 1e-4 if method == 'difference' else np.isnan(other)
  twice = seen._replace(update=jax.tree.map(lambda x: 2 * x, seen.update))
  assert np.isnan(at(twice, images, labels))  # two samples
  layer = seen.variables['params']['Dense_0']
  layer = {**layer, 'bias': layer['bias'].at[3].add(900)}
  moved = {**seen.variables, 'params': {**seen.variables['params'], 'Dense_0': layer}}
  assert np.isnan(at(seen._replace(variables=moved), images, labels))  # not where the sample is
  once = server.observed(server.receive(first, answer(first)))
  assert np.isnan(at(once, images, labels))  # class fishing of two samples
  alone = np.where(np.arange(8) == 1, 4, labels)
  assert np.isfinite(at(once, images, alone))


def test_a_difference_has_the_noise_of_two_uploads(pair, monkeypatch):
  noise = []
  isolated = fishing.isolated

  def watched(*arguments):
    noise.append(float(isolated(*arguments).noise))
    return isolated(*arguments)

  monkeypatch.setattr(fishing, 'isolated', watched)
  for method, searched, expected in (('published', True, 64), ('difference', True, 128), ('difference', False, 64)):
    attack, server, sent, answer = served(pair, method=method, inner='csdlg_fast', steps=1)
    state = server.receive(server.init(sent, 8), answer(server.init(sent, 8)))
    variables = server.send(state) if searched else server.send(server.init(sent, 8))
    update = jax.tree.map(jnp.asarray, answer(state))
    seen = observation_of(variables, update, sent.samples, noise=jnp.float32(1))
    attack(sent.client).init(jax.random.key(0), seen)
    own = fishing.own_share(sent.client.model, sent.samples.shape[1:], update, 3)
    both = zip(*map(jax.tree.leaves, (own, update)), strict=True)
    share = sum(int(np.broadcast_to(w, x.shape).sum()) for w, x in both) / sum(x.size for x in jax.tree.leaves(update))
    assert share < 1 and noise[-1] == pytest.approx(expected * share)


def test_whether_a_search_ends_at_the_noise_is_asked_of_the_one_sample_that_is_matched(network):
  attack = fishing.class_fishing(target=0, steps=2)(Client(network[0], 10))
  assert len({attack.noise((number, 8, 8, 1), network[1]) for number in (1, 8, 512)}) == 1


@pytest.mark.slow
@pytest.mark.parametrize('method', ['published', 'difference'])
def test_the_sample_that_was_isolated_is_recovered(pair, method):
  attack, server, sent, answer = served(pair, method=method, inner='csdlg_fast', steps=300, tv=1e-5)
  *_, state = states(server, sent, answer)
  observation = observation_of(*server.observed(state), sent.samples)
  made = attack(sent.client)
  found = recovered(made, observation, 4)
  best = np.clip(found.samples[np.argmin(found.objective)], 0, 1)
  psnr = -10 * np.log10(np.mean((best - sent.samples) ** 2, axis=(1, 2, 3)))
  print('PSNR', psnr)
  assert psnr[:2].max() > 25 > psnr[2:].max()


class Normed(nn.Module):
  @nn.compact
  def __call__(self, x, train=False):
    x = nn.Dense(6)(x.reshape(x.shape[0], -1))
    x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.7)(x))
    x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(nn.Dense(5)(x))
    return nn.Dense(10)(nn.relu(x))


@pytest.mark.long
def test_running_statistics_become_those_of_public_images(small_images, prepared):
  images, labels = small_images
  model = models.from_flax(Normed())
  scenario = gradleak.scenario(model, images, labels, key=jax.random.key(0), public=(images, labels))
  honest = scenario.variables
  assert set(prepared(class_fishing(), scenario, 8).variables) == set(honest)
  sent = prepared(class_fishing(statistics='public'), scenario, 8).variables
  assert_equal(prepared(feature_fishing(statistics='public'), scenario, 8).variables, sent)
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


@pytest.mark.long
@pytest.mark.parametrize('fishing_for', [class_fishing, feature_fishing])
def test_clients_and_models_that_cannot_be_fished_are_usage_errors(network, small_images, prepared, fishing_for):
  def scenario(**settings):
    return gradleak.scenario(network[0], *small_images, variables=network[1], **settings)

  def with_model(model):
    return honest._replace(client=dataclasses.replace(honest.client, model=model))

  honest = scenario()
  bare = models.from_functions(network[0].init, network[0].apply)
  convolution = network[0]._replace(layers=lambda shape: network[0].layers(shape)[:-1])
  for settings, sent, message in (
    ({'target': 10}, honest, 'target is 10, expected an integer in'),
    ({'statistics': 'public'}, honest, 'public=\\(samples, targets\\)'),
    ({'statistics': 'public'}, scenario(public=small_images), 'to the model .*, which has no BatchNorm: leave it out'),
    ({}, scenario(loss='squared_error'), 'needs the loss cross_entropy, and this client has squared_error'),
    ({}, scenario(share='delta'), "share='delta', epochs=1"),
    ({}, scenario(cohort=2), 'the server sees the mean of 2'),
    ({}, scenario(private='Dense_0'), 'fishing sets Dense_0/.* frozen or private'),
    ({}, scenario(frozen='Dense_0'), 'fishing sets Dense_0/.* frozen or private'),
    ({}, scenario(share='delta', local_epochs=3), "share='delta', epochs=3"),
    ({}, with_model(bare), "does not offer 'layers'"),
    (
      {},
      honest._replace(client=dataclasses.replace(honest.client, model=convolution)),
      'is no dense layer with a bias',
    ),
  ):
    with pytest.raises(errors.UsageError, match=message):
      prepared(fishing_for(**settings), sent, 8)


@pytest.mark.parametrize('fishing_for', [class_fishing, feature_fishing])
def test_it_says_that_it_simulates_running_statistics(network, fishing_for):
  assert fishing_for()(Client(network[0], 10)).running
  assert not gradleak.attacks.csdlg()(Client(network[0], 10)).running


def test_public_images_that_are_alike_are_a_usage_error(classifier):
  with pytest.raises(errors.UsageError, match='the same features'):
    fish(
      None,
      classifier,
      classifier.init(jax.random.key(0), (12, 1, 1)),
      (12, 1, 1),
      8,
      method='difference',
      public=np.ones((5, 12, 1, 1)),
    )


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
    ('class fishing', class_fished(model, variables, shape, 3)),
    ('unmodified', variables),
  ):
    own = masked(model, update['eval'](sent, images[chosen[:1]], labels[chosen[:1]]).update, 3, shape)
    for mode in ('eval', 'train'):
      batch = masked(model, update[mode](sent, images[chosen], labels[chosen]).update, 3, shape)
      figures[f'{name}, {mode}'] = cosine(batch, own)
  chosen = np.r_[of_class[:2], rng.choice(others, 126, replace=False)]
  for method in ('published', 'difference'):
    for data in (None, public):
      found = fish(
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


@pytest.mark.slow
def test_large_logits_hide_no_sample_of_the_class():
  """Of a network whose weights are drawn wide, the target's logit is far beyond the published bias of 1,000."""
  model = models.create('convnet(width=2)', 10, init='explicit')
  variables = jax.tree.map(lambda x: 3 * x, model.init(jax.random.key(0), (9, 9, 1)))
  images = np.random.default_rng(0).uniform(size=(3, 9, 9, 1)).astype(np.float32)
  client = Client(model, 10, batch_norm='eval')
  sent = class_fished(model, variables, (9, 9, 1), 1)
  alone = jax.jit(client.local_update)(None, sent, images[1:2], np.array([1])).update
  of_three = jax.jit(client.local_update)(None, sent, images, np.array([0, 1, 2])).update
  bias = [np.asarray(update['Dense_0']['bias'])[1] for update in (alone, of_three)]
  np.testing.assert_allclose(bias, [-1, -1 / 3], rtol=1e-6)
  assert float(jnp.max(jax.jit(model.features)(sent, images).sum(1))) * 0.5 > 1000
