"""FFL (Na et al., ACSAC 2022): a client sends only the layers of its update closest to the global gradient."""

from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gradleak.core import errors, trees
from gradleak.core.settings import Choice, Fraction
from gradleak.core.trees import Layer, Tree
from gradleak.defenses import base, compression
from gradleak.defenses.defense import Context, Settings, defense

CITATION = (
  'Na, Hong, Kim, Shin: Closing the Loophole: Rethinking Reconstruction Attacks in Federated Learning from a Privacy '
  'Standpoint. ACSAC 2022.'
)


class FragmentationState(NamedTuple):
  """What a client keeps between participations.

  Attributes:
    previous: parameters of the model that it received before (the paper's supplementary storage).
    participated: whether `previous` holds such a model yet, a boolean scalar.
    mask: whether each tensor was sent, a tree of boolean scalars.
    similarity: cosine of each layer with the global gradient, float32 [L], in the order of the layers' first tensors in
      the tree; 0 where the global gradient is not known yet.
  """

  previous: Tree
  participated: jax.Array
  mask: Tree
  similarity: jax.Array


def _layers(context: Context) -> tuple[Layer, ...] | None:
  """Returns the model's layers; raises `UsageError` where some are frozen."""
  kept = (*context.client.frozen, *context.client.private)
  if kept:
    raise errors.UsageError(
      f'fragmentation sends a part of all layers, and {", ".join(kept)} of this client are frozen or private: '
      'share all layers, or leave the defense out'
    )
  return context.layers


def _arguments(context: Context, settings: Settings) -> tuple:
  del settings
  previous = None if context.previous is None else context.previous['params']
  return _layers(context), context.client.share, previous


def _remark(context: Context, settings: Settings) -> str:
  del settings
  return 'first participation: layers are random' if context.previous is None else ''


@defense(
  place='upload',
  citation=CITATION,
  published='FFL',
  random=True,
  arguments=_arguments,
  remark=_remark,
  sparsifies='mask',
  selects=True,
  idle=lambda settings: settings['ratio'] == 1,
)
def fragmentation(
  layers: Sequence[Layer] | None = None,
  share: str = 'gradient',
  previous: Tree = None,
  *,
  ratio: Fraction,
  unit: Annotated[str, Choice(('layer', 'tensor'))] = 'layer',
) -> optax.GradientTransformationExtraArgs:
  r"""Sends the ⌈ratio·L⌉ of the L layers with the largest cosine to the global gradient (section 4.2, algorithm 1).

  The global gradient is estimated by the difference between the model that the client received before and the current
  one. The cosine is 0 where a norm is zero. At its first participation a client has no such difference and sends the
  same number of layers, drawn at random. Without `previous`, `key=` is therefore needed at every update: whether it is
  used is decided at run time. The current `params` are always needed, and are the next update's previous ones.

  The running statistics of BatchNorm are no parameters: in a training they are sent with their layer, and dropped with
  it, see `federated.simulation.statistics_sent`.

  Equation 4 is printed with the sign of equation 1 reversed. Here an update equal to the global one has cosine +1:
  gradients are compared with previous − current parameters, deltas with current − previous.

  Formula:
    s_l = \frac{\langle \Delta_l, \theta_l^k - \theta_l^{k-1} \rangle}{\lVert \Delta_l \rVert \,
    \lVert \theta_l^k - \theta_l^{k-1} \rVert}, \quad \text{sent: the } \lceil \text{ratio} \cdot L \rceil
    \text{ layers of the largest } s_l

  Args:
    layers: a sequence of `trees.Layer`; without it, layers are found as `trees.layer_numbers` describes.
    share: what the client uploads, 'gradient' or 'delta'.
    previous: the parameters that it received before, or None at its first participation.
    ratio: the fraction of layers that are sent.
    unit: 'layer', or 'tensor' to choose among single tensors.

  Raises:
    UsageError: for another share; from its update, where `params` or a needed `key` is missing.
  """
  errors.check_choice('share', share, ('gradient', 'delta'))

  def numbered(tree: Tree) -> tuple[Tree, int]:
    return _tensor_numbers(tree) if unit == 'tensor' else trees.layer_numbers(tree, layers)

  def init(params: Tree) -> FragmentationState:
    # Under optax.masked, parameters have holes that `previous` does not have.
    stored = params if previous is None else _like(params, previous)
    return FragmentationState(
      stored, jnp.asarray(previous is not None), _all_sent(params), jnp.zeros(numbered(params)[1], jnp.float32)
    )

  def update(
    updates: Tree, state: FragmentationState, params: Tree = None, *, key: jax.Array | None = None, **extra: Any
  ) -> tuple[Tree, FragmentationState]:
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
      score = jnp.where(state.participated, similarity, _draw('fragmentation', key, count, updates))
    mask = _best(score, ratio, numbers)
    return trees.masked(updates, mask), FragmentationState(params, jnp.ones((), bool), mask, similarity)

  return optax.GradientTransformationExtraArgs(init, update)


@defense(
  place='upload',
  citation=CITATION,
  published='FFL-random',
  random=True,
  arguments=lambda context, settings: (_layers(context),),
  sparsifies='mask',
  post_processing=True,
  idle=lambda settings: settings['ratio'] == 1,
)
def fragmentation_random(
  layers: Sequence[Layer] | None = None, *, ratio: Fraction
) -> optax.GradientTransformationExtraArgs:
  r"""Sends ⌈ratio·L⌉ of the L layers, drawn at random at each update: the baseline of `fragmentation`.

  Formula:
    \Delta'_l = \Delta_l \cdot [\, l \in S \,], \quad S \subseteq \{1, \ldots, L\} \text{ uniform}, \quad
    |S| = \lceil \text{ratio} \cdot L \rceil

  Args:
    layers: a sequence of `trees.Layer`; without it, layers are found as `trees.layer_numbers` describes.
    ratio: the fraction of layers that are sent.

  Raises:
    UsageError: from its update, without `key=`.
  """

  def update(
    updates: Tree, state: compression.MaskState, params: Tree = None, *, key: jax.Array | None = None, **extra: Any
  ) -> tuple[Tree, compression.MaskState]:
    del state, params, extra
    numbers, count = trees.layer_numbers(updates, layers)
    mask = _best(_draw('fragmentation_random', key, count, updates), ratio, numbers)
    return trees.masked(updates, mask), compression.MaskState(mask)

  return optax.GradientTransformationExtraArgs(lambda params: compression.MaskState(_all_sent(params)), update)


def layer_cosines(a: Tree, b: Tree, numbers: Tree, count: int) -> jax.Array:
  """Returns the cosine of `a` and `b` on each layer, float32 [count]; 0 where a norm is zero.

  Args:
    a, b: trees shaped like the parameters.
    numbers, count: the number of each leaf's layer, and of layers, as `trees.layer_numbers` returns them.
  """
  a, b = _unit_scale(a, numbers, count), _unit_scale(b, numbers, count)

  def inner_products(x: Tree, y: Tree) -> jax.Array:
    return trees.layer_sums(jax.tree.map(lambda u, v: jnp.sum(u * v), x, y), numbers, count)

  lengths = trees.safe_sqrt(inner_products(a, a)) * trees.safe_sqrt(inner_products(b, b))
  positive = lengths > 0
  return jnp.where(positive, inner_products(a, b) / jnp.where(positive, lengths, jnp.ones_like(lengths)), 0.0)


def _unit_scale(tree: Tree, numbers: Tree, count: int) -> Tree:
  """Divides each layer by about its largest magnitude: squares of small gradients underflow in float32."""
  tree = jax.tree.map(_float32, tree)
  scales = trees.layer_sums(jax.tree.map(lambda x: jnp.max(jnp.abs(x), initial=0.0), tree), numbers, count)
  scales = jnp.where(scales > 0, scales, jnp.ones_like(scales))
  return jax.tree.map(lambda x, number: x / scales[number], tree, numbers)


def _best(score: jax.Array, ratio: float, numbers: Tree) -> Tree:
  """Returns the tree of masks that sends the ⌈ratio·L⌉ layers of the highest score."""
  rank = jnp.argsort(jnp.argsort(-score))
  kept = rank < compression.portion(ratio, score.size)
  return jax.tree.map(lambda number: kept[number], numbers)


def _draw(name: str, key: jax.Array | None, count: int, updates: Tree) -> jax.Array:
  """Returns a random score for each layer."""
  return jax.random.uniform(base.stream(name, key, updates), (count,))


def _all_sent(tree: Tree) -> Tree:
  return jax.tree.map(lambda x: jnp.ones((), bool), tree)


def _tensor_numbers(tree: Tree) -> tuple[Tree, int]:
  leaves, treedef = jax.tree.flatten(tree)
  return jax.tree.unflatten(treedef, range(len(leaves))), len(leaves)


def _like(tree: Tree, full: Tree) -> Tree:
  """Returns `full` with the holes and the dtypes of `tree`."""

  def is_hole(x: Any) -> bool:
    return isinstance(x, optax.MaskedNode)

  return jax.tree.map(lambda x, y: x if is_hole(x) else jnp.asarray(y, x.dtype), tree, full, is_leaf=is_hole)


def _float32(x: jax.Array) -> jax.Array:
  return x.astype(jnp.float32)
