"""What stands before the first dense layer, matched exactly: nothing behind it needs to be known.

For a single sample, the layer's gradient gives its input. It also gives the loss's gradient at that input, δ = W·∂b.
This holds for anything behind the layer: labels, losses, dropout or noise, such as PRECODE's (Scheliga et al. 2022).
What is left to match is the gradient of the layers before it, J(x)ᵀδ, and the input itself. Balunović et al. (2022)
break PRECODE by the input only.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from gradleak.attacks.base import unsent
from gradleak.attacks.dense import check_sees_once, first_dense_layer
from gradleak.core import errors, trees
from gradleak.core.trees import Layer, Tree
from gradleak.federated import Client
from gradleak.federated.response import first_rates
from gradleak.threat import Observation


def distance(client: Client, layers: Sequence[Layer], observation: Observation, samples: jax.Array) -> jax.Array:
  """Returns `‖J(x)ᵀδ − g‖²/‖g‖² + ‖f(x) − f‖²/‖f‖²`, where g is the update of the layers before the first dense one,
  and f its input.

  Args:
    client: the `Client` whose model is attacked.
    layers: the model's, in forward order.
    observation: the `Observation`: the gradient of one sample, or the delta of one plain step on it.
    samples: [1, H, W, C].

  Raises:
    UsageError: for more than one sample, a model without a dense layer behind others, or one that is not shared; for a
      delta that is no multiple of one gradient.
  """
  if observation.batch_shape[0] != 1:
    raise errors.UsageError(
      f'the layers before the first dense one are matched for a single sample, not for {observation.batch_shape[0]}'
    )
  if client.share == 'delta' and not _of_one_gradient(client, observation):
    raise errors.UsageError(
      'the layers before the first dense one are matched for a multiple of one gradient, and this delta is of several '
      'steps, or of an optimizer that does not step along the gradient, as adam and weight decay: choose csdlg'
    )
  kernel, bias = sent_dense_layer(client, layers, observation)
  first = next(i for i, layer in enumerate(layers) if kernel in layer.paths)
  before = [path for layer in layers[:first] for path in layer.paths]
  if not before:
    raise errors.UsageError('no layer stands before the first dense one: the attack fidel reads such a network')
  kept = unsent(client, observation)
  before = [path for path in before if path not in kept]
  shares = trees.get(observation.update, bias)
  seen = _quotient(trees.get(observation.update, kernel), shares)
  variables = observation.variables
  backward = trees.get(variables['params'], kernel) @ shares

  def total(params: Tree) -> jax.Array:
    logits, _ = client.model.apply({**variables, 'params': params}, samples, client.batch_norm == 'train', None)
    return jnp.sum(logits)

  def passed(params: Tree) -> jax.Array:
    """Returns the input of the dense layer: the sum of the logits has the same quotient as the loss."""
    gradient = jax.grad(total)(params)
    return _quotient(trees.get(gradient, kernel), trees.get(gradient, bias))

  found, pull = jax.vjp(passed, variables['params'])
  (gradient,) = pull(backward)
  pairs = [(trees.get(gradient, path), trees.get(observation.update, path)) for path in before]
  apart = sum((jnp.sum(jnp.square(ours - theirs)) for ours, theirs in pairs), jnp.float32(0))
  size = sum((jnp.sum(jnp.square(theirs)) for _, theirs in pairs), jnp.float32(0))
  return _relative(apart, size) + _relative(jnp.sum(jnp.square(found - seen)), jnp.sum(jnp.square(seen)))


def sent_dense_layer(
  client: Client, layers: Sequence[Layer], observation: Observation
) -> tuple[tuple[str, ...], tuple[str, ...]]:
  """Returns the paths of `first_dense_layer`; raises `UsageError` where its input cannot be read, or it is not sent."""
  found = first_dense_layer(layers, observation.update)
  if not unsent(client, observation).isdisjoint(found):
    name = next(layer.name for layer in layers if found[0] in layer.paths)
    raise errors.UsageError(f'the first dense layer, {name}, is frozen or private: nothing of it is sent')
  check_sees_once(client.model, observation.batch_shape[1:], *found)
  return found


def _of_one_gradient(client: Client, observation: Observation) -> bool:
  """Returns whether a delta is one multiple of the gradient: of one step, at the same rate in all tensors."""
  if client.num_steps(observation.batch_shape[0]) != 1:
    return False
  rates = first_rates(client.optimizer, observation.variables['params'])
  return rates is not None and rates[0] != 0 and np.allclose(rates, rates[0], rtol=1e-3, atol=0)


def _quotient(kernel: jax.Array, bias: jax.Array) -> jax.Array:
  """Returns the input of a layer by least squares over its neurons; zeros for one without a gradient."""
  size = jnp.sum(jnp.square(bias))
  return (kernel @ bias) / jnp.where(size > 0, size, jnp.ones_like(size))


def _relative(apart: jax.Array, size: jax.Array) -> jax.Array:
  return apart / jnp.where(size > 0, size, jnp.ones_like(size))
