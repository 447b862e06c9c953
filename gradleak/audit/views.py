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
from gradleak.federated import Upload


def called(label: str) -> str:
  """Returns how keys call a defense: never as the control runs, which its label may be."""
  return f'the defense {label}' if label == CONTROL else label


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
  views: tuple[int, ...] = ()

  def key(self, group: Group, variant: str) -> tuple[str, str, str, int]:
    """Returns what tells the row of this target and a variant of an attack from all others."""
    label = CONTROL if self.defense < 0 else called(group.defenses[self.defense].label)
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
  """Returns the `Views` of a group's uploads: each adaptive attack of any attack is applied once to each upload.

  Control runs are seen as by an attacker who knows of no defense. An attack that reads the variance of the noise weighs
  its prior by it, and the prior alone may come close to a sample. So its control runs bear the same variance, and have
  the norms of what the defense sends.
  """
  found: list[View] = []
  targets: list[Target] = []
  variables: list[Tree | None] = []
  raw: list[Tree | None] = []
  read_rounds = any('uploads' in attack.reads for _, attack in group.attacks)
  stream = group.streams.named('control noise')
  controlled: set[tuple] = set()

  def add(target: Target, made: list[View], upload: Upload, referred: Tree | None) -> None:
    targets.append(target._replace(views=tuple(range(len(found), len(found) + len(made)))))
    found.extend(made)
    variables.extend(referred for _ in made)
    raw.extend(upload.update if read_rounds else None for _ in made)

  def observed(adaptive: AdaptiveAttack, upload: Upload) -> list[View]:
    return adaptive.views(jax.tree.map(lambda x: x[: adaptive.rounds], upload))

  def sent_at(d: int, place: int) -> tuple[Upload, Tree | None]:
    referred = sent.variables[d]
    upload = jax.tree.map(lambda x: x[:, place], sent.sent[d])
    return upload, None if referred is None else trees.take(referred, place)

  runs = [(i, run, run % group.num_trials) for i, run in enumerate(sent.controls.tolist())]
  for d, (_, bound) in enumerate(group.defenses):
    # Attacks that read the same may make use of different evidence, and so change differently.
    adaptive_attacks = {
      (adaptive.name, None if adaptive is NON_ADAPTIVE else attack.reads, adaptive.change): adaptive
      for _, attack in group.attacks
      for adaptive in granted.attackers(group, attack, bound)
    }
    for about, adaptive in adaptive_attacks.items():
      reads = about[1]
      for i, t in enumerate(sent.trials.tolist()):
        upload, referred = sent_at(d, i)
        add(Target(d, adaptive, reads, t, t, i), observed(adaptive, upload), upload, referred)
      noisy = adaptive.noise is not None and about not in controlled  # equal defenses have the same control runs
      controlled.add(about)
      for i, run, t in runs if noisy else ():
        upload, referred = sent.like[d][t]
        key = jax.random.fold_in(stream, run)
        made = [noise_like(key, view) for view in observed(adaptive, upload)]
        add(Target(-1, adaptive, reads, t, run, i), made, sent_at(-1, i)[0], referred)
  for i, run, t in runs:
    upload, referred = sent_at(-1, i)
    add(Target(-1, NON_ADAPTIVE, None, t, run, i), observed(NON_ADAPTIVE, upload), upload, referred)
  stacked = stack(found)
  for name, each in (('variables', variables), ('uploads', raw)):
    if any(one is not None for one in each):
      stacked[name] = _stacked(each)
  return Views(stacked, targets)


def noise_like(key: jax.Array, view: View) -> View:
  """Returns the same view of noise: of the norm of each tensor, where the attacker compares anything."""
  rng = np.random.default_rng(np.asarray(jax.random.key_data(key)).ravel())

  def noise(like: Any, weights: Any) -> np.ndarray:
    drawn = np.where(np.asarray(weights) > 0, rng.standard_normal(np.shape(like)), 0.0)
    norms = [float(np.linalg.norm(np.asarray(x, np.float64))) for x in (like, drawn)]
    return np.asarray(drawn * (norms[0] / norms[1] if norms[1] else 0.0), np.asarray(like).dtype)

  return view._replace(update=jax.tree.map(noise, view.update, view.weights))


def stack(found: list[View]) -> dict[str, Tree]:
  """Returns `Views.stacked` of what every view has: 'update', 'weights', 'noise' and 'clip'."""
  if all(np.all(weights == 1) for view in found for weights in jax.tree.leaves(view.weights)):
    found = [view._replace(weights=None) for view in found]  # a distance without weights needs fewer passes
  scalars = {name: [np.float32(getattr(view, name)) for view in found] for name in ('noise', 'clip')}
  return {name: _stacked(scalars.get(name) or [getattr(view, name) for view in found]) for name in View._fields}


def _stacked(trees_: list) -> Any:
  return jax.tree.map(lambda *xs: jax.device_put(np.stack(xs)), *trees_)
