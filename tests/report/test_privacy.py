"""The ε that the report states: the law behind it, and where none may be stated."""

import re

import jax
import optax
import pytest

import gradleak as gl
from gradleak.audit.plan import plan
from gradleak.audit.result import methods
from gradleak.audit.settings import AuditSettings
from gradleak.defenses import differential_privacy
from gradleak.report import privacy
from tests.report import facts


def guarantee(defense, epochs=1):
  return privacy.guarantee(facts.of_defense(defense, epochs))


def figures(statement):
  """Returns {relation: (RDP's ε, PLD's)}."""
  found = re.findall(r'ε ≤ ([\d.]+) \(([a-z ]+); by RDP, ([\d.]+) by PLD\)', statement)
  return {relation: (float(rdp), float(pld)) for rdp, relation, pld in found}


def test_an_epsilon_of_zero_is_stated():
  """So much noise hides all but δ: the reports of such a defense ended in an error of a logarithm."""
  known = facts.of_defense('clip(norm=1)+gaussian(stddev=1e7)')
  assert privacy.brief(known) == 'ε ≤ 0' and privacy.guarantee(known).startswith('ε ≤ 0 (replace one; by RDP)')
  assert 'ε ≤ 0.0036 (replace one; by RDP, 0 by PLD), ε ≤ 0 (' in guarantee('clip(norm=1e-5)+gaussian(stddev=1)')


@pytest.mark.long
@pytest.mark.parametrize(
  ('defense', 'noise', 'unit'),
  [
    ('clip(norm=2)+gaussian(stddev=1.5)', 0.75, 'per client'),
    ('clip(norm=1)+dpsgd(norm=1,noise=0.7)', 0.7, 'per example'),
  ],
)
def test_the_bound_is_that_of_the_multiplier(defense, noise, unit):
  statement = guarantee(defense)
  assert statement.endswith(f'; {unit}, one upload, no sampling, δ = 1e-05')
  assert list(figures(statement)) == ['replace one', 'replace by zeros']
  for relation, moved in (('replace one', 2.0), ('replace by zeros', 1.0)):
    for figure, accountant in zip(figures(statement)[relation], ('rdp', 'pld'), strict=True):
      exact = differential_privacy.epsilon(noise / moved, 'add or remove one', steps=1, accountant=accountant)
      assert exact <= figure < exact * 1.1  # rounded up


@pytest.mark.long
def test_every_epoch_costs():
  once, thrice = (guarantee('dpsgd(norm=1,noise=2)', epochs) for epochs in (1, 3))
  assert figures(thrice)['replace one'][1] > 1.5 * figures(once)['replace one'][1]
  assert 'per example, one upload of 3 local epochs, no sampling' in thrice
  assert guarantee('client_dp(norm=1,noise=2)', 3) == guarantee('client_dp(norm=1,noise=2)')


def test_next_to_no_noise_is_no_protection():
  assert guarantee('client_dp(norm=1,noise=0.01)').startswith(
    'ε > 1000 (replace one): no protection in the sense of DP, ε > 1000 (replace by zeros): no protection'
  )
  assert guarantee('client_dp(norm=1,noise=1e-200)').startswith('ε > 1000')
  assert 'ε ≤ 97 (replace by zeros; by RDP);' in guarantee('clip(norm=1)+gaussian(stddev=0.1)')


@pytest.mark.parametrize(
  ('defense', 'said'),
  [
    ('gaussian(stddev=1)', privacy._MISSING['L2']),
    ('clip(norm=1)+laplace(scale=1)', privacy._MISSING['L1']),
    ('prune(rate=0.9)', None),
    (gl.defenses.wrap(optax.identity(), 'upload', label='dpsgd(norm=1,noise=2)'), None),
  ],
  ids=str,
)
def test_a_bound_that_is_missing_is_said(defense, said):
  assert guarantee(defense) == said


@pytest.mark.long
def test_statements_of_an_audit():
  defenses = ['none', 'dpsgd(norm=1,noise=2)', 'prune(rate=0.9)', 'gaussian(stddev=1)']
  assert privacy.statements(facts.of_defenses(defenses, epochs=3)) == {
    'dpsgd(norm=1,noise=2)': guarantee('dpsgd(norm=1,noise=2)', 3),
    'gaussian(stddev=1)': 'no ε: nothing bounds the norm of what the noise is added to',
  }
  assert 'epochs' not in privacy.statements(facts.of_defenses(defenses))['dpsgd(norm=1,noise=2)']
  assert privacy.statements({}) == {}


def test_the_epochs_of_a_guarantee_are_those_of_the_client(linear):
  """A delta releases an example in each local epoch, a gradient once."""
  settings = {'share': 'delta', 'local_epochs': 3}
  for client, releases in ((settings, 3), ({}, 1)):
    scenario = gl.scenario(linear.client.model, linear.samples, linear.targets, variables=linear.variables, **client)
    given = AuditSettings(controls=1, knowledge='non-adaptive')
    attacks, defenses = [gl.attacks.csdlg(steps=1)], [gl.defenses.dpsgd(norm=1, noise=2)]
    (defense,) = methods(plan(jax.random.key(0), scenario, defenses, attacks, 1, given))['defenses'].values()
    assert [one['releases'] for one in defense['mechanisms']] == [releases]


def test_a_label_promises_nothing():
  named = {
    'dpsgd(norm=1,noise=2)': gl.defenses.wrap(optax.identity(), 'upload'),
    'nothing': gl.defenses.dpsgd(norm=1, noise=2),
  }
  assert list(privacy.statements(facts.of_defenses(named))) == ['nothing']
