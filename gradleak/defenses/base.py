"""What the defenses share: composition, keys, and the error for a missing one."""

import zlib

import jax
import optax

from gradleak import errors


def chain(*transformations):
  """Composes transformations like `optax.chain`, giving each member a key of its own.

  `optax.chain` hands the same `key=` to every member: two noises of the same kind would be one noise, twice. Here the
  i-th member gets `fold_in(key, i)`.
  """
  if len(transformations) == 1:
    return optax.with_extra_args_support(transformations[0])
  members = [optax.with_extra_args_support(transformation) for transformation in transformations]

  def init(params):
    return tuple(member.init(params) for member in members)

  def update(updates, state, params=None, *, key=None, **extra):
    new_state = []
    for i, (member, member_state) in enumerate(zip(members, state, strict=True)):
      if key is not None:
        extra['key'] = jax.random.fold_in(key, i)
      updates, member_state = member.update(updates, member_state, params, **extra)
      new_state.append(member_state)
    return updates, tuple(new_state)

  return optax.GradientTransformationExtraArgs(init, update)


def require_key(name, key):
  """Returns `key`, or raises the `UsageError` that says how the defense `name` is given one."""
  if key is None:
    raise errors.UsageError(
      f'the defense {name} draws noise and needs a key: call update(updates, state, params, key=jax.random.key(…))'
    )
  return key


def require_batch(name, batch, params):
  """Returns (images, labels as probabilities) of `batch`, or raises the `UsageError` that says how it is given."""
  if batch is None or params is None:
    missing = 'batch' if batch is None else 'params'
    raise errors.UsageError(
      f'the defense {name} looks at the samples and the model and needs {missing}: call '
      'update(updates, state, params, batch=(images, labels))'
    )
  return batch


def stateless(name, function, *, random=False):
  """Returns the transformation that maps updates by `function(updates)`, or `function(key, updates)` if random.

  A random one folds the CRC of its name into the key, so that different methods draw different noise from the same key.

  Raises (from its update):
    UsageError: if it is random and no `key=` is given.
  """

  def update(updates, state, params=None, *, key=None, **extra):
    del params, extra
    if not random:
      return function(updates), state
    return function(jax.random.fold_in(require_key(name, key), zlib.crc32(name.encode())), updates), state

  return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
