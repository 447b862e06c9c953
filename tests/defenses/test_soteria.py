"""Soteria against Jacobians taken one entry at a time and a ranking in NumPy."""

import functools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradleak import Client, defenses, models
from gradleak.core import errors, trees
from gradleak.defenses.soteria import defended_kernel, soteria

VARIANTS = ('paper', 'code', 'code_shifted')


@pytest.fixture(scope='module', params=['lenet', 'convnet(width=2)'])
def case(request, small_images):
  """(model, variables, samples, targets, gradient) of two upsampled digits."""
  side = 12 if request.param == 'lenet' else 18
  images = jnp.asarray(np.kron(small_images[0][:2], np.ones((1, 3, 3, 1), np.float32))[:, 3 : 3 + side, 3 : 3 + side])
  labels = jnp.asarray(small_images[1][:2])
  model = models.create(request.param, 10)
  variables = jax.jit(model.init, static_argnums=1)(jax.random.key(0), images.shape[1:])
  upload = jax.jit(Client(model, 10).local_update)(None, variables, images, labels)
  return model, variables, images, jax.nn.one_hot(labels, 10), upload.update


def jacobians(model, variables, images):
  """(r [N, F], ‖∂r_i/∂x‖₂ [N, F]) in float64, each image on its own."""
  one = jax.jit(lambda x: model.features(variables, x[None])[0])
  rows = jax.jit(jax.jacfwd(one))
  r = np.stack([np.asarray(one(x), np.float64) for x in images])
  flat = np.stack([np.asarray(rows(x), np.float64).reshape(r.shape[1], -1) for x in images])
  return r, np.sqrt((flat**2).sum(-1))


@pytest.fixture(scope='module')
def jacobian(case):
  return jacobians(*case[:3])


def pruned_features(r, norms, rate, variant, weights=None):
  """Indices of the features to prune, from the paper's formula and from the published code's."""
  weights = np.ones(len(r)) if weights is None else np.asarray(weights, np.float64)
  score = np.zeros(r.shape[1])
  for n in range(len(r)):
    if weights[n] == 0:
      continue
    for i in range(r.shape[1]):
      if variant == 'paper':
        top, bottom = abs(r[n, i]), norms[n, i]
      else:
        top, bottom = norms[n, i], r[n, i] + (0.1 if variant == 'code_shifted' else 0.0)
      score[i] += weights[n] * (top / bottom if bottom != 0 else 0.0 if top == 0 else np.inf)
  order = np.argsort(-score if variant == 'paper' else np.abs(score), kind='stable')
  return set(order[: int(Fraction(str(rate)) * len(order))].tolist())


@functools.partial(jax.jit, static_argnames=('model', 'variant'))  # the rate is traced
def apply(model, variables, images, labels, updates, weights=None, *, rate, variant='paper'):
  params, defense = variables['params'], soteria(model, rate=rate, variant=variant)
  given = {'batch': (images, labels), 'weights': weights, 'variables': variables}
  return defense.update(updates, defense.init(params), params, **given)[0]


def zero_rows(kernel):
  return set(np.flatnonzero(~np.any(np.asarray(kernel) != 0, axis=1)).tolist())


@pytest.mark.parametrize('variant', VARIANTS)
@pytest.mark.parametrize('rate', [pytest.param(0.1, marks=pytest.mark.slow), 0.5, 0.8, 1.0])
@pytest.mark.parametrize('number', [1, 2])
def test_it_prunes_the_features_of_the_formula(case, jacobian, variant, rate, number):
  model, variables, images, labels, updates = case
  images, labels = images[:number], labels[:number]
  updates = jax.tree.map(jnp.ones_like, updates)  # so that every zero is Soteria's
  out = apply(model, variables, images, labels, updates, rate=rate, variant=variant)
  r, norms = (x[:number] for x in jacobian)
  expected = pruned_features(r, norms, rate, variant)
  assert zero_rows(out['Dense_0']['kernel']) == expected
  assert len(expected) == int(Fraction(str(rate)) * r.shape[1]) > 0
  out['Dense_0']['kernel'] = updates['Dense_0']['kernel']
  jax.tree.map(np.testing.assert_array_equal, out, updates)  # the rest stays


@pytest.mark.slow
def test_padded_examples_do_not_count(case):
  model, variables, images, labels, updates = case
  updates = jax.tree.map(jnp.ones_like, updates)
  padded = jnp.concatenate([images, jnp.zeros_like(images)])
  for variant in VARIANTS:
    out = apply(
      model,
      variables,
      padded,
      jnp.concatenate([labels, 0 * labels]),
      updates,
      weights=jnp.asarray([1.0, 1.0, 0.0, 0.0]),
      rate=0.5,
      variant=variant,
    )
    alone = apply(model, variables, images, labels, updates, rate=0.5, variant=variant)
    np.testing.assert_array_equal(out['Dense_0']['kernel'], alone['Dense_0']['kernel'])


def dense(activation, first, out_first=False, layers=None):
  """A model of two dense layers in plain JAX: r = activation(W₁x), logits = r·W₂ or W₂·r."""

  def init(key, sample_shape):
    del key, sample_shape
    num_features = first.shape[0]
    return {'first': jnp.asarray(first), 'second': jnp.ones((10, num_features) if out_first else (num_features, 10))}

  def features(params, images):
    return activation(images.reshape(images.shape[0], -1) @ params['first'].T)

  def forward(params, images):
    return features(params, images) @ (params['second'].T if out_first else params['second'])

  return models.from_functions(init, forward, 'two layers', features=features, layers=layers)


def prune_dense(model, image, rate, variant='paper'):
  params = model.init(jax.random.key(0), (2, 1, 1))['params']
  images = jnp.asarray(image, jnp.float32).reshape(1, 2, 1, 1)
  defense = soteria(model, rate=rate, variant=variant)
  updates = jax.tree.map(jnp.ones_like, params)
  # Neither state nor variables: as in a user's own loop.
  return defense.update(updates, defense.init(params), params, batch=(images, jnp.eye(10)[:1]))[0]


@pytest.mark.parametrize('out_first', [False, True], ids=['[features, classes]', '[classes, features]'])
def test_by_hand(out_first):
  """r = W₁x: the score is |⟨w_i, x⟩| / ‖w_i‖, which is 0.6, 0.8, 1, 0.96 for x = (0.6, 0.8)."""
  first = np.asarray([[5, 0], [0, 0.1], [3, 4], [0.8, 0.6]], np.float32)
  model = dense(lambda x: x, first, out_first)
  for pruned in range(5):
    second = np.asarray(prune_dense(model, [0.6, 0.8], pruned / 4)['second'])
    rows = second.T if out_first else second
    assert zero_rows(rows) == set([2, 3, 1, 0][:pruned])


def test_dead_units_go_last_in_the_paper_and_first_in_the_code():
  """r = relu(W₁x) with the first two units dead; 0/0 in the code's score would switch the defense off."""
  first = np.asarray([[-1, 0], [0, -1], [3, 4], [0.8, 0.6], [1, 0], [0, 1]], np.float32)
  model = dense(jax.nn.relu, first)
  pruned = {
    variant: [zero_rows(prune_dense(model, [0.6, 0.8], n / 6, variant)['second']) for n in range(7)]
    for variant in VARIANTS
  }
  order = [2, 3, 5, 4]  # 1, 0.96, 0.8, 0.6
  assert pruned['paper'] == [set([*order, 0, 1][:n]) for n in range(7)]
  assert pruned['code'] == [set([0, 1, *order][:n]) for n in range(7)]
  # ‖w‖/(r + 0.1): 5/5.1, 1/1.06, 1/0.9, 1/0.7, after the dead units' 0
  assert pruned['code_shifted'] == [set([0, 1, 3, 2, 5, 4][:n]) for n in range(7)]


def test_a_unit_that_ignores_the_image_goes_first():
  model = dense(lambda x: x + jnp.asarray([[0.0, 0, 7]]), np.asarray([[1, 0], [0, 1], [0, 0]], np.float32))
  for variant in VARIANTS:
    assert zero_rows(prune_dense(model, [0.6, 0.8], 1 / 3, variant)['second']) == {2}


def test_the_number_of_features_is_exact_where_all_scores_tie():
  model = dense(jax.nn.relu, -np.ones((50, 2), np.float32))
  for variant in VARIANTS:
    for rate in (0.1, 0.53, 0.58):
      assert len(zero_rows(prune_dense(model, [1, 1], rate, variant)['second'])) == int(Fraction(str(rate)) * 50)


def test_more_features_than_are_differentiated_at_once():
  first = np.random.default_rng(0).normal(size=(101, 2)).astype(np.float32)
  expected = np.argsort(-np.abs(first @ [0.6, 0.8]) / np.linalg.norm(first, axis=1))[:40]
  assert zero_rows(prune_dense(dense(lambda x: x, first), [0.6, 0.8], 40 / 101)['second']) == set(expected.tolist())


def test_an_attacker_finds_the_kernel():
  tree = {'a': jnp.ones((5, 7)), 'b': {'w': jnp.ones((7, 10)), 'v': jnp.ones(10)}}
  model = dense(jax.nn.relu, np.ones((7, 5), np.float32))
  assert defended_kernel(model, tree, 7, 10) == ('b', 'w')
  assert defended_kernel(model, {'list': [tree['a'], tree['b']['w'].T]}, 7, 10) == ('list', '1')
  with pytest.raises(errors.UsageError, match='7 features by 11 classes, and found none'):
    defended_kernel(model, tree, 7, 11)
  twins = {**tree, 'c': jnp.ones((10, 7))}
  with pytest.raises(errors.UsageError, match=r'found b/w and c; give layers'):
    defended_kernel(model, twins, 7, 10, (8, 8, 1))


def test_of_several_that_fit_it_is_the_last_in_forward_order():
  """64 features and 128 classes: the last kernel is [64, 128], and the one before it [128, 64]."""
  model = models.create('mlp', 128)
  params = jax.jit(model.init, static_argnums=1)(jax.random.key(0), (8, 8, 1))['params']
  with pytest.raises(errors.UsageError, match='Dense_2/kernel and Dense_3/kernel'):
    defended_kernel(model, params, 64, 128)
  assert defended_kernel(model, params, 64, 128, (8, 8, 1)) == ('Dense_3', 'kernel')


def test_what_is_refused(small_images):
  silent = models.from_functions(lambda key, shape: {}, lambda params, images: images, 'silent')
  with pytest.raises(errors.UsageError, match="'silent' does not offer 'features'"):
    soteria(silent, rate=0.5)
  with pytest.raises(errors.UsageError, match='make it by soteria'):
    soteria(rate=0.5).update({}, (), {}, batch=(jnp.asarray(small_images[0]), jnp.eye(10)[:8]))


@pytest.fixture
def digits(small_images):
  """(model, variables, samples, targets): two digits under a network of 20 features that compiles fast."""
  model = dense(jnp.tanh, np.random.default_rng(1).normal(size=(20, 64)).astype(np.float32) / 8)
  variables = model.init(jax.random.key(0), (2, 1, 1))
  variables['params']['second'] = jnp.asarray(np.random.default_rng(2).normal(size=(20, 10)), jnp.float32)
  return model, variables, jnp.asarray(small_images[0][:2]), jnp.asarray(small_images[1][:2])


def test_a_client_sends_zero_rows_and_an_attacker_differentiates_through_them(digits):
  model, variables, images, labels = digits
  plain = Client(model, 10)
  client = defenses.bind(soteria(rate=0.6), defenses.Context(plain, variables, (8, 8, 1))).client(plain)
  sent = jax.jit(client.local_update)(None, variables, images, labels).update
  expected = pruned_features(*jacobians(model, variables, images), 0.6, 'paper')
  assert len(expected) == 12 and zero_rows(sent['second']) == expected

  def distance(dummy):
    return trees.squared_norm(trees.subtract(client.local_update(None, variables, dummy, labels).update, sent))

  slope = jax.jit(jax.grad(distance))(0.5 * images + 0.2)
  assert np.isfinite(slope).all() and np.abs(slope).max() > 0


def test_several_local_steps_prune_by_their_own_batch(digits):
  """Two steps of one sample each, by SGD: the delta is the sum of two gradients, each with its own rows zero."""
  model, variables, images, labels = digits
  step = soteria(model, rate=0.5)
  client = Client(model, 10, share='delta', batch_size=1, step=step)
  delta = jax.jit(client.local_update)(None, variables, images, labels).update
  one = jax.jit(Client(model, 10, step=step).local_update)
  params, rows = variables['params'], []
  for n in range(2):
    gradient = one(None, {'params': params}, images[n : n + 1], labels[n : n + 1]).update
    rows.append(zero_rows(gradient['second']))
    params = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)
  assert rows[0] != rows[1] and len(rows[0]) == len(rows[1]) == 10
  assert zero_rows(delta['second']) == rows[0] & rows[1]
  expected = trees.subtract(params, variables['params'])
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6), delta, expected)
