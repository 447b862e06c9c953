"""TAG on a small decoder: ours beside the package `breaching`, on the same weights, texts, starts and number of steps.

Run by `python -m benchmarks.texts`. Both move embeddings by the distance L2 + α·L1. They take turns, and what
counts is the ratio. breaching attacks one text at a time, and ours all of them together.
"""

import contextlib
import functools
import io
import logging
import sys
import time
import types
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import gradleak as gl
from benchmarks import breaching, pytorch

LENGTH, WIDTH, HEADS, RATE, ALPHA = 10, 32, 2, 0.05, 0.1


class Setting(NamedTuple):
  """What is attacked.

  Attributes:
    client: ours.
    variables: of its model.
    samples, targets: texts [N, LENGTH] without padding, and their classes.
    starts: first embeddings of each [N, LENGTH, WIDTH].
  """

  client: gl.Client
  variables: Any
  samples: np.ndarray
  targets: np.ndarray
  starts: np.ndarray


def setting(number: int) -> Setting:
  """Returns the `Setting` of so many synthetic notes, cut to LENGTH words."""
  data = gl.data.load('notes', 'test', limit=number, length=LENGTH)
  model = gl.models.gpt(
    data.num_classes, 'default', **data.known, width=WIDTH, layers=1, heads=HEADS, head='last', fused=True
  )
  variables = jax.jit(model.init, static_argnums=1)(jax.random.key(0), (LENGTH,))
  client = gl.Client(model, data.num_classes, modality=gl.modalities.of_config(data.settings))
  spread = float(np.std(np.asarray(variables['params']['wte']['embedding'])))
  starts = spread * np.random.default_rng(0).normal(size=(number, LENGTH, WIDTH)).astype(np.float32)
  return Setting(client, variables, data.samples, data.targets, starts)


def network(given: Setting) -> Any:
  """Returns our decoder as a PyTorch module with the same weights; its embeddings are called as breaching expects."""
  torch = pytorch.torch()
  params = jax.tree.map(lambda x: torch.from_numpy(np.array(x)), given.variables['params'])
  vocabulary, block = len(params['wte']['embedding']), params['h_0']

  class Decoder(torch.nn.Module):
    def __init__(self) -> None:
      super().__init__()
      self.encoder = torch.nn.Embedding(vocabulary, WIDTH)
      self.positions = torch.nn.Parameter(params['wpe']['embedding'])
      sizes = {'qkv': (WIDTH, 3 * WIDTH), 'out': (WIDTH, WIDTH), 'up': (WIDTH, 4 * WIDTH), 'down': (4 * WIDTH, WIDTH)}
      self.dense = torch.nn.ModuleDict({name: torch.nn.Linear(*size) for name, size in sizes.items()})
      self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(WIDTH) for _ in range(3))
      self.head = torch.nn.Linear(WIDTH, given.client.num_classes, bias='bias' in params['score'])

    def forward(self, x: Any) -> Any:
      x = self.encoder(x) + self.positions[None, :LENGTH]
      q, k, v = (
        part.reshape(*part.shape[:2], HEADS, -1).transpose(1, 2)
        for part in self.dense['qkv'](self.norms[0](x)).chunk(3, dim=-1)
      )
      scores = q @ k.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5
      hidden = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 1)
      attended = scores.masked_fill(hidden, -1e9).softmax(-1) @ v
      x = x + self.dense['out'](attended.transpose(1, 2).reshape(x.shape))
      y = torch.nn.functional.gelu(self.dense['up'](self.norms[1](x)), approximate='tanh')
      return self.head(self.norms[2](x + self.dense['down'](y))[:, -1])

  made = Decoder()
  dense = {
    'qkv': block['attn']['c_attn'],
    'out': block['attn']['c_proj'],
    **{ours: block['mlp'][theirs] for ours, theirs in (('up', 'c_fc'), ('down', 'c_proj'))},
    'head': params['score'],
  }
  norms = [block['ln_1'], block['ln_2'], params['ln_f']]
  with torch.no_grad():
    made.encoder.weight.copy_(params['wte']['embedding'])
    for name, weights in dense.items():
      layer = made.head if name == 'head' else made.dense[name]
      layer.weight.copy_(weights['kernel'].T)
      if 'bias' in weights:
        layer.bias.copy_(weights['bias'])
    for layer, weights in zip(made.norms, norms, strict=True):
      layer.weight.copy_(weights['scale'])
      layer.bias.copy_(weights['bias'])
  return made


def by_breaching(module: Any, given: Setting, steps: int) -> np.ndarray:
  """Returns the tokens that breaching's TAG finds of each text, [N, LENGTH]."""
  torch, package = pytorch.torch(), breaching.package()
  logging.getLogger('breaching').setLevel(logging.ERROR)
  changes = [f'optim.max_iterations={steps}', f'optim.step_size={RATE}', f'optim.callback={steps + 1}']
  changes += ['attack_type=optimization']  # the label is known
  loss, found = torch.nn.CrossEntropyLoss(), []
  with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
    warnings.simplefilter('ignore')
    config = package.get_attack_config('tag', [*changes, f'objective.tag_scale={ALPHA}'])
    setup = {'dtype': torch.float, 'device': torch.device('cpu')}
    for text, target, start in zip(given.samples, given.targets, given.starts, strict=True):
      label = torch.tensor([int(target)])
      gradients = torch.autograd.grad(loss(module(torch.from_numpy(text[None]).long()), label), module.parameters())
      about = types.SimpleNamespace(shape=(LENGTH,), modality='text')
      payload = {'parameters': [one.detach() for one in module.parameters()], 'buffers': None, 'metadata': about}
      told = {'num_data_points': 1, 'labels': label, 'local_hyperparams': None}
      shared = {'gradients': list(gradients), 'buffers': None, 'metadata': told}
      attacker = package.attacks.prepare_attack(module, loss, config, setup)
      made, _ = attacker.reconstruct([payload], [shared], {}, initial_data=torch.from_numpy(start[None]))
      found.append(made['data'][0].numpy())
  return np.stack(found)


def ours(given: Setting, steps: int) -> Callable[[slice], np.ndarray]:
  """Returns a function, slice of the texts -> the tokens that our TAG finds of them, compiled for each size."""
  attack = gl.attacks.tag(relaxation='embeddings', steps=steps, learning_rate=RATE)(given.client)
  knowledge = gl.Knowledge(labels='known')

  @functools.partial(jax.jit)
  def searched(samples: jax.Array, targets: jax.Array) -> jax.Array:
    def one(sample: jax.Array, target: jax.Array, key: jax.Array) -> jax.Array:
      update = given.client.local_update(None, given.variables, sample[None], target[None]).update
      classes = jax.nn.one_hot(target[None], given.client.num_classes)
      seen = gl.Observation(given.variables, update, classes, knowledge, (1, LENGTH), given.client.num_classes)
      state = jax.lax.fori_loop(0, steps, lambda _, state: attack.step(state, seen)[0], attack.init(key, seen))
      return attack.reconstruct(state, seen).samples[0]

    return jax.vmap(one)(samples, targets, jax.random.split(jax.random.key(1), len(samples)))

  return lambda chosen: np.asarray(searched(jnp.asarray(given.samples[chosen]), jnp.asarray(given.targets[chosen])))


def main(number: int = 8, steps: int = 300, turns: int = 3) -> None:
  """Prints ms per step and text, ratios to breaching in the same turn, and the share of tokens that is right."""
  given = setting(number)
  module, search = network(given), ours(given, steps)
  logits = given.client.model.apply(given.variables, jnp.asarray(given.samples), False, None)[0]
  apart = np.abs(module(pytorch.torch().from_numpy(given.samples).long()).detach().numpy() - np.asarray(logits)).max()
  print(f'largest difference of the logits: {apart:.1e}')
  runs: dict[str, Callable[[], np.ndarray]] = {
    'breaching': lambda: by_breaching(module, given, steps),
    'ours, all together': lambda: search(slice(None)),
    'ours, one at a time': lambda: np.concatenate([search(slice(i, i + 1)) for i in range(number)]),
  }
  for name in list(runs)[1:]:
    runs[name]()  # compiles
  for turn in range(turns):
    taken = {}
    for name, run in runs.items():
      started = time.perf_counter(), time.process_time()
      found = run()
      wall, cores = time.perf_counter() - started[0], time.process_time() - started[1]
      taken[name] = cores
      per = 1000 / (steps * number)
      print(
        f'turn {turn + 1}, {name}: {wall * per:.2f} ms per step and text, {cores * per:.2f} core ms, '
        f'{taken["breaching"] / cores:.1f} times breaching, {np.mean(found == given.samples):.2f} of the tokens right',
        flush=True,
      )


if __name__ == '__main__':
  main(*map(int, sys.argv[1:]))
