"""ConvNet with BatchNorm (Geiping et al. 2020; Soteria; GradDefense; FFL), width as a setting."""

from flax import linen as nn

from gradleak import errors
from gradleak.models import layers
from gradleak.models.model import from_flax


class ConvNet(nn.Module):
  """Blocks of 3×3 convolutions with BatchNorm and ReLU, max pooling 3 behind each block; one dense layer.

  `blocks` holds the channels of each convolution as multiples of the width.
  """

  num_classes: int
  initial: str
  conv: str
  width: int
  blocks: tuple[tuple[int, ...], ...]
  bias: bool

  @nn.compact
  def __call__(self, images, train=False):
    if min(images.shape[1:3]) < 9:
      raise errors.UsageError(
        f'convnet pools 9×9 pixels to one: images of {images.shape[1]}×{images.shape[2]} are too small'
      )
    x = images
    for block in self.blocks:
      for multiple in block:
        features = multiple * self.width
        x = layers.Conv(features, 3, self.initial, padding=1, formulation=self.conv, bias=self.bias)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))  # PyTorch's pace
      x = layers.max_pool(x, 3)
    return layers.Dense(self.num_classes, self.initial)(layers.flatten(x))


def convnet(num_classes, init, conv, *, width: int = 64):
  """Returns the ConvNet of base width `width`: 64 in Geiping's and GradDefense's work, 32 in DCS²'s.

  w, 2w, 2w, 4w, 4w, 4w, pool, 4w, 4w, pool: eight convolutions, as the published code builds; papers count eight or
  nine.
  """
  return _convnet('convnet', num_classes, init, conv, width, ((1, 2, 2, 4, 4, 4), (4, 4)), bias=True)


def convnet9(num_classes, init, conv, *, width: int = 64):
  """Returns FFL's ConvNet: a ninth convolution of 4w channels in front of the last pooling.

  Its convolutions have no biases: so it has 3,493,706 parameters with ten classes and colour, the 3.49 M of FFL's
  table 2, and 3.50 M with them.
  """
  return _convnet('convnet9', num_classes, init, conv, width, ((1, 2, 2, 4, 4, 4), (4, 4, 4)), bias=False)


def _convnet(name, num_classes, init, conv, width, blocks, bias):
  errors.check_number(f'{name}(width)', width, low=1, high=1024, integer=True)
  return from_flax(ConvNet(num_classes, init, conv, width, blocks, bias))
