"""Networks for rows of tables [N, D]: logistic regression, a residual MLP, FT-Transformer (Gorishniy et al. 2021)."""

from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from gradleak.core import errors
from gradleak.core.settings import Choice, Range
from gradleak.core.trees import Tree
from gradleak.models import layers
from gradleak.models.builtin import Width, builtin, parse_widths
from gradleak.models.model import Model, Normalisation, check_unnormalised, from_flax, wrapped
from gradleak.models.small import Dropout
from gradleak.models.vit import Attention

CITATIONS = ('Gorishniy, Rubachev, Khrulkov, Babenko: Revisiting Deep Learning Models for Tabular Data. NeurIPS 2021.',)
NORMS = ('batch', 'layer', 'identity')
Depth = Annotated[int, Range(1, 128)]


class Logistic(nn.Module):
  """One dense layer."""

  num_classes: int
  initial: str

  @nn.compact
  def __call__(self, rows: jax.Array) -> jax.Array:
    return layers.Dense(self.num_classes, self.initial)(layers.flatten(rows))


class ResidualMlp(nn.Module):
  """A dense layer, residual blocks of two dense layers each, and a dense layer for the classes."""

  num_classes: int
  initial: str
  width: int
  depth: int
  factor: int
  norm: str
  dropout: float

  @nn.compact
  def __call__(self, rows: jax.Array, train: bool = False) -> jax.Array:
    def dropped(x: jax.Array) -> jax.Array:
      return nn.Dropout(self.dropout, deterministic=False)(x)

    def normed(x: jax.Array) -> jax.Array:
      if self.norm == 'batch':
        return nn.BatchNorm(use_running_average=not train, momentum=0.9, epsilon=1e-5)(x)
      return x if self.norm == 'identity' else nn.LayerNorm(epsilon=1e-5, use_fast_variance=False)(x)

    x = layers.Dense(self.width, self.initial)(layers.flatten(rows))
    for _ in range(self.depth):
      y = nn.relu(layers.Dense(self.factor * self.width, self.initial)(normed(x)))
      x = x + dropped(layers.Dense(self.width, self.initial)(dropped(y)))
    return layers.Dense(self.num_classes, self.initial)(nn.relu(normed(x)))


class FeatureTokens(nn.Module):
  """A token for each column, x W + b of its block of entries, behind one that all rows share.

  A block of one number is scaled, a one-hot block chooses a row of W. Both start from U(±1/√width), as published.
  """

  blocks: tuple[int, ...]
  width: int

  @nn.compact
  def __call__(self, rows: jax.Array) -> jax.Array:
    draw = layers.initialiser('default')(self.width)
    kernel = self.param('kernel', draw, (sum(self.blocks), self.width))
    bias = self.param('bias', draw, (len(self.blocks) + 1, self.width))
    parts, start = [jnp.zeros((len(rows), 1, self.width), rows.dtype)], 0
    for block in self.blocks:
      parts.append((rows[:, start : start + block] @ kernel[start : start + block])[:, jnp.newaxis])
      start += block
    return jnp.concatenate(parts, axis=1) + bias[jnp.newaxis]


class FtBlock(nn.Module):
  """Attention and a dense layer with ReGLU, each on a LayerNorm of its input (none in the first) and added to it."""

  initial: str
  heads: int
  hidden: int
  dropout: float
  first: bool

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    def dropped(x: jax.Array) -> jax.Array:
      return nn.Dropout(self.dropout, deterministic=False)(x)

    width = x.shape[-1]
    x = x + dropped(Attention(self.initial, self.heads, name='attn')(x if self.first else _layer_norm('norm1')(x)))
    y = layers.Dense(2 * self.hidden, self.initial, name='linear1')(_layer_norm('norm2')(x))
    value, gate = y[..., : self.hidden], y[..., self.hidden :]
    return x + dropped(layers.Dense(width, self.initial, name='linear2')(dropped(value * nn.relu(gate))))


def _layer_norm(name: str) -> nn.Module:
  return nn.LayerNorm(epsilon=1e-5, use_fast_variance=False, name=name)


class FtTransformer(nn.Module):
  """Tokens of columns, blocks, LayerNorm, ReLU and a dense layer on the token that all rows share."""

  num_classes: int
  initial: str
  blocks: tuple[int, ...]
  width: int
  heads: int
  depth: int
  dropout: float

  @nn.compact
  def __call__(self, rows: jax.Array) -> jax.Array:
    rows = layers.flatten(rows)
    blocks = self.blocks or (1,) * rows.shape[1]
    if sum(blocks) != rows.shape[1]:
      raise errors.UsageError(
        f'ft_transformer(columns) has {len(blocks)} columns of {sum(blocks)} entries, and rows have {rows.shape[1]}'
      )
    x = FeatureTokens(blocks, self.width, name='tokenizer')(rows)
    hidden = self.width * 4 // 3
    for place in range(self.depth):
      x = FtBlock(self.initial, self.heads, hidden, self.dropout, place == 0, name=f'blocks_{place}')(x)
    return layers.Dense(self.num_classes, self.initial, name='head')(nn.relu(_layer_norm('norm')(x[:, 0])))


@builtin
def logistic(num_classes: int, init: str = 'explicit', conv: str | None = None) -> Model:
  """Returns logistic regression: one dense layer with a bias, for rows of tables and images alike.

  Args:
    num_classes, init: as for `gradleak.models.mlp`.
    conv: not used; the network has no convolution.
  """
  del conv
  return from_flax(Logistic(num_classes, init), axes=None)


@builtin
def resnet_mlp(
  num_classes: int,
  init: str = 'explicit',
  conv: str | None = None,
  *,
  width: Width = 128,
  depth: Depth = 2,
  factor: Annotated[int, Range(1, 16)] = 2,
  norm: Annotated[str, Choice(NORMS)] = 'batch',
  dropout: Dropout = 0.0,
) -> Model:
  """Returns the residual MLP for tables (Gorishniy et al. 2021, section 3.2): BatchNorm, two dense layers, dropout.

  Args:
    num_classes, init: as for `gradleak.models.mlp`.
    conv: not used; the network has no convolution.
    width: features between the blocks.
    depth: number of blocks.
    factor: how many times as many features a block has inside.
    norm: 'batch' as published, 'layer', or 'identity' for none.
    dropout: rate behind each dense layer of a block.
  """
  del conv
  return from_flax(ResidualMlp(num_classes, init, width, depth, factor, norm, dropout), axes=None)._replace(
    citations=CITATIONS
  )


@builtin
def ft_transformer(
  num_classes: int,
  init: str = 'explicit',
  conv: str | None = None,
  *,
  columns: str | int | tuple[int, ...] = '',
  width: Width = 192,
  heads: Width = 8,
  depth: Depth = 3,
  dropout: Dropout = 0.0,
) -> Model:
  """Returns FT-Transformer (Gorishniy et al. 2021, section 3.3): a token per column, attention among columns, ReGLU.

  Args:
    num_classes, init: as for `gradleak.models.mlp`; 'default' is meant for this network.
    conv: not used; the network has no convolution.
    columns: entries of each column in an encoded row, as '1-1-5' or (1, 1, 5); by default one each. Programs take
      them from the table.
    width: features of a token, a multiple of the heads.
    heads: of the attention.
    depth: number of blocks.
    dropout: rate behind attention and dense layers.

  Raises:
    UsageError: for a width that the heads do not divide; when applied, for rows of another length.
  """
  del conv
  if width % heads:
    raise errors.UsageError(f'ft_transformer(heads) is {heads}, expected a divisor of the width {width}')
  blocks = parse_widths('ft_transformer(columns)', columns) if columns not in ('', ()) else ()
  module = FtTransformer(num_classes, init, blocks, width, heads, depth, dropout)
  return from_flax(module, axes=None)._replace(citations=CITATIONS)


def standardised(model: Model, mean: Any, std: Any) -> Model:
  """Returns a network that first takes each entry of a row less a mean, in units of a deviation.

  One-hot entries are standardised in this way in TabLeak's experiments. Closed forms know of it and read the rows as
  they are.

  Args:
    model: a network of rows.
    mean, std: floats [D], such as those of `gradleak.data.Schema.moments`.

  Raises:
    UsageError: for anything but two rows of equal length, or a deviation that is not positive; for a network that
      normalises its rows itself, or takes none.
  """
  check_unnormalised(model, 'standardised', axes=1)
  means, deviations = (
    errors.host_array(name, x).astype(np.float32).ravel() for name, x in (('mean', mean), ('std', std))
  )
  if means.shape != deviations.shape or not (deviations > 0).all() or not np.isfinite(means).all():
    raise errors.UsageError(
      f'mean and std are {means.shape} and {deviations.shape}, expected as many positive deviations'
    )

  def given(variables: Tree, rows: jax.Array) -> tuple[Tree, jax.Array]:
    return variables, (rows - means.astype(rows.dtype).reshape(1, -1)) / deviations.astype(rows.dtype).reshape(1, -1)

  known = Normalisation(tuple(map(float, means)), tuple(map(float, deviations)))
  return wrapped(model, f'standardised {model.name}', model.init, given, normalisation=known, axes=1)
