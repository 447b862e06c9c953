"""Labels from an update, before any image is reconstructed.

All rules read the gradient of the last dense layer. With cross-entropy, the bias gradient of class c is
`mean_i(p_ic − y_ic)`, negative only if c is a label. The weight gradient is the same times the features. A delta is
read as the negative of a gradient. Rules that sum weight gradients over features presume that the features sum to more
than zero. Those of a vision transformer, behind a LayerNorm, sum to zero at initialisation.
"""

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradleak.core import errors, trees
from gradleak.core.settings import Choice, ranged
from gradleak.core.trees import Tree
from gradleak.federated import Client
from gradleak.federated.losses import Loss, cross_entropy, squared_error
from gradleak.models import Model, lora
from gradleak.threat import Observation


class Dense(NamedTuple):
  """The `kernel` [features, classes] and the `bias` [classes] of a classifying layer; None of one without a bias."""

  kernel: jax.Array
  bias: jax.Array | None


class Known(NamedTuple):
  """What a rule may use besides the gradient.

  Attributes:
    layer: the weights of the classifying layer, at which the gradient was taken.
    predicted: () -> the model's mean prediction on noise, [classes], see `predicted_on_noise`.
    confidence: () -> its mean prediction for samples of each class, [class of the samples, classes], see
      `predicted_by_class`.
  """

  layer: Dense
  predicted: Callable[[], jax.Array]
  confidence: Callable[[], jax.Array]


def last_layer(model: Model, update: Tree, sample_shape: tuple[int, ...], num_classes: int) -> Dense:
  """Returns the gradient of the classifying layer, or with the parameters in place of an update its weights.

  Raises:
    UsageError: if no layer, or more than one, has the shape of a classifying layer.
  """
  if model.layers is not None:
    paths = {path for path in model.layers(sample_shape)[-1].paths}
    leaves = [leaf for path, leaf in jax.tree_util.tree_leaves_with_path(update) if trees.path_names(path) in paths]
  else:
    leaves = jax.tree.leaves(update)
  biases = [leaf for leaf in leaves if leaf.shape == (num_classes,)]
  kernels = [leaf for leaf in leaves if leaf.ndim == 2 and num_classes in leaf.shape]
  if len(biases) > 1 or len(kernels) != 1:
    raise errors.UsageError(
      f'label inference needs one classifying layer: {model.name!r} has {len(kernels)} weights and {len(biases)} '
      f'biases for {num_classes} classes; give layers=… to gradleak.models.from_functions'
    )
  kernel = kernels[0] if kernels[0].shape[1] == num_classes else kernels[0].T
  return Dense(kernel, biases[0] if biases else None)


def idlg(kernel: jax.Array, bias: jax.Array | None, count: int, known: Known | None = None) -> jax.Array:
  """Returns the class with the least sum of weight gradients (Zhao et al. 2020, eq. 4), int [1]; for one sample.

  Assumes features that sum to more than zero.
  """
  del bias, known
  if count != 1:
    raise errors.UsageError(
      f"the label rule 'idlg' reads one label, the batch holds {count}: use 'yin', 'bias_corrected' or 'wainakh'"
    )
  return jnp.argmin(jnp.sum(kernel, axis=0))[None]


def yin(kernel: jax.Array, bias: jax.Array | None, count: int, known: Known | None = None) -> jax.Array:
  """Returns the `count` classes with the least minimal weight gradient (Yin et al. 2021, eq. 6).

  Assumes features ≥ 0 and no class twice; a batch larger than the number of classes is an error.
  """
  del bias, known
  if count > kernel.shape[1]:
    raise errors.UsageError(
      f"the label rule 'yin' assumes no class twice: {count} samples of {kernel.shape[1]} classes; "
      "use 'bias_corrected' or 'wainakh'"
    )
  return jnp.argsort(jnp.min(kernel, axis=0))[:count]


def _greedy(scores: jax.Array, impact: jax.Array, count: int) -> jax.Array:
  """Takes each class of negative score once, lowest first, then the lowest until `count`; each costs `impact`."""

  def take(i: jax.Array, carry: tuple) -> tuple:
    scores, untaken, labels = carry
    # While negative classes remain untaken, the next is one of them.
    remaining = untaken & (scores < 0)
    candidates = jnp.where(jnp.any(remaining), jnp.where(remaining, scores, jnp.inf), scores)
    label = jnp.argmin(candidates)
    return scores.at[label].add(-impact), untaken.at[label].set(False), labels.at[i].set(label.astype(jnp.int32))

  start = (scores, scores < 0, jnp.zeros((count,), jnp.int32))
  return jax.lax.fori_loop(0, count, take, start)[2]


def bias_corrected(kernel: jax.Array, bias: jax.Array, count: int, known: Known | None = None) -> jax.Array:
  """Returns classes of negative bias gradient, then the most negative less one sample's mean impact for each label.

  The impact of one sample is the sum of the negative entries over the batch size (as in the rule's public form).
  """
  del kernel, known
  return _greedy(bias, jnp.sum(jnp.minimum(bias, 0.0)) / count, count)


def wainakh(kernel: jax.Array, bias: jax.Array | None, count: int, known: Known | None = None) -> jax.Array:
  """Label leakage from gradients (Wainakh et al. 2022, LLG without auxiliary data).

  As `bias_corrected`, on the sums of weight gradients, with the impact (1 + 1/classes)·Σ negative sums / batch size.
  Assumes features that sum to more than zero.
  """
  del bias, known
  sums = jnp.sum(kernel, axis=0)
  return _greedy(sums, jnp.sum(jnp.minimum(sums, 0.0)) * (1 + 1 / kernel.shape[1]) / count, count)


def of_counts(expected: jax.Array, count: int) -> jax.Array:
  """Returns `count` labels, ascending, int32, in the proportions of the expected counts, by largest remainders.

  Args:
    expected: float [classes]; negative ones count as 0. Where all do, or one is not finite, classes count alike.
    count: number of labels.
  """
  expected = jnp.maximum(expected, 0)
  known = (jnp.sum(expected) > 0) & jnp.isfinite(jnp.sum(expected))
  expected = jnp.where(known, expected, jnp.ones_like(expected))
  expected = count * expected / jnp.sum(expected)
  whole = jnp.floor(expected)
  missing = count - jnp.sum(whole)
  rank = jnp.argsort(jnp.argsort(whole - expected))  # the largest remainders first
  counts = whole + (rank.astype(whole.dtype) < missing).astype(whole.dtype)
  return jnp.searchsorted(jnp.cumsum(counts), jnp.arange(count).astype(whole.dtype), side='right').astype(jnp.int32)


def ilrg(kernel: jax.Array, bias: jax.Array, count: int, known: Known | None = None) -> jax.Array:
  """Returns the labels in the numbers that solve the gradient's linear equations (Ma et al. 2023, iLRG).

  The quotient of weight and bias gradient of class j is a mean of features. These are nearly those of class j's own
  samples, which the layer maps to their prediction p_j. The counts k then obey Σ_j k_j·p_jc − k_c = N·∂b_c for each
  class c, and Σ_j k_j = N; the pseudoinverse solves them. Rounding by largest remainders is ours.

  Args:
    kernel, bias: the gradient's.
    count: N.
    known: its `layer` is used.
  """
  layer = _known('ilrg', known).layer
  assert layer.bias is not None  # it has a gradient
  flat = bias == 0
  features = jnp.where(flat[None], jnp.zeros_like(kernel), kernel / jnp.where(flat, jnp.ones_like(bias), bias)[None])
  predicted = jax.nn.softmax(features.T @ layer.kernel + layer.bias[None])  # [class of the samples, class]
  return of_counts(jnp.linalg.pinv(_equations(predicted)) @ _sides(bias, count), count)


def _equations(predicted: jax.Array) -> jax.Array:
  """Returns the left-hand sides of Σ_j k_j·(p_jc − δ_jc) = N·∂b_c and of Σ_j k_j = N, [classes + 1, classes]."""
  classes = len(predicted)
  return jnp.concatenate(
    [predicted.T - jnp.eye(classes, dtype=predicted.dtype), jnp.ones((1, classes), predicted.dtype)]
  )


def _sides(bias: jax.Array, count: int) -> jax.Array:
  return jnp.append(count * bias, jnp.asarray(count, bias.dtype))


def rlu(kernel: jax.Array, bias: jax.Array, count: int, known: Known | None = None) -> jax.Array:
  """Returns the labels in the numbers k ≥ 0 that explain the bias gradient best (Chen and Vikalo 2024, RLU).

  The equations are those of `ilrg`, with p_j estimated on auxiliary samples of class j, and solved by non-negative
  least squares. Rounding by largest remainders is ours.

  Args:
    kernel, bias: the gradient's.
    count: N.
    known: its `confidence` is used.
  """
  del kernel
  equations = _equations(_known('rlu', known).confidence())
  return of_counts(optax.nnls(equations, _sides(bias, count), iters=SOLVED), count)


def geng(kernel: jax.Array, bias: jax.Array, count: int, known: Known | None = None) -> jax.Array:
  """Returns the labels in the numbers N·(p̄_c − ∂b_c), p̄ being the mean prediction on noise (Geng et al. 2021).

  The published rule reads the weight gradient and estimates the sum of features on noise, too; the bias gradient needs
  no such estimate. Rounding by largest remainders, and the mean of p̄ before and after local training, are those of
  Dimitrov et al. 2022.

  Args:
    kernel, bias: the gradient's.
    count: N.
    known: its `predicted` is used.
  """
  del kernel
  return of_counts(_known('geng', known).predicted() - bias, count)


def _known(rule: str, known: Known | None) -> Known:
  if known is None:
    raise errors.UsageError(f'the label rule {rule!r} needs what is known of the model, a `Known`')
  return known


NOISE = 64  # images of noise
EXAMPLES = 100  # auxiliary images of each class at most, as published for RLU
DRAWS = 256  # logits drawn for each class
POINTS = 5  # models between the one before local training and the one after it
SOLVED = 1000  # iterations of non-negative least squares


def predicted_on_noise(model: Model, observation: Observation, drawn: Callable = jax.random.uniform) -> jax.Array:
  """Returns the mean prediction on noise, [classes]; of a delta, the mean of before and after it.

  Args:
    model: the network.
    observation: the `Observation`.
    drawn: (key, shape) -> samples that say nothing, see `Modality.drawn`: uniform noise for images.
  """
  params, trained = observation.variables['params'], observation.knowledge.batch_norm == 'train'
  models = [params]
  if observation.knowledge.share == 'delta':
    models.append(jax.tree.map(jnp.add, params, observation.update))
  noise = drawn(jax.random.key(0), (NOISE, *observation.batch_shape[1:])).astype(jax.tree.leaves(params)[0].dtype)
  logits = [model.apply({**observation.variables, 'params': one}, noise, trained, None)[0] for one in models]
  return jnp.mean(jax.nn.softmax(jnp.concatenate(logits)), axis=0)


def predicted_by_class(model: Model, observation: Observation) -> jax.Array:
  """Returns the mean prediction for samples of each class, [class of the samples, classes] (RLU's confidence).

  The logits of a class are taken as normally distributed, with the mean and the covariance of the auxiliary images of
  that class. The prediction is averaged over draws, as published. For a delta, it is also averaged over models between
  those before and after local training, which the server both knows. The paper instead simulates that training on
  auxiliary images with guessed labels.

  Raises:
    UsageError: without auxiliary images.
  """
  if observation.class_images is None:
    raise errors.UsageError(
      "the label rule 'rlu' needs auxiliary samples, and there are none: gradleak.scenario takes them as "
      'public=(samples, targets)'
    )
  examples, trained = observation.class_images, observation.knowledge.batch_norm == 'train'
  classes, each = examples.shape[:2]
  mixing = jax.random.normal(jax.random.key(0), (DRAWS, each), examples.dtype) / max(each - 1, 1) ** 0.5

  def at(params: Tree) -> jax.Array:
    variables = {**observation.variables, 'params': params}
    logits = model.apply(variables, examples.reshape((-1, *examples.shape[2:])), trained, None)[0]
    logits = logits.reshape((classes, each, -1))
    mean = jnp.mean(logits, axis=1, keepdims=True)
    return jnp.mean(jax.nn.softmax(mean + mixing @ (logits - mean)), axis=1)  # their covariance is that of the logits

  params, update = observation.variables['params'], observation.update
  if observation.knowledge.share != 'delta':
    return at(params)
  parts = jnp.linspace(0, 1, POINTS, dtype=examples.dtype)
  return jnp.mean(jax.lax.map(lambda s: at(jax.tree.map(lambda p, u: p + s * u, params, update)), parts), axis=0)


def class_images(images: np.ndarray, labels: np.ndarray, classes: int) -> jax.Array:
  """Returns the first n ≤ `EXAMPLES` images of each class, [classes, n, H, W, C], repeated where there are fewer.

  A class without an image is represented by images of all classes.
  """
  places = [np.flatnonzero(labels == c) for c in range(classes)]
  each = min(EXAMPLES, max(map(len, places)))
  chosen = [np.resize(place if len(place) else np.arange(len(labels)), each) for place in places]
  return jnp.asarray(np.asarray(images)[np.stack(chosen)])


# Name -> (weight gradient [features, classes], bias gradient [classes] or None, number of samples, what else is known)
# -> labels, int [samples].
RULES: dict[str, Callable[[jax.Array, Any, int, Known | None], jax.Array]] = {
  'idlg': idlg,
  'yin': yin,
  'bias_corrected': bias_corrected,
  'wainakh': wainakh,
  'ilrg': ilrg,
  'geng': geng,
  'rlu': rlu,
}
AUXILIARY = ('rlu',)  # these use auxiliary images
PREDICTED = ('geng', 'rlu')  # these use predictions of the model on samples
BIASED = (
  'bias_corrected',
  'ilrg',
  'geng',
  'rlu',
)  # these read the gradient of the bias, the others only that of the weights
SIGNED = ('idlg', 'yin')  # these read nothing but the signs of the gradient
SIZED = ('ilrg', 'geng', 'rlu')  # these read the size of the gradient, the others only the proportions of its entries


def check_loss(rule: str, loss: Loss) -> None:
  """Checks that a rule applies to a loss.

  All rules are derived for mean cross-entropy. Those that read signs alone, 'idlg' and 'yin', hold for each loss behind
  a softmax, as its gradient is negative at the label. Those that read proportions also hold for a sum, and for the
  squared error of probabilities that are nearly uniform.

  Raises:
    UsageError: for another loss.
  """
  like = loss.changed(reduction='mean') if loss.summed else loss
  proportional = rule not in SIZED and like in (cross_entropy(), squared_error())
  signed = rule in SIGNED and loss.activation == 'softmax' and not loss.settings.get('smoothing')
  if loss != cross_entropy() and not proportional and not signed:
    raise errors.UsageError(
      f'the label rule {rule!r} does not apply to the loss {loss}: give the labels, or optimise them by '
      "labels='optimised'"
    )


def check(rule: str, client: Client) -> None:
  """Checks that a rule applies to a client's loss (`check_loss`) and samples; raises `UsageError` where it does not."""
  check_loss(rule, client.loss)
  if rule in PREDICTED and client.modality.integral:
    raise errors.UsageError(
      f'the label rule {rule!r} averages predictions on samples of real numbers, and {client.modality.noun[1]} are '
      "whole numbers: use 'bias_corrected' or 'wainakh'"
    )


@ranged
def infer(
  rule: Annotated[str, Choice(RULES)],
  model: Model,
  observation: Observation,
  moved: float | None = None,
  drawn: Callable = jax.random.uniform,
) -> jax.Array:
  """Returns the labels that `rule` reads from an observation, int32 [N] sorted; −1 where nothing it reads was sent.

  Args:
    rule: a name of `RULES`.
    model: the network.
    observation: the `Observation`.
    moved: the sum of the learning rates of all local steps, by which a delta is divided; None where it is not known.
    drawn: see `predicted_on_noise`.

  Raises:
    UsageError: for a rule that cannot read this batch, needs auxiliary images, or reads a bias that
      the layer does not have, for a layer of which adapters alone are sent, and for classes of positions.
  """
  if observation.targets is not None and observation.targets.ndim > 2:
    raise errors.UsageError(
      f'label rules read one class of each sample, and {model.name!r} returns classes of positions, such as pixels or '
      "tokens: give the labels, or optimise them by labels='optimised'"
    )
  place = observation.batch_shape[1:], observation.num_classes
  kernel, bias = last_layer(model, observation.update, *place)
  if lora.BASE in observation.variables:
    raise errors.UsageError(
      f'label rules read the gradient of the classifying layer, and {model.name!r} sends that of its adapters: give '
      "the labels, or optimise them by labels='optimised'"
    )
  if bias is None and rule in BIASED:
    raise errors.UsageError(
      f'the label rule {rule!r} reads the bias of the classifying layer, and {model.name!r} has none there: label '
      "inference from its weights is by 'idlg' (one sample), 'yin' (no class twice) or 'wainakh'"
    )
  scale = 1.0
  if observation.knowledge.share == 'delta':
    if moved is None and rule in SIZED:
      raise errors.UsageError(
        f'the label rule {rule!r} reads the size of the gradient, which a delta shows only to those who know the '
        "learning rate: use 'bias_corrected' or 'wainakh'"
      )
    scale = -1.0 / (1.0 if moved is None else moved)
  layer = last_layer(model, observation.variables['params'], *place)
  known = Known(
    layer, lambda: predicted_on_noise(model, observation, drawn), lambda: predicted_by_class(model, observation)
  )
  found = RULES[rule](scale * kernel, None if bias is None else scale * bias, observation.batch_shape[0], known)
  read = bias if rule in BIASED else kernel
  return jnp.where(jnp.any(read != 0), jnp.sort(found.astype(jnp.int32)), -1)
