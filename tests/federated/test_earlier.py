import dataclasses

import jax
import numpy as np
import pytest

import gradleak as gl
from gradleak import UsageError
from gradleak.federated.earlier import earlier
from tests.attackers import divide


def moved(linear, **options):
  current, previous = earlier(
    jax.random.key(2), linear.client, linear.variables, linear.samples, linear.targets, **options
  )
  return jax.tree.map(lambda a, b: np.asarray(a - b), current['params'], previous['params']), previous


def test_one_round_is_a_step_along_the_mean_gradient_of_all_clients(linear):
  step, previous = moved(linear, clients=4, rate=0.5)
  gradient = jax.jit(linear.client.local_update)(None, linear.variables, linear.samples, linear.targets).update
  for ours, theirs in zip(jax.tree.leaves(step), jax.tree.leaves(gradient), strict=True):
    np.testing.assert_allclose(ours, -0.5 * theirs, atol=1e-6)
  assert all(map(np.array_equal, jax.tree.leaves(previous), jax.tree.leaves(linear.variables)))


def test_a_cohort_changes_nothing(linear):
  one, _ = moved(linear, clients=2)
  cohort = linear._replace(client=dataclasses.replace(linear.client, cohort=4))
  assert all(map(np.array_equal, jax.tree.leaves(one), jax.tree.leaves(moved(cohort, clients=2)[0])))


def test_what_only_the_audited_client_can_keep_to_changes_nothing(linear):
  """Its order of samples, its private layers, and a batch that the clients of these rounds do not fill."""
  local = dataclasses.replace(linear.client, share='delta')
  own = dataclasses.replace(local, order=(tuple(range(8)),), private=('kernel',), batch_size=5, drop_last=True)
  steps, _ = zip(*(moved(linear._replace(client=client), clients=2) for client in (local, own)), strict=True)
  assert all(map(np.array_equal, *map(jax.tree.leaves, steps))) and np.any(steps[0]['kernel'])


def test_of_several_rounds_the_last_two_models_are_returned(linear):
  current, previous = earlier(
    jax.random.key(2), linear.client, linear.variables, linear.samples, linear.targets, rounds=2, clients=2, rate=0.5
  )
  first, _ = earlier(
    jax.random.key(2), linear.client, linear.variables, linear.samples, linear.targets, clients=2, rate=0.5
  )
  assert all(map(np.array_equal, jax.tree.leaves(previous), jax.tree.leaves(first)))
  assert not np.array_equal(current['params']['kernel'], previous['params']['kernel'])


def test_a_client_has_an_image(linear):
  with pytest.raises(UsageError, match='clients is 9'):
    moved(linear, clients=9)


@pytest.mark.slow
def test_fragmentation_at_a_first_participation_is_said_to_be_random(linear):
  """Rows, methods, page and terminal say so; with an earlier model, layers are chosen, and nothing is said."""
  current, previous = earlier(
    jax.random.key(2), linear.client, linear.variables, linear.samples, linear.targets, clients=2
  )
  attack, settings = gl.attacks.wrap(divide), {'controls': 2, 'knowledge': 'non-adaptive', 'progress': 'none'}
  defense = gl.defenses.fragmentation(ratio=0.5)
  first, later = (
    gl.audit(jax.random.key(1), scenario, [None, defense], [attack], 1, **settings)
    for scenario in (linear, linear.trained(current, previous))
  )
  words = 'first participation: layers are random'
  assert [row['remark'] for row in first.rows] == ['', words] and [row['remark'] for row in later.rows] == ['', '']
  assert f'{defense}: {words}.' in ' '.join(gl.report.terminal_table(first).split())
  assert words not in gl.report.terminal_table(later)
  assert 'previous_fingerprint' in later.config and 'previous_fingerprint' not in first.config
  assert first.config['weights_fingerprint'] != later.config['weights_fingerprint']


def test_weights_of_another_model_are_refused(linear):
  with pytest.raises(UsageError, match='variables'):
    linear.trained({'params': {}})
