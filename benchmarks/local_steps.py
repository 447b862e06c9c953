"""Memory and time of an attacker's step through many local steps of the client, kept and recomputed in blocks."""

import dataclasses
import sys
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

import gradleak as gl
from benchmarks import setting
from benchmarks.memory import MIB

FORMS = {'kept': False, 'recomputed': True}  # -> `Client.remat`


def main(*, model: str, dataset: str, data_dir: str | None, sizes: Sequence[int], repeats: int) -> None:
  """Measures and prints a row per number of local steps on one image.

  Args:
    model: as `models.create` takes it.
    dataset, data_dir: as launch/audit.py takes them.
    sizes: numbers of local steps.
    repeats: number of measurements of each, in turn.
  """
  images = setting.load(dataset, data_dir, 1)
  client = gl.ClientSettings(share='delta', learning_rate=0.01).client(gl.models.create(model, 10), 10)
  variables = client.model.init(jax.random.key(0), images.images.shape[1:])
  image, label = jnp.asarray(images.images[:1]), jax.nn.one_hot(images.labels[:1] % 10, 10)
  print(f'{model}, {dataset} at 32×32×3, one trial; gradient of the squared delta, {jax.devices()[0].device_kind}')
  print(
    f'{"local steps":>12}' + ''.join(f'{name + " MiB":>16}{"ms":>10}' for name in FORMS) + f'{"memory":>10}{"time":>8}'
  )
  for count in sizes:
    compiled = {}
    for name, remat in FORMS.items():
      print(f'compiling {count} local steps, {name}', file=sys.stderr, flush=True)
      local = dataclasses.replace(client, epochs=count, remat=remat)
      compiled[name] = jax.jit(jax.grad(_squared(local, variables))).lower(image, label).compile()
    times: dict[str, list[float]] = {name: [] for name in FORMS}
    for _ in range(repeats):
      for name, run in compiled.items():
        started = time.monotonic()
        jax.block_until_ready(run(image, label))
        times[name].append(1e3 * (time.monotonic() - started))
    memory = [run.memory_analysis().temp_size_in_bytes / MIB for run in compiled.values()]
    spent = [float(np.median(times[name])) for name in FORMS]
    pairs = ''.join(f'{size:16.1f}{each:10.1f}' for size, each in zip(memory, spent, strict=True))
    print(f'{count:12}{pairs}{memory[1] / memory[0]:10.2f}{spent[1] / spent[0]:8.2f}', flush=True)


def _squared(client: gl.Client, variables: dict) -> Callable[[jax.Array, jax.Array], jax.Array]:
  def squared(image: jax.Array, label: jax.Array) -> jax.Array:
    delta = client.local_update(None, variables, image, label).update
    return sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(delta))

  return squared
