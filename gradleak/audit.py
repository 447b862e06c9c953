"""The main job: scenario × defenses × attacks × trials → rows.

What was sent is data to an attack, so that all defenses, restarts and numeric settings of one attack, and the control
runs that its successes are measured against, are lanes of one compiled program.
"""

import dataclasses
import functools
import io
import platform
import re
import time
import zlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import gradleak
from gradleak import defenses as defense_names
from gradleak import errors, metrics, trees
from gradleak.attacks import driver
from gradleak.attacks import registry as attack_names
from gradleak.attacks.labels import RULES
from gradleak.defenses import registry as defense_registry
from gradleak.federated import Knowledge, Observation, knowledge
from gradleak.progress import reporter
from gradleak.storage import Workdir, json_lines, plain, write_atomically

CONTROL = 'null_gradient'
# The Pearson correlation at which a quarter of an image's variance is explained.
RECOGNISABLE = 0.5
RENDERED = ('rows.jsonl', 'controls.jsonl', 'reconstructions.npz')


class AuditResult(NamedTuple):
  """Everything an audit found; T trials of B images.

  Attributes:
    config: the scientific settings, plain JSON.
    rows: one dict per attack × defense × trial, plain JSON values; None for what a diverged trial has not.
    controls: one dict per attack × control run, same keys.
    truth: the private images [T, B, H, W, C].
    reconstructions: (attack, defense) -> [T, B, H, W, C], matched to the truth; NaN where a trial diverged.
    curves: (attack, defense) -> (steps [K], objective [T, K]) of the restarts chosen.
    threat_models: attack -> sentences that say what this attacker was granted.
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
  versions: dict
  seconds: float
  resumed: bool


class Settings(NamedTuple):
  """The settings of one audit, parsed."""

  defenses: list
  attacks: list
  num_trials: int
  batch_size: int
  restarts: int
  controls: int
  labels: str


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
  workdir=None,
  group_size=None,
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
    workdir: a folder for results and checkpoints; a run that was killed goes on where it stopped. Functions and
      transformations of your own are known to it by their names alone.
    group_size: trials that share one pass; None takes a measured default. It changes speed, and bits.
    progress: 'auto', 'bar', 'lines' or 'none', see `gradleak.progress`; or a function that is called with (attack,
      `driver.Progress`, the first defense's objectives) after each chunk.

  Returns:
    An `AuditResult`; with a `workdir`, its rows and arrays also stand there.

  Raises:
    UsageError: for settings that cannot be run, before anything is compiled or written.
  """
  settings = _parse(scenario, defenses, attacks, num_trials, batch_size, restarts, steps, labels, controls)
  progress = reporter(progress) if isinstance(progress, str) else progress
  if group_size is None:
    group_size = driver.default_group_size(scenario.variables, batch_size)
  errors.check_number('group_size', group_size, low=1, integer=True)
  config = {
    **scenario.settings,
    'attacks': [template.name for template in settings.attacks],
    'defenses': [defense.name for defense in settings.defenses],
    'trials': num_trials,
    'restarts': restarts,
    'steps': steps,
    'batch_size': batch_size,
    'labels': labels,
    'controls': controls,
    **_texts(attack=attacks, defense=defenses),
    'key': np.asarray(jax.random.key_data(key)).tolist(),
  }
  store = None if workdir is None else Workdir(workdir, config, {'group_size': group_size})
  if store is not None:
    group_size = store.speed['group_size']

  run = _Run(key, scenario, settings, group_size, store, progress)
  rows, arrays, seconds = [], [], []
  for index, members in enumerate(run.structures()):
    name = f'{index:02}-' + re.sub(r'\W', '_', members[0].structure[0])  # a user may name an attack 'mine/new'
    part = store and store.load_part(name)
    resumed = part is not None
    if not resumed:
      started = time.monotonic()
      part = run.attack(name, members)
      seconds.append(time.monotonic() - started)
      if store is not None:
        store.save_part(name, *part)
        _log_time(store, name, seconds[-1])
    rows.append(part[0])
    arrays.append(part[1])
  result = _assemble(run, config, rows, arrays, sum(seconds), not seconds)
  if store is not None and not (result.resumed and all((store.path / name).exists() for name in RENDERED)):
    _write(store, result)
  return result


def _log_time(store, name, seconds):
  """Appends to timing.jsonl: times and versions stand apart from rows, which are the same whenever they are made."""
  path = store.path / 'timing.jsonl'
  old = path.read_text('utf-8') if path.exists() else ''
  write_atomically(path, old + json_lines([{'part': name, 'seconds': seconds, **versions()}]))


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


def _parse(scenario, defenses, attacks, num_trials, batch_size, restarts, steps, labels, controls):
  for name, value, low in (
    ('trials', num_trials, 1),
    ('batch_size', batch_size, 1),
    ('restarts', restarts, 1),
    ('controls', controls, 1),
  ):
    errors.check_number(name, value, low=low, high=10**6, integer=True)
  if num_trials * batch_size > len(scenario.images):
    raise errors.UsageError(
      f'{num_trials} trials of {batch_size} images need {num_trials * batch_size}, the data has '
      f'{len(scenario.images)}; the most trials are {len(scenario.images) // batch_size}'
    )
  valid = ('auto', *knowledge.LABELS, *RULES)
  if labels not in valid:
    raise errors.unknown('label mode', labels, valid)
  context = defense_registry.Context(
    scenario.client, scenario.variables, scenario.images.shape[1:], scenario.public, scenario.previous
  )
  parse = functools.partial(defense_names.parse, context=context)
  defenses = _named(defenses, 'defense', parse, defense_registry.custom)
  attacks = _named(attacks, 'attack', functools.partial(attack_names.parse, steps=steps), attack_names.custom)
  settings = Settings(defenses, attacks, num_trials, batch_size, restarts, controls, labels)
  observed = _Run(jax.random.key(0), scenario, settings, 1, None, None)
  for template in attacks:
    observed.check(template)
  return settings


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


class _Run:
  """The uploads of all defenses, and the attacks on them.

  Uploads are numbered: defense by defense its T trials, then the control runs.
  """

  def __init__(self, key, scenario, settings, group_size, store, progress):
    self.scenario, self.settings = scenario, settings
    self.group_size, self.store, self.progress = group_size, store, progress
    self.key = key
    trials, size = settings.num_trials, settings.batch_size
    self.truth = scenario.images[: trials * size].reshape(trials, size, *scenario.images.shape[1:])
    self.labels = scenario.labels[: trials * size].reshape(trials, size)
    self.attacker = scenario.client.undefended()
    self._sent = None

  def stream(self, name):
    """Returns the key of a named stream of randomness."""
    return jax.random.fold_in(self.key, zlib.crc32(name.encode()))

  def structures(self):
    """Returns the attacks grouped by structure: one compilation each."""
    grouped = {}
    for template in self.settings.attacks:
      grouped.setdefault(template.structure, []).append(template)
    return list(grouped.values())

  def knowledge(self, template):
    """Returns what the attacker of `template` is granted."""
    mode, rule = self.settings.labels, template.label_rule
    if mode == 'auto':
      mode = template.build(template.numbers, self.attacker).labels
    elif mode in RULES:
      mode, rule = 'inferred', mode
    client = self.scenario.client
    return Knowledge(
      labels=mode,
      label_inference=rule,
      local_steps=client.num_steps(self.settings.batch_size),
      share=client.share,
      batch_norm=self.scenario.settings['batch_norm'],
    )

  def _observation(self, template, variables, update, sent, labels):
    return Observation(
      variables,
      update,
      sent,
      labels,
      self.knowledge(template),
      (self.settings.batch_size, *self.scenario.images.shape[1:]),
      self.scenario.client.num_classes,
    )

  def check(self, template):
    """Traces client and attack on shapes alone, so that what cannot be run says so before anything is compiled."""
    client, variables = self.scenario.client, self.scenario.variables
    key = jax.random.key(0)
    upload = jax.eval_shape(client.local_update, key, variables, self.truth[0], jnp.asarray(self.labels[0]))
    for defense in self.settings.defenses:
      jax.eval_shape(
        self._defended(defense, defense.numbers).local_update,
        key,
        variables,
        self.truth[0],
        jnp.asarray(self.labels[0]),
      )
    onehot = jax.ShapeDtypeStruct((self.settings.batch_size, client.num_classes), jnp.float32)

    def start(key, variables, update, sent, labels):
      attack = template.build(template.numbers, self.attacker)
      observation = self._observation(template, variables, update, sent, labels)
      return attack.step(attack.init(key, observation), observation)

    jax.eval_shape(start, key, variables, upload.update, upload.sent, onehot)

  def _defended(self, defense, numbers):
    return defense.build(numbers, self.scenario.client)

  def sent(self):
    """Returns the uploads of all defenses and controls, the trial behind each, and each one's relative change."""
    if self._sent is None:
      self._sent = self._compute_sent()
    return self._sent

  def _compute_sent(self):
    settings = self.settings
    every, repeated = np.arange(settings.num_trials), np.arange(settings.controls) % settings.num_trials
    requests = [(defense, 'client', every) for defense in (defense_names.parse('none'), *settings.defenses)]
    requests.append((defense_names.parse(CONTROL), 'control', repeated))
    found = [None] * len(requests)
    for structure in dict.fromkeys(defense.structure for defense, _, _ in requests):
      chosen = [i for i, (defense, _, _) in enumerate(requests) if defense.structure == structure]
      lanes = jax.tree.map(lambda *xs: jnp.concatenate(xs), *(self._upload_lanes(*requests[i]) for i in chosen))
      uploads = self._uploads(requests[chosen[0]][0], lanes)
      edges = np.cumsum([0] + [len(requests[i][2]) for i in chosen])
      for i, first, last in zip(chosen, edges[:-1], edges[1:], strict=True):
        found[i] = jax.tree.map(lambda x, first=first, last=last: jnp.asarray(x[first:last]), uploads)
    plain, *sent, control = found

    def change(upload):
      return jax.vmap(lambda a, b: trees.norm(trees.subtract(a, b)) / trees.norm(b))(upload.update, plain.update)

    changes = np.concatenate([np.asarray(change(upload)) for upload in sent] + [np.full(settings.controls, np.nan)])
    trial = np.concatenate([np.tile(every, len(sent)), repeated])
    return trees.concatenate([*sent, control]), trial, changes

  def _upload_lanes(self, defense, stream, trial):
    """Returns the lanes of one defense on the data of `trial`; the i-th upload draws the i-th key of the stream."""
    keys = jax.vmap(functools.partial(jax.random.fold_in, self.stream(stream)))(jnp.arange(len(trial)))
    numbers = tuple(jnp.full(len(trial), number, jnp.float32) for number in defense.numbers)
    return {'key': keys, 'trial': jnp.asarray(trial), 'numbers': numbers}

  def _uploads(self, defense, lanes):
    """Returns the `Upload`s of lanes whose defenses have the structure of `defense`: one compilation."""

    def one(shared, lane):
      client = self._defended(defense, lane['numbers'])
      images, labels = shared['images'][lane['trial']], shared['labels'][lane['trial']]
      return client.local_update(lane['key'], shared['variables'], images, labels)

    images, labels = jnp.asarray(self.truth), jnp.asarray(self.labels)
    shared = {'variables': self.scenario.variables, 'images': images, 'labels': labels}
    return driver.evaluate(one, shared, lanes, group_size=self.group_size)

  def attack(self, name, members):
    """Runs one structure on every upload; returns the part's (rows, arrays)."""
    settings = self.settings
    upload, trial, changes = self.sent()
    num_uploads, restarts = len(trial), settings.restarts
    onehot = jax.nn.one_hot(jnp.asarray(self.labels), self.scenario.client.num_classes, dtype=jnp.float32)
    shared = {'variables': self.scenario.variables, 'update': upload.update, 'sent': upload.sent, 'labels': onehot}
    template = members[0]

    def build(shared, lane):
      labels = shared['labels'][lane['trial']]
      observation = self._observation(
        template,
        shared['variables'],
        trees.take(shared['update'], lane['upload']),
        trees.take(shared['sent'], lane['upload']),
        labels,
      )
      if observation.knowledge.labels != 'known':  # an attack sees no labels that it was not granted
        observation = dataclasses.replace(observation, labels=jnp.zeros_like(labels))
      return template.build(lane['numbers'], self.attacker), lane['key'], observation

    # Lanes: member by member, upload by upload, restart by restart.
    index = np.arange(len(members) * num_uploads * restarts)
    member, of_upload, restart = np.unravel_index(index, (len(members), num_uploads, restarts))
    is_control = of_upload >= num_uploads - settings.controls
    address = np.where(is_control, of_upload - (num_uploads - settings.controls), trial[of_upload])
    streams = jnp.stack([self.stream('attack'), self.stream('attack control')])

    def lane_key(control, address, restart):
      return jax.random.fold_in(jax.random.fold_in(streams[control], address), restart)

    numbers = np.asarray([m.numbers for m in members], np.float32).reshape(len(members), -1)
    lanes = {
      'upload': jnp.asarray(of_upload),
      'trial': jnp.asarray(trial[of_upload]),
      'key': jax.vmap(lane_key)(jnp.asarray(is_control.astype(np.int32)), jnp.asarray(address), jnp.asarray(restart)),
      'numbers': tuple(jnp.asarray(numbers[member, i]) for i in range(numbers.shape[1])),
    }

    num_steps = template.build(template.numbers, self.attacker).num_steps
    resume = self.store and self.store.load_checkpoint(name)
    steps, curve = [], []
    if resume:
      step, (steps, curve, *leaves) = resume
      steps, curve, resume = list(steps), list(curve), (step, leaves)

    def on_chunk(progress):
      steps.append(progress.step)
      curve.append(progress.objective)
      if self.progress is not None:
        shown = template.name if len(members) == 1 else f'{template.structure[0]} × {len(members)}'
        self.progress(shown, progress, progress.objective[of_upload < settings.num_trials])
      if self.store is not None and progress.step < progress.num_steps:
        self.store.save_checkpoint(name, progress.step, (np.asarray(steps), np.asarray(curve), progress.states))

    found = driver.run(
      build, shared, lanes, num_steps=num_steps, group_size=self.group_size, on_chunk=on_chunk, resume=resume or None
    )
    at_truth = self._objective_at_truth(build, shared, lanes)
    shape = (len(members), num_uploads, restarts)
    found, at_truth = jax.tree.map(lambda x: np.asarray(x).reshape(*shape, *x.shape[1:]), (found, at_truth))
    curve = np.asarray(curve).T.reshape(*shape, -1)
    rows, images, curves = self._score(members, found, at_truth, curve, trial, changes, num_steps)
    return plain(rows), {'images': images, 'curves': curves, 'steps': np.asarray(steps)}

  def _objective_at_truth(self, build, shared, lanes):
    """Returns what each lane's attacker would have measured at the private images: the auditor's figure."""

    def one(shared, lane):
      attack, _, observation = build(shared, lane)
      images, labels = shared['truth'][lane['trial']], shared['labels'][lane['trial']]
      return attack.objective(observation, images, labels)

    return driver.evaluate(one, {**shared, 'truth': jnp.asarray(self.truth)}, lanes, group_size=self.group_size)

  def _score(self, members, found, at_truth, curve, trial, changes, num_steps):
    """Returns the rows of all members × uploads, with the images and curves of the restarts chosen."""
    settings = self.settings
    trials = settings.num_trials
    num_uploads = len(trial)
    rows, images, curves = [], [], []
    for m, template in enumerate(members):
      granted = self.knowledge(template)
      scored = []
      for u in range(num_uploads):
        truth, labels = self.truth[trial[u]], self.labels[trial[u]]
        measured = [
          metrics.evaluate(found.images[m, u, r], truth, found.labels[m, u, r], labels)
          for r in range(settings.restarts)
        ]
        chosen = int(np.argmin(found.distance[m, u]))
        figures = measured[chosen]
        psnrs = [figure['psnr'] for figure in measured]
        permutation = figures.pop('permutation')
        diverged = int(found.diverged_step[m, u, chosen])
        defense = settings.defenses[u // trials].name if u < trials * len(settings.defenses) else CONTROL
        scored.append(
          {
            **{key: self.scenario.settings[key] for key in ('dataset', 'model')},
            'init': self.scenario.settings.get('init'),
            'attack': template.name,
            'defense': defense,
            'trial': int(trial[u]) if u < trials * len(settings.defenses) else u - trials * len(settings.defenses),
            'seed': self.scenario.settings.get('seed'),
            'batch_size': settings.batch_size,
            'restarts': settings.restarts,
            'labels': granted.labels,
            **figures,
            'objective': float(found.objective[m, u, chosen]),
            'distance': float(found.distance[m, u, chosen]),
            'objective_start': float(found.objective_start[m, u, chosen]),
            'objective_at_truth': float(at_truth[m, u, chosen]),
            'oracle_psnr': float(np.nanmax(psnrs)) if not np.isnan(psnrs).all() else np.nan,
            'diverged': diverged >= 0,
            'diverged_step': diverged if diverged >= 0 else None,
            'steps': num_steps,
            'change': changes[u],
            'tier': granted.tier,
          }
        )
        images.append(found.images[m, u, chosen][permutation])
        curves.append(curve[m, u, chosen])
      controls = [row['psnr'] for row in scored[-settings.controls :]]
      threshold = metrics.percentile_threshold(controls)
      rows += credit_no_failure([{**row, **judge(row, threshold)} for row in scored])
    shape = (len(members), num_uploads)
    images, curves = np.stack(images), np.stack(curves)
    return rows, images.reshape(*shape, *images.shape[1:]), curves.reshape(*shape, *curves.shape[1:])


def judge(row, control_psnr):
  """Returns a row's `control_psnr`, `success`, `solved` and `verdict`.

  A trial is a success beyond the 95th percentile of the control pool, if it also correlates with the truth by at least
  `RECOGNISABLE`: attacks whose control ends in noise of full contrast would otherwise call milder noise a recovery.

  It is solved when the attacker did as well on its own objective as the truth would (a failure then is the defense's
  merit), or, for a success, when 99.9 % of the descent from the start to the truth is done; less means that the leak is
  at least this.
  """
  success = bool(row['psnr'] > control_psnr and row['pearson'] >= RECOGNISABLE)
  gap = row['objective'] - row['objective_at_truth']
  tolerance = (
    1e-3 * (row['objective_start'] - row['objective_at_truth']) if success else 1e-6 * abs(row['objective_at_truth'])
  )
  solved = bool(gap <= tolerance)
  if row['diverged']:
    verdict = 'diverged'
  elif success:
    verdict = 'recovered'
  else:
    verdict = 'protected' if solved else 'not solved'
  return {'control_psnr': control_psnr, 'success': success, 'solved': solved, 'verdict': verdict}


def credit_no_failure(rows):
  """Returns one attack's rows, none 'protected' on a trial that the attack fails without a defense, too."""
  failing = {row['trial'] for row in rows if row['defense'] == 'none' and row['verdict'] != 'recovered'}

  def credited(row):
    undeserved = row['verdict'] == 'protected' and row['trial'] in failing and row['defense'] != CONTROL
    return {**row, 'verdict': 'not solved'} if undeserved else row

  return [credited(row) for row in rows]


def _assemble(run, config, rows, arrays, seconds, resumed):
  """Returns the `AuditResult` of all parts, in the order in which the user listed the attacks."""
  settings = run.settings
  trials, scored = settings.num_trials, settings.num_trials * len(settings.defenses)
  by_name, reconstructions, curves = {}, {}, {}
  for members, part_rows, part in zip(run.structures(), rows, arrays, strict=True):
    per_member = len(part_rows) // len(members)
    for m, template in enumerate(members):
      by_name[template.name] = part_rows[m * per_member : (m + 1) * per_member]
      for d, defense in enumerate(settings.defenses):
        chosen = slice(d * trials, (d + 1) * trials)
        reconstructions[template.name, defense.name] = part['images'][m, chosen]
        curves[template.name, defense.name] = (part['steps'], part['curves'][m, chosen])
  ordered = [by_name[template.name] for template in settings.attacks]
  threat_models = {template.name: run.knowledge(template).in_words() for template in settings.attacks}
  return AuditResult(
    config,
    [row for part in ordered for row in part[:scored]],
    [row for part in ordered for row in part[scored:]],
    run.truth,
    reconstructions,
    curves,
    threat_models,
    versions(),
    seconds,
    resumed,
  )


def _write(store, result):
  """Writes rows and arrays; all are rendered from the parts, so that writing them again changes nothing."""
  write_atomically(store.path / 'rows.jsonl', json_lines(result.rows))
  write_atomically(store.path / 'controls.jsonl', json_lines(result.controls))
  buffer = io.BytesIO()
  np.savez_compressed(
    buffer,
    truth=result.truth,
    **{f'{attack}|{defense}': images for (attack, defense), images in result.reconstructions.items()},
  )
  write_atomically(store.path / 'reconstructions.npz', buffer.getvalue())
