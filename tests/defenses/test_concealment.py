"""Concealed samples against NumPy: the objective, Adam's path, the mixture and the projection."""

import dataclasses
import functools
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize

import gradleak as gl
from gradleak import Client, defenses, models
from gradleak.adaptive.likelihood import orthogonal
from gradleak.core import errors
from gradleak.defenses.concealment import Search, mixed_gradient, objective, project, start_point, view
from gradleak.defenses.defense import Context

STEPS = 8
WEIGHTS = (1.0, 0.0, 2.0)  # the second sample is padding
KEY = jax.random.key(5)


@dataclasses.dataclass(frozen=True)
class Setting:
  client: Client
  variables: dict
  samples: jax.Array
  targets: jax.Array
  gradient: dict


@pytest.fixture(scope='module')
def settings(small_images):
  """Three digits, on a LeNet (8×8 pixels) and a ConvNet with BatchNorm (12×12)."""

  def setting(model, images):
    client = Client(models.create(model, 10), 10)
    variables = jax.jit(client.model.init, static_argnums=1)(jax.random.key(0), images.shape[1:])
    labels = jnp.asarray(small_images[1][:3])
    gradient = jax.jit(client.local_update)(None, variables, images, labels).update
    return Setting(client, variables, images, jax.nn.one_hot(labels, 10), gradient)

  images = small_images[0][:3]
  large = np.kron(images, np.ones((1, 2, 2, 1), np.float32))[:, 2:14, 2:14]
  given = {'lenet': ('lenet', images), 'convnet': ('convnet(width=2)', large)}

  class Made(dict):  # what no test asks for is not compiled
    def __missing__(self, name):
      self[name] = setting(given[name][0], jnp.asarray(given[name][1]))
      return self[name]

  return Made()


def flat(tree):
  return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)])


def unlike(setting):
  """Images and labels other than the sensitive ones."""
  images = jax.random.normal(jax.random.key(3), setting.samples.shape)
  return images, jnp.roll(setting.targets, 3, axis=1)


def cosine(a, b):
  return a @ b / np.linalg.norm(a) / np.linalg.norm(b)


def single(setting, images, labels):
  """Returns for each sample alone, by a plain forward pass: its logits and its loss's gradient, flat."""

  @jax.jit
  def look(image, label):
    def run(params):
      variables = {**setting.variables, 'params': params}
      logits, _ = setting.client.model.apply(variables, image[None], True, None)
      return -jnp.sum(label * jax.nn.log_softmax(logits[0])), logits[0]

    return jax.grad(run, has_aux=True)(setting.variables['params'])

  looks = [look(image, label) for image, label in zip(images, labels, strict=True)]
  return [(np.asarray(logits, np.float64), flat(gradient)) for gradient, logits in looks]


def conceal(setting, key=KEY, weights=WEIGHTS, images=None, **changed):
  """Returns (defended update, state) of the three samples, the first two of which are sensitive."""
  images = setting.samples if images is None else images
  chosen = {'steps': STEPS, 'sensitive': 2, 'projection': False, **changed}
  defense = defenses.concealment(setting.client, **chosen)
  params = setting.variables['params']
  return defense.update(
    setting.gradient,
    defense.init(params),
    params,
    key=key,
    batch=(images, setting.targets),
    weights=jnp.asarray(weights, jnp.float32),
    variables=setting.variables,
  )


def concealed(setting, count=2, **changed):
  key = jax.random.fold_in(KEY, zlib.crc32(b'concealment'))
  own = setting.samples[:count], setting.targets[:count]
  public, search = changed.pop('public', None), Search(**{'steps': STEPS, **changed})
  return defenses.concealed_samples(setting.client, setting.variables, key, *own, public, search)


@pytest.mark.parametrize(
  ('given', 'message'),
  [
    ({'margin': 0.5, 'projection': False}, 'margin makes no difference .* without projection: leave it out'),
    ({'tolerance': 0.1, 'latent': 0}, 'tolerance makes no difference to concealment at latent=0: leave it out'),
  ],
)
def test_settings_without_effect_are_refused(given, message):
  with pytest.raises(errors.UsageError, match=message):
    defenses.concealment(**given)


@pytest.mark.long
@pytest.mark.parametrize('network', ['lenet', 'convnet'])
def test_the_objective_is_equation_9(network, settings):
  setting = settings[network]
  own, other = (setting.samples, setting.targets), unlike(setting)
  look = jax.jit(lambda image, label: view(setting.client, setting.variables, image, label))
  compiled = jax.jit(objective)
  pairs = zip(single(setting, *other), single(setting, *own), strict=True)
  for i, ((logits, gradient), (logits_s, gradient_s)) in enumerate(pairs):
    for lambda_x, lambda_z, epsilon in ((0.01, 0.01, 0.0), (0.3, 2.0, 0.0), (0.0, 1.0, 0.05), (0.1, 1.0, 1e3)):
      relative = np.linalg.norm(logits - logits_s) / np.linalg.norm(logits_s)
      apart = np.linalg.norm(np.asarray(other[0][i] - own[0][i], np.float64))
      expected = 1 - cosine(gradient, gradient_s) + np.exp(-lambda_x * apart) + lambda_z * max(0, relative - epsilon)
      views = (look(samples[0][i], samples[1][i]) for samples in (other, own))
      value = compiled(*views, dissimilarity=lambda_x, latent=lambda_z, tolerance=epsilon)
      assert float(value) == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_the_concealed_samples_follow_adam_with_its_decays(settings):
  setting = settings['lenet']
  weights = {'dissimilarity': 0.05, 'latent': 0.3, 'tolerance': 0.0}
  key = jax.random.fold_in(KEY, zlib.crc32(b'concealment'))

  @jax.jit
  def slope(x, y, image, label):
    own = view(setting.client, setting.variables, image, label)
    return jax.grad(lambda x: objective(view(setting.client, setting.variables, x, y), own, **weights))(x)

  for box in (False, True):
    images, labels = concealed(setting, learning_rate=0.2, box=box, **weights)
    assert (float(images.min()) >= 0 and float(images.max()) <= 1) == box
    for i in range(2):
      own = setting.samples[i], setting.targets[i]
      x, y = start_point(jax.random.fold_in(key, i), own[0], 10, None, start='noise', mixup=False)
      np.testing.assert_array_equal(labels[i], y)
      x, m, v = np.asarray(x, np.float64), 0.0, 0.0
      for t, rate in enumerate([0.2, 0.2, 0.2, 0.02, 0.02, 0.002, 0.002, 0.0002], start=1):
        g = np.asarray(slope(jnp.asarray(x, jnp.float32), y, *own), np.float64)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        x = x - rate * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
        x = np.clip(x, 0, 1) if box else x
      np.testing.assert_allclose(images[i], x, atol=2e-4)


@pytest.mark.long
@pytest.mark.parametrize('network', ['lenet', 'convnet'])
def test_the_mixture_is_equation_10_halved(network, settings):
  """From one gradient per loss; a LeNet's in forward passes of their own, under BatchNorm in one of all samples."""
  setting = settings[network]
  dummies, dummy_labels = (part[:2] for part in unlike(setting))

  def losses(params):
    def run(images):
      return setting.client.model.apply({**setting.variables, 'params': params}, images, True, None)[0]

    union = jnp.concatenate([setting.samples, dummies])
    logits = run(union) if network == 'convnet' else jax.vmap(lambda image: run(image[None])[0])(union)
    logits = jnp.concatenate([logits, logits[3:]])
    labels = jnp.concatenate([setting.targets, dummy_labels, setting.targets[:2]])
    return -jnp.sum(labels * jax.nn.log_softmax(logits), axis=1)

  row = jax.jit(jax.grad(lambda params, i: losses(params)[i]))
  rows = [flat(row(setting.variables['params'], i)) for i in range(7)]
  mix = jax.jit(functools.partial(mixed_gradient, setting.client))
  for mixing in (0.0, 0.7, 1.0):
    own = [(rows[i] + mixing * rows[3 + i] + (1 - mixing) * rows[5 + i]) / 2 for i in range(2)] + [rows[2]]
    expected = sum(weight * row for weight, row in zip(WEIGHTS, own, strict=True)) / sum(WEIGHTS)
    batch = setting.samples, setting.targets
    mixed = mix(setting.variables, batch, (dummies, dummy_labels), jnp.asarray(WEIGHTS), mixing)
    assert np.linalg.norm(flat(mixed) - expected) < 1e-5 * np.linalg.norm(expected)


@pytest.mark.slow
def test_only_sensitive_samples_are_mixed_and_padding_has_no_part(settings):
  setting = settings['lenet']
  images, labels = concealed(setting)
  originals, mixtures = single(setting, setting.samples, setting.targets), single(setting, images, labels)
  crossed = single(setting, images, setting.targets[:2])
  first = (originals[0][1] + 0.7 * mixtures[0][1] + 0.3 * crossed[0][1]) / 2
  updates, state = conceal(setting)
  expected = (1 * first + 2 * originals[2][1]) / 3  # weights 1, 0, 2; the third sample is not sensitive
  assert np.linalg.norm(flat(updates) - expected) < 1e-5 * np.linalg.norm(expected)
  apart = np.linalg.norm(np.asarray(images[0] - setting.samples[0], np.float64))
  assert float(state.dissimilarity) == pytest.approx(apart, rel=1e-5)
  assert float(state.cosine) == pytest.approx(cosine(mixtures[0][1], originals[0][1]), rel=1e-4)
  other, other_state = conceal(setting, images=setting.samples.at[1].set(0.5))
  np.testing.assert_allclose(flat(other), flat(updates), atol=1e-7)
  np.testing.assert_allclose(flat(other_state), flat(state), rtol=1e-5)
  _, weighed = conceal(setting, weights=(1, 3, 0))
  second = cosine(mixtures[1][1], originals[1][1])
  assert float(weighed.cosine) == pytest.approx((float(state.cosine) + 3 * second) / 4, rel=1e-4)


@pytest.mark.long
def test_padding_has_no_part_in_the_statistics_of_a_batch():
  """BatchNorm in train mode normalised a mixed batch by what only fills it, too."""
  model = gl.models.create('convnet(width=2)', 10, init='explicit')
  client, (samples, concealed) = Client(model, 10), jax.random.uniform(jax.random.key(0), (2, 4, 9, 9, 1))
  variables, labels = model.init(jax.random.key(1), (9, 9, 1)), jax.nn.one_hot(jnp.arange(4), 10)

  def mixed(number, weights):
    batch, chosen = (samples[:number], labels[:number]), (concealed[:2], labels[2:4])
    return mixed_gradient(client, variables, batch, chosen, weights, 0.5, True)

  expected, found = mixed(3, jnp.ones(3)), mixed(4, jnp.asarray([1.0, 1.0, 1.0, 0.0]))
  np.testing.assert_allclose(flat(found), flat(expected), atol=2e-5)


@pytest.mark.slow
def test_the_update_is_turned_where_it_opposes_the_gradient_it_was_handed(settings):
  setting = settings['lenet']
  mixed, _ = conceal(setting)
  agrees, _ = conceal(setting, projection=True)
  np.testing.assert_array_equal(flat(agrees), flat(mixed))
  opposed = dataclasses.replace(setting, gradient=jax.tree.map(jnp.negative, setting.gradient))
  turned, _ = conceal(opposed, projection=True)
  assert cosine(flat(mixed), flat(opposed.gradient)) < -0.1
  assert abs(cosine(flat(turned), flat(opposed.gradient))) < 1e-5
  own, upload = (flat(tree)[np.newaxis].astype(np.float32) for tree in (opposed.gradient, turned))
  assert orthogonal(upload, np.ones_like(upload), own[:, np.newaxis]).all()


@pytest.mark.parametrize('scale', [1e-12, 1.0, 1e12])
@pytest.mark.parametrize('margin', [0.0, 0.5])
def test_the_projection_solves_equation_12(margin, scale):
  rng = np.random.default_rng(0)
  for _ in range(6):
    g, g_c = rng.normal(size=(2, 7))
    tree = {'a': jnp.asarray(g[:4] * scale, jnp.float32), 'b': jnp.asarray(g[4:] * scale, jnp.float32)}
    mixed = {'a': jnp.asarray(g_c[:4], jnp.float32), 'b': jnp.asarray(g_c[4:], jnp.float32)}
    result = flat(project(mixed, tree, margin / scale))
    if g @ g_c >= 0:
      np.testing.assert_array_equal(result, flat(mixed))
      continue
    solved = scipy.optimize.minimize_scalar(
      lambda v, g=g, g_c=g_c: 0.5 * g @ g * v**2 + g_c @ g * v, bounds=(margin, 100), method='bounded'
    )
    np.testing.assert_allclose(result, g_c + solved.x * g, atol=2e-5)
    if margin == 0:  # the conditions of Karush, Kuhn and Tucker of eq. 11: ĝ − g_c = v·g, v ≥ 0, v·⟨g, ĝ⟩ = 0
      assert abs(g @ result) < 1e-5 and solved.x > 0
      nearest = scipy.optimize.minimize(
        lambda x, g_c=g_c: 0.5 * np.sum((x - g_c) ** 2),
        np.zeros(7),
        method='SLSQP',
        constraints={'type': 'ineq', 'fun': lambda x, g=g: g @ x},
      )
      np.testing.assert_allclose(result, nearest.x, atol=1e-4)


def test_nothing_is_projected_on_a_zero_gradient():
  mixed, zero = {'w': jnp.asarray([1.0, -2.0])}, {'w': jnp.zeros(2)}
  np.testing.assert_array_equal(project(mixed, zero, 0.5)['w'], mixed['w'])


@pytest.mark.slow
def test_start_points(settings):
  image = settings['lenet'].samples[0]
  public = (np.stack([np.full((8, 8, 1), i / 4, np.float32) for i in range(4)]), np.array([7, 5, 3, 1], np.int32))
  keys = jax.random.split(jax.random.key(0), 400)

  def starts(**chosen):
    x, y = jax.vmap(lambda key: start_point(key, image, 10, public, **chosen))(keys)
    return np.asarray(x), np.asarray(y).argmax(1), np.asarray(y).sum(1)

  x, y, mass = starts(start='noise', mixup=False)
  assert abs(x.mean()) < 0.05 and abs(x.std() - 1) < 0.05 and (mass == 1).all()
  assert np.bincount(y, minlength=10).min() > 15  # of 40 expected
  proxies, labels, _ = starts(start='proxy', mixup=False)
  chosen = np.round(proxies[:, 0, 0, 0] * 4).astype(int)
  assert np.bincount(chosen, minlength=4).min() > 60  # of 100 expected
  np.testing.assert_array_equal(proxies, public[0][chosen])
  np.testing.assert_array_equal(labels, public[1][chosen])
  for start, plain, classes in (('noise', x, y), ('proxy', proxies, labels)):
    mixed, mixed_classes, _ = starts(start=start, mixup=True)
    np.testing.assert_allclose(mixed, 0.7 * plain + 0.3 * np.asarray(image)[None], atol=1e-6)
    np.testing.assert_array_equal(mixed_classes, classes)


def test_without_sensitive_samples_nothing_changes(settings):
  setting = settings['lenet']
  updates, state = conceal(setting, sensitive=0, projection=True)
  np.testing.assert_array_equal(flat(updates), flat(setting.gradient))
  np.testing.assert_array_equal(flat(state), [0, 0])


@pytest.mark.long
def test_in_local_training_from_public_samples(small_images, linear):
  """Three samples in batches of two: the last step holds padding, and one sensitive sample."""
  images, labels = (jnp.asarray(part[:3]) for part in small_images)
  public = small_images[0][3:], small_images[1][3:]
  client = Client(linear.client.model, 10, share='delta', batch_size=2)
  context = Context(client, linear.variables, (8, 8, 1), public)
  bound = defenses.bind(gl.parse('concealment(start=proxy,steps=2)+clip(norm=0.1)'), context)
  assert bound.arguments == ((client, public), ())
  protected = bound.client(client)
  upload = jax.jit(protected.local_update)(jax.random.key(1), linear.variables, images, labels)
  plain = jax.jit(client.local_update)(None, linear.variables, images, labels)
  assert np.isfinite(flat(upload.update)).all()
  assert np.linalg.norm(flat(upload.update) - flat(plain.update)) > 0.01 * np.linalg.norm(flat(plain.update))


def test_public_samples_that_do_not_fit_are_named(settings, small_images):
  setting = settings['lenet']
  images, labels = small_images
  defenses.concealment(start='proxy')  # not made for a client: settings alone are checked
  for public, words in (
    (None, "none are given; start='noise' needs none"),
    ((images, labels[:3]), '8 public samples and 3 labels'),
    ((images[:0], labels[:0]), '0 public samples'),
    ((images, labels + 5), 'expected classes in [0, 9]'),
  ):
    with pytest.raises(errors.UsageError) as caught:
      defenses.concealment(setting.client, public, start='proxy')
    assert words in str(caught.value)
  defense = defenses.concealment(setting.client, (images[:, 1:], labels), start='proxy')
  params = setting.variables['params']
  with pytest.raises(errors.UsageError, match=r'\(7, 8, 1\), the batch \(8, 8, 1\)'):
    defense.update(setting.gradient, defense.init(params), params, key=KEY, batch=(setting.samples, setting.targets))


@pytest.mark.long
def test_the_mixture_is_reduced_as_the_clients_loss_is(settings):
  """A sum over the batch stays one, also where classes have weights; a mean by weights has no part of each sample."""
  setting, weight = settings['lenet'], tuple(range(1, 11))
  batch, dummies = (setting.samples, setting.targets), unlike(setting)
  mixed = {}
  for name, given in {
    'mean': {}, 'sum': {'reduction': 'sum'}, 'samples': {'weight': weight, 'average': 'samples'},
    'weighed': {'weight': weight, 'reduction': 'sum'}, 'relative': {'weight': weight},
  }.items():  # fmt: skip
    client = dataclasses.replace(setting.client, loss=gl.losses.cross_entropy(**given))
    if name == 'relative':
      with pytest.raises(errors.UsageError, match='no sample has one of its own'):
        conceal(dataclasses.replace(setting, client=client))
    else:
      mixed[name] = flat(mixed_gradient(client, setting.variables, batch, dummies, jnp.asarray(WEIGHTS), 0.7))
  np.testing.assert_allclose(mixed['sum'], 3 * mixed['mean'], rtol=1e-5, atol=1e-7)
  np.testing.assert_allclose(mixed['weighed'], 3 * mixed['samples'], rtol=1e-5, atol=1e-7)
