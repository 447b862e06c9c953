"""FFL against algorithm 1 of its paper in NumPy, and what a client and a server make of dropped layers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.stats

import gradleak as gl
from gradleak import Client, defenses, models
from gradleak.core import errors, trees
from tests.models.recovery import optimised

KEY = jax.random.key(5)
ROUNDS = 3


@pytest.fixture(scope='module', params=[pytest.param('lenet', marks=pytest.mark.slow), 'convnet(width=2)'])
def network(request, small_images):
  """A client, the variables of the models that it is sent in turn, its gradients and its images."""
  images, labels = small_images
  if request.param != 'lenet':  # its pooling needs 9×9 pixels
    images = np.kron(images, np.ones((1, 2, 2, 1), np.float32))
  model = models.create(request.param, 10)
  client = Client(model, 10, batch_norm='eval')
  variables = jax.jit(model.init, static_argnums=1)(jax.random.key(0), images.shape[1:])
  gradient = jax.jit(client.local_update)
  rounds, gradients = [variables], []
  with optimised():
    for i in range(ROUNDS):  # others' data move the model
      gradients.append(gradient(None, rounds[-1], images[:2], labels[:2]).update)
      others = gradient(None, rounds[-1], images[2 * i + 2 : 2 * i + 4], labels[2 * i + 2 : 2 * i + 4]).update
      params = jax.tree.map(lambda p, g: p - 0.01 * g, rounds[-1]['params'], others)
      rounds.append({**variables, 'params': params})
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((rounds, gradients)))
  return client, rounds, gradients, images[:2], labels[:2]


def grouped(layers):
  return [list(layer.paths) for layer in layers]


def leaves(tree, paths):
  return np.concatenate([np.ravel(np.asarray(trees.get(tree, path), np.float64)) for path in paths])


def flat_paths(tree):
  return [tuple(key.key for key in path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]


def algorithm_1(groups, gradient, global_gradient, count):
  """Returns the paths that are sent and the similarity of each group: lines 4 to 12 of the paper."""
  s = []
  for layer, paths in enumerate(groups):
    a, b = leaves(gradient, paths), leaves(global_gradient, paths)
    lengths = np.sqrt((a * a).sum()) * np.sqrt((b * b).sum())
    s.append((layer, (a * b).sum() / lengths if lengths > 0 else 0.0))
  best = sorted(s, key=lambda entry: -entry[1])[:count]
  return {path for layer, _ in best for path in groups[layer]}, [similarity for _, similarity in s]


def assert_sends(updates, state, gradient, paths):
  for path in flat_paths(gradient):
    mask, defended = trees.get(state.mask, path), np.asarray(trees.get(updates, path))
    assert mask.shape == () and mask.dtype == bool and bool(mask) == (path in paths), path
    np.testing.assert_array_equal(defended, np.asarray(trees.get(gradient, path)) * bool(mask))


@pytest.mark.parametrize('unit', ['layer', 'tensor'])
@pytest.mark.parametrize('share', ['gradient', 'delta'])
def test_algorithm_1_over_several_rounds(network, share, unit):
  client, rounds, gradients, images, _ = network
  layers = client.model.layers(images.shape[1:])
  sign = 1.0 if share == 'gradient' else -1.0
  groups = [[path] for path in flat_paths(gradients[0])] if unit == 'tensor' else grouped(layers)
  first = rounds[0]['params']

  def make(ratio):
    return defenses.fragmentation(layers, share, first, ratio=ratio, unit=unit)

  # Similarities stand in the order of the tree, the reference's layers in forward order.
  numbers, size = trees.layer_numbers(gradients[0], layers)
  order = range(len(groups)) if unit == 'tensor' else [trees.get(numbers, paths[0]) for paths in groups]
  assert sorted(order) == list(range(len(groups))) and (unit == 'tensor' or size == len(layers))
  update = jax.jit(lambda ratio, *given: make(ratio).update(*given))
  for tenths in (2, 5, 8):
    previous, state = first, make(tenths / 10).init(first)
    assert state.similarity.shape == (len(groups),) and state.similarity.dtype == np.float32
    for i in range(1, ROUNDS):
      params, gradient = rounds[i]['params'], jax.tree.map(lambda g: sign * g, gradients[i])
      change = jax.tree.map(lambda x, y: sign * (np.float64(x) - np.float64(y)), previous, params)
      expected, similarity = algorithm_1(groups, gradient, change, -(-len(groups) * tenths // 10))
      updates, state = update(tenths / 10, gradient, state, params)
      assert_sends(updates, state, gradient, expected)
      np.testing.assert_allclose(state.similarity[np.array(order)], similarity, atol=1e-4)
      assert bool(state.participated)
      jax.tree.map(np.testing.assert_array_equal, state.previous, params)
      previous = params


def test_the_two_shares_agree_and_the_misprint_does_not(network):
  client, rounds, gradients, images, _ = network
  layers = client.model.layers(images.shape[1:])
  previous, params = rounds[0]['params'], rounds[1]['params']

  def sent(updates, share):
    defense = defenses.fragmentation(layers, share, previous, ratio=0.4)
    return jax.jit(defense.update)(updates, defense.init(params), params)[1]

  delta = jax.tree.map(lambda g: -0.1 * g, gradients[1])
  as_gradient, as_delta, misread = sent(gradients[1], 'gradient'), sent(delta, 'delta'), sent(gradients[1], 'delta')
  jax.tree.map(np.testing.assert_array_equal, as_gradient.mask, as_delta.mask)
  np.testing.assert_allclose(as_gradient.similarity, -misread.similarity, atol=1e-6)
  assert jax.tree.leaves(as_gradient.mask) != jax.tree.leaves(misread.mask)


def test_a_client_that_equals_the_global_gradient_scores_one(network):
  _, rounds, gradients, _, _ = network
  previous, gradient = rounds[0]['params'], gradients[0]
  params = jax.tree.map(lambda p, g: p - g, previous, gradient)  # one step of everybody, as eq. 1 has it
  for share, sign in (('gradient', 1.0), ('delta', -0.1)):
    defense = defenses.fragmentation(None, share, previous, ratio=0.5, unit='tensor')
    mine = jax.tree.map(lambda g: sign * g, gradient)  # noqa: B023
    update = jax.jit(defense.update)
    _, state = update(mine, defense.init(previous), params)
    # Gradients far below the parameters they are subtracted from leave the rounding of the difference alone.
    seen = np.array([float(jnp.max(jnp.abs(g))) > 1e-4 for g in jax.tree.leaves(gradient)])
    assert seen.sum() > 5
    np.testing.assert_allclose(state.similarity[seen], 1, atol=1e-3)
    _, state = update(jax.tree.map(jnp.negative, mine), defense.init(previous), params)
    np.testing.assert_allclose(state.similarity[seen], -1, atol=1e-3)


def small(**layers):
  return {name: jnp.asarray(values, jnp.float32) for name, values in layers.items()}


def test_zero_norms_rank_between_likeness_and_unlikeness():
  previous = small(against=[1, 1], dead=[1, 1], still=[0, 0], along=[1, 2])
  params = small(against=[0, 0], dead=[0, 0], still=[0, 0], along=[0, 0])
  gradient = small(against=[-1, -1], dead=[0, 0], still=[5, 5], along=[1, 2])
  for ratio, sent in ((0.25, ['along']), (0.75, ['along', 'dead', 'still']), (0, []), (1, list(gradient))):
    defense = defenses.fragmentation(None, 'gradient', previous, ratio=ratio)
    updates, state = defense.update(gradient, defense.init(params), params)
    np.testing.assert_allclose(state.similarity, [-1, 1, 0, 0], atol=1e-6)  # against, along, dead, still
    assert [name for name in sorted(gradient) if state.mask[name]] == sorted(sent)
    assert_sends(updates, state, gradient, {(name,) for name in sent})


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16, jnp.float16])
def test_the_cosine_does_not_depend_on_scale_or_precision(dtype):
  rng = np.random.default_rng(0)
  a, b = ({name: rng.normal(size=shape) for name, shape in (('u', (40, 3)), ('v', 17))} for _ in 'ab')
  params = {name: np.zeros_like(x) for name, x in a.items()}
  _, expected = algorithm_1([[('u',)], [('v',)]], a, b, 1)
  for scale in (1e-4, 1, 1e4) if dtype == jnp.float16 else (1e-30, 1, 1e30):
    cast = [jax.tree.map(lambda x: jnp.asarray(scale * x, dtype), tree) for tree in (a, b, params)]  # noqa: B023
    defense = defenses.fragmentation(None, 'gradient', cast[1], ratio=0.5)
    _, state = defense.update(cast[0], defense.init(cast[2]), cast[2])
    np.testing.assert_allclose(state.similarity, expected, atol=1e-5 if dtype == jnp.float32 else 2e-2)


# --- the first participation, and random layers


def tensors(count):
  return {f'layer {i:02}': jnp.full((2,), 1.0 + i) for i in range(count)}


def draws(defense, updates, number):
  """Returns which of the tensors each of `number` clients sent, bool [number, tensors]."""

  def sent(key):
    defended, state = defense.update(updates, defense.init(updates), updates, key=key)
    arrived = jnp.stack([jnp.all(x != 0) for x in jax.tree.leaves(defended)])
    return arrived, jnp.stack(jax.tree.leaves(state.mask))

  arrived, masks = jax.jit(jax.vmap(sent))(jax.random.split(KEY, number))
  np.testing.assert_array_equal(arrived, masks)
  return np.asarray(masks)


RANDOM = {
  'first participation': lambda ratio: defenses.fragmentation(ratio=ratio),
  'random': lambda ratio: defenses.fragmentation_random(ratio=ratio),
}


@pytest.mark.long
@pytest.mark.parametrize('make', RANDOM.values(), ids=RANDOM)
def test_random_layers_are_drawn_evenly(make):
  number, layers, kept = 4000, 6, 3
  masks = draws(make(0.45), tensors(layers), number)
  np.testing.assert_array_equal(masks.sum(1), kept)  # ⌈0.45·6⌉

  def test(successes, share):
    return scipy.stats.binomtest(int(successes), number, share).pvalue

  for layer in range(layers):
    assert test(masks[:, layer].sum(), kept / layers) > 1e-3
    for wrong in (kept - 1, kept + 1):
      assert test(masks[:, layer].sum(), wrong / layers) < 1e-6
  together = kept * (kept - 1) / (layers * (layers - 1))
  for i, j in zip(*np.triu_indices(layers, 1), strict=True):  # no two layers prefer each other
    both = (masks[:, i] & masks[:, j]).sum()
    assert test(both, together) > 1e-3 and test(both, 2 / 3 * together) < 1e-6 and test(both, 3 / 2 * together) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize('make', RANDOM.values(), ids=RANDOM)
@pytest.mark.parametrize(
  ('ratio', 'layers', 'kept'), [(0.6, 25, 15), (0.1, 10, 1), (0.01, 10, 1), (0, 4, 0), (1, 4, 4)]
)
def test_exactly_so_many_random_layers(make, ratio, layers, kept):
  np.testing.assert_array_equal(draws(make(ratio), tensors(layers), 5).sum(1), kept)


@pytest.mark.long
def test_the_two_draw_apart():
  masks = [draws(make(0.5), tensors(10), 50) for make in RANDOM.values()]
  assert 0.4 < (masks[0] == masks[1]).mean() < 0.6


def test_only_the_first_participation_is_random(network):
  client, rounds, gradients, images, _ = network
  layers = client.model.layers(images.shape[1:])
  defense = defenses.fragmentation(layers, ratio=0.5)

  @jax.jit
  def two(key):
    state = defense.init(rounds[0]['params'])
    _, first = defense.update(gradients[0], state, rounds[0]['params'], key=jax.random.fold_in(key, 0))
    return first, defense.update(gradients[1], first, rounds[1]['params'], key=jax.random.fold_in(key, 1))[1]

  firsts, seconds = jax.vmap(two)(jax.random.split(KEY, 20))
  assert not bool(defense.init(rounds[0]['params']).participated) and firsts.participated.all()
  np.testing.assert_array_equal(firsts.similarity, 0)
  assert len(np.unique(np.stack(jax.tree.leaves(firsts.mask), 1), axis=0)) > 1
  assert len(np.unique(np.stack(jax.tree.leaves(seconds.mask), 1), axis=0)) == 1
  with_previous = defenses.fragmentation(layers, 'gradient', rounds[0]['params'], ratio=0.5)
  _, expected = with_previous.update(gradients[1], with_previous.init(rounds[0]['params']), rounds[1]['params'])
  jax.tree.map(np.testing.assert_array_equal, trees.take(seconds.mask, 0), expected.mask)
  np.testing.assert_allclose(seconds.similarity[0], expected.similarity, atol=1e-5)


def test_what_is_missing_is_named():
  updates = tensors(3)
  for defense in (defenses.fragmentation(ratio=0.5), defenses.fragmentation(None, 'delta', updates, ratio=0.5)):
    with pytest.raises(errors.UsageError, match=r'fragmentation .* needs params'):
      defense.update(updates, defense.init(updates), key=KEY)
  for make in RANDOM.values():
    defense = make(0.5)
    with pytest.raises(errors.UsageError, match=r'fragmentation.* needs a key'):
      defense.update(updates, defense.init(updates), updates)


def test_another_share_is_refused():
  with pytest.raises(errors.UsageError, match="'gradients'; did you mean 'gradient'"):
    defenses.fragmentation(None, 'gradients', ratio=0.5)


# --- in a client, and at the server


def test_noise_does_not_fill_dropped_layers(network):
  client, rounds, gradients, images, labels = network
  layers, previous = client.model.layers(images.shape[1:]), rounds[0]['params']
  chain = optax.chain(defenses.fragmentation(layers, 'gradient', previous, ratio=0.5), defenses.gaussian(stddev=1.0))
  with optimised():
    upload = jax.jit(dataclasses.replace(client, upload=chain).local_update)(KEY, rounds[1], images, labels)
  change = jax.tree.map(lambda x, y: np.float64(x) - np.float64(y), previous, rounds[1]['params'])
  expected, _ = algorithm_1(grouped(layers), gradients[1], change, -(-len(layers) // 2))
  assert 0 < len(expected) < len(flat_paths(upload.mask))
  for path in flat_paths(upload.mask):
    mask, sent = trees.get(upload.mask, path), np.asarray(trees.get(upload.update, path))
    assert mask.shape == () and bool(mask) == (path in expected)
    assert np.all(sent != 0) if mask else np.all(sent == 0)


@pytest.mark.parametrize('share', ['gradient', 'delta'])
def test_by_name_it_is_made_for_the_client(network, share):
  client, rounds, gradients, images, _ = network
  client = dataclasses.replace(client, share=share)
  for text, previous in (
    ('fragmentation_random(ratio=0.4)', rounds[0]),
    ('fragmentation(ratio=0.4)', None),
    ('fragmentation(ratio=0.4)', rounds[0]),
  ):
    context = defenses.Context(client, rounds[1], images.shape[1:], previous=previous)
    bound = defenses.bind(gl.parse(text), context)
    layers = client.model.layers(images.shape[1:])
    given = (layers, share, None if previous is None else previous['params'])
    assert bound.arguments == ((given[:1] if 'random' in text else given),)
  params, upload = rounds[1]['params'], bound.client(client).upload
  _, state = jax.jit(upload.update)(gradients[1], upload.init(params), params, key=KEY)
  change = jax.tree.map(lambda x, y: np.float64(x) - np.float64(y), rounds[0]['params'], params)
  if share == 'delta':
    change = jax.tree.map(np.negative, change)
  expected, _ = algorithm_1(grouped(layers), gradients[1], change, -(-len(layers) * 4 // 10))
  assert {path for path in flat_paths(state.mask) if trees.get(state.mask, path)} == expected
