"""Local training as frameworks run it: beside loops that are written out, in PyTorch where it is installed."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradleak as gl
from gradleak.federated import optimizers, response

N, FEATURES, OUTPUTS = 7, 16, 3
RNG = np.random.default_rng(1)
X = RNG.uniform(size=(N, 4, 4, 1)).astype(np.float32)
Y = np.asarray([0, 2, 1, 1, 0, 2, 1])
MODEL = gl.models.from_functions(
  lambda key, shape: {'w': jnp.zeros((FEATURES, OUTPUTS)), 'b': jnp.zeros(OUTPUTS)},
  lambda params, images: images.reshape(len(images), -1) @ params['w'] + params['b'].reshape(1, -1),
  'linear',
)
PARAMS = {
  'w': RNG.normal(size=(FEATURES, OUTPUTS)).astype(np.float32) / 4,
  'b': RNG.normal(size=OUTPUTS).astype(np.float32) / 4,
}
LOCAL = {'share': 'delta', 'local_epochs': 3, 'local_batch_size': 3, 'learning_rate': 0.05}


def delta(key=None, **given):
  client = gl.ClientSettings(**{**LOCAL, **given}).client(MODEL, OUTPUTS)
  return jax.jit(client.local_update)(key, {'params': PARAMS}, X, Y).update


def gradient(params, x, y):
  z = x.reshape(len(x), -1) @ params['w'] + params['b']
  p = np.exp(z - z.max(-1, keepdims=True))
  error = (p / p.sum(-1, keepdims=True) - np.eye(OUTPUTS)[y]) / len(x)
  return {'w': x.reshape(len(x), -1).T @ error, 'b': error.sum(0)}


def by_hand(batches, rate=0.05, extra=lambda params, start: {'w': 0, 'b': 0}):
  """Returns the delta of SGD on batches of sample numbers, float64."""
  start = {name: leaf.astype(np.float64) for name, leaf in PARAMS.items()}
  params = start
  for chosen in batches:
    found, more = gradient(params, X[chosen], Y[chosen]), extra(params, start)
    params = {name: params[name] - rate * (found[name] + more[name]) for name in params}
  return {name: params[name] - start[name] for name in params}


def assert_close(found, expected):
  for name, leaf in expected.items():
    np.testing.assert_allclose(found[name], leaf, rtol=1e-5, atol=1e-5 * np.abs(leaf).max(), err_msg=name)


IN_ORDER = [[0, 1, 2], [3, 4, 5], [6]]
ORDERS = [[3, 1, 6, 0, 2, 5, 4], [0, 6, 5, 4, 3, 2, 1], [2, 0, 1, 5, 6, 4, 3]]


def test_the_last_batch_is_kept_or_dropped():
  assert_close(delta(), by_hand(3 * IN_ORDER))
  assert_close(delta(last_batch='dropped'), by_hand(3 * IN_ORDER[:2]))
  client = gl.ClientSettings(**LOCAL, last_batch='dropped').client(MODEL, OUTPUTS)
  assert client.num_steps(N) == 6 and client.num_steps(3) == 3
  with pytest.raises(gl.UsageError, match='2 samples do not fill one batch of 3, and the last batch is dropped'):
    client.num_steps(2)


def test_padding_that_begins_in_the_last_batch_drops_it():
  """As in a training, where clients of several sizes share one program."""
  client = gl.ClientSettings(**LOCAL, last_batch='dropped').client(MODEL, OUTPUTS)
  x, y = np.resize(X, (9, 4, 4, 1)), np.resize(Y, 9)
  weights = np.asarray([1.0] * N + [0.0] * 2, np.float32)
  found = client.participate(None, {'params': PARAMS}, x, y, weights)[0].update
  assert_close(found, by_hand(3 * IN_ORDER[:2]))


def test_a_client_of_one_batch_drops_none_of_it():
  """As a `DataLoader` whose batch is all of its samples; clients of other sizes only fill it."""
  client = gl.ClientSettings(**{**LOCAL, 'local_batch_size': None}, last_batch='dropped').client(MODEL, OUTPUTS)
  x, y = np.resize(X, (9, 4, 4, 1)), np.resize(Y, 9)
  weights = np.asarray([1.0] * N + [0.0] * 2, np.float32)
  found = client.participate(None, {'params': PARAMS}, x, y, weights)[0].update
  assert_close(found, by_hand(3 * [list(range(N))]))


def test_the_order_of_the_samples_is_given():
  text = ';'.join(','.join(map(str, one)) for one in ORDERS)
  batches = [one[at : at + 3] for one in ORDERS for at in (0, 3, 6)]
  assert_close(delta(order=text), by_hand(batches))
  assert_close(delta(order=text, last_batch='dropped'), by_hand([one for one in batches if len(one) == 3]))


@pytest.mark.parametrize(
  ('given', 'words'),
  [
    ({'order': '0,1,1,2,3,4,5;' * 2 + '0,1,2,3,4,5,6'}, 'expected a permutation of their numbers'),
    ({'order': '0,1,2'}, 'for each of 3 epochs'),
    ({'order': 'a;b;c'}, 'expected a permutation'),
    ({'order': '0,1;1,0;0,1'}, 'the order is of 2 samples, and the client has 7'),
    ({'order': ';'.join(['0,1,2,3,4,5,6'] * 3), 'sample_order': 'shuffled'}, 'leave one of the two out'),
    ({'optimizer': 'adamw', 'momentum': 0.5}, 'momentum is 0.5, and adamw has its own'),
    ({'optimizer': 'nesterov'}, 'momentum is 0.0, and nesterov is SGD with a momentum'),
    ({'private': 'Conv_0'}, "unknown private layer 'Conv_0'"),
    ({'accumulate': 0}, 'accumulate is 0'),
    ({'proximal': -1.0}, 'proximal is -1.0'),
  ],
)
def test_settings_that_cannot_be_are_refused(given, words):
  with pytest.raises(gl.UsageError, match=words):
    delta(**given)


def test_the_proximal_term():
  mu = 0.3
  expected = by_hand(3 * IN_ORDER, extra=lambda p, start: {name: mu * (p[name] - start[name]) for name in p})
  assert_close(delta(proximal=mu), expected)
  with pytest.raises(gl.UsageError, match='the proximal term needs the parameters'):
    optimizers.proximal(1.0).update(PARAMS, optimizers.proximal(1.0).init(PARAMS))


def test_control_variates_correct_each_step():
  rng = np.random.default_rng(2)
  server, own = ({name: rng.normal(size=p.shape).astype(np.float32) for name, p in PARAMS.items()} for _ in range(2))
  client = gl.Client(
    MODEL, OUTPUTS, share='delta', epochs=3, batch_size=3,
    optimizer=optax.chain(optimizers.corrected(server, own), optax.sgd(0.05)),
  )  # fmt: skip
  found = jax.jit(client.local_update)(None, {'params': PARAMS}, X, Y).update
  correction = {name: server[name] - own[name] for name in PARAMS}
  assert_close(found, by_hand(3 * IN_ORDER, extra=lambda params, start: correction))
  with pytest.raises(gl.UsageError, match='differ in structure or shapes'):
    optimizers.corrected(server, {'w': own['w']})
  # What noise becomes in a delta is the same with a constant beside it.
  gains, plain = (response.noise_gains(one, 9, PARAMS) for one in (client.optimizer, optax.sgd(0.05)))
  assert gains is not None and gains == plain


@pytest.mark.long
def test_private_layers_are_trained_and_not_shared(small_images):
  model = gl.models.create('mlp(widths=8)', 10)
  variables = model.init(jax.random.key(0), (8, 8, 1))
  images, labels = small_images
  settings = {'share': 'delta', 'local_epochs': 2, 'local_batch_size': 4}
  whole = gl.ClientSettings(**settings).client(model, 10).local_update(None, variables, images, labels)
  client = gl.ClientSettings(**settings, private='Dense_0').client(model, 10)
  found = jax.jit(client.local_update)(None, variables, images, labels)
  for (path, own), other, mask in zip(
    jax.tree_util.tree_leaves_with_path(found.update),
    jax.tree.leaves(whole.update),
    jax.tree.leaves(found.mask),
    strict=True,
  ):
    private = 'Dense_0' in jax.tree_util.keystr(path)
    np.testing.assert_array_equal(own, jnp.zeros_like(own) if private else other)  # so it was trained on
    assert bool(np.all(mask)) is not private
  with pytest.raises(gl.UsageError, match='the layer Dense_0 is frozen and private'):
    gl.ClientSettings(**settings, private='Dense_0', frozen='Dense_0').client(model, 10)
  with pytest.raises(gl.UsageError, match='private layers are not kept from round to round'):
    gl.federated.simulation.Federation(client, images, labels, [np.arange(8)], 1)


TORCH = {
  'sgd': ({'momentum': 0.9, 'weight_decay': 0.01}, lambda t, p: t.optim.SGD(p, 0.05, 0.9, weight_decay=0.01)),
  'nesterov': ({'momentum': 0.9}, lambda t, p: t.optim.SGD(p, 0.05, 0.9, nesterov=True)),
  'adam': ({'weight_decay': 0.01}, lambda t, p: t.optim.Adam(p, 0.05, weight_decay=0.01)),
  'adamw': ({'weight_decay': 0.02}, lambda t, p: t.optim.AdamW(p, 0.05, weight_decay=0.02)),
  'rmsprop': ({'momentum': 0.5}, lambda t, p: t.optim.RMSprop(p, 0.05, momentum=0.5)),
}


@pytest.mark.parametrize('name', TORCH)
@pytest.mark.parametrize('accumulate', [1, 2])
def test_optimizers_equal_pytorch_s(name, accumulate):
  torch = pytest.importorskip('torch')
  given, make = TORCH[name]
  layer = torch.nn.Linear(FEATURES, OUTPUTS)
  layer.weight.data, layer.bias.data = torch.tensor(PARAMS['w'].T), torch.tensor(PARAMS['b'])
  optimizer = make(torch, layer.parameters())
  for count, chosen in enumerate(3 * IN_ORDER[:2], 1):
    loss = torch.nn.functional.cross_entropy(layer(torch.tensor(X[chosen]).flatten(1)), torch.tensor(Y[chosen]))
    (loss / accumulate).backward()
    if count % accumulate == 0:
      optimizer.step()
      optimizer.zero_grad()
  found = delta(optimizer=name, accumulate=accumulate, last_batch='dropped', **given)
  expected = {'w': layer.weight.data.numpy().T - PARAMS['w'], 'b': layer.bias.data.numpy() - PARAMS['b']}
  assert_close(found, expected)


@pytest.mark.long
@pytest.mark.parametrize('name', ['adam', 'adamw', 'rmsprop'])
def test_an_attacker_can_differentiate_through_them(name):
  client = gl.ClientSettings(**LOCAL, optimizer=name).client(MODEL, OUTPUTS)
  dark = X * (X[:1] > 0.5)  # pixels that are black in all samples, whose gradient is zero

  def size(images):
    update = client.local_update(None, {'params': PARAMS}, images, jax.nn.one_hot(Y, OUTPUTS)).update
    return sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(update))

  assert np.isfinite(jax.jit(jax.grad(size))(jnp.asarray(dark))).all()
