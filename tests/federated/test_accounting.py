"""ε over the rounds of a training, against dp_accounting's own events and composition."""

import itertools
import math

import dp_accounting
import pytest
from dp_accounting import pld, rdp

from gradleak import errors
from gradleak.defenses import differential_privacy
from gradleak.defenses.guarantees import Mechanism
from gradleak.federated import accounting

ACCOUNTANTS = {'rdp': rdp.RdpAccountant, 'pld': pld.PLDAccountant}


def direct(event, count, delta, accountant):
  """Returns the ε of `count` of the event."""
  composed = dp_accounting.SelfComposedDpEvent(event, count)
  return ACCOUNTANTS[accountant]().compose(composed).get_epsilon(delta)


@pytest.mark.parametrize('accountant', ACCOUNTANTS)
@pytest.mark.parametrize(
  ('defense', 'settings', 'event', 'count'),
  [
    # 7 of 30 rounds: what the others send costs this client nothing, and the server sees that it sends.
    ('client_dp(norm=0.5,noise=4)', {'sampling_rate': 0.1}, dp_accounting.GaussianDpEvent(4.0), 7),
    ('clip(norm=2)+gaussian(stddev=8)', {'delta': 1e-3, 'epochs': 5}, dp_accounting.GaussianDpEvent(4.0), 7),
    ('dpsgd(norm=3,noise=6)', {'epochs': 3}, dp_accounting.GaussianDpEvent(6.0), 3 * 7),
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
  ledger = accounting.ledger(defense, **settings, accountant=accountant)
  expected = direct(event, count, settings.get('delta', 1e-5), accountant)
  assert ledger.epsilon(30, 7) == pytest.approx(expected, rel=1e-9)
  assert 0.1 < expected < 50
  for wrong in (count - 1, count + 1):
    assert ledger.epsilon(30, 7) != pytest.approx(direct(event, wrong, ledger.delta, accountant), rel=1e-3)


def test_the_least_that_holds():
  both = accounting.ledger('client_dp(norm=1,noise=4)', server_noise=2.0, sampling_rate=0.1)
  client = accounting.ledger('client_dp(norm=1,noise=4)')
  server = accounting.ledger('none', server_noise=2.0, sampling_rate=0.1)
  assert both.epsilon(50, 1) == client.epsilon(50, 1) < server.epsilon(50, 1)
  assert both.epsilon(50, 50) == server.epsilon(50, 50) < client.epsilon(50, 50)
  twice = accounting.ledger('client_dp(norm=1,noise=4)+client_dp(norm=1,noise=2)')
  assert twice.epsilon(9, 3) == client.epsilon(9, 3)


def test_units_are_not_mixed():
  """Noise that hides examples, however strong, is no bound on what is learnt of a client."""
  dpsgd = 'dpsgd(norm=1,noise=50)'
  example, client = accounting.ledger(dpsgd), accounting.ledger('client_dp(norm=1,noise=4)')
  together = accounting.ledger(f'{dpsgd}+client_dp(norm=1,noise=4)')
  server = accounting.ledger(dpsgd, server_noise=1.0, sampling_rate=0.5)
  assert [each.unit for each in (example, client, together, server)] == ['example', 'client', 'client', 'client']
  assert example.epsilon(5, 5) < client.epsilon(5, 5) == together.epsilon(5, 5)
  assert server.epsilon(5, 5) == accounting.ledger('none', server_noise=1.0, sampling_rate=0.5).epsilon(5, 5)


def test_captions():
  assert accounting.caption(accounting.ledger('dpsgd(norm=1,noise=1)')) == 'per example'
  assert accounting.caption(accounting.ledger('client_dp(norm=1,noise=1)')) == 'per client'
  server = accounting.ledger('client_dp(norm=1,noise=1)', server_noise=1.0)
  assert accounting.caption(server) == 'per client, of the global models, not of the uploads'


def test_before_anything_is_published_nothing_is_spent():
  for ledger in (
    accounting.ledger('client_dp(norm=1,noise=1e-3)'),
    accounting.ledger('none', server_noise=1e-3),
    accounting.Ledger(()),
  ):
    assert ledger.epsilon(0, 0) == 0
  assert accounting.ledger('client_dp(norm=1,noise=1)').epsilon(3, 0) == 0
  # The server's noise is accounted for as if nobody knew who took part.
  server = accounting.ledger('none', server_noise=1.0, sampling_rate=0.5)
  assert server.epsilon(3, 0) == server.epsilon(3, 3) > 1


def test_where_nothing_covers_it():
  assert accounting.Ledger(()).epsilon(1, 1) == math.inf
  assert accounting.Ledger((Mechanism(1e-200, 'client', 1),)).epsilon(1, 1) == math.inf
  for defense in ('none', 'gaussian(stddev=1)', 'topk(ratio=0.1)+client_dp(norm=1,noise=1)', 'mine'):
    assert accounting.ledger(defense) is None
    assert accounting.ledger(defense, server_noise=1.0) is not None


@pytest.mark.parametrize(('noise', 'rate', 'budget'), [(1.5, 0.1, 2.0), (4.0, 1.0, 3.0)])
def test_the_round_at_which_a_budget_is_spent(noise, rate, budget):
  ledger = accounting.ledger('none', server_noise=noise, sampling_rate=rate)
  within = next(n for n in itertools.count() if ledger.epsilon(n + 1, 1) > budget)
  assert within == differential_privacy.rounds_within(budget, 1e-5, noise=noise, sampling_rate=rate)
  assert 5 < within < 30


def test_the_same_figure_is_computed_once():
  ledger = accounting.ledger('client_dp(norm=1,noise=3.21)', server_noise=4.32)
  found = ledger.epsilon(20, 2)
  misses = accounting._epsilon.cache_info().misses
  again = accounting.ledger('client_dp(norm=9,noise=3.21)', server_noise=4.32)
  assert again.epsilon(20, 2) == found
  assert accounting._epsilon.cache_info().misses == misses
  assert again.epsilon(21, 2) == found  # the client's, which is the less, is spent as it was


@pytest.mark.parametrize(
  ('settings', 'words'),
  [
    ({'server_noise': -1.0}, 'server_noise is -1'),
    ({'server_noise': math.inf}, 'server_noise is inf'),
    ({'sampling_rate': 0.0}, 'sampling_rate is 0'),
    ({'sampling_rate': 1.1}, 'nearest valid value is 1'),
    ({'delta': 0.0}, 'delta is 0'),
    ({'accountant': 'rpd'}, "did you mean 'rdp'"),
    ({'epochs': 0}, 'epochs is 0'),
  ],
)
def test_bad_settings_are_named(settings, words):
  with pytest.raises(errors.UsageError) as caught:
    accounting.ledger('dpsgd(norm=1,noise=1)', **settings)
  assert words in str(caught.value)


@pytest.mark.parametrize(
  ('rounds', 'participations', 'words'),
  [(-1, 0, 'rounds is -1'), (1.5, 1, 'rounds is 1.5'), (3, -1, 'participations is -1'), (3, 4, 'participations is 4')],
)
def test_bad_counts_are_named(rounds, participations, words):
  with pytest.raises(errors.UsageError) as caught:
    accounting.ledger('client_dp(norm=1,noise=1)').epsilon(rounds, participations)
  assert words in str(caught.value)
