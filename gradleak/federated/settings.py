"""How a client trains and what it shares, as plain values."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import optax

from gradleak.core import errors, settings
from gradleak.core.settings import setting
from gradleak.federated.augmentation import AUGMENTATIONS
from gradleak.federated.client import PRECISIONS, Client
from gradleak.federated.losses import Loss, as_loss
from gradleak.federated.optimizers import OPTIMIZERS, accumulated, adamw, clipped, proximal
from gradleak.models import Model

_CLIENT: dict[str, Any] = {'group': 'client'}
_LOCAL = ('local_epochs', 'local_batch_size', 'learning_rate')  # recorded of all local training
# Recorded where they are used: of local training, and of any client.
_OPTIONAL = (
  'optimizer', 'momentum', 'weight_decay', 'accumulate', 'proximal', 'max_norm', 'rate_decay', 'sample_order', 'order',
  'last_batch',
)  # fmt: skip
_OF_ANY = ('augment', 'precision', 'frozen', 'private', 'cohort')


@dataclasses.dataclass(frozen=True)
class ClientSettings:
  """How a client trains and what it shares; equal settings make the same `Client`, which compiles once."""

  loss: str | Loss = setting(  # noqa: RUF009
    'cross_entropy', "One of gradleak.losses, as cross_entropy or 'focal(gamma=2)'.", **_CLIENT
  )
  share: str = setting(
    'gradient',
    'gradient: one step (FedSGD); delta: weights after local training (FedAvg).',
    **_CLIENT,
    choices=('gradient', 'delta'),
  )
  local_epochs: int = setting(1, 'Local epochs of a client that shares its delta.', **_CLIENT, low=1, integer=True)
  local_batch_size: int | None = setting(
    None, 'Batch size of local training; all samples by default.', **_CLIENT, low=1, integer=True
  )
  learning_rate: float | None = setting(
    None, 'Learning rate of local training; 0.1 · (1 − momentum) by default.', **_CLIENT, low=1e-12, finite=True
  )
  optimizer: str = setting(
    'sgd', 'Optimizer of local training: sgd, nesterov, adam, adamw or rmsprop.', **_CLIENT, choices=tuple(OPTIMIZERS)
  )
  momentum: float = setting(
    0.0,
    "Momentum of local training by sgd, nesterov or rmsprop; adam's own are 0.9 and 0.999.",
    **_CLIENT,
    low=0,
    high=1,
  )
  weight_decay: float = setting(
    0.0,
    "Weight decay of local training, added to the gradient; of adamw beside its step, where PyTorch's default is 0.01.",
    **_CLIENT,
    low=0,
    high=1,
  )
  accumulate: int = setting(
    1, 'Batches whose mean gradient makes one step of the optimizer.', **_CLIENT, low=1, integer=True
  )
  proximal: float = setting(
    0.0, "FedProx's μ, the weight of the distance to the global model.", **_CLIENT, low=0, finite=True
  )
  max_norm: float | None = setting(
    None, 'L2 norm that the gradient of each local step is clipped to; not clipped by default.', **_CLIENT, low=1e-12
  )
  rate_decay: float = setting(
    1.0, 'Factor of the learning rate from one local step to the next.', **_CLIENT, low=1e-3, high=1
  )
  sample_order: str = setting(
    'fixed',
    'Order of the samples in local epochs: fixed, or shuffled anew in each.',
    **_CLIENT,
    choices=('fixed', 'shuffled'),
  )
  order: str = setting(
    '', "The order of the samples in each epoch, as '2,0,1;1,2,0'; sample_order tells it by default.", **_CLIENT
  )
  last_batch: str = setting(
    'kept', 'A smaller last batch of an epoch: kept or dropped.', **_CLIENT, choices=('kept', 'dropped')
  )
  augment: str = setting(
    'none',
    'Augmentation of local batches: none, flip, crop or crop_flip.',
    **_CLIENT,
    choices=tuple(AUGMENTATIONS),
  )
  precision: str = setting(
    'float32', 'Precision of forward and backward pass: float32 or bfloat16.', **_CLIENT, choices=PRECISIONS
  )
  frozen: str = setting(
    '', "Layers that are neither trained nor shared, as 'Conv_0-block/Conv_1'; none by default.", **_CLIENT
  )
  private: str = setting('', 'Layers that are trained and not shared, likewise; none by default.', **_CLIENT)
  cohort: int = setting(
    1, 'Clients whose mean update alone the server sees (secure aggregation).', **_CLIENT, low=1, integer=True
  )
  batch_norm: str = setting(
    'train',
    'train: batch statistics; eval: running ones, as older attacks assumed.',
    **_CLIENT,
    choices=('train', 'eval'),
  )

  def client(self, model: Model, num_classes: int) -> Client:
    """Returns the undefended `Client` of a model.

    Raises:
      UsageError: for a value out of range, or a setting of local training that a shared gradient does not use.
    """
    settings.check(self)
    as_loss(self.loss)
    for name in ('frozen', 'private'):
      errors.check_instance(name, getattr(self, name), str, 'names of layers, as Conv_0-Conv_1')
    errors.check_instance('order', self.order, str, "numbers of samples, as '2,0,1;1,2,0'")
    if self.share == 'gradient':
      defaults = ClientSettings()
      for name in (*_LOCAL, *_OPTIONAL):
        if getattr(self, name) != getattr(defaults, name):
          raise errors.UsageError(
            f'{name} is {getattr(self, name)!r}, and a client that shares its gradient takes one step without it: set '
            "share='delta'"
          )
    if self.learning_rate is None and self.momentum == 1:
      raise errors.UsageError('momentum is 1, for which the learning rate has no default: give learning_rate')
    if self.optimizer in ('adam', 'adamw') and self.momentum:
      raise errors.UsageError(f'momentum is {self.momentum!r}, and {self.optimizer} has its own: leave it at 0')
    if self.optimizer == 'nesterov' and not self.momentum:
      raise errors.UsageError('momentum is 0.0, and nesterov is SGD with a momentum: give momentum, or take sgd')
    return _client(self, model, num_classes)

  @property
  def rate(self) -> float:
    """The learning rate of local training, given or by default.

    With momentum m a gradient moves the weights 1 / (1 − m) times as far in all: the default keeps this distance.
    """
    if self.learning_rate is not None:
      return self.learning_rate
    return float(f'{0.1 * (1 - self.momentum):.12g}')  # 0.01 and not 0.009999999999999998

  def plain(self) -> dict[str, Any]:
    """Returns all settings as plain JSON, with the learning rate that is trained with."""
    return {**dataclasses.asdict(self), 'loss': str(as_loss(self.loss)), 'learning_rate': self.rate}

  def recorded(self) -> dict[str, Any]:
    """Returns what identifies it in a result, plain JSON: of a shared gradient nothing of local training."""
    defaults = ClientSettings()
    optional = {
      name: getattr(self, name) for name in (*_OPTIONAL, *_OF_ANY) if getattr(self, name) != getattr(defaults, name)
    }
    kept = {'loss', 'share'} | set(_LOCAL if self.share == 'delta' else ())
    return {**{name: value for name, value in self.plain().items() if name in kept}, **optional}


@functools.lru_cache(maxsize=256)
def _client(given: ClientSettings, model: Model, num_classes: int) -> Client:
  parts = [_optimizer(given)]
  if given.weight_decay and given.optimizer != 'adamw':
    parts.insert(0, optax.add_decayed_weights(given.weight_decay))
  if given.max_norm is not None:
    parts.insert(0, clipped(given.max_norm))
  if given.proximal:
    parts.insert(0, proximal(given.proximal))
  optimizer = parts[0] if len(parts) == 1 else optax.chain(*parts)
  return Client(
    model,
    num_classes,
    as_loss(given.loss),
    given.share,
    accumulated(optimizer, given.accumulate),
    epochs=given.local_epochs,
    batch_size=given.local_batch_size,
    drop_last=given.last_batch == 'dropped',
    batch_norm=given.batch_norm,
    augment=AUGMENTATIONS[given.augment],
    shuffled=given.sample_order == 'shuffled',
    order=_order(given.order),
    precision=given.precision,
    frozen=_names(given.frozen),
    private=_names(given.private),
    cohort=given.cohort,
  )


def _names(text: str) -> tuple[str, ...]:
  return tuple(name for name in text.split('-') if name)


def _order(text: str) -> tuple | None:
  """Returns the numbers of a text such as '2,0,1;1,2,0'; what are none is refused by the `Client`."""
  return tuple(tuple(one.split(',')) for one in text.split(';')) if text else None


def _optimizer(given: ClientSettings) -> optax.GradientTransformation:
  rate = _rate(given)
  if given.optimizer in ('sgd', 'nesterov', 'rmsprop'):
    return OPTIMIZERS[given.optimizer](rate, given.momentum)
  return adamw(rate, given.weight_decay) if given.optimizer == 'adamw' else OPTIMIZERS[given.optimizer](rate)


def _rate(given: ClientSettings) -> float | optax.Schedule:
  """Returns the learning rate, or its schedule over the local steps."""
  if given.rate_decay == 1:
    return given.rate
  return lambda count: jnp.float32(given.rate) * jnp.float32(given.rate_decay) ** count.astype(jnp.float32)
