"""What all defenses use: composition, keys, and the errors for missing arguments."""

import zlib
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gradleak.core import errors
from gradleak.core.trees import Tree, path_names


def sequence(
  *transformations: optax.GradientTransformation, still: Collection[tuple[str, ...]] = ()
) -> optax.GradientTransformationExtraArgs:
  """Composes transformations like `optax.chain`, with a separate key for each stage.

  `optax.chain` passes the same `key=` to every stage: two noises of the same kind would be one noise, twice. Here the
  i-th stage gets `fold_in(key, i)`.

  Args:
    *transformations: the stages.
    still: the paths of parameters that are not sent: what a stage adds there is zero for the next one.
  """
  for one in transformations:
    errors.check_instance('a stage of the chain', one, optax.GradientTransformation, 'an optax transformation')
  if len(transformations) == 1:
    return optax.with_extra_args_support(transformations[0])
  stages = [optax.with_extra_args_support(transformation) for transformation in transformations]

  def stilled(path: tuple, update: jax.Array) -> jax.Array:
    return jnp.zeros_like(update) if path_names(path) in still else update

  def init(params: Tree) -> tuple:
    return tuple(stage.init(params) for stage in stages)

  def update(
    updates: Tree, state: tuple, params: Tree = None, *, key: jax.Array | None = None, **extra: Any
  ) -> tuple[Tree, tuple]:
    new_state = []
    for i, (stage, stage_state) in enumerate(zip(stages, state, strict=True)):
      if key is not None:
        extra['key'] = jax.random.fold_in(errors.check_key('key', key), i)
      updates, stage_state = stage.update(updates, stage_state, params, **extra)
      updates = jax.tree.map_with_path(stilled, updates) if still else updates
      new_state.append(stage_state)
    return updates, tuple(new_state)

  return optax.GradientTransformationExtraArgs(init, update)


def require_argument(name: str, what: str, value: Any) -> Any:
  """Returns `value`, a positional argument of a factory.

  Args:
    name: the defense, for the message.
    what: what it is made for, such as 'client'.
    value: the argument, or None where only the settings were given.

  Raises:
    UsageError: for None.
  """
  if value is None:
    raise errors.UsageError(f'the defense {name} is made for a {what} and has none: make it by {name}({what}, …)')
  return value


def require_key(name: str, key: jax.Array | None) -> jax.Array:
  """Returns `key`, typed.

  Args:
    name: the defense, for the message.
    key: a JAX key, or None.

  Raises:
    UsageError: for None, and for anything else that is no key.
  """
  if key is None:
    raise errors.UsageError(
      f'the defense {name} draws noise and needs a key: call update(updates, state, params, key=jax.random.key(…))'
    )
  return errors.check_key('key', key)


def stream(name: str, key: jax.Array | None, updates: Tree = None) -> jax.Array:
  """Returns a defense's own stream of `key`, so that different defenses draw different noise from the same key.

  Optax's `partition` and `masked` hand each part of a tree the key of the whole, with `MaskedNode`s in place of the
  rest. What is masked is folded in, so that parts draw apart.

  Args:
    name: the defense, whose CRC is folded into the key.
    key: a JAX key, or None.
    updates: the tree that it acts on.

  Raises:
    UsageError: for None, and for anything else that is no key.
  """
  key = jax.random.fold_in(require_key(name, key), zlib.crc32(name.encode()))
  places = jax.tree.leaves(updates, is_leaf=lambda x: isinstance(x, optax.MaskedNode))
  masked = bytes(isinstance(x, optax.MaskedNode) for x in places)
  return jax.random.fold_in(key, zlib.crc32(masked)) if any(masked) else key


def require_batch(name: str, batch: tuple | None, params: Tree) -> tuple[jax.Array, jax.Array]:
  """Returns `batch`: (samples [N, H, W, C], label probabilities [N, classes]).

  Args:
    name: the defense, for the message.
    batch: the samples behind the update, or None.
    params: the model's parameters, or None.

  Raises:
    UsageError: if either is None.
  """
  if batch is None or params is None:
    missing = 'batch' if batch is None else 'params'
    raise errors.UsageError(
      f'the defense {name} depends on the samples and the model and needs {missing}: call '
      'update(updates, state, params, batch=(samples, targets))'
    )
  return batch


def shared_leaves(updates: Tree, unshared: Collection | None) -> tuple[list[jax.Array], Callable[[Sequence], Tree]]:
  """Returns (the leaves of an update that are shared, other leaves in their place -> the whole update).

  Args:
    updates: the update.
    unshared: the paths of the others, `Context.unshared`; None for none.
  """
  found, treedef = jax.tree.flatten_with_path(updates)
  places = [i for i, (path, _) in enumerate(found) if path_names(path) not in (unshared or ())]

  def whole(new: Sequence) -> Tree:
    changed = dict(zip(places, new, strict=True))
    return treedef.unflatten([changed.get(i, leaf) for i, (_, leaf) in enumerate(found)])

  return [found[i][1] for i in places], whole


def require_own_gradients(name: str, does: str, loss: Any) -> None:
  """Raises `UsageError` where a sample has no gradient of its own, because of the client's loss.

  Args:
    name: the defense, for the message.
    does: what it does with such gradients, such as 'clips'.
    loss: the client's.
  """
  if loss.relative:
    raise errors.UsageError(
      f'the defense {name} {does} the gradient of each sample, and under the loss {loss} no sample has one of its own: '
      "the mean divides by the weights of all classes in the batch. Choose average='samples' or reduction='sum'"
    )


def stateless(
  name: str, function: Callable[..., Tree], *, random: bool = False
) -> optax.GradientTransformationExtraArgs:
  """Returns the transformation that maps updates by a function.

  Args:
    name: the defense, see `stream`.
    function: updates -> updates; if random, (key, updates) -> updates.
    random: whether the function takes a key.

  Raises (from its update):
    UsageError: if it is random and no `key=` is given.
  """

  def update(
    updates: Tree, state: optax.OptState, params: Tree = None, *, key: jax.Array | None = None, **extra: Any
  ) -> tuple[Tree, optax.OptState]:
    del params, extra
    if not random:
      return function(updates), state
    return function(stream(name, key, updates), updates), state

  return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
