"""The attacks that read uploads of one model, and the defenses that they meet."""

import dataclasses
import zlib
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from gradleak import metrics
from gradleak.adaptive import UNAWARE, Counter, counters
from gradleak.attacks import labels as label_rules
from gradleak.attacks.base import AttackMethod
from gradleak.audit.labelled import Labelled
from gradleak.audit.settings import AuditSettings
from gradleak.core.trees import Tree
from gradleak.defenses.defense import Context, Defense, Placed, place
from gradleak.federated import Client
from gradleak.federated.scenario import Scenario
from gradleak.priors.trained import check_apart, fingerprints
from gradleak.servers.base import Server
from gradleak.threat import Knowledge


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
