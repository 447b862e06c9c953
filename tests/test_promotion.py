"""`promoting` runs third-party optimisers under standard rules and nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gradleak.core.promotion import promoting

PARAMS = {'w': jnp.asarray([1.0, -2.0])}
GRADIENT = {'w': jnp.asarray([0.5, -0.1])}


def descend(transformation, steps=3):
  state = transformation.init(PARAMS)
  for _ in range(steps):
    updates, state = transformation.update(GRADIENT, state, PARAMS)
  return updates['w']


def test_adam_fails_under_strict_settings_but_not_with_promoting():
  with pytest.raises(Exception, match='promotion'):
    descend(optax.adam(0.1))
  # On a constant gradient Adam's corrected moments are constant: updates are -rate·sign(gradient).
  np.testing.assert_allclose(descend(promoting(optax.adam(0.1))), [-0.1, 0.1], rtol=1e-4)


def test_extra_arguments_pass():
  seen = []

  def update(updates, state, params=None, *, key=None, **extra):
    seen.append((key, extra))
    return updates, state

  watched = promoting(optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update))
  watched.update(GRADIENT, watched.init(PARAMS), PARAMS, key='a key', batch='a batch')
  promoting(optax.sgd(0.1)).update(GRADIENT, optax.sgd(0.1).init(PARAMS), PARAMS, key='ignored')
  assert seen == [('a key', {'batch': 'a batch'})]


def test_strict_settings_hold_again_afterwards():
  descend(promoting(optax.adam(0.1)))
  with pytest.raises(Exception, match='promotion'):
    jnp.ones(2, jnp.float32) + jnp.ones(2, jnp.int32)
  with pytest.raises(ValueError, match='rank'):
    jnp.ones((2, 2)) + jnp.ones(2)


def test_it_works_inside_scan():
  transformation = promoting(optax.adam(0.1))
  state = jax.tree.map(lambda x: jnp.asarray(x, x.dtype), transformation.init(PARAMS))
  step = lambda state, _: transformation.update(GRADIENT, state, PARAMS)[::-1]  # noqa: E731
  _, updates = jax.lax.scan(step, state, length=3)
  np.testing.assert_allclose(updates['w'], [[-0.1, 0.1]] * 3, rtol=1e-4)
