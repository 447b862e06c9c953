"""Micro-groups: where lanes stand on the devices, and functions compiled over all of them, once per structure.

Lanes of a group share one pass, groups follow one another, and each device runs its own. A lane's figures are the same
bits at a fixed group size, whatever else runs: groups are all of one shape, and their number is data.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from gradleak import errors


class Seats(NamedTuple):
  """Where lanes stand; D devices with room for R groups each.

  Attributes:
    lanes: the numbers of the lanes that are seated, ascending.
    table: the lane in each seat, int [D·R, group size]; dummies repeat real lanes, they cost time and never bits.
    counts: how many groups each device runs, int32 [D].
    devices: the D devices; or all that take the images of each lane among them, D = 1.
    split: how many images of a lane those share; 0 where each device runs its own lanes.
  """

  lanes: np.ndarray
  table: np.ndarray
  counts: np.ndarray
  devices: tuple
  split: int = 0

  @property
  def room(self):
    """R."""
    return len(self.table) // len(self.counts)

  @property
  def groups(self):
    """Rows of the table that run, in the order of their lanes."""
    return np.flatnonzero(np.arange(self.room) < self.counts[:, np.newaxis])

  def holds_fewer(self, lanes):
    """Whether that many lanes fit into fewer groups per device than run now."""
    groups = -(-lanes // self.table.shape[1])
    return -(-groups // len(self.counts)) < self.counts.max()

  def reseat(self, lanes):
    """Returns the `Seats` of other lanes in the same room, so that nothing is compiled anew."""
    return seat(lanes, self.table.shape[1], self.devices, self.split, self.room)

  def take(self, tree):
    """Returns a tree [all lanes, …] as [D·R, group size, …]."""
    return _strong(jax.tree.map(lambda x: x[self.table], tree))

  def pad(self, tree):
    """Returns the same on the devices."""
    return _put(self.take(tree), self._sharding('lanes'))

  def unpad(self, tree):
    """Returns the seated lanes of such a tree, [lanes, …] on the host."""

    def of_lanes(x):
      x = x[self.groups]
      return x.reshape(len(x) * x.shape[1], *x.shape[2:])[: len(self.lanes)]

    return jax.tree.map(of_lanes, jax.device_get(tree))

  def replicate(self, tree):
    """Returns `tree` on all devices."""
    return _put(_strong(tree), self._sharding())

  def shapes(self, tree, *axes):
    """Returns the shapes of a tree that is replicated or, over `axes` = 'lanes', padded."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._sharding(*axes)), tree)

  def bind(self, function, shared, *trees, extra=()):
    """Returns the `compiled` function, and its arguments from a replicated tree, padded ones and others."""
    counts = jax.device_put(self.counts, self._sharding('lanes'))
    return compiled(function, len(trees), self.devices, self.split), (counts, shared, *trees, *self.replicate(extra))

  def call(self, function, *arguments, **extra):
    """Returns function(shared, *lanes, *extra) of every seat; arguments as of `bind`."""
    function, arguments = self.bind(function, *arguments, **extra)
    return function(*arguments)

  def _sharding(self, *axes):
    return NamedSharding(_mesh(self.devices), P() if self.split else P(*axes))


def seat(lanes, group_size, devices, split=0, room=None):
  """Returns the `Seats` of lanes, spread evenly over the devices.

  Args:
    lanes: their numbers, ascending.
    group_size: lanes per group.
    devices: the devices; no more are used than there are groups, unless they `split` the images of each lane.
    split: see `Seats`.
    room: groups that each device has room for; by default, what it takes.

  Raises:
    UsageError: if images cannot be shared evenly.
  """
  if split % len(devices):
    raise errors.UsageError(f'{split} images cannot be shared evenly by {len(devices)} devices')
  groups = -(-len(lanes) // group_size)
  devices = tuple(devices) if room or split else tuple(devices[: max(1, min(len(devices), groups))])
  shares = 1 if split else len(devices)
  counts = groups // shares + (np.arange(shares) < groups % shares)
  # What the compiler knows to be a single group it compiles to other bits: there is room for two.
  room = room or max(2, counts.max())
  seats = Seats(lanes, np.zeros((shares * room, group_size), np.int32), counts.astype(np.int32), devices, split)
  seats.table[seats.groups] = np.resize(lanes, (groups, group_size))
  return seats


def _strong(tree):
  """Returns a tree without weak types, which would compile everything a second time."""
  return jax.tree.map(lambda x: x if isinstance(x, np.ndarray) else jnp.asarray(x, jnp.result_type(x)), tree)


def _put(tree, sharding):
  def put(x):
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):  # device_put gives keys to this process's devices only
      return jax.random.wrap_key_data(put(jax.random.key_data(x)), impl=jax.random.key_impl(x))
    return jax.device_put(x, sharding)

  return jax.tree.map(put, tree)


def reusable(factory):
  """Returns the factory of compiled functions with a memory: equal arguments, if they are hashable, give the same."""
  remembered = functools.lru_cache(maxsize=32)(factory)  # programs take memory

  @functools.wraps(factory)
  def call(*arguments):
    try:
      hash(arguments)
    except TypeError:
      return factory(*arguments)
    return remembered(*arguments)

  return call


@functools.cache
def _mesh(devices):
  return jax.make_mesh((len(devices),), ('lanes',), axis_types=(AxisType.Auto,), devices=devices)


@reusable
def compiled(function, num_trees, devices, split=0):
  """Returns the compiled (counts, shared, *trees of lanes, *extra) -> results over groups, and over lanes within each.

  `function(shared, *lanes, *extra)` is of one lane; extra arguments are the same for all.
  """

  def mapped(count, shared, *arguments):
    trees, extra = arguments[:num_trees], arguments[num_trees:]

    def group(i):
      members = jax.tree.map(lambda x: x[i], trees)
      return jax.vmap(lambda *lanes: function(shared, *lanes, *extra))(*members)

    def put(i, results):
      return jax.tree.map(lambda all_, one: all_.at[i].set(one), results, group(i))

    room = jax.tree.leaves(trees)[0].shape[0]
    empty = jax.tree.map(lambda x: jax.lax.full((room, *x.shape), 0, x.dtype), jax.eval_shape(group, jnp.int32(0)))
    return jax.lax.fori_loop(jnp.int32(0), count[0], put, empty)

  def over(counts, shared, *arguments):
    specs = (P('lanes'), P(), *(P('lanes') if i < num_trees else P() for i in range(len(arguments))))
    # With check_vma=True, gradients with respect to the replicated weights would be summed over devices, silently.
    return jax.shard_map(mapped, mesh=_mesh(devices), in_specs=specs, out_specs=P('lanes'), check_vma=False)(
      counts, shared, *arguments
    )

  def together(counts, shared, *arguments):
    """The compiler follows the images through the network, and sums over devices where the loss is their mean."""

    images = NamedSharding(_mesh(devices), P(None, None, 'lanes'))

    def spread(x):
      of_images = x.ndim > 3 and x.shape[2] == split
      return jax.lax.with_sharding_constraint(x, images) if of_images else x

    trees = jax.tree.map(spread, arguments[:num_trees])
    return mapped(counts, shared, *trees, *arguments[num_trees:])

  return jax.jit(together, out_shardings=NamedSharding(_mesh(devices), P())) if split else jax.jit(over)
