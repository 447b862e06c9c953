"""What each attacker of a group is granted: adaptive attacks, knowledge, and what it makes of the public data."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from gradleak.adaptive import NON_ADAPTIVE, AdaptiveAttack, adaptive_attacks
from gradleak.attacks import labels as label_rules
from gradleak.attacks.base import AttackMethod
from gradleak.audit.group import Group
from gradleak.core import errors
from gradleak.core.trees import Tree
from gradleak.defenses.defense import Bound, Defense, bind
from gradleak.federated.scenario import classes_of
from gradleak.federated.targets import CLASSES
from gradleak.priors.trained import check_apart, fingerprints
from gradleak.threat import Knowledge

_CHANCE = 1e-3  # of so many equal samples or more, below which they are the same ones


def attackers(group: Group, attack: AttackMethod, bound: Bound) -> list[AdaptiveAttack]:
  """Returns the `AdaptiveAttack`s by which an attack meets a defense.

  Without an adaptive attack, an adaptive attacker equals a non-adaptive one, and is run once.
  """
  given = group.settings
  if given.knowledge == 'non-adaptive':
    return [NON_ADAPTIVE]
  found = _suited(group, attack, bound)
  if given.adaptive_attacks is not None:
    found = [one for one in found if one.name in given.adaptive_attacks]
  return [NON_ADAPTIVE, *found] if given.knowledge == 'both' else found or [NON_ADAPTIVE]


def _suited(group: Group, attack: AttackMethod, bound: Bound) -> list[AdaptiveAttack]:
  """Returns all `AdaptiveAttack`s of an attack to a defense, named by the settings or not."""
  given, server = group.settings, group.server
  rounds = given.rounds if server is None or server.rounds == 1 else 1
  return adaptive_attacks(bound, group.scenario.context, given.batch_size, attack, rounds)


def check_names(groups: Sequence[Group]) -> None:
  """Raises `UsageError` for a name in `adaptive_attacks` that no attack of any group has to any of its defenses."""
  given = groups[0].settings
  if not given.adaptive_attacks or given.knowledge == 'non-adaptive':
    return
  cases = [(group, attack, bound) for group in groups for _, attack in group.attacks for _, bound in group.defenses]
  names = {one.name for case in cases for one in _suited(*case)}
  if not names:
    raise errors.UsageError(
      f'adaptive_attacks names {given.adaptive_attacks[0]!r}, and no attack here has an adaptive attack to any defense'
    )
  for name in given.adaptive_attacks:
    errors.check_choice('adaptive attack to these defenses', name, names)


def known_noise(group: Group, bound: Bound) -> bool:
  """Returns whether any attack reads the variance of a defense's noise."""
  return any(one.noise is not None for _, attack in group.attacks for one in attackers(group, attack, bound))


def knowledge(group: Group, attack: AttackMethod) -> Knowledge:
  """Returns what the attacker is granted; what it knows of the defense is in the evidence."""
  mode, rule = group.settings.labels, attack.label_rule
  made = attack(group.client)
  if mode == 'auto' or group.client.loss.own:  # there are no labels where samples give their own targets
    mode = 'unused' if group.client.loss.own else made.labels
  elif mode in label_rules.RULES:
    mode, rule = 'inferred', mode
  elif mode == 'optimised' and made.labels == 'unused':  # beside attacks that optimise them
    mode = 'unused'
  if mode == 'inferred':
    label_rules.check(rule, group.client)
  defense = {'non-adaptive': 'unknown', 'adaptive': 'known', 'both': 'either'}[group.settings.knowledge]
  if not any(one.method.defense.stages for one in group.defenses):
    defense = 'none'
  held = made.auxiliary_data or (mode == 'inferred' and rule in label_rules.AUXILIARY)
  return Knowledge(
    labels=mode,
    label_inference=rule,
    local_steps=group.client.num_steps(group.settings.batch_size),
    share=group.client.share,
    batch_norm=group.scenario.settings['batch_norm'],
    defense=defense,
    model='honest' if group.server is None else 'modified',
    auxiliary_data=len(group.scenario.public[0]) if held and group.scenario.public is not None else 0,
    prior=made.prior,
    training=made.assumes,
    cohort=group.client.cohort,
    running=made.running,
  )


def check_public(group: Group, attack: AttackMethod) -> None:
  """Raises `UsageError` if a private sample is among the public ones, and the attack uses those.

  Control runs would use it, too, and no reconstruction would exceed them. Where nothing is learned, as many may be
  among them as is likely by chance: rows of few columns, say, equal one another.
  """
  from scipy import stats

  public, kind = group.scenario.public, group.modality
  if public is None or not (attack.learns or knowledge(group, attack).auxiliary_data):
    return
  seen, private = fingerprints(kind.cast(public[0])), kind.cast(group.scenario.samples)
  counts = np.unique(seen, return_counts=True)[1]
  repeated, shared = counts[counts > 1].sum() / len(seen), np.isin(fingerprints(private), seen).sum()
  if attack.learns or stats.binom.sf(shared - 1, len(private), repeated) < _CHANCE:
    check_apart(seen, private, kind.noun[1], 'learns from' if attack.learns else 'is given as public')


def prepared(group: Group, attack: AttackMethod, simulates: Defense | None = None) -> Tree | None:
  """Returns what an attack learns from the public data before it sees an upload; None for most.

  Args:
    group: the `Group`.
    attack: the `AttackMethod`.
    simulates: the defense that an adaptive attack learns through, None for none.

  Raises:
    UsageError: if a private sample is among the public ones.
  """
  if attack.prepare is None:
    return None
  scenario = group.scenario
  if attack.adaptive and simulates is not None:
    scenario = scenario._replace(client=bind(simulates, scenario.context).client(group.client))
  found = attack.prepare(group.streams.named('prepare'), scenario, attack.settings, group.settings.batch_size)
  return jax.block_until_ready(found)  # so that a progress bar says what takes the time


def class_means(group: Group, attack: AttackMethod) -> jax.Array | None:
  """Returns the mean public sample of each class, for an attack that uses it; of all classes where one has none."""
  public = group.scenario.public
  if public is None or not knowledge(group, attack).auxiliary_data or group.client.loss.targets is not CLASSES:
    return None
  samples, labels = public[0], classes_of(public[1], group.client)
  classes = range(group.client.num_classes)
  return jnp.stack([samples[labels == c if (labels == c).any() else slice(None)].mean(axis=0) for c in classes])


def class_images(group: Group, attack: AttackMethod) -> jax.Array | None:
  """Returns public samples of each class, where the labels are inferred by a rule that uses them."""
  known, public = knowledge(group, attack), group.scenario.public
  if public is None or known.labels != 'inferred' or known.label_inference not in label_rules.AUXILIARY:
    return None
  samples, labels = public[0], classes_of(public[1], group.client)
  return label_rules.class_images(samples, labels, group.client.num_classes)
