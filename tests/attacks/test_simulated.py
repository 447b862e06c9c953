import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gradleak import Client, Knowledge, Observation, attacks, losses, models
from gradleak.attacks.matching import search, simulation
from gradleak.core import errors, trees

CLASSES, SHAPE = 5, (4, 6, 6, 1)


@pytest.fixture(scope='module')
def problem():
  """A client of two epochs of two batches, and what it sends of four samples."""
  model = models.create('mlp(widths=16,activation=tanh)', CLASSES, init='default')
  client = Client(model, CLASSES, share='delta', optimizer=optax.sgd(0.05), epochs=2, batch_size=2)
  variables = model.init(jax.random.key(0), SHAPE[1:])
  images, labels = jax.random.uniform(jax.random.key(1), SHAPE), jax.nn.one_hot(jnp.arange(4), CLASSES)
  update = jax.jit(client.local_update)(None, variables, images, labels).update
  seen = Observation(variables, update, labels, Knowledge(share='delta', local_steps=4), SHAPE, CLASSES)
  return client, seen, images


def distance(client, seen, images, place=None, **settings):
  matching = attacks.csdlg(steps=1, tv=0.0, **settings)(client).init.__self__
  return float(jax.jit(matching.losses)(seen, images, seen.targets, place=place)[1])


@pytest.mark.long
def test_an_approximation_is_the_gradient_of_all_samples_with_the_sign_reversed(problem):
  client, seen, images = problem
  gradient = jax.jit(client.gradient)(seen.variables, images, seen.targets)
  expected = 1 - trees.cosine(simulation.reverse(gradient), seen.update)
  found = distance(client, seen, images, match='approximation')
  np.testing.assert_allclose(found, expected, rtol=1e-3)
  assert distance(client, seen, images) < 1e-6 < found
  assert distance(client, seen, images, match='approximation', form='ghost') == pytest.approx(found, rel=1e-2)


@pytest.mark.long
@pytest.mark.parametrize('match', ['approximation', 'surrogate'])
def test_rates_of_single_tensors_are_compared_as_they_are(problem, match, monkeypatch):
  """Products of the plain gradient know no rates: they are refused, and taken by no large network."""
  monkeypatch.setattr(search, '_LARGE', 1)
  client, seen, images = problem
  place = jnp.float32(-80) if match == 'surrogate' else None  # at the model that was sent
  rates = {'fast': optax.sgd(1.0), 'slow': optax.sgd(1e-3)}
  for kinds in (('fast', 'fast'), ('fast', 'slow')):
    labels = jax.tree.map(lambda leaf, kinds=kinds: kinds[leaf.ndim == 1], seen.variables['params'])
    one = dataclasses.replace(client, epochs=1, batch_size=None, optimizer=optax.partition(rates, labels))
    sent = jax.jit(one.local_update)(None, seen.variables, images, seen.targets).update
    of = dataclasses.replace(seen, update=sent)
    matching = attacks.csdlg(match=match)(one).init.__self__
    assert matching.by_products(of, images, seen.targets) == (len(set(kinds)) == 1)
    assert distance(one, of, images, place, match=match) < 1e-6
  with pytest.raises(errors.UsageError, match='rates of single tensors'):
    distance(one, of, images, place, match=match, form='ghost')


@pytest.mark.slow
def test_a_surrogate_lies_between_the_models_and_nearer_than_the_first(problem):
  client, seen, images = problem
  ends = {place: distance(client, seen, images, jnp.float32(place), match='surrogate') for place in (-80, 0, 80)}
  assert ends[-80] == pytest.approx(distance(client, seen, images, match='approximation'), rel=1e-3)
  moved = jax.tree.map(jnp.add, seen.variables['params'], seen.update)
  gradient = client.gradient({'params': moved}, images, seen.targets)
  np.testing.assert_allclose(ends[80], 1 - trees.cosine(simulation.reverse(gradient), seen.update), rtol=1e-3)
  assert ends[0] < 0.7 * min(ends[-80], ends[80])
  place = jax.grad(lambda p: attacks.csdlg(steps=1, match='surrogate')(client).init.__self__.losses(
    seen, images, seen.targets, place=p)[1])(jnp.float32(-20.0))  # fmt: skip
  assert float(place) < 0  # downhill is towards the middle


@pytest.mark.long
def test_assumptions_about_the_training_change_the_simulation_alone(problem):
  client, seen, images = problem
  exact = distance(client, seen, images)
  for wrong in ({'epochs': 1}, {'batch_size': 4}, {'rate': 5.0}):
    assert distance(client, seen, images, **wrong) > exact + 1e-5, wrong
  assert distance(client, seen, images, epochs=2, batch_size=2, rate=1.0) == exact
  own = dataclasses.replace(client, optimizer=optax.sgd(0.05 / 5))
  there = jax.jit(own.local_update)(None, seen.variables, images, seen.targets).update
  np.testing.assert_allclose(
    distance(own, dataclasses.replace(seen, update=there), images), distance(own, seen, images, rate=5.0), atol=1e-6
  )


@pytest.mark.slow
def test_epochs_with_samples_of_their_own(problem):
  """With equal samples in each epoch it is the client; they are joined in the order of the first."""
  client, seen, images = problem
  assert distance(client, seen, jnp.tile(images, (2, 1, 1, 1)), orders='free') < 1e-6
  shuffled = jnp.concatenate([images, images[jnp.asarray([2, 0, 3, 1])]])
  np.testing.assert_allclose(simulation.joined(shuffled, 2), images, atol=1e-6)
  attack = attacks.csdlg(steps=2, orders='free', order=0.1)(client)
  state = jax.jit(attack.init)(jax.random.key(2), seen)
  assert state.dummy['images'].shape == (8, *SHAPE[1:])
  state, info = jax.jit(attack.step)(state, seen)
  assert jax.jit(attack.reconstruct)(state, seen).samples.shape == SHAPE and np.isfinite(float(info['objective']))
  uneven = dataclasses.replace(client, batch_size=3)
  with pytest.raises(errors.UsageError, match="orders='free'"):
    distance(uneven, seen, jnp.tile(images, (2, 1, 1, 1)), orders='free')


@pytest.mark.long
@pytest.mark.parametrize(
  'share,settings',
  [
    ('gradient', {'form': 'whole'}),
    ('gradient', {'form': 'ghost'}),
    ('gradient', {'match': 'sign'}),
    ('delta', {'match': 'approximation'}),
    ('delta', {'match': 'surrogate'}),
    ('delta', {'match': 'sign'}),
  ],
)
def test_private_layers_are_no_part_of_what_is_compared(problem, share, settings):
  client, seen, images = problem
  name = client.model.layers(SHAPE[1:])[-1].name
  own = Client(client.model, CLASSES, share=share, optimizer=optax.sgd(0.05))
  found = {}
  for which in ('private', 'frozen'):  # either way, the layer in front alone is sent, and the same of it
    one = dataclasses.replace(own, **{which: (name,)})
    update = jax.jit(one.local_update)(None, seen.variables, images, seen.targets).update
    of = dataclasses.replace(seen, update=update, knowledge=Knowledge(share=share))
    place = jnp.float32(-80) if settings.get('match') == 'surrogate' else None
    found[which] = distance(one, of, images, place, **settings)
  assert found['private'] == pytest.approx(found['frozen'], abs=1e-6)
  assert settings.get('match') == 'sign' or found['private'] < 1e-5


CONCEALING = [
  {'batch_size': 2},
  {'batch_size': 2, 'order': ((3, 1, 0, 2), (2, 0, 1, 3))},
  {'batch_size': 3},
  {'batch_size': None},
  {'batch_size': 1, 'cohort': 2},
  {'batch_size': 2, 'orders': 'free'},
  {'batch_size': None, 'orders': 'free'},
]


@pytest.mark.long
@pytest.mark.parametrize('trained', CONCEALING)
@pytest.mark.parametrize('decoys', [1, 2])
def test_decoys_stand_in_the_local_batches_of_their_samples(problem, trained, decoys):
  """Against a client whose step takes the mean over a batch and what it conceals beside each of its samples."""
  client, seen, images = problem
  trained, settings = dict(trained), {name: trained[name] for name in ('orders',) if name in trained}
  client = dataclasses.replace(client, **{name: value for name, value in trained.items() if name != 'orders'})
  added = jax.random.uniform(jax.random.key(2), (decoys, *SHAPE))
  labels = jax.nn.softmax(jax.random.normal(jax.random.key(3), (decoys, 4, CLASSES)))
  plain = dataclasses.replace(client, cohort=1, batch_size=None, epochs=1, order=None)
  gradient = jax.jit(plain.gradient)

  def trained_on(members):
    params, size = seen.variables['params'], client.batch_size or len(members)
    for epoch in range(client.epochs):
      order = members if client.order is None else client.order[epoch]
      for start in range(0, len(order), size):
        batch = np.asarray(order[start : start + size])
        x = jnp.concatenate([images[batch], *added[:, batch]])
        y = jnp.concatenate([seen.targets[batch], *labels[:, batch]])
        params = jax.tree.map(lambda p, g: p - 0.05 * g, params, gradient({'params': params}, x, y))
    return trees.subtract(params, seen.variables['params'])

  updates = [trained_on(part) for part in np.split(np.arange(4), client.cohort)]
  of = dataclasses.replace(seen, update=jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *updates))
  matching = attacks.csdlg(steps=1, tv=0.0, decoys=decoys, **settings)(client).init.__self__
  copies = 2 if settings else 1
  beside = jnp.tile(added[:, None], (1, copies, 1, 1, 1, 1)).reshape(-1, *SHAPE[1:])
  targets = jnp.concatenate([seen.targets, labels.reshape(-1, CLASSES)])
  assert float(jax.jit(matching.losses)(of, jnp.tile(images, (copies, 1, 1, 1)), targets, 0, beside)[1]) < 1e-6


@pytest.mark.long
def test_an_order_that_is_not_assumed_is_dropped(problem):
  """A client of two epochs in given orders, to an attacker who knows them, or knows no order, or assumes one epoch."""
  client, seen, images = problem
  own = dataclasses.replace(client, order=((0, 1, 2, 3), (2, 1, 3, 0)))
  there = dataclasses.replace(seen, update=jax.jit(own.local_update)(None, seen.variables, images, seen.targets).update)
  assert distance(own, there, images) < 1e-6
  both = jnp.concatenate([images, images[jnp.asarray(own.order[1])]])
  targets = jnp.concatenate([seen.targets, seen.targets[jnp.asarray(own.order[1])]])
  free = simulation.Simulation(orders='free').update(own, seen.variables, both, targets)
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), free, there.update)
  for epochs in (1, 3):
    expected = distance(dataclasses.replace(client, epochs=epochs), there, images)
    assert distance(own, there, images, epochs=epochs) == pytest.approx(expected, rel=1e-5)
    assert 'not the order of the samples' in attacks.csdlg(epochs=epochs)(own).assumes


def test_what_is_assumed_is_said(problem):
  client, _, _ = problem
  said = {
    '': 'the size of the batches and the order of the samples',
    'match=approximation': 'the gradient of one step',
    'match=surrogate': 'a model between the two',
    'epochs=3,rate=2.0': "assumes 3 epochs and 2 times the client's learning rate",
    'orders=free': 'not the order of the samples',
  }
  for text, words in said.items():
    settings = dict(part.split('=') for part in text.split(',') if part)
    typed = {k: int(v) if k == 'epochs' else float(v) if k == 'rate' else v for k, v in settings.items()}
    sentence = attacks.csdlg(**typed)(client).assumes
    assert words in sentence
    assert sentence in Knowledge(share='delta', local_steps=4, training=sentence).in_words()
  drawn = dataclasses.replace(client, shuffled=True, augment=lambda key, images: images)
  words = 'the size of the batches and not the order of the samples, nor how they were augmented.'
  assert words in attacks.csdlg()(drawn).assumes
  for method in (attacks.ggl(width=2), attacks.lti()):  # which simulate the client without a gradient of pixels
    assert [method(one).assumes for one in (client, drawn)] == [attacks.csdlg()(one).assumes for one in (client, drawn)]


@pytest.mark.parametrize('settings', [{'rate': 5.0}, {'epochs': 2}, {'batch_size': 1}])
def test_a_sign_has_no_rate_and_no_epochs(settings):
  with pytest.raises(errors.UsageError, match='takes one step of any size'):
    simulation.Simulation(match='sign', **settings).check(Client(models.create('mlp(widths=4)', 4), 4, share='delta'))


@pytest.mark.parametrize(
  'settings', [{'match': 'surrogate'}, {'epochs': 2}, {'batch_size': 1}, {'orders': 'free'}, {'rate': 5.0}]
)
def test_a_shared_gradient_leaves_nothing_to_assume(problem, settings):
  client = dataclasses.replace(problem[0], share='gradient', epochs=1, batch_size=None)
  with pytest.raises(errors.UsageError, match='local training'):
    attacks.csdlg(**settings)(client)


@pytest.mark.long
def test_an_approximation_has_the_scale_of_the_delta(problem):
  """Of one step of plain SGD, eq. 2 of OUTPOST is exact, for squared distances as well; of two it is twice that."""
  client, seen, images = problem
  for steps in (1, 2):
    one = dataclasses.replace(client, epochs=steps, batch_size=None)
    gradient = one.gradient(seen.variables, images, seen.targets)
    update = simulation.Simulation('approximation').update(one, seen.variables, images, seen.targets)
    for ours, theirs in zip(jax.tree.leaves(update), jax.tree.leaves(gradient), strict=True):
      np.testing.assert_allclose(ours, -0.05 * steps * theirs, rtol=1e-4, atol=1e-9)
  once = dataclasses.replace(client, epochs=1, batch_size=None)
  delta = jax.jit(once.local_update)(None, seen.variables, images, seen.targets)
  matching = attacks.dga(steps=1, match='approximation')(once).init.__self__
  observed = Observation(seen.variables, delta.update, seen.targets, Knowledge(share='delta'), SHAPE, CLASSES)
  assert float(matching.losses(observed, images, seen.targets)[1]) < 1e-6 * float(trees.squared_norm(delta.update))


@pytest.mark.parametrize(
  ('given', 'assumed', 'factor'),
  [
    ({'batch_size': 2}, {}, -0.05 * 4 / 2),  # four steps, each on half of the samples
    ({'batch_size': None}, {}, -0.05 * 2),
    ({'batch_size': 3, 'drop_last': True}, {}, -0.05 * 2 * 3 / 4),
    ({'batch_size': None}, {'batch_size': 1}, -0.05 * 8 / 4),
    ({'batch_size': 2, 'cohort': 2}, {}, -0.05 * 2 / 2),  # the mean of two clients
  ],
)
def test_steps_of_a_summed_loss_have_the_part_of_their_batch(problem, given, assumed, factor, monkeypatch):
  client, seen, images = problem
  one = dataclasses.replace(client, loss=losses.cross_entropy(reduction='sum'), **given)
  ones = jax.tree.map(jnp.ones_like, seen.variables['params'])
  monkeypatch.setattr(simulation, 'shared_gradient', lambda *_: ones)
  update = simulation.Simulation('approximation', **assumed).update(one, seen.variables, images, seen.targets)
  for leaf in jax.tree.leaves(update):
    np.testing.assert_allclose(leaf, factor, rtol=1e-5)
