"""Passive peeling: a batch's images and labels, exactly, from the gradient of a dense ReLU network at known weights.

Named after the idea; the published form is the passive variant of Shariati & Alambardar Meybodi (2026), of which we
know a description only, and claim no parity. In the first dense layer, neuron j holds

  ∂L/∂W_j = (1/B) Σ_i δ_ij x_i  and  ∂L/∂b_j = (1/B) Σ_i δ_ij,

and ReLU sets δ_ij = 0 for the samples that leave j inactive. Where a single sample is left, the quotient is its image.
Whether that is so shows by itself: an image and a label determine the gradient they cause, and a mixture of images
causes another one than the neuron holds. Certified samples are subtracted, which leaves other neurons with a single
one, and so on, as a fountain code is decoded.

The published certificate compares the bias gradient alone, one number per neuron. Here the rows of the second layer's
weight gradient count too, which hold relu(z_j)·δ' of the same samples and the same neuron: as many equations as the
second layer has neurons, so that a candidate of one neuron can be certified in float32 as well.

All runs on the host, in NumPy float64, whatever the precision of the gradient: it is short of no time, and every
rounding error of one sample is noise in the next.
"""

from typing import NamedTuple

import numpy as np

from gradleak import errors, trees

# Mismatches up to here are rounding errors of float64 and need no ranking.
_ROUNDING = 1e-10
# Candidates within so many tolerances may be one image, which must not be subtracted twice.
_NEAR = 100
_TINY = np.finfo(np.float64).tiny


class Peeled(NamedTuple):
  """The certified samples, in the order in which they were found; K of them.

  Attributes:
    images: float64 [K, in], inputs of the first dense layer.
    labels: int64 [K].
    mismatch: float64 [K], the relative difference between the gradient that each implies and the one observed.
    neurons: bool [K, neurons], those that held this sample alone when it was found.
    unexplained: the share of the first layer's bias gradient, as norms, that no certified sample explains.
  """

  images: np.ndarray
  labels: np.ndarray
  mismatch: np.ndarray
  neurons: np.ndarray
  unexplained: float


class _Gradient(NamedTuple):
  """What peeling reads of a gradient, or of a part of it.

  Attributes:
    incoming: of the first layer's weights, [neurons, in].
    shares: of its bias, [neurons].
    outgoing: of the second layer's weights, [neurons, second layer's neurons].
  """

  incoming: np.ndarray
  shares: np.ndarray
  outgoing: np.ndarray


def dense_layers(layers, tree):
  """Returns the (kernel [in, out], bias [out]) of every layer, as `peel` takes parameters and gradients.

  Args:
    layers: the model's, a sequence of `trees.Layer` in forward order.
    tree: its parameters, or a gradient.

  Raises:
    UsageError: for fewer than two layers, or one that is not dense with a bias.
  """
  pairs = [[np.asarray(trees.get(tree, path), np.float64) for path in layer.paths] for layer in layers]
  for layer, pair in zip(layers, pairs, strict=True):
    if [leaf.ndim for leaf in pair] != [2, 1] or pair[0].shape[1] != pair[1].shape[0]:
      raise errors.UsageError(f'peeling needs dense layers with a bias throughout, and {layer.name!r} is none')
  if len(pairs) < 2:
    raise errors.UsageError(f'peeling needs a hidden layer: the model has {len(pairs)} layer')
  return [tuple(pair) for pair in pairs]


def peel(layers, gradients, batch_size, *, tolerance=1e-4, box=(0.0, 1.0)):
  """Returns the `Peeled` samples of a batch.

  Args:
    layers: (kernel [in, out], bias [out]) of all layers in forward order, ReLU between them, at the weights where the
      gradient was taken; see `dense_layers`.
    gradients: the same for the gradient of the mean cross-entropy over the batch.
    batch_size: number of samples behind the gradient.
    tolerance: the largest mismatch that certifies a sample. About that share of an image may be foreign: 1e-4 stands
      for some 80 dB; 1e-2 withstands more noise, and lets errors of 50 dB pass.
    box: the range of pixels; candidates beyond it, by more than the tolerance, are mixtures.

  An image that stands in the batch twice is never certified: its neurons hold twice what it implies.

  Raises:
    UsageError: for a batch size below 1, or a tolerance outside [0, 1].
  """
  errors.check_number('batch_size', batch_size, low=1, integer=True)
  errors.check_number('tolerance', tolerance, low=0, high=1)
  layers = [tuple(np.asarray(x, np.float64) for x in layer) for layer in layers]
  (incoming, shares), (outgoing, _) = ([np.asarray(x, np.float64) for x in layer] for layer in gradients[:2])
  observed = _Gradient(np.ascontiguousarray(incoming.T), shares, outgoing)

  images, labels = np.zeros((0, len(incoming))), np.zeros(0, np.int64)
  mismatch, neurons = np.zeros(0), np.zeros((0, len(shares)), bool)
  refitted = False
  while True:
    explained, _ = _implied_by_batch(layers, images, labels, batch_size)
    left = _Gradient(*map(np.subtract, observed, explained))
    certified = _certify(layers, left, batch_size, tolerance, box)[: batch_size - len(labels)]
    if certified:
      new = [np.stack(column) for column in zip(*certified, strict=True)]
      found = zip((images, labels, mismatch, neurons), new, strict=True)
      images, labels, mismatch, neurons = (np.concatenate(pair) for pair in found)
      refitted = False
    elif 0 < len(labels) < batch_size and not refitted:
      images, refitted = _refit(layers, observed, images, labels, mismatch, neurons, batch_size, tolerance), True
    else:
      break
  whole = np.linalg.norm(shares)
  return Peeled(images, labels, mismatch, neurons, float(np.linalg.norm(left.shares) / whole) if whole else 0.0)


def implied_gradients(rest, z):
  """Returns what one sample's cross-entropy hands back to the first two layers, for every label it could have.

  Args:
    rest: (kernel, bias) of the layers behind the first.
    z: the first layer's pre-activations [neurons].

  Returns:
    ∂ℓ/∂z of the first layer, [classes, neurons], and of the second, [classes, second layer's neurons].
  """
  pre_activations = [z]
  for kernel, bias in rest:
    pre_activations.append(np.maximum(pre_activations[-1], 0) @ kernel + bias)
  probabilities = np.exp(pre_activations[-1] - pre_activations[-1].max())
  backward = probabilities / probabilities.sum() - np.eye(len(probabilities))
  for (kernel, _), below in zip(reversed(rest), reversed(pre_activations[:-1]), strict=True):
    second, backward = backward, (backward @ kernel.T) * (below > 0)
  return backward, second


def _implied_by_batch(layers, images, labels, batch_size):
  """Returns the `_Gradient` that K samples contribute to a batch's, and their shares in it, [K, neurons]."""
  z = images @ layers[0][0] + layers[0][1]
  shares, second = np.zeros(z.shape), np.zeros((len(z), len(layers[1][1])))
  for k, label in enumerate(labels):
    to_first, to_second = implied_gradients(layers[1:], z[k])
    shares[k], second[k] = to_first[label] / batch_size, to_second[label] / batch_size
  return _Gradient(shares.T @ images, shares.sum(axis=0), np.maximum(z, 0).T @ second), shares


def _certify(layers, left, batch_size, tolerance, box):
  """Returns (image, label, mismatch, neurons that hold it) of the candidates that explain their neurons.

  Those of one round differ in mismatch by a factor of ten at most (or by rounding errors): a neuron that holds a
  second, much fainter sample can pass, and spoils what is left of that one if it is subtracted too early.
  """
  neurons, candidates = _candidates(left, box, tolerance)
  z = candidates @ layers[0][0] + layers[0][1]
  found, taken = [], np.zeros(len(neurons), bool)
  for i, neuron in enumerate(neurons):
    held = np.arange(len(left.shares)) == neuron
    if taken[i] or _best_label(layers[1:], z[i], left, held, batch_size)[1] > tolerance:
      continue
    distance = np.abs(z - z[i]).max(axis=1) / np.abs(z[i]).max()
    held[neurons[~taken & (distance <= tolerance)]] = True
    label, mismatch = _best_label(layers[1:], z[i], left, held, batch_size)
    if mismatch <= tolerance:
      taken |= distance <= _NEAR * tolerance
      weights = left.shares[held]  # what all its neurons say of the image, each by the size of its share
      found.append((weights @ left.incoming[held] / (weights @ weights), label, mismatch, held))
  bar = max(_ROUNDING, 10 * min((mismatch for _, _, mismatch, _ in found), default=0.0))
  return sorted((entry for entry in found if entry[2] <= bar), key=lambda entry: entry[2])


def _candidates(left, box, slack):
  """Returns the neurons whose quotient could be an image, the largest share first, and the quotients."""
  with np.errstate(all='ignore'):
    quotients = left.incoming / left.shares[:, np.newaxis]
    inside = (quotients >= box[0] - slack).all(axis=1) & (quotients <= box[1] + slack).all(axis=1)  # False for NaN
  neurons = np.flatnonzero(inside)
  neurons = neurons[np.argsort(-np.abs(left.shares[neurons]))]
  return neurons, quotients[neurons]


def _best_label(rest, z, left, held, batch_size):
  """Returns the label under which a candidate explains the neurons that hold it best, and the mismatch it leaves."""
  to_first, to_second = implied_gradients(rest, z)
  shares = to_first[:, held] / batch_size - left.shares[held]
  rows = np.maximum(z[held], 0)[:, np.newaxis] * to_second[:, np.newaxis] / batch_size - left.outgoing[held]
  mismatch = np.maximum(
    np.linalg.norm(shares, axis=1) / max(np.linalg.norm(left.shares[held]), _TINY),
    np.linalg.norm(rows, axis=(1, 2)) / max(np.linalg.norm(left.outgoing[held]), _TINY),
  )
  label = int(np.argmin(mismatch))
  return label, float(mismatch[label])


def _refit(layers, observed, images, labels, mismatch, neurons, batch_size, tolerance):
  """Returns the certified images, fitted once more to all the neurons that they explain together.

  An image taken from one neuron keeps what else that neuron held, too faint to be noticed. The fainter sample is absent
  from half of all neurons, though: least squares in which a neuron counts the less, the less it is explained, settles
  on those.
  """
  start = images
  for _ in range(10):
    explained, shares = _implied_by_batch(layers, images, labels, batch_size)
    left = np.linalg.norm(observed.incoming - explained.incoming, axis=1)
    rows = neurons.any(axis=0) | (left <= tolerance * np.linalg.norm(observed.incoming, axis=1))
    weights = 1 / np.maximum(left[rows], max(1e-3 * np.median(left[rows]), _TINY))
    weights = (weights / weights.max())[:, np.newaxis]
    design = weights * shares.T[rows]
    size = np.maximum(np.linalg.norm(design, axis=0), _TINY)  # shares of a batch differ by many orders of magnitude
    fitted = np.linalg.lstsq(design / size, weights * observed.incoming[rows], rcond=None)[0] / size[:, np.newaxis]
    with np.errstate(all='ignore'):  # a sample too faint to be fitted moves anywhere, and stays
      moved = np.sqrt(np.mean((fitted - start) ** 2, axis=1))
    images = np.where((moved <= mismatch)[:, np.newaxis], fitted, start)
  return images
