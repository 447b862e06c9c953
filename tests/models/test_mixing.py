"""Networks and losses that mix the samples of a batch: what fills a smaller last batch does not count."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import gradleak as gl
from gradleak.federated import losses, simulation
from gradleak.models import masked, mixing

N, SIZE, SHAPE, OUTPUTS = 8, 3, (2, 2, 1), 3
LEFT = N % SIZE  # in the last batch
RNG = np.random.default_rng(0)
X = RNG.uniform(size=(N, *SHAPE)).astype(np.float32)
Y = np.asarray([0, 2, 1, 1, 0, 2, 1, 0])


def head(hidden, params):
  return hidden @ params['w'] + params['b'].reshape(1, -1)


def centred(x, params):
  return head(x - x.mean(0, keepdims=True), params)


def scaled(x, params):
  return head(x / (x.std() + 0.1), params)


def by_the_largest(x, params):
  return head(x / x.max(), params)


def attention(x, params):
  weights = jax.nn.softmax((x @ params['q']) @ x.T)
  return head(x + weights @ x, params)


def by_number(x, params):
  return head(x, params) * len(x)


def sorted_ranks(x, params):
  return head(jnp.argsort(jnp.argsort(x, axis=0), axis=0).astype(x.dtype) / 5, params)


def groups(x, params):
  """A norm over groups of three samples, which runs on no other number of them."""
  by_group = x.reshape(-1, 3, x.shape[1])
  return head((by_group - by_group.mean(1, keepdims=True)).reshape(x.shape), params)


MIXING = [centred, scaled, by_the_largest, attention, by_number, sorted_ranks]


def alone(x, params):
  return head(jnp.tanh(x), params)


def layer_norm(x, params):
  return head((x - x.mean(1, keepdims=True)) / (x.std(1, keepdims=True) + 0.1), params)


def unit(x, params):
  """Its gradient is not finite on zeros, and so padding must not be zeros."""
  return head(x / jnp.linalg.norm(x, axis=1, keepdims=True), params)


def model_of(function):
  def apply(params, images):
    return function(images.reshape(len(images), -1), params)

  def init(key, shape):
    del shape
    return {'w': 0.5 * jax.random.normal(key, (4, OUTPUTS)), 'b': jnp.zeros(OUTPUTS), 'q': jnp.eye(4)}

  model = gl.models.from_functions(init, apply, function.__name__)
  return model, model.init(jax.random.key(1), SHAPE)


def local(model, **given):
  settings = {'share': 'delta', 'local_epochs': 2, 'local_batch_size': SIZE, 'learning_rate': 0.2}
  return gl.ClientSettings(**{**settings, **given}).client(model, OUTPUTS)


def by_hand(model, variables, loss=None, epochs=2, batches=((0, 3), (3, 6), (6, 8)), rate=0.2):
  """Returns the delta of a loop over batches of the sizes that they have."""
  loss = losses.cross_entropy() if loss is None else loss
  params = variables['params']

  def value(params, x, y):
    z = model.apply({**variables, 'params': params}, x, True, None)[0]
    y = jax.nn.one_hot(y, OUTPUTS)
    return loss.reduced(loss(z, y), y, jnp.ones(len(x)))

  step = jax.jit(jax.grad(value))
  for first, last in batches * epochs:
    gradient = step(params, X[first:last], Y[first:last])
    params = jax.tree.map(lambda p, g: p - rate * g, params, gradient)
  return jax.tree.map(lambda new, old: np.asarray(new - old), params, variables['params'])


def assert_close(found, expected):
  for name, leaf in expected.items():
    np.testing.assert_allclose(found[name], leaf, rtol=1e-5, atol=1e-5 * np.abs(leaf).max() + 1e-7, err_msg=name)


@pytest.mark.long
@pytest.mark.parametrize('function', [*MIXING, alone, layer_norm, unit], ids=lambda one: one.__name__)
def test_a_smaller_last_batch_is_as_small_as_it_is(function):
  model, variables = model_of(function)
  client = local(model)
  assert mixing.mixes(client, variables, X, jax.nn.one_hot(Y, OUTPUTS), SIZE, LEFT) is (function in MIXING)
  expected = by_hand(model, variables)
  assert all(np.isfinite(leaf).all() for leaf in expected.values())
  assert_close(jax.jit(client.local_update)(None, variables, X, Y).update, expected)
  dropped = by_hand(model, variables, batches=((0, 3), (3, 6)))
  assert_close(jax.jit(local(model, last_batch='dropped').local_update)(None, variables, X, Y).update, dropped)


@pytest.mark.parametrize('left', [1, 2500, 4999])
@pytest.mark.parametrize('function', [centred, by_number, alone, unit], ids=lambda one: one.__name__)
def test_of_a_large_batch_a_part_is_tried(function, left, monkeypatch):
  """A client of thousands of images would take its memory several times."""
  model, variables = model_of(function)
  seen, samples = [], jax.ShapeDtypeStruct((5000, *X.shape[1:]), X.dtype)
  drawn = mixing._samples
  monkeypatch.setattr(mixing, '_samples', lambda rng, shape, *rest: seen.append(shape) or drawn(rng, shape, *rest))
  client, targets = local(model, local_batch_size=5000), jax.ShapeDtypeStruct((5000, OUTPUTS), np.float32)
  assert mixing.mixes(client, variables, samples, targets, 5000, left) is (function in MIXING)
  assert len(seen) == 4 and seen[0][0] + seen[1][0] == 64


@pytest.mark.long
def test_it_is_found_of_values_as_in_a_program():
  model, variables = model_of(centred)
  assert_close(local(model).local_update(None, variables, X, Y).update, by_hand(model, variables))


def contrastive(outputs, targets):
  """Each sample against all others of the batch, of which those of its class are to be near."""
  z = outputs / jnp.linalg.norm(outputs, axis=1, keepdims=True)
  same = targets @ targets.T
  return -jnp.sum(same * jax.nn.log_softmax(z @ z.T / 0.5), axis=1) / jnp.sum(same, axis=1)


def test_a_loss_that_mixes():
  model, variables = model_of(alone)
  loss = losses.wrap(contrastive)
  client = local(model, loss=loss)
  assert mixing.mixes(client, variables, X, jax.nn.one_hot(Y, OUTPUTS), SIZE, LEFT)
  assert_close(jax.jit(client.local_update)(None, variables, X, Y).update, by_hand(model, variables, loss))


@pytest.mark.long
def test_an_augmentation_that_mixes():
  """It adds half of the next sample of the batch."""
  model, variables = model_of(alone)
  client = dataclasses.replace(local(model), augment=lambda key, samples: samples + jnp.roll(samples, 1, axis=0) / 2)
  found = jax.jit(client.local_update)(jax.random.key(0), variables, X, Y).update
  params = variables['params']
  for first, last in ((0, 3), (3, 6), (6, 8)) * 2:
    x = X[first:last] + np.roll(X[first:last], 1, axis=0) / 2
    value = lambda p, x=x, y=Y[first:last]: losses.cross_entropy()(  # noqa: E731
      model.apply({'params': p}, x, True, None)[0], jax.nn.one_hot(y, OUTPUTS)
    ).mean()
    params = jax.tree.map(lambda p, g: p - 0.2 * g, params, jax.grad(value)(params))
  assert_close(found, jax.tree.map(lambda new, old: np.asarray(new - old), params, variables['params']))


@pytest.mark.long
def test_an_order_and_an_attacker_s_gradient_reach_the_smaller_batch():
  model, variables = model_of(centred)
  order = (7, 6, 5, 4, 3, 2, 1, 0)
  client = local(model, order=';'.join([','.join(map(str, order))] * 2))
  reversed_batches = by_hand(model, variables, batches=((0, 3), (3, 6), (6, 8)))
  found = jax.jit(client.local_update)(None, variables, X[::-1], Y[::-1]).update
  assert_close(found, reversed_batches)

  def size(samples):
    update = local(model).local_update(None, variables, samples, jax.nn.one_hot(Y, OUTPUTS)).update
    return sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(update))

  gradient = jax.jit(jax.grad(size))(jnp.asarray(X))
  step = 1e-2
  moved = [size(jnp.asarray(X).at[5, 0, 1, 0].add(sign * step)) for sign in (1, -1)]
  np.testing.assert_allclose(gradient[5, 0, 1, 0], (moved[0] - moved[1]) / (2 * step), rtol=2e-2)


class Normed(nn.Module):
  """A dense layer with BatchNorm, after which the mean of the batch is taken away or not."""

  centred: bool = False

  @nn.compact
  def __call__(self, images, train=False):
    x = nn.BatchNorm(use_running_average=not train)(nn.Dense(OUTPUTS)(images.reshape(images.shape[0], -1)))
    return x - jnp.tanh(x).mean(0, keepdims=True) if self.centred else x


@pytest.mark.parametrize('given', [False, True])
def test_a_batch_norm_that_leaves_padding_out_does_not_mix_by_itself(given):
  model = gl.models.from_flax(Normed(given))
  variables = model.init(jax.random.key(0), SHAPE)
  assert mixing.mixes(local(model), variables, X, jax.nn.one_hot(Y, OUTPUTS), SIZE, LEFT) is given


def own_norm(counts):
  """Returns a network with statistics of its own, which asks for those that count or does not."""

  def apply(variables, images, train=False, key=None):
    del key
    where = masked.counted(images) if counts else None
    found = {'mean': jnp.mean(images, where=where)} if train else variables['batch_stats']
    return (images - found['mean']).reshape(len(images), -1) @ variables['params']['w'], found

  model = gl.models.Model('own', None, apply)
  return model, {'params': {'w': jnp.ones((4, OUTPUTS))}, 'batch_stats': {'mean': jnp.zeros(())}}


@pytest.mark.long
@pytest.mark.parametrize('counts', [False, True])
def test_statistics_of_ones_own_are_those_of_the_smaller_batch(counts):
  model, variables = own_norm(counts)
  client = local(model)
  assert mixing.mixes(client, variables, X, jax.nn.one_hot(Y, OUTPUTS), SIZE, LEFT) is not counts
  upload, _, statistics = jax.jit(client.participate)(None, variables, X, Y)
  assert_close(upload.update, by_hand(model, variables))
  np.testing.assert_allclose(statistics['mean'], X[6:].mean(), rtol=1e-6)
  fixed = dataclasses.replace(client, batch_norm='eval')
  assert not mixing.mixes(fixed, variables, X, jax.nn.one_hot(Y, OUTPUTS), SIZE, LEFT)


@pytest.mark.long
def test_what_does_not_run_on_the_smaller_batch_says_so():
  model, variables = model_of(groups)
  assert mixing.mixes(local(model), variables, X, jax.nn.one_hot(Y, OUTPUTS), SIZE, LEFT)
  with pytest.raises((gl.UsageError, TypeError), match='reshape'):
    local(model).local_update(None, variables, X, Y)
  assert_close(
    local(model, last_batch='dropped').local_update(None, variables, X, Y).update,
    by_hand(model, variables, batches=((0, 3), (3, 6))),
  )


GRADIENT = {'share': 'gradient', 'local_epochs': 1, 'local_batch_size': None, 'learning_rate': None}


@pytest.mark.parametrize(
  ('given', 'sizes', 'words'),
  [
    (GRADIENT, (3, 4), 'as many samples as each other'),
    ({'local_batch_size': None}, (3, 4), 'as many samples as each other'),
    ({}, (3, 4), "set last_batch='dropped'"),
    (GRADIENT, (3, 3), ''),
    ({}, (3, 3), ''),
    ({'last_batch': 'dropped'}, (3, 2), ''),
  ],
)
def test_a_training_refuses_padding_that_would_count(given, sizes, words):
  model, variables = model_of(centred)
  places = np.split(np.arange(sum(sizes)), [sizes[0]])
  federation = simulation.Federation(local(model, **given), X[: sum(sizes)], Y[: sum(sizes)], places, 2)
  start = simulation.start(federation, variables)
  if words:
    with pytest.raises(gl.UsageError, match=f"the model 'centred' mixes the samples of a batch.*{words}"):
      simulation.run_round(federation, start, jax.random.key(0))
    return
  after, _ = simulation.run_round(federation, start, jax.random.key(0))
  rate, epochs = (-1.0, 1) if given.get('share') else (0.2, 2)
  first, second = (by_hand(model, variables, None, epochs, (one,), rate) for one in ((0, 3), (3, 6)))
  shares = (0.6, 0.0) if given.get('last_batch') else (0.5, 0.5)  # two samples fill no batch
  mean = jax.tree.map(lambda a, b: shares[0] * a + shares[1] * b, first, second)
  expected = jax.tree.map(lambda old, d: old + (d if rate > 0 else -d), variables['params'], mean)
  assert_close(after.variables['params'], expected)


@pytest.mark.slow
@pytest.mark.parametrize('function', [centred, attention, by_number, alone])
def test_samples_that_a_network_mixes_are_not_clipped_one_by_one(function):
  """Of a batch of one, each network knows the gradient."""
  model, variables = model_of(function)
  client = gl.Client(model, OUTPUTS)
  dpsgd = gl.defenses.dpsgd(client, norm=1.0, noise=1.0)

  def sent(size):
    batch = jnp.asarray(X[:size]), jax.nn.one_hot(Y[:size], OUTPUTS)
    return dpsgd.update(variables['params'], (), variables['params'], key=jax.random.key(0), batch=batch)

  sent(1)
  if function in MIXING:
    with pytest.raises(gl.UsageError, match=f"dpsgd .* the model '{function.__name__}' no sample has one of its own"):
      sent(2)
  else:
    sent(2)
