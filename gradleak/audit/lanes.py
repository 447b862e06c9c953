"""What is compiled and run: attacks by structure, a lane for each target, view and start.

An attack takes the upload, and its knowledge of the defense, as data. So one compiled program holds all of these as
lanes: defenses, adaptive attacks, restarts and numeric settings of one attack. The control runs that its successes are
measured against are lanes of the same program.
"""

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gradleak.adaptive import NON_ADAPTIVE, Change
from gradleak.attacks.base import AttackMethod, Reconstruction
from gradleak.audit import granted
from gradleak.audit.group import Group
from gradleak.audit.streams import folded, numbered
from gradleak.audit.verdict import CONTROL
from gradleak.audit.views import Target, Views, called
from gradleak.core import trees
from gradleak.core.methods import contents
from gradleak.core.trees import Tree
from gradleak.defenses.defense import Bound, Defense, bind
from gradleak.engine import driver
from gradleak.engine.groups import Layout
from gradleak.federated import Client
from gradleak.threat import Knowledge, Observation

# What a row is about: (name of the variant, what the defense is `called`, the adaptive attack, trial or control run).
Key = tuple[str, str, str, int]


class Variant(NamedTuple):
  """One attack, its settings changed as an adaptive attack asks for.

  Attributes:
    attack: its index among those of the group.
    method: the `AttackMethod`, changed.
    change: the `Change`.
    own: the label of the defense whose code it holds, where that is a user's: another may print alike; '' for others.
  """

  attack: int
  method: AttackMethod
  change: Change
  own: str = ''

  def name(self, group: Group) -> str:
    """Returns what tells it from the other variants in a group: the attack's label and what was changed."""
    settings, *defenses = self.change
    words = [f'{name}={value}' for name, value in settings]
    words += [f'{name}={of}' for name, of in zip(Change._fields[1:], defenses, strict=True) if of is not None]
    words += [f'of={self.own}'] if self.own else []
    return ' '.join([group.attacks[self.attack].label, *words])


class Planned(NamedTuple):
  """What is to run of one structure: one compilation.

  Attributes:
    attack: how it is called.
    runs: how many starts, views and control runs it is run from.
    num_steps: steps of each.
  """

  attack: str
  runs: int
  num_steps: int


class Lane(NamedTuple):
  """One start of one variant at one view.

  Attributes:
    variant: index among the structure's variants.
    target: the `Target`.
    view: index of the view.
    restart: number of the start.
  """

  variant: int
  target: Target
  view: int
  restart: int


class Table(NamedTuple):
  """The lanes of one structure, ready to run.

  Attributes:
    variants: the `Variant`s.
    lanes: `Lane` by `Lane`: variant by variant, target by target, view by view, start by start.
    build: (shared, lane) -> (attack, key, observation).
    shared: what all lanes read.
    arrays: what each lane reads, leading axis [lanes].
    num_steps: steps of the attack.
    on_host, signed: of the `Attack`.
    room: lanes that its programs are compiled for at least: those of an earlier look.
  """

  variants: list[Variant]
  lanes: list[Lane]
  build: 'Build'
  shared: dict
  arrays: dict
  num_steps: int
  on_host: bool
  signed: bool
  room: int = 0

  def at_least(self, lanes: int, views: int) -> 'Table':
    """Returns the same with room for so many lanes and views: it runs in the program of a table that has them."""
    stacked = self.shared['views']
    missing = max(0, views - jax.tree.leaves(stacked)[0].shape[0])
    if missing:  # in NumPy, which compiles nothing
      stacked = jax.tree.map(
        lambda x: jnp.asarray(np.pad(x, [(0, missing), *[(0, 0)] * (x.ndim - 1)], 'edge')), stacked
      )
    return self._replace(shared={**self.shared, 'views': stacked}, room=lanes)


class Found(NamedTuple):
  """What the attacks of one structure found.

  Attributes:
    table: the `Table`.
    reconstructions: a `Reconstruction` with a leading axis of lanes.
    at_truth: the objective at the private samples, float [lanes].
    steps: where the objective was recorded, int [K].
    curves: the objective there, float [lanes, K].
  """

  table: Table
  reconstructions: Reconstruction
  at_truth: np.ndarray
  steps: np.ndarray
  curves: np.ndarray


@dataclasses.dataclass(frozen=True)
class Build:
  """(shared, lane) -> (attack, key, observation): what all lanes of one structure do.

  Equal ones compile once: weights and uploads are arguments of the program. The method's numbers are not read: a lane
  brings its own. What a simulated defense was made for, such as public data, is part of the program.
  """

  method: AttackMethod = dataclasses.field(compare=False)
  structure: Hashable
  client: Client
  simulates: Hashable
  bound: Bound = dataclasses.field(compare=False)  # kept, as objects may be compared by which they are
  simulated: Client = dataclasses.field(compare=False)
  knowledge: Knowledge
  sample_shape: tuple[int, ...]

  @classmethod
  def of(cls, group: Group, method: AttackMethod, simulates: Defense | None = None) -> 'Build':
    """Returns the function of an attack in a group, on a client with the defense that it simulates."""
    shape = (group.settings.batch_size, *group.scenario.samples.shape[1:])
    bound, structure = bind(simulates, group.scenario.context), (method.structure, method.reads)
    made_for = simulates, contents(bound.arguments)
    simulated = group.client if simulates is None else bound.client(group.client)
    return cls(method, structure, group.client, made_for, bound, simulated, granted.knowledge(group, method), shape)

  def __call__(self, shared: dict, lane: dict) -> tuple[Any, jax.Array, Observation]:
    """Called while tracing, by the driver."""
    targets, view = shared['targets'][lane['trial']], trees.take(shared['views'], lane['view'])
    known = self.knowledge.labels == 'known'  # an attack sees no labels that it was not granted
    observation = Observation(
      view.get('variables', shared['variables']),
      view['update'],
      targets if known else jnp.zeros_like(targets),
      self.knowledge,
      self.sample_shape,
      self.client.num_classes,
      weights=view['weights'],
      noise=view['noise'],
      clip=view['clip'],
      uploads=view.get('uploads') if 'uploads' in self.method.reads else None,
      class_means=shared['class_means'],
      class_images=shared['class_images'],
      prepared=shared.get('prepared'),
    )
    return self.method.build(lane['numbers'], self.simulated), lane['key'], observation


@dataclasses.dataclass(frozen=True)
class ObjectiveAtTruth:
  """(shared, lane) -> what the lane's attacker would have measured at the private samples: the auditor's figure."""

  build: Build

  def __call__(self, shared: dict, lane: dict) -> jax.Array:
    """Called while tracing, by the driver."""
    attack, _, observation = self.build(shared, lane)
    return attack.objective(observation, shared['truth'][lane['trial']], shared['targets'][lane['trial']])


def structures(group: Group) -> list[list[Variant]]:
  """Returns the attacks to run, changed as the adaptive attacks ask for, grouped by structure: one compilation each."""
  grouped: dict[Hashable, list[Variant]] = {}
  for a, (_, attack) in enumerate(group.attacks):
    asked: dict[Change, str] = {}
    for label, bound in group.defenses:
      for adaptive in granted.attackers(group, attack, bound):
        asked.setdefault(adaptive.change, label if adaptive.change.foreign else '')
    for change, own in asked.items():
      changed = attack.changed(**dict(change.settings)) if change.settings else attack
      key = changed.structure, changed.reads, changed.label_rule, change.simulates
      grouped.setdefault(key, []).append(Variant(a, changed, change, own))
  return list(grouped.values())


def label(group: Group, variants: list[Variant]) -> str:
  """Returns how the attacks of one structure are called."""
  only = group.attacks[variants[0].attack].label
  return only if len(variants) == 1 else f'{variants[0].method.name} × {len(variants)}'


def planned(group: Group) -> list[Planned]:
  """Returns what is to run of a group, a list of `Planned`: one per structure."""
  found = []
  for variants in structures(group):
    runs = 0
    for variant in variants:
      attack = group.attacks[variant.attack].method
      adaptive_attacks = [
        adaptive for _, bound in group.defenses for adaptive in granted.attackers(group, attack, bound)
      ]
      asking = [adaptive for adaptive in adaptive_attacks if adaptive.change == variant.change]
      runs += sum(adaptive.count for adaptive in asking) * group.num_trials
      runs += (len(asking) if variant.change.noise else 1) * group.settings.controls
    num_steps = variants[0].method(group.client).num_steps
    found.append(Planned(label(group, variants), runs * group.settings.restarts, num_steps))
  return found


def expected(group: Group, variants: list[Variant], trials: np.ndarray, controls: np.ndarray) -> set[Key]:
  """Returns what one structure's attacks are to find on some trials and control runs, a `Key` per row."""
  keys: set[Key] = set()
  for variant in variants:
    name, attack = variant.name(group), group.attacks[variant.attack].method
    met: set[str] = set()
    for label, bound in group.defenses:
      adaptive_attacks = [c.name for c in granted.attackers(group, attack, bound) if c.change == variant.change]
      keys |= {
        (name, called(label), adaptive, int(t))
        for adaptive in adaptive_attacks
        for t in trials
        if group.attacks_trial(label, t)
      }
      if any(group.attacks_trial(label, t) for t in range(group.num_trials)):  # on whichever share
        met.update(adaptive_attacks)
    if variant.change.noise is None and met:
      met = {NON_ADAPTIVE.name}
    keys |= {(name, CONTROL, adaptive, int(run)) for adaptive in met for run in controls}
  return keys


def _encoded(group: Group) -> jax.Array:
  """Returns the targets of each trial as floats in the shape of the outputs."""
  client = group.client
  return client.loss.targets.encode(jnp.asarray(group.targets), client.num_classes, jnp.float32)


def table(
  group: Group, seen: Views, variants: list[Variant], wanted: Set[Key] | None = None, learned: Tree | None = None
) -> Table:
  """Returns the `Table` of one structure's attacks on the views of a group; of all of them or of those wanted.

  Args:
    group: the `Group`.
    seen: its `Views`.
    variants: of the structure.
    wanted: what rows are about, see `Key`; None for all.
    learned: what the attack has learned in an earlier look, in place of learning it again.
  """
  first, simulates = variants[0].method, variants[0].change.simulates
  shared = {
    'variables': group.scenario.variables,
    'views': seen.stacked,
    'targets': _encoded(group),
    'class_means': granted.class_means(group, first),
    'class_images': granted.class_images(group, first),
    'prepared': granted.prepared(group, first, simulates) if learned is None else learned,
  }
  named = [
    (v, target, target.key(group, one.name(group))) for v, one in enumerate(variants) for target in _targets(seen, one)
  ]
  chosen = [(v, target, key) for v, target, key in named if wanted is None or key in wanted]
  if wanted is not None and sorted(key for *_, key in chosen) != sorted(wanted):
    raise RuntimeError(
      f'{label(group, variants)} would find {len(chosen)} rows, and other {len(wanted)} are wanted: please report this '
      'defect, with the attacks and defenses of the audit'
    )
  lanes = [
    Lane(v, target, view, restart)
    for v, target, _ in chosen
    for view in target.views
    for restart in range(group.settings.restarts)
  ]
  numbers = np.asarray([variant.method.numbers for variant in variants], np.float32).reshape(len(variants), -1)
  which = np.asarray([lane.variant for lane in lanes])
  arrays = {
    'view': jnp.asarray([lane.view for lane in lanes]),
    'trial': jnp.asarray([lane.target.trial for lane in lanes]),
    'key': _keys(group, lanes),
    'numbers': tuple(jnp.asarray(numbers[which, i]) for i in range(numbers.shape[1])),
  }
  attack = first(group.client)
  traits = attack.num_steps, attack.on_host, attack.signed
  build = Build.of(group, first, None if first.adaptive else simulates)  # what it has learned is data to it
  return Table(variants, lanes, build, shared, arrays, *traits)


def _targets(seen: Views, variant: Variant) -> list[Target]:
  """Returns the targets of one variant: those of the adaptive attacks that ask for its change, and its controls."""

  def meets(target: Target) -> bool:
    if target.reads not in (None, variant.method.reads):
      return False
    asked = target.adaptive.change
    return asked.noise == variant.change.noise if target.defense < 0 else asked == variant.change

  return [target for target in seen.targets if meets(target)]


def _keys(group: Group, lanes: list[Lane]) -> jax.Array:
  """Returns the key of each lane: of its stream, its address and its start."""
  of_each = [(lane.target.defense < 0, lane.target.address, lane.restart) for lane in lanes]
  which, addresses, restarts = np.asarray(of_each, np.int32).reshape(-1, 3).T
  streams = np.asarray([numbered(name) for name in ('attack', 'attack control')])
  return folded(group.streams.key, streams[which], addresses, restarts)


def shown(made: Table) -> np.ndarray:
  """Returns the mask of the lanes whose objective a progress bar shows: the non-adaptive ones of the first defense."""
  mask = np.asarray(
    [lane.variant == 0 and lane.target.defense == 0 and lane.target.adaptive is NON_ADAPTIVE for lane in made.lanes]
  )
  return mask if mask.any() else np.ones_like(mask)


def judged_at_truth(group: Group, made: Table) -> tuple[ObjectiveAtTruth, dict, dict]:
  """Returns what `driver.evaluate` takes for the objectives at the private samples."""
  return ObjectiveAtTruth(made.build), {**made.shared, 'truth': jnp.asarray(group.truth)}, made.arrays


def lowered(group: Group, made: Table, group_size: int, evaluation_size: int) -> Iterator[jax.stages.Lowered]:
  """Yields the programs that `run` calls with these arguments, before they are compiled; none of the host's."""
  if not made.on_host:
    yield from driver.lowered(made.build, made.shared, made.arrays, Layout(group_size, room=made.room), made.num_steps)
  yield driver.lowered_evaluation(*judged_at_truth(group, made), Layout(evaluation_size, room=made.room))


def pieces(made: Table, group_size: int) -> int:
  """Returns in how many parts a table must run to fit the memory, see `driver.pieces`."""
  if made.on_host:
    return 1
  return driver.pieces(made.build, made.shared, made.arrays, Layout(group_size, room=made.room))


def run(
  group: Group,
  made: Table,
  group_size: int,
  *,
  fit: bool = False,
  split: bool = False,
  resume: tuple | None = None,
  on_chunk: Callable[[driver.Progress, tuple[list, list]], None] | None = None,
  on_failure: Callable[[driver.Progress, tuple[list, list]], None] | None = None,
  evaluation_size: int | None = None,
) -> Found:
  """Runs the lanes of one structure and returns what they `Found`.

  Args:
    group: the `Group`.
    made: its `Table`.
    group_size: lanes that share one pass.
    fit: whether the group size may be halved until it fits the memory.
    split: whether devices share the samples of each lane, see `driver.run`.
    resume: (step, steps and curve so far, leaves of the states) of an earlier run.
    on_chunk, on_failure: called with a `driver.Progress` and (steps, objectives) so far.
    evaluation_size: group size of the evaluation at the truth; `group_size` by default.
  """
  steps, curve = ([], []) if resume is None else (list(resume[1][0]), list(resume[1][1]))
  start = None if resume is None else (resume[0], resume[2])

  def chunk_done(progress: driver.Progress) -> None:
    if not made.on_host or not steps:  # on the host there is no objective to follow
      steps.append(progress.step)
      curve.append(progress.objective)
    if on_chunk is not None:
      on_chunk(progress, (steps, curve))

  if made.on_host:
    found = driver.run_on_host(
      made.build, made.shared, made.arrays, group_size=group_size, on_chunk=chunk_done, resume=start
    )
  else:
    layout = Layout(group_size, room=made.room)
    if split:
      layout = layout._replace(devices=jax.devices(), split=group.settings.batch_size)
    elif fit and resume is None:
      layout = driver.fitting(made.build, made.shared, made.arrays, layout)
      group_size = layout.group_size
    found = driver.run(
      made.build,
      made.shared,
      made.arrays,
      layout,
      num_steps=made.num_steps,
      on_chunk=chunk_done,
      on_failure=None if on_failure is None else lambda progress: on_failure(progress, (steps, curve)),
      resume=start,
    )
  at_truth = driver.evaluate(*judged_at_truth(group, made), Layout(evaluation_size or group_size, room=made.room))
  return Found(made, found, np.asarray(at_truth), np.asarray(steps), np.asarray(curve).T)
