"""Re-identification by likelihood: against closed forms, naive densities, and lists without the original."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import special, stats

import gradleak as gl
from gradleak.adaptive import likelihood
from gradleak.audit.labelled import Labelled, named_defenses
from gradleak.core import storage
from gradleak.defenses.concealment import project
from gradleak.defenses.defense import Noise, bind
from gradleak.modalities import images as images_of
from gradleak.studies import identification
from tests import programs, texts

D = gl.defenses


def dense(weights):
  """A network of one dense layer with given weights, [pixels, classes]."""
  params = {'kernel': jnp.asarray(weights, jnp.float32), 'bias': jnp.zeros(weights.shape[1])}

  def apply(variables, images):
    flat = images.reshape(len(images), -1)
    return flat @ variables['kernel'] + variables['bias'][None]

  return gl.models.from_functions(lambda key, shape: params, apply, name='dense'), {'params': params}


@pytest.fixture(scope='module')
def digits():
  private, public = gl.data.load('digits', 'test', limit=8), gl.data.load('digits', 'train', limit=40)
  gallery = gl.data.gallery('digits', 'test', most=150)
  return private, (public.samples, public.targets), gallery


@pytest.fixture(scope='module')
def scenario(digits):
  private, public, gallery = digits
  model = gl.models.create('mlp(widths=16)', 10)
  return gl.scenario(
    model, private.samples, private.targets, key=jax.random.key(0), dataset='digits', public=public, gallery=gallery
  )


def identify(scenario, defenses, trials=8, **changes):
  return gl.identify(jax.random.key(1), scenario, defenses, trials, progress='none', **changes)


@pytest.mark.long
def test_under_gaussian_noise_it_is_right_as_often_as_the_optimal_test():
  """Between two candidates the optimal test is right with probability Φ(d / 2σ), for updates a distance d apart."""
  rng, trials = np.random.default_rng(0), 600
  images = np.float32(rng.uniform(size=(2, 3, 3, 1)))
  model, variables = dense(rng.normal(size=(9, 3)) * 0.3)
  labels = np.zeros(trials, np.int32)
  one = gl.scenario(
    model, np.repeat(images[:1], trials, 0), labels, variables=variables, gallery=(images, np.zeros(2, np.int32))
  )
  client = one.client
  updates = [client.local_update(None, variables, images[i : i + 1], labels[:1]).update for i in range(2)]
  apart = math.sqrt(sum(float(jnp.sum((a - b) ** 2)) for a, b in zip(*map(jax.tree.leaves, updates), strict=True)))
  stddev = apart / 1.8
  expected = stats.norm.cdf(apart / (2 * stddev))
  found = identify(one, {'noise': D.gaussian(stddev=stddev)}, trials)
  right, n = found.identified('noise', 'likelihood')
  assert n == trials
  assert stats.binomtest(right, n, expected).pvalue > 1e-3
  assert stats.binomtest(right, n, stats.norm.cdf(apart / (3 * stddev))).pvalue < 1e-4  # the test can fail
  posteriors = [row['posterior'] for row in found.rows if row['statistic'] == 'likelihood']
  assert abs(np.mean(posteriors) - _mean_posterior(apart / stddev)) < 0.03


def _mean_posterior(distance):
  """Returns the mean posterior of the truth: its log-odds are N(d²/2, d²)."""
  odds = np.random.default_rng(1).normal(distance**2 / 2, distance, 200_000)
  return np.mean(1 / (1 + np.exp(-odds)))


@pytest.mark.long
def test_without_a_defense_one_upload_is_enough(scenario):
  found = identify(scenario, [None], labels='known')
  for statistic in (*identification.STATISTICS, identification.COMBINED):
    assert found.identified('none', statistic) == (8, 8)
  assert {row['candidates'] for row in found.rows} == {found.config['listed'] - 1}
  assert found.config['listed'] > 100


@pytest.mark.long
def test_noise_ranks_originals_first_as_often_as_chance(scenario, tmp_path):
  """Of 48 uploads of noise one in some 150 is first by chance; noise changes no figure of the uploads beside it."""
  defenses = [None, D.fragmentation(ratio=0.5)]
  found = identify(scenario, defenses, workdir=tmp_path, controls=48)
  bare = identify(scenario, defenses)
  figures = [[(row['rank'], row['p_value'], row['statistic']) for row in one.rows] for one in (found, bare)]
  assert figures[0] == figures[1] and found.pairs == bare.pairs and not bare.noise
  for defense in ('none', 'fragmentation(ratio=0.5)'):
    noise = [row for row in found.noise if row['defense'] == defense and row['statistic'] == 'direction']
    assert [row['trial'] for row in noise] == list(range(48)) and all(row['candidates'] > 100 for row in noise)
    ranks = np.asarray([row['rank'] for row in noise])
    assert sum(row['identified'] for row in noise) == np.sum(ranks == 1) <= 4
    assert stats.kstest(ranks / (noise[0]['candidates'] + 1), 'uniform').pvalue > 1e-3
  assert identification.load(tmp_path).noise == found.noise
  assert any('uploads of noise' in note for note in gl.report.identification.notes(found))


@pytest.mark.long
@pytest.mark.parametrize('defense', [D.topk(ratio=0.05), D.chain(D.topk(ratio=0.05), D.gaussian(stddev=0.01))])
def test_noise_does_not_choose_the_entries_of_its_trial(scenario, defense):
  """Which entries top-k sends tells of the trial: noise on them was ranked first in 59 of 60 cases."""
  noise = [row for row in identify(scenario, {'one': defense}, controls=24).noise if row['statistic'] == 'pattern']
  assert len(noise) == 24 and sum(row['identified'] for row in noise) <= 2
  for counts in ([3, 0], [1, 2]):
    kept = np.zeros((1, 7), bool)
    kept[0, : counts[0]], kept[0, 4 : 4 + counts[1]] = True, True
    found = likelihood.largest_as_many(np.float32([[1, -9, 2, 5, 3, 1, -4]]), kept, (4, 3))
    assert found[0].nonzero()[0].tolist() == ([1, 2, 3] if counts[0] == 3 else [1, 4, 6])


@pytest.mark.slow
def test_of_labels_that_nobody_knows_each_is_tried(digits, scenario):
  private, public, _ = digits
  unlabelled = gl.data.gallery('digits', 'test', most=60).samples
  one = gl.scenario(
    scenario.client.model, private.samples, private.targets, key=jax.random.key(0), public=public, gallery=unlabelled
  )
  with pytest.raises(gl.UsageError, match='labels of the gallery are not known'):
    identify(one, [None], 2)
  assert identify(one, [None], 2, labels='unknown').identified('none') == (2, 2)


# Defense, what a candidate's updates are taken to be drawn from, and how many of eight are found at least.
ASSUMED = (
  (D.laplace(scale=0.01), 'noise', 7),
  (D.prune(rate=0.9), 'exact', 8),
  (D.topk(ratio=0.1), 'exact', 8),
  (D.fragmentation(ratio=0.5), 'exact', 8),
  (D.graddefense(stddev=0.1), 'mixture', 8),
  (D.outpost(), 'mixture', 8),
  (D.soteria(rate=0.6), 'direction', 6),
  (D.chain(D.clip(norm=0.5), D.gaussian(stddev=0.001)), 'noise', 8),
  (D.client_dp(norm=0.5, noise=0.01), 'noise', 7),
  (D.dpsgd(norm=0.5, noise=0.01), 'noise', 7),
  (D.chain(D.gaussian(stddev=0.01), D.prune(rate=0.5)), 'draws', 6),
  (D.percentile_privacy(), 'exact', 8),
  (D.local_dp(norm=1.0, sensitivity=1e-4, epsilon=10.0, delta=1e-5), 'noise', 8),
  (D.quantize(code='normfloat4'), 'exact', 8),
  (D.secagg_rounding(), 'noise', 8),
  (D.svt_privacy(gamma=0.1, epsilon=1e6, noise_var=10.0), 'noise', 8),
  (D.chain(D.laplace(scale=0.01), D.gaussian(stddev=0.01)), 'draws', 6),
  (D.concealment(steps=10), 'projected', 6),
)
ALIKE = (2, 3, 5, 8, 11, 12, 13, 14, 15, 16)  # which are assumed and run as another of them is


@pytest.mark.parametrize(('defense', 'model'), [each[:2] for each in ASSUMED], ids=str)
def test_what_is_assumed_follows_from_the_traits(scenario, defense, model):
  bound = bind(defense, scenario.context)
  given = likelihood.expected(bound, scenario.context, 1)
  assert given.model == model
  noises = [stage.traits.noise for stage in bound.sent.defense.stages if stage.traits.noise]
  rounded = any(noise.distribution == 'triangular' for noise in noises)  # its density is another one
  assert given.stated == (model in ('noise', 'mixture') and not rounded)


@pytest.mark.parametrize(
  ('defense', 'model'),
  [
    (D.chain(D.concealment(), D.clip(norm=0.5)), 'projected'),
    (D.chain(D.concealment(), D.gaussian(stddev=0.1)), 'direction'),
    (D.concealment(projection=False), 'direction'),
    (D.concealment(margin=0.1), 'direction'),
  ],
  ids=str,
)
def test_uploads_are_orthogonal_where_the_projection_is_the_last_word(scenario, defense, model):
  assert likelihood.expected(bind(defense, scenario.context), scenario.context, 1).model == model


def test_an_upload_that_was_projected_names_its_sample(scenario):
  """A cosine of a ten-millionth is of rounding, and one of a hundred-thousandth is of chance."""
  rng = np.random.default_rng(0)
  given = likelihood.expected(bind(D.concealment(), scenario.context), scenario.context, 1)
  own = rng.normal(size=(6, 2000)).astype(np.float32)
  uploads = np.asarray([project({'w': g + rng.normal(size=2000)}, {'w': -g})['w'] for g in own], np.float32)
  uploads[5] += np.float32(1e-5 * np.linalg.norm(uploads[5]) / np.linalg.norm(own[5])) * own[5]
  others = rng.normal(size=(50, 2000)).astype(np.float32) + 0.3 * uploads.mean(axis=0)
  scores = likelihood.log_likelihoods(given, uploads, None, np.concatenate([own, others])[:, np.newaxis])
  assert scores.argmax(axis=1)[:5].tolist() == list(range(5)) and scores[5].argmax() >= 6
  bare = likelihood.log_likelihoods(
    given._replace(model='direction'), uploads, None, np.concatenate([own, others])[:, np.newaxis]
  )
  assert (bare.argmax(axis=1) >= 6).all()
  without = likelihood.orthogonal(np.zeros((1, 2000), np.float32), np.ones((1, 2000)), own[:, np.newaxis])
  assert not without.any()  # an upload of zeros is nobody's


@pytest.mark.parametrize('model', ['exact', 'noise', 'draws', 'direction'])
def test_updates_that_are_nearly_equal_are_told_apart(scenario, model, monkeypatch):
  """In float32, 45 of 100 undefended originals of an untrained LeNet were found: updates of one class are so alike."""
  rng = np.random.default_rng(0)
  means = np.float32(rng.normal(size=5000) + 1e-5 * rng.normal(size=(60, 5000)))
  given = likelihood.expected(bind(None, scenario.context), scenario.context, 1)
  given = given._replace(model=model, variance={'w': np.full(5000, 1e-12, np.float32)})
  for entries in (2**24, 7 * 5000):  # at a time
    monkeypatch.setattr(likelihood, '_DOUBLES', entries)
    found = likelihood.log_likelihoods(given, means[:20], None, means[:, np.newaxis])
    assert found.shape == (20, 60) and np.isfinite(found).all()
    assert (found.argmax(axis=1) == np.arange(20)).all()
    assert (np.sort(found, axis=1)[:, -2] < found.max(axis=1)).all()


@pytest.mark.parametrize(
  ('defense', 'steps', 'stated'),
  [
    (D.outpost(), 1, True),
    (D.outpost(), 4, False),
    (D.graddefense_step(stddev=1.0), 4, False),
    (D.graddefense(stddev=1.0), 4, True),  # of the delta
    (D.dpsgd(norm=0.5, noise=0.01), 1, True),
    (D.dpsgd(norm=0.5, noise=0.01), 4, False),  # the noise of a step is in the gradient of the next one
    (D.secagg_rounding(levels=8.0), 1, False),  # of two levels
    (D.wrap(optax.identity(), 'step', noise=Noise(lambda *_: 0.1, distribution='laplace')), 4, False),
  ],
  ids=str,
)
def test_a_sum_of_noises_has_no_posterior_unless_its_density_is_known(scenario, defense, steps, stated):
  """Each step of OUTPOST has noise on other entries; of forty originals four had a posterior below 1e-6."""
  client = dataclasses.replace(scenario.client, share='delta', epochs=steps)
  context = dataclasses.replace(scenario.context, client=client)
  given = likelihood.expected(bind(defense, context), context, 1)
  assert given.model in ('noise', 'mixture') and given.stated == stated


@pytest.mark.parametrize('server', [D.server_dp(norm=1.0, noise=1.0, clients=10), D.compensation(stddev=0.1)], ids=str)
@pytest.mark.parametrize('defense', [D.gaussian(stddev=0.1), D.graddefense(stddev=0.1), D.prune(rate=0.5)], ids=str)
def test_what_the_server_does_to_the_mean_is_not_expected_of_an_upload(scenario, defense, server):
  context = scenario.context
  alone, found = (likelihood.expected(bind(one, context), context, 1) for one in (defense, D.chain(server, defense)))
  jax.tree.map(np.testing.assert_array_equal, *(one._replace(bound=None) for one in (alone, found)))
  assert found.bound == alone.bound


@pytest.mark.long
def test_masks_of_a_server_are_in_no_upload(scenario):
  """Zeros of Soteria were compared, and noise was cut, where a server chose entries of the mean afterwards."""
  chosen = D.wrap(optax.identity(), 'round', sparsifies='mask', selects=True)
  alone, behind = (
    identify(scenario, {'one': one}, 2, candidates=20, controls=2)
    for one in (D.soteria(rate=0.6), D.chain(D.soteria(rate=0.6), chosen))
  )
  assert behind.rows == alone.rows and behind.noise == alone.noise


@pytest.mark.slow
def test_uploads_are_not_random_where_the_server_alone_draws(scenario):
  pruned = D.chain(D.prune(rate=0.5), D.server_dp(norm=1.0, noise=1.0, clients=10))
  assert identify(scenario, [pruned], 1, rounds=2, controls=1).rows[0]['rounds'] == 1


@pytest.mark.long
def test_one_upload_is_read_where_later_ones_hold_what_was_kept_back(scenario):
  """Candidates are simulated without what a client holds, which was in the uploads of later rounds."""
  defense = D.chain(D.gaussian(stddev=1e-3), D.dgc(ratio=0.2))
  one, several = (identify(scenario, [defense], 2, candidates=20, rounds=rounds) for rounds in (1, 4))
  assert several.rows == one.rows and {row['rounds'] for row in several.rows} == {1}


@pytest.mark.parametrize('last', [1.0, 0.9])
def test_a_clip_behind_the_noise_is_no_density_though_it_equals_the_one_before(scenario, last):
  defense = D.chain(D.clip(norm=1.0), D.gaussian(stddev=0.1), D.clip(norm=last))
  assert likelihood.expected(bind(defense, scenario.context), scenario.context, 1).model == 'draws'


BEHIND_NOISE = (D.secagg_rounding(), D.quantize(), D.clip(norm=1.0), D.gaussian(stddev=1e-4))


@pytest.mark.parametrize('behind', BEHIND_NOISE, ids=str)
def test_what_hardly_changes_a_noise_hides_nothing_of_it(scenario, behind):
  """The nearest of eight noisy uploads names 26 of 64 originals, their mean 34, and the strongest test 37."""
  chain = D.chain(D.gaussian(stddev=0.1), behind)
  given = likelihood.expected(bind(chain, scenario.context), scenario.context, 1)
  assert given.model == 'draws' and not given.stated
  rng = np.random.default_rng(0)
  own = rng.normal(size=(64, 1, 500)).astype(np.float32)
  uploads, drawn = own[:, 0] + 9 * rng.normal(size=(64, 500)), own + 9 * rng.normal(size=(1, 8, 500))
  near = likelihood.log_likelihoods(given, np.float32(uploads), None, np.float32(drawn)).argmax(axis=1)
  best = np.argmin(np.sum((uploads[:, None] - own[None, :, 0]) ** 2, axis=2), axis=1)
  right, optimal = (np.sum(one == np.arange(64)) for one in (near, best))
  assert right > 0.8 * optimal > 20


def test_ranks_of_a_version_without_the_mean_of_draws_are_another_part():
  names = [D.gaussian(stddev=0.1), D.chain(D.gaussian(stddev=0.1), D.clip(norm=1.0))]
  assert [identification._assumed(Labelled('one', each)) for each in names] == [{}, {'centred': True}]


@pytest.mark.slow
def test_a_rounding_behind_noise_hides_nobody(digits):
  """It hid 41 of the 53 of 60 originals that the density of the noise finds: each candidate had a noise of its own."""
  _, public, gallery = digits
  private = gl.data.load('digits', 'test', limit=60)
  one = gl.scenario(
    gl.models.create('mlp(widths=16)', 10), private.samples, private.targets, key=jax.random.key(0), dataset='digits',
    public=public, gallery=gallery,
  )  # fmt: skip
  noise = D.gaussian(stddev=0.4)
  found = identify(one, {'alone': noise, 'rounded': D.chain(noise, D.secagg_rounding())}, 60)
  alone, rounded = (found.identified(label, 'likelihood')[0] for label in ('alone', 'rounded'))
  assert rounded > 0.9 * alone > 40


@pytest.mark.long
@pytest.mark.parametrize(
  ('defense', 'model', 'least'),
  [pytest.param(*each, marks=[pytest.mark.slow] * (i in ALIKE)) for i, each in enumerate(ASSUMED)],
  ids=str,
)
def test_originals_are_found_by_what_is_assumed(scenario, defense, model, least):
  found = identify(scenario, [defense])
  assert {row['model'] for row in found.rows} == {model}
  assert found.identified(str(defense))[0] >= least
  stated = model in ('noise', 'mixture')
  assert all((row['posterior'] is None) != (stated and row['statistic'] == 'likelihood') for row in found.rows)


def test_a_bound_of_the_noisy_stage_is_simulated(scenario):
  """The clip of `client_dp` and `dpsgd` is part of what a candidate would send."""
  for defense in (D.client_dp(norm=0.5, noise=0.01), D.dpsgd(norm=0.5, noise=0.01)):
    given = likelihood.expected(bind(defense, scenario.context), scenario.context, 1)
    assert [str(stage) for stage in given.bound.defense.stages] == ['clip(norm=0.5)']
    assert given.bound.defense.stages[0].traits.place == defense.stages[0].traits.place


@pytest.mark.slow
@pytest.mark.parametrize('defense', [None, D.gaussian(stddev=1e-3)])
def test_a_client_that_draws_is_simulated_several_times(digits, scenario, defense):
  """With one flip of each candidate half of the originals were found, and the posterior of each was 0 or 1."""
  private, _, gallery = digits
  samples, targets = (np.repeat(x[:4], 4, axis=0) for x in (private.samples, private.targets))
  given = {'key': jax.random.key(0), 'gallery': gallery, 'augment': 'flip'}
  found = identify(gl.scenario(scenario.client.model, samples, targets, **given), {'one': defense}, 16)
  label = 'none' if defense is None else 'one'
  for statistic in ('likelihood', 'direction'):
    assert found.identified(label, statistic) == (16, 16)
  assert {row['posterior'] for row in found.rows} == {None} and found.config['client_draws'] == likelihood.DRAWS
  assert any('The client itself is random' in note for note in gl.report.identification.notes(found))
  batch = identify(gl.scenario(scenario.client.model, samples[::4], targets[::4], **given), [defense], 2, batch_size=2)
  assert sum(batch.identified(*[row['defense'] for row in batch.rows][:1])[:1]) >= 3


@pytest.mark.long
def test_pure_noise_finds_nobody(scenario):
  found = identify(scenario, [D.gaussian(stddev=1000.0)], candidates=150)
  for statistic in (*identification.STATISTICS, identification.COMBINED):
    assert found.identified('gaussian(stddev=1000.0)', statistic)[0] <= 1
  assert np.mean([row['posterior'] for row in found.rows if row['statistic'] == 'likelihood']) < 0.05


@pytest.mark.long
def test_more_uploads_of_random_noise_tell_more(scenario):
  defense = D.gaussian(stddev=0.3)
  one, several = (identify(scenario, [defense], rounds=rounds) for rounds in (1, 32))
  assert several.identified(str(defense))[0] > one.identified(str(defense))[0]
  assert {row['rounds'] for row in several.rows} == {32}
  assert {row['rounds'] for row in identify(scenario, [D.prune(rate=0.5)], rounds=4).rows} == {1}, 'all are equal'


@pytest.mark.long
def test_altered_copies_are_found_by_the_pattern(scenario):
  found = identify(scenario, [D.prune(rate=0.8)], copies='exact,darker,shifted,jpeg')
  assert found.identified('prune(rate=0.8)') == (8, 8)
  assert found.identified('prune(rate=0.8)', 'pattern', 'jpeg')[0] >= 6
  assert {row['copies'] for row in found.rows} == {'exact', 'darker', 'shifted', 'jpeg'}
  with pytest.raises(gl.UsageError, match="unknown copies 'blurred'"):
    identify(scenario, [None], copies='blurred')


@pytest.mark.slow
def test_defenses_of_one_call_do_not_change_each_other(scenario, monkeypatch):
  """Candidates are simulated in blocks, whose size depends on the draws of a defense."""
  drawn = D.chain(D.laplace(scale=0.01), D.gaussian(stddev=0.01))
  monkeypatch.setattr(identification, '_BLOCK', 40 * 8 * 1210)  # 40 candidates of eight draws, all of one
  both = identify(scenario, [None, drawn])
  for defense in (None, drawn):
    alone = identify(scenario, [defense])
    label = alone.rows[0]['defense']
    assert [row for row in both.rows if row['defense'] == label] == alone.rows


@pytest.mark.parametrize('shape', [(1, 9, 1), (4, 4, 1), (4, 4, 3)])
def test_a_jpeg_is_near_its_image(shape):
  images = np.linspace(0, 1, 2 * math.prod(shape), dtype=np.float32).reshape(2, *shape)
  coded = images_of.jpeg(images, quality=95)
  assert coded.shape == images.shape and np.abs(coded - images).max() < 0.2
  assert np.array_equal(np.rint(coded * 255) / np.float32(255), coded), 'levels of 8 bits'
  with pytest.raises(gl.UsageError, match='a JPEG has 1 or 3 channels, and these images have 2'):
    images_of.jpeg(np.zeros((1, 4, 4, 2), np.float32))


@pytest.mark.slow
def test_a_version_of_ones_own_defense_is_another_part(scenario, tmp_path):
  def own(version, factor):
    return {'own': D.wrap(optax.scale(factor), 'upload', label='own', version=version)}

  arguments = {'trials': 2, 'candidates': 20, 'workdir': tmp_path / 'run'}
  first = identify(scenario, own('1', 2.0), **arguments)
  assert len(list((tmp_path / 'run' / 'parts').iterdir())) == 1
  assert identify(scenario, own('1', 2.0), **arguments).rows == first.rows
  assert len(list((tmp_path / 'run' / 'parts').iterdir())) == 1
  identify(scenario, own('2', 3.0), **arguments)
  assert len(list((tmp_path / 'run' / 'parts').iterdir())) == 2


@pytest.mark.long
def test_ranks_of_an_earlier_version_are_another_part(scenario, tmp_path, monkeypatch):
  """Those in float32 would have stayed in a folder for good."""
  arguments = {'trials': 2, 'candidates': 20, 'workdir': tmp_path / 'run'}
  with monkeypatch.context() as patch:
    patch.setattr(identification, '_VERSION', 1)
    patch.setattr(likelihood, 'log_likelihoods', lambda given, updates, *rest: np.zeros((len(updates), 20)))
    identify(scenario, [None], **arguments)
  found = identify(scenario, [None], **arguments)
  assert found.identified('none', 'likelihood') == (2, 2)
  assert len(list((tmp_path / 'run' / 'parts').iterdir())) == 2


@pytest.mark.long
def test_uploads_are_made_once_for_all_lists(scenario, monkeypatch):
  made, uploads = [], identification._Run._uploads
  monkeypatch.setattr(identification._Run, '_uploads', lambda *given: made.append(1) or uploads(*given))
  identify(scenario, [None, D.prune(rate=0.5)], 2, candidates=20, copies='exact,darker,shifted')
  assert len(made) == 2


@pytest.mark.long
def test_a_batch_is_told_by_regression(scenario):
  found = identify(scenario, [None, D.gaussian(stddev=1e-4)], 2, batch_size=4)
  assert found.identified('none') == (8, 8)
  assert found.identified('gaussian(stddev=0.0001)') == (8, 8)
  assert {row['statistic'] for row in found.rows} == {identification.REGRESSION}
  others = {row['candidates'] for row in found.rows}
  assert others == {found.config['listed'] - 4}, 'the others of a batch are no wrong answers'


@pytest.mark.parametrize('grouped', [False, True], ids=['entries', 'groups'])
@pytest.mark.parametrize('laplace', [False, True], ids=['gaussian', 'laplace'])
def test_a_mixture_is_what_its_density_says(scenario, grouped, laplace):
  """Entry by entry, or group by group: (1 − φ)·N(0, s²) + φ·noise."""
  rng, entries, fraction = np.random.default_rng(3), 12, 0.3
  update, mean = rng.normal(size=(2, 1, entries)).astype(np.float32)
  variance = np.float32(rng.uniform(0.5, 2, entries))
  groups = np.arange(entries) % 4
  given = likelihood.expected(bind(None, scenario.context), scenario.context, 1)._replace(
    model='mixture', variance={'w': variance}, fraction=fraction, groups={'w': groups} if grouped else None,
    laplace=laplace,
  )  # fmt: skip
  mask = np.arange(entries)[None] != 5
  mean[0, 3] = update[0, 3]  # without noise
  found = likelihood.log_likelihoods(given, update, mask, mean[:, None])
  floor = np.mean(np.square(update)) * likelihood.ROUNDING**2
  noisy = (
    stats.laplace(scale=np.sqrt((variance + floor) / 2)) if laplace else stats.norm(scale=np.sqrt(variance + floor))
  )
  logs = noisy.logpdf((update - mean)[0])
  quiet = stats.norm(scale=np.sqrt(floor)).logpdf((update - mean)[0])
  parts = [np.flatnonzero((groups == g) & mask[0]) for g in range(4)] if grouped else np.flatnonzero(mask[0])[:, None]
  expected = sum(
    np.logaddexp(math.log(fraction) + logs[part].sum(), math.log(1 - fraction) + quiet[part].sum()) for part in parts
  )
  np.testing.assert_allclose(found[0, 0], expected, rtol=1e-4)


def test_the_pattern_is_what_was_sent_or_the_largest():
  update = np.zeros((1, 140), np.float32)
  update[0, [3, 7, 8, 20]] = 1, -2, 3, 4  # of 40 entries four were sent, where the largest ones would be two
  update[0, 40:] = np.arange(1, 101)
  pattern, counts = likelihood.patterns(update, (40, 100))
  assert set(np.flatnonzero(pattern[0])) == {3, 7, 8, 20, *range(135, 140)}
  assert counts.tolist() == [[4, 5]]
  other = np.float32(np.random.default_rng(0).normal(size=140)) * 0.1
  other[[3, 9, 8, 10]] = 5
  other[40:] = np.arange(100)
  assert likelihood.support(pattern, counts, other[None], (40, 100))[0, 0] == pytest.approx(7 / 9)


def test_a_presence_test_accuses_as_often_as_it_says():
  """Scores without any information: p-values are uniform, and one pair in a thousand is a false match."""
  rng, trials, number = np.random.default_rng(0), 40, 500
  listed = identification._List(
    np.zeros((number, 1)), np.zeros(number, int), np.arange(trials)[:, None], kinds=False
  )  # fmt: skip
  scores = {'likelihood': rng.normal(size=(trials, number))}
  facts = {'defense': 'none', 'copies': 'exact', 'model': 'exact', 'rounds': 1}
  rows, (pairs,) = identification._judged(scores, listed, facts, False)
  assert stats.kstest([row['p_value'] for row in rows], 'uniform').pvalue > 1e-3
  assert pairs['n'] == 20 * 499
  assert stats.binomtest(pairs['false'], pairs['n'], identification.RATE).pvalue > 1e-3
  scores['likelihood'][np.arange(trials), np.arange(trials)] += 10
  assert all(row['present'] for row in identification._judged(scores, listed, facts, False)[0])
  few = {'likelihood': scores['likelihood'][:2, :50]}
  short = listed._replace(samples=np.zeros((50, 1)), labels=np.zeros(50, int), private=np.arange(2)[:, None])
  assert {row['present'] for row in identification._judged(few, short, facts, False)[0]} == {None}, 'too few pairs'


@pytest.mark.parametrize('entries', [0, 5, 20, 100])
def test_false_matches_are_counted_by_the_test_itself(entries):
  """Scores that are equal, as patterns of few entries are, are no match; they were counted as false ones."""
  rng, trials, number = np.random.default_rng(0), 40, 1000
  listed = identification._List(np.zeros((number, 1)), np.zeros(number, int), np.arange(trials)[:, None], kinds=False)
  scores = rng.binomial(entries, 0.05, (trials, number)).astype(float)
  tests = identification._presence(scores, listed, identification._allowed(listed))
  innocent = np.ones(scores.shape, bool)
  innocent[np.arange(trials), np.arange(trials)] = False
  calibrating, held = np.sort(scores[::2][innocent[::2]]), scores[1::2][innocent[1::2]]
  above = len(calibrating) - np.searchsorted(calibrating, held, side='left')
  assert tests.false == np.sum((1 + above) / (1 + len(calibrating)) <= identification.RATE)
  assert stats.binomtest(tests.false, tests.pairs, identification.RATE, alternative='greater').pvalue > 1e-3


def test_the_innocents_of_an_upload_do_not_calibrate_its_own_test():
  """All innocents of the first upload score above its original, and none of the others does."""
  listed = identification._List(np.zeros((30, 1)), np.zeros(30, int), np.arange(3)[:, None], kinds=False)
  standard = np.zeros((3, 30))
  standard[0, 1:], standard[0, 0] = 9.0, 5.0
  tests = identification._presence(standard, listed, identification._allowed(listed))
  assert tests.p_values[0, 0] == pytest.approx(1 / 59)
  assert tests.p_values[1, 0] == 1.0


def test_a_score_that_is_no_number_finds_nobody():
  """It compared as no smaller than any other, and so as the first: a defense with a NaN looked as if it hid nothing."""
  rng, trials, number = np.random.default_rng(0), 40, 500
  listed = identification._List(np.zeros((number, 1)), np.zeros(number, int), np.arange(trials)[:, None], kinds=False)
  facts = {'defense': 'none', 'copies': 'exact', 'model': 'noise', 'rounds': 1}
  score, own = rng.normal(size=(trials, number)), (np.arange(trials), np.arange(trials))
  score[own] = 50.0
  for odd in (np.nan, np.inf, -np.inf):
    changed = score.copy()
    changed[:4] = odd  # whole uploads, the own score alone, and some of the others
    changed[4, 4] = odd
    changed[5, 100:103] = odd
    for scores in ({'likelihood': changed}, {'likelihood': changed, 'pattern': changed}):
      rows, pairs = identification._judged(scores, listed, facts, True)
      for row in rows:
        trial, last = row['trial'], row['trial'] < 5
        ahead = 3 if trial == 5 and odd != -np.inf else 0
        assert row['rank'] == (number if last else 1 + ahead), row
        assert row['identified'] == (row['rank'] == 1) and 0 < row['p_value'] <= 1
        assert row['p_value'] == 1 if last else row['present']
        assert row['statistic'] != 'likelihood' or row['posterior'] == pytest.approx(float(row['rank'] == 1), abs=1e-6)
      assert all(0 <= pair['false'] < 0.01 * pair['n'] for pair in pairs)
    noise = identification._alarmed({'likelihood': changed}, listed, facts)
    assert [row['identified'] for row in noise[:6]] == [False] * 5 + [odd == -np.inf] and noise[6]['rank'] == 1
  alone = listed._replace(labels=np.arange(number), kinds=True)  # nobody is beside
  row, *_ = identification._judged({'likelihood': score * np.nan}, alone, facts, True)[0]
  assert not row['identified'] and row['candidates'] == 0 and row['posterior'] == 0


@pytest.mark.long
@pytest.mark.usefixtures('fast_compilation')
@pytest.mark.parametrize('least', [0, 20], ids=['all', 'small tensors'])
@pytest.mark.parametrize('batch', [1, 2])
def test_entries_that_are_no_numbers_are_not_compared(scenario, batch, least):
  """What an upload says beside them is compared: one that says nothing else finds nobody, in no statistic."""

  def spoiled(updates, params):
    return jax.tree.map(lambda u: u if least and u.size > least else u + jnp.inf, updates)

  found = identify(
    scenario, {'one': D.wrap(optax.stateless(spoiled), 'upload')}, 4 // batch, batch_size=batch, candidates=60
  )
  assert found.identified('one')[0] >= 3 if least else not any(row['identified'] for row in found.rows)
  assert 'client_draws' not in found.config


def test_a_candidate_that_would_send_no_number_is_ruled_out():
  means = np.float32([[[1, 2, np.nan]], [[1, 2, 3]]])
  updates, masks = likelihood.finite(np.float32([[1, 2, 3], [1, 2, np.inf]]))
  assert updates.tolist() == [[1, 2, 3], [1, 2, 0]] and masks.tolist() == [[True] * 3, [True, True, False]]
  known, clash = likelihood.ruled_out(masks, means)
  assert known[0, 0].tolist() == [1, 2, 0] and clash.tolist() == [[True, False], [False, False]]
  assert likelihood.finite(updates)[1] is None and likelihood.ruled_out(None, means[1:])[1] is None


def test_the_clearest_statistic_is_the_one_that_is_further_ahead_than_usual():
  """The first statistic points at a wrong candidate, and is no further ahead than without the original."""
  rng, trials, number = np.random.default_rng(1), 6, 40
  listed = identification._List(np.zeros((number, 1)), np.zeros(number, int), np.arange(trials)[:, None], kinds=False)
  blind, clear = rng.normal(size=(2, trials, number))
  clear[np.arange(trials), np.arange(trials)] = 50.0
  facts = {'defense': 'none', 'copies': 'exact', 'model': 'exact', 'rounds': 1}
  for scores in ({'likelihood': blind, 'pattern': clear}, {'likelihood': clear, 'pattern': blind}):
    rows, _ = identification._judged(scores, listed, facts, False)
    assert all(row['identified'] for row in rows if row['statistic'] == identification.COMBINED)


@pytest.mark.long
def test_a_result_is_read_as_it_was_written_or_refused(scenario, tmp_path):
  found = identify(scenario, [None], 2, candidates=20, workdir=tmp_path)
  again = identification.load(tmp_path)
  assert (again.rows, again.pairs, again.counts()) == (found.rows, found.pairs, found.counts())
  lines = (tmp_path / 'rows.jsonl').read_text().splitlines(keepends=True)
  (tmp_path / 'rows.jsonl').write_text(''.join(lines[1:]))
  with pytest.raises(gl.UsageError, match=f'it has {len(lines) - 1} lines, and {len(lines)} were written'):
    identification.load(tmp_path)
  with pytest.raises(gl.UsageError, match='holds no finished identification'):
    identification.load(tmp_path / 'parts')


@pytest.mark.long
@pytest.mark.parametrize('defense', [D.fragmentation_random(ratio=0.5), D.svt_privacy(noise_var=1e9, gamma=1.0)])
def test_a_batch_is_compared_with_what_any_round_sent(scenario, defense):
  """Entries that a single one of eight rounds left out were not compared, and there were no others."""
  found = identify(scenario, [defense], 2, batch_size=2, candidates=20, rounds=8)
  assert found.identified(str(defense)) == (4, 4)


def test_candidates_of_another_kind_do_not_count():
  listed = identification._List(np.zeros((4, 1)), np.asarray([0, 0, 1, 1]), np.asarray([[0]]), kinds=True)
  (row,), _ = identification._judged(
    {'likelihood': np.asarray([[1.0, 0.0, 5.0, 6.0]])}, listed, {'copies': 'exact'}, False
  )  # fmt: skip
  assert (row['rank'], row['candidates']) == (1, 1)


@pytest.mark.long
def test_each_class_of_a_gallery_by_class_has_its_own_list():
  """The list was cut as a whole, and the last classes had no candidate: originals were first among none."""
  rng, labels = np.random.default_rng(0), np.repeat(np.arange(4), 10).astype(np.int32)
  images = np.float32(rng.uniform(size=(40, 3, 3, 1)))
  model, variables = dense(rng.normal(size=(9, 4)))
  own = [39, 0, 10, 9]
  gallery = gl.data.Candidates(images, labels, True)
  one = gl.scenario(model, images[own], labels[own], variables=variables, gallery=gallery)
  found = identify(one, [None], 4, candidates=5, controls=1)
  assert [row['candidates'] for row in found.rows if row['statistic'] == 'likelihood'] == [4] * 4
  assert found.identified('none') == (4, 4) and found.config['listed'] == 15
  assert identify(one, [None], 4).config['listed'] == 30, 'no original is of class 2'


@pytest.mark.long
def test_people_whose_samples_differ_in_the_label_alone_are_two_candidates():
  """They were one with the label of the first; who does not know the labels cannot tell them apart."""
  rng, labels = np.random.default_rng(0), np.arange(30, dtype=np.int32) % 4
  images = np.float32(rng.uniform(size=(30, 3, 3, 1)))
  images[1] = images[0]
  model, variables = dense(rng.normal(size=(9, 4)))
  one = gl.scenario(model, images, labels, variables=variables)
  assert one.shared.tolist() == [0] * 30 and one.of(slice(3), one.local).alike.tolist() == [1, 1, 0]
  found, unknown = identify(one, [None], 3), identify(one, [None], 3, labels='unknown')
  assert found.identified('none') == (3, 3) and found.config['listed'] == 30
  assert [row['label'] for row in found.rows if row['statistic'] == 'likelihood'] == [0, 1, 2]
  assert unknown.identified('none') == (1, 3) and unknown.config['listed'] == 29


def test_who_is_alone_on_a_list_is_not_identified():
  listed = identification._List(np.zeros((3, 1)), np.asarray([0, 1, 1]), np.asarray([[0]]), kinds=True)
  scores, facts = {'likelihood': np.asarray([[1.0, 0.0, 0.5]])}, {'copies': 'exact'}
  (row,), _ = identification._judged(scores, listed, facts, False)
  (noise,) = identification._alarmed(scores, listed, facts)
  for one in (row, noise):
    assert (one['rank'], one['candidates'], one['identified']) == (1, 0, False)


@pytest.mark.long
def test_a_folder_keeps_the_group_size_that_it_began_with(scenario, tmp_path):
  whole = identify(scenario, [None, D.prune(rate=0.9)], 2, candidates=20, group_size=3)
  identify(scenario, [None], 2, candidates=20, group_size=3, workdir=tmp_path)
  again = identify(scenario, [None, D.prune(rate=0.9)], 2, candidates=20, group_size=7, workdir=tmp_path)
  assert again.rows == whole.rows  # to the bit
  assert json.loads((tmp_path / 'speed.json').read_text()) == {'group_size': 3}


def test_the_least_number_of_candidates_is_said():
  rows = [
    {'model': 'm', 'rounds': 1, 'candidates': n, 'identified': True, 'present': None, 'trial': n, 'posterior': None}
    for n in (300, 20)
  ]
  assert identification._counted(('none', 'exact', 'likelihood'), rows, None)['candidates'] == 20


@pytest.mark.long
def test_a_run_that_was_stopped_goes_on(scenario, tmp_path, monkeypatch):
  whole = identify(scenario, [None, D.prune(rate=0.9)], 2, candidates=20, workdir=tmp_path / 'whole')
  known, under = [], identification._Run.under

  def once(self, *arguments):
    if known:
      raise KeyboardInterrupt
    known.append(1)
    return under(self, *arguments)

  monkeypatch.setattr(identification._Run, 'under', once)
  with pytest.raises(KeyboardInterrupt):
    identify(scenario, [None, D.prune(rate=0.9)], 2, candidates=20, workdir=tmp_path / 'part')
  monkeypatch.setattr(identification._Run, 'under', under)
  resumed = identify(scenario, [None, D.prune(rate=0.9)], 2, candidates=20, workdir=tmp_path / 'part')
  assert (resumed.rows, resumed.pairs) == (whole.rows, whole.pairs)
  again = identify(scenario, [None, D.prune(rate=0.9)], 2, candidates=20, workdir=tmp_path / 'part')
  assert again.seconds == resumed.seconds == identification.load(tmp_path / 'part').seconds > 0.01  # it was 0.0
  with pytest.raises(gl.UsageError, match='candidates'):
    identify(scenario, [None], 2, candidates=30, workdir=tmp_path / 'part')


def test_intervals_count_uploads_where_originals_share_one():
  """Ten uploads give away their whole batch of eight or nothing: that is ten draws, not eighty."""
  row = {'defense': 'none', 'copies': 'exact', 'statistic': 'regression', 'model': 'exact', 'rounds': 1}
  row |= {'candidates': 99, 'posterior': None}
  rows = [
    row | {'trial': t, 'place': b, 'identified': t < 5, 'present': t < 4 if t else None}
    for t in range(10) for b in range(8)
  ]  # fmt: skip
  (found,) = identification.Identification({}, rows, [], 0.0).counts()
  expected = [gl.metrics.proportion_interval(5, 10), gl.metrics.proportion_interval(3, 9)]
  for name, (_, low, high), count in zip(('identified', 'present'), expected, (40, 24), strict=True):
    assert found[name] == count and (found[f'{name}_low'], found[f'{name}_high']) == pytest.approx((low, high))
  assert found['n'] == 80


def test_the_first_sentence_names_all_that_hide_most():
  """Of two defenses that hide every original, one was said to hide most."""
  row = {'copies': 'exact', 'statistic': 'likelihood', 'model': 'exact', 'rounds': 1, 'candidates': 99}
  row |= {'posterior': None, 'present': None}
  rows = [
    row | {'defense': name, 'trial': t, 'place': 0, 'identified': t < seen}
    for name, seen in (('none', 4), ('a', 0), ('b', 0), ('c', 4), ('d', 1)) for t in range(4)
  ]  # fmt: skip

  def opening(*names):
    kept = [one for one in rows if one['defense'] in names]
    return gl.report.identification.opening(identification.Identification({}, kept, [], 0.0))

  assert '99 others under `a` and `b`, which hide most, and 4 of 4 under `none` and `c`, by' in opening(*'abc', 'none')
  assert '99 others under `a`, which hides most, and 4 of 4 under `none`, by' in opening('a', 'none')
  assert opening('a', 'none').endswith('`likelihood`.')
  assert opening('a', 'd', 'none').endswith('`likelihood`. 1 other is within noise of the fewest.')


def test_labels_of_a_gallery_are_part_of_what_a_folder_is_of(scenario, digits, tmp_path):
  """Other labels make other updates of the candidates, and so other ranks."""
  private, public, gallery = digits
  others = gallery.targets.copy()
  others[len(private.targets) :] = others[len(private.targets) :][::-1]

  def relabelled(targets, by_class):
    given = gallery._replace(targets=targets, by_class=by_class)
    return gl.scenario(
      scenario.client.model, private.samples, private.targets, key=jax.random.key(0), dataset='digits', public=public,
      gallery=given,
    )  # fmt: skip

  identify(scenario, [None], 2, candidates=20, workdir=tmp_path / 'part')
  with pytest.raises(gl.UsageError, match='listed_fingerprint was'):
    identify(relabelled(others, False), [None], 2, candidates=20, workdir=tmp_path / 'part')
  assert relabelled(gallery.targets, False).settings == scenario.settings
  assert relabelled(gallery.targets, True).settings != relabelled(others, True).settings  # an audit's, too


@pytest.mark.long
def test_ranks_by_another_label_for_each_round_are_not_gone_on_with(scenario, tmp_path):
  given = {'candidates': 20, 'labels': 'unknown', 'workdir': tmp_path / 'part'}
  identify(scenario, [None], 2, **given)
  stored = json.loads((tmp_path / 'part' / 'config.json').read_text())
  (tmp_path / 'part' / 'config.json').write_text(json.dumps({k: v for k, v in stored.items() if k != 'unknown_labels'}))
  with pytest.raises(gl.UsageError, match='unknown_labels was None'):
    identify(scenario, [None], 2, **given)


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    ({'trials': 9}, 'need 9'),
    ({'candidates': 1}, 'candidates'),
    ({'labels': 'guessed'}, 'labels'),
    ({'group_size': 0}, 'group_size'),
    ({'trials': 2, 'batch_size': 2, 'labels': 'unknown'}, 'batch'),
    ({'steps': 3}, 'steps'),
  ],
)
def test_what_cannot_be_run_is_refused(scenario, arguments, message):
  with pytest.raises(gl.UsageError, match=message):
    identify(scenario, [None], **arguments)


@pytest.mark.long
@pytest.mark.parametrize('local', [{'order': '1,2,0'}, {'last_batch': 'dropped'}], ids=str)
def test_candidates_of_a_batch_are_simulated_one_by_one(digits, local):
  private, _, gallery = digits
  client = gl.ClientSettings(share='delta', local_batch_size=2, **local)
  model = gl.models.create('mlp(widths=16)', 10)
  one = gl.scenario(model, private.samples, private.targets, key=jax.random.key(0), gallery=gallery, client=client)
  assert len(identify(one, [None], 2, batch_size=3, candidates=20).rows) == 6


@pytest.mark.long
def test_a_label_that_nobody_knows_is_one_for_all_rounds(scenario, monkeypatch):
  """Of equally likely labels the likelihoods are summed over the rounds first, and then over the labels."""
  seen, computed = [], identification._Run._statistics
  monkeypatch.setattr(
    identification._Run, '_statistics', lambda *given: seen.append((*given, computed(*given))) or seen[-1][-1]
  )
  identify(scenario, [D.gaussian(stddev=2.0)], 3, candidates=20, rounds=4, labels='unknown')
  ((_, _, updates, _, samples, _, found),) = seen
  client, labels = scenario.client, np.tile(np.arange(10), (len(samples), 1))
  each = jax.vmap(
    jax.vmap(lambda x, y: client.local_update(None, scenario.variables, x[None], y[None]).update, (None, 0))
  )
  made = jax.tree.leaves(each(samples, labels))
  means = np.concatenate([np.asarray(leaf, np.float64).reshape(*labels.shape, -1) for leaf in made], axis=2)
  products = np.einsum('trp,clp->trcl', updates, means)
  logs = (products - 0.5 * np.sum(means**2, axis=-1)).sum(axis=1) / 2.0**2
  expected = special.logsumexp(logs, axis=-1)
  np.testing.assert_allclose(*(x - x[:, :1] for x in (found['likelihood'], expected)), atol=0.02, rtol=1e-4)
  lengths = np.linalg.norm(updates, axis=-1)[..., None, None] * np.linalg.norm(means, axis=-1)
  np.testing.assert_allclose(found['direction'], (products / lengths).sum(axis=1).max(axis=-1), rtol=1e-4)


@pytest.mark.slow
def test_texts_that_predict_their_own_tokens_are_found_without_labels():
  """Each candidate is its own target: the gallery has no labels, and nothing is tried in their place."""
  scenario = texts.scenario(number=40)
  bare = scenario._replace(gallery=scenario.gallery._replace(targets=np.full(len(scenario.gallery.targets), -1)))
  defenses = [None, D.gaussian(stddev=1e-3), D.gaussian(stddev=100)]
  found = gl.identify(jax.random.key(1), bare, defenses, 6, copies='exact,one token', progress='none')
  for copies in ('exact', 'one token'):
    assert [found.identified(label, copies=copies)[0] for label in ('none', 'gaussian(stddev=0.001)')] == [6, 6]
    assert found.identified('gaussian(stddev=100)', copies=copies)[0] < 3
  other = gl.identify(jax.random.key(1), bare, [None], 6, labels='unknown', progress='none')
  assert other.config['labels'] == 'known' and other.identified('none') == (6, 6)
  of_two = gl.identify(jax.random.key(1), bare, [None], 3, batch_size=2, progress='none')
  assert of_two.identified('none') == (6, 6)


@pytest.mark.parametrize('loss', ['binary_cross_entropy', 'mean_squared_error'])
def test_targets_that_a_gallery_has_not_are_refused(loss):
  data = gl.data.load('diabetes', 'test', limit=4)
  kind, targets = gl.modalities.of_config(data.settings), np.asarray(data.targets, np.float32)[:, np.newaxis]
  model = gl.models.mlp(1, widths=8)
  made = gl.scenario(model, data.samples, targets, key=jax.random.key(0), modality=kind, loss=loss)
  with pytest.raises(gl.UsageError, match='identification is for classes'):
    gl.identify(jax.random.key(1), made, [None], 2, progress='none')


@pytest.mark.long
def test_the_first_sentence_follows_from_the_counts(scenario):
  found = identify(scenario, [None, D.prune(rate=0.5)], 4)
  among = found.config['listed'] - 1
  assert (
    gl.report.identification_table(found).replace('\n', ' ').count('Under each of 2 entries, 4 of 4 originals') == 1
  )
  rows = [{**row, 'identified': row['defense'] == 'none'} for row in found.rows]
  told = gl.report.identification_table(dataclasses.replace(found, rows=rows)).replace('\n', ' ')
  assert f'0 of 4 originals are at rank 1 among {among} others under prune(rate=0.5), which hides most' in told


@pytest.mark.long
def test_ranks_of_a_version_that_assumed_no_projection_are_another_part(scenario, tmp_path, monkeypatch):
  defense, expected = D.concealment(steps=10), likelihood.expected
  arguments = {'trials': 2, 'candidates': 20, 'workdir': tmp_path / 'run'}
  with monkeypatch.context() as patch:
    patch.setattr(likelihood, 'expected', lambda *given: expected(*given)._replace(model='direction'))
    patch.setattr(identification, '_assumed', lambda defense: {})
    assert identify(scenario, [defense], **arguments).rows[0]['model'] == 'direction'
  assert identify(scenario, [defense], **arguments).rows[0]['model'] == 'projected'


@pytest.mark.long
def test_the_program_writes_a_page_and_a_table(tmp_path):
  what = '--dataset=digits', '--model=mlp(widths=16)', '--trials=4', '--candidates=60', '--progress=none'
  done = programs.start(
    'identify', *what, '--compilation_cache=', '--defenses=none;gaussian(stddev=100)', f'--workdir={tmp_path}/run'
  )
  assert done.status == 0, done.err
  assert '4 of 4 (39 to 100 %)' in done.out
  written = (tmp_path / 'run' / 'identification.html').read_text('utf-8')
  assert 'at rank 1 among 59 others under' in written.replace('\n', ' ')
  assert (tmp_path / 'run' / 'summary.csv').read_text().count('\n') == 9
  assert (tmp_path / 'run' / 'identification.png').read_bytes().startswith(b'\x89PNG')


def test_processes_share_the_defenses(tmp_path):
  """Each runs its own, and the last one to end has all, in the order of one process."""

  class Run:
    def __init__(self):
      self.ran, self.seconds = [], 0.0

    def under(self, one, name, alter):
      self.ran.append(one.label)
      return [{'defense': one.label, 'rank': 1}], [{'defense': one.label, 'false': 0}], []

  defenses = named_defenses([None, D.prune(rate=0.5), D.prune(rate=0.9)])
  parts = [(one, 'exact', None) for one in defenses]
  first, second, whole = Run(), Run(), Run()
  store = storage.Workdir(tmp_path / 'new', {}, {}, shared=True)
  assert identification._all(first, store, parts, (0, 2)) is None and first.ran == ['none', 'prune(rate=0.9)']
  rows = identification._all(second, store, parts, (1, 2))
  assert second.ran == ['prune(rate=0.5)'] and rows == identification._all(whole, None, parts, (0, 1))
  assert [row['kind'] for row in rows] == ['rows', 'pairs'] * 3 and len(whole.ran) == 3
  assert identification._all(Run(), store, parts, (0, 2)) == rows
