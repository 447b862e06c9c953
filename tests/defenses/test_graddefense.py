"""GradDefense against NumPy: the risk of layers, slices of equal risk, Algorithm 1, and its form for each step."""

import dataclasses
import functools
import itertools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats

import gradleak as gl
from gradleak import Client, defenses, models
from gradleak.core import errors, trees
from gradleak.defenses.graddefense import num_perturbed, select_slices, sensitivity, slice_gradients

KEY = jax.random.key(5)


@functools.cache
def setting(name):
  """Returns (client, variables, 9×9 digits [4], labels, gradient of all four) of a network.

  The digits are grainy: max pooling has ties on flat background, where rounding decides on its derivative.
  """
  from sklearn.datasets import load_digits

  digits = load_digits()
  images = np.pad(digits.images[:4] / 16, ((0, 0), (0, 1), (0, 1)))[..., None].astype(np.float32)
  images += np.random.default_rng(3).uniform(0, 0.2, images.shape).astype(np.float32)
  client = Client(models.create(name, 10), 10)
  variables = jax.jit(client.model.init, static_argnums=1)(jax.random.key(0), (9, 9, 1))
  images, labels = jnp.asarray(images), jnp.asarray(digits.target[:4].astype(np.int32))
  return client, variables, images, labels, jax.jit(client.local_update)(None, variables, images, labels).update


@functools.cache
def slicing_of(name, num_slices=10, balance='sensitivity'):
  client, variables, images, *_ = setting(name)
  layers = client.model.layers(images.shape[1:])
  risk = 1.0 + np.random.default_rng(0).random(len(layers)) * 4
  return slice_gradients(variables['params'], risk, num_slices, layers, balance), risk


def in_forward_order(tree, name):
  """Returns the entries of a tree by layer, each layer flat, weight first."""
  client, _, images, *_ = setting(name)
  return [
    np.concatenate([np.asarray(trees.get(tree, path)).ravel() for path in layer.paths])
    for layer in client.model.layers(images.shape[1:])
  ]


networks = pytest.mark.parametrize('name', ['lenet', 'convnet(width=2)'])


# Sensitivity, equations 1 and 2


def linear_client():
  model = models.from_functions(
    lambda key, _: None, lambda params, images: images.reshape(-1, 64) @ params['w'] + params['b'].reshape(1, -1)
  )
  return Client(model, 10)


@pytest.fixture(scope='module')
def linear_params():
  rng = np.random.default_rng(1)
  return {'w': rng.normal(size=(64, 10)).astype(np.float32) / 4, 'b': rng.normal(size=10).astype(np.float32)}


def linear_jacobian(params, image):
  """Returns the Jacobian of (∂ℓ/∂b, ∂ℓ/∂W) of a softmax regression, by hand: p − y and x(p − y)ᵀ."""
  w, x = np.asarray(params['w'], np.float64), np.asarray(image, np.float64).ravel()
  p = scipy.special.softmax(x @ w + np.asarray(params['b'], np.float64))

  def jacobians(label):
    d = p - np.eye(10)[label]
    dp = (np.diag(p) - np.outer(p, p)) @ w.T  # [10, 64]
    dw = np.einsum('k,c->kc', np.ones(64), d)[:, :, None] * np.eye(64)[:, None, :] + x[:, None, None] * dp[None]
    return dp, dw.reshape(640, 64)

  return jacobians


def test_exact_sensitivity_has_a_closed_form_in_softmax_regression(small_images, linear_params):
  images, labels = small_images
  norms = []
  for image, label in zip(images, labels, strict=True):
    db, dw = linear_jacobian(linear_params, image)(label)
    norms.append([np.linalg.norm(dw), np.linalg.norm(db)])
  layers = (trees.Layer('weight', (('w',),)), trees.Layer('bias', (('b',),)))
  client = Client(linear_client().model._replace(layers=lambda shape: layers), 10)
  measured = sensitivity(client, {'params': linear_params}, images, labels)
  numbers, _ = trees.layer_numbers(linear_params, layers)
  np.testing.assert_allclose(measured[numbers['w']], np.mean(norms, axis=0)[0], rtol=1e-4)
  np.testing.assert_allclose(measured[numbers['b']], np.mean(norms, axis=0)[1], rtol=1e-4)
  probabilities = jax.nn.one_hot(labels, 10)
  np.testing.assert_allclose(sensitivity(client, {'params': linear_params}, images, probabilities), measured, rtol=1e-5)
  large = sensitivity(client, {'params': linear_params}, images, 1e22 * probabilities)  # its square is infinite
  np.testing.assert_allclose(large, 1e22 * measured, rtol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize('given', [{}, {'method': 'probes', 'key': KEY}])
def test_sensitivity_takes_samples_of_either_precision(small_images, linear_params, given):
  images, labels = small_images
  with jax.enable_x64(True), jax.numpy_dtype_promotion('standard'):
    variables = {'params': jax.tree.map(lambda x: jnp.asarray(x, np.float64), linear_params)}
    found = [
      sensitivity(linear_client(), variables, jnp.asarray(images, dtype), labels, **given)
      for dtype in (np.float32, np.float64)
    ]
  if not given:
    np.testing.assert_allclose(found[0], found[1], rtol=1e-4)
  assert found[1].dtype == np.float64 and np.isfinite(found[1]).all()


def sample_gradient(name):
  """Returns (image, label) -> the gradient of one sample's loss, apart from the client."""
  client, variables, *_ = setting(name)

  def gradient(image, label):
    def loss(params):
      logits, _ = client.model.apply({**variables, 'params': params}, image[None], True, None)
      return -jax.nn.log_softmax(logits)[0, label]

    return jax.grad(loss)(variables['params'])

  return gradient


def by_layer(name, tree, norm):
  """Returns a NumPy statistic of the leaves' squares, summed by the model's layers in the numbering of the tree."""
  client, variables, *_ = setting(name)
  numbers, count = trees.layer_numbers(variables['params'], client.model.layers((9, 9, 1)))
  squares = np.zeros(count)
  for leaf, number in zip(jax.tree.leaves(tree), jax.tree.leaves(numbers), strict=True):
    squares[number] += norm(np.asarray(leaf, np.float64))
  return np.sqrt(squares)


@pytest.mark.long
def test_sensitivity_is_a_client_s_own_in_a_cohort():
  client, variables, images, labels, _ = setting('lenet')
  alone, together = (
    sensitivity(
      dataclasses.replace(client, cohort=cohort), variables, images[:1], labels[:1], method='probes', probes=2, key=KEY
    )
    for cohort in (1, 4)
  )
  np.testing.assert_array_equal(alone, together)


@pytest.mark.slow
@networks
def test_exact_sensitivity_is_the_norm_of_the_whole_jacobian(name):
  """Finite differences would step across the kinks of ReLU and of max pooling."""
  client, variables, images, labels, _ = setting(name)
  jacobian = jax.jit(jax.jacfwd(sample_gradient(name)))
  norms = [by_layer(name, jacobian(images[i], labels[i]), lambda j: np.sum(j**2)) for i in range(2)]
  measured = sensitivity(client, variables, images[:2], labels[:2])
  assert measured.shape == (len(client.model.layers((9, 9, 1))),) and measured.dtype == jnp.float32
  np.testing.assert_allclose(measured, np.mean(norms, axis=0), rtol=1e-3)


@pytest.mark.long
@pytest.mark.parametrize('probes', [1, 4])
def test_probes_are_low_by_an_eighth_of_their_relative_variance(probes, small_images, linear_params):
  images, labels = small_images
  dp, dw = linear_jacobian(linear_params, images[0])(labels[0])
  many = (np.repeat(images[:1], 4000, axis=0), np.repeat(labels[:1], 4000))
  measure = functools.partial(sensitivity, linear_client(), {'params': linear_params}, *many, probes=probes, key=KEY)
  roots, squares = measure(method='probes'), measure(method='probes_squared')
  for number, jacobian in enumerate((dp, dw)):  # the tree's order: b, w
    gram = jacobian.T @ jacobian
    variance = 2 * np.sum(gram**2) / np.trace(gram) ** 2 / probes  # relative, of the mean of ‖Jz‖²
    exact = np.linalg.norm(jacobian)
    bias, error = float(roots[number] / exact - 1), math.sqrt(variance / 4 / 4000)
    if number == 0:
      assert bias < -5 * error
      assert -1.4 * variance / 8 < bias < -0.6 * variance / 8  # the next order counts where there is one probe
    assert abs(bias + variance / 8) < 4 * error + variance**2 / 16
    assert abs(float(squares[number] / exact) - 1) < 4 * error


@pytest.mark.slow
def test_probes_come_near_the_exact_sensitivity_of_a_network():
  client, variables, images, labels, _ = setting('lenet')
  exact = sensitivity(client, variables, images, labels)
  for method in ('probes', 'probes_squared'):
    estimate = sensitivity(client, variables, images, labels, method=method, probes=64, key=KEY)
    np.testing.assert_allclose(estimate, exact, rtol=0.1)
  assert exact.min() > 0


def test_probes_need_a_key():
  client, variables, images, labels, _ = setting('lenet')
  with pytest.raises(errors.UsageError, match='key='):
    sensitivity(client, variables, images, labels, method='probes')


# Slices


def greedy(risks, num_slices):
  """Packs blocks one by one: a slice takes the next while that brings it nearer to its share of what is left."""
  slices, position, rest = [], 0, math.fsum(risks)
  for number in range(num_slices):
    left, filled = num_slices - number, 0.0
    share, start = rest / left, position
    while position < len(risks) - left + 1:
      nearer = abs(filled + risks[position] - share) <= abs(filled - share)
      if left > 1 and position > start and not nearer:
        break
      filled += risks[position]
      slices.append(number)
      position += 1
    rest -= filled
  return np.asarray(slices)


@networks
@pytest.mark.parametrize('balance', ['sensitivity', 'size'])
@pytest.mark.parametrize('num_slices', [3, 10])
def test_slices_are_packed_greedily(name, balance, num_slices):
  slicing, risk = slicing_of(name, num_slices, balance)
  client, variables, *_ = setting(name)
  numbers, _ = trees.layer_numbers(variables['params'], client.model.layers((9, 9, 1)))
  numbers = jax.tree.map(lambda p, number: np.full(p.shape, number), variables['params'], numbers)
  in_order = [risk[layer[0]] for layer in in_forward_order(numbers, name)]
  parts = in_forward_order(slicing.slices, name)
  slices = np.concatenate(parts)
  block = math.gcd(*(part.size for part in parts))
  blocks = [(r * block / part.size, 1.0)[balance == 'size'] for part, r in zip(parts, in_order, strict=True)]
  blocks = [b for b, part in zip(blocks, parts, strict=True) for _ in range(part.size // block)]
  expected = np.repeat(greedy(blocks, num_slices), block)
  assert np.mean(slices != expected) < 1e-3  # ties may fall either way
  assert slices[0] == 0 and slices[-1] == num_slices - 1 and set(np.diff(slices)) == {0, 1}  # contiguous, none empty
  entry_risks = np.concatenate([np.full(part.size, r / part.size) for part, r in zip(parts, in_order, strict=True)])
  slice_risks = np.bincount(slices, entry_risks)
  np.testing.assert_allclose(slicing.risk, slice_risks, rtol=1e-5)
  assert slicing.imbalance == pytest.approx(np.ptp(slice_risks) / slice_risks.mean(), rel=1e-4)
  sizes = np.bincount(slices)
  if balance == 'size':
    assert np.ptp(sizes) <= block and slicing.imbalance > 0.3
  else:
    assert slicing.imbalance < 0.05 and np.ptp(sizes) > 100
  assert all(leaf.dtype == np.int32 for leaf in jax.tree.leaves(slicing.slices))


def test_millions_of_blocks_are_balanced():
  params = {'a': np.zeros((2000, 1500), np.float32), 'b': np.zeros(7, np.float32), 'c': np.zeros((999, 1001))}
  slicing = slice_gradients(params, [1.0, 0.0001, 3.0], 1000)
  assert slicing.imbalance < 0.01 and slicing.slices['c'].max() == 999


def test_no_slice_is_empty_however_the_risk_lies():
  params = {'heavy': np.zeros(()), 'light': np.zeros((30, 10))}
  for risk in ([1e6, 1.0], [0.0, 1.0], [1.0, 0.0], [0.0, 0.0]):
    slicing = slice_gradients(params, risk, 10)
    assert len(np.unique(np.concatenate([slicing.slices['heavy'].ravel(), slicing.slices['light'].ravel()]))) == 10
    assert np.isfinite(slicing.imbalance)
  alone = slice_gradients({'w': np.zeros(4000)}, [2.0], 10)  # the divisor of one size leaves one block
  np.testing.assert_array_equal(np.bincount(alone.slices['w']), np.full(10, 400))


@pytest.mark.parametrize(
  ('changed', 'words'),
  [
    ({'num_slices': 13}, 'nearest valid value is 12'),
    ({'layer_risk': [1.0]}, '2 finite numbers'),
    ({'layer_risk': [1.0, -1.0]}, '-1'),
    ({'layer_risk': [1.0, math.nan]}, 'nan'),
  ],
)
def test_bad_slicings_are_named(changed, words):
  settings = {'layer_risk': [1.0, 2.0], 'num_slices': 3, 'balance': 'size', **changed}
  with pytest.raises(errors.UsageError) as caught:
    slice_gradients({'a': np.zeros(4), 'b': np.zeros((4, 2))}, **settings)
  assert words in str(caught.value)


# Algorithm 1


def test_number_of_perturbed_slices():
  for num_slices, ratio in itertools.product(
    (1, 5, 10, 100, 1000), (0, 0.05, 0.2, 0.29, 0.3, 0.5, 0.57, 0.7, 0.999, 1)
  ):
    expected = max(1, int(Fraction(str(ratio)) * num_slices))
    assert int(num_perturbed(ratio, num_slices)) == expected
    assert int(num_perturbed(jnp.float32(ratio), num_slices)) == expected


@pytest.mark.parametrize(('num_slices', 'count'), [(5, 2), (6, 3), (4, 1), (3, 3)])
def test_every_subset_of_slices_is_equally_likely(num_slices, count):
  draw = jax.jit(jax.vmap(lambda key, count: select_slices(key, num_slices, count), in_axes=(0, None)))
  chosen = np.asarray(draw(jax.random.split(KEY, 6000), jnp.int32(count)))
  assert (chosen.sum(1) == count).all()
  subsets = [list(s) for s in itertools.combinations(range(num_slices), count)]
  counts = [np.sum(chosen[:, subset].all(1)) for subset in subsets]
  assert sum(counts) == 6000
  if len(subsets) > 1:
    assert scipy.stats.chisquare(counts).pvalue > 0.01


@functools.cache
def perturbation(name):
  """Returns (ratio, keys) -> gradients with noise of 0.1, compiled once."""
  *_, gradient = setting(name)
  slicing, _ = slicing_of(name)

  def defend(ratio, key):
    defense = defenses.graddefense(slicing, stddev=0.1, ratio=ratio)
    return defense.update(gradient, defense.init(gradient), key=key)[0]

  return jax.jit(jax.vmap(defend, in_axes=(None, 0)))


@pytest.mark.long
@networks
@pytest.mark.parametrize('ratio', [0.0, 0.3, 1.0])
def test_noise_falls_on_the_chosen_slices_only(name, ratio):
  *_, gradient = setting(name)
  slicing, _ = slicing_of(name)
  defended = perturbation(name)(ratio, jax.random.split(KEY, 20))
  slices = np.concatenate(in_forward_order(slicing.slices, name))
  before = np.concatenate(in_forward_order(gradient, name))
  after = [np.concatenate(in_forward_order(trees.take(defended, i), name)) for i in range(20)]
  noises, subsets = [], []
  for shared in after:
    chosen = sorted(set(slices[shared != before].tolist()))
    assert len(chosen) == max(1, int(10 * ratio))
    expected = before.astype(np.float64)
    for i in chosen:  # Algorithm 1, lines 4 and 5, with the noise that was drawn
      noise = (shared.astype(np.float64) - before)[slices == i]
      expected[slices == i] += noise
      noises.append(noise)
    np.testing.assert_array_equal(shared, expected.astype(np.float32))
    assert np.mean(shared[np.isin(slices, chosen)] != before[np.isin(slices, chosen)]) > 0.999
    subsets.append(tuple(chosen))
  assert len(set(subsets)) > 4 or ratio == 1
  noise = np.concatenate(noises)[:20_000]
  assert scipy.stats.kstest(noise, scipy.stats.norm(0, 0.1).cdf).pvalue > 0.01
  for wrong in (2 / 3, 3 / 2):
    assert scipy.stats.kstest(noise, scipy.stats.norm(0, 0.1 * wrong).cdf).pvalue < 1e-6
  first, second = (after[i] - before for i in (0, 1))
  if ratio == 1:
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.1


@pytest.mark.long
def test_by_name_it_is_sliced_by_the_risk_on_public_images(small_images, linear_params):
  client, variables = linear_client(), {'params': jax.tree.map(jnp.asarray, linear_params)}
  context = defenses.Context(client, variables, (8, 8, 1), small_images)
  text = 'graddefense(stddev=0.1,ratio=0.5,num_slices=4,estimate=exact,root=3)'
  bound = defenses.bind(gl.parse(text), context)
  ((slicing,),) = bound.arguments
  images, labels = map(jnp.asarray, small_images)
  risk = sensitivity(client, variables, images[:3], labels[:3])
  expected = slice_gradients(linear_params, risk, 4)
  jax.tree.map(np.testing.assert_array_equal, slicing, expected)
  defended = bound.client(client)
  update, gradient = (jax.jit(c.local_update)(KEY, variables, images, labels).update for c in (defended, client))
  noise = [np.abs(a - b) for a, b in zip(jax.tree.leaves(update), jax.tree.leaves(gradient), strict=True)]
  moved = [s[n > 1e-5] for n, s in zip(noise, jax.tree.leaves(slicing.slices), strict=True)]
  assert np.unique(np.concatenate(moved)).size == 2
  probed = [defenses.bind(gl.parse('graddefense(stddev=0.1)'), context).arguments for _ in range(2)]
  jax.tree.map(np.testing.assert_array_equal, *probed)
  with pytest.raises(errors.UsageError, match='public='):
    defenses.bind(gl.parse(text), defenses.Context(client, variables, (8, 8, 1)))


# The form that runs in each step


def step_slices(name, num_slices):
  """Returns the slice numbers in forward order: tensors' risks from each sample's Jacobian, cut at equal shares."""
  client, variables, images, labels, _ = setting(name)

  def sums(images):
    def loss(params):
      logits, _ = client.model.apply({**variables, 'params': params}, images, True, None)
      return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1))

    return [jnp.sum(g) for g in jax.tree.leaves(jax.grad(loss)(variables['params']))]

  risks = [np.linalg.norm(np.asarray(j).reshape(4, -1), axis=1).mean() for j in jax.jit(jax.jacrev(sums))(images)]
  risks = jax.tree.unflatten(jax.tree.structure(variables['params']), risks)
  layers = client.model.layers((9, 9, 1))
  per_entry = np.concatenate(
    [
      np.full(
        trees.get(variables['params'], path).size, trees.get(risks, path) / trees.get(variables['params'], path).size
      )
      for layer in layers
      for path in layer.paths
    ]
  ).astype(np.float64)
  slices, filled, total = [], 0.0, per_entry.sum()
  for risk in per_entry:
    slices.append(min(int((filled + risk / 2) / total * num_slices), num_slices - 1))
    filled += risk
  return np.asarray(slices)


@pytest.mark.slow
@networks
def test_each_step_perturbs_slices_of_the_batchs_own_risk(name):
  client, variables, images, labels, gradient = setting(name)
  slices = step_slices(name, 10)
  assert np.unique(slices).size == 10
  before = np.concatenate(in_forward_order(gradient, name))
  context = defenses.Context(client, variables, (9, 9, 1))
  client = defenses.bind(defenses.graddefense_step(stddev=0.1), context).build((0.1, 0.5, math.inf), client)
  update = jax.jit(lambda key: client.local_update(key, variables, images, labels).update)
  seen = []
  for seed in range(6):
    shared = np.concatenate(in_forward_order(update(jax.random.key(seed)), name))
    touched = np.abs(shared - before) > 1e-5  # two compilations differ in the last bits
    share = np.bincount(slices, touched) / np.bincount(slices)
    chosen = share > 0.5
    assert chosen.sum() == 5
    assert np.sum(touched != chosen[slices]) <= 20  # an entry or so at each end of a slice
    seen.append((shared - before)[touched])
  noise = np.concatenate(seen)
  assert scipy.stats.kstest(noise, scipy.stats.norm(0, 0.1).cdf).pvalue > 0.01
  for wrong in (2 / 3, 3 / 2):
    assert scipy.stats.kstest(noise, scipy.stats.norm(0, 0.1 * wrong).cdf).pvalue < 1e-6


@functools.cache
def step_defense():
  """Returns (gradient, images, weights, settings) -> LeNet's gradient, defended on 4 slices; compiled once."""
  client, variables, _, labels, _ = setting('lenet')

  def defend(gradient, images, weights, settings):
    defense = defenses.graddefense_step(client, num_slices=4, **settings)
    given = {'batch': (images, jax.nn.one_hot(labels, 10)), 'weights': weights, 'variables': variables, 'key': KEY}
    return defense.update(gradient, defense.init(gradient), variables['params'], **given)[0]

  return jax.jit(defend)


@pytest.mark.long
def test_padding_does_not_count_in_the_risk():
  *_, images, _, gradient = setting('lenet')
  settings = {'stddev': 0.1, 'ratio': 0.5, 'clip': math.inf}
  other = images.at[2:].set(1 - images[2:])
  padded, filled = jnp.asarray([1.0, 1.0, 0.0, 0.0]), jnp.ones(4)
  first, second = (step_defense()(gradient, x, padded, settings) for x in (images, other))
  jax.tree.map(np.testing.assert_array_equal, first, second)
  third, fourth = (step_defense()(gradient, x, filled, settings) for x in (images, other))
  assert trees.norm(trees.subtract(third, fourth)) > 0.1 and trees.norm(trees.subtract(third, first)) > 0.1


@pytest.mark.long
@pytest.mark.parametrize('scale', [1e-9, 1.0, 1e25])
def test_each_chosen_slice_is_clipped(scale):
  *_, images, _, gradient = setting('lenet')
  gradient = jax.tree.map(lambda g: g * scale, gradient)
  slices = step_slices('lenet', 4)
  before = np.concatenate(in_forward_order(gradient, 'lenet')).astype(np.float64)
  norms = np.sqrt(np.bincount(slices, (before / scale) ** 2)) * scale
  bound = float(np.sort(norms)[1:3].mean())  # two slices lie above it
  after = step_defense()(gradient, images, jnp.ones(4), {'stddev': 0.0, 'ratio': 1.0, 'clip': bound})
  factors = np.minimum(1, bound / norms)[slices]
  after = np.concatenate(in_forward_order(after, 'lenet'))
  assert np.mean(np.isclose(after, before * factors, rtol=1e-3, atol=0)) > 0.99
  assert np.any(after == before) and np.any(after != before)


@pytest.mark.slow
def test_running_statistics_are_asked_for():
  client, variables, images, labels, gradient = setting('convnet(width=2)')
  running = Client(client.model, 10, batch_norm='eval')
  defense = defenses.graddefense_step(running, stddev=0.1)
  given = {'batch': (images, jax.nn.one_hot(labels, 10)), 'key': KEY}
  with pytest.raises(errors.UsageError, match='variables='):
    jax.eval_shape(lambda p: defense.update(gradient, defense.init(gradient), p, **given), variables['params'])
  jax.eval_shape(
    lambda v: defense.update(gradient, defense.init(gradient), v['params'], variables=v, **given), variables
  )


@pytest.mark.parametrize('balance', ['sensitivity', 'size'])
def test_what_is_not_shared_is_in_no_slice(balance):
  params = {'a': {'w': np.zeros((30, 4)), 'b': np.zeros(4)}, 'c': {'w': np.zeros((6, 5)), 'b': np.zeros(7)}}
  for unshared in (('a', 'w'), ('a', 'b')), (('a', 'w'), ('c', 'b')), (('c', 'w'),):
    for risk in ([2.0, 1.0], [0.0, 0.0]):
      slicing = slice_gradients(params, risk, 10, balance=balance, unshared=unshared)
      paths = {(module, name): part for module, own in slicing.slices.items() for name, part in own.items()}
      assert all(np.all(paths.pop(path) == 10) for path in unshared)
      sizes = np.bincount(np.concatenate([part.ravel() for part in paths.values()]), minlength=10)
      assert len(sizes) == 10 and sizes.min() > 0
      assert slicing.risk.sum() == pytest.approx(sum(risk[module == 'c'] for module in {path[0] for path in paths}))
      if balance == 'size' or risk == [0.0, 0.0]:
        assert np.ptp(sizes) <= 1
  with pytest.raises(errors.UsageError, match='41'):
    slice_gradients(params, [2.0, 1.0], 42, unshared=(('a', 'w'),))


@pytest.mark.long
@pytest.mark.parametrize('field', ['frozen', 'private'])
@pytest.mark.parametrize('name', ['graddefense_step', 'graddefense'])
def test_slices_hold_what_is_shared_alone(name, field):
  """Else most of the noise falls on layers that the server never sees, and many uploads have none."""
  model = models.mlp(5, widths=(64, 16))
  variables = model.init(jax.random.key(0), (8, 8, 1))
  images, labels = jax.random.uniform(jax.random.key(1), (4, 8, 8, 1)), jnp.arange(4)
  client = Client(model, 5, **{field: ('Dense_0', 'Dense_1')})
  before = client.local_update(None, variables, images, labels).update['Dense_2']
  settings = {'balance': 'size'} if name == 'graddefense' else {}
  context = defenses.Context(client, variables, (8, 8, 1), (images, labels))
  bound = defenses.bind(getattr(defenses, name)(stddev=1.0, ratio=0.5, **settings), context)
  update = jax.jit(lambda key: bound.client(client).local_update(key, variables, images, labels).update['Dense_2'])
  for seed in range(4):
    after = update(jax.random.key(seed))
    touched = np.concatenate([np.ravel(np.abs(after[name] - before[name]) > 1e-4) for name in ('kernel', 'bias')])
    assert 0.3 < touched.mean() < 0.7


@pytest.mark.long
def test_a_slice_without_a_finite_norm_is_zeros():
  *_, images, _, gradient = setting('lenet')
  broken = jax.tree.map(lambda g: jnp.full_like(g, jnp.nan), gradient)
  settings = {'stddev': 0.0, 'ratio': 1.0, 'clip': 1.0}
  assert not any(np.any(x) for x in jax.tree.leaves(step_defense()(broken, images, jnp.ones(4), settings)))
