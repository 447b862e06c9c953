"""Fidel (Enthoven, Al-Ars, 2021): how many private samples a client's first dense layer reveals, and what they show."""

import dataclasses
import functools
import os
import sys
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gradleak as gl
from experiments.experiment import Cell, Experiment, Outcome, Scaled
from gradleak import specs, trees
from gradleak.attacks import closed_form, decoder, fidel
from gradleak.federated import LOSSES, Client, simulation
from gradleak.metrics import pearson, revealed, statistics
from gradleak.progress import reporter
from gradleak.report import figures
from gradleak.scenario import fingerprint
from gradleak.storage import Workdir, folder_name, write_atomically

PAPER = (
  'Enthoven, Al-Ars: Fidel: Reconstructing Private Training Samples from Weight Updates in Federated Learning. 2021.'
)
METRICS = (
  'A sample is fully revealed if some neuron’s reconstruction has a Pearson correlation of 0.98 or more with it, as in '
  'the paper; each sample counts once.'
)
CHOICES = (
  'How long the model was trained before is not stated: here for steps of plain SGD, batch 50 and rate 0.01, on the '
  'train split, with the activation and dropout of the victim. Initial weights, not stated: U(±1/√fan_in), PyTorch’s.',
  'A measurement is one local epoch on samples drawn from the private ones, batch 50, rate 0.01, dropout on; the '
  'server sees the delta. The paper averages over 200 rounds of one training, ours over draws at one state of it.',
  'The private samples are the test images behind the first 6,000, which are the attacker’s.',
  'The dropout rate is lost: 0.25 and 0.5.',
)
BATCH, RATE = 50, 0.01  # tables I and II
CHANNELS = 32  # of the features, table II
# Milliseconds on two idle cores: of a victim's step, for each sample, and of a decoder's.
COST = {'mlp': 0.03, 'cnn': 0.3, 'table_iii': 100, 'table_iv': 800, 'windows': 5}
PRINTED = {('mlp', 30): 20, ('cnn', 20): 13}  # averages of the abstract; the figures' others are not in the text
LEAKIEST = 'relu, dropout 0.5'  # the worst case that they are of: ReLU and dropout


class Data(NamedTuple):
  """`private` and the attacker's `auxiliary` images with labels, and those that the model is `trained` on."""

  private: tuple
  auxiliary: tuple
  trained: tuple
  num_classes: int


@dataclasses.dataclass(frozen=True)
class Attacked(Scaled):
  """A victim that was trained for a while. All settings are the paper's, or our readings of it.

  Attributes:
    dataset: as in `gradleak.data.load`.
    model: 'mlp' (table I) or 'cnn' (table II).
    steps: of training before the attack, at a rate of 0.01.
    pace: how many of them are done in one, at a rate as many times as high.
    loss: a name of `federated.LOSSES`.
    trained: how many images of the train split it is trained on, the first ones.
    auxiliary: how many images of the test split are the attacker's, the first ones.
    private: how many behind them the victims' samples are drawn from.
    mini: field -> value at scale 'mini'.
  """

  dataset: str
  model: str
  steps: int
  pace: int = 1
  loss: str = 'cross_entropy'
  trained: int = 60_000
  auxiliary: int = 6_000
  private: int = 4_000
  mini: Mapping = dataclasses.field(default_factory=dict, kw_only=True)

  def at_mini(self):
    """Returns this with what two cores need in place of the paper's settings."""
    return dataclasses.replace(self, mini={}, **self.mini)

  def at_smoke(self):
    """Returns this on 8×8 digits, hardly trained."""
    small = {'trained': 200, 'auxiliary': 250, 'private': 250, 'pace': 1, 'mini': {}}
    return dataclasses.replace(self, dataset='digits', steps=min(self.steps, 2), **small)

  def changes(self, scale):
    """Returns what a scale changes, each as 'name value instead of value'."""
    now, old = ({**vars(run), **vars(run).get('decoders', {}), 'decoders': 0} for run in (self.scaled(scale), self))
    return [f'{name} {now[name]} instead of {old[name]}' for name in old if name != 'mini' and now[name] != old[name]]

  def texts(self):
    """Returns what stands behind each label, in words."""
    return dict(self.defenses)

  def load(self, data_dir):
    """Returns the `Data`.

    Raises:
      UsageError: for data that are missing (says how to prepare them) or too few.
    """
    test = gl.data.load(self.dataset, 'test', data_dir=data_dir, limit=self.auxiliary + self.private)
    train = gl.data.load(self.dataset, 'train', data_dir=data_dir, limit=self.trained)
    parts = (slice(self.auxiliary, None), slice(self.auxiliary))
    held = (tuple(jnp.asarray(x[part]) for x in (test.images, test.labels)) for part in parts)
    return Data(*held, (jnp.asarray(train.images), jnp.asarray(train.labels)), test.num_classes)

  def workdir(self, path, data, seed):
    """Returns the `Workdir` of a run."""
    config = {name: value for name, value in dataclasses.asdict(self).items() if name != 'mini'}
    return Workdir(path, {**config, 'seed': seed, 'data_fingerprint': fingerprint(data)}, {})


@dataclasses.dataclass(frozen=True)
class Revelations(Attacked):
  """How many samples are fully revealed, for each activation, dropout and size of the local dataset.

  Attributes:
    activations, dropouts: of the first dense layer.
    sizes: numbers of samples of the victim.
    measurements: victims of each size.
    decoder: as in `decoder.parse`; '' compares the reconstructions themselves.
  """

  activations: tuple[str, ...] = ('relu', 'tanh', 'sigmoid')
  dropouts: tuple[float, ...] = (0.0, 0.25, 0.5)
  sizes: tuple[int, ...] = (1, 5, 10, 20, 30, 50, 100, 200)
  measurements: int = 200
  decoder: str = ''

  kind = 'measurements'
  shown = 'curves'
  page = 'revealed.png'
  remarks = 'of the samples'
  intervals = 'Ours: mean over measurements ± half its 95 % interval; the model is trained once.'

  @property
  def curves(self):
    """Label -> the model's text."""
    return {
      curve(activation, dropout): f'{self.model}(activation={activation},dropout={dropout})'
      for activation in self.activations
      for dropout in self.dropouts
    }

  @property
  def defenses(self):
    """Label of a point -> what is measured there."""
    return {
      point(label, size): f'{text}, {samples(size)}' for label, text in self.curves.items() for size in self.sizes
    }

  def at_smoke(self):
    """Returns this on 8×8 digits, hardly trained, with two measurements."""
    return dataclasses.replace(super().at_smoke(), measurements=2)

  def execute(self, data, seed, *, workdir, progress='auto'):
    """Measures each curve, or reads it back, and draws them; returns a row per point."""
    store, rows = self.workdir(workdir, data, seed), []
    for index, (label, text) in enumerate(self.curves.items()):
      part = store.load_part(folder_name(index, label))
      if part is None:
        part = self._curve(label, text, data, jax.random.key(seed)), {}
        store.save_part(folder_name(index, label), *part)
        _say(progress, label + ''.join(f', {np.mean(r["revealed"]):.1f} of {r["samples"]}' for r in part[0]))
      rows += part[0]
    write_atomically(os.path.join(workdir, self.page), revelations(self, rows))
    return rows

  def _curve(self, label, text, data, key):
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
    return rows

  def outcome(self, cell, rows):
    """Returns the `Outcome` of a cell among the rows of its run."""
    row = next(row for row in rows if row['defense'] == cell.defense)
    mean, low, high = statistics.mean_interval(row['revealed'])
    remark = f'{100 * mean / row["samples"]:.0f} %'
    return Outcome(mean, low, high, len(row['revealed']), None, 0, remark)

  def minutes(self):
    """Returns a rough estimate of the time on two cores: samples passed through × the cost of one."""
    decoding = 128 * 0.8 * len(self.sizes) * bool(self.decoder)
    measured = self.measurements * (sum(self.sizes) * COST[self.model] + decoding)
    trained = self.steps / self.pace * BATCH * COST[self.model] + fitting([self.decoder] if self.decoder else [])
    return len(self.curves) * ((trained + measured) / 60_000 + 0.2)  # compiling


class Victim(NamedTuple):
  """A `Client`, the `variables` that it is sent, and its model's layers."""

  client: Client
  variables: dict
  layers: tuple


def curve(activation, dropout):
  """Returns the label of a curve."""
  return f'{activation}, {f"dropout {dropout}" if dropout else "no dropout"}'


def point(label, size):
  """Returns the label of a point of a curve."""
  return f'{label}, {samples(size)}'


def samples(size):
  """Returns a number of samples in words."""
  return f'{size} sample{"s" if size > 1 else ""}'


def prepare(run, text, data, key):
  """Returns the `Victim` of an `Attacked` run with the model of that text, trained as it says."""
  model = gl.models.create(text, data.num_classes, init='default')
  images, labels = data.trained
  shape = images.shape[1:]
  client = Client(model, data.num_classes, LOSSES[run.loss], 'delta', optax.sgd(RATE), batch_size=BATCH)
  training = dataclasses.replace(client, optimizer=optax.sgd(RATE * run.pace))

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


def fitted(text, victim, data, key):
  """Returns inputs of the first dense layer [M, in] -> images, by a decoder trained on the auxiliary images."""
  images, _ = data.auxiliary
  made = decoder.parse(text, images.shape[1:])
  inputs = jax.jit(functools.partial(decoder.dense_inputs, victim.client.model))(victim.variables, images)
  weights = made.fit(key, decoder.feature_maps(inputs, CHANNELS), images)
  return lambda inputs: made.decode(weights, decoder.feature_maps(inputs, CHANNELS))


def fitting(texts):
  """Returns a rough estimate of the milliseconds that it takes to train the decoders of these texts."""
  made = (specs.template(specs.parse(text, 'decoder'), decoder.REGISTRY, 'decoder') for text in texts)
  return sum(one.settings['steps'] * COST[one.structure[0]] for one in made)


def reconstructions(victim, key, images, labels):
  """Returns the `fidel.PartialReconstructions` of a victim's delta."""
  return fidel.from_update(victim.layers, victim.client.local_update(key, victim.variables, images, labels).update)


def counted(victim, decode, private, key, size, measurements):
  """Returns (how many samples are fully revealed, how many neurons are alive), int32 [measurements] each."""

  @jax.jit
  def measured(keys, images, labels):
    def one(key):
      chosen = jax.random.choice(jax.random.fold_in(key, 0), len(images), (size,), replace=False)
      found = reconstructions(victim, jax.random.fold_in(key, 1), images[chosen], labels[chosen])
      count = revealed.fully_revealed(decode(found.inputs), images[chosen]).count
      return count, jnp.sum(found.alive, dtype=jnp.int32)

    return jax.lax.map(one, keys, batch_size=simulation.default_group_size(measurements))

  return measured(jax.random.split(jax.random.fold_in(key, size), measurements), *private)


def revelations(run, rows):
  """Returns a PNG: fully revealed samples against those of the victim, a line with its 95 % band per curve."""
  with figures.figure(7.2, 4.6, layout='constrained') as (figure, png):
    axes = figure.subplots()
    for index, activation in enumerate(run.activations):
      for dropout in run.dropouts:
        label = curve(activation, dropout)
        points = [row for row in rows if row['curve'] == label]
        sizes = [row['samples'] for row in points]
        mean, low, high = zip(*(statistics.mean_interval(row['revealed']) for row in points), strict=True)
        colour, _ = figures.line_style(activation, run.activations)
        dashes = ('-', (0, (5, 1.5)), (0, (1.2, 1)))[run.dropouts.index(dropout) % 3]
        axes.plot(sizes, mean, color=colour, linestyle=dashes, linewidth=1.4, marker='o', markersize=2.5, label=label)
        axes.fill_between(sizes, low, high, color=colour, alpha=0.15, linewidth=0, zorder=index)
    axes.plot(run.sizes, run.sizes, color=figures.SOFT, linewidth=0.6, zorder=0)
    highest = max(1, *(np.mean(row['revealed']) for row in rows))
    for (model, size), mean in PRINTED.items():
      if model == run.model and LEAKIEST in run.curves:
        highest = max(highest, mean)
        axes.plot(size, mean, 'x', color=figures.INK)
        axes.text(1.05 * size, mean - 0.2, f'the paper’s {mean} of {size}', va='top')
    axes.set_ylim(-0.3, 1.1 * highest)
    axes.set_xscale('log')
    axes.set_xticks(run.sizes, labels=[str(size) for size in run.sizes])
    axes.minorticks_off()
    axes.set_xlabel('samples of the victim (thin line: all revealed)')
    axes.set_ylabel('samples fully revealed')
    axes.grid(color='#0a0b0c', alpha=0.1, linewidth=0.6)
    axes.spines[['top', 'right']].set_visible(False)
    figure.legend(loc='outside lower left', frameon=False, ncols=3, handlelength=3)
    return png()


@dataclasses.dataclass(frozen=True)
class Pictures(Attacked):
  """What the reconstructions look like: of samples sent one by one, and of a batch; ReLU, no dropout.

  Attributes:
    decoders: label -> as in `decoder.parse`, for 'cnn'; none for 'mlp'.
    singles: how many samples are sent one by one.
    batch: how many are sent together.
    decoded: how many neurons of the batch are decoded and shown.
  """

  decoders: Mapping[str, str] = dataclasses.field(default_factory=dict)
  singles: int = 100
  batch: int = 10
  decoded: int = 100

  kind = 'pictures'
  shown = 'pictures'
  page = 'pictures.png'
  remarks = 'of the samples'
  intervals = 'Ours: counts over the samples that were sent one by one, and in one batch.'

  @property
  def defenses(self):
    """Label -> what is counted under it."""
    return {
      label: f'{count} samples{", decoded by " + self.decoders[name] if name else ""}'
      for name in self.decoders or ('',)
      for label, count in ((alone(name), self.singles), (together(name), self.batch))
    }

  def at_smoke(self):
    """Returns this on 8×8 digits, hardly trained, with decoders that are hardly trained, too."""
    decoders = {name: 'windows' if text == 'windows' else 'table_iv(steps=2)' for name, text in self.decoders.items()}
    return dataclasses.replace(super().at_smoke(), decoders=decoders, singles=10)

  def execute(self, data, seed, *, workdir, progress='auto'):
    """Attacks, or reads back what came out, and draws it; returns a row per label."""
    store = self.workdir(workdir, data, seed)
    part = store.load_part('pictures')
    if part is None:
      rows, panels = self._attack(data, jax.random.key(seed), progress)
      kept = [(panel.title, panel.captions) for panel in panels]
      part = [rows, kept], {f'{index:02}': np.asarray(panel.images) for index, panel in enumerate(panels)}
      store.save_part('pictures', *part)
    (rows, kept), arrays = part
    panels = [Panel(title, arrays[f'{index:02}'], captions) for index, (title, captions) in enumerate(kept)]
    write_atomically(os.path.join(workdir, self.page), sheet(panels))
    return rows

  def _attack(self, data, key, progress):
    """Returns (rows, panels)."""
    victim = prepare(self, f'{self.model}(activation=relu)', data, key)
    images, labels = data.private
    ways = {'': lambda inputs: inputs.reshape(-1, *images.shape[1:])}
    if self.decoders:
      ways = {name: fitted(text, victim, data, jax.random.fold_in(key, 2)) for name, text in self.decoders.items()}
      _say(progress, f'trained: {", ".join(ways)}')
    send = jax.jit(functools.partial(reconstructions, victim, None))
    taken = (slice(1), slice(self.singles, self.singles + self.batch), slice(3))
    single, batch, three = (Sent(images[part], send(images[part], labels[part]).inputs) for part in taken)
    alone_sent = images[: self.singles], labels[: self.singles]
    # Of the neurons that a single sample activates, the one with the largest share is rounded least.
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

  def _direct(self, single, batch, three):
    """Yields figures 5, 9, 11 and 12: reconstructions of a dense network, which are images."""
    shape = single.truth.shape[1:]
    yield Panel('A sample (figure 5)', single.truth)
    yield Panel('its first 24 partial reconstructions', stretched(single.found[:24].reshape(-1, *shape)))
    yield Panel(f'A batch of {self.batch} (figure 9)', batch.truth)
    yield Panel('its first 24 partial reconstructions', stretched(batch.found[:24]))
    yield Panel('A batch of 3 (figure 11)', three.truth)
    best = revealed.fully_revealed(three.found, three.truth)
    yield Panel(*_best('the neurons that show each best', three, best))
    best = revealed.fully_revealed(batch.found, batch.truth)
    yield Panel(*_best(f'The batch of {self.batch}: the neurons that show each best (figure 12)', batch, best))

  def _decoded(self, single, batch, decoded):
    """Yields figures 6, 8, 10 and 15: reconstructions of a convolutional network, which are feature maps."""
    strong = int(jnp.argmax(jnp.max(jnp.abs(single.found), axis=1) > 0))
    yield Panel('A sample (figure 6)', single.truth)
    yield Panel('the first 24 channels of one neuron', channels(single.found[strong]))
    for name, (ones, _) in decoded.items():
      yield Panel('Ten samples, sent one by one (figure 8)', ones.truth[:10])
      best = [f'{value:.3f}' for value in pearson(ones.found[:10], ones.truth[:10]).tolist()]
      yield Panel(f'decoded: {name}', jnp.clip(ones.found[:10], 0, 1), best)
    ours = list(decoded.values())[-1][1]
    best = revealed.fully_revealed(ours.found, ours.truth)
    strong = int(best.neuron[jnp.argmax(best.correlation)])
    yield Panel(f'A batch of {self.batch} (figure 10)', batch.truth)
    yield Panel('the first 24 channels of one neuron', channels(batch.found[strong]))
    alive = np.flatnonzero(np.abs(np.asarray(batch.found)).max(axis=1))[: self.decoded]
    for name, (_, mixed) in decoded.items():
      best = revealed.fully_revealed(mixed.found, mixed.truth)
      yield Panel(*_best(f'The neurons that show each best, decoded: {name}', mixed, best))
      yield Panel(f'{len(alive)} neurons, decoded: {name} (figure 15)', jnp.clip(mixed.found[alive], 0, 1))

  def outcome(self, cell, rows):
    """Returns the `Outcome` of a cell among the rows of its run."""
    row = next(row for row in rows if row['defense'] == cell.defense)
    share = 100 * row['revealed'] / row['samples']
    return Outcome(row['revealed'], None, None, row['samples'], None, 0, f'{share:.0f} % of {row["samples"]}')

  def minutes(self):
    """Returns a rough estimate of the time on two cores: steps of the victim and of its decoders."""
    training = self.steps / self.pace * BATCH * COST[self.model]
    return (training + fitting(self.decoders.values()) + self.auxiliary) / 60_000 + 0.2


class Sent(NamedTuple):
  """What was sent, `truth` [N, H, W, C], and what was `found` in the delta: of each neuron, or of each sample."""

  truth: jax.Array
  found: jax.Array


class Panel(NamedTuple):
  """`images` [n, H, W, C] in [0, 1] under a title, with a caption below each, or None."""

  title: str
  images: np.ndarray
  captions: list | None = None


def alone(name):
  """Returns the label of samples sent one by one, decoded as `name` says."""
  return f'one by one, {name}' if name else 'one by one'


def together(name):
  """Returns the label of a batch, decoded as `name` says."""
  return f'batch, {name}' if name else 'batch'


def strongest(victim, images, labels):
  """Returns what the neuron with the largest share says of each sample, sent alone, [N, in]."""

  def one(sample):
    image, label = sample
    update = victim.client.local_update(None, victim.variables, image[None], label[None]).update
    kernel, bias = (trees.get(update, path) for path in closed_form.first_dense_layer(victim.layers, update))
    return closed_form.first_dense_input(kernel, bias)

  return jax.lax.map(one, (images, labels))


def stretched(images):
  """Returns images [n, …] brought to [0, 1], each by itself; a constant one is black."""
  axes = tuple(range(1, images.ndim))
  low, high = images.min(axis=axes, keepdims=True), images.max(axis=axes, keepdims=True)
  return (images - low) / jnp.where(high == low, 1.0, high - low)


def channels(inputs):
  """Returns the first 24 feature maps of a neuron's reconstruction [in], as images in [0, 1]."""
  return stretched(jnp.moveaxis(decoder.feature_maps(inputs, CHANNELS)[0], -1, 0)[:24, ..., None])


def _best(title, sent, best):
  """Returns the parts of a `Panel`: for each sample the neuron that shows it best, and the correlation."""
  shown = stretched(sent.found[best.neuron].reshape(sent.truth.shape))
  return title, shown, [f'{value:.3f}' for value in best.correlation.tolist()]


def sheet(panels, across=12):
  """Returns a PNG of `Panel`s, one below the other, so many images in a line."""
  from matplotlib.patches import Rectangle

  tile, gap, title, caption = 0.5, 0.06, 0.24, 0.16  # inches
  lines = [-(-len(panel.images) // across) for panel in panels]
  tall = tile + gap
  heights = [title + n * (tall + (caption if p.captions else 0)) for n, p in zip(lines, panels, strict=True)]
  wide, high = across * tall + 3 * gap, sum(heights) + 2 * gap
  with figures.figure(wide, high) as (figure, png):
    axes = figure.add_axes((0, 0, 1, 1))
    top = gap
    for panel, height in zip(panels, heights, strict=True):
      axes.text(2 * gap, top + title / 2, panel.title, va='center')
      for index, image in enumerate(panel.images):
        line, place = divmod(index, across)
        x, y = 2 * gap + place * tall, top + title + line * (tall + (caption if panel.captions else 0))
        image = np.clip(np.asarray(image, np.float32), 0, 1)
        image = image if image.shape[-1] == 3 else image[..., 0]
        extent = (x, x + tile, y + tile, y)
        axes.imshow(image, cmap='gray', vmin=0, vmax=1, interpolation='nearest', aspect='auto', extent=extent)
        axes.add_patch(Rectangle((x, y), tile, tile, facecolor='none', edgecolor='#9a9fa6', linewidth=0.4))
        if panel.captions:
          axes.text(x + tile / 2, y + tile + caption / 2, panel.captions[index], ha='center', va='center', fontsize=7)
      top += height
    axes.set(xlim=(0, wide), ylim=(high, 0))
    axes.set_axis_off()
    return png()


def _say(progress, line):
  """Prints a line to standard error, unless `progress` is 'none'."""
  if reporter(progress) is not None:
    print(line, file=sys.stderr, flush=True)


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
  run = Revelations('mnist', 'mlp', 20_000, mini={'pace': 10, 'trained': 20_000, 'measurements': 100})
  return Experiment(
    'fidel_13',
    PAPER,
    'Figure 13: fully revealed samples, FCNN, MNIST',
    'ReLU, and dropout behind it, have a neuron answer to one sample alone, whose image its gradient then is.',
    {'clients': run},
    _cells(run, 'clients'),
    METRICS,
    CHOICES,
  )


STATES = (0, 200, 1_000, 5_000, 20_000, 50_000)


def _training():
  few = {'activations': ('relu',), 'dropouts': (0.0, 0.5), 'sizes': (10, 30)}
  mini = {'pace': 10, 'trained': 20_000, 'measurements': 100}
  runs = {f'steps_{steps}': Revelations('mnist', 'mlp', steps, **few, mini=mini) for steps in STATES}
  runs['steps_20000_squared_error'] = Revelations('mnist', 'mlp', 20_000, loss='squared_error', **few, mini=mini)
  return Experiment(
    'fidel_13_training',
    PAPER,
    'Figure 13, one point: how far the model was trained, and its loss, FCNN, MNIST',
    'In a trained network few samples have a loss that is not negligible, and dropout decides which neurons they move.',
    runs,
    tuple(
      cell._replace(column=name.replace('_', ' '), row=f'{cell.row}, {cell.column}')
      for name, run in runs.items()
      for cell in _cells(run, name)
    ),
    METRICS,
    CHOICES,
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
    mini={'pace': 10, 'trained': 20_000, 'auxiliary': 500, 'private': 500, 'measurements': 20},
  )
  return Experiment(
    'fidel_14',
    PAPER,
    'Figure 14: fully revealed samples, CNN, CIFAR-10, decoded',
    'A decoder trained on auxiliary images takes what a neuron says of the feature maps back to the image.',
    {'clients': run},
    _cells(run, 'clients'),
    METRICS,
    (*CHOICES, 'The decoder is ours (`windows`), trained anew for each curve’s convolution.'),
  )


def _pictures(model, table, shows, decoders=None):
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
      mini={**small[dataset], 'decoders': decoders[dataset][1]},
    )
    for dataset, steps, trained, decoded in (('mnist', 2_000, 60_000, 100), ('cifar10', 2_000, 50_000, 120))
  }
  cells = [Cell(name, label, 'revealed', name, label) for name, run in runs.items() for label in run.defenses]
  name = {'mlp': 'fidel_5', 'cnn': 'fidel_8'}[model]
  choices = CHOICES[0], CHOICES[2], 'ReLU, no dropout.'
  return Experiment(name, PAPER, table, shows, runs, tuple(cells), METRICS, choices)


EXPERIMENTS = (
  _pictures(
    'mlp',
    'Figures 5, 9, 11 and 12: partial reconstructions, FCNN',
    'One sample is what every living neuron says; of a batch each neuron says a mixture. The paper prints pictures '
    'alone.',
  ),
  _pictures(
    'cnn',
    'Figures 6, 8, 10 and 15: feature maps and what is decoded from them, CNN',
    'The features in front of the dense layer give the image away, too. The paper prints pictures alone.',
    {
      'mnist': (
        {'table III': 'table_iii', 'ours': 'windows'},
        {'table III': 'table_iii(steps=1000)', 'ours': 'windows'},
      ),
      'cifar10': ({'table IV': 'table_iv', 'ours': 'windows'}, {'table IV': 'table_iv(steps=150)', 'ours': 'windows'}),
    },
  ),
  _figure_13(),
  _training(),
  _figure_14(),
)
