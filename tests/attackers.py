"""Attacks of a user's own that several tests run."""

import jax

import gradleak as gl


def divide(client):
  """An attack in closed form: each column of the weight gradient is the input times the bias gradient."""
  del client

  def read(observation):
    kernel, bias = observation.update['kernel'], observation.update['bias']
    most = jax.numpy.argmax(jax.numpy.abs(bias))
    return kernel[:, most] / bias[most], None

  return gl.attacks.closed_form(read)
