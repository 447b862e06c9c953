"""A scenario that is changed is the one that is made anew."""

import dataclasses

import jax
import numpy as np
import pytest

import gradleak as gl

LOCAL = gl.ClientSettings(share='delta', local_epochs=2, momentum=0.5)


def test_some_samples_with_another_client_are_those_of_a_scenario_of_their_own(linear):
  found = linear.of(slice(1, 3), LOCAL)
  given = {'variables': linear.variables, 'dataset': 'digits', 'gallery': linear.gallery}
  anew = gl.scenario(linear.client.model, linear.samples[1:3], linear.targets[1:3], client=LOCAL, **given)
  assert found.client == anew.client and found.local == LOCAL and found.settings == anew.settings
  np.testing.assert_array_equal(found.samples, anew.samples)
  np.testing.assert_array_equal(found.targets, anew.targets)
  back = found.of(slice(None), gl.ClientSettings())
  names = {'local_epochs', 'momentum'}
  assert names <= found.settings.keys() and not names & back.settings.keys()
  with pytest.raises(gl.UsageError, match='expected 0 and 1 for each output'):
    linear.of(slice(1, 3), gl.ClientSettings(loss='binary_cross_entropy'))


@pytest.mark.parametrize(('batch_size', 'batches'), [(1, 'local training on 1 image has 2 batches'), (2, '')])
def test_local_training_that_accumulates_more_batches_than_it_has_takes_no_step(linear, batch_size, batches):
  local = dataclasses.replace(LOCAL, accumulate=3, local_batch_size=1)
  made = linear.of(slice(0, 2), local)
  if not batches:
    return made.check_steps(batch_size)
  with pytest.raises(gl.UsageError, match=f'accumulate is 3, and {batches}: no step is taken, and the delta is zero'):
    made.check_steps(batch_size)
  with pytest.raises(gl.UsageError, match='accumulate is 3'):
    gl.audit(jax.random.key(0), made, [None], [gl.attacks.csdlg_fast()], num_trials=1, batch_size=batch_size)


def test_weights_are_drawn_until_somebody_gives_others(linear):
  assert linear.drawn and not linear.trained(linear.variables).drawn
  other = gl.scenario(linear.client.model, linear.samples, linear.targets, variables=linear.variables)
  assert not other.drawn and linear.of(slice(2), LOCAL).drawn


def test_a_private_sample_that_is_in_the_list_once_is_shared_with_nobody_however_often_it_is_uploaded(linear):
  samples, targets = (np.repeat(x[:1], 3, axis=0) for x in (linear.samples, linear.targets))
  for gallery, others in (((linear.samples, linear.targets), 0), (None, 2)):  # all are listed, by default
    made = gl.scenario(linear.client.model, samples, targets, variables=linear.variables, gallery=gallery)
    assert made.shared.tolist() == made.alike.tolist() == [others] * 3


def test_notes_are_added_to_what_is_recorded(linear):
  assert linear.noted({'seed': 3}).settings == {**linear.settings, 'seed': 3}


def test_a_client_without_settings_is_not_described(linear):
  given = gl.scenario(linear.client.model, linear.samples, linear.targets, key=jax.random.key(0), client=linear.client)
  assert linear.described_by('this') == gl.ClientSettings()
  with pytest.raises(gl.UsageError, match='this needs a scenario whose client is described by ClientSettings'):
    given.described_by('this')


@pytest.mark.parametrize(('place', 'own'), [('step', gl.defenses.clip(norm=1)), ('transform', lambda k, x, y: (x, y))])
def test_a_client_with_defenses_is_refused(linear, place, own):
  client = dataclasses.replace(linear.client, **{place: own})
  with pytest.raises(gl.UsageError, match=rf'a defense of its own \({place}\).*defense of the audit'):
    gl.scenario(client.model, linear.samples, linear.targets, key=jax.random.key(0), client=client)
