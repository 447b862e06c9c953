"""VGG networks (Simonyan & Zisserman 2015) with a head for small images."""

from typing import Annotated

import jax
import jax.numpy as jnp
from flax import linen as nn

from gradleak.core.settings import Choice
from gradleak.models import layers
from gradleak.models.builtin import Channels, Pixels, builtin, standardised
from gradleak.models.model import Model

NORMS = ('none', 'batch')

# Convolutions of each stage, with `w, 2w, 4w, 8w, 8w` channels: configurations A and D of the paper's table 1.
STAGES = {'vgg11': (1, 1, 2, 2, 2), 'vgg16': (2, 2, 3, 3, 3)}


class Vgg(nn.Module):
  """Stages of 3×3 convolutions with ReLU, max pooling 2 after each; the mean over all pixels, one dense layer.

  Modules bear the places of torchvision's `features`, in which ReLU and pooling count.
  """

  num_classes: int
  initial: str
  conv: str
  width: int
  norm: bool
  stages: tuple[int, ...]

  @nn.compact
  def __call__(self, images: jax.Array, train: bool = False) -> jax.Array:
    x, place = images, 0
    for stage, convolutions in enumerate(self.stages):
      for _ in range(convolutions):
        features = self.width * 2 ** min(stage, 3)
        x = layers.Conv(features, 3, self.initial, padding=1, formulation=self.conv, name=f'features_{place}')(x)
        if self.norm:
          place += 1
          norm = nn.BatchNorm(use_running_average=not train, momentum=0.9, epsilon=1e-5, name=f'features_{place}')
          x = norm(x)
        x = nn.relu(x)
        place += 2
      place += 1
      if min(x.shape[1:3]) > 1:
        x = layers.max_pool(x, 2)
    return layers.Dense(self.num_classes, self.initial, name='linear')(jnp.mean(x, axis=(1, 2)))


@builtin
def vgg11(
  num_classes: int,
  init: str = 'explicit',
  conv: str | None = None,
  *,
  width: Channels = 64,
  norm: Annotated[str | None, Choice(NORMS)] = None,
  pixels: Pixels = 'unit',
) -> Model:
  """Returns VGG-11, eight convolutions, with one dense layer on the means of its 8w feature maps.

  Images of fewer than 32 pixels a side are pooled until one is left. The published head of three dense layers, with 124
  million parameters, is for images of 224×224.

  Args:
    num_classes, init, conv: as for `gradleak.models.cnn`.
    width: w, the channels of the first stage; 64 in the paper.
    norm: None or 'none', or 'batch' for BatchNorm after each convolution, as in torchvision's `vgg11_bn`.
    pixels: as for `gradleak.models.resnet20`; torchvision's weights expect 'imagenet'.
  """
  return standardised(Vgg(num_classes, init, conv, width, norm == 'batch', STAGES['vgg11']), pixels)


@builtin
def vgg16(
  num_classes: int,
  init: str = 'explicit',
  conv: str | None = None,
  *,
  width: Channels = 64,
  norm: Annotated[str | None, Choice(NORMS)] = None,
  pixels: Pixels = 'unit',
) -> Model:
  """Returns VGG-16, thirteen convolutions (14,714,688 parameters on colour images); otherwise as `vgg11`."""
  return standardised(Vgg(num_classes, init, conv, width, norm == 'batch', STAGES['vgg16']), pixels)
