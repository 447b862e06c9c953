"""The same attack as a plain PyTorch loop, one trial at a time, as public frameworks run it.

PyTorch is no dependency; it is imported when it is needed. Its modules and tensors are annotated as `Any`.
"""

import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from gradleak.attacks import AttackMethod
from gradleak.core import grammar, trees
from gradleak.core.trees import Tree
from gradleak.models import Model


class Trial(NamedTuple):
  """The data of one trial, in our layout.

  Attributes:
    image: the private image [H, W, C].
    label: its class.
    start: the first dummy image [H, W, C].
  """

  image: np.ndarray
  label: int
  start: np.ndarray


class Settings(NamedTuple):
  """The settings of `csdlg` that the loop knows."""

  steps: int
  learning_rate: float
  tv: float


class Attacked(NamedTuple):
  """The result of attacking a trial.

  Attributes:
    image: the reconstruction [H, W, C].
    objective: at the start.
    seconds: of all steps.
    core_seconds: the same, of all processor cores together.
  """

  image: np.ndarray
  objective: float
  seconds: float
  core_seconds: float


class Stopwatch:
  """Measures the time since it was made; it waits for the device."""

  def __init__(self, device: str) -> None:
    self.device = device
    synchronise(device)
    self.started = time.perf_counter(), time.process_time()

  def read(self) -> tuple[float, float]:
    """Returns (seconds, core seconds)."""
    synchronise(self.device)
    return time.perf_counter() - self.started[0], time.process_time() - self.started[1]


class Unavailable(Exception):
  """Why a comparison cannot be made, for its row."""


def torch() -> Any:
  """Returns the module `torch`.

  Raises:
    Unavailable: where it is not installed.
  """
  try:
    import torch
  except ImportError:
    raise Unavailable('torch is not installed (make benchmark installs it)') from None
  return torch


def settings(method: AttackMethod, steps: int) -> Settings:
  """Returns the `Settings` of an attack, run for these steps.

  Raises:
    Unavailable: for another attack than the loop's.
  """
  name, written = method.name, dict(method.given)
  if name != 'csdlg' or not {*written} <= {'steps', *Settings._fields}:
    raise Unavailable(f'the loop is csdlg(learning_rate=…,tv=…), not {method}')
  return Settings(steps, written.get('learning_rate', 0.1), written.get('tv', 1e-4))


def network(spec: str, num_classes: int, sample_shape: tuple[int, ...]) -> Any:
  """Returns the PyTorch module of one of our models, its layers in the order in which ours are called.

  Args:
    spec: as `models.create` takes it: mlp, lenet, lenet4, convnet or resnet18, with settings.
    num_classes: number of logits.
    sample_shape: (H, W, C).

  Raises:
    Unavailable: for another model, or a setting that the loop does not have.
  """
  (name, written), *wrappers = grammar.parse_chain(spec, 'model')
  if name not in _NETWORKS or not {key for key, _ in written} <= {_NETWORKS[name][1]} or wrappers:
    raise Unavailable(f'the loop has no {spec}')
  module = _NETWORKS[name][0](torch().nn, num_classes, sample_shape, **dict(written))
  return module.train()  # BatchNorm on the statistics of the batch, as at the client


def _activation(nn, name):
  return {
    'sigmoid': nn.Sigmoid,
    'relu': nn.ReLU,
    'tanh': nn.Tanh,
    'leaky_relu': nn.LeakyReLU,
    'gelu': lambda: nn.GELU(approximate='tanh'),
    'identity': nn.Identity,
  }[name]()


def _mlp(nn, num_classes, sample_shape, activation='relu'):
  sizes = (math.prod(sample_shape), 128, 128, 64, num_classes)
  dense = [nn.Linear(*pair) for pair in itertools.pairwise(sizes)]
  return nn.Sequential(
    nn.Flatten(), dense[0], _activation(nn, activation), dense[1], nn.ReLU(), dense[2], nn.ReLU(), dense[3]
  )


def _lenet(nn, num_classes, sample_shape, activation='sigmoid', strides=(2, 2, 1)):
  height, width, channels = sample_shape
  layers = []
  for stride in strides:
    layers += [nn.Conv2d(channels, 12, 5, stride, padding=2), _activation(nn, activation)]
    height, width, channels = -(-height // stride), -(-width // stride), 12
  return nn.Sequential(*layers, nn.Flatten(), nn.Linear(height * width * channels, num_classes))


def _lenet4(nn, num_classes, sample_shape, activation='sigmoid'):
  return _lenet(nn, num_classes, sample_shape, activation, (2, 2, 1, 1))


def _norm(nn, features):
  return nn.BatchNorm2d(features, track_running_stats=False)


def _convnet(nn, num_classes, sample_shape, width=64):
  height, columns, channels = sample_shape
  layers = []
  for block in ((1, 2, 2, 4, 4, 4), (4, 4)):
    for features in (factor * width for factor in block):
      layers += [nn.Conv2d(channels, features, 3, padding=1), _norm(nn, features), nn.ReLU()]
      channels = features
    layers.append(nn.MaxPool2d(3))
    height, columns = height // 3, columns // 3
  return nn.Sequential(*layers, nn.Flatten(), nn.Linear(height * columns * channels, num_classes))


def _resnet18(nn, num_classes, sample_shape, width=64):
  def conv(inputs, outputs, size, stride):
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)

  class Block(nn.Module):
    def __init__(self, inputs, outputs, stride):
      super().__init__()
      first, second = conv(inputs, outputs, 3, stride), conv(outputs, outputs, 3, 1)
      self.long = nn.Sequential(first, _norm(nn, outputs), nn.ReLU(), second, _norm(nn, outputs))
      same = inputs == outputs and stride == 1
      self.short = nn.Identity() if same else nn.Sequential(conv(inputs, outputs, 1, stride), _norm(nn, outputs))

    def forward(self, x):
      return nn.functional.relu(self.long(x) + self.short(x))

  channels = width
  layers = [conv(sample_shape[-1], width, 3, 1), _norm(nn, width), nn.ReLU()]
  for stage in range(4):
    for block in range(2):
      layers.append(Block(channels, width * 2**stage, 2 if stage and not block else 1))
      channels = width * 2**stage
  return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes))


# Each with the setting that it takes.
_NETWORKS = {
  'mlp': (_mlp, 'activation'),
  'lenet': (_lenet, 'activation'),
  'lenet4': (_lenet4, 'activation'),
  'convnet': (_convnet, 'width'),
  'resnet18': (_resnet18, 'width'),
}


def arrays(module: Any, model: Model, tree: Tree, sample_shape: tuple[int, ...]) -> list[np.ndarray]:
  """Returns the leaves of a tree shaped like our parameters as PyTorch lays them out, in its order of parameters.

  Args:
    module: the model's `network`.
    model: our `Model`.
    tree: parameters, or a gradient.
    sample_shape: (H, W, C).
  """
  nn = torch().nn
  ours = dict.fromkeys(path[:-1] for layer in model.layers(sample_shape) for path in layer.paths)
  theirs = [part for part in module.modules() if isinstance(part, nn.Conv2d | nn.Linear | nn.BatchNorm2d)]
  converted, channels = [], sample_shape[-1]
  for part, path in zip(theirs, ours, strict=True):
    own = {name: np.asarray(value) for name, value in trees.get(tree, path).items()}
    weight = own.get('kernel', own.get('scale'))
    if isinstance(part, nn.Conv2d):  # ours: [features, (column, row, channel)]
      channels = part.out_channels
      weight = weight.reshape(channels, *part.kernel_size, -1).transpose(0, 3, 2, 1)
    elif isinstance(part, nn.Linear):  # ours: [(row, column, channel), features], theirs starts by channel
      weight = weight.reshape(-1, channels, part.out_features).transpose(2, 1, 0).reshape(part.out_features, -1)
      channels = part.out_features
    converted += [weight] + ([] if part.bias is None else [own['bias']])
  return converted


def load(module: Any, values: Sequence[np.ndarray]) -> Any:
  """Sets the parameters of `module` to what `arrays` returned, and returns it."""
  with torch().no_grad():
    for parameter, value in zip(module.parameters(), values, strict=True):
      parameter.copy_(torch().tensor(np.ascontiguousarray(value)))
  return module


def tensor(image: np.ndarray, device: str) -> Any:
  """Returns an image [H, W, C] as a batch [1, C, H, W] on a device."""
  return torch().tensor(np.ascontiguousarray(image.transpose(2, 0, 1)[np.newaxis]), device=device)


def gradient(module: Any, images: Any, labels: Any, **options: Any) -> tuple:
  """Returns the gradient of the mean cross-entropy, a tuple of tensors."""
  loss = torch().nn.functional.cross_entropy(module(images), labels)
  return torch().autograd.grad(loss, tuple(module.parameters()), **options)


def objective(module: Any, images: Any, labels: Any, observed: Sequence[Any], tv: float) -> Any:
  """Returns 1 − cosine(simulated, observed) + tv·TV(x) (Geiping et al. 2020, eq. 4), as `attacks.csdlg` does."""
  simulated = gradient(module, images, labels, create_graph=True)

  def inner(a, b):
    return sum((x * y).sum() for x, y in zip(a, b, strict=True))

  apart = 1 - inner(simulated, observed) / (inner(simulated, simulated).sqrt() * inner(observed, observed).sqrt())
  rows, columns = images.diff(dim=2).abs().mean(), images.diff(dim=3).abs().mean()
  return apart + tv * (rows + columns)


def attack(module: Any, trial: Trial, settings: Settings, device: str) -> Attacked:
  """Attacks one trial as `csdlg` does: Adam on the sign with its three decays of the rate (`× 0.1 at 3/8, 5/8, 7/8`),
  pixels in the box.

  Args:
    module: the `network`.
    trial: a `Trial`.
    settings: the `Settings`.
    device: a device of PyTorch.
  """
  label = torch().tensor([int(trial.label)], device=device)
  observed = [g.detach() for g in gradient(module, tensor(trial.image, device), label)]
  dummy = tensor(trial.start, device).requires_grad_()
  adam = torch().optim.Adam([dummy], lr=settings.learning_rate)
  edges = [math.ceil(settings.steps * share) for share in (3 / 8, 5 / 8, 7 / 8)]
  decay = torch().optim.lr_scheduler.MultiStepLR(adam, edges, 0.1)
  first, best, kept = None, torch().tensor(math.inf, device=device), dummy.detach().clone()
  watch = Stopwatch(device)
  for _ in range(settings.steps):
    value = objective(module, dummy, label, observed, settings.tv)
    (dummy.grad,) = torch().autograd.grad(value, dummy)
    dummy.grad.sign_()
    with torch().no_grad():
      value = value.detach()
      kept = torch().where(value < best, dummy, kept)
      best = torch().minimum(value, best)
      first = value if first is None else first
      adam.step()
      dummy.clamp_(0, 1)
    decay.step()
  seconds = watch.read()
  return Attacked(kept[0].permute(1, 2, 0).cpu().numpy(), float(first), *seconds)


def synchronise(device: str) -> None:
  """Waits until the device has finished."""
  if str(device).startswith('cuda'):
    torch().cuda.synchronize()


def device() -> str:
  """Returns the device that the loop runs on: the GPU if PyTorch has one."""
  return 'cuda' if torch().cuda.is_available() else 'cpu'


def quickest_threads(once: Callable[[], Any]) -> int:
  """Sets the number of threads with which `once()` is faster, one or all, and returns it.

  On small networks several threads may be slower than one, which would make the comparison unfair.
  """
  every = torch().get_num_threads()
  taken = {1: [], every: []}
  for _ in range(3):
    for threads, seconds in taken.items():
      torch().set_num_threads(threads)
      started = time.perf_counter()
      once()
      seconds.append(time.perf_counter() - started)
  best = min(taken, key=lambda threads: min(taken[threads]))
  torch().set_num_threads(best)
  return best


def prepare(spec: str, model: Model, variables: dict, sample_shape: tuple[int, ...], num_classes: int) -> Any:
  """Returns the network with our weights, on the loop's device.

  Raises:
    Unavailable: without PyTorch, or for a model that the loop does not have.
  """
  module = network(spec, num_classes, sample_shape)
  return load(module, arrays(module, model, variables['params'], sample_shape)).to(device())
