"""What all built-in models share: checks of their arguments, and their names."""

import functools
from collections.abc import Callable
from typing import Annotated, Any, ParamSpec

from flax import linen as nn

from gradleak.core import errors, grammar, methods
from gradleak.core.reuse import reusable
from gradleak.core.settings import Choice, Range
from gradleak.models import convolution, layers
from gradleak.models.model import Model, from_flax

MAX_WIDTH = 65_536  # units of a layer
Width = Annotated[int, Range(1, MAX_WIDTH)]
Channels = Annotated[int, Range(1, 1024)]  # of a network whose later layers have several times as many
Activation = Annotated[str, Choice(layers.ACTIVATIONS)]

# Name -> mean and standard deviation of each channel, by which a network standardises pixels in [0, 1].
PIXELS: dict[str, tuple[tuple[float, ...] | None, tuple[float, ...] | None]] = {
  'unit': (None, None),
  'half': ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
  'imagenet': ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}

Pixels = Annotated[str, Choice(PIXELS)]

P = ParamSpec('P')


def builtin(factory: Callable[P, Model]) -> Callable[P, Model]:
  """Decorates a factory (num_classes, init, conv, **settings) -> `Model`.

  All arguments are checked, and `conv` None becomes the default formulation. The model is named after the factory and
  the given settings: 'lenet(width=24)'.
  """

  make = reusable(128)(factory)

  @functools.wraps(factory)
  def build(num_classes: int, init: str = 'explicit', conv: str | None = None, **settings: Any) -> Model:
    num_classes = int(errors.check_number('num_classes', num_classes, low=1, integer=True))
    layers.initialiser(init)
    conv = 'hybrid' if conv is None else conv
    errors.check_choice('convolution formulation', conv, convolution.FORMULATIONS)
    settings = methods.checked(factory, settings, 'model')
    model = make(num_classes, init, conv, **settings)  # type: ignore[arg-type]
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}
    return model._replace(name=grammar.written(factory.__name__, given)).built_in()

  return build  # type: ignore[return-value]


def standardised(module: nn.Module, pixels: str) -> Model:
  """Returns the model of a Linen module whose images are standardised as `pixels`, a name of `PIXELS`, says."""
  mean, std = PIXELS[pixels]
  return from_flax(module, mean=mean, std=std)


def parse_widths(name: str, widths: str | int | tuple[int, ...]) -> tuple[int, ...]:
  """Returns the widths of successive layers.

  Args:
    name: what messages call them.
    widths: integers in [1, `MAX_WIDTH`] joined by '-', a single integer, or a sequence of integers.

  Raises:
    UsageError: for anything else, and for an empty sequence.
  """
  try:
    parts = widths if isinstance(widths, tuple | list) else str(widths).split('-')
    found = tuple(int(part) if str(part).isdecimal() else 0 for part in parts)
  except ValueError:  # more digits than Python reads
    found = ()
  if not found or not all(1 <= width <= MAX_WIDTH for width in found):
    raise errors.UsageError(
      f"{name} is {errors.shown(widths)}, expected integers in [1, {MAX_WIDTH}] joined by '-', such as 128-64"
    )
  return found
