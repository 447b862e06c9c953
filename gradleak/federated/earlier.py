"""A model along its training: some rounds on public images, so that clients have received a model before this one."""

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
  images: np.ndarray,
  labels: np.ndarray,
  *,
  rounds: Count = 1,
  clients: Count = 10,
  rate: NonNegative = RATE,
) -> tuple[Mapping, Mapping]:
  """Returns the variables after some rounds in which all clients take part, and those before the last round.

  Args:
    key: of the `simulation.Federation`.
    client: how each client trains; secure aggregation changes nothing of a mean, so that its cohort does not matter.
    variables: of the model at the start.
    images: float32 [K, H, W, C], shared out evenly; a rest that is left over is not used.
    labels: int32 [K].
    rounds: how many.
    clients: number of clients; at most K.
    rate: the server's learning rate on the mean gradient or the mean delta. At 0.1, one round kills the ReLUs of a
      dense network with DLG's initialisation.

  Raises:
    UsageError: for more clients than images.
  """
  errors.check_number('clients', clients, low=1, high=len(images), integer=True)
  size = len(images) // clients
  federation = simulation.Federation(
    dataclasses.replace(client, cohort=1),
    images[: clients * size],
    labels[: clients * size],
    np.split(np.arange(clients * size), clients),
    clients,
    server=optax.sgd(rate),
  )
  *_, last = simulation.along(federation, variables, key, rounds)
  return last
