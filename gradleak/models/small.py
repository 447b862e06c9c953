"""Small networks of the gradient-leakage literature: Fidel's MLP and CNN, and LeNet."""

from typing import Annotated

import jax
from flax import linen as nn

from gradleak.core import errors
from gradleak.core.settings import Range
from gradleak.models import layers
from gradleak.models.builtin import Activation, Width, builtin, parse_widths
from gradleak.models.model import Model, from_flax

Dropout = Annotated[float, Range(0, 0.99)]


class Mlp(nn.Module):
  """Dense layers on the pixels of an image, or on a row of a table."""

  num_classes: int
  initial: str
  activation: str
  dropout: float
  widths: tuple[int, ...]

  @nn.compact
  def __call__(self, images: jax.Array, train: bool = False) -> jax.Array:
    return _classify(self, layers.flatten(images))


class Cnn(nn.Module):
  """A 3×3 convolution (valid, linear) and max pooling 2 before dense layers."""

  num_classes: int
  initial: str
  conv: str
  activation: str
  dropout: float
  width: int
  widths: tuple[int, ...]

  @nn.compact
  def __call__(self, images: jax.Array, train: bool = False) -> jax.Array:
    if min(images.shape[1:3]) < 4:
      raise errors.UsageError(f'cnn needs images of at least 4×4 pixels, got {images.shape[1]}×{images.shape[2]}')
    x = layers.Conv(self.width, 3, self.initial, formulation=self.conv)(images)
    return _classify(self, layers.flatten(layers.max_pool(x, 2)))


def _classify(module: Mlp | Cnn, x: jax.Array) -> jax.Array:
  """Returns the logits of features [N, F]: dense layers of the module's `widths`, and one for the classes.

  The first has the module's activation, then dropout; the others have ReLU.
  """
  first, *others = module.widths
  x = layers.activation(module.activation)(layers.Dense(first, module.initial)(x))
  x = nn.Dropout(module.dropout, deterministic=False)(x)
  for width in others:
    x = nn.relu(layers.Dense(width, module.initial)(x))
  return layers.Dense(module.num_classes, module.initial)(x)


class LeNet(nn.Module):
  """5×5 convolutions of `width` channels with padding 2, an activation after each; one dense layer."""

  num_classes: int
  initial: str
  conv: str
  activation: str
  width: int
  strides: tuple[int, ...]

  @nn.compact
  def __call__(self, images: jax.Array, train: bool = False) -> jax.Array:
    x = images
    for stride in self.strides:
      x = layers.Conv(self.width, 5, self.initial, stride=stride, padding=2, formulation=self.conv)(x)
      x = layers.activation(self.activation)(x)
    return layers.Dense(self.num_classes, self.initial)(layers.flatten(x))


@builtin
def mlp(
  num_classes: int,
  init: str = 'explicit',
  conv: str | None = None,
  *,
  widths: str | int | tuple[int, ...] = '128-128-64',
  activation: Activation = 'relu',
  dropout: Dropout = 0.0,
) -> Model:
  """Returns Fidel's fully connected network (Enthoven & Al-Ars 2021, table I), for images and rows of tables.

  Args:
    num_classes: number of logits.
    init: 'explicit' or 'default', see `gradleak.models.layers.initialiser`.
    conv: not used; the network has no convolution.
    widths: units of the hidden layers, as '128-64' or (128, 64).
    activation: of the first layer, a name of `layers.ACTIVATIONS`; the others have ReLU.
    dropout: rate after the first layer.

  Raises:
    UsageError: for other widths.
  """
  del conv
  return from_flax(Mlp(num_classes, init, activation, dropout, parse_widths('mlp(widths)', widths)), axes=None)


@builtin
def cnn(
  num_classes: int,
  init: str = 'explicit',
  conv: str | None = None,
  *,
  width: Width = 32,
  widths: str | int | tuple[int, ...] = '128-64',
  activation: Activation = 'relu',
  dropout: Dropout = 0.0,
) -> Model:
  """Returns Fidel's convolutional network (Enthoven & Al-Ars 2021, table II), for images of at least 4×4 pixels.

  Args:
    num_classes, init: as for `mlp`.
    conv: a name of `convolution.FORMULATIONS`, None for the default; it affects speed only.
    width: channels of the convolution, which has no activation.
    widths: units of the hidden dense layers, as '128-64' or (128, 64).
    activation, dropout: of the first dense layer, as for `mlp`.

  Raises:
    UsageError: for other widths.
  """
  return from_flax(Cnn(num_classes, init, conv, activation, dropout, width, parse_widths('cnn(widths)', widths)))


@builtin
def lenet(
  num_classes: int,
  init: str = 'explicit',
  conv: str | None = None,
  *,
  width: Width = 12,
  activation: Activation = 'sigmoid',
) -> Model:
  """Returns the LeNet of DLG's published code (Zhu et al. 2019): three convolutions, 768 features at 32×32.

  Args:
    num_classes, init, conv: as for `cnn`.
    width: channels of each convolution.
    activation: after each convolution, a name of `layers.ACTIVATIONS`.
  """
  return from_flax(LeNet(num_classes, init, conv, activation, width, (2, 2, 1)))


@builtin
def lenet4(
  num_classes: int,
  init: str = 'explicit',
  conv: str | None = None,
  *,
  width: Width = 12,
  activation: Activation = 'sigmoid',
) -> Model:
  """Returns the LeNet with four convolutions of Soteria, GradDefense and OUTPOST; arguments are those of `lenet`."""
  return from_flax(LeNet(num_classes, init, conv, activation, width, (2, 2, 1, 1)))
