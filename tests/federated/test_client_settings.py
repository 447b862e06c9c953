"""Settings of local training, against a loop of optax written out here."""

import dataclasses
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import gradleak as gl
from gradleak import ClientSettings, UsageError
from gradleak.core import trees
from gradleak.federated import augmentation
from gradleak.federated.losses import cross_entropy

concealment = importlib.import_module('gradleak.defenses.concealment')  # the name in the package is the factory
LOCAL = {'share': 'delta', 'local_epochs': 2, 'local_batch_size': 4, 'learning_rate': 0.05}


def send(client, *given):
  """Returns the `Upload` of a client, compiled: eagerly, each operation would be compiled by itself."""
  return jax.jit(client.local_update)(*given)


def trained(linear, optimizer, clip=np.inf):
  """Returns θ_T − θ_0 of two epochs in batches of four."""
  params = start = linear.variables['params']
  state = optimizer.init(params)

  def loss(params, images, labels):
    logits, _ = linear.client.model.apply({'params': params}, images, True, None)
    return jnp.mean(cross_entropy()(logits, jax.nn.one_hot(labels, 10)))

  @jax.jit
  def step(params, state, images, labels):
    gradient = jax.grad(loss)(params, images, labels)
    gradient = optax.tree.scale(jnp.minimum(1.0, clip / optax.tree.norm(gradient)), gradient)
    updates, state = optimizer.update(gradient, state, params)
    return optax.apply_updates(params, updates), state

  for _ in range(2):
    for at in (0, 4):
      params, state = step(params, state, linear.samples[at : at + 4], linear.targets[at : at + 4])
  return jax.tree.map(lambda a, b: np.asarray(a - b), params, start)


@pytest.mark.parametrize(
  ('given', 'optimizer', 'clip'),
  [
    ({'optimizer': 'adam'}, lambda: optax.adam(0.05), np.inf),
    ({'max_norm': 0.3}, lambda: optax.sgd(0.05), 0.3),
    ({'optimizer': 'adam', 'max_norm': 0.3}, lambda: optax.adam(0.05), 0.3),
  ],
)
def test_local_training_is_that_of_optax(linear, given, optimizer, clip):
  with jax.numpy_dtype_promotion('standard'), jax.numpy_rank_promotion('allow'):
    expected = trained(linear, optimizer(), clip)
  client = ClientSettings(**LOCAL, **given).client(linear.client.model, 10)
  found = send(client, None, linear.variables, linear.samples, linear.targets).update
  for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(ours, theirs, atol=2e-5)


@pytest.mark.parametrize(('momentum', 'rate'), [(0.0, 0.1), (0.5, 0.05), (0.9, 0.01)])
def test_a_gradient_moves_the_weights_as_far_with_momentum_as_without(linear, momentum, rate):
  """By default; 0.1 with momentum 0.9 left LeNet at chance."""
  given = {**LOCAL, 'momentum': momentum, 'learning_rate': None}
  assert ClientSettings(**given).rate == rate and ClientSettings(**given).recorded()['learning_rate'] == (
    ClientSettings(**given).rate
  )
  tried = [
    send(client_of(linear, **{**given, **changes}), None, linear.variables, linear.samples, linear.targets).update
    for changes in ({}, {'learning_rate': rate}, {'learning_rate': 0.3})
  ]
  default, same, other = (np.concatenate([np.ravel(x) for x in jax.tree.leaves(update)]) for update in tried)
  np.testing.assert_array_equal(default, same)
  assert np.abs(default - other).max() > 1e-3
  assert dataclasses.replace(ClientSettings(momentum=0.9), momentum=0.0).rate == 0.1


def test_they_are_recorded_where_they_are_used(linear):
  assert ClientSettings(**LOCAL, optimizer='adam', max_norm=1.0).recorded()['max_norm'] == 1
  assert {'optimizer', 'max_norm'}.isdisjoint(ClientSettings(**LOCAL).recorded())


@pytest.mark.parametrize(
  ('given', 'message'),
  [
    ({'optimizer': 'adam'}, "optimizer is 'adam', and a client that shares its gradient"),
    ({'max_norm': 1.0}, 'max_norm is 1.0, and a client that shares its gradient'),
    ({'learning_rate': 0.1}, 'learning_rate is 0.1, and a client that shares its gradient'),
    ({**LOCAL, 'optimizer': 'adam', 'momentum': 0.9}, 'adam has its own'),
    ({**LOCAL, 'optimizer': 'adem'}, "did you mean 'adam'"),
    ({**LOCAL, 'max_norm': 0.0}, 'max_norm is 0.0'),
    ({**LOCAL, 'momentum': 1.0, 'learning_rate': None}, 'momentum is 1, for which the learning rate has no default'),
  ],
)
def test_what_cannot_be_used_is_refused(linear, given, message):
  with pytest.raises(UsageError, match=message):
    gl.scenario(linear.client.model, linear.samples, linear.targets, variables=linear.variables, **given)


class Normed(nn.Module):
  """A dense layer with BatchNorm."""

  @nn.compact
  def __call__(self, images, train=False):
    return nn.BatchNorm(use_running_average=not train)(nn.Dense(10)(images.reshape(images.shape[0], -1)))


def client_of(linear, **given):
  return ClientSettings(**given).client(linear.client.model, 10)


def test_the_rate_decays_from_step_to_step(linear):
  with jax.numpy_dtype_promotion('standard'), jax.numpy_rank_promotion('allow'):
    expected = trained(linear, optax.sgd(lambda count: 0.05 * 0.5**count))
  found = send(client_of(linear, **LOCAL, rate_decay=0.5), None, linear.variables, linear.samples, linear.targets)
  for ours, theirs in zip(jax.tree.leaves(found.update), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(ours, theirs, atol=2e-6)


@pytest.mark.long
def test_a_shuffled_epoch_takes_every_sample_once(linear):
  """With one sample to a step and a vanishing rate the order does not matter; with a large one it does."""
  settings = {**LOCAL, 'local_epochs': 1, 'local_batch_size': 1}
  sent = {
    (rate, order): send(
      client_of(linear, **{**settings, 'learning_rate': rate}, sample_order=order),
      jax.random.key(3),
      linear.variables,
      linear.samples,
      linear.targets,
    )
    for rate in (1e-4, 0.5)
    for order in ('fixed', 'shuffled')
  }
  vector = {key: np.concatenate([np.ravel(x) for x in jax.tree.leaves(one.update)]) for key, one in sent.items()}
  apart = {
    rate: np.linalg.norm(vector[rate, 'shuffled'] - vector[rate, 'fixed']) / np.linalg.norm(vector[rate, 'fixed'])
    for rate in (1e-4, 0.5)
  }
  assert apart[1e-4] < 1e-2 < 0.1 < apart[0.5]
  unkeyed, plain = (
    send(client_of(linear, **settings, **order), None, linear.variables, linear.samples, linear.targets)
    for order in ({'sample_order': 'shuffled'}, {})
  )
  for ours, theirs in zip(jax.tree.leaves(unkeyed.update), jax.tree.leaves(plain.update), strict=True):
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.long
@pytest.mark.parametrize('name', ['flip', 'crop', 'crop_flip'])
def test_augmentation_moves_pixels_of_a_client_with_a_key_alone(linear, name):
  augment = augmentation.AUGMENTATIONS[name]
  images = np.asarray(linear.samples)
  moved = np.asarray(augment(jax.random.key(0), linear.samples))
  assert moved.shape == images.shape and moved.min() >= 0 and np.any(moved != images)
  for before, after in zip(images, moved, strict=True):
    if name == 'flip':
      assert np.array_equal(after, before) or np.array_equal(after, before[:, ::-1])
    elif name == 'crop':
      padded = np.pad(before, ((1, 1), (1, 1), (0, 0)))
      assert any(np.array_equal(after, padded[i : i + 8, j : j + 8]) for i in range(3) for j in range(3))
  client = client_of(linear, augment=name)
  plain = send(client_of(linear), None, linear.variables, linear.samples, linear.targets).update
  for key, same in ((None, True), (jax.random.key(0), False)):
    update = send(client, key, linear.variables, linear.samples, linear.targets).update
    equal = [np.array_equal(a, b) for a, b in zip(jax.tree.leaves(update), jax.tree.leaves(plain), strict=True)]
    assert all(equal) == same


@pytest.mark.parametrize(('kind', 'noun'), [('TABLE', 'rows'), ('TEXT', 'texts')])
def test_what_has_no_pixels_is_not_augmented_by_moving_them(linear, kind, noun):
  client = client_of(linear, augment='crop')
  with pytest.raises(UsageError, match=f"augment is 'crop', which moves pixels, and {noun} have none"):
    dataclasses.replace(client, modality=getattr(gl.modalities, kind))
  own = dataclasses.replace(client, modality=getattr(gl.modalities, kind), augment=lambda key, samples: samples)
  assert own.augment is not client.augment


@pytest.mark.long
def test_bfloat16_rounds_the_gradient_and_leaves_its_dtype(linear):
  given = None, linear.variables, linear.samples, linear.targets
  plain, found = (send(client_of(linear, **how), *given).update for how in ({}, {'precision': 'bfloat16'}))
  for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(plain), strict=True):
    assert ours.dtype == theirs.dtype == np.float32
    error = np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)
    assert 1e-4 < error < 0.05
  low = client_of(linear, precision='bfloat16')
  context = gl.defenses.Context(low, linear.variables, (8, 8, 1))
  unclipped = gl.defenses.bind(gl.defenses.clip_samples(norm=1e6), context).client(low)
  sent = send(unclipped, *given).update
  rounded = np.linalg.norm(np.asarray(sent['kernel']) - plain['kernel']) / np.linalg.norm(plain['kernel'])
  assert 1e-4 < rounded < 0.05  # the samples' own gradients are of that precision, too
  label = jax.nn.one_hot(linear.targets[0], 10)
  views = [
    jax.jit(functools.partial(concealment.view, one))(linear.variables, linear.samples[0], label)
    for one in (low, client_of(linear))
  ]
  assert np.any(views[0].logits != views[1].logits)  # and so is what is concealed of them
  model = gl.models.from_flax(Normed())
  variables = model.init(jax.random.key(0), (8, 8, 1))
  participate = ClientSettings(precision='bfloat16').client(model, 10).participate
  upload, _, after = jax.eval_shape(participate, None, variables, linear.samples, linear.targets)
  assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves((upload.update, after)))


@pytest.mark.long
def test_frozen_layers_are_neither_trained_nor_sent(small_images):
  images, labels = small_images[0][:4], small_images[1][:4]
  model = gl.models.create('mlp(widths=8-8)', 10)
  variables = model.init(jax.random.key(0), (8, 8, 1))
  first = model.layers((8, 8, 1))[0]
  for share in ({}, {'share': 'delta', 'local_epochs': 2}):
    client = ClientSettings(frozen=first.name, **share).client(model, 10)
    plain = ClientSettings(**share).client(model, 10)
    upload, full = (send(one, None, variables, images, labels) for one in (client, plain))
    for path, leaf in jax.tree_util.tree_leaves_with_path(upload.update):
      names = trees.path_names(path)
      assert np.any(leaf) == bool(trees.get(upload.mask, names)) == (names not in first.paths)
    if not share:
      other = model.layers((8, 8, 1))[1].paths[0]
      np.testing.assert_array_equal(trees.get(upload.update, other), trees.get(full.update, other))
  for name in ('Dense_9', '-'.join(layer.name for layer in model.layers((8, 8, 1)))):
    with pytest.raises(UsageError, match='frozen'):
      ClientSettings(frozen=name).client(model, 10).local_update(None, variables, images, labels)


def named(names, paths, layers=None, private=()):
  """Returns the paths of what is frozen by these names in a tree of such paths, as texts."""
  params = {}
  for path in paths:
    *modules, leaf = path.split('/')
    tree = params
    for module in modules:
      tree = tree.setdefault(module, {})
    tree[leaf] = jnp.zeros(1)
  of_shape = None if layers is None else lambda shape: layers
  model = gl.models.Model('named', None, lambda *given: None, layers=of_shape)
  client = gl.Client(model, 3, frozen=tuple(names), private=private)
  return {'/'.join(path) for path in client.kept_paths(params, (1,))}


def test_a_name_is_of_one_module_or_of_all_that_have_it():
  paths = ['conv1/w', 'norm1/w', 'block/conv1/w', 'block/conv2/w', 'block/norm/w', 'other/conv2/w', 'head/w']
  layers = (
    trees.Layer('head', (('head', 'w'),)),
    trees.Layer('block/conv2', (('block', 'conv2', 'w'), ('block', 'norm', 'w'))),
    trees.Layer('front', (('conv1', 'w'), ('norm1', 'w'))),
  )
  for names, expected in (
    (['norm1'], {'norm1/w'}),
    (['/conv1'], {'conv1/w'}),
    (['block/conv1'], {'block/conv1/w'}),
    (['block.conv2'], {'block/conv2/w'}),  # the module, and not the layer that has its norm
    (['conv2'], {'block/conv2/w', 'other/conv2/w'}),
    (['block', 'head'], {'block/conv1/w', 'block/conv2/w', 'block/norm/w', 'head/w'}),
    (['front'], {'conv1/w', 'norm1/w'}),
    ([], set()),
  ):
    assert named(names, paths, layers) == expected, names
  with pytest.raises(UsageError, match=r"'conv1' is the name of several modules: write /conv1 .*\(block/conv1\)"):
    named(['conv1'], paths)
  with pytest.raises(UsageError, match="unknown frozen layer 'front'"):
    named(['front'], paths)
  with pytest.raises(UsageError, match='all layers are frozen: there is nothing to share'):
    named(['conv1', 'norm1'], ['conv1/w', 'norm1/w'])
  with pytest.raises(UsageError, match='all layers are frozen or private: there is nothing to share'):
    named(['conv1'], ['conv1/w', 'norm1/w'], private=('norm1',))


def test_a_norm_behind_a_frozen_convolution_is_trained(small_images):
  model = gl.models.from_flax(Normed())
  variables = model.init(jax.random.key(0), (8, 8, 1))
  client = ClientSettings(frozen='Dense_0').client(model, 10)
  update = send(client, None, variables, *(one[:4] for one in small_images)).update
  assert not np.any(update['Dense_0']['kernel']) and np.any(update['BatchNorm_0']['scale'])


@pytest.mark.long
def test_a_cohort_sends_the_mean_of_its_members(linear):
  for local in ({}, LOCAL):
    one, all_ = client_of(linear, **local), client_of(linear, **local, cohort=2)
    parts = [
      send(one, None, linear.variables, linear.samples[at : at + 4], linear.targets[at : at + 4]).update
      for at in (0, 4)
    ]
    upload = send(all_, None, linear.variables, linear.samples[:8], linear.targets[:8])
    assert int(upload.num_samples) == 8 and all_.num_steps(8) == one.num_steps(4)
    for ours, a, b in zip(*map(jax.tree.leaves, (upload.update, *parts)), strict=True):
      np.testing.assert_allclose(ours, (a + b) / 2, atol=1e-6)
  with pytest.raises(UsageError, match='evenly'):
    client_of(linear, cohort=3).local_update(None, linear.variables, linear.samples[:8], linear.targets[:8])


@pytest.mark.long
def test_blocks_of_steps_change_nothing_but_memory(linear):
  """Of 22 steps: five blocks of four, and two that are left."""
  labels = jax.nn.one_hot(linear.targets, 10)

  def run(remat):
    client = dataclasses.replace(client_of(linear, **{**LOCAL, 'local_epochs': 11, 'local_batch_size': 4}), remat=remat)

    def size(images):
      update = client.local_update(None, linear.variables, images, labels).update
      return sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(update))

    compiled = jax.jit(jax.value_and_grad(size)).lower(linear.samples).compile()
    return compiled(linear.samples), compiled.memory_analysis().temp_size_in_bytes

  (value, gradient), kept = run(False)
  for remat in (None, True):
    (ours, our_gradient), recomputed = run(remat)
    np.testing.assert_allclose(ours, value, rtol=1e-5)
    np.testing.assert_allclose(our_gradient, gradient, rtol=1e-3, atol=1e-6)
    assert recomputed < 0.7 * kept


def test_weight_decay_does_not_move_frozen_layers(linear):
  """The layers that are trained see the frozen ones as they were, in every step."""
  model = gl.models.create('mlp(widths=8)', 10)
  variables = model.init(jax.random.key(0), (8, 8, 1))
  settings = {**LOCAL, 'weight_decay': 0.5}
  frozen = ClientSettings(**settings, frozen='Dense_0').client(model, 10)
  free = ClientSettings(**settings).client(model, 10)
  mask = {
    name: jax.tree.map(lambda _, name=name: name == 'Dense_0', layer) for name, layer in variables['params'].items()
  }
  held = dataclasses.replace(free, optimizer=optax.chain(free.optimizer, optax.masked(optax.set_to_zero(), mask)))
  ours, theirs = (send(one, None, variables, linear.samples, linear.targets).update for one in (frozen, held))
  np.testing.assert_allclose(ours['Dense_1']['kernel'], theirs['Dense_1']['kernel'], atol=1e-6)


@pytest.mark.long
def test_padding_takes_no_steps_where_samples_are_shuffled(linear):
  """Two real samples among copies of weight 0, in batches of two: one step, as without them."""
  client = client_of(linear, **{**LOCAL, 'local_epochs': 1, 'local_batch_size': 2}, sample_order='shuffled')
  images, labels = jnp.tile(linear.samples[:2], (4, 1, 1, 1)), jnp.tile(linear.targets[:2], 4)
  weights = jnp.array([1.0, 1, 0, 0, 0, 0, 0, 0], jnp.float32)
  alone = send(client, jax.random.key(3), linear.variables, images[:2], labels[:2]).update
  participate = jax.jit(client.participate)
  for seed in range(3):
    padded = participate(jax.random.key(seed), linear.variables, images, labels, weights)[0].update
    for ours, theirs in zip(jax.tree.leaves(padded), jax.tree.leaves(alone), strict=True):
      np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-8)


@pytest.mark.long
@pytest.mark.parametrize(
  'settings', [{'frozen': 'Dense_0'}, {'private': 'Dense_0'}, {'frozen': 'Dense_0', 'step': True}]
)
def test_noise_on_what_is_not_sent_counts_in_no_later_clip(small_images, settings):
  images, labels = small_images
  model = gl.models.mlp(10, widths=(8,), init='default')
  if settings.pop('step', False):
    defense = gl.defenses.dpsgd(norm=1.0, noise=1.0)
    settings |= {'share': 'delta', 'learning_rate': 1.0, 'max_norm': 1.0}
  else:
    defense = gl.defenses.chain(gl.defenses.gaussian(stddev=1.0), gl.defenses.clip(norm=1.0))
  scenario = gl.scenario(model, images[:1], labels[:1], key=jax.random.key(0), **settings)
  client = gl.defenses.bind(defense, scenario.context).client(scenario.client)
  update = send(client, jax.random.key(1), scenario.variables, images[:1], labels[:1]).update
  np.testing.assert_allclose(optax.tree.norm(update), 1.0, rtol=1e-3)
  assert not np.any(update['Dense_0']['kernel'])


@pytest.mark.long
def test_what_is_frozen_is_neither_clipped_nor_ranked_nor_read(small_images):
  images, labels = small_images
  model = gl.models.mlp(10, widths=(8,), init='default')
  scenario = gl.scenario(model, images, labels, key=jax.random.key(0), frozen='Dense_0')
  bound = gl.defenses.bind(
    gl.defenses.clip_samples(norm=0.01), gl.defenses.Context(scenario.client, scenario.variables, (8, 8, 1))
  )
  update = send(bound.client(scenario.client), None, scenario.variables, images[:1], labels[:1]).update
  np.testing.assert_allclose(optax.tree.norm(update), 0.01, rtol=1e-5)  # all of it is of what is trained
  assert not np.any(update['Dense_0']['kernel'])
  label = jax.nn.one_hot(labels[0], 10)
  view = jax.jit(functools.partial(concealment.view, scenario.client))
  seen = view(scenario.variables, images[0], label).gradient
  assert not np.any(seen['Dense_0']['kernel']) and np.any(seen['Dense_1']['kernel'])
  for defense in (gl.defenses.fragmentation(ratio=0.5), gl.defenses.fragmentation_random(ratio=0.5)):
    with pytest.raises(UsageError, match='Dense_0 of this client are frozen'):
      gl.defenses.bind(defense, gl.defenses.Context(scenario.client, scenario.variables, (8, 8, 1)))
  last = gl.scenario(model, images, labels, key=jax.random.key(0), frozen='Dense_1')
  with pytest.raises(UsageError, match='Dense_1 is not shared: no gradient of it is sent'):
    attack, settings = gl.attacks.csdlg(steps=1), {'controls': 1, 'labels': 'inferred', 'progress': 'none'}
    gl.audit(jax.random.key(1), last, [None], [attack], 1, **settings)
