import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from gradleak import Client, Knowledge, Observation, attacks, models
from gradleak.attacks import image_priors
from gradleak.core import errors

IMAGES = jax.random.uniform(jax.random.key(0), (3, 8, 8, 1))


class Twice(nn.Module):
  """Two layers with BatchNorm, one behind the other."""

  @nn.compact
  def __call__(self, x, train=False):
    for _ in range(2):
      x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(nn.Conv(2, (3, 3))(x)))
    return nn.Dense(4)(jnp.mean(x, axis=(1, 2)))


def test_batch_statistics_are_zero_where_the_batch_has_those_expected():
  model = models.from_flax(Twice())
  variables = model.init(jax.random.key(1), (8, 8, 1))
  statistics = jax.jit(lambda variables: image_priors.batch_statistics(model.apply, variables, IMAGES))
  apart = statistics(variables)
  _, after = jax.jit(lambda: model.apply(variables, IMAGES, True, None))()
  changes = jax.tree.map(lambda a, b: (a - b) / 0.1, after, variables['batch_stats'])
  by_hand = sum(float(np.sqrt(np.sum(np.square(leaf)))) for leaf in jax.tree.leaves(changes))
  np.testing.assert_allclose(apart, by_hand, rtol=1e-4)
  exact = jax.tree.map(lambda a, change: a + change, variables['batch_stats'], changes)
  for _ in range(3):  # a layer's statistics depend on those of none before it
    assert float(statistics({**variables, 'batch_stats': exact})) < 1e-3 * apart
  with pytest.raises(errors.UsageError, match='BatchNorm'):
    image_priors.batch_statistics(model.apply, {'params': variables['params']}, IMAGES)


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
    return jax.jit(lambda variables: image_priors.batch_statistics(model.apply, variables, IMAGES))(variables)

  np.testing.assert_allclose([found(0.99), found(0.5)], found(0.9), rtol=1e-3)


def test_registration_undoes_a_shift():
  moved = jnp.roll(IMAGES, (2, -3), axis=(1, 2))
  np.testing.assert_allclose(image_priors.registered(IMAGES, moved), IMAGES, atol=1e-6)


@pytest.mark.slow
def test_disagreement_of_starts():
  assert float(image_priors.disagreement(jnp.stack([IMAGES, IMAGES]))) < 1e-10
  shifted = jnp.stack([IMAGES, IMAGES, jnp.roll(IMAGES, 1, axis=2)])
  other = jax.random.uniform(jax.random.key(2), shifted.shape)
  assert float(image_priors.disagreement(shifted)) < 0.5 * float(image_priors.disagreement(other))


def test_disorder_does_not_see_the_order():
  epochs = jnp.stack([IMAGES, IMAGES[::-1]])
  assert float(image_priors.disorder(epochs)) < 1e-12
  assert float(image_priors.disorder(jnp.stack([IMAGES, 1 - IMAGES]))) > 1e-3
  assert float(image_priors.disorder(IMAGES[None])) == 0


@pytest.fixture(scope='module')
def dense():
  model = models.create('mlp(widths=16)', 4, init='default')
  client, variables = Client(model, 4), model.init(jax.random.key(1), (8, 8, 1))
  labels = jax.nn.one_hot(jnp.arange(3), 4)
  update = client.local_update(None, variables, IMAGES, labels).update
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
  assert state.dummy['images'].shape == (3, *IMAGES.shape) and found.images.shape == IMAGES.shape
  matching = attack.init.__self__
  best = jax.jit(lambda: matching.better(state, *matching.evaluate(state.dummy, state, seen), seen)[0]['images'])()
  losses = jax.jit(lambda start: matching.losses(seen, start, seen.labels)[1])
  apart = [float(losses(start)) for start in best]
  np.testing.assert_array_equal(found.images, best[int(np.argmin(apart))])
  assert steps(attacks.csdlg(steps=2, tv=0.0, seeds=3, group=5.0, start='normal')(client), seen)[1] > objective
  with pytest.raises(errors.UsageError, match='seeds'):
    attacks.csdlg(seeds=2, decoys=1)(client)


def test_only_the_largest_entries_are_compared(dense):
  client, seen = dense
  attack = attacks.csdlg(steps=2, tv=0.0, partial=0.25)(client)
  thresholds = jax.jit(attack.init)(jax.random.key(3), seen).thresholds
  kernel, least = seen.update['Dense_0']['kernel'], thresholds['Dense_0']['kernel']
  assert 0.2 < float(jnp.mean(jnp.abs(kernel) >= least)) < 0.3
  small = jax.tree.map(lambda x, t: jnp.where(jnp.abs(x) < t, -0.5 * x, x), seen.update, thresholds)
  changed = Observation(seen.variables, small, seen.labels, Knowledge(), IMAGES.shape, 4)
  assert float(attack.objective(changed, IMAGES, seen.labels)) < 1e-5
  assert float(attacks.csdlg(steps=2, tv=0.0)(client).objective(changed, IMAGES, seen.labels)) > 1e-3


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
