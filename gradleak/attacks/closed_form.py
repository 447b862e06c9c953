"""What a gradient gives away without any optimisation."""

import jax.numpy as jnp

from gradleak import errors, trees


def first_dense_input(kernel_gradient, bias_gradient):
  """Returns the input of a dense layer with a bias, from the gradient of one sample.

  For s = xW + b, ∂ℓ/∂W = x (∂ℓ/∂s)ᵀ and ∂ℓ/∂b = ∂ℓ/∂s, so that x = (∂ℓ/∂W)_j / (∂ℓ/∂b)_j for any neuron j whose bias
  gradient is not zero (Geiping et al. 2020, proposition 3.1). The neuron with the largest one is taken, where rounding
  matters least. It holds whatever happens behind the layer: this is how Balunović et al. (2022, "Bayesian framework
  for gradient leakage") take PRECODE's random bottleneck apart, whose encoder is such a layer.

  Args:
    kernel_gradient: [in, out].
    bias_gradient: [out].

  Returns:
    The input [in]; for the gradient of a batch a mixture of its inputs, weighted by their shares in the neuron. Zeros
    where the whole bias gradient is zero: such a layer gives nothing away.
  """
  neuron = jnp.argmax(jnp.abs(bias_gradient))
  weight, bias = kernel_gradient[:, neuron], bias_gradient[neuron]
  known = bias != 0
  return jnp.where(known, weight / jnp.where(known, bias, jnp.ones_like(bias)), jnp.zeros_like(weight))


def first_dense_layer(layers, update):
  """Returns the paths of the (kernel, bias) of the first dense layer with a bias.

  Args:
    layers: the model's, a sequence of `Layer`.
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
