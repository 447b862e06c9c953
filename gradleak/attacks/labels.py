"""Labels from an update, before any image is reconstructed.

All rules read the gradient of the last dense layer: with cross-entropy, the bias gradient of class c is
mean_i(p_ic − y_ic), negative only if c is a label; the weight gradient is the same times the features. A delta is read
as the negative of a gradient.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from gradleak import errors, trees
from gradleak.federated import Observation
from gradleak.models import Model
from gradleak.trees import Tree


def last_layer(
  model: Model, update: Tree, image_shape: tuple[int, ...], num_classes: int
) -> tuple[jax.Array, jax.Array]:
  """Returns (weight gradient [features, classes], bias gradient [classes]) of the classifying layer.

  Raises:
    UsageError: if no layer, or more than one, has the shape of a classifying layer.
  """
  if model.layers is not None:
    paths = {path for path in model.layers(image_shape)[-1].paths}
    leaves = [leaf for path, leaf in jax.tree_util.tree_leaves_with_path(update) if trees.path_names(path) in paths]
  else:
    leaves = jax.tree.leaves(update)
  biases = [leaf for leaf in leaves if leaf.shape == (num_classes,)]
  kernels = [leaf for leaf in leaves if leaf.ndim == 2 and num_classes in leaf.shape]
  if len(biases) != 1 or len(kernels) != 1:
    raise errors.UsageError(
      f'label inference needs one classifying layer with a bias: {model.name!r} has {len(kernels)} weights and '
      f'{len(biases)} biases for {num_classes} classes; give layers=… to gradleak.models.from_functions'
    )
  kernel = kernels[0] if kernels[0].shape[1] == num_classes else kernels[0].T
  return kernel, biases[0]


def idlg(kernel: jax.Array, bias: jax.Array, count: int) -> jax.Array:
  """Returns the class with the least sum of weight gradients (Zhao et al. 2020, eq. 4), int [1]; for one sample."""
  del bias
  if count != 1:
    raise errors.UsageError(
      f"the label rule 'idlg' reads one label, the batch holds {count}: use 'yin', 'bias_corrected' or 'wainakh'"
    )
  return jnp.argmin(jnp.sum(kernel, axis=0))[None]


def yin(kernel: jax.Array, bias: jax.Array, count: int) -> jax.Array:
  """Returns the `count` classes with the least minimal weight gradient (Yin et al. 2021, eq. 6).

  Assumes features ≥ 0 and no class twice; a batch larger than the number of classes is an error.
  """
  del bias
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


def bias_corrected(kernel: jax.Array, bias: jax.Array, count: int) -> jax.Array:
  """Returns classes of negative bias gradient, then the most negative less one sample's mean impact for each label.

  The impact of one sample is the sum of the negative entries over the batch size (as in the rule's public form).
  """
  del kernel
  return _greedy(bias, jnp.sum(jnp.minimum(bias, 0.0)) / count, count)


def wainakh(kernel: jax.Array, bias: jax.Array, count: int) -> jax.Array:
  """Label leakage from gradients (Wainakh et al. 2022, LLG without auxiliary data).

  As `bias_corrected`, on the sums of weight gradients, with the impact (1 + 1/classes)·Σ negative sums / batch size.
  """
  del bias
  sums = jnp.sum(kernel, axis=0)
  return _greedy(sums, jnp.sum(jnp.minimum(sums, 0.0)) * (1 + 1 / kernel.shape[1]) / count, count)


# Name -> (weight gradient [features, classes], bias gradient [classes], number of samples) -> labels, int [samples].
RULES: dict[str, Callable[[jax.Array, jax.Array, int], jax.Array]] = {
  'idlg': idlg,
  'yin': yin,
  'bias_corrected': bias_corrected,
  'wainakh': wainakh,
}


def infer(rule: str, model: Model, observation: Observation) -> jax.Array:
  """Returns the labels that `rule` reads from an observation, int32 [N] sorted.

  Raises:
    UsageError: for an unknown rule, or one that cannot read this batch.
  """
  errors.check_choice('label rule', rule, RULES)
  kernel, bias = last_layer(model, observation.update, observation.image_shape[1:], observation.num_classes)
  sign = -1.0 if observation.knowledge.share == 'delta' else 1.0
  return jnp.sort(RULES[rule](sign * kernel, sign * bias, observation.image_shape[0]).astype(jnp.int32))
