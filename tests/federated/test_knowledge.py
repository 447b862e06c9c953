"""What an attacker is granted: its tier, its sentences, and its place in a pytree."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from gradleak.core import errors
from gradleak.threat import Knowledge, Observation
from gradleak.threat.knowledge import LABELS, TIERS


@pytest.mark.parametrize(
  ('granted', 'tier'),
  [
    ({'labels': 'inferred'}, 'A'),
    ({'labels': 'optimised'}, 'A'),
    ({}, 'B'),
    ({'local_steps': 4, 'share': 'delta'}, 'C'),
    ({'local_steps': 4, 'share': 'delta', 'labels': 'inferred'}, 'C'),
    ({'share': 'delta', 'labels': 'optimised', 'training': 'It knows the learning rate.'}, 'C'),  # also of one step
    ({'share': 'delta', 'labels': 'optimised'}, 'A'),
    ({'share': 'gradient', 'training': 'It knows the learning rate.'}, 'B'),  # of which a gradient says nothing
    ({'auxiliary_data': 100}, 'D'),
    ({'auxiliary_data': 100, 'labels': 'optimised', 'local_steps': 4}, 'D'),
    ({'model': 'modified'}, 'F'),
    ({'model': 'modified', 'auxiliary_data': 100}, 'G'),
  ],
)
def test_tiers(granted, tier):
  knowledge = Knowledge(**granted)
  assert knowledge.tier == tier
  assert any(f'Threat model {tier} of' in sentence and TIERS[tier] in sentence for sentence in knowledge.in_words())


def words(**granted):
  sentences = Knowledge(**granted).in_words()
  assert all(sentence.endswith('.') and '\n' not in sentence for sentence in sentences)
  return ' '.join(sentences)


@pytest.mark.parametrize(
  ('granted', 'said', 'not_said'),
  [
    ({'labels': 'known'}, 'given the true labels', 'infers'),
    ({'labels': 'inferred', 'label_inference': 'argmin'}, "infers the labels from the update by the rule 'arg", 'true'),
    ({'labels': 'optimised'}, 'optimises them together with the samples', 'infers'),
    ({'share': 'gradient'}, 'sees the gradient of one step', 'local steps'),
    ({'share': 'delta', 'local_steps': 6}, 'after 6 local steps', 'gradient of one step'),
    ({'batch_norm': 'train'}, 'batch statistics', 'running statistics'),
    ({'batch_norm': 'train', 'running': True}, 'it on the running statistics that it sends.', 'simulates the same'),
    ({'batch_norm': 'eval'}, 'running statistics', 'batch statistics'),
    ({'batch_norm': 'none'}, '.', 'BatchNorm'),
    ({'defense': 'none'}, 'The client uses no defense.', 'knows the defense'),
    ({'defense': 'unknown'}, 'does not know which defense', 'knows the defense and'),
    ({'defense': 'known'}, 'knows the defense and its settings', 'does not know which'),
    ({'defense': 'either'}, 'One attacker does not know which', 'It knows the defense'),
    ({'model': 'honest'}, 'honest but curious', 'malicious'),
    ({'model': 'modified'}, 'malicious', 'honest but curious'),
    ({'auxiliary_data': 1297}, 'holds auxiliary data of the same kind, 1,297 samples.', 'holds no auxiliary data'),
    ({'auxiliary_data': 0}, 'holds no auxiliary data', 'holds auxiliary data'),
  ],
)
def test_every_grant_is_put_into_words(granted, said, not_said):
  assert said in words(**granted)
  assert not_said not in words(**granted)


def test_secure_aggregation_is_said_of_several_clients_alone():
  together, alone = (' '.join(Knowledge(cohort=count).in_words()) for count in (4, 1))
  assert 'the mean of 4 such updates alone' in together and 'Secure aggregation' not in alone


@pytest.mark.parametrize(
  ('granted', 'message'),
  [
    ({'labels': 'optimized'}, "unknown label mode 'optimized'; did you mean 'optimised'"),
    ({'share': 'gradients'}, "unknown share 'gradients'; did you mean 'gradient'"),
    ({'batch_norm': 'evaluate'}, "unknown batch_norm mode 'evaluate'; did you mean 'eval'"),
    ({'defense': 'hidden'}, "unknown defense knowledge 'hidden'"),
    ({'model': 'malicious'}, r"unknown model state 'malicious'.*honest, modified"),
  ],
)
def test_unknown_modes(granted, message):
  with pytest.raises(errors.UsageError, match=message):
    Knowledge(**granted)


def test_knowledge_is_frozen_and_hashable():
  assert {Knowledge(), Knowledge(labels='known'), Knowledge(labels='inferred')} == {
    Knowledge(labels=mode) for mode in LABELS[:2]
  }
  with pytest.raises(dataclasses.FrozenInstanceError):
    Knowledge().targets = 'inferred'


def observation(**granted):
  tree, weights = {'w': jnp.ones((2, 3))}, {'w': jnp.ones(())}
  return Observation({'params': tree}, tree, jnp.zeros((1, 3)), Knowledge(**granted), (1, 8, 8, 1), 3, weights)


def test_observation_is_a_pytree_of_arrays_with_static_knowledge():
  leaves, treedef = jax.tree.flatten(observation())
  assert [jnp.shape(leaf) for leaf in leaves] == [(2, 3), (2, 3), (1, 3), (), (), ()]
  assert treedef == jax.tree.structure(observation())
  assert treedef != jax.tree.structure(observation(labels='inferred'))
  rebuilt = jax.tree.unflatten(treedef, leaves)
  assert rebuilt.knowledge == Knowledge() and rebuilt.batch_shape == (1, 8, 8, 1) and rebuilt.num_classes == 3


def test_other_knowledge_compiles_anew_and_other_numbers_do_not():
  traces = []

  @jax.jit
  def attack(observed):
    traces.append(observed.knowledge.labels)
    return observed.update['w'].sum() * observed.num_classes

  assert attack(observation()) == attack(jax.tree.map(lambda x: x, observation())) == 18
  assert traces == ['known']
  attack(dataclasses.replace(observation(), update={'w': jnp.zeros((2, 3))}))
  assert traces == ['known']
  attack(observation(labels='inferred'))
  assert traces == ['known', 'inferred']
