"""Settings of local training, against a loop of optax written out here."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradleak as gl
from gradleak import ClientSettings, UsageError
from gradleak.federated import cross_entropy

LOCAL = {'share': 'delta', 'local_epochs': 2, 'local_batch_size': 4, 'learning_rate': 0.05}


def trained(linear, optimizer, clip=np.inf):
  """Returns θ_T − θ_0 of two epochs in batches of four."""
  params = start = linear.variables['params']
  state = optimizer.init(params)

  def loss(params, images, labels):
    logits, _ = linear.client.model.apply({'params': params}, images, True, None)
    return jnp.mean(cross_entropy(logits, jax.nn.one_hot(labels, 10)))

  for _ in range(2):
    for at in (0, 4):
      gradient = jax.grad(loss)(params, linear.images[at : at + 4], linear.labels[at : at + 4])
      factor = np.float32(min(1.0, clip / float(optax.tree.norm(gradient))))
      gradient = optax.tree.scale(factor, gradient)
      updates, state = optimizer.update(gradient, state, params)
      params = optax.apply_updates(params, updates)
  return jax.tree.map(lambda a, b: np.asarray(a - b), params, start)


@pytest.mark.parametrize(
  ('given', 'optimizer', 'clip'),
  [
    ({'optimizer': 'adam'}, lambda: optax.adam(0.05), np.inf),
    ({'max_norm': 0.3}, lambda: optax.sgd(0.05), 0.3),
    ({'optimizer': 'adam', 'max_norm': 0.3}, lambda: optax.adam(0.05), 0.3),
  ],
)
def test_local_training_is_that_of_optax(linear, given, optimizer, clip):
  with jax.numpy_dtype_promotion('standard'), jax.numpy_rank_promotion('allow'):
    expected = trained(linear, optimizer(), clip)
  client = ClientSettings(**LOCAL, **given).client(linear.client.model, 10)
  found = client.local_update(None, linear.variables, linear.images, linear.labels).update
  for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(ours, theirs, atol=2e-5)


def test_an_attacker_can_differentiate_through_adam(linear):
  """Also where an entry of the gradient is zero, as at black pixels."""
  client = ClientSettings(**LOCAL, optimizer='adam').client(linear.client.model, 10)
  images = linear.images * (linear.images > 0.5)
  labels = jax.nn.one_hot(linear.labels, 10)

  def size(images):
    return sum(
      jnp.sum(jnp.square(x))
      for x in jax.tree.leaves(client.local_update(None, linear.variables, images, labels).update)
    )

  assert np.isfinite(jax.jit(jax.grad(size))(jnp.asarray(images))).all()


def test_they_are_recorded_where_they_are_used(linear):
  assert ClientSettings(**LOCAL, optimizer='adam', max_norm=1.0).recorded()['max_norm'] == 1
  assert {'optimizer', 'max_norm'}.isdisjoint(ClientSettings(**LOCAL).recorded())


@pytest.mark.parametrize(
  ('given', 'message'),
  [
    ({'optimizer': 'adam'}, "optimizer is 'adam', and a client that shares its gradient"),
    ({'max_norm': 1.0}, 'max_norm is 1.0, and a client that shares its gradient'),
    ({**LOCAL, 'optimizer': 'adam', 'momentum': 0.9}, 'adam has its own'),
    ({**LOCAL, 'optimizer': 'adem'}, "did you mean 'adam'"),
    ({**LOCAL, 'max_norm': 0.0}, 'max_norm is 0.0'),
  ],
)
def test_what_cannot_be_used_is_refused(linear, given, message):
  with pytest.raises(UsageError, match=message):
    gl.scenario(linear.client.model, linear.images, linear.labels, variables=linear.variables, **given)
