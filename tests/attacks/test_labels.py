import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradleak as gl
from gradleak import Client, attacks, models
from gradleak.attacks import labels as rules
from gradleak.core import errors, trees
from gradleak.threat import Knowledge, Observation
from tests import texts


@pytest.fixture(scope='module')
def dense_network():
  """A network whose features are ≥ 0 and unequal, at default initialisation, as a real classifier starts."""
  model = models.create('mlp(widths=64)', 10, init='default')
  return model, model.init(jax.random.key(2), (8, 8, 1))


def known_of(model, variables):
  """What is known of a network that predicts every class alike."""
  layer = rules.last_layer(model, variables['params'], (8, 8, 1), 10)
  return rules.Known(layer, lambda: jnp.full(10, 0.1), lambda: jnp.full((10, 10), 0.1))


@pytest.mark.parametrize('rule', rules.RULES)
def test_single_labels_are_read_exactly(rule, observe, client, small_images):
  images, labels = small_images
  public = rules.class_images(images, labels, client.num_classes)
  infer = jax.jit(lambda observation: rules.infer(rule, client.model, observation))
  for i in range(8):
    observation = observe(images[i : i + 1], labels[i : i + 1], 'inferred')
    observation = dataclasses.replace(observation, class_images=public)
    assert infer(observation).tolist() == [labels[i]]


@pytest.mark.parametrize('rule', ['yin', 'bias_corrected', 'wainakh', 'ilrg', 'geng', 'rlu'])
def test_distinct_labels_of_a_batch_are_read_exactly(rule, dense_network, small_images, observe):
  model, variables = dense_network
  images, labels = small_images
  upload = jax.jit(functools.partial(Client(model, 10).local_update, None))(variables, images[:6], labels[:6])
  kernel, bias = rules.last_layer(model, upload.update, (8, 8, 1), 10)
  known = known_of(model, variables)
  assert sorted(rules.RULES[rule](kernel, bias, 6, known).tolist()) == sorted(labels[:6].tolist())


@pytest.mark.parametrize('rule', ['bias_corrected', 'wainakh', 'ilrg', 'geng', 'rlu'])
def test_repeated_labels_are_counted(rule, dense_network, small_images):
  model, variables = dense_network
  images = jnp.asarray(small_images[0])
  truth = np.asarray([3, 3, 3, 3, 7, 7, 1, 1], np.int32)
  upload = jax.jit(functools.partial(Client(model, 10).local_update, None))(variables, images, truth)
  kernel, bias = rules.last_layer(model, upload.update, (8, 8, 1), 10)
  known = known_of(model, variables)
  assert collections.Counter(rules.RULES[rule](kernel, bias, 8, known).tolist()) == collections.Counter(truth.tolist())


@pytest.mark.long
@pytest.mark.parametrize('rule', rules.RULES)
def test_an_update_without_the_last_layer_tells_no_label(rule, observe, client, small_images):
  images, labels = (x[:1] for x in small_images)
  public = rules.class_images(*small_images, client.num_classes)
  seen = observe(images, labels, 'inferred', label_inference=rule)
  last = client.model.layers((8, 8, 1))[-1].paths
  update = jax.tree.map_with_path(
    lambda path, leaf: jnp.zeros_like(leaf) if trees.path_names(path) in last else leaf, seen.update
  )
  seen = dataclasses.replace(seen, update=update, class_images=public)
  assert rules.infer(rule, client.model, seen).tolist() == [-1]
  attack = attacks.csdlg(steps=1)(client)
  state = attack.init(jax.random.key(0), seen)
  np.testing.assert_allclose(state.targets, np.full((1, 10), 0.1))
  assert attack.reconstruct(state, seen).labels.tolist() == [-1]


@pytest.mark.long
def test_bias_corrected_against_a_naive_form_on_random_gradients():
  """Subtracts at the label just taken: a public implementation subtracted at a stale index."""
  rng = np.random.default_rng(0)
  for _ in range(20):
    bias, count = rng.normal(size=6).astype(np.float32), 9
    scores, taken = bias.astype(np.float64).copy(), []
    impact = bias[bias < 0].sum() / count
    for label in sorted(np.flatnonzero(bias < 0), key=lambda c: bias[c])[:count]:
      taken.append(label)
      scores[label] -= impact
    while len(taken) < count:
      label = int(np.argmin(scores))
      taken.append(label)
      scores[label] -= impact
    found = rules.bias_corrected(jnp.zeros((2, 6)), jnp.asarray(bias), count)
    assert found.tolist() == taken


def test_labels_of_a_delta_are_read_with_the_sign_turned(network, small_images, observe):
  import optax

  images, labels = small_images
  victim = Client(network[0], 10, share='delta', optimizer=optax.sgd(0.01), epochs=2)
  observation = observe(images[:1], labels[:1], 'inferred', victim=victim, local_steps=2)
  assert rules.infer('idlg', network[0], observation).tolist() == [labels[0]]


def test_rules_that_cannot_read_a_batch_say_so(client, observe, small_images):
  images, labels = small_images
  observation = observe(images[:2], labels[:2], 'inferred')
  with pytest.raises(errors.UsageError, match='batch holds 2'):
    rules.infer('idlg', client.model, observation)
  with pytest.raises(errors.UsageError, match='no class twice'):
    rules.yin(jnp.zeros((4, 3)), jnp.zeros(3), 5)
  with pytest.raises(errors.UsageError, match="did you mean 'yin'"):
    rules.infer('yn', client.model, observation)


@pytest.mark.long
@pytest.mark.parametrize('share', ['gradient', 'delta'])
def test_labels_are_read_from_weights_alone_where_the_head_has_no_bias(share, small_images):
  """Rules that read the bias say so; the others find the labels of real digits."""
  model = models.from_functions(
    lambda key, shape: {'w': 0.01 * jax.random.normal(key, (64, 10))}, lambda p, x: x.reshape(-1, 64) @ p['w'], 'bare'
  )
  images, labels = small_images[0][:3], small_images[1][:3]  # of three classes
  client = Client(model, 10, share=share)
  variables = model.init(jax.random.key(0), (8, 8, 1))
  assert rules.last_layer(model, variables['params'], (8, 8, 1), 10).bias is None

  def observation(number):
    sent = jax.jit(client.local_update)(None, variables, images[:number], labels[:number])
    knowledge = Knowledge(share=share, labels='inferred')
    return Observation(variables, sent.update, jnp.zeros((number, 10)), knowledge, (number, 8, 8, 1), 10)

  assert rules.infer('idlg', model, observation(1)).tolist() == [labels[0]]
  for rule in ('yin', 'wainakh'):
    assert rules.infer(rule, model, observation(3)).tolist() == sorted(labels.tolist())
  for rule in rules.BIASED:
    with pytest.raises(
      errors.UsageError, match=f"'{rule}' reads the bias of the classifying layer, and 'bare' has none"
    ):
      rules.infer(rule, model, observation(1), moved=0.1)


@pytest.mark.parametrize('rule', rules.RULES)
def test_adapters_of_the_classifier_tell_no_label(rule):
  """Their features have either sign, so that the least sum of weight gradients is any class."""
  model = models.create('mlp(widths=8)+lora(rank=4)', 10, init='default')
  variables = model.init(jax.random.key(0), (8, 8, 1))
  seen = Observation(variables, variables['params'], None, Knowledge(labels='inferred'), (1, 8, 8, 1), 10)
  with pytest.raises(errors.UsageError, match='sends that of its adapters'):
    rules.infer(rule, model, seen)


@pytest.mark.parametrize('axes', [2, 1])
@pytest.mark.parametrize('rule', rules.RULES)
def test_classes_of_positions_are_not_inferred(rule, axes):
  """What a rule reads of three pixels a side fits three classes in shape, and was taken for labels."""
  model = models.from_functions(
    lambda key, shape: {'kernel': jax.random.normal(key, (shape[-1], 3)), 'bias': jnp.zeros(3)},
    lambda params, x: x @ params['kernel'] + params['bias'].reshape((1,) * (x.ndim - 1) + (-1,)),
    'pixels',
  )
  shape, variables = (1, *[3] * axes, 4), model.init(jax.random.key(0), (3, 3, 4))
  known = Knowledge(labels='inferred', label_inference=rule)
  seen = Observation(variables, variables['params'], jnp.zeros((*shape[:-1], 3)), known, shape, 3)
  with pytest.raises(errors.UsageError, match="'pixels' returns classes of positions"):
    rules.infer(rule, model, seen)


def test_two_layers_that_could_be_the_last_one_are_named():
  params = {'a': jnp.zeros((64, 10)), 'b': jnp.zeros((10, 10))}
  model = models.from_functions(lambda key, shape: params, lambda p, x: x.reshape(-1, 64) @ p['a'] @ p['b'])
  with pytest.raises(errors.UsageError, match='has 2 weights and 0 biases for 10 classes'):
    rules.last_layer(model, params, (8, 8, 1), 10)


def test_idlg_takes_the_sum_of_a_class_not_its_extreme():
  kernel = jnp.asarray([[-1.0, 2.0, 0.5], [-1.0, -3.0, 0.5]])  # sums −2, −1, 1; least entries −1, −3, 0.5
  assert rules.RULES['idlg'](kernel, jnp.zeros(3), 1).tolist() == [0]
  flipped = jnp.asarray([[1.0, -0.5], [-4.0, -0.5]])  # sums −3, −1; largest entries 1, −0.5
  assert rules.RULES['idlg'](flipped, jnp.zeros(2), 1).tolist() == [0]


@pytest.mark.parametrize(
  ('expected', 'count', 'labels'),
  [
    ([1.4, 0.6, 2.0], 4, [0, 1, 2, 2]),  # the remainder 0.6 before 0.4
    ([-3.0, 2.0], 3, [1, 1, 1]),
    ([2.0, 2.0], 2, [0, 1]),  # proportions count
    ([0.0, 5.0, 0.0], 1, [1]),
    ([-1.0, -2.0], 6, [0, 0, 0, 1, 1, 1]),  # nothing is expected, and no class beyond the last
    ([0.0, np.nan], 4, [0, 0, 1, 1]),
    ([np.inf, 1.0], 2, [0, 1]),
  ],
)
def test_counts_are_rounded_by_largest_remainders(expected, count, labels):
  assert rules.of_counts(jnp.asarray(expected), count).tolist() == labels


@pytest.mark.long
def test_counts_are_exact_where_all_features_are_equal():
  rng = np.random.default_rng(0)
  weights, offsets, features = rng.normal(size=(5, 4)), rng.normal(size=4), rng.uniform(size=5)
  logits = features @ weights + offsets
  predicted = np.exp(logits) / np.exp(logits).sum()
  layer = rules.Dense(jnp.float32(weights), jnp.float32(offsets))
  known = rules.Known(layer, lambda: jnp.float32(predicted), lambda: jnp.tile(jnp.float32(predicted), (4, 1)))
  for counts in ([3, 0, 2, 4], [9, 0, 0, 0], [2, 2, 2, 3]):  # the last are near the prediction: hardly any gradient
    bias = predicted - np.asarray(counts) / 9
    for rule in (rules.ilrg, rules.geng, rules.rlu):
      found = rule(jnp.float32(np.outer(features, bias)), jnp.float32(bias), 9, known)
      assert found.tolist() == np.repeat(range(4), counts).tolist()
  for rule in (rules.ilrg, rules.geng, rules.rlu):
    with pytest.raises(errors.UsageError, match='needs what is known'):
      rule(jnp.zeros((5, 4)), jnp.zeros(4), 9)
    assert rule(jnp.zeros((5, 4)), jnp.zeros(4), 9, known).shape == (9,)


@pytest.mark.slow
def test_the_size_of_a_delta_is_read_with_the_learning_rate_alone(dense_network, small_images, observe):
  import optax

  model, variables = dense_network
  images, truth = jnp.asarray(small_images[0]), np.asarray([3, 3, 3, 3, 7, 7, 1, 1], np.int32)
  victim = Client(model, 10, share='delta', optimizer=optax.sgd(0.01), epochs=2)
  update = jax.jit(functools.partial(victim.local_update, None))(variables, images, truth).update
  knowledge = Knowledge(labels='inferred', share='delta', local_steps=2)
  public = rules.class_images(*small_images, 10)
  observation = Observation(variables, update, jnp.zeros((8, 10)), knowledge, (8, 8, 8, 1), 10, class_images=public)
  assert rules.infer('wainakh', model, observation).tolist() == rules.infer('wainakh', model, observation, 5.0).tolist()
  for rule in rules.SIZED:
    assert rules.infer(rule, model, observation, 0.02).tolist() == sorted(truth)
    with pytest.raises(errors.UsageError, match='learning rate'):
      rules.infer(rule, model, observation)


@pytest.mark.slow
def test_auxiliary_images_tell_what_a_trained_network_predicts_of_each_class():
  """Two classes that the network takes for each other, as training leaves it: noise and mean features mislead."""
  rng = np.random.default_rng(0)
  truth = np.repeat(np.arange(4, dtype=np.int32), [1, 9, 20, 34])

  def drawn(labels):
    centres = np.eye(4, dtype=np.float32)[[0, 1, 1, 3]]  # classes 1 and 2 look alike
    return (centres[labels] * 3 + rng.normal(size=(len(labels), 4))).astype(np.float32).reshape(-1, 2, 2, 1)

  model = models.from_functions(
    lambda key, shape: {'out': {'kernel': jnp.eye(4), 'bias': jnp.zeros(4)}},
    lambda p, x: x.reshape(len(x), -1) @ p['out']['kernel'] + p['out']['bias'][None],
  )
  variables = {'params': {'out': {'kernel': 2 * jnp.eye(4), 'bias': jnp.zeros(4)}}}
  public = np.tile(np.arange(4), 50)
  update = Client(model, 4).local_update(None, variables, drawn(truth), truth).update
  observation = Observation(
    variables, update, jnp.zeros((64, 4)), Knowledge(labels='inferred'), (64, 2, 2, 1), 4,
    class_images=rules.class_images(drawn(public), public, 4),
  )  # fmt: skip

  def missed(rule):
    found = np.bincount(rules.infer(rule, model, observation), minlength=4)
    return np.maximum(np.bincount(truth) - found, 0).sum()

  assert missed('rlu') <= 8 < min(missed('geng'), missed('bias_corrected'))
  with pytest.raises(errors.UsageError, match='public=\\(samples, targets\\)'):
    rules.infer('rlu', model, dataclasses.replace(observation, class_images=None))
  assert rules.class_images(drawn(public), np.where(public == 3, 0, public), 4).shape == (4, 100, 2, 2, 1)


@pytest.mark.slow
def test_sums_of_a_transformers_weight_gradients_say_nothing(small_images):
  """LayerNorm centres its features: at initialisation, where it has no offset, they sum to zero."""
  model = models.create('vit_tiny(depth=1,width=16,heads=1)', 10, init='default')
  variables = model.init(jax.random.key(0), (8, 8, 1))
  send = jax.jit(functools.partial(Client(model, 10).local_update, None))
  images, labels = small_images
  for i in range(4):
    kernel, bias = rules.last_layer(model, send(variables, images[i : i + 1], labels[i : i + 1]).update, (8, 8, 1), 10)
    assert float(jnp.abs(kernel.sum(axis=0)).max()) < 1e-5 * float(jnp.abs(kernel).sum(axis=0).max())
    assert rules.bias_corrected(kernel, bias, 1).tolist() == [labels[i]]


def test_the_prediction_on_noise_is_the_mean_of_both_ends_of_local_training():
  model = models.from_functions(
    lambda key, shape: {'out': {'kernel': jnp.zeros((4, 2)), 'bias': jnp.zeros(2)}},
    lambda p, x: x.reshape(len(x), -1) @ p['out']['kernel'] + p['out']['bias'][None],
  )
  variables = model.init(jax.random.key(0), (2, 2, 1))
  update = {'out': {'kernel': jnp.zeros((4, 2)), 'bias': jnp.asarray([0.0, np.log(3.0)], jnp.float32)}}
  for share, expected in (('gradient', [0.5, 0.5]), ('delta', [0.375, 0.625])):  # 1/2 before, 1/4 after
    knowledge = Knowledge(labels='inferred', share=share)
    observation = Observation(variables, update, jnp.zeros((1, 2)), knowledge, (1, 2, 2, 1), 2)
    np.testing.assert_allclose(rules.predicted_on_noise(model, observation), expected, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.usefixtures('fast_compilation')
def test_an_audit_gives_auxiliary_images_to_the_rule_that_needs_them(dense_network, small_images):
  model, _ = dense_network
  images, labels = small_images
  attack, settings = gl.attacks.csdlg(steps=1), {'controls': 1, 'batch_size': 2, 'labels': 'rlu', 'progress': 'none'}
  public = np.tile(np.asarray(images[4:]), (4, 1, 1, 1)), np.arange(16, dtype=np.int32) % 10
  scenario = gl.scenario(model, images[:4], labels[:4], key=jax.random.key(0), public=public)
  found = gl.audit(jax.random.key(1), scenario, [None], [attack], 2, **settings)
  assert [row['label_counts_correct'] for row in found.rows] == [1.0, 1.0]
  assert all(row['tier'] == 'D' for row in found.rows)
  with pytest.raises(errors.UsageError, match=r'public=\(samples, targets\)'):
    gl.audit(jax.random.key(1), scenario._replace(public=None), [None], [attack], 2, **settings)


@pytest.mark.long
def test_rules_that_predict_noise_or_examples_refuse_texts():
  client = texts.scenario(loss='cross_entropy', head='first', kind='bert', number=24).client
  for rule in rules.RULES:
    if rule in ('geng', 'rlu'):
      with pytest.raises(errors.UsageError, match=rf'{rule!r} averages predictions .* texts are whole numbers'):
        rules.check(rule, client)
    else:
      rules.check(rule, client)
