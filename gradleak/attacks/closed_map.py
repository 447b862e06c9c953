"""The map before a convolution, from the gradient of this convolution's weight, of one sample.

The gradient's rows, one for each channel, are combinations of the patches of the map: Σ_p δ_cp · patch_p. With as many
independent rows as there are positions, they span the patches. Where BatchNorm subtracts the mean of each channel, what
comes back to a channel sums to zero over all positions. Then the rows span the centred patches, and one row less
suffices. "The patches of x lie in this span" is linear and homogeneous in x. So the eigenvector of the least eigenvalue
is the map up to its scale.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
import scipy.sparse

from gradleak.models.stages import Stages

_INVARIANT = 1e-3  # relative; rounding behind a norm is about 1e-6
_REDUNDANT = 1.5  # equations for each unknown
_RANK = 1e-5  # of the largest singular value; what is smaller is rounding
_SHIFT = 1e-9  # of the mean eigenvalue, in inverse iterations
_SWEEPS, _STALLED = 40, 0.9  # over the directions that are missing, and the ratio of eigenvalues at which they end
_INVERSES = 4
_FEW = 0.25  # of the directions, up to which those that are missing are estimated
_PROBES = 8  # of the mean eigenvalue
_TOGETHER = 256  # maps that a form is inverted on at once
_TOLERANCE = 1e-7  # of a direction, at which inverse iterations end
EXACT = 1e-8  # the least eigenvalue over the mean one up to which a map is a start
_ENOUGH = 1e-11  # at which sweeps end


class Blind(NamedTuple):
  """What a stage does not see of its map, found on random weights.

  Attributes:
    mean: of what its first convolution makes, as where BatchNorm follows.
    scale: of the map, as where a norm follows and no shortcut passes.
    classes: (first row, first column, stride) of positions on which a constant for each channel makes no difference.
    inner: the same of what its first convolution makes less its mean. A shortcut without parameters sees more.
  """

  mean: bool
  scale: bool
  classes: tuple[tuple[int, int, int], ...]
  inner: tuple[tuple[int, int, int], ...] = ()


@functools.lru_cache(maxsize=64)
def blind(net_of: Callable[[], Stages], place: int) -> Blind:
  """Returns what the stage at `place` does not see."""
  net = net_of()
  stage, rng = net.stages[place], np.random.default_rng(0)
  x = rng.normal(size=stage.shape)
  params = {path: jnp.asarray(rng.normal(size=net.shapes[path]), jnp.float32) for path in stage.paths}
  behind = jax.jit(lambda x, offset: net.behind(stage, params, x, offset))
  product = jax.jit(lambda x: net.apply(stage, params, x, until=stage.product))

  none = np.zeros((1, 1, 1, 1 if stage.kernel is None else stage.produced[-1]))

  def made(x: np.ndarray, offset: Any = none) -> np.ndarray:
    return np.asarray(behind(jnp.asarray(x, jnp.float32), jnp.asarray(offset, jnp.float32)))

  def centred(x: np.ndarray) -> np.ndarray:
    own = np.asarray(product(jnp.asarray(x, jnp.float32)))
    return own - own.mean(axis=(1, 2), keepdims=True)

  def same(one: np.ndarray, other: np.ndarray) -> bool:
    return bool(np.linalg.norm(one - other) <= _INVARIANT * np.linalg.norm(one))

  mean = stage.kernel is not None and same(made(x), made(x, rng.normal(size=none.shape)))
  step, constants = max(stage.shape[1] // made(x).shape[1], 1), rng.normal(size=stage.shape[-1])
  classes, inner = [], []
  for row, column in np.ndindex(step, step):
    moved = x.copy()
    moved[:, row::step, column::step] += constants
    classes += [(row, column, step)] if same(made(x), made(moved)) else []
    inner += [(row, column, step)] if mean and same(centred(x), centred(moved)) else []
  return Blind(mean, same(made(x), made(2 * x)), tuple(classes), tuple(inner))


def unread(net_of: Callable[[], Stages], place: int) -> str:
  """Returns why the map before the stage at `place` has no closed form; '' where it has one."""
  stage = net_of().stages[place]
  if stage.kernel is None or axis_of(net_of, place) < 0:
    return 'does not start with a convolution'
  if any(stage.product in one.made and one.options.get('feature_group_count', 1) > 1 for one in stage.operations):
    return 'starts with a convolution of groups, each of which sees a part of the map'
  (_, height, width, channels), entries = stage.produced, int(np.prod(stage.shape))
  centred = blind(net_of, place).mean
  if not centred and height < stage.shape[1]:  # then the map and sums of copies moved by the stride look the same
    return 'has a stride, and no BatchNorm on the statistics of the batch follows its first convolution'
  if channels < height * width - centred:
    why = '' if centred else ', as no BatchNorm on the statistics of the batch follows it'
    return (
      f'has {height}×{width} positions, and its first convolution {channels} channels; it needs '
      f'{height * width - centred}{why}'
    )
  positions, filters = height * width, int(np.prod(net_of().shapes[stage.kernel])) // channels
  # An entry that several filters see is the same for all; unknown are the combinations of rows, and the mean patch.
  if positions * filters - entries < _REDUNDANT * (positions * (positions - centred) + centred * filters):
    return 'has filters that hardly overlap'
  return ''


def grounded(x: Any, classes: Sequence[tuple[int, int, int]]) -> np.ndarray:
  """Returns a map without negative entries that is zero somewhere in each class of `Blind` and channel."""
  x = np.array(x)
  for row, column, step in classes:
    part = x[:, row::step, column::step]
    part -= part.min(axis=(1, 2), keepdims=True)
  return np.maximum(x, 0)


def found(net_of: Callable[[], Stages], place: int, gradient: Any) -> tuple[np.ndarray, float]:
  """Returns (the map before a stage, up to its scale; the least eigenvalue over the mean one).

  Args:
    net_of: () -> the network.
    place: of the stage, where nothing is `unread`.
    gradient: of its first convolution's weight.
  """
  stage, unseen = net_of().stages[place], blind(net_of, place)
  numbered = np.arange(np.prod(stage.shape)).reshape(stage.shape)
  level = [numbered[0, row::step, column::step].reshape(-1, stage.shape[-1]).T for row, column, step in unseen.inner]
  own = rows(np.asarray(gradient), axis_of(net_of, place))
  x, eigenvalue = direction_of(
    patches(net_of, place), own, numbered.size, unseen.mean, np.concatenate(level) if level else None
  )
  x = grounded(x.reshape(stage.shape), unseen.inner)
  return (x / np.sqrt(np.mean(x**2))).astype(np.float32), eigenvalue


@functools.lru_cache(maxsize=32)
def patches(net_of: Callable[[], Stages], place: int) -> np.ndarray:
  """Returns which entries of a stage's map its first convolution sees, int [positions, entries of a filter].

  An entry of the map counts from 1; 0 is the padding. They are read from the convolution's own gradient, which is the
  patch where what comes back is one at a position and zero elsewhere.
  """
  net = net_of()
  stage = net.stages[place]
  size, path, channels = int(np.prod(stage.shape)), stage.first, stage.produced[-1]
  numbered = jnp.arange(1, size + 1, dtype=jnp.float32).reshape(stage.shape)
  params = {other: jnp.zeros(net.shapes[other]) for other in stage.paths}

  def convolved(kernel: jax.Array) -> jax.Array:
    return net.apply(stage, {**params, path: kernel}, numbered, until=stage.product)

  axis = axis_of(net_of, place)

  def seen(incoming: jax.Array) -> jax.Array:
    return rows(jax.vjp(convolved, params[path])[1](incoming)[0], axis)[0]

  positions = int(np.prod(stage.produced[1:3]))
  unit = jnp.zeros((positions, positions, channels)).at[jnp.arange(positions), jnp.arange(positions), 0].set(1)
  found = jax.jit(lambda unit: jax.lax.map(seen, unit))(unit.reshape(positions, *stage.produced))
  return np.rint(np.asarray(found)).astype(int)


@functools.lru_cache(maxsize=64)
def axis_of(net_of: Callable[[], Stages], place: int) -> int:
  """Returns the axis of a stage's first weight along which its channels stand; −1 where that is no axis.

  Libraries differ in it. It is read from the convolution's own gradient: what comes back to one channel only is the
  gradient of its weights only.
  """
  net = net_of()
  stage = net.stages[place]
  params = {path: jnp.zeros(net.shapes[path]) for path in stage.paths}

  def convolved(kernel: jax.Array) -> jax.Array:
    return net.apply(stage, {**params, stage.first: kernel}, jnp.ones(stage.shape), until=stage.product)

  def told(incoming: jax.Array) -> jax.Array:
    return jax.vjp(convolved, params[stage.first])[1](incoming)[0]

  given = (np.broadcast_to(one, stage.produced) for one in (1, np.arange(stage.produced[-1])))
  counts, sums = (np.asarray(jax.jit(told)(jnp.asarray(x, jnp.float32))) for x in given)
  for axis, size in reversed([*enumerate(counts.shape)]):
    wanted = counts * np.arange(size).reshape(-1, *[1] * (counts.ndim - 1 - axis))
    if size == stage.produced[-1] and np.allclose(sums, wanted, rtol=1e-3):
      return axis
  return -1


def rows(kernel: Any, axis: int) -> Any:
  """Returns the weights of a convolution as [channels, entries], given the axis of the channels."""
  order = (axis, *(one for one in range(kernel.ndim) if one != axis))
  return kernel.transpose(order).reshape(kernel.shape[axis], -1)


def direction_of(
  seen: np.ndarray, gradient: np.ndarray, size: int, centred: bool = True, level: np.ndarray | None = None
) -> tuple[np.ndarray, float]:
  """Returns (the map whose patches span a gradient, of norm 1; the least eigenvalue over the mean one).

  Where a few channels are dead, the directions that are missing are estimated from the solution, and both in turn. A
  gradient of zero tells nothing: its eigenvalue is infinite.

  Args:
    seen: int [positions, entries], see `patches`.
    gradient: of the convolution, [channels, entries].
    size: entries of the map.
    centred: whether the rows span the patches less their mean.
    level: entries of the map, int [groups, …], whose mean in each group is set to zero as it is not seen.
  """
  wanted = len(seen) - centred
  _, values, directions = np.linalg.svd(np.asarray(gradient, np.float64), full_matrices=False)
  known = directions[: min(wanted, int(np.sum(values > _RANK * values[0])))]
  if not len(known):
    return np.full(size, size**-0.5), np.inf
  missing, found = wanted - len(known), np.random.default_rng(0).normal(size=size)
  span = known

  def shown(x: np.ndarray) -> np.ndarray:
    own = np.concatenate([[0.0], x])[seen]
    return own - own.mean(axis=0) if centred else own

  def form(x: np.ndarray) -> float:
    own = shown(x)
    return float(np.sum(own**2) - np.sum((own @ span.T) ** 2))

  def projected(x: np.ndarray) -> np.ndarray:
    x = x.copy()
    for group in () if level is None else level:
      x[group] -= x[group].mean()
    return x / np.linalg.norm(x)

  signs = np.random.default_rng(1).choice([-1.0, 1.0], (_PROBES, size))
  mean = float(np.mean([form(one) for one in signs])) / size
  inverse = _inverse(seen, known, centred, size, _SHIFT * mean)
  closer, found, quotient = inverse, projected(found), np.inf
  for _ in range(_SWEEPS if 0 < missing <= _FEW * wanted else 1):
    for _ in range(_INVERSES):
      before, found = found, projected(closer(found))
      if np.linalg.norm(found - before) < _TOLERANCE:
        break
    former, quotient = quotient, form(found) / mean
    if not missing or quotient < _ENOUGH or quotient > _STALLED * former:
      break
    own = shown(found)
    others = np.linalg.svd(own - (own @ known.T) @ known, full_matrices=False)[2][:missing]
    span, closer = np.concatenate([known, others]), _wider(inverse, seen, others, centred, size)
  return found * np.sign(found.sum()), quotient


def _wider(inverse: Callable, seen: np.ndarray, others: np.ndarray, centred: bool, size: int) -> Callable:
  """Returns the inverse of `_inverse` for a span of some more directions, [M, entries], by Woodbury's identity."""
  parts = np.zeros((len(seen), len(others), size + 1))
  for part, own in zip(parts, seen, strict=True):
    part[:, own] = others
  parts = parts[:, :, 1:] - (parts[:, :, 1:].mean(axis=0) if centred else 0)  # entry 0 is the padding
  rows = parts.reshape(-1, size)
  made = np.concatenate([inverse(some.T) for some in np.array_split(rows, -(-len(rows) // _TOGETHER))], axis=1)
  inner = np.linalg.inv(np.eye(len(rows)) - rows @ made)

  def wider(x: np.ndarray) -> np.ndarray:
    x = inverse(x)
    return x + made @ (inner @ (rows @ x))

  return wider


def _inverse(
  seen: np.ndarray, span: np.ndarray, centred: bool, size: int, shift: float
) -> Callable[[np.ndarray], np.ndarray]:
  """Returns the inverse of a form plus a shift, a function of maps, [size] or [size, M].

  The form of a map is what of its patches is not in a span, squared. It is D − UUᵀ, where D counts the filters that see
  an entry. Uᵀ makes of the patches their parts in the span, in a basis of centred positions. If they are centred, the
  mean patch times the root of their number is added. Woodbury's identity gives the inverse

    (D − UUᵀ)⁻¹ = D⁻¹ + D⁻¹U (1 − UᵀD⁻¹U)⁻¹ UᵀD⁻¹.

  The matrix in the middle has (positions − 1) · rank + entries rows, far fewer than the map has entries at a stride.

  Args:
    seen, centred, size: see `direction_of`.
    span: orthonormal rows [rank, entries].
    shift: that is added to the form's diagonal.
  """
  positions, entries = seen.shape
  basis = scipy.linalg.helmert(positions) if centred else np.eye(positions)
  parts = len(basis) * len(span)
  places = np.arange(seen.size)[seen.ravel() > 0], seen[seen > 0] - 1
  patches_of = scipy.sparse.csr_array((np.ones(len(places[0])), places), shape=(seen.size, size))
  weights = 1 / (np.bincount(places[1], minlength=size) + shift)
  overlaps = (patches_of * weights) @ patches_of.T

  def inner(patches: np.ndarray) -> np.ndarray:  # [positions · entries, M] -> Uᵀ of them, [rows, M]
    patches = patches.reshape(positions, entries, patches.shape[-1])
    own = np.tensordot(basis, np.tensordot(span, patches, (1, 1)), (1, 1)).reshape(parts, patches.shape[-1])
    return np.concatenate([own, patches.sum(axis=0) / np.sqrt(positions)]) if centred else own

  def outer(rows: np.ndarray) -> np.ndarray:  # [rows, M] -> U of them, [size, M]
    own = np.tensordot(span, rows[:parts].reshape(len(basis), len(span), rows.shape[-1]), (0, 1))
    own = np.tensordot(basis, own, (0, 1))
    own = own + rows[parts:] / np.sqrt(positions) if centred else own
    return patches_of.T @ own.reshape(seen.size, -1)

  columns = [inner(overlaps[:, p * entries : (p + 1) * entries] @ span.T) for p in range(positions)]
  left = np.tensordot(np.stack(columns, axis=1), basis, (1, 1)).swapaxes(1, 2).reshape(parts + centred * entries, parts)
  if centred:
    every = scipy.sparse.csr_array(np.tile(np.eye(entries), (positions, 1)) / np.sqrt(positions))
    left = np.concatenate([left, inner((overlaps @ every).toarray())], axis=1)
  factor = scipy.linalg.cho_factor(np.eye(len(left)) - left, overwrite_a=True, check_finite=False)

  def inverse(x: np.ndarray) -> np.ndarray:
    maps = weights[:, None] * x.reshape(size, -1)
    rows = scipy.linalg.cho_solve(factor, inner(patches_of @ maps), check_finite=False)
    return (maps + weights[:, None] * outer(rows)).reshape(x.shape)

  return inverse
