"""The trials of an audit: the uploads of all defenses, what attackers make of them, and the attacks on that.

What was sent, and what an attacker knows of the defense, is data to an attack, so that all defenses, counter-measures,
restarts and numeric settings of one attack, and the control runs that its successes are measured against, are lanes of
one compiled program.
"""

import copy
import dataclasses
import functools
import math
import zlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gradleak import defenses as defense_names
from gradleak import errors, metrics, trees
from gradleak.attacks import adaptive
from gradleak.attacks.labels import RULES
from gradleak.attacks.registry import AttackTemplate
from gradleak.engine import driver
from gradleak.federated import Client, Knowledge, Observation, layer_average
from gradleak.verdict import CONTROL


class Settings(NamedTuple):
  """The settings of one audit, parsed."""

  defenses: list
  attacks: list
  num_trials: int
  batch_size: int
  restarts: int
  controls: int
  labels: str
  knowledge: str
  rounds: int
  counters: tuple | None


class Target(NamedTuple):
  """One attacker's target: what it compares, one view or several of which it keeps the best match.

  Attributes:
    defense: index of the defense; −1 for a control run.
    counter: index of its counter-measure among `Trials.attackers` of that defense.
    trial: index of the private batch.
    address: what its randomness is drawn by: the trial, or the number of the control run.
    views: indices of its views.
  """

  defense: int
  counter: int
  trial: int
  address: int
  views: tuple[int, ...]


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


class Job(NamedTuple):
  """One attack, its template changed as a counter-measure asks for, and its targets."""

  attack: int
  template: AttackTemplate
  targets: tuple[Target, ...]


@dataclasses.dataclass(frozen=True)
class Build:
  """(shared, lane) -> (attack, key, observation): what all lanes of one structure do.

  Equal ones compile once, whatever weights and uploads they are given. The template's numbers are not read: a lane
  brings its own.
  """

  template: AttackTemplate = dataclasses.field(compare=False)
  structure: tuple
  client: Client
  knowledge: Knowledge
  image_shape: tuple[int, ...]

  def __call__(self, shared, lane):
    """Called while tracing, by the driver."""
    labels, view = shared['labels'][lane['trial']], trees.take(shared['seen'], lane['view'])
    granted = self.knowledge.labels == 'known'  # an attack sees no labels that it was not granted
    observation = Observation(
      shared['variables'],
      view.update,
      labels if granted else jnp.zeros_like(labels),
      self.knowledge,
      self.image_shape,
      self.client.num_classes,
      compared=view.compared,
      noise=view.noise,
      clip=view.clip,
      class_means=shared['class_means'],
    )
    return self.template.build(lane['numbers'], self.client), lane['key'], observation


@dataclasses.dataclass(frozen=True)
class ObjectiveAtTruth:
  """(shared, lane) -> what the lane's attacker would have measured at the private images: the auditor's figure."""

  build: Build

  def __call__(self, shared, lane):
    """Called while tracing, by the driver."""
    attack, _, observation = self.build(shared, lane)
    return attack.objective(observation, shared['truth'][lane['trial']], shared['labels'][lane['trial']])


class Trials:
  """The uploads of all defenses, and the attacks on them, of one model that clients are sent.

  A share (i, n) holds every n-th trial and control run from the i-th on: what one of several processes computes. A
  trial draws its randomness by its own number, so that its figures do not depend on the share.
  """

  def __init__(self, key, scenario, context, settings):
    self.scenario, self.context, self.settings = scenario, context, settings
    # Uploads keep their micro-group size, and so their bits, also where an attack's must shrink to fit the memory.
    self.group_size = self.attack_group_size = 1
    self.fit, self.store, self.progress = False, None, None
    self.split = False
    self.key = key
    self.index, self.count = 0, 1
    trials, size = settings.num_trials, settings.batch_size
    self.truth = scenario.images[: trials * size].reshape(trials, size, *scenario.images.shape[1:])
    self.labels = scenario.labels[: trials * size].reshape(trials, size)
    self.attacker = scenario.client.undefended()
    self.attackers = [self._attackers(defense) for defense in settings.defenses]

  def _attackers(self, defense):
    """Returns who attacks a defense, a list of `Counter`; who knows it and has no remedy attacks like who does not."""
    if self.settings.knowledge == 'unaware':
      return [adaptive.UNAWARE]
    aware = adaptive.counters(defense, self.context, self.settings.batch_size, self.settings.rounds)
    if self.settings.counters is not None:
      aware = [counter for counter in aware if counter.name in self.settings.counters]
    return [adaptive.UNAWARE, *aware] if self.settings.knowledge == 'both' else aware or [adaptive.UNAWARE]

  def share(self, index, count):
    """Returns the same for a share of the trials and of the control runs."""
    share = copy.copy(self)
    share.index, share.count = index, count
    for name in ('uploads', '_seen'):
      share.__dict__.pop(name, None)
    return share

  @property
  def trials(self):
    """The trials of this share."""
    return np.arange(self.settings.num_trials)[self.index :: self.count]

  @property
  def controls(self):
    """The control runs of this share."""
    return np.arange(self.settings.controls)[self.index :: self.count]

  def stream(self, name):
    """Returns the key of a named stream of randomness."""
    return jax.random.fold_in(self.key, zlib.crc32(name.encode()))

  # ---- knowledge

  def knowledge(self, template):
    """Returns what the attacker of `template` is granted, apart from what it knows of the defense."""
    mode, rule = self.settings.labels, template.label_rule
    attack = template.build(template.numbers, self.attacker)
    if mode == 'auto':
      mode = attack.labels
    elif mode in RULES:
      mode, rule = 'inferred', mode
    client = self.scenario.client
    return Knowledge(
      labels=mode,
      label_inference=rule,
      local_steps=client.num_steps(self.settings.batch_size),
      share=client.share,
      batch_norm=self.scenario.settings['batch_norm'],
      model='honest' if template.server is None else 'modified',
      auxiliary_data=attack.auxiliary_data and self.scenario.public is not None,
    )

  def _build(self, template):
    shape = (self.settings.batch_size, *self.scenario.images.shape[1:])
    return Build(template, template.structure, self.attacker, self.knowledge(template), shape)

  def _class_means(self, template):
    """Returns the mean public image of each class, for an attack that uses it; of all classes where one has none."""
    public = self.scenario.public
    if public is None or not self.knowledge(template).auxiliary_data:
      return None
    images, labels = public
    classes = range(self.scenario.client.num_classes)
    return jnp.stack([images[labels == c if (labels == c).any() else slice(None)].mean(axis=0) for c in classes])

  def check(self, template):
    """Traces client and attack on shapes alone, so that what cannot be run says so before anything is compiled."""
    if jax.config.jax_enable_x64 and template.build(template.numbers, self.attacker).num_steps:
      raise errors.UsageError(f'the attack {template.name!r} descends in float32: float64 is for closed forms alone')
    client, variables = self.scenario.client, self.scenario.variables
    key, images, labels = jax.random.key(0), self.truth[0], jnp.asarray(self.labels[0])
    upload = jax.eval_shape(client.local_update, key, variables, images, labels)
    for defense in self.settings.defenses:
      defended = defense.build(defense.numbers, client)
      jax.eval_shape(defended.local_update, key, variables, images, labels)
    shared = {
      'seen': adaptive.View(upload.update, None, jnp.float32(0), jnp.float32(jnp.inf)),
      'labels': jax.ShapeDtypeStruct((self.settings.batch_size, client.num_classes), jnp.float32),
    }
    rest = {'variables': variables, 'class_means': self._class_means(template)}

    def start(shared, key):
      shared = jax.tree.map(lambda x: jnp.expand_dims(x, 0), shared)
      lane = {'trial': 0, 'view': 0, 'key': key, 'numbers': template.numbers}
      attack, key, observation = self._build(template)({**shared, **rest}, lane)
      return attack.step(attack.init(key, observation), observation)

    jax.eval_shape(start, shared, key)

  # ---- uploads

  @functools.cached_property
  def uploads(self):
    """Per defense, and last of the control runs, this share's `Upload`s [rounds, trials, …] on the host; their changes.

    A change is the norm of what the defense did to an upload, relative to the undefended one: a list of [trials].
    """
    rounds = [max(counter.rounds for counter in attackers) for attackers in self.attackers]
    requests = [(defense_names.parse('none'), 'client', self.trials, 1)]
    requests += [(d, 'client', self.trials, count) for d, count in zip(self.settings.defenses, rounds, strict=True)]
    if len(self.controls):
      requests.append((defense_names.parse(CONTROL), 'control', self.controls, 1))
    found = [None] * len(requests)
    for structure in dict.fromkeys(defense.structure for defense, *_ in requests):
      chosen = [i for i, (defense, *_) in enumerate(requests) if defense.structure == structure]
      lanes = jax.tree.map(lambda *xs: jnp.concatenate(xs), *(self._upload_lanes(*requests[i]) for i in chosen))
      uploads = self._compute(requests[chosen[0]][0], lanes)
      sizes = [requests[i][3] * len(requests[i][2]) for i in chosen]
      for i, first, size in zip(chosen, np.cumsum([0, *sizes]), sizes, strict=False):
        shape = (requests[i][3], len(requests[i][2]))
        found[i] = jax.tree.map(
          lambda x, first=first, size=size, shape=shape: np.asarray(x[first : first + size]).reshape(
            *shape, *x.shape[1:]
          ),
          uploads,
        )
    undefended, *sent = found
    changed = sent[: len(self.settings.defenses)]

    def norms(leaves):
      return np.sqrt(sum(np.square(x, dtype=np.float64).reshape(len(x), -1).sum(1) for x in leaves))

    def change(upload):  # trial by trial in NumPy: compiled sums differ with the number of trials, in their last digit
      defended, plain = (jax.tree.leaves(trees.take(each.update, 0)) for each in (upload, undefended))
      plain = [np.asarray(x, np.float64) for x in plain]
      with np.errstate(divide='ignore', invalid='ignore'):
        return norms([a - b for a, b in zip(defended, plain, strict=True)]) / norms(plain)

    return sent, [change(upload) for upload in changed] + [np.full(len(self.controls), np.nan)]

  def _upload_lanes(self, defense, stream, address, rounds):
    """Returns the lanes of one defense, round by round; upload i of a round draws the i-th key of its stream."""
    trial = address % self.settings.num_trials
    names = [stream, *(f'{stream} round {i}' for i in range(1, rounds))]
    fold = jax.vmap(jax.random.fold_in, (None, 0))
    keys = jnp.concatenate([fold(self.stream(name), jnp.asarray(address)) for name in names])
    numbers = tuple(jnp.full(rounds * len(trial), number, jnp.float32) for number in defense.numbers)
    return {'key': keys, 'trial': jnp.asarray(np.tile(trial, rounds)), 'numbers': numbers}

  def _compute(self, defense, lanes):
    """Returns the `Upload`s of lanes whose defenses have the structure of `defense`: one compilation."""

    def one(shared, lane):
      client = defense.build(lane['numbers'], self.scenario.client)
      images, labels = shared['images'][lane['trial']], shared['labels'][lane['trial']]
      return client.local_update(lane['key'], shared['variables'], images, labels)

    images, labels = jnp.asarray(self.truth), jnp.asarray(self.labels)
    shared = {'variables': self.scenario.variables, 'images': images, 'labels': labels}
    return driver.evaluate(one, shared, lanes, group_size=self.group_size)

  # ---- what attackers make of them

  @functools.cached_property
  def _seen(self):
    """All views, a tree of arrays [views, …], and the `Target`s that they belong to, the control runs' last."""
    uploads, _ = self.uploads
    views, targets = [], []

    def add(defense, counter, trial, address, made):
      targets.append(Target(defense, counter, trial, address, tuple(range(len(views), len(views) + len(made)))))
      views.extend(made)

    for d, attackers in enumerate(self.attackers):
      for c, counter in enumerate(attackers):
        for i, t in enumerate(self.trials.tolist()):
          of_trial = jax.tree.map(lambda x, i=i, r=counter.rounds: x[:r, i], uploads[d])
          several = counter.rounds > 1
          update = jax.device_get(layer_average(of_trial)) if several else trees.take(of_trial.update, 0)
          add(d, c, t, t, counter.views(update))
    for i, run in enumerate(self.controls.tolist()):
      update = jax.tree.map(lambda x, i=i: x[0, i], uploads[-1].update)
      add(-1, 0, run % self.settings.num_trials, run, [adaptive.everything(update)])
    stacked = jax.tree.map(lambda *xs: jnp.asarray(np.stack(xs)), *views)
    if all(attackers == [adaptive.UNAWARE] for attackers in self.attackers):
      stacked = stacked._replace(compared=None)
    return stacked._replace(noise=stacked.noise.astype(jnp.float32), clip=stacked.clip.astype(jnp.float32)), targets

  def structures(self):
    """Returns the attacks to run, (index, template, settings changed), grouped by structure: one compilation each."""
    counted = dict.fromkeys(counter.settings for attackers in self.attackers for counter in attackers)
    grouped = {}
    for a, template in enumerate(self.settings.attacks):
      for settings in counted:
        changed = template.changed(settings)
        if changed is not None:
          grouped.setdefault(changed.structure, []).append((a, changed, settings))
    return list(grouped.values())

  def plan(self):
    """Returns what is to run, a list of `Planned`: one per structure."""
    planned = []
    for members in self.structures():
      runs = 0
      for _, _, settings in members:
        views = [c.count for attackers in self.attackers for c in attackers if c.settings == settings]
        runs += sum(views) * len(self.trials) + len(self.controls)
      template = members[0][1]
      attack = template.build(template.numbers, self.attacker)
      planned.append(Planned(self.label(members), runs * self.settings.restarts, attack.num_steps))
    return planned

  def label(self, members):
    """Returns how one group of `structures` is called."""
    template = members[0][1]
    return template.name if len(members) == 1 else f'{template.structure[0]} × {len(members)}'

  def jobs(self, members):
    """Returns the `Job`s of one group of `structures`."""
    _, targets = self._seen

    def concerned(target, settings):
      return target.defense < 0 or self.attackers[target.defense][target.counter].settings == settings

    return [
      Job(attack, template, tuple(target for target in targets if concerned(target, settings)))
      for attack, template, settings in members
    ]

  # ---- attacks

  def attack(self, name, members):
    """Runs one structure on everything; returns the part's (rows, arrays), row by row."""
    seen, _ = self._seen
    jobs = self.jobs(members)
    template, client = jobs[0].template, self.scenario.client
    build = self._build(template)
    shared = {
      'variables': self.scenario.variables,
      'seen': seen,
      'labels': jax.nn.one_hot(jnp.asarray(self.labels), client.num_classes, dtype=jnp.float32),
      'class_means': self._class_means(template),
    }

    # Lanes: job by job, target by target, view by view, restart by restart.
    runs = [
      (m, target, view, restart)
      for m, job in enumerate(jobs)
      for target in job.targets
      for view in target.views
      for restart in range(self.settings.restarts)
    ]
    column = lambda value: np.asarray([value(*run) for run in runs])  # noqa: E731
    numbers = np.asarray([job.template.numbers for job in jobs], np.float32).reshape(len(jobs), -1)
    member = column(lambda m, *_: m)
    lanes = {
      'view': jnp.asarray(column(lambda m, target, view, restart: view)),
      'trial': jnp.asarray(column(lambda m, target, view, restart: target.trial)),
      'key': self._lane_keys(
        column(lambda m, target, view, restart: target.defense < 0),
        column(lambda m, target, view, restart: target.address),
        column(lambda m, target, view, restart: restart),
      ),
      'numbers': tuple(jnp.asarray(numbers[member, i]) for i in range(numbers.shape[1])),
    }
    shown = column(lambda m, target, view, restart: (target.defense, target.counter) == (0, 0) and m == 0)
    if not shown.any():
      shown[:] = True
    label = self.label(members)

    num_steps = template.build(template.numbers, self.attacker).num_steps
    resume = self.store and self.store.load_checkpoint(name)
    steps, curve = [], []
    if resume:
      step, (steps, curve, *leaves) = resume
      steps, curve, resume = list(steps), list(curve), (step, leaves)

    def save(progress, **due):
      if self.store is not None and not progress.done:
        so_far = np.asarray(steps), np.asarray(curve)
        self.store.save_checkpoint(name, progress.step, lambda: (*so_far, progress.states), **due)

    def on_chunk(progress):
      steps.append(progress.step)
      curve.append(progress.objective)
      if progress.group_size != self.attack_group_size:
        self.attack_group_size = progress.group_size
        if self.store is not None:
          self.store.record_speed(attack_group_size=self.attack_group_size)
      if self.progress is not None:
        self.progress(label, progress, progress.objective[shown])
      save(progress)

    group_size = self.attack_group_size
    if self.fit and not self.split and not resume:
      group_size = driver.fitting_group_size(build, shared, lanes, group_size)
    found = driver.run(
      build,
      shared,
      lanes,
      num_steps=num_steps,
      group_size=group_size,
      on_chunk=on_chunk,
      on_failure=functools.partial(save, due=True),
      resume=resume or None,
      devices=jax.devices() if self.split else None,
      split=self.settings.batch_size if self.split else 0,
    )
    truth = {**shared, 'truth': jnp.asarray(self.truth)}
    at_truth = np.asarray(driver.evaluate(ObjectiveAtTruth(build), truth, lanes, group_size=self.group_size))
    rows, of_job, images, curves = self._score(jobs, found, at_truth, np.asarray(curve).T, num_steps)
    arrays = {'job': of_job, 'images': images, 'curves': curves, 'steps': steps}
    return rows, {name: np.asarray(array) for name, array in arrays.items()}

  def _lane_keys(self, is_control, address, restart):
    streams = jnp.stack([self.stream('attack'), self.stream('attack control')])

    def lane_key(control, address, restart):
      return jax.random.fold_in(jax.random.fold_in(streams[control], address), restart)

    return jax.vmap(lane_key)(jnp.asarray(is_control.astype(np.int32)), jnp.asarray(address), jnp.asarray(restart))

  def _score(self, jobs, found, at_truth, curve, num_steps):
    """Returns the rows of all targets, not yet judged, with the job, images and curve of each."""
    rows, of_job, images, curves = [], [], [], []
    lane = 0
    for index, job in enumerate(jobs):
      for target in job.targets:
        lanes = range(lane, lane + len(target.views) * self.settings.restarts)
        lane = lanes.stop
        row, chosen, permutation = self._row(job, target, lanes, found, at_truth)
        rows.append({**row, 'steps': num_steps})
        of_job.append(index)
        images.append(_arranged(found.images[chosen], permutation))
        curves.append(curve[chosen])
    return rows, of_job, images, curves

  def _row(self, job, target, lanes, found, at_truth):
    """Returns a target's row without its verdict, the lane that the attacker keeps, and how its images are matched."""
    settings, scenario = self.settings, self.scenario
    truth, labels = self.truth[target.trial], self.labels[target.trial]
    measured = [metrics.evaluate(found.images[i], truth, found.labels[i], labels) for i in lanes]
    best = int(np.argmin(found.distance[lanes.start : lanes.stop]))
    chosen, figures = lanes[best], measured[best]
    oracle = max(measured, key=lambda figure: -math.inf if np.isnan(figure['psnr']) else figure['psnr'])
    oracle = {f'oracle_{name}': oracle[name] for name in ('psnr', 'ssim', 'mse_unclipped')}
    permutation = figures.pop('permutation')
    control = target.defense < 0
    counter = adaptive.UNAWARE if control else self.attackers[target.defense][target.counter]
    diverged = int(found.diverged_step[chosen])
    uploads, changes = self.uploads
    place = target.address // self.count  # among this share's
    granted = self.knowledge(job.template)
    row = {
      **{key: scenario.settings[key] for key in ('dataset', 'model')},
      'init': scenario.settings.get('init'),
      'attack': settings.attacks[job.attack].name,
      'defense': CONTROL if control else settings.defenses[target.defense].name,
      'control': control,
      'knowledge': 'unaware' if counter is adaptive.UNAWARE else 'aware',
      'counter': None if counter is adaptive.UNAWARE else counter.name,
      'rounds': counter.rounds,
      'trial': target.address,
      'seed': scenario.settings.get('seed'),
      'batch_size': settings.batch_size,
      'restarts': settings.restarts,
      'labels': granted.labels,
      **figures,
      'objective': float(found.objective[chosen]),
      'distance': float(found.distance[chosen]),
      'objective_start': float(found.objective_start[chosen]),
      'objective_at_truth': float(at_truth[chosen]),
      **oracle,
      'diverged': diverged >= 0,
      'diverged_step': diverged if diverged >= 0 else None,
      'change': changes[target.defense][place],
      'sent': _share_sent(trees.take(trees.take(uploads[target.defense], 0), place)),
      'tier': granted.tier,
    }
    return row, chosen, permutation


def _arranged(images, permutation):
  """Returns the images [K, …] as they are matched to the truth, [N, …]; NaN where none is left for one."""
  matched = np.asarray(permutation).reshape(-1, *[1] * (images.ndim - 1)) >= 0
  return np.where(matched, images[permutation], np.float32(np.nan))


def _share_sent(upload):
  """Returns the share of entries that an upload sends."""
  pairs = zip(jax.tree.leaves(upload.update), jax.tree.leaves(upload.sent), strict=True)
  sizes = [(u.size, np.broadcast_to(sent, u.shape).sum()) for u, sent in pairs]
  return float(sum(sent for _, sent in sizes) / sum(size for size, _ in sizes))


def words(counters):
  """Returns what the attackers who know a defense do, {counter: sentence}."""
  return {counter.name: counter.words for counter in counters if counter is not adaptive.UNAWARE}
