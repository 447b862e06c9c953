"""Operations of traced programs, counted by hand beside."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from gradleak.models import convolution
from gradleak.models.operations import Operations, counted


def of(function, *args, given=None):
  return counted(jax.make_jaxpr(function)(*args), given)


def test_matrix_products_and_entries():
  x, y = jnp.ones((3, 4)), jnp.ones((4, 5))
  found = of(lambda x, y: x @ y + 1, x, y)
  assert (found.products, found.entries, found.executed, found.equations) == (2 * 3 * 4 * 5, 30, 2, 2)
  batched = of(lambda x, y: jnp.einsum('bij,bjk->bik', x, y), jnp.ones((2, 3, 4)), jnp.ones((2, 4, 5)))
  assert batched.products == 2 * 2 * 3 * 4 * 5


@pytest.mark.parametrize('stride', [1, 2])
@pytest.mark.parametrize('formulation', convolution.FORMULATIONS)
def test_formulations_of_a_convolution_count_alike(formulation, stride):
  """Its gradients in images and kernel are a product each, as large as its own."""
  images, kernel = jnp.ones((2, 12, 12, 16)), jnp.ones((7, 25 * 16))
  layer = convolution.FORMULATIONS[formulation]

  def run(images, kernel):
    return layer(images, kernel, 5, stride, 2)

  def both(images, kernel):
    made, back = jax.vjp(run, images, kernel)
    return back(made)

  side = 12 // stride
  product = 2 * (2 * side * side * 7) * (25 * 16)
  assert of(run, images, kernel).products == product
  assert of(both, images, kernel).products == 3 * product


def test_loops_turn_as_often_as_their_bounds_say():
  def run(x, first, last):
    return jax.lax.fori_loop(first, last, lambda i, x: x @ x, x)

  x, product = jnp.ones((4, 4)), 128
  assert of(run, x, 0, 5, given=[None, np.int32(2), np.int32(9)]).products == 7 * product
  assert of(run, x, 0, 5, given=[None, np.int32(9), np.int32(2)]).products == 0
  unknown = of(run, x, 0, 5, given=[None, np.int32(2), None])
  assert (unknown.products, unknown.open_loops) == (product, 1)
  nested = of(lambda x, n: run(run(x, 0, 2 * n + 1), n, jnp.minimum(n + 4, 6)), x, 3, given=[None, np.int32(3)])
  assert (nested.products, nested.open_loops) == ((7 + 3) * product, 0)
  scanned = of(lambda x: jax.lax.scan(lambda c, _: (run(c, 0, 3), None), x, None, 4)[0], x)
  assert scanned.products == 12 * product


def test_a_loop_whose_bound_moves_or_whose_test_is_another_is_open():
  x = jnp.ones((4, 4))

  def moving(x):
    return jax.lax.while_loop(lambda c: c[0] < c[1], lambda c: (c[0] + 1, c[1] - 1, c[2] @ c[2]), (0, 8, x))

  def until(x):
    return jax.lax.while_loop(lambda x: jnp.sum(x) < 9, lambda x: x @ x, x)

  def back(x):
    return jax.lax.while_loop(lambda c: c[0] < 8, lambda c: (c[0] - 1, c[1] @ c[1]), (0, x))

  for function in (moving, until, back):
    assert of(function, x).open_loops == 1 and of(function, x).products == 128


def test_the_longest_branch_counts_where_none_is_chosen():
  x = jnp.ones((4, 4))

  def run(which, x):
    return jax.lax.switch(which, [lambda x: x + 1, lambda x: x @ x, lambda x: x @ x @ x], x)

  assert of(run, 0, x).products == 256
  chosen = [of(run, 0, x, given=[np.int32(which), None]) for which in range(3)]
  assert [one.products for one in chosen] == [0, 128, 256] and len({one.equations for one in chosen}) == 1


def test_devices_share_what_is_mapped_over_them():
  mesh = jax.make_mesh((2,), ('lanes',), axis_types=(jax.sharding.AxisType.Auto,))

  def local(counts, x):
    return jax.lax.fori_loop(0, counts[0], lambda i, x: x @ x, x)

  shared = jax.shard_map(local, mesh=mesh, in_specs=(P('lanes'), P()), out_specs=P('lanes'), check_vma=False)
  given = [np.int32([3, 4]), None]
  assert of(shared, np.int32([3, 4]), jnp.ones((4, 4)), given=given).products == 7 * 128


def test_functions_count_more_and_layouts_nothing():
  x = jnp.ones((4, 5))
  assert of(jnp.exp, x).entries == 10 * of(jnp.negative, x).entries == 200
  assert of(lambda x: x.reshape(20)[None], x).entries == 0 == of(lambda x: x.reshape(20), x).executed
  assert of(lambda x: jnp.sum(x, axis=0), x).entries == 20
  assert of(lambda x: jax.lax.sort(x.reshape(-1)[:16]), x).entries == 16 + 16 * 4
  written = of(lambda x: jax.lax.dynamic_update_slice(x, jnp.ones((1, 2)), (0, 0)), jnp.ones((100, 100)))
  assert written.entries == 2
  solved = of(jax.lax.linalg.cholesky, jnp.eye(6))
  assert solved.products == 2 * 36 * 6


def test_memory_is_that_of_what_is_alive():
  """A chain holds its input and two results, and a sum all of its terms."""
  x = jnp.ones(1000)

  def chain(x):
    for _ in range(5):
      x = jnp.sin(x)
    return x

  def kept(x):
    parts = [jnp.sin(x * (i + 1)) for i in range(5)]
    return sum(parts)

  assert of(chain, x).held == 3 * 4000
  assert 6 * 4000 <= of(kept, x).held <= 8 * 4000
  within = of(lambda x: jax.jit(kept)(x) + 1, x).held
  assert 6 * 4000 <= within <= 8 * 4000


def test_sums_and_multiples():
  one, other = Operations(1, 2, 3, 4, 5, 6), Operations(10, 20, 30, 40, 50, 60)
  assert one + other == Operations(11, 22, 33, 44, 50, 66)
  assert other.times(3, 2) == Operations(30, 60, 45, 40, 50, 60)
  assert one.called() + one.text() == one
