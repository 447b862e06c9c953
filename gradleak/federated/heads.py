"""Whether what a network returns is what a loss takes: as many logits as classes, and no probabilities."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradleak.core import errors
from gradleak.models import Model, programs
from gradleak.models.model import check_mode

_PRODUCTS = ('dot_general', 'conv_general_dilated', 'convolve')
_CURVES = frozenset(('exp', 'exp2', 'logistic', 'tanh'))  # of which softmax and sigmoid are made
_IMAGES, _DRAWS = 4, 8
_TOKENS = 100  # ids that a sample is drawn from
_WIDE = 10.0  # standard deviation of weights whose logits would leave [0, 1]
_CLOSE = 1e-3  # to a sum of 1


def one_logit(name: str) -> errors.UsageError:
  """Returns the error for a model with one logit, whose softmax is 1 at any weights.

  Args:
    name: of the model.
  """
  return errors.UsageError(
    f'the model {name!r} has one logit, and a softmax of one logit is 1: every gradient would be 0. For two classes '
    "take loss='binary_cross_entropy', or return two logits, "
    'jnp.concatenate([jnp.zeros_like(z), z], axis=1): their cross-entropy is the binary one of z'
  )


def check_client(client: Any, variables: Mapping, sample_shape: Sequence[int]) -> None:
  """Checks that a `Client`'s network follows its mode of BatchNorm, and that its loss takes the outputs and samples.

  Args:
    client: the `Client`.
    variables: of its model.
    sample_shape: (H, W, C).

  Raises:
    UsageError: as `check_mode` of models, `check_head` and `Loss.require_samples` do.
  """
  client.loss.require_samples(client.modality)
  check_mode(client.model, variables, sample_shape, client.batch_norm)
  if client.loss.activation:
    check_head(client.model, variables, sample_shape)


def check_head(model: Model, variables: Mapping, sample_shape: Sequence[int]) -> None:
  """Checks that a model returns logits and not probabilities, for a loss that applies a softmax or a sigmoid.

  The network is run only where an exponential function or the like follows its last product. Probabilities of classes
  are at least 0 and sum to 1 for every image; values behind a sigmoid stay in [0, 1] for weights of any size.

  Args:
    model: a `Model`.
    variables: its variables.
    sample_shape: (H, W, C).

  Raises:
    UsageError: for probabilities.
  """
  sample = model.samples(_IMAGES, sample_shape)

  def logits(variables: Mapping, samples: jax.Array) -> jax.Array:
    return model.apply(variables, samples, False, None)[0]

  names = list(_primitives(jax.make_jaxpr(logits)(variables, sample).jaxpr))
  products = [place for place, name in enumerate(names) if name in _PRODUCTS]
  if _CURVES.isdisjoint(names[max(products, default=0) :]):
    return
  run, samples = jax.jit(logits), jax.random.uniform(jax.random.key(0), sample.shape)
  samples = (samples * min(_TOKENS, model.vocabulary or _TOKENS) if model.takes_ids else samples).astype(sample.dtype)
  found = np.asarray(run(variables, samples), np.float64)
  advice = 'return the logits, or give gradleak.Client a loss of your own on probabilities, gradleak.losses.wrap'
  if (found >= 0).all() and (np.abs(found.sum(axis=-1) - 1) < _CLOSE).all():
    raise errors.UsageError(
      f'the model {model.name!r} returns probabilities, which are at least 0 and sum to 1 for every sample, and the '
      f'loss takes logits: {advice}'
    )
  drawn = [np.asarray(run(_drawn(variables, seed), samples)) for seed in range(_DRAWS)]
  if all(((one >= 0) & (one <= 1)).all() for one in drawn):
    raise errors.UsageError(
      f'the model {model.name!r} returns values in [0, 1] for weights of any size, as behind a sigmoid, and the loss '
      f'takes logits: {advice}'
    )


def _primitives(jaxpr: Any) -> Iterator[str]:
  """Yields the names of a program's operations in their order, those of inner programs in their places."""
  for equation in jaxpr.eqns:
    parts = programs.inner(equation)
    if not parts:
      yield equation.primitive.name
    for part in parts:
      yield from _primitives(getattr(part, 'jaxpr', part))


def _drawn(variables: Mapping, seed: int) -> Mapping:
  """Returns variables with large random parameters, and the statistics as they are."""
  leaves, structure = jax.tree.flatten(variables['params'])
  rng = np.random.default_rng(seed)
  drawn = [jnp.asarray(_WIDE * rng.standard_normal(np.shape(leaf)), jnp.asarray(leaf).dtype) for leaf in leaves]
  return {**variables, 'params': jax.tree.unflatten(structure, drawn)}
