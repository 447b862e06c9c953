"""ConvNet with BatchNorm (Geiping et al. 2020; Soteria; GradDefense), width as a setting."""

from flax import linen as nn

from gradleak import errors
from gradleak.models import layers
from gradleak.models.model import from_flax


class ConvNet(nn.Module):
  """3×3 convolutions, BatchNorm, ReLU: w, 2w, 2w, 4w, 4w, 4w, pool 3, 4w, 4w, pool 3; one dense layer.

  Eight convolutions, as the published code builds; the papers count eight or nine.
  """

  num_classes: int
  initial: str
  conv: str
  width: int

  @nn.compact
  def __call__(self, images, train=False):
    if min(images.shape[1:3]) < 9:
      raise errors.UsageError(
        f'convnet pools 9×9 pixels to one: images of {images.shape[1]}×{images.shape[2]} are too small'
      )
    w = self.width
    x = images
    for block in ((w, 2 * w, 2 * w, 4 * w, 4 * w, 4 * w), (4 * w, 4 * w)):
      for features in block:
        x = layers.Conv(features, 3, self.initial, padding=1, formulation=self.conv)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
      x = layers.max_pool(x, 3)
    return layers.Dense(self.num_classes, self.initial)(layers.flatten(x))


def convnet(num_classes, init, conv, *, width: int = 64):
  """Returns the ConvNet of base width `width`: 64 in Geiping's and GradDefense's work, 32 in DCS²'s."""
  errors.check_number('convnet(width)', width, low=1, high=1024, integer=True)
  return from_flax(ConvNet(num_classes, init, conv, width))
