"""An attack of your own, beside one of ours: with settings, a source, and the evidence that it makes use of.

python examples/attack_of_your_own.py
"""

import jax
import jax.numpy as jnp

import gradleak as gl


@gl.attacks.attack(citation='You: All Neurons Together. 2026.', reads=('weights',))
def neurons(client, *, ridge: float = 1e-12):
  """The input of the first dense layer, ∂W = x·∂bᵀ, by least squares over its neurons; no optimisation."""

  def read(observation):
    kernel, bias = (observation.update['Dense_0'][name] for name in ('kernel', 'bias'))
    shares = jnp.broadcast_to(bias, kernel.shape)
    if observation.weights is not None:  # 0 where an entry is known to be dropped
      shares = shares * observation.weights['Dense_0']['kernel'].astype(shares.dtype)
    image = (kernel * shares).sum(axis=1) / ((shares**2).sum(axis=1) + ridge)
    return image, None  # it tells no labels

  return gl.attacks.closed_form(read)


data, model = gl.data.load('digits', limit=4), gl.models.create('mlp(widths=64)', 10, init='default')
scenario = gl.scenario(model, data.samples, data.targets, key=jax.random.key(0), dataset='digits')
attacks = [neurons(), neurons(ridge=1e-4), gl.attacks.fidel()]
defenses = [None, gl.defenses.prune(rate=0.98), gl.defenses.gaussian(stddev=0.01)]
result = gl.audit(jax.random.key(1), scenario, defenses, attacks, num_trials=4, controls=16)
print(gl.report.terminal_table(result), *gl.report.wording.citations(result.methods), sep='\n')
