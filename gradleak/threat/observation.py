"""What an attacker observes, and the evidence in it."""

import dataclasses
import math

import jax

from gradleak.core.trees import Tree
from gradleak.threat.knowledge import Knowledge

# What an attacker may know of an upload beside the upload itself: fields of `Observation`.
EVIDENCE = ('weights', 'noise', 'clip', 'uploads')


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Observation:
  """Everything that an attack observes.

  The fields from `weights` on are evidence: what an attacker who knows the defense derives from it. An attack names the
  evidence that it reads (`EVIDENCE`).

  Attributes:
    variables: the global model that the client received.
    update: the upload that is compared: a gradient, or a delta; zeros where nothing was sent. An attacker of several
      rounds may have averaged or summed their uploads.
    targets: probabilities [N, classes]; those of the private samples if the knowledge grants them, else zeros.
    knowledge: see `Knowledge`.
    batch_shape: (N, …) of the private samples.
    num_classes: number of classes.
    weights: float32, shaped like the update: how much each entry counts in the distance, 0 for not at all; None for 1.
    noise: expected squared norm of the noise in the update, each entry's square times its weight; 0 if none is known.
    clip: the L2 norm that the update was clipped to; infinity if none is known.
    uploads: the updates of all rounds, every leaf [R, …], for attacks that read 'uploads'; else None.
    class_means: mean sample of each class in the auxiliary data, [classes, …], or None without such data.
    class_images: auxiliary samples of each class, [classes, n, …], for a label rule that uses them; else None.
    prepared: what the attack learned from the auxiliary data, see `attacks.base.AttackMethod`.
  """

  variables: Tree
  update: Tree
  targets: jax.Array
  knowledge: Knowledge = dataclasses.field(metadata={'static': True})
  batch_shape: tuple[int, ...] = dataclasses.field(metadata={'static': True})
  num_classes: int = dataclasses.field(metadata={'static': True})
  weights: Tree | None = None
  noise: jax.Array | float = 0.0
  clip: jax.Array | float = math.inf
  uploads: Tree | None = None
  class_means: jax.Array | None = None
  class_images: jax.Array | None = None
  prepared: Tree | None = None
