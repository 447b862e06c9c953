"""Fishing in a batch (OUTPOST, figure 5): what one query, or a few, isolate of it, and the picture that this yields."""

import dataclasses
import functools
import itertools
import os
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gradleak as gl
from experiments.experiment import Outcome
from experiments.measured import Data, Repeated
from experiments.panels import Panel
from gradleak import errors, metrics, trees
from gradleak.attacks import fishing
from gradleak.defenses import registry as defenses
from gradleak.engine import driver
from gradleak.federated import Client
from gradleak.metrics import statistics
from gradleak.models import torch_weights
from gradleak.progress import reporter
from gradleak.report import figures
from gradleak.strictness import lenient

# Strategy -> (samples of the target class in the batch, search for one of them, whether with public images).
STRATEGIES = {
  'class fishing': (1, None, False),
  'feature fishing': (2, 'published', False),
  'feature fishing (ours)': (2, 'difference', True),
}
DEFENSES = {
  'GC': 'prune(rate=0.8)',
  'DP': f'laplace(scale={(0.1 / 2) ** 0.5:.6g})',
  'OUTPOST': 'outpost(noise=0.8,fisher=0.4,decay=0.1,prune=0.8)',
}


class Condition(NamedTuple):
  """One picture of the figure.

  Attributes:
    strategy: a key of `STRATEGIES`.
    trained: whether the model is.
    mode: BatchNorm at the client, 'train' or 'eval'.
    modified: whether the server changes the last layer; the attacker does what it would do if it had.
    defense: a key of `DEFENSES`, or ''.
  """

  strategy: str
  trained: bool = True
  mode: str = 'eval'
  modified: bool = True
  defense: str = ''

  @property
  def row(self):
    """All but the strategy, in words."""
    words = 'trained' if self.trained else 'untrained', self.mode, '' if self.modified else 'unmodified', self.defense
    return ', '.join(filter(None, words))

  def __str__(self):
    return f'{self.strategy}: {self.row}'


@dataclasses.dataclass(frozen=True)
class Fishings(Repeated):
  """How well one sample is isolated of a batch, over `repeats` batches, and what the first one's looks like.

  Attributes:
    model: as in `gradleak.models.create`.
    batch: images in the batch.
    target: the class that is fished for.
    inner, steps, start: gradient matching, as in `fishing.class_fishing`.
    tv: its weight of total variation, of an untrained and of a trained model.
    public: how many images the server holds, the first ones of the train split.
    trained: how many images of the train split the trained model has seen, the first ones.
    training: steps that it took, batch 128.
    weights: a file of PyTorch weights for the trained model, in place of training.
  """

  model: str = 'resnet20(pixels=imagenet)'
  batch: int = 128
  target: int = 1
  inner: str = 'csdlg'
  steps: int = 24_000
  start: str = 'normal'
  tv: tuple[float, float] = (1e-3, 0.05)
  public: int = 2_000
  trained: int = 50_000
  training: int = 8_000
  weights: str = dataclasses.field(default='', kw_only=True)

  page = 'isolated.png'
  remarks = 'alone, as the attacker sees it; the picture is nearest to, of all in the batch'

  @property
  def conditions(self):
    """Label -> `Condition`, in the order in which they are measured."""
    found = []
    for strategy in STRATEGIES:
      ours = strategy.endswith('(ours)')
      for trained in (False, True):
        found += [Condition(strategy, trained, mode) for mode in ('eval', 'train')]
      found += [] if ours else [Condition(strategy, mode=mode, modified=False) for mode in ('eval', 'train')]
      found += [Condition(strategy, defense=defense) for defense in DEFENSES]
    return {str(condition): condition for condition in found}

  def at_smoke(self):
    """Returns this on 8×8 digits and a dense net, in 3 steps."""
    few = {'model': 'mlp', 'batch': 6, 'steps': 3, 'public': 40, 'trained': 60, 'training': 2, 'weights': ''}
    return dataclasses.replace(super().at_smoke(), **few)

  def changes(self, scale):
    """Returns what a scale changes, and where the trained model's weights come from if it is not trained here."""
    changed = super().changes(scale)
    if not self.weights:
      return changed
    changed = [text for text in changed if not text.startswith(('training ', 'weights '))]
    return [*changed, f'the trained model is {os.path.basename(self.weights)}, not trained here']

  def load(self, data_dir):
    """Returns the `Data`.

    Raises:
      UsageError: for data that are missing (says how to prepare them) or too few.
    """
    private = gl.data.load(self.dataset, 'test', data_dir=data_dir, limit=self.pool)
    needed = self.public if self.weights else max(self.public, self.trained)
    train = gl.data.load(self.dataset, 'train', data_dir=data_dir, limit=needed)
    if min(np.bincount(private.labels)[self.target], self.public) < 2:
      raise errors.UsageError(f'fishing needs two private images of class {self.target}, and two public ones')
    return Data((private.images, private.labels), (train.images, train.labels))

  def parts(self, data, seed, progress):
    """Yields (label, function that measures it) of each condition."""
    victims = functools.cache(functools.partial(self._victims, data, seed))
    for label, condition in self.conditions.items():
      yield label, functools.partial(self._condition, label, condition, data, seed, victims, reporter(progress))

  def said(self, label, rows):
    """Returns a line on what was measured."""
    row = rows[0]
    return f'{label}: cosines {", ".join(f"{x:.3f}" for x in row["cosine"])}; {row["psnr"]:.1f} dB'

  def _victims(self, data, seed):
    """Returns the model, and whether it is trained -> (variables, accuracy on the private images)."""
    (images, labels), shape = data.private, data.private[0].shape[1:]
    model, key = gl.models.create(self.model, 10, init='default'), jax.random.key(seed)
    untrained = jax.jit(model.init, static_argnums=1)(key, shape)
    if self.weights:
      trained = torch_weights.load(self.weights, model, shape)
    else:
      trained = fitted(model, untrained, *(x[: self.trained] for x in data.trained), self.training, seed)
    judge = jax.jit(lambda variables: model.apply(variables, jnp.asarray(images), False, None)[0])
    return model, {
      is_trained: (variables, float(np.mean(np.argmax(judge(variables), axis=1) == labels)))
      for is_trained, variables in ((False, untrained), (True, trained))
    }

  def _condition(self, label, condition, data, seed, victims, progress):
    """Returns ([its row], what was found in the first batch beside its samples of the class)."""
    model, by_training = victims()
    honest, accuracy = by_training[condition.trained]
    found, public = [], data.trained[0][: self.public]
    for repeat in range(self.repeats):
      chosen = drawn(np.random.default_rng((seed, repeat)), data.private[1], self.target, condition, self.batch)
      images, labels = (x[chosen] for x in data.private)
      key = jax.random.fold_in(jax.random.key(seed), repeat)
      fished = caught(condition, model, honest, (images, labels), self.target, public, key)
      mine = images[labels == self.target]
      found.append((isolation(model, fished, mine, self.target), fished.queries, bool(fished.alone)))
      if not repeat:
        image = self._matched(condition, model, fished, images.shape, key, progress)
        shown = image, mine, labels
        nearest = labels[np.argmax(metrics.pearson(*np.broadcast_arrays(image, images)))]
    image, mine, labels = shown
    pairs = np.broadcast_arrays(image, mine)
    psnr = metrics.psnr(*pairs)
    best = int(np.argmax(psnr))
    cosines, queries, alone = zip(*found, strict=True)
    row = {
      'defense': label,
      'cosine': cosines,
      'queries': queries,
      'alone': alone,
      'psnr': float(psnr[best]),
      'ssim': float(metrics.ssim(*pairs)[best]),
      'nearest': 'its class' if nearest == self.target else 'another class',
      'accuracy': accuracy,
    }
    return [row], {'image': np.clip(image, 0, 1), 'truth': mine, 'psnr': np.float32(row['psnr'])}

  def _matched(self, condition, model, fished, shape, key, progress):
    """Returns the image [1, H, W, C] that gradient matching makes of what was isolated."""
    build = Matching(client(model), shape, self.target, self.inner, self.steps, self.start)
    lanes = {'key': key[np.newaxis], 'tv': jnp.float32([self.tv[condition.trained]])}
    shared = {'variables': fished.variables, 'update': fished.update}

    def on_chunk(done):
      if progress is not None:
        progress(str(condition), done, done.objective)

    return driver.run(build, shared, lanes, num_steps=self.steps, group_size=1, on_chunk=on_chunk).images[0]

  def outcome(self, cell, rows):
    """Returns the `Outcome` of a cell among the rows of its run."""
    row = self.row_of(cell, rows)
    remark = f'{sum(row["alone"])} of {len(row["alone"])}; {row["nearest"]}'
    if cell.metric in ('psnr', 'ssim'):
      return Outcome(row[cell.metric], None, None, 1, None, 0, remark)
    mean, low, high = statistics.mean_interval(row[cell.metric])
    return Outcome(mean, low, high, len(row['cosine']), None, 0, remark)

  def picture(self, rows):
    """Returns a PNG: the cosines of every batch, a panel per strategy."""
    names = list(dict.fromkeys(condition.row for condition in self.conditions.values()))
    with figures.figure(2.4 * len(STRATEGIES) + 1.2, 0.24 * len(names) + 1.0, layout='constrained') as (figure, png):
      panels = figure.subplots(1, len(STRATEGIES), sharex=True, sharey=True)
      for axes, strategy in zip(panels, STRATEGIES, strict=True):
        for row in rows:
          condition = self.conditions[row['defense']]
          if condition.strategy == strategy:
            at = [names.index(condition.row)] * len(row['cosine'])
            axes.plot(row['cosine'], at, 'o', color='#2f86c9', markersize=5, alpha=0.5, markeredgewidth=0)
        axes.set(title=strategy, xlim=(-1.05, 1.05), ylim=(len(names) - 0.5, -0.5))
        axes.set_yticks(range(len(names)), labels=names)
        axes.grid(color='#0a0b0c', alpha=0.1, linewidth=0.6)
        axes.spines[['top', 'right']].set_visible(False)
      figure.supxlabel('cosine between what was isolated and the sample’s own gradient', fontsize=8.5)
      return png()

  def panels(self, kept):
    """Returns a grid per strategy: the samples of the class, then what was found under each condition."""
    found = []
    for strategy in STRATEGIES:
      conditions = [(label, one) for label, one in self.conditions.items() if one.strategy == strategy]
      truth = kept[conditions[0][0]]['truth']
      images = [*truth, *(kept[label]['image'][0] for label, _ in conditions)]
      captions = ['\n'.join([*one.row.split(', '), f'{kept[label]["psnr"]:.1f} dB']) for label, one in conditions]
      found.append(Panel(strategy, np.stack(images), ['private'] * len(truth) + captions))
    return found

  def minutes(self):
    """Returns a rough estimate of the time on two cores."""
    training = 0 if self.weights else self.training * 0.6
    return (training + len(self.conditions) * (self.steps * 0.02 + self.repeats * 8)) / 60 + 3


@dataclasses.dataclass(frozen=True)
class Matching:
  """Gradient matching of an isolated sample, as `driver.run` takes it; equal ones compile once.

  Attributes:
    client: that the attacker simulates.
    shape: of the batch, (N, H, W, C).
    target, inner, steps, start: as in `fishing.class_fishing`.
  """

  client: Client
  shape: tuple
  target: int
  inner: str
  steps: int
  start: str

  def __call__(self, shared, lane):
    """Returns (attack, key, observation)."""
    settings = {'target': self.target, 'inner': self.inner, 'steps': self.steps, 'start': self.start}
    attack = fishing.class_fishing(self.client, tv=lane['tv'], **settings)
    unknown = jnp.zeros((self.shape[0], 10), jnp.float32)
    seen = shared['variables'], shared['update'], unknown, gl.Knowledge(labels='unused'), self.shape, 10
    return attack, lane['key'], gl.Observation(*seen)


def drawn(rng, labels, target, condition, batch):
  """Returns the indices of a batch with as many samples of the target class as the strategy is for, these first."""
  count = STRATEGIES[condition.strategy][0]
  mine, others = np.flatnonzero(labels == target), np.flatnonzero(labels != target)
  return np.r_[rng.choice(mine, count, replace=False), rng.choice(others, batch - count, replace=False)]


def caught(condition, model, honest, batch, target, public, key):
  """Returns what the server holds after its queries, a `fishing.Fished`."""
  shape, number = batch[0].shape[1:], len(batch[0])
  send = sender(model, shape, condition.mode, condition.defense)
  rounds = itertools.count()

  def query(variables):
    return send(jax.random.fold_in(key, next(rounds)), variables, *batch).update

  if not condition.modified:
    return fishing.Fished(honest, query(honest), np.zeros(0), float('nan'), False, 1)
  _, method, informed = STRATEGIES[condition.strategy]
  if method is None:
    return fishing.class_query(query, model, honest, shape, number, target=target)
  return fishing.feature_fishing(
    query, model, honest, shape, number, target=target, method=method, public=public if informed else None
  )


def isolation(model, fished, images, target):
  """Returns the largest cosine between what was isolated and the own gradient of one of these samples.

  Both without the last layer's other rows, in which every sample of the batch has its share, BatchNorm on running
  statistics as the attacker simulates it.
  """
  shape, label = images.shape[1:], np.full(1, target, np.int32)
  alone, masks = sender(model, shape), fishing.own_share(model, shape, fished.update, target)

  def own(update):
    return jax.tree.map(lambda mask, x: jnp.where(mask, x, jnp.zeros_like(x)), masks, update)

  def cosine(image):
    update = alone(jax.random.key(0), fished.variables, image[np.newaxis], label).update
    return float(trees.cosine(own(fished.update), own(update)))

  return max(map(cosine, images))


@functools.cache
def client(model, mode='eval'):
  """Returns the undefended client with BatchNorm in that mode, the same one each time: equal ones compile once."""
  return Client(model, 10, batch_norm=mode)


@functools.cache
def sender(model, shape, mode='eval', defense=''):
  """Returns the compiled local update of a client with BatchNorm in that mode, and a defense of `DEFENSES` or none."""
  sending = client(model, mode)
  if defense:
    made = defenses.parse(DEFENSES[defense], defenses.Context(sending, None, shape))
    sending = made.build(made.numbers, sending)
  return jax.jit(sending.local_update)


def fitted(model, variables, images, labels, steps, seed):
  """Returns the variables after so many steps of SGD with momentum 0.9, batch 128, a rate of 0.1 down to 0."""
  optimizer = lenient(optax.sgd(optax.cosine_decay_schedule(0.1, max(1, steps)), momentum=0.9))
  drawing = np.random.default_rng(seed)

  @jax.jit
  def one_step(variables, state, images, labels):
    upload, _, batch_stats = client(model, 'train').participate(None, variables, images, labels)
    updates, state = optimizer.update(upload.update, state, variables['params'])
    params = optax.apply_updates(variables['params'], updates)
    return {**variables, 'params': params, **({'batch_stats': batch_stats} if batch_stats else {})}, state

  state = optimizer.init(variables['params'])
  for _ in range(steps):
    chosen = drawing.choice(len(images), min(128, len(images)), replace=False)
    flipped = np.where(drawing.random((len(chosen), 1, 1, 1)) < 0.5, images[chosen], images[chosen, :, ::-1])
    variables, state = one_step(variables, state, flipped, labels[chosen])
  return variables
