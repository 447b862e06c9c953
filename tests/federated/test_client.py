"""The client against closed forms and hand-written training loops."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from gradleak import defenses, models
from gradleak.core import errors, trees
from gradleak.federated import Client, Upload
from gradleak.federated.losses import squared_error

CLASSES = 10
KEY = jax.random.key(7)


def softmax_regression():
  """A dense layer alone: its gradient under cross-entropy is xᵀ(softmax(z) − y) / N."""
  return models.from_functions(
    lambda key, shape: {'w': jnp.zeros((int(np.prod(shape)), CLASSES)), 'b': jnp.zeros(CLASSES)},
    lambda params, images: images.reshape(images.shape[0], -1) @ params['w'] + params['b'].reshape(1, -1),
    'softmax regression',
  )


class Normed(nn.Module):
  """Dense, BatchNorm, dropout, dense: everything that differs between training and evaluation."""

  rate: float = 0.0

  @nn.compact
  def __call__(self, images, train=False):
    x = nn.Dense(6)(images.reshape(images.shape[0], -1))
    x = nn.sigmoid(nn.BatchNorm(use_running_average=not train, momentum=0.5)(x))
    x = nn.Dropout(self.rate, deterministic=False)(x)
    return nn.Dense(CLASSES)(x)


@pytest.fixture(scope='module')
def samples(small_images):
  images, labels = small_images
  return images[:5], labels[:5]


@pytest.fixture(scope='module')
def linear():
  rng = np.random.default_rng(0)
  params = {'w': rng.normal(0, 0.3, (64, CLASSES)), 'b': rng.normal(0, 0.3, CLASSES)}
  return softmax_regression(), {'params': jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)}


@pytest.fixture(scope='module')
def normed():
  model = models.from_flax(Normed())
  variables = jax.jit(model.init, static_argnums=1)(jax.random.key(0), (8, 8, 1))
  rng = np.random.default_rng(0)
  stats = jax.tree.map(lambda x: jnp.asarray(x + rng.uniform(0, 1, x.shape), x.dtype), variables['batch_stats'])
  return model, {**variables, 'batch_stats': stats}


def update(client, variables, images, labels, key=None):
  return jax.jit(client.local_update)(key, variables, images, labels)


def assert_trees_close(actual, expected, rtol=1e-4, atol=1e-6):
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), actual, expected)


def onehot(labels):
  return np.eye(CLASSES, dtype=np.float32)[labels]


def softmax(z):
  e = np.exp(z - z.max(-1, keepdims=True))
  return e / e.sum(-1, keepdims=True)


def closed_form(params, images, targets):
  """Returns the cross-entropy gradient of softmax regression, in float64."""
  x = images.reshape(len(images), -1).astype(np.float64)
  error = (softmax(x @ np.asarray(params['w'], np.float64) + np.asarray(params['b'])) - targets) / len(x)
  return {'w': x.T @ error, 'b': error.sum(0)}


def trained(params, images, targets, batch_size, epochs, rate, momentum=0.0):
  """Returns θ_T − θ_0 of SGD with momentum over the samples in their order, in float64."""
  current = {name: np.asarray(value, np.float64) for name, value in params.items()}
  velocity = {name: np.zeros_like(value) for name, value in current.items()}
  for _ in range(epochs):
    for start in range(0, len(images), batch_size):
      gradient = closed_form(current, images[start : start + batch_size], targets[start : start + batch_size])
      velocity = {name: momentum * velocity[name] + gradient[name] for name in current}
      current = {name: current[name] - rate * velocity[name] for name in current}
  return {name: current[name] - np.asarray(params[name], np.float64) for name in current}


def test_gradient_is_the_closed_form(linear, samples):
  model, variables = linear
  upload = update(Client(model, CLASSES), variables, *samples)
  assert isinstance(upload, Upload)
  assert_trees_close(upload.update, closed_form(variables['params'], samples[0], onehot(samples[1])))
  assert upload.num_samples == 5 and upload.num_samples.dtype == jnp.int32
  assert all(mask.dtype == bool and mask.all() for mask in jax.tree.leaves(upload.mask))
  assert jax.tree.structure(upload.mask) == jax.tree.structure(upload.update)


def test_squared_error_gradient_is_that_of_the_softmax_jacobian(linear, samples):
  model, variables = linear
  images, labels = samples
  x = images.reshape(5, -1).astype(np.float64)
  p = softmax(x @ np.asarray(variables['params']['w'], np.float64) + np.asarray(variables['params']['b']))
  inner = 2 / CLASSES * (p - onehot(labels))
  error = p * (inner - (p * inner).sum(-1, keepdims=True)) / 5
  upload = update(Client(model, CLASSES, squared_error()), variables, images, labels)
  assert_trees_close(upload.update, {'w': x.T @ error, 'b': error.sum(0)})


def test_integer_labels_equal_their_probabilities_and_soft_labels_work(linear, samples):
  model, variables = linear
  images, labels = samples
  client = Client(model, CLASSES)
  hard = update(client, variables, images, labels).update
  jax.tree.map(np.testing.assert_array_equal, hard, update(client, variables, images, onehot(labels)).update)
  soft = np.random.default_rng(1).dirichlet(np.ones(CLASSES), 5).astype(np.float32)
  assert_trees_close(update(client, variables, images, soft).update, closed_form(variables['params'], images, soft))


@pytest.mark.parametrize(
  ('batch_size', 'epochs', 'momentum', 'steps'),
  [
    (None, 1, 0.0, 1),
    (2, 3, 0.9, 9),
    (7, 2, 0.0, 2),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in [(1, 1, 0.0, 5), (2, 2, 0.0, 6)]),
  ],
)
def test_delta_is_that_of_a_hand_written_loop(linear, samples, batch_size, epochs, momentum, steps):
  model, variables = linear
  images, labels = samples
  client = Client(
    model, CLASSES, share='delta', optimizer=optax.sgd(0.3, momentum or None), epochs=epochs, batch_size=batch_size
  )
  assert client.num_steps(5) == steps
  expected = trained(variables['params'], images, onehot(labels), batch_size or 5, epochs, 0.3, momentum)
  assert_trees_close(update(client, variables, images, labels).update, expected, rtol=1e-3, atol=1e-5)


def test_a_shared_gradient_is_of_one_step(linear):
  with pytest.raises(errors.UsageError, match="one step, got epochs=2; share='delta'"):
    Client(linear[0], CLASSES, epochs=2)


def test_a_gradient_of_several_steps_is_refused(linear, samples):
  client = Client(linear[0], CLASSES, batch_size=2)
  with pytest.raises(errors.UsageError, match='5 samples in batches of 2 make 3'):
    client.local_update(None, linear[1], *samples)
  assert Client(linear[0], CLASSES, batch_size=5).local_update(None, linear[1], *samples).num_samples == 5


# --- BatchNorm and dropout


def flax_gradient(variables, images, labels, train):
  """Returns Linen's own gradient of the mean cross-entropy, and the new statistics."""

  def loss(params):
    logits, changed = Normed().apply({**variables, 'params': params}, images, train, mutable=['batch_stats'])
    return optax.softmax_cross_entropy(logits, labels).mean(), changed['batch_stats']

  return jax.grad(loss, has_aux=True)(variables['params'])


@pytest.mark.parametrize('mode', ['train', 'eval'])
def test_batch_norm_mode_of_a_gradient(normed, samples, mode):
  model, variables = normed
  upload = update(Client(model, CLASSES, batch_norm=mode), variables, *samples)
  targets = jnp.asarray(onehot(samples[1]))
  gradient = jax.jit(flax_gradient, static_argnums=3)
  expected, other = (gradient(variables, samples[0], targets, (mode == 'train') == same)[0] for same in (True, False))
  assert_trees_close(upload.update, expected, atol=1e-5)
  assert max(jax.tree.leaves(jax.tree.map(lambda a, b: np.abs(a - b).max(), expected, other))) > 1e-3


@pytest.mark.long
@pytest.mark.parametrize('mode', ['train', 'eval'])
def test_batch_norm_mode_of_a_delta(normed, samples, mode):
  model, variables = normed
  images, labels = samples[0][:4], samples[1][:4]
  client = Client(model, CLASSES, share='delta', epochs=2, batch_size=2, optimizer=optax.sgd(0.2), batch_norm=mode)
  step = jax.jit(flax_gradient, static_argnums=3)
  current = variables
  for start in (0, 2, 0, 2):
    targets = jnp.asarray(onehot(labels[start : start + 2]))
    gradient, stats = step(current, images[start : start + 2], targets, mode == 'train')
    params = jax.tree.map(lambda p, g: p - 0.2 * g, current['params'], gradient)
    current = {'params': params, 'batch_stats': stats}
  expected = jax.tree.map(jnp.subtract, current['params'], variables['params'])
  assert_trees_close(update(client, variables, images, labels).update, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.long
def test_batch_norm_does_not_count_what_fills_a_batch(normed, samples):
  """A last batch of one of two samples, and a client of three samples among clients of five: as without padding."""
  model, variables = normed
  images, labels = samples
  rate = optax.sgd(0.2)
  ragged = Client(model, CLASSES, share='delta', batch_size=2, optimizer=rate)
  step = jax.jit(flax_gradient, static_argnums=3)
  current = variables
  for start in (0, 2, 4):
    part = slice(start, start + 2)
    gradient, stats = step(current, images[part], jnp.asarray(onehot(labels[part])), True)
    params = jax.tree.map(lambda p, g: p - 0.2 * g, current['params'], gradient)
    current = {'params': params, 'batch_stats': stats}
  expected = jax.tree.map(jnp.subtract, current['params'], variables['params'])
  assert_trees_close(update(ragged, variables, images, labels).update, expected, rtol=1e-3, atol=1e-5)
  # In float32 the variance of three samples is rounded: updates differ by 5e-5.
  with jax.enable_x64(True), jax.numpy_dtype_promotion('standard'):
    variables, images = jax.tree.map(lambda x: jnp.asarray(x, np.float64), (variables, images))
    for share in ('gradient', 'delta'):
      whole = Client(model, CLASSES, share=share, optimizer=rate)
      participate = jax.jit(whole.participate)
      alone = participate(None, variables, images[:3], labels[:3])
      weights = jnp.asarray([1.0, 1, 1, 0, 0])
      padded = participate(None, variables, images, labels, weights)
      assert_trees_close(padded[0].update, alone[0].update, rtol=1e-9, atol=1e-12)
      assert_trees_close(padded[2], alone[2], rtol=1e-9, atol=1e-12)
      nothing = participate(None, variables, images, labels, 0 * weights)
      assert share == 'gradient' or np.isfinite(jax.flatten_util.ravel_pytree(nothing[0].update)[0]).all()


def test_statistics_pass_from_one_local_step_to_the_next(samples):
  """A model whose logits are its statistics times w, and whose statistics count: gradients 1, 2, 3 sum to 6."""

  def apply(variables, images, train, key):
    count = variables['batch_stats']['count']
    return count * jnp.broadcast_to(variables['params']['w'], (images.shape[0], CLASSES)), {
      'count': count + (1 if train else 0)
    }

  variables = {'params': {'w': jnp.zeros((1, CLASSES))}, 'batch_stats': {'count': jnp.ones(())}}
  train = {'loss': lambda logits, labels: logits.sum(-1), 'share': 'delta', 'optimizer': optax.sgd(0.5), 'epochs': 3}
  upload = update(Client(models.Model('counting', None, apply), CLASSES, **train), variables, *samples)
  np.testing.assert_allclose(upload.update['w'], -0.5 * 6, rtol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize('share', ['gradient', 'delta'])
def test_dropout_is_on_only_with_a_key(normed, samples, share):
  _, variables = normed
  plain, dropping = (models.from_flax(Normed(rate)) for rate in (0.0, 0.5))
  images, labels = samples[0][:4], samples[1][:4]
  client = Client(dropping, CLASSES, share=share, batch_size=4 if share == 'gradient' else 2)
  compute = jax.jit(client.local_update)
  without = compute(None, variables, images, labels).update
  expected = update(dataclasses.replace(client, model=plain), variables, images, labels, KEY).update
  assert_trees_close(without, expected, atol=1e-5)
  first, again, other = (compute(jax.random.key(s), variables, images, labels).update for s in (1, 1, 2))
  jax.tree.map(np.testing.assert_array_equal, first, again)
  for changed in (without, other):
    assert max(jax.tree.leaves(jax.tree.map(lambda a, b: np.abs(a - b).max(), first, changed))) > 1e-3


def test_every_local_step_drops_other_units(normed, samples):
  # At learning rate 0, steps on the same batch differ in nothing but what is dropped.
  _, variables = normed
  seen = []

  def watch(updates, state, params=None, *, key=None, **extra):
    jax.debug.callback(lambda u: seen.append(np.asarray(u)), updates['Dense_1']['kernel'], ordered=True)
    return updates, state

  watcher = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), watch)
  train = {'share': 'delta', 'optimizer': optax.sgd(0.0), 'epochs': 3, 'batch_norm': 'eval'}
  client = Client(models.from_flax(Normed(0.5)), CLASSES, **train, step=watcher)
  jax.block_until_ready(update(client, variables, *samples, key=KEY))
  jax.effects_barrier()
  assert len(seen) == 3
  assert np.abs(seen[0] - seen[1]).max() > 0 and np.abs(seen[1] - seen[2]).max() > 0


# --- where the defenses act


class CountState(NamedTuple):
  count: jax.Array
  mask: dict


def drop(name, *, until=0, shape=()):
  """A defense that drops the tensor `name` until it has been called `until` times (0: always)."""

  def init(params):
    return CountState(jnp.zeros((), jnp.int32), jax.tree.map(lambda p: jnp.ones((), bool), params))

  def update(updates, state, params=None, **extra):
    count = state.count + 1
    open_ = (count == until) if until else jnp.zeros((), bool)
    mask = {key: jnp.broadcast_to(open_, shape) if key == name else jnp.ones((), bool) for key in updates}
    return updates, CountState(count, mask)

  return optax.GradientTransformationExtraArgs(init, update)


def test_step_chain_acts_at_each_local_step_and_upload_chain_once(linear, samples):
  model, variables = linear
  images, labels = samples
  train = {'share': 'delta', 'optimizer': optax.sgd(0.1), 'epochs': 2, 'batch_size': 2}
  doubled_steps = update(Client(model, CLASSES, **train, step=optax.scale(2.0)), variables, images, labels).update
  expected = trained(variables['params'], images, onehot(labels), 2, 2, 0.2)
  assert_trees_close(doubled_steps, expected, rtol=1e-3, atol=1e-5)
  doubled_upload = update(Client(model, CLASSES, **train, upload=optax.scale(2.0)), variables, images, labels).update
  expected = trained(variables['params'], images, onehot(labels), 2, 2, 0.1)
  assert_trees_close(doubled_upload, jax.tree.map(lambda x: 2 * x, expected), rtol=1e-3, atol=1e-5)


def test_both_chains_act_on_a_gradient(linear, samples):
  model, variables = linear
  plain = update(Client(model, CLASSES), variables, *samples).update
  for options, factor in (({'step': optax.scale(2.0)}, 2), ({'upload': optax.scale(3.0)}, 3)):
    defended = update(Client(model, CLASSES, **options), variables, *samples).update
    assert_trees_close(defended, jax.tree.map(lambda x, f=factor: f * x, plain))


@pytest.mark.parametrize(
  ('until', 'sent'), [(5, True), (7, False), *(pytest.param(n, True, marks=pytest.mark.slow) for n in (1, 6))]
)
def test_the_step_chains_state_is_carried_through_all_local_steps(linear, samples, until, sent):
  model, variables = linear
  client = Client(model, CLASSES, share='delta', epochs=2, batch_size=2, step=drop('w', until=until))
  upload = update(client, variables, *samples)
  assert upload.mask == {'w': sent, 'b': True}
  assert (np.abs(upload.update['w']).max() > 0) == sent


def test_dropped_entries_are_zero_whatever_follows_and_masks_are_joined(linear, samples):
  model, variables = linear
  client = Client(
    model,
    CLASSES,
    step=drop('w'),
    upload=defenses.chain(drop('b', shape=(CLASSES,)), defenses.gaussian(stddev=1.0)),
  )
  upload = update(client, variables, *samples, key=KEY)
  assert not upload.mask['w'].any() and not upload.mask['b'].any()
  assert upload.mask['w'].shape == () and upload.mask['b'].shape == (CLASSES,)
  assert not upload.update['w'].any() and not upload.update['b'].any()
  half = update(dataclasses.replace(client, step=optax.identity()), variables, *samples, key=KEY)
  assert half.mask['w'].all() and np.abs(half.update['w']).max() > 1
  assert not half.update['b'].any()


def test_random_defenses_need_the_clients_key(linear, samples):
  model, variables = linear
  for place in ('step', 'upload'):
    client = Client(model, CLASSES, **{place: defenses.gaussian(stddev=1.0)})
    with pytest.raises(errors.UsageError, match=r'gaussian.*key'):
      client.local_update(None, variables, *samples)


@pytest.mark.long
def test_chains_and_local_steps_draw_different_noise(linear, samples):
  model, variables = linear
  noise = optax.chain(optax.scale(0.0), defenses.gaussian(stddev=1.0))

  def drawn(**options):
    return np.asarray(update(Client(model, CLASSES, **options), variables, *samples, key=KEY).update['w']).ravel()

  assert abs(np.corrcoef(drawn(step=noise), drawn(upload=noise))[0, 1]) < 0.15
  # Three local steps of rate −1 sum three draws: of standard deviation √3 if they are independent, 3 if they are one.
  steps = drawn(step=noise, share='delta', epochs=3, optimizer=optax.sgd(-1.0))
  assert 1.55 < steps.std() < 1.95


def test_data_dependent_defenses_get_the_batch_of_their_step(linear, samples):
  model, variables = linear
  images, labels = samples
  shapes = []

  def watch(updates, state, params=None, *, batch, **extra):
    shapes.append((batch[0].shape, batch[1].shape, params is not None))
    return updates, state

  watcher = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), watch)
  client = Client(model, CLASSES, share='delta', batch_size=2, step=watcher, upload=watcher)
  jax.eval_shape(client.local_update, None, variables, images, labels)
  assert set(shapes) == {((2, 8, 8, 1), (2, CLASSES), True), ((5, 8, 8, 1), (5, CLASSES), True)}


def test_undefended_drops_both_chains_and_nothing_else(linear, samples):
  model, variables = linear
  client = Client(
    model, CLASSES, share='delta', epochs=2, batch_size=2, step=optax.scale(2.0), upload=defenses.gaussian(stddev=1.0)
  )
  plain = client.undefended()
  for field in dataclasses.fields(Client):
    if field.name not in ('step', 'upload'):
      assert getattr(plain, field.name) is getattr(client, field.name)
  upload = update(plain, variables, *samples)  # without a key
  assert_trees_close(
    upload.update, trained(variables['params'], samples[0], onehot(samples[1]), 2, 2, 0.1), rtol=1e-3, atol=1e-5
  )


# --- as the attacker runs it


@pytest.mark.long
@pytest.mark.parametrize(
  'options',
  [
    {},
    pytest.param({'share': 'delta', 'epochs': 2}, marks=pytest.mark.slow),
    {'share': 'delta', 'batch_size': 2, 'batch_norm': 'eval'},
  ],
  ids=['gradient', 'delta', 'batches'],
)
def test_an_attacker_can_differentiate_the_upload(normed, samples, options):
  """Compares the derivative of an upload with respect to the images with a central difference."""
  model, variables = normed
  images, labels = samples[0][:4], jnp.asarray(onehot(samples[1][:4]))
  client = Client(model, CLASSES, **options)
  rng = np.random.default_rng(0)
  direction = rng.normal(size=images.shape).astype(np.float32)
  probe = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), p.dtype), variables['params'])

  def projected(images):
    return trees.inner_product(client.local_update(None, variables, images, labels).update, probe)

  gradient = jax.jit(jax.grad(projected))(images)
  assert np.isfinite(gradient).all() and min(np.abs(gradient).max(axis=(1, 2, 3))) > 0
  evaluate, h = jax.jit(projected), 3e-3
  difference = (evaluate(images + h * direction) - evaluate(images - h * direction)) / (2 * h)
  np.testing.assert_allclose(np.sum(gradient * direction), difference, rtol=0.02)


@pytest.mark.long
def test_local_update_leaves_the_global_model_and_vmaps_over_clients(linear, small_images):
  model, variables = linear
  before = jax.tree.map(np.array, variables)
  images, labels = small_images[0].reshape(2, 4, 8, 8, 1), small_images[1].reshape(2, 4)
  client = Client(model, CLASSES, share='delta', batch_size=2, upload=defenses.gaussian(stddev=0.1))
  keys = jax.random.split(KEY, 2)
  together = jax.jit(jax.vmap(client.local_update, in_axes=(0, None, 0, 0)))(keys, variables, images, labels)
  alone = jax.jit(client.local_update)
  for i in range(2):
    upload = alone(keys[i], variables, images[i], labels[i])
    assert_trees_close(trees.take(together, i), upload, rtol=1e-4, atol=1e-5)
  jax.tree.map(np.testing.assert_array_equal, before, variables)


def test_a_state_that_calls_something_else_a_mask_is_refused(linear, samples):
  model, variables = linear
  for mask in (jnp.ones(3), jnp.ones(3, bool), {'w': jnp.ones(()), 'b': jnp.ones(())}):
    own = optax.GradientTransformation(
      lambda params, mask=mask: CountState(jnp.zeros(()), mask), lambda updates, state, params=None: (updates, state)
    )
    with pytest.raises(errors.UsageError, match="a field 'mask' that is no tree of booleans"):
      Client(model, CLASSES, upload=own).local_update(KEY, variables, *samples)


def test_the_upload_chain_sees_what_is_shared_alone(normed, samples):
  """Else the norm of private layers decides how far the others are clipped."""
  model, variables = normed
  plain = update(Client(model, CLASSES, private=('Dense_1',)), variables, *samples).update
  bound = float(trees.norm(plain)) * 1.01
  clipped = Client(model, CLASSES, private=('Dense_1',), upload=defenses.clip(norm=bound))
  assert_trees_close(update(clipped, variables, *samples).update, plain)


@pytest.mark.long
@pytest.mark.parametrize('field', ['frozen', 'private'])
@pytest.mark.parametrize(
  ('defense', 'part'),
  [
    (defenses.percentile_privacy(percentile=50.0, gamma=10.0), 0.5),
    (defenses.svt_privacy(fraction=0.3, replace=False), 0.3),
  ],
)
def test_layers_that_are_not_shared_do_not_count_in_a_portion(samples, field, defense, part):
  images, labels = samples
  model = models.mlp(CLASSES, widths=16)
  variables = model.init(KEY, (8, 8, 1))
  client = Client(model, CLASSES, **{field: ('Dense_0',)})
  bound = defenses.bind(defense, defenses.Context(client, variables, (8, 8, 1)))
  found = update(bound.client(client), variables, images, labels, KEY).update
  sent = np.concatenate([np.ravel(found['Dense_1'][name]) for name in ('kernel', 'bias')])
  assert np.mean(sent != 0) == pytest.approx(part, abs=0.02)
  assert not any(np.any(x) for x in found['Dense_0'].values())


def test_what_any_local_step_lets_pass_is_sent(linear, samples):
  """Each step moves other entries: the mask of the last one would drop what the others moved."""
  model, variables = linear

  def init(params):
    return CountState(jnp.zeros((), jnp.int32), jax.tree.map(lambda p: jnp.ones(p.shape, bool), params))

  def turn(updates, state, params=None, **extra):
    mask = jax.tree.map(lambda u: (jnp.arange(u.size) % 8 == state.count).reshape(u.shape), updates)
    return trees.masked(updates, mask), CountState(state.count + 1, mask)

  step = optax.GradientTransformationExtraArgs(init, turn)
  upload = update(Client(model, CLASSES, share='delta', epochs=2, batch_size=2, step=step), variables, *samples)
  for name, mask in upload.mask.items():  # of 8 portions, 6 steps let one pass each
    np.testing.assert_array_equal(np.ravel(mask), np.arange(mask.size) % 8 < 6)
    assert np.all(np.ravel(upload.update[name])[~np.ravel(mask)] == 0)
  assert np.mean(np.ravel(upload.update['b']) != 0) > 0.7
