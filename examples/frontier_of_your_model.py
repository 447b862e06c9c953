"""Sets what defenses cost against what they hide, for a network, data and clients of your own.

python examples/frontier_of_your_model.py
"""

import jax
import numpy as np
import optax
from flax import linen as nn
from sklearn.datasets import load_digits

import gradleak as gl
from gradleak.data import partition
from gradleak.federated import accounting, simulation, training


class MyNet(nn.Module):
  """Any Flax module called as module(images) or module(images, train=…)."""

  @nn.compact
  def __call__(self, images):
    hidden = nn.relu(nn.Dense(64)(images.reshape(images.shape[0], -1)))
    return nn.Dense(10)(hidden)


digits = load_digits()
images, labels = digits.images[:, :, :, None].astype(np.float32) / 16, digits.target.astype(np.int32)
users = np.arange(1500) % 20  # whose each sample is
model, key = gl.models.from_flax(MyNet()), jax.random.key(0)
variables = model.init(key, images.shape[1:])
client = gl.Client(model, 10, share='delta', optimizer=optax.sgd(0.3), batch_size=10)
parts = partition.by_user(users)

defenses = ['none', 'topk(ratio=0.05)', 'clip(norm=1)+gaussian(stddev=0.05)', 'clip(norm=1)+gaussian(stddev=0.5)']
trained = {}
for text in defenses:
  defense = gl.defenses.parse(text)
  federation = simulation.Federation(defense.build(defense.numbers, client), images, labels, parts, per_round=5)
  privacy = accounting.ledger(text)
  _, rows = training.train(key, federation, variables, 60, test=(images[1500:], labels[1500:]), privacy=privacy)
  cost, added = training.seconds_split(federation, variables, key)
  protects = accounting.caption(privacy) if privacy else None
  trained[text] = gl.report.Trained(rows, cost + added, None if text == 'none' else added, protects=protects)

scenario = gl.scenario(
  model, images[:4], labels[:4], variables=variables, share='delta', learning_rate=0.3, dataset='my digits'
)
audit = gl.audit(key, scenario, defenses, ['csdlg(tv=1e-6)'], num_trials=4, steps=500, knowledge='both', controls=32)
gl.report.write(audit, 'results/my_frontier/audit')
gl.report.write_training(
  'results/my_frontier',
  trained,
  config={'model': 'MyNet', 'dataset': 'my digits', 'clients': 20, 'per_round': 5, 'rounds': 60, 'num_classes': 10},
  audit_rows=audit.rows,
  partition=gl.report.partition_picture(parts, labels, list('0123456789')),
  audits={'all defenses': 'audit/report.html'},
)
print(gl.report.frontier_table(gl.report.entries(trained, audit.rows)), '\n\nreport: results/my_frontier/training.html')
