import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.optimize

from gradleak.attacks.matching.optimizers import DECAYS, FIRST_ORDER, GRADIENTS, first_order, lbfgs
from gradleak.core import errors


def rosenbrock(x):
  return jnp.sum(100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2)


@functools.partial(jax.jit, static_argnums=(0, 1, 3))  # eagerly, each operation would be compiled by itself
def minimise(function, optimizer, x, steps):
  """Returns the values at all evaluated points, and the best point."""

  def step(carry, _):
    x, state, best_x, best = carry
    value, gradient = jax.value_and_grad(function)(x)
    best_x, best = jnp.where(value < best, x, best_x), jnp.minimum(value, best)
    updates, state = optimizer.update(gradient, state, x, value=value)
    return (optax.apply_updates(x, updates), state, best_x, best), value

  start = (x, optimizer.init(x), x, jnp.float32(jnp.inf))
  (_, state, best_x, _), values = jax.lax.scan(step, start, length=steps)
  return values, best_x, state


def test_lbfgs_solves_what_scipys_solves():
  x = jnp.asarray([-1.2, 1.0, -0.5, 0.8], jnp.float32)
  _, best, _ = minimise(rosenbrock, lbfgs(history=10), x, 120)
  reference = scipy.optimize.minimize(scipy.optimize.rosen, x, jac=scipy.optimize.rosen_der, method='BFGS')
  assert float(rosenbrock(best)) < 1e-6
  np.testing.assert_allclose(best, reference.x, atol=1e-2)


def test_lbfgs_needs_about_as_many_evaluations_as_scipys():
  rng = np.random.default_rng(0)
  q, _ = np.linalg.qr(rng.normal(size=(30, 30)))
  matrix = (q * np.logspace(0, 3, 30)) @ q.T

  def quadratic(x):
    return 0.5 * jnp.vdot(x, jnp.asarray(matrix, jnp.float32) @ x)

  x = rng.normal(size=30)
  reference = scipy.optimize.minimize(
    lambda x: 0.5 * x @ matrix @ x,
    x,
    jac=lambda x: matrix @ x,
    method='L-BFGS-B',
    options={'maxcor': 30, 'ftol': 1e-12},
  )
  values, _, _ = minimise(quadratic, lbfgs(history=30), jnp.asarray(x, jnp.float32), 2 * reference.nfev)
  assert float(values.min()) < 1e-5 * float(values[0])


def stepping(function, optimizer):
  """Returns (x, state) -> gradient at x, next x, next state."""

  @jax.jit
  def step(x, state):
    value, gradient = jax.value_and_grad(function)(x)
    updates, state = optimizer.update(gradient, state, x, value=value)
    return gradient, optax.apply_updates(x, updates), state

  return step


def test_compact_form_is_the_two_loop_recursion():
  """Direction after k accepted steps, against the textbook recursion in NumPy (Nocedal and Wright, algorithm 7.4)."""
  history, size, steps = 3, 5, 6
  optimizer = lbfgs(history=history)
  rng = np.random.default_rng(1)
  factor = rng.normal(size=(size, size))
  matrix = jnp.asarray(factor @ factor.T + np.eye(size), jnp.float32)

  def quadratic(x):
    return 0.5 * jnp.vdot(x, matrix @ x)

  x = jnp.asarray(rng.normal(size=size), jnp.float32)
  state, pairs, last, step = optimizer.init(x), [], None, stepping(quadratic, optimizer)
  for _ in range(steps):
    gradient, after, state = step(x, state)
    if bool(jnp.array_equal(state.point, x)):  # accepted
      if last is not None:
        pairs.append((np.asarray(x - last[0], np.float64), np.asarray(gradient - last[1], np.float64)))
      last = (x, gradient)
    x = after
  q, alphas = np.asarray(last[1], np.float64), []
  for s, y in reversed(pairs[-history:]):
    alphas.append(s @ q / (y @ s))
    q = q - alphas[-1] * y
  s, y = pairs[-1]
  r = (s @ y) / (y @ y) * q
  for (s, y), alpha in zip(pairs[-history:], reversed(alphas), strict=True):
    r = r + s * (alpha - y @ r / (y @ s))
  assert len(pairs) > history  # the ring has wrapped
  np.testing.assert_allclose(state.direction, -r, rtol=2e-3, atol=1e-5)


def test_lbfgs_never_accepts_a_rise_and_survives_points_that_are_not_finite():
  def cliff(x):  # beyond 2, the value is NaN
    return jnp.sum(jnp.where(x > 2, jnp.nan, (x - 1.9) ** 2)) + jnp.sum(jnp.cos(3 * x))

  optimizer = lbfgs(history=5)
  x = jnp.asarray([-2.0, 1.0, 0.3], jnp.float32)
  state, accepted, step = optimizer.init(x), [], stepping(cliff, optimizer)
  for _ in range(60):
    _, x, state = step(x, state)
    accepted.append(float(state.value))
    assert np.isfinite(np.asarray(x)).all()
  assert np.isfinite(accepted).all()
  assert (np.diff(accepted) <= 2e-6 * np.abs(accepted[:-1])).all()
  assert accepted[-1] < accepted[0] - 1


@pytest.mark.parametrize('scale', [1e3, 1e8, 1e10])
def test_lbfgs_descends_along_gradients_of_any_size(scale):
  """The first step is one over the gradient's l1-norm; where that is below 1e-7, it is not too short yet."""
  steep = functools.partial(lambda scale, x: 0.5 * scale * jnp.sum((x - 0.3) ** 2), scale)
  values, _, _ = minimise(steep, lbfgs(history=5), jnp.zeros(2), 40)
  assert float(values.min()) < 1e-6 * float(values[0])


@pytest.mark.long
def test_lbfgs_lanes_are_independent():
  starts = jnp.asarray([[-1.2, 1.0], [0.5, 0.5], [2.0, -1.0]], jnp.float32)
  optimizer = lbfgs(history=5)
  many = jax.jit(jax.vmap(lambda x: minimise(rosenbrock, optimizer, x, 40)[1]))
  together, alone = many(starts), jnp.stack([minimise(rosenbrock, optimizer, x, 40)[1] for x in starts])
  np.testing.assert_allclose([rosenbrock(x) for x in together], [rosenbrock(x) for x in alone], atol=1e-3)
  poisoned = many(starts.at[1].set(jnp.nan))
  np.testing.assert_array_equal(poisoned[jnp.asarray([0, 2])], together[jnp.asarray([0, 2])])


@pytest.mark.parametrize('name', FIRST_ORDER)
def test_first_order_descends(name):
  values, _, _ = minimise(
    lambda x: jnp.sum(x**2), first_order(name, 0.05, 100), jnp.asarray([1.0, -2.0], jnp.float32), 100
  )
  assert float(values[-1]) < 0.05 * float(values[0])


def test_decays_are_the_published_ones():
  fractions = [0.0, 0.374, 0.376, 0.624, 0.626, 0.874, 0.876]
  step = [float(DECAYS['step'](jnp.float32(t))) for t in fractions]
  np.testing.assert_allclose(step, [1, 1, 0.1, 0.1, 0.01, 0.01, 0.001], rtol=1e-5)
  cosine = [float(DECAYS['cosine'](jnp.float32(t))) for t in (0, 0.5, 1)]
  warm = [float(DECAYS['warm'](jnp.float32(t))) for t in (0, 0.025, 0.05, 0.25, 0.625, 1, 1.1)]
  assert warm == pytest.approx([0, 0.5, 1, 1, 0.5, 0, 0], abs=1e-6)
  np.testing.assert_allclose(cosine, [1, 0.5, 0], atol=1e-6)


def test_learning_rate_decays_along_the_steps_and_may_be_traced():
  @functools.partial(jax.jit)
  def moves(rate):
    optimizer = first_order('sgd', rate, 8, gradient='sign', decay='step')
    x = jnp.zeros(2, jnp.float32)
    _, moved = jax.lax.scan(
      lambda state, _: (lambda u: (u[1], u[0]))(optimizer.update(jnp.asarray([3.0, -0.1], jnp.float32), state, x)),
      optimizer.init(x),
      length=8,
    )
    return moved

  expected = [1, 1, 1, 0.1, 0.1, 0.01, 0.01, 0.001]
  np.testing.assert_allclose(moves(jnp.float32(0.5)), np.outer(expected, [-0.5, 0.5]), rtol=1e-4)


def test_gradient_modifications():
  g = jnp.asarray([[4.0, -1.0], [0.0, -3.0]], jnp.float32)
  np.testing.assert_array_equal(GRADIENTS['sign'](g), [[1, -1], [0, -1]])
  np.testing.assert_allclose(GRADIENTS['soft_sign'](g), [[4 / 6, -1 / 3], [0, -3 / 5]], rtol=1e-6)
  assert np.isfinite(GRADIENTS['soft_sign'](jnp.zeros(3))).all()


@pytest.mark.parametrize('bad', [{'name': 'adamm'}, {'gradient': 'signed'}, {'decay': 'linear'}])
def test_unknown_names_list_the_valid_ones(bad):
  with pytest.raises(errors.UsageError, match='valid: '):
    first_order(**{'name': 'adam', 'learning_rate': 0.1, 'num_steps': 3, **bad})
