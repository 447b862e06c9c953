"""Exact attacks on a dense network: what separation adds to Fidel, and peeling and SPEAR under what breaks them."""

import dataclasses
import functools
import itertools
import math
import os
import sys
import time
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gradleak as gl
from experiments.experiment import Cell, Experiment, Outcome, Scaled
from experiments.fidel import Panel, sheet
from gradleak import trees
from gradleak.attacks import fidel, peeling, separation, spear
from gradleak.defenses.compression import prune
from gradleak.federated import Client
from gradleak.metrics import revealed, statistics
from gradleak.progress import reporter
from gradleak.report import figures
from gradleak.scenario import fingerprint
from gradleak.storage import Workdir, folder_name, write_atomically


@dataclasses.dataclass(frozen=True)
class Measured(Scaled):
  """What is repeated with other samples. All settings are as published, or ours where nothing is.

  Attributes:
    dataset: as in `gradleak.data.load`; private images are drawn from its test split.
    repeats: how often each figure is measured.
    pool: how many private images are there to draw from.
    largest: a batch holds no more; 0 holds as many as its label says.
    mini: field -> value at scale 'mini'.
  """

  dataset: str
  repeats: int
  pool: int
  largest: int = dataclasses.field(default=0, kw_only=True)
  mini: Mapping = dataclasses.field(default_factory=dict, kw_only=True)

  kind = 'measurements'
  shown = 'picture'
  intervals = 'Ours: mean over repeats, each with other samples, ± half its 95 % interval.'

  def at_mini(self):
    """Returns this with what two cores need in place of the published settings."""
    return dataclasses.replace(self, mini={}, **self.mini)

  def at_smoke(self):
    """Returns this on 8×8 digits, twice."""
    return dataclasses.replace(self, dataset='digits', repeats=2, pool=64, largest=3, mini={})

  def held(self, size):
    """Returns how many samples a batch of that size holds at this scale."""
    return min(size, self.largest or size)

  def changes(self, scale):
    """Returns what a scale changes, each as 'name value instead of value'."""
    now, names = self.scaled(scale), [field.name for field in dataclasses.fields(self) if field.name != 'mini']
    pairs = {name: (getattr(now, name), getattr(self, name)) for name in names}
    return [f'{name} {new} instead of {old}' for name, (new, old) in pairs.items() if new != old]

  def texts(self):
    """Returns what stands behind each label, in words."""
    return {label: label for label in self.defenses}

  def execute(self, data, seed, *, workdir, progress='auto'):
    """Measures each part, or reads it back, and draws them; returns a row per label."""
    config = {name: value for name, value in dataclasses.asdict(self).items() if name != 'mini'}
    store = Workdir(workdir, {**config, 'seed': seed, 'data_fingerprint': fingerprint(data)}, {})
    rows, kept = [], {}
    for index, (label, measure) in enumerate(self.parts(data, seed)):
      part = store.load_part(folder_name(index, label))
      if part is None:
        part = measure()
        store.save_part(folder_name(index, label), *part)
        if reporter(progress) is not None:
          print(self.said(label, part[0]), file=sys.stderr, flush=True)
      rows += part[0]
      kept[label] = part[1]
    write_atomically(os.path.join(workdir, self.page), self.picture(rows))
    panels = self.panels(kept)
    if panels:
      write_atomically(os.path.join(workdir, 'images.png'), sheet(panels, across=16))
    return rows

  def row_of(self, cell, rows):
    """Returns the row that a cell is about."""
    return next(row for row in rows if row['defense'] == cell.defense)


class Data(NamedTuple):
  """Images, labels; of the test split, and those that the model is trained on, or None."""

  private: tuple
  trained: tuple | None


def wide(neurons, image_shape, num_classes):
  """Returns the `Model` of one hidden layer with ReLU; starts as PyTorch's do, at U(±1/√fan_in)."""
  sizes = (math.prod(image_shape), neurons, num_classes)

  def init(key, _):
    params = {}
    for index, (fan_in, fan_out) in enumerate(itertools.pairwise(sizes)):
      bound = 1 / math.sqrt(fan_in)
      draw = functools.partial(jax.random.uniform, minval=-bound, maxval=bound)
      keys = jax.random.split(jax.random.fold_in(key, index))
      params[f'dense_{index}'] = {'kernel': draw(keys[0], (fan_in, fan_out)), 'bias': draw(keys[1], (fan_out,))}
    return params

  def apply(params, images):
    first, last = params['dense_0'], params['dense_1']
    hidden = jax.nn.relu(images.reshape(len(images), -1) @ first['kernel'] + first['bias'].reshape(1, -1))
    return hidden @ last['kernel'] + last['bias'].reshape(1, -1)

  layers = [trees.Layer(name, ((name, 'kernel'), (name, 'bias'))) for name in ('dense_0', 'dense_1')]
  return gl.models.from_functions(init, apply, f'dense({neurons})', layers=layers)


# What is set beside Fidel, and what it is told: (gradient of the first dense layer, `Sent`, repeat, run) -> images.
def _blind(method):
  def separate(sent, run, seed):
    return method(*sent.first, len(sent.labels), iterations=run.iterations, seed=seed)

  return separate


def _cocktail(sent, run, seed):
  del seed
  shape = len(sent.labels), *sent.image_shape
  return _compiled_cocktail(shape, run.steps)(*sent.first)


@functools.cache
def _compiled_cocktail(shape, steps):
  return jax.jit(functools.partial(separation.cocktail_party, image_shape=shape, steps=steps, **COCKTAIL))


def _alternating(sent, run, seed):
  key = jax.random.key(seed)
  shape = len(sent.labels), *sent.image_shape
  return _compiled_alternating(sent.client, shape, run.turns)(key, sent.variables, sent.update, sent.labels)


@functools.cache
def _compiled_alternating(client, shape, steps):
  def separate(key, variables, update, labels):
    return separation.alternating(key, client, variables, update, labels, shape, steps=steps)

  return jax.jit(separate)


@functools.cache
def _compiled_labels(client, shape):
  return jax.jit(functools.partial(separation.counted_labels, client, image_shape=shape))


def _peeling(sent, run, seed):
  del run, seed
  layers = sent.client.model.layers(sent.image_shape)
  known = (peeling.dense_layers(layers, tree) for tree in (sent.variables['params'], sent.update))
  return peeling.peel(*known, len(sent.labels)).images


METHODS = {
  'FastICA': _blind(separation.fast_ica),
  'NMF': _blind(separation.nmf),
  'Cocktail Party': _cocktail,
  'alternating (ours)': _alternating,
  'peeling': _peeling,
}
ALONE = 'Fidel alone'
# The published weight of decorrelation, 1.47, was found at 128 samples; at few, rows at right angles never turn again.
COCKTAIL = {'learning_rate': 1e-2, 'decorrelation': 0.1}


class Sent(NamedTuple):
  """What the attacker sees of a batch: the `Client`, its variables and update, and labels told from the update."""

  client: Client
  variables: dict
  update: dict
  labels: jax.Array
  image_shape: tuple

  @property
  def first(self):
    """The gradients of the first dense layer's kernel and bias."""
    first = self.client.model.layers(self.image_shape)[0]
    return tuple(trees.get(self.update, path) for path in first.paths)


@dataclasses.dataclass(frozen=True)
class Separations(Measured):
  """How many samples of a batch Fidel reveals alone, and with what another method separates.

  Attributes:
    neurons: of the one hidden layer; 0 takes Fidel's FCNN.
    training: steps of SGD, batch 50 and rate 0.05, on the train split before.
    sizes: of the batches.
    iterations: of FastICA and NMF, at most.
    steps: of the Cocktail Party Attack.
    turns: of `alternating`.
  """

  neurons: int = 0
  training: int = 0
  sizes: tuple[int, ...] = (8, 30, 100)
  iterations: int = 100
  steps: int = 500
  turns: int = 150

  page = 'revealed.png'
  remarks = 'beyond Fidel alone, at ≥ 0.98; at ≥ 0.9'

  @property
  def defenses(self):
    """Labels of what is measured."""
    return tuple(point(size, method) for size in self.sizes for method in (ALONE, *METHODS))

  def at_smoke(self):
    """Returns this on 8×8 digits, in a few steps."""
    few = {'iterations': 5, 'steps': 2, 'turns': 2, 'training': min(self.training, 2)}
    return dataclasses.replace(super().at_smoke(), neurons=min(self.neurons, 32), **few)

  def load(self, data_dir):
    """Returns the `Data`.

    Raises:
      UsageError: for data that are missing (says how to prepare them) or too few.
    """
    test = gl.data.load(self.dataset, 'test', data_dir=data_dir, limit=self.pool)
    if not self.training:
      return Data((test.images, test.labels), None)
    train = gl.data.load(self.dataset, 'train', data_dir=data_dir, limit=min(50 * self.training, 5000))
    return Data((test.images, test.labels), (train.images, train.labels))

  def parts(self, data, seed):
    """Yields (label, function that measures it) of each batch size."""
    victim = functools.cache(functools.partial(self._victim, data, jax.random.key(seed)))
    for size in self.sizes:
      yield f'{size} samples', functools.partial(self._size, victim, data.private, size, seed)

  def said(self, label, rows):
    """Returns a line on what was measured."""
    return f'{label}: ' + ', '.join(f'{row["method"]} {np.mean(row["revealed"]):.1f}' for row in rows)

  def _victim(self, data, key):
    """Returns (`Client`, compiled local update, variables)."""
    shape, classes = data.private[0].shape[1:], 10
    model = gl.models.create('mlp', classes, init='default')
    if self.neurons:
      model = wide(self.neurons, shape, classes)
    client = Client(model, classes)
    send = jax.jit(functools.partial(client.local_update, None))
    variables = jax.jit(model.init, static_argnums=1)(jax.random.fold_in(key, 0), shape)
    drawn = np.random.default_rng(0)
    for _ in range(self.training):
      chosen = drawn.integers(len(data.trained[0]), size=50)
      update = send(variables, *(x[chosen] for x in data.trained)).update
      variables = {**variables, 'params': jax.tree.map(lambda p, u: p - 0.05 * u, variables['params'], update)}
    return client, send, variables

  def _size(self, victim, private, size, seed):
    """Returns (a row per method, images of the first repeat)."""
    client, send, variables = victim()
    label, size = size, self.held(size)
    found = {name: ([], [], []) for name in (ALONE, *METHODS)}  # counts at 0.98, at 0.9, seconds
    shown, rightly = {}, []
    for repeat in range(self.repeats):
      chosen = np.random.default_rng((seed, repeat)).choice(len(private[0]), size, replace=False)
      images, truth = (x[chosen] for x in private)
      update = send(variables, images, truth).update
      told = _compiled_labels(client, images.shape)(variables, update)
      sent = Sent(client, variables, update, jax.nn.one_hot(told, 10), images.shape[1:])
      rightly.append(int(np.minimum(*(np.bincount(x, minlength=10) for x in (told, truth))).sum()))
      alone = revealed.fully_revealed(fidel.partial_reconstructions(*sent.first).inputs, images).correlation
      for name, counts in found.items():
        start, best, separated = time.monotonic(), alone, None
        if name != ALONE:
          separated = np.asarray(METHODS[name](sent, self, seed + repeat))
        seconds = time.monotonic() - start
        if separated is not None and len(separated):
          by_method = revealed.fully_revealed(separated, images)
          best = np.maximum(alone, by_method.correlation)
          if not repeat:
            shown[name] = np.clip(separated[by_method.neuron].reshape(images.shape), 0, 1)[:16]
        for values, value in zip(counts, (np.sum(best >= 0.98), np.sum(best >= 0.9), seconds), strict=True):
          values.append(value)
      if not repeat:
        quotients = fidel.partial_reconstructions(*sent.first).inputs
        nearest = revealed.fully_revealed(quotients, images).neuron
        shown['private'] = images[:16]
        shown[ALONE] = np.clip(np.asarray(quotients)[nearest].reshape(images.shape), 0, 1)[:16]
    rows = [
      {
        'defense': point(label, name),
        'method': name,
        'samples': label,
        'revealed': np.asarray(at_98).tolist(),
        'revealed_90': np.asarray(at_90).tolist(),
        'seconds': float(np.median(seconds)),
        'labels': rightly,
        'alone': [np.asarray(values).tolist() for values in found[ALONE][:2]],
      }
      for name, (at_98, at_90, seconds) in found.items()
    ]
    return rows, {name: shown[name] for name in ('private', ALONE, *METHODS) if name in shown}

  def outcome(self, cell, rows):
    """Returns the `Outcome` of a cell among the rows of its run; its remark is the difference to Fidel alone."""
    row = self.row_of(cell, rows)
    mean, low, high = statistics.mean_interval(row[cell.metric])
    remark = ''
    if row['method'] != ALONE:
      pairs = zip((row['revealed'], row['revealed_90']), row['alone'], strict=True)
      remark = '; '.join(gained(*pair) for pair in pairs)
    return Outcome(mean, low, high, len(row['revealed']), None, 0, remark)

  def picture(self, rows):
    """Returns a PNG: samples revealed by each method with Fidel, at both thresholds, a panel per batch size."""
    names = [ALONE, *METHODS]
    with figures.figure(2.6 * len(self.sizes) + 0.6, 2.6, layout='constrained') as (figure, png):
      for axes, size in zip(figure.subplots(1, len(self.sizes), squeeze=False)[0], self.sizes, strict=True):
        by_name = {row['method']: row for row in rows if row['samples'] == size}
        for place, (metric, colour) in enumerate((('revealed', '#2f86c9'), ('revealed_90', '#d55e00'))):
          mean, low, high = np.transpose([statistics.mean_interval(by_name[name][metric]) for name in names])
          error = np.nan_to_num([mean - low, high - mean])
          at = np.arange(len(names)) + 0.2 * (place - 0.5)
          axes.errorbar(mean, at, xerr=error, fmt='o', color=colour, markersize=4, capsize=2, linewidth=1)
        axes.set_yticks(range(len(names)), labels=[] if axes.get_subplotspec().colspan.start else _with(names))
        axes.set(title=f'{size} samples', xlim=(-0.03 * size, 1.03 * size), ylim=(len(names) - 0.5, -0.5))
        axes.grid(axis='x', color='#0a0b0c', alpha=0.1, linewidth=0.6)
        axes.spines[['top', 'right']].set_visible(False)
      figure.supxlabel('samples revealed at a correlation of ≥ 0.98 (blue) and ≥ 0.9 (orange)', fontsize=8.5)
      return png()

  def panels(self, kept):
    """Returns the grids: true images above what each method makes of them."""
    return [
      Panel(f'{label}: {name}', images) for label, arrays in kept.items() for name, images in arrays.items()
    ]  # fmt: skip

  def minutes(self):
    """Returns a rough estimate of the time on two cores."""
    pixels = 64 if self.dataset == 'digits' else 784 if self.dataset == 'mnist' else 3072
    cost = 5e-10 * pixels * self.repeats / 60  # minutes per sample, or pair of samples, and step
    held = [self.held(size) for size in self.sizes]
    steps = sum(n**2 * (self.steps + self.iterations) + n * (self.neurons or 128) * self.turns for n in held)
    return cost * steps + 0.2


def point(size, method):
  """Returns the label of what a method reveals of batches of a size."""
  return f'{size} samples, {method}'


def _with(names):
  return [name if name == ALONE else f'Fidel and {name}' for name in names]


def gained(counts, alone):
  """Returns the mean difference of paired counts with its 95 % interval, in words."""
  mean, low, high = statistics.mean_interval(np.subtract(counts, alone))
  return (f'{mean:+.1f}' + ('' if math.isnan(low) else f' ({low:+.1f} to {high:+.1f})')).replace('-', '−')


@dataclasses.dataclass(frozen=True)
class Peelings(Measured):
  """How many images peeling certifies, of dense networks with weights N(0, 0.5²), zero biases and Xavier behind.

  Attributes:
    neurons: of the one hidden layer.
    sizes: of the batches in exact and in single precision.
    strained: size of the batches whose gradient is disturbed.
    noises: standard deviations of Gaussian noise on all gradients, beside the median of the first layer's entries.
    tolerances: of the certificate, under noise; the first elsewhere.
    pruned: shares of each tensor that are zeroed.
    rate: of two local steps, on half of the batch each.
  """

  neurons: int = 1000
  sizes: tuple[int, ...] = (64, 128)
  strained: int = 32
  noises: tuple[float, ...] = (1e-7, 1e-6, 1e-5, 1e-4, 1e-3)
  tolerances: tuple[float, ...] = (1e-4, 1e-2)
  pruned: tuple[float, ...] = (0.1, 0.5, 0.9)
  rate: float = 1e-3

  page = 'certified.png'
  remarks = 'each; wrong ones; the worst image'

  @property
  def conditions(self):
    """Label -> `Condition`, in the order in which they are measured."""
    tolerance = self.tolerances[0]
    found = [Condition(size, dtype, tolerance) for size in self.sizes for dtype in ('float64', 'float32')]
    found.append(Condition(self.strained, 'float64', tolerance))
    found += [
      Condition(self.strained, 'float64', tolerance, noise=n) for tolerance in self.tolerances for n in self.noises
    ]  # fmt: skip
    found += [Condition(self.strained, 'float64', tolerance, pruned=share) for share in self.pruned]
    found.append(Condition(self.strained, 'float64', tolerance, rate=self.rate))
    return {str(condition): condition for condition in found}

  @property
  def defenses(self):
    """Labels of what is measured."""
    return tuple(self.conditions)

  def at_smoke(self):
    """Returns this on 8×8 digits, with small batches and few neurons."""
    return dataclasses.replace(super().at_smoke(), neurons=64)

  def load(self, data_dir):
    """Returns the `Data`.

    Raises:
      UsageError: for data that are missing (says how to prepare them) or too few.
    """
    test = gl.data.load(self.dataset, 'test', data_dir=data_dir, limit=self.pool)
    return Data((test.images, test.labels), None)

  def parts(self, data, seed):
    """Yields (label, function that measures it) of each condition."""
    for label, condition in self.conditions.items():
      yield label, functools.partial(self._condition, label, condition, data.private, seed)

  def said(self, label, rows):
    """Returns a line on what was measured."""
    return f'{label}: {rows[0]["certified"]}, wrong {rows[0]["wrong"]}'

  def _condition(self, label, condition, private, seed):
    """Returns ([its row], images of the first repeat)."""
    declared, condition = condition, condition._replace(size=self.held(condition.size))
    found = []
    for repeat in range(self.repeats):
      rng = np.random.default_rng((seed, repeat))
      params = weights(rng, math.prod(private[0].shape[1:]), self.neurons, 10)
      order = rng.permutation(len(private[0]))[: condition.size]
      images, truth = (x[order] for x in private)
      gradient = disturbed(condition, rng, params, images, truth)
      start = time.monotonic()
      peeled = peeling.peel(params, gradient, condition.size, tolerance=condition.tolerance)
      found.append((*judged(peeled, images, truth), peeled.unexplained, time.monotonic() - start))
      if not repeat:
        nearest, _ = matched(peeled.images, images)
        shown = images[nearest], peeled.images.reshape(-1, *images.shape[1:])
    exact, wrong, worst, unexplained, seconds = zip(*found, strict=True)
    row = {
      'defense': label,
      **declared._asdict(),
      'held': condition.size,
      'certified': exact,
      'wrong': wrong,
      'worst': worst,
      'unexplained': unexplained,
      'seconds': float(np.median(seconds)),
    }
    kept = dict(zip(('private', 'certified'), shown, strict=True))
    return [row], {name: np.clip(x[:16], 0, 1).astype(np.float32) for name, x in kept.items()}

  def outcome(self, cell, rows):
    """Returns the `Outcome` of a cell among the rows of its run."""
    row = self.row_of(cell, rows)
    mean, low, high = statistics.mean_interval(row['certified'])
    least = min((x for x in row['worst'] if x is not None and math.isfinite(x)), default=None)
    worst = '' if least is None else f'; {least:.0f} dB'
    remark = f'{", ".join(map(str, row["certified"]))}; {sum(row["wrong"])} wrong{worst}'
    return Outcome(mean, low, high, len(row['certified']), None, 0, remark)

  def picture(self, rows):
    """Returns a PNG: images certified against noise, a line per tolerance, and of each other condition."""
    calm = next(row for row in rows if row['size'] == self.strained and not (row['noise'] or row['pruned']))
    others = [row for row in rows if not row['noise']]
    with figures.figure(8.4, 2.9, layout='constrained') as (figure, png):
      axes, bars = figure.subplots(1, 2, width_ratios=(1.2, 1))
      for tolerance, colour in zip(self.tolerances, ('#2f86c9', '#d55e00'), strict=False):
        points = [row for row in rows if row['noise'] and row['tolerance'] == tolerance]
        mean, low, high = np.transpose([statistics.mean_interval(row['certified']) for row in points])
        axes.plot(self.noises, mean, marker='o', markersize=3, color=colour, label=f'tolerance {tolerance:g}')
        axes.fill_between(self.noises, low, high, color=colour, alpha=0.15, linewidth=0)
      axes.axhline(np.mean(calm['certified']), color=figures.SOFT, linewidth=0.8, label='no noise')
      axes.set(xscale='log', xlabel='noise, in medians of the gradient')
      axes.set_xticks(self.noises, labels=[f'{noise:g}' for noise in self.noises])
      axes.minorticks_off()
      axes.set_ylim(-0.03 * calm['held'], 1.05 * calm['held'])
      axes.set_ylabel(f'images certified, of {calm["held"]}')
      axes.legend(frameon=False, loc='lower left')
      shares = [100 * np.asarray(row['certified']) / row['held'] for row in others]
      for place, values in enumerate(shares):
        bars.plot(values, [place] * len(values), 'o', color='#2f86c9', markersize=4, alpha=0.6, markeredgewidth=0)
      bars.set_yticks(range(len(others)), labels=[row['defense'] for row in others])
      bars.set(xlabel='images certified, %, a dot per repeat', xlim=(-4, 104), ylim=(len(others) - 0.5, -0.5))
      for one in (axes, bars):
        one.grid(color='#0a0b0c', alpha=0.1, linewidth=0.6)
        one.spines[['top', 'right']].set_visible(False)
      return png()

  def panels(self, kept):
    """Returns the grids: true images above the certified ones."""
    return [
      Panel(f'{label}: {name}', images)
      for label, arrays in kept.items()
      for name, images in arrays.items()
      if len(images) and label in tuple(self.conditions)[: 2 * len(self.sizes)]
    ]

  def minutes(self):
    """Returns a rough estimate of the time on two cores."""
    rounds = sum(self.held(condition.size) ** 2 for condition in self.conditions.values())
    return self.repeats * rounds * self.neurons / 1e8 + 0.1


class Condition(NamedTuple):
  """What a batch's gradient goes through.

  Attributes:
    size: of the batch.
    dtype: in which the client computes.
    tolerance: of the certificate.
    noise: standard deviation of Gaussian noise, in medians of the first layer's entries that are not zero.
    pruned: share of each tensor that is zeroed.
    rate: of two local steps on half of the batch each, whose delta is sent; 0 sends the gradient.
  """

  size: int
  dtype: str
  tolerance: float
  noise: float = 0.0
  pruned: float = 0.0
  rate: float = 0.0

  def __str__(self):
    text = f'{self.size} images, {self.dtype}'
    if self.noise:
      text += f', noise {self.noise:g}, tolerance {self.tolerance:g}'
    if self.pruned:
      text += f', {100 * self.pruned:g} % pruned'
    return text + (', two local steps' if self.rate else '')


def weights(rng, size, neurons, classes):
  """Returns the [(kernel, bias), (kernel, bias)] of the published experiment, float64."""
  last = math.sqrt(2 / (neurons + classes))
  return [
    (rng.normal(0, 0.5, (size, neurons)), np.zeros(neurons)),
    (rng.normal(0, last, (neurons, classes)), np.zeros(classes)),
  ]


def disturbed(condition, rng, params, images, truth):
  """Returns the gradient, as `peeling.peel` takes it, that the server sees under a `Condition`."""
  names = ('dense_0', 'dense_1')
  with jax.enable_x64(condition.dtype == 'float64'):
    tree = {n: dict(zip(('kernel', 'bias'), layer, strict=True)) for n, layer in zip(names, params, strict=True)}
    tree = jax.tree.map(lambda x: jnp.asarray(x, condition.dtype), tree)
    send = _compiled_client(len(params[0][1]), images.shape[1:], len(params[1][1]), condition._replace(noise=0.0))
    sent = send({'params': tree}, jnp.asarray(images, condition.dtype), jnp.asarray(truth, jnp.int32)).update
    update = jax.device_get(sent)
  scale = -1 / (condition.rate * -(-condition.size // (condition.size // 2))) if condition.rate else 1.0
  entries = np.abs(update['dense_0']['kernel'])
  stddev = condition.noise * np.median(entries[entries > 0]) if condition.noise else 0.0
  return [tuple(scale * x + rng.normal(0, stddev, x.shape) for x in (update[n]['kernel'], update[n]['bias']))
          for n in names]  # fmt: skip


@functools.cache
def _compiled_client(neurons, shape, classes, condition):
  """Returns the compiled local update of a client that prunes, or takes two steps, as a `Condition` says."""
  sharing = {'upload': prune(rate=condition.pruned)} if condition.pruned else {}
  if condition.rate:
    sharing |= {'share': 'delta', 'batch_size': condition.size // 2, 'optimizer': optax.sgd(condition.rate)}
  return jax.jit(functools.partial(Client(wide(neurons, shape, classes), classes, **sharing).local_update, None))


def matched(found, images):
  """Returns (index of the nearest true image, PSNR in dB, 300 at most) of each image that was found."""
  if not len(found):
    return np.zeros(0, int), np.zeros(0)
  images = images.reshape(len(images), -1).astype(np.float64)
  distances = np.stack([np.mean((images - row) ** 2, axis=1) for row in found])
  return distances.argmin(axis=1), -10 * np.log10(np.maximum(distances.min(axis=1), 1e-30))


def judged(peeled, images, truth):
  """Returns (number of images above 60 dB with their labels, number of other certified ones, the least PSNR or NaN)."""
  nearest, psnr = matched(peeled.images, images)
  right = (psnr > 60) & (peeled.labels == np.asarray(truth)[nearest])
  exact = len(set(nearest[right].tolist()))
  return exact, len(nearest) - exact, float(psnr.min()) if len(psnr) else math.nan


@dataclasses.dataclass(frozen=True)
class Spears(Measured):
  """How exactly SPEAR separates batches at a dense layer in front of two others.

  Attributes:
    sizes: of the batches.
    neurons: of the layer.
    features: its inputs, where they are standard normal; `dataset`'s images less their mean are the other kind.
    noises: standard deviations of Gaussian noise, beside the median of the gradient, on the smallest batch.
  """

  sizes: tuple[int, ...] = (10, 12, 14)
  neurons: int = 400
  features: int = 200
  noises: tuple[float, ...] = (1e-7, 1e-5, 1e-3)

  page = 'errors.png'
  remarks = 'batches exact to 1e-6; seconds of one'

  @property
  def conditions(self):
    """Label -> (inputs, size, dtype, noise), in the order in which they are measured."""
    found = [('normal', size, 'float64', 0.0) for size in self.sizes]
    found += [('images', size, 'float64', 0.0) for size in self.sizes]
    found.append(('normal', self.sizes[0], 'float32', 0.0))
    found += [('normal', self.sizes[0], 'float64', noise) for noise in self.noises]
    return {spear_label(*condition): condition for condition in found}

  @property
  def defenses(self):
    """Labels of what is measured."""
    return tuple(self.conditions)

  def at_smoke(self):
    """Returns this with small batches and few neurons."""
    return dataclasses.replace(super().at_smoke(), neurons=40, features=20)

  def load(self, data_dir):
    """Returns the `Data`.

    Raises:
      UsageError: for data that are missing (says how to prepare them) or too few.
    """
    test = gl.data.load(self.dataset, 'test', data_dir=data_dir, limit=self.pool)
    return Data((test.images, test.labels), None)

  def parts(self, data, seed):
    """Yields (label, function that measures it) of each condition."""
    for label, condition in self.conditions.items():
      yield label, functools.partial(self._condition, label, condition, data.private, seed)

  def said(self, label, rows):
    """Returns a line on what was measured."""
    return f'{label}: largest errors {", ".join(f"{x:.1g}" for x in rows[0]["errors"])}'

  def _condition(self, label, condition, private, seed):
    """Returns ([its row], nothing to show)."""
    kind, size, dtype, noise = condition
    size, found = self.held(size), []
    for repeat in range(self.repeats):
      rng = np.random.default_rng((seed, repeat, size))
      if kind == 'images':
        images = private[0].reshape(len(private[0]), -1).astype(np.float64)
        inputs = (images - images.mean(axis=0))[rng.choice(len(images), size, replace=False)]
      else:
        inputs = rng.normal(size=(size, self.features))
      layer = first_layer(rng, inputs.astype(dtype), self.neurons, noise)
      start = time.monotonic()
      tolerance = math.sqrt(noise) if noise else None
      separated = spear.spear(*layer, rng, rank=size if noise else None, tolerance=tolerance)
      distances = [np.abs(separated.inputs - row).max(axis=1, initial=0).min(initial=np.inf) for row in inputs]
      found.append((float(np.max(distances)), separated.agreement, separated.rank, time.monotonic() - start))
    worst, agreement, rank, seconds = zip(*found, strict=True)
    row = {'defense': label, 'size': size, 'errors': worst, 'agreement': agreement, 'rank': rank}
    return [{**row, 'seconds': float(np.median(seconds))}], {}

  def outcome(self, cell, rows):
    """Returns the `Outcome` of a cell among the rows of its run: the largest error of any input of any batch."""
    row = self.row_of(cell, rows)
    worst = max(row['errors'])
    exact = sum(error < 1e-6 for error in row['errors'])
    remark = f'{exact} of {len(row["errors"])}; {row["seconds"]:.1f} s'
    return Outcome(worst if math.isfinite(worst) else None, None, None, len(row['errors']), None, 0, remark)

  def picture(self, rows):
    """Returns a PNG: the largest error of each batch; what was not separated stands at the right."""
    with figures.figure(6.2, 0.26 * len(rows) + 0.9, layout='constrained') as (figure, png):
      axes = figure.subplots()
      for place, row in enumerate(rows):
        values = [min(max(error, 1e-16), 30.0) for error in row['errors']]
        axes.plot(values, [place] * len(values), 'o', color='#2f86c9', markersize=4, alpha=0.6, markeredgewidth=0)
      axes.axvline(1e-6, color=figures.SOFT, linewidth=0.8)
      axes.set_yticks(range(len(rows)), labels=[row['defense'] for row in rows])
      axes.set(xscale='log', xlim=(3e-17, 100), ylim=(len(rows) - 0.5, -0.5))
      axes.set_xticks([1e-15, 1e-12, 1e-9, 1e-6, 1e-3, 1.0], labels=['1e-15', '1e-12', '1e-9', '1e-6', '1e-3', '1'])
      axes.minorticks_off()
      axes.set_xlabel('largest error of a batch; outermost: not separated')
      axes.grid(axis='x', color='#0a0b0c', alpha=0.1, linewidth=0.6)
      axes.spines[['top', 'right']].set_visible(False)
      return png()

  def panels(self, kept):
    """Returns nothing: normal inputs are no pictures."""
    return []

  def minutes(self):
    """Returns a rough estimate of the time on two cores."""
    return self.repeats * (0.05 + sum(2.0 ** self.held(size) for size in self.sizes) * 1e-5)


def spear_label(kind, size, dtype, noise):
  """Returns the label of a condition of `Spears`."""
  inputs = {'normal': 'normal inputs', 'images': 'images less their mean'}[kind]
  return f'{size} {inputs}, {dtype}' + (f', noise {noise:g}' if noise else '')


def first_layer(rng, inputs, neurons, noise):
  """Returns (kernel gradient, bias gradient, kernel, bias) of the first of three layers, U(±1/√fan_in), mean loss."""
  dtype, sizes = inputs.dtype, (inputs.shape[1], neurons, 40, 10)
  layers = [
    tuple((rng.uniform(-1, 1, shape) / math.sqrt(i)).astype(dtype) for shape in ((i, o), (o,)))
    for i, o in itertools.pairwise(sizes)
  ]
  truth = rng.integers(10, size=len(inputs))
  z = inputs @ layers[0][0] + layers[0][1]
  shares = peeling.implied_gradients(layers[1:], z, truth)[0] / dtype.type(len(inputs))
  gradient = inputs.T @ shares, shares.sum(axis=0)
  entries = np.abs(gradient[0])
  stddev = noise * np.median(entries[entries > 0])
  gradient = [(x + rng.normal(0, stddev, x.shape)).astype(dtype) if noise else x for x in gradient]
  return *gradient, *layers[0]


SEPARATION = (
  'Enthoven, Al-Ars: Fidel. 2021 (source separation is proposed there); Kariyappa, Guo, Maeng, Xiong, Suh, Qureshi, '
  'Lee: Cocktail Party Attack. ICML 2023.'
)
PEELING = 'Shariati, Alambardar Meybodi: LT-peeling, passive. 2026, as it was described to us; we claim no parity.'
SPEAR = 'Dimitrov, Baader, Müller, Vechev: SPEAR: Exact Gradient Inversion of Batches. NeurIPS 2024.'
PRINTED = {64: 0.994, 128: 0.666}  # passive, CIFAR-10, float64: shares recovered


def _separation(dataset, name, mini):
  settings = {
    'FCNN, untrained': (0, 0),
    'FCNN, trained': (0, 500),
    '1,000 neurons, untrained': (1000, 0),
    '1,000 neurons, trained': (1000, 500),
  }
  runs = {
    folder_name(index, label)[3:]: Separations(dataset, 20, 1000, neurons=neurons, training=training, mini=mini)
    for index, (label, (neurons, training)) in enumerate(settings.items())
  }
  cells = [
    Cell(f'{setting}: {size} samples', _with([method])[0], metric, run, point(size, method))
    for (run, one), setting in zip(runs.items(), settings, strict=True)
    for size in one.sizes
    for method in (ALONE, *METHODS)
    for metric in ('revealed', 'revealed_90')
  ]
  return Experiment(
    f'separation_{dataset}',
    SEPARATION,
    f'Source separation beside Fidel, dense networks, {name}',
    'Nothing of this is printed: the paper proposes separation. How many samples more it reveals than the neurons '
    'that hold one alone.',
    runs,
    tuple(cells),
    'A sample is revealed if some image has a Pearson correlation of 0.98 (fully) or 0.9 or more with it; each counts '
    'once.',
    (
      'One gradient on the whole batch, no dropout; initial weights U(±1/√fan_in). “Trained”: 500 steps of SGD, batch '
      '50 and rate 0.05, on the first 5,000 training images.',
      'The Cocktail Party Attack takes 500 steps at a rate of 1e-2 with a weight of decorrelation of 0.1; 3,000 at '
      '1e-3 with the published 1.47 end far behind at 8 and 30 samples.',
      'Labels, which `alternating` needs, are counted from the last bias’s gradient and what the network predicts for '
      'Fidel’s reconstructions; images start as noise.',
      'Peeling is no separation; it stands here for what exact knowledge of the weights gives, in float32.',
    ),
  )


def _peeling():
  run = Peelings('cifar10', 20, 1000, mini={'repeats': 5})
  cells = tuple(
    Cell(f'batches of {c.size}', label, 'certified', 'dense', label,
         PRINTED[c.size] * c.size if c.size in PRINTED and c.dtype == 'float64' else None)
    for label, c in run.conditions.items()
  )  # fmt: skip
  return Experiment(
    'peeling_cifar10',
    PEELING,
    'Passive peeling, 1,000 ReLU neurons, CIFAR-10',
    'The gradient certifies its images exactly, labels included, and little on the way suffices to end it.',
    {'dense': run},
    cells,
    'Counted are certified images above 60 dB with the right label, each once; all other certified ones are “wrong”.',
    (
      'Weights N(0, 0.5²) and Xavier behind, zero biases, new ones and other images in each repeat.',
      'The certificate’s tolerance is 1e-4 where nothing else is said.',
      'Noise falls on all tensors alike, in medians of the first layer’s entries that are not zero.',
      'Two local steps: half of the batch each, rate 1e-3; the server divides the delta by the rate.',
    ),
  )


def _spear():
  run = Spears('cifar10', 20, 1000, mini={'repeats': 5})
  cells = tuple(
    Cell(f'{kind}, {dtype}' if not noise else f'{kind}, {dtype}, noise', label, 'largest_error', 'dense', label)
    for label, (kind, _, dtype, noise) in run.conditions.items()
  )
  return Experiment(
    'spear_exact',
    SPEAR,
    'SPEAR: exact inputs of small batches',
    'Nothing of this is printed: that low rank and ReLU’s zeros give a batch away exactly, and how noise ends it.',
    {'dense': run},
    cells,
    'The largest error of any entry of any input, in the best match of each; “–”: a batch was not separated.',
    (
      'Under noise the attacker is told the rank, which no singular value shows then, and takes the root of the noise '
      'for zero.',
      'A layer of 400 neurons in front of 40 and 10, U(±1/√fan_in); normal inputs have 200 features.',
    ),
  )


EXPERIMENTS = (
  _separation('mnist', 'MNIST', {'repeats': 6}),
  _separation('cifar10', 'CIFAR-10', {'repeats': 4}),
  _peeling(),
  _spear(),
)
