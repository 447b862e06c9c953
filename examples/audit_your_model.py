"""Audits a network of your own, written in Flax, on arrays of your own.

python examples/audit_your_model.py
"""

import jax
from flax import linen as nn
from sklearn.datasets import load_digits

import gradleak as gl
from gradleak import attacks, defenses


class MyNet(nn.Module):
  """Any Flax module called as module(images) or module(images, train=…)."""

  @nn.compact
  def __call__(self, samples):
    hidden = nn.relu(nn.Dense(64)(samples.reshape(samples.shape[0], -1)))
    return nn.Dense(10)(hidden)


samples = load_digits().images[:4, :, :, None] / 16  # [N, H, W, C] in [0, 1]
targets = load_digits().target[:4]
scenario = gl.scenario(gl.models.from_flax(MyNet()), samples, targets, key=jax.random.key(0), dataset='my digits')
hidden_by = [None, defenses.prune(rate=0.7), defenses.chain(defenses.clip(norm=1), defenses.gaussian(stddev=0.02))]
result = gl.audit(jax.random.key(1), scenario, hidden_by, [attacks.csdlg(tv=1e-6)], num_trials=4, steps=500)
gl.report.write(result, 'results/my_model')
print(gl.report.terminal_table(result), '\n\nreport: results/my_model/report.html')
