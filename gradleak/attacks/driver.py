"""Runs an attack on a table of lanes: compiled once, in micro-groups, over all local devices, chunk by chunk.

A lane is one trial × restart × set of numeric settings. Lanes never communicate, so a lane's figures do not depend on
which others run: they are the same bits at a fixed micro-group size, whatever the number of lanes or devices.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P


class Progress(NamedTuple):
  """What the driver reports after each chunk.

  Attributes:
    step: steps done.
    num_steps: steps in all.
    objective: of every lane at its current point, float32 [lanes].
    padded: the lanes' states on the devices, whose number decides how they are padded.
    unpad: leaf of `padded` -> the same of the lanes alone, on the host.
  """

  step: int
  num_steps: int
  objective: np.ndarray
  padded: object
  unpad: Callable

  @property
  def states(self):
    """The lanes' states on the host; their leaves can be checkpointed and handed to `resume`, on any devices."""
    return jax.tree.map(self.unpad, self.padded)

  @property
  def done(self):
    """Whether nothing is left to do: all steps are done, or no lane is finite any more."""
    return self.step >= self.num_steps or not np.isfinite(self.objective).any()


def default_group_size(variables, num_images):
  """Returns how many lanes share one pass: on CPU what stays in a core's cache, else many."""
  if jax.default_backend() != 'cpu':
    return 64
  size = sum(x.size for x in jax.tree.leaves(variables['params']))
  return 1 if size > 200_000 else max(1, 8 // num_images)


def run(build, shared, lanes, *, num_steps, group_size, chunk_steps=None, on_chunk=None, resume=None, devices=None):
  """Returns the `Reconstruction`s of all lanes, a tree with leading axis [lanes] on the host.

  Args:
    build: (shared, lane) -> (attack, key, observation); called while tracing, so a lane's numbers may be traced.
    shared: what all lanes read: variables, uploads, labels.
    lanes: a tree with leading axis [lanes].
    num_steps: steps of the attack.
    group_size: lanes per micro-group.
    chunk_steps: steps between two calls of `on_chunk`; by default about fifty chunks.
    on_chunk: called with a `Progress` after the start (step 0) and after each chunk.
    resume: (step, leaves of the states) of an earlier `Progress` of the same lanes and group size.
    devices: the devices to shard over; all local ones by default.
  """
  program = _Program(build, shared, lanes, group_size, devices or jax.local_devices())
  chunk_steps = chunk_steps or max(1, min(250, -(-num_steps // 50)))
  if resume is None:
    step, states = 0, program.init()
    objective = program.objective(states)
  else:
    step, states = resume[0], program.restore(resume[1])
    objective = None
  while True:
    if objective is not None:
      progress = Progress(step, num_steps, program.unpad(objective), states, program.unpad)
      if on_chunk is not None:
        on_chunk(progress)
      if progress.done:
        break
    size = min(chunk_steps, num_steps - step)
    states, objective = program.chunk(states, size)
    step += size
  return program.finish(states)


def evaluate(function, shared, lanes, *, group_size, devices=None):
  """Returns function(shared, lane) of all lanes, a tree with leading axis [lanes], in the groups that `run` makes."""
  groups = _Groups(lanes, group_size, devices or jax.local_devices())
  return jax.tree.map(groups.unpad, groups.over(function)(shared, groups.lanes))


class _Groups:
  """Lanes padded to whole micro-groups on all devices, and the functions compiled over them."""

  def __init__(self, lanes, group_size, devices):
    self.count = jax.tree.leaves(lanes)[0].shape[0]
    groups = -(-self.count // group_size)
    devices = devices[: max(1, min(len(devices), groups))]
    # What the compiler knows to be a single group it compiles to other bits: there is room for two, and the number to
    # run is an argument.
    self.per_device = -(-groups // len(devices))
    self.shape = (len(devices), max(2, self.per_device), group_size)
    # Dummy lanes repeat real ones: they cost time, never bits.
    padded = np.zeros(self.shape, np.int32)
    real = np.arange(len(devices) * self.per_device * group_size) % self.count
    padded[:, : self.per_device] = real.reshape(len(devices), self.per_device, group_size)
    self.padded = padded.reshape(-1, group_size)
    self.lanes = jax.tree.map(self.pad, lanes)
    self.mesh = jax.make_mesh((len(devices),), ('lanes',), axis_types=(AxisType.Auto,), devices=devices)

  def over(self, function, num_lane_trees=1):
    """Returns the compiled (shared, *trees of lanes, *extra) -> results, over groups and over lanes within a group.

    `function(shared, *lanes, *extra)` is of one lane; extra arguments are the same for all.
    """

    def mapped(count, shared, *arguments):
      lanes, extra = arguments[:num_lane_trees], arguments[num_lane_trees:]

      def group(i):
        member = jax.tree.map(lambda x: x[i], lanes)
        return jax.vmap(lambda *lane: function(shared, *lane, *extra))(*member)

      def put(i, results):
        return jax.tree.map(lambda all_, one: all_.at[i].set(one), results, group(i))

      shapes = jax.eval_shape(group, jnp.int32(0))
      empty = jax.tree.map(lambda x: jax.lax.full((self.shape[1], *x.shape), 0, x.dtype), shapes)
      return jax.lax.fori_loop(jnp.int32(0), count, put, empty)

    @functools.partial(jax.jit, static_argnames='num_extra')
    def sharded(count, shared, *arguments, num_extra):
      # With check_vma=True, gradients with respect to the replicated weights would be summed over devices, silently.
      specs = (P(), P(), *(P('lanes') for _ in range(num_lane_trees)), *(P() for _ in range(num_extra)))
      return jax.shard_map(mapped, mesh=self.mesh, in_specs=specs, out_specs=P('lanes'), check_vma=False)(
        count, shared, *arguments
      )

    def call(shared, *arguments):
      return sharded(jnp.int32(self.per_device), shared, *arguments, num_extra=len(arguments) - num_lane_trees)

    return call

  def pad(self, x):
    return x[self.padded]

  def unpad(self, x):
    x = np.asarray(x)
    x = x.reshape(*self.shape, *x.shape[2:])[:, : self.per_device]
    return x.reshape(-1, *x.shape[3:])[: self.count]


class _Program:
  """The compiled functions of one attack structure."""

  def __init__(self, build, shared, lanes, group_size, devices):
    self.groups = _Groups(lanes, group_size, devices)
    self.shared, self.lanes, self.unpad = shared, self.groups.lanes, self.groups.unpad

    def init(shared, lane):
      attack, key, observation = build(shared, lane)
      # optax's states hold weakly typed leaves, which would compile the chunk twice.
      return jax.tree.map(lambda x: jnp.asarray(x, x.dtype), attack.init(key, observation))

    def chunk(shared, lane, state, size):
      attack, _, observation = build(shared, lane)

      def step(_, carry):
        state, info = attack.step(carry[0], observation)
        return state, info['objective']

      return jax.lax.fori_loop(0, size, step, (state, jnp.full((), jnp.nan, jnp.float32)))

    def finish(shared, lane, state):
      attack, _, observation = build(shared, lane)
      return attack.reconstruct(state, observation)

    self._init = self.groups.over(init)
    self._chunk, self._finish = self.groups.over(chunk, 2), self.groups.over(finish, 2)

  def init(self):
    return self._init(self.shared, self.lanes)

  def chunk(self, states, size):
    return self._chunk(self.shared, self.lanes, states, jnp.int32(size))

  def finish(self, states):
    return jax.tree.map(self.unpad, self._finish(self.shared, self.lanes, states))

  def objective(self, states):
    """Returns the objective at the start, from the same evaluation that the first step makes."""
    return self._finish(self.shared, self.lanes, states).objective

  def restore(self, leaves):
    """Returns the states that `Progress.states` had these leaves."""
    treedef = jax.tree.structure(jax.eval_shape(self._init, self.shared, self.lanes))
    return treedef.unflatten(self.groups.pad(jnp.asarray(leaf)) for leaf in leaves)
