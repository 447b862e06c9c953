"""The map before some stages of a network, from the map behind them and the gradients of their parameters.

Stage k computes the map h_{k+1} = relu(s_k(h_k)). What comes back to it is

  δ_k = ∂s_k/∂h_kᵀ (slope(s_k) · δ_{k+1}), and the gradient of its parameters is ∂s_k/∂θ_kᵀ (slope(s_k) · δ_{k+1}).

With h_{k+1} and δ_{k+1} known, both are nonlinear equations for h_k. They are solved by least squares with
Levenberg–Marquardt, whose linear systems are solved by conjugate gradients. Two measures allow a poor start:

  * Gradients jump where a pre-activation changes its sign. In the backward pass alone, the slope of ReLU is
    sigmoid(z / τ). From step to step τ falls, which moves doubtful signs one after another.
  * Several stages are solved together, with the maps between them as further unknowns that may deviate from what the
    stage before makes (multiple shooting). The penalty for deviations grows.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gradleak.models import soft_slopes
from gradleak.models.stages import Path, Stage, Stages

OUTPUT = 2.0  # the weight of the known map
_DOUBTFUL = 0.01  # the softness from which on zeros of the known map may be small positive numbers
_EDGE = 1e-2  # differences of pixels from which on the total variation grows linearly
_PROBES = 8  # of the curvature's diagonal
_LEAST, _MOST = 1e-9, 1e4  # damping
_FLAT = 1e-2  # of the largest curvature of a map's channels, the least that is assumed
_TOLERANCE = 1e-5  # of the linear systems


class Behind(NamedTuple):
  """What is known behind some stages.

  Attributes:
    output: the map behind their last ReLU, [1, H, W, C].
    incoming: the loss's gradient at it.
    gradients: of the parameters of the stages, by path; without those of which nothing is sent.
    slack: an output up to this may be zero or not.
  """

  output: Any
  incoming: Any
  gradients: dict[Path, Any]
  slack: float = 0.0


class Weights(NamedTuple):
  """What decides the equations of one solution.

  Attributes:
    softness: τ of the slope; 0 for that of ReLU.
    joined: the weight of the deviations between stages.
    tv: the weight of the total variation of the pixels, where the first unknown is the image.
    gradients: the weight of those of each parameter.
  """

  softness: float
  joined: float = 1.0
  tv: float = 0.0
  gradients: float = 1.0


def _slope(z: jax.Array, softness: jax.Array) -> jax.Array:
  return jax.nn.sigmoid(z / _width(softness))


def _width(softness: Any) -> jax.Array:
  return jnp.maximum(softness, 1e-9)


def _norm(x: jax.Array) -> jax.Array:
  return jax.lax.stop_gradient(jnp.linalg.norm(jnp.ravel(x)) + 1e-9)


def _scale(x: jax.Array, pixels: bool) -> Any:
  """Returns what changes of an unknown are measured by: its norm, or that of a white image."""
  return float(np.sqrt(x.size)) if pixels else _norm(x)


def _residuals(
  net: Stages, stages: Sequence[Stage], maps: Sequence[jax.Array], params: Any, behind: Behind, weights: Weights
) -> Any:
  """Returns the residuals of all equations of successive stages, a tree of arrays.

  The maps are the unknown inputs of the first stages; those of the others are what the stage before makes.
  """
  width = _width(weights.softness)
  outputs, pullbacks = [], []
  for index, stage in enumerate(stages):
    x = maps[index] if index < len(maps) else soft_slopes.relu(outputs[-1], width)
    own = {path: params[path] for path in stage.paths}
    made, pullback = jax.vjp(lambda own, x, stage=stage: net.apply(stage, own, x, width=width), own, x)
    outputs.append(made)
    pullbacks.append(pullback)
  active, last = behind.output > behind.slack, outputs[-1]
  free = jnp.maximum(last - behind.slack, 0)
  found = [OUTPUT * jnp.where(active, last - behind.output, free) / _norm(behind.output)]
  found += [
    weights.joined * (jnp.maximum(made, 0) - following) / _norm(following)
    for made, following in zip(outputs, maps[1:], strict=False)
  ]
  doubtful = jnp.where(weights.softness <= _DOUBTFUL, _slope(last, weights.softness), 0)
  incoming = behind.incoming * jnp.where(active, 1, doubtful)
  for stage, pullback, before in zip(reversed(stages), reversed(pullbacks), [*outputs[-2::-1], None], strict=True):
    gradients, at_map = pullback(incoming)
    for path in (one for one in stage.paths if one in behind.gradients):
      apart = gradients[path] - behind.gradients[path]
      found.append(weights.gradients * apart / _norm(behind.gradients[path]))
    if before is not None:
      incoming = at_map * _slope(before, weights.softness)
  pixels = stages[0] is net.stages[0]
  for index, x in enumerate(maps):
    found.append(jnp.minimum(x, 0) / _scale(x, pixels and index == 0))
  if pixels:
    x, whole = maps[0], float(np.sqrt(maps[0].size))
    changes = (x[:, 1:] - x[:, :-1], x[:, :, 1:] - x[:, :, :-1])
    found += [jnp.maximum(x - 1, 0) / whole]
    found += [weights.tv / 3 * change / (change**2 + _EDGE**2) ** 0.25 / whole for change in changes]
  return found


def _curvatures(curved: Callable[[Any], Any], maps: Sequence[jax.Array]) -> list[jax.Array]:
  """Returns the mean diagonal of a positive matrix over each channel, estimated from products with random signs."""

  def one(key: jax.Array) -> list[jax.Array]:
    keys = jax.random.split(key, len(maps))
    signs = [jax.random.rademacher(key, x.shape, x.dtype) for key, x in zip(keys, maps, strict=True)]
    means = [jnp.mean(a * b, axis=(0, 1, 2), keepdims=True) for a, b in zip(signs, curved(signs), strict=True)]
    return [jnp.maximum(mean, 0) + _FLAT * jnp.max(mean) for mean in means]

  found = jax.lax.map(one, jax.random.split(jax.random.key(0), _PROBES))
  return [jnp.mean(x, axis=0) for x in found]


@functools.lru_cache(maxsize=32)
def _stepper(net_of: Callable[[], Stages], first: int, last: int) -> Callable:
  """Returns one step of Levenberg–Marquardt for the stages from `first` up to `last`, compiled."""
  net = net_of()
  stages = net.stages[first:last]

  def squared(tree: Any) -> jax.Array:
    return sum(jnp.vdot(x, x) for x in jax.tree.leaves(tree))  # type: ignore[return-value]

  @functools.partial(jax.jit, static_argnames='iterations')
  def step(maps: Any, damping: Any, params: Any, behind: Behind, weights: Weights, iterations: int) -> tuple:
    residuals = functools.partial(_residuals, net, stages, params=params, behind=behind, weights=weights)
    now, forward = jax.linearize(residuals, maps)
    backward = jax.linear_transpose(forward, maps)
    scales = [1 / _scale(x, first == 0 and index == 0) ** 2 for index, x in enumerate(maps)]

    def curved(change: Any) -> Any:
      return backward(forward(change))[0]

    def normal(change: Any) -> Any:
      return [a + damping * scale * b for a, scale, b in zip(curved(change), scales, change, strict=True)]

    curvatures = [mean + damping * scale for mean, scale in zip(_curvatures(curved, maps), scales, strict=True)]

    def scaled(change: Any) -> Any:
      return [x / curvature for x, curvature in zip(change, curvatures, strict=True)]

    downhill = [-x for x in backward(now)[0]]
    change, _ = jax.scipy.sparse.linalg.cg(normal, downhill, maxiter=iterations, tol=_TOLERANCE, M=scaled)
    moved = [x + y for x, y in zip(maps, change, strict=True)]
    return moved, squared(now), squared(residuals(moved))

  return step


def solve(
  net_of: Callable[[], Stages],
  first: int,
  last: int,
  maps: Sequence[Any],
  params: dict[Path, Any],
  behind: Behind,
  weights: Weights,
  *,
  steps: int,
  iterations: int,
  damping: float,
) -> tuple[list[Any], float]:
  """Returns (the inputs of stages, the sum of squares that is left) after some steps of Levenberg–Marquardt.

  Args:
    net_of: () -> the network; a function, so that what is compiled for it is found again.
    first, last: the stages are those from `first` up to `last`, which is not one of them.
    maps: where it starts, the inputs of the first stages; the others follow from them.
    params: values by path.
    behind: what is known behind the last stage.
    weights: see `Weights`.
    steps: of Levenberg–Marquardt.
    iterations: of conjugate gradients in each.
    damping: of the first step, relative to the curvature of a map's own scale.
  """
  step = _stepper(net_of, first, last)
  stages = net_of().stages[first:last]
  own = {path: params[path] for stage in stages for path in stage.paths}
  given = behind._replace(gradients={path: x for path, x in behind.gradients.items() if path in own})
  found, left = list(maps), np.inf
  for _ in range(steps):
    moved, before, after = step(found, damping, own, given, weights, iterations=iterations)
    left = float(before)
    if float(after) < left:
      found, damping, left = moved, max(damping / 3, _LEAST), float(after)
    else:
      damping *= 4
    if damping > _MOST:
      break
  return found, left
