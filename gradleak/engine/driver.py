"""Runs an attack on a table of lanes: compiled once, in micro-groups, over all local devices, chunk by chunk.

A lane is one trial × restart × set of numeric settings. Lanes never communicate, so a lane's figures do not depend on
which others run: they are the same bits at a fixed micro-group size, whatever the number of lanes or devices. Between
chunks, lanes that have finished leave, and the others move together.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gradleak import errors
from gradleak.engine import groups, memory


class Progress(NamedTuple):
  """What the driver reports after each chunk.

  Attributes:
    step: steps done.
    num_steps: steps in all.
    objective: of every lane at its current point, float32 [lanes]; of one that has left, what it was last.
    active: how many lanes have not finished.
    group_size: lanes per micro-group; fewer than asked for once memory ran out.
    notice: what a person should be told, or ''.
    fetch: () -> the states.
  """

  step: int
  num_steps: int
  objective: np.ndarray
  active: int
  group_size: int
  notice: str
  fetch: Callable

  @property
  def states(self):
    """The lanes' states on the host; their leaves can be checkpointed and handed to `resume`, on any devices."""
    return self.fetch()

  @property
  def done(self):
    """Whether nothing is left to do: all steps are done, or all lanes have finished."""
    return self.step >= self.num_steps or not self.active


def default_group_size(variables, num_images):
  """Returns how many lanes share one pass: on CPU what stays in a core's cache, else so many that memory decides."""
  if jax.default_backend() != 'cpu':
    return max(1, 512 // num_images)
  size = sum(x.size for x in jax.tree.leaves(variables['params']))
  return max(1, min(8, 64_000 // size) // num_images)


def fitting_group_size(build, shared, lanes, group_size, devices=None):
  """Returns `group_size`, halved until all states and one group's pass fit into the devices' free memory.

  What it compiles to find out, `run` takes as it is. The arguments are those of `run`; of `shared` and `lanes` the
  shapes suffice.
  """
  devices = devices or jax.local_devices()
  free = memory.free(devices[0])
  while free is not None and group_size > 1 and needed(build, shared, lanes, group_size, devices) > 0.8 * free:
    group_size = -(-group_size // 2)
  return group_size


def needed(build, shared, lanes, group_size, devices):
  """Returns the bytes per device that a chunk needs; infinity if there are too few to compile it."""
  attack, seats = _functions(build), groups.seat(np.arange(_count(lanes)), group_size, devices)
  shared = seats.shapes(jax.eval_shape(seats.replicate, shared))
  lanes = seats.shapes(jax.eval_shape(seats.take, lanes), 'lanes')
  start, arguments = seats.bind(attack.init, shared, lanes)
  states = seats.shapes(jax.eval_shape(start, *arguments), 'lanes')
  chunk, arguments = seats.bind(attack.chunk, shared, lanes, states, extra=(np.int32(0),))
  try:
    used = chunk.lower(*arguments).compile().memory_analysis()
  except jax.errors.JaxRuntimeError as error:
    if memory.ran_out(error):
      return math.inf
    raise
  return used.argument_size_in_bytes + used.output_size_in_bytes + used.temp_size_in_bytes


def run(
  build,
  shared,
  lanes,
  *,
  num_steps,
  group_size,
  chunk_steps=None,
  on_chunk=None,
  on_failure=None,
  resume=None,
  devices=None,
  split=0,
):
  """Returns the `Reconstruction`s of all lanes, a tree with leading axis [lanes] on the host.

  Where memory runs out, the groups are halved and the run goes on from the last chunk.

  Args:
    build: (shared, lane) -> (attack, key, observation); called while tracing, so a lane's numbers may be traced. Equal
      ones, as frozen dataclasses are, compile once.
    shared: what all lanes read: variables, uploads, labels.
    lanes: a tree with leading axis [lanes].
    num_steps: steps of the attack.
    group_size: lanes per micro-group.
    chunk_steps: steps between two calls of `on_chunk`; by default about fifty chunks.
    on_chunk: called with a `Progress` after the start (step 0) and after each chunk.
    on_failure: called with the last `Progress` before a `DeviceError`, to save it; the states may be lost with the
      device, which ends the call.
    resume: (step, leaves of the states) of an earlier `Progress` of the same lanes and group size.
    devices: the devices to shard over; all local ones by default.
    split: the number of images of a lane, where devices share these instead of lanes: for a batch that is too large for
      one of them. They may belong to several processes that make the same call (`jax.distributed`). The bits are
      others then, and groups are not halved.

  Raises:
    DeviceError: if a device fails, or has no memory for one lane.
  """
  chunk_steps = chunk_steps or max(1, min(250, -(-num_steps // 50)))
  last, notice = None, ''
  while True:
    try:
      table = _Table(build, shared, lanes, group_size, devices or jax.local_devices(), split)
      for last in table.chunks(num_steps, chunk_steps, resume, notice):
        if on_chunk is not None:
          on_chunk(last)
      return table.finish()
    except jax.errors.JaxRuntimeError as error:
      rescued, table = last and _rescued(last), None
      if split or group_size == 1 or not memory.ran_out(error) or (last is not None and rescued is None):
        if on_failure is not None and rescued is not None:
          on_failure(rescued)
        step = last.step if last else resume[0] if resume else 0
        raise _failure(error, f' at step {step} of {num_steps}') from error
      if rescued is not None:
        last, resume = rescued, (rescued.step, jax.tree.leaves(rescued.states))
      group_size = -(-group_size // 2)
      notice = f'out of memory, going on with groups of {group_size}'


def evaluate(function, shared, lanes, *, group_size, devices=None):
  """Returns function(shared, lane) of all lanes, a tree with leading axis [lanes], in the groups that `run` makes.

  Equal functions compile once. Where memory runs out, the groups are halved.

  Raises:
    DeviceError: as `run`.
  """
  seats = groups.seat(np.arange(_count(lanes)), group_size, devices or jax.local_devices())
  try:
    return seats.unpad(seats.call(function, seats.replicate(shared), seats.pad(lanes)))
  except jax.errors.JaxRuntimeError as error:
    if group_size == 1 or not memory.ran_out(error):
      raise _failure(error) from error
  return evaluate(function, shared, lanes, group_size=-(-group_size // 2), devices=devices)


def _count(lanes):
  return jax.tree.leaves(lanes)[0].shape[0]


def _rescued(progress):
  """Returns the same with its states on the host; None if the device does not give them."""
  try:
    states = progress.states
  except jax.errors.JaxRuntimeError:
    return None
  return progress._replace(fetch=lambda: states)


def _failure(error, where=''):
  first = str(error).strip().split('\n')[0]
  if memory.ran_out(error):
    return errors.DeviceError(
      f'out of memory{where}, with one trial at a time: take fewer images per trial, a smaller model or fewer trials '
      f'({first})'
    )
  return errors.DeviceError(
    f'the device failed{where} ({first}). A work directory holds what was found up to its last checkpoint: give the '
    'same command again to go on from there'
  )


class _Attack(NamedTuple):
  """The functions of one lane that are compiled."""

  init: Callable
  chunk: Callable
  finish: Callable


@groups.reusable
def _functions(build):
  """Returns the `_Attack` of a `build`, the same one for an equal `build`."""

  def init(shared, lane):
    attack, key, observation = build(shared, lane)
    # optax's states hold weakly typed leaves, which would compile the chunk twice.
    return jax.tree.map(lambda x: jnp.asarray(x, x.dtype), attack.init(key, observation))

  def chunk(shared, lane, state, size):
    """Returns (state, (objective, whether it has finished)) after `size` steps."""
    attack, _, observation = build(shared, lane)

    def step(_, carry):
      state, info = attack.step(carry[0], observation)
      objective = info['objective']
      return state, (objective, info.get('finished', ~jnp.isfinite(objective)))

    nothing = jnp.full((), jnp.nan, jnp.float32), jnp.zeros((), bool)
    return jax.lax.fori_loop(0, size, step, (state, nothing))

  def finish(shared, lane, state):
    attack, _, observation = build(shared, lane)
    return attack.reconstruct(state, observation)

  return _Attack(init, chunk, finish)


class _Table:
  """The lanes of one run: the active ones' states on the devices, those of who left on the host."""

  def __init__(self, build, shared, lanes, group_size, devices, split):
    self.attack, self.all, self.group_size = _functions(build), np.arange(_count(lanes)), group_size
    self.seats = groups.seat(self.all, group_size, devices, split)
    self.shared, self.lanes, self.padded = self.seats.replicate(shared), lanes, self.seats.pad(lanes)
    self.states, self.left = None, None

  def chunks(self, num_steps, size, resume, notice):
    """Yields a `Progress` after the start, unless it is resumed, and after each chunk of `size` steps."""
    objective, active = np.full(self.all.shape, np.nan, np.float32), np.ones(self.all.shape, bool)

    def progress(notice):
      fetch = functools.partial(_fetch, self.seats, self.states, self.left)
      return Progress(step, num_steps, objective.copy(), int(active.sum()), self.group_size, notice, fetch)

    if resume is None:
      step, self.states = 0, self._call(self.attack.init)
      # The start's objective comes from the same evaluation that the first step makes.
      objective[:] = self.seats.unpad(self._call(self.attack.finish, self.states).objective)
      yield progress(notice)
      notice = ''
    else:
      step, self.states = resume[0], self._restored(resume[1])
    while step < num_steps and active.any():
      done = min(size, num_steps - step)
      self.states, reported = self._call(self.attack.chunk, self.states, extra=(np.int32(done),))
      step, seated = step + done, self.seats.lanes
      objective[seated], finished = self.seats.unpad(reported)
      active[seated] = ~finished
      if step < num_steps and active.any() and self.seats.holds_fewer(active.sum()):
        self._seat(np.flatnonzero(active))
      yield progress(notice)
      notice = ''

  def finish(self):
    """Returns the `Reconstruction`s of all lanes."""
    if self.left is not None:
      self._seat(self.all)
    return self.seats.unpad(self._call(self.attack.finish, self.states))

  def _call(self, function, *states, extra=()):
    return self.seats.call(function, self.shared, self.padded, *states, extra=extra)

  def _seat(self, lanes):
    """Seats other lanes than now."""
    self.left = _fetch(self.seats, self.states, self.left)
    self.states = self.padded = None  # room for the new ones
    self.seats = self.seats.reseat(lanes)
    self.states, self.padded = self.seats.pad(self.left), self.seats.pad(self.lanes)

  def _restored(self, leaves):
    """Returns the states that `Progress.states` had these leaves."""
    init, arguments = self.seats.bind(self.attack.init, self.shared, self.padded)
    treedef = jax.tree.structure(jax.eval_shape(init, *arguments))
    return self.seats.pad(treedef.unflatten(np.asarray(leaf) for leaf in leaves))


def _fetch(seats, states, left):
  """Returns the states of all lanes on the host: of the seated ones as they are, of the others as they left."""
  seated = seats.unpad(states)
  if left is None:
    return seated

  def put(x, some):
    x = x.copy()
    x[seats.lanes] = some
    return x

  return jax.tree.map(put, left, seated)
