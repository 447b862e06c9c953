"""A round of federated training: clients in passes of several sizes, compared with a Python loop over them."""

import jax
import jax.numpy as jnp
import optax

import gradleak as gl
from benchmarks import harness
from benchmarks.harness import Column, Variant
from gradleak.core import errors
from gradleak.data import partition
from gradleak.federated import Client, simulation

READS = ('dataset', 'data_dir', 'models', 'repeats')
CLIENTS, SAMPLES, BATCH = 10, 600, 10  # of a round, of each client, of a local step: MNIST's hundred clients
COLUMNS = [Column('s/round', 'seconds'), *harness.ratios('seconds')]


def main(options: harness.Options) -> None:
  """Measures warm rounds of FedAvg, one local epoch each, and prints a row per variant for each model.

  Raises:
    UsageError: for an unknown model or too few images.
  """
  data = gl.data.load(options.dataset, 'train', data_dir=options.data_dir)
  samples = min(SAMPLES, len(data.samples) // CLIENTS // BATCH * BATCH)
  if not samples:
    raise errors.UsageError(f'{options.dataset} has {len(data.samples)} images, {CLIENTS * BATCH} are needed')
  parts = partition.iid(jax.random.key(0), data.targets, CLIENTS, samples=samples)
  for spec in options.listed_models('lenet'):
    model = gl.models.create(spec, data.num_classes)
    client = Client(model, data.num_classes, share='delta', batch_size=BATCH)
    variables = jax.jit(model.init, static_argnums=1)(jax.random.key(1), data.samples.shape[1:])
    variants = {'a Python loop over clients': _loop(client, data, parts, variables)}
    for size in (1, 2, 5, 10):
      federation = simulation.Federation(client, data.samples, data.targets, parts, CLIENTS, group_size=size)
      variants[f'one program, clients by {size}'] = _batched(federation, variables)
    harness.report(
      f'{spec}, {CLIENTS} clients, {samples} samples of {options.dataset} each, batches of {BATCH}, one epoch; '
      f'{harness.hardware()}',
      [Variant(name, harness.timed(run)) for name, run in variants.items()],
      COLUMNS,
      options.repeats,
      warm=True,
    )


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
      train(key, variables, data.samples[part], data.targets[part]).update
      for key, part in zip(keys, parts, strict=True)
    ]
    mean = jax.tree.map(lambda *leaves: -jnp.mean(jnp.stack(leaves), axis=0), *updates)
    step, _ = server.update(mean, server.init(variables['params']))
    return optax.apply_updates(variables['params'], step)

  return one_round
