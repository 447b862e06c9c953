"""Micro-groups: the placement of lanes on devices, and functions compiled over all lanes, once per structure.

The lanes of a group run in one vectorised pass, the groups of a device one after another, and devices in parallel. At a
fixed group size, the bits of a lane's results do not depend on the other lanes. All groups have the same shape, and the
number of groups is a run-time value.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from gradleak.core import errors
from gradleak.core.reuse import reusable
from gradleak.core.trees import Tree
from gradleak.engine import compiler

# Options of XLA by platform (docs/PERFORMANCE.md). CPU: what is left out takes half the seconds of a compilation, and
# steps take as long. GPU: a program is one graph, loops included; its operations take longer to start than to run.
_GRAPH = 'FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE'
OPTIONS: dict[str, dict[str, compiler.Value]] = {
  'cpu': {'xla_cpu_use_fusion_emitters': False, 'xla_backend_optimization_level': 1},
  'gpu': {'xla_gpu_enable_command_buffer': _GRAPH, 'xla_gpu_graph_min_graph_size': 1},
}


class Layout(NamedTuple):
  """How lanes are laid out on devices, however many lanes there are.

  Attributes:
    group_size: lanes per micro-group.
    devices: the devices to shard over; None for all local ones. At most one per group is used, but at least two of
      several, unless they `split` the samples of each lane.
    split: the number of samples of a lane if the devices share samples instead of lanes, for a batch too large for one
      device; 0 otherwise. The devices may belong to several processes that make the same call (`jax.distributed`).
      Results then differ in rounding.
    room: lanes that would fit at least. Fewer run in the program of so many.
  """

  group_size: int
  devices: Sequence[Any] | None = None
  split: int = 0
  room: int = 0

  def halved(self) -> 'Layout':
    """Returns the same with half as many lanes per group."""
    return self._replace(group_size=-(-self.group_size // 2))


class Placement(NamedTuple):
  """Which lanes run where: on D devices with a capacity of R groups each.

  Attributes:
    lanes: the numbers of the placed lanes, ascending.
    table: the lane at each position, int [D·R, group size]; unused positions repeat real lanes as padding, which does
      not affect results.
    counts: how many groups each device runs, int32 [D].
    devices: the D devices; if samples are split, all devices that share them, and D = 1.
    split: how many samples of a lane the devices share; 0 if each device runs its own lanes.
  """

  lanes: np.ndarray
  table: np.ndarray
  counts: np.ndarray
  devices: tuple
  split: int = 0

  @property
  def capacity(self) -> int:
    """R, the number of groups that fit on a device."""
    return len(self.table) // len(self.counts)

  @property
  def groups(self) -> np.ndarray:
    """Rows of the table that run, in the order of their lanes."""
    return np.flatnonzero(np.arange(self.capacity) < self.counts[:, np.newaxis])

  def needs_fewer_groups(self, num_lanes: int) -> bool:
    """Returns whether that many lanes take fewer groups per device than run now."""
    groups = -(-num_lanes // self.table.shape[1])
    return -(-groups // len(self.counts)) < self.counts.max()

  def with_lanes(self, lanes: np.ndarray) -> 'Placement':
    """Returns the placement of other lanes with the same shapes, so that nothing is compiled again."""
    return place(lanes, Layout(self.table.shape[1], self.devices, self.split), self.capacity)

  def take(self, tree: Tree) -> Tree:
    """Returns a tree [all lanes, …] as [D·R, group size, …]."""
    leaves, structure = jax.tree.flatten(_strong(tree))
    taken = iter(_rows([x for x in leaves if not isinstance(x, np.ndarray)], self.table))
    return structure.unflatten(x[self.table] if isinstance(x, np.ndarray) else next(taken) for x in leaves)

  def pad(self, tree: Tree) -> Tree:
    """Returns a tree [all lanes, …] as [D·R, group size, …] on the devices, padding included."""
    return _put(self.take(tree), self._sharding('lanes'))

  def unpad(self, tree: Tree) -> Tree:
    """Returns the placed lanes of a padded tree, [lanes, …] on the host."""

    def of_lanes(x: np.ndarray) -> np.ndarray:
      x = x[self.groups]
      return x.reshape(len(x) * x.shape[1], *x.shape[2:])[: len(self.lanes)]

    return jax.tree.map(of_lanes, jax.device_get(tree))

  def replicate(self, tree: Tree) -> Tree:
    """Returns `tree` on all devices."""
    return _put(_strong(tree), self._sharding())

  def shapes(self, tree: Tree, *axes: str) -> Tree:
    """Returns the shapes of a tree that is replicated or, with `axes` = 'lanes', padded."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._sharding(*axes)), tree)

  def bind(self, function: Callable, shared: Tree, *trees: Tree, extra: tuple = ()) -> tuple[Any, tuple]:
    """Returns the `compiled` function and its arguments: a replicated tree, padded trees, and extra arguments."""
    counts = jax.device_put(self.counts, self._sharding('lanes'))
    return compiled(function, len(trees), self.devices, self.split), (counts, shared, *trees, *self.replicate(extra))

  def call(self, function: Callable, *arguments: Tree, **extra: tuple) -> Tree:
    """Returns function(shared, *lanes, *extra) at every position of the table; arguments as for `bind`."""
    function, arguments = self.bind(function, *arguments, **extra)
    return function(*arguments)

  def lowered(self, function: Callable, *arguments: Tree, **extra: tuple) -> jax.stages.Lowered:
    """Returns what `call` runs, for arguments of such shapes."""
    run, bound = self.bind(function, *arguments, **extra)
    return run.lower(*bound)

  def _sharding(self, *axes: str) -> NamedSharding:
    return NamedSharding(_mesh(self.devices), P() if self.split else P(*axes))


def place(lanes: np.ndarray, layout: Layout, capacity: int | None = None) -> Placement:
  """Returns the `Placement` of lanes, spread evenly over the devices.

  Args:
    lanes: their numbers, ascending.
    layout: the `Layout`.
    capacity: groups that fit on a device; by default as many as are needed.

  Raises:
    UsageError: if the samples cannot be divided evenly.
  """
  group_size, devices, split, room = layout
  devices = devices or jax.local_devices()
  if split % len(devices):
    raise errors.UsageError(f'{split} samples cannot be shared evenly by {len(devices)} devices')
  groups = -(-len(lanes) // group_size)
  fitting = max(groups, -(-room // group_size))
  # XLA compiles programs of a single device to other bits, and loops over a single group.
  devices = tuple(devices) if capacity or split else tuple(devices[: max(2, fitting)])
  shares = 1 if split else len(devices)
  counts = groups // shares + (np.arange(shares) < groups % shares)
  capacity = capacity or max(2, -(-fitting // shares))
  table = np.zeros((shares * capacity, group_size), np.int32)
  placement = Placement(lanes, table, counts.astype(np.int32), devices, split)
  table[placement.groups] = np.resize(lanes, (groups, group_size))
  return placement


@jax.jit  # one program, in place of one for each shape
def _rows(arrays: list[jax.Array], table: jax.Array) -> list[jax.Array]:
  return [x[table] for x in arrays]


def _strong(tree: Tree) -> Tree:
  """Returns a tree without weak types, which would cause a second compilation."""
  return jax.tree.map(lambda x: x if isinstance(x, np.ndarray) else jnp.asarray(x, jnp.result_type(x)), tree)


def _put(tree: Tree, sharding: NamedSharding) -> Tree:
  def put(x: Any) -> jax.Array:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):  # device_put places keys on this process's devices only
      return jax.random.wrap_key_data(put(jax.random.key_data(x)), impl=jax.random.key_impl(x))
    return jax.device_put(x, sharding)

  return jax.tree.map(put, tree)


@functools.cache
def _mesh(devices: tuple) -> Mesh:
  return jax.make_mesh((len(devices),), ('lanes',), axis_types=(AxisType.Auto,), devices=devices)


@reusable(32)
def compiled(function: Callable, num_trees: int, devices: tuple, split: int = 0) -> Callable:
  """Returns the compiled (counts, shared, *trees of lanes, *extra) -> results over groups, and over lanes within each.

  Args:
    function: (shared, *lanes, *extra) -> results, of one lane; extra arguments are the same for all.
    num_trees: the number of trees of lanes.
    devices, split: see `Placement`.
  """

  def mapped(count: jax.Array, shared: Tree, *arguments: Tree) -> Tree:
    trees, extra = arguments[:num_trees], arguments[num_trees:]

    def group(i: jax.Array) -> Tree:
      members = jax.tree.map(lambda x: x[i], trees)
      with jax.default_matmul_precision(compiler.precision()):
        return jax.vmap(lambda *lanes: function(shared, *lanes, *extra))(*members)

    traced, shapes = jax.make_jaxpr(group, return_shape=True)(jnp.int32(0))  # once, and not once more by the loop
    of_group, structure = jaxpr_as_fun(traced), jax.tree.structure(shapes)

    def put(i: jax.Array, results: Tree) -> Tree:
      return jax.tree.map(lambda all_, one: all_.at[i].set(one), results, structure.unflatten(of_group(i)))

    capacity = jax.tree.leaves(trees)[0].shape[0]
    empty = jax.tree.map(lambda x: jax.lax.full((capacity, *x.shape), 0, x.dtype), shapes)
    return jax.lax.fori_loop(jnp.int32(0), count[0], put, empty)

  def over_lanes(counts: jax.Array, shared: Tree, *arguments: Tree) -> Tree:
    specs = (P('lanes'), P(), *(P('lanes') if i < num_trees else P() for i in range(len(arguments))))
    # With check_vma=True, gradients with respect to the replicated weights would silently be summed over devices.
    return jax.shard_map(mapped, mesh=_mesh(devices), in_specs=specs, out_specs=P('lanes'), check_vma=False)(
      counts, shared, *arguments
    )

  def over_images(counts: jax.Array, shared: Tree, *arguments: Tree) -> Tree:
    """Shards samples; the compiler propagates the sharding through the network and sums the loss over devices."""

    images = NamedSharding(_mesh(devices), P(None, None, 'lanes'))

    def spread(x: jax.Array) -> jax.Array:
      of_images = x.ndim > 3 and x.shape[2] == split
      return jax.lax.with_sharding_constraint(x, images) if of_images else x

    trees = jax.tree.map(spread, arguments[:num_trees])
    return mapped(counts, shared, *trees, *arguments[num_trees:])

  given = jax.config.values['jax_disable_most_optimizations']  # leaves out more, and would be overridden
  options = None if given else compiler.known(**OPTIONS.get(devices[0].platform, {}))
  if split:
    return jax.jit(over_images, out_shardings=NamedSharding(_mesh(devices), P()), compiler_options=options)
  return jax.jit(over_lanes, compiler_options=options)
