"""A model along its training: some rounds on public samples, so that clients have received a model before this one."""

import dataclasses
from collections.abc import Mapping

import jax
import numpy as np
import optax

from gradleak.core import errors
from gradleak.core.settings import Count, NonNegative, ranged
from gradleak.federated import simulation
from gradleak.federated.client import Client

RATE = 1e-3  # it hardly moves the weights


@ranged
def earlier(
  key: jax.Array,
  client: Client,
  variables: Mapping,
  samples: np.ndarray,
  targets: np.ndarray,
  *,
  rounds: Count = 1,
  clients: Count = 10,
  rate: NonNegative = RATE,
) -> tuple[Mapping, Mapping]:
  """Returns the variables after some rounds in which all clients take part, and those before the last round.

  Args:
    key: of the `simulation.Federation`.
    client: how each client trains; its cohort, a given order of its own samples and private layers do not matter.
    variables: of the model at the start.
    samples: float32 [K, H, W, C], shared out evenly; a rest that is left over is not used.
    targets: int32 [K].
    rounds: how many.
    clients: number of clients; at most K.
    rate: the server's learning rate on the mean gradient or the mean delta. At 0.1, one round kills the ReLUs of a
      dense network with DLG's initialisation.

  Raises:
    UsageError: for more clients than samples.
  """
  errors.check_number('clients', clients, low=1, high=len(samples), integer=True)
  size = len(samples) // clients
  batch_size = min(size, client.batch_size or size)  # fewer samples than a batch are one: nothing is dropped
  federation = simulation.Federation(
    dataclasses.replace(client, batch_size=batch_size, order=None, private=(), cohort=1),
    samples[: clients * size],
    targets[: clients * size],
    np.split(np.arange(clients * size), clients),
    clients,
    server=optax.sgd(rate),
  )
  *_, last = simulation.along(federation, variables, key, rounds)
  return last
