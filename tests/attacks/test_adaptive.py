"""Attackers who know the defense: what they make of an upload, by hand and in an audit."""

import dataclasses
import math
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradleak as gl
from gradleak import attacks, defenses, models
from gradleak.adaptive import adaptive_attacks as attacks_on
from gradleak.adaptive import base, compression, graddefense, weights
from gradleak.adaptive.base import AVERAGES, Case, Known, _typical_energies, typical_squared_norm
from gradleak.attacks import matching
from gradleak.attacks.matching import distances, search
from gradleak.core import trees
from gradleak.data import tables
from gradleak.defenses import Context
from gradleak.defenses.concealment import Search, concealed_samples
from gradleak.priors import gan
from tests import texts
from tests.attackers import divide
from tests.objects import objects

pytestmark = pytest.mark.usefixtures('fast_compilation')

KEY = jax.random.key(3)


@pytest.fixture(autouse=True)
def known_noise_is_used(monkeypatch):
  """Searches of these tests move fewer numbers than they compare, and would leave the level of noise alone."""
  monkeypatch.setattr(search, 'tells', lambda unknowns, entries: True)


@pytest.fixture(scope='module')
def context(small_images):
  model = models.create('lenet', 10, init='default')
  variables = jax.jit(model.init, static_argnums=1)(jax.random.key(0), (8, 8, 1))
  return Context(gl.Client(model, 10), variables, (8, 8, 1), small_images)


@pytest.fixture(scope='module')
def gradient(context, small_images):
  images, labels = (jnp.asarray(part[:1]) for part in small_images)
  return jax.tree.map(np.asarray, jax.jit(context.client.local_update)(None, context.variables, images, labels).update)


def bound(text, context):
  return defenses.bind(gl.parse(text), context)


def adaptive_attacks(text, context, attack=None, rounds=1):
  """Returns {name: `AdaptiveAttack`} of an attack, csDLG by default, to the defense of a text."""
  found = attacks_on(bound(text, context), context, context.client.cohort, attack or attacks.csdlg(), rounds)
  return {adaptive.name: adaptive for adaptive in found}


def uploaded(*updates):
  """Returns the `Upload` of as many rounds, all of it sent."""
  update = jax.tree.map(lambda *xs: np.stack(xs), *updates)
  return gl.Upload(update, jax.tree.map(lambda x: np.ones(x.shape[:1], bool), update), np.ones(len(updates), int))


def entries(tree):
  return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def only_view(adaptive, *updates):
  (view,) = adaptive.views(uploaded(*updates))
  return view


@pytest.mark.parametrize(
  ('text', 'names'),
  [
    ('none', []),
    ('clip(norm=1)', ['clipped']),
    ('prune(rate=0.9)', ['masked', 'masked+prior']),
    ('gaussian(stddev=0.1)', ['floor', 'prior']),
    ('clip(norm=1)+laplace(scale=0.1)', ['clipped+floor', 'clipped+prior']),
    ('gaussian(stddev=0.1)+clip(norm=1)', ['prior']),
    ('prune(rate=0)+clip(norm=1)', ['clipped']),  # the first stage does nothing
    ('client_dp(norm=1,noise=0.5)', ['clipped+floor', 'clipped+prior']),
    ('topk(ratio=0.1)', ['masked', 'masked+prior']),
    ('dgc(ratio=0.1)', ['masked', 'masked+prior']),
    ('fragmentation(ratio=0.4)', ['masked', 'masked+prior']),
    ('fragmentation_random(ratio=0.4)', ['masked', 'masked+prior']),
    ('outpost', ['masked', 'masked+prior', 'masked+weighted', 'simulated']),
    ('soteria(rate=0.6)', ['masked', 'masked+prior', 'muted']),
    ('graddefense(stddev=0.1,estimate=probes)', ['prior', 'weighted', 'slices', 'compensated']),
    ('concealment(steps=2)', ['decoys', 'smooth', 'class_average']),
    (
      'prune(rate=0.7)+concealment(steps=2)',
      ['masked', 'masked+prior', 'masked+decoys', 'masked+smooth', 'masked+class_average'],
    ),
  ],
)
def test_every_defense_has_the_adaptive_attacks_that_are_known(text, names, context):
  found = adaptive_attacks(text, context)
  assert list(found) == names
  assert all(adaptive.words.endswith('.') and adaptive.rounds == 1 for adaptive in found.values())
  assert all(('compares only' in adaptive.words) == ('masked' in name) for name, adaptive in found.items())


@pytest.mark.parametrize('text', ['clip(norm=1)+gaussian(stddev=0.1)', 'dgc(ratio=0.1)', 'outpost'])
def test_stages_that_do_nothing_change_no_attacker(text, context):
  names = list(adaptive_attacks(text, context, rounds=4))
  for idle in ('prune(rate=0)', 'gaussian(stddev=0)', 'graddefense(stddev=0,estimate=probes)'):
    assert list(adaptive_attacks(f'{idle}+{text}', context, rounds=4)) == names


@pytest.mark.parametrize('rounds', [1, 3])
@pytest.mark.parametrize(
  'text',
  ['outpost', 'svt_privacy', 'graddefense(stddev=0.1,estimate=probes)', 'gaussian(stddev=0.1)', 'prune(rate=0.9)'],
)
def test_every_view_weighs_each_entry_of_the_update(text, rounds, context):
  draw = np.random.default_rng(0)
  params = context.variables['params']
  updates = [
    jax.tree.map(lambda x: (draw.normal(size=x.shape) * (draw.random(x.shape) < 0.5)).astype(np.float32), params)
    for _ in range(rounds)
  ]
  for name, adaptive in adaptive_attacks(text, context, rounds=rounds).items():
    for view in adaptive.views(uploaded(*updates[: adaptive.rounds])):
      for u, w in zip(jax.tree.leaves(view.update), jax.tree.leaves(view.weights), strict=True):
        assert w.shape in ((), u.shape) and np.isfinite(w).all() and (w >= 0).all(), name


def test_an_entry_weighs_the_less_the_more_noise_is_on_it():
  draw = np.random.default_rng(0)
  update = {'w': draw.normal(size=200) * (np.arange(200) % 2)}
  spread = np.mean(np.square(update['w'][1::2]))
  signal = 2 * (spread - 0.25)
  odds = np.sqrt(0.25 / (0.25 + signal)) * np.exp(np.square(update['w']) * (2 - 0.5 / (0.25 + signal)))  # Gaussians'
  expected = (update['w'] != 0) * odds / (1 + odds)
  for variance in (0.25, {'w': np.full(200, 0.25)}):
    np.testing.assert_allclose(weights.by_magnitude(update, variance)['w'], expected / expected.max(), rtol=1e-9)
  found = weights.by_magnitude({'w': np.full(2, 3.0)}, {'w': np.array([0.1, 0.4])})['w']
  np.testing.assert_allclose(found, [1.0, 0.25], rtol=0.01)


def test_rounds_are_averaged_where_the_defense_is_random(context):
  assert [adaptive.rounds for adaptive in adaptive_attacks('gaussian(stddev=0.1)', context, rounds=4).values()] == [
    4,
    4,
  ]
  assert list(adaptive_attacks('gaussian(stddev=0.1)', context, rounds=4)) == ['averaged+floor', 'averaged+prior']
  assert [adaptive.rounds for adaptive in adaptive_attacks('prune(rate=0.9)', context, rounds=4).values()] == [1, 1]
  concealed = adaptive_attacks('concealment(steps=2)', context, rounds=4)
  assert {name: adaptive.rounds for name, adaptive in concealed.items()} == {
    'averaged': 4, 'decoys': 1, 'averaged+smooth': 4, 'averaged+class_average': 4,
  }  # fmt: skip


@pytest.mark.parametrize('text', ['prune(rate=0.9)', 'clip(norm=1)+gaussian(stddev=0.1)'])
@pytest.mark.parametrize('server', ['server_dp(norm=1,noise=1,clients=10)', 'compensation(stddev=0.1)'])
def test_what_the_server_does_to_the_mean_changes_no_attack_on_an_upload(text, server, context):
  alone, found = (adaptive_attacks(each, context, rounds=4) for each in (text, f'{server}+{text}'))
  assert list(found) == list(alone)
  for name, one in found.items():
    assert one._replace(views=None) == alone[name]._replace(views=None)


def test_images_that_a_generator_makes_do_not_start_from_auxiliary_data(context):
  assert list(adaptive_attacks('concealment(steps=2)', context, attacks.csdlg(generator='untrained'))) == [
    'decoys',
    'smooth',
  ]


@pytest.mark.parametrize(
  ('attack', 'few', 'many'),
  [
    (attacks.csdlg(), [], ['floor']),
    (attacks.ladder(), [], ['floor']),
    (attacks.dlg(), [], ['floor']),
    (attacks.bayes(), ['floor'], ['floor']),  # the noise weighs its prior
    (attacks.csdlg(distance='mean_cosine'), [], []),  # no search with it ends at a level of noise
  ],
)
def test_the_level_of_noise_is_used_where_it_could_be_fitted(attack, few, many, context, monkeypatch):
  monkeypatch.setattr(search, 'tells', distances.tells)
  size = sum(leaf.size for leaf in jax.tree.leaves(context.variables['params']))
  for number, names in ((1, few), (-(-size // 64), many)):  # 64 pixels each
    found = attacks_on(bound('gaussian(stddev=0.1)', context), context, number, attack)
    assert [one.name for one in found if one.name == 'floor'] == names
  assert distances.tells(5, 5) and not distances.tells(4, 5)


@pytest.mark.long
def test_the_unknowns_of_a_search_are_what_it_moves(context, monkeypatch):
  """Two images have 128 pixels; a generator of them has latents or weights in their place."""
  seen, latents = [], jnp.zeros((1, gan.LATENT))
  monkeypatch.setattr(search, 'tells', lambda count, entries: bool(seen.append(count)))
  for attack in (attacks.csdlg(), attacks.csdlg(decoys=2), attacks.cinet(), attacks.gias(width=4)):
    attacks_on(bound('gaussian(stddev=0.1)', context), context, 2, attack)
  untrained, trained = (sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(make))) for make in (
    lambda: gl.priors.untrained.init(KEY, (2, 8, 8, 1), None)[0],
    lambda: gan.Generator((8, 8, 1), 4).init(KEY, latents),
  ))  # fmt: skip
  assert seen == [128, 3 * 128, untrained, 2 * gan.LATENT + trained]


def test_a_search_without_a_floor_is_not_said_to_stop_at_one(context):
  assert list(adaptive_attacks('clip(norm=1)+gaussian(stddev=0.1)', context, attacks.gias())) == ['clipped+floor']
  assert list(adaptive_attacks('clip(norm=1)+gaussian(stddev=0.1)', context, attacks.ggl())) == ['clipped']


def test_without_auxiliary_data_nobody_starts_from_it(context):
  assert list(adaptive_attacks('concealment(steps=2)', dataclasses.replace(context, public=None))) == [
    'decoys',
    'smooth',
  ]


@pytest.mark.parametrize(
  ('attack', 'text', 'names'),
  [
    (attacks.fidel(), 'prune(rate=0.7)+gaussian(stddev=0.1)', ['combined']),
    (attacks.fidel(), 'clip(norm=1)', []),
    (attacks.fidel(), 'soteria(rate=0.5)', ['combined']),
    (attacks.fidel(), 'concealment(steps=2)', []),
    (attacks.fidel(), 'graddefense(stddev=0.1,num_slices=4)', ['combined', 'compensated']),
    (attacks.csdlg(), 'prune(rate=0.7)+gaussian(stddev=0.1)', ['masked+floor', 'masked+prior']),
    (gl.servers.class_fishing(), 'prune(rate=0.7)+gaussian(stddev=0.1)', ['masked+floor']),
    (gl.servers.class_fishing(), 'clip(norm=1)', []),  # the norm of a batch says nothing of one of its samples
    (attacks.csdlg(match='sign'), 'outpost', ['masked', 'masked+prior', 'masked+weighted']),  # of a plain gradient
    (attacks.csdlg(match='sign'), 'clamp(limit=1)', []),
    (attacks.prefix(), 'outpost', ['prior']),  # it compares no update
    (attacks.csdlg(distance='prefix'), 'outpost', ['prior']),
    (attacks.csdlg().changed(distance='prefix'), 'clip(norm=1)', []),
    (attacks.csdlg(distance='prefix').changed(distance='cosine'), 'clip(norm=1)', ['clipped']),
    (attacks.prefix(), 'concealment(steps=2)', ['smooth', 'class_average']),
    (attacks.csdlg(distance='prefix'), 'concealment(steps=2)', ['smooth', 'class_average']),
    (attacks.csdlg(seeds=2), 'concealment(steps=2)', ['smooth', 'class_average']),  # decoys are of one start
  ],
)
def test_a_adaptive_attack_that_an_attack_cannot_use_is_not_offered_to_it(attack, text, names, context):
  """It reads no such evidence, or lacks the setting; what changes the update itself serves every attack."""
  assert list(adaptive_attacks(text, context, attack)) == names


def test_every_attack_can_use_an_average(context):
  found = adaptive_attacks('prune(rate=0.7)+gaussian(stddev=0.1)', context, attacks.peeling(), rounds=4)
  assert [(adaptive.name, adaptive.words, adaptive.rounds) for adaptive in found.values()] == [
    ('averaged', AVERAGES, 4)
  ]
  assert list(adaptive_attacks('gaussian(stddev=0.1)', context, attacks.fidel(), rounds=4)) == [
    'averaged',
    'averaged+combined',
  ]


def test_what_is_zero_is_not_compared_and_the_clip_is_known(context, gradient):
  pruned = jax.tree.map(lambda g: np.where(np.abs(g) > np.median(np.abs(g)), g, 0), gradient)
  view = only_view(adaptive_attacks('prune(rate=0.5)', context)['masked'], pruned)
  np.testing.assert_array_equal(entries(view.weights), entries(pruned) != 0)
  assert view.clip == math.inf and view.noise == 0
  assert only_view(adaptive_attacks('clip(norm=0.5)', context)['clipped'], gradient).clip == 0.5


@pytest.mark.parametrize(('share', 'clip'), [('gradient', 0.05), ('delta', math.inf)])
def test_a_clip_of_each_step_is_none_of_their_sum(context, share, clip):
  client = dataclasses.replace(context.client, share=share, epochs=1 if share == 'gradient' else 3)
  context = dataclasses.replace(context, client=client)
  steps = gl.defenses.wrap(optax.clip_by_global_norm(0.05), place='step', clips=lambda settings: 0.05, label='steps')
  known = Known(defenses.bind(steps, context), context, 2, 1, frozenset({'clip'}))
  assert known.clip == clip and known.norm_bound == clip


@pytest.mark.parametrize('text', ['clip_samples(norm=0.5)', 'dpsgd(norm=0.5,noise=1)'])
def test_clipped_gradients_of_samples_are_bounded_as_their_sum_or_mean_is(context, text):
  for loss, cohort, bound in (('mean', 1, 0.5), ('sum', 1, 2.0), ('sum', 2, 1.0)):
    client = gl.Client(context.client.model, 10, loss=f'cross_entropy(reduction={loss})', cohort=cohort)
    changed = dataclasses.replace(context, client=client)
    known = Known(defenses.bind(gl.parse(text), changed), changed, 4, 1, frozenset())
    assert known.norm_bound == bound
    assert known.left_by_clips(4 * bound**2)[0] == 0.25


@pytest.mark.long
@pytest.mark.parametrize(
  ('text', 'variance'),
  [
    ('gaussian(stddev=0.1)', 0.01),
    ('laplace(scale=0.1)', 0.02),
    ('client_dp(norm=2,noise=0.5)', 1.0),
    ('clip(norm=2)+gaussian(stddev=0.1)', 0.01),
  ],
)
def test_the_noise_expected_is_the_noise_that_comes(text, variance, context, gradient):
  defense = gl.parse(text)
  name = next(name for name in adaptive_attacks(text, context) if 'floor' in name)
  view = only_view(adaptive_attacks(text, context)[name], gradient)
  assert view.noise == pytest.approx(variance * entries(gradient).size)
  silent = [{n: 0.0 for n in ('stddev', 'scale', 'noise') if n in stage.settings} for stage in defense.stages]
  quiet = defenses.Defense(tuple(m.changed(**zero) for m, zero in zip(defense.stages, silent, strict=True)))

  @jax.jit
  def send(numbers):
    upload = defenses.bind(defense, context).build(numbers, context.client).upload
    return upload.update(gradient, upload.init(gradient), gradient, key=KEY)[0]

  updates = [send(one.numbers) for one in (quiet, defense)]
  energy = float(trees.squared_norm(trees.subtract(*updates)))
  assert 0.9 < energy / view.noise < 1.1
  halved = only_view(next(iter(adaptive_attacks(text, context, rounds=2).values())), gradient, gradient)
  assert halved.noise == pytest.approx(view.noise / 2)


def test_rounds_are_averaged_before_anything_else(context, gradient):
  adaptive = adaptive_attacks('gaussian(stddev=0.1)', context, rounds=2)['averaged+floor']
  tripled = jax.tree.map(lambda g: 3 * g, gradient)
  np.testing.assert_allclose(entries(only_view(adaptive, gradient, tripled).update), 2 * entries(gradient), rtol=1e-6)


def test_muting_leaves_out_the_layer_that_soteria_prunes(context, gradient):
  weights = only_view(adaptive_attacks('soteria(rate=0.5)', context)['muted'], gradient).weights
  dense = [name for name in weights if name.startswith('Dense')]
  assert len(dense) == 1
  for name, layer in weights.items():
    for part, weight in layer.items():
      np.testing.assert_array_equal(weight, (gradient[name][part] != 0) & (name not in dense))


def test_muting_leaves_something_to_compare(small_images):
  """A module may hold several kernels, or all that there is."""
  sizes = {'w1': (64, 20), 'b1': (20,), 'w2': (20, 10), 'b2': (10,)}
  params = {'net': {name: np.full(size, 0.1, np.float32) for name, size in sizes.items()}}

  def features(params, images):
    return jax.nn.relu(images.reshape(len(images), -1) @ params['net']['w1'])

  def apply(params, images):
    return features(params, images) @ params['net']['w2']

  layers = [gl.core.trees.Layer(part, (('net', f'w{part}'), ('net', f'b{part}'))) for part in '12']
  for given, muted in ((None, {'w2'}), (layers, {'w2', 'b2'})):
    model = models.from_functions(lambda key, shape: params, apply, features=features, layers=given)
    known = Context(gl.Client(model, 10), {'params': params}, (8, 8, 1))
    weights = only_view(adaptive_attacks('soteria(rate=0.5)', known)['muted'], params).weights['net']
    assert {name for name, weight in weights.items() if not weight.any()} == muted


@pytest.mark.parametrize('settings', ['ratio=1', 'num_slices=1'])
def test_no_slices_are_left_out_where_all_bear_noise(settings, context):
  assert 'slices' not in adaptive_attacks(f'graddefense(stddev=0.1,{settings})', context)


@pytest.mark.long
def test_the_first_guess_of_noisy_slices_is_right_where_noise_drowns_the_gradient(context, gradient):
  defense = bound('graddefense(stddev=0.1,ratio=0.3)', context)
  slices = defense.arguments[0][0].slices
  transformation = defense.client(context.client).upload
  adaptive = adaptive_attacks('graddefense(stddev=0.1,ratio=0.3)', context)['slices']
  hits, defended = 0, jax.jit(transformation.update)
  for seed in range(6):
    noisy, _ = defended(gradient, transformation.init(gradient), gradient, key=jax.random.key(seed))
    noisy = jax.tree.map(np.asarray, noisy)
    views = adaptive.views(uploaded(noisy))
    assert len(views) == adaptive.count == 8
    for view in views:
      assert len(np.unique(entries(slices)[entries(view.weights) == 0])) == 3
    hits += bool((entries(noisy) == entries(gradient))[entries(views[0].weights) == 1].all())
  assert hits >= 5


@pytest.mark.long
def test_both_attacks_on_graddefense_know_how_much_noise_is_left_by_a_mean(context, gradient, monkeypatch):
  """Four clients halve the standard deviation; rounds that did not send a layer do not lower it."""
  several = dataclasses.replace(context, client=dataclasses.replace(context.client, cohort=4))
  text, seen, rng = 'graddefense(stddev=0.1,ratio=0.3)', [], np.random.default_rng(0)
  monkeypatch.setattr(graddefense, 'compensate', lambda update, variance, **_: seen.append(float(variance)) or update)
  slices = bound(text, several).arguments[0][0].slices
  spread = np.array([0.05] * 3 + [0.1] * 3 + [1.0] * 4)  # the first three hold what the noise of a mean looks like
  update = jax.tree.map(lambda s: np.float32(spread[s] * rng.normal(size=s.shape)), slices)
  found = {one.name: one for one in attacks_on(bound(text, several), several, 4, attacks.csdlg(), 1)}
  only_view(found['compensated'], update)
  view = found['slices'].views(uploaded(update))[0]
  np.testing.assert_array_equal(entries(view.weights), entries(slices) > 2)
  attack = attacks_on(bound(f'fragmentation_random(ratio=0.5)+{text}', several), several, 4, attacks.csdlg(), 4)
  (averaged,) = (one for one in attack if one.name.endswith('compensated'))
  upload = uploaded(*[gradient] * 4)
  averaged.views(upload)
  averaged.views(dataclasses.replace(upload, mask=jax.tree.map(lambda m: m & (np.arange(4) < 2), upload.mask)))
  assert seen == pytest.approx([0.3 * 0.1**2 / count for count in (4, 16, 8)])


@pytest.mark.long
def test_slices_are_left_out_of_one_upload_as_each_draws_its_own(context, gradient):
  text = 'graddefense(stddev=0.1,ratio=0.3)'
  adaptive = adaptive_attacks(text, context, rounds=4)['slices']
  upload = uploads_of(text, context, gradient, 4)
  views = adaptive.views(jax.tree.map(lambda x: x[: adaptive.rounds], upload))
  quiet = [(entries(view.update) == entries(gradient))[entries(view.weights) == 1].all() for view in views]
  assert adaptive.rounds == 1 and any(quiet)


def test_few_slices_are_all_tried(context, gradient):
  adaptive = adaptive_attacks('graddefense(stddev=0.1,ratio=0.25,num_slices=4)', context)['slices']
  slices = bound('graddefense(stddev=0.1,num_slices=4)', context).arguments[0][0].slices
  views = adaptive.views(uploaded(gradient))
  muted = [np.unique(entries(slices)[entries(view.weights) == 0]).tolist() for view in views]
  assert sorted(muted) == [[0], [1], [2], [3]]


@pytest.mark.parametrize(('noise', 'prior'), [(0.002, 1e-3), (0.3, 5e-2)])
def test_the_prior_grows_with_the_noise(noise, prior, context):
  norm = float(np.sqrt(typical_squared_norm(context.client, context.sample_shape, 1, context.variables)))
  size = sum(x.size for x in jax.tree.leaves(context.variables['params']))
  stddev = noise * norm / np.sqrt(size) * (1 if noise > 0.1 else 10)
  found = adaptive_attacks(f'gaussian(stddev={stddev * (10 if noise > 0.1 else 1)})', context)
  assert dict(found['prior'].settings) == {'prior': prior}


@pytest.mark.parametrize(
  'behind',
  [
    'clip(norm=1)',
    'clamp(limit=0.001)',
    'quantize',
    'wrapped',
    'dgc(ratio=0.5,clip=1)',
    'prune(rate=0)',
    'topk(ratio=0.5)',
    'dgc(ratio=0.5)',
  ],
)
def test_no_level_is_stated_of_noise_that_a_later_stage_changes(behind, context):
  own = gl.defenses.wrap(optax.scale(0.01), place='upload', label='wrapped')
  chain = gl.defenses.chain(gl.defenses.gaussian(stddev=0.1), own if behind == 'wrapped' else gl.parse(behind))
  found = attacks_on(defenses.bind(chain, context), context, 1, attacks.csdlg())
  assert any('floor' in one.name for one in found) == (behind in ('prune(rate=0)', 'topk(ratio=0.5)', 'dgc(ratio=0.5)'))


@pytest.mark.long
def test_a_clip_shortens_the_noise_before_it_as_the_update(context):
  """The prior follows the quotient of both, which a clip behind leaves as it is."""

  def energies(text, rounds=1):
    return _typical_energies(Known(bound(text, context), context, 1, rounds, frozenset()))

  noise, signal = energies('gaussian(stddev=0.01)')
  for text, rounds in (('gaussian(stddev=0.01)+clip(norm=0.01)', 1), ('gaussian(stddev=0.01)+clip(norm=0.01)', 3)):
    clipped = energies(text, rounds)
    assert clipped[0] * rounds / clipped[1] == pytest.approx(noise / signal)
    assert clipped[0] * rounds + clipped[1] == pytest.approx(1e-4)
  assert energies('clip(norm=0.01)+gaussian(stddev=0.01)') == pytest.approx((noise, 1e-4))
  compressed = 'gaussian(stddev=0.01)+dgc(ratio=1,momentum=0,clip=0.01)'
  for rounds in (1, 3):  # their sum
    found = energies(compressed, rounds)
    assert found[0] / rounds / (found[1] / rounds**2) == pytest.approx(noise / signal, rel=1e-3)
    assert found[0] / rounds + found[1] / rounds**2 == pytest.approx(1e-4, rel=1e-3)


# ---- in gradient matching


def test_clipping_masking_and_the_floor_by_hand(context, gradient):
  observed = attacks_observation(context, gradient, clip=0.5)
  assert float(trees.norm(distances.clipped(gradient, observed))) == pytest.approx(0.5, rel=1e-5)
  free = attacks_observation(context, gradient)
  jax.tree.map(np.testing.assert_array_equal, distances.clipped(gradient, free), gradient)
  weights = jax.tree.map(lambda g: np.where(g > 0, 4, 0).astype(np.float16), gradient)
  positive = distances.weighed(gradient, attacks_observation(context, gradient, weights=weights))
  np.testing.assert_array_equal(entries(positive), np.maximum(2 * entries(gradient), 0))
  # Noise orthogonal to a gradient, of a third of its squared norm: cos² = 3/4.
  assert float(distances.DISTANCES['cosine'].floor(1.0, 4.0)) == pytest.approx(1 - math.sqrt(3 / 4))
  assert float(distances.DISTANCES['squared_euclidean'].floor(1.0, 4.0)) == 1.0


def attacks_observation(context, update, **known):
  return gl.Observation(
    context.variables, update, jax.nn.one_hot(jnp.asarray([0]), 10), gl.Knowledge(), (1, 8, 8, 1), 10, **known
  )


@pytest.mark.slow
def test_a_search_that_knows_the_noise_stops_at_its_level(context, gradient):
  noise = 2e-3 * float(trees.squared_norm(gradient))
  attack = attacks.csdlg(steps=150, tv=0.0)(context.client)

  @jax.jit
  def run(observed):
    state = attack.init(KEY, observed)
    state = jax.lax.fori_loop(0, 150, lambda _, s: attack.step(s, observed)[0], state)
    return attack.reconstruct(state, observed).distance

  through, stopped = (float(run(attacks_observation(context, gradient, noise=known))) for known in (0.0, noise))
  floor = float(distances.DISTANCES['cosine'].floor(noise, trees.squared_norm(gradient)))
  assert through < 0.1 * floor
  assert 3 * through < stopped <= floor


@pytest.mark.slow
def test_decoys_make_the_simulation_equal_to_the_concealed_upload(context, small_images):
  """Equation 10 of DCS² is the mean loss over private and concealed samples, the latter with a mixed label."""
  images, labels = jnp.asarray(small_images[0][:2]), jax.nn.one_hot(jnp.asarray(small_images[1][:2]), 10)
  client = bound('concealment(steps=3,projection=False)', context).client(context.client)
  upload = jax.jit(client.local_update)(KEY, context.variables, images, labels)
  key = jax.random.fold_in(jax.random.fold_in(KEY, 1), zlib.crc32(b'concealment'))  # the step chain's, its own
  given = context.client, context.variables, key, images, labels
  decoys, decoy_labels = concealed_samples(*given, search=Search(steps=3))
  mixed = jnp.concatenate([labels, 0.7 * decoy_labels + 0.3 * labels])
  simulated = jax.jit(context.client.local_update)(None, context.variables, jnp.concatenate([images, decoys]), mixed)
  difference = trees.norm(trees.subtract(simulated.update, upload.update)) / trees.norm(upload.update)
  assert float(difference) < 1e-4


def test_the_class_average_is_that_of_the_labels(context, small_images):
  means = jnp.arange(10.0).reshape(10, 1, 1, 1) * jnp.ones((10, 8, 8, 1))
  start = matching.start_images('class_average', KEY, (2, 8, 8, 1), jax.nn.one_hot(jnp.asarray([3, 7]), 10), means)
  np.testing.assert_allclose(start[:, 0, 0, 0], [3, 7], rtol=1e-6)
  with pytest.raises(gl.UsageError, match='public'):
    matching.start_images('class_average', KEY, (1, 8, 8, 1), jnp.ones((1, 10)), None)
  with pytest.raises(gl.UsageError, match='not for labels of positions'):
    matching.start_images('class_average', KEY, (1, 8, 8, 1), jnp.ones((1, 8, 10)), means)


# ---- in an audit


@pytest.fixture(scope='module')
def both(linear, small_images):
  samples, labels = (np.asarray(part) for part in small_images)
  scenario = linear._replace(public=(1 - samples, labels))  # apart from the private ones
  return gl.audit(
    jax.random.key(7),
    scenario,
    objects(['none', 'prune(rate=0.8)', 'gaussian(stddev=0.1)', 'concealment(steps=2)']),
    objects(['csdlg(tv=0,steps=150)']),
    4,
    controls=8,
    group_size=4,
    progress='none',
    knowledge='both',
    rounds=16,
  )


def rows(result, **chosen):
  return [row for row in result.rows if all(row[key] == value for key, value in chosen.items())]


@pytest.mark.slow
def test_both_attackers_stand_side_by_side(both):
  found = list(dict.fromkeys((row['defense'], row['adaptive']) for row in both.rows))
  assert found == [
    ('none', None),
    ('prune(rate=0.8)', None),
    ('prune(rate=0.8)', 'masked'),
    ('prune(rate=0.8)', 'masked+prior'),
    ('gaussian(stddev=0.1)', None),
    ('gaussian(stddev=0.1)', 'averaged'),  # of more entries than pixels, the noise does not say when to end
    ('gaussian(stddev=0.1)', 'averaged+prior'),
    ('concealment(steps=2)', None),
    ('concealment(steps=2)', 'averaged'),
    ('concealment(steps=2)', 'decoys'),
    ('concealment(steps=2)', 'averaged+smooth'),
    ('concealment(steps=2)', 'averaged+class_average'),
  ]
  assert all((row['knowledge'] == 'adaptive') == (row['adaptive'] is not None) for row in both.rows)
  assert {key[1:] for key in both.reconstructions} == {
    (defense, *filter(None, [adaptive])) for defense, adaptive in found
  }
  assert all(images.shape == (4, 1, 8, 8, 1) for images in both.reconstructions.values())
  assert (
    set(both.adaptive_attacks['prune(rate=0.8)']) == {'masked', 'masked+prior'} and both.adaptive_attacks['none'] == {}
  )


@pytest.mark.slow
def test_each_prior_and_start_has_a_control_of_its_own(both):
  thresholds = {row['adaptive']: row['control_psnr'] for row in both.rows}
  assert thresholds['masked'] == thresholds[None]
  assert len({thresholds[name] for name in (None, 'averaged+prior', 'averaged+class_average')}) == 3
  assert len(both.controls) == 8 * len(
    {(), ('prior', 1e-3), ('prior', 5e-2), ('prior', 1e-2), 'decoys', 'class_average'}
  )


@pytest.mark.slow
def test_knowing_a_defense_helps_against_it(both):
  def mean(**chosen):
    return np.mean([row['psnr'] for row in rows(both, **chosen)])

  adaptive = mean(defense='gaussian(stddev=0.1)', adaptive='averaged+prior')
  assert adaptive > mean(defense='gaussian(stddev=0.1)', adaptive=None) + 3


@pytest.mark.slow
def test_a_failure_with_decoys_is_nobodys_merit(both):
  assert all(row['objective_at_truth'] is None for row in rows(both, adaptive='decoys'))
  assert not any(row['verdict'] == 'nothing seen' for row in rows(both, adaptive='decoys'))


@pytest.mark.slow
def test_adaptive_alone_attacks_what_has_no_remedy_like_the_non_adaptive(linear):
  result = gl.audit(
    jax.random.key(7), linear, objects(['none', 'prune(rate=0.8)']), objects(['csdlg(tv=0,steps=5)']), 1,
    controls=2, group_size=4, progress='none', knowledge='adaptive',
  )  # fmt: skip
  assert [(row['defense'], row['adaptive']) for row in result.rows] == [
    ('none', None), ('prune(rate=0.8)', 'masked'), ('prune(rate=0.8)', 'masked+prior'),
  ]  # fmt: skip
  with pytest.raises(gl.UsageError, match="unknown knowledge 'adaptiv'; did you mean 'adaptive'"):
    gl.audit(jax.random.key(7), linear, [None], [attacks.dlg()], 1, knowledge='adaptiv')


def audit(scenario, defense, *chosen, **settings):
  return gl.audit(KEY, scenario, [defense], list(chosen), 4, controls=2, group_size=4, progress='none', **settings)


@pytest.mark.slow
def test_an_attack_is_not_run_again_with_a_adaptive_attack_that_it_cannot_use(linear):
  """Nor is the adaptive attack described where no attack was run with it."""
  blind, reading = attacks.wrap(divide, 'blind', reads=()), attacks.wrap(divide, 'reading', reads=('weights',))
  beside = audit(linear, gl.defenses.prune(rate=0.8), blind, reading)
  found = list(dict.fromkeys((row['attack'], row['adaptive']) for row in beside.rows))
  assert found == [('blind', None), ('reading', None), ('reading', 'masked')]
  assert set(beside.adaptive_attacks['prune(rate=0.8)']) == {'masked'}


@pytest.mark.slow
def test_a_random_defense_of_ones_own_is_averaged(linear):
  def noisy(updates, state, params=None, *, key, **extra):
    leaves, structure = jax.tree.flatten(updates)
    keys = jax.random.split(key, len(leaves))
    noise = [0.02 * jax.random.normal(k, leaf.shape) for k, leaf in zip(keys, leaves, strict=True)]
    return structure.unflatten([leaf + n for leaf, n in zip(leaves, noise, strict=True)]), state

  mine = gl.defenses.wrap(optax.GradientTransformationExtraArgs(optax.init_empty_state, noisy), 'upload', random=True)
  result = audit(linear, mine, divide, rounds=4)
  rounds = {row['adaptive']: row['rounds'] for row in result.rows}
  assert rounds == {None: 1, 'averaged': 4, 'averaged+shown': 4}
  mean = [np.mean([row['psnr'] for row in rows(result, adaptive=adaptive)]) for adaptive in rounds]
  assert mean[1] > mean[0] + 3  # a quarter of the variance is 6 dB


@pytest.mark.long
def test_a_state_of_ones_own_is_kept_between_uploads(linear):
  """Noise that fades with each upload hides nothing from who waits."""

  def fading(updates, size, params=None, *, key, **extra):
    noise = optax.tree.random_like(key, updates)
    return jax.tree.map(lambda u, n: u + size * n, updates, noise), 0.05 * size

  start = optax.GradientTransformationExtraArgs(lambda params: jnp.ones(()), fading)
  mine = gl.defenses.wrap(start, 'upload', random=True)
  result = audit(linear, mine, divide, rounds=4)
  mean = {name: np.mean([row['psnr'] for row in rows(result, adaptive=name)]) for name in (None, 'averaged', 'last')}
  assert mean[None] < mean['averaged'] < mean['last'] - 30


@pytest.mark.parametrize(
  ('defense', 'keeps'),
  [
    (gl.defenses.wrap(optax.trace(0.9), 'upload'), True),
    (gl.defenses.wrap(optax.trace(0.9), 'step'), False),  # which begins anew with each upload
    (gl.defenses.wrap(optax.GradientTransformation(*gl.defenses.topk(ratio=0.5)), 'upload'), False),
    (gl.defenses.dgc(ratio=0.5), False),
    (gl.defenses.fragmentation(ratio=0.5), False),
  ],
  ids=['momentum', 'of steps', 'masks', 'dgc', 'fragmentation'],
)
def test_an_own_upload_that_depends_on_the_one_before_is_told_by_its_state(defense, keeps, context):
  made = defenses.bind(defense, context)
  assert made.keeps == keeps and made.in_turn == (keeps or defense.accumulates)
  found = [one.rounds for one in attacks_on(made, context, 1, attacks.csdlg(), 4) if one.name == 'last']
  assert found == [4] * keeps


@pytest.mark.long
@pytest.mark.parametrize(
  ('knowledge', 'attackers'),
  [('adaptive', {'adaptive'}), ('non-adaptive', {'non-adaptive'}), ('both', {'adaptive', 'non-adaptive'})],
)
def test_what_an_audit_grants_is_what_it_says(linear, knowledge, attackers):
  result = audit(linear, gl.defenses.prune(rate=0.8), divide, knowledge=knowledge)
  said = ' '.join(result.threat_models['divide'])
  assert ('does not know which defense the client uses, and ignores it' in said) == ('non-adaptive' in attackers)
  assert ('nows the defense and its settings' in said) == ('adaptive' in attackers)
  assert {row['knowledge'] for row in result.rows} == attackers


@pytest.mark.long
def test_what_is_not_random_of_outpost_is_simulated(context, gradient, small_images):
  """The client that is simulated prunes; a sample's own upload is then nearer to it than to the bare gradient."""
  found = adaptive_attacks('outpost(noise=0.0)', context)['simulated']
  assert found.simulates == defenses.outpost_pruning(prune=0.8) and found.settings == (('prior', 0.05),)
  images, labels = (jnp.asarray(part[:1]) for part in small_images)
  simulated = defenses.bind(found.simulates, context).client(context.client)
  ours = jax.jit(simulated.local_update)(None, context.variables, images, labels).update
  sent = jax.jit(bound('outpost(noise=0.0)', context).client(context.client).local_update)
  np.testing.assert_array_equal(entries(ours), entries(sent(KEY, context.variables, images, labels).update))
  assert 0.15 < np.mean(entries(ours) != 0) < 0.25 and np.mean(entries(gradient) != 0) > 0.5
  view = only_view(found, ours)
  assert (entries(view.weights) == 1).all() and view.noise == 0


@pytest.mark.slow
def test_a_defense_of_several_steps_is_simulated_in_the_first(context):
  made = defenses.outpost_pruning(context.layers, prune=0.5)
  state = made.init(context.variables['params'])
  update = jax.tree.map(lambda x: jnp.arange(1.0, x.size + 1).reshape(x.shape), context.variables['params'])
  first, state = made.update(update, state)
  later, _ = made.update(update, state)
  assert 0.4 < np.mean(entries(first) == 0) < 0.6 and (entries(later) != 0).all()


@pytest.mark.parametrize('place', ['step', 'upload'])
def test_what_an_upload_shows_is_evidence_without_any_name(context, gradient, place):
  """Zeros are left out, if there are more than usual, and what is simulated is clipped to the upload's norm."""
  mine = defenses.bind(gl.defenses.wrap(optax.identity(), place), context)
  *_, adaptive = attacks_on(mine, context, 1, attacks.csdlg(), 1)
  assert adaptive.name == 'shown' and attacks_on(mine, context, 1, attacks.fidel(), 1) == []
  full = only_view(adaptive, gradient)
  assert (entries(full.weights) == 1).all() and full.noise == 0
  np.testing.assert_allclose(full.clip, float(trees.norm(gradient)), rtol=1e-5)
  rng = np.random.default_rng(0)
  gaps = jax.tree.map(lambda x: np.where(rng.random(x.shape) < 0.5, x, 0), gradient)
  np.testing.assert_array_equal(entries(only_view(adaptive, gaps).weights), entries(gaps) != 0)


@pytest.mark.parametrize('declared', ['clip(norm=0.5)', 'gaussian(stddev=0.1)', 'topk(ratio=0.5)'])
def test_what_one_stage_declares_hides_nothing_of_what_another_shows(declared, context, gradient):
  """Whoever meets an own stage behind a declared one looks at its zeros, too, and knows the declared clip."""
  made = defenses.bind(gl.defenses.chain(gl.parse(declared), gl.defenses.wrap(optax.identity(), 'upload')), context)
  (shown,) = (one for one in attacks_on(made, context, 1, attacks.csdlg(), 1) if one.name == 'shown')
  gaps = jax.tree.map(lambda x: np.where(np.arange(x.size).reshape(x.shape) % 2, x, 0), gradient)
  view, norm = only_view(shown, gaps), float(trees.norm(gaps))
  np.testing.assert_array_equal(entries(view.weights), entries(gaps) != 0)
  assert norm > 0.5 and view.clip == pytest.approx(0.5 if 'clip' in declared else norm)


@pytest.mark.long
def test_what_is_usual_of_texts_is_that_of_random_tokens():
  """A user's own defense on texts ended the audit: random pixels are no texts."""
  scenario = texts.scenario(number=4)
  mine = defenses.bind(gl.defenses.wrap(optax.identity(), 'upload'), scenario.context)
  *_, adaptive = attacks_on(mine, scenario.context, 1, attacks.csdlg(tv=0.0), 1)
  update = scenario.client.local_update(None, scenario.variables, scenario.samples, scenario.targets).update
  assert adaptive.name == 'shown' and (entries(only_view(adaptive, update).weights) == 1).all()
  modality = scenario.client.modality
  drawn = np.asarray(modality.drawn(jax.random.key(0), (40, texts.LENGTH)))
  modality.check(drawn)
  assert len(np.unique(drawn)) > 100 and texts.notes(2).known['padding'] not in drawn


@pytest.mark.long
def test_what_is_usual_of_rows_is_that_of_random_rows():
  """Random pixels have no zeros, and rows have many: those of categories were taken for dropped entries."""
  rng = np.random.default_rng(0)
  columns = {f'kind {i}': rng.choice([*'abcdefgh'[: 3 + i % 6]], 100) for i in range(8)}
  columns |= {'stage': rng.integers(0, 4, 100), 'size': np.where(rng.random(100) < 0.3, np.nan, rng.normal(size=100))}
  rows = gl.data.table(columns, rng.choice(['no', 'yes'], 100))
  modality = gl.modalities.of_config(rows.settings)
  model = gl.models.mlp(2, 'default', widths='64-64')
  scenario = gl.scenario(model, rows.samples[:4], rows.targets[:4], key=jax.random.key(0), modality=modality)
  mine = defenses.bind(gl.defenses.wrap(optax.identity(), 'upload'), scenario.context)
  *_, adaptive = attacks_on(mine, scenario.context, 1, attacks.csdlg(tv=0.0), 1)
  update = scenario.client.local_update(None, scenario.variables, scenario.samples[:1], scenario.targets[:1]).update
  assert adaptive.name == 'shown' and (entries(only_view(adaptive, update).weights) == 1).all()
  drawn = np.asarray(modality.drawn(jax.random.key(0), (4000, rows.samples.shape[1])))
  modality.check(drawn)
  moments = tables.from_json(rows.settings['schema']).moments
  np.testing.assert_allclose(drawn.mean(axis=0)[:-1], moments[0][:-1], atol=0.1)
  assert drawn[:, -1].mean() == pytest.approx(moments[0][-1], abs=0.03) and not drawn[drawn[:, -1] == 1, -2].any()


@pytest.mark.parametrize(('traits', 'name'), [({'sparsifies': 'zeros'}, 'averaged+masked'), ({}, 'averaged+shown')])
def test_what_a_round_drops_at_random_is_no_zero_of_the_mean(context, gradient, traits, name):
  mine = defenses.bind(gl.defenses.wrap(optax.identity(), 'upload', random=True, **traits), context)
  found = {adaptive.name: adaptive for adaptive in attacks_on(mine, context, 1, attacks.csdlg(), 4)}
  rng = np.random.default_rng(0)
  sent = [jax.tree.map(lambda x: np.where(rng.random(x.shape) < 0.4, x, 0), gradient) for _ in range(4)]
  view = only_view(found[name], *sent)
  np.testing.assert_array_equal(entries(view.weights), np.any([entries(one) != 0 for one in sent], axis=0))
  np.testing.assert_allclose(entries(view.update), entries(view.weights) * entries(gradient), rtol=1e-6)


def test_the_noise_of_a_mean_is_that_of_the_rounds_that_sent_an_entry(context, gradient):
  noise = gl.defenses.Noise(lambda settings, context, count: 0.01)
  mine = gl.defenses.wrap(optax.identity(), 'upload', random=True, sparsifies='zeros', noise=noise)
  found = attacks_on(defenses.bind(mine, context), context, 1, attacks.csdlg(), 2)
  (floor,) = (adaptive for adaptive in found if adaptive.name.endswith('floor'))
  once = jax.tree.map(lambda x: np.where(np.arange(x.size).reshape(x.shape) % 2, x, 0), gradient)
  twice, either = (np.sum(entries(one) != 0) for one in (once, gradient))
  assert only_view(floor, once, gradient).noise == pytest.approx(0.01 * (either - twice / 2))


def scaled(updates, params=None):
  """A function of the update that hides it from attackers who do not know it."""
  del params
  return jax.tree.map(lambda x: x * jnp.linspace(0.02, 1, x.size, dtype=x.dtype).reshape(x.shape), updates)


@pytest.mark.long
def test_a_function_of_the_update_is_simulated_itself(context, gradient, small_images):
  """Both attackers simulate the user's own transformation; one takes its gradient, one the identity's."""
  mine = gl.defenses.wrap(optax.stateless(scaled), 'upload')
  chained = gl.defenses.chain(gl.defenses.clip(norm=1.0), mine, gl.defenses.gaussian(stddev=0.1))
  found = attacks_on(defenses.bind(chained, context), context, 1, attacks.csdlg(), 4)
  found = {adaptive.name: adaptive for adaptive in found}
  images, labels = (jnp.asarray(part[:1]) for part in small_images)
  sent = mine.update(gl.defenses.clip(norm=1.0).update(gradient, optax.EmptyState())[0], optax.EmptyState())[0]
  for name in ('averaged+simulated', 'averaged+straight-through'):
    client = defenses.bind(found[name].simulates, context).client(context.client)
    ours = jax.jit(client.local_update)(None, context.variables, images, labels).update
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), ours, sent)
  sign = gl.defenses.wrap(optax.stateless(lambda u, p: jax.tree.map(jnp.sign, u)), 'upload')
  found = {c.name: c for c in attacks_on(defenses.bind(sign, context), context, 1, attacks.csdlg(), 1)}

  def slope(name):
    (stage,) = found[name].simulates.stages
    made = stage.build(())
    return jax.grad(lambda x: made.update({'w': x}, optax.EmptyState(), None)[0]['w'].sum())(jnp.float32(3.0))

  assert slope('simulated') == 0 and slope('straight-through') == 1


CLIP = gl.defenses.clip(norm=0.1)
MINE = gl.defenses.wrap(optax.stateless(scaled), 'upload')
BENT = gl.defenses.wrap(
  optax.stateless(lambda u, p: jax.tree.map(lambda x: jnp.tanh(30 * x), u)), 'upload', label='bent'
)


@pytest.mark.long
@pytest.mark.parametrize(
  ('defense', 'compared'),
  [
    (gl.defenses.chain(gl.defenses.fragmentation_random(ratio=0.5), gl.defenses.clamp(limit=1e-3)), 'sent'),
    (gl.defenses.chain(gl.defenses.fragmentation_random(ratio=0.5), gl.defenses.quantize(code='float4')), 'sent'),
    (gl.defenses.chain(gl.defenses.fragmentation_random(ratio=0.5), MINE), 'sent'),
    (gl.defenses.chain(gl.defenses.fragmentation_random(ratio=0.5), gl.defenses.outpost(noise=0.0)), 'sent'),
    (gl.defenses.svt_privacy(noise_var=1e9, gamma=0.01, fraction=0.5), 'nonzero'),
    (gl.defenses.chain(CLIP, gl.defenses.clamp(limit=2e-3)), 'all'),
    (gl.defenses.chain(CLIP, gl.defenses.percentile_privacy(gamma=2e-3)), 'nonzero'),
    (gl.defenses.chain(gl.parse('client_dp(norm=0.1,noise=1e-9)'), gl.defenses.clamp(limit=2e-3)), 'all'),
    (gl.defenses.chain(gl.parse('clip_samples(norm=0.1)'), gl.defenses.clamp(limit=2e-3)), 'all'),
    (gl.defenses.chain(gl.defenses.topk(ratio=0.5), gl.defenses.clamp(limit=1e-3)), 'sent'),
    (gl.defenses.chain(gl.defenses.topk(ratio=0.5), MINE), 'all'),
    (gl.defenses.chain(gl.parse('client_dp(norm=0.1,noise=1e-10)'), BENT), 'all'),
    (gl.defenses.chain(gl.parse('dpsgd(norm=0.1,noise=1e-10)'), BENT), 'all'),
    (gl.defenses.chain(gl.defenses.svt_privacy(noise_var=1e9, gamma=0.01, fraction=0.5), BENT), 'nonzero'),
    (gl.defenses.chain(gl.defenses.prune(rate=0.5), MINE), 'all'),
    (gl.defenses.chain(gl.defenses.dgc(ratio=0.5), MINE), 'all'),
    (gl.defenses.chain(gl.defenses.dgc(ratio=0.5), gl.defenses.clamp(limit=1e-3)), 'sent'),
  ],
  ids=str,
)
def test_who_simulates_does_not_compare_what_the_simulation_would_have_sent(defense, compared, wide, small_images):
  """At the truth what is simulated equals the upload; zeros that the simulation makes, too, are compared."""
  samples, targets = (jnp.asarray(part[:1]) for part in small_images)
  bound = defenses.bind(defense, wide)
  send = jax.jit(bound.client(wide.client).participate)
  uploads, state = [], None
  for i in range(4):
    one, kept, _ = send(jax.random.key(i), wide.variables, samples, targets, None, state)
    uploads, state = [*uploads, jax.device_get(one)], kept if defense.accumulates else None
  shapes = jax.tree.map(np.shape, uploads[0].update)
  sent = [entries(jax.tree.map(np.broadcast_to, one.mask, shapes)) for one in uploads]
  for rounds in (1, 4):
    found = [one for one in attacks_on(bound, wide, 1, attacks.csdlg(), rounds) if one.simulates is not None]
    assert found
    for adaptive in found:
      (view,) = adaptive.views(jax.tree.map(lambda *xs: np.stack(xs), *uploads[: adaptive.rounds]))
      client = defenses.bind(adaptive.simulates, wide).client(wide.client)
      ours = entries(jax.jit(client.local_update)(None, wide.variables, samples, targets).update)
      weights, update = entries(view.weights), entries(view.update)
      right = {'sent': np.any(sent[: adaptive.rounds], axis=0), 'nonzero': update != 0, 'all': np.ones(update.shape)}[
        compared
      ]
      np.testing.assert_array_equal(weights, right)
      assert view.clip == math.inf  # what is simulated clips where the client does
      np.testing.assert_allclose(weights * ours, weights * update, rtol=1e-5, atol=1e-8)


def test_uploads_that_are_not_averaged_are_not_said_to_be(context):
  mine = gl.defenses.wrap(optax.stateless(scaled), 'upload')
  for other, name, words in (
    (gl.defenses.dgc(ratio=0.1), 'straight-through', 'It simulates the defense, too'),  # of the first one alone
    (gl.defenses.gaussian(stddev=0.1), 'averaged+straight-through', 'It averages the uploads'),
  ):
    bound = defenses.bind(gl.defenses.chain(mine, other), context)
    found = {adaptive.name: adaptive.words for adaptive in attacks_on(bound, context, 1, attacks.csdlg(), 4)}
    assert found[name].startswith(words)


@pytest.mark.slow
def test_a_function_of_the_update_does_not_protect_from_those_who_know_it(small_images):
  model = models.create('mlp(widths=32)', 10)
  scenario = gl.scenario(model, *small_images, key=jax.random.key(0))
  mine = gl.defenses.wrap(optax.stateless(scaled), 'upload')
  attack = attacks.csdlg_fast(steps=300)
  found = gl.audit(jax.random.key(1), scenario, [mine], [attack], 4, controls=8, progress='none')
  mean = {adaptive: np.mean([row['psnr'] for row in found.rows if row['adaptive'] == adaptive])
          for adaptive in (None, 'simulated', 'straight-through')}  # fmt: skip
  assert min(mean['simulated'], mean['straight-through']) > mean[None] + 10


def test_a_adaptive_attack_may_simulate_alone(context):
  clip = gl.defenses.clip(norm=1)

  @gl.defenses.defense(place='upload')
  def signs():
    return optax.stateless(lambda u, p: jax.tree.map(jnp.sign, u))

  gl.adaptive.adaptive_to(signs)(lambda case: [case.known.changed('alone', 'It clips.', simulates=clip)])
  bound = defenses.bind(signs(), context)
  names = ['simulated', 'straight-through', 'alone', 'shown']  # beside what nothing declares
  assert [c.name for c in attacks_on(bound, context, 1, attacks.csdlg(), 1)] == names
  assert attacks_on(bound, context, 1, attacks.fidel(), 1) == []


def test_an_adaptive_attack_of_ones_own_comes_beside_those_of_the_library(context, monkeypatch):
  monkeypatch.setattr(base, 'SPECIAL', {factory: [*known] for factory, known in base.SPECIAL.items()})
  before = list(adaptive_attacks('dgc(ratio=0.1)', context, rounds=4))
  for prior in (0.01, 0.02):  # a cell of a notebook that is run again

    def mine(case, prior=prior):
      return [case.known.changed('mine', 'It is mine.', prior=prior)]

    gl.adaptive.adaptive_to(gl.defenses.dgc)(mine)
  found = adaptive_attacks('dgc(ratio=0.1)', context, rounds=4)
  assert list(found) == [*before, 'summed+masked+mine'] and 'decoded' in before
  assert dict(found['summed+masked+mine'].settings) == {'prior': 0.02}
  with pytest.raises(gl.UsageError, match=r'adaptive_to takes a function that .* decorated'):
    gl.adaptive.adaptive_to(gl.defenses.dgc(ratio=0.1))


def test_no_adaptive_attack_takes_the_name_of_another(context, monkeypatch):
  """Two of one name were one in an audit, whose rows are told by names."""
  assert list(adaptive_attacks('soteria(rate=0.5)+soteria(rate=0.6)', context))[2:] == ['muted', 'muted-2']
  monkeypatch.setattr(base, 'SPECIAL', {factory: [*known] for factory, known in base.SPECIAL.items()})
  before, own = adaptive_attacks('prune(rate=0.9)', context), ('masked', 'non-adaptive', 'masked-2')

  @gl.adaptive.adaptive_to(gl.defenses.prune)
  def mine(case):
    return [case.known.adaptive()._replace(name=name, words=name) for name in own]

  found = adaptive_attacks('prune(rate=0.9)', context)
  assert list(found) == [*before, 'masked-2', 'non-adaptive-2', 'masked-2-2']
  assert [found[name].words for name in ('masked', 'masked-2')] == [before['masked'].words, 'masked']


def test_nobody_decodes_what_two_stages_keep_back_in_turn(context):
  assert 'decoded' not in adaptive_attacks('dgc(ratio=0.1)+dgc(ratio=0.2)', context, rounds=4)


def test_a_defense_on_the_samples_or_of_known_traits_shows_nothing_more(context):
  assert adaptive_attacks('ats', context) == {}
  known = defenses.bind(gl.defenses.wrap(optax.identity(), 'upload', sparsifies='zeros'), context)
  assert [c.name for c in attacks_on(known, context, 1, attacks.csdlg(), 1)] == ['masked', 'masked+prior']


@pytest.mark.slow
def test_a_users_own_top_k_is_attacked_as_ours_is(small_images):
  model = models.create('mlp(widths=32)', 10)
  scenario = gl.scenario(model, *small_images, key=jax.random.key(0))
  ours = gl.defenses.topk(ratio=0.2)
  plain = optax.GradientTransformation(ours.init, lambda u, s, p=None: ours.update(u, s, p))
  found = gl.audit(jax.random.key(1), scenario, {'ours': ours, 'mine': gl.defenses.wrap(plain, 'upload')},
                   [attacks.csdlg_fast(steps=300)], 4, controls=16, progress='none')  # fmt: skip
  best = {label: max(row['psnr'] for row in found.rows if row['defense'] == label) for label in ('ours', 'mine')}
  assert best['mine'] > best['ours'] - 3  # it is simulated, too, which can show more than what the traits tell


def uploads_of(text, context, gradient, rounds):
  """Returns what a client with this defense sends of one gradient in as many rounds, and the same without state."""
  chain = bound(text, context).client(context.client).upload
  state, sent, defended = chain.init(gradient), [], jax.jit(chain.update)
  for key in jax.random.split(KEY, rounds):
    update, state = defended(gradient, state, gradient, key=key)
    sent.append(jax.device_get(update))
  return uploaded(*sent)


@pytest.mark.long
def test_what_several_uploads_share_bears_no_noise(context, gradient):
  text = 'graddefense(stddev=0.1,ratio=0.3)'
  upload = uploads_of(text, context, gradient, 6)
  (view,) = adaptive_attacks(text, context, rounds=6)['agreed'].views(upload)
  right = entries(view.update) == entries(gradient)
  assert np.mean(right) > 0.95  # a slice bears noise in five of six rounds, or in all, with probability 0.011
  averaged = entries(jax.tree.map(lambda u: np.mean(u, axis=0), upload.update))
  assert np.linalg.norm(entries(view.update) - entries(gradient)) < 0.5 * np.linalg.norm(averaged - entries(gradient))
  assert 'agreed' not in adaptive_attacks(text, context) and 'agreed' not in adaptive_attacks(
    'gaussian(stddev=0.1)', context, rounds=6
  )


def test_a_round_that_does_not_send_an_entry_has_no_say_in_its_value(context, gradient):
  """Five of eight rounds left each layer out, and zero was the value that most of them shared."""
  text = 'fragmentation_random(ratio=0.3)+graddefense(stddev=0.1,ratio=0.3)'
  upload = uploads_of('graddefense(stddev=0.1,ratio=0.3)', context, gradient, 8)
  sent = np.arange(8) < 3
  update = jax.tree.map(lambda u: np.where(sent.reshape(8, *(1,) * (u.ndim - 1)), u, 0), upload.update)
  by_entry = jax.tree.map(lambda u: np.broadcast_to(sent.reshape(8, *(1,) * (u.ndim - 1)), u.shape), update)
  (agreed,) = (found for name, found in adaptive_attacks(text, context, rounds=8).items() if 'agreed' in name)
  for mask in (jax.tree.map(lambda u: sent, update), by_entry):
    (view,) = agreed.views(dataclasses.replace(upload, update=update, mask=mask))
    right, there = entries(view.update) == entries(gradient), entries(gradient) != 0
    assert np.mean(right[there]) > 0.6  # two of three rounds without noise: 0.784
    assert (entries(view.weights)[there] == 1).all()


def test_what_compression_sends_late_is_divided_by_its_factor(context, gradient):
  text = 'dgc(ratio=0.2,momentum=0.8)'
  upload = uploads_of(text, context, gradient, 8)
  (view,) = adaptive_attacks(text, context, rounds=8)['decoded'].views(upload)
  sent = np.any([entries(jax.tree.map(lambda u, at=at: u[at], upload.update)) != 0 for at in range(8)], axis=0)
  assert 0.5 < np.mean(sent[entries(gradient) != 0]) <= 1
  np.testing.assert_allclose(entries(view.update)[sent], entries(gradient)[sent], rtol=1e-5)
  np.testing.assert_array_equal(entries(view.weights), sent)
  assert 'decoded' not in adaptive_attacks(text, context)


@pytest.mark.long
@pytest.mark.parametrize(
  ('changes', 'text'),
  [
    ({'share': 'delta', 'batch_size': 1}, 'dpsgd(norm=1,noise=1)'),
    ({'share': 'delta', 'epochs': 2, 'optimizer': optax.sgd(0.2, momentum=0.5)}, 'dpsgd(norm=1,noise=1)'),
    (
      {'share': 'delta', 'epochs': 2, 'batch_size': 3, 'optimizer': optax.sgd(0.2, momentum=0.9)},
      'dpsgd(norm=1,noise=1)',  # whose last batch, of one sample, has nine times the variance
    ),
    pytest.param({'cohort': 2}, 'dpsgd(norm=1,noise=1)', marks=pytest.mark.slow),
    ({'cohort': 2}, 'gaussian(stddev=0.1)'),
    ({'frozen': ('Dense_0',)}, 'gaussian(stddev=0.1)'),
  ],
)
def test_the_noise_expected_is_that_of_the_clients_training(changes, text, small_images):
  model = models.mlp(10, widths=(40,), init='default')
  variables = model.init(jax.random.key(0), (8, 8, 1))
  client = dataclasses.replace(gl.Client(model, 10), **changes)
  context = Context(client, variables, (8, 8, 1), small_images)
  found = attacks_on(bound(text, context), context, 4, attacks.csdlg(), 1)
  quiet, defended = gl.parse(text.replace('noise=1', 'noise=0').replace('0.1', '0.0')), bound(text, context)
  images, labels = (jnp.asarray(part[:4]) for part in small_images)
  send = jax.jit(lambda numbers: defended.build(numbers, client).local_update(KEY, variables, images, labels))
  sent = [send(defense.numbers) for defense in (quiet, defended.defense)]
  energy = float(trees.squared_norm(trees.subtract(*(upload.update for upload in sent))))
  adaptive = next(adaptive for adaptive in found if 'floor' in adaptive.name)
  (view,) = adaptive.views(jax.tree.map(lambda x: np.asarray(x)[None], sent[1]))
  assert 0.85 < energy / view.noise < 1.15


@pytest.fixture(scope='module')
def wide():
  model = models.mlp(10, widths=(40,), init='default')
  return Context(gl.Client(model, 10), model.init(jax.random.key(0), (8, 8, 1)), (8, 8, 1))


@pytest.mark.long
@pytest.mark.parametrize(
  'text',
  [
    'gaussian(stddev=1e-3)',
    'topk(ratio=0.1)+gaussian(stddev=1e-3)',
    'fragmentation_random(ratio=0.4)+gaussian(stddev=1e-3)',
    'dgc(ratio=0.1)+gaussian(stddev=1e-3)',
    'dgc(ratio=0.1,clip=1)+gaussian(stddev=1e-3)',
    'gaussian(stddev=1e-7)+dgc(ratio=0.3)',  # grows with what is kept back
    'gaussian(stddev=1e-7)+dgc(ratio=0.3,momentum=0)+gaussian(stddev=1e-7)',
  ],
)
def test_the_noise_expected_of_several_rounds_is_the_noise_that_comes(text, wide):
  params, defended = wide.variables['params'], bound(text, wide)
  stages = defended.defense.stages
  quiet = defenses.Defense(tuple(m.changed(stddev=0.0) if 'stddev' in m.settings else m for m in stages))
  update = trees.draws(lambda key, shape, dtype: 1e-3 * jax.random.normal(key, shape, dtype) ** 3, KEY, params)
  every = jax.tree.map(lambda p: jnp.ones((), bool), params)

  def send(defense, rounds):
    """Returns what a client sends whose update is the same in all rounds."""
    chain, sent = defenses.bind(defense, wide).client(wide.client).upload, []
    state = chain.init(params)
    for i in range(rounds):
      new, state = chain.update(update, state, params, key=jax.random.key(i))
      mask = (*(mask for _, mask in optax.tree.get_all_with_path(state, 'mask')), every)[0]
      sent.append(gl.Upload(trees.masked(new, mask), mask, np.int32(1)))
    return jax.tree.map(lambda *one: np.stack(one), *sent)

  for rounds in (2, 6):
    known = Known(defended, wide, 1, rounds, frozenset({'noise', 'weights'}))
    without, upload = (send(each, rounds) for each in (quiet, defended.defense))
    alike = entries(jax.tree.map(lambda a, b: np.all((a != 0) == (b != 0), axis=0), without.update, upload.update))
    assert np.mean(alike) > 0.99
    views = [(known.view(without), known.view(upload))]
    for stage in stages if known.sums else ():
      for one in compression.adaptive_attacks(Case(stage, (), known)) if stage.name == 'dgc' else ():
        views.append(one.views(without) + one.views(upload))
    for one, other in views:
      energy = np.sum(np.square(entries(other.update) - entries(one.update))[alike])
      assert 0.8 < energy / other.noise < 1.2
    if known.sums:  # when what is sent depends on the update, which is not known yet
      assert 0.5 < known.energy / views[0][1].noise < 2


@pytest.mark.long
def test_a_sum_of_rounds_is_as_clear_as_their_mean(wide):
  """Deep Gradient Compression that drops nothing sends the gradient of each round: only the scale differs."""
  texts = 'gaussian(stddev=0.1)', 'gaussian(stddev=0.1)+dgc(ratio=1,clip=1e9)'
  energies = [_typical_energies(Known(bound(text, wide), wide, 1, 4, frozenset())) for text in texts]
  (noise, signal), (summed_noise, summed_signal) = energies
  assert [summed_noise, summed_signal] == pytest.approx([16 * noise, 16 * signal], rel=0.01)


@pytest.mark.parametrize('cohort', [1, 2, 4])
def test_each_client_of_a_cohort_divides_its_noise_by_its_own_samples(cohort, context):
  several = dataclasses.replace(context, client=dataclasses.replace(context.client, cohort=cohort))
  known = Known(bound('dpsgd(norm=3,noise=2)', several), several, 8, 1, frozenset())
  of_a_client = (2 * 3 / (8 // cohort)) ** 2  # of the mean over its samples, whose sum bears noise · norm
  assert known.variance == pytest.approx(of_a_client / cohort)


@pytest.mark.parametrize(
  ('text', 'alike'),
  [
    ('topk(ratio=0.5)+gaussian(stddev=0.1)', False),
    ('gaussian(stddev=0.1)+topk(ratio=0.5)', False),
    ('fragmentation_random(ratio=0.5)+gaussian(stddev=0.1)', False),
    ('gaussian(stddev=0.1)+prune(rate=0.5)', False),
    ('prune(rate=0.5)+gaussian(stddev=0.1)', True),
    ('topk(ratio=1)+gaussian(stddev=0.1)', True),
  ],
)
def test_no_noise_level_is_named_of_a_mean_whose_clients_send_other_entries_each(text, alike, context):
  several = dataclasses.replace(context, client=dataclasses.replace(context.client, cohort=4))
  named = [any('floor' in name for name in adaptive_attacks(text, one)) for one in (context, several)]
  assert named == [True, alike]


def test_nobody_decodes_a_mean_of_clients_who_keep_back_other_entries_each(context):
  several = dataclasses.replace(context, client=dataclasses.replace(context.client, cohort=4))
  found = [adaptive_attacks('dgc(ratio=0.1)', one, rounds=4) for one in (context, several)]
  assert ['decoded' in names for names in found] == [True, False] and 'summed+masked' in found[1]


@pytest.mark.long
def test_no_noise_level_is_named_that_the_optimizer_hides(small_images):
  model = models.mlp(10, widths=(4,), init='default')
  client = gl.Client(model, 10, share='delta', epochs=2, optimizer=optax.adam(0.01))
  context = Context(client, model.init(jax.random.key(0), (8, 8, 1)), (8, 8, 1), small_images)
  assert not any('floor' in name for name in adaptive_attacks('dpsgd(norm=1,noise=1)', context))
  assert any('floor' in name for name in adaptive_attacks('gaussian(stddev=0.1)', context))  # on the delta itself
  both = 'dpsgd(norm=1,noise={})+gaussian(stddev=0.1)'
  assert not any(
    'floor' in name for name in adaptive_attacks(both.format(1), context)
  )  # it is no sum without the first
  assert any('floor' in name for name in adaptive_attacks(both.format(0), context))


def test_members_act_in_the_order_of_their_places(context):
  """However it is typed, DP-SGD adds its noise to the gradient, and the clip of the upload follows."""
  for text in ('clip(norm=1)+dpsgd(norm=1,noise=1)', 'dpsgd(norm=1,noise=1)+clip(norm=1)'):
    assert not any('floor' in name or 'clipped' in name for name in adaptive_attacks(text, context))


def test_a_mean_of_clipped_updates_is_not_clipped_alike(context):
  several = dataclasses.replace(context, client=dataclasses.replace(context.client, cohort=2))
  assert any('clipped' in name for name in adaptive_attacks('clip(norm=1)', context))
  assert not any('clipped' in name for name in adaptive_attacks('clip(norm=1)', several))
