"""Residual networks (He et al. 2016, Deep Residual Learning for Image Recognition), by default for small images."""

import functools
from collections.abc import Callable
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from gradleak.core import errors
from gradleak.core.settings import Choice
from gradleak.models import layers, repeated
from gradleak.models.builtin import Channels, Pixels, builtin, standardised
from gradleak.models.model import Model

Norm = Annotated[str, Choice(('batch', 'group'))]
Stem = Annotated[str, Choice(('cifar', 'imagenet'))]


def _norm(kind: str, train: bool, name: str) -> nn.Module:
  """Returns BatchNorm or GroupNorm with PyTorch's constants: the running averages' momentum, and ε added to σ²."""
  if kind == 'batch':
    return nn.BatchNorm(use_running_average=not train, momentum=0.9, epsilon=1e-5, name=name)
  return nn.GroupNorm(num_groups=2, epsilon=1e-5, name=name)


def pad_shortcut(x: jax.Array, features: int, stride: int) -> jax.Array:
  """Returns x [N, H, W, C] at every `stride`-th pixel, its channels padded with zeros to `features`, evenly."""
  missing = features - x.shape[-1]
  return jnp.pad(x[:, ::stride, ::stride], ((0, 0), (0, 0), (0, 0), (missing // 2, missing - missing // 2)))


class _Block(nn.Module):
  """What residual blocks have in common.

  If the shapes differ, the shortcut is a 1×1 convolution with a norm (`project`, option B of the paper) or has no
  parameters (option A, `pad_shortcut`).
  """

  features: int
  stride: int
  initial: str
  conv: str
  norm: str
  project: bool


def _with_shortcut(
  block: _Block,
  x: jax.Array,
  y: jax.Array,
  conv: Callable[..., layers.Conv],
  norm: Callable[..., nn.Module],
) -> jax.Array:
  """Returns the output of a block with input x and residual y; makes the modules of its shortcut."""
  features = y.shape[-1]
  if x.shape != y.shape and block.project:
    x = conv(features, 1, stride=block.stride, name='shortcut_conv')(x)
    x = norm(name='shortcut_norm')(x)
  elif x.shape != y.shape:
    x = pad_shortcut(x, features, block.stride)
  return nn.relu(y + x)


class BasicBlock(_Block):
  """Two 3×3 convolutions with norms, the first with the block's stride, and the shortcut around both."""

  @nn.compact
  def __call__(self, x: jax.Array, train: bool) -> jax.Array:
    conv = functools.partial(layers.Conv, initial=self.initial, formulation=self.conv, bias=False)
    norm = functools.partial(_norm, self.norm, train)
    y = conv(self.features, 3, stride=self.stride, padding=1, name='conv1')(x)
    y = nn.relu(norm(name='norm1')(y))
    y = conv(self.features, 3, padding=1, name='conv2')(y)
    y = norm(name='norm2')(y)
    return _with_shortcut(self, x, y, conv, norm)


class Bottleneck(_Block):
  """A convolution of `1×1`, one of `3×3` and one of `1×1`, with norms, and the shortcut around all three. The last has
  4·`features` channels.

  The 3×3 convolution has the block's stride, as in torchvision; in the paper it is the first 1×1 convolution.
  """

  @nn.compact
  def __call__(self, x: jax.Array, train: bool) -> jax.Array:
    conv = functools.partial(layers.Conv, initial=self.initial, formulation=self.conv, bias=False)
    norm = functools.partial(_norm, self.norm, train)
    y = nn.relu(norm(name='norm1')(conv(self.features, 1, name='conv1')(x)))
    y = conv(self.features, 3, stride=self.stride, padding=1, name='conv2')(y)
    y = nn.relu(norm(name='norm2')(y))
    y = norm(name='norm3')(conv(4 * self.features, 1, name='conv3')(y))
    return _with_shortcut(self, x, y, conv, norm)


class ResNet(nn.Module):
  """A stem, stages of residual blocks, the mean over all pixels, one dense layer.

  The stages have w, 2w, 4w, … features; all but the first halve the image. The stem 'cifar' is a `3×3` convolution of
  stride 1. 'imagenet' is a `7×7` convolution with stride 2, and max pooling of `3×3` with stride 2.
  """

  num_classes: int
  initial: str
  conv: str
  width: int
  norm: str
  blocks: tuple[int, ...]
  project: bool
  bottleneck: bool = False
  stem: str = 'cifar'

  @nn.compact
  def __call__(self, images: jax.Array, train: bool = False) -> jax.Array:
    size, stride = (3, 1) if self.stem == 'cifar' else (7, 2)
    x = layers.Conv(self.width, size, self.initial, stride, size // 2, self.conv, bias=False, name='conv1')(images)
    x = nn.relu(_norm(self.norm, train, 'norm1')(x))
    if self.stem == 'imagenet':
      x = layers.overlapping_max_pool(x, 3, 2, 1)
    for stage, blocks in enumerate(self.blocks):
      common = (self.initial, self.conv, self.norm, self.project)
      make = functools.partial(Bottleneck if self.bottleneck else BasicBlock, self.width * 2**stage)
      x = make(2 if stage > 0 else 1, *common, name=f'layer{stage + 1}_0')(x, train)
      names = [f'layer{stage + 1}_{block}' for block in range(1, blocks)]
      x = repeated.chain(self, functools.partial(make, 1, *common), names, x, train)
    return layers.Dense(self.num_classes, self.initial, name='linear')(jnp.mean(x, axis=(1, 2)))


class _Body(NamedTuple):
  """The blocks of each stage, and of what kind they are, see `_Block`."""

  blocks: tuple[int, ...]
  project: bool = True
  bottleneck: bool = False


def _resnet(
  name: str,
  num_classes: int,
  init: str,
  conv: str | None,
  width: int,
  norm: str,
  pixels: str,
  body: _Body,
  stem: str = 'cifar',
) -> Model:
  if norm == 'group' and width % 2:
    raise errors.UsageError(f'{name}(width) is {width}, expected an even number for the two groups of norm=group')
  return standardised(ResNet(num_classes, init, conv, width, norm, *body, stem), pixels)


@builtin
def resnet20(
  num_classes: int,
  init: str = 'explicit',
  conv: str | None = None,
  *,
  width: Channels = 16,
  norm: Norm = 'batch',
  pixels: Pixels = 'unit',
) -> Model:
  """Returns ResNet-20 for CIFAR (He et al. 2016, section 4.2): three stages of three blocks, shortcuts of option A.

  269,722 parameters with ten classes and colour images.

  Args:
    num_classes, init, conv: as for `gradleak.models.cnn`. Norms start at scale 1 and shift 0.
    width: channels of the first stage; 16 in the paper.
    norm: 'batch', or 'group' with two groups in each layer, often used in place of BatchNorm in federated learning
      (Reddi et al. 2021).
    pixels: 'unit' uses them as they are, in [0, 1]; 'imagenet' standardises each channel by ImageNet's mean and
      standard deviation, as the published weights of this network expect, and 'half' by 0.5 and 0.5. A grey image then
      counts as three equal channels.

  Raises:
    UsageError: for an odd width with `norm='group'`.
  """
  return _resnet('resnet20', num_classes, init, conv, width, norm, pixels, _Body((3, 3, 3), project=False))


@builtin
def resnet56(
  num_classes: int,
  init: str = 'explicit',
  conv: str | None = None,
  *,
  width: Channels = 16,
  norm: Norm = 'batch',
  pixels: Pixels = 'unit',
) -> Model:
  """Returns ResNet-56 for CIFAR: `resnet20` with nine blocks in each stage.

  853,018 parameters with ten classes and colour images.
  """
  return _resnet('resnet56', num_classes, init, conv, width, norm, pixels, _Body((9, 9, 9), project=False))


@builtin
def resnet18(
  num_classes: int,
  init: str = 'explicit',
  conv: str | None = None,
  *,
  width: Channels = 64,
  norm: Norm = 'batch',
  pixels: Pixels = 'unit',
  stem: Stem = 'cifar',
) -> Model:
  """Returns ResNet-18: four stages of two blocks, shortcuts of option B, as in the paper's networks for ImageNet.

  With the stem for CIFAR it has 11,173,962 parameters with ten classes and colour images; it is FFL's second network.

  Args:
    num_classes, init, conv, width, norm, pixels: as for `resnet20`.
    stem: 'cifar' is a 3×3 convolution at stride 1; 'imagenet' one of 7×7 at stride 2 and max pooling 3×3 at stride 2,
      as in torchvision, whose published weights then fit with `pixels='imagenet'`.

  Raises:
    UsageError: as for `resnet20`.
  """
  return _resnet('resnet18', num_classes, init, conv, width, norm, pixels, _Body((2, 2, 2, 2)), stem)


def _deeper(name: str, blocks: tuple[int, ...], bottleneck: bool, doc: str) -> Callable[..., Model]:
  """Returns the factory of a `resnet18` with other blocks; `doc` is its docstring."""

  def network(
    num_classes: int,
    init: str = 'explicit',
    conv: str | None = None,
    *,
    width: Channels = 64,
    norm: Norm = 'batch',
    pixels: Pixels = 'unit',
    stem: Stem = 'cifar',
  ) -> Model:
    return _resnet(name, num_classes, init, conv, width, norm, pixels, _Body(blocks, bottleneck=bottleneck), stem)

  network.__name__ = network.__qualname__ = name
  network.__doc__ = doc
  return builtin(network)


resnet34 = _deeper(
  'resnet34', (3, 4, 6, 3), False, 'Returns ResNet-34: `resnet18` with `(3, 4, 6, 3)` blocks in its stages.'
)
resnet50 = _deeper(
  'resnet50',
  (3, 4, 6, 3),
  True,
  'Returns ResNet-50: `(3, 4, 6, 3)` bottleneck blocks with outputs of four times the width; as `resnet18` else.',
)
resnet101 = _deeper('resnet101', (3, 4, 23, 3), True, 'Returns ResNet-101: `resnet50` with `(3, 4, 23, 3)` blocks.')
resnet152 = _deeper(
  'resnet152',
  (3, 8, 36, 3),
  True,
  'Returns ResNet-152: `resnet50` with `(3, 8, 36, 3)` blocks.\n\n'
  '58,156,618 parameters with the stem for CIFAR, ten classes and colour images.',
)
