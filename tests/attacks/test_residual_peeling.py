"""Peeling of residual networks against JAX's own gradients of digits, in networks small enough to know every map."""

import functools
import importlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import gradleak as gl
from gradleak import Client, Knowledge, Observation, UsageError
from gradleak.attacks import REGISTRY as ATTACKS
from gradleak.attacks import closed_map, inverse
from gradleak.core import trees
from gradleak.models import layers, stages
from gradleak.models.resnet import BasicBlock, Bottleneck
from gradleak.servers import REGISTRY as SERVERS

peeling = importlib.import_module('gradleak.attacks.residual_peeling')  # attacks.residual_peeling is the attack

pytestmark = pytest.mark.usefixtures('fast_compilation')


class Small(nn.Module):
  """A stem that halves an 8×8 image, residual blocks of 4×4 positions and as many channels, the mean, a dense layer."""

  blocks: int = 1
  width: int = 16
  norm: str = 'batch'
  stride: int = 1
  bottleneck: bool = False
  project: bool = True

  @nn.compact
  def __call__(self, images, train: bool = False):
    x = layers.Conv(self.width, 3, 'default', 2, 1, bias=False, name='stem')(images)
    x = nn.relu(nn.BatchNorm(use_running_average=not train, name='norm')(x))
    kind = Bottleneck if self.bottleneck else BasicBlock
    for block in range(self.blocks):
      x = kind(self.width, self.stride, 'default', 'patches', self.norm, self.project, name=f'block{block}')(x, train)
    return layers.Dense(10, 'default', name='dense')(jnp.mean(x, axis=(1, 2)))


class Plain(nn.Module):
  """Convolutions without shortcuts: 8×8, max pooling, two of 4×4, max pooling, the mean, a dense layer."""

  norm: bool = True
  width: int = 24
  pool: Callable = functools.partial(layers.max_pool, size=2)

  @nn.compact
  def __call__(self, images, train: bool = False):
    x = images
    for place in range(3):
      x = layers.Conv(self.width, 3, 'default', 1, 1, name=f'conv{place}')(x)
      x = nn.BatchNorm(use_running_average=not train, name=f'norm{place}')(x) if self.norm else x
      x = nn.relu(x)
      x = x if place == 1 else self.pool(x)
    return layers.Dense(10, 'default', name='dense')(jnp.mean(x, axis=(1, 2)))


def observed(digits, module, number=1, **local):
  """Returns (the client, the observation) of the first digits."""
  images, labels = (jnp.asarray(part[:number]) for part in digits)
  model = gl.models.from_flax(module)
  client = Client(model, num_classes=10, **local)
  variables = model.init(jax.random.key(0), images.shape[1:])
  keys = iter(jax.random.split(jax.random.key(1), 100))  # norms of untrained networks have no shift

  def shifted(path, leaf):
    return leaf + 0.2 * jax.random.normal(next(keys), leaf.shape) if leaf.ndim == 1 else leaf

  variables = {**variables, 'params': jax.tree_util.tree_map_with_path(shifted, variables['params'])}
  update = jax.jit(client.local_update)(None, variables, images, labels).update
  knowledge = Knowledge(labels='unused', batch_norm=client.batch_norm, share=client.share)
  return client, Observation(variables, update, jnp.zeros((number, 10)), knowledge, images.shape, 10)


def by_path(tree):
  return {trees.path_names(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(tree)}


def maps_of(net, params, image):
  """Returns the inputs of all stages, and the last output."""
  found = [jnp.asarray(image)]
  for stage in net.stages:
    found.append(jax.nn.relu(net.apply(stage, params, found[-1])))
  return found


def attacked(client, observation, **settings):
  attack = gl.attacks.residual_peeling(**settings)(client)
  return attack.reconstruct(attack.init(jax.random.key(0), observation), observation)


def correlation(a, b):
  return np.corrcoef(np.ravel(a), np.ravel(b))[0, 1]


@pytest.mark.long
def test_stages_compute_what_the_network_does(digits):
  client, seen = observed(digits, Small(2))
  net, params = stages.stages(client.model, seen.variables, (8, 8, 1)), by_path(seen.variables['params'])
  assert [stage.shape for stage in net.stages] == [(1, 8, 8, 1), (1, 4, 4, 16), (1, 4, 4, 16)]
  assert [stage.kernel for stage in net.stages[1:]] == [(f'block{i}', 'conv1', 'kernel') for i in range(2)]
  *_, last = maps_of(net, params, digits[0][:1])
  kernel, bias = (params[path] for path in net.dense)
  logits = client.model.apply(seen.variables, digits[0][:1], True, None)[0]
  np.testing.assert_allclose(np.asarray(net.apply(net.head, {}, last)) @ kernel + bias, logits, atol=1e-5)


@pytest.mark.long
def test_the_closed_form_gives_the_map_before_the_last_block(digits):
  client, seen = observed(digits, Small())
  net_of = peeling._network(client.model, (8, 8, 1), True)
  params, update = by_path(seen.variables['params']), by_path(seen.update)
  stage, truth = net_of().stages[-1], maps_of(net_of(), params, digits[0][:1])[1]
  numbers = closed_map.patches(net_of, 1)
  assert numbers.shape == (16, 144) and set(np.unique(numbers)) == set(range(257))
  gradient = update[stage.kernel]
  assert np.linalg.matrix_rank(gradient, tol=1e-5 * np.linalg.norm(gradient)) == 15
  found, eigenvalue = closed_map.direction_of(numbers, gradient, 256)
  np.testing.assert_allclose(found * np.linalg.norm(truth), np.ravel(truth), atol=1e-5 * np.linalg.norm(truth))
  assert eigenvalue < 1e-9


class Ordered(nn.Module):
  """Two convolutions whose weights have their axes in any order: they are transposed first, or taken as they are."""

  order: str
  turned: bool = False
  groups: int = 1  # of the second

  @nn.compact
  def __call__(self, x, train: bool = False):
    for place in range(2):
      groups = self.groups if place else 1
      sizes = {'H': 3, 'W': 3, 'I': x.shape[-1] // groups, 'O': 16}
      kernel = self.param(f'weight{place}', nn.initializers.normal(0.3), tuple(sizes[name] for name in self.order))
      kernel = jnp.einsum(f'{self.order}->HWIO', kernel) if self.turned else kernel
      names = 'NHWC', 'HWIO' if self.turned else self.order, 'NHWC'
      given = {'dimension_numbers': names, 'feature_group_count': groups}
      x = jax.lax.conv_general_dilated(x, kernel, (2 - place,) * 2, [(1, 1)] * 2, **given)
      x = nn.relu(nn.BatchNorm(use_running_average=not train, name=f'norm{place}')(x))
    return nn.Dense(10, name='dense')(jnp.mean(x, axis=(1, 2)))


def map_of(client, seen, weight):
  """Returns the map before the last stage, the axis of its weight's channels, and whether the form is exact."""
  net_of = peeling._network(client.model, (8, 8, 1), True)
  assert net_of().stages[1].kernel == weight
  found, eigenvalue = closed_map.found(net_of, 1, by_path(seen.update)[weight])
  return found, closed_map.axis_of(net_of, 1), eigenvalue < 1e-9


@pytest.mark.long
@pytest.mark.parametrize('turned', [False, True])
@pytest.mark.parametrize('order', ['HWIO', 'OIHW', 'IOHW'])
def test_a_map_is_found_whatever_the_order_of_a_weights_axes(digits, order, turned):
  client, seen = observed(digits, Ordered(order, turned))
  found, axis, exact = map_of(client, seen, ('weight1',))
  net_of, params = peeling._network(client.model, (8, 8, 1), True), by_path(seen.variables['params'])
  truth = maps_of(net_of(), params, digits[0][:1])[1]
  assert axis == order.index('O') and exact and correlation(found, truth) > 1 - 1e-6


def test_a_network_from_pytorch_gives_the_map_that_flax_gives(digits):
  torch = pytest.importorskip('torch', reason='PyTorch is not installed')
  client, seen = observed(digits, Ordered('OIHW'))
  params = seen.variables['params']

  class Network(torch.nn.Module):
    def __init__(self):
      super().__init__()
      self.conv0 = torch.nn.Conv2d(1, 16, 3, 2, 1, bias=False)
      self.conv1 = torch.nn.Conv2d(16, 16, 3, 1, 1, bias=False)
      self.norm0, self.norm1, self.dense = torch.nn.BatchNorm2d(16), torch.nn.BatchNorm2d(16), torch.nn.Linear(16, 10)

    def forward(self, x):
      x = torch.relu(self.norm0(self.conv0(x)))
      return self.dense(torch.relu(self.norm1(self.conv1(x))).mean((2, 3)))

  model, variables = gl.models.from_torch(Network().train(), torch.zeros(2, 1, 8, 8))
  theirs = {f'conv{i}': {'weight': params[f'weight{i}']} for i in range(2)}
  theirs |= {f'norm{i}': {'weight': params[f'norm{i}']['scale'], 'bias': params[f'norm{i}']['bias']} for i in range(2)}
  theirs['dense'] = {'weight': params['dense']['kernel'], 'bias': params['dense']['bias']}
  assert jax.tree.map(jnp.shape, theirs) == jax.tree.map(jnp.shape, variables['params'])
  other = Client(model, num_classes=10)
  variables = {**variables, 'params': theirs}
  update = other.local_update(None, variables, jnp.asarray(digits[0][:1]), jnp.asarray(digits[1][:1])).update
  found, axis, exact = map_of(other, Observation(**{**vars(seen), 'update': update}), ('conv1', 'weight'))
  assert axis == 0 and exact
  np.testing.assert_allclose(found, map_of(client, seen, ('weight1',))[0], atol=1e-4)


def windows(side, channels, stride):
  """Returns which entries 3×3 filters see of a padded map [side, side, channels], as `closed_map.patches` does."""
  numbers = np.pad(np.arange(1, side * side * channels + 1).reshape(side, side, channels), ((1, 1), (1, 1), (0, 0)))
  places = range(0, side, stride)
  return np.stack([numbers[i : i + 3, j : j + 3].ravel() for i in places for j in places])


@pytest.mark.parametrize(
  ('stride', 'centred', 'dead'), [(1, False, 0), (1, True, 0), (2, True, 0), (1, False, 1), (1, True, 3)]
)
def test_patches_in_a_span_determine_the_map(stride, centred, dead):
  """What no filter tells is its scale; at a stride and behind a mean, a constant for each channel, too."""
  rng, seen = np.random.default_rng(3), windows(6, 8, stride)
  x = rng.normal(size=(6, 6, 8))
  level = None
  if stride == 2 and centred:
    level = np.arange(x.size).reshape(x.shape)[::2, ::2].reshape(-1, 8).T
    x[::2, ::2] -= x[::2, ::2].mean(axis=(0, 1), keepdims=True)
  incoming = rng.normal(size=(len(seen) - centred - dead, len(seen)))
  incoming -= centred * incoming.mean(axis=1, keepdims=True)
  gradient = incoming @ np.concatenate([[0.0], x.ravel()])[seen]
  found, eigenvalue = closed_map.direction_of(seen, gradient, x.size, centred, level)
  assert abs(found @ x.ravel()) / np.linalg.norm(x) > 1 - (1e-10 if dead else 1e-12)
  assert found.sum() >= 0 and eigenvalue < (1e-10 if dead else 1e-12)


@pytest.mark.parametrize('centred', [False, True])
@pytest.mark.parametrize('dead', [30, 36])
def test_few_channels_tell_little(centred, dead):
  rng, seen = np.random.default_rng(6), windows(6, 8, 1)
  gradient = rng.normal(size=(36 - dead, 72))
  found, eigenvalue = closed_map.direction_of(seen, np.concatenate([gradient, np.zeros((dead, 72))]), 288, centred)
  assert np.linalg.norm(found) == pytest.approx(1) and eigenvalue > (1e-5 if dead < 36 else 1e300)


@pytest.mark.parametrize('centred', [False, True])
def test_the_inverse_is_that_of_the_form(centred):
  rng, seen, size = np.random.default_rng(5), windows(4, 3, 1), 48
  directions, shift = np.linalg.qr(rng.normal(size=(27, 9)))[0].T, 0.02
  patches = np.concatenate([np.zeros((1, size)), np.eye(size)])[seen]
  patches -= centred * patches.mean(axis=0)
  whole, some = (
    np.einsum('pes,pet->st', patches, (np.eye(27) - span.T @ span) @ patches) + shift * np.eye(size)
    for span in (directions, directions[:7])
  )
  inverse, x = closed_map._inverse(seen, directions[:7], centred, size, shift), rng.normal(size=(size, 2))
  np.testing.assert_allclose(inverse(x), np.linalg.solve(some, x), rtol=1e-9, atol=1e-9)
  wider = closed_map._wider(inverse, seen, directions[7:], centred, size)
  np.testing.assert_allclose(wider(x[:, 0]), np.linalg.solve(whole, x[:, 0]), rtol=1e-9, atol=1e-9)


def test_a_map_is_zero_somewhere_where_constants_are_not_seen():
  x = np.random.default_rng(4).normal(size=(1, 4, 4, 3)) + 1
  found = closed_map.grounded(x, ((0, 1, 2),))
  np.testing.assert_array_equal(found[:, 1::2], np.maximum(x[:, 1::2], 0))
  np.testing.assert_array_equal(found[:, ::2, ::2], np.maximum(x[:, ::2, ::2], 0))
  part = x[:, ::2, 1::2]
  np.testing.assert_array_equal(found[:, ::2, 1::2], part - part.min(axis=(1, 2), keepdims=True))
  assert (x < 0).any() and (found >= 0).all()


def test_a_scale_is_read_from_the_channels_that_agree():
  y = np.array([1.0, -2.0, 0.5, 3.0, 0.0, -1.0])
  x = 0.25 * y + np.array([0, 0, 0, 0, 7.0, 5.0])
  assert peeling._ratio(x, y) == 0.25
  assert peeling._ratio(x, np.zeros(6)) == 0


@pytest.mark.long
def test_the_equations_hold_at_the_truth_and_not_beside_it(digits):
  client, seen = observed(digits, Small(2))
  net = stages.stages(client.model, seen.variables, (8, 8, 1))
  params, update = by_path(seen.variables['params']), by_path(seen.update)
  *maps, last = maps_of(net, params, digits[0][:1])
  at_features = (params[net.dense[0]] @ update[net.dense[1]]).reshape(1, -1)
  incoming = jax.vjp(lambda x: net.apply(net.head, {}, x), last)[1](jnp.asarray(at_features))[0]
  behind = inverse.Behind(last, incoming, update)

  def left(maps):
    return max(
      float(jnp.abs(one).max())
      for one in inverse._residuals(net, net.stages, maps, params, behind, inverse.Weights(1e-6))
    )

  assert left(maps) < 1e-4 and left(maps[:1]) < 1e-4  # the maps between are unknown, or follow from the image
  for place in range(3):
    moved = list(maps)
    moved[place] = maps[place] * (
      1 + 0.1 * (np.arange(maps[place].size, dtype=np.float32) % 2).reshape(maps[place].shape)
    )
    assert left(moved) > 1e-3


def maps_found(client, seen, digits, monkeypatch):
  """Returns (the `Peeled`, inputs of all stages), without the search for the image."""
  shape = seen.batch_shape
  monkeypatch.setattr(peeling, 'first_input', lambda run, place, behind: [np.zeros(shape)] * place)
  net_of = peeling._network(client.model, shape[1:], True)
  params = by_path(seen.variables['params'])
  found = peeling.peel(peeling._Run(net_of, params, by_path(seen.update), 6, 1.0, 10))
  return found, maps_of(net_of(), params, digits[0][:1])


def run_back(run, last):
  """Returns what comes back to the last map."""
  net = run.net_of()
  at_features = (run.params[net.dense[0]] @ run.observed[net.dense[1]]).reshape(1, -1)
  return jax.vjp(lambda x: net.apply(net.head, {}, x), last)[1](jnp.asarray(at_features))[0]


def near(found, truth):
  return np.linalg.norm(found - truth) < 1e-4 * np.linalg.norm(truth)


@pytest.mark.long
@pytest.mark.parametrize('pool', ['own', 'flax', pytest.param('overlapping', marks=pytest.mark.slow)])
def test_a_max_pool_is_a_part_of_the_stage_before_it(digits, pool):
  pools = {
    'own': functools.partial(layers.max_pool, size=2),
    'flax': functools.partial(nn.max_pool, window_shape=(2, 2), strides=(2, 2)),
    'overlapping': functools.partial(layers.overlapping_max_pool, size=3, stride=2, padding=1),
  }
  client, seen = observed(digits, Plain(pool=pools[pool]))
  net, params = stages.stages(client.model, seen.variables, (8, 8, 1)), by_path(seen.variables['params'])
  assert [stage.shape for stage in net.stages] == [(1, 8, 8, 1), (1, 4, 4, 24), (1, 4, 4, 24)]
  assert net.head.shape == (1, 2, 2, 24) and not any(stage.shortcut for stage in net.stages)
  assert [stage.shift for stage in net.stages] == [(f'norm{i}', 'bias') for i in range(3)]
  kernel, bias = (params[path] for path in net.dense)

  def logits(image, width=None):
    for stage in net.stages:
      image = jax.nn.relu(net.apply(stage, params, image, width=width))
    return net.apply(net.head, {}, image) @ kernel + bias.reshape(1, -1)

  def own(image):
    return client.model.apply(seen.variables, image, True, None)[0]

  def gradient(function):
    return jax.grad(lambda image: jnp.sum(jnp.sin(function(image))))(jnp.asarray(digits[0][:1]))

  np.testing.assert_allclose(logits(digits[0][:1]), own(digits[0][:1]), atol=1e-5)
  np.testing.assert_allclose(logits(digits[0][:1], 0.3), own(digits[0][:1]), atol=1e-5)
  exact, soft, hard = gradient(own), gradient(functools.partial(logits, width=0.3)), gradient(logits)
  np.testing.assert_allclose(hard, exact, atol=1e-5 * jnp.abs(exact).max())
  np.testing.assert_allclose(gradient(functools.partial(logits, width=1e-6)), exact, atol=1e-3 * jnp.abs(exact).max())
  assert jnp.linalg.norm(soft - exact) > 0.1 * jnp.linalg.norm(exact)


@pytest.mark.long
@pytest.mark.parametrize('norm', [True, False])
def test_maps_come_back_without_shortcuts(digits, norm, monkeypatch):
  """Behind BatchNorm the scale of a map is that of the shift before; without a norm, that of the map behind."""
  client, seen = observed(digits, Plain(norm, 24 if norm else 64))  # of a max pool's entries, each channel has one
  found, truth = maps_found(client, seen, digits, monkeypatch)
  assert found.eigenvalue < 1e-9 and found.label == digits[1][0] and found.image is not None
  assert near(found.maps[1], truth[1]) and near(found.maps[2], truth[2])


@pytest.mark.long
def test_a_map_comes_back_through_a_stride_that_hides_constants(digits, monkeypatch):
  client, seen = observed(digits, Small(stride=2))
  net_of = peeling._network(client.model, (8, 8, 1), True)
  hidden = ((0, 0, 2),)
  assert closed_map.blind(net_of, 1) == closed_map.Blind(mean=True, scale=True, classes=hidden, inner=hidden)
  found, truth = maps_found(client, seen, digits, monkeypatch)
  least = np.asarray(truth[1])[:, ::2, ::2].min(axis=(1, 2))  # zero, or else not seen
  assert near(found.maps[1][..., least[0] == 0], np.asarray(truth[1])[..., least[0] == 0])
  assert np.mean(least == 0) > 0.5


@pytest.mark.long
def test_a_shortcut_without_parameters_sees_more_than_the_convolution(digits, monkeypatch):
  """A shortcut that takes every other entry, in ResNet-20, has a stride, too: constants and the scale show there."""
  client, seen = observed(digits, Small(stride=2, project=False))
  net_of = peeling._network(client.model, (8, 8, 1), True)
  assert closed_map.blind(net_of, 1) == closed_map.Blind(mean=True, scale=False, classes=(), inner=((0, 0, 2),))
  found, truth = maps_found(client, seen, digits, monkeypatch)
  assert found.eigenvalue < 1e-9
  least = np.asarray(truth[1])[:, ::2, ::2].min(axis=(1, 2))  # zero, or else not told by the convolution
  shown = [np.asarray(x)[..., least[0] == 0] for x in (found.maps[1], truth[1])]
  assert correlation(*shown) > 0.999 and np.mean(least == 0) > 0.5


@pytest.mark.slow
def test_constants_that_a_shortcut_shows_are_not_left_to_the_closed_form(digits, monkeypatch):
  """The eigenvalue is exact where the convolution does not see them, and the map behind tells them."""
  client, seen = observed(digits, Small(2))
  net_of = peeling._network(client.model, (8, 8, 1), True)
  run = peeling._Run(net_of, by_path(seen.variables['params']), by_path(seen.update), 6, 1.0, 10)
  truth = maps_of(net_of(), run.params, digits[0][:1])
  behind = inverse.Behind(
    truth[2], run.back(2, truth[2], run_back(run, truth[-1])), run.observed, peeling.negligible(truth[2])
  )
  off = np.asarray(truth[1]) + 0.003 * np.abs(truth[1]).max() * (np.arange(16) < 4)
  monkeypatch.setattr(closed_map, 'found', lambda *given: (off, 1e-12))
  x, _, left = peeling.stage_input(run, 1, behind)
  assert near(x, truth[1]) and left < 1e-6


@pytest.mark.long
def test_a_shift_that_contradicts_what_comes_back_ends_the_search(digits, monkeypatch):
  client, seen = observed(digits, Plain())
  update = jax.tree_util.tree_map_with_path(
    lambda path, leaf: -leaf if trees.path_names(path) == ('norm1', 'bias') else leaf, seen.update
  )
  found, _ = maps_found(client, Observation(**{**vars(seen), 'update': update}), digits, monkeypatch)
  assert found.image is None and len(found.maps) == 1


@pytest.mark.long
@pytest.mark.parametrize('rate', [0.6, 0.95])
def test_features_that_soteria_leaves_out_are_not_taken_for_zero(digits, monkeypatch, rate):
  """Most of them are left out; the scale of the map follows from the others."""
  client, seen = observed(digits, Small(1))
  images, labels = (jnp.asarray(part[:1]) for part in digits)
  pruned = gl.defenses.soteria(client.model, rate=rate)
  update, _ = jax.jit(functools.partial(pruned.update, variables=seen.variables))(
    seen.update,
    pruned.init(seen.variables['params']),
    seen.variables['params'],
    batch=(images, jax.nn.one_hot(labels, 10)),
  )
  assert (np.asarray(update['dense']['kernel']) == 0).all(axis=1).sum() == int(rate * 16)
  found, truth = maps_found(client, Observation(**{**vars(seen), 'update': update}), digits, monkeypatch)
  assert near(found.maps[-1], truth[1])


@pytest.mark.long
def test_what_is_not_sent_is_no_gradient_of_zero(digits, monkeypatch):
  client, seen = observed(digits, Small(2), frozen=('block0',))
  searched = []
  monkeypatch.setattr(peeling, 'first_input', lambda *given: searched.append(given) or [np.zeros((1, 8, 8, 1))] * 2)
  attacked(client, seen)
  ((run, place, behind),) = searched  # the map before a block of which nothing is sent is found with the image
  net, params = run.net_of(), by_path(seen.variables['params'])
  truth = maps_of(net, params, digits[0][:1])
  assert place == 2 and near(behind.output, truth[2])
  assert peeling.equations(run, 1, truth[2]) < 1
  weights = inverse.Weights(1e-6)
  exact = inverse.Behind(truth[2], run.back(2, truth[2], run_back(run, truth[3])), run.observed)
  for maps in (truth[:1], truth[:2]):
    left = inverse._residuals(net, net.stages[:2], maps, params, exact, weights)
    assert max(float(jnp.abs(one).max()) for one in left) < 1e-4


class Single(nn.Module):
  """One stage: a convolution with as many channels as a 4×4 image has positions, the mean, one dense layer or two."""

  norm: bool = True
  hidden: bool = False

  @nn.compact
  def __call__(self, x, train: bool = False):
    x = nn.Conv(16, (7, 7), use_bias=not self.norm, name='conv')(x)
    x = nn.relu(nn.BatchNorm(use_running_average=not train, name='norm')(x) if self.norm else x)
    x = jnp.mean(x, axis=(1, 2))
    x = nn.relu(nn.Dense(10, name='hidden')(x)) if self.hidden else x
    return nn.Dense(10, name='dense')(x)


@pytest.mark.long
@pytest.mark.parametrize(('norm', 'hidden'), [(True, False), (False, True)])
def test_of_one_stage_the_closed_form_is_the_image(digits, norm, hidden):
  """A hidden layer with as many units as classes does not tell the label."""
  image = digits[0][3, ::2, ::2]
  client, seen = observed((image[np.newaxis], digits[1][3:]), Single(norm, hidden))
  found = attacked(client, seen)
  np.testing.assert_allclose(found.samples[0], image / image.max() if norm else image, atol=1e-3)  # up to the scale
  assert found.labels.tolist() == [-1 if hidden else digits[1][3]]
  noise = jax.tree.map(lambda x: np.random.default_rng(0).normal(size=x.shape).astype(np.float32), seen.update)
  assert not attacked(client, Observation(**{**vars(seen), 'update': noise})).samples.any()


@pytest.mark.slow
@pytest.mark.parametrize('frozen', ['block0', 'block0/conv2'])
def test_an_image_comes_back_where_a_part_is_not_sent(digits, frozen):
  client, seen = observed(digits, Small(2), frozen=(frozen,))
  assert correlation(attacked(client, seen, iterations=2).samples, digits[0][0]) > 0.9


@pytest.mark.long
def test_an_image_comes_back_through_two_blocks(digits):
  client, seen = observed(digits, Small(2))
  found = attacked(client, seen)
  assert found.samples.shape == (1, 8, 8, 1) and found.labels.tolist() == digits[1][:1].tolist()
  ranking = [correlation(found.samples, one) for one in digits[0][:1000]]
  assert np.argmax(ranking) == 0 and ranking[0] > 0.9


@pytest.mark.long
@pytest.mark.parametrize('blocks', [1, pytest.param(2, marks=pytest.mark.slow)])
def test_noise_of_the_same_norm_gives_nothing(digits, blocks):
  """Of two blocks the equations of the last but one contradict each other, and no image is searched."""
  client, seen = observed(digits, Small(blocks))
  keys = iter(jax.random.split(jax.random.key(2), 100))
  noise = jax.tree.map(lambda x: jax.random.normal(next(keys), x.shape), seen.update)
  noise = jax.tree.map(lambda x: x * trees.norm(seen.update) / trees.norm(noise), noise)
  found = attacked(client, Observation(**{**vars(seen), 'update': noise}), iterations=2)
  assert np.isfinite(found.samples).all() and found.samples.any() == (blocks == 1)
  assert blocks == 2 or abs(correlation(found.samples, digits[0][0])) < 0.5


def test_the_steps_of_a_search_are_none_of_a_form_on_the_host():
  """The flag --steps=1000 of the programs once made each solution of the peeling take up to a thousand steps."""
  client = Client(gl.models.create('mlp(widths=8)', 10), num_classes=10)
  methods = [factory() for factory in {**ATTACKS, **SERVERS}.values()]
  refused = set()

  def is_on_host(method):
    try:
      return method(client).on_host
    except gl.UsageError:  # it is of other samples
      refused.add(method.name)
      return False

  on_host = [method for method in methods if is_on_host(method)]
  assert {method.name for method in on_host} >= {'residual_peeling', 'spear', 'span'}
  assert refused <= {'tableak', 'linear', 'tag', 'lamp'}
  assert not [method for method in on_host if method.takes({'steps': 7})]


@pytest.mark.long
def test_an_upload_that_is_not_finite_gives_nothing(digits):
  client, seen = observed(digits, Small())
  found = attacked(client, Observation(**{**vars(seen), 'update': jax.tree.map(lambda x: x * np.nan, seen.update)}))
  assert not found.samples.any() and found.labels.tolist() == [-1]


@pytest.mark.long
@pytest.mark.parametrize(
  ('module', 'number', 'local', 'message'),
  [
    (Small(norm='group', width=14), 1, {}, 'needs 16, as no BatchNorm on the statistics of the batch'),
    (Small(), 1, {'batch_norm': 'eval'}, 'variables that are no parameters'),
    (Small(width=8), 1, {}, 'first convolution 8 channels'),
    (Small(norm='group', stride=2), 1, {}, 'has a stride, and no BatchNorm'),
    (Small(bottleneck=True), 1, {}, 'filters that hardly overlap'),
    (Ordered('HWIO', groups=2), 1, {}, 'starts with a convolution of groups'),
    (Small(), 2, {}, 'the batch has 2'),
    (Small(), 1, {'share': 'delta'}, "share='delta'"),
    (Small(), 1, {'frozen': ('dense',)}, 'nothing is sent of dense/kernel, dense/bias'),
    (Small(), 1, {'frozen': ('block0/conv1',)}, 'nothing is sent of block0/conv1/kernel'),
    (Small(stride=2), 1, {'frozen': ('norm',)}, 'nothing is sent of norm/bias'),  # which tells the scale
  ],
)
def test_what_it_does_not_read_is_refused(digits, module, number, local, message):
  client, seen = observed(digits, module, number, **local)
  with pytest.raises(UsageError, match=message):
    gl.attacks.residual_peeling()(client).init(jax.random.key(0), seen)


def test_fewer_weights_than_pixels_are_refused():
  with pytest.raises(UsageError, match='fewer than the 16,384 numbers'):
    peeling._network(gl.models.from_flax(Small()), (128, 128, 1), True)


@pytest.mark.parametrize('spec', ['mlp(widths=8)', 'lenet'])
def test_networks_without_such_stages_are_refused(digits, spec):
  model = gl.models.create(spec, 10)
  shapes = jax.eval_shape(lambda key: model.init(key, (8, 8, 1)), jax.random.key(0))
  variables = jax.tree.map(lambda x: np.ones(x.shape, np.float32), shapes)
  update = variables['params']
  seen = Observation(variables, update, jnp.zeros((1, 10)), Knowledge(labels='unused'), (1, 8, 8, 1), 10)
  with pytest.raises(UsageError, match='does not come apart into stages of maps'):
    gl.attacks.residual_peeling()(Client(model, num_classes=10)).init(jax.random.key(0), seen)


@pytest.mark.slow
def test_a_deep_network_comes_apart_block_by_block(digits, monkeypatch):
  """ResNet-20 of width 4: the maps before the last blocks are exact, one of them across a change of size."""
  model = gl.models.create('resnet20(width=4)', 10, init='default')
  client, image = Client(model, num_classes=10), np.kron(digits[0][:1], np.ones((1, 2, 2, 3), np.float32))
  variables = model.init(jax.random.key(0), (16, 16, 3))
  update = jax.jit(client.local_update)(None, variables, image, digits[1][:1]).update
  monkeypatch.setattr(peeling, 'first_input', lambda run, place, behind: [np.zeros((1, 16, 16, 3))] * place)
  params = by_path(variables['params'])
  net_of = peeling._network(model, (16, 16, 3), True)
  found = peeling.peel(peeling._Run(net_of, params, by_path(update), 6, 1.0, 10))
  truth = maps_of(net_of(), params, image)
  assert found.eigenvalue < 1e-8 and found.label == digits[1][0]
  for place in (9, 8, 7):
    assert np.linalg.norm(found.maps[place] - truth[place]) < 1e-4 * np.linalg.norm(truth[place])
