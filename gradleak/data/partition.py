"""Partitions: which samples belong to which client. Each sample belongs to at most one."""

import functools
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import jax
import numpy as np

from gradleak.core import errors, grammar, methods
from gradleak.core.settings import Count, Range


def _checked(partition: Callable[..., list[np.ndarray]]) -> Callable[..., list[np.ndarray]]:
  """Decorates a partition: its labels become an array, and all arguments are checked."""

  @functools.wraps(partition)
  def divide(key: jax.Array, labels: Any, num_clients: int, **settings: Any) -> list[np.ndarray]:
    labels = errors.host_array('labels', labels)
    if labels.ndim != 1 or not labels.size or not np.issubdtype(labels.dtype, np.integer):
      raise errors.UsageError(f'labels are {labels.dtype.name} of shape {labels.shape}, expected integers [N]')
    num_clients = int(errors.check_number('number of clients', num_clients, low=1, high=10**7, integer=True))
    return partition(key, labels, num_clients, **methods.checked(partition, settings, 'partition'))

  return divide


@_checked
def iid(
  key: jax.Array, labels: np.ndarray, num_clients: int, *, samples: Annotated[int, Range(0)] = 0
) -> list[np.ndarray]:
  """Returns shuffled samples in equal numbers: `samples` per client, or with 0 as many as possible.

  Args:
    key: a typed JAX key; the same key gives the same partition.
    labels: integers [N].
    num_clients: number of clients.
    samples: per client; 0 divides all evenly.

  Returns:
    For each client an ascending array of indices into `labels`; all partitions return this.

  Raises:
    UsageError: for too few samples; all partitions raise this.
  """
  samples = samples or len(labels) // max(1, num_clients)
  _enough(num_clients, samples, len(labels), f'{num_clients} clients of {samples or 1} samples')
  shuffled = generator_of(key).permutation(len(labels))[: num_clients * samples]
  return [np.sort(part) for part in shuffled.reshape(num_clients, samples)]


@_checked
def classes(
  key: jax.Array,
  labels: np.ndarray,
  num_clients: int,
  *,
  number: Count,
  low: Count = 1,
  high: int = 0,
) -> list[np.ndarray]:
  """Returns samples of `number` classes for each client.

  Clients draw their classes one after another, among those with the fewest holders so far; the numbers of holders
  differ by at most one. There are two ways to divide the samples of a class. In FFL, each client has half of the
  classes, and the holders of a class have equal shares. In GradDefense, each client has two classes, and each holder
  gets a number drawn uniformly from [`low`, `high`], such as 1 to 20.

  Args:
    key, labels, num_clients: as for `iid`.
    number: classes per client.
    low, high: the least and the most samples of each class per client; `high` 0 divides all evenly.
  """
  known = np.unique(labels)
  errors.check_number('classes(number)', number, low=1, high=len(known), integer=True)
  if high or low > 1:
    errors.check_number('classes(high)', high, low=low, integer=True)
  generator, held = generator_of(key), {int(label): [] for label in known}
  for client in range(num_clients):
    # Classes with the fewest holders first, equal ones in random order.
    order = sorted(generator.permutation(known).tolist(), key=lambda label: len(held[label]))
    for label in order[:number]:
      held[label].append(client)
  parts = [[] for _ in range(num_clients)]
  for label, holders in held.items():
    pool = generator.permutation(np.flatnonzero(labels == label))
    if high:
      counts = generator.integers(low, high + 1, len(holders))
    else:
      counts = np.full(len(holders), len(pool) // max(1, len(holders)))
    wanted = f'the {len(holders)} clients that hold class {label}'
    _enough(len(holders), int(counts.min(initial=1)), len(pool), wanted, int(counts.sum()))
    for client, share in zip(holders, np.split(pool, np.cumsum(counts))[:-1], strict=True):
      parts[client].append(share)
  return [np.sort(np.concatenate(part)) for part in parts]


@_checked
def dirichlet(
  key: jax.Array,
  labels: np.ndarray,
  num_clients: int,
  *,
  alpha: Annotated[float, Range(1e-3, finite=True)],
  least: Count = 1,
) -> list[np.ndarray]:
  """Returns each class divided among the clients in proportions drawn from Dirichlet(α).

  So do Yurochkin et al. ("Bayesian Nonparametric Federated Learning of Neural Networks", ICML 2019). With small α,
  clients have few classes and very different numbers of samples.

  Args:
    key, labels, num_clients: as for `iid`.
    alpha: α.
    least: draws are repeated, up to a thousand times, until each client has this many samples.
  """
  _enough(num_clients, least, len(labels), f'{num_clients} clients of {least} samples')
  generator = generator_of(key)
  for _ in range(1000):
    parts: list[Any] = [[] for _ in range(num_clients)]
    for label in np.unique(labels):
      pool = generator.permutation(np.flatnonzero(labels == label))
      edges = np.cumsum(generator.dirichlet(np.full(num_clients, alpha)))[:-1] * len(pool)
      for part, share in zip(parts, np.split(pool, np.rint(edges).astype(int)), strict=True):
        part.append(share)
    parts = [np.sort(np.concatenate(part)) for part in parts]
    if min(map(len, parts)) >= least:
      return parts
  raise errors.UsageError(
    f'dirichlet(alpha={alpha}) left a client with fewer than {least} samples a thousand times: take a larger alpha, '
    f'fewer clients than {num_clients}, or a smaller least'
  )


def by_user(users: Sequence[Any]) -> list[np.ndarray]:
  """Returns the indices of each user's samples, users in sorted order.

  Args:
    users: names or numbers [N], the user of each sample.

  Raises:
    UsageError: for anything else.
  """
  errors.refuse_traced('users', users)
  try:
    names = np.asarray(users)
  except ValueError:  # of unequal lengths
    names = np.asarray(None)
  if names.ndim != 1 or names.dtype.kind not in 'iuUS':
    raise errors.UsageError(
      f'users are {errors.shown(users)}, expected the name or the number of a user for each sample'
    )
  return [np.flatnonzero(names == name) for name in np.unique(names)]


REGISTRY: dict[str, Callable[..., list[np.ndarray]]] = {'iid': iid, 'classes': classes, 'dirichlet': dirichlet}


def parse(text: str, key: jax.Array, labels: Any, num_clients: int) -> list[np.ndarray]:
  """Returns the partition that `text` describes: 'iid', 'classes(number=5)', 'dirichlet(alpha=0.5)'.

  Args:
    text: a name of `REGISTRY` with settings in parentheses.
    key, labels, num_clients: as for `iid`.

  Raises:
    UsageError: for an unknown name or setting, a value out of range, or too few samples.
  """
  chosen = methods.from_spec(grammar.spec(text, 'partition'), REGISTRY, 'partition')
  return chosen.factory(key, labels, num_clients, **chosen.given)


def generator_of(key: jax.Array) -> np.random.Generator:
  """Returns a NumPy generator seeded by a JAX key; raises as `errors.check_key` does."""
  return np.random.default_rng(np.asarray(jax.random.key_data(errors.check_key('key', key, traced=False))).ravel())


def _enough(holders: int, each: int, available: int, words: str, wanted: int | None = None) -> None:
  """Raises `UsageError` if there are not enough samples for all."""
  wanted = holders * each if wanted is None else wanted
  if each < 1 or wanted > available:
    raise errors.UsageError(f'{words} need {max(wanted, holders)} samples, there are {available}')


def check(parts: Any, number: int) -> None:
  """Raises `UsageError` for anything but a list with an array of sample numbers below `number` for each client."""
  if not isinstance(parts, list | tuple | np.ndarray) or not len(parts):
    raise errors.UsageError(f'the partition is {errors.shown(parts)}, expected a list with an array for each')
  for client, part in enumerate(parts):
    numbers = errors.host_array(f'the samples of client {client}', part)
    if not numbers.size:
      raise errors.UsageError(f'client {client} has no samples')
    if numbers.ndim != 1 or not np.issubdtype(numbers.dtype, np.integer):
      raise errors.UsageError(f'the samples of client {client} are {errors.shown(part)}, expected their numbers')
    for sample in (numbers.min(), numbers.max()):
      errors.check_number(f'a sample of client {client}', int(sample), low=0, high=number - 1, integer=True)
