"""Rules of label inference: how many labels of a batch each reads, by batch size, draw and local training."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import gradleak as gl
from experiments.comparison import CHANCE, GUESSES, LEVELS
from experiments.experiment import Cell, Experiment, Outcome
from experiments.panels import plain
from experiments.study import Data, Measurement, Part, Repeated, mean_of
from gradleak.attacks import labels as label_rules
from gradleak.core import errors, statistics
from gradleak.data import partition
from gradleak.federated import Client, simulation
from gradleak.metrics import label_scores
from gradleak.report import figures
from gradleak.threat import Knowledge, Observation

SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
# Name of a draw -> its partition, given the number of samples that each client holds at least.
DRAWS = {'IID': 'iid(samples={least})', 'Dirichlet 0.1': 'dirichlet(alpha=0.1,least={least})'}
WAYS = ('one step', 'many steps')
EPOCHS, BATCHES, RATE = 2, 4, 0.1  # of 'many steps': passes, batches in each, learning rate
GUESSED = 50  # draws of chance for each client
GROUP = 512  # samples of the clients that share one vectorised pass, roughly
BATCH, TRAINED = 50, 10_000  # of the training before the measurement: batch size, number of samples at most
AUXILIARY = 2_000  # samples that the server holds at least, for the rules that need them


class Condition(NamedTuple):
  """A draw of `DRAWS`, a way of `WAYS`, and the number of samples of each client."""

  draw: str
  way: str
  size: int

  def __str__(self) -> str:
    return f'{self.draw}, {self.way}, {self.size}'


@dataclasses.dataclass(frozen=True)
class Inferences(Repeated):
  """What each rule of `gradleak.attacks.labels.RULES` reads, and what chance guesses.

  Attributes:
    model: as in `gradleak.models.create`, at default initialisation.
    training: steps of SGD before the measurement, batch 50 and rate 0.1, on samples that no client holds; the server's
      auxiliary samples are the first of these.
    clients: of each partition; `repeats` partitions are drawn.
    rules: names of `gradleak.attacks.labels.RULES`.
  """

  model: str
  training: int = 0
  clients: int = 16
  rules: tuple[str, ...] = tuple(label_rules.RULES)

  page: ClassVar[str] = 'labels.png'
  remarks: ClassVar[str] = 'classes present; not applicable'
  intervals: ClassVar[str] = (
    'Ours: mean over clients in % ± half its 95 % interval; “–”: the rule refuses a batch of this size.'
  )

  @property
  def conditions(self) -> dict[str, Condition]:
    """Label -> `Condition`, in the order in which they are measured."""
    return {
      str(condition): condition for condition in itertools.starmap(Condition, itertools.product(DRAWS, WAYS, SIZES))
    }

  def smallest(self) -> dict[str, Any]:
    """Returns what makes this one of 8×8 digits and a dense net, with small batches."""
    few = {'training': min(self.training, 2), 'clients': 4, 'pool': 400, 'repeats': 1, 'largest': 4}
    return {**super().smallest(), **few, 'model': 'mlp'}

  def load(self, data_dir: str | None) -> Data:
    """Returns the `Data`: the first images of the train split, and the next ones."""
    held = self.pool + max(min(BATCH * self.training, TRAINED), min(AUXILIARY, self.pool))
    train = gl.data.load(self.dataset, 'train', data_dir=data_dir, limit=held)
    private, others = ((train.samples[part], train.targets[part]) for part in np.split(np.arange(held), [self.pool]))
    return Data(private, others)

  def parts(self, data: Data, seed: int, progress: str) -> Iterator[Part]:
    """Yields (label, function that measures it) of each condition."""
    victim = functools.cache(functools.partial(self._victim, data, jax.random.key(seed)))
    drawn = functools.cache(functools.partial(self._drawn, data.private[1], seed))
    for label, condition in self.conditions.items():
      yield label, functools.partial(self._measured, label, condition, data.private, victim, drawn, seed)

  def said(self, label: str, rows: list[dict]) -> str:
    """Returns a line on what was measured."""
    read = {name: scores['instances'] for name, scores in rows[0]['guesses'].items() if 'instances' in scores}
    return f'{label}: ' + ', '.join(f'{name} {100 * np.mean(values):.0f} %' for name, values in read.items())

  def _victim(self, data: Data, key: jax.Array) -> tuple[dict, float, jax.Array]:
    """Returns (variables, the fraction of the private pool that is classified correctly, auxiliary images by class)."""
    shape, classes = data.private[0].shape[1:], int(data.private[1].max()) + 1
    client = client_of(self.model, classes, WAYS[0], 1)
    variables = jax.jit(client.model.init, static_argnums=1)(jax.random.fold_in(key, 0), shape)
    if self.training:
      variables = _compiled_training(client)(variables, jax.random.fold_in(key, 1), *data.trained, self.training)
    examples = label_rules.class_images(*(x[:AUXILIARY] for x in data.trained), classes)
    return variables, simulation.accuracy(client.model, variables, *data.private)[0], examples

  def _drawn(self, truth: np.ndarray, seed: int, draw: str) -> list[np.ndarray]:
    """Returns the samples of the clients of all partitions; a client of size N trains on the first N of them."""
    text, found = DRAWS[draw].format(least=self.held(max(SIZES))), []
    for repeat in range(self.repeats):
      key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), 2), repeat)
      rng = partition.generator_of(jax.random.fold_in(key, 1))
      found += [rng.permutation(part) for part in partition.parse(text, key, truth, self.clients)]
    return found

  def _measured(
    self, label: str, condition: Condition, private: tuple, victim: Callable, drawn: Callable, seed: int
  ) -> Measurement:
    """Returns ([its row], nothing)."""
    size, (variables, accuracy, examples) = self.held(condition.size), victim()
    chosen = np.stack([part[:size] for part in drawn(condition.draw)])
    images, truth = (x[chosen] for x in private)
    classes = int(private[1].max()) + 1
    client = client_of(self.model, classes, condition.way, size)
    refusals = refused(client, variables, images.shape[1:], examples)
    read = _compiled_rules(client, images.shape[1:], tuple(rule for rule in self.rules if rule not in refusals))
    found = jax.device_get(read(variables, examples, images, truth))
    guesses = {rule: {'refused': refusals[rule]} if rule in refusals else scored(found[rule], truth)
               for rule in self.rules}  # fmt: skip
    rng = np.random.default_rng((seed, size))
    chance = [scored(rng.integers(classes, size=truth.shape), truth) for _ in range(GUESSED)]
    guesses[CHANCE] = {level: np.mean([one[level] for one in chance], axis=0).tolist() for level in chance[0]}
    row = {
      'defense': label,
      **condition._asdict(),
      'held': size,
      'local_steps': client.num_steps(size),
      'present': float(np.mean([len(np.unique(labels)) for labels in truth])),
      'trained': bool(self.training),
      'accuracy': accuracy,
      'guesses': guesses,
    }
    return [row], {}

  def outcome(self, cell: Cell, rows: list[dict]) -> Outcome:
    """Returns the `Outcome` of a cell among the rows of its run."""
    row = self.row_of(cell, rows)
    level, _, name = cell.metric.partition('_')
    none = [rule for rule, scores in row['guesses'].items() if 'refused' in scores]
    remark = f'{row["present"]:.1f}' + (f'; {", ".join(none)}' if none else '')
    remark += f'; network {100 * row["accuracy"]:.0f} % accurate' if row['trained'] else ''
    if name in none:
      return Outcome(None, None, None, 0, None, 0, remark)
    values = 100 * np.asarray(row['guesses'][name][level])
    return mean_of(values, remark)

  def picture(self, rows: list[dict]) -> bytes:
    """Returns a PNG: labels read against the batch size, a panel per draw and way, a line per rule."""
    markers = dict(zip(self.rules, itertools.cycle('osD^vPX'), strict=False))
    with figures.figure(7.6, 5.6, layout='constrained') as (figure, png):
      panels = figure.subplots(len(DRAWS), len(WAYS), sharex=True, sharey=True)
      for axes, (draw, way) in zip(panels.flat, itertools.product(DRAWS, WAYS), strict=True):
        inside = [row for row in rows if (row['draw'], row['way']) == (draw, way)]
        for name in (*self.rules, CHANCE):
          points = [row for row in inside if 'instances' in row['guesses'][name]]
          if not points:
            continue
          values = [100 * np.asarray(row['guesses'][name]['instances']) for row in points]
          mean, low, high = np.transpose([statistics.mean_interval(one) for one in values])
          sizes = [row['size'] for row in points]
          if name == CHANCE:
            axes.plot(sizes, mean, color=figures.SOFT, linestyle='--', linewidth=1.2, label=name)
            continue
          colour, dashes = figures.line_style(name, self.rules)
          look = {'marker': markers[name], 'markersize': 4, 'linewidth': 1.3, 'linestyle': dashes, 'label': name}
          if len(points) == 1:  # around the points of other rules
            look |= {'markersize': 8, 'fillstyle': 'none', 'linestyle': 'none'}
          axes.plot(sizes, mean, color=colour, **look)
          axes.fill_between(sizes, low, high, color=colour, alpha=0.15, linewidth=0)
        axes.set(title=f'{draw}, {way}', ylim=(-3, 104), xlim=(0.85, max(SIZES) * 1.2))
        axes.set_xscale('log', base=2)
        axes.set_xticks(SIZES, labels=list(map(str, SIZES)))
        plain(axes)
      figure.supxlabel('samples of a client', fontsize=8.5)
      figure.supylabel('labels read, %, as a multiset (95 % interval)', fontsize=8.5)
      handles = {
        text: line for axes in panels.flat for line, text in zip(*axes.get_legend_handles_labels(), strict=True)
      }
      figure.legend(
        handles.values(), handles, loc='outside upper center', ncols=len(handles), frameon=False, columnspacing=1.5
      )
      return png()


def client_of(model: str, classes: int, way: str, size: int) -> Client:
  """Returns the `Client` of `size` samples that shares its gradient, or its delta after many steps."""
  given = gl.ClientSettings()
  if way != WAYS[0]:
    given = gl.ClientSettings(
      share='delta', local_epochs=EPOCHS, local_batch_size=max(1, size // BATCHES), learning_rate=RATE
    )
  return given.client(_network(model, classes), classes)


@functools.cache  # one object, so that clients are equal
def _network(model, classes):
  return gl.models.create(model, classes, init='default')


def observed(
  client: Client, variables: dict, update: dict, shape: tuple[int, ...], examples: jax.Array | None = None
) -> tuple[Observation, float | None]:
  """Returns what the server observes of a client, and what it divides a delta by: learning rate × local steps.

  Args:
    client: the `Client`.
    variables: the model's.
    update: what the client sent.
    shape: (N, H, W, C) of its samples.
    examples: auxiliary images of each class, [classes, n, H, W, C], or None.
  """
  steps = client.num_steps(shape[0])
  knowledge = Knowledge(labels='inferred', local_steps=steps, share=client.share)
  unknown = jnp.zeros((shape[0], client.num_classes))
  observation = Observation(variables, update, unknown, knowledge, shape, client.num_classes, class_images=examples)
  return observation, None if client.share == 'gradient' else RATE * steps


def refused(
  client: Client, variables: dict, shape: tuple[int, ...], examples: jax.Array | None = None
) -> dict[str, str]:
  """Returns rule -> what it says of a batch of that shape, for each rule that cannot read it."""
  observation, moved = observed(client, variables, variables['params'], shape, examples)
  found = {}
  for rule in label_rules.RULES:
    try:
      jax.eval_shape(functools.partial(label_rules.infer, rule, client.model, moved=moved), observation)
    except errors.UsageError as error:
      found[rule] = str(error)
  return found


@functools.cache
def _compiled_rules(client, shape, rules):
  """Returns the compiled (variables, auxiliary, samples, targets of all clients) -> {rule: labels that it reads}."""

  def read(variables, examples, images, truth):
    def one(sample):
      update = client.local_update(None, variables, *sample).update
      observation, moved = observed(client, variables, update, shape, examples)
      return {rule: label_rules.infer(rule, client.model, observation, moved) for rule in rules}

    return jax.lax.map(one, (images, truth), batch_size=max(1, min(len(images), GROUP // shape[0])))

  return jax.jit(read)


@functools.cache
def _compiled_training(client):
  """Returns the compiled (variables, key, samples, targets, steps) -> variables after SGD."""

  def trained(variables, key, images, labels, steps):
    def one_step(index, params):
      chosen = jax.random.randint(jax.random.fold_in(key, index), (BATCH,), 0, len(images))
      update = client.local_update(None, {**variables, 'params': params}, images[chosen], labels[chosen]).update
      return jax.tree.map(lambda p, u: p - RATE * u, params, update)

    params = jax.lax.fori_loop(jnp.int32(0), jnp.int32(steps), one_step, variables['params'])
    return {**variables, 'params': params}

  compiled = jax.jit(trained)
  return lambda variables, key, images, labels, steps: compiled(
    variables, key, jnp.asarray(images), jnp.asarray(labels), jnp.int32(steps)
  )


def scored(found: np.ndarray, truth: np.ndarray) -> dict[str, list[float]]:
  """Returns a list per field of `LabelScores`, an entry per client; both arguments are integers [clients, N]."""
  scores = [label_scores(*pair) for pair in zip(found, truth, strict=True)]
  return {name: [getattr(one, name) for one in scores] for name in scores[0]._fields}


def _labels():
  networks = {
    'LeNet, untrained': ('lenet', Inferences('cifar10', 8, 10_000, 'lenet(activation=relu)', mini={'repeats': 2})),
    'LeNet, trained': (
      'lenet_trained',
      Inferences('cifar10', 8, 10_000, 'lenet(activation=relu)', 5000, mini={'repeats': 2, 'training': 1000}),
    ),
    'ViT, untrained': (
      'vit',
      Inferences('cifar10', 8, 10_000, 'vit_tiny', mini={'repeats': 1, 'model': 'vit_tiny(depth=2,width=64,heads=2)'}),
    ),
  }
  shown = {'instances': 'labels read, %', 'classes': 'classes found, %'}
  cells = [
    Cell(f'{title}; {draw}, {way}: {shown[level]}', str(size), f'{level}_{name}', run, str(Condition(draw, way, size)))
    for title, (run, _) in networks.items()
    for level, draw, way, size, name in itertools.product(LEVELS, DRAWS, WAYS, SIZES, GUESSES)
  ]
  return Experiment(
    'labels',
    'Not a table of a paper.',
    'Labels read from an update, by rule and batch size, CIFAR-10',
    'How well labels are read where they repeat, from deltas of many steps, and from trained models. Nothing of this '
    'is printed.',
    dict(networks.values()),
    tuple(cells),
    'Lines are numbers of samples of a client. Labels read: Σ over classes of min(true count, count read), of the '
    'batch. Classes found: of those present, those read at least once.',
    (
      f'Many steps: {EPOCHS} epochs of {BATCHES} batches (of single samples where there are fewer), SGD at {RATE}; the '
      'server, which knows the rate, divides the delta by the sum of the rates.',
      f'Auxiliary samples, which the rule rlu uses: {AUXILIARY:,} of the same dataset that no client holds.',
      f'Chance: labels drawn uniformly from all classes, {GUESSED} times for each client.',
      f'Clients hold samples of the train split by {" or ".join(DRAWS)}, at least {max(SIZES)} each, and use as many '
      'of them as the line says; partitions are drawn anew in each repeat.',
      'Networks have their default initialisation; the trained one is no further than its accuracy says.',
    ),
  )


EXPERIMENTS = (_labels(),)
