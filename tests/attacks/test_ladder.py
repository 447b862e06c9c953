"""The ladder of smoothness: which rung is kept, what each rung minimises, and the sign of a gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradleak as gl
from gradleak import attacks
from gradleak.attacks.matching import ladder, simulation, terms
from gradleak.attacks.matching.distances import cosine
from tests.attacks.test_attack_contract import KEY, observed, whole

pytestmark = pytest.mark.usefixtures('fast_compilation')


@pytest.mark.parametrize(
  ('distances', 'slack', 'expected'),
  [
    ([1.0, 1.0, 1.0], 1.0, 2),  # all match alike: the smoothest
    ([1e-3, 1.9e-3, 2.1e-3], 2.0, 1),  # the last is beyond the slack
    ([1e-3, 1.9e-3, 2.1e-3], 3.0, 2),
    ([4e-3, 1e-3, 5e-3], 2.0, 1),  # the least is no end of the ladder
    ([1e-3, np.inf, np.nan], 2.0, 0),  # diverged
    ([np.inf, 1e-2, np.nan], 2.0, 1),
    ([np.nan, np.inf, np.inf], 2.0, 0),  # none is left
    ([-1.2e-8, -1.0e-8, 5e-9], 2.0, 2),  # all are zero up to rounding
    ([-1.2e-8, 4e-8, 1e-6], 2.0, 1),
  ],
)
def test_the_smoothest_that_still_matches_is_kept(distances, slack, expected):
  assert int(ladder.smoothest(jnp.asarray(distances), slack)) == expected


def test_weights_rise_by_equal_factors():
  np.testing.assert_allclose(ladder.weights(1e-6, 1e-2, 3), [1e-6, 1e-4, 1e-2], rtol=1e-5)
  np.testing.assert_allclose(ladder.weights(1e-4, 1e-1, 4), [1e-4, 1e-3, 1e-2, 1e-1], rtol=1e-5)


@pytest.fixture(scope='module')
def seen():
  """Returns (client, `Observation`) of one digit."""
  method = attacks.ladder()
  return observed(method, (8, 8, 1), 1, granted=True)


def run(method, client, observation):
  return jax.jit(lambda: whole(method(client), KEY, observation))()


SETTINGS = {'steps': 30, 'learning_rate': 0.05, 'start': 'uniform'}


@pytest.mark.slow
def test_without_a_descent_a_rung_is_csdlg_at_its_weight(seen):
  """The one that is kept is known from the distances of three runs of csdlg."""
  client, observation = seen
  alone = [
    run(attacks.csdlg(tv=tv, decay='cosine', **SETTINGS), client, observation) for tv in (1e-4, 3.1622776e-3, 1e-1)
  ]
  for slack in (1.0, 1e6):
    method = attacks.ladder(lowest=1e-4, highest=1e-1, rungs=3, slack=slack, descent=1.0, **SETTINGS)
    found = run(method, client, observation)
    expected = alone[int(ladder.smoothest(jnp.stack([one.distance for one in alone]), slack))]
    np.testing.assert_allclose(found.samples, expected.samples, atol=1e-3)
    np.testing.assert_allclose(found.distance, expected.distance, rtol=1e-3, atol=1e-6)
    at = method(client).objective(observation, found.samples, observation.targets)
    np.testing.assert_allclose(found.objective, at, rtol=1e-3, atol=1e-6)  # comparable with that at the truth
    np.testing.assert_allclose(found.objective_start, alone[0].objective_start, rtol=1e-4)


@pytest.mark.long
def test_a_rung_starts_smoother_than_it_ends(seen):
  """All rungs start alike, so that the last is reported first: its weight is 100-fold, then less in each step."""
  client, observation = seen
  given = {'rungs': 2, 'lowest': 1e-3, 'highest': 1e-2, 'steps': 10, 'start': 'uniform', 'learning_rate': 1e-9}
  told = {}
  for descent in (1.0, 100.0):
    attack = attacks.ladder(descent=descent, **given)(client)
    state, step, told[descent] = jax.jit(attack.init)(KEY, observation), jax.jit(attack.step), []
    for _ in range(10):
      state, info = step(state, observation)
      told[descent].append(float(info['objective']))
  smoothness = float(terms.total_variation(state.dummy['images'][1]))
  factors = (np.asarray(told[100.0]) - np.asarray(told[1.0])) / (1e-2 * smoothness) + 1
  expected = 100.0 ** np.maximum(0, 1 - np.arange(10) / 7)
  np.testing.assert_allclose(factors, expected, rtol=1e-2)


@pytest.mark.long
@pytest.mark.parametrize('make', [attacks.ladder, attacks.annealed])
def test_the_objective_of_a_search_that_does_not_move_is_that_of_its_start(seen, make):
  client, observation = seen
  found = run(make(steps=3, start='uniform', learning_rate=1e-9), client, observation)
  np.testing.assert_allclose(found.objective, found.objective_start, rtol=1e-4)


@pytest.mark.long
def test_a_rung_that_diverges_leaves_the_others(seen):
  client, observation = seen
  attack = attacks.ladder(rungs=2, steps=3)(client)
  state = jax.jit(attack.init)(KEY, observation)
  images = state.dummy['images'].at[1].set(jnp.nan)
  state = state._replace(dummy={**state.dummy, 'images': images})
  for _ in range(3):
    state, info = jax.jit(attack.step)(state, observation)
  found = jax.jit(attack.reconstruct)(state, observation)
  assert np.isfinite(found.samples).all() and int(found.diverged_step) == -1 and np.isfinite(float(info['objective']))
  everything = state._replace(
    dummy=jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), state.dummy), diverged_step=jnp.zeros(2, jnp.int32)
  )
  lost = jax.jit(attack.reconstruct)(everything, observation)
  assert int(lost.diverged_step) == 0 and np.isnan(float(lost.objective))


@pytest.mark.parametrize(
  ('settings', 'message'),
  [
    ({'rungs': 1}, 'rungs is 1'),
    ({'slack': 0.9}, 'slack is 0.9'),
    ({'descent': 0.0}, 'descent is 0.0'),
    ({'lowest': 1e-1, 'highest': 1e-2}, 'lowest is 0.1 and highest 0.01, expected a lower and a higher one'),
  ],
)
def test_ladders_that_are_none_are_refused(settings, message):
  with pytest.raises(gl.UsageError, match=message):
    attacks.ladder(**settings)(None)


def test_a_softened_sign():
  gradient = {'a': jnp.asarray([3.0, -4.0, 0.0, 0.0]), 'b': jnp.zeros(2)}
  soft = simulation.softened(gradient)
  size = np.sqrt(25 / 4)
  np.testing.assert_allclose(soft['a'], [3 / np.hypot(3, size), -4 / np.hypot(4, size), 0, 0], rtol=1e-6)
  np.testing.assert_array_equal(soft['b'], [0, 0])
  slope = jax.grad(lambda g: jnp.sum(simulation.softened({'a': g})['a']))(gradient['b'])
  assert np.isfinite(slope).all()


@pytest.mark.long
@pytest.mark.parametrize('share', ['gradient', 'delta'])
def test_signs_are_matched_in_the_direction_of_the_update(seen, share):
  """At the truth the softened gradient is nearer to Adam's signs than anything that points the other way."""
  client, observation = seen
  settings = gl.ClientSettings(share=share, **({'optimizer': 'adam'} if share == 'delta' else {}))
  client = settings.client(client.model, 10)
  images = jnp.asarray(gl.data.load('digits', limit=1).samples)
  sent = jax.jit(client.local_update)(None, observation.variables, images, observation.targets).update
  signs = jax.tree.map(jnp.sign, sent)
  simulated = simulation.Simulation(match='sign').update(client, observation.variables, images, observation.targets)
  near, far = (float(cosine(one, signs)) for one in (simulated, jax.tree.map(jnp.negative, simulated)))
  assert near < 0.5 < 1.5 < far
  assert 'for the sign of the gradient' in attacks.ladder(match='sign')(client).assumes


def test_signs_are_no_plain_gradients(seen):
  client, observation = seen
  for settings in ({'form': 'ghost'}, {'subset': 1}):
    with pytest.raises(gl.UsageError, match=r'plain gradients|mean gradient'):
      made = attacks.csdlg(match='sign', steps=2, **settings)(client)
      jax.eval_shape(lambda made=made: made.step(made.init(KEY, observation), observation))


@pytest.mark.parametrize('make', [gl.attacks.csdlg, gl.attacks.ladder])
def test_a_start_from_public_data_is_declared(make):
  client = gl.Client(gl.models.create('mlp(widths=4)', 3), num_classes=3)
  assert make(start='class_average')(client).auxiliary_data
  assert not make()(client).auxiliary_data
