"""What a defense is: its settings and traits, chains, a user's own, and where each stage acts."""

import copy
import dataclasses
import functools
import pickle
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradleak as gl
from gradleak import defenses, registry
from gradleak.adaptive import adaptive_attacks, likelihood
from gradleak.adaptive.base import Known
from gradleak.attacks.base import closed_form
from gradleak.audit.labelled import named_defenses
from gradleak.audit.result import facts
from gradleak.core import errors
from gradleak.core.settings import Count, Range
from gradleak.defenses.defense import remarks
from gradleak.federated import simulation

pytestmark = pytest.mark.usefixtures('fast_compilation')

KEY = jax.random.key(0)
UPDATES = {'w': jnp.asarray([3.0, -4.0, 0.5, 1.0])}


@pytest.fixture(scope='module')
def context(linear):
  return defenses.Context(linear.client, linear.variables, (8, 8, 1))


def apply(transformation, updates=UPDATES, key=KEY):
  transformation = optax.with_extra_args_support(transformation)
  return np.asarray(transformation.update(updates, transformation.init(updates), updates, key=key)[0]['w'])


def defended(defense, context, numbers=None):
  """Returns what the upload chain of a client under the defense makes of `UPDATES`."""
  bound = defenses.bind(defense, context)
  client = bound.client(context.client) if numbers is None else bound.build(numbers, context.client)
  assert client.step is context.client.step and client.transform is None
  return apply(client.upload)


# ---- settings


def test_defenses_with_equal_settings_are_equal():
  one, same = defenses.gaussian(stddev=1.0), defenses.gaussian(stddev=np.float32(1))
  assert one == same and hash(one) == hash(same) and (one != same) is False
  assert len({one, same, gl.parse('gaussian(stddev=1)'), defenses.chain(same)}) == 1
  assert defenses.outpost() == defenses.outpost(noise=0.8) and str(defenses.outpost()) == 'outpost'
  for other in (
    defenses.gaussian(stddev=2.0),
    defenses.laplace(scale=1.0),
    defenses.chain(one, one),
    optax.GradientTransformationExtraArgs(*one),
    None,
  ):
    assert one != other and (one == other) is False
  assert defenses.chain() == defenses.NO_DEFENSE and one != defenses.NO_DEFENSE and str(defenses.NO_DEFENSE) == 'none'


def test_what_a_defense_was_made_for_is_part_of_it(linear):
  client, other = linear.client, dataclasses.replace(linear.client, share='delta')
  public = linear.samples, linear.targets
  assert defenses.dpsgd(client, norm=1.0, noise=1.0) == defenses.dpsgd(client, norm=1.0, noise=1.0)
  assert defenses.dpsgd(client, norm=1.0, noise=1.0) != defenses.dpsgd(other, norm=1.0, noise=1.0)
  assert defenses.instahide(public) == defenses.instahide(public) != defenses.instahide((*public,)[::-1])


def test_numbers_are_open_and_structure_is_not(context):
  defense = defenses.chain(defenses.clip(norm=2), defenses.gaussian(stddev=0.1))
  assert str(defense) == 'clip(norm=2)+gaussian(stddev=0.1)' and defense.numbers == (2.0, 0.1)
  assert defense.structure == gl.parse('clip(norm=1) + gaussian(stddev=3)').structure
  assert defense.structure != gl.parse('gaussian(stddev=0.1)+clip(norm=2)').structure
  assert defenses.outpost().structure != defenses.outpost(variant='code').structure and hash(defense.structure)
  np.testing.assert_allclose(np.linalg.norm(defended(defense, context, (0.5, 0.0))), 0.5, rtol=1e-6)
  traced = jax.jit(lambda numbers: defenses.bind(defense, context).build(numbers, context.client).upload.init(UPDATES))
  assert jax.tree.leaves(traced((0.5, 0.0))) == []


@pytest.mark.parametrize(
  ('make', 'words'),
  [
    (lambda: defenses.gaussian(), ['gaussian needs the setting stddev by name']),
    (lambda: defenses.gaussian(sigma=1), ["'sigma'", 'stddev']),
    (lambda: defenses.gaussian(stddev='much'), ['gaussian(stddev)', "'much'"]),
    (lambda: defenses.null_gradient(norm=1), ["'norm'", 'it has none']),
    (lambda: gl.parse('clip(norm=1)+prune(rate=-1)'), ['prune(rate)', '-1']),
    (lambda: gl.parse('gaussian'), ['gaussian needs the setting stddev by name']),
    (lambda: gl.parse('prune(rate=0.5)+'), ["'prune(rate=0.5)+'", 'empty']),
    (lambda: registry.defense('gausian(stddev=1)'), ["unknown defense 'gausian'", "did you mean 'gaussian'", 'prune']),
  ],
)
def test_bad_settings_raise_before_anything_runs(make, words):
  with pytest.raises(errors.UsageError) as caught:
    make()
  assert all(word in str(caught.value) for word in words), str(caught.value)


# ---- chains


def test_none_is_the_identity(context):
  for none in (None, defenses.NO_DEFENSE, gl.parse('none')):
    bound = defenses.bind(none, context)
    assert bound.client(context.client) == context.client and bound.defense.numbers == ()


def test_each_member_acts_at_its_own_place(linear):
  public = linear.samples, linear.targets
  context = defenses.Context(linear.client, linear.variables, (8, 8, 1), public)
  data, step, upload = defenses.instahide(), defenses.outpost(), defenses.prune(rate=0.5)
  defense = defenses.chain(upload, data, step, defenses.clip(norm=1.0), defenses.compensation(stddev=0.1))
  assert [[str(stage) for stage in defense.at(place)] for place in ('data', 'step', 'upload', 'round')] == [
    ['instahide'], ['outpost'], ['prune(rate=0.5)', 'clip(norm=1.0)'], ['compensation(stddev=0.1)'],
  ]  # fmt: skip
  bound = defenses.bind(defense, context)
  assert bound.arguments == ((), (public,), (None,), (), (frozenset(),))
  client = bound.client(linear.client)
  assert client.transform is not None and client.undefended() == linear.client
  assert len(client.upload.init(linear.variables['params'])) == 2
  assert type(client.step.init(linear.variables['params'])).__name__ == 'OutpostState'
  np.testing.assert_allclose(apply(client.upload), [0.6, -0.8, 0, 0], rtol=1e-6)


def test_a_chain_with_an_optimizer_is_a_plain_transformation():
  chain = defenses.chain(defenses.clip(norm=1.0), optax.sgd(0.5))
  assert not isinstance(chain, defenses.Defense)
  np.testing.assert_allclose(np.linalg.norm(apply(chain)), 0.5, rtol=1e-6)


# ---- a user's own


def noisy(stddev, name='mine'):
  return defenses.base.stateless(
    name,
    lambda key, updates: jax.tree.map(lambda u: u + stddev * jax.random.normal(key, u.shape, u.dtype), updates),
    random=True,
  )


def test_a_users_own_transformation(context):
  double, triple = (defenses.wrap(optax.scale(factor), 'upload', label=f'{factor:g} times') for factor in (2.0, 3.0))
  assert str(double) == '2 times' and double.numbers == () and double != triple
  assert double.structure != triple.structure and defenses.wrap(double) is double
  assert defenses.wrap(double, 'upload') is double
  by_two, noise = optax.scale(2.0), defenses.Noise(lambda settings, context, count: 1.0)
  assert defenses.wrap(by_two, 'upload') == defenses.wrap(by_two, 'upload', label='other')
  assert len({defenses.wrap(by_two, place) for place in ('step', 'upload', 'round')}) == 3
  assert defenses.wrap(by_two, 'upload') != defenses.wrap(by_two, 'upload', noise=noise)
  np.testing.assert_allclose(defended(double, context), 2 * UPDATES['w'])
  np.testing.assert_allclose(defended(defenses.chain(double, triple), context), 6 * UPDATES['w'])
  assert str(defenses.chain(double, defenses.clip(norm=1))) == '2 times+clip(norm=1)'


def test_a_users_own_function_on_the_samples(context):
  dark = defenses.wrap(lambda key, images, labels: (0.5 * images, labels), 'data', label='dark')
  client = defenses.bind(dark, context).client(context.client)
  images, labels = jnp.ones((2, 8, 8, 1)), jnp.asarray([1, 2])
  found = jax.jit(client.local_update)(None, context.variables, images, labels).update
  expected = jax.jit(context.client.local_update)(None, context.variables, 0.5 * images, labels).update
  jax.tree.map(np.testing.assert_array_equal, found, expected)
  np.testing.assert_array_equal(dark(None, images, labels)[0], 0.5)
  with pytest.raises(errors.UsageError, match=r'dark acts on the samples: call it as a function'):
    apply(dark)
  with pytest.raises(errors.UsageError, match=r'prune\(rate=0.5\) acts on updates, not on samples'):
    defenses.prune(rate=0.5)(None, images, labels)


def test_a_users_own_factory_is_one_of_defenses(context):
  @defenses.defense(place='upload', citation='Mine. 2025.', idle=lambda settings: settings['factor'] == 1)
  def scaled(*, factor: float, twice: bool = False):
    """Scales the update."""
    return optax.scale(factor**2 if twice else factor)

  assert scaled.__doc__ == 'Scales the update.' and str(scaled(factor=2.0)) == 'scaled(factor=2.0)'
  assert scaled(factor=2.0) == scaled(factor=2, twice=False) != scaled(factor=3.0)
  assert scaled(factor=2.0).structure == scaled(factor=3.0).structure != scaled(factor=2.0, twice=True).structure
  assert scaled(factor=2.0).citations == defenses.chain(scaled(factor=2.0), scaled(factor=1.0)).citations
  np.testing.assert_allclose(defended(scaled(factor=2.0), context, (5.0,)), 5 * UPDATES['w'])
  with pytest.raises(errors.UsageError, match=r"unknown setting of the defense scaled: 'by'"):
    scaled(by=2.0)


@pytest.mark.parametrize(
  ('make', 'message'),
  [
    (lambda: defenses.wrap(optax.scale(2.0)), "give place='data', 'step', 'upload' or 'round'"),
    (lambda: defenses.wrap(optax.scale(2.0), 'uplod'), "unknown place 'uplod'; did you mean 'upload'"),
    (lambda: defenses.wrap(optax.scale(2.0), 'data'), r'expected a function \(key, samples, targets\)'),
    (lambda: defenses.wrap(lambda u: u, 'step'), 'expected an optax transformation'),
    (lambda: defenses.wrap(defenses.laplace(scale=1.0), 'step'), r"laplace\(scale=1.0\)' .* keeps its place 'upload'"),
    (lambda: defenses.wrap(defenses.laplace(scale=1.0), 'upload', label='mine'), 'keeps its label, version and traits'),
    (lambda: defenses.wrap(optax.scale(2.0), 'step', randm=True), "unknown trait .*'randm'; did you mean 'random'"),
    (
      lambda: defenses.wrap(optax.scale(2.0), 'step', sparsifies='zero'),
      "unknown sparsifies 'zero'; did you mean 'zeros'",
    ),
    (lambda: defenses.defense(place='step', noice=None), "unknown trait of a defense: 'noice'; did you mean 'noise'"),
  ],
)
def test_what_is_no_defense_is_named(make, message):
  with pytest.raises(errors.UsageError, match=message):
    make()


def test_what_is_known_of_a_defense_follows_the_object_and_not_its_label():
  prune, private = defenses.prune(rate=0.5), defenses.client_dp(norm=1.0, noise=5.0)
  (a, b) = named_defenses({'client_dp(norm=1,noise=5)': prune, 'prune(rate=0.5)': private})
  assert facts(a.method, 1)['mechanisms'] == [] and facts(a.method, 1)['text'] == 'prune(rate=0.5)'
  assert facts(b.method, 1)['mechanisms'] == [{'noise': 5.0, 'unit': 'client', 'releases': 1}]
  assert 'Deep Leakage' in facts(a.method, 1)['citations'][0] and 'Client Level' in facts(b.method, 1)['citations'][0]


def names(defense, context, rounds=4):
  found = adaptive_attacks(defenses.bind(defense, context), context, 1, gl.attacks.csdlg(), rounds)
  return [adaptive.name for adaptive in found]


@pytest.mark.parametrize('variance', [np.float32(0.01), np.asarray(0.01), jnp.square(0.1)], ids=['NumPy', '0-d', 'JAX'])
def test_a_variance_may_be_a_scalar_of_any_kind(variance, context):
  noise = defenses.Noise(lambda settings, context, count: variance)
  made = defenses.bind(defenses.wrap(noisy(0.1), 'upload', random=True, noise=noise), context)
  known = Known(made, context, 1, 4, frozenset({'noise'}))
  assert type(known.variance) is float and known.variance == pytest.approx(0.0025)
  assert known.energy > 0 and likelihood.expected(made, context, 1).model == 'noise'


def test_what_is_simulated_is_a_defense(context):
  mine = defenses.wrap(noisy(0.1), 'upload', random=True, simulated=lambda settings: optax.scale(0.5))
  with pytest.raises(errors.UsageError, match=r'what the trait simulated of own returns is .*expected a Defense'):
    names(mine, context)


def test_a_source_may_have_a_name_of_its_own_for_a_defense():
  assert defenses.concealment().published == 'DCS²' and defenses.clip(norm=1).published == ''
  both = defenses.chain(defenses.prune(rate=0.5), defenses.fragmentation(ratio=0.5))
  assert both.published == 'prune+FFL' and facts(both, 1)['published'] == 'prune+FFL'
  assert defenses.wrap(optax.identity(), 'upload', published='HIDE').published == 'HIDE'


def test_a_users_own_noise_is_met_by_its_traits_alone(context):
  noise = defenses.Noise(lambda settings, context, count: 0.01)
  ours = names(defenses.gaussian(stddev=0.1), context)
  assert ours == ['averaged', 'averaged+prior']
  assert names(defenses.wrap(noisy(0.1), 'upload', random=True, noise=noise), context) == ours
  assert names(defenses.wrap(noisy(0.1), 'step', random=True), context) == ['averaged', 'averaged+shown']
  assert names(defenses.wrap(noisy(0.1), 'upload', noise=noise), context) == ['prior']
  assert names(defenses.wrap(noisy(0.1), 'upload'), context) == ['simulated', 'straight-through', 'shown']
  assert names(defenses.wrap(lambda key, images, labels: (images, labels), 'data'), context) == []


# ---- what no transformation of a user's own may do


def stateless(function):
  return optax.stateless(lambda updates, params: jax.tree.map(function, updates))


def with_key(function):
  return optax.GradientTransformationExtraArgs(optax.init_empty_state, function)


@pytest.mark.parametrize(
  ('transformation', 'message'),
  [
    (stateless(jnp.sum), r'the defense bad returns shape \(\) for .*, expected \('),
    (stateless(jnp.ravel), 'the defense bad returns shape'),
    (stateless(lambda x: x.astype(jnp.bfloat16)), 'returns bfloat16 for .*, expected float32: cast it back'),
    (optax.stateless(lambda updates, params: jax.tree.leaves(updates)), 'a tree of another structure'),
    (stateless(np.sign), 'hands traced arrays to NumPy; use jax.numpy'),
    (with_key(lambda updates, state, params=None, **extra: updates), r'expected \(updates, state\)'),
    (
      with_key(lambda updates, state, params=None: (updates, state)),
      r'does not take all .*: end the parameters .* with \*\*extra',
    ),
    (noisy(0.1), 'draws from its key and is not declared random: give random=True'),
  ],
)
def test_what_it_returns_is_checked_under_its_name(context, small_images, transformation, message):
  bound = defenses.bind(defenses.wrap(transformation, 'upload', label='bad'), context)
  images, labels = (x[:1] for x in small_images)
  with pytest.raises(errors.UsageError, match=message):
    jax.eval_shape(bound.client(context.client).local_update, KEY, context.variables, images, labels)


@pytest.mark.parametrize(
  ('function', 'message'),
  [
    (lambda key, samples, targets: samples, 'the defense bad returns .*, expected '),
    (lambda key, samples, targets: ({'one': samples}, targets), 'the defense bad returns .*, expected '),
    (lambda key, samples, targets: (samples[:1], targets), r'float32 of shape \(1, 8, 8, 1\) and float32 of shape'),
    (
      lambda key, samples, targets: (samples[:, ::2], targets),
      r'shape \(2, 4, 8, 1\) and .* of shape \(2, 8, 8, 1\) and',
    ),
    (lambda key, samples, targets: (samples, jnp.argmax(targets, axis=-1)), r'int32 of shape \(2,\), expected'),
    (lambda key, samples, targets: (np.sign(samples), targets), 'hands traced arrays to NumPy; use jax.numpy'),
    (
      lambda key, samples, targets: (samples + jax.random.normal(key, samples.shape), targets),
      'draws from its key and is not declared random: give random=True',
    ),
  ],
)
def test_what_a_function_on_the_samples_returns_is_checked_under_its_name(context, small_images, function, message):
  client = defenses.bind(defenses.wrap(function, 'data', label='bad'), context).client(context.client)
  images, labels = (x[:2] for x in small_images)
  with pytest.raises(errors.UsageError, match=message):
    jax.eval_shape(client.local_update, KEY, context.variables, images, labels)


def test_a_function_on_the_samples_may_return_others_of_them_but_of_padding(context, small_images):
  def mirrored(key, samples, targets):
    return tuple(jnp.concatenate(pair) for pair in ((samples, samples[:, :, ::-1]), (targets, targets)))

  client = defenses.bind(defenses.wrap(mirrored, 'data', label='mirrored'), context).client(context.client)
  images, labels = (x[:2] for x in small_images)
  sent = client.local_update(None, context.variables, images, labels).update
  both = np.concatenate([images, images[:, :, ::-1]]), np.tile(labels, 2)
  expected = context.client.local_update(None, context.variables, *both).update
  jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6), sent, expected)
  with pytest.raises(errors.UsageError, match='makes 4 of 2, of which some are padding'):
    client.transformed(None, images, labels, jnp.asarray([1.0, 0.0]))


def test_a_function_on_the_samples_that_is_declared_random_gets_a_key_and_weights(context, small_images):
  def noisy_where(key, samples, targets, weights=None):
    return samples + weights.reshape(-1, 1, 1, 1) * jax.random.normal(key, samples.shape), targets

  client = defenses.bind(defenses.wrap(noisy_where, 'data', label='mine', random=True), context).client(context.client)
  images, labels = (x[:2] for x in small_images)
  found = client.transformed(KEY, images, labels, jnp.asarray([1.0, 0.0]))[0]
  assert not np.array_equal(found[0], images[0]) and np.array_equal(found[1], images[1])
  with pytest.raises(errors.UsageError, match='the defense mine draws noise and needs a key'):
    client.transformed(None, images, labels, jnp.ones(2))


def counted():
  """Halves the update as often as it was called."""

  def update(updates, count, params=None):
    return jax.tree.map(lambda x: x * jnp.exp2(-count.astype(x.dtype)), updates), count + 1

  return optax.GradientTransformation(lambda params: jnp.zeros((), jnp.int32), update)


@pytest.mark.parametrize(
  ('transformation', 'keeps', 'holds'),
  [
    (optax.scale(0.5), False, False),
    (counted(), True, False),
    (optax.trace(0.9), True, True),
    (optax.chain(counted(), optax.trace(0.9)), True, True),
  ],
)
def test_a_state_holds_updates_or_only_counts_them(context, transformation, keeps, holds):
  bound = defenses.bind(defenses.wrap(transformation, 'upload'), context)
  assert (bound.keeps, bound.holds, bound.held) == (keeps, holds, holds)


def _added(size):
  """Returns a transformation that adds noise of a size that depends on how often it was called."""

  def update(updates, count, params=None, *, key, **extra):
    noise = optax.tree.random_like(key, updates)
    return jax.tree.map(lambda u, n: u + size(count) * n, updates, noise), count + 1

  return optax.GradientTransformationExtraArgs(lambda params: jnp.zeros((), jnp.float32), update)


def test_a_noise_that_is_stated_is_that_of_every_upload(context):
  """One that grew by its count had the ε and the likelihood of the first upload in all rounds."""
  fading, steady = _added(lambda count: 0.9**count), _added(lambda count: 1.0)
  traits = {'random': True, 'noise': defenses.Noise(lambda *_: 1.0)}
  several = dataclasses.replace(context, client=dataclasses.replace(context.client, share='delta', epochs=2))
  for made, where, given in ((fading, 'upload', context), (fading, 'step', several)):
    with pytest.raises(errors.UsageError, match=r'states a noise, .* depends on its state'):
      defenses.bind(defenses.wrap(made, where, **traits), given)
  for made, where, given in (
    (steady, 'upload', context),
    (steady, 'step', several),
    (fading, 'step', context),  # of one step
  ):
    defenses.bind(defenses.wrap(made, where, **traits), given)
  assert defenses.bind(defenses.wrap(fading, 'upload', random=True), context).keeps
  mechanism = {'random': True, 'mechanism': lambda *_: defenses.Mechanism(1.0, 'client')}
  defenses.bind(defenses.wrap(fading, 'upload', **mechanism), context)  # a claim that `gl.audit_epsilon` measures


def test_traits_of_updates_are_none_of_samples_and_a_distribution_is_a_known_one():
  with pytest.raises(errors.UsageError, match="the trait noise is of updates, and place='data' acts on samples"):
    defenses.wrap(lambda key, samples, targets: (samples, targets), 'data', noise=defenses.Noise(lambda *_: 1.0))
  with pytest.raises(errors.UsageError, match="unknown distribution 'uniform'"):
    defenses.Noise(lambda *_: 1.0, distribution='uniform')


def test_a_key_that_members_ignore_is_no_randomness(context, small_images):
  """A chain splits the key for each stage, whether it draws or not; so may a function that is compiled by itself."""
  images, labels = (x[:1] for x in small_images)
  chained = defenses.chain(defenses.prune(rate=0.5), optax.scale(jnp.float32(2)))

  def compiled(updates, state, params=None, *, key, **extra):
    return jax.jit(lambda updates, key: jax.tree.map(jnp.sign, updates))(updates, key), state

  for given in (chained, with_key(compiled)):
    bound = defenses.bind(defenses.wrap(given, 'upload'), context)
    jax.eval_shape(bound.client(context.client).local_update, KEY, context.variables, images, labels)


def test_a_key_that_is_missing_is_named(context):
  update = defenses.wrap(noisy(0.1), 'upload', random=True, label='mine').update
  with pytest.raises(errors.UsageError, match='the defense mine draws noise and needs a key'):
    update(context.variables['params'], optax.EmptyState())


@pytest.mark.long
def test_stored_results_are_of_one_version(small_images, tmp_path):
  scenario = gl.scenario(gl.models.mlp(10, widths=4), *small_images, key=KEY)

  def audited(*versions):
    mine = defenses.wrap(stateless(jnp.sign), 'upload', label='mine', version=versions[0])
    nothing = gl.attacks.wrap(
      lambda client: closed_form(lambda seen: (jnp.zeros(seen.batch_shape), None)), 'nothing', version=versions[1]
    )
    return gl.audit(KEY, scenario, [mine], [nothing], 1, controls=1, progress='none', workdir=tmp_path / 'run')

  assert not audited('2', '').resumed and audited('2', '').resumed
  assert audited('2', '').config['defense_texts'] == {'mine': 'mine, version 2'}
  for versions, what in ((('', ''), 'defense_texts'), (('3', ''), 'defense_texts'), (('2', '1'), 'attack_texts')):
    with pytest.raises(errors.UsageError, match=f'{what} was'):
      audited(*versions)


def test_factories_of_ones_own_have_versions_and_ranges():
  @defenses.defense(place='upload', version='2')
  def scaled(*, by: Annotated[float, Range(0, 1)] = 0.5, times: Count = 1):
    return optax.scale(by**times)

  assert scaled().version == defenses.chain(scaled(), defenses.clip(norm=1)).version == '2'
  assert defenses.clip(norm=1).version == '' and scaled(times=np.int64(3)).stages[0].given == {'times': 3}
  assert scaled(by=0.1).structure == scaled(by=0.2).structure and scaled(by=0.1).numbers == (0.1,)
  for settings, message in (({'by': 1.1}, r'scaled\(by\) is 1.1'), ({'times': 0}, r'scaled\(times\) is 0')):
    with pytest.raises(errors.UsageError, match=message):
      scaled(**settings)
  with pytest.raises(errors.UsageError, match=r'scaled\(by\) is 2'):
    scaled().stages[0].build((2.0,))
  with pytest.raises(errors.UsageError, match='version is 2, expected a text'):
    defenses.wrap(optax.identity(), 'upload', version=2)


# ---- placement


def test_a_context_that_lacks_what_a_defense_needs_is_named_when_it_is_placed(context):
  for defense, message in (
    (defenses.soteria(rate=0.5), "the model 'linear' does not offer 'features'"),
    (defenses.chain(defenses.clip(norm=1), defenses.soteria(rate=0.5)), 'features'),
    (defenses.graddefense(stddev=0.1), r'public=\(samples, targets\)'),
    (defenses.instahide(), r'public=\(samples, targets\)'),
    (defenses.concealment(start='proxy'), 'none are given'),
    (defenses.chain(defenses.ats(), defenses.ats()), 'transforms the samples twice'),
    ('prune(rate=0.5)', r"gradleak.parse\('prune\(rate=0.5\)'\) makes it"),
  ):
    with pytest.raises(errors.UsageError, match=message):
      defenses.bind(defense, context)


@pytest.mark.parametrize(
  ('make', 'given'),
  [
    (lambda: defenses.dpsgd(norm=1.0, noise=1.0), 'client'),
    (lambda: defenses.clip_samples(norm=1.0), 'client'),
    (lambda: defenses.graddefense_step(stddev=0.1), 'client'),
    (lambda: defenses.concealment(steps=1), 'client'),
    (lambda: defenses.soteria(rate=0.5), 'model'),
    (lambda: defenses.graddefense(stddev=0.1), 'slicing'),
  ],
)
def test_outside_of_an_audit_what_it_is_made_for_is_asked_for(make, given):
  defense = make()
  batch = jnp.ones((1, 8, 8, 1)), jnp.ones((1, 10))
  with pytest.raises(errors.UsageError, match=rf'{defense.stages[0].name}\({given}, …\)'):
    defense.update(UPDATES, defense.init(UPDATES), UPDATES, key=KEY, batch=batch)


@pytest.mark.parametrize(
  ('first', 'last'),
  [
    ('outpost', 'clip_samples(norm=1)'),
    ('soteria(rate=0.5)', 'dpsgd(norm=1,noise=1)'),
    ('graddefense_step(stddev=1)', 'concealment(steps=1)'),
  ],
)
def test_a_stage_that_another_one_undoes_is_refused(first, last, context):
  with pytest.raises(errors.UsageError, match=r'computes anew what .* has changed, which has no effect: put .* first'):
    defenses.bind(gl.parse(f'{first}+{last}'), context)


def test_a_stage_that_replaces_its_input_follows_those_of_other_places_and_idle_ones(context):
  for text in (
    'clip(norm=1)+clip_samples(norm=1)', 'graddefense_step(stddev=0)+dpsgd(norm=1,noise=1)',
    'clip(norm=1)+null_gradient',  # has the norms of what it is given
  ):  # fmt: skip
    defenses.bind(gl.parse(text), context)
  defenses.bind(gl.parse('gaussian(stddev=1)+clip(norm=1)'), context)


def test_at_the_server_a_stage_that_another_one_undoes_is_refused(linear, small_images):
  images, labels = small_images
  chain = defenses.chain(defenses.compensation(stddev=0.1), defenses.server_dp(noise=0.0, clients=1))
  with pytest.raises(errors.UsageError, match='server_dp computes anew what compensation has changed'):
    simulation.Federation(linear.client, images, labels, [np.arange(len(labels))], 1, chain=chain)


def test_at_the_server_a_factory_has_its_arguments(context):
  @defenses.defense(place='round', arguments=lambda context, settings: (context.client.num_classes,))
  def times_classes(classes=1, *, by: Annotated[float, Range(0, 10)] = 1.0):
    return optax.scale(by * classes)

  bound = defenses.bind(defenses.chain(defenses.gaussian(stddev=0.5), times_classes(by=2.0)), context)
  times = 2 * context.client.num_classes
  np.testing.assert_allclose(apply(bound.server()), times * np.asarray(UPDATES['w']), rtol=1e-6)
  np.testing.assert_array_equal(apply(defenses.bind(defenses.gaussian(stddev=0.5), context).server()), UPDATES['w'])


@pytest.mark.parametrize('place', ['upload', 'step'])
def test_what_a_factory_is_made_for_needs_no_default(place, context):
  def scaled(layers, *, by: float = 1.0):
    return optax.scale(by * len(layers))

  given = {'place': place, 'arguments': lambda context, settings: (['one', 'two'],)}
  mine = defenses.defense(**given)(scaled)(by=3.0)
  assert str(mine) == 'scaled(by=3.0)' and mine == copy.copy(mine)
  found = getattr(defenses.bind(mine, context).client(context.client), place).update(UPDATES, optax.EmptyState())[0]
  np.testing.assert_allclose(found['w'], 6 * UPDATES['w'])
  with pytest.raises(errors.UsageError, match=r'is made for layers and has none: make it by scaled\(layers, …\)$'):
    mine.init(UPDATES)
  with pytest.raises(errors.UsageError, match=r'is made for layers and has none: .*or give the trait arguments'):
    defenses.defense(place=place)(scaled)()


def test_results_say_that_an_epsilon_is_of_real_numbers(context):
  half = dataclasses.replace(context, variables=jax.tree.map(lambda x: x.astype(jnp.bfloat16), context.variables))
  dp = defenses.client_dp(norm=1.0, noise=1.0)
  assert 'half precision' in remarks(dp, half) and not remarks(dp, context)
  assert not remarks(defenses.prune(rate=0.5), half)


def test_positional_parameters_can_be_named(linear):
  made = defenses.clip_samples(client=linear.client, norm=1.0)
  assert made == defenses.clip_samples(linear.client, norm=1.0)
  assert defenses.outpost(layers=None, noise=0.5) == defenses.outpost(noise=0.5)
  with pytest.raises(errors.UsageError, match='multiple values'):
    defenses.clip_samples(linear.client, client=linear.client, norm=1.0)
  with pytest.raises(errors.UsageError, match='unknown setting of the defense clip_samples'):
    defenses.clip_samples(clientt=linear.client, norm=1.0)


def test_optax_injects_the_settings_of_a_defense():
  made = optax.inject_hyperparams(defenses.outpost)(noise=0.5)
  state = made.init(UPDATES)
  assert set(state.hyperparams) == {'decay', 'fisher', 'noise', 'prune'}
  jax.jit(lambda u, s: made.update(u, s, u, key=KEY))(UPDATES, state)


COPIES = {
  'copy': copy.copy, 'deepcopy': copy.deepcopy, 'pickle': lambda defense: pickle.loads(pickle.dumps(defense)),
}  # fmt: skip


@pytest.mark.parametrize('way', COPIES)
def test_a_copy_of_a_defense_is_equal(way):
  chain = defenses.chain(defenses.clip(norm=1.0), defenses.gaussian(stddev=0.5))
  copied = COPIES[way](chain)
  assert copied == chain and str(copied) == str(chain)
  np.testing.assert_array_equal(apply(copied), apply(chain))


def test_what_makes_named_tuples_anew_gets_a_plain_transformation(linear):
  noise = defenses.gaussian(stddev=0.5)
  mapped = jax.tree.map(lambda x: x, noise)
  fields = dataclasses.asdict(dataclasses.replace(linear.client, step=noise))['step']
  for plain in (mapped, fields, noise._replace(init=noise.init)):
    assert isinstance(plain, optax.GradientTransformation) and not isinstance(plain, defenses.Defense)
    np.testing.assert_array_equal(apply(plain), apply(noise))


@pytest.mark.parametrize('text', ['clip(norm=1)', 'gaussian(stddev=1)', 'topk(ratio=0.5)', 'client_dp(norm=1,noise=1)'])
def test_updates_that_are_no_floats_are_refused(text):
  with pytest.raises(errors.UsageError, match='acts on floats, and count of the update is int32'):
    made = gl.parse(text)
    made.update({'count': jnp.arange(3)}, made.init(UPDATES), key=KEY)


@pytest.mark.parametrize(
  'text',
  [
    'clip(norm=1)', 'client_dp(norm=1,noise=1)', 'dgc(ratio=0.5,clip=1)', 'null_gradient', 'percentile_privacy',
    'svt_privacy', 'gaussian(stddev=1)', 'topk(ratio=0.5)',
  ],
)  # fmt: skip
def test_an_update_without_leaves_stays_empty(text):
  made = gl.parse(text)
  assert made.update({}, made.init({}), {}, key=KEY)[0] == {}
