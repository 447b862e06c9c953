"""How the variables of a network that comes from PyTorch stand in PyTorch's `state_dict`."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from gradleak.core import errors, trees
from gradleak.core.trees import Tree


class Entry(NamedTuple):
  """One tensor of a `state_dict`, and the variable that it is.

  Attributes:
    name: in the `state_dict`.
    path: of the variable, its collection first: 'params', 'batch_stats' (what training changes without a gradient) or
      'buffers' (what it leaves as it is).
    shape: in PyTorch.
    dtype: of NumPy, in PyTorch.
    dense: whether it is held as [in, out] here: the weight of a dense layer, [out, in] in PyTorch, or an adapter of a
      convolution, [out, in, …].
    image: (C, …) where a dense layer takes a flattened map; here its rows are in the order of [..., C].
    inputs: which axes of a kernel that is held as in PyTorch are summed over; () where that is not known.
  """

  name: str
  path: tuple[str, ...]
  shape: tuple[int, ...]
  dtype: str
  dense: bool = False
  image: tuple[int, ...] = ()
  inputs: tuple[int, ...] = ()

  def ours(self, values: np.ndarray) -> np.ndarray:
    """Returns values in PyTorch's layout in ours."""
    if self.image:
      values = np.moveaxis(values.reshape(len(values), *self.image), 1, -1).reshape(len(values), -1)
    return values.reshape(len(values), -1).T if self.dense else values

  def theirs(self, values: np.ndarray) -> np.ndarray:
    """Returns values in our layout in PyTorch's."""
    values = values.T.reshape(self.shape) if self.dense else values
    if self.image:
      channels, *sides = self.image
      values = np.moveaxis(values.reshape(len(values), *sides, channels), -1, 1).reshape(len(values), -1)
    return values

  @property
  def our_shape(self) -> tuple[int, ...]:
    """The shape of the variable."""
    return (math.prod(self.shape[1:]), self.shape[0]) if self.dense else self.shape


class Layout(NamedTuple):
  """The `state_dict` of a network.

  Attributes:
    entries: an `Entry` per variable.
    sample: the shape of a sample that the network takes, (H, W, C) of an image.
    tied: (another name of a variable in the `state_dict`, its name among the entries), for parameters that are shared.
    names: of the `state_dict`, in its order; () for those of the entries, and tied ones behind them.
  """

  entries: tuple[Entry, ...]
  sample: tuple[int, ...]
  tied: tuple[tuple[str, str], ...] = ()
  names: tuple[str, ...] = ()

  def named(self, tied: bool = True) -> dict[str, Entry]:
    """Returns the entry of each name in the `state_dict`, in its order; tied names have one entry, or are left out."""
    entries = {entry.name: entry for entry in self.entries}
    entries |= {name: entries[first] for name, first in self.tied if first in entries}
    return {name: entries[name] for name in self.names or entries if tied or entries[name].name == name}

  def untied(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns arrays by their names in the `state_dict`, each tensor once.

    Raises:
      UsageError: if two names of one tensor have different values.
    """
    found = dict(arrays)
    for name, first in self.tied:
      if name in found and not np.array_equal(found[name], found.setdefault(first, found[name]), equal_nan=True):
        raise errors.UsageError(f'{name} and {first} are one tensor of the network, and their values differ')
      found.pop(name, None)
    return found

  def to_ours(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns arrays by their names in the `state_dict` in our layout; those that do not fit are left as they are."""
    entries = {entry.name: entry for entry in self.entries}
    return {
      name: entries[name].ours(values) if name in entries and values.shape == entries[name].shape else values
      for name, values in arrays.items()
    }

  def to_theirs(self, variables: Tree) -> dict[str, np.ndarray]:
    """Returns variables as a `state_dict` of NumPy arrays, or of the collections that there are."""
    found = {}
    for entry in self.entries:
      leaf: Any = variables
      for key in entry.path:
        leaf = leaf.get(key) if isinstance(leaf, Mapping) else None
      if leaf is not None:
        found[entry.name] = entry.theirs(np.asarray(leaf))
    return {name: found[entry.name] for name, entry in self.named().items() if entry.name in found}

  def arrays(self, variables: Tree, cast: Callable[[str], Any] | None = None) -> dict[str, Any]:
    """Returns variables by the names of the `state_dict`, in our layout; integers in the types of `cast`, if any."""
    found = {}
    for entry in self.entries:
      leaf = trees.get(variables, entry.path)
      found[entry.name] = leaf if cast is None or entry.dtype.startswith('float') else leaf.astype(cast(entry.dtype))
    return found

  def variables(self, arrays: Mapping[str, np.ndarray]) -> dict[str, Tree]:
    """Returns the variables of arrays in PyTorch's layout, one for each entry, in the types that the model holds."""
    found: dict[str, Tree] = {'params': {}}
    for entry in self.entries:
      tree = found
      for key in entry.path[:-1]:
        tree = tree.setdefault(key, {})
      values = entry.ours(np.asarray(arrays[entry.name]))
      # Servers average statistics, and the count among them.
      floats = values.dtype.kind == 'f' or entry.path[0] == 'batch_stats'
      tree[entry.path[-1]] = values.astype(np.float32 if floats else bool if values.dtype.kind == 'b' else np.int32)
    return found
