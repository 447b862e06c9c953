"""Peeling of convolutional networks: an image from the gradient of a batch of one, stage by stage.

Our own method. It needs neither public data nor statistics of BatchNorm. A stage ends at a ReLU through which all
passes, as each residual block does, or a max pool behind one (`gradleak.models.stages`).

  1. The dense layer gives the features, as far as they are sent, and what comes back: f = ∂W·∂b / ‖∂b‖² and δ = W·∂b.
  2. The last stage starts with a convolution of many channels. The map before it has a closed form up to its scale, see
     `closed_map`, and the scale follows from the features.
  3. Each stage before has a known map behind it, and what comes back to that. Its input has the same closed form, or
     `inverse.solve` finds it, as long as the equations are many more than the unknowns.
     Two things a stage may not see of its input, see `Blind`. The scale, without a shortcut: the shift of the stage
     before tells it, as its gradient is the sum of what comes back to the active entries. And a constant at the places
     that a stride takes: it is such that the least of a channel's entries there is zero.
  4. The stages that are left are solved together, from the image to the last map found, first without the gradients.
"""

import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gradleak.attacks import base, closed_map
from gradleak.attacks.inverse import OUTPUT, Behind, Weights, solve
from gradleak.core import errors, trees
from gradleak.core.reuse import reusable
from gradleak.core.settings import Count, NonNegative
from gradleak.core.trees import Tree
from gradleak.federated import Client
from gradleak.models.model import Model
from gradleak.models.stages import Path, Stages, stages
from gradleak.threat import Observation

_REDUNDANT = 1.5  # equations for each unknown from which on a stage is solved by itself
# The largest softness of each attempt, which starts from the best solution so far, and a factor of `_NOTHING`.
_ATTEMPTS = (1.0, 1.0), (0.06, 1.0), (0.12, 0.1), (0.06, 10.0), (0.25, 1.0)
_CLOSE = (0.01, 1.0), (0.06, 0.1)  # the same from a start that is nearly right
_SOLVED = 1e-8  # the sum of squares up to which a solution is exact; rounding leaves about 1e-10
_CERTAIN = 1e-10  # the least eigenvalue over the mean one up to which a closed form is exact
_NEAR = 1e-2  # the sum of squares up to which it agrees with the map behind
_HOPELESS = 0.1  # that of what is behind, not of some signs
_NOTHING = 1e-4  # of a map's root mean square; what is smaller is an error
_RESCALED = 4  # times
_APART = 0.5  # relative, from which on the shift's gradient contradicts what comes back
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

  Entries of zero are taken as not sent. An input of which nothing is sent, as Soteria leaves them, is not a number.

  Args:
    kernel, kernel_gradient: [in, out].
    bias_gradient: [out], which is the loss's gradient at the outputs.
  """
  shares = (kernel_gradient != 0) @ bias_gradient**2
  known = np.divide(kernel_gradient @ bias_gradient, shares, out=np.full(len(shares), np.nan), where=shares > 0)
  return known, kernel @ bias_gradient


def _scaled(after: Callable[[Any], Any], x: np.ndarray, wanted: np.ndarray) -> np.ndarray:
  """Returns `x` times the factor with which `after` of it comes closest to what is wanted, where that is a number."""
  x = x / np.sqrt(np.mean(x**2))
  apart = jax.jit(jax.vmap(lambda factor: jnp.nansum(jnp.abs(jnp.ravel(after(factor * x)) - wanted))))
  centre, width = 0.0, np.log(1e3)
  for _ in range(6):
    factors = np.exp(np.linspace(centre - width, centre + width, 33))
    centre, width = float(np.log(factors[np.argmin(apart(jnp.asarray(factors, jnp.float32)))])), width / 8
  return np.exp(centre) * x


class _Run(NamedTuple):
  """One gradient and the network that it is of.

  Attributes:
    net_of: () -> `Stages`, one function for all runs.
    params, observed: parameters and their gradient, float32 by path; without gradients of which nothing is sent.
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

  def after(self, place: int, x: Any) -> jax.Array:
    """Returns the map behind a stage."""
    return _programs(self.net_of, place)[0](self.own(place), jnp.asarray(x))

  def back(self, place: int, x: Any, incoming: Any) -> jax.Array:
    """Returns the loss's gradient at a stage's input."""
    return _programs(self.net_of, place)[1](self.own(place), jnp.asarray(x), incoming)

  def own(self, place: int) -> dict[Path, Any]:
    """Returns the parameters of a stage."""
    return {path: self.params[path] for path in self.net_of().stages[place].paths}

  def solved(
    self, first: int, last: int, maps: Sequence[Any], behind: Behind, weights: Weights
  ) -> tuple[list[Any], float]:
    """Returns what `inverse.solve` finds."""
    search = functools.partial(
      solve, self.net_of, first, last, maps, self.params, behind, weights, steps=self.iterations
    )
    several = last - first > 1
    return search(iterations=_ITERATIONS[several], damping=_DAMPING[several])


@functools.lru_cache(maxsize=64)
def _programs(net_of: Callable[[], Stages], place: int) -> tuple[Callable, Callable]:
  """Returns a stage, (parameters, map) -> map, and its gradient, (parameters, map, incoming) -> incoming; compiled."""
  net = net_of()

  def after(params: dict[Path, Any], x: Any) -> jax.Array:
    return jax.nn.relu(net.apply(net.stages[place], params, x))

  def back(params: dict[Path, Any], x: Any, incoming: Any) -> jax.Array:
    return jax.vjp(functools.partial(after, params), x)[1](incoming)[0]

  return jax.jit(after), jax.jit(back)


def peel(run: _Run) -> Peeled:
  """Returns what a gradient of one image holds: the four steps of the method.

  Args:
    run: see `_Run`.
  """
  net = run.net_of()
  kernel, bias = (np.asarray(run.params[net.dense[0]], np.float64), np.asarray(run.observed[net.dense[1]], np.float64))
  taken, incoming = features(kernel, np.asarray(run.observed[net.dense[0]], np.float64), bias)
  pooled = functools.partial(net.apply, net.head, {})
  told = net.last and len(bias) == run.classes
  place, label = len(net.stages) - 1, int(np.argmin(bias)) if told else -1  # its share is negative

  x, eigenvalue = closed_map.found(run.net_of, place, run.observed[net.stages[-1].first])
  if not closed_map.blind(run.net_of, place).scale:
    x = _scaled(lambda x: pooled(run.after(place, x)), x, taken)
  back = jax.vjp(pooled, run.after(place, x))[1](jnp.asarray(incoming, jnp.float32).reshape(1, -1))[0]
  x, back, left = settled(run, place, x, back)
  maps = [x]
  if place == 0:  # the map is the image, of which a norm behind it hides the scale
    x = x / x.max() if closed_map.blind(run.net_of, 0).scale and x.any() else x
    return Peeled(np.clip(x[0], 0, 1) if eigenvalue < closed_map.EXACT else None, label, [x], eigenvalue)

  def behind() -> Behind:
    return Behind(maps[0], back, run.observed, negligible(maps[0]))

  while place > 1 and left < contradiction(run, place) and enough(run, place - 1, maps[0]):
    place -= 1
    x, back, left = stage_input(run, place, behind())
    maps = [x, *maps]
  if left > contradiction(run, place):
    return Peeled(None, label, maps, eigenvalue)
  image = first_input(run, place, behind())
  return Peeled(np.clip(image[0][0], 0, 1), label, [*map(np.asarray, image), *maps], eigenvalue)


def enough(run: _Run, place: int, output: np.ndarray) -> bool:
  """Returns whether the input of a stage can be found by itself: in closed form, or from a start that is its output."""
  stage, missing = run.net_of().stages[place], withheld(run.net_of, place, run.observed)
  if not (closed_map.unread(run.net_of, place) or missing):
    return True
  return stage.shortcut and missing in ([], [stage.kernel]) and equations(run, place, output) > _REDUNDANT


def withheld(net_of: Callable[[], Stages], place: int, sent: Collection[Path]) -> list[Path]:
  """Returns the paths that are not sent of those whose gradients give a stage's input in closed form, and its scale."""
  net = net_of()
  shift = net.stages[place - 1].shift if place and closed_map.blind(net_of, place).scale else None
  return [path for path in (net.stages[place].kernel, shift) if path is not None and path not in sent]


def settled(run: _Run, place: int, x: Any, incoming: Any) -> tuple[np.ndarray, Any, float]:
  """Returns (a map with what the stage behind does not see, what comes back to it, how much the shift contradicts).

  Args:
    run: see `_Run`.
    place: of the stage whose input it is.
    x: the map.
    incoming: the loss's gradient at the map behind.
  """
  blind, shift = closed_map.blind(run.net_of, place), run.net_of().stages[place - 1].shift if place else None
  x = closed_map.grounded(x, blind.classes)
  back = run.back(place, x, incoming)
  if not blind.scale or shift not in run.observed:
    return x, back, 0.0
  seen = np.ravel(run.observed[shift])
  for _ in range(_RESCALED):  # more than once, as what a norm adds to the variance depends on the scale
    summed = np.sum(np.asarray(back) * (x > negligible(x)), axis=(0, 1, 2))
    scale = _ratio(summed, seen)
    if scale <= 0 or np.abs(summed - scale * seen).sum() > _APART * np.abs(summed).sum():
      return x, back, np.inf
    x = x * np.float32(scale)
    back = run.back(place, x, incoming)
  return x, back, 0.0


def _ratio(x: np.ndarray, y: np.ndarray) -> float:
  """Returns the factor with which `y` comes closest to `x` in the sum of absolute differences, a weighted median."""
  seen = y != 0
  order = np.argsort(x[seen] / y[seen])
  weights = np.cumsum(np.abs(y[seen])[order])
  return float((x[seen] / y[seen])[order][np.searchsorted(weights, weights[-1] / 2)]) if seen.any() else 0.0


def negligible(x: np.ndarray) -> float:
  """Returns what entries of a map found may be where ReLU made them zero."""
  return _NOTHING * float(np.sqrt(np.mean(x**2)))


def equations(run: _Run, place: int, output: np.ndarray) -> float:
  """Returns how many equations there are for each entry of a stage's input: gradients, and active entries behind."""
  weights = sum(run.observed[path].size for path in run.own(place) if path in run.observed)
  return (weights + int((output > negligible(output)).sum())) / np.prod(run.net_of().stages[place].shape)


def contradiction(run: _Run, place: int) -> float:
  """Returns the sum of squares that a map of zeros leaves: a solution that leaves more is none."""
  return OUTPUT**2 + sum(path in run.observed for path in run.net_of().stages[place].paths)


def stage_input(run: _Run, place: int, behind: Behind) -> tuple[np.ndarray, Any, float]:
  """Returns (the input of one stage, what comes back to it, the sum of squares that is left).

  It is the closed form where there is one that gives the map behind. Else it is a solution that starts from that form,
  or from the map behind, in the stage's shape.
  """
  stage = run.net_of().stages[place]
  starts: list[tuple[Any, Sequence[tuple[float, float]]]] = [(_resized(behind.output, stage.shape), _ATTEMPTS)]
  if not (closed_map.unread(run.net_of, place) or withheld(run.net_of, place, run.observed)):
    x, eigenvalue = closed_map.found(run.net_of, place, run.observed[stage.first])
    if not closed_map.blind(run.net_of, place).scale:
      x = _scaled(functools.partial(run.after, place), x, np.ravel(behind.output))
    x, back, left = settled(run, place, x, behind.incoming)
    apart = np.linalg.norm(run.after(place, x) - behind.output) / np.linalg.norm(behind.output)
    left += float(OUTPUT * apart) ** 2
    # An exact form may differ from the map behind where that has constants that are not seen.
    unseen = closed_map.blind(run.net_of, place + 1).classes
    if left < _SOLVED or (unseen and eigenvalue < _CERTAIN and left < _NEAR):
      return x, back, left
    if eigenvalue < closed_map.EXACT or not stage.shortcut:  # the map behind is no start without a shortcut
      starts = [(x, _CLOSE), *starts]
  best, least = [starts[0][0]], np.inf
  for start, attempts in starts:
    if least < _SOLVED:
      break
    for number, (warmest, slack) in enumerate(attempts):
      maps, given = best if number else [start], behind._replace(slack=slack * behind.slack)
      for softness in (one for one in _SOFTNESS if one <= warmest):
        maps, left = run.solved(place, place + 1, maps, given, Weights(softness))
      if left < least:
        best, least = maps, left
      if not _SOLVED < least < _HOPELESS:
        break
  x, back, left = settled(run, place, best[0], behind.incoming)
  return x, back, max(left, least)


def _resized(x: Any, shape: Sequence[int]) -> jax.Array:
  """Returns a map in another shape: its middle channels, or zeros beside them."""
  start = jax.image.resize(jnp.asarray(x), (1, *shape[1:3], x.shape[-1]), 'linear')
  more = start.shape[-1] - shape[-1]
  return start[..., more // 2 :][..., : shape[-1]] if more >= 0 else jnp.pad(start, [(0, 0)] * 3 + [(0, -more)])


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
  for before in range(place - 1):
    maps.append(run.after(before, maps[-1]))
  return maps


@base.attack(citation='Peeling of residual networks: our own method.')
def residual_peeling(client: Client, *, iterations: Count = 6, tv: NonNegative = 1.0) -> base.Attack:
  r"""Peeling of networks of convolutions, norms, ReLU, max pools and residual sums, from one gradient of one image.

  It runs on the host, and takes minutes for an image of CIFAR-10 in ResNet-20. BatchNorm, where there is one, runs on
  the statistics of the batch. The map before a block is exact up to rounding where its first convolution has as many
  channels as positions. So it is before a block with a shortcut and many more weights than its map has entries. The
  image is found by search. Where a map explains the upload no better than none, there is no image.

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
      of as many channels as positions (one less before BatchNorm), one with fewer weights than pixels, a batch of
      several samples, or a client that shares its delta, or nothing of the dense layer or the last stage.
  """

  def net_of(observation: Observation) -> Callable[[], Stages]:
    base.require_gradient('residual_peeling', observation)
    client.loss.require_cross_entropy('residual_peeling')
    number, *shape = observation.batch_shape
    if number != 1:
      raise errors.UsageError(f'the attack residual_peeling reads the gradient of one sample: the batch has {number}')
    found, kept = _network(client.model, tuple(shape), client.batch_norm == 'train'), base.unsent(client, observation)
    net, sent = found(), {path for path, _ in _leaves(observation.update)} - kept
    needed = [path for path in net.dense if path not in sent] + withheld(found, len(net.stages) - 1, sent)
    if needed:
      raise errors.UsageError(
        f'the attack residual_peeling reads the dense layer and the last stage, and nothing is sent of '
        f'{", ".join(map("/".join, needed))}: attack a client that trains and shares them'
      )
    return found

  def read(observation: Observation, key: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    del key
    both, kept = (observation.variables['params'], observation.update), base.unsent(client, observation)
    params, observed = ({path: np.asarray(leaf, np.float32) for path, leaf in _leaves(tree)} for tree in both)
    observed = {path: leaf for path, leaf in observed.items() if path not in kept}
    found = peel(_Run(net_of(observation), params, observed, iterations, float(tv), observation.num_classes))
    if found.image is None:
      return np.zeros((0, 1)), np.zeros(0)
    return found.image[np.newaxis], np.asarray([found.label])

  return base.host_form(net_of, read, labelled=True)


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
  found.append(stages(model, shapes, sample_shape, train))
  about = f'the attack residual_peeling does not read the model {model.name!r}'
  weights, pixels = sum(map(math.prod, net().shapes.values())), math.prod(sample_shape)
  if weights < pixels:
    raise errors.UsageError(f'{about}: it has {weights:,} weights, fewer than the {pixels:,} numbers of a sample')
  with jax.ensure_compile_time_eval():  # not the trace: Flax would draw each parameter there, to know its shape
    why = closed_map.unread(net, len(found[0].stages) - 1)
  if why:
    raise errors.UsageError(f'{about}: its last stage {why}')
  return net
