"""Normalisation of the pixels inside a network, so that clients and attacks keep to images in [0, 1]."""

from typing import Annotated

import jax
import jax.numpy as jnp

from gradleak.core import errors
from gradleak.core.reuse import reusable
from gradleak.core.settings import Choice, ranged
from gradleak.core.trees import Tree
from gradleak.models.model import ImageShape, Model, Normalisation, check_unnormalised, wrapped

# Name -> mean and standard deviation of each channel of the train split; of MNIST and CIFAR-10 as in DCS²'s code.
STATISTICS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
  'mnist': ((0.13066,), (0.30811,)),
  'cifar10': ((0.4914, 0.4822, 0.4465), (0.247, 0.243, 0.261)),
  'imagenet': ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}


@ranged
@reusable(128)
def normalised(model: Model, *, pixels: Annotated[str, Choice(STATISTICS)] = 'cifar10') -> Model:
  r"""Returns `model` with its input normalised: each channel less its mean, over its standard deviation.

  Its variables, layers and features are those of `model`. Closed forms that read the input of a first dense layer undo
  the normalisation, which the server knows.

  Formula:
    x' = (x - \mu_c) / \sigma_c \text{ for each channel } c

  Args:
    model: a `Model` of images that does not normalise them itself.
    pixels: whose mean and standard deviation, a name of `STATISTICS`.

  Raises:
    UsageError: for another model; at `init` and when applied, for images of another number of channels.
  """
  check_unnormalised(model, f'normalised(pixels={pixels})', axes=3)
  mean, std = STATISTICS[pixels]

  def check(channels: int) -> None:
    if channels != len(mean):
      raise errors.UsageError(
        f'normalised(pixels={pixels}) has statistics of {len(mean)} channel(s), and the images have {channels}'
      )

  def passed(images: jax.Array) -> jax.Array:
    check(images.shape[-1])
    centre, scale = (jnp.asarray(values, images.dtype).reshape(1, 1, 1, -1) for values in (mean, std))
    return (images - centre) / scale

  def init(key: jax.Array, sample_shape: ImageShape) -> Tree:
    check(sample_shape[-1])
    return model.init(key, sample_shape)

  return wrapped(
    model,
    f'{model.name}+normalised(pixels={pixels})',
    init,
    lambda variables, images: (variables, passed(images)),
    normalisation=Normalisation(mean, std),
    axes=3,
  ).built_in(model.named)
