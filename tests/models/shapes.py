"""Variables of a model without compiling its initialisation, for tests of models."""

import functools

import jax
import numpy as np

from gradleak import models
from gradleak.core import trees
from gradleak.models import torch_weights


def shapes_of(model, sample_shape):
  return jax.eval_shape(lambda key: model.init(key, sample_shape), jax.random.key(0))


@functools.cache
def shapes(spec, sample_shape, num_classes=10):
  return shapes_of(models.create(spec, num_classes), sample_shape)


def count(variables, collection='params'):
  return sum(leaf.size for leaf in jax.tree.leaves(variables.get(collection, {})))


def drawn(model, sample_shape, seed=0):
  """Returns variables of the model's shapes: norms about one, weights of unit gain."""
  rng = np.random.default_rng(seed)

  def values(path, leaf):
    if path[-1].key in ('scale', 'var'):
      return rng.uniform(0.5, 1.5, leaf.shape).astype(np.float32)
    fan_in = leaf.shape[-1] if leaf.ndim == 2 else 4
    return np.asarray(rng.normal(size=leaf.shape) / np.sqrt(fan_in), np.float32)

  return jax.tree.map_with_path(values, shapes_of(model, sample_shape))


def torch_sizes(variables):
  """Returns {the name of each leaf in PyTorch: its size}."""
  leaves = jax.tree.leaves_with_path(variables)
  return {torch_weights.torch_name(trees.path_names(path)[1:]): leaf.size for path, leaf in leaves}


def common_sizes(shapes):
  """Returns the same of the {name: shape} of a published state_dict, under the names that are common to libraries."""
  empty = {name: np.broadcast_to(np.float32(0), shape) for name, shape in shapes.items()}
  return {name: values.size for name, values in torch_weights.common_names(empty).items()}
