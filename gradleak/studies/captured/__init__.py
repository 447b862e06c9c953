"""A captured upload: attacks on an update that a user brings, without the truth or with it.

Without the private samples nothing can be called recovered. One can measure how closely the update of what is
reconstructed matches the captured update. Two controls stand beside it: a sample that says nothing, and the same attack
on noise. That takes the place of the captured update on the same entries with the same weights. An auditor who owns the
samples gets an audit's verdicts.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from gradleak import data
from gradleak.attacks import labels as label_rules
from gradleak.attacks.base import AttackMethod, as_attack
from gradleak.audit import versions_of_parts
from gradleak.audit.group import Group
from gradleak.audit.labelled import Labelled, labelled, text
from gradleak.audit.plan import plan
from gradleak.audit.result import frame
from gradleak.audit.settings import AuditSettings
from gradleak.core import errors
from gradleak.core.locks import alone
from gradleak.core.settings import check, paired, setting
from gradleak.core.storage import Workdir, description, packed, plain, seal, write_atomically
from gradleak.core.trees import Tree
from gradleak.defenses import Defense
from gradleak.defenses.defense import as_defense
from gradleak.defenses.text import parse
from gradleak.engine.progress import callback, end
from gradleak.federated import ClientSettings
from gradleak.federated.losses import as_loss
from gradleak.federated.scenario import Scenario, fingerprint, scenario
from gradleak.federated.targets import CLASSES, SAMPLES
from gradleak.modalities import IMAGES, Modality
from gradleak.models import Model
from gradleak.models.model import check_model, check_sample_shape, check_variables, outputs_shape
from gradleak.studies.captured.defaults import Known
from gradleak.studies.captured.defaults import chosen as default_attacks
from gradleak.studies.captured.hints import hints, of_answers, of_range, of_rate, of_scale, of_signs, of_truth
from gradleak.studies.captured.inversion import SHOWN_CONTROLS, Inversion, group_size, inverted, rule_without_bias
from gradleak.studies.captured.truth import Truth, number_of, read_truth
from gradleak.studies.captured.truth import checked as checked_truth
from gradleak.studies.captured.update import checked, derived_sample_shape, norm, read_update, read_weights

__all__ = [
  'SHOWN_CONTROLS',
  'Captured',
  'CapturedSettings',
  'Inversion',
  'attack',
  'derived_sample_shape',
  'read_truth',
  'read_update',
  'read_weights',
]

_ATTACKER: dict[str, Any] = {'group': 'attacker', 'integer': True}


@dataclasses.dataclass(frozen=True)
class CapturedSettings:
  """What is assumed of the update, and how it is attacked; each is a keyword argument, and a flag of launch/attack.py.

  Attributes:
    modality: what a sample is, a `gradleak.modalities.Modality`; of a table it has the columns, of texts the tokens.
      launch/attack.py derives it.
    sample_shape: (H, W, C) of images, (D,) of encoded rows, (T,) of texts; by default derived where only one fits.
    labels: of the private samples, as the loss takes them; or 'inferred', 'optimised', or a rule of `attacks.labels`.
      By default as the attack was published, and inferred where it was given them; optimised where they are not one
      class of each sample.
    defense: what the client is known to use, of `gradleak.defenses`, or as a text: attackers who know it then run, too.
  """

  num_samples: int = setting(1, 'Private samples behind the update.', low=1, high=10**4, **_ATTACKER)
  restarts: int = setting(1, 'Starts per attack; the least matching distance is kept.', low=1, high=10**4, **_ATTACKER)
  steps: int | None = setting(
    None, 'Steps of searches that do not set their own; as published by default.', low=1, high=10**7, **_ATTACKER
  )
  controls: int = setting(4, 'Runs of each attack on noise in place of the update.', low=1, high=10**4, **_ATTACKER)
  modality: Modality = setting(IMAGES, 'What a sample is.')  # noqa: RUF009
  sample_shape: Sequence[int] | None = setting(None, 'Shape of each private sample.')
  labels: Any = setting(None, 'Labels of the private samples, or how they are obtained.')  # noqa: RUF009
  defense: Any = setting(None, 'What the client is known to use.')  # noqa: RUF009


@dataclasses.dataclass(frozen=True)
class Captured:
  """What the attacks on a captured update found.

  Attributes:
    inversions: one `Inversion` per attack and way to know the defense.
    warnings: sentences on what stands out in the update.
    config: the settings, plain JSON.
    versions: of what it was made with.
    citations: the sources of the attacks and the defense.
    rows, controls: of an auditor who owns the samples, as an audit's, see docs/ROWS.md; empty without the truth.
    truth: the private samples [N, …], or None.
  """

  inversions: list[Inversion]
  warnings: list[str]
  config: dict[str, Any]
  versions: dict[str, str]
  citations: list[str]
  rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)
  controls: list[dict[str, Any]] = dataclasses.field(default_factory=list)
  truth: np.ndarray | None = None

  def to_frame(self) -> Any:
    """Returns the rows as a `pandas.DataFrame`, one column per entry of docs/ROWS.md.

    Raises:
      UsageError: without the truth, or if pandas is not installed.
    """
    if self.truth is None:
      raise errors.UsageError('rows compare what is found with the truth: give attack truth=(samples, targets)')
    return frame(self.rows)


def attack(
  key: Any,
  model: Model,
  variables: Mapping,
  update: Any,
  *,
  attacks: Any = None,
  client: ClientSettings | None = None,
  truth: Any = None,
  given: CapturedSettings | None = None,
  workdir: Any = None,
  progress: str | Callable = 'auto',
  **fields: Any,
) -> Captured:
  """Attacks an update that was captured, and controls beside it; no truth is needed, and without it none is claimed.

  Args:
    key: a typed JAX key; the same key and settings give the same figures.
    model: the `Model`; wrap a network of your own by `models.from_flax` or `models.from_functions`.
    variables: what the client was sent, {'params': …} and with BatchNorm {'batch_stats': …}.
    update: what it sent back: a tree like the parameters, such as `read_update` returns.
    attacks: a list of `gradleak.attacks` or a dict {label: attack}. By default those of `captured.defaults.DEFAULTS`:
      closed forms where they can read the network, and a search that suits the samples and the update.
    client: how the client trains and what it shares; its fields may also be given as keyword arguments.
    truth: (samples [N, …], targets as the loss takes them), all that are behind the update, of an auditor who owns
      them. No attack sees them. The result then has an audit's rows, with metrics and verdicts. A third member is the
      gallery, as `gradleak.scenario` takes it: without 99 others nothing is called re-identified.
    given: `CapturedSettings`; its fields may also be given one by one, such as num_samples and modality.
    workdir: a folder for results and checkpoints; a run that was killed goes on where it stopped.
    progress: as in `gradleak.audit`.
    **fields: of `ClientSettings` and `CapturedSettings`.

  Returns:
    A `Captured`; `gradleak.report.write` makes a page of it.

  Raises:
    UsageError: for an update that does not fit the model, is not finite or zero throughout, and settings without a run.
  """
  key = errors.check_key('key', key)
  if not isinstance(model, Model):
    raise errors.UsageError(f'the model is a {type(model).__name__}, expected a gradleak Model')
  show = callback(progress)
  fields = {'num_samples': number_of(truth), **fields} if truth is not None and given is None else fields
  chosen, trained = paired('gradleak.attack', fields, given=(CapturedSettings, given), client=(ClientSettings, client))
  check(chosen)
  shape = _shape(model, variables, chosen.sample_shape, chosen.modality)
  mode, known, owned = _known(model, variables, shape, truth, chosen, trained)
  stand_in = _stand_in(model, variables, shape, known, chosen.num_samples, trained, owned, chosen.modality)
  known = known if stand_in.targets.ndim == 1 else stand_in.targets  # probabilities and positions: all classes move
  update, factor, lost = checked(update, stand_in.variables['params'], model.layout)
  protected = parse(chosen.defense) if isinstance(chosen.defense, str) else as_defense(chosen.defense)
  adam = stand_in.client.share == 'delta' and trained.optimizer.startswith('adam')
  signs = of_signs(update) or (adam and stand_in.client.num_steps(chosen.num_samples) == 1)
  named = _attacks(attacks, key, stand_in, chosen, signs)
  _check_size(mode, update, factor)
  rule = rule_without_bias(stand_in, update, chosen.num_samples)
  groups = [_group(key, stand_in, one, protected, chosen, _mode(mode, one.method, stand_in, rule)) for one in named]
  config = _config(key, stand_in, update, groups, chosen, protected, owned is not None)
  warned = [
    *of_scale(update, factor, lost),
    *(of_rate(trained, stand_in.client.num_steps(chosen.num_samples)) if trained.share == 'delta' else []),
    *of_range(config),  # nothing without a truth: the samples that stand in for it are constant
    *hints(
      update, stand_in.variables, stand_in.client, shape, chosen.num_samples, known, bool(protected.stages), factor
    ),
  ]
  citations = [one.method.citation for one in named if one.method.citation] + protected.citations + [*model.citations]
  with alone(workdir):
    store = None if workdir is None else Workdir(workdir, config, {'group_size': group_size(groups[0])})
    found, rows, controls = _inverted(groups, update, store, show, owned is not None)
    warned += of_answers(found, chosen.modality, chosen.num_samples)
    if owned is not None and not protected.stages:
      warned += of_truth(min((one.at_truth for one in found), default=np.nan))
    told = warned, config, versions_of_parts(store), list(dict.fromkeys(citations))
    outcome = Captured(found, *told, rows, controls, owned and owned[0])
    if store is not None:
      _write(store, outcome)
  return outcome


def _inverted(
  groups: list[Group], update: Tree, store: Workdir | None, show: Callable | None, judges: bool
) -> tuple[list[Inversion], list[dict], list[dict]]:
  """Returns what all attacks made of an update, and the rows and control rows of an auditor who `judges`."""
  inversions, rows, controls = [], [], []
  try:
    for i, group in enumerate(groups):
      for found, (own, of_noise) in inverted(group, update, i, store, show, judges):
        inversions += found
        rows += own
        controls += of_noise
  finally:
    end(show)
  return inversions, rows, controls


def _shape(model: Model, variables: Mapping, sample_shape: Any, kind: Modality) -> tuple[int, ...]:
  """Returns the shape of one sample, checked, or derived where it is not given."""
  errors.check_instance('modality', kind, Modality, 'a gradleak.modalities.Modality')
  kind.check_model(model)
  if sample_shape is None:
    return derived_sample_shape(model, variables, kind)
  shape = check_sample_shape(sample_shape, kind.axes)
  check_variables(model, variables, shape)
  return shape


def _check_size(mode: str, update: Tree, factor: float) -> None:
  """Raises `UsageError` for a label rule that reads the size of an update which was scaled."""
  if factor != 1 and mode in label_rules.SIZED:
    raise errors.UsageError(
      f'the label rule {mode!r} reads the size of the update, and its norm of '
      f'{norm(jax.tree.leaves(update)) / factor:.3g} is beyond what float32 can compare: choose another rule'
    )


def _known(
  model: Model, variables: Mapping, shape: tuple, truth: Any, chosen: CapturedSettings, trained: ClientSettings
) -> tuple[str, Any, Truth | None]:
  """Returns (how labels are obtained, '' for each attack's own way; the labels given; the truth), None for none.

  Both are checked as the client's loss takes targets. What is not one class of each sample is optimised where not
  given.
  """
  kind, number = as_loss(trained.loss).targets, chosen.num_samples
  *positions, outputs = outputs_shape(check_model(model), variables, shape)
  check = functools.partial(kind.checked, outputs=outputs, noun=chosen.modality.noun[0])
  mode, labels = _labels(chosen.labels, (number, *positions), kind is CLASSES, check)
  return mode, labels, checked_truth(truth, shape, number, check, labels, chosen.modality)


def _labels(labels: Any, shape: tuple[int, ...], of_classes: bool, check: Callable[[Any, int], Any]) -> tuple[str, Any]:
  """Returns (how labels are obtained, the labels given or None), see `_known`; `shape` is that of classes."""
  if labels is None:
    return '', None
  words = ('inferred', 'optimised', *label_rules.RULES)
  if isinstance(labels, str):
    errors.check_choice('way to obtain labels', labels, words)
    return labels, None
  number, *positions = shape
  found = np.atleast_1d(errors.host_array('labels', labels))
  if not of_classes or (found.ndim > 1 and np.issubdtype(found.dtype, np.floating)):
    return 'known', np.asarray(check(found, number))
  if not np.issubdtype(found.dtype, np.integer) or found.shape != shape:
    expected = f'integers {shape}, one for each position' if positions else f'{number} integers, one'
    raise errors.UsageError(
      f'labels are {errors.shown(labels)}, expected {expected} for each private sample, or one of '
      f'{", ".join(words)}{data.column(found.shape, number)}'
    )
  return 'known', np.asarray(check(found, number)) if positions else [int(label) for label in found]


def _mode(mode: str, method: AttackMethod, stand_in: Scenario, rule: str) -> str:
  """Returns the label mode of one attack: labels that nobody gave cannot be known; `rule` infers them, if not ''."""
  client = stand_in.client
  published = method(client).labels
  if not mode:
    mode = {'optimised': 'optimised', 'known': 'inferred'}.get(published, 'auto')
    if not stand_in.one_class and published != 'unused':
      mode = 'optimised'
  return rule if rule and mode == 'inferred' else mode


def _stand_in(
  model: Model,
  variables: Mapping,
  shape: tuple,
  labels: Any,
  number: int,
  client: ClientSettings,
  truth: Truth | None = None,
  modality: Modality = IMAGES,
) -> Scenario:
  """Returns the `Scenario` of the client; neutral samples stand for the private ones, if nobody holds these."""
  samples = np.stack([modality.neutral(shape)] * number)
  if truth is None and labels is None:
    kind = as_loss(client.loss).targets
    *positions, outputs = outputs_shape(check_model(model), variables, shape)
    classes = (number, *(positions if kind is CLASSES else ()))
    whole = kind in (CLASSES, SAMPLES)
    labels = np.zeros(classes, np.int32) if whole else np.zeros((number, *positions, outputs), np.float32)
  *held, gallery = (samples, np.asarray(labels), None) if truth is None else truth
  return scenario(
    model, *held, variables=variables, dataset='captured', client=client, gallery=gallery, modality=modality
  )


def _group(
  key: jax.Array, stand_in: Scenario, named: Labelled, protected: Defense, chosen: CapturedSettings, mode: str
) -> Group:
  """Returns the `Group` of one attack against one defense; what cannot be run says so here."""
  given = AuditSettings(
    batch_size=chosen.num_samples,
    restarts=chosen.restarts,
    steps=chosen.steps,
    labels=mode,
    controls=chosen.controls,
    knowledge='both' if protected.stages else 'non-adaptive',
  )
  try:
    (group,) = plan(key, stand_in, [protected], {named.label: named.method}, 1, given).groups
  except errors.UsageError as error:
    if 'label inference' not in str(error):
      raise
    raise errors.UsageError(f"{error}; or give labels=…, or labels='optimised'") from error
  return group


def _attacks(entries: Any, key: jax.Array, stand_in: Scenario, chosen: CapturedSettings, signs: bool) -> list[Labelled]:
  """Returns the attacks with their labels; without entries those that can read this network."""
  if entries is None:
    entries = default_attacks(
      Known(stand_in, chosen.num_samples, signs), lambda method: _reads(method, key, stand_in, chosen)
    )
  named = labelled('attack', entries, as_attack)
  for one in named:
    if one.method.server is not None:
      raise errors.UsageError(f'the attack {one.label!r} belongs to a malicious server: it needs what that has sent')
    if one.method.learns:
      held = 'give it what was learned before, file=… of launch/train_prior.py, or ' * ('file' in one.method.settings)
      raise errors.UsageError(
        f'the attack {one.label!r} learns from public data, and beside a captured upload there are none: {held}audit a '
        'client with gradleak.audit and public=(samples, targets)'
      )
  return named


def _reads(method: AttackMethod, key: jax.Array, stand_in: Scenario, chosen: CapturedSettings) -> bool:
  """Returns whether a closed form can read the network and what the client shares."""
  try:
    _group(key, stand_in, Labelled(str(method), method), as_defense(None), chosen, 'auto')
  except errors.UsageError:
    return False
  return True


def _config(
  key: Any,
  stand_in: Scenario,
  update: Tree,
  groups: list[Group],
  chosen: CapturedSettings,
  protected: Defense,
  judged: bool,
) -> dict[str, Any]:
  """Returns what identifies a run, plain JSON."""
  labels = chosen.labels
  left_out = ('dataset', 'public_fingerprint', 'previous_fingerprint', *([] if judged else ['data_fingerprint']))
  return {
    **{name: value for name, value in stand_in.settings.items() if name not in left_out},
    'truth': judged,
    'update_fingerprint': fingerprint(update),
    'attacks': [group.attacks[0].label for group in groups],
    'methods': [text(group.attacks[0]) for group in groups],
    'defense': text(Labelled('', protected)),
    'labels': labels if labels is None or isinstance(labels, str) else np.asarray(labels).reshape(-1).tolist(),
    **{name: getattr(chosen, name) for name in ('num_samples', 'restarts', 'steps', 'controls')},
    'key': np.asarray(jax.random.key_data(key)).tolist(),
  }


def _write(store: Workdir, outcome: Captured) -> None:
  """Writes the pictures of all attackers and their figures; each file whole or not at all."""
  pictures = packed({json.dumps([one.attack, one.adaptive]): one.samples for one in outcome.inversions})
  write_atomically(store.path / 'reconstructions.npz', pictures)
  figures = [
    {
      **{field.name: getattr(one, field.name) for field in dataclasses.fields(one) if 'samples' not in field.name},
      'closer': one.closer,
      'inconclusive': one.inconclusive,
    }
    for one in outcome.inversions
  ]
  listed = [{k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in one.items()} for one in figures]
  facts = ('warnings', 'config', 'versions', 'rows', 'controls')
  found = {'inversions': listed, **{name: getattr(outcome, name) for name in facts}}
  seal(store.path / 'result.json', plain(found), {'reconstructions.npz': description(pictures)})
