"""The server: what becomes of the uploads."""

import jax
import jax.numpy as jnp


def layer_average(uploads, weights=None):
  """Returns the mean update, each entry averaged over the clients that sent it; 0 where nobody did.

  FFL (Na et al., ACSAC 2022) leaves a layer that no client sends as it was.

  Args:
    uploads: an `Upload` of K clients, stacked: every leaf with a leading axis of K. Masks may be one per tensor, [K],
      or one per entry, [K, …].
    weights: [K], how much each client counts, not negative; `uploads.num_samples` for FedAvg's mean. Equal without.
  """
  weights = jnp.ones_like(uploads.num_samples) if weights is None else jnp.asarray(weights)
  weights = weights.astype(jnp.float32)

  def average(update, sent):
    axes = (1,) * (update.ndim - 1)
    share = jnp.where(sent.reshape(sent.shape[0], *(sent.shape[1:] or axes)), weights.reshape(-1, *axes), 0.0)
    total = jnp.sum(share, 0)
    share = share / jnp.where(total > 0, total, jnp.ones_like(total)).reshape(1, *total.shape)
    return jnp.sum(share * update.astype(jnp.float32), 0).astype(update.dtype)

  return jax.tree.map(average, uploads.update, uploads.sent)
