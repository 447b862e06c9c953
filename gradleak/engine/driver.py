"""Runs an attack on a table of lanes: compiled once, in micro-groups, over all local devices, chunk by chunk.

A lane is one trial × restart × set of numeric settings. Lanes are independent: at a fixed micro-group size, a lane's
results are the same bits for any number of other lanes and devices. Between chunks, finished lanes are removed from the
devices, and the active ones fill fewer groups.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gradleak.core import errors, trees
from gradleak.core.reuse import reusable
from gradleak.core.trees import Tree
from gradleak.engine import groups, memory, parts

_FILLED = 0.8  # of the free memory, at most
_COPIES = 2  # of all states: before and after a chunk, and as many on the host where lanes are removed


class Progress(NamedTuple):
  """The state of a run after each chunk.

  Attributes:
    step: steps done.
    num_steps: steps in all.
    objective: of every lane at its current point, float32 [lanes]; the last value of removed lanes.
    active: how many lanes have not finished.
    group_size: lanes per micro-group; fewer than requested once memory ran out.
    notice: a message for the user, or ''.
    fetch: () -> the states.
    unit: what `step` counts: 'step', or 'run' of an attack on the host.
  """

  step: int
  num_steps: int
  objective: np.ndarray
  active: int
  group_size: int
  notice: str
  fetch: Callable[[], Tree]
  unit: str = 'step'

  @property
  def states(self) -> Tree:
    """The lanes' states on the host; their leaves can be stored and passed to `resume`, on any devices."""
    return self.fetch()

  @property
  def done(self) -> bool:
    """Whether all steps are done or all lanes have finished."""
    return self.step >= self.num_steps or not self.active


def default_group_size(variables: Tree, num_images: int) -> int:
  """Returns the default number of lanes per group: on CPU limited by a core's cache, else by memory.

  Args:
    variables: the model's.
    num_images: samples per lane.
  """
  if jax.default_backend() != 'cpu':
    return max(1, 512 // num_images)
  size = sum(x.size for x in jax.tree.leaves(variables['params']))
  return max(1, min(8, 64_000 // size) // num_images)


def fitting(build: Callable, shared: Tree, lanes: Tree, layout: groups.Layout) -> groups.Layout:
  """Returns the layout, its groups halved until all states and one group's pass fit into the devices' free memory.

  `run` reuses what is compiled here. The arguments are those of `run`; shapes suffice for `shared` and `lanes`.
  """
  free = memory.free((layout.devices or jax.local_devices())[0])
  while free is not None and layout.group_size > 1 and needed(build, shared, lanes, layout) > _FILLED * free:
    layout = layout.halved()
  return layout


def pieces(build: Callable, shared: Tree, lanes: Tree, layout: groups.Layout) -> int:
  """Returns in how many parts the lanes must run for their states to fit into the devices' free memory.

  The arguments are those of `run`. A smaller group does not help there: the states of all lanes are held at once.
  """
  placement, _, states = _states(build, shared, lanes, layout)
  size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(states)) / len(placement.counts)
  device = (layout.devices or jax.local_devices())[0]

  def fills(free: int | None) -> float:
    return 0.0 if free is None else _COPIES * size / (_FILLED * free)

  filled = fills(memory.free(device))
  needed = 2 * filled if device.platform == 'cpu' else max(filled, fills(memory.share()))
  return max(1, math.ceil(needed))


def needed(build: Callable, shared: Tree, lanes: Tree, layout: groups.Layout) -> float:
  """Returns the bytes per device that a chunk needs; infinity if memory does not suffice to compile it."""
  _, _, chunk = _lowered_run(build, shared, lanes, layout)
  try:
    used = chunk().compile().memory_analysis()
  except jax.errors.JaxRuntimeError as error:
    if memory.ran_out(error):
      return math.inf
    raise
  return used.argument_size_in_bytes + used.output_size_in_bytes + used.temp_size_in_bytes


def lowered(
  build: Callable, shared: Tree, lanes: Tree, layout: groups.Layout, num_steps: int
) -> Iterator[jax.stages.Lowered]:
  """Yields what `run` calls, in this order; the arguments are those of `run`. What is compiled of it, `run` reuses."""
  init, finish, chunk = _lowered_run(build, shared, lanes, layout)
  yield init()
  yield finish()
  if num_steps:
    yield chunk()


def lowered_evaluation(function: Callable, shared: Tree, lanes: Tree, layout: groups.Layout) -> jax.stages.Lowered:
  """Returns what `evaluate` calls with these arguments."""
  placement, shared, lanes = _shapes(shared, lanes, layout)
  return placement.lowered(function, shared, lanes)


def _lowered_run(
  build: Callable, shared: Tree, lanes: Tree, layout: groups.Layout
) -> list[Callable[[], jax.stages.Lowered]]:
  """Returns functions that lower `init`, `finish` and `chunk` of an attack."""
  attack = _functions(build)
  placement, (shared, lanes), states = _states(build, shared, lanes, layout)
  return [
    functools.partial(placement.lowered, attack.init, shared, lanes),
    functools.partial(placement.lowered, attack.finish, shared, lanes, states),
    functools.partial(placement.lowered, attack.chunk, shared, lanes, states, extra=(np.int32(0),)),
  ]


def _states(
  build: Callable, shared: Tree, lanes: Tree, layout: groups.Layout
) -> tuple[groups.Placement, tuple[Tree, Tree], Tree]:
  """Returns (placement, the other two of `_shapes`, shapes of the states of the placed lanes)."""
  placement, *given = _shapes(shared, lanes, layout)
  start, arguments = placement.bind(_functions(build).init, *given)
  return placement, tuple(given), placement.shapes(jax.eval_shape(start, *arguments), 'lanes')


def _shapes(shared: Tree, lanes: Tree, layout: groups.Layout) -> tuple[groups.Placement, Tree, Tree]:
  """Returns (placement, shapes of what is shared, shapes of the placed lanes)."""
  placement = groups.place(np.arange(_count(lanes)), layout)
  shared = placement.shapes(jax.eval_shape(placement.replicate, shared))
  return placement, shared, placement.shapes(jax.eval_shape(placement.take, lanes), 'lanes')


def run(
  build: Callable,
  shared: Tree,
  lanes: Tree,
  layout: groups.Layout,
  *,
  num_steps: int,
  chunk_steps: int | None = None,
  on_chunk: Callable[[Progress], None] | None = None,
  on_failure: Callable[[Progress], None] | None = None,
  resume: tuple[int, Sequence[Any]] | None = None,
) -> Any:
  """Returns the `Reconstruction`s of all lanes, a tree with leading axis [lanes] on the host.

  If memory runs out, the group size is halved and the run continues from the last chunk; not where samples are split.

  Args:
    build: (shared, lane) -> (attack, key, observation); called while tracing, so a lane's numbers may be traced. Equal
      builds, such as equal frozen dataclasses, compile once.
    shared: the data of all lanes: variables, uploads, labels.
    lanes: a tree with leading axis [lanes].
    layout: the `groups.Layout` of the lanes on devices.
    num_steps: steps of the attack.
    chunk_steps: steps between two calls of `on_chunk`; by default about fifty chunks.
    on_chunk: called with a `Progress` after the start (step 0) and after each chunk.
    on_failure: called with the last `Progress` before a `DeviceError`, to save it; not called if the states are lost
      with the device.
    resume: (step, leaves of the states) of an earlier `Progress` of the same lanes and group size.

  Raises:
    DeviceError: if a device fails or has too little memory for one lane.
  """
  chunk_steps = chunk_steps or max(1, min(250, -(-num_steps // 50)))
  last, notice = None, ''
  while True:
    try:
      table = _Table(build, shared, lanes, layout)
      for last in table.chunks(num_steps, chunk_steps, resume, notice):
        if on_chunk is not None:
          on_chunk(last)
      return table.finish()
    except jax.errors.JaxRuntimeError as error:
      rescued, table = last and _rescued(last), None
      alone = layout.split or layout.group_size == 1
      if alone or not memory.ran_out(error) or (last is not None and rescued is None):
        if on_failure is not None and rescued is not None:
          on_failure(rescued)
        step = last.step if last else resume[0] if resume else 0
        raise _failure(error, f' at step {step} of {num_steps}') from error
      if rescued is not None:
        last, resume = rescued, (rescued.step, jax.tree.leaves(rescued.states))
      layout = layout.halved()
      notice = f'out of memory, continuing with groups of {layout.group_size}'


def run_on_host(
  build: Callable,
  shared: Tree,
  lanes: Tree,
  *,
  group_size: int,
  on_chunk: Callable[[Progress], None] | None = None,
  resume: tuple[int, Sequence[Any]] | None = None,
) -> Any:
  """Returns the `Reconstruction`s of all lanes of an attack that runs on the host, one lane after another.

  Nothing is compiled. The `Progress` counts lanes in place of steps, and its states are the reconstructions so far.

  Args:
    build, shared, lanes: as `run` takes them; `build` is called with arrays.
    group_size: what the `Progress` states; it decides nothing.
    on_chunk: called with a `Progress` at the start and after each lane.
    resume: (lanes that are done, leaves of the states) of an earlier `Progress`.
  """
  count = _count(lanes)
  shared, lanes = _on_host(shared), _on_host(lanes)
  done, earlier = (0, []) if resume is None else resume
  if done == count:  # the last lane runs once more, for the structure of what is found
    done, earlier = count - 1, [leaf[: count - 1] for leaf in earlier] if count > 1 else []
  found: list[Tree] = []
  for i in range(done, count + 1):
    if on_chunk is not None:
      fetch = functools.partial(_stacked, earlier, list(found))
      on_chunk(Progress(i, count, np.zeros(count, np.float32), count - i, group_size, '', fetch, 'run'))
    if i < count:
      attack, key, observation = build(shared, trees.take(lanes, i))
      found.append(jax.tree.map(np.asarray, attack.reconstruct(attack.init(key, observation), observation)))
  return _stacked(earlier, found)


def _on_host(tree: Tree) -> Tree:
  """Returns a tree of NumPy arrays, of which no entry has to be cut out by a program; keys stay as they are."""
  return jax.tree.map(lambda x: x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else np.asarray(x), tree)


def _stacked(earlier: Sequence[Any], found: list[Tree]) -> Tree:
  """Returns a tree with a leading axis: the leaves of earlier lanes, if there are any, then the lanes `found`."""
  if not found:
    return list(earlier)
  stacked = jax.tree.map(lambda *xs: np.stack(xs), *found)
  if not earlier:
    return stacked
  return jax.tree.map(lambda *xs: np.concatenate(xs), trees.rebuilt(stacked, earlier, leading=1), stacked)


def evaluate(
  function: Callable,
  shared: Tree,
  lanes: Tree,
  layout: groups.Layout,
  *,
  unit: str | None = None,
) -> Any:
  """Returns function(shared, lane) of all lanes, a tree with leading axis [lanes], in groups as in `run`.

  Equal functions compile once. If memory runs out, the group size is halved.

  Args:
    function, shared, lanes, layout: as in `run`, with a function in place of an attack.
    unit: what the lanes are, where they take long: whoever is `parts.told` hears of each of some twenty parts. None
      computes all at once. The bits are the same.

  Raises:
    DeviceError: as in `run`.
  """
  count = _count(lanes)
  placement = groups.place(np.arange(count), layout)
  at_once = layout.group_size * len(placement.devices)  # of all devices
  size = count if unit is None else -(-count // (parts.NUMBER * at_once)) * at_once
  try:
    placed, found = placement.replicate(shared), []
    for first in range(0, count, size):
      part = placement if size >= count else placement.with_lanes(np.arange(first, min(first + size, count)))
      found.append(part.unpad(part.call(function, placed, part.pad(lanes))))
      if unit is not None:
        parts.tell(min(first + size, count), count, unit)
    return found[0] if len(found) == 1 else jax.tree.map(lambda *xs: np.concatenate(xs), *found)
  except jax.errors.JaxRuntimeError as error:
    if layout.group_size == 1 or not memory.ran_out(error):
      raise _failure(error) from error
  return evaluate(function, shared, lanes, layout.halved(), unit=unit)


def _count(lanes: Tree) -> int:
  return jax.tree.leaves(lanes)[0].shape[0]


def _rescued(progress: Progress) -> Progress | None:
  """Returns the same with its states on the host; None if they cannot be read from the device."""
  try:
    states = progress.states
  except jax.errors.JaxRuntimeError:
    return None
  return progress._replace(fetch=lambda: states)


def _failure(error: Exception, where: str = '') -> errors.DeviceError:
  first = str(error).strip().split('\n')[0]
  if memory.ran_out(error):
    return errors.DeviceError(
      f'out of memory{where}, with one trial at a time: take fewer samples per trial, a smaller model or fewer trials '
      f'({first})'
    )
  return errors.DeviceError(
    f'the device failed{where} ({first}). A work directory holds the results up to the last checkpoint: run the same '
    'command again to continue from there'
  )


class _Attack(NamedTuple):
  """The compiled functions of one lane."""

  init: Callable
  chunk: Callable
  finish: Callable


@reusable(32)
def _functions(build: Callable) -> _Attack:
  """Returns the `_Attack` of a `build`, the same one for equal builds."""

  def init(shared: Tree, lane: Tree) -> Tree:
    attack, key, observation = build(shared, lane)
    # optax's states hold weakly typed leaves, which would cause a second compilation of the chunk.
    return jax.tree.map(lambda x: jnp.asarray(x, x.dtype), attack.init(key, observation))

  def chunk(shared: Tree, lane: Tree, state: Tree, size: jax.Array) -> tuple[Tree, tuple[jax.Array, jax.Array]]:
    """Returns (state, (objective, whether the lane has finished)) after `size` steps."""
    attack, _, observation = build(shared, lane)

    def step(_: jax.Array, carry: tuple) -> tuple:
      state, info = attack.step(carry[0], observation)
      objective = info['objective']
      return state, (objective, info.get('finished', ~jnp.isfinite(objective)))

    none_yet = jnp.full((), jnp.nan, jnp.float32), jnp.zeros((), bool)
    return jax.lax.fori_loop(0, size, step, (state, none_yet))

  def finish(shared: Tree, lane: Tree, state: Tree) -> Any:
    attack, _, observation = build(shared, lane)
    return attack.reconstruct(state, observation)

  return _Attack(init, chunk, finish)


class _Table:
  """The lanes of one run: states of the placed lanes on the devices, and states of all lanes on the host.

  The states on the host are None until lanes are removed; from then on they hold the last states of removed lanes.
  """

  def __init__(self, build: Callable, shared: Tree, lanes: Tree, layout: groups.Layout) -> None:
    self.attack, self.all, self.group_size = _functions(build), np.arange(_count(lanes)), layout.group_size
    self.placement = groups.place(self.all, layout)
    self.shared, self.lanes, self.padded = self.placement.replicate(shared), lanes, self.placement.pad(lanes)
    self.states, self.host_states = None, None

  def chunks(
    self, num_steps: int, size: int, resume: tuple[int, Sequence[Any]] | None, notice: str
  ) -> Iterator[Progress]:
    """Yields a `Progress` after the start, unless the run is resumed, and after each chunk of `size` steps."""
    objective, active = np.full(self.all.shape, np.nan, np.float32), np.ones(self.all.shape, bool)

    def progress(notice: str) -> Progress:
      fetch = functools.partial(_fetch, self.placement, self.states, self.host_states)
      return Progress(step, num_steps, objective.copy(), int(active.sum()), self.group_size, notice, fetch)

    if resume is None:
      step, self.states = 0, self._call(self.attack.init)
      # The initial objective is computed by the same function that the first step evaluates.
      objective[:] = self.placement.unpad(self._call(self.attack.finish, self.states).objective)
      yield progress(notice)
      notice = ''
    else:
      step, self.states = resume[0], self._restored(resume[1])
    while step < num_steps and active.any():
      done = min(size, num_steps - step)
      self.states, reported = self._call(self.attack.chunk, self.states, extra=(np.int32(done),))
      step, placed = step + done, self.placement.lanes
      objective[placed], finished = self.placement.unpad(reported)
      active[placed] = ~finished
      if step < num_steps and active.any() and self.placement.needs_fewer_groups(active.sum()):
        self._place(np.flatnonzero(active))
      yield progress(notice)
      notice = ''

  def finish(self) -> Any:
    """Returns the `Reconstruction`s of all lanes."""
    if self.host_states is not None:
      self._place(self.all)
    return self.placement.unpad(self._call(self.attack.finish, self.states))

  def _call(self, function: Callable, *states: Tree, extra: tuple = ()) -> Tree:
    return self.placement.call(function, self.shared, self.padded, *states, extra=extra)

  def _place(self, lanes: np.ndarray) -> None:
    """Replaces the lanes on the devices by others."""
    self.host_states = _fetch(self.placement, self.states, self.host_states)
    self.states = self.padded = None  # frees their memory first
    self.placement = self.placement.with_lanes(lanes)
    self.states, self.padded = self.placement.pad(self.host_states), self.placement.pad(self.lanes)

  def _restored(self, leaves: Sequence[Any]) -> Tree:
    """Returns the states on the devices from the leaves of `Progress.states`."""
    init, arguments = self.placement.bind(self.attack.init, self.shared, self.padded)
    placed = jax.eval_shape(init, *arguments)  # [D·R, group size, …]
    expected = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), placed)
    return self.placement.pad(trees.rebuilt(expected, [np.asarray(leaf) for leaf in leaves], leading=1))


def _fetch(placement: groups.Placement, states: Tree, host_states: Tree | None) -> Tree:
  """Returns the states of all lanes on the host: current ones of placed lanes, the last ones of removed lanes."""
  placed = placement.unpad(states)
  if host_states is None:
    return placed

  def put(x: np.ndarray, some: np.ndarray) -> np.ndarray:
    x = x.copy()
    x[placement.lanes] = some
    return x

  return jax.tree.map(put, host_states, placed)
