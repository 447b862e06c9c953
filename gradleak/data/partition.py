"""Partitions: which samples belong to which client. No sample belongs to two; some may belong to nobody."""

import jax
import numpy as np

from gradleak import errors, specs


def iid(key, labels, num_clients, *, samples: int = 0):
  """Returns equal shares of the shuffled samples: `samples` each, or all of them divided evenly at 0.

  Args:
    key: a typed JAX key; the same key gives the same partition.
    labels: integers [N].
    num_clients: number of clients.

  Returns:
    A list with an ascending array of indices into `labels` for each client, as all partitions do.

  Raises:
    UsageError: for too few samples, as all partitions do.
  """
  errors.check_number('iid(samples)', samples, low=0, integer=True)
  samples = samples or len(labels) // max(1, num_clients)
  _enough(num_clients, samples, len(labels), f'{num_clients} clients of {samples or 1} samples')
  shuffled = generator_of(key).permutation(len(labels))[: num_clients * samples]
  return [np.sort(part) for part in shuffled.reshape(num_clients, samples)]


def classes(key, labels, num_clients, *, number: int, low: int = 0, high: int = 0):
  """Returns samples of `number` classes for each client.

  Each client in turn draws its classes among those that the fewest clients hold, so that all are held by as many, give
  or take one. A class is shared evenly among its holders (FFL: half of the classes, equal shards); with `low` and
  `high`, each holder takes between them, uniformly drawn (GradDefense: 2 classes, 1 to 20 samples of each).
  """
  known = np.unique(labels)
  errors.check_number('classes(number)', number, low=1, high=len(known), integer=True)
  errors.check_number('classes(low)', low, low=0, integer=True)
  errors.check_number('classes(high)', high, low=low, integer=True)
  generator, held = generator_of(key), {int(label): [] for label in known}
  for client in range(num_clients):
    # The least held first; equally held ones in random order.
    order = sorted(generator.permutation(known).tolist(), key=lambda label: len(held[label]))
    for label in order[:number]:
      held[label].append(client)
  parts = [[] for _ in range(num_clients)]
  for label, holders in held.items():
    pool = generator.permutation(np.flatnonzero(labels == label))
    if high:
      counts = generator.integers(max(1, low), high + 1, len(holders))
    else:
      counts = np.full(len(holders), len(pool) // max(1, len(holders)))
    wanted = f'the {len(holders)} clients that hold class {label}'
    _enough(len(holders), int(counts.min(initial=1)), len(pool), wanted, int(counts.sum()))
    for client, share in zip(holders, np.split(pool, np.cumsum(counts))[:-1], strict=True):
      parts[client].append(share)
  return [np.sort(np.concatenate(part)) for part in parts]


def dirichlet(key, labels, num_clients, *, alpha: float, least: int = 1):
  """Returns each class divided among the clients in proportions drawn from Dirichlet(α) (Hsu, Qi and Brown 2019).

  Small α makes clients of few classes and of very different sizes; it is drawn anew until each has `least` samples.
  """
  errors.check_number('dirichlet(alpha)', alpha, low=1e-3, finite=True)
  errors.check_number('dirichlet(least)', least, low=1, integer=True)
  _enough(num_clients, least, len(labels), f'{num_clients} clients of {least} samples')
  generator = generator_of(key)
  for _ in range(1000):
    parts = [[] for _ in range(num_clients)]
    for label in np.unique(labels):
      pool = generator.permutation(np.flatnonzero(labels == label))
      edges = np.cumsum(generator.dirichlet(np.full(num_clients, alpha)))[:-1] * len(pool)
      for part, share in zip(parts, np.split(pool, edges.astype(int)), strict=True):
        part.append(share)
    parts = [np.sort(np.concatenate(part)) for part in parts]
    if min(map(len, parts)) >= least:
      return parts
  raise errors.UsageError(
    f'dirichlet(alpha={alpha}) left a client with fewer than {least} samples a thousand times: take a larger alpha, '
    f'fewer clients than {num_clients}, or a smaller least'
  )


def by_user(users):
  """Returns the samples of each user, in the order of their sorted names; `users` is whose each sample is, [N]."""
  users = np.asarray(users)
  return [np.flatnonzero(users == user) for user in np.unique(users)]


REGISTRY = {'iid': iid, 'classes': classes, 'dirichlet': dirichlet}


def parse(text, key, labels, num_clients):
  """Returns the partition that `text` describes: 'iid', 'classes(number=5)', 'dirichlet(alpha=0.5)'.

  Raises:
    UsageError: for an unknown name or setting, a value out of range, or too few samples.
  """
  errors.check_number('number of clients', num_clients, low=1, integer=True)
  factory, static, numeric = specs.resolve(specs.parse(text, 'partition'), REGISTRY, 'partition')
  return factory(key, np.asarray(labels), num_clients, **static, **numeric)


def generator_of(key):
  """Returns NumPy's generator of what a typed JAX key decides on the host."""
  return np.random.default_rng(np.asarray(jax.random.key_data(key)).ravel())


def _enough(holders, each, available, words, wanted=None):
  """Raises the `UsageError` that there are not enough samples for all."""
  wanted = holders * each if wanted is None else wanted
  if each < 1 or wanted > available:
    raise errors.UsageError(f'{words} need {max(wanted, holders)} samples, there are {available}')
