"""The first block of a transformer of tokens, found in a program of PyTorch's operations: what attacks on texts read.

What depends on what tells which places of the program are the parts of the block. They are then compared with the
program on drawn tokens: a network with other parts has no `FirstBlock`.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gradleak.core import errors
from gradleak.core.trees import Tree
from gradleak.engine import compiler
from gradleak.models import aten, layers, masked
from gradleak.models.aten_program import Program, Ref, Step
from gradleak.models.model import FirstBlock
from gradleak.models.state_dict import Layout

_PRODUCTS = {'linear': (0, 1), 'addmm': (1, 2), 'mm': (0, 1)}  # where their input and their weight stand
_SAME = ('clone', 'dropout', 'alias', 'detach', 'contiguous')  # in evaluation
_COMPARED = ('eq', 'ne')
_MASKED = -1e4  # what is added to the scores of masked positions, at most
_TOLERANCE = 1e-3  # of float32 through a block


class Places(NamedTuple):
  """Where the parts of a first block stand in a program.

  Attributes:
    embedded: the embeddings e of tokens.
    plain: e + p, with those of positions.
    inputs: what queries, keys and values take, `plain` or its LayerNorm.
    projected: queries, keys and values.
    attended: what attention gives.
    second: what the first dense layer behind takes.
    following: what the queries, keys and values of the next block take; None where that is not known.
  """

  embedded: int
  plain: int
  inputs: int
  projected: tuple[int, int, int]
  attended: int
  second: int
  following: int | None


class Block(NamedTuple):
  """The first block of a network.

  Attributes:
    first: what attacks read of it.
    table: the name of the table of embeddings in the `state_dict`.
    scale: what embeddings of tokens are multiplied by before those of positions are added.
  """

  first: FirstBlock
  table: str
  scale: float


def find(program: Program, layout: Layout, variables: Tree) -> Block | None:
  """Returns the first block of a network of token ids; None where none is found.

  Args:
    program: of the module in evaluation.
    layout: of its tensors.
    variables: on which both are compared.
  """
  parts = _Parts(program, layout)
  places = parts.places()
  if places is None:
    return None
  try:
    visible = parts.visible(variables)
    block = None if visible is None else _block(parts, places, *visible, variables)
    return block if block is not None and _agrees(parts, places, block.first, variables) else None
  except (errors.UsageError, TypeError, ValueError):  # a user's network may have masks and vectors of any form
    return None


class _Parts:
  """A program of texts of `length` tokens, and what its places depend on."""

  def __init__(self, program: Program, layout: Layout) -> None:
    self.program, self.layout, self.length = program, layout, layout.sample[0]
    self.makers = {step.place: step for step in program.steps}
    self.paths = {entry.name: entry.path[1:] for entry in layout.entries if entry.path[0] == 'params'}
    self.reached = program.behind(program.image)
    self.attentions = [step for step in program.steps if step.base == 'scaled_dot_product_attention'][:2]
    self.blocks = [self.projections(step) for step in self.attentions]

  def places(self) -> Places | None:
    """Returns where the parts of the first block stand; None where one is missing."""
    tables, inputs = self.program.looked_up(), self.rows(self.blocks[0]) if self.blocks else None
    if inputs is None or self.length < 2 or len(tables) != 1 or self._name(tables[0].arguments[0]) is None:
      return None
    attended, norm = self.attentions[0].place, self.norm(inputs)
    second, plain = self.rows(self.seconds(attended)), norm.arguments[0].place if norm else inputs
    later = self.rows(self.blocks[1]) if self.blocks[1:] else None
    beside = self.program.behind(self.program.image, (attended, plain))
    if second is None or second in beside:
      return None
    query, key, value = (one.place for one in self.attentions[0].arguments[:3])
    following = None if later in beside else later
    return Places(tables[0].place, plain, inputs, (query, key, value), attended, second, following)

  def _name(self, weight: Any) -> str | None:
    """Returns the name of a weight that is not computed."""
    return self.program.inputs.get(weight.place) if isinstance(weight, Ref) else None

  def projections(self, attention: Step) -> list[Step]:
    """Returns the dense layers of queries, keys and values, each once; [] where one of these is made otherwise."""
    found = {}
    for place in (one.place for one in attention.arguments[:3]):
      while (step := self.makers.get(place)) is not None and step.base not in _PRODUCTS:
        used = self.reached.intersection(step.uses)
        place = used.pop() if len(used) == 1 else -1
      if step is None:
        return []
      found[step.place] = step
    return list(found.values())

  def seconds(self, attended: int) -> list[Step]:
    """Returns the dense layers that first take both attention and what it is added to."""
    both = self.program.behind(attended) & self.program.behind(self.program.image, (attended,))
    found = [step for step in self.program.steps if step.base in _PRODUCTS and self._source(step) in both]
    return [step for step in found if self._rows(step) == self._rows(found[0])]

  def norm(self, place: int) -> Step | None:
    """Returns the LayerNorm over vectors that makes a value, None for what is none."""
    while (step := self.makers.get(place)) is not None and step.base in _SAME:
      place = step.uses[0]
    if step is None or step.base != 'layer_norm' or len(step.arguments) < 5 or len(step.arguments[1]) > 1:
      return None
    return step if all(one is None or self._name(one) for one in step.arguments[2:4]) else None

  def rows(self, steps: Sequence[Step]) -> int | None:
    """Returns the one place of vectors [N, T, d] that dense layers take; None for layers that are not known."""
    places = {self._rows(step) for step in steps}
    return places.pop() if len(places) == 1 and None not in map(self.kernel, steps) else None

  def _rows(self, step: Step) -> int | None:
    place = self._source(step)
    shape = self.length, self.program.shapes[place][-1]
    while self.program.shapes[place][1:] != shape:  # [T, N, d], or all rows below each other
      maker = self.makers.get(place)
      if maker is None or maker.base not in aten.MOVES:
        return None
      place = maker.uses[0]
    return place

  def _source(self, step: Step) -> int:
    return step.arguments[_PRODUCTS[step.base][0]].place

  def kernel(self, step: Step) -> tuple[str, ...] | None:
    """Returns the path of the kernel [in, out] of a dense layer that is trained; None for others."""
    name = self._name(step.arguments[_PRODUCTS[step.base][1]])
    return self.paths.get(name or '') if step.base != 'linear' or step.mark == 'dense' else None

  def visible(self, variables: Tree) -> tuple[bool, int | None] | None:
    """Returns (whether positions attend to those before alone, the id of padding); None for attention of other kinds.

    That is one with a mask of another form, scores of another scale, or fewer keys than queries.
    """
    attention, names = self.attentions[0], ('attn_mask', 'dropout_p', 'is_causal')
    given = dict(zip(names, attention.arguments[3:], strict=False)) | attention.options
    shapes = {self.program.shapes[one.place] for one in attention.arguments[:3]}
    mask, shape = given.get('attn_mask'), shapes.pop()
    usual = 1 / math.sqrt(shape[-1])
    if shapes or len(shape) != 4 or not math.isclose(given.get('scale') or usual, usual, rel_tol=1e-6):
      return None
    if mask is None:
      return bool(given.get('is_causal')), None
    numbers = {step.arguments[1] for step in self.program.steps if step.base in _COMPARED and self._compares(step)}
    padding = numbers.pop() if mask.place in self.reached and len(numbers) == 1 else None
    ids = np.full((2, self.length), 0 if padding else 1, np.int32)
    ids[1, -1] = ids[1, -1] if padding is None else padding
    found = np.asarray(self.run(variables, mask.place, {}, ids))
    found = np.broadcast_to(found.reshape((1,) * (4 - found.ndim) + found.shape), (2, shape[1], *[self.length] * 2))
    if found.dtype != bool and not np.all((found == 0) | (found < _MASKED)):
      return None
    seen = found if found.dtype == bool else found == 0
    for causal in (False, True):
      expected = np.tri(self.length, dtype=bool) if causal else np.ones([self.length] * 2, bool)
      short = expected & (np.arange(self.length) < self.length - 1) if padding is not None else expected
      if (seen[0] == expected).all() and (seen[1, :, :-1] == short[:-1]).all():
        return causal, padding
    return None

  def _compares(self, step: Step) -> bool:
    return not self.program.ids().isdisjoint(step.uses) and type(step.arguments[1]) is int

  def run(self, variables: Tree, wanted: int, cuts: dict[int, Any], ids: Any) -> Any:
    """Returns the value of a place for texts, where those of other places are given."""
    run = aten.Run(next((x.dtype for x in cuts.values()), jnp.float32), True, None, masked.counted)
    held = self.layout.arrays(variables, run.cast)
    return self.program.between(cuts, wanted).run(run, held, jnp.asarray(ids), given=cuts)[wanted]

  def of_rows(self, variables: Tree, wanted: int, cuts: dict[int, jax.Array]) -> jax.Array:
    """Returns the vectors of a place for those of others, all [N, K, d], of any K: they are put into whole texts."""
    number, count = next(iter(cuts.values())).shape[:2]
    texts = -(-number * count // self.length)

    def whole(place: int, x: jax.Array) -> jax.Array:
      x = jnp.pad(x.reshape(number * count, -1), ((0, texts * self.length - number * count), (0, 0)))
      shape = self.program.shapes[place]
      x = x.reshape(texts, self.length, *((shape[1], shape[3]) if len(shape) == 4 else (-1,)))
      return x.swapaxes(1, 2) if len(shape) == 4 else x

    given = {place: whole(place, x) for place, x in cuts.items()}
    found = self.run(variables, wanted, given, jnp.zeros((texts, self.length), jnp.int32))
    found = found.swapaxes(1, 2) if found.ndim == 4 else found
    return found.reshape(texts * self.length, -1)[: number * count].reshape(number, count, -1)


def _block(parts: _Parts, places: Places, causal: bool, padding: int | None, variables: Tree) -> Block:
  """Returns the block at some places."""
  program, norm, embedding = parts.program, parts.norm(places.inputs), parts.makers[places.embedded]
  table, width = program.inputs[embedding.arguments[0].place], program.shapes[places.embedded][-1]

  def positions(variables: Tree) -> tuple[jax.Array, jax.Array]:
    """Returns p, and the derivative of e + p along e."""
    none = jnp.zeros((1, parts.length, width), parts.layout.arrays(variables)[table].dtype)

    def plain(e: jax.Array) -> jax.Array:
      return parts.run(variables, places.plain, {places.embedded: e}, jnp.zeros((1, parts.length), jnp.int32))[0]

    return jax.jvp(plain, (none,), (jnp.ones_like(none),))

  scale = float(positions(variables)[1][0, 0])

  def vectors(variables: Tree) -> tuple:
    held = parts.layout.arrays(variables)
    rows, given = held[table], (None, None) if norm is None else norm.arguments[2:4]
    usual = jnp.ones(width, rows.dtype), jnp.zeros(width, rows.dtype)
    gain, shift = (
      held[program.inputs[one.place]] if isinstance(one, Ref) else other
      for one, other in zip(given, usual, strict=True)
    )
    return rows * scale, positions(variables)[0], gain, shift, None if norm is None else norm.arguments[4]

  def behind(place: int) -> Any:
    def function(variables: Tree, plain: jax.Array, attended: jax.Array) -> jax.Array:
      return parts.of_rows(variables, place, {places.plain: plain, places.attended: attended})

    return function

  def kernels(steps: Sequence[Step]) -> tuple[tuple[str, ...], ...]:
    return tuple(dict.fromkeys(map(parts.kernel, steps)))  # type: ignore[arg-type]

  first = FirstBlock(
    causal=causal,
    padding=padding,
    heads=program.shapes[places.attended][1],
    table=next(entry.path for entry in parts.layout.entries if entry.name == table)[1:],
    projections=kernels(parts.blocks[0]),
    second=kernels(parts.seconds(places.attended)),
    next_projections=() if places.following is None else kernels(parts.blocks[1]),
    parts=vectors,
    tokens=lambda variables, x: tuple(parts.of_rows(variables, one, {places.inputs: x}) for one in places.projected),
    mixed=behind(places.second),
    following=behind(places.second if places.following is None else places.following),
    normalised_sum=False,  # where it is the LayerNorm that attention is added to, that is made of e + p again
  )
  return Block(first, table, scale)


def _agrees(parts: _Parts, places: Places, first: FirstBlock, variables: Tree) -> bool:
  """Returns whether the functions of a block give what the program computes of drawn tokens, at any position."""

  def both(variables: Tree, ids: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
    """Returns pairs of arrays [N, T, …] that are equal."""

    def value(place: int) -> jax.Array:
      return parts.run(variables, place, {}, ids)

    table, positions, gain, shift, epsilon = first.parts(variables)
    plain = inputs = table[ids] + positions[None]
    if epsilon is not None:
      inputs = jax.nn.standardize(plain, axis=-1, epsilon=epsilon) * gain[None, None] + shift[None, None]
    pairs = [(plain, value(places.plain)), (inputs, value(places.inputs))]
    apart = (*places.projected, places.attended)
    query, key, rows, attended = (value(place).swapaxes(1, 2).reshape(*ids.shape, -1) for place in apart)
    seen = jnp.tri(parts.length, dtype=bool)[None] if first.causal else None
    pairs += [(layers.attention(query, key, rows, first.heads, seen), attended)]
    for moved in (0, 1):  # what is made of a vector is the same at other positions
      given, added, beside = (jnp.roll(x, moved, 1) for x in (value(places.inputs), plain, attended))
      pairs += zip(first.tokens(variables, given), (jnp.roll(x, moved, 1) for x in (query, key, rows)), strict=True)
      for function, place in ((first.mixed, places.second), (first.following, places.following or places.second)):
        pairs += [(function(variables, added, beside), jnp.roll(value(place), moved, 1))]
    return pairs

  size = parts.program.vocabulary()
  ids = np.random.default_rng(0).integers(0, size, (2, parts.length)).astype(np.int32)
  ids = np.where(ids == first.padding, (ids + 1) % size, ids)
  found = jax.device_get(jax.jit(both, compiler_options=compiler.once())(variables, ids))
  return all(np.linalg.norm(one - other) <= _TOLERANCE * np.linalg.norm(other) for one, other in found)
