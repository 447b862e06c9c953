"""The result of an audit: rows, pictures, curves, and what is known of the methods that were run."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from gradleak.attacks.base import AttackMethod
from gradleak.audit import granted
from gradleak.audit.group import Group
from gradleak.audit.plan import Plan
from gradleak.audit.scores import Part, judged
from gradleak.audit.sequential import Stop, stops
from gradleak.audit.verdict import require_undefended_recovery, worst
from gradleak.core import errors
from gradleak.defenses import guarantees
from gradleak.defenses.defense import Defense, remarks
from gradleak.federated.inspection import inspect
from gradleak.modalities import of_rows

_INSPECTED = 32  # samples of the client that its check of the model is given

# (attack, defense) of a non-adaptive attacker, (attack, defense, adaptive attack) of an adaptive one.
Case = tuple[str, ...]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class AuditResult:
  """Everything an audit found; T trials of B samples.

  Attributes:
    config: the scientific settings, plain JSON.
    rows: one dict per attack × defense × adaptive attack × trial, plain JSON values, see docs/ROWS.md.
    controls: one dict per attack × control run, same keys.
    truth: the private samples, [T, B, …].
    reconstructions: `Case` -> [T, B, …], matched to the truth; NaN where a trial diverged. Where trials stopped
      (`stops`), these are the first ones.
    curves: `Case` -> (steps [K], objective [T, K]) of the restarts that the attacker keeps; likewise.
    threat_models: attack -> sentences that say what this attacker was granted.
    adaptive_attacks: defense -> {adaptive attack: what an attacker who knows the defense does, in a sentence}.
    inspections: attack -> the suspicious findings of `gradleak.inspect` in the model that the attack's server sends,
      sentences; for a model that it cannot read, the reason, one sentence.
    methods: facts about the methods, derived from the objects, plain JSON: 'attacks' and 'defenses', {label: facts},
      and 'model'. Each has 'citations'; a defense also 'text', 'published', 'places', 'random', 'mechanisms' (fields of
      `defenses.Mechanism`, without a neighbouring relation: an ε of them names its own), 'missing_bound' and 'remark'.
    versions: of gradleak, JAX and Python, and the hardware; all of them, joined by commas, where parts of the folder
      have several.
    seconds: wall time.
    resumed: whether all of it was found on disk.
  """

  _repr_html_: ClassVar[Callable | None] = None  # what a notebook calls: set by `report.notebook`

  config: dict[str, Any]
  rows: list[dict[str, Any]]
  controls: list[dict[str, Any]]
  truth: np.ndarray
  reconstructions: dict[Case, np.ndarray]
  curves: dict[Case, tuple[np.ndarray, np.ndarray]]
  threat_models: dict[str, list[str]]
  adaptive_attacks: dict[str, dict[str, str]]
  inspections: dict[str, list[str] | str]
  methods: dict[str, dict[str, Any]]
  versions: dict[str, str]
  seconds: float
  resumed: bool

  @property
  def stops(self) -> list[Stop]:
    """How the trials of each defense stopped; empty where their number was fixed."""
    return stops(self.rows, self.config)

  def to_frame(self) -> Any:
    """Returns the rows as a `pandas.DataFrame`, one column per entry of docs/ROWS.md.

    Raises:
      UsageError: if pandas is not installed.
    """
    return frame(self.rows)

  def __repr__(self) -> str:
    by_defense: dict[str, list[dict]] = {}
    for row in self.rows:
      by_defense.setdefault(row['defense'], []).append(row)
    what = f'{self.config.get("model", "model")} on {self.config.get("dataset", "data")}'
    return '\n'.join([f'AuditResult: {what}', *(f'  {label}: {_worst(rows)}' for label, rows in by_defense.items())])


def check_result(result: Any) -> AuditResult:
  """Returns `result`; raises `UsageError` for anything but an `AuditResult`."""
  return errors.check_instance('the result', result, AuditResult, 'an AuditResult: what gradleak.audit returns')


def frame(rows: list[dict[str, Any]]) -> Any:
  """Returns dicts as a `pandas.DataFrame`, one row each.

  Raises:
    UsageError: if pandas is not installed.
  """
  try:
    import pandas
  except ImportError:
    raise errors.UsageError("pandas is not installed, and a data frame needs it: pip install 'pandas>=2,<4'") from None
  return pandas.DataFrame(rows)


def _worst(rows: list[dict[str, Any]]) -> str:
  """Returns the worst verdict on one defense, and in how many trials any attack has it: 'exact 3 of 4 trials'."""
  verdict = worst({row['verdict'] for row in rows})
  trials = {row['trial'] for row in rows}
  return f'{verdict} {len({row["trial"] for row in rows if row["verdict"] == verdict})} of {len(trials)} trials'


def result(plan: Plan, structures: list[list[Part]], versions: dict, seconds: float, resumed: bool) -> AuditResult:
  """Returns the `AuditResult`, sorted by attack, defense, adaptive attack and trial, methods in their given order.

  Args:
    plan: what was run.
    structures: per structure, the parts of all shards.
    versions, seconds, resumed: see `AuditResult`.
  """
  words = _adaptive_attacks(plan)
  order = {label: ['non-adaptive', *found] for label, found in words.items()}

  def position(entry: tuple) -> tuple:
    row = entry[0]
    if row['control']:
      threshold = [str(row[name]) for name in of_rows([row]).controls]  # one control has one
      return plan.attacks.index(row['attack']), 1, 0, 0, row['trial'], row['adaptive'] or '', threshold
    adaptive = order[row['defense']].index(row['adaptive'] or 'non-adaptive')
    return plan.attacks.index(row['attack']), 0, plan.defenses.index(row['defense']), adaptive, row['trial']

  entries = sorted((entry for parts in structures for entry in _entries(_as_long(parts))), key=position)
  reconstructions: dict[Case, list[np.ndarray]] = {}
  curves: dict[Case, tuple[np.ndarray, list[np.ndarray]]] = {}
  for row, samples, (steps, curve) in entries:
    if not row['control']:
      key = (row['attack'], row['defense'], *filter(None, [row['adaptive']]))
      reconstructions.setdefault(key, []).append(samples)
      curves.setdefault(key, (steps, []))[1].append(curve)
  rows = [row for row, *_ in entries]
  answers = {stop.defense: stop.answer for stop in stops(rows, plan.config)}
  told = (
    [{} if row['control'] else {'stopped': answers[row['defense']]} for row in rows] if answers else [{}] * len(rows)
  )
  rows = [{**row, **more} for row, more in zip(rows, told, strict=True)]
  by_attack = [[row for row in rows if row['attack'] == label and not row['control']] for label in plan.attacks]
  undefended = {label for label, bound in plan.groups[0].defenses if not bound.defense.stages}
  return AuditResult(
    plan.config,
    [row for of_attack in by_attack for row in require_undefended_recovery(of_attack, undefended)],
    [row for row in rows if row['control']],
    plan.groups[0].truth,
    {key: np.stack(samples) for key, samples in reconstructions.items()},
    {key: (steps, np.stack(of_trials)) for key, (steps, of_trials) in curves.items()},
    threat_models(plan),
    words,
    {label: seen for group in plan.groups for seen in [_inspected(group)] for label, _ in group.attacks},
    methods(plan),
    versions,
    seconds,
    resumed,
  )


def _entries(parts: list[Part]) -> list[tuple]:
  """Returns (row, samples, (steps, curve)) of one structure's parts, judged."""
  arrays = [
    (samples, (found['steps'], curve))
    for _, found in parts
    for samples, curve in zip(found['images'], found['curves'], strict=True)
  ]
  return [(row, *of_row) for row, of_row in zip(judged(parts), arrays, strict=True)]


def _as_long(parts: list[Part]) -> list[Part]:
  """Returns the parts with curves of one length; a shorter one is continued with its last value."""
  steps = max((arrays['steps'] for _, arrays in parts), key=len)

  def extended(arrays: dict) -> dict:
    missing = len(steps) - arrays['curves'].shape[1]
    return {**arrays, 'steps': steps, 'curves': np.pad(arrays['curves'], ((0, 0), (0, missing)), mode='edge')}

  return [(rows, extended(arrays)) for rows, arrays in parts]


def _adaptive_attacks(plan: Plan) -> dict[str, dict[str, str]]:
  """Returns, for each defense, `{adaptive attack: what an attacker who knows the defense does}`."""
  found: dict[str, dict] = {label: {} for label in plan.defenses}
  for group in plan.groups:
    for label, bound in group.defenses:
      for _, attack in group.attacks:
        found[label] |= {c.name: c.words for c in granted.attackers(group, attack, bound) if c.name != 'non-adaptive'}
  return found


def threat_models(plan: Plan) -> dict[str, list[str]]:
  """Returns {attack: what its attacker was granted}, and behind it what adaptive attacks that change it had beside."""
  found = {}
  for group in plan.groups:
    for label, attack in group.attacks:
      ran: dict[tuple, dict[str, None]] = {}
      for _, bound in group.defenses:
        for one in granted.attackers(group, attack, bound):
          ran.setdefault(one.settings, {})[one.name] = None
      said = {
        ', '.join(names): granted.knowledge(group, attack.changed(**dict(settings)) if settings else attack).in_words()
        for settings, names in ran.items()
      }
      first, *others = said.items()
      beside = [f'{names}: {one}' for names, sentences in others for one in sentences if one not in first[1]]
      found[label] = [*first[1], *beside]
  return found


def _inspected(group: Group) -> list[str] | str:
  """Returns what `inspect` finds suspicious in the model that clients are sent, or why it cannot read it.

  The model of a malicious server is also run on samples of the client, which takes a compilation.
  """
  client, variables = group.client, group.scenario.variables
  samples, targets = group.truth[0][:_INSPECTED], group.targets[0][:_INSPECTED]
  if client.loss.own:
    samples, targets = client.undefended().transformed(None, samples, targets)
  with_batch = len(samples) > 1 and group.server is not None
  given: dict[str, Any] = {'batch': (samples, targets), 'train': client.batch_norm == 'train'} if with_batch else {}
  try:
    found = inspect(client.model, variables, samples.shape[1:], loss=client.loss, **given).findings
  except errors.UsageError as error:
    return str(error)
  return [finding.text for finding in found if finding.suspicious]


def methods(plan: Plan) -> dict[str, dict[str, Any]]:
  """Returns what is known of the methods of a plan, from the objects themselves; see `AuditResult.methods`."""
  client = plan.groups[0].client
  epochs = client.epochs if client.share == 'delta' else 1
  attacks: dict[str, AttackMethod] = {label: attack for group in plan.groups for label, attack in group.attacks}
  return {
    'attacks': {label: {'citations': list(filter(None, [attacks[label].citation]))} for label in plan.attacks},
    'defenses': {
      label: {**facts(bound.defense, epochs), 'remark': remarks(bound.defense, plan.groups[0].scenario.context)}
      for label, bound in plan.groups[0].defenses
    },
    'model': {'citations': list(client.model.citations)},
  }


def facts(defense: Defense, epochs: int) -> dict[str, Any]:
  """Returns what is known of a defense, plain JSON, see `AuditResult.methods`.

  Args:
    defense: a `Defense`.
    epochs: how often one upload uses each sample.
  """
  return {
    'text': str(defense),
    'published': defense.published,
    'citations': defense.citations,
    'places': list(dict.fromkeys(stage.traits.place for stage in defense.stages)),
    'random': any(stage.traits.random for stage in defense.stages),
    'mechanisms': [
      {'noise': one.noise, 'unit': one.unit, 'releases': one.releases} for one in guarantees.mechanisms(defense, epochs)
    ],
    'missing_bound': guarantees.missing_bound(defense),
  }
