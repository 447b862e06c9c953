"""Networks of PyTorch as models: the same logits, gradients and steps of training as PyTorch's."""

import copy
import random
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradleak as gl
from gradleak.core import trees
from gradleak.models import aten

torch = pytest.importorskip('torch', reason='PyTorch is not installed')
from torch import nn  # noqa: E402
from torch.nn.utils import prune  # noqa: E402

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
    return sum(
      jnp.sum(jnp.square(a - b)) for a, b in zip(*map(jax.tree.leaves, (gradient(x), gradient(other))), strict=True)
    )

  other = jnp.asarray(ours(images(*x.shape, seed=1)))
  found = jax.jit(jax.grad(ours_of))(jnp.asarray(ours(x)), other)
  return found, ours(wanted)


NETWORKS = {
  'cnn': (networks.Cnn, (4, 3, 8, 8)),
  'resnet18': (lambda: networks.ResNet18(5, 4), (4, 3, 64, 64)),
  'vit': (networks.Vit, (4, 3, 8, 8)),
  'lstm': (networks.Lstm, (4, 9, 6)),
}
LABELS = torch.tensor([0, 3, 1, 3])
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in NETWORKS if name != 'cnn']


@pytest.mark.parametrize('train', [False, True])
@pytest.mark.parametrize('name', ['cnn', *SLOW])
def test_logits_gradients_and_the_gradient_of_matching_equal_those_of_pytorch(name, train):
  """To PyTorch's rounding in single precision; ResNet-18 in training is 1e-6 to 5e-6 from its own float64 there."""
  make, shape = NETWORKS[name]
  module, x = seeded(make), images(*shape)
  model, variables = gl.models.from_torch(module, x, check=False)
  (logits, gradient), (their_logits, their_gradient) = both_losses(model, variables, module, x, LABELS, train)
  rounding = 5 if name == 'resnet18' and train else 1
  assert relative([logits], [their_logits]) < rounding * 1e-6
  assert relative(gradient, their_gradient) < rounding * 2e-6
  found, wanted = matching_gradients(model, variables, module, x, LABELS, train)
  assert relative([found], [wanted]) < rounding * 4e-6


@pytest.mark.parametrize('train', [False, True])
@pytest.mark.parametrize('name', ['cnn', *SLOW])
def test_in_double_precision_nothing_is_left_but_rounding(name, train):
  make, shape = NETWORKS[name]
  module, x = seeded(make), images(*shape)
  with jax.enable_x64(True):
    model, variables = gl.models.from_torch(module, x, check=False)
    variables = optax.tree.cast(variables, jnp.float64)
    module, x = module.double(), x.double()
    (logits, gradient), (their_logits, their_gradient) = both_losses(model, variables, module, x, LABELS, train)
    assert logits.dtype == np.float64
    assert relative([logits], [their_logits]) < 1e-11
    assert relative(gradient, their_gradient) < 1e-11


@pytest.mark.slow
def test_an_encoder_of_token_ids_checks_itself_and_leaves_the_padding_alone():
  module = seeded(networks.Encoder)
  tokens = torch.tensor([[1, 4, 0, 0, 2, 29, 3], [5, 6, 7, 8, 9, 10, 0]])
  model, variables = gl.models.from_torch(module, tokens)
  assert model.axes == 1 and set(variables) == {'params', 'buffers'}
  assert variables['buffers']['position_ids'].dtype == np.int32
  (logits, gradient), (theirs, their_gradient) = both_losses(
    model, variables, module, tokens, torch.tensor([1, 2]), False
  )
  assert relative([logits], [theirs]) < 1e-6 and relative(gradient, their_gradient) < 2e-6
  words = gradient[[name for name, _ in module.named_parameters()].index('words.weight')]
  assert not words[0].any() and words[4].any()


def test_steps_of_sgd_with_momentum_and_the_statistics_behind_them():
  module, x = seeded(networks.Cnn), images(6, 3, 8, 8)
  labels = torch.tensor([0, 1, 2, 3, 4, 0])
  model, variables = gl.models.from_torch(module, x, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4), check=False)
  client = gl.Client(
    model, 5, share='delta', optimizer=optax.sgd(0.1, momentum=0.9), epochs=2, batch_size=3, batch_norm='train'
  )
  upload, _, stats = jax.jit(client.participate)(None, variables, ours(x), labels.numpy())
  before = {name: value.clone() for name, value in module.state_dict().items()}
  optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
  mean, std = (torch.tensor(one).reshape(1, 3, 1, 1) for one in ((0.5, 0.4, 0.3), (0.2, 0.3, 0.4)))
  module.train()
  for _ in range(2):
    for part in (slice(0, 3), slice(3, 6)):
      optimizer.zero_grad()
      nn.functional.cross_entropy(module((x[part] - mean) / std), labels[part]).backward()
      optimizer.step()
  after = module.state_dict()
  found = model.layout.to_theirs({'params': upload.update, 'batch_stats': stats})
  assert list(found) == list(after)
  for name, value in found.items():
    wanted = after[name] - before[name] if name in dict(module.named_parameters()) else after[name]
    np.testing.assert_allclose(value, wanted.numpy(), rtol=1e-4, atol=1e-6, err_msg=name)
  assert float(found['norm.num_batches_tracked']) == float(before['norm.num_batches_tracked']) + 4


def test_running_statistics_are_not_rounded_to_the_precision_of_the_pass():
  """As in PyTorch's autocast: in bfloat16 the number of batches stayed at 256, and a mean lost its third digit."""
  module, x, labels = seeded(networks.Cnn), images(6, 3, 8, 8), torch.tensor([0, 1, 2, 3, 4, 0])
  module.norm.num_batches_tracked.fill_(300)
  model, variables = gl.models.from_torch(module, x, check=False)
  client = gl.ClientSettings(share='delta', precision='bfloat16', local_epochs=2, learning_rate=0.1).client(model, 5)
  _, _, stats = jax.jit(client.participate)(None, variables, ours(x), labels.numpy())
  optimizer = torch.optim.SGD(module.parameters(), 0.1)
  for _ in range(2):
    optimizer.zero_grad()
    with torch.autocast('cpu', dtype=torch.bfloat16):
      logits = module(x)
    nn.functional.cross_entropy(logits.float(), labels).backward()
    optimizer.step()
  for name, value in model.layout.to_theirs({'batch_stats': stats}).items():
    np.testing.assert_allclose(value, module.state_dict()[name].numpy(), rtol=1e-3, atol=2e-4, err_msg=name)


def test_images_that_fill_a_batch_are_left_out_of_its_statistics():
  module, x = seeded(networks.Cnn), images(3, 3, 8, 8)
  model, variables = gl.models.from_torch(module, x, check=False)
  client = gl.Client(model, 5, share='delta', batch_size=2)
  whole = jax.jit(client.participate)
  labels = np.array([0, 1, 2])
  upload, _, stats = whole(None, variables, ours(x), labels)
  filled = np.concatenate([ours(x), np.ones((1, 8, 8, 3), np.float32)])
  weights = np.array([1, 1, 1, 0], np.float32)
  other, _, same = whole(None, variables, filled, np.append(labels, 0), weights)
  for one, two in zip(*(jax.tree.leaves(tree) for tree in ((upload.update, stats), (other.update, same))), strict=True):
    np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-7)
  assert stats['norm']['num_batches_tracked'] == 2


def test_dropout_is_drawn_by_key_and_away_without_one():
  class Net(nn.Module):
    def __init__(self):
      super().__init__()
      self.drop, self.maps, self.fc = nn.Dropout(0.25), nn.Dropout2d(0.5), nn.Linear(48, 2)

    def forward(self, x):
      return torch.cat([self.drop(x).flatten(1), self.maps(x).flatten(1), self.fc(x.flatten(1))], 1)

  x = torch.ones(50, 3, 4, 4)
  model, variables = gl.models.from_torch(Net(), x)
  apply = jax.jit(model.apply, static_argnums=2)
  plain = apply(variables, ours(x), True, None)[0]
  np.testing.assert_array_equal(plain, apply(variables, ours(x), False, None)[0])
  assert np.all(plain[:, :96] == 1)
  one, same, other = (np.asarray(apply(variables, ours(x), False, jax.random.key(seed))[0]) for seed in (0, 0, 1))
  np.testing.assert_array_equal(one, same)
  assert (one != other).any()
  entries, maps = one[:, :48], one[:, 48:96].reshape(50, 3, 16)
  np.testing.assert_allclose(np.unique(entries), [0, 1 / 0.75], rtol=1e-6)
  assert abs((entries == 0).mean() - 0.25) < 0.03 and abs((maps == 0).mean() - 0.5) < 0.15
  assert np.all(maps == maps[..., :1]) and set(np.unique(maps)) == {0, 2}


class Branches(nn.Module):
  """The sum of what a head makes of each function of a map [N, 4, 9, 11], so that one export has them all."""

  def __init__(self, functions):
    super().__init__()
    self.stem = nn.Conv2d(4, 6, 3, padding=1)
    self.own = nn.ModuleList([one for one in functions if isinstance(one, nn.Module)])
    self.functions = functions
    self.heads = nn.ModuleList(nn.LazyLinear(3) for _ in functions)

  def forward(self, x):
    x = self.stem(x)
    return sum(head(one(x).flatten(1)) for one, head in zip(self.functions, self.heads, strict=True))


def zeroed(x, where):
  x[where] = 0.1
  return x


KINDS = {
  'convolutions': lambda: [
    nn.Conv2d(6, 4, 3, stride=2, padding=1),
    nn.Conv2d(6, 4, (3, 2), stride=(2, 1), padding=(0, 1), bias=False),
    nn.Conv2d(6, 4, 3, dilation=2, padding=2),
    nn.Conv2d(6, 12, 3, groups=6, padding='same'),
    nn.Conv2d(6, 4, 5, padding='same', groups=2),
    *(nn.Conv2d(6, 4, 3, padding=1, padding_mode=mode) for mode in ('reflect', 'replicate', 'circular')),
    nn.ConvTranspose2d(6, 4, 3, stride=2, padding=1, output_padding=1),
    nn.ConvTranspose2d(6, 4, (3, 2), stride=(2, 3), padding=(0, 1), dilation=2, groups=2),
    lambda x: nn.functional.conv1d(x.flatten(2), torch.ones(2, 6, 3) / 9, padding=1, stride=2),
    lambda x: nn.functional.conv3d(x[:, None], torch.ones(2, 1, 2, 3, 3) / 9, padding=(0, 1, 0)),
    lambda x: nn.functional.unfold(x, 3, stride=2),
  ],
  'pooling': lambda: [
    nn.MaxPool2d(2),
    nn.MaxPool2d(3, 2, ceil_mode=True),
    nn.MaxPool2d(3, 2, padding=1),
    nn.MaxPool2d(2, 1, dilation=2),
    nn.AvgPool2d(3, 2, padding=1),
    nn.AvgPool2d(3, 2, padding=1, ceil_mode=True),
    nn.AvgPool2d(3, 2, padding=1, count_include_pad=False, ceil_mode=True),
    nn.AvgPool2d(2, divisor_override=3),
    nn.AdaptiveAvgPool2d((4, 5)),
    nn.AdaptiveAvgPool2d(1),
    nn.AdaptiveMaxPool2d((4, 5)),
    lambda x: nn.functional.max_pool1d(x.flatten(2), 3),
    lambda x: nn.functional.adaptive_avg_pool1d(x.flatten(2), 7),
    nn.Upsample(scale_factor=2),
    nn.Upsample(size=(5, 17)),
    nn.Upsample(size=(5, 17), mode='bilinear'),
    nn.Upsample(scale_factor=1.5, mode='bilinear', align_corners=True),
    nn.Upsample(scale_factor=1.7, mode='bicubic'),
  ],
  'norms': lambda: [
    nn.GroupNorm(3, 6),
    nn.InstanceNorm2d(6, affine=True),
    nn.LayerNorm([6, 9, 11]),
    nn.RMSNorm(11),
    nn.BatchNorm2d(6, track_running_stats=False),
    nn.BatchNorm2d(6, affine=False, momentum=0.3, eps=1e-2),
    nn.LocalResponseNorm(2),
    nn.Sequential(nn.Flatten(2), nn.BatchNorm1d(6)),
    lambda x: nn.functional.normalize(x, dim=1),
  ],
  'activations': lambda: [
    *(nn.ReLU(inplace=False), nn.GELU(), nn.GELU('tanh'), nn.SiLU(), nn.ELU(), nn.SELU(), nn.CELU(0.5)),
    *(nn.LeakyReLU(0.1), nn.PReLU(6), nn.Hardswish(), nn.Hardsigmoid(), nn.ReLU6(), nn.Softplus(2, 1), nn.Mish()),
    *(nn.Softsign(), nn.LogSigmoid(), nn.Tanhshrink(), nn.Softshrink(), nn.Hardshrink(), nn.Threshold(0.1, 2)),
    *(nn.GLU(1), nn.Softmax2d(), nn.LogSoftmax(1), nn.Hardtanh(-0.2, 0.3), nn.Sigmoid(), nn.Tanh()),
  ],
  'shapes': lambda: [
    lambda x: torch.cat([part * (1 + i) for i, part in enumerate(x.chunk(3, 1))], 1),
    lambda x: torch.stack(x.split(2, 1), 0).sum(0),
    lambda x: torch.cat([x[:, :2].mean((2, 3), keepdim=True).expand(-1, 2, 9, 11), x.narrow(1, 1, 3)], 1),
    lambda x: x.permute(0, 2, 3, 1) @ torch.ones(6, 2),
    lambda x: torch.einsum('nchw,ndhw->ncd', x, x),
    lambda x: nn.functional.pad(x, (1, 2, 0, -1), value=0.5),
    lambda x: x.roll((1, 2), (2, 3)).flip(3),
    lambda x: x[:, [0, 2, -1]],
    lambda x: x[:, 1::2, :, -3:],
    lambda x: x.repeat(1, 2, 1, 1).tril(),
    lambda x: x.gather(1, torch.ones(x.shape[0], 2, 9, 11, dtype=torch.long)),
    lambda x: nn.functional.pixel_shuffle(x.repeat(1, 2, 1, 1), 2),
    lambda x: x + torch.arange(x.shape[-1]),
    lambda x: x.masked_fill(x > 0.1, 0.0).add_(1).mul_(2),
    lambda x: x.unbind(1)[2] + x[:, :1].squeeze(1),
    lambda x: x.transpose(1, 3).reshape(x.shape[0], 3, -1),
    lambda x: torch.zeros(x.shape[0], 8, 9, 11).scatter(
      1, torch.tensor([[[[5]], [[3]]]]).expand_as(x[:, :2]), x[:, :2]
    ),
    lambda x: torch.ones_like(x).scatter_add(2, (x > 0).long() * 3, x),
    lambda x: torch.ones_like(x).scatter(3, (x > 0).long() * 3, 2.5) * x,
    lambda x: x.diagonal(1, 2, 3) + torch.diag_embed(x.mean((2, 3))).diagonal(dim1=1, dim2=2)[..., :1, None],
    lambda x: nn.functional.grid_sample(x, x[:, :2].movedim(1, -1), align_corners=False),
    lambda x: zeroed(x.clone(), x < 0),
  ],
  'reductions': lambda: [
    lambda x: x.max(1)[0],
    lambda x: x.amax((2, 3)),
    lambda x: x.var((2, 3)),
    lambda x: x.std(1),
    lambda x: x.mean(3, keepdim=True) * x,
    lambda x: x.mean(1) - x.mean(0, keepdim=True).mean(1),
    lambda x: x.cumsum(2) + x.logsumexp(1, keepdim=True),
    lambda x: x.topk(2, 1)[0] + x.sort(1)[0][:, :2],
    lambda x: torch.sort(x, dim=2, stable=True)[0] * x + torch.sort(x, dim=3, stable=True, descending=True)[0],
    lambda x: x.median(1)[0] + x.kthvalue(2, 1)[0] * x.median(1, keepdim=True)[0][:, 0],
    lambda x: torch.fmax(x, x.flip(1)) * torch.fmin(x, x.relu()) + torch.erfc(x),
    lambda x: nn.functional.normalize(x.relu(), 3.0, 1) + x.relu().norm(1.5, 3, keepdim=True),
    lambda x: x.norm(float('inf'), (2, 3)) * x.norm(-float('inf'), (2, 3)),
    lambda x: torch.where(x > 0, x, x * 0.1).clamp(-0.2, 0.3),
    lambda x: torch.where((x > 0).any(dim=1, keepdim=True) & (x < 1).all(dim=1, keepdim=True), x, x * 0.1),
    lambda x: x * (~(x * 4).int()) + x.logical_not().logical_or(x > 0.5),
    lambda x: x**2 + (x.abs() + 1) ** 1.5 - torch.maximum(x, x.flip(1)) / (1 + x.abs()),
    lambda x: x.double().mul(2).float(),
    lambda x: torch.exp(x).detach() * x,
    lambda x: x * (x.shape[0] // x.shape[0]),
    lambda x: (x * 0).std(1) + x[:, 0],
    lambda x: x.cumprod(1) + x.logcumsumexp(2) + torch.hypot(x, x.flip(1)),
    lambda x: torch.lgamma(x.abs() + 1) + torch.digamma(x.abs() + 1) + torch.erfinv(x.tanh() * 0.9),
    lambda x: torch.cdist(x[:, :3], x[:, 3:], p=1.0),
    lambda x: nn.functional.bilinear(x, x.flip(1), torch.ones(2, 11, 11) / 9),
  ],
}


@pytest.mark.parametrize(
  'kind', [*(pytest.param(one, marks=pytest.mark.slow) for one in list(KINDS)[1:]), 'convolutions']
)
def test_operations_have_the_values_and_the_gradients_of_pytorch(kind):
  torch.manual_seed(0)
  module, x = Branches(KINDS[kind]()), images(3, 4, 9, 11)
  module(x)  # makes the lazy layers
  model, variables = gl.models.from_torch(module, x, check=False)
  for train in (False, True):
    (logits, gradient), (theirs, their_gradient) = both_losses(
      model, variables, module, x, torch.tensor([0, 1, 2]), train
    )
    assert relative([logits], [theirs]) < 3e-6
    assert relative(gradient, their_gradient) < 2e-5


def test_magnitudes_have_the_slope_of_pytorch_at_zero():
  module, x = networks.Flat(), torch.zeros(2, 1, 2, 2)
  model, variables = gl.models.from_torch(module, x, check=False)
  slope = jax.grad(lambda given: jnp.sum(model.apply(variables, given, False, None)[0]))(jnp.zeros((2, 2, 2, 1)))
  x.requires_grad_(True)
  module(x).sum().backward()
  np.testing.assert_array_equal(np.ravel(slope), x.grad.numpy().ravel())


def test_bounds_that_are_arrays_have_the_slopes_of_pytorch_where_they_meet_and_cross():
  given = [[-1, 1, 3, 2, 0, 1, 2, 4, 1], [0, 0, 0, 2, 2, 3, 3, 3, 1], [2, 2, 2, 2, 2, 1, 1, 1, 1]]
  theirs = [torch.tensor(one, dtype=torch.float32, requires_grad=True) for one in given]
  theirs[0].clamp(*theirs[1:]).sum().backward()
  run = aten.Run(np.float32, True, None, None)
  arrays = [jnp.asarray(one, jnp.float32) for one in given]
  slopes = jax.grad(lambda *arrays: jnp.sum(aten.OPERATIONS['clamp'](run, *arrays)), (0, 1, 2))(*arrays)
  for slope, one in zip(slopes, theirs, strict=True):
    np.testing.assert_array_equal(slope, one.grad.numpy())


def test_a_network_of_token_ids_is_audited_and_says_how_many_it_embeds():
  notes = gl.data.load('notes', 'test', limit=6)
  size, length = notes.known['vocabulary'], notes.samples.shape[1]
  given = {'key': jax.random.key(0), 'modality': gl.modalities.of_config(notes.settings)}
  tokens = torch.from_numpy(notes.samples[:2]).long()
  model, variables = gl.models.from_torch(networks.Encoder(size, length), tokens, check=False)
  assert model.takes_ids and (model.axes, model.vocabulary) == (1, size)
  made = gl.scenario(model, notes.samples, notes.targets, variables=variables, **given)
  update = made.client.local_update(None, made.variables, made.samples[:1], made.targets[:1]).update
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(update))
  told = rf'ids \({length},\), or probabilities \({length}, {size}\), or embeddings \({length}, 16\), got'
  with pytest.raises(gl.UsageError, match=told):
    model.apply(variables, jnp.zeros((1, length, size + 1)), False, None)
  other, variables = gl.models.from_torch(networks.Encoder(size + 6, length), tokens, check=False)
  with pytest.raises(gl.UsageError, match=f'embeds {size + 6} tokens, and the tokeniser has {size}'):
    gl.scenario(other, notes.samples, notes.targets, variables=variables, **given)


@pytest.mark.parametrize('made', [networks.Encoder, networks.Decoder, networks.Pooled, networks.LastToken])
def test_probabilities_stand_for_token_ids(made):
  """Those of single tokens give the logits and the gradient of these tokens, and a search can move them."""
  ids = np.random.default_rng(0).integers(0, 30, (4, 7)).astype(np.int32)
  ids[0, 4:] = 0
  torch.manual_seed(0)
  model, variables = gl.models.from_torch(made(), torch.from_numpy(ids).long())
  assert model.vocabulary == 30

  def total(params, samples):
    logits = model.apply({**variables, 'params': params}, samples, False, None)[0]
    return jnp.sum(logits * jnp.arange(logits.size, dtype=logits.dtype).reshape(logits.shape)), logits

  both = [jax.grad(total, has_aux=True)(variables['params'], x) for x in (jnp.asarray(ids), jax.nn.one_hot(ids, 30))]
  for one, other in zip(*map(jax.tree.leaves, both), strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * np.abs(one).max())
  mixed = jax.nn.softmax(jax.random.normal(jax.random.key(0), (4, 7, 30)))
  slopes = jax.grad(total, 1, has_aux=True)(variables['params'], mixed)[0]
  assert np.isfinite(slopes).all() and np.abs(slopes).max() > 0


def test_a_network_that_computes_with_token_ids_takes_no_probabilities_of_them():
  ids = torch.ones(2, 7, dtype=torch.long)
  model, variables = gl.models.from_torch(seeded(networks.Numbered), ids)
  with pytest.raises(gl.UsageError, match=r'ids of tokens whose probabilities are moved in aten\.mul'):
    model.apply(variables, jnp.full((1, 7, 30), 1 / 30), False, None)
  model, variables = gl.models.from_torch(seeded(networks.Numbers), ids)
  with pytest.raises(gl.UsageError, match='looks them up in no table'):
    model.apply(variables, jnp.full((1, 7, 30), 1 / 30), False, None)


def test_floats_whose_whole_part_is_looked_up_are_no_tokens():
  model, _ = gl.models.from_torch(seeded(networks.Rounded), torch.ones(2, 7), check=False)
  assert (model.takes_ids, model.vocabulary) == (False, None)


def test_buffers_may_hold_infinities_and_no_nan():
  notes = gl.data.load('notes', 'test', limit=2)
  size, length = notes.known['vocabulary'], notes.samples.shape[1]
  module = networks.Decoder(size, length)
  model, variables = gl.models.from_torch(module, torch.from_numpy(notes.samples).long(), check=False)
  given = {'modality': gl.modalities.of_config(notes.settings), 'loss': 'next_token', 'key': jax.random.key(0)}
  assert np.isinf(variables['buffers']['mask']).any()
  gl.scenario(model, notes.samples, notes.targets, variables=variables, **given)
  spoilt = {**variables, 'buffers': {'mask': variables['buffers']['mask'].at[0, 0].set(jnp.nan)}}
  with pytest.raises(gl.UsageError, match=r'1 of 576 values of buffers\.mask'):
    gl.scenario(model, notes.samples, notes.targets, variables=spoilt, **given)


@pytest.mark.slow
def test_notes_are_read_through_a_decoder_of_pytorch():
  notes = gl.data.load('notes', 'test', limit=2)
  size, length = notes.known['vocabulary'], notes.samples.shape[1]
  torch.manual_seed(0)
  module = networks.Decoder(size, length, 32)
  model, variables = gl.models.from_torch(module, torch.from_numpy(notes.samples).long(), check=False)
  given = {'modality': gl.modalities.of_config(notes.settings), 'loss': 'next_token', 'key': jax.random.key(0)}
  scenario = gl.scenario(model, notes.samples, notes.targets, variables=variables, **given)
  attacks = [gl.attacks.tag(steps=300, decay='cosine')]
  found = gl.audit(jax.random.key(1), scenario, [None], attacks, num_trials=2, controls=2, progress='none')
  assert [row['verdict'] for row in found.rows] == ['exact', 'exact']


def test_variables_have_the_names_of_pytorch_and_files_are_read_by_them(tmp_path):
  module = seeded(networks.Cnn)
  x = images(2, 3, 8, 8)
  model, variables = gl.models.from_torch(module, x, check=False)
  shape = (8, 8, 3)
  assert [layer.name for layer in model.layers(shape)] == ['conv', 'fc']
  assert model.layers(shape)[0].paths[0] == ('conv', 'weight') and len(model.layers(shape)[0].paths) == 4
  assert variables['params']['fc']['weight'].shape == (96, 5)  # [in, out], in the order of [4, 4, 6]
  (last,) = (np.asarray(one) for one in (module.fc.weight.detach(),))
  np.testing.assert_array_equal(
    variables['params']['fc']['weight'], last.reshape(5, 6, 4, 4).transpose(2, 3, 1, 0).reshape(96, 5)
  )
  changed = copy.deepcopy(module)
  with torch.no_grad():
    for value in changed.state_dict().values():
      value += 1
  torch.save(changed.state_dict(), tmp_path / 'weights.pt')
  read = gl.read_weights(tmp_path / 'weights.pt', model, shape)
  for name, value in model.layout.to_theirs(read).items():
    np.testing.assert_array_equal(value, changed.state_dict()[name].numpy())
  module(x).sum().backward()
  gradients = {name: one.grad.numpy() for name, one in module.named_parameters()}
  np.savez(tmp_path / 'gradient.npz', **gradients)
  np.savez(tmp_path / 'delta.npz', **{name: value.numpy() for name, value in module.state_dict().items()})
  for file in ('gradient', 'delta'):
    update = gl.read_update(tmp_path / f'{file}.npz', model, variables)
    found = model.layout.to_theirs({'params': update})
    wanted = gradients if file == 'gradient' else {name: module.state_dict()[name].numpy() for name in found}
    assert found.keys() == gradients.keys()
    for name, value in found.items():
      np.testing.assert_array_equal(value, wanted[name])
  np.savez(tmp_path / 'other.npz', **{**gradients, 'fc.weight': np.zeros((96, 5), np.float32)})
  with pytest.raises(gl.UsageError, match=r'fc.weight \(96, 5\) where the model has \(5, 96\)'):
    gl.read_update(tmp_path / 'other.npz', model, variables)


def test_features_are_the_input_of_the_last_dense_layer_and_the_model_keeps_its_weights():
  module, x = seeded(networks.Cnn), images(2, 3, 8, 8)
  model, variables = gl.models.from_torch(module, x, check=False)
  before = model.apply(variables, ours(x))[0]
  with torch.no_grad():
    for value in module.state_dict().values():
      value *= 0
  features = model.features(variables, ours(x))
  last = variables['params']['fc']
  np.testing.assert_allclose(features @ last['weight'] + last['bias'][None], before, rtol=1e-5, atol=1e-6)
  same = model.init(jax.random.key(1), (8, 8, 3))
  jax.tree.map(np.testing.assert_array_equal, same, variables)
  assert module.training and features.shape == (2, 96)


def test_adapters_of_peft_are_those_of_lora_around_the_same_module():
  """The gradients of W + (α / r)·B·A, as PEFT has its adapters, against ours on the same weights."""

  class Adapted(nn.Module):
    def __init__(self, layer, rank):
      super().__init__()
      self.layer, self.scale = layer, 8.0 / rank
      self.lora_A, self.lora_B = (
        nn.Linear(layer.in_features, rank, bias=False),
        nn.Linear(rank, layer.out_features, bias=False),
      )

    def forward(self, x):
      return self.layer(x) + self.scale * self.lora_B(self.lora_A(x))

  module, x = seeded(networks.Cnn), images(2, 3, 8, 8)
  plain, base = gl.models.from_torch(module, x, check=False)
  model = gl.models.lora.lora(plain, rank=2, only='fc')
  module.fc = Adapted(module.fc, 2)
  for name, value in module.named_parameters():
    value.requires_grad = 'lora' in name
  module.eval()
  nn.functional.cross_entropy(module(x), torch.tensor([1, 3])).backward()
  held = {f'base_model.model.{name}': one for name, one in module.named_parameters() if 'lora' in name}
  variables = model.init(jax.random.key(0), (8, 8, 3))
  variables = {
    **variables,
    'params': gl.read_update({name: one.detach() for name, one in held.items()}, model, variables),
  }
  jax.tree.map(np.testing.assert_array_equal, variables['base'], base['params'])
  read = gl.read_update({name: one.grad for name, one in held.items()}, model, variables)
  client = gl.ClientSettings(batch_norm='eval').client(model, 5)
  update = client.local_update(None, variables, ours(x), np.asarray([1, 3])).update
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), read, update)
  assert float(np.abs(read['fc']['weight']['b']).max()) > 1e-3
  with pytest.raises(gl.UsageError, match='precode needs a Flax network'):
    wrapped = gl.models.precode.precode(plain, size=4)
    wrapped.apply(wrapped.init(jax.random.key(0), (8, 8, 3)), ours(x))


def test_adapters_of_peft_on_convolutions_and_recurrent_layers():
  """PEFT puts A in place of the convolution, and B behind it; kernels of all kinds have their inputs as rows."""
  layers = nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(6, 4, 2), nn.Flatten(2)
  module, x = seeded(lambda: nn.Sequential(*layers, nn.LSTM(81, 5, batch_first=True), Taken())), images(2, 3, 8, 8)
  plain, _ = gl.models.from_torch(module, x, check=False)
  model = gl.models.lora.lora(plain, rank=2)
  variables = model.init(jax.random.key(0), (8, 8, 3))
  shapes = {
    '.'.join(trees.path_names(path)): leaf.shape for path, leaf in jax.tree.leaves_with_path(variables['params'])
  }
  assert (shapes['0.weight.a'], shapes['0.weight.b']) == ((27, 2), (2, 6))
  assert (shapes['2.weight.a'], shapes['2.weight.b']) == ((6, 2), (2, 16))  # [in, out, 2, 2] in PyTorch
  assert (shapes['4.weight_ih_l0.a'], shapes['4.weight_ih_l0.b']) == ((81, 2), (2, 20))
  params = jax.tree.map(lambda leaf: leaf + 0.1, variables['params'])
  theirs = model.layout.to_theirs({'params': params})
  a, b = (torch.from_numpy(np.array(theirs[f'0.lora_{part}.weight'])) for part in 'AB')
  assert tuple(a.shape) == (2, 3, 3, 3) and tuple(b.shape) == (6, 2, 1, 1)
  read = gl.read_update({f'base_model.model.{name}': one for name, one in theirs.items()}, model, variables)
  jax.tree.map(np.testing.assert_array_equal, read, params)
  kernel = dict(module.named_parameters())['0.weight']
  with torch.no_grad():
    kernel += 4 * torch.einsum('orij,rckl->ockl', b, a)  # alpha / rank
    wanted = module(x).numpy()
  only = gl.models.lora.lora(plain, rank=2, only='0')
  given = {**only.init(jax.random.key(0), (8, 8, 3)), 'params': {'0': params['0']}}
  np.testing.assert_allclose(only.apply(given, ours(x), False, None)[0], wanted, rtol=1e-4, atol=1e-5)


class Taken(nn.Module):
  """The last output of a recurrent layer."""

  def forward(self, found):
    return found[0][:, -1]


@pytest.mark.parametrize(
  ('layer', 'name'), [(nn.LazyLinear(3), 'weight'), (nn.LazyBatchNorm1d(affine=False), 'running_mean')]
)
def test_lazy_modules_without_a_shape_are_refused_by_name(layer, name):
  with pytest.raises(gl.UsageError, match=rf'^1\.{name} is of a lazy module that has no shape yet: call the network'):
    gl.models.from_torch(nn.Sequential(nn.Flatten(), layer), images(2, 1, 4, 4))


def test_tied_frozen_and_constant_tensors(tmp_path):
  class Tied(nn.Module):
    def __init__(self):
      super().__init__()
      self.words = nn.Embedding(9, 6)
      self.again = self.words
      self.inner = nn.Linear(6, 6)
      self.inner.weight.requires_grad = False
      self.head = nn.Linear(6, 9, bias=False)
      self.head.weight = self.words.weight
      self.register_buffer('scale', torch.tensor([2.0]))
      self.register_buffer('shift', torch.tensor([3.0]), persistent=False)

    def forward(self, tokens):
      return self.head(self.inner(self.words(tokens)).mean(1) * self.scale + self.shift)

  torch.manual_seed(0)
  module, tokens = Tied(), torch.tensor([[1, 2], [8, 8]])
  model, variables = gl.models.from_torch(module, tokens)
  assert set(variables['params']) == {'words', 'inner'} and set(variables['params']['inner']) == {'bias'}
  assert set(variables['buffers']) == {'inner', 'scale'} and model.layout.tied == (
    ('again.weight', 'words.weight'),
    ('head.weight', 'words.weight'),
  )
  state = {name: value.numpy() for name, value in module.state_dict().items()}
  np.savez(tmp_path / 'all.npz', **state)
  update = gl.read_update(tmp_path / 'all.npz', model, variables)
  np.testing.assert_array_equal(update['words']['weight'], state['words.weight'])
  assert list(model.layout.to_theirs(variables)) == list(state)
  once = [value.detach().numpy() for value in module.parameters() if value.requires_grad]
  for listed in (list(state.values()), once):
    jax.tree.map(np.testing.assert_array_equal, gl.read_update(listed, model, variables), update)
  np.savez(tmp_path / 'apart.npz', **{**state, 'head.weight': state['head.weight'] + 1})
  with pytest.raises(gl.UsageError, match=r'head\.weight and words\.weight are one tensor'):
    gl.read_update(tmp_path / 'apart.npz', model, variables)


@pytest.mark.slow
def test_the_names_and_layers_of_torchvisions_resnet18():
  module = networks.ResNet18(5, 4)
  model, _ = gl.models.from_torch(module, images(2, 3, 32, 32), check=False)
  names = [entry.name for entry in model.layout.entries]
  assert names == list(module.state_dict()) and len(names) == 122
  assert {'conv1.weight', 'layer2.0.downsample.0.weight', 'layer4.1.bn2.running_var', 'fc.bias'} <= set(names)
  layers = [layer.name for layer in model.layers((32, 32, 3))]
  assert layers[:3] == ['conv1', 'layer1.0.conv1', 'layer1.0.conv2'] and layers[-1] == 'fc' and len(layers) == 21
  assert {step.base for step in _program(model).steps} <= {
    *('convolution', '_native_batch_norm_legit_no_training', 'operator.getitem', 'relu', 'max_pool2d_with_indices'),
    *('add', 'mean', 'view', 'linear', 'sym_size'),
  }


def _program(model):
  """Returns the program of a model in evaluation."""
  (network,) = (cell.cell_contents for cell in model.apply.__closure__ if hasattr(cell.cell_contents, 'evaluation'))
  return network.evaluation


def test_convolutions_are_in_our_fast_form_without_transposed_maps():
  layers = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 16, 3)
  model, variables = gl.models.from_torch(nn.Sequential(*layers), images(2, 16, 20, 20), check=False)
  text = str(jax.make_jaxpr(lambda x: model.apply(variables, x)[0])(ours(images(2, 16, 20, 20))))
  assert text.count('convolve[') == 2 and 'conv_general_dilated' not in text
  moved = set(re.findall(r'permutation=\(([0-9, ]+)\)', text))
  assert moved == {'0, 3, 2, 1', '0, 1, 3, 5, 2, 4'}  # kernels, and windows of the pooling


@pytest.mark.parametrize(
  ('function', 'parts'),
  [
    (lambda x: torch.fft.fft2(x).real, ['aten._fft', 'in block.1']),
    (lambda x: x + torch.randn_like(x), ['aten.randn_like', 'in block.1']),
    (lambda x: nn.functional.alpha_dropout(x, 0.1, training=True), ['aten.bernoulli.p in block.1']),
    (lambda x: x.half().float(), ['numbers of type float16 in aten._to_copy', 'block.1']),
    (lambda x: x if x.sum() > 0 else -x, ['does not export', 'branches on values']),
    (lambda x: (x, x), ['returns 2 values, expected one tensor']),
    (lambda x: {'scores': x, 'hidden': x}, ['returns 2 values, expected one tensor of logits, or a mapping with']),
    (lambda x: {'logits': (x, x), 'hidden': x}, ['returns 3 values, expected one tensor']),
  ],
)
def test_what_is_not_understood_is_one_error_that_names_it(function, parts):
  class Odd(nn.Module):
    def forward(self, x):
      return function(x)

  class Net(nn.Module):
    def __init__(self):
      super().__init__()
      self.block = nn.Sequential(nn.Conv2d(3, 2, 3), Odd())

    def forward(self, x):
      return self.block(x)

  with pytest.raises(gl.UsageError) as error:
    gl.models.from_torch(Net(), images(2, 3, 4, 4))
  assert all(part in str(error.value) for part in parts), str(error.value)


class Returned(dict):
  """What modules of Hugging Face return: a mapping that is no tree of tensors for PyTorch."""


@pytest.mark.parametrize('kind', [dict, Returned])
def test_the_logits_of_a_mapping_are_what_is_attacked(kind):
  class Whole(nn.Module):
    def __init__(self):
      super().__init__()
      self.body, self.head = nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, x):
      hidden = torch.relu(self.body(x))
      return kind(hidden=hidden, logits=self.head(hidden), cache=object())

  net, x = Whole(), torch.rand(2, 6)
  model, variables = gl.models.from_torch(net, x)
  np.testing.assert_allclose(model.apply(variables, x.numpy())[0], net(x)['logits'].detach(), rtol=1e-5, atol=1e-6)
  assert isinstance(net(x), kind)  # the module itself is not changed


class Net(nn.Module):
  """A dense layer, with what else a test gives it, and a function of both and of samples [N, 6]."""

  def __init__(self, function, **parts):
    super().__init__()
    self.function, self.fc, self.calls = function, nn.Linear(6, 3), 0
    for name, part in parts.items():
      self.register_buffer(name, part, name != 'passing') if type(part) is torch.Tensor else setattr(self, name, part)

  def forward(self, x):
    return self.function(self, x)


def averaged(net, x):
  if net.training:
    net.passing.mul_(0.9).add_(x.detach().mean(0))
  return net.fc(x - net.passing)


def counting(net, x):
  net.calls += 1
  return net.fc(x) * (1 if net.calls < 100 else 0)


def in_one_memory():
  net = Net(lambda net, x: net.fc(x) + net.other(x), other=nn.Linear(6, 3))
  net.other.weight = nn.Parameter(net.fc.weight.data)
  return net


def hooked():
  net = Net(lambda net, x: net.fc(x))
  net.fc.weight.register_hook(lambda gradient: gradient / 2)
  return net


def pruned():
  net = Net(lambda net, x: net.fc(x))
  prune.l1_unstructured(net.fc, 'weight', 0.3)
  return net


def constrained(net, x):
  with torch.no_grad():
    net.fc.weight.copy_(torch.renorm(net.fc.weight, 2, 0, 0.3))
  return net.fc(x)


def freezing(net, x):
  net.other.requires_grad_(False)
  return net.fc(x) + net.other(x)


def keeping(net, x):
  net.last = torch.relu(net.fc(x))
  return net.last


def called(module):
  module(images(4, 6))
  return module


@pytest.mark.filterwarnings('ignore:.*weight_norm. is deprecated:FutureWarning')
@pytest.mark.parametrize(
  'make',
  [
    lambda: Net(keeping),
    lambda: called(Net(keeping)),
    lambda: nn.utils.weight_norm(nn.Linear(6, 3)),
    pytest.param(lambda: called(pruned()), id='pruned'),
  ],
)
def test_tensors_that_a_pass_leaves_are_no_part_of_a_network(make):
  module = make()
  model, variables = gl.models.from_torch(module, images(4, 6))
  np.testing.assert_allclose(
    model.apply(variables, images(3, 6).numpy())[0], module(images(3, 6)).detach().numpy(), atol=1e-6
  )


def places_of_maxima(x):
  return nn.functional.max_pool2d(x, (1, 2), return_indices=True)[1].flatten(1)


@pytest.mark.parametrize(
  ('make', 'part'),
  [
    (lambda: Net(lambda net, x: net.fc(x) * (2 if x.shape[0] > 3 else 1)), 'for batches of 4 or more samples'),
    (lambda: Net(lambda net, x: net.fc(x) * (2 if x.shape[0] < 33 else 1)), 'for batches of 2 to 32 samples'),
    (lambda: Net(lambda net, x: net.fc(x) * (2 if len(x) > 32 else 1)), 'for batches of 2, 5 and 131 samples'),
    (lambda: Net(lambda net, x: net.fc(x) * (2 if x.shape[0] > 1 else 1)), 'another thing for a batch of one sample'),
    (lambda: Net(averaged, passing=torch.zeros(6)), 'changes its buffer passing, which its state_dict leaves out'),
    (lambda: Net(counting), 'changes its attribute calls when it is called'),
    (in_one_memory, 'fc.weight and other.weight are two tensors in the same memory'),
    (hooked, 'the parameter fc.weight has a hook on its gradient'),
    (lambda: Net(constrained), 'changes its parameter fc.weight|the module alone has a gradient of fc.weight'),
    (lambda: Net(freezing, other=nn.Linear(6, 3)), 'the model alone has a gradient of other.'),
    (lambda: Net(lambda net, x: net.fc(x) * (random.random() > 1e-9)), "draws from Python's or NumPy's random numbers"),
    (lambda: Net(lambda net, x: net.fc(x) + np.random.rand() * 0), "draws from Python's or NumPy's random numbers"),
    (
      lambda: Net(lambda net, x: net.fc(x), table=torch.ones(3, dtype=torch.cfloat)),
      'the buffer table is torch.complex64',
    ),
    (
      lambda: Net(lambda net, x: net.fc(x), scale=torch.ones(3, dtype=torch.bfloat16)),
      'the buffer scale is torch.bfloat16',
    ),
    (lambda: Net(lambda net, x: net.fc(x[:, :5])), 'fails on the example, in PyTorch torch.float32 of shape'),
    (lambda: nn.Linear(6, 3, device='meta'), 'cannot be copied to the CPU'),
    (lambda: Net(lambda net, x: net.fc(x).sum()), r'returns \(\) for 4 samples'),
    (lambda: Net(lambda net, x: net.fc(x).t()), r'returns \(3, 4\) for 4 samples'),
    (lambda: Net(lambda net, x: net.fc(x).argmax(1)), 'depend on no parameter that is trained'),
    (lambda: Net(lambda net, x: net.fc(x) * places_of_maxima(x[:, None, None])), 'output 1 in aten.operator.getitem'),
    (
      lambda: Net(lambda net, x: nn.functional.max_pool2d(net.fc(x)[None], 1)[0]),
      r'these arguments \(.*\) in aten.max_',
    ),
  ],
)
def test_what_an_export_does_not_show_is_refused(make, part):
  """Each was taken without a word, or ended in a traceback: an update of such a network has another gradient."""
  with pytest.raises(gl.UsageError, match=part):
    gl.models.from_torch(make(), images(4, 6))


class Held(nn.Sequential):
  """Whose norm stays in evaluation when it trains."""

  def train(self, mode=True):
    super().train(mode)
    self[1].eval()
    return self


def test_parts_in_evaluation_of_a_network_in_training_are_refused_where_that_matters():
  """The norm of a network that is tuned was held by its client, and trained here: the update was another one."""
  torch.manual_seed(0)
  layers, x = [nn.Sequential(nn.Linear(6, 3), nn.Dropout(0)), nn.BatchNorm1d(3)], images(4, 6)
  module = nn.Sequential(*layers)
  module[1].eval()
  with pytest.raises(gl.UsageError, match="'sequential' is in training and 1 in evaluation, where it computes other"):
    gl.models.from_torch(module, x)
  module[0].eval()
  module[1].train()
  whole, held = copy.deepcopy(module).eval(), Held(*copy.deepcopy(layers)).train()
  for given, moved in (module, True), (whole, True), (held, False):
    _, variables = gl.models.from_torch(given, x, check=False)
    assert ('batch_stats' in variables) == moved


def test_an_example_of_several_tensors_or_of_bfloat16():
  with pytest.raises(gl.UsageError, match='the example is a tuple of tensors'):
    gl.models.from_torch(nn.Linear(6, 3), (images(4, 6), images(4, 6)))
  model, _ = gl.models.from_torch(nn.Linear(6, 3), images(4, 6).bfloat16(), check=False)
  assert model.layout.sample == (6,)


@pytest.mark.parametrize(
  'make',
  [
    lambda: Net(lambda net, x: {'logits': net.fc(x)}),
    lambda: Net(lambda net, x: net.fc(x * without_gradient(net.stem, x)), stem=nn.Linear(6, 6)),
    lambda: Net(lambda net, x: nn.functional.batch_norm(net.fc(x), torch.zeros(3), torch.ones(3), training=True)),
    lambda: Net(lambda net, x: net.fc(net.stem(x)), stem=nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))),
    lambda: Net(
      lambda net, x: net.fc(nn.functional.embedding((x > 0.5).long(), net.rows, sparse=True).sum(1)[:, None] * x),
      rows=nn.Parameter(torch.ones(2, 1)),
    ),
  ],
)
def test_networks_that_are_taken_as_they_are(make):
  """`from_torch` itself compares logits, gradients and what a step changes."""
  gl.models.from_torch(seeded(make), images(4, 6))


def without_gradient(layer, x):
  with torch.no_grad():
    return torch.relu(layer(x))


@pytest.mark.slow
def test_an_encoder_takes_its_masks():
  layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
  encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
  causal = torch.ones(5, 5, dtype=torch.bool).triu(1)
  net = Net(lambda net, x: net.fc(net.encoder(x, causal, x[..., 0] > 0.9)).mean(1), encoder=encoder)
  gl.models.from_torch(net, images(4, 5, 6))


def _behind(context):
  def forward(net, x):
    with context():
      features = torch.tanh(net.spare(x.flatten(1)))
    return net.fc(features)

  return forward


@pytest.mark.parametrize(
  'forward',
  [
    lambda net, x: net.fc(x.flatten(1)),
    _behind(torch.no_grad),
    lambda net, x: net.fc(net.spare(x.flatten(1)).detach()),
    lambda net, x: net.fc(x.flatten(1) + net.spare(x.flatten(1)).gt(0) * torch.ones_like(net.spare.bias)),
  ],
  ids=['unused', 'no_grad', 'detach', 'compared'],
)
def test_what_no_gradient_reaches_stays_where_it_is(forward):
  """PyTorch's optimizers pass over parameters without a gradient: weight decay does not move them."""
  torch.manual_seed(0)
  module = Net(forward, spare=nn.Linear(6, 6))
  x, labels = images(4, 1, 2, 3), torch.tensor([0, 1, 2, 0])
  model, variables = gl.models.from_torch(module, x)
  settings = gl.ClientSettings(share='delta', weight_decay=0.1, learning_rate=0.5, local_epochs=2)
  update = settings.client(model, 3).local_update(None, variables, ours(x), labels.numpy()).update
  before = {name: one.detach().clone() for name, one in module.named_parameters()}
  optimizer = torch.optim.SGD(module.parameters(), 0.5, weight_decay=0.1)
  for _ in range(2):
    optimizer.zero_grad()
    nn.functional.cross_entropy(module(x), labels).backward()
    optimizer.step()
  moved = {name: (one.detach() - before[name]).numpy() for name, one in module.named_parameters()}
  assert set(variables['buffers']['spare']) == {'weight', 'bias'} and not moved['spare.weight'].any()
  found = model.layout.to_theirs({'params': update})
  assert found.keys() == {'fc.weight', 'fc.bias'}
  for name, value in found.items():
    np.testing.assert_allclose(value, moved[name], rtol=1e-5, atol=1e-7)
  read = gl.read_update(moved, model, variables)
  np.testing.assert_array_equal(read['fc']['bias'], moved['fc.bias'])


def test_the_size_of_a_batch_may_be_asked_for_and_may_not_be_fixed():
  class Counted(nn.Module):
    def __init__(self, fixed):
      super().__init__()
      self.fc, self.fixed = nn.Linear(12, 2), fixed

    def forward(self, x):
      return self.fc(x.reshape(3 if self.fixed else len(x), -1)) * len(x) + torch.ones(len(x) + 2, 1)[2:]

  module, x = Counted(False), images(5, 3, 2, 2)
  model, variables = gl.models.from_torch(module, x[:3])
  for count in (1, 5):
    np.testing.assert_allclose(model.apply(variables, ours(x[:count]))[0], module(x[:count]).detach(), rtol=1e-5)
  with pytest.raises(gl.UsageError, match=r'does not export|computes other things'):
    gl.models.from_torch(Counted(True), x[:3])


@pytest.mark.parametrize(
  ('change', 'parts'),
  [
    (('relu', lambda run, x: x), ['in evaluation: the logits differ', 'the output of 2 is the first that departs']),
    (('relu', 'stopped'), ['the gradient of the model departs', 'in evaluation, first in 1.']),
    (('add', lambda run, a, b: a), ['num_batches_tracked after a step of training']),
  ],
)
def test_it_checks_itself_and_names_the_first_layer_that_departs(change, parts, monkeypatch):
  name, function = change
  if function == 'stopped':
    real = aten.OPERATIONS['relu']
    function = lambda run, x: jax.tree.map(jax.lax.stop_gradient, real(run, aten.plain(x)))  # noqa: E731
  monkeypatch.setitem(aten.OPERATIONS, name, function)
  module = nn.Sequential(
    nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 3)
  )
  with pytest.raises(gl.UsageError) as error:
    gl.models.from_torch(module, images(3, 3, 4, 4))
  assert all(part in str(error.value) for part in parts), str(error.value)
  gl.models.from_torch(module, images(3, 3, 4, 4), check=False)


def test_bad_arguments_are_refused_with_a_sentence():
  module, x = seeded(networks.Cnn), images(2, 3, 8, 8)
  for arguments, part in (
    ((nn.Linear, x), 'takes an instance of torch.nn.Module'),
    ((copy.deepcopy(module).half(), x), 'the parameter conv.weight is torch.float16, expected torch.float32'),
    ((module, x > 0), 'expected samples'),
    ((module, x.numpy()), r'fails on the example, .* Tensors of images are \[N, C, H, W\], arrays'),
    ((module, (255 * x).to(torch.uint8)), 'fails on the example, .* integers are ids of tokens'),
  ):
    with pytest.raises(gl.UsageError, match=part):
      gl.models.from_torch(*arguments)
  with pytest.raises(gl.UsageError, match='mean and std together'):
    gl.models.from_torch(module, x, mean=(0, 0, 0))
  for mean, std, part in (
    ((0,), (1,), r'one number for each channel of an image; .* mean \(1,\)'),
    (0.5, 0.5, r'one number for each channel of an image; .* mean \(\)'),
    ((0, 0, 0), (1, 0, 1), 'finite numbers, and those of std above zero'),
    ((np.nan, 0, 0), (1, 1, 1), 'finite numbers, and those of std above zero'),
  ):
    with pytest.raises(gl.UsageError, match=part):
      gl.models.from_torch(module, x, mean=mean, std=std)
  model, variables = gl.models.from_torch(module, ours(x), check=False)  # our layout of images is known by its type
  with pytest.raises(gl.UsageError, match=r'exported for samples of shape \(8, 8, 3\), got \(4, 4, 3\)'):
    model.init(jax.random.key(0), (4, 4, 3))
  with pytest.raises(gl.UsageError, match='takes samples of shape'):
    model.apply(variables, np.zeros((2, 4, 4, 3), np.float32))
  model, variables = gl.models.from_torch(nn.Sequential(nn.Flatten(), nn.BatchNorm1d(12)), images(2, 3, 2, 2))
  with pytest.raises(gl.UsageError, match='BatchNorm of 1 has one value per channel'):
    model.apply(variables, np.zeros((1, 2, 2, 3), np.float32), True, None)


class PerPosition(nn.Module):
  """A dense layer on each position of a sequence, as one long batch."""

  def __init__(self):
    super().__init__()
    self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

  def forward(self, x):
    rows = torch.relu(self.first(x)).reshape(-1, 4)
    return self.last(rows).view(x.shape[0], -1, 2).mean(1)


def test_rows_of_a_sequence_are_no_flattened_map():
  torch.manual_seed(0)
  module, x = PerPosition(), torch.rand(4, 5, 3)
  model, variables = gl.models.from_torch(module, x)
  logits, _ = model.apply(variables, x.numpy(), False, None)
  np.testing.assert_allclose(logits, module(x).detach().numpy(), atol=1e-6)


class Turned(nn.Module):
  """Flattens channels last itself."""

  def __init__(self):
    super().__init__()
    self.first, self.last = nn.Linear(48, 30), nn.Linear(30, 4)

  def forward(self, x):
    return self.last(torch.relu(self.first(x.permute(0, 2, 3, 1).flatten(1))))


def test_closed_forms_read_no_pixels_in_another_order():
  torch.manual_seed(0)
  module, x = Turned(), images(1, 3, 4, 4)
  model, variables = gl.models.from_torch(module, x, check=False)
  update = gl.Client(model, 4).local_update(None, variables, ours(x), np.array([2])).update
  given = {'attacks': [gl.attacks.fidel()], 'labels': [2], 'controls': 2}
  with pytest.raises(gl.UsageError, match='in the order of rows, columns and channels'):
    gl.attack(jax.random.key(0), model, variables, update, **given)


def test_what_came_back_is_set_against_the_variables_themselves():
  """PyTorch's dense weights are [out, in], ours [in, out], by the same name."""
  torch.manual_seed(0)
  module = nn.Sequential(nn.Flatten(), nn.Linear(48, 30), nn.ReLU(), nn.Linear(30, 4))
  model, variables = gl.models.from_torch(module, images(1, 3, 4, 4), check=False)
  returned = {name: value + 0.5 for name, value in module.state_dict().items()}
  for sent in (variables, module.state_dict()):
    update = gl.read_update(returned, model, variables, sent=sent)
    assert all(np.allclose(leaf, 0.5, atol=1e-6) for leaf in jax.tree.leaves(update))


@pytest.mark.parametrize('sides', [(48, 48, 48), (48, 30, 4)])
def test_a_tree_like_the_parameters_is_read_as_it_is_and_flat_names_are_those_of_pytorch(tmp_path, sides):
  torch.manual_seed(0)
  layers = nn.Linear(*sides[:2]), nn.BatchNorm1d(sides[1]), nn.Linear(*sides[1:])
  model, variables = gl.models.from_torch(nn.Sequential(nn.Flatten(), *layers), images(2, 3, 4, 4), check=False)
  variables = jax.tree.map(np.asarray, dict(variables))
  moved = jax.tree.map(lambda leaf: leaf + np.float32(0.5), variables['params'])
  flat = {'/'.join(trees.path_names(path)): leaf for path, leaf in jax.tree.leaves_with_path(moved)}
  np.savez(tmp_path / 'moved.npz', **flat)
  for what in (moved, {'params': moved}, {**variables, 'params': moved}, flat, tmp_path / 'moved.npz'):
    jax.tree.map(np.testing.assert_array_equal, gl.read_update(what, model, variables), moved)
  for sent in (variables, jax.tree.map(np.copy, variables), variables['params'], model.layout.to_theirs(variables)):
    update = gl.read_update(moved, model, variables, sent=sent)
    assert all(np.allclose(leaf, 0.5, atol=1e-6) for leaf in jax.tree.leaves(update))
  read = gl.read_weights(variables, model, (4, 4, 3))
  jax.tree.map(np.testing.assert_array_equal, read, variables)


def test_a_tree_without_nesting_is_read_as_it_is_where_its_values_are_those_of_jax():
  class Own(nn.Module):
    def __init__(self):
      super().__init__()
      self.one, self.two = (nn.Parameter(torch.rand(48, 48)) for _ in range(2))

    def forward(self, x):
      return nn.functional.linear(torch.tanh(nn.functional.linear(x.flatten(1), self.one)), self.two)

  module = Own()
  model, variables = gl.models.from_torch(module, images(2, 3, 4, 4), check=False)
  for what in (dict(variables['params']), {'params': variables['params']}, module.state_dict()):
    jax.tree.map(np.testing.assert_array_equal, gl.read_update(what, model, variables), variables['params'])


def test_a_dense_network_gives_its_image_away_in_the_order_of_our_pixels():
  """Closed forms read rows of a first dense layer as [H, W, C], and undo the normalisation."""
  torch.manual_seed(0)
  module = nn.Sequential(nn.Flatten(), nn.Linear(48, 30), nn.ReLU(), nn.Linear(30, 4))
  x = images(1, 3, 4, 4)
  model, variables = gl.models.from_torch(module, x, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4), check=False)
  update = gl.Client(model, 4).local_update(None, variables, ours(x), np.array([2])).update
  found = gl.attack(jax.random.key(0), model, variables, update, attacks=[gl.attacks.fidel()], labels=[2], controls=2)
  np.testing.assert_allclose(found.inversions[0].samples[0], ours(x)[0], atol=1e-4)


@pytest.mark.slow
def test_an_audit_from_end_to_end():
  torch.manual_seed(0)
  module = nn.Sequential(
    nn.Conv2d(1, 8, 5, stride=2, padding=2), nn.Sigmoid(), nn.Conv2d(8, 8, 5, padding=2), nn.Sigmoid(), nn.Flatten(),
    nn.Linear(128, 10),
  )  # fmt: skip
  for parameter in module.parameters():
    nn.init.uniform_(parameter, -0.5, 0.5)
  data = gl.data.load('digits', limit=60)
  model, variables = gl.models.from_torch(module, data.samples[:2])
  scenario = gl.scenario(model, data.samples, data.targets, variables=variables)
  defenses = [None, gl.defenses.soteria(rate=0.6), gl.defenses.fragmentation(ratio=0.5), gl.defenses.outpost()]
  result = gl.audit(jax.random.key(1), scenario, defenses, [gl.attacks.csdlg(tv=1e-6)], num_trials=2, steps=600)
  rows = [row for row in result.rows if row['adaptive'] is None]
  psnr = {
    name: np.mean([row['psnr'] for row in rows if row['defense'] == name]) for name in {r['defense'] for r in rows}
  }
  assert psnr['none'] > 25 and psnr[str(gl.defenses.outpost())] < 15
