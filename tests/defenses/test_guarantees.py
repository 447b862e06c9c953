"""The Gaussian mechanisms of a defense: which noise, whom it protects, and where nothing may be claimed."""

import jax
import numpy as np
import optax
import pytest

import gradleak as gl
from gradleak import defenses
from gradleak.defenses.guarantees import Mechanism, mechanisms, missing_bound


@pytest.mark.parametrize(
  ('defense', 'expected'),
  [
    ('client_dp(norm=0.1,noise=3)', [Mechanism(3.0, 'client', 1)]),
    ('clip(norm=2)+gaussian(stddev=1.5)', [Mechanism(0.75, 'client', 1)]),
    ('client_dp(norm=4,noise=0)+gaussian(stddev=2)', [Mechanism(0.5, 'client', 1)]),
    ('prune(rate=0.9)+clip(norm=2)+gaussian(stddev=1.5)+topk(ratio=0.1)', [Mechanism(0.75, 'client', 1)]),
    ('gaussian(stddev=0.1)+client_dp(norm=1,noise=1)', [Mechanism(1.0, 'client', 1)]),
    ('clip(norm=1)+dpsgd(norm=1,noise=0.7)', [Mechanism(0.7, 'example', 5)]),
    ('dpsgd(norm=7,noise=2)', [Mechanism(2.0, 'example', 5)]),
    ('client_dp(norm=1,noise=3)+dpsgd(norm=1,noise=2)', [Mechanism(2.0, 'example', 5), Mechanism(3.0, 'client', 1)]),
    ('client_dp(norm=1,noise=3)+client_dp(norm=1,noise=2)', [Mechanism(3.0, 'client', 1), Mechanism(2.0, 'client', 1)]),
    ('fragmentation_random(ratio=0.5)+client_dp(norm=1,noise=3)', [Mechanism(3.0, 'client', 1)]),
    ('gaussian(stddev=1)', []),
    ('clip(norm=inf)+gaussian(stddev=1)', []),
    ('gaussian(stddev=1)+clip(norm=1)', []),
    ('client_dp(norm=1,noise=3)+graddefense(stddev=1)', [Mechanism(3.0, 'client', 1)]),
    ('client_dp(norm=1,noise=3)+fragmentation_random(ratio=0.5)', [Mechanism(3.0, 'client', 1)]),
    ('client_dp(norm=1,noise=3)+compensation(stddev=1)', [Mechanism(3.0, 'client', 1)]),
    ('topk(ratio=1)+client_dp(norm=1,noise=3)', [Mechanism(3.0, 'client', 1)]),
    ('soteria(rate=0)+dpsgd(norm=7,noise=2)', [Mechanism(2.0, 'example', 5)]),
    ('soteria(rate=0.1)+dpsgd(norm=7,noise=2)', []),
    ('client_dp(norm=1,noise=3)+dgc(ratio=0.5)', []),
    ('client_dp(norm=1,noise=3)+fragmentation(ratio=0.5)', []),
    ('client_dp(norm=1,noise=0)', []),
    ('graddefense(stddev=1)', []),
    ('clip_samples(norm=1)+gaussian(stddev=1)', []),
    ('clip(norm=1)+topk(ratio=0.5)+gaussian(stddev=1)', []),
    ('dpsgd(norm=1,noise=0)', []),
    ('dpsgd(norm=1,noise=2)+clip_samples(norm=1)', []),
    ('none', []),
  ],
)
def test_what_a_chain_amounts_to(defense, expected):
  assert mechanisms(gl.parse(defense), 5) == tuple(expected)


def test_of_a_transformation_of_a_users_own_the_traits_count_and_not_the_label():
  def own(**traits):
    return defenses.wrap(optax.identity(), 'upload', label='client_dp(norm=1,noise=3)', **traits)

  assert mechanisms(None) == mechanisms(own()) == ()
  mechanism = Mechanism(2.0, 'client')
  clipped = own(clips=lambda settings: 4.0, post_processing=True)
  assert mechanisms(own(mechanism=lambda settings, clipped_to, position: mechanism)) == (mechanism,)
  assert mechanisms(defenses.chain(clipped, defenses.gaussian(stddev=2.0))) == (Mechanism(0.5, 'client'),)
  assert mechanisms(defenses.chain(defenses.client_dp(norm=1.0, noise=2.0), own(post_processing=True))) == (mechanism,)
  assert mechanisms(defenses.chain(defenses.client_dp(norm=1.0, noise=2.0), own())) == ()


@pytest.mark.parametrize('choosing', ['topk(ratio=0.2)', 'dgc(ratio=0.2)', 'fragmentation(ratio=0.5)'])
@pytest.mark.parametrize('noise', ['client_dp(norm=1,noise=3)', 'clip(norm=1)+gaussian(stddev=3)'])
def test_noise_does_not_hide_what_was_chosen_before_it(choosing, noise):
  assert mechanisms(gl.parse(f'{choosing}+{noise}')) == ()
  assert missing_bound(gl.parse(f'{choosing}+{noise}')) is None


@pytest.mark.long
def test_the_choice_made_before_the_noise_is_what_the_server_sees(linear):
  """The masks of top-k are those of the bare update, however strong the noise."""
  topk = defenses.topk(ratio=0.2)
  context = defenses.Context(linear.client, linear.variables, (8, 8, 1))
  bare, noisy = (
    defenses.bind(defense, context).client(linear.client)
    for defense in (topk, defenses.chain(topk, defenses.client_dp(norm=1.0, noise=100.0)))
  )
  one, other = (
    client.local_update(jax.random.key(1), linear.variables, linear.samples[:2], linear.targets[:2])
    for client in (bare, noisy)
  )
  assert np.abs(one.update['kernel'] - other.update['kernel']).max() > 10
  assert jax.tree.all(jax.tree.map(np.array_equal, one.mask, other.mask))


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
    ('clip(norm=inf)+gaussian(stddev=1)', 'L2'),
    ('prune(rate=0.9)+laplace(scale=0.1)', 'L2'),
    ('clip(norm=1)+gaussian(stddev=0)+topk(ratio=0.1)', None),
    ('clip_samples(norm=1)+gaussian(stddev=1)', None),
    ('dpsgd(norm=1,noise=1)+clip_samples(norm=1)', None),
    ('dpsgd(norm=1,noise=0)', None),
    ('clip(norm=1)+laplace(scale=1)+graddefense(stddev=1)', 'L1'),
    ('client_dp(norm=1,noise=0)+laplace(scale=1)', 'L1'),
    ('client_dp(norm=1,noise=1)+laplace(scale=1)', None),
    ('gaussian(stddev=0)+prune(rate=0.5)', None),
    ('graddefense(stddev=1)', None),
    ('graddefense(stddev=1,ratio=1)', 'L2'),
    ('none', None),
  ],
)
def test_which_bound_is_missing(defense, norm):
  assert missing_bound(gl.parse(defense)) == norm


def test_of_a_transformation_without_traits_no_bound_is_missing():
  assert missing_bound(None) is missing_bound(defenses.wrap(optax.identity(), 'upload')) is None


def test_a_clip_of_each_local_step_bounds_no_upload():
  clipped = defenses.wrap(optax.clip_by_global_norm(1.0), 'step', clips=lambda settings: 1.0, post_processing=True)
  for noise in (defenses.gaussian(stddev=1.0), defenses.laplace(scale=1.0)):
    chain = defenses.chain(clipped, noise)
    assert mechanisms(chain) == ()
    assert missing_bound(chain) == 'L2'
  local = defenses.local_dp(norm=2.0, sensitivity=1.0, epsilon=1.0, delta=1e-5)
  assert mechanisms(defenses.chain(clipped, local)) == mechanisms(local) != ()


@pytest.mark.parametrize(('place', 'unit', 'held'), [
  ('upload', 'client', True), ('step', 'example', True), ('step', 'client', False), ('round', 'client', False),
])  # fmt: skip
def test_only_noise_of_an_upload_guarantees_anything_of_it(place, unit, held):
  """A server that adds noise has seen the upload, and nobody says how many steps a client takes in a pass."""
  noise, mechanism = defenses.Noise(lambda *_: 1.0), Mechanism(1.0, unit)
  given = {'random': True, 'noise': noise, 'post_processing': True}
  one = defenses.wrap(optax.identity(), place, mechanism=lambda *_: mechanism, **given)
  assert mechanisms(one) == (mechanism,) * held
  assert missing_bound(defenses.wrap(optax.identity(), place, **given)) == (None if place == 'round' else 'L2')


@pytest.mark.parametrize('behind', ['quantize', 'adaquant', 'percentile_privacy'])
def test_no_stage_denies_the_epsilon_of_the_one_before_it(behind):
  """A result said 'no ε' beside the ε of the noise that a code then rounds."""
  chain = gl.parse(f'clip(norm=1)+gaussian(stddev=2)+{behind}')
  stage = chain.stages[-1]
  assert mechanisms(chain) == (Mechanism(2.0, 'client'),)
  assert stage.traits.remark(None, stage.settings).startswith('no ε of its own')
