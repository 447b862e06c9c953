"""What an audit runs: methods, models and settings, checked before anything is compiled."""

import dataclasses
import functools
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gradleak import metrics
from gradleak.attacks.base import AttackMethod, as_attack
from gradleak.audit import granted
from gradleak.audit.group import Group
from gradleak.audit.labelled import Labelled, labelled, named_defenses, text
from gradleak.audit.lanes import Build, structures
from gradleak.audit.sequential import check_order
from gradleak.audit.settings import COUNT, AuditSettings
from gradleak.audit.streams import Streams
from gradleak.core import errors, settings
from gradleak.core.reuse import reusable
from gradleak.core.trees import Tree
from gradleak.defenses.defense import bind
from gradleak.federated.client import Client
from gradleak.federated.scenario import Scenario
from gradleak.metrics import perceptual


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
  """Returns the `Plan` of an audit; the arguments are those of `audit`.

  Nothing is compiled but what adaptive attacks expect of an update.

  Raises:
    UsageError: for settings that cannot be run.
  """
  key = errors.check_key('key', key, traced=False)
  if not isinstance(scenario, Scenario):
    raise errors.UsageError(f'the scenario is a {type(scenario).__name__}, expected what gradleak.scenario(…) returns')
  settings.check(errors.check_instance('settings', given, AuditSettings, 'AuditSettings'))
  for adaptive in errors.check_instance('adaptive_attacks', given.adaptive_attacks or (), tuple, 'a list of names'):
    errors.check_text('adaptive_attacks', adaptive)
  size = given.batch_size
  errors.check_number('trials', num_trials, **COUNT)
  if num_trials * size > len(scenario.samples):
    most, noun = len(scenario.samples) // size, scenario.client.modality.noun[1]
    raise errors.UsageError(
      f'{num_trials} trials of {size} {noun} need {num_trials * size}, the data has {len(scenario.samples)}; '
      + (f'the most trials are {most}' if most else f'the largest batch_size is {len(scenario.samples)}')
    )
  scenario.check_steps(size)
  _check_question(given, only, scenario.classes[: num_trials * size])
  lpips = _lpips(given, scenario.samples.shape[1:])
  named_attacks = labelled('attack', attacks, as_attack)
  chosen_defenses = named_defenses(defenses)
  chosen_trials = _only(only, [defense.label for defense in chosen_defenses], num_trials)
  config = {
    **scenario.settings,
    'attacks': [attack.label for attack in named_attacks],
    'defenses': [defense.label for defense in chosen_defenses],
    'trials': num_trials,
    **_recorded(given, lpips),
    **_texts(attack=named_attacks, defense=chosen_defenses),
    'key': np.asarray(jax.random.key_data(key)).tolist(),
    **({} if chosen_trials is None else {'only': {label: sorted(of) for label, of in chosen_trials.items()}}),
  }
  stepped = [Labelled(label, _with_steps(attack, given.steps, scenario.client)) for label, attack in named_attacks]
  candidates = functools.cache(functools.partial(galleries, scenario, num_trials * size))
  streams, groups = Streams(key), []
  for server in dict.fromkeys(attack.method.server for attack in stepped):
    sent, built = scenario, None
    if server is not None:
      built = server.build(server.numbers)
      sent = built.prepare(streams.named('server'), scenario._replace(previous=None), size)
    bound = tuple(Labelled(label, bind(defense, sent.context)) for label, defense in chosen_defenses)
    chosen = tuple(attack for attack in stepped if attack.method.server == server)
    groups.append(Group(streams, sent, built, chosen, bound, num_trials, given, candidates, lpips, chosen_trials))
    for attack in chosen:
      with errors.raised_here():
        _trace(groups[-1], attack)
    if sent.public is not None:
      for variant in itertools.chain.from_iterable(structures(groups[-1])):  # which an adaptive attack may use
        granted.check_public(groups[-1], variant.method)
  granted.check_names(groups)
  return Plan(config['attacks'], config['defenses'], groups, config)


def refused(
  key: jax.Array, scenario: Scenario, attacks: Iterable[AttackMethod], num_trials: int, given: AuditSettings
) -> dict[str, errors.UsageError]:
  """Returns {attack: why it cannot be run without a defense}, of those that cannot; arguments as those of `plan`."""
  found = {}
  for attack in attacks:
    try:
      plan(key, scenario, [None], [attack], num_trials, given)
    except errors.UsageError as error:
      found[str(attack)] = error
  return found


def _check_question(given: AuditSettings, only: Any, classes: np.ndarray) -> None:
  """Raises `UsageError` for two questions, the terms of none, and one beside a choice of trials or a sorted order."""
  if given.decide is not None and given.within is not None:
    raise errors.UsageError('decide and within are two questions: an audit stops at the answer to one, take either')
  if given.sequential and only is not None:
    raise errors.UsageError('decide and within choose the trials by what is found, and only names them: take either')
  changed = [name for name in ('level', 'error_rate') if getattr(given, name) != getattr(AuditSettings, name)]
  if changed and not given.sequential:
    raise errors.UsageError(f'{changed[0]} is a term of the question that decide or within asks, and neither is given')
  if given.sequential:
    check_order(classes)


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


def galleries(scenario: Scenario, private: int) -> dict[int, Any]:
  """Returns label -> among what private samples of it are to be found, of the first ones: one for all of one kind."""
  given, samples, targets = scenario.gallery, scenario.samples[:private], scenario.classes[:private]
  make = scenario.client.modality.gallery
  if not given.by_class:
    return dict.fromkeys(np.unique(targets).tolist(), make(given.samples, samples))
  return {
    label: make(given.samples[given.targets == label], samples[targets == label])
    for label in np.unique(targets).tolist()
  }


def _with_steps(attack: AttackMethod, steps: int | None, client: Client) -> AttackMethod:
  """Returns the attack with the number of steps, where it searches, takes one and does not set its own.

  The steps of a closed form that learns before, such as `lti`, are those of its training.
  """
  if steps is None or 'steps' in attack.given or not attack.takes({'steps': steps}):
    return attack
  if attack.prepare is not None and not attack(client).num_steps:
    return attack
  return attack.changed(steps=steps)


def _lpips(given: AuditSettings, sample_shape: tuple[int, ...]) -> metrics.LpipsWeights | None:
  """Returns the weights of LPIPS that the settings name, None where they name none."""
  paths = {'lpips_weights': given.lpips_weights, 'lpips_heads': given.lpips_heads}
  missing = [name for name, path in paths.items() if path is None]
  if len(missing) == len(paths):
    return None
  if missing:
    raise errors.UsageError(f'{missing[0]} is missing: LPIPS needs two files, {" and ".join(paths)}')
  perceptual.check_lpips_shape(given.lpips_backbone, sample_shape)
  return metrics.read_lpips(given.lpips_backbone, backbone_weights=given.lpips_weights, heads=given.lpips_heads)


def _recorded(given: AuditSettings, lpips: metrics.LpipsWeights | None) -> dict:
  """Returns what identifies the settings, plain JSON; settings that came later stand only where they are used.

  LPIPS is identified by its weights, wherever their files are.
  """
  found = dataclasses.asdict(given)
  found['adaptive_attacks'] = None if given.adaptive_attacks is None else list(given.adaptive_attacks)
  unused = {name for name, value in (('rounds', 1), ('adaptive_attacks', None)) if found[name] == value}
  unused |= {'decide', 'within', 'level', 'error_rate'} if not given.sequential else set()
  unused |= {'lpips_weights', 'lpips_heads', *(['lpips_backbone'] if lpips is None else [])}
  recorded = {name: value for name, value in found.items() if name not in unused}
  return recorded if lpips is None else {**recorded, 'lpips_weights': lpips.digest()}


def _texts(**kinds: list[Labelled]) -> dict:
  """Returns what labels of a user's own stand for: a changed method is a changed setting."""
  texts = {f'{kind}_texts': {one.label: text(one) for one in methods} for kind, methods in kinds.items()}
  told = {kind: {label: of for label, of in each.items() if of != label} for kind, each in texts.items()}
  return {kind: each for kind, each in told.items() if each}


@reusable(64)
def _sent(client: Client, structure: Any, shapes: tuple) -> Tree:
  """Returns the shapes of what a client sends, traced once for all attacks."""
  return jax.eval_shape(client.local_update, *structure.unflatten(shapes))


def _trace(group: Group, attack: Labelled) -> None:
  """Traces client and attack on shapes alone, so that what cannot be run says so before anything is compiled."""
  method, client, variables = attack.method, group.client, group.scenario.variables
  if jax.config.jax_enable_x64 and method(client).num_steps:
    raise errors.UsageError(f'the attack {attack.label!r} descends in float32: float64 is for closed forms alone')
  if method.learns and group.scenario.public is None:
    raise errors.UsageError(
      f'the attack {attack.label!r} learns from public data: give public=(samples, targets) to gradleak.scenario'
    )
  if method.prepare is not None and method(client).num_steps:
    return  # what it is made of has to be learned first
  key, samples, targets = jax.random.key(0), group.truth[0], jnp.asarray(group.targets[0])
  leaves, structure = jax.tree.flatten(jax.eval_shape(lambda *given: given, key, variables, samples, targets))
  upload = _sent(client, structure, tuple(leaves))
  for defense in group.defenses:
    _sent(defense.method.client(client), structure, tuple(leaves))
  shared = {
    'views': {'update': upload.update, 'weights': None, 'noise': jnp.float32(0), 'clip': jnp.float32(jnp.inf)},
    'targets': jax.eval_shape(lambda x: client.loss.targets.encode(x, client.num_classes, jnp.float32), targets),
  }
  rest = {
    'variables': variables,
    'class_means': granted.class_means(group, method),
    'class_images': granted.class_images(group, method),
  }
  leaves, structure = jax.tree.flatten(jax.eval_shape(lambda *given: given, shared, rest, key))
  _start(Build.of(group, method), method.numbers, method.prepare is not None, structure, tuple(leaves))


@reusable(64)
def _start(build: Build, numbers: tuple, steps: bool, structure: Any, shapes: tuple) -> None:
  """Traces the first step of an attack, or all of a closed form; once for equal builds and shapes."""

  def start(shared: dict, rest: dict, key: jax.Array) -> Any:
    shared = jax.tree.map(lambda x: jnp.expand_dims(x, 0), shared)
    made, key, observation = build({**shared, **rest}, {'trial': 0, 'view': 0, 'key': key, 'numbers': numbers})
    state = made.init(key, observation)
    return (
      made.step(state, observation) if made.num_steps or made.on_host or steps else made.reconstruct(state, observation)
    )

  jax.eval_shape(start, *structure.unflatten(shapes))
