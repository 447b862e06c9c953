"""Fishing in a batch (OUTPOST, figure 5): audits of the servers that isolate one sample, and what they isolate."""

import dataclasses
import functools
import itertools
import math
import os
from collections.abc import Callable
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gradleak as gl
from experiments.experiment import Data, Run
from experiments.panels import Panel, sheet
from gradleak import AuditResult
from gradleak.attacks import AttackMethod
from gradleak.core import errors, trees
from gradleak.core.promotion import promoting
from gradleak.core.storage import write_atomically
from gradleak.core.trees import Tree
from gradleak.data import Dataset
from gradleak.defenses import Defense
from gradleak.federated import Client
from gradleak.models import Model, torch_weights
from gradleak.models.model import outputs_shape
from gradleak.report.formatting import number
from gradleak.servers import fishing
from gradleak.servers.fishing_search import Fished, class_query, fish


@dataclasses.dataclass(frozen=True)
class Fishing(Run):
  """An audit of class or feature fishing; its rows also say what the server's queries isolate.

  Its rows have three columns beside those of an audit. The column 'cosine' is the largest cosine between the isolated
  gradient and the gradient of a sample of the class. The column 'queries' counts the rounds of the server. The column
  'alone' says whether the server knows that it isolated one sample. The picture isolated.png shows the reconstructions
  of the first batch.

  Attributes:
    count: samples of the target class in a batch, the first ones.
    modified: whether the server changes the last layer; if not, the attack is the same.
    pool: private images that the batches are drawn from, the first ones of the test split.
    trained: images that the model was trained on, the first ones of the train split; 0 attacks it untrained.
    training_steps: steps of this training, see `fitted`.
    training_optimizer: 'sgd' with momentum 0.9, or 'adam'.
    training_rate: its first learning rate.
  """

  count: int = 1
  modified: bool = True
  pool: int = 1_000
  trained: int = 0
  training_steps: int = 0
  training_optimizer: str = 'sgd'
  training_rate: float = 0.1

  more: ClassVar[str] = 'isolated.json'
  pictured: ClassVar[str] = 'isolated.png'

  def smallest(self) -> dict[str, Any]:
    """Returns what makes this an audit of 8×8 digits and a dense net, in 3 steps."""
    steps = {'trained': min(self.trained, 60), 'training_steps': min(self.training_steps, 2)}
    return {**super().smallest(), **steps, 'batch_size': 6, 'pool': 64, 'public': 40}

  @property
  def trains(self) -> bool:
    """Whether the attacked model is a trained one."""
    return bool(self.trained)

  def method(self) -> AttackMethod:
    """Returns the attack; without its server if this does not change the model."""
    attack = super().method()
    return attack if self.modified else dataclasses.replace(attack, server=None)

  def load(self, data_dir: str | None) -> Data:
    """Returns the `Data`: private images to draw from; `others` are the arguments of `_train_split`, or None."""
    private = gl.data.load(self.dataset, 'test', data_dir=data_dir, limit=self.pool)
    target = self.method().settings['target']
    if min(np.bincount(private.targets)[target], self.public) < 2:
      raise errors.UsageError(f'fishing needs two private images of class {target}, and two public ones')
    others = (self.dataset, data_dir, self.trained) if self.trained and not self.weights else None
    train = _train_split(*(others or (self.dataset, data_dir, self.public)))
    return Data(private, (train.samples[: self.public], train.targets[: self.public]), others)

  def scenario(self, data: Data, seed: int, folder: str | None = None, progress: str = 'none') -> gl.Scenario:
    """Returns the `Scenario`: the batches of all trials one after the other, and the model, trained or not."""
    model = gl.models.create(self.model, data.private.num_classes, init=self.init)
    shape = data.private.samples.shape[1:]
    if data.others is not None:
      recipe = self.training_steps, self.training_optimizer, self.training_rate
      variables = _trained(model, data.others, recipe, seed)
    elif self.trained:
      variables = torch_weights.load(self.weights, model, shape)
    else:
      variables = jax.jit(model.init, static_argnums=1)(jax.random.key(seed), shape)
    target, size = self.method().settings['target'], self.settings.batch_size
    rngs = [np.random.default_rng((seed, trial)) for trial in range(self.trials)]
    chosen = np.concatenate([drawn(rng, data.private.targets, target, self.count, size) for rng in rngs])
    batches = data.private._replace(samples=data.private.samples[chosen], targets=data.private.targets[chosen])
    return self.scenario_of(data._replace(private=batches), variables=variables)

  def briefly(self) -> tuple[float, Self]:
    """Returns (how many steps of training it has, the same with one of them)."""
    if not self.trained or self.weights:
      return 1, self
    return self.training_steps, dataclasses.replace(self, training_steps=1)

  def of_trials(self, data: Data, seed: int) -> Callable[[Defense], Callable[[int], dict]]:
    """Returns defense -> trial -> the columns 'cosine', 'queries' and 'alone' of its row."""
    every, attack = self.scenario(data, seed), self.method()
    target, size = attack.settings['target'], self.settings.batch_size

    def of_trial(defense: Defense, trial: int) -> dict:
      part = slice(trial * size, (trial + 1) * size)
      batch = every._replace(samples=every.samples[part], targets=every.targets[part])
      fished = caught(attack, batch, defense, jax.random.fold_in(jax.random.key(seed), trial))
      cosine = isolation(every.client, fished, batch.samples[: self.count], target)
      return {'cosine': cosine, 'queries': fished.queries, 'alone': bool(fished.alone)}

    return lambda defense: functools.partial(of_trial, defense)

  def write(self, result: AuditResult, folder: str) -> None:
    """Writes isolated.png, samples of the class in the first batch and what was reconstructed, and then the report."""
    labels = {text: label for label, text in self.texts().items()}
    images, captions = list(result.truth[0, : self.count]), ['private'] * self.count
    for (attack, defense), found in result.reconstructions.items():
      (row,) = (row for row in result.rows if (row['attack'], row['defense'], row['trial']) == (attack, defense, 0))
      matched = np.isfinite(found[0]).all(axis=(1, 2, 3))  # the one image of the batch that has a reconstruction
      images.append(np.nan_to_num(found[0, np.argmax(matched)]))
      captions.append(f'{labels[defense]}\n' + ('diverged' if row['psnr'] is None else f'{number(row["psnr"])} dB'))
    panel = Panel(f'{attack}, BatchNorm in {self.client.batch_norm} mode', np.stack(images), captions)
    write_atomically(os.path.join(folder, 'isolated.png'), sheet([panel]))
    super().write(result, folder)  # last: a folder whose report is there is complete


def drawn(rng: np.random.Generator, labels: np.ndarray, target: int, count: int, batch: int) -> np.ndarray:
  """Returns the indices of a batch with `count` samples of the target class, these first."""
  mine, others = np.flatnonzero(labels == target), np.flatnonzero(labels != target)
  return np.r_[rng.choice(mine, count, replace=False), rng.choice(others, batch - count, replace=False)]


def caught(attack: AttackMethod, scenario: gl.Scenario, defense: Defense, key: jax.Array) -> Fished:
  """Returns what the server holds after its queries.

  Args:
    attack: `class_fishing` or `feature_fishing`; without a server the honest model is the one query.
    scenario: its client trains on all images; its public images are the server's.
    defense: the client's.
    key: drives the defense.
  """
  model, shape, given = scenario.client.model, scenario.samples.shape[1:], attack.settings
  send, rounds = sender(scenario.client, defense, shape), itertools.count()

  def query(variables: dict) -> Tree:
    return send(jax.random.fold_in(key, next(rounds)), variables, scenario.samples, scenario.targets).update

  if attack.server is None:
    return Fished(scenario.variables, query(scenario.variables), np.zeros(0), math.nan, False, 1)
  of_batch = query, model, scenario.variables, shape, len(scenario.samples)
  if 'method' not in given:
    return class_query(*of_batch, target=given['target'])
  public = scenario.public[0] if given['method'] == 'difference' else None
  search = {name: given[name] for name in ('target', 'method', 'multiplier', 'max_queries')}
  return fish(*of_batch, **search, public=public)


def isolation(client: Client, fished: Fished, images: np.ndarray, target: int) -> float:
  """Returns the largest cosine between what was isolated and the own gradient of one of these samples.

  From the last layer both have only the target's row, since every sample of the batch contributes to the other rows.
  BatchNorm is on running statistics, as the attacker simulates it.
  """
  shape, label = images.shape[1:], np.full(1, target, np.int32)
  alone = sender(dataclasses.replace(client, batch_norm='eval'), None, shape)
  masks = fishing.own_share(client.model, shape, fished.update, target)

  def own(update: Tree) -> Tree:
    return jax.tree.map(lambda mask, x: jnp.where(mask, x, jnp.zeros_like(x)), masks, update)

  def cosine(image: np.ndarray) -> float:
    update = alone(jax.random.key(0), fished.variables, image[np.newaxis], label).update
    return float(trees.cosine(own(fished.update), own(update)))

  return max(map(cosine, images))


@functools.cache
def sender(client: Client, defense: Defense | None, shape: tuple[int, ...]) -> Callable[..., Any]:
  """Returns the compiled local update of a client under a defense, on images of a shape (H, W, C)."""
  bound = gl.defenses.bind(defense, gl.defenses.Context(client, None, shape))
  return jax.jit(bound.client(client).local_update)


@functools.lru_cache(maxsize=2)
def _train_split(dataset: str, data_dir: str | None, limit: int) -> Dataset:
  """Returns the first images of the train split; the runs of an experiment share them."""
  return gl.data.load(dataset, 'train', data_dir=data_dir, limit=limit)


@functools.lru_cache(maxsize=1)
def _trained(model: Model, split: tuple, recipe: tuple, seed: int) -> dict:
  """Returns the variables of the model trained on a split; the runs of an experiment share them."""
  data = _train_split(*split)
  variables = jax.jit(model.init, static_argnums=1)(jax.random.key(seed), data.samples.shape[1:])
  return fitted(model, variables, data.samples, data.targets, seed, *recipe)


def fitted(
  model: Model,
  variables: dict,
  images: np.ndarray,
  labels: np.ndarray,
  seed: int,
  steps: int,
  optimizer: str = 'sgd',
  rate: float = 0.1,
) -> dict:
  """Returns the variables after so many steps on batches of 128, at a rate that falls to 0; SGD has momentum 0.9."""
  schedule = optax.cosine_decay_schedule(rate, max(1, steps))
  chain = promoting(optax.sgd(schedule, momentum=0.9) if optimizer == 'sgd' else optax.adam(schedule))
  client = gl.ClientSettings().client(model, outputs_shape(model, variables, images.shape[1:])[-1])
  drawing = np.random.default_rng(seed)

  @jax.jit
  def one_step(variables, state, images, labels):
    upload, _, batch_stats = client.participate(None, variables, images, labels)
    updates, state = chain.update(upload.update, state, variables['params'])
    params = optax.apply_updates(variables['params'], updates)
    return {**variables, 'params': params, **({'batch_stats': batch_stats} if batch_stats else {})}, state

  state = chain.init(variables['params'])
  for _ in range(steps):
    chosen = drawing.choice(len(images), min(128, len(images)), replace=False)
    flipped = np.where(drawing.random((len(chosen), 1, 1, 1)) < 0.5, images[chosen], images[chosen, :, ::-1])
    variables, state = one_step(variables, state, flipped, labels[chosen])
  return variables
