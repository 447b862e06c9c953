"""Transformations that users bring: what they return is checked where they are called."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradleak.core import errors, trees
from gradleak.core.reuse import reusable
from gradleak.core.trees import Tree


def checked(name: str, transformation: Any, random: bool) -> Any:
  """Returns the transformation of a user, which raises `UsageError` with its name for what no defense may do.

  Its outputs have the shapes and types of its inputs. It gets a key if it is `random`, and depends on the key only
  then. Functions on the samples are checked alike.
  """
  of_updates = isinstance(transformation, optax.GradientTransformation)
  return (_checked if of_updates else _checked_function)(name, transformation, random)


@reusable(64)  # one object, so that clients are equal
def _checked_function(name, function, random):
  @functools.wraps(function)  # its signature says whether it takes weights
  def transform(key: jax.Array | None, samples: jax.Array, targets: jax.Array, **extra: Any) -> Any:
    _check_key(name, random, key, 'it with a key')
    found = _called(name, function, key, samples, targets, extra)
    _check_pair(name, (samples, targets), found)
    _check_random(name, random, lambda k: function(k, samples, targets, **extra), key)
    return found

  return transform


def _check_pair(name, given, found):
  """Raises `UsageError` for what are no samples and targets like those given; there may be others of them."""
  pair = isinstance(found, tuple | list) and len(found) == 2 and all(hasattr(x, 'dtype') for x in found)
  numbers = {len(x) for x in found if x.ndim} if pair else set()
  alike = pair and all(x.dtype == y.dtype and x.shape[1:] == y.shape[1:] for x, y in zip(given, found, strict=True))
  if not alike or len(numbers) != 1:
    returned = _described(found) if pair else errors.shown(found)
    raise errors.UsageError(f'the defense {name} returns {returned}, expected (samples, targets), {_described(given)}')


def _described(arrays):
  return ' and '.join(f'{x.dtype} of shape {x.shape}' for x in arrays)


def _check_key(name, random, key, call):
  if random and key is None:
    raise errors.UsageError(f'the defense {name} draws noise and needs a key: call {call}')


def _check_random(name, random, function, key):
  if not random and key is not None and _depends(function, key):
    raise errors.UsageError(
      f'the defense {name} draws from its key and is not declared random: give random=True, so that attackers may '
      'average repeated uploads'
    )


@reusable(64)  # one object, so that clients are equal
def _checked(name, transformation, random):
  inner = optax.with_extra_args_support(transformation)

  def update(updates: Tree, state: Any, params: Tree = None, **extra: Any) -> tuple[Tree, Any]:
    key = extra.get('key')
    _check_key(name, random, key, 'update(…, key=jax.random.key(…))')
    found = _called(name, inner.update, updates, state, params, extra)
    if not isinstance(found, tuple) or len(found) != 2:
      raise errors.UsageError(f'the defense {name} returns {errors.shown(found)}, expected (updates, state)')
    _check(name, updates, found[0])
    _check_random(name, random, lambda k: inner.update(updates, state, params, **extra | {'key': k}), key)
    return found

  return optax.GradientTransformationExtraArgs(inner.init, update)


def _called(name, update, updates, state, params, extra):
  try:
    return update(updates, state, params, **extra)
  except jax.errors.TracerArrayConversionError as error:
    raise errors.UsageError(
      f'the defense {name} cannot be compiled: it hands traced arrays to NumPy; use jax.numpy ({_first(error)})'
    ) from error
  except TypeError as error:
    if 'required keyword-only argument' in str(error):
      raise errors.UsageError(
        f'the defense {name} needs what it is not handed at its place ({_first(error)}): give it a default, or leave '
        'the defense out'
      ) from error
    if 'unexpected keyword argument' not in str(error):
      raise
    raise errors.UsageError(
      f'the defense {name} does not take all that a client hands to it ({_first(error)}): end the parameters of its '
      'update with **extra'
    ) from error


def _first(error):
  return str(error).strip().split('\n')[0]


def _check(name: str, given: Tree, returned: Tree) -> None:
  """Raises `UsageError` if a defense returns another tree than it was given, or other shapes or types in it."""
  if jax.tree.structure(given) != jax.tree.structure(returned):
    raise errors.UsageError(
      f'the defense {name} returns a tree of another structure than the update: '
      f'{errors.shown(jax.tree.structure(returned))}, expected {errors.shown(jax.tree.structure(given))}'
    )
  for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(given), jax.tree.leaves(returned), strict=True):
    of = '/'.join(trees.path_names(path))
    if np.shape(x) != np.shape(y):
      raise errors.UsageError(f'the defense {name} returns shape {np.shape(y)} for {of}, expected {np.shape(x)}')
    if jnp.result_type(x) != jnp.result_type(y):
      raise errors.UsageError(
        f'the defense {name} returns {jnp.result_type(y)} for {of}, expected {jnp.result_type(x)}: cast it back'
      )


def without_masks(state: Tree) -> list:
  """Returns the leaves of a state without those of its masks, which say what was sent."""
  masks = {id(leaf) for _, mask in optax.tree.get_all_with_path(state, 'mask') for leaf in jax.tree.leaves(mask)}
  return [leaf for leaf in jax.tree.leaves(state) if id(leaf) not in masks]


def depends(transformation: optax.GradientTransformationExtraArgs, params: Tree, state: Tree) -> bool:
  """Returns whether what it returns is computed from its state, but for masks, or cannot be traced."""
  kept = {id(leaf) for leaf in without_masks(state)}

  def after(state: Tree, updates: Tree, params: Tree) -> list:
    return jax.tree.leaves(transformation.update(updates, state, params, key=jax.random.key(0))[0])

  try:
    traced = jax.make_jaxpr(after)(state, params, params).jaxpr
  except Exception:  # it may need what only a client hands to it
    return bool(kept)
  given = [id(leaf) in kept for leaf in jax.tree.leaves(state)]
  return any(_reached(traced, given + [False] * (len(traced.invars) - len(given))))


def holds(transformation: optax.GradientTransformationExtraArgs, params: Tree, state: Tree) -> bool:
  """Returns whether the next state, but for masks, is computed from the updates, as far as that can be traced."""

  def after(updates: Tree, params: Tree, state: Tree) -> list:
    return without_masks(transformation.update(updates, state, params, key=jax.random.key(0))[1])

  try:
    traced = jax.make_jaxpr(after)(params, params, state).jaxpr
  except Exception:  # it may need what only a client hands to it
    return False
  number = len(jax.tree.leaves(params))
  return any(_reached(traced, [i < number for i in range(len(traced.invars))]))


def _depends(function: Callable, key: jax.Array) -> bool:
  """Returns whether an output is computed from the key; one that a chain splits for stages that ignore it is not."""
  traced = jax.make_jaxpr(function)(key).jaxpr
  return any(_reached(traced, [True] * len(traced.invars)))


def _reached(program: Any, given: Sequence[bool]) -> list[bool]:
  """Returns which outputs of a jaxpr are computed from those of its inputs that are `given`."""
  reached = {id(one) for one, of_interest in zip(program.invars, given, strict=True) if of_interest}
  for equation in program.eqns:
    inputs = [id(one) in reached for one in equation.invars]
    if any(inputs):
      inner = equation.params.get('jaxpr') if equation.primitive.name in ('jit', 'pjit') else None
      outputs = [True] * len(equation.outvars) if inner is None else _reached(inner.jaxpr, inputs)
      reached |= {id(one) for one, of_interest in zip(equation.outvars, outputs, strict=True) if of_interest}
  return [id(one) in reached for one in program.outvars]
