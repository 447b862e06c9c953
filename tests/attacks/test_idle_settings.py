"""Settings that change nothing beside others: each is refused with one sentence, where it was ignored."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import pytest

import gradleak as gl
from gradleak.audit import granted
from gradleak.core import errors
from gradleak.studies.sensitivity.assumptions import assumptions

WITH_FILE = 'ggl', 'gias', 'gifd', 'pnp'
MODEL = gl.models.create('cnn(widths=4)', 10)


def client(share='delta', **local):
  return gl.ClientSettings(share=share, **local).client(MODEL, 10)


@pytest.mark.parametrize('name', ['match', 'epochs', 'batch_size', 'rate', 'orders', 'order', 'subset', 'decoys'])
def test_prefix_has_no_settings_of_what_it_does_not_simulate(name):
  """It compares what stands before the dense layer and simulates no client."""
  assert name in gl.attacks.csdlg().settings
  with pytest.raises(errors.UsageError, match=f"unknown setting of the attack prefix: '{name}'"):
    gl.parse(f'prefix({name}=1)') if name != 'match' else gl.attacks.prefix(match='approximation')


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    ('csdlg(distance=prefix,match=approximation)', "match makes no difference to distance='prefix'"),
    ('csdlg(distance=prefix,epochs=3)', "epochs makes no difference to distance='prefix'"),
    ('csdlg(distance=prefix,batch_size=3)', "batch_size makes no difference to distance='prefix'"),
    ('csdlg(distance=prefix,rate=3.0)', "rate makes no difference to distance='prefix'"),
    ('csdlg(distance=prefix,orders=free)', "orders makes no difference to distance='prefix'"),
    ('csdlg(match=approximation,rate=3.0)', "rate makes no difference to match='approximation' beside"),
    ('csdlg(match=surrogate,epochs=3)', "epochs makes no difference to match='surrogate' beside"),
    ('csdlg(match=surrogate,batch_size=3)', "batch_size makes no difference to match='surrogate' beside"),
    ('csdlg(distance=dense_input,match=approximation,rate=3.0)', 'rate makes no difference'),
    ('csdlg(distance=mean_cosine,match=approximation,epochs=3)', 'epochs makes no difference'),
    ('dlg(subset_weight=0.5)', 'subset_weight makes no difference without subset'),
    ('dlg(subset_growth=5)', 'subset_growth makes no difference without subset'),
    ('dlg(group=0.1)', 'group makes no difference without seeds'),
    ('ladder(group=0.1)', 'group makes no difference without seeds'),
    ('dlg(order=0.1)', 'order makes no difference without orders'),
    ('lamp(size=2.0)', "size makes no difference to relaxation='softmax'"),
    ('tableak(seeds=1,pooling=mean)', 'pooling makes no difference with one start'),
    ('gias(steps=10,latent_steps=10,weight_rate=0.1)', 'weight_rate makes no difference where latent_steps'),
    ('gias(latent_steps=0,learning_rate=0.1)', 'learning_rate makes no difference where latent_steps is 0'),
    ('gifd(steps=10,latent_steps=10,radius=0.5)', 'radius makes no difference where latent_steps'),
    ('gifd(steps=10,latent_steps=10,growth=0.1)', 'growth makes no difference where latent_steps'),
    *((f'{name}(file=prior.npz,width=4)', 'width makes no difference beside a file') for name in WITH_FILE),
    *(
      (f'{name}(file=prior.npz,training_steps=20)', 'training_steps makes no difference beside a file')
      for name in WITH_FILE
    ),
    ('trap(variant=qbi,scale=0.5)', "scale makes no difference to variant='qbi'"),
    ('trap(variant=soliton_free,scale=0.5)', "scale makes no difference to variant='soliton_free'"),
  ],
)
def test_each_is_refused_before_there_is_a_client(text, message):
  with pytest.raises(errors.UsageError, match=message):
    gl.registry.attack(text)(None)


@pytest.mark.parametrize(
  'text',
  [
    'dga(match=approximation,rate=3.0,epochs=3)',  # it compares sizes
    'csdlg(rate=3.0)',
    'csdlg(orders=free,order=0.1)',
    'csdlg(seeds=2,group=0.1)',
    'dlg(subset=2,subset_weight=0.5,subset_growth=5)',
    'lamp(relaxation=embeddings,size=2.0)',
    'tableak(seeds=2,pooling=mean)',
    'gias(weight_rate=0.1)',
    'ggl(width=4,training_steps=20)',
    'trap(scale=0.5)',
  ],
)
def test_beside_what_they_act_on_they_are_taken(text):
  gl.registry.attack(text)(None)


def test_a_server_of_another_variant_has_no_scale():
  with pytest.raises(errors.UsageError, match='scale makes no difference'):
    gl.servers.trap(variant='soliton_data', scale=0.5).server.build((0.5,))


def test_samples_of_each_epoch_are_for_several_epochs():
  with pytest.raises(errors.UsageError, match="orders='free' makes no difference to a training of one epoch"):
    gl.attacks.csdlg(orders='free')(client())
  gl.attacks.csdlg(orders='free')(client(local_epochs=2))
  gl.attacks.csdlg(orders='free', epochs=2)(client())


@pytest.mark.parametrize(('attack', 'mode'), [(gl.attacks.csdlg(), 'optimised'), (gl.attacks.prefix(), 'unused')])
def test_an_attack_without_labels_stands_beside_one_that_optimises_them(attack, mode):
  """One `labels=` is for all attacks of an audit."""
  samples, labels = jnp.zeros((2, 8, 8, 1)), jnp.arange(2)
  scenario = gl.scenario(MODEL, samples, labels, key=jax.random.key(0))
  group = types.SimpleNamespace(
    settings=gl.AuditSettings(labels='optimised'), client=scenario.client, scenario=scenario, defenses=(), server=None
  )
  assert granted.knowledge(group, attack).labels == mode


@pytest.mark.parametrize('distance', ['prefix', 'dense_input'])
def test_labels_are_not_optimised_by_a_distance_that_tells_none(distance):
  """The search would return the classes that it began with."""
  one = client(share='gradient')
  variables = MODEL.init(jax.random.key(0), (8, 8, 1))
  seen = gl.Observation(
    variables, variables['params'], jnp.zeros((1, 10)), gl.Knowledge(labels='optimised'), (1, 8, 8, 1), 10
  )
  attack = gl.attacks.csdlg(distance=distance, steps=1)(one)
  with pytest.raises(errors.UsageError, match=f"distance='{distance}' tells no labels"):
    jax.eval_shape(attack.init, jax.random.key(0), seen)
  known = dataclasses.replace(seen, knowledge=gl.Knowledge(labels='known'))
  jax.eval_shape(attack.init, jax.random.key(0), known)


def test_an_attack_that_simulates_no_training_keeps_its_own_in_a_sensitivity():
  local = gl.ClientSettings(share='delta', local_epochs=2)
  for attack in (gl.attacks.prefix(), gl.attacks.csdlg(distance='prefix')):
    listed = assumptions(local, attack, gl.SensitivitySettings())
    (known,) = [one for one in listed if one.name == 'known training']
    assert known.skipped == 'the attack simulates no local training'
