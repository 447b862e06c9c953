"""Matching of random subsets of the batch."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradleak import Client, Knowledge, Observation, attacks, models
from gradleak.attacks.matching.optimizers import lbfgs
from gradleak.attacks.matching.subsets import _KEPT, Subsets
from gradleak.core import errors, trees
from gradleak.federated import losses

pytestmark = pytest.mark.usefixtures('fast_compilation')

TOTAL = 4
IMAGES = jax.random.uniform(jax.random.key(0), (TOTAL, 8, 8, 1))
DUMMY = jax.random.uniform(jax.random.key(1), IMAGES.shape)
LABELS = jnp.arange(TOTAL)


def seen_by(**settings):
  client = Client(models.create('mlp(widths=16)', 4, init='default'), 4, **settings)
  variables = client.model.init(jax.random.key(2), IMAGES.shape[1:])
  update = jax.jit(client.local_update)(None, variables, IMAGES, LABELS).update
  labels = jax.nn.one_hot(LABELS, 4)
  return client, Observation(variables, update, labels, Knowledge(), IMAGES.shape, 4)


def square(tree):
  return float(trees.squared_norm(tree))


def chosen(subsets, count, total=TOTAL):
  """Returns the samples of a subset, from its weights."""
  size, weights = subsets.drawn(jnp.int32(count), total)
  np.testing.assert_allclose(np.unique(weights[weights > 0]), total / int(size), rtol=1e-6)
  return tuple(np.flatnonzero(weights).tolist())


@pytest.mark.long
@pytest.mark.parametrize('size', [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 3))])
def test_the_term_is_that_of_the_mean_gradient_of_the_subset(size):
  client, seen = seen_by()
  attack = attacks.dlg(tv=0.0, subset=size, subset_weight=0.25)(client)
  matching, state = attack.init.__self__, jax.jit(attack.init)(jax.random.key(3), seen)
  value, (objective, apart) = jax.jit(matching.searched)({'images': DUMMY}, state, seen)
  some = np.asarray(chosen(Subsets(size, 0.25, 0), 0))
  assert len(some) == size
  gradient = jax.jit(client.gradient)
  subset = gradient(seen.variables, DUMMY[some], LABELS[some])
  factor = (TOTAL - size) / (size * (TOTAL - 1))
  term = square(trees.subtract(subset, seen.update)) / factor
  whole = square(trees.subtract(gradient(seen.variables, DUMMY, LABELS), seen.update))
  np.testing.assert_allclose([objective, apart], whole, rtol=1e-5)
  np.testing.assert_allclose(value, 0.75 * whole + 0.25 * term, rtol=1e-5)


@pytest.mark.long
def test_a_subset_holds_all_positions_of_its_samples():
  """As many positions as samples, so that weights of samples fit the axis of positions."""

  def apply(params, images):
    return (images.reshape(len(images), -1) @ params['kernel']).reshape(-1, TOTAL, 3)

  model = models.from_functions(lambda key, shape: {'kernel': jax.random.normal(key, (64, TOTAL * 3)) / 8}, apply)
  client, targets = Client(model, 3), jax.nn.one_hot(jnp.arange(TOTAL**2).reshape(TOTAL, TOTAL) % 3, 3)
  variables = model.init(jax.random.key(2), IMAGES.shape[1:])
  gradient = jax.jit(client.gradient)
  seen = Observation(variables, gradient(variables, IMAGES, targets), targets, Knowledge(), IMAGES.shape, 3)
  attack = attacks.dlg(tv=0.0, subset=2, subset_weight=1.0)(client)
  state, matching = attack.init(jax.random.key(3), seen), attack.init.__self__
  value, _ = jax.jit(matching.searched)({'images': DUMMY}, state, seen)
  some = np.asarray(chosen(Subsets(2, 1.0, 0), 0))
  subset = gradient(variables, DUMMY[some], targets[some])
  np.testing.assert_allclose(value, 3 * square(trees.subtract(subset, seen.update)), rtol=1e-5)


@pytest.mark.slow
def test_its_expectation_is_that_of_the_docstring():
  """Over all subsets, which are drawn equally often."""
  client, seen = seen_by()
  gradient = jax.jit(client.gradient)
  each = [gradient(seen.variables, DUMMY[i : i + 1], LABELS[i : i + 1]) for i in range(TOTAL)]
  whole = gradient(seen.variables, DUMMY, LABELS)
  variance = np.mean([square(trees.subtract(one, whole)) for one in each])

  @jax.jit
  def distance(weights):
    found = client.gradient(seen.variables, DUMMY, seen.targets * weights.reshape(-1, 1))
    return trees.squared_norm(trees.subtract(found, seen.update))

  for size in (1, 2, 3):
    subsets, terms, times = Subsets(size, 1.0, 0), {}, {}
    term = jax.jit(lambda count, subsets=subsets: subsets.term(distance, jnp.float32(0), count, TOTAL))
    for turn in range(120):
      some = chosen(subsets, turn * _KEPT)
      terms[some], times[some] = float(term(jnp.int32(turn * _KEPT))), times.get(some, 0) + 1
    assert terms.keys() == set(itertools.combinations(range(TOTAL), size))
    assert max(times.values()) < 3 * min(times.values())
    factor = (TOTAL - size) / (size * (TOTAL - 1))
    expected = square(trees.subtract(whole, seen.update)) / factor + variance
    np.testing.assert_allclose(np.mean(list(terms.values())), expected, rtol=1e-4)


@pytest.mark.long
def test_subsets_are_kept_for_a_line_search_and_grow_to_the_whole_batch():
  subsets = Subsets(2, 0.5, 0)
  drawn = [chosen(subsets, count, 9) for count in range(5 * _KEPT)]
  changes = [count for count in range(1, len(drawn)) if drawn[count] != drawn[count - 1]]
  assert changes == [count for count in range(len(drawn)) if subsets.changed(jnp.int32(count))]
  grown = [len(chosen(Subsets(1, 0.5, 10 * _KEPT), count, 5)) for count in range(0, 12 * _KEPT, _KEPT)]
  assert grown == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 5, 5]
  whole = Subsets(5, 0.5, 0).term(lambda weights: jnp.float32(7), jnp.float32(3), jnp.int32(0), 5)
  assert float(whole) == 0


@pytest.mark.slow
def test_lbfgs_takes_a_point_whose_objective_is_another():
  optimizer = lbfgs(history=3)

  def moved(value, changed):
    x = jnp.float32([1.0, 2.0])
    state = optimizer.init(x)
    updates, state = optimizer.update(x, state, x, value=jnp.float32(1), changed=jnp.bool_(False))
    x = x + updates
    return x, optimizer.update(x, state, x, value=jnp.float32(value), changed=jnp.bool_(changed))[1]

  x, kept = moved(5.0, False)
  assert not np.array_equal(kept.point, x) and float(kept.value) == 1
  x, taken = moved(5.0, True)
  np.testing.assert_array_equal(taken.point, x)
  assert float(taken.value) == 5 and int(taken.pairs.stored) == 0
  assert float(moved(np.inf, True)[1].value) == 1


def steps(attack, seen, count):
  state = jax.jit(attack.init)(jax.random.key(3), seen)
  step, objectives = jax.jit(attack.step), []
  for _ in range(count):
    state, info = step(state, seen)
    objectives.append(float(info['objective']))
  return state, objectives, jax.jit(attack.reconstruct)(state, seen)


@pytest.mark.slow
def test_a_batch_of_four_is_attacked():
  client, seen = seen_by()
  made = attacks.magia(steps=4 * _KEPT, tv=0.0, subset=2, subset_growth=0)(client)
  state, objectives, found = steps(made, seen, 4 * _KEPT)
  assert int(found.diverged_step) == -1 and found.samples.shape == IMAGES.shape
  assert int(state.optimizer.pairs.stored) > _KEPT  # the line search is not lost where the subset changes
  assert float(found.objective) < 0.1 * objectives[0]
  without = steps(attacks.dlg(steps=4 * _KEPT, tv=0.0)(client), seen, 4 * _KEPT)[2]
  assert not np.array_equal(found.samples, without.samples)


@pytest.mark.slow
def test_a_weight_of_zero_is_the_attack_without_subsets():
  client, seen = seen_by()
  without, with_it = (
    steps(attacks.csdlg_fast(steps=3, seeds=2, **settings)(client), seen, 3)[1:]
    for settings in ({}, {'subset': 2, 'subset_weight': 0.0})
  )
  np.testing.assert_allclose(with_it[0], without[0], rtol=1e-6)
  np.testing.assert_allclose(with_it[1].samples, without[1].samples, atol=1e-5)
  moved = steps(attacks.csdlg_fast(steps=3, seeds=2, subset=2, subset_weight=0.5)(client), seen, 3)[2]
  assert float(jnp.max(jnp.abs(moved.samples - without[1].samples))) > 1e-3


@pytest.mark.parametrize(
  ('settings', 'given', 'message'),
  [
    ({'share': 'delta'}, {}, 'not for the steps of local training'),
    ({'loss': losses.squared_error}, {}, 'nor for other losses'),
    ({}, {'distance': 'prefix'}, 'distance=.prefix. is of one sample'),
    ({}, {'subset': 0}, 'subset is 0'),
    ({}, {'subset': None, 'subset_weight': 2.0}, 'subset_weight is 2.0'),
  ],
)
def test_what_has_no_mean_gradient_is_refused(settings, given, message):
  model = models.create('mlp(widths=4)', 4, init='default')
  client = Client(model, 4, **settings)
  with pytest.raises(errors.UsageError, match=message):
    attacks.csdlg(**{'subset': 2, **given})(client)
