"""What an attack is to a user: an object with settings, a source and the evidence that it reads."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradleak as gl
from gradleak import UsageError
from gradleak.attacks import base
from gradleak.audit import AuditSettings, plan


def grey(client, *, value: float = 0.5, frame: bool = False):
  """Returns the attack that answers with one colour, whatever it sees."""
  del client, frame
  return gl.attacks.closed_form(lambda observation: (jnp.full(observation.batch_shape, value), None))


def test_an_attack_is_equal_to_another_of_the_same_settings():
  make = gl.attacks.attack(citation='Nobody. 2026.', reads=('clip',))(grey)
  one = make(value=0.25)
  assert one == make(value=0.25) and hash(one) == hash(make(value=0.25)) and one != make() and one != make(frame=True)
  assert one.structure == make().structure != make(frame=True).structure  # numbers are traced
  assert (one.numbers, one.settings, one.given) == ((0.25,), {'value': 0.25, 'frame': False}, {'value': 0.25})
  assert (str(one), str(make()), one.citation, one.reads) == ('grey(value=0.25)', 'grey', 'Nobody. 2026.', {'clip'})
  assert one.changed(frame=True) == make(value=0.25, frame=True)
  assert one.takes({'value': 1, 'frame': 1}) and not one.takes({'value': 1, 'steps': 1})
  assert make.__name__ == 'grey' and make.setting_names == ['value', 'frame']


def test_numbers_may_be_traced():
  observation = gl.Observation({}, {}, jnp.zeros((1, 10)), gl.Knowledge(), (1, 8, 8, 1), 10)
  method, traced = gl.attacks.attack()(grey)(), []

  @jax.jit
  def run(value):
    traced.append(value)
    made = method.build((value,), None)
    return made.reconstruct(made.init(jax.random.key(0), observation), observation)

  for value in (0.25, 0.75):
    found = run(value)
    np.testing.assert_array_equal(found.samples, np.full((1, 8, 8, 1), value, np.float32))
    assert found.labels.shape == (0,) and int(found.diverged_step) == -1
  assert int(run(np.nan).diverged_step) == 0 and len(traced) == 1


def test_a_function_of_ones_own_is_accepted_as_it_is():
  method = base.as_attack(grey)
  assert (str(method), method.reads) == ('grey', set(gl.attacks.EVIDENCE))
  assert method == gl.attacks.wrap(grey) and gl.attacks.wrap(grey, 'plain', reads=()).reads == set()
  assert str(gl.attacks.wrap(grey, 'plain')) == 'plain'
  assert str(gl.attacks.wrap(functools.partial(grey, value=0.1))) == 'partial'


@pytest.mark.parametrize(
  ('call', 'message'),
  [
    (lambda: gl.attacks.attack(reads=('weight',)), "unknown evidence 'weight'; did you mean 'weights'"),
    (lambda: gl.attacks.attack()(grey)(valu=1), "unknown setting of the attack grey: 'valu'; did you mean 'value'"),
    (lambda: gl.attacks.attack()(grey)(value='high'), r"grey\(value\) is 'high', expected a number"),
    (lambda: gl.attacks.attack()(grey)(frame=1), r'grey\(frame\) is 1, expected bool'),
    (lambda: base.as_attack('grey(value=1)'), r"is a text, expected an object: gradleak.parse\('grey\(value=1\)'\)"),
    (lambda: base.as_attack(0.5), 'the attack is 0.5, expected one of gradleak.attacks, such as'),
    (lambda: gl.attacks.wrap(lambda client: None, 'mine')(None), "the attack 'mine' returns None, expected a gradleak"),
  ],
)
def test_what_is_no_attack_is_refused(call, message):
  with pytest.raises(UsageError, match=message):
    call()


# ---- with a malicious server


@gl.servers.server
def doubling(*, factor: float = 2.0):
  """Returns the server that sends all weights times a factor."""

  def prepare(key, scenario, batch_size):
    del key, batch_size
    return scenario._replace(variables=jax.tree.map(lambda x: factor * x, scenario.variables))

  return gl.servers.one_round(prepare)


def test_server_and_attack_share_their_settings():
  def halving(client, *, factor: float = 2.0, value: float = 0.5):
    return grey(client, value=value)

  method = gl.attacks.attack(server=doubling)(halving)(factor=3.0)
  assert method.server == doubling(factor=3.0) != doubling() and method.changed(value=0.1).server == method.server
  with pytest.raises(UsageError, match='the attack grey lacks settings of its server: factor; the server is made with'):
    gl.attacks.attack(server=doubling)(grey)


def test_a_factory_that_needs_its_client_at_once_is_never_made_without_one(linear):
  """The settings of attacks are checked before anything is compiled, with the client of the model that is sent."""
  made = []

  @gl.attacks.attack(server=doubling)
  def eager(client, *, factor: float = 2.0):
    made.append(client.model.name)
    return grey(client, value=1 / client.num_classes)

  (group,) = plan(jax.random.key(0), linear, [None], [eager()], 2, AuditSettings()).groups
  assert made and set(made) == {'linear'} and group.attacks[0].method.server == doubling()
  for doubled, honest in zip(*map(jax.tree.leaves, (group.scenario.variables, linear.variables)), strict=True):
    np.testing.assert_array_equal(doubled, 2 * honest)


def zeros(model, shape, **local):
  """Returns (a client, the observation of one sample of which all is zero)."""
  params = jax.tree.map(
    lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(lambda: model.init(jax.random.key(0), shape))
  )
  knowledge, targets = gl.Knowledge(labels='unused'), jnp.zeros((1, 10))
  return gl.Client(model, 10, **local), gl.Observation(params, params['params'], targets, knowledge, (1, *shape), 10)


@pytest.mark.long
@pytest.mark.parametrize('which', ['frozen', 'private'])
@pytest.mark.parametrize(
  ('attack', 'model', 'layer', 'path'),
  [
    (gl.attacks.fidel(), 'mlp(widths=4-4)', 'Dense_0', 'Dense_0/kernel'),
    (gl.attacks.fidel(bias=False), 'mlp(widths=4-4)', 'Dense_0', 'Dense_0/kernel'),
    (gl.attacks.spear(), 'mlp(widths=4-4)', 'Dense_0', 'Dense_0/kernel'),
    (gl.attacks.peeling(), 'mlp(widths=4-4)', 'Dense_1', 'Dense_1/kernel'),
    (gl.attacks.fidel_decoder(), 'cnn(widths=4)', 'Dense_0', 'Dense_0/kernel'),
    (gl.attacks.april(), 'vit_tiny(depth=1,width=6)', 'tokens', 'pos_embed'),
  ],
)
def test_a_layer_that_is_not_sent_is_refused_by_what_reads_it(attack, model, layer, path, which):
  """Else it finds nothing, as if the client were protected."""
  client, seen = zeros(gl.models.create(model, 10), (8, 8, 1), **{which: (layer,)})
  made = attack(client)
  with pytest.raises(UsageError, match=f'{attack.name} reads the gradient of .*{path}, .* it is frozen or private'):
    made.reconstruct(made.init(jax.random.key(0), seen), seen)


@pytest.mark.long
@pytest.mark.parametrize(
  ('attack', 'model'),
  [
    (gl.attacks.april(), 'vit_tiny(depth=1,width=6)+normalised(pixels=mnist)'),
    (gl.attacks.fidel_decoder(), 'cnn(widths=4)'),
  ],
)
def test_nothing_is_made_of_an_upload_that_says_nothing(attack, model):
  """Images of zeros are no answer; the mean of a normalisation, or what a decoder makes of zeros, would be one."""
  client, seen = zeros(gl.models.create(model, 10), (8, 8, 1))
  made = attack(client)
  if attack.prepare is not None:
    images = np.random.default_rng(0).uniform(size=(12, 8, 8, 1)).astype(np.float32)
    scenario = gl.scenario(
      client.model, images, np.arange(12) % 10, key=jax.random.key(0), public=(images, np.arange(12) % 10)
    )
    learned = attack.changed(steps=2).prepare(jax.random.key(1), scenario, attack.changed(steps=2).settings, 1)
    seen = dataclasses.replace(seen, prepared=learned)
  found = made.reconstruct(made.init(jax.random.key(0), seen), seen)
  assert not np.asarray(found.samples).any() and int(found.diverged_step) == -1
