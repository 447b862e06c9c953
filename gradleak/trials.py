"""The trials of an audit: the uploads of all defenses, what attackers make of them, and the attacks on that.

What was sent, and what an attacker knows of the defense, is data to an attack, so that all defenses, counter-measures,
restarts and numeric settings of one attack, and the control runs that its successes are measured against, are lanes of
one compiled program.
"""

import functools
import math
import zlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gradleak import defenses as defense_names
from gradleak import metrics, trees
from gradleak.attacks import adaptive, driver
from gradleak.attacks.labels import RULES
from gradleak.attacks.registry import AttackTemplate
from gradleak.federated import Knowledge, Observation, layer_average
from gradleak.storage import plain
from gradleak.verdict import CONTROL, judge


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


class Job(NamedTuple):
  """One attack, its template changed as a counter-measure asks for, and its targets."""

  attack: int
  template: AttackTemplate
  targets: tuple[Target, ...]


class Trials:
  """The uploads of all defenses, and the attacks on them."""

  def __init__(self, key, scenario, context, settings, group_size=1, store=None, progress=None):
    self.scenario, self.context, self.settings = scenario, context, settings
    self.group_size, self.store, self.progress = group_size, store, progress
    self.key = key
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
      auxiliary_data=attack.auxiliary_data,
    )

  def _observation(self, template, variables, update, labels, **known):
    return Observation(
      variables,
      update,
      labels,
      self.knowledge(template),
      (self.settings.batch_size, *self.scenario.images.shape[1:]),
      self.scenario.client.num_classes,
      **known,
    )

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
    client, variables = self.scenario.client, self.scenario.variables
    key, images, labels = jax.random.key(0), self.truth[0], jnp.asarray(self.labels[0])
    upload = jax.eval_shape(client.local_update, key, variables, images, labels)
    for defense in self.settings.defenses:
      defended = defense.build(defense.numbers, client)
      jax.eval_shape(defended.local_update, key, variables, images, labels)
    onehot = jax.ShapeDtypeStruct((self.settings.batch_size, client.num_classes), jnp.float32)

    def start(key, variables, update, labels):
      attack = template.build(template.numbers, self.attacker)
      observation = self._observation(template, variables, update, labels, class_means=self._class_means(template))
      return attack.step(attack.init(key, observation), observation)

    jax.eval_shape(start, key, variables, upload.update, onehot)

  # ---- uploads

  @functools.cached_property
  def uploads(self):
    """Per defense, and last of the control runs, the `Upload`s [rounds, trials, …] on the host; and their changes.

    A change is the norm of what the defense did to an upload, relative to the undefended one: a list of [trials].
    """
    settings = self.settings
    every, repeated = np.arange(settings.num_trials), np.arange(settings.controls) % settings.num_trials
    rounds = [max(counter.rounds for counter in attackers) for attackers in self.attackers]
    requests = [(defense_names.parse('none'), 'client', every, 1)]
    requests += [(d, 'client', every, count) for d, count in zip(settings.defenses, rounds, strict=True)]
    requests.append((defense_names.parse(CONTROL), 'control', repeated, 1))
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

    def change(upload):
      first = trees.take(upload.update, 0)
      return np.asarray(
        jax.vmap(lambda a, b: trees.norm(trees.subtract(a, b)) / trees.norm(b))(first, trees.take(undefended.update, 0))
      )

    return sent, [change(upload) for upload in sent[:-1]] + [np.full(settings.controls, np.nan)]

  def _upload_lanes(self, defense, stream, trial, rounds):
    """Returns the lanes of one defense, round by round; the i-th upload of a round draws the i-th key of its stream."""
    names = [stream, *(f'{stream} round {i}' for i in range(1, rounds))]
    fold = jax.vmap(jax.random.fold_in, (None, 0))
    keys = jnp.concatenate([fold(self.stream(name), jnp.arange(len(trial))) for name in names])
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
        for t in range(self.settings.num_trials):
          of_trial = jax.tree.map(lambda x, t=t, r=counter.rounds: x[:r, t], uploads[d])
          several = counter.rounds > 1
          update = jax.device_get(layer_average(of_trial)) if several else trees.take(of_trial.update, 0)
          add(d, c, t, t, counter.views(update))
    for i in range(self.settings.controls):
      update = jax.tree.map(lambda x, i=i: x[0, i], uploads[-1].update)
      add(-1, 0, i % self.settings.num_trials, i, [adaptive.everything(update)])
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
    template = jobs[0].template
    client = self.scenario.client
    shared = {
      'variables': self.scenario.variables,
      'seen': seen,
      'labels': jax.nn.one_hot(jnp.asarray(self.labels), client.num_classes, dtype=jnp.float32),
      'class_means': self._class_means(template),
    }

    def build(shared, lane):
      labels, view = shared['labels'][lane['trial']], trees.take(shared['seen'], lane['view'])
      granted = self.knowledge(template).labels == 'known'  # an attack sees no labels that it was not granted
      observation = self._observation(
        template,
        shared['variables'],
        view.update,
        labels if granted else jnp.zeros_like(labels),
        compared=view.compared,
        noise=view.noise,
        clip=view.clip,
        class_means=shared['class_means'],
      )
      return template.build(lane['numbers'], self.attacker), lane['key'], observation

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
    label = template.name if len(jobs) == 1 else f'{template.structure[0]} × {len(jobs)}'

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
        self.progress(label, progress, progress.objective[shown])
      if self.store is not None and progress.step < progress.num_steps:
        self.store.save_checkpoint(name, progress.step, (np.asarray(steps), np.asarray(curve), progress.states))

    found = driver.run(
      build, shared, lanes, num_steps=num_steps, group_size=self.group_size, on_chunk=on_chunk, resume=resume or None
    )
    at_truth = self._objective_at_truth(build, shared, lanes)
    rows, images, curves = self._score(jobs, found, at_truth, np.asarray(curve).T, num_steps)
    return plain(rows), {'images': np.stack(images), 'curves': np.stack(curves), 'steps': np.asarray(steps)}

  def _lane_keys(self, is_control, address, restart):
    streams = jnp.stack([self.stream('attack'), self.stream('attack control')])

    def lane_key(control, address, restart):
      return jax.random.fold_in(jax.random.fold_in(streams[control], address), restart)

    return jax.vmap(lane_key)(jnp.asarray(is_control.astype(np.int32)), jnp.asarray(address), jnp.asarray(restart))

  def _objective_at_truth(self, build, shared, lanes):
    """Returns what each lane's attacker would have measured at the private images: the auditor's figure."""

    def one(shared, lane):
      attack, _, observation = build(shared, lane)
      images, labels = shared['truth'][lane['trial']], shared['labels'][lane['trial']]
      return attack.objective(observation, images, labels)

    shared = {**shared, 'truth': jnp.asarray(self.truth)}
    return np.asarray(driver.evaluate(one, shared, lanes, group_size=self.group_size))

  def _score(self, jobs, found, at_truth, curve, num_steps):
    """Returns the rows of all jobs and targets, with the images and curves of the views and restarts chosen."""
    rows, images, curves = [], [], []
    lane = 0
    for job in jobs:
      scored = []
      for target in job.targets:
        lanes = range(lane, lane + len(target.views) * self.settings.restarts)
        lane = lanes.stop
        row, chosen, permutation = self._row(job, target, lanes, found, at_truth)
        scored.append({**row, 'steps': num_steps})
        images.append(found.images[chosen][permutation])
        curves.append(curve[chosen])
      threshold = metrics.percentile_threshold([row['psnr'] for row in scored if row['control']])
      rows += [{**row, **judge(row, threshold)} for row in scored]
    return rows, images, curves

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
      'change': changes[target.defense][target.address],
      'sent': _share_sent(trees.take(trees.take(uploads[target.defense], 0), target.address)),
      'tier': granted.tier,
    }
    return row, chosen, permutation


def _share_sent(upload):
  """Returns the share of entries that an upload sends."""
  pairs = zip(jax.tree.leaves(upload.update), jax.tree.leaves(upload.sent), strict=True)
  sizes = [(u.size, np.broadcast_to(sent, u.shape).sum()) for u, sent in pairs]
  return float(sum(sent for _, sent in sizes) / sum(size for size, _ in sizes))


def words(counters):
  """Returns what the attackers who know a defense do, {counter: sentence}."""
  return {counter.name: counter.words for counter in counters if counter is not adaptive.UNAWARE}
