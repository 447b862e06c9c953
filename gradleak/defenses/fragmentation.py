"""FFL (Na et al., ACSAC 2022): a client sends the layers of its update that are most like everybody's."""

import zlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from gradleak import errors, trees
from gradleak.defenses import base, compression


class FragmentationState(NamedTuple):
  """What a client keeps between participations.

  Attributes:
    previous: parameters of the model that it was sent before (the paper's supplementary storage).
    participated: whether `previous` is such a model yet, a boolean scalar.
    sent: whether each tensor was sent, a tree of boolean scalars.
    similarity: of each layer to the global gradient, float32 [L], in the order of the layers' first tensors in the
      tree; 0 before there is one.
  """

  previous: object
  participated: jax.Array
  sent: object
  similarity: jax.Array


def fragmentation(layers=None, share='gradient', previous=None, *, ratio: float, unit: str = 'layer'):
  """Sends the ⌈ratio·L⌉ of the L layers that point most the way of the global gradient (section 4.2, algorithm 1).

  The global gradient is estimated by the difference of the model that a client was sent before and the present one,
  and likeness is the cosine, 0 where a norm is zero. At its first participation a client has no such difference and
  sends as many layers at random. Without `previous`, `key=` is therefore needed at every update: whether it is used is
  known only when the update runs. The present `params` are always needed, and are the next update's previous ones.

  Equation 4 is printed with the sign of equation 1 reversed. It is read so that an update equal to the global one
  scores +1: gradients are compared with previous − present parameters, deltas with present − previous.

  Args:
    layers: a sequence of `trees.Layer`; see `trees.layer_numbers` for what happens without it.
    share: what the client shares, 'gradient' or 'delta'.
    previous: the parameters that it was sent before, or None at its first participation.
    ratio: the share of layers that are sent, in [0, 1].
    unit: 'layer', or 'tensor' to choose among single tensors.

  Raises:
    UsageError: for a setting out of range; from its update, where `params` or a needed `key` is missing.
  """
  errors.check_number('fragmentation(ratio)', ratio, low=0, high=1)
  if unit not in ('layer', 'tensor'):
    raise errors.unknown('unit of fragmentation', unit, ('layer', 'tensor'))
  if share not in ('gradient', 'delta'):
    raise errors.unknown('share', share, ('gradient', 'delta'))

  def numbered(tree):
    return _tensor_numbers(tree) if unit == 'tensor' else trees.layer_numbers(tree, layers)

  def init(params):
    # Under optax.masked, parameters have holes that `previous` has not.
    stored = params if previous is None else _like(params, previous)
    return FragmentationState(
      stored, jnp.asarray(previous is not None), _all_sent(params), jnp.zeros(numbered(params)[1], jnp.float32)
    )

  def update(updates, state, params=None, *, key=None, **extra):
    del extra
    if params is None:
      raise errors.UsageError(
        'the defense fragmentation compares the model with the previous one and needs params: call '
        'update(updates, state, params)'
      )
    numbers, count = numbered(updates)
    older, newer = (params, state.previous) if share == 'gradient' else (state.previous, params)
    global_update = jax.tree.map(lambda x, y: _float32(x) - _float32(y), newer, older)
    similarity = layer_cosines(updates, global_update, numbers, count)
    score = similarity
    if previous is None:
      score = jnp.where(state.participated, similarity, _draw('fragmentation', key, count))
    sent = _best(score, ratio, numbers)
    return trees.withhold(updates, sent), FragmentationState(params, jnp.ones((), bool), sent, similarity)

  return optax.GradientTransformationExtraArgs(init, update)


def fragmentation_random(layers=None, *, ratio: float):
  """Sends ⌈ratio·L⌉ of the L layers, drawn anew at each update: what FFL's choice is compared with.

  Args:
    layers: a sequence of `trees.Layer`; see `trees.layer_numbers` for what happens without it.
    ratio: the share of layers that are sent, in [0, 1].
  """
  errors.check_number('fragmentation_random(ratio)', ratio, low=0, high=1)

  def update(updates, state, params=None, *, key=None, **extra):
    del state, params, extra
    numbers, count = trees.layer_numbers(updates, layers)
    sent = _best(_draw('fragmentation_random', key, count), ratio, numbers)
    return trees.withhold(updates, sent), compression.SentState(sent)

  return optax.GradientTransformationExtraArgs(lambda params: compression.SentState(_all_sent(params)), update)


def layer_cosines(a, b, numbers, count):
  """Returns the cosine of `a` and `b` on each layer, float32 [count]; 0 where a norm is zero."""
  a, b = _unit_scale(a, numbers, count), _unit_scale(b, numbers, count)

  def inner_products(x, y):
    return trees.layer_sums(jax.tree.map(lambda u, v: jnp.sum(u * v), x, y), numbers, count)

  lengths = trees.safe_sqrt(inner_products(a, a)) * trees.safe_sqrt(inner_products(b, b))
  positive = lengths > 0
  return jnp.where(positive, inner_products(a, b) / jnp.where(positive, lengths, jnp.ones_like(lengths)), 0.0)


def _unit_scale(tree, numbers, count):
  """Divides each layer by about its largest magnitude: squares of small gradients would leave float32's range."""
  tree = jax.tree.map(_float32, tree)
  scales = trees.layer_sums(jax.tree.map(lambda x: jnp.max(jnp.abs(x)), tree), numbers, count)
  scales = jnp.where(scales > 0, scales, jnp.ones_like(scales))
  return jax.tree.map(lambda x, number: x / scales[number], tree, numbers)


def _best(score, ratio, numbers):
  """Returns the tree of masks that sends the ⌈ratio·L⌉ layers of the highest score."""
  rank = jnp.argsort(jnp.argsort(-score))
  kept = rank < compression.portion(ratio, score.size)
  return jax.tree.map(lambda number: kept[number], numbers)


def _draw(name, key, count):
  """Returns a random score for each layer."""
  return jax.random.uniform(jax.random.fold_in(base.require_key(name, key), zlib.crc32(name.encode())), (count,))


def _all_sent(tree):
  return jax.tree.map(lambda x: jnp.ones((), bool), tree)


def _tensor_numbers(tree):
  leaves, treedef = jax.tree.flatten(tree)
  return treedef.unflatten(range(len(leaves))), len(leaves)


def _like(tree, full):
  """Returns `full` with the holes and the dtypes of `tree`."""

  def is_hole(x):
    return isinstance(x, optax.MaskedNode)

  return jax.tree.map(lambda x, y: x if is_hole(x) else jnp.asarray(y, x.dtype), tree, full, is_leaf=is_hole)


def _float32(x):
  return x.astype(jnp.float32)
