"""AutoLeak: a fixed, parameter-free ensemble of attacks, and the worst that any of them sees of each sample.

What AutoAttack (Croce, Hein: Reliable Evaluation of Adversarial Robustness with an Ensemble of Diverse Parameter-free
Attacks, ICML 2020) is for adversarial examples. The stages run from the cheapest to the most expensive one. A sample
that is reconstructed exactly under a defense is not attacked again under it. The first stages need no picture: they
rank a list of candidates by the likelihood of the upload (`gradleak.identify`).
"""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sized
from typing import Any

import jax
import numpy as np

from gradleak.audit import AuditResult, audit, joined
from gradleak.audit.labelled import named_defenses
from gradleak.audit.plan import refused
from gradleak.audit.result import frame
from gradleak.audit.run import GROWS
from gradleak.audit.settings import AuditSettings
from gradleak.audit.verdict import LEVELS, worst
from gradleak.core import errors
from gradleak.core.settings import paired
from gradleak.core.storage import description, gathering, json_lines, made_folder, plain, seal, write_atomically
from gradleak.defenses import NO_DEFENSE, Mechanism
from gradleak.defenses.defense import bind
from gradleak.engine.execution import Execution
from gradleak.engine.progress import callback, end, note
from gradleak.federated.scenario import Scenario
from gradleak.studies.autoleak import flags
from gradleak.studies.autoleak.baseline import Baseline, baselines
from gradleak.studies.autoleak.bounds import identification
from gradleak.studies.autoleak.ensemble import (
  CANDIDATES,
  CONTROLS,
  ENSEMBLES,
  VERSION,
  WITNESSES,
  Ranking,
  Stage,
  anything,
)
from gradleak.studies.autoleak.rankings import NAMED, Ranked, ranked
from gradleak.studies.identification import Identification, identify

RESULT = 'autoleak.json'  # seals what stands beside it
TOLD = ('config', 'stages', 'ranked', 'baselines', 'flags', 'bounds', 'seconds')  # of what it found, in this file

__all__ = ['ENSEMBLES', 'VERSION', 'AutoLeak', 'Ranking', 'Stage', 'autoleak']


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class AutoLeak:
  """What the ensemble found; T trials of B samples.

  Attributes:
    config: the settings, plain JSON; 'version' is that of the ensemble.
    rows: of all attacks, one dict each, see docs/ROWS.md; also 'stage' and 'honest' (whether the server was).
    controls: of the null-gradient control runs, likewise.
    stages: one dict each: 'stage', 'honest', 'attacks', 'left_out' ({attack: why it cannot run here}), 'skipped'
      ({defense: why it does not apply}), 'targets' (pairs of defense and trial that were attacked) of 'all_targets',
      and 'seconds'.
    ranked: what `rankings.ranked` makes of each ranking and defense: the trials that the likelihood re-identifies.
    baselines: what shows at each level without any upload, see `baseline.baselines`.
    flags: defense -> reasons to distrust its verdict, sentences.
    bounds: defense -> the largest probability, by differential privacy, of finding any of a trial's B originals among
      the candidates (of one, times B), from as many uploads of it as its attackers have read.
    audits: stage -> its `AuditResult`, with pictures.
    defenses: facts about the defenses, see `AuditResult.methods`.
    seconds: wall time, that of an earlier call on the same folder included.
  """

  config: dict[str, Any]
  rows: list[dict[str, Any]]
  controls: list[dict[str, Any]]
  stages: list[dict[str, Any]]
  ranked: list[Ranked]
  baselines: list[Baseline]
  flags: dict[str, list[str]]
  bounds: dict[str, float]
  audits: dict[str, AuditResult]
  defenses: dict[str, dict[str, Any]]
  seconds: float

  @property
  def versions(self) -> dict[str, str]:
    """What its audits were made with, see `AuditResult.versions`."""
    return joined(result.versions for result in self.audits.values())

  def named(self, honest: bool = True) -> dict[str, set[int]]:
    """Returns {defense: the trials that the likelihood re-identifies}; a malicious server is no part of rankings."""
    found: dict[str, set[int]] = {}
    for one in self.ranked if honest else ():
      found.setdefault(one['defense'], set()).update(one['named'])
    return found

  def verdicts(self, honest: bool = True) -> dict[str, list[str]]:
    """Returns {defense: the worst verdict on each trial}, by honest-but-curious servers or by malicious ones."""
    found: dict[str, dict[int, set[str]]] = {}
    for row in self.rows:
      if row['honest'] == honest:
        found.setdefault(row['defense'], {}).setdefault(row['trial'], set()).add(row['verdict'])
    for defense, trials in self.named(honest).items():
      for trial in trials:
        found.setdefault(defense, {}).setdefault(trial, set()).add(NAMED)
    return {defense: [worst(trials[trial]) for trial in sorted(trials)] for defense, trials in found.items()}

  def success_rate(self, defense: str, level: str = 'recognisable', honest: bool = True) -> tuple[int, int]:
    """Returns (trials that come to a level or further, trials): the worst-case attack success rate.

    Raises:
      UsageError: for an unknown defense or level.
    """
    errors.check_choice('level', level, LEVELS)
    verdicts = self.verdicts(honest)
    errors.check_choice('defense', defense, list(verdicts))
    enough = LEVELS[: LEVELS.index(level) + 1]
    return sum(verdict in enough for verdict in verdicts[defense]), len(verdicts[defense])

  def to_frame(self) -> Any:
    """Returns the rows as a `pandas.DataFrame`; raises `UsageError` if pandas is not installed."""
    return frame(self.rows)

  def __repr__(self) -> str:
    lines = []
    for defense, verdicts in self.verdicts().items():
      found = worst(set(verdicts))
      lines.append(f'  {defense}: {found} {verdicts.count(found)} of {len(verdicts)} trials')
    return '\n'.join([f'{self.config["version"]}: {self.config["model"]} on {self.config["dataset"]}', *lines])


def autoleak(
  key: Any,
  scenario: Scenario,
  defenses: Any,
  num_trials: int,
  *,
  batch_size: int = 1,
  staged: bool = True,
  malicious: bool = True,
  workdir: Any = None,
  execution: Execution | None = None,
  progress: str | Callable = 'auto',
  **changes: Any,
) -> AutoLeak | None:
  """Runs the ensemble against defenses and returns the worst that it sees of each sample.

  There is nothing to choose but what is audited: attacks, steps, restarts, control runs and adaptive attacks are those
  of the version (`VERSION`). Labels are granted. Attacks that learn use the scenario's public samples, and are left out
  where it has none. Attacks that the model does not admit are also left out; the result names both.

  Args:
    key: a typed JAX key.
    scenario: what is audited: client, model, weights and private samples; see `gradleak.scenario`.
    defenses: as `gradleak.audit` takes them. No defense is always audited, too.
    num_trials: T. A published worst-case rate takes 400 or more.
    batch_size: private samples behind one upload.
    staged: whether samples that are exact already are left out of later stages; False runs everything on all of them.
    malicious: whether servers that modify the model are run, too; they are counted apart.
    workdir: a folder for results and checkpoints; a run that was killed goes on where it stopped.
    execution: an `Execution`: group_size, and process (several share the work and the work directory).
    progress: 'auto', 'bar', 'lines' or 'none', or a callback, see `gradleak.audit`.
    **changes: fields of `Execution`.

  Returns:
    An `AutoLeak`. None where the next stage waits for shares of other processes: this one is to be called again when
    they are done.

  Raises:
    UsageError: for settings that cannot be run.
  """
  for name, value in (('staged', staged), ('malicious', malicious)):
    errors.check_instance(name, value, bool, 'True or False')
  errors.check_instance('scenario', scenario, Scenario, 'a gradleak.Scenario')
  for name, number in (('trials', num_trials), ('batch_size', batch_size)):
    errors.check_number(name, number, low=1, high=10**6, integer=True)
  chosen = named_defenses(defenses)
  if not any(one.label == 'none' for one in chosen):
    chosen = [*named_defenses([None]), *chosen]
  given = {one.label: None if one.label == 'none' else one.method for one in chosen}
  (how,) = paired('gradleak.autoleak', changes, execution=(Execution, execution))
  how.check('gradleak.autoleak', num_trials, workdir, 'group_size', 'process')
  run = _Run(key, scenario, given, num_trials, batch_size, staged, workdir, progress, how)
  started = time.monotonic()
  try:
    for stage in _stages(scenario):
      if isinstance(stage, Stage) and not (stage.honest or malicious):
        continue
      if not (run.rank(stage) if isinstance(stage, Ranking) else run.attack(stage)):
        return None
  finally:
    end(run.show)
  return run.result(time.monotonic() - started)


def _stages(scenario: Scenario) -> tuple[Ranking | Stage, ...]:
  """Returns the ensemble of a scenario's modality; raises `UsageError` where there is none."""
  kind = scenario.client.modality.name
  if kind not in ENSEMBLES:
    raise errors.UsageError(f'{VERSION} has ensembles for {", ".join(ENSEMBLES)}, and none for {kind}: call gl.audit')
  return ENSEMBLES[kind]


class _Run:
  """The stages so far: what is broken, and what was found."""

  def __init__(
    self,
    key: Any,
    scenario: Scenario,
    defenses: Mapping[str, Any],
    num_trials: int,
    batch_size: int,
    staged: bool,
    workdir: Any,
    progress: str | Callable,
    how: Execution,
  ):
    self.key, self.scenario, self.defenses, self.num_trials = key, scenario, defenses, num_trials
    self.batch_size, self.staged, self.how = batch_size, staged, how
    self.show = callback(progress)
    self.folder = None if workdir is None else made_folder(gathering(workdir, RESULT))
    self.audits: dict[str, AuditResult] = {}
    self.ranked: list[Ranked] = []
    self.stages: list[dict[str, Any]] = []
    self.drawn = False  # whether the client itself is random, which a ranking finds out

  def attack(self, stage: Stage) -> bool:
    """Runs a stage on what no earlier one has broken; returns whether all processes have."""
    settings = AuditSettings(
      batch_size=self.batch_size, restarts=stage.restarts, rounds=stage.rounds, labels='known', controls=CONTROLS
    )
    left_out = self._left_out(stage, settings)
    attacks = [attack for attack in stage.attacks if str(attack) not in left_out]
    targets, skipped = self._targets(stage)
    entry = self._entry(stage, targets, honest=stage.honest, attacks=[str(attack) for attack in attacks])
    entry |= {'left_out': left_out, 'skipped': skipped}
    if not attacks or not entry['targets']:
      return True
    note(self.show, f'stage “{stage.name}”: {entry["targets"]} of {entry["all_targets"]} uploads are attacked')
    found = audit(
      self.key,
      self.scenario,
      {label: self.defenses[label] for label in targets},
      attacks,
      self.num_trials,
      settings=settings,
      only=targets,
      workdir=None if self.folder is None else self.folder / folder_of(stage.name),
      execution=self.how,
      progress='none' if self.show is None else self.show,
    )
    if found is None:
      return False
    entry['seconds'] = found.seconds
    self.audits[stage.name] = found
    return True

  def rank(self, stage: Ranking) -> bool:
    """Ranks the candidates of the defenses under which not all trials are re-identified yet; returns as `attack`."""
    skipped = self._skipped(stage)
    wanted = [
      label
      for label in self.defenses
      if label not in skipped
      and len({t for one in self.ranked if one['defense'] == label for t in one['named']}) < self.num_trials
    ]
    entry = self._entry(stage, dict.fromkeys(wanted, range(self.num_trials)), honest=True, attacks=['likelihood'])
    entry['skipped'] = skipped
    if not wanted:
      return True
    note(self.show, f'stage “{stage.name}”: the candidates of {entry["targets"]} uploads are ranked')
    try:
      found = self._identified(stage, wanted)
    except errors.FolderError:
      raise
    except errors.UsageError as error:
      entry.update(targets=0, attacks=[], left_out={'likelihood': str(error)})
      return True
    if found is None:
      return False
    entry['seconds'] = found.seconds
    self.drawn = 'client_draws' in found.config
    self.ranked += ranked(stage.name, found, self.batch_size)
    return True

  def _identified(self, stage: Ranking, wanted: list[str]) -> Identification | None:
    return identify(
      self.key,
      self.scenario,
      {label: self.defenses[label] for label in wanted},
      self.num_trials,
      batch_size=self.batch_size,
      candidates=max(CANDIDATES, self.num_trials * self.batch_size),
      rounds=stage.rounds,
      labels='known' if np.all(self.scenario.gallery.targets >= 0) else 'unknown',
      controls=CONTROLS,
      workdir=None if self.folder is None else self.folder / folder_of(stage.name),
      execution=self.how,
      progress='none' if self.show is None else self.show,
    )

  def _entry(self, stage: Ranking | Stage, targets: Mapping[str, Sized], **more: Any) -> dict[str, Any]:
    """Returns what is recorded of a stage, and records it."""
    counted = {'targets': sum(map(len, targets.values())), 'all_targets': len(self.defenses) * self.num_trials}
    self.stages.append({'stage': stage.name, **more, 'left_out': {}, 'skipped': {}, **counted, 'seconds': 0.0})
    return self.stages[-1]

  def _skipped(self, stage: Ranking | Stage) -> dict[str, str]:
    """Returns {defense: why the stage does not apply under it}."""
    context = self.scenario.context
    bound = {label: bind(NO_DEFENSE if one is None else one, context) for label, one in self.defenses.items()}
    told = {label: stage.skips(one, context, self.batch_size, self.drawn) for label, one in bound.items()}
    return {label: why for label, why in told.items() if why}

  def _targets(self, stage: Stage) -> tuple[dict[str, list[int]], dict[str, str]]:
    """Returns the trials to attack of each defense, and why the stage does not apply under the others.

    Without a defense some trials are always attacked, as witnesses that an attack works.
    """
    broken = {
      (row['defense'], row['trial'])
      for name, found in self.audits.items()
      for row in found.rows
      if row['verdict'] == 'exact' and self._honest(name) == stage.honest and self.staged
    }
    targets, skipped = {}, self._skipped(stage)
    for label, defense in self.defenses.items():
      keep = WITNESSES if defense is None else 0
      trials = [t for t in range(self.num_trials) if t < keep or (label, t) not in broken]
      trials = trials[:keep] if label in skipped else trials
      if trials:
        targets[label] = trials
    applies = stage.skips is anything or any(label not in skipped for label in targets)
    return targets if applies else {}, {label: why for label, why in skipped.items() if label != 'none'}

  def _honest(self, name: str) -> bool:
    """Returns whether the server of a stage that ran is honest."""
    return next(entry['honest'] for entry in self.stages if entry['stage'] == name)

  def _left_out(self, stage: Stage, settings: AuditSettings) -> dict[str, str]:
    """Returns {attack: why it cannot run here}."""
    found = {}
    for attack in stage.attacks:
      if attack.learns and self.scenario.public is None:
        found[str(attack)] = 'it learns from public samples, and there are none'
        continue
      for name, error in refused(self.key, self.scenario, [attack], self.num_trials, settings).items():
        found[name] = str(error)
    return found

  def result(self, seconds: float) -> AutoLeak:
    """Returns the `AutoLeak`; with a folder, also writes its rows and flags there."""
    if not self.audits:
      reasons = dict.fromkeys(reason for stage in self.stages for reason in stage['left_out'].values())
      raise errors.UsageError(f'no attack of {VERSION} can run here: {"; ".join(reasons)}')
    rows, controls, facts = gathered(self.audits, {name: self._honest(name) for name in self.audits})
    first = next(iter(self.audits.values()))
    dropped = (*GROWS, *GROWS.values(), 'only', 'restarts', 'rounds', 'controls', 'steps')
    config = {name: value for name, value in first.config.items() if name not in dropped}
    config |= {'version': VERSION, 'staged': self.staged, 'defenses': list(self.defenses)}
    seconds = max(seconds, sum(stage['seconds'] for stage in self.stages))
    made = AutoLeak(
      config,
      rows,
      controls,
      self.stages,
      self.ranked,
      baselines(self.scenario, self.num_trials, self.batch_size),
      self._flags(rows, controls),
      _bounds(facts, rows, self.ranked, self.batch_size),
      self.audits,
      facts,
      seconds,
    )
    if self.folder is not None:
      contents = {name: json_lines(plain(each)) for name, each in (('rows.jsonl', rows), ('controls.jsonl', controls))}
      for name, content in contents.items():
        write_atomically(self.folder / name, content)
      told = {name: getattr(made, name) for name in TOLD}
      files = {name: description(content) for name, content in contents.items()}
      seal(self.folder / RESULT, plain(told, finite=False), files)
    return made

  def _flags(self, rows: list[dict], controls: list[dict]) -> dict[str, list[str]]:
    """Returns {defense: reasons to distrust its verdict}."""
    key = jax.random.fold_in(errors.check_key('key', self.key, traced=False), 0)
    found = {}
    bare = [row for row in rows if row['defense'] == 'none' and row['honest']]
    failing = flags.of_undefended(key, self.scenario, bare, self.batch_size) if len(self.defenses) > 1 else []
    for label, defense in self.defenses.items():
      of = [row for row in rows if row['defense'] == label]
      own = [row for row in of if row['honest']]
      random = defense is not None and defense.random
      averaged = any(row['rounds'] > 1 for row in own)
      broken = len({row['trial'] for row in own if row['verdict'] == 'exact'}) == self.num_trials
      said = flags.of_rows(own, controls, random and not broken, averaged)
      if defense is not None:
        said += [*flags.of_uploads(key, self.scenario, defense, self.batch_size), *failing]
      found[label] = said
    return found


def folder_of(stage: str) -> str:
  """Returns the name of a stage's folder in the work directory."""
  return stage.replace(' ', '_')


def gathered(
  audits: Mapping[str, AuditResult], honest: Mapping[str, bool]
) -> tuple[list[dict], list[dict], dict[str, dict]]:
  """Returns the rows and control runs of all stages, each with its 'stage' and 'honest', and the defenses' facts.

  Args:
    audits: stage -> its `AuditResult`.
    honest: stage -> whether its server is.
  """
  marks = {stage: {'stage': stage, 'honest': honest[stage]} for stage in audits}
  rows, controls = (
    [{**row, **marks[stage]} for stage, audit in audits.items() for row in getattr(audit, kind)]
    for kind in ('rows', 'controls')
  )
  facts = {label: known for audit in audits.values() for label, known in audit.methods['defenses'].items()}
  return rows, controls, facts


def _bounds(facts: Mapping[str, dict], rows: list[dict], ranked: list[Ranked], batch_size: int) -> dict[str, float]:
  """Returns `AutoLeak.bounds`."""
  found, least = {}, min(row['candidates'] for row in (*rows, *ranked))
  for label, known in facts.items():
    # Uploads of the same samples that an attacker of this defense has read at most.
    uploads = max((row['rounds'] for row in (*rows, *ranked) if row['defense'] == label), default=1)
    released = [Mechanism(**{**one, 'releases': uploads * one['releases']}) for one in known['mechanisms']]
    bound = identification(released, least)
    if bound is not None:
      found[label] = min(1.0, batch_size * bound)
  return found
