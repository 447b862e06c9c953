"""Networks of PyTorch as models: the same logits, gradients and steps of training as PyTorch's."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradleak as gl
from gradleak.models.masked import masked

torch = pytest.importorskip('torch', reason='PyTorch is not installed')
from torch import nn  # noqa: E402

from tests.models import torch_networks as networks  # noqa: E402

pytestmark = pytest.mark.usefixtures('fast_compilation')


@pytest.fixture(autouse=True, scope='module')
def one_thread():
  """Beside JAX's threads, those of PyTorch wait for each other."""
  threads = torch.get_num_threads()
  torch.set_num_threads(1)
  yield
  torch.set_num_threads(threads)


def images(*shape, seed=0):
  return torch.from_numpy(np.random.default_rng(seed).random(shape, np.float32))


def seeded(make, *args, **options):
  torch.manual_seed(0)
  module = make(*args, **options)
  for name, buffer in module.named_buffers():  # statistics of some training
    if buffer.is_floating_point():
      buffer.copy_(torch.rand(buffer.shape) + 0.5 if name.endswith('var') else torch.randn(buffer.shape) / 10)
  return module


def relative(found, wanted):
  found, wanted = (np.concatenate([np.ravel(np.asarray(one, np.float64)) for one in x]) for x in (found, wanted))
  return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)


def ours(x):
  return np.moveaxis(x.numpy(), 1, -1) if x.ndim == 4 else x.numpy()


def both_losses(model, variables, module, x, labels, train):
  """Returns ((logits, gradients), the same of the module), the gradients in PyTorch's layout and order."""
  module = copy.deepcopy(module).train(train)
  logits = module(x)
  nn.functional.cross_entropy(logits, labels).backward()
  gradients = {name: one.grad.numpy() for name, one in module.named_parameters()}

  def loss(params):
    logits, _ = model.apply({**variables, 'params': params}, jnp.asarray(ours(x)), train, None)
    return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.asarray(labels.numpy())).mean(), logits

  found, out = jax.jit(jax.grad(loss, has_aux=True))(variables['params'])
  found = model.layout.to_theirs({'params': found})
  return (out, [found[name] for name in gradients]), (logits.detach().numpy(), list(gradients.values()))


def matching_gradients(model, variables, module, x, labels, train):
  """Returns the derivative by x of ‖gradient − that on other samples‖², here and in PyTorch."""
  module = copy.deepcopy(module).train(train)
  parameters = list(module.parameters())

  def theirs(x, **options):
    loss = nn.functional.cross_entropy(module(x), labels)
    return torch.autograd.grad(loss, parameters, allow_unused=True, **options)

  with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
    target = [one.detach() for one in theirs(images(*x.shape, seed=1))]
    dummy = x.clone().requires_grad_()
    distance = sum((a - b).square().sum() for a, b in zip(theirs(dummy, create_graph=True), target, strict=True))
    (wanted,) = torch.autograd.grad(distance, dummy)

  def gradient(x):
    def loss(params):
      logits, _ = model.apply({**variables, 'params': params}, x, train, None)
      return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.asarray(labels.numpy())).mean()

    return jax.grad(loss)(variables['params'])

  def ours_of(x, other):
    return sum(jnp.sum(jnp.square(a - b)) for a, b in zip(*map(jax.tree.leaves, (gradient(x), gradient(other)))))

  other = jnp.asarray(ours(images(*x.shape, seed=1)))
  found = jax.jit(jax.grad(ours_of))(jnp.asarray(ours(x)), other)
  return found, ours(wanted)


NETWORKS = {
  'cnn': (networks.Cnn, (4, 3, 8, 8)),
  'resnet18': (lambda: networks.ResNet18(5, 4), (4, 3, 64, 64)),
  'vit': (networks.Vit, (4, 3, 8, 8)),
  'lstm': (networks.Lstm, (4, 9, 6)),
}


@pytest.mark.parametrize('train', [False, True])
@pytest.mark.parametrize('name', ['cnn', *(pytest.param(one, marks=pytest.mark.slow) for one in list(NETWORKS)[1:])])
def test_logits_gradients_and_the_gradient_of_matching_equal_those_of_pytorch(name, train):
  make, shape = NETWORKS[name]
  module = seeded(make)
  x, labels = images(*shape), torch.tensor([0, 3, 1, 3])
  model, variables = gl.models.from_torch(module, x, check=False)
  (logits, gradient), (their_logits, their_gradient) = both_losses(model, variables, module, x, labels, train)
  assert relative([logits], [their_logits]) < 1e-6
  assert relative(gradient, their_gradient) < 2e-6
  found, wanted = matching_gradients(model, variables, module, x, labels, train)
  assert relative([found], [wanted]) < 4e-6
