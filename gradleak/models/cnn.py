"""Fidel's convolutional network (Enthoven & Al-Ars 2021, table II)."""

from flax import linen as nn

from gradleak import errors
from gradleak.models import layers
from gradleak.models.model import from_flax


class Cnn(nn.Module):
  """Convolution 3×3×32 (valid, linear), max pooling 2, dense 128 with its activation and dropout, 64, classes."""

  num_classes: int
  initial: str
  conv: str
  activation: str
  dropout: float

  @nn.compact
  def __call__(self, images, train=False):
    if min(images.shape[1:3]) < 4:
      raise errors.UsageError(f'cnn needs images of at least 4×4 pixels, got {images.shape[1]}×{images.shape[2]}')
    x = layers.Conv(32, 3, self.initial, formulation=self.conv)(images)
    x = layers.flatten(layers.max_pool(x, 2))
    x = layers.activation(self.activation)(layers.Dense(128, self.initial)(x))
    x = nn.Dropout(self.dropout, deterministic=False)(x)
    x = nn.relu(layers.Dense(64, self.initial)(x))
    return layers.Dense(self.num_classes, self.initial)(x)


def cnn(num_classes, init, conv, *, activation: str = 'relu', dropout: float = 0.0):
  """Returns Fidel's CNN. `activation` is the first dense layer's; `dropout` in [0, 1) follows it."""
  layers.activation(activation)
  errors.check_number('cnn(dropout)', dropout, low=0, high=0.99)
  return from_flax(Cnn(num_classes, init, conv, activation, dropout))
