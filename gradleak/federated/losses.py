"""Losses per example, on labels given as probabilities, so that an attacker can optimise them too."""

import jax
import jax.numpy as jnp


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
  """Returns −Σ_c y_c log softmax(z)_c, shape [N]; logits and labels [N, classes]."""
  return -jnp.sum(labels * jax.nn.log_softmax(logits), axis=-1)


def squared_error(logits: jax.Array, labels: jax.Array) -> jax.Array:
  """Returns Σ_c (softmax(z)_c − y_c)² / classes, shape [N]: Keras' mean squared error after Fidel's softmax layer."""
  return jnp.mean(jnp.square(jax.nn.softmax(logits) - labels), axis=-1)


LOSSES = {'cross_entropy': cross_entropy, 'squared_error': squared_error}
