"""Attacks that rely on ReLU say so of a network without it, and read one that has it."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import gradleak as gl
from gradleak.attacks.dense import silent_below_zero
from gradleak.threat import Observation

SMOOTH = {
  'leaky': nn.leaky_relu,
  'elu': nn.elu,
  'gelu': nn.gelu,
  'hard tanh': nn.hard_tanh,
  'softplus': nn.softplus,
  'none': lambda x: x,
}


class Net(nn.Module):
  """Two hidden dense layers, with an activation each."""

  first: str = 'relu'
  second: str = 'relu'
  skip: bool = False

  @nn.compact
  def __call__(self, images, train=False):
    first, second = ({'relu': nn.relu, **SMOOTH}[name] for name in (self.first, self.second))
    hidden = first(nn.Dense(12)((images - 0.5).reshape(len(images), -1) / 0.25))
    behind = second(nn.Dense(12)(hidden))
    return nn.Dense(10)(behind + hidden if self.skip else behind)


def prepared(attack, **network):
  model = gl.models.from_flax(Net(**network))
  variables = model.init(jax.random.key(0), (4, 4, 1))
  seen = Observation(variables, variables['params'], jnp.zeros((2, 10)), gl.Knowledge(), (2, 4, 4, 1), 10)
  return attack(gl.Client(model, num_classes=10)).init(jax.random.key(1), seen)


@pytest.mark.long
@pytest.mark.parametrize('name', SMOOTH)
def test_other_activations_are_refused(name):
  with pytest.raises(gl.UsageError, match=r'gradient where its pre-activation is negative: spear needs .* ReLU'):
    prepared(gl.attacks.spear(), first=name)
  for given in ({'first': name}, {'second': name}):
    with pytest.raises(gl.UsageError, match=r'peeling needs dense layers with a ReLU .* other logits'):
      prepared(gl.attacks.peeling(), **given)


@pytest.mark.long
def test_networks_with_relu_are_read():
  prepared(gl.attacks.peeling())
  with pytest.raises(gl.UsageError, match='other logits'):
    prepared(gl.attacks.peeling(), skip=True)
  for given in ({}, {'second': 'gelu'}, {'skip': True}):
    prepared(gl.attacks.spear(), **given)


def test_a_classifier_is_no_relu():
  layer = ('Dense_0', 'kernel'), ('Dense_0', 'bias')
  assert not silent_below_zero(gl.models.logistic(2), (3,), *layer)
