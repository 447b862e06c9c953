"""An update that a user brings: read in any form, and checked against the parameters that it should fit."""

import itertools
import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gradleak.core import errors, trees
from gradleak.core.trees import Tree
from gradleak.modalities import IMAGES, Modality
from gradleak.models import Model, flattening, token_weights, torch_weights
from gradleak.models.model import check_apply, check_finite, check_model, check_sample_shape, check_variables
from gradleak.models.state_dict import Layout
from gradleak.studies.captured import sources

FLATTENED = ('channels_first', 'channels_last')
_RANGE = (2.0**-50, 2.0**50)  # of an update's norm: squares of its values fit float32
_BUFFERS = ('num_batches_tracked',)  # what a state dict holds beside tensors of the model
_STATISTICS = ('running_mean', 'running_var', 'mean', 'var')


def read_update(
  what: Any,
  model: Model,
  variables: Mapping,
  *,
  sent: Any = None,
  sample_shape: Sequence[int] | None = None,
  names: Mapping[str, str] | None = None,
  partial: bool = False,
  flattened: str = 'channels_first',
) -> Tree:
  """Returns an update as a framework has it: a tree of NumPy arrays shaped like the model's parameters. They are in
  single precision, or in double precision where it is.

  It is a gradient, or a delta: the weights after training less those before, so that it points against the gradient.
  With `sent=`, it is the weights that came back, and what was sent is subtracted in double precision.

  Files are `.npz`, `.safetensors` (read without their package), and of `torch.save`: a dictionary or a list of tensors.
  The content decides, not the suffix, and no code in a file is run. In place of a file there may be a dictionary of
  arrays or of PyTorch's tensors. Or there is a list of them, as Flower's `fit` returns it and `np.savez(path, *arrays)`
  keeps it. A list is taken in the order of PyTorch's state dict, where layers stand as they are called, and checked by
  its shapes. Where these fit only the leaves of the parameters, it is taken as those.

  Names may be those of the parameters, joined by '/' or '.', such as 'Dense_0/kernel', in the layout of the
  parameters. Or they are PyTorch's, such as 'Dense_0.weight', in PyTorch's layout. There, convolutions are [out, in,
  row, column], dense weights are [out, in], and channels come before rows where an image is flattened. Which tensors
  meet a flattened image, and which convolutions are transposed, is read from the traced model. One of stride 1 looks
  like any other. Networks from PyTorch have one set of names: flat ones joined by dots are PyTorch's, a tree or those
  joined by '/' of the parameters. Common prefixes 'params', 'module', '_module', '_orig_mod' and 'model', and
  statistics of BatchNorm, are left out.

  Args:
    what: the path of a file, a dictionary, or a list; a tree like the parameters is such a dictionary.
    model: the `Model`.
    variables: its variables; only their names and shapes are read.
    sent: the weights that the client was sent, in any of these forms, or `variables` itself.
    sample_shape: (H, W, C) of images; for PyTorch's layout. By default derived, see `derived_sample_shape`.
    names: {module in the file: module of the model}, such as {'fc1': 'Dense_0'}, for a file that calls them otherwise.
    partial: whether tensors may be missing, which are then zeros, as of a client that drops whole layers.
    flattened: for PyTorch's layout, how the file's network flattens an image: 'channels_first' from [C, H, W], as
      PyTorch has it, or 'channels_last' in the order of the model.

  Raises:
    UsageError: for a file that cannot be read; for tensors that are missing, not in the model, of another shape or
      quantised; for two tensors of one name, and a list that fits two orders; where the order of a tensor in PyTorch is
      not settled; and where one of two has a tensor that the other lacks.
  """
  check_model(model)
  errors.check_instance('partial', partial, bool, 'True or False')
  if not isinstance(variables, Mapping) or 'params' not in variables:
    raise errors.UsageError(f"the variables are {errors.shown(variables)}, expected a dict with 'params'")
  given: Any = (model, dict(variables), sample_shape, names, partial, flattened)
  found = _fitted(what, 'update', *given)
  if sent is not None:
    own = {trees.path_names(place): np.asarray(leaf) for place, leaf in jax.tree.leaves_with_path(variables['params'])}
    found = _difference(found, own if sent is variables else _fitted(sent, 'sent weights', *given))
  wanted = variables['params']
  leaves = [
    found.get(trees.path_names(place), np.zeros(leaf.shape, np.float32))
    for place, leaf in jax.tree.leaves_with_path(wanted)
  ]
  return jax.tree.unflatten(jax.tree.structure(wanted), leaves)


def _difference(returned: Mapping[sources.Path, np.ndarray], sent: Mapping[sources.Path, np.ndarray]) -> dict:
  """Returns what came back less what was sent, in the type of the first."""
  if alone := set(returned).symmetric_difference(sent):
    name = '.'.join(min(alone))
    both = ('the update', 'what was sent')
    holds, lacks = both if min(alone) in returned else reversed(both)
    raise errors.UsageError(f'{holds} has {name}, and {lacks} does not: nothing tells their difference')
  return {path: (x.astype(np.float64) - sent[path].astype(np.float64)).astype(x.dtype) for path, x in returned.items()}


def read_weights(
  path: Any,
  model: Model,
  sample_shape: Sequence[int],
  *,
  names: Mapping[str, str] | None = None,
  flattened: str = 'channels_first',
) -> dict[str, Tree]:
  """Returns the variables of a model with the weights in a file, of the formats and names of `read_update`.

  Args:
    path: of the file, or another form that `read_update` takes. The statistics of BatchNorm stand in it like
      parameters.
    model: the `Model`.
    sample_shape: (H, W, C).
    names, flattened: as in `read_update`.

  Raises:
    UsageError: as `read_update` does, and for values that are not finite.
  """
  sample_shape = check_sample_shape(sample_shape, check_model(model).axes)
  shapes = jax.eval_shape(lambda key: check_model(model).init(key, sample_shape), jax.random.key(0))
  published = torch_weights.has_published_names(shapes['params']) and isinstance(path, str | os.PathLike)
  if published and not names:
    try:
      return torch_weights.load(path, model, sample_shape)  # type: ignore[arg-type]
    except errors.UsageError as error:
      if 'do not fit' not in str(error):
        raise
  found = _fitted(path, 'weights', model, dict(shapes), sample_shape, names, False, flattened)
  with np.errstate(over='ignore'):  # what leaves the range of the model's type is found beneath
    leaves = [
      jnp.asarray(found[trees.path_names(place)[1:]], np.float64 if jax.config.jax_enable_x64 else leaf.dtype)
      for place, leaf in jax.tree.leaves_with_path(shapes)
    ]
  variables = jax.tree.unflatten(jax.tree.structure(dict(shapes)), leaves)
  check_finite(f'the weights in {errors.shown(path)}', variables)
  return variables


def derived_sample_shape(model: Model, variables: Mapping, kind: Modality = IMAGES) -> tuple[int, ...]:
  """Returns the shape of the samples of a model with these variables, where only one fits.

  A network of PyTorch knows its own. Others are tried: the width of a table's schema, as many tokens as positions are
  embedded, and squares of a usual side.

  Raises:
    UsageError: if none fits, or several do, as for networks that average over all pixels.
  """
  if model.layout is not None and len(model.layout.sample) == kind.axes:
    return tuple(model.layout.sample)
  fitting = []
  for shape in kind.shapes(model, variables):
    try:
      check_variables(model, variables, shape)
    except Exception:  # a user's network may raise anything on samples that it does not take
      continue
    fitting.append(shape)
  if len(fitting) != 1:
    found = f'several do ({", ".join(map(str, fitting[:4]))}, …)' if fitting else 'none of the usual ones does'
    raise errors.UsageError(
      f'sample_shape is not given, and the weights of {model.name!r} do not tell which one fits: {found}; give '
      f'sample_shape=({", ".join(kind.axis_names)}{"," * (kind.axes == 1)})'
    )
  return fitting[0]


class Checked(NamedTuple):
  """An update that can be attacked.

  Attributes:
    update: NumPy arrays in the structure and the types of the parameters.
    factor: a power of two that it was multiplied by. It is 1 unless the squares of its values leave the range of
      float32, or its values that of the parameters' type; its largest value is 0.5 to 1 then.
    lost: part of its values that were given as subnormal numbers, which have fewer digits than their type.
  """

  update: Tree
  factor: float
  lost: float


def checked(update: Any, params: Tree, layout: Layout | None = None) -> Checked:
  """Returns the `Checked` update: it is measured in float64 before it is rounded.

  Args:
    update: a tree like the parameters, or {'params': such a tree}.
    params: the parameters.
    layout: of a model from PyTorch.

  Raises:
    UsageError: for a path; for PyTorch's names or tensors of such a model; for tensors that are missing, not in the
      model or of another shape; for values that are not finite; and if every value is zero.
  """
  if isinstance(update, str | os.PathLike):
    raise errors.UsageError(
      f'the update is the path {str(update)!r}: gradleak.read_update(path, model, variables) reads it'
    )
  if (
    isinstance(update, Mapping)
    and set(update) == {'params'}
    and not (isinstance(params, Mapping) and 'params' in params)
  ):
    update = update['params']
  if layout is not None and _of_torch(update):
    raise errors.UsageError(
      "the update has PyTorch's names or tensors, whose layout is another: gradleak.read_update(update, model, "
      'variables) converts them'
    )
  found = {_name(path): leaf for path, leaf in jax.tree.leaves_with_path(update)}
  wanted = {_name(path): leaf for path, leaf in jax.tree.leaves_with_path(params)}
  arrays = {name: errors.host_array(f'the tensor {name} of the update', leaf) for name, leaf in found.items()}
  _refuse_misfits('the update does not fit the model', arrays, {name: leaf.shape for name, leaf in wanted.items()})
  for name, array in arrays.items():
    if not jnp.issubdtype(array.dtype, jnp.floating):
      raise errors.UsageError(f'the tensor {name} of the update is {array.dtype}, expected floats')
    bad = int((~np.isfinite(array.astype(np.float64))).sum())
    if bad:
      raise errors.UsageError(
        f'the update has values that are not finite: {bad} of {array.size} in {name}. Nothing can be compared with '
        'them: the training may have diverged, or the file be damaged'
      )
  if not any(array.any() for array in arrays.values()):
    raise errors.UsageError('every value of the update is zero: there is nothing to attack')
  largest, factor = max(float(np.abs(x.astype(np.float64)).max()) for x in arrays.values() if x.size), 1.0
  rounded = _rounded(arrays, wanted, factor)
  if not _RANGE[0] <= norm(arrays.values()) <= _RANGE[1] or not _fits(rounded):
    factor = math.ldexp(1.0, max(-1000, min(1000, -math.frexp(largest)[1])))
    rounded = _rounded(arrays, wanted, factor)
  lost = sum(int(((x != 0) & (np.abs(x) < jnp.finfo(x.dtype).tiny)).sum()) for x in arrays.values())
  whole = jax.tree.unflatten(jax.tree.structure(params), rounded)
  return Checked(whole, factor, lost / max(sum(np.count_nonzero(x) for x in arrays.values()), 1))


def _of_torch(update: Any) -> bool:
  """Returns whether an update has names joined by dots, in place of a tree, or tensors of PyTorch."""
  leaves = jax.tree.leaves_with_path(update)
  return any(hasattr(leaf, 'detach') or '.' in ''.join(trees.path_names(path)) for path, leaf in leaves)


def norm(arrays: Iterable[np.ndarray]) -> float:
  """Returns the L2 norm of arrays, in float64; infinity beyond its range."""
  values = [np.abs(array.astype(np.float64)) for array in arrays if array.size]
  largest = max(float(each.max()) for each in values)
  return largest * math.sqrt(sum(float(np.square(each / largest).sum()) for each in values)) if largest else 0.0


def _rounded(arrays: Mapping[str, np.ndarray], wanted: Mapping[str, Any], factor: float) -> list[np.ndarray]:
  """Returns the arrays times a factor, in the types of the parameters."""
  with np.errstate(over='ignore', under='ignore'):
    return [(arrays[name].astype(np.float64) * factor).astype(leaf.dtype) for name, leaf in wanted.items()]


def _fits(rounded: Sequence[np.ndarray]) -> bool:
  return all(np.isfinite(x.astype(np.float64)).all() for x in rounded) and any(x.any() for x in rounded)


def _name(path: Sequence) -> str:
  return '.'.join(trees.path_names(path))


def _fitted(
  what: Any,
  kind: str,
  model: Model,
  variables: dict[str, Tree],
  sample_shape: Sequence[int] | None,
  names: Mapping[str, str] | None,
  partial: bool,
  flattened: str,
) -> dict[sources.Path, np.ndarray]:
  """Returns the arrays that there are, in the layout of the model, by their paths in it.

  The kind is 'update', 'sent weights' or 'weights'; the last have statistics, and of them all must be there.
  """
  names = _checked_names(names)
  errors.check_choice('order: flattened', flattened, FLATTENED)
  wanted = variables if kind == 'weights' else {'params': variables['params']}
  entries = sources.read(what, kind)
  source = f'in {str(what)!r} ' if isinstance(what, str | os.PathLike) else ''
  about = f'the {kind} {source}{"does" if kind == "update" else "do"} not fit {model.name!r}'
  paths = {trees.path_names(place)[1:]: leaf for place, leaf in jax.tree.leaves_with_path(wanted)}
  ours = {'.'.join(place): place for place in paths}
  every = model.layout.entries if model.layout else ()
  in_torch = {one.name: one.path[1:] for one in every if one.path[1:] in paths and one.path[0] in wanted}
  theirs = {torch_weights.torch_name(place): place for place in paths} if all(paths) and not every else {}
  shape = check_sample_shape(sample_shape, model.axes) if sample_shape else None
  tree = sources.in_tree(what, entries, variables, wanted) if every else None
  if sources.is_list(entries) and model.layout is not None:
    entries = sources.in_layout(about, entries, model.layout)
  if sources.is_list(entries):
    shape = shape or derived_sample_shape(model, variables)
    statistics = {name: tree for name, tree in variables.items() if name != 'params'}
    listed, leaves = sources.in_order(about, entries, model, wanted, statistics, shape)
    of_torch = all(x.shape == sources.in_torch(path, paths[path].shape) for path, x in listed.items())
    straight = all(x.shape == paths[path].shape for path, x in listed.items())
    known = ours if leaves or (straight and not of_torch) else theirs
    placed = {place: name for name, place in known.items()}
    entries = {placed[path]: x for path, x in listed.items()}
  elif tree is not None:
    entries, known = tree, ours
  elif (published := _of_tokens(entries, model, paths)) is not None:
    entries, known = published
  else:
    entries = _renamed(entries, names, {*ours, *theirs, *in_torch}, statistics=len(wanted) > 1)
    if model.layout is not None and sum(one in in_torch for one in entries) >= sum(one in ours for one in entries):
      theirs, entries = in_torch, _of_layout(entries, model.layout, set(in_torch))
    if torch_weights.has_published_names(wanted['params']):
      entries = torch_weights.common_names(entries)
    is_torch = sum(name in theirs for name in entries) > sum(name in ours for name in entries)
    known = theirs if is_torch or theirs is in_torch else ours
  counts = {one.name for one in every if np.dtype(one.dtype).kind in 'iub'}
  floating = {name for name, place in known.items() if bool(jnp.issubdtype(paths[place].dtype, jnp.floating))} - counts
  sources.refuse_integers(about, {name: x for name, x in entries.items() if name in floating})
  in_file = {name: values.shape for name, values in entries.items()}
  if known is theirs and theirs != ours and theirs is not in_torch:
    shape = shape or derived_sample_shape(model, variables)
    entries = _from_torch(entries, theirs, model, variables, shape, flattened)
  shapes = {name: tuple(paths[place].shape) for name, place in known.items()}
  if known is in_torch:
    shapes |= {entry.name: entry.shape for entry in every if entry.name in shapes}
  _refuse_misfits(about, entries, shapes, partial, in_file, kind != 'weights')
  if model.layout is not None and known is in_torch:
    entries = model.layout.to_ours(entries)
  # not rounded before their scale is known
  return {known[name]: np.asarray(x, np.promote_types(x.dtype, np.float32)) for name, x in entries.items()}


def _of_tokens(
  entries: Mapping[str, np.ndarray], model: Model, paths: Mapping[sources.Path, Any]
) -> tuple[dict[str, np.ndarray], dict[str, sources.Path]] | None:
  """Returns (entries in our layout, the path of each name) of Hugging Face's GPT-2 or BERT; None for other names."""
  if model.first_block is None or model.layout is not None:
    return None
  names = {token_weights.published_name(path): path for path in paths}
  plain = _dotted(entries)
  found = token_weights.read_entries(torch_weights.without_prefixes(plain, names), list(names))
  ours = {'.'.join(path) for path in paths}
  return (found, names) if sum(one in names for one in found) > sum(one in ours for one in plain) else None


def _checked_names(names: Any) -> Mapping[str, str]:
  """Returns the names of modules; raises `UsageError` for anything but a mapping of texts to texts."""
  if names is None:
    return {}
  expected = 'a mapping {module in the file: module of the model}'
  for one in itertools.chain(*errors.check_instance('names', names, Mapping, expected).items()):
    errors.check_instance('a module in names', one, str, 'a text')
  return names


def _of_layout(entries: dict[str, np.ndarray], layout: Layout, known: set[str]) -> dict[str, np.ndarray]:
  """Returns the entries of a network of PyTorch without those that are no tensors of what is read.

  Raises:
    UsageError: if two names of one tensor have different values.
  """
  others = layout.named().keys() - known
  return {name: values for name, values in layout.untied(entries).items() if name not in others}


def _renamed(
  entries: dict[str, np.ndarray], names: Mapping[str, str], known: Collection[str], statistics: bool
) -> dict[str, np.ndarray]:
  """Returns the entries by names joined by dots, without common prefixes and without what is no tensor of the model."""
  found = torch_weights.without_prefixes(_dotted(entries), {*known, *names})
  dropped = _BUFFERS if statistics else (*_BUFFERS, *_STATISTICS)
  found = {name: values for name, values in found.items() if name in known or name.rpartition('.')[2] not in dropped}

  def renamed(name: str) -> str:
    module, _, leaf = name.rpartition('.')
    return '.'.join(filter(None, (names.get(module, module), leaf)))

  return torch_weights.unique(((renamed(name), values) for name, values in found.items()), ' by names=')


def _dotted(entries: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  return torch_weights.unique((name.replace('/', '.'), values) for name, values in entries.items())


def _from_torch(
  entries: dict[str, np.ndarray],
  places: Mapping[str, tuple[str, ...]],
  model: Model,
  variables: Tree,
  sample_shape: Sequence[int],
  flattened: str,
) -> dict[str, np.ndarray]:
  """Returns the entries in the layout of our parameters; one that does not fit is left as it is.

  The places are the paths of our parameters by PyTorch's names.

  Raises:
    UsageError: for a model that cannot be traced, and where PyTorch's order of a tensor is not settled.
  """
  converted = dict(entries)
  if torch_weights.has_published_names(variables['params']):
    for name, values in entries.items():
      if name in places:
        converted[name] = torch_weights.our_layout(places[name], values, sample_shape[2])
    return converted
  check_apply(model, variables, sample_shape)
  orders, kernels = flattening.layouts(model, variables, sample_shape)
  shapes = {trees.path_names(path)[1:]: leaf.shape for path, leaf in jax.tree.leaves_with_path(dict(variables))}
  for name, values in entries.items():
    place = places.get(name)
    if place in kernels and values.ndim == len(shapes[place]):
      converted[name] = kernels[place].ours(values)
      continue
    if place is None or values.ndim not in (1, 2, 4) or (values.ndim > 1 and place[-1] != 'kernel'):
      continue
    if values.ndim == 4:
      straight = len(shapes[place]) == 4
      turned = values.transpose((2, 3, 1, 0) if straight else (0, 3, 2, 1))
      converted[name] = turned if straight else turned.reshape(len(values), -1)
      continue
    order = orders.get(place, flattening.Order(0, None, 'its product with a value of the network is not found'))
    if values.ndim == 1 and place not in orders:
      continue
    if order.problem and flattened == 'channels_first':
      raise errors.UsageError(
        f'the order of {name} in PyTorch is not settled for {model.name!r}: {order.problem}. '
        "flattened='channels_last' takes it in the order of the model"
      )
    if values.ndim == 2 and order.axis == 0:
      values = values.T
    if order.places is not None and flattened == 'channels_first' and values.shape[order.axis] == len(order.places):
      values = np.take(values, order.places, order.axis)
    converted[name] = values
  return converted


def _refuse_misfits(
  what: str,
  found: Mapping[str, np.ndarray],
  shapes: Mapping[str, tuple[int, ...]],
  partial: bool = False,
  in_file: Mapping[str, tuple[int, ...]] | None = None,
  incomplete: bool = False,
) -> None:
  """Raises `UsageError` that lists the tensors missing, not in the model, and of another shape.

  The message begins with `what`. The shapes `in_file` are None for no file. An incomplete update need not hold all.
  """

  def shape(name: str, values: np.ndarray) -> str:
    stored = tuple(values.shape) if in_file is None else tuple(in_file[name])
    turned = '' if stored == tuple(values.shape) else f', here {tuple(values.shape)},'
    return f'{name} {stored}{turned}'

  faults = {
    'missing': [] if partial else [name for name in shapes if name not in found],
    'not in the model': [name for name in found if name not in shapes],
    'of another shape': [
      f'{shape(name, values)} where the model has {tuple(shapes[name])}'
      for name, values in found.items()
      if name in shapes and tuple(values.shape) != tuple(shapes[name])
    ],
  }
  if any(faults.values()):
    listed = '; '.join(f'{kind}: {errors.some(names)}' for kind, names in faults.items() if names)
    advice = ''
    if in_file is not None and faults['missing'] and faults['not in the model']:
      advice = ". names={'module in the file': 'module of the model'} says which is which"
    elif incomplete and faults['missing']:
      advice = '. partial=True takes missing tensors for dropped ones'
    raise errors.UsageError(f'{what}: {listed}{advice}')
  if not found:
    raise errors.UsageError(f'{what}: it holds no tensor')
