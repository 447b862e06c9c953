"""A client's check of the model that it was sent: can training have made it, and does it isolate single samples?

The checks of the weights recognise the malicious models of `gradleak.servers` by what their attacks need:

- the last layer of fishing (Wen et al. 2022);
- the equal rows and monotone biases of the imprint module (Fowl et al. 2022);
- mirrored trap weights (Boenisch et al. 2023);
- biases computed from the weights;
- biases replaced by zeros in front of layers whose biases are trained.

The checks on the client's own batch apply to any model. They measure whether one sample dominates a layer's gradient,
and whether the gradient of most neurons comes from one sample. The first is the D-SNR of Garov et al. 2024, but of
gradients divided by the sample's own error, see `_gains`.

The limit of each check lies between the values of honest and of malicious models that were measured (the slow test
prints both). A server that knows the limits can stay below them, so that a model without findings may still be
malicious. Trap weights with independent signs are recognised by their missing biases only, and not at an initial model,
which has none either. Their positive weights are 1 % smaller than the negative ones, less than the change by training.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special

from gradleak import data
from gradleak.core import errors, trees
from gradleak.core.statistics import percent
from gradleak.core.trees import Layer, Tree
from gradleak.federated.losses import Loss, as_loss
from gradleak.models import model as models
from gradleak.models.model import Model

# The largest values that are not suspicious; the score of a finding is its value over its limit.
LIMITS = {
  'last_bias': 25.0,
  'last_rows': 0.1,
  'last_norms': 10.0,
  'copies': 0.1,
  'ladder': 0.97,
  'front': 0.5,
  'handed_on': 0.1,
  'untouched': 0.5,
  'mirrored': 0.1,
  'centred': 0.5,
  'dominance': 30.0,
  'owned': 0.45,
}

_TWIN = 0.999  # |cosine| from which two rows are copies
_UNITS = 512  # of a larger layer so many are checked


class Finding(NamedTuple):
  """The result of one check at one layer.

  Attributes:
    check: its name, a key of `LIMITS`.
    where: the layer.
    value: what was measured.
    score: value over the check's limit; above 1 it is suspicious.
    text: one sentence.
  """

  check: str
  where: str
  value: float
  score: float
  text: str

  @property
  def suspicious(self) -> bool:
    """Whether the value is beyond the limit."""
    return self.score > 1


class Inspection(NamedTuple):
  """The result of all checks.

  Attributes:
    findings: a `Finding` of each check that applies, at the layer with the highest score; the highest first.
  """

  findings: tuple[Finding, ...]

  @property
  def suspicious(self) -> bool:
    """Whether any finding is suspicious."""
    return any(finding.suspicious for finding in self.findings)

  def __str__(self) -> str:
    told = [finding.text for finding in self.findings if finding.suspicious]
    return '\n'.join(told or ['These checks find nothing suspicious.'])


def inspect(
  model: Model,
  variables: Mapping,
  sample_shape: Sequence[int],
  *,
  batch: tuple[Any, Any] | None = None,
  loss: Any = 'cross_entropy',
  train: bool = False,
) -> Inspection:
  """Returns the `Inspection` of a received model.

  Args:
    model: the `Model`; it must list its layers.
    variables: as received.
    sample_shape: (H, W, C) of images, (F,) of rows, (L,) of texts.
    batch: (samples [N, …], images in [0, 1], targets as the loss takes them) of the client's own, N ≥ 2: the batch that
      it is about to train on, or a part of it. A loss that predicts tokens takes what `Loss.of_samples` returns. With
      None only the weights are checked.
    loss: as a `Client`'s.
    train: whether BatchNorm uses the batch's statistics; a sample's gradient is then its part of the batch's gradient.

  Raises:
    UsageError: for a model without `layers`, or a batch that does not fit.
  """
  sample_shape = models.check_sample_shape(sample_shape, models.check_model(model).axes)
  layers = models.require(model, 'layers')(sample_shape)
  models.check_variables(model, variables, sample_shape)
  models.check_finite(f'the weights of {model.name!r}', variables)
  errors.refuse_traced('the variables', variables)
  loss = as_loss(loss)
  errors.check_instance('train', train, bool, 'True or False')
  params = _features_last(model, variables['params'])
  found = [*_last_layer(layers[-1], params), *_front(layers, params, sample_shape), *_untouched(layers[:-1], params)]
  for index, layer in enumerate(layers[:-1]):
    found += _hidden_layer(layer, params, first=index == 0)
  if batch is not None:
    found += _on_batch(model, variables, sample_shape, layers, *data.two('batch', batch), loss, train)
  worst = {}
  for finding in found:
    if finding.check not in worst or finding.score > worst[finding.check].score:
      worst[finding.check] = finding
  return Inspection(tuple(sorted(worst.values(), key=lambda finding: -finding.score)))


def _finding(check: str, where: str, value: float | np.floating, text: str) -> Finding:
  """Returns the `Finding` of a value; the text may name {value}, the {share} that it is in per cent, and {where}."""
  value = float(min(value, 1e12)) if np.isfinite(value) or value > 0 else 0.0
  told = text.format(value=value, share=percent(value, 0), where=where)
  return Finding(check, where, value, value / LIMITS[check], told)


def _features_last(model: Model, params: Tree) -> Tree:
  """Returns the parameters with the kernels of a network of PyTorch as those of others are: features are last."""
  entries = () if model.layout is None else model.layout.entries
  summed = {entry.path[1:]: entry.inputs for entry in entries if entry.inputs}

  def turned(path: tuple, leaf: Any) -> Any:
    inputs = summed.get(trees.path_names(path), ())
    others = [axis for axis in range(leaf.ndim) if axis not in inputs]
    return np.transpose(leaf, (*inputs, *others)).reshape(*(leaf.shape[i] for i in inputs), -1) if inputs else leaf

  return jax.tree.map_with_path(turned, params)


def _weights(layer: Layer, params: Tree) -> tuple[np.ndarray | None, np.ndarray | None]:
  """Returns the layer's (matrix [in, units] or None, bias [units] or None), in float64."""
  leaves = [np.asarray(trees.get(params, path), np.float64) for path in layer.paths]
  kernel = leaves[0]
  if kernel.ndim < 2:
    return None, None
  vectors = {path[-1]: leaf for path, leaf in zip(layer.paths[1:], leaves[1:], strict=True) if leaf.ndim == 1}
  bias = vectors.get('bias') if 'scale' not in vectors and len(vectors) == 1 else None
  if kernel.ndim == 2 and bias is not None and kernel.shape[1] != bias.size and kernel.shape[0] == bias.size:
    kernel = kernel.T  # our convolutions hold [units, in]
  matrix = kernel.reshape(-1, kernel.shape[-1])
  return matrix, bias if bias is not None and bias.size == matrix.shape[1] else None


def _last_layer(layer: Layer, params: Tree) -> list[Finding]:
  """Checks the last layer for `gradleak.servers.fishing`."""
  matrix, bias = _weights(layer, params)
  if matrix is None or matrix.shape[1] < 2:
    return []
  found = []
  if bias is not None:
    apart = np.abs(bias - np.median(bias)).max()
    text = (
      'The biases of the last layer ({where}) differ from their median by up to {value:.3g}, so that a class has '
      'probability 0 or 1 for any sample.'
    )
    found.append(_finding('last_bias', layer.name, apart, text))
  lengths = np.linalg.norm(matrix, axis=0)
  if lengths.max() > 0:  # a last layer of zeros is a common start, and passes no gradient on
    classes = range(matrix.shape[1])
    same = [
      not lengths[i] or any(np.array_equal(matrix[:, i], matrix[:, j]) for j in classes if j != i) for i in classes
    ]
    text = 'In the last layer ({where}), {share} of the classes have no weights, or the weights of another class.'
    found.append(_finding('last_rows', layer.name, np.mean(same), text))
    text = 'The weights of one class of the last layer ({where}) have {value:.3g} times the median norm.'
    ratio = lengths.max() / max(np.sort(lengths)[(lengths.size - 1) // 2], 1e-12 * lengths.max())
    found.append(_finding('last_norms', layer.name, ratio, text))
  return found


def _front(layers: Sequence[Layer], params: Tree, sample_shape: Sequence[int]) -> list[Finding]:
  """Checks for two dense layers in front of a network that turn the image into an image: the imprint module."""
  first, second = (_weights(layer, params)[0] for layer in (layers[:2] if len(layers) > 2 else (layers[0],) * 2))
  pixels = int(np.prod(sample_shape))
  is_module = (
    len(layers) > 2
    and first is not None
    and second is not None
    and first.shape[0] == pixels
    and second.shape == (first.shape[1], pixels)
  )
  text = 'Two dense layers in front of the network ({where}) turn the sample into one of its shape.'
  return [_finding('front', layers[0].name, float(is_module), text)]


def _untouched(hidden: Sequence[Layer], params: Tree) -> list[Finding]:
  """Checks for layers whose biases are all equal, in front of others whose biases are not: training changes both.

  The last layer is left out: its biases may start at the classes' frequencies, and it may be the only one trained.
  """
  biases = [(layer.name, _weights(layer, params)[1]) for layer in hidden]
  same = [(name, np.ptp(bias) == 0) for name, bias in biases if bias is not None and bias.size > 1]
  text = 'All biases of {where} are equal, and those of a later layer are not.'
  return [
    _finding('untouched', name, float(one and not all(others for _, others in same[i + 1 :])), text)
    for i, (name, one) in enumerate(same)
  ]


def _hidden_layer(layer: Layer, params: Tree, first: bool) -> list[Finding]:
  """Checks for copies among units, monotone biases, mirrored weights, and biases computed from the weights."""
  from scipy import stats  # importing it takes a quarter of the time of `import gradleak`

  matrix, bias = _weights(layer, params)
  if matrix is None:
    return []
  text = 'In {where}, {share} of the units have the weights of another unit, up to a factor.'
  found = [_finding('copies', layer.name, max(_copied(matrix.T), _copied(matrix)), text)]
  single = 0.0 if min(matrix.shape) < 2 else max(np.mean((matrix != 0).sum(axis=axis) == 1) for axis in (0, 1))
  text = 'In {where}, {share} of the units only pass on one of their inputs.'
  found.append(_finding('handed_on', layer.name, single, text))
  if bias is not None and bias.size >= 16:
    lengths = np.linalg.norm(matrix, axis=0)
    alive = lengths > 0
    if alive.sum() >= 16 and np.ptp(bias[alive]) > 0:
      level = bias[alive] / lengths[alive]
      order = abs(stats.spearmanr(np.arange(level.size), level).statistic) if np.ptp(level) > 0 else 0.0
      text = 'The biases of {where} are in ascending or descending order (rank correlation {value:.3f}).'
      found.append(_finding('ladder', layer.name, order, text))
    sums = matrix.sum(axis=0)
    if matrix.shape[0] >= 32 and np.ptp(bias) > 0 and np.ptp(sums) > 0:
      opposed = -np.corrcoef(bias, sums)[0, 1]
      text = (
        'The biases of {where} cancel the sums of the weights (correlation −{value:.3f}), as thresholds computed for '
        'grey images do.'
      )
      found.append(_finding('centred', layer.name, opposed, text))
  if first or (matrix.shape[0] >= 16):
    halves = max(_mirrored(matrix), _mirrored(matrix.T))
    text = 'In {where}, the positive weights of {share} of the units repeat their negative ones.'
    found.append(_finding('mirrored', layer.name, halves, text))
  return found


def _copied(rows: np.ndarray) -> float:
  """Returns the fraction of the rows [units, in] that are parallel to another; 0 where chance explains it."""
  rows = rows[np.linspace(0, len(rows) - 1, min(len(rows), _UNITS)).astype(int)]
  rows = rows[np.linalg.norm(rows, axis=1) > 0]
  units, size = rows.shape
  if units < 2 or size < 2:
    return 0.0
  # |cosine| of two random directions of `size` dimensions beyond _TWIN: a regularised incomplete beta function.
  chance = scipy.special.betainc((size - 1) / 2, 0.5, 1 - _TWIN**2)
  if units * chance > 1e-3:
    return 0.0
  rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
  cosines = np.abs(rows @ rows.T) - 2 * np.eye(units)
  return float(np.mean(cosines.max(axis=1) > _TWIN))


def _mirrored(matrix: np.ndarray) -> float:
  """Returns the fraction of the units whose positive weights are their negative ones, reordered, times one factor."""
  size = matrix.shape[0]
  if size < 16:
    return 0.0
  columns = np.linspace(0, matrix.shape[1] - 1, min(matrix.shape[1], _UNITS)).astype(int)
  return float(np.mean([_halves_agree(matrix[:, column]) for column in columns]))


def _halves_agree(weights: np.ndarray) -> bool:
  """Returns whether the positive weights of a unit are its negative ones times one factor; one may be left over."""
  halves = np.sort(weights[weights > 0])[::-1], np.sort(-weights[weights < 0])[::-1]
  short, long = sorted(halves, key=len)
  if len(short) < 8 or len(long) - len(short) > 1:
    return False
  # Before the one left over the sorted halves match entry by entry, after it one is shifted by one.
  steps = [short / long[shift : shift + len(short)] for shift in range(len(long) - len(short) + 1)]
  return any(
    np.all(np.min([np.abs(ratio / factor - 1) for ratio in steps], axis=0) < 1e-3)
    for factor in (steps[0][0], steps[-1][-1])
  )


def _on_batch(
  model: Model,
  variables: Mapping,
  sample_shape: Sequence[int],
  layers: Sequence[Layer],
  samples: Any,
  targets: Any,
  loss: Loss,
  train: bool,
) -> list[Finding]:
  """Checks whether single samples dominate the gradient of the client's own batch."""
  samples, targets = errors.host_array('samples', samples), errors.host_array('targets', targets)
  fits = samples.shape[1:] == tuple(sample_shape) and targets.shape[:1] == samples.shape[:1]
  if not fits or len(samples) < 2:
    raise errors.UsageError(
      f'the batch has samples {samples.shape} and targets {targets.shape}, expected N ≥ 2 samples of '
      f'{tuple(sample_shape)} and as many targets'
    )
  if samples.ndim == 4:
    data.check_images(samples)
  if not model.takes_ids:
    samples = samples.astype(np.float32)
  lengths, shares = _gains(model, variables, layers, samples, targets, loss, train)
  found = []
  for layer in layers[:-1]:
    norms = lengths[layer.name]
    largest = norms.max(initial=0)
    ratio = largest / max(norms.sum() - largest, 1e-12 * largest) if largest > 0 and len(norms) > 1 else 0.0
    text = (
      "Relative to its error, one sample's gradient in {where} is {value:.3g} times as long as those of all others "
      'together.'
    )
    found.append(_finding('dominance', layer.name, ratio, text))
    if layer.name in shares:
      own = shares[layer.name]  # [N, units]
      total = own.sum(axis=0)
      alive = total > 1e-6 * total.max(initial=0)
      if alive.sum() >= 16 and len(own) > 1:
        text = 'In {where}, {share} of the neurons with a gradient have 90 % of it from one sample.'
        owned = np.mean(own.max(axis=0)[alive] > 0.9 * total[alive])
        found.append(_finding('owned', layer.name, owned, text))
  return found


def _gains(
  model: Model,
  variables: Mapping,
  layers: Sequence[Layer],
  samples: np.ndarray,
  targets: np.ndarray,
  loss: Loss,
  train: bool,
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
  """Returns (`{layer: ‖g_n‖ [N]}`, `{layer with a bias: |∂ℓ_n/∂b| [N, units]}`), both over ‖∂ℓ_n/∂logits‖.

  Dividing by the error at the logits separates well-trained models from malicious ones. After long training few samples
  have an error left, and their gradients dominate. In a malicious model, samples with a large error have no gradient.
  """
  params = _features_last(model, variables['params'])
  biases = tuple(
    (layer.name, path)
    for layer in layers
    for path in layer.paths[1:]
    if path[-1] == 'bias' and _weights(layer, params)[1] is not None
  )
  outputs = models.outputs_shape(model, variables, samples.shape[1:])[-1]
  targets = loss.targets.encode(loss.targets.checked(targets, len(samples), outputs), outputs, jnp.float32)
  if loss.own and targets.ndim == 2:
    raise errors.UsageError(f'the loss {loss} predicts tokens: give the batch that its of_samples returns')
  measured = _measure(model, loss, train, layers, biases, variables, jnp.asarray(samples), targets)
  error, lengths, shares = jax.tree.map(lambda x: np.asarray(x, np.float64), jax.device_get(measured))
  some = error > 1e-6 * error.max()
  lengths = {name: each[some] / error[some] for name, each in lengths.items()}
  return lengths, {name: each[some] / error[some].reshape(-1, 1) for name, each in shares.items()}


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _measure(
  model: Model,
  loss: Loss,
  train: bool,
  layers: tuple[Layer, ...],
  biases: tuple[tuple[str, tuple[str, ...]], ...],
  variables: Mapping,
  samples: jax.Array,
  targets: jax.Array,
) -> tuple[jax.Array, dict[str, jax.Array], dict[str, jax.Array]]:
  """Returns (`‖∂ℓ_n/∂logits‖ [N]`, `{layer: ‖g_n‖ [N]}`, `{layer: |∂ℓ_n/∂b| [N, units]}`) of each sample's loss."""

  def of_one(index: jax.Array) -> tuple[jax.Array, dict[str, jax.Array], dict[str, jax.Array]]:
    def own_loss(params: Tree) -> tuple[jax.Array, tuple]:
      given = (
        (samples, targets) if train else tuple(jax.lax.dynamic_slice_in_dim(x, index, 1) for x in (samples, targets))
      )
      logits, _ = model.apply({**variables, 'params': params}, given[0], train, None)
      at = index if train else 0
      return loss(logits[at][None], given[1][at][None])[0], (logits[at], given[1][at])

    gradient, (logits, label) = jax.grad(own_loss, has_aux=True)(variables['params'])
    error = jax.grad(lambda z: loss(z[None], label[None])[0])(logits)
    lengths = {layer.name: trees.norm([trees.get(gradient, path) for path in layer.paths]) for layer in layers}
    return jnp.linalg.norm(error), lengths, {name: jnp.abs(trees.get(gradient, path)) for name, path in biases}

  return jax.lax.map(of_one, jnp.arange(samples.shape[0], dtype=jnp.int32))
