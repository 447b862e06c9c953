"""Flower's quickstart network and clients that train it, as its users write them."""

import torch
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
  """The network of Flower's quickstart for PyTorch."""

  def __init__(self):
    super().__init__()
    self.conv1, self.pool, self.conv2 = nn.Conv2d(3, 6, 5), nn.MaxPool2d(2, 2), nn.Conv2d(6, 16, 5)
    self.fc1, self.fc2, self.fc3 = nn.Linear(16 * 5 * 5, 120), nn.Linear(120, 84), nn.Linear(84, 10)

  def forward(self, x):
    x = self.pool(F.relu(self.conv1(x)))
    x = self.pool(F.relu(self.conv2(x)))
    x = F.relu(self.fc1(x.view(-1, 16 * 5 * 5)))
    return self.fc3(F.relu(self.fc2(x)))


def train(
  net, images, labels, *, lr=0.01, momentum=0.9, epochs=1, batch=None, shuffle=False, mean=0.5, std=0.5, flip=False
):
  """Trains as the quickstart does, on images in [0, 1]; samples are taken as they are where std is 1."""
  optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=momentum)
  samples = torch.utils.data.TensorDataset(images if std == 1 else (images - mean) / std, labels)
  for _ in range(epochs):
    for x, y in torch.utils.data.DataLoader(samples, batch_size=batch or len(samples), shuffle=shuffle):
      x = torch.where(torch.rand(len(x), 1, 1, 1) < 0.5, x.flip(-1), x) if flip else x
      optimizer.zero_grad()
      nn.functional.cross_entropy(net(x), y).backward()
      optimizer.step()


def normed():
  """Returns a small network with BatchNorm, whose state dict has integers without axes."""
  return nn.Sequential(
    nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(6), nn.Flatten(), nn.Linear(100, 10)
  )


def frozen_statistics():
  """Returns the same in evaluation mode, as some clients fine-tune."""
  return normed().eval()


def app(images, labels, mods=(), metrics=None, **settings):
  """Returns the quickstart's `ClientApp`, which trains on these samples and replies with more metrics."""
  from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
  from flwr.clientapp import ClientApp

  made = ClientApp(mods=list(mods))

  @made.train()
  def _(message, context):
    net = Net()
    net.load_state_dict(message.content['arrays'].to_torch_state_dict())
    train(net, images, labels, **{'lr': message.content['config'].get('lr', 0.01), **settings})
    replied = MetricRecord({'num-examples': len(images), **(metrics or {})})
    return Message(RecordDict({'arrays': ArrayRecord(net.state_dict()), 'metrics': replied}), reply_to=message)

  return made


def numpy_client(images, labels, keep=None, network=Net, **settings):
  """Returns the same as a `NumPyClient`, of the older interface."""
  from flwr.client import NumPyClient

  class Client(NumPyClient):
    def fit(self, parameters, config):
      net = network()
      net.load_state_dict(dict(zip(net.state_dict(), map(torch.tensor, parameters), strict=True)))
      train(net, images, labels, **settings)
      return [tensor.numpy() for tensor in net.state_dict().values()][:keep], len(images), {}

  return Client()


def legacy_app(images, labels, **settings):
  """Returns a `ClientApp` around a `client_fn`, of the older interface."""
  from flwr.clientapp import ClientApp

  def client_fn(context):
    return numpy_client(images, labels, **settings).to_client()

  return ClientApp(client_fn=client_fn)


def private_app(images, labels, norm, noise):
  """Returns an app that trains by one step of DP-SGD: gradients clipped one by one, and noise on their sum."""
  from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
  from flwr.clientapp import ClientApp

  made = ClientApp()

  @made.train()
  def _(message, context):
    net = Net()
    net.load_state_dict(message.content['arrays'].to_torch_state_dict())
    total = [torch.zeros_like(p) for p in net.parameters()]
    for x, y in zip((images - 0.5) / 0.5, labels, strict=True):
      gradients = torch.autograd.grad(nn.functional.cross_entropy(net(x[None]), y[None]), list(net.parameters()))
      length = torch.sqrt(sum((g**2).sum() for g in gradients))
      for one, g in zip(total, gradients, strict=True):
        one += g / max(1.0, float(length) / norm)
    with torch.no_grad():
      for p, one in zip(net.parameters(), total, strict=True):
        p -= 0.01 * (one + noise * norm * torch.randn_like(one)) / len(images)
    metrics = MetricRecord({'num-examples': len(images)})
    return Message(RecordDict({'arrays': ArrayRecord(net.state_dict()), 'metrics': metrics}), reply_to=message)

  return made
