"""ConvNets with BatchNorm (Geiping et al. 2020; Soteria; GradDefense; FFL)."""

import jax
from flax import linen as nn

from gradleak.core import errors
from gradleak.models import layers
from gradleak.models.builtin import Channels, builtin
from gradleak.models.model import Model, from_flax


class ConvNet(nn.Module):
  """Blocks of 3×3 convolutions with BatchNorm and ReLU, max pooling 3 after each block; one dense layer.

  `blocks` holds the channels of each convolution as multiples of the width.
  """

  num_classes: int
  initial: str
  conv: str
  width: int
  blocks: tuple[tuple[int, ...], ...]
  bias: bool

  @nn.compact
  def __call__(self, images: jax.Array, train: bool = False) -> jax.Array:
    if min(images.shape[1:3]) < 9:
      raise errors.UsageError(
        f'convnet pools 9×9 pixels to one: images of {images.shape[1]}×{images.shape[2]} are too small'
      )
    x = images
    for block in self.blocks:
      for multiple in block:
        features = multiple * self.width
        x = layers.Conv(features, 3, self.initial, padding=1, formulation=self.conv, bias=self.bias)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))  # PyTorch's default momentum
      x = layers.max_pool(x, 3)
    return layers.Dense(self.num_classes, self.initial)(layers.flatten(x))


@builtin
def convnet(num_classes: int, init: str = 'explicit', conv: str | None = None, *, width: Channels = 64) -> Model:
  """Returns the ConvNet of Geiping et al. (2020), for images of at least 9×9 pixels.

  Its convolutions have `w, 2w, 2w, 4w, 4w, 4w` channels, pooling, `4w, 4w`, pooling. These are eight, as in the
  published code; papers count eight or nine.

  Args:
    num_classes, init, conv: as for `gradleak.models.cnn`.
    width: w; 64 in Geiping's and GradDefense's work, 32 in DCS²'s.
  """
  return from_flax(ConvNet(num_classes, init, conv, width, ((1, 2, 2, 4, 4, 4), (4, 4)), bias=True))


@builtin
def convnet9(num_classes: int, init: str = 'explicit', conv: str | None = None, *, width: Channels = 64) -> Model:
  """Returns FFL's ConvNet: a ninth convolution of 4w channels before the last pooling; arguments as for `convnet`.

  Its convolutions have no biases: with ten classes and colour images it has 3,493,706 parameters, the 3.49 M of FFL's
  table 2; with biases it would have 3.50 M.
  """
  return from_flax(ConvNet(num_classes, init, conv, width, ((1, 2, 2, 4, 4, 4), (4, 4, 4)), bias=False))
