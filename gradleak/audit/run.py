"""Runs an audit: the only place that holds a work directory, a progress bar and the share of the work."""

import dataclasses
import functools
import json
import pathlib
import platform
import re
import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from gradleak.audit import granted, schema, sequential
from gradleak.audit.group import Group
from gradleak.audit.labelled import Labelled, text
from gradleak.audit.lanes import (
  Key,
  Planned,
  Table,
  Variant,
  expected,
  label,
  lowered,
  pieces,
  planned,
  run,
  shown,
  structures,
  table,
)
from gradleak.audit.plan import Plan, plan
from gradleak.audit.result import AuditResult, result
from gradleak.audit.scores import Part, judged, kept, keys_of, scored
from gradleak.audit.settings import AuditSettings
from gradleak.audit.uploads import Uploads, uploads
from gradleak.audit.verdict import CONTROL
from gradleak.audit.views import Views, called, views
from gradleak.core import errors
from gradleak.core.locks import alone
from gradleak.core.settings import paired
from gradleak.core.storage import (
  Caution,
  Workdir,
  append_time,
  damaged,
  description,
  json_lines,
  packed,
  plain,
  read_json,
  read_json_lines,
  seal,
  sealed,
  seconds_of_parts,
  times_of_parts,
  unpacked,
  write_atomically,
)
from gradleak.core.version import VERSION
from gradleak.engine import driver, memory
from gradleak.engine.ahead import Ahead
from gradleak.engine.execution import Execution
from gradleak.engine.parts import told
from gradleak.engine.progress import callback, computing, end, note
from gradleak.federated.scenario import Scenario

GROWS = {'attacks': 'attack_texts', 'defenses': 'defense_texts'}  # what may be added to a finished work directory
EXTENDS = ('only',)  # likewise
TIMES = 'timing.jsonl'
RESULT = 'result.json'  # seals what stands beside it
FACTS = (
  'threat_models',
  'adaptive_attacks',
  'inspections',
  'methods',
  'versions',
  'seconds',
)  # fields that result.json holds
AHEAD = 2  # structures that are compiled while one runs


def audit(
  key: Any,
  scenario: Scenario,
  defenses: Any,
  attacks: Any,
  num_trials: int,
  *,
  settings: AuditSettings | None = None,
  workdir: Any = None,
  execution: Execution | None = None,
  only: Mapping[str, Sequence[int]] | None = None,
  progress: str | Callable = 'auto',
  **changes: Any,
) -> AuditResult | None:
  """Attacks what a client would send, with and without defenses, and measures what comes back.

  Args:
    key: a typed JAX key; the same key, settings and micro-group size give the same rows, bit for bit.
    scenario: what is audited, see `gradleak.scenario`.
    defenses: a list of `gradleak.defenses`, None for no defense; or a dict {label: defense}, no defense being 'none'.
      A transformation of your own is wrapped by `defenses.wrap`.
    attacks: of `gradleak.attacks` or `gradleak.servers`, or functions of a `Client` that return an `Attack`; likewise.
    num_trials: T; trial t attacks one upload on the t-th batch of the scenario's samples. With `decide` or `within`,
      the most: the trials of a defense stop once the question is decided, see `audit.sequential`.
    settings: `AuditSettings`; each of them may also be given as a keyword argument: batch_size, restarts, steps,
      labels, controls, knowledge, rounds, adaptive_attacks, decide, within, level, error_rate.
    workdir: a folder for results and checkpoints; a run that was killed goes on where it stopped. Attacks and
      defenses of your own are known to it by their labels and versions; networks, losses and optimizers by what they
      compute. Defenses and attacks may be added to a finished one: what is there is not run again.
    execution: an `Execution`; its fields may also be given as keyword arguments: group_size, process, shards, split.
    only: label of a defense -> the trials to attack under it; others are left out. None attacks all.
    progress: 'auto', 'bar', 'lines' or 'none', see `engine.progress`; or a function that is called with (attack,
      `driver.Progress`, the first defense's objectives) after each chunk.
    **changes: fields of `AuditSettings` and of `Execution`.

  Returns:
    An `AuditResult`; with a `workdir`, its rows and arrays also stand there. None while parts of other processes are
    missing.

  Raises:
    UsageError: for settings that cannot be run, before anything is compiled or written.
  """
  if isinstance(changes.get('adaptive_attacks'), list):
    changes['adaptive_attacks'] = tuple(changes['adaptive_attacks'])
  given, how = paired('gradleak.audit', changes, settings=(AuditSettings, settings), execution=(Execution, execution))
  made = plan(key, scenario, defenses, attacks, num_trials, given, only)
  how.check('gradleak.audit', num_trials, workdir)
  _check_shared(given, how, workdir)
  show = callback(progress)
  several, split = how.process[1] > 1, how.split
  speed = {'group_size': how.size(scenario.variables, given.batch_size), 'shards': how.shards or how.process[1]}
  with alone(workdir if not split or jax.process_index() == 0 else None, how.process):
    store = None if workdir is None else Workdir(workdir, made.config, speed, several, split, GROWS, EXTENDS)
    speed = speed if store is None else {'shards': 1, **store.speed}
    memory.release_programs()
    worker = _Worker(store, speed['group_size'], how.group_size is None, split, show)
    try:
      found, seconds = worker.decided(made) if given.sequential else worker.shared(made, how.process, speed['shards'])
    finally:
      worker.ahead.close()
      end(show)
    if found is None:
      return None
    took = sum(seconds) if store is None else seconds_of_parts(store.path / TIMES)
    outcome = result(made, found, versions_of_parts(store), took, not seconds)
    if store is not None and store.writes and not (outcome.resumed and _stands(store.path, 'it is written anew')):
      _write(store, outcome)
  return outcome


def planned_of(made: Plan) -> list[Planned]:
  """Returns what a `Plan` runs: one `Planned` per compilation."""
  return [each for group in made.groups for each in planned(group)]


def versions() -> dict[str, str]:
  """Returns what a result was made with."""
  device = jax.devices()[0]
  return {
    'gradleak': VERSION,
    'jax': jax.__version__,
    'python': platform.python_version(),
    'platform': platform.platform(),
    'device': f'{jax.device_count()} × {device.device_kind}',
  }


def versions_of_parts(store: Workdir | None) -> dict[str, str]:
  """Returns what the parts of a work directory were made with, see `joined`; `versions` where nothing says that."""
  return {**versions(), **joined([] if store is None else times_of_parts(store.path / TIMES))}


def joined(several: Iterable[Mapping[str, Any]]) -> dict[str, str]:
  """Returns `versions` of several parts or results as one: where they differ all of them, joined by commas."""
  found: dict[str, dict[str, None]] = {name: {} for name in versions()}
  for one in several:
    for name in found.keys() & one.keys():
      found[name] |= dict.fromkeys(str(one[name]).split(', '))
  return {name: ', '.join(values) for name, values in found.items() if values}


class _Worker:
  """Runs the parts of this process: it alone knows the work directory, the group size and the progress bar."""

  def __init__(self, store: Workdir | None, size: int, fit: bool, split: bool, progress: Callable | None):
    self.store, self.fit, self.split, self.progress = store, fit, split, progress
    # Uploads keep their group size, and so their bits, also where an attack's must shrink to fit the memory.
    self.size = size
    self.attack_size = store.speed.get('attack_group_size', size) if store else size
    self.ahead = Ahead()
    self.looks: dict[str, list[Part]] = {}  # of a sequential audit, what ran
    self.learned: dict[str, Any] = {}  # likewise, what attacks learned before they ran
    self.rooms: dict[str, tuple[int, int]] = {}  # likewise, lanes and views of the widest look

  def shared(self, made: Plan, process: tuple[int, int], shards: int) -> tuple[list[list[Part]] | None, list[float]]:
    """Returns the parts of each structure, None while other processes have not done theirs; and seconds."""
    parts, seconds = self.work(made, range(process[0], shards, process[1]), shards)
    return self.collected(made, parts, shards), seconds

  def decided(self, made: Plan) -> tuple[list[list[Part]], list[float]]:
    """Returns the parts of each structure, trials run look by look until each defense has its answer; and seconds."""
    question = sequential.Question.of(made.config)
    assert question is not None
    undefended = {label for label, bound in made.groups[0].defenses if not bound.defense.stages}
    rows: list[dict] = []
    seconds: list[float] = []
    found: list[list[Part]] = []
    trials: dict[str, frozenset[int]] = {}
    while (needed := sequential.further(rows, question, made.defenses, undefended)) != trials:
      trials = needed
      look = made._replace(groups=[dataclasses.replace(group, only=trials) for group in made.groups])
      parts, new = self.work(look, range(1), 1)
      self.looks |= parts
      seconds += new
      found = self.collected(look, parts, 1) or []  # this is the only process
      rows = [row for of_structure in found for row in judged(of_structure)]
    return found, seconds

  def work(self, made: Plan, shares: range, count: int) -> tuple[dict[str, list[Part]], list[float]]:
    """Returns the parts of these shares by name, and the seconds of those that were run now."""
    found, seconds = {}, []
    for index in shares:
      work = [
        _Work(name, which, variants, self.load(name)).with_missing(made.groups[which], index, count)
        for name, which, variants in _parts(made, index, count)
        if name
      ]
      seen = functools.cache(functools.partial(self._seen, made, work, index, count))
      found |= {one.name: one.parts for one in work}
      missing = [one for one in work if one.missing]
      tables: dict[str, list[tuple[_Work, Table]]] = {}
      for i, one in enumerate(missing):
        started = time.monotonic()
        group, sent, viewed = seen(one.which)
        for later in missing[i : i + 1 + AHEAD]:
          if later.name not in tables and later.which == one.which and (later is one or not later.learns):
            tables[later.name] = self._compiling(later, group, viewed)
        for piece, made_table in tables.pop(one.name):
          title = f'{one.name}+{len(found[one.name])}' if found[one.name] else one.name
          part = self._attacked(title, piece, group, sent, made_table)
          seconds.append(time.monotonic() - started)
          started = time.monotonic()
          found[one.name] = [*found[one.name], part]
          if self.store is not None:
            self.store.save_part(title, *part)
            if self.store.writes:
              append_time(self.store.path / TIMES, part=title, seconds=seconds[-1], **versions())
    return found, seconds

  def collected(self, made: Plan, parts: dict[str, list[Part]], shards: int) -> list[list[Part]] | None:
    """Returns the parts of each structure, those of other processes included; None while one is missing."""
    found = []
    for shares in zip(*(_parts(made, index, shards) for index in range(shards)), strict=True):
      of_structure = [parts.get(name) or self.load(name) for name, *_ in shares if name]
      if not all(of_structure):
        return None
      _, which, variants = shares[0]
      group = made.groups[which]
      wanted = expected(group, variants, *_share(group, 0, 1))
      # A folder that has grown may hold trials of later looks, and under one name attacks that no name tells apart.
      several = [kept(part, wanted) for each in of_structure for part in each]
      if {key for part in several for key in keys_of(part)} != wanted:
        return None
      found.append([part for part in several if part[0]])
    return found

  def load(self, name: str) -> list[Part]:
    """Returns what is stored of a part: as it was first run, and what was added to it later; empty if nothing is."""
    if name in self.looks:
      return self.looks[name]
    parts: list[Part] = []
    while self.store is not None:
      part = self.store.load_part(f'{name}+{len(parts)}' if parts else name)
      if part is None:
        break
      parts.append(part)
    return parts

  def _note(self, text: str) -> None:
    note(self.progress, text)

  def _seen(self, made: Plan, work: list, index: int, count: int, which: int) -> tuple[Group, Uploads, Views]:
    """Returns the uploads and views of a group on one share, for all that is missing there, and the group of those."""
    missing = {key for one in work if one.which == which for key in one.missing}
    labels = {defense for _, defense, _, _ in missing}
    group = made.groups[which]
    trials, controls = _share(group, index, count)
    known = {called(one.label) for one in group.defenses}
    # Where only control runs are missing, one trial and all defenses stay.
    needed = np.intersect1d(trials, [trial for _, label, _, trial in missing if label in known])
    trials = needed if len(needed) else trials[:1]
    if not group.settings.sequential:  # there all stay: the programs and the bits of a look are those of the others
      controlled = CONTROL in labels  # control runs may bear the noise of a defense that is not attacked here
      defenses = tuple(
        one
        for one in group.defenses
        if called(one.label) in labels or (controlled and granted.known_noise(group, one.method))
      )
      group = dataclasses.replace(group, defenses=defenses or group.defenses)
    controls = controls if CONTROL in labels else controls[:0]
    self._note('compiling and computing the uploads …')
    with told(computing(self.progress, 'computing the uploads')):
      sent = uploads(group, trials, controls, self.size)
    return group, sent, views(group, sent)

  def _compiling(self, work: '_Work', group: Group, seen: Views) -> list[tuple['_Work', Table]]:
    """Returns what is missing of one structure with its table, whose programs begin to be compiled.

    It is cut into several, by trials, where the memory does not hold the states of all; each is stored once it is done.
    """
    variants, learned = work.variants, self.learned.get(work.name)
    if variants[0].method.learns and learned is None:
      through = variants[0].change.simulates
      met = '' if through is None else f' under {through}'
      self._note(f'{label(group, variants)} learns from the public data{met} …')
    with told(computing(self.progress, label(group, variants))):
      made = table(group, seen, variants, work.missing, learned)
    if group.settings.sequential:
      self.learned[work.name] = made.shared['prepared']
      lanes, views_ = self.rooms.get(work.name, (0, 0))
      made = made.at_least(lanes, views_)
      self.rooms[work.name] = max(lanes, len(made.lanes)), jax.tree.leaves(made.shared['views'])[0].shape[0]
    if self.split:  # all processes must cut alike
      return [(work, made)]
    known = None if self.store is None else self.store.speed.get(f'rows_of_{work.name}')
    rows = known or -(-len(work.missing) // pieces(made, self.attack_size))
    cut = [(work._replace(missing=keys), made) for keys in work.cut(rows)]
    if len(cut) > 1:
      if self.store is not None:  # after a stop it is cut alike, so that the checkpoint of a part is found
        self.store.record_speed(**{f'rows_of_{work.name}': rows})
      self._note(f'{label(group, work.variants)} runs in {len(cut)} parts: the memory does not hold all at once')
      tables = [table(group, seen, work.variants, one.missing, made.shared['prepared']) for one, _ in cut]
      room = max(len(one.lanes) for one in tables)
      cut = [(one, small.at_least(room, 0)) for (one, _), small in zip(cut, tables, strict=True)]
    self.ahead.start(work.name, functools.partial(lowered, group, cut[0][1], self.attack_size, self.size))
    return cut

  def _attacked(self, name: str, work: '_Work', group: Group, sent: Uploads, made: Table) -> Part:
    """Runs what is missing of one structure, or goes on from its checkpoint; returns the scored part."""
    title, mask = label(group, work.variants), shown(made)
    wanted = zlib.crc32(json.dumps(sorted(work.missing)).encode())  # others, where the folder has grown since
    name = f'{name}-{wanted:08x}'
    checkpoint = self.store and self.store.load_checkpoint(name)
    resume = None
    if checkpoint:
      step, (steps, curve, *leaves) = checkpoint
      resume = step, (steps, curve), leaves

    def save(progress: driver.Progress, curve: tuple[list, list], **due: bool) -> None:
      if self.store is not None and not progress.done:
        so_far = [np.asarray(each) for each in curve]
        self.store.save_checkpoint(name, progress.step, lambda: (*so_far, progress.states), **due)

    def on_chunk(progress: driver.Progress, curve: tuple[list, list]) -> None:
      if progress.group_size != self.attack_size:
        self.attack_size = progress.group_size
        if self.store is not None:
          self.store.record_speed(attack_group_size=self.attack_size)
      if self.progress is not None:
        self.progress(title, progress, progress.objective[mask])
      save(progress, curve)

    self._note(f'compiling {title} …')
    self.ahead.wait(work.name)
    found = run(
      group,
      made,
      self.attack_size,
      fit=self.fit,
      split=self.split,
      resume=resume,
      on_chunk=on_chunk,
      on_failure=functools.partial(save, due=True),
      evaluation_size=self.size,
    )
    return scored(group, sent, found)


def _parts(made: Plan, index: int, count: int) -> list[tuple[str, int, list]]:
  """Returns (name of the part, index of the group, variants) of each structure; each share has its own.

  The name depends on the methods only, so that it stays the same where others are added to the audit. Structures that
  no name tells apart are numbered, and each takes of a part what is its own. It is '' where this share has nothing to
  run.
  """
  share = '' if count == 1 else f'-{index}of{count}'
  found, names = [], []
  for which, group in enumerate(made.groups):
    for variants in structures(group):
      everywhere = expected(group, variants, *_share(group, 0, 1))
      if not everywhere:
        continue  # none of its trials is attacked
      name = _name(group, variants[0])
      names.append(name)
      name = f'{name}-{names.count(name)}' if name in names[:-1] else name
      here = everywhere if count == 1 else expected(group, variants, *_share(group, index, count))
      found.append((f'{name}{share}' if here else '', which, variants))
  return found


def _name(group: Group, variant: Variant) -> str:
  """Returns the name of the part of a structure, by one of its variants."""
  method, simulates = variant.method, variant.change.simulates
  told: dict[str, Any] = dict(method.static)
  if simulates is not None:
    told['learns' if method.adaptive else 'simulates'] = text(Labelled('', simulates))
    told |= {'of': variant.own} if variant.own else {}
  if method.label and not method.factory.__module__.startswith('gradleak.'):  # a function, whose settings are not known
    told |= {'label': group.attacks[variant.attack].label, 'reads': sorted(method.reads), 'rule': method.label_rule}
  word = re.sub(r'\W', '_', method.name)  # a user may call an attack 'mine/new'
  return f'{word}-{zlib.crc32(json.dumps(told, sort_keys=True, default=str).encode()):08x}'


class _Work(NamedTuple):
  """One structure on one share: its name, group and variants, the parts that are there and the rows that are not."""

  name: str
  which: int
  variants: list
  parts: list[Part]
  missing: frozenset[Key] = frozenset()

  @property
  def learns(self) -> bool:
    """Whether its attack learns something before it runs: this has its turn, and is not done ahead."""
    return self.variants[0].method.prepare is not None

  def cut(self, rows: int) -> list[frozenset[Key]]:
    """Returns the missing rows in parts of so many at most, each of some trials and control runs."""
    ordered = sorted(self.missing, key=lambda key: (key[3], key))
    return [frozenset(ordered[first : first + rows]) for first in range(0, len(ordered), rows)]

  def with_missing(self, group: Group, index: int, count: int) -> '_Work':
    """Returns the same with the rows that no part has."""
    known = {key for part in self.parts for key in keys_of(part)}
    return self._replace(missing=frozenset(expected(group, self.variants, *_share(group, index, count)) - known))


def _share(group: Group, index: int, count: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns the trials and the control runs of one share: every count-th from the index-th on."""
  trials, controls = (np.arange(number)[index::count] for number in (group.num_trials, group.settings.controls))
  return trials, controls


def _check_shared(given: AuditSettings, how: Execution, workdir: Any) -> None:
  """Raises `UsageError` for work that cannot be shared in this way."""
  several = how.process[1] > 1
  if given.sequential and (several or (how.shards or 1) > 1 or how.split):
    raise errors.UsageError(
      'decide and within stop the trials by what all of them show, and processes that share the work do not see each '
      'other: run one process per audit, or a fixed number of trials'
    )
  if not how.split and jax.process_count() > 1 and workdir is not None:
    raise errors.UsageError(
      'jax.distributed joins these processes: share the samples of each upload among them (split=True), or start '
      'processes that do not know of each other'
    )
  if how.split and several:
    raise errors.UsageError('processes share either trials or the samples of each: take process= or split=, not both')
  if how.split and given.batch_size % jax.device_count():
    raise errors.UsageError(
      f'{given.batch_size} samples behind one upload cannot be shared evenly by {jax.device_count()} devices'
    )


def _write(store: Workdir, outcome: AuditResult) -> None:
  """Writes what `load` reads, from the parts alone; result.json comes last, with the settings that all of it is of."""
  facts = {name: getattr(outcome, name) for name in FACTS}
  curves = {
    json.dumps([*case, name]): array
    for case, steps_and_objective in outcome.curves.items()
    for name, array in zip(('steps', 'objective'), steps_and_objective, strict=True)
  }
  reconstructions = {json.dumps(case, ensure_ascii=False): samples for case, samples in outcome.reconstructions.items()}
  contents: dict[str, str | bytes] = {
    'rows.jsonl': json_lines(outcome.rows),
    'controls.jsonl': json_lines(outcome.controls),
    'reconstructions.npz': packed({'truth': outcome.truth, **reconstructions}),
    'curves.npz': packed(curves),
  }
  for name, content in contents.items():
    write_atomically(store.path / name, content)
  found = {'config': plain(outcome.config), **plain(facts, finite=False)}
  seal(store.path / RESULT, found, {name: description(content) for name, content in contents.items()})


def _stands(folder: pathlib.Path, advice: str) -> dict[str, Any] | None:
  """Returns the facts of a result that is whole and of the settings in config.json; None if it is unfinished.

  A `Caution` says where a file is not as it was written.
  """
  try:
    return _facts(folder, advice)
  except errors.UsageError as error:
    warnings.warn(str(error), Caution, stacklevel=3)
    return None


def _facts(folder: pathlib.Path, advice: str) -> dict[str, Any] | None:
  """Returns the content of result.json; None if a file is missing, or it is not of the settings in config.json.

  Raises:
    UsageError: if a file is not as it was written; names it, what differs, and the advice.
  """
  try:
    config = read_json(folder / 'config.json', 'choose another folder', dict)
    known = read_json(folder / RESULT, advice, dict)
    return sealed(folder / RESULT, advice) if known.get('config') == config else None
  except FileNotFoundError:
    return None


def load(workdir: Any) -> AuditResult:
  """Returns the result of a finished audit from its work directory.

  Args:
    workdir: the folder that `audit` was given.

  Raises:
    UsageError: if the folder holds no finished audit of this version, or a damaged file.
  """
  folder = errors.check_path('workdir', workdir)
  anew = 'run the audit with this workdir again, which writes it anew from its parts, or restore it'
  found = _facts(folder, anew)
  if found is None:
    inside = sorted(place.parent for place in folder.glob('*/curves.npz'))
    raise errors.UsageError(
      f'{workdir} holds no finished audit of this version: '
      + (
        f'its folders do, such as {str(inside[0])!r}'
        if inside
        else f'run the audit with workdir={str(workdir)!r}, which computes only what is missing, and load it then'
      )
    )
  try:
    rows, controls = (
      [schema.check(row) for row in read_json_lines(folder / name, anew)] for name in ('rows.jsonl', 'controls.jsonl')
    )
    samples, curves = (_named(unpacked(folder / name, anew)) for name in ('reconstructions.npz', 'curves.npz'))
    cases = dict.fromkeys(case[:-1] for case in curves)
    return AuditResult(
      config=found['config'],
      rows=rows,
      controls=controls,
      truth=samples.pop(('truth',)),
      reconstructions=samples,
      curves={case: (curves[*case, 'steps'], curves[*case, 'objective']) for case in cases},
      **{name: found[name] for name in FACTS},
      resumed=True,
    )
  except errors.UsageError:
    raise
  except (OSError, KeyError, TypeError, ValueError) as error:
    raise damaged(f'a file in {workdir}', error, anew) from error


def _named(arrays: dict[str, np.ndarray]) -> dict[tuple[str, ...], np.ndarray]:
  """Returns {name: array} of arrays whose names are JSON lists, and 'truth'."""
  return {('truth',) if name == 'truth' else tuple(json.loads(name)): array for name, array in arrays.items()}
