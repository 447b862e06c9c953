"""A PyTorch module as a model: exported, and its operations run in JAX.

PyTorch is imported where a module is given, and nowhere else in gradleak.
"""

import contextlib
import copy
import io
import logging
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gradleak.core import errors
from gradleak.core.trees import Layer, Tree, get, path_names
from gradleak.models import aten, masked, torch_block, torch_check, torch_modules
from gradleak.models.aten_program import Program, Ref, Step, pruned, unsupported
from gradleak.models.model import ImageShape, Model, Normalisation, check_sample_shape
from gradleak.models.state_dict import Entry, Layout

# Operations that are run as they are, and not taken apart first.
_WHOLE = tuple(
  """
  detach.default linear.default lstm.input gru.input rnn_tanh.input rnn_relu.input layer_norm.default
  group_norm.default
  scaled_dot_product_attention.default dropout.default silu.default pixel_shuffle.default upsample_nearest1d.default
  upsample_nearest2d.default upsample_nearest2d.vec upsample_linear1d.default upsample_bilinear2d.default
  upsample_bilinear2d.vec upsample_bicubic2d.default upsample_bicubic2d.vec upsample_nearest1d.vec
  upsample_linear1d.vec upsample_nearest3d.default upsample_nearest3d.vec upsample_trilinear3d.default
  upsample_trilinear3d.vec reflection_pad1d.default reflection_pad2d.default replication_pad1d.default
  replication_pad2d.default _adaptive_avg_pool2d.default adaptive_max_pool2d.default log_sigmoid_forward.default
  softplus.default hardswish.default hardsigmoid.default mish.default rms_norm.default leaky_relu.default elu.default
  hardtanh.default clamp.default _prelu_kernel.default std.correction
  """.split()  # noqa: SIM905
)
_CHECKED = 4  # samples of the example that both networks are run on
_MANY = 2**16  # samples, a bound above which is one of memory
_COUNTS = 2, 5, 131  # samples of several exports, where one does not do for any number


class _Network(NamedTuple):
  """A module in both modes, its `state_dict`, its samples, and the normalisation in front of it."""

  name: str
  train: Program
  evaluation: Program
  layout: Layout
  shape: ImageShape
  normalisation: Normalisation | None
  dtype: str
  block: torch_block.Block | None = None

  @property
  def vocabulary(self) -> int | None:
    """How many token ids it looks up; None for floats, or ids that it looks up in no table."""
    return self.evaluation.vocabulary() if self.dtype == 'int32' else None


def from_torch(
  module: Any,
  example: Any,
  name: str | None = None,
  *,
  mean: Sequence[float] | None = None,
  std: Sequence[float] | None = None,
  check: bool = True,
) -> tuple[Model, dict[str, Tree]]:
  """Returns (`Model`, its variables) of a PyTorch module, which is not changed.

  The module is exported in both modes (`torch.export`), and its operations are run in JAX; PyTorch takes no part in
  what follows. Variables stand under PyTorch's own names, so that files of its state dicts, and updates, are read
  without `names=`. Dense weights are held as [in, out], and `Model.layout` says how to turn them. Trained parameters
  are 'params'; running statistics, among them `num_batches_tracked`, are 'batch_stats'. Parameters that are not
  trained, or that no gradient reaches, and all other buffers, are 'buffers'. Dropout is active only with a key.
  Images are [N, H, W, C] outside of the module, and so are outputs of four axes. A module that looks token
  ids [N, T] up in tables takes probabilities [N, T, V] in their place, which searches move. V is `Model.vocabulary`.
  Where `Model.first_block` is found, it also takes embeddings [N, T, d], see `torch_block`.

  Args:
    module: a `torch.nn.Module`, called as `module(samples)`, that returns one tensor, or a mapping whose entry
      'logits' is one, as modules of Hugging Face do. Its parameters are float32.
    example: samples that it takes, for their shape and type: a tensor as PyTorch has them, images [N, C, H, W]; or an
      array as they are here, images [N, H, W, C]. They are not normalised where `mean` and `std` are given.
    name: how results call it; the class name by default.
    mean, std: normalisation of images in [0, 1] by channel, sequences of C floats, in front of the module.
    check: whether both networks are compared on the example: logits, gradient, and what a step of training changes.

  Raises:
    UsageError: without PyTorch; for what is no such module, or fails on the example; for operations that are not
      understood, which it names; for a module that takes batches of one size alone, that draws from other generators
      than PyTorch's, or of which, in training, a part in evaluation computes other things; and where both networks
      differ, with the first layer that does.
  """
  torch = _torch()
  module = torch_modules.copied(torch, module)
  if (mean is None) != (std is None):
    raise errors.UsageError('from_torch takes mean and std together: give both or neither')
  given, shape = torch_modules.example(torch, example, _CHECKED)
  normalisation = None
  if mean is not None and std is not None:
    channels = [errors.host_array(what, values) for what, values in (('mean', mean), ('std', std))]
    if any(one.shape != (shape[-1],) for one in channels) or len(shape) != 3:
      raise errors.UsageError(
        f'mean and std are sequences of one number for each channel of an image; samples have shape {shape}, mean '
        f'{channels[0].shape} and std {channels[1].shape}'
      )
    if not np.isfinite(channels).all() or not np.all(channels[1] > 0):
      raise errors.UsageError(f'mean is {mean} and std {std}, expected finite numbers, and those of std above zero')
    normalisation = Normalisation(*(tuple(map(float, one)) for one in channels))
  name = errors.check_text('name', type(module).__name__.lower() if name is None else name)
  samples = torch.from_numpy(np.array(_normalised(given, normalisation)))
  torch_modules.check_runs(torch, module, to_torch(samples), name)
  torch_modules.return_logits(torch, module, name)
  unchanged = copy.deepcopy(module) if check else None  # an export may leave its own tensors in a module
  apart = [part for part, one in module.named_modules() if not one.training] if module.training else []
  modes = [_exported(torch, module, to_torch(samples), train, name) for train in (True, False)]
  _check_parts(torch, module, to_torch(samples), apart, modes[0], name)
  missing = {step.name: step for program in modes for step in program.missing()}
  if missing:
    raise unsupported(list(missing.values()))
  layout, modes = _laid_out(module, modes, shape)
  train, evaluation = modes
  network = _Network(name, train, evaluation, layout, shape, normalisation, str(given.dtype))
  values = {one: tensor.detach().numpy() for one, tensor in module.state_dict().items()}
  variables = jax.tree.map(jnp.array, layout.variables(values))
  if network.vocabulary is not None and len(train.looked_up()) == 1:
    network = network._replace(block=torch_block.find(evaluation, layout, variables))
  model = _model(network, variables)
  if check:

    def watched(variables: Tree, samples: jax.Array, train: bool, watch: Callable[[Step, Any], None]) -> Any:
      return _values(network, variables, samples, train, None, watch)

    torch_check.check(torch, unchanged, to_torch(samples), model, variables, given, watched)
  return model, variables


def _torch() -> Any:
  """Returns PyTorch; raises `UsageError` where it is not installed."""
  try:
    import torch
  except ImportError as error:
    raise errors.UsageError('from_torch needs PyTorch, which is not installed: pip install torch') from error
  return torch


def _normalised(samples: Any, normalisation: Normalisation | None) -> Any:
  """Returns images [N, H, W, C] as the module takes them."""
  if normalisation is None:
    return samples
  mean, std = (np.asarray(one, samples.dtype).reshape(1, 1, 1, -1) for one in normalisation)
  return (samples - mean) / std


def to_torch(samples: Any) -> Any:
  """Returns a tensor of samples with the channels of images first; token ids are 64-bit integers there."""
  samples = samples.movedim(-1, 1).contiguous() if samples.ndim == 4 else samples
  return samples if samples.is_floating_point() else samples.long()


# Export --------------------------------------------------------------------------------------------------------------


def _check_parts(torch: Any, module: Any, samples: Any, apart: Sequence[str], program: Program, name: str) -> None:
  """Raises `UsageError` where a module in training was given with parts in evaluation that compute other things there.

  Args:
    torch: the package.
    module: whose mode is changed.
    samples: as it takes them.
    apart: names of these parts.
    program: of the module whose parts are all in training, but for those that its own `train` leaves.
    name: of the module.
  """
  module.train()
  moved = [part for part in apart if module.get_submodule(part).training]
  if not moved:
    return
  if _computed(_exported(torch, module, samples, True, name, moved)) != _computed(program):
    raise errors.UsageError(
      f'the module {name!r} is in training and {errors.some(moved)} in evaluation, where it computes other things: '
      'call train() on the whole if its client does, or let its own train() leave that part in evaluation'
    )


def _computed(program: Program) -> list[tuple]:
  """Returns the operations of a program, without flags of training, and dropouts, that change nothing."""
  known: dict[int, Any] = {}
  found: list[tuple] = []

  def named(value: Any) -> Any:
    if isinstance(value, Ref):
      return known.get(value.place, value)
    return tuple(map(named, value)) if type(value) is tuple else value

  for step in program.steps:
    given = step.arguments
    if step.base == 'dropout' and not all(given[1:]):
      known[step.place] = named(given[0])
      continue
    if step.name.endswith('.input') and not (given[5] and given[4] > 1):  # recurrent layers drop between two of them
      given = (*given[:6], *given[7:])
    known[step.place] = f'value {len(found)}'
    found.append((step.name, named(given), named(tuple(step.options.items()))))
  return found


def _exported(torch: Any, module: Any, samples: Any, train: bool, name: str, apart: Sequence[str] = ()) -> Program:
  """Returns the `Program` of a module in one mode; its buffers stay as they are. Parts `apart` are in evaluation.

  A module that asks for `len(samples)` can be exported for only one number of samples. Then several exports tell how
  its program depends on that number.
  """
  module.train(train)
  for part in apart:
    module.get_submodule(part).training = False
  try:
    return _for_batch(torch, module, samples, True, name)
  except Exception as error:  # a user's network may raise anything
    if isinstance(error, errors.UsageError):
      raise
    if 'Constraints violated' not in str(error):
      raise _not_exported(error, name, samples) from error
  try:
    programs = [_for_batch(torch, module, _repeated(samples, count), False, name) for count in _COUNTS]
  except Exception as error:
    raise _not_exported(error, name, samples) from error
  first, *others = programs
  merged, *same = (first.of_any_batch(one, (_COUNTS[0], count)) for one, count in zip(others, _COUNTS[1:], strict=True))
  if merged is None or any(one is None or one.steps != merged.steps for one in same):
    raise _of_some_batches(name, f'{_COUNTS[0]}, {_COUNTS[1]} and {_COUNTS[2]} samples')
  return merged


def _repeated(samples: Any, count: int) -> Any:
  """Returns so many samples."""
  return samples[[number % len(samples) for number in range(count)]].contiguous()


def _for_batch(torch: Any, module: Any, samples: Any, dynamic: bool, name: str) -> Program:
  """Returns the program of a module in its mode, for any number of samples or for that of these."""
  table = torch.export.default_decompositions()
  for whole in _WHOLE:
    operation, overload = whole.split('.')
    table.pop(getattr(getattr(torch.ops.aten, operation, None), overload, None), None)
  table.update(torch._decomp.get_decompositions([torch.ops.aten.grid_sampler_2d.default]))
  before = {key: value.clone() for key, value in module.state_dict().items()}
  shapes = ({0: torch.export.Dim.DYNAMIC},) if dynamic else None
  with torch.enable_grad(), _silent(), _no_comparison_of_masks(torch):
    exported = torch.export.export(module, (samples,), dynamic_shapes=shapes, strict=False)
    _check_range(exported, name)
    _hold_back_gradients(torch, exported)
    exported = exported.run_decompositions(table)
  module.load_state_dict(before)
  return _program(torch, exported, module, name)


def _check_range(exported: Any, name: str) -> None:
  """Raises `UsageError` where an export is for some numbers of samples, as the module asks for their number."""
  for symbol, numbers in exported.range_constraints.items():
    bounded = numbers.upper < _MANY
    if str(symbol).startswith('s') and (numbers.lower > 2 or bounded):  # not of values, as 'u0' is
      most = f' to {numbers.upper}' if bounded else ' or more'
      raise _of_some_batches(name, f'{numbers.lower}{most} samples and for other numbers of them')


def _of_some_batches(name: str, which: str) -> errors.UsageError:
  return errors.UsageError(
    f'the module {name!r} computes other things for batches of {which}, and an attack takes batches of any size'
  )


def _hold_back_gradients(torch: Any, exported: Any) -> None:
  """Detaches what enters each block of an export that is under `no_grad`; without it the block would be forgotten."""
  for part in exported.graph_module.modules():
    for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
      if node.target is torch.ops.higher_order.wrap_with_set_grad_enabled and not node.args[0]:
        for one in (one for one in node.args[2:] if isinstance(one, torch.fx.Node)):
          if one.op != 'placeholder' or one.meta['val'].requires_grad:  # buffers stay what they are: it may change them
            with part.graph.inserting_before(node):
              held = part.graph.call_function(torch.ops.aten.detach.default, (one,))
            held.meta = {**one.meta, 'val': one.meta['val'].detach()}
            node.replace_input_with(one, held)
    if isinstance(part, torch.fx.GraphModule):
      part.recompile()


@contextlib.contextmanager
def _no_comparison_of_masks(torch: Any) -> Iterator[None]:
  """Takes the mask of a TransformerEncoder as it is, which it compares with a causal one only to save time."""
  module = torch.nn.modules.transformer
  compared = module._detect_is_causal_mask
  module._detect_is_causal_mask = lambda mask, is_causal=None, size=None: bool(is_causal)
  try:
    yield
  finally:
    module._detect_is_causal_mask = compared


@contextlib.contextmanager
def _silent() -> Iterator[None]:
  """Leaves out warnings and messages; what went wrong is in the exception."""
  before, nothing = logging.root.manager.disable, io.StringIO()
  logging.disable(logging.CRITICAL)
  try:
    with warnings.catch_warnings(), contextlib.redirect_stdout(nothing), contextlib.redirect_stderr(nothing):
      warnings.simplefilter('ignore')
      yield
  finally:
    logging.disable(before)


def _not_exported(error: Exception, name: str, samples: Any) -> errors.UsageError:
  """Returns the error that says why a module is not exported."""
  text = f'{type(error).__name__}: {error}'.partition('Caused by')[0]
  branch = any(part in text.lower() for part in ('data-dependent', 'data dependent', 'guard'))
  needs = '. It needs a network without branches on values, such as that of BatchNorm with momentum=None'
  return errors.UsageError(
    f'torch.export does not export the module {name!r} for inputs of shape {tuple(samples.shape)} in PyTorch: '
    f'{textwrap.shorten(text, 300, placeholder=" …")}{needs if branch else ""}'
  )


def _program(torch: Any, exported: Any, module: Any, name: str) -> Program:
  """Returns the program of an export, its variables under their names in the `state_dict`."""
  names = _first_names(module)
  kind = torch.export.graph_signature
  graph, signature = exported.graph, exported.graph_signature
  specs = {spec.arg.name: spec for spec in signature.input_specs if hasattr(spec.arg, 'name')}
  places: dict[Any, int] = {node: place for place, node in enumerate(graph.nodes)}
  inputs, constants, image, shapes, steps = {}, {}, -1, {}, []
  persistent = set(module.state_dict())
  for node, place in places.items():
    shape = getattr(node.meta.get('val'), 'shape', None)
    if shape is not None:
      shapes[place] = tuple(side if isinstance(side, int) else -1 for side in shape)  # -1: of the batch
    if node.op == 'placeholder':
      spec = specs[node.name]
      if spec.kind == kind.InputKind.USER_INPUT:
        image = place
      elif spec.target in persistent:
        inputs[place] = names[spec.target]
      else:
        constants[place] = exported.constants[spec.target].detach().numpy()
    elif node.op == 'call_function':
      steps.append(_step(torch, node, places))
  output, changed = -1, {}
  returned = next(node for node in graph.nodes if node.op == 'output').args[0]
  for node, spec in zip(returned, signature.output_specs, strict=True):
    if spec.kind == kind.OutputKind.BUFFER_MUTATION:
      if spec.target not in persistent:
        raise errors.UsageError(
          f'the module {name!r} changes its buffer {spec.target}, which its state_dict leaves out: register it with '
          'persistent=True'
        )
      changed[names[spec.target]] = places[node]
    elif spec.kind.name == 'PARAMETER_MUTATION':
      raise errors.UsageError(
        f'the module {name!r} changes its parameter {spec.target} when it is called: do that after a step of training'
      )
    elif spec.kind == kind.OutputKind.USER_OUTPUT:
      output = places[node]
  return Program(pruned(steps, [output, *changed.values()]), inputs, constants, image, shapes, output, changed)


def _first_names(module: Any) -> dict[str, str]:
  """Returns {name in the `state_dict`: the first name of the same tensor}, for parameters that are shared."""
  first: dict[int, str] = {}
  tensors = module.state_dict(keep_vars=True)
  return {name: first.setdefault(id(tensor), name) for name, tensor in tensors.items()}


def _step(torch: Any, node: Any, places: Mapping[Any, int]) -> Step:
  """Returns an operation of a graph without objects of PyTorch."""

  def plain(value: Any) -> Any:
    if isinstance(value, torch.fx.Node):
      return Ref(places[value])
    if isinstance(value, tuple | list):
      return tuple(plain(one) for one in value)
    if isinstance(value, torch.dtype):
      return str(value).removeprefix('torch.')
    return value if isinstance(value, bool | int | float | str | None) else str(value)

  target = node.target
  if isinstance(target, torch._ops.OpOverload):
    space, _, operation = target._schema.name.partition('::')
    name = f'{operation if space == "aten" else f"{space}::{operation}"}.{target._overloadname or "default"}'
  else:
    name = (
      f'operator.{target.__name__}' if target.__module__ == '_operator' else getattr(target, '__name__', str(target))
    )
  stack = list((node.meta.get('nn_module_stack') or {}).values())
  where = str(stack[-1][0]) if stack else ''
  options = {key: plain(value) for key, value in node.kwargs.items() if key not in ('device', 'layout', 'pin_memory')}
  options.pop('memory_format', None)
  return Step(name, plain(node.args), options, places[node], where)


def _laid_out(module: Any, modes: Sequence[Program], sample: ImageShape) -> tuple[Layout, list[Program]]:
  """Returns the `Layout` of a module's tensors, and its programs for tensors that are held so."""
  train, evaluation = modes
  first, second = (program.dense() for program in modes)
  dense = {name: image for name, image in first.items() if second.get(name, image) is not None}
  dense |= {name: image for name, image in second.items() if name not in train.inputs.values()}
  dense = {name: image for name, image in dense.items() if name in second or name not in evaluation.inputs.values()}
  if any(first.get(name, image) != second.get(name, image) for name, image in dense.items()):
    dense = dict.fromkeys(dense, ())
  for name in evaluation.changed:
    if name not in train.changed or not name:
      raise errors.UsageError(f'the module changes its buffer {name} in evaluation, which has no place here')
  reached = train.trained()  # PyTorch's optimizers pass over parameters without a gradient, weight decay included
  trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad and name in reached}
  names, kernels = _first_names(module), evaluation.kernels() | train.kernels()
  entries = []
  for name, tensor in module.state_dict().items():
    if names[name] != name:
      continue
    kind = 'params' if name in trained else 'batch_stats' if name in train.changed else 'buffers'
    shape = tuple(tensor.shape)
    is_dense = name in dense and len(shape) == 2
    dtype = str(tensor.dtype).removeprefix('torch.')
    image, inputs = dense[name] if is_dense else (), () if is_dense else kernels.get(name, ())
    entries.append(Entry(name, (kind, *name.split('.')), shape, dtype, is_dense, image, inputs))
  tied = tuple((name, other) for name, other in names.items() if name != other)
  held = {entry.name: entry.image for entry in entries if entry.dense}
  return Layout(tuple(entries), sample, tied, tuple(names)), [program.marked(held) for program in modes]


# The model -----------------------------------------------------------------------------------------------------------


def _model(network: _Network, initial: dict[str, Tree]) -> Model:
  """Returns the `Model` of a network with these variables."""
  statistics = [entry for entry in network.layout.entries if entry.path[0] == 'batch_stats']

  def check(sample_shape: ImageShape) -> None:
    if tuple(check_sample_shape(sample_shape, len(network.shape))) != network.shape:
      raise errors.UsageError(
        f'the model {network.name!r} was exported for samples of shape {network.shape}, got {tuple(sample_shape)}'
      )

  def init(key: jax.Array, sample_shape: ImageShape) -> Tree:
    errors.check_key('key', key)
    check(sample_shape)
    return jax.tree.map(lambda x: x, initial)

  def apply(
    variables: Tree, samples: jax.Array, train: bool = False, key: jax.Array | None = None
  ) -> tuple[jax.Array, Tree]:
    values, program = _values(network, variables, samples, train, key)
    logits = (
      aten.last(values[program.output]) if values[program.output].ndim == 4 else aten.plain(values[program.output])
    )
    if not statistics or not train:
      return logits, variables.get('batch_stats', {})
    old = variables['batch_stats']
    changed = {
      entry.path[1:]: aten.plain(values[program.changed[entry.name]]).astype(get(old, entry.path[1:]).dtype)
      for entry in statistics
    }
    return logits, jax.tree_util.tree_map_with_path(lambda path, _: changed[path_names(path)], old)

  def features(variables: Tree, samples: jax.Array) -> jax.Array:
    step = network.evaluation.last_dense()
    if step is None:
      raise errors.UsageError(f'the model {network.name!r} has no dense layer to take features from')
    found = aten.plain(_values(network, variables, samples, False, None)[0][step.arguments[0].place])
    if found.ndim != 2:
      raise errors.UsageError(
        f'the last dense layer of the model {network.name!r} takes {found.shape}, expected features [N, F]'
      )
    return found

  def layers(sample_shape: ImageShape) -> tuple[Layer, ...]:
    check(sample_shape)
    return _layers(network)

  return Model(
    network.name,
    init,
    apply,
    features,
    layers,
    normalisation=network.normalisation,
    axes=len(network.shape),
    layout=network.layout,
    dtype=network.dtype,
    first_block=None if network.block is None else network.block.first,
    vocabulary=network.vocabulary,
    padding=None if network.block is None else network.block.first.padding,
  )


def _values(
  network: _Network,
  variables: Tree,
  samples: jax.Array,
  train: bool,
  key: jax.Array | None,
  watch: Callable[[Step, Any], None] | None = None,
) -> tuple[dict[int, Any], Program]:
  """Returns the value of each place of a program, and the program that is run."""
  key = None if key is None else errors.check_key('key', key)
  program = network.train if train or (key is not None and network.train.draws) else network.evaluation
  shape, vocabulary = network.shape, network.vocabulary
  relaxed = network.dtype == 'int32' and not jnp.issubdtype(samples.dtype, jnp.integer)
  if relaxed and vocabulary is None:
    raise errors.UsageError(
      f'the model {network.name!r} takes ids of tokens and looks them up in no table, so that no search can move their '
      'probabilities: embed them by torch.nn.Embedding'
    )
  floats = [leaf.dtype for leaf in jax.tree.leaves(variables['params'])]
  dtype = samples.dtype if jnp.issubdtype(samples.dtype, jnp.floating) else floats[0] if floats else jnp.float32
  run = aten.Run(dtype, train or program is network.evaluation, key, masked.counted)
  values = network.layout.arrays(variables, run.cast)
  block = network.block
  moved = {'probabilities': (*shape, vocabulary)} if vocabulary else {}
  moved |= {'embeddings': (*shape, values[block.table].shape[1])} if block is not None else {}
  if tuple(samples.shape[1:]) not in (moved.values() if relaxed else [shape]):
    expected = ', or '.join(
      [f'ids {shape}', *(f'{name} {one}' for name, one in moved.items())] if moved else [f'{shape}']
    )
    raise errors.UsageError(f'the model {network.name!r} takes samples of shape {expected}, got {samples.shape[1:]}')
  if not relaxed:
    samples = _normalised(samples, network.normalisation)
    return program.run(run, values, aten.Last(samples) if samples.ndim == 4 else samples, watch), program
  if samples.shape[-1] == vocabulary:
    return program.run(run, values, aten.Tokens.of(samples), watch), program
  assert block is not None
  table = values[block.table] * block.scale
  norms = jnp.maximum(jnp.linalg.norm(table, axis=1), jnp.asarray(1e-12, table.dtype))
  ids = jnp.argmax(samples @ table.T / norms[None, None], -1).astype(jnp.int32)  # masks and comparisons see these
  (step,) = program.looked_up()
  return program.run(run, values, ids, watch, {step.place: samples / block.scale}), program


def _layers(network: _Network) -> tuple[Layer, ...]:
  """Returns the layers in the order in which they are used: modules with a matrix, and the norms behind them."""
  entries = {entry.name: entry for entry in network.layout.entries if entry.path[0] == 'params'}
  modules: dict[str, list[Entry]] = {}
  for name in dict.fromkeys([*network.evaluation.order(), *network.train.order(), *entries]):
    if name in entries:
      modules.setdefault(name.rpartition('.')[0], []).append(entries[name])
  grouped: list[tuple[str, list[tuple[str, ...]]]] = []
  for module, own in modules.items():
    own.sort(key=lambda entry: (-len(entry.shape), entry.name))
    paths = [entry.path[1:] for entry in own]
    if len(own[0].shape) > 1 or not grouped:
      grouped.append((module or 'root', paths))
    else:
      grouped[-1][1].extend(paths)
  return tuple(Layer(name, tuple(paths)) for name, paths in grouped)
