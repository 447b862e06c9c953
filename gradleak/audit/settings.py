"""What an audit runs: its settings, and the methods that it is given, checked before anything is compiled."""

import dataclasses
import functools
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gradleak import errors, metrics, settings
from gradleak.attacks import labels as label_rules
from gradleak.attacks.base import AttackMethod, as_attack
from gradleak.attacks.counters import UNAWARE, Counter, counters
from gradleak.defenses.defense import Context, Defense, Placed, as_defense, code_of, place
from gradleak.federated import Client, Knowledge
from gradleak.federated import knowledge as grants
from gradleak.methods import code_of_ones_own
from gradleak.metrics import perceptual
from gradleak.priors.trained import check_apart, fingerprints
from gradleak.scenario import Scenario
from gradleak.servers.base import Server
from gradleak.settings import setting
from gradleak.trees import Tree

KNOWLEDGE = ('unaware', 'aware', 'both')
LABELS = ('auto', *grants.LABELS, *label_rules.RULES)
_ATTACKER: dict[str, Any] = {'group': 'attacker'}
_RUN: dict[str, Any] = {'group': 'run'}
_COUNT: dict[str, Any] = {'low': 1, 'high': 10**6, 'integer': True}


@dataclasses.dataclass(frozen=True)
class AuditSettings:
  """The settings of an audit that are no objects; each is a keyword argument of `audit` and a flag of the programs."""

  batch_size: int = setting(1, 'Images behind one upload.', **_RUN, **_COUNT)
  restarts: int = setting(1, 'Starts per trial; the least matching distance is chosen.', **_ATTACKER, **_COUNT)
  steps: int | None = setting(
    None, 'Steps of attacks that do not set their own (programs: 0 for as published).', **_ATTACKER, **_COUNT
  )
  labels: str = setting(
    'auto',
    f'auto (as published), known, inferred, optimised, or a label rule: {", ".join(label_rules.RULES)}.',
    **_ATTACKER,
    choices=LABELS,
  )
  controls: int = setting(64, 'Null-gradient runs per attack that define success.', **_RUN, **_COUNT)
  knowledge: str = setting(
    'both',
    'unaware: attackers take what was sent for a gradient; aware: they know the defense; both: side by side.',
    **_ATTACKER,
    choices=KNOWLEDGE,
  )
  rounds: int = setting(
    1, 'Uploads of the same samples on the same model that an aware attacker averages or sums.', **_ATTACKER, **_COUNT
  )
  counters: tuple[str, ...] | None = setting(None, 'Names of the counter-measures to try; all by default.', **_ATTACKER)
  lpips_backbone: str = setting(
    'alex',
    'Network of LPIPS: alex (AlexNet), vgg (VGG-16) or squeeze (SqueezeNet 1.1).',
    **_RUN,
    choices=perceptual.BACKBONES,
  )
  lpips_weights: str | None = setting(
    None, "File of torchvision's weights of that network; without it there is no LPIPS.", **_RUN
  )
  lpips_heads: str | None = setting(None, "File of LPIPS's own weights for it (version 0.1).", **_RUN)


class Labelled(NamedTuple):
  """A method with what results call it; a label is for people and decides nothing."""

  label: str
  method: Any


@dataclasses.dataclass(frozen=True)
class Group:
  """The attacks whose server sends the same model, and the defenses that they meet.

  Attributes:
    key: of the audit.
    scenario: with the model and the variables that clients are sent.
    context: what defenses are made for.
    server: the malicious `Server`, or None: the server is honest.
    attacks: their labels and `AttackMethod`s.
    defenses: their labels and `Placed` defenses.
    num_trials: T.
    settings: the `AuditSettings`.
    candidates: returns what `gallery` is.
    lpips: the weights of LPIPS, None where none were given.
    only: label of a defense -> the trials that are attacked under it; None attacks all.
  """

  key: jax.Array
  scenario: Scenario
  context: Context
  server: Server | None
  attacks: tuple[Labelled, ...]
  defenses: tuple[Labelled, ...]
  num_trials: int
  settings: AuditSettings
  candidates: Callable[[], dict[int, metrics.Gallery]]
  lpips: metrics.LpipsWeights | None = None
  only: Mapping[str, frozenset[int]] | None = None

  def attacks_trial(self, defense: str, trial: int) -> bool:
    """Returns whether a trial is attacked under the defense of this label."""
    return self.only is None or int(trial) in self.only.get(defense, ())

  @property
  def client(self) -> Client:
    """The undefended client."""
    return self.scenario.client

  @property
  def truth(self) -> np.ndarray:
    """The private images, [T, B, H, W, C]."""
    size = self.settings.batch_size
    images = self.scenario.images[: self.num_trials * size]
    return images.reshape(self.num_trials, size, *images.shape[1:])

  @property
  def gallery(self) -> dict[int, metrics.Gallery]:
    """Label -> among what a private image of it is to be found, computed once for all groups."""
    return self.candidates()

  @property
  def labels(self) -> np.ndarray:
    """Their labels, int32 [T, B]."""
    size = self.settings.batch_size
    return self.scenario.labels[: self.num_trials * size].reshape(self.num_trials, size)

  def stream(self, name: str) -> jax.Array:
    """Returns the key of a named stream of randomness."""
    return jax.random.fold_in(self.key, zlib.crc32(name.encode()))

  def attackers(self, attack: AttackMethod, placed: Placed) -> list[Counter]:
    """Returns the `Counter`s by which an attack meets a defense.

    Without a counter-measure, an aware attacker equals an unaware one, and is run once.
    """
    given = self.settings
    if given.knowledge == 'unaware':
      return [UNAWARE]
    rounds = given.rounds if self.server is None or self.server.rounds == 1 else 1
    aware = counters(placed, self.context, given.batch_size, attack, rounds)
    if given.counters is not None:
      aware = [counter for counter in aware if counter.name in given.counters]
    return [UNAWARE, *aware] if given.knowledge == 'both' else aware or [UNAWARE]

  def knowledge(self, attack: AttackMethod) -> Knowledge:
    """Returns what the attacker is granted; what it knows of the defense is in the evidence."""
    mode, rule = self.settings.labels, attack.label_rule
    made = attack(self.client)
    if mode == 'auto':
      mode = made.labels
    elif mode in label_rules.RULES:
      mode, rule = 'inferred', mode
    defense = {'unaware': 'unknown', 'aware': 'known', 'both': 'either'}[self.settings.knowledge]
    if not any(one.method.defense.members for one in self.defenses):
      defense = 'none'
    held = made.auxiliary_data or (mode == 'inferred' and rule in label_rules.AUXILIARY)
    return Knowledge(
      labels=mode,
      label_inference=rule,
      local_steps=self.client.num_steps(self.settings.batch_size),
      share=self.client.share,
      batch_norm=self.scenario.settings['batch_norm'],
      defense=defense,
      model='honest' if self.server is None else 'modified',
      auxiliary_data=len(self.scenario.public[0]) if held and self.scenario.public is not None else 0,
      prior=made.prior,
      training=made.assumes,
      cohort=self.client.cohort,
    )

  def prepared(self, attack: AttackMethod, simulates: Defense | None = None) -> Tree | None:
    """Returns what an attack learns from the public data before it sees an upload; None for most.

    Args:
      attack: the `AttackMethod`.
      simulates: the defense that an adaptive attack learns through, None for none.

    Raises:
      UsageError: if a private image is among the public ones.
    """
    if attack.prepare is None:
      return None
    scenario = self.scenario
    if attack.learns and scenario.public is not None:
      check_apart(fingerprints(scenario.public[0]), scenario.images)
    if attack.adaptive and simulates is not None:
      scenario = scenario._replace(client=place(simulates, self.context).client(self.client))
    found = attack.prepare(self.stream('prepare'), scenario, attack.settings, self.settings.batch_size)
    return jax.block_until_ready(found)  # so that a progress bar says what takes the time

  def class_means(self, attack: AttackMethod) -> jax.Array | None:
    """Returns the mean public image of each class, for an attack that uses it; of all classes where one has none."""
    public = self.scenario.public
    if public is None or not self.knowledge(attack).auxiliary_data:
      return None
    images, labels = public
    classes = range(self.client.num_classes)
    return jnp.stack([images[labels == c if (labels == c).any() else slice(None)].mean(axis=0) for c in classes])

  def class_images(self, attack: AttackMethod) -> jax.Array | None:
    """Returns public images of each class, where the labels are inferred by a rule that uses them."""
    knowledge, public = self.knowledge(attack), self.scenario.public
    if public is None or knowledge.labels != 'inferred' or knowledge.label_inference not in label_rules.AUXILIARY:
      return None
    images, labels = public
    return label_rules.class_images(images, labels, self.client.num_classes)


@jax.jit  # one program, in place of several
def folded(keys: jax.Array, *numbers: jax.Array) -> jax.Array:
  """Returns keys [N], or one for all, with the N numbers of each array folded in, one array after the other."""
  for each in numbers:
    keys = jax.vmap(jax.random.fold_in, (0 if keys.ndim else None, 0))(keys, each)
  return keys


class Plan(NamedTuple):
  """What an audit runs.

  Attributes:
    attacks: the labels of all attacks, in the order in which they were listed.
    defenses: the labels of all defenses, likewise.
    groups: one `Group` per model that clients are sent: the honest one and each malicious server's.
    config: the scientific settings, plain JSON: the identity of the audit.
  """

  attacks: list[str]
  defenses: list[str]
  groups: list[Group]
  config: dict


def plan(
  key: jax.Array,
  scenario: Scenario,
  defenses: Any,
  attacks: Any,
  num_trials: int,
  given: AuditSettings,
  only: Mapping[str, Sequence[int]] | None = None,
) -> Plan:
  """Returns the `Plan` of an audit; the arguments are those of `audit`. Nothing is compiled.

  Raises:
    UsageError: for settings that cannot be run.
  """
  key = errors.check_key('key', key, traced=False)
  if not isinstance(scenario, Scenario):
    raise errors.UsageError(f'the scenario is a {type(scenario).__name__}, expected what gradleak.scenario(…) returns')
  settings.check(errors.check_instance('settings', given, AuditSettings, 'AuditSettings'))
  for counter in errors.check_instance('counters', given.counters or (), tuple, 'a list of names'):
    errors.check_text('counters', counter)
  size = given.batch_size
  errors.check_number('trials', num_trials, **_COUNT)
  if num_trials * size > len(scenario.images):
    most = len(scenario.images) // size
    raise errors.UsageError(
      f'{num_trials} trials of {size} images need {num_trials * size}, the data has {len(scenario.images)}; '
      + (f'the most trials are {most}' if most else f'the largest batch_size is {len(scenario.images)}')
    )
  lpips = _lpips(given, scenario.images.shape[1:])
  named_attacks = labelled('attack', attacks, as_attack)
  chosen_defenses = named_defenses(defenses)
  chosen_trials = _only(only, [defense.label for defense in chosen_defenses], num_trials)
  config = {
    **scenario.settings,
    'attacks': [attack.label for attack in named_attacks],
    'defenses': [defense.label for defense in chosen_defenses],
    'trials': num_trials,
    **_recorded(given, lpips),
    **_texts(scenario, size, attack=named_attacks, defense=chosen_defenses),
    'key': np.asarray(jax.random.key_data(key)).tolist(),
    **({} if chosen_trials is None else {'only': {label: sorted(of) for label, of in chosen_trials.items()}}),
  }
  stepped = [Labelled(label, _with_steps(attack, given.steps)) for label, attack in named_attacks]
  candidates = functools.cache(functools.partial(_gallery, scenario, num_trials * size))
  groups = []
  for server in dict.fromkeys(attack.method.server for attack in stepped):
    sent, built = scenario, None
    if server is not None:
      built = server.build(server.numbers)
      sent = built.prepare(jax.random.fold_in(key, zlib.crc32(b'server')), scenario._replace(previous=None), size)
    context = Context(sent.client, sent.variables, sent.images.shape[1:], sent.public, sent.previous)
    placed = tuple(Labelled(label, place(defense, context)) for label, defense in chosen_defenses)
    chosen = tuple(attack for attack in stepped if attack.method.server == server)
    groups.append(Group(key, sent, context, built, chosen, placed, num_trials, given, candidates, lpips, chosen_trials))
    for attack in chosen:
      with errors.raised_here():
        _trace(groups[-1], attack)
  return Plan(config['attacks'], config['defenses'], groups, config)


def _only(
  only: Mapping[str, Sequence[int]] | None, labels: list[str], num_trials: int
) -> dict[str, frozenset[int]] | None:
  """Returns the trials that are attacked under each defense, checked."""
  if only is None:
    return None
  for label, trials in errors.check_instance('only', only, Mapping, 'a mapping of labels to trials').items():
    errors.check_choice('defense', label, labels)
    for trial in errors.check_instance(f'the trials of {label} in only', trials, Collection, 'a list of trials'):
      errors.check_number('a trial in only', trial, low=0, high=num_trials - 1, integer=True)
  if not any(len(trials) for trials in only.values()):
    raise errors.UsageError('only names no trial: there is nothing to attack')
  return {label: frozenset(int(trial) for trial in trials) for label, trials in only.items()}


def _gallery(scenario: Scenario, private: int) -> dict[int, metrics.Gallery]:
  """Returns label -> the gallery of the private images of that label: one for all of one kind."""
  given, images, labels = scenario.gallery, scenario.images[:private], scenario.labels[:private]
  if not given.by_class:
    return dict.fromkeys(np.unique(labels).tolist(), metrics.gallery(given.images, images))
  return {
    label: metrics.gallery(given.images[given.labels == label], images[labels == label])
    for label in np.unique(labels).tolist()
  }


def listed(entries: Any) -> list | Mapping:
  """Returns what a user gives as a list of methods: a mapping as it is, and a single method, or None, as a list."""
  if isinstance(entries, Mapping):
    return entries
  named = hasattr(entries, '_fields')  # a named tuple, such as a transformation or a model
  single = named or isinstance(entries, str | bytes) or not isinstance(entries, Iterable)
  return [entries] if single else list(entries)


def labelled(kind: str, entries: Any, convert: Callable[[Any], Any]) -> list[Labelled]:
  """Returns the methods of a list, or of a dict {label: method}, with distinct labels.

  Raises:
    UsageError: if there is none, or one is listed twice.
  """
  entries = listed(entries)
  pairs = list(entries.items()) if isinstance(entries, Mapping) else [(None, entry) for entry in entries]
  if not pairs:
    raise errors.UsageError(f'no {kind} is given')
  found: list[Labelled] = []
  for label, entry in pairs:
    method = convert(entry)
    label = str(method) if label is None else errors.check_text(f'the label of the {kind}', str(label))
    if any(other.method == method and other.label == label for other in found):
      raise errors.UsageError(f'the {kind} {label!r} is listed twice')
    others = [other.label for other in found]
    alike = sum(other == label or other.startswith(f'{label} #') for other in others)
    found.append(Labelled(f'{label} #{alike + 1}' if label in others else label, method))
  return found


def named_defenses(entries: Any) -> list[Labelled]:
  """Returns the defenses of a list or dict with distinct labels; what is no defense is labelled 'none', nothing else.

  Raises:
    UsageError: if there is none, one is listed twice, or a defense is labelled 'none'.
  """
  found = labelled('defense', entries, as_defense)
  found = [one if one.method.members else one._replace(label='none') for one in found]
  named_none = [one for one in found if one.label == 'none']
  if len(named_none) > 1 or any(one.method.members for one in named_none):
    raise errors.UsageError("'none' is the label of no defense, and stands once: another entry bears it, too")
  return found


def _with_steps(attack: AttackMethod, steps: int | None) -> AttackMethod:
  """Returns the attack with the number of steps, where it takes one and does not set its own."""
  if steps is None or 'steps' in attack.given or not attack.takes({'steps': steps}):
    return attack
  return attack.changed(steps=steps)


def _lpips(given: AuditSettings, image_shape: tuple[int, ...]) -> metrics.LpipsWeights | None:
  """Returns the weights of LPIPS that the settings name, None where they name none."""
  paths = {'lpips_weights': given.lpips_weights, 'lpips_heads': given.lpips_heads}
  missing = [name for name, path in paths.items() if path is None]
  if len(missing) == len(paths):
    return None
  if missing:
    raise errors.UsageError(f'{missing[0]} is missing: LPIPS needs two files, {" and ".join(paths)}')
  perceptual.check_lpips_shape(given.lpips_backbone, image_shape)
  return metrics.read_lpips(given.lpips_backbone, backbone_weights=given.lpips_weights, heads=given.lpips_heads)


def _recorded(given: AuditSettings, lpips: metrics.LpipsWeights | None) -> dict:
  """Returns what identifies the settings, plain JSON; settings that came later stand only where they are used.

  LPIPS is identified by its weights, wherever their files are.
  """
  found = dataclasses.asdict(given)
  found['counters'] = None if given.counters is None else list(given.counters)
  unused = {name for name, value in (('rounds', 1), ('counters', None)) if found[name] == value}
  unused |= {'lpips_weights', 'lpips_heads', *(['lpips_backbone'] if lpips is None else [])}
  recorded = {name: value for name, value in found.items() if name not in unused}
  return recorded if lpips is None else {**recorded, 'lpips_weights': lpips.digest()}


def _texts(scenario: Scenario, num_samples: int, **kinds: list[Labelled]) -> dict:
  """Returns what labels of a user's own stand for: without it, a changed method would be no changed setting.

  Of a method of a user's own that is the code, too.
  """
  context = Context(scenario.client, scenario.variables, scenario.images.shape[1:], scenario.public, scenario.previous)

  def text(one: Labelled) -> str:
    own = isinstance(one.method, Defense)
    code = code_of(one.method, context, num_samples) if own else code_of_ones_own(one.method.factory)
    return f'{one.method}, code {code}' if code else str(one.method)

  texts = {f'{kind}_texts': {one.label: text(one) for one in methods} for kind, methods in kinds.items()}
  told = {kind: {label: of for label, of in each.items() if of != label} for kind, each in texts.items()}
  return {kind: each for kind, each in told.items() if each}


def _trace(group: Group, attack: Labelled) -> None:
  """Traces client and attack on shapes alone, so that what cannot be run says so before anything is compiled."""
  from gradleak.audit.lanes import Build  # it imports this module

  method, client, variables = attack.method, group.client, group.scenario.variables
  if jax.config.jax_enable_x64 and method(client).num_steps:
    raise errors.UsageError(f'the attack {attack.label!r} descends in float32: float64 is for closed forms alone')
  if method.learns and group.scenario.public is None:
    raise errors.UsageError(
      f'the attack {attack.label!r} learns from public data: give public=(images, labels) to gradleak.scenario'
    )
  if method.prepare is not None and method(client).num_steps:
    return  # what it is made of has to be learned first
  key, images, labels = jax.random.key(0), group.truth[0], jnp.asarray(group.labels[0])
  upload = jax.eval_shape(client.local_update, key, variables, images, labels)
  for defense in group.defenses:
    jax.eval_shape(defense.method.client(client).local_update, key, variables, images, labels)
  shared = {
    'views': {'update': upload.update, 'weights': None, 'noise': jnp.float32(0), 'clip': jnp.float32(jnp.inf)},
    'labels': jax.ShapeDtypeStruct((group.settings.batch_size, client.num_classes), jnp.float32),
  }
  rest = {'variables': variables, 'class_means': group.class_means(method), 'class_images': group.class_images(method)}

  def start(shared: dict, key: jax.Array) -> Any:
    shared = jax.tree.map(lambda x: jnp.expand_dims(x, 0), shared)
    lane = {'trial': 0, 'view': 0, 'key': key, 'numbers': method.numbers}
    made, key, observation = Build.of(group, method)({**shared, **rest}, lane)
    state = made.init(key, observation)
    if made.num_steps or made.on_host or method.prepare is not None:
      return made.step(state, observation)
    return made.reconstruct(state, observation)

  jax.eval_shape(start, shared, key)
