"""Audits a network written in PyTorch: what one update of it shows, with and without a defense.

python examples/audit_your_torch_model.py
"""

import importlib.util
import sys

import jax
from sklearn.datasets import load_digits

import gradleak as gl

if importlib.util.find_spec('torch') is None:
  sys.exit('this example needs PyTorch: pip install torch')

import torch
from torch import nn

torch.manual_seed(0)
network = nn.Sequential(
  *(nn.Conv2d(1, 12, 5, stride=2, padding=2), nn.Sigmoid(), nn.Conv2d(12, 12, 5, padding=2), nn.Sigmoid()),
  *(nn.Flatten(), nn.Linear(192, 10)),
)
samples, targets = load_digits().images[:120, :, :, None] / 16, load_digits().target[:120]
model, variables = gl.models.from_torch(network, samples[:4].astype('float32'))
scenario = gl.scenario(model, samples, targets, variables=variables, dataset='digits')
defenses = [None, gl.defenses.gaussian(stddev=0.05), gl.defenses.outpost()]
result = gl.audit(jax.random.key(1), scenario, defenses, [gl.attacks.csdlg(tv=1e-6)], num_trials=4, steps=400)
gl.report.write(result, 'results/my_torch_network')
print(gl.report.terminal_table(result), '\n\nreport: results/my_torch_network/report.html')
