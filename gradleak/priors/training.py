"""Training a prior on public images, with checkpoints."""

import hashlib
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradleak.core import errors, trees
from gradleak.core.locks import alone
from gradleak.core.storage import Workdir
from gradleak.priors import denoiser, gan

AT_ONCE = 20  # steps of one compiled pass


def check_steps(name: str, steps: int) -> None:
  """Raises `UsageError`, with the `name` of the argument, unless `steps` is a multiple of `AT_ONCE`."""
  errors.check_number(name, steps, low=AT_ONCE, integer=True)
  if steps % AT_ONCE:
    raise errors.UsageError(f'{name} is {steps}, expected a multiple of {AT_ONCE}')


def train(
  key: jax.Array,
  training: gan.Training | denoiser.Training,
  images: np.ndarray,
  steps: int,
  *,
  workdir: str | os.PathLike | None = None,
  config: dict | None = None,
  on_steps: Callable[[int, dict[str, float]], None] | None = None,
) -> gan.State | denoiser.State:
  """Returns the state after a number of steps; the same arguments give the same bits, also after a resume.

  Args:
    key: a typed JAX key.
    training: the `Training` of a generator or a denoiser.
    images: public images, float32 [N, H, W, C] in [0, 1].
    steps: a multiple of 20.
    workdir: a folder for checkpoints; a training that was killed goes on from there.
    config: what identifies the training there beside key, module and images, plain JSON.
    on_steps: called with (steps done, losses) after every 20 steps.

  Raises:
    UsageError: for a number of steps out of range, images of another shape, or a folder of another training, or of one
      that went further.
  """
  check_steps('steps', steps)
  if tuple(images.shape[1:]) != training.module.image_shape:
    raise errors.UsageError(f'the images have shape {images.shape[1:]}, expected {training.module.image_shape}')
  state, done, public = training.init(jax.random.fold_in(key, 0)), 0, jnp.asarray(images)
  pixels = hashlib.sha256(np.ascontiguousarray(images)).hexdigest()[:16]
  own = {'key': jax.random.key_data(key).tolist(), 'module': repr(training.module), 'images': pixels}

  @jax.jit
  def several(state: Any, first: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
    def one(state: Any, number: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
      return training.step(state, jax.random.fold_in(key, number + 1), public)

    state, losses = jax.lax.scan(one, state, first + jnp.arange(AT_ONCE, dtype=jnp.int32))
    return state, jax.tree.map(lambda x: x[-1], losses)

  with alone(workdir):
    store = None if workdir is None else Workdir(workdir, {**own, **(config or {})}, {})
    if store is not None and (found := store.load_checkpoint('prior')):
      done, leaves = found
      if done > steps:
        raise errors.UsageError(f'{workdir} holds a training of {done} steps, more than {steps}: choose a new folder')
      state = trees.rebuilt(state, list(map(jnp.asarray, leaves)))

    while done < steps:
      state, losses = several(state, jnp.int32(done))
      done += AT_ONCE
      if store is not None:
        store.save_checkpoint('prior', done, state, due=done == steps)
      if on_steps is not None:
        on_steps(done, {name: float(loss) for name, loss in losses.items()})
  return state
