"""A table of a paper as data: the settings to rerun it, and the paper's numbers to compare with ours.

An `Experiment` holds `Run`s, one audit each, with the settings that the paper states. It also holds `Cell`s, which say
which figure of which run is compared with which number. A scale reduces the published settings to what a machine can
run; what it changed is stated wherever its numbers are shown.
"""

import collections
import dataclasses
import functools
import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import jax
import numpy as np
import optax

import gradleak as gl
from experiments.comparison import BEST, Cell, Note, Outcome
from experiments.rehearsal import Ledger
from experiments.study import Study, mean_of
from gradleak import AuditResult, AuditSettings, ClientSettings, registry, report
from gradleak.attacks import AttackMethod
from gradleak.audit import lanes
from gradleak.audit import verdict as verdicts
from gradleak.audit.group import Group
from gradleak.audit.plan import plan
from gradleak.audit.uploads import Uploads, uploads
from gradleak.audit.views import views
from gradleak.core import errors, grammar
from gradleak.core.locks import alone
from gradleak.core.statistics import MIN_RUNS, percent
from gradleak.core.storage import Workdir, computed_once, plain
from gradleak.data import Dataset
from gradleak.defenses import Defense
from gradleak.defenses.defense import remarks
from gradleak.engine.progress import computing, reporter
from gradleak.federated import simulation
from gradleak.federated.chance import at_chance, majority_share
from gradleak.federated.earlier import earlier
from gradleak.federated.scenario import fingerprint
from gradleak.models import torch_weights
from gradleak.report.page import is_current

SMALLEST = {'steps': 3, 'latent_steps': 1, 'training_steps': 20}  # settings of attacks at scale 'smoke'
COPIES, ROOM = 3, 8 * 2**30  # of an upload at a time: sent, seen by an attacker, placed; bytes for those of one part
NON_ADAPTIVE = AuditSettings(knowledge='non-adaptive')
UNTRAINED = 'untrained network'
# Columns of an audit's rows that are stored beside a cell's own metric: those that its outcome is computed from, and
# the verdict.
COLUMNS = ('defense', 'adaptive', 'trial', 'psnr', 'control_psnr', 'success', 'diverged', 'network', 'verdict')


@dataclasses.dataclass(frozen=True)
class Training:
  """A federated training on other data: it gives the model that is attacked, and the one sent before it.

  In each round, the clients drawn share their updates on all their samples. The server takes the mean of each entry
  over the clients that sent it. It ends when the model has the `accuracy` on held-out samples, or after `rounds`.

  Attributes:
    rounds: number of rounds at most.
    clients: number of clients.
    samples: samples of each, from the train split.
    rate: the server's learning rate on the mean gradient.
    defense: the clients' defense, a text.
    share: of the clients that is drawn for a round.
    accuracy: in %, of the network that is to be attacked; a network below it is not called trained.
    tested: number of held-out samples, the next ones of the train split; 0 measures no accuracy.
    client: settings of `ClientSettings` in which the clients that train differ from the attacked one.
    evaluated: rounds from one evaluation to the next.
  """

  rounds: int = 20
  clients: int = 10
  samples: int = 50
  rate: float = 0.1
  defense: str = 'none'
  share: float = 1.0
  accuracy: float = 100.0
  tested: int = 0
  client: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  evaluated: int = 10

  @property
  def held(self) -> int:
    """Number of samples that it needs."""
    return self.clients * self.samples + self.tested


@dataclasses.dataclass(frozen=True)
class Run(Study):
  """One audit.

  Attributes:
    dataset: as in `gradleak.data.load`; private images are the first ones of its test split.
    model, init: as in `gradleak.models.create`.
    attack: a text, as in the programs.
    defenses: label -> text.
    trials: number of trials.
    settings: of the audit.
    client: settings of the client.
    public: number of public images, from the train split.
    bias: fraction of the public images that is drawn from one class, the rest evenly from the others; None takes the
      first ones.
    training: how the attacked model was trained, its BatchNorm in train mode; None attacks it untrained.
    weights: a file of weights with PyTorch's names, in place of that training; '' trains.
    image_size: the side in pixels to which all images are resized; None keeps theirs.
    changed: name of an attack or defense -> its settings that replace those in its text; a function is given the value
      in the text.
  """

  dataset: str
  model: str
  attack: str
  defenses: Mapping[str, str]
  trials: int
  settings: AuditSettings = NON_ADAPTIVE
  client: ClientSettings = ClientSettings()  # noqa: RUF009 (it is frozen)
  init: str = 'default'
  public: int = 0
  bias: float | None = None
  training: Training | None = None
  weights: str = ''
  image_size: int | None = None
  changed: Mapping[str, Mapping] = dataclasses.field(default_factory=dict)

  inner: ClassVar[tuple[str, ...]] = ('settings', 'client')
  untold: ClassVar[tuple[str, ...]] = (*Study.untold, 'changed', 'training')
  apart: ClassVar[tuple[str, ...]] = (*Study.apart, 'changed', 'trials')  # what `changed` changes is in the texts
  kind: ClassVar[str] = 'audit'
  shown: ClassVar[str] = 'report'
  page: ClassVar[str] = 'report.html'
  pictured: ClassVar[str] = 'grid.png'
  more: ClassVar[str] = ''  # file of more columns of the rows, see `columns`
  remarks: ClassVar[str] = 'recovered'
  intervals: ClassVar[str] = (
    'Ours: mean over trials ± half its 95 % interval. “Recovered” counts trials with a picture: exact or recognisable.'
  )

  def small(self) -> Mapping[str, Any]:
    """Returns what scale 'mini' replaces; given weights keep the network."""
    kept = {'model', 'training'} if self.weights and self.trains else set()
    return {name: value for name, value in self.mini.items() if name not in kept}

  def smallest(self) -> dict[str, Any]:
    """Returns what makes this an audit of 8×8 digits and a dense net, in 3 steps."""
    attack = registry.attack(self.attack)
    steps = {name: value for name, value in SMALLEST.items() if attack.takes({name: value})}
    if attack.settings.get('batch_norm') is not None:
      steps['batch_norm'] = None  # a dense network has none
    few = {'batch_size': self.settings.batch_size, 'cohort': self.client.cohort, 'restarts': self.settings.restarts}
    return {
      **{name: min(value, 2) for name, value in few.items()},
      'dataset': 'digits',
      'model': 'mlp',  # compiles fast
      'trials': 2,
      'controls': 2,
      'public': min(self.public, 16),
      'training': self.training and _smoke_training(self.training),
      'weights': '',
      'changed': {attack.name: steps, 'concealment': {'steps': 2}, 'graddefense': {'root': _smoke_root}},
    }

  def described(self) -> dict[str, Any]:
    """Returns name -> value of all settings, those of the training and of the texts of methods last."""
    training = vars(self.training) if self.training else {}
    specs = [s for text in (self.attack_text(), *self.texts().values()) for s in grammar.parse_chain(text, 'method')]
    return {
      **super().described(),
      **{f'training {name}': value for name, value in training.items()},
      **{f'{spec.name} {name}': value for spec in specs for name, value in spec.settings},
    }

  def changes(self, scale: str) -> list[str]:
    """Returns what a scale changes; of given weights which these are."""
    changed = super().changes(scale)
    if not (self.weights and self.trains):
      return changed
    changed = [text for text in changed if not text.startswith(('trained ', 'training', 'weights '))]
    return [*changed, f'the trained model is {os.path.basename(self.weights)}, not trained here']

  @property
  def trains(self) -> bool:
    """Whether the attacked model is a trained one."""
    return self.training is not None

  def texts(self) -> dict[str, str]:
    """Returns the defenses' canonical texts by label, with the changed settings."""
    return {
      label: '+'.join(str(_rewritten(spec, self.changed)) for spec in _chain(text, 'defense'))
      for label, text in self.defenses.items()
    }

  def attack_text(self) -> str:
    """Returns the attack's text, with the changed settings."""
    return str(_rewritten(grammar.spec(self.attack, 'attack'), self.changed))

  def method(self) -> AttackMethod:
    """Returns the attack."""
    return registry.attack(self.attack_text())

  def load(self, data_dir: str | None) -> 'Data':
    """Returns the `Data`: private images from 'test', public ones and those trained on from 'train'."""
    limit = self.trials * self.settings.batch_size
    # The train split is not held out from weights of unknown training.
    tested = self.training.tested if self.training and self.weights else 0
    options = {'data_dir': data_dir, 'image_size': self.image_size}
    private = gl.data.load(self.dataset, 'test', limit=limit + tested, **options)
    others = (private.samples[limit:], private.targets[limit:]) if tested else None
    private = private._replace(samples=private.samples[:limit], targets=private.targets[:limit])
    gallery = gl.data.gallery(self.dataset, 'test', **options)
    trained = self.training.held if self.training and not self.weights else 0
    # A class may be rare among the first images: enough are read to fill it.
    pool = self.public if self.bias is None else self.public * max(1, round(1.5 * private.num_classes * self.bias) + 1)
    if not pool + trained:
      return Data(private, None, others, gallery)
    train = gl.data.load(self.dataset, 'train', limit=pool + trained, **options)
    public = None
    if self.public:
      chosen = np.arange(self.public) if self.bias is None else biased(train.targets[:pool], self.public, self.bias)
      public = train.samples[chosen], train.targets[chosen]
    if trained:
      others = train.samples[pool:], train.targets[pool:]
    return Data(private, public, others, gallery)

  def execute(self, data: 'Data', seed: int, *, workdir: str, progress: str = 'auto') -> list[dict]:
    """Runs the audit in its own folder, or resumes it, and writes its report; returns its rows with all columns."""
    result = self.audit(data, seed, workdir=workdir, progress=progress)
    if not (result.resumed and is_current(workdir, self.page)):
      self.write(result, workdir)
    rows = result.rows
    if self.training is not None and self.training.tested:
      tested = data.others[1][-self.training.tested :]
      network = called(result.config['training'], result.config['num_classes'], tested)
      rows = [{**row, 'network': network} for row in rows]
    if not self.more:
      return rows
    path, compute = os.path.join(workdir, self.more), functools.partial(self.columns, data, seed, progress)
    found = computed_once(path, compute)
    if any(row['defense'] not in found for row in rows):  # of a folder to which defenses were added
      os.remove(path)
      found = computed_once(path, compute)
    return [{**row, **found[row['defense']][row['trial']]} for row in rows]

  def rehearse(self, data_dir: str | None, ledger: Ledger) -> None:
    """Runs every program for one trial and one control run; of an attack, its runs are counted."""
    rounds, small = self.briefly()
    small = small.replaced(trials=1, controls=1)
    data = small.load(data_dir)
    with ledger.times(rounds):
      scenario = small.scenario(data, 0)
    made = plan(jax.random.key(0), scenario, small.protections(scenario, data), [small.method()], 1, small.settings)
    together = ledger.group_size(scenario.variables, self.settings.batch_size)
    for group in made.groups:
      sent = self.rehearsed(group, ledger, together)
      seen = views(group, sent)
      whole = dataclasses.replace(group, num_trials=self.trials, settings=self.settings)
      for variants, few, many in zip(lanes.structures(group), lanes.planned(group), lanes.planned(whole), strict=True):
        table = lanes.table(group, seen, variants)
        runs = many.runs / few.runs
        ledger.lanes += many.runs
        held = runs * sum(x.nbytes for x in jax.tree.leaves((sent.sent, seen.stacked)))
        ledger.kept = max(ledger.kept, held / self.shards(scenario.variables))
        with ledger.times(runs, together):
          lanes.run(group, table, 1)
    if self.more:
      with ledger.times(self.trials):
        small.columns(data, 0)

  def rehearsed(self, group: Group, ledger: Ledger, together: float) -> Uploads:
    """Returns the uploads of one trial and one control run of a group; the ledger counts those of all."""
    one, controls = np.arange(1), self.settings.controls
    with ledger.times(self.trials - controls, together):  # below zero where there are more control runs
      uploads(group, one, one[:0], 1)
    with ledger.times(controls, together):  # each with those of a trial, which the first count leaves out
      return uploads(group, one, one, 1)

  def briefly(self) -> tuple[float, Self]:
    """Returns (how many rounds of training it has, the same with one of them)."""
    if self.training is None or self.weights:
      return 1, self
    return self.training.rounds, dataclasses.replace(self, training=dataclasses.replace(self.training, rounds=1))

  def columns(self, data: 'Data', seed: int, progress: str = 'none') -> dict[str, list[dict]]:
    """Returns text of a defense -> more columns of each trial, which are kept in the file `more`."""
    found: dict[str, list[dict]] = {}
    under, told = self.of_trials(data, seed), computing(reporter(progress), f'computing {self.more}')
    for text in self.texts().values():
      of_trial, found[text] = under(registry.defense(text)), []
      for trial in range(self.trials):
        found[text].append(of_trial(trial))
        told(trial + 1, self.trials, f'uploads under {text}')
    return found

  def of_trials(self, data: 'Data', seed: int) -> Callable[[Defense], Callable[[int], dict]]:
    """Returns defense -> trial -> the columns of its row beside those of an audit."""
    raise NotImplementedError

  def write(self, result: AuditResult, folder: str) -> None:
    """Writes the report of the audit."""
    report.write(result, folder)

  def audit(self, data: 'Data', seed: int, *, workdir: str, progress: str = 'auto') -> AuditResult:
    """Runs the audit in its own folder, or resumes it."""
    scenario = self.scenario(data, seed, os.path.dirname(workdir), progress)
    return gl.audit(
      jax.random.fold_in(jax.random.key(seed), 1),
      scenario,
      self.protections(scenario, data),
      [self.method()],
      self.trials,
      settings=self.settings,
      workdir=workdir,
      shards=self.shards(scenario.variables),
      progress=progress,
    )

  def shards(self, variables: Any) -> int:
    """Returns into how many parts the trials are cut, so that the uploads of one part fit into the host's memory."""
    upload = sum(x.nbytes for x in jax.tree.leaves(variables['params']))
    held = COPIES * upload * self.settings.rounds * (1 + len(self.defenses)) * self.trials
    return min(self.trials, max(1, math.ceil(held / ROOM)))

  def protections(self, scenario: gl.Scenario, data: 'Data') -> list[Defense]:
    """Returns the defenses."""
    del scenario, data
    return [registry.defense(text) for text in self.texts().values()]

  def scenario(self, data: 'Data', seed: int, folder: str | None = None, progress: str = 'none') -> gl.Scenario:
    """Returns the `Scenario`, its model initialised and trained.

    Runs that attack the same network train it once: it is kept in `folder`, if that is given.
    """
    key = jax.random.fold_in(jax.random.key(seed), 0)
    if self.training is None:
      return self.scenario_of(data, key=jax.random.fold_in(key, 0))
    if self.weights:
      return self._with_weights(jax.random.fold_in(key, 1), data)
    trains = self.replaced(batch_norm='train', **self.training.client)
    untrained = trains.scenario_of(data, key=jax.random.fold_in(key, 0))

    def trained() -> tuple[dict, dict, dict]:
      return train(jax.random.fold_in(key, 1), untrained, *data.others, self.training, progress)

    config = {
      'seed': seed,
      'model': self.model,
      'training': dataclasses.asdict(self.training),
      'client': trains.client.recorded(),
      'weights_fingerprint': untrained.settings['weights_fingerprint'],
      'data_fingerprint': fingerprint(data.others),
    }
    structure = jax.tree.structure(untrained.variables)
    variables, previous, reached = trained() if folder is None else kept(folder, config, structure, trained)
    return self.scenario_of(data, reached, variables=variables).trained(variables, previous)

  def _with_weights(self, key: jax.Array, data: 'Data') -> gl.Scenario:
    """Returns the `Scenario` with the weights of the file, and what accuracy they have.

    Where a defense compares the model with the one before, a round on images that are not attacked follows them.
    """
    model = gl.models.create(self.model, data.private.num_classes, init=self.init)
    variables = torch_weights.load(self.weights, model, data.private.samples.shape[1:])
    accuracy = None if data.others is None else simulation.accuracy(model, variables, *data.others)[0]
    reached = {} if accuracy is None else {'accuracy_reached': 100 * accuracy}
    made = self.scenario_of(data, {'weights': os.path.basename(self.weights), **reached}, variables=variables)
    first, later = made.context, dataclasses.replace(made.context, previous=made.variables)
    if all(remarks(one, first) == remarks(one, later) for one in self.protections(made, data)):
      return made
    if data.others is None:
      raise errors.UsageError('a defense compares the model with the one before, and no images are left to train on')
    return made.trained(*earlier(key, made.client, made.variables, *data.others))

  def scenario_of(self, data: 'Data', reached: Mapping | None = None, **given: Any) -> gl.Scenario:
    """Returns the `Scenario` with its `key` or its `variables`, and what training `reached`."""
    made = gl.scenario(
      gl.models.create(self.model, data.private.num_classes, init=self.init),
      data.private.samples,
      data.private.targets,
      dataset=self.dataset,
      client=self.client,
      public=data.public,
      gallery=data.gallery,
      **given,
    )
    training = self.training and {**dataclasses.asdict(self.training), **(reached or {})}
    return made.noted({'split': data.private.split, 'init': self.init, 'training': training})

  def rows_of(self, cell: Cell, rows: list[dict]) -> list[dict]:
    """Returns the rows of an audit that a cell is about.

    Raises:
      UsageError: if there are none: the declaration and the audit's rows do not fit.
    """
    defense = self.texts()[cell.defense]
    found = [row for row in rows if row['defense'] == defense]
    if cell.adaptive == BEST:
      found = strongest([row for row in found if row.get('adaptive') is not None])
    else:
      found = [row for row in found if row.get('adaptive') == cell.adaptive]
    if not found:
      raise errors.UsageError(f'no row of the run {cell.run} is about {defense!r}, adaptive attack {cell.adaptive}')
    return found

  def outcome(self, cell: Cell, rows: list[dict]) -> Outcome:
    """Returns the `Outcome` of a cell among the rows of its run."""
    rows = self.rows_of(cell, rows)
    values = [row.get(cell.metric) for row in rows]
    found = mean_of([math.nan if value is None else value for value in values], '')
    measured = {row['trial']: value for row, value in zip(rows, values, strict=True) if value is not None}
    control = next((row['control_psnr'] for row in rows if row.get('control_psnr') is not None), None)
    control = None if cell.metric.endswith('_normalised') else control  # it is in units of [0, 1]
    recovered, diverged = (sum(bool(row[key]) for row in rows) for key in ('success', 'diverged'))
    remark = f'{recovered} of {len(rows)}' + (f', {diverged} diverged' if diverged else '')
    remark += f'; {rows[0]["network"]}' if 'network' in rows[0] else ''
    if cell.adaptive == BEST:
      chosen = collections.Counter(row['adaptive'] for row in rows).most_common()
      remark += '; by ' + ', '.join(f'{adaptive} ({count})' for adaptive, count in chosen)
    untrained = rows[0].get('network', '').startswith(UNTRAINED)
    ends = found[1:3] if len(measured) >= MIN_RUNS else (None, None)
    untold = control, None, not recovered, untrained
    return Outcome(found.mean, *ends, len(rows), recovered, diverged, remark, *untold, values=measured)

  def stored(self, rows: list[dict], cells: Sequence[Cell]) -> list[dict]:
    """Returns the rows that these cells are about, with the columns that their outcomes are computed from."""
    columns = {*COLUMNS, *(cell.metric for cell in cells)}
    about = {id(row) for cell in cells for row in self.rows_of(cell, rows)}
    return [{name: row[name] for name in row if name in columns} for row in rows if id(row) in about]


@dataclasses.dataclass(frozen=True)
class Experiment:
  """A table or figure of a paper.

  Attributes:
    name: as in `launch/reproduce.py --experiment=…`.
    paper: authors, title, venue.
    table: which of its tables.
    shows: one sentence: the paper's claim.
    runs: what its numbers come from, by name: each a `Study`.
    cells: its numbers.
    metrics: one sentence: how the paper's figures are defined, compared with ours.
    choices: sentences on what the paper does not state, and what is used here.
    notes: on where ours and the paper's disagree, and why.
    readings: a line -> the lines beside it that read the paper otherwise where it is not clear.
  """

  name: str
  paper: str
  table: str
  shows: str
  runs: Mapping[str, Study]
  cells: tuple[Cell, ...]
  metrics: str
  choices: tuple[str, ...] = ()
  notes: tuple[Note, ...] = ()
  readings: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)


class Paper(NamedTuple):
  """What the tables of a paper have in common: its `paper`, `metrics` and `choices`, see `Experiment`."""

  paper: str
  metrics: str
  choices: tuple[str, ...] = ()

  def table(
    self, name: str, table: str, shows: str, runs: Mapping[str, Study], cells: Sequence[Cell], *choices: str, **own: Any
  ) -> Experiment:
    """Returns the `Experiment` of a table, which has more `choices`, and others of the common fields in `own`."""
    given = {'paper': self.paper, 'metrics': self.metrics, 'choices': (*self.choices, *choices), **own}
    return Experiment(name, table=table, shows=shows, runs=runs, cells=tuple(cells), **given)


def with_weights(experiment: Experiment, path: str) -> Experiment:
  """Returns the `Experiment` with a file of weights in place of the training that its runs would do.

  Raises:
    UsageError: if none of its runs takes weights.
  """
  takes = {name for name, run in experiment.runs.items() if getattr(run, 'trains', False)}
  if not takes:
    raise errors.UsageError(f'{experiment.name} attacks no model whose weights could be given')
  runs = {n: dataclasses.replace(run, weights=path) if n in takes else run for n, run in experiment.runs.items()}
  return dataclasses.replace(experiment, runs=runs)


def with_lpips(experiment: Experiment, backbone: str, weights: str | None, heads: str | None) -> Experiment:
  """Returns the `Experiment` with LPIPS computed where the paper prints it; arguments as in `AuditSettings`.

  Raises:
    UsageError: if the paper prints none.
  """
  prints_it = {cell.run for cell in experiment.cells if cell.metric == 'lpips'}
  if not prints_it:
    raise errors.UsageError(f'{experiment.name} has no LPIPS that its weights could be for')
  given = {'lpips_backbone': backbone, 'lpips_weights': weights, 'lpips_heads': heads}
  runs = {name: run.replaced(**given) if name in prints_it else run for name, run in experiment.runs.items()}
  files = ' and '.join(os.path.basename(path or '') for path in (weights, heads))
  choices = (*experiment.choices, f'Our LPIPS is by the backbone {backbone}, with the weights in {files}.')
  return dataclasses.replace(experiment, runs=runs, choices=choices)


def _smoke_training(training):
  """Returns a training of two rounds."""
  small = {'rounds': 2, 'clients': 2, 'samples': 4, 'share': 1.0, 'tested': min(training.tested, 20), 'client': {}}
  return dataclasses.replace(training, **small)


def _smoke_root(root):
  """Returns a small number of root images, different for 50, 100, …."""
  return max(2, root // 25)


_chain = functools.cache(grammar.parse_chain)  # every cell of a table asks for the texts of its run


def _rewritten(spec, settings):
  """Returns a `Spec` with the settings of its name replaced."""
  changed = dict(spec.settings)
  for key, value in settings.get(spec.name, {}).items():
    if not callable(value):
      changed[key] = value
    elif key in changed:
      changed[key] = value(changed[key])
  return spec._replace(settings=tuple(changed.items()))


class Data(NamedTuple):
  """The images of a run: private ones, public ones as (samples, targets) or None, and those that it trains on.

  `others` are (samples, targets) or None; a subclass of `Run` may hold something else there. `gallery` are the images
  among which the private ones are to be found.
  """

  private: Dataset
  public: tuple[np.ndarray, np.ndarray] | None
  others: Any
  gallery: gl.data.Candidates | None = None


def biased(labels: np.ndarray, count: int, bias: float) -> np.ndarray:
  """Returns the indices of `count` images, the share `bias` of class 0 and the others evenly from the other classes.

  This is GradDefense's "bias probability" of the root set: with ten classes, 0.1 is uniform.

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


def train(
  key: jax.Array,
  scenario: gl.Scenario,
  samples: np.ndarray,
  targets: np.ndarray,
  training: Training,
  progress: str = 'none',
) -> tuple[dict, dict, dict]:
  """Returns the variables after a federated training, those of one round before, and what it reached.

  Args:
    key: of the `simulation.Federation`.
    scenario: its client and model are trained.
    samples, targets: [clients · samples + tested, …] of the train split.
    training: the `Training`.
    progress: a line for each evaluation, unless 'none'.

  Returns:
    (variables, variables of one round before, {'rounds_done', and 'accuracy_reached' if any samples are held out}).
  """
  client, variables = scenario.client, scenario.variables
  context = gl.defenses.Context(client, variables, samples.shape[1:], scenario.public)
  count = training.clients * training.samples
  federation = simulation.Federation(
    gl.defenses.bind(registry.defense(training.defense), context).client(client),
    samples[:count],
    targets[:count],
    np.split(np.arange(count), training.clients),
    max(1, round(training.share * training.clients)),
    server=optax.sgd(training.rate if client.share == 'gradient' else 1.0),
  )
  held_out, accuracy = (samples[count:], targets[count:]), None
  for number, models in enumerate(simulation.along(federation, variables, key, training.rounds), 1):
    if training.tested and (number % training.evaluated == 0 or number == training.rounds):
      accuracy = simulation.accuracy(client.model, models[0], *held_out)[0]
      if progress != 'none':
        print(f'training of the network: round {number} of {training.rounds}, {percent(accuracy)} accurate', flush=True)
      if 100 * accuracy >= training.accuracy:
        break
  reached = {} if accuracy is None else {'accuracy_reached': 100 * accuracy}
  return *models, {'rounds_done': number, **reached}


def kept(
  folder: str, config: Mapping, structure: Any, train: Callable[[], tuple[dict, dict, dict]]
) -> tuple[dict, dict, dict]:
  """Returns what `train()` returned the first time for these settings; it is kept in a folder within `folder`.

  Args:
    folder: of the experiment.
    config: what the training depends on, plain JSON.
    structure: of the variables, a treedef.
    train: returns (variables, those before, what was reached), as the function of that name.
  """
  digest = hashlib.sha256(json.dumps(plain(dict(config)), sort_keys=True).encode()).hexdigest()[:8]
  place = os.path.join(folder, f'trained-{digest}')
  with alone(place, wait=True):  # another run may train it for both
    store = Workdir(place, config, {})
    found = store.load_part('network')
    if found is None:
      *both, reached = train()
      arrays = {f'{number:04}': np.asarray(leaf) for number, leaf in enumerate(jax.tree.leaves(both))}
      store.save_part('network', [reached], arrays)
      return *both, reached
  (reached,), arrays = found
  leaves = [arrays[name] for name in sorted(arrays)]
  half = structure.num_leaves
  after, before = (jax.tree.unflatten(structure, part) for part in (leaves[:half], leaves[half:]))
  return after, before, reached


def called(training: Mapping | None, num_classes: int, targets: np.ndarray | None = None) -> str:
  """Returns what the network that was attacked is called; '' where no accuracy was measured.

  It is 'trained' only with the accuracy that its `Training` states, and 'untrained' where it is at chance, see
  `federated.chance`.

  Args:
    training: the settings of its `Training`, and what that reached.
    num_classes: number of classes.
    targets: classes of the samples that it was tested on, of which the commonest one is chance; None where they are not
      known.
  """
  if not training or 'accuracy_reached' not in training:
    return ''
  found = training['accuracy_reached']
  row = {'accuracy': found / 100, 'tested': training['tested']}
  if targets is not None:
    row['majority_share'] = majority_share(targets)
  origin = f'after {training["rounds_done"]} rounds' if 'rounds_done' in training else f'with {training["weights"]}'
  told = f'{found:.1f} % accurate {origin}'
  if found >= training['accuracy']:
    return f'trained network, {told}'
  return f'{UNTRAINED}, {told}' if at_chance(row, num_classes) else f'network {told}'


def strongest(rows: list[dict]) -> list[dict]:
  """Returns of each trial the row of the highest level, see `verdicts.judge`; of several that with the highest PSNR."""

  def strength(row: dict) -> tuple[int, float]:
    psnr = -math.inf if row['psnr'] is None else row['psnr']
    levels = verdicts.LEVELS
    return -(levels.index(row['verdict']) if row['verdict'] in levels else len(levels)), psnr

  trials = dict.fromkeys(row['trial'] for row in rows)
  return [max((row for row in rows if row['trial'] == trial), key=strength) for trial in trials]


def gains(cell: Cell, rows: Mapping[str, list[dict]]) -> list[dict]:
  """Returns the rows of a cell's run; with those of the run `minus`, 'psnr_gain' is a trial's PSNR less that one's.

  'over_control' is a trial's PSNR less that of the control pool; None where there is none for it.
  """
  found = rows[cell.run]

  def less(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one - other

  if cell.metric == 'over_control':
    return [{**row, 'over_control': less(row['psnr'], row['control_psnr'])} for row in found]
  if cell.minus is None:
    return found
  before = {(row['defense'], row['adaptive'], row['trial']): row['psnr'] for row in rows[cell.minus]}
  pairs = [(row, row['psnr'], before[row['defense'], row['adaptive'], row['trial']]) for row in found]
  return [{**row, 'psnr_gain': less(now, old)} for row, now, old in pairs]


def duration(seconds: float) -> str:
  """Returns a time in words, in 's', 'min', 'h' or 'd'."""
  for unit, size, limit in (('s', 1, 60), ('min', 60, 90 * 60), ('h', 3600, 48 * 3600)):
    if seconds < limit:
      return f'{seconds / size:.0f} {unit}'
  return f'{seconds / 86400:.0f} d'
