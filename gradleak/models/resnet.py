"""Residual networks for small images (He et al. 2016, Deep Residual Learning for Image Recognition)."""

import functools

import jax
import jax.numpy as jnp
from flax import linen as nn

from gradleak import errors
from gradleak.models import layers
from gradleak.models.builtin import builtin, check_width
from gradleak.models.model import Model, from_flax

NORMS = ('batch', 'group')
PIXELS = {'unit': (None, None), 'imagenet': ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))}


def _norm(kind: str, train: bool, name: str) -> nn.Module:
  """Returns BatchNorm or GroupNorm with PyTorch's constants: the running averages' momentum, and ε added to σ²."""
  if kind == 'batch':
    return nn.BatchNorm(use_running_average=not train, momentum=0.9, epsilon=1e-5, name=name)
  return nn.GroupNorm(num_groups=2, epsilon=1e-5, name=name)


def pad_shortcut(x: jax.Array, features: int, stride: int) -> jax.Array:
  """Returns x [N, H, W, C] at every `stride`-th pixel, its channels padded with zeros to `features`, evenly."""
  missing = features - x.shape[-1]
  return jnp.pad(x[:, ::stride, ::stride], ((0, 0), (0, 0), (0, 0), (missing // 2, missing - missing // 2)))


class BasicBlock(nn.Module):
  """Two 3×3 convolutions with norms, the first with the block's stride, and the shortcut around both.

  If the shapes differ, the shortcut is a 1×1 convolution with a norm (`project`, option B of the paper) or has no
  parameters (option A, `pad_shortcut`).
  """

  features: int
  stride: int
  initial: str
  conv: str
  norm: str
  project: bool

  @nn.compact
  def __call__(self, x: jax.Array, train: bool) -> jax.Array:
    conv = functools.partial(layers.Conv, self.features, initial=self.initial, formulation=self.conv, bias=False)
    y = conv(size=3, stride=self.stride, padding=1, name='conv1')(x)
    y = nn.relu(_norm(self.norm, train, 'norm1')(y))
    y = conv(size=3, padding=1, name='conv2')(y)
    y = _norm(self.norm, train, 'norm2')(y)
    if x.shape != y.shape and self.project:
      x = conv(size=1, stride=self.stride, name='shortcut_conv')(x)
      x = _norm(self.norm, train, 'shortcut_norm')(x)
    elif x.shape != y.shape:
      x = pad_shortcut(x, self.features, self.stride)
    return nn.relu(y + x)


class ResNet(nn.Module):
  """A 3×3 convolution of stride 1, stages of basic blocks, the mean over all pixels, one dense layer.

  The stages have w, 2w, 4w, … channels; all but the first halve the image.
  """

  num_classes: int
  initial: str
  conv: str
  width: int
  norm: str
  blocks: tuple[int, ...]
  project: bool

  @nn.compact
  def __call__(self, images: jax.Array, train: bool = False) -> jax.Array:
    x = layers.Conv(self.width, 3, self.initial, padding=1, formulation=self.conv, bias=False, name='conv1')(images)
    x = nn.relu(_norm(self.norm, train, 'norm1')(x))
    for stage, blocks in enumerate(self.blocks):
      for block in range(blocks):
        stride = 2 if stage > 0 and block == 0 else 1
        x = BasicBlock(
          self.width * 2**stage,
          stride,
          self.initial,
          self.conv,
          self.norm,
          self.project,
          name=f'layer{stage + 1}_{block}',
        )(x, train)
    return layers.Dense(self.num_classes, self.initial, name='linear')(jnp.mean(x, axis=(1, 2)))


def _resnet(
  name: str,
  num_classes: int,
  init: str,
  conv: str | None,
  width: int,
  norm: str,
  pixels: str,
  blocks: tuple[int, ...],
  project: bool,
) -> Model:
  width = check_width(f'{name}(width)', width, 1024)
  if norm not in NORMS:
    raise errors.unknown('norm', norm, NORMS)
  if norm == 'group' and width % 2:
    raise errors.UsageError(f'{name}(width) is {width}, expected an even number for the two groups of norm=group')
  if pixels not in PIXELS:
    raise errors.unknown('scale of the pixels', pixels, PIXELS)
  mean, std = PIXELS[pixels]
  return from_flax(ResNet(num_classes, init, conv, width, norm, blocks, project), mean=mean, std=std)


@builtin
def resnet20(
  num_classes: int,
  init: str = 'explicit',
  conv: str | None = None,
  *,
  width: int = 16,
  norm: str = 'batch',
  pixels: str = 'unit',
) -> Model:
  """Returns ResNet-20 for CIFAR (He et al. 2016, section 4.2): three stages of three blocks, shortcuts of option A.

  269,722 parameters with ten classes and colour images.

  Args:
    num_classes, init, conv: as for `gradleak.models.cnn`. Norms start at scale 1 and shift 0.
    width: channels of the first stage, an integer in [1, 1024]; 16 in the paper.
    norm: 'batch', or 'group' with two groups in each layer, often used in place of BatchNorm in federated learning
      (Reddi et al. 2021).
    pixels: 'unit' uses them as they are, in [0, 1]; 'imagenet' standardises each channel by ImageNet's mean and
      standard deviation, as the published weights of this network expect. A grey image then counts as three equal
      channels.

  Raises:
    UsageError: for a width out of range, an odd one with `norm='group'`, or an unknown word.
  """
  return _resnet('resnet20', num_classes, init, conv, width, norm, pixels, (3, 3, 3), project=False)


@builtin
def resnet18(
  num_classes: int,
  init: str = 'explicit',
  conv: str | None = None,
  *,
  width: int = 64,
  norm: str = 'batch',
  pixels: str = 'unit',
) -> Model:
  """Returns ResNet-18 with the stem for CIFAR: 3×3 at stride 1 and no pooling before four stages of two blocks.

  Shortcuts are of option B, as in the paper's networks for ImageNet; 11,173,962 parameters with ten classes and
  colour images; it is FFL's second network. Settings are those of `resnet20`.
  """
  return _resnet('resnet18', num_classes, init, conv, width, norm, pixels, (2, 2, 2, 2), project=True)
