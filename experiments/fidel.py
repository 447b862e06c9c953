"""Fidel (Enthoven, Al-Ars, 2021): how many private samples a client's first dense layer reveals."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import gradleak as gl
from experiments.experiment import Cell, Outcome, Paper
from experiments.panels import plain
from experiments.study import Measurement, Part, Study, mean_of
from gradleak.attacks import decoder
from gradleak.attacks.fidel import PartialReconstructions, from_update
from gradleak.core import grammar, methods, statistics
from gradleak.core.methods import Method
from gradleak.core.trees import Layer
from gradleak.federated import Client, simulation
from gradleak.metrics import revealed
from gradleak.report import figures

PAPER = (
  'Enthoven, Al-Ars: Fidel: Reconstructing Private Training Samples from Weight Updates in Federated Learning. 2021.'
)
METRICS = (
  'A sample is fully revealed if some neuron’s reconstruction has a Pearson correlation of 0.98 or more with it, as in '
  'the paper; each sample counts once.'
)
CHOICES = (
  'How long the model was trained before is not stated: here by plain SGD, batch 50 and rate 0.01, on the train split, '
  'with the activation and dropout of the victim. Initial weights are not stated: U(±1/√fan_in), PyTorch’s, here.',
  'A measurement is one local epoch on samples drawn from the private ones, batch 50, rate 0.01, dropout on; the '
  'server sees the delta. The paper averages over 200 rounds of one training, ours over draws at one state of it.',
  'The private samples are the test images after the first 6,000, which are the attacker’s.',
  'The dropout rate could not be read: 0.25 and 0.5 here.',
)
TABLES = Paper(PAPER, METRICS, CHOICES)
BATCH, RATE = 50, 0.01  # tables I and II
CHANNELS = 32  # of the features, table II
PRINTED = {('mlp', 30): 20, ('cnn', 20): 13}  # averages of the abstract; the text has no other numbers of the figures
LEAKIEST = 'relu, dropout 0.5'  # the case that these averages are of: ReLU and dropout


class Data(NamedTuple):
  """(Images, labels): private ones, the attacker's auxiliary ones, and those that the model is trained on."""

  private: tuple
  auxiliary: tuple
  trained: tuple
  num_classes: int


@dataclasses.dataclass(frozen=True)
class Attacked(Study):
  """An attack on a client whose model was trained before. All settings are the paper's, or our reading of it.

  Attributes:
    dataset: as in `gradleak.data.load`.
    model: 'mlp' (table I) or 'cnn' (table II).
    steps: of training before the attack, at a rate of 0.01.
    pace: one step at `pace` times the rate replaces `pace` steps.
    loss: a name of `federated.LOSSES`.
    trained: number of images that it is trained on, the first ones of the train split.
    auxiliary: number of the attacker's images, the first ones of the test split.
    private: number of images after these that the client's samples are drawn from.
  """

  dataset: str
  model: str
  steps: int
  pace: int = 1
  loss: str = 'cross_entropy'
  trained: int = 60_000
  auxiliary: int = 6_000
  private: int = 4_000

  def smallest(self) -> dict[str, Any]:
    """Returns what makes this one of 8×8 digits, trained for at most two steps."""
    few = {'trained': 200, 'auxiliary': 250, 'private': 250, 'pace': 1}
    return {**few, 'dataset': 'digits', 'steps': min(self.steps, 2)}

  def load(self, data_dir: str | None) -> Data:
    """Returns the `Data`."""
    test = gl.data.load(self.dataset, 'test', data_dir=data_dir, limit=self.auxiliary + self.private)
    train = gl.data.load(self.dataset, 'train', data_dir=data_dir, limit=self.trained)
    parts = (slice(self.auxiliary, None), slice(self.auxiliary))
    held = (tuple(jnp.asarray(x[part]) for x in (test.samples, test.targets)) for part in parts)
    return Data(*held, (jnp.asarray(train.samples), jnp.asarray(train.targets)), test.num_classes)


@dataclasses.dataclass(frozen=True)
class Revelations(Attacked):
  """How many samples are fully revealed, for each activation, dropout and size of the local dataset.

  Attributes:
    activations, dropouts: of the first dense layer.
    sizes: numbers of samples of the client.
    measurements: number of measurements of each size.
    decoder: a text, such as 'windows(context=1)'; '' compares the reconstructions themselves.
  """

  activations: tuple[str, ...] = ('relu', 'tanh', 'sigmoid')
  dropouts: tuple[float, ...] = (0.0, 0.25, 0.5)
  sizes: tuple[int, ...] = (1, 5, 10, 20, 30, 50, 100, 200)
  measurements: int = 200
  decoder: str = ''

  shown: ClassVar[str] = 'curves'
  page: ClassVar[str] = 'revealed.png'
  remarks: ClassVar[str] = 'of the samples'
  intervals: ClassVar[str] = 'Ours: mean over measurements ± half its 95 % interval; the model is trained once.'

  @property
  def curves(self) -> dict[str, str]:
    """Label -> the model's text."""
    return {
      curve(activation, dropout): f'{self.model}(activation={activation},dropout={dropout})'
      for activation in self.activations
      for dropout in self.dropouts
    }

  @property
  def defenses(self) -> dict[str, str]:
    """Label of a point -> its description."""
    return {
      point(label, size): f'{text}, {samples(size)}' for label, text in self.curves.items() for size in self.sizes
    }

  def smallest(self) -> dict[str, Any]:
    """Returns what makes this one of 8×8 digits, with two measurements."""
    return {**super().smallest(), 'measurements': 2}

  def parts(self, data: Data, seed: int, progress: str) -> Iterator[Part]:
    """Yields (label, function that measures it) of each curve."""
    for label, text in self.curves.items():
      yield label, functools.partial(self._curve, label, text, data, jax.random.key(seed))

  def said(self, label: str, rows: list[dict]) -> str:
    """Returns a line on what was measured."""
    return label + ''.join(f', {np.mean(row["revealed"]):.1f} of {row["samples"]}' for row in rows)

  def _curve(self, label: str, text: str, data: Data, key: jax.Array) -> Measurement:
    """Returns (a row per size, nothing to show)."""
    victim = prepare(self, text, data, key)
    decode = fitted(self.decoder, victim, data, jax.random.fold_in(key, 2)) if self.decoder else lambda inputs: inputs
    accuracy, _ = simulation.accuracy(victim.client.model, victim.variables, *data.private)
    rows = []
    for size in self.sizes:
      found, alive = counted(victim, decode, data.private, jax.random.fold_in(key, 3), size, self.measurements)
      rows.append({
        'defense': point(label, size),
        'curve': label,
        'samples': size,
        'revealed': np.asarray(found).tolist(),
        'alive': float(np.mean(alive)),
        'accuracy': accuracy,
      })  # fmt: skip
    return rows, {}

  def picture(self, rows: list[dict]) -> bytes:
    """Returns a PNG: fully revealed samples against those of the victim, a line with its 95 % band per curve."""
    with figures.figure(7.2, 4.6, layout='constrained') as (figure, png):
      axes = figure.subplots()
      for index, activation in enumerate(self.activations):
        for dropout in self.dropouts:
          label = curve(activation, dropout)
          points = [row for row in rows if row['curve'] == label]
          sizes = [row['samples'] for row in points]
          mean, low, high = zip(*(statistics.mean_interval(row['revealed']) for row in points), strict=True)
          colour, _ = figures.line_style(activation, self.activations)
          dashes = ('-', (0, (5, 1.5)), (0, (1.2, 1)))[self.dropouts.index(dropout) % 3]
          axes.plot(sizes, mean, color=colour, linestyle=dashes, linewidth=1.4, marker='o', markersize=2.5, label=label)
          axes.fill_between(sizes, low, high, color=colour, alpha=0.15, linewidth=0, zorder=index)
      axes.plot(self.sizes, self.sizes, color=figures.SOFT, linewidth=0.6, zorder=0)
      highest = max(1, *(np.mean(row['revealed']) for row in rows))
      for (model, size), mean in PRINTED.items():
        if model == self.model and LEAKIEST in self.curves:
          highest = max(highest, mean)
          axes.plot(size, mean, 'x', color=figures.INK)
          axes.text(1.05 * size, mean - 0.2, f'the paper’s {mean} of {size}', va='top')
      axes.set_ylim(-0.3, 1.1 * highest)
      axes.set_xscale('log')
      axes.set_xticks(self.sizes, labels=[str(size) for size in self.sizes])
      axes.set_xlabel('samples of the victim (thin line: all revealed)')
      axes.set_ylabel('samples fully revealed')
      plain(axes)
      figure.legend(loc='outside lower left', frameon=False, ncols=3, handlelength=3)
      return png()

  def outcome(self, cell: Cell, rows: list[dict]) -> Outcome:
    """Returns the `Outcome` of a cell among the rows of its run."""
    row = self.row_of(cell, rows)
    accurate = f' (model {100 * row["accuracy"]:.1f} % accurate)' if 'accuracy' in row else ''
    share = 100 * np.mean(row['revealed']) / row['samples']
    return mean_of(row['revealed'], f'{share:.0f} %{accurate}')


class Victim(NamedTuple):
  """A `Client`, the `variables` that it is sent, and its model's layers."""

  client: Client
  variables: dict
  layers: tuple[Layer, ...]


def curve(activation: str, dropout: float) -> str:
  """Returns the label of a curve."""
  return f'{activation}, {f"dropout {dropout}" if dropout else "no dropout"}'


def point(label: str, size: int) -> str:
  """Returns the label of a point of a curve."""
  return f'{label}, {samples(size)}'


def samples(size: int) -> str:
  """Returns a number of samples in words."""
  return f'{size} sample{"s" if size > 1 else ""}'


def prepare(run: Attacked, text: str, data: Data, key: jax.Array) -> Victim:
  """Returns the `Victim` of a run with the model of that text, trained as the run says."""
  model = gl.models.create(text, data.num_classes, init='default')
  images, labels = data.trained
  shape = images.shape[1:]
  given = gl.ClientSettings(loss=run.loss, share='delta', learning_rate=RATE, local_batch_size=BATCH)
  client = given.client(model, data.num_classes)
  training = dataclasses.replace(given, learning_rate=RATE * run.pace).client(model, data.num_classes)

  @jax.jit
  def trained(variables, key, images, labels, steps):
    def one_step(index, params):
      step_key = jax.random.fold_in(key, index)
      chosen = jax.random.randint(jax.random.fold_in(step_key, 0), (BATCH,), 0, len(images))
      given = jax.random.fold_in(step_key, 1), {**variables, 'params': params}, images[chosen], labels[chosen]
      return jax.tree.map(jnp.add, params, training.local_update(*given).update)

    return {**variables, 'params': jax.lax.fori_loop(jnp.int32(0), steps, one_step, variables['params'])}

  variables = jax.jit(model.init, static_argnums=1)(jax.random.fold_in(key, 0), shape)
  steps = jnp.int32(run.steps // run.pace)
  return Victim(client, trained(variables, jax.random.fold_in(key, 1), images, labels, steps), model.layers(shape))


def fitted(text: str, victim: Victim, data: Data, key: jax.Array) -> Callable[[jax.Array], jax.Array]:
  """Returns a decoder trained on the auxiliary images: inputs of the first dense layer [M, in] -> images."""
  images, _ = data.auxiliary
  made = _decoder(text).factory(images.shape[1:], **_decoder(text).settings)
  inputs = jax.jit(functools.partial(decoder.dense_inputs, victim.client.model))(victim.variables, images)
  weights = made.fit(key, feature_maps(inputs), images)
  return lambda inputs: made.decode(weights, feature_maps(inputs))


def feature_maps(inputs: jax.Array) -> jax.Array:
  """Returns inputs of the first dense layer, [M, in], as the square maps that were flattened, [M, side, side, 32]."""
  side = math.isqrt(inputs.shape[-1] // CHANNELS)
  return inputs.reshape(-1, side, side, CHANNELS)


def _decoder(text: str) -> Method:
  """Returns the `Method` that makes a decoder, for a text such as 'windows(context=1)'."""
  return methods.from_spec(grammar.spec(text, 'decoder'), decoder.REGISTRY, 'decoder')


def reconstructions(
  victim: Victim, key: jax.Array | None, images: jax.Array, labels: jax.Array
) -> PartialReconstructions:
  """Returns the `PartialReconstructions` of a victim's delta."""
  return from_update(victim.layers, victim.client.local_update(key, victim.variables, images, labels).update)


def counted(
  victim: Victim, decode: Callable, private: tuple, key: jax.Array, size: int, measurements: int
) -> tuple[jax.Array, jax.Array]:
  """Returns (number of samples that are fully revealed, number of neurons that are active), int32 [measurements]."""

  @jax.jit
  def measured(keys, images, labels):
    def one(key):
      chosen = jax.random.choice(jax.random.fold_in(key, 0), len(images), (size,), replace=False)
      found = reconstructions(victim, jax.random.fold_in(key, 1), images[chosen], labels[chosen])
      count = revealed.fully_revealed(decode(found.inputs), images[chosen]).count
      return count, jnp.sum(found.alive, dtype=jnp.int32)

    return jax.lax.map(one, keys, batch_size=simulation.default_group_size(measurements))

  return measured(jax.random.split(jax.random.fold_in(key, size), measurements), *private)


def _cells(run, name):
  return tuple(
    Cell(
      samples(size),
      label,
      'revealed',
      name,
      point(label, size),
      PRINTED.get((run.model, size)) if label == LEAKIEST else None,
    )
    for size in run.sizes
    for label in run.curves
  )


def _figure_13():
  few = {'activations': ('relu',), 'dropouts': (0.5,), 'sizes': (10, 20, 30, 50)}
  mini = {'trained': 20_000, 'measurements': 100}
  runs = {
    'clients': Revelations('mnist', 'mlp', 20_000, mini=mini),
    'tenfold_rate': Revelations('mnist', 'mlp', 20_000, pace=10, **few, mini=mini),
  }
  tenfold = (cell._replace(row=f'{cell.row}, tenfold rate') for cell in _cells(runs['tenfold_rate'], 'tenfold_rate'))
  return TABLES.table(
    'fidel_13',
    'Figure 13: fully revealed samples, FCNN, MNIST',
    'With ReLU, and more so with dropout, a neuron is often active for one sample only; its gradient is that image.',
    runs,
    (*_cells(runs['clients'], 'clients'), *tenfold),
    'Tenfold rate: a tenth of the steps at ten times the rate of table I; how many are revealed depends on it.',
  )


STATES = (0, 200, 1_000, 5_000, 20_000, 50_000)


def _training():
  few = {'activations': ('relu',), 'dropouts': (0.0, 0.5), 'sizes': (10, 30)}
  mini = {'pace': 10, 'trained': 20_000, 'measurements': 100}
  runs = {f'steps_{steps}': Revelations('mnist', 'mlp', steps, **few, mini=mini) for steps in STATES}
  runs['steps_20000_squared_error'] = Revelations('mnist', 'mlp', 20_000, loss='squared_error', **few, mini=mini)
  return TABLES.table(
    'fidel_13_training',
    'Figure 13, one point: how far the model was trained, and its loss, FCNN, MNIST',
    'In a trained network few samples have a considerable loss, and dropout decides which neurons are active for them. '
    'Nothing of this is printed.',
    runs,
    [
      cell._replace(column=name.replace('_', ' '), row=f'{cell.row}, {cell.column}', paper=None)
      for name, run in runs.items()
      for cell in _cells(run, name)
    ],
  )


def _figure_14():
  run = Revelations(
    'cifar10',
    'cnn',
    20_000,
    trained=50_000,
    dropouts=(0.0, 0.5),
    sizes=(1, 5, 10, 20, 50, 100),
    decoder='windows',
    mini={'pace': 10, 'trained': 20_000, 'auxiliary': 500, 'private': 500},
  )
  return TABLES.table(
    'fidel_14',
    'Figure 14: fully revealed samples, CNN, CIFAR-10, decoded',
    'A decoder trained on auxiliary images turns the feature maps that a neuron reveals into the image.',
    {'clients': run},
    _cells(run, 'clients'),
    'The decoder is ours (`windows`), trained for the convolution of each curve.',
  )


EXPERIMENTS = _figure_13(), _training(), _figure_14()
