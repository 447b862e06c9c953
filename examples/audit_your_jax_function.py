"""Audits a network written in plain JAX, under a defense written in plain optax.

python examples/audit_your_jax_function.py
"""

import jax
import jax.numpy as jnp
import optax
from sklearn.datasets import load_digits

import gradleak as gl


def init(key, sample_shape):
  """Two dense layers; any pytree will do."""
  first, second = jax.random.split(key)
  num_pixels = sample_shape[0] * sample_shape[1] * sample_shape[2]
  return {
    'hidden': {'w': jax.random.normal(first, (num_pixels, 64)) / num_pixels**0.5, 'b': jnp.zeros(64)},
    'logits': {'w': jax.random.normal(second, (64, 10)) / 8, 'b': jnp.zeros(10)},
  }


def apply(params, samples):
  """Returns logits [N, 10]."""
  hidden = jnp.tanh(samples.reshape(samples.shape[0], -1) @ params['hidden']['w'] + params['hidden']['b'])
  return hidden @ params['logits']['w'] + params['logits']['b']


samples, targets = load_digits().images[:4, :, :, None] / 16, load_digits().target[:4]
scenario = gl.scenario(gl.models.from_functions(init, apply), samples, targets, key=jax.random.key(0))
rounded = optax.stateless(lambda g, _: jax.tree.map(lambda x: jnp.round(x, 1), g))
defenses = [None, gl.defenses.wrap(rounded, place='upload', label='rounded')]
attacks = [gl.attacks.idlg(), gl.attacks.csdlg(tv=1e-6)]
result = gl.audit(jax.random.key(1), scenario, defenses, attacks, num_trials=4, steps=300)
gl.report.write(result, 'results/my_function')
print(gl.report.terminal_table(result), '\n\nreport: results/my_function/report.html')
