"""Learning to Invert: what the network learns, from which client, and what an audit makes of it."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradleak as gl
from gradleak import UsageError
from gradleak.attacks import learned
from gradleak.engine import parts, progress
from gradleak.federated.client import COSTLY

pytestmark = pytest.mark.usefixtures('fast_compilation')

SMALL = gl.attacks.lti(hidden=32, steps=40, batch_size=32, reuse=4, learning_rate=3e-3)


def made(digits, private=8, **given):
  images, labels = digits
  model = gl.models.create('mlp(widths=16)', 10, init='default')
  given = {'public': (images[200:], labels[200:]), **given}
  return gl.scenario(model, images[:private], labels[:private], key=jax.random.key(0), **given)


@pytest.fixture(scope='module')
def honest(digits):
  return made(digits)


CLIPPED_NOISE = gl.defenses.chain(gl.defenses.clip(norm=0.5), gl.defenses.gaussian(stddev=0.01))


def mean(rows, name, **fields):
  found = [row[name] for row in rows if all(row[key] == value for key, value in fields.items())]
  assert found
  return np.mean(found)


def mixed(updates, state, params=None, **extra):
  """Reverses the entries of each tensor."""
  return jax.tree.map(lambda u: u.reshape(-1)[::-1].reshape(u.shape), updates), state


OWN = gl.defenses.wrap(optax.GradientTransformation(lambda params: optax.EmptyState(), mixed), 'upload', label='mixed')


@pytest.fixture(scope='module')
def run(honest, tmp_path_factory):
  """Returns a function: defenses -> (result, under which defenses the attack learned)."""
  folder, lines = tmp_path_factory.mktemp('lti') / 'run', []

  def listen(*_):
    pass

  listen.note = lines.append

  def audit(defenses):
    lines.clear()
    settings = {'controls': 8, 'workdir': folder, 'progress': listen}
    found = gl.audit(jax.random.key(1), honest, defenses, [SMALL], 8, **settings)
    return found, [line.partition('data')[2].strip(' …') for line in lines if 'learns from' in line]

  return audit


@pytest.fixture(scope='module')
def found(run):
  return run([None, CLIPPED_NOISE])


@pytest.mark.long
def test_who_learns_through_the_defense_sees_more(found):
  defense = str(CLIPPED_NOISE)
  found, learned_under = found
  adaptive, non_adaptive = (mean(found.rows, 'mse', defense=defense, adaptive=name) for name in ('learned', None))
  bare, control = mean(found.rows, 'mse', defense='none'), np.mean([row['mse'] for row in found.controls])
  assert bare < adaptive < non_adaptive and adaptive < control
  assert {row['adaptive'] for row in found.rows if row['defense'] == 'none'} == {None}
  assert learned_under == ['', f'under {CLIPPED_NOISE}']
  assert {row['tier'] for row in found.rows} == {'D'}
  assert any('1,597 samples' in sentence for sentence in found.threat_models[str(SMALL)])


@pytest.mark.parametrize('deviation', [0.0, 1e-4, 0.1])
@pytest.mark.parametrize('mean', [0.0, 0.1, 0.7])
def test_the_scale_of_a_tensor_is_its_deviation_beside_any_mean(mean, deviation):
  """The mean of squares less the square of the mean is rounding where the deviation is small."""

  def updates(key):
    return {'w': jnp.full((32, 50), mean) + deviation * jax.random.normal(key, (32, 50))}

  found, scales = learned._moments(updates, jax.random.key(0), {'w': jnp.zeros(50)}, 1024)
  np.testing.assert_allclose(found['w'], mean, atol=0.15 * deviation)
  np.testing.assert_allclose(scales['w'], deviation or 1.0, rtol=0.02)


def test_the_scale_of_a_tensor_holds_what_differs_between_groups():
  def updates(key):
    return {'w': jnp.full((32, 50), 0.7) + 1e-3 * jax.random.normal(key)}

  _, scales = learned._moments(updates, jax.random.key(0), {'w': jnp.zeros(50)}, 32 * 1024)
  np.testing.assert_allclose(scales['w'], 1e-3, rtol=0.1)


@pytest.mark.long
def test_the_same_key_learns_the_same(honest):
  """Private images play no part, and the client that is simulated does."""
  attack, key = SMALL.changed(steps=3), jax.random.key(3)

  def learn(scenario, key=key):
    return jax.tree.leaves(attack.prepare(key, scenario, attack.settings, 1))

  def same(a, b):
    return all(map(np.array_equal, a, b))

  first = learn(honest)
  assert same(first, learn(honest._replace(samples=1 - honest.samples)))
  assert not same(first, learn(honest, jax.random.key(4)))
  images, labels = honest.public
  assert not same(first, learn(honest._replace(public=(images**2, labels))))


@pytest.mark.long
def test_learning_tells_how_far_it_is_and_does_not_depend_on_its_parts(honest, monkeypatch):
  attack, key = SMALL.changed(steps=7), jax.random.key(3)
  heard = []
  with parts.told(lambda *where: heard.append(where)):
    found = attack.prepare(key, honest, attack.settings, 1)
  assert [where for where in heard if where[2] == 'steps'] == [(done, 7, 'steps') for done in range(1, 8)]
  assert heard[0] == (256, 256, 'measured uploads')
  draws = [where[:2] for where in heard[1:] if where[2] != 'steps']
  assert draws == [(done, 16) for done in range(1, 17)]  # reuse squared
  monkeypatch.setattr(parts, 'NUMBER', 2)
  again = attack.prepare(key, honest, attack.settings, 1)
  assert all(map(np.array_equal, jax.tree.leaves(found), jax.tree.leaves(again)))
  assert len(heard) == 1 + 16 + 7  # nobody is told any more


@pytest.mark.slow
def test_uploads_that_take_long_tell_how_far_they_are(honest, tmp_path, monkeypatch):
  lines = []

  def listen(*_):
    pass

  listen.note = lines.append
  monkeypatch.setattr(progress, 'WAIT', 0.0)
  defenses = [None, gl.defenses.concealment(steps=COSTLY)]
  settings = {
    'controls': 8,
    'group_size': 1,
    'workdir': tmp_path / 'run',
    'knowledge': 'non-adaptive',
    'progress': listen,
  }
  gl.audit(jax.random.key(1), honest, defenses, [gl.attacks.fidel()], 8, **settings)
  told = [line for line in lines if line.startswith('computing the uploads')]
  assert told and {line.partition(' of ')[2].split(', ')[0] for line in told} == {
    '8 uploads under concealment(steps=10)'
  }


@pytest.mark.long
def test_what_is_done_is_not_learned_again(run, found):
  again, learned_under = run([None, CLIPPED_NOISE])
  assert again.rows == found[0].rows and learned_under == []


@pytest.mark.slow
def test_a_users_own_defense_that_is_added_is_learned_through_alone(run, found):
  """Nothing that is declared of it says what it does."""
  more, learned_under = run([None, OWN, CLIPPED_NOISE])
  assert learned_under == ['', f'under {OWN}']  # who does not know it meets it, too
  assert [row for row in more.rows if row['defense'] != str(OWN)] == found[0].rows
  adaptive, non_adaptive = (mean(more.rows, 'mse', defense=str(OWN), adaptive=name) for name in ('learned', None))
  assert adaptive < 0.8 * non_adaptive


def test_a_projection_keeps_shapes_and_inner_products():
  key = jax.random.key(0)
  tree = {'a': jax.random.normal(key, (7, 5)), 'b': jax.random.normal(key, (6,))}
  scales = {'a': jnp.float32(2), 'b': jnp.float32(0.5)}
  plain = learned.features(tree, scales, jnp.zeros(0, jnp.int8), 8)
  np.testing.assert_allclose(plain, np.concatenate([np.ravel(tree['a']) / 2, 2 * np.asarray(tree['b'])]))
  signs = jax.random.rademacher(key, (4000, 41), jnp.int8)
  read = jax.vmap(lambda signs: learned.features(tree, scales, signs, 8))(signs)
  assert read.shape == (4000, 8)
  np.testing.assert_allclose(np.mean(np.sum(np.square(read), 1)), np.sum(np.square(plain)) * 8 / 41, rtol=0.05)


@pytest.mark.slow
def test_pairs_are_read_from_projected_uploads(honest):
  attack = SMALL.changed(projection=512)
  inverse = attack.prepare(jax.random.key(0), honest, attack.settings, 2)
  assert inverse.mean.shape == (512,) and inverse.layers[0][0].shape == (512, 32)

  def read(images, labels):
    update = honest.client.local_update(None, honest.variables, images, labels).update
    pixels = images.reshape(2, -1)
    shown = inverse.images(update).reshape(pixels.shape)
    return learned.unordered_error(shown, pixels), jnp.mean(
      jnp.square(honest.public[0].mean(0).reshape(1, -1) - pixels)
    )

  pairs = honest.samples.reshape(4, 2, 8, 8, 1), honest.targets.reshape(4, 2)
  found, mean_image = jax.jit(jax.vmap(read))(*pairs)
  assert jnp.mean(found) < 0.9 * jnp.mean(mean_image)


@pytest.mark.long
@pytest.mark.parametrize('number', [1, 3])
def test_the_error_of_a_batch_does_not_depend_on_its_order(number):
  found, images = jax.random.uniform(jax.random.key(number), (2, number, 9))
  orders = [images[np.asarray(order)] for order in itertools.permutations(range(number))]
  errors = jax.vmap(learned.unordered_error, (None, 0))(found, jnp.stack(orders))
  np.testing.assert_allclose(errors, errors[0], rtol=1e-6)
  np.testing.assert_allclose(errors[0], min(np.mean(np.square(found - order)) for order in orders), rtol=1e-6)


def test_beside_a_captured_upload_there_are_no_public_images(honest):
  model, update = honest.client.model, jax.tree.map(np.ones_like, honest.variables['params'])
  with pytest.raises(UsageError, match='learns from public data, and beside a captured upload'):
    gl.attack(jax.random.key(0), model, honest.variables, update, sample_shape=(8, 8, 1), attacks=[SMALL])


@pytest.mark.parametrize(
  'changes', [{'hidden': 0}, {'steps': 0}, {'batch_size': 0}, {'reuse': 0}, {'projection': 0}, {'learning_rate': 0.0}]
)
def test_settings_have_a_range(changes):
  with pytest.raises(UsageError, match=next(iter(changes))):
    SMALL.changed(**changes)(None)


@pytest.mark.slow
def test_a_costly_defense_is_simulated_less_often(digits):
  """All uploads are drawn once, as many as take ten times the gradients of an undefended client."""
  drawn = []

  def counted(updates, state, params=None, **extra):
    jax.debug.callback(lambda _: drawn.append(1), jax.tree.leaves(updates)[0])
    return updates, state

  own = optax.GradientTransformation(lambda params: optax.EmptyState(), counted)
  scenario, attack = made(digits), SMALL.changed(reuse=None)
  context = gl.defenses.Context(scenario.client, scenario.variables, (8, 8, 1))
  defense = gl.defenses.wrap(own, 'upload', gradients=lambda context, settings: 19)
  client = gl.defenses.bind(defense, context).client(scenario.client)
  assert client.extra_gradients == 19 and client.undefended().extra_gradients == 0
  inverse = attack.prepare(jax.random.key(0), scenario._replace(client=client), attack.settings, 1)
  jax.effects_barrier()
  steps, size = attack.settings['steps'], attack.settings['batch_size']
  assert len(drawn) == 32 + 10 * steps * size // 20
  uploads = jax.vmap(lambda x, y: scenario.client.local_update(None, scenario.variables, x, y).update)
  found = jax.vmap(inverse.images)(uploads(scenario.samples[:, None], scenario.targets[:, None]))
  images = scenario.samples.reshape(found.shape)
  assert np.mean(np.square(found - images)) < 0.9 * np.mean(np.square(images.mean(0) - images))


@pytest.mark.parametrize(
  'reuse, extra, fresh, pool', [(None, 9, 32, 32), (None, 10**4, 0, 32), (4, 19, 8, 128), (1, 10**4, 32, 32)]
)
def test_how_many_uploads_are_drawn(reuse, extra, fresh, pool):
  """A defense of few gradients is drawn anew at each step, and what is asked for is done."""
  training = learned.Training(**SMALL.changed(reuse=reuse).settings, number=1, extra_gradients=extra)
  assert (training.fresh, training.pool) == (fresh, pool)


@pytest.mark.parametrize(
  ('defense', 'gradients'),
  [(gl.defenses.concealment(steps=70), 70), (gl.defenses.soteria(rate=0.5), 16), (gl.defenses.clip(norm=1), 0)],
)
def test_how_many_gradients_a_defense_computes(honest, defense, gradients):
  context = gl.defenses.Context(honest.client, honest.variables, (8, 8, 1))
  assert gl.defenses.bind(defense, context).client(honest.client).extra_gradients == gradients


def test_a_private_image_among_the_public_ones_is_refused(digits):
  images, labels = digits
  scenario = made(digits, public=(images[7:40], labels[7:40]))
  with pytest.raises(UsageError, match='1 of the 8 private images are among those that the attack learns from'):
    gl.audit(jax.random.key(1), scenario, [None], [SMALL], 8, controls=1, progress='none')
