"""ε over the rounds of a training, against dp_accounting's own events and composition."""

import itertools
import math

import dp_accounting
import optax
import pytest
from dp_accounting import pld, rdp

import gradleak as gl
from gradleak.core import errors
from gradleak.defenses import differential_privacy
from gradleak.defenses.guarantees import Mechanism
from gradleak.federated import accounting

ACCOUNTANTS = {'rdp': rdp.RdpAccountant, 'pld': pld.PLDAccountant}


def ledger(text, **settings):
  """Returns the ledger of the defense that a text describes."""
  return accounting.ledger(gl.parse(text), **settings)


def direct(event, count, delta, accountant):
  """Returns the ε of `count` of the event."""
  composed = dp_accounting.SelfComposedDpEvent(event, count)
  return ACCOUNTANTS[accountant]().compose(composed).get_epsilon(delta)


@pytest.mark.long
@pytest.mark.parametrize('accountant', ACCOUNTANTS)
@pytest.mark.parametrize(
  ('defense', 'settings', 'event', 'count'),
  [
    # 7 of 30 rounds: what the others send costs this client nothing, and the server sees that it sends.
    # The server sees one contribution or another, which are twice the norm apart: half of the multiplier counts.
    ('client_dp(norm=0.5,noise=4)', {'sampling_rate': 0.1}, dp_accounting.GaussianDpEvent(2.0), 7),
    ('clip(norm=2)+gaussian(stddev=8)', {'delta': 1e-3, 'epochs': 5}, dp_accounting.GaussianDpEvent(2.0), 7),
    ('dpsgd(norm=3,noise=6)', {'epochs': 3}, dp_accounting.GaussianDpEvent(3.0), 3 * 7),
    (
      'none',
      {'server_noise': 1.5, 'sampling_rate': 0.2, 'delta': 1e-4},
      dp_accounting.PoissonSampledDpEvent(0.2, dp_accounting.GaussianDpEvent(1.5)),
      30,
    ),
    ('prune(rate=0.5)', {'server_noise': 4.0}, dp_accounting.GaussianDpEvent(4.0), 30),
  ],
)
def test_epsilon_is_that_of_the_events(defense, settings, event, count, accountant):
  found = ledger(defense, **settings, accountant=accountant)
  expected = direct(event, count, settings.get('delta', 1e-5), accountant)
  assert found.epsilon(30, 7).value == pytest.approx(expected, rel=1e-9)
  assert 0.1 < expected < 60
  for wrong in (count - 1, count + 1) if accountant == 'rdp' else ():  # the count is of the ledger, and PLD is slow
    assert found.epsilon(30, 7).value != pytest.approx(direct(event, wrong, found.delta, accountant), rel=1e-3)


def test_the_least_that_holds():
  both = ledger('client_dp(norm=1,noise=4)', server_noise=2.0, sampling_rate=0.1)
  client = ledger('client_dp(norm=1,noise=8)')  # in the relation of both, its noise counts twice as much
  server = ledger('none', server_noise=2.0, sampling_rate=0.1)
  assert both.epsilon(50, 1).value == client.epsilon(50, 1).value < server.epsilon(50, 1).value
  assert both.epsilon(50, 50).value == server.epsilon(50, 50).value < client.epsilon(50, 50).value
  twice = ledger('client_dp(norm=1,noise=8)+client_dp(norm=1,noise=2)')
  assert twice.epsilon(9, 3) == client.epsilon(9, 3)


def test_units_are_not_mixed():
  """Noise that hides examples, however strong, is no bound on what is learnt of a client."""
  dpsgd = 'dpsgd(norm=1,noise=50)'
  example, client = ledger(dpsgd), ledger('client_dp(norm=1,noise=4)')
  together = ledger(f'{dpsgd}+client_dp(norm=1,noise=4)')
  server = ledger(dpsgd, server_noise=1.0, sampling_rate=0.5)
  assert [each.unit for each in (example, client, together, server)] == ['example', 'client', 'client', 'client']
  assert example.epsilon(5, 5).value < client.epsilon(5, 5).value and client.epsilon(5, 5) == together.epsilon(5, 5)
  assert server.epsilon(5, 5) == ledger('none', server_noise=1.0, sampling_rate=0.5).epsilon(5, 5)


@pytest.mark.parametrize(
  ('defense', 'settings', 'said'),
  [
    ('dpsgd(norm=1,noise=1)', {}, 'replace one, per example, all uploads, no sampling, δ = 1e-05, RDP'),
    (
      'client_dp(norm=1,noise=1)',
      {'accountant': 'pld'},
      'replace one, per client, all uploads, no sampling, δ = 1e-05, PLD',
    ),
    (
      'dpsgd(norm=1,noise=1)',
      {'server_noise': 1.0, 'sampling_rate': 0.1, 'delta': 1e-3},
      'add or remove one, per client, all global models, sampling of a fixed number at 0.1, accounted as Poisson, '
      'δ = 0.001, RDP',
    ),
    (
      'client_dp(norm=1,noise=1)',
      {'server_noise': 1.0},
      'replace by zeros, per client, all global models, no sampling, δ = 1e-05, RDP',
    ),
  ],
)
def test_an_epsilon_says_what_it_is_relative_to(defense, settings, said):
  found = ledger(defense, **settings)
  assert found.epsilon(3, 2).said == said and found.terms == found.epsilon(3, 2).terms


def test_before_anything_is_published_nothing_is_spent():
  for each in (
    ledger('client_dp(norm=1,noise=1e-3)'),
    ledger('none', server_noise=1e-3),
    accounting.Ledger(()),
  ):
    assert each.epsilon(0, 0).value == 0
  assert ledger('client_dp(norm=1,noise=1)').epsilon(3, 0).value == 0
  # The server's noise is accounted for as if nobody knew who took part.
  server = ledger('none', server_noise=1.0, sampling_rate=0.5)
  assert server.epsilon(3, 0) == server.epsilon(3, 3) and server.epsilon(3, 3).value > 1


def test_where_nothing_covers_it():
  assert accounting.Ledger(()).epsilon(1, 1).value == math.inf
  assert accounting.Ledger((Mechanism(1e-200, 'client', 1),)).epsilon(1, 1).value == math.inf
  texts = 'none', 'gaussian(stddev=1)', 'topk(ratio=0.1)+client_dp(norm=1,noise=1)'
  for defense in (None, gl.defenses.wrap(optax.scale(0.5), 'upload'), *map(gl.parse, texts)):
    assert accounting.ledger(defense) is None
    assert accounting.ledger(defense, server_noise=1.0) is not None


def test_epsilon_follows_the_object():
  """Equal objects have equal ε, whatever they are called; another noise is another ε."""
  given = gl.defenses.client_dp(norm=1.0, noise=4.0)
  wrapped = gl.defenses.wrap(
    optax.identity(), 'upload', label='client_dp(norm=1,noise=4)', mechanism=lambda *_: Mechanism(2.0, 'client')
  )
  assert str(wrapped) == str(gl.parse('client_dp(norm=1,noise=4)'))
  assert accounting.ledger(given) == ledger('client_dp(norm=1,noise=4)')
  assert accounting.ledger(wrapped) == ledger('client_dp(norm=1,noise=2)') != accounting.ledger(given)


@pytest.mark.slow
@pytest.mark.parametrize(('noise', 'rate', 'budget'), [(1.5, 0.1, 2.0), (4.0, 1.0, 3.0)])
def test_the_round_at_which_a_budget_is_spent(noise, rate, budget):
  server = ledger('none', server_noise=noise, sampling_rate=rate)
  within = next(n for n in itertools.count() if server.epsilon(n + 1, 1).value > budget)
  assert within == differential_privacy.rounds_within(budget, 1e-5, noise=noise, sampling_rate=rate)
  assert 5 < within < 30


def test_the_same_figure_is_computed_once():
  differential_privacy._composed.cache_clear()
  found = ledger('client_dp(norm=1,noise=3.21)', server_noise=4.32).epsilon(20, 2)
  misses = differential_privacy._composed.cache_info().misses
  assert misses == 2  # the client's and the server's
  again = ledger('client_dp(norm=9,noise=3.21)', server_noise=4.32)
  assert again.epsilon(20, 2) == found
  assert differential_privacy._composed.cache_info().misses == misses
  assert again.epsilon(21, 2) == found  # the client's, which is the less, is spent as it was


def test_nobody_takes_part_in_more_rounds_than_there_are():
  with pytest.raises(errors.UsageError, match='participations is 4'):
    ledger('client_dp(norm=1,noise=1)').epsilon(3, 4)
