"""OUTPOST (Wang, Hugh, Li 2024): pruning, and noise on the entries of highest Fisher information, in early steps."""

import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradleak.core import errors, trees
from gradleak.core.settings import Choice, Fraction, NonNegative, Range
from gradleak.core.trees import Layer, Tree
from gradleak.defenses.base import stream
from gradleak.defenses.compression import largest, largest_portion
from gradleak.defenses.defense import Context, Noise, Settings, defense

Variant = Annotated[str, Choice(('paper', 'code'))]


class OutpostState(NamedTuple):
  """The position in the round.

  Attributes:
    count: local steps taken in this round, an int32 scalar; the next step is the paper's i = count + 1.
  """

  count: jax.Array  # type: ignore[assignment]  # a tuple has a method of that name


def _variance(settings: Settings, context: Context, count: int) -> Tree:
  """Returns a tree of floats, (λ·r)² of each tensor at the first step."""
  del count
  leaves, treedef = jax.tree.flatten(context.variables['params'])
  found = [0.0] * len(leaves)
  for group in _groups(context.variables['params'], context.layers, settings['variant'], context.frozen):
    entries = np.concatenate([np.ravel(leaves[i]) for i in group])
    lost = min(_lost(settings['variant']), entries.size - 1)
    risk = min(1.0, float(np.var(entries, ddof=lost)))
    for i in group:
      found[i] = (settings['noise'] * risk) ** 2
  return jax.tree.unflatten(treedef, found)


def _arguments(context: Context, settings: Settings) -> tuple:
  del settings
  return (context.layers, context.frozen) if context.frozen else (context.layers,)


@defense(place='step', sparsifies='zeros', by_magnitude=True, arguments=_arguments)
def outpost_pruning(
  layers: Sequence[Layer] | None = None, frozen: Any = (), *, prune: Fraction = 0.8, variant: Variant = 'paper'
) -> optax.GradientTransformationExtraArgs:
  """The pruning of `outpost` without its noise, in the first step of a round alone: what is not random of it.

  Args:
    layers, frozen, prune, variant: as `outpost` takes them.
  """

  def update(updates: Tree, state: OutpostState, params: Tree = None, **extra: Any) -> tuple[Tree, OutpostState]:
    del params, extra
    kept = _group_masks(lambda g: largest(g, prune), updates, _groups(updates, layers, variant, frozen))
    count = optax.safe_increment(state.count)
    pruned = jax.tree.map(lambda u, k: jnp.where(k | (count > 1), u, jnp.zeros_like(u)), updates, kept)
    return pruned, OutpostState(count)

  return optax.GradientTransformationExtraArgs(lambda params: OutpostState(jnp.zeros((), jnp.int32)), update)


@defense(
  place='step',
  citation='Wang, Hugh, Li: More Than Enough Is Too Much: Adaptive Defenses against Gradient Leakage in Production '
  'Federated Learning. IEEE/ACM Transactions on Networking, 2024.',
  random=True,
  arguments=_arguments,
  sparsifies='zeros',
  by_magnitude=True,
  noise=Noise(_variance, lambda settings: settings['fisher']),
  simulated=lambda settings: outpost_pruning(prune=settings['prune'], variant=settings['variant']),
  idle=lambda settings: settings['noise'] == settings['prune'] == 0,
)
def outpost(
  layers: Sequence[Layer] | None = None,
  frozen: Any = (),
  *,
  noise: NonNegative = 0.8,
  fisher: Fraction = 0.4,
  decay: Annotated[float, Range(0)] = 0.1,
  prune: Fraction = 0.8,
  variant: Variant = 'paper',
) -> optax.GradientTransformationExtraArgs:
  r"""OUTPOST (section IV, algorithm 1), a defense of the step chain; `init` its state at the start of each round.

  The i-th local step of a round is protected with probability `1/(1 + decay·i)` for `i = 1, 2, …`, and the first step
  always. An expected 29.1 of the 180 steps of the paper's training are protected, and 5.2 of 7 steps (see
  `step_probability`). A protected step changes the gradient g of each layer. The fraction `prune` with the smallest |g|
  becomes zero. The fraction `fisher` with the highest empirical Fisher information receives `N(0, (noise·r)²)`. Other
  steps do not change g.

  The risk r is the population variance of all the layer's parameters together, weights, biases and norm parameters, at
  most 1. The Fisher information is g² of this batch before pruning, in the order of |g|. With the defaults, 60 % of a
  layer become zero, 20 % pure noise, 20 % gradient plus noise. Noise goes to ⌈fisher·n⌉ of a layer's n entries, of
  equal ones to the first; all entries equal to the pruning threshold are kept.

  The noise goes with the variance of the weights, and at a large learning rate raises that variance. In long trainings
  with few local steps the two grow together. The paper trains at a rate of 0.01.

  Formula:
    \Pr(i) = \frac{1}{1 + \beta i}, \quad g'_l = g_l \odot [\, |g_l| \ge \tau_l \,] + m_l \odot n_l

    n_l \sim \mathcal{N}(0, (\lambda r_l)^2 I), \quad r_l = \min(1, \text{Var}[\theta_l])

  Args:
    layers: the model's layers, a sequence of `gradleak.core.trees.Layer`; None takes the modules of the parameter tree.
    frozen: the paths of parameters that are not trained, `Context.frozen`; layers and model are then what is trained.
    noise: λ.
    fisher: φ.
    decay: β; infinity protects only the first step.
    prune: ρ. noise = prune = 0 is the identity.
    variant: 'paper', or 'code' for the rules of the authors' code: each tensor has its own risk and pruning threshold;
      the whole model has one Fisher threshold, ties included, on means of g² along axis 0 of each tensor as it is
      stored (in PyTorch axis 0 counts a kernel's outputs, in Flax its inputs); r is the sample variance, 0 for a
      tensor of one entry (PyTorch's is NaN); i is the number of the epoch times that of the batch in it, both from 1
      on, which the `Client` gives as `position=`, and the first step is no exception. Its β was 0.125: of 180 steps in
      5 epochs 38.8 are expected to be protected.

  Raises (from its update):
    UsageError: for a missing `key=` or `params`.
  """
  protect = functools.partial(_protected, layers, variant, frozen, noise=noise, fisher=fisher, prune=prune)

  def update(
    updates: Tree,
    state: OutpostState,
    params: Tree = None,
    *,
    key: jax.Array | None = None,
    position: tuple | None = None,
    **extra: Any,
  ) -> tuple[Tree, OutpostState]:
    del extra
    key = stream('outpost', key, updates)
    if params is None:
      raise errors.UsageError(
        'the defense outpost measures the risk by the weights and needs params: call update(updates, state, params, …)'
      )
    protected = protect(jax.random.fold_in(key, 1), updates, params)
    count = optax.safe_increment(state.count)
    active = jax.random.uniform(jax.random.fold_in(key, 0)) < step_probability(count, decay, variant, position)
    return jax.tree.map(lambda p, u: jnp.where(active, p, u), protected, updates), OutpostState(count)

  return optax.GradientTransformationExtraArgs(lambda params: OutpostState(jnp.zeros((), jnp.int32)), update)


def step_probability(
  count: int | jax.Array, decay: float | jax.Array, variant: str = 'paper', position: tuple | None = None
) -> jax.Array:
  """Returns the probability that a local step is protected, a float32 scalar.

  Args:
    count: its number in the round, from 1 on.
    decay: β ≥ 0.
    variant: 'paper': 1/(1 + β·count), and 1 for the first step. 'code': 1/(1 + β·epoch·batch).
    position: (epoch, batch), both from 1 on, for 'code'; None takes all steps for those of one epoch: (1, count).
  """
  count = jnp.asarray(count, jnp.int32)
  epoch, batch = (1, count) if position is None or variant == 'paper' else position
  step = (jnp.asarray(epoch, jnp.int32) * batch).astype(jnp.float32)
  probability = 1 / (1 + jnp.asarray(decay, jnp.float32) * step)
  return jnp.where(count == 1, 1.0, probability) if variant == 'paper' else probability


def _lost(variant: str) -> int:
  """Returns the degrees of freedom that the variance of a variant loses: 1 for PyTorch's, the sample variance."""
  return int(variant == 'code')


def _protected(
  layers: Sequence[Layer] | None,
  variant: str,
  frozen: Collection,
  key: jax.Array,
  updates: Tree,
  params: Tree,
  *,
  noise: float,
  fisher: float,
  prune: float,
) -> Tree:
  """Returns the gradient of a protected step; the settings are those of `outpost`."""
  groups = _groups(updates, layers, variant, frozen)
  chosen = _highest_fisher if variant == 'paper' else _highest_mean_fisher

  def perturb(u: jax.Array, kept: jax.Array, noisy: jax.Array, risk: jax.Array, draw: jax.Array) -> jax.Array:
    stddev = (jnp.asarray(noise, jnp.float32) * risk).astype(draw.dtype)
    zero = jnp.zeros_like(draw)
    return (jnp.where(kept, u.astype(draw.dtype), zero) + jnp.where(noisy, stddev * draw, zero)).astype(u.dtype)

  return jax.tree.map(
    perturb,
    updates,
    _group_masks(lambda g: largest(g, prune), updates, groups),
    chosen(updates, groups, fisher),
    _risks(params, groups, _lost(variant)),
    trees.draws(jax.random.normal, key, updates),
  )


def _groups(tree: Tree, layers: Sequence[Layer] | None, variant: str, frozen: Collection) -> list[list[int]]:
  """Returns, for each group of trained tensors with a common risk and threshold, the indices of its leaves."""
  trained = [i for i, (path, _) in enumerate(jax.tree.leaves_with_path(tree)) if trees.path_names(path) not in frozen]
  if variant == 'code':
    return [[i] for i in trained]
  found, count = trees.layer_numbers(tree, layers)
  numbers = jax.tree.leaves(found)
  groups = [[i for i in trained if numbers[i] == group] for group in range(count)]
  return [group for group in groups if group]


def _vector(leaves: Sequence[jax.Array]) -> jax.Array:
  """Returns the entries of all `leaves` in one float32 vector."""
  return jnp.concatenate([leaf.astype(jnp.float32).ravel() for leaf in leaves])


def _split(vector: jax.Array, shapes: Sequence[tuple[int, ...]]) -> list[jax.Array]:
  """Returns arrays of the given shapes, cut from `vector` in order."""
  parts, start = [], 0
  for shape in shapes:
    size = math.prod(shape)
    parts.append(vector[start : start + size].reshape(shape))
    start += size
  return parts


def _group_masks(function: Callable[[jax.Array], jax.Array], tree: Tree, groups: list[list[int]]) -> Tree:
  """Returns a tree of masks: `function` of each group's vector of entries, cut back into tensors."""
  leaves, treedef = jax.tree.flatten(tree)
  masks: list[Any] = [jnp.zeros(leaf.shape, bool) for leaf in leaves]
  for group in groups:
    mask = function(_vector([leaves[i] for i in group]))
    for i, part in zip(group, _split(mask, [leaves[i].shape for i in group]), strict=True):
      masks[i] = part
  return jax.tree.unflatten(treedef, masks)


def _risks(params: Tree, groups: list[list[int]], lost: int) -> Tree:
  """Returns a tree of float32 scalars: each tensor's risk, the clamped variance of its group's parameters."""
  leaves, treedef = jax.tree.flatten(params)
  risks: list[Any] = [jnp.float32(0)] * len(leaves)
  for group in groups:
    entries = _vector([leaves[i] for i in group])
    risk = jnp.minimum(jnp.var(entries, ddof=min(lost, entries.size - 1)), jnp.float32(1))
    for i in group:
      risks[i] = risk
  return jax.tree.unflatten(treedef, risks)


def _highest_fisher(updates: Tree, groups: list[list[int]], fraction: float) -> Tree:
  """Returns the mask of the fraction of each group with the highest g², ranked by |g|, which does not overflow."""
  return _group_masks(lambda g: largest_portion(g, fraction), updates, groups)


def _highest_mean_fisher(updates: Tree, groups: list[list[int]], fraction: float) -> Tree:
  """Returns the mask of variant 'code': one threshold for the whole model, on g² averaged over axis 0."""
  leaves, treedef = jax.tree.flatten(updates)
  trained = [jnp.atleast_1d(leaves[i]) for (i,) in groups]
  fisher = [jnp.mean(jnp.square(g.astype(jnp.float32)), axis=0) for g in trained]
  masks = [jnp.zeros(leaf.shape, bool) for leaf in leaves]
  found = _split(largest(_vector(fisher), 1 - fraction), [f.shape for f in fisher])
  for (i,), g, mask in zip(groups, trained, found, strict=True):
    masks[i] = jnp.broadcast_to(mask[None], g.shape).reshape(leaves[i].shape)
  return jax.tree.unflatten(treedef, masks)
