"""What an attack is: pure functions that a driver scans, so that every attack gets progress bars and checkpoints."""

from collections.abc import Callable
from typing import NamedTuple

import jax


class Reconstruction(NamedTuple):
  """What an attack returns.

  Attributes:
    images: [N, H, W, C].
    labels: class indices, int32 [N].
    objective: the value that the attack minimised, priors included, at these images; float32 scalar.
    distance: the matching distance alone; restarts are chosen by it.
    objective_start: the objective at the start.
    diverged_step: the first step with a value that is not finite, or −1; int32 scalar.
  """

  images: jax.Array
  labels: jax.Array
  objective: jax.Array
  distance: jax.Array
  objective_start: jax.Array
  diverged_step: jax.Array


class Attack(NamedTuple):
  """An attack as pure functions of an `Observation`; it sees nothing else.

  Attributes:
    init: (key, observation) -> state, a tree of arrays; a key stands in it as its `key_data`.
    step: (state, observation) -> (state, info), info a dict of scalars: 'objective', NaN once diverged, and optionally
      'finished', whether neither the reconstruction nor this objective can change any more; without it, a lane has
      finished once its objective is not finite.
    reconstruct: (state, observation) -> Reconstruction.
    objective: (observation, images, labels as probabilities) -> objective; the auditor evaluates it at the
      truth; NaN where the truth alone does not determine it.
    num_steps: how many steps to run; 0 for closed-form attacks.
    labels: the label mode that the attack was published with: 'known', 'inferred' or 'optimised'.
    auxiliary_data: whether it uses data of the same kind, `Observation.class_means`.
  """

  init: Callable
  step: Callable
  reconstruct: Callable
  objective: Callable
  num_steps: int
  labels: str
  auxiliary_data: bool = False
