"""Differential privacy against NumPy and SciPy: the mechanisms from the papers, their noise, and their ε."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.optimize
import scipy.stats

import gradleak as gl
from gradleak import Client, models
from gradleak.core import errors
from gradleak.defenses import Mechanism
from gradleak.defenses import differential_privacy as dp
from gradleak.defenses.guarantees import mechanisms
from gradleak.federated import losses

KEY = jax.random.key(5)
ABSENT = 'add or remove one'


class Setting:
  """A client, four digits, and the gradient of each of them, computed one by one."""

  def __init__(self, name, images, labels):
    self.samples, self.targets = jnp.asarray(images), jax.nn.one_hot(jnp.asarray(labels), 10)
    self.client = Client(models.create(name, 10), 10, batch_norm='eval')
    self.variables = jax.jit(self.client.model.init, static_argnums=1)(jax.random.key(0), images.shape[1:])
    self.params = self.variables['params']

    @jax.jit
    def gradient(image, label):
      def loss(params):
        logits, _ = self.client.model.apply({**self.variables, 'params': params}, image[None], False, None)
        return self.client.loss(logits, label[None])[0]

      return jax.grad(loss)(self.params)

    self.gradients = np.stack([flat(gradient(*sample)) for sample in zip(self.samples, self.targets, strict=True)])

    self.compiled = {}

  def apply(self, factory, changed=None, **settings):
    """Returns what `factory(client, **settings)` makes of the samples, other arguments of its update `changed`."""

    def update(settings, given):
      transformation = factory(self.client, **settings)
      ones = jax.tree.map(jnp.ones_like, self.params)  # nothing of what comes in may survive
      return transformation.update(ones, transformation.init(self.params), self.params, **given)[0]

    given = {'key': KEY, 'batch': (self.samples, self.targets), 'variables': self.variables, 'weights': jnp.ones(4)}
    return flat(self.compiled.setdefault(factory, jax.jit(update))(settings, {**given, **(changed or {})}))


def flat(tree):
  return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)])


def clipped(gradients, norm):
  """Returns g / max(1, ‖g‖₂ / B) of each row."""
  return np.stack([g / max(1.0, math.sqrt(sum(g**2)) / norm) for g in gradients])


@pytest.fixture(scope='module', params=['lenet', 'convnet(width=2)'])
def setting(request, small_images):
  images, labels = small_images[0][:4], small_images[1][:4]
  if request.param != 'lenet':
    images = np.kron(images, np.ones((1, 2, 2, 1), np.float32))[:, 2:14, 2:14]
  return Setting(request.param, images, labels)


@pytest.fixture(scope='module')
def dense(small_images):
  return Setting('mlp(widths=32)', small_images[0][:4], small_images[1][:4])


@pytest.mark.long
def test_every_sample_is_clipped_by_itself(setting):
  norms = np.linalg.norm(setting.gradients, axis=1)
  bound = float(np.sort(norms)[1:3].mean())  # two of four are beyond it
  expected = clipped(setting.gradients, bound).mean(0)
  together = clipped(setting.gradients.mean(0, keepdims=True), bound)[0]
  assert np.linalg.norm(expected - together) > 1e-3 * np.linalg.norm(expected)
  for found in (setting.apply(dp.clip_samples, norm=bound), setting.apply(dp.dpsgd, norm=bound, noise=0.0)):
    assert np.linalg.norm(found - expected) < 1e-5 * np.linalg.norm(expected)


@pytest.mark.long
def test_padding_counts_for_nothing(dense):
  padded = {'weights': jnp.asarray([1.0, 0.0, 1.0, 1.0])}
  expected = clipped(dense.gradients[[0, 2, 3]], 0.5).mean(0)
  found = dense.apply(dp.clip_samples, padded, norm=0.5)
  np.testing.assert_allclose(found, expected, atol=1e-6 * np.abs(expected).max())
  noisy, quiet = (dense.apply(dp.dpsgd, padded, norm=0.5, noise=noise) for noise in (2.0, 0.0))
  assert_gaussian(noisy - quiet, 2.0 * 0.5 / 3)


@pytest.mark.slow
@pytest.mark.parametrize('factory', [dp.clip_samples, lambda client, **norm: dp.dpsgd(client, **norm, noise=0.0)])
def test_a_bound_that_nothing_reaches_changes_no_gradient(small_images, factory):
  """A sum was divided by the number of samples, and weights of classes were lost."""
  images, targets = jnp.asarray(small_images[0][:4]), jax.nn.one_hot(jnp.asarray([0, 1, 1, 2]), 10)
  weight = (1.0, 9.0, *[1.0] * 8)

  def apart(loss):
    client = Client(models.create('mlp(widths=4)', 10), 10, loss=loss)
    variables = client.model.init(jax.random.key(0), images.shape[1:])
    plain = client.local_update(None, variables, images, targets).update
    defended = dataclasses.replace(client, step=factory(client, norm=1e9))
    found = defended.local_update(KEY, variables, images, targets).update
    return np.linalg.norm(flat(found) - flat(plain)) / np.linalg.norm(flat(plain))

  assert apart(losses.cross_entropy(weight=weight, average='samples')) < 1e-5
  assert apart(losses.cross_entropy(weight=weight, reduction='sum')) < 1e-5
  assert apart(losses.focal(weight=weight)) < 1e-5 and apart(losses.mean_squared_error(reduction='sum')) < 1e-5
  with pytest.raises(errors.UsageError, match=r"weights of all classes in the batch.*average='samples'"):
    apart(losses.cross_entropy(weight=weight))


@pytest.mark.long
def test_noise_on_a_sum_is_not_divided(dense):
  summed = dataclasses.replace(dense.client, loss=losses.cross_entropy(reduction='sum'))
  given = {'key': KEY, 'batch': (dense.samples, dense.targets), 'variables': dense.variables}
  transformation = dp.dpsgd(summed, norm=0.5, noise=1.0)
  noisy = transformation.update(dense.params, transformation.init(dense.params), dense.params, **given)[0]
  assert_gaussian(flat(noisy) - clipped(dense.gradients, 0.5).sum(0), 0.5)
  context = gl.defenses.Context(summed, dense.variables, dense.samples.shape[1:])
  (stage,) = gl.defenses.dpsgd(norm=0.5, noise=1.0).stages
  assert stage.traits.noise.variance(stage.settings, context, 4) == pytest.approx(0.25)


def assert_gaussian(drawn, stddev):
  """Asserts that `drawn` is Gaussian with `stddev`, and that 2/3 and 3/2 of it would be told apart."""
  drawn = drawn[:: max(1, drawn.size // 20_000)]
  assert scipy.stats.kstest(drawn, scipy.stats.norm(0, stddev).cdf).pvalue > 0.01
  for wrong in (2 / 3, 3 / 2):
    assert scipy.stats.kstest(drawn, scipy.stats.norm(0, wrong * stddev).cdf).pvalue < 1e-6


@pytest.mark.long
@pytest.mark.parametrize(('norm', 'noise'), [(0.5, 1.0), (3.0, 0.2)])
def test_dpsgd_adds_noise_of_the_sum_to_the_mean(dense, norm, noise):
  settings = {'norm': norm, 'noise': noise}
  noisy, expected = dense.apply(dp.dpsgd, **settings), clipped(dense.gradients, norm).mean(0)
  assert_gaussian(noisy - expected, noise * norm / 4)
  np.testing.assert_array_equal(noisy, dense.apply(dp.dpsgd, **settings))
  other = dense.apply(dp.dpsgd, {'key': jax.random.key(6)}, **settings)
  assert abs(np.corrcoef(noisy - expected, other - expected)[0, 1]) < 0.1


@pytest.mark.parametrize(('norm', 'noise'), [(0.5, 1.0), (1e3, 0.01)])
def test_a_client_clips_and_perturbs_its_whole_update(norm, noise):
  rng = np.random.default_rng(0)
  updates = {name: jnp.asarray(rng.normal(size=(100, 100)), jnp.float32) for name in 'ab'}
  transformation = dp.client_dp(norm=norm, noise=noise)
  noisy, _ = transformation.update(updates, transformation.init(updates), key=KEY)
  drawn = flat(noisy) - clipped(flat(updates)[np.newaxis], norm)[0]
  assert_gaussian(drawn, noise * norm)
  assert abs(np.corrcoef(drawn[:10_000], drawn[10_000:])[0, 1]) < 0.05


@pytest.mark.parametrize('factory', [dp.client_dp, lambda **settings: dp.dpsgd(None, **settings)])
def test_noise_needs_a_finite_norm(factory):
  factory(norm=math.inf, noise=0.0)
  with pytest.raises(errors.UsageError, match=r'norm\) is inf'):
    factory(norm=math.inf, noise=0.1)


def test_the_server_perturbs_the_sum():
  updates = {'a': jnp.ones((5, 20_000)) * jnp.arange(1.0, 6.0).reshape(5, 1), 'b': jnp.zeros((5, 7), jnp.bfloat16)}
  aggregate = jax.jit(dp.aggregate_client_dp)
  quiet, median = aggregate(KEY, updates, 0.0)
  noisy, _ = aggregate(KEY, updates, 0.5)
  assert_gaussian(np.asarray(noisy['a'] - quiet['a'], np.float64), 0.5 * float(median) / 5)
  assert noisy['b'].dtype == jnp.bfloat16
  silent, zero = aggregate(KEY, jax.tree.map(jnp.zeros_like, updates), 1.0)
  assert zero == 0 and not flat(silent).any()
  with pytest.raises(errors.UsageError, match='noise'):
    dp.aggregate_client_dp(KEY, updates, -1.0)


@pytest.mark.long
@pytest.mark.parametrize('answered', [range(5), [0, 2, 3], [1, 4], [2]])
def test_the_server_clips_those_who_answered_to_their_median_norm(answered):
  rng = np.random.default_rng(1)
  updates = {'a': rng.normal(size=(5, 6, 3)), 'b': rng.normal(size=(5, 7)), 'c': rng.normal(size=5)}
  updates = {name: x * 3.0 ** np.arange(5).reshape(-1, *(1,) * (x.ndim - 1)) for name, x in updates.items()}
  present = np.isin(np.arange(5), answered)
  rows = np.concatenate([x.reshape(5, -1) for x in updates.values()], axis=1)[present]
  bound = np.median(np.linalg.norm(rows, axis=1))
  stacked = {name: jnp.asarray(x, jnp.float32).at[~present].set(jnp.nan) for name, x in updates.items()}
  aggregate = jax.jit(dp.aggregate_client_dp)
  mean, median = aggregate(KEY, stacked, 0.0, present)
  np.testing.assert_allclose(median, bound, rtol=1e-5)
  np.testing.assert_allclose(flat(mean), clipped(rows, bound).sum(0) / len(answered), rtol=1e-5, atol=1e-6)
  assert {name: x.shape for name, x in mean.items()} == {name: x.shape[1:] for name, x in updates.items()}
  noisy, _ = aggregate(KEY, {**stacked, 'a': jnp.zeros((5, 20_000))}, 0.5, present)
  quiet, median = aggregate(KEY, {**stacked, 'a': jnp.zeros((5, 20_000))}, 0.0, present)
  assert_gaussian(np.asarray(noisy['a'] - quiet['a'], np.float64), 0.5 * float(median) / len(answered))


def test_where_nobody_answered_there_is_nothing():
  updates = {'a': jnp.full((3, 4), jnp.nan), 'b': jnp.ones((3, 2), jnp.bfloat16)}
  mean, median = jax.jit(dp.aggregate_client_dp)(KEY, updates, 1.0, np.zeros(3, bool))
  assert median == 0
  np.testing.assert_array_equal(flat(mean), 0.0)


@pytest.mark.long
def test_with_all_present_the_bits_are_the_same():
  aggregate = jax.jit(dp.aggregate_client_dp)
  for count in (4, 5):
    updates = {'a': jnp.asarray(np.random.default_rng(count).normal(size=(count, 300)), jnp.float32)}
    plain = aggregate(KEY, updates, 0.5)
    masked = aggregate(KEY, updates, 0.5, np.ones(count, bool))
    assert jax.tree.all(jax.tree.map(np.array_equal, plain, masked))


@pytest.mark.long
def test_an_attacker_can_differentiate_with_respect_to_the_samples(dense):
  """Where a sample has no gradient (padding, a saturated loss) the norm has no derivative, but the defense has."""

  def size(images, norm):
    transformation = dp.clip_samples(dense.client, norm=norm)
    labels = dense.targets.at[1].set(0.0)
    weights = jnp.asarray([1.0, 1.0, 1.0, 0.0])
    update, _ = transformation.update(
      dense.params, transformation.init(dense.params), dense.params, batch=(images, labels), weights=weights
    )
    return optax.tree.norm(update, squared=True)

  slopes = jax.jit(jax.vmap(jax.grad(size), in_axes=(None, 0)))(dense.samples, jnp.asarray([0.5, 1e6, 1e30]))
  assert np.isfinite(slopes).all()
  assert (np.abs(slopes).max(axis=(2, 3, 4)) > 0).tolist() == [[True, False, True, False]] * 3


@pytest.mark.slow
def test_batch_norm_in_train_mode_is_refused():
  client = Client(models.create('convnet(width=2)', 10), 10)
  variables = jax.jit(client.model.init, static_argnums=1)(jax.random.key(0), (12, 12, 1))
  batch = (jnp.zeros((2, 12, 12, 1)), jnp.zeros((2, 10)))

  def update(client, **given):
    transformation = dp.dpsgd(client, norm=1.0, noise=1.0)
    params = variables['params']
    return jax.eval_shape(lambda: transformation.update(params, (), params, key=KEY, batch=batch, **given))

  with pytest.raises(errors.UsageError, match=r"dpsgd .* BatchNorm in train mode .* batch_norm='eval'"):
    update(client, variables=variables)
  fixed = dataclasses.replace(client, batch_norm='eval')
  with pytest.raises(errors.UsageError, match=r'dpsgd needs the batch statistics .*variables='):
    update(fixed)
  update(fixed, variables=variables)


@pytest.mark.long
def test_dropout_is_on_where_a_key_is_given(small_images):
  dropping = Setting('mlp(dropout=0.5)', small_images[0][:4], small_images[1][:4])
  expected = dropping.gradients.mean(0)
  np.testing.assert_allclose(dropping.apply(dp.clip_samples, {'key': None}, norm=1e3), expected, atol=1e-5)
  masked = [dropping.apply(dp.clip_samples, {'key': jax.random.key(seed)}, norm=1e3) for seed in range(2)]
  assert all(np.linalg.norm(m - expected) > 0.1 * np.linalg.norm(expected) for m in masked)
  assert np.linalg.norm(masked[0] - masked[1]) > 0.1 * np.linalg.norm(expected)


@pytest.mark.long
@pytest.mark.parametrize('norm', [0.5, math.inf])
def test_local_training_clips_at_every_step(dense, norm):
  """Four samples in batches of three, twice over: the second batch of each epoch is one sample and padding."""
  step = dp.clip_samples(dense.client, norm=norm)
  client = dataclasses.replace(dense.client, share='delta', epochs=2, batch_size=3, step=step)
  found = jax.jit(client.local_update)(KEY, dense.variables, dense.samples, dense.targets).update

  @jax.jit
  def gradient(params, image, label):
    return jax.grad(lambda p: client.loss(client.model.apply({'params': p}, image[None])[0], label[None])[0])(params)

  params = dense.params
  for batch in ([0, 1, 2], [3]) * 2:
    gradients = [gradient(params, dense.samples[i], dense.targets[i]) for i in batch]
    factors = [1 / max(1.0, np.linalg.norm(flat(g)) / norm) / len(batch) for g in gradients]
    for factor, g in zip(factors, gradients, strict=True):
      params = jax.tree.map(lambda p, g, f=factor: p - jnp.float32(0.1 * f) * g, params, g)
  expected = flat(params) - flat(dense.params)
  assert np.linalg.norm(flat(found) - expected) < 1e-4 * np.linalg.norm(expected)


def analytic(noise, delta):
  """Returns the exact ε of one Gaussian mechanism (Balle & Wang 2018, theorem 8)."""

  def excess(epsilon):
    first = scipy.stats.norm.cdf(1 / (2 * noise) - epsilon * noise)
    second = scipy.stats.norm.logcdf(-1 / (2 * noise) - epsilon * noise)
    return first - math.exp(epsilon + second) - delta

  return scipy.optimize.brentq(excess, 0, 600, xtol=1e-10)


@pytest.mark.parametrize(('relation', 'moved', 'value'), [('replace one', 2.0, 10.73), ('replace by zeros', 1.0, 4.73)])
def test_an_epsilon_is_that_of_its_relation(relation, moved, value):
  """Clip 1, σ 1: the closed form of Balle and Wang at the distance between two neighbours' uploads."""
  (mechanism,) = mechanisms(gl.parse('clip(norm=1)+gaussian(stddev=1)'))
  found = dp.of_upload(mechanism, relation)
  assert found.value == pytest.approx(value, abs=0.005)
  tight = dp.of_upload(mechanism, relation, accountant='pld')
  assert tight.value == pytest.approx(analytic(1.0 / moved, 1e-5), rel=1e-3) and tight.value < found.value
  assert str(found) == f'ε = {found.value:.4g} ({relation}, per client, one upload, no sampling, δ = 1e-05, RDP)'
  assert found.terms == {
    'relation': relation, 'unit': 'client', 'published': 'one upload', 'sampling': 'none', 'sampling_rate': 1.0,
    'delta': 1e-5, 'accountant': 'rdp',
  }  # fmt: skip
  twice = dp.of_upload(mechanism, relation, uploads=2)
  assert twice.published == 'all uploads' and twice.value == dp.epsilon(1.0, relation, steps=2)


def test_neighbours_uploads_are_as_far_apart_as_their_relation_says():
  """Two clipped updates that oppose each other are 2·S apart, and each is S from zeros."""
  clipped, update = gl.parse('clip(norm=0.5)'), {'w': jnp.array([3.0, 4.0])}
  sent = [np.asarray(clipped.update(jax.tree.map(lambda x, s=s: s * x, update), ())[0]['w']) for s in (1, -1, 0)]
  for relation, (one, other) in (('replace one', sent[:2]), ('replace by zeros', sent[1:])):
    mechanism = Mechanism(1.5 / 0.5, 'client')
    assert mechanism.multiplier(relation) == pytest.approx(1.5 / np.linalg.norm(one - other))


@pytest.mark.long
@pytest.mark.parametrize('delta', [1e-5, 1e-3])
@pytest.mark.parametrize('noise', [0.5, 1.0, 4.0])
def test_epsilon_of_one_release_and_of_several(noise, delta):
  exact = analytic(noise, delta)
  assert dp.epsilon(noise, ABSENT, steps=1, delta=delta, accountant='pld') == pytest.approx(exact, rel=0.01)
  assert exact <= dp.epsilon(noise, ABSENT, steps=1, delta=delta) < 1.3 * exact
  # Sixteen releases are one with a quarter of the multiplier.
  assert dp.epsilon(4 * noise, ABSENT, steps=16, delta=delta, accountant='pld') == pytest.approx(exact, rel=0.01)


def test_epsilon_of_the_papers_setting():
  """ε = 8 at q = 0.1, 2,000 rounds and δ = 1e-5 takes a multiplier of about 3."""
  setting = {'steps': 2000, 'sampling_rate': 0.1, 'delta': 1e-5}
  renyi = dp.epsilon(3.0, ABSENT, **setting)
  assert 7 < renyi < 9
  assert 0.8 * renyi < dp.epsilon(3.0, ABSENT, **setting, accountant='pld') <= renyi
  assert dp.epsilon(2.0, ABSENT, **setting) > renyi > dp.epsilon(4.0, ABSENT, **setting)


@pytest.mark.parametrize('accountant', ['rdp', 'pld'])
def test_epsilon_without_and_with_hardly_any_noise(accountant):
  assert dp.epsilon(0, ABSENT, steps=1, accountant=accountant) == math.inf
  assert 5000 < dp.epsilon(0.01, ABSENT, steps=1, accountant=accountant) < 6000
  for noise in (1e-10, 1e-99, 1e-101, 5e-324):
    for rate in (1.0, 0.5):
      assert dp.epsilon(noise, ABSENT, steps=1000, sampling_rate=rate, accountant=accountant) > 1e19


def test_orders_that_do_not_converge_are_left_out_in_silence(capfd):
  spent = dp.epsilon(0.3, ABSENT, steps=100, sampling_rate=0.1)
  assert 100 < spent < dp.epsilon(0.3, ABSENT, steps=100)
  assert capfd.readouterr().err == ''


@pytest.mark.long
def test_training_stops_before_the_budget_is_exceeded():
  setting = {'noise': 3.0, 'sampling_rate': 0.1}
  rounds = dp.rounds_within(8.0, 1e-5, **setting)
  assert 2000 < rounds < 2200
  assert dp.epsilon(relation=ABSENT, steps=rounds, **setting) <= 8.0
  assert dp.epsilon(relation=ABSENT, steps=rounds + 1, **setting) > 8.0
  assert dp.rounds_within(8.0, 1e-5, noise=0.1) == dp.rounds_within(8.0, 1e-5, noise=0) == 0
  # k releases are one with the multiplier over √k, so that k releases of √k times the multiplier fit as one does.
  one = dp.epsilon(1.0, ABSENT, steps=1)
  assert dp.rounds_within(one * (1 + 1e-9), 1e-5, noise=5.0) == 25
  assert dp.rounds_within(one * (1 - 1e-9), 1e-5, noise=5.0) == 24


def test_sampling_does_not_hide_which_contribution_it_is():
  with pytest.raises(errors.UsageError, match=r"sampling_rate is 0.5 in the relation 'replace one', expected 1"):
    dp.epsilon(1.0, 'replace one', steps=1, sampling_rate=0.5)
