"""GradDefense (Wang, Guo, Xie, Qi, INFOCOM 2022), section IV: noise on random slices of equal leakage risk.

The risk of a layer is the sensitivity of its gradient to the input. The gradient is cut into slices of equal risk, and
every update adds Gaussian noise to a few of them, drawn at random. The server's side, section V, is in `compensation`.
"""

import dataclasses
import functools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradleak.core import errors, trees
from gradleak.core.settings import Choice, Count, Fraction, NonNegative, Positive, Range, ranged
from gradleak.core.trees import Layer, Tree
from gradleak.defenses import base
from gradleak.defenses.defense import Context, Noise, Settings, defense
from gradleak.models.model import per_example_loss

CITATION = 'Wang, Guo, Xie, Qi: Protect Privacy from Gradient Leakage Attack in Federated Learning. INFOCOM 2022.'
BALANCES = ('sensitivity', 'size')
ESTIMATES = ('exact', 'probes', 'probes_squared')
_ROOT = 100  # public samples that the risk is measured on, as in the paper
_SMALL_UNIT = 2.0**-60  # of risks whose squares leave the range of float32


class Slicing(NamedTuple):
  """A gradient cut into contiguous slices; NumPy arrays.

  Attributes:
    slices: int32 arrays shaped like the parameters: the number of the slice that each entry belongs to; s where it is
      not shared.
    risk: float32 [s], the leakage risk of each slice.
    imbalance: (max − min) / mean of the slices' risks; 0 where there is no risk.
    num_slices: s.
  """

  slices: Tree
  risk: np.ndarray
  imbalance: float
  num_slices: int


@ranged
def sensitivity(
  client: Any,
  variables: Mapping,
  samples: jax.Array,
  targets: jax.Array,
  *,
  method: Annotated[str, Choice(ESTIMATES)] = 'exact',
  probes: Count = 8,
  key: jax.Array | None = None,
) -> jax.Array:
  """Returns the leakage risk of each layer, float32 [L]: mean over the samples of ‖∂g_l(x)/∂x‖_F (equations 1 and 2).

  g_l is the gradient of one sample's loss, computed as by the undefended client. BatchNorm runs on the statistics of
  that one sample, unless its mode is 'eval'. For texts, x are the probabilities of tokens. Layers are the model's where
  it offers them, else as `gradleak.core.trees.layer_numbers` finds them; l is the number that it gives the layer.

  Args:
    client: the `Client`, used without its defenses.
    variables: the global model's.
    samples, targets: the public root samples, float32 [K, H, W, C] and integer [K] or probabilities [K, classes].
    method: 'exact' takes one directional derivative per pixel. 'probes' takes them along z ~ N(0, I), for which
      E‖Jz‖² = ‖J‖²_F, and the root of their mean for each sample. By Jensen's inequality that root is biased by a
      relative −v / (8·probes), v ≤ 2 being the relative variance of ‖Jz‖²: at most 3 % with 8 probes.
      'probes_squared' averages the squares over probes and samples and takes the root last: the root mean square of
      the norms instead of eq. 2's mean; the estimate of its square is unbiased.
    probes: number of directions for each sample.
    key: drives the probes.

  Raises:
    UsageError: for probes without a key.
  """
  if method != 'exact' and key is None:
    raise errors.UsageError(f'sensitivity by {method} draws directions and needs key=jax.random.key(…)')
  measure = functools.partial(
    _squared_sensitivity, client, variables, samples, targets, key, None if method == 'exact' else probes
  )
  squares, unit = measure(), 1.0
  if not np.isfinite(squares).all():  # weights of a malicious server: squares above 1e38
    squares, unit = measure(_SMALL_UNIT), _SMALL_UNIT
  if method == 'probes_squared':
    return jnp.sqrt(jnp.mean(squares, axis=0)) / unit
  return jnp.mean(jnp.sqrt(squares), axis=0) / unit


@functools.partial(jax.jit, static_argnums=(0, 5, 6))
def _squared_sensitivity(
  client: Any,
  variables: Mapping,
  samples: jax.Array,
  targets: jax.Array,
  key: Any,
  probes: int | None,
  unit: float = 1.0,
) -> jax.Array:
  """Returns ‖unit·∂g_l(x)/∂x‖²_F by sample and layer, float32 [K, L]; exact if `probes` is None, else estimated."""
  params, kind = variables['params'], client.modality
  numbers, count = trees.layer_numbers(params, _layers(client, samples.shape[1 : 1 + kind.axes]))
  samples = kind.relaxation('', client.model).relaxed(samples, variables)  # whole numbers have no derivative
  shape = samples.shape[1:]
  single = client.of_one_gradient()

  def of_sample(sample: tuple) -> jax.Array:
    index, image, label = sample

    def gradient(image: jax.Array) -> Tree:
      return single.local_update(None, variables, image[None], label[None]).update

    _, directional = jax.linearize(gradient, image)

    def squares(direction: jax.Array) -> jax.Array:
      return trees.layer_sums(jax.tree.map(lambda d: jnp.sum((unit * d) ** 2), directional(direction)), numbers, count)

    if probes is not None:
      directions = jax.random.normal(jax.random.fold_in(key, index), (probes, *shape), samples.dtype)
      return jnp.mean(jax.lax.map(squares, directions, batch_size=32), axis=0)
    pixels = jnp.arange(image.size, dtype=jnp.int32)

    def of_pixel(pixel: jax.Array) -> jax.Array:
      return squares((pixels == pixel).astype(image.dtype).reshape(shape))

    return jnp.sum(jax.lax.map(of_pixel, pixels, batch_size=32), axis=0)

  return jax.lax.map(of_sample, (jnp.arange(samples.shape[0], dtype=jnp.int32), samples, targets))


@ranged
def slice_gradients(
  params: Tree,
  layer_risk: Sequence[float] | np.ndarray | jax.Array,
  num_slices: Count,
  layers: Sequence[Layer] | None = None,
  balance: Annotated[str, Choice(BALANCES)] = 'sensitivity',
  unshared: Collection = (),
) -> Slicing:
  """Returns the `Slicing` of gradients shaped like `params` (section IV-B), computed in NumPy on the host.

  Layers, in forward order, are cut into blocks of the greatest common divisor of their sizes. A block with S_b of a
  layer's S_l entries has the risk `R_b = R_l·S_b/S_l`, as in the published code. Frobenius norms would add as squares.
  Each slice in turn takes at least one block. It takes as many as bring its risk nearest to the remaining risk over the
  remaining slices. If that divisor gives fewer blocks than slices, blocks are single entries.

  Args:
    params: the parameters, or anything with their structure and shapes.
    layer_risk: float [L], as `sensitivity` returns it.
    num_slices: s.
    layers: a sequence of `gradleak.core.trees.Layer`, or None; the same as for `layer_risk`.
    balance: 'sensitivity', or 'size' for slices of equal size, the baseline of Table III A.
    unshared: the paths of parameters that are not shared, `Context.unshared`: what is never sent is in no slice.

  Raises:
    UsageError: for more slices than shared entries, or risks that are negative, not finite or not one per layer.
  """
  leaves, treedef = jax.tree.flatten(params)
  numbers, count = trees.layer_numbers(params, layers)
  numbers = jax.tree.leaves(numbers)
  layer_risk = np.asarray(layer_risk, np.float64)
  if layer_risk.shape != (count,) or not np.isfinite(layer_risk).all() or (layer_risk < 0).any():
    raise errors.UsageError(f'layer risks are {layer_risk}, expected {count} finite numbers ≥ 0, one per layer')
  sizes = np.bincount(numbers, [leaf.size for leaf in leaves], count).astype(np.int64)
  held = [trees.path_names(path) not in unshared for path, _ in jax.tree.leaves_with_path(params)]
  sent = np.bincount(numbers, [leaf.size * one for leaf, one in zip(leaves, held, strict=True)], count).astype(np.int64)
  errors.check_number('slice_gradients(num_slices)', num_slices, low=1, high=int(sent.sum()), integer=True)

  order = _forward_order(params, layers)
  layer_order = list(dict.fromkeys(numbers[i] for i in order))
  block = math.gcd(*sizes.tolist())
  if sent.sum() // block < num_slices:
    block = 1
  block_layers = np.repeat(layer_order, sizes[layer_order] // block)
  share = np.repeat([held[i] for i in order], [leaves[i].size for i in order]).reshape(-1, block).mean(axis=1)
  used = share > 0
  risk = (layer_risk / np.maximum(sent, 1) * block)[block_layers] * share
  weighed = risk if balance == 'sensitivity' and risk.any() else share
  ends = _equal_parts(weighed[used], num_slices)
  block_slices = np.full(len(risk), num_slices, np.int32)
  block_slices[used] = np.repeat(np.arange(num_slices, dtype=np.int32), np.diff(ends, prepend=0))

  entries = np.split(np.repeat(block_slices, block), np.cumsum([leaves[i].size for i in order])[:-1])
  slices = {
    i: (part if held[i] else np.full_like(part, num_slices)).reshape(leaves[i].shape)
    for i, part in zip(order, entries, strict=True)
  }
  slice_risk = np.bincount(block_slices[used], risk[used], num_slices)
  imbalance = float(np.ptp(slice_risk) / slice_risk.mean()) if slice_risk.any() else 0.0
  slices = jax.tree.unflatten(treedef, [slices[i] for i in range(len(leaves))])
  return Slicing(slices, slice_risk.astype(np.float32), imbalance, num_slices)


def _equal_parts(risk: np.ndarray, parts: int) -> np.ndarray:
  """Returns where each of `parts` contiguous groups of blocks ends, int [parts], by greedy packing."""
  cumulative = np.concatenate([[0.0], np.cumsum(risk)])
  ends = [0]
  for left in range(parts, 0, -1):
    start, blocks = ends[-1], len(risk)
    goal = cumulative[start] + (cumulative[-1] - cumulative[start]) / left
    after = int(np.clip(np.searchsorted(cumulative, goal), 1, blocks))
    nearest = after - int(goal - cumulative[after - 1] < cumulative[after] - goal)
    ends.append(blocks if left == 1 else int(np.clip(nearest, start + 1, blocks - left + 1)))
  return np.asarray(ends[1:])


def _forward_order(params: Tree, layers: Sequence[Layer] | None) -> list[int]:
  """Returns the indices of the leaves in the order of the layers, those of one layer next to each other."""
  rank = {path: i for i, path in enumerate(path for layer in layers or () for path in layer.paths)}
  names = [trees.path_names(path) for path, _ in jax.tree.leaves_with_path(params)]
  by_rank = sorted(range(len(names)), key=lambda i: rank.get(names[i], len(rank)))
  numbers = jax.tree.leaves(trees.layer_numbers(params, layers)[0])
  first: dict[int, int] = {}
  for position, i in enumerate(by_rank):
    first.setdefault(numbers[i], position)
  return sorted(by_rank, key=lambda i: first[numbers[i]])


def _layers(client: Any, sample_shape: tuple[int, ...]) -> tuple[Layer, ...] | None:
  return None if client.model.layers is None else client.model.layers(sample_shape)


def num_perturbed(ratio: float | jax.Array, num_slices: int) -> jax.Array:
  """Returns d = max(1, ⌊s·γ⌋), an int32 scalar (Algorithm 1, line 2); the ratio γ may be traced."""
  # In float32, 0.29·100 is 28.999999: the correction restores the exact count.
  product = jnp.asarray(ratio, jnp.float32) * num_slices
  return jnp.maximum(1, jnp.floor(product + 1e-4).astype(jnp.int32))


def select_slices(key: jax.Array, num_slices: int, count: int | jax.Array) -> jax.Array:
  """Returns the mask of `count` distinct slices of `num_slices`, bool [s], by reservoir sampling (Algorithm 1).

  Every subset of that size is equally likely. `count` may be traced.
  """
  slots = jnp.arange(num_slices, dtype=jnp.int32)
  draws = jax.random.randint(key, (num_slices,), 0, slots + 1)

  def visit(i: jax.Array, reservoir: jax.Array) -> jax.Array:
    j = draws[i]
    return jnp.where((i >= count) & (j < count), reservoir.at[j].set(i), reservoir)

  # All slots are carried along, so that the count can be traced; the first `count` are the reservoir.
  reservoir = jax.lax.fori_loop(jnp.int32(0), jnp.int32(num_slices), visit, slots)
  return jnp.any((reservoir[:, None] == slots[None]) & (slots < count)[:, None], axis=0)


def _add_noise(key: jax.Array, updates: Tree, slices: Tree, chosen: jax.Array, stddev: float) -> Tree:
  """Adds N(0, stddev²) to the entries of the chosen slices; all others keep their bits."""

  def noisy(u: jax.Array, numbers: jax.Array, draw: jax.Array) -> jax.Array:
    noise = jnp.asarray(stddev, draw.dtype) * draw
    return jnp.where(chosen[numbers] & (noise != 0), (u.astype(draw.dtype) + noise).astype(u.dtype), u)

  return jax.tree.map(noisy, updates, slices, trees.draws(jax.random.normal, key, updates))


_NOISE = Noise(
  lambda settings, context, count: settings['stddev'] ** 2,
  lambda settings: float(num_perturbed(settings['ratio'], settings['num_slices'])) / settings['num_slices'],
)
_NOISE_OF_SLICES = dataclasses.replace(_NOISE, groups=lambda arguments: arguments[0].slices)


def prepare(context: Context, settings: Settings) -> tuple[Slicing]:
  """Returns the positional arguments of `graddefense` for a `Context`: its `Slicing`.

  The probes are drawn from one fixed key: they concern public samples only, once, and all participants must compute the
  same slices.

  Raises:
    UsageError: if there are no public images, or the model has fewer entries than `num_slices`.
  """
  if context.public is None:
    raise errors.UsageError(
      'the defense graddefense measures its risk on public samples: give public=(samples, targets) to gradleak.scenario'
    )
  root, held = settings['root'], len(context.public[0])
  if root is not None and root > held:
    raise errors.UsageError(f'graddefense(root) is {root}, and there are {held} public samples')
  samples, targets = (jnp.asarray(part[: _ROOT if root is None else root]) for part in context.public)
  risk = sensitivity(
    context.client, context.variables, samples, targets, method=settings['estimate'], key=jax.random.key(0)
  )
  params = context.variables['params']
  balance, unshared = settings['balance'], context.unshared
  return (slice_gradients(params, risk, settings['num_slices'], context.layers, balance, unshared),)


@defense(
  place='upload',
  citation=CITATION,
  random=True,
  arguments=prepare,
  noise=_NOISE_OF_SLICES,
  post_processing=True,
  idle=lambda settings: settings['stddev'] == 0,
)
def graddefense(
  slicing: Any = None,
  *,
  stddev: NonNegative,
  ratio: Fraction = 0.3,
  num_slices: Count = 10,
  balance: Annotated[str, Choice(BALANCES)] = 'sensitivity',
  estimate: Annotated[str, Choice(ESTIMATES)] = 'probes',
  root: Annotated[int | None, Range(1)] = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Local random perturbation (Algorithm 1): noise on d = max(1, ⌊s·ratio⌋) random slices of the update.

  The paper's optional clipping (section V-C) of each sample's gradient in each local step is a separate defense:
  `clip_samples(norm=B)+graddefense(stddev=σB)`.

  Formula:
    R_l = \frac{1}{k} \sum_{i=1}^{k} \left\lVert \frac{\partial g_l(x_i)}{\partial x_i} \right\rVert_F, \quad
    g'_j = g_j + n_j \, [\, \text{slice}(j) \in D \,], \quad n_j \sim \mathcal{N}(0, \sigma^2), \quad |D| = d

  Args:
    slicing: the `Slicing`, made once for a model. Without it, `prepare` makes one by the settings from `num_slices` on
      when the defense is bound; with it, they are not used.
    stddev: σ of the noise, on the scale of the update. The paper's "noise variance 1E-2" is 0.1.
    ratio: γ, 0.2 against DGA and 0.3 against GIA in the paper. At least one slice is perturbed.
    num_slices: s; 10 in the published code, not stated in the paper.
    balance: 'sensitivity', or 'size' (see `slice_gradients`).
    estimate: how the risk is measured, the method of `sensitivity`. 'exact' is the paper's; 'probes' needs 8
      directional derivatives of the gradient for each root sample instead of one per pixel.
    root: the number of public samples that the risk is measured on; by default 100, as in the paper, or all if there
      are fewer.

  Raises:
    UsageError: from its update, if no `key=` is given.
  """

  def perturb(key: jax.Array, updates: Tree) -> Tree:
    base.require_argument('graddefense', 'slicing', slicing)
    selection, noise = jax.random.split(key)
    chosen = select_slices(selection, slicing.num_slices, num_perturbed(ratio, slicing.num_slices))
    chosen = jnp.append(chosen, False)  # what is in no slice
    return _add_noise(noise, updates, slicing.slices, chosen, stddev)

  return base.stateless('graddefense', perturb, random=True)


@defense(
  place='step',
  citation=CITATION,
  random=True,
  arguments=lambda context, settings: (context.client,),
  noise=_NOISE,
  idle=lambda settings: settings['stddev'] == 0 and math.isinf(settings['clip']),
)
def graddefense_step(
  client: Any = None,
  *,
  stddev: NonNegative,
  ratio: Fraction = 0.5,
  num_slices: Count = 10,
  clip: Positive = math.inf,
) -> optax.GradientTransformationExtraArgs:
  r"""GradDefense in each local step: the risk is measured anew, with the cheaper measure of the published code.

  The risk of a tensor is the sum over the batch of ‖∂(Σ g)/∂x_i‖₂, one vector-Jacobian product with ones. Entries of
  opposite sign cancel in it. Each tensor is a layer of its own, in forward order; those that are not shared have no
  risk. The slices have equal risk, to within one entry. Its update needs `key=`, `batch=` and `params`; it uses
  `weights=` and `variables=` if given.

  The published code differs. It measures on one batch of the root set, here on the client's own batch, and its slices
  overlap by one entry. With clipping, it clips the chosen slices of every sample to the norm `stddev` before they are
  averaged. Here, those of the batch's gradient are clipped to `clip`. Both are the same for a batch of one and clip =
  stddev.

  Formula:
    R_t = \sum_{i=1}^{N} \left\lVert \frac{\partial}{\partial x_i} \sum_j g_{t,j} \right\rVert_2, \quad
    g'_j = g_j + n_j \, [\, \text{slice}(j) \in D \,], \quad n_j \sim \mathcal{N}(0, \sigma^2)

  Args:
    client: the `Client` whose model, loss and BatchNorm mode are used. Dropout is off in the risk.
    stddev: σ of the noise.
    ratio: the fraction of the slices that are perturbed; 0.5 in the published code.
    num_slices: s; 10 there.
    clip: bound on the 2-norm of each chosen slice; infinity clips nothing. A slice whose norm is no finite number
      becomes zeros.

  Raises (from its update):
    UsageError: for a missing `key=`, `batch=` or `params`, or missing `variables=` where BatchNorm runs on its running
      statistics.
  """
  name = 'graddefense_step'

  def update(
    updates: Tree,
    state: optax.OptState,
    params: Tree = None,
    *,
    key: jax.Array | None = None,
    batch: tuple | None = None,
    weights: jax.Array | None = None,
    variables: Mapping | None = None,
    **extra: Any,
  ) -> tuple[Tree, optax.OptState]:
    del extra
    base.require_argument(name, 'client', client)
    key = base.stream(name, key, updates)
    samples, targets = base.require_batch(name, batch, params)
    weights = jnp.ones(samples.shape[:1], jnp.float32) if weights is None else weights
    # Slices are whole numbers: no derivative passes through the risk, and none should be traced.
    given = jax.lax.stop_gradient((_float32(params), _float32(variables or {}), samples, targets, weights))
    shape = samples.shape[1 : 1 + client.modality.axes]
    sent = client.shared_layers(params, shape) if client.frozen or client.private else None
    slices = _cut(params, _tensor_risks(client, *given), num_slices, _layers(client, shape), sent)
    selection, noise = jax.random.split(key)
    chosen = select_slices(selection, num_slices, num_perturbed(ratio, num_slices))
    updates = _clip_slices(updates, slices, chosen, clip)
    return _add_noise(noise, updates, slices, chosen, stddev), state

  return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def _tensor_risks(
  client: Any, params: Tree, variables: Mapping, samples: jax.Array, targets: jax.Array, weights: jax.Array
) -> jax.Array:
  """Returns the risk of each leaf as `graddefense_step` measures it, float32 [leaves]."""
  if jnp.issubdtype(samples.dtype, jnp.integer):  # they have no derivative
    relaxation = client.modality.relaxation('', client.model)
    samples = relaxation.relaxed(samples, {**variables, 'params': params})

  def sums(samples: jax.Array) -> jax.Array:
    def mean_loss(params: Tree) -> jax.Array:
      losses, batch_stats = per_example_loss(
        client.model, client.loss, {**variables, 'params': params}, samples, targets, client.batch_norm == 'train'
      )
      if batch_stats and client.batch_norm == 'eval' and 'batch_stats' not in variables:
        raise errors.UsageError(
          'the defense graddefense_step needs the running statistics of BatchNorm: call update(…, variables={…})'
        )
      return client.loss.reduced(losses, targets, weights)

    return jnp.stack([jnp.sum(g) for g in jax.tree.leaves(jax.grad(mean_loss)(params))])

  values, pullback = jax.vjp(sums, samples)

  def risk(direction: jax.Array) -> jax.Array:
    squares = jnp.square(pullback(direction)[0])
    return jnp.sum(jnp.sqrt(jnp.sum(squares, axis=tuple(range(1, samples.ndim)))))

  return jax.lax.map(risk, jnp.eye(values.size, dtype=jnp.float32))


def _float32(tree: Tree) -> Tree:
  return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)


def _cut(params: Tree, risk: jax.Array, num_slices: int, layers: Sequence[Layer] | None, sent: Tree = None) -> Tree:
  """Returns int32 arrays shaped like `params`: slices of equal risk, for a traced risk of each leaf.

  What is not `sent`, a boolean for each leaf, has no risk.
  """
  leaves, treedef = jax.tree.flatten(params)
  order = _forward_order(params, layers)
  sizes = jnp.asarray([leaf.size for leaf in leaves], jnp.float32)
  if sent is not None:
    risk, sizes = (jnp.where(jnp.stack(jax.tree.leaves(sent)), x, 0.0) for x in (risk, sizes))
  risk = jnp.where(jnp.sum(risk) > 0, risk, sizes)[jnp.asarray(order, jnp.int32)]
  portions = risk / jnp.sum(risk)
  before = jnp.cumsum(portions) - portions
  slices: list[Any] = [None] * len(leaves)
  for position, i in enumerate(order):
    middles = (jnp.arange(leaves[i].size, dtype=jnp.float32) + 0.5) / leaves[i].size
    numbers = jnp.floor((before[position] + portions[position] * middles) * num_slices).astype(jnp.int32)
    slices[i] = jnp.clip(numbers, 0, num_slices - 1).reshape(leaves[i].shape)
  return jax.tree.unflatten(treedef, slices)


def _clip_slices(updates: Tree, slices: Tree, chosen: jax.Array, bound: float) -> Tree:
  """Scales each chosen slice to a 2-norm of at most `bound`."""
  leaves, parts = jax.tree.leaves(_float32(updates)), jax.tree.leaves(slices)
  # Norms in units of the largest entry: squares could leave the range of float32.
  unit = functools.reduce(jnp.maximum, [jnp.max(jnp.abs(leaf)) for leaf in leaves])
  unit = jax.lax.stop_gradient(jnp.where(unit > 0, unit, 1.0))

  def squared_norm(number: jax.Array) -> jax.Array:
    inside = [jnp.where(part == number, leaf / unit, 0.0) for leaf, part in zip(leaves, parts, strict=True)]
    return trees.squared_norm(inside)

  norms = unit * trees.safe_sqrt(jax.vmap(squared_norm)(jnp.arange(chosen.size, dtype=jnp.int32)))
  over = chosen & (norms > bound)
  factors = jnp.where(over, bound, 1.0) / jnp.where(over, norms, 1.0)
  lost = chosen & jnp.isfinite(bound) & ~jnp.isfinite(norms)  # no factor brings it within the bound

  def scaled(u: jax.Array, numbers: jax.Array) -> jax.Array:
    kept = trees.widened(jnp.where(lost[numbers], jnp.zeros_like(u), u))
    return (kept * factors[numbers].astype(kept.dtype)).astype(u.dtype)

  return jax.tree.map(scaled, updates, slices)
