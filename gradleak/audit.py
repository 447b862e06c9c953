"""The main job: scenario × defenses × attacks × trials → rows."""

import functools
import io
import platform
import re
import time
import zlib
from typing import NamedTuple

import jax
import numpy as np

import gradleak
from gradleak import defenses as defense_names
from gradleak import errors, metrics
from gradleak.attacks import registry as attack_names
from gradleak.attacks.labels import RULES
from gradleak.defenses import registry as defense_registry
from gradleak.engine import driver
from gradleak.federated import knowledge as grants
from gradleak.inspection import inspect
from gradleak.progress import reporter
from gradleak.storage import Workdir, json_lines, plain, write_atomically
from gradleak.trials import Settings, Trials, words
from gradleak.verdict import credit_no_failure, judge

KNOWLEDGE = ('unaware', 'aware', 'both')
_INSPECTED = 32  # images of the client's own, which its check of the model looks at
RENDERED = ('rows.jsonl', 'controls.jsonl', 'reconstructions.npz')


class Run(NamedTuple):
  """What an audit runs.

  Attributes:
    attacks: the names of all attacks, in the order they were listed.
    members: `Trials` of the attacks whose server sends the same model, honest ones and then each malicious one's.
  """

  attacks: list
  members: list

  def plan(self):
    """Returns what is to run, a list of `trials.Planned`: one per structure."""
    return [planned for trials in self.members for planned in trials.plan()]


class AuditResult(NamedTuple):
  """Everything an audit found; T trials of B images.

  Attributes:
    config: the scientific settings, plain JSON.
    rows: one dict per attack × defense × counter-measure × trial, plain JSON values; None for what a diverged trial has
      not.
    controls: one dict per attack × control run, same keys.
    truth: the private images [T, B, H, W, C].
    reconstructions: (attack, defense) or, of an attacker who knows it, (attack, defense, counter) -> [T, B, H, W, C],
      matched to the truth; NaN where a trial diverged.
    curves: same keys -> (steps [K], objective [T, K]) of the restarts chosen.
    threat_models: attack -> sentences that say what this attacker was granted.
    counters: defense -> {counter: what an attacker who knows it does, in a sentence}.
    inspections: attack -> sentences of a client's check of the model that the attack's server sends
      (`gradleak.inspect`): what is suspicious, none if nothing is; None for a model that the check cannot read.
    versions: of gradleak, JAX, Python, and the hardware.
    seconds: wall time of the runs behind it.
    resumed: whether all of it was found on disk.
  """

  config: dict
  rows: list
  controls: list
  truth: np.ndarray
  reconstructions: dict
  curves: dict
  threat_models: dict
  counters: dict
  inspections: dict
  versions: dict
  seconds: float
  resumed: bool


def audit(
  key,
  scenario,
  defenses,
  attacks,
  num_trials,
  *,
  batch_size=1,
  restarts=1,
  steps=None,
  labels='auto',
  controls=64,
  knowledge='unaware',
  rounds=1,
  counters=None,
  workdir=None,
  group_size=None,
  process=(0, 1),
  shards=None,
  split=False,
  progress='auto',
):
  """Attacks what a client would send, with and without defenses, and measures what comes back.

  Args:
    key: a typed JAX key; the same key, settings and micro-group size give the same rows, bit for bit.
    scenario: what is audited, see `gradleak.scenario`.
    defenses: a list of texts such as 'none' or 'clip(norm=1)+gaussian(stddev=0.01)', or a dict that maps names to
      texts or to optax transformations of your own.
    attacks: a list of texts such as 'csdlg(tv=1e-6)', or a dict that maps names to texts or to functions of a `Client`
      that return an `Attack`.
    num_trials: T; trial t attacks one upload on the t-th batch of the scenario's images.
    batch_size: B, images behind one upload.
    restarts: starts per trial; the one of the least matching distance is chosen, without looking at the truth.
    steps: steps of every attack that does not set its own.
    labels: 'auto' (as each attack was published), 'known', 'inferred', 'optimised', or the name of a label rule.
    controls: null-gradient runs per attack that define success.
    knowledge: 'unaware' (attackers who take what was sent for a gradient), 'aware' (who know the defense and its
      settings, see `attacks.adaptive`), or 'both', side by side.
    rounds: uploads of the same samples on the same model that an aware attacker averages.
    counters: names of the counter-measures to try, such as ['masked', 'muted']; None tries all that are known.
    workdir: a folder for results and checkpoints; a run that was killed goes on where it stopped. Functions and
      transformations of your own are known to it by their names alone.
    group_size: trials that share one pass; None takes a measured default, or what the memory holds. It changes speed,
      and bits.
    process: (rank, number) of this process among several that share the work and the work directory. They need not know
      of each other: one that dies is started again alone.
    shards: into how many parts the trials are cut, at least as many as processes and at most as many as trials; None
      makes it as many as processes.
    split: whether devices share the images of each upload, in place of trials: for a batch that is too large for one.
      With `jax.distributed`, those of all its processes do, which then make this same call and see the same work
      directory; the first one writes. When one dies, all do, and are started again together.
    progress: 'auto', 'bar', 'lines' or 'none', see `gradleak.progress`; or a function that is called with (attack,
      `driver.Progress`, the first defense's objectives) after each chunk.

  Returns:
    An `AuditResult`; with a `workdir`, its rows and arrays also stand there. None while parts of other processes are
    missing.

  Raises:
    UsageError: for settings that cannot be run, before anything is compiled or written.
  """
  run = prepare(
    key,
    scenario,
    defenses,
    attacks,
    num_trials,
    batch_size=batch_size,
    restarts=restarts,
    steps=steps,
    labels=labels,
    controls=controls,
    knowledge=knowledge,
    rounds=rounds,
    counters=counters,
  )
  defended = run.members[0].settings.defenses
  progress = reporter(progress) if isinstance(progress, str) else progress
  fit = group_size is None
  if fit:
    group_size = driver.default_group_size(scenario.variables, batch_size)
  errors.check_number('group_size', group_size, low=1, integer=True)
  config = {
    **scenario.settings,
    'attacks': run.attacks,
    'defenses': [defense.name for defense in defended],
    'trials': num_trials,
    'restarts': restarts,
    'steps': steps,
    'batch_size': batch_size,
    'labels': labels,
    'controls': controls,
    'knowledge': knowledge,
    **({'rounds': rounds} if rounds > 1 else {}),
    **({'counters': list(counters)} if counters is not None else {}),
    **_texts(attack=attacks, defense=defenses),
    'key': np.asarray(jax.random.key_data(key)).tolist(),
  }
  _check_process(process, shards, num_trials, workdir)
  _check_split(split, process, batch_size, workdir)
  shards = shards or process[1]
  speed = {'group_size': group_size, 'shards': shards}
  store = None if workdir is None else Workdir(workdir, config, speed, shared=process[1] > 1, together=split)
  if store is not None:
    group_size, shards = store.speed['group_size'], store.speed.get('shards', 1)

  attack_group_size = store.speed.get('attack_group_size', group_size) if store else group_size
  for trials in run.members:
    trials.group_size, trials.attack_group_size, trials.fit = group_size, attack_group_size, fit
    trials.store, trials.progress, trials.split = store, progress, split
  rank, processes = process
  seconds, parts = [], {}
  for index in range(rank, shards, processes):
    shares = [trials.share(index, shards) for trials in run.members]
    for name, which, group in _work(run, index, shards):
      part = store and store.load_part(name)
      if part is None:
        started = time.monotonic()
        part = shares[which].attack(name, group)
        seconds.append(time.monotonic() - started)
        if store is not None:
          store.save_part(name, *part)
          if store.writes:
            _log_time(store, name, seconds[-1])
      parts[name] = part
  structures = []
  for names in zip(*([name for name, *_ in _work(run, index, shards)] for index in range(shards)), strict=True):
    found = [parts.get(name) or store.load_part(name) for name in names]
    if None in found:
      return None
    structures.append(found)
  result = _assemble(run, config, structures, sum(seconds), not seconds)
  if (
    store is not None
    and store.writes
    and not (result.resumed and all((store.path / name).exists() for name in RENDERED))
  ):
    _write(store, result)
  return result


def _check_process(process, shards, num_trials, workdir):
  rank, processes = process
  errors.check_number('number of processes', processes, low=1, high=num_trials, integer=True)  # each has a trial
  errors.check_number('rank of the process', rank, low=0, high=processes - 1, integer=True)
  if shards is not None:
    errors.check_number('shards', shards, low=processes, high=num_trials, integer=True)
  if processes > 1 and workdir is None:
    raise errors.UsageError(f'{processes} processes need a work directory that all of them see')


def _check_split(split, process, batch_size, workdir):
  if not split:
    if jax.process_count() > 1 and workdir is not None:
      raise errors.UsageError(
        'jax.distributed joins these processes: share the images of each upload among them (split=True), or start '
        'processes that do not know of each other'
      )
    return
  if process[1] > 1:
    raise errors.UsageError('processes share either trials or the images of each: take process= or split=, not both')
  if batch_size % jax.device_count():
    raise errors.UsageError(
      f'{batch_size} images behind one upload cannot be shared evenly by {jax.device_count()} devices'
    )


def _work(run, index, count):
  """Returns (name of the part, index of the `Run`'s member, group) of each structure; shares are told apart."""
  share = '' if count == 1 else f'-{index}of{count}'
  groups = [(which, group) for which, trials in enumerate(run.members) for group in trials.structures()]
  words = [re.sub(r'\W', '_', group[0][1].structure[0]) for _, group in groups]  # a user may name an attack 'mine/new'
  return [(f'{i:02}-{word}{share}', *work) for i, (word, work) in enumerate(zip(words, groups, strict=True))]


def _log_time(store, name, seconds):
  """Appends to timing.jsonl: times and versions stand apart from rows, which are the same whenever they are made."""
  with open(store.path / 'timing.jsonl', 'a', encoding='utf-8') as file:
    file.write(json_lines([{'part': name, 'seconds': seconds, **versions()}]))


def versions():
  """Returns what a result was made with."""
  device = jax.devices()[0]
  return {
    'gradleak': gradleak.__version__,
    'jax': jax.__version__,
    'python': platform.python_version(),
    'platform': platform.platform(),
    'device': f'{jax.device_count()} × {device.device_kind}',
  }


def prepare(
  key,
  scenario,
  defenses,
  attacks,
  num_trials,
  *,
  batch_size=1,
  restarts=1,
  steps=None,
  labels='auto',
  controls=64,
  knowledge='unaware',
  rounds=1,
  counters=None,
):
  """Returns the `Run` of an audit's settings, which `audit` explains; nothing is attacked yet.

  Raises:
    UsageError: for settings that cannot be run.
  """
  for name, value, low in (
    ('trials', num_trials, 1),
    ('batch_size', batch_size, 1),
    ('restarts', restarts, 1),
    ('controls', controls, 1),
    ('rounds', rounds, 1),
  ):
    errors.check_number(name, value, low=low, high=10**6, integer=True)
  if num_trials * batch_size > len(scenario.images):
    raise errors.UsageError(
      f'{num_trials} trials of {batch_size} images need {num_trials * batch_size}, the data has '
      f'{len(scenario.images)}; the most trials are {len(scenario.images) // batch_size}'
    )
  for kind, value, valid in (
    ('label mode', labels, ('auto', *grants.LABELS, *RULES)),
    ('knowledge', knowledge, KNOWLEDGE),
  ):
    if value not in valid:
      raise errors.unknown(kind, value, valid)
  attacks = _named(attacks, 'attack', functools.partial(attack_names.parse, steps=steps), attack_names.custom)
  counters = None if counters is None else tuple(counters)
  members = []
  for server in dict.fromkeys(template.server for template in attacks):
    sent = scenario
    if server is not None:
      sent = server.sends(jax.random.fold_in(key, zlib.crc32(b'server')), scenario, batch_size)
    context = defense_registry.Context(sent.client, sent.variables, sent.images.shape[1:], sent.public, sent.previous)
    parse = functools.partial(defense_names.parse, context=context)
    settings = Settings(
      _named(defenses, 'defense', parse, defense_registry.custom),
      [template for template in attacks if template.server == server],
      num_trials,
      batch_size,
      restarts,
      controls,
      labels,
      knowledge,
      rounds,
      counters,
    )
    members.append(Trials(key, sent, context, settings))
    for template in settings.attacks:
      members[-1].check(template)
  return Run([template.name for template in attacks], members)


def _named(entries, kind, parse, custom):
  """Returns the parsed entries of a list of texts, or of a dict of names to texts or objects."""
  if isinstance(entries, str):
    entries = [entries]
  pairs = list(entries.items()) if isinstance(entries, dict) else [(None, entry) for entry in entries]
  if not pairs:
    raise errors.UsageError(f'no {kind} is given')
  parsed = []
  for name, entry in pairs:
    if name is None and not isinstance(entry, str):
      raise errors.UsageError(f'{kind}s of your own need names: give a dict {{name: {kind}}}, not a list')
    item = parse(entry) if isinstance(entry, str) else custom(name, entry)
    parsed.append(item if name is None else item._replace(name=name))
  names = [item.name for item in parsed]
  for name in names:
    if names.count(name) > 1:
      raise errors.UsageError(f'the {kind} {name!r} is listed twice')
  return parsed


def _texts(**entries):
  """Returns what names that a user gave to texts stand for: without it, a changed text would be no changed setting."""
  texts = {
    f'{kind}_texts': {name: text for name, text in named.items() if isinstance(text, str)}
    for kind, named in entries.items()
    if isinstance(named, dict)
  }
  return {key: value for key, value in texts.items() if value}


def _judged(parts):
  """Returns the rows of one structure's parts, judged by the control runs of the same job in all of them."""
  jobs = np.concatenate([arrays['job'] for _, arrays in parts])
  rows = [row for part, _ in parts for row in part]
  pools = {job: [row for row, of in zip(rows, jobs, strict=True) if of == job and row['control']] for job in set(jobs)}
  thresholds = {
    job: [metrics.percentile_threshold([row[name] for row in pool]) for name in ('psnr', 'revealed')]
    for job, pool in pools.items()
  }
  return [plain({**row, **judge(row, *thresholds[job])}) for row, job in zip(rows, jobs, strict=True)]


def _as_long(parts):
  """Returns the parts with curves of one length: one that ended early, all its runs being finished, stays as it was."""
  steps = max((arrays['steps'] for _, arrays in parts), key=len)

  def extended(arrays):
    missing = len(steps) - arrays['curves'].shape[1]
    return {**arrays, 'steps': steps, 'curves': np.pad(arrays['curves'], ((0, 0), (0, missing)), mode='edge')}

  return [(rows, extended(arrays)) for rows, arrays in parts]


def _assemble(run, config, structures, seconds, resumed):
  """Returns the `AuditResult`, by attack, defense and counter-measure in the order they were listed.

  Args:
    run: the `Run`.
    config: the scientific settings.
    structures: per structure, the (rows, arrays) of each share.
    seconds: wall time.
    resumed: whether all was found on disk.
  """
  attacks, first = run.attacks, run.members[0]
  defenses = {defense.name: i for i, defense in enumerate(first.settings.defenses)}
  attackers = {name: _all_attackers(run, i) for name, i in defenses.items()}
  counters = {name: [counter.name for counter in found] for name, found in attackers.items()}

  def place(entry):
    row = entry[0]
    if row['control']:
      return attacks.index(row['attack']), 1, 0, 0, row['trial']
    counter = counters[row['defense']].index(row['counter'] or 'unaware')
    return attacks.index(row['attack']), 0, defenses[row['defense']], counter, row['trial']

  entries = []
  for parts in map(_as_long, structures):
    arrays = [
      (a['steps'], images, curve) for _, a in parts for images, curve in zip(a['images'], a['curves'], strict=True)
    ]
    entries += [
      (row, images, (steps, curve)) for row, (steps, images, curve) in zip(_judged(parts), arrays, strict=True)
    ]
  entries = sorted(entries, key=place)
  reconstructions, curves = {}, {}
  for row, images, (steps, curve) in entries:
    if not row['control']:
      key = (row['attack'], row['defense'], *filter(None, [row['counter']]))
      reconstructions.setdefault(key, []).append(images)
      curves.setdefault(key, (steps, []))[1].append(curve)
  rows = [row for row, *_ in entries]
  looked_at = [(trials, _inspected(trials)) for trials in run.members]
  scored = [[row for row in rows if row['attack'] == name and not row['control']] for name in attacks]
  return AuditResult(
    config,
    [row for of_attack in scored for row in credit_no_failure(of_attack)],
    [row for row in rows if row['control']],
    first.truth,
    {key: np.stack(images) for key, images in reconstructions.items()},
    {key: (steps, np.stack(of_trials)) for key, (steps, of_trials) in curves.items()},
    {t.name: trials.knowledge(t).in_words() for trials in run.members for t in trials.settings.attacks},
    {name: words(found) for name, found in attackers.items()},
    {t.name: told for trials, told in looked_at for t in trials.settings.attacks},
    versions(),
    seconds,
    resumed,
  )


def _inspected(trials):
  """Returns what `inspect` tells a client of the model it is sent, a list of sentences; None where it cannot.

  Of a model that a malicious server sends, also by what it makes of the client's images: that takes a compilation.
  """
  client, variables = trials.scenario.client, trials.scenario.variables
  images, labels = trials.truth[0][:_INSPECTED], trials.labels[0][:_INSPECTED]
  looks = len(images) > 1 and trials.settings.attacks[0].server is not None
  given = {'batch': (images, labels), 'train': client.batch_norm == 'train'} if looks else {}
  try:
    found = inspect(client.model, variables, images.shape[1:], loss=client.loss, **given).findings
  except errors.UsageError:
    return None
  return [finding.text for finding in found if finding.suspicious]


def _all_attackers(run, defense):
  """Returns the `Counter`s of a defense that any member of a `Run` has, each name once."""
  return list({counter.name: counter for trials in run.members for counter in trials.attackers[defense]}.values())


def _write(store, result):
  """Writes rows and arrays; all are rendered from the parts, so that writing them again changes nothing."""
  write_atomically(store.path / 'rows.jsonl', json_lines(result.rows))
  write_atomically(store.path / 'controls.jsonl', json_lines(result.controls))
  buffer = io.BytesIO()
  np.savez_compressed(
    buffer,
    truth=result.truth,
    **{'|'.join(key): images for key, images in result.reconstructions.items()},
  )
  write_atomically(store.path / 'reconstructions.npz', buffer.getvalue())
