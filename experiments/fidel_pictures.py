"""Pictures of Fidel's reconstructions, of samples sent alone, and of a batch (figures `5, 6, 8 to 12 and 15`)."""

import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments import fidel
from experiments.experiment import Cell, Experiment, Outcome
from experiments.fidel import Data, Victim
from experiments.panels import Panel, sheet, stretched
from experiments.rehearsal import Ledger
from experiments.study import say
from gradleak.attacks import dense
from gradleak.core import locks, statistics, trees
from gradleak.core.storage import write_atomically
from gradleak.metrics import pearson, revealed


@dataclasses.dataclass(frozen=True)
class Pictures(fidel.Attacked):
  """Pictures of the reconstructions of samples sent one by one, and of a batch; ReLU, no dropout.

  Attributes:
    decoders: label -> text of the decoder, for 'cnn'; empty for 'mlp'.
    singles: number of samples that are sent one by one.
    batch: number of samples that are sent together.
    decoded: number of neurons of the batch that are decoded and shown.
  """

  decoders: Mapping[str, str] = dataclasses.field(default_factory=dict)
  singles: int = 100
  batch: int = 10
  decoded: int = 100

  kind: ClassVar[str] = 'pictures'
  shown: ClassVar[str] = 'pictures'
  page: ClassVar[str] = 'pictures.png'
  remarks: ClassVar[str] = 'of the samples'
  intervals: ClassVar[str] = 'Ours: counts over the samples that were sent one by one, and in one batch.'

  @property
  def defenses(self) -> dict[str, str]:
    """Label -> its description."""
    return {
      label: f'{count} samples{", decoded by " + self.decoders[name] if name else ""}'
      for name in self.decoders or ('',)
      for label, count in ((alone(name), self.singles), (together(name), self.batch))
    }

  def smallest(self) -> dict[str, Any]:
    """Returns what makes this one of 8×8 digits; client and decoders are trained for at most two steps."""
    decoders = {name: 'windows' if text == 'windows' else 'table_iv(steps=2)' for name, text in self.decoders.items()}
    return {**super().smallest(), 'decoders': decoders, 'singles': 10}

  def execute(self, data: Data, seed: int, *, workdir: str, progress: str = 'auto') -> list[dict]:
    """Attacks, or reads the result from the folder, and draws it; returns a row per label."""
    with locks.alone(workdir):
      store = self.store(workdir, data, seed)
      part = store.load_part('pictures')
      if part is None:
        rows, panels = self._attack(data, jax.random.key(seed), progress)
        kept = [(panel.title, panel.captions) for panel in panels]
        part = [rows, kept], {f'{index:02}': np.asarray(panel.samples) for index, panel in enumerate(panels)}
        store.save_part('pictures', *part)
    (rows, kept), arrays = part
    panels = [Panel(title, arrays[f'{index:02}'], captions) for index, (title, captions) in enumerate(kept)]
    write_atomically(os.path.join(workdir, self.page), sheet(panels))
    return rows

  def rehearse(self, data_dir: str | None, ledger: Ledger) -> None:
    """Runs every program of the attacks."""
    del ledger
    self._attack(self.load(data_dir), jax.random.key(0), 'none')

  def _attack(self, data: Data, key: jax.Array, progress: str) -> tuple[list[dict], list[Panel]]:
    """Returns (rows, panels)."""
    victim = fidel.prepare(self, f'{self.model}(activation=relu)', data, key)
    images, labels = data.private
    ways = {'': lambda inputs: inputs.reshape(-1, *images.shape[1:])}
    if self.decoders:
      ways = {
        name: fidel.fitted(text, victim, data, jax.random.fold_in(key, 2)) for name, text in self.decoders.items()
      }
      say(progress, f'trained: {", ".join(ways)}')
    send = jax.jit(functools.partial(fidel.reconstructions, victim, None))
    taken = (slice(1), slice(self.singles, self.singles + self.batch), slice(3))
    single, batch, three = (Sent(images[part], send(images[part], labels[part]).inputs) for part in taken)
    alone_sent = images[: self.singles], labels[: self.singles]
    # The active neuron with the largest bias gradient has the least rounding error.
    found = jax.jit(functools.partial(strongest, victim))(*alone_sent)
    decoded = {
      name: (Sent(alone_sent[0], way(found)), Sent(batch.truth, way(batch.found))) for name, way in ways.items()
    }
    rows = []
    for name, (ones, mixed) in decoded.items():
      counts = (
        jnp.sum(pearson(ones.found, ones.truth) >= revealed.FULLY),
        revealed.fully_revealed(mixed.found, mixed.truth).count,
      )
      for label, one, count in zip((alone, together), (ones, mixed), counts, strict=True):
        rows.append({'defense': label(name), 'samples': len(one.truth), 'revealed': int(count)})
    if self.decoders:
      return rows, list(self._decoded(single, batch, decoded))
    return rows, list(self._direct(single, decoded[''][1], Sent(three.truth, ways[''](three.found))))

  def _direct(self, single: 'Sent', batch: 'Sent', three: 'Sent') -> Iterator[Panel]:
    """Yields figures 5, 9, 11 and 12: reconstructions of a dense network, which are images."""
    shape, title = single.truth.shape[1:], 'its first 24 partial reconstructions (black: the neuron is inactive)'
    yield Panel('A sample (figure 5)', single.truth)
    yield Panel(title, stretched(single.found[:24].reshape(-1, *shape)))
    yield Panel(f'A batch of {self.batch} (figure 9)', batch.truth)
    yield Panel(title, stretched(batch.found[:24]))
    yield Panel('A batch of 3 (figure 11)', three.truth)
    yield nearest('the neurons that show each best', three, stretched)
    yield nearest(f'The batch of {self.batch}: the neurons that show each best (figure 12)', batch, stretched)

  def _decoded(self, single: 'Sent', batch: 'Sent', decoded: dict[str, tuple]) -> Iterator[Panel]:
    """Yields figures 6, 8, 10 and 15: reconstructions of a convolutional network, which are feature maps."""
    strong = int(jnp.argmax(jnp.max(jnp.abs(single.found), axis=1) > 0))
    yield Panel('A sample (figure 6)', single.truth)
    yield Panel('the first 24 channels of one neuron', channels(single.found[strong]))
    truth = next(iter(decoded.values()))[0].truth
    yield Panel('Ten samples, sent one by one (figure 8)', truth[:10])
    for name, (ones, _) in decoded.items():
      best = [f'{value:.3f}' for value in pearson(ones.found[:10], ones.truth[:10]).tolist()]
      yield Panel(f'decoded: {name}', clipped(ones.found[:10]), best)
    ours = list(decoded.values())[-1][1]
    best = revealed.fully_revealed(ours.found, ours.truth)
    strong = int(best.neuron[jnp.argmax(best.correlation)])
    yield Panel(f'A batch of {self.batch} (figure 10)', batch.truth)
    yield Panel('the first 24 channels of one neuron', channels(batch.found[strong]))
    alive = np.flatnonzero(np.abs(np.asarray(batch.found)).max(axis=1))[: self.decoded]
    for name, (_, mixed) in decoded.items():
      yield nearest(f'The neurons that show each best, decoded: {name}', mixed, clipped)
      yield Panel(f'{len(alive)} neurons, decoded: {name} (figure 15)', clipped(mixed.found[alive]))

  def outcome(self, cell: Cell, rows: list[dict]) -> Outcome:
    """Returns the `Outcome` of a cell among the rows of its run."""
    row = self.row_of(cell, rows)
    ends = (100 * value for value in statistics.proportion_interval(row['revealed'], row['samples']))
    return Outcome(*ends, row['samples'], None, 0, f'{row["revealed"]} of {row["samples"]}')


class Sent(NamedTuple):
  """The samples `truth` [N, H, W, C], and what was `found` in their delta: of each neuron, or of each sample."""

  truth: jax.Array
  found: jax.Array


def alone(name: str) -> str:
  """Returns the label of samples sent one by one, decoded as `name` says."""
  return f'one by one, {name}' if name else 'one by one'


def together(name: str) -> str:
  """Returns the label of a batch, decoded as `name` says."""
  return f'batch, {name}' if name else 'batch'


def strongest(victim: Victim, images: jax.Array, labels: jax.Array) -> jax.Array:
  """Returns the reconstruction by the neuron with the largest bias gradient of each sample, sent alone, [N, in]."""

  def one(sample):
    image, label = sample
    update = victim.client.local_update(None, victim.variables, image[None], label[None]).update
    kernel, bias = (trees.get(update, path) for path in dense.first_dense_layer(victim.layers, update))
    return dense.first_dense_input(kernel, bias)

  return jax.lax.map(one, (images, labels))


def channels(inputs: jax.Array) -> jax.Array:
  """Returns the first 24 feature maps of a neuron's reconstruction [in], as images in [0, 1]."""
  return stretched(jnp.moveaxis(fidel.feature_maps(inputs)[0], -1, 0)[:24, ..., None])


def nearest(title: str, sent: Sent, shown: Callable[[Any], Any]) -> Panel:
  """Returns the `Panel` of the neurons that show each sample best, each above its correlation."""
  best = revealed.fully_revealed(sent.found, sent.truth)
  images = shown(sent.found[best.neuron].reshape(sent.truth.shape))
  return Panel(title, images, [f'{value:.3f}' for value in best.correlation.tolist()])


def clipped(images: Any) -> Any:
  """Returns decoded images, clipped to [0, 1]."""
  return jnp.clip(images, 0, 1)


def _pictures(model, table, shows, decoders=None, mini=None):
  decoders = decoders or {dataset: ({}, {}) for dataset in ('mnist', 'cifar10')}
  small = {
    'mnist': {'pace': 10, 'trained': 20_000, 'auxiliary': 2_000, 'private': 500},
    'cifar10': {'pace': 10, 'trained': 20_000, 'auxiliary': 500, 'private': 500},
  }
  runs = {
    dataset: Pictures(
      dataset,
      model,
      steps,
      trained=trained,
      decoders=decoders[dataset][0],
      decoded=decoded,
      mini={**small[dataset], **(mini or {}).get(dataset, {}), 'decoders': decoders[dataset][1]},
    )
    for dataset, steps, trained, decoded in (('mnist', 2_000, 60_000, 100), ('cifar10', 2_000, 50_000, 120))
  }
  cells = [Cell(name, label, 'revealed_share', name, label) for name, run in runs.items() for label in run.defenses]
  name = {'mlp': 'fidel_5', 'cnn': 'fidel_8'}[model]
  choices = [fidel.CHOICES[0], fidel.CHOICES[2], 'ReLU, no dropout.']
  if model == 'cnn':
    choices.append(
      'The decoders of tables III and IV are trained by Adam at 0.001: Adadelta at 0.001, as printed, hardly moves '
      'them. “Ours” is `windows`, a regression of each pixel on the features around it.'
    )
  return Experiment(name, fidel.PAPER, table, shows, runs, tuple(cells), fidel.METRICS, tuple(choices))


EXPERIMENTS = (
  _pictures(
    'mlp',
    'Figures 5, 9, 11 and 12: partial reconstructions, FCNN',
    'Every active neuron reveals a single sample; of a batch each neuron reveals a mixture. The paper prints pictures '
    'alone.',
  ),
  _pictures(
    'cnn',
    'Figures 6, 8, 10 and 15: feature maps and what is decoded from them, CNN',
    'The features in front of the dense layer reveal the image, too. The paper prints pictures alone.',
    {
      'mnist': (
        {'table III': 'table_iii', 'ours': 'windows'},
        {'table III': 'table_iii(steps=1000)', 'ours': 'windows'},
      ),
      'cifar10': ({'table IV': 'table_iv', 'ours': 'windows'}, {'table IV': 'table_iv(steps=1000)', 'ours': 'windows'}),
    },
    {'cifar10': {'auxiliary': 800, 'private': 200}},  # of the 1,000 available test images
  ),
)
