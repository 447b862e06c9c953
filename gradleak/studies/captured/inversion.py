"""Runs the attacks on a captured update and on noise in its place, as lanes of one compiled program."""

import dataclasses
import re
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradleak.adaptive import NON_ADAPTIVE, AdaptiveAttack, View
from gradleak.attacks import labels as label_rules
from gradleak.attacks.base import Reconstruction
from gradleak.attacks.matching.distances import cosine, weighed
from gradleak.audit import TIMES, granted, lanes, versions
from gradleak.audit.group import Group
from gradleak.audit.labelled import text
from gradleak.audit.scores import kept_distance
from gradleak.audit.verdict import CONTROL
from gradleak.audit.views import Target, Views, called, noise_like, stack
from gradleak.core import errors
from gradleak.core.storage import Workdir, append_time
from gradleak.core.trees import Tree
from gradleak.engine import driver
from gradleak.engine.groups import Layout
from gradleak.engine.progress import note
from gradleak.federated import Upload
from gradleak.federated.scenario import Scenario
from gradleak.federated.targets import SAMPLES
from gradleak.modalities import Modality
from gradleak.models import lora
from gradleak.studies.captured import truth

SHOWN_CONTROLS = 3  # control runs whose pictures are kept
MOVED = 1e-2  # fraction of its start that an objective has to fall by

Part = tuple[list[dict], dict[str, np.ndarray]]  # scalars and arrays of each `Inversion`, as they are stored


@dataclasses.dataclass(frozen=True)
class Inversion:
  """What one attacker made of the update. It says how well that matches, never that it is the private samples.

  Attributes:
    attack: its name with its settings.
    adaptive: how it makes use of the defense, None for an attacker who does not know it.
    does: what the adaptive attack does, a sentence.
    granted: what the attacker is granted, sentences.
    labels_mode: 'known', 'inferred', 'optimised' or 'unused', see `federated.Knowledge`.
    samples: [K, …], the surest first. Closed forms may find more or fewer than the private ones.
    empty: of them, those that are no answer, bool [K].
    labels: int [K], −1 where unknown; empty if the attack returns none.
    objective, objective_start: what the attack minimised, priors included; 0 for closed forms.
    distance: its own matching distance.
    mismatch: 1 − the cosine between the update that the first samples would cause and the captured one, on the entries
      that the attacker compares, in [0, 2]; NaN where nothing is found, and where labels are not known well enough to
      simulate the client.
    grey: the mismatch of neutral samples of the same labels, such as grey images: what no answer at all would reach.
      NaN as above.
    diverged: whether a value was not finite.
    steps: of the attack.
    control_objective, control_distance, control_mismatch: the same of the control runs, float [controls].
    control_samples: those of the first control runs, [≤ `SHOWN_CONTROLS`, K, …].
    likeness: the highest of the first samples to any of the control runs, by `Modality.likenesses`, such as a
      correlation; NaN without these. It is high where samples come from the attack's prior and not from the update.
    control_likeness: the median over the control runs of the same among them.
    at_truth: the mismatch of the private samples with their labels, where they are known: near 0 if the client is as it
      is said to be. NaN without them, and as above.
  """

  attack: str
  adaptive: str | None
  does: str
  granted: list[str]
  labels_mode: str
  samples: np.ndarray
  empty: np.ndarray
  labels: np.ndarray
  objective: float
  objective_start: float
  distance: float
  mismatch: float
  grey: float
  diverged: bool
  steps: int
  control_objective: np.ndarray
  control_distance: np.ndarray
  control_mismatch: np.ndarray
  control_samples: np.ndarray
  likeness: float
  control_likeness: float
  at_truth: float = float('nan')

  @property
  def found(self) -> bool:
    """Whether there is an answer: a search always has one, a closed form may find nothing."""
    return bool(self.steps) or not self.empty.all()

  @property
  def inconclusive(self) -> str:
    """Why it shows neither leak nor protection, 'unmoved' (the objective stayed) or 'grey' (as neutral samples); ''."""
    if self.diverged or not self.found:
      return ''  # said in words of their own
    if self.steps and not self.objective < self.objective_start - MOVED * abs(self.objective_start):
      return 'unmoved'
    if not np.isnan(self.mismatch) and not np.isnan(self.grey) and not self.mismatch < self.grey:
      return 'grey'
    return ''

  @property
  def closer(self) -> int | None:
    """How many control runs end at a larger mismatch than this one, or find nothing; None where it was not measured."""
    if not len(self.control_mismatch) or np.isnan(self.mismatch):
      return None
    return int((~(self.control_mismatch <= self.mismatch)).sum())


@dataclasses.dataclass(frozen=True)
class Mismatch:
  """(shared, lane) -> 1 − the cosine between what the lane's samples would cause and what it compares them with.

  Attributes:
    build: of the lanes.
    rule: of `attacks.labels`, by which the label is read from the update where the attack gives none; '' where it does.
  """

  build: lanes.Build
  rule: str

  def __call__(self, shared: dict, lane: dict) -> jax.Array:
    """Called while tracing, by the driver."""
    _, _, observation = self.build(shared, lane)
    client, labels = self.build.simulated, lane['labels']
    if self.rule:
      labels = label_rules.infer(self.rule, client.model, observation, drawn=client.modality.drawn)
    samples = lane['samples']
    floating = jnp.float32 if client.modality.integral else samples.dtype
    known = client.loss.targets.encode(labels, client.num_classes, floating)
    simulated = client.local_update(None, observation.variables, samples, known).update
    apart = cosine(weighed(simulated, observation), weighed(observation.update, observation))
    return jnp.where((labels >= 0).all() | jnp.issubdtype(labels.dtype, jnp.floating), apart, jnp.nan)


def group_size(group: Group) -> int:
  """Returns the default number of lanes that share one pass."""
  return driver.default_group_size(group.scenario.variables, group.settings.batch_size)


Judged = tuple[list[dict], list[dict]]  # rows and control rows


def inverted(
  group: Group, update: Tree, number: int, store: Workdir | None, show: Callable | None, judges: bool = False
) -> Iterator[tuple[list[Inversion], Judged]]:
  """Yields what one attack makes of an update, structure by structure: an `Inversion` for each way to know the defense.
  Beside it stand the rows of an auditor who `judges`, else none.

  Args:
    group: of one attack and one defense.
    update: a tree of NumPy arrays.
    number: of the attack among all, which tells its parts from those of others.
    store: the work directory, or None.
    show: a progress callback, see `gradleak.engine.progress`, or None.
    judges: whether the group's scenario holds the private samples.
  """
  undefended = {label for label, bound in group.defenses if not bound.defense.stages}
  (named,) = group.attacks
  for i, variants in enumerate(lanes.structures(group)):
    word = re.sub(r'\W', '_', named.method.name)
    name = f'{number:02}-{word}-{zlib.crc32(text(named).encode()):08x}-{i}'
    names = [name, *([f'{name}-judged'] if judges else [])]
    held = [store.load_part(one) for one in names] if store is not None else []
    parts: list[Part] = [part for part in held if part is not None]
    if len(parts) < len(names):
      started = time.monotonic()
      parts = _attacked(group, update, name, variants, store, show, judges)
      if store is not None:
        for one, part in zip(names, parts, strict=True):
          store.save_part(one, *part)
        append_time(store.path / TIMES, part=name, seconds=time.monotonic() - started, **versions())
    yield _inversions(parts[0]), truth.judged(parts[1], undefended) if judges else ([], [])


def _inversions(part: Part) -> list[Inversion]:
  """Returns the `Inversion`s that are stored in a part."""
  rows, arrays = part
  own: list[dict[str, Any]] = [
    {key.partition('/')[2]: x for key, x in arrays.items() if key.startswith(f'{j}/')} for j in range(len(rows))
  ]
  return [Inversion(**row, **of_row) for row, of_row in zip(rows, own, strict=True)]


def _attacked(
  group: Group, update: Tree, name: str, variants: list, store: Workdir | None, show: Callable | None, judges: bool
) -> list[Part]:
  """Runs one structure, or goes on from its checkpoint; returns what is stored of it, and of a judge's rows."""
  attackers = granted.attackers(group, group.attacks[0].method, group.defenses[0].method)
  wanted = {
    key
    for variant in variants
    for adaptive in attackers
    if adaptive.change == variant.change
    for key in _keys(group, variant, adaptive)
  }
  made = lanes.table(group, _views(group, update, attackers), variants, wanted)
  title, mask = lanes.label(group, variants), lanes.shown(made)
  checkpoint = store.load_checkpoint(name) if store is not None else None
  size = store.speed['group_size'] if store is not None else group_size(group)

  def on_chunk(progress: driver.Progress) -> None:
    if show is not None:
      show(title, progress, progress.objective[mask])
    if store is not None and not progress.done:
      store.save_checkpoint(name, progress.step, lambda: progress.states)

  note(show, f'compiling {title} …')
  options: dict[str, Any] = {'on_chunk': on_chunk, 'resume': checkpoint}
  if made.on_host:
    found = driver.run_on_host(made.build, made.shared, made.arrays, group_size=size, **options)
  else:
    found = driver.run(made.build, made.shared, made.arrays, Layout(size), num_steps=made.num_steps, **options)
  found = jax.tree.map(np.asarray, found)
  neutral = group.client.modality.neutral(found.samples.shape[2:])
  greys = found._replace(samples=np.broadcast_to(neutral, found.samples.shape).astype(found.samples.dtype))
  apart = [_mismatches(group, update, made, one, size) for one in (found, greys)]
  if judges:
    private = found._replace(samples=np.repeat(group.truth, len(found.samples), axis=0))
    apart.append(_mismatches(group, update, made, private, size, group.targets))
  scored = [truth.scored(group, update, made, found, size)] if judges else []
  return [_part(group, made, found, *apart), *scored]


def _keys(group: Group, variant: lanes.Variant, adaptive: AdaptiveAttack) -> Iterator[lanes.Key]:
  """Yields the keys of what one attacker runs: on the update, and on the noise of each control."""
  name = variant.name(group)
  yield name, called(group.defenses[0].label), adaptive.name, 0
  for number in range(group.settings.controls):
    yield name, CONTROL, adaptive.name, number


def _views(group: Group, update: Tree, attackers: list[AdaptiveAttack]) -> Views:
  """Returns what each attacker compares, and the same of noise, on the entries and with the weights of that view."""
  alone = jax.tree.map(lambda x: np.asarray(x)[np.newaxis], update)
  mask = jax.tree.map(lambda x: np.ones(1, bool), update)
  upload = Upload(alone, mask, np.full(1, group.settings.batch_size, np.int32))  # type: ignore[arg-type]
  reads = group.attacks[0].method.reads
  found: list[View] = []
  targets: list[Target] = []
  stream = group.streams.named('control')
  for adaptive in attackers:
    made = adaptive.views(upload)
    for number in range(-1, group.settings.controls):
      views = made if number < 0 else [noise_like(jax.random.fold_in(stream, number), v) for v in made]
      views = [_without_missing(view, update) for view in views]
      places = tuple(range(len(found), len(found) + len(views)))
      address = max(number, 0)
      targets.append(Target(-1 if number >= 0 else 0, adaptive, reads, 0, address, 0, places))
      found.extend(views)
  return Views(stack(found), targets)


def _without_missing(view: View, update: Tree) -> View:
  """Returns the same view without the tensors that are zero throughout: they were not sent, or say next to nothing."""
  weights = jax.tree.map(lambda w, u: w if np.any(u) else np.zeros_like(w), view.weights, update)
  return view._replace(weights=weights)


def _mismatches(
  group: Group, update: Tree, made: lanes.Table, found: Reconstruction, size: int, targets: np.ndarray | None = None
) -> np.ndarray:
  """Returns the `Mismatch` of each lane, float [lanes]; NaN where labels are not known or nothing is found.

  An auditor knows the targets of the samples, [1, B, …].
  """
  number, samples, labels = group.settings.batch_size, np.asarray(found.samples), np.asarray(found.labels)
  unknown = np.full(len(samples), np.nan, np.float32)
  if samples.shape[1] < number:
    return unknown
  rule, kind, given = '', group.client.loss.targets, group.settings.labels == 'known'
  if targets is not None:
    labels = np.repeat(targets, len(samples), axis=0)
  elif not group.scenario.one_class or (given and np.issubdtype(group.targets.dtype, np.floating)):
    if kind is not SAMPLES and not given:
      return unknown
    labels = np.repeat(group.targets, len(samples), axis=0)
  elif labels.shape[1] >= number:
    labels = labels[:, :number]
  elif number == 1:  # a closed form that returns no label: it is given, or read from the update
    labels = np.repeat(group.targets, len(samples), axis=0)
    if not given:
      rule = rule_without_bias(group.scenario, update, number) or 'bias_corrected'
  if rule == 'optimised' or labels.shape[1] < number:  # nothing tells the label
    return unknown
  arrays = {
    **made.arrays,
    'samples': jnp.asarray(samples[:, :number]),
    'labels': jnp.asarray(kind.kept(labels)),
  }
  answered = made.num_steps > 0 or ~np.stack([group.client.modality.empty(lane).all() for lane in samples])
  try:
    apart = driver.evaluate(Mismatch(made.build, rule), made.shared, arrays, Layout(size))
    return np.where(answered, np.asarray(apart), unknown)
  except errors.UsageError:  # no layer that tells the label
    if not rule:
      raise
    return unknown


def rule_without_bias(scenario: Scenario, update: Tree, number: int) -> str:
  """Returns how labels are inferred where the bias of the classifying layer is missing or zero; '' for any other.

  Adapters (`models.lora`) tell no label.
  """
  client = scenario.client
  if not scenario.one_class:
    return ''
  if lora.BASE in scenario.variables:
    return 'optimised'
  try:
    kernel, bias = label_rules.last_layer(client.model, update, scenario.samples.shape[1:], client.num_classes)
  except errors.UsageError:  # the model has no such layer
    return ''
  if bias is not None and np.any(bias):
    return ''
  if not np.any(kernel) or number > client.num_classes:
    return 'optimised'
  return 'idlg' if number == 1 else 'yin'


def _part(
  group: Group,
  made: lanes.Table,
  found: Reconstruction,
  apart: np.ndarray,
  greys: np.ndarray,
  private: np.ndarray | None = None,
) -> Part:
  """Returns what is stored of one structure: of each attacker its best start, and those of its controls."""
  best: dict[tuple[int, str], dict[int, int]] = {}
  far = kept_distance(found.distance, found.diverged_step)
  for lane, (variant, target, _, _) in enumerate(made.lanes):
    runs = best.setdefault((variant, target.adaptive.name), {})
    number = target.address if target.defense < 0 else -1
    if number not in runs or far[lane] < far[runs[number]]:
      runs[number] = lane
  rows, arrays = [], {}
  for i, ((variant, _), runs) in enumerate(best.items()):
    own, controls = runs.pop(-1), [runs[number] for number in sorted(runs)]
    shown = min(group.settings.batch_size, found.samples.shape[1])
    others = found.samples[controls]
    kind = group.client.modality
    likeness, among = _likeness(kind, found.samples[own][:shown], others, shown)
    adaptive = made.lanes[own].target.adaptive
    known = dataclasses.replace(
      granted.knowledge(group, made.variants[variant].method),
      defense='unknown' if adaptive is NON_ADAPTIVE else 'known',
    )
    rows.append(
      {
        'attack': group.attacks[0].label,
        'adaptive': None if adaptive is NON_ADAPTIVE else adaptive.name,
        'does': adaptive.words,
        'granted': known.in_words(),
        'labels_mode': known.labels,
        **{name: float(getattr(found, name)[own]) for name in ('objective', 'objective_start', 'distance')},
        'mismatch': float(apart[own]),
        'grey': float(greys[own]),
        'diverged': int(found.diverged_step[own]) >= 0,
        'steps': 0 if made.on_host else made.num_steps,
        'likeness': likeness,
        'control_likeness': among,
        'at_truth': float('nan') if private is None else float(private[own]),
      }
    )
    kept = {
      'samples': found.samples[own],
      'empty': kind.empty(found.samples[own]),
      'labels': found.labels[own],
      'control_objective': found.objective[controls],
      'control_distance': found.distance[controls],
      'control_mismatch': apart[controls],
      'control_samples': others[:SHOWN_CONTROLS],
    }
    arrays |= {f'{i}/{name}': np.asarray(array) for name, array in kept.items()}
  return rows, arrays


def _likeness(kind: Modality, samples: np.ndarray, controls: np.ndarray, shown: int) -> tuple[float, float]:
  """Returns (the highest likeness to any control's samples, mean over the samples; the same among controls)."""
  if not len(controls):
    return float('nan'), float('nan')

  def like(some: np.ndarray, others: np.ndarray) -> float:
    return float(np.max(kind.likenesses(some, others.reshape(-1, *others.shape[2:])), axis=1).mean())

  others = enumerate(controls) if len(controls) > 1 else ()
  among = [like(one[:shown], np.delete(controls, i, axis=0)) for i, one in others]
  return like(samples, controls), float(np.median(among or [np.nan]))
