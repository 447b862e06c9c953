"""Whether a network mixes the samples of a batch, as BatchNorm does: samples that only fill a batch would then count.

It is measured, since nothing in a network's program says so. The samples that fill a batch are changed, and the losses
of the others are compared.
"""

import functools
import math
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

from gradleak.core.trees import Tree
from gradleak.engine import compiler
from gradleak.models import programs
from gradleak.models.masked import masked
from gradleak.models.model import per_example_loss

_LARGE = 3.0  # times the range of samples, of those that fill a batch: the largest of a batch is then among them
_IDS = 8  # token ids that are drawn from
_MOST = 64  # samples of a batch that is tried; a whole client of thousands would take its memory several times
_SAME, _NEAR = 1e-6, 1e-3  # relative to the largest: of one program, and of programs for batches of two sizes


def mixes(client: Any, variables: Tree, samples: Any, targets: Any, size: int, left: int) -> bool:
  """Returns whether the losses of a batch, or its statistics, depend on the samples that only fill it.

  BatchNorm of Flax Linen and of PyTorch leaves them out, see `models.masked`. Arguments may be traced: shapes are read
  alone, and the network is run on random weights. Where it does not run, or returns what is not finite, nothing is
  known, and the answer is True. Equal questions are answered once.

  Args:
    client: the `Client`, of whose network, loss and augmentation it is.
    variables: of its model.
    samples, targets: [N, …], the targets as floats in the shape of the outputs.
    size: of a batch, those that fill it included; of a larger one 64 are tried.
    left: how many of them count, ≥ 1.
  """
  if left >= size:
    return False
  leaves, structure = jax.tree.flatten(jax.tree.map(_kind, dict(variables)), is_leaf=lambda x: isinstance(x, tuple))
  train, size, left = client.batch_norm == 'train', min(size, _MOST), min(left, _MOST - 1)
  given = client.network, client.loss, client.augment, train
  return _found(*given, structure, tuple(leaves), _kind(samples), _kind(targets), size, left)


def _kind(array: Any) -> tuple[tuple[int, ...], np.dtype]:
  return tuple(array.shape), np.dtype(array.dtype)


@functools.lru_cache(maxsize=256)
def _found(
  network: Any,
  loss: Any,
  augment: Any,
  train: bool,
  structure: Any,
  leaves: tuple,
  sample: tuple,
  target: tuple,
  size: int,
  left: int,
) -> bool:
  rng = np.random.default_rng(0)
  variables = _drawn(rng, jax.tree.unflatten(structure, leaves))
  real = _samples(rng, (left, *sample[0][1:]), sample[1], 1.0)
  fills = [_samples(rng, (size - left, *sample[0][1:]), sample[1], scale) for scale in (0.0, _LARGE, -_LARGE)]
  labels = rng.uniform(size=(size, *target[0][1:])) + 0.1
  labels = (labels / labels.sum(-1, keepdims=True)).astype(target[1])
  weights = (np.arange(size) < left).astype(target[1])

  @jax.jit
  def losses(variables: Any, samples: jax.Array, targets: jax.Array, weights: jax.Array) -> Any:
    if augment is not None:
      samples = augment(jax.random.key(0), samples)
    with masked(weights):
      found, statistics = per_example_loss(network, loss, variables, samples, targets, train)
    return found[:left], statistics

  given = [(variables, np.concatenate([real, fill]), labels, weights) for fill in fills]
  alone = variables, real, labels[:left], weights[:left]
  try:
    whole, smaller = losses.trace(*given[0]), losses.trace(*alone)
    program = _compiled(whole)
    first, *others = (program(*one) for one in given)
    apart = [_apart(first, other) / _SAME for other in others]
    if augment is None and _scalars(whole.jaxpr) != _scalars(smaller.jaxpr):  # their number may count
      apart.append(_apart(first, _compiled(smaller)(*alone)) / _NEAR)
  except Exception:  # a user's network may raise anything, as for a batch of one
    return True
  return not np.max(apart) <= 1  # true for NaN


def _compiled(traced: Any) -> Any:
  """Returns a program that is compiled as fast as can be, and may be run while another one is traced."""
  return traced.lower().compile(compiler.once())


def _scalars(program: Any) -> list:
  """Returns the numbers in a program, beside the operations that take them."""
  found = [float(one) for one in getattr(program, 'consts', ()) if np.shape(one) == () and _is_number(one)]
  for equation in getattr(program, 'jaxpr', program).eqns:
    taken = [one.val for one in equation.invars if isinstance(one, Literal)]
    found += [equation.primitive.name, *(float(one) for one in taken if np.shape(one) == () and _is_number(one))]
    for part in programs.inner(equation):
      found += _scalars(part)
  return found


def _is_number(one: Any) -> bool:
  return np.issubdtype(np.result_type(one), np.number)


def _apart(first: Any, second: Any) -> float:
  """Returns the largest relative difference of the arrays of two trees; NaN where one is not finite."""
  found = [0.0]
  for pair in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
    one, other = (np.asarray(x, np.float64) for x in pair)
    found.append(float(np.max(np.abs(one - other), initial=0)) / max(float(np.max(np.abs(one), initial=0)), 1e-30))
  return float(np.max(found))


def _samples(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype, scale: float) -> np.ndarray:
  """Returns random samples: floats between 0 and `scale`, or ids."""
  if np.issubdtype(dtype, np.inexact):
    return (scale * rng.uniform(size=shape)).astype(dtype)
  return rng.integers(0, _IDS if scale else 1, shape).astype(dtype)


def _drawn(rng: np.random.Generator, variables: Any) -> Any:
  """Returns random parameters and positive statistics; whole numbers are 0."""

  def draw(path: tuple, kind: tuple) -> np.ndarray:
    shape, dtype = kind
    if not jax.numpy.issubdtype(dtype, jax.numpy.inexact):
      return np.zeros(shape, dtype)
    if path[0].key != 'params':
      return rng.uniform(0.5, 1.5, shape).astype(dtype)
    scale = 1 / math.sqrt(max(math.prod(shape[:-1]), 1)) if len(shape) > 1 else 0.1
    return ((len(shape) < 2) + scale * rng.standard_normal(shape)).astype(dtype)

  return jax.tree.map_with_path(draw, variables, is_leaf=lambda x: isinstance(x, tuple))
