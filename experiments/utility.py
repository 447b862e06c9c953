"""Federated trainings as in the papers: the accuracy of the model under each defense, and its cost."""

import dataclasses
import functools
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

import jax
import numpy as np
import optax

import gradleak as gl
from experiments.comparison import ACCURACIES, NORMAL, ONE_TRAINING, Cell, Outcome, left_open
from experiments.experiment import duration
from experiments.rehearsal import Ledger
from experiments.started import brought
from experiments.study import Study
from gradleak import defenses, registry
from gradleak.core.promotion import promoting
from gradleak.core.statistics import MIN_RUNS, difference_of_means, mean_interval
from gradleak.core.storage import computed_once, folder_name, json_lines, plain, write_atomically
from gradleak.data import Dataset, partition
from gradleak.defenses import Context, Defense
from gradleak.defenses.compensation import compensation
from gradleak.defenses.differential_privacy import epsilon
from gradleak.engine import progress
from gradleak.federated import Client, simulation, training
from gradleak.federated.chance import at_chance
from gradleak.federated.client import NO_DEFENSE
from gradleak.federated.scenario import fingerprint
from gradleak.report.training import curves as accuracy_curves
from gradleak.studies.frontier import Trained

BUDGET = 8.0  # FFL's ε, after Geyer et al.
RELATION = 'add or remove one'  # of that ε: a client takes part or does not
METRICS = (
  'accuracy', 'sensitive_accuracy', 'accuracy_share', 'overhead', 'clipping_overhead', 'round_seconds',
  'train_seconds', 'defense_seconds', 'parameters', 'share_sent', 'total_parameters', 'epsilon',
)  # fmt: skip

CHANCE = ('majority_share', 'predicted_classes')  # columns of measured rounds that `federated.chance` judges by
# Metric -> keys of a row: the number of samples that were classified correctly, and of all samples.
SCORES = {'accuracy': ('correct', 'tested'), 'sensitive_accuracy': ('sensitive_correct', 'sensitive')}
# Dataset -> number of its classes; 10 elsewhere. Among the 37 classes of letters, 26 occur.
CLASSES = {'cifar100': 100, 'emnist/balanced': 47, 'emnist/letters': 26, 'folder:data/faces32': 2}


@dataclasses.dataclass(frozen=True)
class Protocol:
  """Who trains, and how; fields are named as the flags of `launch/train.py`.

  Attributes:
    clients, per_round: number of clients, and of those that are drawn for a round.
    partition: as in `gradleak.data.partition.parse`.
    rounds: of training.
    local_epochs, local_batch_size, learning_rate: of local training by SGD; the delta is shared.
    weighting: of the uploads, as in `simulation.Federation`.
    momentum, weight_decay: of local training; momentum starts anew in each round, see `Trainings.carried`.
  """

  clients: int
  per_round: int
  partition: str
  rounds: int
  local_epochs: int
  local_batch_size: int
  learning_rate: float
  weighting: str = 'samples'
  momentum: float = 0.0
  weight_decay: float = 0.0


HALF = 'classes(number=5)'  # of ten classes, see `protocol_on`
# FFL: local epochs and learning rate are not stated.
FFL = Protocol(100, 10, HALF, 2000, 1, 50, 0.1)
# GradDefense on MNIST and Fashion-MNIST takes a step for each sample (its “local batch size is 1~20”, see its choices).
GRADDEFENSE = Protocol(100, 10, 'classes(number=2,low=1,high=10)', 200, 2, 1, 0.01, 'equal')
GRADDEFENSE_CIFAR10 = Protocol(1000, 200, 'classes(number=2,low=1,high=20)', 2000, 2, 1, 0.01, 'equal')
# OUTPOST on CIFAR-10; how its data are “non-i.i.d.” is not stated.
OUTPOST = Protocol(100, 10, HALF, 150, 5, 32, 0.01)
OUTPOST_EMNIST = dataclasses.replace(OUTPOST, rounds=100)
# DCS²: of its scripts, on MNIST; of a client's 200 samples three batches of 64 are used in an epoch, 31 of 2,000.
DCS2 = Protocol(10, 10, 'iid(samples=192)', 200, 1, 64, 0.01, momentum=0.9)
DCS2_CIFAR10 = dataclasses.replace(DCS2, partition='iid(samples=1984)', rounds=50, weight_decay=1e-3)
PROTOCOLS = {
  'dcs2': DCS2,
  'dcs2_cifar10': DCS2_CIFAR10,
  'ffl': FFL,
  'graddefense': GRADDEFENSE,
  'graddefense_cifar10': GRADDEFENSE_CIFAR10,
  'outpost': OUTPOST,
  'outpost_emnist': OUTPOST_EMNIST,
}


def protocol_on(name: str, classes: int) -> Protocol:
  """Returns a protocol of `PROTOCOLS` on data of so many classes: clients of FFL and OUTPOST have half of them."""
  found = PROTOCOLS[name]
  number = -(-classes // 2)
  return dataclasses.replace(found, partition=f'classes(number={number})') if found.partition == HALF else found


class Method(NamedTuple):
  """The defenses of clients and server.

  Attributes:
    clients: the clients' defense, a text as in the programs.
    q: Q of GradDefense's compensation at the server, for the noise of the clients' `graddefense`; None: without.
    delta: δ of Geyer's mechanism at the server, with the noise that spends ε = 8 in all rounds; None: without.
    scale: factor of that noise, which then spends another ε.
    layout, memory: of the compensation.
  """

  clients: str = 'none'
  q: int | None = None
  delta: float | None = None
  layout: str = 'columns'
  memory: bool = False
  scale: float = 1.0

  later = ('scale',)

  def __str__(self) -> str:
    given = f'q={self.q},layout={self.layout}' + (',memory=True' if self.memory else '')
    scaled = '' if self.scale == 1 else f',scale={self.scale}'
    server = {'compensation': self.q and given, 'client_dp': self.delta and f'delta={self.delta}{scaled}'}
    return self.clients + ''.join(f' & {name}({given}) at the server' for name, given in server.items() if given)


UNDEFENDED = Method()
EVALUATIONS = 5  # of a training
SPENT = 5.0  # seconds of measuring rounds with and without a defense, roughly
REPEATS = 5  # of that at least


@functools.cache  # one object, so that the server's step is compiled once
def server(decay: float, drop: int, momentum: float) -> optax.GradientTransformation:
  """Returns FedAvg's optimizer on the mean delta, which is multiplied as `Trainings.decay` and `drop` say."""
  if decay == 1 and not drop and not momentum:
    return optax.sgd(1.0)
  rates = [optax.exponential_decay(rate, 1, decay) for rate in ((1.0, 0.1) if drop else (1.0,))]
  return promoting(optax.sgd(optax.join_schedules(rates, [drop]) if drop else rates[0], momentum or None))


def carried(momentum: float, steps: int) -> float:
  """Returns the server's momentum with which gradients move the model as far as if clients kept theirs between rounds.

  A gradient then moves it by rate / (1 − momentum) in all. With a momentum that starts anew, the k-th step from the end
  of a round moves it by the share 1 − momentum^k of that.
  """
  return float(np.mean(momentum ** np.arange(1, steps + 1)))


class Data(NamedTuple):
  """What is trained on, what the model is tested on, public (samples, targets), the published shape of a sample."""

  samples: Dataset
  tested: Dataset
  public: tuple[np.ndarray, np.ndarray] | None
  shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Trainings(Study):
  """One training under each method.

  Attributes:
    dataset: as in `gradleak.data.load`.
    model, init: as in `gradleak.models.create`.
    defenses: label -> `Method`.
    protocol: the `Protocol`.
    samples: number of samples of all clients together, the first ones of the train split.
    tested: number of samples that the model is tested on, the first ones of the test split.
    batch_norm: as in `gradleak.scenario`.
    public: number of public samples, the next ones of the train split.
    starts: a dataset that the public samples are of, see `started.brought`; '' takes them of `dataset`.
    image_size: the side in pixels to which all images are resized; None keeps theirs.
    sensitive: number of samples of the first client, which is then the only one with a defense; 0: all clients have
      the defense, and the samples of the partition.
    decay: factor of the learning rate from round to round; the server multiplies the mean delta by it.
    drop: the round in which the rate falls to a tenth, and its decay begins anew; 0: never.
    carried: momentum of the server, in place of what clients keep of theirs from round to round, see `carried`.
    timed: whether seconds of a round are measured.
    seeds: number of trainings under each method, with consecutive seeds; fewer than three give no interval.
    extrapolated: labels under which training would take too long: one local step is timed instead.
    published: the published model, which this one replaces at a smaller scale; its parameters are counted.
  """

  dataset: str
  model: str
  defenses: Mapping[str, Method]
  protocol: Protocol
  samples: int
  tested: int = 10_000
  init: str = 'default'
  batch_norm: str = 'train'
  public: int = 0
  starts: str = ''
  image_size: int | None = None
  sensitive: int = 0
  decay: float = 1.0
  drop: int = 0
  carried: float = 0.0
  timed: bool = True
  seeds: int = 1
  extrapolated: tuple[str, ...] = ()
  published: str = ''

  inner: ClassVar[tuple[str, ...]] = ('protocol',)
  untold: ClassVar[tuple[str, ...]] = (*Study.untold, 'published')
  apart: ClassVar[tuple[str, ...]] = (*Study.apart, 'timed', 'seeds', 'extrapolated', 'published')
  kind: ClassVar[str] = 'trainings'
  shown: ClassVar[str] = 'curves'
  page: ClassVar[str] = 'accuracy.png'
  remarks: ClassVar[str] = 'against none'
  intervals: ClassVar[str] = (
    'Ours: accuracy of the last model on test samples, mean over seeds ± half its 95 % interval. Fewer than three '
    'seeds have none, and leave 10 points of accuracy to either side open. “Against none” is the difference to the '
    'undefended model of the same seed. '
    'Seconds are medians of warm rounds with and without the defense in turn. What “none” adds is noise, which stands '
    'behind ± at the others.'
  )

  def small(self) -> Mapping[str, object]:
    """Returns what scale 'mini' replaces, beside the model that is counted."""
    return {'published': self.model, **self.mini}

  def smallest(self) -> dict[str, object]:
    """Returns what makes this a training on 8×8 digits and a dense net, of 2 rounds."""
    partition = 'classes(number=2,low=2,high=6)'
    return {
      **{name: self.mini.get(name, getattr(self, name)) for name in ('defenses', 'extrapolated')},
      'dataset': 'digits',
      'model': 'mlp',
      'protocol': {'clients': 4, 'per_round': 2, 'partition': partition, 'rounds': 2, 'local_epochs': 1},
      'samples': 200,
      'tested': 50,
      'public': min(self.public, 8),
      'starts': self.starts and 'faces',
      'sensitive': min(self.sensitive, 4),
    }

  def described(self) -> dict[str, object]:
    """Returns name -> value of all settings."""
    return {**super().described(), 'extrapolated': ', '.join(self.extrapolated) or 'nothing'}

  def load(self, data_dir: str | None) -> Data:
    """Returns the `Data`."""
    own = 0 if self.starts else self.public
    load = functools.partial(gl.data.load, self.dataset, data_dir=data_dir)
    held = load('train', limit=self.samples + own, image_size=self.image_size)
    tested = load('test', limit=self.tested, image_size=self.image_size)
    public = (held.samples[self.samples :], held.targets[self.samples :]) if own else None
    if self.starts:
      public = brought(self.starts, self.public, held, data_dir)
    private = held._replace(samples=held.samples[: self.samples], targets=held.targets[: self.samples])
    published = held if self.image_size is None else load('train', limit=1)
    return Data(private, tested, public, published.samples.shape[1:])

  def execute(self, data: Data, seed: int, *, workdir: str, progress: str = 'auto') -> list[dict]:
    """Trains under each method and seed in a folder of its own, or resumes; writes the curves of the first seed.

    Returns:
      A row per method and seed. Seconds are of the first seed.
    """
    rows, trained_under = [], {}
    for number in range(self.seeds):
      setting, first = prepare(self, data, seed + number), number == 0
      for index, (label, method) in enumerate(self.defenses.items()):
        if label in self.extrapolated and not first:
          continue
        folder = os.path.join(workdir, folder_name(index, label) + ('' if first else f'-seed-{seed + number}'))
        trained = federation(self, setting, method)  # one object, so that it is compiled once
        if label in self.extrapolated:
          row = {'extrapolated': True}
        else:
          curve, row = _trained(self, setting, data, method, trained, seed + number, folder, progress)
          trained_under.setdefault(label, curve)
        if self.timed and first:
          seconds = functools.partial(_seconds, self, setting, trained, label in self.extrapolated)
          row |= computed_once(os.path.join(folder, 'seconds.json'), seconds)
        rows.append({'defense': label, 'text': str(method), 'seed': seed + number, **row})
    write_atomically(os.path.join(workdir, 'methods.jsonl'), json_lines(rows))
    write_atomically(os.path.join(workdir, self.page), accuracy_curves(trained_under))
    return rows

  def rehearse(self, data_dir: str | None, ledger: Ledger) -> None:
    """Runs every program of one round under each method. What is extrapolated counts as far as it is timed."""
    setting = prepare(self, data := self.load(data_dir), 0)

    def round_of(one: simulation.Federation) -> simulation.State:
      return simulation.run_round(one, simulation.start(one, setting.variables), setting.key)[0]

    for label, method in self.defenses.items():
      trained, apart = federation(self, setting, method), label in self.extrapolated
      turns = 0 if apart else self.seeds * self.protocol.rounds
      ledger.lanes += turns * self.protocol.per_round
      if not apart:
        with ledger.times(turns):
          state = round_of(trained)
        with ledger.times(self.seeds * EVALUATIONS):
          simulation.accuracy(setting.client.model, state.variables, data.tested.samples, data.tested.targets)
      for one, repeats in _timed(self, setting, trained, apart) if self.timed else ():
        with ledger.times(1 + repeats):  # the first compiles
          round_of(training.bare(one))
          round_of(one)

  def outcome(self, cell: Cell, rows: list[dict]) -> Outcome:
    """Returns the `Outcome` of a cell among the rows of its run."""
    own = [row for row in rows if row['defense'] == cell.defense]
    row, diverged = own[0], sum(bool(one.get('diverged')) for one in own)
    if row.get('extrapolated'):
      whole = duration(row['round_seconds'] * self.protocol.rounds)
      remark = f'not trained: seconds extrapolated from one local step, all rounds would take {whole}'
      return Outcome(row.get(cell.metric), None, None, 0, None, 0, remark)
    remark = 'diverged' if diverged else 'at chance' if any(map(self._at_chance, own)) else ''
    if cell.metric == 'clipping_overhead':
      bound, whole = (row['text'].partition('+')[index] for index in (0, 2))
      timed = [one for one in rows if one['text'] == whole and 'round_seconds' in one]  # under the first seed
      (other,) = timed if bound.startswith('clip_samples(') else ()
      row = {**row, cell.metric: 100 * (row['round_seconds'] / other['round_seconds'] - 1)}
    bare = [one for one in rows if self.defenses.get(one['defense']) == UNDEFENDED]
    if cell.metric not in ACCURACIES:
      value = row.get(cell.metric)
      measured = bare if cell.metric in ('overhead', 'defense_seconds') else []
      noise = max((abs(one.get(cell.metric, 0.0)) for one in measured), default=0.0)
      ends = (value - noise, value + noise) if noise and value is not None and row not in bare else (None, None)
      return Outcome(value, *ends, row['tested'], None, diverged, remark)
    correct, tested = SCORES.get(cell.metric, SCORES['accuracy'])
    values, undefended = (
      {one.get('seed', 0): 100 * one[correct] / one[tested] for one in part} for part in (own, bare)
    )
    lost, ends = any(map(self._at_chance, bare)), None
    if cell.metric == 'accuracy_share':
      if bare and own != bare:
        ends = _share_of(statistics.fmean(values.values()), statistics.fmean(undefended.values()), row[tested])
      values = {} if lost else {seed: 100 * value / undefended[seed] for seed, value in values.items()}
    elif bare and own != bare:
      gained = [value - undefended[seed] for seed, value in values.items()]
      against = 'no conclusion: none is at chance' if lost else compared(gained)
      remark = against + (f', {remark}' if remark else '')
    mean, low, high = mean_interval(list(values.values())) if values else (None, None, None)
    if len(values) < MIN_RUNS:
      low = high = None
    given = {'trainings': len(values), 'failed': any(map(self._at_chance, own)), 'values': values, 'open': ends}
    return Outcome(mean, low, high, row[tested], None, diverged, remark, **given)

  def _at_chance(self, row: Mapping) -> bool:
    """Returns whether the model of a row is at chance; rows of earlier versions do not have the commonest class."""
    return bool(at_chance({**row, 'accuracy': row['correct'] / row['tested']}, CLASSES.get(self.dataset, 10)))

  def follows(self, cell: Cell) -> bool:
    """Returns whether a figure follows from the declaration, for any training.

    The noise of client-level privacy is chosen for its ε. Parameters are counted on the declared model, and an
    undefended client sends all of them.
    """
    whole = self.defenses[cell.defense] == UNDEFENDED
    return cell.metric in ('epsilon', 'total_parameters') or (
      whole and cell.metric in ('share_sent', 'accuracy_share', 'overhead', 'defense_seconds')
    )


def _share_of(accuracy: float, undefended: float, tested: int) -> tuple[float, float]:
  """Returns the ends of 100 · accuracy / undefended where both are of too few trainings, see `left_open`."""
  ours, bare = (left_open(each, tested) for each in (accuracy, undefended))
  most = 100 * (accuracy + ours) / (undefended - bare) if undefended > bare else math.inf
  return 100 * max(0.0, accuracy - ours) / (undefended + bare), most


class Setting(NamedTuple):
  """What is the same for all methods of a run.

  Attributes:
    client: the undefended `Client`.
    variables: the initial model's.
    parts: the partition.
    samples, targets: of all clients together.
    context: what defenses are made for.
    key: of the training.
    parameters, total_parameters: number of parameters of the model, and of the published one.
  """

  client: Client
  variables: dict
  parts: list[np.ndarray]
  samples: np.ndarray
  targets: np.ndarray
  context: Context
  key: jax.Array
  parameters: int
  total_parameters: int


def prepare(run: Trainings, data: Data, seed: int) -> Setting:
  """Returns the `Setting` of a run: the same weights, partition and draws of clients for all methods."""
  protocol, samples = run.protocol, data.samples
  keys = jax.random.split(jax.random.key(seed), 3)
  shape, model = samples.samples.shape[1:], gl.models.create(run.model, samples.num_classes, init=run.init)
  variables = jax.jit(model.init, static_argnums=1)(keys[0], shape)
  published = gl.models.create(run.published or run.model, samples.num_classes, init=run.init)
  parts = partition.parse(protocol.partition, keys[1], samples.targets, protocol.clients)
  if run.sensitive:
    parts[0] = parts[0][: run.sensitive]
  client = gl.ClientSettings(
    share='delta',
    local_epochs=protocol.local_epochs,
    local_batch_size=protocol.local_batch_size,
    learning_rate=protocol.learning_rate,
    batch_norm=run.batch_norm,
    momentum=protocol.momentum,
    weight_decay=protocol.weight_decay,
  ).client(model, samples.num_classes)
  return Setting(
    client,
    variables,
    parts,
    samples.samples,
    samples.targets,
    Context(client, variables, shape, data.public),
    keys[2],
    _count(variables['params']),
    _count(jax.eval_shape(lambda key: published.init(key, data.shape), keys[0])['params']),
  )


def _count(params):
  return sum(math.prod(x.shape) for x in jax.tree.leaves(params))


def federation(run: Trainings, setting: Setting, method: Method) -> simulation.Federation:
  """Returns the `simulation.Federation` of a run under a `Method`."""
  defense = registry.defense(method.clients)
  protocol, noise = run.protocol, 0.0
  if method.delta is not None:
    noise = method.scale * noise_for(BUDGET, method.delta, protocol.rounds, protocol.per_round / protocol.clients)
  return simulation.Federation(
    defenses.bind(defense, setting.context).client(setting.client),
    setting.samples,
    setting.targets,
    setting.parts,
    protocol.per_round,
    server=server(run.decay, run.drop, run.carried),
    chain=NO_DEFENSE if method.q is None else _compensation(defense, method),
    weighting=protocol.weighting,
    server_noise=noise,
    defended=(0,) if run.sensitive else None,
  )


def _compensation(defense: Defense, method: Method) -> Defense:
  """Returns the compensation of the noise that the clients' `graddefense` adds."""
  settings = next(stage.settings for stage in defense.stages if stage.name == 'graddefense')
  noise = {name: settings[name] for name in ('stddev', 'ratio', 'num_slices')}
  return compensation(q=method.q, layout=method.layout, memory=method.memory, **noise)


def noise_for(budget: float, delta: float, rounds: int, sampling_rate: float) -> float:
  """Returns the least noise multiplier, to 1 %, with which these rounds stay within a budget of ε."""
  low, high = 0.1, 100.0
  while high / low > 1.01:
    middle = math.sqrt(low * high)
    spent = epsilon(middle, RELATION, steps=rounds, sampling_rate=sampling_rate, delta=delta)
    low, high = (low, middle) if spent <= budget else (middle, high)
  return high


def _trained(run, setting, data, method, trained, seed, folder, mode):
  """Returns (`Trained`, row) of a training in its folder."""
  protocol = run.protocol
  config = {name: value for name, value in dataclasses.asdict(run).items() if name not in run.apart} | {
    'method': str(method),
    'seed': seed,
    'data_fingerprint': fingerprint((data.samples.samples, data.samples.targets)),
    'test_fingerprint': fingerprint((data.tested.samples, data.tested.targets)),
    **({} if data.public is None else {'public_fingerprint': fingerprint(data.public)}),
  }
  state, rounds = training.train(
    setting.key,
    trained,
    setting.variables,
    protocol.rounds,
    test=(data.tested.samples, data.tested.targets),
    evaluate_every=max(1, protocol.rounds // EVALUATIONS),
    workdir=folder,
    config=config,
    on_round=progress.rounds(mode, protocol.rounds),
  )
  rounds = plain(rounds)  # NaN is None, as after a resume
  last, answered = rounds[-1], max(1, sum(row['clients'] for row in rounds))
  # The bytes count parameters only, as in the papers, in float32. Rounds of older folders have no statistics among
  # their bytes.
  sent = sum(row['bytes_up'] - row.get('bytes_statistics', 0) for row in rounds) / answered / 4
  row = {
    'correct': round(last['accuracy'] * run.tested),
    **{name: last[name] for name in CHANCE if name in last},
    'tested': run.tested,
    'loss': last['loss'],
    'diverged': None in (last['loss'], last['update_norm']),
    'parameters': sent / 1e6,
    'share_sent': 100 * sent / setting.parameters,
    'total_parameters': setting.total_parameters / 1e6,
  }
  if run.sensitive:
    held = setting.parts[0]
    share, _ = simulation.accuracy(setting.client.model, state.variables, setting.samples[held], setting.targets[held])
    row |= {'sensitive_correct': round(share * len(held)), 'sensitive': len(held)}
  if method.delta is not None:
    rate = protocol.per_round / protocol.clients
    row['epsilon'] = epsilon(trained.server_noise, RELATION, steps=len(rounds), sampling_rate=rate, delta=method.delta)
  return Trained(rounds, training.seconds_of_a_round(folder)), row


def _timed(run, setting, whole, extrapolated):
  """Returns (`Federation`, the least number of measurements of a round) of all that `_seconds` times."""
  if not extrapolated:
    return [(whole, REPEATS)]
  size = min(run.protocol.local_batch_size, max(map(len, setting.parts)))
  one = dataclasses.replace(
    whole,
    client=dataclasses.replace(whole.client, epochs=1),
    partition=[max(setting.parts, key=len)[:size]],
    per_round=1,
  )
  return [(dataclasses.replace(whole, client=setting.client), REPEATS), (one, 2)]


def _seconds(run, setting, whole, extrapolated):
  """Returns the seconds of a round and those that the defense adds.

  If they are extrapolated, one client takes one step on one full batch. Its seconds are multiplied by the steps of a
  round, divided among the devices as `simulation` divides clients.
  """
  protocol = run.protocol
  start = setting.variables, setting.key
  (measured, repeats), *steps_of = _timed(run, setting, whole, extrapolated)
  without, added = training.seconds_split(measured, *start, repeats=repeats, seconds=SPENT)
  for one, repeats in steps_of:
    (batch,) = one.partition
    steps = np.mean([math.ceil(len(part) / len(batch)) for part in setting.parts]) * protocol.local_epochs
    turns = math.ceil(protocol.per_round / jax.local_device_count())
    added = training.seconds_split(one, *start, repeats=repeats, seconds=0)[1] * float(steps) * turns
  return {
    'train_seconds': without,
    'defense_seconds': added,
    'round_seconds': without + added,
    'overhead': 100 * added / without,
  }


def compared(differences: Sequence[float]) -> str:
  """Returns the mean of differences in accuracy in words: in points, and whether it is beyond noise.

  Args:
    differences: in points, of each seed; fewer than three are decided only beyond what two trainings leave open, and
      fewer than six that are equal are not decided.
  """
  points, low, high = difference_of_means(differences)
  if len(differences) < MIN_RUNS:
    known = 'beyond noise' if abs(points) > 2 * NORMAL * ONE_TRAINING else 'one training, undecided'
    return f'{points:+.1f}, {known}'.replace('-', '−')
  if math.isnan(low):
    return f'{points:+.1f} under each seed, undecided'.replace('-', '−')
  words = 'within noise' if low <= 0 <= high else 'beyond noise'
  return f'{points:+.1f} ({low:+.1f} to {high:+.1f}), {words}'.replace('-', '−')
