"""OUTPOST against its algorithm 1, written down in NumPy."""

import functools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.stats

import gradleak as gl
from gradleak import Client, defenses, models
from gradleak.core import trees
from gradleak.defenses.outpost import OutpostState, outpost

KEY = jax.random.key(5)
DEFAULTS = {'noise': 0.8, 'fisher': 0.4, 'prune': 0.8}


@pytest.fixture(scope='module', params=['lenet', 'convnet(width=2)'])
def gradient(request, small_images):
  """(gradient, parameters, layers) of two digits, as a user's model has them."""
  images = jnp.asarray(np.kron(small_images[0][:2], np.ones((1, 2, 2, 1), np.float32))[:, :12, :12])
  model = models.create(request.param, 10)
  variables = jax.jit(model.init, static_argnums=1)(jax.random.key(0), (12, 12, 1))
  upload = jax.jit(Client(model, 10).local_update)(None, variables, images, jnp.asarray(small_images[1][:2]))
  return upload.update, variables['params'], model.layers((12, 12, 1))


@functools.partial(jax.jit, static_argnums=(3, 4))
def run(updates, params, key, layers, variant, count, numbers):
  return outpost(layers, variant=variant, **numbers).update(updates, OutpostState(count), params, key=key)


def apply(updates, params, layers=None, count=0, key=KEY, variant='paper', **numbers):
  numbers = {'decay': 0.1, **DEFAULTS, **numbers}
  return run(updates, params, key, layers, variant, jnp.int32(count), numbers)


def share(fraction, size):
  """⌊fraction·size⌋ of the decimal number that was written."""
  return int(Fraction(str(fraction)) * size)


def reference(updates, params, layers, fisher, prune):
  """Algorithm 1, lines 7 to 9, in float64: for each layer its entries as (g, kept, noisy, risk), in one vector."""
  described = {}
  for layer in layers:
    g, w = (
      np.concatenate([np.asarray(trees.get(tree, path), np.float64).ravel() for path in layer.paths])
      for tree in (updates, params)
    )
    risk = min(np.mean((w - np.mean(w)) ** 2), 1.0)
    kept = np.abs(g) >= np.sort(np.abs(g))[share(prune, g.size)]
    noisy = np.zeros(g.size, bool)
    information = g**2  # before pruning
    noisy[np.argsort(-information, kind='stable')[: math.ceil(Fraction(str(fisher)) * g.size)]] = True
    described[layer.name] = (g, kept, noisy, risk)
  return described


def entries(tree, layer):
  return np.concatenate([np.asarray(trees.get(tree, path), np.float64).ravel() for path in layer.paths])


@pytest.mark.long
@pytest.mark.parametrize(
  'settings', [DEFAULTS, {'noise': 0.8, 'fisher': 0.2, 'prune': 0.5}], ids=['defaults', 'less noise than is kept']
)
def test_a_protected_step_is_the_algorithms(gradient, settings):
  updates, params, layers = gradient
  protected, _ = apply(updates, params, layers, **settings)
  described = reference(updates, params, layers, settings['fisher'], settings['prune'])
  drawn = []
  for layer in layers:
    g, kept, noisy, risk = described[layer.name]
    out = entries(protected, layer)
    expected = np.where(kept, g, 0)
    np.testing.assert_array_equal(out[~noisy], expected[~noisy])
    assert (out[noisy] != expected[noisy]).all()
    drawn.append((out - expected)[noisy] / (settings['noise'] * risk))
  drawn = np.concatenate(drawn)
  assert drawn.size > 300
  assert scipy.stats.kstest(drawn, 'norm').pvalue > 0.01
  for wrong in (2 / 3, 3 / 2):
    assert scipy.stats.kstest(drawn * wrong, 'norm').pvalue < 1e-4


@pytest.mark.long
def test_each_layer_has_noise_at_the_scale_of_its_own_risk(gradient):
  """A variance: neither a standard deviation, nor the whole model's, nor beyond 1."""
  updates, params, layers = gradient
  last = layers[-1].name
  params = {**params, last: {**params[last], 'kernel': 30 * params[last]['kernel']}}
  settings = {**DEFAULTS, 'noise': 0.5}
  many = [apply(updates, params, layers, key=jax.random.fold_in(KEY, i), **settings)[0] for i in range(40)]
  many = jax.tree.map(lambda *outputs: np.stack(outputs), *many)
  described = reference(updates, params, layers, DEFAULTS['fisher'], DEFAULTS['prune'])
  assert described[last][3] == 1
  for layer in layers:
    g, kept, noisy, risk = described[layer.name]
    out = np.concatenate(
      [np.asarray(trees.get(many, path), np.float64).reshape(40, -1) for path in layer.paths], axis=1
    )
    drawn = (out - np.where(kept, g, 0))[:, noisy]
    assert np.std(drawn) == pytest.approx(0.5 * risk, rel=5 / math.sqrt(2 * drawn.size))


@pytest.mark.long
def test_the_example_of_twenty_weights():
  """Ten weights in each of two tensors of one layer: thresholds are the layer's, not the tensors'."""
  params = {'layer': {'kernel': jnp.tile(jnp.asarray([[0.5, -0.5]]), (5, 1)), 'bias': jnp.full(10, 0.25)}}
  g = {'layer': {'kernel': jnp.arange(11.0, 21.0).reshape(5, 2), 'bias': -jnp.arange(1.0, 11.0)}}
  out, state = apply(g, params)
  assert int(state.count) == 1
  bias, kernel = np.asarray(out['layer']['bias']), np.asarray(out['layer']['kernel']).ravel()
  np.testing.assert_array_equal(bias, 0)
  np.testing.assert_array_equal(kernel[:2], 0)
  noise = kernel[2:] - [0, 0, 0, 0, 17, 18, 19, 20]
  risk = np.var(np.r_[np.tile([0.5, -0.5], 5), np.full(10, 0.25)])
  assert (np.abs(noise) > 0).all() and np.abs(noise).max() < 5 * 0.8 * risk
  apart, _ = apply(g, params, (trees.Layer('a', (('layer', 'kernel'),)), trees.Layer('b', (('layer', 'bias'),))))
  np.testing.assert_array_equal(apart['layer']['bias'], [0] * 8 + [-9, -10])  # kept, and without any risk
  np.testing.assert_array_equal(np.asarray(apart['layer']['kernel']).ravel()[:6], 0)
  assert np.count_nonzero(apart['layer']['kernel']) == 4


@functools.partial(jax.jit, static_argnames='variant')
def steps_changed(keys, step, decay, variant):
  updates = params = {'w': jnp.arange(1.0, 11.0)}

  def changed(key):
    defense = outpost(decay=decay, variant=variant)
    out, state = defense.update(updates, OutpostState(step - 1), params, key=key)
    return jnp.any(out['w'] != updates['w']), state.count

  return jax.vmap(changed)(keys)


def protected_at(step, decay, variant='paper', trials=4000):
  """In how many of the trials the `step`-th local step of a round is changed."""
  keys = jax.random.split(jax.random.key(step), trials)
  changed, count = steps_changed(keys, jnp.int32(step), jnp.float32(decay), variant)
  assert (np.asarray(count) == step).all()
  return int(np.sum(changed))


@pytest.mark.parametrize('step', [2, 3, 5])
def test_later_steps_are_protected_with_probability_that_decays(step):
  changed = protected_at(step, 0.5)
  assert scipy.stats.binomtest(changed, 4000, 1 / (1 + 0.5 * step)).pvalue > 0.001
  for wrong in (1 / (1 + 0.5 * (step - 1)), 1 / (1 + 0.5 * (step + 1)), 1 / (1 + 0.4 * step)):
    assert scipy.stats.binomtest(changed, 4000, wrong).pvalue < 1e-4


def test_the_first_step_is_always_protected():
  for decay in (0.1, 5.0, math.inf):
    assert protected_at(1, decay) == 4000
  assert protected_at(2, math.inf) == 0
  assert protected_at(7, 0.0) == 4000


def test_the_codes_first_step_is_not():
  changed = protected_at(1, 0.125, 'code')
  assert scipy.stats.binomtest(changed, 4000, 1 / 1.125).pvalue > 0.001
  assert 0 < changed < 4000


@pytest.mark.long
@pytest.mark.parametrize('gradient', ['lenet'], indirect=True)
def test_the_codes_rules(gradient):
  """Risk and pruning by tensor; one Fisher threshold over means along axis 0."""
  updates, params, layers = gradient
  out, _ = apply(updates, params, layers, decay=0.0, variant='code')
  leaves, weights, protected = ([np.asarray(x, np.float64) for x in jax.tree.leaves(t)] for t in (updates, params, out))
  means = [np.mean(g.astype(np.float32) ** 2, axis=0) for g in leaves]
  pooled = np.sort(np.concatenate([mean.ravel() for mean in means]))
  threshold = pooled[share(0.6, pooled.size)]
  drawn, noisy_tensors = [], 0
  for g, w, o, mean in zip(leaves, weights, protected, means, strict=True):
    if np.any(np.abs(mean - threshold) < 1e-5 * threshold):
      clear = ~np.broadcast_to(np.abs(mean - threshold) < 1e-5 * threshold, g.shape)  # rounding decides the rest
    else:
      clear = np.ones(g.shape, bool)
    kept = np.abs(g) >= np.sort(np.abs(g).ravel())[share(0.8, g.size)]
    noisy = np.broadcast_to(mean > threshold, g.shape)
    expected = np.where(kept, g, 0)
    np.testing.assert_array_equal(o[clear & ~noisy], expected[clear & ~noisy])
    risk = min(np.var(w), 1)
    if risk > 0:
      drawn.append(((o - expected)[clear & noisy] / (0.8 * risk)).ravel())
      noisy_tensors += np.any(noisy)
  drawn = np.concatenate(drawn)
  assert noisy_tensors > 1 and scipy.stats.kstest(drawn, 'norm').pvalue > 0.01
  for wrong in (2 / 3, 3 / 2):
    assert scipy.stats.kstest(drawn * wrong, 'norm').pvalue < 1e-3


def test_a_dead_layer_receives_its_share_of_noise_and_no_more():
  params = {'a': jax.random.normal(jax.random.key(1), (100,)), 'b': jax.random.normal(jax.random.key(2), (100,))}
  out, _ = apply({'a': jnp.zeros(100), 'b': jnp.arange(100.0)}, params)
  assert np.count_nonzero(out['a']) == np.count_nonzero(out['b']) == 40


@pytest.mark.long
@pytest.mark.parametrize('variant', ['paper', 'code'])
def test_layers_and_model_are_what_a_client_trains(variant):
  """Zeros of what is frozen were the smallest entries: none of the others was pruned, and all had noise."""
  params = {'a': jax.random.normal(jax.random.key(1), (900,)), 'b': jax.random.normal(jax.random.key(2), (100,))}
  updates = {'a': jnp.zeros(900), 'b': jnp.arange(1, 101.0)}
  params, updates = ({'a': tree['a'], 'b': tree['b'][None]} for tree in (params, updates))
  layers = (trees.Layer('both', (('b',), ('a',))),)
  made = outpost(layers, frozenset({('a',)}), noise=1e-3, fisher=0.4, prune=0.8, decay=0.0, variant=variant)
  out, _ = made.update(updates, OutpostState(jnp.int32(0)), params, key=KEY)
  assert np.count_nonzero(out['b']) == 40 and np.count_nonzero(out['a']) == 0
  assert np.count_nonzero(np.abs(out['b']) > 1) == 20


def test_a_client_says_what_it_does_not_train(network):
  model, variables = network
  frozen = model.layers((8, 8, 1))[0]
  client = Client(model, 10, frozen=(frozen.name,), private=(model.layers((8, 8, 1))[-1].name,))
  context = _context(client, variables)
  bound = defenses.bind(outpost(), context)
  assert bound.arguments == ((model.layers((8, 8, 1)), frozenset(frozen.paths)),)
  assert defenses.bind(
    bound.defense.stages[0].traits.simulated({'prune': 0.5, 'variant': 'code'}), context
  ).arguments == (bound.arguments)


@pytest.mark.long
def test_the_count_runs_within_a_round_and_starts_anew_in_the_next(linear, small_images):
  """With decay=inf the first step alone is protected, and with prune=1 and no noise it does nothing at all."""
  images, labels = jnp.asarray(small_images[0][:3]), jnp.asarray(small_images[1][:3])
  variables = linear.client.model.init(jax.random.key(0), (8, 8, 1))
  plain = Client(linear.client.model, 10, share='delta', optimizer=optax.sgd(0.5), batch_size=1)
  defense = gl.parse(f'outpost(noise=0,prune=1,decay={math.inf})')
  client = defenses.bind(defense, _context(plain, variables)).client(plain)
  protected, undefended = jax.jit(client.local_update), jax.jit(plain.local_update)
  for _ in range(2):
    delta = protected(KEY, variables, images, labels).update
    late = undefended(KEY, variables, images[1:], labels[1:]).update
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), delta, late)
    everything = undefended(KEY, variables, images, labels).update
    assert float(trees.norm(trees.subtract(delta, everything)) / trees.norm(everything)) > 0.1
    variables = {**variables, 'params': optax.apply_updates(variables['params'], delta)}


def _context(client, variables):
  return defenses.Context(client, variables, (8, 8, 1))


def test_by_name_it_knows_the_models_layers(network):
  model, variables = network
  bound = defenses.bind(outpost(), _context(Client(model, 10), variables))
  assert bound.arguments == ((model.layers((8, 8, 1)),),)
