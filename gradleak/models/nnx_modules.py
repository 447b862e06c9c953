"""Flax NNX modules as models."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from gradleak.core import errors
from gradleak.core.trees import Layer, Tree, get, path_names
from gradleak.models import convolution, modes
from gradleak.models.model import DTYPES, Model, check_layers


def from_nnx(
  module: Any,
  name: str | None = None,
  *,
  features: Callable[[Any, jax.Array], jax.Array] | None = None,
  layers: Sequence[Layer] | None = None,
  axes: int | None = 3,
  dtype: str = 'float32',
) -> Model:
  """Returns the `Model` of a Flax NNX module, which is not changed.

  Its `nnx.Param` values are the parameters, nested dicts with string keys; its `nnx.BatchStat` values are
  'batch_stats'; all other variables keep their values. `init` returns the module's own values, for any key and sample
  shape.

  Args:
    module: a module called as `module(samples)`. Arguments of the call and attributes of its submodules that are named
      as in `from_flax` follow `train` of `Model.apply`; the attribute `deterministic` follows `key`, without which
      dropout does nothing.
    name: how results call it; the class name by default.
    features: optional, (module, images) -> the input of the last dense layer.
    layers: optional sequence of `gradleak.core.trees.Layer` in forward order.
    axes: how many axes one sample has, 3 for images; None for any.
    dtype: of the samples: 'float32', or 'int32' for token ids.

  Raises:
    UsageError: if it is not an instance of `nnx.Module`, its call requires another argument, or a layer has a path of
      no parameter.
  """
  from flax import nnx

  if not isinstance(module, nnx.Module):
    raise errors.UsageError(
      f'from_nnx takes an instance of a flax.nnx.Module, got {errors.shown(module)}; use from_flax for Flax Linen and '
      'from_functions for anything else'
    )
  errors.check_choice('dtype of samples', dtype, DTYPES)
  graph, *initial = nnx.split(module, nnx.Param, nnx.BatchStat, nnx.RngKey, ...)
  check_layers(type(module).__name__, layers, _to_dict(initial[0]))
  taken = modes.arguments(module.__call__, 1, f'the call of {type(module).__name__}')

  def init(key: jax.Array, sample_shape: tuple[int, ...]) -> Tree:
    del key, sample_shape
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
    for name in modes.TRAINING:  # a module also has methods that are named like this
      copy.set_attributes(functools.partial(_has_flag, name), raise_if_not_found=False, **{name: train})
    for _, one in nnx.iter_graph(copy):
      if isinstance(one, nnx.Conv) and one.conv_general_dilated is jax.lax.conv_general_dilated:
        one.conv_general_dilated = convolution.fast
    if key is None:  # dropout may be handed an argument of the call
      dropping = nnx.Dropout, nnx.MultiHeadAttention
      copy.set_attributes(*dropping, raise_if_not_found=False, rate=0.0, dropout_rate=0.0)
    return copy

  def apply(
    variables: Tree, images: jax.Array, train: bool = False, key: jax.Array | None = None
  ) -> tuple[jax.Array, Tree]:
    copy = merged(variables, train, key)
    logits = copy(images, **modes.values(taken, train))
    return logits, _to_dict(nnx.state(copy, nnx.BatchStat))

  features_of = None if features is None else lambda variables, images: features(merged(variables, False, None), images)
  layers_of = None if layers is None else lambda sample_shape: tuple(layers)
  name = name or type(module).__name__.lower()
  return Model(name, init, apply, features_of, layers_of, axes=axes, dtype=dtype)


def _has_flag(name: str, path: tuple, module: Any) -> bool:
  """Returns whether an object has a flag of this name."""
  del path
  return isinstance(getattr(module, '__dict__', {}).get(name), bool)


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
