"""Composition: every stage of our chain has a key of its own, and states and extra arguments pass through."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.stats

from gradleak import defenses
from gradleak.core import errors

ZERO = {'w': jnp.zeros(4000)}
KEY = jax.random.key(0)


def drawn(transformation, key=KEY):
  return np.asarray(transformation.update(ZERO, transformation.init(ZERO), ZERO, key=key)[0]['w'])


@pytest.mark.parametrize('kind', ['gaussian', 'laplace'])
def test_members_of_one_kind_draw_different_noise(kind):
  unit = {'gaussian': defenses.gaussian(stddev=1.0), 'laplace': defenses.laplace(scale=2**-0.5)}[kind]
  ours, optaxs = drawn(defenses.chain(unit, unit)), drawn(optax.chain(unit, unit))
  # Two independent draws of variance one have standard deviation √2; one draw twice has 2.
  assert abs(ours.std() - 2**0.5) < 0.1
  assert abs(optaxs.std() - 2) < 0.1
  first, second = drawn(defenses.chain(unit, optax.identity())), drawn(defenses.chain(optax.identity(), unit))
  np.testing.assert_allclose(ours, first + second, atol=1e-5)
  assert abs(np.corrcoef(first, second)[0, 1]) < 0.08


def test_what_is_idle_neither_draws_nor_holds_back():
  idle = defenses.chain(defenses.topk(ratio=0.5), defenses.gaussian(stddev=0.0), defenses.dgc(ratio=1.0))
  acting = defenses.chain(defenses.topk(ratio=0.5), defenses.gaussian(stddev=0.1), defenses.dgc(ratio=0.5))
  assert (idle.random, idle.accumulates) == (False, False) and (acting.random, acting.accumulates) == (True, True)


def test_the_sum_of_two_gaussians_is_a_gaussian():
  both = drawn(defenses.chain(defenses.gaussian(stddev=3.0), defenses.gaussian(stddev=4.0)))
  assert scipy.stats.kstest(both, scipy.stats.norm(0, 5.0).cdf).pvalue > 0.01
  assert scipy.stats.kstest(both, scipy.stats.norm(0, 7.0).cdf).pvalue < 1e-6


def test_nested_chains_draw_four_different_noises():
  unit = defenses.gaussian(stddev=1.0)
  nested = drawn(defenses.chain(defenses.chain(unit, unit), defenses.chain(unit, unit)))
  assert abs(nested.std() - 2) < 0.1  # √4; a pair drawn twice would give √8


def test_a_chain_of_one_is_its_member():
  unit = defenses.gaussian(stddev=1.0)
  np.testing.assert_array_equal(drawn(defenses.chain(unit)), drawn(unit))
  plain = defenses.chain(optax.scale(2.0))
  np.testing.assert_array_equal(plain.update({'w': jnp.ones(3)}, plain.init(None), key=KEY, batch=None)[0]['w'], 2)


def test_members_act_in_their_order():
  ones, clip, scale = {'w': jnp.ones(4)}, defenses.clip(norm=1.0), optax.scale(10.0)
  for stages, expected in (((clip, scale), 5.0), ((scale, clip), 0.5)):
    transformation = defenses.chain(*stages)
    np.testing.assert_allclose(transformation.update(ones, transformation.init(ones))[0]['w'], expected, rtol=1e-6)


def test_states_and_extra_arguments_pass():
  seen = []

  def update(updates, state, params=None, *, key, batch):
    seen.append((params, batch))
    return updates, state

  watcher = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
  chain = defenses.chain(watcher, optax.trace(decay=0.5), watcher)
  state = chain.init(ZERO)
  for expected in (1.0, 1.5, 1.75):
    updates, state = chain.update({'w': jnp.ones(4000)}, state, 'params', key=KEY, batch='batch')
    np.testing.assert_allclose(updates['w'], expected)
  assert seen == [('params', 'batch')] * 6


def test_without_a_key_random_members_say_so_and_others_work():
  with pytest.raises(errors.UsageError, match='laplace draws noise and needs a key'):
    drawn(defenses.chain(defenses.clip(norm=1.0), defenses.laplace(scale=1.0)), key=None)
  assert not drawn(defenses.chain(defenses.clip(norm=1.0), defenses.prune(rate=0.5)), key=None).any()
