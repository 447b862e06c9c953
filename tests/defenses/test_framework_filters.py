"""Filters of federated-learning frameworks against their algorithms in NumPy."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from gradleak import Client, defenses, models
from gradleak.adaptive.base import Known
from gradleak.core import errors
from gradleak.defenses.differential_privacy import of_upload
from gradleak.defenses.guarantees import mechanisms
from gradleak.defenses.quantization import _values

KEY = jax.random.key(3)


def tree(seed, scale=1.0):
  rng = np.random.default_rng(seed)
  shapes = {'kernel': (40, 30), 'bias': (30,), 'scale': ()}
  return {name: jnp.asarray(scale * rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}


def apply(defense, updates, params=None, **given):
  return jax.device_get(defense.update(updates, defense.init(updates), params, **given)[0])


def flat(updates):
  return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(updates)])


@pytest.mark.parametrize('percentile', [0.0, 10.0, 37.3, 50.0, 99.0, 100.0])
def test_percentile_privacy_equals_numpys_percentile(percentile):
  updates = tree(0, 0.02)
  values = {name: np.asarray(u) / 4 for name, u in updates.items()}  # per local step
  cutoff = np.percentile(np.abs(flat(values)), percentile)
  sent = apply(defenses.percentile_privacy(percentile=percentile, gamma=0.005, steps=4), updates)
  for name, value in values.items():
    expected = np.where((value > -cutoff) & (value < cutoff), 0, np.clip(value, -0.005, 0.005))
    np.testing.assert_allclose(sent[name], 4 * expected if value.ndim else updates[name], rtol=1e-6)


def accepted(values, rng, count, epsilon, gamma, tau):
  """The passes of the sparse vector technique, one after another."""
  ratio = (2 * count) ** (2 / 3)
  threshold = tau + rng.laplace(scale=gamma * (1 + ratio) / epsilon)
  scale = 2 * gamma * count * (1 + ratio) / (epsilon * ratio)
  passed = np.zeros(values.size, bool)
  while passed.sum() < count:
    noisy = np.abs(np.clip(values, -gamma, gamma)) + rng.laplace(scale=scale, size=values.size)
    passed |= noisy >= threshold
  return passed


PASSES = [
  ([0.0, 0.1, 0.3, 0.5, 0.8, 1.0, 2.0, -0.6], {'epsilon': 12.0, 'gamma': 1.0, 'tau': 0.9}),
  ([0.0, 1.0, 2.0, -1.0, 1.0, 0.2, -0.2, 0.2], {'epsilon': 200.0, 'gamma': 1.0, 'tau': 0.2}),  # four are certain to
]


@pytest.mark.long
@pytest.mark.parametrize(('values', 'settings'), PASSES)
@pytest.mark.parametrize('replace', [False, True])
def test_svt_privacy_selects_as_the_passes_do(replace, values, settings):
  """How often each of a few entries is sent, in the filter's loop and here: differences of four deviations fail."""
  values = np.asarray(values, np.float32)
  defense = defenses.svt_privacy(fraction=3 / 8, noise_var=math.inf, replace=replace, **settings)
  updates = {'w': jnp.asarray(values)}
  keys = jax.random.split(KEY, 4000)
  sent = jax.jit(jax.vmap(lambda key: defense.update(updates, defense.init(updates), key=key)[0]['w']))(keys)
  ours = np.asarray(sent != 0)
  rng = np.random.default_rng(1)
  theirs = np.zeros((4000, values.size), bool)
  for row in theirs:
    passed = np.flatnonzero(accepted(values, rng, 3, **settings))
    row[rng.choice(passed, 3, replace=replace)] = True
  theirs[:, 0] = False  # a value of zero is sent as zero
  deviation = np.sqrt(2 * 0.25 / 4000)
  np.testing.assert_allclose(ours.mean(0), theirs.mean(0), atol=4 * deviation)
  assert np.ptp(ours.mean(0)[1:]) > 10 * deviation
  assert replace or set(ours.sum(1)) <= {2, 3}


@pytest.mark.long
def test_svt_privacy_sends_nine_percent_by_default_with_noise_of_twenty_times_gamma():
  updates = {'w': jnp.zeros(100_000)}
  sent = apply(defenses.svt_privacy(), updates, key=KEY)['w']
  drawn = sent[sent != 0]
  assert 0.0895 < drawn.size / 100_000 < 0.0917  # 10 % drawn with replacement from about half
  assert scipy.stats.kstest(drawn, scipy.stats.laplace(scale=2e-4).cdf).pvalue > 1e-3
  assert scipy.stats.kstest(drawn, scipy.stats.laplace(scale=3e-4).cdf).pvalue < 1e-6
  noise = defenses.svt_privacy().stages[0].traits.noise
  assert noise.fraction(defenses.svt_privacy().stages[0].settings) == pytest.approx(drawn.size / 100_000, abs=2e-3)


@pytest.mark.long
def test_a_tensor_without_axes_passes_as_it_is():
  updates = tree(1)
  for made in (defenses.svt_privacy(), defenses.percentile_privacy(percentile=99.0)):
    assert apply(made, updates, key=KEY)['scale'] == updates['scale']


@pytest.mark.long
def test_svt_privacy_never_sends_what_cannot_pass():
  updates = {'w': jnp.full(100, 1e-3)}
  sent = apply(defenses.svt_privacy(epsilon=1e9, tau=1.0), updates, key=KEY)['w']
  assert not np.any(sent)


def test_local_dp_is_a_clip_and_the_noise_of_the_theorem():
  updates = {'w': jnp.full(40_000, 0.1)}  # of norm 20
  sent = apply(defenses.local_dp(norm=1, sensitivity=2, epsilon=0.8, delta=1e-5), updates, key=KEY)['w']
  stddev = 2 * math.sqrt(2 * math.log(1.25e5)) / 0.8
  noise = scipy.stats.norm(0.005, stddev)
  assert scipy.stats.kstest(sent, noise.cdf).pvalue > 1e-3
  assert scipy.stats.kstest(sent, scipy.stats.norm(0.005, 1.5 * stddev).cdf).pvalue < 1e-6


def test_the_epsilon_of_local_dp_is_that_of_its_noise_and_not_the_stated_one():
  loud, quiet = (defenses.local_dp(norm=1, sensitivity=s, epsilon=1, delta=1e-5) for s in (2, 1e-4))
  (mechanism,) = mechanisms(loud)
  assert of_upload(mechanism, 'replace one').value <= 1  # the theorem is not tight
  (mechanism,) = mechanisms(quiet)
  assert mechanism.noise == pytest.approx(4.845e-4, rel=1e-3) and of_upload(mechanism, 'replace one').value > 1e6
  context = defenses.Context(None, {'params': {}}, (8, 8, 1))
  remarks = [made.stages[0].traits.remark(context, made.stages[0].settings) for made in (loud, quiet)]
  assert remarks[0] == '' and 'sensitivity of 0.0001' in remarks[1] and 'has 2' in remarks[1]


def test_the_noise_of_local_dp_is_what_its_epsilon_follows_from_for_any_delta():
  made = [defenses.local_dp(norm=1, sensitivity=1, epsilon=1, delta=delta) for delta in (1e-5, 1e-37)]
  usual, least = (apply(one, {'w': jnp.zeros(8)}, key=KEY)['w'] for one in made)
  np.testing.assert_allclose(least / usual, mechanisms(made[1])[0].noise / mechanisms(made[0])[0].noise, rtol=1e-5)
  with pytest.raises(errors.UsageError, match=r'local_dp\(delta\) is 1e-40, expected a number in \[1e-37, '):
    defenses.local_dp(norm=1, sensitivity=1, epsilon=1, delta=1e-40)


def test_float16_rounds_and_does_not_overflow():
  values = np.asarray([1e-9, 0.1, 1 / 3, 70_000, -1e9], np.float32)
  sent = apply(defenses.quantize(), {'w': jnp.asarray(values)})['w']
  np.testing.assert_array_equal(sent, np.clip(values, -65504, 65504).astype(np.float16).astype(np.float32))


@pytest.mark.long
@pytest.mark.parametrize(
  ('code', 'block', 'count'), [('blockwise8', 4096, 256), ('float4', 64, 15), ('normfloat4', 64, 16)]
)
def test_codes_of_blocks_take_the_nearest_value(code, block, count):
  values = _values(code)
  assert values.size == count == np.unique(values).size and values[-1] == 1 and 0 in values
  update = np.random.default_rng(0).normal(size=(90, 50)).astype(np.float32)
  sent = apply(defenses.quantize(code=code), {'w': jnp.asarray(update)})['w'].ravel()
  for start in range(0, update.size, block):
    part = update.ravel()[start : start + block]
    scale = np.abs(part).max()
    nearest = values[np.abs(part[:, None] / scale - values).argmin(1)]
    np.testing.assert_allclose(sent[start : start + block], scale * nearest, rtol=1e-6, atol=1e-12)


def test_the_dynamic_code_has_twice_as_many_values_in_each_decade_as_in_the_one_below():
  positive = _values('blockwise8')[_values('blockwise8') > 0]
  counts = [np.sum((positive >= 10.0**e) & (positive < 10.0 ** (e + 1))) for e in range(-7, 0)]
  assert counts == [1, 2, 4, 8, 16, 32, 64]


@pytest.mark.parametrize('scale', [1e-6, 1e-3, 1.0, 50.0])
def test_adaquant_takes_even_steps_and_never_divides_by_zero(scale):
  update = (scale * np.random.default_rng(0).normal(size=400)).astype(np.float32)
  sent = apply(defenses.adaquant(), {'w': jnp.asarray(update)})['w']
  span = float(update.max() - update.min())
  bits = max(1, math.ceil(math.log2(math.ceil(max(1, math.sqrt(span * 32 * math.log(4) / 0.01))))))
  width = span / (2**bits - 1)
  np.testing.assert_allclose(sent, update.min() + width * np.round((update - update.min()) / width), atol=1e-4 * span)
  assert np.abs(sent - update).max() <= 0.501 * width
  np.testing.assert_array_equal(
    apply(defenses.adaquant(), {'w': jnp.full(9, scale)})['w'], np.full(9, scale, np.float32)
  )


@pytest.mark.long
def test_secagg_rounding_is_unbiased_and_on_the_grid_of_whole_weights():
  updates, params = tree(4, 1e-3), tree(5, 0.1)
  defense = defenses.secagg_rounding(limit=8, levels=4096, weight=0.5)
  spacing = 2 * 8 / 4096 / 0.5
  keys = jax.random.split(KEY, 500)
  sent = jax.vmap(lambda key: defense.update(updates, defense.init(params), params, key=key)[0])
  sent = jax.device_get(jax.jit(sent)(keys))
  for name, update in jax.device_get(updates).items():
    places = (np.asarray(params[name], np.float64) + np.asarray(sent[name], np.float64) + 8 / 0.5) / spacing
    np.testing.assert_allclose(places, np.round(places), atol=1e-3)
    np.testing.assert_allclose(np.mean(sent[name], 0), update, atol=5 * spacing / 2 / math.sqrt(500))
    assert np.abs(sent[name] - update).max() < spacing
  cut = apply(defenses.secagg_rounding(weight=0.5), {'w': jnp.full(3, 99.0)}, {'w': jnp.full(3, 2.0)}, key=KEY)['w']
  np.testing.assert_allclose(cut, 16 - 2, atol=1e-4)


@pytest.mark.parametrize('weight', [0.0, 0.01, -0.05])
def test_rounding_to_the_default_levels_is_unbiased(weight):
  """At four million levels a weight and a draw, added in float32, fell on fourths of a level."""
  params, update = ({'w': jnp.full(100_000, value, jnp.float32)} for value in (weight, 0.0))
  moved = np.asarray(apply(defenses.secagg_rounding(), update, params, key=KEY)['w'], np.float64)
  spacing = 2 * 8 / 4_194_304
  assert abs(moved.mean()) < 5 * spacing / 2 / math.sqrt(100_000) + 1e-10


def clipped_mean(uploads, weights, norm):
  norms = np.sqrt(sum(np.sum(np.square(u), axis=tuple(range(1, u.ndim))) for u in jax.tree.leaves(uploads)))
  factors = np.minimum(1, norm / norms)
  return norms, jax.tree.map(lambda u: np.tensordot(weights * factors, u, 1), uploads)


def served(defense, uploads, weights, state=None, key=KEY):
  mean = jax.tree.map(lambda u: jnp.tensordot(weights, u, 1), uploads)
  state = defense.init(mean) if state is None else state
  return _update(defense)(mean, state, key=key, uploads=uploads, weights=weights)


@functools.cache
def _update(defense):
  return jax.jit(defense.update)


@pytest.mark.long
def test_the_server_clips_each_upload_and_divides_the_noise_by_the_clients():
  uploads = {'w': jnp.asarray(np.random.default_rng(6).normal(size=(4, 50, 40)), jnp.float32)}
  uploads['w'] = uploads['w'] * jnp.asarray([0.1, 1.0, 3.0, 1.0]).reshape(4, 1, 1)
  weights = jnp.asarray([0.5, 0.25, 0.25, 0.0])
  mean, state = served(defenses.server_dp(norm=10.0, noise=0.0, clients=4), uploads, weights)
  norms, expected = clipped_mean(jax.device_get(uploads), np.asarray(weights), 10.0)
  assert (norms < 10).any() and (norms > 10).any()
  np.testing.assert_allclose(mean['w'], expected['w'], atol=1e-5)
  assert state.norm == 10
  noisy, _ = served(defenses.server_dp(norm=10.0, noise=0.6, clients=4), uploads, weights)
  added = np.ravel(noisy['w'] - mean['w'])
  assert scipy.stats.kstest(added, scipy.stats.norm(scale=0.6 * 10 / 4).cdf).pvalue > 1e-3
  assert scipy.stats.kstest(added, scipy.stats.norm(scale=0.9 * 10 / 4).cdf).pvalue < 1e-6


@pytest.mark.parametrize(
  ('counts', 'direction'), [('clipped', -1), pytest.param('unclipped', 1, marks=pytest.mark.slow)]
)
def test_the_adaptive_norm_moves_towards_the_quantile_as_published_alone(counts, direction):
  uploads = {'w': jnp.ones((200, 9))}  # all of norm 3, above the norm of 1
  weights = jnp.full(200, 1 / 200)
  defense = defenses.server_dp(norm=1.0, noise=0.0, clients=200, rate=0.2, counts=counts)
  _, state = served(defense, uploads, weights)
  share = 1 if counts == 'clipped' else 0
  assert np.log(state.norm) == pytest.approx(-0.2 * (share - 0.5), abs=0.2 * 5 / 20)
  for step in range(30):
    _, state = served(defense, uploads, weights, state, jax.random.fold_in(KEY, step))
  assert state.norm < 0.1 if direction < 0 else 2.5 < state.norm < 3.6


def test_without_noise_the_count_has_none():
  uploads = {'w': 1e-3 * jnp.ones((10, 9))}  # none is clipped
  _, state = served(defenses.server_dp(norm=1.0, noise=0.0, clients=10, rate=0.2), uploads, jnp.full(10, 0.1))
  assert float(state.norm) == pytest.approx(np.exp(0.2 * 0.5), rel=1e-6)


def test_an_adaptive_norm_draws_its_noise_for_the_next_norm_and_shares_the_multiplier():
  uploads = {'w': jnp.zeros((10, 20_000))}
  weights = jnp.full(10, 0.1)
  noisy, state = served(defenses.server_dp(norm=1.0, noise=0.5, clients=10, rate=0.2), uploads, weights)
  multiplier = (0.5**-2 - (2 * 0.5) ** -2) ** -0.5
  assert np.std(noisy['w']) == pytest.approx(multiplier * float(state.norm) / 10, rel=0.03)
  assert state.norm != 1


def test_what_the_server_does_needs_uploads_and_a_multiplier_that_is_left():
  defense = defenses.server_dp(norm=1.0, noise=0.5, clients=10)
  with pytest.raises(errors.UsageError, match='uploads='):
    defense.update({'w': jnp.ones(3)}, defense.init({'w': jnp.ones(3)}), key=KEY)
  with pytest.raises(errors.UsageError, match='less than clients / 10'):
    defenses.server_dp(norm=1.0, noise=1.0, clients=10, rate=0.2)
  with pytest.raises(errors.UsageError, match='params'):
    defense = defenses.secagg_rounding()
    defense.update({'w': jnp.ones(3)}, defense.init({'w': jnp.ones(3)}), key=KEY)


def test_an_attacker_bounds_what_is_truncated_by_the_number_of_entries():
  model = models.create('mlp(widths=4)', 3)
  client, shape = Client(model, 3), (2, 2, 1)
  context = defenses.Context(client, model.init(KEY, shape), shape)
  size = sum(leaf.size for leaf in jax.tree.leaves(context.variables['params']))
  for defense, limit in ((defenses.clamp(limit=0.5), 0.5), (defenses.percentile_privacy(gamma=0.1, steps=3), 0.3)):
    known = Known(defenses.bind(defense, context), context, 1, 1, frozenset())
    assert known.norm_bound == pytest.approx(limit * math.sqrt(size))
