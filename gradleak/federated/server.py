"""The server: averages the uploads."""

import jax
import jax.numpy as jnp

from gradleak.core import errors
from gradleak.core.trees import Tree
from gradleak.federated.client import Upload


def layer_average(uploads: Upload, weights: jax.Array | None = None) -> Tree:
  """Returns the mean update, each entry averaged over the clients that sent it; 0 where no client did.

  In FFL (Na et al., ACSAC 2022) a layer that no client sends is not changed.

  Args:
    uploads: an `Upload` of K clients, stacked: every leaf with a leading axis of K. Masks may be one per tensor, [K],
      or one per entry, [K, …].
    weights: of each client, ≥ 0, [K]; `uploads.num_samples` for FedAvg's mean. None means equal ones.

  Raises:
    UsageError: for anything but an `Upload`.
  """
  errors.check_instance('uploads', uploads, Upload, 'an Upload of stacked leaves')
  return _averaged(uploads, None if weights is None else jnp.asarray(weights))


@jax.jit  # one program, in place of one for each operation and shape
def _averaged(uploads: Upload, weights: jax.Array | None) -> Tree:
  weights = jnp.ones_like(uploads.num_samples) if weights is None else weights
  weights = weights.astype(jnp.float32)

  def average(update: jax.Array, mask: jax.Array) -> jax.Array:
    axes = (1,) * (update.ndim - 1)
    portions = jnp.where(mask.reshape(mask.shape[0], *(mask.shape[1:] or axes)), weights.reshape(-1, *axes), 0.0)
    total = jnp.sum(portions, 0)
    portions = portions / jnp.where(total > 0, total, jnp.ones_like(total)).reshape(1, *total.shape)
    counted = jnp.where(portions > 0, portions * update.astype(jnp.float32), 0.0)  # 0·NaN is NaN
    return jnp.sum(counted, 0).astype(update.dtype)

  return jax.tree.map(average, uploads.update, uploads.mask)
