"""How far a gradient is from another one, without the gradient: "ghost" norms and inner products.

The gradient of a layer's weight is AᵀΔ, with the layer's inputs A [positions, in] and the loss's gradients at its
outputs Δ [positions, out]. Its squared norm is ⟨AAᵀ, ΔΔᵀ⟩ and its inner product with another matrix G is ⟨AG, Δ⟩
(Goodfellow 2015, Efficient Per-Example Gradient Computations). For several positions see Li et al. 2022, Large Language
Models Can Be Strong Differentially Private Learners, section 4. Both are exact, and so are their derivatives. In
gradient matching, every trial has its own gradient, which is written and read several times in a step. For the wide
layers of a deep network the products are cheaper.

The layers are unchanged. The computation of the gradient is traced, and where its last operation is a product of A and
Δ, that product is not carried out.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, jaxpr_as_fun

from gradleak.core.trees import Tree, over_lengths, safe_sqrt, total
from gradleak.models import convolution


class Products(NamedTuple):
  """What distances of a gradient g from an observed one g* are made of: float32 scalars, weighted sums over tensors.

  Attributes:
    square: ‖g‖².
    inner: ⟨g, g*⟩.
    observed: ‖g*‖².
  """

  square: jax.Array
  inner: jax.Array
  observed: jax.Array


def cosine(products: Products) -> jax.Array:
  """Returns 1 − ⟨g, g*⟩ / (‖g‖‖g*‖) with an error of about 1e-7; 1 where either is zero."""
  return 1 - over_lengths(products.inner, safe_sqrt(products.square), safe_sqrt(products.observed))


def saved(gradient: Callable[..., Tree], *arguments: Any) -> int:
  """Returns how many entries of a gradient `products` does not multiply out; arguments as there."""
  traced, found = _traced(gradient, *arguments)
  return sum(out.aval.size for out, each in zip(traced.jaxpr.outvars, found, strict=True) if each is not None)


def products(gradient: Callable[..., Tree], observed: Tree, *arguments: Any, weights: Tree = None) -> Products:
  """Returns the `Products` of gradient(*arguments) and `observed`.

  A weight's gradient is multiplied out where that is less work: positions · (in + out) ≥ in · out.

  Args:
    gradient: a pure function of pytrees of arrays to a tree shaped like `observed`; what it closes over is constant.
    observed: a tree of arrays.
    *arguments: of the function.
    weights: of the tensors, a tree of scalars; None for 1.
  """
  traced, found = _traced(gradient, *arguments)
  needed = [(out,) if each is None else each.operands for out, each in zip(traced.jaxpr.outvars, found, strict=True)]
  run = jaxpr_as_fun(_returning(traced, [var for variables in needed for var in variables]))
  values = iter(run(*jax.tree.leaves(arguments)))
  results = []
  for each, other in zip(found, jax.tree.leaves(observed), strict=True):
    if each is None:
      value = next(values)
      square, inner = _inner(value, value), _inner(value, other)
    else:
      square, inner = each.products(next(values), next(values), other)
    results.append(jnp.stack([square, inner, _inner(other, other)]))
  rows = jnp.stack(results)
  if weights is not None:
    rows *= jnp.stack(jax.tree.leaves(weights)).reshape(-1, 1)
  return Products(*total(rows))


def _traced(gradient: Callable[..., Tree], *arguments: Any) -> tuple[ClosedJaxpr, list['_Factored | None']]:
  """Returns the computation of the leaves of a gradient, and of each leaf how it is a product."""
  leaves, treedef = jax.tree.flatten(arguments)
  traced = jax.make_jaxpr(lambda *flat: jax.tree.leaves(gradient(*treedef.unflatten(flat))))(*leaves)
  makers = {id(out): eqn for eqn in traced.jaxpr.eqns for out in eqn.outvars}
  return traced, [_factored(out, makers) for out in traced.jaxpr.outvars]


def _returning(traced: ClosedJaxpr, variables: Sequence[Any]) -> ClosedJaxpr:
  """Returns the computation of these of its variables; what they do not need is dropped when it is compiled."""
  return ClosedJaxpr(traced.jaxpr.replace(outvars=list(variables)), traced.consts)


class _Factored(NamedTuple):
  """A gradient that is a product of two arrays.

  Attributes:
    product: the operation.
    rearranged: what only moves its entries, from the gradient back to the product.
  """

  product: JaxprEqn
  rearranged: tuple[JaxprEqn, ...]

  @property
  def operands(self) -> Sequence[Any]:
    """The two variables that are multiplied."""
    return self.product.invars

  def products(self, first: jax.Array, second: jax.Array, other: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns ‖AᵀB‖² and ⟨AᵀB, other⟩ from the values of `operands`."""
    for eqn in self.rearranged:
      other = _moved_back(eqn, other)
    left, right, other = _factors(self.product, first, second, other)
    square = _inner(left @ left.T, right @ right.T)
    if left.shape[1] < right.shape[1]:
      return square, _bilinear(left, other, right)
    return square, _bilinear(right, other.T, left)


@jax.custom_vjp
def _bilinear(left: jax.Array, matrix: jax.Array, right: jax.Array) -> jax.Array:
  """Returns Σ_p left_p · matrix · right_p with left [positions, a], matrix [a, b], right [positions, b].

  With few positions, a product whose larger factor is not transposed takes a quarter of the time on CPU: hence its own
  derivatives.
  """
  return _inner(left, (matrix @ right.T).T)


def _bilinear_forward(left, matrix, right):
  product = (matrix @ right.T).T
  return _inner(left, product), (left, matrix, product)


def _bilinear_backward(kept, cotangent):
  left, matrix, product = kept
  return cotangent * product, None, (cotangent * left) @ matrix


_bilinear.defvjp(_bilinear_forward, _bilinear_backward)


def _factored(out: Any, makers: dict[int, JaxprEqn]) -> _Factored | None:
  """Returns the gradient `out` as a product if that is less work than the gradient itself."""
  rearranged: list[JaxprEqn] = []
  while (eqn := makers.get(id(out))) is not None and eqn.primitive.name in ('transpose', 'reshape'):
    rearranged.append(eqn)
    out = eqn.invars[0]
  size = None if eqn is None or any(isinstance(var, Literal) for var in eqn.invars) else _sizes(eqn)
  if size is None:
    return None
  positions, rows, columns = size
  return _Factored(eqn, tuple(rearranged)) if positions * (rows + columns) < rows * columns else None


def _moved_back(eqn: JaxprEqn, array: jax.Array) -> jax.Array:
  """Returns what `eqn`, a transposition or a reshape, makes `array` of."""
  if eqn.primitive.name == 'transpose':
    return jnp.transpose(array, np.argsort(eqn.params['permutation']))
  return array.reshape(eqn.invars[0].aval.shape)


def _sizes(eqn: JaxprEqn) -> tuple[int, int, int] | None:
  """Returns (positions, rows, columns) of a product that sums over positions, None for any other operation."""
  shapes = [var.aval.shape for var in eqn.invars]
  if eqn.primitive.name == 'convolve_kernel_gradient':
    *positions, features = shapes[1]
    return math.prod(positions), features, eqn.params['size'] ** 2 * shapes[0][-1]
  if eqn.primitive.name == 'conv_general_dilated' and _sums_over_images(eqn):
    batch, features, *spatial = (shapes[1][axis] for axis in _outputs_first(eqn))
    size = eqn.outvars[0].aval.size
    return batch * math.prod(spatial), features, size // features
  if eqn.primitive.name != 'dot_general':
    return None
  (left, _), batch = eqn.params['dimension_numbers']
  if any(batch) or any(len(shape) != len(left) + 1 for shape in shapes):
    return None
  positions = math.prod(shapes[0][axis] for axis in left)
  return positions, math.prod(shapes[0]) // positions, math.prod(shapes[1]) // positions


def _factors(
  eqn: JaxprEqn, first: jax.Array, second: jax.Array, other: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns [positions, rows] and [positions, columns], whose product is the result of `eqn`, and `other` like that."""
  if eqn.primitive.name == 'dot_general':
    (left, right), _ = eqn.params['dimension_numbers']
    return _positions_first(first, left), _positions_first(second, right), other
  if eqn.primitive.name == 'conv_general_dilated':
    return _native_factors(eqn, first, second, other)
  geometry = {name: eqn.params[name] for name in ('size', 'stride', 'padding')}
  seen = convolution.columns(first, **geometry)
  return second.reshape(-1, second.shape[-1]), seen.reshape(-1, seen.shape[-1]), other


def _positions_first(array: jax.Array, axes: tuple[int, ...]) -> jax.Array:
  kept = [axis for axis in range(array.ndim) if axis not in axes]
  array = jnp.transpose(array, (*axes, *kept))
  return array.reshape(-1, array.shape[-1])


def _sums_over_images(eqn: JaxprEqn) -> bool:
  """Returns whether a convolution is the gradient of a square kernel, as JAX writes it: its channels are images."""
  numbers, params = eqn.params['dimension_numbers'], eqn.params
  sides = [eqn.outvars[0].aval.shape[axis] for axis in numbers.out_spec[2:]]
  channels = eqn.invars[0].aval.shape[numbers.lhs_spec[0]], eqn.outvars[0].aval.shape[numbers.out_spec[0]]
  plain = params['window_strides'] == (1, 1) and params['lhs_dilation'] == (1, 1)
  one_group = params['feature_group_count'] == params['batch_group_count'] == 1
  square = all(len(set(numbers)) == 1 for numbers in (sides, params['rhs_dilation'], channels))
  return plain and one_group and square


def _outputs_first(eqn: JaxprEqn) -> tuple[int, ...]:
  """Returns the axes of the second operand, the gradients at the outputs, as (images, features, row, column)."""
  features, images, *spatial = eqn.params['dimension_numbers'].rhs_spec
  return images, features, *spatial


def _native_factors(eqn, images, deltas, other):
  """As `_factors`, for `_sums_over_images`."""
  numbers = eqn.params['dimension_numbers']
  channel, image, *sides = numbers.lhs_spec
  images = jnp.transpose(images, (image, *sides, channel))
  image, feature, *sides = _outputs_first(eqn)
  deltas = jnp.transpose(deltas, (image, *sides, feature))
  channel, feature, *sides = numbers.out_spec
  other = jnp.transpose(other, (feature, *reversed(sides), channel))
  size, stride = other.shape[1], eqn.params['rhs_dilation'][0]
  pads = [
    (low, stride * (outputs - 1) + size - low - side)
    for (low, _), outputs, side in zip(eqn.params['padding'], deltas.shape[1:3], images.shape[1:3], strict=True)
  ]
  zero = jnp.zeros((), images.dtype)
  images = jax.lax.pad(images, zero, [(0, 0, 0), *((low, high, 0) for low, high in pads), (0, 0, 0)])
  seen = convolution.columns(images, size, stride, 0)
  features = other.shape[0]
  return deltas.reshape(-1, features), seen.reshape(-1, seen.shape[-1]), other.reshape(features, -1)


def _inner(a: jax.Array, b: jax.Array) -> jax.Array:
  return jnp.sum(a * b, dtype=jnp.float32)
