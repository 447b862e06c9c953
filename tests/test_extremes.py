"""Audits at the edge of what floats hold: never "protected" because an attack broke, and rows always strict JSON."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradleak as gl

pytestmark = pytest.mark.usefixtures('fast_compilation')
MODEL = gl.models.create('mlp(widths=8)', 10)
DEFENSES = [None, gl.defenses.prune(rate=0.5), gl.defenses.gaussian(stddev=0.01)]
ATTACKS = {'fidel': gl.attacks.fidel(), 'dlg': gl.attacks.dlg(steps=3, history=2)}


def scaled(factor):
  return lambda variables: jax.tree.map(lambda x: x * jnp.float32(factor), variables)


def dead(variables):
  """All ReLUs of the first layer are off: no gradient reaches it."""
  return jax.tree.map(lambda x: -jnp.ones_like(x), variables)


CASES = {
  'as it is': (lambda v: v, lambda x: x),
  'weights of 1e20': (scaled(1e20), lambda x: x),
  'weights of 1e-20': (scaled(1e-20), lambda x: x),
  'weights of zero': (scaled(0.0), lambda x: x),
  'a dead network': (dead, lambda x: x),
  'constant images': (lambda v: v, lambda x: np.full_like(x, 0.5)),
  'black images': (lambda v: v, np.zeros_like),
  'equal images': (lambda v: v, lambda x: np.repeat(x[:1], len(x), axis=0)),
}


@pytest.mark.long
@pytest.mark.parametrize('case', CASES)
@pytest.mark.parametrize('attack', ['fidel', pytest.param('dlg', marks=pytest.mark.slow)])
def test_what_breaks_an_attack_protects_nobody(case, attack, small_images):
  change, replace = CASES[case]
  images, labels = (part[:4] for part in small_images)
  variables = change(MODEL.init(jax.random.key(0), (8, 8, 1)))
  scenario = gl.scenario(MODEL, replace(images), labels, variables=variables)
  settings = {'batch_size': 2, 'controls': 2, 'progress': 'none', 'group_size': 2}
  found = gl.audit(jax.random.key(1), scenario, DEFENSES, [ATTACKS[attack]], 2, **settings)
  rows = [*found.rows, *found.controls]
  assert json.loads(json.dumps(rows, allow_nan=False)) == rows
  bare = {(row['attack'], row['trial']): row['verdict'] for row in found.rows if row['defense'] == 'none'}
  assert len(bare) == 2
  for row in found.rows:
    if row['verdict'] == 'nothing seen':
      assert row['defense'] != 'none' and bare[row['attack'], row['trial']] in ('exact', 'recognisable')
  gl.report.terminal_table(found)
