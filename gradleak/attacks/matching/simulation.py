"""What the attacker takes an update for, and what it assumes of the client's local training.

OUTPOST (Wang et al. 2024, section III-B) names two ways to match the delta of several local steps. One turns it into a
gradient, `Δ = −η∇` (eq. 2), the other simulates the steps. SME (Zhu, Yao and Blaschko, Surrogate Model Extension, ICML
2023) stands between them. It takes the delta for the gradient at one model on the line from the weights before to those
after. One step of Adam, or of signSGD, sends nearly the sign of the gradient times the rate. The derivative of a sign
is zero, so there the gradient behind a smooth function stands for it. An attacker may not know in which order an epoch
takes the samples. Such an attacker gives each epoch dummy samples of its own (Dimitrov et al.: Data Leakage in
Federated Averaging, TMLR 2022).
"""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradleak.core import errors, trees
from gradleak.core.trees import Tree
from gradleak.federated import Client
from gradleak.federated.response import slopes
from gradleak.models.soft_slopes import soft_slopes
from gradleak.threat import Observation

MATCHES = ('client', 'approximation', 'surrogate', 'sign')
ORDERS = ('known', 'free')

# When the softness has fallen, as a fraction of the steps, and to which fraction of the first one.
FALL, SHARP = 0.8, 1e-2

# A step of an optimizer for pixels moves the point between the two models by this much: 1e-3 at csdlg's rate of 0.1.
_POINT = 1e-2


@dataclasses.dataclass(frozen=True)
class Simulation:
  """How an attacker simulates a client that shares its delta; of a shared gradient there is one step to simulate.

  Attributes:
    match: 'client' (its local steps), 'approximation' (the gradient of all samples at the model that was sent),
      'surrogate' (the gradient at a model between the two, whose place is optimised with the samples) or 'sign' (the
      sign of the gradient at the model that was sent, see `softened`). Only 'client' simulates defenses.
    epochs, batch_size: of local training, as the attacker assumes them; 0 for the client's own.
    rate: assumed learning rate over the client's own; may be traced.
    orders: 'known', or 'free': each epoch has dummy samples of its own.
    softness: of the derivatives of ReLUs and max pools at the first step, see `softly`; None for those of the network.
  """

  match: str = 'client'
  epochs: int = 0
  batch_size: int = 0
  rate: float | jax.Array = 1.0
  orders: str = 'known'
  softness: float | None = None

  def __post_init__(self) -> None:
    errors.check_choice('match', self.match, MATCHES)
    errors.check_choice('orders', self.orders, ORDERS)
    errors.check_number('assumed epochs', self.epochs, low=0, integer=True)
    errors.check_number('assumed batch size', self.batch_size, low=0, integer=True)
    errors.check_number('assumed rate', self.rate, low=1e-6, finite=True)
    if self.softness is not None:
      errors.check_number('softness', self.softness, low=1e-6, finite=True)

  def check(self, client: Client) -> None:
    """Raises `UsageError` for what a client that shares its gradient has no use for."""
    assumes = self.match not in ('client', 'sign') or self.epochs or self.batch_size or self.orders != 'known'
    if client.share == 'gradient' and assumes:
      raise errors.UsageError(
        'match, epochs, batch_size and orders of an attack are about local training, and this client shares its '
        "gradient: set share='delta'"
      )
    rated = not isinstance(self.rate, jax.core.Tracer) and self.rate != 1
    if rated and client.share == 'gradient':
      raise errors.UsageError(f'rate={self.rate:g} is of local training, and this client shares its gradient')
    if self.match == 'sign' and (rated or self.epochs or self.batch_size):
      raise errors.UsageError(
        "match='sign' takes one step of any size: epochs, batch_size and rate have no meaning there"
      )
    if self.match == 'client' and self.orders == 'free' and self.copies(client) == 1:
      raise errors.UsageError("orders='free' makes no difference to a training of one epoch: leave it out")
    if client.cohort > 1 and self.orders == 'free':
      raise errors.UsageError("orders='free' is for the update of one client, and the server sees the mean of several")
    if self.match != 'client' and self.orders == 'free':
      raise errors.UsageError(f"match={self.match!r} takes all samples in one step: orders='free' has no meaning there")

  def takes_gradient(self) -> bool:
    """Returns whether the update is taken for a gradient, or a multiple of one."""
    return self.match in ('approximation', 'surrogate')

  def linear(self, sends_gradient: bool) -> bool:
    """Returns whether a plain gradient is compared; `sends_gradient`: whether the client sends one."""
    return self.takes_gradient() or (sends_gradient and self.match != 'sign')

  def scales_alike(self, client: Client, number: int, params: Tree) -> bool:
    """Returns whether the update is one multiple of a gradient: an optimizer may have a rate for each tensor.

    Args:
      client: as it is.
      number: of its samples.
      params: the model's, or anything shaped like them.
    """
    if not self.takes_gradient():
      return True
    found = [slope.item() for slope in jax.tree.leaves(self._slopes(client, number, params))]
    return bool(np.allclose(found, found[0], rtol=1e-4, atol=0))

  def _slopes(self, client: Client, number: int, params: Tree) -> Tree:
    return slopes(client.optimizer, self.trained(client).num_steps(number), params)

  def _part(self, client: Client, number: int) -> np.float32:
    """Returns the gradient of a local step over that of all samples, if all of theirs are equal: 1 of a mean loss."""
    if not client.loss.summed:
      return np.float32(1)
    simulated = self.trained(client)
    own, batches = number // client.cohort, simulated.num_steps(number) // simulated.epochs
    return np.float32(min(own, batches * (simulated.batch_size or own)) / (batches * number))

  def softly(self, client: Client, count: jax.Array | int, steps: int) -> Client:
    """Returns the client with a network whose derivatives are soft, see `gradleak.models.soft_slopes`.

    The softness falls geometrically to `SHARP` times the first one, over the first `FALL` of the steps. Behind the last
    step, the derivatives are those of the network.
    """
    if self.softness is None:
      return client
    done = jnp.asarray(count, jnp.float32) / steps
    now = jnp.where(done < 1, self.softness * SHARP ** jnp.minimum(done / FALL, 1.0), 0.0)
    return dataclasses.replace(client, model=soft_slopes(client.model, now))

  def trained(self, client: Client) -> Client:
    """Returns the client that the attacker simulates."""
    if client.share == 'gradient':
      return client
    return dataclasses.replace(
      client,
      epochs=self.epochs or client.epochs,
      batch_size=self.batch_size or client.batch_size,
      optimizer=optax.chain(client.optimizer, _scaled(self.rate)),
      order=self._order(client),
    )

  def _order(self, client: Client) -> tuple[tuple[int, ...], ...] | None:
    """Returns the order of a client's samples; None where its epochs are assumed to be others, or to have their own."""
    known = self.orders == 'known' and self.epochs in (0, client.epochs)
    return client.order if known else None

  def copies(self, client: Client) -> int:
    """Returns how many dummy samples there are of each private one."""
    return (self.epochs or client.epochs) if self.orders == 'free' else 1

  def beside(
    self, client: Client, samples: jax.Array, decoys: jax.Array, targets: jax.Array
  ) -> tuple['Simulation', Client, jax.Array, jax.Array]:
    """Returns (assumptions, client, samples, targets) of a training whose local batches hold decoys of their samples.

    Args:
      client: as it is.
      samples: [copies · N, …], epoch by epoch.
      decoys: [D · copies · N, …], the first of each sample before the second ones.
      targets: [N, …], and behind them those of the decoys, [D · N, …].
    """
    count, each = len(samples), 1 + len(decoys) // len(samples)
    number = len(targets) // each
    parts = np.arange(count).reshape(client.cohort * (count // number), -1)  # clients, or epochs of their own samples
    own = parts.shape[1]
    size = self.batch_size or client.batch_size or own

    def cut(part: np.ndarray) -> list[np.ndarray]:
      return [part[start : start + size] for start in range(0, own, size)]

    def taken(batches: list[np.ndarray], count: int) -> np.ndarray:
      return np.concatenate([batch + i * count for batch in batches for i in range(each)])

    order = self._order(client)
    batches = list(parts) if order is not None else [batch for part in parts for batch in cut(part)]
    order = order and tuple(tuple(taken(cut(np.asarray(one)), own)) for one in order)
    simulated = dataclasses.replace(client, batch_size=client.batch_size and each * client.batch_size, order=order)
    places = taken(batches, count), taken([batch % number for batch in batches], number)
    both = jnp.concatenate([samples, decoys]), targets
    both = tuple(x if np.array_equal(p, np.arange(len(x))) else x[p] for x, p in zip(both, places, strict=True))
    return dataclasses.replace(self, batch_size=each * self.batch_size), simulated, *both

  def update(self, client: Client, variables: Tree, samples: jax.Array, targets: jax.Array) -> Tree:
    """Returns what the client would send of dummy samples.

    Where the delta is taken for a gradient, this is the delta of T equal steps, −ηT∇ under plain SGD (OUTPOST, eq. 2).
    A step of a loss that is summed over a batch has the part of ∇ that is of its batch.

    Args:
      client: as it is.
      variables: of the model at which the gradient is taken, or from which the client trains.
      samples: [copies · N, H, W, C], epoch by epoch.
      targets: probabilities, the same.

    Raises:
      UsageError: if the samples of an epoch do not fill its batches.
    """
    simulated = self.trained(client)
    if self.match == 'sign':
      signs = softened(shared_gradient(client, variables, samples, targets))
      return signs if client.share == 'gradient' else reverse(signs)
    if self.takes_gradient():
      gradient = shared_gradient(client, variables, samples, targets)
      each, part = self._slopes(client, samples.shape[0], gradient), self._part(client, samples.shape[0])
      return jax.tree.map(lambda g, slope: g * (slope * part) * jnp.asarray(self.rate, g.dtype), gradient, each)
    if self.orders == 'free' and simulated.epochs > 1:
      count = samples.shape[0] // simulated.epochs
      size = simulated.batch_size or count
      if count % size:
        raise errors.UsageError(
          f"orders='free' needs batches that the samples fill, and {size} does not divide {count}"
        )
      simulated = dataclasses.replace(simulated, epochs=1, batch_size=size)  # its epochs in a row
    return simulated.local_update(None, variables, samples, targets).update

  def model(self, observation: Observation, place: jax.Array | None) -> Tree:
    """Returns the variables at which the gradient is taken: those sent, or moved by a fraction of the update."""
    if place is None:
      return observation.variables
    fraction = point(place)
    params = jax.tree.map(
      lambda p, u: p + fraction.astype(p.dtype) * u, observation.variables['params'], observation.update
    )
    return {**observation.variables, 'params': params}

  def in_words(self, client: Client) -> str:
    """Returns a sentence on what the attacker knows or assumes of the local training."""
    if self.match == 'sign':
      return 'It takes that for the sign of the gradient of one step, as one step of Adam leaves it.'
    if self.takes_gradient():
      where = 'of one step' if self.match == 'approximation' else 'at a model between the two'
      return f'It takes that for the gradient {where}, and knows the local optimizer and the number of steps alone.'
    assumed = [f'{self.epochs} epochs'] if self.epochs not in (0, client.epochs) else []
    if self.batch_size not in (0, client.batch_size):
      assumed.append(f'batches of {self.batch_size}')
    if not isinstance(self.rate, jax.core.Tracer) and self.rate != 1:
      assumed.append(f"{self.rate:g} times the client's learning rate")
    ordered = self.orders == 'known' and not client.shuffled and self._order(client) == client.order
    order = 'the order of the samples' if ordered else 'not the order of the samples'
    if client.augment is not None:
      order += ', nor how they were augmented' if not ordered else ', not how they were augmented'
    if not assumed:
      return f'It knows the local optimizer, its learning rate, the size of the batches and {order}.'
    return f'It assumes {" and ".join(assumed)}, and knows the rest of the local training; of samples, {order}.'


def shared_gradient(client: Client, variables: Mapping, samples: jax.Array, targets: jax.Array) -> Tree:
  """Returns the gradient of the mean loss of samples with zeros in private layers, of which nothing is sent."""
  gradient = client.gradient(variables, samples, targets)
  shape = samples.shape[1 : 1 + client.modality.axes]
  private = client.kept_paths(variables['params'], shape) if client.private else ()
  return jax.tree.map_with_path(  # no masks, behind which `ghost` would find no products
    lambda path, g: jnp.zeros_like(g) if trees.path_names(path) in private else g, gradient
  )


def point(place: jax.Array) -> jax.Array:
  """Returns the fraction α in [0, 1] of the way to the trained model, from the variable that is optimised; ½ at 0."""
  return jnp.clip(0.5 + _POINT * place, 0.0, 1.0)


def softened(gradient: Tree) -> Tree:
  """Returns g / √(g² + m²) of each tensor, where m² is its mean square: a sign with a derivative.

  The first step of Adam is g / (|g| + ε). Its ε of 1e-8 leaves no derivative at entries of usual size. With m in place
  of ε, the angle to the observed signs is least where large entries have the right sign. A tensor of zeros stays so.
  """

  def soft(g: jax.Array) -> jax.Array:
    square = jnp.mean(jnp.square(g))
    return g / jnp.sqrt(jnp.square(g) + jnp.where(square > 0, square, jnp.ones_like(square)))

  return jax.tree.map(soft, gradient)


def reverse(update: Tree) -> Tree:
  """Returns −update: a delta points against the gradients."""
  return trees.subtract(trees.zeros_like(update), update)


def joined(samples: jax.Array, copies: int) -> jax.Array:
  """Returns the mean of the epochs' dummy samples [copies · N, …], each epoch's assigned to the first's by distance."""
  if copies == 1:
    return samples
  first, *others = samples.reshape(copies, -1, *samples.shape[1:])
  total = first
  for other in others:
    apart = first[:, None] - other[None]
    costs = jnp.sum(jnp.square(apart), axis=tuple(range(2, apart.ndim)))
    rows, columns = optax.assignment.hungarian_algorithm(costs)
    total += other[columns[jnp.argsort(rows)]]
  return total / copies


def _scaled(rate: float | jax.Array) -> optax.GradientTransformation:
  return optax.stateless(lambda updates, params: jax.tree.map(lambda u: u * jnp.asarray(rate, u.dtype), updates))
