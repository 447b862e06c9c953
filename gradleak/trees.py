"""Pytree arithmetic, and the view of parameters as the layers of a network."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Layer(NamedTuple):
  """A layer as FFL, GradDefense, OUTPOST and Fidel mean it: a weight with its bias and norm parameters.

  Attributes:
    name: the layer's name, unique in its model.
    paths: where its parameters stand in the `params` tree, the weight first; each a tuple of keys.
  """

  name: str
  paths: tuple[tuple[str, ...], ...]


def inner_product(a, b):
  """Returns ⟨a, b⟩ over all leaves, a float32 scalar."""
  products = jax.tree.map(lambda x, y: jnp.sum(x * y, dtype=jnp.float32), a, b)
  return jnp.sum(jnp.stack(jax.tree.leaves(products)))


def squared_norm(tree):
  """Returns ‖tree‖², a float32 scalar."""
  return inner_product(tree, tree)


def safe_sqrt(x):
  """Returns √x with the gradient 0 at x = 0, where the plain square root has none."""
  positive = x > 0
  return jnp.where(positive, jnp.sqrt(jnp.where(positive, x, jnp.ones_like(x))), jnp.zeros_like(x))


def norm(tree):
  """Returns ‖tree‖₂ over all leaves; differentiable at zero."""
  return safe_sqrt(squared_norm(tree))


def cosine(a, b):
  """Returns ⟨a, b⟩ / (‖a‖‖b‖); 0 where either is zero."""
  scale = norm(a) * norm(b)  # the product of the squares would leave float32's range first
  positive = scale > 0
  return jnp.where(positive, inner_product(a, b) / jnp.where(positive, scale, jnp.ones_like(scale)), 0.0)


def subtract(a, b):
  """Returns a − b, leaf by leaf."""
  return jax.tree.map(jnp.subtract, a, b)


def zeros_like(tree):
  """Returns zeros in the shape of `tree`."""
  return jax.tree.map(jnp.zeros_like, tree)


def take(tree, index):
  """Returns entry `index` of the leading axis of every leaf."""
  return jax.tree.map(lambda x: x[index], tree)


def concatenate(trees):
  """Joins trees along the leading axis of every leaf."""
  return jax.tree.map(lambda *xs: jnp.concatenate(xs), *trees)


def get(tree, path):
  """Returns the leaf or subtree of nested dicts at `path`."""
  for key in path:
    tree = tree[key]
  return tree


def fold_in_leaves(key, tree):
  """Returns a tree of keys shaped like `tree`, the i-th leaf's being `fold_in(key, i)`."""
  leaves, treedef = jax.tree.flatten(tree)
  return treedef.unflatten([jax.random.fold_in(key, i) for i in range(len(leaves))])
