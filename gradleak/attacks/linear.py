"""The rows of a batch from the gradient of softmax regression, exactly: a network of one dense layer.

The residuals are `δ_i = softmax(x_i W + b) − y_i`. The gradients are `G = Xᵀ Δ / B` and `g = Σ_i δ_i / B`. Δ has the
rank B of the batch where B is at most the classes less one. Then the rows lie in the span of G: X = A R. Here R [B, in]
is from the singular value decomposition of G, and A [B, B] is unknown. The gradients at known labels are as many
equations as A has entries or more. They are solved by least squares from several starts. A solution that leaves only
rounding errors is certified by that, row by row. A row that the network is sure of has next to no part in the gradient.
If rounding errors could move it by more than a hundredth, it is not returned.

More rows than classes less one leave a whole family of solutions: then there is no closed form. One row is the quotient
of `fidel`, for any number of classes.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import numpy as np

from gradleak.attacks import base, subspace
from gradleak.attacks.dense import in_pixels
from gradleak.attacks.fidel import image_layer
from gradleak.attacks.matching.samples import classes_of, starting_labels
from gradleak.core import errors, trees
from gradleak.core.settings import Count, Fraction, ranged
from gradleak.federated import Client
from gradleak.models.model import require
from gradleak.threat import Observation

MOVED = 0.01  # part of its norm that rounding may move a row by which is certified
_EPSILON = 2.0**-24  # rounding of a number near 1 in float32
_FEW = 4.0  # roundings that are no error yet


class Solved(NamedTuple):
  """What was found.

  Attributes:
    rows: float64 [B, in], in the order of the labels, those of one label in any order; [0, in] without a certificate.
    residual: the relative difference between their gradient and the given one.
    moved: by which part of its norm rounding may move each row, float64 [B].
  """

  rows: np.ndarray
  residual: float
  moved: np.ndarray

  @property
  def certain(self) -> np.ndarray:
    """Which rows are certified, bool [B]."""
    return self.moved <= MOVED


@ranged
def solve(
  gradients: tuple[Any, Any],
  layer: tuple[Any, Any],
  targets: Any,
  rng: np.random.Generator,
  *,
  starts: Count = 32,
  tolerance: Fraction = 1e-4,
) -> Solved:
  """Returns the `Solved` rows of a batch.

  Args:
    gradients: of the mean cross-entropy: of the kernel [in, classes] and of the bias [classes].
    layer: kernel and bias.
    targets: probabilities [B, classes] of each row.
    rng: draws the starts.
    starts: at most so many.
    tolerance: the largest relative difference of gradients that certifies a solution.

  Raises:
    UsageError: for more rows than classes less one, or than features.
  """
  from scipy import optimize

  (gradient, shares), (kernel, bias), targets = (
    tuple(np.asarray(x, np.float64) for x in gradients),
    tuple(np.asarray(x, np.float64) for x in layer),
    np.asarray(targets, np.float64),
  )
  number, classes = targets.shape
  _check(number, classes, len(gradient))
  left, values, right = np.linalg.svd(gradient, full_matrices=False)
  span = (left[:, :number] * values[:number]).T * number  # R [B, in]
  scale = np.concatenate([(values[:number, np.newaxis] * right[:number]).ravel(), shares])
  projected, size = span @ kernel, max(float(np.linalg.norm(scale)), 1e-300)

  def apart(mixing: np.ndarray) -> np.ndarray:
    mixing = mixing.reshape(number, number)
    logits = mixing @ projected + bias
    odds = np.exp(logits - logits.max(axis=1, keepdims=True))
    residuals = odds / odds.sum(axis=1, keepdims=True) - targets
    # G = Xᵀ Δ / B in the basis of its left singular vectors, whose lengths R has.
    implied = values[:number, np.newaxis] * (mixing.T @ residuals)
    return np.concatenate([implied.ravel(), residuals.mean(axis=0)]) - scale

  def moved(found: Any, rows: np.ndarray, noise: float) -> np.ndarray:
    _, lengths, turned = np.linalg.svd(found.jac, full_matrices=False)
    slack = noise * turned.T / np.maximum(lengths, 1e-150)  # of A
    of_mixing = np.linalg.norm(np.einsum('ike,kd->ide', slack.reshape(number, number, -1), span), axis=(1, 2))
    of_span = number * noise * math.sqrt(len(gradient)) * np.linalg.norm(found.x.reshape(number, number), axis=1)
    return np.hypot(of_mixing, of_span) / np.maximum(np.linalg.norm(rows, axis=1), 1e-300)

  best = Solved(np.zeros((0, len(gradient))), np.inf, np.zeros(0))
  for _ in range(starts):
    found = optimize.least_squares(apart, rng.normal(size=number**2), xtol=1e-15, ftol=1e-15, gtol=1e-15, max_nfev=200)
    left_over = float(np.linalg.norm(found.fun)) / math.sqrt(len(scale))
    rows = found.x.reshape(number, number) @ span
    # The rounding of the entries of the gradient, and of residuals, which are differences of numbers up to 1.
    rounded = math.sqrt(subspace.rounding(gradient) + _EPSILON**2 * float(np.mean(np.square(rows))) / number)
    residual = left_over * math.sqrt(len(scale)) / size
    if residual < best.residual:
      best = Solved(rows, residual, moved(found, rows, max(left_over, rounded)))
    if left_over <= _FEW * rounded and residual <= tolerance:  # else another start may leave less
      break
  return best if best.residual <= tolerance else Solved(best.rows[:0], best.residual, best.moved[:0])


def _check(number: int, classes: int, features: int) -> None:
  if number >= classes:
    raise errors.UsageError(
      f'softmax regression on {classes} classes gives {number} rows away exactly only where they are at most '
      f'{classes - 1}: take fidel for one row, or a matching attack'
    )
  if number > features:
    raise errors.UsageError(
      f'softmax regression on {features} features gives {number} rows away exactly only where they are at most '
      f'{features}: take a matching attack'
    )


@base.attack(citation='After Geiping et al. 2020, proposition 3.1, for several rows.')
def linear(client: Client, *, starts: Count = 32, tolerance: Fraction = 1e-4) -> base.Attack:
  r"""Softmax regression solved for all rows of a batch, where they are fewer than the classes: `solve`, on the host.

  A row is left out if rounding errors could move it by more than a hundredth: the network is sure of it. Where labels
  are inferred and wrong, no solution explains the update, and no row is returned.

  Formula:
    \frac{\partial L}{\partial W} = \frac{1}{B} X^\top \Delta, \quad
    \frac{\partial L}{\partial b} = \frac{1}{B} \sum_i \delta_i, \quad
    \delta_i = \text{softmax}(x_i W + b) - y_i, \quad X = A R

  Args:
    client: the `Client` that is attacked; it must share the gradient of cross-entropy, of one dense layer.
    starts, tolerance: as `solve` takes them.

  Raises:
    UsageError: when run, for another network, labels that are neither known nor inferred, as many rows as classes or
      more, or more rows than features.
  """

  def paths(observation: Observation) -> tuple[tuple[str, ...], tuple[str, ...]]:
    base.require_gradient('linear', observation)
    client.loss.require_cross_entropy('linear')
    layers = require(client.model, 'layers')(observation.batch_shape[1:])
    if len(layers) != 1:
      raise errors.UsageError(
        f'the attack linear reads one dense layer, and {client.model.name} has {len(layers)} layers'
      )
    if observation.knowledge.labels not in ('known', 'inferred'):
      raise errors.UsageError("the attack linear needs the labels: choose labels='known'")
    jax.eval_shape(functools.partial(starting_labels, client), observation)  # raises where they cannot be inferred
    kernel, bias = image_layer(client.model, observation)
    _check(observation.batch_shape[0], observation.num_classes, trees.get(observation.update, kernel).shape[0])
    return kernel, bias

  def read(observation: Observation, key: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    seen = in_pixels(client.model, observation)
    both = seen.update, seen.variables['params']
    gradients, layer = (tuple(trees.get(tree, path) for path in paths(observation)) for tree in both)
    targets, rng = np.asarray(starting_labels(client, observation)), np.random.default_rng(key.ravel())
    labels = np.asarray(classes_of(client, targets))
    if observation.knowledge.labels == 'inferred' and (labels < 0).any():  # the update shows nothing of them
      return np.zeros((0, len(gradients[0]))), labels[:0]
    found = solve(gradients, layer, targets, rng, starts=starts, tolerance=float(tolerance))  # type: ignore[arg-type]
    return found.rows[found.certain], labels[: len(found.rows)][found.certain]

  return base.host_form(paths, read, labelled=True)._replace(labels='known')
