"""The tensors that a user hands over, by name, in whichever form a framework has them."""

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradleak.core import errors, trees
from gradleak.core.trees import Tree
from gradleak.models import Model, torch_weights
from gradleak.models.state_dict import Layout

_STATISTICS = ('running_mean', 'running_var', 'mean', 'var')
_IN_ORDER = re.compile(r'arr_\d+')  # how numpy.savez names arrays that it is given without a name
_NAMED = 'give a dictionary, as dict(zip(network.state_dict(), arrays))'

Path = tuple[str, ...]


def read(what: Any, kind: str) -> dict[str, np.ndarray]:
  """Returns the arrays by name; those of a list are called 'arr_0', 'arr_1', …, as `numpy.savez` has it.

  Args:
    what: the path of a file; a mapping of names to arrays, or to further such mappings; or a list of arrays. Arrays may
      be tensors of PyTorch. A name of None, as the `grad` of a parameter that is not trained, is left out.
    kind: 'update' or so, for errors.

  Raises:
    UsageError: for anything else, for a file that cannot be read, for two tensors of one name, and for a list of which
      arrays are missing.
  """
  if isinstance(what, str | os.PathLike):
    try:
      arrays = torch_weights.read(what)  # type: ignore[arg-type]
    except errors.UsageError as error:
      raise errors.UsageError(str(error).replace('the weights in', f'the {kind} in', 1)) from error
    _check_numbers(kind, arrays)
    return arrays
  if isinstance(what, Mapping):
    named = (('.'.join(path), value) for path, value in _flat(what))
    found = torch_weights.unique((name, value) for name, value in named if value is not None)  # `grad` of no gradient
  elif isinstance(what, list | tuple):
    found = {f'arr_{i}': value for i, value in enumerate(what)}
  else:
    raise errors.UsageError(
      f'the {kind} is {errors.shown(what)}, expected the path of a file, a dictionary of arrays or a list of them'
    )
  if not found:
    raise errors.UsageError(f'the {kind} holds no tensor')
  _check_numbers(kind, found)
  return {name: _array(name, value) for name, value in found.items()}


def _check_numbers(kind: str, found: Mapping[str, Any]) -> None:
  """Raises `UsageError` for a list without some of its arrays: it has no order then."""
  missing = [name for name in (f'arr_{i}' for i in range(len(found))) if name not in found]
  if is_list(found) and missing:
    raise errors.UsageError(
      f'the {kind} is a list of which arrays are missing: it holds {errors.some(list(found))}, and no {missing[0]}'
    )


def _flat(mapping: Mapping, before: Path = ()) -> Iterator[tuple[Path, Any]]:
  for name, value in mapping.items():
    if not isinstance(name, str):
      raise errors.UsageError(f'a name of a tensor is {errors.shown(name)}, expected a text')
    if isinstance(value, Mapping):
      yield from _flat(value, (*before, name))
    else:
      yield (*before, name), value


def in_tree(
  what: Any, entries: Mapping[str, np.ndarray], variables: Mapping, wanted: Mapping
) -> dict[str, np.ndarray] | None:
  """Returns the entries of a tree like the variables or the parameters, by names joined by dots; None for others.

  Its names are nested, or joined by '/'. Names joined by dots, and tensors of PyTorch, are not of such a tree. Names of
  one part are of such a tree where their values are JAX's, which no state dict holds.
  """
  leaves = dict(_flat(what)) if isinstance(what, Mapping) else {(name,): 0 for name in entries}
  places = {'.'.join(path): tuple('/'.join(path).split('/')) for path in leaves}
  if any(place[0] == 'params' and len(place) > 1 for place in places.values()):
    others = {*variables, 'batch_stats', 'buffers'}.difference(wanted)  # collections that are not read
    places = {name: place for name, place in places.items() if place[0] not in others}
    places = {name: place[1:] if place[0] in wanted else place for name, place in places.items()}
  elif all(len(place) == 1 and not isinstance(leaves[place], jax.Array) for place in places.values()):
    return None
  known = {trees.path_names(path)[1:] for path, _ in jax.tree.leaves_with_path(dict(wanted))}
  if not known.issuperset(places.values()) or any(hasattr(leaf, 'detach') for leaf in leaves.values()):
    return None
  return {'.'.join(place): entries[name] for name, place in places.items()}


def _array(name: str, value: Any) -> np.ndarray:
  """Returns a tensor as an array of NumPy; one of PyTorch is known by its methods, so that PyTorch is not imported."""
  if getattr(value, 'is_quantized', False) is True:
    raise errors.UsageError(f'the tensor {name} is quantised: give its dequantize()')
  if getattr(value, 'is_meta', False) is True:
    raise errors.UsageError(f'the tensor {name} is on the device meta, where it has no values')
  if callable(getattr(value, 'detach', None)):
    value = value.detach().cpu()
    value = value.float() if any(short in str(value.dtype) for short in ('bfloat16', 'float8')) else value
  elif callable(getattr(value, 'numpy', None)):  # an array of Flower, in bytes
    value = value.numpy()
  found = errors.host_array(f'the tensor {name}', value)
  if found.dtype.kind not in 'fiub' and not jnp.issubdtype(found.dtype, jnp.floating):
    raise errors.UsageError(f'the tensor {name} is {found.dtype}, expected numbers')
  return found


def refuse_integers(what: str, entries: Mapping[str, np.ndarray]) -> None:
  """Raises `UsageError` for a tensor of integers: quantised values mean nothing without their scale."""
  for name, values in entries.items():
    if not jnp.issubdtype(values.dtype, jnp.floating):
      raise errors.UsageError(
        f'{what}: the tensor {name} is {values.dtype}, expected floats. Quantised values mean nothing without their '
        'scale: save them dequantised'
      )


def is_list(entries: Mapping[str, Any]) -> bool:
  """Returns whether the entries have an order in place of names."""
  return all(_IN_ORDER.fullmatch(name) for name in entries)


def in_layout(what: str, entries: Mapping[str, np.ndarray], layout: Layout) -> dict[str, np.ndarray]:
  """Returns the arrays of a list by their names in the `state_dict` of a network of PyTorch, in its order.

  A list may hold every tensor, or the parameters and statistics, or the parameters; tied ones under each name, or once.

  Raises:
    UsageError: for another number of arrays, or other shapes.
  """
  arrays = [entries[f'arr_{i}'] for i in range(len(entries))]
  every = layout.named()
  for kinds in (('params', 'batch_stats', 'buffers'), ('params', 'batch_stats'), ('params',)):
    for names in (every, layout.named(tied=False)):
      chosen = {name: entry.shape for name, entry in names.items() if entry.path[0] in kinds}
      if list(chosen.values()) == [x.shape for x in arrays]:
        return dict(zip(chosen, arrays, strict=True))
  raise errors.UsageError(
    f'{what}: it is a list of {len(arrays)} arrays, and the state dict of the network has {len(every)}, or their '
    f'shapes differ: {_NAMED}'
  )


def in_order(
  what: str,
  entries: Mapping[str, np.ndarray],
  model: Model,
  wanted: Tree,
  statistics: Tree,
  sample_shape: Sequence[int],
) -> tuple[dict[Path, np.ndarray], bool]:
  """Returns (the arrays of a list by the paths of the model's variables, whether it is one of their leaves).

  Other lists are in the order of PyTorch's state dict.

  The order is that of the layers, and in each weight, bias, running mean and variance. Counts of batches are dropped.
  A list of the leaves of the parameters, in their own layout, is taken as that where its shapes fit nothing else.

  Args:
    what: the beginning of an error.
    entries: the list, see `is_list`.
    model: the `Model`.
    wanted: the variables that are read, paths with their collection left out.
    statistics: {'batch_stats': …} or {}, which a list may hold, too.
    sample_shape: (H, W, C).

  Raises:
    UsageError: for another number of arrays, for a model that does not tell its layers, and for a list that may be
      either: in the order of the leaves, and in PyTorch's order and layout.
  """
  arrays = [entries[f'arr_{i}'] for i in range(len(entries))]
  arrays = [x for x in arrays if x.ndim or jnp.issubdtype(x.dtype, jnp.floating)]
  paths = {trees.path_names(place)[1:]: leaf for place, leaf in jax.tree.leaves_with_path(wanted)}
  if [x.shape for x in arrays] == [leaf.shape for leaf in paths.values()]:
    theirs = {path: in_torch(path, leaf.shape) for path, leaf in paths.items()}
    if model.layers is not None and sorted(theirs.values()) == sorted(x.shape for x in arrays):
      order = [path for path in _by_layer(model, list(paths), sample_shape) if path in paths]
      if [theirs[path] for path in order] == [x.shape for x in arrays] and (order != [*paths] or _turned(paths)):
        raise errors.UsageError(
          f"{what}: its shapes do not tell whether the list has the leaves of the parameters, or PyTorch's weights: "
          'give a dictionary'
        )
    return dict(zip(paths, arrays, strict=True)), True
  if model.layers is None:
    raise errors.UsageError(f'{what}: it is a list, and {model.name!r} does not tell the order of its layers: {_NAMED}')
  every = [*paths, *(trees.path_names(place)[1:] for place, _ in jax.tree.leaves_with_path(statistics))]
  ordered = _by_layer(model, list(dict.fromkeys(every)), sample_shape)
  alone = [path for path in ordered if path in paths]
  for order in (alone, ordered):
    if len(order) == len(arrays):
      return {path: x for path, x in zip(order, arrays, strict=True) if path in paths}, False
  raise errors.UsageError(
    f'{what}: it is a list of {len(arrays)} arrays, and {model.name!r} has {len(alone)} parameters and '
    f'{len(ordered) - len(alone)} statistics in its layers: {_NAMED}'
  )


def in_torch(path: Path, shape: Sequence[int]) -> tuple[int, ...]:
  """Returns the shape in PyTorch of a variable: dense kernels are [out, in], convolutions [out, in, row, column]."""
  axes = {2: (1, 0), 4: (3, 2, 0, 1)}.get(len(shape)) if path[-1:] == ('kernel',) else None
  return tuple(shape[axis] for axis in axes) if axes else tuple(shape)


def _turned(paths: Collection[Path]) -> bool:
  return any(path[-1:] == ('kernel',) for path in paths)


def _by_layer(model: Model, paths: Sequence[Path], sample_shape: Sequence[int]) -> list[Path]:
  """Returns the paths of all layers in forward order, weights before biases before statistics."""
  assert model.layers is not None
  found: list[Path] = []
  for layer in model.layers(tuple(sample_shape)):
    modules = dict.fromkeys(path[:-1] for path in layer.paths)
    for module in modules:
      found += sorted((path for path in paths if path[:-1] == module), key=_rank)
  return list(dict.fromkeys(found))


def _rank(path: Path) -> int:
  leaf = path[-1]
  return 2 + (leaf.endswith('var')) if leaf in _STATISTICS else int(leaf.startswith('bias'))
