"""A round of federated training: clients in passes of several sizes, compared with a Python loop over them."""

import sys
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gradleak as gl
from benchmarks import setting
from gradleak.core import errors
from gradleak.data import partition
from gradleak.federated import Client, simulation

CLIENTS, SAMPLES, BATCH = 10, 600, 10  # of a round, of each client, of a local step: MNIST's hundred clients


def main(*, models: Sequence[str], dataset: str, data_dir: str | None, repeats: int) -> None:
  """Measures warm rounds of FedAvg, one local epoch each, and prints a row per variant for each model.

  Args:
    models: as `models.create` takes them.
    dataset, data_dir: the images, in their own size; each client has `SAMPLES` of them, or fewer if there are fewer.
    repeats: number of measurements of each variant, in turn.

  Raises:
    UsageError: for an unknown model or too few images.
  """
  data = gl.data.load(dataset, 'train', data_dir=data_dir)
  samples = min(SAMPLES, len(data.images) // CLIENTS // BATCH * BATCH)
  if not samples:
    raise errors.UsageError(f'{dataset} has {len(data.images)} images, {CLIENTS * BATCH} are needed')
  shape, devices = '×'.join(map(str, data.images.shape[1:])), jax.devices()
  print(
    f'{CLIENTS} clients, {samples} samples each, batches of {BATCH}, one epoch; {dataset} at {shape}; '
    f'{len(devices)} × {devices[0].device_kind}; {repeats} rounds; load average {setting.load_average()}'
  )
  parts = partition.iid(jax.random.key(0), data.labels, CLIENTS, samples=samples)
  for spec in models:
    model = gl.models.create(spec, data.num_classes)
    client = Client(model, data.num_classes, share='delta', batch_size=BATCH)
    variables = jax.jit(model.init, static_argnums=1)(jax.random.key(1), data.images.shape[1:])
    variants = {'a Python loop over clients': _loop(client, data, parts, variables)}
    for size in (1, 2, 5, 10):
      federation = simulation.Federation(client, data.images, data.labels, parts, CLIENTS, group_size=size)
      variants[f'one program, clients by {size}'] = _batched(federation, variables)
    print(_table(spec, _measured(variants, repeats, spec)), flush=True)
  print(f'\nRatios to the first line: of medians, of minima. load average {setting.load_average()}')


def _batched(federation, variables):
  """Returns a function that runs the first round of a federation."""
  state = simulation.start(federation, variables)
  return lambda: simulation.run_round(federation, state, jax.random.key(2))[0].variables


def _loop(client, data, parts, variables):
  """Returns a function that runs a round client by client: a compiled training each, and a mean in the end."""
  train = jax.jit(client.local_update)
  server = optax.sgd(1.0)
  keys = jax.random.split(jax.random.key(2), len(parts))

  def one_round():
    updates = [
      train(key, variables, data.images[part], data.labels[part]).update for key, part in zip(keys, parts, strict=True)
    ]
    mean = jax.tree.map(lambda *leaves: -jnp.mean(jnp.stack(leaves), axis=0), *updates)
    step, _ = server.update(mean, server.init(variables['params']))
    return optax.apply_updates(variables['params'], step)

  return one_round


def _measured(variants, repeats, spec):
  """Returns name -> seconds of each run, without the first one, which compiles."""
  seconds = {name: [] for name in variants}
  for repeat in range(repeats + 1):
    for name, run in variants.items():
      print(f'{spec}, run {repeat} of {repeats}: {name}', file=sys.stderr, flush=True)
      started = time.perf_counter()
      jax.block_until_ready(run())
      if repeat:
        seconds[name].append(time.perf_counter() - started)
  return seconds


def _table(spec, seconds):
  """Returns a row per variant."""
  first = next(iter(seconds.values()))
  lines = [f'\n{spec:28} {"s/round":>8} {"ratio":>7} {"minima":>7}']
  for name, runs in seconds.items():
    median, least = np.median(runs), min(runs)
    lines.append(f'{name:28} {median:8.3f} {median / np.median(first):6.2f}× {least / min(first):6.2f}×')
  return '\n'.join(lines)
