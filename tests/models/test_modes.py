"""BatchNorm's mode reaches a network by whatever name it has, or the network is refused."""

import jax
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import gradleak as gl
from gradleak import models
from gradleak.models import modes

SHAPE = (8, 8, 1)


class Body(nn.Module):
  """What all networks here compute, given whether they train."""

  def body(self, images, train):
    x = nn.Dense(6, name='first')(images.reshape(images.shape[0], -1))
    x = nn.relu(nn.BatchNorm(use_running_average=not train, name='norm')(x))
    return nn.Dense(10, name='last')(nn.Dropout(0.5, deterministic=not train)(x))


class Train(Body):
  @nn.compact
  def __call__(self, images, train):
    return self.body(images, train)


class Training(Body):
  @nn.compact
  def __call__(self, images, *, training=False):
    return self.body(images, training)


class IsTraining(Body):
  @nn.compact
  def __call__(self, images, is_training: bool):
    return self.body(images, is_training)


class Deterministic(Body):
  @nn.compact
  def __call__(self, images, deterministic=True):
    return self.body(images, not deterministic)


class RunningAverage(Body):
  use_running_average: bool | None = None

  @nn.compact
  def __call__(self, images, use_running_average=None):
    return self.body(images, not nn.merge_param('mode', self.use_running_average, use_running_average))


class Flag(Body):
  training: bool = False

  @nn.compact
  def __call__(self, images):
    return self.body(images, self.training)


class OppositeFlag(Body):
  deterministic: bool = True

  @nn.compact
  def __call__(self, images):
    return self.body(images, not self.deterministic)


def upload(model, images, labels, batch_norm, key=None):
  """Returns (the scenario's client's update, its new statistics)."""
  scenario = gl.scenario(model, images, labels, key=jax.random.key(0), batch_norm=batch_norm)
  made, _, statistics = scenario.client.participate(key, scenario.variables, scenario.samples, scenario.targets)
  return made.update, statistics


@pytest.mark.slow
@pytest.mark.parametrize('batch_norm', ['train', 'eval'])
@pytest.mark.parametrize('network', [Training, IsTraining, Deterministic, RunningAverage, Flag, OppositeFlag])
def test_the_mode_arrives_by_any_of_the_names(network, batch_norm, small_images):
  expected, found = (upload(models.from_flax(made()), *small_images, batch_norm) for made in (Train, network))
  jax.tree.map(np.testing.assert_array_equal, found, expected)
  moved = np.abs(np.asarray(found[1]['norm']['mean'])).max()
  assert (moved > 1e-3) == (batch_norm == 'train')


class OtherArgument(Body):
  @nn.compact
  def __call__(self, images, evaluating=True):
    return self.body(images, not evaluating)


class Heedless(Body):
  """Takes the argument, and does not hand it to BatchNorm."""

  @nn.compact
  def __call__(self, images, train):
    return self.body(images, False) * (2.0 if train else 1.0)


class AlwaysTraining(Body):
  @nn.compact
  def __call__(self, images):
    return self.body(images, True)


class Normed(nnx.Module):
  """An NNX module with a mode of its own; `mode` says how it arrives."""

  def __init__(self, mode):
    rngs = nnx.Rngs(0)
    self.first, self.last = nnx.Linear(64, 6, rngs=rngs), nnx.Linear(6, 10, rngs=rngs)
    self.norm, self.dropout = nnx.BatchNorm(6, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
    if mode == 'flag':
      self.is_training = False

  def body(self, images, train):
    hidden = self.norm(self.first(images.reshape(images.shape[0], -1)), use_running_average=not train)
    return self.last(self.dropout(hidden, deterministic=not train))


class ByArgument(Normed):
  def __call__(self, images, training):
    return self.body(images, training)


class ByFlag(Normed):
  def __call__(self, images):
    return self.body(images, self.is_training)


class Never(Normed):
  def __call__(self, images):
    return self.body(images, False)


@pytest.mark.long
@pytest.mark.parametrize('model', [models.from_nnx(ByArgument('')), models.from_nnx(ByFlag('flag'))])
def test_the_mode_arrives_in_nnx_and_dropout_follows_the_key(model, small_images):
  trained, evaluated = (upload(model, *small_images, mode) for mode in ('train', 'eval'))
  again, drawn = (upload(model, *small_images, 'train', key) for key in (None, jax.random.key(0)))
  jax.tree.map(np.testing.assert_array_equal, trained, again)
  kernels = [found[0]['last']['kernel'] for found in (trained, evaluated, drawn)]
  assert all(np.abs(np.asarray(kernels[0] - other)).max() > 1e-3 for other in kernels[1:])
  initial = model.init(jax.random.key(0), SHAPE)['batch_stats']
  jax.tree.map(np.testing.assert_array_equal, evaluated[1], initial)
  assert np.abs(np.asarray(trained[1]['norm']['mean'] - initial['norm']['mean'])).max() > 1e-3


def by_hand():
  """Returns a hand-made model that has statistics, and no mode."""
  params = {'w': np.full((64, 10), 0.1, np.float32)}

  def apply(variables, images, train, key):
    mean = variables['batch_stats']['mean'].reshape(1, -1)
    return (images.reshape(-1, 64) - mean) @ variables['params']['w'], variables['batch_stats']

  init = {'params': params, 'batch_stats': {'mean': np.zeros(64, np.float32)}}
  return models.Model('by_hand', lambda key, shape: init, apply)


@pytest.mark.long
@pytest.mark.parametrize(
  'model',
  [models.from_flax(OtherArgument()), models.from_flax(Heedless()), models.from_nnx(Never('')), by_hand()],
  ids=lambda model: model.name,
)
def test_a_network_that_never_trains_is_refused_unless_the_client_does_not_either(model, small_images):
  with pytest.raises(gl.UsageError, match=r"batch_norm is 'train', and BatchNorm of the model .* uses its running"):
    upload(model, *small_images, 'train')
  client, variables = gl.Client(model, 10), model.init(jax.random.key(0), SHAPE)
  with pytest.raises(gl.UsageError, match=r"or set batch_norm='eval'"):  # without a scenario
    jax.jit(client.local_update)(None, variables, *small_images)
  upload(model, *small_images, 'eval')


@pytest.mark.parametrize('batch_norm', ['train', 'eval'])
def test_a_network_that_always_trains_is_refused(batch_norm, small_images):
  with pytest.raises(gl.UsageError, match='uses the statistics of the batch in training and in evaluation: let its'):
    upload(models.from_flax(AlwaysTraining()), *small_images, batch_norm)


class Required(nn.Module):
  @nn.compact
  def __call__(self, images, phase):
    return nn.Dense(10)(images)


class RequiredNnx(nnx.Module):
  def __call__(self, images, phase):
    return images


class NoImages(nn.Module):
  @nn.compact
  def __call__(self):
    return nn.Dense(10)(np.zeros((1, 2), np.float32))


def test_other_required_arguments_are_named(small_images):
  for make in (
    lambda: models.from_flax(Required()),
    lambda: models.from_nnx(RequiredNnx()),
    lambda: models.from_functions(lambda key, shape: {}, lambda params, images, phase: images),
    lambda: models.from_functions(lambda key, shape, phase: {}, lambda params, images: images),
  ):
    with pytest.raises(gl.UsageError, match=r"requires the argument 'phase'.*call it 'train' \(understood: train, "):
      make()
  with pytest.raises(gl.UsageError, match="the model 'noimages' cannot be initialised for samples of shape"):
    gl.scenario(models.from_flax(NoImages()), *small_images, key=jax.random.key(0))


def test_functions_are_told_by_the_same_names():
  for name in modes.NAMES:
    scope = {}
    exec(f'def apply(params, images, {name}): return images * (2.0 if {name} else 1.0)', scope)
    model = models.from_functions(lambda key, shape: {}, scope['apply'])
    found = model.apply({'params': {}}, np.ones((1, 2), np.float32), True)[0][0, 0]
    assert found == (2.0 if name in modes.TRAINING else 1.0)


def differentiated(function):
  """The same function with derivatives of its own."""
  made = jax.custom_jvp(function)
  made.defjvp(lambda primals, tangents: jax.jvp(function, primals, tangents))
  return made


def pulled(function):
  made = jax.custom_vjp(function)
  made.defvjp(lambda *given: jax.vjp(function, *given), lambda back, cotangents: back(cotangents))
  return made


WRAPPERS = [
  lambda function: function,
  jax.jit,
  jax.checkpoint,
  differentiated,
  pulled,
  lambda f: jax.jit(jax.checkpoint(f)),
]


@pytest.mark.parametrize('wrapper', WRAPPERS, ids=['plain', 'jit', 'checkpoint', 'jvp', 'vjp', 'both'])
@pytest.mark.parametrize('updates', [True, False])
def test_statistics_are_seen_through_what_wraps_a_part(wrapper, updates):
  """Running statistics that a compiled part returns as they came were taken for new ones."""

  def norm(kernel, mean, samples):
    z = samples.reshape(len(samples), -1) @ kernel
    own = z.mean(0) if updates else mean
    return z - own[None], own

  def init(key, shape):
    return {'params': {'kernel': jax.random.normal(key, (64, 10))}, 'batch_stats': {'mean': jax.numpy.zeros(10)}}

  def apply(variables, samples, train=False, key=None):
    logits, mean = wrapper(norm)(variables['params']['kernel'], variables['batch_stats']['mean'], samples)
    return logits * (2.0 if train else 1.0), {'mean': mean}

  made = models.Model('mine', init, apply)
  variables = init(jax.random.key(0), SHAPE)
  if updates:
    models.model.check_mode(made, variables, SHAPE, 'train')
    return
  with pytest.raises(gl.UsageError, match='uses its running statistics in training'):
    models.model.check_mode(made, variables, SHAPE, 'train')
