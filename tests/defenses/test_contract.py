"""What every defense keeps to, and its traits against its behaviour.

A new defense needs an entry in `CASES` (on updates), or in `OTHERS`; the first test fails without it.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.stats
from flax import linen as nn

from gradleak import Client, defenses, models, registry
from gradleak.core import errors, trees
from gradleak.defenses.defense import norm_bound
from gradleak.defenses.graddefense import slice_gradients

pytestmark = pytest.mark.usefixtures('no_key_is_used_twice')


class Sample(NamedTuple):
  """An update with all that a defense may be handed beside it, at its making (`client`) or at each update."""

  updates: dict
  params: dict
  batch: tuple
  client: Client | None = None
  variables: dict | None = None


class Case(NamedTuple):
  """How to test a defense.

  Attributes:
    identity: the settings of strength zero, or None where there is no such strength.
    strong: settings that change a gradient visibly.
    needs: the arguments of `update` that it cannot do without: 'key' (it is random), 'batch', 'params'.
    arguments: sample -> positional arguments of its factory, for one that is made for a model or a client.
    maskable: whether it makes sense on some of the tensors alone, by `optax.masked`.
    quiet: the settings that switch its noise off; empty for one without noise.
    coarse: settings in place of the strong ones where these change a gradient by less than a hundredth.
  """

  identity: dict | None
  strong: dict
  needs: tuple[str, ...] = ()
  arguments: Callable = lambda sample: ()
  maskable: bool = True
  quiet: dict = {}  # noqa: RUF012
  coarse: dict = {}  # noqa: RUF012


def single_tensors(sample):
  """Returns a layer for each tensor."""
  paths = jax.tree_util.tree_flatten_with_path(sample.params)[0]
  paths = [tuple(key.key for key in path) for path, _ in paths]
  return [trees.Layer('/'.join(path), (path,)) for path in paths]


def sliced(params):
  """Returns a slicing of GradDefense, every layer at the same risk."""
  return slice_gradients(params, np.ones(trees.layer_numbers(params)[1]), 10)


def with_fixed_statistics(sample):
  """Returns the sample's client with BatchNorm in eval mode, where every sample has a gradient of its own."""
  return (dataclasses.replace(sample.client, batch_norm='eval'),)


CASES = {
  'gaussian': Case({'stddev': 0.0}, {'stddev': 0.1}, ('key',), quiet={'stddev': 0.0}),
  'laplace': Case({'scale': 0.0}, {'scale': 0.1}, ('key',), quiet={'scale': 0.0}),
  'prune': Case({'rate': 0.0}, {'rate': 0.7}),
  'topk': Case({'ratio': 1.0}, {'ratio': 0.3}),
  'dgc': Case({'ratio': 1.0}, {'ratio': 0.3, 'momentum': 0.9, 'clip': math.inf}),
  'fragmentation': Case(
    {'ratio': 1.0},
    {'ratio': 0.5, 'unit': 'tensor'},
    ('params',),
    lambda sample: (None, 'gradient', jax.tree.map(lambda p: p + jnp.cos(p), sample.params)),
  ),
  'fragmentation_random': Case({'ratio': 1.0}, {'ratio': 0.5}, ('key',), lambda sample: (single_tensors(sample),)),
  'clip': Case({'norm': math.inf}, {'norm': 0.1}),
  'clamp': Case({'limit': math.inf}, {'limit': 0.01}),
  'percentile_privacy': Case(None, {'percentile': 30.0, 'gamma': 0.05}),
  'svt_privacy': Case(
    None,
    {'fraction': 0.3, 'epsilon': 50.0, 'noise_var': 20.0, 'gamma': 1.0, 'replace': False},
    ('key',),
    quiet={'noise_var': math.inf},
  ),
  'local_dp': Case(
    {'norm': math.inf, 'sensitivity': 0.0},
    {'norm': 0.1, 'sensitivity': 0.2, 'epsilon': 1.0, 'delta': 1e-5},
    ('key',),
    quiet={'sensitivity': 0.0},
  ),
  'quantize': Case(None, {'code': 'blockwise8'}, coarse={'code': 'float4'}),
  'adaquant': Case(None, {'weight': 10.0}),
  'secagg_rounding': Case(None, {'limit': 1e4, 'levels': 1e5}, ('key', 'params'), quiet={'levels': 2e9}),
  'null_gradient': Case(None, {}, ('key',)),
  'graddefense': Case(
    {'stddev': 0.0},
    {'stddev': 0.1, 'ratio': 0.3},
    ('key',),
    lambda sample: (sliced(sample.params),),
    maskable=False,
    quiet={'stddev': 0.0},
  ),
  'graddefense_step': Case(
    {'stddev': 0.0, 'clip': math.inf},
    {'stddev': 0.1, 'ratio': 0.5, 'clip': 1.0},
    ('key', 'batch', 'params'),
    lambda sample: (sample.client,),
    maskable=False,
    quiet={'stddev': 0.0},
  ),
  'client_dp': Case({'norm': math.inf, 'noise': 0.0}, {'norm': 0.1, 'noise': 1.0}, ('key',), quiet={'noise': 0.0}),
  'clip_samples': Case({'norm': math.inf}, {'norm': 0.1}, ('batch', 'params'), with_fixed_statistics, maskable=False),
  'dpsgd': Case(
    {'norm': math.inf, 'noise': 0.0},
    {'norm': 0.1, 'noise': 1.0},
    ('key', 'batch', 'params'),
    with_fixed_statistics,
    maskable=False,
    quiet={'noise': 0.0},
  ),
  'concealment': Case(None, {'steps': 3}, ('key', 'batch', 'params'), lambda sample: (sample.client,), maskable=False),
  'outpost': Case(
    {'noise': 0.0, 'prune': 0.0},
    {'noise': 0.8, 'fisher': 0.4, 'decay': 0.1, 'prune': 0.8},
    ('key', 'params'),
    quiet={'noise': 0.0},
  ),
  'soteria': Case({'rate': 0.0}, {'rate': 0.8}, ('batch', 'params'), lambda sample: (sample.client.model,)),
}
# As published: on the gradient of each local step; the other cases on what is sent.
PER_STEP = {'outpost', 'soteria', 'concealment', 'dpsgd', 'clip_samples', 'graddefense_step'}
# On the samples, and at the server: tests of their own say what they do.
OTHERS = {'ats': 'data', 'instahide': 'data', 'compensation': 'round', 'server_dp': 'round'}
WITH_IDENTITY = [name for name, case in CASES.items() if case.identity is not None]
KEY = jax.random.key(11)

# Those that optimise or differentiate samples compile for long.
HEAVY = ('concealment', 'graddefense_step', 'graddefense', 'clip_samples', 'dpsgd')
ADDED = ('gaussian', 'laplace', 'client_dp', 'null_gradient')  # noise, which has no derivative, beside `clip`


def each_of(names, heavy=pytest.mark.long):
  """Returns the decorator of a test that runs for each of these defenses, with a mark where that takes long."""
  return pytest.mark.parametrize('name', [pytest.param(name, marks=heavy) if name in HEAVY else name for name in names])


every_defense, every_defense_but_heavy = each_of(CASES), each_of(CASES, pytest.mark.slow)
# One for each argument that is handed on: a key, parameters, a batch.
KINDS = ('gaussian', 'outpost', 'soteria')
every_kind = pytest.mark.parametrize(
  'name', [name if name in KINDS else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
every_sample = pytest.mark.parametrize('network', [pytest.param('lenet', marks=pytest.mark.slow), 'normed'])


class Normed(nn.Module):
  """A convolution, BatchNorm, a dense layer and a scalar: tensors of every rank that networks have."""

  @nn.compact
  def __call__(self, images, train=False):
    x = nn.Conv(3, (3, 3), strides=2, use_bias=False)(images)
    x = nn.relu(nn.BatchNorm(use_running_average=not train, use_bias=False)(x))
    return nn.Dense(10)(x.reshape(x.shape[0], -1)) * self.param('temperature', nn.initializers.ones, ())


@pytest.fixture(scope='module')
def samples(small_images):
  """Returns name -> gradients of two digits: of a LeNet, or of a small network with BatchNorm and a scalar."""
  images, labels = jnp.asarray(small_images[0][:2]), jnp.asarray(small_images[1][:2])

  @functools.cache
  def sample(name):
    model = models.from_flax(Normed()) if name == 'normed' else models.create(name, 10)
    client = Client(model, 10)
    variables = jax.jit(model.init, static_argnums=1)(jax.random.key(0), (8, 8, 1))
    upload = jax.jit(client.local_update)(None, variables, images, labels)
    return Sample(upload.update, variables['params'], (images, jax.nn.one_hot(labels, 10)), client, variables)

  return sample


def stage(name, settings):
  return defenses.REGISTRY[name](**settings).stages[0]


def make(name, sample, settings=None):
  """Returns the defense of a sample's client, at its strong setting by default."""
  case = CASES[name]
  return defenses.REGISTRY[name](*case.arguments(sample), **(case.strong if settings is None else settings))


def apply(transformation, sample, key=KEY, updates=None, **changed):
  """Returns the defended updates; the key is cloned, so that a test may use it again."""
  key = key if key is None else jax.random.clone(key)
  given = {'params': sample.params, 'key': key, 'batch': sample.batch, 'variables': sample.variables, **changed}
  updates = sample.updates if updates is None else updates
  return transformation.update(updates, transformation.init(sample.params), **given)[0]


class Compiled:
  """A defense compiled for two lanes, with its numbers traced; `traces` counts its tracings."""

  def __init__(self, name):
    method = stage(name, CASES[name].strong)
    self.numbers = method.numbers
    self.traces = 0

    def run(numbers, key, sample, updates):
      return apply(method.build(numbers, *CASES[name].arguments(sample)), sample, key, updates)

    self.run = run
    self.jitted = {}

  def lanes(self, sample, numbers, keys, updates):
    """Returns the defended updates of two lanes, of which everything is given twice."""

    def counted(numbers, key, updates):
      self.traces += 1
      return self.run(numbers, key, sample, updates)

    if sample.client not in self.jitted:  # what is static of a sample
      self.jitted[sample.client] = jax.jit(jax.vmap(counted))
    return self.jitted[sample.client](numbers, keys, updates)

  def __call__(self, sample, numbers=None, key=KEY, updates=None):
    given = (self.numbers if numbers is None else numbers, sample.updates if updates is None else updates)
    numbers, updates = jax.tree.map(lambda x: np.stack([np.float32(x)] * 2), given)
    keys = jnp.broadcast_to(jax.random.clone(key), (2,))
    return trees.take(jax.device_get(self.lanes(sample, numbers, keys, updates)), 0)


@pytest.fixture(scope='module')
def compiled():
  return functools.cache(Compiled)


def difference(a, b):
  """Returns ‖a − b‖ / ‖b‖."""
  return float(trees.norm(trees.subtract(a, b)) / trees.norm(b))


def assert_equal(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


def assert_close(a, b):
  def close(x, y):
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6 * max(1.0, float(np.abs(y).max())))

  jax.tree.map(close, a, b)


def assert_finite(tree):
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(tree))


def test_the_tables_cover_the_registry():
  places = OTHERS | {name: 'step' if name in PER_STEP else 'upload' for name in CASES}
  assert set(places) == set(defenses.REGISTRY), 'every defense needs an entry in a table here'
  assert places == {name: maker.traits.place for name, maker in defenses.REGISTRY.items()}


def test_every_defense_is_exported_by_its_name():
  for name, maker in defenses.REGISTRY.items():
    assert maker.__name__ == name and getattr(defenses, name) is maker and name in defenses.__all__


@pytest.mark.slow  # operation by operation, some compile for a minute; other tests here run defenses eagerly, too
@every_defense
def test_compiled_equals_eager(name, samples, compiled):
  sample = samples('normed')
  assert_close(compiled(name)(sample), apply(make(name, sample), sample))


@every_sample
@every_defense
def test_a_strong_setting_really_changes_the_update(name, network, samples, compiled):
  sample, coarse = samples(network), CASES[name].coarse
  found = apply(make(name, sample, coarse), sample) if coarse else compiled(name)(sample)
  assert difference(found, sample.updates) > 0.01


@every_sample
@each_of(WITH_IDENTITY)
def test_strength_zero_is_the_identity_exactly(name, network, samples, compiled):
  sample = samples(network)
  identity = {**CASES[name].strong, **CASES[name].identity}
  assert_equal(compiled(name)(sample, stage(name, identity).numbers), sample.updates)


@pytest.mark.slow  # operation by operation; where it needs a batch, a client's gradient takes minutes
@pytest.mark.parametrize('name', [name for name in WITH_IDENTITY if 'batch' not in CASES[name].needs])
def test_strength_zero_is_the_identity_exactly_where_nothing_is_compiled(name, samples):
  sample = samples('normed')
  assert_equal(apply(make(name, sample, {**CASES[name].strong, **CASES[name].identity}), sample), sample.updates)


@every_defense_but_heavy
def test_all_strengths_share_one_trace_per_shape(name, samples, compiled):
  defended, sample = compiled(name), samples('normed')
  defended(sample)
  before = defended.traces
  outputs = [defended(sample, tuple(number * factor / 10 for number in defended.numbers)) for factor in range(1, 11)]
  assert defended.traces == before
  if defended.numbers:
    assert difference(outputs[0], outputs[-1]) > 1e-3


@every_defense_but_heavy
def test_lanes_of_their_own_strength_and_key_equal_a_loop(name, samples, compiled):
  sample, defended = samples('normed'), compiled(name)
  lanes = (
    tuple(np.float32([number, 0.5 * number]) for number in defended.numbers),
    jax.random.split(jax.random.clone(KEY)),
    jax.tree.map(lambda u: np.stack([u, -3 * u]), sample.updates),
  )
  together = defended.lanes(sample, *lanes)
  for i in range(2):
    assert_close(trees.take(together, i), defended(sample, *trees.take(lanes, i)))


@every_defense
def test_keys(name, samples, compiled):
  outputs = [compiled(name)(samples('normed'), key=jax.random.key(seed)) for seed in (1, 1, 2)]
  assert_equal(outputs[0], outputs[1])
  if 'key' in CASES[name].needs:
    assert difference(outputs[0], outputs[2]) > 0.01
  else:
    assert_equal(outputs[0], outputs[2])


@every_sample
@every_defense
def test_finite_stays_finite_where_gradients_vanish(name, network, samples, compiled):
  sample = samples(network)
  zero = trees.zeros_like(sample.updates)
  assert_finite(compiled(name)(sample, updates=zero))
  leaves, treedef = jax.tree.flatten(sample.updates)
  for i in range(len(leaves)):
    dead = [jnp.zeros_like(leaf) if j == i else leaf for j, leaf in enumerate(leaves)]
    assert_finite(compiled(name)(sample, updates=treedef.unflatten(dead)))
  for scale in (1e-12, 1e12):
    assert_finite(compiled(name)(sample, updates=jax.tree.map(lambda u, s=scale: u * s, sample.updates)))


@every_defense
def test_missing_extra_arguments_are_named(name, samples):
  sample = samples('normed')
  defense, needs = make(name, sample), CASES[name].needs
  for missing in needs:
    with pytest.raises(errors.UsageError) as caught:
      jax.eval_shape(lambda: apply(defense, sample, **{missing: None}))  # noqa: B023 called at once
    assert name in str(caught.value) and missing in str(caught.value) and '\n' not in str(caught.value)
  if not needs:
    bare = jax.make_jaxpr(lambda updates: defense.update(updates, defense.init(sample.params))[0])
    assert str(bare(sample.updates)) == str(jax.make_jaxpr(lambda u: apply(defense, sample, None, u))(sample.updates))


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16, jnp.float16])
@every_defense
def test_structure_shapes_and_dtypes_stay(name, dtype, samples):
  sample = samples('normed')
  updates = jax.tree.map(lambda u: u.astype(dtype), sample.updates)
  defense = make(name, sample)

  def run(key, updates):
    state = defense.init(updates)
    return (updates, state), defense.update(
      updates, state, updates, key=key, batch=sample.batch, variables=sample.variables
    )

  before, after = jax.eval_shape(run, jax.random.clone(KEY), updates)
  assert jax.tree.structure(before) == jax.tree.structure(after)
  assert [(x.shape, x.dtype) for x in jax.tree.leaves(before)] == [(x.shape, x.dtype) for x in jax.tree.leaves(after)]


@pytest.mark.long
@every_kind
def test_it_stands_in_front_of_an_optimizer(name, samples, compiled):
  sample = samples('normed')
  for chain, key in ((optax.chain, KEY), (defenses.chain, jax.random.fold_in(KEY, 0))):
    expected = jax.tree.map(lambda u: -0.1 * u, compiled(name)(sample, key=key))
    chained = chain(make(name, sample), optax.sgd(0.1))
    assert_close(jax.jit(lambda key: apply(chained, sample, key))(KEY), expected)  # noqa: B023 called at once


@pytest.mark.long
@every_kind
def test_another_defense_may_follow(name, samples, compiled):
  sample, follower = samples('normed'), defenses.gaussian(stddev=0.2)
  first = compiled(name)(sample, key=jax.random.fold_in(KEY, 0))
  expected = apply(follower, sample, jax.random.fold_in(KEY, 1), first)
  chained = defenses.chain(make(name, sample), follower)
  assert_close(jax.jit(lambda key: apply(chained, sample, key))(jax.random.clone(KEY)), expected)


@pytest.mark.parametrize('name', [name for name, case in CASES.items() if case.maskable])
def test_masked_tensors_are_left_alone(name, samples):
  sample = samples('normed')
  mask = {layer: layer == 'Dense_0' for layer in sample.updates}
  masked = optax.masked(make(name, sample), mask)
  program = jax.make_jaxpr(lambda updates, key: apply(masked, sample, key, updates))(sample.updates, KEY).jaxpr
  paths = [path for path, _ in jax.tree.leaves_with_path(sample.updates)]
  ways = zip(paths, program.invars[:-1], program.outvars, strict=True)
  assert {path[0].key for path, given, sent in ways if given is not sent} == {'Dense_0'}


@pytest.mark.slow
@every_defense
def test_gradient_accumulation(name, samples):
  """Two calls of `optax.MultiSteps` defend the mean of two gradients, once."""
  sample = samples('normed')
  accumulated = optax.MultiSteps(optax.chain(make(name, sample), optax.sgd(1.0)), every_k_schedule=2)

  @jax.jit
  def step(key, updates, state):
    with jax.numpy_dtype_promotion('standard'):  # optax divides floats by an integer count
      return accumulated.update(updates, state, sample.params, key=key, batch=sample.batch, variables=sample.variables)

  first, state = step(jax.random.key(1), sample.updates, accumulated.init(sample.params))
  second, _ = step(jax.random.key(2), jax.tree.map(lambda u: 3 * u, sample.updates), state)
  assert_equal(first, trees.zeros_like(sample.updates))
  mean = jax.tree.map(lambda u: 2 * u, sample.updates)
  assert_close(second, jax.tree.map(jnp.negative, apply(make(name, sample), sample, jax.random.key(2), mean)))


@pytest.mark.long
@pytest.mark.parametrize(
  'name',
  [pytest.param(n, marks=pytest.mark.slow) if n in (*HEAVY, *ADDED) else n for n in CASES],
)
def test_an_attacker_can_differentiate_through_it(name, samples, compiled):
  sample, defended = samples('normed'), compiled(name)
  gradient = jax.jit(
    jax.grad(lambda updates: trees.squared_norm(defended.run(defended.numbers, jax.random.clone(KEY), sample, updates)))
  )
  assert_finite(gradient(sample.updates))
  assert_finite(gradient(trees.zeros_like(sample.updates)))


@pytest.mark.long
def test_different_defenses_draw_different_noise_from_one_key(samples):
  """In a plain `optax.chain` all stages get the same key; their ranks must not move together all the same."""
  sample = Sample({'w': jnp.ones(4000)}, {'w': jnp.ones(4000)}, (), samples('normed').client)
  random = [name for name, case in CASES.items() if case.needs == ('key',)]
  random.remove('fragmentation_random')  # it draws layers, and there is one
  noises = [make(name, sample) for name in random]
  drawn = jax.jit(lambda key: [apply(noise, sample, key)['w'] for noise in noises])(jax.random.clone(KEY))
  ranks = [scipy.stats.rankdata(entries) for entries in drawn]
  correlations = np.corrcoef(ranks)[np.triu_indices(len(ranks), 1)]
  assert np.abs(correlations).max() < 0.08  # five standard deviations


# ---- traits against behaviour, on a network of two dense layers without activation

COUNT = 256  # keys per call
KURTOSIS = {'gaussian': 3, 'laplace': 6, 'triangular': 2.4}  # the mean of x⁴, in units of the squared variance of x


def trait(name, what):
  return getattr(defenses.REGISTRY[name].traits, what)


def two_layers():
  """The model, and the samples that its updates come from."""

  def features(params, images):
    return images.reshape(images.shape[0], -1) @ params['first']['kernel'] + params['first']['bias'][None]

  def init(key, sample_shape):
    shapes = {'first': (math.prod(sample_shape), 6), 'last': (6, 10)}
    keys = dict(zip(shapes, jax.random.split(key), strict=True))
    return {
      layer: {'kernel': 0.3 * jax.random.normal(keys[layer], shape), 'bias': jnp.full(shape[1], 0.1)}
      for layer, shape in shapes.items()
    }

  def logits(params, images):
    return features(params, images) @ params['last']['kernel'] + params['last']['bias'][None]

  layers = [trees.Layer(name, ((name, 'kernel'), (name, 'bias'))) for name in ('first', 'last')]
  return models.from_functions(init, logits, features=features, layers=layers)


class Given(NamedTuple):
  """What a defense may depend on."""

  updates: dict
  params: dict
  samples: jax.Array
  targets: jax.Array
  state: object


class Behaviour:
  """A defense on `COUNT` keys at once, compiled once for all its numbers and inputs."""

  def __init__(self, name, arguments=None):
    self.case, self.method = CASES[name], stage(name, CASES[name].strong)
    client = Client(two_layers(), 10)
    variables = client.model.init(jax.random.key(0), (8, 8, 1))
    self.context = defenses.Context(client, variables, (8, 8, 1))
    draw = functools.partial(jax.random.uniform, minval=0.1, maxval=1.0)
    updates, others = (self.random_updates(variables['params'], seed) for seed in (1, 2))
    images = draw(jax.random.key(3), (2, 8, 8, 1))
    sample = Sample(updates, variables['params'], (images, None), client, variables)
    self.arguments = arguments or self.case.arguments(sample)
    initial = self.transformation(self.method.numbers).init(variables['params'])
    self.given = Given(updates, variables['params'], images, jax.nn.one_hot(jnp.asarray([3, 3]), 10), initial)
    self.other = Given(
      others,
      jax.tree.map(lambda p: 1.5 * p + 0.1, variables['params']),
      draw(jax.random.key(4), (2, 8, 8, 1)),
      jax.nn.one_hot(jnp.asarray([1, 5]), 10),
      None,
    )
    self.run = jax.jit(self.defended)
    self.keys = jax.random.split(jax.random.key(5), COUNT)

  @staticmethod
  def random_updates(params, seed):
    return trees.draws(jax.random.normal, jax.random.key(seed), params)

  def transformation(self, numbers):
    return self.method.build(numbers, *self.arguments)

  def defended(self, numbers, keys, given):
    def one(key):
      return self.transformation(numbers).update(
        given.updates,
        given.state,
        given.params,
        key=key,
        batch=(given.samples, given.targets),
        variables={'params': given.params},
      )

    return jax.vmap(one)(keys)

  def __call__(self, settings=None, **changes):
    """Returns the updates [COUNT, …] and the states, under changed settings and inputs."""
    numbers = self.method.changed(**(settings or {})).numbers
    return jax.device_get(self.run(numbers, jax.random.clone(self.keys), self.given._replace(**changes)))

  @property
  def quiet(self):
    """The output without noise, under the first key."""
    return trees.take(self(self.case.quiet)[0], 0)

  @property
  def masks(self):
    """What is sent, as the first state says; None without a mask."""
    found = optax.tree.get_all_with_path(trees.take(self()[1], 0), 'mask')
    return found[0][1] if found else None

  @property
  def kept(self):
    """(update, whether it was kept) of each tensor, without noise."""
    sent = jax.tree.map(lambda u: u != 0, self.quiet) if self.masks is None else self.masks
    pairs = zip(jax.tree.leaves(self.given.updates), jax.tree.leaves(sent), strict=True)
    return [(np.abs(np.asarray(u)), np.broadcast_to(mask, u.shape)) for u, mask in pairs]

  @property
  def loud(self):
    """The norm of the output, relative to before, where updates and images are 1000 times as large."""
    inputs = {'updates': jax.tree.map(lambda u: 1e3 * u, self.given.updates), 'samples': 1e3 * self.given.samples}
    loud = trees.take(self(self.case.quiet, **inputs)[0], 0)
    return float(trees.norm(loud) / trees.norm(self.quiet))


@pytest.fixture(scope='module')
def behaviour():
  return functools.cache(Behaviour)


def differs(a, b):
  return any(np.any(x != y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


@every_defense
def test_random_is_what_depends_on_the_key(name, behaviour):
  # With a previous model, fragmentation draws nothing: what it may do is declared.
  defended = behaviour(name) if name != 'fragmentation' else Behaviour(name, (None, 'gradient', None))
  outputs = defended()[0]
  assert trait(name, 'random') == differs(trees.take(outputs, 0), trees.take(outputs, 1))


# Concealment also turns its result by the update that it is handed.
@each_of([name for name in CASES if name != 'concealment'])
def test_what_replaces_its_input_depends_on_nothing_of_it(name, behaviour):
  defended = behaviour(name)
  turned = jax.tree.map(lambda u: 2 * jnp.flip(u), defended.given.updates)
  pairs = zip(*(jax.tree.leaves(defended(updates=given)[0]) for given in (defended.given.updates, turned)), strict=True)
  assert trait(name, 'replaces') == all(np.allclose(one, other, rtol=1e-4, atol=1e-6) for one, other in pairs)


@every_defense
def test_noise_is_what_is_added_to_a_gradient_of_zero(name, behaviour):
  """Without labels the loss is zero, and with it the gradient of every sample."""
  defended = behaviour(name)
  concealed = {'mixing': 0.0} if name == 'concealment' else None  # else its own samples have labels
  zero = {'updates': trees.zeros_like(defended.given.updates), 'targets': jnp.zeros((2, 10))}
  added = any(np.any(x) for x in jax.tree.leaves(defended(concealed, **zero)[0]))
  control = name == 'null_gradient'  # is noise in place of whatever it is given, and adds none
  assert added == (control or trait(name, 'noise') is not None) == (control or bool(CASES[name].quiet))


@each_of([name for name, case in CASES.items() if case.quiet])
def test_the_noise_has_the_declared_variance_on_the_declared_fraction_of_entries(name, behaviour):
  defended, noise = behaviour(name), trait(name, 'noise')
  settings = defended.method.settings
  added = jax.tree.map(lambda a, b: np.float64(a) - np.float64(b), defended()[0], defended(CASES[name].quiet)[0])
  variance = noise.variance(settings, defended.context, 2)
  tensors = [x.ravel() for x in jax.tree.leaves(added)]
  everything = np.concatenate(tensors)
  assert np.mean(everything != 0) == pytest.approx(noise.fraction(settings), abs=0.03)
  whole = isinstance(variance, float)
  for x, declared in zip([everything] if whole else tensors, jax.tree.leaves(variance), strict=True):
    drawn = x[x != 0]
    # The error of rounding depends on the entry: its declared variance is a mean over entries, not over keys.
    independent = drawn.size / (COUNT if noise.distribution == 'triangular' else 1)
    error = 5 * math.sqrt((KURTOSIS[noise.distribution] - 1) / independent)
    assert error < 1 / 3  # so that two thirds and three halves of the variance are rejected
    assert np.mean(drawn**2) == pytest.approx(declared, rel=error)
    assert np.mean(drawn**4) / np.mean(drawn**2) ** 2 == pytest.approx(KURTOSIS[noise.distribution], rel=1 / 3)


@every_defense
def test_dropped_entries_are_zeros_or_in_the_mask(name, behaviour):
  defended = behaviour(name)
  dropped = any(not kept.all() for _, kept in defended.kept)
  found = '' if not dropped else 'zeros' if defended.masks is None else 'mask'
  assert trait(name, 'sparsifies') == found
  if found == 'mask':
    sent = trees.take(defended()[0], 0)
    assert not differs(sent, trees.masked(sent, defended.masks))


@every_defense
def test_what_is_dropped_by_magnitude_is_smallest(name, behaviour):
  mixed = [(u, kept) for u, kept in behaviour(name).kept if kept.any() and not kept.all()]
  ordered = bool(mixed) and all(u[~kept].max() <= u[kept].min() for u, kept in mixed)
  assert trait(name, 'by_magnitude') == ordered


@every_defense
def test_selects_is_a_mask_that_depends_on_the_update(name, behaviour):
  defended = behaviour(name)
  states = [
    trees.take(defended(updates=defended.random_updates(defended.given.updates, seed))[1], 0) for seed in range(6, 12)
  ]
  masks = [mask for state in states for _, mask in optax.tree.get_all_with_path(state, 'mask')]
  assert trait(name, 'selects') == any(differs(mask, masks[0]) for mask in masks)


@every_defense
def test_the_norm_is_clipped_or_bounded_as_declared(name, behaviour):
  defended = behaviour(name)
  clips, bounds, limits = (trait(name, what) for what in ('clips', 'bounds', 'limits'))
  assert (clips or bounds or limits) is None or defended.loud < 10
  assert (clips or bounds or limits) is not None or defended.loud > 10
  if limits is not None:
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(defended.quiet))
    assert largest == pytest.approx(limits(defended.method.settings))
    assert norm_bound(defended.method, 9) == 3 * limits(defended.method.settings)
  if clips is None and bounds is None:
    return
  assert (trait(name, 'clips_each') == 'sample') == (bounds is not None)  # the mean of clipped gradients is bounded
  assert clips is None or bounds is None  # what clips is bounded, as `norm_bound` knows
  declared, norm = (clips or bounds)(defended.method.settings), float(trees.norm(defended.quiet))
  assert declared == norm_bound(defended.method)
  parallel = float(trees.cosine(defended.quiet, defended.given.updates)) > 1 - 1e-5
  assert parallel == (clips is not None)
  assert (1 - 1e-5 if parallel else 0.6) * declared < norm < (1 + 1e-5) * declared


@every_defense
def test_a_mechanism_is_gaussian_noise_on_what_is_bounded(name, behaviour):
  defended, noise, mechanism = behaviour(name), trait(name, 'noise'), trait(name, 'mechanism')
  settings, own = defended.method.settings, norm_bound(defended.method)
  found = [mechanism and mechanism(settings, *before) for before in ((None, 0), (2.0, 1))]
  everywhere = noise is not None and noise.distribution == 'gaussian' and noise.fraction(settings) == 1
  if not everywhere:
    assert found == [None, None]
    return
  stddev = math.sqrt(noise.variance(settings, defended.context, 2))
  if trait(name, 'place') == 'step':  # of the mean of two samples; behind another stage it is no mean of clipped ones
    assert found == [defenses.Mechanism(pytest.approx(2 * stddev / own), 'example'), None]
  else:
    alone = None if math.isinf(own) else defenses.Mechanism(pytest.approx(stddev / own), 'client')
    assert found == [alone, defenses.Mechanism(pytest.approx(stddev / min(own, 2.0)), 'client')]


@every_defense
def test_post_processing_depends_on_the_update_and_the_key_alone(name, behaviour):
  defended, other = behaviour(name), behaviour(name).other
  later = trees.take(defended(updates=other.updates)[1], 0)  # the state after another update
  outputs = [
    defended(**changes)[0]
    for changes in ({'params': other.params}, {'samples': other.samples, 'targets': other.targets}, {'state': later})
  ]
  assert trait(name, 'post_processing') == (not any(differs(output, defended()[0]) for output in outputs))


@every_defense
def test_idle_is_the_identity(name, behaviour):
  case, idle = CASES[name], trait(name, 'idle')
  defended = behaviour(name)
  assert not idle(defended.method.settings)
  if case.identity is not None:
    settings = {**case.strong, **case.identity}
    assert idle(stage(name, settings).settings)
    assert not differs(trees.take(defended(settings)[0], 0), defended.given.updates)
  if name == 'concealment':
    assert idle(stage(name, {'sensitive': 0}).settings)
  if name == 'outpost':
    assert not idle(stage(name, {'noise': 0.0}).settings) and not idle(stage(name, {'prune': 0.0}).settings)


@every_defense
def test_a_defense_is_placed_where_it_acts(name, behaviour):
  defended = behaviour(name)
  made = make(name, Sample(defended.given.updates, defended.given.params, None, defended.context.client))
  assert isinstance(made, optax.GradientTransformationExtraArgs)
  bound = defenses.bind(made, defended.context).client(defended.context.client)
  changed = [
    field
    for field, place in (('transform', 'data'), ('step', 'step'), ('upload', 'upload'))
    if getattr(bound, field) != getattr(defended.context.client, field)
  ]
  assert changed == [trait(name, 'place')]


@pytest.mark.parametrize('name', [name for name, place in OTHERS.items() if place == 'data'])
def test_on_the_samples_no_other_trait_holds(name, small_images):
  declared = defenses.REGISTRY[name].traits
  kept = {field: getattr(declared, field) for field in ('random', 'citation', 'arguments')}
  assert declared == defenses.Traits(place='data', idle=defenses.Traits().idle, **kept)
  defense = defenses.REGISTRY[name]()
  assert callable(defense.transform) and not declared.idle(defense.stages[0].settings)
  with pytest.raises(errors.UsageError, match='acts on the samples'):
    defense.update({}, defense.init({}))
  client = Client(two_layers(), 10)
  context = defenses.Context(client, client.model.init(jax.random.key(0), (8, 8, 1)), (8, 8, 1), small_images)
  bound = defenses.bind(defense, context).client(client)
  assert callable(bound.transform) and (bound.step, bound.upload) == (client.step, client.upload)


def test_at_the_server_the_update_is_post_processed():
  settings, traits = {'stddev': 0.1, 'ratio': 0.3}, defenses.compensation.traits
  noisy = {'w': 0.03 * jax.random.normal(jax.random.key(3), (40, 30))}
  server = defenses.compensation(**settings)
  outputs = [
    jax.jit(lambda u, p, k: server.update(u, server.init(u), p, key=k, num_clients=4)[0])(noisy, params, key)
    for params, key in ((noisy, jax.random.key(1)), (trees.zeros_like(noisy), jax.random.key(2)))
  ]
  assert differs(outputs[0], noisy) and not differs(*outputs) and traits.post_processing and not traits.random
  idle = defenses.compensation(**{**settings, 'stddev': 0.0})
  assert not differs(idle.update(noisy, idle.init(noisy), num_clients=4)[0], noisy)
  assert traits.idle(idle.stages[0].settings) and not traits.idle(server.stages[0].settings)
  assert (traits.sparsifies, traits.noise, traits.clips, traits.bounds, traits.mechanism) == (
    '',
    None,
    None,
    None,
    None,
  )
  client = Client(two_layers(), 10)
  context = defenses.Context(client, client.model.init(jax.random.key(0), (8, 8, 1)), (8, 8, 1))
  assert defenses.bind(server, context).client(client) == client


@pytest.mark.long
@pytest.mark.parametrize('text', ['concealment(steps=2)', 'soteria(rate=0.5)', 'graddefense(stddev=0.1)'])
def test_two_programs_with_padding_hold_nothing_of_each_other(text, small_images):
  """A defense that runs the network is compiled by itself: what was traced of the first ended the second."""
  model, (images, labels) = models.create('convnet(width=2)', 10, init='default'), small_images
  images = jnp.pad(jnp.asarray(images), ((0, 0), (0, 1), (0, 1), (0, 0)))
  variables = model.init(jax.random.key(0), images.shape[1:])
  client, public = Client(model, 10, share='delta', optimizer=optax.sgd(0.1), batch_size=4), (images, labels)
  context = defenses.Context(client, variables, images.shape[1:], public)
  bound = defenses.bind(registry.parse(text), context).client(client)

  def update(weights):
    return bound.participate(jax.random.key(1), variables, images[:3], labels[:3], weights)[0].update

  first, second = (jax.jit(lambda weights: update(weights))(jnp.ones(3)) for _ in range(2))
  assert_equal(first, second)
