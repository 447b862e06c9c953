"""Clients that train by DP-SGD of Opacus: recognised, simulated, attacked under it."""

import re

import jax
import numpy as np
import pytest

torch = pytest.importorskip('torch')
pytest.importorskip('flwr')
pytest.importorskip('opacus')

pytestmark = [
  pytest.mark.filterwarnings('ignore:Secure RNG turned off'),
  pytest.mark.filterwarnings('ignore:Optimal order is the largest alpha'),
  pytest.mark.filterwarnings('ignore:Full backward hook is firing'),
]

from gradleak import attacks, flower, models  # noqa: E402
from gradleak.frameworks import opacus  # noqa: E402

IMAGES = np.random.default_rng(0).uniform(size=(6, 8, 8, 1)).astype(np.float32)
LABELS = np.asarray([3, 1, 4, 1, 0, 2])


def network():
  return torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.Sigmoid(), torch.nn.Flatten(), torch.nn.Linear(144, 5))


@pytest.fixture(scope='module')
def sent():
  torch.manual_seed(0)
  return models.from_torch(network(), IMAGES)


def trained(
  net, images, labels, *, batch=6, epochs=1, norm=0.5, noise=0.02, reduction='mean', most=None, every=1, **private
):
  """Trains as the documents of Opacus do, and returns its module around the network.

  Batches are cut into parts of `most` samples, and each step is of `every` so many of them.
  """
  from opacus import PrivacyEngine
  from opacus.utils.batch_memory_manager import wrap_data_loader

  loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, labels), batch_size=batch)
  criterion = torch.nn.CrossEntropyLoss(reduction=reduction)
  made = PrivacyEngine().make_private(
    module=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), data_loader=loader, criterion=criterion,
    max_grad_norm=norm, noise_multiplier=noise, loss_reduction=reduction, **private,
  )  # fmt: skip
  net, optimizer, loader = made[0], made[1], made[-1]
  loss = made[2] if len(made) == 4 else criterion  # ghost clipping has a loss of its own
  loader = wrap_data_loader(data_loader=loader, max_batch_size=most, optimizer=optimizer) if most else loader
  for _ in range(epochs):
    for number, (x, y) in enumerate(loader):
      if number % every == 0:
        optimizer.zero_grad()
      loss(net(x), y).backward()
      if number % every == every - 1:
        optimizer.step()
  return net


def client(images, labels, **settings):
  from flwr.client import NumPyClient

  class Client(NumPyClient):
    def fit(self, parameters, config):
      net = network()
      net.load_state_dict(dict(zip(net.state_dict(), map(torch.tensor, parameters), strict=True)))
      trained(net, images, labels, **settings)
      return [tensor.detach().numpy() for tensor in net.state_dict().values()], len(images), {}

  return Client()


def app(images, labels, **settings):
  """Returns an app that sends the names of Opacus's module, `_module.0.weight` and so on."""
  from flwr.app import ArrayRecord, Message, RecordDict
  from flwr.clientapp import ClientApp

  made = ClientApp()

  @made.train()
  def _(message, context):
    net = network()
    net.load_state_dict(message.content['arrays'].to_torch_state_dict())
    arrays = ArrayRecord(trained(net, images, labels, **settings).state_dict())
    return Message(RecordDict({'arrays': arrays}), reply_to=message)

  return made


def audited(sent, *, made=client, key=None, defense=None, believed=(), **settings):
  torch.manual_seed(1)
  known = {'learning_rate': 0.1, **dict(believed)}
  return flower.audit(
    lambda x, y: made(x, y, **settings), IMAGES, LABELS, *sent, key=key, defense=defense, **known, controls=2,
    **({} if key is None else {'attacks': [attacks.csdlg()], 'steps': 5}),
  )  # fmt: skip


@pytest.mark.parametrize(
  ('settings', 'believed', 'seen'),
  [
    ({}, {}, 'dpsgd(norm=0.5,noise=0.02)'),
    ({'made': app}, {}, 'dpsgd(norm=0.5,noise=0.02)'),
    ({'noise': 0.0}, {}, 'dpsgd(norm=0.5,noise=0.0)'),
    ({'grad_sample_mode': 'ghost'}, {}, 'dpsgd(norm=0.5,noise=0.02)'),
    (
      {'batch': 2, 'epochs': 2, 'noise': 1.0, 'poisson_sampling': False},
      {'local_batch_size': 2, 'local_epochs': 2},
      'dpsgd(norm=0.5,noise=1.0)',
    ),
    ({'most': 4, 'poisson_sampling': False}, {}, 'dpsgd(norm=0.5,noise=0.02)'),
    ({'batch': 2, 'every': 3, 'poisson_sampling': False}, {}, 'dpsgd(norm=0.5,noise=0.02)'),
  ],
  ids=['noise', 'app', 'clipping', 'ghost', 'steps', 'parts', 'accumulated'],
)
def test_dpsgd_is_recognised_and_simulated(sent, settings, believed, seen):
  found = audited(sent, believed=believed, **settings).comparison
  assert found.agrees, found.words
  assert found.words[0] == f'The client trains by DP-SGD of Opacus: {seen}.' and f'With {seen}' in found.words[1]


def test_without_the_defense_or_with_another_one_the_clients_differ(sent, monkeypatch):
  found = audited(sent, defense='dpsgd(norm=1,noise=0.02)').comparison
  assert not found.agrees and 'Opacus: dpsgd(norm=0.5,noise=0.02)' in found.words[0] and 'norm=1' in found.words[1]
  monkeypatch.setattr(opacus, 'defense_of', lambda steps: (None, ''))
  assert not audited(sent).comparison.agrees


def test_attackers_know_what_was_seen(sent):
  found = audited(sent, key=jax.random.key(0))
  assert found.captured.config['defense'] == 'dpsgd(norm=0.5,noise=0.02)'
  assert any(one.adaptive for one in found.captured.inversions)


@pytest.mark.parametrize(
  ('settings', 'words'),
  [
    ({'batch': 2}, r'Poisson sampling at a rate of 0.333: make one batch of all samples'),
    ({'batch': 4, 'poisson_sampling': False}, r'divided by 3, and batches have 2, 4 samples'),
    (
      {'batch': 4, 'poisson_sampling': False, 'grad_sample_mode': 'ghost'},
      r'divided by 3, and batches have 2, 4 samples',
    ),
    ({'clipping': 'per_layer', 'norm': [0.5] * 4}, r'DPPerLayerOptimizer has a bound for each layer'),
    ({'reduction': 'sum'}, r"loss_reduction='sum'"),
  ],
  ids=['poisson', 'sizes', 'ghost', 'layers', 'sum'],
)
def test_what_is_not_simulated_says_so(sent, settings, words):
  found = audited(sent, **settings).comparison
  assert not found.agrees
  assert 'Opacus, which is not simulated' in found.words[0]
  assert re.search(words, found.words[0])


def test_what_is_not_understood_is_not_called_a_defense():
  step = opacus.Step('DPOptimizer', 0.5, 1.0, 6, 1.0, 6)
  for changed, word in (({'samples': None}, 'cannot be counted'), ({'optimizer': 'NewOptimizer'}, 'is not known')):
    found, words = opacus.defense_of([step, step._replace(**changed)])
    assert found is None and 'which is not simulated' in words and word in words


def test_the_optimizer_is_left_as_it_was():
  from opacus.optimizers import DPOptimizer

  before, steps = DPOptimizer.scale_grad, []
  with pytest.raises(ZeroDivisionError), opacus.watched(steps):
    assert DPOptimizer.scale_grad is not before
    raise ZeroDivisionError
  assert DPOptimizer.scale_grad is before and opacus.defense_of(steps) == (None, '')
