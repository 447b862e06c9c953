"""The map before a convolution, from the gradient of this convolution's weight, of one sample.

The gradient's rows, one for each channel, are combinations of the patches of the map: Σ_p δ_cp · patch_p. With as many
independent rows as there are positions, they span the patches. Where BatchNorm subtracts the mean of each channel, what
comes back to a channel sums to zero over all positions. Then the rows span the centred patches, and one row less
suffices. "The patches of x lie in this span" is linear and homogeneous in x: the eigenvector of the least eigenvalue is
the map up to its scale.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg

from gradleak.models.stages import Stages

_INVARIANT = 1e-3  # relative; rounding behind a norm is about 1e-6
_OVERLAP = 4  # filters that see an entry of the map, on average
_MOST = 12_000  # entries of a map; the matrix of its quadratic form takes a gigabyte
_RANK = 1e-5  # of the largest singular value; what is smaller is rounding
_SHIFT = 1e-9  # of the mean eigenvalue, in inverse iterations
_SWEEPS = 12  # over the directions that are missing
EXACT = 1e-8  # the least eigenvalue over the mean one at which sweeps end


class Blind(NamedTuple):
  """What a stage does not see of its map, found on random weights.

  Attributes:
    mean: of what its first convolution makes, as where BatchNorm follows.
    scale: of the map, as where a norm follows and no shortcut passes.
    classes: (first row, first column, stride) of positions on which a constant for each channel makes no difference.
  """

  mean: bool
  scale: bool
  classes: tuple[tuple[int, int, int], ...]


@functools.lru_cache(maxsize=64)
def blind(net_of: Callable[[], Stages], place: int) -> Blind:
  """Returns what the stage at `place` does not see."""
  net = net_of()
  stage, rng = net.stages[place], np.random.default_rng(0)
  x = rng.normal(size=stage.shape)
  params = {path: jnp.asarray(rng.normal(size=net.shapes[path]), jnp.float32) for path in stage.paths}
  behind = jax.jit(lambda x, offset: net.behind(stage, params, x, offset))

  none = np.zeros((1, 1, 1, 1 if stage.kernel is None else stage.produced[-1]))

  def made(x: np.ndarray, offset: Any = none) -> np.ndarray:
    return np.asarray(behind(jnp.asarray(x, jnp.float32), jnp.asarray(offset, jnp.float32)))

  one = made(x)

  def same(other: np.ndarray) -> bool:
    return bool(np.linalg.norm(one - other) <= _INVARIANT * np.linalg.norm(one))

  step = max(stage.shape[1] // one.shape[1], 1)
  constants, found = rng.normal(size=stage.shape[-1]), []
  for row, column in np.ndindex(step, step):
    moved = x.copy()
    moved[:, row::step, column::step] += constants
    if same(made(moved)):
      found.append((row, column, step))
  mean = stage.kernel is not None and same(made(x, rng.normal(size=none.shape)))
  return Blind(mean, same(made(2 * x)), tuple(found))


def unread(net_of: Callable[[], Stages], place: int) -> str:
  """Returns why the map before the stage at `place` has no closed form; '' where it has one."""
  stage = net_of().stages[place]
  if stage.kernel is None:
    return 'does not start with a convolution'
  (_, height, width, channels), entries = stage.produced, int(np.prod(stage.shape))
  centred = blind(net_of, place).mean
  if channels < height * width - centred:
    why = '' if centred else ', as no BatchNorm on the statistics of the batch follows it'
    return (
      f'has {height}×{width} positions, and its first convolution {channels} channels; it needs '
      f'{height * width - centred}{why}'
    )
  if np.prod(net_of().shapes[stage.kernel]) / channels * height * width < _OVERLAP * entries:
    return 'has filters that hardly overlap'
  return f'has {entries:,} entries, more than the {_MOST:,} of the closed form' if entries > _MOST else ''


def found(net_of: Callable[[], Stages], place: int, gradient: Any) -> tuple[np.ndarray, float]:
  """Returns (the map before a stage, up to its scale; the least eigenvalue over the mean one).

  Args:
    net_of: () -> the network.
    place: of the stage, where nothing is `unread`.
    gradient: of its first convolution's weight.
  """
  stage = net_of().stages[place]
  centred = blind(net_of, place).mean
  channels, size = stage.produced[-1], int(np.prod(stage.shape))
  direction, eigenvalue = direction_of(patches(net_of, place), rows(np.asarray(gradient), channels), size, centred)
  x = np.maximum(direction, 0).reshape(stage.shape)
  return (x / np.sqrt(np.mean(x**2))).astype(np.float32), eigenvalue


def features(kernel: np.ndarray, kernel_gradient: np.ndarray, bias_gradient: np.ndarray) -> tuple[Any, Any]:
  """Returns the input of a dense layer, [in], and the loss's gradient at it, from the gradient of one sample.

  Args:
    kernel, kernel_gradient: [in, out].
    bias_gradient: [out], which is the loss's gradient at the outputs.
  """
  shares = bias_gradient @ bias_gradient
  return kernel_gradient @ bias_gradient / np.maximum(shares, np.finfo(np.float64).tiny), kernel @ bias_gradient


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

  def seen(incoming: jax.Array) -> jax.Array:
    return rows(jax.vjp(convolved, params[path])[1](incoming)[0], channels)[0]

  positions = int(np.prod(stage.produced[1:3]))
  unit = jnp.zeros((positions, positions, channels)).at[jnp.arange(positions), jnp.arange(positions), 0].set(1)
  found = jax.jit(lambda unit: jax.lax.map(seen, unit))(unit.reshape(positions, *stage.produced))
  return np.rint(np.asarray(found)).astype(int)


def rows(kernel: Any, channels: int) -> Any:
  """Returns the weights of a convolution as [channels, entries]; its channels are the first of two axes, or the last.

  Args:
    kernel: [channels, entries], as `gradleak.models.layers.Conv` has it, or […, channels] as Flax's.
    channels: that it makes.
  """
  if kernel.ndim == 2 and len(kernel) == channels:
    return kernel
  return kernel.reshape(-1, channels).T


def direction_of(seen: np.ndarray, gradient: np.ndarray, size: int, centred: bool = True) -> tuple[np.ndarray, float]:
  """Returns (the map whose patches span a gradient, of norm 1; the least eigenvalue over the mean one).

  Where some channels are dead, the directions that are missing are estimated from the solution, and both in turn.

  Args:
    seen: int [positions, entries], see `patches`.
    gradient: of the convolution, [channels, entries].
    size: entries of the map.
    centred: whether the rows span the patches less their mean.
  """
  wanted = len(seen) - centred
  _, values, directions = np.linalg.svd(np.asarray(gradient, np.float64), full_matrices=False)
  known = directions[: min(wanted, int(np.sum(values > _RANK * values[0])))]
  missing, found = wanted - len(known), np.random.default_rng(0).normal(size=size)
  span, quotient = known, np.inf
  for _ in range(_SWEEPS if missing else 1):
    found, quotient = _least(_deviations(seen, span, size, centred), found)
    if not missing or quotient < EXACT:
      break
    shown = np.concatenate([[0.0], found])[seen]
    shown = shown - shown.mean(axis=0) if centred else shown
    others = np.linalg.svd(shown - (shown @ known.T) @ known, full_matrices=False)[2]
    span = np.concatenate([known, others[:missing]])
  return found * np.sign(found.sum()), quotient


def _deviations(seen: np.ndarray, span: np.ndarray, size: int, centred: bool) -> np.ndarray:
  """Returns the quadratic form of a map [size, size]: what of its patches is not in a span, squared."""
  positions, entries = seen.shape
  outside = np.eye(entries) - span.T @ span
  form, mean = np.zeros((size + 1, size + 1)), np.zeros((entries, size + 1))
  for one in seen:
    np.add.at(mean, (np.arange(entries), one), 1 / positions)
    inside = one > 0
    form[np.ix_(one[inside], one[inside])] += outside[np.ix_(inside, inside)]
  return ((form - positions * mean.T @ outside @ mean) if centred else form)[1:, 1:]


def _least(form: np.ndarray, start: np.ndarray) -> tuple[np.ndarray, float]:
  """Returns the eigenvector of the least eigenvalue, and that over the mean one, by inverse iterations."""
  mean = np.trace(form) / len(form)
  factor = scipy.linalg.cho_factor(form + _SHIFT * mean * np.eye(len(form)))
  found = start
  for _ in range(8):
    found = scipy.linalg.cho_solve(factor, found)
    found = found / np.linalg.norm(found)
  return found, float(found @ form @ found / mean)
