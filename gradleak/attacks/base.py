"""What an attack is: pure functions that a driver scans, so that every attack gets progress bars and checkpoints."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gradleak import errors


class Reconstruction(NamedTuple):
  """What an attack returns.

  Attributes:
    images: [K, H, W, C]; closed forms may find fewer or more than the N private ones, the surest first.
    labels: class indices, int32 [K], −1 where the attack is silent; [0] of an attack that never tells any.
    objective: the value that the attack minimised, priors included, at these images; float32 scalar. 0 of closed forms.
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
    labels: the label mode that the attack was published with: 'known', 'inferred', 'optimised' or 'unused'.
    auxiliary_data: whether it uses data of the same kind, `Observation.class_means`.
  """

  init: Callable
  step: Callable
  reconstruct: Callable
  objective: Callable
  num_steps: int
  labels: str
  auxiliary_data: bool = False


def require_gradient(name, observation):
  """Raises the `UsageError` of an attack that reads gradients, where a client shares its delta."""
  if observation.knowledge.share != 'gradient':
    raise errors.UsageError(f"the attack {name} reads the gradient of one step, and this client has share='delta'")


def on_host(read, observation, *given):
  """Returns (images [N, pixels], labels int32 [N]) of a closed form that runs on the host, in NumPy, lane by lane.

  Args:
    read: (parameters, update, N, *given), trees of NumPy arrays and the number of private samples -> (images
      [K, pixels] with K ≤ N, labels int [K]).
    observation: the `Observation`. Where fewer than N images are found, black ones without a label stand behind them.
    given: arrays, or trees of them.
  """
  number, dtype = observation.image_shape[0], jax.tree.leaves(observation.update)[0].dtype
  pixels = math.prod(observation.image_shape[1:])

  def padded(params, update, *given):
    images, labels = read(*jax.tree.map(np.asarray, (params, update)), number, *map(np.asarray, given))
    missing = number - len(images)
    images = np.pad(images.reshape(-1, pixels), ((0, missing), (0, 0)))
    return images.astype(dtype), np.pad(labels, (0, missing), constant_values=-1).astype(np.int32)

  shapes = jax.ShapeDtypeStruct((number, pixels), dtype), jax.ShapeDtypeStruct((number,), jnp.int32)
  seen = observation.variables['params'], observation.update
  return jax.pure_callback(padded, shapes, *seen, *given, vmap_method='sequential')


def closed_form(read, *, random=False, auxiliary_data=False):
  """Returns the `Attack` of a closed form, which has nothing to optimise.

  Args:
    read: a pure function of the `Observation`, and of a key if it is `random`, that returns (images [K, ...] of as many
      pixels as the private ones, the surest first; their labels, int32 [K], or None where it tells none).
    random: see `read`.
    auxiliary_data: as in `Attack`.
  """

  def init(key, observation):
    del observation
    return jax.random.key_data(key)

  def nothing(*_):
    return jnp.float32(0)

  def reconstruct(state, observation):
    images, labels = read(observation, *([jax.random.wrap_key_data(state)] if random else []))
    images = images.reshape(-1, *observation.image_shape[1:])
    labels = jnp.zeros(0, jnp.int32) if labels is None else labels
    diverged = jnp.where(jnp.isfinite(images).all(), -1, 0).astype(jnp.int32)
    return Reconstruction(images, labels, nothing(), nothing(), nothing(), diverged)

  return Attack(
    init=init,
    step=lambda state, observation: (state, {'objective': nothing()}),
    reconstruct=reconstruct,
    objective=nothing,
    num_steps=0,
    labels='unused',
    auxiliary_data=auxiliary_data,
  )
