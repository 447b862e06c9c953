"""Sparsification against sorts in NumPy."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradleak as gl
from gradleak import Client, defenses, models
from gradleak.core import trees
from gradleak.defenses.compression import largest, portion


def reference(x, rate):
  """Returns the mask of what stays when the ⌊rate·n⌋ smallest magnitudes go, ties at the threshold all staying."""
  magnitudes = np.abs(np.asarray(x, np.float64)).ravel()
  dropped = int(Fraction(str(rate)) * magnitudes.size)
  if dropped == magnitudes.size:
    return np.zeros(np.shape(x), bool)
  return (magnitudes >= np.sort(magnitudes)[dropped]).reshape(np.shape(x))


def prune(updates, rate):
  transformation = defenses.prune(rate=rate)
  return transformation.update(updates, transformation.init(updates))[0]


@pytest.mark.parametrize('size', [1, 7, 25, 100, 3600, 10_000])
@pytest.mark.parametrize('rate', [0, 0.1, 0.29, 0.39, 0.5, 0.53, 0.6, 0.7, 0.9, 0.99, 0.999, 1])
def test_prune_keeps_the_largest(size, rate):
  x = np.random.default_rng(size).normal(size=size).astype(np.float32)
  pruned = np.asarray(prune({'w': jnp.asarray(x)}, rate)['w'])
  assert np.count_nonzero(pruned == 0) == int(Fraction(str(rate)) * size)
  np.testing.assert_array_equal(pruned, np.where(reference(x, rate), x, 0))


@pytest.mark.parametrize('rate', [0, 0.2, 0.4, 0.5, 0.6, 0.8, 1])
@pytest.mark.parametrize(
  'values',
  [
    [3, -3, 3, -3, 3],
    [1, -2, 2, 2, -5],
    [0, 0, 0, 1, -1],
    [0.0, -0.0, 1e-40, -1e-42, 1e-38],
    [-0.0, -0.0, -0.0, -0.0, -0.0],
    [1e30, -1e-30, 3e38, 1e-45, -7],
  ],
  ids=['ties', 'tie at the threshold', 'zeros', 'denormals', 'negative zeros', 'extremes'],
)
def test_ties_zeros_and_denormals(values, rate):
  x = np.asarray(values, np.float32)
  mask = np.asarray(largest(jnp.asarray(x), rate))
  np.testing.assert_array_equal(mask, reference(x, rate))
  pruned = np.asarray(prune({'w': jnp.asarray(x)}, rate)['w'])
  np.testing.assert_array_equal(pruned.view(np.int32), np.where(mask, x, np.float32(0)).view(np.int32))


def test_neighbouring_floats_are_told_apart():
  x = np.arange(1_000_000_000, 1_000_000_010, dtype=np.int32).view(np.float32)[::-1].copy()
  for dropped in range(10):
    np.testing.assert_array_equal(largest(jnp.asarray(x), dropped / 10), np.arange(10) < 10 - dropped)


def test_traced_rates_equal_concrete_ones_in_one_trace():
  rng = np.random.default_rng(0)
  updates = {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in (('a', (20, 5)), ('b', 25))}
  traces = []

  @jax.jit
  def traced(rate):
    traces.append(rate)
    return prune(updates, rate)

  rates = [0.0, 0.1, 0.29, 0.3, 0.6, 0.7, 0.9, 0.99, 1.0]
  together = jax.vmap(traced)(jnp.asarray(rates, jnp.float32))
  for i, rate in enumerate(rates):
    expected = prune(updates, rate)
    jax.tree.map(np.testing.assert_array_equal, traced(rate), expected)
    jax.tree.map(lambda x, y, i=i: np.testing.assert_array_equal(x[i], y), together, expected)
  assert len(traces) == 2  # with lanes and without


# --- exact portions, and what is dropped


def exactly(ratio, size):
  """Returns ⌈ratio·size⌉ in rational arithmetic."""
  return math.ceil(Fraction(str(ratio)) * size)


@pytest.mark.long
def test_portions_are_those_of_rational_arithmetic():
  ratios = [round(0.01 * i, 2) for i in range(101)]
  count = jax.jit(lambda ratios, sizes: jnp.stack([jax.vmap(portion, (0, None))(ratios, size) for size in sizes]),
                  static_argnums=1)  # fmt: skip
  array = jnp.asarray(ratios, jnp.float32)
  naive = 0
  for size, found in enumerate(count(array, (*range(1, 65),)), 1):
    counts = [exactly(ratio, size) for ratio in ratios]
    np.testing.assert_array_equal(found, counts, err_msg=str(size))
    naive += np.sum(np.ceil(np.float32(ratios) * np.float32(size)) != counts)
  assert naive > 0  # what the nudge is for
  sizes = (100, 1000, 3600, 23_040, 99_999, 1_000_000, 2_359_296, 102_760_448)
  for size, found in zip(sizes, count(jnp.asarray([0.001, 0.01, 1], jnp.float32), sizes), strict=True):
    np.testing.assert_array_equal(found, [exactly(ratio, size) for ratio in (0.001, 0.01, 1)], err_msg=str(size))
  np.testing.assert_array_equal(count(jnp.asarray([0, 1e-9, 1e-6], jnp.float32), (7,)), [[0, 1, 1]])


@pytest.fixture(scope='module', params=['lenet', 'convnet(width=2)'])
def gradients(request, small_images):
  """Gradients of one network on four pairs of digits, and the client and its first pair."""
  images, labels = small_images
  if request.param != 'lenet':  # its pooling needs 9×9 pixels
    images = np.kron(images, np.ones((1, 2, 2, 1), np.float32))
  client = Client(models.create(request.param, 10), 10)
  variables = jax.jit(client.model.init, static_argnums=1)(jax.random.key(0), images.shape[1:])
  compute = jax.jit(client.local_update)
  pairs = [compute(None, variables, images[i : i + 2], labels[i : i + 2]).update for i in (0, 2, 4, 6)]
  return pairs, client, (variables, images[:2], labels[:2])


def best(x, ratio):
  """Returns the mask of the ⌈ratio·n⌉ entries of the largest magnitude, by a stable sort."""
  order = np.argsort(-np.abs(x).ravel(), kind='stable')
  mask = np.zeros(x.size, bool)
  mask[order[: exactly(ratio, x.size)]] = True
  return mask.reshape(x.shape)


@jax.jit
def topk(ratio, updates):
  defense = defenses.topk(ratio=ratio)
  return defense.update(updates, defense.init(updates))


@pytest.mark.parametrize('ratio', [0, 0.001, 0.05, 0.1, 0.2, 0.5, 1])
def test_topk_sends_the_largest_and_says_which(gradients, ratio):
  for updates in gradients[0][:2]:
    sent, state = topk(jnp.float32(ratio), updates)
    for u, s, mask in zip(*map(jax.tree.leaves, (updates, sent, state.mask)), strict=True):
      assert mask.shape == u.shape and mask.dtype == bool and mask.sum() == exactly(ratio, u.size)
      np.testing.assert_array_equal(mask, best(np.asarray(u), ratio))
      np.testing.assert_array_equal(s, np.where(mask, u, np.float32(0)))


def test_topk_counts_ties_and_zeros_once():
  updates = {'ties': jnp.asarray([3.0, -3, 3, -3, 1]), 'dead': jnp.zeros((2, 3)), 'sparse': jnp.asarray([0.0, 0, 0, 7])}
  defense = defenses.topk(ratio=0.5)
  state = defense.update(updates, defense.init(updates))[1]
  np.testing.assert_array_equal(state.mask['ties'], [True, True, True, False, False])
  np.testing.assert_array_equal(state.mask['dead'], [[True, True, True], [False, False, False]])
  np.testing.assert_array_equal(state.mask['sparse'], [True, False, False, True])


@pytest.mark.long
def test_topk_is_prune_but_for_what_it_says(gradients):
  updates = gradients[0][0]
  defense = defenses.topk(ratio=0.2)
  jax.tree.map(np.testing.assert_array_equal, defense.update(updates, defense.init(updates))[0], prune(updates, 0.8))


class ReferenceDGC:
  """Algorithm 4 of Lin et al. in float64, without warm-up."""

  def __init__(self, like, ratio, momentum, clip):
    self.ratio, self.momentum, self.clip = ratio, momentum, clip
    self.u, self.v = ([np.zeros(x.shape) for x in jax.tree.leaves(like)] for _ in 'uv')

  def __call__(self, gradient):
    gradient = [np.asarray(g, np.float64) for g in jax.tree.leaves(gradient)]
    norm = np.sqrt(sum((g * g).sum() for g in gradient))
    if norm > self.clip:
      gradient = [g * self.clip / norm for g in gradient]
    sent = []
    for i, g in enumerate(gradient):
      self.u[i] = self.momentum * self.u[i] + g
      self.v[i] = self.v[i] + self.u[i]
      mask = best(self.v[i], self.ratio)
      sent.append(np.where(mask, self.v[i], 0))
      self.u[i][mask] = self.v[i][mask] = 0
    return sent


@jax.jit
def dgc(settings, gradient, state):
  return defenses.dgc(**settings).update(gradient, state)


@pytest.mark.long
@pytest.mark.parametrize(
  'settings',
  [
    {'ratio': 0.1, 'momentum': 0.9, 'clip': math.inf},
    {'ratio': 0.05, 'momentum': 0.0, 'clip': math.inf},
    {'ratio': 0.2, 'momentum': 0.5, 'clip': 0.3},
  ],
)
def test_dgc_over_several_participations(gradients, settings):
  rounds = [*gradients[0], *gradients[0][::-1]]
  assert all(trees.norm(gradient) > 0.3 for gradient in rounds)
  defense, expected = defenses.dgc(**settings), ReferenceDGC(rounds[0], **settings)
  state = defense.init(rounds[0])
  for gradient in rounds:
    sent, state = dgc(settings, gradient, state)
    close = [
      (jax.tree.leaves(sent), expected(gradient)),
      (jax.tree.leaves(state.velocity), expected.u),
      (jax.tree.leaves(state.residual), expected.v),
    ]
    for actual, reference_ in close:
      for x, y in zip(actual, reference_, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6 * max(1e-6, np.abs(y).max()))
    for mask, s in zip(jax.tree.leaves(state.mask), jax.tree.leaves(sent), strict=True):
      assert mask.shape == s.shape and mask.sum() == exactly(settings['ratio'], mask.size)
      assert not np.any(np.asarray(s)[~np.asarray(mask)])


@pytest.mark.long
@pytest.mark.parametrize('text', ['topk(ratio=0.1)', 'dgc(ratio=0.1)'])
def test_noise_does_not_fill_what_is_dropped(gradients, text):
  (updates, *_), client, given = gradients
  context = defenses.Context(client, given[0], given[1].shape[1:])
  defended = defenses.bind(gl.parse(f'{text}+gaussian(stddev=1)'), context).client(client)
  upload = jax.jit(defended.local_update)(jax.random.key(0), *given)
  for mask, sent, u in zip(*map(jax.tree.leaves, (upload.mask, upload.update, updates)), strict=True):
    assert mask.shape == u.shape and mask.sum() == exactly(0.1, u.size)
    np.testing.assert_array_equal(np.asarray(sent) != 0, mask)


def test_dropping_everything_leaves_nothing_not_even_infinities():
  x = jnp.asarray([0.0, 1.0, -2.0, jnp.inf])
  assert not largest(x, 1.0).any() and largest(x, 0.0).all()
  assert largest(x, 0.75).tolist() == [False, False, False, True]
