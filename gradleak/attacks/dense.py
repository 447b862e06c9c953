"""What the gradient of a dense layer gives away without any optimisation."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gradleak.core import errors, trees
from gradleak.core.reuse import reusable
from gradleak.core.trees import Layer, Tree
from gradleak.models import programs
from gradleak.models.model import Model
from gradleak.threat import Observation

_NEAR = 1e-3  # relative, of what a network makes of a value; rounding of float32 is about 1e-6
_ROUNDED = 4.0  # the same, in units of the eps of the coarsest floats that a network computes in
_SILENT = 6  # initial networks without a gradient at any probe, after which the model's word is taken
_TRIES = 32  # the same of which two have a gradient at each probe; with fewer, it sees no values but differences
_SHIFTED = 0.05  # the same of other statistics, which move a value by more; bfloat16 rounds to 0.4 %


def first_dense_input(kernel_gradient: jax.Array, bias_gradient: jax.Array) -> jax.Array:
  """Returns the input of a dense layer with a bias, from the gradient of one sample.

  For s = xW + b, `∂ℓ/∂W = x (∂ℓ/∂s)ᵀ` and `∂ℓ/∂b = ∂ℓ/∂s`. Hence `x = (∂ℓ/∂W)_j / (∂ℓ/∂b)_j` for any neuron j whose
  bias gradient is not zero (Geiping et al. 2020, proposition 3.1). The neuron with the largest bias gradient is used,
  since rounding matters least there. This holds for any network behind the layer. Balunović et al. (2022, "Bayesian
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


def in_pixels(model: Model, observation: Observation) -> Observation:
  """Returns the observation of an equal network that does not normalise its pixels.

  A first dense layer with the kernel W and bias b behind (x − μ)/σ is a layer on x itself. Its kernel is W/σ, and its
  bias is b − (μ/σ)W. Where the gradients of the former are G and g, those of the latter are σG + μg and g. Closed forms
  then read pixels in [0, 1]. A normalisation that the network holds counts as one that it declares, see `entry`.

  Args:
    model: of the client.
    observation: of it; it is returned as it is where the model normalises nothing, or where its first dense layer does
      not take the image.
  """
  _, *image = observation.batch_shape
  found = None
  if model.layers is not None:
    found = next((_dense(layer, observation.update) for layer in model.layers(tuple(image))), None)
  if found is None or trees.get(observation.update, found[0]).shape[0] != math.prod(image):
    return observation
  normalised = entry(model, tuple(image), *found).normalised
  if normalised is None:
    return observation
  (kernel, bias), (mean, std) = found, (values.reshape(-1, 1) for values in normalised)

  def changed(tree: Tree, made: Callable[[Any, Any], tuple[Any, Any]]) -> Tree:
    new = dict(zip((kernel, bias), made(trees.get(tree, kernel), trees.get(tree, bias)), strict=True))
    return jax.tree_util.tree_map_with_path(lambda path, leaf: new.get(trees.path_names(path), leaf), tree)

  update = changed(observation.update, lambda w, b: (std * w + mean * b.reshape(1, -1), b))
  params = changed(observation.variables['params'], lambda w, b: (w / std, b - (mean / std)[:, 0] @ w))
  return dataclasses.replace(observation, update=update, variables={**observation.variables, 'params': params})


class Entry(NamedTuple):
  """What a network passes on to its first dense layer, found on initial networks.

  Attributes:
    in_order: whether each input of the layer depends on the value of the sample in its place, and on no other.
    normalised: (μ, σ) of each value, float32 [in] each, where the inputs are (x − μ)/σ; None where they are x, or no
      such map whatever the parameters are.
    fixed: whether the inputs are the same whatever the parameters and statistics are, unlike behind a BatchNorm.
  """

  in_order: bool
  normalised: tuple[np.ndarray, np.ndarray] | None
  fixed: bool = True


@reusable(32)
def entry(model: Model, shape: tuple[int, ...], kernel: tuple[str, ...], bias: tuple[str, ...]) -> Entry:
  """Returns the `Entry` of a network, see `probed`.

  Args:
    model: the network.
    shape: of one sample.
    kernel, bias: paths of the first dense layer's parameters.
  """
  return probed(model, shape, lambda given: first_dense_input(trees.get(given, kernel), trees.get(given, bias)))


@reusable(32)
def sees_once(model: Model, shape: tuple[int, ...], kernel: tuple[str, ...], bias: tuple[str, ...]) -> bool:
  """Returns whether a dense layer takes each sample once: at several pixels or tokens, ∂W is a sum of products.

  Checked by `∂W = x·∂bᵀ` for a random sample of an initial network. The arguments are those of `entry`.
  """
  with jax.ensure_compile_time_eval():
    keys = jax.random.split(jax.random.key(0), 3)
    sample = jax.random.uniform(keys[0], (1, *shape))
    if model.takes_ids:
      sample = jax.random.randint(keys[0], (1, *shape), 0, model.vocabulary or 2, model.dtype)

    @jax.jit
    def gradients(variables: Mapping, sample: jax.Array) -> tuple[jax.Array, ...]:
      gradient = _of_a_random_loss(model, keys[1], variables, sample)
      return trees.get(gradient, kernel), trees.get(gradient, bias)

    given = model.init(keys[2], shape), sample
    weight, share = (np.asarray(x, np.float64) for x in gradients(*given))
    near = tolerance(gradients, *given)
  expected = np.outer(weight @ share, share) / max(share @ share, 1e-300)
  return bool(np.linalg.norm(weight - expected) <= near * np.linalg.norm(weight))


def _of_a_random_loss(model: Model, key: jax.Array, variables: Mapping, samples: jax.Array) -> Tree:
  """Returns the gradient of the sum of a network's outputs, each with a random weight."""

  def loss(params: Tree) -> jax.Array:
    outputs, _ = model.apply({**variables, 'params': params}, samples, False, None)
    return jnp.sum(outputs * jax.random.normal(key, outputs.shape, outputs.dtype))

  return jax.grad(loss)(variables['params'])


def check_sees_once(model: Model, shape: tuple[int, ...], kernel: tuple[str, ...], bias: tuple[str, ...]) -> None:
  """Raises `UsageError` for a dense layer whose gradient is no product, see `sees_once`."""
  if not sees_once(model, tuple(shape), kernel, bias):
    raise errors.UsageError(
      f'the dense layer {"/".join(kernel[:-1])} of the model {model.name!r} stands at several places of a sample, such '
      'as pixels or tokens: its gradient is a sum over them, from which its input cannot be read'
    )


@reusable(32)
def silent_below_zero(model: Model, shape: tuple[int, ...], kernel: tuple[str, ...], bias: tuple[str, ...]) -> bool:
  """Returns whether neurons have no gradient where their pre-activations are negative, as those before a ReLU.

  Checked on an initial network, with a kernel of zeros and biases from −2 to −0.05. The arguments are those of `entry`.
  """
  with jax.ensure_compile_time_eval():
    keys = jax.random.split(jax.random.key(0), 3)
    variables, sample = model.init(keys[2], shape), jax.random.uniform(keys[0], (1, *shape))

    def negative(path: tuple, leaf: jax.Array) -> jax.Array:
      if trees.path_names(path) == kernel:
        return jnp.zeros_like(leaf)
      return jnp.linspace(-2, -0.05, leaf.size, dtype=leaf.dtype) if trees.path_names(path) == bias else leaf

    params = jax.tree.map_with_path(negative, variables['params'])
    gradient = jax.jit(functools.partial(_of_a_random_loss, model, keys[1]))({**variables, 'params': params}, sample)
    return not np.any(trees.get(gradient, bias))


def check_relu(who: str, model: Model, shape: tuple[int, ...], kernel: tuple[str, ...], bias: tuple[str, ...]) -> None:
  """Raises `UsageError` unless a dense layer stands before a ReLU, see `silent_below_zero`; `who` needs it."""
  if not silent_below_zero(model, tuple(shape), kernel, bias):
    raise errors.UsageError(
      f'the first dense layer of the model {model.name!r} has a gradient where its pre-activation is negative: {who} '
      'needs the activation ReLU behind it'
    )


def probed(model: Model, shape: tuple[int, ...], read: Callable[[Tree], jax.Array]) -> Entry:
  """Returns the `Entry` of a network. Where initial ones have no gradient at the layer, its word is taken.

  A network that sees nothing of any even grey has values out of order: it compares them with each other.

  Args:
    model: the network.
    shape: of one sample.
    read: gradient of one sample -> what it says of each value that entered, in the sample's order.
  """
  declared = None
  if model.normalisation is not None:
    mean, std = (np.tile(np.float32(values), math.prod(shape[:-1])) for values in model.normalisation)
    declared = mean, std
  with jax.ensure_compile_time_eval():
    keys = jax.random.split(jax.random.key(0), 4)

    @jax.jit
    def seen_by(variables: Mapping, sample: jax.Array) -> jax.Array:
      return read(_of_a_random_loss(model, keys[1], variables, sample[None])).reshape(-1)

    chosen, probe, alive = jax.random.bernoulli(keys[2], 0.5, shape), jax.random.uniform(keys[3], shape), []
    silent = True
    for i in range(_TRIES):
      dark = jnp.full(shape, 0.25 - i % 8 / 64)  # a network that holds its normalisation sees one grey as zeros
      network, bright = model.init(jax.random.fold_in(keys[0], i), shape), dark + 0.5
      seen = [np.asarray(seen_by(network, x)) for x in (dark, bright, jnp.where(chosen, bright, dark), probe)]
      silent = silent and not any(map(np.any, seen))
      if all(map(np.any, seen)):
        alive.append((network, float(dark.min()), seen))
      if len(alive) == 2 or (silent and i + 1 == _SILENT):
        break
    if len(alive) < 2:
      return Entry(silent, declared)
    (network, grey, (low, high, mixed, one)), (other, _, (*_, two)) = alive
    shifted, near = np.asarray(seen_by(_shifted(other), probe)), tolerance(seen_by, network, probe)
  moved, reach = np.abs(mixed - low), np.abs(high - low)  # of each value by itself: their scales may differ by far
  if not np.any(moved):
    return Entry(True, declared)
  in_order = bool(
    np.all((reach > 0) & np.where(np.asarray(chosen).reshape(-1), moved > 0.5 * reach, moved < 0.01 * reach))
  )
  slope, values = 2 * (high - low), np.asarray(probe).reshape(-1)
  offset = low - slope * grey
  mean, std = (np.zeros_like(values), np.ones_like(values)) if declared is None else declared

  def alike(given: np.ndarray, seen: np.ndarray, share: float) -> bool:
    return np.allclose(given, seen, rtol=share, atol=share * np.abs(slope))

  fixed = all(alike(x, one, _SHIFTED) for x in (two, shifted) if np.any(x))  # one without a gradient tells nothing
  straight = all(alike(slope * values + offset, x, near) for x in (one, two))
  if not in_order or alike((values - mean) / std, one, near) or not straight:
    return Entry(in_order, declared, fixed)
  return Entry(True, (-offset / slope, 1 / slope), fixed)


def tolerance(function: Callable, *given: Any) -> float:
  """Returns the relative difference that is left to rounding in what a function computes: 1e-3 in float32."""
  return max(_NEAR, _ROUNDED * programs.rounding(jax.make_jaxpr(function)(*given)))


def _shifted(variables: Mapping) -> dict:
  """Returns variables whose vectors are others: statistics, scales and shifts that a norm would apply to samples."""

  def shift(path: tuple, leaf: Any) -> Any:
    if not jnp.issubdtype(leaf.dtype, jnp.floating) or leaf.size > max(leaf.shape, default=1):
      return leaf
    return leaf * jnp.asarray(1.3, leaf.dtype) + jnp.asarray(0.1 if path[0].key == 'params' else 0.5, leaf.dtype)

  return jax.tree.map_with_path(shift, dict(variables))


def first_dense_layer(layers: Sequence[Layer], update: Tree) -> tuple[tuple[str, ...], tuple[str, ...]]:
  """Returns the paths of the (kernel, bias) of the first dense layer with a bias.

  Args:
    layers: the model's, in forward order.
    update: a tree shaped like its parameters.

  Raises:
    UsageError: if there is none.
  """
  for layer in layers:
    found = _dense(layer, update)
    if found:
      return found
  raise errors.UsageError('no dense layer with a bias was found, of which the input could be read from the gradient')


def _dense(layer: Layer, update: Tree) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
  """Returns the paths of (kernel, bias) of a layer; None where it is not dense with a bias.

  The bias stands beside the kernel. The vectors of a norm behind it, which count as the layer's, stand elsewhere.
  """
  leaves = {path: trees.get(update, path) for path in layer.paths}
  kernels = [path for path, leaf in leaves.items() if leaf.ndim == 2]
  for kernel in kernels if len(kernels) == 1 else ():
    width, module = leaves[kernel].shape[1:], kernel[:-1]
    biases = [path for path, leaf in leaves.items() if leaf.shape == width and path[:-1] == module]
    if len(biases) == 1:
      return kernel, biases[0]
  return None
