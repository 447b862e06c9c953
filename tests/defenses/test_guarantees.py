"""Chains of defenses, read as Gaussian mechanisms: which noise, whom it hides, and where nothing may be claimed."""

import jax
import numpy as np
import pytest

from gradleak import defenses, errors
from gradleak.defenses.guarantees import Mechanism, mechanisms, missing_bound


@pytest.mark.parametrize(
  ('defense', 'expected'),
  [
    ('client_dp(norm=0.1,noise=3)', [Mechanism(3.0, 'client', 1)]),
    ('clip(norm=2)+gaussian(stddev=1.5)', [Mechanism(0.75, 'client', 1)]),
    ('client_dp(norm=4,noise=0)+gaussian(stddev=2)', [Mechanism(0.5, 'client', 1)]),
    ('dpsgd(norm=7,noise=2)', [Mechanism(2.0, 'example', 5)]),
    ('client_dp(norm=1,noise=3)+dpsgd(norm=1,noise=2)', [Mechanism(2.0, 'example', 5), Mechanism(3.0, 'client', 1)]),
    ('client_dp(norm=1,noise=3)+client_dp(norm=1,noise=2)', [Mechanism(3.0, 'client', 1), Mechanism(2.0, 'client', 1)]),
    ('fragmentation_random(ratio=0.5)+client_dp(norm=1,noise=3)', [Mechanism(3.0, 'client', 1)]),
    ('gaussian(stddev=1)', []),
    ('clip(norm=inf)+gaussian(stddev=1)', []),
    ('gaussian(stddev=1)+clip(norm=1)', []),
    ('client_dp(norm=1,noise=3)+dgc(ratio=0.5)', []),
    ('dpsgd(norm=1,noise=2)+clip_samples(norm=1)', []),
    ('none', []),
    ('mine', []),
  ],
)
def test_what_a_chain_amounts_to(defense, expected):
  assert mechanisms(defense, 5) == tuple(expected)


@pytest.mark.parametrize('choosing', ['topk(ratio=0.2)', 'dgc(ratio=0.2)', 'fragmentation(ratio=0.5)'])
@pytest.mark.parametrize('noise', ['client_dp(norm=1,noise=3)', 'clip(norm=1)+gaussian(stddev=3)'])
def test_noise_does_not_hide_what_was_chosen_before_it(choosing, noise):
  assert mechanisms(f'{choosing}+{noise}') == ()
  assert missing_bound(f'{choosing}+{noise}') is None


def test_the_choice_made_before_the_noise_is_what_the_server_sees(linear):
  """The masks of top-k are those of the bare update, however strong the noise."""
  bare, noisy = (
    defense.build(defense.numbers, linear.client)
    for defense in map(defenses.parse, ('topk(ratio=0.2)', 'topk(ratio=0.2)+client_dp(norm=1,noise=100)'))
  )
  one, other = (
    client.local_update(jax.random.key(1), linear.variables, linear.images[:2], linear.labels[:2])
    for client in (bare, noisy)
  )
  assert np.abs(one.update['kernel'] - other.update['kernel']).max() > 10
  assert jax.tree.all(jax.tree.map(np.array_equal, one.sent, other.sent))


@pytest.mark.parametrize(
  ('defense', 'norm'),
  [
    ('gaussian(stddev=1)', 'L2'),
    ('laplace(scale=1)+clip(norm=1)', 'L2'),
    ('clip(norm=1)+laplace(scale=1)', 'L1'),
    ('clip(norm=1)+topk(ratio=0.5)+gaussian(stddev=1)', None),
    ('topk(ratio=0.5)+client_dp(norm=1,noise=1)+gaussian(stddev=1)', None),
    ('gaussian(stddev=1)+dgc(ratio=0.5)', None),
    ('clip(norm=1)', None),
    ('mine', None),
  ],
)
def test_which_bound_is_missing(defense, norm):
  assert missing_bound(defense) == norm


@pytest.mark.parametrize('epochs', [0, 1.5])
def test_epochs_are_checked(epochs):
  with pytest.raises(errors.UsageError, match=f'epochs is {epochs}'):
    mechanisms('dpsgd(norm=1,noise=1)', epochs)
