"""Vision transformers (Dosovitskiy et al. 2021, An Image is Worth 16×16 Words), in the sizes of Touvron et al. 2021."""

from typing import Annotated

import jax
import jax.numpy as jnp
from flax import linen as nn

from gradleak.core import errors
from gradleak.core.settings import Range
from gradleak.models import layers
from gradleak.models.builtin import Pixels, Width, builtin, standardised
from gradleak.models.model import Model


def patches(images: jax.Array, size: int) -> jax.Array:
  """Returns the patches of images [N, H, W, C], row by row: [N, H/size · W/size, size·size·C].

  The pixels of a patch are ordered (row, column, channel).

  Raises:
    UsageError: if a side is no multiple of the patch.
  """
  count, height, width, channels = images.shape
  if height % size or width % size:
    raise errors.UsageError(
      f'a vision transformer with patch={size} needs images whose sides are multiples of {size}, got {height}×{width}'
    )
  cut = images.reshape(count, height // size, size, width // size, size, channels).transpose(0, 1, 3, 2, 4, 5)
  return cut.reshape(count, -1, size * size * channels)


class PatchEmbedding(nn.Module):
  """One dense layer on each patch: a convolution whose stride is its size."""

  initial: str
  patch: int
  width: int

  @nn.compact
  def __call__(self, images: jax.Array) -> jax.Array:
    return layers.Dense(self.width, self.initial, name='proj')(patches(images, self.patch))


class Tokens(nn.Module):
  """Puts a class token before the tokens of the patches, and adds an embedding of each position.

  Both start from N(0, 0.02²), as published.
  """

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    count, tokens, width = x.shape
    normal = nn.initializers.normal(0.02, jnp.float32)
    position = self.param('pos_embed', normal, (tokens + 1, width))
    first = self.param('cls_token', normal, (width,))
    x = jnp.concatenate([jnp.broadcast_to(first.reshape(1, 1, -1), (count, 1, width)), x], axis=1)
    return x + position.reshape(1, tokens + 1, width)


class Attention(nn.Module):
  """Attention of all tokens to all, with dense layers for queries, keys, values and the result."""

  initial: str
  heads: int

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    query, key, value = (layers.Dense(x.shape[-1], self.initial, name=name)(x) for name in 'qkv')
    return layers.Dense(x.shape[-1], self.initial, name='proj')(layers.attention(query, key, value, self.heads))


class Mlp(nn.Module):
  """Two dense layers on each token, with four times as many features and GELU between."""

  initial: str

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    y = jax.nn.gelu(layers.Dense(4 * x.shape[-1], self.initial, name='fc1')(x), approximate=False)
    return layers.Dense(x.shape[-1], self.initial, name='fc2')(y)


class Block(nn.Module):
  """Attention and dense layers, each on a LayerNorm of its input and added to it."""

  initial: str
  heads: int

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    x = x + Attention(self.initial, self.heads, name='attn')(_layer_norm('norm1')(x))
    return x + Mlp(self.initial, name='mlp')(_layer_norm('norm2')(x))


def _layer_norm(name: str) -> nn.Module:
  return nn.LayerNorm(epsilon=1e-6, use_fast_variance=False, name=name)


class VisionTransformer(nn.Module):
  """A dense layer on patches, class token and positions, blocks, LayerNorm; a dense layer on the class token.

  Modules and their parameters bear the names of timm's.
  """

  num_classes: int
  initial: str
  patch: int
  depth: int
  width: int
  heads: int

  @nn.compact
  def __call__(self, images: jax.Array) -> jax.Array:
    x = PatchEmbedding(self.initial, self.patch, self.width, name='patch_embed')(images)
    x = Tokens(name='tokens')(x)
    for block in range(self.depth):
      x = Block(self.initial, self.heads, name=f'blocks_{block}')(x)
    x = _layer_norm('norm')(x)
    return layers.Dense(self.num_classes, self.initial, name='linear')(x[:, 0])


def _vit(name: str, num_classes: int, init: str, patch: int, depth: int, width: int, heads: int, pixels: str) -> Model:
  if width % heads:
    raise errors.UsageError(f'{name}(heads) is {heads}, expected a divisor of the width {width}')
  return standardised(VisionTransformer(num_classes, init, patch, depth, width, heads), pixels)


@builtin
def vit_tiny(
  num_classes: int,
  init: str = 'explicit',
  conv: str | None = None,
  *,
  patch: Annotated[int, Range(1, 1024)] = 4,
  depth: Annotated[int, Range(1, 128)] = 12,
  width: Width = 192,
  heads: Width = 3,
  pixels: Pixels = 'unit',
) -> Model:
  """Returns ViT-Tiny (Touvron et al. 2021): 12 blocks of 192 features and 3 heads, LayerNorm first, exact GELU.

  With `patch=16` on 224×224 pixels and 1,000 classes it has 5,717,416 parameters, timm's `vit_tiny_patch16_224`.

  Args:
    num_classes, init: as for `gradleak.models.cnn`; `init` is of the dense layers. With 'explicit' the attention is
      nearly one-hot: 'default' is meant for this network.
    conv: not used; the network has no convolution.
    patch: side of the square patches in pixels, which divides the sides of the images; the published networks have 16.
    depth: number of blocks.
    width: features of a token; the dense layers of a block have four times as many.
    heads: of the attention; a divisor of the width.
    pixels: as for `gradleak.models.resnet20`; most of timm's weights expect 'half', DeiT's 'imagenet'.

  Raises:
    UsageError: for a width that the heads do not divide; at `init` and when applied, for images whose sides are no
      multiples of the patch.
  """
  del conv
  return _vit('vit_tiny', num_classes, init, patch, depth, width, heads, pixels)


@builtin
def vit_small(
  num_classes: int,
  init: str = 'explicit',
  conv: str | None = None,
  *,
  patch: Annotated[int, Range(1, 1024)] = 4,
  depth: Annotated[int, Range(1, 128)] = 12,
  width: Width = 384,
  heads: Width = 6,
  pixels: Pixels = 'unit',
) -> Model:
  """Returns ViT-Small: `vit_tiny` of 384 features and 6 heads; 22,050,664 parameters for ImageNet at `patch=16`."""
  del conv
  return _vit('vit_small', num_classes, init, patch, depth, width, heads, pixels)
