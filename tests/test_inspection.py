"""What the client's check says of malicious models, and that it keeps silent on honestly trained ones."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import gradleak
from gradleak import models
from gradleak.core import errors
from gradleak.core.promotion import promoting
from gradleak.federated.inspection import LIMITS, inspect
from gradleak.federated.losses import cross_entropy
from gradleak.servers.fishing import class_fishing_server
from gradleak.servers.fishing_search import class_fished, fish
from gradleak.servers.imprint import imprint_server
from gradleak.servers.trap import VARIANTS, trap_server
from tests import texts

OPTIMIZERS = {'sgd': optax.sgd(0.1, momentum=0.9), 'adam': optax.adam(1e-3), 'adamw': optax.adamw(3e-3)}


def digits(scale=1):
  from sklearn.datasets import load_digits

  data = load_digits()
  images = (data.images[..., None] / 16).astype(np.float32)
  return np.kron(images, np.ones((1, scale, scale, 1), np.float32)), data.target.astype(np.int32)


def faces():
  from skimage.data import lfw_subset

  order = np.random.default_rng(0).permutation(200)
  return lfw_subset().astype(np.float32)[..., None][order], (order < 100).astype(np.int32)


def checkpoints(model, optimizer, images, labels, seed, epochs):
  """Yields (epochs done, variables) of honest training in batches of 32."""
  classes = int(labels.max()) + 1
  chain = promoting(OPTIMIZERS[optimizer])

  def step(carry, batch):
    variables, state = carry

    def mean_loss(params):
      logits, batch_stats = model.apply({**variables, 'params': params}, batch[0], True, None)
      return cross_entropy()(logits, jax.nn.one_hot(batch[1], classes, dtype=jnp.float32)).mean(), batch_stats

    gradient, batch_stats = jax.grad(mean_loss, has_aux=True)(variables['params'])
    updates, state = chain.update(gradient, state, variables['params'])
    trained = {**variables, 'params': optax.apply_updates(variables['params'], updates)}
    return (trained | ({'batch_stats': batch_stats} if batch_stats else {}), state), None

  epoch = jax.jit(lambda carry, batches: jax.lax.scan(step, carry, batches)[0])
  variables = jax.jit(model.init, static_argnums=1)(jax.random.key(seed), images.shape[1:])
  state = jax.tree.map(lambda x: jnp.asarray(x, jnp.asarray(x).dtype), chain.init(variables['params']))
  rng, steps = np.random.default_rng(seed), len(images) // 32
  for done in range(max(epochs) + 1):
    if done in epochs:
      yield done, variables
    order = rng.permutation(len(images))[: steps * 32]
    batches = tuple(x[order].reshape(steps, 32, *x.shape[1:]) for x in (images, labels))
    variables, state = epoch((variables, state), batches)


def malicious(model, variables, images, labels):
  """Yields (name, function without arguments -> (model, variables) that a malicious server sends)."""
  shape = images.shape[1:]
  scenario = gradleak.scenario(model, images[:64], labels[:64], variables=variables, public=(images[64:], labels[64:]))

  def from_server(server):
    sent = server.build(server.numbers).prepare(jax.random.key(1), scenario, 32)
    return sent.client.model, sent.variables

  def feature_fishing(method, public):
    client = jax.jit(functools.partial(dataclasses.replace(scenario.client, batch_norm='eval').local_update, None))

    def query(sent):
      return client(sent, images[:32], labels[:32]).update

    return model, fish(query, model, variables, shape, 32, method=method, public=public).variables

  yield 'class fishing', lambda: from_server(class_fishing_server())
  yield 'feature fishing, published', lambda: feature_fishing('published', None)
  yield 'feature fishing, difference', lambda: feature_fishing('difference', images[64:])
  yield 'imprint', lambda: from_server(imprint_server(bins=64))
  yield 'imprint, random', lambda: from_server(imprint_server(bins=64, measurement='random'))
  yield 'imprint, sparse', lambda: from_server(imprint_server(bins=64, sparse=True, quantiles='empirical'))
  if model.name == 'mlp' or (model.name == 'cnn' and shape[0] % 2 == 0):
    for variant in VARIANTS:
      yield f'trap weights, {variant}', lambda variant=variant: from_server(trap_server(variant=variant))


def suspicions(inspection):
  return {finding.check: finding.value for finding in inspection.findings if finding.suspicious}


@pytest.mark.long
@pytest.mark.usefixtures('fast_compilation')
def test_it_tells_malicious_models_from_honest_ones():
  images, labels = digits()
  model = models.create('mlp', 10, init='default')
  for _, variables in checkpoints(model, 'adam', images[:320], labels[:320], 0, (0, 3)):
    inspection = inspect(model, variables, (8, 8, 1), batch=(images[:16], labels[:16]))
    assert not inspection.suspicious and suspicions(inspection) == {}
    assert str(inspection) == 'These checks find nothing suspicious.'
    assert {finding.check for finding in inspection.findings} == set(LIMITS)
  seen = {
    name: suspicions(inspect(*send(), (8, 8, 1)))
    for name, send in malicious(model, variables, images[:320], labels[:320])
    if name in ('class fishing', 'imprint', 'trap weights, mirrored', 'trap weights, independent')
  }
  assert seen['class fishing'].keys() == {'last_bias', 'last_rows', 'last_norms'}
  assert {'front', 'copies', 'ladder'} <= seen['imprint'].keys()
  assert 'mirrored' in seen['trap weights, mirrored']
  # Nothing else tells these from a start of large variance.
  assert seen['trap weights, independent'].keys() == {'untouched'}


@pytest.mark.usefixtures('fast_compilation')
def test_on_the_clients_own_batch_one_sample_dominates_what_is_fished_for():
  images, labels = digits()
  order = np.r_[np.flatnonzero(labels == 0)[:1], np.flatnonzero(labels != 0)[:15]]
  model = models.create('mlp', 10, init='default')
  variables = jax.jit(model.init, static_argnums=1)(jax.random.key(0), (8, 8, 1))
  fished = class_fished(model, variables, (8, 8, 1), 0)
  inspection = inspect(model, fished, (8, 8, 1), batch=(images[order], labels[order]))
  found = {finding.check: finding for finding in inspection.findings}
  assert found['dominance'].value > 1e6 and found['owned'].value == 1
  assert inspection.findings[0].score == max(finding.score for finding in inspection.findings)
  assert "one sample's gradient in Dense_" in str(inspection)


@pytest.mark.long
def test_a_last_layer_of_zeros_is_a_start_and_a_batch_that_does_not_fit_an_error():
  model = models.create('mlp', 10)
  variables = jax.jit(model.init, static_argnums=1)(jax.random.key(0), (8, 8, 1))
  head = jax.tree.map(jnp.zeros_like, variables['params']['Dense_3'])
  zeros = {'params': {**variables['params'], 'Dense_3': head}}
  assert suspicions(inspect(model, zeros, (8, 8, 1))) == {}
  images, labels = digits()
  for batch in ((images[:1], labels[:1]), (images[:4, :4], labels[:4]), (images[:4], labels[:3])):
    with pytest.raises(errors.UsageError, match='the batch has samples'):
      inspect(model, variables, (8, 8, 1), batch=batch)
  with pytest.raises(errors.UsageError, match='sample 1 has the label 11'):
    inspect(model, variables, (8, 8, 1), batch=(images[:2], np.array([3, 11])))
  with pytest.raises(errors.UsageError, match="does not offer 'layers'"):
    inspect(models.from_functions(model.init, model.apply), variables, (8, 8, 1))


class Convolutional(nn.Module):
  """Two convolutions and a dense layer."""

  @nn.compact
  def __call__(self, images):
    x = nn.relu(nn.Conv(16, (3, 3), name='0')(images))
    return nn.Dense(5, name='5')(nn.relu(nn.Conv(16, (3, 3), name='2')(x)).reshape(len(images), -1))


@pytest.mark.parametrize('trick', ['', 'handed_on', 'copies'])
def test_convolutions_of_pytorch_are_read_as_those_of_flax(trick):
  torch = pytest.importorskip('torch', reason='PyTorch is not installed')
  torch.manual_seed(0)
  parts = (torch.nn.Conv2d(1, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(16, 16, 3, padding=1))
  network = torch.nn.Sequential(*parts, torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(16 * 64, 5))
  weight = network[2].weight.data
  if trick == 'handed_on':
    weight.zero_()
    weight[range(16), range(16), 1, 1] = 1
  if trick == 'copies':
    weight[:] = weight[:1].clone()
  model, variables = models.from_torch(network, torch.rand(2, 1, 8, 8), check=False)
  params = {
    str(i): {'kernel': np.transpose(network[i].weight.data.numpy(), (2, 3, 1, 0)), 'bias': network[i].bias.data.numpy()}
    for i in (0, 2)
  }
  dense = network[5].weight.data.numpy().reshape(5, 16, 64).transpose(2, 1, 0).reshape(-1, 5)
  params['5'] = {'kernel': dense, 'bias': network[5].bias.data.numpy()}
  batch = digits()[0][:8], digits()[1][:8] % 5
  here = inspect(model, variables, (8, 8, 1), batch=batch)
  there = inspect(models.from_flax(Convolutional()), {'params': params}, (8, 8, 1), batch=batch)
  assert trick in ('', *suspicions(here)) and suspicions(here).keys() == suspicions(there).keys()
  expected = {finding.check: finding.value for finding in there.findings}
  assert {finding.check: finding.value for finding in here.findings} == pytest.approx(expected, abs=1e-3, rel=1e-3)


@pytest.mark.long
def test_it_reads_networks_of_rows():
  rows = np.random.default_rng(0).uniform(size=(4, 12)).astype(np.float32)
  model = models.create('mlp', 2)
  variables = jax.jit(model.init, static_argnums=1)(jax.random.key(0), (12,))
  inspection = inspect(model, variables, (12,), batch=(rows, np.array([0, 1, 1, 0])))
  assert not inspection.suspicious and 'dominance' in {finding.check for finding in inspection.findings}


@pytest.mark.long
def test_it_reads_networks_of_texts_and_losses_that_predict_tokens():
  given = texts.scenario(number=4)
  client, ids = given.client, given.samples
  own = client.transformed(None, ids, given.targets)
  assert np.issubdtype(ids.dtype, np.integer) and client.loss.own
  inspection = inspect(client.model, given.variables, ids.shape[1:], batch=own, loss=client.loss)
  assert not inspection.suspicious and 'dominance' in {finding.check for finding in inspection.findings}
  with pytest.raises(errors.UsageError, match='next_token predicts tokens: give the batch that its of_samples returns'):
    inspect(client.model, given.variables, ids.shape[1:], batch=(ids, given.targets), loss=client.loss)


HONEST = [
  ('mlp', 'default', 'adam', 'digits', (0, 1, 5, 20, 60)),
  ('mlp', 'explicit', 'sgd', 'digits', (0, 5, 40)),
  ('mlp', 'default', 'adamw', 'faces', (0, 5, 40)),
  ('lenet', 'explicit', 'adam', 'digits', (0, 5, 40)),
  ('lenet4(activation=relu)', 'default', 'adam', 'digits', (0, 3, 20)),
  ('cnn', 'default', 'sgd', 'digits', (0, 1, 5, 20, 60)),
  ('cnn', 'default', 'adam', 'faces', (0, 5, 40)),
  ('convnet(width=2)', 'default', 'adam', 'digits', (0, 5)),
  ('resnet20(width=4)', 'default', 'sgd', 'digits', (0, 3)),
]


@pytest.mark.slow
@pytest.mark.usefixtures('fast_compilation')
def test_both_rates():
  """Prints what honest models reach in each check, the false alarms, and what is seen of each malicious model."""
  largest, alarms, total, seen = collections.defaultdict(float), 0, 0, collections.defaultdict(list)
  for seed, (name, init, optimizer, data, epochs) in enumerate(HONEST):
    images, labels = faces() if data == 'faces' else digits(2 if name.startswith('convnet') else 1)
    images, labels, own = images[:-40], labels[:-40], (images[-40:], labels[-40:])
    model = models.create(name, int(labels.max()) + 1, init=init)
    for done, variables in checkpoints(model, optimizer, images[:640], labels[:640], seed, epochs):
      for batch in ((images[:32], labels[:32]), own):
        inspection = inspect(model, variables, images.shape[1:], batch=batch)
        for finding in inspection.findings:
          largest[finding.check] = max(largest[finding.check], finding.value)
        if inspection.suspicious:
          print(f'false alarm: {name}, {optimizer}, {data}, {done} epochs: {suspicions(inspection)}')
        alarms, total = alarms + inspection.suspicious, total + 1
      if done not in (epochs[0], epochs[-1]):
        continue
      for kind, send in malicious(model, variables, images[:640], labels[:640]):
        try:
          sent, weights = send()
        except errors.UsageError as error:  # training that diverged left nothing alive
          print(f'{kind} gives up on {name}, {optimizer}, {done} epochs: {error}')
          continue
        by_weights = inspect(sent, weights, images.shape[1:])
        by_batch = inspect(sent, weights, images.shape[1:], batch=(images[:32], labels[:32]))
        seen[kind].append((by_weights.suspicious, by_batch.suspicious))
        largest[f'{kind}: {sorted(suspicions(by_batch))}'] += 1
  for check, value in sorted(largest.items()):
    print(f'{check}: {value:.3g}' + (f' (limit {LIMITS[check]:g})' if check in LIMITS else ' models'))
  print(f'honest: {alarms} of {total} inspections alarmed ({total // 2} checkpoints, two batches each)')
  for kind, results in seen.items():
    weights, batch = np.sum(results, axis=0)
    print(f'{kind}: {weights} of {len(results)} by the weights alone, {batch} with a batch')
    assert weights == len(results)
  assert total // 2 >= 20 and alarms == 0
