import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree

from gradleak import Client, Knowledge, Observation, attacks, metrics, models
from gradleak.attacks import matching
from gradleak.attacks.matching import distances, terms
from gradleak.attacks.matching.optimizers import first_order
from gradleak.core import errors, trees
from tests.attackers import run


def found_by(attack, observation):
  return run(attack, jax.random.key(5), observation)[0]


def psnr(found, truth):
  permutation = metrics.match(np.asarray(found.samples), truth)
  return float(np.mean(metrics.psnr(np.asarray(found.samples)[permutation], truth)))


def test_distances_and_prior_by_hand():
  a = {'x': jnp.asarray([3.0, 4.0]), 'y': jnp.asarray([[1.0]])}
  b = {'x': jnp.asarray([0.0, 4.0]), 'y': jnp.asarray([[-1.0]])}
  assert float(distances.squared_euclidean(a, b)) == 9 + 4
  assert float(distances.squared_euclidean(a, b, {'x': 2.0, 'y': 0.5})) == 18 + 2
  np.testing.assert_allclose(distances.cosine(a, b), 1 - 15 / np.sqrt(26 * 17), rtol=1e-6)
  np.testing.assert_allclose(distances.cosine(a, jax.tree.map(lambda x: -7 * x, a)), 2, rtol=1e-6)
  images = jnp.asarray([[0.0, 1.0], [0.5, 0.5]]).reshape(1, 2, 2, 1)
  np.testing.assert_allclose(terms.total_variation(images), (0.5 + 0.5) / 2 + (1 + 0) / 2)


def test_layers_weigh_the_mean_of_cosines():
  a, b = ({'x': jnp.ones(2), 'y': jnp.asarray([1.0, sign]), 'z': jnp.ones(3)} for sign in (1.0, -1.0))
  b['z'] = jnp.zeros(3)  # which does not count, whatever its weight
  for weights, expected in (
    (None, 1 / 2),
    ({'x': 0.3, 'y': 0.1, 'z': 5.0}, 1 / 4),
    ({'x': 0.0, 'y': 0.1, 'z': 1.0}, 1),
  ):
    np.testing.assert_allclose(distances.mean_cosine(a, b, weights), expected, rtol=1e-6)


@pytest.mark.parametrize(
  ('distance', 'settings'),
  [
    ('dense_input', {'layer_weighting': 'early'}),
    ('prefix', {'layer_weighting': 'linear'}),
    ('prefix', {'partial': 0.1}),
    ('prefix', {'form': 'ghost'}),
    ('prefix', {'decoys': 1}),
  ],
)
def test_settings_that_a_distance_would_ignore_are_refused(distance, settings):
  with pytest.raises(errors.UsageError, match=f'{next(iter(settings))} makes no difference to distance={distance!r}'):
    matching.gradient_matching(None, optax.sgd(0.1), 1, distance=distance, **settings)


def test_a_distance_of_ones_own_is_weighted_and_measured_as_ours_are():
  a = {'x': jnp.asarray([3.0, 4.0]), 'y': jnp.asarray([[1.0]])}
  b = {'x': jnp.asarray([0.0, 4.0]), 'y': jnp.asarray([[-1.0]])}
  weights = {'x': 2.0, 'y': 0.5}
  own = distances.as_distance(lambda simulated, observed: trees.norm(trees.subtract(simulated, observed)))
  np.testing.assert_allclose(own.between(a, b), np.sqrt(9 + 4), rtol=1e-6)
  np.testing.assert_allclose(own.between(a, b, weights), np.sqrt(18 + 2), rtol=1e-6)
  np.testing.assert_allclose(own.unit(b), np.sqrt(17), rtol=1e-6)
  assert own.floor(1.0, 4.0) == -np.inf  # no search ends at a floor that nobody knows
  angle = distances.as_distance(lambda simulated, observed: 1 - jnp.vdot(simulated, observed) / trees.norm(simulated))
  assert angle.unit(a['x']) == 1 and np.isnan(angle.between(0 * a['x'], a['x']))  # NaN · 0 would be NaN
  with pytest.raises(errors.UsageError, match=r"distance.*'l3'"):
    distances.as_distance('l3')


@pytest.mark.long
def test_total_variation_and_magnitudes_do_not_move_what_is_level():
  flat = jnp.full((1, 4, 4, 1), 0.5)
  for term in (terms.total_variation, terms.roughness):
    np.testing.assert_allclose(jax.grad(term)(flat), 0, atol=1e-7)
  bright = flat.at[0, 1, 1, 0].set(1.0)
  assert (np.asarray(jax.grad(terms.total_variation)(bright))[0, 2:, 2:] == 0).all()
  update = {'w': jnp.asarray([1.0, 2.0])}
  slope = jax.grad(lambda tree: distances.both_norms(tree, update, alpha=0.1))({'w': jnp.asarray([1.0, 3.0])})
  np.testing.assert_allclose(slope['w'], [0, 2.1], rtol=1e-6)


@pytest.mark.parametrize('shape', [(2, 1, 3, 1), (2, 3, 1, 1), (2, 1, 1, 1)])
def test_total_variation_of_images_one_pixel_wide_is_that_of_the_other_side(shape):
  images = jnp.asarray(np.arange(np.prod(shape)), jnp.float32).reshape(shape)
  value, gradient = jax.value_and_grad(terms.total_variation)(images)
  assert float(value) == (0 if shape[1:] == (1, 1, 1) else 1)
  assert np.isfinite(gradient).all()


def test_cosine_of_nothing_is_one_and_has_a_gradient():
  zero = {'x': jnp.zeros(3)}
  value, gradient = jax.value_and_grad(lambda a: distances.cosine(a, {'x': jnp.ones(3)}))(zero)
  assert float(value) == 1 and np.isfinite(gradient['x']).all()


def test_layer_weights_follow_the_forward_order(network):
  weights = distances.layer_weights(network[0], network[1]['params'], (8, 8, 1), 'linear')
  assert [float(weights[f'Conv_{i}']['bias']) for i in range(3)] == [0.25, 0.5, 0.75]
  assert float(weights['Dense_0']['kernel']) == 1
  early = distances.layer_weights(network[0], network[1]['params'], (8, 8, 1), 'early')
  assert float(early['Conv_0']['kernel']) > float(early['Dense_0']['kernel']) > 0


@pytest.mark.long
@pytest.mark.parametrize('name,settings,mode,least', [
  pytest.param('dga', {'steps': 150}, 'known', 60, marks=pytest.mark.slow),
  pytest.param('idlg', {'steps': 150}, 'inferred', 60, marks=pytest.mark.slow),
  pytest.param('dlg', {'steps': 250}, 'optimised', 40, marks=pytest.mark.slow),
  ('csdlg', {'steps': 400, 'tv': 1e-6}, 'known', 25),
  pytest.param('gs', {'steps': 400}, 'known', 25, marks=pytest.mark.slow),
])  # fmt: skip
def test_presets_recover_an_image(name, settings, mode, least, client, observe, small_images):
  images, labels = small_images
  attack = getattr(attacks, name)(**settings)(client)
  assert attack.labels == mode
  found = found_by(attack, observe(images[:1], labels[:1], mode, label_inference='idlg'))
  assert psnr(found, images[:1]) > least
  assert found.labels.tolist() == [labels[0]] and int(found.diverged_step) == -1


@pytest.mark.slow
def test_a_batch_is_recovered(client, observe, small_images):
  images, labels = small_images
  found = found_by(attacks.dga(steps=600, start='uniform')(client), observe(images[:2], labels[:2]))
  assert psnr(found, images[:2]) > 30


@pytest.mark.slow
def test_a_delta_of_several_steps_is_matched(network, observe, small_images):
  images, labels = small_images
  victim = Client(network[0], 10, share='delta', optimizer=optax.sgd(0.05), epochs=3)
  found = found_by(attacks.dga(steps=200)(victim), observe(images[:1], labels[:1], victim=victim, local_steps=3))
  assert psnr(found, images[:1]) > 40


def test_the_objective_at_the_truth_is_zero_without_a_defense(client, observe, small_images):
  images, labels = small_images
  observation = observe(images[:2], labels[:2])
  objective = jax.jit(attacks.dga(steps=1)(client).objective)
  onehot = jax.nn.one_hot(jnp.asarray(labels[:2]), 10)
  assert float(objective(observation, jnp.asarray(images[:2]), onehot)) < 1e-8
  assert float(objective(observation, jnp.asarray(images[2:4]), onehot)) > 1e-2


@pytest.mark.long
def test_step_equals_the_textbook_step(client, observe, small_images):
  """One step of csDLG in its published form, with the gradient of the whole chain written out."""
  images, labels = small_images
  observation = observe(images[:1], labels[:1])
  attack = attacks.csdlg(steps=10, tv=0.01, learning_rate=0.1)(client)
  state = attack.init(jax.random.key(1), observation)
  x = state.dummy['images']

  def objective(x):
    g = client.local_update(None, observation.variables, x, observation.targets).update
    g, target = ravel_pytree(g)[0], ravel_pytree(observation.update)[0]
    tv = jnp.mean(jnp.abs(jnp.diff(x, axis=1))) + jnp.mean(jnp.abs(jnp.diff(x, axis=2)))
    return 1 - g @ target / jnp.linalg.norm(g) / jnp.linalg.norm(target) + 0.01 * tv

  value, gradient = jax.jit(jax.value_and_grad(objective))(x)
  state, info = jax.jit(attack.step)(state, observation)
  np.testing.assert_allclose(info['objective'], value, rtol=1e-4)
  # Adam's first step is lr·sign(g), whatever g is.
  expected = jnp.clip(x - 0.1 * jnp.sign(gradient), 0, 1)
  agree = jnp.isclose(state.dummy['images'], expected, atol=1e-5)
  assert float(agree.mean()) > 0.95  # the sign of a gradient of nearly zero may differ


@pytest.mark.slow
def test_best_is_kept_when_the_end_is_worse(client, observe, small_images):
  images, labels = small_images
  observation = observe(images[:1], labels[:1])
  rough = matching.gradient_matching(client, first_order('sgd', 30.0, 50), 50)
  state = rough.init(jax.random.key(0), observation)
  step, seen = jax.jit(rough.step), []
  for _ in range(20):
    state, info = step(state, observation)
    seen.append(float(info['objective']))
  found = jax.jit(rough.reconstruct)(state, observation)
  assert float(found.objective) <= min(seen) < seen[-1]
  assert float(found.objective_start) == seen[0]


def test_starts(client, observe, small_images):
  images, labels = small_images
  observation = observe(images[:1], labels[:1])

  def start(value):
    attack = matching.gradient_matching(client, optax.sgd(0.1), 1, start=value)
    return attack.init(jax.random.key(0), observation).dummy['images']

  assert float(start('uniform').min()) >= 0 and float(start('uniform').max()) <= 1
  assert float(start('normal').min()) < -1
  assert np.unique(start('constant')).tolist() == [0.5]
  np.testing.assert_array_equal(start(images[0]), images[:1])
  with pytest.raises(errors.UsageError, match='the start has shape'):
    start(images[0, :4])
  with pytest.raises(errors.UsageError, match="did you mean 'uniform'"):
    start('unifrm')


@pytest.mark.long
@pytest.mark.parametrize('given', ['constant', 'class_average', 'array'])
def test_samples_and_seeds_that_would_start_alike_are_set_apart(given):
  """Of three samples, two of one class; equal ones with one label would return one image twice."""
  targets, means = jax.nn.one_hot(jnp.asarray([1, 1, 0]), 2), jnp.arange(2.0).reshape(2, 1) * jnp.ones((2, 9))
  start = jnp.ones(9) if given == 'array' else given
  made = matching.start_images(start, jax.random.key(0), (3, 9), targets, means)
  assert 0.001 < float(jnp.std(made[0] - made[1])) < 0.1
  if given == 'class_average':
    np.testing.assert_array_equal(made[2], means[0])
  one, other = (
    matching.start_images(start, key, (1, 9), targets[:1], means, True) for key in jax.random.split(jax.random.key(0))
  )
  assert 0.001 < float(jnp.std(one - other)) < 0.1


def test_labels_that_are_not_granted_are_not_used(client, observe, small_images):
  images, labels = small_images
  observation = observe(images[:1], labels[:1], 'optimised')
  assert not np.asarray(observation.targets).any()
  state = attacks.csdlg(steps=5)(client).init(jax.random.key(0), observation)
  assert set(state.dummy) == {'images', 'logits'}


@pytest.mark.long
@pytest.mark.parametrize('distance', ['squared_euclidean', 'cosine'])
def test_a_tolerance_ends_the_search(distance, small_images):
  """It ends at the first point whose distance, over that of no update at all, is within it, and stays there."""
  images, labels = small_images
  model = models.from_functions(
    lambda key, _: {'w': 0.1 * jax.random.normal(key, (64, 10)), 'b': jnp.zeros(10)},
    lambda p, x: x.reshape(-1, 64) @ p['w'] + p['b'].reshape(1, -1),
  )
  linear = Client(model, 10)
  variables, onehot = model.init(jax.random.key(0), (8, 8, 1)), jax.nn.one_hot(labels[:1], 10)
  upload = jax.jit(lambda x: linear.local_update(None, variables, x, onehot))(jnp.asarray(images[:1]))
  observation = Observation(variables, upload.update, onehot, Knowledge(), (1, 8, 8, 1), 10)
  unit = sum(float(jnp.vdot(x, x)) for x in jax.tree.leaves(upload.update)) if distance != 'cosine' else 1.0

  @jax.jit
  def search(tolerance):
    optimizer = first_order('adam', 0.05, 60)
    attack = matching.gradient_matching(linear, optimizer, 60, distance=distance, tolerance=tolerance)

    def step(state, _):
      state, info = attack.step(state, observation)
      return state, (info, attack.reconstruct(state, observation))

    start = jax.tree.map(lambda x: jnp.asarray(x, x.dtype), attack.init(jax.random.key(1), observation))
    return jax.lax.scan(step, start, length=60)[1]

  never, whole = search(jnp.float32(0))
  assert not never['finished'].any()
  distances = np.minimum.accumulate(np.asarray(never['objective']))
  tolerance = float(distances[20] / unit)
  assert distances[19] > distances[20] > distances[-1]
  info, found = jax.device_get(search(jnp.float32(1.0001 * tolerance)))
  assert info['finished'].tolist() == [False] * 20 + [True] * 40
  np.testing.assert_array_equal(info['objective'][:21], never['objective'][:21])
  for value in (info['objective'], found.objective, found.samples):
    assert (value[20:] == value[20]).all()
  assert (whole.objective[-1] < found.objective[-1]) and int(found.diverged_step[-1]) == -1


@pytest.mark.parametrize('which', ['', 'frozen', 'private'])
@pytest.mark.parametrize('settings', [{}, {'partial': 0.05}, {'layer_weighting': 'early'}, {'silent': True}])
def test_the_noise_at_which_a_search_ends_is_that_of_what_is_compared(network, observe, small_images, which, settings):
  """Each entry that is sent has noise of the same variance, and counts by its weights."""
  settings = dict(settings)
  silent = settings.pop('silent', False)
  client = Client(network[0], 10, **({which: ('Conv_0',)} if which else {}))
  seen = observe(*(x[:1] for x in small_images), victim=client)
  sent = client.shared_layers(network[1]['params'], (8, 8, 1))
  sizes = jax.tree.map(lambda x, s: float(x.size) * bool(s), seen.update, sent)
  seen = dataclasses.replace(seen, noise=jnp.float32(1e-6 * sum(jax.tree.leaves(sizes))))
  matching_ = attacks.dga(steps=1)(client).init.__self__
  comparison = dataclasses.replace(matching_.comparison, **settings)
  matching_ = dataclasses.replace(matching_, comparison=comparison)
  if silent:  # as a table of tokens is, where a search moves what is behind it
    object.__setattr__(matching_, 'form', matching_.form._replace(silent=('Dense_0', 'kernel')))
  state = matching_.init(jax.random.key(0), seen)
  seen, counted = matching_.compared(seen, state.thresholds), sizes
  if 'partial' in settings or silent:
    counted = jax.tree.map(lambda w, s: float(np.sum(w)) * bool(s), seen.weights, sent)
  if 'layer_weighting' in settings:
    weights = distances.layer_weights(network[0], seen.update, (8, 8, 1), settings['layer_weighting'])
    counted = jax.tree.map(lambda n, w: n * float(w), counted, weights)
  expected = 1e-6 * sum(jax.tree.leaves(counted))
  for factor in (0.99, 1.01):
    best = (state.best[0], jnp.float32(0), jnp.float32(factor * expected))
    assert bool(matching_.arrived(state._replace(best=best), seen)) == (factor < 1)


@pytest.mark.slow
def test_the_fast_schedule_descends_from_grey_with_what_csdlg_minimises(client, observe, small_images):
  images, labels = small_images
  observation = observe(images[:1], labels[:1])
  attack = attacks.csdlg_fast()(client)
  assert (attack.num_steps, attack.labels) == (2000, 'known')
  start = attack.init(jax.random.key(0), observation).dummy['images']
  assert (start == 0.5).all()
  fast, published = (jax.jit(each.objective) for each in (attack, attacks.csdlg()(client)))
  objectives = [each(observation, start, observation.targets) for each in (fast, published)]
  np.testing.assert_allclose(*objectives, rtol=1e-4)
  assert psnr(found_by(attacks.csdlg_fast(steps=200, tv=1e-6)(client), observation), images[:1]) > 20


@pytest.mark.parametrize('angle', [1e-5, 1e-7])
def test_distances_of_directions_and_their_floor_keep_their_digits_near_the_optimum(angle):
  """One minus a cosine is 0 there in float32, and below 0 after some roundings."""
  observed, simulated = {'x': jnp.asarray([1.0, 0.0])}, {'x': jnp.asarray([1.0, angle])}
  np.testing.assert_allclose(distances.cosine(simulated, observed), angle**2 / 2, rtol=1e-3)
  layers = (trees.Layer('dense', (('kernel',), ('bias',))),)
  dense = [{'kernel': jnp.asarray([[1.0], [x]]), 'bias': jnp.ones(1)} for x in (0.0, angle)]
  apart = distances.dense_input(dense[1], dense[0], layers=layers)
  np.testing.assert_allclose(apart, angle**2 / 2, rtol=1e-3)
  floor = distances.DISTANCES['cosine'].floor(jnp.float32(angle**2), jnp.float32(1))
  np.testing.assert_allclose(floor, angle**2 / 2, rtol=1e-3)


@pytest.mark.long
def test_lbfgs_on_the_cosine_distance_descends_beyond_the_rounding_of_a_cosine(client, observe, small_images):
  """It stalled where the line search saw steps of 6e-8 in the distance."""
  images, labels = small_images
  found = found_by(attacks.csdlg_lbfgs(steps=250)(client), observe(images[:1], labels[:1]))
  assert 0 < float(found.objective) < 1e-9 and psnr(found, images[:1]) > 50


@pytest.mark.long
def test_an_optimizer_that_compares_values_is_given_all_digits(client, observe, small_images):
  """Where the gradient is large, products of its factors are faster, and leave no digits below 1e-7."""
  model = models.create('mlp(widths=1200-1000)', 10)
  observation = observe(*(part[:1] for part in small_images), victim=Client(model, 10))
  chosen = [
    make(steps=1, form=form)(Client(model, 10)).init.__self__.by_products(
      observation, small_images[0][:1], observation.targets
    )
    for make in (attacks.csdlg, attacks.csdlg_lbfgs)
    for form in ('auto', 'ghost')
  ]
  assert chosen == [True, True, False, True]
