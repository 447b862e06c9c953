"""Fidel's fully connected network (Enthoven & Al-Ars 2021, table I)."""

from flax import linen as nn

from gradleak import errors
from gradleak.models import layers
from gradleak.models.model import from_flax


class Mlp(nn.Module):
  """Dense 128, 128, 64, classes; ReLU, the first layer's activation being a setting; dropout after the first."""

  num_classes: int
  initial: str
  activation: str
  dropout: float

  @nn.compact
  def __call__(self, images, train=False):
    x = layers.flatten(images)
    x = layers.activation(self.activation)(layers.Dense(128, self.initial)(x))
    x = nn.Dropout(self.dropout, deterministic=False)(x)
    x = nn.relu(layers.Dense(128, self.initial)(x))
    x = nn.relu(layers.Dense(64, self.initial)(x))
    return layers.Dense(self.num_classes, self.initial)(x)


def mlp(num_classes, init, conv, *, activation: str = 'relu', dropout: float = 0.0):
  """Returns Fidel's FCNN. `activation` is the first dense layer's; `dropout` in [0, 1) follows it."""
  del conv
  layers.activation(activation)
  errors.check_number('mlp(dropout)', dropout, low=0, high=0.99)
  return from_flax(Mlp(num_classes, init, activation, dropout))
