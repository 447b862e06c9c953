"""Matching whose derivatives are soft at first: when they are, what is kept, and the default for an update."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import gradleak as gl
from gradleak import attacks
from gradleak.attacks.matching import simulation, terms
from gradleak.metrics import psnr
from gradleak.studies.captured import defaults
from tests.attacks.test_attack_contract import KEY, whole

pytestmark = pytest.mark.usefixtures('fast_compilation')
SHAPE = (12, 12, 3)


class Net(nn.Module):
  """Convolution, ReLU and max pool, twice, before a dense layer: half of all windows hold their places alone."""

  @nn.compact
  def __call__(self, x):
    x = nn.max_pool(nn.relu(nn.Conv(8, (3, 3), padding='VALID')(x - 0.5)), (2, 2), (2, 2))
    return nn.Dense(4)(nn.relu(nn.Dense(24)(x.reshape(len(x), -1))))


@pytest.fixture(scope='module')
def seen():
  """Returns (client, `Observation`, the image) of a smooth picture."""
  model = gl.models.from_flax(Net())
  variables = model.init(jax.random.key(1), SHAPE)
  rows, columns = jnp.meshgrid(jnp.linspace(0, 1, 12), jnp.linspace(0, 1, 12), indexing='ij')
  image = jnp.stack([jnp.where(rows + columns < 0.9, 0.8, 0.3), 0.7 * rows, jnp.where(columns > 0.6, 0.9, 0.2)], -1)
  client, labels = gl.Client(model, 4), jnp.eye(4)[:1]
  sent = jax.jit(client.local_update)(None, variables, image[None], labels).update
  return client, gl.Observation(variables, sent, labels, gl.Knowledge(), (1, *SHAPE), 4), image


def test_the_softness_falls_and_ends(seen, monkeypatch):
  client, _, _ = seen
  told = []
  monkeypatch.setattr(simulation, 'soft_slopes', lambda model, softness: told.append(float(softness)) or model)
  made = simulation.Simulation(softness=2.0)
  for count in (0, 40, 80, 99, 100):
    made.softly(client, count, 100)
  np.testing.assert_allclose(told, [2.0, 0.2, 0.02, 0.02, 0.0], rtol=1e-4)
  assert simulation.Simulation().softly(client, 0, 100) is client


@pytest.mark.long
@pytest.mark.parametrize(
  ('count', 'objective', 'kept'), [(7, 0.5, 0.5), (7, np.nan, 0.1), (8, 0.5, 0.1), (8, 0.05, 0.05)]
)
def test_while_it_falls_the_last_point_is_kept_and_then_the_best(seen, count, objective, kept):
  client, observation, _ = seen
  attack = attacks.csdlg(steps=10, tv=0.0, softness=1.0, start='uniform')(client)
  state = attack.init(KEY, observation)
  state = state._replace(count=jnp.int32(count), best=(state.dummy, jnp.float32(0.1), jnp.float32(0.1)))
  found = attack.init.__self__.better(state, jnp.float32(objective), jnp.float32(0.2), observation)
  np.testing.assert_allclose(found[1], kept, rtol=1e-6)


@pytest.mark.long
def test_the_objective_at_the_end_is_that_of_the_network(seen):
  client, observation, _ = seen
  soft, hard = (attacks.csdlg(steps=4, tv=0.0, start='uniform', **given)(client) for given in ({'softness': 1.0}, {}))
  state = jax.jit(soft.init)(KEY, observation)._replace(count=jnp.int32(4))
  apart = [jax.jit(one.init.__self__.evaluate)(state.dummy, state, observation)[1] for one in (soft, hard)]
  np.testing.assert_allclose(*apart, rtol=1e-4)
  early = jax.jit(soft.init.__self__.evaluate)(state.dummy, state._replace(count=jnp.int32(0)), observation)[1]
  assert abs(float(early) - float(apart[1])) > 0.01 * float(apart[1])


@pytest.mark.long
@pytest.mark.parametrize('method', [attacks.csdlg(tv=0.0, softness=1.0), attacks.annealed()], ids=str)
def test_the_objectives_at_the_truth_and_of_what_is_returned_are_those_of_the_network(seen, method):
  client, observation, image = seen
  attack = method.changed(steps=10, start='uniform')(client)
  made = attack.init.__self__
  matching = made if method.name == 'csdlg' else made.rung(made.lowest)
  ends = [
    jax.jit(matching.losses)(observation, x, observation.targets, 10)[0] for x in (image[None], 0.9 * image[None])
  ]
  at_truth = jax.jit(attack.objective)(observation, image[None], observation.targets)
  np.testing.assert_allclose(at_truth, ends[0], rtol=1e-4)
  state = jax.jit(attack.init)(KEY, observation)
  kept = {'images': jnp.broadcast_to(0.9 * image, state.dummy['images'].shape)}
  found = jnp.full_like(state.objective_start, -1.0)  # by softer derivatives, at step 9: no point is lower
  state = state._replace(count=jnp.full_like(state.count, 9), best=(kept, found, found))
  np.testing.assert_allclose(jax.jit(attack.reconstruct)(state, observation).objective, ends[1], rtol=1e-4)


@pytest.mark.parametrize('softness', [0.0, -1.0, float('nan')])
def test_softness_has_a_range(softness):
  with pytest.raises(gl.UsageError, match='softness'):
    attacks.annealed(softness=softness)(None)


@pytest.mark.long
def test_roughness_counts_colours_twice_and_differences_of_second_order_by_half():
  def expected(images):  # by loops
    h, w = images.shape[1:3]
    first = [images[:, 1:] - images[:, :-1], images[:, :, 1:] - images[:, :, :-1]]
    bends = [images[:, i] - 2 * images[:, i + 1] + images[:, i + 2] for i in range(h - 2)]
    across = [images[:, :, i] - 2 * images[:, :, i + 1] + images[:, :, i + 2] for i in range(w - 2)]
    mixed = images[:, 1:, 1:] - images[:, :-1, 1:] - images[:, 1:, :-1] + images[:, :-1, :-1]
    return sum(np.abs(x).mean() for x in first) + 0.5 * (
      np.abs(bends).mean() + np.abs(across).mean() + 2 * np.abs(mixed).mean()
    )

  images = np.asarray(jax.random.uniform(KEY, (2, 5, 6, 3)))
  r, g, b = (images[..., i] for i in range(3))
  axes = np.stack([(r + g + b) / 3**0.5, 2 * (r - b) / 2**0.5, 2 * (r - 2 * g + b) / 6**0.5], -1)
  np.testing.assert_allclose(terms.roughness(jnp.asarray(images)), expected(axes), rtol=1e-5)
  grey = images[..., :1]
  np.testing.assert_allclose(terms.roughness(jnp.asarray(grey)), expected(grey), rtol=1e-5)
  flat = jnp.ones((1, 1, 2, 1)).at[0, 0, 1].set(0.25)  # no row beside another, and no slope that changes
  np.testing.assert_allclose(terms.roughness(flat), 0.75)


@pytest.mark.slow
def test_it_finds_what_hard_derivatives_miss(seen):
  client, observation, image = seen

  def found(softness):
    method = attacks.annealed(softness=softness, steps=400, lowest=3e-4, highest=3e-3, rungs=2)
    return jax.jit(lambda: whole(method(client), KEY, observation))()

  soft, hard = found(1.5), found(1e-5)
  assert psnr(soft.samples, image[None])[0] > psnr(hard.samples, image[None])[0] + 2  # 27.4 and 20.7 dB
  assert soft.distance < hard.distance / 2


@pytest.mark.long
def test_the_default_is_annealed_for_one_step_of_a_network_with_max_pools(monkeypatch):
  def name(model, number=1, **client):
    images, labels = np.zeros((2, *SHAPE), np.float32), np.zeros(2, np.int32)
    given = gl.ClientSettings(**client)
    stand_in = gl.scenario(gl.models.create(model, 4), images, labels, key=KEY, client=given)
    return str(defaults.chosen(defaults.Known(stand_in, number, signs=False), lambda attack: False)[-1])

  small = 'cnn(width=2,widths=8)'
  assert name(small) == 'annealed' and name('mlp(widths=8)') == 'ladder'
  assert name(small, 2) == 'annealed(steps=4000,lowest=0.005,highest=0.02,rungs=2)'
  assert name(small, share='delta') == 'annealed' and name(small, share='delta', local_epochs=2) == 'ladder'
  monkeypatch.setattr(defaults, '_SMALL', 100)
  assert name(small) == 'annealed(steps=600)'
  assert name(small, 2) == 'annealed(steps=900,lowest=0.005,highest=0.02,rungs=2)'
  monkeypatch.setattr(defaults, '_MEASURED', 100)
  assert name(small) == 'ladder'


@pytest.mark.long
def test_a_known_noise_ends_no_search_while_the_softness_falls(seen):
  client, observation, _ = seen
  loud = dataclasses.replace(observation, noise=jnp.float32(1e6))  # any distance is near enough
  counts = {}
  for softness in (None, 1.0):
    attack = attacks.csdlg(steps=10, tv=0.0, softness=softness, start='uniform')(client)
    state, step = jax.jit(attack.init)(KEY, loud), jax.jit(attack.step)
    ended = []
    for _ in range(10):
      state, info = step(state, loud)
      ended.append(bool(info['finished']))
    counts[softness] = ended.index(True)
  assert counts == {None: 0, 1.0: 7}
