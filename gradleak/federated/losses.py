"""What a client minimises: a loss of each sample, its mean or sum over a batch, and the targets that it takes.

Outputs and targets are floats of one shape, [N, …, outputs]. The axes between the first and the last are positions,
such as the pixels of a segmentation. Names, reductions and defaults are those of PyTorch.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax

from gradleak.core import errors, grammar, methods
from gradleak.core.settings import Choice, Fraction, NonNegative, Positive, Range
from gradleak.federated.targets import CLASSES, FLAGS, KINDS, SAMPLES, VALUES, Targets

REDUCTIONS = ('mean', 'sum')
_WEIGHTS = ('weight', 'positive')  # settings with a number for each output
Reduction = Annotated[str, Choice(REDUCTIONS)]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Loss(methods.Method):
  """A loss with its settings: (outputs, targets), floats [N, …, outputs], -> the loss of each sample, floats [N].

  Attributes:
    targets: the kind of targets.
    activation: what it applies to the outputs itself: 'softmax', 'sigmoid', or '' for nothing that is known.
    divisor: (targets, **settings) -> what the sum over a batch is divided by, for each sample, floats [N], and its own
      loss where it is not 0; None for 1.
    own: which targets the samples themselves give, a name of `Modality.targets`; '' where labels are the targets.
    hides: settings that say what of a sample is hidden from the model.
  """

  kind: str = 'loss'
  targets: Targets = CLASSES
  activation: str = ''
  divisor: Callable[..., jax.Array] | None = None
  own: str = ''
  hides: tuple[str, ...] = ()

  def __call__(self, outputs: jax.Array, targets: jax.Array) -> jax.Array:
    """Returns the loss of each sample, as that of a batch of one."""
    return self.factory(outputs, targets, **self.settings)

  def of_samples(self, samples: jax.Array, kind: Any, size: int | None = None) -> tuple[jax.Array, jax.Array]:
    """Returns (what the model is given of samples, the targets that they give themselves).

    Args:
      samples: of a modality, or what a search moves in their place.
      kind: the `Modality`.
      size: how many tokens the model embeds (`Model.vocabulary`); None for a model that does not say.

    Raises:
      UsageError: for samples that give none.
    """
    self.require_samples(kind)
    given = {name: self.settings[name] for name in self.hides}
    return kind.targets[self.own](samples, **given, **({} if size is None else {'size': size}))

  def require_samples(self, kind: Any) -> None:
    """Raises `UsageError` where the loss makes its targets of samples, and those of a modality give none."""
    if self.own and self.own not in kind.targets:
      raise errors.UsageError(f'the loss {self} predicts parts of a sample, and {kind.noun[1]} have none that it knows')

  @property
  def summed(self) -> bool:
    """Whether the losses of a batch are summed; else they are averaged."""
    return self.settings.get('reduction') == 'sum'

  @property
  def relative(self) -> bool:
    """Whether the part of a sample in the mean of a batch depends on the classes of the others, by their weights."""
    weighs = self.settings.get('weight') is not None and self.settings.get('average', 'weights') == 'weights'
    return weighs and self.divisor is not None and not self.summed

  def parts(self, targets: jax.Array) -> jax.Array:
    """Returns the part of each sample in a mean, floats [N]: its weight, 1 where classes have none."""
    if self.divisor is None or self.summed:
      return jnp.ones(targets.shape[:1], targets.dtype)
    return self.divisor(targets, **self.settings)

  def reduced(self, losses: jax.Array, targets: jax.Array, weights: jax.Array) -> jax.Array:
    """Returns the loss of a batch.

    Args:
      losses: of its samples, floats [N].
      targets: theirs.
      weights: of the samples, floats [N]; 0 for padding.
    """
    if self.summed:
      return jnp.sum(weights * losses)
    if self.divisor is None:
      return jnp.sum(weights * losses) / jnp.sum(weights)
    parts = self.parts(targets)
    total = jnp.sum(weights * parts)
    if self.own:  # a batch may have no position that counts
      total = not_zero(total)
    return jnp.sum(weights * not_zero(parts) * losses) / total

  def require_cross_entropy(self, what: str) -> None:
    """Raises `UsageError` for anything but the mean cross-entropy of classes, which `what` is derived for."""
    if self != cross_entropy():
      raise errors.UsageError(
        f'{what} needs the loss cross_entropy, and this client has {self}: '
        "give loss='cross_entropy' to gradleak.scenario"
      )

  def require_classes(self, what: str) -> None:
    """Raises `UsageError` for a loss whose targets are no classes, which `what` is derived for."""
    if self.targets is not CLASSES:
      raise errors.UsageError(f'{what} is for classes, and the loss {self} of this client takes {self.targets}')


def _loss(
  targets: Targets, activation: str = '', divisor: Callable | None = None, own: str = '', hides: tuple[str, ...] = ()
) -> Callable:
  """Returns the decorator that makes a function (outputs, targets, *, settings) a factory of `Loss`es."""

  def decorate(function: Callable) -> Callable[..., Loss]:
    @functools.wraps(function)
    def make(**settings: Any) -> Loss:
      given = {key: _numbers(key, value) if key in _WEIGHTS else value for key, value in settings.items()}
      return Loss(function, given, targets=targets, activation=activation, divisor=divisor, own=own, hides=hides)

    make.__signature__ = methods.signature(function)  # type: ignore[attr-defined]
    return make

  return decorate


def _numbers(name: str, given: Any) -> tuple[float, ...] | None:
  """Returns the weights of the outputs as numbers ≥ 0; raises `UsageError` for anything else."""
  if given is None:
    return None
  found = errors.host_array(name, given)
  if found.ndim != 1 or not found.size or found.dtype.kind not in 'iuf':
    raise errors.UsageError(f'{name} is {errors.shown(given)}, expected a number for each output')
  return tuple(errors.check_number(name, float(one), low=0, finite=True) for one in found)


def _reduced(elements: jax.Array, reduction: str) -> jax.Array:
  """Returns the sum or the mean of each sample's elements, [N, …] -> [N]."""
  axes = tuple(range(1, elements.ndim))
  return (jnp.sum if reduction == 'sum' else jnp.mean)(elements, axis=axes) if axes else elements


def not_zero(divisor: jax.Array) -> jax.Array:
  """Returns what sums are divided by, 1 in place of 0: such a sum is not divided, see `Loss.divisor`."""
  return jnp.where(divisor == 0, jnp.ones_like(divisor), divisor)


def _of_classes(weight: tuple[float, ...] | None, targets: jax.Array) -> jax.Array:
  """Returns the weight of each output, [1, …, outputs]; raises `UsageError` for another number of them."""
  found = jnp.asarray(weight, targets.dtype)
  if found.shape != targets.shape[-1:]:
    raise errors.UsageError(f'a loss has {found.size} weights, {weight!r}, and the model {targets.shape[-1]} outputs')
  return found.reshape((1,) * (targets.ndim - 1) + found.shape)


def _sum_of_weights(targets: jax.Array, *, weight: tuple | None, average: str, **settings: Any) -> jax.Array:
  del settings
  if weight is None or average == 'samples':
    return jnp.ones(targets.shape[:1], targets.dtype)
  total = jnp.sum(_of_classes(weight, targets) * targets, axis=-1)
  return _reduced(total, 'mean')


@_loss(CLASSES, 'softmax', _sum_of_weights)
def cross_entropy(
  outputs: jax.Array,
  targets: jax.Array,
  *,
  weight: tuple | None = None,
  smoothing: Fraction = 0.0,
  average: Annotated[str, Choice(('weights', 'samples'))] = 'weights',
  reduction: Reduction = 'mean',
) -> jax.Array:
  """Returns −Σ_c w_c y'_c log softmax(z)_c with y' = (1 − ε) y + ε / classes, averaged over positions.

  Args:
    outputs: logits z.
    targets: probabilities y.
    weight: w of the classes; None for 1.
    smoothing: ε of label smoothing.
    average: whether a mean is over the weights Σ_c w_c y_c, as PyTorch takes it for class indices, or over the samples,
      as it does for probabilities.
    reduction: of a batch, 'mean' or 'sum'.
  """
  smoothed = targets if not smoothing else (1 - smoothing) * targets + smoothing / targets.shape[-1]
  if weight is not None:
    smoothed = smoothed * _of_classes(weight, targets)
  losses = -jnp.sum(smoothed * jax.nn.log_softmax(outputs), axis=-1)
  if weight is None or average == 'samples' or reduction == 'sum':
    return _reduced(losses, reduction)
  return _reduced(losses, 'mean') / not_zero(_sum_of_weights(targets, weight=weight, average=average))


@_loss(CLASSES, 'softmax')
def squared_error(outputs: jax.Array, targets: jax.Array, *, reduction: Reduction = 'mean') -> jax.Array:
  """Returns Σ_c (softmax(z)_c − y_c)² / classes: Keras' mean squared error after Fidel's softmax layer.

  Args:
    outputs: logits z.
    targets: probabilities y.
    reduction: of a batch, 'mean' or 'sum'.
  """
  return _reduced(jnp.mean(jnp.square(jax.nn.softmax(outputs) - targets), axis=-1), reduction)


@_loss(CLASSES, 'softmax')
def focal(
  outputs: jax.Array,
  targets: jax.Array,
  *,
  gamma: NonNegative = 2.0,
  weight: tuple | None = None,
  reduction: Reduction = 'mean',
) -> jax.Array:
  """Returns −Σ_c w_c y_c (1 − p_c)^γ log p_c with p = softmax(z), averaged over positions (Lin et al. 2017, eq. 5).

  Args:
    outputs: logits z.
    targets: probabilities y.
    gamma: γ.
    weight: w of the classes, the paper's α; None for 1. A mean is over the samples.
    reduction: of a batch, 'mean' or 'sum'.
  """
  logs = jax.nn.log_softmax(outputs)
  # 1 − p is taken from its logarithm: at p = 1 a power of 0 has no derivative that an attack could follow.
  away = jnp.exp(gamma * jnp.log(-jnp.expm1(jnp.minimum(logs, -jnp.finfo(logs.dtype).eps))))
  kept = targets if weight is None else targets * _of_classes(weight, targets)
  return _reduced(-jnp.sum(kept * away * logs, axis=-1), reduction)


@_loss(CLASSES, 'softmax')
def dice(
  outputs: jax.Array, targets: jax.Array, *, smooth: Positive = 1e-5, reduction: Reduction = 'mean'
) -> jax.Array:
  """Returns 1 − (2 Σ p y + s) / (Σ p + Σ y + s), sums over positions, averaged over classes (Milletari et al. 2016).

  The dice of each sample is its own; p = softmax(z) is not squared.

  Args:
    outputs: logits z.
    targets: probabilities y.
    smooth: s.
    reduction: of a batch, 'mean' or 'sum'.
  """
  positions = tuple(range(1, outputs.ndim - 1))
  probabilities = jax.nn.softmax(outputs)
  both = jnp.sum(probabilities * targets, axis=positions)
  total = jnp.sum(probabilities, axis=positions) + jnp.sum(targets, axis=positions)
  return _reduced(1 - (2 * both + smooth) / (total + smooth), reduction)


@_loss(FLAGS, 'sigmoid')
def binary_cross_entropy(
  outputs: jax.Array,
  targets: jax.Array,
  *,
  weight: tuple | None = None,
  positive: tuple | None = None,
  reduction: Reduction = 'mean',
) -> jax.Array:
  """Returns −w [q y log σ(z) + (1 − y) log σ(−z)], averaged over the outputs: one of two classes, or several labels.

  Args:
    outputs: logits z.
    targets: y, 0 or 1 or a probability.
    weight: w of each output; None for 1.
    positive: q of each output, PyTorch's `pos_weight`; None for 1.
    reduction: of a batch, 'mean' or 'sum'.
  """
  ones = targets if positive is None else targets * _of_classes(positive, targets)
  losses = -(ones * jax.nn.log_sigmoid(outputs) + (1 - targets) * jax.nn.log_sigmoid(-outputs))
  return _reduced(losses if weight is None else losses * _of_classes(weight, targets), reduction)


@_loss(FLAGS, 'sigmoid')
def binary_focal(
  outputs: jax.Array,
  targets: jax.Array,
  *,
  gamma: NonNegative = 2.0,
  alpha: Annotated[float | None, Range(0, 1)] = 0.25,
  reduction: Reduction = 'mean',
) -> jax.Array:
  """Returns α_t (1 − p_t)^γ (−log p_t) with p = σ(z), averaged over the outputs (Lin et al. 2017, eq. 5).

  Where y is no whole number, −log p_t is the binary cross-entropy and p_t = y p + (1 − y) (1 − p), as in torchvision.

  Args:
    outputs: logits z.
    targets: y, 0 or 1 or a probability.
    gamma: γ.
    alpha: α, the weight of ones, 1 − α that of zeros; None for no weight.
    reduction: of a batch, 'mean' or 'sum'.
  """
  ones, zeros = jax.nn.log_sigmoid(outputs), jax.nn.log_sigmoid(-outputs)
  cross_entropies = -(targets * ones + (1 - targets) * zeros)
  whole = targets * zeros + (1 - targets) * ones  # log(1 − p_t) where y is 0 or 1, exact also where p_t rounds to 1
  mixed = targets * jax.nn.sigmoid(-outputs) + (1 - targets) * jax.nn.sigmoid(outputs)
  between = (targets > 0) & (targets < 1)
  losses = jnp.exp(gamma * jnp.where(between, jnp.log(jnp.where(between, mixed, 1)), whole)) * cross_entropies
  if alpha is not None:
    losses = losses * (alpha * targets + (1 - alpha) * (1 - targets))
  return _reduced(losses, reduction)


@_loss(VALUES)
def mean_squared_error(outputs: jax.Array, targets: jax.Array, *, reduction: Reduction = 'mean') -> jax.Array:
  """Returns (z − y)², averaged over the outputs: regression.

  Args:
    outputs: z.
    targets: y.
    reduction: of a batch, 'mean' or 'sum'.
  """
  return _reduced(jnp.square(outputs - targets), reduction)


@_loss(VALUES)
def huber(outputs: jax.Array, targets: jax.Array, *, delta: Positive = 1.0, reduction: Reduction = 'mean') -> jax.Array:
  """Returns d² / 2 where d = |z − y| ≤ δ, else δ (d − δ / 2), averaged over the outputs (Huber 1964).

  Args:
    outputs: z.
    targets: y.
    delta: δ; PyTorch's SmoothL1Loss is this, divided by its β = δ.
    reduction: of a batch, 'mean' or 'sum'.
  """
  apart = jnp.abs(outputs - targets)
  near = jnp.minimum(apart, delta)
  return _reduced(near * (apart - near / 2), reduction)


def _counted(targets: jax.Array, **settings: Any) -> jax.Array:
  """Returns how many positions of each sample count, [N], as a share of all: those whose targets are not all zero."""
  del settings
  return jnp.mean(jnp.sum(targets, axis=-1), axis=1)


def _of_tokens(outputs: jax.Array, targets: jax.Array, reduction: str) -> jax.Array:
  """Returns −Σ_c y_c log softmax(z)_c, its sum or its mean over the positions that count, [N]; 0 where none does."""
  losses = -jnp.sum(targets * jax.nn.log_softmax(outputs), axis=-1)
  if reduction == 'sum':
    return jnp.sum(losses, axis=1)
  total = jnp.sum(targets, axis=(1, 2))
  return jnp.sum(losses, axis=1) / jnp.where(total > 0, total, jnp.ones_like(total))


@_loss(SAMPLES, 'softmax', _counted, own='next_token')
def next_token(outputs: jax.Array, targets: jax.Array, *, reduction: Reduction = 'mean') -> jax.Array:
  """Returns −log softmax(z_t)_{x_{t+1}}, averaged over the positions that a token follows: language modelling.

  The targets are the sample's own tokens, shifted. Padding is ignored as PyTorch's `ignore_index` is. The mean over a
  batch is over all positions of it that count, so that longer samples count more.

  Args:
    outputs: logits z, [N, T, vocabulary].
    targets: probabilities of the tokens, [N, T, vocabulary]; zeros where a position does not count.
    reduction: of a batch, 'mean' or 'sum'.
  """
  return _of_tokens(outputs, targets, reduction)


@_loss(SAMPLES, 'softmax', _counted, own='masked_token', hides=('share', 'seed'))
def masked_token(
  outputs: jax.Array,
  targets: jax.Array,
  *,
  share: Annotated[float, Range(1e-6, 1)] = 0.15,
  seed: Annotated[int, Range(0, 2**31 - 1)] = 0,
  reduction: Reduction = 'mean',
) -> jax.Array:
  """Returns −log softmax(z_t)_{x_t}, averaged over the positions that are masked (Devlin et al. 2019).

  The model is given the mask's token there. Positions are the same for all samples and steps, and an attacker knows
  them. All chosen positions are masked; of BERT's, a tenth keeps its token and a tenth has a random one.

  Args:
    outputs: logits z, [N, T, vocabulary].
    targets: probabilities of the tokens, [N, T, vocabulary]; zeros where a position is not masked.
    share: of the positions that is masked, one at least.
    seed: of the positions.
    reduction: of a batch, 'mean' or 'sum'.
  """
  del share, seed
  return _of_tokens(outputs, targets, reduction)


LOSSES: dict[str, Callable[..., Loss]] = {
  'cross_entropy': cross_entropy,
  'squared_error': squared_error,
  'focal': focal,
  'dice': dice,
  'binary_cross_entropy': binary_cross_entropy,
  'binary_focal': binary_focal,
  'mean_squared_error': mean_squared_error,
  'huber': huber,
  'next_token': next_token,
  'masked_token': masked_token,
}


def parse(text: str) -> Loss:
  """Returns the loss that a text describes, as 'focal(gamma=2)'; raises `UsageError` for one that is not known."""
  given = grammar.spec(text, 'loss')
  errors.check_choice('loss', given.name, LOSSES)
  return LOSSES[given.name](**dict(given.settings))


def wrap(function: Callable, targets: str = 'classes', *, activation: str = '') -> Loss:
  """Returns the `Loss` of a user's own function.

  Args:
    function: (outputs, targets), floats [N, …, outputs], -> the loss of each sample, floats [N].
    targets: 'classes' (integers, or probabilities), 'flags' (0 and 1 for each output) or 'values' (floats).
    activation: 'softmax' or 'sigmoid', where the function applies it to the outputs; networks that return probabilities
      are then refused.

  Raises:
    UsageError: for something else than such a function, or an unknown word.
  """
  errors.check_function('loss', function, 2)
  errors.check_choice('kind of targets', targets, KINDS)
  errors.check_choice('activation', activation, ('', 'softmax', 'sigmoid'))
  if function is optax.softmax_cross_entropy:
    activation = 'softmax'
  return Loss(function, targets=KINDS[targets], activation=activation)


def as_loss(given: Any) -> Loss:
  """Returns the `Loss` that an object, its text or a user's own function is; raises `UsageError` for anything else."""
  if isinstance(given, Loss):
    return given
  if given in LOSSES.values():
    return given()
  return parse(given) if isinstance(given, str) else wrap(given)
