"""What a PyTorch module must be like to become a model: a copy of it, whose state is what its `state_dict` holds."""

import copy
import itertools
import random
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from gradleak.core import errors

_WRAPPED = ('_orig_mod', 'module', '_module')  # of torch.compile, DataParallel and Opacus: where they hold the module


def copied(torch: Any, module: Any) -> Any:
  """Returns a copy of a module on the CPU, without what compiles or distributes it.

  Raises:
    UsageError: for what is no module; for lazy modules without a shape; for parameters of other types than float32,
      with hooks of their own, or that share memory with other tensors; for complex or bfloat16 buffers; and for a
      module that cannot be copied.
  """
  if not isinstance(module, torch.nn.Module):
    raise errors.UsageError(
      f'from_torch takes an instance of torch.nn.Module, got {errors.shown(module)}; '
      'from_flax takes Linen modules, from_functions functions'
    )
  wrappers = ('OptimizedModule', 'DataParallel', 'DistributedDataParallel', 'GradSampleModule')
  while type(module).__name__ in wrappers:
    module = next(module.get_submodule(one) for one in _WRAPPED if one in dict(module.named_children()))
  for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
    if torch.nn.parameter.is_lazy(tensor):
      raise errors.UsageError(f'{name} is of a lazy module that has no shape yet: call the network on samples first')
  for name, parameter in module.named_parameters():
    if parameter.dtype != torch.float32:
      raise errors.UsageError(f'the parameter {name} is {parameter.dtype}, expected torch.float32: call module.float()')
    if parameter._backward_hooks or getattr(parameter, '_post_accumulate_grad_hooks', None):
      raise errors.UsageError(f'the parameter {name} has a hook on its gradient, which a model has not: remove it')
  for name, buffer in module.named_buffers():
    if buffer.is_complex() or buffer.dtype == torch.bfloat16:
      raise errors.UsageError(f'the buffer {name} is {buffer.dtype}, expected real numbers other than bfloat16')
  _check_memory(module)
  kept = [value for part in module.modules() for value in vars(part).values() if isinstance(value, torch.Tensor)]
  held = {id(value): value.detach().clone() for value in kept if not value.is_leaf}  # of a pass that is over
  try:
    return copy.deepcopy(module, held).cpu()
  except Exception as error:  # a user's network may raise anything
    raise errors.UsageError(
      f'the module {type(module).__name__} cannot be copied to the CPU ({errors.shown(str(error))}): give one whose '
      'parameters hold values, and that keeps no results of a forward pass'
    ) from error


def check_runs(torch: Any, module: Any, samples: Any, name: str) -> None:
  """Raises `UsageError` where a module fails on its samples, or draws from generators other than PyTorch's."""
  for train in (False, True):
    one = copy.deepcopy(module).train(train)
    before = random.getstate(), np.random.get_state()
    try:
      with torch.random.fork_rng(devices=[]):
        one(samples)
    except Exception as error:  # a user's network may raise anything
      if train:  # BatchNorm does not train on one value per channel; an export says what is wrong
        continue
      raise errors.UsageError(
        f'the module {name!r} fails on the example, in PyTorch {samples.dtype} of shape {tuple(samples.shape)} '
        f'({textwrap.shorten(f"{type(error).__name__}: {error}", 300, placeholder=" …")}). Tensors of images are '
        '[N, C, H, W], arrays of them [N, H, W, C], and integers are ids of tokens'
      ) from error
    if repr(before) != repr((random.getstate(), np.random.get_state())):
      raise errors.UsageError(
        f"the module {name!r} draws from Python's or NumPy's random numbers when it is called, which an export takes "
        'for constants: draw by torch.nn.functional.dropout or torch.bernoulli'
      )


def return_logits(torch: Any, module: Any, name: str) -> None:
  """Makes a module return its logits alone: the one value that it returns, or the entry 'logits' of a mapping.

  It raises `UsageError` where they are no tensor.
  """

  def logits(module: Any, given: Any, returned: Any) -> Any:
    values = torch.utils._pytree.tree_leaves(returned)
    only = values[0] if len(values) == 1 else None
    found = returned.get('logits', only) if isinstance(returned, Mapping) else only
    if not isinstance(found, torch.Tensor):
      raise errors.UsageError(
        f'the module {name!r} returns {len(values)} values, expected one tensor of logits, or a mapping with the entry '
        "'logits': wrap it in a module that returns these alone"
      )
    return found

  module.register_forward_hook(logits)


def _check_memory(module: Any) -> None:
  """Raises `UsageError` where a parameter lies in the memory of another tensor, so that a step moves both."""
  tensors = {**dict(module.named_buffers()), **dict(module.named_parameters())}
  spans = sorted((*_span(tensor), name) for name, tensor in tensors.items() if tensor.numel())
  trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
  for (_, end, name), (start, _, other) in itertools.pairwise(spans):
    if start < end and {name, other} & trained:
      raise errors.UsageError(
        f'{name} and {other} are two tensors in the same memory, of which a step of training moves both: tie them as '
        'one parameter, or clone one'
      )


def _span(tensor: Any) -> tuple[int, int]:
  """Returns where a tensor lies in memory, in bytes: its start, and what comes behind its end."""
  last = sum((side - 1) * stride for side, stride in zip(tensor.shape, tensor.stride(), strict=True))
  start = 0 if tensor.is_meta else tensor.data_ptr()
  return start, start if tensor.is_meta else start + (last + 1) * tensor.element_size()


def numbers(module: Any) -> Iterator[tuple[str, Any]]:
  """Returns (name, value) of the numbers and texts that a module and its parts hold as plain attributes of Python."""
  for path, part in module.named_modules():
    for name, value in vars(part).items():
      if isinstance(value, bool | int | float | str) and name != 'training':
        yield f'{path}.{name}'.removeprefix('.'), value


def example(torch: Any, given: Any, most: int) -> tuple[np.ndarray, tuple[int, ...]]:
  """Returns two to `most` samples in our layout, float32 or int32, and the shape of one; `UsageError` for others."""
  if isinstance(given, tuple | list) and any(isinstance(one, torch.Tensor) for one in given):
    raise errors.UsageError(f'the example is a {type(given).__name__} of tensors, expected one tensor of samples')
  if isinstance(given, torch.Tensor):
    given = (given.float() if given.is_floating_point() else given).detach().cpu().numpy()
    given = np.moveaxis(given, 1, -1) if given.ndim == 4 else given
  given = errors.host_array('the example', given)
  whole = given.dtype.kind in 'iu'
  if given.ndim < 2 or not given.size or (given.dtype.kind != 'f' and not whole):
    raise errors.UsageError(
      f'the example is {given.dtype} of shape {given.shape}, expected samples: [N, C, H, W] images'
    )
  given = given.astype(np.int32 if whole else np.float32)[:most]
  given = np.concatenate([given] * 2) if len(given) == 1 else given
  return given, tuple(given.shape[1:])
