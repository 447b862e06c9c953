"""What a defense costs beside what it hides: federated training under each defense, and attacks on its uploads."""

import dataclasses
import functools
import itertools
import json
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from gradleak import data
from gradleak.attacks.base import as_attack
from gradleak.audit import AuditResult, AuditSettings, audit, plan
from gradleak.audit.labelled import Labelled, labelled, listed, named_defenses, text
from gradleak.audit.result import facts
from gradleak.core import errors
from gradleak.core.settings import check, paired, setting
from gradleak.core.storage import (
  check_sealed,
  computed_once,
  damaged,
  description,
  folder_name,
  gathering,
  json_lines,
  read_json,
  read_json_lines,
  seal,
  write_atomically,
)
from gradleak.data import partition
from gradleak.defenses import Bound, bind
from gradleak.defenses.defense import check_mean
from gradleak.defenses.differential_privacy import Epsilon
from gradleak.engine.execution import Execution
from gradleak.engine.progress import rounds as reporter
from gradleak.federated import accounting, simulation, training
from gradleak.federated.scenario import Scenario, fingerprint
from gradleak.federated.targets import CLASSES
from gradleak.models.model import outputs_shape

Samples = tuple[np.ndarray, np.ndarray]
SERVERS: dict[str, Callable[['FrontierSettings'], optax.GradientTransformation]] = {
  'sgd': lambda given: optax.sgd(given.server_rate, given.server_momentum or None),
  'adam': lambda given: optax.adam(given.server_rate, eps=given.server_tau),
}
_RATES = {'sgd': 1.0, 'adam': 0.1}  # by default; a step of Adam moves each weight by about its rate
_OF_ONE_SERVER = {'server_momentum': 'sgd', 'server_tau': 'adam'}
WRONG, LENGTHS = 'wrong.json', 'lengths.json'  # in the folder of a training: see `Trained`
LEAKAGE = 'leakage.jsonl'  # likewise: what attacks after rounds found
RESULT = 'result.json'  # likewise: seals what stands beside it, once the training is done
TRAININGS = 'trainings.json'  # in the work directory, once all are finished: label of the defense -> its folder
MEASUREMENTS = 50  # on the test split, at least, of a training of more rounds: they may take longer than the training
_ANEW = 'restore it, or remove the folder to train anew'  # advice on a damaged file of a training
_TRAINING: dict[str, Any] = {'group': 'training'}
_SERVER: dict[str, Any] = {'group': 'server'}
_ATTACKS: dict[str, Any] = {'group': 'attacks'}
_COUNT: dict[str, Any] = {'low': 1, 'integer': True}


@dataclasses.dataclass(frozen=True)
class FrontierSettings:
  """How a federation is trained and attacked; each is an argument of `frontier` and a flag of launch/train.py."""

  rounds: int = setting(100, 'Rounds of training.', **_TRAINING, **_COUNT)
  per_round: int = setting(10, 'Clients that are drawn for a round.', **_TRAINING, **_COUNT)
  drop_out: float = setting(0.0, 'Probability that a drawn client does not answer.', **_TRAINING, low=0, high=1)
  weighting: str = setting(
    'samples', 'How much an upload counts: samples or equal.', **_TRAINING, choices=simulation.WEIGHTINGS
  )
  evaluate_every: int | None = setting(
    None,
    'Rounds between two measurements on the test split; a fiftieth of all by default.',
    **_TRAINING,
    **_COUNT,
  )
  server: str = setting(
    'sgd',
    "The server's optimizer: sgd or adam: FedAdam with Adam's β (0.9, 0.999) and correction of the bias; "
    'Reddi et al. (2021) have 0.99 and no correction.',
    **_SERVER,
    choices=tuple(SERVERS),
  )
  server_learning_rate: float | None = setting(
    None, 'Its learning rate; 1 of sgd and 0.1 of adam by default.', **_SERVER, low=1e-12, finite=True
  )
  server_momentum: float = setting(0.0, 'Its momentum, of sgd.', **_SERVER, low=0, high=1)
  server_tau: float = setting(
    1e-3,
    'Its τ, of adam, beside the root of the second moment (Reddi et al. 2021): gradients below it move little.',
    **_SERVER,
    low=1e-12,
    finite=True,
  )
  server_noise: float = setting(
    0.0,
    "Noise multiplier of Geyer's mechanism at the server, which clips at the median norm.",
    **_SERVER,
    low=0,
    finite=True,
  )
  budget: float | None = setting(
    None,
    'Training stops before the round that would spend more than this ε, in the relation that is printed beside it.',
    **_SERVER,
    low=1e-12,
    finite=True,
  )
  delta: float = setting(1e-5, 'δ of every ε.', **_SERVER, low=1e-300, high=1 - 1e-12)
  attack_every: int = setting(
    0, 'Rounds between two attacks; 0: before the first alone.', **_ATTACKS, low=0, integer=True
  )
  trials: int = setting(4, 'Samples that are attacked under each defense.', **_ATTACKS, **_COUNT)
  controls: int = setting(32, 'Null-gradient runs per attack that define success.', **_ATTACKS, **_COUNT)
  steps: int | None = setting(1000, 'Steps of searches that do not set their own.', **_ATTACKS, **_COUNT)

  @property
  def server_rate(self) -> float:
    """The learning rate of the server, given or by default."""
    return self.server_learning_rate or _RATES[self.server]


_UNATTACKED = {  # of a training after whose rounds nothing is attacked
  field.name: field.default
  for field in dataclasses.fields(FrontierSettings)
  if field.metadata['group'] == _ATTACKS['group']
}


class Trained(NamedTuple):
  """One training, under one defense.

  Attributes:
    rows: of `federated.training.train`.
    seconds: the median of a warm round.
    seconds_defense: of these the defense's, None where they were not measured.
    stopped: whether the ε budget ended the training.
    epsilon: its `defenses.differential_privacy.Epsilon` after all rounds; None where none is counted.
    wrong: the numbers of the test samples, or the tokens in these, that the last model takes for another class; None
      where that is not known.
    lengths: of test texts, see `federated.simulation.Decisions`.
  """

  rows: list
  seconds: float
  seconds_defense: float | None = None
  stopped: bool = False
  epsilon: Epsilon | None = None
  wrong: list[int] | None = None
  lengths: list[int] | None = None


class Leak(NamedTuple):
  """Results of the attacks after a round: the label of the defense, the round (0 is before the first), and the rows of
  the audit.
  """

  defense: str
  round: int
  rows: list[dict]


class Frontier(NamedTuple):
  """What training under each defense cost, and what its uploads gave away.

  Attributes:
    config: the settings, plain JSON.
    trained: label of the defense -> `Trained`, 'none' for no defense.
    rows: of the audit before the first round, under all defenses; empty without attacks.
    leakage: a `Leak` per defense and audit, in the order of the rounds; empty unless some come after rounds.
    audits: text -> the folder of an audit, relative to the work directory.
    methods: what is known of the methods, see `AuditResult.methods`.
    partition: an array of sample numbers for each client.
    labels: the class of each training sample, or the number of its combination of flags, int [N].
  """

  config: dict
  trained: dict[str, Trained]
  rows: list[dict]
  leakage: list[Leak]
  audits: dict[str, str]
  methods: dict
  partition: list[np.ndarray]
  labels: np.ndarray


@dataclasses.dataclass(frozen=True)
class Task:
  """What all defenses of one call share.

  Attributes:
    key: of the trainings and the audits.
    given: the `Scenario`: the undefended client, the initial model, the training samples.
    test: (samples, targets).
    partition: an array of sample numbers for each client.
    settings: the `FrontierSettings`.
    config: what identifies the run, plain JSON.
    how, progress: as `frontier` takes them.
  """

  key: jax.Array
  given: Scenario
  test: Samples
  partition: list[np.ndarray]
  settings: FrontierSettings
  config: dict
  how: Execution
  progress: str

  def federation(self, bound: Bound) -> simulation.Federation:
    """Returns the federation whose clients, and server, are under a defense."""
    given = self.settings
    return simulation.Federation(
      bound.client(self.given.client),
      self.given.samples,
      self.given.targets,
      self.partition,
      given.per_round,
      server=SERVERS[given.server](given),
      chain=bound.server(),
      weighting=given.weighting,
      server_noise=given.server_noise,
      drop_out=given.drop_out,
      bits=bound.defense.bits,
      group_size=self.how.group_size,
    )

  def ledger(self, bound: Bound) -> accounting.Ledger | None:
    """Returns what accounts for the ε of a training, or None where nothing does."""
    return accounting.ledger(
      bound.defense,
      epochs=self.given.client.epochs,
      server_noise=self.settings.server_noise,
      sampling_rate=self.settings.per_round / len(self.partition),
      delta=self.settings.delta,
      budget=self.settings.budget,
    )

  @functools.cached_property
  def audited(self) -> Scenario:
    """The scenario of clients of one sample each, which have one batch per epoch and take at least one step."""
    local = self.given.described_by('gradleak.frontier')
    fewer = min(local.accumulate, local.local_epochs)
    local = dataclasses.replace(local, local_batch_size=None, order='', accumulate=fewer)
    return self.given.of(slice(self.settings.trials), local)

  @property
  def audit_settings(self) -> AuditSettings:
    """The settings of every audit."""
    return AuditSettings(steps=self.settings.steps, controls=self.settings.controls)


def frontier(
  key: Any,
  scenario: Scenario,
  test: Samples,
  defenses: Any,
  attacks: Any = (),
  *,
  clients: int | Sequence,
  settings: FrontierSettings | None = None,
  workdir: Any = 'results/frontier',
  execution: Execution | None = None,
  progress: str = 'auto',
  **changes: Any,
) -> Frontier | None:
  """Trains a federation under each defense, and attacks the uploads of clients of one sample.

  `gradleak.report.write` makes a page of the result, and of each audit.

  Args:
    key: a typed JAX key; the same key and settings give the same rows, bit for bit, also after a resume.
    scenario: the samples that are trained on, the initial model, and how clients train, see `gradleak.scenario`; FedAvg
      is share='delta'. Its public samples are for defenses that need any.
    test: (samples, targets) that nobody trains on, as the scenario's own.
    defenses: as `gradleak.audit` takes them; None is no defense. Stages of the place 'round' act at the server.
    attacks: as `gradleak.audit` takes them; without any, nothing is attacked.
    clients: how many share the training samples evenly, or an array of sample numbers for each client.
    settings: `FrontierSettings`.
    workdir: a folder for rounds, audits and checkpoints; a run that was stopped goes on from there.
    execution: an `Execution`: group_size (of clients), and process (several share the defenses and the trials). Such a
      process returns None; the call without it, after all of them, finds what they did.
    progress: 'auto', 'bar', 'lines' or 'none'.
    **changes: fields of `FrontierSettings` and of `Execution`.

  Raises:
    UsageError: for settings that cannot be run, before anything is trained.
  """
  given, how = paired(
    'gradleak.frontier', changes, settings=(FrontierSettings, settings), execution=(Execution, execution)
  )
  check(given)
  defaults = FrontierSettings()
  for name, server in _OF_ONE_SERVER.items():
    if given.server != server and (value := getattr(given, name)) != getattr(defaults, name):
      raise errors.UsageError(
        f'{name} is {value!r}, and the server takes {given.server}: leave it at {getattr(defaults, name):g}, or give '
        f'server={server}'
      )
  given = dataclasses.replace(
    given,
    evaluate_every=given.evaluate_every or max(1, given.rounds // MEASUREMENTS),
    server_learning_rate=given.server_rate,
  )
  key = errors.check_key('key', key, traced=False)
  errors.check_instance('scenario', scenario, Scenario, 'a gradleak.Scenario')
  client, shape = scenario.client, scenario.samples.shape[1:]
  targets = functools.partial(client.targets, outputs=outputs_shape(client.model, scenario.variables, shape))
  test = data.pair('test', test, None, shape, client.modality.check, targets, client.modality.noun)
  parts = _parts(key, simulation.decided(client.loss, scenario.targets), clients)
  scenario.check_steps(max(map(len, parts)))
  identity = {
    **dataclasses.asdict(given),
    **scenario.settings,
    **scenario.described_by('gradleak.frontier').plain(),
    'clients': len(parts),
    'data_fingerprint': fingerprint((scenario.samples, scenario.targets, *test)),
    'partition_fingerprint': fingerprint(parts),
    'key': np.asarray(jax.random.key_data(key)).tolist(),
  }
  attacks = listed(() if attacks is None else attacks)
  for name, usual in () if attacks else _UNATTACKED.items():
    if (value := getattr(given, name)) != usual:
      raise errors.UsageError(f'{name} is {value}, and there are no attacks: give some, or leave it at {usual}')
  if attacks and given.attack_every:  # the models after rounds are not kept: no attack can be added
    identity['attack_texts'] = {one.label: text(one) for one in labelled('attack', attacks, as_attack)}
  task = Task(key, scenario, test, parts, given, identity, how, progress)
  bound = [Labelled(label, bind(defense, scenario.context)) for label, defense in named_defenses(defenses)]
  return _run(task, bound, attacks, _before(task, bound, attacks), gathering(workdir))


def _before(task: Task, bound: list[Labelled], attacks: Any) -> Scenario | None:
  """Returns the scenario before the first round, None without attacks; raises for what cannot be run."""
  given = task.settings
  most = max(len(bound), given.trials if attacks else 0)
  task.how.check('gradleak.frontier', most, '', 'group_size', 'process')
  for one in bound:
    check_mean(one.method.defense, given.server_noise)
  if given.budget is not None and not any(task.ledger(one.method) for one in bound):
    raise errors.UsageError(f'a budget of ε = {given.budget} needs a defense whose ε is known, such as client_dp')
  for one in bound:
    training.check_privacy(task.key, task.federation(one.method), task.ledger(one.method))
  if not attacks:
    return None
  before = task.audited
  plan(task.key, before, _defenses(bound), attacks, given.trials, task.audit_settings)
  return before


def _kinds(task: Task) -> np.ndarray:
  """Returns the class of each training sample, or the number of its combination of flags, from 0 on."""
  loss = task.given.client.loss
  found = simulation.decided(loss, task.given.targets)
  return found if loss.targets is CLASSES else np.unique(found, return_inverse=True)[1]


def _parts(key: jax.Array, labels: np.ndarray, clients: Any) -> list[np.ndarray]:
  """Returns the sample numbers of each client: those given, or an even share."""
  if isinstance(clients, list | tuple):
    partition.check(clients, len(labels))
    return [np.asarray(part, np.int64) for part in clients]
  return partition.iid(jax.random.fold_in(key, 1), labels, clients)


def _run(
  task: Task,
  bound: list[Labelled],
  attacks: Any,
  before: Scenario | None,
  folder: pathlib.Path,
) -> Frontier | None:
  """Trains under each defense, then audits all of them before the first round; returns None of a share."""
  trained, leakage, audits = {}, [], {}
  folders = _folders(folder, [one.label for one in bound])
  rank, number = task.how.process

  def attacked(
    scenario_: Scenario, defenses: dict, where: pathlib.Path, of: tuple[int, int] = (0, 1)
  ) -> AuditResult | None:
    return audit(
      task.key,
      scenario_,
      defenses,
      attacks,
      task.settings.trials,
      settings=task.audit_settings,
      workdir=where,
      process=of,
      progress=task.progress,
    )

  for index, one in enumerate(bound):
    if index % number != rank:
      continue
    if len(bound) > 1 and task.progress != 'none':
      print(f'{one.label}, {index + 1} of {len(bound)}', file=sys.stderr, flush=True)
    place_ = folder / folders[one.label]
    after = _after_rounds(task, one, place_, attacked) if before is not None else None
    trained[one.label] = _train(task, one, place_, after)
    for leak in _remembered(place_):
      leakage.append(leak._replace(defense=one.label))
      audits[f'{one.label}, after round {leak.round}'] = f'{place_.name}/audit-{leak.round:05}'
  if number > 1:
    sharing = min(number, task.settings.trials)
    if before is not None and rank < sharing:
      attacked(before, _defenses(bound), folder / 'audit', (rank, sharing))
    return None
  write_atomically(folder / TRAININGS, json.dumps(folders) + '\n')
  rows, methods = [], {'defenses': {one.label: facts(one.method.defense, task.given.client.epochs) for one in bound}}
  if before is not None:
    result = attacked(before, _defenses(bound), folder / 'audit')
    assert result is not None  # this process has run what was missing
    rows, methods = result.rows, result.methods
    first = [Leak(one.label, 0, [row for row in rows if row['defense'] == one.label]) for one in bound]
    leakage = [*first, *leakage] if task.settings.attack_every else []
    audits = {'before the first round, all defenses': 'audit', **audits}
  leakage = sorted(leakage, key=lambda leak: leak.round)
  return Frontier(task.config, trained, rows, leakage, audits, methods, task.partition, _kinds(task))


def _folders(folder: pathlib.Path, labels: list[str]) -> dict[str, str]:
  """Returns label -> the name of its folder: of an earlier call, whose list may have been another, or a new one."""
  owners = {}
  for path in sorted(folder.glob('[0-9][0-9]*-*/config.json')):
    owners[path.parent.name] = read_json(path, _ANEW, dict).get('defense')
  found = {}
  for index, label in enumerate(labels):
    names = (folder_name(number, label) for number in itertools.count(index))
    own = [name for name, owner in owners.items() if owner == label]
    new = next(name for name in names if owners.get(name, label) == label)  # another label may be written alike
    found[label] = new if new in own or not own else own[0]
    owners[found[label]] = label
  return found


def _defenses(bound: list[Labelled]) -> dict:
  return {one.label: one.method.defense for one in bound}


def _train(task: Task, one: Labelled, folder: pathlib.Path, after: Callable | None) -> Trained:
  """Trains under one defense, or goes on from its folder."""
  check_sealed(folder / RESULT, _ANEW, renewed=(WRONG, LENGTHS))
  federation, ledger, given = task.federation(one.method), task.ledger(one.method), task.settings
  report_round = reporter(task.progress, given.rounds)

  def on_round(row: dict, state: simulation.State, seconds: float) -> None:
    if report_round:
      report_round(row, state, seconds)
    if after is not None:
      after(row, state)

  state, rows = training.train(
    task.key,
    federation,
    task.given.variables,
    given.rounds,
    test=task.test,
    evaluate_every=given.evaluate_every or 1,
    workdir=folder,
    config={
      **task.config,
      **({} if given.attack_every else _UNATTACKED),
      'defense': one.label,
      'defense_text': str(one.method.defense),
      **({'defense_version': one.method.defense.version} if one.method.defense.version else {}),
      **({'epsilon': ledger.terms} if ledger else {}),
    },
    privacy=ledger,
    on_round=on_round,
  )
  bare = not one.method.defense.stages and not given.server_noise
  decisions = functools.cache(lambda: simulation.judged(task.given.client, state.variables, *task.test))
  trained = Trained(
    rows,
    training.seconds_of_a_round(folder),
    None if bare else _added(task, federation, folder),
    stopped=len(rows) < given.rounds,
    epsilon=ledger.epsilon(len(rows), int(state.participations.max())) if ledger else None,
    wrong=computed_once(folder / WRONG, lambda: _wrong(decisions())),
    lengths=computed_once(folder / LENGTHS, lambda: decisions().lengths) if task.given.client.loss.own else None,
  )
  if not (folder / RESULT).exists():
    kept = [folder / name for name in ('rounds.jsonl', WRONG, LENGTHS, LEAKAGE)]
    seal(folder / RESULT, {}, {path.name: description(path.read_bytes()) for path in kept if path.exists()})
  return trained


def _wrong(found: simulation.Decisions) -> list[int]:
  """Returns the numbers of the test samples, or of the tokens in these, that a model takes for another class."""
  return np.flatnonzero(found.predicted != found.truth).tolist()


def _added(task: Task, federation: simulation.Federation, folder: pathlib.Path) -> float:
  """Returns the seconds that the defense adds to a round, measured once and kept in the folder."""

  def split() -> dict[str, float]:
    without, added = training.seconds_split(federation, task.given.variables, task.key)
    return {'seconds_without': without, 'seconds_defense': added}

  return computed_once(folder / 'split.json', split)['seconds_defense']


def _after_rounds(task: Task, one: Labelled, folder: pathlib.Path, attacked: Callable) -> Callable:
  """Returns the function that attacks after every so many rounds.

  The client that is attacked has taken part once before, in the first round: the model before is the initial one.
  """

  def after(row: dict, state: simulation.State) -> None:
    every, number = task.settings.attack_every, row['round']
    if not every or number % every:
      return
    current = task.audited.trained(state.variables, task.given.variables)
    result = attacked(current, {one.label: one.method.defense}, folder / f'audit-{number:05}')
    assert result is not None  # the process that trains runs all of it
    _remember(folder, Leak(one.label, number, result.rows))

  return after


def _remembered(folder: pathlib.Path) -> list[Leak]:
  """Returns what attacks after rounds found, one `Leak` per round."""
  path = folder / LEAKAGE
  try:
    return [Leak(**entry) for entry in read_json_lines(path, _ANEW)]
  except FileNotFoundError:
    return []
  except TypeError as error:
    raise damaged(path, error, _ANEW) from error


def _remember(folder: pathlib.Path, leak: Leak) -> None:
  """Keeps what the attack after a round found; a round that is done again after a resume replaces itself."""
  others = [other for other in _remembered(folder) if other.round != leak.round]
  entries = sorted([*others, leak], key=lambda entry: entry.round)
  write_atomically(folder / LEAKAGE, json_lines([entry._asdict() for entry in entries]))
