"""Uploads of a client that keeps its state between rounds: what it sends, and the size of the program."""

import jax
import numpy as np
import pytest

import gradleak as gl
from gradleak.audit.uploads import Send, SendInTurn
from gradleak.defenses import bind
from gradleak.studies import epsilon

pytestmark = pytest.mark.usefixtures('fast_compilation')
IMAGES = np.random.default_rng(0).uniform(size=(2, 2, 2, 1)).astype(np.float32)
LABELS = np.array([0, 1], np.int32)


@pytest.fixture(scope='module')
def made():
  """A scenario, DGC bound to it, and the client under it."""
  scenario = gl.scenario(gl.models.mlp(2, widths=8), IMAGES, LABELS, key=jax.random.key(0))
  bound = bind(gl.defenses.dgc(ratio=0.2), scenario.context)
  return scenario, bound, bound.build(bound.defense.numbers, scenario.client)


@pytest.mark.long
def test_each_round_sends_what_a_client_with_that_state_does(made):
  scenario, _, client = made
  keys = jax.random.split(jax.random.key(1), 4)
  found = jax.jit(client.in_turn)(keys, scenario.variables, IMAGES, LABELS)
  participate, state = jax.jit(client.participate), None
  for i, key in enumerate(keys):
    upload, state, _ = participate(key, scenario.variables, IMAGES, LABELS, None, state)
    for one, many in zip(jax.tree.leaves(upload), jax.tree.leaves(found), strict=True):
      np.testing.assert_allclose(np.asarray(many)[i], np.asarray(one), rtol=1e-5, atol=1e-7)
  kernels = [np.asarray(layer['kernel']) for layer in found.update.values()]
  assert any(not np.array_equal(each[0], each[1]) for each in kernels)  # what was not sent is added to the next
  alone = jax.jit(client.in_turn)(keys[:1], scenario.variables, IMAGES, LABELS)
  np.testing.assert_array_equal(alone.num_samples, [2])


def test_many_rounds_make_no_larger_program(made):
  scenario, bound, client = made
  shared = {'variables': scenario.variables, 'samples': IMAGES[np.newaxis], 'targets': LABELS[np.newaxis]}
  lane = {'trial': np.int32(0), 'numbers': bound.defense.numbers}

  def of_audit(keys):
    return SendInTurn(Send.of(bound, scenario.client))(shared, {**lane, 'key': keys})

  def of_epsilon(keys):
    return epsilon._sent(client, scenario.variables, keys[0], IMAGES, LABELS, len(keys))

  for program in (of_audit, of_epsilon):
    few, many = (jax.make_jaxpr(program)(jax.random.split(jax.random.key(1), number)) for number in (3, 30))
    assert len(many.jaxpr.eqns) <= len(few.jaxpr.eqns) + 2
