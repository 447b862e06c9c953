"""Pytree arithmetic, and the view of parameters as the layers of a network."""

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from gradleak.core import errors

Tree: TypeAlias = Any  # a pytree of arrays
_MANY = 100  # terms of a sum


class Layer(NamedTuple):
  """A layer as FFL, GradDefense, OUTPOST and Fidel mean it: a weight with its bias and norm parameters.

  Attributes:
    name: the layer's name, unique in its model.
    paths: where its parameters stand in the `params` tree, the weight first; each a tuple of keys.
  """

  name: str
  paths: tuple[tuple[str, ...], ...]


def inner_product(a: Tree, b: Tree) -> jax.Array:
  """Returns ⟨a, b⟩ over all leaves, a float32 scalar."""

  def product(x: jax.Array, y: jax.Array) -> jax.Array:
    if x.dtype.itemsize < 4:  # squares leave the range of float16, and lose most digits of bfloat16
      x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    return jnp.sum(x * y, dtype=jnp.float32)

  products = jax.tree.leaves(jax.tree.map(product, a, b))
  return total(jnp.stack(products)) if products else jnp.float32(0)


def total(terms: jax.Array) -> jax.Array:
  """Returns the sum over the first axis of stacked terms, one per tensor of a network.

  XLA turns the sum of a stack into a chain of additions, and repeats the chain wherever the sum is used. For the 467
  tensors of ResNet-152 that is in 426 places. Running sums stay one operation.
  """
  return jnp.sum(terms, axis=0) if len(terms) < _MANY else jnp.cumsum(terms, axis=0)[-1]


def squared_norm(tree: Tree) -> jax.Array:
  """Returns ‖tree‖², a float32 scalar."""
  return inner_product(tree, tree)


def safe_sqrt(x: jax.Array) -> jax.Array:
  """Returns √x with the gradient 0 at x = 0, where the plain square root has none; 0 below, NaN at NaN."""
  nothing = x <= 0
  return jnp.where(nothing, jnp.zeros_like(x), jnp.sqrt(jnp.where(nothing, jnp.ones_like(x), x)))


@jax.custom_jvp
def _magnitude(x: jax.Array) -> jax.Array:
  return jnp.abs(x)


@_magnitude.defjvp
def _magnitude_jvp(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
  return _magnitude(primals[0]), jnp.sign(primals[0]) * tangents[0]


def magnitude(x: jax.Array) -> jax.Array:
  """Returns |x|, whose derivative at 0 is 0, as in PyTorch; that of `jnp.abs` is 1 there."""
  return _magnitude(x) if jnp.issubdtype(jnp.result_type(x), jnp.floating) else jnp.abs(x)


def norm(tree: Tree) -> jax.Array:
  """Returns ‖tree‖₂ over all leaves; differentiable at zero."""
  return safe_sqrt(squared_norm(tree))


def cosine(a: Tree, b: Tree) -> jax.Array:
  """Returns ⟨a, b⟩ / (‖a‖‖b‖); 0 where either is zero."""
  return over_lengths(inner_product(a, b), norm(a), norm(b))


@jax.custom_jvp
def cosine_distance(a: Tree, b: Tree) -> jax.Array:
  """Returns ½‖a/‖a‖ − b/‖b‖‖² = 1 − ⟨a, b⟩ / (‖a‖‖b‖), a float32 scalar; 1 where either is zero.

  Where a and b are almost parallel, one minus a float32 cosine has no digits left, in steps of 6e-8. This form has all.
  """
  return _apart(*_directions(a, b))


@cosine_distance.defjvp
def _cosine_distance_jvp(primals, tangents):
  """∂D/∂a = ((1 − D)·â − b̂) / ‖a‖: through the norms, it would take more passes over all tensors."""
  nothing, *units = _directions(*primals)
  distance = _apart(nothing, *units)
  change = jnp.zeros_like(distance)
  for x, unit, other, tangent in zip(primals, units, reversed(units), tangents, strict=True):
    rate, kept = jnp.where(nothing, 0.0, 1.0) / _length(x), 1 - distance
    gradient = jax.tree.map(lambda u, v, r=rate, k=kept: (k.astype(u.dtype) * u - v) * r.astype(u.dtype), unit, other)
    change += inner_product(gradient, jax.tree.map(lambda t, u: t.astype(u.dtype), tangent, unit))
  return distance, change


def _directions(a, b):
  """Returns (whether either is zero, a/‖a‖, b/‖b‖), zeros where that is zero; in float32 at least."""

  def unit(tree):
    length = _length(tree)
    return jax.tree.map(lambda x: widened(x) / length.astype(wide(x.dtype)), tree)

  return (norm(a) == 0) | (norm(b) == 0), unit(a), unit(b)


def _apart(nothing, a, b):
  return jnp.where(nothing, 1.0, 0.5 * squared_norm(subtract(a, b)))


def _length(tree):
  length = norm(tree)  # a length beyond float32's range leaves the direction undefined
  return jnp.where(length == 0, 1.0, jnp.where(jnp.isinf(length), jnp.nan, length))


def over_lengths(inner: jax.Array, one: jax.Array, other: jax.Array) -> jax.Array:
  """Returns inner / (one · other), scalars; 0 where either length is zero.

  Each length is divided out separately, because the derivative squares the product of the two lengths. That square
  leaves float32's range for the gradients of samples that a trained network is sure of.
  """
  nothing = (one == 0) | (other == 0)
  first, second = (1 / jnp.where(nothing, jnp.ones_like(length), length) for length in (one, other))
  return jnp.where(nothing, 0.0, inner * first * second)


def wide(dtype: Any) -> Any:
  """Returns a dtype, or float32 in place of a narrower one: what noise and norms of a tree are computed in."""
  return dtype if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits >= 32 else jnp.dtype(jnp.float32)


def widened(x: jax.Array) -> jax.Array:
  """Returns an array in its `wide` dtype."""
  return x.astype(wide(x.dtype))


def subtract(a: Tree, b: Tree) -> Tree:
  """Returns a − b, leaf by leaf."""
  return jax.tree.map(jnp.subtract, a, b)


def zeros_like(tree: Tree) -> Tree:
  """Returns zeros in the shape of `tree`."""
  return jax.tree.map(jnp.zeros_like, tree)


def shortened(tree: Tree, bound: float | jax.Array) -> Tree:
  """Returns tree · min(1, bound / ‖tree‖₂); an infinite bound leaves it, and its derivative finite.

  Norm and product are in float32 at least, and the result is rounded once.
  """
  return _times(tree, _factor(norm(tree), jnp.asarray(bound, jnp.float32)))


def clip(tree: Tree, bound: float | jax.Array) -> Tree:
  """Returns `shortened` of the tree; zeros where its norm is no finite number, which no factor brings within a bound.

  An infinite bound leaves it as it is.
  """
  bound, length = jnp.asarray(bound, jnp.float32), norm(tree)
  lost = jnp.isfinite(bound) & ~jnp.isfinite(length)
  return _times(jax.tree.map(lambda x: jnp.where(lost, jnp.zeros_like(x), x), tree), _factor(length, bound))


def _factor(length: jax.Array, bound: jax.Array) -> jax.Array:
  """Returns min(1, bound / length); 1 where the length is no number."""
  exceeds = length > bound
  return jnp.where(exceeds, bound, 1.0) / jnp.where(exceeds, length, 1.0)


def _times(tree: Tree, factor: jax.Array) -> Tree:
  def product(x: jax.Array) -> jax.Array:
    return (widened(x) * factor.astype(wide(x.dtype))).astype(x.dtype)

  return jax.tree.map(product, tree)


def masked(tree: Tree, mask: Tree) -> Tree:
  """Returns `tree` with zeros where `mask`, a tree of masks or of one boolean per tensor, is False."""
  return jax.tree.map(lambda x, kept: jnp.where(kept, x, jnp.zeros_like(x)), tree, mask)


def leaves_but(tree: Tree, left_out: Collection[tuple[str, ...]] = ()) -> list[Any]:
  """Returns all leaves but those at some paths."""
  return [leaf for path, leaf in jax.tree.leaves_with_path(tree) if path_names(path) not in left_out]


def entries(tree: Tree, left_out: Collection[tuple[str, ...]] = ()) -> int:
  """Returns the number of entries of `leaves_but`."""
  return sum(leaf.size for leaf in leaves_but(tree, left_out))


def take(tree: Tree, index: Any) -> Tree:
  """Returns entry `index` of the leading axis of every leaf."""
  return jax.tree.map(lambda x: x[index], tree)


def concatenate(trees: Sequence[Tree]) -> Tree:
  """Joins trees along the leading axis of every leaf."""
  return jax.tree.map(lambda *xs: jnp.concatenate(xs), *trees)


def rebuilt(like: Tree, leaves: Sequence[Any], leading: int = 0) -> Tree:
  """Returns a tree structured as `like` of leaves that were stored.

  Args:
    like: a tree of arrays or shapes.
    leaves: as `jax.tree.leaves` lists them.
    leading: number of leading axes that may be of other lengths, such as one over lanes.

  Raises:
    UsageError: for another number of leaves, or ones of other shapes.
  """
  expected, structure = jax.tree.flatten(like)
  if [np.shape(x)[leading:] for x in expected] != [np.shape(x)[leading:] for x in leaves]:
    raise errors.UsageError(
      f'a checkpoint does not fit: its {len(leaves)} arrays are not the {len(expected)} expected ones, by number or '
      'shape. Another version of the program wrote it: take another folder'
    )
  return structure.unflatten(leaves)


def get(tree: Tree, path: Sequence) -> Any:
  """Returns the leaf or subtree of nested dicts at `path`."""
  for key in path:
    tree = tree[key]
  return tree


def arrays(tree: Tree) -> Tree:
  """Returns the tree with arrays in place of numbers."""
  return jax.tree.map(lambda x: x if hasattr(x, 'dtype') else jnp.asarray(x, jnp.result_type(x)), tree)


def draws(sample: Callable[..., jax.Array], key: jax.Array, tree: Tree) -> Tree:
  """Returns a tree of draws shaped like `tree`, the i-th leaf's being `sample(fold_in(key, i), shape, dtype)`.

  Draws are float32 at least: in half precision, noise has few values. Leaves of one shape are drawn together, the same
  numbers: the program has fewer instructions, where a network is deep.

  Args:
    sample: such as `jax.random.normal`.
    key: a typed key.
    tree: of arrays, or of anything with a shape and a dtype.
  """
  leaves, treedef = jax.tree.flatten(tree)
  alike: dict[tuple, list[int]] = {}
  for index, leaf in enumerate(leaves):
    alike.setdefault((leaf.shape, wide(leaf.dtype)), []).append(index)
  drawn = {}
  for (shape, dtype), indices in alike.items():
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.asarray(indices, jnp.uint32))
    drawn.update(zip(indices, jax.vmap(lambda k, shape=shape, dtype=dtype: sample(k, shape, dtype))(keys), strict=True))
  return treedef.unflatten([drawn[index] for index in range(len(leaves))])


def path_names(path: Sequence) -> tuple[str, ...]:
  """Returns a JAX key path as a tuple of strings, as `Layer.paths` has them."""
  return tuple(str(getattr(key, 'key', getattr(key, 'name', getattr(key, 'idx', key)))) for key in path)


def layer_numbers(tree: Tree, layers: Sequence['Layer'] | None = None) -> tuple[Tree, int]:
  """Returns (a tree of the number of each leaf's layer, the number of layers).

  Args:
    tree: parameters, or anything shaped like them.
    layers: a sequence of `Layer`; without it, leaves that stand in one container (a module's kernel and bias) make a
      layer, and norms stand apart. Leaves that no layer names make layers the same way.
  """
  named = {path: layer.name for layer in layers or () for path in layer.paths}
  numbers = {}

  def number(path, leaf):
    del leaf
    keys = path_names(path)
    layer = named.get(keys, keys[:-1] if len(keys) > 1 else keys)
    return numbers.setdefault(layer, len(numbers))

  return jax.tree_util.tree_map_with_path(number, tree), len(numbers)


def layer_sums(values: Tree, numbers: Tree, count: int) -> jax.Array:
  """Returns float32 [count]: the scalars of a tree `values` summed by the layer that `numbers` gives each leaf."""
  sums = [[] for _ in range(count)]
  for value, number in zip(jax.tree.leaves(values), jax.tree.leaves(numbers), strict=True):
    sums[number].append(value)
  return jnp.stack([functools.reduce(jnp.add, parts) for parts in sums])
