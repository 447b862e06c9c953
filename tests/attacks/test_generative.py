"""Attacks with a trained generator: CMA-ES and descent on latents that are in its range."""

import dataclasses
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend import core as jax_core

import gradleak as gl
from gradleak import Knowledge, Observation, UsageError
from gradleak.attacks import generative, matching
from gradleak.attacks.matching import evolution
from gradleak.attacks.matching.optimizers import first_order, into_l1_ball, within
from gradleak.audit import labelled
from gradleak.core import trees
from gradleak.priors import gan, latent, trained
from tests.attackers import noise_like, psnr, run

pytestmark = pytest.mark.usefixtures('fast_compilation')
LATENT = 3


@pytest.fixture(scope='module')
def prior(tmp_path_factory):
  """Returns the path of a generator of 4×4 images by one dense layer."""
  rng = np.random.default_rng(0)
  path = tmp_path_factory.mktemp('prior') / 'dense.npz'
  weight, bias = rng.normal(size=(16, LATENT)), 0.3 * rng.normal(size=16)
  np.savez(path, **{'0.weight': weight.astype(np.float32), '0.bias': bias.astype(np.float32)})
  return str(path)


@pytest.fixture(scope='module')
def deep(tmp_path_factory):
  """Returns the path of a generator of 4×4 images by three dense layers."""
  rng = np.random.default_rng(1)
  path, sizes = tmp_path_factory.mktemp('prior') / 'deep.npz', (LATENT, 8, 12, 16)
  arrays = {}
  for number, (wide, high) in enumerate(itertools.pairwise(sizes)):
    arrays[f'{2 * number}.weight'] = rng.normal(size=(high, wide)).astype(np.float32) / np.sqrt(wide)
    arrays[f'{2 * number}.bias'] = 0.3 * rng.normal(size=high).astype(np.float32)
  np.savez(path, **arrays)
  return str(path)


@pytest.fixture(scope='module')
def linear():
  """Returns a linear client of 4×4 images and its variables."""
  model = gl.models.create('mlp(widths=6)', 3, init='default')
  client = gl.ClientSettings().client(model, 3)
  return client, model.init(jax.random.key(0), (4, 4, 1))


@pytest.fixture(scope='module')
def seen(linear, prior):
  """Returns (the observation of an image that the generator makes, that image)."""
  return observed(linear, trained.load(prior))


def observed(linear, loaded, *change):
  """Returns (the observation of an image that a generator makes of features that are changed, that image)."""
  client, variables = linear
  image = loaded.make(loaded.weights, jnp.asarray([[1.0, -0.5, 0.3]]), *change)
  labels = jnp.asarray([1])
  update = jax.jit(client.local_update)(None, variables, image, labels).update
  return Observation(
    variables, update, jax.nn.one_hot(labels, 3), Knowledge(labels='known'), image.shape, 3,
    prepared=jax.tree.map(jnp.asarray, loaded.weights),
  ), image  # fmt: skip


def _equations(jaxpr):
  """Yields the equations of a jaxpr and of those within."""
  for one in jaxpr.eqns:
    yield one
    for inner in jax_core.jaxprs_in_params(one.params):
      yield from _equations(inner)


def test_the_divergence_by_hand():
  latents = {'latents': jnp.asarray([[1.0, 3.0]])}  # mean 2, variance 1
  assert float(evolution.divergence(latents)) == pytest.approx(2.0)
  wide = {'latents': jnp.asarray([[-2.0, 2.0]])}  # mean 0, variance 4
  assert float(evolution.divergence(wide)) == pytest.approx(0.5 * (4 - np.log(4) - 1))


@pytest.mark.slow
def test_evolution_finds_an_image_that_the_generator_makes(linear, prior, seen):
  observation, image = seen
  attack = gl.attacks.ggl(file=prior, steps=60, population=16, kl=0.0)(linear[0])
  found, objectives, _ = run(attack, jax.random.key(1), observation)
  assert psnr(found.samples, image) > 30
  assert (np.diff(objectives) <= 0).all() and float(found.objective) == float(objectives[-1])
  assert float(found.objective) < 1e-3 * float(found.objective_start) and int(found.labels[0]) == 1
  nothing = dataclasses.replace(
    observation, update=jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), observation.update)
  )
  lost, _, _ = run(attack, jax.random.key(1), nothing)
  assert np.isnan(lost.samples).all()  # it diverged


@pytest.mark.slow
def test_lanes_are_decomposed_one_after_the_other(linear, prior, seen):
  """On CPU a batch of eigendecompositions may never end where two devices run one each."""
  observation, _ = seen
  attack = gl.attacks.ggl(file=prior, steps=2, population=4)(linear[0])
  keys = jax.random.split(jax.random.key(0), 3)
  states = jax.vmap(lambda key: attack.init(key, observation))(keys)
  step = jax.make_jaxpr(jax.vmap(lambda state: attack.step(state, observation)))(states)
  ranks = [one.invars[0].aval.ndim for one in _equations(step.jaxpr) if one.primitive.name == 'eigh']
  assert ranks and set(ranks) == {2}


@pytest.mark.slow
def test_the_divergence_holds_latents_back(linear, prior, seen):
  observation, _ = seen
  spreads = []
  for kl in (0.0, 100.0):
    attack = gl.attacks.ggl(file=prior, steps=20, population=8, kl=kl)(linear[0])
    _, _, state = run(attack, jax.random.key(1), observation)
    spreads.append(float(evolution.divergence(state.best[0])))
  assert spreads[1] < 0.1 * spreads[0]


def test_labels_are_not_searched(linear, prior, seen):
  observation = dataclasses.replace(seen[0], knowledge=Knowledge(labels='optimised'))
  with pytest.raises(UsageError, match='searches latents, not labels'):
    gl.attacks.ggl(file=prior)(linear[0]).init(jax.random.key(0), observation)


@pytest.mark.slow
def test_latents_first_and_then_the_weights(linear, prior, seen):
  observation, image = seen
  attack = gl.attacks.gias(file=prior, steps=80, latent_steps=60, learning_rate=0.1)(linear[0])
  found, _, state = run(attack, jax.random.key(2), observation)
  assert psnr(found.samples, image) > 20
  early = gl.attacks.gias(file=prior, steps=60, latent_steps=60, learning_rate=0.1)(linear[0])
  _, _, first = run(early, jax.random.key(2), observation)
  assert not any(np.any(leaf) for leaf in jax.tree.leaves(first.dummy['weights']['change']))
  assert any(np.any(leaf) for leaf in jax.tree.leaves(state.dummy['weights']['change']))
  np.testing.assert_array_equal(state.dummy['weights']['latents'], first.dummy['weights']['latents'])


@pytest.mark.slow
def test_features_after_latents_find_more(linear, deep):
  """Of an image just outside of what the generator makes of latents; and of noise in place of its upload."""
  loaded = trained.load(deep)
  observation, image = observed(
    linear, loaded, lambda layer, x: x + 0.1 * jnp.cos(jnp.arange(1.0, 1 + x.shape[1]))[None]
  )
  settings = {'file': deep, 'latent_steps': 100, 'radius': 0.2, 'tv': 0.0}
  latents, features = (gl.attacks.gifd(steps=steps, **settings)(linear[0]) for steps in (100, 300))
  first, _, _ = run(latents, jax.random.key(2), observation)
  both, objectives, state = run(features, jax.random.key(2), observation)
  assert (
    float(both.objective) < 0.3 * float(first.objective) and psnr(both.samples, image) > psnr(first.samples, image) + 3
  )
  assert float(both.objective) == pytest.approx(min(map(float, objectives)), abs=1e-6)
  given = features.objective(observation, both.samples, observation.targets)
  assert float(given) == pytest.approx(float(both.objective), abs=1e-6)  # the score is that of this image
  weights = state.dummy['weights']
  for layer, name in enumerate(('features_00', 'features_01')):
    assert 0 < float(jnp.mean(jnp.abs(weights[name]))) <= 0.2 * (1 + 0.5 * layer) + 1e-6
  control = dataclasses.replace(observation, update=noise_like(observation.update))
  lost, _, _ = run(features, jax.random.key(2), control)
  assert psnr(both.samples, image) > max(20, psnr(lost.samples, image) + 5)


def test_features_start_where_the_layers_before_ended(deep):
  """In turn, and unchanged until then; two steps for the latents, one for each of two layers."""
  loaded = trained.load(deep)
  generator = latent.layered(loaded.make, LATENT)
  weights, _ = generator.init(jax.random.key(0), (1, 4, 4, 1), loaded.weights)
  assert {name: leaf.shape for name, leaf in weights.items()} == {
    'latents': (1, LATENT), 'features_00': (1, 8), 'features_01': (1, 12),
  }  # fmt: skip
  np.testing.assert_allclose(
    generator.apply(weights, (), (1, 4, 4, 1), loaded.weights), loaded.make(loaded.weights, weights['latents'])
  )
  optimizer = generative.in_turn(optax.sgd(1.0), lambda number, length: optax.sgd(number + 2.0), 2, 4)
  dummy = {'weights': weights}
  state, moved = optimizer.init(dummy), []
  for _ in range(4):
    updates, state = optimizer.update(jax.tree.map(jnp.ones_like, dummy), state, dummy)
    moved.append([float(leaf[0, 0]) for _, leaf in sorted(updates['weights'].items())])
  assert moved == [[0, 0, -1], [0, 0, -1], [-2, 0, 0], [0, -3, 0]]


def test_a_generator_without_layers_has_no_features(linear, prior, seen):
  with pytest.raises(UsageError, match='no layers between its latents and its images'):
    gl.attacks.gifd(file=prior)(linear[0]).init(jax.random.key(0), seen[0])


@pytest.mark.parametrize('radius', [0.0, 0.5, 4.0, 1e3])
def test_the_ball_against_sorting(radius):
  """Duchi et al. 2008, figure 1, row by row."""
  rows = np.random.default_rng(0).normal(size=(3, 50)).astype(np.float32)
  rows[1, 10:] = 0
  rows[2] = 0
  expected = rows.copy()
  for row, size in zip(expected, np.abs(rows), strict=True):
    if size.sum() > radius:
      down = np.sort(size)[::-1]
      over = (np.cumsum(down) - radius) / np.arange(1, 51)
      row[:] = np.sign(row) * np.maximum(size - over[np.flatnonzero(down > over)[-1]], 0) if radius else 0
  found = into_l1_ball(jnp.asarray(rows), jnp.float32(radius))
  np.testing.assert_allclose(found, expected, atol=1e-5)
  assert (np.abs(found).sum(axis=1) <= radius * (1 + 1e-6)).all()


def test_each_image_has_a_ball_of_its_own():
  move, here = jnp.asarray([[3.0, 1.0], [0.2, 0.1]]), jnp.asarray([[1.0, 0.0], [0.0, 0.0]])
  updates, _ = within(1.0).update(move, optax.EmptyState(), here)
  np.testing.assert_allclose(here + updates, [[2.0, 0.0], [0.2, 0.1]], atol=1e-6)


def test_the_second_optimizer_starts_where_the_first_ends():
  """Two steps of rate 1 on the latents, then rate 0.5 on the change, by hand."""
  optimizer = generative.in_turn(optax.sgd(1.0), lambda number, length: optax.sgd(0.5, momentum=0.9), 2, 4)
  dummy = {'weights': {'latents': jnp.zeros(1), 'change': jnp.zeros(1)}}
  gradient = jax.tree.map(jnp.ones_like, dummy)
  state, path = optimizer.init(dummy), []
  for _ in range(4):
    updates, state = optimizer.update(gradient, state, dummy)
    dummy = optax.apply_updates(dummy, updates)
    path.append((float(dummy['weights']['latents'][0]), float(dummy['weights']['change'][0])))
  np.testing.assert_allclose(path, [(-1, 0), (-2, 0), (-2, -0.5), (-2, -1.45)], rtol=1e-6)


def test_labels_need_a_step_of_the_latents_beside_which_they_move():
  def made(at):
    return generative.in_turn(optax.sgd(1.0), lambda number, length: optax.sgd(0.5), at, 4)

  dummy = {'weights': {'latents': jnp.zeros(1), 'change': jnp.zeros(1)}, 'logits': jnp.zeros((1, 3))}
  with pytest.raises(UsageError, match='latent_steps is 0'):
    made(0).init(dummy)
  assert made(0).init({'weights': dummy['weights']}).count == 0
  updates, _ = made(1).update(jax.tree.map(jnp.ones_like, dummy), made(1).init(dummy), dummy)
  assert (updates['logits'] == -1).all()


def test_the_denoiser_is_a_force_without_its_own_slope():
  """Of a denoiser that halves what it gets, at the last level."""
  asked = []

  def half(weights, noisy, levels):
    asked.append(levels)
    return weights * noisy

  made = matching.Denoising(half, 3.0, 0.4, 0.1)
  seen = types.SimpleNamespace(prepared=0.5)
  images = jnp.asarray([[1.0, 2.0], [0.5, 0.0]]).reshape(2, 2, 1, 1)

  def term(images, done):
    return made.weight * made(images[None], matching.Given(None, seen, 1, done, 3))

  for done in range(3):
    term(images, jnp.int32(done))
  assert [float(level[0]) for level in asked] == pytest.approx([0.4, 0.2, 0.1])
  count = jnp.int32(2)
  noise = jax.random.normal(jax.random.fold_in(jax.random.key(0), count), images.shape)
  removed = images - 0.5 * (images + 0.1 * noise)
  size = float(jnp.sqrt(jnp.mean(jnp.square(removed))))
  value, slope = jax.value_and_grad(lambda x: term(x, count))(images)
  assert float(value) == pytest.approx(3.0 * size, rel=1e-5)
  np.testing.assert_allclose(slope, 3.0 * removed / 4 / size, rtol=1e-4)


@pytest.mark.long
def test_a_denoiser_pulls_images_to_its_own(linear, seen):
  """Where an update says nothing, the images are what a denoiser leaves; objectives at the truth have its term."""
  observation, image = seen
  silent = dataclasses.replace(observation, update=jax.tree.map(jnp.zeros_like, observation.update))
  denoising = matching.Denoising(lambda weights, noisy, levels: jnp.full_like(noisy, 0.25), 1.0, 0.3, 0.03)
  attack = gl.attacks.gradient_matching(
    linear[0],
    first_order('adam', 0.02, 200),
    200,
    distance='cosine',
    denoising=denoising,
    start='uniform',
    labels='known',
  )
  found, _, _ = run(attack, jax.random.key(0), silent)
  np.testing.assert_allclose(found.samples, 0.25, atol=0.02)
  expected = 1 + float(jnp.sqrt(jnp.mean(jnp.square(image - 0.25))))
  assert float(attack.objective(silent, image, observation.targets)) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
  ('text', 'match'),
  [
    ('pnp(first_level=0.9)', 'first_level is 0.9'),
    ('pnp(last_level=0.0)', 'last_level is 0'),
    ('pnp(prior=-1.0)', 'prior is -1'),
    ('pnp(width=0)', 'width is 0'),
    ('ggl(population=2)', 'population is 2'),
    ('ggl(steps=0)', 'steps is 0'),
    ('ggl(kl=-1.0)', 'kl is -1'),
    ('ggl(width=0)', 'width is 0'),
    ('ggl(training_steps=0)', 'training_steps is 0'),
    ('gias(training_steps=30)', 'training_steps is 30, expected a multiple of 20'),
    ('ggl(distance=cosin)', 'distance'),
    ('ggl(file=none.npz)', 'cannot read the weights'),
    ('gias(latent_steps=7000)', 'latent_steps is 7000'),
    ('gias(weight_rate=0.0)', 'weight_rate is 0'),
    ('gias(tv=-1.0)', 'tv is -1'),
    ('gifd(latent_steps=7000)', 'latent_steps is 7000'),
    ('gifd(radius=-1.0)', 'radius is -1'),
    ('gifd(growth=-1.0)', 'growth is -1'),
    ('gifd(learning_rate=0.0)', 'learning_rate is 0'),
    ('gifd(width=0)', 'width is 0'),
  ],
)
def test_bad_settings_are_refused(text, match):
  with pytest.raises(UsageError, match=match):
    gl.registry.attack(text)(None)


@pytest.fixture(scope='module')
def digits():
  """Returns a scenario of two digits with public ones, and the public images."""
  private, public = gl.data.load('digits', 'test', limit=2), gl.data.load('digits', 'train', limit=40)
  model = gl.models.create('mlp(widths=8)', 10, init='default')
  scenario = gl.scenario(
    model,
    private.samples,
    private.targets,
    key=jax.random.key(0),
    public=(public.samples, public.targets),
  )
  return scenario, public.samples


def audited(scenario, attack):
  settings = gl.AuditSettings(restarts=1, controls=2, knowledge='non-adaptive', labels='known')
  return gl.audit(jax.random.key(0), scenario, [None], [attack], 2, settings=settings, progress='none')


@pytest.mark.slow
def test_audits_train_it_on_public_images(digits):
  scenario, _ = digits
  result = audited(scenario, gl.attacks.ggl(steps=2, population=4, training_steps=20, width=2))
  assert len(result.rows) == 2 and all(np.isfinite(row['psnr']) for row in result.rows)
  denoised = audited(scenario, gl.attacks.pnp(steps=2, training_steps=20, width=2))
  assert all(np.isfinite(row['psnr']) for row in denoised.rows)
  with pytest.raises(UsageError, match='learns from public data'):
    audited(scenario._replace(public=None), gl.attacks.ggl(steps=2))


def test_attacks_that_hold_the_same_prior_train_it_once(monkeypatch, digits):
  scenario, public = digits
  trained_on = []

  def train(key, made, images, steps, on_steps):
    trained_on.append((type(made.module).__name__, steps, len(images)))
    return types.SimpleNamespace(average={'of': len(trained_on)})

  monkeypatch.setattr(generative.training, 'train', train)
  monkeypatch.setattr(generative, '_TRAINED', {})

  def weights(method, seed=0, images=public):
    held = scenario._replace(public=(images, None))
    return method.prepare(jax.random.key(seed), held, method.settings, 1)['of']

  few = {'training_steps': 20, 'width': 2}
  ggl, gias, pnp = (make(**few) for make in (gl.attacks.ggl, gl.attacks.gias, gl.attacks.pnp))
  assert [weights(ggl), weights(gias), weights(pnp), weights(ggl)] == [1, 1, 2, 1]
  others = weights(ggl, seed=1), weights(ggl, images=public[:-1]), weights(gl.attacks.ggl(**few | {'width': 3}))
  assert others == (3, 4, 5) and weights(gias) == 6  # the first one is no longer kept
  assert trained_on[:2] == [('Generator', 20, len(public)), ('Denoiser', 20, len(public))]


def test_a_file_of_another_content_is_another_attack(tmp_path):
  path = tmp_path / 'prior.npz'
  attack = gl.attacks.ggl(file=str(path))

  def stands_for():
    return labelled.text(labelled.Labelled('ggl', attack))

  missing = stands_for()
  path.write_bytes(b'first')
  first = stands_for()
  path.write_bytes(b'second')
  assert missing == str(attack) and len({missing, first, stands_for()}) == 3
  path.write_bytes(b'first')
  assert stands_for() == first
  assert labelled.text(labelled.Labelled('csdlg', gl.attacks.csdlg())) == 'csdlg'


@pytest.mark.slow
def test_audits_refuse_a_prior_that_has_seen_a_private_image(digits, tmp_path):
  scenario, public = digits
  made = gan.training((8, 8, 1), width=2)
  weights = made.init(jax.random.key(0)).generator
  for name, images in {'apart': public, 'private': np.concatenate([public, scenario.samples[:1]])}.items():
    trained.save(tmp_path / f'{name}.npz', made.module, weights, images, dataset='digits', split='train')
  given = {'steps': 2, 'population': 4}
  result = audited(scenario._replace(public=None), gl.attacks.ggl(file=str(tmp_path / 'apart.npz'), **given))
  assert len(result.rows) == 2 and {row['tier'] for row in result.rows} == {'D'}
  told = (
    'It holds a generator that was trained on 40 images of digits, split train, and on no private image that is known.'
  )
  assert any(told in sentences for sentences in result.threat_models.values())
  with pytest.raises(UsageError, match='1 of the 2 private images are among'):
    audited(scenario, gl.attacks.ggl(file=str(tmp_path / 'private.npz'), **given))
  both = scenario._replace(public=(scenario.samples, scenario.targets))
  with pytest.raises(UsageError, match='2 of the 2 private images are among'):
    audited(both, gl.attacks.ggl(steps=2, population=4, training_steps=20, width=2))


@pytest.mark.slow
def test_the_image_of_the_best_restart_has_its_score(linear, deep):
  """The published code returns the image of the last one."""
  client, variables = linear
  images = np.asarray(jax.random.uniform(jax.random.key(4), (2, 4, 4, 1)))
  scenario = gl.scenario(client.model, images, np.asarray([0, 2]), variables=variables)
  attack = gl.attacks.gifd(file=deep, steps=6, latent_steps=2, tv=0.0, l2=0.0)
  settings = gl.AuditSettings(controls=2, knowledge='non-adaptive', labels='known')
  one, four = (
    gl.audit(jax.random.key(1), scenario, [None], [attack], 2, settings=settings, restarts=restarts, progress='none')
    for restarts in (1, 4)
  )
  (pictures,) = four.reconstructions.values()
  for trial, row in enumerate(four.rows):
    label = scenario.targets[trial : trial + 1]
    sent, would = (
      client.local_update(None, variables, batch, label).update
      for batch in (images[trial : trial + 1], pictures[trial])
    )
    assert row['objective'] == pytest.approx(1 - float(trees.cosine(sent, would)), abs=1e-5)
  assert sum(row['objective'] for row in four.rows) < sum(row['objective'] for row in one.rows)


@pytest.mark.slow
@pytest.mark.parametrize(
  ('attack', 'adaptive_attacks'),
  [
    (gl.attacks.ggl(steps=2, population=4, training_steps=20, width=2), {None, 'masked'}),
    (gl.attacks.pnp(steps=2, training_steps=20, width=2), {None, 'masked', 'masked+prior'}),
  ],
)
def test_attackers_who_know_the_defense_hold_a_prior_too(digits, attack, adaptive_attacks):
  """What changes settings is run where the attack has them: `pnp` has a weight of its prior, `ggl` has none."""
  settings = gl.AuditSettings(restarts=1, controls=2, knowledge='both', labels='known')
  defense = gl.defenses.prune(rate=0.5)
  result = gl.audit(jax.random.key(0), digits[0], [defense], [attack], 2, settings=settings, progress='none')
  assert {row['adaptive'] for row in result.rows} == adaptive_attacks
  assert all(np.isfinite(row['psnr']) for row in result.rows)
