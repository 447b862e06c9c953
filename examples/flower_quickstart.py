"""Flower's quickstart network and client app, recorded and audited: what one local step on a face reveals.

python examples/flower_quickstart.py
"""

import jax
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn
from torch.nn import functional as F

import gradleak as gl
from gradleak import flower


class Net(nn.Module):
  """The network of Flower's quickstart for PyTorch."""

  def __init__(self):
    super().__init__()
    self.conv1, self.pool, self.conv2 = nn.Conv2d(3, 6, 5), nn.MaxPool2d(2, 2), nn.Conv2d(6, 16, 5)
    self.fc1, self.fc2, self.fc3 = nn.Linear(16 * 5 * 5, 120), nn.Linear(120, 84), nn.Linear(84, 10)

  def forward(self, x):
    x = self.pool(F.relu(self.conv2(self.pool(F.relu(self.conv1(x))))))
    return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x.view(-1, 16 * 5 * 5))))))


def client_app(samples, targets):
  """Returns the quickstart's app, which trains on these samples."""
  app = ClientApp(mods=[flower.record('results/flower')])  # mods for differential privacy come behind it

  @app.train()
  def train(message, context):
    net = Net()
    net.load_state_dict(message.content['arrays'].to_torch_state_dict())
    optimizer = torch.optim.SGD(net.parameters(), lr=message.content['config']['lr'], momentum=0.9)
    F.cross_entropy(net((samples - 0.5) / 0.5), targets).backward()
    optimizer.step()
    metrics = MetricRecord({'num-examples': len(samples)})
    return Message(RecordDict({'arrays': ArrayRecord(net.state_dict()), 'metrics': metrics}), reply_to=message)

  return app


torch.manual_seed(0)
faces, client = gl.data.load('faces', limit=1, image_size=32, channels=3), {'learning_rate': 0.01, 'momentum': 0.9}
model, variables = gl.models.from_torch(Net(), faces.samples, mean=(0.5,) * 3, std=(0.5,) * 3)
sent = {'key': jax.random.key(1), 'config': {'lr': 0.01}, 'workdir': 'results/flower_audit'}
result = flower.audit(client_app, faces.samples, faces.targets, model, variables, **sent, **client)
gl.report.write(result.captured, 'results/flower_audit')
print(result, gl.report.captured_table(result.captured), 'report: results/flower_audit/report.html', sep='\n\n')
