"""Gradient matching of images that a generator makes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gradleak import Client, UsageError, attacks, priors
from gradleak.attacks import matching
from gradleak.attacks.matching import evolution
from tests.attackers import noise_like, psnr, run

KEY = jax.random.key(5)

# Its weights are logits of pixels, N(0, 1), plus a constant for each image that stays.
LOGITS = priors.Generator(
  lambda key, shape, learned: (jax.random.normal(key, shape), 0.1 * jnp.arange(float(shape[0]))),
  lambda weights, constants, shape, learned: jax.nn.sigmoid(weights + constants.reshape(-1, *[1] * (len(shape) - 1))),
)

LATENTS = priors.Generator(
  lambda key, shape, learned: ({'latents': jax.random.normal(key, (shape[0], 4))}, None),
  lambda weights, kept, shape, learned: jax.nn.sigmoid(jnp.tile(weights['latents'], (1, 16)).reshape(shape)),
)


@pytest.mark.slow
def test_a_digit_is_recovered_and_noise_shows_none(client, observe, small_images):
  images, labels = small_images
  seen = observe(images[:1], labels[:1])
  updates = jax.tree.map(lambda x, y: jnp.stack([x, y]), seen.update, noise_like(seen.update))
  attack = attacks.cinet(steps=120)(client)

  def one(update):
    return run(attack, KEY, seen.__class__(**{**vars(seen), 'update': update}))

  found, _, state = jax.jit(jax.vmap(one))(updates)
  recovered, control = (psnr(picture, images[:1]) for picture in found.samples)
  assert recovered > 25 > 10 > control
  assert float(found.distance[0]) < 0.01 * float(found.distance[1])
  # What is returned are the images of the best weights, and of the latents that were drawn.
  weights, latents = state.best[0]['weights'], state.latents
  made = jax.jit(jax.vmap(functools.partial(priors.untrained.apply, shape=seen.batch_shape)))(weights, latents)
  better = np.asarray(found.objective) < np.asarray(state.best[1])  # the last point, evaluated by `reconstruct` alone
  np.testing.assert_allclose(found.samples[~better], made[~better], atol=1e-5)
  assert not np.allclose(latents[0], 0) and np.array_equal(latents[0], latents[1])


@pytest.mark.long
def test_an_evolution_without_a_finite_objective_has_diverged(client, observe, small_images):
  images, labels = small_images
  seen = observe(images[:1], labels[:1])
  made = matching.composed(client, optax.identity(), 2, {'generator': LATENTS})
  attack = evolution.evolution(made, population=4, kl=0.1, labels='known')
  found, *_ = jax.jit(lambda seen: run(attack, KEY, seen))(seen)
  assert int(found.diverged_step) == -1 and np.isfinite(found.samples).all()
  spoilt = jax.tree.map(lambda x: x.at[(0,) * x.ndim].set(jnp.nan), seen.update)
  found, *_ = jax.jit(lambda seen: run(attack, KEY, seen))(seen.__class__(**{**vars(seen), 'update': spoilt}))
  assert int(found.diverged_step) == 0 and np.isposinf(found.distance) and np.isnan(found.objective)
  assert np.isnan(found.samples).all()


@pytest.mark.long
def test_a_generator_of_ones_own_is_descended_by_hand(client, observe, small_images):
  images, labels = small_images
  seen = observe(images[:2], labels[:2])
  attack = matching.gradient_matching(client, optax.sgd(0.5), 1, generator=LOGITS, box=True, tv=0.1)
  start = jax.jit(attack.init)(KEY, seen)
  weights, constants = start.dummy['weights'], start.latents

  def objective(weights):
    return attack.init.__self__.losses(seen, LOGITS.apply(weights, constants, seen.batch_shape, None), seen.targets)[0]

  value, slope = jax.jit(jax.value_and_grad(objective))(weights)
  state, info = jax.jit(attack.step)(start, seen)
  np.testing.assert_allclose(info['objective'], value, rtol=1e-5)
  np.testing.assert_allclose(state.dummy['weights'], weights - 0.5 * slope, rtol=1e-4, atol=1e-5)  # and not clipped
  np.testing.assert_array_equal(state.latents, constants)
  assert float(jnp.abs(slope).max()) > 1e-4 and float(state.dummy['weights'].min()) < 0
  assert set(state.dummy) == {'weights'}


@pytest.mark.slow
def test_labels_beside_a_generator_keep_their_pace(client, observe, small_images):
  seen = observe(*(part[:1] for part in small_images), labels_mode='optimised')
  attack = matching.gradient_matching(client, optax.sgd(1e-3), 1, generator=LOGITS)
  pixels = matching.gradient_matching(client, optax.sgd(1e-3), 1)
  start, beside = (jax.jit(each.init)(KEY, seen) for each in (attack, pixels))
  np.testing.assert_allclose(100 * start.dummy['logits'], beside.dummy['logits'], rtol=1e-6)
  state, _ = jax.jit(attack.step)(start, seen)
  assert set(state.dummy) == {'weights', 'logits'} and (state.dummy['logits'] != start.dummy['logits']).any()
  found = jax.jit(attack.reconstruct)(state, seen)
  best = state.dummy if found.objective < state.best[1] else state.best[0]  # the last point is evaluated now
  assert int(found.labels[0]) == int(jnp.argmax(best['logits']))


@pytest.mark.slow
@pytest.mark.parametrize(
  ('settings', 'local', 'shape'),
  [
    ({'seeds': 3, 'group': 0.1}, {}, (3, 2)),
    ({'decoys': 1}, {}, (2,)),
    ({'sharpness': 0.1, 'partial': 0.5}, {}, (2,)),
    ({'match': 'surrogate'}, {'share': 'delta', 'epochs': 2}, (2,)),
    ({'orders': 'free'}, {'share': 'delta', 'epochs': 2, 'batch_size': 1}, (4,)),
  ],
)
def test_it_stands_beside_every_other_setting(network, observe, small_images, settings, local, shape):
  client = Client(network[0], 10, **local)
  seen = observe(*(part[:2] for part in small_images), victim=client)
  attack = attacks.cinet(steps=1, **settings)(client)
  state = jax.eval_shape(attack.init, KEY, seen)
  assert state.latents.shape == (*shape, 128) and state.dummy['weights'].keys() == state.best[0]['weights'].keys()
  after, _ = jax.eval_shape(attack.step, state, seen)
  assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), state)
  assert jax.eval_shape(attack.reconstruct, after, seen).samples.shape == seen.batch_shape


def test_what_makes_no_sense_is_refused():
  with pytest.raises(UsageError, match="start='uniform' is of pixels"):
    attacks.csdlg(generator='untrained', start='uniform')(None)
  with pytest.raises(UsageError, match='is of pixels'):
    matching.gradient_matching(None, optax.sgd(0.1), 1, generator='untrained', start=np.zeros((1, 8, 8, 1)))
  with pytest.raises(UsageError, match='unknown generator'):
    attacks.csdlg(generator='trained')(None)
  with pytest.raises(UsageError, match='start'):
    attacks.cinet(start='normal')
