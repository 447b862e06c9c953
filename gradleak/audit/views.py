"""What each attacker compares: the views that adaptive attacks make of the uploads."""

from typing import Any, NamedTuple

import jax
import numpy as np

from gradleak.adaptive import NON_ADAPTIVE, AdaptiveAttack, View
from gradleak.audit import granted
from gradleak.audit.group import Group
from gradleak.audit.uploads import Uploads
from gradleak.audit.verdict import CONTROL
from gradleak.core import trees
from gradleak.core.trees import Tree


class Target(NamedTuple):
  """What one attacker compares: one view, or several of which it keeps the best match.

  Attributes:
    defense: index of the defense; −1 for a control run.
    adaptive: the `AdaptiveAttack`.
    reads: the evidence that the view was made for; None for any attack.
    trial: index of the private batch.
    address: index that is folded into the PRNG key: the trial, or the number of the control run.
    place: index of the upload among those of its defense.
    views: indices of its views.
  """

  defense: int
  adaptive: AdaptiveAttack
  reads: frozenset[str] | None
  trial: int
  address: int
  place: int
  views: tuple[int, ...]

  def key(self, group: Group, variant: str) -> tuple[str, str, str, int]:
    """Returns what tells the row of this target and a variant of an attack from all others."""
    label = CONTROL if self.defense < 0 else group.defenses[self.defense].label
    return variant, label, self.adaptive.name, self.address


class Views(NamedTuple):
  """All views of a group's uploads.

  Attributes:
    stacked: 'update', 'weights', 'noise', 'clip'; 'variables', of a server of several rounds; 'uploads', where an
      attack reads them: trees of arrays with a leading axis of views. Weights are None where all are 1.
    targets: the `Target`s that they belong to, the control runs' last.
  """

  stacked: dict[str, Tree]
  targets: list[Target]


def views(group: Group, sent: Uploads) -> Views:
  """Returns the `Views` of a group's uploads: each adaptive attack of any attack is applied once to each upload."""
  found: list[View] = []
  targets: list[Target] = []
  variables: list[Tree | None] = []
  raw: list[Tree | None] = []
  read_rounds = any('uploads' in attack.reads for _, attack in group.attacks)

  def add(
    defense: int, adaptive: AdaptiveAttack, reads: frozenset | None, trial: int, address: int, place: int
  ) -> None:
    upload = jax.tree.map(lambda x: x[:, place], sent.sent[defense])
    made = adaptive.views(jax.tree.map(lambda x: x[: adaptive.rounds], upload))
    several = tuple(range(len(found), len(found) + len(made)))
    targets.append(Target(defense, adaptive, reads, trial, address, place, several))
    found.extend(made)
    referred = sent.variables[defense]
    variables.extend(None if referred is None else trees.take(referred, place) for _ in made)
    raw.extend(upload.update if read_rounds else None for _ in made)

  for d, (_, bound) in enumerate(group.defenses):
    adaptive_attacks = {
      (adaptive.name, None if adaptive is NON_ADAPTIVE else attack.reads): adaptive
      for _, attack in group.attacks
      for adaptive in granted.attackers(group, attack, bound)
    }
    for (_, reads), adaptive in adaptive_attacks.items():
      for i, t in enumerate(sent.trials.tolist()):
        add(d, adaptive, reads, t, t, i)
  for i, run in enumerate(sent.controls.tolist()):
    add(-1, NON_ADAPTIVE, None, run % group.num_trials, run, i)
  stacked = stack(found)
  for name, each in (('variables', variables), ('uploads', raw)):
    if any(one is not None for one in each):
      stacked[name] = _stacked(each)
  return Views(stacked, targets)


def stack(found: list[View]) -> dict[str, Tree]:
  """Returns `Views.stacked` of what every view has: 'update', 'weights', 'noise' and 'clip'."""
  if all(np.all(weights == 1) for view in found for weights in jax.tree.leaves(view.weights)):
    found = [view._replace(weights=None) for view in found]  # a distance without weights needs fewer passes
  scalars = {name: [np.float32(getattr(view, name)) for view in found] for name in ('noise', 'clip')}
  return {name: _stacked(scalars.get(name) or [getattr(view, name) for view in found]) for name in View._fields}


def _stacked(trees_: list) -> Any:
  return jax.tree.map(lambda *xs: jax.device_put(np.stack(xs)), *trees_)
