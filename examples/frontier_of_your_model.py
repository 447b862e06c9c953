"""Sets what defenses cost against what they hide, for a network, data and clients of your own.

python examples/frontier_of_your_model.py
"""

import jax
import numpy as np
from flax import linen as nn
from sklearn.datasets import load_digits

import gradleak as gl
from gradleak.data import partition
from gradleak.defenses import chain, clip, gaussian, topk


class MyNet(nn.Module):
  """Any Flax module called as module(images) or module(images, train=…)."""

  @nn.compact
  def __call__(self, samples):
    hidden = nn.relu(nn.Dense(64)(samples.reshape(samples.shape[0], -1)))
    return nn.Dense(10)(hidden)


samples, targets = load_digits().images[:, :, :, None].astype(np.float32) / 16, load_digits().target
users = np.arange(1500) % 20  # whose each sample is
scenario = gl.scenario(
  gl.models.from_flax(MyNet()),
  samples[:1500],
  targets[:1500],
  key=jax.random.key(0),
  dataset='my digits',
  share='delta',
  local_batch_size=10,
  learning_rate=0.3,
)
found = gl.frontier(
  jax.random.key(1),
  scenario,
  test=(samples[1500:], targets[1500:]),
  defenses=[None, topk(ratio=0.05), *(chain(clip(norm=1), gaussian(stddev=noise)) for noise in (0.05, 0.5))],
  attacks=[gl.attacks.csdlg(tv=1e-6)],
  clients=partition.by_user(users),
  per_round=5,
  rounds=60,
  steps=500,
  workdir='results/my_frontier',
)
gl.report.write(found, 'results/my_frontier')
print(gl.report.frontier_table(gl.report.entries(found.trained, found.rows)))
