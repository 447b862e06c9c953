"""How far noise on the private samples turns a client's update: whether a search can follow its gradient to them."""

import functools
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from gradleak import data
from gradleak.core import errors, trees
from gradleak.core.settings import Count, ranged
from gradleak.federated.client import Client

STDDEVS = (0.003, 0.01, 0.03, 0.1, 0.3)


@ranged
def roughness(
  key: jax.Array,
  client: Client,
  variables: Mapping,
  samples: np.ndarray,
  targets: np.ndarray,
  *,
  stddevs: Sequence[float] = STDDEVS,
  batch_size: Count = 1,
) -> dict[float, float]:
  """Returns {σ: cosine distance between the updates of x and of x + N(0, σ²)}, the median over uploads.

  Gradient matching descends on this distance. Suppose that it is already large for a small σ. Then a search that does
  not start beside the sample meets an objective that hardly depends on the distance to the sample.

  Args:
    key: of the noise.
    client: whose updates are compared; both of a pair draw the same dropout and the same noise of a defense.
    variables: of the model.
    samples, targets: [N, …], int [N]; ⌊N / batch_size⌋ uploads.
    stddevs: the σ, in units of the pixels' range.
    batch_size: samples behind one upload.

  Raises:
    UsageError: for a σ that is no number, more samples behind an upload than there are, or samples that do not fit.
  """
  kind = client.modality
  samples, targets = data.pair('the samples', (samples, targets), check=kind.check, noun=kind.noun)
  errors.check_number('batch_size', batch_size, low=1, high=len(samples), integer=True)
  for stddev in stddevs:
    errors.check_number('stddevs', stddev, low=0, finite=True)
  count = len(samples) // batch_size

  batches = [part[: count * batch_size].reshape(count, batch_size, *part.shape[1:]) for part in (samples, targets)]
  found = _distances(client, variables, np.asarray(stddevs, np.float32), jax.random.split(key, count), *batches)
  return dict(zip(map(float, stddevs), np.median(np.asarray(found, np.float64), axis=0).tolist(), strict=True))


@functools.partial(jax.jit, static_argnums=0)
def _distances(
  client: Client, variables: Mapping, stddevs: jax.Array, keys: jax.Array, samples: jax.Array, targets: jax.Array
) -> jax.Array:
  """Returns the distance of each upload at each σ, [uploads, σ]."""

  def of_upload(given: tuple) -> jax.Array:
    key, x, y = given
    noise_key, client_key = jax.random.split(key)
    noise, sent = jax.random.normal(noise_key, x.shape), client.local_update(client_key, variables, x, y).update

    def distance(stddev: jax.Array) -> jax.Array:
      return trees.cosine_distance(client.local_update(client_key, variables, x + stddev * noise, y).update, sent)

    return jax.lax.map(distance, stddevs)

  return jax.lax.map(of_upload, (keys, samples, targets))
