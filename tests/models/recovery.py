"""Whether an attack reads a face from a model's gradient, for slow tests of models."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np

import gradleak as gl
from gradleak import Client, Knowledge, Observation, metrics
from gradleak.defenses.control import null_gradient


@contextlib.contextmanager
def optimised():
  """Compiles as a user does.

  Without its optimisations, XLA takes many times as long for a step of a deep network. It also rounds a maximum and its
  argument apart: the gradient of max-pooling becomes 0/0.
  """
  before = jax.config.values['jax_disable_most_optimizations']
  jax.config.update('jax_disable_most_optimizations', False)
  yield
  jax.config.update('jax_disable_most_optimizations', before)


def recover(model, attack, *, controls=3):
  """Returns the PSNR of one 16×16 face attacked by `attack`, of its null-gradient controls, and its correlation.

  Prints them. The client has PyTorch's BatchNorm in evaluation, labels are known.
  """
  data = gl.data.load('faces', limit=1, image_size=16)
  images, labels = jnp.asarray(data.samples), jnp.asarray(data.targets)
  client = Client(model, 2, batch_norm='eval')
  attack = attack(client)

  def observed(update, variables):
    known = Knowledge(labels='known', share='gradient')
    return Observation(variables, update, jax.nn.one_hot(labels, 2), known, images.shape, 2)

  def run(key, update, variables):
    observation = observed(update, variables)
    state = jax.tree.map(lambda x: jnp.asarray(x, x.dtype), attack.init(key, observation))
    state = jax.lax.fori_loop(0, attack.num_steps, lambda _, state: attack.step(state, observation)[0], state)
    return attack.reconstruct(state, observation).samples

  def uploads(key, variables):
    update, noise = client.gradient(variables, images, labels), null_gradient()
    nothing = [noise.update(update, noise.init(update), key=each)[0] for each in jax.random.split(key, controls)]
    return jax.tree.map(lambda *each: jnp.stack(each), update, *nothing)

  with optimised():
    variables = jax.jit(model.init, static_argnums=1)(jax.random.key(0), images.shape[1:])
    sent = jax.jit(uploads)(jax.random.key(1), variables)
    keys = jax.random.split(jax.random.key(2), 1 + controls)
    found = np.asarray(jax.jit(jax.vmap(run, (0, 0, None)))(keys, sent, variables))
  reached = [float(np.mean(metrics.psnr(each, data.samples))) for each in found]
  correlation = float(np.corrcoef(found[0].ravel(), data.samples.ravel())[0, 1])
  listed = ', '.join(f'{each:.1f}' for each in reached[1:])
  print(f'{model.name}: {reached[0]:.1f} dB, correlation {correlation:.2f}; controls {listed} dB')
  return reached[0], reached[1:], correlation
