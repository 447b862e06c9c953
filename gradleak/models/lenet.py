"""LeNet as gradient inversion knows it (Zhu et al. 2019), and the variant with a fourth convolution."""

from flax import linen as nn

from gradleak.models import layers
from gradleak.models.model import from_flax


class LeNet(nn.Module):
  """5×5 convolutions of 12 channels, padding 2, strides 2, 2, 1 (, 1), an activation after each; one dense layer."""

  num_classes: int
  initial: str
  conv: str
  activation: str
  strides: tuple[int, ...]

  @nn.compact
  def __call__(self, images, train=False):
    x = images
    for stride in self.strides:
      x = layers.Conv(12, 5, self.initial, stride=stride, padding=2, formulation=self.conv)(x)
      x = layers.activation(self.activation)(x)
    return layers.Dense(self.num_classes, self.initial)(layers.flatten(x))


def lenet(num_classes, init, conv, *, activation: str = 'sigmoid'):
  """Returns the LeNet of DLG's published code: three convolutions, 768 features at 32×32."""
  layers.activation(activation)
  return from_flax(LeNet(num_classes, init, conv, activation, (2, 2, 1)))


def lenet4(num_classes, init, conv, *, activation: str = 'sigmoid'):
  """Returns the LeNet with four convolutions of Soteria, GradDefense and OUTPOST."""
  layers.activation(activation)
  return from_flax(LeNet(num_classes, init, conv, activation, (2, 2, 1, 1)))
