import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from gradleak import Client, Knowledge, Observation, models
from gradleak.attacks import csdlg
from gradleak.attacks.matching import distances, ghost
from gradleak.core import errors, trees
from gradleak.models import layers


class Wide(nn.Module):
  """Convolutions of Flax with stride, dilation and without padding, a norm, and dense layers."""

  @nn.compact
  def __call__(self, x, train=False):
    x = nn.tanh(nn.Conv(24, (3, 3), strides=2, padding=1)(x))
    x = nn.BatchNorm(use_running_average=not train)(x)
    x = nn.tanh(nn.Conv(40, (2, 2), strides=2, padding='SAME')(x))
    x = nn.tanh(nn.Conv(64, (2, 2), padding='VALID', use_bias=False)(x))
    return nn.Dense(5)(nn.tanh(nn.Dense(50)(x.reshape(x.shape[0], -1))))


class Strided(nn.Module):
  """Convolutions of this project with a stride, the second on enough channels and pixels for the hybrid formulation."""

  @nn.compact
  def __call__(self, x, train=False):
    del train
    x = nn.tanh(layers.Conv(16, 3, 'default', padding=1, formulation='hybrid')(x))
    x = nn.tanh(layers.Conv(24, 5, 'default', stride=4, padding=1, formulation='hybrid')(x))
    return layers.Dense(5, 'default')(layers.flatten(x))


def problem(model, side=9, channels=3, count=2):
  variables = model.init(jax.random.key(0), (side, side, channels))
  images = jax.random.uniform(jax.random.key(1), (2, count, side, side, channels))
  labels = jax.nn.one_hot(jnp.arange(count) % 5, 5)
  return Client(model, 5), variables, images, labels


NETWORKS = {
  'flax': lambda: models.from_flax(Wide()),
  'our convolutions': lambda: models.from_flax(Strided()),
  'copied patches': lambda: models.create('cnn', 5, init='default', conv='patches'),
  'native': lambda: models.create('lenet4', 5, init='default', conv='native'),
  'dense': lambda: models.create('mlp(widths=64-32)', 5, init='default'),
}


@pytest.mark.long
@pytest.mark.parametrize(
  'name', [pytest.param(name, marks=[pytest.mark.slow] * (name == 'copied patches')) for name in NETWORKS]
)
def test_products_and_their_gradients_are_those_of_the_whole_gradient(name):
  client, variables, images, labels = problem(NETWORKS[name](), 9 if name == 'flax' else 16)

  def gradient(images):
    return client.gradient(variables, images, labels)

  observed = jax.jit(gradient)(images[0])

  def whole(images):
    simulated = gradient(images)
    return trees.squared_norm(simulated), trees.inner_product(simulated, observed)

  def by_products(images):
    found = ghost.products(gradient, observed, images)
    return found.square, found.inner

  assert ghost.saved(gradient, images[0]) > 0
  values, gradients = jax.jit(lambda x: (whole(x), jax.jacrev(whole)(x)))(images[1])
  ours, our_gradients = jax.jit(lambda x: (by_products(x), jax.jacrev(by_products)(x)))(images[1])
  np.testing.assert_allclose(ours, values, rtol=1e-4)
  for ours, theirs in zip(our_gradients, gradients, strict=True):
    np.testing.assert_allclose(ours, theirs, atol=2e-4 * float(jnp.max(jnp.abs(theirs))))


@pytest.mark.long
def test_weights_of_tensors_and_lanes():
  client, variables, images, labels = problem(NETWORKS['dense'](), 8)
  simulated = jax.jit(lambda images: client.gradient(variables, images, labels))
  observed = simulated(images[0])
  weights = jax.tree.map(lambda x: jnp.float32(0.5) if x.ndim == 1 else jnp.float32(2.0), observed)

  def apart(images, observed):
    gradient = lambda images: client.gradient(variables, images, labels)  # noqa: E731
    return ghost.cosine(ghost.products(gradient, observed, images, weights=weights))

  lanes = jax.jit(jax.vmap(apart))(images, jax.tree.map(lambda x: jnp.stack([x, -x]), observed))
  theirs = [distances.cosine(simulated(x), observed, weights) for x in images]
  np.testing.assert_allclose(lanes, [theirs[0], 2 - theirs[1]], atol=1e-5)
  products = jax.jit(lambda other: ghost.products(lambda x: client.gradient(variables, x, labels), other, images[0]))
  unweighted = [products(other) for other in (observed, trees.zeros_like(observed))]
  assert abs(float(ghost.cosine(unweighted[0]))) < 1e-5 and float(ghost.cosine(unweighted[1])) == 1


@pytest.mark.long
def test_second_derivatives_of_products():
  client, variables, images, labels = problem(models.create('mlp(widths=32,activation=tanh)', 5, init='default'), 8, 1)
  observed = jax.jit(client.gradient)(variables, images[0], labels)

  def length(images, distance):
    return jnp.sum(jnp.square(jax.grad(distance)(images)))

  def by_products(images):
    return ghost.cosine(ghost.products(lambda x: client.gradient(variables, x, labels), observed, images))

  def whole(images):
    return distances.cosine(client.gradient(variables, images, labels), observed)

  ours, theirs = (jax.jit(jax.grad(lambda x, d=d: length(x, d)))(images[1]) for d in (by_products, whole))
  np.testing.assert_allclose(ours, theirs, atol=1e-4 * float(jnp.max(jnp.abs(theirs))))


def observation(client, variables, images, labels, **options):
  update = jax.jit(client.local_update)(None, variables, images, labels).update
  return Observation(variables, update, labels, Knowledge(), images.shape, 5, **options)


@pytest.mark.slow
def test_forms_of_the_distance_are_one_attack():
  client, variables, images, labels = problem(models.create('mlp(widths=64-64)', 5, init='default'), 8, 1, 1)
  seen = observation(client, variables, images[0], labels)
  found = {}
  for form in ('whole', 'ghost'):
    attack = csdlg(steps=3, form=form)(client)
    state = jax.jit(attack.init)(jax.random.key(2), seen)
    for _ in range(3):
      state, info = jax.jit(attack.step)(state, seen)
    found[form] = float(info['objective'])
  np.testing.assert_allclose(found['ghost'], found['whole'], rtol=1e-4)


@pytest.mark.slow
def test_only_large_gradients_are_compared_by_products_unless_asked():
  def chosen(model, distance='cosine', form='auto', side=8, **options):
    client, variables, images, labels = problem(model, side, 1, 1)
    attack = csdlg(steps=1, distance=distance, form=form)(client)
    matching_ = attack.init.__self__
    return matching_.by_products(observation(client, variables, images[0], labels, **options), images[0], labels)

  small, large = models.create('mlp(widths=32)', 5), models.create('mlp(widths=1200-1000)', 5)
  assert not chosen(small) and chosen(small, form='ghost')
  assert chosen(large) and not chosen(large, 'squared_euclidean')
  assert not chosen(large, form='whole')
  ones = jax.tree.map(jnp.ones_like, large.init(jax.random.key(0), (8, 8, 1))['params'])
  assert not chosen(large, weights=ones)
  for options in ({'distance': 'squared_euclidean'}, {'weights': ones}):
    with pytest.raises(errors.UsageError, match="form='ghost'"):
      chosen(large, form='ghost', **options)
  with pytest.raises(errors.UsageError, match='form'):
    csdlg(form='factored')(problem(small, 8, 1)[0])
