"""ε from below: bounds against closed forms, mechanisms that keep the ε that they state, and those that do not."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from dp_accounting import get_epsilon_gaussian
from jax_privacy import auditing
from scipy import stats

import gradleak as gl
from gradleak.defenses import Mechanism, differential_privacy, wrap
from gradleak.defenses.differential_privacy import Epsilon
from gradleak.studies import epsilon as study
from gradleak.studies.epsilon import bounds
from tests import texts

DELTA = 1e-5
# ε of one upload in the relation 'replace one' at δ = 1e-5 -> the noise multiplier.
NOISE = {1: 7.4606, 8: 1.2009, 50: 0.3}
SURE = 0.9999  # confidence where nothing is broken: a test that fails once in twenty seeds is none
GAUSSIAN, ANY = 'distinguishing, Gaussian DP', 'distinguishing'


def images(count, side=4):
  return np.random.default_rng(0).random((count, side, side, 1)).astype(np.float32)


pytestmark = pytest.mark.usefixtures('fast_compilation')


@pytest.fixture(scope='module')
def scenario():
  return gl.scenario(gl.models.mlp(4, widths=6), images(24), np.arange(24) % 4, key=jax.random.key(0))


def audited(scenario, defenses, **settings):
  found = gl.audit_epsilon(jax.random.key(1), scenario, defenses, **{'progress': 'none', 'uploads': 4000, **settings})
  return {(row['defense'], row['method']): row for row in found.rows}


def verdicts(rows):
  return {name: row['verdict'] for name, row in rows.items()}


# Closed forms.


@pytest.mark.parametrize('n', [1, 30, 5000])
def test_clopper_pearson_is_scipys(n):
  counts = sorted({0, 1, n // 3, n - 1, n})
  low, high = bounds.clopper_pearson(counts, n, 0.025)
  for k, *found in zip(counts, low, high, strict=True):
    np.testing.assert_allclose(found, stats.binomtest(k, n).proportion_ci(0.95, method='exact'), rtol=1e-7)


@pytest.mark.parametrize('mu', [0.1, 1, 7])
@pytest.mark.parametrize('delta', [1e-9, 1e-5, 1e-2])
def test_epsilon_of_gaussian_dp_is_that_of_dp_accounting(mu, delta):
  found = bounds.gaussian_epsilon(mu, delta)
  assert found == pytest.approx(get_epsilon_gaussian(1 / mu, delta), rel=1e-4, abs=1e-6)
  assert bounds.gaussian_delta(mu, found) <= delta * (1 + 1e-6)


def test_gaussian_dp_without_a_difference_has_no_epsilon():
  assert bounds.gaussian_epsilon(0.0, DELTA) == 0
  assert bounds.gaussian_delta(0.0, 0.0) == 0


def gaussian_scores(mu, n, seed=0):
  random = np.random.default_rng(seed)
  return random.normal(mu, 1, n), random.normal(0, 1, n)


@pytest.mark.parametrize('mu', [0.3, 1.7, 4])
def test_bounds_converge_to_the_epsilon_of_the_gaussian_mechanism(mu):
  true = bounds.gaussian_epsilon(mu, DELTA)
  found = bounds.distinguished(*gaussian_scores(mu, 10**6), delta=DELTA, gaussian=True)
  assert 0.95 * true < found.epsilon < true
  weaker = bounds.distinguished(*gaussian_scores(mu, 10**6), delta=DELTA)
  assert 0.4 * true < weaker.epsilon < found.epsilon


@pytest.mark.parametrize('delta', [0.0, 1e-5, 0.05])
def test_bound_is_that_of_jax_privacy_at_the_same_threshold(delta):
  inside, outside = gaussian_scores(1.5, 4000)
  found = bounds.distinguished(inside, outside, delta=delta)
  auditor = auditing.CanaryScoreAuditor(inside[2000:], outside[2000:])
  wanted = auditor.epsilon_clopper_pearson(
    0.05, delta, one_sided=False, threshold_strategy=auditing.Explicit(found.threshold)
  )
  assert found.epsilon == pytest.approx(wanted, rel=1e-9)
  assert (found.trials, found.tpr) == (2000, np.mean(inside[2000:] >= found.threshold))


def test_second_half_alone_gives_the_bound():
  inside, outside = gaussian_scores(3, 400)
  lucky = np.concatenate([inside[:200], outside[:200]]), np.concatenate([outside[200:], outside[:200]])
  assert bounds.distinguished(*lucky, delta=DELTA).epsilon == 0


def test_both_directions_count():
  random = np.random.default_rng(0)
  # Half of the first data set's uploads have scores that no other has; with δ = 0.5 only the other direction speaks.
  inside, outside = random.normal(size=4000) + 10 * (np.arange(4000) % 2), random.normal(size=4000)
  forth, back = (bounds.distinguished(*pair, delta=DELTA).epsilon for pair in ((inside, outside), (-outside, -inside)))
  assert forth == pytest.approx(back, abs=0.3)
  assert forth > 4


@pytest.mark.parametrize('scores', [np.zeros(3), np.zeros((4, 1)), np.asarray([0, 1, 2, np.nan])])
def test_scores_that_are_none_are_refused(scores):
  with pytest.raises(gl.UsageError, match='scores inside'):
    bounds.distinguished(scores, np.arange(9.0), delta=DELTA)


def test_scores_that_are_all_alike_show_nothing():
  for gaussian in (False, True):
    assert bounds.distinguished(np.zeros(100), np.zeros(100), delta=DELTA, gaussian=gaussian).epsilon == 0


@pytest.mark.parametrize('delta', [0.0, 1e-5, 1e-3])
@pytest.mark.parametrize(('guesses', 'correct'), [(100, 100), (100, 80), (400, 390), (10, 3), (0, 0)])
def test_one_run_is_that_of_jax_privacy(guesses, correct, delta):
  for epsilon in (0.0, 0.5, 3.0):
    wanted = auditing._one_run_p_value(1000, guesses, correct, epsilon, delta)
    assert bounds.one_run_p_value(1000, guesses, correct, epsilon, delta) == pytest.approx(wanted, rel=1e-9, abs=1e-300)
  wanted = auditing._epsilon_one_run(0, 1000, guesses, correct, 0.05, delta)
  assert bounds.one_run_epsilon(1000, guesses, correct, delta) == pytest.approx(wanted, abs=1e-4)


def test_one_run_bounds_a_naive_simulation():
  """Each coin goes through randomised response, or, with probability δ, is published."""
  random, coins, delta, epsilon = np.random.default_rng(0), 60, 0.01, 1.0
  chance = delta + (1 - delta) / (1 + math.exp(-epsilon))
  correct = random.binomial(coins, chance, 200_000)
  for least in (42, 48, 52):
    simulated, claimed = np.mean(correct >= least), bounds.one_run_p_value(coins, coins, least, epsilon, delta)
    assert simulated <= claimed + 3 * math.sqrt(simulated / 200_000)
  # Without δ the bound is reached.
  exact = random.binomial(coins, 1 / (1 + math.exp(-epsilon)), 200_000)
  assert np.mean(exact >= 50) == pytest.approx(bounds.one_run_p_value(coins, coins, 50, epsilon, 0.0), rel=0.1)


def test_one_run_guesses_what_it_is_surest_of():
  coins = np.arange(64) % 2 == 0
  scores = np.where(coins, 1.0, -1.0) * np.where(np.arange(64) < 32, 0.1, 1.0)
  scores[:32] = np.abs(scores[:32])  # of these, half are wrong
  found = bounds.one_run(scores, coins, delta=DELTA)
  assert (found.guesses, found.correct) == (32, 32)
  assert found.epsilon == pytest.approx(bounds.one_run_epsilon(64, 32, 32, DELTA, 1 - 0.05 / 4))


def test_rounds_are_weighted_so_that_common_noise_cancels():
  def release(key, inside):
    sign, noise = jnp.where(inside, 1.0, -1.0), jax.random.normal(key, (3,))
    return jnp.stack([sign + noise, 0.5 * sign + noise])

  inside, outside = study.release_scores(jax.random.key(0), release, 1000)
  assert inside.min() > outside.max()


def test_uploads_of_both_data_sets_are_independent():
  def release(key, inside):
    return jax.random.normal(key, (1, 1)) + jnp.where(inside, 0.1, 0.0)

  sides = study.release_scores(jax.random.key(0), release, 4000)
  assert abs(np.corrcoef(*sides)[0, 1]) < 0.06
  assert all(len(np.unique(side)) > 3900 for side in sides)


# False alarms: at most one minus the confidence.

ALARMS = int(stats.binom.ppf(0.999, 200, 0.05))  # of 200 tests at 95 %


@pytest.mark.parametrize('gaussian', [False, True])
def test_alarms_on_correct_scores(gaussian):
  mu = 0.8
  stated = bounds.gaussian_epsilon(mu, 0.05)
  found = [
    bounds.distinguished(*gaussian_scores(mu, 400, seed), delta=0.05, gaussian=gaussian).epsilon for seed in range(200)
  ]
  assert sum(study.verdict(stated, one) == 'broken' for one in found) <= ALARMS
  assert np.mean(found) > 0.1 * stated
  assert np.mean(np.asarray(found) < 0.05 * stated) < 0.08  # no tail of few uploads is chosen for its luck


@pytest.mark.slow
def test_alarms_in_one_run():
  stated, alarms = bounds.gaussian_epsilon(2.0, 1e-3), 0
  for seed in range(200):
    random = np.random.default_rng(seed)
    coins = random.random(64) < 0.5
    scores = np.where(coins, 1, -1) + random.normal(size=64)
    alarms += study.verdict(stated, bounds.one_run(scores, coins, delta=1e-3).epsilon) == 'broken'
  assert alarms <= ALARMS


@pytest.mark.slow
def test_alarms_of_a_correct_defense(scenario):
  """The uploads of 200 small audits of DP-SGD, made together; noise that is 30 % too small is found by half of them."""
  mu, alarms = 2 / 1.2, {}
  stated = bounds.gaussian_epsilon(mu, DELTA)
  for name, noise in {'correct': 1.2, 'broken': 1.2 * 0.6}.items():
    release = study._canary(scenario, gl.defenses.dpsgd(norm=1.0, noise=noise), 'example', study.EpsilonSettings())
    sides = study.release_scores(jax.random.key(3), release, 40_000)
    groups = zip(*(side.reshape(200, 200) for side in sides), strict=True)
    measured = [bounds.distinguished(*pair, delta=DELTA, gaussian=True).epsilon for pair in groups]
    alarms[name] = sum(study.verdict(stated, one) == 'broken' for one in measured)
  assert alarms['correct'] <= ALARMS
  assert alarms['broken'] >= 100


# Mechanisms.

FACTORIES = {'client_dp': gl.defenses.client_dp, 'dpsgd': gl.defenses.dpsgd}


@pytest.mark.long
def test_correct_mechanisms_are_consistent(scenario):
  """In the relation 'replace one' for ε of 1, 8 and 50, and bounds that are not vacuous where uploads are few."""
  given = {f'{name} {e}': make(norm=0.5, noise=NOISE[e]) for e in (8, 50) for name, make in FACTORIES.items()}
  rows = audited(scenario, given, canaries=64, confidence=SURE)
  assert set(verdicts(rows).values()) == {'consistent'}
  assert {row['unit'] for (label, _), row in rows.items() if label.startswith('dpsgd')} == {'example'}
  assert {row['unit'] for (label, _), row in rows.items() if label.startswith('client')} == {'client'}
  for (label, method), row in rows.items():
    assert row['measured'] < row['stated'] and row['relation'] == 'replace one', (label, method)
    assert row['measured'] > 0 or method == 'one run'  # which 64 canaries are few for
    if method == GAUSSIAN:
      assert row['measured'] > 0.6 * row['stated']
  assert {method for label, method in rows if label == 'dpsgd 8'} == {ANY, GAUSSIAN, 'one run'}
  assert {method for label, method in rows if label == 'client_dp 8'} == {ANY, GAUSSIAN}


@pytest.mark.slow
@pytest.mark.parametrize('relation', study.RELATIONS)
@pytest.mark.parametrize('e', NOISE)
def test_correct_mechanisms_at_length(scenario, e, relation):
  noise = NOISE[e] / {'replace one': 1, 'replace by zeros': 2}[relation]
  given = {name: make(norm=2.0, noise=noise) for name, make in FACTORIES.items()}
  given['clip+gaussian'] = gl.parse(f'clip(norm=2)+gaussian(stddev={2 * noise})')
  rows = audited(scenario, given, relation=relation, uploads=100_000, samples=2, confidence=SURE, canaries=0)
  assert set(verdicts(rows).values()) == {'consistent'}
  assert all(row['measured'] > 0.7 * row['stated'] for (_, method), row in rows.items() if method == GAUSSIAN)
  assert all(row['measured'] > 0.1 * row['stated'] for (_, method), row in rows.items() if method == ANY)


@pytest.mark.slow
def test_replacement_by_zeros_and_rounds(scenario):
  given = {name: make(norm=0.5, noise=2.0) for name, make in FACTORIES.items()}
  rows = audited(scenario, given, relation='replace by zeros', rounds=2, samples=2, canaries=0, confidence=SURE)
  assert set(verdicts(rows).values()) == {'consistent'}
  for (label, method), row in rows.items():
    stated = differential_privacy.of_upload(
      Mechanism(2.0, row['unit']), 'replace by zeros', uploads=2, delta=DELTA, accountant='pld'
    )
    assert row['stated'] == stated.value and row['published'] == 'all uploads'
    assert row['measured'] > {ANY: 0.05, GAUSSIAN: 0.5}[method] * row['stated'], (label, method)


@pytest.mark.long
def test_local_epochs_release_an_example_once_each():
  local = gl.scenario(
    gl.models.mlp(4, widths=6), images(24), np.arange(24) % 4, key=jax.random.key(0), share='delta', local_epochs=4
  )
  rows = audited(local, {'dpsgd': gl.defenses.dpsgd(norm=1.0, noise=4.0)}, canaries=0, confidence=SURE)
  assert rows['dpsgd', GAUSSIAN]['verdict'] == 'consistent'
  assert rows['dpsgd', GAUSSIAN]['measured'] / rows['dpsgd', GAUSSIAN]['stated'] > 0.6


def accumulating(**given):
  return gl.scenario(
    gl.models.mlp(4, widths=6), images(24), np.arange(24) % 4, key=jax.random.key(0), share='delta', **given
  )


@pytest.mark.parametrize('accumulate', [1, 2, 3, 5])
def test_accumulated_batches_release_an_example_once_an_epoch(accumulate):
  """What accumulates is the noisy gradient of each batch: in one epoch or over several, and beyond their number."""
  client, chosen = accumulating(local_epochs=2, accumulate=accumulate).client, study.EpsilonSettings(delta=DELTA)
  for name, releases in (('dpsgd', 2), ('client_dp', 1)):
    (stated,) = study.stated_of(FACTORIES[name](norm=0.5, noise=2.0), client, chosen)
    alike = Mechanism(2.0, stated.unit)
    wanted = differential_privacy.of_upload(
      alike, 'replace one', uploads=releases, delta=DELTA, accountant=chosen.accountant
    )
    assert stated.value == wanted.value


@pytest.mark.long
def test_batches_that_accumulate_over_epochs_are_measured_as_they_are_trained():
  given = {'dpsgd': gl.defenses.dpsgd(norm=0.5, noise=2.0)}
  rows = audited(accumulating(local_epochs=2, accumulate=2), given, canaries=0, confidence=SURE)
  assert rows['dpsgd', GAUSSIAN]['verdict'] == 'consistent'
  assert rows['dpsgd', GAUSSIAN]['measured'] > 0.6 * rows['dpsgd', GAUSSIAN]['stated']


@pytest.mark.long
@pytest.mark.parametrize('name', ['client_dp', 'dpsgd'])
def test_a_training_without_a_step_is_not_measured_by_its_own_samples(name):
  """Its delta is zero, or noise alone: the measured ε of 0 agreed with any that is stated."""
  with pytest.raises(gl.UsageError, match='the local training leaves the weights as they are on samples=1'):
    audited(accumulating(accumulate=2), {'it': FACTORIES[name](norm=0.5, noise=1.0)}, neighbours='own')


@pytest.mark.long
@pytest.mark.parametrize(
  ('name', 'given'),
  [
    ('client_dp', {'optimizer': 'adam', 'learning_rate': 1e-3}),
    ('client_dp', {'accumulate': 2}),
    ('client_dp', {'private': 'Dense_1'}),
    ('client_dp', {'order': '1,0'}),
    ('dpsgd', {'optimizer': 'adam', 'learning_rate': 1.0}),
  ],
  ids=str,
)
def test_local_training_does_not_keep_the_canary_from_the_mechanism(name, given):
  """Adam's first delta has one length, and of two batches that make one step the first has none."""
  local = gl.scenario(
    gl.models.mlp(4, widths=6), images(24), np.arange(24) % 4, key=jax.random.key(0), share='delta', **given
  )
  rows = audited(local, {'it': FACTORIES[name](norm=0.5, noise=1.0)}, canaries=0, uploads=1000, confidence=SURE)
  assert rows['it', GAUSSIAN]['verdict'] == 'consistent'
  assert rows['it', GAUSSIAN]['measured'] > 0.6 * rows['it', GAUSSIAN]['stated']


@pytest.mark.long
@pytest.mark.parametrize(
  ('given', 'stays'),
  [
    ({'momentum': 0.5, 'weight_decay': 0.1}, ['client_dp', 'dpsgd']),
    ({'optimizer': 'adam', 'learning_rate': 1.0}, ['client_dp']),
    ({'optimizer': 'adam', 'learning_rate': 0.1}, []),
  ],
)
def test_a_local_optimizer_stays_where_canaries_reach_the_clip(scenario, given, stays):
  """Rows under it are those that they were; noise of each step has to go through one that is linear."""
  local = scenario.of(slice(None), gl.ClientSettings(share='delta', **given))
  optimizers = {
    name: study._probed(local, make(norm=1.0, noise=1.0), 3, lambda norm: norm * jnp.ones((2, 3, 1, 1)))[0].optimizer
    for name, make in FACTORIES.items()
  }
  assert [name for name, one in optimizers.items() if one is local.client.optimizer] == stays


@pytest.mark.slow
def test_own_samples_show_something(scenario):
  given = {name: make(norm=0.5, noise=1.0) for name, make in FACTORIES.items()}
  own = audited(scenario, given, neighbours='own', samples=2, uploads=2000, confidence=SURE)
  assert set(verdicts(own).values()) == {'consistent'} and len(own) == 4
  for name in given:
    assert 0.1 * own[name, GAUSSIAN]['stated'] < own[name, GAUSSIAN]['measured']


@pytest.mark.long
@pytest.mark.parametrize('kind', ['rows', pytest.param('texts', marks=pytest.mark.slow)])
def test_rows_of_a_table_and_texts_show_what_images_do(kind):
  if kind == 'rows':
    data = gl.data.load('diabetes', 'test', limit=8)
    of = {'modality': gl.modalities.of_config(data.settings)}
    scenario = gl.scenario(gl.models.mlp(2, widths=6), data.samples, data.targets, key=jax.random.key(0), **of)
  else:
    scenario = texts.scenario(number=8, length=6)
  states = gl.defenses.client_dp(norm=0.5, noise=2.0)
  less = Epsilon(0.01, 'replace one', 'client', 'one upload', delta=DELTA)
  own = audited(scenario, {'true': states, 'claimed': states}, stated={'claimed': less}, neighbours='own', uploads=200)
  assert own['true', GAUSSIAN]['verdict'] == 'consistent' and own['claimed', ANY]['verdict'] == 'broken'
  assert 0.1 * own['true', GAUSSIAN]['stated'] < own['true', GAUSSIAN]['measured']


@pytest.mark.long
def test_one_run_is_the_same_in_both_relations_at_the_same_distance(scenario):
  """Canaries are 2·S from their opposites and S from zeros, so that half of the noise gives the same guesses."""
  found = [
    study._in_one_run(
      jax.random.key(5),
      scenario,
      gl.defenses.dpsgd(norm=1.0, noise=noise),
      study.EpsilonSettings(relation=relation, canaries=128),
    )
    for relation, noise in (('replace one', 1.0), ('replace by zeros', 0.5))
  ]
  assert found[0].guesses == found[1].guesses and abs(found[0].correct - found[1].correct) <= 1
  assert found[0].epsilon > 0.5


def test_two_mechanisms_state_the_less_of_their_epsilons(scenario):
  strong, weak = (gl.defenses.client_dp(norm=1.0, noise=noise) for noise in (4.0, 1.0))
  chosen = study.EpsilonSettings()
  values = [
    study.stated_of(one, scenario.client, chosen)[0].value
    for one in (strong, weak, gl.defenses.chain(strong, weak), gl.defenses.chain(weak, strong))
  ]
  assert values[0] < values[1] and values[2:] == [values[0]] * 2


@pytest.mark.long
def test_defenses_without_an_epsilon_are_measured_and_not_judged(scenario):
  rows = audited(scenario, [None, gl.defenses.gaussian(stddev=1.0)], uploads=400)
  assert set(verdicts(rows).values()) == {'no stated ε'}
  assert {method for _, method in rows} == {ANY}  # that it is Gaussian is stated nowhere
  assert all(row['stated'] is None and row['measured'] > 3 for row in rows.values())


# Mechanisms that do not keep what they state.


def stating(transformation, noise, label, unit='client'):
  """Returns a defense on the upload that states the ε of a Gaussian mechanism."""
  return wrap(
    transformation, 'upload', label=label, random=True, mechanism=lambda settings, clipped, at: Mechanism(noise, unit)
  )


def on_upload(change):
  def update(updates, state, params=None, *, key=None, **extra):
    del params, extra
    return change(key, updates), state

  return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def clipped(updates, norm=1.0):
  return jax.tree.map(lambda u: u * jnp.minimum(1.0, norm / optax.tree.norm(updates)), updates)


def noisy(key, updates, stddev):
  return jax.tree.map(lambda u: u + stddev * jax.random.normal(key, u.shape, u.dtype), updates)


def reused(stddev):
  """Returns a mechanism that draws its noise once, and adds the same in each round."""

  def init(params):
    return jax.tree.map(jnp.zeros_like, params), jnp.zeros((), jnp.int32)

  def update(updates, state, params=None, *, key=None, **extra):
    del params, extra
    kept, times = state
    fresh = noisy(key, jax.tree.map(jnp.zeros_like, updates), stddev)
    noise = jax.tree.map(lambda k, f: jnp.where(times == 0, f, k), kept, fresh)
    return jax.tree.map(jnp.add, clipped(updates), noise), (noise, times + 1)

  return optax.GradientTransformationExtraArgs(init, update)


BROKEN = {
  'noise of one key': (lambda key, u: noisy(jax.random.key(0), clipped(u), 2.0), 2.0),
  'clip after noise': (lambda key, u: clipped(noisy(key, u, 2.0)), 2.0),
  'no clip': (lambda key, u: noisy(key, u, 2.0), 2.0),
  'half of the noise': (lambda key, u: noisy(key, clipped(u), 1.0), 2.0),
}


@pytest.mark.long
def test_a_correct_wrapper_is_consistent(scenario):
  made = stating(on_upload(lambda key, u: noisy(key, clipped(u), 2.0)), 2.0, 'correct')
  rows = audited(scenario, [made], rounds=2, confidence=SURE)
  assert set(verdicts(rows).values()) == {'consistent'}
  assert rows['correct', GAUSSIAN]['measured'] > 0.5 * rows['correct', GAUSSIAN]['stated']


@pytest.mark.long
@pytest.mark.parametrize('name', BROKEN)
def test_broken_mechanisms(scenario, name):
  change, noise = BROKEN[name]
  rows = audited(scenario, [stating(on_upload(change), noise, name)], uploads=10_000)
  assert rows[name, GAUSSIAN]['verdict'] == 'broken'
  if name != 'half of the noise':  # which many more uploads show without the assumption
    assert rows[name, ANY]['verdict'] == 'broken'


@pytest.mark.long
def test_noise_that_is_reused_in_rounds(scenario):
  made = stating(reused(4.0), 4.0, 'reused')
  once, twice = (audited(scenario, [made], rounds=rounds) for rounds in (1, 2))
  assert set(verdicts(once).values()) == {'consistent'}
  assert set(verdicts(twice).values()) == {'broken'}


@pytest.mark.long
def test_sensitivity_that_is_off_by_two(scenario):
  """The ε of 'replace by zeros' is stated for 'replace one', in which the sum moves twice as far."""
  for name, make in FACTORIES.items():
    mechanism = Mechanism(3.7303, 'client' if name == 'client_dp' else 'example')
    half = differential_privacy.of_upload(mechanism, 'replace by zeros', delta=DELTA, accountant='pld')
    assert half.value == pytest.approx(1, abs=0.01)
    claims = {name: dataclasses.replace(half, relation='replace one')}
    given = {name: make(norm=1.0, noise=mechanism.noise)}
    rows = audited(scenario, given, stated=claims, uploads=40_000, canaries=0)
    assert set(verdicts(rows).values()) == {'broken'}, rows


def shuffled(sampling, steps=4, noise=0.4):
  """Returns the release of an epoch whose noisy sums are all published, and the logarithm of its likelihood ratio."""

  def release(key, inside):
    place, draw = jax.random.split(key)
    if sampling == 'shuffled':
      taken = jnp.arange(steps) == jax.random.randint(place, (), 0, steps)
    else:
      taken = jax.random.bernoulli(place, 1 / steps, (steps,))
    return (jnp.where(inside & taken, 1.0, 0.0) + noise * jax.random.normal(draw, (steps,)))[:, None]

  def statistic(sums):
    ratios = (2 * sums[:, 0] - 1) / (2 * noise**2)
    if sampling == 'shuffled':
      return jax.nn.logsumexp(ratios) - jnp.log(steps)
    return jnp.sum(jnp.logaddexp(jnp.log1p(-1 / steps), ratios - jnp.log(steps)))

  return release, statistic


@pytest.mark.slow
def test_shuffling_that_is_accounted_as_poisson_sampling():
  """An example that is in one batch of four for certain is told from none more often than one that may be in none."""
  stated = differential_privacy.epsilon(
    0.4, 'add or remove one', steps=4, sampling_rate=0.25, delta=0.4, accountant='pld'
  )
  found = {}
  for sampling in ('shuffled', 'Poisson'):
    release, statistic = shuffled(sampling)
    measured = study.measure(jax.random.key(2), release, delta=0.4, uploads=10_000, statistic=statistic)
    found[sampling] = study.verdict(stated, measured[ANY].epsilon)
  assert found == {'shuffled': 'broken', 'Poisson': 'consistent'}


# What is refused, kept and written.


def test_verdicts():
  table = {(1.0, 1.1): 'broken', (1.0, 1.0): 'consistent', (None, 9.0): 'no stated ε', (math.inf, 9.0): 'no stated ε'}
  assert {pair: study.verdict(*pair) for pair in table} == table


def test_too_few_canaries_for_a_run_are_refused_before_it(scenario):
  with pytest.raises(gl.UsageError, match='canaries is 3, expected 0 for none, or at least 4'):
    audited(scenario, gl.defenses.dpsgd(norm=1.0, noise=1.0), canaries=3)


def test_what_is_refused(scenario):
  one = gl.defenses.client_dp(norm=1.0, noise=1.0)
  claim = Epsilon(1.0, 'add or remove one', 'client', 'one upload')
  with pytest.raises(gl.UsageError, match='measured for'):
    audited(scenario, {'a': one}, stated={'a': claim})
  with pytest.raises(gl.UsageError, match="'b'"):
    audited(scenario, {'a': one}, stated={'b': claim})
  own = dataclasses.replace(claim, relation='replace one', delta=DELTA)
  with pytest.raises(gl.UsageError, match=r'stated for one upload, .* \(rounds=3\): state that of all uploads'):
    audited(scenario, {'a': one}, stated={'a': own}, rounds=3)
  with pytest.raises(gl.UsageError, match='stated for all global models'):
    audited(scenario, {'a': one}, stated={'a': dataclasses.replace(own, published='all global models')})
  with pytest.raises(gl.UsageError, match='gradient is zero'):
    audited(scenario, one, neighbours='own', relation='replace by zeros')
  with pytest.raises(gl.UsageError, match='too few'):
    audited(scenario, one, neighbours='own', samples=24)
  with pytest.raises(gl.UsageError, match="choose neighbours='own'"):
    audited(scenario, gl.defenses.soteria(rate=0.5))
  named = optax.stateless(lambda updates, params: {**updates, 'Dense_0': updates['Dense_0']})
  first = gl.defenses.defense(arguments=lambda context, settings: (context.layers[0],))
  for own in (wrap(named, 'upload'), first(lambda layer: optax.identity())()):
    with pytest.raises(gl.UsageError, match="the canary's model does not have: choose neighbours='own'"):
      audited(scenario, own)
  with pytest.raises(gl.UsageError, match='relation'):
    audited(scenario, one, relation='add or remove one')
  with pytest.raises(gl.UsageError, match='scenario'):
    gl.audit_epsilon(jax.random.key(0), None, one)


@pytest.mark.long
def test_a_run_goes_on_and_is_written(scenario, tmp_path, monkeypatch):
  one, other = gl.defenses.client_dp(norm=1, noise=1), gl.defenses.clip(norm=1)
  key = jax.random.key(0)
  first = gl.audit_epsilon(key, scenario, [one], workdir=tmp_path / 'run', uploads=400, progress='none')
  measured = []
  real = study.measure
  monkeypatch.setattr(study, 'measure', lambda *args, **options: measured.append(1) or real(*args, **options))
  both = gl.audit_epsilon(key, scenario, [one, other], workdir=tmp_path / 'run', uploads=400, progress='none')
  assert both.rows[:2] == first.rows and len(both.rows) == 3 and len(measured) == 1
  with pytest.raises(gl.UsageError, match='uploads was 400'):
    gl.audit_epsilon(key, scenario, [one], workdir=tmp_path / 'run', uploads=800, progress='none')
  gl.report.write(both, tmp_path / 'run')
  lines = [json.loads(line) for line in (tmp_path / 'run' / 'rows.jsonl').read_text('utf-8').splitlines()]
  assert lines == both.rows
  header, *cells = (tmp_path / 'run' / 'epsilon.csv').read_text('utf-8').splitlines()
  assert header.startswith('defense,relation,unit') and len(cells) == 3
  table = gl.report.epsilon_table(both)
  assert 'client_dp(norm=1,noise=1)' in table and 'consistent' in table and 'no stated ε' in table
  assert 'replace one' in table and '95 %' in table


@pytest.mark.long
def test_a_folder_that_grows_tells_labels_apart_that_differ_in_case_alone(scenario, tmp_path):
  noisy, noisier = (gl.defenses.client_dp(norm=1, noise=noise) for noise in (1, 4))
  settings = {'uploads': 64, 'progress': 'none'}
  key, workdir = jax.random.key(0), tmp_path / 'run'
  first = gl.audit_epsilon(key, scenario, {'DP': noisier}, workdir=workdir, **settings)
  grown = gl.audit_epsilon(key, scenario, {'dp': noisy, 'DP': noisier}, workdir=workdir, **settings)
  alone = gl.audit_epsilon(key, scenario, {'dp': noisy}, **settings)
  assert grown.rows == alone.rows + first.rows


def test_the_table_names_what_is_broken(scenario):
  made = stating(on_upload(lambda key, u: u), 2.0, 'mine')
  found = gl.audit_epsilon(jax.random.key(0), scenario, [made], uploads=2000, progress='none')
  assert 'mine does not keep the ε that it states' in ' '.join(gl.report.epsilon_table(found).split())
