"""Which assumption protects: an attack in its laboratory setting, and what is left of it as assumptions are dropped.

    assumptions ─► settings, one per set of dropped assumptions ─► one audit each ─► rows ─► effects ─► judgements

Published attacks assume an untrained model, wide initialisation, known labels, one image and one local step. Each of
these is an `Assumption`: a function that takes a `Setting` from the laboratory to production. What a judgement says is
computed from rows, in `judged`, and from nothing else.
"""

import dataclasses
import math
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gradleak import data, errors, metrics
from gradleak import settings as settings_of
from gradleak.attacks import csdlg_fast
from gradleak.attacks.base import AttackMethod, as_attack
from gradleak.audit import AuditResult, AuditSettings, audit, plan
from gradleak.defenses.defense import Defense, as_defense
from gradleak.federated import ClientSettings, simulation, training
from gradleak.models import Model, check_variables
from gradleak.models.model import check_model
from gradleak.progress import rounds as reporter
from gradleak.scenario import Scenario, num_logits, scenario
from gradleak.settings import setting

Samples = tuple[np.ndarray, np.ndarray]
LABORATORY, PRODUCTION = 'laboratory', 'production'
TRAINING = 'training'  # the assumption that is judged only where the training trained
CLEAR = 30.0  # dB: eight grey levels of 255; what is clearer is no larger leak, and is not counted as one
MARGIN = 3.0  # dB: half of the squared error; a smaller effect on the PSNR is none
LOCAL = ClientSettings(share='delta', local_epochs=2, local_batch_size=2)
_PLAIN = ClientSettings()
WIDTH = 0.5  # of DLG's initialisation, U(−0.5, 0.5)
_HELD_OUT = 4  # one of so many public images measures the accuracy, the others train
_TRAINING: dict[str, Any] = {'group': 'training before the attack'}
_ATTACKS: dict[str, Any] = {'group': 'attacks'}
_COUNT: dict[str, Any] = {'low': 1, 'integer': True}


@dataclasses.dataclass(frozen=True)
class SensitivitySettings:
  """How the settings are attacked; each is an argument of `sensitivity` and a flag of launch/sensitivity.py."""

  trials: int = setting(8, 'Uploads that are attacked in each setting.', **_ATTACKS, **_COUNT)
  batch_size: int = setting(4, 'Images behind an upload in production.', **_ATTACKS, **_COUNT)
  steps: int = setting(300, 'Steps of an attack that does not set its own.', **_ATTACKS, **_COUNT)
  controls: int = setting(16, 'Null-gradient runs per setting that define success.', **_ATTACKS, **_COUNT)
  training_rounds: int = setting(150, 'Rounds of training on the public images.', **_TRAINING, **_COUNT)
  training_clients: int = setting(5, 'Clients that share the public images.', **_TRAINING, **_COUNT)
  training_rate: float = setting(1e-3, 'Learning rate of their Adam.', **_TRAINING, low=1e-12, finite=True)


class Setting(NamedTuple):
  """What is audited once: where each assumption stands.

  Attributes:
    client: how the client trains and what it shares.
    audit: the `AuditSettings`.
    attack: the `AttackMethod`.
    defense: the client's.
    wide: whether all weights are drawn from U(−0.5, 0.5), in place of the model's own initialisation.
    trained: whether the model is trained on the public images before.
  """

  client: ClientSettings
  audit: AuditSettings
  attack: AttackMethod
  defense: Defense
  wide: bool = True
  trained: bool = False


@dataclasses.dataclass(frozen=True)
class Assumption:
  """One thing that published attacks assume, and what holds in production.

  Attributes:
    name: one word or a few, such as 'labels'.
    laboratory, production: what holds there, a sentence each.
    change: takes a `Setting` from the laboratory to production.
    skipped: why it has no meaning for this model, data or attack; empty where it has.
    needs: names of the assumptions that must be dropped for this one to have a meaning.
  """

  name: str
  laboratory: str
  production: str
  change: Callable[[Setting], Setting]
  skipped: str = ''
  needs: tuple[str, ...] = ()


class Effect(NamedTuple):
  """What one assumption does to the leak, paired over the trials of two settings that differ in it.

  Attributes:
    laboratory, production: the names of the two settings.
    psnr, low, high: mean difference of the PSNR, laboratory − production, and its 95 % interval, dB; PSNR above `CLEAR`
      counts as `CLEAR`. NaN where too few trials are finite.
    recovered: the numbers of images recovered, (laboratory, production).
    recovered_low, recovered_high: 95 % interval of the difference of the fractions recovered.
    n: trials.
  """

  laboratory: str
  production: str
  psnr: float
  low: float
  high: float
  recovered: tuple[int, int]
  recovered_low: float
  recovered_high: float
  n: int

  @property
  def shown(self) -> bool:
    """Whether the leak is larger in the laboratory: more is recovered, or what is recovered is clearer by `MARGIN`."""
    return self.recovered_low > 0 or (self.low > 0 and self.psnr >= MARGIN and self.recovered[0] > 0)

  @property
  def excluded(self) -> bool:
    """Whether the intervals exclude that the leak is larger by `MARGIN`, or by half of the images."""
    return self.high < MARGIN and self.recovered_high < 0.5


class Judgement(NamedTuple):
  """What the rows say about one assumption.

  Attributes:
    assumption: the `Assumption`.
    verdict: 'protects': restored to the laboratory, it raises the leak of production. 'others hold': dropped from the
      laboratory it lowers the leak, but production leaks no more with it restored. 'does not protect': neither, and
      the intervals exclude a large effect. 'not shown': skipped, the intervals decide nothing, or the training
      did not train.
    alone: the `Effect` of dropping it alone from the laboratory (with what it needs); None where it was skipped.
    restored: the `Effect` of restoring it alone in production (with what needs it); None where it was skipped.
  """

  assumption: Assumption
  verdict: str
  alone: Effect | None
  restored: Effect | None


class Sensitivity(NamedTuple):
  """What an attack recovers from the laboratory to production.

  Attributes:
    config: the settings, plain JSON.
    assumptions: in the order in which they are dropped, the skipped ones among them.
    steps: {name of a setting: names of the assumptions that are dropped in it}, the laboratory first.
    rows: one dict per setting and trial, plain JSON: 'setting', 'trial', 'psnr' (dB, of the image that all settings
      share; None where it diverged), 'recovered' (of the upload, as in the audit), 'by' (the counter-measure of the
      strongest attacker, None for the unaware one), 'control_psnr' (dB), and of the upload 'verdict' and 'upload_psnr'.
    examples: {name of a setting: what is reconstructed of the first trial's image, [H, W, C]}.
    truth: that image.
    accuracy: {initialisation, 'U(−0.5, 0.5)' or 'own': {'trained', 'untrained', 'guessing'}}: fractions of the public
      images held out that are classified correctly; guessing is the most frequent class. Empty without training.
    audits: {name of a setting: the folder of its audit, relative to the work directory}.
    methods: what is known of attack, defense and model, see `AuditResult.methods`.
    seconds: wall time of all audits and trainings.
  """

  config: dict[str, Any]
  assumptions: list[Assumption]
  steps: dict[str, tuple[str, ...]]
  rows: list[dict[str, Any]]
  examples: dict[str, np.ndarray]
  truth: np.ndarray
  accuracy: dict[str, dict[str, float]]
  audits: dict[str, str]
  methods: dict[str, Any]
  seconds: float

  @property
  def waterfall(self) -> list[str]:
    """The names of the settings from the laboratory down to production, one more assumption dropped in each."""
    names = [one.name for one in self.assumptions if not one.skipped]
    return [_named(names[:count], names) for count in range(len(names) + 1)]

  def of(self, name: str) -> list[dict[str, Any]]:
    """Returns the rows of a setting, in the order of the trials."""
    return [row for row in self.rows if row['setting'] == name]


@dataclasses.dataclass(frozen=True)
class _Task:
  """What all settings of one call share; arguments of `sensitivity`, checked."""

  key: jax.Array
  model: Model
  samples: Samples
  public: Samples | None
  variables: Mapping
  given: bool
  num_classes: int
  settings: SensitivitySettings
  config: dict
  folder: Any
  group_size: int | None
  progress: str


def assumptions(
  client: ClientSettings,
  attack: AttackMethod,
  settings: SensitivitySettings,
  *,
  defense: Defense | None = None,
  num_classes: int = 2,
  public: Any = None,
  batch_norm: bool = False,
  given: bool = False,
) -> list[Assumption]:
  """Returns the assumptions of published attacks, in the order in which they are dropped.

  Args:
    client: the client of production.
    attack: the attack, which says what it needs.
    settings: `SensitivitySettings`.
    defense: the client's in production, or None.
    num_classes: number of classes.
    public: (images, labels) that the model is trained on, or None.
    batch_norm: whether the model has BatchNorm.
    given: whether the weights of production were given.
  """
  rule = '' if attack(client.client(_PROBE, num_classes)).labels != 'unused' else 'the attack needs no labels'
  model = _of_model(attack, settings, rule, _untrainable(public, given), given)
  return [*model, *_of_training(client, attack, settings), *_of_client(client, batch_norm, defense)]


def _of_model(
  attack: AttackMethod, settings: SensitivitySettings, rule: str, untrainable: str, given: bool
) -> list[Assumption]:
  """Returns the assumptions on the model, the labels and the size of the batch."""
  return [
    Assumption(
      'initialisation',
      f'All weights are drawn from U(−{WIDTH}, {WIDTH}), as in DLG.',
      'The weights are those that were given.' if given else 'The model has its own initialisation.',
      lambda one: one._replace(wide=False),
    ),
    Assumption(
      TRAINING,
      'The model is untrained.',
      f'It was trained on public images for {settings.training_rounds} rounds.',
      lambda one: one._replace(trained=True),
      skipped=untrainable,
    ),
    Assumption(
      'labels',
      'The attacker is given the labels.',
      f'It infers them from the update, by the rule {attack.label_rule!r}.',
      lambda one: one._replace(audit=dataclasses.replace(one.audit, labels='inferred')),
      skipped=rule,
    ),
    Assumption(
      'batch',
      'An upload is of one image.',
      f'It is of {settings.batch_size} images.',
      lambda one: one._replace(audit=dataclasses.replace(one.audit, batch_size=settings.batch_size)),
      skipped='' if settings.batch_size > 1 else 'an upload is of one image in production, too',
    ),
  ]


def _of_training(client: ClientSettings, attack: AttackMethod, settings: SensitivitySettings) -> list[Assumption]:
  """Returns the assumptions on local training, and on what the attacker knows of it."""
  gradient = client.share == 'gradient'
  steps = client.local_epochs * -(-settings.batch_size // (client.local_batch_size or settings.batch_size))
  local = {name: getattr(client, name) for name in _LOCAL_NAMES}
  return [
    Assumption(
      'local training',
      'The client shares the gradient of one step.',
      f'It shares the difference of the weights after {_count(client.local_epochs, "epoch")}, '
      f'{_count(steps, "step")} in all; the attacker simulates them exactly.',
      lambda one: one._replace(client=dataclasses.replace(one.client, **local)),
      skipped='the client shares the gradient of one step in production, too' if gradient else '',
    ),
    Assumption(
      'known training',
      'The attacker knows the local training and simulates it.',
      'It does not know it, and takes the difference of the weights for a gradient.',
      lambda one: one._replace(attack=one.attack.changed(match='approximation')),
      skipped=_unmatched(attack, gradient),
      needs=('local training',),
    ),
  ]


def _of_client(client: ClientSettings, batch_norm: bool, defense: Defense | None) -> list[Assumption]:
  """Returns the assumptions on BatchNorm, the client's other settings, the other clients and the defense."""
  other = {name: getattr(client, name) for name in _OTHER_NAMES if getattr(client, name) != getattr(_PLAIN, name)}
  cohort = client.cohort
  return [
    Assumption(
      'BatchNorm',
      'BatchNorm is in eval mode, on running statistics that the server knows.',
      'BatchNorm is in train mode, on the statistics of the batch.',
      lambda one: one._replace(client=dataclasses.replace(one.client, batch_norm='train')),
      skipped=_unnormalised(batch_norm, client),
    ),
    Assumption(
      'client settings',
      'Nothing is augmented; all layers are trained, in float32.',
      ', '.join(f'`{name}={value}`' for name, value in other.items()) or 'The same.',
      lambda one: one._replace(client=dataclasses.replace(one.client, **other)),
      skipped='' if other else 'augmentation, precision and layers are the same in production',
    ),
    Assumption(
      'single uploads',
      "The server sees each client's upload.",
      f'It sees the mean of the uploads of {cohort} alone (secure aggregation).' if cohort > 1 else 'The same.',
      lambda one: one._replace(
        client=dataclasses.replace(one.client, cohort=cohort),
        audit=dataclasses.replace(one.audit, batch_size=one.audit.batch_size * cohort),
      ),
      skipped='' if cohort > 1 else 'the server sees single uploads in production, too',
    ),
    Assumption(
      'defense',
      'The client has no defense.',
      f'It has `{defense}`; the attacker knows it, and the best attacker counts.' if defense else 'It has none.',
      lambda one: one._replace(defense=as_defense(defense)),
      skipped='' if defense is not None else 'none was given',
    ),
  ]


# What of `ClientSettings` is of any client, and what is local training.
_OTHER_NAMES = ('augment', 'precision', 'frozen')
_LOCAL_NAMES = tuple(
  field.name
  for field in dataclasses.fields(ClientSettings)
  if field.name not in ('loss', 'batch_norm', 'cohort', *_OTHER_NAMES)
)
_PROBE = Model('probe', lambda key, shape: {'params': {}}, lambda variables, images, train, key: (images, {}))


def _count(number: int, what: str) -> str:
  return f'{number} {what}' if number == 1 else f'{number} {what}s'


def _untrainable(public: Any, given: bool) -> str:
  if given:
    return 'the weights of production were given: what they were trained on is not known'
  return '' if public is not None else 'there are no public images to train on'


def _unmatched(attack: AttackMethod, gradient: bool) -> str:
  if gradient:
    return 'the client shares the gradient of one step'
  return '' if attack.takes({'match': ''}) else 'the attack simulates no local training'


def _unnormalised(batch_norm: bool, client: ClientSettings) -> str:
  if not batch_norm:
    return 'the model has no BatchNorm'
  return '' if client.batch_norm == 'train' else 'BatchNorm is in eval mode in production, too'


def sensitivity(
  key: Any,
  model: Model,
  images: Any,
  labels: Any,
  *,
  attack: Any = None,
  client: ClientSettings | None = None,
  defense: Any = None,
  variables: Mapping | None = None,
  public: Samples | None = None,
  num_classes: int | None = None,
  chosen: Sequence[Assumption] | None = None,
  settings: SensitivitySettings | None = None,
  config: Mapping | None = None,
  workdir: Any = 'results/sensitivity',
  group_size: int | None = None,
  progress: str = 'auto',
  on_audit: Callable[[AuditResult, Any], None] | None = None,
  **changes: Any,
) -> Sensitivity:
  """Attacks the laboratory setting, drops one assumption at a time, and all; restores each alone in production.

  `gradleak.report.write` makes a page of the result.

  Args:
    key: a typed JAX key; the same key and settings give the same rows, bit for bit, also after a resume.
    model: a `Model`; wrap a network of your own by `models.from_flax` or `models.from_functions`.
    images, labels: floats [N, H, W, C] in [0, 1] and integers [N], N ≥ trials · batch_size · cohort. In production
      trial t is the t-th batch; where an upload is of one image, it is the first of that batch, which all share.
    attack: one of `gradleak.attacks`; `csdlg_fast(tv=1e-6)` by default.
    client: `ClientSettings` of production; by default it shares its delta after two epochs in batches of two.
    defense: the client's in production, or None.
    variables: the weights that the client is sent in production, such as trained ones; by default initialised from
      `key`, then trained on the public images.
    public: (images, labels) apart from the private ones, to train on; a quarter of them measures the accuracy.
    num_classes: number of classes; by default as many as the model returns.
    chosen: `Assumption`s in the order in which they are dropped; `assumptions` by default.
    settings: `SensitivitySettings`.
    config: what else identifies the run, plain JSON, such as {'dataset': 'my photographs'}.
    workdir: a folder, which holds one folder per audit; a run that was stopped goes on from there.
    group_size: as `gradleak.audit` takes it.
    progress: 'auto', 'bar', 'lines' or 'none'.
    on_audit: called with (`AuditResult`, its folder) after each audit.
    **changes: fields of `SensitivitySettings` and of `ClientSettings`, the latter of production.

  Raises:
    UsageError: for settings that cannot be run, before anything is trained or attacked.
  """
  given, local = _settings(settings, client, changes)
  key = errors.check_key('key', key, traced=False)
  method = csdlg_fast(tv=1e-6) if attack is None else as_attack(attack)
  hidden = as_defense(defense)
  task = _task(
    key, model, (images, labels), public, variables, num_classes, given, local, config, workdir, group_size, progress
  )
  if chosen is None:
    chosen = assumptions(
      local,
      method,
      given,
      defense=hidden if hidden.members else None,
      num_classes=task.num_classes,
      public=task.public,
      batch_norm=bool(task.variables.get('batch_stats')),
      given=task.given,
    )
  _check_assumptions(chosen)
  labels_of = 'auto' if method(LOCAL.client(_PROBE, task.num_classes)).labels == 'unused' else 'known'
  start = Setting(
    ClientSettings(loss=local.loss, batch_norm='eval'),
    AuditSettings(steps=given.steps, controls=given.controls, labels=labels_of),
    method,
    as_defense(None),
  )
  task.config.update(attack=str(method), defense=str(hidden) if hidden.members else None, **local.recorded())
  return _run(task, list(chosen), start, on_audit)


def judged(found: Sensitivity) -> list[Judgement]:
  """Returns a `Judgement` per assumption, computed from the rows."""
  used = [one for one in found.assumptions if not one.skipped]
  names = [one.name for one in used]
  result = []
  for one in found.assumptions:
    if one.skipped:
      result.append(Judgement(one, 'not shown', None, None))
      continue
    alone = effect(found, _named(one.needs, names), _named((*one.needs, one.name), names))
    restored = effect(found, _named(_without(one, used), names), _named(names, names))
    verdict = _verdict(alone, restored)
    if one.name == TRAINING and verdict == 'does not protect' and untrained(found):
      verdict = 'not shown'
    result.append(Judgement(one, verdict, alone, restored))
  return result


def untrained(found: Sensitivity) -> list[str]:
  """Returns the initialisations from which the training does not beat guessing, names of `Sensitivity.accuracy`."""
  return [origin for origin, one in found.accuracy.items() if one['trained'] <= one['guessing']]


def _verdict(alone: Effect, restored: Effect) -> str:
  if restored.shown:
    return 'protects'
  if alone.shown:
    return 'others hold'
  return 'does not protect' if restored.excluded and alone.excluded else 'not shown'


def effect(found: Sensitivity, laboratory: str, production: str) -> Effect:
  """Returns the `Effect` between two settings, named as in `Sensitivity.steps`."""
  rows = found.of(laboratory), found.of(production)
  psnr = [np.array([math.nan if row['psnr'] is None else min(row['psnr'], CLEAR) for row in side]) for side in rows]
  recovered = [np.array([row['recovered'] for row in side], float) for side in rows]
  differences = psnr[0] - psnr[1]
  few = np.isfinite(differences).sum() < 3  # Student's interval of two is 12.7 standard errors wide
  mean, low, high = metrics.mean_interval(differences)
  recovered_low, recovered_high = _paired(*recovered)
  if few:
    low = high = recovered_low = recovered_high = math.nan
  return Effect(
    laboratory,
    production,
    mean,
    low,
    high,
    (int(recovered[0].sum()), int(recovered[1].sum())),
    recovered_low,
    recovered_high,
    len(differences),
  )


def _paired(laboratory: np.ndarray, production: np.ndarray) -> tuple[float, float]:
  """Returns a 95 % interval of the difference of two fractions of the same trials, 0 or 1 each, from exact ones.

  It is that of the trials recovered in the laboratory alone less those recovered in production alone, whose exact
  intervals hold at 97.5 % each: wide for few trials, also where all agree.
  """
  n = len(laboratory)
  only = [int((one > other).sum()) for one, other in ((laboratory, production), (production, laboratory))]
  (_, low, high), (_, others_low, others_high) = (metrics.proportion_interval(count, n, 0.975) for count in only)
  return low - others_high, high - others_low


def _settings(
  given: SensitivitySettings | None, client: ClientSettings | None, changes: dict
) -> tuple[SensitivitySettings, ClientSettings]:
  """Returns both settings objects, the keyword arguments given to whichever has them."""
  own = [field.name for field in dataclasses.fields(SensitivitySettings)]
  of_client = [field.name for field in dataclasses.fields(ClientSettings)]
  for name in changes:
    if name not in own and name not in of_client:
      raise errors.unknown('setting of gradleak.sensitivity:', name, [*own, *of_client])
  default = ClientSettings() if changes.get('share') == 'gradient' else LOCAL
  local = errors.check_instance('client', default if client is None else client, ClientSettings, 'ClientSettings')
  made = SensitivitySettings() if given is None else given
  errors.check_instance('settings', made, SensitivitySettings, 'SensitivitySettings')
  made = dataclasses.replace(made, **{k: v for k, v in changes.items() if k in own})
  settings_of.check(made)
  return made, dataclasses.replace(local, **{k: v for k, v in changes.items() if k in of_client})


def _task(
  key: jax.Array,
  model: Any,
  samples: tuple,
  public: Any,
  variables: Mapping | None,
  num_classes: int | None,
  given: SensitivitySettings,
  local: ClientSettings,
  config: Any,
  workdir: Any,
  group_size: int | None,
  progress: str,
) -> _Task:
  """Returns the arguments of `sensitivity`, checked."""
  images, labels = data.pair('images and labels', samples, num_classes)
  needed = given.trials * given.batch_size * local.cohort
  if len(images) < needed:
    raise errors.UsageError(
      f'{given.trials} trials of {needed // given.trials} images need {needed}, there are {len(images)}: give fewer '
      'trials or a smaller batch_size'
    )
  shape = images.shape[1:]
  own = jax.jit(check_model(model).init, static_argnums=1)(jax.random.fold_in(key, 0), shape)
  if variables is not None:
    check_variables(model, variables, shape)
  weights = own if variables is None else variables
  classes = num_classes or num_logits(model, weights, shape)
  reporter(progress, 1)  # an unknown mode says so now
  if public is not None:
    public = data.pair('public', public, classes, shape)
    least = _HELD_OUT * given.training_clients
    if len(public[0]) < least:
      raise errors.UsageError(
        f'public holds {len(public[0])} images, and {given.training_clients} clients that train on them need {least}'
      )
  identity = {
    **dataclasses.asdict(given),
    'model': model.name,
    'dataset': 'custom',
    'num_classes': classes,
    'image_shape': list(shape),
    **errors.check_json('config', {} if config is None else config),
  }
  folder = errors.check_path('workdir', workdir)
  chosen = images[:needed], labels[:needed]
  return _Task(
    key, model, chosen, public, weights, variables is not None, classes, given, identity, folder, group_size, progress
  )


def _check_assumptions(chosen: Any) -> None:
  """Raises `UsageError` for anything but assumptions with distinct names, each after those that it needs."""
  names: list[str] = []
  for one in errors.check_instance('assumptions', chosen, Sequence, 'a list of Assumptions'):
    errors.check_instance('an assumption', one, Assumption, 'a gradleak.sensitivity.Assumption')
    errors.check_text('the name of an assumption', one.name)
    if one.name in (*names, LABORATORY, PRODUCTION):
      raise errors.UsageError(f'the assumption {one.name!r} is listed twice, or has the name of a setting')
    for needed in () if one.skipped else one.needs:
      errors.check_choice(f'assumption that {one.name!r} needs:', needed, names)
    if not one.skipped:
      names.append(one.name)
  if not names:
    raise errors.UsageError('no assumption is left to drop: all are skipped')


def _named(dropped: Sequence[str], names: Sequence[str]) -> str:
  """Returns the name of the setting in which some of the assumptions are dropped."""
  kept = [name for name in names if name in dropped]
  if not kept:
    return LABORATORY
  return PRODUCTION if len(kept) == len(names) else ' + '.join(kept)


def _without(one: Assumption, used: Sequence[Assumption]) -> list[str]:
  """Returns the names of all assumptions but one, and those that need it."""
  return [other.name for other in used if other.name != one.name and one.name not in other.needs]


def _steps(used: Sequence[Assumption]) -> dict[str, tuple[str, ...]]:
  """Returns {name of a setting: assumptions dropped}: the waterfall, each dropped alone, and each restored alone."""
  names = [one.name for one in used]
  dropped = [names[:count] for count in range(len(names) + 1)]
  dropped += [[*one.needs, one.name] for one in used] + [list(one.needs) for one in used]
  dropped += [_without(one, used) for one in used]
  return {_named(each, names): tuple(name for name in names if name in each) for each in dropped}


def _run(task: _Task, chosen: list[Assumption], start: Setting, on_audit: Callable | None) -> Sensitivity:
  """Trains, then runs one audit per setting, or finds them in the work directory."""
  used = [one for one in chosen if not one.skipped]
  steps = _steps(used)
  settings = {name: _setting(start, used, dropped) for name, dropped in steps.items()}
  for name in (LABORATORY, PRODUCTION):  # what cannot be run says so now
    one = settings[name]
    made = _scenario(task, one, task.variables)
    plan(task.key, made, [one.defense], [one.attack], task.settings.trials, one.audit)
  weights: dict[tuple[bool, bool], Mapping] = {}
  accuracy: dict[str, dict[str, float]] = {}
  rows, examples, audits, methods = [], {}, {}, {}
  began, seconds = time.monotonic(), 0.0
  for number, (name, one) in enumerate(settings.items()):
    which = one.wide, one.trained
    if which not in weights:
      weights[which], measured, took = _weights(task, *which)
      seconds += took
      if measured:
        accuracy[_origin(one.wide)] = measured
    _say(task, number, len(settings), name, began)
    folder = task.folder / _folder(name)
    result = audit(
      jax.random.fold_in(task.key, 1),
      _scenario(task, one, weights[which]),
      [one.defense],
      [one.attack],
      task.settings.trials,
      settings=one.audit,
      workdir=folder,
      group_size=task.group_size,
      progress=task.progress,
    )
    assert result is not None  # this process runs all of it
    if on_audit is not None:
      on_audit(result, folder)
    found, image = _found(name, result)
    rows += found
    examples[name], audits[name] = image, folder.name
    methods = _joined(methods, result.methods)
    seconds += result.seconds
  truth = task.samples[0][0]
  return Sensitivity(task.config, chosen, steps, rows, examples, truth, accuracy, audits, methods, seconds)


def _setting(start: Setting, used: Sequence[Assumption], dropped: Sequence[str]) -> Setting:
  """Returns the setting in which some assumptions are dropped; local batches are no larger than the upload's."""
  made = start
  for one in used:
    if one.name in dropped:
      made = one.change(made)
  size = made.client.local_batch_size
  if size is not None and size >= made.audit.batch_size // made.client.cohort:
    made = made._replace(client=dataclasses.replace(made.client, local_batch_size=None))
  return made


def _scenario(task: _Task, one: Setting, variables: Mapping) -> Scenario:
  """Returns the scenario of a setting: all images, or the first of each batch where an upload is of one image."""
  apart = max(1, len(task.samples[0]) // (task.settings.trials * one.audit.batch_size))
  images, labels = (part[::apart] for part in task.samples)
  return scenario(
    task.model,
    images,
    labels,
    variables=variables,
    num_classes=task.num_classes,
    dataset=task.config['dataset'],
    client=one.client,
    public=task.public,
    notes={'init': _origin(one.wide), 'trained': one.trained},
  )


def _origin(wide: bool) -> str:
  return f'U(−{WIDTH}, {WIDTH})' if wide else 'own'


def _folder(name: str) -> str:
  return re.sub(r'[^\w+]+', '-', name.replace(' + ', '+').lower())


def _say(task: _Task, number: int, count: int, name: str, began: float) -> None:
  """Says which setting is next, and how long the rest takes at the pace so far."""
  if task.progress == 'none':
    return
  pace = (time.monotonic() - began) / number if number else 0.0
  left = f' (about {pace * (count - number):.0f} s left)' if number else ''
  what = name if name in (LABORATORY, PRODUCTION) else f'dropped: {name}'
  print(f'setting {number + 1} of {count}, {what}{left}', file=sys.stderr, flush=True)


def redrawn(key: jax.Array, variables: Mapping) -> dict:
  """Returns the variables with every parameter drawn from U(−0.5, 0.5), as in DLG's code; statistics stay."""
  leaves, structure = jax.tree.flatten(variables['params'])
  keys = jax.random.split(key, max(len(leaves), 1))
  drawn = [
    jax.random.uniform(each, jnp.shape(leaf), jnp.result_type(leaf), minval=-WIDTH, maxval=WIDTH)
    for each, leaf in zip(keys, leaves, strict=False)
  ]
  return {**variables, 'params': jax.tree.unflatten(structure, drawn)}


def _weights(task: _Task, wide: bool, trained: bool) -> tuple[Mapping, dict[str, float], float]:
  """Returns (variables, accuracies measured, seconds); a training goes on from its folder."""
  start = redrawn(jax.random.fold_in(task.key, 2), task.variables) if wide else task.variables
  if not trained:
    return start, {}, 0.0
  assert task.public is not None
  given, began = task.settings, time.monotonic()
  images, labels = task.public
  order = np.asarray(jax.random.permutation(jax.random.fold_in(task.key, 3), len(images)))
  held, rest = np.split(order, [len(order) // _HELD_OUT])
  size = len(rest) // given.training_clients
  local = ClientSettings(
    share='delta', optimizer='adam', learning_rate=given.training_rate, local_batch_size=min(8, size)
  )
  federation = simulation.Federation(
    local.client(task.model, task.num_classes),
    images[rest],
    labels[rest],
    np.split(np.arange(given.training_clients * size), given.training_clients),
    given.training_clients,
  )
  test = images[held], labels[held]
  name = f'training-{"wide" if wide else "own"}'
  if task.progress != 'none':
    print(f'training on {len(rest)} public images, initialised from {_origin(wide)} …', file=sys.stderr, flush=True)
  state, rows = training.train(
    jax.random.fold_in(task.key, 4),
    federation,
    start,
    given.training_rounds,
    test=test,
    evaluate_every=given.training_rounds,
    workdir=task.folder / name,
    config={**task.config, 'wide': wide},
    on_round=reporter(task.progress, given.training_rounds),
  )
  measured = {
    'trained': rows[-1]['accuracy'],
    'untrained': simulation.accuracy(task.model, start, *test)[0],
    'guessing': float(np.bincount(test[1]).max() / len(held)),
  }
  return state.variables, measured, time.monotonic() - began


def _found(name: str, result: AuditResult) -> tuple[list[dict[str, Any]], np.ndarray]:
  """Returns (rows of a setting, what the strongest attacker makes of the first trial's image)."""
  cases: dict[Any, list[dict]] = {}
  for row in result.rows:
    cases.setdefault(row['counter'], []).append(row)
  counter = max(cases, key=lambda one: _strength(cases[one]))
  rows = cases[counter]
  case = rows[0]['attack'], rows[0]['defense'], *filter(None, [counter])
  images = np.asarray(result.reconstructions[case])[:, 0]
  psnr = np.asarray(metrics.psnr(images.astype(np.float32), np.asarray(result.truth)[:, 0].astype(np.float32)))
  return [
    {
      'setting': name,
      'trial': row['trial'],
      'psnr': None if np.isnan(value) else float(value),
      'recovered': row['success'],
      'by': counter,
      'control_psnr': row['control_psnr'],
      'verdict': row['verdict'],
      'upload_psnr': row['psnr'],
    }
    for row, value in zip(rows, psnr, strict=True)
  ], images[0]


def _strength(rows: Sequence[dict]) -> tuple[int, float]:
  """Returns what orders attackers: uploads recovered, then the mean PSNR."""
  finite = [row['psnr'] for row in rows if row['psnr'] is not None]
  return sum(row['success'] for row in rows), float(np.mean(finite)) if finite else -math.inf


def _joined(known: dict, found: Mapping[str, Any]) -> dict:
  """Returns what is known of the methods of all settings together."""
  return {kind: {**known.get(kind, {}), **facts} for kind, facts in found.items()}
