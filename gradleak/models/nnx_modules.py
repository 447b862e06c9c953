"""Flax NNX modules as models."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax

from gradleak import errors
from gradleak.models.model import Model
from gradleak.trees import Layer, Tree, get, path_names


def from_nnx(
  module: Any,
  name: str | None = None,
  *,
  features: Callable[[Any, jax.Array], jax.Array] | None = None,
  layers: Sequence[Layer] | None = None,
) -> Model:
  """Returns the `Model` of a Flax NNX module, which is not changed.

  Its `nnx.Param` values are the parameters, nested dicts with string keys; its `nnx.BatchStat` values are
  'batch_stats'; all other variables keep their values. `init` returns the module's own values, whatever the key and
  the image shape.

  Args:
    module: a module called as `module(images)` or `module(images, train=…)`. Its submodules' attributes
      `use_running_average` and `deterministic` follow `train` and `key` of `Model.apply`.
    name: how results call it; the class name by default.
    features: optional, (module, images) -> the input of the last dense layer.
    layers: optional sequence of `gradleak.trees.Layer` in forward order.

  Raises:
    UsageError: if it is not an instance of `nnx.Module`.
  """
  from flax import nnx

  if not isinstance(module, nnx.Module):
    raise errors.UsageError(
      f'from_nnx takes an instance of a flax.nnx.Module, got {errors.shown(module)}; use from_flax for Flax Linen and '
      'from_functions for anything else'
    )
  graph, *initial = nnx.split(module, nnx.Param, nnx.BatchStat, nnx.RngKey, ...)
  takes_train = 'train' in inspect.signature(module.__call__).parameters

  def init(key: jax.Array, image_shape: tuple[int, ...]) -> Tree:
    del key, image_shape
    variables = {'params': _to_dict(initial[0]), 'batch_stats': _to_dict(initial[1])}
    return {collection: values for collection, values in variables.items() if values or collection == 'params'}

  def merged(variables: Tree, train: bool, key: jax.Array | None) -> Any:
    params, stats, keys, others = jax.tree.map(lambda value: value, initial)  # merge would share the variables
    if key is not None:
      leaves, structure = jax.tree.flatten(keys)
      keys = jax.tree.unflatten(structure, [jax.random.fold_in(key, i) for i in range(len(leaves))])
    params, stats = _from_dict(params, variables['params']), _from_dict(stats, variables.get('batch_stats', {}))
    copy = nnx.merge(graph, params, stats, keys, others)
    copy.set_attributes(use_running_average=not train, deterministic=key is None, raise_if_not_found=False)
    return copy

  def apply(
    variables: Tree, images: jax.Array, train: bool = False, key: jax.Array | None = None
  ) -> tuple[jax.Array, Tree]:
    copy = merged(variables, train, key)
    logits = copy(images, **({'train': train} if takes_train else {}))
    return logits, _to_dict(nnx.state(copy, nnx.BatchStat))

  features_of = None if features is None else lambda variables, images: features(merged(variables, False, None), images)
  layers_of = None if layers is None else lambda image_shape: tuple(layers)
  return Model(name or type(module).__name__.lower(), init, apply, features_of, layers_of)


def _names(path: tuple) -> tuple[str, ...]:
  """Returns the path of a value in a state as string keys, without the attribute `value` of its `nnx.Variable`."""
  return path_names(tuple(key for key in path if not isinstance(key, jax.tree_util.GetAttrKey)))


def _to_dict(state: Tree) -> dict[str, Any]:
  """Returns the values of an `nnx.State` as nested dicts."""
  tree = {}
  for path, leaf in jax.tree.leaves_with_path(state):
    *parents, last = _names(path)
    inner = tree
    for name in parents:
      inner = inner.setdefault(name, {})
    inner[last] = leaf
  return tree


def _from_dict(state: Tree, tree: dict[str, Any]) -> Tree:
  """Returns an `nnx.State` like `state` with the values of `tree`."""
  return jax.tree.map_with_path(lambda path, leaf: get(tree, _names(path)), state)
