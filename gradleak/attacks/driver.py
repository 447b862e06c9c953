"""Runs an attack on a table of lanes: compiled once, in micro-groups, over all local devices, chunk by chunk.

A lane is one trial × restart × set of numeric settings. Lanes never communicate, so a lane's figures do not depend on
which others run: they are the same bits at a fixed micro-group size, whatever the number of lanes or devices.
"""

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
    states: the lanes' states; their leaves can be checkpointed and handed to `resume`.
  """

  step: int
  num_steps: int
  objective: np.ndarray
  states: object

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
      progress = Progress(step, num_steps, program.unpad(objective), states)
      if on_chunk is not None:
        on_chunk(progress)
      if progress.done:
        break
    size = min(chunk_steps, num_steps - step)
    states, objective = program.chunk(states, size)
    step += size
  return program.finish(states)


class _Program:
  """The compiled functions of one attack structure, and the padding of its lanes to whole groups on all devices."""

  def __init__(self, build, shared, lanes, group_size, devices):
    self.count = jax.tree.leaves(lanes)[0].shape[0]
    groups = -(-self.count // group_size)
    devices = devices[: max(1, min(len(devices), groups))]
    groups = -(-groups // len(devices)) * len(devices)
    # Dummy lanes repeat real ones: they cost time, never bits.
    self.padded = np.arange(groups * group_size).reshape(groups, group_size) % self.count
    self.lanes = jax.tree.map(self.pad, lanes)
    self.shared = shared
    mesh = jax.make_mesh((len(devices),), ('lanes',), axis_types=(AxisType.Auto,), devices=devices)

    def over_groups(function, extra=()):
      """Maps function(lane, state, *extra) over groups on each device, and over lanes within a group."""

      def mapped(shared, lanes, states, *extra):
        def group(member):
          return jax.vmap(lambda lane, state: function(shared, lane, state, *extra))(*member)

        return jax.lax.map(group, (lanes, states))

      # With check_vma=True, gradients with respect to the replicated weights would be summed over devices, silently.
      return jax.jit(
        jax.shard_map(
          mapped,
          mesh=mesh,
          in_specs=(P(), P('lanes'), P('lanes'), *(P() for _ in extra)),
          out_specs=P('lanes'),
          check_vma=False,
        )
      )

    def init(shared, lane, _):
      attack, key, observation = build(shared, lane)
      # optax's states hold weakly typed leaves, which would compile the chunk twice.
      return jax.tree.map(lambda x: jnp.asarray(x, x.dtype), attack.init(key, observation))

    def chunk(shared, lane, state, size):
      attack, _, observation = build(shared, lane)
      unknown = jnp.full((), jnp.nan, jnp.float32)
      return jax.lax.fori_loop(
        0,
        size,
        lambda _, carry: (lambda new: (new[0], new[1]['objective']))(attack.step(carry[0], observation)),
        (state, unknown),
      )

    def finish(shared, lane, state):
      attack, _, observation = build(shared, lane)
      return attack.reconstruct(state, observation)

    self._init, self._chunk, self._finish = over_groups(init), over_groups(chunk, (0,)), over_groups(finish)

  def init(self):
    return self._init(self.shared, self.lanes, self.lanes)

  def chunk(self, states, size):
    return self._chunk(self.shared, self.lanes, states, jnp.int32(size))

  def finish(self, states):
    return jax.tree.map(self.unpad, self._finish(self.shared, self.lanes, states))

  def objective(self, states):
    """Returns the objective at the start, from the same evaluation that the first step makes."""
    return self._finish(self.shared, self.lanes, states).objective

  def restore(self, leaves):
    """Returns the states of `leaves`; another number of devices pads the lanes otherwise."""
    treedef = jax.tree.structure(jax.eval_shape(self._init, self.shared, self.lanes, self.lanes))
    return treedef.unflatten(self.pad(jnp.asarray(self.unpad(leaf))) for leaf in leaves)

  def pad(self, x):
    return x[self.padded]

  def unpad(self, x):
    x = np.asarray(x)
    return x.reshape(-1, *x.shape[2:])[: self.count]
