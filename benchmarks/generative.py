"""Evaluations of candidates per second: all at once, and one after the other, in PyTorch and compiled."""

import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

import gradleak as gl
from benchmarks import pytorch, setting
from gradleak import Knowledge, Observation
from gradleak.engine import driver
from gradleak.priors import gan

WIDTH = 8  # of the generator


def main(
  *, model: str, dataset: str, data_dir: str | None, trials: int, population: int, steps: int, repeats: int
) -> None:
  """Measures and prints all three, of `ggl` with an untrained generator: weights change no speed.

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
  attack = gl.attacks.ggl(steps=steps, population=population, width=WIDTH)(client)
  weights = gan.Generator(tuple(shape), WIDTH).init(jax.random.key(1), jnp.zeros((1, gan.LATENT)))['params']
  labels = jax.nn.one_hot(data.labels[:trials] % 10, 10).reshape(-1, 1, 10)
  images = jnp.asarray(data.images[:trials]).reshape(-1, 1, *shape)
  send = jax.jit(jax.vmap(lambda image, label: client.local_update(None, variables, image, label).update))
  updates = send(images, labels)

  def observation(update, label):
    knowledge = Knowledge(labels='known')
    return Observation(variables, update, label, knowledge, (1, *shape), 10, prepared=weights)

  def search(shared, lane):
    del shared
    seen = observation(lane['update'], lane['label'])
    state = attack.init(jax.random.wrap_key_data(lane['key']), seen)
    state, _ = jax.lax.scan(lambda state, _: attack.step(state, seen), state, None, attack.num_steps)
    return state.best[1]

  def together():
    return driver.evaluate(search, variables, lanes, group_size=driver.default_group_size(variables, 1))

  @jax.jit
  def single(latents, update, label):
    seen = observation(update, label)
    state = attack.init(jax.random.key(0), seen)
    return attack.init.__self__.evaluate({'latents': latents}, state, seen)[0]

  try:
    loop = _loop(model, shape, updates, client.model, labels)
  except pytorch.Unavailable as error:
    loop, missing = None, str(error)
  keys = jax.random.key_data(jax.random.split(jax.random.key(2), len(images)))
  lanes = {'key': keys, 'update': updates, 'label': labels}
  first = jax.tree.map(lambda leaf: leaf[0], (updates, labels))
  candidates = [np.float32(c) for c in np.random.default_rng(0).normal(size=(200, 1, gan.LATENT))]
  print('compiling', file=sys.stderr, flush=True)
  jax.block_until_ready(together())
  jax.block_until_ready(single(candidates[0], *first))
  rates = np.asarray(
    [
      [
        len(images) * population * steps / _seconds(together),
        len(candidates) / _seconds(lambda: [float(single(c, *first)) for c in candidates]),
        len(candidates) / _seconds(lambda: [loop(c) for c in candidates]) if loop else np.nan,
      ]
      for _ in range(repeats)
    ]
  )
  batched, alone, looped = np.median(rates, axis=0)
  print(
    f'{model}, {dataset} at 32×32×3, {len(images)} uploads × {population} candidates, {jax.devices()[0].device_kind}'
  )
  print(
    f'at once: {batched:.0f} evaluations per second; one after the other, compiled: {alone:.0f}; {batched / alone:.1f}×'
  )
  print(
    f'one after the other in PyTorch, as published: {looped:.0f}; {batched / looped:.1f}×'
    if loop
    else f'one after the other in PyTorch, as published: n/a: {missing}'
  )


def _loop(model, shape, updates, ours, labels):
  """Returns candidate -> its distance by PyTorch, as GGL's loop evaluates it: an image, a gradient, a number.

  The generator has our layers with weights of its own; network and update are ours.
  """
  torch = pytorch.torch()
  network = pytorch.network(model, 10, shape)
  first = jax.tree.map(lambda leaf: leaf[0], updates)
  observed = [torch.tensor(np.ascontiguousarray(x)) for x in pytorch.arrays(network, ours, first, shape)]
  label = torch.tensor([int(jnp.argmax(labels[0, 0]))])
  nn, channels, width = torch.nn, shape[-1], WIDTH

  class Standardise(nn.Module):
    def forward(self, x):
      return nn.functional.leaky_relu(x * torch.rsqrt((x * x).mean(1, keepdim=True) + 1e-8), 0.2)

  parts, features = [nn.Linear(gan.LATENT, 16 * 4 * width), nn.Unflatten(1, (4 * width, 4, 4))], 4 * width
  for fewer in (4 * width, 2 * width, width):
    parts += [Standardise(), nn.Upsample(scale_factor=2), nn.Conv2d(features, fewer, 3, padding=1)]
    features = fewer
  generator = nn.Sequential(*parts, Standardise(), nn.Conv2d(features, channels, 3, padding=1), nn.Sigmoid())

  def distance(candidate):
    with torch.no_grad():
      image = generator(torch.tensor(candidate))
    found = pytorch.gradient(network, image, label)
    return float(sum(((a - b) ** 2).sum() for a, b in zip(found, observed, strict=True)))

  return distance


def _seconds(run):
  started = time.monotonic()
  jax.block_until_ready(run())
  return time.monotonic() - started
