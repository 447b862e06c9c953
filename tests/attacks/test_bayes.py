"""The most likely image: the prior against NumPy, the objective by hand, and what is seen under known noise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradleak as gl
from gradleak.adaptive import adaptive_attacks
from gradleak.attacks.matching import terms
from gradleak.audit import verdict
from gradleak.audit.plan import plan
from gradleak.audit.settings import AuditSettings
from gradleak.audit.uploads import uploads
from gradleak.audit.views import views
from gradleak.defenses.defense import bind
from gradleak.priors import gaussian


def test_the_prior_has_the_covariance_of_the_images():
  rng = np.random.default_rng(0)
  images = np.float32(rng.normal(size=(200, 2, 3, 1)) @ rng.normal(size=(1, 1)) + rng.normal(size=(1, 2, 3, 1)))
  learned = gaussian.fitted(images, 6)
  rows = images.reshape(200, -1)
  np.testing.assert_allclose(learned['mean'], rows.mean(0), rtol=1e-5)
  np.testing.assert_allclose(learned['basis'].T @ learned['basis'], np.cov(rows.T), atol=1e-5)
  whitened = np.linalg.solve(np.cov(rows.T), (rows[:3] - rows.mean(0)).T)
  by_hand = np.sum((rows[:3] - rows.mean(0)).T * whitened)  # the squared Mahalanobis distance
  np.testing.assert_allclose(gaussian.squared_length(images[:3], learned), by_hand, rtol=1e-4)


def test_latents_and_images_are_one_to_one():
  images = np.float32(np.random.default_rng(1).uniform(size=(30, 4, 4, 1)))
  learned = gaussian.fitted(images, 5)
  assert learned['basis'].shape == (5, 16)
  latents = jax.random.normal(jax.random.key(0), (2, 5))
  made = gaussian.LINEAR.apply({'latents': latents}, (), (2, 4, 4, 1), learned)
  np.testing.assert_allclose(gaussian.squared_length(made, learned), np.sum(np.square(latents)), rtol=1e-4)


@pytest.mark.parametrize('images', [np.zeros((1, 2, 2, 1)), np.ones((5, 2, 2, 1))], ids=['one', 'equal'])
def test_a_prior_of_nothing_is_refused(images):
  with pytest.raises(gl.UsageError, match='Gaussian prior takes'):
    gaussian.fitted(images, 3)


@pytest.mark.parametrize('noise', [0.0, 3.0])
def test_the_term_is_in_units_of_the_noise_of_an_entry(noise):
  images = np.float32(np.random.default_rng(2).uniform(size=(30, 4, 4, 1)))
  learned = gaussian.fitted(images, 40)
  update = {'a': jnp.asarray([3.0, 4.0]), 'b': jnp.zeros(3)}
  weights = {'a': jnp.ones(2, jnp.float16), 'b': jnp.zeros(3, jnp.float16)}
  for counted, given in ((5, None), (2, weights)):
    seen = gl.Observation(
      {}, update, jnp.zeros((1, 2)), gl.Knowledge(), (1, 4, 4, 1), 2, given, jnp.float32(noise), prepared=learned
    )
    variance = max(noise, 1e-6 * 25) / counted
    expected = variance * float(gaussian.squared_length(images[:1], learned))
    np.testing.assert_allclose(terms.gaussian_prior(images[:1], terms.Given(None, seen)), expected, rtol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize('which', ['frozen', 'private'])
def test_layers_that_are_not_sent_bear_no_noise(which, digits):
  """The variance is what the defense declares, whatever is not shared."""
  images, labels = (each[:40] for each in digits)
  given = {'key': jax.random.key(0), 'public': (images[8:], labels[8:]), which: 'Dense_0'}
  scenario = gl.scenario(gl.models.create('mlp(widths=16)', 10), images[:8], labels[:8], **given)
  defense = bind(gl.defenses.gaussian(stddev=0.1), scenario.context)
  client = defense.client(scenario.client)
  upload = jax.jit(client.local_update)(jax.random.key(2), scenario.variables, images[:1], labels[:1])
  attack = gl.attacks.bayes()
  (adaptive,) = (one for one in adaptive_attacks(defense, scenario.context, 1, attack) if one.noise is not None)
  (view,) = adaptive.views(jax.tree.map(lambda x: np.asarray(x)[None], upload))
  learned = gaussian.fitted(images, 4)
  seen = gl.Observation(
    scenario.variables, view.update, jnp.zeros((1, 10)), gl.Knowledge(), (1, 8, 8, 1), 10,
    jax.tree.map(jnp.asarray, view.weights), jnp.float32(view.noise), prepared=learned,
  )  # fmt: skip
  matching = attack(scenario.client).init.__self__
  added = matching.added(jnp.float32(0), seen, images[:1], 0)
  np.testing.assert_allclose(added, 0.01 * gaussian.squared_length(images[:1], learned), rtol=1e-3)


def test_other_attacks_have_no_such_term():
  assert 'gaussian' not in gl.attacks.csdlg().settings
  with pytest.raises(gl.UsageError, match='gaussian needs a Gaussian prior'):
    seen = gl.Observation({}, {}, jnp.zeros((1, 2)), gl.Knowledge(), (1, 4, 4, 1), 2)
    terms.addends(dict(terms.summed({'gaussian': 1.0})), jnp.zeros((1, 4, 4, 1)), terms.Given(None, seen), 1.0)


@pytest.mark.slow
def test_control_runs_bear_the_noise_that_the_prior_is_weighed_by():
  private, public = gl.data.load('digits', 'test', limit=6), gl.data.load('digits', 'train', limit=200)
  scenario = gl.scenario(
    gl.models.create('mlp(widths=16)', 10), private.samples, private.targets, key=jax.random.key(0), dataset='digits',
    public=(public.samples, public.targets), gallery=gl.data.gallery('digits', 'test', most=120),
  )  # fmt: skip
  little, much = (gl.defenses.gaussian(stddev=stddev) for stddev in (0.001, 50.0))
  found = gl.audit(
    jax.random.key(1), scenario, [much, little], [gl.attacks.bayes(steps=40, components=20)], 6, controls=8,
    labels='known', knowledge='both', progress='none',
  )  # fmt: skip
  pools = {threshold: [row for row in found.controls if row['control_psnr'] == threshold]
           for threshold in {row['control_psnr'] for row in found.controls}}  # fmt: skip
  assert [sorted(row['trial'] for row in pool) for pool in pools.values()] == [[*range(8)]] * 3
  for threshold, pool in pools.items():
    assert verdict.threshold(pool).score == threshold
  places = [(row['trial'], row['adaptive'] or '', str(row['control_psnr'])) for row in found.controls]
  assert places == sorted(places), 'their order does not depend on which of them were run first'

  def figures(defense: gl.defenses.Defense, adaptive: str | None) -> tuple[float, float, set[str]]:
    rows = [row for row in found.rows if row['defense'] == str(defense) and row['adaptive'] == adaptive]
    (threshold,) = {row['control_psnr'] for row in rows}
    mean, of_noise = (float(np.mean([row['psnr'] for row in some])) for some in (rows, pools[threshold]))
    return mean, of_noise, {row['verdict'] for row in rows}

  assert figures(little, None)[1] == figures(much, None)[1], 'an attacker who knows of no noise has one control'
  recovered, of_noise, _ = figures(little, 'floor')
  assert recovered > of_noise + 3
  of_prior, prior, verdicts = figures(much, 'floor')
  assert prior > of_noise + 1, 'under so much noise the prior is all'
  assert abs(of_prior - prior) < 1, 'and says as little of an upload as of noise'
  assert verdicts <= {'nothing seen', 'inconclusive'}


@pytest.mark.long
def test_control_runs_under_known_noise_have_the_norms_of_what_the_defense_sends():
  data = gl.data.load('digits', 'test', limit=4)
  scenario = gl.scenario(
    gl.models.create('mlp(widths=16)', 10), data.samples, data.targets, key=jax.random.key(0), dataset='digits',
    public=(1 - data.samples, data.targets),
  )  # fmt: skip
  defenses, settings = [gl.defenses.gaussian(stddev=0.5)], AuditSettings(controls=3, labels='known')
  (group,) = plan(jax.random.key(1), scenario, defenses, [gl.attacks.bayes(components=2)], 2, settings).groups
  sent = uploads(group, np.arange(2), np.asarray([0, 2]), 2)  # both are of trial 0
  seen = views(group, sent)
  defended, *others = [
    jax.tree.map(lambda x, t=target: x[t.views[0]], seen.stacked)
    for target in seen.targets
    if target.adaptive.noise is not None and target.trial == 0
  ]
  assert len(others) == 2
  for other in others:
    assert other['noise'] == defended['noise'] > 0
    pairs = list(zip(*(jax.tree.leaves(view['update']) for view in (defended, other)), strict=True))
    for ours, theirs in pairs:
      np.testing.assert_allclose(np.linalg.norm(theirs), np.linalg.norm(ours), rtol=1e-5)
    assert max(abs(np.corrcoef(np.ravel(a), np.ravel(b))[0, 1]) for a, b in pairs if a.size > 500) < 0.1


@pytest.mark.slow
def test_under_known_noise_it_sees_digits_that_matching_does_not():
  private, public = gl.data.load('digits', 'test', limit=8), gl.data.load('digits', 'train')
  scenario = gl.scenario(
    gl.models.create('mlp(widths=16)', 10), private.samples, private.targets, key=jax.random.key(0), dataset='digits',
    public=(public.samples, public.targets), gallery=gl.data.gallery('digits', 'test', most=150),
  )  # fmt: skip
  attacks = [gl.attacks.bayes(steps=200), gl.attacks.csdlg_fast(steps=200, tv=1e-3)]
  found = gl.audit(
    jax.random.key(1), scenario, [gl.defenses.gaussian(stddev=1.0)], attacks, 8, controls=16, labels='known',
    knowledge='adaptive', rounds=8, progress='none',
  )  # fmt: skip
  correlation = {
    name: max(
      np.mean([row['pearson'] for row in found.rows if (row['attack'], row['adaptive']) == (str(attack), by)])
      for by in {row['adaptive'] for row in found.rows if row['attack'] == str(attack)}
    )
    for name, attack in zip(('bayes', 'csdlg'), attacks, strict=True)
  }
  assert correlation['bayes'] > correlation['csdlg'] + 0.1, correlation
  null = [row['pearson'] for row in found.controls if row['attack'] == str(attacks[0])]
  assert correlation['bayes'] > np.mean(null) + 0.3
  (threat,) = {row['tier'] for row in found.rows if row['attack'] == str(attacks[0])}
  assert threat == 'D', 'it holds public images'
