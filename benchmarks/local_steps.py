"""Memory and time of an attacker's step through many local steps of the client, kept and recomputed in blocks."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

import gradleak as gl
from benchmarks import harness, setting
from benchmarks.harness import Column, Variant
from benchmarks.memory import MIB

READS = ('dataset', 'data_dir', 'model', 'models', 'sizes', 'repeats')
FORMS = {'kept': False, 'recomputed': True}  # -> `Client.remat`
COLUMNS = [
  Column('MiB', 'memory', ',.1f'), Column('ms', 'ms', ',.1f'), Column('memory', 'memory', ratio=True),
  *harness.ratios('ms'),
]  # fmt: skip


def main(options: harness.Options) -> None:
  """Measures the gradient of the squared delta on one image, and prints two rows per number of local steps."""
  images = setting.load(options.dataset, options.data_dir, 1)
  image, label = jnp.asarray(images.samples[:1]), jax.nn.one_hot(images.targets[:1] % 10, 10)
  for model in options.listed_models():
    client = gl.ClientSettings(share='delta', learning_rate=0.01).client(gl.models.create(model, 10), 10)
    variables = client.model.init(jax.random.key(0), images.samples.shape[1:])
    for count in options.listed_sizes('4,16,64,256'):
      variants = []
      for name, remat in FORMS.items():
        local = dataclasses.replace(client, epochs=count, remat=remat)
        run = jax.jit(jax.grad(_squared(local, variables))).lower(image, label).compile()
        held = run.memory_analysis().temp_size_in_bytes / MIB
        timed = harness.timed(lambda run=run: run(image, label), 'ms', 1e3)
        variants.append(Variant(f'{count} local steps, {name}', timed, lambda figures, held=held: {'memory': held}))
      title = f'{model}, {options.dataset} at 32×32×3, one trial, {harness.hardware()}'
      harness.report(title, variants, COLUMNS, options.repeats, warm=True)


def _squared(client: gl.Client, variables: dict) -> Callable[[jax.Array, jax.Array], jax.Array]:
  def squared(image: jax.Array, label: jax.Array) -> jax.Array:
    delta = client.local_update(None, variables, image, label).update
    return sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(delta))

  return squared
