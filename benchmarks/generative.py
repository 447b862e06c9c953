"""Evaluations of candidates per second: all at once, and one after the other, in PyTorch and compiled."""

import jax
import jax.numpy as jnp
import numpy as np

import gradleak as gl
from benchmarks import harness, pytorch, setting
from benchmarks.harness import Column, Variant
from gradleak import Knowledge, Observation
from gradleak.engine import driver
from gradleak.engine.groups import Layout
from gradleak.priors import gan

READS = ('dataset', 'data_dir', 'model', 'models', 'trials', 'steps', 'repeats')
WIDTH = 8  # of the generator
POPULATION, ALONE = 50, 200  # candidates of a generation, and of a run of one after the other
COLUMNS = [
  Column('evaluations/s', 'seconds', lambda seconds: f'{1 / seconds:,.0f}'), *harness.ratios('seconds')
]  # fmt: skip


def main(options: harness.Options) -> None:
  """Measures and prints all three, of `ggl` with an untrained generator: weights change no speed."""
  data = setting.load(options.dataset, options.data_dir, options.trials)
  for model in options.listed_models():
    _measure(options, model, data)


def _measure(options: harness.Options, model: str, data: setting.Dataset) -> None:
  shape = data.samples.shape[1:]
  client = gl.ClientSettings().client(gl.models.create(model, 10), 10)
  variables = client.model.init(jax.random.key(0), shape)
  attack = gl.attacks.ggl(steps=options.steps, population=POPULATION, width=WIDTH)(client)
  weights = gan.Generator(tuple(shape), WIDTH).init(jax.random.key(1), jnp.zeros((1, gan.LATENT)))['params']
  labels = jax.nn.one_hot(data.targets[: options.trials] % 10, 10).reshape(-1, 1, 10)
  images = jnp.asarray(data.samples[: options.trials]).reshape(-1, 1, *shape)
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
    return driver.evaluate(search, variables, lanes, Layout(driver.default_group_size(variables, 1)))

  @jax.jit
  def single(latents, update, label):
    seen = observation(update, label)
    state = attack.init(jax.random.key(0), seen)
    return attack.init.__self__.evaluate({'latents': latents}, state, seen)[0]

  keys = jax.random.key_data(jax.random.split(jax.random.key(2), len(images)))
  lanes = {'key': keys, 'update': updates, 'label': labels}
  one = jax.tree.map(lambda leaf: leaf[0], (updates, labels))
  candidates = [np.float32(c) for c in np.random.default_rng(0).normal(size=(ALONE, 1, gan.LATENT))]

  def looped():
    loop = _loop(model, shape, updates, client.model, labels)
    return harness.timed(lambda: [loop(c) for c in candidates], 'seconds', 1 / ALONE)()

  harness.report(
    f'{model}, {options.dataset} at 32×32×3, {len(images)} uploads × {POPULATION} candidates, {harness.hardware()}',
    [
      Variant('at once', harness.timed(together, 'seconds', 1 / (len(images) * POPULATION * options.steps))),
      Variant(
        'one after the other, compiled',
        harness.timed(lambda: [float(single(c, *one)) for c in candidates], 'seconds', 1 / ALONE),
      ),
      Variant('one after the other in PyTorch', looped),
    ],
    COLUMNS,
    options.repeats,
    warm=True,
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
