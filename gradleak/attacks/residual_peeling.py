"""Peeling of residual networks behind BatchNorm: an image from the gradient of a batch of one, stage by stage.

Our own method. It needs neither public data nor statistics of BatchNorm. A stage ends at a ReLU through which all
passes, as each residual block does (`gradleak.models.stages`).

  1. The dense layer gives the features and what comes back to them: f = ∂W·∂b / ‖∂b‖² and δ = W·∂b.
  2. The last stage starts with a convolution behind which BatchNorm subtracts the mean. So what comes back to one of
     its channels sums to zero over all positions, and the rows of its gradient are combinations of the centred patches
     of the map before. With as many independent rows as there are positions less one, they span these patches. "The
     centred patches of x lie in this span" is linear and homogeneous in x: the eigenvector of the least eigenvalue is
     the map up to its scale, which follows from the features. Where some channels are dead, the directions that are
     missing are estimated from the solution, and both in turn.
  3. Each stage before has a known map behind it, and what comes back to that. `inverse.solve` finds its input, as long
     as the equations are many more than the unknowns.
  4. The stages that are left are solved together, from the image to the last map found, first without the gradients.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg

from gradleak.attacks import base
from gradleak.attacks.inverse import OUTPUT, Behind, Weights, solve
from gradleak.core import errors, trees
from gradleak.core.reuse import reusable
from gradleak.core.settings import Count, NonNegative
from gradleak.core.trees import Tree
from gradleak.federated import Client
from gradleak.models.model import Model
from gradleak.models.stages import Path, Stage, Stages, stages
from gradleak.threat import Observation

_INVARIANT = 1e-3  # relative; rounding behind a norm is about 1e-6
_OVERLAP = 4  # filters that see an entry of the map, on average
_REDUNDANT = 1.5  # equations for each unknown from which on a stage is solved by itself
_RANK = 1e-5  # of the largest singular value; what is smaller is rounding
_SHIFT = 1e-9  # of the mean eigenvalue, in inverse iterations
_SWEEPS = 12  # over the directions that are missing
# The largest softness of each attempt, which starts from the best solution so far, and a factor of `_NOTHING`.
_ATTEMPTS = (1.0, 1.0), (0.06, 1.0), (0.12, 0.1), (0.06, 10.0), (0.25, 1.0)
_SOLVED = 1e-8  # the sum of squares up to which a solution is exact; rounding leaves about 1e-10
_HOPELESS = 0.1  # that of what is behind, not of some signs
_NOTHING = 1e-4  # of a map's root mean square; what is smaller is an error
_EXACT = 1e-8  # the least eigenvalue over the mean one at which sweeps end
_DAMPING = 1.0, 0.01
_ITERATIONS = 60, 120  # of conjugate gradients, for one stage and for several
_SOFTNESS = (1.0, 0.5, 0.25, 0.12, 0.06, 0.03, 0.01, 3e-3, 1e-3, 3e-4, 1e-4, 3e-5, 1e-5)  # of the slopes, of one stage


class _Round(NamedTuple):
  """Some solutions of the first stages together, each with a weight of `Weights`, the softness last.

  Attributes:
    apart: whether the maps between are unknown, too.
    weights: of deviations between the stages, of the total variation and of the gradients.
    softness: of each solution.
  """

  apart: bool
  weights: tuple[float, float, float]
  softness: tuple[float, ...]


_ROUNDS = (
  _Round(False, (0.0, 0.3, 0.0), (0.01, 0.01)),
  _Round(True, (1.0, 0.03, 1.0), (0.5, 0.2)),
  _Round(True, (3.0, 0.03, 1.0), (0.2, 0.07)),
  _Round(True, (10.0, 0.01, 1.0), (0.1, 0.03, 0.1, 0.03)),
  _Round(True, (30.0, 0.003, 1.0), (0.05, 0.02)),
)


class Peeled(NamedTuple):
  """What was found.

  Attributes:
    image: float32 [H, W, C]; None where the last stage's equations contradict each other, as those of noise do.
    label: its class, or −1 where a further dense layer hides it.
    maps: the inputs of all stages, the image first.
    eigenvalue: the least eigenvalue of the closed form over the mean one, about 1e-12 where it is exact.
  """

  image: np.ndarray | None
  label: int
  maps: list[np.ndarray]
  eigenvalue: float


def features(kernel: np.ndarray, kernel_gradient: np.ndarray, bias_gradient: np.ndarray) -> tuple[Any, Any]:
  """Returns the input of a dense layer, [in], and the loss's gradient at it, from the gradient of one sample.

  Args:
    kernel, kernel_gradient: [in, out].
    bias_gradient: [out], which is the loss's gradient at the outputs.
  """
  shares = bias_gradient @ bias_gradient
  return kernel_gradient @ bias_gradient / np.maximum(shares, np.finfo(np.float64).tiny), kernel @ bias_gradient


def patches(net: Stages, stage: Stage, params: dict[Path, Any]) -> np.ndarray:
  """Returns which entries of a stage's map its first convolution sees, int [positions, entries of a filter].

  An entry of the map counts from 1; 0 is the padding. They are read from the convolution's own gradient, which is the
  patch where what comes back is one at a position and zero elsewhere.
  """
  size, path = int(np.prod(stage.shape)), stage.first
  kernel = jnp.asarray(params[path], jnp.float32)
  numbered = jnp.arange(1, size + 1, dtype=jnp.float32).reshape(stage.shape)

  def convolved(kernel: jax.Array) -> jax.Array:
    return net.apply(stage, {**params, path: kernel}, numbered, until=stage.product)

  made, pullback = jax.vjp(convolved, kernel)
  positions = made.shape[1] * made.shape[2]
  unit = jnp.zeros((positions, *made.shape)).reshape(positions, positions, -1)
  unit = unit.at[jnp.arange(positions), jnp.arange(positions), 0].set(1).reshape(positions, *made.shape)
  seen = jax.jit(jax.vmap(lambda one: rows(pullback(one)[0], made.shape[-1])[0]))(unit)
  return np.rint(np.asarray(seen)).astype(int)


def rows(kernel: Any, channels: int) -> Any:
  """Returns the weights of a convolution as [channels, entries]; its channels are the first of two axes, or the last.

  Args:
    kernel: [channels, entries], as `gradleak.models.layers.Conv` has it, or […, channels] as Flax's.
    channels: that it makes.
  """
  if kernel.ndim == 2 and len(kernel) == channels:
    return kernel
  return kernel.reshape(-1, channels).T


def centred_map(seen: np.ndarray, gradient: np.ndarray, size: int) -> tuple[np.ndarray, float]:
  """Returns (the map whose centred patches span a gradient, of norm 1; the least eigenvalue over the mean one).

  Args:
    seen: int [positions, entries], see `patches`.
    gradient: of the convolution, [channels, entries].
    size: entries of the map.
  """
  positions = len(seen)
  _, values, directions = np.linalg.svd(np.asarray(gradient, np.float64), full_matrices=False)
  known = directions[: min(positions - 1, int(np.sum(values > _RANK * values[0])))]
  missing, found = positions - 1 - len(known), np.random.default_rng(0).normal(size=size)
  span, quotient = known, np.inf
  for _ in range(_SWEEPS if missing else 1):
    found, quotient = _least(_deviations(seen, span, size), found)
    if not missing or quotient < _EXACT:
      break
    centred = np.concatenate([[0.0], found])[seen]
    centred = centred - centred.mean(axis=0)
    others = np.linalg.svd(centred - (centred @ known.T) @ known, full_matrices=False)[2]
    span = np.concatenate([known, others[:missing]])
  return found * np.sign(found.sum()), quotient


def _deviations(seen: np.ndarray, span: np.ndarray, size: int) -> np.ndarray:
  """Returns the quadratic form of a map [size, size]: what of its centred patches is not in a span, squared."""
  positions, entries = seen.shape
  outside = np.eye(entries) - span.T @ span
  form, mean = np.zeros((size + 1, size + 1)), np.zeros((entries, size + 1))
  for one in seen:
    np.add.at(mean, (np.arange(entries), one), 1 / positions)
    inside = one > 0
    form[np.ix_(one[inside], one[inside])] += outside[np.ix_(inside, inside)]
  return (form - positions * mean.T @ outside @ mean)[1:, 1:]


def _least(form: np.ndarray, start: np.ndarray) -> tuple[np.ndarray, float]:
  """Returns the eigenvector of the least eigenvalue, and that over the mean one, by inverse iterations."""
  mean = np.trace(form) / len(form)
  factor = scipy.linalg.cho_factor(form + _SHIFT * mean * np.eye(len(form)))
  found = start
  for _ in range(8):
    found = scipy.linalg.cho_solve(factor, found)
    found = found / np.linalg.norm(found)
  return found, float(found @ form @ found / mean)


def _scaled(after: Callable[[Any], Any], x: np.ndarray, wanted: np.ndarray) -> np.ndarray:
  """Returns `x` times the factor with which `after` of it comes closest to what is wanted."""
  x = x / np.sqrt(np.mean(x**2))
  apart = jax.jit(jax.vmap(lambda factor: jnp.sum((jnp.ravel(after(factor * x)) - wanted) ** 2)))
  centre, width = 0.0, np.log(1e3)
  for _ in range(6):
    factors = np.exp(np.linspace(centre - width, centre + width, 33))
    centre, width = float(np.log(factors[np.argmin(apart(jnp.asarray(factors, jnp.float32)))])), width / 8
  return np.exp(centre) * x


class _Run(NamedTuple):
  """One gradient and the network that it is of.

  Attributes:
    net_of: () -> `Stages`, one function for all runs.
    params, observed: parameters and their gradient, float32 by path.
    iterations: of Levenberg–Marquardt at each softness.
    tv: by which the weights of the total variation are multiplied.
    classes: their number.
  """

  net_of: Callable[[], Stages]
  params: dict[Path, Any]
  observed: dict[Path, Any]
  iterations: int
  tv: float
  classes: int

  def after(self, stage: Stage, x: Any) -> jax.Array:
    """Returns the map behind a stage."""
    return jax.nn.relu(self.net_of().apply(stage, {path: self.params[path] for path in stage.paths}, jnp.asarray(x)))

  def back(self, stage: Stage, x: Any, incoming: Any) -> jax.Array:
    """Returns the loss's gradient at a stage's input."""
    return jax.vjp(functools.partial(self.after, stage), jnp.asarray(x))[1](incoming)[0]

  def solved(
    self, first: int, last: int, maps: Sequence[Any], behind: Behind, weights: Weights
  ) -> tuple[list[Any], float]:
    """Returns what `inverse.solve` finds."""
    search = functools.partial(
      solve, self.net_of, first, last, maps, self.params, behind, weights, steps=self.iterations
    )
    several = last - first > 1
    return search(iterations=_ITERATIONS[several], damping=_DAMPING[several])


def peel(run: _Run) -> Peeled:
  """Returns what a gradient of one image holds: the four steps of the method.

  Args:
    run: see `_Run`.
  """
  net = run.net_of()
  kernel, bias = (np.asarray(run.params[net.dense[0]], np.float64), np.asarray(run.observed[net.dense[1]], np.float64))
  taken, incoming = features(kernel, np.asarray(run.observed[net.dense[0]], np.float64), bias)
  pooled = functools.partial(net.apply, net.head, {})
  last = net.stages[-1]

  seen = patches(net, last, {path: run.params[path] for path in last.paths})
  gradient = rows(np.asarray(run.observed[last.first]), run.params[last.first].size // seen.shape[1])
  direction, eigenvalue = centred_map(seen, gradient, int(np.prod(last.shape)))
  direction = np.maximum(direction, 0).reshape(last.shape).astype(np.float32)
  x = _scaled(lambda x: pooled(run.after(last, x)), direction, taken)
  output = run.after(last, x)
  back = jax.vjp(pooled, output)[1](jnp.asarray(incoming, jnp.float32).reshape(1, -1))[0]
  back, maps, place = run.back(last, x, back), [np.asarray(x)], len(net.stages) - 1

  def behind() -> Behind:
    return Behind(maps[0], back, run.observed, negligible(maps[0]))

  label = int(np.argmin(bias)) if len(bias) == run.classes else -1  # its share alone is negative
  while place > 1 and equations(net.stages[place - 1], run.params, maps[0]) > _REDUNDANT:
    place -= 1
    x, left = stage_input(run, place, behind())
    if left > contradiction(net.stages[place]):
      return Peeled(None, label, maps, eigenvalue)
    back, maps = run.back(net.stages[place], x, back), [x, *maps]
  image = first_input(run, place, behind())
  return Peeled(np.clip(image[0][0], 0, 1), label, [*map(np.asarray, image), *maps], eigenvalue)


def negligible(x: np.ndarray) -> float:
  """Returns what entries of a map found may be where ReLU made them zero."""
  return _NOTHING * float(np.sqrt(np.mean(x**2)))


def equations(stage: Stage, params: dict[Path, Any], output: np.ndarray) -> float:
  """Returns how many equations there are for each entry of a stage's input: gradients, and active entries behind."""
  return (sum(params[path].size for path in stage.paths) + int((output > negligible(output)).sum())) / np.prod(
    stage.shape
  )


def contradiction(stage: Stage) -> float:
  """Returns the sum of squares that a map of zeros leaves: a solution that leaves more is none."""
  return OUTPUT**2 + len(stage.paths)


def stage_input(run: _Run, place: int, behind: Behind) -> tuple[np.ndarray, float]:
  """Returns (the input of one stage, the sum of squares that is left); it starts from the map behind, in its shape."""
  shape = run.net_of().stages[place].shape
  start = jax.image.resize(jnp.asarray(behind.output), (1, *shape[1:3], behind.output.shape[-1]), 'linear')
  more = start.shape[-1] - shape[-1]
  start = start[..., more // 2 :][..., : shape[-1]] if more >= 0 else jnp.pad(start, [(0, 0)] * 3 + [(0, -more)])
  best, least = [start], np.inf
  for warmest, slack in _ATTEMPTS:
    maps, given = best, behind._replace(slack=slack * behind.slack)
    for softness in (one for one in _SOFTNESS if one <= warmest):
      maps, left = run.solved(place, place + 1, maps, given, Weights(softness))
    if left < least:
      best, least = maps, left
    if not _SOLVED < least < _HOPELESS:
      break
  return np.maximum(np.asarray(best[0]), 0), least


def first_input(run: _Run, place: int, behind: Behind) -> list[Any]:
  """Returns the inputs of the first `place` stages, the image first, from the map behind them."""
  net = run.net_of()
  maps = [0.5 + 0.2 * jax.random.normal(jax.random.key(0), net.stages[0].shape)]
  for round_ in _ROUNDS:
    maps = maps[:1] if not round_.apart else maps if len(maps) > 1 else through(run, place, maps[0])
    joined, tv, gradients = round_.weights
    for softness in round_.softness:
      maps, _ = run.solved(0, place, maps, behind, Weights(softness, joined, tv * run.tv, gradients))
  return through(run, place, maps[0])


def through(run: _Run, place: int, image: Any) -> list[Any]:
  """Returns the inputs of the first `place` stages for an image."""
  maps = [image]
  for stage in run.net_of().stages[: place - 1]:
    maps.append(run.after(stage, maps[-1]))
  return maps


@base.attack(citation='Peeling of residual networks: our own method.')
def residual_peeling(client: Client, *, iterations: Count = 6, tv: NonNegative = 1.0) -> base.Attack:
  r"""Peeling of networks of convolutions, BatchNorm, ReLU and residual sums, from one gradient of one image.

  It runs on the host, and takes minutes for an image of CIFAR-10 in ResNet-20. The client runs BatchNorm on the
  statistics of the batch. The map before the last block is exact up to rounding. So are those before the blocks that
  have many more weights than their map has entries. The image is found by search. Where a map explains the upload no
  better than none, there is no image.

  Formula:
    f = \frac{\partial W \, \partial b}{\lVert \partial b \rVert^2}, \quad
    \min_x \sum_p \lVert (1 - P_{\text{rows of } \partial K}) (x_p - \bar{x}) \rVert^2, \quad
    \min_{h_k} \; \lVert s_k(h_k) - h_{k+1} \rVert^2
    + \lVert \delta_{k+1}^\top \partial s_k / \partial \theta_k - g_k \rVert^2

  Args:
    client: the `Client` that is attacked; it must share a gradient.
    iterations: of Levenberg–Marquardt at each softness of the slopes. They are no steps of a search: the flag
      `--steps` of the programs does not reach them.
    tv: by which the weights of the image's total variation are multiplied.

  Raises:
    UsageError: when run, for a network without such stages, one whose last stage does not start with a convolution
      that BatchNorm follows or has fewer channels than positions, a batch of several samples, or a client that shares
      its delta.
  """

  def net_of(observation: Observation) -> Callable[[], Stages]:
    base.require_gradient('residual_peeling', observation)
    client.loss.require_cross_entropy('residual_peeling')
    number, *shape = observation.batch_shape
    if number != 1:
      raise errors.UsageError(f'the attack residual_peeling reads the gradient of one sample: the batch has {number}')
    return _network(client.model, tuple(shape), client.batch_norm == 'train')

  def read(observation: Observation, key: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    del key
    both = (observation.variables['params'], observation.update)
    finite = all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(observation.update))
    if not finite:
      return np.zeros((0, 1)), np.zeros(0)
    params, observed = ({path: np.asarray(leaf, np.float32) for path, leaf in _leaves(tree)} for tree in both)
    found = peel(_Run(net_of(observation), params, observed, iterations, float(tv), observation.num_classes))
    if found.image is None:
      return np.zeros((0, 1)), np.zeros(0)
    return found.image[np.newaxis], np.asarray([found.label])

  return base.host_form(net_of, read)


def _leaves(tree: Tree) -> list[tuple[Path, Any]]:
  """Returns (path, leaf) of every parameter."""
  return [(trees.path_names(path), leaf) for path, leaf in jax.tree.leaves_with_path(tree)]


@reusable(8)
def _network(model: Model, sample_shape: tuple[int, ...], train: bool) -> Callable[[], Stages]:
  """Returns a function that gives the `Stages`; the same one for equal arguments."""
  found: list[Stages] = []

  def net() -> Stages:
    return found[0]

  shapes = jax.eval_shape(lambda key: model.init(key, sample_shape), jax.random.key(0))
  with jax.ensure_compile_time_eval():
    found.append(stages(model, shapes, sample_shape, train))
    _check_last(model, found[0], dict(_leaves(shapes['params'])))
  return net


def _check_last(model: Model, net: Stages, shapes: dict[Path, Any]) -> None:
  """Raises `UsageError` if the closed form does not hold for the last stage, tried on random weights."""
  stage, rng = net.stages[-1], np.random.default_rng(0)
  about = f'the attack residual_peeling does not read the model {model.name!r}: its last stage of maps'
  if stage.kernel is None:
    raise errors.UsageError(f'{about} does not start with a convolution')
  params = {path: jnp.asarray(rng.normal(size=shapes[path].shape), jnp.float32) for path in stage.paths}
  x = jnp.asarray(rng.normal(size=stage.shape), jnp.float32)
  product = net.apply(stage, params, x, until=stage.product)
  _, height, width, channels = product.shape
  moved = product + jnp.asarray(rng.normal(size=channels), jnp.float32).reshape(1, 1, 1, -1)
  one, other = (np.asarray(net.behind(stage, params, x, made)) for made in (product, moved))
  if np.linalg.norm(one - other) > _INVARIANT * np.linalg.norm(one):
    raise errors.UsageError(f'{about} has no BatchNorm on the statistics of the batch behind its first convolution')
  if channels < height * width - 1:
    raise errors.UsageError(
      f'{about} has {height}×{width} positions, and its first convolution {channels} channels; it needs '
      f'{height * width - 1}'
    )
  if shapes[stage.first].size / channels * height * width < _OVERLAP * np.prod(stage.shape):
    raise errors.UsageError(f'{about} has filters that hardly overlap')
