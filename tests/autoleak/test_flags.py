"""Defenses that only seem to protect are flagged; those that do what they say are not."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradleak as gl
from gradleak.studies.autoleak import flags

pytestmark = pytest.mark.usefixtures('fast_compilation')


@pytest.fixture(scope='module')
def digits():
  return gl.data.load('digits', 'test', limit=4)


@pytest.fixture(scope='module')
def scenario(digits):
  model = gl.models.create('mlp(widths=16)', 10, init='explicit')
  return gl.scenario(model, digits.samples, digits.targets, key=jax.random.key(0), dataset='digits')


def sign():
  """Sends the sign of every entry, at the mean size of its tensor."""
  return optax.stateless(lambda updates, _: jax.tree.map(lambda x: jnp.sign(x) * jnp.mean(jnp.abs(x)), updates))


def frozen(stddev):
  """Draws its noise once, when its state is made."""

  def init(params):
    return optax.tree.random_like(jax.random.key(7), params, jax.random.normal)

  return optax.GradientTransformation(
    init, lambda updates, state, params=None: (jax.tree.map(lambda x, n: x + stddev * n, updates, state), state)
  )


def remembered(stddev):
  """Draws its noise in the first upload, and keeps it in its state."""

  def init(params):
    return jax.tree.map(jnp.zeros_like, params), jnp.zeros((), bool)

  def update(updates, state, params=None, *, key, **extra):
    kept, drawn = state
    fresh = optax.tree.random_like(key, updates)
    noise = jax.tree.map(lambda old, new: jnp.where(drawn, old, stddev * new), kept, fresh)
    return jax.tree.map(jnp.add, updates, noise), (noise, jnp.ones((), bool))

  return optax.GradientTransformationExtraArgs(init, update)


def seeded(stddev):
  """Draws its noise from a seed that is the same for all clients, anew in each upload."""

  def update(updates, key, params=None):
    key, one = jax.random.split(key)
    return jax.tree.map(lambda x, n: x + stddev * n, updates, optax.tree.random_like(one, updates)), key

  return optax.GradientTransformation(lambda params: jax.random.key(3), update)


def deaf():
  """Is given a key, and draws from another one."""

  def update(updates, state, params=None, *, key, **extra):
    del key
    size = jnp.sum(jnp.abs(jax.tree.leaves(updates)[0]))  # so that it differs between samples
    noise = optax.tree.random_like(jax.random.key(1), updates, jax.random.normal)
    return jax.tree.map(lambda x, n: x + jnp.sin(1e4 * size) * n, updates, noise), state

  return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


@pytest.mark.long
@pytest.mark.parametrize(
  ('defense', 'flag', 'words'),
  [
    (gl.defenses.wrap(sign(), place='upload', label='sign'), flags.MASKED, 'at most 1 sizes'),
    (gl.defenses.wrap(frozen(0.1), place='upload', label='frozen', random=True), flags.FROZEN, 'the same noise'),
    (gl.defenses.wrap(remembered(0.1), 'upload', label='kept', random=True), flags.FROZEN, 'the same noise'),
    (gl.defenses.wrap(seeded(0.1), place='upload', label='seeded'), flags.FROZEN, 'the same noise'),
    (gl.defenses.wrap(deaf(), place='upload', label='deaf', random=True), flags.FROZEN, 'another key gives the same'),
  ],
  ids=['quantised sign', 'noise frozen in state', 'noise kept in state', 'seed of all clients', 'key not used'],
)
def test_uploads_give_a_mask_away(scenario, defense, flag, words):
  found = flags.of_uploads(jax.random.key(1), scenario, defense, 1)
  assert any(said.startswith(flag) and words in said for said in found)


@pytest.mark.long
@pytest.mark.parametrize(
  'defense',
  [
    gl.defenses.gaussian(stddev=0.1),
    gl.defenses.prune(rate=0.9),
    gl.defenses.clip(norm=0.1),
    gl.defenses.outpost(),
    gl.parse('clip(norm=0.1)+server_dp(noise=1,clients=10)'),  # what is random acts at the server
  ],
  ids=str,
)
def test_honest_defenses_are_not_flagged(scenario, defense):
  assert flags.of_uploads(jax.random.key(1), scenario, defense, 1) == []


def test_dropping_without_chance_is_not_flagged(scenario):
  """FFL chooses its layers by the model sent before, where there is one: no key changes that."""
  before = scenario._replace(previous=jax.tree.map(lambda x: 0.9 * x, scenario.variables))
  assert flags.of_uploads(jax.random.key(1), before, gl.defenses.fragmentation(ratio=0.4), 1) == []


@pytest.mark.long
def test_one_private_image_is_enough(scenario):
  alone = scenario._replace(samples=scenario.samples[:1], targets=scenario.targets[:1])
  frozen_noise = gl.defenses.wrap(frozen(0.1), place='upload', label='frozen', random=True)
  assert any(flags.FROZEN in said for said in flags.of_uploads(jax.random.key(1), alone, frozen_noise, 1))
  assert flags.of_uploads(jax.random.key(1), alone, gl.defenses.gaussian(stddev=0.1), 1) == []


def stopped(digits):
  """A network whose features pass no derivative on to the image: its updates tell all, and descent sees none of it."""

  def init(key, sample_shape):
    keys = jax.random.split(key)
    pixels = int(np.prod(sample_shape))
    return {'a': 0.5 * jax.random.normal(keys[0], (pixels, 8)), 'b': 0.5 * jax.random.normal(keys[1], (8, 10))}

  def apply(params, images):
    flat = jax.lax.stop_gradient(images.reshape(len(images), -1))
    return jax.nn.sigmoid(flat @ params['a']) @ params['b']

  model = gl.models.from_functions(init, apply)
  return gl.scenario(model, digits.samples, digits.targets, key=jax.random.key(0), dataset='digits')


@pytest.mark.slow
def test_an_objective_without_gradient_is_flagged(digits):
  attack = gl.attacks.csdlg_fast(steps=5, tv=0.0, start='uniform')
  settings = {'labels': 'known', 'controls': 4, 'knowledge': 'non-adaptive', 'progress': 'none'}
  found = gl.audit(jax.random.key(2), stopped(digits), [None, gl.defenses.clip(norm=1e9)], [attack], 2, **settings)
  none, clip = (
    flags.of_rows([row for row in found.rows if row['defense'] == name], found.controls, random=False, averaged=False)
    for name in ('none', 'clip(norm=1000000000.0)')
  )
  assert any(said.startswith(flags.MASKED) and 'never moved' in said for said in none)
  # A clip that is never reached changes nothing, and no defense is not expected to.
  assert any(said.startswith(flags.UNCHANGED) for said in clip)
  assert not any(said.startswith(flags.UNCHANGED) for said in none)


@pytest.mark.parametrize(('ended', 'stuck'), [(1.0, True), (0.2, False), (1.7, False)])
def test_an_objective_that_rose_has_moved(ended, stuck):
  rows = [{'objective_start': 1.0, 'objective': end, 'steps': 5, 'diverged': False} for end in (1.0, ended)]
  assert flags._stuck(rows) == stuck


def test_an_undefended_attack_that_fails_is_flagged_with_how_noise_turns_the_update(scenario):
  (fails,) = flags.of_undefended(jax.random.key(0), scenario, [row(), row()], 1)
  turned = gl.federated.roughness(
    jax.random.key(0), scenario.client, scenario.variables, scenario.samples[:8], scenario.targets[:8], stddevs=(0.01,)
  )
  assert fails.startswith(flags.FAILS) and fails.endswith(f'by a cosine distance of {turned[0.01]:.2g}')
  assert flags.of_undefended(jax.random.key(0), scenario, [row(), row(success=True)], 1) == []
  assert flags.of_undefended(jax.random.key(0), scenario, [], 1) == []  # none was run


def row(**changes):
  return {
    'attack': 'a', 'defense': 'gaussian', 'psnr': 8.0, 'change': 0.5, 'objective': 0.1, 'objective_start': 1.0,
    'steps': 9, 'diverged': False, 'success': False, 'control_psnr': 11.0, **changes,
  }  # fmt: skip


def test_what_rows_say():
  controls = [row(psnr=10.0), row(psnr=9.5)]
  assert flags.of_rows([row(psnr=9.0)], controls, random=False, averaged=False) == []
  (weaker,) = flags.of_rows([row(psnr=8.0)], controls, random=False, averaged=False)
  assert weaker == f'{flags.WEAKER}: a is nearer to the images on noise'
  other = [row(psnr=8.0), row(psnr=14.0, control_psnr=15.0)]  # with another prior, beyond its own control
  assert flags.of_rows(other, [*controls, row(psnr=12.0, control_psnr=15.0)], random=False, averaged=False) == []
  other = [row(psnr=4.0, control_psnr=15.0), row(psnr=12.0)]  # beyond its own control under one of two priors
  assert flags.of_rows(other, [*controls, row(psnr=12.0, control_psnr=15.0)], random=False, averaged=False) == []
  (averaged,) = flags.of_rows([row(psnr=20.0)], controls, random=True, averaged=False)
  assert averaged.startswith(flags.UNAVERAGED)
  assert flags.of_rows([row(psnr=20.0)], controls, random=True, averaged=True) == []
  closed = [row(psnr=20.0, steps=0, objective=1.0)]
  assert flags.of_rows(closed, controls, random=False, averaged=False) == []
