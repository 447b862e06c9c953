"""Passive peeling: a batch's images and labels, exactly, from the gradient of a dense ReLU network at known weights.

The published form is the passive variant of Shariati & Alambardar Meybodi (2026). We know only a description of it, and
do not claim the same results. In the first dense layer, neuron j holds

  ∂L/∂W_j = (1/B) Σ_i δ_ij x_i  and  ∂L/∂b_j = (1/B) Σ_i δ_ij,

and ReLU sets δ_ij = 0 for the samples that do not activate j. If one sample is left, the quotient is its image. This
can be checked, since an image and a label determine their gradient. For a mixture of images that gradient differs from
the one of the neuron. Samples that pass the check are certified. Subtracting them leaves other neurons with one sample,
and so on, as in decoding a fountain code.

The published check compares the bias gradient alone, one number per neuron. Here the rows of the second layer's weight
gradient are compared, too, which hold relu(z_j)·δ' of the same samples and the same neuron. These are as many equations
as the second layer has neurons, so that a candidate of one neuron can be certified in float32 as well.

It runs on the host, in NumPy float64, for a gradient of any precision. A rounding error in one sample is noise in the
samples found later.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from gradleak.attacks import base
from gradleak.attacks.dense import entry, first_dense_layer, in_pixels, tolerance
from gradleak.attacks.fidel import image_layer
from gradleak.core import errors, trees
from gradleak.core.reuse import reusable
from gradleak.core.settings import Count, Fraction, ranged
from gradleak.core.trees import Layer, Tree
from gradleak.federated import Client
from gradleak.models.model import Model, require
from gradleak.threat import Observation

PIXELS = (0.0, 1.0)
NORMALISED = (-10.0, 10.0)  # no usual normalisation of pixels leaves it
Dense = tuple[np.ndarray, np.ndarray]  # (kernel [in, out], bias [out]) of a layer, or their gradients

# Mismatches up to this are rounding errors of float64; their order does not matter.
_ROUNDING = 1e-10
# Images with a larger mismatch are refined: from so many other neurons, and so many times before the next candidates.
_EXACT, _TRIED, _SWEEPS = 1e-13, 6, 3
# Candidates within so many tolerances are taken for one image, which must not be subtracted twice.
_NEAR = 100
# Larger mismatches are not small changes of the logits, and are not divided by the sensitivity.
_SMALL = 1e-2
_TINY = np.finfo(np.float64).tiny


class Peeled(NamedTuple):
  """The certified samples, in the order in which they were found; K of them.

  Attributes:
    images: float64 [K, in], inputs of the first dense layer.
    labels: int64 [K].
    mismatch: float64 [K], the relative difference between the gradient that each implies and the one observed, divided
      by its `_sensitivity`: about the relative error of the image.
    neurons: bool [K, neurons], those that held this sample alone when it was found.
    unexplained: the norm of the first layer's bias gradient that no certified sample explains, over its whole norm.
  """

  images: np.ndarray
  labels: np.ndarray
  mismatch: np.ndarray
  neurons: np.ndarray
  unexplained: float


class _Gradient(NamedTuple):
  """The parts of a gradient that peeling uses.

  Attributes:
    incoming: of the first layer's weights, [neurons, in].
    shares: of its bias, [neurons].
    outgoing: of the second layer's weights, [neurons, second layer's neurons].
  """

  incoming: np.ndarray
  shares: np.ndarray
  outgoing: np.ndarray


def dense_layers(layers: Sequence[Layer], tree: Tree) -> list[Dense]:
  """Returns the (kernel [in, out], bias [out]) of every layer, as `peel` takes parameters and gradients.

  Args:
    layers: the model's, in forward order.
    tree: its parameters, or a gradient.

  Raises:
    UsageError: for fewer than two layers, or one that is not dense with a bias.
  """
  check_dense(layers, tree)
  return [tuple(np.asarray(trees.get(tree, path), np.float64) for path in layer.paths) for layer in layers]


def check_dense(layers: Sequence[Layer], tree: Tree) -> None:
  """Raises the `UsageError` of `dense_layers`; `tree` may hold shapes only."""
  pairs = [[trees.get(tree, path) for path in layer.paths] for layer in layers]
  for layer, pair in zip(layers, pairs, strict=True):
    if [leaf.ndim for leaf in pair] != [2, 1] or pair[0].shape[1] != pair[1].shape[0]:
      raise errors.UsageError(f'peeling needs dense layers with a bias throughout, and {layer.name!r} is none')
  if len(pairs) < 2:
    raise errors.UsageError(f'peeling needs a hidden layer: the model has {len(pairs)} layer')


@reusable(32)
def _check_relu(model: Model, shape: tuple[int, ...]) -> None:
  """Raises `UsageError` unless an initial network computes the logits of its dense layers with ReLU between them."""
  layers = require(model, 'layers')(shape)
  with jax.ensure_compile_time_eval():
    keys = jax.random.split(jax.random.key(0))
    given = model.init(keys[0], shape), jax.random.uniform(keys[1], (8, *shape))
    apply = jax.jit(lambda variables, samples: model.apply(variables, samples, False, None)[0])
    logits, near = np.asarray(apply(*given), np.float64), tolerance(apply, *given)
  (kernel, bias), *rest = dense_layers(layers, given[0]['params'])
  normalised = entry(model, shape, *first_dense_layer(layers, given[0]['params'])).normalised
  mean, std = (0.0, 1.0) if normalised is None else normalised
  ours = _forward(rest, (np.asarray(given[1], np.float64).reshape(8, -1) - mean) / std @ kernel + bias)[0][-1]
  if not np.allclose(ours, logits, rtol=0, atol=near * np.abs(ours).max()):
    raise errors.UsageError(
      'peeling needs dense layers with a ReLU between each two and nothing else, and the model '
      f'{model.name!r} computes other logits than these'
    )


@ranged
def peel(
  layers: Sequence[Dense],
  gradients: Sequence[Dense],
  batch_size: Count,
  *,
  tolerance: Fraction = 1e-4,
  box: tuple[float, float] = PIXELS,
) -> Peeled:
  """Returns the `Peeled` samples of a batch.

  Args:
    layers: (kernel [in, out], bias [out]) of all layers in forward order, ReLU between them, at the weights of the
      gradient; see `dense_layers`.
    gradients: the same for the gradient of the mean cross-entropy over the batch.
    batch_size: number of samples behind the gradient.
    tolerance: the largest mismatch that certifies a sample, about the relative error of its image: 1e-4 is some 80 dB;
      1e-2 tolerates more noise, and errors of 50 dB.
    box: the range of the entries of a sample; candidates that leave it by more than the tolerance are mixtures.

  An image that is in the batch twice is never certified: its neurons hold twice the gradient that it implies.
  """
  layers = [tuple(np.asarray(x, np.float64) for x in layer) for layer in layers]
  (incoming, shares), (outgoing, _) = ([np.asarray(x, np.float64) for x in layer] for layer in gradients[:2])
  observed = _Gradient(np.ascontiguousarray(incoming.T), shares, outgoing)

  images, labels = np.zeros((0, len(incoming))), np.zeros(0, np.int64)
  mismatch, neurons = np.zeros(0), np.zeros((0, len(shares)), bool)
  while True:
    images, mismatch = _take_again(layers, observed, images, labels, mismatch, batch_size)
    left = _left(layers, observed, images, labels, batch_size)[0]
    certified = _certify(layers, left, batch_size, tolerance, box)[: batch_size - len(labels)]
    if not certified:
      break
    new = [np.stack(column) for column in zip(*certified, strict=True)]
    found = zip((images, labels, mismatch, neurons), new, strict=True)
    images, labels, mismatch, neurons = (np.concatenate(pair) for pair in found)
  whole = np.linalg.norm(shares)
  return Peeled(images, labels, mismatch, neurons, float(np.linalg.norm(left.shares) / whole) if whole else 0.0)


@ranged
def scale(
  layers: Sequence[Dense],
  gradients: Sequence[Dense],
  batch_size: Count,
  *,
  tolerance: Fraction = 1e-4,
  box: tuple[float, float] = PIXELS,
) -> float:
  """Returns how many times as large a gradient is as that of the mean cross-entropy; 1 where no neuron tells.

  The quotient of a neuron with one sample is its image at any scale. This image and a label imply a fraction of the
  neuron, and its row of the second layer's gradient. For one sample, these equal the values of the neuron up to one
  factor.

  Args:
    layers, gradients, batch_size, tolerance, box: as `peel` takes them; the tolerance is of that relative difference.
  """
  layers = [tuple(np.asarray(x, np.float64) for x in layer) for layer in layers]
  (incoming, shares), (outgoing, _) = ([np.asarray(x, np.float64) for x in layer] for layer in gradients[:2])
  neurons, candidates = _candidates(_Gradient(incoming.T, shares, outgoing), box, tolerance)
  z = candidates @ layers[0][0] + layers[0][1]
  held = np.concatenate([shares[neurons, np.newaxis], outgoing[neurons]], axis=1)
  sizes = np.maximum(np.linalg.norm(held, axis=1), _TINY)
  at, best = np.arange(len(neurons)), (tolerance, 1.0)
  for label in range(len(layers[-1][1])):
    to_first, to_second = implied_gradients(layers[1:], z, np.full(len(z), label))
    active = np.maximum(z[at, neurons], 0)[:, np.newaxis]
    ours = np.concatenate([to_first[at, neurons, np.newaxis], active * to_second], axis=1) / batch_size
    factors = (ours * held).sum(axis=1) / np.maximum((ours**2).sum(axis=1), _TINY)
    apart = np.linalg.norm(held - factors[:, np.newaxis] * ours, axis=1) / sizes
    found = [(float(a), float(f)) for a, f in zip(apart, factors, strict=True) if f > 0]
    best = min([best, *found])
  return best[1]


def implied_gradients(rest: Sequence[Dense], z: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Returns the gradients of each sample's cross-entropy at the first two layers.

  Args:
    rest: the layers behind the first.
    z: the first layer's pre-activations, [N, neurons].
    labels: int [N].

  Returns:
    ∂ℓ/∂z of the first layer, [N, neurons], and of the second, [N, second layer's neurons].
  """
  pre_activations, backward = _forward(rest, z)
  backward[np.arange(len(z)), labels] -= 1
  for (kernel, _), below in zip(reversed(rest), reversed(pre_activations[:-1]), strict=True):
    second, backward = backward, (backward @ kernel.T) * (below > 0)
  return backward, second


def _forward(rest: Sequence[Dense], z: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
  """Returns the pre-activations of all layers, a list from z to the logits, and the probabilities."""
  pre_activations = [z]
  for kernel, bias in rest:
    pre_activations.append(np.maximum(pre_activations[-1], 0) @ kernel + bias)
  probabilities = np.exp(pre_activations[-1] - pre_activations[-1].max(axis=1, keepdims=True))
  return pre_activations, probabilities / probabilities.sum(axis=1, keepdims=True)


def _implied(
  layers: Sequence[Dense], images: np.ndarray, labels: np.ndarray, batch_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns z of K samples, and their ∂L/∂z of the first and the second layer, L the batch's mean loss."""
  z = images @ layers[0][0] + layers[0][1]
  to_first, to_second = implied_gradients(layers[1:], z, labels)
  return z, to_first / batch_size, to_second / batch_size


def _left(
  layers: Sequence[Dense], observed: _Gradient, images: np.ndarray, labels: np.ndarray, batch_size: int
) -> tuple[_Gradient, tuple[np.ndarray, np.ndarray, np.ndarray]]:
  """Returns the `_Gradient` that K samples leave unexplained, and what `_implied` returns of them."""
  z, shares, second = implied = _implied(layers, images, labels, batch_size)
  explained = _Gradient(shares.T @ images, shares.sum(axis=0), np.maximum(z, 0).T @ second)
  return _Gradient(*map(np.subtract, observed, explained)), implied


def _certify(
  layers: Sequence[Dense], left: _Gradient, batch_size: int, tolerance: float, box: tuple[float, float]
) -> list[tuple[np.ndarray, int, float, np.ndarray]]:
  """Returns (image, label, mismatch, neurons that hold it) of the candidates that explain their neurons.

  The mismatches of one round differ by a factor of ten at most, or by rounding errors. A neuron that holds a second
  sample with a much smaller share can pass. Subtracting its image too early then spoils the rest of that sample.
  """
  neurons, candidates = _candidates(left, box, tolerance)
  z = candidates @ layers[0][0] + layers[0][1]
  classes = np.arange(len(layers[-1][1]))

  def mismatch_of(z: np.ndarray, labels: Any, held: np.ndarray) -> np.ndarray:
    return _mismatch(layers[1:], z, labels, held, left.shares[held], left.outgoing[held], batch_size)

  passed = [mismatch_of(z, c, neurons[:, np.newaxis]) <= tolerance for c in classes]
  found: list[Any] = []
  taken = ~np.any(passed, axis=0)
  for i, neuron in enumerate(neurons):
    if taken[i]:
      continue
    held = np.arange(len(left.shares)) == neuron
    distance = np.abs(z - z[i]).max(axis=1) / np.abs(z[i]).max()
    held[neurons[~taken & (distance <= tolerance)]] = True
    by_label = mismatch_of(np.tile(z[i], (len(classes), 1)), classes, np.flatnonzero(held)[np.newaxis])
    if by_label.min() <= tolerance:
      taken |= distance <= _NEAR * tolerance
      weights = left.shares[held]  # the image by least squares over all its neurons
      image = weights @ left.incoming[held] / (weights @ weights)
      found.append((image, by_label.argmin(), by_label.min(), held))
  threshold = max(_ROUNDING, 10 * min((mismatch for _, _, mismatch, _ in found), default=0.0))
  return sorted((entry for entry in found if entry[2] <= threshold), key=lambda entry: entry[2])


def _candidates(left: _Gradient, box: tuple[float, float], slack: float) -> tuple[np.ndarray, np.ndarray]:
  """Returns the neurons whose quotient could be an image, the largest share first, and the quotients."""
  with np.errstate(all='ignore'):
    quotients = left.incoming / left.shares[:, np.newaxis]
    inside = (quotients >= box[0] - slack).all(axis=1) & (quotients <= box[1] + slack).all(axis=1)  # False for NaN
  neurons = np.flatnonzero(inside & np.isfinite(quotients).all(axis=1))
  neurons = neurons[np.argsort(-np.abs(left.shares[neurons]))]
  return neurons, quotients[neurons]


def _mismatch(
  rest: Sequence[Dense],
  z: np.ndarray,
  labels: Any,
  neurons: np.ndarray,
  shares: np.ndarray,
  rows: np.ndarray,
  batch_size: int,
) -> np.ndarray:
  """Returns by which share each candidate would have to change so that its gradient is that of its neurons, [N].

  Args:
    rest: the layers behind the first.
    z: of N candidates, [N, neurons].
    labels: theirs, [N], or one for all.
    neurons: M for each, int [N, M], or for all, [1, M].
    shares, rows: their part of the first layer's bias gradient, […, M], and of the second layer's weight gradient,
      […, M, its neurons].
    batch_size: number of samples behind the gradient.
  """
  to_first, to_second = implied_gradients(rest, z, labels)
  at = np.arange(len(z))[:, np.newaxis], neurons
  implied = to_first[at], np.maximum(z[at], 0)[..., np.newaxis] * to_second[:, np.newaxis]

  def norm(x: np.ndarray) -> np.ndarray:
    return np.sqrt((x**2).sum(axis=tuple(range(1, x.ndim))))

  pairs = zip(implied, (shares, rows), strict=True)
  mismatch = np.maximum(*(norm(ours / batch_size - held) / np.maximum(norm(held), _TINY) for ours, held in pairs))
  return np.where(mismatch <= _SMALL, mismatch / _sensitivity(rest, z, labels), mismatch)


def _sensitivity(rest: Sequence[Dense], z: np.ndarray, labels: np.ndarray) -> np.ndarray:
  """Returns the relative change of each sample's error at the logits over that of the logits, [N], at least 1.

  A sample that is classified correctly with confidence has a logit some 20 to 30 below the highest, at the published
  weights. Its error is the exponential of that logit. Relative rounding errors are as many times larger in its share.
  """
  (*_, logits), others = _forward(rest, z)
  change = np.abs(logits - (others * logits).sum(axis=1, keepdims=True))
  others[np.arange(len(z)), labels] = 0
  return np.maximum((others * change).sum(axis=1) / np.maximum(others.sum(axis=1), _TINY), 1)


def _take_again(
  layers: Sequence[Dense],
  observed: _Gradient,
  images: np.ndarray,
  labels: np.ndarray,
  mismatch: np.ndarray,
  batch_size: int,
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the certified images, each from the neuron with the least mismatch now, and their mismatches.

  An image contains what else its neuron held with a share too small to be noticed. This error spreads to every neuron
  that the image is subtracted from. About half of these do not hold the other sample. With more known samples, more
  neurons hold an image nearly by itself, and give it with a smaller error.
  """
  images, mismatch = images.copy(), mismatch.copy()
  for _ in range(_SWEEPS):
    left, (z, shares, second) = _left(layers, observed, images, labels, batch_size)
    foreign = np.linalg.norm(left.incoming, axis=1)
    with np.errstate(all='ignore'):
      ratio = foreign / np.abs(shares)
    nearest = np.argsort(ratio, axis=1)[:, :_TRIED]  # NaN, of 0 / 0, comes last
    usable = np.isfinite(np.take_along_axis(ratio, nearest, axis=1)) & (mismatch > _EXACT)[:, np.newaxis]
    samples, neurons = np.nonzero(usable)[0], nearest[usable]
    alone = left.shares[neurons] + shares[samples, neurons]
    rows = left.outgoing[neurons] + np.maximum(z[samples, neurons], 0)[:, np.newaxis] * second[samples]
    with np.errstate(all='ignore'):
      taken = left.incoming[neurons] + shares[samples, neurons, np.newaxis] * images[samples]
      taken /= alone[:, np.newaxis]
      again = taken @ layers[0][0] + layers[0][1]
      own = (x[:, np.newaxis] for x in (neurons, alone, rows))
      found = _mismatch(layers[1:], again, labels[samples], *own, batch_size)  # type: ignore[call-arg]
    better = np.flatnonzero(found < mismatch[samples] / 2)
    if not len(better):
      break
    better = better[np.argsort(-found[better])]  # of several for one sample, the best is written last
    images[samples[better]], mismatch[samples[better]] = taken[better], found[better]
  return images, mismatch


@base.attack(citation='Passive peeling, after Shariati, Alambardar Meybodi, 2026.')
def peeling(client: Client, *, tolerance: Fraction = 1e-4) -> base.Attack:
  r"""Peeling as an attack on dense networks with ReLU: `peel`, on the host. It returns images and labels.

  Where nothing is certified, the gradient may be a multiple of the mean one, as under clipping. Then `scale` estimates
  the factor, and the gradient is peeled again.

  Formula:
    \hat{x}_j = \frac{\partial L / \partial W_j}{\partial L / \partial b_j}, \quad \frac{\partial L}{\partial W_j}
    = \frac{1}{B} \sum_i \delta_{ij} x_i, \quad \frac{\partial L}{\partial b_j} = \frac{1}{B} \sum_i \delta_{ij}

  Args:
    client: the `Client` that is attacked; it must share the gradient of cross-entropy.
    tolerance: as `peel` takes it; in float32 the mismatch of a sample that is alone in its neuron is about 1e-5.

  Raises:
    UsageError: when run, for another network, or a client that shares its delta, or nothing of the first two layers.
  """

  def check(observation: Observation) -> None:
    base.require_gradient('peeling', observation)
    client.loss.require_cross_entropy('peeling')
    layers = require(client.model, 'layers')(observation.batch_shape[1:])
    image_layer(client.model, observation)
    check_dense(layers, observation.update)
    _check_relu(client.model, observation.batch_shape[1:])
    base.require_sent('peeling', client, observation, [path for layer in layers[:2] for path in layer.paths])

  def read(observation: Observation, key: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    del key
    observation = in_pixels(client.model, observation)
    layers = require(client.model, 'layers')(observation.batch_shape[1:])
    known, observed = (dense_layers(layers, tree) for tree in (observation.variables['params'], observation.update))

    def take(box: tuple[float, float], gradients: Sequence[Dense] = observed) -> Peeled:
      return peel(known, gradients, observation.batch_shape[0], tolerance=float(tolerance), box=box)

    own = client.modality.box
    boxes = [own] if math.isinf(own[1]) else [own, NORMALISED]  # that of a network that normalises in its own code
    peeled = take(own)
    for box in boxes[1:] if len(peeled.labels) < observation.batch_shape[0] else ():
      peeled = max(peeled, take(box), key=lambda found: len(found.labels))
    for box in () if len(peeled.labels) else boxes:  # it may be a sum, clipped, or in another unit
      factor = scale(known, observed, observation.batch_shape[0], tolerance=float(tolerance), box=box)
      if factor != 1:
        again = take(box, [(kernel / factor, bias / factor) for kernel, bias in observed])
        peeled = max(peeled, again, key=lambda found: len(found.labels))
    return peeled.images, peeled.labels

  return base.host_form(check, read, labelled=True)
