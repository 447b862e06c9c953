"""What published attacks assume of a client, its model and its upload, and what holds in production."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from gradleak.attacks.base import AttackMethod
from gradleak.audit import AuditSettings
from gradleak.core import errors
from gradleak.core.settings import setting
from gradleak.defenses.defense import Defense, as_defense
from gradleak.federated import ClientSettings
from gradleak.modalities import IMAGES, Modality
from gradleak.models import Model

LABORATORY, PRODUCTION = 'laboratory', 'production'
TRAINING = 'training'  # the assumption that is judged only where the training trained
LOCAL = ClientSettings(share='delta', local_epochs=2, local_batch_size=2)
WIDTH = 0.5  # of DLG's initialisation, U(−0.5, 0.5)
PROBE = Model('probe', lambda key, shape: {'params': {}}, lambda variables, images, train, key: (images, {}))
_PLAIN = ClientSettings()
# What of `ClientSettings` is of any client, and what is local training.
_OTHER_NAMES = ('augment', 'precision', 'frozen', 'private')
_LOCAL_NAMES = tuple(
  field.name
  for field in dataclasses.fields(ClientSettings)
  if field.name not in ('loss', 'batch_norm', 'cohort', *_OTHER_NAMES)
)
_TRAINING: dict[str, Any] = {'group': 'training before the attack'}
_ATTACKS: dict[str, Any] = {'group': 'attacks'}
_COUNT: dict[str, Any] = {'low': 1, 'integer': True}


@dataclasses.dataclass(frozen=True)
class SensitivitySettings:
  """How the settings are attacked; each is an argument of `sensitivity` and a flag of launch/sensitivity.py."""

  trials: int = setting(8, 'Uploads that are attacked in each setting.', **_ATTACKS, **_COUNT)
  batch_size: int = setting(4, 'Samples behind an upload in production.', **_ATTACKS, **_COUNT)
  steps: int = setting(300, 'Steps of an attack that does not set its own.', **_ATTACKS, **_COUNT)
  controls: int = setting(16, 'Null-gradient runs per setting that define success.', **_ATTACKS, **_COUNT)
  training_rounds: int = setting(150, 'Rounds of training on the public samples.', **_TRAINING, **_COUNT)
  training_clients: int = setting(5, 'Clients that share the public samples.', **_TRAINING, **_COUNT)
  training_rate: float = setting(1e-3, 'Learning rate of their Adam.', **_TRAINING, low=1e-12, finite=True)


class Setting(NamedTuple):
  """What is audited once: where each assumption stands.

  Attributes:
    client: how the client trains and what it shares.
    audit: the `AuditSettings`.
    attack: the `AttackMethod`.
    defense: the client's.
    wide: whether all weights are drawn from U(−0.5, 0.5), in place of the model's own initialisation.
    trained: whether the model is trained on the public samples before.
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
  modality: Modality = IMAGES,
  adapters: bool = False,
) -> list[Assumption]:
  """Returns the assumptions of published attacks, in the order in which they are dropped.

  Args:
    client: the client of production.
    attack: the attack, which says what it needs.
    settings: `SensitivitySettings`.
    defense: the client's in production, or None.
    num_classes: number of classes.
    public: (samples, targets) that the model is trained on, or None.
    batch_norm: whether the model has BatchNorm.
    given: whether the weights of production were given.
    modality: what the samples are; attacks on images alone were published with weights that are drawn so widely.
    adapters: whether the client trains adapters (`models.lora`), of which no rule reads a label.
  """
  probe = client.client(PROBE, num_classes)
  rule = 'no rule reads labels from adapters' if adapters else ''
  rule = 'the samples give their own targets' if probe.loss.own else rule
  rule = 'the attack needs no labels' if unlabelled(attack, client, num_classes, modality) else rule
  model = _of_model(attack, settings, rule, _untrainable(public, given, modality), given, modality)
  size = min(probe.batch_size or settings.batch_size, settings.batch_size)  # as in every setting
  steps = dataclasses.replace(probe, batch_size=size, cohort=1).num_steps(settings.batch_size)
  return [*model, *_of_training(client, attack, steps), *_of_client(client, batch_norm, defense)]


def unlabelled(attack: AttackMethod, client: ClientSettings, num_classes: int, modality: Modality) -> bool:
  """Returns whether an attack on such a client needs no labels."""
  return attack(dataclasses.replace(client.client(PROBE, num_classes), modality=modality)).labels == 'unused'


def _of_model(
  attack: AttackMethod, settings: SensitivitySettings, rule: str, untrainable: str, given: bool, modality: Modality
) -> list[Assumption]:
  """Returns the assumptions on the model, the labels and the size of the batch."""
  one, several = modality.noun
  wide = Assumption(
    'initialisation',
    f'All weights are drawn from U(−{WIDTH}, {WIDTH}), as in DLG.',
    'The weights are those that were given.' if given else 'The model has its own initialisation.',
    lambda setting: setting._replace(wide=False),
  )
  return [
    *([wide] if modality is IMAGES else []),
    Assumption(
      TRAINING,
      'The model is untrained.',
      f'It was trained on public {several} for {_count(settings.training_rounds, "round")}.',
      lambda setting: setting._replace(trained=True),
      skipped=untrainable,
    ),
    Assumption(
      'labels',
      'The attacker is given the labels.',
      f'It infers them from the update, by the rule {attack.label_rule!r}.',
      lambda setting: setting._replace(audit=dataclasses.replace(setting.audit, labels='inferred')),
      skipped=rule,
    ),
    Assumption(
      'batch',
      f'An upload is of one {one}.',
      f'It is of {settings.batch_size} {several}.',
      lambda setting: setting._replace(audit=dataclasses.replace(setting.audit, batch_size=settings.batch_size)),
      skipped='' if settings.batch_size > 1 else f'an upload is of one {one} in production, too',
    ),
  ]


def _of_training(client: ClientSettings, attack: AttackMethod, steps: int) -> list[Assumption]:
  """Returns the assumptions on local training, of so many steps, and on what the attacker knows of it."""
  gradient = client.share == 'gradient'
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


def _count(number: int, what: str) -> str:
  return f'{number} {what}' if number == 1 else f'{number} {what}s'


def _untrainable(public: Any, given: bool, modality: Modality) -> str:
  if given:
    return 'the weights of production were given: what they were trained on is not known'
  return '' if public is not None else f'there are no public {modality.noun[1]} to train on'


def _unmatched(attack: AttackMethod, gradient: bool) -> str:
  if gradient:
    return 'the client shares the gradient of one step'
  simulates = attack.takes({'match': ''}) and attack.settings.get('distance') != 'prefix'
  return '' if simulates else 'the attack simulates no local training'


def _unnormalised(batch_norm: bool, client: ClientSettings) -> str:
  if not batch_norm:
    return 'the model has no BatchNorm'
  return '' if client.batch_norm == 'train' else 'BatchNorm is in eval mode in production, too'


def check_assumptions(chosen: Any) -> None:
  """Raises `UsageError` for anything but assumptions with distinct names, each after those that it needs."""
  names: list[str] = []
  for one in errors.check_instance('assumptions', chosen, Sequence, 'a list of Assumptions'):
    errors.check_instance('an assumption', one, Assumption, 'a gradleak.studies.sensitivity.Assumption')
    errors.check_text('the name of an assumption', one.name)
    if one.name in (*names, LABORATORY, PRODUCTION):
      raise errors.UsageError(f'the assumption {one.name!r} is listed twice, or has the name of a setting')
    for needed in () if one.skipped else one.needs:
      errors.check_choice(f'assumption that {one.name!r} needs:', needed, names)
    if not one.skipped:
      names.append(one.name)
  if not names:
    raise errors.UsageError('no assumption is left to drop: all are skipped')


def named(dropped: Sequence[str], names: Sequence[str]) -> str:
  """Returns the name of the setting in which some of the assumptions are dropped."""
  kept = [name for name in names if name in dropped]
  if not kept:
    return LABORATORY
  return PRODUCTION if len(kept) == len(names) else ' + '.join(kept)


def without(one: Assumption, used: Sequence[Assumption]) -> list[str]:
  """Returns the names of all assumptions but one, and those that need it."""
  return [other.name for other in used if other.name != one.name and one.name not in other.needs]


def steps_of(used: Sequence[Assumption]) -> dict[str, tuple[str, ...]]:
  """Returns `{name of a setting: assumptions dropped}` for the waterfall, for each assumption dropped singly, and for
  each restored singly.
  """
  names = [one.name for one in used]
  dropped = [names[:count] for count in range(len(names) + 1)]
  dropped += [[*one.needs, one.name] for one in used] + [list(one.needs) for one in used]
  dropped += [without(one, used) for one in used]
  return {named(each, names): tuple(name for name in names if name in each) for each in dropped}
