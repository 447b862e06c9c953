"""TAG on embeddings of tokens, here and in `breaching`: the same decoder, texts, gradients, starts and settings.

Both compare all gradients but that of the table of embeddings, by the squared distance and α times the sum of
magnitudes. Both take Adam at a constant rate and know the labels. A third line is our usual TAG, which moves
probabilities of tokens.
"""

import contextlib
import dataclasses
import io
import logging
import math
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import gradleak as gl
from benchmarks import breaching, harness, pytorch
from benchmarks.harness import Variant
from gradleak.core import trees
from gradleak.engine import driver
from gradleak.engine.groups import Layout
from gradleak.models import token_weights

READS = ('trials', 'compared', 'steps', 'batch', 'repeats')
LENGTH = 12  # tokens of a text
WIDTH, LAYERS, HEADS = 64, 2, 4
RATE, ALPHA = 0.01, 0.01  # of Adam, and of the sum of magnitudes
COLUMNS = harness.right('tokens', 'tokens')


class Batches(NamedTuple):
  """What both attack.

  Attributes:
    client: ours.
    variables: of its decoder.
    texts: private texts, int [trials, N, T].
    labels: int [trials, N].
    network: the decoder in PyTorch.
    steps: of each attack.
    compared: how many of the batches, the first, breaching attacks and right tokens are counted in.
  """

  client: gl.Client
  variables: dict
  texts: np.ndarray
  labels: np.ndarray
  network: Any
  steps: int
  compared: int

  def figures(self, found: Sequence[Any], watch: pytorch.Stopwatch) -> dict[str, float]:
    """Returns the figures of reconstructed batches [n, N, T], those of the first private ones."""

    def right(texts: Any, place: int) -> float:
      judged = self.client.modality.evaluate(np.asarray(texts), self.texts[place], [], self.labels[place])
      return judged['token_accuracy']

    return harness.batch_figures(found, watch.read(), 'tokens', right, self.compared)


def main(options: harness.Options) -> None:
  """Measures and prints all three; tokens are judged by our measure."""
  made = batches(options.trials, options.batch, options.steps, options.compared)
  method = gl.attacks.tag(steps=made.steps, learning_rate=RATE, alpha=ALPHA, relaxation='embeddings')
  found = harness.report(
    f'tag, notes, {options.trials} batches of {options.batch} texts of {LENGTH} tokens, {LAYERS} blocks of '
    f'width {WIDTH}, {options.steps} steps, {harness.hardware()}',
    [
      Variant('embeddings, all at once', ours(made, method)),
      Variant(f'breaching, the first {made.compared}', theirs(made, method)),
      Variant('probabilities, all at once', ours(made, gl.attacks.tag(steps=made.steps))),
    ],
    COLUMNS,
    options.repeats,
    harness.right_note('Tokens', made.compared),
    warm=True,
  )
  print(harness.paired(found, 'tokens'))


def batches(trials: int, batch: int, steps: int, compared: int) -> Batches:
  """Returns the `Batches` of so many trials, of notes that have no padding."""
  data = gl.data.load('notes', 'test', length=LENGTH)
  whole = np.flatnonzero((data.samples != data.known['padding']).all(axis=1))[: trials * batch]
  shape = {'width': WIDTH, 'layers': LAYERS, 'heads': HEADS, 'length': LENGTH, 'head': 'mean', 'padding': None}
  model = gl.models.gpt(data.num_classes, 'default', vocabulary=data.known['vocabulary'], **shape)
  client = gl.ClientSettings().client(model, data.num_classes)
  client = dataclasses.replace(client, modality=gl.modalities.of_config(data.settings))
  variables = model.init(jax.random.key(0), (LENGTH,))
  texts, labels = data.samples[whole].reshape(trials, batch, -1), data.targets[whole].reshape(trials, batch)
  return Batches(client, variables, texts, labels, network(variables['params']), steps, min(compared, trials))


def network(params: dict) -> Any:
  """Returns the decoder with our parameters as a module of PyTorch; names are those of `token_weights`."""
  torch = pytorch.torch()
  nn = torch.nn

  class Attention(nn.Module):
    def __init__(self):
      super().__init__()
      self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
      q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.c_attn(x).chunk(3, -1))
      hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
      scores = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(hidden, -math.inf)
      return self.c_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

  class Block(nn.Module):
    def __init__(self):
      super().__init__()
      self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
      parts = {'c_fc': nn.Linear(WIDTH, 4 * WIDTH), 'gelu': nn.GELU('tanh'), 'c_proj': nn.Linear(4 * WIDTH, WIDTH)}
      self.mlp = nn.Sequential()
      for name, part in parts.items():
        self.mlp.add_module(name, part)

    def forward(self, x):
      x = x + self.attn(self.ln_1(x))
      return x + self.mlp(self.ln_2(x))

  class Decoder(nn.Module):
    def __init__(self):
      super().__init__()
      tables = {name: nn.Embedding(*params[name]['embedding'].shape) for name in ('wte', 'wpe')}
      blocks = nn.ModuleList(Block() for _ in range(LAYERS))
      self.transformer = nn.ModuleDict({**tables, 'h': blocks, 'ln_f': nn.LayerNorm(WIDTH)})
      self.score = nn.Linear(*params['score']['kernel'].shape, bias=False)

    def forward(self, ids):
      x = self.transformer.wte(ids) + self.transformer.wpe.weight
      for block in self.transformer.h:
        x = block(x)
      return self.score(self.transformer.ln_f(x).mean(1))

  module, ours = Decoder(), {}
  for place, leaf in jax.tree.leaves_with_path(params):
    path = trees.path_names(place)
    ours[token_weights.published_name(path)] = np.asarray(leaf).T if path[-1] == 'kernel' else np.asarray(leaf)
  module.load_state_dict(
    {name: torch.tensor(ours[name.removeprefix('transformer.')]) for name, _ in module.named_parameters()}
  )
  return module


def _build(made: Batches, method: Any) -> tuple[Callable, dict, Layout]:
  """Returns (what makes the attack on a lane, the lanes, their layout)."""
  labels, layout = jnp.asarray(made.labels), Layout(driver.default_group_size(made.variables, made.texts.shape[1]))

  def upload(variables: dict, lane: dict) -> Any:
    return made.client.local_update(None, variables, lane['texts'], lane['labels']).update

  def build(variables: dict, lane: dict) -> tuple[Any, Any, gl.Observation]:
    known = jax.nn.one_hot(lane['labels'], made.client.num_classes)
    seen = gl.Observation(
      variables, lane['update'], known, gl.Knowledge(), made.texts.shape[1:], made.client.num_classes
    )
    return method(made.client), lane['key'], seen

  lanes = {'labels': labels, 'key': jax.random.split(jax.random.key(1), len(labels))}
  private = {'texts': jnp.asarray(made.texts), 'labels': labels}
  lanes['update'] = driver.evaluate(upload, made.variables, private, layout)
  return build, lanes, layout


def ours(made: Batches, method: Any) -> Callable[[], Mapping[str, float]]:
  """Returns what attacks all batches together, compiled at its first call, and returns the figures."""
  build, lanes, layout = _build(made, method)

  def attack() -> Mapping[str, float]:
    watch = pytorch.Stopwatch('cpu')
    return made.figures(driver.run(build, made.variables, lanes, layout, num_steps=made.steps).samples, watch)

  return attack


def starts(made: Batches, method: Any) -> np.ndarray:
  """Returns the first embeddings of each batch, [trials, N, T, width]."""
  build, lanes, _ = _build(made, method)

  def start(variables: dict, lane: dict) -> jax.Array:
    attack, key, seen = build(variables, lane)
    return attack.init(key, seen).dummy['images']

  return np.asarray(driver.evaluate(start, made.variables, lanes, Layout(1)))


def theirs(made: Batches, method: Any) -> Callable[[], Mapping[str, float]]:
  """Returns what attacks the first batches by breaching, one after the other, and returns the figures."""
  first = starts(made, method)

  def attack() -> Mapping[str, float]:
    watch = pytorch.Stopwatch('cpu')
    each = zip(made.texts[: made.compared], made.labels, first, strict=False)
    return made.figures([one(made, *given, made.steps)[0] for given in each], watch)

  breaching.package()
  pytorch.quickest_threads(lambda: one(made, made.texts[0], made.labels[0], first[0], 20))
  return attack


def one(
  made: Batches, texts: np.ndarray, labels: np.ndarray, start: np.ndarray, steps: int
) -> tuple[np.ndarray, list[float]]:
  """Returns (the tokens [N, T] that breaching finds behind the gradient of a batch, its objectives: half of ours).

  Args:
    made: the `Batches`.
    texts: private ones.
    labels: theirs.
    start: embeddings to begin with, [N, T, width].
    steps: of the search.
  """
  torch, package = pytorch.torch(), breaching.package()
  known, loss = torch.tensor(labels).long(), torch.nn.CrossEntropyLoss()
  gradient = pytorch.gradient(made.network, torch.tensor(texts), known)
  parameters = [parameter.detach() for parameter in made.network.parameters()]
  about = types.SimpleNamespace(shape=(texts.shape[1],), modality='text')
  shared = {'num_data_points': len(texts), 'labels': known, 'local_hyperparams': None}
  overrides = [
    'attack_type=optimization', 'optim.optimizer=adam', f'optim.step_size={RATE}', 'optim.warmup=0',
    'optim.step_size_decay=null', 'optim.grad_clip=null', f'optim.max_iterations={steps}',
    f'optim.callback={steps + 1}', f'objective.tag_scale={ALPHA}', 'objective.scale_scheme=constant',
  ]  # fmt: skip
  logging.getLogger('breaching').setLevel(logging.ERROR)
  with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
    warnings.simplefilter('ignore')
    config = package.get_attack_config('tag', overrides)
    setup = {'dtype': torch.float, 'device': torch.device('cpu')}
    attacker = package.attacks.prepare_attack(made.network, loss, config, setup)
    found, stats = attacker.reconstruct(
      [{'parameters': parameters, 'buffers': None, 'metadata': about}],
      [{'gradients': [part.detach() for part in gradient], 'buffers': None, 'metadata': shared}],
      {}, initial_data=torch.tensor(start),
    )  # fmt: skip
  return found['data'].numpy(), stats['Trial_0_Val']
