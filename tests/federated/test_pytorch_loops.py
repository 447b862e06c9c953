"""Every loss and every setting of a client, alone and together, beside a loop that is written out in PyTorch."""

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradleak as gl
from gradleak.federated import losses, optimizers

torch = pytest.importorskip('torch')
nn, functional = torch.nn, torch.nn.functional

pytestmark = pytest.mark.usefixtures('fast_compilation')

N, SHAPE, OUTPUTS = 7, (4, 4, 1), 3
RNG = np.random.default_rng(5)
X = RNG.uniform(size=(N, *SHAPE)).astype(np.float32)
CLASSES = np.asarray([0, 2, 1, 1, 0, 2, 1])
SOFT = RNG.dirichlet(np.ones(OUTPUTS), N).astype(np.float32)
FLAGS = RNG.integers(0, 2, (N, OUTPUTS)).astype(np.float32)
SHARES = RNG.uniform(size=(N, OUTPUTS)).astype(np.float32)
VALUES = RNG.normal(size=(N, OUTPUTS)).astype(np.float32)
WEIGHT, POSITIVE = (0.5, 2.0, 3.5), (1.0, 4.0, 0.5)
NOTHING = (0.0, 2.0, 3.5)  # a class that does not count


class Dense(nn.Module):
  """Two dense layers."""

  def __init__(self):
    super().__init__()
    self.first, self.last = nn.Linear(16, 6), nn.Linear(6, OUTPUTS)

  def hidden(self, x):
    return torch.tanh(self.first(x.flatten(1)))

  def forward(self, x):
    return self.last(self.hidden(x))


class LayerNormed(Dense):
  """With a LayerNorm of the hidden units."""

  def __init__(self):
    super().__init__()
    self.norm = nn.LayerNorm(6)

  def hidden(self, x):
    return functional.gelu(self.norm(self.first(x.flatten(1))))


class BatchNormed(nn.Module):
  """A convolution with BatchNorm in front of a dense layer."""

  def __init__(self):
    super().__init__()
    self.first, self.norm, self.last = nn.Conv2d(1, 3, 3, bias=False), nn.BatchNorm2d(3), nn.Linear(12, OUTPUTS)

  def forward(self, x):
    return self.last(torch.tanh(self.norm(self.first(x))).flatten(1))


class Mixing(Dense):
  """It takes the mean of the batch away from its hidden units, and attends to the other samples."""

  def hidden(self, x):
    found = super().hidden(x)
    found = found - found.mean(0, keepdim=True)
    return found + torch.softmax(found @ found.T, dim=1) @ found


NETWORKS = {'dense': Dense, 'layer_norm': LayerNormed, 'batch_norm': BatchNormed, 'mixing': Mixing}


@functools.cache
def exported(name):
  """Returns a network of PyTorch, its model and its variables."""
  torch.manual_seed(1)
  module = NETWORKS[name]()
  with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    model, variables = gl.models.from_torch(module, torch.from_numpy(np.moveaxis(X, -1, 1)), check=False)
  return module, model, variables


def probabilities(targets):
  return targets if targets.is_floating_point() else functional.one_hot(targets, OUTPUTS)


def squared_error(z, y):
  return (torch.softmax(z, 1) - probabilities(y)).square().mean()


def focal(z, y, gamma=2.0, weight=(1.0, 1.0, 1.0)):
  p = torch.softmax(z, 1)
  return -(torch.tensor(weight) * probabilities(y) * (1 - p) ** gamma * torch.log(p)).sum(1).mean()


def dice(z, y, smooth=1.0):
  p, y = torch.softmax(z, 1), probabilities(y)
  return (1 - (2 * p * y + smooth) / (p + y + smooth)).mean()


def binary_focal(z, y, gamma=2.0, alpha=0.25):
  """As torchvision.ops.sigmoid_focal_loss."""
  p = torch.sigmoid(z)
  found = functional.binary_cross_entropy_with_logits(z, y, reduction='none')
  found = found * (1 - (p * y + (1 - p) * (1 - y))) ** gamma
  return found.mean() if alpha is None else ((alpha * y + (1 - alpha) * (1 - y)) * found).mean()


cross_entropy, binary = functional.cross_entropy, functional.binary_cross_entropy_with_logits
tensor = torch.tensor
# Each loss: (targets, as PyTorch has it).
LOSSES = {
  'cross_entropy': (CLASSES, cross_entropy),
  'cross_entropy(reduction=sum)': (CLASSES, functools.partial(cross_entropy, reduction='sum')),
  'cross_entropy(smoothing=0.1)': (CLASSES, functools.partial(cross_entropy, label_smoothing=0.1)),
  f'cross_entropy(weight={WEIGHT})': (CLASSES, functools.partial(cross_entropy, weight=tensor(WEIGHT))),
  f'cross_entropy(weight={NOTHING})': (CLASSES, functools.partial(cross_entropy, weight=tensor(NOTHING))),
  f'cross_entropy(smoothing=0.2,weight={WEIGHT})': (
    CLASSES, functools.partial(cross_entropy, weight=tensor(WEIGHT), label_smoothing=0.2)),
  f'cross_entropy(smoothing=0.2,weight={NOTHING})': (
    CLASSES, functools.partial(cross_entropy, weight=tensor(NOTHING), label_smoothing=0.2)),
  f'cross_entropy(reduction=sum,smoothing=0.2,weight={NOTHING})': (
    CLASSES, functools.partial(cross_entropy, weight=tensor(NOTHING), label_smoothing=0.2, reduction='sum')),
  'cross_entropy(smoothing=0.3)': (SOFT, functools.partial(cross_entropy, label_smoothing=0.3)),
  f'cross_entropy(average=samples,weight={WEIGHT})': (SOFT, functools.partial(cross_entropy, weight=tensor(WEIGHT))),
  f'cross_entropy(average=samples,smoothing=0.1,weight={NOTHING})': (
    SOFT, functools.partial(cross_entropy, weight=tensor(NOTHING), label_smoothing=0.1)),
  'squared_error': (CLASSES, squared_error),
  'focal': (CLASSES, focal),
  'focal(gamma=0)': (SOFT, functools.partial(focal, gamma=0.0)),
  f'focal(gamma=1.5,weight={WEIGHT})': (CLASSES, functools.partial(focal, gamma=1.5, weight=WEIGHT)),
  'dice(smooth=1)': (CLASSES, dice),
  'binary_cross_entropy': (FLAGS, binary),
  'binary_cross_entropy(reduction=sum)': (SHARES, functools.partial(binary, reduction='sum')),
  f'binary_cross_entropy(positive={POSITIVE},weight={WEIGHT})': (
    FLAGS, functools.partial(binary, weight=tensor(WEIGHT), pos_weight=tensor(POSITIVE))),
  f'binary_cross_entropy(positive={POSITIVE})': (SHARES, functools.partial(binary, pos_weight=tensor(POSITIVE))),
  'binary_focal': (FLAGS, binary_focal),
  'binary_focal(alpha=0.4,gamma=1.5)': (SHARES, functools.partial(binary_focal, gamma=1.5, alpha=0.4)),
  'binary_focal(alpha=none)': (SHARES, functools.partial(binary_focal, alpha=None)),
  'mean_squared_error': (VALUES, functional.mse_loss),
  'mean_squared_error(reduction=sum)': (VALUES, functools.partial(functional.mse_loss, reduction='sum')),
  'huber(delta=0.7)': (VALUES, functools.partial(functional.huber_loss, delta=0.7)),
  'huber(reduction=sum)': (VALUES, functools.partial(functional.huber_loss, reduction='sum')),
}  # fmt: skip


def loss_of_pytorch(function, z, y):
  """Returns the loss of outputs, with its tensors in their precision."""
  given = getattr(function, 'keywords', {})
  return function(z, y, **{key: one.to(z.dtype) for key, one in given.items() if isinstance(one, torch.Tensor)})


def loss_of(text):
  return losses.parse(text.replace(' ', ''))


def optimizer_of(given, parameters):
  rate, decay, momentum = given.rate, given.weight_decay, given.momentum
  return {
    'sgd': lambda: torch.optim.SGD(parameters, rate, momentum, weight_decay=decay),
    'nesterov': lambda: torch.optim.SGD(parameters, rate, momentum, weight_decay=decay, nesterov=True),
    'adam': lambda: torch.optim.Adam(parameters, rate, weight_decay=decay),
    'adamw': lambda: torch.optim.AdamW(parameters, rate, weight_decay=decay),
    'rmsprop': lambda: torch.optim.RMSprop(parameters, rate, momentum=momentum, weight_decay=decay),
  }[given.optimizer]()


def by_hand(name, given, orders=None, make=None, correction=None, double=False):
  """Returns the update of a client as a PyTorch user writes it, {name of a tensor: array}.

  Args:
    name: of the network.
    given: the `ClientSettings`.
    orders: of the samples in each epoch; None for their own.
    make: parameters -> an optimizer; None for that of the settings.
    correction: SCAFFOLD's c − c_i of each parameter, in their order, or None.
    double: whether it runs in float64.
  """
  targets, loss_function = LOSSES[given.loss]
  module = NETWORKS[name]()
  module.load_state_dict(exported(name)[0].state_dict())
  module.to(torch.float64 if double else torch.float32)
  module.train(given.batch_norm == 'train')
  for part, layer in module.named_children():
    layer.requires_grad_(part not in given.frozen.split('-'))
  parameters = [one for one in module.parameters() if one.requires_grad]
  start = {key: one.detach().clone() for key, one in module.named_parameters()}
  before = [one.detach().clone() for one in parameters]
  x, y = torch.from_numpy(np.moveaxis(X, -1, 1).copy()), torch.from_numpy(targets)
  if double:
    x, y = x.double(), y.double() if y.is_floating_point() else y
  if given.share == 'gradient':
    loss_of_pytorch(loss_function, module(x), y).backward()
    return {key: np.zeros(one.shape, np.float32) if one.grad is None else one.grad.numpy() for key, one in
            module.named_parameters()}  # fmt: skip
  optimizer = (make or functools.partial(optimizer_of, given))(parameters)
  schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, given.rate_decay)
  size, done = given.local_batch_size or N, 0
  for epoch in range(given.local_epochs):
    order = torch.arange(N) if orders is None else torch.tensor(orders[epoch])
    for batch in order.split(size):
      if given.last_batch == 'dropped' and len(batch) < size:
        continue
      loss = loss_of_pytorch(loss_function, module(x[batch]), y[batch])
      if given.proximal:
        loss = loss + given.proximal / 2 * sum((a - b).square().sum() for a, b in zip(parameters, before, strict=True))
      (loss / given.accumulate).backward()
      done += 1
      if done % given.accumulate:
        continue
      for one, more in zip(parameters, correction or (), strict=correction is not None):
        one.grad += more
      if given.max_norm is not None:
        nn.utils.clip_grad_norm_(parameters, given.max_norm)
      optimizer.step()
      optimizer.zero_grad()
      schedule.step()
  private = given.private.split('-')
  return {
    key: (one.detach() - start[key]).numpy() * (key.split('.')[0] not in private)
    for key, one in module.named_parameters()
  }


def simulated(name, given, **changes):
  """Returns the update of the simulated client, {name of a tensor: array}."""
  _, model, variables = exported(name)
  client = dataclasses.replace(dataclasses.replace(given, loss=loss_of(given.loss)).client(model, OUTPUTS), **changes)
  update = jax.jit(client.local_update)(None, variables, X, LOSSES[given.loss][0]).update
  return {key: np.asarray(one) for key, one in model.layout.to_theirs({'params': update}).items()}


def assert_equal(name, given, orders=None, ours=None, **loop):
  """Compares a client with the loop, tensor by tensor, relative to the norm.

  Where they differ by more than 1e-5, as Adam makes of rounding, the loop in float64 is the judge. The client is then
  at most four times as far from it as PyTorch is in float32.
  """
  found = simulated(name, given) if ours is None else ours
  wanted = by_hand(name, given, orders, **loop)
  assert found.keys() == wanted.keys() and all(np.isfinite(one).all() for one in wanted.values())
  assert any(one.any() for one in wanted.values())
  far = [key for key, one in wanted.items() if np.linalg.norm(found[key] - one) > 1e-5 * np.linalg.norm(one)]
  if not far:
    return
  exact = by_hand(name, given, orders, double=True, **loop)
  for key in far:
    size, apart, theirs = (
      np.linalg.norm(one) for one in (wanted[key], found[key] - exact[key], wanted[key] - exact[key])
    )
    assert apart <= 4 * theirs and apart <= 1e-3 * size, f'{key}: {apart / size:.1e}, PyTorch {theirs / size:.1e}'


LOCAL = gl.ClientSettings(share='delta', local_epochs=2, local_batch_size=3, learning_rate=0.05)


@pytest.mark.parametrize('share', ['gradient', 'delta'])
@pytest.mark.parametrize('loss', LOSSES)
def test_each_loss(loss, share):
  given = dataclasses.replace(LOCAL if share == 'delta' else gl.ClientSettings(), loss=loss)
  assert_equal('dense', given)


ALONE = [
  {'local_epochs': 4},
  {'local_batch_size': None},
  {'local_batch_size': 1},
  {'local_batch_size': 4, 'last_batch': 'dropped'},
  {'momentum': 0.9},
  {'weight_decay': 0.1},
  {'momentum': 0.9, 'weight_decay': 0.1},
  {'optimizer': 'nesterov', 'momentum': 0.9, 'weight_decay': 0.1},
  {'optimizer': 'adam'},
  {'optimizer': 'adam', 'weight_decay': 0.1},
  {'optimizer': 'adamw', 'weight_decay': 0.1, 'learning_rate': 0.01},
  {'optimizer': 'rmsprop', 'learning_rate': 0.01},
  {'optimizer': 'rmsprop', 'learning_rate': 0.01, 'momentum': 0.5, 'weight_decay': 0.1},
  {'accumulate': 2},
  {'accumulate': 4, 'momentum': 0.9},
  {'proximal': 1.0},
  {'max_norm': 0.2},
  {'max_norm': 0.2, 'weight_decay': 0.5, 'momentum': 0.9},  # it is clipped before the decay is added
  {'max_norm': 0.2, 'proximal': 5.0},  # and after the proximal term
  {'max_norm': 0.05, 'accumulate': 2},
  {'rate_decay': 0.8},
  {'rate_decay': 0.8, 'optimizer': 'adamw', 'weight_decay': 0.5, 'accumulate': 2},
  {'frozen': 'first'},
  {'frozen': 'first', 'weight_decay': 0.5, 'max_norm': 0.1, 'proximal': 1.0},
  {'private': 'last', 'momentum': 0.5},
  {'frozen': 'first', 'share': 'gradient', 'local_epochs': 1, 'local_batch_size': None, 'learning_rate': None},
]


@pytest.mark.parametrize('network', ['dense', 'batch_norm'])
@pytest.mark.parametrize('change', ALONE, ids=str)
def test_each_setting(change, network):
  given = dataclasses.replace(LOCAL, **change)
  assert_equal(network, given)


def drawn(seed):
  """Returns (name of a network, `ClientSettings`, the order of its samples or None), at random."""
  rng = np.random.default_rng(seed)

  def one_of(*values):
    return values[rng.integers(len(values))]

  optimizer = one_of('sgd', 'sgd', 'adam', 'adamw', 'rmsprop')
  network = one_of(*NETWORKS)
  epochs, size = one_of(1, 2, 3), one_of(None, 2, 3, 4, 5)
  orders = [rng.permutation(N).tolist() for _ in range(epochs)] if one_of(True, False) else None
  layers = one_of(('', ''), ('', ''), ('first', ''), ('', 'first'), ('', 'last'), ('last', 'first'))
  if layers == ('last', 'first') and network in ('dense', 'mixing'):  # which have no other
    layers = 'last', ''
  given = gl.ClientSettings(
    loss=one_of(*LOSSES),
    share='delta',
    local_epochs=epochs,
    local_batch_size=size,
    learning_rate=one_of(0.01, 0.05) if optimizer == 'sgd' else one_of(0.001, 0.01),
    optimizer=optimizer,
    momentum=one_of(0.0, 0.5, 0.9) if optimizer in ('sgd', 'rmsprop') else 0.0,
    weight_decay=one_of(0.0, 0.01, 0.3),
    accumulate=one_of(1, 1, 2) if epochs > 1 or size in (2, 3) else 1,
    proximal=one_of(0.0, 0.0, 0.5),
    max_norm=one_of(None, 0.01, 0.3),
    rate_decay=one_of(1.0, 0.9),
    last_batch=one_of('kept', 'dropped'),
    order='' if orders is None else ';'.join(','.join(map(str, one)) for one in orders),
    frozen=layers[0],
    private=layers[1],
    batch_norm=one_of('train', 'train', 'eval'),
  )
  return network, given, orders


@pytest.mark.parametrize('seed', [*range(30), *(pytest.param(s, marks=pytest.mark.slow) for s in range(30, 200))])
def test_settings_together(seed):
  network, given, orders = drawn(seed)
  assert_equal(network, given, orders)


def test_an_optimizer_of_ones_own():
  """Nesterov's momentum by optax, and SCAFFOLD's correction in front of a local optimizer."""
  nesterov = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True)
  ours = simulated('dense', LOCAL, optimizer=optax.sgd(0.05, 0.9, nesterov=True))
  assert_equal('dense', LOCAL, ours=ours, make=nesterov)
  module, model, _ = exported('dense')
  torch.manual_seed(3)
  server, own = ({key: torch.randn_like(one) for key, one in module.named_parameters()} for _ in range(2))
  variates = [
    model.layout.variables({key: one.numpy() for key, one in {**module.state_dict(), **tree}.items()})['params']
    for tree in (server, own)
  ]
  chain = optax.chain(optimizers.corrected(*variates), optimizers.sgd(0.05, 0.5))
  correction = [server[key] - own[key] for key in server]
  given = dataclasses.replace(LOCAL, momentum=0.5)
  assert_equal('dense', given, ours=simulated('dense', given, optimizer=chain), correction=correction)


@pytest.mark.parametrize('reduction', ['mean', 'sum'])
@pytest.mark.parametrize('weight', [None, WEIGHT, NOTHING])
@pytest.mark.parametrize('smoothing', [0.0, 0.2])
def test_a_loss_of_positions(reduction, weight, smoothing):
  """As of the pixels of a segmentation: loss and derivative, of classes and of probabilities."""
  rng = np.random.default_rng(2)
  outputs, classes = rng.normal(size=(4, 5, 6, OUTPUTS)).astype(np.float32), rng.integers(0, OUTPUTS, (4, 5, 6))
  soft = rng.dirichlet(np.ones(OUTPUTS), (4, 5, 6)).astype(np.float32)
  weights = None if weight is None else tensor(weight)
  for given, average in ((classes, 'weights'), (soft, 'samples')):
    loss = losses.cross_entropy(weight=weight, smoothing=smoothing, average=average, reduction=reduction)
    encoded = loss.targets.encode(jnp.asarray(given), OUTPUTS, jnp.float32)
    ours = jax.value_and_grad(lambda z, loss=loss, y=encoded: loss.reduced(loss(z, y), y, jnp.ones(4)))(outputs)
    z, y = torch.from_numpy(np.moveaxis(outputs, -1, 1).copy()).requires_grad_(), torch.from_numpy(given)
    y = y.moveaxis(-1, 1) if y.is_floating_point() else y
    theirs = cross_entropy(z, y, weights, label_smoothing=smoothing, reduction=reduction)
    theirs.backward()
    np.testing.assert_allclose(ours[0], theirs.item(), rtol=1e-5)
    np.testing.assert_allclose(ours[1], np.moveaxis(z.grad.numpy(), 1, -1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('reduction', ['mean', 'sum'])
def test_a_loss_of_tokens(reduction):
  """Positions that do not count are PyTorch's `ignore_index`; no position of the second sample counts."""
  rng = np.random.default_rng(3)
  outputs, tokens = rng.normal(size=(4, 6, 9)).astype(np.float32), rng.integers(0, 9, (4, 6))
  counts = rng.integers(0, 2, (4, 6)).astype(bool)
  counts[1] = False
  encoded = jax.nn.one_hot(tokens, 9) * counts[..., np.newaxis].astype(np.float32)
  z = torch.from_numpy(outputs).requires_grad_()
  y = torch.from_numpy(np.where(counts, tokens, -100))
  theirs = cross_entropy(z.flatten(0, 1), y.flatten(), reduction=reduction)
  theirs.backward()
  for loss in (losses.next_token(reduction=reduction), losses.masked_token(reduction=reduction)):
    ours = jax.value_and_grad(lambda z, loss=loss: loss.reduced(loss(z, encoded), encoded, jnp.ones(4)))(outputs)
    np.testing.assert_allclose(ours[0], theirs.item(), rtol=1e-5)
    np.testing.assert_allclose(ours[1], z.grad.numpy(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize('norm', [1e-5, 1e-3, 1.0, np.inf])
def test_clipping_of_short_gradients(norm):
  """PyTorch adds 1e-6 to their length."""
  gradient = {'a': np.float32([[1e-4, -3e-4]]), 'b': np.float32([2e-4])}
  parameters = [torch.zeros(one.shape, requires_grad=True) for one in gradient.values()]
  for parameter, one in zip(parameters, gradient.values(), strict=True):
    parameter.grad = torch.from_numpy(one.copy())
  nn.utils.clip_grad_norm_(parameters, norm)
  clip = optimizers.clipped(norm)
  found, _ = clip.update(jax.tree.map(jnp.asarray, gradient), clip.init(gradient), gradient)
  for parameter, one in zip(parameters, found.values(), strict=True):
    np.testing.assert_allclose(one, parameter.grad.numpy(), rtol=1e-6)


def test_entries_of_vanishing_gradients_move_as_far():
  """Adam and RMSprop step along them at full length: what is added below a root would shorten such steps."""
  scale = np.float32([1e-3, 1e-6, 1e-8, 1e-10, 0]).reshape(5, 1)
  gradients = scale * RNG.uniform(0.5, 1.5, (4, 5, 1)).astype(np.float32)
  for name, make in (('adam', torch.optim.Adam), ('rmsprop', torch.optim.RMSprop)):
    parameter = torch.zeros(5, 1, requires_grad=True)
    theirs, ours = make([parameter], lr=0.1), optimizers.OPTIMIZERS[name](0.1)
    params = jnp.zeros((5, 1))
    state = ours.init(params)
    for gradient in gradients:
      parameter.grad = torch.from_numpy(gradient)
      theirs.step()
      updates, state = ours.update(jnp.asarray(gradient), state, params)
      params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(params, parameter.detach().numpy(), rtol=1e-5, err_msg=name)
