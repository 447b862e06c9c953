"""A table of a paper as data: the settings to rerun it, and the paper's numbers to set beside ours.

An `Experiment` holds `Run`s (one audit each, as published as the paper says) and `Cell`s (which figure of which run
stands beside which number). A scale turns the published settings into what a machine can carry; what it changed is
stated wherever its numbers are shown.
"""

import csv
import dataclasses
import io
import math
import os
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import gradleak as gl
from gradleak import errors, report, specs
from gradleak.attacks.registry import settings_of
from gradleak.defenses import registry as defense_registry
from gradleak.federated import layer_average
from gradleak.metrics import statistics
from gradleak.report.formatting import aligned, number, significant

SCALES = ('smoke', 'mini', 'paper')


@dataclasses.dataclass(frozen=True)
class Training:
  """A short federated training on other data: it yields the model that is attacked, and the one sent before it.

  In each round every client shares its update on all its samples, and the server takes the mean over those that sent
  it, entry by entry.

  Attributes:
    rounds: how often the server updates its model.
    clients: number of clients.
    samples: samples of each, from the train split.
    rate: the server's learning rate on the mean gradient.
    defense: what the clients do to their uploads.
  """

  rounds: int = 20
  clients: int = 10
  samples: int = 50
  rate: float = 0.1
  defense: str = 'none'


class Scaled:
  """What can be run at a scale: it has `at_mini` and `at_smoke`."""

  def scaled(self, scale):
    """Returns this at a scale: 'paper' as declared, 'mini' for two cores, 'smoke' to see that it runs.

    Raises:
      UsageError: for an unknown scale.
    """
    if scale not in SCALES:
      raise errors.unknown('scale', scale, SCALES)
    return {'paper': lambda: self, 'mini': self.at_mini, 'smoke': self.at_smoke}[scale]()


@dataclasses.dataclass(frozen=True)
class Run(Scaled):
  """One audit. All settings are the paper's; `mini` holds what two cores need in their place.

  Attributes:
    dataset: as in `gradleak.data.load`; private images are the first ones of its test split.
    model: as in `gradleak.models.create`.
    attack: as in the programs.
    defenses: label -> text.
    trials, batch_size, restarts, controls, labels, knowledge, counters: as in `gradleak.audit`.
    init: as in `gradleak.models.create`.
    share, local_batch_size, learning_rate, batch_norm: as in `gradleak.scenario`.
    public: number of public images, from the train split.
    bias: share of the public images that is drawn from one class, the rest evenly from the others; None takes them as
      they come.
    training: how the attacked model was trained; None attacks it untrained.
    settings: name of an attack or defense -> its settings that take the place of those in its text; a function is
      handed the value in the text.
    mini: field -> value at scale 'mini'.
  """

  dataset: str
  model: str
  attack: str
  defenses: Mapping[str, str]
  trials: int
  batch_size: int = 1
  restarts: int = 1
  controls: int = 64
  labels: str = 'auto'
  knowledge: str = 'unaware'
  counters: tuple[str, ...] | None = None
  init: str = 'default'
  share: str = 'gradient'
  local_batch_size: int | None = None
  learning_rate: float = 0.1
  batch_norm: str = 'train'
  public: int = 0
  bias: float | None = None
  training: Training | None = None
  settings: Mapping[str, Mapping] = dataclasses.field(default_factory=dict)
  mini: Mapping = dataclasses.field(default_factory=dict)

  kind = 'audit'
  shown = 'report'
  page = 'report.html'
  remarks = 'recovered'
  intervals = 'Ours: mean over trials ± half its 95 % interval. “Recovered” counts trials beyond the control pool.'

  def at_mini(self):
    """Returns this with what two cores need in place of the paper's settings."""
    return dataclasses.replace(self, mini={}, **self.mini)

  def at_smoke(self):
    """Returns this on 8×8 digits and a dense net, in 3 steps."""
    training = self.training and dataclasses.replace(self.training, rounds=2, clients=2, samples=4)
    attack = specs.parse(self.attack, 'attack').name
    return dataclasses.replace(
      self,
      dataset='digits',
      model='mlp',  # compiles fast
      trials=2,
      batch_size=min(self.batch_size, 2),
      restarts=min(self.restarts, 2),
      controls=2,
      public=min(self.public, 16),
      training=training,
      settings={
        **({attack: {'steps': 3}} if 'steps' in settings_of(attack) else {}),
        'concealment': {'steps': 2},
        'graddefense': {'root': _smoke_root},
      },
      mini={},
    )

  def changes(self, scale):
    """Returns what a scale changes, each as 'name value instead of value'."""
    now = self.scaled(scale)
    fields = [field.name for field in dataclasses.fields(Run) if field.name not in ('mini', 'settings', 'training')]
    pairs = {name: (getattr(now, name), getattr(self, name)) for name in fields}
    if self.training:
      for field in dataclasses.fields(Training):
        pairs[f'training {field.name}'] = getattr(now.training, field.name), getattr(self.training, field.name)
    for new, old in zip(_specs(now), _specs(self), strict=True):
      new, old = dict(new.settings), {'name': old.name, **dict(old.settings)}
      pairs |= {f'{old["name"]} {key}': (value, old.get(key, 'the published')) for key, value in new.items()}
    return [f'{name} {new} instead of {old}' for name, (new, old) in pairs.items() if new != old]

  def texts(self):
    """Returns the defenses' canonical texts by label, the run's settings applied."""
    return {
      label: '+'.join(str(_rewritten(spec, self.settings)) for spec in specs.parse_chain(text, 'defense'))
      for label, text in self.defenses.items()
    }

  def load(self, data_dir):
    """Returns the `Data`: private images from 'test', public ones and those trained on from 'train'.

    Raises:
      UsageError: for data that are missing (says how to prepare them) or too few.
    """
    private = gl.data.load(self.dataset, 'test', data_dir=data_dir, limit=self.trials * self.batch_size)
    trained = self.training.clients * self.training.samples if self.training else 0
    # A class may be rare among the first images: enough are read to fill it.
    pool = self.public if self.bias is None else self.public * max(1, round(1.5 * private.num_classes * self.bias) + 1)
    if not pool + trained:
      return Data(private, None, None)
    train = gl.data.load(self.dataset, 'train', data_dir=data_dir, limit=pool + trained)
    public = others = None
    if self.public:
      chosen = np.arange(self.public) if self.bias is None else biased(train.labels[:pool], self.public, self.bias)
      public = train.images[chosen], train.labels[chosen]
    if trained:
      others = train.images[pool:], train.labels[pool:]
    return Data(private, public, others)

  def execute(self, data, seed, *, workdir, progress='auto'):
    """Runs the audit in its own folder, or resumes it, and writes its report; returns its rows."""
    result = self.audit(data, seed, workdir=workdir, progress=progress)
    if not (result.resumed and os.path.exists(os.path.join(workdir, self.page))):
      report.write(result, workdir)
    return result.rows

  def audit(self, data, seed, *, workdir, progress='auto'):
    """Runs the audit in its own folder, or resumes it; returns its `AuditResult`."""
    key = jax.random.key(seed)
    return gl.audit(
      jax.random.fold_in(key, 1),
      scenario(self, data, jax.random.fold_in(key, 0)),
      list(self.texts().values()),
      [attack_text(self)],
      self.trials,
      batch_size=self.batch_size,
      restarts=self.restarts,
      labels=self.labels,
      controls=self.controls,
      workdir=workdir,
      knowledge=self.knowledge,
      counters=self.counters,
      progress=progress,
    )

  def rows_of(self, cell, rows):
    """Returns the rows of an audit that a cell is about.

    Raises:
      UsageError: if there are none: the declaration and the audit's rows do not fit.
    """
    defense = self.texts()[cell.defense]
    found = [row for row in rows if row['defense'] == defense and row.get('counter') == cell.counter]
    if not found:
      raise errors.UsageError(f'no row of the run {cell.run} is about {defense!r}, counter-measure {cell.counter}')
    return found

  def outcome(self, cell, rows):
    """Returns the `Outcome` of a cell among the rows of its run."""
    rows = self.rows_of(cell, rows)
    values = [row.get(cell.metric) for row in rows]
    mean, low, high = statistics.mean_interval([math.nan if value is None else value for value in values])
    finite = [value if math.isfinite(value) else None for value in (mean, low, high)]
    recovered, diverged = (sum(bool(row[key]) for row in rows) for key in ('success', 'diverged'))
    remark = f'{recovered} of {len(rows)}' + (f', {diverged} diverged' if diverged else '')
    return Outcome(*finite, len(rows), recovered, diverged, remark)

  def minutes(self):
    """Returns a rough estimate of the time on two cores: steps × images attacked × the cost of one."""
    attack = gl.attacks.parse(attack_text(self))
    model = specs.parse(self.model, 'model')
    width = dict(model.settings).get('width', 64 if model.name == 'convnet' else 8)
    cost = MILLISECONDS[model.name] * (width / 8) ** 1.6
    local_steps = -(-self.batch_size // (self.local_batch_size or self.batch_size))
    names = [specs.parse_chain(text, 'defense')[-1].name for text in self.defenses.values()]
    unaware = len(names) if self.knowledge != 'aware' else 0
    tried = COUNTERS if self.counters is None else dict.fromkeys(COUNTERS, len(self.counters))
    aware = sum(tried.get(name, 0) for name in names) if self.knowledge != 'unaware' else 0
    uploads = self.trials * (unaware + aware) + self.controls
    steps = attack.build(attack.numbers, None).num_steps or 1
    return uploads * self.restarts * self.batch_size * local_steps * steps * cost / 60_000


class Cell(NamedTuple):
  """One number of the paper, and where ours is found.

  Attributes:
    column: the heading of the part of the table, such as the dataset.
    row: the line of the table, such as the defense as the paper calls it.
    metric: a key of an audit's rows, or 'lpips'; of a training, one of `utility.METRICS`.
    run: a key of the experiment's `runs`.
    defense: a label of that run's defenses.
    paper: its number; several where it prints several (one per picture); None where it prints none.
    spread: what stands behind its ±.
    counter: the counter-measure of an attacker who knows the defense; None is the one who does not.
  """

  column: str
  row: str
  metric: str
  run: str
  defense: str
  paper: float | tuple[float, ...] | None = None
  spread: float | None = None
  counter: str | None = None


@dataclasses.dataclass(frozen=True)
class Experiment:
  """A table or figure of a paper.

  Attributes:
    name: as in `launch/reproduce.py --experiment=…`.
    paper: authors, title, venue.
    table: which of its tables.
    shows: one sentence: what is to be seen.
    runs: what is behind it, by name: audits (`Run`) or trainings (`utility.Trainings`), each with the same methods.
    cells: its numbers.
    metrics: one sentence: how the paper's figures are defined, against ours.
    choices: sentences on what the paper leaves open, and what stands here.
    notes: column, or '' for all, -> a sentence on where ours and the paper's disagree.
  """

  name: str
  paper: str
  table: str
  shows: str
  runs: Mapping[str, object]
  cells: tuple[Cell, ...]
  metrics: str
  choices: tuple[str, ...] = ()
  notes: Mapping[str, str] = dataclasses.field(default_factory=dict)


class Outcome(NamedTuple):
  """What stands beside a cell: a figure with its 95 % interval; None where there is none.

  Attributes:
    mean, low, high: of the cell's metric; in audits, over the trials that did not diverge.
    n: number of trials, or of test samples.
    recovered: how many trials were successes beyond the control; None in trainings.
    diverged: how many have no figure.
    remark: what the last column of its line says.
  """

  mean: float | None
  low: float | None
  high: float | None
  n: int
  recovered: int | None
  diverged: int
  remark: str = ''


def with_weights(experiment, path):
  """Returns the `Experiment` with a file of weights in place of the training that its runs would do.

  Raises:
    UsageError: if none of its runs takes weights.
  """
  takes = {name for name, run in experiment.runs.items() if hasattr(run, 'weights')}
  if not takes:
    raise errors.UsageError(f'{experiment.name} attacks no model whose weights could be given')
  runs = {n: dataclasses.replace(run, weights=path) if n in takes else run for n, run in experiment.runs.items()}
  return dataclasses.replace(experiment, runs=runs)


def _smoke_root(root):
  """Returns a number of root images that is small and tells 50, 100, … apart."""
  return max(2, root // 25)


def _specs(run):
  """Returns the specs of a run's attack and of all its defenses."""
  texts = [attack_text(run), *run.texts().values()]
  return [spec for text in texts for spec in specs.parse_chain(text, 'specification')]


def attack_text(run):
  """Returns the attack's text, the run's settings applied."""
  return str(_rewritten(specs.parse(run.attack, 'attack'), run.settings))


def _rewritten(spec, settings):
  changed = dict(spec.settings)
  for key, value in settings.get(spec.name, {}).items():
    if not callable(value):
      changed[key] = value
    elif key in changed:
      changed[key] = value(changed[key])
  return spec._replace(settings=tuple(changed.items()))


class Data(NamedTuple):
  """The images of a run: `private` is a `Dataset`, `public` and `others` (images, labels) or None."""

  private: object
  public: tuple | None
  others: tuple | None


def biased(labels, count, bias):
  """Returns the indices of `count` images, the share `bias` of class 0 and the others evenly from the other classes.

  GradDefense's "bias probability" of the root set: with ten classes, 0.1 is uniform.

  Raises:
    UsageError: if a class has too few images.
  """
  classes = np.unique(labels)
  wanted = np.zeros(len(classes), int)
  wanted[0] = round(bias * count)
  for i in range(count - wanted[0]):
    wanted[1 + i % (len(classes) - 1)] += 1
  chosen = [np.flatnonzero(labels == label)[:number] for label, number in zip(classes, wanted, strict=True)]
  if any(len(found) < number for found, number in zip(chosen, wanted, strict=True)):
    raise errors.UsageError(f'{len(labels)} images hold too few of a class for {count} with a bias of {bias}')
  return np.sort(np.concatenate(chosen))


def scenario(run, data, key):
  """Returns the `Scenario` of a run; `key` initialises and trains its model."""
  model = gl.models.create(run.model, data.private.num_classes, init=run.init)

  def built(**given):
    return gl.scenario(
      model,
      data.private.images,
      data.private.labels,
      num_classes=data.private.num_classes,
      dataset=run.dataset,
      split=data.private.split,
      init=run.init,
      share=run.share,
      local_batch_size=run.local_batch_size,
      learning_rate=run.learning_rate,
      batch_norm=run.batch_norm,
      public=data.public,
      training=run.training and dataclasses.asdict(run.training),
      **given,
    )

  untrained = built(key=jax.random.fold_in(key, 0))
  if run.training is None:
    return untrained
  variables, previous = train(jax.random.fold_in(key, 1), untrained, *data.others, run.training)
  return built(variables=variables, previous=previous)


def train(key, scenario, images, labels, training):
  """Returns the variables after a short federated training, and those of one round before.

  Args:
    key: drives the clients' defense.
    scenario: its client and model are trained; BatchNorm uses batch statistics, running ones stay as they are.
    images, labels: [clients · samples, …] of the train split.
    training: the `Training`.
  """
  client, variables = scenario.client, scenario.variables
  context = defense_registry.Context(client, variables, images.shape[1:], scenario.public)
  defense = defense_registry.parse(training.defense, context)
  client = defense.build([jnp.float32(value) for value in defense.numbers], client)
  images = jnp.asarray(images).reshape(training.clients, training.samples, *images.shape[1:])
  labels = jnp.asarray(labels).reshape(training.clients, training.samples)
  direction = -training.rate if client.share == 'gradient' else 1.0

  @jax.jit
  def one_round(params, key):
    def upload(given):
      return client.local_update(given[0], {**variables, 'params': params}, *given[1:])

    mean = layer_average(jax.lax.map(upload, (jax.random.split(key, training.clients), images, labels)))
    return jax.tree.map(lambda p, m: p + jnp.asarray(direction, p.dtype) * m, params, mean)

  params = variables['params']
  for index in range(training.rounds):
    before, params = params, one_round(params, jax.random.fold_in(key, index))
  return {**variables, 'params': params}, {**variables, 'params': before}


# Metric -> (heading, digits: decimals, or significant ones where it spans powers of ten).
HEADINGS = {
  'psnr': ('PSNR dB', lambda value: number(value, 2)),
  'psnr_unclipped': ('PSNR dB (unclipped)', lambda value: number(value, 2)),
  'oracle_psnr': ('PSNR dB (best restart by the truth)', lambda value: number(value, 2)),
  'oracle_ssim': ('SSIM (best restart by the truth)', lambda value: number(value, 3)),
  'oracle_mse_unclipped': ('MSE (unclipped, best restart by the truth)', significant),
  'ssim': ('SSIM', lambda value: number(value, 3)),
  'mse_unclipped': ('MSE (unclipped)', significant),
  'lpips': ('LPIPS', lambda value: number(value, 3)),
  'accuracy': ('accuracy %', lambda value: number(value, 2)),
  'sensitive_accuracy': ('accuracy on sensitive samples %', lambda value: number(value, 2)),
  'accuracy_share': ('% of the undefended accuracy', lambda value: number(value, 1)),
  'overhead': ('round time, % over none', lambda value: number(value, 2)),
  'round_seconds': ('seconds of a round', lambda value: number(value, 2)),
  'train_seconds': ('training s', lambda value: number(value, 2)),
  'defense_seconds': ('defense s', lambda value: number(value, 3)),
  'parameters': ('parameters sent, millions', lambda value: number(value, 3)),
  'share_sent': ('% of the parameters', lambda value: number(value, 1)),
  'total_parameters': ('parameters at full width, millions', lambda value: number(value, 6)),
  'epsilon': ('ε', lambda value: number(value, 2)),
  'revealed': ('samples fully revealed', number),
  'revealed_90': ('samples at ≥ 0.9', number),
  'certified': ('images certified', number),
  'largest_error': ('largest error', significant),
  'cosine': ('cosine', lambda value: number(value, 3)),
  'queries': ('queries', number),
}


def ours_text(metric, found):
  """Returns our figure as 'mean ± half the 95 % interval'; 'n/a' for LPIPS, whose networks do not come along."""
  show = HEADINGS[metric][1]
  if found.mean is None:
    return 'n/a' if metric == 'lpips' else 'diverged' if found.diverged else '–'
  return show(found.mean) if found.low is None else f'{show(found.mean)} ± {show((found.high - found.low) / 2)}'


def paper_text(cell):
  """Returns the paper's number or numbers; '–' where it prints none."""
  show = HEADINGS[cell.metric][1]
  if cell.paper is None:
    return '–'
  if isinstance(cell.paper, tuple):
    return ' and '.join(map(show, cell.paper))
  return show(cell.paper) + ('' if cell.spread is None else f' ± {show(cell.spread)}')


def sections(experiment, outcomes):
  """Returns the table as {column: [heading line, line, …]}, each line a list of texts.

  Args:
    experiment: the `Experiment`.
    outcomes: one `Outcome` per cell, in their order.
  """
  found = dict(zip(((cell.column, cell.row, cell.metric) for cell in experiment.cells), outcomes, strict=True))
  cells = {(cell.column, cell.row, cell.metric): cell for cell in experiment.cells}
  tables = {}
  for column in dict.fromkeys(cell.column for cell in experiment.cells):
    inside = [cell for cell in experiment.cells if cell.column == column]
    metrics = list(dict.fromkeys(cell.metric for cell in inside))
    head = ['', *(text for metric in metrics for text in (HEADINGS[metric][0], 'paper'))]
    head.append(experiment.runs[inside[0].run].remarks)
    lines = [head]
    for row in dict.fromkeys(cell.row for cell in inside):
      line, shown = [row], None
      for metric in metrics:
        cell = cells.get((column, row, metric))
        shown = shown or (cell and found[column, row, metric])
        line += ['', ''] if cell is None else [ours_text(metric, found[column, row, metric]), paper_text(cell)]
      lines.append([*line, shown.remark])
    # A column that says nothing is left out.
    tables[column] = lines if any(line[-1] for line in lines[1:]) else [line[:-1] for line in lines]
  return tables


def markdown(experiment, scale, seed, outcomes):
  """Returns table.md: ours beside the paper's, what was changed, and what to make of it."""
  parts = [f'# {experiment.table}', f'{experiment.paper}\n\n{experiment.shows}', experiment.metrics]
  parts += dict.fromkeys(run.intervals for run in experiment.runs.values())
  for column, lines in sections(experiment, outcomes).items():
    text = ['| ' + ' | '.join(line) + ' |' for line in lines]
    text.insert(1, '|' + ' --- |' * len(lines[0]))
    parts.append(f'## {column}\n\n' + '\n'.join(text))
    if column in experiment.notes:
      parts.append(experiment.notes[column])
  if '' in experiment.notes:
    parts.append(experiment.notes[''])
  parts.append('## Settings\n\n' + '\n'.join(f'- {text}' for text in settings(experiment, scale, seed)))
  return '\n\n'.join(parts) + '\n'


def settings(experiment, scale, seed):
  """Returns sentences on how this was run: the choices, the scale, and what it changed in each run."""
  by_change = {}
  for name, run in experiment.runs.items():
    by_change.setdefault('; '.join(run.changes(scale)) or 'nothing is scaled down', []).append(name)
  lines = [f'Scale {scale}, seed {seed}.', *experiment.choices]
  return lines + [f'{", ".join(names)}: {change}.' for change, names in by_change.items()]


def terminal(experiment, outcomes):
  """Returns the table for the terminal, aligned."""
  tables = [[column, *aligned(lines)] for column, lines in sections(experiment, outcomes).items()]
  return '\n\n'.join('\n'.join(lines) for lines in tables)


def table_csv(experiment, scale, outcomes):
  """Returns table.csv, one line per cell; a missing value is empty, several of the paper's are joined by ';'."""
  text = io.StringIO()
  names = ('mean', 'low', 'high', 'n', 'recovered', 'diverged', 'remark')
  writer = csv.writer(text)
  head = ('experiment', 'scale', 'column', 'row', 'metric', 'run', 'defense', 'counter')
  writer.writerow([*head, *names, 'paper', 'paper_spread'])
  for cell, found in zip(experiment.cells, outcomes, strict=True):
    defense = experiment.runs[cell.run].scaled(scale).texts()[cell.defense]
    paper = ';'.join(map(str, cell.paper)) if isinstance(cell.paper, tuple) else cell.paper
    writer.writerow(
      [experiment.name, scale, cell.column, cell.row, cell.metric, cell.run, defense, cell.counter]
      + [getattr(found, name) for name in names]
      + [paper, cell.spread]
    )
  return text.getvalue()


# Milliseconds per step and image on two idle cores, 32×32 pixels; a ConvNet's of width 8.
MILLISECONDS = {'mlp': 0.1, 'lenet': 0.5, 'lenet4': 0.8, 'convnet': 4.0}
# How often an attacker who knows a defense attacks one upload of it, where that is not once.
COUNTERS = {'graddefense': 23, 'soteria': 3, 'concealment': 3}


def minutes(experiment, scale):
  """Returns a rough estimate of the time on two cores."""
  return sum(run.scaled(scale).minutes() for run in experiment.runs.values())


def duration(minutes):
  """Returns a time in words, 'min', 'h' or 'd'."""
  return (
    f'{minutes:.0f} min' if minutes < 90 else f'{minutes / 60:.0f} h' if minutes < 2880 else f'{minutes / 1440:.0f} d'
  )
