"""OUTPOST (Wang, Hugh, Li 2024): noise where the weights tell most, in the first local steps above all."""

import math
import zlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from gradleak import errors, trees
from gradleak.defenses.base import require_key
from gradleak.defenses.compression import largest, largest_portion

VARIANTS = ('paper', 'code')


class OutpostState(NamedTuple):
  """How far the round has come.

  Attributes:
    count: local steps taken in this round, an int32 scalar; the paper's i is `count + 1` at the next one.
  """

  count: jax.Array


def outpost(
  layers=None,
  *,
  noise: float = 0.8,
  fisher: float = 0.4,
  decay: float = 0.1,
  prune: float = 0.8,
  variant: str = 'paper',
):
  """OUTPOST (section IV, algorithm 1), a defense of the step chain; the state must be made anew each round.

  The i-th local step of a round, i = 1, 2, …, is protected with probability 1/(1 + decay·i), the first one always. A
  protected step changes the gradient g layer by layer: the `prune` share of smallest |g| becomes zero, and the `fisher`
  share with the highest empirical Fisher information receives N(0, (noise·r)²). Any other step leaves g as it is.

  The risk r is the population variance of all the layer's parameters together, weights, biases and norm parameters, at
  most 1. The Fisher information is g² of this batch before pruning, in the order of |g|: with the defaults 60 % of a
  layer become zero, 20 % pure noise, 20 % gradient plus noise. Noise goes to ⌈fisher·n⌉ of a layer's n entries, of
  equal ones to the first; all those equal to the pruning threshold stay.

  Args:
    layers: the model's layers, a sequence of `gradleak.trees.Layer`; None takes the modules of the parameter tree.
    noise: λ ≥ 0.
    fisher: φ in [0, 1], a share.
    decay: β ≥ 0; infinity protects the first step alone.
    prune: ρ in [0, 1], a share. noise = prune = 0 is the identity.
    variant: 'paper', or 'code' for the rules of the authors' code: each tensor has its own risk and pruning threshold;
      one Fisher threshold, ties included, holds for the whole model, over means of g² along axis 0 of each tensor (as
      it lies in the tree: PyTorch's axis 0 counts outputs, a Flax dense kernel's inputs); the first step is protected
      with probability 1/(1 + decay) only. Its β was 0.125.

  Raises (update too):
    UsageError: for a setting out of range, an unknown variant, or a missing `key=` or `params`.
  """
  errors.check_number('outpost(noise)', noise, low=0, finite=True)
  errors.check_number('outpost(fisher)', fisher, low=0, high=1)
  errors.check_number('outpost(decay)', decay, low=0)
  errors.check_number('outpost(prune)', prune, low=0, high=1)
  if variant not in VARIANTS:
    raise errors.unknown('outpost(variant)', variant, VARIANTS)
  chosen = _highest_fisher if variant == 'paper' else _highest_mean_fisher

  def update(updates, state, params=None, *, key=None, **extra):
    del extra
    key = jax.random.fold_in(require_key('outpost', key), zlib.crc32(b'outpost'))
    if params is None:
      raise errors.UsageError(
        'the defense outpost measures the risk by the weights and needs params: call update(updates, state, params, …)'
      )
    groups = _group(updates, layers if variant == 'paper' else None, by_tensor=variant == 'code')

    def perturb(u, kept, noisy, risk, key):
      stddev = (jnp.asarray(noise, jnp.float32) * risk).astype(u.dtype)
      draw = jax.random.normal(key, u.shape, u.dtype)
      zero = jnp.zeros_like(u)
      return jnp.where(kept, u, zero) + jnp.where(noisy, stddev * draw, zero)

    perturbed = jax.tree.map(
      perturb,
      updates,
      _group_masks(lambda g: largest(g, prune), updates, groups),
      chosen(updates, groups, fisher),
      _risks(params, groups),
      trees.fold_in_leaves(jax.random.fold_in(key, 1), updates),
    )
    count = optax.safe_increment(state.count)
    probability = 1 / (1 + jnp.asarray(decay, jnp.float32) * count.astype(jnp.float32))
    active = jax.random.uniform(jax.random.fold_in(key, 0)) < probability
    if variant == 'paper':
      active |= count == 1
    return jax.tree.map(lambda p, u: jnp.where(active, p, u), perturbed, updates), OutpostState(count)

  return optax.GradientTransformationExtraArgs(lambda params: OutpostState(jnp.zeros((), jnp.int32)), update)


def _group(tree, layers, by_tensor):
  """Returns, for each group of tensors that share a threshold, the indices of its leaves."""
  leaves, treedef = jax.tree.flatten(tree)
  if by_tensor:
    return [[i] for i in range(len(leaves))]
  numbers, count = trees.layer_numbers(tree, layers)
  numbers = treedef.flatten_up_to(numbers)
  return [[i for i, number in enumerate(numbers) if number == group] for group in range(count)]


def _vector(leaves):
  """Returns the entries of all `leaves` in one float32 vector."""
  return jnp.concatenate([leaf.astype(jnp.float32).ravel() for leaf in leaves])


def _split(vector, shapes):
  """Returns arrays of the given shapes, cut from `vector` in order."""
  parts, start = [], 0
  for shape in shapes:
    size = math.prod(shape)
    parts.append(vector[start : start + size].reshape(shape))
    start += size
  return parts


def _group_masks(function, tree, groups):
  """Returns a tree of masks: `function` of each group's vector of entries, cut back into tensors."""
  leaves, treedef = jax.tree.flatten(tree)
  masks = [None] * len(leaves)
  for group in groups:
    mask = function(_vector([leaves[i] for i in group]))
    for i, part in zip(group, _split(mask, [leaves[i].shape for i in group]), strict=True):
      masks[i] = part
  return treedef.unflatten(masks)


def _risks(params, groups):
  """Returns a tree of float32 scalars: each tensor's risk, the clamped variance of its group's parameters."""
  leaves, treedef = jax.tree.flatten(params)
  risks = [None] * len(leaves)
  for group in groups:
    risk = jnp.minimum(jnp.var(_vector([leaves[i] for i in group])), jnp.float32(1))
    for i in group:
      risks[i] = risk
  return treedef.unflatten(risks)


def _highest_fisher(updates, groups, share):
  """Returns the mask of the `share` of each group with the highest g²; ranking |g| is the same, and never overflows."""
  return _group_masks(lambda g: largest_portion(g, share), updates, groups)


def _highest_mean_fisher(updates, groups, share):
  """Returns the code's mask: one threshold for the whole model, on g² averaged over axis 0 of each tensor."""
  del groups
  leaves, treedef = jax.tree.flatten(updates)
  fisher = [jnp.mean(jnp.square(jnp.atleast_1d(g).astype(jnp.float32)), axis=0) for g in leaves]
  masks = _split(largest(_vector(fisher), 1 - share), [f.shape for f in fisher])
  masks = [jnp.broadcast_to(mask[None], jnp.atleast_1d(g).shape) for mask, g in zip(masks, leaves, strict=True)]
  return treedef.unflatten([mask.reshape(g.shape) for mask, g in zip(masks, leaves, strict=True)])
