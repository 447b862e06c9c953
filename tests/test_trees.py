"""Pytree arithmetic against NumPy on the flattened trees."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradleak.core import errors, trees


def tree(seed, scale=1.0):
  rng = np.random.default_rng(seed)
  draw = lambda *shape: jnp.asarray(scale * rng.standard_normal(shape), jnp.float32)  # noqa: E731
  return {'conv': {'kernel': draw(3, 4), 'bias': draw(4)}, 'scale': draw()}


def flat(tree):
  return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)])


def test_stored_leaves_become_the_tree_again_or_are_refused():
  made = tree(0)
  leaves = jax.tree.leaves(made)
  jax.tree.map(np.testing.assert_array_equal, trees.rebuilt(jax.eval_shape(lambda: made), leaves), made)
  longer = [np.zeros((7, *np.shape(leaf)[1:])) for leaf in leaves]
  assert trees.rebuilt(made, longer, leading=1)['conv']['kernel'].shape == (7, 4)
  for others in (leaves[:-1], [*leaves, leaves[0]], [leaves[1], leaves[0], *leaves[2:]], longer):
    with pytest.raises(errors.UsageError, match=r'a checkpoint does not fit.*take another folder'):
      trees.rebuilt(made, others)


def test_products_and_norms_are_those_of_the_flattened_vectors():
  a, b = tree(0), tree(1)
  x, y = flat(a), flat(b)
  np.testing.assert_allclose(trees.inner_product(a, b), x @ y, rtol=1e-5)
  np.testing.assert_allclose(trees.squared_norm(a), x @ x, rtol=1e-6)
  np.testing.assert_allclose(trees.norm(a), np.linalg.norm(x), rtol=1e-6)
  np.testing.assert_allclose(trees.cosine(a, b), x @ y / np.linalg.norm(x) / np.linalg.norm(y), rtol=1e-5)
  np.testing.assert_allclose(flat(trees.subtract(a, b)), x - y, rtol=1e-5)


def test_the_magnitude_has_no_slope_at_zero():
  """Forward, in reverse, of second order and in lanes; PyTorch's derivatives of |x|, x² |x| and |x|²."""
  x = jnp.asarray([-2.0, 0.0, 3.0])
  sign = np.sign(x)
  np.testing.assert_array_equal(trees.magnitude(x), np.abs(x))
  np.testing.assert_array_equal(trees.magnitude(jnp.asarray([-2, 0])), [2, 0])
  for derivative in (jax.grad, jax.jacfwd, jax.jacrev):
    np.testing.assert_array_equal(jax.jit(jax.vmap(derivative(trees.magnitude)))(x), sign)
  second = jax.vmap(jax.grad(jax.grad(lambda y: y**2 * trees.magnitude(y))))(x)
  np.testing.assert_array_equal(second, 6 * np.abs(x))
  np.testing.assert_array_equal(jax.vmap(jax.jacfwd(jax.grad(lambda y: trees.magnitude(y) ** 2)))(x), 2 * sign**2)
  # As gradient matching nests them: the derivative by a weight, and that of it by the input.
  nested = jax.grad(lambda y: jax.grad(lambda w: w * trees.magnitude(w * y))(jnp.float32(1)))
  np.testing.assert_array_equal(jax.vmap(nested)(x), 2 * sign)


@pytest.mark.parametrize('count', [1, 99, 100, 150])
def test_the_total_of_few_and_of_many_terms(count):
  terms = np.random.default_rng(count).standard_normal((count, 3)).astype(np.float32)
  np.testing.assert_allclose(trees.total(jnp.asarray(terms)), terms.sum(axis=0, dtype=np.float64), atol=1e-5)
  gradient = jax.grad(lambda x: jnp.vdot(trees.total(x), jnp.arange(3.0)))(jnp.asarray(terms))
  np.testing.assert_array_equal(gradient, np.tile([0.0, 1.0, 2.0], (count, 1)))


@pytest.mark.slow
def test_a_sum_over_many_tensors_is_not_repeated_in_the_compiled_program(monkeypatch):
  leaves = [jnp.ones(5) for _ in range(100)]

  def length():
    program = jax.jit(jax.grad(lambda a, b: trees.inner_product(a, b) ** 2)).lower(leaves, leaves).compile()
    return program.as_text().count('\n')

  running = length()
  monkeypatch.setattr(trees, '_MANY', 101)
  assert length() > 4 * running


def test_sums_of_half_precision_leaves_are_float32():
  ones = {'a': jnp.ones(4096, jnp.bfloat16)}  # in bfloat16 a running sum of ones stops at 256
  assert trees.inner_product(ones, ones).dtype == jnp.float32
  assert trees.squared_norm(ones) == 4096


@pytest.mark.parametrize('scale', [1e-9, 1e-11, 1.0, 1e9])
def test_cosine_does_not_depend_on_scale(scale):
  # Squared norms of a well-trained network's gradients are small enough that their product is zero in float32.
  expected = flat(tree(0)) @ flat(tree(1)) / np.linalg.norm(flat(tree(0))) / np.linalg.norm(flat(tree(1)))
  value, slope = jax.value_and_grad(trees.cosine)(tree(0, scale), tree(1, scale))
  np.testing.assert_allclose(value, expected, rtol=1e-5)
  np.testing.assert_allclose(scale * flat(slope), flat(jax.grad(trees.cosine)(tree(0), tree(1))), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize('scale', [1e-9, 1e-11, 1.0, 1e9])
def test_the_cosine_distance_is_one_minus_the_cosine_at_every_scale(scale):
  a, b = flat(tree(0)), flat(tree(1))
  cosine, length = a @ b / np.linalg.norm(a) / np.linalg.norm(b), np.linalg.norm(a)
  value, slopes = jax.value_and_grad(trees.cosine_distance, (0, 1))(tree(0, scale), tree(1, scale))
  np.testing.assert_allclose(value, 1 - cosine, rtol=1e-5)
  expected = (cosine * a / length - b / np.linalg.norm(b)) / length
  np.testing.assert_allclose(scale * flat(slopes[0]), expected, rtol=1e-4, atol=1e-7)
  expected = (cosine * b / np.linalg.norm(b) - a / length) / np.linalg.norm(b)
  np.testing.assert_allclose(scale * flat(slopes[1]), expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize('angle', [1e-2, 1e-4, 1e-6, 1e-8])
def test_the_cosine_distance_of_a_small_angle_has_all_its_digits(angle):
  """One minus a float32 cosine comes in steps of 6e-8."""
  a, b = {'x': jnp.asarray([3.0, 3 * angle])}, {'x': jnp.asarray([1.0, 0.0])}
  value, slope = jax.value_and_grad(trees.cosine_distance)(a, b)
  np.testing.assert_allclose(value, angle**2 / 2, rtol=1e-3)
  np.testing.assert_allclose(slope['x'][1], angle / 3, rtol=1e-3)


def test_zero_trees_have_no_nan_in_value_or_gradient():
  a, zero = tree(0), trees.zeros_like(tree(0))
  assert trees.norm(zero) == 0
  assert trees.cosine(a, zero) == trees.cosine(zero, a) == trees.cosine(zero, zero) == 0
  np.testing.assert_array_equal(flat(jax.grad(trees.norm)(zero)), 0)
  assert np.isfinite(flat(jax.grad(trees.cosine)(zero, a))).all()
  for pair in ((a, zero), (zero, a), (zero, zero)):
    value, slope = jax.value_and_grad(trees.cosine_distance)(*pair)
    assert value == 1 and not flat(slope).any()


def test_a_length_beyond_float32_has_no_direction():
  assert np.isnan(trees.cosine_distance(tree(0, 1e25), tree(1)))


def test_gradient_of_the_norm_is_the_unit_vector():
  np.testing.assert_allclose(flat(jax.grad(trees.norm)(tree(0))), flat(tree(0)) / np.linalg.norm(flat(tree(0))), 1e-5)


def test_safe_sqrt():
  np.testing.assert_array_equal(trees.safe_sqrt(jnp.asarray([0.0, 4.0, 0.25])), [0, 2, 0.5])
  np.testing.assert_array_equal(jax.vmap(jax.grad(trees.safe_sqrt))(jnp.asarray([0.0, 4.0])), [0, 0.25])
  assert np.isnan(trees.safe_sqrt(jnp.asarray(jnp.nan))) and np.isnan(trees.norm({'w': jnp.asarray([1.0, jnp.nan])}))


def test_take_and_concatenate_undo_each_other():
  rows = [jax.tree.map(lambda x, i=i: x.reshape(1, *x.shape) + i, tree(0)) for i in range(3)]
  joined = trees.concatenate(rows)
  assert joined['conv']['kernel'].shape == (3, 3, 4)
  np.testing.assert_array_equal(flat(trees.take(joined, 2)), flat(rows[2]))


def test_get_walks_nested_dicts():
  a = tree(0)
  assert trees.get(a, ('conv', 'bias')) is a['conv']['bias']
  assert trees.get(a, ()) is a
  with pytest.raises(KeyError, match='weight'):
    trees.get(a, ('conv', 'weight'))


@pytest.mark.long
@pytest.mark.parametrize('sample', [jax.random.normal, jax.random.laplace])
def test_every_leaf_is_drawn_by_a_key_of_its_own_however_many_share_a_shape(sample):
  key, shapes = jax.random.key(5), [(3, 4), (4,), (), (4,), (3, 4), (4,)]
  leaves = [jax.ShapeDtypeStruct(shape, jnp.bfloat16 if i == 3 else jnp.float32) for i, shape in enumerate(shapes)]
  drawn = trees.draws(sample, key, leaves)
  for index, (leaf, one) in enumerate(zip(leaves, drawn, strict=True)):
    expected = sample(jax.random.fold_in(key, index), leaf.shape, jnp.float32)  # half precision has too few values
    np.testing.assert_array_equal(one, expected)
    assert one.dtype == jnp.float32


def test_norms_of_half_precision_are_not_lost():
  small, large = (jnp.full(10_000, value, jnp.float16) for value in (1e-4, 300.0))
  np.testing.assert_allclose(trees.norm([small]), 1e-2, rtol=1e-3)
  np.testing.assert_allclose(trees.norm([large]), 3e4, rtol=1e-3)
