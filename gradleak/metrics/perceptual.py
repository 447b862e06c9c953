"""Metrics on features of a network: LPIPS, whose networks are read from files, and FMSE, on the attacked model itself.

LPIPS follows Zhang, Isola, Efros, Shechtman, Wang: The Unreasonable Effectiveness of Deep Features as a Perceptual
Metric, CVPR 2018. Its weights are version 0.1 of the published ones.
"""

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gradleak.core import errors
from gradleak.metrics import pixel
from gradleak.models import torch_weights

# Mean and scale of the networks' inputs, for pixels in [−1, 1].
_SHIFT = np.asarray([-0.030, -0.088, -0.188], np.float32).reshape(1, 1, 1, 3)
_SCALE = np.asarray([0.458, 0.448, 0.450], np.float32).reshape(1, 1, 1, 3)
_TINY = 1e-10  # added to the norm of a feature vector


class _Conv(NamedTuple):
  """A convolution and a ReLU; `place` is its number in torchvision's `features`."""

  place: int
  inputs: int
  outputs: int
  size: int = 3
  stride: int = 1
  padding: int = 1

  def shapes(self) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of its tensors by name, in PyTorch's layout."""
    return _tensor_shapes(f'features.{self.place}', self.inputs, self.outputs, self.size)

  def __call__(self, tensors: dict[str, jax.Array], images: jax.Array) -> jax.Array:
    return _convolved(tensors, f'features.{self.place}', images, self.stride, self.padding)


class _Fire(NamedTuple):
  """SqueezeNet's module: a `1×1` convolution to `squeezed` channels, then a `1×1` and a `3×3` one to `expanded`
  channels each.
  """

  place: int
  inputs: int
  squeezed: int
  expanded: int

  def shapes(self) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of its tensors by name, in PyTorch's layout."""
    name = f'features.{self.place}'
    return {
      **_tensor_shapes(f'{name}.squeeze', self.inputs, self.squeezed, 1),
      **_tensor_shapes(f'{name}.expand1x1', self.squeezed, self.expanded, 1),
      **_tensor_shapes(f'{name}.expand3x3', self.squeezed, self.expanded, 3),
    }

  def __call__(self, tensors: dict[str, jax.Array], images: jax.Array) -> jax.Array:
    name = f'features.{self.place}'
    squeezed = _convolved(tensors, f'{name}.squeeze', images, 1, 0)
    parts = [
      _convolved(tensors, f'{name}.expand{side}x{side}', squeezed, 1, padding) for side, padding in ((1, 0), (3, 1))
    ]
    return jnp.concatenate(parts, axis=-1)


class _Pool(NamedTuple):
  """A maximum over `size`×`size` pixels in steps of 2; with `ceil`, a last window may reach over the edge."""

  size: int
  ceil: bool = False

  def shapes(self) -> dict[str, tuple[int, ...]]:
    """Returns nothing: it has no tensors."""
    return {}

  def __call__(self, tensors: dict[str, jax.Array], images: jax.Array) -> jax.Array:
    del tensors
    over = [(side - self.size) % 2 if self.ceil else 0 for side in images.shape[1:3]]
    padding = ((0, 0), (0, over[0]), (0, over[1]), (0, 0))
    return jax.lax.reduce_window(images, -math.inf, jax.lax.max, (1, self.size, self.size, 1), (1, 2, 2, 1), padding)


class _Backbone(NamedTuple):
  """A network whose features LPIPS compares.

  Attributes:
    title: what it is called.
    stages: its layers; the output of each stage is compared.
    channels: of these outputs.
    smallest: the least side of an image, in pixels, of which every stage has an output.
  """

  title: str
  stages: tuple[tuple[Any, ...], ...]
  channels: tuple[int, ...]
  smallest: int

  def shapes(self) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of all tensors by torchvision's names, in PyTorch's layout."""
    return {name: shape for stage in self.stages for layer in stage for name, shape in layer.shapes().items()}


_ALEX = _Backbone(
  'AlexNet',
  (
    (_Conv(0, 3, 64, 11, 4, 2),),
    (_Pool(3), _Conv(3, 64, 192, 5, 1, 2)),
    (_Pool(3), _Conv(6, 192, 384)),
    (_Conv(8, 384, 256),),
    (_Conv(10, 256, 256),),
  ),
  (64, 192, 384, 256, 256),
  31,
)
_VGG = _Backbone(
  'VGG-16',
  (
    (_Conv(0, 3, 64), _Conv(2, 64, 64)),
    (_Pool(2), _Conv(5, 64, 128), _Conv(7, 128, 128)),
    (_Pool(2), _Conv(10, 128, 256), _Conv(12, 256, 256), _Conv(14, 256, 256)),
    (_Pool(2), _Conv(17, 256, 512), _Conv(19, 512, 512), _Conv(21, 512, 512)),
    (_Pool(2), _Conv(24, 512, 512), _Conv(26, 512, 512), _Conv(28, 512, 512)),
  ),
  (64, 128, 256, 512, 512),
  16,
)
_SQUEEZE = _Backbone(
  'SqueezeNet 1.1',
  (
    (_Conv(0, 3, 64, 3, 2, 0),),
    (_Pool(3, ceil=True), _Fire(3, 64, 16, 64), _Fire(4, 128, 16, 64)),
    (_Pool(3, ceil=True), _Fire(6, 128, 32, 128), _Fire(7, 256, 32, 128)),
    (_Pool(3, ceil=True), _Fire(9, 256, 48, 192)),
    (_Fire(10, 384, 48, 192),),
    (_Fire(11, 384, 64, 256),),
    (_Fire(12, 512, 64, 256),),
  ),
  (64, 128, 256, 384, 384, 512, 512),
  17,
)
_BACKBONES = {'alex': _ALEX, 'vgg': _VGG, 'squeeze': _SQUEEZE}
BACKBONES = tuple(_BACKBONES)


@functools.partial(jax.tree_util.register_dataclass, data_fields=('tensors', 'heads'), meta_fields=('backbone',))
@dataclasses.dataclass(frozen=True, eq=False)
class LpipsWeights:
  """The weights of LPIPS, a pytree: `read_lpips` reads them.

  Attributes:
    backbone: a name of `BACKBONES`.
    tensors: of the backbone, by torchvision's names, in PyTorch's layout, float32.
    heads: of each layer that is compared, the weight of each channel, float32 [channels].
  """

  backbone: str
  tensors: dict[str, jax.Array]
  heads: tuple[jax.Array, ...]

  def digest(self) -> str:
    """Returns a text that tells these weights from others: sixteen hexadecimal digits of their SHA-256. On the host."""
    found = hashlib.sha256(self.backbone.encode())
    for array in jax.tree.leaves(self):
      found.update(np.ascontiguousarray(array))
    return found.hexdigest()[:16]


def lpips(reconstructions: jax.Array, truth: jax.Array, weights: LpipsWeights) -> jax.Array:
  """Returns LPIPS, the perceptual distance, of both images clipped to [0, 1]: 0 for equal images, larger is farther.

  Both are mapped to [−1, 1] and go through the backbone. After each compared layer, the feature vector at each position
  is scaled to norm 1. The squared differences, weighted by channel, are averaged over positions and summed over layers
  (Zhang et al. 2018, eq. 1). Equals the `lpips` package's `LPIPS(net=backbone)(2 * x - 1, 2 * y - 1)`.

  Images are compared at the size that they have. The weights were learned on patches of 64×64 pixels: at 32×32, the
  deeper layers of AlexNet have one position left. The least side is 31 pixels for 'alex', 16 for 'vgg' and 17 for
  'squeeze'. So only the latter two compare images of MNIST's size.

  Args:
    reconstructions: float [N, H, W, C], C = 3 or 1 (grey, repeated), pixels may exceed [0, 1].
    truth: the same shape, pixels in [0, 1].
    weights: of `read_lpips`.

  Returns:
    float32 [N], not negative where the weights of the channels are not; NaN for a pair with a non-finite pixel.

  Raises:
    UsageError: for what `mse` refuses, other numbers of channels, and smaller images.
  """
  x, y = pixel.clipped_pair(reconstructions, truth)
  weights = errors.check_instance('weights', weights, LpipsWeights, 'what gradleak.metrics.read_lpips returns')
  check_lpips_shape(weights.backbone, x.shape[1:])
  images = jnp.concatenate([x, y])
  if images.shape[3] == 1:
    images = jnp.repeat(images, 3, axis=3)
  images = (2 * images - 1 - _SHIFT) / _SCALE
  distance = jnp.zeros(len(x), x.dtype)
  for stage, head in zip(_BACKBONES[weights.backbone].stages, weights.heads, strict=True):
    for layer in stage:
      images = layer(weights.tensors, images)
    ours, theirs = jnp.split(_unit(images), 2)
    distance = distance + jnp.mean(jnp.square(ours - theirs), axis=(1, 2)) @ head
  return distance


def read_lpips(backbone: str = 'alex', *, backbone_weights: Any, heads: Any) -> LpipsWeights:
  """Returns the weights of `lpips` from two files, without PyTorch and without running their code.

  Args:
    backbone: 'alex' (AlexNet), 'vgg' (VGG-16) or 'squeeze' (SqueezeNet 1.1).
    backbone_weights: path of torchvision's weights of that network (`features.0.weight`, …; what else is in the file is
      left out), in a format of `gradleak.models.torch_weights.read`: torch.save, .safetensors or .npz.
    heads: path of LPIPS's own weights for it, version 0.1 (`lin0.model.1.weight`, or `lin0`, …), likewise.

  Raises:
    UsageError: for an unknown backbone, files that cannot be read, and tensors that are missing, of another shape, no
      floats or not finite; names them.
  """
  if backbone not in BACKBONES:
    raise errors.unknown('LPIPS backbone', backbone, BACKBONES)
  network = _BACKBONES[backbone]
  paths = errors.check_path('backbone_weights', backbone_weights), errors.check_path('heads', heads)
  tensors, linear = (torch_weights.read(path) for path in paths)
  shapes = {f'lin{i}': (channels,) for i, channels in enumerate(network.channels)}
  tensors = _checked(paths[0], tensors, network.shapes(), f"torchvision's {network.title}")
  linear = _checked(paths[1], _head_entries(linear), shapes, f'LPIPS with {network.title}')
  return LpipsWeights(backbone, tensors, tuple(linear.values()))


def check_lpips_shape(backbone: str, sample_shape: tuple[int, ...]) -> None:
  """Raises `UsageError` for images (H, W, C) that `lpips` cannot compare by this backbone."""
  height, width, channels = sample_shape
  if channels not in (1, 3):
    raise errors.UsageError(f'the images have {channels} channels, and LPIPS compares images of 1 or 3')
  least = {name: network.smallest for name, network in _BACKBONES.items()}
  if min(height, width) < least[backbone]:
    others = ', '.join(f'{side} for {name!r}' for name, side in least.items())
    raise errors.UsageError(
      f'the images have {height}×{width} pixels, too few for LPIPS with the backbone {backbone!r}; the least side is '
      f'{others}'
    )


def fmse(reconstructions: jax.Array, truth: jax.Array, features: Callable[[jax.Array], jax.Array]) -> jax.Array:
  """Returns the feature mean squared error (FMSE): that of what a network makes of both images, without clipping.

  The public code of Geiping et al. (Inverting Gradients, NeurIPS 2020, `reconstruct_image.py`) and breaching
  (`analysis.py`) print it under this name. Their features are the logits of the attacked model in evaluation mode, and
  the rows of an audit hold the same. It is no error in the frequency domain.

  Args:
    reconstructions: float [N, H, W, C].
    truth: the same shape.
    features: images [2N, H, W, C] -> float [2N, …], each image by itself, such as
      `lambda images: model.apply(variables, images, False, None)[0]`.

  Returns:
    float32 [N], inf beyond float32; NaN for a pair with a non-finite pixel.

  Raises:
    UsageError: for what `mse` refuses.
  """
  x, y = pixel.float_pair(reconstructions, truth)
  found = jnp.asarray(features(jnp.concatenate([x, y])), jnp.float32)
  found = jnp.mean(jnp.square(found[: len(x)] - found[len(x) :]).reshape(len(x), -1), axis=1)
  finite = jnp.isfinite(x).all(axis=(1, 2, 3)) & jnp.isfinite(y).all(axis=(1, 2, 3))  # a network may hide a NaN
  return jnp.where(finite, found, jnp.nan)


def _tensor_shapes(name: str, inputs: int, outputs: int, size: int) -> dict[str, tuple[int, ...]]:
  return {f'{name}.weight': (outputs, inputs, size, size), f'{name}.bias': (outputs,)}


def _convolved(tensors: dict[str, jax.Array], name: str, images: jax.Array, stride: int, padding: int) -> jax.Array:
  """Returns the ReLU of a convolution of images [N, H, W, C]."""
  found = jax.lax.conv_general_dilated(
    images,
    tensors[f'{name}.weight'],
    (stride, stride),
    [(padding, padding)] * 2,
    dimension_numbers=('NHWC', 'OIHW', 'NHWC'),
    precision=jax.lax.Precision.HIGHEST,
  )
  return jax.nn.relu(found + tensors[f'{name}.bias'].reshape(1, 1, 1, -1))


def _unit(features: jax.Array) -> jax.Array:
  """Returns the vectors along the last axis scaled to norm 1, zeros where all is zero; its gradient is finite there."""
  squares = jnp.sum(jnp.square(features), axis=-1, keepdims=True)
  return features / (jnp.sqrt(jnp.where(squares == 0, 1.0, squares)) + _TINY)


def _head_entries(entries: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Returns LPIPS's entries as `lin0`, …, [channels]; in its own files they are 1×1 convolutions to one channel."""
  return {
    name.removesuffix('.model.1.weight'): array[0, :, 0, 0] if array.shape == (1, array.size, 1, 1) else array
    for name, array in entries.items()
  }


def _checked(
  path: Any, entries: dict[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]], what: str
) -> dict[str, jax.Array]:
  """Returns the entries of a file that have these names, float32; `what` says whose weights are expected.

  Raises:
    UsageError: for entries that are missing, of another shape, no floats or not finite.
  """
  there = {name: entries[name] for name in shapes if name in entries}
  faults = {
    'missing': [name for name in shapes if name not in there],
    'of another shape': [
      f'{name} {array.shape}, expected {shapes[name]}' for name, array in there.items() if array.shape != shapes[name]
    ],
    'no floats': [
      f'{name} ({each.dtype})' for name, each in there.items() if not jnp.issubdtype(each.dtype, jnp.floating)
    ],
  }
  if not any(faults.values()):
    with np.errstate(over='ignore'):
      there = {name: array.astype(np.float32) for name, array in there.items()}
    faults = {'not finite': [name for name, array in there.items() if not np.isfinite(array).all()]}
  if any(faults.values()):
    listed = '; '.join(f'{kind}: {_some(names)}' for kind, names in faults.items() if names)
    raise errors.UsageError(f'the weights in {str(path)!r} are not those of {what}: {listed}')
  return {name: jnp.asarray(array) for name, array in there.items()}


def _some(names: list[str]) -> str:
  more = f' and {len(names) - 3} more' if len(names) > 3 else ''
  return ', '.join(names[:3]) + more
