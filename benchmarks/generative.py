"""Evaluations of candidates per second: all candidates of all uploads at once, and one after the other."""

import functools
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

import gradleak as gl
from benchmarks import setting
from gradleak import Knowledge, Observation
from gradleak.priors import gan


def main(
  *, model: str, dataset: str, data_dir: str | None, trials: int, population: int, steps: int, repeats: int
) -> None:
  """Measures and prints both, of `ggl` with an untrained generator: weights change no speed.

  Args:
    model, dataset, data_dir: as launch/audit.py takes them; images of 32×32 in colour.
    trials: uploads that are attacked at once.
    population: candidates of a generation.
    steps: generations of a run.
    repeats: number of measurements of each, in turn.
  """
  data = setting.load(dataset, data_dir, trials)
  shape = data.images.shape[1:]
  client = gl.ClientSettings().client(gl.models.create(model, 10), 10)
  variables = client.model.init(jax.random.key(0), shape)
  attack = gl.attacks.ggl(steps=steps, population=population, width=8)(client)
  weights = gan.Generator(tuple(shape), 8).init(jax.random.key(1), jnp.zeros((1, gan.LATENT)))['params']
  labels = jax.nn.one_hot(data.labels[:trials] % 10, 10).reshape(-1, 1, 10)
  images = jnp.asarray(data.images[:trials]).reshape(-1, 1, *shape)
  send = jax.jit(jax.vmap(lambda image, label: client.local_update(None, variables, image, label).update))
  updates = send(images, labels)

  def observation(update, label):
    knowledge = Knowledge(labels='known')
    return Observation(variables, update, label, knowledge, (1, *shape), 10, prepared=weights)

  @jax.jit
  def together(keys, updates, labels):
    def one(key, update, label):
      seen = observation(update, label)
      state = attack.init(key, seen)
      state, _ = jax.lax.scan(lambda state, _: attack.step(state, seen), state, None, attack.num_steps)
      return state.best[1]

    return jax.vmap(one)(keys, updates, labels)

  @jax.jit
  def single(latents, update, label):
    seen = observation(update, label)
    state = attack.init(jax.random.key(0), seen)
    return attack.init.__self__.evaluate({'latents': latents}, state, seen)[0]

  keys = jax.random.split(jax.random.key(2), len(images))
  first = jax.tree.map(lambda leaf: leaf[0], (updates, labels))
  candidates = [np.float32(c) for c in np.random.default_rng(0).normal(size=(200, 1, gan.LATENT))]
  print('compiling', file=sys.stderr, flush=True)
  jax.block_until_ready(together(keys, updates, labels))
  jax.block_until_ready(single(candidates[0], *first))
  rates = np.asarray(
    [
      [
        len(images) * population * steps / _seconds(functools.partial(together, keys, updates, labels)),
        len(candidates) / _seconds(lambda: [float(single(c, *first)) for c in candidates]),
      ]
      for _ in range(repeats)
    ]
  )
  batched, alone = np.median(rates, axis=0)
  print(
    f'{model}, {dataset} at 32×32×3, {len(images)} uploads × {population} candidates, {jax.devices()[0].device_kind}'
  )
  print(
    f'at once: {batched:.0f} evaluations per second; one after the other, compiled: {alone:.0f}; {batched / alone:.1f}×'
  )


def _seconds(run):
  started = time.monotonic()
  jax.block_until_ready(run())
  return time.monotonic() - started
