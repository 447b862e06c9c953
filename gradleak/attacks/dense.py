"""What the gradient of a dense layer gives away without any optimisation."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from gradleak import errors, trees
from gradleak.trees import Layer, Tree


def first_dense_input(kernel_gradient: jax.Array, bias_gradient: jax.Array) -> jax.Array:
  """Returns the input of a dense layer with a bias, from the gradient of one sample.

  For s = xW + b, ∂ℓ/∂W = x (∂ℓ/∂s)ᵀ and ∂ℓ/∂b = ∂ℓ/∂s, so that x = (∂ℓ/∂W)_j / (∂ℓ/∂b)_j for any neuron j whose bias
  gradient is not zero (Geiping et al. 2020, proposition 3.1). The neuron with the largest bias gradient is used, since
  rounding matters least there. This holds whatever happens behind the layer: Balunović et al. (2022, "Bayesian
  framework for gradient leakage") break PRECODE's random bottleneck in this way, whose encoder is such a layer.

  Args:
    kernel_gradient: [in, out].
    bias_gradient: [out].

  Returns:
    The input [in]; for the gradient of a batch a mixture of its inputs, weighted by their shares in the neuron. Zeros
    where the whole bias gradient is zero.
  """
  neuron = jnp.argmax(jnp.abs(bias_gradient))
  weight, bias = kernel_gradient[:, neuron], bias_gradient[neuron]
  known = bias != 0
  return jnp.where(known, weight / jnp.where(known, bias, jnp.ones_like(bias)), jnp.zeros_like(weight))


def first_dense_layer(layers: Sequence[Layer], update: Tree) -> tuple[tuple[str, ...], tuple[str, ...]]:
  """Returns the paths of the (kernel, bias) of the first dense layer with a bias.

  Args:
    layers: the model's, in forward order.
    update: a tree shaped like its parameters.

  Raises:
    UsageError: if there is none.
  """
  for layer in layers:
    leaves = {path: trees.get(update, path) for path in layer.paths}
    kernels = [path for path, leaf in leaves.items() if leaf.ndim == 2]
    biases = [path for path, leaf in leaves.items() if leaf.ndim == 1]
    if len(kernels) == 1 and len(biases) == 1 and leaves[kernels[0]].shape[1] == leaves[biases[0]].shape[0]:
      return kernels[0], biases[0]
  raise errors.UsageError('no dense layer with a bias was found, of which the input could be read from the gradient')
