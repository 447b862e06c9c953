"""Attacks of a user's own that several tests run, and how tests run an attack."""

import jax
import jax.numpy as jnp

import gradleak as gl
from gradleak.core import trees


def divide(client):
  """An attack in closed form: each column of the weight gradient is the input times the bias gradient."""
  del client

  def read(observation):
    kernel, bias = observation.update['kernel'], observation.update['bias']
    most = jnp.argmax(jnp.abs(bias))
    return kernel[:, most] / bias[most], None

  return gl.attacks.closed_form(read)


def run(attack, key, observation):
  """Returns (its `Reconstruction`, the objective at each step, its last state), compiled as one program."""

  @jax.jit
  def whole(key):
    state, info = jax.lax.scan(
      lambda state, _: attack.step(state, observation), attack.init(key, observation), None, attack.num_steps
    )
    return attack.reconstruct(state, observation), info['objective'], state

  return whole(key)


def psnr(found, truth):
  return float(-10 * jnp.log10(jnp.mean(jnp.square(found - truth))))


def noise_like(update):
  """Returns noise of the same norm per tensor."""
  drawn = trees.draws(jax.random.normal, jax.random.key(5), update)
  return jax.tree.map(lambda x, leaf: x * (trees.norm(leaf) / trees.norm(x)), drawn, update)


def mean_loss(layers, inputs, labels):
  """Returns the mean cross-entropy of a dense network, [(kernel, bias)], with ReLU between its layers."""
  for kernel, bias in layers[:-1]:
    inputs = jax.nn.relu(inputs @ kernel + bias.reshape(1, -1))
  logits = inputs @ layers[-1][0] + layers[-1][1].reshape(1, -1)
  return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels.reshape(-1, 1), axis=1))


gradient_of_mean = jax.jit(jax.grad(mean_loss))
