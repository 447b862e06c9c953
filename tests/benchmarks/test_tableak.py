"""TabLeak beside its authors' code: a small clone stands for theirs, whose rows, network and attack are known."""

import sys

import numpy as np
import pytest

import gradleak as gl
from benchmarks import harness

DATASETS = """
import torch, numpy as np

class ADULT:
  train_features = {'age': None, 'job': ['nurse', 'clerk', 'cook'], 'hours': None}

  def __init__(self):
    open('adult.data').close()  # read from where the clone is
    draw = np.random.default_rng(0)
    jobs = np.eye(3)[draw.integers(3, size=60)]
    rows = np.column_stack([draw.normal(40, 9, 60).round(1), jobs, draw.normal(35, 4, 60).round(1)])
    self.rows = torch.tensor(rows, dtype=torch.float32)
    self.labels = torch.tensor(draw.integers(2, size=60))
    self.mean, self.std = self.rows.mean(0), self.rows.std(0)

  def standardize(self): self.x = (self.rows - self.mean) / self.std
  def get_Xtrain(self): return self.x.clone()
  def get_ytrain(self): return self.labels.clone()

  def decode_batch(self, x, standardized):
    x = (x * self.std + self.mean).numpy()
    jobs = np.array(self.train_features['job'])[x[:, 1:4].argmax(1)]
    numbers = x[:, [0, 4]].round(1).astype(object)
    return np.column_stack([numbers[:, 0], jobs, numbers[:, 1]])
"""
MODELS = """
from torch import nn

def FullyConnected(width, layout):
  sizes = [width, *layout]
  layers = [part for a, b in zip(sizes, sizes[1:]) for part in (nn.Linear(a, b), nn.ReLU())]
  return nn.Sequential(*layers[:-1])
"""
ATTACK = """
import torch

def continuous_sigmoid_bound(x, dataset):
  x[:, 0] = 0 * x[:, 0]
  return x

def invert_grad(*, net, true_grad, true_data, true_label, training_criterion, max_iterations, post_selection, **rest):
  found = torch.autograd.grad(training_criterion(net(true_data), true_label), net.parameters())
  assert all(torch.equal(a, b) for a, b in zip(found, true_grad)) and rest['pooling'] == 'median+softmax'
  leaf = true_data.clone().requires_grad_()
  bounded = continuous_sigmoid_bound(leaf, dataset=rest['dataset'])  # refused in place
  return torch.cat([bounded[:, :1], leaf[:, 1:]], 1)[[1, 0, *range(2, len(leaf))]]
"""


@pytest.fixture
def clone(tmp_path):
  """Returns a folder with a clone whose attack finds all but the first column."""
  pytest.importorskip('torch', reason='PyTorch is not installed')
  files = {'datasets': DATASETS, 'models': MODELS, 'attacks': ''}
  for name, text in files.items():
    (tmp_path / name).mkdir()
    (tmp_path / name / '__init__.py').write_text(text)
  (tmp_path / 'attacks' / 'gradient_inversion_attack.py').write_text(ATTACK)
  (tmp_path / 'adult.data').touch()
  return tmp_path


def test_both_attack_the_same_rows_weights_and_gradients(clone, capsys):
  from benchmarks import tableak

  before = set(sys.modules)
  made = tableak.batches(tableak.opened(str(clone)), 2, 4, 2, 30, 8)
  assert not {'datasets', 'models', 'attacks'} & {*sys.modules} - before and str(clone) not in sys.path
  for rows, theirs in zip(made.rows, made.theirs, strict=True):
    np.testing.assert_allclose(made.encoded(theirs), rows, atol=1e-5)
    logits = made.client.model.apply(made.variables, rows, False, None)[0]
    np.testing.assert_allclose(logits, made.network(theirs).detach(), atol=1e-5)
  tableak.main(harness.Options(measure='tableak', clone=str(clone), trials=2, batch=4, starts=2, steps=30, repeats=1))
  ours, theirs = capsys.readouterr().out.split('ratio')[1].split('\n\n')[0].splitlines()[1:]
  assert ours.startswith('all at once') and 0.3 < float(ours.split()[5]) < 1
  found = float(theirs.split('first 2')[1].split()[2])  # the first column is right by chance alone
  assert 2 / 3 <= found < 1


def test_what_is_no_clone_is_refused(clone):
  from benchmarks import tableak

  with pytest.raises(gl.UsageError, match=r'give --clone=FOLDER with a clone of https://.*none in None'):
    tableak.opened(None)
  (clone / 'adult.data').unlink()
  with pytest.raises(gl.UsageError, match=r'does not run: .*adult.data'):
    tableak.opened(str(clone))
