"""Terms of the objective: each of them, and one of one's own."""

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from gradleak import Client, Knowledge, Observation, attacks, models
from gradleak.attacks import generative, matching, presets
from gradleak.attacks.matching import terms
from gradleak.attacks.matching.optimizers import first_order
from gradleak.core import errors
from gradleak.priors import gaussian, trained

IMAGES = jax.random.uniform(jax.random.key(0), (3, 8, 8, 1))


class Twice(nn.Module):
  """Two layers with BatchNorm, one behind the other."""

  @nn.compact
  def __call__(self, x, train=False):
    for _ in range(2):
      x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(nn.Conv(2, (3, 3))(x)))
    return nn.Dense(4)(jnp.mean(x, axis=(1, 2)))


def given(model, variables):
  seen = Observation(variables, {}, jnp.zeros((3, 4)), Knowledge(), IMAGES.shape, 4)
  return terms.Given(model and model.apply, seen)


@pytest.mark.long
def test_batch_statistics_are_zero_where_the_batch_has_those_expected():
  model = models.from_flax(Twice())
  variables = model.init(jax.random.key(1), (8, 8, 1))
  statistics = jax.jit(lambda variables: terms.batch_statistics(IMAGES, given(model, variables)))
  apart = statistics(variables)
  _, after = jax.jit(lambda: model.apply(variables, IMAGES, True, None))()
  changes = jax.tree.map(lambda a, b: (a - b) / 0.1, after, variables['batch_stats'])
  by_hand = sum(float(np.sqrt(np.sum(np.square(leaf)))) for leaf in jax.tree.leaves(changes))
  np.testing.assert_allclose(apart, by_hand, rtol=1e-4)
  exact = jax.tree.map(lambda a, change: a + change, variables['batch_stats'], changes)
  for _ in range(3):  # a layer's statistics depend on those of none before it
    assert float(statistics({**variables, 'batch_stats': exact})) < 1e-3 * apart


@pytest.mark.long
def test_batch_statistics_at_any_momentum():
  """Flax's own is 0.99, PyTorch's 0.9: what is expected of the batch is the same."""

  class Normed(nn.Module):
    momentum: float

    @nn.compact
    def __call__(self, x, train=False):
      x = nn.BatchNorm(use_running_average=not train, momentum=self.momentum)(nn.Conv(2, (3, 3))(x))
      return nn.Dense(4)(jnp.mean(x, axis=(1, 2)))

  def found(momentum):
    model = models.from_flax(Normed(momentum))
    variables = model.init(jax.random.key(0), (8, 8, 1))
    return jax.jit(lambda variables: terms.batch_statistics(IMAGES, given(model, variables)))(variables)

  np.testing.assert_allclose([found(0.99), found(0.5)], found(0.9), rtol=1e-3)


def test_registration_undoes_a_shift():
  moved = jnp.roll(IMAGES, (2, -3), axis=(1, 2))
  np.testing.assert_allclose(terms.registered(IMAGES, moved), IMAGES, atol=1e-6)


@pytest.mark.slow
def test_disagreement_of_starts():
  assert float(terms.disagreement(jnp.stack([IMAGES, IMAGES]))) < 1e-10
  shifted = jnp.stack([IMAGES, IMAGES, jnp.roll(IMAGES, 1, axis=2)])
  other = jax.random.uniform(jax.random.key(2), shifted.shape)
  assert float(terms.disagreement(shifted)) < 0.5 * float(terms.disagreement(other))


def test_disorder_does_not_see_the_order():
  epochs, two = jnp.concatenate([IMAGES, IMAGES[::-1]]), given(None, {})._replace(copies=2)
  assert float(terms.disorder(epochs, two)) < 1e-12
  assert float(terms.disorder(jnp.concatenate([IMAGES, 1 - IMAGES]), two)) > 1e-3
  assert float(terms.disorder(IMAGES, two._replace(copies=1))) == 0


@pytest.fixture(scope='module')
def dense():
  model = models.create('mlp(widths=16)', 4, init='default')
  client, variables = Client(model, 4), model.init(jax.random.key(1), (8, 8, 1))
  labels = jax.nn.one_hot(jnp.arange(3), 4)
  update = jax.jit(client.local_update)(None, variables, IMAGES, labels).update
  return client, Observation(variables, update, labels, Knowledge(), IMAGES.shape, 4)


def steps(attack, seen, count=2):
  state = jax.jit(attack.init)(jax.random.key(3), seen)
  for _ in range(count):
    state, info = jax.jit(attack.step)(state, seen)
  return state, float(info['objective']), jax.jit(attack.reconstruct)(state, seen)


@pytest.mark.slow
def test_several_starts_are_optimised_together_and_the_nearest_is_kept(dense):
  client, seen = dense
  attack = attacks.csdlg(steps=2, tv=0.0, seeds=3, group=0.0, start='normal')(client)
  state, objective, found = steps(attack, seen)
  assert state.dummy['images'].shape == (3, *IMAGES.shape) and found.samples.shape == IMAGES.shape
  matching = attack.init.__self__
  best = jax.jit(lambda: matching.better(state, *matching.evaluate(state.dummy, state, seen), seen)[0]['images'])()
  losses = jax.jit(lambda start: matching.losses(seen, start, seen.targets)[1])
  apart = [float(losses(start)) for start in best]
  np.testing.assert_array_equal(found.samples, best[int(np.argmin(apart))])
  assert steps(attacks.csdlg(steps=2, tv=0.0, seeds=3, group=5.0, start='normal')(client), seen)[1] > objective
  with pytest.raises(errors.UsageError, match='seeds'):
    attacks.csdlg(seeds=2, decoys=1)(client)


@pytest.mark.long
def test_only_the_largest_entries_are_compared(dense):
  client, seen = dense
  attack = attacks.csdlg(steps=2, tv=0.0, partial=0.25)(client)
  thresholds = jax.jit(attack.init)(jax.random.key(3), seen).thresholds
  kernel, least = seen.update['Dense_0']['kernel'], thresholds['Dense_0']['kernel']
  assert 0.2 < float(jnp.mean(jnp.abs(kernel) >= least)) < 0.3
  small = jax.tree.map(lambda x, t: jnp.where(jnp.abs(x) < t, -0.5 * x, x), seen.update, thresholds)
  changed = Observation(seen.variables, small, seen.targets, Knowledge(), IMAGES.shape, 4)
  some, whole = (jax.jit(one.objective) for one in (attack, attacks.csdlg(steps=2, tv=0.0)(client)))
  assert float(some(changed, IMAGES, seen.targets)) < 1e-5 and float(whole(changed, IMAGES, seen.targets)) > 1e-3


@pytest.mark.slow
def test_sharpness_adds_the_derivative_of_the_gradients_norm(dense):
  client, seen = dense
  attack = attacks.csdlg(steps=2, tv=0.0, sharpness=0.3, gradient='plain')(client)
  matching, state = attack.init.__self__, jax.jit(attack.init)(jax.random.key(3), seen)

  def objective(images):
    return matching.evaluate({'images': images}, state, seen)[0]

  gradient = jax.jit(jax.grad(objective))(state.dummy['images'])
  regular = jax.jit(jax.grad(lambda x: objective(x) + 0.3 * jnp.linalg.norm(jax.grad(objective)(x))))
  expected = regular(state.dummy['images'])
  found = jax.jit(lambda g: matching.flatter({'images': g}, state, seen)['images'])(gradient)
  assert float(jnp.linalg.norm(found - expected)) < 0.1 * float(jnp.linalg.norm(gradient - expected))


@pytest.fixture(scope='module')
def normed():
  """A client of two epochs whose model has BatchNorm, and what it sends of three samples."""
  client = Client(models.from_flax(Twice()), 4, share='delta', optimizer=optax.sgd(0.1), epochs=2)
  variables, labels = client.model.init(jax.random.key(1), (8, 8, 1)), jax.nn.one_hot(jnp.arange(3), 4)
  update = jax.jit(client.local_update)(None, variables, IMAGES, labels).update
  return client, Observation(variables, update, labels, Knowledge(share='delta'), IMAGES.shape, 4)


@pytest.fixture(scope='module')
def weighed(normed):
  """{term: weight} -> (objective, slope), compiled once for all terms."""
  client, seen = normed
  seen = dataclasses.replace(seen, prepared=gaussian.fitted(np.asarray(IMAGES), 2), noise=jnp.float32(1))

  @jax.jit
  def found(weights):
    settings = {}
    for name, weight in weights.items():
      kind = terms.TERMS[name].of
      own = isinstance(kind, type)
      settings[name] = kind(lambda _, noisy, levels: 0.5 * noisy, weight, 0.3, 0.03) if own else weight
    attack = matching.gradient_matching(client, optax.sgd(0.1), 2, seeds=2, orders='free', **settings)
    state = attack.init(jax.random.key(2), seen)
    return jax.value_and_grad(lambda x: attack.init.__self__.evaluate({'images': x}, state, seen)[0])(
      state.dummy['images']
    )

  return lambda **weights: found({name: jnp.float32(weights.get(name, 0)) for name in terms.TERMS})


@pytest.mark.long
@pytest.mark.parametrize('name', terms.TERMS)
def test_every_term_is_added_with_its_weight(name, weighed):
  (none, _), (once, slope), (twice, _) = (weighed(**{name: weight}) for weight in (0.0, 0.5, 1.0))
  assert once > none and np.isfinite(slope).all() and slope.any()
  np.testing.assert_allclose(twice - none, 2 * (once - none), rtol=1e-3)
  assert terms.TERMS[name].about.startswith('weight of ')


def test_a_term_says_what_it_needs(dense):
  attack = attacks.csdlg(steps=2, batch_norm=0.1)(dense[0])
  with pytest.raises(errors.UsageError, match='batch_norm needs a model with BatchNorm'):
    attack.objective(dense[1], IMAGES, dense[1].targets)
  with pytest.raises(errors.UsageError, match=r'denoising is 0\.1, expected a Denoising'):
    matching.gradient_matching(dense[0], optax.sgd(0.1), 2, denoising=0.1)


def grey(images, given):
  """Returns the mean squared distance from grey."""
  del given
  return jnp.mean(jnp.square(images - 0.5))


def as_imported_now(module):
  """Returns a copy of a module, made with the terms that there are."""
  spec = importlib.util.spec_from_file_location(f'{module.__name__}_now', module.__file__)
  made = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(made)
  return made


@pytest.mark.long
def test_a_term_of_ones_own_is_one_function_and_one_entry(dense, monkeypatch, tmp_path):
  client, seen = dense
  weight, bias = np.random.default_rng(0).normal(size=(64, 3)), np.zeros(64)
  np.savez(tmp_path / 'prior.npz', **{'0.weight': weight.astype(np.float32), '0.bias': bias.astype(np.float32)})
  held = Observation(
    **{**vars(seen), 'prepared': jax.tree.map(jnp.asarray, trained.load(tmp_path / 'prior.npz').weights)}
  )
  entry = matching.Term(grey, high=10.0, without=('decoys',))
  monkeypatch.setitem(matching.TERMS, 'grey', entry)
  monkeypatch.setitem(matching.TERMS, 'ours', matching.Term(grey, needs='class_means'))
  now, generated = as_imported_now(presets), as_imported_now(generative)

  def searched(**settings):
    solver = first_order('adam', 0.1, 2, gradient='sign')
    return matching.gradient_matching(client, solver, 2, distance='cosine', tv=1e-4, box=True, **settings)

  made = {'steps': 2, 'file': str(tmp_path / 'prior.npz')}
  for make, observation in (
    (searched, seen),
    (lambda **settings: now.csdlg(steps=2, **settings)(client), seen),
    (lambda **settings: generated.gias(latent_steps=1, **made, **settings)(client), held),
    (lambda **settings: generated.ggl(population=4, **made, **settings)(client), held),
  ):
    with_it, without = (
      make(**settings).objective(observation, IMAGES, seen.targets) for settings in ({'grey': 3.0}, {})
    )
    np.testing.assert_allclose(with_it - without, 3 * grey(IMAGES, None), rtol=1e-4)
    with pytest.raises(errors.UsageError, match='grey is 11'):
      make(grey=11.0)
  near, far = (steps(searched(start='uniform', **settings), seen, 2)[2] for settings in ({'grey': 10.0}, {}))
  assert grey(near.samples, None) < grey(far.samples, None)
  with pytest.raises(errors.UsageError, match='grey is not for a search with decoys'):
    now.csdlg(grey=1.0, decoys=1)(client)
  assert searched(ours=0.1).auxiliary_data and not searched().auxiliary_data
  with pytest.raises(errors.UsageError, match='ours needs auxiliary data'):
    searched(ours=0.1).objective(seen, IMAGES, seen.targets)
  assert entry.about == 'weight of the mean squared distance from grey'
  monkeypatch.undo()
  with pytest.raises(errors.UsageError, match='grey'):
    searched(grey=1.0)
  assert 'grey' not in as_imported_now(presets).csdlg().settings
